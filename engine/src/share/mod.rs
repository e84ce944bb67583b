//! One store, many processes.
//!
//! The first process that attaches to a store becomes its *owner*: it holds the lock, decides, and serves its catalog on a
//! socket beside the store (`PATH.sock`). The others are *clients*: they ask the owner where pages lie and where they may
//! write, and move and verify page data themselves. When the owner goes, a client takes its place.
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
//! | module | what it is |
//! |---|---|
//! | `wire` | the messages |
//! | `server` | the owner's side: sessions, and what each client holds |
//! | `remote` | the client's side: a [`Catalog`] over a socket |
//! | `guard` | marks on the volumes that outlive a killed client for as long as its writes do |
//!
//! Promises:
//! - two owners of one store cannot be: an owner holds the volumes' locks from before it reads them until its last write is over;
//! - what a client was given to write to is given to nobody else before that client's last write is over, whoever owns the
//!   store meanwhile;
//! - a client whose owner goes misses at once and refuses puts, until it has found or become another one; what was
//!   acknowledged is there then.
//!
//! Does not: share reads between clients, or protect the store from a client that writes where it was not told to: all of
//! them run as one user, who owns the volumes.

mod remote;
mod server;
mod wire;

pub(crate) mod guard;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_format::{Namespace, PageKey};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::api::{
    GetPage, GetStatus, LentPage, MissReason, NamespaceId, OpenOptions, PageStore, PutOptions,
    PutPage, PutStatus, Refusal, Stats,
};
use crate::catalog::Catalog;
use crate::core::NAMESPACES_MAX;
use crate::disk::DiskOptions;
use crate::disk::probe::open_disk;
use crate::error::StoreError;
use crate::store::{DataPath, Store};
use crate::volume::{Access, Volumes};
use remote::{ReachError, Remote};
use server::Server;
pub use server::socket_path;
pub use wire::Report;

/// How long a process that attaches tries to find or become the owner.
const ATTACH_PATIENCE: Duration = Duration::from_secs(10);

/// Pause between two tries.
const TRY_AGAIN: Duration = Duration::from_millis(20);

/// How a store is attached to.
#[derive(Clone, Debug, Default)]
pub struct AttachOptions {
    /// How this process opens it, as owner or as client. `read_only` is refused: a reader needs no owner.
    pub open: OpenOptions,
    /// A group whose members may be clients, besides the owner of the store's first volume.
    pub group: Option<u32>,
}

/// What this process is to the store at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// It decides.
    Owner,
    /// It asks the owner.
    Client,
    /// The owner has gone and another one is not found yet: everything misses.
    Nobody,
}

/// A store that several processes use at once. See the [module](self).
///
/// Dropping it without [`PageStore::close`] is safe: for the store it is as if the process had been killed.
pub struct SharedStore {
    inner: Arc<Inner>,
    minder: Mutex<Option<JoinHandle<()>>>,
}

struct Inner {
    path: PathBuf,
    options: AttachOptions,
    /// Read-held by every call, so that a change of role finds none under way.
    role: RwLock<Role>,
    /// Times that the role has changed.
    turns: AtomicU64,
    /// The namespaces that were named, by the id given out; owners number them as they like.
    spaces: Mutex<Vec<Namespace>>,
    stop: Mutex<bool>,
    stopped: Condvar,
}

enum Role {
    Owner(Box<Owner>),
    Client(Arc<Client>),
    Nobody,
    Closed,
}

struct Owner {
    /// Before the store, so that no request comes in once it is closed.
    server: Server,
    store: Arc<Store>,
    ids: Ids,
}

struct Client {
    remote: Arc<Remote>,
    data: DataPath,
    ids: Ids,
}

/// By id given out: the present owner's id.
#[derive(Default)]
struct Ids(Mutex<Vec<Option<NamespaceId>>>);

impl Ids {
    fn get(&self, id: NamespaceId) -> Option<NamespaceId> {
        self.0.lock().get(usize::from(id.0)).copied().flatten()
    }

    fn set(&self, id: NamespaceId, owners: NamespaceId) {
        let mut ids = self.0.lock();
        let at = usize::from(id.0);
        if ids.len() <= at {
            ids.resize(at + 1, None);
        }
        ids[at] = Some(owners);
    }
}

/// Why neither a client nor an owner could be made just now.
enum NotYet {
    /// Another try may do.
    TryAgain(StoreError),
    /// It will not.
    Never(StoreError),
}

impl Store {
    /// Attaches to the store at `path`, which other processes may use too: as its owner if nobody is, else as a client of the
    /// owner. See [`share`](self).
    ///
    /// # Errors
    /// Those of [`Store::open`]; [`StoreError::Locked`] when a process that serves no catalog holds the store.
    pub fn attach(path: &Path, options: AttachOptions) -> Result<SharedStore, StoreError> {
        if options.open.read_only {
            return Err(StoreError::Usage(
                "a read-only handle needs no owner: open the store read-only instead".to_owned(),
            ));
        }
        let until = Instant::now() + ATTACH_PATIENCE;
        let role = loop {
            match find_role(path, &options) {
                Ok(role) => break role,
                Err(NotYet::TryAgain(_)) if Instant::now() < until => {
                    std::thread::sleep(TRY_AGAIN);
                }
                Err(NotYet::TryAgain(error) | NotYet::Never(error)) => return Err(error),
            }
        };
        let inner = Arc::new(Inner {
            path: path.to_owned(),
            options,
            role: RwLock::new(role),
            turns: AtomicU64::new(0),
            spaces: Mutex::default(),
            stop: Mutex::new(false),
            stopped: Condvar::new(),
        });
        let minder = std::thread::Builder::new()
            .name("larder-minder".to_owned())
            .spawn({
                let inner = inner.clone();
                move || inner.mind()
            })
            .map_err(|e| StoreError::io("starting a thread", path, e))?;
        Ok(SharedStore {
            inner,
            minder: Mutex::new(Some(minder)),
        })
    }
}

/// Asks a running owner what it is doing.
///
/// # Errors
/// [`StoreError::NotServed`] when nobody serves the store's catalog.
pub fn report(path: &Path) -> Result<Report, StoreError> {
    let (remote, _) = Remote::reach(path).map_err(|error| not_served(path, &error))?;
    let report = remote.report();
    remote.hang_up();
    report.map_err(|_| StoreError::OwnerGone)
}

fn not_served(path: &Path, error: &ReachError) -> StoreError {
    StoreError::NotServed {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

fn find_role(path: &Path, options: &AttachOptions) -> Result<Role, NotYet> {
    match Client::reach(path, &options.open) {
        Ok(client) => return Ok(Role::Client(Arc::new(client))),
        Err(Unreached::Nobody) => {}
        Err(Unreached::Failed(error)) => return Err(error),
    }
    let store = Store::open_at_once(path, &options.open).map_err(|error| match error {
        StoreError::Locked { .. } | StoreError::ClientsWriting(_) => NotYet::TryAgain(error),
        error => NotYet::Never(error),
    })?;
    let store = Arc::new(store);
    let server = Server::start(store.clone(), path, options.group).map_err(NotYet::Never)?;
    Ok(Role::Owner(Box::new(Owner {
        server,
        store,
        ids: Ids::default(),
    })))
}

/// Why there is no client.
enum Unreached {
    Nobody,
    Failed(NotYet),
}

impl Client {
    fn reach(path: &Path, options: &OpenOptions) -> Result<Client, Unreached> {
        let (remote, welcome) = Remote::reach(path).map_err(|error| match error {
            ReachError::Nobody(_) => Unreached::Nobody,
            error => Unreached::Failed(NotYet::Never(not_served(path, &error))),
        })?;
        let never = |error| Unreached::Failed(NotYet::Never(error));
        let gone = |_| Unreached::Failed(NotYet::TryAgain(StoreError::OwnerGone));
        let places: Vec<PathBuf> = welcome
            .volumes
            .iter()
            .filter_map(|(path, _)| path.as_ref().map(PathBuf::from))
            .collect();
        let some_lost = welcome.volumes.iter().any(|(path, _)| path.is_none());
        let volumes = Volumes::open(path, &places, Access::Client, some_lost).map_err(never)?;
        if *volumes.superblock().store.as_bytes() != welcome.store {
            return Err(gone(remote::Gone));
        }
        for (_, volume) in volumes.present() {
            guard::mark(&volume.file, remote.client().0).map_err(|error| {
                never(StoreError::io("marking the volume", &volume.path, error))
            })?;
        }
        remote.marked().map_err(gone)?;
        let disk = open_disk(
            DiskOptions {
                files: volumes
                    .list
                    .into_iter()
                    .map(|volume| volume.map(|volume| volume.file))
                    .collect(),
                depth: options.depth.max(1),
            },
            options.disk,
        )
        .map_err(|error| never(error.into()))?;
        Ok(Client {
            remote: Arc::new(remote),
            data: DataPath::new(disk, welcome.volumes.len(), options.hang_limit),
            ids: Ids::default(),
        })
    }
}

impl Inner {
    /// Sees to it that there is an owner, for as long as the handle is open.
    fn mind(&self) {
        loop {
            let client = match &*self.role.read() {
                Role::Client(client) => Some(client.clone()),
                Role::Closed => return,
                Role::Owner(_) | Role::Nobody => None,
            };
            let had_client = client.is_some();
            if let Some(client) = client {
                client.remote.outlive_owner();
            }
            if had_client {
                self.lose_owner();
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
            match find_role(&self.path, &self.options) {
                Ok(role) => {
                    *self.role.write() = role;
                    self.turns.fetch_add(1, Ordering::AcqRel);
                }
                Err(NotYet::TryAgain(_)) => self.pause(),
                Err(NotYet::Never(error)) => {
                    tracing::warn!(%error, "the store has no owner, and this process cannot be it; trying again");
                    self.pause();
                }
            }
        }
    }

    /// The owner has gone. Waits for the calls under way, which end as soon as the device lets them, and gives up the volumes,
    /// so that another owner can have them.
    fn lose_owner(&self) {
        let mut role = self.role.write();
        if matches!(*role, Role::Client(_)) {
            *role = Role::Nobody;
            self.turns.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn is_stopped(&self) -> bool {
        *self.stop.lock()
    }

    fn pause(&self) {
        let mut stop = self.stop.lock();
        if !*stop {
            self.stopped.wait_for(&mut stop, TRY_AGAIN);
        }
    }

    /// Calls `work` with whoever decides, what moves the bytes, and that owner's id for the namespace.
    fn with<R>(
        &self,
        namespace: NamespaceId,
        owner: impl FnOnce(&Store, NamespaceId) -> R,
        client: impl FnOnce(&Client, NamespaceId) -> R,
    ) -> Option<R> {
        let role = self.role.read();
        match &*role {
            Role::Owner(own) => {
                let id = self.resolve(&own.ids, namespace, |space| own.store.namespace(space))?;
                Some(owner(&own.store, id))
            }
            Role::Client(remote) => {
                if remote.remote.is_lost() {
                    return None;
                }
                let id = self.resolve(&remote.ids, namespace, |space| {
                    remote.remote.namespace(space)
                })?;
                Some(client(remote, id))
            }
            Role::Nobody | Role::Closed => None,
        }
    }

    fn resolve(
        &self,
        ids: &Ids,
        namespace: NamespaceId,
        name: impl FnOnce(&Namespace) -> Result<NamespaceId, StoreError>,
    ) -> Option<NamespaceId> {
        if let Some(id) = ids.get(namespace) {
            return Some(id);
        }
        let space = self.spaces.lock().get(usize::from(namespace.0)).cloned()?;
        let id = name(&space).ok()?;
        ids.set(namespace, id);
        Some(id)
    }

    fn unavailable(&self) -> StoreError {
        if matches!(*self.role.read(), Role::Closed) {
            StoreError::Closed
        } else {
            StoreError::OwnerGone
        }
    }
}

impl SharedStore {
    /// What this process is to the store at the moment.
    #[must_use]
    pub fn part(&self) -> Part {
        match &*self.inner.role.read() {
            Role::Owner(_) => Part::Owner,
            Role::Client(client) if !client.remote.is_lost() => Part::Client,
            _ => Part::Nobody,
        }
    }

    /// How often what this process is to the store has changed. A call that missed while this, or [`part`](Self::part), told of a
    /// change is worth making again: it may have missed for want of an owner.
    #[must_use]
    pub fn turns(&self) -> u64 {
        self.inner.turns.load(Ordering::Acquire)
    }

    /// What the owner is doing.
    ///
    /// # Errors
    /// When there is none.
    pub fn report(&self) -> Result<Report, StoreError> {
        match &*self.inner.role.read() {
            Role::Owner(owner) => Ok(owner.server.report()),
            Role::Client(client) => client.remote.report().map_err(|_| StoreError::OwnerGone),
            Role::Nobody => Err(StoreError::OwnerGone),
            Role::Closed => Err(StoreError::Closed),
        }
    }
}

impl PageStore for SharedStore {
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, StoreError> {
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
        // Without an owner it is named as soon as there is one.
        self.inner.with(id, |_, _| (), |_, _| ());
        Ok(id)
    }

    fn put(
        &self,
        namespace: NamespaceId,
        pages: &[PutPage<'_>],
        options: PutOptions,
    ) -> Vec<PutStatus> {
        self.inner
            .with(
                namespace,
                |store, id| store.put(id, pages, options),
                |client, id| client.data.put(&*client.remote, id, pages, options),
            )
            .unwrap_or_else(|| vec![PutStatus::Refused(Refusal::Closed); pages.len()])
    }

    fn get(
        &self,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
    ) -> Vec<GetStatus> {
        let role = self.inner.role.read();
        let count = pages.len();
        let found = match &*role {
            Role::Owner(own) => self
                .inner
                .resolve(&own.ids, namespace, |space| own.store.namespace(space))
                .map(|id| own.store.get(id, pages, deadline)),
            Role::Client(client) if !client.remote.is_lost() => self
                .inner
                .resolve(&client.ids, namespace, |space| {
                    client.remote.namespace(space)
                })
                .map(|id| client.data.get(&*client.remote, id, pages, deadline)),
            _ => None,
        };
        found.unwrap_or_else(|| vec![GetStatus::Miss(MissReason::Closed); count])
    }

    fn get_lent(
        &self,
        namespace: NamespaceId,
        keys: &[PageKey],
        deadline: Option<Instant>,
    ) -> Vec<Result<LentPage, MissReason>> {
        self.inner
            .with(
                namespace,
                |store, id| store.get_lent(id, keys, deadline),
                |client, id| {
                    let catalog: Arc<dyn Catalog> = client.remote.clone();
                    client.data.get_lent(&catalog, id, keys, deadline)
                },
            )
            .unwrap_or_else(|| keys.iter().map(|_| Err(MissReason::Closed)).collect())
    }

    fn longest_prefix(&self, namespace: NamespaceId, keys: &[PageKey]) -> usize {
        self.inner
            .with(
                namespace,
                |store, id| store.longest_prefix(id, keys),
                |client, id| client.remote.longest_prefix(id, keys),
            )
            .unwrap_or(0)
    }

    fn contains(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool> {
        self.inner
            .with(
                namespace,
                |store, id| store.contains(id, keys),
                |client, id| client.remote.contains(id, keys),
            )
            .unwrap_or_else(|| vec![false; keys.len()])
    }

    fn touch(&self, namespace: NamespaceId, keys: &[PageKey]) {
        self.inner.with(
            namespace,
            |store, id| store.touch(id, keys),
            |client, id| client.remote.touch(id, keys),
        );
    }

    fn delete(&self, namespace: NamespaceId, keys: &[PageKey]) -> Result<u64, StoreError> {
        self.inner
            .with(
                namespace,
                |store, id| store.delete(id, keys),
                |client, id| client.remote.delete(id, keys),
            )
            .unwrap_or_else(|| Err(self.inner.unavailable()))
    }

    fn clear_namespace(&self, namespace: NamespaceId) -> Result<u64, StoreError> {
        self.inner
            .with(namespace, PageStore::clear_namespace, |client, id| {
                client.remote.clear_namespace(id)
            })
            .unwrap_or_else(|| Err(self.inner.unavailable()))
    }

    fn flush(&self) -> Result<(), StoreError> {
        match &*self.inner.role.read() {
            Role::Owner(owner) => owner.store.flush(),
            Role::Client(client) => client.remote.flush(),
            Role::Nobody => Err(StoreError::OwnerGone),
            Role::Closed => Err(StoreError::Closed),
        }
    }

    /// With the disk that this process has at the moment: memory registered once may be used plain after a change of owner.
    fn register(&self, memory: &'static mut [u8]) -> (&'static mut [u8], String) {
        match &*self.inner.role.read() {
            Role::Owner(owner) => owner.store.register(memory),
            Role::Client(client) => client.data.register(memory),
            Role::Nobody | Role::Closed => (
                memory,
                "not registered: the store has no owner at the moment".to_owned(),
            ),
        }
    }

    /// The owner's, with this process's own hits, misses and bytes read.
    fn stats(&self) -> Stats {
        match &*self.inner.role.read() {
            Role::Owner(owner) => owner.store.stats(),
            Role::Client(client) => {
                let mut stats = client.remote.stats();
                client.data.count_into(&mut stats);
                stats
            }
            Role::Nobody | Role::Closed => Stats::default(),
        }
    }

    /// A client flushes and leaves; an owner sends its clients away and closes the store.
    fn close(&self) -> Result<(), StoreError> {
        *self.inner.stop.lock() = true;
        self.inner.stopped.notify_all();
        let flushed = match &*self.inner.role.read() {
            Role::Client(client) if !client.remote.is_lost() => {
                let flushed = client.remote.flush();
                client.remote.hang_up();
                flushed
            }
            _ => Ok(()),
        };
        if let Some(minder) = self.minder.lock().take() {
            let _ = minder.join();
        }
        let role = std::mem::replace(&mut *self.inner.role.write(), Role::Closed);
        match role {
            Role::Owner(mut owner) => {
                owner.server.stop();
                owner.store.close()
            }
            _ => flushed,
        }
    }
}

impl Drop for SharedStore {
    fn drop(&mut self) {
        *self.inner.stop.lock() = true;
        self.inner.stopped.notify_all();
        if let Role::Client(client) = &*self.inner.role.read() {
            client.remote.hang_up();
        }
        if let Some(minder) = self.minder.lock().take() {
            let _ = minder.join();
        }
    }
}
