//! The keys whose uses are counted: a share of all keys by their hash, whether they are stored or
//! not. So the store's own evictions do not bias the tables.
//!
//! A key adds a use to the table of its class at the age that it has, and the time in between. A
//! key that is forgotten has added its time: no use is taken for granted.

use std::collections::{BTreeMap, HashMap, VecDeque};

use rapidhash::quality::RandomState;

use super::class::ClassId;
use super::hazard::Hazards;

/// Most keys.
const KEYS_MAX: usize = 1 << 14;

/// Keys for each stored page: those stored, and more that are not. Uses at high ages are mostly of
/// keys that left long ago.
const SHARE: usize = 12;

/// Uses in the queue for each key.
const USES: usize = 3;

#[derive(Debug, Clone, Copy)]
struct Key {
    class: ClassId,
    last: u32,
    /// Time up to here is in the tables.
    counted: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Sample {
    /// In an order of their own: sums over them are the same in every run.
    keys: BTreeMap<u32, Key>,
    /// The keys among them that are stored, by their pages.
    stored: HashMap<u32, u32, RandomState>,
    /// One bit a page: whether `stored` has it. Most pages are not sampled.
    is_stored: Vec<u64>,
    /// Keys by their uses, the first one first; only the last one of each key counts.
    uses: VecDeque<(u32, u32)>,
    max: usize,
    /// One key in 2^shift.
    shift: u32,
}

impl Sample {
    /// Chooses the share of keys for a store of so many pages.
    pub(super) fn expect(&mut self, pages: usize) {
        let wanted = pages * SHARE;
        while wanted >> self.shift > KEYS_MAX {
            self.shift += 1;
            let shift = self.shift;
            self.keys.retain(|key, _| is_in(*key, shift));
            self.uses.retain(|(key, _)| is_in(*key, shift));
            self.stored.retain(|_, key| is_in(*key, shift));
            self.is_stored.fill(0);
            for page in self.stored.keys() {
                self.is_stored[*page as usize / 64] |= 1 << (page % 64);
            }
        }
        self.max = wanted >> self.shift;
    }

    /// A page is used now; it has this class from now on.
    pub(super) fn used(
        &mut self,
        (page, key): (u32, u32),
        class: ClassId,
        now: u32,
        hazards: &mut Hazards,
    ) {
        let fresh = Key {
            class,
            last: now,
            counted: now,
        };
        let Some(before) = self.hold((page, key), fresh) else {
            return;
        };
        if let Some(before) = before {
            add_time(&before, now, hazards);
            hazards.add_use(before.class, now - before.last);
        }
        while self.keys.len() > self.max.max(1) || self.uses.len() > USES * self.max + 64 {
            self.forget_oldest(now, hazards);
        }
    }

    /// A page of an earlier open is there, used last at `last`. What it did before is counted.
    pub(super) fn recalled(&mut self, (page, key): (u32, u32), class: ClassId, times: (u32, u32)) {
        let (last, counted) = times;
        let known = Key {
            class,
            last,
            counted,
        };
        let _ = self.hold((page, key), known);
    }

    /// Takes in the key of a stored page. Returns what was known of it; `None` if the key is not in
    /// the sample.
    fn hold(&mut self, (page, key): (u32, u32), held: Key) -> Option<Option<Key>> {
        if !is_in(key, self.shift) {
            return None;
        }
        self.stored.insert(page, key);
        let at = page as usize / 64;
        if at >= self.is_stored.len() {
            self.is_stored.resize(at + 1, 0);
        }
        self.is_stored[at] |= 1 << (page % 64);
        self.uses.push_back((key, held.last));
        Some(self.keys.insert(key, held))
    }

    /// A stored page has another class from now on; its age goes on.
    pub(super) fn change_class(
        &mut self,
        page: u32,
        class: ClassId,
        now: u32,
        hazards: &mut Hazards,
    ) {
        if self.has(page)
            && let Some(key) = self.stored.get(&page)
            && let Some(held) = self.keys.get_mut(key)
        {
            add_time(held, now, hazards);
            (held.class, held.counted) = (class, now);
        }
    }

    /// A page is stored no more; its key is counted on.
    pub(super) fn left(&mut self, page: u32) {
        if self.has(page) {
            self.stored.remove(&page);
            self.is_stored[page as usize / 64] &= !(1 << (page % 64));
        }
    }

    /// Whether this page is stored and sampled.
    fn has(&self, page: u32) -> bool {
        let bits = self.is_stored.get(page as usize / 64);
        bits.is_some_and(|bits| bits >> (page % 64) & 1 == 1)
    }

    fn forget_oldest(&mut self, now: u32, hazards: &mut Hazards) {
        let Some((key, last)) = self.uses.pop_front() else {
            return;
        };
        if self.keys.get(&key).is_some_and(|held| held.last == last)
            && let Some(held) = self.keys.remove(&key)
        {
            add_time(&held, now, hazards);
        }
    }

    /// Adds all time up to now to the tables.
    pub(super) fn account(&mut self, now: u32, hazards: &mut Hazards) {
        for key in self.keys.values_mut() {
            add_time(key, now, hazards);
            key.counted = now;
        }
    }

    pub(super) fn ram_bytes(&self) -> usize {
        // A node of the tree is three quarters full.
        self.keys.len() * size_of::<(u32, Key)>() * 4 / 3
            + self.stored.capacity() * (size_of::<(u32, u32)>() + 1)
            + self.is_stored.capacity() * size_of::<u64>()
            + self.uses.capacity() * size_of::<(u32, u32)>()
    }
}

fn is_in(key: u32, shift: u32) -> bool {
    key.trailing_zeros() >= shift
}

fn add_time(key: &Key, now: u32, hazards: &mut Hazards) {
    hazards.add_time(key.class, key.counted - key.last, now - key.last);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TICKS;

    #[test]
    fn a_key_that_comes_back_after_ten_capacities_adds_a_use() {
        const PAGES: u32 = 100;
        let (mut sample, mut hazards) = (Sample::default(), Hazards::default());
        sample.expect(PAGES as usize);
        for key in 0..10 * PAGES {
            sample.used((key % PAGES, key), 0, key * TICKS, &mut hazards);
        }
        let uses = |hazards: &Hazards| hazards.tables().0[0].iter().sum::<f32>();
        assert_eq!(uses(&hazards), 0.0);
        sample.used((0, 0), 0, 20 * PAGES * TICKS, &mut hazards);
        assert_eq!(uses(&hazards), 1.0);
    }
}
