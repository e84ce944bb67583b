//! The hit rate of a store of another size, for the lookups that the store gets: the miss ratio
//! curve of LRU, by namespace, in fixed memory.
//!
//! SHARDS of fixed size, with its adjustment (Waldspurger, Park, Garthwaite, Ahmad: Efficient MRC
//! Construction with SHARDS, FAST '15). Pages whose hash is below a threshold are sampled. For each
//! lookup of a sampled page the blocks of the sampled pages used since its last use, divided by the
//! rate of sampling, are its distance: a store of more blocks has it. The threshold falls as the
//! sampled pages become too many. The difference between the lookups and their estimate is added to
//! the shortest distance, which pages have that are looked up most.
//!
//! - A page enters by a put. A lookup of a page that never entered is a miss in every size.
//! - A call uses its pages from the last one to the first, as the store does. So a page is never
//!   older than the page behind it in its chain, and a hit has all pages before it.
//! - Pages further away than in the largest size are forgotten.
//! - A lookup notes its sampled pages. They are counted by the housekeeper when they are many, by
//!   a put before its own pages, and by a report.
//! - After two days of lookups all counters are halved: they cover one to two days.
//!
//! In a store that follows another order than LRU the same calls go to `own`, which has the curve
//! of that order.

mod own;
mod report;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::ids::NamespaceId;
use larder_base::runtime::{Mutex, MutexGuard};
use larder_core::hint::Hint;
use larder_core::policy::PolicyMaker;
use larder_core::policy::order::EvictionOrder;
use larder_format::PageKey;
use own::{Event, Kind, Own, Rates};
pub use report::{CurveReport, SpaceCurve};

/// The sizes, as multiples of the present size.
pub const FACTORS: [f64; 10] = [0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0];

/// Most namespaces with a curve of their own. All others share one.
pub const OWN_MAX: usize = 64;

/// Most sampled pages: they fit a table of 16,384 entries.
const PAGES_MAX: usize = 14_000;

/// Most places in the order of uses, before the free ones are closed up.
const PLACES_MAX: usize = 1 << 15;

/// Places of an empty order.
const PLACES_MIN: usize = 1 << 10;

/// Most lookups that are noted and not counted, and most of their sampled pages. Further ones are
/// not part of the curve.
const NOTED_MAX: usize = 1 << 13;

/// The part of the threshold that is left when it falls.
const FALL: f64 = 0.875;

/// The time after which counters are halved.
const HALVED_MS: u64 = 2 * 24 * 60 * 60 * 1000;

/// Odd, to mix the bits of a key and the number of a namespace.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;
const SEED: u64 = 0xd129_42f1_9e21_5a55;

/// See the module.
pub struct Curve {
    /// Pages with a hash below it are sampled.
    threshold: AtomicU64,
    /// Locked before `noted`.
    state: Mutex<State>,
    noted: Mutex<Noted>,
    /// The curve of the order that the store follows, if that is not LRU.
    own: Option<Own>,
}

/// Calls that are not counted yet.
#[derive(Default)]
struct Noted {
    events: Vec<Event>,
    /// The sampled pages of all these calls, each from its last page to its first.
    pages: Vec<Seen>,
}

/// A sampled page of a call.
#[derive(Clone, Copy)]
struct Seen {
    hash: u64,
    /// Pages before it in its chain.
    depth: u32,
    /// The store had it before the call.
    was_stored: bool,
}

impl Noted {
    fn fill(&self) -> usize {
        self.events.len().max(self.pages.len())
    }

    fn clear(&mut self) {
        self.events.clear();
        self.pages.clear();
    }

    /// Each call with its sampled pages, the last one first.
    fn calls(&self) -> impl Iterator<Item = (&Event, &[Seen])> {
        let mut pages = &self.pages[..];
        self.events.iter().map(move |event| {
            let (of, others) = pages.split_at(event.sampled);
            pages = others;
            (event, of)
        })
    }
}

/// The pages of a put, or of a touch.
pub struct Used<'a> {
    pub namespace: NamespaceId,
    /// Usable blocks that a page takes.
    pub blocks: u32,
    /// The page above the first one, if there is one.
    pub parent: Option<&'a PageKey>,
    pub hint: Hint,
    pub now_ms: u64,
}

/// Hashes are hashes already.
#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {}

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// A sampled page.
#[derive(Clone, Copy)]
struct Page {
    /// Its place in the order of uses.
    place: u32,
    blocks: u32,
}

/// The counters of a namespace.
#[derive(Clone, Copy, Default)]
struct Counted {
    /// Pages looked up, and their number as the sampled ones estimate it.
    asked: f64,
    estimated: f64,
    hits: [f64; FACTORS.len()],
    page_blocks: u32,
}

/// Counters by namespace, those of all further ones together.
struct BySpace<T>(Vec<(Option<NamespaceId>, T)>);

impl<T> Default for BySpace<T> {
    fn default() -> BySpace<T> {
        BySpace(Vec::new())
    }
}

impl<T: Default> BySpace<T> {
    fn of(&mut self, namespace: NamespaceId) -> &mut T {
        let find = |all: &Self, name| all.0.iter().position(|(of, _)| *of == name);
        let known = find(self, Some(namespace));
        let name = Some(namespace).filter(|_| known.is_some() || self.0.len() < OWN_MAX);
        let at = known.or_else(|| find(self, name)).unwrap_or_else(|| {
            self.0.push((name, T::default()));
            self.0.len() - 1
        });
        &mut self.0[at].1
    }

    fn iter(&self) -> impl Iterator<Item = &(Option<NamespaceId>, T)> {
        self.0.iter()
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut().map(|(_, of)| of)
    }
}

/// Whether the counters since this time are to be halved, at the time of a lookup. They cover half
/// of the time from then on.
fn is_past(since_ms: &mut Option<u64>, now_ms: u64) -> bool {
    let since = since_ms.get_or_insert(now_ms);
    let is_past = now_ms.saturating_sub(*since) > HALVED_MS;
    if is_past {
        *since = now_ms - HALVED_MS / 2;
    }
    is_past
}

struct State {
    pages: HashMap<u64, Page, BuildHasherDefault<AsItIs>>,
    order: Order,
    /// The present size.
    size_blocks: u64,
    counted: BySpace<Counted>,
    /// The time of the first lookup that the counters cover.
    since_ms: Option<u64>,
    /// The memory of the lookups that were counted last.
    spare: Noted,
}

/// The order of uses: places in time, each with the blocks of the page that was used then. Sums of
/// blocks are in a Fenwick tree.
struct Order {
    /// The page at each place, or none.
    at: Vec<Option<u64>>,
    sums: Vec<u64>,
    next: usize,
    /// Places before it are free.
    first: usize,
    total: u64,
}

impl Order {
    fn new(places: usize) -> Order {
        Order {
            at: vec![None; places],
            sums: vec![0; places + 1],
            next: 0,
            first: 0,
            total: 0,
        }
    }

    fn add(&mut self, place: usize, change: impl Fn(u64) -> u64) {
        let mut node = place + 1;
        while let Some(sum) = self.sums.get_mut(node) {
            *sum = change(*sum);
            node += node & node.wrapping_neg();
        }
    }

    fn push(&mut self, hash: u64, blocks: u32) -> u32 {
        let place = self.next;
        self.at[place] = Some(hash);
        self.next += 1;
        self.total += u64::from(blocks);
        self.add(place, |sum| sum + u64::from(blocks));
        place as u32
    }

    fn remove(&mut self, page: Page) {
        let place = page.place as usize;
        self.at[place] = None;
        self.total -= u64::from(page.blocks);
        self.add(place, |sum| sum - u64::from(page.blocks));
    }

    /// Blocks of the pages used after this place.
    fn since(&self, place: u32) -> u64 {
        let (mut node, mut before) = (place as usize + 1, 0);
        while node > 0 {
            before += self.sums[node];
            node &= node - 1;
        }
        self.total - before
    }

    /// The page whose last use is the oldest.
    fn oldest(&mut self) -> Option<u64> {
        while self.first < self.next {
            if let Some(hash) = self.at[self.first] {
                return Some(hash);
            }
            self.first += 1;
        }
        None
    }
}

/// The hash of a page. A key is a hash already, except in tests.
fn hash(namespace: NamespaceId, key: &PageKey) -> u64 {
    let bytes = key.as_bytes().first_chunk().copied().unwrap_or_default();
    let seed = u64::from(namespace.0).wrapping_mul(SEED);
    let mixed = (u64::from_le_bytes(bytes) ^ seed).wrapping_mul(MIX);
    let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(MIX);
    mixed ^ (mixed >> 29)
}

impl Curve {
    /// Of a store in which pages may take so many blocks, with the order that it follows if that
    /// is not LRU, and its segments.
    pub fn new(size_blocks: u64, order: Option<(PolicyMaker<dyn EvictionOrder>, usize)>) -> Curve {
        Curve {
            threshold: AtomicU64::new(u64::MAX),
            state: Mutex::new(State {
                pages: HashMap::default(),
                order: Order::new(PLACES_MIN),
                size_blocks,
                counted: BySpace::default(),
                since_ms: None,
                spare: Noted::default(),
            }),
            noted: Mutex::default(),
            own: order.map(|(maker, segments)| Own::new(maker, segments, size_blocks)),
        }
    }

    /// The store has another size from now on.
    pub fn resize(&self, size_blocks: u64) {
        let mut state = self.counted();
        if state.size_blocks != size_blocks {
            state.size_blocks = size_blocks;
            state.counted = BySpace::default();
            state.since_ms = None;
            if let Some(own) = &self.own {
                own.resize(size_blocks);
            }
        }
    }

    /// Notes a lookup of these pages that found the first `found` of them, with the blocks of each
    /// and the usable blocks that each takes. It waits for no other thread: a lookup beside another
    /// call may not be noted. True if the noted calls are to be counted.
    pub fn looked_up(
        &self,
        namespace: NamespaceId,
        (page_blocks, blocks): (u32, u32),
        (keys, found): (&[PageKey], usize),
        now_ms: u64,
    ) -> bool {
        let Some(mut noted) = self.noted.try_lock() else {
            return false;
        };
        let before = noted.fill();
        if before >= NOTED_MAX {
            return false;
        }
        let first = noted.pages.len();
        let pages = keys.iter().enumerate();
        let pages = pages.map(|(at, key)| (key, at as u32, at < found));
        noted.pages.extend(self.sampled(namespace, pages));
        let event = Event {
            namespace,
            blocks,
            pages: keys.len(),
            sampled: noted.pages.len() - first,
            tip: found.checked_sub(1).map(|at| hash(namespace, &keys[at])),
            at_ms: now_ms,
            kind: Kind::Lookup { page_blocks, found },
        };
        noted.events.push(event);
        let is_full = noted.fill() >= NOTED_MAX / 2;
        match &self.own {
            None => before < NOTED_MAX / 2 && is_full,
            Some(own) => is_full && own.takes_more(now_ms),
        }
    }

    /// The sampled pages among these, from the last one to the first.
    fn sampled<'a>(
        &self,
        namespace: NamespaceId,
        pages: impl DoubleEndedIterator<Item = (&'a PageKey, u32, bool)>,
    ) -> impl Iterator<Item = Seen> {
        let threshold = self.threshold.load(Ordering::Relaxed);
        let seen = pages.rev().map(move |(key, depth, was_stored)| Seen {
            hash: hash(namespace, key),
            depth,
            was_stored,
        });
        seen.filter(move |page| page.hash <= threshold)
    }

    /// Bytes allocated for the order that the store follows.
    pub fn own_ram_bytes(&self) -> usize {
        self.own.as_ref().map_or(0, Own::ram_bytes)
    }

    /// Counts the noted calls.
    pub fn count(&self) {
        drop(self.counted());
        if let Some(own) = &self.own {
            own.simulate();
        }
    }

    /// The state, after the noted calls.
    fn counted(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        let mut noted = std::mem::take(&mut state.spare);
        std::mem::swap(&mut *self.noted.lock(), &mut noted);
        let threshold = self.threshold.load(Ordering::Relaxed);
        for (event, sampled) in noted.calls() {
            state.looked_up(event, sampled, threshold);
        }
        if let Some(own) = &self.own {
            own.wait(&noted, threshold);
        }
        noted.clear();
        state.spare = noted;
        state
    }

    /// These pages are stored by a put, with their depths and whether the store had each before.
    /// True if the noted calls are to be counted.
    pub fn put<'a>(
        &self,
        used: &Used<'_>,
        pages: impl DoubleEndedIterator<Item = (&'a PageKey, u32, bool)> + Clone,
    ) -> bool {
        let sampled: Vec<Seen> = self.sampled(used.namespace, pages.clone()).collect();
        let is_due = self.own.is_some() && self.note_use((used, true), &sampled, pages);
        if sampled.is_empty() {
            return is_due;
        }
        let mut state = self.counted();
        let mut threshold = self.threshold.load(Ordering::Relaxed);
        for Seen { hash, .. } in sampled {
            if hash > threshold || state.used(hash, used.blocks).is_some() {
                continue;
            }
            state.enter(hash, used.blocks);
            state.forget(rate_of(threshold));
            while state.pages.len() > PAGES_MAX {
                threshold = (threshold as f64 * FALL) as u64;
                state.thin(threshold);
            }
        }
        self.threshold.store(threshold, Ordering::Relaxed);
        is_due
    }

    /// These stored pages were touched, which counts for the order that the store follows. True if
    /// the noted calls are to be counted.
    pub fn touched(&self, used: &Used<'_>, keys: &[PageKey]) -> bool {
        let pages = keys.iter().enumerate();
        let pages = pages.map(|(at, key)| (key, at as u32, true));
        self.own.is_some() && {
            let sampled: Vec<Seen> = self.sampled(used.namespace, pages.clone()).collect();
            self.note_use((used, false), &sampled, pages)
        }
    }

    /// Notes a put or a touch. True if the noted calls are to be counted.
    fn note_use<'a>(
        &self,
        (used, is_put): (&Used<'_>, bool),
        sampled: &[Seen],
        pages: impl DoubleEndedIterator<Item = (&'a PageKey, u32, bool)> + Clone,
    ) -> bool {
        if self.noted.lock().fill() >= NOTED_MAX {
            drop(self.counted());
        }
        let name = |key| hash(used.namespace, key);
        let tip = pages.clone().next_back().filter(|_| is_put);
        let mut noted = self.noted.lock();
        let before = noted.fill();
        noted.pages.extend_from_slice(sampled);
        noted.events.push(Event {
            namespace: used.namespace,
            blocks: used.blocks,
            pages: pages.clone().count(),
            sampled: sampled.len(),
            tip: tip.map(|(key, ..)| name(key)),
            at_ms: used.now_ms,
            kind: Kind::Use {
                is_put,
                parent: used.parent.map(name),
                hint: used.hint,
                new_pages: pages.filter(|(.., was_stored)| !was_stored).count() as u32,
            },
        });
        let is_due = before < NOTED_MAX / 2 && noted.fill() >= NOTED_MAX / 2;
        drop(noted);
        is_due || self.own.as_ref().is_some_and(Own::is_due)
    }

    /// The curves. `name` gives the fingerprint of a namespace.
    pub fn report(&self, now_ms: u64, name: impl Fn(NamespaceId) -> Option<String>) -> CurveReport {
        self.count();
        let state = self.counted();
        let own = self.own.as_ref().map(Own::rates);
        let block = larder_format::BLOCK_BYTES as f64;
        let all: f64 = state.counted.iter().map(|(_, of)| of.asked).sum();
        let mut spaces: Vec<SpaceCurve> = Vec::new();
        for (namespace, of) in state.counted.iter() {
            let bytes = f64::from(of.page_blocks) * block * of.asked;
            let own = own.as_ref().map(|own| {
                let own = own.iter().find(|(name, _)| name == namespace);
                own.map_or(Rates::default(), |(_, rates)| *rates)
            });
            let rates = of.hit_rates();
            let evicted = own.map_or(rates, |own| own.adjusted);
            let named = namespace.and_then(&name);
            spaces.push(SpaceCurve {
                fingerprint: named.unwrap_or_else(|| crate::spaces::OTHER.to_owned()),
                pages_requested: of.asked as u64,
                read_bytes: evicted.iter().map(|rate| (rate * bytes) as u64).collect(),
                hit_rates: rates.to_vec(),
                own_hit_rates: own.map_or(Vec::new(), |own| own.adjusted.to_vec()),
                miniature_hit_rate: own.map(|own| own.present),
                is_rough: of.asked < all * ROUGH,
            });
        }
        spaces.sort_by_key(|space| std::cmp::Reverse(space.pages_requested));
        let since_ms = state.since_ms.unwrap_or(now_ms);
        CurveReport {
            size_bytes: state.size_blocks * larder_format::BLOCK_BYTES as u64,
            seconds: now_ms.saturating_sub(since_ms) as f64 / 1000.0,
            sampled: rate_of(self.threshold.load(Ordering::Relaxed)),
            spaces,
        }
    }
}

/// The part of the lookups below which a curve is rough.
const ROUGH: f64 = 0.05;

fn rate_of(threshold: u64) -> f64 {
    (threshold as f64 + 1.0) / 2.0_f64.powi(64)
}

impl Counted {
    fn add(&mut self, more: &Counted) {
        self.asked += more.asked;
        self.estimated += more.estimated;
        self.page_blocks = more.page_blocks;
        for (hits, more) in self.hits.iter_mut().zip(more.hits) {
            *hits += more;
        }
    }

    fn halve(&mut self) {
        self.asked /= 2.0;
        self.estimated /= 2.0;
        self.hits = self.hits.map(|hits| hits / 2.0);
    }

    /// With the adjustment: lookups that the sampled pages miss are of the shortest distance.
    fn hit_rates(&self) -> [f64; FACTORS.len()] {
        let missed = self.asked - self.estimated;
        self.hits
            .map(|hits| ((hits + missed) / self.asked.max(1.0)).clamp(0.0, 1.0))
    }
}

impl State {
    /// Counts a lookup, with its sampled pages as of a threshold at or above this one.
    fn looked_up(&mut self, event: &Event, sampled: &[Seen], threshold: u64) {
        let Kind::Lookup { page_blocks, .. } = event.kind else {
            return;
        };
        let rate = rate_of(threshold);
        if is_past(&mut self.since_ms, event.at_ms) {
            self.counted.iter_mut().for_each(Counted::halve);
        }
        let mut counted = Counted {
            asked: event.pages as f64,
            page_blocks,
            ..Counted::default()
        };
        for Seen { hash, .. } in sampled.iter().filter(|page| page.hash <= threshold) {
            counted.estimated += 1.0 / rate;
            if let Some(since) = self.used(*hash, event.blocks) {
                let distance = since as f64 / rate + f64::from(event.blocks);
                for (hits, factor) in counted.hits.iter_mut().zip(FACTORS) {
                    if distance <= factor * self.size_blocks as f64 {
                        *hits += 1.0 / rate;
                    }
                }
            }
        }
        self.counted.of(event.namespace).add(&counted);
    }

    /// A use of a page: the blocks of sampled pages since its last use; `None` if it is not there.
    fn used(&mut self, hash: u64, blocks: u32) -> Option<u64> {
        if self.order.next == self.order.at.len() {
            self.close_up();
        }
        let page = self.pages.get_mut(&hash)?;
        let since = self.order.since(page.place);
        self.order.remove(*page);
        let place = self.order.push(hash, blocks);
        *page = Page { place, blocks };
        Some(since)
    }

    fn enter(&mut self, hash: u64, blocks: u32) {
        if self.order.next == self.order.at.len() {
            self.close_up();
        }
        let place = self.order.push(hash, blocks);
        self.pages.insert(hash, Page { place, blocks });
    }

    /// Makes room behind the last place.
    fn close_up(&mut self) {
        let held = self.order.at.iter().flatten().count();
        let places = (4 * held).next_power_of_two().clamp(PLACES_MIN, PLACES_MAX);
        let former = std::mem::replace(&mut self.order, Order::new(places));
        for hash in former.at.into_iter().flatten() {
            if let Some(page) = self.pages.get_mut(&hash) {
                page.place = self.order.push(hash, page.blocks);
            }
        }
    }

    /// Forgets the pages that are further away than in the largest size.
    fn forget(&mut self, rate: f64) {
        let most = FACTORS[FACTORS.len() - 1] * self.size_blocks as f64 * rate;
        while self.order.total as f64 > most && self.pages.len() > 1 {
            let Some(hash) = self.order.oldest() else {
                return;
            };
            if let Some(page) = self.pages.remove(&hash) {
                self.order.remove(page);
            }
        }
    }

    /// Samples fewer pages.
    fn thin(&mut self, threshold: u64) {
        let order = &mut self.order;
        self.pages.retain(|hash, page| {
            let stays = *hash <= threshold;
            if !stays {
                order.remove(*page);
            }
            stays
        });
    }
}

#[cfg(test)]
mod tests;
