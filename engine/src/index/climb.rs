//! The order of eviction, without evicting: how hot each page is as a parent of what descends from it.
//!
//! Eviction takes leaves, so a page goes after all its descendants, however long ago it was used itself. From every leaf a
//! [`Climb`] goes up as long as the page it comes to has no child that it has not come from, and carries the hottest heat along:
//! each page is passed once, in time that grows with the pages alone.

use super::slab::{LIVE, PageId};
use super::state::State;
use super::types::Heat;

/// See the module.
pub(super) struct Climb {
    /// By slot: the hottest of the descendants met.
    below: Vec<Heat>,
    /// By slot: children met.
    met: Vec<u32>,
    /// By segment: the hottest of its pages met.
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

    /// Climbs from a leaf; does nothing where there is none.
    pub(super) fn start(&mut self, state: &State, slot: PageId) {
        let slab = state.slab();
        if slab.link(slot).children > 0 || !slab.entry(slot).spot.has(LIVE) {
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
            if *met < slab.link(parent).children {
                return;
            }
            at = parent;
        }
    }

    pub(super) fn segments(self) -> Vec<Option<Heat>> {
        self.segments
    }
}
