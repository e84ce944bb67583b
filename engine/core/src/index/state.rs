//! The state under the lock: table, slab and coldness queue, and the few steps that change them
//! together.
//!
//! Invariants (checked by `check`): the table holds exactly the stored pages and the ghosts, each
//! under its own hash. Every page's count of children is the number of stored pages that point at
//! it. No slot points at a free slot. Parents form no circle. Every leaf is queued, at no more than
//! its heat.

mod check;
mod evicting;
mod orphans;

use std::sync::atomic::{AtomicU64, Ordering};

use larder_format::KeyPrefix;

use super::chosen::{Chosen, View};
use super::coldness::Lru;
use super::counted::{Counted, Leased};
use super::groups::Groups;
use super::lifetimes::Lifetimes;
use super::slab::{Entry, HEAT_END, LIVE, Mark, ORPHAN, PageId, QUEUED, Slab, Spot, UNPROVEN};
use super::table::{NameHasher, Table};
use super::types::{
    Adoption, Departed, Heat, NamespaceSlot, PageView, Parent, Place, Publish, Published, SegmentId,
};
use crate::policy::order::EvictionOrder;
use crate::policy::{Departure, ReclaimLines, Worth};
use orphans::adoption;

/// The result of publishing a page.
pub(super) struct Arrived {
    pub(super) id: PageId,
    pub(super) outcome: Published,
    /// A shard of the table was rebuilt for it.
    pub(super) table_grew: bool,
}

/// The pages of one namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) pages: usize,
    /// Their blocks that a codec saved.
    pub(super) saved: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct State {
    names: NameHasher,
    table: Table,
    slab: Slab,
    cold: Lru,
    /// A policy of another crate in place of `cold`, which is empty then.
    chosen: Option<Box<Chosen>>,
    /// The order of `cold`, for people.
    pub(super) lru: String,
    counted: Counted,
    /// Without quotas there are none.
    groups: Option<Box<Groups>>,
    /// Without a limit there are none.
    pub(super) lifetimes: Option<Box<Lifetimes>>,
    pages: usize,
    /// By namespace, up to the highest one that had pages.
    of_namespace: Vec<Share>,
    /// Grows when heats are lowered: a stamp drawn before is invalid after.
    epoch: u64,
    /// The next stamp.
    clock: AtomicU64,
}

impl State {
    pub(super) fn new(capacity_blocks: u64, first: Heat) -> Self {
        Self {
            names: NameHasher::new(),
            table: Table::new(capacity_blocks),
            slab: Slab::new(),
            cold: Lru::new(),
            chosen: None,
            lru: "lru".to_owned(),
            counted: Counted::new(capacity_blocks),
            groups: None,
            lifetimes: None,
            pages: 0,
            of_namespace: Vec::new(),
            epoch: 0,
            clock: AtomicU64::new(u64::from(first.0)),
        }
    }

    #[inline]
    pub(super) fn lifetimes(&self) -> Option<&Lifetimes> {
        self.lifetimes.as_deref()
    }

    /// Evicts by this policy from now on.
    pub(super) fn choose(&mut self, policy: Box<dyn EvictionOrder>) {
        debug_assert!(self.pages == 0, "a policy is chosen for an empty index");
        self.chosen = Some(Box::new(Chosen::new(policy)));
    }

    /// The chosen policy, if it is not the default.
    #[inline]
    pub(super) fn chosen(&self) -> Option<&Chosen> {
        self.chosen.as_deref()
    }

    /// The worth of a page: its heat, or by the chosen policy.
    pub(super) fn worth(&self, id: PageId) -> Worth {
        match &self.chosen {
            None => Worth(self.slab.entry(id).mark().heat().0),
            Some(chosen) => chosen.worth(self.pages_seen(), id),
        }
    }

    /// See [`Index::scale`](super::Index::scale).
    pub(super) fn scale(&self) -> u64 {
        match &self.chosen {
            None => self.epoch,
            Some(chosen) => chosen.scale(),
        }
    }

    /// See [`Index::order`](super::Index::order).
    pub(super) fn order(&self) -> (String, u64) {
        match &self.chosen {
            None => (self.lru.clone(), 0),
            Some(chosen) => (chosen.order(), chosen.scale()),
        }
    }

    /// The pages, for the facts that a policy sees.
    fn pages_seen(&self) -> View<'_> {
        View {
            slab: &self.slab,
            counted: &self.counted,
            next: self.next(),
        }
    }

    /// Notes the time of a stamp, for the ages that a policy sees.
    #[inline]
    pub(super) fn note_time(&self, stamp: Heat, now_ms: u64) {
        if let Some(chosen) = &self.chosen {
            chosen.note_time(stamp, now_ms);
        }
    }

    /// Whether lookups noted uses that the policy was not given.
    #[inline]
    pub(super) fn has_unreported(&self) -> bool {
        self.chosen().is_some_and(Chosen::has_unreported)
    }

    /// The lines of reclaim, if a policy is chosen.
    pub(super) fn lines(&mut self, put: u64, copied: u64) -> Option<ReclaimLines> {
        Some(self.chosen.as_mut()?.lines(put, copied))
    }

    /// Gives the policy the uses that lookups noted.
    pub(super) fn report_uses(&mut self) {
        self.tell(Chosen::report_uses);
    }

    /// All pages of an open are there.
    pub(super) fn loaded(&mut self) {
        if let Some(chosen) = &mut self.chosen {
            chosen.loaded();
        }
    }

    /// Tells the policy something about the pages; `None` without one.
    fn tell<R>(&mut self, tell: impl FnOnce(&mut Chosen, View<'_>) -> R) -> Option<R> {
        let view = View {
            slab: &self.slab,
            counted: &self.counted,
            next: next_of(&self.clock),
        };
        self.chosen.as_deref_mut().map(|chosen| tell(chosen, view))
    }

    /// Makes room in an empty table for that many pages.
    pub(super) fn expect(&mut self, pages: usize) {
        self.table.expect(pages);
    }

    pub(super) const fn pages(&self) -> usize {
        self.pages
    }

    pub(super) fn share_of(&self, namespace: NamespaceSlot) -> Share {
        let share = self.of_namespace.get(usize::from(namespace.0));
        share.copied().unwrap_or_default()
    }

    fn count_in(&mut self, namespace: NamespaceSlot, saved: u32) {
        let at = usize::from(namespace.0);
        if at >= self.of_namespace.len() {
            self.of_namespace.resize(at + 1, Share::default());
        }
        self.of_namespace[at].pages += 1;
        self.of_namespace[at].saved += u64::from(saved);
        self.pages += 1;
        if let Some(groups) = &mut self.groups {
            groups.count_in(namespace, saved);
        }
    }

    fn count_out(&mut self, namespace: NamespaceSlot, saved: u32) {
        let share = &mut self.of_namespace[usize::from(namespace.0)];
        share.pages -= 1;
        share.saved -= u64::from(saved);
        self.pages -= 1;
        if let Some(groups) = &mut self.groups {
            groups.count_out(namespace, saved);
        }
    }

    pub(super) const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// A fresh stamp, or `None` when they have run out: `lower_heats` frees more.
    pub(super) fn draw(&self) -> Option<Heat> {
        let stamp = self.clock.fetch_add(1, Ordering::Relaxed);
        (stamp < u64::from(HEAT_END)).then_some(Heat(stamp as u32))
    }

    /// Whether `draw` would return a stamp.
    pub(super) fn has_stamps(&self) -> bool {
        self.next().0 < HEAT_END
    }

    /// The next stamp: above every heat.
    pub(super) fn next(&self) -> Heat {
        next_of(&self.clock)
    }

    // ---- finding

    pub(super) const fn slab(&self) -> &Slab {
        &self.slab
    }

    pub(super) const fn table(&self) -> &Table {
        &self.table
    }

    pub(super) const fn names(&self) -> NameHasher {
        self.names
    }

    /// The slot of that name, of a stored page or a ghost.
    fn find_slot(&self, namespace: NamespaceSlot, key: KeyPrefix) -> Option<PageId> {
        let hash = self.names.hash(namespace, key);
        self.table
            .find(hash, |id| self.slab.entry(id).is(namespace, key.as_bytes()))
    }

    /// The stored page of that name.
    #[inline]
    pub(super) fn find(&self, namespace: NamespaceSlot, key: KeyPrefix) -> Option<PageId> {
        self.find_slot(namespace, key)
            .filter(|id| self.slab.entry(*id).spot.has(LIVE))
    }

    /// The stored page of that name, if it still lies at `place`.
    pub(super) fn find_at(
        &self,
        namespace: NamespaceSlot,
        key: KeyPrefix,
        place: Place,
    ) -> Option<PageId> {
        self.find(namespace, key)
            .filter(|id| self.slab.place(*id) == place)
    }

    // ---- single fields

    pub(super) fn move_to(&mut self, id: PageId, place: Place) {
        let (spot, from) = (self.slab.entry(id).spot, self.slab.place(id));
        self.count_out(spot.namespace(), from.saved);
        self.count_in(spot.namespace(), place.saved);
        self.slab
            .set_spot(id, place, spot.namespace(), spot.flags());
    }

    pub(super) fn set_proven(&mut self, id: PageId) {
        self.slab.entry_mut(id).spot.clear(UNPROVEN);
    }

    /// Raises a page's heat without ending or renewing a valid lease.
    fn warm(&mut self, id: PageId, heat: Heat, floor: Heat) {
        let entry = self.slab.entry_mut(id);
        let mark = entry.mark();
        entry.set_mark(mark.max(Mark::new(heat.max(mark.heat()), mark.is_leased(floor))));
    }

    // ---- arriving

    /// Fetches the cache lines that publishing these pages reads first, so that no page waits for
    /// another page's miss.
    pub(super) fn fetch(&self, pages: &[Publish]) {
        for page in pages {
            self.table.fetch(self.names.hash(page.namespace, page.key));
        }
        if let Some(chosen) = &self.chosen {
            chosen.fetch(pages.iter().map(|page| (page.namespace, page.key)));
        }
    }

    /// Makes one page visible, under its heat; links it if its parent is stored. `previous` is a
    /// page known to be stored, likely its parent.
    ///
    /// A page whose parent is not stored yet is left an orphan. So is a page whose name was here
    /// before: it may have children, and then linking it takes the walk of `can_adopt`, for which
    /// no lookup should wait. Their adoption is added to `later`.
    pub(super) fn publish(
        &mut self,
        page: &Publish,
        previous: Option<(NamespaceSlot, KeyPrefix, PageId)>,
        heat: Heat,
        floor: Heat,
        later: &mut Vec<Adoption>,
    ) -> Arrived {
        let unproven = if page.unproven { UNPROVEN } else { 0 };
        let Some(id) = self.find_slot(page.namespace, page.key) else {
            let parent = self.parent_for(page, previous);
            let is_orphan = parent.is_none() && page.parent != Parent::Head;
            let orphan = if is_orphan { ORPHAN } else { 0 };
            if is_orphan {
                later.extend(adoption(page));
            }
            let spot = Spot::new(page.place, page.namespace, LIVE | unproven | orphan);
            let mark = Mark::new(heat, false);
            let entry = Entry::new(spot, page.key, mark);
            let (id, table_grew) = self.insert(entry, page.place.saved);
            self.slab.set_proof(id, page.proof);
            if let Some(parent) = parent {
                self.link(id, parent);
            }
            self.tell(|chosen, view| chosen.arrived(view, id, page.told));
            return Arrived {
                id,
                outcome: Published::New,
                table_grew,
            };
        };
        let (was, lay) = (self.slab.entry(id).spot, self.slab.place(id));
        let returns = !was.has(LIVE);
        let orphan = if returns {
            ORPHAN
        } else {
            was.flags() & ORPHAN
        };
        let flags = was.flags() & QUEUED | LIVE | unproven | orphan;
        self.slab.set_spot(id, page.place, page.namespace, flags);
        self.slab.set_proof(id, page.proof);
        let entry = self.slab.entry_mut(id);
        if page.parent == Parent::Head {
            entry.spot.clear(ORPHAN);
        } else if orphan != 0 {
            later.extend(adoption(page));
        }
        self.warm(id, heat, floor);
        let outcome = if returns {
            self.count_in(page.namespace, page.place.saved);
            self.tell(|chosen, view| chosen.arrived(view, id, page.told));
            Published::New
        } else {
            self.count_out(page.namespace, lay.saved);
            self.count_in(page.namespace, page.place.saved);
            Published::Replaced(lay)
        };
        Arrived {
            id,
            outcome,
            table_grew: false,
        }
    }

    fn parent_for(
        &self,
        page: &Publish,
        previous: Option<(NamespaceSlot, KeyPrefix, PageId)>,
    ) -> Option<PageId> {
        let Parent::Key(key) = page.parent else {
            return None;
        };
        match previous {
            // A put is a run of a chain: the parent is nearly always the page just published.
            Some((namespace, known, id)) if known == key && namespace == page.namespace => Some(id),
            _ => self.find(page.namespace, key),
        }
    }

    fn insert(&mut self, entry: Entry, saved: u32) -> (PageId, bool) {
        let names = self.names;
        let hash = hash_of(names, &entry);
        self.count_in(entry.spot.namespace(), saved);
        let id = self.slab.insert(entry, saved);
        if let Some(lifetimes) = &mut self.lifetimes {
            lifetimes.forget(id);
        }
        let slab = &self.slab;
        let rebuilt = self
            .table
            .insert(hash, id, |id| hash_of(names, slab.entry(id)));
        (id, rebuilt)
    }

    fn link(&mut self, child: PageId, parent: PageId) {
        self.slab.link_mut(child).parent = parent;
        self.slab.link_mut(parent).children += 1;
    }

    /// Queues a page if it is a leaf and not queued yet. `publish` leaves this to its caller: a
    /// page whose child comes with it need not enter the queue at all.
    pub(super) fn queue_if_leaf(&mut self, id: PageId) {
        let children = self.slab.link(id).children;
        let entry = self.slab.entry_mut(id);
        if children == 0 && entry.spot.has(LIVE) && !entry.spot.has(QUEUED) {
            entry.spot.set(QUEUED);
            let heat = entry.mark().heat();
            if self.tell(|chosen, view| chosen.file(view, id)).is_none() {
                self.cold.file(id, heat);
            }
        }
    }

    // ---- counted leases

    /// Takes a counted lease of a page of so many blocks.
    pub(super) fn lease(
        &mut self,
        namespace: NamespaceSlot,
        key: KeyPrefix,
        blocks: u32,
    ) -> Leased {
        let Some(id) = self.find(namespace, key) else {
            return Leased::Absent;
        };
        match self.counted.take(id, blocks) {
            Some(true) => self.hold(id, true),
            Some(false) => {}
            None => return Leased::Refused,
        }
        Leased::Yes
    }

    /// Returns a counted lease, if the page has one.
    pub(super) fn unlease(&mut self, namespace: NamespaceSlot, key: KeyPrefix) {
        if let Some(id) = self.find(namespace, key)
            && self.counted.give_back(id)
        {
            self.hold(id, false);
        }
    }

    pub(super) fn counted(&self) -> &Counted {
        &self.counted
    }

    pub(super) fn counted_mut(&mut self) -> &mut Counted {
        &mut self.counted
    }

    /// A page has one child more, or one less, for leases and keeping.
    pub(super) fn hold(&mut self, id: PageId, is_held: bool) {
        let link = self.slab.link_mut(id);
        if is_held {
            link.children += 1;
        } else {
            link.children -= 1;
            self.queue_if_leaf(id);
        }
    }

    /// Stored children of a page.
    pub(super) fn children(&self, id: PageId) -> u32 {
        self.slab.link(id).children - u32::from(self.counted.has(id))
    }

    pub(super) fn has_counted_lease(&self, id: PageId) -> bool {
        self.counted.has(id)
    }

    pub(super) fn counted_leases(&self) -> (u64, u64, u64) {
        self.counted.totals()
    }

    // ---- leaving

    /// The page and the chain below it, if all of these pages may go and there are at most `most`.
    pub(super) fn chain_below(
        &self,
        head: PageId,
        most: usize,
        floor: Heat,
        stays: impl Fn(NamespaceSlot, KeyPrefix, SegmentId) -> bool,
    ) -> Option<Vec<PageId>> {
        let mut chain = vec![head];
        let mut at = head;
        loop {
            let entry = self.slab.entry(at);
            let (namespace, segment) = (entry.spot.namespace(), entry.spot.segment());
            if entry.mark().is_leased(floor) || stays(namespace, entry.key(), segment) {
                return None;
            }
            match self.slab.link(at).children {
                0 => return Some(chain),
                // A counted lease counts like a child, which no policy names.
                1 if chain.len() < most => at = self.chosen()?.child(&self.slab, at)?,
                _ => return None,
            }
            chain.push(at);
        }
    }

    /// Removes a stored page. Its mark names the lease to return. Its children stay, as orphans of
    /// a ghost.
    pub(super) fn take_out(&mut self, id: PageId, floor: Heat, why: Departure) -> (Departed, Mark) {
        self.report_uses();
        self.let_go(id);
        let scale = self.scale();
        let told = self.tell(|chosen, view| chosen.left(view, id, why));
        if told.is_some_and(|(_, is_aside)| !is_aside) {
            // The next page of this slot is filed anew.
            self.slab.entry_mut(id).spot.clear(QUEUED);
        }
        let entry = self.slab.entry(id);
        let mark = entry.mark();
        let worth = told.map_or(Worth(mark.heat().0), |(worth, _)| worth);
        let departed = Departed {
            namespace: entry.spot.namespace(),
            key: entry.key(),
            place: self.slab.place(id),
            worth,
            scale,
        };
        if self.counted.end(id) {
            self.slab.link_mut(id).children -= 1;
        }
        self.unlink(id, mark.heat(), floor);
        self.count_out(departed.namespace, departed.place.saved);
        if self.slab.link(id).children > 0 {
            let ghost = self.slab.entry_mut(id);
            ghost.spot.clear(LIVE | UNPROVEN | ORPHAN);
            ghost.set_mark(Mark::new(mark.heat(), false));
        } else {
            self.drop_slot(id);
        }
        (departed, mark)
    }

    /// Detaches a page that leaves from its parent. The parent stays as hot as the hottest
    /// descendant it ever had.
    fn unlink(&mut self, id: PageId, heat: Heat, floor: Heat) {
        let parent = std::mem::replace(&mut self.slab.link_mut(id).parent, PageId::NONE);
        if parent == PageId::NONE {
            return;
        }
        let siblings = &mut self.slab.link_mut(parent).children;
        *siblings -= 1;
        let is_last = *siblings == 0;
        if self.slab.entry(parent).spot.has(LIVE) {
            self.warm(parent, heat, floor);
            self.queue_if_leaf(parent);
        } else if is_last {
            self.drop_slot(parent);
        }
    }

    fn drop_slot(&mut self, id: PageId) {
        let hash = hash_of(self.names, self.slab.entry(id));
        let was_there = self.table.remove(hash, id);
        debug_assert!(was_there, "slot {} is not in the table", id.0);
        self.slab.free(id);
    }

    pub(super) fn unpark(&mut self) {
        let next = self.next();
        match &mut self.chosen {
            None => self.cold.unpark(),
            Some(chosen) => chosen.unpark(&mut self.slab, &self.counted, next),
        }
    }

    // ---- the clock

    /// Lowers every heat so that at least half of all stamps are free again. Returns the amount.
    ///
    /// Normally the coldest page goes to 1, and the order does not change. If that frees too few
    /// stamps (a page unused for a billion calls), the older half of the stamps become one age.
    /// Heat 0 is left to calls older than every page: no page and no later call shares a stamp with
    /// them.
    pub(super) fn lower_heats(&mut self, floor: Heat) -> u32 {
        let live = |entry: &&Entry| entry.spot.has(LIVE);
        let coldest = self
            .slab
            .entries()
            .filter(live)
            .map(|entry| entry.mark().heat().0)
            .min();
        let cut = coldest.unwrap_or(HEAT_END).saturating_sub(1);
        let cut = cut.max(HEAT_END / 2);
        for entry in self.slab.entries_mut() {
            let mark = entry.mark();
            let heat = Heat(mark.heat().0.saturating_sub(cut));
            entry.set_mark(Mark::new(heat, mark.is_leased(floor)));
        }
        self.cold.lower(cut);
        if let Some(groups) = &mut self.groups {
            groups.lower(cut);
        }
        if let Some(chosen) = &mut self.chosen {
            chosen.lower(cut);
        }
        let next = self.next().0.saturating_sub(cut);
        *self.clock.get_mut() = u64::from(next);
        self.epoch += 1;
        cut
    }

    // ---- inspection

    pub(super) fn view(&self, id: PageId) -> Option<PageView> {
        let entry = self.slab.entry(id);
        if !entry.spot.has(LIVE) {
            return None;
        }
        let parent = self.slab.link(id).parent;
        let children = self.children(id);
        let above = (parent != PageId::NONE).then(|| self.slab.entry(parent));
        let parent = above.filter(|above| above.spot.has(LIVE)).map(Entry::key);
        Some(PageView {
            namespace: entry.spot.namespace(),
            key: entry.key(),
            parent,
            place: self.slab.place(id),
            proof: self.slab.proof(id),
            heat: entry.mark().heat(),
            children,
            unproven: entry.spot.has(UNPROVEN),
            orphan: entry.spot.has(ORPHAN) || above.is_some() && parent.is_none(),
        })
    }

    /// Bytes allocated.
    pub(super) fn ram_bytes(&self) -> usize {
        self.table.ram_bytes()
            + self.slab.ram_bytes()
            + self.cold.ram_bytes()
            + self.chosen.as_ref().map_or(0, |chosen| chosen.ram_bytes())
            + self.counted.ram_bytes()
            + self.groups.as_ref().map_or(0, |groups| groups.ram_bytes())
            + self.lifetimes().map_or(0, Lifetimes::ram_bytes)
            + self.of_namespace.capacity() * size_of::<Share>()
    }
}

fn next_of(clock: &AtomicU64) -> Heat {
    let next = clock.load(Ordering::Relaxed).min(u64::from(HEAT_END));
    Heat(next as u32)
}

fn hash_of(names: NameHasher, entry: &Entry) -> u64 {
    names.hash(entry.spot.namespace(), entry.key())
}

#[cfg(test)]
mod tests;
