//! Counters of a handle.

use std::path::PathBuf;

use larder_base::latency::LatencySummary;
use larder_format::{BLOCK_BYTES, HEADER_BLOCKS};
use serde::{Deserialize, Serialize};

use larder_core::capacity::footprint;

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
    /// Pinned pages, which stay until a time.
    pub pinned_pages: u64,
    /// Their bytes, as stored.
    pub pinned_bytes: u64,
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
    /// The order of eviction that is followed now, with the reason if it is not the chosen one:
    /// `lru`, `learned`, `lru: the reason`, or `custom` for a policy of the caller.
    pub eviction: String,
    /// How often it has changed since the store was opened.
    pub eviction_switches: u64,
    /// Pages deleted, one by one or with their namespace.
    #[serde(rename = "deleted_pages")]
    pub deleted: u64,
    /// Pages forgotten because their bytes failed the checksum or could not be read, and pages that
    /// the last clean close counted and that the open did not find.
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
