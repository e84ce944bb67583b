//! The clients' side: what the handle does over a remote catalog, step by step.
//!
//! A client has a first connection, whose end is its end, one for what must stay in order, and others that carry one request at a
//! time. Once any of them fails it takes its owner for lost: what it has asked is refused or missed, what it has with the device
//! is waited for, and then it lets go of the volumes.

use larder_engine::catalog::{Finding, Grant, ReservationId};
use larder_engine::index::{Located, SegmentId};
use larder_engine::planted;
use larder_engine::share::ledger::Ledger;
use larder_engine::share::wire::{ClientId, Failure, PlaceGrant, Reply, Request, blob, parse};

use super::Company;
use super::lines::{Line, Note, request_frame};
use super::office::Session;
use super::seat::map_of;
use crate::classes::Class;
use crate::oracle::{Name, VersionId};
use crate::world::{ForeignWrite, Live, World};

/// Longest that a write of a killed process goes on, in steps.
const LATE_STEPS_MAX: u64 = 400;

/// Calls of one client at once.
const TASKS: usize = 2;

/// A process, or the place of one.
#[derive(Default)]
pub struct Client {
    pub part: Part,
    tasks: [Option<Task>; TASKS],
}

#[derive(Default)]
pub enum Part {
    /// There is no such process.
    #[default]
    Down,
    /// It looks for an owner.
    Nobody,
    Attached(Attachment),
}

pub struct Attachment {
    id: ClientId,
    first: u64,
    orders: u64,
    others: Vec<u64>,
    /// It takes its owner for gone.
    is_lost: bool,
    /// The connection on which it has said that it holds its marks.
    marking: Option<u64>,
    may_put: bool,
    /// It does not wait for its marks to be known.
    is_hasty: bool,
    /// Puts that are over.
    ended: Vec<u64>,
}

enum Task {
    /// Something that is answered, and no more to it.
    Ask(u64),
    Put(Put),
    Get(Get),
}

#[derive(Default)]
struct Put {
    id: u64,
    names: Vec<Name>,
    /// The connection on which it waits.
    line: Option<u64>,
    /// The owner's number for it.
    number: Option<u64>,
    core: Option<ReservationId>,
    grants: Vec<Grant>,
    versions: Vec<Option<VersionId>>,
    submitted: bool,
    committed: bool,
    told: bool,
    outstanding: usize,
    landed: Vec<(u32, bool)>,
}

struct Get {
    namespace: usize,
    names: Vec<Name>,
    line: Option<u64>,
    pages: Vec<(Name, Located)>,
    read: usize,
    findings: Vec<(Name, Located, Finding)>,
    /// Steps for which it does nothing.
    hold: usize,
}

impl Task {
    fn line(&self) -> Option<u64> {
        match self {
            Task::Ask(line) => Some(*line),
            Task::Put(put) => put.line,
            Task::Get(get) => get.line,
        }
    }
}

impl Client {
    pub fn id(&self) -> Option<ClientId> {
        match &self.part {
            Part::Attached(attachment) => Some(attachment.id),
            Part::Down | Part::Nobody => None,
        }
    }

    /// A write of a put is over.
    pub fn landed(&mut self, task: u64, asks: &[usize], good: bool) {
        for put in self.tasks.iter_mut().flatten() {
            if let Task::Put(put) = put
                && put.id == task
            {
                put.outstanding -= 1;
                put.landed
                    .extend(asks.iter().map(|ask| (*ask as u32, good)));
            }
        }
    }

    /// Whether it waits for no answer and no device.
    fn is_idle(&self) -> bool {
        self.tasks.iter().all(Option::is_none)
    }

    fn attachment(&mut self) -> &mut Attachment {
        match &mut self.part {
            Part::Attached(attachment) => attachment,
            Part::Down | Part::Nobody => panic!("a client without an owner acts as one"),
        }
    }
}

impl Company {
    /// A step of a client, whatever it is doing.
    pub fn move_client(&mut self, world: &mut World, live: Option<&mut Live>, slot: usize) {
        if !matches!(self.clients[slot].part, Part::Down)
            && world.strikes(Class::ClientDeath, self.odds.death)
        {
            self.kill(world, live, slot);
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
        let (first, orders, others) = (line(true), line(false), vec![line(false), line(false)]);
        let session = Session {
            ledger: Ledger::new(id, live.run().get()),
            reading: Default::default(),
            owed: Default::default(),
        };
        let office = self.office.as_mut().expect("somebody serves");
        office.sessions.insert(id, session);
        world.note(u64::from(id.0), || {
            format!("client {slot} attaches as {id:?}")
        });
        self.clients[slot].part = Part::Attached(Attachment {
            id,
            first,
            orders,
            others,
            is_lost: false,
            marking: None,
            may_put: false,
            is_hasty: world.fault(self.odds.haste),
            ended: Vec::new(),
        });
    }

    /// The process dies. What it had given to the device is not over.
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
                // What it had not handed over yet never happens.
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

    /// The owner need not keep these segments for the client's sake (or any, when `None`).
    fn stop_reading(
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

    /// Takes the owner for gone.
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

    /// Lets go of the volumes, once nothing is under way there.
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
        // Whoever minds the attachment listens on the first connection.
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
            // A client that leaves in order hangs up.
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

    /// A connection fails: at the client, which takes its owner for gone then, or at the owner, which takes the client for gone. What
    /// was on its way to whoever failed is lost.
    fn lose_connection(&mut self, world: &mut World, live: Option<&mut Live>, slot: usize) {
        if world.dice.chance(0.5) {
            self.lose(world, slot);
            return;
        }
        let attachment = self.clients[slot].attachment();
        let all = [
            &[attachment.first, attachment.orders],
            &attachment.others[..],
        ]
        .concat();
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

    // ---- what it says

    /// Sends something on a connection. Not when that is closed: then the owner is lost.
    fn send(&mut self, world: &mut World, slot: usize, number: u64, request: &Request<'_>) -> bool {
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

    /// A connection on which nothing is asked at the moment.
    fn idle_line(&mut self, world: &mut World, slot: usize) -> Option<u64> {
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

    /// Asks; on which connection the answer is to be waited for. `None` when there is none to ask on.
    fn ask(&mut self, world: &mut World, slot: usize, request: &Request<'_>) -> Option<u64> {
        let line = self.idle_line(world, slot)?;
        self.send(world, slot, line, request).then_some(line)
    }

    /// Tells what is not answered; false when that must wait.
    fn tell(&mut self, world: &mut World, slot: usize, request: &Request<'_>) -> bool {
        match self.idle_line(world, slot) {
            Some(line) => {
                self.send(world, slot, line, request);
                true
            }
            None => false,
        }
    }

    fn tell_in_order(&mut self, world: &mut World, slot: usize, request: &Request<'_>) {
        let orders = self.clients[slot].attachment().orders;
        self.send(world, slot, orders, request);
    }

    // ---- what it does

    fn begin(&mut self, world: &mut World, slot: usize, at: usize) {
        let attachment = self.clients[slot].attachment();
        let (may_put, is_hasty) = (attachment.may_put, attachment.is_hasty);
        if !may_put && !is_hasty {
            return;
        }
        if world.fault(self.odds.astray) {
            self.go_astray(world, slot);
        }
        let what = world.dice.below(100);
        let (namespace, names) = match what {
            0..45 => {
                let count = 1 + world.dice.below(world.setup.batch);
                world.draw_names(count)
            }
            _ => world.draw_names(16),
        };
        let keys: Vec<_> = names
            .iter()
            .map(|name| world.oracle.name(*name).key)
            .collect();
        let keys = blob(&keys);
        let number = self.slots[namespace].0;
        let task = match what {
            0..45 => {
                if !may_put {
                    world.count(Class::HastyPut);
                }
                let asks = world.draw_asks(&names);
                let links = asks
                    .iter()
                    .map(|ask| (ask.parent.map(|parent| *parent.as_bytes()), ask.depth))
                    .collect();
                let reserve = Request::Reserve {
                    namespace: number,
                    keys: &keys,
                    links,
                };
                self.next_task += 1;
                let id = self.next_task;
                self.ask(world, slot, &reserve).map(|line| {
                    Task::Put(Put {
                        id,
                        names,
                        line: Some(line),
                        ..Put::default()
                    })
                })
            }
            45..75 => {
                let pin = Request::Pin {
                    namespace: number,
                    keys: &keys,
                };
                let hold = if world.dice.chance(0.3) {
                    world.dice.below(40)
                } else {
                    0
                };
                self.ask(world, slot, &pin).map(|line| {
                    Task::Get(Get {
                        namespace,
                        names,
                        line: Some(line),
                        pages: Vec::new(),
                        read: 0,
                        findings: Vec::new(),
                        hold,
                    })
                })
            }
            _ => {
                let namespace = number;
                let request = match what {
                    75..80 => Request::LongestPrefix {
                        namespace,
                        keys: &keys,
                    },
                    80..84 => Request::Contains {
                        namespace,
                        keys: &keys,
                    },
                    84..88 => Request::Delete {
                        namespace,
                        keys: &keys[..keys.len().min(64)],
                    },
                    88..92 => Request::Flush,
                    92..94 => Request::Room,
                    94 => Request::Clear { namespace },
                    95..97 => Request::WaitForRoom {
                        seen: 0,
                        patience_ms: 10,
                    },
                    _ => {
                        let touch = Request::Touch {
                            namespace,
                            keys: &keys,
                        };
                        self.tell(world, slot, &touch);
                        return;
                    }
                };
                self.ask(world, slot, &request).map(Task::Ask)
            }
        };
        self.clients[slot].tasks[at] = task;
    }

    /// Says something of a put that is over, or one that a former owner granted.
    fn go_astray(&mut self, world: &mut World, slot: usize) {
        let client = &mut self.clients[slot];
        let ended = client.attachment().ended.clone();
        let number = if ended.is_empty() || world.dice.chance(0.7) {
            // The numbers of a run begin above all those of the runs before it.
            world.dice.below(40) as u64
        } else {
            world.dice.pick(&ended)
        };
        world.count(Class::AstrayMessage);
        let reservation = number;
        let request = if world.dice.chance(0.5) {
            Request::Landed {
                reservation,
                pages: (0..4).map(|at| (at, true)).collect(),
            }
        } else {
            Request::Commit {
                reservation,
                checksums: vec![None; 4],
            }
        };
        self.tell_in_order(world, slot, &request);
    }

    fn go_on_putting(&mut self, world: &mut World, slot: usize, at: usize, mut put: Put) {
        let is_lost = self.clients[slot].attachment().is_lost;
        if is_lost {
            // The call ends when the device is done with its memory.
            if put.outstanding > 0 {
                self.clients[slot].tasks[at] = Some(Task::Put(put));
            }
            return;
        }
        if let (None, Some(reservation)) = (put.line, put.number) {
            if !put.submitted {
                put.submitted = true;
                self.submit(world, slot, &mut put);
            } else if !put.committed {
                put.committed = true;
                let checksum = |version: VersionId| world.oracle.version(version).checksum;
                let checksums = put.versions.iter().map(|version| version.map(checksum));
                let commit = Request::Commit {
                    reservation,
                    checksums: checksums.collect(),
                };
                self.tell_in_order(world, slot, &commit);
            } else if put.outstanding == 0 && !put.told {
                put.told = true;
                let landed = Request::Landed {
                    reservation,
                    pages: std::mem::take(&mut put.landed),
                };
                self.tell_in_order(world, slot, &landed);
            } else if put.outstanding == 0 {
                put.line = self.ask(world, slot, &Request::Wait { reservation });
            }
        }
        self.clients[slot].tasks[at] = Some(Task::Put(put));
    }

    /// Gives the granted pages to the device.
    fn submit(&mut self, world: &mut World, slot: usize, put: &mut Put) {
        let client = self.clients[slot].attachment().id;
        for write in world.writes_of(&put.grants, &put.versions) {
            put.outstanding += 1;
            let due = world.moment + world.draw_delay();
            world.foreign.push(ForeignWrite {
                client,
                task: put.id,
                write,
                due,
                is_orphan: false,
            });
        }
    }

    fn go_on_getting(
        &mut self,
        world: &mut World,
        live: Option<&mut Live>,
        slot: usize,
        at: usize,
        mut get: Get,
    ) {
        let attachment = self.clients[slot].attachment();
        let (id, is_lost) = (attachment.id, attachment.is_lost);
        if get.line.is_some() {
            // Without an answer everything is a miss.
            if !is_lost {
                self.clients[slot].tasks[at] = Some(Task::Get(get));
            }
            return;
        }
        if get.hold > 0 && !world.calm {
            get.hold -= 1;
        } else if let Some((name, located)) = get.pages.get(get.read).copied() {
            get.read += 1;
            let finding = self.read(world, id, name, &located);
            if finding != Finding::Good || located.unproven {
                get.findings.push((name, located, finding));
            }
        } else if is_lost {
            return;
        } else if !get.findings.is_empty() {
            if self.tell_findings(world, slot, &get) {
                get.findings.clear();
            }
        } else {
            let segments: Vec<SegmentId> = get
                .pages
                .iter()
                .map(|(_, located)| located.place.segment)
                .collect();
            let unpin = Request::Unpin {
                segments: segments.clone(),
            };
            if self.tell(world, slot, &unpin) {
                self.stop_reading(live, id, Some(&segments));
                return;
            }
        }
        self.clients[slot].tasks[at] = Some(Task::Get(get));
    }

    fn tell_findings(&mut self, world: &mut World, slot: usize, get: &Get) -> bool {
        let key = |name: &Name| world.oracle.name(*name).key;
        let keys: Vec<_> = get.findings.iter().map(|(name, ..)| key(name)).collect();
        let findings = get.findings.iter();
        let verified = Request::Verified {
            namespace: self.slots[get.namespace].0,
            keys: &blob(&keys),
            findings: findings
                .map(|(_, located, finding)| (located.place, *finding))
                .collect(),
        };
        self.tell(world, slot, &verified)
    }

    /// Reads a page and looks at what it got. What the owner does not keep for it any more may be somebody else's by now.
    fn read(&self, world: &mut World, id: ClientId, name: Name, located: &Located) -> Finding {
        let (volume, start) = world.address(located.place);
        let version = world.oracle.find(name, located.checksum);
        let version = version.expect("a page was found with a checksum that was never put");
        let count = world.oracle.version(version).blocks as usize;
        let (misdirected, from) = world.read_from(volume, start, count);
        let outcome = world.disk.read(volume, from, count);
        let is_kept = self.office.as_ref().is_some_and(|office| {
            let session = office.sessions.get(&id);
            session.is_some_and(|session| !session.ledger.is_gone())
        });
        if let Ok(blocks) = &outcome
            && !is_kept
        {
            let is_right = world.oracle.is_payload(version, blocks);
            assert!(
                is_right || !planted!(StaleExtent),
                "{version:?} of {name:?} is handed out with other bytes"
            );
            if !is_right {
                world.count(Class::StaleExtent);
            }
        }
        world.judge(name, located, &outcome, misdirected || !is_kept)
    }

    // ---- what it is answered

    /// A client reads an answer.
    pub fn hear_reply(&mut self, world: &mut World, number: u64) {
        let line = self.lines.get_mut(&number).expect("a line");
        let id = line.client;
        let Some(message) = line.down.pop_front() else {
            return;
        };
        let bytes = message.bytes();
        let reply: Reply = parse(&bytes).expect("a reply that was sent");
        let of = |client: &Client| client.id() == Some(id);
        let slot = self
            .clients
            .iter()
            .position(of)
            .expect("a client that listens");
        if matches!(reply, Reply::Failed(Failure::Protocol(_))) {
            panic!("{id:?} is told that it makes no sense: {reply:?}");
        }
        let attachment = self.clients[slot].attachment();
        if attachment.marking == Some(number) {
            attachment.marking = None;
            attachment.may_put = true;
            return;
        }
        let waits = |task: &Option<Task>| task.as_ref().and_then(Task::line) == Some(number);
        let at = self.clients[slot].tasks.iter().position(waits);
        let at = at.expect("an answer that nobody waits for");
        match (self.clients[slot].tasks[at].take(), reply) {
            (Some(Task::Put(put)), reply) => {
                let put = self.hear_put(world, slot, put, reply, message.note);
                self.clients[slot].tasks[at] = put.map(Task::Put);
            }
            (Some(Task::Get(mut get)), Reply::Pinned(pages)) => {
                get.line = None;
                let found = get.names.iter().zip(pages);
                get.pages = found
                    .filter_map(|(name, page)| {
                        let page = page?;
                        let located = Located {
                            place: page.place,
                            checksum: page.checksum,
                            unproven: page.unproven,
                        };
                        Some((*name, located))
                    })
                    .collect();
                world.totals.misses += (get.names.len() - get.pages.len()) as u64;
                self.clients[slot].tasks[at] = (!get.pages.is_empty()).then_some(Task::Get(get));
            }
            (Some(Task::Ask(_)), _) => {}
            (_, reply) => panic!("{id:?} is answered with {reply:?}"),
        }
    }

    fn hear_put(
        &mut self,
        world: &mut World,
        slot: usize,
        mut put: Put,
        reply: Reply,
        note: Option<Note>,
    ) -> Option<Put> {
        put.line = None;
        match (reply, note) {
            (
                Reply::Reserved {
                    reservation,
                    grants,
                },
                note,
            ) => {
                let map = map_of(world);
                put.number = Some(reservation);
                let grants = grants.into_iter().map(|grant| match grant {
                    PlaceGrant::Write(place) => Grant::Write(map.extent(place)),
                    PlaceGrant::Settles => Grant::Settles,
                    PlaceGrant::Refused(why) => Grant::Refused(why),
                });
                put.grants = grants.collect();
                put.versions = vec![None; put.grants.len()];
                if let Some(Note::Reserved(core, versions)) = note {
                    put.core = Some(core);
                    put.versions = versions;
                }
                Some(put)
            }
            (Reply::Settled(statuses), note) => {
                assert_eq!(statuses.len(), put.names.len(), "one status a page");
                if let Some(Note::Settled(core)) = note {
                    assert_eq!(put.core, Some(core), "a client is told of another put");
                }
                self.clients[slot].attachment().ended.extend(put.number);
                None
            }
            (reply, _) => panic!("a put is answered with {reply:?}"),
        }
    }
}
