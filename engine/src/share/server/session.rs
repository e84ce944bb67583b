//! What one client holds: its connections, its pins, its puts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use parking_lot::Mutex;

use super::reads::HeldReads;
use crate::catalog::ReservationId;
use crate::index::SegmentId;
use crate::share::wire::ClientId;

/// Connections of one client.
const CONNECTIONS_MAX: usize = 64;

/// A client.
pub(super) struct Session {
    pub id: ClientId,
    pub secret: u64,
    pub held: Mutex<Held>,
    pub connections: Mutex<Connections>,
    /// What it has of the staging area.
    pub reads: Mutex<HeldReads>,
}

#[derive(Default)]
pub(super) struct Connections {
    pub next: u64,
    pub open: BTreeMap<u64, UnixStream>,
}

#[derive(Default)]
pub(super) struct Held {
    pub gone: bool,
    pub may_write: bool,
    pub pins: BTreeMap<SegmentId, u64>,
    pub pinned: u64,
    pub puts: BTreeMap<u64, Put>,
    pub put_bytes: u64,
    pub next_put: u64,
}

/// A put of a client.
#[derive(Clone)]
pub(super) struct Put {
    /// The core's; `None` when everything was refused here.
    pub reservation: Option<ReservationId>,
    pub asks: usize,
    /// Pages behind those that were refused here.
    pub beyond: usize,
    pub committed: bool,
    /// Somebody waits for its statuses.
    pub awaited: bool,
    /// Granted pages whose writes are not over.
    pub unlanded: BTreeSet<usize>,
    pub page_bytes: u64,
    /// Bytes that count against the client's share: of pages that are not written, or not committed.
    pub bytes: u64,
}

pub(super) fn fresh_secret() -> u64 {
    let mut bytes = [0; 8];
    // Without randomness a guess is easier; the socket's permissions are what keeps others out.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_le_bytes(bytes)
}
impl Session {
    pub(super) fn new(id: ClientId) -> Session {
        Session {
            id,
            secret: fresh_secret(),
            held: Mutex::default(),
            connections: Mutex::default(),
            reads: Mutex::default(),
        }
    }

    /// Takes a connection in; `None` when the client has too many, or has gone.
    pub(super) fn add(&self, stream: &UnixStream) -> Option<u64> {
        let mut connections = self.connections.lock();
        if connections.open.len() >= CONNECTIONS_MAX || self.held.lock().gone {
            return None;
        }
        let number = connections.next;
        connections.next += 1;
        connections.open.insert(number, stream.try_clone().ok()?);
        Some(number)
    }

    pub(super) fn hang_up(&self) {
        for connection in self.connections.lock().open.values() {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// A put to wait for, once.
    pub(super) fn await_put(&self, number: u64) -> Option<Put> {
        let mut held = self.held.lock();
        let put = held.puts.get_mut(&number)?;
        let first = !std::mem::replace(&mut put.awaited, true);
        first.then(|| put.clone())
    }

    /// The core's reservation, once.
    pub(super) fn commit(&self, number: u64) -> Option<ReservationId> {
        let mut held = self.held.lock();
        let put = held.puts.get_mut(&number)?;
        let first = !std::mem::replace(&mut put.committed, true);
        put.reservation.filter(|_| first)
    }

    /// The pages that were not over before.
    pub(super) fn landed(
        &self,
        number: u64,
        pages: &[(u32, bool)],
    ) -> Option<(ReservationId, Vec<(usize, bool)>)> {
        let mut held = self.held.lock();
        let put = held.puts.get_mut(&number)?;
        let over: Vec<(usize, bool)> = pages
            .iter()
            .map(|&(at, good)| (at as usize, good))
            .filter(|(at, _)| put.unlanded.remove(at))
            .collect();
        let reservation = put.reservation?;
        // The rest of what they take is the core's own to do; whether the client ever asks for the outcome is not waited for.
        if put.committed {
            let bytes = put.page_bytes * over.len() as u64;
            put.bytes -= bytes;
            held.put_bytes -= bytes;
        }
        Some((reservation, over))
    }

    pub(super) fn end_put(&self, number: u64) {
        let mut held = self.held.lock();
        if let Some(put) = held.puts.remove(&number) {
            held.put_bytes -= put.bytes;
        }
    }
}

impl Held {
    pub(super) fn add(&mut self, put: Put) -> u64 {
        let number = self.next_put;
        self.next_put += 1;
        self.put_bytes += put.bytes;
        self.puts.insert(number, put);
        number
    }
}
