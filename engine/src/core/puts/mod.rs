//! Puts: pages on their way, from the reservation that gives a page its extent to its status.
//!
//! | module | decides |
//! |---|---|
//! | `publish` | when a page becomes visible |
//! | `forget` | evictions, deletions, and pages that turn out damaged |

mod forget;
mod publish;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use larder_format::{BLOCK_BYTES, KeyPrefix, PageKey, PageRecord, Serial};
use rapidhash::quality::RandomState;
use slotmap::SlotMap;

use super::base::{Base, Event, Ticket};
use super::durability::Durability;
use super::journal::{Journal, RECORDS};
use super::segments::Segments;
use super::segments::segment::{FirstHeader, Stream};
use super::types::{Effect, Move};
use crate::api::{NamespaceId, PutFailure, PutStatus, Refusal, SyncPolicy};
use crate::catalog::{Ask, Extent, Grant, ReservationId};
use crate::hint::Hint;
use crate::index::{Adoption, NamespaceSlot, Parent, Place, SegmentId};
use crate::planted;
use crate::policy::{AdmissionPolicy, Candidate, Worth};

/// The rooms below.
pub(super) struct Below<'a> {
    pub base: &'a mut Base,
    pub segments: &'a mut Segments,
    pub journal: &'a mut Journal,
    pub durability: &'a mut Durability,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Origin {
    Put,
    /// A copy of this page.
    Copy(Move),
}

/// The owner of a reservation, who gets its statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reserver {
    Caller,
    Reclaim,
}

/// A page between its reservation and its status.
#[derive(Debug)]
struct Pending {
    reservation: ReservationId,
    index: usize,
    page: NewPage,
    version: Serial,
    place: Place,
    blocks: u32,
    checksum: u64,
    origin: Origin,
    /// Whether its bytes are on the device.
    landed: Option<bool>,
    /// Whether its descriptor is on the device.
    described: Option<bool>,
    /// The commit of its descriptor.
    commit: Option<Serial>,
    /// Another write into its segment failed first.
    spoiled: bool,
    /// Deleted while it was being written.
    deleted: bool,
    /// Puts of the same key that share its outcome.
    followers: Vec<(ReservationId, usize)>,
    /// Its children that became visible before it.
    orphans: Vec<KeyPrefix>,
}

/// One put (or one batch of copies) between reserve and its last status.
#[derive(Debug)]
struct Reservation {
    reserver: Reserver,
    /// By position in the asks; `None` where no extent was granted.
    tickets: Vec<Option<Ticket>>,
    /// Descriptor blocks reserved in each segment.
    runs: Vec<Run>,
    statuses: Vec<Option<PutStatus>>,
    left: usize,
}

#[derive(Clone, Copy, Debug)]
struct Run {
    segment: SegmentId,
    records: u32,
    blocks: u32,
}

/// The name of a page, and its place in its chain.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewPage {
    pub namespace: NamespaceSlot,
    pub key: PageKey,
    pub parent: Option<KeyPrefix>,
    pub depth: u32,
    pub hint: Hint,
}

impl From<&Move> for NewPage {
    fn from(page: &Move) -> NewPage {
        NewPage {
            namespace: page.namespace,
            key: page.record.key,
            parent: page.record.parent,
            depth: page.record.depth,
            // The index keeps it.
            hint: Hint::default(),
        }
    }
}

impl NewPage {
    fn name(&self) -> (NamespaceSlot, KeyPrefix) {
        (self.namespace, self.key.prefix())
    }

    fn parent(&self) -> Parent {
        match self.parent {
            Some(key) => Parent::Key(key),
            None if self.depth == 0 => Parent::Head,
            None => Parent::Unknown,
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Puts {
    pending: SlotMap<Ticket, Pending>,
    /// Puts under way: a second put of a key shares the first one's outcome. A put that a deletion
    /// overtook is not listed: its page will not be there for a later put.
    in_flight: HashMap<(NamespaceSlot, KeyPrefix), Ticket, RandomState>,
    /// Pages under way, counted by their parent.
    awaited: HashMap<(NamespaceSlot, KeyPrefix), u32, RandomState>,
    reservations: BTreeMap<ReservationId, Reservation>,
    next_reservation: u64,
    /// Pages whose bytes and descriptor are on the device, to be published together.
    ready: Vec<Ticket>,
    /// Such pages in segments whose first header is still being written.
    unopened: Vec<Ticket>,
    /// Worth of the page evicted last: the cold end of the cache.
    frontier: Option<Worth>,
    /// Decides which new pages are stored; without one, all are.
    admission: Option<Box<dyn AdmissionPolicy>>,
}

impl Puts {
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.reservations.is_empty()
    }

    pub(super) fn frontier(&self) -> Option<Worth> {
        self.frontier
    }

    /// Admits pages by this policy from now on.
    pub(super) fn admit_by(&mut self, policy: Box<dyn AdmissionPolicy>) {
        self.admission = Some(policy);
    }

    // ---- reservations

    /// Gives pages extents, one grant an ask. Pages that are there already, or on their way, settle
    /// by themselves. When one page is refused, so are all that follow it.
    pub(super) fn reserve(
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
        below
            .base
            .index
            .touch_as(namespace, &keys, hint, below.base.now_ms);
        for (index, ask) in asks.iter().enumerate() {
            let page = NewPage {
                namespace,
                key: ask.key,
                parent: ask.parent.map(|key| key.prefix()),
                depth: ask.depth,
                hint,
            };
            let grant = match refused {
                Some(why) => Grant::Refused(why),
                None => self.reserve_one(below, id, index, page),
            };
            if let Grant::Refused(why) = grant {
                refused = Some(why);
                below.base.counters.refused += 1;
                self.set_status(below.base, id, index, PutStatus::Refused(why));
            }
            grants.push(grant);
        }
        if refused == Some(Refusal::ReadOnlyService) {
            below.base.counters.puts_refused_read_only += 1;
        }
        (id, grants)
    }

    pub(super) fn new_reservation(
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
        if let Some(found) = found.filter(|found| !found.unproven) {
            adopt_if_missing(below.base, &page);
            self.settle_duplicate(below, id, index, found.place.segment);
            return Grant::Settles;
        }
        if found.is_none() && !self.is_admitted(below, &page) {
            return Grant::Refused(Refusal::NotAdmitted);
        }
        match self.grant(below, id, index, page, Origin::Put) {
            Ok(extent) => Grant::Write(extent),
            Err(why) => Grant::Refused(why),
        }
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
            bytes: bytes(u64::from(below.base.namespaces.page_blocks(page.namespace))),
            taken_bytes: bytes(taken),
            usable_bytes: bytes(usable),
            now: Duration::from_millis(below.base.now_ms),
        })
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
        let written = segment.last_commit;
        let durable = below.base.marks.synced.max(segment.proven);
        let is_durable = written <= durable || planted!(EarlyDuplicate);
        if below.base.config.sync == SyncPolicy::Always && !is_durable {
            let status = PutStatus::Duplicate;
            below.durability.wait_for_page(written, id, index, status);
        } else {
            self.set_status(below.base, id, index, PutStatus::Duplicate);
        }
    }

    /// Gives a page an extent.
    pub(super) fn grant(
        &mut self,
        below: &mut Below<'_>,
        id: ReservationId,
        index: usize,
        page: NewPage,
        origin: Origin,
    ) -> Result<Extent, Refusal> {
        let blocks = match origin {
            Origin::Put => below.base.namespaces.page_blocks(page.namespace),
            Origin::Copy(page) => page.record.blocks,
        };
        if below.segments.data_blocks() <= u64::from(blocks) {
            return Err(Refusal::TooLarge);
        }
        let (stream, version, checksum) = match origin {
            Origin::Put => {
                self.admit(below, &page, blocks)?;
                let version = below.base.next_serial().ok_or(Refusal::Exhausted)?;
                (Stream::Put, version, 0)
            }
            Origin::Copy(page) => (Stream::Copy, page.record.birth, page.record.checksum),
        };
        let reservation = self.reservations.get_mut(&id).expect("it is being made");
        let Some(place) = reservation.place_page(below, stream, blocks) else {
            below.base.call_reclaim();
            return Err(Refusal::NoSpace);
        };
        let ticket = self.pending.insert(Pending {
            reservation: id,
            index,
            page,
            version,
            place,
            blocks,
            checksum,
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
        if self.make_room(below, blocks, parent) {
            Ok(())
        } else {
            Err(Refusal::NoSpace)
        }
    }

    pub(super) fn set_status(
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
    pub(super) fn granted(&self, id: ReservationId) -> Vec<(usize, Ticket)> {
        let tickets = self.reservations.get(&id).map(|r| r.tickets.iter());
        let tickets = tickets.into_iter().flatten().enumerate();
        tickets
            .filter_map(|(index, ticket)| Some((index, (*ticket)?)))
            .collect()
    }

    // ---- pages under way

    /// Takes the checksums of a reservation's pages, by their position in the asks; `None` gives a
    /// page up.
    pub(super) fn commit(
        &mut self,
        below: &mut Below<'_>,
        id: ReservationId,
        checksums: &[Option<u64>],
    ) {
        let Some(reservation) = self.reservations.get_mut(&id) else {
            return;
        };
        for run in std::mem::take(&mut reservation.runs) {
            let Run {
                segment,
                records,
                blocks,
            } = run;
            below.journal.add_reserved(segment, blocks, records);
        }
        let mut given_up = Vec::new();
        for (index, ticket) in self.granted(id) {
            let Some(page) = self.pending.get_mut(ticket) else {
                continue;
            };
            match checksums.get(index).copied().flatten() {
                Some(checksum) if !page.spoiled => {
                    page.checksum = checksum;
                    let record = page.record(below.base);
                    below.journal.queue_page(page.place.segment, ticket, record);
                }
                _ => {
                    page.described = Some(false);
                    given_up.push(ticket);
                }
            }
        }
        for ticket in given_up {
            self.settle(below, ticket);
        }
    }

    /// States which pages of a reservation have been written, by their position in the asks.
    pub(super) fn landed(
        &mut self,
        below: &mut Below<'_>,
        id: ReservationId,
        pages: &[(usize, bool)],
    ) {
        for &(index, good) in pages {
            let reservation = self.reservations.get(&id);
            let ticket = reservation.and_then(|r| r.tickets.get(index).copied().flatten());
            let Some(page) = ticket.and_then(|ticket| self.pending.get_mut(ticket)) else {
                continue;
            };
            page.landed = Some(good);
            let segment = page.place.segment;
            let counters = &mut below.base.counters;
            let written = match page.origin {
                Origin::Copy(_) => &mut counters.copy_blocks_written,
                Origin::Put => &mut counters.page_blocks_written,
            };
            *written += u64::from(page.blocks);
            below.segments.mark_dirty(segment, good);
            if !good {
                below.segments.write_refused(below.base, segment, None);
                let is_first = below.segments.poison(segment);
                self.poisoned(below, segment, is_first);
            }
            if let Some(ticket) = ticket {
                self.settle(below, ticket);
            }
        }
    }

    /// Gives up a granted page of which nothing was written.
    pub(super) fn not_written(&mut self, ticket: Ticket) {
        if let Some(page) = self.pending.get_mut(ticket) {
            page.landed = Some(true);
        }
    }

    /// The checksum of a granted page, and its origin.
    pub(super) fn granted_page(&self, ticket: Ticket) -> Option<(u64, Origin)> {
        let page = self.pending.get(ticket)?;
        Some((page.checksum, page.origin))
    }

    /// The descriptors of these pages are part of this commit.
    pub(super) fn grouped(&mut self, tickets: &[Ticket], commit: Serial) {
        for ticket in tickets {
            if let Some(page) = self.pending.get_mut(*ticket) {
                page.commit = Some(commit);
            }
        }
    }

    /// The descriptors of these pages have been written, or could not be.
    pub(super) fn described(&mut self, below: &mut Below<'_>, tickets: &[Ticket], good: bool) {
        for &ticket in tickets {
            if let Some(page) = self.pending.get_mut(ticket) {
                page.described = Some(good);
                self.settle(below, ticket);
            }
        }
    }

    /// The first header of a segment is written, or its write failed.
    pub(super) fn opened(&mut self, below: &mut Below<'_>, id: SegmentId) {
        for ticket in std::mem::take(&mut self.unopened) {
            if self.pending[ticket].place.segment == id {
                self.settle(below, ticket);
            } else {
                self.unopened.push(ticket);
            }
        }
    }

    /// A write into a segment failed: its pages that are not visible yet fail.
    pub(super) fn poisoned(&mut self, below: &mut Below<'_>, id: SegmentId, is_first: bool) {
        // No page has been placed there since the first failure.
        if is_first {
            let there = |page: &&mut Pending| page.place.segment == id;
            for page in self.pending.values_mut().filter(there) {
                page.spoiled = true;
            }
        }
        below.journal.respool(below.base, below.segments, id);
        below.base.announce(Event::Drain(id));
    }

    /// Settles a page once its bytes and its descriptor are both answered for.
    fn settle(&mut self, below: &mut Below<'_>, ticket: Ticket) {
        // A failed write may have settled it on the way here, with all others in its segment.
        let Some(page) = self.pending.get(ticket) else {
            return;
        };
        let landed = page.landed.or(planted!(EarlyPublish).then_some(true));
        let (Some(landed), Some(described)) = (landed, page.described) else {
            return;
        };
        if !landed || !described || page.spoiled {
            self.settle_failed(below, ticket);
            return;
        }
        // Recovery finds a segment by its first header, or by its first block: neither is certain
        // to be there before the header is.
        let segment = below.segments.get(page.place.segment);
        let is_opening = segment.first_header == FirstHeader::InFlight;
        if is_opening && !planted!(UnopenedSegment) {
            self.unopened.push(ticket);
        } else {
            self.ready.push(ticket);
        }
    }

    fn settle_failed(&mut self, below: &mut Below<'_>, ticket: Ticket) {
        let page = &self.pending[ticket];
        if page.landed == Some(false)
            && !planted!(UnheldGroup)
            && let Some(commit) = page.commit
        {
            let segment = page.place.segment;
            below.durability.hold(below.segments, segment, commit);
        }
        let page = self.remove_pending(below, ticket);
        let status = match page.origin {
            // The page has left its place meanwhile: there is nothing to copy.
            Origin::Copy(from) if !is_live(below.base, &from) => PutStatus::Duplicate,
            Origin::Copy(_) => PutStatus::Failed(PutFailure::Write),
            Origin::Put => {
                below.base.counters.failed += 1;
                PutStatus::Failed(PutFailure::Write)
            }
        };
        self.set_status(below.base, page.reservation, page.index, status);
        for (id, index) in page.followers {
            self.set_status(below.base, id, index, status);
        }
    }

    /// Takes a page off the lists of pages under way.
    fn remove_pending(&mut self, below: &mut Below<'_>, ticket: Ticket) -> Pending {
        let page = self
            .pending
            .remove(ticket)
            .expect("a ticket is settled once");
        let name = page.page.name();
        if self.in_flight.get(&name) == Some(&ticket) {
            self.in_flight.remove(&name);
        }
        if matches!(page.origin, Origin::Put)
            && let Some(parent) = page.page.parent
            && let Entry::Occupied(mut children) = self.awaited.entry((name.0, parent))
        {
            *children.get_mut() -= 1;
            if *children.get() == 0 {
                children.remove();
            }
        }
        let segment = page.place.segment;
        below.segments.drop_in_flight(segment, page.blocks);
        if let Some(commit) = page.commit {
            below.journal.resolve(commit);
        }
        below.base.announce(Event::Drain(segment));
        below.base.has_room();
        page
    }

    /// # Errors
    /// The first invariant found broken.
    pub(super) fn check(&self) -> Result<(), String> {
        let put =
            |page: &&Pending| matches!(page.origin, Origin::Put) && page.page.parent.is_some();
        let put = self.pending.values().filter(put).count();
        let awaited: u32 = self.awaited.values().sum();
        if put != awaited as usize {
            return Err(format!(
                "{put} pages with parents under way, {awaited} awaited"
            ));
        }
        Ok(())
    }
}

impl Pending {
    fn record(&self, base: &Base) -> PageRecord {
        PageRecord {
            namespace: base.namespaces.get(self.page.namespace).fingerprint,
            key: self.page.key,
            parent: self.page.parent,
            depth: self.page.depth,
            birth: self.version,
            start: self.place.start,
            blocks: self.blocks,
            checksum: self.checksum,
        }
    }
}

impl Reservation {
    fn place_page(&mut self, below: &mut Below<'_>, stream: Stream, data: u32) -> Option<Place> {
        let runs = &self.runs;
        let has_reserved = |segment| {
            let mut runs = runs.iter();
            runs.any(|run| run.segment == segment && run.records < run.blocks * RECORDS)
        };
        let placed = below
            .segments
            .place_page(below.base, stream, data, has_reserved);
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

/// Whether a page lies where it is to be moved from.
pub(super) fn is_live(base: &Base, page: &Move) -> bool {
    let prefix = page.record.key.prefix();
    let found = base
        .index
        .live(page.namespace, prefix, page.from, base.now_ms);
    found.is_some()
}
