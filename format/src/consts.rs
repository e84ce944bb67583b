//! Constants of the format: block, segment and count limits.
//!
//! Every limit is checked when a structure is read, so a value on disk can never make a reader
//! allocate or compute beyond it.

/// Bytes per block: the unit of every structure, extent and transfer.
pub const BLOCK_BYTES: usize = 4096;

/// [`BLOCK_BYTES`] for byte offsets.
pub(crate) const BLOCK_BYTES_U64: u64 = BLOCK_BYTES as u64;

/// [`BLOCK_BYTES`] for part sizes.
#[expect(clippy::cast_possible_truncation, reason = "4096 fits")]
pub(crate) const BLOCK_BYTES_U32: u32 = BLOCK_BYTES as u32;

/// Smallest segment, in bytes.
pub const SEGMENT_BYTES_MIN: u64 = 256 << 10;

/// Largest segment, in bytes.
pub const SEGMENT_BYTES_MAX: u64 = 4 << 30;

/// Maximum number of segments of a store, over all its volumes. A store-wide segment number fits in
/// 24 bits.
pub const SEGMENTS_MAX: u32 = 1 << 24;

/// Maximum number of parts of a page.
pub const PARTS_MAX: usize = 8;

/// Maximum number of volumes of a store.
pub const VOLUMES_MAX: usize = 16;

/// The version that this crate writes. Of another version it reads archives alone.
pub const FORMAT_VERSION: u32 = 2;

/// Smallest segment, in blocks.
#[expect(clippy::cast_possible_truncation, reason = "64 blocks")]
pub(crate) const SEGMENT_BLOCKS_MIN: u32 = (SEGMENT_BYTES_MIN / BLOCK_BYTES_U64) as u32;

/// Largest segment, in blocks.
#[expect(clippy::cast_possible_truncation, reason = "2^20 blocks")]
pub(crate) const SEGMENT_BLOCKS_MAX: u32 = (SEGMENT_BYTES_MAX / BLOCK_BYTES_U64) as u32;

// The in-memory index stores a start block in 20 bits.
const _: () = assert!(SEGMENT_BLOCKS_MAX == 1 << 20);
const _: () = assert!(SEGMENT_BYTES_MIN.is_multiple_of(BLOCK_BYTES_U64));
// The size of the largest store is far below the largest file offset.
const _: () = assert!(SEGMENTS_MAX as u64 * SEGMENT_BYTES_MAX < 1 << 60);
const _: () = assert!(usize::BITS >= 32);
