//! The core in memory as a catalog, for all calls that do not wait.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use larder_core::grants::{Ask, Extent, Finding, Grant, ReservationId, SegmentMap};
use larder_core::index::{Lease, NamespaceSlot, ReadAs, SegmentId};
use larder_engine::format::{Namespace, PageKey, Proof};
use larder_engine::{Hint, NamespaceId, PutStatus, Stats, StoreError};
use larder_store::catalog::{Allocator, Catalog, Direct, Landed, NamespaceShape, Pinned, Putting};
use larder_store::encoder::CodecChoice;

use crate::machine::Machine;

/// See the module.
pub(crate) struct CoreCatalog(Mutex<Inner>);

pub(crate) struct Inner {
    pub(crate) machine: Machine,
    map: SegmentMap,
    shapes: Vec<Option<NamespaceShape>>,
}

impl CoreCatalog {
    pub(crate) fn new(machine: Machine, map: SegmentMap) -> CoreCatalog {
        CoreCatalog(Mutex::new(Inner {
            machine,
            map,
            shapes: Vec::new(),
        }))
    }

    pub(crate) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Catalog for CoreCatalog {
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, StoreError> {
        let mut inner = self.inner();
        let machine = &mut inner.machine;
        let named = machine.namespace(namespace);
        let opened = named.and_then(|_| machine.with_core(|core| core.open_namespace(namespace)));
        let id = opened.ok_or(StoreError::TooManyNamespaces(0))?;
        let at = usize::from(NamespaceSlot::from(id).0);
        if inner.shapes.len() <= at {
            inner.shapes.resize(at + 1, None);
        }
        inner.shapes[at] = Some(NamespaceShape::of(namespace, CodecChoice::Off));
        Ok(id)
    }

    fn shape(&self, namespace: NamespaceId) -> Option<NamespaceShape> {
        let at = usize::from(NamespaceSlot::from(namespace).0);
        self.inner().shapes.get(at).cloned().flatten()
    }

    fn longest_prefix(&self, namespace: NamespaceId, keys: &[PageKey]) -> usize {
        let (mut inner, mut orphans) = (self.inner(), Vec::new());
        let index = inner.machine.index.clone();
        let found = index.longest_prefix(namespace.into(), keys, lease(), &mut orphans);
        inner
            .machine
            .with_core(|core| core.adopt(&orphans, &mut { usize::MAX }));
        found
    }

    fn contains(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool> {
        let (mut inner, mut orphans) = (self.inner(), Vec::new());
        let index = inner.machine.index.clone();
        let found = index.contains(namespace.into(), keys, lease(), &mut orphans);
        inner
            .machine
            .with_core(|core| core.adopt(&orphans, &mut { usize::MAX }));
        found
    }

    fn touch(&self, namespace: NamespaceId, keys: &[PageKey], _: Hint) {
        self.inner().machine.index.touch(namespace.into(), keys);
    }

    fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[PageKey],
        read_as: ReadAs,
    ) -> Vec<Option<Pinned>> {
        let inner = self.inner();
        let found = inner.machine.index.pin(namespace.into(), keys, read_as);
        let pinned = found.into_iter().map(|page| {
            page.map(|page| Pinned {
                extent: inner.map.extent(page.place),
                proof: page.proof,
                unproven: page.unproven,
            })
        });
        pinned.collect()
    }

    fn unpin(&self, extents: &[Extent]) {
        let machine = &mut self.inner().machine;
        for extent in extents {
            let segment = extent.place.segment;
            if machine.index.unpin(segment) {
                machine.with_core(|core| core.unpinned(segment));
            }
        }
    }

    fn verified(&self, namespace: NamespaceId, findings: &[(PageKey, Extent, Finding)]) {
        self.inner().machine.with_core(|core| {
            for (key, extent, finding) in findings {
                core.found(namespace.into(), key, extent.place, *finding);
            }
        });
    }

    fn put(&self, namespace: NamespaceId, hint: Hint) -> Box<dyn Putting + '_> {
        Box::new(Direct::new(self, namespace, hint))
    }

    /// At once: the disk in memory has no delays.
    fn delete(&self, namespace: NamespaceId, keys: &[PageKey]) -> Result<u64, StoreError> {
        if self.shape(namespace).is_none() {
            return Err(StoreError::UnknownNamespace);
        }
        let done = self.inner().machine.delete(namespace.into(), keys);
        done.then_some(0).ok_or(StoreError::NoRoom)
    }

    fn clear_namespace(&self, namespace: NamespaceId) -> Result<u64, StoreError> {
        if self.shape(namespace).is_none() {
            return Err(StoreError::UnknownNamespace);
        }
        let done = self.inner().machine.clear(namespace.into());
        done.then_some(0).ok_or(StoreError::NoRoom)
    }

    fn flush(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}

impl Allocator for CoreCatalog {
    fn peek(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool> {
        self.inner().machine.index.peek(namespace.into(), keys)
    }

    fn reserve(
        &self,
        namespace: NamespaceId,
        hint: Hint,
        asks: &[Ask],
    ) -> (ReservationId, Vec<Grant>) {
        let machine = &mut self.inner().machine;
        machine.with_core(|core| core.reserve(namespace.into(), asks, hint))
    }

    fn commit(&self, reservation: ReservationId, proofs: &[Option<Proof>]) {
        let machine = &mut self.inner().machine;
        machine.with_core(|core| core.commit(reservation, proofs));
    }

    fn landed(&self, reservations: &[Landed]) {
        let machine = &mut self.inner().machine;
        machine.with_core(|core| {
            for (reservation, pages) in reservations {
                core.landed(*reservation, pages);
            }
        });
    }

    fn keep(&self, segments: &[SegmentId]) {
        self.inner().machine.index.keep(segments);
    }

    fn room(&self) -> u64 {
        0
    }

    fn wait(&self, _: ReservationId) -> Vec<PutStatus> {
        unreachable!("an answer never waits")
    }

    fn wait_for_room(&self, _: u64, _: Instant) -> bool {
        unreachable!("an answer never waits")
    }
}

fn lease() -> Lease {
    Lease {
        now_ms: 0,
        duration_ms: 1,
        blocks_per_page: 1,
    }
}
