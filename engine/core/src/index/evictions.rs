//! The calls of the core that make room, and the quotas that they keep.

use larder_format::KeyPrefix;

use super::groups::{GroupLimits, Membership};
use super::slab::PageId;
use super::types::{Departed, NamespaceSlot, Place, SegmentId};
use super::{CHAIN_PAGES_MAX, HOLD_SLOTS, Index};
use crate::policy::Departure;

impl Index {
    /// Evicts the coldest leaf without a valid lease at `now_ms` for which `stays` is false; `None`
    /// if there is none. It skips the pages of parked segments. Such a page is not considered again
    /// before [`Index::unpark`].
    pub fn evict_coldest(
        &self,
        now_ms: u64,
        stays: impl Fn(NamespaceSlot, KeyPrefix) -> bool,
        is_parked: impl Fn(SegmentId) -> bool,
    ) -> Option<Departed> {
        let mut state = self.state.write();
        state.note_time(state.next(), now_ms);
        let floor = self.leases.lock().expire(now_ms);
        state.evict(floor, stays, is_parked)
    }

    /// Pages of parked segments may be evicted again.
    pub fn unpark(&self) {
        self.state.write().unpark();
    }

    /// Evicts the page, if it still lies at `place`, with the chain below it, the deepest page
    /// first. Returns the pages that left: all of the chain or none.
    ///
    /// None leaves if one of them is leased at `now_ms`, if `stays` is true for one, if its group
    /// has to keep them, or if the chain forks, is longer than 64 pages, or is unknown: the
    /// children of a page are known to the policy of eviction alone, and not to every policy. So
    /// without one only a leaf leaves.
    pub fn evict_chain(
        &self,
        namespace: NamespaceSlot,
        key: KeyPrefix,
        place: Place,
        now_ms: u64,
        stays: impl Fn(NamespaceSlot, KeyPrefix, SegmentId) -> bool,
    ) -> Vec<Departed> {
        let mut state = self.state.write();
        let floor = self.leases.lock().expire(now_ms);
        let head = state.find_at(namespace, key, place);
        let chain = head.and_then(|head| state.chain_below(head, CHAIN_PAGES_MAX, floor, stays));
        let chain = chain.filter(|chain| state.may_evict_all(chain));
        let chain = chain.unwrap_or_default().into_iter().rev();
        chain
            .map(|id| self.take_out(&mut state, id, Departure::Evicted))
            .collect()
    }

    // ---- quotas

    /// Sets the limits of groups, and the group and the blocks of a page of each namespace; the
    /// others have none. `coming` are the pages that are being put.
    pub fn set_groups(
        &self,
        limits: &[GroupLimits],
        members: &[(NamespaceSlot, Membership, u32)],
        coming: impl Iterator<Item = (NamespaceSlot, u32)>,
    ) {
        let mut state = self.state.write();
        state.set_groups(limits);
        for (namespace, group, blocks) in members {
            state.join(*namespace, *group, *blocks);
        }
        coming.for_each(|(namespace, blocks)| state.coming(namespace, blocks));
    }

    /// Puts a namespace whose pages have so many blocks into a group.
    pub fn join(&self, namespace: NamespaceSlot, group: Membership, blocks: u32) {
        self.state.write().join(namespace, group, blocks);
    }

    /// A page of so many blocks is being put: it counts for its group from now on.
    pub fn coming(&self, namespace: NamespaceSlot, blocks: u32) {
        self.state.write().coming(namespace, blocks);
    }

    /// The put of such a page is over.
    pub fn came(&self, namespace: NamespaceSlot, blocks: u32) {
        self.state.write().came(namespace, blocks);
    }

    /// The group of a namespace, its maximum, and whether so many blocks more are above that.
    pub fn quota_of(&self, namespace: NamespaceSlot, blocks: u32) -> (Membership, u64, bool) {
        self.state.read().quota_of(namespace, blocks)
    }

    /// Whether the group of a namespace is below its minimum.
    pub fn is_low(&self, namespace: NamespaceSlot) -> bool {
        self.state.read().is_low(namespace)
    }

    /// A group above its maximum.
    pub fn group_above(&self) -> Option<u16> {
        self.state.read().group_above()
    }

    /// Blocks of the stored pages of each group, and the same with the pages that are being put.
    pub fn group_levels(&self) -> Vec<(u64, u64)> {
        self.state.read().group_levels()
    }

    /// As [`Index::evict_coldest`], among the pages of a group, the least recently used first. So
    /// many blocks of the group are about to come.
    pub fn evict_own(
        &self,
        group: u16,
        blocks: u32,
        now_ms: u64,
        stays: impl Fn(NamespaceSlot, KeyPrefix) -> bool,
        is_parked: impl Fn(SegmentId) -> bool,
    ) -> Option<Departed> {
        let evict = || {
            let mut state = self.state.write();
            let floor = self.leases.lock().expire(now_ms);
            state.evict_own((group, blocks), floor, &stays, &is_parked)
        };
        if let Some(gone) = evict() {
            return Some(gone);
        }
        if !self.state.read().may_gather(group, now_ms) {
            return None;
        }
        // No page arrives or leaves meanwhile: that is for this thread alone.
        let slots = self.state.read().slab().slots() as u32;
        let mut leaves = Vec::new();
        for first in (0..slots).step_by(HOLD_SLOTS) {
            let state = self.state.read();
            let hold = (first..slots).take(HOLD_SLOTS).map(PageId);
            leaves.extend(hold.filter_map(|id| state.leaf_of(group, id)));
        }
        self.state.write().set_own(group, leaves);
        let gone = evict();
        self.state.write().gathered(group, gone.is_some(), now_ms);
        gone
    }
}
