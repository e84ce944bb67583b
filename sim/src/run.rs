//! A seed from its first open to its last check: the steps, and the device's work in each.

use crate::classes::{Class, Tally};
use crate::clients::Task;
use crate::ending::Expected;
use crate::keeper::Keeper;
use crate::opening::Opening;
use crate::totals::Totals;
use crate::world::{Flight, InFlight, Journal, Live, World};
use larder_engine::core::Copied;
use larder_engine::disk::DiskError;
use larder_sim_runtime::dice::{Dice, mix};
use larder_sim_runtime::medium::Left;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Kill,
    Power,
    Close,
    Done,
}

/// Plays a seed. Returns a digest of all events, and their counts.
pub fn play(seed: u64, journal: Option<Journal>) -> (u64, Totals, Tally) {
    play_out(World::new(Dice::new(seed), seed, journal))
}

/// Plays a script: its bytes replace randomness. The run has at most as many steps as the script
/// has bytes.
pub fn play_script(script: &[u8], journal: Option<Journal>) -> (u64, Totals, Tally) {
    let mut world = World::new(Dice::scripted(script), 0, journal);
    world.setup.steps = world.setup.steps.min(script.len());
    play_out(world)
}

fn play_out(mut world: World) -> (u64, Totals, Tally) {
    let mut expected = Expected {
        exactly: true,
        ..Expected::default()
    };
    let mut steps = world.setup.steps;
    loop {
        let mut live = match world.open(&mut expected) {
            Opening::Open(live) => *live,
            Opening::CutShort => continue,
            Opening::Refused => break,
        };
        match world.live(&mut live, &mut steps) {
            End::Close => expected = world.close(live),
            End::Done => {
                end_well(&mut world, live);
                break;
            }
            end => expected = world.crash(live, end == End::Power),
        }
    }
    sum_up(&world)
}

/// Faults stop. Everything must come to rest, and survive a power loss after that.
pub fn end_well(world: &mut World, mut live: Live) {
    if !world.rest_for_good(&mut live) {
        let mut expected = world.crash(live, false);
        let Opening::Open(reopened) = world.open(&mut expected) else {
            return;
        };
        live = *reopened;
        let rests = world.rest_for_good(&mut live);
        assert!(rests, "a reopened store still cannot flush");
    }
    let mut expected = world.crash(live, true);
    world.open(&mut expected);
}

/// A digest of all events, and their counts.
pub fn sum_up(world: &World) -> (u64, Totals, Tally) {
    let digest = world
        .disk
        .volumes()
        .iter()
        .fold(world.digest, |digest, volume| mix(digest, volume.digest()));
    let mut tally = world.tally;
    tally.add(&world.disk.kernel().tally);
    tally.end_seed();
    (digest, world.totals, tally)
}

impl World {
    pub fn live(&mut self, live: &mut Live, steps: &mut usize) -> End {
        while *steps > 0 {
            *steps -= 1;
            if let Some(end) = self.begin_step() {
                return end;
            }
            self.step(live, true);
            self.lose_begun();
        }
        End::Done
    }

    /// Events between two steps. Returns the end of the run, if one of them is an end.
    pub fn begin_step(&mut self) -> Option<End> {
        self.totals.steps += 1;
        self.spoil();
        self.draw_death();
        self.disturb_clock();
        self.draw_end()
    }

    /// The end of the run, if it comes now.
    pub fn draw_end(&mut self) -> Option<End> {
        let faults = &self.setup.faults;
        let (kill, power, close) = (faults.kill, faults.power, faults.close);
        let ends = [(kill, End::Kill), (power, End::Power), (close, End::Close)];
        ends.into_iter()
            .find_map(|(probability, end)| self.fault(probability).then_some(end))
    }

    /// One step of an activity that can proceed.
    pub fn step(&mut self, live: &mut Live, may_begin: bool) {
        self.moment += 1;
        let weights = self.setup.weights;
        let flights = live.flights.len();
        let device = if flights == 0 { 0 } else { weights.device };
        let keeper = if self.keeper_can_go_on(live) {
            weights.keeper
        } else {
            0
        };
        let total = device + keeper + weights.clients + weights.clock;
        let draw = self.dice.below(total);
        if draw < device {
            let at = self.dice.below(flights);
            if live.flights[at].due <= self.moment || self.calm {
                let InFlight { flight, number, .. } = live.flights.swap_remove(at);
                let volume = flight.volume();
                let overtakes =
                    |other: &InFlight| other.number < number && other.flight.volume() == volume;
                if live.flights.iter().any(overtakes) {
                    self.count(Class::Reordered);
                }
                self.arrive(live, flight);
            }
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
            self.pass_time(World::wakes_at(live));
        }
        self.hear(live);
        self.check(live);
    }

    /// The address that a read of page data really reads, and whether the read may fail: sometimes
    /// a wrong address.
    pub fn read_from(&mut self, volume: usize, start: usize, count: usize) -> (bool, usize) {
        if self.strikes(Class::MisdirectedRead, self.setup.faults.misdirected_read) {
            let last = self.disk.volumes()[volume].blocks() - count;
            (true, self.dice.below(last))
        } else {
            (self.disk.volumes()[volume].left == Left::Nothing, start)
        }
    }

    /// The device finishes an operation.
    fn arrive(&mut self, live: &mut Live, flight: Flight) {
        match flight {
            Flight::Meta {
                id,
                volume,
                start,
                blocks,
                header,
            } => {
                let is_header = header.is_some();
                let result = self.write(volume, start, &blocks, |faults| {
                    if is_header {
                        (faults.header_error, Class::HeaderError)
                    } else {
                        (faults.meta_error, Class::DescriptorError)
                    }
                });
                live.has_written = true;
                self.note(id.0, || {
                    format!("{id:?} written at {volume}:{start}: {result:?}")
                });
                live.failures += u64::from(result.is_err());
                self.with_core(live, |core| core.io_done(id, result));
            }
            Flight::Data {
                client,
                asks,
                volume,
                start,
                blocks,
            } => {
                let result = self.write(volume, start, &blocks, |faults| {
                    (faults.data_error, Class::DataError)
                });
                let good = result.is_ok();
                live.has_written = true;
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
                        let Keeper::Copying(copying) = &mut live.keeper else {
                            panic!("a copy ends before its writes");
                        };
                        copying.flights -= 1;
                        for (at, good) in landed {
                            copying.outcomes[at] = if good {
                                Copied::Written
                            } else {
                                Copied::NotWritten
                            };
                        }
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
                let (misdirected, from) = self.read_from(volume, start, count);
                let outcome = self.disk.read(volume, from, count);
                let Some(Task::Get(get)) = live.clients[client].as_mut() else {
                    panic!("a get ends before its reads");
                };
                World::read_done(get, at, outcome, misdirected);
            }
            Flight::Sync { id, volume, covers } => {
                let good = self.sync(volume, covers);
                self.note(id.0, || format!("{id:?} sync of volume {volume}: {good}"));
                live.failures += u64::from(!good);
                let result = if good { Ok(()) } else { Err(DiskError::Os(5)) };
                self.with_core(live, |core| core.io_done(id, result));
            }
        }
    }
}
