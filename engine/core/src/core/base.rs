//! The state that all rooms share: the configuration, the index, the clock, serials, watermarks,
//! and the way out of the core.
//!
//! Two ways lead out of a room. An [`Effect`] leaves the core. An [`Event`] goes up to a room
//! above: the loop in `core` hands it on after the call that caused it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use larder_base::memory::AlignedBuf;
use larder_format::{Quota, SegmentState, Serial};
use slotmap::new_key_type;

use super::evicted::Evicted;
use super::namespaces::Namespaces;
use super::types::{Config, Counters, Effect, Fault, Io, IoId, RequestId};
use crate::ages::AgesBySlot;
use crate::grants::ReservationId;
use crate::index::{Index, NamespaceSlot, SegmentId};
use crate::status::PutStatus;

new_key_type! {
    /// A page with an extent, until it has its status.
    pub(super) struct Ticket;
}

/// How long a segment that could not be emptied is left alone, in milliseconds, if nothing changes
/// meanwhile.
const RETRY_MS: u64 = 1000;

/// News for a room above.
#[derive(Debug)]
pub(super) enum Event {
    /// Something ended in this segment. It may be ready to be sealed.
    Drain(SegmentId),
    /// A write into this segment failed, for the first time or again.
    Poison(SegmentId, bool),
    /// The header with this state has been written, or could not be.
    Header(SegmentId, SegmentState, bool),
    /// The descriptors of these pages are part of this commit.
    Grouped(Vec<Ticket>, Serial),
    /// The descriptors of these pages have been written, or could not be.
    Described(Vec<Ticket>, bool),
    /// A record that is forwarded out of this victim has been written, or found no room.
    Forwarded(SegmentId),
    /// All records of a caller's request have been written, the last with this commit.
    RequestWritten(RequestId, Serial),
    /// A page's commit is durable; or a sync failed, and the page has this status.
    Synced(ReservationId, usize, PutStatus),
    /// The free header of this segment is durable.
    Released(SegmentId),
    /// There may be room for records that found none before.
    MoreRoom,
    /// All pages of a batch of copies have their status. True if all were copied.
    CopiesSettled(bool),
    /// Reclaim may be wanted.
    CheckReclaim,
}

/// The room that an answer to an I/O request belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) enum IoContext {
    /// Descriptor blocks, or the filling of a hole among them.
    Blocks,
    Header(SegmentId, SegmentState),
    Sync(usize),
    /// So many blocks of zeros on this volume.
    Probe(usize, u32),
}

/// Two watermarks over commit numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watermarks {
    /// Every commit up to here is durable on every volume: a flush may report it.
    pub synced: Serial,
    /// The durable watermark on disk, in headers and blocks: recovery trusts the payload of every
    /// page up to here.
    pub durable: Serial,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Base {
    pub config: Config,
    pub index: Arc<Index>,
    pub namespaces: Namespaces,
    /// The quotas in force.
    pub quotas: Vec<Quota>,
    pub marks: Watermarks,
    pub counters: Counters,
    /// The pages that the store dropped by itself.
    pub evicted: Evicted,
    /// The ages of pages at their eviction.
    pub ages: AgesBySlot,
    pub now_ms: u64,
    /// When reclaim looks again at segments that it could not empty.
    pub retry_ms: Option<u64>,
    /// When pins whose time has come are looked for next.
    pub pins_due_ms: u64,
    /// The headers of a clean close are made: no segment changes its state any more.
    pub is_closed: bool,
    /// A part of the store could not be read at the open.
    pub is_partial: bool,
    /// A put or a deletion of this epoch has asked for room.
    is_room_asked_for: bool,
    /// Space or write budget has become available since the last effects were taken.
    has_more_room: bool,
    serial: Serial,
    ios: HashMap<IoId, IoContext>,
    next_io: u64,
    effects: Vec<Effect>,
    events: VecDeque<Event>,
}

impl Base {
    pub(super) fn new(
        config: Config,
        index: Arc<Index>,
        namespaces: Namespaces,
        marks: Watermarks,
        first: Serial,
    ) -> Base {
        Base {
            config,
            index,
            namespaces,
            quotas: Vec::new(),
            marks,
            counters: Counters::default(),
            evicted: Evicted::new(first.run()),
            ages: AgesBySlot::default(),
            now_ms: 0,
            retry_ms: None,
            pins_due_ms: 0,
            is_closed: false,
            is_partial: false,
            is_room_asked_for: false,
            has_more_room: false,
            serial: first,
            ios: HashMap::new(),
            next_io: 0,
            effects: Vec::new(),
            events: VecDeque::new(),
        }
    }

    /// The clock of the store, in milliseconds since 1970.
    pub(super) fn unix_ms(&self) -> u64 {
        self.config.began_ms.saturating_add(self.now_ms)
    }

    /// Draws the next serial; `None` when this epoch has used all of its own.
    pub(super) fn next_serial(&mut self) -> Option<Serial> {
        self.serial = self.serial.next()?;
        Some(self.serial)
    }

    /// Announces news to the rooms above.
    pub(super) fn announce(&mut self, event: Event) {
        self.events.push_back(event);
    }

    pub(super) fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    pub(super) fn emit(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    /// Ends a caller's request.
    pub(super) fn finish(&mut self, request: RequestId, result: Result<(), Fault>) {
        self.emit(Effect::Finished(request, result));
    }

    /// Reclaim has work.
    pub(super) fn call_reclaim(&mut self) {
        self.emit(Effect::Reclaim);
    }

    /// A put or a deletion needs room.
    pub(super) fn ask_for_room(&mut self) {
        if !std::mem::replace(&mut self.is_room_asked_for, true) {
            self.call_reclaim();
        }
    }

    /// Whether a put or a deletion of this epoch has needed room.
    pub(super) fn is_room_asked_for(&self) -> bool {
        self.is_room_asked_for
    }

    /// Space or write budget has become available.
    pub(super) fn has_room(&mut self) {
        self.has_more_room = true;
    }

    pub(super) fn take_effects(&mut self) -> Vec<Effect> {
        if std::mem::take(&mut self.has_more_room) {
            self.effects.push(Effect::Room);
        }
        std::mem::take(&mut self.effects)
    }

    pub(super) fn write(
        &mut self,
        volume: usize,
        offset: u64,
        bytes: AlignedBuf,
        context: IoContext,
    ) -> IoId {
        self.io(volume, Io::Write { offset, bytes }, context)
    }

    pub(super) fn sync(&mut self, volume: usize) {
        self.io(volume, Io::Sync, IoContext::Sync(volume));
    }

    fn io(&mut self, volume: usize, io: Io, context: IoContext) -> IoId {
        let id = IoId(self.next_io);
        self.next_io += 1;
        self.ios.insert(id, context);
        self.effects.push(Effect::Io { id, volume, io });
        id
    }

    pub(super) fn take_io(&mut self, id: IoId) -> Option<IoContext> {
        self.ios.remove(&id)
    }

    /// Whether a namespace has pages, or a caller has named it since the store was opened. Where a
    /// part of the store could not be read, pages of any namespace may lie there.
    pub(super) fn is_wanted(&self, slot: NamespaceSlot) -> bool {
        let has_pages = self.is_partial || self.index.pages_of(slot) > 0;
        has_pages || self.namespaces.get(slot).is_named
    }

    /// No I/O request is without its answer.
    pub(super) fn is_idle(&self) -> bool {
        self.ios.is_empty()
    }

    /// Makes reclaim look again after a while. Returns the time of that.
    pub(super) fn retry_later(&mut self) -> u64 {
        let due = self.now_ms.saturating_add(RETRY_MS);
        self.retry_ms = Some(due);
        due
    }
}

#[cfg(test)]
impl Base {
    /// A base for the tests of a room.
    pub(super) fn of_tests() -> Base {
        let config = Config {
            store: larder_format::StoreId::from_bytes([7; 16]),
            segment_blocks: 4096,
            sync: crate::core::SyncPolicy::Relaxed,
            write_bytes_max: 1 << 30,
            copy_blocks_max: 64,
            read_only: false,
            began_ms: 0,
        };
        let first = Serial::first_of(larder_format::Run::FIRST);
        let marks = Watermarks {
            synced: first,
            durable: first,
        };
        let index = Arc::new(Index::new(64, 4096));
        Base::new(config, index, Namespaces::default(), marks, first)
    }
}
