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

use larder_base::ids::ClientId;
use larder_core::counters::{Counted, StoreCounts};

use super::session::Session;
use super::shared::Shared;
use crate::protocol::{HEIRS, TOTALS};
use crate::share::wire::{Reply, send};
use crate::totals::Totals;

/// Time between two looks for changes.
const EVERY: Duration = Duration::from_secs(1);

impl Shared {
    /// The totals at this moment.
    pub(super) fn totals(&self, sessions: &BTreeMap<ClientId, Arc<Session>>) -> Totals {
        let mut totals = self.adding.former.clone();
        totals.counts.add(&self.store.data.counts());
        totals.counts.add(&self.departed.lock().counts);
        totals.measured(&self.store.data.measures());
        totals.measured(&self.adding.gone.lock());
        totals.store.add(&self.store_counts());
        totals.ages.add(&self.store.local.ages());
        for session in sessions.values() {
            let tally = session.tally.lock();
            totals.counts.add(&tally.counts.unwrap_or_default());
            totals.measured(&tally.measures);
        }
        totals
    }

    fn store_counts(&self) -> StoreCounts {
        let shared = self.reads.report();
        let mut counts = self.store.local.store_counts();
        counts.shared_pages_filled = shared.fills;
        counts.shared_pages_hit = shared.hits;
        counts.aborted = self.watch.aborted_pages();
        counts
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

    /// Does so once a second until the server is stopped, and looks at the volumes.
    pub(super) fn tell_regularly(&self) {
        while !self.stop.load(Ordering::SeqCst) {
            self.answering.look(&self.store);
            self.soundness.look(&self.store);
            self.tell_all();
            self.look_at_history();
            self.pause(EVERY);
        }
    }

    /// Ends the row of the history that is due.
    fn look_at_history(&self) {
        let seconds = self.begun.elapsed().as_secs_f64();
        if self.history.lock().is_due(seconds) {
            let totals = self.totals(&self.sessions.lock());
            self.history.lock().look(seconds, &totals);
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
