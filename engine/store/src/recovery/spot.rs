//! The place of a segment: the offsets of its headers, blocks and data, and their reads.

use std::sync::Arc;

use larder_base::planted;
use larder_base::runtime::Instant;
use larder_disk::mailbox::{ReadAt, read_all, read_all_until};
use larder_disk::{Disk, DiskError};
use larder_format::{
    BLOCK_BYTES, BlockAddress, Body, Damage, DescriptorBlock, HEADER_BLOCKS, PageRecord, Record,
    SegmentAddress, SegmentHeader, SegmentNo, Serial, StoreId,
};

use super::fault::FaultReason;
use crate::keys::Keys;

/// The place of a segment.
#[derive(Clone, Debug)]
pub struct Spot {
    /// The store it must belong to.
    pub store: StoreId,
    /// Index of its volume.
    pub volume: usize,
    /// Its number in the volume.
    pub number: u32,
    /// Its size in blocks.
    pub segment_blocks: u32,
    /// How the bodies of its descriptor blocks are read.
    pub bodies: Bodies,
}

/// How the bodies of descriptor blocks are read.
#[derive(Clone, Debug)]
pub enum Bodies {
    /// As they are.
    Clear,
    /// With the keys of the encrypted store.
    Sealed(Arc<Keys>),
    /// Not at all: the blocks have their headers, and no records. For a reader that writes nothing.
    Locked,
}

impl Bodies {
    /// Those of a store with these keys, if it is encrypted.
    #[must_use]
    pub fn with(keys: Option<&Arc<Keys>>) -> Bodies {
        keys.map_or(Bodies::Clear, |keys| Bodies::Sealed(keys.clone()))
    }
}

impl Spot {
    pub(super) fn offset(&self, block: u32) -> u64 {
        let bytes = u64::from(self.segment_blocks) * BLOCK_BYTES as u64;
        larder_format::SEGMENTS_OFFSET
            + u64::from(self.number) * bytes
            + u64::from(block) * BLOCK_BYTES as u64
    }

    fn volume_number(&self) -> u16 {
        u16::try_from(self.volume).unwrap_or(u16::MAX)
    }

    fn header_address(&self) -> SegmentAddress {
        SegmentAddress {
            store: self.store,
            volume: self.volume_number(),
            segment: SegmentNo(self.number),
            segment_blocks: self.segment_blocks,
        }
    }

    fn block_address(&self, index: u32) -> BlockAddress {
        BlockAddress {
            store: self.store,
            volume: self.volume_number(),
            segment: SegmentNo(self.number),
            segment_blocks: self.segment_blocks,
            index,
        }
    }

    /// Byte offset of descriptor block `index`.
    #[must_use]
    pub fn block_offset(&self, index: u32) -> u64 {
        self.offset(self.segment_blocks.saturating_sub(1).saturating_sub(index))
    }

    /// Reads of both header copies.
    #[must_use]
    pub fn headers(&self) -> ReadAt {
        ReadAt {
            volume: self.volume,
            offset: self.offset(0),
            bytes: HEADER_BLOCKS as usize * BLOCK_BYTES,
        }
    }

    /// Read of `count` descriptor blocks from `first` on. The last one comes first in the bytes.
    #[must_use]
    pub fn blocks(&self, first: u32, count: u32) -> ReadAt {
        ReadAt {
            volume: self.volume,
            offset: self.block_offset(first + count - 1),
            bytes: count as usize * BLOCK_BYTES,
        }
    }

    /// Read of `count` data blocks from block `start` of the segment on.
    #[must_use]
    pub fn data(&self, start: u32, count: u32) -> ReadAt {
        ReadAt {
            volume: self.volume,
            offset: self.offset(start),
            bytes: count as usize * BLOCK_BYTES,
        }
    }

    /// The header copies in the bytes that [`Spot::headers`] read.
    pub fn parse_headers(&self, bytes: &[u8]) -> [Result<SegmentHeader, Damage>; 2] {
        let mut copies = bytes.chunks_exact(BLOCK_BYTES);
        let mut next = || self.parse_header(copies.next().unwrap_or_default());
        [next(), next()]
    }

    pub(super) fn parse_header(&self, block: &[u8]) -> Result<SegmentHeader, Damage> {
        SegmentHeader::check(block)?.at(&self.header_address())
    }

    /// Both header copies, each read by itself: one bad sector must not hide the other copy.
    pub fn read_copies(&self, disk: &dyn Disk) -> [Result<SegmentHeader, FaultReason>; 2] {
        self.read_copies_until(disk, None)
    }

    /// The same, until a deadline.
    pub(crate) fn read_copies_until(
        &self,
        disk: &dyn Disk,
        deadline: Option<Instant>,
    ) -> [Result<SegmentHeader, FaultReason>; 2] {
        let reads = [0, 1].map(|copy| ReadAt {
            volume: self.volume,
            offset: self.offset(copy),
            bytes: BLOCK_BYTES,
        });
        let mut copies = read_all_until(disk, &reads, deadline).into_iter();
        let mut next = || {
            let bytes = copies.next().unwrap_or(Err(DiskError::Shutdown));
            let bytes = bytes.map_err(FaultReason::Unreadable)?;
            self.parse_header(&bytes).map_err(FaultReason::Damaged)
        };
        [next(), next()]
    }

    /// Parses one descriptor block. If it is not of this generation or a later one, it is read and
    /// parsed once more: one misdirected read must not lose the block's records for good.
    pub(crate) fn parse_twice(
        &self,
        disk: &dyn Disk,
        index: u32,
        life: Serial,
        bytes: &[u8],
    ) -> Result<DescriptorBlock, Damage> {
        let first = self.parse_block(index, bytes);
        if first
            .as_ref()
            .is_ok_and(|block| block.header.sequence >= life)
        {
            return first;
        }
        match read_all(disk, &[self.blocks(index, 1)]).pop() {
            Some(Ok(bytes)) => self.parse_block(index, &bytes),
            _ => first,
        }
    }

    /// Whether a record is of a page whose key is erased: no record says that it is gone.
    pub(super) fn is_erased(&self, record: &Record) -> bool {
        match (&self.bodies, record) {
            (
                Bodies::Sealed(keys),
                Record::Page(PageRecord {
                    seal: Some(seal), ..
                }),
            ) => keys.is_erased(seal.slot) && !planted!(ErasedRecovered),
            _ => false,
        }
    }

    /// One descriptor block.
    ///
    /// # Errors
    /// The damage of the block.
    pub fn parse_block(&self, index: u32, bytes: &[u8]) -> Result<DescriptorBlock, Damage> {
        let address = self.block_address(index);
        match &self.bodies {
            Bodies::Clear => DescriptorBlock::check(bytes)?.at(&address),
            Bodies::Sealed(keys) => {
                let mut block = DescriptorBlock::check(&keys.open_block(bytes)?)?.at(&address)?;
                if let Body::Namespace(namespace) = &mut block.body {
                    *namespace = keys.named(namespace).map_err(|_| Damage::Sealed)?;
                }
                Ok(block)
            }
            Bodies::Locked => DescriptorBlock::check_locked(bytes)?.at(&address),
        }
    }
}
