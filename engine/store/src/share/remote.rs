//! A client's side of the protocol: a [`Catalog`] whose decisions are made in the owner's process.
//!
//! Owns: the connections to the owner, and the shapes of the namespaces used over them.
//!
//! Invariants:
//! - A connection carries the requests of one call at a time. Each caller takes an idle connection,
//!   makes a new one, or waits for one. A put ([`put`]) keeps its connection to its end. A caller
//!   never holds two connections, so every waiting caller gets one.
//! - Once any connection fails the owner counts as lost, for good. All connections are shut down:
//!   the calls in progress fail, every later call fails at once, and the role monitor ([`super`])
//!   is notified. No call is retried over another connection: the owner may have carried it out.
//!
//! Faults defended against: an owner that exits, is killed or stopped, or takes longer than
//! [`ANSWER_PATIENCE`] to accept a request or to send a reply that needs no waiting. While a slow
//! reply is awaited, probes check that the owner still replies at all.

mod catalog;
mod lent;
mod line;
mod put;
mod unreached;

use std::collections::HashMap;
use std::io::{self, BufReader};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use larder_base::fork::Private;
use larder_base::ids::{ClientId, NamespaceId};
use larder_base::runtime::{Condvar, Instant, Mutex, OnceLock};
use larder_base::system::processes;
use larder_base::system::sockets::UnixStream;
use larder_core::counters::{Counted, Counts};
use larder_core::grants::SegmentMap;
use larder_core::hint::Hint;
use larder_disk::{BEAT, Board, Common};
use larder_format::PageKey;
use lent::Lending;
use line::{ANSWER_PATIENCE, Line, pid_of};
pub(super) use unreached::ReachError;

use super::keys::blob;
use super::wire::{
    Failure, KEYS_MAX, MAGIC, Reply, Report, Request, Welcome, WireError, arrives, parse, receive,
};
use crate::catalog::NamespaceShape;
use crate::error::StoreError;
use crate::protocol::{
    Agreed, BENEATH, COMMON, COUNTS, HEIRS, POLICIES, Protocol, TOTALS, is_name,
};
use crate::staging::Area;
use crate::totals::{Measures, Totals};
use crate::volume::socket::socket_path;
use crate::volume::{Access, File};

/// While a slow reply is awaited, the owner is probed at this interval.
const PROBE_AFTER: Duration = Duration::from_millis(500);

/// Connections besides the first: fewer than the owner allows. A caller that finds no idle one
/// waits.
const LINES_MAX: usize = 60;

/// The owner has gone.
#[derive(Debug)]
pub(super) struct Gone;

/// The last messages of an owner.
#[derive(Default)]
pub(super) struct OwnerEnd {
    /// The last totals.
    pub(super) totals: Option<Totals>,
    /// The client that is to be the next owner.
    pub(super) heir: Option<ClientId>,
}

/// The connections besides the first.
#[derive(Default)]
struct Lines {
    idle: Vec<Line>,
    /// Connections made so far. Never decremented: a failed connection ends the whole attachment.
    made: usize,
    /// The streams of all connections, for shutdown.
    streams: Vec<Arc<UnixStream>>,
}

/// See the module.
pub(super) struct Remote {
    path: std::path::PathBuf,
    /// The store that the owner serves.
    store: [u8; 16],
    client: ClientId,
    secret: u64,
    map: SegmentMap,
    /// The owner takes the end of this connection as the end of the client, and sends totals over
    /// it.
    first: Arc<UnixStream>,
    _private: Private,
    lines: Mutex<Lines>,
    /// Notified when a connection becomes idle, or the owner is lost.
    given: Condvar,
    /// Held while a thread probes the owner.
    probing: Mutex<()>,
    lost: AtomicBool,
    shapes: Mutex<HashMap<NamespaceId, NamespaceShape>>,
    /// The owner's last reported room counter.
    room: AtomicU64,
    agreed: Agreed,
    /// The counters that the owner was sent last.
    sent: Mutex<Option<Counts>>,
    /// The measures that the owner was sent last.
    measured: Mutex<Measures>,
    /// Nothing lies beneath the owner's store.
    is_bottom: AtomicBool,
    /// The staging area, once it was asked for; `None` when there is none.
    area: OnceLock<Option<Arc<Area>>>,
    /// The keys of an encrypted store.
    lending: Option<Lending>,
}

impl Remote {
    /// Connects to the owner of the store at `path`, speaking `protocol`.
    pub(super) fn reach(path: &Path, protocol: &Protocol) -> Result<(Remote, Welcome), ReachError> {
        let mut first = Line::connect(path)?;
        let hello = Request::Hello {
            magic: MAGIC,
            protocol: protocol.clone(),
        };
        let welcome = match first.greet(&hello) {
            Ok(Reply::Welcome(welcome)) if welcome.protocol.is_valid() => welcome,
            Ok(Reply::Failed(Failure::Version { ours, release })) if is_name(&release) => {
                return Err(ReachError::Version {
                    theirs: ours,
                    release,
                    ours: protocol.clone(),
                });
            }
            Ok(Reply::Failed(Failure::Denied(denial))) => return Err(ReachError::Denied(denial)),
            Ok(_) => return Err(ReachError::Nonsense),
            Err(WireError::Io(error)) => {
                return Err(match ReachError::from(error) {
                    ReachError::Silent { .. } => {
                        let pid = pid_of(first.stream());
                        let is_stopped = pid.and_then(processes::is_stopped);
                        ReachError::Silent { pid, is_stopped }
                    }
                    error => error,
                });
            }
            Err(_) => return Err(ReachError::Nonsense),
        };
        let Some(agreed) = protocol.agree(&welcome.protocol) else {
            return Err(ReachError::Nonsense);
        };
        if welcome.protocol.release != protocol.release {
            tracing::info!(
                "the owner of the store is {}, this is {protocol}",
                welcome.protocol
            );
        }
        // From here on this connection is only read, without a limit.
        first.stream().set_read_timeout(None)?;
        let segments: Vec<u32> = welcome.volumes.iter().map(|(_, count)| *count).collect();
        let remote = Remote {
            path: path.to_owned(),
            store: welcome.store,
            client: welcome.client,
            secret: welcome.secret,
            map: SegmentMap::new(&segments, welcome.segment_blocks),
            first: first.stream().clone(),
            _private: first.private,
            lines: Mutex::default(),
            given: Condvar::new(),
            probing: Mutex::new(()),
            lost: AtomicBool::new(false),
            shapes: Mutex::default(),
            room: AtomicU64::new(0),
            agreed,
            sent: Mutex::default(),
            measured: Mutex::default(),
            is_bottom: AtomicBool::new(false),
            area: OnceLock::new(),
            lending: welcome.sealed.then(Lending::new),
        };
        Ok((remote, welcome))
    }

    /// Compares the owner's store with the store at the path. A path without a readable store does
    /// not count.
    ///
    /// # Errors
    /// [`ReachError::OfAnother`] alone.
    pub(super) fn check_store(&self) -> Result<(), ReachError> {
        match store_at(&self.path) {
            Some(store) if store != self.store => Err(self.of_another()),
            _ => Ok(()),
        }
    }

    /// The process on the socket owns another store than the one at the path.
    pub(super) fn of_another(&self) -> ReachError {
        ReachError::OfAnother {
            pid: self.owner_pid(),
            socket: socket_path(&self.path),
        }
    }

    /// Reports to the owner that the marks are on the volumes. False when the owner does not see
    /// them: then the marks are on other files than the owner's.
    pub(super) fn marked(&self) -> Result<bool, Gone> {
        match self.ask_fast(&Request::Marked)? {
            Reply::Done => Ok(true),
            Reply::Failed(Failure::Protocol(_)) => {
                self.lose();
                Ok(false)
            }
            _ => Err(self.lose()),
        }
    }

    /// Asks for the ownership, if the owner may give it away.
    pub(super) fn ask_for_ownership(&self) {
        if self.agreed.has(HEIRS) {
            self.send(&Request::Own);
        }
    }

    /// Waits until the owner has gone, or this client is being closed. Calls `told` after each
    /// message of the owner, and `board` shows that this process is alive.
    pub(super) fn wait_for_owner_end(&self, board: &Board, told: impl Fn()) -> OwnerEnd {
        let mut reader = BufReader::new(&*self.first);
        let mut buffer = Vec::new();
        let mut end = OwnerEnd::default();
        let pause = board.is_measured().then_some(BEAT);
        loop {
            board.beat();
            match reader.buffer().is_empty() {
                true if matches!(arrives(&*self.first, pause), Ok(false)) => continue,
                _ => {}
            }
            if !matches!(receive(&mut reader, &mut buffer), Ok(true)) {
                break;
            }
            match parse(&buffer) {
                Ok(Reply::Totals(totals)) => end.totals = Some(*totals),
                Ok(Reply::Heir(heir)) => end.heir = Some(heir),
                Ok(Reply::Forget { number, slots }) => {
                    self.forget(&slots);
                    self.send(&Request::Forgotten { number });
                }
                // Other messages are those of a later release.
                _ => {}
            }
            told();
        }
        self.lose();
        end
    }

    /// Hangs up. The owner sees that this client has gone.
    pub(super) fn hang_up(&self) {
        self.lose();
        let _ = self.first.shutdown(Shutdown::Both);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// The hint, if there is one and the owner knows hints.
    fn hint_for_owner(&self, hint: Hint) -> Option<Hint> {
        let is_told = self.agreed.has(POLICIES) && hint != Hint::default();
        is_told.then_some(hint)
    }

    pub(super) fn client(&self) -> ClientId {
        self.client
    }

    /// The owner's pid, if this process's pid namespace shows it.
    pub(super) fn owner_pid(&self) -> Option<u32> {
        pid_of(&self.first)
    }

    fn lose(&self) -> Gone {
        if !self.lost.swap(true, Ordering::AcqRel) {
            let _ = self.first.shutdown(Shutdown::Both);
            let mut lines = self.lines.lock();
            lines.idle.clear();
            for stream in lines.streams.drain(..) {
                let _ = stream.shutdown(Shutdown::Both);
            }
            self.given.notify_all();
        }
        Gone
    }

    fn join(&self) -> io::Result<Line> {
        let mut line = Line::connect(&self.path)?;
        let join = Request::Join {
            magic: MAGIC,
            client: self.client,
            secret: self.secret,
        };
        match line.ask(&join) {
            Ok(Reply::Done) => Ok(line),
            _ => Err(io::ErrorKind::ConnectionRefused.into()),
        }
    }

    fn take_line(&self) -> Result<Line, Gone> {
        {
            let mut lines = self.lines.lock();
            loop {
                if self.is_lost() {
                    return Err(Gone);
                }
                if let Some(line) = lines.idle.pop() {
                    return Ok(line);
                }
                if lines.made < LINES_MAX {
                    lines.made += 1;
                    break;
                }
                self.given.wait(&mut lines);
            }
        }
        let line = self.join().map_err(|_| self.lose())?;
        let mut lines = self.lines.lock();
        if self.is_lost() {
            return Err(Gone);
        }
        lines.streams.push(line.stream().clone());
        Ok(line)
    }

    fn give_line(&self, line: Line) {
        let mut lines = self.lines.lock();
        if !self.is_lost() {
            lines.idle.push(line);
            self.given.notify_one();
        }
    }

    /// Waits for a slow reply for as long as the owner lives.
    fn receive_slow(&self, line: &mut Line) -> Result<Reply, WireError> {
        self.receive_slow_with_file(line).map(|(reply, _)| reply)
    }

    /// The same, with the file that comes with the reply.
    fn receive_slow_with_file(
        &self,
        line: &mut Line,
    ) -> Result<(Reply, Option<OwnedFd>), WireError> {
        while !line.has_reply(PROBE_AFTER)? {
            self.probe_owner();
        }
        line.receive(ANSWER_PATIENCE)
    }

    /// Probes the owner with a connection of its own, which no thread waits for.
    fn probe_owner(&self) {
        if let Some(_probing) = self.probing.try_lock()
            && self.join().is_err()
        {
            self.lose();
        }
    }

    /// Sends a request whose reply may be slow.
    pub(super) fn ask(&self, request: &Request<'_>) -> Result<Reply, Gone> {
        self.exchange(|line| {
            line.send(request)?;
            self.receive_slow(line)
        })
    }

    /// Sends a request that the owner answers without waiting for anything.
    pub(super) fn ask_fast(&self, request: &Request<'_>) -> Result<Reply, Gone> {
        self.exchange(|line| line.ask(request))
    }

    /// Runs one exchange over an idle connection.
    fn exchange<R>(&self, talk: impl FnOnce(&mut Line) -> Result<R, WireError>) -> Result<R, Gone> {
        let mut line = self.take_line()?;
        match talk(&mut line) {
            Ok(reply) => {
                self.give_line(line);
                Ok(reply)
            }
            Err(error) => {
                tracing::debug!(%error, "the owner of the store is gone");
                Err(self.lose())
            }
        }
    }

    fn send(&self, request: &Request<'_>) {
        // If the message is lost, the owner is lost too.
        let _ = self.exchange(|line| line.send(request));
    }

    pub(super) fn report(&self) -> Result<Report, Gone> {
        match self.ask_fast(&Request::Stats)? {
            Reply::Stats(report) => Ok(self.with_pids_of_this_namespace(*report)),
            _ => Err(self.lose()),
        }
    }

    /// A report has the pids of the owner's pid namespace.
    fn with_pids_of_this_namespace(&self, mut report: Report) -> Report {
        let owner = self.owner_pid();
        if owner != report.pid {
            for process in &mut report.processes {
                process.pid = owner.filter(|_| process.client.is_none());
            }
        }
        Report {
            pid: owner,
            ..report
        }
    }

    /// The memory that this process has in common with its owner, or its own.
    pub(super) fn common(&self) -> Result<Arc<Common>, Gone> {
        if !self.agreed.has(COMMON) {
            let why = format!("the owner is of release {}", self.agreed.release);
            return Ok(Arc::new(Common::local(why)));
        }
        let asked = self.exchange(|line| line.ask_for_file(&Request::Common))?;
        let common = match asked {
            (Reply::Common, file) => file.ok_or_else(file_lost).and_then(Common::adopt),
            _ => Ok(Common::local("the owner has no memory to share".to_owned())),
        };
        Ok(Arc::new(common.unwrap_or_else(|error| {
            tracing::warn!(
                %error,
                "the owner's shared memory cannot be used; writes give way to the reads of this \
                 process alone, and the owner does not see how the volumes answer it"
            );
            Common::local(error.to_string())
        })))
    }

    /// Whether a place beneath the owner's store may have pages.
    pub(super) fn may_have_beneath(&self) -> bool {
        self.agreed.has(BENEATH) && !self.is_bottom.load(Ordering::Relaxed)
    }

    /// Waits until these pages have arrived from beneath the owner's store. Returns whether one is
    /// stored then.
    pub(super) fn arrive(&self, namespace: NamespaceId, keys: &[PageKey], until: Instant) -> bool {
        let mut some_stored = false;
        for some in keys.chunks(KEYS_MAX) {
            let patience = until.saturating_duration_since(Instant::now());
            let request = Request::Arrive {
                namespace: namespace.0,
                keys: blob(some),
                patience_ms: u32::try_from(patience.as_millis()).unwrap_or(u32::MAX),
            };
            match self.ask(&request) {
                Ok(Reply::Count(count)) => some_stored |= count > 0,
                Ok(Reply::Done) => self.is_bottom.store(true, Ordering::Relaxed),
                _ => {}
            }
        }
        some_stored
    }

    /// Sends this process's counters, if they have changed and the owner takes them.
    pub(super) fn send_counts(&self, name: &str, counts: Counts) {
        if !self.agreed.has(COUNTS) || self.sent.lock().replace(counts) == Some(counts) {
            return;
        }
        self.send(&Request::Counted {
            name,
            counts: counts.list(),
        });
    }

    /// Sends this process's measures, if they have changed and the owner takes them.
    pub(super) fn send_measures(&self, measures: impl FnOnce() -> Measures) {
        if self.is_lost() || !self.agreed.has(TOTALS) {
            return;
        }
        let measures = measures();
        let mut measured = self.measured.lock();
        if *measured == measures {
            return;
        }
        measured.clone_from(&measures);
        drop(measured);
        self.send(&Request::Measured(Box::new(measures)));
    }

    fn counted(&self, request: &Request<'_>) -> Result<u64, StoreError> {
        match self.ask(request) {
            Ok(Reply::Count(count)) => Ok(count),
            Ok(Reply::Failed(failure)) => Err(failure.into()),
            _ => Err(StoreError::OwnerGone),
        }
    }
}

/// The kernel delivers a message without its file when this process may open no more files, or may
/// not have this one.
fn file_lost() -> io::Error {
    io::Error::other("the file that came with the answer could not be opened here")
}

/// The id of the store at a path, if there is one that can be read.
fn store_at(path: &Path) -> Option<[u8; 16]> {
    let volume = File::open(path, Access::ReadOnly).ok()?;
    let superblock = volume.superblock().ok()?;
    Some(*superblock.store.as_bytes())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::net::UnixListener;

    use larder_format::PageKey;
    use put::RemotePut;

    use super::*;
    use crate::api::{OpenOptions, PageStore};
    use crate::catalog::{Catalog, Putting};
    use crate::share::Store;
    use larder_core::grants::{Ask, Grant};
    use larder_core::status::{PutStatus, Refusal};

    struct Home {
        _directory: tempfile::TempDir,
        path: std::path::PathBuf,
        owner: Store,
    }

    fn home() -> Home {
        let (directory, path) = crate::share::tests::created();
        let owner = Store::attach(&path, OpenOptions::default()).unwrap();
        Home {
            _directory: directory,
            path,
            owner,
        }
    }

    /// A namespace registered at the owner, and pages to ask for in it.
    fn named(remote: &Remote) -> (NamespaceId, [Ask; 2]) {
        let namespace = crate::share::tests::namespace(65536);
        let asks = [1, 2].map(|at| Ask {
            key: PageKey::from_bytes([at; 32]),
            parent: None,
            depth: 0,
            saved: 0,
        });
        (remote.namespace(&namespace).unwrap(), asks)
    }

    #[test]
    fn a_put_keeps_its_connection_to_its_end_and_gives_it_back() {
        let home = home();
        let (remote, _) = Remote::reach(&home.path, &Protocol::default()).unwrap();
        let (namespace, asks) = named(&remote);
        assert_eq!(remote.lines.lock().idle.len(), 1);
        let mut put = remote.put(namespace, Hint::default());
        assert_eq!(remote.lines.lock().idle.len(), 0);
        let reservations = asks.map(|ask| {
            let (reservation, grants) = put.reserve(&[ask], &mut || true);
            // This client has no mark on the volumes.
            assert_eq!(grants, [Grant::Refused(Refusal::Busy)]);
            put.commit(reservation, &[None]);
            put.landed(&[(reservation, Vec::new())]);
            reservation
        });
        let refused = vec![PutStatus::Refused(Refusal::Busy)];
        assert_eq!(put.wait(&reservations), [refused.clone(), refused]);
        drop(put);
        assert_eq!(remote.lines.lock().idle.len(), 1);
        assert!(!remote.is_lost());
        home.owner.close().unwrap();
    }

    #[test]
    fn more_puts_at_once_than_there_are_connections_wait_for_one() {
        let home = home();
        let (remote, _) = Remote::reach(&home.path, &Protocol::default()).unwrap();
        let (namespace, _) = named(&remote);
        let mut puts: Vec<_> = (0..LINES_MAX)
            .map(|_| remote.put(namespace, Hint::default()))
            .collect();
        std::thread::scope(|scope| {
            let another = scope.spawn(|| drop(remote.put(namespace, Hint::default())));
            assert!(!another.is_finished());
            puts.pop();
            another.join().unwrap();
        });
        drop(puts);
        assert!(!remote.is_lost());
        assert_eq!(remote.lines.lock().made, LINES_MAX);
        home.owner.close().unwrap();
    }

    #[test]
    fn a_put_that_is_broken_off_costs_the_client_its_owner() {
        let home = home();
        for is_answered in [false, true] {
            let (remote, _) = Remote::reach(&home.path, &Protocol::default()).unwrap();
            let (namespace, asks) = named(&remote);
            let mut put = RemotePut::new(&remote, namespace, Hint::default());
            if is_answered {
                put.reserve(&asks, &mut || false);
            } else {
                put.ask(&asks);
            }
            drop(put);
            assert!(remote.is_lost());
        }
        home.owner.close().unwrap();
    }

    #[test]
    fn a_client_that_asks_for_nothing_waits_for_its_owners_end_without_a_limit() {
        let home = home();
        let (remote, _) = Remote::reach(&home.path, &Protocol::default()).unwrap();
        assert_eq!(remote.first.read_timeout().unwrap(), None);
        std::thread::scope(|scope| {
            scope.spawn(|| remote.wait_for_owner_end(&Board::default(), || ()));
            home.owner.close().unwrap();
        });
        assert!(remote.is_lost());
    }

    #[test]
    fn an_owner_that_hangs_up_is_distinguished_from_no_owner() {
        let (_directory, path) = crate::share::tests::created();
        let reached = Remote::reach(&path, &Protocol::default()).err().unwrap();
        assert!(matches!(reached, ReachError::Nobody), "{reached}");
        let listener = UnixListener::bind(socket_path(&path)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(listener.accept()));
            let reached = Remote::reach(&path, &Protocol::default()).err().unwrap();
            assert!(matches!(reached, ReachError::Unreachable(_)), "{reached}");
        });
    }
}
