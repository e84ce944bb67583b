//! Compute during loads, by the device's own clock: the arrival and compute time of each layer, and
//! the mutual slowdown.
//!
//! ```text
//!   probe    [idle] start . . . . . (ticket 0) mark (ticket 1) mark ...
//!   load            start, layer 0, layer 1, ...
//!   compute         start, (ticket 0) mark [layer 0] mark, (ticket 1) mark [layer 1] mark ...
//! ```
//!
//! All work is submitted while the probe idles, so no figure contains submission time. A run whose
//! submission took longer than the idle time is repeated with more idling.

use std::cell::Cell;

use larder_kernels::{
    CudaDevice, Device, Gated, KvShape, L1Pool, L2Pool, PagePair, Ticket, Transfer,
};

use larder_fake_cuda::compute::{Compute, Expected, List, Mark, Threads};

/// Allowed cost of the launches, waits and marks of a layer, in milliseconds: on an H200 they take
/// 15 to 30 us, and the marks of two streams that wait for the same event are up to 22 us apart.
pub const LAUNCH_MS: f64 = 0.030;

/// Allowed variation of GPU clocks between runs.
pub const WANDER: f64 = 0.01;

/// Allowed slowdown of compute by loads.
pub const SLOWER: f64 = 0.05;

/// Initial number of idle cycles. A GPU clock has about two million cycles per millisecond.
const IDLE_CYCLES: u64 = 40_000_000;

/// Attempts to idle longer than the submission takes.
const ATTEMPTS: u32 = 6;

/// Blocks per processor: many more than it runs at once, so that other processors compensate for a
/// processor used by loads.
const BLOCKS: u32 = 64;

/// Threads per block.
const BLOCK: u32 = 512;

/// The stand-in for the forward pass of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only spends time, so nothing can slow it down.
    Idle,
    /// Every processor computes on data in its caches.
    Busy,
    /// Every processor reads the device's memory.
    Streaming,
}

/// A kind and its amount.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub kind: Kind,
    /// Cycles, or passes over all pages.
    pub amount: u64,
}

/// The times of a layer, in milliseconds since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Layer {
    pub loaded: f64,
    pub begun: f64,
    pub computed: f64,
}

/// Results of three runs: one transfer alone, one forward pass alone, both together.
#[derive(Clone, Debug)]
pub struct Figures {
    pub load_ms: f64,
    pub compute_ms: f64,
    pub together_ms: f64,
    pub layers: Vec<Layer>,
}

impl Figures {
    /// The time limit: the longer of the two alone, plus one of its layers. If loads can slow down
    /// the compute, its time includes the allowed slowdown.
    pub fn bound_ms(&self, kind: Kind) -> f64 {
        let slower = if kind == Kind::Idle { 0.0 } else { SLOWER };
        let later = self.load_ms.max(self.compute_ms * (1.0 + slower));
        let layers = self.layers.len() as f64;
        later * (1.0 + 1.0 / layers + WANDER) + LAUNCH_MS * layers
    }

    /// Whether the run is within the limit and in order.
    pub fn is_good(&self, kind: Kind) -> bool {
        self.together_ms <= self.bound_ms(kind) && self.is_in_order()
    }

    /// No layer is computed before it is loaded. Layers are loaded and computed in order.
    pub fn is_in_order(&self) -> bool {
        // The marks of two streams that wait for the same event may come in any order.
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

/// The tickets that the forward pass waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// Each layer waits for its own ticket.
    ByLayer,
    /// The first layer waits for the ticket of the last. The baseline for comparison.
    ForAll,
}

/// A device, two pools and a forward pass.
pub struct Stage<'a> {
    device: &'a CudaDevice,
    l1: L1Pool,
    l2: L2Pool,
    pairs: Vec<PagePair>,
    /// The pages read by the forward pass: its own page, with one word per thread.
    small: L1Pool,
    /// A pool larger than any cache.
    large: L1Pool,
    compute: Compute,
    probe: Compute,
    idle_cycles: Cell<u64>,
}

impl<'a> Stage<'a> {
    /// `large_bytes` is the size that streaming compute reads per pass: larger than any cache.
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

    /// Layers of the forward pass.
    pub fn layers(&self) -> u32 {
        self.l1.shape().layers()
    }

    fn transfer(&self) -> Transfer {
        // SAFETY: no code reads these pages.
        unsafe { Transfer::new(&self.l1, &self.l2, self.pairs.clone()) }.unwrap()
    }

    /// Bytes per load.
    pub fn bytes(&self) -> u64 {
        self.transfer().bytes()
    }

    /// Calls `ask` to submit a run while the probe idles. Returns its result after all work has
    /// completed.
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
        panic!("the driver's queue does not hold this load while its stream stands still");
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

    /// Work of this kind that takes about `ms`.
    pub fn work_of(&self, kind: Kind, ms: f64) -> Work {
        let mut amount = if kind == Kind::Idle { 1_000_000 } else { 100 };
        for _ in 0..3 {
            let took = self.compute_ms(Work { kind, amount }, 4) / 4.0;
            amount = ((amount as f64 * ms / took.max(1e-6)) as u64).clamp(1, 1 << 40);
        }
        Work { kind, amount }
    }

    /// Time of `launches` launches alone.
    pub fn compute_ms(&self, work: Work, launches: u32) -> f64 {
        let list = self.list(work);
        let (_, (begun, done)) = self.run(|_, _| {
            let begun = self.compute.mark();
            (0..launches).for_each(|_| self.put(work, &list));
            (begun, self.compute.mark())
        });
        done.ms_since(&begun)
    }

    /// Time of a load alone.
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

    /// A load and a forward pass, each alone and both together.
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

    /// Time of `launches` launches alone and during continuous loads, and the time of a load during
    /// them.
    pub fn beside(&self, work: Work, launches: u32) -> Beside {
        let alone_ms = self.compute_ms(work, launches);
        let list = self.list(work);
        let load = || {
            let after = Ticket::done();
            self.device.load(self.transfer(), &after).unwrap()
        };
        let before = self.probe.mark();
        let alone = load();
        self.device
            .hold(self.probe.stream(), &last(&alone))
            .unwrap();
        let after = self.probe.mark();
        self.probe.wait();
        alone.wait().1.unwrap();
        let load_ms = after.ms_since(&before);
        let mut loads = (alone_ms * 1.5 / load_ms).ceil() as u32 + 1;
        for _ in 0..ATTEMPTS {
            // The first load runs while the rest is submitted, because a stream that stands still
            // takes a limited number of copies. Compute begins with the second load.
            let first = load();
            let mut loading = vec![load()];
            let under_way = last(&first);
            self.device.hold(self.compute.stream(), &under_way).unwrap();
            self.device.hold(self.probe.stream(), &under_way).unwrap();
            let (start, begun) = (self.probe.mark(), self.compute.mark());
            (0..launches).for_each(|_| self.put(work, &list));
            let done = self.compute.mark();
            loading.extend((1..loads).map(|_| load()));
            let all = last(&loading[loading.len() - 1]);
            self.device.hold(self.probe.stream(), &all).unwrap();
            let loaded = self.probe.mark();
            self.compute.wait();
            self.probe.wait();
            loading.push(first);
            for loading in loading {
                loading.wait().1.unwrap();
            }
            if done.ms_since(&start) <= loaded.ms_since(&start) {
                return Beside {
                    alone_ms,
                    beside_ms: done.ms_since(&begun),
                    load_ms: loaded.ms_since(&start) / f64::from(loads),
                };
            }
            loads *= 2;
        }
        panic!("compute outlasts all loads");
    }
}

impl Drop for Stage<'_> {
    /// Waits for the compute before the memory that it reads is freed.
    fn drop(&mut self) {
        self.compute.wait();
        self.probe.wait();
    }
}

/// Compute alone and during loads.
#[derive(Clone, Copy, Debug)]
pub struct Beside {
    pub alone_ms: f64,
    pub beside_ms: f64,
    /// Time of a load during compute, for most of its time.
    pub load_ms: f64,
}

impl Beside {
    /// The relative slowdown.
    pub fn slower(&self) -> f64 {
        self.beside_ms / self.alone_ms - 1.0
    }
}

/// Enough threads to occupy all processors; few if the CPU runs them.
fn threads() -> Threads {
    match Compute::processors() {
        0 => (1, 8),
        processors => (processors * BLOCKS, BLOCK),
    }
}

fn last(loading: &Gated<Transfer>) -> Ticket {
    loading.gates()[0].layer(u32::MAX)
}
