//! The owner's side: a listening socket, a thread for each connection, and the resources of each
//! client.
//!
//! Owns: the socket file beside the store, and the connections. `answer` decides the replies,
//! `ledger` accounts for each client's resources. Both work without threads, sockets or clock. This
//! module drives them.
//!
//! Invariants:
//! - A client is one first connection and any number of further ones. When the first one ends, the
//!   client has gone. Its pins are released at once: reads in flight go into its own memory, or
//!   fail their checksum. Its puts are aborted. Its extents, and the staging slots that it reads
//!   into, are released when its mark has gone from every volume ([`guard`]): until then the kernel
//!   may still carry out its writes and reads.
//! - If any of its connections fails, the client has gone too: unread messages on that connection
//!   are lost.
//! - A connected client that falls silent loses its puts and its pins in the same way (`watch`).
//! - A client can name only its own puts: its numbers belong to its session, not to the core.
//! - The resources that one client can hold are bounded: connections, one frame and one reply for
//!   each, pins, puts, half of the staging area, and page data in flight up to its share of the
//!   write budget, which is equal for all. Extents of an aborted put that it may still write to are
//!   not counted: whole segments, which stay unused until it has gone.
//! - No client occupies the core longer than a bounded number of pages takes: long lists are
//!   processed in pieces. Each process reads and writes page data itself, with at most its ring's
//!   depth of operations at the device at once.
//!
//! Faults defended against: arbitrary bytes on the socket ([`wire`](super::wire)); clients of
//! another user; clients that stop reading (only their own threads wait); clients killed at any
//! moment.

pub mod answer;
pub mod ledger;
mod peer;
mod reads;
mod session;
mod socket;
mod watch;

use crate::runtime::thread::JoinHandle;
use crate::runtime::{Condvar, Instant, Mutex};
use std::collections::BTreeMap;
use std::io::{self, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use super::AttachOptions;
use super::pass::Giving;
use super::protocol::{Agreed, Protocol};
use super::wire::{
    ClientId, Failure, ReleaseCount, Reply, Report, Request, Welcome, WireError, arrives, parse,
    receive, send,
};
use crate::api::{NamespaceId, PageStore, Settings};
use crate::catalog::SegmentMap;
use crate::error::StoreError;
use crate::fork::{Private, keep_private};
use crate::seldom::Seldom;
use crate::store::Store;
use answer::{Answer, Desk, Greeting, Later};
use ledger::Awaited;
use peer::Admission;
pub(super) use peer::hides_own_user;
pub(super) use reads::OwnReads;
use reads::Reads;
use session::{Session, fresh_secret};
use socket::FileId;
pub(crate) use socket::is_listening;
pub use socket::socket_path;
pub(super) use socket::{may_give_to, may_listen};
pub(super) use socket::{short_path, unix_socket};
use watch::Watch;

/// Interval of the checks for the mark of a client that has gone, and their limit while the store
/// is being closed.
const LINGER_LOOK: Duration = Duration::from_millis(10);
const LINGER_AT_CLOSE: Duration = Duration::from_secs(2);

/// Interval of the checks that the socket's file is still in its place.
const SOCKET_LOOK: Duration = Duration::from_secs(1);

/// Limit for the greeting of a new connection. Before the greeting the connection belongs to no
/// session that could hang up on it.
const GREETING_PATIENCE: Duration = Duration::from_secs(2);

/// Buffers longer than this are not kept for the next message.
const BUFFER_KEPT_BYTES: usize = 256 << 10;

/// The running listener.
pub(super) struct Server {
    shared: Arc<Shared>,
    /// The thread that accepts connections, and the watchdog for clients. Empty once the server has
    /// been stopped.
    threads: Vec<JoinHandle<()>>,
}

/// The socket that clients connect to.
struct Listening {
    listener: Arc<UnixListener>,
    /// The file that it is bound to.
    bound: FileId,
    _private: Private,
}

impl Listening {
    fn new((listener, bound): (UnixListener, FileId)) -> Listening {
        Listening {
            _private: keep_private(&listener),
            listener: Arc::new(listener),
            bound,
        }
    }
}

struct Shared {
    store: Arc<Store>,
    /// Path of the store's first volume, as given.
    path: PathBuf,
    socket: PathBuf,
    welcome: Template,
    map: SegmentMap,
    /// The volumes, used to check clients' marks.
    probes: Vec<Arc<OwnedFd>>,
    listening: Mutex<Listening>,
    /// Limits the warning about a deleted socket.
    rebinds: Seldom,
    admission: Admission,
    /// Limits the warning about denied processes.
    denials: Seldom,
    /// Limits the warning about messages of later releases.
    unknown: Seldom,
    /// The settings that apply to all processes of the store.
    settings: Settings,
    sessions: Mutex<BTreeMap<ClientId, Arc<Session>>>,
    /// Threads of connections, and of clients that have gone.
    threads: Mutex<Vec<JoinHandle<()>>>,
    reads: Reads,
    watch: Watch,
    next_client: AtomicU32,
    lingering: AtomicU32,
    /// The last attempt to start a thread failed.
    lacks_threads: AtomicBool,
    /// A client's puts were ended before its writes were over.
    abandoned: AtomicBool,
    stop: AtomicBool,
    stopped: Condvar,
    stopping: Mutex<()>,
}

/// The part of the greeting that is the same for all clients.
struct Template {
    protocol: Protocol,
    store: [u8; 16],
    group: Option<u32>,
    run: u32,
    segment_blocks: u32,
    volumes: Vec<(Option<String>, u32)>,
}

/// A connection after its greeting.
struct Greeted {
    session: Arc<Session>,
    connection: u64,
    is_first: bool,
}

/// Reads until a fixed moment, however few bytes each read returns.
struct Until<'a> {
    stream: &'a UnixStream,
    until: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if !arrives(self.stream, Some(left))? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.read(bytes)
    }
}

/// How a connection ends without an error.
enum Ending {
    /// The client hung up between two messages.
    InOrder,
    /// The client sent an invalid request.
    Nonsense,
}

impl Server {
    /// Listens beside the store, which this process owns.
    pub(super) fn start(
        store: Arc<Store>,
        path: &Path,
        AttachOptions {
            open: options,
            protocol,
            ..
        }: &AttachOptions,
        group: Option<u32>,
    ) -> Result<Server, StoreError> {
        let socket = socket_path(path);
        let failed = |doing| {
            let socket = socket.clone();
            move |error: io::Error| StoreError::io(doing, &socket, error)
        };
        let uid = user_of(&store).map_err(failed("serving the catalog"))?;
        let admission = Admission::new(uid, group);
        let bound = socket::listen(&socket, admission.store_user(), group)
            .map_err(failed("serving the catalog"))?;
        let (template, probes) = facts(&store, protocol, group);
        let shared = Arc::new(Shared {
            map: template.map(),
            store,
            welcome: template,
            probes,
            path: path.to_owned(),
            socket: socket.clone(),
            listening: Mutex::new(Listening::new(bound)),
            rebinds: Seldom::default(),
            admission,
            denials: Seldom::default(),
            unknown: Seldom::default(),
            settings: options.settings(),
            sessions: Mutex::default(),
            threads: Mutex::default(),
            reads: Reads::new(options.shared_reads, options.staging_bytes),
            watch: Watch::default(),
            next_client: AtomicU32::new(fresh_number()),
            lingering: AtomicU32::new(0),
            lacks_threads: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            stopped: Condvar::new(),
            stopping: Mutex::new(()),
        });
        let mut server = Server {
            shared: shared.clone(),
            threads: Vec::new(),
        };
        let start = |name: &str, work: fn(&Arc<Shared>)| {
            let shared = shared.clone();
            let thread = crate::runtime::thread::Builder::new().name(name.to_owned());
            let thread = thread.spawn(move || work(&shared));
            thread.map_err(failed("starting the catalog's threads"))
        };
        server
            .threads
            .push(start("larder-catalog", Shared::accept)?);
        server
            .threads
            .push(start("larder-watch", |shared| shared.watch())?);
        Ok(server)
    }

    /// Ends every connection, and waits a short time for the clients' I/O in flight. Returns
    /// whether all of it ended. If not, the store has been abandoned: the clients' extents must not
    /// be granted again.
    pub(super) fn stop(&mut self) -> bool {
        let over = || !self.shared.abandoned.load(Ordering::SeqCst);
        let threads = std::mem::take(&mut self.threads);
        if threads.is_empty() {
            return over();
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        {
            let listening = self.shared.listening.lock();
            socket::remove(&self.shared.socket, listening.bound);
            // Wakes the thread that accepts connections.
            let _ = rustix::net::shutdown(&listening.listener, rustix::net::Shutdown::Both);
        }
        {
            let _guard = self.shared.stopping.lock();
            self.shared.stopped.notify_all();
        }
        self.shared.watch.wake();
        for thread in threads {
            let _ = thread.join();
        }
        let sessions: Vec<_> = self.shared.sessions.lock().values().cloned().collect();
        for session in sessions {
            session.hang_up();
            // Done here, and not when the first connection ends: that connection may wait for an
            // effect of this call.
            let catalog = self.shared.store.catalog();
            session.ledger.leave(catalog, &self.shared.map);
        }
        loop {
            let threads = std::mem::take(&mut *self.shared.threads.lock());
            if threads.is_empty() {
                break;
            }
            for thread in threads {
                let _ = thread.join();
            }
        }
        over()
    }

    pub(super) fn report(&self) -> Report {
        self.shared.report()
    }

    /// The owner's own part in shared reads.
    pub(super) fn own_reads(&self) -> OwnReads {
        OwnReads {
            shared: self.shared.clone(),
            session: self.shared.welcome.own_session(),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The user that the store belongs to: the owner of its first volume, which is locked.
fn user_of(store: &Store) -> io::Result<u32> {
    let volumes = store.volumes();
    let first = volumes.present().next();
    let (_, volume) = first.ok_or(io::ErrorKind::NotFound)?;
    Ok(rustix::fs::fstat(&volume.file)?.st_uid)
}

/// The facts for clients' greetings, and the volumes' files.
fn facts(store: &Store, protocol: &Protocol, group: Option<u32>) -> (Template, Vec<Arc<OwnedFd>>) {
    let volumes = store.volumes();
    let superblock = volumes.superblock();
    let template = Template {
        protocol: protocol.clone(),
        store: *superblock.store.as_bytes(),
        group,
        run: superblock.run.get(),
        segment_blocks: superblock.segment_blocks,
        volumes: volumes
            .list
            .iter()
            .zip(&superblock.volumes)
            .map(|(volume, entry)| {
                let path = volume.as_ref().map(|volume| {
                    let path = std::fs::canonicalize(&volume.path);
                    path.unwrap_or_else(|_| volume.path.clone())
                });
                let path = path.map(|path| path.to_string_lossy().into_owned());
                (path, entry.segments)
            })
            .collect(),
    };
    let files = volumes.present().map(|(_, volume)| volume.file.clone());
    let files = files.collect();
    (template, files)
}

/// A first client number that clients of a former owner are unlikely to have.
fn fresh_number() -> u32 {
    let secret = fresh_secret().to_le_bytes();
    u32::from_le_bytes([secret[0], secret[1], secret[2], secret[3]])
}

impl Shared {
    fn accept(self: &Arc<Shared>) {
        let mut fails = false;
        let mut next_look = Instant::now() + SOCKET_LOOK;
        while !self.stop.load(Ordering::SeqCst) {
            let listener = self.listening.lock().listener.clone();
            let left = next_look.saturating_duration_since(Instant::now());
            if !arrives(&*listener, Some(left)).unwrap_or(true) {
                self.keep_socket();
                next_look = Instant::now() + SOCKET_LOOK;
                continue;
            }
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) if self.stop.load(Ordering::SeqCst) => return,
                Err(error) => {
                    // Out of descriptors or memory: new connections wait in the queue.
                    if !std::mem::replace(&mut fails, true) {
                        tracing::warn!(
                            %error,
                            "the catalog cannot accept a connection; trying again until it can"
                        );
                    }
                    self.pause(LINGER_LOOK);
                    continue;
                }
            };
            fails = false;
            let shared = self.clone();
            self.spawn("larder-client", move || shared.serve(Arc::new(stream)));
        }
    }

    /// Binds the socket again if its file has gone, which cleaners of temporary files cause.
    /// Without the file no client would find the owner.
    fn keep_socket(&self) {
        let mut listening = self.listening.lock();
        if self.stop.load(Ordering::SeqCst) || socket::is_bound(&self.socket, listening.bound) {
            return;
        }
        let outcome = self.bind_again();
        let more = self.rebinds.is_due();
        match (outcome, more) {
            (Ok(again), more) => {
                *listening = again;
                if let Some(more) = more {
                    let socket = self.socket.display();
                    tracing::warn!(
                        more,
                        "{socket}: another process deleted or replaced the socket, which is bound \
                         anew; keep cleaners of temporary files away from it (logged once a minute)"
                    );
                }
            }
            (Err(error), Some(more)) => {
                tracing::warn!(
                    more,
                    "{error}; new clients do not find the store (logged once a minute)"
                );
            }
            (Err(_), None) => {}
        }
    }

    fn bind_again(&self) -> Result<Listening, StoreError> {
        // Another store may be at the path by now, with an owner and a socket of its own.
        let failed = |error| StoreError::io("binding the socket anew", &self.socket, error);
        let found = std::fs::metadata(&self.path)
            .map_err(|error| StoreError::io("looking for the store", &self.path, error))?;
        let own = self.probes.first().map(rustix::fs::fstat);
        let is_own = own.is_some_and(|own| {
            own.is_ok_and(|own| (own.st_dev, own.st_ino) == (found.dev(), found.ino()))
        });
        if !is_own {
            return Err(failed(io::Error::other(
                "another store lies at its path now",
            )));
        }
        socket::listen(
            &self.socket,
            self.admission.store_user(),
            self.welcome.group,
        )
        .map(Listening::new)
        .map_err(failed)
    }

    fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) {
        let thread = crate::runtime::thread::Builder::new()
            .name(name.to_owned())
            .spawn(work);
        let mut threads = self.threads.lock();
        threads.retain(|thread| !thread.is_finished());
        match thread {
            Ok(thread) => {
                threads.push(thread);
                self.lacks_threads.store(false, Ordering::Relaxed);
            }
            Err(error) if !self.lacks_threads.swap(true, Ordering::Relaxed) => {
                tracing::warn!(
                    %error,
                    "the catalog has no thread for a client; raise the limit on threads (ulimit \
                     -u, TasksMax=)"
                );
            }
            Err(_) => {}
        }
    }

    /// Sleeps, unless the listener is being stopped.
    fn pause(&self, duration: Duration) {
        let mut guard = self.stopping.lock();
        if !self.stop.load(Ordering::SeqCst) {
            self.stopped.wait_for(&mut guard, duration);
        }
    }

    /// Admits the peer of a connection; else returns the reply to its greeting.
    fn admit(&self, stream: &UnixStream) -> Result<(), Reply> {
        self.admission.admit(stream).map_err(|denial| {
            if let Some(more) = self.denials.is_due() {
                tracing::warn!(
                    more,
                    "a process was denied the store: {denial} (logged once a minute)"
                );
            }
            Reply::Failed(Failure::Denied(denial))
        })
    }

    /// Serves one connection to its end.
    fn serve(&self, stream: Arc<UnixStream>) {
        let _private = keep_private(&*stream);
        let mut buffer = Vec::new();
        let Some(Greeted {
            session,
            connection,
            is_first,
        }) = self.greet(&stream, &mut buffer)
        else {
            return;
        };
        let outcome = self.serve_requests(&session, &stream, &mut buffer);
        if let Err(error) = &outcome {
            tracing::debug!(%error, client = session.id.0, "a connection to the catalog ended");
        }
        if !matches!(outcome, Ok(Ending::InOrder)) {
            // Unread messages of this connection are lost: the client must not wait for their
            // effects.
            session.hang_up();
        }
        session.connections.lock().open.remove(&connection);
        drop(stream);
        if is_first {
            self.leave(&session);
        }
    }

    /// The first message of a connection.
    fn greet(&self, stream: &Arc<UnixStream>, buffer: &mut Vec<u8>) -> Option<Greeted> {
        let until = Instant::now() + GREETING_PATIENCE;
        if !receive(&mut Until { stream, until }, buffer).ok()? {
            return None;
        }
        let greeting = answer::greeting(buffer, &self.welcome.protocol)
            .and_then(|greeting| self.admit(stream).map(|()| greeting).map_err(Some));
        let greeting = match greeting {
            Ok(greeting) => greeting,
            Err(last_reply) => {
                if let Some(reply) = last_reply {
                    let _ = send(&mut &**stream, buffer, &reply);
                }
                return None;
            }
        };
        let (session, is_first, reply) = match greeting {
            Greeting::Further(client, secret) => {
                let session = self.sessions.lock().get(&client).cloned();
                let session = session.filter(|session| session.secret == secret)?;
                (session, false, Reply::Done)
            }
            Greeting::First(agreed) => {
                let id = ClientId(self.next_client.fetch_add(1, Ordering::Relaxed));
                let session = Arc::new(Session::new(id, self.welcome.run, agreed));
                let welcome = self.welcome.for_client(&session);
                self.sessions.lock().insert(session.id, session.clone());
                (session, true, Reply::Welcome(welcome))
            }
        };
        let connection = session.add(stream);
        let sent = connection.is_some() && send(&mut &**stream, buffer, &reply).is_ok();
        if !sent || self.stop.load(Ordering::SeqCst) {
            if is_first {
                self.leave(&session);
            }
            return None;
        }
        Some(Greeted {
            session,
            connection: connection?,
            is_first,
        })
    }

    fn serve_requests(
        &self,
        session: &Arc<Session>,
        stream: &UnixStream,
        buffer: &mut Vec<u8>,
    ) -> Result<Ending, WireError> {
        let mut out = Vec::new();
        // Buffered: messages sent together are read together.
        let mut reader = BufReader::new(stream);
        loop {
            if reader.buffer().is_empty() {
                arrives(stream, None)?;
            }
            if !receive(&mut reader, buffer)? {
                return Ok(Ending::InOrder);
            }
            let reply = match parse(buffer) {
                Ok(request) => match self.answer_reads(session, request) {
                    Ok(reply) => reply,
                    Err(request) => self.answer(session, request),
                },
                Err(error @ WireError::Unknown(_)) => Some(self.unsupported(session, &error)),
                Err(error) => return Err(error),
            };
            let Some(reply) = reply else {
                continue;
            };
            if let Reply::Namespace(id) = reply {
                self.named(session, NamespaceId(id));
            }
            let ends = matches!(reply, Reply::Failed(Failure::Protocol(_)));
            let area = matches!(reply, Reply::Area).then(|| self.reads.staging());
            let mut along = Giving {
                stream,
                file: area.flatten().map(|staging| staging.area.file()),
            };
            send(&mut along, &mut out, &reply)?;
            if ends {
                return Ok(Ending::Nonsense);
            }
            for buffer in [&mut *buffer, &mut out] {
                buffer.clear();
                buffer.shrink_to(BUFFER_KEPT_BYTES);
            }
        }
    }

    /// The reply to a message of a later release.
    fn unsupported(&self, session: &Session, error: &WireError) -> Reply {
        if let Some(more) = self.unknown.is_due() {
            tracing::warn!(
                more,
                "a client of release {} was refused: {error}; upgrade this process (logged once a \
                 minute)",
                session.agreed.release
            );
        }
        Reply::Failed(Failure::Unsupported)
    }

    /// A client has gone: releases its resources as soon as that is safe. Runs on the thread of its
    /// first connection, which waits for that: starting another thread could fail.
    fn leave(&self, session: &Session) {
        self.sessions.lock().remove(&session.id);
        session.hang_up();
        let left = session.ledger.leave(self.store.catalog(), &self.map);
        let has_fills = self.leave_slots(session);
        if left.is_due || has_fills {
            self.lingering.fetch_add(1, Ordering::Relaxed);
            self.wait_for_io(session);
            self.lingering.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Waits until a client's I/O is over, then releases its extents and slots.
    fn wait_for_io(&self, session: &Session) {
        let catalog = self.store.catalog();
        let mut until = None;
        let unawaited = loop {
            let ended = session
                .ledger
                .end_when_over(catalog, &self.map, &self.probes);
            if let Some(unawaited) = ended {
                break unawaited;
            }
            if self.stop.load(Ordering::SeqCst) {
                let until = *until.get_or_insert_with(|| Instant::now() + LINGER_AT_CLOSE);
                if Instant::now() >= until {
                    // This process grants nothing any more, and the next owner waits for the marks
                    // itself.
                    self.store.abandon();
                    self.abandoned.store(true, Ordering::SeqCst);
                    break session.ledger.abandon();
                }
                crate::runtime::thread::sleep(LINGER_LOOK);
            }
            self.pause(LINGER_LOOK);
        };
        for reservation in unawaited {
            catalog.wait(reservation);
        }
        self.end_fills(session);
    }

    /// `None` for requests without a reply.
    fn answer(&self, session: &Session, request: Request<'_>) -> Option<Reply> {
        let desk = Desk {
            catalog: self.store.catalog(),
            map: &self.map,
            marks: &self.probes,
            share_bytes: self.share_bytes(),
        };
        let begins = matches!(request, Request::Reserve { .. } | Request::Pin { .. });
        let answer = desk.answer(&session.ledger, request);
        if begins {
            self.watch.call();
        }
        match answer {
            Answer::Reply(reply) => Some(reply),
            Answer::Nothing => None,
            Answer::Later(later) => Some(self.answer_later(session, later)),
        }
    }

    /// Does the waiting that a request asks for.
    fn answer_later(&self, session: &Session, later: Later) -> Reply {
        let catalog = self.store.catalog();
        match later {
            Later::Settled(puts) => {
                let outcome = |put: Awaited| {
                    let reservation = put.reservation;
                    (
                        put,
                        reservation.map_or_else(Vec::new, |id| catalog.wait(id)),
                    )
                };
                let outcomes = puts.into_iter().map(outcome).collect();
                answer::settled(&session.ledger, outcomes)
            }
            Later::Room { seen, patience } => {
                catalog.wait_for_room(seen, Instant::now() + patience);
                Reply::Room {
                    room: catalog.room(),
                }
            }
            Later::Delete(namespace, keys) => answer::count(catalog.delete(namespace, &keys)),
            Later::Clear(namespace) => answer::count(catalog.clear_namespace(namespace)),
            Later::Flush => answer::done(catalog.flush()),
            Later::Report => Reply::Stats(Box::new(self.report())),
        }
    }

    /// Bytes of puts in flight that one client may have: the same for every client and the owner.
    fn share_bytes(&self) -> u64 {
        let clients = self.sessions.lock().len() as u64;
        self.store.write_bytes_max() / (clients + 1)
    }

    fn report(&self) -> Report {
        let sessions = self.sessions.lock();
        let (mut reads, mut puts, mut adrift) = (0, 0, 0);
        let mut releases = BTreeMap::<&Agreed, u32>::new();
        for session in sessions.values() {
            *releases.entry(&session.agreed).or_default() += 1;
            let (reading, putting) = session.ledger.counts();
            reads += reading;
            puts += putting;
            adrift += session.ledger.kept().len() as u64;
        }
        Report {
            protocol: self.welcome.protocol.clone(),
            releases: releases.into_iter().map(ReleaseCount::of).collect(),
            stats: self.store.stats(),
            settings: self.settings,
            pid: Some(std::process::id()),
            clients: u32::try_from(sessions.len()).unwrap_or(u32::MAX),
            reads_in_flight: reads,
            puts_in_flight: puts,
            pages_adrift: adrift,
            lingering: self.lingering.load(Ordering::Relaxed),
            rss_bytes: rss_bytes(),
            staging: self.reads.report(),
        }
    }
}

/// Resident memory of this process in bytes; zero when the system does not report it.
fn rss_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split_whitespace().nth(1).and_then(|n| n.parse().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}

impl Template {
    fn map(&self) -> SegmentMap {
        let segments: Vec<u32> = self.volumes.iter().map(|(_, count)| *count).collect();
        SegmentMap::new(&segments, self.segment_blocks)
    }

    /// The owner as a client of its own.
    fn own_session(&self) -> Session {
        let agreed = Agreed {
            version: self.protocol.newest,
            features: self.protocol.features,
            release: self.protocol.release.clone(),
        };
        Session::new(ClientId(u32::MAX), self.run, agreed)
    }

    fn for_client(&self, session: &Session) -> Welcome {
        Welcome {
            protocol: self.protocol.clone(),
            client: session.id,
            secret: session.secret,
            store: self.store,
            group: self.group,
            run: self.run,
            segment_blocks: self.segment_blocks,
            volumes: self.volumes.clone(),
        }
    }
}
