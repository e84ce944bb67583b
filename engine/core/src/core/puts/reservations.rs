//! Reservations: which pages are admitted, their extents, and their statuses.

use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_format::{BLOCK_BYTES, KeyPrefix, PageKey, Proof};

use super::budget::Offer;
use super::{Below, NewPage, Origin, Pending, Puts};
use crate::core::base::{Base, Event, Ticket};
use crate::core::journal::RECORDS;
use crate::core::segments::segment::Stream;
use crate::core::types::{Effect, SyncPolicy};
use crate::counters::Counted;
use crate::grants::{Ask, Extent, Grant, ReservationId};
use crate::hint::Hint;
use crate::index::{Adoption, Membership, NamespaceSlot, Place, SegmentId};
use crate::planted;
use crate::policy::Candidate;
use crate::status::{PutStatus, Refusal};

/// The owner of a reservation, who gets its statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum Reserver {
    Caller,
    Reclaim,
}

/// One put (or one batch of copies) between reserve and its last status.
#[derive(Debug)]
pub(super) struct Reservation {
    reserver: Reserver,
    /// By position in the asks; `None` where no extent was granted.
    pub(super) tickets: Vec<Option<Ticket>>,
    /// Descriptor blocks reserved in each segment.
    pub(super) runs: Vec<Run>,
    statuses: Vec<Option<PutStatus>>,
    left: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) segment: SegmentId,
    pub(super) records: u32,
    pub(super) blocks: u32,
}

impl Puts {
    /// Gives pages extents, one grant an ask. Pages that are there already, or on their way, settle
    /// by themselves. When one page is refused, so are all that follow it.
    pub(in crate::core) fn reserve(
        &mut self,
        below: &mut Below<'_>,
        namespace: NamespaceSlot,
        asks: &[Ask],
        hint: Hint,
    ) -> (ReservationId, Vec<Grant>) {
        let id = self.new_reservation(below.base, Reserver::Caller, asks.len());
        let mut grants = Vec::with_capacity(asks.len());
        let mut refused = None;
        // Before a page is evicted for another one; and all alike, since a page must not be hotter
        // than its ancestors.
        let keys: Vec<PageKey> = asks.iter().map(|ask| ask.key).collect();
        let (index, now_ms) = (&below.base.index, below.base.now_ms);
        let new_pages = index.touch_as(namespace, &keys, hint, now_ms);
        self.begin_of_budget(below.base);
        for (index, ask) in asks.iter().enumerate() {
            let page = NewPage {
                namespace,
                key: ask.key,
                parent: ask.parent.map(|key| key.prefix()),
                depth: ask.depth,
                saved: ask.saved,
                hint,
                new_pages,
            };
            let grant = match refused {
                Some(why) => Grant::Refused(why),
                None => self.reserve_one(below, id, index, page),
            };
            if let Grant::Refused(why) = grant {
                if why == Refusal::Budget {
                    below.base.counters.store.refused_by_budget += 1;
                    // Its first page was offered.
                    if refused.is_some() {
                        self.pass(below, &page);
                    }
                }
                refused = Some(why);
                below.base.counters.refused += 1;
                self.set_status(below.base, id, index, PutStatus::Refused(why));
            }
            grants.push(grant);
        }
        if let Some(budget) = &mut self.budget {
            budget.end();
        }
        if refused == Some(Refusal::ReadOnlyService) {
            below.base.counters.store.puts_refused_read_only += 1;
        }
        (id, grants)
    }

    pub(in crate::core) fn new_reservation(
        &mut self,
        base: &mut Base,
        reserver: Reserver,
        asks: usize,
    ) -> ReservationId {
        let id = ReservationId(self.next_reservation);
        self.next_reservation += 1;
        let reservation = Reservation {
            reserver,
            tickets: vec![None; asks],
            runs: Vec::new(),
            statuses: vec![None; asks],
            left: asks,
        };
        self.reservations.insert(id, reservation);
        if asks == 0 {
            self.end_reservation(base, id);
        }
        id
    }

    fn reserve_one(
        &mut self,
        below: &mut Below<'_>,
        id: ReservationId,
        index: usize,
        page: NewPage,
    ) -> Grant {
        if let Some(&first) = self.in_flight.get(&page.name()) {
            self.pending[first].followers.push((id, index));
            return Grant::Settles;
        }
        let found = below.base.index.locate(page.namespace, &page.key);
        let is_new = found.is_none() || planted!(StrictAdmission);
        if is_new && !self.is_admitted(below, &page) && !planted!(DeafAdmission) {
            return Grant::Refused(Refusal::NotAdmitted);
        }
        if let Some(found) = found.filter(|found| !found.unproven) {
            adopt_if_missing(below.base, &page);
            self.settle_duplicate(below, id, index, found.place.segment);
            return Grant::Settles;
        }
        if !self.is_affordable(below, &page) {
            return Grant::Refused(Refusal::Budget);
        }
        match self.grant_put(below, id, index, page) {
            Ok(extent) => Grant::Write(extent),
            Err(why) => Grant::Refused(why),
        }
    }

    /// Gives a new page an extent. With quotas it counts for its group from then on.
    fn grant_put(
        &mut self,
        below: &mut Below<'_>,
        id: ReservationId,
        index: usize,
        page: NewPage,
    ) -> Result<Extent, Refusal> {
        let extent = self.grant(below, id, index, page, Origin::Put)?;
        if !below.base.quotas.is_empty() {
            let blocks = blocks_of(below.base, &page);
            below.base.index.coming(page.namespace, blocks);
        }
        Ok(extent)
    }

    /// Whether the policy of admission takes a page that is not stored.
    fn is_admitted(&mut self, below: &Below<'_>, page: &NewPage) -> bool {
        let Some(policy) = &mut self.admission else {
            return true;
        };
        let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        let (taken, usable) = (
            below.segments.taken_blocks(),
            below.segments.usable_blocks().0,
        );
        policy.admits(&Candidate {
            namespace: NamespaceId(page.namespace.0),
            key: page.key,
            depth: page.depth,
            hint: page.hint,
            bytes: bytes(u64::from(blocks_of(below.base, page))),
            taken_bytes: bytes(taken),
            usable_bytes: bytes(usable),
            now: Duration::from_millis(below.base.now_ms),
        })
    }

    /// A put begins: what was written since the last one is charged.
    fn begin_of_budget(&mut self, base: &Base) {
        if let Some(budget) = &mut self.budget {
            let written = base.counters.store.written.total();
            budget.begin(base.now_ms, written, base.index.len());
        }
    }

    /// Whether the budget of writes takes a page that is not stored, or not proven.
    fn is_affordable(&mut self, below: &Below<'_>, page: &NewPage) -> bool {
        let Some(budget) = &mut self.budget else {
            return true;
        };
        let (namespace, _) = page.name();
        let is_there = |parent: KeyPrefix| {
            let is_under_way = self.in_flight.contains_key(&(namespace, parent));
            is_under_way || below.base.index.has(namespace, parent)
        };
        let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        budget.takes(&Offer {
            name: page.name(),
            parent: page.parent.map(|parent| (parent, is_there(parent))),
            bytes: bytes(u64::from(blocks_of(below.base, page))),
            in_flight: bytes(below.segments.in_flight_blocks()),
        })
    }

    /// A page behind the first one that the budget does not take.
    fn pass(&mut self, below: &Below<'_>, page: &NewPage) {
        let (namespace, key) = page.name();
        if let Some(budget) = &mut self.budget
            && !below.base.index.has(namespace, key)
        {
            let bytes = u64::from(blocks_of(below.base, page)) * BLOCK_BYTES as u64;
            budget.passes(page.name(), bytes);
        }
    }

    fn settle_duplicate(
        &mut self,
        below: &mut Below<'_>,
        id: ReservationId,
        index: usize,
        segment: SegmentId,
    ) {
        below.base.counters.duplicates += 1;
        let segment = below.segments.get(segment);
        let written = segment.last_commit();
        let durable = below.base.marks.synced.max(segment.proven());
        let is_durable = written <= durable || planted!(EarlyDuplicate);
        if below.base.config.sync == SyncPolicy::Always && !is_durable {
            let status = PutStatus::Duplicate;
            below.durability.wait_for_page(written, id, index, status);
        } else {
            self.set_status(below.base, id, index, PutStatus::Duplicate);
        }
    }

    /// Gives a page an extent.
    pub(in crate::core) fn grant(
        &mut self,
        below: &mut Below<'_>,
        id: ReservationId,
        index: usize,
        page: NewPage,
        origin: Origin,
    ) -> Result<Extent, Refusal> {
        let blocks = blocks_of(below.base, &page);
        if below.segments.data_blocks() <= u64::from(blocks) {
            return Err(Refusal::TooLarge);
        }
        let (stream, version, proof, born_ms, put_unix_s) = match origin {
            Origin::Put => {
                below.base.ask_for_room();
                self.admit(below, &page, blocks)?;
                let version = below.base.next_serial().ok_or(Refusal::Exhausted)?;
                let now_ms = below.base.unix_ms();
                let now_s = u32::try_from(now_ms / 1000).unwrap_or(u32::MAX);
                (Stream::Put, version, 0.into(), now_ms, now_s)
            }
            Origin::Copy(page) => {
                let born_ms = below.base.index.born_ms(page.from.segment);
                let record = page.record;
                let proof = Proof {
                    checksum: record.checksum,
                    seal: record.seal,
                };
                (
                    Stream::Copy,
                    record.birth,
                    proof,
                    born_ms,
                    record.put_unix_s,
                )
            }
        };
        let reservation = self.reservations.get_mut(&id).expect("it is being made");
        let Some(place) = reservation.place_page(below, stream, blocks, born_ms) else {
            below.base.call_reclaim();
            return Err(Refusal::NoSpace);
        };
        let place = Place {
            saved: page.saved,
            ..place
        };
        let ticket = self.pending.insert(Pending {
            reservation: id,
            index,
            page,
            version,
            place,
            blocks,
            put_unix_s,
            proof,
            origin,
            landed: None,
            described: None,
            commit: None,
            spoiled: false,
            deleted: false,
            followers: Vec::new(),
            orphans: Vec::new(),
        });
        reservation.tickets[index] = Some(ticket);
        if matches!(origin, Origin::Put) {
            self.in_flight.insert(page.name(), ticket);
            if let Some(parent) = page.parent {
                *self.awaited.entry((page.namespace, parent)).or_default() += 1;
            }
        }
        Ok(below.segments.extent(place))
    }

    /// Makes room for a new page under the limits.
    fn admit(&mut self, below: &mut Below<'_>, page: &NewPage, blocks: u32) -> Result<(), Refusal> {
        let segments = &*below.segments;
        if !segments.takes_writes() && !planted!(EvictionInVain) {
            return Err(Refusal::ReadOnlyService);
        }
        let before = segments.in_flight_blocks();
        let in_flight = (before + u64::from(blocks)) * BLOCK_BYTES as u64;
        if in_flight > below.base.config.write_bytes_max && before > 0 {
            return Err(Refusal::Busy);
        }
        // No page is evicted for a chain that cannot fit as a whole: no prefix lookup could reach
        // its end. An unusable segment may be back soon.
        let chain = (u64::from(page.depth) + 1).saturating_mul(segments.footprint(blocks));
        if chain > segments.usable_blocks().1 && !segments.has_room(blocks) {
            return Err(Refusal::Unreachable);
        }
        let parent = page.parent.map(|parent| (page.namespace, parent));
        if !below.base.quotas.is_empty() && !planted!(DeafMaximum) {
            self.keep_maximum(below, page, blocks, parent)?;
        }
        if self.make_room(below, blocks, parent) {
            Ok(())
        } else {
            Err(Refusal::NoSpace)
        }
    }

    /// Evicts pages of a new page's own group until it fits under the maximum of the group. None is
    /// evicted for a chain that cannot fit as a whole.
    fn keep_maximum(
        &mut self,
        below: &mut Below<'_>,
        page: &NewPage,
        blocks: u32,
        parent: Option<(NamespaceSlot, KeyPrefix)>,
    ) -> Result<(), Refusal> {
        loop {
            let (group, max, is_above) = below.base.index.quota_of(page.namespace, blocks);
            let chain = (u64::from(page.depth) + 1).saturating_mul(blocks.into());
            let evicted = match group {
                Membership::Several => false,
                Membership::Of(_) if chain > max => false,
                Membership::Of(group) if is_above => self.evict_own(below, group, blocks, parent),
                Membership::None | Membership::Of(_) => return Ok(()),
            };
            if !evicted {
                below.base.counters.store.refused_quota += 1;
                return Err(Refusal::Quota);
            }
        }
    }

    pub(in crate::core) fn set_status(
        &mut self,
        base: &mut Base,
        id: ReservationId,
        index: usize,
        status: PutStatus,
    ) {
        let Some(reservation) = self.reservations.get_mut(&id) else {
            return;
        };
        if reservation.statuses[index].is_none() {
            reservation.statuses[index] = Some(status);
            reservation.left -= 1;
        }
        if reservation.left == 0 {
            self.end_reservation(base, id);
        }
    }

    /// A reservation ends with its last status. All its granted pages have theirs then, so that its
    /// reserved blocks are used or handed back.
    fn end_reservation(&mut self, base: &mut Base, id: ReservationId) {
        let Some(reservation) = self.reservations.remove(&id) else {
            return;
        };
        let statuses: Vec<PutStatus> = reservation.statuses.into_iter().flatten().collect();
        match reservation.reserver {
            Reserver::Caller => base.emit(Effect::Settled(id, statuses)),
            Reserver::Reclaim => {
                let copied_all = statuses.iter().all(|status| status.is_present());
                base.announce(Event::CopiesSettled(copied_all));
            }
        }
    }

    /// The granted pages of a reservation, with their positions in the asks.
    pub(in crate::core) fn granted(&self, id: ReservationId) -> Vec<(usize, Ticket)> {
        let tickets = self.reservations.get(&id).map(|r| r.tickets.iter());
        let tickets = tickets.into_iter().flatten().enumerate();
        tickets
            .filter_map(|(index, ticket)| Some((index, (*ticket)?)))
            .collect()
    }
}

impl Reservation {
    fn place_page(
        &mut self,
        below: &mut Below<'_>,
        stream: Stream,
        data: u32,
        born_ms: u64,
    ) -> Option<Place> {
        let runs = &self.runs;
        let has_reserved = |segment| {
            let mut runs = runs.iter();
            runs.any(|run| run.segment == segment && run.records < run.blocks * RECORDS)
        };
        let placed = below
            .segments
            .place_page(below.base, stream, data, born_ms, has_reserved);
        let (place, is_reserved) = placed?;
        let blocks = u32::from(is_reserved);
        let mut runs = self.runs.iter_mut();
        match runs.find(|run| run.segment == place.segment) {
            Some(run) => {
                run.records += 1;
                run.blocks += blocks;
            }
            None => self.runs.push(Run {
                segment: place.segment,
                records: 1,
                blocks,
            }),
        }
        Some(place)
    }
}

/// Blocks that a page takes.
fn blocks_of(base: &Base, page: &NewPage) -> u32 {
    let blocks = base.namespaces.page_blocks(page.namespace);
    blocks.saturating_sub(page.saved)
}

/// A put that names a parent fills it in where an earlier put did not. A long search along the
/// chain is left to lookups: a call may bring thousands of puts.
fn adopt_if_missing(base: &Base, page: &NewPage) {
    const STEPS_MAX: usize = 256;
    if let Some(parent) = page.parent {
        let (namespace, child) = page.name();
        let pair = Adoption {
            namespace,
            child,
            parent,
        };
        base.index.adopt_within(&[pair], &mut { STEPS_MAX });
    }
}
