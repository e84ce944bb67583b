//! The pages that LRU would hold: those used last, as many as the store holds.
//!
//! LRU holds a page as long as the pages used after it fill less than the store. So the order of
//! last uses says which pages it holds, stored or not. The order is
//! kept in epochs: an epoch is the time in which LRU takes in 1/256 of its capacity. A page has the
//! epoch of its last use; here are the bytes of the pages of each epoch. A page that is not used is
//! gone after 256 epochs, however often others are used.
//!
//! No chain is sampled: the hits of LRU are known to one epoch.

/// A number of an epoch; it recurs after 65,536.
pub(super) type Epoch = u16;

/// Epochs in which LRU takes in its capacity.
const SPAN: u64 = 256;

/// Most epochs at once. While a store fills, its epochs are shorter.
const EPOCHS_MAX: usize = 1 << 12;

/// See the module.
#[derive(Debug)]
pub(super) struct Recency {
    /// By epoch, modulo their number.
    bytes: Vec<u64>,
    /// The present epoch and the oldest one of which LRU holds pages.
    now: u32,
    oldest: u32,
    /// Bytes of the pages of the epochs from `oldest` to `now`.
    held: u64,
    /// Most bytes that LRU holds. `None`: the store is not full.
    capacity: Option<u64>,
    /// Bytes that LRU has taken in during the present epoch.
    taken: f64,
}

impl Default for Recency {
    fn default() -> Recency {
        Recency {
            bytes: vec![0; EPOCHS_MAX],
            now: 0,
            oldest: 0,
            held: 0,
            capacity: None,
            taken: 0.0,
        }
    }
}

fn slot(epoch: u32) -> usize {
    epoch as usize % EPOCHS_MAX
}

impl Recency {
    /// The present epoch.
    pub(super) fn now(&self) -> Epoch {
        self.now as Epoch
    }

    /// Goes on at an epoch of an earlier open, with no page.
    pub(super) fn recall(&mut self, epoch: Epoch) {
        self.now = (1 << Epoch::BITS) + u32::from(epoch);
        self.oldest = self.now + 1 - EPOCHS_MAX as u32;
    }

    /// A page is there that was used last in this epoch, of an earlier open.
    pub(super) fn recalled(&mut self, epoch: Epoch, bytes: u64) {
        if let Some(epoch) = self.held_since(epoch) {
            self.bytes[slot(epoch)] += bytes;
            self.held += bytes;
        }
    }

    pub(super) fn set_capacity(&mut self, bytes: u64) {
        self.capacity = Some(bytes);
    }

    /// The epoch of a page that LRU holds at least in part.
    fn held_since(&self, epoch: Epoch) -> Option<u32> {
        let age = u32::from(self.now().wrapping_sub(epoch));
        let epoch = self.now.checked_sub(age)?;
        (epoch >= self.oldest).then_some(epoch)
    }

    /// The part of the pages of an epoch that LRU holds: of the oldest one only the part that fits.
    fn share(&self, epoch: u32) -> f64 {
        if epoch > self.oldest {
            return 1.0;
        }
        let there = self.bytes[slot(epoch)];
        if there == 0 {
            return 1.0;
        }
        let above = self
            .capacity
            .map_or(0, |most| self.held.saturating_sub(most));
        1.0 - (above as f64 / there as f64).min(1.0)
    }

    /// A page of so many bytes is used that was used last in this epoch; `None`: not known. Its
    /// epoch is the present one then. Returns the part of it that LRU held: nearly always 0 or 1.
    pub(super) fn used(&mut self, before: Option<Epoch>, bytes: u64) -> f64 {
        let since = before.and_then(|epoch| self.held_since(epoch));
        let share = since.map_or(0.0, |epoch| self.share(epoch));
        if let Some(epoch) = since {
            self.drop_from(epoch, bytes);
        }
        self.bytes[slot(self.now)] += bytes;
        self.held += bytes;
        self.shrink();
        if share < 1.0 {
            self.taken += (1.0 - share) * bytes as f64;
            let full = self.capacity.unwrap_or(self.held) / SPAN;
            if self.taken >= full as f64 {
                self.begin_epoch();
            }
        }
        share
    }

    /// A page was deleted that was used last in this epoch.
    pub(super) fn removed(&mut self, before: Epoch, bytes: u64) {
        if let Some(epoch) = self.held_since(before) {
            self.drop_from(epoch, bytes);
        }
    }

    fn drop_from(&mut self, epoch: u32, bytes: u64) {
        let there = &mut self.bytes[slot(epoch)];
        let dropped = bytes.min(*there);
        *there -= dropped;
        self.held -= dropped;
    }

    /// Forgets epochs of which LRU holds no page.
    fn shrink(&mut self) {
        let Some(capacity) = self.capacity else {
            return;
        };
        while self.oldest < self.now && self.held - self.bytes[slot(self.oldest)] >= capacity {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        self.held -= std::mem::take(&mut self.bytes[slot(self.oldest)]);
        self.oldest += 1;
    }

    fn begin_epoch(&mut self) {
        self.taken = 0.0;
        self.now += 1;
        if (self.now - self.oldest) as usize == EPOCHS_MAX {
            self.forget_oldest();
        }
    }

    pub(super) fn ram_bytes(&self) -> usize {
        self.bytes.capacity() * size_of::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, VecDeque};

    use super::*;

    /// Hits of an LRU of so many pages, and by the epochs, on a random sequence.
    fn both(capacity: u64, pages: u64, skew: f64) -> (f64, f64) {
        let mut recency = Recency::default();
        let mut epochs: HashMap<u64, Epoch> = HashMap::new();
        let mut lru: VecDeque<u64> = VecDeque::new();
        let (mut exact, mut estimated) = (0.0, 0.0);
        let mut state = 1_u64;
        for _ in 0..100_000 {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let uniform = (state >> 33) as f64 / (1_u64 << 31) as f64;
            let page = (pages as f64 * uniform.powf(skew)) as u64;
            if let Some(at) = lru.iter().position(|held| *held == page) {
                lru.remove(at);
                exact += 1.0;
            }
            lru.push_back(page);
            if lru.len() as u64 > capacity {
                lru.pop_front();
                recency.set_capacity(capacity * 10);
            }
            estimated += recency.used(epochs.get(&page).copied(), 10);
            epochs.insert(page, recency.now());
        }
        (exact, estimated)
    }

    #[test]
    fn the_hits_of_lru_are_known_without_a_cache() {
        for (capacity, pages, skew) in [(50, 400, 1.0), (500, 4000, 2.0), (500, 5000, 6.0)] {
            let (exact, estimated) = both(capacity, pages, skew);
            assert!(
                (exact - estimated).abs() < 0.003 * 100_000.0,
                "{capacity} of {pages}: {exact} {estimated}"
            );
        }
    }

    #[test]
    fn a_page_that_was_deleted_makes_room() {
        let mut recency = Recency::default();
        let first = recency.now();
        assert_eq!(recency.used(None, 10), 0.0);
        recency.set_capacity(10);
        recency.removed(first, 10);
        let second = recency.now();
        assert_eq!(recency.used(None, 10), 0.0);
        assert_eq!(recency.used(Some(second), 10), 1.0);
    }
}
