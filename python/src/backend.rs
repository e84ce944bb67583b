//! The storage backend: what SGLang's threads call, over a shared store.
//!
//! Promises to SGLang:
//! - a page is read whole and right, or it counts as a miss; nothing here fails in another way;
//! - `true` for a page given to store means that there is nothing left to do for it: stored, stored before, or deliberately not
//!   stored for lack of room. SGLang gives up the rest of a node at the first `false`, so that this is kept for pages that
//!   really failed;
//! - where there is no room the tail of a chain is left out, never its head, and what follows in later calls with it;
//! - a call starts no more reads or writes after the configured time; none that comes after [`Backend::close`] began touches a pool, and
//!   that says whether those before it are over.
//!
//! | module | what it is |
//! |---|---|
//! | `clear` | deleting what this server stored, also where that has to wait |
//! | `read` | reading pages |
//! | `retry` | trying again to have a store, where a server was started without one |
//! | `write` | storing pages |
//!
//! Threads: every call may come from any thread at any time. SGLang has one thread that looks up, one that reads and one that
//! writes.

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
use larder_engine::{NamespaceId, PageStore, Settings, SharedStore, Stats, StoreError, SyncPolicy};
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

/// How long a call waits for another owner when the store's has gone.
const OWNER_PATIENCE: Duration = Duration::from_secs(1);

/// How long a close waits for calls under way, which may take eight seconds, and for the store.
const CLOSE_PATIENCE: Duration = Duration::from_secs(16);

/// Alignment that goes straight to the device, in bytes.
const ALIGN: usize = 4096;

/// What a pool's pages are, for this backend.
pub enum Memory {
    /// Addresses are known.
    Mapped(Pool),
    /// Pages are handed over one by one, each flat; its length in bytes.
    Flat(usize),
    /// The pool holds no bytes: every page is present, and other pools say what can be restored (DeepSeek-V4).
    Logical,
}

/// Why a pool cannot be registered.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// It has no namespace.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// Its parts are too long.
    #[error("pool {0}: a page of it is larger than 4 GiB")]
    TooLarge(String),
    /// The store refused.
    #[error("pool {0}: {1}")]
    Store(String, StoreError),
    /// No page of it can ever be stored.
    #[error("pool {0}: {1}")]
    Misfit(String, Misfit),
}

/// A registered pool.
struct Registered {
    memory: Memory,
    /// Bytes of each part.
    parts: Vec<usize>,
    /// What its pages are stored under; none when it holds no bytes.
    namespace: Option<Namespace>,
    /// The namespace in the store, from when there is one.
    space: OnceLock<NamespaceId>,
    gets: Trial,
    puts: Trial,
    described: String,
    /// The last page of a chain whose tail was left out: what follows it is left out too.
    left_out: Mutex<Option<PageKey>>,
}

impl Registered {
    fn page_bytes(&self) -> usize {
        self.parts.iter().sum()
    }

    fn bytes_of(&self, pages: usize) -> u64 {
        (pages * self.page_bytes()) as u64
    }

    /// Bytes of a page on the device; `None` when it holds none.
    fn stored_bytes(&self) -> Option<u64> {
        let shape = self.namespace.as_ref()?.shape();
        Some(u64::from(shape.page_blocks()) * ALIGN as u64)
    }

    /// How its pages do not suit a store, if so.
    fn misfit(&self, volume: &Path, store: &SharedStore) -> Option<Misfit> {
        place::misfit(volume, &store.stats(), self.stored_bytes()?)
    }

    /// Names its namespace in the backend's store.
    fn enter(&self, store: &SharedStore) -> Result<(), StoreError> {
        if let Some(namespace) = &self.namespace {
            let id = store.namespace(namespace)?;
            self.space.get_or_init(|| id);
        }
        Ok(())
    }
}

/// A page's place in its chain, for a batch whose pages follow one another.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chain {
    /// The key before the batch's first, if known.
    pub before: Option<PageKey>,
    /// Pages before the batch.
    pub depth: u32,
}

impl Chain {
    /// The place behind `keys` of this batch.
    #[must_use]
    pub fn after(self, keys: &[PageKey]) -> Chain {
        let more = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        Chain {
            before: keys.last().copied().or(self.before),
            depth: self.depth.saturating_add(more),
        }
    }
}

/// How long a call waits for another owner, and where it is noted that none came.
struct Patience<'a> {
    until: Instant,
    given_up: &'a AtomicU64,
}

/// What a backend has in place of a store, or the store.
enum Place {
    /// There is none yet. It is made when the pools are known: its segments depend on the size of a
    /// page.
    Unmade,
    /// There was none to be had at start-up.
    Empty,
    Attached(SharedStore),
    /// Calls are over.
    Closed,
}

impl Place {
    fn store(&self) -> Option<&SharedStore> {
        match self {
            Place::Attached(store) => Some(store),
            Place::Unmade | Place::Empty | Place::Closed => None,
        }
    }
}

/// See the module.
pub struct Backend {
    place: RwLock<Place>,
    /// No call begins any more.
    closing: AtomicBool,
    retry: Mutex<Option<retry::Retry>>,
    server: Server,
    config: Config,
    explained: Explained,
    timeout: Duration,
    transfer: Transfer,
    /// A page that is there may not be as durable as is asked for.
    syncs_always: bool,
    pools: RwLock<HashMap<String, Arc<Registered>>>,
    arenas: [Arena; 2],
    meters: Meters,
    debt: clear::Debt,
    /// The turn of the store in which an owner was waited for in vain: by a lookup or read, by a put.
    given_up: AtomicU64,
    puts_given_up: AtomicU64,
    /// Limits the line on batches that are refused.
    refused_batches: Seldom,
    origin: Origin,
}

impl Backend {
    /// A backend over the store that `config` names, and what there is to remark. If there is none to be had and it says so, one over
    /// nothing: then everything misses until there is.
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

    /// Creates the store where there is none, with segments that suit the pages of the registered
    /// pools, and attaches to it. Returns a warning, if any. Does nothing where the store exists.
    ///
    /// # Errors
    /// See [`PlaceError`]: where `on_error` is `fail`.
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

    /// Creates the store for the registered pools, and attaches to it. Another server may have been
    /// faster, with a store that takes none of their pages.
    fn attach_for_pools(
        &self,
        on_error: OnError,
    ) -> Result<(SharedStore, Option<String>), PlaceError> {
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

    /// Creates the store before the first call, where SGLang has not said that all pools are known.
    pub fn make_if_needed(self: &Arc<Self>) {
        if self.is_made() || self.largest_page().is_none() {
            return;
        }
        // No call raises: without a store everything misses, whatever `on_error` says.
        if let Ok(Some(remark)) = self.make_or(OnError::Miss) {
            tracing::warn!("{remark}");
        }
    }

    /// Whether there is a store, or none is to be made.
    pub fn is_made(&self) -> bool {
        let place = self.place.try_read();
        !place.is_some_and(|place| matches!(*place, Place::Unmade))
    }

    /// The settings of the store's owner, which hold for all processes; `None` without an owner.
    pub fn settings(&self) -> Option<Settings> {
        Some(self.attached()?.report().ok()?.settings)
    }

    /// Starts the later attempts to attach to a store. Returns the warning about them.
    fn go_without(self: &Arc<Self>, error: &PlaceError) -> String {
        retry::start(self, &self.config);
        format!(
            "serving without a store, everything misses until there is one; tried again in \
             {:?} (`on_error` is \"miss\"): {error}",
            self.config.retry
        )
    }

    /// Bytes of the largest page of all pools, on the device; `None` before there is one.
    fn largest_page(&self) -> Option<u64> {
        let pools = self.pools.read();
        pools.values().filter_map(|pool| pool.stored_bytes()).max()
    }

    /// Names every pool in the store.
    fn enter_all(&self, store: &SharedStore) {
        let volume = place::volume_of(&self.config.path);
        for pool in self.pools.read().values() {
            if let Err(error) = pool.enter(store) {
                tracing::warn!(%error, "{}: it has no place in the store", pool.described);
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

    /// Makes a pool's pages known. Returns what there is to say of it.
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
                (!pool.is_whole()).then_some("parts lie scattered by layer and are gathered"),
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
            Memory::Flat(_) => "handed over page by page",
            Memory::Logical => "other pools say what can be restored",
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
        // Held until the pool is listed: a store that comes meanwhile would not find it.
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

    /// Takes the store that there is at last; gives it back when it comes too late.
    fn enter(&self, store: SharedStore) -> Result<(), SharedStore> {
        let mut place = self.place.write();
        if !matches!(*place, Place::Empty) || self.is_closing() {
            return Err(store);
        }
        self.enter_all(&store);
        *place = Place::Attached(store);
        Ok(())
    }

    /// The store, unless there is none, or it is being entered or left just now.
    fn attached(&self) -> Option<MappedRwLockReadGuard<'_, SharedStore>> {
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

    /// Whether a close has begun, or this is a forked child of the process that opened the backend:
    /// no lock is taken in it.
    pub fn is_closing(&self) -> bool {
        self.is_inherited() || self.closing.load(Ordering::SeqCst)
    }

    /// The store, with somebody in it who decides. When its owner has just gone another one is waited for.
    fn store(&self) -> Option<MappedRwLockReadGuard<'_, SharedStore>> {
        let store = self.attached()?;
        self.wait_for_owner(&store, &self.patience());
        self.is_clear(&store).then_some(store)
    }

    /// Waits while the store has nobody who decides; whether it did. Once each time that an owner has gone: where no other comes
    /// everything misses at once.
    fn wait_for_owner(&self, store: &SharedStore, patience: &Patience<'_>) -> bool {
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

    /// That of a lookup or read: little, since a miss costs less than a long wait.
    fn patience(&self) -> Patience<'_> {
        Patience {
            until: Instant::now() + OWNER_PATIENCE,
            given_up: &self.given_up,
        }
    }

    /// That of a put: an owner that ends in order may take seconds to close the store.
    fn patience_of_put(&self, deadline: Instant) -> Patience<'_> {
        Patience {
            until: deadline,
            given_up: &self.puts_given_up,
        }
    }

    /// Makes a call, and once more if it fell short while the store's owner went.
    fn steadily<'a, R>(
        &'a self,
        store: &SharedStore,
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

    /// The store, and what a pool's pages are stored under in it.
    fn store_of(
        &self,
        pool: &Registered,
    ) -> Option<(MappedRwLockReadGuard<'_, SharedStore>, NamespaceId)> {
        let store = self.store()?;
        Some((store, *pool.space.get()?))
    }

    /// Calls `work` with a pool and the pages of it that SGLang's indices name.
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
            tracing::warn!(pool, more, "a batch is refused: {why} (said once a minute)");
        }
    }

    /// Calls `work` with a pool whose pages are handed over flat, in buffers of these lengths.
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

    /// How many of `keys` are stored, from the first on, and the pages of `pool` that are.
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
            // Pages that are looked up together in the order of their chain learn their parents.
            store.contains(space, &[before, *first]);
        }
        found
    }

    /// What several pools hold of a chain whose KV lies in `anchor`.
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

    /// This rank's meters.
    pub fn meters(&self) -> &Meters {
        &self.meters
    }

    /// The store's own counters; `None` without a store.
    pub fn stats(&self) -> Option<(Stats, Part)> {
        self.attached().map(|store| (store.stats(), store.part()))
    }

    /// Bytes of memory that this backend holds beside the store's index.
    pub fn buffer_bytes(&self) -> usize {
        self.arenas.iter().map(Arena::bytes).sum()
    }

    /// One sentence a pool.
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

    /// Waits for calls under way and leaves the store. Later calls miss. Idempotent. Says whether all of it was done in
    /// time; what was not goes on by itself, and the store recovers from its end as from any.
    pub fn close(self: &Arc<Self>) -> bool {
        if self.is_inherited() {
            // There is nothing of it in this process.
            return true;
        }
        let left = self.leave();
        left.is_ok_and(|left| left.recv_timeout(CLOSE_PATIENCE).is_ok())
    }

    /// Begins to close, and goes on with it whatever becomes of the caller, who may wait for the word that it is done.
    ///
    /// # Errors
    /// There is no thread to do it on. Calls miss all the same.
    pub fn leave(self: &Arc<Self>) -> io::Result<Receiver<()>> {
        self.closing.store(true, Ordering::SeqCst);
        self.retry.lock().take();
        let (done, left) = mpsc::channel();
        let backend = self.clone();
        std::thread::Builder::new()
            .name("larder-close".to_owned())
            .spawn(move || {
                // Behind the calls under way.
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

/// Whether a pool lies on huge pages. From the list of mappings alone: counting their pages would take seconds for a large pool.
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
