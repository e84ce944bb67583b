//! A seed from start to end: processes, the faults among them, and the checks of the end.

mod checks;
mod faults;
mod rotation;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use larder_core::core::Core;
use larder_engine::{CodecChoice, PageStore, Part, Store, StoreError};
use larder_sim_runtime::dice::{Dice, mix};
use larder_sim_runtime::time::Instant;
use larder_sim_runtime::{Event, Machine, Odds, Process, Setup, Step, World, note, thread};
use larder_store::store::LocalStore;

use super::plan::Plan;
use super::process::{Caller, Doing, Running, Shared, State};
use super::promises::Promises;
use crate::classes::{Class, Tally};
use crate::secrets::end_world;
use crate::setup::{CODEC, SEAL};
use crate::totals::Totals;
use crate::world::{Journal, Recorded};

/// Most steps of the world between two looks of the driver: it may look after any step.
const LOOK_WITHIN: u64 = 32;

/// Virtual time within which an owner without clients and calls has no segment pinned.
const REST_LIMIT: Duration = Duration::from_secs(120);

/// Virtual time after which a phase of a run counts as hanging.
const PHASE_LIMIT: Duration = Duration::from_secs(1800);

/// Virtual time after which a run has no more faults, so that it ends.
const FAULTS_LIMIT: Duration = Duration::from_secs(60);

struct Driver {
    shared: Shared,
    running: Vec<Rc<Running>>,
    /// The last owner.
    owner: Option<Process>,
    /// Its changes of role until it became the owner: it may hand the store over and get it back.
    owner_turns: u64,
    /// The last owner was killed in the middle of a reclaim.
    fell_in_reclaim: bool,
    clients: Vec<Process>,
    /// With the end of the stop; `None` for clients that stay stopped.
    stopped: Vec<(Rc<Running>, Option<Instant>)>,
    replacements: usize,
    strays: usize,
    /// Each with whether it is over.
    compactions: Vec<(Process, Rc<Cell<bool>>)>,
    compactions_begun: usize,
    begun: Instant,
    // Dropped in this order: the queues of the machine belong to the world.
    machine: Recorded,
    world: World,
}

/// Plays a seed. Returns a digest of all results, and counts.
///
/// # Panics
/// If a promise is broken.
pub fn play(seed: u64, journal: Option<Journal>) -> (u64, Totals, Tally) {
    end_world();
    let mut dice = Dice::new(seed);
    let mut plan = Plan::draw(&mut dice);
    plan.draw_codec(&mut Dice::new(mix(seed, CODEC)));
    plan.draw_seal(&mut Dice::new(mix(seed, SEAL)));
    let setup = Setup {
        seed: dice.between(0, u64::MAX),
        switch_one_in: dice.pick(&[4, 16, 100]),
        ..Setup::default()
    };
    let always = plan.sync == larder_engine::SyncPolicy::Always;
    let world = World::new(setup);
    let machine = Machine::new(dice.fork(), plan.odds, journal.is_some());
    plan.create(&machine);
    let mut driver = Driver {
        running: Vec::new(),
        owner: None,
        owner_turns: 0,
        fell_in_reclaim: false,
        clients: Vec::new(),
        stopped: Vec::new(),
        replacements: 0,
        strays: 0,
        compactions: Vec::new(),
        compactions_begun: 0,
        begun: world.now(),
        shared: Rc::new(RefCell::new(State {
            promises: Promises::new(seed, always, plan.codec.is_some()),
            plan,
            dice,
            totals: Totals::default(),
            tally: Tally::default(),
            digest: 0,
            evicted: Some(0),
            given_up_before: LocalStore::segments_given_up(),
            is_disturbed: false,
            salts: BTreeSet::new(),
            erased: Vec::new(),
        })),
        machine: Recorded::new(machine, journal),
        world,
    };
    driver.play();
    driver.sum_up()
}

impl Driver {
    fn play(&mut self) {
        let processes = self.shared.borrow().plan.processes;
        for _ in 0..processes {
            self.start();
        }
        // A clock that ticks: transfers of killed processes wake no task.
        let ticker = self.world.process("clock");
        self.world.spawn(ticker, "tick", || {
            loop {
                thread::sleep(Duration::from_millis(50));
            }
        });
        self.phase("calls", true, Driver::are_calls_over);
        self.calm_down();
        self.phase("the last calls", false, Driver::are_calls_over);
        self.check_all("beside the others");
        self.close_all();
        self.rotate();
        self.check_all("alone");
        self.close_all();
        self.look_at_volumes();
    }

    /// Steps until `is_over`.
    fn phase(&mut self, name: &str, has_faults: bool, is_over: fn(&Driver) -> bool) {
        self.begun = self.world.now();
        let mut until_look = 0;
        loop {
            self.machine.settle();
            self.resume_due();
            let is_stuck = self.world.step() == Step::Stuck;
            if until_look == 0 {
                until_look = self.shared.borrow_mut().dice.between(0, LOOK_WITHIN);
                self.look(has_faults);
                if is_over(self) {
                    return;
                }
            }
            until_look = until_look.saturating_sub(1);
            let is_late = self.world.now() - self.begun > PHASE_LIMIT;
            assert!(
                !is_stuck && !is_late,
                "{name}: a call hangs:\n{}",
                self.world.report()
            );
        }
    }

    fn are_calls_over(&self) -> bool {
        let stays_stopped = |running: &Rc<Running>| {
            let mut stopped = self.stopped.iter();
            stopped.any(|(other, until)| until.is_none() && other.process == running.process)
        };
        self.running.iter().all(|running| {
            let has_called = running.have_callers_begun.get() && running.callers_left.get() == 0;
            has_called || stays_stopped(running)
        })
    }

    /// Starts a process that attaches.
    fn start(&mut self) {
        let process = self.world.process("a process of the store");
        let running = Running::new(process);
        let keepers = self.shared.borrow().plan.keepers;
        let keeps_ownership = self.strikes(keepers);
        let seal = self.shared.borrow().plan.seal.clone();
        let has_key = seal.as_ref().is_none_or(|seal| !self.strikes(seal.keyless));
        let wrong = seal.filter(|seal| !has_key && self.strikes(seal.mistaken));
        running.has_key.set(has_key);
        running.has_wrong_key.set(wrong.is_some());
        let (options, path) = {
            let State { plan, dice, .. } = &mut *self.shared.borrow_mut();
            let options = plan.options(keeps_ownership, plan.pick_codec(dice), has_key);
            (options, plan.path().to_owned())
        };
        let options = match wrong {
            Some(seal) => options.with(|o| o.wrapping = Some(seal.wrong)),
            None => options,
        };
        self.world.spawn(process, "main", {
            let running = running.clone();
            move || match Store::attach(&path, options) {
                Ok(store) => {
                    // Asked with or without a journal: it takes a lock.
                    let part = store.part();
                    note(|| format!("has attached as {part:?}"));
                    *running.store.borrow_mut() = Some(Rc::new(store));
                }
                Err(error) => {
                    note(|| format!("could not attach: {error}"));
                    *running.failed.borrow_mut() = Some(error);
                }
            }
        });
        self.running.push(running);
        self.shared.borrow_mut().totals.opens += 1;
    }

    fn caller(&self, running: &Rc<Running>, number: usize) -> Option<Caller> {
        let store = running.store.borrow().clone()?;
        Some(Caller {
            shared: self.shared.clone(),
            running: running.clone(),
            store,
            number,
        })
    }

    /// Starts the calls of a process that has attached.
    fn begin_calls(&self, running: &Rc<Running>) {
        let callers = self.shared.borrow().plan.callers;
        running.callers_left.set(callers);
        running.have_callers_begun.set(true);
        *running.doing.borrow_mut() = vec![Doing::Nothing; callers];
        for number in 0..callers {
            if let Some(caller) = self.caller(running, number) {
                self.world
                    .spawn(running.process, "caller", move || caller.run());
            }
        }
    }

    /// Between two steps: takes in the actions of the processes, and draws faults.
    fn look(&mut self, has_faults: bool) {
        let mut failed = Vec::new();
        for running in &self.running {
            if running.store.borrow().is_some() && !running.have_callers_begun.get() {
                self.begin_calls(running);
            }
            if let Some(error) = running.failed.borrow_mut().take() {
                let has_write_errors = self.shared.borrow().plan.has_write_errors();
                let is_keyless = match error {
                    StoreError::Sealed(_) => !running.has_key.get(),
                    StoreError::WrongKey { .. } => running.has_wrong_key.get(),
                    _ => false,
                };
                if is_keyless && running.has_wrong_key.get() {
                    self.count(Class::WrongKeyAmongOthers);
                }
                assert!(
                    is_expected(&error) || is_keyless || has_write_errors,
                    "a process cannot attach: {error} ({error:?})"
                );
                failed.push(running.process);
            }
        }
        for process in failed {
            self.running.retain(|running| running.process != process);
            self.machine.kill(process);
            self.replace();
        }
        self.look_at_owners();
        self.look_at_writes();
        self.look_at_evictions();
        self.look_at_sealed();
        self.look_at_erased();
        self.look_at_keys();
        if has_faults && self.world.now() - self.begun < FAULTS_LIMIT {
            self.draw_faults();
        }
    }

    fn count(&self, class: Class) {
        self.shared.borrow_mut().tally.count(class);
    }

    fn strikes(&self, probability: f64) -> bool {
        self.shared.borrow_mut().dice.chance(probability)
    }

    /// Faults stop.
    fn calm_down(&mut self) {
        note(|| "faults stop".to_owned());
        self.machine.set_odds(Odds::default());
        for (running, _) in self.stopped.drain(..) {
            running.process.resume();
        }
    }

    /// A new process checks every page.
    fn check_all(&mut self, when: &str) {
        note(|| format!("all pages are checked, {when}"));
        self.look_at_shared_memory();
        let process = self.world.process("a checker");
        let running = Running::new(process);
        let done = Rc::new(Cell::new(false));
        let (options, path) = {
            let state = self.shared.borrow();
            (
                state.plan.options(false, CodecChoice::Off, true),
                state.plan.path().to_owned(),
            )
        };
        self.world.spawn(process, "main", {
            let (running, done, shared) = (running.clone(), done.clone(), self.shared.clone());
            move || {
                let store = Store::attach(&path, options).expect("a checker cannot attach");
                let store = Rc::new(store);
                *running.store.borrow_mut() = Some(store.clone());
                *running.doing.borrow_mut() = vec![Doing::Nothing];
                let caller = Caller {
                    shared,
                    running,
                    store,
                    number: 0,
                };
                caller.check_all();
                done.set(true);
            }
        });
        self.begun = self.world.now();
        self.wait_for(when, &done);
        running.have_callers_begun.set(true);
        self.running.push(running);
        // The checker may own the store after an owner that had handed it over.
        self.look_at_owners();
        self.look_at_evictions();
    }

    fn wait_for(&mut self, name: &str, done: &Cell<bool>) {
        let begun = self.world.now();
        while !done.get() {
            self.machine.settle();
            let is_stuck = self.world.step() == Step::Stuck;
            let is_late = self.world.now() - begun > PHASE_LIMIT;
            assert!(
                !is_stuck && !is_late,
                "{name}: a call hangs:\n{}",
                self.world.report()
            );
        }
    }

    /// An owner without clients and calls has no segment pinned, after a while.
    fn await_rest(&self, owner: &Running) {
        let until = self.world.now() + REST_LIMIT;
        loop {
            let pins = owner.local().and_then(|store| store.pins());
            if pins == Some(0) {
                return;
            }
            assert!(
                self.world.now() < until,
                "segments stay pinned without clients and calls: {pins:?}"
            );
            self.machine.settle();
            let _ = self.world.step();
        }
    }

    /// Each process closes its handle, or is killed.
    fn close_all(&mut self) {
        // Often the owner goes last.
        if self.strikes(0.7) {
            let is_owner = |running: &Rc<Running>| running.part() == Some(Part::Owner);
            self.running.sort_by_key(|running| !is_owner(running));
        }
        while let Some(running) = self.running.pop() {
            if self.running.is_empty() && running.part() == Some(Part::Owner) {
                self.await_rest(&running);
            }
            if self.strikes(0.3) {
                self.running.push(running.clone());
                self.kill(&running);
                continue;
            }
            let owner = running.local();
            let hands_over = owner.is_none() && self.owner == Some(running.process);
            let store = running
                .store
                .borrow_mut()
                .take()
                .expect("an attached process");
            let done = Rc::new(Cell::new(false));
            let last = Rc::new(Cell::new(None));
            self.world.spawn(running.process, "closer", {
                let (done, shared) = (done.clone(), self.shared.clone());
                let last = last.clone();
                move || {
                    let closed = store.close();
                    note(|| format!("close: {closed:?}"));
                    // Others may have been killed a moment ago: their writes may be in flight, and
                    // a client may have lost its owner.
                    let is_fine = matches!(
                        closed,
                        Ok(()) | Err(StoreError::OwnerGone | StoreError::ClientsWriting(_))
                    );
                    let has_write_errors = shared.borrow().plan.has_write_errors();
                    assert!(is_fine || has_write_errors, "a close fails: {closed:?}");
                    // Reclaim may have evicted pages until now.
                    last.set(owner.map(|owner| owner.try_core(Core::counters)));
                    drop(store);
                    done.set(true);
                }
            });
            self.wait_for("a close", &done);
            if let Some(counters) = last.take() {
                self.note_evictions(counters);
            } else if hands_over {
                self.note_evictions(None);
            }
            self.machine.kill(running.process);
        }
    }

    fn sum_up(&self) -> (u64, Totals, Tally) {
        let state = &mut *self.shared.borrow_mut();
        state.totals.steps = self.world.steps();
        for (event, count) in self.machine.counts() {
            let class = match event {
                Event::Interrupted => Class::Interrupted,
                Event::ShortRead => Class::ShortRead,
                Event::ShortWrite => Class::ShortWrite,
                Event::Slow => Class::Delayed,
                Event::OrphanWrite => Class::LateWrite,
                Event::UnstartedWrite => Class::UnstartedWrite,
                Event::WriteOfStopped => Class::WriteOfStopped,
                Event::TornByPowerLoss => Class::PowerKeptSome,
                Event::LockKeptByTransfer => Class::LockKept,
                Event::SocketShort => Class::SocketShort,
                Event::Signal => Class::Signal,
                Event::ConnectionRefused => Class::ConnectionRefused,
                Event::WriteError => Class::DataError,
                Event::SocketTimeout
                | Event::ConnectionCut
                | Event::WritesCollide
                | Event::ConnectionOfKilled
                | Event::ReadError
                | Event::SyncError => continue,
            };
            state.tally.count_many(class, count);
        }
        state.tally.count_many(Class::GivenUp, state.given_up());
        state.tally.end_seed();
        let digest = mix(state.digest, self.world.steps());
        (digest, state.totals, state.tally)
    }
}

/// Whether a process may fail to attach for this reason, while others are killed and stopped.
fn is_expected(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Locked { .. }
            | StoreError::ClientsWriting(_)
            | StoreError::OwnerGone
            | StoreError::Unanswered { .. }
            | StoreError::NotServed { .. }
    )
}
