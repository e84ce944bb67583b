//! The payload checksum: one CRC-64/NVME a page.
//!
//! It covers the namespace's fingerprint (16 bytes), the page's key (32 bytes), and then the page's blocks as they lie
//! on disk: its parts in order, each padded with zeros to a whole block.
//!
//! The name is inside on purpose. A page that is read for a wrong name, whatever the reason (two keys that share the
//! 96 bits which the index keeps, a stale extent that now holds another page, a misdirected read), fails its
//! checksum: a miss, never wrong bytes. With the parts alone, all of these would pass.
//!
//! The padding is inside too, so that `verify` can check a page from its descriptor alone, without its namespace's
//! shape. What it does not defend against is intent: CRC is no signature.

use crc_fast::{CrcAlgorithm, Digest};

use crate::consts::BLOCK_BYTES;
use crate::key::PageKey;
use crate::namespace::Fingerprint;

static ZEROS: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

/// Bytes of memory that a prefetcher follows as one stream: it stops at the end of a page of memory.
const STREAM_BYTES: usize = 4096;

/// Streams that are read side by side.
const STREAMS: usize = 8;

const CACHE_LINE_BYTES: usize = 64;

/// The checksum of a page, part by part. It allocates nothing.
#[derive(Clone, Debug)]
pub struct PageChecksum {
    digest: Digest,
}

impl PageChecksum {
    /// The checksum of a page of this name, before its first part.
    #[must_use]
    pub fn new(namespace: Fingerprint, key: &PageKey) -> PageChecksum {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(namespace.as_bytes());
        digest.update(key.as_bytes());
        PageChecksum { digest }
    }

    /// Adds the next part, whole, without its padding; the padding is added here.
    pub fn part(&mut self, bytes: &[u8]) {
        self.update(bytes);
        let used = bytes.len() % BLOCK_BYTES;
        if used != 0
            && let Some(padding) = ZEROS.get(used..)
        {
            self.digest.update(padding);
        }
    }

    /// Adds whole blocks as they lie on disk, padding included: a part, several, or a piece of one.
    pub fn blocks(&mut self, bytes: &[u8]) {
        debug_assert!(bytes.len().is_multiple_of(BLOCK_BYTES), "not whole blocks");
        self.update(bytes);
    }

    /// The checksum of the page.
    #[must_use]
    pub fn finish(self) -> u64 {
        self.digest.finalize()
    }

    fn update(&mut self, bytes: &[u8]) {
        if !needs_fetching() {
            self.digest.update(bytes);
            return;
        }
        for window in bytes.chunks(STREAMS * STREAM_BYTES) {
            fetch(window);
            self.digest.update(window);
        }
    }
}

/// Whether this processor reads several pages of memory faster than one: Intel's do, and AMD's, told by SSE4a, do not. Measured out of
/// memory, in seconds a GiB, with [`fetch`] and without: 0.073 and 0.097 on a Xeon, 0.066 and 0.035 on an EPYC
/// (`engine/examples/checksum_speed.rs`, 2026-11).
fn needs_fetching() -> bool {
    #[cfg(target_arch = "x86_64")]
    let needs = !std::arch::is_x86_feature_detected!("sse4a");
    #[cfg(not(target_arch = "x86_64"))]
    let needs = false;
    needs
}

/// Brings memory into the cache.
///
/// A page that the device has just brought lies in DRAM, and there a checksum waits for memory: front to back, one core
/// gets a fraction of what it could. The prefetcher between its L2 and memory follows many streams at once, but only one in
/// each 4 KiB page (Intel 64 and IA-32 Architectures Optimization Reference Manual, "Data Prefetching to the L2 and last
/// level cache"), so several pages are touched in turn, a line of each. The sum then runs out of the cache.
fn fetch(bytes: &[u8]) {
    let mut touched = 0;
    let (pages, _) = bytes.as_chunks::<STREAM_BYTES>();
    for line in (0..STREAM_BYTES).step_by(CACHE_LINE_BYTES) {
        for page in pages {
            touched ^= page.get(line).unwrap_or(&0);
        }
    }
    // Without a use the loads would be left out.
    std::hint::black_box(touched);
}
