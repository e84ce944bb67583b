//! The interface for callers: the [`PageStore`] trait, its arguments and its results.
//!
//! Every call may be made from any thread. `put` and `get` block the calling thread while the
//! device works for it. Lookups never touch the device. Each page of a batch gets a status of its
//! own: one bad page does not affect the others.

mod count;
mod options;
mod stats;
mod write_budget;

use larder_base::planted;
use larder_core::hint::{Class, Hint};
use larder_core::status::{GetStatus, PutStatus};
use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_base::runtime::Instant;
use larder_format::{Namespace, PageKey};

use crate::error::StoreError;
pub use count::Count;
pub use options::{DiskWrapper, OpenOptions, Settings, SharedReads, speaking};
pub use stats::{ReadOnlyVolume, Stats};
pub use write_budget::WriteBudget;

/// A page store: a [`Store`](crate::share::Store), or another crate's own.
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
    ) -> Vec<PutStatus> {
        self.put_recallable(namespace, pages, options, None)
    }

    /// As [`put`](Self::put), but another thread may give it up while it waits: see [`Recall`].
    fn put_recallable(
        &self,
        namespace: NamespaceId,
        pages: &[PutPage<'_>],
        options: PutOptions,
        recall: Option<&Recall>,
    ) -> Vec<PutStatus>;

    /// Reads pages into the caller's memory; one status a page, in order. The contents of the parts
    /// of a page that is not a [`GetStatus::Hit`] are unspecified. After `deadline` no further read
    /// is started; the call returns when the device has finished the reads already started.
    fn get(
        &self,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
    ) -> Vec<GetStatus>;

    /// As [`get`](Self::get), for a copy or a check instead of a request: the pages count neither
    /// as hits nor as misses.
    fn get_uncounted(
        &self,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
    ) -> Vec<GetStatus> {
        self.get(namespace, pages, deadline)
    }

    /// Counts for the metrics. A store without counters ignores it.
    fn count(&self, _namespace: NamespaceId, _count: Count) {}

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
    /// The caller's knowledge of the pages, for policies. It applies to stored pages too.
    pub hint: Hint,
    /// When pages were made that come back from an archive or a remote, in seconds since 1970: an
    /// encrypted store refuses those of a tenant that it has erased since.
    #[doc(hidden)]
    pub made_unix_s: Option<u64>,
}

impl PutOptions {
    /// The defaults, with a [`PutOptions::wait`].
    #[must_use]
    pub const fn waiting(wait: Duration) -> PutOptions {
        let hint = Hint::new(Class::UNKNOWN);
        PutOptions {
            wait,
            hint,
            made_unix_s: None,
        }
    }

    /// These options, for pages that were made at this time, and come back from elsewhere.
    #[doc(hidden)]
    #[must_use]
    pub const fn made_at(self, unix_s: u64) -> PutOptions {
        PutOptions {
            made_unix_s: Some(unix_s),
            ..self
        }
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
pub struct Reading<'a>(&'a Recall);

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
    #[must_use]
    pub fn read(&self) -> Option<Reading<'_>> {
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
