//! The end of a run: a crash, a clean close, or a time without faults in which everything must come
//! to rest.

use std::collections::{BTreeMap, BTreeSet};

use larder_engine::capacity::{footprint, segments_min};
use larder_engine::core::Core;
use larder_engine::format::{OpenState, SegmentState};
use larder_engine::index::Place;
use larder_sim_runtime::medium::{Arrival, Content, Medium, contents};

use crate::classes::Class;
use crate::clients::{Request, Task};
use crate::opening::CUTS_A_VOLUME;
use crate::oracle::{Name, Version, VersionId};
use crate::setup::BLOCK;
use crate::superblocks::{Cut, CutShort};
use crate::world::{Epoch, Flight, Live, World};

/// Steps in which everything must come to rest once faults have stopped.
const REST_STEPS_MAX: usize = 100_000;

/// An interrupted close is cut short within this many steps.
const CLOSE_STEPS: usize = 80;

/// The state that the next recovery must find.
#[derive(Default)]
pub struct Expected {
    /// By name: whether the page must survive a power loss too.
    pub names: BTreeMap<Name, bool>,
    /// The versions of these pages, and their locations.
    pub pages: BTreeMap<Name, (VersionId, Place)>,
    /// After a clean close: recovery must find every page in `all`.
    pub exactly: bool,
    pub all: BTreeSet<Name>,
    /// Pages that were not proven at that close.
    pub unproven: BTreeSet<Name>,
}

impl World {
    /// The state that a recovery after this moment must find.
    pub fn expect(&self, live: &Epoch, power: bool) -> Expected {
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
        // Until this version itself is durable, an older version may come back, or one between the
        // two.
        let older_is_bad = known.in_place_of.is_some_and(|(older, segment)| {
            self.has_bad_bytes(self.oracle.version(older))
                || self.has_bad_successor(older)
                || self.tainted.contains(&segment)
        });
        // With spoiled metadata the record of an old eviction may vanish and come back.
        let left = self.left.get(&name).is_some_and(|at| known.begun_at <= *at);
        self.oracle.spoiled && left
            || self.has_bad_bytes(known)
            || older_is_bad
            || known.torn
            || self.has_bad_successor(version)
            || self.tainted.contains(&place.segment)
            || !known.durable && (known.dropped || self.shaken.contains(&place.segment))
    }

    /// The page, or a copy of it, has wrong bytes somewhere, and recovery may find these: the
    /// device spoiled the bytes, or it refused a write and no record of the failure is left.
    fn has_bad_bytes(&self, version: &Version) -> bool {
        version.rotten || version.refused && self.unsealed
    }

    /// A later version of the page with wrong bytes may come back in its place.
    fn has_bad_successor(&self, version: VersionId) -> bool {
        let is_bad = |later: &Version| self.has_bad_bytes(later);
        self.oracle.has_successor(version, is_bad)
    }

    /// Removes pages that faults have excused since the expectation was computed.
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
                "power lost"
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
            self.lose_power();
        }
        // A failed sync may have dropped the header or first block by which recovery finds a
        // segment. Everything that was written behind it is lost too.
        self.oracle.end_run(power || !self.shaken.is_empty());
        expected
    }

    /// Writes the part of a write in flight that a crash leaves.
    pub fn tear(&mut self, volume: usize, start: usize, blocks: &[Content], arrival: &Arrival) {
        let is_metadata = blocks
            .iter()
            .any(|block| matches!(block, Content::Bytes(_)));
        self.torn_inside |= is_metadata && matches!(arrival, Arrival::Prefix(_, 1..));
        self.disk.volumes()[volume].write_part(start, blocks, arrival);
    }

    /// The power fails on every volume.
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

    /// Whether a crash at a free moment is a power loss.
    pub fn draws_power(&mut self) -> bool {
        let (kill, power) = (self.setup.faults.kill, self.setup.faults.power);
        power > 0.0 && (kill == 0.0 || self.dice.chance(0.5))
    }

    /// Counts the activities that the crash interrupted.
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

    /// Closes in order, as far as the device allows it. Otherwise the close ends as a kill.
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
        // Without the housekeeper, data that a failed sync may have lost is not rewritten.
        let failed = live.core.counters().failed_syncs;
        assert!(failed > 0, "the core does not come to rest");
        Err(CutShort)
    }

    fn close_in_order(&mut self, live: &mut Live) -> Result<Expected, CutShort> {
        let is_at_rest = |live: &Live| live.clients.iter().all(Option::is_none);
        self.rest(live, "callers finish", is_at_rest)?;
        self.stop_keeper(live);
        self.rest(live, "the housekeeper stops", Live::keeper_rests)?;
        // As the store does: records that found no room at first may find it in a segment that was
        // released since.
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

    pub fn expect_after_close(&mut self, live: &Epoch) -> Expected {
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
        // Unproven pages that were not written since stay unproven: a verified read is not recorded
        // on disk.
        expected.unproven = pages
            .into_iter()
            .filter(|(name, (_, place, _))| live.unproven.get(name) == Some(place))
            .map(|(name, _)| name)
            .collect();
        expected
    }

    /// Steps until `done`. Nothing new begins.
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

    /// Without faults everything ends, a flush succeeds, and pages can be put. Returns false if
    /// failed syncs have left a full store without space to rewrite pages. Each flush reports that,
    /// and the store must be opened again.
    pub fn rest_for_good(&mut self, live: &mut Live) -> bool {
        self.calm_down();
        live.closing = Cut::never();
        self.note(0, || "no faults from here on".to_owned());
        self.settle_down(live);
        if !self.flush_for_good(live) {
            let (counters, space) = (live.core.counters(), live.core.space_view());
            let is_full = counters.failed_syncs > 0 && space.free_segments == 0;
            assert!(
                is_full || self.is_sick(),
                "flushes still fail: {counters:?}, {space:?}"
            );
            return false;
        }
        // Unreadable segments stay out of use. If too few others are left, no put can succeed.
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

    /// A block is unreadable: a segment that cannot be emptied for that reason gives no space.
    fn is_sick(&self) -> bool {
        self.disk.volumes().iter().any(Medium::is_sick)
    }

    fn settle_down(&mut self, live: &mut Live) {
        let rests = self.rest(live, "everything ends", |live| {
            live.clients.iter().all(Option::is_none)
                && live.flights.is_empty()
                && !live.reclaim
                && live.keeper_rests()
                && live.settled.is_empty()
        });
        assert!(rests.is_ok(), "a run without faults is cut short");
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

    /// Whether the page's whole chain is larger than the store.
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
            "a put is still refused without faults: {:?}",
            live.core.space_view()
        );
    }
}
