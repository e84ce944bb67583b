//! The decisions of the core, for callers in its process.

use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_base::planted;
use larder_base::runtime::Instant;
use larder_core::capacity::footprint;
use larder_core::core::{Fault, Kept, NAMESPACES_MAX, RequestId};
use larder_core::counters::Counted;
use larder_core::grants::{Ask, Extent, Finding, Grant, ReservationId};
use larder_core::hint::Hint;
use larder_core::index::{Lease, ReadAs, SegmentId};
use larder_core::status::{PutStatus, Refusal};
use larder_format::{BLOCK_BYTES, Namespace, PageKey, Proof};

use super::Local;
use crate::api::Stats;
use crate::catalog::{Allocator, Catalog, Direct, Landed, NamespaceShape, Pinned, Putting};
use crate::curve::Used;
use crate::error::StoreError;

/// Longest single wait of a put for room. After it the put checks again: the end of a lease sends
/// no notification.
const ROOM_PATIENCE: Duration = Duration::from_secs(1);

/// Most pages of a long list that are passed to the core at once. It bounds how long other callers
/// wait for the core.
const PAGES_AT_ONCE: usize = 2048;

/// Longest wait of a deletion for room for its record.
const RECORD_PATIENCE: Duration = Duration::from_secs(10);

fn failure(fault: Fault) -> StoreError {
    match fault {
        Fault::Write => StoreError::WriteFailed("the device refused it".to_owned()),
        Fault::Sync => StoreError::SyncFailed,
        Fault::NoRoom => StoreError::NoRoom,
        Fault::ReadOnly => StoreError::ReadOnlyService,
    }
}

impl Catalog for Local {
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, StoreError> {
        let named = self.in_store(namespace)?;
        let id = self
            .with_core(|core| core.open_namespace(&named))
            .ok_or(StoreError::TooManyNamespaces(NAMESPACES_MAX))?;
        // Its record was lost, and a quota limits the age of its pages: they are absent so far.
        self.learn_puts();
        let mut shapes = self.shapes.lock();
        let at = usize::from(id.0);
        if shapes.len() <= at {
            shapes.resize(at + 1, None);
        }
        shapes[at].get_or_insert_with(|| {
            let tenant = self.keys.as_ref().map(|keys| keys.tenant_of(namespace));
            NamespaceShape::of(&named, self.codec).for_tenant(tenant)
        });
        drop(shapes);
        if let Some(beneath) = self.beneath.get() {
            beneath.opened(&named.plain());
        }
        Ok(id)
    }

    fn shape(&self, namespace: NamespaceId) -> Option<NamespaceShape> {
        self.shapes
            .lock()
            .get(usize::from(namespace.0))
            .cloned()
            .flatten()
    }

    fn longest_prefix(&self, namespace: NamespaceId, keys: &[PageKey]) -> usize {
        let (mut orphans, lease) = (Vec::new(), self.lease(namespace));
        let found = self
            .index_now()
            .longest_prefix(namespace.into(), keys, lease, &mut orphans);
        self.note(namespace, (keys, found), lease);
        self.adopt(&orphans);
        self.count(keys, found);
        let Some((beneath, fingerprint)) = self.beneath(namespace) else {
            return found;
        };
        if found > 0 {
            beneath.used(fingerprint, &keys[..found]);
        }
        let left = keys.len() - found;
        match left {
            0 => found,
            _ => found + beneath.missed(fingerprint, keys, found).min(left),
        }
    }

    fn contains(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool> {
        let (mut orphans, lease) = (Vec::new(), self.lease(namespace));
        let found = self
            .index_now()
            .contains(namespace.into(), keys, lease, &mut orphans);
        let first = found.iter().position(|is_there| !is_there);
        self.note(namespace, (keys, first.unwrap_or(keys.len())), lease);
        self.adopt(&orphans);
        self.count(keys, found.iter().filter(|is_there| **is_there).count());
        if let Some((beneath, fingerprint)) = self.beneath(namespace) {
            let there = keys.iter().zip(&found).filter(|(_, is_there)| **is_there);
            let there: Vec<PageKey> = there.map(|(key, _)| *key).collect();
            beneath.used(fingerprint, &there);
        }
        found
    }

    fn touch(&self, namespace: NamespaceId, keys: &[PageKey], hint: Hint) {
        let now_ms = self.now_ms();
        self.index_now()
            .touch_as(namespace.into(), keys, hint, now_ms);
        if let Some(used) = self.used(namespace, None, hint)
            && self.curve.touched(&used, keys)
        {
            self.call_for_counts();
        }
        if let Some((beneath, fingerprint)) = self.beneath(namespace) {
            beneath.used(fingerprint, keys);
        }
    }

    fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[PageKey],
        read_as: ReadAs,
    ) -> Vec<Option<Pinned>> {
        let found = self.index_now().pin(namespace.into(), keys, read_as);
        if read_as == ReadAs::Use {
            self.count_ages(namespace, &found);
        }
        let found = found.into_iter();
        found
            .map(|page| {
                page.map(|page| Pinned {
                    extent: self.map.extent(page.place),
                    proof: page.proof,
                    unproven: page.unproven,
                })
            })
            .collect()
    }

    fn unpin(&self, extents: &[Extent]) {
        for extent in extents {
            if self.index.unpin(extent.place.segment) {
                self.with_core(|core| core.unpinned(extent.place.segment));
            }
        }
    }

    fn verified(&self, namespace: NamespaceId, findings: &[(PageKey, Extent, Finding)]) {
        for some in findings.chunks(PAGES_AT_ONCE) {
            self.with_core_in_turn(|core| {
                for (key, extent, finding) in some {
                    core.found(namespace.into(), key, extent.place, *finding);
                }
            });
        }
    }

    fn put(&self, namespace: NamespaceId, hint: Hint) -> Box<dyn Putting + '_> {
        Box::new(Direct::new(self, namespace, hint))
    }

    fn delete(&self, namespace: NamespaceId, keys: &[PageKey]) -> Result<u64, StoreError> {
        if self.shape(namespace).is_none() {
            return Err(StoreError::UnknownNamespace);
        }
        let room = self.room();
        let delete = |request, some| {
            self.with_core_in_turn(|core| core.delete(request, namespace.into(), some))
        };
        let mut found = 0;
        let mut requests = Vec::with_capacity(keys.len().div_ceil(PAGES_AT_ONCE));
        for some in keys.chunks(PAGES_AT_ONCE) {
            let request = self.new_request();
            requests.push((request, some));
            found += delete(request, some);
        }
        if planted!(EarlyDelete) {
            return Ok(found);
        }
        // Waits for all of them, even if one fails.
        let outcomes: Vec<_> = requests
            .into_iter()
            .map(|(request, some)| {
                self.wait_for_record(request, room, |again| found += delete(again, some))
            })
            .collect();
        outcomes
            .into_iter()
            .collect::<Result<(), Fault>>()
            .map_err(failure)?;
        Ok(found)
    }

    fn clear_namespace(&self, namespace: NamespaceId) -> Result<u64, StoreError> {
        if self.shape(namespace).is_none() {
            return Err(StoreError::UnknownNamespace);
        }
        // In steps: otherwise other callers would wait until millions of pages are cleared.
        let mut found = 0;
        let mut step = Some(0);
        while let Some(from) = step {
            let (some, next) =
                self.with_core_by_turns(|core| core.clear_some(namespace.into(), from));
            found += some;
            step = next;
        }
        let room = self.room();
        let clear = |request| self.with_core(|core| core.clear(request, namespace.into()));
        let request = self.new_request();
        found += clear(request);
        self.wait_for_record(request, room, |again| found += clear(again))
            .map_err(failure)?;
        Ok(found)
    }

    fn flush(&self) -> Result<(), StoreError> {
        let request = self.new_request();
        self.with_core(|core| core.flush(request));
        let flushed = self.wait_for_request(request);
        if planted!(DeafFlush) {
            return Ok(());
        }
        flushed.map_err(failure)
    }

    fn stats(&self) -> Stats {
        let core = self.core_in_turn();
        let (counters, space) = (core.counters(), core.space_view());
        let read_only = core.read_only_volumes();
        let pages = self.index.len() as u64;
        let (pinned_pages, pinned_blocks) = core.kept_totals();
        drop(core);
        let block = BLOCK_BYTES as u64;
        let (eviction, eviction_switches) = self.index.order();
        Stats {
            eviction,
            eviction_switches,
            pages,
            live_bytes: space.live_blocks * block,
            usable_bytes: space.usable_blocks * block,
            taken_bytes: space.taken_blocks * block,
            segment_bytes: u64::from(space.segment_blocks) * block,
            segments: space.segments,
            free_segments: space.free_segments,
            open_segments: space.open_segments,
            sealed_segments: space.sealed_segments,
            reclaiming_segments: space.reclaiming_segments,
            unreadable_segments: space.unreadable_segments,
            pinned_pages,
            pinned_bytes: pinned_blocks * block,
            leased_bytes: self.index.leased_blocks(self.now_ms()) * block,
            prewritten_bytes: self.prewritten.load(Ordering::Relaxed),
            index_bytes: self.index.ram_bytes() as u64,
            pages_put: counters.pages_put,
            duplicates: counters.duplicates,
            puts_refused_read_only: counters.store.puts_refused_read_only,
            read_only_volumes: read_only
                .into_iter()
                .map(|found| self.named(found))
                .collect(),
            evicted: counters.store.evicted,
            deleted: counters.store.deleted,
            damaged: counters.store.damaged + counters.lost,
            unfinished: counters.store.unfinished,
            moved: counters.store.moved,
            reclaimed: counters.store.reclaimed,
            bytes_put: counters.blocks_put * block,
            bytes_written: counters.store.written.total(),
            syncs: counters.store.syncs,
            failed_syncs: counters.store.failed_syncs,
            ..Stats::default()
        }
    }
}

impl Allocator for Local {
    fn peek(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool> {
        self.index_now().peek(namespace.into(), keys)
    }

    fn reserve(
        &self,
        namespace: NamespaceId,
        hint: Hint,
        asks: &[Ask],
    ) -> (ReservationId, Vec<Grant>) {
        if let Some((beneath, fingerprint)) = self.beneath(namespace) {
            beneath.asked(fingerprint, asks);
        }
        let erased = self.keys.is_some() && self.lacks_key(namespace);
        let wanted = if erased { &[] } else { asks };
        let (id, mut grants) = self.with_core(|core| core.reserve(namespace.into(), wanted, hint));
        grants.resize(asks.len(), Grant::Refused(Refusal::Erased));
        let granted = asks.iter().zip(&grants);
        let refused = grants
            .iter()
            .position(|grant| matches!(grant, Grant::Refused(_)));
        let granted = granted.take(refused.unwrap_or(grants.len()));
        let stored = granted.map(|(ask, grant)| {
            let was_stored = matches!(grant, Grant::Settles);
            (&ask.key, ask.depth, was_stored)
        });
        let parent = asks.first().and_then(|ask| ask.parent.as_ref());
        if let Some(used) = self.used(namespace, parent, hint)
            && self.curve.put(&used, stored)
        {
            self.call_for_counts();
        }
        (id, grants)
    }

    fn commit(&self, reservation: ReservationId, proofs: &[Option<Proof>]) {
        self.with_core(|core| match &self.keys {
            None => core.commit(reservation, proofs),
            // Looked at with the core held: an erasure removes the pages that were before it.
            Some(keys) => {
                let accepted = |proof: &Option<Proof>| proof.filter(|proof| keys.accepts(proof));
                let accepted: Vec<_> = proofs.iter().map(accepted).collect();
                core.commit(reservation, &accepted);
            }
        });
    }

    fn landed(&self, reservations: &[Landed]) {
        self.with_core(|core| {
            for (reservation, pages) in reservations {
                core.landed(*reservation, pages);
            }
        });
    }

    fn keep(&self, segments: &[SegmentId]) {
        self.index.keep(segments);
    }

    fn wait(&self, reservation: ReservationId) -> Vec<PutStatus> {
        self.wait_for(|answers| answers.settled.remove(&reservation))
    }

    fn room(&self) -> u64 {
        self.answers.lock().room
    }

    fn wait_for_room(&self, seen: u64, deadline: Instant) -> bool {
        let until = deadline.min(Instant::now() + ROOM_PATIENCE);
        let mut answers = self.answers.lock();
        while answers.room == seen {
            if self.answered.wait_until(&mut answers, until).timed_out() {
                return answers.room != seen || until < deadline;
            }
        }
        true
    }
}

impl Local {
    /// In an encrypted store: whether the tenant of a namespace has no key. It had one when the put
    /// began.
    fn lacks_key(&self, namespace: NamespaceId) -> bool {
        let tenant = self.shape(namespace).and_then(|shape| shape.tenant);
        tenant.is_some_and(|tenant| !tenant.has_key())
    }

    /// Counts a lookup that found so many of these pages.
    fn count(&self, keys: &[PageKey], found: usize) {
        let pages = [found, keys.len() - found];
        for (counter, pages) in self.looked_up.iter().zip(pages) {
            counter.fetch_add(pages as u64, Ordering::Relaxed);
        }
    }

    /// Notes a lookup for the curve.
    fn note(&self, namespace: NamespaceId, pages: (&[PageKey], usize), lease: Lease) {
        let blocks = (lease.blocks_per_page, self.footprint(lease.blocks_per_page));
        if self.curve.looked_up(namespace, blocks, pages, lease.now_ms) {
            self.call_for_counts();
        }
    }

    /// A put or a touch, for the curve.
    fn used<'a>(
        &self,
        namespace: NamespaceId,
        parent: Option<&'a PageKey>,
        hint: Hint,
    ) -> Option<Used<'a>> {
        let blocks = self.shape(namespace)?.shape.page_blocks();
        Some(Used {
            namespace,
            blocks: self.footprint(blocks),
            parent,
            hint,
            now_ms: self.now_ms(),
        })
    }

    /// Has the housekeeper count the calls that are noted for the curve.
    fn call_for_counts(&self) {
        self.inbox.lock().lookups = true;
        self.inbox_changed.notify_one();
    }

    /// Usable blocks that a page of so many blocks takes.
    fn footprint(&self, page_blocks: u32) -> u32 {
        let blocks = footprint(self.map.segment_blocks(), page_blocks);
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }

    /// See [`Inventory::keep`](crate::inventory::Inventory::keep).
    pub(in crate::store) fn pin_pages(
        &self,
        namespace: NamespaceId,
        keys: &[PageKey],
        until_unix_s: u32,
    ) -> Result<Vec<Kept>, StoreError> {
        if self.shape(namespace).is_none() {
            return Err(StoreError::UnknownNamespace);
        }
        let room = self.room();
        let keep = |request, some| {
            self.with_core_in_turn(|core| core.keep(request, namespace.into(), some, until_unix_s))
        };
        let mut outcomes = Vec::with_capacity(keys.len());
        for some in keys.chunks(PAGES_AT_ONCE) {
            let request = self.new_request();
            let mut these = keep(request, some);
            self.wait_for_record(request, room, |again| these = keep(again, some))
                .map_err(failure)?;
            outcomes.extend(these);
        }
        Ok(outcomes)
    }

    /// Waits for a deletion. Without room for its records it had no effect on some keys: when
    /// reclaim has won room, it is made `again`. `room` was seen before it was made.
    fn wait_for_record(
        &self,
        mut request: RequestId,
        mut room: u64,
        mut again: impl FnMut(RequestId),
    ) -> Result<(), Fault> {
        let until = Instant::now() + RECORD_PATIENCE;
        loop {
            let outcome = self.wait_for_request(request);
            let has_room = outcome != Err(Fault::NoRoom);
            if has_room || planted!(HastyDelete) || !self.wait_for_room(room, until) {
                return outcome;
            }
            room = self.room();
            request = self.new_request();
            again(request);
        }
    }
}
