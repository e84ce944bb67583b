//! A store and its namespaces, as the Python classes use them: every call of the engine is here.
//!
//! Answers are bytes, one [`Status`] a page. A call on a store that is closed, has no owner, or was
//! opened before a fork answers [`Status::Closed`] or an error; it never panics.

use std::io::{IoSlice, IoSliceMut};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use larder_engine::fork::Origin;
use larder_engine::inventory::{Cursor, Evictions, Inventory, Leased, Listing, Usage};
use larder_engine::share::Part;
use larder_engine::{
    GetPage, NamespaceId, PageStore, PutOptions, PutPage, Stats, Store, StoreError,
};
use larder_format::{Namespace, PageKey};
use parking_lot::Mutex;

use crate::config::Config;
use crate::place::{self, Attached, PlaceError};
use crate::queue::Queue;
use crate::status::Status;

/// How long a lookup or a read waits for another owner after the store's owner has ended. A miss
/// costs less than a long wait.
const OWNER_PATIENCE: Duration = Duration::from_secs(1);

/// Longest wait that a caller can name; a longer one has the same effect.
const WAIT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The handle of the engine.
enum Inner {
    /// For this process alone.
    Own(Box<Store>),
    /// Together with other processes.
    Shared(Store),
}

/// An open store.
pub struct Handle {
    inner: Inner,
    volume: PathBuf,
    remarks: Vec<String>,
    queues: Mutex<Vec<Weak<Queue>>>,
    /// The number of role changes at which a wait for an owner was in vain.
    given_up: AtomicU64,
    /// Counted leases that were refused to this handle.
    refused_leases: AtomicU64,
    closed: Mutex<bool>,
    origin: Origin,
}

/// The predecessors of pages that are put.
#[derive(Clone, Copy, Debug, Default)]
pub enum Links {
    /// Each page is one by itself.
    #[default]
    None,
    /// The pages are a chain.
    Chain {
        /// The key before the first of them, if known.
        before: Option<PageKey>,
        /// Pages before the first of them.
        depth: u32,
    },
}

/// A namespace of an open store.
pub struct Space {
    /// The store.
    pub handle: Arc<Handle>,
    /// Its record.
    pub namespace: Namespace,
    /// Bytes of each part of a page.
    pub parts: Vec<usize>,
    id: NamespaceId,
}

impl Handle {
    /// Attaches to the store in `config`, together with other processes. Creates it if `creates`
    /// and there is none, with segments that suit pages of `page_bytes`.
    ///
    /// # Errors
    /// See [`PlaceError`].
    pub fn attach(
        config: &Config,
        page_bytes: Option<u64>,
        creates: bool,
    ) -> Result<Handle, PlaceError> {
        let attached = match creates {
            true => place::attach(config, page_bytes)?,
            false => place::attach_existing(config)?,
        };
        let Attached {
            store,
            volume,
            remark,
        } = attached;
        Ok(Handle::new(Inner::Shared(store), volume, remark))
    }

    /// Opens the store in `config` for this process alone.
    ///
    /// # Errors
    /// See [`PlaceError`].
    pub fn open(
        config: &Config,
        page_bytes: Option<u64>,
        creates: bool,
        read_only: bool,
    ) -> Result<Handle, PlaceError> {
        let creates = creates && !read_only;
        let (store, volume, remark) = place::open(config, page_bytes, creates, read_only)?;
        Ok(Handle::new(Inner::Own(Box::new(store)), volume, remark))
    }

    fn new(inner: Inner, volume: PathBuf, remark: Option<String>) -> Handle {
        Handle {
            inner,
            volume,
            remarks: remark.into_iter().collect(),
            queues: Mutex::default(),
            given_up: AtomicU64::new(u64::MAX),
            refused_leases: AtomicU64::new(0),
            closed: Mutex::default(),
            origin: Origin::here(),
        }
    }

    fn pages(&self) -> &dyn PageStore {
        match &self.inner {
            Inner::Own(store) => &**store,
            Inner::Shared(store) => store,
        }
    }

    fn books(&self) -> &dyn Inventory {
        match &self.inner {
            Inner::Own(store) => &**store,
            Inner::Shared(store) => store,
        }
    }

    /// See [`Inventory::evictions`].
    ///
    /// # Errors
    /// The store is closed or has no owner.
    pub fn evictions(&self, since: u64) -> Result<Evictions, StoreError> {
        self.books().evictions(since)
    }

    /// See [`Inventory::usage`].
    ///
    /// # Errors
    /// The store is closed or has no owner.
    pub fn usage(&self) -> Result<Vec<Usage>, StoreError> {
        self.books().usage()
    }

    /// The first volume.
    pub fn volume(&self) -> &Path {
        &self.volume
    }

    /// Warnings of the open.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Whether this is a forked child of the process that opened the store.
    pub fn is_inherited(&self) -> bool {
        self.origin.is_inherited()
    }

    /// The role of this process now: `owner`, `client`, `nobody` or `closed`. Without a wait.
    pub fn part(&self) -> &'static str {
        if self.is_inherited() {
            return "nobody";
        }
        if self.closed.try_lock().is_none_or(|closed| *closed) {
            return "closed";
        }
        match &self.inner {
            Inner::Own(_) => "owner",
            Inner::Shared(store) => match store.part() {
                Part::Owner => "owner",
                Part::Client => "client",
                _ => "nobody",
            },
        }
    }

    /// Whether lookups are answered from memory of this process.
    pub fn is_owner(&self) -> bool {
        self.part() == "owner"
    }

    /// Counters and sizes.
    pub fn stats(&self) -> Stats {
        self.pages().stats()
    }

    /// Counted leases that were refused to this handle so far.
    pub fn refused_leases(&self) -> u64 {
        self.refused_leases.load(Ordering::Relaxed)
    }

    /// See [`PageStore::flush`].
    ///
    /// # Errors
    /// A sync failed.
    pub fn flush(&self) -> Result<(), StoreError> {
        self.pages().flush()
    }

    /// Registers a namespace.
    ///
    /// # Errors
    /// The store is closed, or takes no more namespaces.
    pub fn space(self: &Arc<Self>, namespace: Namespace) -> Result<Space, StoreError> {
        if self.part() == "closed" {
            return Err(StoreError::Closed);
        }
        let id = self.pages().namespace(&namespace)?;
        let sizes = namespace.shape().part_sizes();
        Ok(Space {
            handle: self.clone(),
            parts: sizes.iter().map(|&bytes| bytes as usize).collect(),
            namespace,
            id,
        })
    }

    /// Registers memory with the kernel, for faster transfers. Returns the result as a sentence.
    ///
    /// # Safety
    /// The memory stays mapped for the rest of the process.
    pub unsafe fn register(&self, address: usize, length: usize) -> String {
        if self.is_inherited() {
            return format!("not registered: {}", StoreError::Forked);
        }
        let start = std::ptr::with_exposed_provenance_mut::<u8>(address);
        // SAFETY: mapped for the rest of the process, as the caller guarantees. Registration reads
        // and writes none of it, and the slice ends with this call.
        let memory = unsafe { std::slice::from_raw_parts_mut(start, length) };
        self.pages().register(memory).1
    }

    /// Lets a queue end before the store is closed.
    pub fn watch(&self, queue: &Arc<Queue>) {
        let mut queues = self.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(queue));
    }

    /// Ends all queues, then closes the store. False if `until` passed first.
    ///
    /// # Errors
    /// The store could not be closed cleanly.
    pub fn close(&self, until: Option<Instant>) -> Result<bool, StoreError> {
        if self.is_inherited() {
            return Err(StoreError::Forked);
        }
        let mut closed = match until {
            Some(until) => match self.closed.try_lock_until(until) {
                Some(closed) => closed,
                None => return Ok(false),
            },
            None => self.closed.lock(),
        };
        if *closed {
            return Ok(true);
        }
        let queues: Vec<_> = self
            .queues
            .lock()
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        for queue in &queues {
            queue.refuse();
        }
        if !queues.iter().all(|queue| queue.close(until)) {
            return Ok(false);
        }
        *closed = true;
        self.pages().close().map(|()| true)
    }

    /// For a store that its user drops: refuses jobs, and closes it in the background, since that
    /// may wait for the device.
    pub fn leave(self: &Arc<Self>) {
        if self.is_inherited() {
            // Its threads belong to the parent.
            std::mem::forget(self.clone());
            return;
        }
        for queue in self.queues.lock().iter().filter_map(Weak::upgrade) {
            queue.refuse();
        }
        if self.part() == "closed" {
            return;
        }
        let handle = self.clone();
        let thread = std::thread::Builder::new().name("larder-close".to_owned());
        let closing = thread.spawn(move || {
            if let Err(error) = handle.close(None) {
                let volume = handle.volume.display();
                tracing::warn!(%error, "{volume}: not closed cleanly");
            }
        });
        if let Err(error) = closing {
            // As after a crash: nothing that was acknowledged is lost.
            tracing::warn!(%error, "{}: no thread to close it", self.volume.display());
        }
    }

    /// Makes a call, and repeats it once if it fell short because the store's owner ended. Waits
    /// for the next owner until `until`, once per loss of an owner.
    fn steadily<R>(
        &self,
        until: Option<Instant>,
        fell_short: impl Fn(&R) -> bool,
        mut call: impl FnMut() -> R,
    ) -> R {
        let Inner::Shared(store) = &self.inner else {
            return call();
        };
        let turns = store.turns();
        let result = call();
        if fell_short(&result) && (self.waits_for_owner(store, until) || store.turns() != turns) {
            return call();
        }
        result
    }

    /// Waits while the store has no owner. Whether it waited.
    fn waits_for_owner(&self, store: &Store, until: Option<Instant>) -> bool {
        let turns = store.turns();
        if store.part() != Part::Nobody || self.given_up.load(Ordering::Relaxed) == turns {
            return false;
        }
        let patience = Instant::now() + OWNER_PATIENCE;
        store.wait_for_owner(until.map_or(patience, |until| until.min(patience)));
        if store.part() == Part::Nobody {
            self.given_up.store(store.turns(), Ordering::Relaxed);
        }
        true
    }
}

fn codes<S: Into<Status>>(statuses: Vec<S>) -> Vec<u8> {
    let code = |status: S| status.into() as u8;
    statuses.into_iter().map(code).collect()
}

/// The same status for so many pages.
pub fn all(status: Status, pages: usize) -> Vec<u8> {
    vec![status as u8; pages]
}

impl Space {
    /// Bytes of a page in memory: of its parts, one after the other.
    pub fn page_bytes(&self) -> usize {
        self.parts.iter().sum()
    }

    fn pages(&self) -> &dyn PageStore {
        self.handle.pages()
    }

    /// Stores pages whose parts are given page after page.
    pub fn put(
        &self,
        keys: &[PageKey],
        links: Links,
        memory: &[IoSlice<'_>],
        wait: Duration,
    ) -> Vec<u8> {
        let mut before = None;
        let mut next = 0;
        if let Links::Chain { before: key, depth } = links {
            (before, next) = (key, depth);
        }
        let is_chain = matches!(links, Links::Chain { .. });
        let parts = memory.chunks_exact(self.parts.len());
        let page = |(key, parts): (&PageKey, _)| {
            let page = PutPage {
                key: *key,
                parent: before,
                depth: next,
                parts,
            };
            if is_chain {
                before = Some(*key);
                next = next.saturating_add(1);
            }
            page
        };
        let pages: Vec<PutPage<'_>> = keys.iter().zip(parts).map(page).collect();
        let wait = wait.min(WAIT_MAX);
        codes(self.pages().put(self.id, &pages, PutOptions::waiting(wait)))
    }

    /// Reads pages into memory whose parts are given page after page.
    pub fn get(
        &self,
        keys: &[PageKey],
        memory: &mut [IoSliceMut<'_>],
        deadline: Option<Instant>,
    ) -> Vec<u8> {
        let is_short = |statuses: &Vec<_>| statuses.iter().any(|page| !is_hit(page));
        let statuses = self.handle.steadily(deadline, is_short, || {
            let parts = memory.chunks_exact_mut(self.parts.len());
            let page = |(key, parts): (&PageKey, _)| GetPage { key: *key, parts };
            let mut pages: Vec<GetPage<'_, '_>> = keys.iter().zip(parts).map(page).collect();
            self.pages().get(self.id, &mut pages, deadline)
        });
        codes(statuses)
    }

    /// See [`PageStore::longest_prefix`].
    pub fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        let is_short = |found: &usize| *found < keys.len();
        self.handle.steadily(None, is_short, || {
            self.pages().longest_prefix(self.id, keys)
        })
    }

    /// Which of these pages are stored.
    pub fn contains(&self, keys: &[PageKey], deadline: Option<Instant>) -> Vec<u8> {
        let is_short = |found: &Vec<bool>| found.contains(&false);
        let found = self
            .handle
            .steadily(deadline, is_short, || self.pages().contains(self.id, keys));
        let absent = self.absent();
        let code = |is_there| if is_there { Status::Ok } else { absent } as u8;
        found.into_iter().map(code).collect()
    }

    /// Whether the page is stored, from the memory of this process; `None` if this process is not
    /// the owner. Never waits for another process or the device.
    pub fn holds(&self, key: &PageKey) -> Option<bool> {
        if !self.handle.is_owner() {
            return None;
        }
        let keys = std::slice::from_ref(key);
        self.pages().contains(self.id, keys).first().copied()
    }

    /// See [`PageStore::touch`].
    pub fn touch(&self, keys: &[PageKey]) {
        self.pages().touch(self.id, keys);
    }

    /// Takes counted leases: see [`Inventory::lease`].
    pub fn lease(&self, keys: &[PageKey]) -> Vec<u8> {
        let absent = self.absent();
        let code = |leased| match leased {
            Leased::Yes => Status::Ok as u8,
            Leased::Absent => absent as u8,
            Leased::Refused => Status::Refused as u8,
        };
        let leased = self.handle.books().lease(self.id, keys);
        let refused = leased
            .iter()
            .filter(|leased| **leased == Leased::Refused)
            .count();
        let counter = &self.handle.refused_leases;
        counter.fetch_add(refused as u64, Ordering::Relaxed);
        leased.into_iter().map(code).collect()
    }

    /// Returns counted leases.
    pub fn unlease(&self, keys: &[PageKey]) {
        self.handle.books().unlease(self.id, keys);
    }

    /// See [`Inventory::list`].
    ///
    /// # Errors
    /// The store is closed or has no owner, or its device fails.
    pub fn list(&self, cursor: Cursor) -> Result<Listing, StoreError> {
        self.handle.books().list(self.id, cursor)
    }

    /// The status of a page that is not found.
    fn absent(&self) -> Status {
        match self.handle.part() {
            "owner" | "client" => Status::Absent,
            _ => Status::Closed,
        }
    }

    /// See [`PageStore::delete`].
    ///
    /// # Errors
    /// The deletion could not be recorded.
    pub fn delete(&self, keys: &[PageKey]) -> Result<u64, StoreError> {
        self.pages().delete(self.id, keys)
    }

    /// See [`PageStore::clear_namespace`].
    ///
    /// # Errors
    /// The deletion could not be recorded.
    pub fn clear(&self) -> Result<u64, StoreError> {
        self.pages().clear_namespace(self.id)
    }
}

fn is_hit(status: &larder_engine::GetStatus) -> bool {
    status.is_hit()
}
