//! The owner's side: a listening socket, a thread for each connection, and the resources of each
//! client.
//!
//! | module | content |
//! |---|---|
//! | `accept` | the listening socket: new connections, and the socket's file |
//! | `serve` | a connection from its greeting to its end |
//! | [`answer`] | the reply to each request |
//! | `noted` | the calls of clients, for a recording |
//! | `tally` | the processes that use the store, with their counters |
//! | `totals` | the totals of all processes, and their copies in the clients |
//! | `emptying` | segments that clients want emptied |
//! | `socket` | the socket file beside a store |
//! | `books` | the answers for callers who keep books of their own |
//! | `reads` | the owner's part in shared reads |
//! | `lend` | the keys of an encrypted store, for clients |
//! | `forget` | erased keys, which clients wipe |
//! | `watch` | the watchdog for clients that fall silent |
//! | `shared` | the state that the threads of a server share |
//! | `answering` | how the volumes answer |
//! | `soundness` | whether the volumes hold what this process wrote |
//! | `places` | whether the volumes' paths still lead to their files |
//! | `peer` | whether the process behind a connection may be a client |
//! | `session` | a client: its connections and its ledger |
//! | [`ledger`] | the puts and pins of one client |
//! | `held` | the part of one client in the staging area |
//! | `forgotten` | which clients may have erased keys |
//! | `told` | the connection over which a client is sent totals |
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

mod accept;
pub mod answer;
mod answering;
mod books;
mod emptying;
mod forget;
mod forgotten;
mod held;
pub mod ledger;
mod lend;
mod noted;
mod peer;
mod places;
mod reads;
mod serve;
mod session;
mod shared;
mod socket;
mod soundness;
mod tally;
mod told;
mod totals;
mod watch;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use larder_base::ids::ClientId;
use larder_base::runtime::thread::JoinHandle;
use larder_base::runtime::{Condvar, Instant, Mutex};
use larder_base::seldom::Seldom;
use larder_base::system::files::{self, Handle};
use larder_base::system::{processes, sockets};

use super::bell::Wish;
use super::wire::{ReleaseCount, Report};
use crate::api::{OpenOptions, PageStore};
use crate::error::{StoreError, io_error};
use crate::history::History;
use crate::protocol::{Agreed, Protocol};
use crate::store::LocalStore;
use crate::totals::Totals;
use crate::volume::row_of;
use crate::volume::socket::socket_path;
use accept::LINGER_LOOK;
use answering::Answering;
pub(super) use forget::Eraser;
use forgotten::Forgetting;
use peer::Admission;
pub(super) use peer::hides_own_user;
use places::Places;
pub(super) use reads::OwnReads;
use reads::Reads;
use session::{Session, fresh_secret};
use shared::{Adding, Listening, Shared, Template};
pub(super) use socket::{may_give_to, may_listen};
use soundness::Soundness;
pub(super) use tally::own_name;
use watch::Watch;

/// Longest wait for the mark of a client that has gone, while the store is being closed.
const LINGER_AT_CLOSE: Duration = Duration::from_secs(2);

/// The running listener.
pub(super) struct Server {
    shared: Arc<Shared>,
    /// The thread that accepts connections, and the watchdog for clients. Empty once the server has
    /// been stopped.
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Listens beside the store, which this process owns.
    pub(super) fn start(
        store: Arc<LocalStore>,
        path: &Path,
        options: &OpenOptions,
        wish: &Wish<'_>,
    ) -> Result<Server, StoreError> {
        let group = wish.group;
        let socket = socket_path(path);
        let failed = |doing| {
            let socket = socket.clone();
            move |error: io::Error| io_error(doing, &socket, error)
        };
        let uid = user_of(&store).map_err(failed("serving the catalog"))?;
        let admission = Admission::new(uid, group);
        let bound = socket::listen(&socket, admission.store_user(), group)
            .map_err(failed("serving the catalog"))?;
        let (template, probes) = facts(&store, &options.protocol, group);
        let places = Places::of(&store.volumes.lock());
        let answering = Answering::of(&store.volumes.lock());
        let soundness = Soundness::of(&store.volumes.lock(), &store.damaged_places);
        let shared = Arc::new(Shared {
            map: template.map(),
            store,
            places,
            answering,
            soundness,
            history: Mutex::new(History::after(wish.former)),
            welcome: template,
            probes,
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
            begun: Instant::now(),
            departed: Mutex::default(),
            adding: Adding {
                former: wish.former.clone(),
                gone: Mutex::default(),
            },
            emptying: Mutex::new(()),
            forgetting: Forgetting::default(),
            started_unix_s: processes::unix_seconds(),
            bell: wish.bell.clone(),
            keeps_ownership: options.keeps_ownership,
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
            let thread = larder_base::runtime::thread::Builder::new().name(name.to_owned());
            let thread = thread.spawn(move || work(&shared));
            thread.map_err(failed("starting the catalog's threads"))
        };
        server
            .threads
            .push(start("larder-catalog", Shared::accept)?);
        server
            .threads
            .push(start("larder-watch", |shared| shared.watch())?);
        server
            .threads
            .push(start("larder-totals", |shared| shared.tell_regularly())?);
        Ok(server)
    }

    /// Ends every connection, and waits a short time for the clients' I/O in flight. `heir` is the
    /// client that is to own the store next. Returns whether all of the I/O ended. If not, the
    /// store has been abandoned: the clients' extents must not be granted again.
    pub(super) fn stop(&mut self, heir: Option<ClientId>) -> bool {
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
            sockets::stop_listening(&listening.listener);
        }
        {
            let _guard = self.shared.stopping.lock();
            self.shared.stopped.notify_all();
        }
        self.shared.watch.wake();
        for thread in threads {
            let _ = thread.join();
        }
        self.shared.tell_all();
        if let Some(heir) = heir {
            self.shared.tell_heir(heir);
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

    /// Erases tenants.
    pub(super) fn eraser(&self) -> Eraser {
        Eraser(self.shared.clone())
    }

    /// The bytes of the memory for shared reads.
    #[cfg(any(test, feature = "simulated"))]
    pub(super) fn staged(&self) -> Vec<u8> {
        let staging = self.shared.reads.made();
        staging.map_or_else(Vec::new, |staging| staging.area.contents())
    }

    /// The totals of all processes.
    pub(super) fn totals(&self) -> Totals {
        self.shared.totals(&self.shared.sessions.lock())
    }

    /// Whether this client uses the store.
    pub(super) fn serves(&self, client: ClientId) -> bool {
        let sessions = self.shared.sessions.lock();
        let session = sessions.get(&client);
        session.is_some_and(|session| session.ledger.is_marked())
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
        self.stop(None);
    }
}

/// The user that the store belongs to: the owner of its first volume, which is locked.
fn user_of(store: &LocalStore) -> io::Result<u32> {
    let volumes = store.volumes.lock();
    let first = volumes.present().next();
    let (_, volume) = first.ok_or(io::ErrorKind::NotFound)?;
    files::identify(&volume.file).map(|(_, user)| user)
}

/// The facts for clients' greetings, and the volumes' files.
fn facts(
    store: &LocalStore,
    protocol: &Protocol,
    group: Option<u32>,
) -> (Template, Vec<Arc<Handle>>) {
    let volumes = store.volumes.lock();
    let superblock = volumes.superblock();
    let template = Template {
        protocol: protocol.clone(),
        store: *superblock.store.as_bytes(),
        group,
        run: superblock.run.get(),
        segment_blocks: superblock.segment_blocks,
        sealed: store.is_sealed(),
        volumes: volumes
            .list
            .iter()
            .zip(&superblock.volumes)
            .map(|(volume, entry)| {
                let path = volume.as_ref().map(|volume| {
                    let path = files::resolve(&volume.path);
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
    fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) {
        let thread = larder_base::runtime::thread::Builder::new()
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

    /// A client has gone: releases its resources as soon as that is safe. Runs on the thread of its
    /// first connection, which waits for that: starting another thread could fail.
    fn leave(&self, session: &Session) {
        self.note_keyholder(session);
        {
            let mut sessions = self.sessions.lock();
            sessions.remove(&session.id);
            self.fold(session);
        }
        session.hang_up();
        self.store.data.board.leave(row_of(session.id));
        session.leases.end(self.store.books());
        self.store.local.traffic.end(session.id);
        let left = session.ledger.leave(self.store.catalog(), &self.map);
        self.watch.left(session, &left);
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
                larder_base::runtime::thread::sleep(LINGER_LOOK);
            }
            self.pause(LINGER_LOOK);
        };
        for reservation in unawaited {
            catalog.wait(reservation);
        }
        self.end_fills(session);
    }

    /// Bytes of puts in flight that one client may have: the same for every client and the owner.
    fn share_bytes(&self) -> u64 {
        let clients = self.sessions.lock().len() as u64;
        self.store.write_bytes_max / (clients + 1)
    }

    fn report(&self) -> Report {
        self.places.look();
        let sessions = self.sessions.lock();
        let (mut reads, mut puts, mut adrift, mut compactions) = (0, 0, 0, 0);
        let mut releases = BTreeMap::<&Agreed, u32>::new();
        for session in sessions.values() {
            // A process that only asks for a report does not use the store.
            if session.ledger.is_marked() {
                *releases.entry(&session.agreed).or_default() += 1;
            }
            let (reading, putting) = session.ledger.counts();
            reads += reading;
            puts += putting;
            adrift += session.ledger.kept().len() as u64;
            compactions += u32::from(session.compacts.load(Ordering::Relaxed));
        }
        let totals = self.totals(&sessions);
        self.tell(&sessions, &totals);
        Report {
            protocol: self.welcome.protocol.clone(),
            clients: releases.values().sum(),
            releases: releases.into_iter().map(ReleaseCount::of).collect(),
            stats: self.store.stats(),
            settings: self.settings,
            pid: Some(processes::id()),
            reads_in_flight: reads,
            puts_in_flight: puts,
            pages_adrift: adrift,
            lingering: self.lingering.load(Ordering::Relaxed),
            rss_bytes: processes::resident_bytes(),
            staging: self.reads.report(),
            processes: self.processes(&sessions),
            departed: *self.departed.lock(),
            totals,
            started_unix_s: self.started_unix_s,
            format_version: larder_format::FORMAT_VERSION,
            compactions,
            beneath: self.store.local.beneath_report(),
            displaced_volumes: self.places.displaced(),
            damaged_volumes: self.soundness.report(),
            answering_volumes: self.answering.report(&self.store.data.board),
            stopped_clients: sessions
                .values()
                .filter_map(|of| self.stopped(of))
                .collect(),
            ended_client: self.watch.ended(),
            curve: self.store.local.curve_report(),
            history: self.history.lock().report(),
            quotas: self.store.shown_quotas(),
        }
    }
}
