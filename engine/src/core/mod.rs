//! The deciding half of the engine: a state machine without I/O, clock or randomness.
//!
//! Commands and completions go in ([`Core::reserve`], [`Core::commit`], [`Core::landed`], [`Core::io_done`], ...); what is to be
//! done comes out as [`Effect`]s: I/O requests, and answers to callers. Time comes in as [`Core::tick`]. Given the same inputs in the
//! same order the outputs are the same, bit for bit. The runtime feeds a core from rings, a simulator can feed it from
//! a fault model.
//!
//! | module | decides |
//! |---|---|
//! | `types` | (what goes in and comes out) |
//! | `pages` | which pages are admitted, and what becomes of each |
//! | `headers` | what a segment's header says |
//! | `holds` | (commits that something holds back) |
//! | `space` | which segment a page goes to, how much is kept |
//! | `segment` | (what a segment is, and what is known of it) |
//! | `log` | when descriptors are written |
//! | `publish` | when a page becomes visible |
//! | `lending` | which free segments somebody may write beforehand |
//! | `evictions` | when evictions are written down |
//! | `service` | which volumes take writes |
//! | `sync` | when volumes are synced, what a sync proved, what a failed one spoiled |
//! | `records` | deletions and namespaces |
//! | `reclaim` | which segment is emptied, and when it is given back |
//! | `reclaimer` | which step of reclaim comes next |
//! | `plan` | which of its pages and records survive |
//! | `cornered` | which segment is given up when there is no room for copies |
//! | `offline` | (what only a tool asks that has the store to itself) |
//!
//! The rules that the promises rest on:
//!
//! - a page becomes visible only when its bytes *and* its descriptor are on the device (`settle`);
//! - after a failed write nothing in its segment that was not yet visible is acknowledged;
//! - `synced` never passes a commit whose bytes a failed sync may have lost;
//! - a page whose bytes failed after its descriptor was written is never vouched for: the mark stays below its commit until a header
//!   says so (`Segment::held`);
//! - where a descriptor write failed empty blocks are written before the segment is sealed; no header vouches for what lies behind a hole
//!   that could not be filled (`Segment::hole`);
//! - nothing in a segment is acknowledged before its first header is written: recovery finds it by that, or by its first block;
//! - a segment is given back only after everything carried out of it is synced, and nobody holds a pin of it; it is written again only
//!   when the header that says so is durable: else a power loss leaves the old life with the new one's bytes;
//! - a deletion is written again after a failed sync, from memory: its block may be what was lost.

mod cornered;
mod evictions;
mod headers;
mod holds;
mod lending;
mod log;
mod offline;
mod pages;
mod plan;
mod publish;
mod reclaim;
mod reclaimer;
mod records;
mod segment;
mod service;
mod space;
mod sync;
mod types;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use larder_format::{Fingerprint, KeyPrefix, Namespace, SegmentState, Serial};
use rapidhash::quality::RandomState;
use slotmap::{SlotMap, new_key_type};

use crate::api::SyncPolicy;
use crate::catalog::ReservationId;
use crate::disk::DiskError;
use crate::index::{Adoption, Heat, Index, NamespaceSlot, SegmentId};
pub(crate) use lending::Lent;
pub(crate) use log::BLOCKS_IN_FLIGHT_MAX;
use log::Log;
use pages::{Origin, Pending, Reservation};
pub(crate) use reclaim::GAIN_SHARE;
pub use reclaim::{Move, Victim};
use reclaimer::Reclaimer;
pub(crate) use reclaimer::batch;
pub use records::NAMESPACES_MAX;
use segment::{Segment, State, Stream};
pub(crate) use space::RUN_BYTES;
use space::Space;
pub use space::{footprint, segments_min, usable_blocks};
use sync::{Syncs, Waiter};
pub use types::*;

new_key_type! {
    /// A page that has been given an extent and is not settled yet.
    struct Ticket;
}

#[derive(Debug)]
struct NamespaceState {
    fingerprint: Fingerprint,
    record: Option<Namespace>,
    /// Segment that holds the full record.
    home: Option<SegmentId>,
    /// Whether somebody has named it in this run.
    is_named: bool,
    page_blocks: u32,
    /// Births below this one were cleared.
    cleared: Serial,
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
    in_flight: HashMap<(NamespaceSlot, KeyPrefix), Ticket, RandomState>,
    /// How many of these there are, by their parent.
    awaited: HashMap<(NamespaceSlot, KeyPrefix), u32, RandomState>,
    reservations: BTreeMap<ReservationId, Reservation>,
    next_reservation: u64,
    effects: Vec<Effect>,
    /// Space or write budget has become available since the last effects were taken.
    has_more_room: bool,
    counters: Counters,
    reclaimer: Reclaimer,
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
                InitState::Open | InitState::Closed | InitState::Sealed => State::Sealed,
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
            in_flight: HashMap::default(),
            awaited: HashMap::default(),
            reservations: BTreeMap::new(),
            next_reservation: 0,
            effects: Vec::new(),
            has_more_room: false,
            counters: Counters::default(),
            reclaimer: Reclaimer::default(),
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
        self.probe_when_due();
        if self.retry_reclaim_ms.is_some_and(|at| at <= self.now_ms) {
            self.retry_reclaim_ms = None;
            self.space.welcome_after_a_while();
            if self.space.stranded > 0 {
                self.retry_reclaim_later();
            }
            self.effects.push(Effect::Reclaim);
        }
    }

    /// When [`Core::tick`] wants to be called at the latest; `None` while nothing waits for time to pass.
    #[must_use]
    pub fn wakes_at(&self) -> Option<u64> {
        let due = [self.retry_reclaim_ms, self.sync_due(), self.probes_due()];
        due.into_iter().flatten().min()
    }

    /// What is to be done because of everything since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        if std::mem::take(&mut self.has_more_room) {
            self.effects.push(Effect::Room);
        }
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
            segment_blocks: self.config.segment_blocks,
            live_blocks: self.space.live_blocks,
            usable_blocks: self.space.usable_blocks,
            taken_blocks: self.space.taken_blocks,
            segments: self
                .space
                .iter()
                .filter(|(_, segment)| segment.state != State::Lost)
                .count() as u64,
            free_segments: self.space.free_segments_of_all() as u64,
            unreadable_segments: self
                .space
                .iter()
                .filter(|(_, s)| s.state == State::Unreadable)
                .count() as u64,
        }
    }

    /// Answers an I/O request.
    pub fn io_done(&mut self, id: IoId, result: Result<(), DiskError>) {
        let good = result.is_ok();
        let context = self.log.take_io(id);
        if let (Some(context), Err(error)) = (&context, result) {
            self.metadata_refused(context, error);
        }
        match context {
            Some(log::IoContext::Blocks(write)) => self.blocks_done(write, good),
            Some(log::IoContext::Fill(segment, behind)) => {
                self.hole_filled(segment, behind, good);
            }
            Some(log::IoContext::Header(segment, state)) => {
                self.mark_dirty(segment, good);
                // A header is a hint: what it says is found in the blocks too. A failed one costs a scan at the next open.
                self.header_done(segment, state, good);
            }
            Some(log::IoContext::Sync(volume)) => self.sync_done(volume, good),
            Some(log::IoContext::Probe(volume, blocks)) => {
                self.probe_done(volume, blocks, result);
            }
            None => debug_assert!(false, "an answer to a request that was not made"),
        }
        self.publish_ready();
        self.pump();
    }

    /// The device refused to write metadata.
    fn metadata_refused(&mut self, context: &log::IoContext, error: DiskError) {
        let (id, error) = match context {
            log::IoContext::Header(id, SegmentState::Free) => {
                // It is retried every second, and would cause a probe each time.
                if self.space.segment(*id).stranded {
                    return;
                }
                // Only this segment may refuse writes: a probe elsewhere decides.
                (*id, None)
            }
            log::IoContext::Blocks(write) => (write.segment, Some(error)),
            log::IoContext::Fill(id, _) | log::IoContext::Header(id, _) => (*id, Some(error)),
            log::IoContext::Sync(_) | log::IoContext::Probe(..) => return,
        };
        self.write_refused(self.space.volume_of(id), error);
    }

    /// Forms groups and starts syncs, as far as limits allow.
    fn pump(&mut self) {
        self.pump_groups();
        self.pump_syncs();
        if std::mem::take(&mut self.space.some_died) {
            self.effects.push(Effect::Reclaim);
        }
    }

    /// Links pages whose parents were unknown, as lookups found them, in no more than so many steps along chains, which are
    /// taken off.
    pub fn adopt(&mut self, pairs: &[Adoption], steps: &mut usize) {
        self.index.adopt_within(pairs, steps);
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
        let suspects = self.space.iter().filter(|(_, segment)| segment.suspect);
        if suspects.count() != self.suspects().count() {
            return Err("there are suspects, and nobody looks for them".to_owned());
        }
        self.space.check_lists()?;
        let put = |page: &&Pending| matches!(page.origin, Origin::Put) && page.parent.is_some();
        let put = self.pending.values().filter(put).count();
        let awaited: u32 = self.awaited.values().sum();
        if put != awaited as usize {
            return Err(format!(
                "{put} pages with parents under way, {awaited} awaited"
            ));
        }
        let mut live: BTreeMap<SegmentId, u64> = BTreeMap::new();
        let mut taken = 0;
        self.index.each(|page| {
            let blocks = self.namespaces[page.namespace.0 as usize].page_blocks;
            *live.entry(page.place.segment).or_default() += u64::from(blocks);
            taken += footprint(self.config.segment_blocks, blocks);
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
        if taken > self.space.usable_blocks_max && self.counters.pages_put > 0 {
            return Err(format!(
                "{taken} blocks taken, {} usable",
                self.space.usable_blocks_max
            ));
        }
        if self.space.reserved_blocks == 0 && taken != self.space.taken_blocks {
            return Err(format!(
                "{taken} blocks taken, {} counted",
                self.space.taken_blocks
            ));
        }
        Ok(())
    }
}
