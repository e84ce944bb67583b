//! A client as the server sees it: its connections and its account.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use larder_base::ids::ClientId;
use larder_base::random::random_bytes;
use larder_base::runtime::{Instant, Mutex};
use larder_base::system::processes;
use larder_base::system::sockets::UnixStream;
use larder_core::counters::Counts;

use super::forgotten::Forgotten;
use super::held::HeldReads;
use super::ledger::Ledger;
use super::told::Told;
use crate::protocol::Agreed;
use crate::store::LeaseBook;
use crate::totals::Measures;

/// Most connections of one client. Each of its puts and each of its other calls uses one.
const CONNECTIONS_MAX: usize = 64;

/// A client.
pub(super) struct Session {
    pub id: ClientId,
    pub secret: u64,
    pub agreed: Agreed,
    pub ledger: Ledger,
    pub connections: Mutex<Connections>,
    /// The client's part of the staging area.
    pub reads: Mutex<HeldReads>,
    /// The client's counted leases.
    pub leases: LeaseBook,
    /// The client's pid; `None` in another pid namespace.
    pub pid: Option<u32>,
    pub begun: Instant,
    pub tally: Mutex<Tally>,
    pub told: Mutex<Told>,
    /// The client has wanted a segment emptied.
    pub compacts: AtomicBool,
    pub forgotten: Forgotten,
}

/// A client's counters, as it sent them last.
#[derive(Default)]
pub(super) struct Tally {
    /// The name of the client's program.
    pub name: Option<String>,
    /// `None` before the first message.
    pub counts: Option<Counts>,
    pub measures: Measures,
    /// The counters were added to those of the clients that have gone.
    pub is_folded: bool,
}

#[derive(Default)]
pub(super) struct Connections {
    pub next: u64,
    pub open: BTreeMap<u64, Arc<UnixStream>>,
    /// All connections were shut down, and no new one is accepted.
    is_over: bool,
}

pub(super) fn fresh_secret() -> u64 {
    // Without randomness the secret is easier to guess. The socket's permissions are the actual
    // protection.
    random_bytes().map_or(0, u64::from_le_bytes)
}

impl Session {
    /// The name of the client's program.
    pub(super) fn name(&self) -> Option<String> {
        let name = self.tally.lock().name.clone();
        name.or_else(|| self.pid.and_then(processes::command))
    }

    pub(super) fn new(id: ClientId, run: u32, agreed: Agreed, pid: Option<u32>) -> Session {
        Session {
            id,
            secret: fresh_secret(),
            agreed,
            ledger: Ledger::new(id, run),
            connections: Mutex::default(),
            reads: Mutex::default(),
            leases: LeaseBook::default(),
            pid,
            begun: Instant::now(),
            tally: Mutex::default(),
            told: Mutex::default(),
            compacts: AtomicBool::new(false),
            forgotten: Forgotten::default(),
        }
    }

    /// Adds a connection; `None` when the client has too many, or has gone.
    pub(super) fn add(&self, stream: &Arc<UnixStream>) -> Option<u64> {
        let mut connections = self.connections.lock();
        if connections.open.len() >= CONNECTIONS_MAX || connections.is_over {
            return None;
        }
        let number = connections.next;
        connections.next += 1;
        connections.open.insert(number, stream.clone());
        Some(number)
    }

    /// Ends all connections, for good.
    pub(super) fn hang_up(&self) {
        let mut connections = self.connections.lock();
        connections.is_over = true;
        for connection in connections.open.values() {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}
