//! The header of a segment: which life it is in, and how far that has come.
//!
//! It lies in two copies, blocks 0 and 1 of the segment, written in turn. It is a hint: the highest valid sequence in
//! either copy or in any descriptor block is the segment's life, and where they disagree the blocks are right.
//!
//! ```text
//!  offset  bytes  field
//!       0     24  prologue
//!      24     16  store
//!      40      8  sequence
//!      48      8  proven
//!      56      8  synced
//!      64      4  segment
//!      68      4  blocks
//!      72      4  data_end
//!      76      2  volume
//!      78      2  state        1 open, 2 sealed, 3 free
//!      80      -  zero
//! ```
//!
//! It defends against torn copies (the other one holds), misdirected writes (it names its place) and lies about sizes
//! (every number is held against the segment before it is given out).

use crate::bytes::Reader;
use crate::consts::BLOCK_BYTES;
use crate::error::{Damage, Elsewhere, Structure};
use crate::frame::{self, Checked, PROLOGUE_BYTES};
use crate::geometry::HEADER_BLOCKS;
use crate::ids::{SegmentNo, StoreId};
use crate::serial::Serial;

/// Bytes of a header that carry meaning.
const LENGTH: u32 = 80;

const _: () = assert!(PROLOGUE_BYTES + 16 + 3 * 8 + 3 * 4 + 2 * 2 == LENGTH as usize);

/// Where a segment is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SegmentState {
    /// Being appended to, or left so.
    Open,
    /// Full, or closed early: never appended to again in this life.
    Sealed,
    /// Holds nothing that counts.
    Free,
}

/// The header of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The store it belongs to.
    pub store: StoreId,
    /// The volume it lies on, by its place in the store's list.
    pub volume: u16,
    /// Its number on that volume.
    pub segment: SegmentNo,
    /// The life: drawn when the segment was opened, never used again. [`Serial::ZERO`] only when free from the start.
    pub sequence: Serial,
    /// Where it is in that life.
    pub state: SegmentState,
    /// How many descriptor blocks it has. Has a meaning once sealed, or open and closed in order.
    pub blocks: u32,
    /// The first data block not used, counted in blocks of the segment: [`HEADER_BLOCKS`] when there is none.
    pub data_end: u32,
    /// Commits of this segment up to here are known to be synced together with their payload.
    pub proven: Serial,
    /// The highest commit known to be synced on every volume when this was written.
    pub synced: Serial,
}

/// Where a segment was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentAddress {
    /// The store.
    pub store: StoreId,
    /// The volume, by its place in the store's list.
    pub volume: u16,
    /// The segment's number on that volume.
    pub segment: SegmentNo,
    /// Blocks of a segment of this store.
    pub segment_blocks: u32,
}

/// The place and life that a whole structure claims. It may lie: nothing of it has been compared with where it was
/// read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The store.
    pub store: StoreId,
    /// The volume, by its place in the store's list.
    pub volume: u16,
    /// The segment's number on that volume.
    pub segment: SegmentNo,
    /// The life of the segment.
    pub sequence: Serial,
}

impl SegmentHeader {
    /// Writes the block.
    pub fn encode(&self, out: &mut [u8; BLOCK_BYTES]) {
        debug_assert_eq!(self.validate(), Ok(()), "no reader would take this header");
        let mut writer = frame::begin(out);
        writer.bytes(self.store.as_bytes());
        writer.u64(self.sequence.get());
        writer.u64(self.proven.get());
        writer.u64(self.synced.get());
        writer.u32(self.segment.0);
        writer.u32(self.blocks);
        writer.u32(self.data_end);
        writer.u16(self.volume);
        writer.u16(match self.state {
            SegmentState::Open => 1,
            SegmentState::Sealed => 2,
            SegmentState::Free => 3,
        });
        frame::seal(out, Structure::SegmentHeader, LENGTH);
    }

    /// Checks that a block is a whole header.
    ///
    /// # Errors
    /// It is not; see [`Damage`].
    pub fn check(block: &[u8]) -> Result<Checked<SegmentHeader>, Damage> {
        let mut reader = frame::open(block, Structure::SegmentHeader)?;
        let header = SegmentHeader {
            store: StoreId::from_bytes(reader.array()?),
            sequence: Serial::from_raw(reader.u64()?),
            proven: Serial::from_raw(reader.u64()?),
            synced: Serial::from_raw(reader.u64()?),
            segment: SegmentNo(reader.u32()?),
            blocks: reader.u32()?,
            data_end: reader.u32()?,
            volume: reader.u16()?,
            state: read_state(&mut reader)?,
        };
        let surplus = reader.rest().len() as u64;
        if surplus != 0 {
            let found = u64::from(LENGTH).saturating_add(surplus);
            return Err(Damage::Length { found });
        }
        header.validate()?;
        Ok(Checked(header))
    }

    /// What holds whatever the place.
    fn validate(&self) -> Result<(), Damage> {
        let serials = [
            ("sequence", self.sequence, self.state == SegmentState::Free),
            ("proven", self.proven, true),
            ("synced", self.synced, true),
        ];
        for (field, serial, may_be_zero) in serials {
            let none_yet = may_be_zero && serial == Serial::ZERO;
            if !serial.is_drawn() && !none_yet {
                return Err(damaged(field, serial.get()));
            }
        }
        if self.data_end < HEADER_BLOCKS {
            return Err(damaged("data_end", self.data_end));
        }
        Ok(())
    }

    fn identity(&self) -> Identity {
        Identity {
            store: self.store,
            volume: self.volume,
            segment: self.segment,
            sequence: self.sequence,
        }
    }
}

impl Checked<SegmentHeader> {
    /// The place and life it claims, to tell an older life from garbage.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.0.identity()
    }

    /// The header, when it belongs where it was read and its sizes fit there.
    ///
    /// # Errors
    /// [`Damage::Elsewhere`], or [`Damage::Field`] for sizes that do not fit the segment.
    pub fn at(self, address: &SegmentAddress) -> Result<SegmentHeader, Damage> {
        let header = self.0;
        header.identity().at(address)?;
        match header.data_end.checked_add(header.blocks) {
            Some(used) if used <= address.segment_blocks => Ok(header),
            Some(_) if header.blocks == 0 => Err(damaged("data_end", header.data_end)),
            _ => Err(damaged("blocks", header.blocks)),
        }
    }
}

impl Identity {
    /// Whether this is the place that was read.
    #[inline]
    pub(crate) fn at(&self, address: &SegmentAddress) -> Result<(), Damage> {
        if self.store != address.store {
            return Err(Damage::Elsewhere(Elsewhere::Store {
                claimed: self.store,
                expected: address.store,
            }));
        }
        if self.volume != address.volume {
            return Err(Damage::Elsewhere(Elsewhere::Volume {
                claimed: self.volume,
                expected: address.volume,
            }));
        }
        if self.segment != address.segment {
            return Err(Damage::Elsewhere(Elsewhere::Segment {
                claimed: self.segment,
                expected: address.segment,
            }));
        }
        Ok(())
    }
}

fn read_state(reader: &mut Reader<'_>) -> Result<SegmentState, Damage> {
    match reader.u16()? {
        1 => Ok(SegmentState::Open),
        2 => Ok(SegmentState::Sealed),
        3 => Ok(SegmentState::Free),
        other => Err(damaged("state", other)),
    }
}

fn damaged(field: &'static str, value: impl Into<u64>) -> Damage {
    Damage::Field {
        field,
        value: value.into(),
    }
}
