//! The rotation of the key of an encrypted store, by a process that has the store to itself. It may
//! be killed at any step, and the power may go with it.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use larder_engine::{CodecChoice, StoreError};
use larder_sim_runtime::{Step, note, thread};
use larder_store::store::opening::open_volumes;
use larder_store::volume::Access;

use super::super::process::Shared;
use super::Driver;
use crate::classes::Class;

/// Most steps of the world until a rotation is killed.
const STEPS_MAX: u64 = 300;

impl Driver {
    /// No process uses the store. Afterwards either the former key opens it or the new one.
    pub(super) fn rotate(&mut self) {
        if self.shared.borrow().plan.seal.is_none() || !self.strikes(0.5) {
            return;
        }
        let kill_after = match self.strikes(0.7) {
            true => self.shared.borrow_mut().dice.between(0, STEPS_MAX),
            false => u64::MAX,
        };
        let process = self.world.process("a rotation");
        let done = Rc::new(Cell::new(false));
        self.world.spawn(process, "rotation", {
            let (done, shared) = (done.clone(), self.shared.clone());
            move || {
                exclusively(&shared, true).expect("a rotation fails");
                done.set(true);
            }
        });
        let mut steps = 0;
        while !done.get() && steps < kill_after {
            self.machine.settle();
            let is_stuck = self.world.step() == Step::Stuck;
            assert!(!is_stuck, "a rotation hangs:\n{}", self.world.report());
            steps += 1;
        }
        self.machine.kill(process);
        note(|| format!("the key is rotated: {}", done.get()));
        self.count(match done.get() {
            true => Class::RotatedAlone,
            false => Class::RotationDeath,
        });
        if self.strikes(0.3) {
            self.count(Class::Power);
            self.machine.lose_power();
            self.shared.borrow_mut().promises.power_lost();
        }
        self.settle_rotation(done.get());
    }

    fn settle_rotation(&mut self, is_done: bool) {
        let has_former = self.opens();
        self.shared.borrow_mut().plan.swap_keys();
        let has_new = self.opens();
        assert!(
            has_former != has_new && (has_new || !is_done),
            "the former key opens the store: {has_former}, the new one: {has_new}"
        );
        if has_former {
            self.shared.borrow_mut().plan.swap_keys();
        }
    }

    /// Whether the key of the plan opens the store.
    fn opens(&mut self) -> bool {
        let process = self.world.process("a look at the keyring");
        let (done, opens) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
        self.world.spawn(process, "look", {
            let (done, opens, shared) = (done.clone(), opens.clone(), self.shared.clone());
            move || {
                opens.set(match exclusively(&shared, false) {
                    Ok(()) => true,
                    Err(StoreError::WrongKey { .. }) => false,
                    Err(error) => panic!("a keyring is lost in a rotation: {error}"),
                });
                done.set(true);
            }
        });
        self.wait_for("a look at the keyring", &done);
        self.machine.kill(process);
        opens.get()
    }
}

/// Opens the volumes with the key of the plan, and replaces it by the next one if it `rotates`.
fn exclusively(shared: &Shared, rotates: bool) -> Result<(), StoreError> {
    let (options, path, keys) = {
        let plan = &shared.borrow().plan;
        let options = plan.options(false, CodecChoice::Off, true);
        (options, plan.path().to_owned(), plan.keys())
    };
    let (mut volumes, disk) = loop {
        match open_volumes(&path, &options, Access::Exclusive) {
            // Writes of a killed process may be in flight.
            Err(StoreError::Locked { .. }) => thread::sleep(Duration::from_millis(50)),
            opened => break opened?,
        }
    };
    let rotated = match keys.filter(|_| rotates) {
        Some((present, next)) => volumes.rewrap(disk.as_ref(), &present, &next),
        None => Ok(()),
    };
    disk.shutdown();
    for (_, volume) in volumes.present() {
        volume.unlock();
    }
    rotated
}
