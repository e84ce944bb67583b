//! Reads by namespace.
//!
//! At most [`SPACES_MAX`] namespaces have an entry of their own, in the order in which they were
//! read first. All others share one. A namespace keeps its entry, so no counter goes down.

use std::collections::{BTreeMap, HashMap};

use larder_base::runtime::Mutex;
use larder_core::counters::{Counted, Misses};
use larder_core::status::GetStatus;
use larder_format::Fingerprint;
use serde::{Deserialize, Serialize};

/// Most namespaces with an entry of their own.
pub const SPACES_MAX: usize = 64;

/// The entry of all further namespaces.
pub const OTHER: &str = "other";

/// Hexadecimal digits of a fingerprint.
const DIGITS: usize = 32;

/// Pages that gets returned, and pages that they did not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Reads {
    /// Pages read and verified.
    #[serde(rename = "pages_hit")]
    pub hits: u64,
    /// Pages requested and not returned.
    pub misses: Misses,
}

impl Reads {
    fn combine(&mut self, other: &Reads, with: &mut impl FnMut(u64, u64) -> u64) {
        self.hits.combine(&other.hits, with);
        self.misses.combine(&other.misses, with);
    }
}

/// See the module. By the fingerprint of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Spaces(BTreeMap<String, Reads>);

impl Spaces {
    /// Each entry, with the fingerprint of its namespace or [`OTHER`].
    pub fn iter(&self) -> impl Iterator<Item = (&str, Reads)> {
        self.0.iter().map(|(name, reads)| (&**name, *reads))
    }

    fn entry(&mut self, name: &str) -> &mut Reads {
        let own = self.0.len() - usize::from(self.0.contains_key(OTHER));
        let is_known = self.0.contains_key(name);
        let is_name = name.len() == DIGITS && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        let name = match is_known || is_name && own < SPACES_MAX {
            true => name,
            false => OTHER,
        };
        self.0.entry(name.to_owned()).or_default()
    }

    /// Combines each counter with that of `other`.
    pub(crate) fn combine(&mut self, other: &Spaces, with: &mut impl FnMut(u64, u64) -> u64) {
        for (name, reads) in other.iter() {
            self.entry(name).combine(&reads, with);
        }
    }

    /// Adds the reads of another process.
    pub(crate) fn add(&mut self, other: &Spaces) {
        self.combine(other, &mut u64::saturating_add);
    }
}

/// The reads of a handle, while it counts.
#[derive(Default)]
pub(crate) struct SpaceCounters(Mutex<Named>);

#[derive(Default)]
struct Named {
    own: HashMap<Fingerprint, Reads>,
    other: Reads,
}

impl SpaceCounters {
    /// Counts the pages of one call.
    pub(crate) fn count(&self, space: Fingerprint, statuses: impl Iterator<Item = GetStatus>) {
        let mut counted = self.0.lock();
        let is_full = counted.own.len() >= SPACES_MAX && !counted.own.contains_key(&space);
        let reads = match is_full {
            true => &mut counted.other,
            false => counted.own.entry(space).or_default(),
        };
        for status in statuses {
            match status {
                GetStatus::Hit => reads.hits += 1,
                GetStatus::Miss(reason) => reads.misses.count(reason),
            }
        }
    }

    /// All namespaces together.
    pub(crate) fn total(&self) -> Reads {
        let counted = self.0.lock();
        let mut total = counted.other;
        for reads in counted.own.values() {
            total.combine(reads, &mut u64::saturating_add);
        }
        total
    }

    pub(crate) fn read(&self) -> Spaces {
        let counted = self.0.lock();
        let own = counted.own.iter();
        let mut all: BTreeMap<String, Reads> = own
            .map(|(space, reads)| (space.to_string(), *reads))
            .collect();
        if counted.other != Reads::default() {
            all.insert(OTHER.to_owned(), counted.other);
        }
        Spaces(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_core::status::MissReason;

    fn space(number: u8) -> Fingerprint {
        Fingerprint::from_bytes([number; 16])
    }

    #[test]
    fn each_page_is_counted_under_its_namespace_and_its_reason() {
        let counters = SpaceCounters::default();
        let hits = std::iter::repeat_n(GetStatus::Hit, 3);
        let misses = [GetStatus::Miss(MissReason::Absent); 2];
        counters.count(space(1), hits.chain(misses));
        let damaged = [GetStatus::Miss(MissReason::Damaged)];
        counters.count(space(2), damaged.into_iter());
        let spaces = counters.read();
        let read: Vec<(u64, u64, u64)> = spaces
            .iter()
            .map(|(_, reads)| (reads.hits, reads.misses.absent, reads.misses.total()))
            .collect();
        assert_eq!(read, [(3, 2, 2), (0, 0, 1)]);
    }

    #[test]
    fn namespaces_beyond_the_limit_share_an_entry_here_and_in_a_sum() {
        let count = |numbers: std::ops::Range<u8>| {
            let counters = SpaceCounters::default();
            for number in numbers {
                counters.count(space(number), std::iter::once(GetStatus::Hit));
            }
            counters.read()
        };
        let of = |spaces: &Spaces, name: &str| {
            let found = spaces.iter().find(|(of, _)| *of == name);
            found.map_or(0, |(_, reads)| reads.hits)
        };
        let many = count(0..70);
        assert_eq!((many.iter().count(), of(&many, OTHER)), (SPACES_MAX + 1, 6));
        let mut sum = count(60..90);
        sum.add(&many);
        assert_eq!(sum.iter().count(), SPACES_MAX + 1);
        assert_eq!(of(&sum, &space(63).to_string()), 2);
        assert_eq!(sum.iter().map(|(_, reads)| reads.hits).sum::<u64>(), 100);
    }

    #[test]
    fn a_name_that_is_no_fingerprint_gets_no_entry() {
        let sent = r#"{"../x": {"pages_hit": 2}, "later": {"pages_hit": 3, "more": 1}}"#;
        let sent: Spaces = serde_json::from_str(sent).expect("it is JSON");
        let mut sum = Spaces::default();
        sum.add(&sent);
        let names: Vec<_> = sum.iter().map(|(name, reads)| (name, reads.hits)).collect();
        assert_eq!(names, [(OTHER, 5)]);
    }
}
