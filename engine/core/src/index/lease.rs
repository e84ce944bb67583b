//! Leases: a page confirmed by a lookup stays until it is read, or until the lease lapses.
//!
//! The pages carry the lease (the stamp of the call and a bit, see `slab`). This module keeps one
//! small record a call, in the order of their stamps. A lease is valid while its stamp is at or
//! above the *floor*, the stamp of the oldest call not yet lapsed. So a lapse costs nothing,
//! however many pages it frees.
//!
//! Invariants: the blocks under lease are at most the limit, a quarter of the capacity. When a call
//! exceeds it, the oldest calls lapse first. One call alone gets no more than the limit, the head
//! of its chain first. Records lapse only from the old end: a record with a shorter term than an
//! older record stays as long as the older one.

use std::collections::VecDeque;

use super::types::{Heat, Lease};

/// Most calls with valid leases at once; beyond it the oldest lapses. 2 MiB of records.
const CALLS_MAX: usize = 1 << 16;

#[derive(Debug)]
struct Call {
    heat: Heat,
    expires_ms: u64,
    pages: u64,
    blocks_per_page: u32,
}

impl Call {
    fn blocks(&self) -> u64 {
        self.pages.saturating_mul(u64::from(self.blocks_per_page))
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Leases {
    calls: VecDeque<Call>,
    blocks: u64,
    blocks_max: u64,
}

impl Leases {
    pub(super) const fn new(capacity_blocks: u64) -> Self {
        Self {
            calls: VecDeque::new(),
            blocks: 0,
            blocks_max: capacity_blocks / 4,
        }
    }

    /// The oldest stamp with a valid lease; above all stamps if there is none.
    pub(super) fn floor(&self) -> Heat {
        self.calls.front().map_or(Heat(u32::MAX), |call| call.heat)
    }

    /// Lets expired leases lapse at `now_ms`; returns the floor after that.
    pub(super) fn expire(&mut self, now_ms: u64) -> Heat {
        while self
            .calls
            .front()
            .is_some_and(|call| call.expires_ms <= now_ms)
        {
            self.lapse_oldest();
        }
        self.floor()
    }

    /// Blocks under lease.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    fn lapse_oldest(&mut self) {
        if let Some(call) = self.calls.pop_front() {
            self.blocks -= call.blocks();
        }
    }

    /// Begins a call's record, before the call leases anything.
    pub(super) fn open(&mut self, heat: Heat, terms: &Lease) {
        self.expire(terms.now_ms);
        if self.calls.len() == CALLS_MAX {
            self.lapse_oldest();
        }
        let at = self.calls.partition_point(|call| call.heat < heat);
        self.calls.insert(
            at,
            Call {
                heat,
                expires_ms: terms.now_ms.saturating_add(terms.duration_ms),
                pages: 0,
                blocks_per_page: terms.blocks_per_page.max(1),
            },
        );
    }

    fn find(&self, heat: Heat) -> Option<usize> {
        self.calls
            .binary_search_by_key(&heat, |call| call.heat)
            .ok()
    }

    /// Counts up to `pages` more for that call; returns how many it may lease. The call must
    /// `settle` before it releases the read lock: until then the total may be above the limit.
    pub(super) fn reserve(&mut self, heat: Heat, pages: usize) -> usize {
        let Some(at) = self.find(heat) else { return 0 };
        let call = &mut self.calls[at];
        let page = u64::from(call.blocks_per_page);
        let granted = (pages as u64).min((self.blocks_max - call.blocks()) / page);
        call.pages += granted;
        self.blocks += granted * page;
        granted as usize
    }

    /// Returns the leases that calls no longer hold. Lets the oldest lapse if the total is above
    /// the limit after that.
    pub(super) fn settle(&mut self, ended: &[(Heat, u64)]) {
        for (heat, pages) in ended {
            self.release(*heat, *pages);
        }
        while self.blocks > self.blocks_max {
            self.lapse_oldest();
        }
    }

    /// Returns `pages` of that call: read, gone, or leased again by a later call.
    pub(super) fn release(&mut self, heat: Heat, pages: u64) {
        if let Some(at) = self.find(heat) {
            let call = &mut self.calls[at];
            let before = call.blocks();
            call.pages = call.pages.saturating_sub(pages);
            self.blocks -= before - call.blocks();
        }
    }

    /// Ends a call's record if it leased nothing.
    pub(super) fn close(&mut self, heat: Heat) {
        if let Some(at) = self.find(heat)
            && self.calls[at].pages == 0
        {
            self.calls.remove(at);
        }
    }

    /// Adjusts to a lowering of all heats by `cut`; heats below `cut` become 0.
    pub(super) fn lower(&mut self, cut: u32) {
        for call in &mut self.calls {
            call.heat = Heat(call.heat.0.saturating_sub(cut));
        }
    }

    /// Bytes allocated.
    pub(super) fn ram_bytes(&self) -> usize {
        self.calls.capacity() * size_of::<Call>()
    }

    /// Checks the invariants; for tests and simulation.
    pub(super) fn check(&self) -> Result<(), String> {
        let counted: u64 = self.calls.iter().map(Call::blocks).sum();
        if counted != self.blocks || counted > self.blocks_max {
            return Err(format!(
                "leases count {counted} blocks, the total is {}, the limit is {}",
                self.blocks, self.blocks_max
            ));
        }
        if self.calls.iter().is_sorted_by_key(|call| call.heat) {
            Ok(())
        } else {
            Err("lease calls are not in the order of their stamps".into())
        }
    }
}
