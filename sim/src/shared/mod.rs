//! Several processes on one store: an owner, and clients that write and read page data themselves.
//!
//! The owner is the run's core behind the ledgers and answers of the real server, which gets real
//! messages. Clients take the steps that the handle takes over a remote catalog. All communication
//! between them is messages on connections. A message arrives in order with others on its own
//! connection only, or late, or not at all. A client can die at any step. Its writes in flight land
//! at any later time, even under a later owner if that owner does not wait for them. The owner can
//! die too, and a client takes its place.
//!
//! | module | content |
//! |---|---|
//! | `lines` | connections |
//! | `seat` | the core as the answers' catalog |
//! | `office` | the owner's side |
//! | `client`, `calls` | the clients' side: processes, and their calls |
//! | `takeover` | a seed from start to end: owners and their ends |

mod calls;
mod client;
mod lines;
mod office;
mod seat;
mod takeover;

use std::collections::BTreeMap;

use larder_engine::index::NamespaceSlot;
use larder_engine::share::wire::ClientId;
use larder_sim_runtime::dice::Dice;

use crate::classes::Class;
use crate::world::{Live, World};
use client::{Client, Part};
use lines::Line;
use office::Office;
pub use takeover::play;

/// Longest delay of a message, in steps.
const DELAY_STEPS_MAX: u64 = 100;

/// Probabilities of faults among the processes: per step of a client, per message, or per
/// attachment, as each states.
#[derive(Default)]
struct Odds {
    /// A client is killed.
    death: f64,
    /// A client is stopped.
    stop: f64,
    /// The owner checks whether a client makes progress with its puts.
    look: f64,
    /// A connection is lost.
    loss: f64,
    /// A message is delayed.
    delay: f64,
    /// A client sends a message about a finished put, or about a put of a previous owner.
    astray: f64,
    /// A client puts before its marks are known.
    haste: f64,
}

/// All processes except the owner's own callers.
struct Company {
    odds: Odds,
    /// Weight of the company's steps, relative to the steps of the store itself.
    weight: usize,
    clients: Vec<Client>,
    lines: BTreeMap<u64, Line>,
    /// By client that may be marked. True if its process holds the mark, false if only its writes
    /// in flight do.
    marks: BTreeMap<ClientId, bool>,
    next_client: u32,
    next_line: u64,
    next_task: u64,
    messages: u64,
    /// The last owner was killed in the middle of a reclaim.
    fell_in_reclaim: bool,
    /// By namespace of the run: the owner's number for it.
    slots: Vec<NamespaceSlot>,
    /// The state of the owner, while there is one.
    office: Option<Office>,
}

/// A possible next step.
enum Act {
    /// The owner reads a message of this connection.
    Serve(u64),
    /// The owner's thread of this connection waits for an event.
    Answer(u64),
    /// The owner's thread finds its connection closed.
    End(u64),
    /// A client reads an answer.
    Hear(u64),
    /// The owner checks a client that is gone.
    Linger(ClientId),
    Client(usize),
}

impl Company {
    fn draw(dice: &mut Dice, steps: usize) -> Company {
        let step = 1.0 / steps as f64;
        let mut some = |share: f64, of: &[f64]| {
            if dice.chance(share) {
                dice.pick(of)
            } else {
                0.0
            }
        };
        let odds = Odds {
            death: some(0.7, &[4.0 * step, 15.0 * step]),
            stop: some(0.4, &[2.0 * step, 8.0 * step]),
            look: some(0.5, &[0.02, 0.1]),
            loss: some(0.4, &[2.0 * step, 8.0 * step]),
            delay: some(0.6, &[0.05, 0.3]),
            astray: some(0.3, &[0.1]),
            haste: some(0.3, &[0.5]),
        };
        let clients = 1 + dice.below(4);
        Company {
            odds,
            weight: dice.pick(&[12, 20, 40]),
            clients: (0..clients).map(|_| Client::default()).collect(),
            lines: BTreeMap::new(),
            marks: BTreeMap::new(),
            next_client: 0,
            next_line: 0,
            next_task: 0,
            messages: 0,
            fell_in_reclaim: false,
            slots: Vec::new(),
            office: None,
        }
    }

    /// Whether a client's mark is on the volumes.
    fn is_marked(&self, world: &World, client: ClientId) -> bool {
        self.marks.get(&client).is_some_and(|is_held| {
            *is_held || world.foreign.iter().any(|write| write.client == client)
        })
    }

    /// The number of a message, and the earliest time of its arrival.
    fn stamp(&mut self, world: &mut World) -> (u64, u64) {
        self.messages += 1;
        let is_late = world.strikes(Class::MessageDelayed, self.odds.delay);
        let delay = if is_late {
            world.dice.between(1, DELAY_STEPS_MAX)
        } else {
            0
        };
        (self.messages, world.moment + delay)
    }

    fn acts(&self, world: &World) -> Vec<Act> {
        let is_due = |due: u64| due <= world.moment || world.calm;
        let stopped = self
            .clients
            .iter()
            .filter(|client| client.is_stopped(world));
        let stopped: Vec<ClientId> = stopped.filter_map(Client::id).collect();
        let mut acts = Vec::with_capacity(2 * self.lines.len() + self.clients.len());
        for (&number, line) in &self.lines {
            if !line.unserved && self.office.is_some() {
                match line.up.front() {
                    _ if line.waits.is_some() => acts.push(Act::Answer(number)),
                    Some(message) if is_due(message.due) => acts.push(Act::Serve(number)),
                    None if line.left || line.hung_up => acts.push(Act::End(number)),
                    _ => {}
                }
            }
            let heard = line.down.front();
            if heard.is_some_and(|message| is_due(message.due)) && !stopped.contains(&line.client) {
                acts.push(Act::Hear(number));
            }
        }
        if let Some(office) = &self.office {
            acts.extend(office.lingering.iter().map(|client| Act::Linger(*client)));
        }
        acts.extend((0..self.clients.len()).map(Act::Client));
        acts
    }

    /// One step of a process.
    fn step(&mut self, world: &mut World, mut live: Option<&mut Live>) {
        world.moment += 1;
        if let Some(live) = live.as_deref_mut()
            && world.fault(self.odds.look)
        {
            self.look(world, live);
        }
        let acts = self.acts(world);
        let at = world.dice.below(acts.len());
        match (&acts[at], live) {
            (&Act::Serve(line), Some(live)) => self.serve(world, live, line),
            (&Act::Answer(line), Some(live)) => self.answer(world, live, line),
            (&Act::End(line), Some(live)) => self.end_line(world, live, line),
            (&Act::Linger(client), Some(live)) => self.look_after(world, live, client, false),
            (&Act::Hear(line), _) => self.hear_reply(world, line),
            (&Act::Client(slot), live) => self.move_client(world, live, slot),
            (_, None) => {}
        }
        self.take_landed(world);
        self.lines.retain(|_, line| !line.is_over());
    }

    /// Between two steps: processes the answers of the device and of the core.
    fn attend(&mut self, world: &mut World, live: &mut Live) {
        self.take_landed(world);
        self.hear(world, live);
        if world.moment.is_multiple_of(world.setup.check_every) {
            self.check_pins(world, live);
        }
    }

    /// Reports finished writes to their clients. A dead process loses its mark with its last write.
    fn take_landed(&mut self, world: &mut World) {
        for (foreign, good) in std::mem::take(&mut world.foreign_done) {
            let of = |client: &&mut Client| client.id() == Some(foreign.client);
            if let Some(client) = self.clients.iter_mut().find(of) {
                client.landed(foreign.task, &foreign.write.asks, good);
            }
        }
        let foreign = &world.foreign;
        self.marks.retain(|client, is_held| {
            *is_held || foreign.iter().any(|write| write.client == *client)
        });
    }

    /// Whether all clients are gone.
    fn is_empty(&self) -> bool {
        self.clients
            .iter()
            .all(|client| matches!(client.part, Part::Down))
    }
}
