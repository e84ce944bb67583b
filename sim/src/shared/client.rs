//! The clients' side: the work of the handle over a remote catalog, step by step.
//!
//! A client has a first connection, and others that serve one call at a time. The end of the first
//! one is the client's end. A put keeps its connection to its end. Once any connection fails, the
//! client treats its owner as lost. Its requests are refused or missed. It waits for its writes in
//! flight, and then releases the volumes.

use larder_engine::index::SegmentId;
use larder_engine::share::ledger::Ledger;
use larder_engine::share::wire::{ClientId, Request};

use super::Company;
use super::calls::Task;
use super::lines::{Line, request_frame};
use super::office::Session;
use crate::classes::Class;
use crate::world::{Live, World};

/// Longest time that a write of a killed process takes, in steps.
const LATE_STEPS_MAX: u64 = 400;

/// Longest stop of a client, in steps.
const STOPPED_STEPS_MAX: u64 = 1000;

/// Calls of one client at the same time.
pub const TASKS: usize = 2;

/// Connections of a client besides the first.
const OTHERS: usize = TASKS + 1;

/// A process, or a free place for one.
#[derive(Default)]
pub struct Client {
    pub part: Part,
    pub tasks: [Option<Task>; TASKS],
    /// The process is stopped until this moment.
    stopped_until: u64,
}

#[derive(Default)]
pub enum Part {
    /// There is no such process.
    #[default]
    Down,
    /// The process looks for an owner.
    Nobody,
    Attached(Attachment),
}

pub struct Attachment {
    pub id: ClientId,
    first: u64,
    others: Vec<u64>,
    /// It treats its owner as gone.
    pub is_lost: bool,
    /// The connection on which it has reported that it holds its marks.
    pub marking: Option<u64>,
    pub may_put: bool,
    /// It does not wait until its marks are known.
    pub is_hasty: bool,
    /// Finished puts.
    pub ended: Vec<u64>,
}

impl Client {
    pub fn id(&self) -> Option<ClientId> {
        match &self.part {
            Part::Attached(attachment) => Some(attachment.id),
            Part::Down | Part::Nobody => None,
        }
    }

    /// The owner no longer keeps pages pinned for this client. A read that still waits for its
    /// answer is affected only if the owner has `heard` its request.
    pub fn forfeit_reads(&mut self, heard: impl Fn(u64) -> bool) {
        for task in self.tasks.iter_mut().flatten() {
            if let Task::Get(get) = task {
                get.is_kept &= get.line.is_some_and(|line| !heard(line));
            }
        }
    }

    /// Whether its process exists and is stopped.
    pub fn is_stopped(&self, world: &World) -> bool {
        world.moment < self.stopped_until && !world.calm
    }

    /// A write of a put has ended.
    pub fn landed(&mut self, task: u64, asks: &[usize], good: bool) {
        for put in self.tasks.iter_mut().flatten() {
            if let Task::Put(put) = put {
                let mut windows = put.windows.iter_mut();
                if let Some(window) = windows.find(|window| window.id == task) {
                    window.landed(asks, good);
                }
            }
        }
    }

    /// Whether it waits for no answer and no device.
    fn is_idle(&self) -> bool {
        self.tasks.iter().all(Option::is_none)
    }

    pub fn attachment(&mut self) -> &mut Attachment {
        match &mut self.part {
            Part::Attached(attachment) => attachment,
            Part::Down | Part::Nobody => panic!("a client acts without an owner"),
        }
    }
}

impl Company {
    /// One step of a client in any state.
    pub fn move_client(&mut self, world: &mut World, live: Option<&mut Live>, slot: usize) {
        if !matches!(self.clients[slot].part, Part::Down)
            && world.strikes(Class::ClientDeath, self.odds.death)
        {
            self.kill(world, live, slot);
            return;
        }
        if self.clients[slot].is_stopped(world) {
            return;
        }
        match &self.clients[slot].part {
            Part::Down => {
                if !world.calm && world.dice.chance(0.2) {
                    self.clients[slot].part = Part::Nobody;
                }
            }
            Part::Nobody if world.calm => self.clients[slot].part = Part::Down,
            Part::Nobody => {
                let listens = self
                    .office
                    .as_ref()
                    .is_some_and(|office| !office.is_closing);
                if let Some(live) = live.filter(|_| listens) {
                    self.attach(world, live, slot);
                }
            }
            Part::Attached(_) => self.live_on(world, live, slot),
        }
    }

    fn attach(&mut self, world: &mut World, live: &Live, slot: usize) {
        let id = ClientId(self.next_client);
        self.next_client += 1;
        let mut line = |is_first| {
            self.next_line += 1;
            self.lines.insert(self.next_line, Line::new(id, is_first));
            self.next_line
        };
        let (first, others) = (line(true), [(); OTHERS].map(|()| line(false)).to_vec());
        let session = Session {
            ledger: Ledger::new(id, live.run().get()),
            reading: Default::default(),
            owed: Default::default(),
            forfeited: Default::default(),
        };
        let office = self.office.as_mut().expect("an owner is present");
        office.sessions.insert(id, session);
        world.note(u64::from(id.0), || {
            format!("client {slot} attaches as {id:?}")
        });
        self.clients[slot].part = Part::Attached(Attachment {
            id,
            first,
            others,
            is_lost: false,
            marking: None,
            may_put: false,
            is_hasty: world.fault(self.odds.haste),
            ended: Vec::new(),
        });
    }

    /// The process dies. Its writes in flight continue.
    fn kill(&mut self, world: &mut World, live: Option<&mut Live>, slot: usize) {
        let client = std::mem::take(&mut self.clients[slot]);
        let Some(id) = client.id() else {
            return;
        };
        let is = |of: fn(&Task) -> bool| client.tasks.iter().flatten().any(of);
        if is(|task| matches!(task, Task::Put(_))) {
            world.count(Class::ClientDeathInPut);
        }
        if is(|task| matches!(task, Task::Get(_))) {
            world.count(Class::ClientDeathInGet);
        }
        world.note(u64::from(id.0), || format!("{id:?} is killed"));
        for line in self.lines.values_mut().filter(|line| line.client == id) {
            line.leave();
        }
        self.stop_reading(live, id, None);
        let foreign = std::mem::take(&mut world.foreign);
        for mut write in foreign {
            if write.client == id {
                // Writes that it had not yet handed to the device never happen.
                if world.dice.chance(0.2) {
                    continue;
                }
                let late = world.dice.pick(&[0, 20, LATE_STEPS_MAX]);
                write.due = write.due.max(world.moment + world.dice.between(0, late));
                write.is_orphan = true;
            }
            world.foreign.push(write);
        }
        self.marks.entry(id).and_modify(|is_held| *is_held = false);
    }

    /// The owner need not keep these segments (or any, when `None`) for the client.
    pub fn stop_reading(
        &mut self,
        live: Option<&mut Live>,
        id: ClientId,
        segments: Option<&[SegmentId]>,
    ) {
        let session = self
            .office
            .as_mut()
            .and_then(|office| office.sessions.get_mut(&id));
        if let (Some(live), Some(session)) = (live, session) {
            match segments {
                Some(segments) => session.stop_reading(live, segments),
                None => session.stop_all_reading(live),
            }
        }
    }

    /// Treats the owner as gone.
    fn lose(&mut self, world: &mut World, slot: usize) {
        let client = &mut self.clients[slot];
        let attachment = client.attachment();
        if std::mem::replace(&mut attachment.is_lost, true) {
            return;
        }
        let id = attachment.id;
        world.note(u64::from(id.0), || format!("{id:?} has lost its owner"));
        for line in self.lines.values_mut().filter(|line| line.client == id) {
            line.leave();
        }
    }

    /// Releases the volumes, once no write is in flight there.
    fn let_go(&mut self, slot: usize) {
        let client = &mut self.clients[slot];
        let id = client.attachment().id;
        self.marks.remove(&id);
        client.part = Part::Nobody;
    }

    fn live_on(&mut self, world: &mut World, live: Option<&mut Live>, slot: usize) {
        let attachment = self.clients[slot].attachment();
        let (id, first) = (attachment.id, attachment.first);
        let (is_lost, is_marking) = (attachment.is_lost, attachment.marking.is_some());
        let waits_to_mark = !is_marking && !attachment.may_put;
        if is_lost && self.clients[slot].is_idle() {
            self.let_go(slot);
            return;
        }
        if !is_lost && world.strikes(Class::ConnectionLost, self.odds.loss) {
            self.lose_connection(world, live, slot);
            return;
        }
        if world.strikes(Class::ClientStopped, self.odds.stop) {
            let steps = world.dice.between(1, STOPPED_STEPS_MAX);
            self.clients[slot].stopped_until = world.moment + steps;
            world.note(u64::from(id.0), || {
                format!("{id:?} is stopped for {steps} steps")
            });
            return;
        }
        // The thread that monitors the attachment reads the first connection.
        let is_closed = |number: &u64| {
            let line = self.lines.get(number);
            line.is_none_or(|line| line.hung_up && line.down.is_empty())
        };
        let tasks = self.clients[slot].tasks.iter().flatten();
        let hears_the_end = tasks.filter_map(Task::line).any(|line| is_closed(&line));
        let minds_the_end = is_closed(&first) && world.dice.chance(0.3);
        if !is_lost && (hears_the_end || minds_the_end) {
            self.lose(world, slot);
            return;
        }
        let is_hasty = self.clients[slot].attachment().is_hasty;
        if !is_lost && waits_to_mark && (!is_hasty || world.calm || world.dice.chance(0.02)) {
            self.marks.insert(id, true);
            let line = self.ask(world, slot, &Request::Marked);
            self.clients[slot].attachment().marking = line;
            return;
        }
        let at = world.dice.below(TASKS);
        match self.clients[slot].tasks[at].take() {
            None if is_lost => {}
            // A client that leaves in order closes its connections.
            None if world.calm => {
                if self.clients[slot].is_idle() {
                    self.lose(world, slot);
                }
            }
            None => self.begin(world, slot, at),
            Some(Task::Ask(_)) if is_lost => {}
            Some(Task::Ask(line)) => self.clients[slot].tasks[at] = Some(Task::Ask(line)),
            Some(Task::Put(put)) => self.go_on_putting(world, slot, at, put),
            Some(Task::Get(get)) => self.go_on_getting(world, live, slot, at, get),
        }
    }

    /// A connection fails: at the client, which then treats its owner as gone, or at the owner,
    /// which treats the client as gone. Messages on their way to the failed end are lost.
    fn lose_connection(&mut self, world: &mut World, live: Option<&mut Live>, slot: usize) {
        if world.dice.chance(0.5) {
            self.lose(world, slot);
            return;
        }
        let attachment = self.clients[slot].attachment();
        let all = [&[attachment.first], &attachment.others[..]].concat();
        let number = world.dice.pick(&all);
        let line = self
            .lines
            .get(&number)
            .filter(|line| line.waits.is_none() && !line.unserved);
        if let (Some(line), Some(live)) = (line, live) {
            world.note(number, || format!("connection {number} is lost"));
            let lost = line.up.len() as u64;
            world.tally.count_many(Class::MessageLost, lost);
            self.fail_line(world, live, number);
        }
    }

    // ---- messages

    /// Sends a message on a connection. If that is closed, the owner is lost.
    pub fn send(
        &mut self,
        world: &mut World,
        slot: usize,
        number: u64,
        request: &Request<'_>,
    ) -> bool {
        let (sent, due) = self.stamp(world);
        match self.lines.get_mut(&number).filter(|line| !line.hung_up) {
            Some(line) => {
                let message = Line::message(request_frame(request), None, sent, due);
                Line::push(&mut line.up, message);
                true
            }
            None => {
                self.lose(world, slot);
                false
            }
        }
    }

    /// A connection without a request in progress.
    pub fn idle_line(&mut self, world: &mut World, slot: usize) -> Option<u64> {
        let client = &mut self.clients[slot];
        let busy: Vec<u64> = client
            .tasks
            .iter()
            .flatten()
            .filter_map(Task::line)
            .collect();
        let attachment = client.attachment();
        let is_idle = |line: &&u64| !busy.contains(line) && attachment.marking != Some(**line);
        let idle: Vec<u64> = attachment.others.iter().filter(is_idle).copied().collect();
        (!idle.is_empty()).then(|| world.dice.pick(&idle))
    }

    /// Sends a request. Returns the connection of the answer, or `None` if none is free.
    pub fn ask(&mut self, world: &mut World, slot: usize, request: &Request<'_>) -> Option<u64> {
        let line = self.idle_line(world, slot)?;
        self.send(world, slot, line, request).then_some(line)
    }

    /// Sends a message without an answer. Returns false if it must wait.
    pub fn tell(&mut self, world: &mut World, slot: usize, request: &Request<'_>) -> bool {
        match self.idle_line(world, slot) {
            Some(line) => {
                self.send(world, slot, line, request);
                true
            }
            None => false,
        }
    }
}
