//! Meters of this rank: counters, and the batches since SGLang's last poll.
//!
//! SGLang polls on its scheduler thread in every step, so a poll must cost almost nothing: it only
//! takes two short lists.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use larder_handle::named::named;
use larder_sync::Mutex;

/// Maximum number of listed batches between polls. Further batches are counted but not listed.
const LISTED_MAX: usize = 4096;

/// A batch: its pages, and gigabytes per second.
pub type Batch = (u64, f64);

/// See the module documentation.
#[derive(Debug, Default)]
pub struct Meters {
    counts: [AtomicU64; Count::NAMES.len()],
    gets: Mutex<Vec<Batch>>,
    sets: Mutex<Vec<Batch>>,
}

named! {
    /// The counters. If the store has one too, over all ranks, the name contains `rank`.
    Count {
        /// Keys looked up.
        LookedUp => "looked_up",
        /// Keys found by lookups.
        Found => "found",
        /// Pages read into the host pool.
        Read => "read",
        /// Pages requested but not read.
        Missed => "missed",
        /// Missed pages that were damaged and have been dropped.
        Damaged => "rank_damaged_pages",
        /// Missed pages that exceeded the time limit.
        Late => "late",
        /// Pages stored.
        Stored => "stored",
        /// Pages that were already stored.
        Duplicate => "duplicate",
        /// Pages deliberately not stored, because there was no room: the tail of a chain.
        Dropped => "dropped",
        /// Pages that could not be stored.
        Failed => "failed",
        /// Pages transferred directly between pool and device, or through the engine's own copy.
        Direct => "rank_direct_pages",
        /// Pages transferred through the buffer on huge pages.
        Bounced => "rank_bounced_pages",
        /// Found pages that lookups did not report, because computing them is faster than reading.
        Slow => "rank_slow_pages",
        /// Found pages that lookups did not report, because the time of a read was not known yet.
        Unmeasured => "rank_unmeasured_pages",
    }
}

impl Meters {
    /// Increases a counter.
    pub fn add(&self, count: Count, amount: usize) {
        self.counts[count as usize].fetch_add(amount as u64, Ordering::Relaxed);
    }

    /// Every counter, by name.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let value = |count| self.counts[count as usize].load(Ordering::Relaxed);
        Count::NAMES
            .map(|(name, count)| (name, value(count)))
            .into_iter()
    }

    /// Lists a batch of read pages.
    pub fn got(&self, pages: usize, bytes: u64, took: Duration) {
        list(&self.gets, pages, bytes, took);
    }

    /// Lists a batch of stored pages.
    pub fn set(&self, pages: usize, bytes: u64, took: Duration) {
        list(&self.sets, pages, bytes, took);
    }

    /// The batches read and stored since the last call.
    pub fn drain(&self) -> (Vec<Batch>, Vec<Batch>) {
        (
            std::mem::take(&mut *self.gets.lock()),
            std::mem::take(&mut *self.sets.lock()),
        )
    }
}

fn list(batches: &Mutex<Vec<Batch>>, pages: usize, bytes: u64, took: Duration) {
    let rate = bytes as f64 / 1e9 / took.as_secs_f64().max(1e-9);
    let mut batches = batches.lock();
    if batches.len() < LISTED_MAX {
        batches.push((pages as u64, rate));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_reported_once() {
        let meters = Meters::default();
        meters.got(3, 3_000_000_000, Duration::from_secs(1));
        meters.set(2, 1_000_000_000, Duration::from_secs(2));
        assert_eq!(meters.drain(), (vec![(3, 3.0)], vec![(2, 0.5)]));
        assert_eq!(meters.drain(), (vec![], vec![]));
    }

    #[test]
    fn a_list_that_is_not_polled_stays_short() {
        let meters = Meters::default();
        for _ in 0..2 * LISTED_MAX {
            meters.got(1, 1, Duration::from_secs(1));
        }
        assert_eq!(meters.drain().0.len(), LISTED_MAX);
    }

    #[test]
    fn every_count_has_its_name() {
        let meters = Meters::default();
        meters.add(Count::Unmeasured, 7);
        assert_eq!(meters.counts().last(), Some(("rank_unmeasured_pages", 7)));
        meters.add(Count::LookedUp, 1);
        assert_eq!(meters.counts().next(), Some(("looked_up", 1)));
    }
}
