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

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::ids::NamespaceId;
use larder_base::runtime::{Mutex, MutexGuard};
use larder_format::PageKey;
use serde::{Deserialize, Serialize};

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

/// The curves of a store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CurveReport {
    /// The present size: the most bytes that pages may take.
    pub size_bytes: u64,
    /// The time that the counters cover.
    pub seconds: f64,
    /// The part of all pages that is sampled.
    pub sampled: f64,
    /// One for each namespace that was looked up, those with the most lookups first.
    pub spaces: Vec<SpaceCurve>,
}

/// The curve of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpaceCurve {
    /// Its fingerprint; `other` for all further namespaces.
    pub fingerprint: String,
    /// Pages that lookups asked for.
    pub pages_requested: u64,
    /// For each of [`FACTORS`] the part of these pages that the store would have, and their bytes.
    pub hit_rates: Vec<f64>,
    /// See `hit_rates`.
    pub read_bytes: Vec<u64>,
    /// Too few pages were looked up for a good estimate.
    pub is_rough: bool,
}

/// See the module.
pub(crate) struct Curve {
    /// Pages with a hash below it are sampled.
    threshold: AtomicU64,
    /// Locked before `noted`.
    state: Mutex<State>,
    noted: Mutex<Noted>,
}

/// Lookups that are not counted yet.
#[derive(Default)]
struct Noted {
    lookups: Vec<Lookup>,
    /// The sampled pages of all these lookups, each from its last page to its first.
    hashes: Vec<u64>,
}

#[derive(Clone, Copy)]
struct Lookup {
    namespace: NamespaceId,
    page_blocks: u32,
    /// Usable blocks that a page takes.
    blocks: u32,
    pages: usize,
    /// Its sampled pages.
    sampled: usize,
    at_ms: u64,
}

impl Noted {
    fn fill(&self) -> usize {
        self.lookups.len().max(self.hashes.len())
    }
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

struct State {
    pages: HashMap<u64, Page, BuildHasherDefault<AsItIs>>,
    order: Order,
    /// The present size.
    size_blocks: u64,
    counted: Vec<(Option<NamespaceId>, Counted)>,
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
    /// Of a store in which pages may take so many blocks.
    pub(crate) fn new(size_blocks: u64) -> Curve {
        Curve {
            threshold: AtomicU64::new(u64::MAX),
            state: Mutex::new(State {
                pages: HashMap::default(),
                order: Order::new(PLACES_MIN),
                size_blocks,
                counted: Vec::new(),
                since_ms: None,
                spare: Noted::default(),
            }),
            noted: Mutex::default(),
        }
    }

    /// The store has another size from now on.
    pub(crate) fn resize(&self, size_blocks: u64) {
        let mut state = self.counted();
        if state.size_blocks != size_blocks {
            state.size_blocks = size_blocks;
            state.counted.clear();
            state.since_ms = None;
        }
    }

    /// Notes a lookup of these pages, with the blocks of each and the usable blocks that each
    /// takes. It waits for no other thread: a lookup beside another one may not be noted. True if
    /// the noted lookups are to be counted.
    pub(crate) fn looked_up(
        &self,
        namespace: NamespaceId,
        (page_blocks, blocks): (u32, u32),
        keys: &[PageKey],
        now_ms: u64,
    ) -> bool {
        let Some(mut noted) = self.noted.try_lock() else {
            return false;
        };
        let before = noted.fill();
        if before >= NOTED_MAX {
            return false;
        }
        let first = noted.hashes.len();
        noted.hashes.extend(self.sampled(namespace, keys.iter()));
        let lookup = Lookup {
            namespace,
            page_blocks,
            blocks,
            pages: keys.len(),
            sampled: noted.hashes.len() - first,
            at_ms: now_ms,
        };
        noted.lookups.push(lookup);
        before < NOTED_MAX / 2 && noted.fill() >= NOTED_MAX / 2
    }

    /// The sampled pages among these, from the last one to the first.
    fn sampled<'a>(
        &self,
        namespace: NamespaceId,
        keys: impl DoubleEndedIterator<Item = &'a PageKey>,
    ) -> impl Iterator<Item = u64> {
        let threshold = self.threshold.load(Ordering::Relaxed);
        let hashes = keys.rev().map(move |key| hash(namespace, key));
        hashes.filter(move |hash| *hash <= threshold)
    }

    /// Counts the noted lookups.
    pub(crate) fn count(&self) {
        drop(self.counted());
    }

    /// The state, after the noted lookups.
    fn counted(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        let mut noted = std::mem::take(&mut state.spare);
        std::mem::swap(&mut *self.noted.lock(), &mut noted);
        let threshold = self.threshold.load(Ordering::Relaxed);
        let mut hashes = &noted.hashes[..];
        for lookup in &noted.lookups {
            let (sampled, others) = hashes.split_at(lookup.sampled);
            hashes = others;
            state.looked_up(lookup, sampled, threshold);
        }
        noted.lookups.clear();
        noted.hashes.clear();
        state.spare = noted;
        state
    }

    /// These pages are stored by a put, newly or already, and take so many usable blocks each.
    pub(crate) fn put<'a>(
        &self,
        namespace: NamespaceId,
        blocks: u32,
        keys: impl DoubleEndedIterator<Item = &'a PageKey>,
    ) {
        let sampled: Vec<u64> = self.sampled(namespace, keys).collect();
        if sampled.is_empty() {
            return;
        }
        let mut state = self.counted();
        let mut threshold = self.threshold.load(Ordering::Relaxed);
        for hash in sampled {
            if hash > threshold || state.used(hash, blocks).is_some() {
                continue;
            }
            state.enter(hash, blocks);
            state.forget(rate_of(threshold));
            while state.pages.len() > PAGES_MAX {
                threshold = (threshold as f64 * FALL) as u64;
                state.thin(threshold);
            }
        }
        self.threshold.store(threshold, Ordering::Relaxed);
    }

    /// The curves. `name` gives the fingerprint of a namespace.
    pub(crate) fn report(
        &self,
        now_ms: u64,
        name: impl Fn(NamespaceId) -> Option<String>,
    ) -> CurveReport {
        let state = self.counted();
        let block = larder_format::BLOCK_BYTES as f64;
        let all: f64 = state.counted.iter().map(|(_, of)| of.asked).sum();
        let mut spaces: Vec<SpaceCurve> = Vec::new();
        for (namespace, of) in &state.counted {
            let rates = of.hit_rates();
            let bytes = f64::from(of.page_blocks) * block * of.asked;
            let named = namespace.and_then(&name);
            spaces.push(SpaceCurve {
                fingerprint: named.unwrap_or_else(|| crate::spaces::OTHER.to_owned()),
                pages_requested: of.asked as u64,
                read_bytes: rates.iter().map(|rate| (rate * bytes) as u64).collect(),
                hit_rates: rates.to_vec(),
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

impl CurveReport {
    /// All namespaces together.
    #[must_use]
    pub fn total(&self) -> SpaceCurve {
        let asked: u64 = self.spaces.iter().map(|of| of.pages_requested).sum();
        // An owner of another release may have other sizes.
        let hits = |at: usize| -> f64 {
            let of = self.spaces.iter();
            let hits = of.filter_map(|of| Some(of.hit_rates.get(at)? * of.pages_requested as f64));
            hits.sum()
        };
        let bytes = |at: usize| {
            let of = self.spaces.iter();
            of.filter_map(|of| of.read_bytes.get(at)).sum()
        };
        SpaceCurve {
            fingerprint: String::new(),
            pages_requested: asked,
            hit_rates: (0..FACTORS.len())
                .map(|at| hits(at) / asked.max(1) as f64)
                .collect(),
            read_bytes: (0..FACTORS.len()).map(bytes).collect(),
            is_rough: false,
        }
    }
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

    /// With the adjustment: lookups that the sampled pages miss are of the shortest distance.
    fn hit_rates(&self) -> [f64; FACTORS.len()] {
        let missed = self.asked - self.estimated;
        self.hits
            .map(|hits| ((hits + missed) / self.asked.max(1.0)).clamp(0.0, 1.0))
    }
}

impl State {
    /// Counts a lookup, with its sampled pages as of a threshold at or above this one.
    fn looked_up(&mut self, lookup: &Lookup, sampled: &[u64], threshold: u64) {
        let rate = rate_of(threshold);
        let since_ms = *self.since_ms.get_or_insert(lookup.at_ms);
        if lookup.at_ms.saturating_sub(since_ms) > HALVED_MS {
            self.halve(lookup.at_ms);
        }
        let mut counted = Counted {
            asked: lookup.pages as f64,
            page_blocks: lookup.page_blocks,
            ..Counted::default()
        };
        for hash in sampled.iter().filter(|hash| **hash <= threshold) {
            counted.estimated += 1.0 / rate;
            if let Some(since) = self.used(*hash, lookup.blocks) {
                let distance = since as f64 / rate + f64::from(lookup.blocks);
                for (hits, factor) in counted.hits.iter_mut().zip(FACTORS) {
                    if distance <= factor * self.size_blocks as f64 {
                        *hits += 1.0 / rate;
                    }
                }
            }
        }
        self.count(lookup.namespace, &counted);
    }

    fn count(&mut self, namespace: NamespaceId, more: &Counted) {
        let known = self
            .counted
            .iter()
            .position(|(of, _)| *of == Some(namespace));
        let name = match known.is_some() || self.counted.len() < OWN_MAX {
            true => Some(namespace),
            false => None,
        };
        let at = self.counted.iter().position(|(of, _)| *of == name);
        let at = at.unwrap_or_else(|| {
            self.counted.push((name, Counted::default()));
            self.counted.len() - 1
        });
        self.counted[at].1.add(more);
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

    fn halve(&mut self, now_ms: u64) {
        self.since_ms = Some(now_ms - HALVED_MS / 2);
        for (_, of) in &mut self.counted {
            of.asked /= 2.0;
            of.estimated /= 2.0;
            of.hits = of.hits.map(|hits| hits / 2.0);
        }
    }
}

#[cfg(test)]
mod tests;
