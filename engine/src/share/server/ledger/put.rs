//! A put of a client: how far it is, and how it is given up.

use crate::catalog::{Allocator, Grant, ReservationId};
use crate::index::SegmentId;
use crate::planted;

/// Looks at a put of which nothing is heard between them before it is given up.
pub const LOOKS: u32 = 3;

/// A put of a client.
#[derive(Debug)]
pub(super) struct Put {
    /// The core's; `None` when everything was refused here.
    pub(super) reservation: Option<ReservationId>,
    pub(super) asks: usize,
    /// Pages behind those that were refused here.
    pub(super) beyond: usize,
    pub(super) committed: bool,
    /// Somebody waits for its statuses.
    pub(super) awaited: bool,
    /// Granted pages whose writes are not over, and where they go.
    pub(super) unlanded: Unlanded,
    /// To the core these have failed; they are pinned instead.
    pub(super) given_up: bool,
    /// Looks at it since anything was heard of it.
    pub(super) looks: u32,
    pub(super) page_bytes: u64,
    /// Bytes that count against the client's share: of pages that are not written, or not committed.
    pub(super) bytes: u64,
}

/// Granted pages whose writes are not over.
#[derive(Debug, Default)]
pub(super) struct Unlanded {
    /// By position in the asks, where each goes.
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

    /// The write of a page is over: where it went, once.
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

    /// Where they go: a segment for each.
    pub(super) fn segments(&self) -> impl Iterator<Item = SegmentId> {
        self.to.iter().flatten().copied()
    }
}

/// A put to be given up, and what the core is to be told for that.
pub(super) struct GivenUp {
    reservation: ReservationId,
    asks: usize,
    committed: bool,
    unlanded: Vec<usize>,
}

/// What became of a client's puts and reads.
#[derive(Debug)]
pub struct Look {
    /// Those that were given up now.
    pub given_up: Vec<ReservationId>,
    /// Pins that were taken back from a client that is there.
    pub pins_taken_back: u64,
    /// Something is left to look after.
    pub is_due: bool,
}

/// A put whose statuses its client waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// The ledger's number for it.
    pub number: u64,
    /// The core's; `None` when everything was refused here.
    pub reservation: Option<ReservationId>,
    /// Pages that it asked for, without those behind.
    pub asks: usize,
    /// Pages behind those that were refused here.
    pub beyond: usize,
}

impl Put {
    /// The core waits for something that the client has to say.
    pub(super) fn is_under_way(&self) -> bool {
        let is_open = !self.committed || self.unlanded.left() > 0;
        self.reservation.is_some() && is_open && !self.given_up
    }

    /// Pins what it was given to write to, so that the core can be told that nothing of it arrives any more. That is for the caller to
    /// say, who holds the ledger's lock here.
    pub(super) fn give_up<C: Allocator + ?Sized>(&mut self, catalog: &C) -> Option<GivenUp> {
        if !self.is_under_way() {
            return None;
        }
        let unlanded = self.unlanded.asks();
        if planted!(UnkeptExtents) {
            self.unlanded = Unlanded::default();
        }
        // They have pages under way until the core is told: none is given to anybody else before it is pinned.
        let segments: Vec<SegmentId> = self.unlanded.segments().collect();
        catalog.keep(&segments);
        self.given_up = true;
        Some(GivenUp {
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
        given_up: Vec<GivenUp>,
        is_due: bool,
    ) -> Look {
        let reservations = given_up.iter().map(|put| put.reservation).collect();
        given_up.into_iter().for_each(|put| put.tell(catalog));
        Look {
            given_up: reservations,
            pins_taken_back: 0,
            is_due,
        }
    }
}

impl GivenUp {
    /// Has the core take its pages for failed.
    fn tell<C: Allocator + ?Sized>(self, catalog: &C) {
        if !self.committed {
            catalog.commit(self.reservation, &vec![None; self.asks]);
        }
        let over: Vec<(usize, bool)> = self.unlanded.into_iter().map(|at| (at, false)).collect();
        catalog.landed(&[(self.reservation, over)]);
    }
}
