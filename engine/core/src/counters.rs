//! The table of the counters: each with its name in JSON documents, its metric, and its meaning.
//!
//! The structs, their sums, the messages between processes, `larder stat --json` and the metrics
//! are made from it. A new counter is a row here, the place that counts it, and the rows in
//! docs/json.md and docs/metrics.md, for which the tests of the tools ask.

use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::latency::Buckets;
use serde::{Deserialize, Serialize};

use crate::status::MissReason;

/// A counter of the table.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counter {
    /// Its name in JSON documents.
    pub name: &'static str,
    pub meaning: &'static str,
    /// Its metric without the suffix of counters, and in braces the label if it has one. Counters
    /// of one metric stand together.
    pub metric: &'static str,
    /// The meaning of the metric.
    pub help: &'static str,
    /// The value of the label.
    pub value: &'static str,
}

/// The value of a counter.
#[derive(Clone, Copy, Debug)]
pub enum Value<'a> {
    Count(u64),
    Times(&'a Buckets),
}

/// One counter, or a struct of counters.
pub trait Counted: Clone + Default {
    /// Combines each counter with that of `other`, in the order of the table.
    fn combine(&mut self, other: &Self, with: &mut impl FnMut(u64, u64) -> u64);

    /// Lists each counter with its row. `row` is that of a single counter.
    fn rows_into<'a>(&'a self, row: Counter, list: &mut Vec<(Counter, Value<'a>)>);

    /// Each counter with its row.
    fn rows(&self) -> Vec<(Counter, Value<'_>)> {
        let mut rows = Vec::new();
        self.rows_into(Counter::default(), &mut rows);
        rows
    }

    /// Adds the counters of another process.
    fn add(&mut self, other: &Self) {
        self.combine(other, &mut u64::saturating_add);
    }

    /// The counters, in the order of the table.
    fn list(&self) -> Vec<u64> {
        let mut list = Vec::new();
        self.clone().combine(self, &mut |count, _| {
            list.push(count);
            count
        });
        list
    }

    /// The sum of the counters.
    fn total(&self) -> u64 {
        let list = self.list().into_iter();
        list.fold(0, u64::saturating_add)
    }
}

impl Counted for u64 {
    fn combine(&mut self, other: &u64, with: &mut impl FnMut(u64, u64) -> u64) {
        *self = with(*self, *other);
    }

    fn rows_into<'a>(&'a self, row: Counter, list: &mut Vec<(Counter, Value<'a>)>) {
        list.push((row, Value::Count(*self)));
    }
}

impl Counted for Buckets {
    fn combine(&mut self, other: &Buckets, with: &mut impl FnMut(u64, u64) -> u64) {
        Buckets::combine(self, other, with);
    }

    fn rows_into<'a>(&'a self, row: Counter, list: &mut Vec<(Counter, Value<'a>)>) {
        list.push((row, Value::Times(self)));
    }
}

/// A struct of counters by metric: `field: type as "name" = "value of the label", "meaning"`. The
/// name is that of the field by default, the meaning that of the metric.
macro_rules! counters {
    (
        $(#[$about:meta])*
        $Struct:ident {
            $($metric:literal, $help:literal {
                $($field:ident: $type:ty $(as $name:literal)? $(= $value:literal)?
                    $(, $meaning:literal)?;)*
            })*
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        #[non_exhaustive]
        pub struct $Struct {
            $($(
                #[doc = $help]
                $(#[doc = $meaning])?
                $(#[serde(rename = $name)])?
                pub $field: $type,
            )*)*
        }

        impl Counted for $Struct {
            fn combine(&mut self, other: &$Struct, with: &mut impl FnMut(u64, u64) -> u64) {
                $($(self.$field.combine(&other.$field, with);)*)*
            }

            fn rows_into<'a>(&'a self, _: Counter, list: &mut Vec<(Counter, Value<'a>)>) {
                $($(
                    let row = Counter {
                        name: [$($name,)? stringify!($field)][0],
                        meaning: [$($meaning,)? $help][0],
                        metric: $metric,
                        help: $help,
                        value: [$($value,)? ""][0],
                    };
                    self.$field.rows_into(row, list);
                )*)*
            }
        }
    };
}

counters! {
    /// Counters of the calls of one process since it opened the store, or attached to its present
    /// owner.
    ///
    /// A client sends them to the owner as one list, which grows at its end: a new counter is the
    /// last one.
    #[derive(Copy)]
    Counts {
        "larder_page_hits", "Pages that gets returned, read and verified" {
            hits: u64 as "pages_hit", "pages read and verified";
        }
        "", "Pages requested and not returned" {
            misses: Misses;
        }
        "larder_read_bytes", "Bytes of pages that gets requested from the device" {
            bytes_read: u64;
        }
        "larder_put_pages", "Pages that puts stored" {
            pages_put: u64;
        }
        "larder_put_bytes", "Bytes of those pages" {
            bytes_put: u64, "page data of puts, written";
        }
        "larder_duplicate_pages", "Pages that puts found already stored" {
            duplicates: u64 as "duplicate_pages";
        }
        "larder_refused_pages", "Pages that puts refused" {
            refused: u64 as "refused_pages";
        }
        "larder_failed_pages", "Pages of puts whose write or sync failed" {
            failed: u64 as "failed_pages";
        }
        "larder_unread_pages{reason}",
        "Pages that a process found and computed instead of reading them, by reason" {
            slow: u64 as "slow_pages" = "slow",
                "pages that the process found and did not read, because it computes them faster";
            unmeasured: u64 as "unmeasured_pages" = "unmeasured",
                "pages that it found and did not read, because it did not know the time of a read \
                 yet";
        }
        "larder_encoded_bytes{form}", "Bytes of pages that puts encoded, plain and as stored" {
            encoded_plain_bytes: u64 = "plain", "bytes of pages that puts encoded";
            encoded_stored_bytes: u64 = "stored", "bytes that these pages take";
        }
    }
}

counters! {
    /// Pages that gets did not return, by reason. See [`MissReason`].
    #[derive(Copy)]
    Misses {
        "larder_page_misses{reason}", "Pages that gets did not return, by reason" {
            absent: u64 = "absent", "not in the store";
            damaged: u64 = "damaged", "the checksum failed";
            unfinished: u64 = "unfinished", "half written at the last crash";
            read_error: u64 = "read_error", "the device failed the read";
            deadline: u64 = "deadline", "the deadline passed first";
            hung: u64 = "hung", "the volume did not answer within the hang limit";
            stale: u64 = "stale", "the segment was reused during the read of a read-only process";
            wrong_shape: u64 = "wrong_shape",
                "the buffers do not have the shape of the namespace's pages";
            closed: u64 = "closed", "the store was closed during the call";
            undecodable: u64 = "undecodable", "the codec could not decode it";
            sealed: u64 = "sealed", "the key of its tenant did not open it, or is erased";
        }
    }
}

counters! {
    /// Counters of the owners' work on the pages of the store.
    #[derive(Copy)]
    StoreCounts {
        "larder_refused_read_only_puts",
        "Puts refused because every volume was in read-only service" {
            puts_refused_read_only: u64 as "refused_read_only_puts";
        }
        "larder_refused_budget_pages",
        "Pages of puts refused because the budget of writes did not take them" {
            refused_by_budget: u64 as "refused_budget_pages";
        }
        "larder_aborted_pages",
        "Pages of puts that were given up because their client ended or was stopped" {
            aborted: u64 as "aborted_pages";
        }
        "larder_removed_pages{reason}", "Pages that left the store, by reason" {
            evicted: u64 as "evicted_pages" = "evicted", "evicted pages";
            deleted: u64 as "deleted_pages" = "deleted",
                "pages deleted, one by one or with their namespace";
            damaged: u64 as "damaged_pages" = "damaged",
                "pages dropped because their bytes failed the checksum or could not be read";
            unfinished: u64 as "unfinished_pages" = "unfinished",
                "pages dropped because the crash before this open left them half written";
        }
        "larder_lookup_pages{result}", "Pages that lookups asked for, by result" {
            found: u64 as "found_pages" = "found", "pages that lookups found";
            not_found: u64 as "not_found_pages" = "not_found",
                "pages that lookups did not find, or behind a page that they did not find";
        }
        "larder_evicted_below_minimum_pages",
        "Evicted pages that brought their group below the minimum of its quota, for lack of any \
         other room" {
            evicted_below_minimum: u64 as "evicted_below_minimum_pages";
        }
        "larder_expired_pages",
        "Pages removed because they were older than the limit of their group" {
            expired: u64 as "expired_pages";
        }
        "larder_evicted_pinned_pages",
        "Pinned pages that were evicted for lack of any other room" {
            evicted_pinned: u64 as "evicted_pinned_pages";
        }
        "larder_refused_quota_pages",
        "Pages that puts refused because their group is at the maximum of its quota" {
            refused_quota: u64 as "refused_quota_pages";
        }
        "larder_moved_pages", "Pages moved by reclaim" {
            moved: u64 as "pages_moved";
        }
        "larder_freed_segments", "Segments reclaimed" {
            reclaimed: u64 as "freed_segments";
        }
        "", "Bytes written to the volumes, by cause" {
            written: Written;
        }
        "larder_syncs{result}", "Syncs of volumes, by result" {
            syncs: u64 = "ok", "syncs that succeeded";
            failed_syncs: u64 = "failed", "syncs that failed";
        }
        "larder_shared_reads_pages{result}",
        "Pages read into the memory of shared reads, and found there" {
            shared_pages_filled: u64 = "filled", "pages read into the memory of shared reads";
            shared_pages_hit: u64 = "hit", "pages found there";
        }
    }
}

counters! {
    /// Bytes written to the volumes, by cause.
    #[derive(Copy)]
    Written {
        "larder_written_bytes{cause}", "Bytes written to the volumes, by cause" {
            pages_bytes: u64 = "pages", "pages of puts";
            copies_bytes: u64 = "copies", "copies of pages, by reclaim and after failed syncs";
            descriptors_bytes: u64 = "descriptors", "descriptors of pages and deletions";
            headers_bytes: u64 = "headers", "headers of segments";
            prewriting_bytes: u64 = "prewriting", "blocks written before their first use";
        }
    }
}

counters! {
    /// Latencies of calls and of device operations.
    Latencies {
        "larder_lookup_seconds",
        "Time of calls of longest_prefix and contains, one in 64 measured" { lookup: Buckets; }
        "larder_get_seconds", "Time of calls of get" { get: Buckets; }
        "larder_put_seconds", "Time of calls of put, with waits for room" { put: Buckets; }
        "larder_flush_seconds", "Time of calls of flush" { flush: Buckets; }
        "larder_encode_seconds", "Time of the codec for a page of a put" {
            encode: Buckets;
        }
        "larder_decode_seconds", "Time of the codec for a page of a get" {
            decode: Buckets;
        }
        "larder_device_read_seconds",
        "Time of reads from the devices of the volumes" { device_read: Buckets; }
        "larder_device_write_seconds",
        "Time of writes to the devices of the volumes" { device_write: Buckets; }
        "larder_device_sync_seconds",
        "Time of syncs of the devices of the volumes" { device_sync: Buckets; }
    }
}

impl Misses {
    /// Counts one page.
    pub fn count(&mut self, reason: MissReason) {
        let of_reason = match reason {
            MissReason::Absent => &mut self.absent,
            MissReason::Damaged => &mut self.damaged,
            MissReason::Unfinished => &mut self.unfinished,
            MissReason::ReadError => &mut self.read_error,
            MissReason::Deadline => &mut self.deadline,
            MissReason::Hung => &mut self.hung,
            MissReason::Stale => &mut self.stale,
            MissReason::WrongShape => &mut self.wrong_shape,
            MissReason::Closed => &mut self.closed,
            MissReason::Undecodable => &mut self.undecodable,
            MissReason::Sealed => &mut self.sealed,
        };
        *of_reason = of_reason.saturating_add(1);
    }
}

impl Counts {
    /// The counters of a list, which may be shorter or longer than this release knows.
    #[must_use]
    pub fn from_list(list: &[u64]) -> Counts {
        let mut list = list.iter();
        let mut counts = Counts::default();
        let zero = counts;
        counts.combine(&zero, &mut |_, _| list.next().copied().unwrap_or_default());
        counts
    }
}

/// The counters of a process's calls, which its threads count.
#[derive(Debug)]
pub struct Tally(Vec<AtomicU64>);

impl Default for Tally {
    fn default() -> Tally {
        let zeros = Counts::default().list();
        Tally(zeros.into_iter().map(AtomicU64::new).collect())
    }
}

impl Tally {
    pub fn add(&self, counts: Counts) {
        let mut tally = self.0.iter();
        counts.clone().combine(&counts, &mut |count, _| {
            if let Some(sum) = tally.next().filter(|_| count > 0) {
                sum.fetch_add(count, Ordering::Relaxed);
            }
            count
        });
    }

    #[must_use]
    pub fn read(&self) -> Counts {
        let tally = self.0.iter();
        let list: Vec<u64> = tally.map(|sum| sum.load(Ordering::Relaxed)).collect();
        Counts::from_list(&list)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_list_of_counters_may_be_shorter_and_longer_than_this_release_knows() {
        let counters = Counts::default().list().len() as u64;
        let list: Vec<u64> = (1..=counters).collect();
        let counts = Counts::from_list(&list);
        assert_eq!(counts.list(), list);
        assert_eq!(
            (counts.hits, counts.misses.absent, counts.failed),
            (1, 2, 18)
        );
        assert_eq!(counts.misses.total(), (2..=12).sum::<u64>());
        let longer: Vec<u64> = list.iter().copied().chain([99]).collect();
        assert_eq!(Counts::from_list(&longer), counts);
        let short = Counts::from_list(&list[..1]);
        assert_eq!((short.hits, short.misses), (1, Misses::default()));
    }

    #[test]
    fn each_miss_is_counted_under_its_reason() {
        let mut misses = Misses::default();
        let reasons = [
            MissReason::Absent,
            MissReason::Damaged,
            MissReason::Unfinished,
            MissReason::ReadError,
            MissReason::Deadline,
            MissReason::Hung,
            MissReason::Stale,
            MissReason::WrongShape,
            MissReason::Closed,
            MissReason::Undecodable,
            MissReason::Sealed,
        ];
        for (times, reason) in (1..).zip(reasons) {
            (0..times).for_each(|_| misses.count(reason));
        }
        assert_eq!(misses.list(), (1..=11).collect::<Vec<u64>>());
        for (row, _) in misses.rows() {
            assert_eq!(row.name, row.value);
        }
    }

    #[test]
    fn totals_are_sums_of_each_counter() {
        let mut one = StoreCounts::default();
        let mut values = 1..;
        one.combine(&StoreCounts::default(), &mut |_, _| values.next().unwrap());
        let mut sum = one;
        sum.add(&one);
        let doubled: Vec<u64> = one.list().iter().map(|count| 2 * count).collect();
        assert_eq!((sum.list(), one.list()[0]), (doubled, 1));
        let first = one.written.pages_bytes;
        assert_eq!(one.written.total(), (first..first + 5).sum::<u64>());

        let mut latencies = Latencies::default();
        latencies.get.record(3_000, 5);
        let mut both = Latencies::default();
        both.add(&latencies);
        both.add(&latencies);
        assert_eq!((both.get.count(), both.get.sum_ns), (10, 30_000));
        assert_eq!(both.put, Buckets::default());
    }
}
