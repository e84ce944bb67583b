//! A put over a connection of its own, from its first ask to its last status. So its messages
//! arrive in order, and the owner's thread that receives its last landing is the thread that
//! replies.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_base::planted;
use larder_base::runtime::Instant;
use larder_core::grants::{Ask, Grant, ReservationId};
use larder_core::hint::Hint;
use larder_core::status::{PutStatus, Refusal};
use larder_format::{PageKey, Proof};

use super::Remote;
use super::line::{ANSWER_PATIENCE, Line};
use crate::catalog::{Landed, Putting};
use crate::share::keys::blob;
use crate::share::wire::{KEYS_MAX, LandedPut, Link, PageProof, PlaceGrant, Reply, Request, send};

/// Interval of a put's heartbeats while it sends nothing else.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(1);

/// Longest single wait for room.
const ROOM_SLICE: Duration = Duration::from_millis(500);

/// See the module.
pub(super) struct RemotePut<'a> {
    remote: &'a Remote,
    namespace: NamespaceId,
    hint: Hint,
    /// `None` once the owner is gone.
    line: Option<Line>,
    /// Messages to send together with the next one: each send wakes a thread of the owner.
    outbox: Vec<u8>,
    /// A reservation was requested, and its reply has not been read.
    reply_pending: bool,
    /// Pages of each reservation that was not waited for yet.
    granted: BTreeMap<ReservationId, usize>,
    /// Reservations with writes in flight.
    unlanded: usize,
    /// Time of the last heartbeat.
    last_heartbeat: Instant,
}

impl<'a> RemotePut<'a> {
    pub(super) fn new(remote: &'a Remote, namespace: NamespaceId, hint: Hint) -> RemotePut<'a> {
        RemotePut {
            remote,
            namespace,
            hint,
            line: remote.take_line().ok(),
            outbox: Vec::new(),
            reply_pending: false,
            granted: BTreeMap::new(),
            unlanded: 0,
            last_heartbeat: Instant::now(),
        }
    }

    /// Queues a message for the next [`flush`](Self::flush).
    fn queue(&mut self, request: &Request<'_>) {
        if let Some(line) = &mut self.line
            && send(&mut self.outbox, &mut line.buffer, request).is_err()
        {
            self.lose();
        }
    }

    fn flush(&mut self) {
        if let Some(line) = &mut self.line
            && (&**line.stream()).write_all(&self.outbox).is_err()
        {
            self.lose();
        }
        self.outbox.clear();
    }

    /// Receives the next reply, if it arrives within `patience`. Without a `patience`, waits for as
    /// long as the owner lives.
    fn receive(&mut self, patience: Option<Duration>) -> Option<Reply> {
        let line = self.line.as_mut()?;
        let answer = match patience {
            Some(patience) => line.receive(patience).map(|(reply, _)| reply),
            None => self.remote.receive_slow(line),
        };
        match answer {
            Ok(reply) => Some(reply),
            Err(error) => {
                tracing::debug!(%error, "the owner of the store is gone");
                self.lose();
                None
            }
        }
    }

    /// Queues a heartbeat if one is due: the granted pages are still being written.
    fn queue_heartbeat(&mut self) {
        if self.last_heartbeat.elapsed() < HEARTBEAT_EVERY {
            return;
        }
        self.last_heartbeat = Instant::now();
        if self.granted.is_empty() {
            return;
        }
        let under_way = self.granted.keys().map(|reservation| LandedPut {
            reservation: reservation.0,
            pages: Vec::new(),
        });
        let puts = under_way.collect();
        self.queue(&Request::Landed { puts });
    }

    /// Requests a reservation.
    pub(super) fn ask(&mut self, asks: &[Ask]) {
        self.queue_heartbeat();
        let keys: Vec<_> = asks.iter().map(|ask| ask.key).collect();
        let (namespace, keys) = (self.namespace.0, blob(&keys));
        let link = |ask: &Ask| Link {
            parent: ask.parent.map(|parent| *parent.as_bytes()),
            depth: ask.depth,
            saved: ask.saved,
        };
        let links = asks.iter().map(link).collect();
        self.queue(&match self.remote.hint_for_owner(self.hint) {
            None => Request::Reserve {
                namespace,
                keys,
                links,
            },
            Some(hint) => Request::ReserveHinted {
                namespace,
                keys,
                links,
                hint,
            },
        });
        self.reply_pending = true;
        self.flush();
        // The owner's thread may have been woken on this CPU, and the checksums that follow would
        // keep the CPU busy.
        larder_base::runtime::thread::yield_now();
    }

    /// Whether a reply is there, or none will come.
    fn has_reply(&self) -> bool {
        let line = self.line.as_ref();
        line.is_none_or(|line| line.has_reply(Duration::ZERO).unwrap_or(true))
    }

    fn lose(&mut self) {
        self.line = None;
        self.remote.lose();
    }
}

impl Drop for RemotePut<'_> {
    fn drop(&mut self) {
        if let Some(line) = self.line.take() {
            if self.granted.is_empty() && !self.reply_pending {
                self.remote.give_line(line);
            } else {
                // Aborted in the middle: the owner releases the put's resources only when this
                // client ends.
                self.remote.lose();
            }
        }
    }
}

impl Putting for RemotePut<'_> {
    fn reserve(
        &mut self,
        asks: &[Ask],
        meanwhile: &mut dyn FnMut() -> bool,
    ) -> (ReservationId, Vec<Grant>) {
        self.ask(asks);
        while !self.has_reply() && meanwhile() {}
        let answer = self.receive(Some(ANSWER_PATIENCE));
        self.reply_pending = false;
        match answer {
            Some(Reply::Reserved {
                reservation,
                grants,
            }) if grants.len() == asks.len() => {
                let reservation = ReservationId(reservation);
                self.granted.insert(reservation, asks.len());
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
                vec![Grant::Refused(Refusal::Closed); asks.len()],
            ),
        }
    }

    fn peek(&mut self, keys: &[PageKey]) -> Vec<bool> {
        self.queue_heartbeat();
        self.queue(&Request::Peek {
            namespace: self.namespace.0,
            keys: blob(keys),
        });
        self.reply_pending = true;
        self.flush();
        let answer = self.receive(Some(ANSWER_PATIENCE));
        self.reply_pending = false;
        match answer {
            Some(Reply::Flags(flags)) if flags.len() == keys.len() => flags,
            _ => vec![false; keys.len()],
        }
    }

    fn commit(&mut self, reservation: ReservationId, proofs: &[Option<Proof>]) {
        if self.granted.contains_key(&reservation) {
            // Sent with the next ask, or before the device is waited for.
            self.queue(&Request::Commit {
                reservation: reservation.0,
                proofs: proofs
                    .iter()
                    .map(|proof| proof.map(PageProof::from))
                    .collect(),
            });
        }
    }

    fn landed(&mut self, reservations: &[Landed]) {
        let known = |(reservation, _): &&Landed| self.granted.contains_key(reservation);
        let known = reservations.iter().filter(known);
        let landed = known.map(|(reservation, pages)| {
            let over = pages.iter();
            let over = over.map(|&(at, good)| (u32::try_from(at).unwrap_or(u32::MAX), good));
            LandedPut {
                reservation: reservation.0,
                pages: over.collect(),
            }
        });
        let puts: Vec<LandedPut> = landed.collect();
        if !puts.is_empty() {
            self.unlanded -= puts.len();
            self.queue(&Request::Landed { puts });
        }
        // After the last landing a wait follows, and carries the message.
        if self.unlanded > 0 {
            self.flush();
        }
    }

    fn stay(&mut self) {
        self.queue_heartbeat();
        if !self.outbox.is_empty() {
            self.flush();
        }
    }

    fn wait(&mut self, reservations: &[ReservationId]) -> Vec<Vec<PutStatus>> {
        let mut waited = Vec::with_capacity(reservations.len());
        let granted = reservations.iter().map(|put| self.granted.remove(put));
        let granted: Vec<Option<usize>> = granted.collect();
        let mut rest = (reservations, &granted[..]);
        while !rest.0.is_empty() {
            let count = fitting(rest.1);
            let (some, behind) = rest.0.split_at(count);
            let (granted, granted_behind) = rest.1.split_at(count);
            rest = (behind, granted_behind);
            let known = some.iter().zip(granted);
            let known = known.filter_map(|(put, asks)| asks.map(|_| put.0));
            self.queue(&Request::Wait {
                reservations: known.collect(),
            });
            self.flush();
            let all = granted.iter().flatten().sum();
            let statuses = match self.receive(None) {
                Some(Reply::Settled(statuses)) if statuses.len() == all => statuses,
                _ if planted!(GuessedStatus) => vec![PutStatus::Stored; all],
                // Whether they were stored is unknown.
                _ => vec![PutStatus::Refused(Refusal::Closed); all],
            };
            let mut statuses = statuses.into_iter();
            let of_one = |asks: &Option<usize>| statuses.by_ref().take(asks.unwrap_or(0)).collect();
            waited.extend(granted.iter().map(of_one));
        }
        waited
    }

    /// As of the last wait for room. That is recent enough, and a put that finds room needs no
    /// request.
    fn room(&self) -> u64 {
        self.remote.room.load(Ordering::Relaxed)
    }

    fn wait_for_room(&mut self, seen: u64, deadline: Instant) -> bool {
        let now = Instant::now();
        if now >= deadline || self.remote.is_lost() {
            return false;
        }
        let patience = (deadline - now).min(ROOM_SLICE);
        self.queue(&Request::WaitForRoom {
            seen,
            patience_ms: u32::try_from(patience.as_millis()).unwrap_or(0).max(1),
        });
        self.flush();
        match self.receive(Some(ROOM_SLICE + ANSWER_PATIENCE)) {
            Some(Reply::Room { room }) => {
                self.remote.room.store(room, Ordering::Relaxed);
                room != seen || Instant::now() < deadline
            }
            _ => false,
        }
    }
}

/// How many of these reservations one wait request covers: as many as fit its reply, counted by
/// their pages.
fn fitting(granted: &[Option<usize>]) -> usize {
    let mut pages = 0;
    let fits = |asks: &&Option<usize>| {
        pages += asks.unwrap_or(0);
        pages <= KEYS_MAX
    };
    granted.iter().take_while(fits).count().max(1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::{Arc, mpsc};

    use larder_format::PageKey;
    use larder_sync::Mutex;

    use super::*;
    use crate::catalog::Catalog;
    use crate::protocol::Protocol;
    use crate::share::wire::{Welcome, parse, receive};
    use crate::volume::socket::socket_path;
    use larder_base::ids::ClientId;

    /// Replies on one connection like an owner without room: a greeting, then, after a signal on
    /// `may_receive`, reservations. Other messages get no reply.
    fn answer(
        mut stream: &UnixStream,
        may_receive: &Mutex<mpsc::Receiver<()>>,
        heartbeats: &mpsc::Sender<u64>,
    ) {
        let (mut received, mut sent) = (Vec::new(), Vec::new());
        while receive(&mut stream, &mut received).is_ok_and(|more| more) {
            let request = parse(&received).unwrap();
            let is_greeting = matches!(request, Request::Join { .. });
            let reply = match request {
                Request::Hello { .. } => Reply::Welcome(Welcome {
                    protocol: Protocol::default(),
                    client: ClientId(1),
                    secret: 0,
                    store: [0; 16],
                    group: None,
                    run: 1,
                    segment_blocks: 4096,
                    volumes: vec![(None, 1)],
                    sealed: false,
                }),
                Request::Join { .. } => Reply::Done,
                Request::Reserve { links, .. } => Reply::Reserved {
                    reservation: 0,
                    grants: vec![PlaceGrant::Refused(Refusal::NoSpace); links.len()],
                },
                Request::Landed { puts } => {
                    for put in puts.iter().filter(|put| put.pages.is_empty()) {
                        heartbeats.send(put.reservation).unwrap();
                    }
                    continue;
                }
                _ => continue,
            };
            send(&mut stream, &mut sent, &reply).unwrap();
            received.clear();
            if is_greeting && may_receive.lock().recv().is_err() {
                return;
            }
        }
    }

    /// Such an owner, which accepts a fixed number of connections, and its client.
    struct Scene {
        _directory: tempfile::TempDir,
        _listener: Arc<UnixListener>,
        remote: Remote,
        /// Lets the owner process the messages of one connection.
        may_receive: mpsc::Sender<()>,
        /// Reservations named in heartbeats.
        heartbeats: mpsc::Receiver<u64>,
    }

    impl Scene {
        fn new(connections: usize) -> Scene {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("store");
            let listener = Arc::new(UnixListener::bind(socket_path(&path)).unwrap());
            let (may_receive, permits) = mpsc::channel();
            let (heartbeat, heartbeats) = mpsc::channel();
            std::thread::spawn({
                let (listener, permits) = (listener.clone(), Arc::new(Mutex::new(permits)));
                move || {
                    for stream in listener.incoming().take(connections) {
                        let (stream, permits) = (stream.unwrap(), permits.clone());
                        let heartbeat = heartbeat.clone();
                        std::thread::spawn(move || answer(&stream, &permits, &heartbeat));
                    }
                }
            });
            Scene {
                remote: Remote::reach(&path, &Protocol::default()).unwrap().0,
                _directory: directory,
                _listener: listener,
                may_receive,
                heartbeats,
            }
        }

        /// A put whose reservation was refused, and which was not waited for yet.
        fn refused(&self) -> (RemotePut<'_>, ReservationId) {
            let mut put = RemotePut::new(&self.remote, NamespaceId(0), Hint::default());
            self.may_receive.send(()).unwrap();
            let (reservation, grants) = put.reserve(&asks(), &mut || false);
            assert_eq!(grants, [Grant::Refused(Refusal::NoSpace)]);
            (put, reservation)
        }
    }

    fn asks() -> [Ask; 1] {
        [Ask {
            key: PageKey::from_bytes([1; 32]),
            parent: None,
            depth: 0,
            saved: 0,
        }]
    }

    #[test]
    fn work_is_done_while_an_answer_is_awaited() {
        let scene = Scene::new(2);
        let mut put = RemotePut::new(&scene.remote, NamespaceId(0), Hint::default());
        let mut steps = 0;
        let (_, grants) = put.reserve(&asks(), &mut || {
            steps += 1;
            if steps == 3 {
                scene.may_receive.send(()).unwrap();
            }
            steps < 3
        });
        assert_eq!(grants, [Grant::Refused(Refusal::NoSpace)]);
        assert_eq!(steps, 3);
    }

    #[test]
    fn a_put_that_waits_for_its_device_sends_heartbeats() {
        let scene = Scene::new(2);
        let (mut put, reservation) = scene.refused();
        // The first call comes too soon for a heartbeat.
        for _ in 0..2 {
            put.stay();
            put.last_heartbeat -= HEARTBEAT_EVERY;
        }
        put.stay();
        drop(put);
        for _ in 0..2 {
            let reported = scene.heartbeats.recv_timeout(Duration::from_secs(60));
            assert_eq!(reported, Ok(reservation.0));
        }
    }

    #[test]
    fn an_owner_that_takes_no_request_is_lost() {
        let scene = Scene::new(2);
        // More bytes than a socket buffers.
        let keys = vec![PageKey::from_bytes([1; 32]); KEYS_MAX];
        assert_eq!(scene.remote.longest_prefix(NamespaceId(0), &keys), 0);
        assert!(scene.remote.is_lost());
    }

    #[test]
    fn a_put_is_not_waited_for_once_its_owner_answers_nothing() {
        let scene = Scene::new(2);
        let (mut put, reservation) = scene.refused();
        let unknown = vec![PutStatus::Refused(Refusal::Closed)];
        assert_eq!(put.wait(&[reservation]), [unknown]);
        assert!(scene.remote.is_lost());
    }

    #[test]
    fn a_lost_owner_ends_all_calls_of_the_client() {
        let scene = Scene::new(64);
        let (mut put, reservation) = scene.refused();
        std::thread::scope(|scope| {
            scope.spawn(move || put.wait(&[reservation]));
            assert_eq!(
                scene.remote.contains(NamespaceId(0), &[asks()[0].key]),
                [false]
            );
        });
        assert!(scene.remote.is_lost());
    }

    #[test]
    fn as_many_are_waited_for_together_as_fit_an_answer() {
        assert_eq!(fitting(&[Some(2048); 65]), 64);
        assert_eq!(fitting(&[Some(KEYS_MAX), None, Some(1)]), 2);
        assert_eq!(fitting(&[Some(KEYS_MAX + 1), Some(1)]), 1);
    }
}
