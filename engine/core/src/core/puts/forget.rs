//! Pages that leave: evicted under the limit, deleted by a caller, or found damaged.

use std::num::NonZeroU16;
use std::sync::Arc;

use larder_base::ids::NamespaceId;
use larder_format::{KeyPrefix, Namespace, PageHome, PageKey, Proof, Record, SegmentNo, Serial};

use super::{Below, Origin, Puts};
use crate::core::namespaces::NAMESPACES_MAX;
use crate::core::types::{Fault, Move, RequestId};
use crate::grants::Finding;
use crate::index::{Departed, NamespaceSlot, Place, SegmentId};
use crate::planted;

impl Puts {
    // ---- evictions

    /// Evicts the coldest pages until a page of `blocks` more, with this parent, fits under the
    /// limit.
    pub(in crate::core) fn make_room(
        &mut self,
        below: &mut Below<'_>,
        blocks: u32,
        parent: Option<(NamespaceSlot, KeyPrefix)>,
    ) -> bool {
        while !below.segments.has_room(blocks) {
            if !self.evict_one(below, parent) {
                return false;
            }
        }
        true
    }

    /// Evicts the coldest pages, of so many blocks in all if there are so many.
    pub(in crate::core) fn evict(&mut self, below: &mut Below<'_>, blocks: u64) {
        let left = below.segments.live_blocks().saturating_sub(blocks);
        while below.segments.live_blocks() > left && self.evict_one(below, None) {}
    }

    /// Evicts the coldest leaf. A page whose child is being put is no leaf, though the index does
    /// not know that child yet: without its parent it would never be found. Neither is `parent`.
    pub(in crate::core) fn evict_one(
        &mut self,
        below: &mut Below<'_>,
        parent: Option<(NamespaceSlot, KeyPrefix)>,
    ) -> bool {
        let segments = &*below.segments;
        if !segments.may_evict_somewhere() {
            return false;
        }
        if !below.base.quotas.is_empty()
            && let Some(group) = below.base.index.group_above()
            && self.evict_own(below, group, 0, parent)
        {
            return true;
        }
        let segments = &*below.segments;
        let stays = |namespace, key| {
            let name = (namespace, key);
            Some(name) == parent || self.awaited.contains_key(&name)
        };
        let is_parked = |segment| !segments.may_evict(segment);
        let (index, now) = (&below.base.index, below.base.now_ms);
        let Some(page) = index.evict_coldest(now, stays, is_parked) else {
            return false;
        };
        self.frontier = Some((page.scale, page.worth));
        self.left(below, &page);
        true
    }

    /// Evicts the coldest leaf of a group, as [`Puts::evict_one`], for a page of its own of so many
    /// blocks. If that page finds no place after all, its group may be below the minimum by it.
    pub(super) fn evict_own(
        &mut self,
        below: &mut Below<'_>,
        group: u16,
        blocks: u32,
        parent: Option<(NamespaceSlot, KeyPrefix)>,
    ) -> bool {
        let segments = &*below.segments;
        let stays = |namespace, key| {
            let name = (namespace, key);
            Some(name) == parent || self.awaited.contains_key(&name)
        };
        let is_parked = |segment| !segments.may_evict(segment);
        let (index, now) = (&below.base.index, below.base.now_ms);
        let gone = index.evict_own(group, blocks, now, stays, is_parked);
        if let Some(page) = &gone {
            self.left(below, page);
        }
        gone.is_some()
    }

    /// Records a page that was evicted.
    fn left(&mut self, below: &mut Below<'_>, page: &Departed) {
        let generation = below.segments.get(page.place.segment).generation();
        let log = &mut below.base.evicted;
        log.left(page.namespace, page.key, page.place, generation);
        self.evicted(below, page.namespace, page.key, page.place);
    }

    /// Evicts a page of a victim with the chain below it, if all of them may go. Returns whether
    /// they went.
    pub(in crate::core) fn evict_chain(&mut self, below: &mut Below<'_>, page: &Move) -> bool {
        let segments = &*below.segments;
        let stays = |namespace, key, segment| {
            self.awaited.contains_key(&(namespace, key)) || !segments.may_evict(segment)
        };
        let (index, now) = (&below.base.index, below.base.now_ms);
        let key = page.record.key.prefix();
        let gone = index.evict_chain(page.namespace, key, page.from, now, stays);
        for left in &gone {
            let log = &mut below.base.evicted;
            if left.place == page.from {
                log.left_whole(left.namespace, page.record.key, left.place);
            } else if planted!(UnbookedChain) {
                continue;
            } else {
                let generation = below.segments.get(left.place.segment).generation();
                log.left(left.namespace, left.key, left.place, generation);
            }
            self.evicted(below, left.namespace, left.key, left.place);
        }
        !gone.is_empty()
    }

    /// Evicts a page of a victim with all that descends from it, leased or not: the price of going
    /// on at all.
    pub(in crate::core) fn evict_anyway(&mut self, below: &mut Below<'_>, page: &Move) {
        let key = page.record.key.prefix();
        let was_pinned = below.base.index.kept(page.namespace, key).is_some();
        if below.base.index.forget(page.namespace, key, page.from) {
            let log = &mut below.base.evicted;
            log.left_whole(page.namespace, page.record.key, page.from);
            self.evicted(below, page.namespace, key, page.from);
            below.base.counters.store.evicted_pinned += u64::from(was_pinned);
            if !below.base.quotas.is_empty() && below.base.index.is_low(page.namespace) {
                below.base.counters.store.evicted_below_minimum += 1;
            }
        }
    }

    /// One step of the removal of pages that are too old. None leaves while no volume takes writes:
    /// the records of their removal could not be written.
    pub(in crate::core) fn remove_old(&mut self, below: &mut Below<'_>, from: u32) -> Option<u32> {
        if !below.segments.takes_writes() {
            return None;
        }
        let mut gone = Vec::new();
        let next = below.base.index.remove_old(from, |page| gone.push(page));
        for page in gone {
            let generation = below.segments.get(page.place.segment).generation();
            let log = &mut below.base.evicted;
            log.left(page.namespace, page.key, page.place, generation);
            let namespaces = &below.base.namespaces;
            let blocks = namespaces.stored_blocks(page.namespace, page.place);
            below.segments.drop_live(page.place.segment, blocks);
            below.base.counters.store.expired += 1;
            self.log_eviction(below, page.namespace, page.key, page.place.segment);
        }
        next
    }

    fn evicted(
        &mut self,
        below: &mut Below<'_>,
        namespace: NamespaceSlot,
        key: KeyPrefix,
        place: Place,
    ) {
        let blocks = below.base.namespaces.stored_blocks(namespace, place);
        below.segments.drop_live(place.segment, blocks);
        below.base.counters.store.evicted += 1;
        let (born_ms, now_ms) = (
            below.base.index.born_ms(place.segment),
            below.base.unix_ms(),
        );
        below.base.ages.of(namespace).record(born_ms, now_ms, 1);
        self.log_eviction(below, namespace, key, place.segment);
    }

    /// Records that a page left `segment`.
    fn log_eviction(
        &mut self,
        below: &mut Below<'_>,
        namespace: NamespaceSlot,
        key: KeyPrefix,
        segment: SegmentId,
    ) {
        // A put of the same key that is under way is newer than the page that leaves, and stays.
        let put = self.in_flight.get(&(namespace, key));
        let version = match put {
            Some(&ticket) => Some(self.pending[ticket].version),
            None => below.base.next_serial(),
        };
        if let Some(version) = version {
            self.write_eviction(below, namespace, key, segment, version);
        }
    }

    #[expect(clippy::unused_self, reason = "evictions are the room's to write")]
    pub(super) fn write_eviction(
        &self,
        below: &mut Below<'_>,
        namespace: NamespaceSlot,
        key: KeyPrefix,
        segment: SegmentId,
        version: Serial,
    ) {
        let record = Record::Evict {
            namespace: below.base.namespaces.get(namespace).fingerprint,
            key,
            birth: version,
            home: home_of(below, segment),
        };
        if !planted!(UnwrittenEviction) {
            below.journal.keep_departure(record);
        }
    }

    /// Records that a put of this version has failed. Its descriptor may be on the device, and the
    /// next open must not find the page.
    #[expect(clippy::unused_self, reason = "these records are the room's to write")]
    pub(super) fn write_void(
        &self,
        below: &mut Below<'_>,
        namespace: NamespaceSlot,
        key: KeyPrefix,
        segment: SegmentId,
        version: Serial,
    ) {
        let record = Record::Void {
            namespace: below.base.namespaces.get(namespace).fingerprint,
            key,
            birth: version,
            home: home_of(below, segment),
        };
        if !planted!(UnvoidedFailure) {
            below.journal.keep_departure(record);
        }
    }

    // ---- damage

    /// Records the finding of a read: a good page is proven, any other is dropped.
    pub(in crate::core) fn found(
        &mut self,
        below: &mut Below<'_>,
        namespace: NamespaceSlot,
        key: &PageKey,
        place: Place,
        finding: Finding,
    ) {
        let prefix = key.prefix();
        let index = &below.base.index;
        if finding == Finding::Good {
            index.prove(namespace, prefix, place);
            return;
        }
        let found = index.locate_any(namespace, key);
        let unproven = found.is_some_and(|found| found.place == place && found.unproven);
        if !index.forget(namespace, prefix, place) {
            return;
        }
        below.base.evicted.left_whole(namespace, *key, place);
        let blocks = below.base.namespaces.stored_blocks(namespace, place);
        below.segments.drop_live(place.segment, blocks);
        self.log_eviction(below, namespace, prefix, place.segment);
        if unproven {
            below.base.counters.store.unfinished += 1;
        } else {
            let Below { base, segments, .. } = below;
            segments.note_damaged(base, namespace, prefix, place, finding);
        }
    }

    // ---- deletions

    /// Names a namespace, and writes its full record where the store does not hold it. `None` when
    /// the limit is reached.
    pub(in crate::core) fn open_namespace(
        below: &mut Below<'_>,
        namespace: &Namespace,
    ) -> Option<NamespaceId> {
        let fingerprint = namespace.fingerprint();
        let blocks = namespace.shape().page_blocks();
        let namespaces = &mut below.base.namespaces;
        let slot = match namespaces.slot_of(&fingerprint) {
            Some(slot) => slot,
            None if namespaces.len() >= NAMESPACES_MAX => return None,
            None => namespaces.add(fingerprint, blocks),
        };
        let state = namespaces.get_mut(slot);
        state.record.get_or_insert_with(|| namespace.clone());
        state.is_named = true;
        let is_homeless = state.home.is_none();
        // The fingerprint covers the page size. Records of another size under it are wrong: their
        // pages are dropped.
        let claimed = std::mem::replace(&mut state.page_blocks, blocks);
        if claimed != 0 && claimed != blocks {
            let Below { base, segments, .. } = below;
            let index = Arc::clone(&base.index);
            index.remove_namespace(slot, |page| {
                let generation = segments.get(page.place.segment).generation();
                base.evicted.left(slot, page.key, page.place, generation);
                let blocks = claimed.saturating_sub(page.place.saved);
                segments.drop_live(page.place.segment, blocks);
                segments.note_damaged(base, slot, page.key, page.place, Finding::Mismatch);
            });
        }
        below.base.join_group(slot);
        if is_homeless && !below.base.config.read_only {
            below
                .journal
                .write_namespace(below.base, below.segments, slot);
        }
        Some(NamespaceId(slot.0))
    }

    /// Deletes keys: from the index at once, from the disk when `request` is finished. Returns how
    /// many were there. Without room for the tombstones of some keys the request fails, and these
    /// keys stay.
    pub(in crate::core) fn delete(
        &mut self,
        below: &mut Below<'_>,
        request: RequestId,
        namespace: NamespaceSlot,
        keys: &[PageKey],
    ) -> u64 {
        if below.refuses_records(request) {
            return 0;
        }
        let fingerprint = below.base.namespaces.get(namespace).fingerprint;
        let tombstone = |key: &PageKey| {
            Some(Record::Delete {
                namespace: fingerprint,
                key: *key,
                birth: below.base.next_serial()?,
            })
        };
        let records: Option<Vec<Record>> = keys.iter().map(tombstone).collect();
        let placed = below.write_records(request, records);
        let mut found = 0;
        for key in &keys[..placed] {
            if let Some(ticket) = self.in_flight.remove(&(namespace, key.prefix())) {
                self.pending[ticket].deleted = true;
            }
            if let Some(place) = below.base.index.remove(namespace, key.prefix()) {
                let blocks = below.base.namespaces.stored_blocks(namespace, place);
                below.segments.drop_live(place.segment, blocks);
                found += 1;
            }
        }
        below.base.counters.store.deleted += found;
        found
    }

    /// A step before [`Puts::clear`], which has less to do then: removes some pages of a namespace,
    /// among the entries of the index from `from` on. Returns how many they were, and where the
    /// next step begins.
    pub(in crate::core) fn clear_some(
        below: &mut Below<'_>,
        namespace: NamespaceSlot,
        from: u32,
    ) -> (u64, Option<u32>) {
        if !below.segments.takes_writes() {
            return (0, None);
        }
        let (segments, namespaces) = (&mut *below.segments, &below.base.namespaces);
        let mut found = 0;
        let next = below.base.index.remove_some_of(namespace, from, |page| {
            let blocks = namespaces.stored_blocks(namespace, page.place);
            segments.drop_live(page.place.segment, blocks);
            found += 1;
        });
        below.base.counters.store.deleted += found;
        (found, next)
    }

    /// A step of the erasure of keys: removes some pages that are encrypted with the keys of these
    /// slots, among the entries of the index from `from` on, and at the first step those under way.
    /// No record is written: the keyring says that the keys are gone. Returns how many pages they
    /// were, and where the next step begins.
    pub(in crate::core) fn erase_some(
        &mut self,
        below: &mut Below<'_>,
        slots: &[NonZeroU16],
        from: u32,
    ) -> (u64, Option<u32>) {
        if from == 0 {
            let has_slot = |proof: &Proof| {
                let seal = proof.seal.as_ref();
                seal.is_some_and(|seal| slots.contains(&seal.slot))
            };
            for page in self.pending.values_mut() {
                page.deleted |= matches!(page.origin, Origin::Put) && has_slot(&page.proof);
            }
            let pending = &self.pending;
            self.in_flight.retain(|_, ticket| !pending[*ticket].deleted);
        }
        let (segments, namespaces) = (&mut *below.segments, &below.base.namespaces);
        let mut found = 0;
        let next = below.base.index.remove_some_sealed(slots, from, |page| {
            let blocks = namespaces.stored_blocks(page.namespace, page.place);
            segments.drop_live(page.place.segment, blocks);
            found += 1;
        });
        below.base.counters.store.deleted += found;
        (found, next)
    }

    /// Deletes a whole namespace. Returns how many pages it had.
    pub(in crate::core) fn clear(
        &mut self,
        below: &mut Below<'_>,
        request: RequestId,
        namespace: NamespaceSlot,
    ) -> u64 {
        if below.refuses_records(request) {
            return 0;
        }
        let fingerprint = below.base.namespaces.get(namespace).fingerprint;
        let version = below.base.next_serial();
        let tombstone = version.map(|birth| {
            vec![Record::Clear {
                namespace: fingerprint,
                birth,
            }]
        });
        let placed = below.write_records(request, tombstone);
        let Some(version) = version.filter(|_| placed > 0) else {
            return 0;
        };
        let state = below.base.namespaces.get_mut(namespace);
        // Puts under way have an older version: they find themselves cleared when they settle.
        state.cleared = version;
        self.in_flight.retain(|(other, _), _| *other != namespace);
        let (segments, namespaces) = (&mut *below.segments, &below.base.namespaces);
        let mut found = 0;
        below.base.index.remove_namespace(namespace, |page| {
            let blocks = namespaces.stored_blocks(namespace, page.place);
            segments.drop_live(page.place.segment, blocks);
            found += 1;
        });
        below.base.counters.store.deleted += found;
        found
    }
}

/// The generation that a segment holds now.
fn home_of(below: &Below<'_>, segment: SegmentId) -> PageHome {
    PageHome {
        volume: below.segments.volume_number(segment),
        segment: SegmentNo(below.segments.number_of(segment)),
        sequence: below.segments.get(segment).generation(),
    }
}

impl Below<'_> {
    /// A record that no volume would take is refused before it has any effect. Returns whether it
    /// is.
    pub(in crate::core) fn refuses_records(&mut self, request: RequestId) -> bool {
        let refuses = !self.segments.takes_writes();
        if refuses {
            self.base.finish(request, Err(Fault::ReadOnly));
        }
        refuses
    }

    /// Queues the records of a caller; `None` when this epoch has no serial left for them. Returns
    /// how many found room.
    pub(in crate::core) fn write_records(
        &mut self,
        request: RequestId,
        records: Option<Vec<Record>>,
    ) -> usize {
        let Below {
            base,
            segments,
            journal,
            ..
        } = self;
        let Some(records) = records else {
            base.finish(request, Err(Fault::NoRoom));
            return 0;
        };
        base.ask_for_room();
        journal.write_request(base, segments, request, &records)
    }
}
