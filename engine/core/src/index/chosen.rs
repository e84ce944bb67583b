//! The choice of the next page to evict by a policy of another crate, in place of `Lru`.
//!
//! The index keeps the facts that such a policy sees and the entries lack: 8 bytes a slot (depth,
//! hits and hint), the blocks of a page of each namespace, and the time of some stamps. Without a
//! policy none of this exists.
//!
//! Uses come from readers, who hold the read lock. They are noted, and reported to the policy under
//! the write lock: before it decides anything, before a page leaves, and when there are
//! [`NOTED_MAX`]. So every noted page is stored.
//!
//! The policy is not trusted. QUEUED on a slot says that it was given to the policy, or is set
//! aside here. A number that the policy should not hold is passed over.

use std::collections::VecDeque;
use std::time::Duration;

use larder_base::ahead::fetch;
use larder_base::ids::NamespaceId;
use larder_format::{BLOCK_BYTES, KeyPrefix};
use larder_sync::Mutex;

use super::coldness::{Heap, Standing};
use super::counted::Counted;
use super::slab::{LIVE, PageId, QUEUED, Slab};
use super::types::{Heat, NamespaceSlot, Told, Used};
use crate::chunks::Chunks;
use crate::hint::Hint;
use crate::planted;
use crate::policy::order::EvictionOrder;
use crate::policy::{Departure, PageFacts, PageNumber, ReclaimLines, Use, Worth};

/// Noted uses that are reported at once: about 100 us of a policy's time.
const NOTED_MAX: usize = 2048;

/// Distance of the stamps whose time is kept, in milliseconds, and their number: 18 hours.
const STEP_MS: u64 = 1000;
const TIMES_MAX: usize = 1 << 16;

/// The pages, for the facts that a policy sees.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) slab: &'a Slab,
    pub(super) counted: &'a Counted,
    /// The next stamp.
    pub(super) next: Heat,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Chosen {
    policy: Box<dyn EvictionOrder>,
    seen: Seen,
    times: Mutex<Times>,
    /// Leaves that had to stay when the policy returned them, by their heat then. No stamp drawn
    /// since `aside_since` can have ended all their leases.
    aside: Heap,
    aside_since: Heat,
    parked: Vec<PageId>,
    noted: Mutex<Noted>,
    sees_lookups: bool,
}

/// Uses that the policy does not know yet.
#[derive(Debug, Default)]
struct Noted {
    ids: Vec<PageNumber>,
    /// For each call with some of them: the end of its run in `ids`.
    calls: Vec<(usize, Used)>,
}

impl Noted {
    fn ram_bytes(&self) -> usize {
        self.ids.capacity() * size_of::<PageNumber>()
            + self.calls.capacity() * size_of::<(usize, Used)>()
    }
}

/// The facts that only a policy needs.
#[derive(Debug)]
struct Seen {
    /// By slot.
    notes: Chunks<Note>,
    /// By namespace: the blocks of a page.
    blocks: Vec<u32>,
}

/// Hint, and depth (23 bits), whether the page is set aside or parked (1 bit), hits (8 bits).
#[derive(Debug, Clone, Copy, Default)]
struct Note {
    hint: u32,
    rest: u32,
}

const DEPTH_SHIFT: u32 = 9;
const DEPTH_MAX: u32 = u32::MAX >> DEPTH_SHIFT;
const IS_ASIDE: u32 = 1 << 8;
const HITS_MAX: u32 = 255;

impl Note {
    fn depth(self) -> u32 {
        self.rest >> DEPTH_SHIFT
    }

    fn hits(self) -> u32 {
        self.rest & HITS_MAX
    }

    fn is_aside(self) -> bool {
        self.rest & IS_ASIDE != 0
    }

    fn count_hit(&mut self) {
        if self.hits() < HITS_MAX {
            self.rest += 1;
        }
    }
}

/// The times of some stamps, in the order of both.
#[derive(Debug, Default)]
struct Times {
    list: VecDeque<(Heat, u64)>,
    now_ms: u64,
    /// The stamp that was asked for last, and its answer: pages of a chain mostly share one.
    recent: Option<(Heat, (Duration, Duration))>,
}

impl Times {
    fn note(&mut self, stamp: Heat, now_ms: u64) {
        self.recent = None;
        self.now_ms = self.now_ms.max(now_ms);
        let is_due = |(_, last): &(Heat, u64)| now_ms >= last + STEP_MS;
        if self.list.back().is_none_or(is_due) {
            if self.list.len() == TIMES_MAX {
                self.list.pop_front();
            }
            self.list.push_back((stamp, now_ms));
        }
    }

    /// The time since a stamp, and the time now.
    fn of(&mut self, stamp: Heat) -> (Duration, Duration) {
        if let Some((recent, times)) = self.recent
            && recent == stamp
        {
            return times;
        }
        let behind = self.list.partition_point(|(noted, _)| *noted <= stamp);
        let noted = self.list.get(behind.saturating_sub(1));
        let then = noted.map_or(self.now_ms, |(_, ms)| *ms);
        let since = Duration::from_millis(self.now_ms - then);
        let times = (since, Duration::from_millis(self.now_ms));
        self.recent = Some((stamp, times));
        times
    }

    fn lower(&mut self, cut: u32) {
        for (stamp, _) in &mut self.list {
            *stamp = Heat(stamp.0.saturating_sub(cut));
        }
        self.recent = None;
    }
}

impl Seen {
    fn tell(&mut self, slab: &Slab, id: PageId, told: Told) {
        let namespace = usize::from(slab.entry(id).spot.namespace().0);
        if self.blocks.len() <= namespace {
            self.blocks.resize(namespace + 1, 0);
        }
        self.blocks[namespace] = told.blocks;
        while self.notes.len() <= id.0 as usize {
            self.notes.push(Note::default());
        }
        let note = self.note_mut(id);
        // The slot may still be set aside, from the page before.
        *note = Note {
            hint: told.hint.bits(),
            rest: told.depth.min(DEPTH_MAX) << DEPTH_SHIFT | note.rest & IS_ASIDE,
        };
    }

    fn note(&self, id: PageId) -> Note {
        *self.notes.get(id.0 as usize)
    }

    fn note_mut(&mut self, id: PageId) -> &mut Note {
        self.notes.get_mut(id.0 as usize)
    }

    /// Whether a number that the policy names is a slot that it holds.
    fn is_held(&self, slab: &Slab, page: PageNumber) -> bool {
        let id = PageId(page.0);
        (page.0 as usize) < slab.slots()
            && slab.entry(id).spot.has(QUEUED)
            && !self.note(id).is_aside()
    }

    fn facts(&self, view: View<'_>, id: PageId, times: &mut Times) -> PageFacts {
        self.facts_with(view, id, times, None)
    }

    /// The facts of a page in a request that puts `new_pages`.
    #[inline]
    fn facts_with(
        &self,
        view: View<'_>,
        id: PageId,
        times: &mut Times,
        new_pages: Option<u32>,
    ) -> PageFacts {
        let entry = view.slab.entry(id);
        let note = self.note(id);
        let namespace = entry.spot.namespace().0;
        let heat = entry.mark().heat();
        let blocks = self.blocks.get(usize::from(namespace)).copied();
        let parent = view.slab.link(id).parent;
        let is_stored = parent != PageId::NONE && view.slab.entry(parent).spot.has(LIVE);
        let (idle, now) = times.of(heat);
        PageFacts {
            namespace: NamespaceId(namespace),
            key: entry.key(),
            depth: note.depth(),
            children: view.slab.link(id).children - u32::from(view.counted.has(id)),
            hits: note.hits(),
            idle_calls: view.next.0.saturating_sub(heat.0),
            idle,
            hint: Hint::from_bits(note.hint),
            bytes: u64::from(blocks.unwrap_or(0)) * BLOCK_BYTES as u64,
            parent: is_stored.then_some(PageNumber(parent.0)),
            new_pages,
            now,
        }
    }
}

fn is_leaf(slab: &Slab, id: PageId) -> bool {
    slab.entry(id).spot.has(LIVE) && slab.link(id).children == 0
}

impl Chosen {
    pub(super) fn new(policy: Box<dyn EvictionOrder>) -> Chosen {
        Chosen {
            sees_lookups: policy.sees_lookups(),
            policy,
            seen: Seen {
                notes: Chunks::new(),
                blocks: Vec::new(),
            },
            times: Mutex::default(),
            aside: Heap::new(),
            aside_since: Heat(u32::MAX),
            parked: Vec::new(),
            noted: Mutex::default(),
        }
    }

    // ---- the facts for the policy

    /// Pages of these names are about to be published.
    pub(super) fn fetch(&self, names: impl Iterator<Item = (NamespaceSlot, KeyPrefix)>) {
        let mut names = names.map(|(namespace, key)| (NamespaceId(namespace.0), key));
        self.policy.fetch(&mut names);
    }

    pub(super) fn arrived(&mut self, view: View<'_>, id: PageId, told: Told) {
        self.seen.tell(view.slab, id, told);
        let times = self.times.get_mut();
        let facts = self.seen.facts_with(view, id, times, told.new_pages);
        self.policy.arrived(PageNumber(id.0), &facts);
    }

    pub(super) fn linked(&mut self, view: View<'_>, id: PageId) {
        let facts = self.seen.facts(view, id, self.times.get_mut());
        self.policy.linked(PageNumber(id.0), &facts);
    }

    /// A page is about to leave. Returns its worth, and whether its slot is set aside, and so stays
    /// QUEUED.
    pub(super) fn left(&mut self, view: View<'_>, id: PageId, why: Departure) -> (Worth, bool) {
        let facts = self.seen.facts(view, id, self.times.get_mut());
        let worth = self.policy.worth(PageNumber(id.0), &facts);
        self.policy.left(PageNumber(id.0), &facts, why);
        (worth, self.seen.note(id).is_aside())
    }

    pub(super) fn file(&mut self, view: View<'_>, id: PageId) {
        let facts = self.seen.facts(view, id, self.times.get_mut());
        self.policy.file(PageNumber(id.0), &facts);
    }

    /// Notes uses of pages by a reader. Returns whether they are to be reported at once.
    pub(super) fn note_uses(&self, ids: &[PageId], used: Used) -> bool {
        if used.by == Use::Lookup && !self.sees_lookups {
            return false;
        }
        let mut noted = self.noted.lock();
        let found = ids.iter().filter(|id| **id != PageId::NONE);
        noted.ids.extend(found.map(|id| PageNumber(id.0)));
        let end = noted.ids.len();
        noted.calls.push((end, used));
        end >= NOTED_MAX
    }

    pub(super) fn has_unreported(&self) -> bool {
        !self.noted.lock().ids.is_empty()
    }

    pub(super) fn report_uses(&mut self, view: View<'_>) {
        let Noted { ids, calls } = self.noted.get_mut();
        let times = self.times.get_mut();
        let mut begin = 0;
        for (end, used) in calls.drain(..) {
            let run = &ids[begin..end];
            for page in run {
                fetch(self.seen.notes.get(page.0 as usize));
                view.slab.fetch_link(PageId(page.0));
            }
            self.policy.fetch_used(run);
            for page in run {
                let id = PageId(page.0);
                let note = self.seen.note_mut(id);
                if used.by != Use::Lookup {
                    note.count_hit();
                }
                if let Some(hint) = used.hint {
                    note.hint = hint.bits();
                }
                let facts = self.seen.facts_with(view, id, times, used.new_pages);
                self.policy.used(*page, &facts, used.by);
            }
            begin = end;
        }
        ids.clear();
    }

    pub(super) fn note_time(&self, stamp: Heat, now_ms: u64) {
        self.times.lock().note(stamp, now_ms);
    }

    // ---- decisions

    /// As `Lru::coldest`. `look` is the present state of a page; it notes a slot that is no leaf as
    /// not held.
    pub(super) fn coldest(
        &mut self,
        slab: &mut Slab,
        counted: &Counted,
        (next, floor): (Heat, Heat),
        mut look: impl FnMut(&mut Slab, PageId) -> Standing,
    ) -> Option<PageId> {
        self.take_back(slab, counted, next, floor);
        let mut wrong = 0;
        loop {
            let (seen, times) = (&self.seen, self.times.get_mut());
            let found = self.policy.coldest(&mut |page| {
                let id = PageId(page.0);
                if !seen.is_held(slab, page) {
                    return None;
                }
                if !is_leaf(slab, id) {
                    slab.entry_mut(id).spot.clear(QUEUED);
                    return None;
                }
                let view = View {
                    slab,
                    counted,
                    next,
                };
                Some(seen.facts(view, id, times))
            });
            let Some(page) = found else {
                if self.aside_since >= next {
                    return None;
                }
                self.take_back(slab, counted, next, Heat(u32::MAX));
                continue;
            };
            if !self.seen.is_held(slab, page) {
                wrong += 1;
                if wrong > slab.slots() {
                    return None;
                }
                continue;
            }
            let id = PageId(page.0);
            match look(slab, id) {
                Standing::Gone => {}
                Standing::Held => self.seen.note_mut(id).rest |= IS_ASIDE,
                Standing::Parked(_) => {
                    self.seen.note_mut(id).rest |= IS_ASIDE;
                    self.parked.push(id);
                }
                Standing::Leaf(heat, true) if !planted!(LeaselessPolicy) => {
                    self.seen.note_mut(id).rest |= IS_ASIDE;
                    self.aside.push(heat, id);
                    self.aside_since = self.aside_since.min(next);
                }
                Standing::Leaf(..) => return Some(id),
            }
        }
    }

    /// A child of a page, if the policy names one.
    pub(super) fn child(&self, slab: &Slab, id: PageId) -> Option<PageId> {
        let named = self.policy.child(PageNumber(id.0))?;
        let child = PageId(named.0);
        let is_child = (named.0 as usize) < slab.slots()
            && slab.entry(child).spot.has(LIVE)
            && slab.link(child).parent == id;
        is_child.then_some(child)
    }

    /// Files leaves again that were set aside below a heat.
    fn take_back(&mut self, slab: &mut Slab, counted: &Counted, next: Heat, below: Heat) {
        while let Some((heat, id)) = self.aside.top()
            && heat < below
        {
            self.aside.pop();
            self.refile(slab, counted, next, id);
        }
        if self.aside.top().is_none() {
            self.aside_since = Heat(u32::MAX);
        }
    }

    /// Gives a slot back to the policy that was set aside, if it is a leaf.
    pub(super) fn refile(&mut self, slab: &mut Slab, counted: &Counted, next: Heat, id: PageId) {
        self.seen.note_mut(id).rest &= !IS_ASIDE;
        if is_leaf(slab, id) {
            let view = View {
                slab,
                counted,
                next,
            };
            self.file(view, id);
        } else {
            slab.entry_mut(id).spot.clear(QUEUED);
        }
    }

    /// A slot is not set aside any more.
    pub(super) fn let_go(&mut self, id: PageId) {
        self.seen.note_mut(id).rest &= !IS_ASIDE;
    }

    pub(super) fn unpark(&mut self, slab: &mut Slab, counted: &Counted, next: Heat) {
        for id in std::mem::take(&mut self.parked) {
            self.refile(slab, counted, next, id);
        }
    }

    pub(super) fn worth(&self, view: View<'_>, id: PageId) -> Worth {
        let facts = self.seen.facts(view, id, &mut self.times.lock());
        self.policy.worth(PageNumber(id.0), &facts)
    }

    pub(super) fn lines(&mut self, put: u64, copied: u64) -> ReclaimLines {
        let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        self.policy.written(bytes(put), bytes(copied));
        self.policy.lines()
    }

    /// What the policy has learned.
    pub(super) fn lessons(&self) -> Vec<u8> {
        self.policy.lessons()
    }

    /// What the policy knows of a stored page.
    pub(super) fn note(&self, slab: &Slab, id: PageId) -> Option<u128> {
        let entry = slab.entry(id);
        let is_stored = entry.spot.has(LIVE);
        is_stored.then(|| self.policy.note(PageNumber(id.0), entry.key()))?
    }

    pub(super) fn loaded(&mut self) {
        self.policy.loaded();
    }

    /// The order that the policy follows.
    pub(super) fn order(&self) -> String {
        self.policy.order()
    }

    /// How often that order has changed.
    pub(super) fn scale(&self) -> u64 {
        self.policy.scale()
    }

    /// Adjusts to a lowering of all heats by `cut`.
    pub(super) fn lower(&mut self, cut: u32) {
        self.aside.lower(cut);
        if self.aside.top().is_some() {
            self.aside_since = Heat(self.aside_since.0.saturating_sub(cut));
        }
        self.times.get_mut().lower(cut);
    }

    /// Bytes allocated.
    pub(super) fn ram_bytes(&self) -> usize {
        self.policy.ram_bytes()
            + self.seen.notes.ram_bytes()
            + self.seen.blocks.capacity() * size_of::<u32>()
            + self.times.lock().list.capacity() * size_of::<(Heat, u64)>()
            + self.aside.ram_bytes()
            + self.parked.capacity() * size_of::<PageId>()
            + self.noted.lock().ram_bytes()
    }
}
