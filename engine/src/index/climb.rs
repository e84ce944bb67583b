//! A preview of the order of eviction: how hot each page is as an ancestor of its descendants.
//!
//! Eviction takes leaves, so a page goes after all its descendants, whatever its own last use. From
//! every leaf a [`Climb`] goes up while the current page has no further child to wait for, and
//! takes the hottest heat along. Each page is passed once, in time linear in the number of pages.

use super::slab::{LIVE, PageId};
use super::state::State;
use super::types::Heat;

/// See the module.
pub(super) struct Climb {
    /// By slot: the hottest of the descendants visited.
    below: Vec<Heat>,
    /// By slot: number of children visited.
    met: Vec<u32>,
    /// By segment: the hottest of its pages visited.
    segments: Vec<Option<Heat>>,
}

impl Climb {
    pub(super) fn new(slots: usize, segments: usize) -> Self {
        Self {
            below: vec![Heat(0); slots],
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
            let heat = entry.mark().heat().max(self.below[at.0 as usize]);
            if entry.spot.has(LIVE) {
                let hottest = &mut self.segments[entry.spot.place().segment.0 as usize];
                *hottest = (*hottest).max(Some(heat));
            }
            let parent = slab.link(at).parent;
            if parent == PageId::NONE {
                return;
            }
            let below = &mut self.below[parent.0 as usize];
            *below = heat.max(*below);
            let met = &mut self.met[parent.0 as usize];
            *met += 1;
            if *met < state.children(parent) {
                return;
            }
            at = parent;
        }
    }

    pub(super) fn segments(self) -> Vec<Option<Heat>> {
        self.segments
    }
}
