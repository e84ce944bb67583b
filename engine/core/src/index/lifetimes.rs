//! Lifetimes: the pages of some namespaces are absent once their put is too long ago.
//!
//! The time of a put is kept for the pages of these namespaces alone, 4 bytes each. It is in
//! seconds of the clock of the store, rounded down: so a page is taken for up to a second older
//! than it is, and none is served beyond its limit. A page whose time is not known is absent,
//! except while the times are being read.
//!
//! Lookups, and the calls of the core that ask whether a page is stored, take an old page for
//! absent. Structure is not concerned: its children stay linked to it, eviction and reclaim see it,
//! and a put of its key replaces it.
//!
//! Without a limit there is nothing of this, and it costs a branch.

use super::slab::PageId;
use super::types::NamespaceSlot;
use crate::chunks::Sparse;
use crate::planted;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Lifetimes {
    /// By namespace, in seconds; zero without a limit.
    limits: Vec<u32>,
    /// By slot; zero if it is not known.
    put: Sparse<u32>,
    /// Pages whose times are not known are served, until these have been read.
    is_lenient: bool,
    /// Some times have to be read.
    is_behind: bool,
}

/// The time of a put as it is kept. Zero, a time that was not recorded, is the earliest one.
fn kept(put_unix_s: u32) -> u32 {
    put_unix_s.max(1)
}

impl Lifetimes {
    /// Follows these limits, after those of `before`. `None` without a limit. Times are kept as
    /// long as each namespace with a limit before has one now; else all are to be read anew. So are
    /// those of a namespace that has pages and had no limit.
    pub(super) fn new(
        before: Option<Box<Lifetimes>>,
        limits: &[(NamespaceSlot, u32)],
        has_pages: impl Fn(NamespaceSlot) -> bool,
    ) -> Option<Box<Lifetimes>> {
        let most = limits.iter().map(|(namespace, _)| namespace.0).max()?;
        let mut by_slot = vec![0; usize::from(most) + 1];
        for (namespace, limit) in limits {
            by_slot[usize::from(namespace.0)] = *limit;
        }
        let mut now = Lifetimes {
            limits: by_slot,
            put: Sparse::new(),
            is_lenient: false,
            is_behind: false,
        };
        let had = before.as_deref();
        let had = |namespace| had.is_some_and(|before| before.is_limited(namespace));
        let slots = (0..=most).map(NamespaceSlot);
        let is_new = |namespace| now.is_limited(namespace) && !had(namespace);
        let has_new = slots.clone().any(|slot| is_new(slot) && has_pages(slot));
        let none_left = |before: &Lifetimes| {
            let mut limits = (0..).map(NamespaceSlot).zip(&before.limits);
            limits.all(|(slot, limit)| *limit == 0 || now.is_limited(slot))
        };
        match before {
            Some(before) if none_left(&before) => {
                now.is_behind = has_new || before.is_behind;
                now.put = before.put;
            }
            _ => {
                let mut slots = slots;
                now.is_behind = slots.any(|slot| now.is_limited(slot) && has_pages(slot));
            }
        }
        now.is_lenient = now.is_behind;
        Some(Box::new(now))
    }

    fn limit(&self, namespace: NamespaceSlot) -> u32 {
        let limit = self.limits.get(usize::from(namespace.0));
        limit.copied().unwrap_or(0)
    }

    pub(super) fn is_limited(&self, namespace: NamespaceSlot) -> bool {
        self.limit(namespace) > 0
    }

    /// Limits one more namespace.
    pub(super) fn add(&mut self, namespace: NamespaceSlot, limit: u32, has_pages: bool) {
        self.is_behind |= has_pages && !self.is_limited(namespace);
        let at = usize::from(namespace.0);
        if self.limits.len() <= at {
            self.limits.resize(at + 1, 0);
        }
        self.limits[at] = limit;
    }

    pub(super) fn is_behind(&self) -> bool {
        self.is_behind
    }

    pub(super) fn are_read(&mut self, are_all: bool) {
        (self.is_lenient, self.is_behind) = (false, !are_all);
    }

    /// A page that was put at this time has this slot.
    pub(super) fn note(&mut self, namespace: NamespaceSlot, id: PageId, put_unix_s: u32) {
        if self.is_limited(namespace) {
            self.put.set(id.0 as usize, kept(put_unix_s));
        }
    }

    /// The same, if the time is not known.
    pub(super) fn learn(&mut self, namespace: NamespaceSlot, id: PageId, put_unix_s: u32) {
        if self.put.get(id.0 as usize) == 0 {
            self.note(namespace, id, put_unix_s);
        }
    }

    /// A new page has this slot.
    #[inline]
    pub(super) fn forget(&mut self, id: PageId) {
        self.put.set(id.0 as usize, 0);
    }

    /// Whether a page is too old at this moment of the store's clock.
    pub(super) fn is_old(&self, namespace: NamespaceSlot, id: PageId, now_ms: u64) -> bool {
        let limit = self.limit(namespace);
        if limit == 0 || planted!(Ageless) {
            return false;
        }
        match self.put.get(id.0 as usize) {
            0 => !self.is_lenient,
            put => now_ms / 1000 >= u64::from(put) + u64::from(limit),
        }
    }

    /// Replaces the slots of old pages by none.
    pub(super) fn hide(&self, namespace: NamespaceSlot, ids: &mut [PageId], now_ms: u64) {
        if self.is_limited(namespace) {
            let stored = ids.iter_mut().filter(|id| **id != PageId::NONE);
            for id in stored {
                if self.is_old(namespace, *id, now_ms) {
                    *id = PageId::NONE;
                }
            }
        }
    }

    pub(super) fn ram_bytes(&self) -> usize {
        size_of::<Self>() + self.put.ram_bytes() + self.limits.capacity() * size_of::<u32>()
    }
}
