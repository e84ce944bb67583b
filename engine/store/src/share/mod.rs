//! One store, many processes.
//!
//! The first process that attaches to a store becomes its *owner*: it holds the lock, decides, and
//! serves its catalog on a socket beside the store (`PATH.sock`). The others are *clients*: they
//! ask the owner for the locations of pages and for extents to write to. They move and verify page
//! data themselves. When the owner goes, a client takes its place.
//!
//! ```text
//!   client                                 owner                             volumes
//!  +------------+  lookup, pin, reserve,  +------------------------+
//!  | Store      | ----------------------> | Store                  |
//!  |   remote   |  commit, wait           |   server -> LocalStore | ---> descriptors,
//!  |   own disk |                         |               its disk |      headers, syncs
//!  +------------+                         +------------------------+
//!        |          page data, straight between                              ^
//!        +-------------------------------------------------------------------+
//! ```
//!
//! | module | content |
//! |---|---|
//! | `monitor` | the thread that keeps a role: takes over when the owner goes |
//! | `handle` | the calls of a handle, to the owner of the moment |
//! | `arrivals` | a handle's reads of pages that are on their way from beneath the store |
//! | `spaces` | the namespaces of a handle |
//! | `emptier` | a connection to an owner that empties segments, for a compaction |
//! | `tape` | a connection to an owner that records the traffic |
//! | `quotas` | the quotas of namespaces |
//! | `erasure` | the erasure of a tenant |
//! | `books` | leases with a count, lists of pages, evictions, usage |
//! | `role` | the role of a process, owner or client, and how the process gets it |
//! | `server` | the owner's side: sessions, and the resources that each client holds |
//! | `bell` | wakes the thread of `monitor`, and calls that wait for an owner |
//! | `reach` | the errors of a store whose owner is not reached |
//! | `remote` | the client's side: a `Catalog` over a socket |
//! | `keys`, `pass` | long lists of keys and open files in messages |
//! | `wire` | the messages |
//!
//! Promises:
//! - A store never has two owners. An owner takes the volumes' locks before it reads the volumes,
//!   and holds them until its last write is over.
//! - An extent that was granted to a client is granted again only after that client's last write is
//!   over, even if the owner changes meanwhile.
//! - A client that dies, or stops in the middle of a put, blocks the writes of others for seconds
//!   at most. Its pages fail. The segments that it may still write to stay pinned until it has gone
//!   or resumes. But no process can become the owner while a client of the previous owner is
//!   stopped: the new owner does not know the extents granted to that client.
//! - A client whose owner goes misses at once, until it has found a new owner or become the owner.
//!   All acknowledged pages are there then. A put waits for a new owner as long as it may wait for
//!   room, and is made once more.
//!
//! Several processes may use the pages of one namespace (for example the ranks of a model, if each
//! rank holds the whole cache). Such pages are read from the device once: the first process to ask
//! reads a page into memory that all of them map, and all copy it from there ([`SharedReads`]). A
//! copy is verified after it was made, like a read from the device. So the worst damage that a
//! process can do through that memory, or through the messages about it, is that each other process
//! reads the page itself.
//!
//! Not protected against: a client that writes outside its extents, or forges a page together with
//! its checksum. All processes run as one user, who owns the volumes, or as members of the
//! permitted group.

mod arrivals;
mod bell;
pub mod emptier;
mod handle;
pub mod keys;
mod monitor;
mod pass;
mod quotas;
mod reach;
mod remote;
mod role;
mod server;
mod spaces;
pub mod tape;

mod books;
mod erasure;
pub mod wire;

#[cfg(test)]
pub(crate) mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use larder_base::fork::Origin;
use larder_base::ids::NamespaceId;
use larder_base::runtime::thread::JoinHandle;
use larder_base::runtime::{Instant, Mutex, RwLock, RwLockReadGuard};
use larder_base::system::files;
use larder_base::system::holder::HolderState;
use larder_core::status::{PutStatus, Refusal};
use larder_format::{Namespace, Rank};

use crate::api::{OpenOptions, PageStore, PutOptions, PutPage, Recall, Settings, SharedReads};
use crate::catalog::Catalog;
use crate::error::{StoreError, io_error};
use crate::inventory::{self, Space};
use crate::protocol::Protocol;
use crate::store::LocalStore;
use crate::totals::Totals;
#[cfg(not(feature = "simulated"))]
use crate::volume::create::{CreateOptions, create};
use bell::{Bell, Wish};
pub use erasure::{erase_tenant, is_encrypted};
pub use quotas::change_quotas;
use reach::not_served;
use remote::Remote;
use role::{Decider, Known, NotYet, Owner, Role};
pub use server::answer;
pub use server::ledger;
use spaces::Spaces;
pub use wire::{
    AnsweringVolume, DamagedVolume, DisplacedVolume, EndedClient, Erasure, Keyholder, Report,
    StoppedClient, VolumeDamage, VolumeState,
};
use wire::{Reply, Request};

/// How long an attaching process tries to find or become the owner. While another process is
/// opening the store, which takes a second for some millions of pages, the second limit applies.
const ATTACH_PATIENCE: Duration = Duration::from_secs(10);
const OPENING_PATIENCE: Duration = Duration::from_secs(120);

/// Time before the first warning about the retries.
const WARN_AFTER: Duration = Duration::from_secs(3);

/// Status of a put whose owner has gone.
const LEFT_UNDONE: PutStatus = PutStatus::Refused(Refusal::Closed);

/// Pause between two tries. While there is no owner it grows by an eighth each time, up to the
/// maximum, which it reaches after about ten seconds.
const TRY_AGAIN: Duration = Duration::from_millis(20);

/// The present role of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Part {
    /// This process decides.
    Owner,
    /// This process asks the owner.
    Client,
    /// The owner has gone and no new owner is found yet: everything misses.
    Nobody,
}

/// An open store: for this process alone ([`Store::open`]), or for several processes at once
/// ([`Store::attach`]). Dropping it without [`PageStore::close`] is safe: for the store it is as if
/// the process had been killed.
///
pub struct Store {
    inner: Arc<Inner>,
    monitor: Mutex<Option<JoinHandle<()>>>,
}

struct Inner {
    path: PathBuf,
    options: OpenOptions,
    /// Every call holds the read lock, so that no call is in progress when the role changes.
    role: RwLock<Role>,
    /// Number of role changes.
    turns: AtomicU64,
    /// The settings of the last owner that this process was a client of.
    seen: Mutex<Option<Settings>>,
    /// The registered namespaces, by the id that this handle gave out. Each owner numbers them in
    /// its own way.
    spaces: Mutex<Spaces>,
    bell: Arc<Bell>,
    origin: Origin,
}

impl Store {
    /// Opens the store whose first volume is at `path`, for this process alone. If another process
    /// holds it, waits up to 2 seconds for the end of that process.
    ///
    /// # Errors
    /// See [`StoreError`]: each error names the fault, its place, and the remedy.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Store, StoreError> {
        let store = LocalStore::open(path, &options)?;
        let role = Role::Owner(Box::new(Owner::alone(store)));
        Ok(Store {
            inner: Arc::new(Inner::new(path, options, role, Arc::new(Bell::new()))),
            monitor: Mutex::new(None),
        })
    }

    /// As [`Store::open`]; creates the store first if there is none at `path`.
    ///
    /// # Errors
    /// Those of [`create`] and [`Store::open`].
    #[cfg(not(feature = "simulated"))]
    pub fn open_or_create(
        path: &Path,
        create_options: &CreateOptions<'_>,
        options: OpenOptions,
    ) -> Result<Store, StoreError> {
        match create(path, create_options) {
            Ok(_) | Err(StoreError::Exists(_) | StoreError::Locked { .. }) => {
                Store::open(path, options)
            }
            Err(error) => Err(error),
        }
    }

    /// Attaches to the store at `path`, which other processes may use too. Becomes its owner if it
    /// has none, else a client of the owner. When the owner goes, a client takes its place.
    ///
    /// All processes run as one user, who owns the volumes, or as members of
    /// [`OpenOptions::group`].
    ///
    /// # Errors
    /// The errors of [`Store::open`]; [`StoreError::Locked`] when a process that serves no catalog
    /// holds the store.
    pub fn attach(path: &Path, options: OpenOptions) -> Result<Store, StoreError> {
        if options.read_only {
            return Err(StoreError::Usage(
                "a read-only handle needs no owner: open the store read-only instead".to_owned(),
            ));
        }
        // The process may change its working directory, and looks for owners again later.
        let path = &files::absolute(path);
        let options = options.with(|o| {
            o.volumes = o.volumes.iter().map(|it| files::absolute(it)).collect();
        });
        let begun = Instant::now();
        let mut has_warned = false;
        let bell = Arc::new(Bell::new());
        let wish = Wish {
            group: options.group,
            former: &Totals::default(),
            bell: &bell,
            may_own: true,
        };
        let role = loop {
            match Role::find(path, &options, &wish) {
                Ok(role) => break role,
                Err(NotYet::TryAgain(error)) if begun.elapsed() < patience_with(&error) => {
                    if begun.elapsed() >= WARN_AFTER && !std::mem::replace(&mut has_warned, true) {
                        tracing::warn!(
                            "{error}; trying again for up to {} s",
                            patience_with(&error).as_secs()
                        );
                    }
                    larder_base::runtime::thread::sleep(TRY_AGAIN);
                }
                Err(NotYet::TryAgain(error) | NotYet::Never(error)) => return Err(error),
            }
        };
        let inner = Arc::new(Inner::new(path, options, role, bell));
        inner.compare_settings(&inner.role.read());
        let monitor = larder_base::runtime::thread::Builder::new()
            .name("larder-minder".to_owned())
            .spawn({
                let inner = inner.clone();
                move || inner.monitor_role()
            })
            .map_err(|e| io_error("starting a thread", path, e))?;
        Ok(Store {
            inner,
            monitor: Mutex::new(Some(monitor)),
        })
    }
}

/// An owner's report, and the namespaces of its store.
#[derive(Clone, Debug)]
pub struct View {
    /// Its report.
    pub report: Report,
    /// The namespaces with pages, those with the most bytes first. Empty if the owner's release
    /// does not tell.
    pub spaces: Vec<Space>,
}

/// Asks a running owner for its report and its namespaces.
///
/// # Errors
/// Those of [`report`].
pub fn view(path: &Path) -> Result<View, StoreError> {
    let remote = reach(path)?;
    let report = report_of(path, &remote);
    let spaces = inventory::spaces(&remote);
    remote.hang_up();
    Ok(View {
        report: report?,
        spaces: match spaces {
            Err(StoreError::OwnerOlder) => Vec::new(),
            spaces => spaces?,
        },
    })
}

/// Asks a running owner for its report.
///
/// # Errors
/// [`StoreError::NotServed`] when the store has no owner, [`StoreError::ServesAnother`] when the
/// process on its socket is the owner of another store, [`StoreError::Locked`] when its owner has
/// no socket, [`StoreError::Denied`] and [`StoreError::Unanswered`] when its owner does not serve
/// this process, [`StoreError::NotUnderstood`] when its owner is of another release.
pub fn report(path: &Path) -> Result<Report, StoreError> {
    let remote = reach(path)?;
    let report = report_of(path, &remote);
    remote.hang_up();
    report
}

/// The report of the process on the socket of the store at `path`.
///
/// The file at the path is not read unless the owner states that its own file is displaced: the
/// device may hang, and a report must not.
fn report_of(path: &Path, remote: &Remote) -> Result<Report, StoreError> {
    let report = remote.report().map_err(|_| StoreError::OwnerGone)?;
    if !report.displaced_volumes.is_empty() {
        remote
            .check_store()
            .map_err(|error| not_served(path, &error))?;
    }
    Ok(report)
}

/// Ends or resumes the work of the place beneath a store, in the process that owns the store. It
/// lasts as long as that process owns the store. False if nothing lies beneath.
///
/// # Errors
/// Those of [`report`], and [`StoreError::OwnerOlder`] when the owner's release cannot.
pub fn use_beneath(path: &Path, is_used: bool) -> Result<bool, StoreError> {
    let remote = reach_own(path)?;
    let answer = remote.ask(&Request::UseBeneath { is_used });
    remote.hang_up();
    match answer {
        Ok(Reply::Count(places)) => Ok(places > 0),
        Ok(Reply::Failed(failure)) => Err(failure.into()),
        Ok(_) | Err(_) => Err(StoreError::OwnerGone),
    }
}

/// Connects to the owner of the store at `path`, to have it work: not to the owner of another
/// store.
fn reach_own(path: &Path) -> Result<Remote, StoreError> {
    let remote = reach(path)?;
    match remote.check_store() {
        Ok(()) => Ok(remote),
        Err(error) => {
            remote.hang_up();
            Err(not_served(path, &error))
        }
    }
}

/// Connects to the process on the socket of the store at `path`.
fn reach(path: &Path) -> Result<Remote, StoreError> {
    let reach = || Remote::reach(path, &Protocol::default());
    let reached = match reach().map_err(|error| not_served(path, &error)) {
        // The owner bound its socket in between.
        Err(StoreError::Locked {
            is_unserved: false, ..
        }) => reach().map_err(|error| not_served(path, &error)),
        reached => reached,
    };
    reached.map(|(remote, _)| remote)
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

impl Inner {
    fn new(path: &Path, options: OpenOptions, role: Role, bell: Arc<Bell>) -> Inner {
        Inner {
            path: path.to_owned(),
            options,
            role: RwLock::new(role),
            turns: AtomicU64::new(0),
            seen: Mutex::default(),
            spaces: Mutex::default(),
            bell,
            origin: Origin::here(),
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

    /// The store, if it was opened for this process alone. It stays in place when it is closed.
    fn store_of_its_own(&self) -> Option<Arc<LocalStore>> {
        match self.role().as_deref() {
            Some(Role::Owner(owner)) if owner.service.is_none() => Some(owner.store.clone()),
            _ => None,
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
        recall: Option<&Recall>,
    ) -> Vec<PutStatus> {
        self.with(namespace, |decider, space| match decider {
            Decider::Owner(own) => own.store.put_recallable(space.id, pages, options, recall),
            Decider::Client(client) => {
                client.counted(|remote, data| match remote.give_key(space.id, options) {
                    Ok(()) => data.put(&**remote, space.id, pages, options, recall),
                    Err(why) => vec![PutStatus::Refused(why); pages.len()],
                })
            }
        })
        .unwrap_or_else(|| vec![LEFT_UNDONE; pages.len()])
    }

    fn resolve(&self, decider: Decider<'_>, namespace: NamespaceId) -> Result<Known, StoreError> {
        if let Some(known) = decider.ids().get(namespace) {
            return Ok(known);
        }
        let space = self.spaces.lock().get(namespace);
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
        match self.options.shared_reads {
            SharedReads::Auto => namespace.fields().tp == Rank::ALONE,
            SharedReads::On => true,
            SharedReads::Off => false,
        }
    }

    fn unavailable(&self) -> StoreError {
        if self.origin.is_inherited() {
            StoreError::Forked
        } else if self.bell.is_stopped() {
            StoreError::Closed
        } else {
            StoreError::OwnerGone
        }
    }
}

impl Store {
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
        let has_none = || self.part() == Part::Nobody;
        self.inner.bell.wait_while(until, has_none);
    }

    /// Makes a call, which gets its former result. As long as it falls short because its owner
    /// has gone, repeats it with the next owner, if there is one by `until`.
    pub fn steadily<R>(
        &self,
        until: Instant,
        fell_short: impl Fn(&R) -> bool,
        mut call: impl FnMut(Option<R>) -> R,
    ) -> R {
        let mut former = None;
        loop {
            let turns = self.turns();
            let result = call(former);
            if !fell_short(&result) || self.turns() == turns && self.part() != Part::Nobody {
                return result;
            }
            self.wait_for_owner(until);
            if self.part() == Part::Nobody || Instant::now() >= until {
                return result;
            }
            former = Some(result);
        }
    }

    /// A namespace by its name in the store; `None` as long as no process owns the store.
    #[doc(hidden)]
    #[must_use]
    pub fn named(&self, id: NamespaceId) -> Option<Namespace> {
        let namespace = self.inner.spaces.lock().get(id)?;
        let shape = self.inner.with(id, |decider, space| match decider {
            Decider::Owner(owner) => owner.store.catalog().shape(space.id),
            Decider::Client(client) => client.remote.shape(space.id),
        });
        shape
            .flatten()
            .map(|shape| namespace.named(shape.fingerprint))
    }

    /// The namespaces with full records in the store; none in a client.
    #[must_use]
    pub fn namespaces(&self) -> Vec<Namespace> {
        let owned = self.local();
        owned.map_or_else(Vec::new, |store| store.namespaces())
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
    /// When there is no owner, or the store was not attached to.
    pub fn report(&self) -> Result<Report, StoreError> {
        match self.inner.role().as_deref() {
            Some(Role::Owner(owner)) => match &owner.service {
                Some(service) => Ok(service.server.report()),
                None => Err(StoreError::NotServed {
                    path: self.inner.path.clone(),
                    reason: "it is open for this process alone".to_owned(),
                }),
            },
            Some(Role::Client(client)) => client.remote.report().map_err(|_| StoreError::OwnerGone),
            Some(Role::Nobody | Role::Closed) | None => Err(self.inner.unavailable()),
        }
    }
}

/// The inside of a store, for simulation, fuzzing and tests. The face has no name for it.
pub trait Inside {
    /// The store of an owner. `None` in another process, and while the role changes.
    fn local(&self) -> Option<Arc<LocalStore>>;

    /// The disk of this process; `None` while the store has no owner.
    fn disk(&self) -> Option<Arc<dyn larder_disk::Disk>>;

    /// The bytes of the memory for shared reads; empty without it, and in another process than the
    /// owner.
    #[cfg(any(test, feature = "simulated"))]
    fn staged(&self) -> Vec<u8>;

    /// The slots of the keys that a client has. `None` while they change, and for other processes.
    #[cfg(any(test, feature = "simulated"))]
    fn lent(&self) -> Option<Vec<std::num::NonZeroU16>>;
}

impl Inside for Store {
    fn local(&self) -> Option<Arc<LocalStore>> {
        match self.inner.role().as_deref() {
            Some(Role::Owner(owner)) => Some(owner.store.clone()),
            _ => None,
        }
    }

    fn disk(&self) -> Option<Arc<dyn larder_disk::Disk>> {
        match self.inner.role().as_deref()? {
            Role::Owner(owner) => Some(owner.store.data.disk.clone()),
            Role::Client(client) => Some(client.data.disk.clone()),
            Role::Nobody | Role::Closed => None,
        }
    }

    #[cfg(any(test, feature = "simulated"))]
    fn staged(&self) -> Vec<u8> {
        match self.inner.role().as_deref() {
            Some(Role::Owner(owner)) => {
                let service = owner.service.as_ref();
                service.map_or_else(Vec::new, |service| service.server.staged())
            }
            _ => Vec::new(),
        }
    }

    #[cfg(any(test, feature = "simulated"))]
    fn lent(&self) -> Option<Vec<std::num::NonZeroU16>> {
        match self.inner.role().as_deref()? {
            Role::Client(client) => client.remote.lent(),
            _ => None,
        }
    }
}
