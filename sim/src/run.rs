//! A seed from its first open to its last check: the steps, and what the device does at each.

use std::collections::{BTreeMap, BTreeSet};

use crate::clients::Task;
use crate::dice::{Dice, mix};
use crate::ending::Expected;
use crate::keeper::Keeper;
use crate::totals::Totals;
use crate::world::{Flight, Journal, Live, World};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Kill,
    Power,
    Close,
    Done,
}

/// Plays a seed. Returns a digest of all that happened, and what that was.
pub fn play(seed: u64, journal: Option<Journal>) -> (u64, Totals) {
    play_out(World::new(Dice::new(seed), seed, journal))
}

/// Plays what a script says, byte by byte in the place of chance; no more steps than it has bytes.
pub fn play_script(script: &[u8], journal: Option<Journal>) -> (u64, Totals) {
    let mut world = World::new(Dice::scripted(script), 0, journal);
    world.setup.steps = world.setup.steps.min(script.len());
    play_out(world)
}

fn play_out(mut world: World) -> (u64, Totals) {
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
                if !world.rest_for_good(&mut live) {
                    expected = world.crash(live, false);
                    live = world
                        .open(&mut expected)
                        .expect("nothing goes wrong any more");
                    let rests = world.rest_for_good(&mut live);
                    assert!(rests, "a reopened store still cannot flush");
                }
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
    pub fn live(&mut self, live: &mut Live, steps: &mut usize) -> End {
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
    pub fn step(&mut self, live: &mut Live, may_begin: bool) {
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
}
