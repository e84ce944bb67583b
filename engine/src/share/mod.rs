//! One store, many processes.
//!
//! The first process that attaches to a store becomes its *owner*: it holds the lock, decides, and
//! serves its catalog on a socket beside the store (`PATH.sock`). The others are *clients*: they
//! ask the owner for the locations of pages and for extents to write to. They move and verify page
//! data themselves. When the owner goes, a client takes its place.
//!
//! ```text
//!   client                                owner                          volumes
//!  +--------------+  lookup, pin, reserve,  +-------------------+
//!  | SharedStore  | --------------------->  | SharedStore       |
//!  |   remote     |     commit, wait        |   server -> Store | --------> descriptors,
//!  |   own ring   |                         |             ring  |           headers, syncs
//!  +--------------+                         +-------------------+
//!        |            page data, straight between                             ^
//!        +------------------------------------------------------------------- +
//! ```
//!
//! | module | content |
//! |---|---|
//! | `wire` | the messages |
//! | `protocol` | the rule by which messages may change between releases |
//! | `server` | the owner's side: sessions, and the resources that each client holds |
//! | `remote` | the client's side: a [`Catalog`] over a socket |
//! | `role` | the role of a process, owner or client, and how the process gets it |
//! | `staging`, `area` | reads that several processes share: page slots, shared memory |
//! | `keys`, `pass` | long lists of keys and open files in messages |
//! | `guard` | marks on the volumes: a mark outlives a killed client as long as its I/O does |
//!
//! Promises:
//! - A store never has two owners. An owner takes the volumes' locks before it reads the volumes,
//!   and holds them until its last write is over.
//! - An extent that was granted to a client is granted again only after that client's last write is
//!   over, even if the owner changes meanwhile.
//! - A client that dies, or stops in the middle of a put, blocks the writes of others for seconds
//!   at most. Its pages fail. The segments that it may still write to stay reserved until it has
//!   gone or resumes. But no process can become the owner while a client of the previous owner is
//!   stopped: the new owner does not know the extents granted to that client.
//! - A client whose owner goes misses at once, until it has found a new owner or become the owner.
//!   All acknowledged pages are there then. A put waits for a new owner as long as it may wait for
//!   room, and is made once more.
//!
//! Several processes may use the pages of one namespace (ranks of a model whose whole cache every
//! rank holds). Such pages are read from the device once: the first process to ask reads a page
//! into memory that all of them map, and all copy it from there ([`SharedReads`]). A copy is
//! verified after it was made, like a read from the device. So the worst damage that a process can
//! do through that memory, or through the messages about it, is that each other process reads the
//! page itself. `get_lent` always reads for itself.
//!
//! Not protected against: a client that writes outside its extents, or forges a page together with
//! its checksum. All processes run as one user, who owns the volumes, or as members of the
//! permitted group.

#[doc(hidden)]
pub mod keys;
mod pass;
mod remote;
mod role;
mod server;

pub(crate) mod area;
pub(crate) mod guard;
#[doc(hidden)]
pub mod protocol;
pub(crate) mod staging;
#[doc(hidden)]
pub mod wire;

#[cfg(test)]
pub(crate) mod tests;

use crate::runtime::thread::JoinHandle;
use crate::runtime::{Condvar, Instant, Mutex, RwLock, RwLockReadGuard};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use larder_format::{Namespace, PageKey, Rank};

use crate::api::{
    GetPage, GetStatus, LentPage, MissReason, NamespaceId, OpenOptions, PageStore, PutOptions,
    PutPage, PutStatus, Refusal, Settings, SharedReads, Stats,
};
use crate::catalog::Catalog;
use crate::core::NAMESPACES_MAX;
use crate::error::StoreError;
use crate::fork::Origin;
use crate::store::Store;
use crate::volume::{self, Access, HolderState};
#[doc(hidden)]
pub use guard::Marks;
use protocol::Protocol;
use remote::{ReachError, Remote};
use role::{Client, Decider, Known, NotYet, Role};
#[doc(hidden)]
pub use server::answer;
pub(crate) use server::is_listening;
#[doc(hidden)]
pub use server::ledger;
use server::may_give_to;
pub use server::socket_path;
pub use staging::StagingReport;
pub use wire::Report;

/// How long an attaching process tries to find or become the owner. While another process is
/// opening the store, which takes a second for some millions of pages, the second limit applies.
const ATTACH_PATIENCE: Duration = Duration::from_secs(10);
const OPENING_PATIENCE: Duration = Duration::from_secs(120);

/// Time before the first warning about the retries.
const WARN_AFTER: Duration = Duration::from_secs(3);

/// Status of a put whose owner has gone.
const LEFT_UNDONE: PutStatus = PutStatus::Refused(Refusal::Closed);

/// Longest wait of a put. A moment much further off could not be represented as an `Instant`.
const PUT_WAIT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Pause between two tries. While there is no owner it grows by an eighth each time, up to the
/// maximum, which it reaches after about ten seconds.
const TRY_AGAIN: Duration = Duration::from_millis(20);
const TRY_AGAIN_MAX: Duration = Duration::from_secs(1);

/// How a store is attached to.
#[derive(Clone, Debug, Default)]
pub struct AttachOptions {
    /// Options of this process, as owner or as client. `read_only` is refused: a reader needs no
    /// owner.
    pub open: OpenOptions,
    /// A group. Processes of its members may be clients, besides those of the user who owns the
    /// store's first volume.
    pub group: Option<u32>,
    /// The catalog protocol that this process speaks: that of this release, except in tests.
    #[doc(hidden)]
    pub protocol: Protocol,
}

/// The present role of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// This process decides.
    Owner,
    /// This process asks the owner.
    Client,
    /// The owner has gone and no new owner is found yet: everything misses.
    Nobody,
}

/// A store that several processes use at once. See the [module](self).
///
/// Dropping it without [`PageStore::close`] is safe: for the store it is as if the process had been
/// killed.
pub struct SharedStore {
    inner: Arc<Inner>,
    monitor: Mutex<Option<JoinHandle<()>>>,
}

struct Inner {
    path: PathBuf,
    options: AttachOptions,
    /// Every call holds the read lock, so that no call is in progress when the role changes.
    role: RwLock<Role>,
    /// Number of role changes.
    turns: AtomicU64,
    /// The settings of the last owner that this process was a client of.
    seen: Mutex<Option<Settings>>,
    /// The registered namespaces, by the id that this handle gave out. Each owner numbers them in
    /// its own way.
    spaces: Mutex<Vec<Namespace>>,
    stop: Mutex<bool>,
    stopped: Condvar,
    origin: Origin,
}

impl Store {
    /// Attaches to the store at `path`, which other processes may use too. Becomes the owner if
    /// there is none, else a client of the owner. See [`share`](self).
    ///
    /// # Errors
    /// The errors of [`Store::open`]; [`StoreError::Locked`] when a process that serves no catalog
    /// holds the store.
    pub fn attach(path: &Path, options: AttachOptions) -> Result<SharedStore, StoreError> {
        if options.open.read_only {
            return Err(StoreError::Usage(
                "a read-only handle needs no owner: open the store read-only instead".to_owned(),
            ));
        }
        let begun = Instant::now();
        let mut has_warned = false;
        let role = loop {
            match Role::find(path, &options, options.group) {
                Ok(role) => break role,
                Err(NotYet::TryAgain(error)) if begun.elapsed() < patience_with(&error) => {
                    if begun.elapsed() >= WARN_AFTER && !std::mem::replace(&mut has_warned, true) {
                        tracing::warn!(
                            "{error}; trying again for up to {} s",
                            patience_with(&error).as_secs()
                        );
                    }
                    crate::runtime::thread::sleep(TRY_AGAIN);
                }
                Err(NotYet::TryAgain(error) | NotYet::Never(error)) => return Err(error),
            }
        };
        let inner = Arc::new(Inner {
            path: path.to_owned(),
            options,
            role: RwLock::new(role),
            turns: AtomicU64::new(0),
            seen: Mutex::default(),
            spaces: Mutex::default(),
            stop: Mutex::new(false),
            stopped: Condvar::new(),
            origin: Origin::here(),
        });
        inner.compare_settings(&inner.role.read());
        let monitor = crate::runtime::thread::Builder::new()
            .name("larder-minder".to_owned())
            .spawn({
                let inner = inner.clone();
                move || inner.monitor_role()
            })
            .map_err(|e| StoreError::io("starting a thread", path, e))?;
        Ok(SharedStore {
            inner,
            monitor: Mutex::new(Some(monitor)),
        })
    }
}

/// Asks a running owner for its report.
///
/// # Errors
/// [`StoreError::NotServed`] when the store has no owner, [`StoreError::Locked`] when its owner has
/// no socket, [`StoreError::Denied`] and [`StoreError::Unanswered`] when its owner does not serve
/// this process, [`StoreError::NotUnderstood`] when its owner is of another release.
pub fn report(path: &Path) -> Result<Report, StoreError> {
    let reach = || Remote::reach(path, &Protocol::default());
    let reached = match reach().map_err(|error| not_served(path, &error)) {
        // The owner bound its socket in between.
        Err(StoreError::Locked {
            is_unserved: false, ..
        }) => reach().map_err(|error| not_served(path, &error)),
        reached => reached,
    };
    let (remote, _) = reached?;
    let report = remote.report();
    remote.hang_up();
    report.map_err(|_| StoreError::OwnerGone)
}

/// How long to retry after this error. A process that opens the store records its name only after
/// recovery. Until then the store is locked, and the recorded process has gone.
fn patience_with(error: &StoreError) -> Duration {
    match error {
        StoreError::Locked { holder, .. } if holder.state != HolderState::Running => {
            OPENING_PATIENCE
        }
        _ => ATTACH_PATIENCE,
    }
}

fn not_served(path: &Path, error: &ReachError) -> StoreError {
    if let (ReachError::Nobody(_), Some(locked)) = (error, locked(path)) {
        return locked;
    }
    let (path, reason) = (path.to_owned(), error.to_string());
    match error {
        ReachError::Silent | ReachError::Unreachable(_) => StoreError::Unanswered { path, reason },
        ReachError::Forbidden(_) | ReachError::Denied(_) => StoreError::Denied { path, reason },
        ReachError::Version { .. } | ReachError::Nonsense => {
            StoreError::NotUnderstood { path, reason }
        }
        ReachError::Nobody(_) => StoreError::NotServed { path, reason },
    }
}

/// The error of a store that is locked by a process; `None` when it is not locked.
fn locked(path: &Path) -> Option<StoreError> {
    let volume = volume::File::open(path, Access::ReadOnly).ok()?;
    volume.is_locked().then(|| volume.held(path))
}

impl Inner {
    /// The role monitor: makes sure that there is an owner, for as long as the handle is open.
    fn monitor_role(&self) {
        let mut pause = TRY_AGAIN;
        // The group to serve as owner: the configured group; else the group that the last owner
        // served, if this process may give the socket to it.
        let mut group = self.options.group;
        // The last warning about why this process could not become the owner.
        let mut last_warning = String::new();
        // Pid of the last owner.
        let mut former = None;
        loop {
            let client = match &*self.role.read() {
                Role::Client(client) => Some(client.clone()),
                Role::Closed => return,
                Role::Owner(_) | Role::Nobody => None,
            };
            let had_client = client.is_some();
            if let Some(client) = client {
                former = client.remote.owner_pid();
                client.remote.wait_for_owner_end();
                let served = client.group.filter(|gid| may_give_to(*gid));
                group = self.options.group.or(served);
            }
            if had_client {
                self.lose_owner();
                pause = TRY_AGAIN;
            }
            if self.is_stopped() {
                return;
            }
            if matches!(*self.role.read(), Role::Owner(_)) {
                let mut stop = self.stop.lock();
                while !*stop {
                    self.stopped.wait(&mut stop);
                }
                return;
            }
            match Role::find(&self.path, &self.options, group) {
                Ok(role) => {
                    self.compare_settings(&role);
                    if matches!(role, Role::Owner(_)) {
                        tracing::warn!(
                            path = %self.path.display(),
                            former_owner = former,
                            "took the store over: its owner has gone, this process owns it now"
                        );
                    }
                    *self.role.write() = role;
                    self.turns.fetch_add(1, Ordering::AcqRel);
                    // Notified under the lock, so that a thread that has just found no owner cannot
                    // begin to wait after this notification.
                    let stop = self.stop.lock();
                    self.stopped.notify_all();
                    // A `close` that runs after this hangs up on the new owner. A `close` that ran
                    // before found no connection.
                    if *stop {
                        return;
                    }
                    drop(stop);
                    last_warning.clear();
                    continue;
                }
                Err(NotYet::TryAgain(_)) => {}
                Err(NotYet::Never(error)) => {
                    let why = error.to_string();
                    if why != last_warning {
                        tracing::warn!(
                            %error,
                            "the store has no owner, and this process cannot become it; trying \
                             again"
                        );
                        last_warning = why;
                    }
                }
            }
            self.pause(pause);
            pause = (pause + pause / 8).min(TRY_AGAIN_MAX);
        }
    }

    /// Warns, once for the same settings, if the owner has other settings than this process asked
    /// for. The owner's settings apply.
    fn compare_settings(&self, role: &Role) {
        let Role::Client(client) = role else {
            return;
        };
        let Ok(report) = client.remote.report() else {
            return;
        };
        let wanted = self.options.open.settings();
        let before = self.seen.lock().replace(report.settings);
        if report.settings != wanted && before != Some(report.settings) {
            tracing::warn!(
                "{}: the settings of the store's owner hold: {}; this process asked for: {wanted}. \
                 Give all processes the same",
                self.path.display(),
                report.settings
            );
        }
    }

    /// The owner has gone. Waits for the calls in progress, which end as soon as the device lets
    /// them, and closes the volumes, so that another process can become the owner.
    fn lose_owner(&self) {
        let mut role = self.role.write();
        if matches!(*role, Role::Client(_)) {
            let lost = std::mem::replace(&mut *role, Role::Nobody);
            self.turns.fetch_add(1, Ordering::AcqRel);
            drop(role);
            // Dropped after unlocking: `drop` waits for reads that are still in flight.
            drop(lost);
        }
    }

    /// The role, for a call. `None` while the role changes: a waiting call would wait for the calls
    /// in progress, and those wait for the device. `None` in a forked child, too.
    fn role(&self) -> Option<RwLockReadGuard<'_, Role>> {
        if self.origin.is_inherited() {
            return None;
        }
        self.role.try_read()
    }

    fn is_stopped(&self) -> bool {
        *self.stop.lock()
    }

    fn pause(&self, pause: Duration) {
        let mut stop = self.stop.lock();
        if !*stop {
            self.stopped.wait_for(&mut stop, pause);
        }
    }

    /// Calls `work` with the present decider, and with the namespace as this decider knows it.
    fn with<R>(
        &self,
        namespace: NamespaceId,
        work: impl FnOnce(Decider<'_>, Known) -> R,
    ) -> Option<R> {
        let role = self.role()?;
        let decider = role.decider()?;
        let known = self.resolve(decider, namespace).ok()?;
        Some(work(decider, known))
    }

    fn put(
        &self,
        namespace: NamespaceId,
        pages: &[PutPage<'_>],
        options: PutOptions,
    ) -> Vec<PutStatus> {
        self.with(namespace, |decider, space| match decider {
            Decider::Owner(own) => own.store.put(space.id, pages, options),
            Decider::Client(Client { remote, data, .. }) => {
                data.put(&**remote, space.id, pages, options)
            }
        })
        .unwrap_or_else(|| vec![LEFT_UNDONE; pages.len()])
    }

    fn resolve(&self, decider: Decider<'_>, namespace: NamespaceId) -> Result<Known, StoreError> {
        if let Some(known) = decider.ids().get(namespace) {
            return Ok(known);
        }
        let space = self.spaces.lock().get(usize::from(namespace.0)).cloned();
        let space = space.ok_or(StoreError::UnknownNamespace)?;
        let known = Known {
            id: decider.named(&space)?,
            is_shared: self.shares_reads(&space),
        };
        decider.ids().set(namespace, known);
        Ok(known)
    }

    /// Whether this process shares its reads of a namespace while other processes use it too.
    fn shares_reads(&self, namespace: &Namespace) -> bool {
        match self.options.open.shared_reads {
            SharedReads::Auto => namespace.fields().tp == Rank::ALONE,
            SharedReads::On => true,
            SharedReads::Off => false,
        }
    }

    fn unavailable(&self) -> StoreError {
        if self.origin.is_inherited() {
            StoreError::Forked
        } else if self.is_stopped() {
            StoreError::Closed
        } else {
            StoreError::OwnerGone
        }
    }
}

impl SharedStore {
    /// The present role of this process.
    #[must_use]
    pub fn part(&self) -> Part {
        match self.inner.role().as_deref() {
            Some(Role::Owner(_)) => Part::Owner,
            Some(Role::Client(client)) if !client.remote.is_lost() => Part::Client,
            _ => Part::Nobody,
        }
    }

    /// Waits until the store has an owner, this process or another. Returns at `until` at the
    /// latest, and at once when the handle is closed.
    pub fn wait_for_owner(&self, until: Instant) {
        if self.inner.origin.is_inherited() {
            return;
        }
        let mut stop = self.inner.stop.lock();
        while !*stop && self.part() == Part::Nobody {
            if self.inner.stopped.wait_until(&mut stop, until).timed_out() {
                return;
            }
        }
    }

    /// Waits for the next owner after role change number `turns`. False if there is none by
    /// `until`.
    fn has_next_owner(&self, turns: u64, until: Instant) -> bool {
        if self.turns() == turns && self.part() != Part::Nobody {
            return false;
        }
        self.wait_for_owner(until);
        self.part() != Part::Nobody && Instant::now() < until
    }

    /// Number of role changes. If this number, or [`part`](Self::part), changed during a call that
    /// missed, repeat the call: it may have missed because there was no owner.
    #[must_use]
    pub fn turns(&self) -> u64 {
        self.inner.turns.load(Ordering::Acquire)
    }

    /// The owner's report.
    ///
    /// # Errors
    /// When there is no owner.
    pub fn report(&self) -> Result<Report, StoreError> {
        match self.inner.role().as_deref() {
            Some(Role::Owner(owner)) => Ok(owner.server.report()),
            Some(Role::Client(client)) => client.remote.report().map_err(|_| StoreError::OwnerGone),
            Some(Role::Nobody | Role::Closed) | None => Err(self.inner.unavailable()),
        }
    }
}

impl PageStore for SharedStore {
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, StoreError> {
        if self.inner.origin.is_inherited() {
            return Err(StoreError::Forked);
        }
        let id = {
            let mut spaces = self.inner.spaces.lock();
            let known = spaces.iter().position(|space| space == namespace);
            let at = match known {
                Some(at) => at,
                None if spaces.len() >= NAMESPACES_MAX => {
                    return Err(StoreError::TooManyNamespaces(NAMESPACES_MAX));
                }
                None => {
                    spaces.push(namespace.clone());
                    spaces.len() - 1
                }
            };
            NamespaceId(u16::try_from(at).unwrap_or(u16::MAX))
        };
        let role = self.inner.role();
        let decider = role.as_deref().and_then(Role::decider);
        match decider.map(|decider| self.inner.resolve(decider, id)) {
            Some(Err(error @ StoreError::TooManyNamespaces(_))) => Err(error),
            // Without an owner, the namespace is registered as soon as there is one.
            _ => Ok(id),
        }
    }

    /// Pages that an owner left undone when it went are put once more with the next owner, if there
    /// is one within `options.wait`.
    fn put(
        &self,
        namespace: NamespaceId,
        pages: &[PutPage<'_>],
        options: PutOptions,
    ) -> Vec<PutStatus> {
        let until = Instant::now() + options.wait.min(PUT_WAIT_MAX);
        let mut turns = self.turns();
        let mut statuses = self.inner.put(namespace, pages, options);
        while let Some(first) = statuses.iter().position(|status| *status == LEFT_UNDONE)
            && self.has_next_owner(turns, until)
        {
            turns = self.turns();
            let wait = until.saturating_duration_since(Instant::now());
            let again = self
                .inner
                .put(namespace, &pages[first..], PutOptions { wait });
            for (status, again) in statuses[first..].iter_mut().zip(again) {
                if !status.is_present() {
                    *status = again;
                }
            }
        }
        statuses
    }

    fn get(
        &self,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
    ) -> Vec<GetStatus> {
        let count = pages.len();
        self.inner
            .with(namespace, |decider, space| {
                decider.get(space, pages, deadline)
            })
            .unwrap_or_else(|| vec![GetStatus::Miss(MissReason::Closed); count])
    }

    fn get_lent(
        &self,
        namespace: NamespaceId,
        keys: &[PageKey],
        deadline: Option<Instant>,
    ) -> Vec<Result<LentPage, MissReason>> {
        self.inner
            .with(namespace, |decider, space| match decider {
                Decider::Owner(own) => own.store.get_lent(space.id, keys, deadline),
                Decider::Client(client) => {
                    let catalog: Arc<dyn Catalog> = client.remote.clone();
                    client.data.get_lent(&catalog, space.id, keys, deadline)
                }
            })
            .unwrap_or_else(|| keys.iter().map(|_| Err(MissReason::Closed)).collect())
    }

    fn longest_prefix(&self, namespace: NamespaceId, keys: &[PageKey]) -> usize {
        self.inner
            .with(namespace, |decider, space| match decider {
                Decider::Owner(own) => own.store.longest_prefix(space.id, keys),
                Decider::Client(Client { remote, data, .. }) => {
                    data.longest_prefix(&**remote, space.id, keys)
                }
            })
            .unwrap_or(0)
    }

    fn contains(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool> {
        self.inner
            .with(namespace, |decider, space| match decider {
                Decider::Owner(own) => own.store.contains(space.id, keys),
                Decider::Client(Client { remote, data, .. }) => {
                    data.contains(&**remote, space.id, keys)
                }
            })
            .unwrap_or_else(|| vec![false; keys.len()])
    }

    fn touch(&self, namespace: NamespaceId, keys: &[PageKey]) {
        self.inner.with(namespace, |decider, space| match decider {
            Decider::Owner(own) => own.store.touch(space.id, keys),
            Decider::Client(client) => client.remote.touch(space.id, keys),
        });
    }

    fn delete(&self, namespace: NamespaceId, keys: &[PageKey]) -> Result<u64, StoreError> {
        self.inner
            .with(namespace, |decider, space| match decider {
                Decider::Owner(own) => own.store.delete(space.id, keys),
                Decider::Client(client) => client.remote.delete(space.id, keys),
            })
            .unwrap_or_else(|| Err(self.inner.unavailable()))
    }

    fn clear_namespace(&self, namespace: NamespaceId) -> Result<u64, StoreError> {
        self.inner
            .with(namespace, |decider, space| match decider {
                Decider::Owner(own) => own.store.clear_namespace(space.id),
                Decider::Client(client) => client.remote.clear_namespace(space.id),
            })
            .unwrap_or_else(|| Err(self.inner.unavailable()))
    }

    fn flush(&self) -> Result<(), StoreError> {
        match self.inner.role().as_deref() {
            Some(Role::Owner(owner)) => owner.store.flush(),
            Some(Role::Client(client)) => client.remote.flush(),
            Some(Role::Nobody | Role::Closed) | None => Err(self.inner.unavailable()),
        }
    }

    /// Registers with the present disk of this process. After a change of owner, memory registered
    /// before may be used as plain memory.
    fn register(&self, memory: &'static mut [u8]) -> (&'static mut [u8], String) {
        match self.inner.role().as_deref() {
            Some(Role::Owner(owner)) => owner.store.register(memory),
            Some(Role::Client(client)) => client.data.register(memory),
            Some(Role::Nobody | Role::Closed) | None => {
                let why = self.inner.unavailable();
                (memory, format!("not registered: {why}"))
            }
        }
    }

    /// The owner's counters, with this process's own hits, misses, bytes read and latencies.
    fn stats(&self) -> Stats {
        match self.inner.role().as_deref() {
            Some(Role::Owner(owner)) => owner.store.stats(),
            Some(Role::Client(client)) => {
                let mut stats = client.remote.stats();
                client.data.count_into(&mut stats);
                stats
            }
            Some(Role::Nobody | Role::Closed) | None => Stats::default(),
        }
    }

    /// A client flushes and leaves. An owner disconnects its clients and closes the store.
    fn close(&self) -> Result<(), StoreError> {
        if self.inner.origin.is_inherited() {
            return Err(StoreError::Forked);
        }
        *self.inner.stop.lock() = true;
        self.inner.stopped.notify_all();
        // If the role is changing, there is no connection to close.
        let flushed = match self.inner.role().as_deref() {
            Some(Role::Client(client)) if !client.remote.is_lost() => {
                let flushed = client.remote.flush();
                client.remote.hang_up();
                flushed
            }
            _ => Ok(()),
        };
        if let Some(monitor) = self.monitor.lock().take() {
            let _ = monitor.join();
        }
        let role = std::mem::replace(&mut *self.inner.role.write(), Role::Closed);
        match role {
            Role::Owner(mut owner) => {
                if owner.server.stop() {
                    return owner.store.close();
                }
                owner.store.catalog().flush()?;
                Err(StoreError::ClientsWriting(self.inner.path.clone()))
            }
            _ => flushed,
        }
    }
}

impl Drop for SharedStore {
    fn drop(&mut self) {
        if self.inner.origin.is_inherited() {
            // The thread and all that it holds belong to the parent.
            std::mem::forget((self.inner.clone(), self.monitor.get_mut().take()));
            return;
        }
        *self.inner.stop.lock() = true;
        self.inner.stopped.notify_all();
        if let Some(Role::Client(client)) = self.inner.role().as_deref() {
            client.remote.hang_up();
        }
        if let Some(monitor) = self.monitor.lock().take() {
            let _ = monitor.join();
        }
    }
}
