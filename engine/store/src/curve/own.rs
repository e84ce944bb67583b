//! The curve in the order in which the store evicts: a miniature of the store for each size
//! (Waldspurger, Saemundsson, Ahmad and Park: Cache Modeling and Optimization using Miniature
//! Simulations, ATC '17).
//!
//! Each has its own rate of sampling, so that it holds about [`PAGES`] pages, and its own order.
//!
//! The hits of the store itself are counted exactly. So the miniatures estimate two parts: the hits
//! of the store that another size would have had, too, and the misses of the store that it would
//! have had. Of pages that the store found and the sample lacks it takes all for hits: these are
//! mostly the few pages that are looked up most.
//!
//! At the present size the hit rate is known. So the estimates are adjusted: those up to the one of
//! the present size are scaled to end at the measured rate, and those above it, as misses, too.

use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::ids::NamespaceId;
use larder_base::runtime::Mutex;
use larder_core::hint::Hint;
use larder_core::policy::miniature::{Call, Miniature, Sampled};
use larder_core::policy::order::EvictionOrder;
use larder_core::policy::{PolicyMaker, make};

use super::{BySpace, FACTORS, Noted, Seen, is_past, rate_of};

/// Pages of a miniature. One with twice as many, of smaller pages, begins anew.
const PAGES: usize = 1024;

/// The size for which the smallest sizes are sampled: `Curve` samples no more pages.
const FACTOR_MIN: f64 = 0.7;

/// Calls that wait, or their sampled pages, before a call simulates them itself.
const WAITING_MAX: usize = 1 << 12;

/// Shortest time between two counts that lookups ask for: further lookups are not noted meanwhile.
/// A miniature takes up to a microsecond for a page.
const PAUSE_MS: u64 = 500;

/// Ends of chains whose nearest sampled page is known.
const TIPS: usize = 1 << 8;

/// A call.
#[derive(Clone, Copy)]
pub(super) struct Event {
    pub namespace: NamespaceId,
    /// Usable blocks that a page takes.
    pub blocks: u32,
    pub pages: usize,
    /// Its sampled pages.
    pub sampled: usize,
    /// The last page that was found or put.
    pub tip: Option<u64>,
    pub at_ms: u64,
    pub kind: Kind,
}

#[derive(Clone, Copy)]
pub(super) enum Kind {
    Lookup {
        page_blocks: u32,
        /// Pages before the first page that the store lacked.
        found: usize,
    },
    /// A put, or a touch.
    Use {
        is_put: bool,
        parent: Option<u64>,
        hint: Hint,
        new_pages: u32,
    },
}

/// See the module.
pub(super) struct Own {
    /// Locked before `waiting`.
    all: Mutex<All>,
    /// Pages of these calls are in their order, the first one first.
    waiting: Mutex<Noted>,
    /// Pages with a hash up to it are noted.
    noted: AtomicU64,
    /// When lookups may ask for a count again.
    pause_ms: AtomicU64,
}

struct All {
    maker: PolicyMaker<dyn EvictionOrder>,
    segments: usize,
    size_blocks: u64,
    sizes: Vec<Size>,
    counted: BySpace<Counted>,
    since_ms: Option<u64>,
    /// The memory of the calls that were simulated last.
    spare: Noted,
    chain: Vec<Sampled>,
}

/// A size.
struct Size {
    factor: f64,
    /// Pages with a hash up to it are sampled.
    threshold: u64,
    /// None before the first put.
    small: Option<Miniature>,
    /// By the hash of a page that was found or put last: the nearest sampled page of its chain.
    tips: Vec<(u64, Option<u64>)>,
}

/// Pages looked up, of a namespace.
#[derive(Clone, Copy, Default)]
struct Counted {
    /// That the store had, and that it had not.
    had: f64,
    missed: f64,
    sizes: [Estimated; FACTORS.len()],
}

/// As the sample of a size estimates them.
#[derive(Clone, Copy, Default)]
struct Estimated {
    had: f64,
    missed: f64,
    /// Hits of the size among both.
    hits_of_had: f64,
    hits_of_missed: f64,
}

/// The hit rates of the sizes.
#[derive(Clone, Copy, Default)]
pub(super) struct Rates {
    pub adjusted: [f64; FACTORS.len()],
    /// Of the present size, before the adjustment.
    pub present: f64,
}

impl Counted {
    fn rates(&self) -> Rates {
        let asked = (self.had + self.missed).max(1.0);
        let estimated = self.sizes.map(|of| {
            let lost = of.had - of.hits_of_had;
            let won = of.hits_of_missed / of.missed.max(1.0);
            (((self.had - lost).max(0.0) + self.missed * won) / asked).min(1.0)
        });
        let measured = self.had / asked;
        let present = FACTORS.iter().position(|of| *of == 1.0);
        let present = present.map_or(measured, |at| estimated[at]);
        Rates {
            adjusted: estimated.map(|rate| match rate <= present {
                true => measured * share(rate, present),
                false => 1.0 - (1.0 - measured) * share(1.0 - rate, 1.0 - present),
            }),
            present,
        }
    }

    fn halve(&mut self) {
        self.had /= 2.0;
        self.missed /= 2.0;
        for of in &mut self.sizes {
            of.had /= 2.0;
            of.missed /= 2.0;
            of.hits_of_had /= 2.0;
            of.hits_of_missed /= 2.0;
        }
    }
}

/// A part of a whole; all of nothing.
fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 1.0 }
}

impl Own {
    pub(super) fn new(
        maker: PolicyMaker<dyn EvictionOrder>,
        segments: usize,
        size_blocks: u64,
    ) -> Own {
        let all = All {
            maker,
            segments,
            size_blocks,
            sizes: FACTORS.map(Size::new).into(),
            counted: BySpace::default(),
            since_ms: None,
            spare: Noted::default(),
            chain: Vec::new(),
        };
        Own {
            all: Mutex::new(all),
            waiting: Mutex::default(),
            noted: AtomicU64::new(u64::MAX),
            pause_ms: AtomicU64::new(0),
        }
    }

    /// The store has another size from now on.
    pub(super) fn resize(&self, size_blocks: u64) {
        let mut all = self.all.lock();
        self.waiting.lock().clear();
        all.size_blocks = size_blocks;
        all.sizes = FACTORS.map(Size::new).into();
        all.counted = BySpace::default();
        all.since_ms = None;
    }

    /// Takes over the noted calls, with the threshold of their sample.
    pub(super) fn wait(&self, noted: &Noted, threshold: u64) {
        self.noted.store(threshold, Ordering::Relaxed);
        let mut waiting = self.waiting.lock();
        for (event, seen) in noted.calls() {
            let first = waiting.pages.len();
            let sampled = seen.iter().rev().filter(|page| page.hash <= threshold);
            waiting.pages.extend(sampled);
            let sampled = waiting.pages.len() - first;
            waiting.events.push(Event { sampled, ..*event });
        }
        let is_full = waiting.fill() >= WAITING_MAX;
        drop(waiting);
        if is_full {
            self.simulate();
        }
    }

    /// Whether a lookup may ask for a count now.
    pub(super) fn takes_more(&self, now_ms: u64) -> bool {
        let is_over = now_ms >= self.pause_ms.load(Ordering::Relaxed);
        if is_over {
            self.pause_ms.store(now_ms + PAUSE_MS, Ordering::Relaxed);
        }
        is_over
    }

    /// The waiting calls are to be simulated soon.
    pub(super) fn is_due(&self) -> bool {
        self.waiting.lock().fill() >= WAITING_MAX / 2
    }

    /// Simulates the waiting calls.
    pub(super) fn simulate(&self) {
        let mut all = self.all.lock();
        let mut waiting = std::mem::take(&mut all.spare);
        std::mem::swap(&mut *self.waiting.lock(), &mut waiting);
        let noted = self.noted.load(Ordering::Relaxed);
        for (event, seen) in waiting.calls() {
            all.simulate(event, seen, noted);
        }
        waiting.clear();
        all.spare = waiting;
    }

    /// The hit rates of the sizes, by namespace.
    pub(super) fn rates(&self) -> Vec<(Option<NamespaceId>, Rates)> {
        let all = self.all.lock();
        let counted = all.counted.iter();
        counted
            .map(|(of, counted)| (*of, counted.rates()))
            .collect()
    }

    /// Bytes allocated.
    pub(super) fn ram_bytes(&self) -> usize {
        let all = self.all.lock();
        let noted = |noted: &Noted| {
            noted.events.capacity() * size_of::<Event>()
                + noted.pages.capacity() * size_of::<Seen>()
        };
        let of_size = |size: &Size| {
            size.tips.capacity() * size_of::<(u64, Option<u64>)>()
                + size.small.as_ref().map_or(0, Miniature::ram_bytes)
        };
        noted(&all.spare)
            + noted(&self.waiting.lock())
            + all.sizes.iter().map(of_size).sum::<usize>()
            + all.counted.0.capacity() * size_of::<(Option<NamespaceId>, Counted)>()
    }
}

impl All {
    fn simulate(&mut self, event: &Event, seen: &[Seen], noted: u64) {
        let is_past =
            matches!(event.kind, Kind::Lookup { .. }) && is_past(&mut self.since_ms, event.at_ms);
        if is_past {
            self.counted.iter_mut().for_each(Counted::halve);
        }
        if matches!(event.kind, Kind::Use { is_put: true, .. }) && event.blocks > 0 {
            for size in &mut self.sizes {
                size.begin(self.size_blocks, event.blocks, noted, || {
                    let mut order = make(&self.maker);
                    order.estimates();
                    let _ = order.opened(self.segments);
                    order.loaded();
                    order
                });
            }
        }
        let counted = match event.kind {
            Kind::Lookup { found, .. } => {
                let counted = self.counted.of(event.namespace);
                counted.had += found as f64;
                counted.missed += (event.pages - found) as f64;
                Some(counted)
            }
            Kind::Use { .. } => None,
        };
        let mut estimates = counted.map(|counted| counted.sizes.iter_mut());
        for size in &mut self.sizes {
            let chain = &mut self.chain;
            chain.clear();
            let sampled = seen.iter().filter(|page| page.hash <= size.threshold);
            chain.extend(sampled.map(|page| Sampled {
                hash: page.hash,
                depth: page.depth,
                was_stored: page.was_stored,
            }));
            let of = estimates.as_mut().and_then(Iterator::next);
            size.simulate(event, chain, of);
        }
    }
}

impl Size {
    fn new(factor: f64) -> Size {
        Size {
            factor,
            threshold: u64::MAX,
            small: None,
            tips: vec![(0, None); TIPS],
        }
    }

    /// Begins with pages of so many blocks. It begins anew if its pages have become too many, and
    /// if pages up to a lower threshold are noted than it samples.
    fn begin(
        &mut self,
        size_blocks: u64,
        blocks: u32,
        noted: u64,
        order: impl FnOnce() -> Box<dyn EvictionOrder>,
    ) {
        let room = self.factor * size_blocks as f64;
        let rate = match &self.small {
            None => {
                let pages = room.max(FACTOR_MIN * size_blocks as f64) / f64::from(blocks);
                (PAGES as f64 / pages.max(PAGES as f64)).min(rate_of(noted))
            }
            Some(small) if small.len() > 2 * PAGES => rate_of(self.threshold) / 2.0,
            Some(_) if noted < self.threshold => rate_of(noted) / 2.0,
            Some(_) => return,
        };
        self.threshold = (rate * u64::MAX as f64) as u64;
        self.small = Some(Miniature::new(order(), (rate * room) as u64));
        self.tips.fill((0, None));
    }

    fn simulate(&mut self, event: &Event, chain: &mut [Sampled], of: Option<&mut Estimated>) {
        let mut call = Call {
            namespace: event.namespace,
            blocks: event.blocks,
            hint: Hint::default(),
            new_pages: 0,
            now_ms: event.at_ms,
        };
        let last = match event.kind {
            Kind::Lookup { found, .. } => {
                let had = chain.partition_point(|page| page.was_stored);
                let hits = self.small.as_mut();
                let hits = hits.map_or(0, |small| small.looked_up(chain, event.at_ms));
                if let Some(of) = of {
                    let rate = rate_of(self.threshold);
                    let add = |sum: &mut f64, pages: usize| *sum += pages as f64 / rate;
                    add(&mut of.had, had);
                    add(&mut of.missed, chain.len() - had);
                    add(&mut of.hits_of_had, hits.min(had));
                    add(&mut of.hits_of_missed, hits.saturating_sub(had));
                }
                debug_assert!(found <= event.pages, "it found more than it looked for");
                // The store need not put what it had. This size has to.
                if hits < had
                    && let Some(small) = &mut self.small
                {
                    call.new_pages = (event.pages as u32).saturating_sub(chain[hits].depth);
                    let above = hits.checked_sub(1).map(|at| chain[at].hash);
                    let put = &mut chain[hits..had];
                    put.iter_mut().for_each(|page| page.was_stored = false);
                    small.put(above, put, &call);
                }
                chain[..had].last().map(|page| page.hash)
            }
            Kind::Use {
                is_put,
                parent,
                hint,
                new_pages,
            } => {
                (call.hint, call.new_pages) = (hint, new_pages);
                let above = parent.and_then(|parent| match parent <= self.threshold {
                    true => Some(parent),
                    false => self.above(parent),
                });
                if let Some(small) = &mut self.small
                    && !chain.is_empty()
                {
                    match is_put {
                        true => small.put(above, chain, &call),
                        false => small.touched(chain, &call),
                    }
                }
                chain.last().map(|page| page.hash).or(above)
            }
        };
        if let Some(tip) = event.tip {
            self.tips[tip as usize % TIPS] = (tip, last);
        }
    }

    /// The nearest sampled page of the chain that this page ends.
    fn above(&self, page: u64) -> Option<u64> {
        let (of, above) = self.tips[page as usize % TIPS];
        above.filter(|_| of == page)
    }
}
