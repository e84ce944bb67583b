//! A seed from start to end: one owner after the other, and the fate of the clients when one ends.

use larder_engine::planted;
use larder_sim_runtime::dice::Dice;

use super::client::{Client, Part};
use super::office::Office;
use super::{Company, Odds};
use crate::classes::{Class, Tally};
use crate::ending::Expected;
use crate::opening::Opening;
use crate::run::{End, end_well, sum_up};
use crate::setup::Faults;
use crate::totals::Totals;
use crate::world::{Journal, Live, World};

/// A new owner must be found within this many steps.
const OWNERLESS_STEPS_MAX: usize = 20_000;

/// Steps that a closing owner waits for its clients' writes: mostly enough.
const PATIENCE_STEPS: [usize; 3] = [10, 100, 600];

/// Once faults have stopped, all clients must be gone within this many steps.
const RETIRE_STEPS_MAX: usize = 100_000;

/// Plays a seed. Returns a digest of all events, and their counts.
pub fn play(seed: u64, journal: Option<Journal>) -> (u64, Totals, Tally) {
    let mut world = World::new(Dice::new(seed), seed, journal);
    let mut company = company_for(&mut world);
    let mut expected = Expected {
        exactly: true,
        ..Expected::default()
    };
    let mut steps = world.setup.steps;
    let mut powers = 0;
    loop {
        // A close may have ended in a power loss too.
        if world.tally.times(Class::Power) > powers {
            powers = world.tally.times(Class::Power);
            company.lose_power();
        }
        company.await_owner(&mut world);
        world.expect_less(&mut expected);
        let mut live = match world.open(&mut expected) {
            Opening::Open(live) => *live,
            Opening::CutShort => continue,
            Opening::Refused => break,
        };
        company.take_over(&mut world, &live);
        match company.live(&mut world, &mut live, &mut steps) {
            End::Close => {
                let all_over = company.send_away(&mut world, &mut live);
                company.lose_owner(&mut world);
                expected = if all_over {
                    world.close(live)
                } else {
                    world.crash(live, false)
                };
            }
            End::Done => {
                company.retire(&mut world, &mut live);
                end_well(&mut world, live);
                break;
            }
            end => {
                company.owner_dies(&mut world, &live, end == End::Power);
                expected = world.crash(live, end == End::Power);
            }
        }
    }
    sum_up(&world)
}

/// A company, and a store that suits it. Mostly the device does not fail, so that no device fault
/// excuses a loss.
fn company_for(world: &mut World) -> Company {
    let steps = world.dice.pick(&[400, 600, 900]);
    let step = 1.0 / steps as f64;
    let setup = &mut world.setup;
    setup.steps = steps;
    setup.clients = 1 + world.dice.below(2);
    // Clients use any namespace.
    setup.named = 1.0;
    if world.dice.chance(0.7) {
        setup.faults = Faults {
            kill: setup.faults.kill,
            power: setup.faults.power,
            close: setup.faults.close,
            cut: setup.faults.cut,
            delay: setup.faults.delay,
            ..Faults::default()
        };
    }
    setup.faults.kill = world.dice.pick(&[0.0, 2.0, 5.0]) * step;
    Company::draw(&mut world.dice, steps)
}

impl Company {
    /// The store has no owner. The next one waits until no client of the previous owner can still
    /// be writing.
    fn await_owner(&mut self, world: &mut World) {
        self.take_landed(world);
        let has_to_wait = !self.marks.is_empty();
        if has_to_wait && !planted!(UnawaitedMarks) {
            world.count(Class::TakeoverWaited);
        }
        for _ in 0..OWNERLESS_STEPS_MAX {
            self.take_landed(world);
            if self.marks.is_empty() || planted!(UnawaitedMarks) {
                return;
            }
            if !world.foreign.is_empty() && world.dice.chance(0.3) {
                world.moment += 1;
                let at = world.dice.below(world.foreign.len());
                world.land_foreign(at);
            } else {
                self.step(world, None);
            }
        }
        panic!("no process can own the store: clients still hold it");
    }

    /// The new owner: a client that lost its owner, or another process.
    fn take_over(&mut self, world: &mut World, live: &Live) {
        self.slots = live.slots.iter().copied().flatten().collect();
        self.office = Some(Office::default());
        let is_free = |client: &&mut Client| matches!(client.part, Part::Nobody);
        if let Some(client) = self.clients.iter_mut().find(is_free) {
            // From here on it is the owner with its own callers. Another process may take its
            // place.
            *client = Client::default();
            world.count(Class::Takeover);
            if std::mem::take(&mut self.fell_in_reclaim) {
                world.count(Class::TakeoverInReclaim);
            }
        }
    }

    fn live(&mut self, world: &mut World, live: &mut Live, steps: &mut usize) -> End {
        while *steps > 0 {
            *steps -= 1;
            if let Some(end) = world.begin_step() {
                return end;
            }
            self.either_step(world, live, true);
        }
        End::Done
    }

    /// A step of the store, or of the company.
    fn either_step(&mut self, world: &mut World, live: &mut Live, may_begin: bool) {
        let own = world.setup.weights.total();
        if world.dice.below(own + self.weight) < own {
            world.step(live, may_begin);
        } else {
            self.step(world, Some(live));
            world.hear(live);
            world.check(live);
        }
        self.attend(world, live);
        world.lose_begun();
    }

    /// A power loss ends all processes.
    fn lose_power(&mut self) {
        for client in &mut self.clients {
            *client = Client::default();
        }
        self.lines.clear();
        self.marks.clear();
        self.office = None;
    }

    /// The owner is killed, or loses power with all other processes.
    fn owner_dies(&mut self, world: &mut World, live: &Live, power: bool) {
        self.check_pins(world, live);
        if power {
            return;
        }
        if !self.lines.is_empty() {
            world.count(Class::OwnerDeath);
        }
        self.fell_in_reclaim = live.core.is_reclaiming();
        self.lose_owner(world);
    }

    /// Closes the connections to a dead owner: its messages can still be read, messages to it are
    /// lost.
    fn lose_owner(&mut self, world: &mut World) {
        self.office = None;
        for line in self.lines.values_mut() {
            world
                .tally
                .count_many(Class::MessageLost, line.up.len() as u64);
            line.up.clear();
            line.waits = None;
            line.hung_up = true;
            line.unserved = true;
        }
        self.lines.retain(|_, line| !line.is_over());
    }

    /// The owner is being closed. It disconnects its clients and waits for their writes. If these
    /// do not end soon, it abandons the store instead (returns false): it grants nothing any more,
    /// and the next owner waits for the clients.
    fn send_away(&mut self, world: &mut World, live: &mut Live) -> bool {
        world.note(0, || "the clients are disconnected".to_owned());
        self.office
            .as_mut()
            .expect("an owner is present")
            .is_closing = true;
        for line in self.lines.values_mut() {
            line.hung_up = true;
        }
        let patience = world.dice.pick(&PATIENCE_STEPS);
        for step in 0..RETIRE_STEPS_MAX {
            let lingering = self.office.as_ref().map(|office| office.lingering.clone());
            let lingering = lingering.unwrap_or_default();
            if lingering.is_empty() && self.lines.values().all(|line| line.unserved) {
                if live.stopping {
                    self.flush_last(world, live);
                }
                return !live.stopping;
            }
            if step >= patience && !lingering.is_empty() {
                world.stop_keeper(live);
            }
            if live.stopping && live.keeper_rests() {
                for client in lingering {
                    world.count(Class::Abandoned);
                    self.look_after(world, live, client, true);
                }
            }
            self.either_step(world, live, false);
        }
        panic!("a closing owner waits forever");
    }

    /// Makes the content durable, in a store that is not closed in order.
    fn flush_last(&mut self, world: &mut World, live: &mut Live) {
        let (request, flush) = world.flush(live);
        for _ in 0..RETIRE_STEPS_MAX {
            if let Some(result) = live.finished.remove(&request) {
                world.hear_result(live, request, &flush, result.is_ok());
                return;
            }
            self.either_step(world, live, false);
        }
        panic!("the last flush of an owner hangs");
    }

    /// Faults stop. Every client gets its answers, and leaves nothing behind.
    fn retire(&mut self, world: &mut World, live: &mut Live) {
        world.calm_down();
        self.odds = Odds::default();
        for _ in 0..RETIRE_STEPS_MAX {
            let office = self.office.as_ref().expect("an owner is present");
            if self.is_empty()
                && self.lines.is_empty()
                && self.marks.is_empty()
                && office.lingering.is_empty()
                && office.puts.is_empty()
            {
                self.check_pins(world, live);
                return;
            }
            self.either_step(world, live, false);
        }
        panic!(
            "a client hangs, or a put of a client that is gone never ends: \
             {} lines, marks of {:?}, puts {:?}",
            self.lines.len(),
            self.marks,
            self.office
                .as_ref()
                .map(|office| office.puts.keys().collect::<Vec<_>>())
        );
    }
}
