//! A preview of the order of eviction: how much each page is worth as an ancestor of its
//! descendants.
//!
//! Eviction takes leaves, so a page goes after all its descendants, whatever its own worth. From
//! every leaf a [`Climb`] goes up while the current page has no further child to wait for, and
//! takes the highest worth along. Each page is passed once, in time linear in the number of pages.

use super::slab::{LIVE, PageId};
use super::state::State;
use crate::policy::Worth;

/// See the module.
pub(super) struct Climb {
    /// By slot: the worthiest of the descendants visited.
    below: Vec<Worth>,
    /// By slot: number of children visited.
    met: Vec<u32>,
    /// By segment: the worthiest of its pages visited.
    segments: Vec<Option<Worth>>,
}

impl Climb {
    pub(super) fn new(slots: usize, segments: usize) -> Self {
        Self {
            below: vec![Worth(0); slots],
            met: vec![0; slots],
            segments: vec![None; segments],
        }
    }

    /// Climbs from a leaf; does nothing if the slot is no leaf.
    pub(super) fn start(&mut self, state: &State, slot: PageId) {
        let slab = state.slab();
        if state.children(slot) > 0 || !slab.entry(slot).spot.has(LIVE) {
            return;
        }
        let mut at = slot;
        loop {
            let entry = slab.entry(at);
            let worth = state.worth(at).max(self.below[at.0 as usize]);
            if entry.spot.has(LIVE) {
                let worthiest = &mut self.segments[entry.spot.segment().0 as usize];
                *worthiest = (*worthiest).max(Some(worth));
            }
            let parent = slab.link(at).parent;
            if parent == PageId::NONE {
                return;
            }
            let below = &mut self.below[parent.0 as usize];
            *below = worth.max(*below);
            let met = &mut self.met[parent.0 as usize];
            *met += 1;
            if *met < state.children(parent) {
                return;
            }
            at = parent;
        }
    }

    pub(super) fn segments(self) -> Vec<Option<Worth>> {
        self.segments
    }
}
