//! One process that uses a store: the engine's own handle, housekeeper, recovery and data path, on
//! the threads, locks and clock of `larder_sim_runtime`, over a simulated disk.
//!
//! Callers are tasks that call [`Store`]. The driver plays between their steps: it kills the
//! process, spoils the medium, and checks the state that the tasks leave. A kill is possible at
//! each point where a task waits.
//!
//! | module | content |
//! |---|---|
//! | `device` | operations in flight, and the threads that end them |
//! | `callers` | calls, and the checks of their results |
//! | `rest` | the quiet end: without faults all must come to rest |

mod callers;
mod device;
mod rest;

use std::collections::{BTreeSet, VecDeque};
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use larder_engine::core::Core;
use larder_engine::format::{OpenState, SegmentState, Superblock};
use larder_engine::index::{Index, NamespaceSlot};
use larder_engine::recovery::Recovery;
use larder_engine::store::LocalStore as Store;
use larder_engine::{NamespaceId, OpenOptions, PageStore, StoreError};
use larder_sim_runtime as runtime;
use larder_sim_runtime::dice::{Dice, mix};
use larder_sim_runtime::machine::{Machine, Odds};
use larder_sim_runtime::task::{self, Turn};
use larder_sim_runtime::{Process, Step, thread};

use crate::classes::{Class, Tally};
use crate::ending::Expected;
use crate::oracle::VersionId;
use crate::superblocks::{block_of, decode};
use crate::totals::Totals;
use crate::world::{Epoch, Journal, World};
use device::{Device, Flight, What};

/// Steps of the scheduler between two steps of the driver, at most.
const STEPS_AT_ONCE: usize = 16;

/// An interrupted opening or close is cut short within this many steps of the scheduler.
const CUT_STEPS: usize = 600;

/// Steps of the scheduler after which a run counts as one without an end.
const STEPS_MAX: u64 = 20_000_000;

/// Jumps of the clock: a minute, an hour, a month.
const LEAPS: [Duration; 3] = [
    Duration::from_secs(60),
    Duration::from_secs(3600),
    Duration::from_secs(2_592_000),
];

/// The call that a caller is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Idle,
    Put,
    Get,
    Delete,
    Flush,
    Other,
}

/// The use that the process makes of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Opening,
    /// Callers call.
    Open,
    /// Callers end, then the store is closed.
    Closing,
    /// Callers end, faults have ended, all must come to rest.
    Resting,
}

/// The end of the process's main task.
#[derive(Debug)]
enum End {
    NotOpened(StoreError),
    Closed(Result<(), StoreError>),
    /// Whether the store came to rest.
    Rested(bool),
}

/// The state that driver, tasks and device share.
pub struct State {
    world: World,
    /// From recovery on.
    epoch: Option<Epoch>,
    store: Option<Arc<Store>>,
    /// By namespace.
    ids: Vec<Option<NamespaceId>>,
    expected: Expected,
    phase: Phase,
    calls: Vec<Call>,
    /// The close has begun.
    closing: bool,
    /// The disk of the process is shut down.
    is_shut: bool,
    flights: Vec<Flight>,
    launched: u64,
    /// Versions of puts in progress.
    putting: BTreeSet<VersionId>,
    /// Memory of gets in progress: address and length.
    lent: Vec<(usize, usize)>,
    /// Reads of page data from a wrong address.
    misdirected: u64,
    /// Answers that came in one message with another one.
    batched: u64,
}

/// No task waits while it holds this lock.
#[derive(Clone)]
pub struct Shared(Arc<Mutex<State>>);

impl Shared {
    pub fn lock(&self) -> Held<'_> {
        let state = match self.0.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => panic!("a task waits while it holds the state"),
        };
        Held {
            state,
            _turn: task::keep_turn(),
        }
    }
}

/// The state, locked. Dropped in this order.
pub struct Held<'a> {
    state: MutexGuard<'a, State>,
    _turn: Turn,
}

impl Deref for Held<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

/// Plays a seed. Returns a digest of all events, and their counts.
pub fn play(seed: u64, journal: Option<Journal>) -> (u64, Totals, Tally) {
    let mut dice = Dice::new(mix(seed, 1));
    let setup = runtime::Setup {
        seed,
        switch_one_in: dice.pick(&[0, 2, 8, 32]),
        step: Duration::from_micros(1),
    };
    let world = World::new(Dice::new(seed), seed, journal);
    let expected = Expected {
        exactly: true,
        ..Expected::default()
    };
    let shared = Shared(Arc::new(Mutex::new(State {
        calls: vec![Call::Idle; world.setup.clients],
        world,
        epoch: None,
        store: None,
        ids: Vec::new(),
        expected,
        phase: Phase::Opening,
        closing: false,
        is_shut: false,
        flights: Vec::new(),
        launched: 0,
        putting: BTreeSet::new(),
        lent: Vec::new(),
        misdirected: 0,
        batched: 0,
    })));
    let steps = shared.lock().world.setup.steps;
    let volumes = shared.lock().world.setup.volume_blocks();
    let machine = Machine::new(Dice::new(seed), Odds::default(), false);
    for (volume, blocks) in volumes.into_iter().enumerate() {
        machine.add_volume(&PathBuf::from(format!("volume{volume}")), blocks);
    }
    let mut driver = Driver {
        runtime: runtime::World::new(setup),
        machine,
        shared,
        dice,
        steps,
    };
    driver.play();
    let state = driver.shared.lock();
    let digest = mix(state.world.digest, driver.runtime.steps());
    let (digest_of_world, totals, tally) = crate::run::sum_up(&state.world);
    (mix(digest, digest_of_world), totals, tally)
}

struct Driver {
    runtime: runtime::World,
    /// The locks of the volumes. Their bytes are on the simulated disk.
    machine: Machine,
    shared: Shared,
    /// Choices that the tasks' draws must not depend on.
    dice: Dice,
    /// Steps of the driver that are left.
    steps: usize,
}

impl Drop for Driver {
    fn drop(&mut self) {
        // After a failure its threads do not run any more: it cannot be dropped.
        std::mem::forget(self.shared.lock().store.take());
    }
}

/// The outcome of one life of the process.
enum Outcome {
    Again,
    Over,
}

impl Driver {
    fn play(&mut self) {
        while let Outcome::Again = self.live() {}
    }

    /// One life of the process: opening, calls, and an end.
    fn live(&mut self) -> Outcome {
        let Some(superblocks) = self.shared.lock().begin() else {
            return Outcome::Over;
        };
        let process = self.runtime.process("store");
        let shared = self.shared.clone();
        let main = self
            .runtime
            .spawn(process, "main", move || run(&shared, superblocks));
        let mut cut = self.draw_cut();
        let mut opened = false;
        while !main.is_finished() {
            for _ in 0..=self.dice.below(STEPS_AT_ONCE) {
                let step = self.runtime.step();
                assert!(
                    step == Step::Ran,
                    "no task can run:\n{}",
                    self.runtime.report()
                );
                if main.is_finished() {
                    break;
                }
                if let Some(left) = cut.as_mut() {
                    if *left == 0 {
                        let power = self.shared.lock().world.draws_power();
                        return self.crash(process, power);
                    }
                    *left -= 1;
                }
            }
            assert!(
                self.runtime.steps() < STEPS_MAX,
                "the run does not end:\n{}",
                self.runtime.report()
            );
            let phase = self.shared.lock().phase;
            if phase != Phase::Opening && !opened {
                (opened, cut) = (true, None);
            }
            if phase != Phase::Open {
                self.shared.lock().world.lose_begun();
                continue;
            }
            match self.step() {
                None => {}
                Some(crate::run::End::Kill) => return self.crash(process, false),
                Some(crate::run::End::Power) => return self.crash(process, true),
                Some(crate::run::End::Close) => {
                    cut = self.draw_cut();
                    self.shared.lock().phase = Phase::Closing;
                }
                Some(crate::run::End::Done) => {
                    let mut state = self.shared.lock();
                    state.world.calm_down();
                    state.phase = Phase::Resting;
                }
            }
        }
        let end = main.take().expect("the main task has ended");
        self.end(process, end)
    }

    fn draw_cut(&mut self) -> Option<usize> {
        let world = &mut self.shared.lock().world;
        let faults = &world.setup.faults;
        let may_crash = faults.kill + faults.power > 0.0;
        let cut = faults.cut;
        (may_crash && world.fault(cut)).then(|| self.dice.below(CUT_STEPS))
    }

    /// Faults between two steps of the tasks, and checks.
    fn step(&mut self) -> Option<crate::run::End> {
        let mut state = self.shared.lock();
        state.world.lose_begun();
        if self.steps == 0 {
            return Some(crate::run::End::Done);
        }
        self.steps -= 1;
        state.world.moment += 1;
        state.world.totals.steps += 1;
        state.world.spoil();
        state.world.draw_death();
        let end = state.world.draw_end();
        let forward = state.world.setup.faults.clock_forward;
        if state.world.strikes(Class::ClockForward, forward) {
            task::advance(state.world.dice.pick(&LEAPS));
        }
        state.check();
        end
    }

    fn crash(&mut self, process: Process, power: bool) -> Outcome {
        self.machine.kill(process);
        self.shared.lock().crash(power);
        Outcome::Again
    }

    fn end(&mut self, process: Process, end: End) -> Outcome {
        match end {
            End::NotOpened(error) => {
                let mut state = self.shared.lock();
                state.check_refusal(&error);
                let power = state.world.draws_power();
                drop(state);
                self.crash(process, power)
            }
            End::Closed(Ok(())) => {
                // Pins of lent reads are given back by a thread that no close waits for.
                for _ in 0..CUT_STEPS {
                    if process.tasks() > 0 {
                        let _ = self.runtime.step();
                    }
                }
                let left = process.tasks();
                assert!(
                    left == 0,
                    "tasks outlive the close:\n{}",
                    self.runtime.report()
                );
                self.shared.lock().closed();
                Outcome::Again
            }
            End::Closed(Err(error)) => {
                let mut state = self.shared.lock();
                let failures = state.epoch.as_ref().map_or(0, |epoch| epoch.failures);
                assert!(failures > 0, "a close fails without a fault: {error}");
                let power = state.world.draws_power();
                drop(state);
                self.crash(process, power)
            }
            End::Rested(false) => self.crash(process, false),
            End::Rested(true) => {
                self.crash(process, true);
                self.check_last()
            }
        }
    }

    /// After rest and a power loss: a last opening.
    fn check_last(&mut self) -> Outcome {
        let Some(superblocks) = self.shared.lock().begin() else {
            return Outcome::Over;
        };
        let process = self.runtime.process("last");
        let shared = self.shared.clone();
        let opened = self.runtime.spawn(process, "main", move || {
            open(&shared, superblocks).map(drop)
        });
        self.runtime.run_until(|| opened.is_finished());
        let opened = opened.take().expect("the task has ended");
        assert!(opened.is_ok(), "the last opening fails: {opened:?}");
        self.machine.kill(process);
        Outcome::Over
    }
}

impl State {
    /// Before an opening. Returns the superblocks, and of each which copy is not the newer one.
    /// `None`: the store is refused for good.
    fn begin(&mut self) -> Option<Vec<Option<(Superblock, usize)>>> {
        self.forget_unsynced_superblocks();
        let world = &mut self.world;
        world.lose_begun();
        world.totals.opens += 1;
        world.forgotten.extend(&world.shaken);
        world.revive();
        world.read_superblocks(&mut self.expected)?;
        let volumes = world.disk.volumes();
        let known = world.superblocks.iter().enumerate().map(|(volume, known)| {
            let known = known.clone()?;
            let is_it = |copy: usize| {
                let block = volumes[volume].visible(block_of(copy));
                decode(block).is_ok_and(|found| found.generation == known.generation)
            };
            let older = usize::from(is_it(0));
            Some((known, older))
        });
        let known = known.collect();
        drop(volumes);
        self.epoch = None;
        self.ids = vec![None; self.world.setup.namespaces.len()];
        self.calls.fill(Call::Idle);
        self.phase = Phase::Opening;
        self.closing = false;
        self.putting.clear();
        self.lent.clear();
        Some(known)
    }

    /// Recovery has ended. Nothing has been written.
    fn recovered(&mut self, recovery: &Recovery, index: &Arc<Index>) {
        let world = &mut self.world;
        world.note(index.len() as u64, || {
            format!(
                "recovered {} pages, {} unproven, {} damaged, first {}",
                index.len(),
                recovery.unproven,
                recovery.damage.len(),
                recovery.recovered.first
            )
        });
        world.check_recovered(recovery, index, &self.expected);
        let mut epoch = Epoch::new(index.clone(), recovery.recovered.first);
        epoch.slots = vec![None; world.setup.namespaces.len()];
        for (slot, namespace) in (0..).map(NamespaceSlot).zip(world.namespaces_of(recovery)) {
            epoch.slots[namespace] = Some(slot);
        }
        epoch.named = vec![false; world.setup.namespaces.len()];
        epoch.unproven = world
            .snapshot(index, &world.namespaces_by_slot(&epoch))
            .into_iter()
            .map(|(name, (_, place, _))| (name, place))
            .collect();
        self.epoch = Some(epoch);
    }

    /// An opening may fail for the device's sake alone.
    fn check_refusal(&mut self, error: &StoreError) {
        let faults = &self.world.setup.faults;
        let may = faults.spoils() || faults.misleads() || faults.fail_writes();
        let may = may || faults.superblock_error > 0.0;
        assert!(may, "an opening fails without a fault: {error}");
        assert!(
            !matches!(error, StoreError::VolumeStale { .. }),
            "an open refuses a volume as stale: {error}"
        );
        self.world.note(0, || format!("not opened: {error}"));
    }

    /// Runs the checks between two steps.
    fn check(&mut self) {
        let (Some(store), Some(epoch)) = (&self.store, &self.epoch) else {
            return;
        };
        let world = &self.world;
        let is_due = world.moment.is_multiple_of(world.setup.check_every);
        store.try_core(|core| {
            let c = core.counters();
            let pages = epoch.index.len() as u64;
            let gone = c.replaced + c.evicted + c.deleted + c.damaged + c.unfinished;
            assert_eq!(
                epoch.recovered + c.pages_put,
                gone + pages,
                "pages do not add up: {} recovered, {c:?}, {pages} in the index",
                epoch.recovered,
            );
            if is_due {
                core.check_invariants().unwrap();
            }
        });
        if is_due {
            self.check_deleted();
        }
    }

    /// No deleted page is in the index.
    fn check_deleted(&self) {
        let (world, Some(epoch)) = (&self.world, &self.epoch) else {
            return;
        };
        let namespaces = world.namespaces_by_slot(epoch);
        for (version, place, _) in world.snapshot(&epoch.index, &namespaces).values() {
            assert!(
                !world.is_undead(*version, *place),
                "{version:?} at {place:?} was deleted"
            );
        }
    }

    /// The process is dead. Operations in flight leave any part of their blocks.
    fn crash(&mut self, power: bool) {
        self.world.lose_begun();
        self.world.totals.crashes += 1;
        let class = if power { Class::Power } else { Class::Kill };
        self.world.count(class);
        self.count_phases();
        if let Some(epoch) = &self.epoch {
            self.expected = self.world.expect(epoch, power);
        } else if power {
            self.expected.names.retain(|_, durable| *durable);
        }
        self.check_deleted();
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

    fn closed(&mut self) {
        let Some(epoch) = &self.epoch else { return };
        self.expected = self.world.expect_after_close(epoch);
        let deletions = self.world.oracle.acked_deletions();
        self.world.oracle.deletions_durable(&deletions);
        self.world.oracle.end_run(false);
        let kept = self.expected.names.len();
        self.world
            .note(kept as u64, || format!("closed with {kept} pages"));
        assert!(self.flights.is_empty(), "operations outlive the close");
        let clean = self.world.disk.volumes();
        for (volume, known) in clean.iter().zip(&self.world.superblocks) {
            let states = [0, 1].map(|copy| decode(volume.visible(block_of(copy))));
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
        let is_reclaiming = self
            .store
            .as_ref()
            .and_then(|store| store.try_core(Core::is_reclaiming));
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

    fn sum_up(&mut self) {
        let counters = self
            .store
            .as_ref()
            .and_then(|store| store.try_core(Core::counters));
        if let Some(counters) = counters {
            let totals = &mut self.world.totals;
            totals.evicted += counters.evicted;
            totals.moved += counters.moved;
            totals.reclaimed += counters.reclaimed;
            totals.failed_syncs += counters.failed_syncs;
        }
    }
}

fn options(world: &World) -> OpenOptions {
    OpenOptions::default().with(|o| {
        o.sync = world.setup.sync;
        o.lease = Duration::from_millis(world.setup.lease_ms);
        o.write_bytes_max = world.setup.write_bytes_max;
        o.degraded = true;
    })
}

fn open(
    shared: &Shared,
    superblocks: Vec<Option<(Superblock, usize)>>,
) -> Result<Arc<Store>, StoreError> {
    let disk = Device::new(shared, superblocks.len());
    let options = options(&shared.lock().world);
    let recovered = |recovery: &Recovery, index: &Arc<Index>| {
        shared.lock().recovered(recovery, index);
    };
    Store::open_simulated(superblocks, disk, &options, recovered).map(Arc::new)
}

/// The main task of the process.
fn run(shared: &Shared, superblocks: Vec<Option<(Superblock, usize)>>) -> End {
    let store = match open(shared, superblocks) {
        Ok(store) => store,
        Err(error) => return End::NotOpened(error),
    };
    callers::name_some(shared, &store);
    let clients = {
        let mut state = shared.lock();
        state.store = Some(store.clone());
        state.phase = Phase::Open;
        state.world.setup.clients
    };
    let caller = |own: usize| {
        let (shared, store) = (shared.clone(), store.clone());
        let thread = thread::Builder::new().name(format!("caller {own}"));
        thread
            .spawn(move || callers::call(&shared, &store, own))
            .expect("a thread")
    };
    let callers: Vec<_> = (0..clients).map(caller).collect();
    // Some closes come while calls are in progress.
    let hurries = shared.lock().world.dice.chance(0.3);
    let wants_end = || shared.lock().phase != Phase::Open;
    while !wants_end() {
        thread::sleep(Duration::from_micros(50));
    }
    let mut callers: VecDeque<_> = callers.into();
    let join = |callers: &mut VecDeque<thread::JoinHandle<()>>| {
        while let Some(caller) = callers.pop_front() {
            let _ = caller.join();
        }
    };
    let phase = shared.lock().phase;
    if phase == Phase::Resting || !hurries {
        join(&mut callers);
    }
    if phase == Phase::Resting {
        return End::Rested(rest::rest(shared, &store));
    }
    shared.lock().closing = true;
    let closed = store.close();
    join(&mut callers);
    let mut state = shared.lock();
    state.sum_up();
    state.store = None;
    drop(state);
    drop(store);
    End::Closed(closed)
}
