//! The totals of all processes, and their copies in the clients: see [`crate::totals`].
//!
//! A copy goes to a client when it attaches, before any report that shows more, and when the owner
//! closes the store. It stays in the client's connection until the client reads it, even if the
//! owner is killed. So a client that takes over never begins below a report. A client that has not
//! read its last copies, because it is stopped, gets no more until it has: nothing waits for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Shared;
use super::session::Session;
use crate::runtime::Mutex;
use crate::share::protocol::{HEIRS, TOTALS};
use crate::share::wire::{ClientId, Reply, send};
use crate::system::sockets::{self, UnixStream};
use crate::totals::{Measures, StoreCounts, Totals};

/// Time between two looks for changes.
const EVERY: Duration = Duration::from_secs(1);

/// The owner's part in totals.
pub(super) struct Adding {
    /// The totals of the owners before this one.
    pub former: Totals,
    /// The measures of the clients that have gone.
    pub gone: Mutex<Measures>,
}

/// The first connection of a client, as far as totals go over it.
#[derive(Default)]
pub(super) struct Told {
    stream: Option<Arc<UnixStream>>,
    /// Bytes of the last message that the client had no room for.
    rest: Vec<u8>,
    /// The last message.
    last: Totals,
}

impl Told {
    /// Messages go over this connection.
    pub(super) fn begin(&mut self, stream: &Arc<UnixStream>) {
        self.stream = Some(stream.clone());
    }

    /// No more messages go over it.
    pub(super) fn end(&mut self) {
        self.stream = None;
    }

    /// Sends the rest of the last message, then this one. Leaves bytes for which there is no room.
    fn send(&mut self, totals: &Totals, frame: &[u8]) {
        if !self.send_rest() || self.last == *totals {
            return;
        }
        self.last.clone_from(totals);
        self.rest = frame.to_vec();
        self.send_rest();
    }

    /// Sends a message after all others.
    fn send_last(&mut self, frame: &[u8]) {
        self.rest.extend_from_slice(frame);
        self.send_rest();
    }

    /// Whether nothing is left.
    fn send_rest(&mut self) -> bool {
        let Some(stream) = &self.stream else {
            return false;
        };
        while !self.rest.is_empty() {
            match sockets::send_now(stream, &self.rest) {
                Ok(count) => drop(self.rest.drain(..count)),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // No room, or the connection ends, which its thread notices.
                Err(_) => return false,
            }
        }
        true
    }
}

impl Shared {
    /// The totals at this moment.
    pub(super) fn totals(&self, sessions: &BTreeMap<ClientId, Arc<Session>>) -> Totals {
        let mut totals = self.adding.former.clone();
        totals.counts.add(self.store.counts());
        totals.counts.add(self.departed.lock().counts);
        totals.measured(&self.store.measures());
        totals.measured(&self.adding.gone.lock());
        totals.store.add(self.store_counts());
        for session in sessions.values() {
            let tally = session.tally.lock();
            totals.counts.add(tally.counts.unwrap_or_default());
            totals.measured(&tally.measures);
        }
        totals
    }

    fn store_counts(&self) -> StoreCounts {
        let shared = self.reads.report();
        StoreCounts {
            shared_pages_filled: shared.fills,
            shared_pages_hit: shared.hits,
            ..self.store.store_counts()
        }
    }

    /// Sends these totals to each client, if its copy is another one.
    pub(super) fn tell(&self, sessions: &BTreeMap<ClientId, Arc<Session>>, totals: &Totals) {
        let mut frame = Vec::new();
        let reply = Reply::Totals(Box::new(totals.clone()));
        if send(&mut Vec::new(), &mut frame, &reply).is_err() {
            return;
        }
        for session in sessions.values().filter(|session| session.is_told()) {
            session.told.lock().send(totals, &frame);
        }
    }

    /// Sends each client its copy, if it has changed.
    pub(super) fn tell_all(&self) {
        let sessions = self.sessions.lock();
        if sessions.values().any(|session| session.is_told()) {
            let totals = self.totals(&sessions);
            self.tell(&sessions, &totals);
        }
    }

    /// Does so once a second until the server is stopped.
    pub(super) fn tell_regularly(&self) {
        while !self.stop.load(Ordering::SeqCst) {
            self.tell_all();
            self.pause(EVERY);
        }
    }

    /// Names the next owner to the clients. A client that reads nothing is not waited for.
    pub(super) fn tell_heir(&self, heir: ClientId) {
        let mut frame = Vec::new();
        if send(&mut Vec::new(), &mut frame, &Reply::Heir(heir)).is_err() {
            return;
        }
        for session in self.sessions.lock().values() {
            if session.agreed.has(HEIRS) && session.ledger.is_marked() {
                session.told.lock().send_last(&frame);
            }
        }
    }
}

impl Session {
    /// Whether the client takes totals: a process that only asks for a report does not.
    fn is_told(&self) -> bool {
        self.agreed.has(TOTALS) && self.ledger.is_marked()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::share::wire::{parse, receive};

    fn frame(hits: u64) -> (Totals, Vec<u8>) {
        let mut totals = Totals::default();
        totals.counts.hits = hits;
        let mut frame = Vec::new();
        let reply = Reply::Totals(Box::new(totals.clone()));
        send(&mut Vec::new(), &mut frame, &reply).unwrap();
        (totals, frame)
    }

    /// The totals in the next message.
    fn next(stream: &UnixStream) -> u64 {
        let mut buffer = Vec::new();
        assert!(receive(&mut &*stream, &mut buffer).unwrap());
        match parse(&buffer).unwrap() {
            Reply::Totals(totals) => totals.counts.hits,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_client_that_reads_nothing_is_not_waited_for_and_gets_whole_messages_later() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut told = Told::default();
        told.begin(&Arc::new(ours));
        let mut sent = 0;
        while told.rest.is_empty() {
            sent += 1;
            let (totals, frame) = frame(sent);
            told.send(&totals, &frame);
        }
        let (totals, later) = frame(sent + 1);
        told.send(&totals, &later);
        for hits in 1..sent {
            assert_eq!(next(&theirs), hits);
        }
        told.send(&totals, &later);
        assert_eq!(next(&theirs), sent);
        assert_eq!(next(&theirs), sent + 1);
        // The same totals once more are not sent.
        told.send(&totals, &later);
        told.end();
        drop(told);
        assert!(!receive(&mut &theirs, &mut Vec::new()).unwrap());
    }
}
