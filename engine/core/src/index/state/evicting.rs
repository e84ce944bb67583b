//! Which page leaves next to make room: the coldest leaf of all, or of a group with a quota.

use larder_format::KeyPrefix;

use super::{State, hash_of};
use crate::index::coldness::Standing;
use crate::index::groups::{GroupLimits, Groups, Membership};
use crate::index::slab::{LIVE, Link, PageId, QUEUED, Slab};
use crate::index::types::{Departed, Heat, NamespaceSlot, SegmentId};
use crate::planted;
use crate::policy::Departure;

impl State {
    /// Removes the coldest leaf that has no valid lease, that its group need not keep, and that
    /// need not stay for another reason.
    pub(in crate::index) fn evict(
        &mut self,
        floor: Heat,
        stays: impl Fn(NamespaceSlot, KeyPrefix) -> bool,
        is_parked: impl Fn(SegmentId) -> bool,
    ) -> Option<Departed> {
        self.report_uses();
        self.release_held();
        let id = loop {
            if let Some(id) = self.coldest(floor, &stays, &is_parked) {
                break id;
            }
            if !self.release_held() {
                return None;
            }
        };
        self.slab.entry_mut(id).spot.clear(QUEUED);
        Some(self.take_out(id, floor, Departure::Evicted).0)
    }

    fn coldest(
        &mut self,
        floor: Heat,
        stays: impl Fn(NamespaceSlot, KeyPrefix) -> bool,
        is_parked: impl Fn(SegmentId) -> bool,
    ) -> Option<PageId> {
        let next = self.next();
        let (slab, groups) = (&mut self.slab, &mut self.groups);
        let mut look = |slab: &mut Slab, id| {
            let Link { children, .. } = slab.link(id);
            let entry = slab.entry_mut(id);
            if children == 0 && entry.spot.has(LIVE) {
                let (mark, namespace) = (entry.mark(), entry.spot.namespace());
                if is_parked(entry.spot.segment()) {
                    return Standing::Parked(mark.heat());
                }
                let stays = mark.is_leased(floor) || stays(namespace, entry.key());
                if let Some(groups) = groups
                    && !groups.may_evict(namespace, slab.place(id).saved)
                    && !planted!(DeafMinimum)
                {
                    groups.hold(namespace, id, mark.heat());
                    return Standing::Held;
                }
                Standing::Leaf(mark.heat(), stays)
            } else {
                entry.spot.clear(QUEUED);
                Standing::Gone
            }
        };
        match &mut self.chosen {
            None => self.cold.coldest(next, floor, |id| look(slab, id)),
            Some(chosen) => {
                let id = chosen.coldest(slab, &self.counted, (next, floor), look)?;
                // Its parent goes next, mostly.
                let parent = self.slab.link(id).parent;
                if parent != PageId::NONE {
                    self.table
                        .fetch(hash_of(self.names, self.slab.entry(parent)));
                }
                Some(id)
            }
        }
    }

    // ---- quotas

    /// Replaces all groups.
    pub(in crate::index) fn set_groups(&mut self, limits: &[GroupLimits]) {
        let held: Vec<PageId> = self.groups.iter().flat_map(|of| of.all_held()).collect();
        self.groups = None;
        held.into_iter().for_each(|id| self.refile(id));
        if !limits.is_empty() {
            self.groups = Some(Box::new(Groups::new(limits)));
        }
    }

    pub(in crate::index) fn join(
        &mut self,
        namespace: NamespaceSlot,
        group: Membership,
        blocks: u32,
    ) {
        let share = self.share_of(namespace);
        if let Some(groups) = &mut self.groups {
            groups.join(namespace, group, blocks, (share.pages as u64, share.saved));
        }
    }

    pub(in crate::index) fn coming(&mut self, namespace: NamespaceSlot, blocks: u32) {
        if let Some(groups) = &mut self.groups {
            groups.coming(namespace, blocks);
        }
    }

    pub(in crate::index) fn came(&mut self, namespace: NamespaceSlot, blocks: u32) {
        if let Some(groups) = &mut self.groups {
            groups.came(namespace, blocks);
        }
    }

    pub(in crate::index) fn quota_of(
        &self,
        namespace: NamespaceSlot,
        blocks: u32,
    ) -> (Membership, u64, bool) {
        match &self.groups {
            None => (Membership::None, u64::MAX, false),
            Some(groups) => (
                groups.membership(namespace),
                groups.max_of(namespace),
                groups.is_above(namespace, blocks),
            ),
        }
    }

    pub(in crate::index) fn is_low(&self, namespace: NamespaceSlot) -> bool {
        self.groups.as_ref().is_some_and(|of| of.is_low(namespace))
    }

    pub(in crate::index) fn group_above(&self) -> Option<u16> {
        self.groups.as_ref()?.above()
    }

    pub(in crate::index) fn group_levels(&self) -> Vec<(u64, u64)> {
        let groups = self.groups.as_ref();
        groups.map_or_else(Vec::new, |groups| groups.levels().collect())
    }

    /// Whether the group of these pages may lose all of them.
    pub(in crate::index) fn may_evict_all(&self, chain: &[PageId]) -> bool {
        let (Some(groups), Some(first)) = (&self.groups, chain.first()) else {
            return true;
        };
        let saved = chain.iter().map(|id| u64::from(self.slab.place(*id).saved));
        let namespace = self.slab.entry(*first).spot.namespace();
        groups.may_evict_all(namespace, chain.len() as u64, saved.sum())
    }

    /// Gives leaves back to the order of eviction that their groups may lose. Returns whether there
    /// were some.
    fn release_held(&mut self) -> bool {
        let Some(groups) = &mut self.groups else {
            return false;
        };
        let slab = &self.slab;
        let mut released = Vec::new();
        let state = |id| {
            let entry = slab.entry(id);
            let saved = slab.place(id).saved;
            (entry.spot.namespace(), saved, entry.mark().heat())
        };
        groups.release(state, &mut released);
        let some = !released.is_empty();
        released.into_iter().for_each(|id| self.refile(id));
        some
    }

    /// Files a slot again that was held, if it is a leaf.
    fn refile(&mut self, id: PageId) {
        let next = self.next();
        if let Some(chosen) = &mut self.chosen {
            chosen.refile(&mut self.slab, &self.counted, next, id);
        } else if self.is_leaf(id) {
            self.cold.file(id, self.slab.entry(id).mark().heat());
        } else {
            self.slab.entry_mut(id).spot.clear(QUEUED);
        }
    }

    /// A page is about to leave: if its slot was held, it is filed anew for the next page.
    pub(super) fn let_go(&mut self, id: PageId) {
        if self.groups.as_mut().is_some_and(|groups| groups.let_go(id)) {
            self.slab.entry_mut(id).spot.clear(QUEUED);
            if let Some(chosen) = &mut self.chosen {
                chosen.let_go(id);
            }
        }
    }

    fn is_leaf(&self, id: PageId) -> bool {
        self.slab.entry(id).spot.has(LIVE) && self.slab.link(id).children == 0
    }

    /// The heat of a slot, if it is a leaf of a group.
    pub(in crate::index) fn leaf_of(&self, group: u16, id: PageId) -> Option<(Heat, PageId)> {
        let groups = self.groups.as_ref()?;
        let entry = self.slab.entry(id);
        let is_own = groups.membership(entry.spot.namespace()) == Membership::Of(group);
        (is_own && self.is_leaf(id)).then(|| (entry.mark().heat(), id))
    }

    pub(in crate::index) fn may_gather(&self, group: u16, now_ms: u64) -> bool {
        let groups = self.groups.as_ref();
        groups.is_some_and(|groups| groups.may_gather(group, now_ms))
    }

    pub(in crate::index) fn set_own(&mut self, group: u16, leaves: Vec<(Heat, PageId)>) {
        if let Some(groups) = &mut self.groups {
            groups.forget_own(group);
            for (heat, id) in leaves {
                groups.add_own(group, heat, id);
            }
        }
    }

    pub(in crate::index) fn gathered(&mut self, group: u16, found: bool, now_ms: u64) {
        if let Some(groups) = &mut self.groups {
            groups.gathered(group, found, now_ms);
        }
    }

    /// As [`State::evict`], among the gathered leaves of a group.
    pub(in crate::index) fn evict_own(
        &mut self,
        (group, more): (u16, u32),
        floor: Heat,
        stays: impl Fn(NamespaceSlot, KeyPrefix) -> bool,
        is_parked: impl Fn(SegmentId) -> bool,
    ) -> Option<Departed> {
        self.report_uses();
        let mut skipped = Vec::new();
        let found = loop {
            let Some((filed, id)) = self.groups.as_mut()?.next_own(group) else {
                break None;
            };
            let Some((heat, _)) = self.leaf_of(group, id) else {
                continue;
            };
            if heat > filed {
                // Used since.
                self.groups.as_mut()?.add_own(group, heat, id);
                continue;
            }
            let entry = self.slab.entry(id);
            let (namespace, segment) = (entry.spot.namespace(), entry.spot.segment());
            let stays = entry.mark().is_leased(floor)
                || stays(namespace, entry.key())
                || is_parked(segment)
                || !{ self.groups.as_ref()? }.may_evict_for(
                    namespace,
                    self.slab.place(id).saved,
                    more,
                );
            if !stays {
                break Some(id);
            }
            skipped.push((heat, id));
        };
        let groups = self.groups.as_mut()?;
        for (heat, id) in skipped {
            groups.add_own(group, heat, id);
        }
        let id = found?;
        let parent = self.slab.link(id).parent;
        let departed = self.take_out(id, floor, Departure::Evicted).0;
        if parent != PageId::NONE
            && let Some((heat, parent)) = self.leaf_of(group, parent)
        {
            self.groups.as_mut()?.add_own(group, heat, parent);
        }
        Some(departed)
    }
}
