//! The deciding half of the engine: a state machine without I/O, clock or randomness.
//!
//! Commands and completions go in ([`Core::reserve`], [`Core::commit`], [`Core::landed`],
//! [`Core::io_done`], ...). [`Effect`]s come out: I/O requests, and answers to callers. Time comes
//! in as [`Core::tick`]. The same inputs in the same order give the same outputs, bit for bit.
//!
//! The core is a house of rooms, one above the other. A room is a struct with fields of its own. It
//! calls rooms below it. News for a room above is an event: the loop in this module hands it on
//! after the call that caused it.
//!
//! | module | decides |
//! |---|---|
//! | `closing` | (the steps of a clean close) |
//! | `steps` | (removals of many pages, in steps) |
//! | `limits` | (the limits of puts, of writes, and of what is kept) |
//! | `books` | (lists of pages, evictions, usage) |
//! | `quotas` | (the groups of namespaces with quotas) |
//! | `pins` | (the pages that are kept until a time) |
//! | `reclaim` | which segment is emptied, and which of its pages are kept |
//! | `puts` | which pages are admitted, published, evicted, deleted |
//! | `durability` | syncs, sealed and released segments, the cost of a failed sync |
//! | `journal` | when descriptors and records are written |
//! | `segments` | where pages go, how many are kept, which volumes take writes |
//! | `base` | (configuration, index, namespaces, clock, events, effects) |
//! | `evicted` | (the pages that left, with their whole keys) |
//! | `namespaces` | (the namespaces of a store) |
//! | `types` | (the inputs and outputs of a core) |
//!
//! The promises rest on these rules:
//!
//! - A page becomes visible only when its bytes *and* its descriptor are on the device.
//! - After a failed write, no page of its segment is acknowledged that was not visible before.
//! - The flush watermark (`synced`) waits for the rewrite of all suspects of a failed sync.
//! - A page whose bytes failed after its descriptor was written is never proven: the durable
//!   watermark stays below its commit until a header excludes the page (`Segment::held`).
//! - Where a descriptor write failed, empty blocks are written before the segment is sealed. No
//!   header proves blocks behind a hole that could not be filled (`Segment::trust_end`).
//! - Nothing in a segment is acknowledged before its first header is written: without that header
//!   recovery finds the segment only by its first descriptor block, which may be absent.
//! - A segment is released only after everything forwarded out of it is synced, and no reader has
//!   it pinned. It is written again only when its free header is durable: otherwise a power loss
//!   leaves the old generation with the new one's bytes.
//! - A tombstone is written again after a failed sync, from memory: its block may be lost.

mod base;
mod books;
mod closing;
mod durability;
mod evicted;
mod journal;
mod limits;
mod namespaces;
mod pins;
mod puts;
mod quotas;
mod reclaim;
mod segments;
mod steps;
mod types;

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_base::failure::DiskError;
use larder_base::ids::NamespaceId;
use larder_format::{DescriptorBlock, Namespace, PageKey, Proof, SegmentState, Serial};

use crate::capacity::footprint;
use crate::grants::{Ask, Extent, Finding, Grant, ReservationId};
use crate::hint::Hint;
use crate::index::{Adoption, Index, NamespaceSlot, Place, SegmentId};
use crate::planted;
use base::{Base, Event, IoContext, Watermarks};
use books::Books;
pub use books::NamespaceUse;
use durability::Durability;
pub use evicted::Evictions;
pub use journal::BLOCKS_IN_FLIGHT_MAX;
use journal::Journal;
pub use namespaces::NAMESPACES_MAX;
use namespaces::Namespaces;
pub use pins::{Kept, KeptPage};
use puts::{Below, Puts};
pub use quotas::{QuotaLevel, QuotaRefusal};
use reclaim::Reclaim;
pub use reclaim::{GAIN_SHARE, SegmentView, batch};
use segments::Segments;
use segments::segment::State;
pub use segments::{Lent, RUN_BYTES};
pub use types::*;

/// The deciding state machine. See the module's documentation.
#[derive(Debug)]
pub struct Core {
    base: Base,
    segments: Segments,
    journal: Journal,
    durability: Durability,
    puts: Puts,
    reclaim: Reclaim,
}

/// The rooms of a core, as a call from above sees them.
macro_rules! rooms {
    ($core:expr) => {{
        let Core {
            base,
            segments,
            journal,
            durability,
            puts,
            reclaim,
        } = $core;
        let below = Below {
            base,
            segments,
            journal,
            durability,
        };
        (reclaim, puts, below)
    }};
}

impl Core {
    /// A core over the state that recovery found. The index must hold exactly the recovered pages.
    #[must_use]
    pub fn new(config: Config, recovered: Recovered, index: Arc<Index>) -> Core {
        let mut segments = Segments::recovered(config.segment_blocks, &recovered);
        // After a crash nothing is known to be durable before the first sync, and the commits that
        // earlier epochs acknowledged are not known.
        let durable = if recovered.clean {
            recovered.first
        } else {
            Serial::ZERO
        };
        let marks = Watermarks {
            synced: durable,
            durable,
        };
        for (id, segment) in (0..).zip(&recovered.segments) {
            index.bear(SegmentId(id), 0, 1, segment.born_ms);
        }
        let namespaces = Namespaces::new(recovered.namespaces);
        index.each(|page| {
            let blocks = namespaces.stored_blocks(page.namespace, page.place);
            segments.add_live(page.place.segment, blocks);
        });
        let mut base = Base::new(config, index, namespaces, marks, recovered.first);
        base.counters.lost = recovered.lost_pages;
        base.is_partial = recovered.is_partial;
        Core {
            base,
            segments,
            journal: Journal::new(recovered.first),
            durability: Durability::default(),
            puts: Puts::default(),
            reclaim: Reclaim::default(),
        }
    }

    // ---- the loop

    /// Hands events on, and starts groups, syncs and publications, until nothing is left to do.
    fn run(&mut self) {
        loop {
            self.handle_events();
            let (_, puts, mut below) = rooms!(self);
            puts.publish_ready(&mut below);
            let Below {
                base,
                segments,
                journal,
                durability,
            } = below;
            journal.pump(base, segments);
            durability.pump(base, segments, journal);
            if segments.take_some_died() {
                base.call_reclaim();
            }
            if !self.handle_events() {
                return;
            }
        }
    }

    /// Hands events on until there are no more. Returns whether there were some.
    fn handle_events(&mut self) -> bool {
        let mut any = false;
        while let Some(event) = self.base.next_event() {
            self.handle(event);
            any = true;
        }
        any
    }

    fn handle(&mut self, event: Event) {
        let (reclaim, puts, mut below) = rooms!(self);
        let Below {
            base,
            segments,
            journal,
            durability,
        } = &mut below;
        match event {
            Event::Drain(id) => durability.drain(base, segments, journal, id),
            Event::Poison(id, is_first) => puts.poisoned(&mut below, id, is_first),
            Event::Header(id, state, good) => {
                durability.header_written(base, segments, journal, id, state, good);
                if state == SegmentState::Open {
                    if !good {
                        let is_first = segments.poison(id);
                        puts.poisoned(&mut below, id, is_first);
                    }
                    puts.opened(&mut below, id);
                }
            }
            Event::Grouped(tickets, commit) => puts.grouped(&tickets, commit),
            Event::Described(tickets, good) => puts.described(&mut below, &tickets, good),
            Event::Forwarded(id) => {
                durability.release_when_forwarded(base, segments, journal, id);
            }
            Event::RequestWritten(request, commit) => {
                durability.request_written(base, request, commit);
            }
            Event::Synced(id, index, status) => puts.set_status(base, id, index, status),
            Event::Released(id) => {
                segments.release(id);
                base.counters.store.reclaimed += 1;
                base.has_room();
                base.announce(Event::MoreRoom);
            }
            Event::MoreRoom => {
                journal.write_homeless(base, segments);
                reclaim.check(&mut below);
            }
            Event::CopiesSettled(copied_all) => reclaim.copies_settled(&mut below, copied_all),
            Event::CheckReclaim => reclaim.check(&mut below),
        }
    }

    // ---- time and effects

    /// The settings of this use of the store.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.base.config
    }

    /// Called once after opening: starts reclaim where it is wanted. Pages beyond the limit stay:
    /// a crash brought them back, or the room of segments that could not be read is missing. They
    /// leave when a put needs their room.
    pub fn start(&mut self) {
        let (reclaim, puts, mut below) = rooms!(self);
        if planted!(EvictsAtOpen) {
            puts.make_room(&mut below, 0, None);
        }
        reclaim.check(&mut below);
        self.run();
    }

    /// Sets the time, in milliseconds since any fixed moment. A step back is ignored.
    pub fn tick(&mut self, now_ms: u64) {
        let base = &mut self.base;
        base.now_ms = base.now_ms.max(now_ms);
        if base.index.keeps_times() {
            base.index.age_to(base.unix_ms());
        }
        let is_due = self.durability.tick(base, &self.segments, &self.journal);
        self.segments.probe_when_due(base);
        self.end_pins();
        let base = &mut self.base;
        if base.retry_ms.is_some_and(|at| at <= base.now_ms) {
            base.retry_ms = None;
            self.segments.retry_quarantined();
            if self.segments.some_unusable() {
                base.retry_later();
            }
            base.call_reclaim();
        }
        if is_due {
            self.run();
        }
    }

    /// When [`Core::tick`] has to be called at the latest; `None` while nothing waits for time to
    /// pass.
    #[must_use]
    pub fn wakes_at(&self) -> Option<u64> {
        let sync = self.durability.due(&self.base);
        let due = [self.base.retry_ms, sync, self.segments.probes_due()];
        due.into_iter().flatten().min()
    }

    /// The effects of everything since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        self.base.take_effects()
    }

    // ---- completions

    /// Answers an I/O request.
    pub fn io_done(&mut self, id: IoId, result: Result<(), DiskError>) {
        let (base, segments) = (&mut self.base, &mut self.segments);
        let (journal, durability) = (&mut self.journal, &mut self.durability);
        let good = result.is_ok();
        match base.take_io(id) {
            Some(IoContext::Blocks) => journal.done(base, segments, id, result),
            Some(IoContext::Header(segment, state)) => {
                segments.mark_dirty(segment, good);
                if let Err(error) = result {
                    let is_free = state == SegmentState::Free;
                    // A free header is retried every second, and would cause a probe each time.
                    if !(is_free && segments.get(segment).is_unusable()) {
                        // Only this segment may refuse it: a probe elsewhere decides.
                        let error = Some(error).filter(|_| !is_free);
                        segments.write_refused(base, segment, error);
                    }
                }
                base.announce(Event::Header(segment, state, good));
            }
            Some(IoContext::Sync(volume)) => {
                durability.sync_done(base, segments, journal, volume, good);
            }
            Some(IoContext::Probe(volume, blocks)) => {
                segments.probe_done(base, volume, blocks, result);
            }
            None => debug_assert!(false, "an answer to a request that was not made"),
        }
        self.run();
    }

    /// Answers [`Effect::ReadDescriptors`].
    pub fn descriptors_read(&mut self, read: Descriptors) {
        let (reclaim, _, mut below) = rooms!(self);
        reclaim.descriptors_read(&mut below, read);
        self.run();
    }

    /// Answers [`Effect::Copy`], in the order of its pages.
    pub fn copied(&mut self, id: ReservationId, outcomes: &[Copied]) {
        let (reclaim, puts, mut below) = rooms!(self);
        reclaim.copied(puts, &mut below, id, outcomes);
        self.run();
    }

    // ---- puts

    /// Gives pages extents, one grant an ask. Pages that are there already, or on their way, settle
    /// by themselves. When one page is refused, so are all that follow it.
    pub fn reserve(
        &mut self,
        namespace: NamespaceSlot,
        asks: &[Ask],
        hint: Hint,
    ) -> (ReservationId, Vec<Grant>) {
        let (_, puts, mut below) = rooms!(self);
        let granted = puts.reserve(&mut below, namespace, asks, hint);
        self.run();
        granted
    }

    /// Takes the proofs of a reservation's pages, by their position in the asks; `None` gives a
    /// page up.
    pub fn commit(&mut self, id: ReservationId, proofs: &[Option<Proof>]) {
        let (_, puts, mut below) = rooms!(self);
        puts.commit(&mut below, id, proofs);
        self.run();
    }

    /// States which pages of a reservation have been written, by their position in the asks.
    pub fn landed(&mut self, id: ReservationId, pages: &[(usize, bool)]) {
        let (_, puts, mut below) = rooms!(self);
        puts.landed(&mut below, id, pages);
        self.run();
    }

    /// Finishes `request` when everything acknowledged so far is durable.
    pub fn flush(&mut self, request: RequestId) {
        let (base, segments) = (&mut self.base, &mut self.segments);
        self.durability
            .flush(base, segments, &self.journal, request);
        self.run();
    }

    /// Volume and offset of a place.
    #[must_use]
    pub fn extent(&self, place: Place) -> Extent {
        self.segments.extent(place)
    }

    /// Records the finding of a read: a good page is proven, any other is dropped.
    pub fn found(
        &mut self,
        namespace: NamespaceSlot,
        key: &PageKey,
        place: Place,
        finding: Finding,
    ) {
        let (_, puts, mut below) = rooms!(self);
        puts.found(&mut below, namespace, key, place, finding);
    }

    /// Links pages whose parents were unknown, as lookups found them, within so many steps along
    /// chains, which are taken off.
    pub fn adopt(&mut self, pairs: &[Adoption], steps: &mut usize) {
        self.base.index.adopt_within(pairs, steps);
    }

    // ---- namespaces and deletions

    /// Names a namespace, and writes its full record where the store does not hold it. `None` when
    /// the limit is reached.
    pub fn open_namespace(&mut self, namespace: &Namespace) -> Option<NamespaceId> {
        let (_, _, mut below) = rooms!(self);
        let id = Puts::open_namespace(&mut below, namespace);
        self.run();
        id
    }

    /// The namespaces of the store whose full records are known.
    pub fn namespaces(&self) -> impl Iterator<Item = &Namespace> {
        let states = self.base.namespaces.iter();
        states.filter_map(|(_, state)| state.record.as_ref())
    }

    /// The namespace of an id; `None` for an id that this core did not give.
    #[must_use]
    pub fn namespace_of(&self, id: NamespaceId) -> Option<&Namespace> {
        self.base.namespaces.record_of(id.0)
    }

    /// Deletes keys: from the index at once, from the disk when `request` is finished. Returns how
    /// many were there.
    pub fn delete(
        &mut self,
        request: RequestId,
        namespace: NamespaceSlot,
        keys: &[PageKey],
    ) -> u64 {
        let (_, puts, mut below) = rooms!(self);
        let found = puts.delete(&mut below, request, namespace, keys);
        self.run();
        found
    }

    /// Deletes a whole namespace. Returns how many pages it had.
    pub fn clear(&mut self, request: RequestId, namespace: NamespaceSlot) -> u64 {
        let (_, puts, mut below) = rooms!(self);
        let found = puts.clear(&mut below, request, namespace);
        self.run();
        found
    }

    // ---- reclaim

    /// Does one step of reclaim, in which about `pages` pages are looked at. Returns whether
    /// another step can follow at once; if not, [`Effect::Reclaim`] announces the next one.
    pub fn reclaim_step(&mut self, pages: usize) -> bool {
        let (reclaim, puts, mut below) = rooms!(self);
        let more = reclaim.step(puts, &mut below, pages);
        self.run();
        more
    }

    /// Empties a segment with all its pages kept, and then finishes `request`; with
    /// [`Fault::NoRoom`] if it could not now. False, and no answer, if it has other pages by now.
    pub fn empty(&mut self, request: RequestId, wanted: &Emptying) -> bool {
        let (reclaim, _, mut below) = rooms!(self);
        let is_taken = reclaim.empty(&mut below, request, wanted);
        self.run();
        is_taken
    }

    /// The caller of [`Core::empty`] waits no longer for its turn; with `at_once` not at all.
    pub fn withdraw(&mut self, request: RequestId, at_once: bool) {
        let (reclaim, _, mut below) = rooms!(self);
        reclaim.withdraw(&mut below, request, at_once);
        self.run();
    }

    /// Ends reclaim with the pages that are being copied now.
    pub fn stop_reclaim(&mut self) {
        self.reclaim.stop();
    }

    /// Whether a victim is being emptied.
    #[must_use]
    pub fn is_reclaiming(&self) -> bool {
        self.reclaim.is_busy()
    }

    /// The last reader left a segment. A reader may leave after the last headers of a close: the
    /// segment stays as they state it.
    pub fn unpinned(&mut self, id: SegmentId) {
        if !self.base.is_closed && self.segments.get(id).is_held_by_pins() {
            let (base, segments) = (&mut self.base, &mut self.segments);
            self.durability
                .release_when_unpinned(base, segments, &mut self.journal, id);
            self.run();
        }
    }

    /// Lends a free segment that was never used; `None` when there is none, or when few are free.
    pub fn lend_unused(&mut self) -> Option<Lent> {
        self.segments.lend()
    }

    /// Takes a segment back. No write of the holder may be under way in it any more.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the holder has it no more after that"
    )]
    pub fn take_back(&mut self, lent: Lent) {
        self.segments.return_lent(&mut self.base, &lent);
        self.run();
    }

    // ---- offline tools

    /// Copies pages for a caller, who gets their statuses as those of a put.
    pub fn copy(&mut self, moves: &[Move]) -> ReservationId {
        let (_, puts, mut below) = rooms!(self);
        let id = Reclaim::copy(puts, &mut below, moves);
        self.run();
        id
    }

    /// Takes a sealed or unreadable segment as a victim.
    pub fn take_named(&mut self, id: SegmentId) -> Option<Victim> {
        let (_, _, mut below) = rooms!(self);
        reclaim::take_named(&mut below, id)
    }

    /// Plans the move of every live page out of a victim: no page is evicted.
    pub fn plan_whole(&mut self, victim: &Victim, blocks: &[DescriptorBlock]) -> Vec<Move> {
        let (_, _, mut below) = rooms!(self);
        let moves = reclaim::plan_whole(&mut below, victim, blocks);
        self.run();
        moves
    }

    /// The victim's pages have been moved. Returns whether it is on its way to be free.
    pub fn finish_victim(&mut self, victim: &Victim, moved_all: bool) -> bool {
        let (_, _, mut below) = rooms!(self);
        let is_returning = reclaim::finish_victim(&mut below, victim, moved_all);
        self.run();
        is_returning
    }

    /// Whether [`Core::take_named`] can take this segment.
    pub fn holds_something(&self, id: SegmentId) -> bool {
        let state = self.segments.get(id).state();
        matches!(state, State::Sealed | State::Unreadable)
    }

    /// Whether its descriptors could not all be read when the store was opened.
    pub fn is_unreadable(&self, id: SegmentId) -> bool {
        self.segments.get(id).state() == State::Unreadable
    }

    /// Places nothing on a volume any more. Evicts the coldest pages: the pages that the other
    /// volumes have no room for, and `more` blocks.
    pub fn retire(&mut self, volume: usize, more: u64) {
        let (_, puts, mut below) = rooms!(self);
        below.segments.retire(volume);
        puts.make_room(&mut below, 0, None);
        puts.evict(&mut below, more);
        self.run();
    }

    /// Blocks of live pages in a segment.
    pub fn live_in(&self, id: SegmentId) -> u64 {
        self.segments.get(id).live()
    }

    /// The sealed segments.
    pub fn sealed(&self) -> Vec<SegmentView> {
        reclaim::sealed(&self.segments)
    }

    /// For a tool that makes copies alone: the open segment with the most room takes them.
    pub fn open_for_copies(&mut self) {
        self.segments.open_for_copies();
    }

    /// Free segments of volumes that take writes.
    pub fn free_segments(&self) -> usize {
        self.segments.free_segments()
    }

    /// Blocks that copies can take now, in free segments and in segments that take copies.
    pub fn room_for_copies(&self) -> u64 {
        reclaim::room_for_copies(&self.segments)
    }

    /// For callers who keep books of their own.
    pub fn books(&mut self) -> Books<'_> {
        let (base, segments) = (&mut self.base, &self.segments);
        Books { base, segments }
    }

    // ---- views

    /// Whether nothing is under way: no page, no request, no I/O.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let rooms = [self.puts.is_idle(), self.journal.is_idle()];
        rooms.iter().all(|idle| *idle) && self.base.is_idle() && self.durability.is_idle()
    }

    /// Counters so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.base.counters
    }

    /// The volumes in read-only service, each with the error of its last refused write.
    #[must_use]
    pub fn read_only_volumes(&self) -> Vec<(usize, DiskError)> {
        self.segments.read_only_volumes()
    }

    /// Space now.
    #[must_use]
    pub fn space_view(&self) -> SpaceView {
        let segments = &self.segments;
        let count = |is_counted: fn(State) -> bool| {
            let states = segments.iter().map(|(_, segment)| segment.state());
            states.filter(|state| is_counted(*state)).count() as u64
        };
        SpaceView {
            segment_blocks: segments.segment_blocks(),
            live_blocks: segments.live_blocks(),
            usable_blocks: segments.usable_blocks().0,
            taken_blocks: segments.taken_blocks(),
            segments: count(|state| state != State::Lost),
            free_segments: segments.free_segments_of_all() as u64,
            open_segments: count(|state| {
                matches!(state, State::Open(_) | State::Draining | State::Sealing)
            }),
            sealed_segments: count(|state| state == State::Sealed),
            reclaiming_segments: count(|state| {
                matches!(state, State::Victim | State::Emptied | State::Releasing)
            }),
            unreadable_segments: count(|state| state == State::Unreadable),
        }
    }

    /// Checks the invariants; for tests and simulation.
    ///
    /// # Errors
    /// The first invariant found broken.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.base.index.check_invariants()?;
        self.segments.check()?;
        self.puts.check(&self.base)?;
        let segments = &self.segments;
        let suspects = segments.iter().filter(|(_, s)| s.is_suspect()).count();
        if suspects != self.durability.suspects(segments).count() {
            return Err("there are suspects that no list holds".to_owned());
        }
        let mut live: BTreeMap<SegmentId, u64> = BTreeMap::new();
        let mut taken = 0;
        self.base.index.each(|page| {
            let namespaces = &self.base.namespaces;
            let blocks = namespaces.stored_blocks(page.namespace, page.place);
            *live.entry(page.place.segment).or_default() += u64::from(blocks);
            taken += footprint(segments.segment_blocks(), blocks);
        });
        segments.check_live(&live)?;
        let total: u64 = live.values().sum();
        let max = segments.usable_blocks().1;
        let (counted_live, counted_taken) = (segments.live_blocks(), segments.taken_blocks());
        if total != counted_live {
            return Err(format!("{total} live blocks, {counted_live} counted"));
        }
        if taken > max && self.base.counters.pages_put > 0 {
            return Err(format!("{taken} blocks taken, {max} usable"));
        }
        if segments.in_flight_blocks() == 0 && taken != counted_taken {
            return Err(format!("{taken} blocks taken, {counted_taken} counted"));
        }
        Ok(())
    }
}
