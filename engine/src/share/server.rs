//! The owner's side: a listening socket, a thread for each connection, and what each client holds.
//!
//! Owns: the socket file beside the store, the connections, and by client its pins and its puts.
//!
//! Invariants:
//! - a client is one first connection and any number of further ones; when the first ends, the client has gone: its pins are
//!   given back at once (what it still reads goes into its own memory), its puts when its mark on every volume has gone
//!   ([`guard`]), for until then the kernel may be writing what it submitted;
//! - a client names its own puts only: the numbers that it is given are its session's, not the core's;
//! - what one client can make the owner hold is bounded: a frame and a reply for each connection, [`CONNECTIONS_MAX`] of them,
//!   [`PINS_MAX`] pins, and page data under way for its share of the write budget.
//!
//! Faults defended against: whatever arrives on the socket ([`wire`](super::wire)); clients of another user; clients that
//! stop reading (their own threads wait, nobody else); clients killed at any moment.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_format::{BLOCK_BYTES, Namespace};
use parking_lot::{Condvar, Mutex};

use super::guard;
use super::wire::{
    ClientId, Failure, MAGIC, PinnedPage, PlaceGrant, Reply, Report, Request, VERSION, Welcome,
    WireError, keys_of, parse, receive, send,
};
use crate::api::{NamespaceId, PageStore, PutStatus, Refusal};
use crate::catalog::{Ask, Extent, Grant, ReservationId};
use crate::error::StoreError;
use crate::index::{Place, SegmentId};
use crate::store::Store;

/// Connections of one client.
const CONNECTIONS_MAX: usize = 64;

/// Pages that one client reads at once.
const PINS_MAX: u64 = 1 << 20;

/// Longest wait for room that one request may ask for.
const ROOM_PATIENCE_MAX: Duration = Duration::from_secs(1);

/// How often the mark of a client that has gone is looked for, and how long when the store is being closed.
const LINGER_LOOK: Duration = Duration::from_millis(10);
const LINGER_AT_CLOSE: Duration = Duration::from_secs(2);

/// Buffers longer than this are not kept for the next message.
const BUFFER_KEPT_BYTES: usize = 256 << 10;

/// Where the catalog of the store at `path` is served.
pub fn socket_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".sock");
    PathBuf::from(name)
}

/// The running listener.
pub(super) struct Server {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
    socket: PathBuf,
}

struct Shared {
    store: Arc<Store>,
    welcome: Template,
    /// The volumes, to look at clients' marks through.
    probes: Vec<Arc<OwnedFd>>,
    listener: UnixListener,
    /// Who may connect, besides the superuser.
    uid: u32,
    gid: Option<u32>,
    /// Bytes of puts under way that one client may have.
    share_bytes: u64,
    sessions: Mutex<BTreeMap<ClientId, Arc<Session>>>,
    /// Threads of connections and of clients that have gone.
    threads: Mutex<Vec<JoinHandle<()>>>,
    next_client: AtomicU32,
    lingering: AtomicU32,
    stop: AtomicBool,
    stopped: Condvar,
    stopping: Mutex<()>,
}

/// What every client is told.
struct Template {
    store: [u8; 16],
    run: u32,
    segment_blocks: u32,
    volumes: Vec<(Option<String>, u32)>,
}

struct Session {
    id: ClientId,
    secret: u64,
    held: Mutex<Held>,
    connections: Mutex<Connections>,
}

#[derive(Default)]
struct Connections {
    next: u64,
    open: BTreeMap<u64, UnixStream>,
}

#[derive(Default)]
struct Held {
    gone: bool,
    may_write: bool,
    pins: BTreeMap<SegmentId, u64>,
    pinned: u64,
    puts: BTreeMap<u64, Put>,
    put_bytes: u64,
    next_put: u64,
}

/// A connection that has introduced itself.
struct Greeted {
    session: Arc<Session>,
    connection: u64,
    is_first: bool,
}

/// A put of a client.
#[derive(Clone)]
struct Put {
    /// The core's; `None` when everything was refused here.
    reservation: Option<ReservationId>,
    asks: usize,
    committed: bool,
    /// Somebody waits for its statuses.
    awaited: bool,
    /// Granted pages whose writes are not over.
    unlanded: BTreeSet<usize>,
    bytes: u64,
}

impl Server {
    /// Listens beside the store, which this process owns.
    pub(super) fn start(
        store: Arc<Store>,
        path: &Path,
        group: Option<u32>,
    ) -> Result<Server, StoreError> {
        let socket = socket_path(path);
        let failed = |doing| {
            let socket = socket.clone();
            move |error: io::Error| StoreError::io(doing, &socket, error)
        };
        let listener = listen(&socket, group).map_err(failed("serving the catalog"))?;
        let uid = std::fs::metadata(path)
            .map_err(failed("serving the catalog"))?
            .uid();
        let (template, probes) = facts(&store);
        let shared = Arc::new(Shared {
            share_bytes: store.write_bytes_max() / 2,
            store,
            welcome: template,
            probes,
            listener,
            uid,
            gid: group,
            sessions: Mutex::default(),
            threads: Mutex::default(),
            next_client: AtomicU32::new(fresh_number()),
            lingering: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            stopped: Condvar::new(),
            stopping: Mutex::new(()),
        });
        let acceptor = std::thread::Builder::new()
            .name("larder-catalog".to_owned())
            .spawn({
                let shared = shared.clone();
                move || shared.accept()
            })
            .map_err(failed("starting the catalog's thread"))?;
        Ok(Server {
            shared,
            acceptor: Some(acceptor),
            socket,
        })
    }

    /// Ends every connection and waits for what clients had under way, as far as it ends soon.
    pub(super) fn stop(&mut self) {
        let Some(acceptor) = self.acceptor.take() else {
            return;
        };
        let _ = std::fs::remove_file(&self.socket);
        self.shared.stop.store(true, Ordering::SeqCst);
        {
            let _guard = self.shared.stopping.lock();
            self.shared.stopped.notify_all();
        }
        // Wakes the thread in `accept`.
        let _ = rustix::net::shutdown(self.shared.listener.as_fd(), rustix::net::Shutdown::Both);
        let _ = acceptor.join();
        for session in self.shared.sessions.lock().values() {
            session.hang_up();
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
    }

    pub(super) fn report(&self) -> Report {
        self.shared.report()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What clients are told of the store, and its files.
fn facts(store: &Store) -> (Template, Vec<Arc<OwnedFd>>) {
    let volumes = store.volumes();
    let superblock = volumes.superblock();
    let template = Template {
        store: *superblock.store.as_bytes(),
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

/// Binds the socket: whoever holds the store's lock may replace what a former owner left there.
fn listen(socket: &Path, group: Option<u32>) -> io::Result<UnixListener> {
    let directory = socket
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let name = socket.file_name().unwrap_or_default();
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    let fd = rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?;
    // Before it has a name: the file is made with these permissions.
    rustix::fs::fchmod(&fd, rustix::fs::Mode::from_raw_mode(mode))?;
    let (_directory, short) = short_path(directory, name)?;
    let address = rustix::net::SocketAddrUnix::new(short)?;
    rustix::net::bind(&fd, &address)?;
    if group.is_some() {
        let gid = group.map(rustix::fs::Gid::from_raw);
        rustix::fs::chown(socket, None, gid)?;
        // The process's umask took the group's share away.
        rustix::fs::chmod(socket, rustix::fs::Mode::from_raw_mode(mode))?;
    }
    rustix::net::listen(&fd, 128)?;
    Ok(UnixListener::from(fd))
}

/// A name for a socket that fits an address, however long the directory's is; and what must stay open while it is used.
pub(super) fn short_path(
    directory: &Path,
    name: &std::ffi::OsStr,
) -> io::Result<(Option<OwnedFd>, PathBuf)> {
    const ADDRESS_BYTES_MAX: usize = 107;
    let whole = directory.join(name);
    if whole.as_os_str().len() <= ADDRESS_BYTES_MAX {
        return Ok((None, whole));
    }
    let handle = rustix::fs::open(
        directory,
        rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?;
    let number = std::os::fd::AsRawFd::as_raw_fd(&handle);
    let path = PathBuf::from(format!("/proc/self/fd/{number}")).join(name);
    Ok((Some(handle), path))
}

/// Numbers that clients of a former owner are not likely to have.
fn fresh_number() -> u32 {
    let secret = fresh_secret().to_le_bytes();
    u32::from_le_bytes([secret[0], secret[1], secret[2], secret[3]])
}

fn fresh_secret() -> u64 {
    let mut bytes = [0; 8];
    // Without randomness a guess is easier; the socket's permissions are what keeps others out.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_le_bytes(bytes)
}

impl Shared {
    fn accept(self: &Arc<Shared>) {
        while !self.stop.load(Ordering::SeqCst) {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) if self.stop.load(Ordering::SeqCst) => return,
                Err(error) => {
                    // Out of descriptors or memory: whoever connects is made to wait.
                    tracing::warn!(%error, "the catalog cannot take a connection");
                    self.pause(LINGER_LOOK);
                    continue;
                }
            };
            if !self.may_connect(&stream) {
                tracing::warn!("refused a connection to the catalog from another user");
                continue;
            }
            let shared = self.clone();
            self.spawn("larder-client", move || shared.serve(stream));
        }
    }

    fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) {
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(work);
        let mut threads = self.threads.lock();
        threads.retain(|thread| !thread.is_finished());
        match thread {
            Ok(thread) => threads.push(thread),
            Err(error) => tracing::warn!(%error, "the catalog has no thread for a client"),
        }
    }

    /// Sleeps, unless the listener is being stopped.
    fn pause(&self, duration: Duration) {
        let mut guard = self.stopping.lock();
        if !self.stop.load(Ordering::SeqCst) {
            self.stopped.wait_for(&mut guard, duration);
        }
    }

    fn may_connect(&self, stream: &UnixStream) -> bool {
        let Ok(peer) = rustix::net::sockopt::socket_peercred(stream) else {
            return false;
        };
        let (uid, gid) = (peer.uid.as_raw(), peer.gid.as_raw());
        uid == 0 || uid == self.uid || self.gid == Some(gid)
    }

    /// Serves one connection to its end.
    fn serve(self: &Arc<Shared>, mut stream: UnixStream) {
        let mut buffer = Vec::new();
        let Some(Greeted {
            session,
            connection,
            is_first,
        }) = self.greet(&mut stream, &mut buffer)
        else {
            return;
        };
        let outcome = self.converse(&session, &mut stream, &mut buffer);
        if let Err(error) = outcome {
            tracing::debug!(%error, client = session.id.0, "a connection to the catalog ended");
        }
        if is_first {
            self.leave(&session);
        } else {
            session.connections.lock().open.remove(&connection);
        }
    }

    /// The first message of a connection.
    fn greet(self: &Arc<Shared>, stream: &mut UnixStream, buffer: &mut Vec<u8>) -> Option<Greeted> {
        if !receive(stream, buffer).ok()? {
            return None;
        }
        let (magic, version, joins) = match parse(buffer).ok()? {
            Request::Hello { magic, version } => (magic, version, None),
            Request::Join {
                magic,
                version,
                client,
                secret,
            } => (magic, version, Some((client, secret))),
            _ => return None,
        };
        if magic != MAGIC {
            return None;
        }
        if version != VERSION {
            let _ = send(
                stream,
                buffer,
                &Reply::Failed(Failure::Version { ours: VERSION }),
            );
            return None;
        }
        let (session, is_first, reply) = match joins {
            Some((client, secret)) => {
                let session = self.sessions.lock().get(&client).cloned();
                let session = session.filter(|session| session.secret == secret)?;
                (session, false, Reply::Done)
            }
            None => {
                let session = Arc::new(Session::new(ClientId(
                    self.next_client.fetch_add(1, Ordering::Relaxed),
                )));
                let welcome = self.welcome.for_client(&session);
                self.sessions.lock().insert(session.id, session.clone());
                (session, true, Reply::Welcome(welcome))
            }
        };
        let connection = session.add(stream);
        let sent = connection.is_some() && send(stream, buffer, &reply).is_ok();
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

    fn converse(
        &self,
        session: &Arc<Session>,
        stream: &mut UnixStream,
        buffer: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        let mut out = Vec::new();
        while receive(stream, buffer)? {
            let request: Request<'_> = parse(buffer)?;
            let Some(reply) = self.answer(session, request) else {
                continue;
            };
            let ends = matches!(reply, Reply::Failed(Failure::Protocol(_)));
            send(stream, &mut out, &reply)?;
            if ends {
                break;
            }
            for buffer in [&mut *buffer, &mut out] {
                buffer.clear();
                buffer.shrink_to(BUFFER_KEPT_BYTES);
            }
        }
        Ok(())
    }

    /// `None` for what is told and not asked.
    fn answer(&self, session: &Session, request: Request<'_>) -> Option<Reply> {
        let catalog = self.store.catalog();
        let nonsense = |what: &str| Some(Reply::Failed(Failure::Protocol(what.to_owned())));
        let keys = match &request {
            Request::LongestPrefix { keys, .. }
            | Request::Contains { keys, .. }
            | Request::Touch { keys, .. }
            | Request::Pin { keys, .. }
            | Request::Verified { keys, .. }
            | Request::Reserve { keys, .. }
            | Request::Delete { keys, .. } => match keys_of(keys) {
                Some(keys) => keys,
                None => return nonsense("keys are 32 bytes each, 131,072 at most"),
            },
            _ => Vec::new(),
        };
        Some(match request {
            Request::Hello { .. } | Request::Join { .. } => return nonsense("a second greeting"),
            Request::Marked => self.marked(session),
            Request::Namespace { record } => match Namespace::decode(record) {
                Ok(namespace) => match self.store.namespace(&namespace) {
                    Ok(id) => Reply::Namespace(id.0),
                    Err(error) => Reply::Failed(error.into()),
                },
                Err(error) => return nonsense(&error.to_string()),
            },
            Request::LongestPrefix { namespace, .. } => {
                Reply::Count(catalog.longest_prefix(NamespaceId(namespace), &keys) as u64)
            }
            Request::Contains { namespace, .. } => {
                Reply::Flags(catalog.contains(NamespaceId(namespace), &keys))
            }
            Request::Touch { namespace, .. } => {
                catalog.touch(NamespaceId(namespace), &keys);
                return None;
            }
            Request::Pin { namespace, .. } => {
                Reply::Pinned(self.pin(session, NamespaceId(namespace), &keys))
            }
            Request::Unpin { segments } => {
                self.unpin(session, &segments);
                return None;
            }
            Request::Verified {
                namespace,
                findings,
                ..
            } => {
                let findings: Vec<_> = keys
                    .iter()
                    .zip(findings)
                    .map(|(key, (place, finding))| (*key, self.store.extent(place), finding))
                    .collect();
                catalog.verified(NamespaceId(namespace), &findings);
                return None;
            }
            Request::Reserve {
                namespace, links, ..
            } => {
                if links.len() != keys.len() {
                    return nonsense("a link for each key");
                }
                let asks: Vec<Ask> = keys
                    .iter()
                    .zip(links)
                    .map(|(key, (parent, depth))| Ask {
                        key: *key,
                        parent: parent.map(larder_format::PageKey::from_bytes),
                        depth,
                    })
                    .collect();
                self.reserve(session, NamespaceId(namespace), &asks)
            }
            Request::Commit {
                reservation,
                checksums,
            } => {
                if let Some(core) = session.commit(reservation) {
                    catalog.commit(core, &checksums);
                }
                return None;
            }
            Request::Landed { reservation, pages } => {
                if let Some((core, pages)) = session.landed(reservation, &pages) {
                    catalog.landed(core, &pages);
                }
                return None;
            }
            Request::Wait { reservation } => match session.await_put(reservation) {
                Some(put) => {
                    let statuses = match put.reservation {
                        Some(core) => catalog.wait(core),
                        None => vec![PutStatus::Refused(Refusal::Busy); put.asks],
                    };
                    session.end_put(reservation);
                    Reply::Settled(statuses)
                }
                None => return nonsense("no such put"),
            },
            Request::Room => Reply::Room {
                room: catalog.room(),
            },
            Request::WaitForRoom { seen, patience_ms } => {
                let patience = Duration::from_millis(patience_ms.into()).min(ROOM_PATIENCE_MAX);
                catalog.wait_for_room(seen, Instant::now() + patience);
                Reply::Room {
                    room: catalog.room(),
                }
            }
            Request::Delete { namespace, .. } => {
                count(catalog.delete(NamespaceId(namespace), &keys))
            }
            Request::Clear { namespace } => count(catalog.clear_namespace(NamespaceId(namespace))),
            Request::Flush => match catalog.flush() {
                Ok(()) => Reply::Done,
                Err(error) => Reply::Failed(error.into()),
            },
            Request::Stats => Reply::Stats(Box::new(self.report())),
        })
    }

    /// A client says that it holds its marks; it may write when that is so.
    fn marked(&self, session: &Session) -> Reply {
        let all = self
            .probes
            .iter()
            .all(|volume| guard::is_marked(volume, session.id.0));
        if all {
            session.held.lock().may_write = true;
            Reply::Done
        } else {
            Reply::Failed(Failure::Protocol(
                "the volumes do not carry this client's mark".to_owned(),
            ))
        }
    }

    fn pin(
        &self,
        session: &Session,
        namespace: NamespaceId,
        keys: &[larder_format::PageKey],
    ) -> Vec<Option<PinnedPage>> {
        let mut held = session.held.lock();
        if held.gone || held.pinned + keys.len() as u64 > PINS_MAX {
            return vec![None; keys.len()];
        }
        let pages = self.store.catalog().pin(namespace, keys);
        for page in pages.iter().flatten() {
            *held.pins.entry(page.extent.place.segment).or_default() += 1;
            held.pinned += 1;
        }
        drop(held);
        pages
            .into_iter()
            .map(|page| {
                page.map(|page| PinnedPage {
                    place: page.extent.place,
                    checksum: page.checksum,
                    unproven: page.unproven,
                })
            })
            .collect()
    }

    /// Gives pins back: those that the client has.
    fn unpin(&self, session: &Session, segments: &[SegmentId]) {
        let mut extents = Vec::with_capacity(segments.len());
        let mut held = session.held.lock();
        for &segment in segments {
            let Some(count) = held.pins.get_mut(&segment) else {
                continue;
            };
            *count -= 1;
            if *count == 0 {
                held.pins.remove(&segment);
            }
            held.pinned -= 1;
            extents.push(self.store.extent(Place { segment, start: 0 }));
        }
        drop(held);
        self.store.catalog().unpin(&extents);
    }

    fn reserve(&self, session: &Session, namespace: NamespaceId, asks: &[Ask]) -> Reply {
        let catalog = self.store.catalog();
        let Some(shape) = catalog.shape(namespace) else {
            return Reply::Failed(Failure::UnknownNamespace);
        };
        let page_bytes = u64::from(shape.shape.page_blocks()) * BLOCK_BYTES as u64;
        let mut held = session.held.lock();
        let wanted = page_bytes.saturating_mul(asks.len() as u64);
        // One put always goes through, however large.
        let is_over = held.put_bytes > 0 && held.put_bytes + wanted > self.share_bytes;
        if held.gone || !held.may_write || is_over {
            let put = Put {
                reservation: None,
                asks: asks.len(),
                committed: true,
                awaited: false,
                unlanded: BTreeSet::new(),
                bytes: 0,
            };
            let reservation = held.add(put);
            let grants = vec![PlaceGrant::Refused(Refusal::Busy); asks.len()];
            return Reply::Reserved {
                reservation,
                grants,
            };
        }
        let (core, grants) = catalog.reserve(namespace, asks);
        let unlanded: BTreeSet<usize> = grants
            .iter()
            .enumerate()
            .filter(|(_, grant)| matches!(grant, Grant::Write(_)))
            .map(|(index, _)| index)
            .collect();
        let bytes = page_bytes * unlanded.len() as u64;
        let reservation = held.add(Put {
            reservation: Some(core),
            asks: asks.len(),
            committed: false,
            awaited: false,
            unlanded,
            bytes,
        });
        let grants = grants
            .into_iter()
            .map(|grant| match grant {
                Grant::Write(Extent { place, .. }) => PlaceGrant::Write(place),
                Grant::Settles => PlaceGrant::Settles,
                Grant::Refused(why) => PlaceGrant::Refused(why),
            })
            .collect();
        Reply::Reserved {
            reservation,
            grants,
        }
    }

    /// A client has gone: what it held is given back, as soon as that is safe.
    fn leave(self: &Arc<Shared>, session: &Arc<Session>) {
        self.sessions.lock().remove(&session.id);
        session.hang_up();
        let (pins, has_puts) = {
            let mut held = session.held.lock();
            held.gone = true;
            held.pinned = 0;
            (std::mem::take(&mut held.pins), !held.puts.is_empty())
        };
        for (segment, count) in pins {
            let extent = self.store.extent(Place { segment, start: 0 });
            for _ in 0..count {
                self.store.catalog().unpin(&[extent]);
            }
        }
        if has_puts {
            let (shared, session) = (self.clone(), session.clone());
            self.lingering.fetch_add(1, Ordering::Relaxed);
            self.spawn("larder-linger", move || {
                shared.outlive(&session);
                shared.lingering.fetch_sub(1, Ordering::Relaxed);
            });
        }
    }

    /// Waits until a client's writes are over, then ends its puts. What they were given stays dead.
    fn outlive(&self, session: &Session) {
        let mut until = None;
        while self
            .probes
            .iter()
            .any(|volume| guard::is_marked(volume, session.id.0))
        {
            if self.stop.load(Ordering::SeqCst) {
                let until = *until.get_or_insert_with(|| Instant::now() + LINGER_AT_CLOSE);
                if Instant::now() >= until {
                    // This process gives nothing to anybody any more, and the next owner waits for the marks itself.
                    break;
                }
                std::thread::sleep(LINGER_LOOK);
            }
            self.pause(LINGER_LOOK);
        }
        let puts = std::mem::take(&mut session.held.lock().puts);
        let catalog = self.store.catalog();
        for put in puts.into_values() {
            let Some(reservation) = put.reservation else {
                continue;
            };
            if !put.committed {
                catalog.commit(reservation, &vec![None; put.asks]);
            }
            let over: Vec<(usize, bool)> = put.unlanded.into_iter().map(|at| (at, false)).collect();
            catalog.landed(reservation, &over);
            if !put.awaited {
                catalog.wait(reservation);
            }
        }
    }

    fn report(&self) -> Report {
        let sessions = self.sessions.lock();
        let (mut reads, mut puts) = (0, 0);
        for session in sessions.values() {
            let held = session.held.lock();
            reads += held.pinned;
            puts += held.puts.len() as u64;
        }
        Report {
            stats: self.store.stats(),
            pid: std::process::id(),
            clients: u32::try_from(sessions.len()).unwrap_or(u32::MAX),
            reads_in_flight: reads,
            puts_in_flight: puts,
            lingering: self.lingering.load(Ordering::Relaxed),
            rss_bytes: rss_bytes(),
        }
    }
}

fn count(outcome: Result<u64, StoreError>) -> Reply {
    match outcome {
        Ok(count) => Reply::Count(count),
        Err(error) => Reply::Failed(error.into()),
    }
}

/// Memory of this process that is in RAM, in bytes; zero when the system does not tell.
fn rss_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split_whitespace().nth(1).and_then(|n| n.parse().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        match error {
            StoreError::SyncFailed => Failure::Sync,
            StoreError::NoRoom => Failure::NoRoom,
            StoreError::TooManyNamespaces(limit) => {
                Failure::TooManyNamespaces(u32::try_from(limit).unwrap_or(u32::MAX))
            }
            StoreError::UnknownNamespace => Failure::UnknownNamespace,
            StoreError::Closed => Failure::Closed,
            other => Failure::Write(other.to_string()),
        }
    }
}

impl Template {
    fn for_client(&self, session: &Session) -> Welcome {
        Welcome {
            client: session.id,
            secret: session.secret,
            store: self.store,
            run: self.run,
            segment_blocks: self.segment_blocks,
            volumes: self.volumes.clone(),
        }
    }
}

impl Session {
    fn new(id: ClientId) -> Session {
        Session {
            id,
            secret: fresh_secret(),
            held: Mutex::default(),
            connections: Mutex::default(),
        }
    }

    /// Takes a connection in; `None` when the client has too many, or has gone.
    fn add(&self, stream: &UnixStream) -> Option<u64> {
        let mut connections = self.connections.lock();
        if connections.open.len() >= CONNECTIONS_MAX || self.held.lock().gone {
            return None;
        }
        let number = connections.next;
        connections.next += 1;
        connections.open.insert(number, stream.try_clone().ok()?);
        Some(number)
    }

    fn hang_up(&self) {
        for connection in self.connections.lock().open.values() {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// A put to wait for, once.
    fn await_put(&self, number: u64) -> Option<Put> {
        let mut held = self.held.lock();
        let put = held.puts.get_mut(&number)?;
        let first = !std::mem::replace(&mut put.awaited, true);
        first.then(|| put.clone())
    }

    /// The core's reservation, once.
    fn commit(&self, number: u64) -> Option<ReservationId> {
        let mut held = self.held.lock();
        let put = held.puts.get_mut(&number)?;
        let first = !std::mem::replace(&mut put.committed, true);
        put.reservation.filter(|_| first)
    }

    /// The pages that were not over before.
    fn landed(
        &self,
        number: u64,
        pages: &[(u32, bool)],
    ) -> Option<(ReservationId, Vec<(usize, bool)>)> {
        let mut held = self.held.lock();
        let put = held.puts.get_mut(&number)?;
        let over = pages
            .iter()
            .map(|&(at, good)| (at as usize, good))
            .filter(|(at, _)| put.unlanded.remove(at))
            .collect();
        Some((put.reservation?, over))
    }

    fn end_put(&self, number: u64) {
        let mut held = self.held.lock();
        if let Some(put) = held.puts.remove(&number) {
            held.put_bytes -= put.bytes;
        }
    }
}

impl Held {
    fn add(&mut self, put: Put) -> u64 {
        let number = self.next_put;
        self.next_put += 1;
        self.put_bytes += put.bytes;
        self.puts.insert(number, put);
        number
    }
}
