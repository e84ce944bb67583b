//! The interface for callers: the [`PageStore`] trait, its arguments and its results.
//!
//! Every call may be made from any thread. `put` and `get` block the calling thread while the
//! device works for it. Lookups never touch the device. Each page of a batch gets a status of its
//! own: one bad page does not affect the others.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::time::Duration;

use larder_format::{BLOCK_BYTES, HEADER_BLOCKS, Namespace, PageKey, PageShape};
use serde::{Deserialize, Serialize};

use crate::capacity::footprint;
use crate::disk::Disk;
use crate::disk::probe::Want;
use crate::error::StoreError;
use crate::hint::{Class, Hint};
use crate::index::NamespaceSlot;
use crate::latency::LatencySummary;
use crate::memory::AlignedBuf;
use crate::planted;
use crate::policy::{AdmissionPolicy, EvictionPolicy, PolicyMaker};
use crate::runtime::Instant;
use crate::share::protocol::Protocol;

/// A namespace of an open store. Not stored, and not valid after a reopen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NamespaceId(pub(crate) u16);

impl NamespaceId {
    /// For implementations of [`PageStore`], which number their namespaces as they like.
    #[must_use]
    pub const fn new(number: u16) -> NamespaceId {
        NamespaceId(number)
    }

    /// The number given to [`NamespaceId::new`].
    #[must_use]
    pub const fn number(self) -> u16 {
        self.0
    }
}

impl From<NamespaceId> for NamespaceSlot {
    fn from(id: NamespaceId) -> NamespaceSlot {
        NamespaceSlot(id.0)
    }
}

/// A page store: a [`Store`](crate::Store), or another crate's own.
pub trait PageStore: Send + Sync {
    /// Registers the namespace for later calls. Pages of different namespaces never mix.
    ///
    /// # Errors
    /// When the store cannot hold another namespace or is closed.
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, StoreError>;

    /// Stores pages; one status a page, in order. Pages of one chain should come in chain order:
    /// pages that cannot be admitted are refused from the tail. The parts are only read, and not
    /// after the call returns.
    fn put(
        &self,
        namespace: NamespaceId,
        pages: &[PutPage<'_>],
        options: PutOptions,
    ) -> Vec<PutStatus>;

    /// As [`put`](Self::put), but another thread may give it up while it waits: see [`Recall`].
    ///
    /// By default it is given up only before it begins.
    fn put_until_recalled(
        &self,
        namespace: NamespaceId,
        pages: &[PutPage<'_>],
        options: PutOptions,
        recall: &Recall,
    ) -> Vec<PutStatus> {
        let Some(_reading) = recall.read() else {
            return vec![PutStatus::Failed(PutFailure::Write); pages.len()];
        };
        self.put(namespace, pages, options)
    }

    /// Reads pages into the caller's memory; one status a page, in order. The contents of the parts
    /// of a page that is not a [`GetStatus::Hit`] are unspecified. After `deadline` no further read
    /// is started; the call returns when the device has finished the reads already started.
    fn get(
        &self,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
    ) -> Vec<GetStatus>;

    /// Reads pages into memory lent by the engine. Returns at `deadline` at the latest: pages still
    /// being read then are misses, and the engine keeps their memory.
    fn get_lent(
        &self,
        namespace: NamespaceId,
        keys: &[PageKey],
        deadline: Option<Instant>,
    ) -> Vec<Result<LentPage, MissReason>>;

    /// The number of `keys`, a chain from its head, that are stored without a gap from the first.
    /// Answered from RAM. Confirmed pages are leased: they stay for a short time, for the `get`
    /// that follows.
    fn longest_prefix(&self, namespace: NamespaceId, keys: &[PageKey]) -> usize;

    /// For each of `keys` whether it is stored. Answered from RAM; confirmed pages are leased.
    fn contains(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool>;

    /// Marks these pages as used (a hit in a tier above), so that they stay. A hint replaces the
    /// hints that they have; an empty one does not.
    fn touch(&self, namespace: NamespaceId, keys: &[PageKey], hint: Hint);

    /// Deletes pages and returns how many were there. They stay deleted after a crash.
    ///
    /// # Errors
    /// When the deletion could not be recorded.
    fn delete(&self, namespace: NamespaceId, keys: &[PageKey]) -> Result<u64, StoreError>;

    /// Deletes every page of a namespace and returns their number.
    ///
    /// # Errors
    /// When the deletion could not be recorded.
    fn clear_namespace(&self, namespace: NamespaceId) -> Result<u64, StoreError>;

    /// Returns when every page stored or deleted before the call survives a power loss.
    ///
    /// # Errors
    /// When a sync failed, until each page that it may have lost is rewritten or forgotten.
    fn flush(&self) -> Result<(), StoreError>;

    /// Registers memory with the kernel that is used for many reads and writes, so that transfers
    /// need not look up its pages each time. Returns the memory, and the result as a sentence.
    /// Reads of 128 KiB gain up to a seventh in speed. Without enough lockable memory it changes
    /// nothing.
    fn register(&self, memory: &'static mut [u8]) -> (&'static mut [u8], String);

    /// Counters and sizes at this moment.
    fn stats(&self) -> Stats;

    /// Finishes the calls in progress, makes everything durable and marks the store as cleanly
    /// closed. Idempotent. Later puts are refused, later gets miss.
    ///
    /// # Errors
    /// When something could not be made durable: the next open recovers as after a crash.
    fn close(&self) -> Result<(), StoreError>;
}

/// A page to store.
#[derive(Clone, Copy)]
pub struct PutPage<'a> {
    /// The page's key.
    pub key: PageKey,
    /// The key before it in its chain, if the caller knows it.
    pub parent: Option<PageKey>,
    /// Number of pages before it in its chain.
    pub depth: u32,
    /// The page's parts, with the lengths in the namespace's shape.
    pub parts: &'a [IoSlice<'a>],
}

/// A page to read.
pub struct GetPage<'b, 'a> {
    /// The page's key.
    pub key: PageKey,
    /// The destination of its parts, with the lengths in the namespace's shape.
    pub parts: &'b mut [IoSliceMut<'a>],
}

/// Options of a put.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct PutOptions {
    /// How long a page that cannot be admitted at once may wait for space, for writes in flight to
    /// end, or for the next owner of a shared store. Zero, the default, refuses it at once.
    pub wait: Duration,
    /// What the caller knows of the pages, for policies. Also for those of them that are stored.
    pub hint: Hint,
}

impl PutOptions {
    /// The defaults, with a [`PutOptions::wait`].
    #[must_use]
    pub const fn waiting(wait: Duration) -> PutOptions {
        let hint = Hint::new(Class::UNKNOWN);
        PutOptions { wait, hint }
    }

    /// These options, with a [`PutOptions::hint`].
    #[must_use]
    pub const fn hinting(self, hint: Hint) -> PutOptions {
        PutOptions { hint, ..self }
    }
}

/// Gives up a put that waits for the device or for another process. It serves one put at a time.
///
/// A put keeps its caller's memory until the device is done with it. From the recall on it reads
/// none of it any more; the device may until the put returns, so the memory stays mapped, but its
/// bytes may change: a page whose write had not succeeded by then is never stored.
#[derive(Debug, Default)]
pub struct Recall(AtomicU8);

/// A put that reads its caller's memory.
#[derive(Debug)]
#[must_use]
pub(crate) struct Reading<'a>(&'a Recall);

impl Recall {
    const WAITS: u8 = 0;
    const READS: u8 = 1;
    const RECALLED: u8 = 2;

    /// Recalls the put. False while it reads the caller's memory, which takes no longer than it
    /// takes to sum up some megabytes: then nothing has changed.
    #[must_use]
    pub fn recall(&self) -> bool {
        let former = self
            .0
            .compare_exchange(Self::WAITS, Self::RECALLED, AcqRel, Acquire);
        former != Err(Self::READS) || planted!(HastyRecall)
    }

    /// Whether the put was recalled.
    pub(crate) fn is_recalled(&self) -> bool {
        self.0.load(Acquire) == Self::RECALLED
    }

    /// Prevents a recall for as long as the result lives; `None` after one.
    pub(crate) fn read(&self) -> Option<Reading<'_>> {
        self.0
            .compare_exchange(Self::WAITS, Self::READS, AcqRel, Acquire)
            .ok()
            .map(|_| Reading(self))
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.0.store(Recall::WAITS, Release);
    }
}

/// The result of a put for one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PutStatus {
    /// Stored now.
    Stored,
    /// Stored before, and as durable as the sync policy requires.
    Duplicate,
    /// Not admitted; nothing was written.
    Refused(Refusal),
    /// Written, but not successfully.
    Failed(PutFailure),
}

impl PutStatus {
    /// Whether the page is in the store now.
    #[must_use]
    pub fn is_present(self) -> bool {
        matches!(self, PutStatus::Stored | PutStatus::Duplicate)
    }
}

/// Why a page was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// No room now: reclaim has not caught up, or everything is leased.
    NoSpace,
    /// Too many bytes of writes are in flight.
    Busy,
    /// Its parts do not have the namespace's shape.
    WrongShape,
    /// The page does not fit a segment of this store.
    TooLarge,
    /// The page and its ancestors are more than the store keeps. No page is evicted for it: without
    /// all its ancestors no lookup would find it.
    Unreachable,
    /// The store was opened read-only.
    ReadOnly,
    /// The store is closed, or a volume has failed for good.
    Closed,
    /// The serial numbers of the store's epoch are used up: reopen it.
    Exhausted,
    /// Every volume is in read-only service: its device refuses writes.
    ReadOnlyService,
    /// The policy of admission does not take it, or a page before it in the call.
    NotAdmitted,
}

/// Why a page could not be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PutFailure {
    /// The device failed the write, and the retry in another segment. Or its segment failed for
    /// another reason: another write, or a client that was given up.
    Write,
    /// The device failed the sync that this put waited for.
    Sync,
}

/// The result of a get for one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GetStatus {
    /// Its bytes are in the caller's memory, whole and verified.
    Hit,
    /// The page was not read.
    Miss(MissReason),
}

impl GetStatus {
    /// Whether the page was read.
    #[must_use]
    pub fn is_hit(self) -> bool {
        self == GetStatus::Hit
    }
}

/// Why a page was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissReason {
    /// Not in the store.
    Absent,
    /// Its bytes failed their checksum; the page is forgotten.
    Damaged,
    /// Its write was in progress at the last crash and never finished; the page is forgotten.
    Unfinished,
    /// The device failed the read; the page is forgotten.
    ReadError,
    /// The deadline passed first.
    Deadline,
    /// The volume has not answered for longer than the hang limit.
    Hung,
    /// The page's segment was reused while a read-only handle read it.
    Stale,
    /// The parts do not have the namespace's shape.
    WrongShape,
    /// The store is closed.
    Closed,
}

impl fmt::Display for MissReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MissReason::Absent => "absent",
            MissReason::Damaged => "damaged",
            MissReason::Unfinished => "unfinished",
            MissReason::ReadError => "read error",
            MissReason::Deadline => "deadline",
            MissReason::Hung => "hung",
            MissReason::Stale => "stale",
            MissReason::WrongShape => "wrong shape",
            MissReason::Closed => "closed",
        })
    }
}

/// A page in a buffer of its own. The parts follow one another, each padded to a multiple of 4 KiB,
/// so the buffer is one run of blocks for a device.
pub struct LentPage {
    pub(crate) memory: AlignedBuf,
    pub(crate) shape: PageShape,
}

impl LentPage {
    /// A page of zeros: a buffer for [`PageStore::get`] and [`PageStore::put`], or the result of
    /// [`PageStore::get_lent`] in a store of another crate.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn zeroed(shape: PageShape) -> io::Result<LentPage> {
        let bytes = shape.page_blocks() as usize * BLOCK_BYTES;
        let memory = AlignedBuf::zeroed(bytes)?;
        Ok(LentPage { memory, shape })
    }

    /// The bytes of part `index`, without padding; `None` when the namespace has no such part.
    #[must_use]
    pub fn part(&self, index: usize) -> Option<&[u8]> {
        let range = self.range(index)?;
        self.memory.get(range)
    }

    /// The parts in order, for a [`PutPage`].
    #[must_use]
    pub fn parts(&self) -> Vec<IoSlice<'_>> {
        let parts = (0..self.shape.parts()).filter_map(|index| self.part(index));
        parts.map(IoSlice::new).collect()
    }

    /// The parts in order, to be written, or for a [`GetPage`].
    #[must_use]
    pub fn parts_mut(&mut self) -> Vec<IoSliceMut<'_>> {
        let mut rest: &mut [u8] = &mut self.memory;
        let mut parts = Vec::with_capacity(self.shape.parts());
        for index in 0..self.shape.parts() {
            let bytes = self.shape.part_bytes(index) as usize;
            let (part, behind) = rest.split_at_mut(bytes.next_multiple_of(BLOCK_BYTES));
            parts.push(IoSliceMut::new(&mut part[..bytes]));
            rest = behind;
        }
        parts
    }

    fn range(&self, index: usize) -> Option<Range<usize>> {
        if index >= self.shape.parts() {
            return None;
        }
        let start = usize::try_from(self.shape.part_offset(index)).ok()?;
        let length = usize::try_from(self.shape.part_bytes(index)).ok()?;
        Some(start..start.checked_add(length)?)
    }
}

/// When a put is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SyncPolicy {
    /// Synced when a segment is sealed and on `flush`.
    Relaxed,
    /// As `Relaxed`, and at the latest this long after the first unsynced write. The default, with
    /// one second.
    Interval(Duration),
    /// Before the put returns.
    Always,
}

impl fmt::Display for SyncPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SyncPolicy::Relaxed => f.write_str("relaxed"),
            SyncPolicy::Interval(interval) => write!(f, "interval of {interval:?}"),
            SyncPolicy::Always => f.write_str("always"),
        }
    }
}

impl Default for SyncPolicy {
    fn default() -> Self {
        SyncPolicy::Interval(Duration::from_secs(1))
    }
}

/// Whether processes that attach to one store share their reads. A page that several of them
/// request at about the same time is then read from the device once, and copied from memory by the
/// others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SharedReads {
    /// In namespaces that all ranks of a tensor-parallel group read alike (`tp` is 0 of 1), while
    /// two processes or more use them.
    #[default]
    Auto,
    /// In every namespace that two processes or more use.
    On,
    /// Never.
    Off,
}

/// A layer over the disk of an open store: for fault injection, accounting or rate limits.
///
/// It receives every read, write and sync of the store's volumes, superblocks included. The
/// exceptions are listed in [`disk`](crate::disk). It may delay an operation, or answer it with an
/// error. It may not change bytes: a read that it answers with success has the bytes of the volume,
/// and a write that it answers with success has reached the volume. The durability of acknowledged
/// pages rests on this rule.
///
/// It forwards every method of [`Disk`], also those with a default.
#[derive(Clone)]
pub struct DiskWrapper(Arc<Wrap>);

type Wrap = dyn Fn(Arc<dyn Disk>) -> Arc<dyn Disk> + Send + Sync;

impl DiskWrapper {
    /// `wrap` makes the layer. Its call comes once for each disk: at an open, and at each change
    /// of a shared store's owner.
    pub fn new(wrap: impl Fn(Arc<dyn Disk>) -> Arc<dyn Disk> + Send + Sync + 'static) -> Self {
        DiskWrapper(Arc::new(wrap))
    }

    pub(crate) fn wrap(&self, disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
        (self.0)(disk)
    }
}

impl fmt::Debug for DiskWrapper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DiskWrapper")
    }
}

/// Options of an open: `OpenOptions::default().with(|o| o.depth = 64)`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenOptions {
    /// The requested disk. By default io_uring, or threads where it is forbidden.
    pub disk: Want,
    /// A layer over that disk. None by default.
    pub disk_wrapper: Option<DiskWrapper>,
    /// Operations of one volume in the kernel at once; 32 by default.
    pub depth: u32,
    /// When puts are durable.
    pub sync: SyncPolicy,
    /// Take no lock and write nothing. Only sealed and proven pages are visible. Off by default.
    pub read_only: bool,
    /// Open without volumes that are missing, for good; their pages are lost. Off by default.
    pub degraded: bool,
    /// How long a lookup protects the pages that it finds; 10 s by default. Such leases cover at
    /// most a quarter of the store: beyond that the oldest end early.
    pub lease: Duration,
    /// A volume that does not answer for this long counts as hung: its pages miss at once. 10 s by
    /// default.
    pub hang_limit: Duration,
    /// Write the blocks of never used segments once, in the background: the first write into a
    /// preallocated file is slower than any later one. It takes a quarter of the device's time at
    /// most, until all are written. Off by default.
    pub prewrite: bool,
    /// Whether writes of puts, reclaim's copies and prewriting give way to reads. On by default.
    /// While calls read, writes get a rate that follows the slow-down of the reads: a tenth of the
    /// device's write speed at least. Otherwise only their bytes in flight are bounded.
    pub pacing: bool,
    /// Most bytes of puts in flight; further pages are refused or wait. 1 GiB by default.
    pub write_bytes_max: u64,
    /// Paths of volumes other than the first, if they differ from the paths stored in the
    /// superblock.
    pub volumes: Vec<PathBuf>,
    /// A group. Processes of its members may be clients of this process, besides those of the user
    /// who owns the store's first volume. Only for [`Store::attach`](crate::Store::attach).
    pub group: Option<u32>,
    /// Own the store as long as the handle is open: an owner without this option is asked for the
    /// ownership, and hands it over in order. Off by default. Only for
    /// [`Store::attach`](crate::Store::attach).
    pub keeps_ownership: bool,
    /// Decides which page is evicted next, and which pages reclaim copies; `None` for the least
    /// recently used. The owner's policy applies.
    pub eviction: Option<PolicyMaker<dyn EvictionPolicy>>,
    /// Decides which new pages are stored; `None` for all. The owner's policy applies.
    pub admission: Option<PolicyMaker<dyn AdmissionPolicy>>,
    /// Whether reads are shared with other processes. Only for
    /// [`Store::attach`](crate::Store::attach). The owner's setting applies to all processes, a
    /// client's setting to its own reads.
    pub shared_reads: SharedReads,
    /// The catalog protocol that this process speaks: that of this release, except in tests.
    pub(crate) protocol: Protocol,
    /// Bytes of the memory for shared reads, while reads are shared; 512 MiB by default. The
    /// owner's setting applies. Memory is taken as it is used.
    pub staging_bytes: u64,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions {
            disk: Want::Auto,
            disk_wrapper: None,
            depth: 32,
            sync: SyncPolicy::default(),
            read_only: false,
            degraded: false,
            lease: Duration::from_secs(10),
            hang_limit: Duration::from_secs(10),
            prewrite: false,
            // A simulated disk has no speed.
            pacing: cfg!(not(feature = "simulated")),
            write_bytes_max: 1 << 30,
            volumes: Vec::new(),
            group: None,
            keeps_ownership: false,
            eviction: None,
            admission: None,
            protocol: Protocol::default(),
            shared_reads: SharedReads::Auto,
            staging_bytes: 512 << 20,
        }
    }
}

/// The settings that the owner of a store decides for all processes that use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[serde(default)]
pub struct Settings {
    /// [`OpenOptions::sync`].
    pub sync: SyncPolicy,
    /// [`OpenOptions::lease`].
    pub lease: Duration,
    /// [`OpenOptions::prewrite`].
    pub prewrite: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        OpenOptions::default().settings()
    }
}

impl OpenOptions {
    /// These options, changed by `change`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// These options, with another catalog protocol than that of this release.
    #[cfg(feature = "internals")]
    #[must_use]
    pub fn speaking(mut self, protocol: Protocol) -> Self {
        self.protocol = protocol;
        self
    }

    /// The settings that apply if this process is the owner.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings {
            sync: self.sync,
            lease: self.lease,
            prewrite: self.prewrite,
        }
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings {
            sync,
            lease,
            prewrite,
        } = self;
        write!(f, "sync {sync}, lease {lease:?}, prewrite {prewrite}")
    }
}

/// Counters since the store was opened, and current sizes. Bytes are bytes on the device unless
/// stated otherwise.
///
/// In the serialised form, a name shows the kind of its count: an action ends in its verb
/// (`pages_moved`), an outcome of pages begins with it (`evicted_pages`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
#[serde(default)]
pub struct Stats {
    /// Pages in the store.
    pub pages: u64,
    /// Bytes of those pages, padding included.
    pub live_bytes: u64,
    /// Most bytes that pages may take at once: the capacity less the needs of descriptors, open
    /// segments and reclaim.
    pub usable_bytes: u64,
    /// The part of the usable bytes that pages take: their own bytes and, if only a few fit a
    /// segment, a share of the segment's unusable end.
    pub taken_bytes: u64,
    /// Bytes of all volumes together.
    pub capacity_bytes: u64,
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// Segments in all.
    pub segments: u64,
    /// Empty segments.
    pub free_segments: u64,
    /// Segments that take pages or are being closed.
    pub open_segments: u64,
    /// Segments that hold pages and take no more.
    pub sealed_segments: u64,
    /// Segments that reclaim empties.
    pub reclaiming_segments: u64,
    /// Segments whose descriptors the device could not read, or whose header it refused to write,
    /// when the store was opened. They are not used until the next open.
    pub unreadable_segments: u64,
    /// Bytes of pages under a lease: of a lookup, or counted.
    pub leased_bytes: u64,
    /// Bytes of blocks that were written before their first use.
    pub prewritten_bytes: u64,
    /// RAM of the index.
    pub index_bytes: u64,
    /// Pages stored by puts.
    pub pages_put: u64,
    /// Pages that puts found already stored.
    #[serde(rename = "duplicate_pages")]
    pub duplicates: u64,
    /// Pages refused.
    #[serde(rename = "refused_pages")]
    pub refused: u64,
    /// Pages refused because every volume was in read-only service; included in the refused pages.
    #[serde(rename = "refused_read_only_pages")]
    pub refused_read_only: u64,
    /// Puts refused for that reason, of all processes that share the store.
    #[serde(rename = "refused_read_only_puts")]
    pub puts_refused_read_only: u64,
    /// Volumes in read-only service now: their pages are served, and their devices refuse writes.
    pub read_only_volumes: Vec<ReadOnlyVolume>,
    /// Pages whose write or sync failed.
    #[serde(rename = "failed_pages")]
    pub failed: u64,
    /// Pages read and verified.
    #[serde(rename = "pages_hit")]
    pub hits: u64,
    /// Pages requested and not stored.
    #[serde(rename = "pages_missed")]
    pub misses: u64,
    /// Pages dropped to make room.
    #[serde(rename = "evicted_pages")]
    pub evicted: u64,
    /// Pages deleted, one by one or with their namespace.
    #[serde(rename = "deleted_pages")]
    pub deleted: u64,
    /// Pages forgotten because their bytes failed the checksum or could not be read.
    #[serde(rename = "damaged_pages")]
    pub damaged: u64,
    /// Pages forgotten because the crash before this open interrupted their writes.
    #[serde(rename = "unfinished_pages")]
    pub unfinished: u64,
    /// Pages moved by reclaim.
    #[serde(rename = "pages_moved")]
    pub moved: u64,
    /// Segments reclaimed.
    #[serde(rename = "freed_segments")]
    pub reclaimed: u64,
    /// Bytes of page data given to puts and written.
    pub bytes_put: u64,
    /// Bytes written to the volumes in all: page data, descriptors, headers, copies.
    pub bytes_written: u64,
    /// Bytes of pages that gets requested from the device.
    pub bytes_read: u64,
    /// Pages moved directly between the device and the caller's memory.
    pub direct_pages: u64,
    /// Pages that went through an aligned copy because their memory or parts were not aligned.
    pub bounced_pages: u64,
    /// Hits whose bytes came through the memory of shared reads, read by this process or another.
    pub staged_pages: u64,
    /// Syncs that succeeded.
    pub syncs: u64,
    /// Syncs that failed.
    pub failed_syncs: u64,
    /// Pages that recovery found and that are not proven yet.
    #[serde(rename = "unproven_pages")]
    pub unproven: u64,
    /// The kind of the disk, and why it was chosen: `kind: reason`.
    pub disk: String,
    /// Reads of this process from the volumes' devices, from the moment they are handed to the
    /// kernel.
    pub device_read_latency: LatencySummary,
    /// Its writes to them.
    pub device_write_latency: LatencySummary,
    /// Its syncs of them.
    pub device_sync_latency: LatencySummary,
    /// To which reads writes of this process give way: `shared` (of all processes that use the
    /// store), `local` (of this process alone), with the reason if there is one, or `off`.
    pub pacing: String,
    /// Writes of this process that were started at a limited rate, beside reads: those of puts,
    /// copies of reclaim, prewriting.
    pub paced_writes: u64,
    /// Their bytes.
    pub paced_bytes: u64,
    /// The present limit of their rate, in bytes per second; 0 while there are no reads.
    pub paced_rate: u64,
    /// The present slow-down of reads by writes, as the ratio of times; 0 if it is not known.
    pub read_slowdown: f64,
    /// Waits of this process's writes of puts for their turn at the device.
    pub put_wait_latency: LatencySummary,
    /// Calls of `put` on this handle, of one page or many, including their waits for room.
    pub put_latency: LatencySummary,
    /// Calls of `get` and `get_lent` on this handle, of one page or many.
    pub get_latency: LatencySummary,
    /// Calls of `longest_prefix` and `contains` on this handle: one in 64 of each thread.
    pub lookup_latency: LatencySummary,
}

/// A volume in read-only service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReadOnlyVolume {
    /// Its path.
    pub path: PathBuf,
    /// The error of the last write that its device refused.
    pub reason: String,
}

impl Stats {
    /// Most pages of this size, in bytes on the device, that the store keeps at once.
    #[must_use]
    pub fn usable_pages(&self, page_bytes: u64) -> u64 {
        self.usable_bytes / self.footprint(page_bytes)
    }

    /// Pages of this size for which there is room now, without an eviction.
    #[must_use]
    pub fn free_pages(&self, page_bytes: u64) -> u64 {
        self.usable_bytes.saturating_sub(self.taken_bytes) / self.footprint(page_bytes)
    }

    /// Usable bytes that a page of this size takes; for a page that fits no segment, more than
    /// there are.
    #[must_use]
    pub fn footprint(&self, page_bytes: u64) -> u64 {
        let blocks =
            |bytes: u64| u32::try_from(bytes.div_ceil(BLOCK_BYTES as u64)).unwrap_or(u32::MAX);
        let (segment, page) = (blocks(self.segment_bytes), blocks(page_bytes).max(1));
        if page >= segment.saturating_sub(HEADER_BLOCKS) {
            return u64::MAX;
        }
        footprint(segment, page) * BLOCK_BYTES as u64
    }

    /// Bytes written to the volumes for each byte put; 1 when nothing was put.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn write_amplification(&self) -> f64 {
        if self.bytes_put == 0 {
            return 1.0;
        }
        self.bytes_written as f64 / self.bytes_put as f64
    }
}
