//! The core as a catalog, for the owner's answers. Only calls that do not wait reach it.

use std::sync::{Mutex, MutexGuard};

use larder_engine::catalog::{
    Allocator, Ask, Catalog, Direct, Extent, Finding, Grant, Landed, NamespaceShape, Pinned,
    Putting, ReservationId, SegmentMap,
};
use larder_engine::format::{Namespace, PageKey};
use larder_engine::index::{Adoption, Lease, NamespaceSlot, SegmentId};
use larder_engine::share::Marks;
use larder_engine::share::wire::ClientId;
use larder_engine::{NamespaceId, PutStatus, Stats, StoreError};
use larder_sim_runtime::time::Instant;

use crate::clients::Put;
use crate::oracle::Name;
use crate::world::{Live, World};

/// See the module.
pub struct Seat<'a>(Mutex<Inner<'a>>);

struct Inner<'a> {
    world: &'a mut World,
    live: &'a mut Live,
    given: Given,
}

/// The results of an answer for its client.
#[derive(Default)]
pub struct Given {
    pub puts: Vec<Put>,
    /// A segment for each page that was pinned.
    pub pinned: Vec<SegmentId>,
    /// Segments of the pages whose findings were accepted from the client.
    pub believed: Vec<SegmentId>,
}

/// A client's marks: on all volumes, or on none.
pub struct Marked(pub bool);

impl Marks for Marked {
    fn are_on_all(&self, _: ClientId) -> bool {
        self.0
    }

    fn are_on_any(&self, _: ClientId) -> bool {
        self.0
    }
}

impl<'a> Seat<'a> {
    pub fn new(world: &'a mut World, live: &'a mut Live) -> Seat<'a> {
        Seat(Mutex::new(Inner {
            world,
            live,
            given: Given::default(),
        }))
    }

    pub fn into_given(self) -> Given {
        self.0.into_inner().unwrap().given
    }

    fn inner(&self) -> MutexGuard<'_, Inner<'a>> {
        self.0.lock().unwrap()
    }
}

/// The locations of segments.
pub fn map_of(world: &World) -> SegmentMap {
    SegmentMap::new(&world.setup.volumes, world.setup.segment_blocks)
}

fn slot(namespace: NamespaceId) -> NamespaceSlot {
    namespace.into()
}

impl Inner<'_> {
    /// The run's number of the namespace.
    fn namespace(&self, namespace: NamespaceId) -> Option<usize> {
        let slots = &self.live.slots;
        let wanted = Some(slot(namespace));
        slots.iter().position(|known| *known == wanted)
    }

    fn lease(&self, namespace: NamespaceId) -> Lease {
        let setup = &self.world.setup;
        let blocks = self.namespace(namespace);
        Lease {
            now_ms: self.world.now_ms,
            duration_ms: setup.lease_ms,
            blocks_per_page: blocks.map_or(1, |at| setup.namespaces[at].shape().page_blocks()),
        }
    }

    fn adopt(&mut self, orphans: &[Adoption]) {
        if !orphans.is_empty() {
            self.world
                .with_core(self.live, |core| core.adopt(orphans, &mut { usize::MAX }));
        }
    }

    fn names(&self, namespace: usize, keys: impl Iterator<Item = PageKey>) -> Vec<Name> {
        keys.map(|key| {
            let found = self.world.oracle.by_key(namespace, key.prefix().as_bytes());
            found.expect("a key without a name")
        })
        .collect()
    }
}

impl Catalog for Seat<'_> {
    fn namespace(&self, _: &Namespace) -> Result<NamespaceId, StoreError> {
        unreachable!("namespaces are named when the store is opened")
    }

    fn shape(&self, namespace: NamespaceId) -> Option<NamespaceShape> {
        let inner = self.inner();
        let namespace = &inner.world.setup.namespaces[inner.namespace(namespace)?];
        Some(NamespaceShape {
            fingerprint: namespace.fingerprint(),
            shape: *namespace.shape(),
        })
    }

    fn longest_prefix(&self, namespace: NamespaceId, keys: &[PageKey]) -> usize {
        let mut inner = self.inner();
        let (mut orphans, lease) = (Vec::new(), inner.lease(namespace));
        let index = inner.live.index.clone();
        let found = index.longest_prefix(slot(namespace), keys, lease, &mut orphans);
        inner.adopt(&orphans);
        found
    }

    fn contains(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool> {
        let mut inner = self.inner();
        let (mut orphans, lease) = (Vec::new(), inner.lease(namespace));
        let index = inner.live.index.clone();
        let found = index.contains(slot(namespace), keys, lease, &mut orphans);
        inner.adopt(&orphans);
        found
    }

    fn touch(&self, namespace: NamespaceId, keys: &[PageKey]) {
        self.inner().live.index.touch(slot(namespace), keys);
    }

    fn pin(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<Option<Pinned>> {
        let mut inner = self.inner();
        let map = map_of(inner.world);
        let found = inner.live.index.pin(slot(namespace), keys);
        let segments = found.iter().flatten().map(|page| page.place.segment);
        inner.given.pinned.extend(segments);
        found
            .into_iter()
            .map(|page| {
                page.map(|page| Pinned {
                    extent: map.extent(page.place),
                    checksum: page.checksum,
                    unproven: page.unproven,
                })
            })
            .collect()
    }

    fn unpin(&self, extents: &[Extent]) {
        let mut inner = self.inner();
        let Inner { world, live, .. } = &mut *inner;
        for extent in extents {
            let segment = extent.place.segment;
            if live.index.unpin(segment) {
                world.with_core(live, |core| core.unpinned(segment));
            }
        }
    }

    fn verified(&self, namespace: NamespaceId, findings: &[(PageKey, Extent, Finding)]) {
        let mut inner = self.inner();
        let Inner { world, live, given } = &mut *inner;
        let segments = findings.iter().map(|(_, extent, _)| extent.place.segment);
        given.believed.extend(segments);
        world.with_core(live, |core| {
            for (key, extent, finding) in findings {
                core.found(slot(namespace), key, extent.place, *finding);
            }
        });
    }

    fn put(&self, namespace: NamespaceId) -> Box<dyn Putting + '_> {
        Box::new(Direct::new(self, namespace))
    }

    fn delete(&self, _: NamespaceId, _: &[PageKey]) -> Result<u64, StoreError> {
        unreachable!("an answer never waits")
    }

    fn clear_namespace(&self, _: NamespaceId) -> Result<u64, StoreError> {
        unreachable!("an answer never waits")
    }

    fn flush(&self) -> Result<(), StoreError> {
        unreachable!("an answer never waits")
    }

    fn stats(&self) -> Stats {
        unreachable!("an answer never waits")
    }
}

impl Allocator for Seat<'_> {
    fn reserve(&self, namespace: NamespaceId, asks: &[Ask]) -> (ReservationId, Vec<Grant>) {
        let mut inner = self.inner();
        let at = inner.namespace(namespace).expect("its shape was requested");
        let names = inner.names(at, asks.iter().map(|ask| ask.key));
        let Inner { world, live, given } = &mut *inner;
        let put = world.reserve(live, at, names, asks);
        let granted = (put.reservation, put.grants.clone());
        world.note(put.reservation.0, || format!("for a client: {put:?}"));
        given.puts.push(put);
        granted
    }

    fn commit(&self, reservation: ReservationId, checksums: &[Option<u64>]) {
        let mut inner = self.inner();
        let Inner { world, live, .. } = &mut *inner;
        world.note(reservation.0, || format!("{reservation:?} is committed"));
        world.with_core(live, |core| core.commit(reservation, checksums));
    }

    fn landed(&self, reservations: &[Landed]) {
        let mut inner = self.inner();
        let Inner { world, live, .. } = &mut *inner;
        for (reservation, pages) in reservations {
            world.note(reservation.0, || {
                format!("{reservation:?} landed {pages:?}")
            });
            live.failures += pages.iter().filter(|(_, good)| !good).count() as u64;
        }
        world.with_core(live, |core| {
            for (reservation, pages) in reservations {
                core.landed(*reservation, pages);
            }
        });
    }

    fn keep(&self, segments: &[SegmentId]) {
        self.inner().live.index.keep(segments);
    }

    fn room(&self) -> u64 {
        self.inner().live.room
    }

    fn wait(&self, _: ReservationId) -> Vec<PutStatus> {
        unreachable!("an answer never waits")
    }

    fn wait_for_room(&self, _: u64, _: Instant) -> bool {
        unreachable!("an answer never waits")
    }
}
