//! How a run ends: in a crash, a clean close, or a time without faults in which everything must come to rest.

use std::collections::{BTreeMap, BTreeSet};

use larder_engine::core::{Core, segments_min};

use crate::disk::contents;
use crate::keeper::Keeper;
use crate::oracle::Name;
use crate::setup::BLOCK;
use crate::world::{Flight, Live, World};

/// Steps in which everything must come to rest once nothing goes wrong any more.
const REST_STEPS_MAX: usize = 100_000;

/// What the next recovery must find.
pub struct Expected {
    /// By name: whether it must survive a power loss too.
    pub names: BTreeMap<Name, bool>,
    /// After a clean close: exactly these.
    pub exactly: bool,
    pub all: BTreeSet<Name>,
    /// Those that were not proven at that close.
    pub unproven: BTreeSet<Name>,
}

impl World {
    /// What a recovery after this moment must find.
    fn expect(&self, live: &Live, power: bool) -> Expected {
        let pages = self.snapshot(&live.index, &self.namespaces_by_slot(live));
        let mut names = BTreeMap::new();
        for (name, (version, place, _)) in pages {
            let known = self.oracle.version(version);
            let older = known.in_place_of.map(|older| self.oracle.version(older));
            // With metadata spoiled, the record of an old eviction may vanish and come back.
            let left = self.oracle.spoiled && self.left.contains(&name);
            let excused = left
                || known.rotten
                || older.is_some_and(|older| older.rotten)
                || known.torn
                || self.tainted.contains(&place.segment)
                || !known.durable && (known.dropped || self.shaken.contains(&place.segment));
            if !excused && (known.durable || !power) {
                names.insert(name, known.durable);
            }
        }
        Expected {
            names,
            exactly: false,
            all: BTreeSet::new(),
            unproven: BTreeSet::new(),
        }
    }

    pub fn crash(&mut self, live: Live, power: bool) -> Expected {
        self.totals.crashes += 1;
        self.count(&live);
        let expected = self.expect(&live, power);
        self.note(u64::from(power), || {
            let what = if power {
                "the power goes"
            } else {
                "the process is killed"
            };
            format!("{what}, {} pages must survive", expected.names.len())
        });
        let mut dice = self.dice.fork();
        let keep = dice.pick(&[0.0, 0.5, 1.0]);
        let whole = dice.chance(0.5);
        let mut flights = live.flights;
        while !flights.is_empty() {
            let flight = flights.swap_remove(dice.below(flights.len()));
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
            }) = flight
            else {
                continue;
            };
            let all = dice.chance(keep);
            self.disk.volumes()[volume].write(start, &blocks, || {
                if whole { all } else { dice.chance(keep) }
            });
        }
        if power {
            for volume in self.disk.volumes().iter_mut() {
                volume.lose_power(&mut dice);
            }
        }
        // Where a failed sync took what recovery finds a segment by, what was written behind it is lost with it.
        self.oracle.end_run(power || !self.shaken.is_empty());
        expected
    }

    fn count(&mut self, live: &Live) {
        let counters = live.core.counters();
        self.totals.evicted += counters.evicted;
        self.totals.moved += counters.moved;
        self.totals.reclaimed += counters.reclaimed;
        self.totals.failed_syncs += counters.failed_syncs;
    }

    /// Closes in order, as far as the device lets it; else as after a kill.
    pub fn close(&mut self, mut live: Live) -> Expected {
        self.note(0, || "closing".to_owned());
        let is_at_rest = |live: &Live| live.clients.iter().all(Option::is_none);
        self.rest(&mut live, "callers finish", is_at_rest);
        live.stopping = true;
        self.rest(&mut live, "the housekeeper stops", |live| {
            matches!(live.keeper, Keeper::Idle)
        });
        self.with_core(&mut live, Core::write_evictions);
        let flushes = self.totals.flushes;
        self.begin_flush(&mut live, 0);
        self.rest(&mut live, "the last flush finishes", is_at_rest);
        if self.totals.flushes == flushes {
            return self.crash(live, false);
        }
        let is_idle = |live: &Live| live.core.is_idle() && live.flights.is_empty();
        for _ in 0..REST_STEPS_MAX / 10 {
            if !is_idle(&live) {
                self.step(&mut live, false);
            }
        }
        if !is_idle(&live) {
            // Without the housekeeper nobody rewrites what a failed sync may have lost.
            let failed = live.core.counters().failed_syncs;
            assert!(failed > 0, "the core does not come to rest");
            return self.crash(live, false);
        }
        if self.fault(self.setup.faults.sync_error) {
            return self.crash(live, false);
        }
        let headers = live.core.closing_headers().expect("memory");
        {
            let mut volumes = self.disk.volumes();
            for (volume, offset, bytes) in &headers {
                let start = usize::try_from(*offset).unwrap() / BLOCK;
                volumes[*volume].write(start, &contents(bytes), || true);
            }
            for volume in volumes.iter_mut() {
                let all = volume.unsynced();
                volume.synced(all);
            }
        }
        self.check_evictions(&live);
        self.mark_clean();
        self.count(&live);
        let mut expected = self.expect(&live, false);
        expected.exactly = !self.setup.faults.spoils()
            && self.setup.faults.misdirected_read == 0.0
            && self.setup.faults.sync_error == 0.0;
        expected.all = self
            .snapshot(&live.index, &self.namespaces_by_slot(&live))
            .into_keys()
            .collect();
        for name in expected.names.keys().copied().collect::<Vec<_>>() {
            if let Some(version) = self.current(&live, name) {
                self.oracle.version_mut(version).durable = true;
            }
            expected.names.insert(name, true);
        }
        // What was not proven and has not been written since stays so: a verified read is not written down.
        expected.unproven = self
            .snapshot(&live.index, &self.namespaces_by_slot(&live))
            .into_iter()
            .filter(|(name, (_, place, _))| live.unproven.get(name) == Some(place))
            .map(|(name, _)| name)
            .collect();
        let deletions = self.oracle.acked_deletions();
        self.oracle.deletions_durable(&deletions);
        self.oracle.end_run(false);
        self.note(expected.names.len() as u64, || {
            format!("closed with {} pages", expected.names.len())
        });
        expected
    }

    /// Steps, nothing new beginning, until `done`.
    fn rest(&mut self, live: &mut Live, what: &str, done: impl Fn(&Live) -> bool) {
        for _ in 0..REST_STEPS_MAX {
            if done(live) {
                return;
            }
            self.step(live, false);
        }
        panic!("stuck: {what}");
    }

    /// Without faults everything ends, a flush succeeds, and pages can be put. False when failed syncs have left a full store with
    /// nothing to rewrite into: it says so at each flush, and must be opened again.
    pub fn rest_for_good(&mut self, live: &mut Live) -> bool {
        self.calm = true;
        self.note(0, || "nothing goes wrong from here on".to_owned());
        self.settle_down(live);
        if !self.flush_for_good(live) {
            let (counters, space) = (live.core.counters(), live.core.space_view());
            let is_full = counters.failed_syncs > 0 && space.free_segments == 0;
            assert!(is_full, "flushes go on failing: {counters:?}, {space:?}");
            return false;
        }
        // Segments that cannot be read are left alone; too few others are no store.
        let space = live.core.space_view();
        let sound = space.segments - space.unreadable_segments;
        let puts = if sound < segments_min(self.setup.volumes.len()) {
            0
        } else {
            40
        };
        for _ in 0..puts {
            let name = Name(self.dice.below(self.oracle.names()));
            let namespace = self.oracle.name(name).namespace;
            self.put_for_good(live, namespace, name);
        }
        assert!(self.flush_for_good(live), "the last flush fails");
        true
    }

    fn settle_down(&mut self, live: &mut Live) {
        self.rest(live, "everything ends", |live| {
            live.clients.iter().all(Option::is_none)
                && live.flights.is_empty()
                && !live.reclaim
                && matches!(live.keeper, Keeper::Idle)
                && live.settled.is_empty()
        });
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

    fn put_for_good(&mut self, live: &mut Live, namespace: usize, name: Name) {
        for _ in 0..50 {
            self.begin_put(live, 0, namespace, vec![name], false);
            self.settle_down(live);
            if self.current(live, name).is_some() {
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
