//! The data path of a handle, and the counters of its calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_base::latency::{DeviceLatencies, Latency};
use larder_disk::{Disk, Pacing, Piece};
use larder_format::PageKey;

use super::hang::Hangs;
use super::notices::Notices;
use super::recheck::Recheck;
use crate::api::Stats;
use crate::catalog::Catalog;
use crate::counts::Counts;
use crate::error::StoreError;
use crate::spaces::SpaceCounters;
use crate::totals::{Latencies, Measures};
use crate::volume::Volumes;

/// The data path: everything that a handle needs besides its catalog.
pub struct DataPath {
    pub(super) disk: Arc<dyn Disk>,
    device: Arc<DeviceLatencies>,
    pub(super) pacing: Arc<Pacing>,
    pub(super) hangs: Arc<Hangs>,
    /// Reads segment headers again after each read: for handles that hold no lock.
    pub(super) recheck: Option<Recheck>,
    pub(super) counters: Counters,
    pub(super) notices: Notices,
}

#[derive(Default)]
pub(super) struct Counters {
    pub(super) reads: SpaceCounters,
    pub(super) pages_put: AtomicU64,
    pub(super) bytes_put: AtomicU64,
    pub(super) duplicates: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) refused_read_only: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) bytes_read: AtomicU64,
    pub(super) direct_pages: AtomicU64,
    pub(super) bounced_pages: AtomicU64,
    pub(super) staged_pages: AtomicU64,
    slow: AtomicU64,
    unmeasured: AtomicU64,
    pub(super) puts: Latency,
    pub(super) gets: Latency,
    pub(super) lookups: Latency,
    pub(super) flushes: Latency,
}

impl DataPath {
    pub(crate) fn new(disk: Arc<dyn Disk>, volumes: &Volumes, hang_limit: Duration) -> DataPath {
        DataPath {
            disk,
            device: volumes.latencies.clone(),
            pacing: volumes.pacing.clone(),
            hangs: Arc::new(Hangs::new(volumes.list.len(), hang_limit)),
            recheck: None,
            counters: Counters::default(),
            notices: Notices::default(),
        }
    }

    /// See `PageStore::register`.
    pub(crate) fn register(&self, memory: &'static mut [u8]) -> (&'static mut [u8], String) {
        let piece = Piece {
            ptr: memory.as_mut_ptr(),
            len: memory.len(),
        };
        // SAFETY: the memory is borrowed for the rest of the process, so it stays mapped longer
        // than any disk exists.
        let outcome = unsafe { self.disk.register(&[piece]) };
        tracing::info!("{outcome}");
        (memory, outcome)
    }

    /// See `PageStore::longest_prefix`.
    pub(crate) fn longest_prefix<C: Catalog + ?Sized>(
        &self,
        catalog: &C,
        namespace: NamespaceId,
        keys: &[PageKey],
    ) -> usize {
        let _timed = self.counters.lookups.sampled();
        catalog.longest_prefix(namespace, keys)
    }

    /// See `PageStore::contains`.
    pub(crate) fn contains<C: Catalog + ?Sized>(
        &self,
        catalog: &C,
        namespace: NamespaceId,
        keys: &[PageKey],
    ) -> Vec<bool> {
        let _timed = self.counters.lookups.sampled();
        catalog.contains(namespace, keys)
    }

    /// Flushes `catalog`: see `PageStore::flush`.
    pub(crate) fn flush<C: Catalog + ?Sized>(&self, catalog: &C) -> Result<(), StoreError> {
        let _timed = self.counters.flushes.timed();
        catalog.flush()
    }

    /// The times of calls and device operations of this process, and its reads by namespace.
    pub(crate) fn measures(&self) -> Measures {
        let latencies = Latencies {
            lookup: self.counters.lookups.buckets(),
            get: self.counters.gets.buckets(),
            put: self.counters.puts.buckets(),
            flush: self.counters.flushes.buckets(),
            device_read: self.device.reads.buckets(),
            device_write: self.device.writes.buckets(),
            device_sync: self.device.syncs.buckets(),
        };
        Measures {
            latencies,
            spaces: self.counters.reads.read(),
        }
    }

    /// The disk of this process.
    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// Counters of the calls on this data path.
    pub(crate) fn counts(&self) -> Counts {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let reads = self.counters.reads.total();
        Counts {
            hits: reads.hits,
            misses: reads.misses,
            bytes_read: count(&self.counters.bytes_read),
            pages_put: count(&self.counters.pages_put),
            bytes_put: count(&self.counters.bytes_put),
            duplicates: count(&self.counters.duplicates),
            refused: count(&self.counters.refused),
            failed: count(&self.counters.failed),
            slow: count(&self.counters.slow),
            unmeasured: count(&self.counters.unmeasured),
        }
    }

    /// See [`Store::count_unread`](crate::share::Store::count_unread).
    pub(crate) fn count_unread(&self, slow: u64, unmeasured: u64) {
        self.counters.slow.fetch_add(slow, Ordering::Relaxed);
        self.counters
            .unmeasured
            .fetch_add(unmeasured, Ordering::Relaxed);
    }

    /// Adds this data path's counters.
    pub(crate) fn count_into(&self, stats: &mut Stats) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let reads = self.counters.reads.total();
        stats.hits = reads.hits;
        stats.misses = reads.misses.total();
        stats.refused = count(&self.counters.refused);
        stats.refused_read_only = count(&self.counters.refused_read_only);
        stats.bytes_read = count(&self.counters.bytes_read);
        stats.direct_pages = count(&self.counters.direct_pages);
        stats.bounced_pages = count(&self.counters.bounced_pages);
        stats.staged_pages = count(&self.counters.staged_pages);
        let choice = self.disk.choice();
        stats.disk = format!("{}: {}", choice.kind, choice.reason);
        stats.device_read_latency = self.device.reads.summary();
        stats.device_write_latency = self.device.writes.summary();
        stats.device_sync_latency = self.device.syncs.summary();
        stats.put_latency = self.counters.puts.summary();
        stats.get_latency = self.counters.gets.summary();
        stats.lookup_latency = self.counters.lookups.summary();
        let paced = self.pacing.paced();
        stats.pacing = paced.state;
        stats.paced_writes = paced.writes;
        stats.paced_bytes = paced.bytes;
        stats.paced_rate = paced.rate;
        stats.read_slowdown = paced.read_slowdown;
        stats.put_wait_latency = paced.waits;
    }
}

impl Drop for DataPath {
    fn drop(&mut self) {
        self.disk.shutdown();
    }
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }
}
