//! Where things lie in a volume: arithmetic only.
//!
//! ```text
//!  volume    0        64 KiB        1 MiB
//!            [super A][super B]     [segment 0][segment 1] ...
//!
//!  segment   block 0   1         2                               last
//!            [header A][header B][page data ->   <- descriptors 2 1 0]
//! ```

use crate::consts::{BLOCK_BYTES_U64, SEGMENT_BLOCKS_MAX, SEGMENT_BLOCKS_MIN, SEGMENTS_MAX};
use crate::ids::SegmentNo;

/// Byte offsets of the two copies of the superblock in a volume.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, 64 << 10];

/// Byte offset of segment 0 in a volume.
pub const SEGMENTS_OFFSET: u64 = 1 << 20;

/// Blocks at the start of a segment that hold the two copies of its header. Page data begins behind them.
pub const HEADER_BLOCKS: u32 = 2;

/// The sizes of one volume: how large a segment is, and how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    segment_blocks: u32,
    segments: u32,
}

/// Sizes that make no volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// Segments of this size do not exist.
    #[error(
        "a segment of {blocks} blocks is not of {SEGMENT_BLOCKS_MIN} to {SEGMENT_BLOCKS_MAX} blocks (16 MiB to 4 GiB)"
    )]
    SegmentBlocks {
        /// Blocks of a segment.
        blocks: u32,
    },
    /// A volume does not have that many segments.
    #[error(
        "a volume has 1 to {SEGMENTS_MAX} segments, not {segments}: choose another segment size"
    )]
    Segments {
        /// Segments of the volume.
        segments: u32,
    },
}

impl Geometry {
    /// A volume of `segments` segments, each of `segment_blocks` blocks.
    ///
    /// # Errors
    /// A segment outside 16 MiB to 4 GiB, no segment, or more than [`SEGMENTS_MAX`].
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

    /// Blocks of a segment.
    #[must_use]
    pub const fn segment_blocks(self) -> u32 {
        self.segment_blocks
    }

    /// Segments of the volume.
    #[must_use]
    pub const fn segments(self) -> u32 {
        self.segments
    }

    /// Bytes of a segment.
    #[must_use]
    pub const fn segment_bytes(self) -> u64 {
        bytes_of(self.segment_blocks)
    }

    /// Byte offset of a segment in the volume. For a segment that the volume does not have, an offset behind its end.
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

    /// The block of a segment in which descriptor block `index` lies; `None` when it would lie in the headers.
    #[must_use]
    pub const fn descriptor_block(self, index: u32) -> Option<u32> {
        descriptor_block(self.segment_blocks, index)
    }

    /// Bytes of the whole volume.
    #[must_use]
    pub const fn volume_bytes(self) -> u64 {
        self.segment_offset(SegmentNo(self.segments))
    }

    /// Most data blocks that a segment can hold: all but the headers and one descriptor block.
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

/// How many segments of a size fit a volume of a size, both in bytes: 0 when not even one does, at most
/// [`SEGMENTS_MAX`].
#[must_use]
pub const fn segments_that_fit(volume_bytes: u64, segment_bytes: u64) -> u32 {
    match volume_bytes
        .saturating_sub(SEGMENTS_OFFSET)
        .checked_div(segment_bytes)
    {
        None => 0,
        Some(segments) if segments >= SEGMENTS_MAX as u64 => SEGMENTS_MAX,
        #[expect(clippy::cast_possible_truncation, reason = "below SEGMENTS_MAX")]
        Some(segments) => segments as u32,
    }
}
