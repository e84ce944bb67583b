//! Reads, tokens of requests, and ages of pages, by namespace.
//!
//! At most [`SPACES_MAX`] namespaces, or [`AGED_MAX`] for ages, have an entry of their own, in the
//! order in which they were read first. All others share one. A namespace keeps its entry, so no
//! counter goes down.

use std::collections::{BTreeMap, HashMap};

use larder_base::runtime::Mutex;
use larder_core::ages::Ages;
use larder_core::counters::{Counted, Misses};
use larder_core::status::GetStatus;
use larder_format::Fingerprint;
use serde::{Deserialize, Serialize};

use crate::api::Count;

/// Most namespaces with an entry of their own.
pub const SPACES_MAX: usize = 64;

/// Most namespaces with ages of their own.
pub const AGED_MAX: usize = 16;

/// The entry of all further namespaces.
pub const OTHER: &str = "other";

/// Hexadecimal digits of a fingerprint.
const DIGITS: usize = 32;

/// Pages that gets returned, pages that they did not, and the tokens of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Reads {
    /// Pages read and verified.
    #[serde(rename = "pages_hit")]
    pub hits: u64,
    /// Pages requested and not returned.
    pub misses: Misses,
    /// Tokens of requests.
    pub tokens: Tokens,
}

/// Tokens of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Tokens {
    /// Requests that asked for tokens.
    pub requests: u64,
    /// Tokens that they asked for and that the store had.
    #[serde(rename = "found_tokens")]
    pub found: u64,
    /// Tokens that they asked for and that the store did not have. A page that is missing counts
    /// with all pages behind it.
    #[serde(rename = "not_found_tokens")]
    pub not_found: u64,
    /// Tokens whose pages were read from the store, instead of computed.
    #[serde(rename = "served_tokens")]
    pub served: u64,
    /// Milliseconds that their computation would have taken; 0 while the rate is not known.
    #[serde(rename = "saved_prefill_ms")]
    pub saved_ms: u64,
}

impl Tokens {
    /// Adds a caller's count.
    fn count(&mut self, count: Count) {
        let add = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        match count {
            Count::Asked {
                tokens,
                found,
                is_first,
            } => {
                add(&mut self.requests, is_first.into());
                add(&mut self.found, found);
                add(&mut self.not_found, tokens.saturating_sub(found));
            }
            Count::Served {
                tokens,
                prefill_rate,
            } => {
                let rate = prefill_rate.filter(|rate| *rate > 0.0);
                let saved = rate.map_or(0, |rate| (tokens as f64 * 1000.0 / rate) as u64);
                add(&mut self.served, tokens);
                add(&mut self.saved_ms, saved);
            }
            Count::Unread { .. } => {}
        }
    }

    fn combine(&mut self, other: &Tokens, with: &mut impl FnMut(u64, u64) -> u64) {
        self.requests.combine(&other.requests, with);
        self.found.combine(&other.found, with);
        self.not_found.combine(&other.not_found, with);
        self.served.combine(&other.served, with);
        self.saved_ms.combine(&other.saved_ms, with);
    }
}

impl Sums for Reads {
    fn combine(&mut self, other: &Reads, with: &mut impl FnMut(u64, u64) -> u64) {
        self.hits.combine(&other.hits, with);
        self.misses.combine(&other.misses, with);
        self.tokens.combine(&other.tokens, with);
    }
}

/// The ages of a namespace's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct SpaceAges {
    /// At each read for a use.
    pub used: Ages,
    /// At their eviction.
    pub evicted: Ages,
}

impl Sums for SpaceAges {
    fn combine(&mut self, other: &SpaceAges, with: &mut impl FnMut(u64, u64) -> u64) {
        self.used.combine(&other.used, with);
        self.evicted.combine(&other.evicted, with);
    }
}

/// Counters of one namespace.
pub trait Sums: Copy + Default {
    /// Combines each counter with that of `other`.
    fn combine(&mut self, other: &Self, with: &mut impl FnMut(u64, u64) -> u64);
}

/// Reads and tokens by namespace.
pub type Spaces = BySpace<Reads, SPACES_MAX>;

/// Ages of pages by namespace.
pub type AgesOfSpaces = BySpace<SpaceAges, AGED_MAX>;

/// See the module. By the fingerprint of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BySpace<T, const OWN_MAX: usize>(BTreeMap<String, T>);

impl<T: Sums, const OWN_MAX: usize> BySpace<T, OWN_MAX> {
    /// Each entry, with the fingerprint of its namespace or [`OTHER`].
    pub fn iter(&self) -> impl Iterator<Item = (&str, T)> {
        self.0.iter().map(|(name, of)| (&**name, *of))
    }

    /// All namespaces together.
    #[must_use]
    pub fn total(&self) -> T {
        let mut all = T::default();
        for (_, of) in self.iter() {
            all.combine(&of, &mut u64::saturating_add);
        }
        all
    }

    pub(crate) fn entry(&mut self, name: &str) -> &mut T {
        let own = self.0.len() - usize::from(self.0.contains_key(OTHER));
        let is_known = self.0.contains_key(name);
        let is_name = name.len() == DIGITS && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        let name = match is_known || is_name && own < OWN_MAX {
            true => name,
            false => OTHER,
        };
        self.0.entry(name.to_owned()).or_default()
    }

    /// Combines each counter with that of `other`.
    pub(crate) fn combine(&mut self, other: &Self, with: &mut impl FnMut(u64, u64) -> u64) {
        for (name, of) in other.iter() {
            self.entry(name).combine(&of, with);
        }
    }

    /// Adds the counters of another process.
    pub(crate) fn add(&mut self, other: &Self) {
        self.combine(other, &mut u64::saturating_add);
    }
}

/// The reads of a handle and its tokens, while it counts.
#[derive(Default)]
pub(crate) struct SpaceCounters(Mutex<Named>);

#[derive(Default)]
struct Named {
    own: HashMap<Fingerprint, Reads>,
    other: Reads,
}

impl SpaceCounters {
    /// Counts the pages of one call.
    pub(crate) fn count(&self, space: Fingerprint, statuses: &[GetStatus]) {
        self.change(space, |reads| {
            for status in statuses {
                match status {
                    GetStatus::Hit => reads.hits += 1,
                    GetStatus::Miss(reason) => reads.misses.count(*reason),
                }
            }
        });
    }

    /// Counts tokens of a request.
    pub(crate) fn count_tokens(&self, space: Fingerprint, count: Count) {
        self.change(space, |reads| reads.tokens.count(count));
    }

    fn change(&self, space: Fingerprint, change: impl FnOnce(&mut Reads)) {
        let mut counted = self.0.lock();
        let is_full = counted.own.len() >= SPACES_MAX && !counted.own.contains_key(&space);
        change(match is_full {
            true => &mut counted.other,
            false => counted.own.entry(space).or_default(),
        });
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
        BySpace(all)
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
        let absent = GetStatus::Miss(MissReason::Absent);
        counters.count(space(1), &[GetStatus::Hit, GetStatus::Hit, absent]);
        counters.count(space(1), &[GetStatus::Hit, absent]);
        counters.count(space(2), &[GetStatus::Miss(MissReason::Damaged)]);
        let spaces = counters.read();
        let read: Vec<(u64, u64, u64)> = spaces
            .iter()
            .map(|(_, reads)| (reads.hits, reads.misses.absent, reads.misses.total()))
            .collect();
        assert_eq!(read, [(3, 2, 2), (0, 0, 1)]);
    }

    #[test]
    fn tokens_are_sums_of_their_requests_in_each_process_and_over_all() {
        let count = |space_of: u8| {
            let counters = SpaceCounters::default();
            for (tokens, found) in [(100, 64), (32, 0)] {
                let asked = Count::Asked {
                    tokens,
                    found,
                    is_first: true,
                };
                counters.count_tokens(space(space_of), asked);
            }
            for (tokens, prefill_rate) in [(64, Some(6_400.0)), (1, None)] {
                let served = Count::Served {
                    tokens,
                    prefill_rate,
                };
                counters.count_tokens(space(space_of), served);
            }
            counters.read()
        };
        let one = Tokens {
            requests: 2,
            found: 64,
            not_found: 68,
            served: 65,
            saved_ms: 10,
        };
        let mut sum = count(1);
        assert_eq!(sum.total().tokens, one);
        sum.add(&count(2));
        assert_eq!(
            (sum.total().tokens.requests, sum.total().tokens.saved_ms),
            (4, 20)
        );
        assert!(sum.iter().all(|(_, reads)| reads.tokens == one));
    }

    #[test]
    fn namespaces_beyond_the_limit_share_an_entry_here_and_in_a_sum() {
        let count = |numbers: std::ops::Range<u8>| {
            let counters = SpaceCounters::default();
            for number in numbers {
                counters.count(space(number), &[GetStatus::Hit]);
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
