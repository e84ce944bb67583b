//! Kept pages: they stay until a time. The log has a pin for each, which the core writes.

use larder_format::KeyPrefix;

use super::counted::Keep;
use super::slab::PageId;
use super::state::State;
use super::types::NamespaceSlot;
use super::{HOLD_CHANGES, Index};
use crate::planted;

impl State {
    fn keep(&mut self, id: PageId, blocks: u32, keep: Keep) {
        if self.counted_mut().keep(id, blocks, keep) {
            self.hold(id, true);
        }
    }

    fn keep_no_longer(&mut self, id: PageId) {
        if self.counted_mut().let_go(id) {
            self.hold(id, false);
        }
    }
}

impl Index {
    /// Keeps a page of so many blocks, in place of a former time. Returns whether it is stored.
    pub fn keep_until(
        &self,
        namespace: NamespaceSlot,
        key: KeyPrefix,
        blocks: u32,
        keep: Keep,
    ) -> bool {
        let mut state = self.state.write();
        let id = state.find(namespace, key);
        if let Some(id) = id
            && !planted!(UnkeptPin)
        {
            state.keep(id, blocks, keep);
        }
        id.is_some()
    }

    /// Keeps a page no longer.
    pub fn let_go(&self, namespace: NamespaceSlot, key: KeyPrefix) {
        let mut state = self.state.write();
        if let Some(id) = state.find(namespace, key) {
            state.keep_no_longer(id);
        }
    }

    /// How long a page is kept.
    pub fn kept(&self, namespace: NamespaceSlot, key: KeyPrefix) -> Option<Keep> {
        let state = self.state.read();
        let id = state.find(namespace, key)?;
        state.counted().kept(id)
    }

    /// Keeps the pages no longer whose time has come. Returns their number.
    pub fn end_keeping(&self, unix_s: u64) -> u64 {
        let mut ended = 0;
        // Mostly there is none: then the read lock suffices.
        while self.state.read().counted().first_ended(unix_s).is_some() {
            let mut state = self.state.write();
            for _ in 0..HOLD_CHANGES {
                let Some(id) = state.counted().first_ended(unix_s) else {
                    break;
                };
                state.keep_no_longer(id);
                ended += 1;
            }
        }
        ended
    }

    /// Kept pages and their blocks.
    pub fn kept_totals(&self) -> (u64, u64) {
        self.state.read().counted().kept_totals()
    }

    /// Some kept pages behind the first `from`, and their blocks, in the order of their ends.
    pub fn kept_pages(
        &self,
        from: usize,
        most: usize,
    ) -> Vec<(NamespaceSlot, KeyPrefix, u32, Keep)> {
        let state = self.state.read();
        let kept = state.counted().all_kept().skip(from).take(most);
        let named = kept.map(|(id, blocks, keep)| {
            let entry = state.slab().entry(id);
            (entry.spot.namespace(), entry.key(), blocks, keep)
        });
        named.collect()
    }
}
