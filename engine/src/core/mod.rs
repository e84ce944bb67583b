//! The deciding half of the engine: a state machine without I/O, clock or randomness.
//!
//! Commands and completions go in ([`Core::reserve`], [`Core::commit`], [`Core::landed`], [`Core::io_done`], ...); what is to be
//! done comes out as [`Effect`]s: I/O requests, and answers to callers. Time comes in as [`Core::tick`]. Given the same inputs in the
//! same order the outputs are the same, bit for bit. The runtime feeds a core from rings, a simulator can feed it from
//! a fault model.
//!
//! | module | decides |
//! |---|---|
//! | `space` | which segment a page goes to; the life of a segment |
//! | `log` | when descriptors are written, when a page becomes visible |
//! | `sync` | when volumes are synced, what a sync proved, what a failed one spoiled |
//! | `records` | deletions and namespaces |
//! | `reclaim` | which segment is emptied, which of its pages survive |
//!
//! The rules that the promises rest on:
//!
//! - a page becomes visible only when its bytes *and* its descriptor are on the device (`settle`);
//! - after a failed write nothing in its segment that was not yet visible is acknowledged;
//! - `synced` never passes a commit whose bytes a failed sync may have lost;
//! - a segment is given back only after everything carried out of it is synced, and no reader is in it.

mod log;
mod reclaim;
mod records;
mod space;
mod sync;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use larder_format::{
    BLOCK_BYTES, Fingerprint, KeyPrefix, Namespace, PageKey, SegmentHeader, SegmentNo,
    SegmentState, Serial, StoreId,
};
use slotmap::{SlotMap, new_key_type};

use crate::api::{PutFailure, PutStatus, Refusal, SyncPolicy};
use crate::catalog::{Ask, Extent, Grant, ReservationId};
use crate::index::{Adoption, Heat, Index, NamespaceSlot, Parent, Place, SegmentId};
use crate::memory::AlignedBuf;
pub(crate) use log::BLOCKS_IN_FLIGHT_MAX;
use log::Log;
pub use reclaim::{Move, Victim};
pub use records::NAMESPACES_MAX;
use space::{Changed, Segment, Space, State, Stream};
pub use space::{segments_min, usable_blocks};
use sync::{Syncs, Waiter};

new_key_type! {
    /// A page that has been given an extent and is not settled yet.
    struct Ticket;
}

/// Names an I/O request of the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IoId(pub u64);

/// Names a caller's request other than a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// An I/O request of the core: metadata only, page data is moved by handles.
#[derive(Debug)]
pub enum Io {
    /// Write these blocks.
    Write {
        /// Byte offset in the volume.
        offset: u64,
        /// What to write.
        bytes: AlignedBuf,
    },
    /// Make durable what has been written and answered.
    Sync,
}

/// What is to be done, in no binding order.
#[derive(Debug)]
pub enum Effect {
    /// Carry out an I/O request and answer it with [`Core::io_done`].
    Io {
        /// To answer it by.
        id: IoId,
        /// Index of the volume.
        volume: usize,
        /// What to do.
        io: Io,
    },
    /// Every page of a reservation has its status.
    Settled(ReservationId, Vec<PutStatus>),
    /// A request is finished.
    Finished(RequestId, Result<(), Fault>),
    /// Space or write budget has become available.
    Room,
    /// [`Core::next_victim`] may have work.
    Reclaim,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A write failed.
    Write,
    /// A sync failed.
    Sync,
    /// No segment had room.
    NoRoom,
}

/// What a core needs to know that does not change while the store is open.
#[derive(Clone, Debug)]
pub struct Config {
    /// The store's identity, part of everything written.
    pub store: StoreId,
    /// Blocks a segment.
    pub segment_blocks: u32,
    /// When puts are durable.
    pub sync: SyncPolicy,
    /// Most bytes of puts in flight.
    pub write_bytes_max: u64,
    /// Nothing is written, not even what a new namespace would need.
    pub read_only: bool,
}

/// A segment as recovery found it.
#[derive(Clone, Copy, Debug)]
pub struct SegmentInit {
    /// What it holds.
    pub state: InitState,
    /// The life on disk; zero when it was never written.
    pub sequence: Serial,
    /// First unused data block.
    pub data_end: u32,
    /// Descriptor blocks.
    pub blocks: u32,
    /// Highest commit number in it.
    pub last_commit: Serial,
    /// Commits up to here are known to be whole on the device.
    pub proven: Serial,
}

/// What recovery found a segment to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitState {
    /// Holds nothing.
    Free,
    /// Open when the store was cleanly closed: may be written on.
    Open,
    /// Holds pages and takes no more.
    Sealed,
    /// Some of its descriptors could not be read: what could be is served, and nothing in it is touched.
    Unreadable,
    /// On a lost volume.
    Lost,
}

/// A namespace as recovery found it.
#[derive(Clone, Debug)]
pub struct NamespaceInit {
    /// Its fingerprint.
    pub fingerprint: Fingerprint,
    /// Its full record, if one was found, and the segment that holds it.
    pub record: Option<(Namespace, SegmentId)>,
    /// Blocks of each of its pages; zero while none is known.
    pub page_blocks: u32,
}

/// What recovery found.
#[derive(Debug)]
pub struct Recovered {
    /// Segment count of each volume.
    pub volumes: Vec<u32>,
    /// Every segment, in the order of the volumes.
    pub segments: Vec<SegmentInit>,
    /// Every namespace; its position is its slot.
    pub namespaces: Vec<NamespaceInit>,
    /// First serial of this run.
    pub first: Serial,
    /// Whether the store was cleanly closed.
    pub clean: bool,
}

#[derive(Debug)]
struct NamespaceState {
    fingerprint: Fingerprint,
    record: Option<Namespace>,
    /// Segment that holds the full record.
    home: Option<SegmentId>,
    page_blocks: u32,
    /// Births below this one were cleared.
    cleared: Serial,
}

#[derive(Clone, Copy, Debug)]
enum Origin {
    Put,
    /// A copy of the page at this place.
    Copy(Place),
}

/// A page between its reservation and its status.
#[derive(Debug)]
struct Pending {
    reservation: ReservationId,
    index: usize,
    namespace: NamespaceSlot,
    key: PageKey,
    parent: Option<KeyPrefix>,
    depth: u32,
    birth: Serial,
    place: Place,
    blocks: u32,
    checksum: u64,
    origin: Origin,
    /// Whether its bytes are on the device.
    landed: Option<bool>,
    /// Whether its descriptor is.
    written: Option<bool>,
    /// The group its descriptor went with.
    commit: Option<Serial>,
    /// Something else in its segment failed first.
    spoiled: bool,
    /// Deleted while it was being written.
    deleted: bool,
    /// Puts of the same key that share its outcome.
    followers: Vec<(ReservationId, usize)>,
}

/// One put (or one batch of copies) between reserve and its last status.
#[derive(Debug)]
struct Reservation {
    /// By position in the asks; `None` where nothing was granted.
    tickets: Vec<Option<Ticket>>,
    /// Records promised to each segment.
    runs: Vec<Run>,
    statuses: Vec<Option<PutStatus>>,
    left: usize,
}

#[derive(Clone, Copy, Debug)]
struct Run {
    segment: SegmentId,
    records: u32,
    credits: u32,
}

/// Counters since the store was opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Pages stored by puts.
    pub pages_put: u64,
    /// Pages already stored.
    pub duplicates: u64,
    /// Pages refused.
    pub refused: u64,
    /// Pages whose write or sync failed.
    pub failed: u64,
    /// Pages evicted.
    pub evicted: u64,
    /// Pages deleted, those that a deletion overtook on their way among them.
    pub deleted: u64,
    /// Unproven pages that a put wrote again.
    pub replaced: u64,
    /// Pages forgotten as damaged.
    pub damaged: u64,
    /// Pages forgotten as unfinished.
    pub unfinished: u64,
    /// Pages moved by reclaim.
    pub moved: u64,
    /// Segments reclaimed.
    pub reclaimed: u64,
    /// Blocks of page data stored by puts.
    pub blocks_put: u64,
    /// Blocks written in all.
    pub blocks_written: u64,
    /// Syncs that succeeded.
    pub syncs: u64,
    /// Syncs that failed.
    pub failed_syncs: u64,
}

/// Space as it is now, for statistics.
#[derive(Clone, Copy, Debug, Default)]
pub struct SpaceView {
    /// Blocks of indexed pages.
    pub live_blocks: u64,
    /// Most of them.
    pub usable_blocks: u64,
    /// Segments of all volumes.
    pub segments: u64,
    /// Those that are free.
    pub free_segments: u64,
    /// Those whose descriptors could not all be read: left alone until the next open.
    pub unreadable_segments: u64,
}

/// The deciding state machine. See the module's documentation.
#[derive(Debug)]
pub struct Core {
    config: Config,
    index: Arc<Index>,
    space: Space,
    log: Log,
    syncs: Syncs,
    namespaces: Vec<NamespaceState>,
    slots: HashMap<Fingerprint, NamespaceSlot>,
    pending: SlotMap<Ticket, Pending>,
    /// Puts under way, so that a second put of a key shares the first one's outcome. One that a deletion overtook is not
    /// among them: it will not be there for a later put.
    in_flight: HashMap<(NamespaceSlot, KeyPrefix), Ticket>,
    reservations: BTreeMap<ReservationId, Reservation>,
    next_reservation: u64,
    effects: Vec<Effect>,
    counters: Counters,
    /// When a victim that could not be emptied is tried again, should nothing change before.
    retry_reclaim_ms: Option<u64>,
    /// Heat of the page evicted last: where the cache ends.
    frontier: Option<Heat>,
    now_ms: u64,
}

impl Core {
    /// A core over what recovery found. The index must hold exactly the recovered pages.
    #[must_use]
    pub fn new(config: Config, recovered: Recovered, index: Arc<Index>) -> Core {
        let mut open = vec![0_usize; recovered.volumes.len()];
        let mut volume = 0;
        let mut end = recovered.volumes.first().copied().unwrap_or(0) as usize;
        let mut segments = Vec::with_capacity(recovered.segments.len());
        for (at, init) in recovered.segments.iter().enumerate() {
            while at >= end && volume + 1 < recovered.volumes.len() {
                volume += 1;
                end += recovered.volumes[volume] as usize;
            }
            let state = match init.state {
                InitState::Free => State::Free,
                InitState::Lost => State::Lost,
                InitState::Unreadable => State::Unreadable,
                InitState::Open if open[volume] < 2 => {
                    open[volume] += 1;
                    State::Open(if open[volume] == 1 {
                        Stream::Put
                    } else {
                        Stream::Copy
                    })
                }
                InitState::Open | InitState::Sealed => State::Sealed,
            };
            let mut segment = Segment::free(init.sequence);
            segment.state = state;
            if !matches!(state, State::Free | State::Lost) {
                segment.data_end = init.data_end;
                segment.blocks = init.blocks;
                segment.last_commit = init.last_commit;
                segment.proven = init.proven;
            }
            segment.listed = matches!(init.state, InitState::Sealed | InitState::Free);
            segments.push(segment);
        }
        let mut space = Space::new(config.segment_blocks, &recovered.volumes, segments);
        for index in 0..space.volumes.len() {
            // After a crash the device may hold in its cache what earlier runs acknowledged: the first sync covers it.
            space.volumes[index].dirty = !recovered.clean && !space.is_lost(index);
        }
        let mut core = Core {
            log: Log::new(recovered.first),
            syncs: Syncs::new(recovered.first, recovered.clean),
            space,
            namespaces: Vec::new(),
            slots: HashMap::new(),
            pending: SlotMap::with_key(),
            in_flight: HashMap::new(),
            reservations: BTreeMap::new(),
            next_reservation: 0,
            effects: Vec::new(),
            counters: Counters::default(),
            retry_reclaim_ms: None,
            frontier: None,
            now_ms: 0,
            config,
            index,
        };
        for init in recovered.namespaces {
            let (record, home) = init
                .record
                .map_or((None, None), |(record, home)| (Some(record), Some(home)));
            core.add_namespace(init.fingerprint, record, home, init.page_blocks);
        }
        core.count_live();
        core
    }

    fn count_live(&mut self) {
        let space = &mut self.space;
        let namespaces = &self.namespaces;
        self.index.each(|page| {
            let blocks = namespaces[page.namespace.0 as usize].page_blocks;
            space.add_live(page.place.segment, blocks);
        });
    }

    /// Tells the time, in milliseconds since any fixed moment. A step back is ignored.
    pub fn tick(&mut self, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
        self.sync_when_due();
        if self.retry_reclaim_ms.is_some_and(|at| at <= self.now_ms) {
            self.retry_reclaim_ms = None;
            self.space.welcome_all();
            self.effects.push(Effect::Reclaim);
        }
    }

    /// When [`Core::tick`] wants to be called at the latest; `None` while nothing waits for time to pass.
    #[must_use]
    pub fn wakes_at(&self) -> Option<u64> {
        let retry = self.retry_reclaim_ms;
        self.sync_due()
            .map_or(retry, |due| Some(retry.map_or(due, |at| at.min(due))))
    }

    /// What is to be done because of everything since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Counters so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Space now.
    #[must_use]
    pub fn space_view(&self) -> SpaceView {
        SpaceView {
            live_blocks: self.space.live_blocks,
            usable_blocks: self.space.usable_blocks,
            segments: self
                .space
                .iter()
                .filter(|(_, segment)| segment.state != State::Lost)
                .count() as u64,
            free_segments: self.space.free_segments() as u64,
            unreadable_segments: self
                .space
                .iter()
                .filter(|(_, s)| s.state == State::Unreadable)
                .count() as u64,
        }
    }

    /// Gives pages extents, one grant an ask. Pages that are there already, or on their way, settle by themselves. When one
    /// page is refused, so are all that follow it.
    pub fn reserve(
        &mut self,
        namespace: NamespaceSlot,
        asks: &[Ask],
    ) -> (ReservationId, Vec<Grant>) {
        let id = self.new_reservation(asks.len());
        let mut grants = Vec::with_capacity(asks.len());
        let mut refused = None;
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
        self.pump();
        (id, grants)
    }

    fn new_reservation(&mut self, asks: usize) -> ReservationId {
        let id = ReservationId(self.next_reservation);
        self.next_reservation += 1;
        let reservation = Reservation {
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

    fn reserve_one(
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
            self.index.touch(namespace, &[ask.key]);
            self.adopt_if_missing(namespace, ask);
            self.settle_duplicate(id, index, found.place.segment);
            return Grant::Settles;
        }
        let blocks = self.namespaces[namespace.0 as usize].page_blocks;
        let page = NewPage {
            namespace,
            key: ask.key,
            parent: ask.parent.map(|key| key.prefix()),
            depth: ask.depth,
        };
        match self.grant(id, index, page, blocks, Origin::Put, None) {
            Ok(extent) => Grant::Write(extent),
            Err(why) => Grant::Refused(why),
        }
    }

    /// A put that names a parent fills it in where an earlier one did not.
    fn adopt_if_missing(&mut self, namespace: NamespaceSlot, ask: &Ask) {
        if let Some(parent) = ask.parent {
            self.index.adopt(&[Adoption {
                namespace,
                child: ask.key.prefix(),
                parent: parent.prefix(),
            }]);
        }
    }

    fn settle_duplicate(&mut self, id: ReservationId, index: usize, segment: SegmentId) {
        self.counters.duplicates += 1;
        let Segment {
            last_commit: written,
            proven,
            ..
        } = *self.space.segment(segment);
        if self.config.sync == SyncPolicy::Always && written > self.syncs.synced.max(proven) {
            self.wait_for_sync(written, Waiter::Page(id, index, PutStatus::Duplicate));
        } else {
            self.set_status(id, index, PutStatus::Duplicate);
        }
    }

    fn grant(
        &mut self,
        id: ReservationId,
        index: usize,
        page: NewPage,
        blocks: u32,
        origin: Origin,
        birth: Option<Serial>,
    ) -> Result<Extent, Refusal> {
        if self.space.data_blocks() <= u64::from(blocks) {
            return Err(Refusal::TooLarge);
        }
        if matches!(origin, Origin::Put) {
            let in_flight = (self.space.reserved_blocks + u64::from(blocks)) * BLOCK_BYTES as u64;
            if in_flight > self.config.write_bytes_max && self.space.reserved_blocks > 0 {
                return Err(Refusal::Busy);
            }
            if !self.make_room(u64::from(blocks)) {
                return Err(Refusal::NoSpace);
            }
        }
        let birth = match birth {
            Some(birth) => birth,
            None => self.log.next_serial().ok_or(Refusal::Exhausted)?,
        };
        let stream = if matches!(origin, Origin::Put) {
            Stream::Put
        } else {
            Stream::Copy
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
            checksum: 0,
            origin,
            landed: None,
            written: None,
            commit: None,
            spoiled: false,
            deleted: false,
            followers: Vec::new(),
        };
        let ticket = self.pending.insert(pending);
        if matches!(origin, Origin::Put) {
            self.in_flight.insert((namespace, key.prefix()), ticket);
        }
        let reservation = self
            .reservations
            .get_mut(&id)
            .expect("the reservation being made");
        reservation.tickets[index] = Some(ticket);
        Ok(self.extent(place))
    }

    fn place_page(&mut self, id: ReservationId, stream: Stream, blocks: u32) -> Option<Place> {
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
    fn after_change(&mut self, changed: Changed) {
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

    /// Evicts the coldest pages until `blocks` more fit under the limit.
    fn make_room(&mut self, blocks: u64) -> bool {
        while self.space.live_blocks + self.space.reserved_blocks + blocks
            > self.space.usable_blocks
        {
            if !self.evict_one() {
                return false;
            }
        }
        true
    }

    fn evict_one(&mut self) -> bool {
        let Some(page) = self.index.evict_coldest(self.now_ms) else {
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

    fn set_status(&mut self, id: ReservationId, index: usize, status: PutStatus) {
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
    fn end_reservation(&mut self, id: ReservationId) {
        if let Some(reservation) = self.reservations.remove(&id) {
            let statuses = reservation.statuses.into_iter().flatten().collect();
            self.effects.push(Effect::Settled(id, statuses));
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
            self.mark_dirty(segment);
            if !good {
                self.poison(segment);
            }
            self.settle(ticket);
        }
        self.publish_ready();
        self.pump();
    }

    /// Settles a page once its bytes and its descriptor are both answered for.
    fn settle(&mut self, ticket: Ticket) {
        // A failed write may have settled it on the way here, with everything else in its segment.
        let Some(page) = self.pending.get(ticket) else {
            return;
        };
        let (Some(landed), Some(written)) = (page.landed, page.written) else {
            return;
        };
        if landed && written && !page.spoiled {
            // Recovery finds a segment by its header, or its first block: neither is sure to be there before the header is.
            if self.space.segment(page.place.segment).opening {
                self.log.unopened.push(ticket);
            } else {
                self.log.ready.push(ticket);
            }
        } else {
            self.settle_failed(ticket);
        }
    }

    fn settle_failed(&mut self, ticket: Ticket) {
        let page = &mut self.pending[ticket];
        if page.landed == Some(false)
            && let Some(commit) = page.commit.take()
        {
            let segment = page.place.segment;
            self.hold(segment, commit);
        }
        let page = self.remove_pending(ticket);
        let status = PutStatus::Failed(PutFailure::Write);
        if matches!(page.origin, Origin::Put) {
            self.counters.failed += 1;
        }
        self.set_status(page.reservation, page.index, status);
        for (id, index) in page.followers {
            self.set_status(id, index, status);
        }
    }

    /// Takes a page off the lists of what is under way.
    fn remove_pending(&mut self, ticket: Ticket) -> Pending {
        let page = self
            .pending
            .remove(ticket)
            .expect("a ticket is settled once");
        let name = (page.namespace, page.key.prefix());
        if self.in_flight.get(&name) == Some(&ticket) {
            self.in_flight.remove(&name);
        }
        self.space.reserved_blocks -= u64::from(page.blocks);
        let segment = self.space.segment_mut(page.place.segment);
        segment.pending -= 1;
        if let Some(commit) = page.commit {
            self.log.resolve(commit, 1);
        }
        self.drain(page.place.segment);
        self.effects.push(Effect::Room);
        page
    }

    fn mark_dirty(&mut self, segment: SegmentId) {
        let volume = self.space.volume_of(segment);
        self.space.volumes[volume].dirty = true;
    }

    /// After a failed write: takes nothing more into the segment, and acknowledges nothing in it that is not visible yet.
    fn poison(&mut self, id: SegmentId) {
        let segment = self.space.segment_mut(id);
        segment.poisoned = true;
        if matches!(segment.state, State::Open(_)) {
            self.space.close(id);
        }
        let spoiled: Vec<Ticket> = self
            .pending
            .iter()
            .filter(|(_, page)| page.place.segment == id)
            .map(|(ticket, _)| ticket)
            .collect();
        for ticket in spoiled {
            self.pending[ticket].spoiled = true;
        }
        self.respool(id);
        self.drain(id);
    }

    fn write_header(&mut self, id: SegmentId, state: SegmentState) {
        let segment = self.space.segment(id);
        let header = self.header(id, state);
        // Opening and sealing write both copies; one suffices to mark a segment free, and leaves the other to a reader
        // that looks at this moment.
        let copies = if state == SegmentState::Free { 1 } else { 2 };
        let Some(bytes) = encode_headers(&header, copies) else {
            // Without memory for two blocks: a header is a hint, the descriptor blocks tell the same.
            self.header_done(id, state, false);
            return;
        };
        debug_assert!(segment.sequence > Serial::ZERO, "a header names a life");
        let offset = self.space.offset_of(id);
        let volume = self.space.volume_of(id);
        self.counters.blocks_written += copies as u64;
        let io = self.log.io(log::IoContext::Header(id, state));
        self.effects.push(Effect::Io {
            id: io,
            volume,
            io: Io::Write { offset, bytes },
        });
    }

    fn header(&self, id: SegmentId, state: SegmentState) -> SegmentHeader {
        let segment = self.space.segment(id);
        SegmentHeader {
            store: self.config.store,
            volume: u16::try_from(self.space.volume_of(id)).unwrap_or(u16::MAX),
            segment: SegmentNo(self.space.number_of(id)),
            sequence: segment.sequence,
            state,
            blocks: segment.blocks,
            data_end: segment.data_end,
            proven: segment.proven,
            synced: self.syncs.synced,
        }
    }

    fn header_done(&mut self, id: SegmentId, state: SegmentState, good: bool) {
        self.syncs.trouble |= !good;
        match state {
            SegmentState::Open => {
                self.space.segment_mut(id).opening = false;
                self.opened(id, good);
            }
            SegmentState::Sealed => {
                let segment = self.space.segment_mut(id);
                segment.state = State::Sealed;
                segment.listed = good;
                if std::mem::take(&mut segment.extended) {
                    segment.poisoned |= !good;
                    if std::mem::take(&mut segment.healing) {
                        segment.suspect = !good;
                    }
                    self.space.welcome_all();
                    if self.has_suspects() {
                        self.effects.push(Effect::Reclaim);
                    }
                    self.finish_unlisted(id, good);
                } else if !good && !segment.held.is_empty() {
                    // Nothing on the device says which of its pages are not there: the others are better off elsewhere.
                    segment.suspect = true;
                    self.effects.push(Effect::Reclaim);
                    return;
                }
                self.resolve_held(id);
                if self.wants_reclaim() {
                    self.effects.push(Effect::Reclaim);
                }
            }
            SegmentState::Free => {
                self.space.segment_mut(id).listed = good;
                self.free_at_next_sync(id);
            }
        }
    }

    /// What groups waited for in this segment is over.
    pub(super) fn resolve_held(&mut self, id: SegmentId) {
        for commit in std::mem::take(&mut self.space.segment_mut(id).held) {
            self.log.unhold(commit);
            self.log.resolve(commit, 1);
        }
    }

    /// Leaves a group incomplete until a header of this segment is written.
    fn hold(&mut self, id: SegmentId, commit: Serial) {
        self.space.segment_mut(id).held.push(commit);
        self.log.hold(commit);
    }

    /// A segment's free header is durable: it may be written again.
    fn released(&mut self, id: SegmentId) {
        let listed = self.space.segment(id).listed;
        self.space.release(id);
        self.space.segment_mut(id).listed = listed;
        self.counters.reclaimed += 1;
        self.write_homeless();
        self.effects.push(Effect::Room);
        if self.wants_reclaim() {
            self.effects.push(Effect::Reclaim);
        }
    }

    /// The first header of a segment is written, or its write failed: then nothing in it is acknowledged.
    fn opened(&mut self, id: SegmentId, good: bool) {
        if !good {
            self.poison(id);
        }
        let waiting = std::mem::take(&mut self.log.unopened);
        for ticket in waiting {
            if self.pending[ticket].place.segment == id {
                self.settle(ticket);
            } else {
                self.log.unopened.push(ticket);
            }
        }
        self.finish_unlisted(id, good);
        self.drain(id);
    }

    /// Answers an I/O request.
    pub fn io_done(&mut self, id: IoId, good: bool) {
        match self.log.take_io(id) {
            Some(log::IoContext::Blocks(write)) => self.blocks_done(write, good),
            Some(log::IoContext::Header(segment, state)) => {
                self.mark_dirty(segment);
                // A header is a hint: what it says is found in the blocks too. A failed one costs a scan at the next open.
                self.header_done(segment, state, good);
            }
            Some(log::IoContext::Sync(volume)) => self.sync_done(volume, good),
            None => debug_assert!(false, "an answer to a request that was not made"),
        }
        self.publish_ready();
        self.pump();
    }

    /// Forms groups and starts syncs, as far as limits allow.
    fn pump(&mut self) {
        self.pump_groups();
        self.pump_syncs();
        if std::mem::take(&mut self.space.some_died) {
            self.effects.push(Effect::Reclaim);
        }
    }

    /// Links pages whose parents were unknown, as lookups found them.
    pub fn adopt(&mut self, pairs: &[Adoption]) {
        self.index.adopt(pairs);
    }

    /// Headers for every segment whose header on disk does not state what it holds: open ones, and those whose last header
    /// write failed or was skipped. Written as the last thing before a clean close, when nothing is under way. Volume, byte
    /// offset, bytes.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub fn closing_headers(&mut self) -> Result<Vec<(usize, u64, AlignedBuf)>, std::io::Error> {
        let lively: Vec<SegmentId> = self
            .space
            .iter()
            .filter(|(_, s)| !s.listed && !matches!(s.state, State::Lost | State::Unreadable))
            .map(|(id, _)| id)
            .collect();
        let mut headers = Vec::new();
        for id in lively {
            let segment = self.space.segment_mut(id);
            // One with a failed write has said how far it is to be trusted.
            if !segment.poisoned {
                segment.proven = segment.last_commit;
            }
            let state = match segment.state {
                State::Free | State::Releasing => SegmentState::Free,
                State::Open(_) => SegmentState::Open,
                _ => SegmentState::Sealed,
            };
            let header = self.header(id, state);
            let bytes = encode_headers(&header, 2).ok_or(std::io::ErrorKind::OutOfMemory)?;
            let offset = self.space.offset_of(id);
            headers.push((self.space.volume_of(id), offset, bytes));
        }
        Ok(headers)
    }

    /// Whether nothing is under way: no page, no request, no I/O.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty()
            && self.reservations.is_empty()
            && self.log.is_idle()
            && self.syncs.is_idle()
    }

    /// Checks what must always hold; for tests and simulation.
    ///
    /// # Errors
    /// The first invariant found broken.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.index.check_invariants()?;
        let mut live: BTreeMap<SegmentId, u64> = BTreeMap::new();
        self.index.each(|page| {
            *live.entry(page.place.segment).or_default() +=
                u64::from(self.namespaces[page.namespace.0 as usize].page_blocks);
        });
        let mut total = 0;
        for (id, segment) in self.space.iter() {
            let counted = live.get(&id).copied().unwrap_or(0);
            total += counted;
            if counted != segment.live {
                return Err(format!(
                    "segment {id:?}: {counted} live blocks indexed, {} counted",
                    segment.live
                ));
            }
            if matches!(
                segment.state,
                State::Free | State::Emptied | State::Releasing
            ) && counted > 0
            {
                return Err(format!(
                    "segment {id:?}: {:?}, yet indexed pages lie in it",
                    segment.state
                ));
            }
            let used = u64::from(segment.data_end)
                + u64::from(segment.blocks)
                + u64::from(segment.credits);
            if used > u64::from(self.config.segment_blocks) {
                return Err(format!("segment {id:?}: data and descriptors overlap"));
            }
        }
        if total != self.space.live_blocks {
            return Err(format!(
                "{total} live blocks indexed, {} counted",
                self.space.live_blocks
            ));
        }
        if self.space.live_blocks > self.space.usable_blocks && self.counters.pages_put > 0 {
            return Err(format!(
                "{} live blocks, {} usable",
                self.space.live_blocks, self.space.usable_blocks
            ));
        }
        Ok(())
    }
}

/// What a new page brings with it.
#[derive(Clone, Copy, Debug)]
struct NewPage {
    namespace: NamespaceSlot,
    key: PageKey,
    parent: Option<KeyPrefix>,
    depth: u32,
}

impl Pending {
    fn parent(&self) -> Parent {
        match self.parent {
            Some(key) => Parent::Key(key),
            None if self.depth == 0 => Parent::Head,
            None => Parent::Unknown,
        }
    }
}

fn encode_headers(header: &SegmentHeader, copies: usize) -> Option<AlignedBuf> {
    let mut bytes = AlignedBuf::zeroed(copies * BLOCK_BYTES).ok()?;
    for copy in bytes.chunks_exact_mut(BLOCK_BYTES) {
        header.encode(copy.try_into().ok()?);
    }
    Some(bytes)
}
