//! Runs of pages, and the objects that hold them.
//!
//! A run is a number of consecutive pages of a chain, aligned: run `r` of a chain has the pages
//! from `r * n` to `(r + 1) * n`, where `n` is [`pages_of_run`]. Its name is the key of its last
//! page below the fingerprint of its namespace. A key covers all tokens before it, so two nodes
//! that computed the same prefix make the same name.
//!
//! An object is an archive (see `larder_format`'s `archive` module), and in a sealed object seals
//! behind its end. `larder import` takes the archive and ignores the seals.
//!
//! ```text
//!  block   0      1           2       3 ..                              n     n+1 ..
//!          +------+-----------+-------+----------+-------+- ... -+-----+-------+
//!          | head | namespace | pages | payloads | pages |       | end | seals |
//!          +------+-----------+-------+----------+-------+- ... -+-----+-------+
//!
//!  seals   magic "LARDSEAL" (8), identity of the key (8), pages (8), zero (8),
//!          seal of the run (32), seal of each page (32); then zeros to a whole block
//! ```
//!
//! A payload is a plain page, or the page as the codec stores it (docs/codec.md).
//!
//! The seal of a page covers the fingerprint, the page's record without its checksum, and its
//! payload. The seal of the run covers its name, its number of pages and their seals. So a damaged
//! payload costs its page alone, and no page or run stands for another. [`open`] reports each page
//! by itself; no byte of a page is returned before its seal was verified.

mod draft;
mod name;
mod open;

use std::num::NonZeroU32;

use larder_format::{
    ARCHIVED_PAGES_MAX, ArchivedPage, BLOCK_BYTES, Fingerprint, KeyPrefix, Namespace, PageKey,
};

use crate::keys::SealKey;
pub use draft::Draft;
pub use name::{NoRunName, RunName};
pub use open::{OUTLINE_BYTES, Opened, OpenedPage, Outline, PageFault, RunFault, open, outline};

/// Tokens of a run, unless a node is configured otherwise.
pub const RUN_TOKENS: u32 = 512;

/// Bytes of the longest object that is taken where the length of a run is not known. Other writers
/// of a remote may be hostile.
pub const OBJECT_BYTES_MAX: usize = 4 << 30;

/// Version of the layout of names and objects: the first component of every name.
pub(crate) const VERSION: &str = "v1";

/// First component of the names of the marks of use. They are no part of a listing of objects.
pub(crate) const USED: &str = "v1-used";

/// The name of the setting of the codec: a text, absent while the codec is off. No rule of a life
/// cycle removes it.
pub(crate) const CODEC: &str = "v1-codec";

/// Bytes of the longest such text.
pub(crate) const CODEC_BYTES_MAX: usize = 64;

/// Begins the seals behind an archive.
pub const SEALS_MAGIC: [u8; 8] = *b"LARDSEAL";
const SEALS_HEADER_BYTES: usize = 32;
const SEAL_BYTES: usize = 32;

/// A message authentication code.
type Seal = blake3::Hash;

/// Number of pages of a run with so many tokens: at least one.
#[must_use]
pub fn pages_of_run(namespace: &Namespace, run_tokens: u32) -> NonZeroU32 {
    let pages = run_tokens / namespace.fields().page_tokens.max(1);
    NonZeroU32::new(pages).unwrap_or(NonZeroU32::MIN)
}

/// Bytes of the longest object of a run with so many pages: all are plain, and it has seals.
#[must_use]
pub fn object_bytes(namespace: &Namespace, pages: usize) -> usize {
    archive_bytes(pages, pages * page_blocks(namespace)) + seal_blocks(pages) * BLOCK_BYTES
}

/// Blocks of a plain page.
fn page_blocks(namespace: &Namespace) -> usize {
    namespace.shape().page_blocks() as usize
}

/// Bytes of an archive of so many pages whose payloads take so many blocks: the offset of the
/// seals.
fn archive_bytes(pages: usize, payload_blocks: usize) -> usize {
    let structures = 3 + pages.div_ceil(ARCHIVED_PAGES_MAX);
    (structures + payload_blocks) * BLOCK_BYTES
}

fn seal_blocks(pages: usize) -> usize {
    (SEALS_HEADER_BYTES + (1 + pages) * SEAL_BYTES).div_ceil(BLOCK_BYTES)
}

/// A page of a run: its key, and its place in the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunPage {
    /// Its key.
    pub key: PageKey,
    /// The key of the page before it, of which only the first 96 bits count.
    pub parent: Option<PageKey>,
    /// Number of pages before it.
    pub depth: u32,
}

/// The run of `run_pages` pages that ends in `last`, in the order of its chain. `None` if it ends
/// elsewhere, or if a page of it is unknown to `page`. `place` returns the key of the page before a
/// page, and the depth of the page.
pub(crate) fn whole_run<P>(
    last: P,
    run_pages: u32,
    place: impl Fn(&P) -> (Option<KeyPrefix>, u32),
    page: impl Fn(KeyPrefix) -> Option<P>,
) -> Option<Vec<P>> {
    let (mut parent, mut depth) = place(&last);
    if !depth.checked_add(1)?.is_multiple_of(run_pages) {
        return None;
    }
    let mut run = vec![last];
    for _ in 1..run_pages {
        let before = page(parent?)?;
        let expected = depth.checked_sub(1);
        (parent, depth) = place(&before);
        if Some(depth) != expected {
            return None;
        }
        run.push(before);
    }
    run.reverse();
    Some(run)
}

/// The seals of an object, encoded.
fn encode_seals(key: &SealKey, name: &RunName, of_pages: &[Seal]) -> Vec<u8> {
    let mut bytes = Vec::from(SEALS_MAGIC);
    bytes.extend(key.id().0);
    bytes.extend((of_pages.len() as u64).to_le_bytes());
    bytes.extend([0_u8; 8]);
    bytes.extend(run_seal(key, name, of_pages).as_bytes());
    for seal in of_pages {
        bytes.extend(seal.as_bytes());
    }
    bytes
}

fn page_seal(key: &SealKey, namespace: Fingerprint, page: &ArchivedPage, payload: &[u8]) -> Seal {
    let mut hasher = key.of_page();
    hasher.update(namespace.as_bytes());
    hasher.update(page.key.as_bytes());
    hasher.update(&page.depth.to_le_bytes());
    hasher.update(&[u8::from(page.parent.is_some())]);
    let parent = page.parent.map_or([0; 12], |parent| *parent.as_bytes());
    hasher.update(&parent);
    hasher.update(&page.saved.to_le_bytes());
    hasher.update(payload);
    hasher.finalize()
}

fn run_seal(key: &SealKey, name: &RunName, seals: &[Seal]) -> Seal {
    let mut hasher = key.of_run();
    hasher.update(name.namespace.as_bytes());
    hasher.update(name.last.as_bytes());
    hasher.update(&(seals.len() as u64).to_le_bytes());
    for seal in seals {
        hasher.update(seal.as_bytes());
    }
    hasher.finalize()
}
