//! Ages of pages at their use and at their eviction, in buckets.
//!
//! A page has no time of its own in RAM. Its segment has the mean time of the puts of its pages,
//! [`Index::born_ms`](crate::index::Index::born_ms). A page that reclaim copies brings the mean of
//! its former segment along. So an age is exact to the time in which a segment fills.

use serde::{Deserialize, Serialize};

use crate::index::NamespaceSlot;

/// Upper bounds of the buckets, in seconds. A last bucket has no bound.
pub const BOUNDS_S: [u64; 11] = [
    60,
    15 * 60,
    3600,
    3 * 3600,
    8 * 3600,
    24 * 3600,
    2 * 24 * 3600,
    4 * 24 * 3600,
    8 * 24 * 3600,
    15 * 24 * 3600,
    30 * 24 * 3600,
];

/// Most namespaces of one run with ages of their own, in the order of their first page.
const SLOTS_MAX: usize = 16;

/// Pages by age.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Ages {
    /// Pages in each bucket.
    pub counts: [u64; BOUNDS_S.len() + 1],
    /// The ages together, in seconds.
    pub sum_s: u64,
}

impl Ages {
    /// Records pages that were put at `born_ms`. Both times are in milliseconds since 1970. Pages
    /// of an unknown time, 0, do not count.
    pub fn record(&mut self, born_ms: u64, now_ms: u64, pages: u64) {
        if born_ms == 0 {
            return;
        }
        let age_s = now_ms.saturating_sub(born_ms) / 1000;
        let bucket = BOUNDS_S.partition_point(|bound| *bound < age_s);
        self.counts[bucket] = self.counts[bucket].saturating_add(pages);
        self.sum_s = self.sum_s.saturating_add(age_s.saturating_mul(pages));
    }

    /// Combines each counter with that of `other`.
    pub fn combine(&mut self, other: &Ages, with: &mut impl FnMut(u64, u64) -> u64) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count = with(*count, *more);
        }
        self.sum_s = with(self.sum_s, other.sum_s);
    }

    /// All pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The upper bound of the bucket that holds the page at this share, from the youngest. `None`
    /// without pages, and for the bucket without a bound.
    #[must_use]
    pub fn within_s(&self, share: f64) -> Option<u64> {
        let wanted = (self.pages() as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        let mut buckets = self.counts.iter().zip(BOUNDS_S);
        let found = buckets.find(|(count, _)| {
            seen += **count;
            seen >= wanted
        });
        found.map(|(_, bound)| bound)
    }
}

/// Ages by namespace: the first `SLOTS_MAX` namespaces have an entry, all others share one.
#[derive(Clone, Debug, Default)]
pub struct AgesBySlot {
    own: Vec<(NamespaceSlot, Ages)>,
    other: Ages,
}

impl AgesBySlot {
    /// The ages of a namespace, to be recorded in.
    pub fn of(&mut self, slot: NamespaceSlot) -> &mut Ages {
        let known = self.own.iter().position(|(own, _)| *own == slot);
        if known.is_none() && self.own.len() >= SLOTS_MAX {
            return &mut self.other;
        }
        let at = known.unwrap_or_else(|| {
            self.own.push((slot, Ages::default()));
            self.own.len() - 1
        });
        &mut self.own[at].1
    }

    /// Each entry; `None` names that of all further namespaces.
    pub fn iter(&self) -> impl Iterator<Item = (Option<NamespaceSlot>, &Ages)> {
        let own = self.own.iter().map(|(slot, ages)| (Some(*slot), ages));
        let other = std::iter::once((None, &self.other));
        own.chain(other.filter(|(_, ages)| ages.pages() > 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_MS: u64 = 1_800_000_000_000;

    #[test]
    fn an_age_counts_in_the_first_bucket_whose_bound_it_does_not_exceed() {
        let mut ages = Ages::default();
        for age_s in [0, 60, 61, 3600, 40 * 24 * 3600] {
            ages.record(NOW_MS - age_s * 1000, NOW_MS, 2);
        }
        assert_eq!(ages.counts, [4, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
        assert_eq!(ages.sum_s, 2 * (60 + 61 + 3600 + 40 * 24 * 3600));
        assert_eq!(ages.within_s(0.4), Some(60));
        assert_eq!(ages.within_s(0.5), Some(900));
        assert_eq!(ages.within_s(0.8), Some(3600));
        assert_eq!(ages.within_s(0.9), None);
        assert_eq!(Ages::default().within_s(0.5), None);
    }

    #[test]
    fn an_unknown_time_does_not_count_and_a_clock_that_was_set_back_gives_age_0() {
        let mut ages = Ages::default();
        ages.record(0, NOW_MS, 1);
        assert_eq!(ages, Ages::default());
        ages.record(NOW_MS + 5000, NOW_MS, 1);
        assert_eq!((ages.counts[0], ages.sum_s), (1, 0));
    }

    #[test]
    fn namespaces_beyond_the_limit_share_an_entry_and_none_loses_its_own() {
        let mut ages = AgesBySlot::default();
        for _ in 0..2 {
            for slot in 0..20 {
                ages.of(NamespaceSlot(slot)).record(NOW_MS, NOW_MS, 1);
            }
        }
        let list: Vec<_> = ages
            .iter()
            .map(|(slot, ages)| (slot, ages.pages()))
            .collect();
        let own = (0..16).map(|slot| (Some(NamespaceSlot(slot)), 2));
        let all: Vec<_> = own.chain([(None, 8)]).collect();
        assert_eq!(list, all);
    }
}
