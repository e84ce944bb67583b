//! The result of a run of a trace through servers.

use larder_tiers::core::Stats;
use serde::Serialize;

use super::machine::SECOND;
use super::shared::Nanos;
use crate::usage::nearest_rank;

/// Pages of prompts by their source. Whole pages; the rest of a prompt behind its last whole page
/// is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// In L1.
    pub l1: u64,
    /// In L2, put there by a backup.
    pub l2: u64,
    /// In L3, by a prefetch of the request.
    pub l3: u64,
}

/// A request that was served, in virtual time.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// From its arrival until its server took it: earlier requests, and prefetches.
    pub queued: Nanos,
    /// From then to its first token: loads and compute.
    pub service: Nanos,
    /// Compute time within the service time.
    pub computed: Nanos,
}

/// The work of one server.
#[derive(Debug, Default)]
pub struct Served {
    pub input_tokens: u64,
    pub computed_tokens: u64,
    pub found: Found,
    pub timings: Vec<Timing>,
    /// Requests that do not fit L1.
    pub too_long: u64,
    pub wrong_pages: u64,
    pub tiers: Moved,
    pub leaked_pages: u64,
    /// The invariants of the cache that did not hold at the end.
    pub leaks: Vec<String>,
}

/// Pages that moved between the tiers, or left one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Moved {
    /// L2 to L1.
    pub pages_loaded: u64,
    /// L1 to L2.
    pub pages_backed_up: u64,
    /// L3 to L2, including pages that came too late or were no longer wanted.
    pub pages_prefetched: u64,
    /// L2 to L3.
    pub pages_put: u64,
    /// Not given to L3: too much was in flight, or the store refused it.
    pub put_refused_pages: u64,
    /// Not copied to L2 for lack of room.
    pub backup_refused_pages: u64,
    /// Left L1, still in L2.
    pub l1_evicted_pages: u64,
    /// Left L1 without having been copied.
    pub l1_dropped_pages: u64,
    /// Left L2.
    pub l2_evicted_pages: u64,
    /// Prefetches that began.
    pub prefetches: u64,
    /// Prefetches given up because computing was expected to be faster.
    pub break_even_prefetches: u64,
}

impl Moved {
    fn add(&mut self, stats: &Stats) {
        self.pages_loaded += stats.loaded;
        self.pages_backed_up += stats.backed_up;
        self.pages_prefetched += stats.l3_hits + stats.prefetch_orphans + stats.prefetch_wasted;
        self.pages_put += stats.put;
        self.put_refused_pages += stats.put_refused + stats.put_failed;
        self.backup_refused_pages += stats.backup_no_room;
        self.l1_evicted_pages += stats.l1_evicted;
        self.l1_dropped_pages += stats.l1_dropped + stats.subtree_dropped;
        self.l2_evicted_pages += stats.l2_evicted;
        self.prefetches += stats.prefetches;
        self.break_even_prefetches += stats.declined.break_even;
    }
}

impl Served {
    /// Adds the work of another server, whose cache has these figures.
    pub fn add(&mut self, other: Served, cache: &Stats) {
        self.input_tokens += other.input_tokens;
        self.computed_tokens += other.computed_tokens;
        self.found.l1 += other.found.l1;
        self.found.l2 += other.found.l2;
        self.found.l3 += other.found.l3;
        self.timings.extend(other.timings);
        self.too_long += other.too_long;
        self.wrong_pages += other.wrong_pages;
        self.leaked_pages += other.leaked_pages;
        self.leaks.extend(other.leaks);
        self.tiers.add(cache);
    }
}

/// Quantiles of some times, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// The median.
    pub p50_seconds: f64,
    /// 90 of 100 are not greater.
    pub p90_seconds: f64,
    /// 99 of 100 are not greater.
    pub p99_seconds: f64,
}

impl Quantiles {
    /// Of these times, by nearest rank; 0 where there are none.
    pub fn of(times: impl Iterator<Item = Nanos>) -> Quantiles {
        let mut times: Vec<Nanos> = times.collect();
        times.sort_unstable();
        let of = |percent| nearest_rank(&times, percent).map_or(0.0, seconds);
        Quantiles {
            p50_seconds: of(50),
            p90_seconds: of(90),
            p99_seconds: of(99),
        }
    }
}

/// Virtual nanoseconds as seconds.
pub fn seconds(time: Nanos) -> f64 {
    time as f64 / SECOND
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_the_nearest_rank() {
        let quantiles = Quantiles::of((1..=200).rev().map(|second| second * 1_000_000_000));
        assert_eq!(
            (quantiles.p50_seconds, quantiles.p99_seconds),
            (100.0, 198.0)
        );
        assert_eq!(quantiles.p90_seconds, 180.0);
        assert_eq!(Quantiles::of(std::iter::empty()), Quantiles::default());
    }
}
