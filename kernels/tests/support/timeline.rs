//! Compute beside loads, by the device's own clock: when each layer was there, when each was computed, and what the one costs the other.
//!
//! ```text
//!   probe    [idle] start . . . . . (ticket 0) mark (ticket 1) mark ...
//!   load            start, layer 0, layer 1, ...
//!   compute         start, (ticket 0) mark [layer 0] mark, (ticket 1) mark [layer 1] mark ...
//! ```
//!
//! Everything is asked for while the probe idles, so that no figure holds the CPU's time for asking; a run in which the CPU was too
//! slow for that is made again with more idling.

use std::cell::Cell;

use larder_kernels::{
    CudaDevice, Device, Gated, KvShape, L1Pool, L2Pool, PagePair, Ticket, Transfer,
};

use super::compute::{Compute, Expected, List, Mark, Threads};

/// What launches and waits may cost a layer, in milliseconds.
pub const LAUNCH_MS: f64 = 0.010;

/// And how far the clocks of a GPU wander from run to run.
pub const WANDER: f64 = 0.01;

/// By how much loads may slow down what computes beside them.
pub const SLOWER: f64 = 0.05;

/// Cycles of idling to begin with; a clock of a GPU ticks some two million times a millisecond.
const IDLE_CYCLES: u64 = 40_000_000;

/// Attempts at idling for longer than the CPU asks.
const ATTEMPTS: u32 = 6;

/// Blocks for each processor: many more than it takes at once, so that a processor that loads use is made up for by the others.
const BLOCKS: u32 = 64;

/// Threads of a block.
const BLOCK: u32 = 512;

/// What stands in for the forward of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Takes its time and nothing else: nothing can slow it down.
    Idle,
    /// Every processor computes on what its caches hold.
    Busy,
    /// Every processor reads the device's memory.
    Streaming,
}

/// So much of it.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub kind: Kind,
    /// Cycles, or readings of all pages.
    pub amount: u64,
}

/// A layer, in milliseconds since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Layer {
    pub loaded: f64,
    pub begun: f64,
    pub computed: f64,
}

/// Three runs of one transfer and one forward.
#[derive(Clone, Debug)]
pub struct Figures {
    pub load_ms: f64,
    pub compute_ms: f64,
    pub together_ms: f64,
    pub layers: Vec<Layer>,
}

impl Figures {
    /// The later of both alone, and one layer of it; compute that can be slowed down by loads is given that.
    pub fn bound_ms(&self, kind: Kind) -> f64 {
        let slower = if kind == Kind::Idle { 0.0 } else { SLOWER };
        let later = self.load_ms.max(self.compute_ms * (1.0 + slower));
        let layers = self.layers.len() as f64;
        later * (1.0 + 1.0 / layers + WANDER) + LAUNCH_MS * layers
    }

    /// Whether both were as good as beside each other.
    pub fn is_good(&self, kind: Kind) -> bool {
        self.together_ms <= self.bound_ms(kind) && self.is_in_order()
    }

    /// No layer is computed before it is there, nor loaded or computed before the one before it.
    pub fn is_in_order(&self) -> bool {
        // The marks of two streams that wait for the same may come in any order.
        let waits = self
            .layers
            .iter()
            .all(|layer| layer.loaded <= layer.begun + LAUNCH_MS);
        let pairs = self.layers.iter().zip(self.layers.iter().skip(1));
        let mut rises =
            pairs.map(|(one, next)| one.loaded <= next.loaded && one.computed <= next.begun);
        waits && rises.all(|rises| rises)
    }
}

/// Which tickets the forward waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// A layer for its own.
    ByLayer,
    /// The first layer for that of the last: what this is to be better than.
    ForAll,
}

/// A device, two pools, a forward.
pub struct Stage<'a> {
    device: &'a CudaDevice,
    l1: L1Pool,
    l2: L2Pool,
    pairs: Vec<PagePair>,
    /// What the forward reads: a page of its own, with a word for each thread.
    small: L1Pool,
    /// The same, larger than any cache.
    large: L1Pool,
    compute: Compute,
    probe: Compute,
    idle_cycles: Cell<u64>,
}

impl<'a> Stage<'a> {
    /// `large_bytes` is what streaming compute reads at a time: more than any cache holds.
    pub fn new(
        device: &'a CudaDevice,
        (l1, l2): (L1Pool, L2Pool),
        pairs: Vec<PagePair>,
        large_bytes: u32,
    ) -> Stage<'a> {
        let threads = threads();
        let words = threads.0 * threads.1;
        let pool = |bytes| {
            let shape = KvShape::of_rows(larder_kernels::Attention::Mla, 1, bytes, 1).unwrap();
            device.alloc_l1(&shape, 1).unwrap()
        };
        Stage {
            device,
            l1,
            l2,
            pairs,
            small: pool(words * 8),
            large: pool(large_bytes),
            compute: Compute::new(threads),
            probe: Compute::new((1, 1)),
            idle_cycles: Cell::new(IDLE_CYCLES),
        }
    }

    /// Layers of the forward.
    pub fn layers(&self) -> u32 {
        self.l1.shape().layers()
    }

    fn transfer(&self) -> Transfer {
        // SAFETY: nobody looks at what these pages hold.
        unsafe { Transfer::new(&self.l1, &self.l2, self.pairs.clone()) }.unwrap()
    }

    /// Bytes of a load.
    pub fn bytes(&self) -> u64 {
        self.transfer().bytes()
    }

    /// Asks for a run while the probe idles: what `ask` returns, once all of it is over.
    fn run<T>(&self, ask: impl Fn(&Mark, &Ticket) -> T) -> (Mark, T) {
        for _ in 0..ATTEMPTS {
            self.probe.idle(self.idle_cycles.get());
            let start = self.probe.mark();
            let begun = self.device.record(self.probe.stream()).unwrap();
            self.device.hold(self.compute.stream(), &begun).unwrap();
            let asked = ask(&start, &begun);
            let in_time = !start.has_passed();
            self.compute.wait();
            self.probe.wait();
            if in_time {
                return (start, asked);
            }
            self.idle_cycles.set(self.idle_cycles.get() * 2);
        }
        panic!("asking takes longer than any idling");
    }

    fn put(&self, work: Work, list: &List) {
        match work.kind {
            Kind::Idle => self.compute.idle_apart(work.amount),
            Kind::Busy => self.compute.read_listed(&self.small, 0, list, 0),
            Kind::Streaming => self.compute.read_listed(&self.large, 0, list, 0),
        }
    }

    /// The pages that this work reads.
    fn list(&self, work: Work) -> List {
        let count = if work.kind == Kind::Idle {
            1
        } else {
            work.amount
        };
        let list = (0..count).map(|_| Expected { page: 0, seed: 0 });
        let list = self.compute.list(&list.collect::<Vec<_>>());
        self.compute.wait();
        list
    }

    /// So much of a kind as takes about that long.
    pub fn work_of(&self, kind: Kind, ms: f64) -> Work {
        let mut amount = if kind == Kind::Idle { 1_000_000 } else { 100 };
        for _ in 0..3 {
            let took = self.compute_ms(Work { kind, amount }, 4) / 4.0;
            amount = ((amount as f64 * ms / took.max(1e-6)) as u64).clamp(1, 1 << 40);
        }
        Work { kind, amount }
    }

    /// So many launches, alone.
    pub fn compute_ms(&self, work: Work, launches: u32) -> f64 {
        let list = self.list(work);
        let (_, (begun, done)) = self.run(|_, _| {
            let begun = self.compute.mark();
            (0..launches).for_each(|_| self.put(work, &list));
            (begun, self.compute.mark())
        });
        done.ms_since(&begun)
    }

    /// A load alone.
    pub fn load_ms(&self) -> f64 {
        let (start, (loading, loaded)) = self.run(|_, begun| {
            let loading = self.device.load(self.transfer(), begun).unwrap();
            self.device
                .hold(self.probe.stream(), &last(&loading))
                .unwrap();
            (loading, self.probe.mark())
        });
        loading.wait().1.unwrap();
        loaded.ms_since(&start)
    }

    /// A load and a forward, each alone and both together.
    pub fn figures(&self, work: Work, waits: Waits) -> Figures {
        let layers = self.together(work, waits);
        Figures {
            load_ms: self.load_ms(),
            compute_ms: self.compute_ms(work, self.layers()),
            together_ms: layers.last().map_or(0.0, |layer| layer.computed),
            layers,
        }
    }

    fn together(&self, work: Work, waits: Waits) -> Vec<Layer> {
        let list = self.list(work);
        let (start, (loading, marks)) = self.run(|_, begun| {
            let loading = self.device.load(self.transfer(), begun).unwrap();
            let marks = (0..self.layers()).map(|layer| {
                let ticket = loading.gates()[0].layer(layer);
                self.device.hold(self.probe.stream(), &ticket).unwrap();
                let loaded = self.probe.mark();
                let ticket = match waits {
                    Waits::ByLayer => ticket,
                    Waits::ForAll => last(&loading),
                };
                self.device.hold(self.compute.stream(), &ticket).unwrap();
                let begun = self.compute.mark();
                self.put(work, &list);
                [loaded, begun, self.compute.mark()]
            });
            let marks: Vec<[Mark; 3]> = marks.collect();
            (loading, marks)
        });
        loading.wait().1.unwrap();
        let layer = |marks: &[Mark; 3]| {
            let [loaded, begun, computed] = marks.each_ref().map(|mark| mark.ms_since(&start));
            Layer {
                loaded,
                begun,
                computed,
            }
        };
        marks.iter().map(layer).collect()
    }

    /// How much longer so many launches take while loads go on, all of that time; and the load's milliseconds beside them.
    pub fn beside(&self, work: Work, launches: u32) -> Beside {
        let alone_ms = self.compute_ms(work, launches);
        let list = self.list(work);
        let mut loads = (alone_ms * 1.5 / self.load_ms()).ceil() as u32 + 1;
        for _ in 0..ATTEMPTS {
            let (start, (loading, [first, begun, done, loaded])) = self.run(|_, begun| {
                let submit = |_| self.device.load(self.transfer(), begun).unwrap();
                let loading: Vec<Gated<Transfer>> = (0..loads).map(submit).collect();
                // Not before the first layer is there: loads are under way.
                let under_way = loading[0].gates()[0].layer(0);
                self.device.hold(self.compute.stream(), &under_way).unwrap();
                self.device.hold(self.probe.stream(), &under_way).unwrap();
                let (first, begun) = (self.probe.mark(), self.compute.mark());
                (0..launches).for_each(|_| self.put(work, &list));
                let done = self.compute.mark();
                let all = last(&loading[loading.len() - 1]);
                self.device.hold(self.probe.stream(), &all).unwrap();
                (loading, [first, begun, done, self.probe.mark()])
            });
            for loading in loading {
                loading.wait().1.unwrap();
            }
            if done.ms_since(&start) <= loaded.ms_since(&start) {
                return Beside {
                    alone_ms,
                    beside_ms: done.ms_since(&begun),
                    load_ms: loaded.ms_since(&first)
                        / (f64::from(loads) - 1.0 / f64::from(self.layers())),
                };
            }
            loads *= 2;
        }
        panic!("compute outlasts all loads");
    }
}

impl Drop for Stage<'_> {
    /// The memory that these read goes after this.
    fn drop(&mut self) {
        self.compute.wait();
        self.probe.wait();
    }
}

/// Compute alone and beside loads.
#[derive(Clone, Copy, Debug)]
pub struct Beside {
    pub alone_ms: f64,
    pub beside_ms: f64,
    /// A load, beside the compute for most of its time.
    pub load_ms: f64,
}

impl Beside {
    /// By how much it was slower, as a share.
    pub fn slower(&self) -> f64 {
        self.beside_ms / self.alone_ms - 1.0
    }
}

/// Enough to keep all processors busy; few where the CPU runs them.
fn threads() -> Threads {
    match Compute::processors() {
        0 => (1, 8),
        processors => (processors * BLOCKS, BLOCK),
    }
}

fn last(loading: &Gated<Transfer>) -> Ticket {
    loading.gates()[0].layer(u32::MAX)
}
