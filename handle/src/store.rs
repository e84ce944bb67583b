//! A store and its namespaces, as the faces use them: every call of the engine is here.
//!
//! Answers are bytes, one [`Status`] a page. A call on a store that is closed, has no owner, or was
//! opened before a fork answers [`Status::Closed`] or an error; it never panics.
//!
//! Jobs on a store are in [`queue`]: its close ends its queues first.

mod pins;
pub mod queue;
mod quota;

use std::io::{self, IoSlice, IoSliceMut};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use larder_base::fork::Origin;
use larder_base::runtime::after;
use larder_core::core::Evictions;
use larder_engine::{
    Count, GetPage, GetStatus, Hint, NamespaceId, PageStore, Part, PutOptions, PutPage, PutStatus,
    Recall, Refusal, Settings, Stats, Store, StoreError,
};
use larder_format::{Fingerprint, Namespace, PageKey};
use larder_store::inventory::{Cursor, Inventory, Listing, Usage};
use larder_store::share;
use larder_sync::{Condvar, Mutex};
use larder_tools::l4::L4;

use crate::chain::{self, Chain};
use crate::config::Config;
use crate::place::{self, Attached, Misfit, PlaceError};
use crate::status::Status;
use queue::Queue;

/// How long a lookup or a read waits for another owner after the store's owner has ended. A miss
/// costs less than a long wait.
pub const OWNER_PATIENCE: Duration = Duration::from_secs(1);

/// The status of a page whose put was left undone by an owner that ended.
const LEFT_UNDONE: PutStatus = PutStatus::Refused(Refusal::Closed);

/// An open store.
pub struct Handle {
    store: Arc<Store>,
    l4: Option<L4>,
    volume: PathBuf,
    remarks: Vec<String>,
    queues: Mutex<Vec<Weak<Queue>>>,
    given_up: GivenUp,
    /// Counted leases that were refused to this handle.
    refused_leases: AtomicU64,
    logged_pin_lines: [AtomicBool; 2],
    closing: Mutex<Closing>,
    /// The store is closed.
    ended: Condvar,
    closed: AtomicBool,
    origin: Origin,
}

/// The close of a store. The call that begins it ends it.
#[derive(Default)]
enum Closing {
    #[default]
    NotBegun,
    Begun,
    /// The result, for each later call.
    Ended(Result<(), Arc<StoreError>>),
}

/// The numbers of role changes at which a wait for an owner was in vain: such a wait is made once
/// per loss of an owner. If no other owner appears, everything is a miss at once.
struct GivenUp {
    reads: AtomicU64,
    puts: AtomicU64,
}

impl Default for GivenUp {
    fn default() -> GivenUp {
        GivenUp {
            reads: AtomicU64::new(u64::MAX),
            puts: AtomicU64::new(u64::MAX),
        }
    }
}

/// How long a call waits for the next owner after the store's owner has ended.
#[derive(Clone, Copy, Debug)]
pub enum Patience {
    /// A lookup or a read: shortly, and until this moment at most. A miss costs less than a wait.
    Read(Option<Instant>),
    /// A put, until this moment: an owner that shuts down cleanly may take seconds to close.
    Put(Instant),
}

impl Patience {
    fn until(self) -> Instant {
        let short = Instant::now() + OWNER_PATIENCE;
        match self {
            Patience::Read(until) => until.map_or(short, |until| until.min(short)),
            Patience::Put(until) => until,
        }
    }
}

/// A namespace of an open store.
pub struct Space {
    /// The store.
    pub handle: Arc<Handle>,
    /// Its record, with the fingerprint of its fields.
    pub namespace: Namespace,
    /// Bytes of each part of a page.
    pub parts: Vec<usize>,
    id: NamespaceId,
    name: OnceLock<Fingerprint>,
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
        Ok(Handle::new(attached))
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
        place::open(config, page_bytes, creates, read_only).map(Handle::new)
    }

    /// Closes and refuses a store that can keep no page of `page_bytes`. Pages that waste its room
    /// are a remark.
    ///
    /// # Errors
    /// [`PlaceError::Never`]; or the store could not be closed.
    pub fn suiting(mut self, page_bytes: u64) -> Result<Handle, PlaceError> {
        match self.misfit(page_bytes) {
            Some(misfit @ Misfit::Never { .. }) => {
                self.close()?;
                return Err(PlaceError::Never(misfit));
            }
            Some(misfit) => self.remarks.push(misfit.to_string()),
            None => {}
        }
        Ok(self)
    }

    /// Why pages of this size do not suit the store, if they do not.
    #[must_use]
    pub fn misfit(&self, page_bytes: u64) -> Option<Misfit> {
        place::misfit(&self.volume, &self.stats(), page_bytes)
    }

    /// A handle on an attached store.
    pub fn new(attached: Attached) -> Handle {
        let Attached {
            store,
            l4,
            volume,
            remark,
        } = attached;
        Handle {
            store,
            l4,
            volume,
            remarks: remark.into_iter().collect(),
            queues: Mutex::default(),
            given_up: GivenUp::default(),
            refused_leases: AtomicU64::new(0),
            logged_pin_lines: Default::default(),
            closing: Mutex::default(),
            ended: Condvar::new(),
            closed: AtomicBool::new(false),
            origin: Origin::here(),
        }
    }

    /// See [`Inventory::evictions`].
    ///
    /// # Errors
    /// The store is closed or has no owner.
    pub fn evictions(&self, since: u64) -> Result<Evictions, StoreError> {
        self.store.evictions(since)
    }

    /// See [`Inventory::usage`].
    ///
    /// # Errors
    /// The store is closed or has no owner.
    pub fn usage(&self) -> Result<Vec<Usage>, StoreError> {
        self.store.usage()
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

    /// The role of this process now. Without a wait.
    pub fn part(&self) -> Part {
        if self.is_inherited() || self.is_closed() {
            return Part::Nobody;
        }
        self.store.part()
    }

    /// Whether the store is closed, or is being closed.
    pub fn is_closed(&self) -> bool {
        !self.is_inherited() && self.closed.load(Ordering::SeqCst)
    }

    /// Whether lookups are answered from memory of this process.
    pub fn is_owner(&self) -> bool {
        self.part() == Part::Owner
    }

    /// The settings of the store's owner, which apply to all processes; `None` without an owner.
    pub fn settings(&self) -> Option<Settings> {
        Some(self.store.report().ok()?.settings)
    }

    /// Whether the store's owner has a remote.
    pub fn has_remote(&self) -> bool {
        let report = self.store.report();
        report.is_ok_and(|report| report.beneath.is_some())
    }

    /// Counters and sizes.
    pub fn stats(&self) -> Stats {
        self.store.stats()
    }

    /// Counters and sizes as JSON (docs/json.md), with those of this handle.
    ///
    /// # Errors
    /// The store is closed, or this process is a forked child.
    pub fn stats_json(&self) -> Result<String, StoreError> {
        self.refuse_closed()?;
        let refused_leases = self.refused_leases();
        let counted = serde_json::to_value(self.stats()).map(|mut stats| {
            stats["refused_leases"] = refused_leases.into();
            stats.to_string()
        });
        Ok(counted.unwrap_or_default())
    }

    /// Whether the store is encrypted. In doubt it is.
    pub fn is_encrypted(&self) -> bool {
        share::is_encrypted(&self.store).unwrap_or(true)
    }

    /// For calls that a closed store, or one from before a fork, would answer with nothing of use.
    ///
    /// # Errors
    /// The store is closed, or this process is a forked child.
    pub fn refuse_closed(&self) -> Result<(), StoreError> {
        if self.is_inherited() {
            return Err(StoreError::Forked);
        }
        match self.is_closed() {
            true => Err(StoreError::Closed),
            false => Ok(()),
        }
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
        self.store.flush()
    }

    /// Registers a namespace.
    ///
    /// # Errors
    /// The store is closed, or takes no more namespaces.
    pub fn space(self: &Arc<Self>, namespace: Namespace) -> Result<Space, StoreError> {
        if self.is_closed() {
            return Err(StoreError::Closed);
        }
        let id = self.store.namespace(&namespace)?;
        let sizes = namespace.shape().part_sizes();
        Ok(Space {
            handle: self.clone(),
            parts: sizes.iter().map(|&bytes| bytes as usize).collect(),
            namespace,
            id,
            name: OnceLock::new(),
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
        self.store.register(memory).1
    }

    /// Lets a queue end before the store is closed.
    pub fn watch(&self, queue: &Arc<Queue>) {
        let mut queues = self.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(queue));
    }

    /// Ends all queues, then closes the store. Both may wait for the device without end. Each
    /// further call has the same result.
    ///
    /// # Errors
    /// The store could not be closed cleanly.
    pub fn close(&self) -> Result<(), Arc<StoreError>> {
        if self.is_inherited() {
            return Err(StoreError::Forked.into());
        }
        if self.begins_close() {
            return self.end();
        }
        loop {
            // A much later moment could not be represented.
            if let Some(end) = self.end_by(after(Duration::MAX)) {
                return end;
            }
        }
    }

    /// As [`Handle::close`], with a wait until this moment at most. False if it passed first: the
    /// store is then closed in the background. Another call waits again.
    ///
    /// # Errors
    /// The store could not be closed cleanly.
    pub fn close_by(self: &Arc<Self>, until: Instant) -> Result<bool, Arc<StoreError>> {
        if self.is_inherited() {
            return Err(StoreError::Forked.into());
        }
        self.close_beside().map_err(|source| StoreError::Io {
            doing: "starting the thread that closes the store",
            path: self.volume.clone(),
            source,
        })?;
        self.end_by(until)
            .map_or(Ok(false), |end| end.map(|()| true))
    }

    /// Whether this call has to close the store.
    fn begins_close(&self) -> bool {
        let mut closing = self.closing.lock();
        let begins = matches!(*closing, Closing::NotBegun);
        if begins {
            *closing = Closing::Begun;
        }
        begins
    }

    /// Closes the store, for the call that has begun it.
    fn end(&self) -> Result<(), Arc<StoreError>> {
        self.end_queues();
        self.closed.store(true, Ordering::SeqCst);
        self.l4.iter().for_each(L4::close);
        let end = self.store.close().map_err(Arc::new);
        *self.closing.lock() = Closing::Ended(end.clone());
        self.ended.notify_all();
        end
    }

    /// The end of a close that has begun; `None` if `until` passes first.
    fn end_by(&self, until: Instant) -> Option<Result<(), Arc<StoreError>>> {
        let mut closing = self.closing.lock();
        loop {
            if let Closing::Ended(end) = &*closing {
                return Some(end.clone());
            }
            if Instant::now() >= until {
                return None;
            }
            self.ended.wait_until(&mut closing, until);
        }
    }

    /// Refuses jobs and waits for running jobs.
    fn end_queues(&self) {
        let queues: Vec<_> = self
            .queues
            .lock()
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        for queue in &queues {
            queue.refuse();
        }
        for queue in &queues {
            queue.close(None);
        }
    }

    /// Closes the store in a thread of its own, which logs an error, unless a close has begun.
    fn close_beside(self: &Arc<Self>) -> io::Result<()> {
        // Held until the thread runs: a close begins only if it will end. The thread takes it then.
        let mut closing = self.closing.lock();
        if !matches!(*closing, Closing::NotBegun) {
            return Ok(());
        }
        let handle = self.clone();
        let thread = std::thread::Builder::new().name("larder-close".to_owned());
        thread.spawn(move || {
            if let Err(error) = handle.end() {
                let volume = handle.volume.display();
                tracing::warn!(%error, "{volume}: not closed cleanly");
            }
        })?;
        *closing = Closing::Begun;
        Ok(())
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
        if let Err(error) = self.close_beside() {
            // As after a crash: nothing that was acknowledged is lost.
            tracing::warn!(%error, "{}: no thread to close it", self.volume.display());
        }
    }

    /// Makes a call, and repeats it with the next owner if it fell short because the store's owner
    /// ended. Waits for that owner only once per loss of an owner.
    fn steadily<R>(
        &self,
        patience: Patience,
        fell_short: impl Fn(&R) -> bool,
        mut call: impl FnMut() -> R,
    ) -> R {
        let store = &self.store;
        let given_up = match patience {
            Patience::Read(_) => &self.given_up.reads,
            Patience::Put(_) => &self.given_up.puts,
        };
        let until = match given_up.load(Ordering::Relaxed) == store.turns() {
            true => Instant::now(),
            false => patience.until(),
        };
        let result = store.steadily(until, fell_short, |_| call());
        if Instant::now() >= until && store.part() == Part::Nobody {
            given_up.store(store.turns(), Ordering::Relaxed);
        }
        result
    }

    /// Waits while the store has no owner, as a call that falls short does.
    pub fn wait_for_owner(&self, patience: Patience) {
        self.steadily(patience, |()| true, || ());
    }

    /// Waits for an owner, however often a wait was in vain.
    pub fn insist_on_owner(&self, until: Instant) {
        self.store.wait_for_owner(until);
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
    /// Its name in the store. As long as the store has had no owner, that of its fields.
    pub fn fingerprint(&self) -> Fingerprint {
        if let Some(name) = self.name.get() {
            return *name;
        }
        match self.handle.store.named(self.id) {
            Some(named) => *self.name.get_or_init(|| named.fingerprint()),
            None => self.namespace.fingerprint(),
        }
    }

    /// Bytes of a page in memory: of its parts, one after the other.
    pub fn page_bytes(&self) -> usize {
        self.parts.iter().sum()
    }

    /// Stores pages; one status a page.
    pub fn put_pages(
        &self,
        pages: &[PutPage<'_>],
        options: PutOptions,
        patience: Patience,
    ) -> Vec<PutStatus> {
        let put = || self.handle.store.put(self.id, pages, options);
        // Pages stored before the owner ended are duplicates in the second attempt.
        let is_short = |statuses: &Vec<PutStatus>| statuses.contains(&LEFT_UNDONE);
        self.handle.steadily(patience, is_short, put)
    }

    /// Reads pages; one status a page.
    pub fn get_pages(
        &self,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
        patience: Patience,
    ) -> Vec<GetStatus> {
        let is_short = |statuses: &Vec<GetStatus>| statuses.iter().any(|page| !page.is_hit());
        let get = || self.handle.store.get(self.id, pages, deadline);
        self.handle.steadily(patience, is_short, get)
    }

    /// Stores pages whose parts are given page after page. They are a chain, or each is one by
    /// itself.
    pub fn put(
        &self,
        keys: &[PageKey],
        chain: Option<Chain>,
        memory: &[IoSlice<'_>],
        options: PutOptions,
        recall: Option<&Recall>,
    ) -> Vec<u8> {
        let parts = memory.chunks_exact(self.parts.len());
        let pages = chain::pages(keys, chain, parts);
        codes(
            self.handle
                .store
                .put_recallable(self.id, &pages, options, recall),
        )
    }

    /// Reads pages into memory whose parts are given page after page.
    pub fn get(
        &self,
        keys: &[PageKey],
        memory: &mut [IoSliceMut<'_>],
        deadline: Option<Instant>,
    ) -> Vec<u8> {
        let parts = memory.chunks_exact_mut(self.parts.len());
        let page = |(key, parts): (&PageKey, _)| GetPage { key: *key, parts };
        let mut pages: Vec<GetPage<'_, '_>> = keys.iter().zip(parts).map(page).collect();
        codes(self.get_pages(&mut pages, deadline, Patience::Read(deadline)))
    }

    /// See [`PageStore::longest_prefix`].
    pub fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        let is_short = |found: &usize| *found < keys.len();
        let look = || self.handle.store.longest_prefix(self.id, keys);
        self.handle.steadily(Patience::Read(None), is_short, look)
    }

    /// See [`PageStore::count`].
    pub fn count(&self, count: Count) {
        self.handle.store.count(self.id, count);
    }

    /// Whether each of these pages is stored.
    pub fn held(&self, keys: &[PageKey], deadline: Option<Instant>) -> Vec<bool> {
        let is_short = |found: &Vec<bool>| found.contains(&false);
        let look = || self.handle.store.contains(self.id, keys);
        self.handle
            .steadily(Patience::Read(deadline), is_short, look)
    }

    /// The same once, without a wait for an owner.
    pub fn held_now(&self, keys: &[PageKey]) -> Vec<bool> {
        self.handle.store.contains(self.id, keys)
    }

    /// Which of these pages are stored; one status a page.
    pub fn contains(&self, keys: &[PageKey], deadline: Option<Instant>) -> Vec<u8> {
        let found = self.held(keys, deadline);
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
        self.handle.store.contains(self.id, keys).first().copied()
    }

    /// See [`PageStore::touch`].
    pub fn touch(&self, keys: &[PageKey], hint: Hint) {
        self.handle.store.touch(self.id, keys, hint);
    }

    /// See [`Inventory::list`].
    ///
    /// # Errors
    /// The store is closed or has no owner, or its device fails.
    pub fn list(&self, cursor: Cursor) -> Result<Listing, StoreError> {
        self.handle.store.list(self.id, cursor)
    }

    /// The status of a page that is not found.
    fn absent(&self) -> Status {
        match self.handle.part() {
            Part::Owner | Part::Client => Status::Absent,
            _ => Status::Closed,
        }
    }

    /// See [`PageStore::delete`].
    ///
    /// # Errors
    /// The deletion could not be recorded.
    pub fn delete(&self, keys: &[PageKey]) -> Result<u64, StoreError> {
        self.handle.store.delete(self.id, keys)
    }

    /// See [`PageStore::clear_namespace`].
    ///
    /// # Errors
    /// The deletion could not be recorded.
    pub fn clear(&self) -> Result<u64, StoreError> {
        self.handle.store.clear_namespace(self.id)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn threads_that_ask_for_the_role_at_once_all_find_the_owner() {
        let directory = tempfile::tempdir().unwrap();
        let json = serde_json::json!({
            "path": directory.path(), "size": "256MiB", "prewrite": false
        });
        let config = Config::parse(&json.to_string()).unwrap();
        let handle = Handle::open(&config, None, true, false).unwrap();
        let ask = || (0..100_000).all(|_| handle.is_owner());
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
            assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
        });
        handle.close().unwrap();
        assert!(handle.is_closed() && !handle.is_owner());
    }
}
