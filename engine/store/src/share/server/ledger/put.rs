//! A put of a client: its progress, and how it is aborted.

use larder_base::planted;
use larder_core::grants::{Grant, ReservationId};
use larder_core::index::SegmentId;

use crate::catalog::Allocator;

/// Checks without a message about a put, after which the put is aborted.
pub const LOOKS: u32 = 3;

/// A put of a client.
#[derive(Debug)]
pub(super) struct Put {
    /// The core's number; `None` when all pages were refused here.
    pub(super) reservation: Option<ReservationId>,
    pub(super) asks: usize,
    /// Pages at the end of the ask, refused here.
    pub(super) beyond: usize,
    pub(super) committed: bool,
    /// A request waits for its statuses.
    pub(super) awaited: bool,
    /// Granted pages with writes in flight, and their segments.
    pub(super) unlanded: Unlanded,
    /// The put was aborted: for the core its pages have failed, and their segments are pinned
    /// instead.
    pub(super) aborted: bool,
    /// Checks since the last message about it.
    pub(super) looks: u32,
    pub(super) page_bytes: u64,
    /// Bytes that count against the client's share: of pages that are not yet written, or not yet
    /// committed.
    pub(super) bytes: u64,
}

/// Granted pages with writes in flight.
#[derive(Debug, Default)]
pub(super) struct Unlanded {
    /// By position in the asks: the segment of each page.
    to: Vec<Option<SegmentId>>,
    left: usize,
}

impl Unlanded {
    pub(super) fn of(grants: &[Grant]) -> Unlanded {
        let to = grants.iter().map(|grant| match grant {
            Grant::Write(extent) => Some(extent.place.segment),
            Grant::Settles | Grant::Refused(_) => None,
        });
        let to: Vec<_> = to.collect();
        let left = to.iter().flatten().count();
        Unlanded { to, left }
    }

    /// The write of a page is over. Returns its segment, once.
    pub(super) fn land(&mut self, ask: usize) -> Option<SegmentId> {
        let segment = self.to.get_mut(ask)?.take()?;
        self.left -= 1;
        Some(segment)
    }

    pub(super) fn left(&self) -> usize {
        self.left
    }

    fn asks(&self) -> Vec<usize> {
        let by_ask = self.to.iter().enumerate();
        by_ask.filter_map(|(ask, to)| to.map(|_| ask)).collect()
    }

    /// The segments of these pages, one entry per page.
    pub(super) fn segments(&self) -> impl Iterator<Item = SegmentId> {
        self.to.iter().flatten().copied()
    }
}

/// A put that is being aborted, and the facts that the core needs for it.
pub(super) struct AbortedPut {
    reservation: ReservationId,
    asks: usize,
    committed: bool,
    unlanded: Vec<usize>,
}

/// The result of a check of a client's puts and reads.
#[derive(Debug)]
pub struct Look {
    /// Puts aborted by this check.
    pub given_up: Vec<ReservationId>,
    /// Their pages that will not be stored.
    pub pages_given_up: u64,
    /// Pins revoked from a connected client.
    pub pins_taken_back: u64,
    /// Another check is needed.
    pub is_due: bool,
}

/// A put with a client that waits for its statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// The ledger's number for it.
    pub number: u64,
    /// The core's number; `None` when all pages were refused here.
    pub reservation: Option<ReservationId>,
    /// Pages passed to the core.
    pub asks: usize,
    /// Pages at the end of the ask, refused here.
    pub beyond: usize,
}

impl Put {
    /// The core waits for a message of the client.
    pub(super) fn is_under_way(&self) -> bool {
        let is_open = !self.committed || self.unlanded.left() > 0;
        self.reservation.is_some() && is_open && !self.aborted
    }

    /// Pins the put's extents, so that the core can be notified that no more writes count. The
    /// caller notifies the core, after it has released the ledger's lock.
    pub(super) fn abort<C: Allocator + ?Sized>(&mut self, catalog: &C) -> Option<AbortedPut> {
        if !self.is_under_way() {
            return None;
        }
        let unlanded = self.unlanded.asks();
        if planted!(UnkeptExtents) {
            self.unlanded = Unlanded::default();
        }
        // These segments have pages in flight until the core is notified, so none is reused before
        // it is pinned here.
        let segments: Vec<SegmentId> = self.unlanded.segments().collect();
        catalog.keep(&segments);
        self.aborted = true;
        Some(AbortedPut {
            reservation: self.reservation?,
            asks: self.asks,
            committed: std::mem::replace(&mut self.committed, true),
            unlanded,
        })
    }
}

impl Look {
    pub(super) fn after<C: Allocator + ?Sized>(
        catalog: &C,
        aborted: Vec<AbortedPut>,
        is_due: bool,
    ) -> Look {
        let reservations = aborted.iter().map(|put| put.reservation).collect();
        let pages = aborted.iter().map(AbortedPut::pages);
        let pages_given_up = pages.sum::<usize>() as u64;
        aborted.into_iter().for_each(|put| put.report(catalog));
        Look {
            given_up: reservations,
            pages_given_up,
            pins_taken_back: 0,
            is_due,
        }
    }
}

impl AbortedPut {
    /// Pages that will not be stored.
    fn pages(&self) -> usize {
        match self.committed {
            true => self.unlanded.len(),
            false => self.asks,
        }
    }

    /// Reports the put's pages to the core as failed.
    fn report<C: Allocator + ?Sized>(self, catalog: &C) {
        if !self.committed {
            catalog.commit(self.reservation, &vec![None; self.asks]);
        }
        let over: Vec<(usize, bool)> = self.unlanded.into_iter().map(|at| (at, false)).collect();
        catalog.landed(&[(self.reservation, over)]);
    }
}
