//! The choice of the coldest leaf by default: the next page to evict.
//!
//! [`Lru`] holds the numbers of leaves (pages without stored children), each at most once. It
//! learns of a leaf only when the page becomes one. Reads raise heats all the time without an
//! update of the queue: it asks for the true heat when it is about to return a leaf. So its entries
//! may be too cold, or stale (no leaf any more, or no page), but never too hot. A pop corrects the
//! entries it meets.
//!
//! It is exact for all that: least recent heat first, equal heats by slot number. It is a heap
//! of 8 bytes a leaf. (Buckets of equal age would take 4, but recovery may give ten million leaves
//! one age, and sorting that bucket stops every lookup for a second.)

use super::slab::PageId;
use super::types::Heat;
use crate::chunks::Chunks;

/// The current state of a queued slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// No leaf. The caller has noted that the queue no longer holds the slot.
    Gone,
    /// A leaf of this heat, and whether it must stay, for example because it is leased.
    Leaf(Heat, bool),
    /// A leaf of this heat that cannot go before [`Lru::unpark`].
    Parked(Heat),
    /// A leaf that its group keeps. The caller holds it from now on.
    Held,
}

/// Least recently used first.
///
/// Leased leaves that a pop meets are set aside until no lease can protect them, so that a run of
/// evictions does not pass over them again each time. Meanwhile a leaf set aside may be read. This
/// ends its lease, but makes it hotter than every page used before it was set aside. So only a pop
/// that reaches `aside_since` could miss it, and such a pop takes all of them back first.
#[derive(Debug)]
pub(super) struct Lru {
    queue: Heap,
    aside: Heap,
    aside_since: Heat,
    parked: Heap,
}

impl Lru {
    pub(super) const fn new() -> Self {
        Self {
            queue: Heap::new(),
            aside: Heap::new(),
            aside_since: Heat(u32::MAX),
            parked: Heap::new(),
        }
    }

    fn take_back(&mut self, below: Heat) {
        while let Some((heat, id)) = self.aside.top()
            && heat < below
        {
            self.aside.pop();
            self.queue.push(heat, id);
        }
        if self.aside.top().is_none() {
            self.aside_since = Heat(u32::MAX);
        }
    }

    /// Takes in a leaf that it does not hold.
    pub(super) fn file(&mut self, id: PageId, heat: Heat) {
        self.queue.push(heat, id);
    }

    /// Removes and returns the coldest leaf without a lease. `next` is the next stamp to be drawn:
    /// every heat is below it. No page colder than `floor` is leased.
    pub(super) fn coldest(
        &mut self,
        next: Heat,
        floor: Heat,
        mut standing: impl FnMut(PageId) -> Standing,
    ) -> Option<PageId> {
        self.take_back(floor);
        loop {
            let Some((filed, id)) = self.queue.top() else {
                if self.aside_since >= next {
                    return None;
                }
                self.take_back(Heat(u32::MAX));
                continue;
            };
            match standing(id) {
                Standing::Gone | Standing::Held => self.queue.pop(),
                Standing::Leaf(heat, _) if heat > filed => self.queue.replace_top(heat, id),
                Standing::Parked(heat) => {
                    self.queue.pop();
                    self.parked.push(heat, id);
                }
                Standing::Leaf(heat, true) => {
                    self.queue.pop();
                    self.aside.push(heat, id);
                    self.aside_since = self.aside_since.min(next);
                }
                Standing::Leaf(heat, false) if heat >= self.aside_since => {
                    self.take_back(Heat(u32::MAX));
                }
                Standing::Leaf(..) => {
                    self.queue.pop();
                    return Some(id);
                }
            }
        }
    }

    /// Takes back every leaf that was parked.
    pub(super) fn unpark(&mut self) {
        while let Some((heat, id)) = self.parked.top() {
            self.parked.pop();
            self.queue.push(heat, id);
        }
    }

    /// Adjusts to a lowering of all heats by `cut`; heats below `cut` become 0.
    pub(super) fn lower(&mut self, cut: u32) {
        self.queue.lower(cut);
        self.aside.lower(cut);
        self.parked.lower(cut);
        if self.aside.top().is_some() {
            self.aside_since = Heat(self.aside_since.0.saturating_sub(cut));
        }
    }

    /// All leaves held, with the heat recorded for each.
    pub(super) fn held(&self) -> impl Iterator<Item = (PageId, Heat)> {
        let leaves = self.queue.iter().chain(self.aside.iter());
        leaves.chain(self.parked.iter())
    }

    /// Bytes allocated.
    pub(super) fn ram_bytes(&self) -> usize {
        self.queue.ram_bytes() + self.aside.ram_bytes() + self.parked.ram_bytes()
    }
}

/// A four-way min-heap of (heat, slot number), one word each: half the levels of a two-way one, and
/// the four children lie side by side.
#[derive(Debug)]
pub(super) struct Heap(Chunks<u64>);

const WAYS: usize = 4;

impl Heap {
    pub(super) const fn new() -> Self {
        Self(Chunks::new())
    }

    const fn word(heat: Heat, id: PageId) -> u64 {
        (heat.0 as u64) << 32 | id.0 as u64
    }

    const fn unpack(word: u64) -> (Heat, PageId) {
        (Heat((word >> 32) as u32), PageId(word as u32))
    }

    pub(super) fn top(&self) -> Option<(Heat, PageId)> {
        (self.0.len() > 0).then(|| Self::unpack(*self.0.get(0)))
    }

    pub(super) fn push(&mut self, heat: Heat, id: PageId) {
        let word = Self::word(heat, id);
        let mut at = self.0.len();
        self.0.push(word);
        while at > 0 {
            let above = (at - 1) / WAYS;
            let other = *self.0.get(above);
            if other <= word {
                break;
            }
            *self.0.get_mut(at) = other;
            at = above;
        }
        *self.0.get_mut(at) = word;
    }

    pub(super) fn pop(&mut self) {
        if let Some(last) = self.0.pop()
            && self.0.len() > 0
        {
            self.sink(last);
        }
    }

    pub(super) fn replace_top(&mut self, heat: Heat, id: PageId) {
        self.sink(Self::word(heat, id));
    }

    /// Replaces the top by `word`.
    fn sink(&mut self, word: u64) {
        let len = self.0.len();
        let mut at = 0;
        loop {
            let first = at * WAYS + 1;
            let least = (first..len.min(first + WAYS)).min_by_key(|child| *self.0.get(*child));
            let Some(child) = least else { break };
            let below = *self.0.get(child);
            if word <= below {
                break;
            }
            *self.0.get_mut(at) = below;
            at = child;
        }
        *self.0.get_mut(at) = word;
    }

    /// Lowering never swaps two heats, so the heap stays a heap. Heats that become equal at 0 have
    /// no order to keep.
    pub(super) fn lower(&mut self, cut: u32) {
        for word in self.0.iter_mut() {
            let (heat, id) = Self::unpack(*word);
            *word = Self::word(Heat(heat.0.saturating_sub(cut)), id);
        }
    }

    /// Bytes allocated.
    pub(super) fn ram_bytes(&self) -> usize {
        self.0.ram_bytes()
    }

    fn iter(&self) -> impl Iterator<Item = (PageId, Heat)> {
        self.0.iter().map(|word| {
            let (heat, id) = Self::unpack(*word);
            (id, heat)
        })
    }
}
