//! Opening a store, and the handle that callers hold.
//!
//! | module | what it is |
//! |---|---|
//! | `local` | the in-process catalog: a core behind a mutex, its effects carried out |
//! | `keeper` | the housekeeping thread: syncs that fall due, reclaim |
//! | `get`, `put` | the data path, on callers' threads |
//! | `hang` | which volumes have gone silent |

mod get;
mod hang;
mod keeper;
mod local;
mod put;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use larder_format::{BLOCK_BYTES, Namespace, OpenState, PageKey, SegmentState};
use parking_lot::{Mutex, RwLock};

use crate::api::{
    GetPage, GetStatus, LentPage, MissReason, NamespaceId, OpenOptions, PageStore, PutOptions,
    PutPage, PutStatus, Refusal, Stats,
};
use crate::catalog::{Catalog, SegmentMap};
use crate::core::{Config, Core};
use crate::disk::probe::open_disk;
use crate::disk::{Disk, DiskOptions, Piece};
use crate::error::StoreError;
use crate::index::Index;
use crate::memory::AlignedBuf;
use crate::recovery::{Recovery, recover};
use crate::volume::{Access, Volumes, this_holder};
use hang::Hangs;
use keeper::Keeper;
use local::Local;

/// How long a close waits for what is under way. Longer only when the device hangs; then the store is left as after a crash.
const CLOSE_PATIENCE: Duration = Duration::from_secs(30);

/// What moves page data: everything a handle needs besides its catalog.
pub(crate) struct DataPath {
    disk: Arc<dyn Disk>,
    hangs: Arc<Hangs>,
    /// Reads segment headers again after each read: for handles that hold no lock.
    recheck: Option<Recheck>,
    counters: Counters,
}

/// What a handle without the lock compares a segment's header with.
struct Recheck {
    spots: Vec<crate::recovery::scan::Spot>,
    sequences: Vec<larder_format::Serial>,
}

#[derive(Default)]
struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    refused: AtomicU64,
    bytes_read: AtomicU64,
    direct_pages: AtomicU64,
    bounced_pages: AtomicU64,
}

impl Counters {
    fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }
}

/// An open store.
///
/// Dropping it without [`PageStore::close`] is safe: the next open recovers as after a crash.
pub struct Store {
    local: Arc<Local>,
    data: DataPath,
    volumes: Mutex<Volumes>,
    keeper: Mutex<Option<Keeper>>,
    /// Read-held by every call, so that a close finds none under way; true once closed.
    gate: RwLock<bool>,
    read_only: bool,
    capacity_bytes: u64,
    unproven: u64,
}

impl Store {
    /// Opens the store whose first volume is at `path`.
    ///
    /// # Errors
    /// See [`StoreError`]: each says what is wrong, where, and what to do.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Store, StoreError> {
        Store::open_through(path, options, |disk| disk)
    }

    /// Opens a store over what `through` makes of its disk: one that watches it, or that fails where a test wants it to.
    ///
    /// # Errors
    /// As [`Store::open`].
    #[expect(
        clippy::needless_pass_by_value,
        reason = "options are made for one call"
    )]
    pub fn open_through(
        path: &Path,
        options: OpenOptions,
        through: impl FnOnce(Arc<dyn Disk>) -> Arc<dyn Disk>,
    ) -> Result<Store, StoreError> {
        let access = if options.read_only {
            Access::ReadOnly
        } else {
            Access::Exclusive
        };
        let mut volumes = Volumes::open(path, &options.volumes, access, options.degraded)?;
        let disk = open_disk(
            DiskOptions {
                files: volumes
                    .list
                    .iter()
                    .map(|v| v.as_ref().map(|v| v.file.clone()))
                    .collect(),
                depth: options.depth.max(1),
            },
            options.disk,
        )?;
        let disk = through(disk);
        let (index, recovery) = match recover_current(disk.as_ref(), &mut volumes, &options) {
            Ok(found) => found,
            Err(error) => {
                disk.shutdown();
                return Err(error);
            }
        };
        for damage in &recovery.damage {
            tracing::warn!(
                volume = damage.volume,
                segment = damage.segment,
                offset = damage.fault.offset,
                "{}",
                damage.fault.reason
            );
        }
        if !options.read_only {
            begin_run(&mut volumes, &recovery)?;
        }
        Store::assemble(volumes, disk, index, recovery, &options)
    }

    fn assemble(
        volumes: Volumes,
        disk: Arc<dyn Disk>,
        index: Arc<Index>,
        recovery: Recovery,
        options: &OpenOptions,
    ) -> Result<Store, StoreError> {
        let superblock = volumes.superblock();
        let config = Config {
            store: superblock.store,
            segment_blocks: superblock.segment_blocks,
            sync: options.sync,
            write_bytes_max: options.write_bytes_max,
            read_only: options.read_only,
        };
        let recheck = options.read_only.then(|| Recheck {
            spots: crate::recovery::spots_of(superblock),
            sequences: recovery
                .recovered
                .segments
                .iter()
                .map(|segment| segment.sequence)
                .collect(),
        });
        let capacity_bytes = capacity(&volumes)?;
        if let Some((_, volume)) = volumes.present().find(|(_, volume)| !volume.direct) {
            tracing::warn!(
                "{}: the filesystem does not honour O_DIRECT; reads and writes go through the page cache and cost far more CPU",
                volume.path.display()
            );
        }
        let unproven = recovery.unproven;
        let map = SegmentMap::new(&recovery.recovered.volumes, config.segment_blocks);
        let core = Core::new(config, recovery.recovered, index.clone());
        let local = Local::new(core, index, disk.clone(), map, options.lease);
        let keeper = if options.read_only {
            None
        } else {
            Some(Keeper::start(local.clone(), volumes.superblock())?)
        };
        let hangs = Arc::new(Hangs::new(volumes.list.len(), options.hang_limit));
        let data = DataPath {
            disk,
            hangs,
            recheck,
            counters: Counters::default(),
        };
        Ok(Store {
            local,
            data,
            volumes: Mutex::new(volumes),
            keeper: Mutex::new(keeper),
            gate: RwLock::new(false),
            read_only: options.read_only,
            capacity_bytes,
            unproven,
        })
    }

    /// The namespaces whose full records the store holds.
    #[must_use]
    pub fn namespaces(&self) -> Vec<Namespace> {
        self.local
            .with_core(|core| core.namespaces().cloned().collect())
    }

    /// The disk under the store: to register memory with, or to measure.
    #[must_use]
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.data.disk
    }

    /// Tells the kernel of memory that pages are read into and written from again and again, so that transfers need not look
    /// its pages up each time; gives the memory back, and what came of it as a sentence. Reads of 128 KiB gain up to a seventh
    /// in speed. Without enough lockable memory it changes nothing.
    pub fn register(&self, memory: &'static mut [u8]) -> (&'static mut [u8], String) {
        let piece = Piece {
            ptr: memory.as_mut_ptr(),
            len: memory.len(),
        };
        // SAFETY: the memory is borrowed for the rest of the process, so it stays mapped longer than any disk lives.
        let outcome = unsafe { self.data.disk.register(&[piece]) };
        tracing::info!("{outcome}");
        (memory, outcome)
    }

    /// Checks what must always hold between index and space; for tests.
    ///
    /// # Errors
    /// The first invariant found broken.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.local.with_core(|core| core.check_invariants())
    }

    fn close_once(&self) -> Result<(), StoreError> {
        if let Some(keeper) = self.keeper.lock().take() {
            keeper.stop();
        }
        let mut volumes = self.volumes.lock();
        let closed = if self.read_only {
            Ok(())
        } else {
            self.local.with_core(Core::write_evictions);
            self.local
                .flush()
                .and_then(|()| self.mark_clean(&mut volumes))
        };
        self.data.disk.shutdown();
        // The disk has answered for everything: nothing of this opening can reach the volumes any more.
        for volume in volumes.list.iter_mut().filter_map(Option::take) {
            volume.unlock();
        }
        closed
    }

    /// Leaves the store so that the next open need not look for what a crash may have left.
    fn mark_clean(&self, volumes: &mut Volumes) -> Result<(), StoreError> {
        let until = Instant::now() + CLOSE_PATIENCE;
        // What settles after the first flush (segments being sealed, their syncs) is covered by the second, and that fails
        // while anything is in doubt.
        for _ in 0..2 {
            if !self.local.wait_until_idle(until) {
                return Err(StoreError::WriteFailed(
                    "the device did not finish what was under way".to_owned(),
                ));
            }
            self.local.flush()?;
        }
        let headers = self
            .local
            .with_core(Core::closing_headers)
            .map_err(|e| StoreError::io("closing", Path::new("memory"), e))?;
        for (index, offset, bytes) in &headers {
            if let Some(Some(volume)) = volumes.list.get(*index) {
                volume.write(*offset, bytes)?;
            }
        }
        for (_, volume) in volumes.present() {
            volume.sync()?;
        }
        volumes.update(|superblock| superblock.state = OpenState::Clean)
    }
}

/// Recovers; leaves out, or refuses, volumes that have not seen the store's last run.
fn recover_current(
    disk: &dyn Disk,
    volumes: &mut Volumes,
    options: &OpenOptions,
) -> Result<(Arc<Index>, Recovery), StoreError> {
    loop {
        let superblock = volumes.superblock();
        let segments: u64 = superblock
            .volumes
            .iter()
            .map(|entry| u64::from(entry.segments))
            .sum();
        let blocks = segments * u64::from(superblock.segment_blocks);
        let index = Arc::new(Index::new(
            usize::try_from(segments).unwrap_or(usize::MAX),
            blocks,
        ));
        let recovery = recover(disk, &volumes.superblocks(), &index, options.read_only);
        // A crash while an open was telling the volumes its run leaves some behind, but writes nothing in that run. If something was
        // written in it, a volume that does not know the run is an old copy.
        let newest = volumes.newest_run();
        if newest.max(recovery.highest_run).next().is_none() && !options.read_only {
            return Err(StoreError::RunsExhausted(volumes.first_path()));
        }
        let behind = volumes
            .older_than(newest)
            .filter(|_| recovery.highest_run >= newest);
        let Some(behind) = behind else {
            return Ok((index, recovery));
        };
        let at = volumes
            .present()
            .find(|(_, volume)| volume.path == behind.path)
            .map(|(index, _)| index);
        match at {
            Some(at) if options.degraded && at > 0 => volumes.list[at] = None,
            _ => {
                return Err(StoreError::VolumeStale {
                    path: behind.path.clone(),
                    run: behind.superblock.run.get(),
                    newest: newest.get(),
                });
            }
        }
    }
}

/// Tells every volume of the run that begins, then writes the headers that recovery asked for.
fn begin_run(volumes: &mut Volumes, recovery: &Recovery) -> Result<(), StoreError> {
    let run = recovery.recovered.first.run();
    volumes.update(|superblock| {
        superblock.run = run;
        superblock.state = OpenState::Open;
        superblock.holder = this_holder();
    })?;
    let superblock = volumes.superblock();
    let segment_bytes = u64::from(superblock.segment_blocks) * BLOCK_BYTES as u64;
    for (index, header) in &recovery.adoptions {
        debug_assert_eq!(header.state, SegmentState::Sealed);
        let Some(Some(volume)) = volumes.list.get(*index) else {
            continue;
        };
        let mut bytes = AlignedBuf::zeroed(2 * BLOCK_BYTES)
            .map_err(|e| StoreError::io("opening", &volume.path, e))?;
        for copy in bytes.chunks_exact_mut(BLOCK_BYTES) {
            if let Ok(copy) = copy.try_into() {
                header.encode(copy);
            }
        }
        volume.write(
            larder_format::SEGMENTS_OFFSET + u64::from(header.segment.0) * segment_bytes,
            &bytes,
        )?;
    }
    Ok(())
}

fn capacity(volumes: &Volumes) -> Result<u64, StoreError> {
    let mut bytes = 0;
    for (_, volume) in volumes.present() {
        let end = rustix::fs::seek(&*volume.file, rustix::fs::SeekFrom::End(0));
        bytes += end.map_err(|e| StoreError::io("measuring the volume", &volume.path, e))?;
    }
    Ok(bytes)
}

impl PageStore for Store {
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, StoreError> {
        let gate = self.gate.read();
        if *gate {
            return Err(StoreError::Closed);
        }
        self.local.namespace(namespace)
    }

    fn put(
        &self,
        namespace: NamespaceId,
        pages: &[PutPage<'_>],
        options: PutOptions,
    ) -> Vec<PutStatus> {
        let gate = self.gate.read();
        if *gate || self.read_only {
            let why = if self.read_only {
                Refusal::ReadOnly
            } else {
                Refusal::Closed
            };
            return vec![PutStatus::Refused(why); pages.len()];
        }
        put::put(&*self.local, &self.data, namespace, pages, options)
    }

    fn get(
        &self,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
    ) -> Vec<GetStatus> {
        let gate = self.gate.read();
        if *gate {
            return vec![GetStatus::Miss(MissReason::Closed); pages.len()];
        }
        get::get(&*self.local, &self.data, namespace, pages, deadline)
    }

    fn get_lent(
        &self,
        namespace: NamespaceId,
        keys: &[PageKey],
        deadline: Option<Instant>,
    ) -> Vec<Result<LentPage, MissReason>> {
        let gate = self.gate.read();
        if *gate {
            return keys.iter().map(|_| Err(MissReason::Closed)).collect();
        }
        get::get_lent(&self.local, &self.data, namespace, keys, deadline)
    }

    fn longest_prefix(&self, namespace: NamespaceId, keys: &[PageKey]) -> usize {
        let gate = self.gate.read();
        if *gate {
            return 0;
        }
        self.local.longest_prefix(namespace, keys)
    }

    fn contains(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool> {
        let gate = self.gate.read();
        if *gate {
            return vec![false; keys.len()];
        }
        self.local.contains(namespace, keys)
    }

    fn touch(&self, namespace: NamespaceId, keys: &[PageKey]) {
        self.local.touch(namespace, keys);
    }

    fn delete(&self, namespace: NamespaceId, keys: &[PageKey]) -> Result<u64, StoreError> {
        let gate = self.gate.read();
        self.writable(*gate)?;
        self.local.delete(namespace, keys)
    }

    fn clear_namespace(&self, namespace: NamespaceId) -> Result<u64, StoreError> {
        let gate = self.gate.read();
        self.writable(*gate)?;
        self.local.clear_namespace(namespace)
    }

    fn flush(&self) -> Result<(), StoreError> {
        let gate = self.gate.read();
        self.writable(*gate)?;
        self.local.flush()
    }

    fn stats(&self) -> Stats {
        let mut stats = self.local.stats();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        stats.hits = count(&self.data.counters.hits);
        stats.misses = count(&self.data.counters.misses);
        stats.refused = count(&self.data.counters.refused);
        stats.bytes_read = count(&self.data.counters.bytes_read);
        stats.direct_pages = count(&self.data.counters.direct_pages);
        stats.bounced_pages = count(&self.data.counters.bounced_pages);
        stats.capacity_bytes = self.capacity_bytes;
        stats.unproven = self.unproven;
        let choice = self.data.disk.choice();
        stats.disk = format!("{}: {}", choice.kind, choice.reason);
        stats
    }

    fn close(&self) -> Result<(), StoreError> {
        let mut gate = self.gate.write();
        if std::mem::replace(&mut *gate, true) {
            return Ok(());
        }
        self.close_once()
    }
}

impl Store {
    fn writable(&self, closed: bool) -> Result<(), StoreError> {
        if closed {
            Err(StoreError::Closed)
        } else if self.read_only {
            Err(StoreError::ReadOnly)
        } else {
            Ok(())
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.lock().take() {
            keeper.stop();
        }
        self.data.disk.shutdown();
    }
}
