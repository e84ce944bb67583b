//! Faults among the processes, drawn between two steps of the world.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use larder_core::core::Core;
use larder_engine::Part;
use larder_sim_runtime::note;

use super::super::compaction::{compact, survey};
use super::super::process::{Doing, Running};
use super::super::stray;
use super::Driver;
use crate::classes::Class;

/// Longest stop of a process, mostly and seldom: pins of a silent client are revoked after half a
/// minute. Some clients stay stopped until the calls of all others are over.
const STOPS: [Duration; 3] = [
    Duration::from_millis(50),
    Duration::from_secs(6),
    Duration::from_secs(45),
];

/// The share of the stopped clients that stay stopped.
const STAY_STOPPED: f64 = 0.2;

/// Processes that take the places of killed ones.
const REPLACEMENTS_MAX: usize = 6;

/// Processes of a run that break the rules of the protocol.
const STRAYS_MAX: usize = 20;

/// Compactions of a run.
const COMPACTIONS_MAX: usize = 10;

impl Driver {
    pub(super) fn draw_faults(&mut self) {
        let (fates, forks) = {
            let state = self.shared.borrow();
            (state.plan.fates, state.plan.forks)
        };
        if self.strikes(fates.power) {
            self.lose_power();
        } else if self.strikes(fates.kill) {
            self.kill_one();
        } else if self.strikes(fates.stop) {
            self.stop_one();
        } else if self.strikes(fates.unlink) {
            let path = self.shared.borrow().plan.path().to_owned();
            let mut name = path.into_os_string();
            name.push(".sock");
            if self.machine.remove(name.as_ref()) {
                note(|| "a cleaner removes the socket".to_owned());
                // A client probes an owner that answers late. Without the socket it takes the owner
                // for gone, and its pages under way fail with the segment that they are in.
                self.shared.borrow_mut().is_disturbed = true;
                self.count(Class::SocketRemoved);
            }
        } else if self.strikes(fates.cut) {
            if self.machine.cut_connection() {
                self.shared.borrow_mut().is_disturbed = true;
                self.count(Class::ConnectionLost);
            }
        } else if self.strikes(fates.stray) {
            self.begin_stray();
        } else if self.strikes(fates.compaction) {
            self.begin_or_kill_compaction();
        } else if self.strikes(forks) {
            self.fork_one();
        }
    }

    /// A process: often the owner.
    fn pick(&self) -> Option<Rc<Running>> {
        let is_owner = |running: &&Rc<Running>| Some(running.process) == self.owner;
        let owner = self.running.iter().find(is_owner).cloned();
        if owner.is_some() && self.strikes(0.4) {
            return owner;
        }
        match self.running.len() {
            0 => None,
            count => Some(self.running[self.shared.borrow_mut().dice.below(count)].clone()),
        }
    }

    /// A process, often one in the middle of a put.
    fn pick_victim(&self) -> Option<Rc<Running>> {
        let is_putting = |running: &&Rc<Running>| running.is(Doing::Put);
        let putting = self.running.iter().find(is_putting).cloned();
        match putting.filter(|_| self.strikes(0.3)) {
            Some(running) => Some(running),
            None => self.pick(),
        }
    }

    fn kill_one(&mut self) {
        let Some(running) = self.pick_victim() else {
            return;
        };
        self.kill_counted(&running);
        self.replace();
        // Often the owner dies with a client whose writes are in flight.
        let is_owner = |running: &&Rc<Running>| running.part() == Some(Part::Owner);
        let owner = self.running.iter().find(is_owner).cloned();
        if running.is(Doing::Put)
            && self.strikes(0.3)
            && let Some(owner) = owner
        {
            self.kill_counted(&owner);
            self.replace();
        }
    }

    fn kill_counted(&mut self, running: &Rc<Running>) {
        match running.part() {
            Some(Part::Owner) => {
                self.count(Class::OwnerDeath);
                let store = running.local();
                let is_reclaiming = store.and_then(|store| store.try_core(Core::is_reclaiming));
                self.fell_in_reclaim = is_reclaiming == Some(true);
            }
            Some(Part::Client) => {
                self.count(Class::ClientDeath);
                if running.is(Doing::Put) {
                    self.count(Class::ClientDeathInPut);
                }
                if running.is(Doing::Get) {
                    self.count(Class::ClientDeathInGet);
                }
            }
            _ => self.count(Class::SeekerDeath),
        }
        self.kill(running);
    }

    /// A process that breaks the rules of the protocol.
    fn begin_stray(&mut self) {
        // A stray process makes steps, and each step may begin another one.
        if self.strays == STRAYS_MAX {
            return;
        }
        self.strays += 1;
        let process = self.world.process("a stray process");
        let shared = self.shared.clone();
        self.world
            .spawn(process, "stray", move || stray::misbehave(&shared));
    }

    /// A process that compacts the store, or the end of it.
    fn begin_or_kill_compaction(&mut self) {
        self.compactions.retain(|(_, is_over)| !is_over.get());
        if let Some((process, _)) = self.compactions.pop() {
            self.count(Class::CompactionDeath);
            return self.machine.kill(process);
        }
        if self.compactions_begun == COMPACTIONS_MAX {
            return;
        }
        self.compactions_begun += 1;
        let sites = survey(&self.shared.borrow().plan, &self.machine);
        let process = self.world.process("a compaction");
        let is_over = Rc::new(Cell::new(false));
        self.compactions.push((process, is_over.clone()));
        let shared = self.shared.clone();
        self.world.spawn(process, "compaction", move || {
            compact(&shared, &sites);
            is_over.set(true);
        });
    }

    pub(super) fn kill(&mut self, running: &Rc<Running>) {
        // A former owner that hands the store over has no counters any more.
        if running.part() == Some(Part::Owner) || self.owner == Some(running.process) {
            self.note_evictions(running.counters());
        }
        self.shared.borrow_mut().is_disturbed = true;
        self.machine.kill(running.process);
        std::mem::forget(running.store.take());
        self.running
            .retain(|other| other.process != running.process);
        self.stopped
            .retain(|(other, _)| other.process != running.process);
        self.shared.borrow_mut().totals.crashes += 1;
    }

    pub(super) fn replace(&mut self) {
        if self.replacements < REPLACEMENTS_MAX || self.running.is_empty() {
            self.replacements += 1;
            self.start();
        }
    }

    fn stop_one(&mut self) {
        let is_going = |running: &Rc<Running>| !running.process.is_stopped();
        let Some(running) = self.pick_victim().filter(is_going) else {
            return;
        };
        let stop = self.draw_stop(&running);
        note(|| {
            let process = running.process.id();
            match stop {
                Some(stop) => format!("process {process} is stopped for {stop:?}"),
                None => format!("process {process} is stopped until the others have called"),
            }
        });
        self.shared.borrow_mut().is_disturbed = true;
        match running.part() {
            Some(Part::Owner) => self.count(Class::OwnerStopped),
            Some(Part::Client) => {
                self.count(Class::ClientStopped);
                if running.is(Doing::Put) {
                    self.count(Class::ClientStoppedInPut);
                }
                if running.is(Doing::Get) {
                    self.count(Class::ClientStoppedInGet);
                }
            }
            _ => self.count(Class::SeekerStopped),
        }
        running.process.stop();
        running.stops.update(|stops| stops + 1);
        let until = stop.map(|stop| self.world.now() + stop);
        self.stopped.push((running, until));
    }

    /// How long a process is stopped. `None` for a client that stays stopped.
    fn draw_stop(&self, running: &Running) -> Option<Duration> {
        let is_client = running.part() == Some(Part::Client) && running.have_callers_begun.get();
        if is_client && self.strikes(STAY_STOPPED) {
            self.count(Class::ClientStaysStopped);
            return None;
        }
        let longest = self.shared.borrow_mut().dice.pick(&STOPS);
        let longest = u64::try_from(longest.as_nanos()).unwrap_or(u64::MAX);
        let stop = self.shared.borrow_mut().dice.between(0, longest);
        Some(Duration::from_nanos(stop))
    }

    pub(super) fn resume_due(&mut self) {
        let now = self.world.now();
        self.stopped.retain(|(running, until)| {
            let is_due = until.is_some_and(|until| until <= now);
            if is_due {
                running.process.resume();
            }
            !is_due
        });
    }

    /// A forked child of a process uses its handle.
    fn fork_one(&mut self) {
        let Some(caller) = self.pick().and_then(|running| self.caller(&running, 0)) else {
            return;
        };
        self.count(Class::ForkedUse);
        let child = self.world.process("a forked child");
        self.world.spawn(child, "child", move || {
            caller.use_inherited();
            // The parent may be gone: the child must not close descriptors of the parent.
            std::mem::forget(caller);
        });
    }

    fn lose_power(&mut self) {
        self.count(Class::Power);
        for running in self.running.clone() {
            self.kill(&running);
        }
        for (process, _) in self.compactions.drain(..) {
            self.machine.kill(process);
        }
        self.machine.lose_power();
        self.shared.borrow_mut().promises.power_lost();
        self.owner = None;
        let processes = self.shared.borrow().plan.processes;
        for _ in 0..processes {
            self.replace();
        }
    }
}
