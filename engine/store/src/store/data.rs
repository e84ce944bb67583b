//! The data path of a handle, and the counters of its calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_base::latency::{DeviceLatencies, Latency};
use larder_core::counters::{Counted, Counts, Latencies, Tally};
use larder_core::status::GetStatus;
use larder_disk::{Board, Disk, Pacing, Piece};
use larder_format::PageKey;

use super::coding::{Decoder, Encoding};
use super::hang::Hangs;
use super::notices::Notices;
use super::recheck::Recheck;
use crate::api::{Count, Stats};
use crate::catalog::Catalog;
use crate::error::StoreError;
use crate::spaces::SpaceCounters;
use crate::totals::Measures;
use crate::volume::Volumes;

/// The data path: everything that a handle needs besides its catalog.
pub struct DataPath {
    pub(crate) disk: Arc<dyn Disk>,
    device: Arc<DeviceLatencies>,
    pub(super) pacing: Arc<Pacing>,
    /// How the volumes answer.
    pub(crate) board: Arc<Board>,
    pub(super) hangs: Arc<Hangs>,
    /// Reads segment headers again after each read: for handles that hold no lock.
    pub(super) recheck: Option<Recheck>,
    pub(super) counters: Counters,
    pub(super) notices: Notices,
    pub(super) encoding: Encoding,
    pub(super) decoder: Decoder,
}

#[derive(Default)]
pub(super) struct Counters {
    pub(super) reads: SpaceCounters,
    pub(super) bytes_read: AtomicU64,
    /// All others of the table.
    pub(super) calls: Tally,
    pub(super) refused_read_only: AtomicU64,
    pub(super) direct_pages: AtomicU64,
    pub(super) bounced_pages: AtomicU64,
    pub(super) staged_pages: AtomicU64,
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
            board: volumes.board.clone(),
            hangs: Arc::new(Hangs::new(volumes.list.len(), hang_limit)),
            recheck: None,
            counters: Counters::default(),
            notices: Notices::default(),
            encoding: Encoding::default(),
            decoder: Decoder::default(),
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
        let mut latencies = Latencies::default();
        latencies.lookup = self.counters.lookups.buckets();
        latencies.get = self.counters.gets.buckets();
        latencies.put = self.counters.puts.buckets();
        latencies.flush = self.counters.flushes.buckets();
        latencies.encode = self.encoding.times.buckets();
        latencies.decode = self.decoder.times.buckets();
        latencies.device_read = self.device.reads.buckets();
        latencies.device_write = self.device.writes.buckets();
        latencies.device_sync = self.device.syncs.buckets();
        Measures {
            latencies,
            spaces: self.counters.reads.read(),
        }
    }

    /// Counters of the calls on this data path.
    pub(crate) fn counts(&self) -> Counts {
        let reads = self.counters.reads.total();
        let mut counts = self.counters.calls.read();
        (counts.hits, counts.misses) = (reads.hits, reads.misses);
        counts.bytes_read = self.counters.bytes_read.load(Ordering::Relaxed);
        counts
    }

    /// Counts the pages of a get of a request.
    pub(crate) fn count_read<C: Catalog + ?Sized>(
        &self,
        catalog: &C,
        namespace: NamespaceId,
        statuses: &[GetStatus],
    ) {
        if let Some(shape) = catalog.shape(namespace) {
            self.counters.reads.count(shape.fingerprint, statuses);
        }
    }

    /// See [`PageStore::count`](crate::api::PageStore::count).
    pub(crate) fn count<C: Catalog + ?Sized>(
        &self,
        catalog: &C,
        namespace: NamespaceId,
        count: Count,
    ) {
        if let Count::Unread { slow, unmeasured } = count {
            let mut counts = Counts::default();
            (counts.slow, counts.unmeasured) = (slow, unmeasured);
            self.counters.calls.add(counts);
        } else if let Some(shape) = catalog.shape(namespace) {
            self.counters.reads.count_tokens(shape.fingerprint, count);
        }
    }

    /// Adds this data path's counters.
    pub(crate) fn count_into(&self, stats: &mut Stats) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts = self.counts();
        stats.hits = counts.hits;
        stats.misses = counts.misses.total();
        stats.refused = counts.refused;
        stats.failed = counts.failed;
        stats.bytes_read = counts.bytes_read;
        stats.refused_read_only = count(&self.counters.refused_read_only);
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
