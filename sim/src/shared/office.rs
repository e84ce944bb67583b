//! The owner's side: the store's own ledgers and answers, fed message by message.

use std::collections::{BTreeMap, BTreeSet};

use larder_engine::catalog::ReservationId;
use larder_engine::core::RequestId;
use larder_engine::format::PageKey;
use larder_engine::index::{NamespaceSlot, SegmentId};
use larder_engine::share::answer::{self, Answer, Desk, Later, count, done};
use larder_engine::share::ledger::{Awaited, Ledger, READ_LOOKS};
use larder_engine::share::wire::{ClientId, Failure, Reply, Request as Asked, parse};
use larder_engine::{NamespaceId, PutStatus, StoreError};

use super::Company;
use super::client::Client;
use super::lines::{Line, Note, Waits, reply_frame};
use super::seat::{Given, Marked, Seat, map_of};
use crate::classes::Class;
use crate::clients::{Put, Request};
use crate::world::{Live, World};

/// The owner's view of a client.
pub struct Session {
    pub ledger: Ledger,
    /// Pins that the client reads under: it is alive and has not released them.
    pub reading: BTreeMap<SegmentId, u32>,
    /// Pins that the client was given, and whose release the owner has not received.
    pub owed: BTreeMap<SegmentId, u32>,
    /// Pins that were taken back, and whose release the owner has not received.
    pub forfeited: BTreeMap<SegmentId, u32>,
}

/// The owner's state outside its core. It is lost with the owner.
#[derive(Default)]
pub struct Office {
    /// It accepts no more clients.
    pub is_closing: bool,
    pub sessions: BTreeMap<ClientId, Session>,
    /// Clients that are gone, and whose puts have not ended.
    pub lingering: Vec<ClientId>,
    /// Puts that have not settled.
    pub puts: BTreeMap<ReservationId, (ClientId, Put)>,
    /// Results of settled puts that no client has received.
    outcomes: BTreeMap<ReservationId, Vec<PutStatus>>,
    /// Puts whose result no client will request.
    unawaited: BTreeSet<ReservationId>,
    requests: BTreeMap<RequestId, (Request, u64)>,
    finished: BTreeMap<RequestId, Reply>,
}

impl Office {
    /// For the core the pages of these puts have failed.
    fn give_up(&self, world: &mut World, live: &mut Live, puts: &[ReservationId]) {
        if !puts.is_empty() {
            live.failures += 1;
            world.gave_up = true;
        }
        for (_, put) in puts.iter().filter_map(|put| self.puts.get(put)) {
            for version in put.versions.iter().flatten() {
                world.oracle.version_mut(*version).refused = true;
            }
        }
    }
}

fn take_one(counts: &mut BTreeMap<SegmentId, u32>, segment: SegmentId) -> bool {
    let Some(count) = counts.get_mut(&segment) else {
        return false;
    };
    *count -= 1;
    if *count == 0 {
        counts.remove(&segment);
    }
    true
}

impl Session {
    /// The client stops reading under these pins.
    pub fn stop_reading(&mut self, live: &mut Live, segments: &[SegmentId]) {
        for &segment in segments {
            if take_one(&mut self.reading, segment) {
                take_one(&mut live.pins, segment);
            }
        }
    }

    /// The client stops reading under all pins.
    pub fn stop_all_reading(&mut self, live: &mut Live) {
        let all = std::mem::take(&mut self.reading);
        for (segment, count) in all {
            for _ in 0..count {
                take_one(&mut live.pins, segment);
            }
        }
    }
}

impl Company {
    /// The owner reads the next message of a connection.
    pub fn serve(&mut self, world: &mut World, live: &mut Live, number: u64) {
        let line = self.lines.get_mut(&number).expect("a line");
        let client = line.client;
        let Some(message) = line.up.pop_front() else {
            return;
        };
        let sent = message.number;
        let overtakes = |line: &Line| {
            line.client == client && line.up.front().is_some_and(|other| other.number < sent)
        };
        if self.lines.values().any(overtakes) {
            world.count(Class::MessageOvertaken);
        }
        let bytes = message.bytes();
        let request: Asked<'_> = parse(&bytes).expect("a request that was sent");
        let marked = Marked(self.is_marked(world, client));
        let office = self.office.as_mut().expect("an owner is present");
        let session = office.sessions.get_mut(&client).expect("a session");
        match &request {
            Asked::Unpin { segments } => {
                for segment in segments {
                    let _ = take_one(&mut session.forfeited, *segment)
                        || take_one(&mut session.owed, *segment);
                }
            }
            Asked::Verified { findings, .. } => {
                let is_late = |segment| !session.owed.contains_key(segment);
                if findings.iter().any(|(place, _)| is_late(&place.segment)) {
                    world.count(Class::LateFinding);
                }
            }
            _ => {}
        }
        let map = map_of(world);
        let share_bytes = world.setup.write_bytes_max / 2;
        let seat = Seat::new(world, live);
        let desk = Desk {
            catalog: &seat,
            map: &map,
            marks: &marked,
            share_bytes,
        };
        let answer = desk.answer(&session.ledger, request);
        let Given {
            puts,
            pinned,
            believed,
        } = seat.into_given();
        for segment in believed {
            assert!(
                session.owed.contains_key(&segment),
                "a finding of {client:?} in {segment:?} is accepted, \
                 and the segment may have been reused"
            );
        }
        for segment in pinned {
            *session.owed.entry(segment).or_default() += 1;
            *session.reading.entry(segment).or_default() += 1;
            *live.pins.entry(segment).or_default() += 1;
        }
        let mut note = None;
        for put in puts {
            note = Some(Note::Reserved(put.reservation, put.versions.clone()));
            office.puts.insert(put.reservation, (client, put));
        }
        match answer {
            Answer::Reply(reply) => self.reply(world, live, number, &reply, note),
            Answer::Nothing => {}
            Answer::Later(later) => {
                let waits = self.take_up(world, live, later);
                self.lines.get_mut(&number).expect("a line").waits = Some(waits);
            }
        }
    }

    /// Starts the work that a request must wait for.
    fn take_up(&mut self, world: &mut World, live: &mut Live, later: Later) -> Waits {
        let (request, what, found) = match later {
            Later::Settled(puts) => return Waits::Settled(puts),
            Later::Room { seen, .. } => return Waits::Room { seen },
            Later::Delete(namespace, keys) => {
                let at = namespace_at(live, namespace);
                let names = |key: &PageKey| world.oracle.by_key(at, key.prefix().as_bytes());
                let names: Vec<_> = keys.iter().filter_map(names).collect();
                let (request, found) = world.delete(live, at, &names);
                (request, Request::Delete, found)
            }
            Later::Clear(namespace) => {
                let (request, found) = world.clear(live, namespace_at(live, namespace));
                (request, Request::Delete, found)
            }
            Later::Flush => {
                let (request, flush) = world.flush(live);
                (request, flush, 0)
            }
            Later::Report => unreachable!("no client asks for a report"),
        };
        let office = self.office.as_mut().expect("an owner is present");
        office.requests.insert(request, (what, found));
        Waits::Request(request)
    }

    /// The owner's thread checks whether its event has come.
    pub fn answer(&mut self, world: &mut World, live: &mut Live, number: u64) {
        if live.stopping {
            // No other activity passes the time to the core any more.
            world.with_core(live, |_| ());
        }
        let line = self.lines.get_mut(&number).expect("a line");
        let office = self.office.as_mut().expect("an owner is present");
        let (reply, note) = match &line.waits {
            Some(Waits::Settled(puts)) => {
                let settled = puts.iter().filter_map(|put| put.reservation);
                let settled: Vec<ReservationId> = settled.collect();
                if settled.iter().any(|id| !office.outcomes.contains_key(id)) {
                    return;
                }
                let outcome = |put: &Awaited| {
                    let statuses = put.reservation.and_then(|id| office.outcomes.remove(&id));
                    (*put, statuses.unwrap_or_default())
                };
                let outcomes = puts.iter().map(outcome).collect();
                let ledger = &office.sessions[&line.client].ledger;
                let reply = answer::settled(ledger, outcomes);
                (reply, Some(Note::Settled(settled)))
            }
            Some(Waits::Room { seen }) => {
                if live.room == *seen && !world.calm && !world.dice.chance(0.1) {
                    return;
                }
                (Reply::Room { room: live.room }, None)
            }
            Some(Waits::Request(request)) => match office.finished.remove(request) {
                Some(reply) => (reply, None),
                None => return,
            },
            None => return,
        };
        line.waits = None;
        self.reply(world, live, number, &reply, note);
    }

    /// Sends a reply to a client. If the client's end is closed, the connection fails.
    fn reply(
        &mut self,
        world: &mut World,
        live: &mut Live,
        number: u64,
        reply: &Reply,
        note: Option<Note>,
    ) {
        let ends = matches!(reply, Reply::Failed(Failure::Protocol(_)));
        let (sent, due) = self.stamp(world);
        let line = self.lines.get_mut(&number).expect("a line");
        if line.left || line.hung_up {
            self.fail_line(world, live, number);
            return;
        }
        let message = Line::message(reply_frame(reply), note, sent, due);
        Line::push(&mut line.down, message);
        if ends {
            self.fail_line(world, live, number);
        }
    }

    /// The owner's thread of a connection fails. Messages of the client may be lost there, so the
    /// client counts as gone.
    pub fn fail_line(&mut self, world: &mut World, live: &mut Live, number: u64) {
        let client = self.lines[&number].client;
        self.hang_up(client);
        self.end_line(world, live, number);
    }

    fn hang_up(&mut self, client: ClientId) {
        let of_client = |line: &&mut Line| line.client == client;
        for line in self.lines.values_mut().filter(of_client) {
            line.hung_up = true;
        }
    }

    /// The owner's thread of a connection ends.
    pub fn end_line(&mut self, world: &mut World, live: &mut Live, number: u64) {
        let line = self.lines.get_mut(&number).expect("a line");
        line.up.clear();
        line.hung_up = true;
        line.unserved = true;
        if line.is_first {
            let client = line.client;
            self.see_off(world, live, client);
        }
    }

    /// A client is gone.
    fn see_off(&mut self, world: &mut World, live: &mut Live, client: ClientId) {
        world.note(u64::from(client.0), || format!("{client:?} is gone"));
        self.hang_up(client);
        let map = map_of(world);
        let office = self.office.as_mut().expect("an owner is present");
        let session = office.sessions.get_mut(&client).expect("a session");
        session.stop_all_reading(live);
        session.owed.clear();
        let left = session.ledger.leave(&Seat::new(world, live), &map);
        if left.is_due {
            office.lingering.push(client);
        }
        office.give_up(world, live, &left.given_up);
    }

    /// The owner checks whether a client makes progress with its puts and reads.
    pub fn look(&mut self, world: &mut World, live: &mut Live) {
        let office = self.office.as_mut().expect("an owner is present");
        let there = office.sessions.iter();
        let there = there.filter(|(_, session)| !session.ledger.is_gone());
        let there: Vec<ClientId> = there.map(|(id, _)| *id).collect();
        if there.is_empty() {
            return;
        }
        let client = world.dice.pick(&there);
        // As many checks in a row as if the client had been stopped for long.
        let times = if world.dice.chance(0.2) {
            READ_LOOKS
        } else {
            1
        };
        for _ in 0..times {
            self.look_at(world, live, client);
        }
    }

    fn look_at(&mut self, world: &mut World, live: &mut Live, client: ClientId) {
        let office = self.office.as_mut().expect("an owner is present");
        let map = map_of(world);
        let session = office.sessions.get_mut(&client).expect("a session");
        // Its pins may be taken back during the check.
        let reading = session.reading.clone();
        session.stop_all_reading(live);
        let look = session.ledger.look(&Seat::new(world, live), &map);
        if look.pins_taken_back > 0 {
            world.count(Class::PinsTakenBack);
            world.note(u64::from(client.0), || {
                format!("{client:?} has stopped reading: its pins are taken back")
            });
            for (segment, count) in std::mem::take(&mut session.owed) {
                *session.forfeited.entry(segment).or_default() += count;
            }
            let heard = |number: u64| {
                self.lines
                    .get(&number)
                    .is_some_and(|line| line.up.is_empty())
            };
            let of = |other: &&mut Client| other.id() == Some(client);
            if let Some(reader) = self.clients.iter_mut().find(of) {
                reader.forfeit_reads(heard);
            }
        } else {
            for (segment, count) in &reading {
                *live.pins.entry(*segment).or_default() += count;
            }
            session.reading = reading;
        }
        if look.given_up.is_empty() {
            return;
        }
        world.count(Class::PutGivenUp);
        world.note(u64::from(client.0), || {
            format!("{client:?} is silent: {:?} are given up", look.given_up)
        });
        office.give_up(world, live, &look.given_up);
    }

    /// The owner checks whether the writes of a client that is gone have ended. With `at_once` it
    /// does not wait for them.
    pub fn look_after(
        &mut self,
        world: &mut World,
        live: &mut Live,
        client: ClientId,
        at_once: bool,
    ) {
        let marked = Marked(self.is_marked(world, client));
        let office = self.office.as_mut().expect("an owner is present");
        let ledger = &office.sessions[&client].ledger;
        let map = map_of(world);
        let ended = if at_once {
            Some(ledger.abandon())
        } else {
            ledger.end_when_over(&Seat::new(world, live), &map, &marked)
        };
        let Some(unawaited) = ended else {
            return;
        };
        world.note(u64::from(client.0), || {
            format!("the puts of {client:?} end")
        });
        office.lingering.retain(|lingering| *lingering != client);
        for reservation in unawaited {
            if office.outcomes.remove(&reservation).is_none() {
                office.unawaited.insert(reservation);
            }
        }
    }

    /// Records answers in the step in which they arrive.
    pub fn hear(&mut self, world: &mut World, live: &mut Live) {
        let Some(office) = self.office.as_mut() else {
            return;
        };
        let settled: Vec<ReservationId> = live
            .settled
            .keys()
            .filter(|reservation| office.puts.contains_key(reservation))
            .copied()
            .collect();
        for reservation in settled {
            let statuses = live.settled.remove(&reservation).unwrap_or_default();
            let Some((_, put)) = office.puts.remove(&reservation) else {
                continue;
            };
            world.hear_statuses(live, &put, &statuses);
            world.check_stored(live, &put, &statuses);
            if !office.unawaited.remove(&reservation) {
                office.outcomes.insert(reservation, statuses);
            }
        }
        let finished: Vec<RequestId> = live
            .finished
            .keys()
            .filter(|request| office.requests.contains_key(request))
            .copied()
            .collect();
        for request in finished {
            let result = live.finished.remove(&request).expect("it is there");
            let Some((what, found)) = office.requests.remove(&request) else {
                continue;
            };
            world.hear_result(live, request, &what, result.is_ok());
            let reply = match what {
                Request::Flush { .. } => done(result.map_err(|_| StoreError::SyncFailed)),
                Request::Delete => count(result.map(|()| found).map_err(|_| StoreError::NoRoom)),
            };
            office.finished.insert(request, reply);
        }
    }

    /// Every pin has a holder.
    pub fn check_pins(&self, world: &World, live: &Live) {
        let Some(office) = self.office.as_ref() else {
            return;
        };
        let segments: u32 = world.setup.volumes.iter().sum();
        for segment in (0..segments).map(SegmentId) {
            let of = |counts: &BTreeMap<SegmentId, u32>| counts.get(&segment).copied().unwrap_or(0);
            let sum = |of: &dyn Fn(&Session) -> u32| office.sessions.values().map(of).sum::<u32>();
            let reading = sum(&|session| of(&session.reading));
            let owed = sum(&|session| of(&session.owed));
            let sessions = office.sessions.values();
            let kept = sessions.flat_map(|session| session.ledger.kept());
            let kept = kept.filter(|kept| *kept == segment).count() as u32;
            let pins = live.index.pins(segment);
            assert_eq!(
                pins,
                of(&live.pins) - reading + owed + kept,
                "{segment:?} has {pins} pins: {owed} held by clients, {kept} for their writes"
            );
        }
    }
}

fn namespace_at(live: &Live, namespace: NamespaceId) -> usize {
    let slot: NamespaceSlot = namespace.into();
    let found = live.slots.iter().position(|known| *known == Some(slot));
    found.expect("a namespace of the run")
}

impl World {
    /// Pages that a client's put reports as stored are on the device.
    fn check_stored(&self, live: &Live, put: &Put, statuses: &[PutStatus]) {
        for ((name, version), status) in put.names.iter().zip(&put.versions).zip(statuses) {
            let (Some(version), PutStatus::Stored) = (version, status) else {
                continue;
            };
            let info = self.oracle.name(*name);
            let found = live.index.locate(live.slot(info.namespace), &info.key);
            let known = self.oracle.version(*version);
            let Some(found) = found.filter(|found| found.checksum == known.checksum) else {
                continue;
            };
            assert!(
                known.rotten || known.dropped || self.is_intact(*version, found.place),
                "{version:?} of {name:?} is reported as stored, and its bytes are not at {:?}",
                found.place
            );
        }
    }
}
