//! The counters of one process's calls, and the processes that use a store.
//!
//! A client sends its counters to the owner as one list ([`Counts::list`]). The list grows at its
//! end: a reader takes counters that are not in it as zero, and ignores counters of a later
//! release.

use serde::{Deserialize, Serialize};

use larder_core::status::MissReason;

/// Pages that gets did not return, by reason. See [`MissReason`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Misses {
    /// Not in the store.
    pub absent: u64,
    /// The checksum failed.
    pub damaged: u64,
    /// The last crash interrupted their writes.
    pub unfinished: u64,
    /// The device failed the read.
    pub read_error: u64,
    /// The deadline passed first.
    pub deadline: u64,
    /// The volume did not answer within the hang limit.
    pub hung: u64,
    /// The segment was reused while a read-only handle read it.
    pub stale: u64,
    /// The parts do not have the namespace's shape.
    pub wrong_shape: u64,
    /// The store was closed during the call.
    pub closed: u64,
}

/// Counters of the calls of one process since it opened the store, or attached to its present
/// owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Counts {
    /// Pages read and verified.
    #[serde(rename = "pages_hit")]
    pub hits: u64,
    /// Pages requested and not returned.
    pub misses: Misses,
    /// Bytes of pages that gets requested from the device.
    pub bytes_read: u64,
    /// Pages stored by puts.
    pub pages_put: u64,
    /// Their bytes, padding included.
    pub bytes_put: u64,
    /// Pages that puts found already stored.
    #[serde(rename = "duplicate_pages")]
    pub duplicates: u64,
    /// Pages refused.
    #[serde(rename = "refused_pages")]
    pub refused: u64,
    /// Pages whose write or sync failed.
    #[serde(rename = "failed_pages")]
    pub failed: u64,
    /// Pages that the process found and did not read, because it computes them faster.
    #[serde(rename = "slow_pages")]
    pub slow: u64,
    /// Pages that it found and did not read, because it did not know the time of a read yet.
    #[serde(rename = "unmeasured_pages")]
    pub unmeasured: u64,
}

/// Counters in [`Counts`].
const COUNTERS: usize = 18;

impl Misses {
    /// Counts one page.
    pub(crate) fn count(&mut self, reason: MissReason) {
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
        };
        *of_reason = of_reason.saturating_add(1);
    }

    /// Pages missed for any reason.
    #[must_use]
    pub fn total(&self) -> u64 {
        let counts = Counts {
            misses: *self,
            ..Counts::default()
        };
        let mut total: u64 = 0;
        for count in counts.list() {
            total = total.saturating_add(count);
        }
        total
    }
}

impl Counts {
    /// Every counter, in the order in which clients send them. A new counter comes last.
    fn slots(&mut self) -> [&mut u64; COUNTERS] {
        let Counts {
            hits,
            misses,
            bytes_read,
            pages_put,
            bytes_put,
            duplicates,
            refused,
            failed,
            slow,
            unmeasured,
        } = self;
        let Misses {
            absent,
            damaged,
            unfinished,
            read_error,
            deadline,
            hung,
            stale,
            wrong_shape,
            closed,
        } = misses;
        [
            hits,
            absent,
            damaged,
            unfinished,
            read_error,
            deadline,
            hung,
            stale,
            wrong_shape,
            closed,
            bytes_read,
            pages_put,
            bytes_put,
            duplicates,
            refused,
            failed,
            slow,
            unmeasured,
        ]
    }

    pub(crate) fn list(mut self) -> Vec<u64> {
        self.slots().into_iter().map(|count| *count).collect()
    }

    pub(crate) fn from_list(list: &[u64]) -> Counts {
        let mut counts = Counts::default();
        for (count, given) in counts.slots().into_iter().zip(list) {
            *count = *given;
        }
        counts
    }

    /// Combines each counter with that of `other`.
    pub(crate) fn combine(&mut self, other: Counts, with: impl Fn(u64, u64) -> u64) {
        for (count, other) in self.slots().into_iter().zip(other.list()) {
            *count = with(*count, other);
        }
    }

    /// Adds the counters of another process.
    pub fn add(&mut self, other: Counts) {
        self.combine(other, u64::saturating_add);
    }
}

/// A process that uses a store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Process {
    /// Its number among the clients of this owner; `None` for the owner itself.
    pub client: Option<u32>,
    /// Its pid in the owner's pid namespace. `None` if it is not visible there.
    pub pid: Option<u32>,
    /// The name of its program, as the system shows it; `None` if it is not known.
    pub name: Option<String>,
    /// Its release.
    pub release: String,
    /// Seconds since it opened the store, or attached to this owner.
    pub uptime_seconds: f64,
    /// Its counters; `None` if its release does not send them.
    pub counts: Option<Counts>,
}

/// The clients of an owner that have gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Departed {
    /// How many there were.
    pub clients: u64,
    /// Their counters together.
    pub counts: Counts,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_counters_may_be_shorter_and_longer_than_this_release_knows() {
        let list: Vec<u64> = (1..=COUNTERS as u64).collect();
        let counts = Counts::from_list(&list);
        assert_eq!(counts.list(), list);
        assert_eq!(
            (counts.hits, counts.misses.absent, counts.failed),
            (1, 2, 16)
        );
        assert_eq!(counts.misses.total(), (2..=10).sum::<u64>());
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
        ];
        for (times, reason) in (1..).zip(reasons) {
            (0..times).for_each(|_| misses.count(reason));
        }
        let Misses {
            absent,
            closed,
            hung,
            ..
        } = misses;
        assert_eq!((absent, hung, closed), (1, 6, 9));
        assert_eq!(misses.total(), 45);
    }
}
