//! The layout of a volume: arithmetic only.
//!
//! ```text
//!  first MiB    KiB  content
//!                 0  superblock A, one block
//!                64  superblock B
//!               128  keyring A, 384 KiB; in encrypted stores alone
//!               512  keyring B, 384 KiB
//!               896  quotas A, 48 KiB; in the first volume alone
//!               944  quotas B, 48 KiB
//!               992  closing statement, one block
//!              1020  the block that write probes fill
//!
//!  then         [segment 0][segment 1] ...
//!
//!  last MiB     KiB  content, at the offsets of its first copy
//!                 0  superblock C
//!               128  keyring C
//!               896  quotas C
//!
//!  segment   block 0   1         2                               last
//!            [header A][header B][page data ->   <- descriptors 2 1 0]
//! ```

use crate::consts::{BLOCK_BYTES_U64, SEGMENT_BLOCKS_MAX, SEGMENT_BLOCKS_MIN, SEGMENTS_MAX};
use crate::ids::SegmentNo;

/// Byte offsets of the two copies of the superblock at the start of a volume. The third copy is at
/// its end: see [`superblock_offsets`].
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, 64 << 10];

/// Byte offset of the keyrings, the quotas and all else before the segments but the superblocks.
pub const RESERVED_OFFSET: u64 = 128 << 10;

/// Byte offsets of the two copies of the keyring at the start of a volume.
const KEYRING_OFFSETS: [u64; 2] = [RESERVED_OFFSET, 512 << 10];

/// Byte offsets of the two copies of the quotas at the start of the first volume.
const QUOTAS_OFFSETS: [u64; 2] = [896 << 10, 944 << 10];

/// Byte offset of the closing statement of a volume.
pub const CLOSING_OFFSET: u64 = 992 << 10;

/// Byte offset of the block that a write probe fills in a volume without a free segment.
pub const PROBE_OFFSET: u64 = SEGMENTS_OFFSET - BLOCK_BYTES_U64;

/// Byte offset of segment 0 in a volume.
pub const SEGMENTS_OFFSET: u64 = 1 << 20;

/// Bytes at the end of a volume that no segment uses.
pub const TAIL_BYTES: u64 = 1 << 20;

/// Bytes of a volume that no segment uses.
pub const OVERHEAD_BYTES: u64 = SEGMENTS_OFFSET + TAIL_BYTES;

/// Blocks at the start of a segment that hold the two copies of its header. Page data starts behind
/// them.
pub const HEADER_BLOCKS: u32 = 2;

/// The sizes of one volume: the segment size and the number of segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    segment_blocks: u32,
    segments: u32,
}

/// Sizes that are not valid for a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// The segment size is out of range.
    #[error(
        "a segment has {SEGMENT_BLOCKS_MIN} to {SEGMENT_BLOCKS_MAX} blocks (256 KiB to 4 GiB), not \
         {blocks}"
    )]
    SegmentBlocks {
        /// Blocks per segment.
        blocks: u32,
    },
    /// The number of segments is out of range.
    #[error(
        "a volume has 1 to {SEGMENTS_MAX} segments, not {segments}: choose another segment size"
    )]
    Segments {
        /// Segments of the volume.
        segments: u32,
    },
}

impl Geometry {
    /// A volume of `segments` segments with `segment_blocks` blocks each.
    ///
    /// # Errors
    /// The segment size is outside 256 KiB to 4 GiB, or the number of segments is zero or above
    /// [`SEGMENTS_MAX`].
    pub const fn new(segment_blocks: u32, segments: u32) -> Result<Geometry, GeometryError> {
        if segment_blocks < SEGMENT_BLOCKS_MIN || segment_blocks > SEGMENT_BLOCKS_MAX {
            return Err(GeometryError::SegmentBlocks {
                blocks: segment_blocks,
            });
        }
        if segments == 0 || segments > SEGMENTS_MAX {
            return Err(GeometryError::Segments { segments });
        }
        Ok(Geometry {
            segment_blocks,
            segments,
        })
    }

    /// Blocks per segment.
    #[must_use]
    pub const fn segment_blocks(self) -> u32 {
        self.segment_blocks
    }

    /// Number of segments of the volume.
    #[must_use]
    pub const fn segments(self) -> u32 {
        self.segments
    }

    /// Bytes per segment.
    #[must_use]
    pub const fn segment_bytes(self) -> u64 {
        bytes_of(self.segment_blocks)
    }

    /// Byte offset of a segment in the volume. If the volume does not have the segment, the offset
    /// is behind the end of the volume.
    #[must_use]
    pub const fn segment_offset(self, segment: SegmentNo) -> u64 {
        let before = self.segment_bytes().saturating_mul(segment.0 as u64);
        SEGMENTS_OFFSET.saturating_add(before)
    }

    /// Byte offset in the volume of a block of a segment.
    #[must_use]
    pub const fn block_offset(self, segment: SegmentNo, block: u32) -> u64 {
        self.segment_offset(segment).saturating_add(bytes_of(block))
    }

    /// The block of a segment that holds descriptor block `index`; `None` if it would overlap the
    /// headers.
    #[must_use]
    pub const fn descriptor_block(self, index: u32) -> Option<u32> {
        descriptor_block(self.segment_blocks, index)
    }

    /// Bytes of the whole volume: its file or device has at least as many.
    #[must_use]
    pub const fn volume_bytes(self) -> u64 {
        self.segment_offset(SegmentNo(self.segments))
            .saturating_add(TAIL_BYTES)
    }

    /// Maximum number of data blocks of a segment: all blocks except the headers and one descriptor
    /// block.
    #[must_use]
    pub const fn data_blocks(self) -> u32 {
        self.segment_blocks.saturating_sub(HEADER_BLOCKS + 1)
    }
}

const fn bytes_of(blocks: u32) -> u64 {
    (blocks as u64).saturating_mul(BLOCK_BYTES_U64)
}

/// See [`Geometry::descriptor_block`].
pub(crate) const fn descriptor_block(segment_blocks: u32, index: u32) -> Option<u32> {
    match segment_blocks.checked_sub(1) {
        Some(last) => match last.checked_sub(index) {
            Some(block) if block >= HEADER_BLOCKS => Some(block),
            _ => None,
        },
        None => None,
    }
}

/// Byte offset of the last MiB of a file or device of `bytes` bytes. The size alone decides: the
/// place is known without a superblock.
#[must_use]
pub const fn tail_offset(bytes: u64) -> u64 {
    let odd = bytes & (BLOCK_BYTES_U64 - 1);
    bytes.saturating_sub(odd).saturating_sub(TAIL_BYTES)
}

/// Byte offsets of the three copies of the superblock in a file or device of `bytes` bytes.
#[must_use]
pub const fn superblock_offsets(bytes: u64) -> [u64; 3] {
    let [a, b] = SUPERBLOCK_OFFSETS;
    [a, b, tail_offset(bytes)]
}

/// Byte offsets of the three copies of the keyring in a volume of `bytes` bytes.
#[must_use]
pub const fn keyring_offsets(bytes: u64) -> [u64; 3] {
    let [a, b] = KEYRING_OFFSETS;
    [a, b, tail_offset(bytes).saturating_add(a)]
}

/// Byte offsets of the three copies of the quotas in a first volume of `bytes` bytes.
#[must_use]
pub const fn quotas_offsets(bytes: u64) -> [u64; 3] {
    let [a, b] = QUOTAS_OFFSETS;
    [a, b, tail_offset(bytes).saturating_add(a)]
}

/// Number of segments of `segment_bytes` that fit in a volume of `volume_bytes`: 0 if none fits, at
/// most [`SEGMENTS_MAX`].
#[must_use]
pub const fn segments_that_fit(volume_bytes: u64, segment_bytes: u64) -> u32 {
    match volume_bytes
        .saturating_sub(OVERHEAD_BYTES)
        .checked_div(segment_bytes)
    {
        None => 0,
        Some(segments) if segments >= SEGMENTS_MAX as u64 => SEGMENTS_MAX,
        #[expect(clippy::cast_possible_truncation, reason = "below SEGMENTS_MAX")]
        Some(segments) => segments as u32,
    }
}
