//! One run of the process, as the driver sees it: its begin, the checks between two steps, its end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use larder_core::core::Core;
use larder_core::index::{Index, NamespaceSlot, SegmentId};
use larder_engine::StoreError;
use larder_engine::format::{OpenState, Run, SegmentState, Superblock};
use larder_sim_runtime::medium::Content;
use larder_store::recovery::Recovery;
use larder_store::recovery::scan::FaultReason;

use super::flight::{Flight, What};
use super::state::{Call, Deletions, Phase, State};
use crate::classes::Class;
use crate::setup::blocks_of;
use crate::superblocks::{counting_copy, decode};
use crate::world::Epoch;

/// Longest outage at an opening: some end before the opening gives its reads up, some after.
const OUTAGE_MAX: Duration = Duration::from_secs(8);

/// Probability that segments become zeros after a clean close.
const EMPTIED: f64 = 0.3;

/// The volumes that an opening finds: of each the newer valid superblock, and which copy is the
/// other one. `None` for a lost volume.
pub type Found = Vec<Option<(Superblock, usize)>>;

/// An opening counts the segments that have become zeros, and their pages.
fn check_emptied(recovery: &Recovery, (segments, pages): (u32, u64)) {
    let lost = recovery
        .damage
        .iter()
        .map(|damage| match damage.fault.reason {
            FaultReason::Emptied { lost, .. } => lost,
            _ => 0,
        });
    assert_eq!(
        lost.sum::<u32>(),
        segments,
        "segments have become zeros unnoticed"
    );
    // Pages that lost records had removed are found again, and hide as many lost pages.
    let lost = recovery.recovered.lost_pages;
    assert!(lost <= pages, "{lost} pages are lost of {pages}");
}

impl State {
    /// Before an opening. `None`: the store is refused for good.
    pub fn begin(&mut self) -> Option<Found> {
        self.forget_unsynced_superblocks();
        let world = &mut self.world;
        world.lose_begun();
        world.look_at_sealed();
        world.totals.opens += 1;
        world.forgotten.extend(&world.shaken);
        world.revive();
        world.read_superblocks(&mut self.expected)?;
        world.begin_sealed();
        world.expect_unerased(&mut self.expected);
        let volumes = world.disk.volumes();
        let known = world.superblocks.iter().zip(volumes.iter());
        let known = known.map(|(known, volume)| {
            let known = known.clone()?;
            let copy = counting_copy(volume, &known);
            Some((known, copy))
        });
        let known = known.collect();
        drop(volumes);
        self.epoch = None;
        self.ids = vec![None; self.world.setup.namespaces.len()];
        self.calls.fill(Call::Idle);
        self.phase = Phase::Opening;
        self.world.is_opening = true;
        self.world.power_due = None;
        self.closing = false;
        self.putting.clear();
        self.under_recall.clear();
        self.deletions = Deletions::default();
        self.opened.clear();
        self.lent.clear();
        self.leases.clear();
        self.quotas.begin();
        self.lives.begin(&mut self.world.dice);
        self.pins.begin();
        let present = self.world.superblocks.iter().flatten();
        let run_before = present.map(|superblock| superblock.run).max();
        self.leases
            .kept(|kept| kept.begin(run_before.map_or(0, Run::get)));
        self.told = None;
        self.listing = 0;
        self.evicted_read_only = None;
        self.opening_writes = 0;
        self.is_partial = false;
        (self.world.outage, self.world.has_outage) = (None, false);
        self.world.draw_outage(Class::Outage, OUTAGE_MAX);
        Some(known)
    }

    /// Recovery has ended. Nothing has been written.
    pub fn recovered(&mut self, recovery: &Recovery, index: &Arc<Index>) {
        let world = &mut self.world;
        world.check_unlocked();
        world.note(index.len() as u64, || {
            format!(
                "recovered {} pages, {} unproven, {} damaged, first {}",
                index.len(),
                recovery.unproven,
                recovery.damage.len(),
                recovery.recovered.first
            )
        });
        if let Some(emptied) = self.emptied {
            check_emptied(recovery, emptied);
            self.is_partial = true;
        }
        let mut faults = recovery.damage.iter().map(|damage| &damage.fault.reason);
        let some_unread = faults.any(FaultReason::is_unread);
        if some_unread && world.has_outage {
            self.is_partial = true;
            world.count(Class::OpenedPartly);
        } else if self.emptied.is_none() {
            world.check_recovered(recovery, index, &self.expected);
            world.check_reader(recovery);
        }
        let run = recovery.recovered.first.run();
        self.leases.kept(|kept| kept.runs(run.get()));
        let mut epoch = Epoch::new(index.clone(), recovery.recovered.first);
        epoch.slots = vec![None; world.setup.namespaces.len()];
        for (slot, namespace) in (0..).map(NamespaceSlot).zip(world.namespaces_of(recovery)) {
            epoch.slots[namespace] = Some(slot);
        }
        let is_whole = !self.is_partial && self.emptied.is_none();
        epoch.unproven = world
            .snapshot(index, &world.namespaces_by_slot(&epoch))
            .into_iter()
            .map(|(name, (_, place, _))| (name, place))
            .collect();
        if is_whole {
            self.check_pins(&epoch, index);
        }
        self.epoch = Some(epoch);
    }

    /// An opening may fail for the device's sake alone. Returns whether all others would, too.
    pub fn check_refusal(&mut self, error: &StoreError) -> bool {
        if let StoreError::NotRead { .. } = error {
            assert!(
                self.world.has_outage,
                "an opening cannot read without a fault: {error}"
            );
            assert_eq!(self.opening_writes, 0, "a refused opening writes");
            self.world.count(Class::OpenRefused);
            self.world.note(0, || format!("not opened: {error}"));
            return false;
        }
        let is_locked = matches!(
            error,
            StoreError::Keyring { .. } | StoreError::WrongKey { .. }
        );
        if is_locked {
            assert_eq!(self.opening_writes, 0, "a refused opening writes");
            return self.world.check_locked(error);
        }
        let faults = &self.world.setup.faults;
        let may = faults.spoils() || faults.misleads() || faults.fail_writes();
        let may = may || faults.superblock_error > 0.0;
        assert!(may, "an opening fails without a fault: {error}");
        assert!(
            !matches!(error, StoreError::VolumeStale { .. }),
            "an open refuses a volume as stale: {error}"
        );
        self.world.note(0, || format!("not opened: {error}"));
        false
    }

    /// Runs the checks between two steps: the cheap ones each time, the others from time to time.
    pub fn check(&mut self) {
        let (Some(_), Some(epoch)) = (&self.store, &self.epoch) else {
            return;
        };
        let world = &self.world;
        let is_due = world.moment.is_multiple_of(world.setup.check_every);
        self.try_core(|core| {
            let c = core.counters();
            let pages = epoch.index.len() as u64;
            let removed = &c.store;
            let gone = c.replaced
                + removed.evicted
                + removed.expired
                + removed.deleted
                + removed.damaged
                + removed.unfinished;
            assert_eq!(
                epoch.recovered + c.pages_put,
                gone + pages,
                "pages do not add up: {} recovered, {c:?}, {pages} in the index",
                epoch.recovered,
            );
            let Deletions {
                in_progress,
                found,
                is_vague,
                ..
            } = self.deletions;
            assert!(
                found == removed.deleted || in_progress > 0 || is_vague && found <= removed.deleted,
                "deletions report {found} pages, and {} were deleted",
                removed.deleted
            );
            let faults = &world.setup.faults;
            // A page with a right checksum stays in an encrypted store.
            let spoils = match world.setup.sealed {
                true => faults.spoils_checksums(),
                false => faults.spoils(),
            };
            if !spoils && !faults.misleads() && !faults.fail_headers() {
                assert_eq!(removed.damaged, 0, "damage without a fault that causes it");
            }
            if is_due {
                core.check_invariants().unwrap();
            }
        });
        if is_due {
            self.check_deleted();
            self.check_keys();
        }
        self.leases.check(&mut self.world);
        self.check_young();
    }

    /// Runs a check after each step of a task: no page is evicted while no volume takes writes.
    pub fn check_service(&mut self) {
        if !self.world.setup.faults.fail_writes() {
            return;
        }
        let volumes = self.world.setup.volumes.len();
        let seen = self.try_core(|core| {
            let read_only = core.read_only_volumes().len();
            (read_only, core.counters().store.evicted)
        });
        let Some((read_only, evicted)) = seen else {
            return;
        };
        if read_only == 0 {
            self.is_read_only = false;
        } else if !self.is_read_only {
            self.is_read_only = true;
            self.world.count(Class::ReadOnlyService);
        }
        let before = self.evicted_read_only.take();
        if read_only == volumes {
            assert!(
                before.is_none_or(|before| before == evicted),
                "a page is evicted while no volume takes writes"
            );
            self.evicted_read_only = Some(evicted);
        }
    }

    /// No deleted page is in the index.
    fn check_deleted(&self) {
        let (world, Some(epoch)) = (&self.world, &self.epoch) else {
            return;
        };
        let namespaces = world.namespaces_by_slot(epoch);
        world.each_page(&epoch.index, &namespaces, |_, version, place, _| {
            assert!(
                !world.is_undead(version, place),
                "{version:?} at {place:?} was deleted"
            );
        });
    }

    /// The process is dead. Operations in flight leave any part of their blocks.
    pub fn crash(&mut self, power: bool) {
        self.world.lose_begun();
        self.lives.crash();
        self.world.totals.crashes += 1;
        if self.is_partial {
            // What the run before this one left is still what must be there.
            self.forget_epoch();
        }
        let class = if power { Class::Power } else { Class::Kill };
        self.world.count(class);
        self.count_phases();
        if let Some(epoch) = &self.epoch {
            self.expected = self.world.expect(epoch, power);
        } else if power {
            self.expected.names.retain(|_, durable| *durable);
        }
        self.check_deleted();
        self.try_core(|core| core.check_invariants().unwrap());
        self.expected.exactly = false;
        let kept = self.expected.names.len();
        self.world.note(u64::from(power), || {
            format!("the process ends, power lost: {power}, {kept} pages must survive")
        });
        self.sum_up();
        let mut flights: VecDeque<Flight> = std::mem::take(&mut self.flights).into();
        while !flights.is_empty() {
            let at = self.world.dice.below(flights.len());
            let flight = flights
                .swap_remove_back(at)
                .expect("an operation in flight");
            if !flight.is_write() {
                continue;
            }
            let arrival = self.world.draw_tear(flight.blocks.len());
            let volume = flight.volume();
            self.world
                .tear(volume, flight.start, &flight.blocks, &arrival);
        }
        self.forget_unsynced_superblocks();
        if power {
            self.world.lose_power();
        }
        let mut expected = std::mem::take(&mut self.expected);
        self.world.expect_less(&mut expected);
        self.expected = expected;
        self.world
            .oracle
            .end_run(power || !self.world.shaken.is_empty());
        // Its threads are dead: it cannot be dropped.
        std::mem::forget(self.store.take());
        self.epoch = None;
    }

    /// Segments with pages may become zeros after a clean close. Returns whether some did: then the
    /// next opening must notice it, and is the last one.
    pub fn empty_segments(&mut self) -> bool {
        // A statement leaves out the segments whose header an opening could not write.
        let may_differ = self.world.setup.faults.fail_headers();
        let is_exact = self.expected.exactly && !may_differ && !self.held.is_empty();
        if !is_exact || !self.world.strikes(Class::Emptied, EMPTIED) {
            return false;
        }
        let mut all: Vec<(SegmentId, u64)> = std::mem::take(&mut self.held).into_iter().collect();
        let count = 1 + self.world.dice.below(all.len());
        let mut pages = 0;
        for _ in 0..count {
            let at = self.world.dice.below(all.len());
            let (segment, held) = all.swap_remove(at);
            self.world
                .note(held, || format!("{segment:?} becomes zeros"));
            let (volume, number) = self.world.volume_of(segment);
            let first = self.world.segment_first_block(number);
            let zeros = vec![Content::Zero; self.world.setup.segment_blocks as usize];
            self.world.disk.volumes()[volume].write(first, &zeros, || true);
            pages += held;
        }
        self.world.calm_down();
        self.emptied = Some((u32::try_from(count).expect("few segments"), pages));
        true
    }

    /// No page is stored whose key is erased.
    fn check_keys(&self) {
        if let Some(store) = &self.store {
            store.check_keys();
        }
    }

    /// No page leaves by an opening. Called before the first call of the store.
    pub fn check_nothing_left(&self) {
        self.try_core(|core| {
            let counters = core.counters();
            // A failed sync may leave no room for the pages that it concerns.
            let may_evict = counters.store.failed_syncs > 0;
            assert!(
                counters.store.evicted == 0 || may_evict,
                "pages are evicted by an opening"
            );
            let may_be_lost = self.world.setup.faults.spoils();
            assert!(
                counters.store.damaged == 0 || may_be_lost,
                "pages are dropped by an opening"
            );
        });
    }

    /// The run counts for nothing: it has changed no page.
    fn forget_epoch(&mut self) {
        self.epoch = None;
        self.expected.exactly = false;
    }

    /// A store that was open in part is closed.
    pub fn closed_partly(&mut self) {
        self.lives.closed();
        assert!(self.flights.is_empty(), "operations outlive the close");
        let mut expected = std::mem::take(&mut self.expected);
        self.world.expect_less(&mut expected);
        self.expected = expected;
        self.world.oracle.end_run(false);
        self.forget_epoch();
    }

    pub fn closed(&mut self) {
        self.lives.closed();
        self.leases.kept(|kept| kept.check_closed());
        let Some(epoch) = &self.epoch else { return };
        self.expected = self.world.expect_after_close(epoch);
        self.held.clear();
        let pages = self
            .world
            .snapshot(&epoch.index, &self.world.namespaces_by_slot(epoch));
        for (_, place, _) in pages.into_values() {
            *self.held.entry(place.segment).or_default() += 1;
        }
        let deletions = self.world.oracle.acked_deletions();
        self.world.oracle.deletions_durable(&deletions);
        self.world.oracle.end_run(false);
        let kept = self.expected.names.len();
        self.world
            .note(kept as u64, || format!("closed with {kept} pages"));
        assert!(self.flights.is_empty(), "operations outlive the close");
        let clean = self.world.disk.volumes();
        for (volume, known) in clean.iter().zip(&self.world.superblocks) {
            let states = blocks_of(volume.blocks()).map(|at| decode(volume.visible(at)));
            let is_clean = states.iter().flatten().any(|s| s.state == OpenState::Clean);
            let may_miss = self.world.setup.faults.spoils();
            assert!(
                known.is_none() || is_clean || may_miss,
                "closed, and not marked clean"
            );
        }
        drop(clean);
        self.epoch = None;
    }

    /// Counts the activities that a crash interrupts.
    fn count_phases(&mut self) {
        use SegmentState::{Free, Open, Sealed};
        let flies = |is: fn(What) -> bool| self.flights.iter().any(|flight| is(flight.what));
        let calls = |call: Call| self.calls.contains(&call);
        let is_reclaiming = self.try_core(Core::is_reclaiming);
        let is_open = self.phase == Phase::Open;
        let has_written = self.epoch.as_ref().is_some_and(|epoch| epoch.has_written);
        let phases = [
            (Class::CrashInOpen, self.phase == Phase::Opening),
            (Class::CrashBeforeFirstWrite, is_open && !has_written),
            (
                Class::CrashInPut,
                calls(Call::Put) && flies(|what| what == What::Pages),
            ),
            (Class::CrashInGroup, flies(|what| what == What::Descriptors)),
            (
                Class::CrashInSegmentOpening,
                flies(|what| what == What::Header(Open)),
            ),
            (
                Class::CrashInSeal,
                flies(|what| what == What::Header(Sealed)),
            ),
            (Class::CrashInFree, flies(|what| what == What::Header(Free))),
            (
                Class::CrashInSync,
                flies(|what| matches!(what, What::Sync(_))),
            ),
            (Class::CrashInReclaim, is_reclaiming == Some(true)),
            (Class::CrashInDelete, calls(Call::Delete)),
            (Class::CrashInFlush, calls(Call::Flush)),
            (Class::CrashInClose, self.phase == Phase::Closing),
            (Class::CrashAtRest, self.flights.is_empty()),
        ];
        for (class, _) in phases.into_iter().filter(|(_, is)| *is) {
            self.world.count(class);
        }
    }

    /// The store is closed: its counters count, and its evictions are recorded.
    pub fn end_counts(&mut self) {
        if let Some(epoch) = &self.epoch {
            self.try_core(|core| self.world.check_evictions(epoch, core));
        }
        let unwritten = self.try_core(Core::unwritten_departures);
        if let (Some(epoch), Some(unwritten)) = (&mut self.epoch, unwritten) {
            epoch.unwritten = unwritten;
        }
        self.sum_up();
    }

    fn sum_up(&mut self) {
        if let Some(counters) = self.try_core(Core::counters) {
            let totals = &mut self.world.totals;
            totals.evicted += counters.store.evicted;
            totals.moved += counters.store.moved;
            totals.reclaimed += counters.store.reclaimed;
            totals.failed_syncs += counters.store.failed_syncs;
        }
    }
}
