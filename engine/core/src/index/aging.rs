//! The calls for lifetimes.

use std::sync::atomic::Ordering;

use larder_format::KeyPrefix;

use super::lifetimes::Lifetimes;
use super::slab::PageId;
use super::state::State;
use super::types::{Departed, NamespaceSlot, Place};
use super::{HOLD_CHANGES, Index};

impl Index {
    /// Limits the lifetimes of the pages of these namespaces, in seconds, and of no others. The
    /// times of puts that are not known yet have to be passed to [`Index::learn_puts`]; until
    /// [`Index::puts_are_learned`] such pages are served.
    pub fn limit_lives(&self, limits: &[(NamespaceSlot, u32)]) {
        let mut state = self.state.write();
        let before = state.lifetimes.take();
        let has_pages = |namespace| state.share_of(namespace).pages > 0;
        let lifetimes = Lifetimes::new(before, limits, has_pages);
        state.lifetimes = lifetimes;
        let is_limited = state.lifetimes.is_some();
        self.keeps_times.store(is_limited, Ordering::Relaxed);
    }

    /// Limits the lifetimes of the pages of one more namespace. Its pages whose times are not known
    /// are absent.
    pub fn limit_life(&self, namespace: NamespaceSlot, limit: u32) {
        let mut state = self.state.write();
        let has_pages = state.share_of(namespace).pages > 0;
        let lifetimes = state.lifetimes.get_or_insert_default();
        lifetimes.add(namespace, limit, has_pages);
        self.keeps_times.store(true, Ordering::Relaxed);
    }

    /// Whether times of puts have to be learned.
    pub fn lacks_puts(&self) -> bool {
        let state = self.state.read();
        state.lifetimes().is_some_and(Lifetimes::is_behind)
    }

    /// Whether the lifetimes of some pages are limited. Then the clock of the store counts.
    #[inline]
    pub fn keeps_times(&self) -> bool {
        self.keeps_times.load(Ordering::Relaxed)
    }

    /// Tells the time by the clock of the store. A step back is ignored.
    #[inline]
    pub fn age_to(&self, store_ms: u64) {
        self.age_ms.fetch_max(store_ms, Ordering::Relaxed);
    }

    /// A page that is stored was put at this time.
    pub fn note_put(&self, namespace: NamespaceSlot, key: KeyPrefix, put_unix_s: u32) {
        let mut state = self.state.write();
        let id = state.find(namespace, key);
        if let (Some(id), Some(lifetimes)) = (id, &mut state.lifetimes) {
            lifetimes.note(namespace, id, put_unix_s);
        }
    }

    /// Pages whose times were not known were put at these times, if they still lie at these places.
    pub fn learn_puts(&self, pages: &[(NamespaceSlot, KeyPrefix, Place, u32)]) {
        for some in pages.chunks(HOLD_CHANGES) {
            let mut state = self.state.write();
            for (namespace, key, place, put_unix_s) in some {
                let id = state.find_at(*namespace, *key, *place);
                if let (Some(id), Some(lifetimes)) = (id, &mut state.lifetimes) {
                    lifetimes.learn(*namespace, id, *put_unix_s);
                }
            }
        }
    }

    /// The times of puts were read, as far as they can be. A page without one is absent from now
    /// on.
    pub fn puts_are_learned(&self, are_all: bool) {
        if let Some(lifetimes) = &mut self.state.write().lifetimes {
            lifetimes.are_read(are_all);
        }
    }

    /// One step of the removal of pages that are too old: as [`Index::remove_some_of`].
    pub fn remove_old(&self, from: u32, gone: impl FnMut(Departed)) -> Option<u32> {
        let is_old = |state: &State, id| {
            let namespace = state.slab().entry(id).spot.namespace();
            self.is_old(state, namespace, Some(id))
        };
        self.sweep_some(from, is_old, gone)
    }

    /// Whether a page is too old to be served.
    #[inline]
    pub(super) fn is_old(
        &self,
        state: &State,
        namespace: NamespaceSlot,
        id: Option<PageId>,
    ) -> bool {
        let now_ms = || self.age_ms.load(Ordering::Relaxed);
        match (id, state.lifetimes()) {
            (Some(id), Some(lifetimes)) => lifetimes.is_old(namespace, id, now_ms()),
            _ => false,
        }
    }
}
