//! The processes that use the store, with their counters.
//!
//! A client's counters only grow, and its messages arrive over several connections in any order:
//! the highest value of each counter is its present one. Messages may still arrive after the client
//! has gone; they are added to the counters of the clients that have gone.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_base::ids::ClientId;
use larder_base::system::processes;
use larder_base::system::sockets::{self, UnixStream};
use larder_core::counters::{Counted, Counts};

use super::session::Session;
use super::shared::Shared;
use crate::counts::Process;
use crate::share::wire::{Reply, Request};
use crate::totals::Measures;

/// Longest name of a program that is kept, in characters.
const NAME_MAX: usize = 64;

/// The pid of the process behind a connection; `None` in another pid namespace.
pub(super) fn pid_of(peer: &UnixStream) -> Option<u32> {
    let peer = sockets::peer(peer).ok()?;
    Some(peer.pid).filter(|pid| *pid != 0)
}

/// The name of this process's program.
pub(in crate::share) fn own_name() -> Option<String> {
    processes::command(processes::id())
}

impl Shared {
    /// Takes the counters of a client. Any other request is returned.
    pub(super) fn take_counts<'a>(
        &self,
        session: &Session,
        request: Request<'a>,
    ) -> Result<Option<Reply>, Request<'a>> {
        let (name, counts) = match request {
            Request::Counted { name, counts } => (name, counts),
            Request::Measured(measures) => {
                self.take_measures(session, &measures);
                return Ok(None);
            }
            other => return Err(other),
        };
        let mut tally = session.tally.lock();
        let before = tally.counts.unwrap_or_default();
        let mut highest = before;
        highest.combine(&Counts::from_list(&counts), &mut u64::max);
        tally.counts = Some(highest);
        let shown = name.chars().filter(|c| !c.is_control()).take(NAME_MAX);
        tally.name = Some(shown.collect()).filter(|name: &String| !name.is_empty());
        if tally.is_folded {
            let mut new = highest;
            new.combine(&before, &mut |now, before| now - before);
            self.departed.lock().counts.add(&new);
        }
        Ok(None)
    }

    fn take_measures(&self, session: &Session, measures: &Measures) {
        let mut tally = session.tally.lock();
        let before = tally.measures.clone();
        tally.measures.combine(measures, &mut u64::max);
        if tally.is_folded {
            let mut new = tally.measures.clone();
            new.combine(&before, &mut u64::saturating_sub);
            self.adding.gone.lock().add(&new);
        }
    }

    /// Adds the counters of a client that has gone to those of all such clients.
    pub(super) fn fold(&self, session: &Session) {
        if !session.ledger.is_marked() {
            return;
        }
        let mut tally = session.tally.lock();
        tally.is_folded = true;
        let mut departed = self.departed.lock();
        departed.clients += 1;
        departed.counts.add(&tally.counts.unwrap_or_default());
        self.adding.gone.lock().add(&tally.measures);
    }

    /// The owner, then its clients in the order of their pids. A process that only asks for a
    /// report is none of them.
    pub(super) fn processes(&self, sessions: &BTreeMap<ClientId, Arc<Session>>) -> Vec<Process> {
        let owner = Process {
            client: None,
            pid: Some(processes::id()),
            name: own_name(),
            release: self.welcome.protocol.release.clone(),
            uptime_seconds: self.begun.elapsed().as_secs_f64(),
            counts: Some(self.store.data.counts()),
        };
        let using = sessions
            .values()
            .filter(|session| session.ledger.is_marked());
        let mut clients: Vec<Process> = using.map(|session| client(session)).collect();
        clients.sort_by_key(|client| client.pid);
        std::iter::once(owner).chain(clients).collect()
    }
}

fn client(session: &Session) -> Process {
    let counts = session.tally.lock().counts;
    Process {
        client: Some(session.id.0),
        pid: session.pid,
        name: session.name(),
        release: session.agreed.release.clone(),
        uptime_seconds: session.begun.elapsed().as_secs_f64(),
        counts,
    }
}
