//! How a run ends: in a crash, a clean close, or a time without faults in which everything must come to rest.

use std::collections::{BTreeMap, BTreeSet};

use larder_engine::capacity::{footprint, segments_min};
use larder_engine::core::Core;
use larder_engine::format::{OpenState, SegmentState};
use larder_engine::index::Place;

use crate::classes::Class;
use crate::clients::{Request, Task};
use crate::disk::{Arrival, Content, SimVolume, contents};
use crate::opening::CUTS_A_VOLUME;
use crate::oracle::{Name, Version, VersionId};
use crate::setup::BLOCK;
use crate::superblocks::{Cut, CutShort};
use crate::world::{Flight, Live, World};

/// Steps in which everything must come to rest once nothing goes wrong any more.
const REST_STEPS_MAX: usize = 100_000;

/// Steps within which a close that is cut short is.
const CLOSE_STEPS: usize = 80;

/// What the next recovery must find.
#[derive(Default)]
pub struct Expected {
    /// By name: whether it must survive a power loss too.
    pub names: BTreeMap<Name, bool>,
    /// What those are, and where they lie.
    pub pages: BTreeMap<Name, (VersionId, Place)>,
    /// After a clean close: exactly these.
    pub exactly: bool,
    pub all: BTreeSet<Name>,
    /// Those that were not proven at that close.
    pub unproven: BTreeSet<Name>,
}

impl World {
    /// What a recovery after this moment must find.
    fn expect(&self, live: &Live, power: bool) -> Expected {
        let mut expected = Expected::default();
        let pages = self.snapshot(&live.index, &self.namespaces_by_slot(live));
        for (name, (version, place, _)) in pages {
            let durable = self.oracle.version(version).durable;
            if !self.is_excused(name, version, place) && (durable || !power) {
                expected.names.insert(name, durable);
                expected.pages.insert(name, (version, place));
            }
        }
        expected
    }

    /// Whether a fault touched a page, so that it may be gone.
    fn is_excused(&self, name: Name, version: VersionId, place: Place) -> bool {
        let known = self.oracle.version(version);
        // Until it is durable itself, what it replaced may come back, or what came between the two.
        let older_is_bad = known.in_place_of.is_some_and(|(older, segment)| {
            self.has_bad_bytes(self.oracle.version(older))
                || self.has_bad_successor(older)
                || self.tainted.contains(&segment)
        });
        // With metadata spoiled, the record of an old eviction may vanish and come back.
        let left = self
            .left
            .get(&name)
            .is_some_and(|at| known.reserved_at <= *at);
        self.oracle.spoiled && left
            || self.has_bad_bytes(known)
            || older_is_bad
            || known.torn
            || self.has_bad_successor(version)
            || self.tainted.contains(&place.segment)
            || !known.durable && (known.dropped || self.shaken.contains(&place.segment))
    }

    /// Somewhere it lies, or a copy of it, with other bytes, and may be what is found: the device spoiled them, or refused them where
    /// nothing says so any more.
    fn has_bad_bytes(&self, version: &Version) -> bool {
        version.rotten || version.refused && self.unsealed
    }

    /// A later version of the page may come back in its place so.
    fn has_bad_successor(&self, version: VersionId) -> bool {
        let is_bad = |later: &Version| self.has_bad_bytes(later);
        self.oracle.has_successor(version, is_bad)
    }

    /// Faults have happened since that was expected.
    pub fn expect_less(&self, expected: &mut Expected) {
        let pages = &expected.pages;
        expected.names.retain(|name, _| {
            let (version, place) = pages[name];
            !self.is_excused(*name, version, place)
        });
    }

    pub fn crash(&mut self, live: Live, power: bool) -> Expected {
        self.lose_begun();
        self.totals.crashes += 1;
        self.count(if power { Class::Power } else { Class::Kill });
        self.count_phases(&live);
        self.check_all(&live);
        self.sum_up(&live);
        let expected = self.expect(&live, power);
        self.note(u64::from(power), || {
            let what = if power {
                "the power goes"
            } else {
                "the process is killed"
            };
            format!("{what}, {} pages must survive", expected.names.len())
        });
        let mut flights = live.flights;
        while !flights.is_empty() {
            let at = self.dice.below(flights.len());
            let (Flight::Meta {
                volume,
                start,
                blocks,
                ..
            }
            | Flight::Data {
                volume,
                start,
                blocks,
                ..
            }) = flights.swap_remove(at).flight
            else {
                continue;
            };
            let arrival = self.draw_tear(blocks.len());
            self.tear(volume, start, &blocks, &arrival);
        }
        if power {
            // Every process is gone with it.
            for foreign in std::mem::take(&mut self.foreign) {
                let write = foreign.write;
                let arrival = self.draw_tear(write.blocks.len());
                self.tear(write.volume, write.start, &write.blocks, &arrival);
            }
            self.lose_power();
        }
        // Where a failed sync took what recovery finds a segment by, what was written behind it is lost with it.
        self.oracle.end_run(power || !self.shaken.is_empty());
        expected
    }

    /// What a crash leaves of a write in flight.
    pub fn tear(&mut self, volume: usize, start: usize, blocks: &[Content], arrival: &Arrival) {
        let is_metadata = blocks
            .iter()
            .any(|block| matches!(block, Content::Bytes(_)));
        self.torn_inside |= is_metadata && matches!(arrival, Arrival::Prefix(_, 1..));
        self.disk.volumes()[volume].write_part(start, blocks, arrival);
    }

    /// The power goes on every volume.
    pub fn lose_power(&mut self) {
        let mut dice = self.dice.fork();
        let mut kept_some = false;
        for volume in self.disk.volumes().iter_mut() {
            kept_some |= volume.lose_power(&mut dice);
        }
        if kept_some {
            self.count(Class::PowerKeptSome);
        }
    }

    /// Whether a crash at a moment of its own choice takes the power with it.
    pub fn draws_power(&mut self) -> bool {
        let (kill, power) = (self.setup.faults.kill, self.setup.faults.power);
        power > 0.0 && (kill == 0.0 || self.dice.chance(0.5))
    }

    /// What the store was doing when it was cut off.
    fn count_phases(&mut self, live: &Live) {
        use SegmentState::{Free, Open, Sealed};
        let in_flight = |is: fn(&Flight) -> bool| live.flights.iter().any(|f| is(&f.flight));
        let is_client = |is: fn(&Task) -> bool| live.clients.iter().flatten().any(is);
        let phases = [
            (Class::CrashBeforeFirstWrite, !live.has_written),
            (
                Class::CrashInPut,
                in_flight(|f| {
                    matches!(
                        f,
                        Flight::Data {
                            client: Some(_),
                            ..
                        }
                    )
                }),
            ),
            (
                Class::CrashInGroup,
                in_flight(|f| matches!(f, Flight::Meta { header: None, .. })),
            ),
            (
                Class::CrashInSegmentOpening,
                in_flight(|f| {
                    matches!(
                        f,
                        Flight::Meta {
                            header: Some(Open),
                            ..
                        }
                    )
                }),
            ),
            (
                Class::CrashInSeal,
                in_flight(|f| {
                    matches!(
                        f,
                        Flight::Meta {
                            header: Some(Sealed),
                            ..
                        }
                    )
                }),
            ),
            (
                Class::CrashInFree,
                in_flight(|f| {
                    matches!(
                        f,
                        Flight::Meta {
                            header: Some(Free),
                            ..
                        }
                    )
                }),
            ),
            (
                Class::CrashInSync,
                in_flight(|f| matches!(f, Flight::Sync { .. })),
            ),
            (Class::CrashInReclaim, live.core.is_reclaiming()),
            (
                Class::CrashInDelete,
                is_client(|task| matches!(task, Task::Request(_, Request::Delete))),
            ),
            (
                Class::CrashInFlush,
                is_client(|task| matches!(task, Task::Request(_, Request::Flush { .. }))),
            ),
            (Class::CrashInClose, live.stopping),
            (Class::CrashAtRest, live.flights.is_empty()),
        ];
        for (class, _) in phases.into_iter().filter(|(_, is)| *is) {
            self.count(class);
        }
    }

    fn sum_up(&mut self, live: &Live) {
        let counters = live.core.counters();
        self.totals.evicted += counters.evicted;
        self.totals.moved += counters.moved;
        self.totals.reclaimed += counters.reclaimed;
        self.totals.failed_syncs += counters.failed_syncs;
    }

    /// Closes in order, as far as the device lets it; else as after a kill.
    pub fn close(&mut self, mut live: Live) -> Expected {
        self.note(0, || "closing".to_owned());
        live.closing = self.draw_cut(CLOSE_STEPS);
        match self.close_in_order(&mut live) {
            Ok(expected) => expected,
            Err(CutShort) => {
                live.stopping = true;
                let power = self.draws_power();
                self.crash(live, power)
            }
        }
    }

    fn come_to_rest(&mut self, live: &mut Live) -> Result<(), CutShort> {
        let is_idle = |live: &Live| live.core.is_idle() && live.flights.is_empty();
        for _ in 0..REST_STEPS_MAX / 10 {
            if !is_idle(live) {
                self.step(live, false);
            }
        }
        if is_idle(live) {
            return Ok(());
        }
        // Without the housekeeper nobody rewrites what a failed sync may have lost.
        let failed = live.core.counters().failed_syncs;
        assert!(failed > 0, "the core does not come to rest");
        Err(CutShort)
    }

    fn close_in_order(&mut self, live: &mut Live) -> Result<Expected, CutShort> {
        let is_at_rest = |live: &Live| live.clients.iter().all(Option::is_none);
        self.rest(live, "callers finish", is_at_rest)?;
        self.stop_keeper(live);
        self.rest(live, "the housekeeper stops", Live::keeper_rests)?;
        // As the store does: what found no room at first may find it in a segment that has been given back since.
        for _ in 0..2 {
            self.with_core(live, Core::write_evictions);
            let flushes = self.totals.flushes;
            self.begin_flush(live, 0);
            self.rest(live, "the last flush finishes", is_at_rest)?;
            if self.totals.flushes == flushes {
                return Err(CutShort);
            }
            self.come_to_rest(live)?;
        }
        self.mark_clean(live)?;
        self.check_evictions(live);
        self.sum_up(live);
        let expected = self.expect_after_close(live);
        let deletions = self.oracle.acked_deletions();
        self.oracle.deletions_durable(&deletions);
        self.oracle.end_run(false);
        self.note(expected.names.len() as u64, || {
            format!("closed with {} pages", expected.names.len())
        });
        Ok(expected)
    }

    /// The headers of open segments, a sync, the superblocks.
    fn mark_clean(&mut self, live: &mut Live) -> Result<(), CutShort> {
        let headers = live.core.closing_headers().expect("memory");
        let moments = headers.len() + CUTS_A_VOLUME * self.superblocks.len();
        let mut cut = self.draw_cut(moments);
        for (volume, offset, bytes) in &headers {
            let start = usize::try_from(*offset).unwrap() / BLOCK;
            if !self.write_header_now(*volume, start, &contents(bytes), &mut cut)? {
                return Err(CutShort);
            }
        }
        for volume in 0..self.superblocks.len() {
            if self.superblocks[volume].is_some() {
                self.sync_volume(volume)?;
            }
        }
        self.update_superblocks(&mut cut, |superblock| superblock.state = OpenState::Clean)
    }

    fn expect_after_close(&mut self, live: &Live) -> Expected {
        let mut expected = self.expect(live, false);
        let faults = &self.setup.faults;
        expected.exactly = !faults.spoils() && !faults.misleads();
        let pages = self.snapshot(&live.index, &self.namespaces_by_slot(live));
        expected.all = pages.keys().copied().collect();
        for name in expected.names.keys().copied().collect::<Vec<_>>() {
            if let Some(version) = self.current(live, name) {
                self.oracle.version_mut(version).durable = true;
            }
            expected.names.insert(name, true);
        }
        // What was not proven and has not been written since stays so: a verified read is not written down.
        expected.unproven = pages
            .into_iter()
            .filter(|(name, (_, place, _))| live.unproven.get(name) == Some(place))
            .map(|(name, _)| name)
            .collect();
        expected
    }

    /// Steps, nothing new beginning, until `done`.
    fn rest(
        &mut self,
        live: &mut Live,
        what: &str,
        done: impl Fn(&Live) -> bool,
    ) -> Result<(), CutShort> {
        for _ in 0..REST_STEPS_MAX {
            if done(live) {
                return Ok(());
            }
            if live.closing.is_now() {
                return Err(CutShort);
            }
            self.step(live, false);
        }
        panic!("stuck: {what}");
    }

    /// Without faults everything ends, a flush succeeds, and pages can be put. False when failed syncs have left a full store with
    /// nothing to rewrite into: it says so at each flush, and must be opened again.
    pub fn rest_for_good(&mut self, live: &mut Live) -> bool {
        self.calm_down();
        live.closing = Cut::never();
        self.note(0, || "nothing goes wrong from here on".to_owned());
        self.settle_down(live);
        if !self.flush_for_good(live) {
            let (counters, space) = (live.core.counters(), live.core.space_view());
            let is_full = counters.failed_syncs > 0 && space.free_segments == 0;
            assert!(
                is_full || self.is_sick(),
                "flushes go on failing: {counters:?}, {space:?}"
            );
            return false;
        }
        // Segments that cannot be read are left alone; too few others are no store.
        let space = live.core.space_view();
        let sound = space.segments - space.unreadable_segments;
        let puts = if sound < segments_min(self.setup.volumes.len()) || self.is_sick() {
            0
        } else {
            40
        };
        for _ in 0..puts {
            let name = Name(self.dice.below(self.oracle.names()));
            let namespace = self.oracle.name(name).namespace;
            self.name_namespace(live, namespace);
            self.put_for_good(live, namespace, name);
        }
        assert!(self.flush_for_good(live), "the last flush fails");
        true
    }

    /// A block cannot be read: a segment that cannot be emptied for that is no room.
    fn is_sick(&self) -> bool {
        self.disk.volumes().iter().any(SimVolume::is_sick)
    }

    fn settle_down(&mut self, live: &mut Live) {
        let rests = self.rest(live, "everything ends", |live| {
            live.clients.iter().all(Option::is_none)
                && live.flights.is_empty()
                && !live.reclaim
                && live.keeper_rests()
                && live.settled.is_empty()
        });
        assert!(rests.is_ok(), "nothing is cut short any more");
    }

    fn flush_for_good(&mut self, live: &mut Live) -> bool {
        for _ in 0..20 {
            let flushes = self.totals.flushes;
            self.begin_flush(live, 0);
            self.settle_down(live);
            if self.totals.flushes > flushes {
                return true;
            }
            self.now_ms += 1000;
        }
        false
    }

    /// With its ancestors it is more than the store keeps.
    fn is_out_of_reach(&self, live: &Live, namespace: usize, name: Name) -> bool {
        let page_blocks = self.setup.namespaces[namespace].shape().page_blocks();
        let chain = u64::from(self.oracle.name(name).depth) + 1;
        chain * footprint(self.setup.segment_blocks, page_blocks)
            > live.core.space_view().usable_blocks
    }

    fn put_for_good(&mut self, live: &mut Live, namespace: usize, name: Name) {
        for _ in 0..50 {
            self.begin_put(live, 0, namespace, vec![name], false);
            self.settle_down(live);
            if self.current(live, name).is_some() || self.is_out_of_reach(live, namespace, name) {
                return;
            }
            // Leases lapse, and the housekeeper gets its turn.
            self.now_ms += 1000;
            for _ in 0..200 {
                self.step(live, false);
            }
        }
        panic!(
            "a put goes on being refused though nothing goes wrong any more: {:?}",
            live.core.space_view()
        );
    }
}
