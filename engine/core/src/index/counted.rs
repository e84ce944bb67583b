//! Counted leases: a page stays until its lease was returned as often as it was taken.
//!
//! A leased page has one child more in its link than it has children. So eviction and reclaim pass
//! over it and its ancestors as over any page that is no leaf, at no cost.
//!
//! Invariants: the pages under counted leases take at most a quarter of the capacity; beyond it
//! leases are refused and counted. A lease ends with its page, when that is deleted, cleared or
//! found damaged. A store that finds no room for copies evicts leased pages too.

use std::collections::HashMap;

use super::slab::PageId;
use crate::planted;

/// Most pages with a counted lease: 24 MiB of records.
const PAGES_MAX: usize = 1 << 20;

/// A lease of one page.
#[derive(Debug, Clone, Copy)]
struct Count {
    leases: u32,
    blocks: u32,
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
    blocks: u64,
    blocks_max: u64,
    refused: u64,
}

impl Counted {
    pub(super) fn new(capacity_blocks: u64) -> Counted {
        Counted {
            counts: HashMap::new(),
            blocks: 0,
            blocks_max: capacity_blocks / 4,
            refused: 0,
        }
    }

    /// Takes a lease of a stored page that takes so many blocks. Returns whether it is the page's
    /// first; `None` if it is refused.
    pub(super) fn take(&mut self, id: PageId, blocks: u32) -> Option<bool> {
        if let Some(count) = self.counts.get_mut(&id.0) {
            count.leases = count.leases.saturating_add(1);
            return Some(false);
        }
        let blocks_after = self.blocks + u64::from(blocks);
        if blocks_after > self.blocks_max || self.counts.len() >= PAGES_MAX {
            self.refused += 1;
            return None;
        }
        self.blocks = blocks_after;
        self.counts.insert(id.0, Count { leases: 1, blocks });
        Some(!planted!(LooseLease))
    }

    /// Returns a lease. Returns whether it was the page's last.
    pub(super) fn give_back(&mut self, id: PageId) -> bool {
        let Some(count) = self.counts.get_mut(&id.0) else {
            return false;
        };
        count.leases -= 1;
        count.leases == 0 && self.end(id)
    }

    /// Ends all leases of a page. Returns whether it had some.
    pub(super) fn end(&mut self, id: PageId) -> bool {
        let ended = self.counts.remove(&id.0);
        self.blocks -= ended.map_or(0, |count| u64::from(count.blocks));
        ended.is_some()
    }

    pub(super) fn has(&self, id: PageId) -> bool {
        self.counts.contains_key(&id.0)
    }

    /// Pages under counted leases, their blocks, and leases refused so far.
    pub(super) fn totals(&self) -> (u64, u64, u64) {
        (self.counts.len() as u64, self.blocks, self.refused)
    }

    /// Bytes allocated, estimated.
    pub(super) fn ram_bytes(&self) -> usize {
        self.counts.capacity() * (size_of::<(u32, Count)>() + 1)
    }

    /// Checks the invariants; for tests and simulation.
    pub(super) fn check(&self) -> Result<(), String> {
        let counted: u64 = self
            .counts
            .values()
            .map(|count| u64::from(count.blocks))
            .sum();
        let is_empty = |count: &Count| count.leases == 0;
        if counted != self.blocks || counted > self.blocks_max {
            let (blocks, max) = (self.blocks, self.blocks_max);
            return Err(format!(
                "counted leases of {counted} blocks, the total is {blocks}, the limit is {max}"
            ));
        }
        if self.counts.values().any(is_empty) {
            return Err("a page is leased zero times".to_owned());
        }
        Ok(())
    }
}
