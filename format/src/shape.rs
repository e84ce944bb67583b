//! The shape of a page: the sizes of its parts and their location on disk.
//!
//! ```text
//!  payload    [ part 0      ][ part 1   ]
//!  on disk    [ part 0      |000][ part 1   |0000]     each part begins on a block boundary
//! ```

use crate::consts::{BLOCK_BYTES_U32, BLOCK_BYTES_U64, PARTS_MAX};

/// Upper limit (exclusive) of the bytes of a page, including padding.
pub const PAGE_BYTES_LIMIT: u64 = 1 << 30;

/// The sizes of a page's parts. All pages of a namespace have the same shape.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageShape {
    /// Sizes in bytes; zero from index `count` on.
    part_bytes: [u32; PARTS_MAX],
    count: u8,
}

/// Part sizes that are not valid for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// No part, or too many parts.
    #[error("a page has 1 to {PARTS_MAX} parts, not {found}")]
    Count {
        /// Parts given.
        found: usize,
    },
    /// A part has zero bytes.
    #[error("part {part} of the page is empty")]
    Empty {
        /// The index of the part.
        part: usize,
    },
    /// The page is too large.
    #[error(
        "a page of {bytes} bytes, padding included, is not below the limit of {PAGE_BYTES_LIMIT}"
    )]
    TooLarge {
        /// The size on disk, in bytes.
        bytes: u64,
    },
}

impl PageShape {
    /// A page with these parts, sizes in bytes.
    ///
    /// # Errors
    /// No parts or more than [`PARTS_MAX`], an empty part, or [`PAGE_BYTES_LIMIT`] bytes or more on
    /// disk.
    pub fn new(part_bytes: &[u32]) -> Result<PageShape, ShapeError> {
        let found = part_bytes.len();
        let too_many = |_| ShapeError::Count { found };
        let count = u8::try_from(found).map_err(too_many)?;
        let mut sizes = [0; PARTS_MAX];
        match sizes.get_mut(..found) {
            Some(sizes) if found > 0 => sizes.copy_from_slice(part_bytes),
            _ => return Err(ShapeError::Count { found }),
        }
        if let Some(part) = part_bytes.iter().position(|bytes| *bytes == 0) {
            return Err(ShapeError::Empty { part });
        }
        let bytes = part_bytes
            .iter()
            .map(|bytes| u64::from(*bytes).next_multiple_of(BLOCK_BYTES_U64))
            .sum();
        if bytes >= PAGE_BYTES_LIMIT {
            return Err(ShapeError::TooLarge { bytes });
        }
        Ok(PageShape {
            part_bytes: sizes,
            count,
        })
    }

    /// The size of each part, in bytes, in order.
    #[must_use]
    pub fn part_sizes(&self) -> &[u32] {
        self.part_bytes.get(..self.parts()).unwrap_or_default()
    }

    /// Number of parts: 1 to [`PARTS_MAX`].
    #[must_use]
    pub fn parts(&self) -> usize {
        usize::from(self.count)
    }

    /// Bytes of a part, without padding.
    ///
    /// # Panics
    /// If the page has no such part.
    #[must_use]
    #[expect(
        clippy::indexing_slicing,
        reason = "a part that does not exist is the caller's bug"
    )]
    pub fn part_bytes(&self, part: usize) -> u32 {
        self.part_sizes()[part]
    }

    /// Blocks of a part, including the padded last block.
    ///
    /// # Panics
    /// If the page has no such part.
    #[must_use]
    pub fn part_blocks(&self, part: usize) -> u32 {
        self.part_bytes(part).div_ceil(BLOCK_BYTES_U32)
    }

    /// Blocks of a page on disk: below 2^18.
    #[must_use]
    pub fn page_blocks(&self) -> u32 {
        self.part_sizes()
            .iter()
            .map(|bytes| bytes.div_ceil(BLOCK_BYTES_U32))
            .sum()
    }

    /// Bytes of a page's payload, without padding.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.part_sizes()
            .iter()
            .map(|bytes| u64::from(*bytes))
            .sum()
    }

    /// Whether every part is a whole number of blocks. Then no padding is written, and a read can
    /// go directly into the caller's memory.
    #[must_use]
    pub fn is_aligned(&self) -> bool {
        self.part_sizes()
            .iter()
            .all(|bytes| bytes.is_multiple_of(BLOCK_BYTES_U32))
    }

    /// The start of a part on disk: bytes from the start of its page, a multiple of the block size.
    ///
    /// # Panics
    /// If the page has no such part.
    #[must_use]
    #[expect(
        clippy::indexing_slicing,
        reason = "a part that does not exist is the caller's bug"
    )]
    pub fn part_offset(&self, part: usize) -> u64 {
        assert!(part < self.parts(), "the page has no part {part}");
        self.part_sizes()[..part]
            .iter()
            .map(|bytes| u64::from(*bytes).next_multiple_of(BLOCK_BYTES_U64))
            .sum()
    }
}

impl std::fmt::Debug for PageShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PageShape")
            .field(&self.part_sizes())
            .finish()
    }
}
