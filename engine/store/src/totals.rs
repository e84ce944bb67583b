//! Totals of all processes of a store since their counting began. They outlast the owner.
//!
//! The owner adds up its own counters and those of its clients. It sends the totals to its clients
//! once a second, if they have changed, and before each report. A client that becomes the owner
//! begins with its copy, so the totals of two reports never go down as long as one process stays
//! attached. Without a copy they begin at zero; the owner's start time then changes, too.
//!
//! Totals travel by name, in JSON: see [`protocol`](crate::protocol).

use larder_base::latency::Buckets;
use serde::{Deserialize, Serialize};

use crate::counts::Counts;
use crate::spaces::Spaces;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Totals {
    /// The calls of all processes.
    pub counts: Counts,
    /// The decisions of the owners.
    pub store: StoreCounts,
    /// The times of calls and of device operations in all processes.
    pub latencies: Latencies,
    /// Their reads by namespace.
    pub spaces: Spaces,
}

/// The measurements that a client sends beside its counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Measures {
    #[serde(flatten)]
    pub latencies: Latencies,
    pub spaces: Spaces,
}

impl Measures {
    /// Combines each counter with that of `other`.
    pub(crate) fn combine(&mut self, other: &Measures, with: impl Fn(u64, u64) -> u64 + Copy) {
        self.latencies.combine(&other.latencies, with);
        self.spaces.combine(&other.spaces, with);
    }

    /// Adds the measures of another process.
    pub(crate) fn add(&mut self, other: &Measures) {
        self.combine(other, u64::saturating_add);
    }
}

impl Totals {
    /// Adds the measures of a process.
    pub(crate) fn measured(&mut self, measures: &Measures) {
        self.latencies.add(&measures.latencies);
        self.spaces.add(&measures.spaces);
    }
}

/// Counters of the owners' work on the pages of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct StoreCounts {
    /// Pages dropped to make room.
    pub evicted_pages: u64,
    /// Pages deleted, one by one or with their namespace.
    pub deleted_pages: u64,
    /// Pages forgotten because their bytes failed the checksum or could not be read.
    pub damaged_pages: u64,
    /// Pages forgotten because a crash interrupted their writes.
    pub unfinished_pages: u64,
    /// Pages moved by reclaim.
    pub pages_moved: u64,
    /// Segments reclaimed.
    pub freed_segments: u64,
    /// Puts refused because every volume was in read-only service.
    pub refused_read_only_puts: u64,
    /// Syncs that succeeded.
    pub syncs: u64,
    /// Syncs that failed.
    pub failed_syncs: u64,
    /// Bytes written to the volumes, by cause.
    pub written: Written,
    /// Pages read into the memory of shared reads.
    pub shared_pages_filled: u64,
    /// Pages found there.
    pub shared_pages_hit: u64,
}

/// Bytes written to the volumes, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Written {
    /// Pages of puts.
    pub pages_bytes: u64,
    /// Copies of pages, made by reclaim and after failed syncs.
    pub copies_bytes: u64,
    /// Descriptors of pages and deletions.
    pub descriptors_bytes: u64,
    /// Headers of segments.
    pub headers_bytes: u64,
    /// Blocks written once before their first use.
    pub prewriting_bytes: u64,
}

/// Latencies of calls and of device operations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Latencies {
    /// Calls of `longest_prefix` and `contains`: one in 64 of each thread.
    pub lookup: Buckets,
    /// Calls of `get` and `get_lent`, of one page or many.
    pub get: Buckets,
    /// Calls of `put`, of one page or many, including their waits for room.
    pub put: Buckets,
    /// Calls of `flush`.
    pub flush: Buckets,
    /// Reads from the volumes' devices.
    pub device_read: Buckets,
    /// Writes to them.
    pub device_write: Buckets,
    /// Syncs of them.
    pub device_sync: Buckets,
}

impl Latencies {
    /// Each kind, with its name.
    #[must_use]
    pub fn kinds(&self) -> [(&'static str, &Buckets); 7] {
        let Latencies {
            lookup,
            get,
            put,
            flush,
            device_read,
            device_write,
            device_sync,
        } = self;
        [
            ("lookup", lookup),
            ("get", get),
            ("put", put),
            ("flush", flush),
            ("device_read", device_read),
            ("device_write", device_write),
            ("device_sync", device_sync),
        ]
    }

    /// Combines each counter with that of `other`.
    pub(crate) fn combine(&mut self, other: &Latencies, with: impl Fn(u64, u64) -> u64 + Copy) {
        let Latencies {
            lookup,
            get,
            put,
            flush,
            device_read,
            device_write,
            device_sync,
        } = self;
        let own = [
            lookup,
            get,
            put,
            flush,
            device_read,
            device_write,
            device_sync,
        ];
        for (own, (_, other)) in own.into_iter().zip(other.kinds()) {
            own.combine(other, with);
        }
    }

    /// Adds the latencies of another process.
    pub(crate) fn add(&mut self, other: &Latencies) {
        self.combine(other, u64::saturating_add);
    }
}

impl Written {
    /// Bytes written for any cause.
    #[must_use]
    pub fn total(&self) -> u64 {
        let causes = self.causes().into_iter();
        causes.fold(0, |sum, (_, bytes)| sum.saturating_add(bytes))
    }

    /// The bytes of each cause, with its name.
    #[must_use]
    pub fn causes(&self) -> [(&'static str, u64); 5] {
        [
            ("pages", self.pages_bytes),
            ("copies", self.copies_bytes),
            ("descriptors", self.descriptors_bytes),
            ("headers", self.headers_bytes),
            ("prewriting", self.prewriting_bytes),
        ]
    }
}

impl StoreCounts {
    fn slots(&mut self) -> [&mut u64; 16] {
        let StoreCounts {
            evicted_pages,
            deleted_pages,
            damaged_pages,
            unfinished_pages,
            pages_moved,
            freed_segments,
            refused_read_only_puts,
            syncs,
            failed_syncs,
            written,
            shared_pages_filled,
            shared_pages_hit,
        } = self;
        let Written {
            pages_bytes,
            copies_bytes,
            descriptors_bytes,
            headers_bytes,
            prewriting_bytes,
        } = written;
        [
            evicted_pages,
            deleted_pages,
            damaged_pages,
            unfinished_pages,
            pages_moved,
            freed_segments,
            refused_read_only_puts,
            syncs,
            failed_syncs,
            pages_bytes,
            copies_bytes,
            descriptors_bytes,
            headers_bytes,
            prewriting_bytes,
            shared_pages_filled,
            shared_pages_hit,
        ]
    }

    pub(crate) fn add(&mut self, mut other: StoreCounts) {
        for (count, other) in self.slots().into_iter().zip(other.slots()) {
            *count = count.saturating_add(*other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn totals_are_sums_of_each_counter() {
        let mut one = StoreCounts::default();
        for (value, slot) in (1..).zip(one.slots()) {
            *slot = value;
        }
        let mut sum = one;
        sum.add(one);
        for (value, slot) in (1..).zip(sum.slots()) {
            assert_eq!(*slot, 2 * value);
        }
        let Written { pages_bytes, .. } = one.written;
        assert_eq!(
            (pages_bytes, one.written.total()),
            (10, 10 + 11 + 12 + 13 + 14)
        );

        let mut latencies = Latencies::default();
        latencies.get.record(3_000, 5);
        let mut both = Latencies::default();
        both.add(&latencies);
        both.add(&latencies);
        assert_eq!((both.get.count(), both.get.sum_ns), (10, 30_000));
        assert_eq!(both.put, Buckets::default());
    }
}
