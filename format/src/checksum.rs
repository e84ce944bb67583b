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

/// How far ahead of the sum memory is asked for.
const AHEAD_BYTES: usize = 4096;

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
        let mut later = bytes.chunks(AHEAD_BYTES).skip(1);
        for piece in bytes.chunks(AHEAD_BYTES) {
            fetch(later.next().unwrap_or_default());
            self.digest.update(piece);
        }
    }
}

/// Whether memory has to be asked for ahead of a sum: Intel's processors gain by it; AMD's, told by SSE4a, sum memory in 0.035
/// seconds a GiB as it is (an EPYC, 2026-11-23).
fn needs_fetching() -> bool {
    #[cfg(target_arch = "x86_64")]
    let needs = !std::arch::is_x86_feature_detected!("sse4a");
    #[cfg(not(target_arch = "x86_64"))]
    let needs = false;
    needs
}

/// Asks for memory to be brought into the second-level cache, and does not wait for it.
///
/// A page that the device has just brought lies in DRAM, and there a checksum waits for memory. The processor's own prefetcher
/// stops at the end of each 4 KiB page (Intel 64 and IA-32 Architectures Optimization Reference Manual, "Data Prefetching to the
/// L2 and last level cache"), and the sum with it. Seconds a GiB out of memory, on a Xeon (model 207, 2026-11-24,
/// `engine/examples/checksum_speed.rs`): 0.068 with this, 0.075 without, 0.062 for loads alone. The requests have to keep a
/// distance: a loop that asks for line after line as fast as it can (`as_chunks`) takes 0.078, every second line 0.083.
fn fetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for byte in bytes.chunks(CACHE_LINE_BYTES).filter_map(<[u8]>::first) {
        safe_arch::prefetch_t1(byte);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}
