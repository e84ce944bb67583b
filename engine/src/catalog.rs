//! The seam between the handle, which moves page data, and whoever decides where it lies.
//!
//! A put is three steps: [`Catalog::reserve`] gives each page an extent, the handle writes the bytes there itself, and
//! [`Catalog::commit`] with [`Catalog::landed`] makes the page visible once its bytes and its descriptor are on the device.
//! A get is [`Catalog::pin`], the handle's own read and verification, [`Catalog::unpin`]. The catalog never sees page
//! data, so that one in another process can serve handles here.

use std::time::Instant;

use larder_format::{Namespace, PageKey};
use serde::{Deserialize, Serialize};

use crate::api::{NamespaceId, PutStatus, Refusal, Stats};
use crate::error::StoreError;
use crate::index::Place;

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

    /// Where the page at a place lies.
    #[must_use]
    pub fn extent(&self, place: Place) -> Extent {
        let segment = place.segment.0;
        let volume = self
            .bases
            .partition_point(|&base| base <= segment)
            .saturating_sub(1);
        let number = segment - self.bases.get(volume).copied().unwrap_or(segment);
        let blocks = u64::from(number) * u64::from(self.segment_blocks) + u64::from(place.start);
        Extent {
            volume,
            offset: larder_format::SEGMENTS_OFFSET + blocks * larder_format::BLOCK_BYTES as u64,
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
    /// Nothing to write; the status comes with [`Catalog::wait`]: a duplicate, or a page that another put is writing.
    Settles,
    /// Not now. Every later page of the call is refused too.
    Refused(Refusal),
}

/// One put's hold on extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReservationId(pub u64);

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

    /// Gives pages extents; one grant a page. Never waits.
    fn reserve(&self, namespace: NamespaceId, asks: &[Ask]) -> (ReservationId, Vec<Grant>);

    /// Hands over the checksums of the pages granted, in the order of the asks; `None` gives a page up. Called exactly once for a reservation,
    /// while its writes may still be in flight.
    fn commit(&self, reservation: ReservationId, checksums: &[Option<u64>]);

    /// Says of which granted pages, by their index in the asks, the write is over, and whether it went well. A page that was given
    /// up before it was written counts as well.
    fn landed(&self, reservation: ReservationId, pages: &[(usize, bool)]);

    /// Waits until every page of the reservation is settled; one status an ask. Ends the reservation.
    fn wait(&self, reservation: ReservationId) -> Vec<PutStatus>;

    /// [`Catalog::wait`] for each of them.
    fn wait_all(&self, reservations: &[ReservationId]) -> Vec<Vec<PutStatus>> {
        let one = |reservation: &ReservationId| self.wait(*reservation);
        reservations.iter().map(one).collect()
    }

    /// Counts the moments at which space or write budget became available.
    fn room(&self) -> u64;

    /// Waits until [`Catalog::room`] is no longer `seen`, at most until `deadline`; false when that passed first.
    fn wait_for_room(&self, seen: u64, deadline: Instant) -> bool;

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
