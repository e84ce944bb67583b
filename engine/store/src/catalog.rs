//! The boundary between the handle, which moves page data, and the catalog, which decides where it
//! lies.
//!
//! A put ([`Catalog::put`]) has three steps. [`Putting::reserve`] gives each page an extent. The
//! handle writes the bytes there itself. [`Putting::commit`] and [`Putting::landed`] make the page
//! visible once its bytes and its descriptor are on the device. A get is [`Catalog::pin`], the
//! handle's own read and verification, [`Catalog::unpin`]. The catalog never sees page data, so a
//! catalog in another process can serve handles here. The process that decides has an
//! [`Allocator`].

use std::sync::Arc;

use larder_base::ids::NamespaceId;
use larder_base::runtime::Instant;
use larder_core::grants::{Ask, Extent, Finding, Grant, ReservationId};
use larder_core::hint::Hint;
use larder_core::index::{Place, ReadAs, SegmentId};
use larder_core::status::PutStatus;
use larder_format::{BLOCK_BYTES, Namespace, PageKey, Proof};
use larder_seal::PageName;

use crate::api::Stats;
use crate::encoder::{CodecChoice, Encoder};
use crate::error::StoreError;
use crate::keys::Tenant;

/// A page that may be read: its segment is pinned until [`Catalog::unpin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// The extent to read.
    pub extent: Extent,
    /// What shows that bytes are the page's.
    pub proof: Proof,
    /// Recovered after a crash and not verified since.
    pub unproven: bool,
}

/// A reservation, its granted pages by their index in the request, and whether the write of each
/// succeeded.
pub type Landed = (ReservationId, Vec<(usize, bool)>);

/// Decides where pages lie, and knows the stored pages.
pub trait Catalog: Send + Sync {
    /// See [`PageStore::namespace`](crate::api::PageStore::namespace).
    ///
    /// # Errors
    /// When the namespace cannot be registered.
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, StoreError>;

    /// The shape of a namespace; `None` for an id that this catalog did not return.
    fn shape(&self, namespace: NamespaceId) -> Option<NamespaceShape>;

    /// See [`PageStore::longest_prefix`](crate::api::PageStore::longest_prefix).
    fn longest_prefix(&self, namespace: NamespaceId, keys: &[PageKey]) -> usize;

    /// See [`PageStore::contains`](crate::api::PageStore::contains).
    fn contains(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool>;

    /// See [`PageStore::touch`](crate::api::PageStore::touch).
    fn touch(&self, namespace: NamespaceId, keys: &[PageKey], hint: Hint);

    /// Locates pages to read, and pins their segments.
    fn pin(&self, namespace: NamespaceId, keys: &[PageKey], read_as: ReadAs)
    -> Vec<Option<Pinned>>;

    /// Returns one pin of each extent's segment.
    fn unpin(&self, extents: &[Extent]);

    /// Reports the findings of reads of pinned pages.
    fn verified(&self, namespace: NamespaceId, findings: &[(PageKey, Extent, Finding)]);

    /// Begins a put into a namespace, of pages with this hint.
    fn put(&self, namespace: NamespaceId, hint: Hint) -> Box<dyn Putting + '_>;

    /// See [`PageStore::delete`](crate::api::PageStore::delete).
    ///
    /// # Errors
    /// When the deletion could not be recorded.
    fn delete(&self, namespace: NamespaceId, keys: &[PageKey]) -> Result<u64, StoreError>;

    /// See [`PageStore::clear_namespace`](crate::api::PageStore::clear_namespace).
    ///
    /// # Errors
    /// When the deletion could not be recorded.
    fn clear_namespace(&self, namespace: NamespaceId) -> Result<u64, StoreError>;

    /// See [`PageStore::flush`](crate::api::PageStore::flush).
    ///
    /// # Errors
    /// When a sync failed.
    fn flush(&self) -> Result<(), StoreError>;

    /// The catalog's share of the statistics.
    fn stats(&self) -> Stats;
}

/// A put's side of the catalog. Its pages may be requested in several reservations. Dropping it
/// ends none of them.
pub trait Putting {
    /// Gives pages extents; one grant a page. While the answer is pending, calls `meanwhile` for
    /// one piece of work after another, until it returns false.
    fn reserve(
        &mut self,
        asks: &[Ask],
        meanwhile: &mut dyn FnMut() -> bool,
    ) -> (ReservationId, Vec<Grant>);

    /// Passes the checksums of the granted pages, in the order of the request; `None` aborts a
    /// page. Called exactly once for a reservation, while its writes may still be in flight.
    fn commit(&mut self, reservation: ReservationId, proofs: &[Option<Proof>]);

    /// Reports that all writes of granted pages of some reservations are over. A page aborted
    /// before it was written counts as a success. Sends the queued messages, so a call without
    /// reservations would cost a message.
    fn landed(&mut self, reservations: &[Landed]);

    /// Sends the queued messages to the process that decides, and keeps the put alive: a put
    /// without messages is given up, even while its writes are in flight. Must be called before
    /// each wait for the device.
    fn stay(&mut self);

    /// Waits until every page of these reservations is settled, and ends them. Returns one status
    /// for each page requested. The writes of all pages must be over.
    fn wait(&mut self, reservations: &[ReservationId]) -> Vec<Vec<PutStatus>>;

    /// See [`Allocator::peek`].
    fn peek(&mut self, keys: &[PageKey]) -> Vec<bool>;

    /// See [`Allocator::room`].
    fn room(&self) -> u64;

    /// See [`Allocator::wait_for_room`].
    fn wait_for_room(&mut self, seen: u64, deadline: Instant) -> bool;
}

/// A catalog that decides itself.
pub trait Allocator: Catalog {
    /// For each key whether it is stored. Changes no lease and no heat.
    fn peek(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool>;

    /// Gives pages with this hint extents; one grant a page. Never waits.
    fn reserve(
        &self,
        namespace: NamespaceId,
        hint: Hint,
        asks: &[Ask],
    ) -> (ReservationId, Vec<Grant>);

    /// See [`Putting::commit`].
    fn commit(&self, reservation: ReservationId, proofs: &[Option<Proof>]);

    /// Reports for some reservations the granted pages whose writes are over.
    fn landed(&self, reservations: &[Landed]);

    /// Takes a pin for each of these segments, into which pages are being written. Until
    /// [`Catalog::unpin`] these writes cannot damage other pages, whatever the outcome of the
    /// reservation.
    fn keep(&self, segments: &[SegmentId]);

    /// Waits until every page of the reservation is settled, and ends it. Returns one status for
    /// each page requested.
    fn wait(&self, reservation: ReservationId) -> Vec<PutStatus>;

    /// Counts the moments at which space or write budget became available.
    fn room(&self) -> u64;

    /// Waits until [`Allocator::room`] is no longer `seen`, or for some time after which a retry is
    /// worthwhile all the same, at most until `deadline`. False if the deadline passed first.
    fn wait_for_room(&self, seen: u64, deadline: Instant) -> bool;
}

/// A put with an allocator in this process.
pub struct Direct<'a, A: ?Sized> {
    allocator: &'a A,
    namespace: NamespaceId,
    hint: Hint,
}

impl<'a, A: Allocator + ?Sized> Direct<'a, A> {
    /// Begins a put.
    pub fn new(allocator: &'a A, namespace: NamespaceId, hint: Hint) -> Direct<'a, A> {
        Direct {
            allocator,
            namespace,
            hint,
        }
    }
}

impl<A: Allocator + ?Sized> Putting for Direct<'_, A> {
    fn reserve(
        &mut self,
        asks: &[Ask],
        _: &mut dyn FnMut() -> bool,
    ) -> (ReservationId, Vec<Grant>) {
        self.allocator.reserve(self.namespace, self.hint, asks)
    }

    fn commit(&mut self, reservation: ReservationId, proofs: &[Option<Proof>]) {
        self.allocator.commit(reservation, proofs);
    }

    fn landed(&mut self, reservations: &[Landed]) {
        self.allocator.landed(reservations);
    }

    /// No other process decides.
    fn stay(&mut self) {}

    fn peek(&mut self, keys: &[PageKey]) -> Vec<bool> {
        self.allocator.peek(self.namespace, keys)
    }

    fn wait(&mut self, reservations: &[ReservationId]) -> Vec<Vec<PutStatus>> {
        let one = |reservation: &ReservationId| self.allocator.wait(*reservation);
        reservations.iter().map(one).collect()
    }

    fn room(&self) -> u64 {
        self.allocator.room()
    }

    fn wait_for_room(&mut self, seen: u64, deadline: Instant) -> bool {
        self.allocator.wait_for_room(seen, deadline)
    }
}

/// The facts of a namespace that a handle needs to move its pages.
#[derive(Clone, Debug)]
pub struct NamespaceShape {
    /// Its name in the store, part of every payload checksum.
    pub fingerprint: larder_format::Fingerprint,
    /// Its name beneath the store.
    pub(crate) beneath: larder_format::Fingerprint,
    /// Sizes of the parts.
    pub shape: larder_format::PageShape,
    /// Whether puts encode pages, as the owner of the store has decided.
    pub codec: CodecChoice,
    /// Decides which pages puts encode; `None` for none.
    pub encoder: Option<Arc<Encoder>>,
    /// In an encrypted store.
    pub tenant: Option<Arc<Tenant>>,
}

impl NamespaceShape {
    /// The facts of a namespace, by its name in the store.
    #[must_use]
    pub fn of(namespace: &Namespace, codec: CodecChoice) -> NamespaceShape {
        NamespaceShape {
            fingerprint: namespace.fingerprint(),
            beneath: namespace.plain().fingerprint(),
            shape: *namespace.shape(),
            codec,
            encoder: Encoder::of(codec, namespace),
            tenant: None,
        }
    }

    /// The same, with the tenant in an encrypted store.
    pub(crate) fn for_tenant(self, tenant: Option<Tenant>) -> NamespaceShape {
        let tenant = tenant.map(Arc::new);
        NamespaceShape { tenant, ..self }
    }

    /// The identity of a page with so many stored bytes, for its encryption.
    pub(crate) fn name_of(&self, key: &PageKey, stored: usize) -> PageName {
        PageName {
            namespace: self.fingerprint,
            key: *key,
            blocks: self.shape.page_blocks(),
            stored: u32::try_from(stored / BLOCK_BYTES).unwrap_or(u32::MAX),
        }
    }

    /// Bytes of a plain page on the device.
    pub(crate) fn page_bytes(&self) -> usize {
        self.shape.page_blocks() as usize * BLOCK_BYTES
    }

    /// Bytes of the page at a place.
    pub(crate) fn stored_bytes(&self, place: Place) -> usize {
        let blocks = self.shape.page_blocks().saturating_sub(place.saved);
        blocks as usize * BLOCK_BYTES
    }
}
