//! A seed from its first open to its last check: steps, crashes, recoveries, and at the end a time without faults in which
//! everything must come to rest.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use larder_engine::core::{Core, segments_min};
use larder_engine::format::{Body, DescriptorBlock, OpenState, Record};
use larder_engine::index::Index;
use larder_engine::recovery::{Recovery, recover};

use super::clients::Task;
use super::dice::mix;
use super::disk::{Content, contents};
use super::keeper::Keeper;
use super::oracle::{Name, VersionId};
use super::setup::BLOCK;
use super::world::{Flight, Journal, Live, Totals, World};

/// Steps in which everything must come to rest once nothing goes wrong any more.
const REST_STEPS_MAX: usize = 100_000;

/// What the next recovery must find.
struct Expected {
    /// By name: whether it must survive a power loss too.
    names: BTreeMap<Name, bool>,
    /// After a clean close: exactly these.
    exactly: bool,
    all: BTreeSet<Name>,
    /// Those that were not proven at that close.
    unproven: BTreeSet<Name>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Kill,
    Power,
    Close,
    Done,
}

/// Plays a seed. Returns a digest of all that happened, and what that was.
pub fn play(seed: u64, journal: Option<Journal>) -> (u64, Totals) {
    let mut world = World::new(seed, journal);
    let mut expected = Expected {
        names: BTreeMap::new(),
        exactly: true,
        all: BTreeSet::new(),
        unproven: BTreeSet::new(),
    };
    let mut steps = world.setup.steps;
    loop {
        let Some(mut live) = world.open(&mut expected) else {
            continue;
        };
        match world.live(&mut live, &mut steps) {
            End::Close => expected = world.close(live),
            End::Done => {
                world.rest_for_good(&mut live);
                expected = world.crash(live, true);
                world
                    .open(&mut expected)
                    .expect("nothing goes wrong any more");
                break;
            }
            end => expected = world.crash(live, end == End::Power),
        }
    }
    let digest = world
        .disk
        .volumes()
        .iter()
        .fold(world.digest, |digest, volume| mix(digest, volume.digest()));
    (digest, world.totals)
}

impl World {
    // ---- opening

    /// Recovers, checks what that found, and begins a run; `None` when a crash comes in between.
    fn open(&mut self, expected: &mut Expected) -> Option<Live> {
        self.totals.opens += 1;
        let segments: u32 = self.setup.volumes.iter().sum();
        let index = Arc::new(Index::new(
            segments as usize,
            u64::from(segments * self.setup.segment_blocks),
        ));
        let superblocks: Vec<_> = self.superblocks.iter().map(Some).collect();
        let recovery = recover(&*self.disk, &superblocks, &index, false);
        let newest = self.superblocks.iter().map(|s| s.run).max();
        let is_behind = self.superblocks.iter().any(|s| Some(s.run) != newest);
        assert!(
            !is_behind || Some(recovery.highest_run) < newest,
            "an open would refuse a volume as stale"
        );
        self.note(index.len() as u64, || {
            format!(
                "recovered {} pages, {} unproven, {} damaged, first {}",
                index.len(),
                recovery.unproven,
                recovery.damage.len(),
                recovery.recovered.first
            )
        });
        self.check_recovered(&recovery, &index, expected);
        self.check_reader(&recovery);
        if !self.begin_run(&recovery, expected) {
            return None;
        }
        let first = recovery.recovered.first;
        let core = Core::new(self.config(), recovery.recovered, index.clone());
        let mut live = Live::new(core, index, self.setup.clients, first);
        for namespace in self.setup.namespaces.clone() {
            let id = self
                .with_core(&mut live, |core| core.open_namespace(&namespace))
                .expect("few namespaces");
            live.slots.push(id.into());
        }
        live.unproven = self
            .snapshot(&live.index, &self.namespaces_by_slot(&live))
            .into_iter()
            .map(|(name, (_, place, _))| (name, place))
            .collect();
        self.with_core(&mut live, Core::start);
        self.check(&live);
        Some(live)
    }

    fn check_recovered(&mut self, recovery: &Recovery, index: &Index, expected: &Expected) {
        index.check_invariants().unwrap();
        let spoils = self.setup.faults.spoils();
        // A descriptor write that fails leaves a hole that nobody can tell from a lost one.
        let faults = &self.setup.faults;
        if !spoils && faults.meta_error == 0.0 && faults.sync_error == 0.0 {
            assert!(
                recovery.damage.is_empty(),
                "damage after a mere crash: {:?}",
                recovery.damage
            );
        }
        let namespaces: Vec<usize> = recovery
            .recovered
            .namespaces
            .iter()
            .map(|init| self.namespace_of(init.fingerprint))
            .collect();
        let pages = self.snapshot(index, &namespaces);
        let mut bad = BTreeSet::new();
        for (name, (version, place, unproven)) in &pages {
            self.totals.unproven += u64::from(*unproven);
            assert!(
                !expected.exactly
                    || !unproven
                    || expected.unproven.contains(name)
                    || !expected.all.contains(name)
                    || self.setup.faults.fail_writes(),
                "{version:?} of {name:?} is unproven after a clean close"
            );
            assert!(
                !self.oracle.is_dead(*version),
                "{version:?} of {name:?} came back from the dead at {place:?}"
            );
            if self.is_intact(*version, *place) {
                continue;
            }
            self.totals.torn += 1;
            bad.insert(*name);
            let known = self.oracle.version(*version);
            // That a refused page is not proven stands in a header, which may have been refused or lost too.
            let unheaded = known.refused && (spoils || self.setup.faults.header_error > 0.0);
            assert!(
                *unproven || known.rotten || known.dropped || unheaded,
                "{version:?} of {name:?} at {place:?} is called proven, and is not whole"
            );
            self.oracle.version_mut(*version).torn = true;
        }
        for name in expected.names.keys() {
            let found = pages.get(name);
            assert!(
                found.is_some() && !bad.contains(name),
                "{name:?} is lost: recovery found {found:?}, {}",
                if bad.contains(name) {
                    "not whole"
                } else {
                    "whole"
                }
            );
        }
        if expected.exactly && !spoils {
            // More may be found: a page whose write failed, or one whose eviction found no room to be written down.
            let found: Vec<&Name> = pages
                .keys()
                .filter(|name| expected.all.contains(name))
                .collect();
            let wanted: Vec<&Name> = expected.all.iter().collect();
            assert_eq!(
                found, wanted,
                "a clean close and an open change what is there"
            );
        }
    }

    /// A reader beside the owner sees whole pages only.
    fn check_reader(&mut self, recovery: &Recovery) {
        let segments: u32 = self.setup.volumes.iter().sum();
        let index = Index::new(
            segments as usize,
            u64::from(segments * self.setup.segment_blocks),
        );
        let superblocks: Vec<_> = self.superblocks.iter().map(Some).collect();
        let reader = recover(&*self.disk, &superblocks, &index, true);
        let namespaces: Vec<usize> = reader
            .recovered
            .namespaces
            .iter()
            .map(|init| self.namespace_of(init.fingerprint))
            .collect();
        for (name, (version, place, _)) in self.snapshot(&index, &namespaces) {
            let known = self.oracle.version(version);
            let unheaded = known.refused
                && (self.setup.faults.spoils() || self.setup.faults.header_error > 0.0);
            assert!(
                known.rotten || known.dropped || unheaded || self.is_intact(version, place),
                "a reader is shown {version:?} of {name:?} at {place:?}, which is not whole"
            );
        }
        assert_eq!(
            reader.recovered.segments.len(),
            recovery.recovered.segments.len()
        );
    }

    /// Tells the volumes of the run and writes the headers that recovery asked for; false when a crash comes in between.
    fn begin_run(&mut self, recovery: &Recovery, expected: &mut Expected) -> bool {
        let crashes = self.setup.faults.power > 0.0 && !self.calm && self.dice.chance(0.1);
        let run = recovery.recovered.first.run();
        let told = if crashes {
            self.dice.below(self.superblocks.len() + 1)
        } else {
            usize::MAX
        };
        for superblock in self.superblocks.iter_mut().take(told) {
            superblock.run = run;
            superblock.state = OpenState::Open;
            superblock.generation += 1;
        }
        if told >= self.superblocks.len() {
            for (volume, header) in &recovery.adoptions {
                let mut bytes = vec![0; 2 * BLOCK];
                for copy in bytes.chunks_exact_mut(BLOCK) {
                    header.encode(copy.try_into().unwrap());
                }
                let start = self.segment_first_block(header.segment.0);
                self.disk.volumes()[*volume].write(start, &contents(&bytes), || true);
            }
        }
        if crashes {
            self.note(told as u64, || {
                format!("power loss in the opening, {told} volumes told")
            });
            let mut dice = self.dice.fork();
            for volume in self.disk.volumes().iter_mut() {
                volume.lose_power(&mut dice);
            }
            self.oracle.end_run(true);
            expected.names.retain(|_, durable| *durable);
            expected.exactly = false;
            return false;
        }
        for (volume, _) in &recovery.adoptions {
            let mut volumes = self.disk.volumes();
            let all = volumes[*volume].unsynced();
            volumes[*volume].synced(all);
        }
        true
    }

    // ---- stepping

    fn live(&mut self, live: &mut Live, steps: &mut usize) -> End {
        while *steps > 0 {
            *steps -= 1;
            self.totals.steps += 1;
            self.spoil();
            let faults = self.setup.faults.clone();
            for (probability, end) in [
                (faults.kill, End::Kill),
                (faults.power, End::Power),
                (faults.close, End::Close),
            ] {
                if self.fault(probability) {
                    return end;
                }
            }
            self.step(live, true);
        }
        End::Done
    }

    /// One step of something that can go on.
    fn step(&mut self, live: &mut Live, may_begin: bool) {
        let weights = self.setup.weights;
        let device = if live.flights.is_empty() {
            0
        } else {
            weights.device
        };
        let keeper = if self.keeper_can_go_on(live) {
            weights.keeper
        } else {
            0
        };
        let total = device + keeper + weights.clients + weights.clock;
        let draw = self.dice.below(total);
        if draw < device {
            let at = self.dice.below(live.flights.len());
            let flight = live.flights.swap_remove(at);
            self.arrive(live, flight);
        } else if draw < device + keeper {
            self.keep_house(live);
        } else if draw < device + keeper + weights.clients {
            let client = self.dice.below(live.clients.len());
            if live.clients[client].is_some() {
                self.go_on(live, client);
            } else if may_begin {
                self.begin_task(live, client);
            }
        } else {
            let most = self.setup.tick_ms;
            self.now_ms += self.dice.between(0, most);
            if let Some(at) = World::wakes_at(live).filter(|_| self.dice.chance(0.2)) {
                self.now_ms = self.now_ms.max(at);
            }
        }
        self.hear(live);
        self.check(live);
    }

    /// The device finishes something.
    fn arrive(&mut self, live: &mut Live, flight: Flight) {
        match flight {
            Flight::Meta {
                id,
                volume,
                start,
                blocks,
                is_header,
            } => {
                let faults = &self.setup.faults;
                let (error, lost) = if is_header {
                    (faults.header_error, faults.lost_write)
                } else {
                    (faults.meta_error, faults.lost_write)
                };
                let good = self.write(volume, start, &blocks, (error, lost));
                self.note(id.0, || {
                    format!("{id:?} written at {volume}:{start}: {good}")
                });
                live.failures += u64::from(!good);
                self.with_core(live, |core| core.io_done(id, good));
            }
            Flight::Data {
                client,
                asks,
                volume,
                start,
                blocks,
            } => {
                let faults = &self.setup.faults;
                let odds = (faults.data_error, faults.lost_write);
                let good = self.write(volume, start, &blocks, odds);
                live.failures += u64::from(!good);
                self.note(start as u64, || {
                    format!("data of {client:?} {asks:?} written at {volume}:{start}: {good}")
                });
                let landed = asks.into_iter().map(|ask| (ask, good));
                match client {
                    Some(client) => {
                        let Some(Task::Put(put)) = live.clients[client].as_mut() else {
                            panic!("a put ends before its writes");
                        };
                        put.flights -= 1;
                        put.landed.extend(landed);
                    }
                    None => {
                        let Keeper::Moving(moving) = &mut live.keeper else {
                            panic!("a move ends before its writes");
                        };
                        moving.flights -= 1;
                        moving.landed.extend(landed);
                    }
                }
            }
            Flight::Read {
                client,
                at,
                volume,
                start,
                count,
            } => {
                let misdirected = self.fault(self.setup.faults.misdirected_read);
                let from = if misdirected {
                    let last = self.disk.volumes()[volume].blocks() - count;
                    self.dice.below(last)
                } else {
                    start
                };
                let outcome = self.disk.volumes()[volume].read(from, count).ok_or(());
                let Some(Task::Get(get)) = live.clients[client].as_mut() else {
                    panic!("a get ends before its reads");
                };
                World::read_done(get, at, outcome, misdirected);
            }
            Flight::Sync { id, volume, covers } => {
                let good = !self.fault(self.setup.faults.sync_error);
                self.note(id.0, || format!("{id:?} sync of volume {volume}: {good}"));
                if good {
                    self.disk.volumes()[volume].synced(covers);
                } else {
                    live.failures += 1;
                    self.fail_sync(volume, covers);
                }
                self.with_core(live, |core| core.io_done(id, good));
            }
        }
    }

    /// A write arrives: done, failed in part, or lost. Whether the device calls it done.
    fn write(
        &mut self,
        volume: usize,
        start: usize,
        blocks: &[Content],
        (error, lost): (f64, f64),
    ) -> bool {
        if self.fault(error) {
            let mut dice = self.dice.fork();
            let keep = dice.pick(&[0.0, 0.5, 1.0]);
            self.disk.volumes()[volume].write(start, blocks, || dice.chance(keep));
            for block in blocks {
                if let Some(version) = self.oracle.owner(block) {
                    self.oracle.version_mut(version).refused = true;
                }
            }
            return false;
        }
        if self.fault(lost) {
            self.note(start as u64, || {
                format!("the write at {volume}:{start} is lost")
            });
            self.count_spoiled(volume, start, blocks);
            return true;
        }
        self.disk.volumes()[volume].write(start, blocks, || true);
        true
    }

    /// These blocks do not hold what they should.
    fn count_spoiled(&mut self, volume: usize, start: usize, blocks: &[Content]) {
        for (block, at) in blocks.iter().zip(start..) {
            match block {
                Content::Zero => {}
                Content::Data(_) => {
                    if let Some(version) = self.oracle.owner(block) {
                        self.oracle.version_mut(version).rotten = true;
                    }
                }
                Content::Meta(_) => {
                    self.oracle.spoiled = true;
                    let (segment, ..) = self.locate_block(volume, at);
                    self.tainted.insert(segment);
                    for version in self.pages_of(block) {
                        self.oracle.version_mut(version).rotten = true;
                    }
                }
            }
        }
    }

    /// The pages that a descriptor block describes.
    fn pages_of(&self, block: &Content) -> Vec<VersionId> {
        self.records_of(block)
            .into_iter()
            .filter_map(|record| match record {
                Record::Page(page) => {
                    let namespace = self.namespace_of(page.namespace);
                    let name = self
                        .oracle
                        .by_key(namespace, page.key.prefix().as_bytes())?;
                    self.oracle.find(name, page.checksum)
                }
                _ => None,
            })
            .collect()
    }

    fn records_of(&self, block: &Content) -> Vec<Record> {
        let Content::Meta(bytes) = block else {
            return Vec::new();
        };
        let Ok(block) = DescriptorBlock::check(&bytes[..]) else {
            return Vec::new();
        };
        let (volume, number) = (block.identity().volume, block.identity().segment);
        let spot = self.spot(usize::from(volume), number.0);
        (0..self.setup.segment_blocks)
            .find_map(|index| spot.parse_block(index, &bytes[..]).ok())
            .map_or(Vec::new(), |block| match block.body {
                Body::Records(records) => records,
                Body::Namespace(_) => Vec::new(),
            })
    }

    fn fail_sync(&mut self, volume: usize, covers: usize) {
        let mut dice = self.dice.fork();
        let keep = dice.pick(&[0.0, 0.5, 1.0]);
        let stays = dice.pick(&[0.0, 0.5, 1.0]);
        let dropped = self.disk.volumes()[volume].sync_failed(covers, &mut dice, keep, stays);
        for (at, block) in dropped {
            if matches!(block, Content::Meta(_)) {
                let (segment, ..) = self.locate_block(volume, at);
                self.shaken.insert(segment);
            }
            if let Some(version) = self.oracle.owner(&block) {
                self.oracle.version_mut(version).dropped = true;
            }
            for record in self.records_of(&block) {
                match record {
                    Record::Page(_) => {}
                    Record::Delete { namespace, key, .. } => {
                        let namespace = self.namespace_of(namespace);
                        let name = self.oracle.by_key(namespace, key.prefix().as_bytes());
                        self.oracle.deletion_dropped(name);
                    }
                    _ => self.oracle.deletion_dropped(None),
                }
            }
            for version in self.pages_of(&block) {
                self.oracle.version_mut(version).dropped = true;
            }
        }
    }

    /// The device may rot a block or lose the ability to read one.
    fn spoil(&mut self) {
        let rot = self.fault(self.setup.faults.rot);
        let unreadable = self.fault(self.setup.faults.unreadable);
        for (happens, rots) in [(rot, true), (unreadable, false)] {
            if !happens {
                continue;
            }
            let volume = self.dice.below(self.setup.volumes.len());
            let first = self.segment_first_block(0);
            let blocks = self.disk.volumes()[volume].blocks();
            // Metadata is rare on the device: look at a few blocks and prefer it.
            let mut at = first + self.dice.below(blocks - first);
            for _ in 0..self.dice.below(40) {
                let other = first + self.dice.below(blocks - first);
                if matches!(self.disk.volumes()[volume].visible(other), Content::Meta(_)) {
                    at = other;
                    break;
                }
            }
            let content = self.disk.volumes()[volume].visible(at).clone();
            if content == Content::Zero {
                continue;
            }
            self.note(at as u64, || {
                format!("{volume}:{at} is spoiled, rots {rots}: {content:.0?}")
            });
            self.count_spoiled(volume, at, &[content]);
            let mut volumes = self.disk.volumes();
            if rots {
                volumes[volume].rot(at);
            } else {
                volumes[volume].make_unreadable(at);
            }
        }
    }

    // ---- ending

    /// What a recovery after this moment must find.
    fn expect(&self, live: &Live, power: bool) -> Expected {
        let pages = self.snapshot(&live.index, &self.namespaces_by_slot(live));
        let mut names = BTreeMap::new();
        for (name, (version, place, _)) in pages {
            let known = self.oracle.version(version);
            let older = known.in_place_of.map(|older| self.oracle.version(older));
            let excused = known.rotten
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

    fn crash(&mut self, live: Live, power: bool) -> Expected {
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
        self.oracle.end_run(power);
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
    fn close(&mut self, mut live: Live) -> Expected {
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

    /// Without faults everything ends, a flush succeeds, and pages can be put.
    fn rest_for_good(&mut self, live: &mut Live) {
        self.calm = true;
        self.note(0, || "nothing goes wrong from here on".to_owned());
        self.settle_down(live);
        self.flush_for_good(live);
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
        self.flush_for_good(live);
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

    fn flush_for_good(&mut self, live: &mut Live) {
        for _ in 0..20 {
            let flushes = self.totals.flushes;
            self.begin_flush(live, 0);
            self.settle_down(live);
            if self.totals.flushes > flushes {
                return;
            }
            self.now_ms += 1000;
        }
        panic!("flushes go on failing though nothing goes wrong any more");
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
