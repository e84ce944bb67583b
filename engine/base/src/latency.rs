//! Histograms of latencies: of the devices, and of the calls of a handle.
//!
//! Owns: one histogram for each kind of operation, cut into shards. A thread records in a shard of
//! its own choice, and moves on to the next one while another thread uses that, so no recording
//! waits. A shard takes memory (28 KiB) from its first record on.
//!
//! Values are exact to 1 %, from 1 µs to 18 minutes, and to 64 ns below. Longer ones count as the
//! limit.
//!
//! It does not keep times of day, and never forgets. A histogram covers the whole time since the
//! open.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use larder_sync::Mutex;
use serde::{Deserialize, Serialize};

use crate::runtime::Instant;

/// Lookups of a thread for each measured one: a lookup takes about as long as two reads of the
/// clock.
const LOOKUPS_PER_SAMPLE: u32 = 64;

/// Upper bounds of the buckets of a latency, in nanoseconds. A last bucket has no bound.
pub const BOUNDS_NS: [u64; 22] = [
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_000,
    2_000_000_000,
    5_000_000_000,
    10_000_000_000,
];

const SHARDS: usize = 8;

/// Resolution and range of a histogram, in nanoseconds, and its significant decimal digits.
const LOWEST_NS: u64 = 64;
const HIGHEST_NS: u64 = 1 << 40;
const DIGITS: u8 = 2;

/// Latencies of one kind of operation since the store was opened. Zero throughout when `count` is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LatencySummary {
    /// Operations measured.
    pub count: u64,
    /// Median, in microseconds.
    pub p50_us: f64,
    /// 90th percentile, in microseconds.
    pub p90_us: f64,
    /// 99th percentile, in microseconds.
    pub p99_us: f64,
    /// 99.9th percentile, in microseconds.
    pub p999_us: f64,
    /// Greatest, in microseconds.
    pub max_us: f64,
}

/// Latencies of the volumes' devices: from the moment an operation is handed to the kernel to its
/// end, retries included. The time in a disk's queue does not count.
#[derive(Debug, Default)]
pub struct DeviceLatencies {
    pub reads: Latency,
    pub writes: Latency,
    pub syncs: Latency,
}

/// Latencies of one kind of operation.
#[derive(Debug, Default)]
pub struct Latency([Shard; SHARDS]);

/// In cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    times: Mutex<Option<Histogram<u64>>>,
    /// Calls of [`Latency::sampled`]. Threads that share a shard may lose some.
    calls: AtomicU32,
}

impl Latency {
    /// Records one operation.
    pub fn record(&self, took: Duration) {
        let first = shard_of_this_thread();
        let order = (first..SHARDS).chain(0..first);
        let free = { order }.find_map(|at| self.0[at].times.try_lock());
        let mut times = free.unwrap_or_else(|| self.0[first].times.lock());
        if times.is_none() {
            *times = empty();
        }
        if let Some(histogram) = &mut *times {
            histogram.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        }
    }

    /// Records the time until its drop.
    pub fn timed(&self) -> Timed<'_> {
        Timed {
            latency: self,
            begun: Instant::now(),
        }
    }

    /// The same for the first of each `LOOKUPS_PER_SAMPLE` calls of a thread.
    pub fn sampled(&self) -> Option<Timed<'_>> {
        let calls = &self.0[shard_of_this_thread()].calls;
        let before = calls.load(Ordering::Relaxed);
        calls.store(before.wrapping_add(1), Ordering::Relaxed);
        before
            .is_multiple_of(LOOKUPS_PER_SAMPLE)
            .then(|| self.timed())
    }

    /// The records of all threads, in [`Buckets`].
    pub fn buckets(&self) -> Buckets {
        let mut buckets = Buckets::default();
        for shard in &self.0 {
            if let Some(some) = &*shard.times.lock() {
                for step in some.iter_recorded() {
                    let ns = some.median_equivalent(step.value_iterated_to());
                    buckets.record(ns, step.count_since_last_iteration());
                }
            }
        }
        buckets
    }

    /// The records of all threads.
    pub fn summary(&self) -> LatencySummary {
        let Some(mut all) = empty() else {
            return LatencySummary::default();
        };
        for shard in &self.0 {
            if let Some(some) = &*shard.times.lock() {
                // The limits are the same.
                let _ = all.add(some);
            }
        }
        let us = |ns| Duration::from_nanos(ns).div_duration_f64(Duration::from_micros(1));
        let quantile = |quantile| us(all.value_at_quantile(quantile));
        LatencySummary {
            count: all.len(),
            p50_us: quantile(0.5),
            p90_us: quantile(0.9),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            max_us: us(all.max()),
        }
    }
}

/// Latencies of one kind, in buckets. Both fields are empty without any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Buckets {
    /// Operations whose time is in each bucket of [`BOUNDS_NS`], and above the last bound.
    pub counts: Vec<u64>,
    /// The sum of their times, in nanoseconds, exact to 1 %.
    pub sum_ns: u64,
}

impl Buckets {
    /// Adds operations that took so long each.
    pub fn record(&mut self, ns: u64, operations: u64) {
        self.counts.resize(BOUNDS_NS.len() + 1, 0);
        let at = BOUNDS_NS.partition_point(|bound| *bound < ns);
        self.counts[at] = self.counts[at].saturating_add(operations);
        self.sum_ns = self.sum_ns.saturating_add(ns.saturating_mul(operations));
    }

    /// Operations in all buckets.
    #[must_use]
    pub fn count(&self) -> u64 {
        let counts = self.counts.iter();
        counts.fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The lowest bound of [`BOUNDS_NS`] that this part of the operations does not exceed; `None`
    /// if they exceed all. Zero without operations.
    #[must_use]
    pub fn bound(&self, part: f64) -> Option<Duration> {
        let all = self.count();
        let (mut below, needed) = (0, all as f64 * part);
        let bound = self.counts.iter().zip(BOUNDS_NS).find(|(count, _)| {
            below += *count;
            below as f64 >= needed
        });
        match all {
            0 => Some(Duration::ZERO),
            _ => bound.map(|(_, bound)| Duration::from_nanos(bound)),
        }
    }

    /// The mean time; zero without operations.
    #[must_use]
    pub fn mean(&self) -> Duration {
        Duration::from_nanos(self.sum_ns.checked_div(self.count()).unwrap_or(0))
    }

    pub fn combine(&mut self, other: &Buckets, with: &mut impl FnMut(u64, u64) -> u64) {
        if !other.counts.is_empty() {
            self.counts.resize(BOUNDS_NS.len() + 1, 0);
        }
        for (count, other) in self.counts.iter_mut().zip(&other.counts) {
            *count = with(*count, *other);
        }
        self.sum_ns = with(self.sum_ns, other.sum_ns);
    }
}

fn empty() -> Option<Histogram<u64>> {
    Histogram::new_with_bounds(LOWEST_NS, HIGHEST_NS, DIGITS).ok()
}

fn shard_of_this_thread() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SHARD: usize = THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS;
    }
    SHARD.with(|shard| *shard)
}

/// An operation in progress.
pub struct Timed<'a> {
    latency: &'a Latency,
    begun: Instant,
}

impl Drop for Timed<'_> {
    fn drop(&mut self) {
        self.latency.record(self.begun.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, expected: f64) -> bool {
        (found / expected - 1.0).abs() < 0.02
    }

    #[test]
    fn a_latency_falls_into_the_bucket_whose_bound_it_does_not_exceed() {
        let mut buckets = Buckets::default();
        for (ns, operations) in [(0, 1), (1_000, 2), (1_001, 4), (u64::MAX, 8)] {
            buckets.record(ns, operations);
        }
        assert_eq!(
            (buckets.counts[0], buckets.counts[1], buckets.counts[22]),
            (3, 4, 8)
        );
        assert_eq!((buckets.count(), buckets.sum_ns), (15, u64::MAX));
    }

    #[test]
    fn a_part_of_the_operations_has_the_bound_of_its_slowest_one() {
        let mut buckets = Buckets::default();
        assert_eq!(buckets.bound(0.5), Some(buckets.mean()));
        buckets.record(900, 50);
        buckets.record(4_000, 49);
        let us = |us| Some(Duration::from_micros(us));
        assert_eq!(
            [0.5, 0.51, 1.0].map(|part| buckets.bound(part)),
            [us(1), us(5), us(5)]
        );
        assert_eq!(
            buckets.mean(),
            Duration::from_nanos((900 * 50 + 4_000 * 49) / 99)
        );
        buckets.record(u64::MAX, 1);
        assert_eq!([0.99, 1.0].map(|part| buckets.bound(part)), [us(5), None]);
    }

    #[test]
    fn a_summary_covers_the_records_of_all_threads() {
        let latency = Latency::default();
        std::thread::scope(|scope| {
            for thread in 0..10 {
                let latency = &latency;
                scope.spawn(move || {
                    for step in 0..100 {
                        let us = 1 + thread * 100 + step;
                        latency.record(Duration::from_micros(us));
                    }
                });
            }
        });
        let summary = latency.summary();
        assert_eq!(summary.count, 1000);
        assert!(near(summary.p50_us, 500.0), "{summary:?}");
        assert!(near(summary.p90_us, 900.0), "{summary:?}");
        assert!(near(summary.p99_us, 990.0), "{summary:?}");
        assert!(near(summary.p999_us, 999.0), "{summary:?}");
        assert!(near(summary.max_us, 1000.0), "{summary:?}");
    }

    #[test]
    fn the_buckets_hold_each_record_once() {
        let latency = Latency::default();
        for us in [0, 3, 3, 40, 7_000_000] {
            latency.record(Duration::from_micros(us));
        }
        let buckets = latency.buckets();
        let at = |bound: u64| BOUNDS_NS.partition_point(|b| *b < bound);
        for (bound, count) in [(1_000, 1), (5_000, 2), (50_000, 1), (10_000_000_000, 1)] {
            assert_eq!(buckets.counts[at(bound)], count, "{buckets:?}");
        }
        assert_eq!(buckets.count(), 5);
        assert!(near(buckets.sum_ns as f64, 7.000_046e9), "{buckets:?}");
        assert_eq!(Latency::default().buckets(), Buckets::default());
    }

    #[test]
    fn a_value_out_of_range_counts_as_the_limit() {
        let latency = Latency::default();
        latency.record(Duration::ZERO);
        latency.record(Duration::MAX);
        let summary = latency.summary();
        assert_eq!(summary.count, 2);
        assert!(summary.p50_us < 0.1, "{summary:?}");
        assert!(near(summary.max_us, 1.1e9), "{summary:?}");
        assert_eq!(Latency::default().summary(), LatencySummary::default());
    }

    #[test]
    fn one_lookup_in_64_is_measured() {
        let latency = Latency::default();
        std::thread::scope(|scope| {
            scope.spawn(|| (0..640).for_each(|_| drop(latency.sampled())));
        });
        assert_eq!(latency.summary().count, 10);
    }
}
