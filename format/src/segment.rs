//! The header of a segment: its generation and its state.
//!
//! The header has two copies, in blocks 0 and 1 of the segment. Opening and sealing write both in
//! one write. Marking the segment free writes the first alone, unless the second is in doubt. The
//! header is a hint: the generation of the segment is the highest valid sequence in either copy or
//! in any descriptor block. Where they disagree, the descriptor blocks take precedence.
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
//!      80      8  born         ms since 1970; 0: unknown
//!      88      -  zero
//! ```
//!
//! Faults covered: torn copies (the other copy is valid), misdirected writes (the header contains
//! its location) and wrong sizes (every number is checked against the segment before it is
//! returned).

use crate::bytes::Reader;
use crate::consts::BLOCK_BYTES;
use crate::error::{Damage, Elsewhere, Structure};
use crate::frame::{self, Checked, PROLOGUE_BYTES};
use crate::geometry::HEADER_BLOCKS;
use crate::ids::{SegmentNo, StoreId};
use crate::serial::Serial;

/// Bytes of a header that are in use.
const LENGTH: u32 = 88;

const _: () = assert!(PROLOGUE_BYTES + 16 + 3 * 8 + 3 * 4 + 2 * 2 + 8 == LENGTH as usize);

/// The state of a segment within its generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SegmentState {
    /// Appended to, or left open by a crash.
    Open,
    /// Full, or closed early: never appended to again in this generation.
    Sealed,
    /// Contains no valid data.
    Free,
}

/// The header of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The store of the segment.
    pub store: StoreId,
    /// The volume of the segment, as an index in the volume list of the store.
    pub volume: u16,
    /// The segment number on that volume.
    pub segment: SegmentNo,
    /// The generation: drawn when the segment was opened, never reused. [`Serial::ZERO`] only if
    /// the segment was never opened.
    pub sequence: Serial,
    /// The state within that generation.
    pub state: SegmentState,
    /// Number of descriptor blocks. Valid if the segment is sealed, or open in a store that was
    /// closed in order.
    pub blocks: u32,
    /// The first unused data block, counted in blocks of the segment: [`HEADER_BLOCKS`] if the
    /// segment has no data.
    pub data_end: u32,
    /// Commits of this segment up to this serial are known to be synced together with their
    /// payload.
    pub proven: Serial,
    /// The durable watermark at the time of the write: the highest commit known to be synced on
    /// every volume.
    pub synced: Serial,
    /// The mean time at which its pages were put first, in milliseconds since 1970. For statistics
    /// alone. 0 if it is unknown.
    pub born_ms: u64,
}

/// The location from which a segment was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentAddress {
    /// The store.
    pub store: StoreId,
    /// The volume, as an index in the volume list of the store.
    pub volume: u16,
    /// The segment number on that volume.
    pub segment: SegmentNo,
    /// Blocks per segment of this store.
    pub segment_blocks: u32,
}

/// The location and generation that a whole structure claims. They may be wrong: they have not been
/// compared with the location from which the structure was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The store.
    pub store: StoreId,
    /// The volume, as an index in the volume list of the store.
    pub volume: u16,
    /// The segment number on that volume.
    pub segment: SegmentNo,
    /// The generation of the segment.
    pub sequence: Serial,
}

impl SegmentHeader {
    /// Encodes the block.
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
        writer.u64(self.born_ms);
        frame::seal(out, Structure::SegmentHeader, LENGTH);
    }

    /// Checks that a block is a whole header.
    ///
    /// # Errors
    /// The block is not valid; see [`Damage`].
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
            born_ms: reader.u64()?,
        };
        let surplus = reader.rest().len() as u64;
        if surplus != 0 {
            let found = u64::from(LENGTH).saturating_add(surplus);
            return Err(Damage::Length { found });
        }
        header.validate()?;
        Ok(Checked(header))
    }

    /// Checks the rules that do not depend on the location.
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
    /// The claimed location and generation. Distinguishes a header of an older generation from
    /// garbage.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.0.identity()
    }

    /// Returns the header if it matches the location from which it was read and its sizes fit.
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
    /// Compares the claimed location with the location that was read.
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
