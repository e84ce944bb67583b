//! The sizes in the blocks of an archive, plain or encrypted.

use crate::consts::BLOCK_BYTES;
use crate::error::Structure;
use crate::frame::PROLOGUE_BYTES;
use crate::sealed::{NONCE_BYTES, Sealable, TAG_BYTES};

/// Of the blocks of an archive.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// Bytes behind the fields of the header, which are zero in a clear block.
    pub(super) zero_bytes: usize,
    pub(super) header_bytes: usize,
    pub(super) page_bytes: usize,
    /// Pages of a block.
    pub(super) pages_max: usize,
    /// A namespace has zeros behind it, up to the longest one.
    pub(super) hides_lengths: bool,
}

/// Offset of the nonce, behind the fields of the header.
const NONCE_AT: usize = PROLOGUE_BYTES + 16 + 8 + 2 + 2 + 4;

pub(super) const PLAIN: Layout = {
    let (zero_bytes, page_bytes) = (NONCE_BYTES, 64);
    Layout {
        zero_bytes,
        header_bytes: NONCE_AT + zero_bytes,
        page_bytes,
        pages_max: (BLOCK_BYTES - NONCE_AT - zero_bytes) / page_bytes,
        hides_lengths: false,
    }
};

pub(super) const SEALED: Layout = {
    let zero_bytes = NONCE_BYTES + TAG_BYTES;
    let page_bytes = PLAIN.page_bytes + SALT_BYTES + TAG_BYTES + PAGE_RESERVED;
    Layout {
        zero_bytes,
        header_bytes: NONCE_AT + zero_bytes,
        page_bytes,
        pages_max: (BLOCK_BYTES - NONCE_AT - zero_bytes) / page_bytes,
        hides_lengths: true,
    }
};

const SALT_BYTES: usize = 12;

/// Bytes behind the tag of a page.
pub(super) const PAGE_RESERVED: usize = 4;

pub(super) const SEALABLE: Sealable = Sealable {
    structure: Structure::Archive,
    nonce_at: NONCE_AT,
    body_at: SEALED.header_bytes,
};
