//! Runs of pages, and the objects that hold them.
//!
//! A run is a number of consecutive pages of a chain, aligned: run `r` of a chain has the pages
//! from `r * n` to `(r + 1) * n`, where `n` is [`pages_of_run`]. Its name follows from its
//! namespace and the key of its last page ([`RunNames`]). A key covers all tokens before it, so two
//! nodes that computed the same prefix make the same name. With keys it is a keyed hash: who has
//! none cannot test whether a prompt was seen.
//!
//! An object is an archive (see `larder_format`'s `archive` module), and with keys an encrypted
//! one: its key is random, and wrapped by that of the nodes. The identity of the archive follows
//! from the name of the run, so that no object stands for another one.
//!
//! A payload is a plain page, or the page as the codec stores it (docs/codec.md). A damaged payload
//! costs its page alone: [`open`] reports each page by itself. With keys no byte of a page is
//! returned before its tag was verified.

mod draft;
mod name;
mod open;

use std::num::NonZeroU32;

use larder_format::{
    ARCHIVED_PAGES_MAX, BLOCK_BYTES, KeyPrefix, Namespace, PageKey, SEALED_PAGES_MAX,
};
use larder_seal::PageName;

pub use draft::{Draft, DraftError};
pub use name::{NoRunName, RunId, RunName, RunNames};
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

/// Number of pages of a run with so many tokens: at least one.
#[must_use]
pub fn pages_of_run(namespace: &Namespace, run_tokens: u32) -> NonZeroU32 {
    let pages = run_tokens / namespace.fields().page_tokens.max(1);
    NonZeroU32::new(pages).unwrap_or(NonZeroU32::MIN)
}

/// Bytes of the longest object of a run with so many pages: all are plain or encrypted.
#[must_use]
pub fn object_bytes(namespace: &Namespace, pages: usize) -> usize {
    archive_bytes(pages, pages * page_blocks(namespace), true)
}

/// Blocks of a plain page.
fn page_blocks(namespace: &Namespace) -> usize {
    namespace.shape().page_blocks() as usize
}

/// Most pages whose records are in one block.
fn group_pages(is_sealed: bool) -> usize {
    match is_sealed {
        true => SEALED_PAGES_MAX,
        false => ARCHIVED_PAGES_MAX,
    }
}

/// Bytes of an archive of so many pages whose payloads take so many blocks.
fn archive_bytes(pages: usize, payload_blocks: usize, is_sealed: bool) -> usize {
    let structures = 3 + pages.div_ceil(group_pages(is_sealed));
    (structures + payload_blocks) * BLOCK_BYTES
}

/// What the tag of a payload of so many bytes covers besides it.
fn page_name(namespace: &Namespace, key: &PageKey, bytes: usize) -> PageName {
    PageName {
        namespace: namespace.fingerprint(),
        key: *key,
        blocks: namespace.shape().page_blocks(),
        stored: u32::try_from(bytes / BLOCK_BYTES).unwrap_or(u32::MAX),
    }
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
