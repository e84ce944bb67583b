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
        self.digest.update(bytes);
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
        self.digest.update(bytes);
    }

    /// The checksum of the page.
    #[must_use]
    pub fn finish(self) -> u64 {
        self.digest.finalize()
    }
}
