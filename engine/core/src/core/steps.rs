//! Removals of many pages, one step at a time: other callers get the core between two steps.

use std::num::NonZeroU16;

use super::Core;
use super::puts::{Below, Puts};
use crate::index::NamespaceSlot;

impl Core {
    fn puts(&mut self) -> (&mut Puts, Below<'_>) {
        let below = Below {
            base: &mut self.base,
            segments: &mut self.segments,
            journal: &mut self.journal,
            durability: &mut self.durability,
        };
        (&mut self.puts, below)
    }

    /// A step before [`Core::clear`], which has less to do then: removes some pages of a namespace,
    /// among the entries of the index from `from` on, which is zero for the first step. Returns how
    /// many they were, and where the next step begins.
    pub fn clear_some(&mut self, namespace: NamespaceSlot, from: u32) -> (u64, Option<u32>) {
        let (_, mut below) = self.puts();
        Puts::clear_some(&mut below, namespace, from)
    }

    /// One step of the removal of the pages that are too old, among the entries of the index from
    /// `from` on. Returns where the next step begins.
    pub fn remove_old(&mut self, from: u32) -> Option<u32> {
        let (puts, mut below) = self.puts();
        let next = puts.remove_old(&mut below, from);
        self.run();
        next
    }

    /// One step of the erasure of the keys of these slots: removes some pages that are encrypted
    /// with them, among the entries of the index from `from` on, which is zero for the first step.
    /// No page with one of them may be committed from the first step on. Returns how many they
    /// were, and where the next step begins.
    pub fn erase_some(&mut self, slots: &[NonZeroU16], from: u32) -> (u64, Option<u32>) {
        let (puts, mut below) = self.puts();
        let removed = puts.erase_some(&mut below, slots, from);
        self.run();
        removed
    }
}
