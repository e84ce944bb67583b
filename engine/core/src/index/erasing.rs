//! Removal of pages whose keys are erased.

use std::num::NonZeroU16;

use super::Index;
use super::slab::PageId;
use super::state::State;
use super::types::Departed;

impl Index {
    /// Removes pages that are encrypted with the keys of these slots, one step at a time, as
    /// [`Index::remove_some_of`] does.
    pub fn remove_some_sealed(
        &self,
        slots: &[NonZeroU16],
        from: u32,
        gone: impl FnMut(Departed),
    ) -> Option<u32> {
        let is_one = |state: &State, id: PageId| {
            let seal = state.slab().proof(id).seal;
            seal.is_some_and(|seal| slots.contains(&seal.slot))
        };
        self.sweep_some(from, is_one, gone)
    }
}
