//! Pages on their way: from the reservation that gives a page its extent to the status that ends it.

use std::collections::hash_map::Entry;

use larder_format::{BLOCK_BYTES, KeyPrefix, PageKey, SegmentState, Serial};

use super::reclaim::Move;
use super::segment::{Segment, State, Stream};
use super::space::Changed;
use super::sync::Waiter;
use super::{Core, Effect, SyncPolicy, Ticket, log};
use crate::api::{PutFailure, PutStatus, Refusal};
use crate::catalog::{Ask, Extent, Grant, ReservationId};
use crate::index::{Adoption, NamespaceSlot, Parent, Place, SegmentId};
use crate::planted;

#[derive(Clone, Copy, Debug)]
pub(super) enum Origin {
    Put,
    /// A copy of this page.
    Copy(Move),
}

/// A page between its reservation and its status.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) reservation: ReservationId,
    pub(super) index: usize,
    pub(super) namespace: NamespaceSlot,
    pub(super) key: PageKey,
    pub(super) parent: Option<KeyPrefix>,
    pub(super) depth: u32,
    pub(super) birth: Serial,
    pub(super) place: Place,
    pub(super) blocks: u32,
    pub(super) checksum: u64,
    pub(super) origin: Origin,
    /// Whether its bytes are on the device.
    pub(super) landed: Option<bool>,
    /// Whether its descriptor is.
    pub(super) written: Option<bool>,
    /// The group its descriptor went with.
    pub(super) commit: Option<Serial>,
    /// Something else in its segment failed first.
    pub(super) spoiled: bool,
    /// Deleted while it was being written.
    pub(super) deleted: bool,
    /// Puts of the same key that share its outcome.
    pub(super) followers: Vec<(ReservationId, usize)>,
    /// Children of it that became visible before it.
    pub(super) orphans: Vec<KeyPrefix>,
}

/// The owner of a reservation, who gets its statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reserver {
    Caller,
    Reclaim,
}

/// One put (or one batch of copies) between reserve and its last status.
#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) reserver: Reserver,
    /// By position in the asks; `None` where nothing was granted.
    pub(super) tickets: Vec<Option<Ticket>>,
    /// Records promised to each segment.
    pub(super) runs: Vec<Run>,
    pub(super) statuses: Vec<Option<PutStatus>>,
    pub(super) left: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) segment: SegmentId,
    pub(super) records: u32,
    pub(super) credits: u32,
}

/// What a new page brings with it.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewPage {
    pub(super) namespace: NamespaceSlot,
    pub(super) key: PageKey,
    pub(super) parent: Option<KeyPrefix>,
    pub(super) depth: u32,
}

impl From<&Move> for NewPage {
    fn from(page: &Move) -> NewPage {
        NewPage {
            namespace: page.namespace,
            key: page.record.key,
            parent: page.record.parent,
            depth: page.record.depth,
        }
    }
}

impl Pending {
    pub(super) fn parent(&self) -> Parent {
        match self.parent {
            Some(key) => Parent::Key(key),
            None if self.depth == 0 => Parent::Head,
            None => Parent::Unknown,
        }
    }
}

impl Core {
    /// Gives pages extents, one grant an ask. Pages that are there already, or on their way, settle by themselves. When one
    /// page is refused, so are all that follow it.
    pub fn reserve(
        &mut self,
        namespace: NamespaceSlot,
        asks: &[Ask],
    ) -> (ReservationId, Vec<Grant>) {
        let id = self.new_reservation(Reserver::Caller, asks.len());
        let mut grants = Vec::with_capacity(asks.len());
        let mut refused = None;
        // Before anything is evicted for the others; and all alike, for a page must not be hotter than its ancestors.
        let keys: Vec<PageKey> = asks.iter().map(|ask| ask.key).collect();
        self.index.touch(namespace, &keys);
        for (index, ask) in asks.iter().enumerate() {
            let grant = match refused {
                Some(why) => Grant::Refused(why),
                None => self.reserve_one(id, index, namespace, ask),
            };
            if let Grant::Refused(why) = grant {
                refused = Some(why);
                self.counters.refused += 1;
                self.set_status(id, index, PutStatus::Refused(why));
            }
            grants.push(grant);
        }
        if refused == Some(Refusal::ReadOnlyService) {
            self.counters.puts_refused_read_only += 1;
        }
        self.pump();
        (id, grants)
    }

    pub(super) fn new_reservation(&mut self, reserver: Reserver, asks: usize) -> ReservationId {
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
            self.end_reservation(id);
        }
        id
    }

    pub(super) fn reserve_one(
        &mut self,
        id: ReservationId,
        index: usize,
        namespace: NamespaceSlot,
        ask: &Ask,
    ) -> Grant {
        let prefix = ask.key.prefix();
        if let Some(&first) = self.in_flight.get(&(namespace, prefix)) {
            self.pending[first].followers.push((id, index));
            return Grant::Settles;
        }
        if let Some(found) = self
            .index
            .locate(namespace, &ask.key)
            .filter(|found| !found.unproven)
        {
            self.adopt_if_missing(namespace, ask);
            self.settle_duplicate(id, index, found.place.segment);
            return Grant::Settles;
        }
        let page = NewPage {
            namespace,
            key: ask.key,
            parent: ask.parent.map(|key| key.prefix()),
            depth: ask.depth,
        };
        match self.grant(id, index, page, Origin::Put) {
            Ok(extent) => Grant::Write(extent),
            Err(why) => Grant::Refused(why),
        }
    }

    /// A put that names a parent fills it in where an earlier one did not. What takes a long look along the chain is left to
    /// lookups: thousands of puts may be asked for at once.
    pub(super) fn adopt_if_missing(&mut self, namespace: NamespaceSlot, ask: &Ask) {
        const STEPS_MAX: usize = 256;
        if let Some(parent) = ask.parent {
            let pair = Adoption {
                namespace,
                child: ask.key.prefix(),
                parent: parent.prefix(),
            };
            let mut steps = STEPS_MAX;
            self.index.adopt_within(&[pair], &mut steps);
        }
    }

    pub(super) fn settle_duplicate(&mut self, id: ReservationId, index: usize, segment: SegmentId) {
        self.counters.duplicates += 1;
        let Segment {
            last_commit: written,
            proven,
            ..
        } = *self.space.segment(segment);
        let is_durable = written <= self.syncs.synced.max(proven) || planted!(EarlyDuplicate);
        if self.config.sync == SyncPolicy::Always && !is_durable {
            self.wait_for_sync(written, Waiter::Page(id, index, PutStatus::Duplicate));
        } else {
            self.set_status(id, index, PutStatus::Duplicate);
        }
    }

    pub(super) fn grant(
        &mut self,
        id: ReservationId,
        index: usize,
        page: NewPage,
        origin: Origin,
    ) -> Result<Extent, Refusal> {
        let blocks = match origin {
            Origin::Put => self.namespaces[page.namespace.0 as usize].page_blocks,
            Origin::Copy(page) => page.record.blocks,
        };
        if self.space.data_blocks() <= u64::from(blocks) {
            return Err(Refusal::TooLarge);
        }
        if matches!(origin, Origin::Put) {
            if !self.space.takes_writes() && !planted!(EvictionInVain) {
                return Err(Refusal::ReadOnlyService);
            }
            let in_flight = (self.space.reserved_blocks + u64::from(blocks)) * BLOCK_BYTES as u64;
            if in_flight > self.config.write_bytes_max && self.space.reserved_blocks > 0 {
                return Err(Refusal::Busy);
            }
            // Nothing makes way for a page that would never be found: not beside all its ancestors. A segment that is stranded now may be
            // back soon.
            let chain = (u64::from(page.depth) + 1).saturating_mul(self.space.footprint(blocks));
            if chain > self.space.usable_blocks_max && !self.space.has_room(blocks) {
                return Err(Refusal::Unreachable);
            }
            let parent = page.parent.map(|parent| (page.namespace, parent));
            if !self.make_room(blocks, parent) {
                return Err(Refusal::NoSpace);
            }
        }
        let (stream, birth, checksum) = match origin {
            Origin::Put => {
                let birth = self.log.next_serial().ok_or(Refusal::Exhausted)?;
                (Stream::Put, birth, 0)
            }
            Origin::Copy(page) => (Stream::Copy, page.record.birth, page.record.checksum),
        };
        let Some(place) = self.place_page(id, stream, blocks) else {
            self.effects.push(Effect::Reclaim);
            return Err(Refusal::NoSpace);
        };
        let NewPage {
            namespace,
            key,
            parent,
            depth,
        } = page;
        let pending = Pending {
            reservation: id,
            index,
            namespace,
            key,
            parent,
            depth,
            birth,
            place,
            blocks,
            checksum,
            origin,
            landed: None,
            written: None,
            commit: None,
            spoiled: false,
            deleted: false,
            followers: Vec::new(),
            orphans: Vec::new(),
        };
        let ticket = self.pending.insert(pending);
        if matches!(origin, Origin::Put) {
            self.in_flight.insert((namespace, key.prefix()), ticket);
            if let Some(parent) = parent {
                *self.awaited.entry((namespace, parent)).or_default() += 1;
            }
        }
        let reservation = self
            .reservations
            .get_mut(&id)
            .expect("the reservation being made");
        reservation.tickets[index] = Some(ticket);
        Ok(self.extent(place))
    }

    pub(super) fn place_page(
        &mut self,
        id: ReservationId,
        stream: Stream,
        blocks: u32,
    ) -> Option<Place> {
        let reservation = self
            .reservations
            .get_mut(&id)
            .expect("the reservation being made");
        let runs = &mut reservation.runs;
        let mut changed = Changed::default();
        let log = &mut self.log;
        let placed = self.space.place_page(
            stream,
            blocks,
            |segment| {
                runs.iter()
                    .any(|run| run.segment == segment && run.records < run.credits * log::RECORDS)
            },
            &mut || log.next_serial(),
            &mut changed,
        );
        if let Some((place, credit)) = placed {
            let credits = u32::from(credit);
            match runs.iter_mut().find(|run| run.segment == place.segment) {
                Some(run) => {
                    run.records += 1;
                    run.credits += credits;
                }
                None => runs.push(Run {
                    segment: place.segment,
                    records: 1,
                    credits,
                }),
            }
        }
        self.after_change(changed);
        placed.map(|(place, _)| place)
    }

    /// Writes the headers of segments that were opened, moves on those that were closed, and asks for reclaim when free
    /// segments run short.
    pub(super) fn after_change(&mut self, changed: Changed) {
        if changed.opened.is_empty() && changed.closed.is_empty() {
            return;
        }
        for id in changed.opened {
            self.space.segment_mut(id).opening = true;
            self.write_header(id, SegmentState::Open);
        }
        for id in changed.closed {
            self.drain(id);
        }
        if self.wants_reclaim() {
            self.effects.push(Effect::Reclaim);
        }
    }

    /// Evicts the coldest pages until one of `blocks` more, that has this parent, fits under the limit.
    pub(super) fn make_room(
        &mut self,
        blocks: u32,
        parent: Option<(NamespaceSlot, KeyPrefix)>,
    ) -> bool {
        while !self.space.has_room(blocks) {
            if !self.evict_one(parent) {
                return false;
            }
        }
        true
    }

    /// A page whose child is being put is no leaf, though the index does not know of that child: without its parent it would never be
    /// found. Neither is `parent`.
    pub(super) fn evict_one(&mut self, parent: Option<(NamespaceSlot, KeyPrefix)>) -> bool {
        if !self.space.may_evict_somewhere() {
            return false;
        }
        let awaited = &self.awaited;
        let stays = |namespace, key| {
            let name = (namespace, key);
            Some(name) == parent || awaited.contains_key(&name)
        };
        let space = &self.space;
        let is_parked = |segment| !space.may_evict(segment);
        let evicted = self
            .index
            .evict_coldest_outside(self.now_ms, stays, is_parked);
        let Some(page) = evicted else {
            return false;
        };
        let blocks = self.namespaces[page.namespace.0 as usize].page_blocks;
        self.space.drop_live(page.place.segment, blocks);
        self.counters.evicted += 1;
        self.frontier = Some(page.heat);
        self.log_eviction(page.namespace, page.key, page.place.segment);
        true
    }

    /// Where in which volume a place lies.
    #[must_use]
    pub fn extent(&self, place: Place) -> Extent {
        let volume = self.space.volume_of(place.segment);
        let offset =
            self.space.offset_of(place.segment) + u64::from(place.start) * BLOCK_BYTES as u64;
        Extent {
            volume,
            offset,
            place,
        }
    }

    pub(super) fn set_status(&mut self, id: ReservationId, index: usize, status: PutStatus) {
        let Some(reservation) = self.reservations.get_mut(&id) else {
            return;
        };
        if reservation.statuses[index].is_none() {
            reservation.statuses[index] = Some(status);
            reservation.left -= 1;
        }
        if reservation.left == 0 {
            self.end_reservation(id);
        }
    }

    /// A reservation ends with its last status. Pages it was granted are all settled then, so its promises are kept or void.
    pub(super) fn end_reservation(&mut self, id: ReservationId) {
        if let Some(reservation) = self.reservations.remove(&id) {
            let statuses: Vec<PutStatus> = reservation.statuses.into_iter().flatten().collect();
            match reservation.reserver {
                Reserver::Caller => self.effects.push(Effect::Settled(id, statuses)),
                Reserver::Reclaim => self.copies_settled(&statuses),
            }
        }
    }

    /// Says which pages of a reservation have been written, by their position in the asks.
    pub fn landed(&mut self, id: ReservationId, pages: &[(usize, bool)]) {
        for &(index, good) in pages {
            let ticket = self
                .reservations
                .get(&id)
                .and_then(|r| r.tickets.get(index).copied().flatten());
            let Some(ticket) = ticket else { continue };
            let Some(page) = self.pending.get_mut(ticket) else {
                continue;
            };
            page.landed = Some(good);
            let segment = page.place.segment;
            self.counters.blocks_written += u64::from(page.blocks);
            self.mark_dirty(segment, good);
            if !good {
                self.write_refused(self.space.volume_of(segment), None);
                self.poison(segment);
            }
            self.settle(ticket);
        }
        self.publish_ready();
        self.pump();
    }

    /// Settles a page once its bytes and its descriptor are both answered for.
    pub(super) fn settle(&mut self, ticket: Ticket) {
        // A failed write may have settled it on the way here, with everything else in its segment.
        let Some(page) = self.pending.get(ticket) else {
            return;
        };
        let landed = page.landed.or(planted!(EarlyPublish).then_some(true));
        let (Some(landed), Some(written)) = (landed, page.written) else {
            return;
        };
        if landed && written && !page.spoiled {
            // Recovery finds a segment by its header, or its first block: neither is sure to be there before the header is.
            if self.space.segment(page.place.segment).opening && !planted!(UnopenedSegment) {
                self.log.unopened.push(ticket);
            } else {
                self.log.ready.push(ticket);
            }
        } else {
            self.settle_failed(ticket);
        }
    }

    pub(super) fn settle_failed(&mut self, ticket: Ticket) {
        let page = &mut self.pending[ticket];
        if page.landed == Some(false)
            && !planted!(UnheldGroup)
            && let Some(commit) = page.commit
        {
            let segment = page.place.segment;
            self.hold(segment, commit);
        }
        let page = self.remove_pending(ticket);
        let status = match page.origin {
            // The page has left its place meanwhile: there is nothing to copy.
            Origin::Copy(from) if !self.is_live(&from) => PutStatus::Duplicate,
            Origin::Copy(_) => PutStatus::Failed(PutFailure::Write),
            Origin::Put => {
                self.counters.failed += 1;
                PutStatus::Failed(PutFailure::Write)
            }
        };
        self.set_status(page.reservation, page.index, status);
        for (id, index) in page.followers {
            self.set_status(id, index, status);
        }
    }

    /// Takes a page off the lists of what is under way.
    pub(super) fn remove_pending(&mut self, ticket: Ticket) -> Pending {
        let page = self
            .pending
            .remove(ticket)
            .expect("a ticket is settled once");
        let name = (page.namespace, page.key.prefix());
        if self.in_flight.get(&name) == Some(&ticket) {
            self.in_flight.remove(&name);
        }
        if matches!(page.origin, Origin::Put)
            && let Some(parent) = page.parent
            && let Entry::Occupied(mut children) = self.awaited.entry((page.namespace, parent))
        {
            *children.get_mut() -= 1;
            if *children.get() == 0 {
                children.remove();
            }
        }
        self.space.drop_reserved(page.blocks);
        let segment = self.space.segment_mut(page.place.segment);
        segment.pending -= 1;
        if let Some(commit) = page.commit {
            self.log.resolve(commit, 1);
        }
        self.drain(page.place.segment);
        self.has_more_room = true;
        page
    }

    /// Something has been written into a segment. What the device refused needs no sync: nobody relies on it.
    pub(super) fn mark_dirty(&mut self, segment: SegmentId, good: bool) {
        let volume = self.space.volume_of(segment);
        if volume == 0 || !planted!(ForgottenVolume) {
            self.space.volumes[volume].dirty |= good;
        }
    }

    /// After a failed write: takes nothing more into the segment, and acknowledges nothing in it that is not visible yet.
    pub(super) fn poison(&mut self, id: SegmentId) {
        if planted!(UnpoisonedSegment) {
            self.respool(id);
            return;
        }
        self.space.turn_from(id);
        let segment = self.space.segment_mut(id);
        let was_poisoned = std::mem::replace(&mut segment.poisoned, true);
        if matches!(segment.state, State::Open(_)) {
            self.space.close(id);
        }
        // No page has been placed there since it was.
        if !was_poisoned {
            let there = |page: &&mut Pending| page.place.segment == id;
            for page in self.pending.values_mut().filter(there) {
                page.spoiled = true;
            }
        }
        self.respool(id);
        self.drain(id);
    }
}
