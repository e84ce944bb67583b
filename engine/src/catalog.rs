//! The seam between the handle, which moves page data, and whoever decides where it lies.
//!
//! A put ([`Catalog::put`]) is three steps: [`Putting::reserve`] gives each page an extent, the handle writes the bytes there itself,
//! and [`Putting::commit`] with [`Putting::landed`] makes the page visible once its bytes and its descriptor are on the device.
//! A get is [`Catalog::pin`], the handle's own read and verification, [`Catalog::unpin`]. The catalog never sees page
//! data, so that one in another process can serve handles here. The process that decides has an [`Allocator`].

use std::time::Instant;

use larder_format::{Namespace, PageKey};
use serde::{Deserialize, Serialize};

use crate::api::{NamespaceId, PutStatus, Refusal, Stats};
use crate::error::StoreError;
use crate::index::{Place, SegmentId};

/// Where a page's bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index of the volume.
    pub volume: usize,
    /// Byte offset in the volume.
    pub offset: u64,
    /// Segment and block, as the index knows it.
    pub place: Place,
}

/// Where segments lie: what turns a place into an extent. Fixed while a store is open.
#[derive(Clone, Debug)]
pub struct SegmentMap {
    /// Store-wide number of each volume's first segment.
    bases: Vec<u32>,
    segment_blocks: u32,
}

impl SegmentMap {
    /// From the volumes' segment counts.
    #[must_use]
    pub fn new(volumes: &[u32], segment_blocks: u32) -> SegmentMap {
        let mut next = 0_u32;
        let bases = volumes
            .iter()
            .map(|&count| {
                let base = next;
                next = base.saturating_add(count);
                base
            })
            .collect();
        SegmentMap {
            bases,
            segment_blocks,
        }
    }

    /// Blocks of a segment.
    #[must_use]
    pub fn segment_blocks(&self) -> u32 {
        self.segment_blocks
    }

    /// Where the page at a place lies.
    #[must_use]
    pub fn extent(&self, place: Place) -> Extent {
        let segment = place.segment.0;
        let volume = self
            .bases
            .partition_point(|&base| base <= segment)
            .saturating_sub(1);
        let number = segment - self.bases.get(volume).copied().unwrap_or(segment);
        // Of a place that there is not, as a client may name it, nothing is ever read.
        let blocks = u64::from(number) * u64::from(self.segment_blocks) + u64::from(place.start);
        let bytes = blocks.saturating_mul(larder_format::BLOCK_BYTES as u64);
        Extent {
            volume,
            offset: larder_format::SEGMENTS_OFFSET.saturating_add(bytes),
            place,
        }
    }
}

/// A page that may be read: its segment is pinned until [`Catalog::unpin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// Where to read.
    pub extent: Extent,
    /// What the bytes must add up to.
    pub checksum: u64,
    /// Recovered after a crash and not verified since.
    pub unproven: bool,
}

/// A page that a put would like to store.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// Its key.
    pub key: PageKey,
    /// The key before it.
    pub parent: Option<PageKey>,
    /// Pages before it in its chain.
    pub depth: u32,
}

/// The answer to one [`Ask`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// Write the page here, then commit.
    Write(Extent),
    /// Nothing to write; the status comes with [`Putting::wait`]: a duplicate, or a page that another put is writing.
    Settles,
    /// Not now. Every later page of the ask is refused too.
    Refused(Refusal),
}

/// One put's hold on extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReservationId(pub u64);

/// A reservation, its granted pages by their index in the asks, and whether the write of each went well.
pub type Landed = (ReservationId, Vec<(usize, bool)>);

/// Decides where pages lie, and knows which are there.
pub trait Catalog: Send + Sync {
    /// See [`PageStore::namespace`](crate::PageStore::namespace).
    ///
    /// # Errors
    /// When the namespace cannot be registered.
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, StoreError>;

    /// The namespace behind an id; `None` for an id this catalog did not give.
    fn shape(&self, namespace: NamespaceId) -> Option<NamespaceShape>;

    /// See [`PageStore::longest_prefix`](crate::PageStore::longest_prefix).
    fn longest_prefix(&self, namespace: NamespaceId, keys: &[PageKey]) -> usize;

    /// See [`PageStore::contains`](crate::PageStore::contains).
    fn contains(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool>;

    /// See [`PageStore::touch`](crate::PageStore::touch).
    fn touch(&self, namespace: NamespaceId, keys: &[PageKey]);

    /// Finds pages to read and pins the segments they lie in.
    fn pin(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<Option<Pinned>>;

    /// Gives back one pin of each extent's segment.
    fn unpin(&self, extents: &[Extent]);

    /// Reports what reading pinned pages showed.
    fn verified(&self, namespace: NamespaceId, findings: &[(PageKey, Extent, Finding)]);

    /// Begins a put into a namespace.
    fn put(&self, namespace: NamespaceId) -> Box<dyn Putting + '_>;

    /// See [`PageStore::delete`](crate::PageStore::delete).
    ///
    /// # Errors
    /// When the deletion could not be written down.
    fn delete(&self, namespace: NamespaceId, keys: &[PageKey]) -> Result<u64, StoreError>;

    /// See [`PageStore::clear_namespace`](crate::PageStore::clear_namespace).
    ///
    /// # Errors
    /// When the deletion could not be written down.
    fn clear_namespace(&self, namespace: NamespaceId) -> Result<u64, StoreError>;

    /// See [`PageStore::flush`](crate::PageStore::flush).
    ///
    /// # Errors
    /// When a sync failed.
    fn flush(&self) -> Result<(), StoreError>;

    /// The catalog's share of the statistics.
    fn stats(&self) -> Stats;
}

/// A put's side of the catalog. Its pages may be asked for in several reservations; dropping it ends none of them.
pub trait Putting {
    /// Gives pages extents; one grant a page. An answer that takes its time is waited for with `meanwhile`, piece of work by piece,
    /// for as long as that says that there is more to do.
    fn reserve(
        &mut self,
        asks: &[Ask],
        meanwhile: &mut dyn FnMut() -> bool,
    ) -> (ReservationId, Vec<Grant>);

    /// Hands over the checksums of the pages granted, in the order of the asks; `None` gives a page up. Called exactly once for a reservation,
    /// while its writes may still be in flight.
    fn commit(&mut self, reservation: ReservationId, checksums: &[Option<u64>]);

    /// Says of some reservations that the writes of all granted pages are over. A page that was given up before it was written counts as
    /// one that went well.
    fn landed(&mut self, reservations: &[Landed]);

    /// Has whoever decides know what was said so far, and that the put goes on though nothing lands: it would be given up otherwise. To be
    /// called before each wait for the device.
    fn stay(&mut self);

    /// Waits until every page of these reservations is settled; one status an ask. Ends them. All of their pages have landed.
    fn wait(&mut self, reservations: &[ReservationId]) -> Vec<Vec<PutStatus>>;

    /// See [`Allocator::room`].
    fn room(&self) -> u64;

    /// See [`Allocator::wait_for_room`].
    fn wait_for_room(&mut self, seen: u64, deadline: Instant) -> bool;
}

/// A catalog that decides for itself.
pub trait Allocator: Catalog {
    /// Gives pages extents; one grant a page. Never waits.
    fn reserve(&self, namespace: NamespaceId, asks: &[Ask]) -> (ReservationId, Vec<Grant>);

    /// See [`Putting::commit`].
    fn commit(&self, reservation: ReservationId, checksums: &[Option<u64>]);

    /// Says of some reservations which granted pages' writes are over.
    fn landed(&self, reservations: &[Landed]);

    /// Takes a pin for each of these segments, in which pages are on their way: until [`Catalog::unpin`] what is written there by
    /// whoever was granted it spoils nobody else's pages, whatever the reservation comes to.
    fn keep(&self, segments: &[SegmentId]);

    /// Waits until every page of the reservation is settled; one status an ask. Ends the reservation.
    fn wait(&self, reservation: ReservationId) -> Vec<PutStatus>;

    /// Counts the moments at which space or write budget became available.
    fn room(&self) -> u64;

    /// Waits until [`Allocator::room`] is no longer `seen`, or for a while after which it is worth another try all the same, at most until
    /// `deadline`; false when that passed first.
    fn wait_for_room(&self, seen: u64, deadline: Instant) -> bool;
}

/// A put for which an allocator of this process decides.
pub struct Direct<'a, A: ?Sized> {
    allocator: &'a A,
    namespace: NamespaceId,
}

impl<'a, A: Allocator + ?Sized> Direct<'a, A> {
    /// Begins a put.
    pub fn new(allocator: &'a A, namespace: NamespaceId) -> Direct<'a, A> {
        Direct {
            allocator,
            namespace,
        }
    }
}

impl<A: Allocator + ?Sized> Putting for Direct<'_, A> {
    fn reserve(
        &mut self,
        asks: &[Ask],
        _: &mut dyn FnMut() -> bool,
    ) -> (ReservationId, Vec<Grant>) {
        self.allocator.reserve(self.namespace, asks)
    }

    fn commit(&mut self, reservation: ReservationId, checksums: &[Option<u64>]) {
        self.allocator.commit(reservation, checksums);
    }

    fn landed(&mut self, reservations: &[Landed]) {
        self.allocator.landed(reservations);
    }

    /// This process decides.
    fn stay(&mut self) {}

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

/// What a handle needs to know of a namespace to move its pages.
#[derive(Clone, Debug)]
pub struct NamespaceShape {
    /// Fingerprint, part of every payload checksum.
    pub fingerprint: larder_format::Fingerprint,
    /// Sizes of the parts.
    pub shape: larder_format::PageShape,
}

/// What reading a page showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Finding {
    /// Its bytes match its checksum.
    Good,
    /// They do not.
    Mismatch,
    /// The device would not give them.
    Unreadable,
}
