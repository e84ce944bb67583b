//! The cost of damage, per namespace, as far as the remaining records show it.
//!
//! Lost pages are a lower bound. A page record names the page's parent. A parent without any record
//! is lost, unless a remaining record removed it. A page at depth `n` has `n` ancestors. So each
//! depth above a lost parent at which the namespace has no page any more has lost at least one page
//! too.
//!
//! Doubtful pages are an upper bound. Lost descriptor blocks may have held deletions, evictions and
//! clears. A page that counts is doubtful when its own record is older than the newest record that
//! may be lost.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use larder_format::{BLOCK_BYTES, HEADER_BLOCKS, KeyPrefix, Serial};
use larder_store::recovery::{Found, Whole};

use super::facts::{Flaw, FlawReason};
use super::{Records, Survey};

/// The cost of damage to structures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Segments whose headers and descriptor blocks are all lost, and segments on missing volumes.
    pub segments: u64,
    /// Upper bound of the bytes of lost pages.
    pub bytes_max: u64,
    /// In the order of [`Survey::namespaces`].
    pub namespaces: Vec<NamespaceLosses>,
}

/// The cost of damage to one namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceLosses {
    /// Lower bound of the lost pages.
    pub lost_pages: u64,
    /// Upper bound of the pages that count again although a lost record had removed them.
    pub doubtful_pages: u64,
}

impl Survey {
    /// The cost of damage to structures; `None` if no record is lost.
    #[must_use]
    pub fn losses(&self) -> Option<&Losses> {
        self.losses.as_ref()
    }

    /// Sums up the losses. `lost_until` is above the commit of every lost record. `is_removed`
    /// states whether a remaining record removed a key of a namespace.
    pub(super) fn sum_up_losses(
        &self,
        lost_until: Serial,
        is_removed: impl Fn(&Found<Whole>, KeyPrefix) -> bool,
    ) -> Losses {
        let mut namespaces = vec![NamespaceLosses::default(); self.namespaces.len()];
        let live = self.records.live.iter();
        let live: Vec<&Found<Whole>> = live.map(|&at| &self.records.found[at]).collect();
        for pages in live.chunk_by(|a, b| a.slot == b.slot) {
            let doubtful = pages.iter().filter(|page| page.commit < lost_until);
            namespaces[usize::from(pages[0].slot.0)] = NamespaceLosses {
                lost_pages: lost_pages(pages, &self.records, &is_removed),
                doubtful_pages: doubtful.count() as u64,
            };
        }
        let lost = |flaw: &Flaw| match flaw.reason {
            FlawReason::LostSegment(_) => 1,
            FlawReason::LostContents { segments, .. } => u64::from(segments),
            _ => 0,
        };
        Losses {
            segments: self.flaws.iter().map(lost).sum::<u64>() + self.unreachable,
            bytes_max: self.lost_bytes_max(),
            namespaces,
        }
    }

    /// Bytes of page data without any remaining record.
    fn lost_bytes_max(&self) -> u64 {
        let room = self.segment_bytes() - (u64::from(HEADER_BLOCKS) + 1) * BLOCK_BYTES as u64;
        let mut damaged: BTreeMap<(usize, u32), u64> = BTreeMap::new();
        for flaw in &self.flaws {
            let Some(segment) = flaw.segment else {
                continue;
            };
            match flaw.reason {
                FlawReason::LostSegment(_) => damaged.insert((flaw.volume, segment), room),
                FlawReason::Descriptor(_) => {
                    let facts = self.facts_of(flaw.volume, segment);
                    let written = facts.map_or(0, |facts| facts.data_bytes);
                    damaged.insert((flaw.volume, segment), written)
                }
                _ => None,
            };
        }
        for page in &self.records.found {
            let facts = &self.segments[page.place.segment.0 as usize];
            if let Some(bytes) = damaged.get_mut(&(facts.volume, facts.number)) {
                *bytes = bytes.saturating_sub(self.records.bytes(page));
            }
        }
        let emptied = self.flaws.iter().map(|flaw| match flaw.reason {
            FlawReason::LostContents { segments, .. } => u64::from(segments),
            _ => 0,
        });
        let away = emptied.sum::<u64>() + self.unreachable;
        damaged.values().sum::<u64>() + away.saturating_mul(room)
    }
}

/// The pages of a namespace that are certainly lost, given its live pages.
fn lost_pages(
    pages: &[&Found<Whole>],
    records: &Records,
    is_removed: impl Fn(&Found<Whole>, KeyPrefix) -> bool,
) -> u64 {
    let depths: BTreeSet<u32> = pages.iter().map(|page| page.extra.depth).collect();
    let mut lost: BTreeMap<u32, HashSet<KeyPrefix>> = BTreeMap::new();
    for page in pages {
        let (Some(parent), Some(depth)) = (page.parent, page.extra.depth.checked_sub(1)) else {
            continue;
        };
        let is_known = !records.range(usize::from(page.slot.0), parent).is_empty();
        if !is_known && !is_removed(page, parent) {
            lost.entry(depth).or_default().insert(parent);
        }
    }
    let mut count = 0;
    let mut next = 0;
    for (&depth, parents) in &lost {
        let above = depths.range(..depth).next_back();
        next = above.map_or(0, |above| above + 1).max(next);
        count += u64::from(depth - next) + parents.len() as u64;
        next = depth + 1;
    }
    count
}
