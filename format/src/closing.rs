//! The closing statement of a volume: how much its segments held when the store was closed in
//! order.
//!
//! A generation that becomes zeros looks as if it had never been written, and a page behind a
//! header that is lost looks as if a crash had cut it short. The statement shows what is missing.
//! It lies in a block of its own, at [`CLOSING_OFFSET`](crate::CLOSING_OFFSET). It counts only for
//! the epoch, and the superblock, of its close: each later write of a superblock ends it.
//!
//! ```text
//!  offset  bytes  field
//!       0     24  prologue
//!      24     16  store
//!      40      8  generation   of the superblock that this close wrote on this volume
//!      48      4  run          the epoch that was closed
//!      52      2  volume
//!      54      2  zero
//!      56      4  used         segments with a generation that is not free
//!      60      4  unread       segments whose content this epoch could not read
//!      64     16  sequences    the sum of the generations of the used segments
//!      80      8  pages        live pages in them
//!      88      8  unproven     upper bound of the pages that a header leaves unproven
//!      96      -  zero
//! ```
//!
//! The counts leave out the unread segments.

use crate::bytes::Reader;
use crate::consts::BLOCK_BYTES;
use crate::error::{Damage, Elsewhere, Structure};
use crate::frame::{self, PROLOGUE_BYTES};
use crate::ids::StoreId;
use crate::serial::Run;

/// Bytes of a statement that are in use.
const LENGTH: u32 = 96;

const _: () = assert!(PROLOGUE_BYTES + 16 + 8 + 4 + 2 * 2 + 2 * 4 + 16 + 2 * 8 == LENGTH as usize);

/// The closing statement of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClosingStatement {
    /// The store of the volume.
    pub store: StoreId,
    /// The volume, as an index in the volume list of the store.
    pub volume: u16,
    /// The generation of the superblock that the close wrote on this volume.
    pub generation: u64,
    /// The epoch that was closed.
    pub run: Run,
    /// What the segments of the volume held.
    pub holdings: Holdings,
}

/// How much the segments of a volume hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Segments with a generation that is not free.
    pub used: u32,
    /// Segments whose content could not be read. The other counts leave them out.
    pub unread: u32,
    /// The sum of the generations of the used segments.
    pub sequences: u128,
    /// Live pages in the used segments.
    pub pages: u64,
    /// Upper bound of the pages that the header of their segment leaves unproven, or excludes.
    pub unproven: u64,
}

impl ClosingStatement {
    /// Encodes the block.
    pub fn encode(&self, out: &mut [u8; BLOCK_BYTES]) {
        let mut writer = frame::begin(out);
        writer.bytes(self.store.as_bytes());
        writer.u64(self.generation);
        writer.u32(self.run.get());
        writer.u16(self.volume);
        writer.reserved(2);
        writer.u32(self.holdings.used);
        writer.u32(self.holdings.unread);
        writer.bytes(&self.holdings.sequences.to_le_bytes());
        writer.u64(self.holdings.pages);
        writer.u64(self.holdings.unproven);
        frame::seal(out, Structure::ClosingStatement, LENGTH);
    }

    /// The statement in a block that was read from this volume of this store.
    ///
    /// # Errors
    /// The block is not valid, or it belongs elsewhere; see [`Damage`].
    pub fn decode(block: &[u8], store: StoreId, volume: u16) -> Result<ClosingStatement, Damage> {
        let mut reader = frame::open(block, Structure::ClosingStatement)?;
        let claimed = StoreId::from_bytes(reader.array()?);
        let generation = reader.u64()?;
        let run = reader.u32()?;
        let own = reader.u16()?;
        reader.reserved(2)?;
        let holdings = read_holdings(&mut reader)?;
        let surplus = reader.rest().len() as u64;
        if surplus != 0 {
            let found = u64::from(LENGTH).saturating_add(surplus);
            return Err(Damage::Length { found });
        }
        if claimed != store {
            let expected = store;
            return Err(Damage::Elsewhere(Elsewhere::Store { claimed, expected }));
        }
        if own != volume {
            let (claimed, expected) = (own, volume);
            return Err(Damage::Elsewhere(Elsewhere::Volume { claimed, expected }));
        }
        let run = Run::new(run).ok_or(Damage::Field {
            field: "run",
            value: u64::from(run),
        })?;
        Ok(ClosingStatement {
            store,
            volume,
            generation,
            run,
            holdings,
        })
    }
}

fn read_holdings(reader: &mut Reader<'_>) -> Result<Holdings, Damage> {
    Ok(Holdings {
        used: reader.u32()?,
        unread: reader.u32()?,
        sequences: u128::from_le_bytes(reader.array()?),
        pages: reader.u64()?,
        unproven: reader.u64()?,
    })
}
