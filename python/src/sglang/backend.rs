//! The storage backend: SGLang's policy over a [`Handle`].
//!
//! Guarantees to SGLang:
//! - a page is either read completely and correctly, or it is a miss; there is no other failure;
//! - `true` for a page to store means that nothing is left to do for it: stored, stored before, or
//!   deliberately not stored because there is no room. SGLang abandons the rest of a node at the
//!   first `false`, so `false` is returned only for pages that really failed;
//! - if there is no room, the tail of a chain is left out, never its head, and later calls leave
//!   out the pages that follow;
//! - a call starts no reads or writes after the configured time. A call that starts after
//!   [`Backend::close`] has begun touches no pool, and `close` returns whether all earlier calls
//!   are over.
//!
//! A module imports only those below it, and this one:
//!
//! | module | contents |
//! |---|---|
//! | `lookup` | lookups |
//! | `read` | reading pages |
//! | `write` | storing pages |
//! | `worth` | found pages that are computed faster than read |
//! | `retry` | later attempts to attach to a store, for a server started without one |
//! | `clear` | deletion of the pages of this server, including deferred deletion |
//! | `pools` | the pools of this server |
//! | `registered` | one of them: its memory, and its namespace |
//!
//! Threads: every call may come from any thread at any time. SGLang has one thread each for
//! lookups, reads and writes.

mod clear;
mod lookup;
mod pools;
mod read;
mod registered;
mod retry;
#[cfg(test)]
mod tests;
mod worth;
mod write;

use std::collections::HashMap;
use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use larder_base::fork::Origin;
use larder_base::seldom::Seldom;
use larder_engine::{Part, Settings, Stats, SyncPolicy};
use larder_handle::config::{Config, OnError, Transfer};
use larder_handle::place::{self, Misfit, PlaceError};
use larder_handle::store::{Handle, Patience, Space};
use larder_sync::{Mutex, RwLock, RwLockReadGuard};

use crate::sglang::bounce::Arena;
use crate::sglang::explained::Explained;
use crate::sglang::meters::{Count, Meters};
use crate::sglang::space::Server;
use crate::sglang::trial::Way;
use crate::worth::Worth;

pub use lookup::Request;
pub use pools::RegisterError;
pub use registered::Memory;
use registered::Registered;

/// How long a close waits for running calls, which may take eight seconds, and for the store.
const CLOSE_PATIENCE: Duration = Duration::from_secs(16);

/// The state of the store in a backend.
enum Place {
    /// Not created yet. It is created once the pools are known, because its segment size depends on
    /// the page size.
    Unmade,
    /// No store was available at start-up.
    Empty,
    Attached(Arc<Handle>),
    /// Closed: calls are over.
    Closed,
}

impl Place {
    fn store(&self) -> Option<&Arc<Handle>> {
        match self {
            Place::Attached(store) => Some(store),
            Place::Unmade | Place::Empty | Place::Closed => None,
        }
    }
}

/// The store, which is not closed while this exists.
struct Attached<'a> {
    // Dropped in this order: the handle that a close takes out is the last one.
    store: Arc<Handle>,
    _stays: RwLockReadGuard<'a, Place>,
}

impl Deref for Attached<'_> {
    type Target = Arc<Handle>;

    fn deref(&self) -> &Arc<Handle> {
        &self.store
    }
}

/// See the module documentation.
pub struct Backend {
    place: RwLock<Place>,
    /// No new call may begin.
    closing: AtomicBool,
    retry: Mutex<Option<retry::Retry>>,
    server: Server,
    config: Config,
    explained: Explained,
    timeout: Duration,
    transfer: Transfer,
    /// With `sync` set to `always`: a present page may be less durable than required, so it is put
    /// again.
    syncs_always: bool,
    pools: RwLock<HashMap<String, Arc<Registered>>>,
    arenas: [Arena; 2],
    meters: Meters,
    /// With `prefill_rate`, on the rank that decides for all of them.
    worth: Option<Worth>,
    debt: clear::Debt,
    /// Limits the log line about refused batches.
    refused_batches: Seldom,
    origin: Origin,
}

impl Backend {
    /// A backend over the store in `config`, with a warning if there is one. If no store is
    /// available and `on_error` allows it, the backend has no store, and everything is a miss until
    /// there is one.
    ///
    /// # Errors
    /// See [`PlaceError`].
    pub fn open(
        config: &Config,
        server: Server,
    ) -> Result<(Arc<Backend>, Option<String>), PlaceError> {
        let attached = match place::is_made(config) {
            Ok(true) => Handle::attach(config, None, true).map(Some),
            Ok(false) => Ok(None),
            Err(error) => Err(error),
        };
        match attached {
            Ok(None) => Ok((Arc::new(Backend::new(Place::Unmade, server, config)), None)),
            Ok(Some(store)) => {
                let remark = store.remarks().first().cloned();
                let backend = Backend::new(Place::Attached(Arc::new(store)), server, config);
                Ok((Arc::new(backend), remark))
            }
            Err(error) if config.on_error == OnError::Fail => Err(error),
            Err(error) => {
                let backend = Arc::new(Backend::new(Place::Empty, server, config));
                Ok((backend.clone(), Some(backend.go_without(&error))))
            }
        }
    }

    /// Creates the store if it does not exist, with segments that suit the pages of the registered
    /// pools, and attaches to it. Returns a warning, if any. Does nothing if the store exists.
    ///
    /// # Errors
    /// See [`PlaceError`]: if `on_error` is `fail`.
    pub fn make(self: &Arc<Self>) -> Result<Option<String>, PlaceError> {
        self.make_or(self.config.on_error)
    }

    fn make_or(self: &Arc<Self>, on_error: OnError) -> Result<Option<String>, PlaceError> {
        let mut place = self.place.write();
        if !matches!(*place, Place::Unmade) {
            return Ok(None);
        }
        match self.attach_for_pools(on_error) {
            Ok(store) => {
                self.enter_all(&store);
                let remark = store.remarks().first().cloned();
                *place = Place::Attached(store);
                Ok(remark)
            }
            Err(error) if on_error == OnError::Fail => Err(error),
            Err(error) => {
                *place = Place::Empty;
                Ok(Some(self.go_without(&error)))
            }
        }
    }

    /// Creates the store for the registered pools and attaches to it. Another server may have
    /// created it earlier, with segments that fit none of these pages.
    fn attach_for_pools(&self, on_error: OnError) -> Result<Arc<Handle>, PlaceError> {
        let store = Arc::new(Handle::attach(&self.config, self.largest_page(), true)?);
        let pools = self.pools.read();
        let misfit = pools.iter().find_map(|(name, pool)| {
            let misfit = pool.misfit(&store)?;
            matches!(misfit, Misfit::Never { .. }).then(|| (name.clone(), misfit))
        });
        match misfit {
            Some((pool, misfit)) if on_error == OnError::Fail => {
                store.close()?;
                Err(PlaceError::Misfit(pool, misfit))
            }
            _ => Ok(store),
        }
    }

    /// Creates the store before the first call, if SGLang has not reported that all pools are
    /// known.
    pub fn make_if_needed(self: &Arc<Self>) {
        if self.is_made() || self.largest_page().is_none() {
            return;
        }
        // Calls never raise: without a store everything is a miss, whatever the value of
        // `on_error`.
        if let Ok(Some(remark)) = self.make_or(OnError::Miss) {
            tracing::warn!("{remark}");
        }
    }

    /// Whether there is a store, or none will be created.
    pub fn is_made(&self) -> bool {
        let place = self.place.try_read();
        !place.is_some_and(|place| matches!(*place, Place::Unmade))
    }

    /// The settings of the store's owner, which apply to all processes; `None` without an owner.
    pub fn settings(&self) -> Option<Settings> {
        self.attached()?.settings()
    }

    /// Whether pages also go to a remote, by the keys of this process or of the store's owner.
    pub fn has_remote(&self) -> bool {
        let is_named = !self.config.l4.urls.is_empty();
        is_named || self.attached().is_some_and(|store| store.has_remote())
    }

    /// Whether the store is encrypted, or will be when it is made. In doubt it is.
    pub fn is_encrypted(&self) -> bool {
        let has_key = self.config.key.is_some();
        has_key || self.attached().is_none_or(|store| store.is_encrypted())
    }

    /// Starts later attempts to attach to a store. Returns the warning about them.
    fn go_without(self: &Arc<Self>, error: &PlaceError) -> String {
        retry::start(self, &self.config);
        format!(
            "serving without a store: all lookups miss until there is one; tried again in \
             {:?} (`on_error` is \"miss\"): {error}",
            self.config.retry
        )
    }

    /// Bytes of the largest page of all pools, on the device; `None` if there is no page.
    fn largest_page(&self) -> Option<u64> {
        let pools = self.pools.read();
        pools.values().filter_map(|pool| pool.stored_bytes()).max()
    }

    /// Registers every pool in the store.
    fn enter_all(&self, store: &Arc<Handle>) {
        for pool in self.pools.read().values() {
            if let Err(error) = pool.enter(store, self.config.quota.as_deref()) {
                tracing::warn!(%error, "{}: its namespace is not registered", pool.described);
            }
            if let Some(misfit) = pool.misfit(store) {
                tracing::warn!("{}: {misfit}", pool.described);
            }
        }
    }

    fn new(place: Place, server: Server, config: &Config) -> Backend {
        // SGLang takes the smallest answer of all ranks, and their clocks differ.
        let decides = server.is_first_rank();
        Backend {
            place: RwLock::new(place),
            closing: AtomicBool::new(false),
            retry: Mutex::default(),
            server,
            config: config.clone(),
            explained: Explained::default(),
            timeout: config.timeout,
            transfer: config.transfer,
            syncs_always: config.sync == SyncPolicy::Always,
            pools: RwLock::default(),
            arenas: [Arena::default(), Arena::default()],
            meters: Meters::default(),
            worth: config.prefill_rate.filter(|_| decides).map(Worth::new),
            debt: clear::Debt::default(),
            refused_batches: Seldom::default(),
            origin: Origin::here(),
        }
    }

    /// Sets the store that has become available. Returns it if the backend no longer needs it.
    fn enter(&self, store: Arc<Handle>) -> Result<(), Arc<Handle>> {
        let mut place = self.place.write();
        if !matches!(*place, Place::Empty) || self.is_closing() {
            return Err(store);
        }
        self.enter_all(&store);
        *place = Place::Attached(store);
        Ok(())
    }

    /// The store. `None` if there is none, or if it is being set or closed at this moment.
    fn attached(&self) -> Option<Attached<'_>> {
        if self.is_closing() {
            return None;
        }
        let place = self.place.try_read()?;
        let store = place.store()?.clone();
        let _stays = place;
        Some(Attached { store, _stays })
    }

    /// Whether this is a forked child of the process that opened the backend.
    pub fn is_inherited(&self) -> bool {
        self.origin.is_inherited()
    }

    /// Whether a close has begun, or this is a forked child of the process that opened the backend.
    /// A child takes no lock.
    pub fn is_closing(&self) -> bool {
        self.is_inherited() || self.closing.load(Ordering::SeqCst)
    }

    /// The store, with an owner. If its owner has just ended, waits for another one.
    fn store(&self) -> Option<Attached<'_>> {
        let store = self.attached()?;
        store.wait_for_owner(Patience::Read(None));
        self.is_clear().then_some(store)
    }

    /// The namespace of a pool in the store. The store is not closed while the guard is held.
    fn space_of<'a>(&self, pool: &'a Registered) -> Option<(Attached<'_>, &'a Space)> {
        let store = self.store()?;
        Some((store, pool.space.get()?))
    }

    fn count_way(&self, way: Way, pages: usize) {
        let count = match way {
            Way::Direct => Count::Direct,
            Way::Bounce => Count::Bounced,
        };
        self.meters.add(count, pages);
    }

    /// The meters of this rank.
    pub fn meters(&self) -> &Meters {
        &self.meters
    }

    /// The store's counters; `None` without a store.
    pub fn stats(&self) -> Option<(Stats, Part)> {
        self.attached().map(|store| (store.stats(), store.part()))
    }

    /// Bytes of memory that this backend holds in addition to the store's index.
    pub fn buffer_bytes(&self) -> usize {
        self.arenas.iter().map(Arena::bytes).sum()
    }

    /// One sentence per pool.
    pub fn describe(&self) -> Vec<String> {
        if self.is_inherited() {
            return Vec::new();
        }
        let pools = self.pools.read();
        let mut lines: Vec<String> = pools
            .values()
            .map(|pool| {
                format!(
                    "{}; reads {}, writes {}",
                    pool.described,
                    pool.gets.describe(),
                    pool.puts.describe()
                )
            })
            .collect();
        lines.sort();
        lines
    }

    /// Waits for running calls and closes the store. Later calls are misses. Idempotent. Returns
    /// whether everything finished in time; otherwise the close continues in the background, and
    /// the store recovers from the end of this process as from any other.
    pub fn close(self: &Arc<Self>) -> bool {
        if self.is_inherited() {
            // This process has no part of it.
            return true;
        }
        let left = self.leave();
        left.is_ok_and(|left| left.recv_timeout(CLOSE_PATIENCE).is_ok())
    }

    /// Starts to close, independent of the caller. The caller may wait on the returned channel
    /// until the close is done.
    ///
    /// # Errors
    /// The thread for it could not be started. Calls are misses nevertheless.
    pub fn leave(self: &Arc<Self>) -> io::Result<Receiver<()>> {
        self.closing.store(true, Ordering::SeqCst);
        self.retry.lock().take();
        let (done, left) = mpsc::channel();
        let backend = self.clone();
        std::thread::Builder::new()
            .name("larder-close".to_owned())
            .spawn(move || {
                // Waits for the running calls.
                let place = std::mem::replace(&mut *backend.place.write(), Place::Closed);
                if let Place::Attached(store) = place
                    && let Err(error) = store.close()
                {
                    tracing::warn!(%error, "the store was not closed cleanly");
                }
                let _ = done.send(());
            })?;
        Ok(left)
    }
}
