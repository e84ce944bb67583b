//! A seed from start to end: runs of the process, the faults between the steps of its tasks, and
//! the ends of the runs.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use larder_sim_runtime as runtime;
use larder_sim_runtime::dice::{Dice, mix};
use larder_sim_runtime::thread::JoinHandle;
use larder_sim_runtime::{Machine, Odds, Process, Step, task};

use super::kept::Kept;
use super::process::{End, open, run};
use super::reader::read;
use super::state::{Phase, Shared};
use crate::classes::{Class, Tally};
use crate::secrets::{Salt, end_world};
use crate::totals::Totals;
use crate::world::World;

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

/// Longest outage beside reclaim: shorter than the time after which a page counts as lost.
const OUTAGE_BESIDE_MAX: Duration = Duration::from_millis(2500);

/// Longest time for which the clock stands still, in steps of the scheduler.
const FROZEN_STEPS_MAX: u64 = 2000;

/// The event that ends the calls of a run.
enum Last {
    Kill,
    Power,
    Close,
    /// The seed's steps are over.
    Done,
}

/// The outcome of one run of the process.
enum Outcome {
    Again,
    Over,
}

pub struct Driver {
    runtime: runtime::World,
    /// The locks of the volumes. Their bytes are on the simulated disk.
    machine: Machine,
    shared: Shared,
    /// Choices that the tasks' draws must not depend on.
    dice: Dice,
    /// Steps of the driver that are left.
    steps: usize,
    reader: Option<Process>,
    /// The store could not come to rest once, for want of space after failed syncs.
    has_not_rested: bool,
}

impl Drop for Driver {
    fn drop(&mut self) {
        // After a failure its threads do not run any more: it cannot be dropped.
        std::mem::forget(self.shared.lock().store.take());
        end_world();
    }
}

impl Driver {
    pub fn new(world: World, seed: u64) -> Driver {
        let mut dice = Dice::new(mix(seed, 1));
        let setup = runtime::Setup {
            seed,
            switch_one_in: dice.pick(&[0, 2, 8, 32]),
            step: Duration::from_micros(1),
        };
        let machine = Machine::new(Dice::new(seed), Odds::default(), false);
        for (volume, blocks) in world.setup.volume_blocks().into_iter().enumerate() {
            machine.add_volume(&PathBuf::from(format!("volume{volume}")), blocks);
        }
        let steps = world.setup.steps;
        let shared = Shared::new(world);
        Driver {
            runtime: runtime::World::new(setup),
            machine,
            shared,
            dice,
            steps,
            reader: None,
            has_not_rested: false,
        }
    }

    /// Plays. Returns a digest of all events, and their counts; and the salts of all pages.
    pub fn play(mut self) -> ((u64, Totals, Tally), BTreeSet<Salt>) {
        while let Outcome::Again = self.live() {}
        let mut state = self.shared.lock();
        state.world.totals.steps = self.runtime.steps();
        let (digest, totals, tally) = state.world.sum_up();
        let sealed = state.world.sealed.as_mut();
        let salts = sealed.map(|sealed| std::mem::take(&mut sealed.salts));
        let played = (mix(digest, self.runtime.steps()), totals, tally);
        (played, salts.unwrap_or_default())
    }

    /// One run of the process: opening, calls, and an end.
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
        let mut is_opened = false;
        while !main.is_finished() {
            if self.step_tasks(&main, &mut cut) {
                let power = self.shared.lock().world.draws_power();
                return self.crash(process, power);
            }
            let phase = self.shared.lock().phase;
            if phase != Phase::Opening && !is_opened {
                (is_opened, cut) = (true, None);
            }
            if phase != Phase::Open {
                self.shared.lock().world.lose_begun();
                continue;
            }
            match self.step() {
                None => {}
                Some(Last::Kill) => return self.crash(process, false),
                Some(Last::Power) => return self.crash(process, true),
                Some(Last::Close) => {
                    cut = self.draw_cut();
                    self.shared.lock().phase = Phase::Closing;
                }
                Some(Last::Done) => {
                    let mut state = self.shared.lock();
                    state.world.calm_down();
                    state.leases.calm_down();
                    state.phase = Phase::Resting;
                }
            }
        }
        let end = main.take().expect("the main task has ended");
        self.end(process, end)
    }

    /// Some steps of the tasks. Returns whether the run is cut short now.
    fn step_tasks(&mut self, main: &JoinHandle<End>, cut: &mut Option<usize>) -> bool {
        for _ in 0..=self.dice.below(STEPS_AT_ONCE) {
            let step = self.runtime.step();
            assert!(
                step == Step::Ran,
                "no task can run:\n{}",
                self.runtime.report()
            );
            if main.is_finished() {
                return false;
            }
            if let Some(left) = cut.as_mut() {
                if *left == 0 {
                    return true;
                }
                *left -= 1;
            }
            let mut state = self.shared.lock();
            state.check_service();
            state.check_quotas();
            state.check_removals();
        }
        assert!(
            self.runtime.steps() < STEPS_MAX,
            "the run does not end:\n{}",
            self.runtime.report()
        );
        false
    }

    fn draw_cut(&mut self) -> Option<usize> {
        let world = &mut self.shared.lock().world;
        let faults = &world.setup.faults;
        let may_crash = faults.kill + faults.power > 0.0;
        let cut = faults.cut;
        (may_crash && world.fault(cut)).then(|| self.dice.below(CUT_STEPS))
    }

    /// Faults between two steps of the tasks, and checks.
    fn step(&mut self) -> Option<Last> {
        let mut state = self.shared.lock();
        state.world.lose_begun();
        if self.steps == 0 {
            return Some(Last::Done);
        }
        self.steps -= 1;
        state.world.moment += 1;
        state.world.spoil();
        let odds = state.world.setup.faults.outage / 20.0;
        if state.world.fault(odds) {
            state
                .world
                .draw_outage(Class::OutageBeside, OUTAGE_BESIDE_MAX);
        }
        state.world.draw_death();
        let last = draw_last(&mut state.world);
        disturb_clock(&mut state.world);
        state.disturb_clocks();
        state.check();
        let reads = state.world.setup.faults.reader;
        let is_due = state.world.fault(reads);
        drop(state);
        if is_due {
            self.start_reader();
        }
        last
    }

    /// Another process opens the store to read. The one before it is killed.
    fn start_reader(&mut self) {
        self.end_reader();
        let superblocks = self.shared.lock().world.visible_superblocks();
        if superblocks.first().is_none_or(Option::is_none) {
            return;
        }
        let process = self.runtime.process("reader");
        let shared = self.shared.clone();
        let _ = self
            .runtime
            .spawn(process, "reader", move || read(&shared, superblocks));
        self.reader = Some(process);
    }

    fn end_reader(&mut self) {
        if let Some(reader) = self.reader.take() {
            self.machine.kill(reader);
            let state = &mut *self.shared.lock();
            let owner = state.owner_disk;
            state.flights.retain(|flight| flight.disk == owner);
        }
    }

    fn crash(&mut self, process: Process, power: bool) -> Outcome {
        self.end_reader();
        self.machine.kill(process);
        if power {
            self.machine.lose_sides();
            self.shared.lock().leases.kept(Kept::lose_power);
        }
        self.shared.lock().crash(power);
        Outcome::Again
    }

    fn end(&mut self, process: Process, end: End) -> Outcome {
        match end {
            End::NotOpened(error) => {
                let mut state = self.shared.lock();
                if state.check_refusal(&error) {
                    return Outcome::Over;
                }
                let power = state.world.draws_power();
                drop(state);
                self.crash(process, power)
            }
            End::ClosedPartly(Ok(())) => {
                self.shared.lock().closed_partly();
                Outcome::Again
            }
            End::ClosedPartly(Err(_)) => self.crash(process, false),
            End::Closed(Ok(())) => {
                self.end_reader();
                let left = process.tasks();
                assert!(
                    left == 0,
                    "tasks outlive the close:\n{}",
                    self.runtime.report()
                );
                let mut state = self.shared.lock();
                state.closed();
                let is_emptied = state.empty_segments();
                drop(state);
                match is_emptied {
                    true => self.check_last(),
                    false => Outcome::Again,
                }
            }
            End::Closed(Err(error)) => {
                let mut state = self.shared.lock();
                let failures = state.epoch.as_ref().map_or(0, |epoch| epoch.failures);
                assert!(failures > 0, "a close fails without a fault: {error}");
                let power = state.world.draws_power();
                drop(state);
                self.crash(process, power)
            }
            End::Rested(false) => {
                let before = std::mem::replace(&mut self.has_not_rested, true);
                assert!(!before, "a reopened store still cannot flush");
                self.crash(process, false)
            }
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

/// The event that ends the run, if it comes now.
fn draw_last(world: &mut World) -> Option<Last> {
    let faults = &world.setup.faults;
    let (kill, power, close) = (faults.kill, faults.power, faults.close);
    let is_due = world.power_due.is_some_and(|due| due <= world.moment);
    if world.fault(kill) {
        Some(Last::Kill)
    } else if is_due || world.fault(power) {
        Some(Last::Power)
    } else if world.fault(close) {
        Some(Last::Close)
    } else {
        None
    }
}

/// The clock may jump, or stand still for a while.
fn disturb_clock(world: &mut World) {
    let faults = &world.setup.faults;
    let (forward, frozen) = (faults.clock_forward, faults.clock_frozen);
    if world.strikes(Class::ClockForward, forward) {
        task::advance(world.dice.pick(&LEAPS));
    }
    if world.strikes(Class::ClockFrozen, frozen) {
        task::freeze(world.dice.between(1, FROZEN_STEPS_MAX));
    }
}
