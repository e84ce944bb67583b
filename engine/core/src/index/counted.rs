//! Counted leases and kept pages. A page stays until its lease was returned as often as it was
//! taken, and a kept page stays until a time that an operator or a caller sets (a pin in the log).
//!
//! A page that is leased or kept has one child more in its link than it has children. So eviction
//! and reclaim pass over it and its ancestors as over any page that is no leaf, at no cost.
//!
//! Invariants: the pages under counted leases take at most a quarter of the capacity; beyond it
//! leases are refused and counted. The core bounds the blocks of kept pages. Leases and the keeping
//! end with the page, when that is deleted, cleared or found damaged. A store that finds no room
//! for copies evicts such pages too.

use std::collections::{BTreeSet, HashMap};

use larder_format::Serial;

use super::slab::PageId;
use crate::planted;

/// Most pages with a counted lease: 40 MiB of records.
const PAGES_MAX: u64 = 1 << 20;

/// The reasons for which one page stays.
#[derive(Debug, Clone, Copy)]
struct Count {
    leases: u32,
    blocks: u32,
    kept: Option<Keep>,
}

/// How long a page is kept: by a pin of this version in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keep {
    /// Its end, in seconds since 1970.
    pub until_unix_s: u32,
    /// The version of the pin.
    pub birth: Serial,
}

/// The result of a counted lease for one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Leased {
    /// It stays until the lease is returned.
    Yes,
    /// It is not stored.
    Absent,
    /// The share of the store that may be leased is used up.
    Refused,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Counted {
    counts: HashMap<u32, Count>,
    /// Pages under leases, and their blocks.
    leased: u64,
    blocks: u64,
    blocks_max: u64,
    refused: u64,
    /// Blocks of kept pages, and the end of each.
    kept_blocks: u64,
    ends: BTreeSet<(u32, PageId)>,
}

impl Counted {
    pub(super) fn new(capacity_blocks: u64) -> Counted {
        Counted {
            counts: HashMap::new(),
            leased: 0,
            blocks: 0,
            blocks_max: capacity_blocks / 4,
            refused: 0,
            kept_blocks: 0,
            ends: BTreeSet::new(),
        }
    }

    /// Takes a lease of a stored page that takes so many blocks. Returns whether the page stays
    /// from now on and did not before; `None` if it is refused.
    pub(super) fn take(&mut self, id: PageId, blocks: u32) -> Option<bool> {
        let present = self.counts.get(&id.0).copied();
        let leases = present.map_or(0, |count| count.leases);
        let blocks = present.map_or(blocks, |count| count.blocks);
        if leases == 0 {
            let blocks_after = self.blocks + u64::from(blocks);
            if blocks_after > self.blocks_max || self.leased >= PAGES_MAX {
                self.refused += 1;
                return None;
            }
            self.blocks = blocks_after;
            self.leased += 1;
        }
        let count = Count {
            leases: leases.saturating_add(1),
            blocks,
            kept: present.and_then(|count| count.kept),
        };
        self.counts.insert(id.0, count);
        Some(present.is_none() && !planted!(LooseLease))
    }

    /// Returns a lease. Returns whether the page need not stay any more.
    pub(super) fn give_back(&mut self, id: PageId) -> bool {
        let Some(count) = self.counts.get_mut(&id.0) else {
            return false;
        };
        if count.leases == 0 {
            return false;
        }
        count.leases -= 1;
        if count.leases > 0 {
            return false;
        }
        (self.leased, self.blocks) = (self.leased - 1, self.blocks - u64::from(count.blocks));
        count.kept.is_none() && self.counts.remove(&id.0).is_some()
    }

    /// Keeps a page of so many blocks from now on, in place of a former time. Returns whether the
    /// page stays from now on and did not before.
    pub(super) fn keep(&mut self, id: PageId, blocks: u32, keep: Keep) -> bool {
        let stayed = self.has(id);
        self.let_go(id);
        let absent = Count {
            leases: 0,
            blocks,
            kept: None,
        };
        let count = self.counts.entry(id.0).or_insert(absent);
        count.kept = Some(keep);
        self.kept_blocks += u64::from(count.blocks);
        self.ends.insert((keep.until_unix_s, id));
        !stayed
    }

    /// Keeps a page no longer. Returns whether it need not stay any more.
    pub(super) fn let_go(&mut self, id: PageId) -> bool {
        let Some(count) = self.counts.get_mut(&id.0) else {
            return false;
        };
        let Some(keep) = count.kept.take() else {
            return false;
        };
        self.kept_blocks -= u64::from(count.blocks);
        self.ends.remove(&(keep.until_unix_s, id));
        count.leases == 0 && self.counts.remove(&id.0).is_some()
    }

    /// How long a page is kept.
    pub(super) fn kept(&self, id: PageId) -> Option<Keep> {
        self.counts.get(&id.0).and_then(|count| count.kept)
    }

    /// A page whose time has come.
    pub(super) fn first_ended(&self, unix_s: u64) -> Option<PageId> {
        let (until_unix_s, id) = self.ends.first()?;
        (u64::from(*until_unix_s) <= unix_s).then_some(*id)
    }

    /// All kept pages.
    pub(super) fn all_kept(&self) -> impl Iterator<Item = (PageId, u32, Keep)> {
        self.ends.iter().filter_map(|(_, id)| {
            let count = self.counts.get(&id.0)?;
            Some((*id, count.blocks, count.kept?))
        })
    }

    /// Kept pages and their blocks.
    pub(super) fn kept_totals(&self) -> (u64, u64) {
        (self.ends.len() as u64, self.kept_blocks)
    }

    /// The page leaves. Returns whether it was leased or kept.
    pub(super) fn end(&mut self, id: PageId) -> bool {
        let was_held = self.has(id);
        self.let_go(id);
        if let Some(count) = self.counts.remove(&id.0) {
            (self.leased, self.blocks) = (self.leased - 1, self.blocks - u64::from(count.blocks));
        }
        was_held
    }

    /// Whether a page is leased or kept.
    pub(super) fn has(&self, id: PageId) -> bool {
        self.counts.contains_key(&id.0)
    }

    /// Pages under counted leases, their blocks, and leases refused so far.
    pub(super) fn totals(&self) -> (u64, u64, u64) {
        (self.leased, self.blocks, self.refused)
    }

    /// Bytes allocated, estimated.
    pub(super) fn ram_bytes(&self) -> usize {
        // A node of the tree is three quarters full.
        self.counts.capacity() * (size_of::<(u32, Count)>() + 1)
            + self.ends.len() * size_of::<(u32, PageId)>() * 4 / 3
    }

    /// Checks the invariants; for tests and simulation.
    pub(super) fn check(&self) -> Result<(), String> {
        let blocks_of = |is_counted: fn(&Count) -> bool| {
            let counts = self.counts.values().filter(|count| is_counted(count));
            counts.map(|count| u64::from(count.blocks)).sum::<u64>()
        };
        let counted = blocks_of(|count| count.leases > 0);
        let kept = blocks_of(|count| count.kept.is_some());
        let is_empty = |count: &Count| count.leases == 0 && count.kept.is_none();
        let all_kept = self.counts.values().filter(|count| count.kept.is_some());
        if kept != self.kept_blocks || all_kept.count() != self.ends.len() {
            return Err(format!(
                "kept pages of {kept} blocks, the total is {}; {} ends",
                self.kept_blocks,
                self.ends.len()
            ));
        }
        if counted != self.blocks || counted > self.blocks_max {
            let (blocks, max) = (self.blocks, self.blocks_max);
            return Err(format!(
                "counted leases of {counted} blocks, the total is {blocks}, the limit is {max}"
            ));
        }
        if self.counts.values().any(is_empty) {
            return Err("a page is held for no reason".to_owned());
        }
        Ok(())
    }
}
