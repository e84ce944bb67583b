//! The storage backend: called by SGLang's threads, over a shared store.
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
//! | module | contents |
//! |---|---|
//! | `clear` | deletion of the pages of this server, including deferred deletion |
//! | `read` | reading pages |
//! | `retry` | later attempts to attach to a store, for a server started without one |
//! | `write` | storing pages |
//!
//! Threads: every call may come from any thread at any time. SGLang has one thread each for
//! lookups, reads and writes.

mod clear;
mod read;
mod retry;
#[cfg(test)]
mod tests;
mod write;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use larder_engine::fork::Origin;
use larder_engine::seldom::Seldom;
use larder_engine::share::Part;
use larder_engine::{NamespaceId, PageStore, Settings, Stats, Store, StoreError, SyncPolicy};
use larder_format::{Namespace, PageKey};
use parking_lot::{MappedRwLockReadGuard, Mutex, RwLock, RwLockReadGuard};

use crate::bounce::Arena;
use crate::config::{Config, OnError, Transfer};
use crate::explained::Explained;
use crate::hits::{self, Hits, Policy};
use crate::meters::{Count, Meters};
use crate::place::{self, Attached, Misfit, PlaceError};
use crate::pool::Pool;
use crate::space::{PoolFacts, Server, SpaceError, namespace};
use crate::trial::{Trial, Way};

/// How long a call waits for another owner after the store's owner has ended.
const OWNER_PATIENCE: Duration = Duration::from_secs(1);

/// How long a close waits for running calls, which may take eight seconds, and for the store.
const CLOSE_PATIENCE: Duration = Duration::from_secs(16);

/// Alignment required for direct transfers to the device, in bytes.
const ALIGN: usize = 4096;

/// How this backend accesses the pages of a pool.
pub enum Memory {
    /// By address.
    Mapped(Pool),
    /// Pages are passed in one by one as flat buffers of this length in bytes.
    Flat(usize),
    /// The pool holds no bytes: every page counts as present, and other pools determine the pages
    /// that can be restored (DeepSeek-V4).
    Logical,
}

/// Why a pool cannot be registered.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// It has no valid namespace.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// Its parts are too long.
    #[error("pool {0}: a page of it is larger than 4 GiB")]
    TooLarge(String),
    /// The store returned an error.
    #[error("pool {0}: {1}")]
    Store(String, StoreError),
    /// None of its pages can ever be stored.
    #[error("pool {0}: {1}")]
    Misfit(String, Misfit),
}

/// A registered pool.
struct Registered {
    memory: Memory,
    /// Bytes per part.
    parts: Vec<usize>,
    /// The namespace of its pages; `None` if it holds no bytes.
    namespace: Option<Namespace>,
    /// The id of the namespace in the store, set once there is a store.
    space: OnceLock<NamespaceId>,
    gets: Trial,
    puts: Trial,
    described: String,
    /// The last page of a chain whose tail was left out. The pages that follow it are left out too.
    left_out: Mutex<Option<PageKey>>,
}

impl Registered {
    fn page_bytes(&self) -> usize {
        self.parts.iter().sum()
    }

    fn bytes_of(&self, pages: usize) -> u64 {
        (pages * self.page_bytes()) as u64
    }

    /// Bytes per page on the device; `None` if the pool holds no bytes.
    fn stored_bytes(&self) -> Option<u64> {
        let shape = self.namespace.as_ref()?.shape();
        Some(u64::from(shape.page_blocks()) * ALIGN as u64)
    }

    /// Why its pages do not suit a store, if they do not.
    fn misfit(&self, volume: &Path, store: &Store) -> Option<Misfit> {
        place::misfit(volume, &store.stats(), self.stored_bytes()?)
    }

    /// Registers its namespace in the store.
    fn enter(&self, store: &Store) -> Result<(), StoreError> {
        if let Some(namespace) = &self.namespace {
            let id = store.namespace(namespace)?;
            self.space.get_or_init(|| id);
        }
        Ok(())
    }
}

/// The position in its chain of a batch of consecutive pages.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chain {
    /// The key before the first key of the batch, if known.
    pub before: Option<PageKey>,
    /// Number of pages before the batch.
    pub depth: u32,
}

impl Chain {
    /// The position after `keys` of this batch.
    #[must_use]
    pub fn after(self, keys: &[PageKey]) -> Chain {
        let more = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        Chain {
            before: keys.last().copied().or(self.before),
            depth: self.depth.saturating_add(more),
        }
    }
}

/// How long a call waits for another owner, and where it records that the wait was in vain.
struct Patience<'a> {
    until: Instant,
    given_up: &'a AtomicU64,
}

/// The state of the store in a backend.
enum Place {
    /// Not created yet. It is created once the pools are known, because its segment size depends on
    /// the page size.
    Unmade,
    /// No store was available at start-up.
    Empty,
    Attached(Store),
    /// Closed: calls are over.
    Closed,
}

impl Place {
    fn store(&self) -> Option<&Store> {
        match self {
            Place::Attached(store) => Some(store),
            Place::Unmade | Place::Empty | Place::Closed => None,
        }
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
    debt: clear::Debt,
    /// The epochs of the owner role (`turns`) for which a wait for an owner was in vain: by a
    /// lookup or read, and by a put.
    given_up: AtomicU64,
    puts_given_up: AtomicU64,
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
            Ok(true) => place::attach(config, None).map(Some),
            Ok(false) => Ok(None),
            Err(error) => Err(error),
        };
        match attached {
            Ok(None) => Ok((Arc::new(Backend::new(Place::Unmade, server, config)), None)),
            Ok(Some(Attached { store, remark, .. })) => {
                let backend = Backend::new(Place::Attached(store), server, config);
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
            Ok((store, remark)) => {
                self.enter_all(&store);
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
    fn attach_for_pools(&self, on_error: OnError) -> Result<(Store, Option<String>), PlaceError> {
        let attached = place::attach(&self.config, self.largest_page())?;
        let Attached {
            store,
            volume,
            remark,
        } = attached;
        let pools = self.pools.read();
        let misfit = pools.iter().find_map(|(name, pool)| {
            let misfit = pool.misfit(&volume, &store)?;
            matches!(misfit, Misfit::Never { .. }).then(|| (name.clone(), misfit))
        });
        match misfit {
            Some((pool, misfit)) if on_error == OnError::Fail => {
                store.close()?;
                Err(PlaceError::Misfit(pool, misfit))
            }
            _ => Ok((store, remark)),
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
        Some(self.attached()?.report().ok()?.settings)
    }

    /// Starts later attempts to attach to a store. Returns the warning about them.
    fn go_without(self: &Arc<Self>, error: &PlaceError) -> String {
        retry::start(self, &self.config);
        format!(
            "serving without a store, everything misses until there is one; tried again in \
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
    fn enter_all(&self, store: &Store) {
        let volume = place::volume_of(&self.config.path);
        for pool in self.pools.read().values() {
            if let Err(error) = pool.enter(store) {
                tracing::warn!(%error, "{}: its namespace is not registered", pool.described);
            }
            if let Some(misfit) = pool.misfit(&volume, store) {
                tracing::warn!("{}: {misfit}", pool.described);
            }
        }
    }

    fn new(place: Place, server: Server, config: &Config) -> Backend {
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
            debt: clear::Debt::default(),
            given_up: AtomicU64::new(u64::MAX),
            puts_given_up: AtomicU64::new(u64::MAX),
            refused_batches: Seldom::default(),
            origin: Origin::here(),
        }
    }

    /// Registers the pages of a pool. Returns a description of the result.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn register(&self, facts: &PoolFacts, memory: Memory) -> Result<String, RegisterError> {
        if self.is_inherited() {
            return Err(RegisterError::Store(facts.name.clone(), StoreError::Forked));
        }
        let parts = match &memory {
            Memory::Mapped(pool) => pool.part_bytes(),
            Memory::Flat(bytes) => vec![*bytes],
            Memory::Logical => Vec::new(),
        };
        let mut space = None;
        let mut named = "no bytes of its own".to_owned();
        if !parts.is_empty() {
            let sizes: Result<Vec<u32>, _> =
                parts.iter().map(|&part| u32::try_from(part)).collect();
            let sizes = sizes.map_err(|_| RegisterError::TooLarge(facts.name.clone()))?;
            let whole = namespace(&self.server, facts, &sizes)?;
            named = whole.to_string();
            space = Some(whole);
        }
        let (needs_bounce, is_aligned, is_huge) = match &memory {
            Memory::Mapped(pool) => (
                (!pool.is_whole()).then_some("parts are scattered by layer and are gathered"),
                pool.is_aligned(ALIGN),
                is_on_huge_pages(pool),
            ),
            Memory::Flat(_) | Memory::Logical => (None, false, false),
        };
        let place = match &memory {
            Memory::Mapped(_) if is_huge => "on huge memory pages",
            Memory::Mapped(_) => {
                "on ordinary memory pages (SGLANG_HUGEPAGE_SIZE=2MB makes reads faster)"
            }
            Memory::Flat(_) => "passed in page by page",
            Memory::Logical => "other pools determine the pages that can be restored",
        };
        let registered = Registered {
            parts,
            namespace: space,
            space: OnceLock::new(),
            gets: Trial::new(self.transfer, needs_bounce, is_aligned, is_huge),
            puts: Trial::new(self.transfer, needs_bounce, is_aligned, is_huge),
            described: format!("pool {}: {named}; {place}", facts.name),
            memory,
            left_out: Mutex::default(),
        };
        let mut line = format!(
            "{}; transfer {}",
            registered.described,
            registered.gets.describe()
        );
        // Held until the pool is listed; otherwise a store that is attached in the meantime would
        // miss it.
        let place = self.place.read();
        if let Some(store) = place.store() {
            let refused = |error| RegisterError::Store(facts.name.clone(), error);
            registered.enter(store).map_err(refused)?;
            match registered.misfit(&place::volume_of(&self.config.path), store) {
                Some(misfit @ Misfit::Never { .. }) if self.config.on_error == OnError::Fail => {
                    return Err(RegisterError::Misfit(facts.name.clone(), misfit));
                }
                Some(misfit) => {
                    tracing::warn!("pool {}: {misfit}", facts.name);
                    line = format!("{line}; {misfit}");
                }
                None => {}
            }
        }
        self.pools
            .write()
            .insert(facts.name.clone(), Arc::new(registered));
        Ok(line)
    }

    fn pool(&self, name: &str) -> Option<Arc<Registered>> {
        if self.is_inherited() {
            return None;
        }
        self.pools.read().get(name).cloned()
    }

    /// Sets the store that has become available. Returns it if the backend no longer needs it.
    fn enter(&self, store: Store) -> Result<(), Store> {
        let mut place = self.place.write();
        if !matches!(*place, Place::Empty) || self.is_closing() {
            return Err(store);
        }
        self.enter_all(&store);
        *place = Place::Attached(store);
        Ok(())
    }

    /// The store. `None` if there is none, or if it is being set or closed at this moment.
    fn attached(&self) -> Option<MappedRwLockReadGuard<'_, Store>> {
        if self.is_closing() {
            return None;
        }
        let place = self.place.try_read()?;
        RwLockReadGuard::try_map(place, Place::store).ok()
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
    fn store(&self) -> Option<MappedRwLockReadGuard<'_, Store>> {
        let store = self.attached()?;
        self.wait_for_owner(&store, &self.patience());
        self.is_clear(&store).then_some(store)
    }

    /// Waits while the store has no owner. Returns whether it waited. Waits only once per loss of
    /// an owner: if no other owner appears, everything is a miss at once.
    fn wait_for_owner(&self, store: &Store, patience: &Patience<'_>) -> bool {
        let turns = store.turns();
        let given_up = patience.given_up;
        if store.part() != Part::Nobody || given_up.load(Ordering::Relaxed) == turns {
            return false;
        }
        store.wait_for_owner(patience.until);
        if store.part() == Part::Nobody {
            given_up.store(store.turns(), Ordering::Relaxed);
        }
        true
    }

    /// The patience of a lookup or read: short, because a miss costs less than a long wait.
    fn patience(&self) -> Patience<'_> {
        Patience {
            until: Instant::now() + OWNER_PATIENCE,
            given_up: &self.given_up,
        }
    }

    /// The patience of a put: an owner that shuts down cleanly may take seconds to close the store.
    fn patience_of_put(&self, deadline: Instant) -> Patience<'_> {
        Patience {
            until: deadline,
            given_up: &self.puts_given_up,
        }
    }

    /// Makes a call, and repeats it once if it was incomplete because the store's owner ended.
    fn steadily<'a, R>(
        &'a self,
        store: &Store,
        patience: impl FnOnce() -> Patience<'a>,
        fell_short: impl Fn(&R) -> bool,
        mut call: impl FnMut() -> R,
    ) -> R {
        let turns = store.turns();
        let result = call();
        if fell_short(&result)
            && (self.wait_for_owner(store, &patience()) || store.turns() != turns)
        {
            return call();
        }
        result
    }

    /// The store, and the namespace of a pool in it.
    fn store_of(
        &self,
        pool: &Registered,
    ) -> Option<(MappedRwLockReadGuard<'_, Store>, NamespaceId)> {
        let store = self.store()?;
        Some((store, *pool.space.get()?))
    }

    /// Calls `work` with a pool and the pages given by SGLang's indices.
    fn with_slots(
        &self,
        name: &str,
        keys: usize,
        indices: &[i64],
        work: impl FnOnce(&Registered, &Pool, &[usize]) -> Vec<bool>,
    ) -> Vec<bool> {
        let Some(registered) = self.pool(name) else {
            self.refuse_batch(name, &"the pool was never registered");
            return vec![false; keys];
        };
        let pool = match &registered.memory {
            Memory::Logical => return vec![true; keys],
            Memory::Flat(_) => return vec![false; keys],
            Memory::Mapped(pool) => pool,
        };
        match pool.pages(indices, keys) {
            Ok(pages) => work(&registered, pool, &pages),
            Err(error) => {
                self.refuse_batch(name, &error);
                vec![false; keys]
            }
        }
    }

    /// Logs a batch that counts as missed as a whole.
    fn refuse_batch(&self, pool: &str, why: &dyn fmt::Display) {
        if !self.is_inherited()
            && let Some(more) = self.refused_batches.is_due()
        {
            tracing::warn!(
                pool,
                more,
                "a batch is refused: {why} (logged once a minute)"
            );
        }
    }

    /// Calls `work` with a pool whose pages are passed in as flat buffers of these lengths.
    fn with_flat(
        &self,
        name: &str,
        keys: usize,
        lengths: &[usize],
        work: impl FnOnce(&Registered) -> Vec<bool>,
    ) -> Vec<bool> {
        let Some(registered) = self.pool(name) else {
            return vec![false; keys];
        };
        if matches!(registered.memory, Memory::Logical) {
            return vec![true; keys];
        }
        let page_bytes = registered.page_bytes();
        if lengths.len() != keys || lengths.iter().any(|&length| length != page_bytes) {
            self.refuse_batch(name, &"its flat pages are of another size than the pool's");
            return vec![false; keys];
        }
        work(&registered)
    }

    /// Number of leading `keys` that are stored in `pool`.
    pub fn exists(&self, pool: &str, keys: &[PageKey], chain: Chain) -> usize {
        let Some(pool) = self.pool(pool) else {
            return 0;
        };
        self.meters.add(Count::LookedUp, keys.len());
        let found = self.leading(&pool, keys, chain);
        self.meters.add(Count::Found, found);
        found
    }

    fn leading(&self, pool: &Registered, keys: &[PageKey], chain: Chain) -> usize {
        if matches!(pool.memory, Memory::Logical) {
            return keys.len();
        }
        let Some((store, space)) = self.store_of(pool) else {
            return 0;
        };
        let found = self.steadily(
            &store,
            || self.patience(),
            |found| *found < keys.len(),
            || store.longest_prefix(space, keys),
        );
        if let (Some(before), Some(first), true) = (chain.before, keys.first(), found > 0) {
            // A lookup of consecutive pages of a chain records their parents.
            store.contains(space, &[before, *first]);
        }
        found
    }

    /// The pages that several pools hold of a chain whose KV is in `anchor`.
    pub fn exists_in(
        &self,
        anchor: &str,
        keys: &[PageKey],
        chain: Chain,
        pools: &[(String, Policy)],
    ) -> Hits {
        let pages = self.exists(anchor, keys, chain);
        let held = pools
            .iter()
            .map(|(name, policy)| (*policy, self.held(name, &keys[..pages])))
            .collect::<Vec<_>>();
        hits::restorable(pages, &held)
    }

    fn held(&self, pool: &str, keys: &[PageKey]) -> Vec<bool> {
        let Some(pool) = self.pool(pool) else {
            return Vec::new();
        };
        if matches!(pool.memory, Memory::Logical) {
            return vec![true; keys.len()];
        }
        let Some((store, space)) = self.store_of(&pool) else {
            return Vec::new();
        };
        let some_missed = |held: &Vec<bool>| held.contains(&false);
        self.steadily(
            &store,
            || self.patience(),
            some_missed,
            || store.contains(space, keys),
        )
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

/// Whether a pool is on huge pages. Uses only the list of mappings, because counting the pages
/// would take seconds for a large pool.
fn is_on_huge_pages(pool: &Pool) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    lies_on_huge_pages(&maps, pool.base())
}

fn lies_on_huge_pages(maps: &str, address: usize) -> bool {
    let covers = |line: &str| {
        let (start, end) = line.split_ascii_whitespace().next()?.split_once('-')?;
        let number = |text| usize::from_str_radix(text, 16).ok();
        Some((number(start)?..number(end)?).contains(&address))
    };
    maps.lines()
        .find(|line| covers(line) == Some(true))
        .is_some_and(|line| line.contains("hugepage") || line.contains("hugetlb"))
}
