//! The guard: the store follows the learned order as long as LRU would not have more hits.
//!
//! Of both orders all hits are known. Those of the learned order are the hits of the store itself
//! while it follows it: so it is charged with all that reclaim drops, and with all other costs of
//! the order. Those of LRU follow from the order of last uses (see [`Recency`]).
//!
//! ```text
//!               full, and half a capacity later
//!   follows LRU --------------------------------> trial: follows the learned order,
//!        ^                         keeps the lead (hits of the store less those of LRU)
//!        |                                       |
//!        +---------------------------------------+ lead below a bound
//!         until LRU has taken in one capacity; after each further
//!         failure of a trial in a row the time is four times as long
//! ```
//!
//! The lead counts up to a bound: hours of more hits give no more credit than minutes of them. A
//! trial whose lead reaches the bound has succeeded, however it ends.

use super::recency::{Epoch, Recency};

/// The lead at which a trial ends, and that at which it has succeeded: parts of the capacity, and
/// besides so many times the usual lead of a request. One long chain decides nothing.
const LOST: (f64, f64) = (1.0 / 64.0, 4.0);
const WON: (f64, f64) = (1.0 / 16.0, 16.0);

/// What is left of the past after one request with a lead.
const FADE: f64 = 0.97;

/// LRU takes in this part of the capacity between the first eviction and the first trial, unless
/// there are tables of an earlier open. New ones know little of ages that few pages have reached.
const FIRST: f64 = 0.5;

/// The time to the next trial grows by this factor with each failure.
const PATIENCE: f64 = 4.0;
const PATIENCE_MAX: i32 = 6;

/// While the store follows LRU, a capacity that is too large falls by this part with an eviction.
const CAPACITY_FALLS: u64 = 1024;

/// An order of eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Lru,
    Learned,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    /// Follows LRU: nothing was evicted yet. The part of the capacity after which the first trial
    /// begins then.
    Filling(f64),
    /// Follows LRU until that has taken in so many bytes more.
    Waiting(f64),
    /// Follows the learned order: bytes of the hits of the store less those of LRU.
    Trial(f64),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Guard {
    recency: Recency,
    phase: Phase,
    /// The lead of the request at this time, the mean square of those before it, and its root.
    request: (u32, f64),
    square: f64,
    usual: f64,
    /// Trials that failed since one succeeded.
    failed: i32,
    switches: u64,
    /// Bytes of the pages that LRU would hold, and of the stored ones.
    capacity: u64,
    stored: u64,
}

impl Default for Guard {
    fn default() -> Guard {
        Guard {
            recency: Recency::default(),
            phase: Phase::Filling(FIRST),
            request: (0, 0.0),
            square: 0.0,
            usual: 0.0,
            failed: 0,
            switches: 0,
            capacity: 0,
            stored: 0,
        }
    }
}

/// The store has to follow another order from now on.
#[must_use]
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Switched;

impl Guard {
    pub(super) fn order(&self) -> Order {
        match self.phase {
            Phase::Trial(_) => Order::Learned,
            Phase::Filling(_) | Phase::Waiting(_) => Order::Lru,
        }
    }

    /// Why the store does not follow the learned order.
    pub(super) fn reason(&self) -> Option<String> {
        match self.phase {
            Phase::Filling(_) => Some("no page was evicted since the open".to_owned()),
            Phase::Waiting(left) => Some(format!(
                "{}; the next trial begins after {} MiB of new pages",
                match self.failed {
                    0 => "the learned order was not tried yet",
                    _ => "the learned order had fewer hits",
                },
                (left / f64::from(1 << 20)).ceil()
            )),
            Phase::Trial(_) => None,
        }
    }

    pub(super) fn switches(&self) -> u64 {
        self.switches
    }

    /// The tables of an earlier open are there, which ended in this epoch. `is_ripe`: its store was
    /// full.
    pub(super) fn recalls(&mut self, epoch: Epoch, is_ripe: bool) {
        self.recency.recall(epoch);
        if let Phase::Filling(first) = &mut self.phase
            && is_ripe
        {
            *first = 0.0;
        }
    }

    /// A page of an earlier open is there, used last in this epoch.
    pub(super) fn recalled(&mut self, epoch: Epoch, bytes: u64) {
        self.recency.recalled(epoch, bytes);
    }

    /// Whether the tables say something about a full store.
    pub(super) fn is_ripe(&self) -> bool {
        match self.phase {
            Phase::Filling(first) => first == 0.0,
            Phase::Waiting(_) | Phase::Trial(_) => true,
        }
    }

    /// The epoch of pages that are used now.
    pub(super) fn now(&self) -> Epoch {
        self.recency.now()
    }

    /// A page of so many bytes is used, which was used last in this epoch. `is_hit`: it was stored.
    /// Uses at one time are those of a request.
    pub(super) fn used(
        &mut self,
        before: Option<Epoch>,
        bytes: u64,
        is_hit: bool,
        now: u32,
    ) -> Option<Switched> {
        let held = self.recency.used(before, bytes);
        if is_hit && held == 1.0 {
            // Both orders have it.
            return None;
        }
        let size = bytes as f64;
        let gain = (f64::from(u8::from(is_hit)) - held) * size;
        let capacity = self.capacity as f64;
        let usual = self.usual;
        let bound = |(share, times)| share * capacity + times * usual;
        match &mut self.phase {
            Phase::Filling(_) => None,
            Phase::Waiting(left) => {
                *left -= (1.0 - held) * size;
                (*left <= 0.0).then(|| self.switch(Phase::Trial(0.0)))
            }
            Phase::Trial(lead) => {
                *lead += gain;
                let (won, lost) = (bound(WON), bound(LOST));
                if *lead >= won {
                    *lead = won;
                    self.failed = 0;
                }
                let is_lost = *lead < -lost;
                self.note(gain, now);
                is_lost.then(|| {
                    let patience = PATIENCE.powi(self.failed.min(PATIENCE_MAX));
                    self.failed += 1;
                    self.switch(Phase::Waiting(patience * capacity))
                })
            }
        }
    }

    /// Notes the gain of a use during a trial.
    fn note(&mut self, gain: f64, now: u32) {
        let (at, lead) = self.request;
        if at == now {
            self.request.1 += gain;
            return;
        }
        if lead != 0.0 {
            self.square = FADE * self.square + (1.0 - FADE) * lead * lead;
            self.usual = self.square.sqrt();
        }
        self.request = (now, gain);
    }

    fn switch(&mut self, to: Phase) -> Switched {
        self.phase = to;
        self.switches += 1;
        Switched
    }

    /// The store holds pages of so many bytes now.
    pub(super) fn holds(&mut self, stored: u64) {
        self.stored = stored;
    }

    /// A page was deleted.
    pub(super) fn removed(&mut self, before: Epoch, bytes: u64) {
        self.recency.removed(before, bytes);
    }

    /// The store evicts: it is full.
    pub(super) fn evicts(&mut self) {
        let stored = self.stored;
        if stored > self.capacity {
            self.capacity = stored;
        } else if self.order() == Order::Lru {
            // The store holds less than before, for good: a volume was lost.
            self.capacity -= (self.capacity - stored) / CAPACITY_FALLS;
        }
        self.recency.set_capacity(self.capacity);
        if let Phase::Filling(first) = self.phase {
            self.phase = Phase::Waiting(first * self.capacity as f64);
        }
    }

    pub(super) fn ram_bytes(&self) -> usize {
        self.recency.ram_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 100;
    const PAGES: u64 = 6400;
    const NOW: u32 = 7;

    /// A guard of a store that has just become full.
    fn full() -> Guard {
        let mut guard = Guard::default();
        for _ in 0..PAGES {
            assert_eq!(guard.used(None, PAGE, false, NOW), None);
        }
        guard.holds(PAGES * PAGE);
        guard.evicts();
        assert_eq!(guard.order(), Order::Lru);
        assert_eq!(wait(&mut guard), PAGES / 2);
        guard
    }

    /// The number of pages that LRU would have had and the store had not, until the trial ends.
    fn lose(guard: &mut Guard) -> u64 {
        (1..)
            .find(|_| {
                let now = guard.now();
                guard.used(Some(now), PAGE, false, NOW).is_some()
            })
            .expect("it has no end")
    }

    /// The number of new pages until the next trial.
    fn wait(guard: &mut Guard) -> u64 {
        (1..)
            .find(|_| guard.used(None, PAGE, false, NOW).is_some())
            .expect("it has no end")
    }

    #[test]
    fn a_trial_ends_when_the_store_has_lost_a_part_of_its_capacity_to_lru() {
        let mut guard = full();
        assert_eq!(guard.order(), Order::Learned);
        let lost = lose(&mut guard);
        assert!((PAGES / 64..PAGES / 60).contains(&lost), "{lost}");
        assert_eq!((guard.order(), guard.switches()), (Order::Lru, 2));
    }

    #[test]
    fn each_failure_in_a_row_makes_the_time_to_the_next_trial_longer() {
        let mut guard = full();
        let mut waits = Vec::new();
        for _ in 0..3 {
            lose(&mut guard);
            waits.push(wait(&mut guard));
        }
        assert_eq!(waits, [PAGES, 4 * PAGES, 16 * PAGES]);
    }

    #[test]
    fn a_success_ends_the_row_and_gives_no_credit_beyond_a_bound() {
        let mut guard = full();
        lose(&mut guard);
        wait(&mut guard);
        for _ in 0..10 * PAGES {
            assert_eq!(guard.used(None, PAGE, true, NOW), None);
        }
        let lost = lose(&mut guard);
        assert!(lost < PAGES / 10, "{lost}");
        assert_eq!(wait(&mut guard), PAGES);
    }

    #[test]
    fn with_tables_of_an_earlier_open_the_first_trial_begins_when_the_store_is_full() {
        let mut guard = Guard::default();
        guard.recalls(7, true);
        assert!(guard.is_ripe());
        guard.holds(PAGES * PAGE);
        guard.evicts();
        assert_eq!(wait(&mut guard), 1);
        assert_eq!(guard.order(), Order::Learned);
    }
}
