//! A put over a connection of its own, from its first ask to its last status: what it says arrives in order, and the owner's thread that
//! hears of its last write is the one that answers.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{ANSWER_PATIENCE, Line, Remote};
use crate::api::{NamespaceId, PutStatus, Refusal};
use crate::catalog::{Ask, Grant, Putting, ReservationId};
use crate::share::keys::blob;
use crate::share::wire::{PlaceGrant, Reply, Request, send};

/// Longest single wait for room.
const ROOM_SLICE: Duration = Duration::from_millis(500);

/// Waits asked for before the first of them is answered: a bound on what lies unread in a socket.
const WAITS_AHEAD: usize = 64;

/// See the module.
pub(super) struct RemotePut<'a> {
    remote: &'a Remote,
    namespace: NamespaceId,
    /// `None` once the owner is gone.
    line: Option<Line>,
    /// What is to be said with what comes next: a message is a thread that is woken.
    unsaid: Vec<u8>,
    /// By ask without an answer: its pages.
    asked: VecDeque<usize>,
    /// By reservation that was not waited for: its pages.
    granted: HashMap<ReservationId, usize>,
    /// Reservations whose writes are not over.
    unlanded: usize,
}

impl<'a> RemotePut<'a> {
    pub(super) fn new(remote: &'a Remote, namespace: NamespaceId) -> RemotePut<'a> {
        RemotePut {
            remote,
            namespace,
            line: remote.take_line().ok(),
            unsaid: Vec::new(),
            asked: VecDeque::new(),
            granted: HashMap::new(),
            unlanded: 0,
        }
    }

    /// Has something said at the next [`say`](Self::say).
    fn note(&mut self, request: &Request<'_>) {
        if let Some(line) = &mut self.line
            && send(&mut self.unsaid, &mut line.buffer, request).is_err()
        {
            self.lose();
        }
    }

    fn say(&mut self) {
        if let Some(line) = &mut self.line
            && line.stream.write_all(&self.unsaid).is_err()
        {
            self.lose();
        }
        self.unsaid.clear();
    }

    /// The next answer, if it comes within `patience` (for good when there is none).
    fn hear(&mut self, patience: Option<Duration>) -> Option<Reply> {
        let line = self.line.as_mut()?;
        let heard = line.stream.set_read_timeout(patience);
        match heard.map_err(Into::into).and_then(|()| line.hear()) {
            Ok((reply, _)) => Some(reply),
            Err(error) => {
                tracing::debug!(%error, "the owner of the store is gone");
                self.lose();
                None
            }
        }
    }

    fn lose(&mut self) {
        self.line = None;
        self.remote.lose();
    }
}

impl Drop for RemotePut<'_> {
    fn drop(&mut self) {
        if let Some(line) = self.line.take() {
            if self.asked.is_empty() && self.granted.is_empty() {
                self.remote.give_line(line);
            } else {
                // Broken off in the middle: what the owner keeps for it ends only with this client.
                self.remote.lose();
            }
        }
    }
}

impl Putting for RemotePut<'_> {
    fn ask(&mut self, asks: &[Ask]) {
        let keys: Vec<_> = asks.iter().map(|ask| ask.key).collect();
        self.asked.push_back(asks.len());
        self.note(&Request::Reserve {
            namespace: self.namespace.0,
            keys: blob(&keys),
            links: asks
                .iter()
                .map(|ask| (ask.parent.map(|parent| *parent.as_bytes()), ask.depth))
                .collect(),
        });
    }

    fn granted(&mut self, meanwhile: &mut dyn FnMut()) -> (ReservationId, Vec<Grant>) {
        self.say();
        meanwhile();
        let asks = self.asked.pop_front().unwrap_or_default();
        match self.hear(Some(ANSWER_PATIENCE)) {
            Some(Reply::Reserved {
                reservation,
                grants,
            }) if grants.len() == asks => {
                let reservation = ReservationId(reservation);
                self.granted.insert(reservation, asks);
                self.unlanded += 1;
                let grants = grants.into_iter().map(|grant| match grant {
                    PlaceGrant::Write(place) => Grant::Write(self.remote.map.extent(place)),
                    PlaceGrant::Settles => Grant::Settles,
                    PlaceGrant::Refused(why) => Grant::Refused(why),
                });
                (reservation, grants.collect())
            }
            _ => (
                ReservationId(u64::MAX),
                vec![Grant::Refused(Refusal::Closed); asks],
            ),
        }
    }

    fn withdraw(&mut self) -> Vec<ReservationId> {
        let mut given_up = Vec::new();
        while !self.asked.is_empty() {
            let (reservation, grants) = self.granted(&mut || ());
            self.commit(reservation, &vec![None; grants.len()]);
            let is_granted = |(_, grant): &(usize, Grant)| matches!(grant, Grant::Write(_));
            let granted = grants.into_iter().enumerate().filter(is_granted);
            let over: Vec<_> = granted.map(|(at, _)| (at, true)).collect();
            self.landed(reservation, &over);
            given_up.push(reservation);
        }
        given_up
    }

    fn commit(&mut self, reservation: ReservationId, checksums: &[Option<u64>]) {
        if self.granted.contains_key(&reservation) {
            self.note(&Request::Commit {
                reservation: reservation.0,
                checksums: checksums.to_vec(),
            });
            self.say();
        }
    }

    fn landed(&mut self, reservation: ReservationId, pages: &[(usize, bool)]) {
        if self.granted.contains_key(&reservation) {
            let pages = pages.iter();
            let over = pages.map(|&(at, good)| (u32::try_from(at).unwrap_or(u32::MAX), good));
            self.note(&Request::Landed {
                reservation: reservation.0,
                pages: over.collect(),
            });
            // What comes after the last is said with it.
            self.unlanded -= 1;
            if self.unlanded > 0 {
                self.say();
            }
        }
    }

    /// Asks for all of them at once: one round trip, and not one for each.
    fn wait(&mut self, reservations: &[ReservationId]) -> Vec<Vec<PutStatus>> {
        let mut waited = Vec::with_capacity(reservations.len());
        for some in reservations.chunks(WAITS_AHEAD) {
            let puts = some.iter().map(|put| (*put, self.granted.remove(put)));
            let puts: Vec<(ReservationId, Option<usize>)> = puts.collect();
            for (reservation, _) in puts.iter().filter(|(_, asks)| asks.is_some()) {
                self.note(&Request::Wait {
                    reservation: reservation.0,
                });
            }
            self.say();
            for (_, asks) in puts {
                let Some(asks) = asks else {
                    waited.push(Vec::new());
                    continue;
                };
                waited.push(match self.hear(None) {
                    Some(Reply::Settled(statuses)) if statuses.len() == asks => statuses,
                    // Whether they were stored nobody says any more.
                    _ => vec![PutStatus::Refused(Refusal::Closed); asks],
                });
            }
        }
        waited
    }

    /// As of the last wait for it: that is soon enough, and a put that finds room need not ask.
    fn room(&self) -> u64 {
        self.remote.room.load(Ordering::Relaxed)
    }

    fn wait_for_room(&mut self, seen: u64, deadline: Instant) -> bool {
        loop {
            let now = Instant::now();
            if now >= deadline || self.remote.is_lost() {
                return false;
            }
            let patience = (deadline - now).min(ROOM_SLICE);
            self.note(&Request::WaitForRoom {
                seen,
                patience_ms: u32::try_from(patience.as_millis()).unwrap_or(0).max(1),
            });
            self.say();
            match self.hear(Some(ROOM_SLICE + ANSWER_PATIENCE)) {
                Some(Reply::Room { room }) if room != seen => {
                    self.remote.room.store(room, Ordering::Relaxed);
                    return true;
                }
                Some(Reply::Room { .. }) => {}
                _ => return false,
            }
        }
    }
}
