//! What every structure shares: one block, a prologue, and two levels of trust.
//!
//! ```text
//!  offset  bytes  field
//!       0      8  magic        which structure this is
//!       8      4  version      FORMAT_VERSION
//!      12      4  length       bytes that carry meaning, prologue included; all bytes behind are zero
//!      16      4  crc          CRC-32 of the whole block, computed with this field zero
//!      20      4  zero
//!      24      -  the structure's own fields
//! ```
//!
//! The places of magic, version and crc, and what the crc covers, are fixed for every version to come: so that any
//! build can tell a newer block from a damaged one.
//!
//! Trust is a type. Raw bytes become a [`Checked`] structure when magic, crc, version, length and the range of each
//! field hold; a `Checked` structure gives up its fields only when it is held against the place it was read at.

use crate::bytes::{Reader, Writer, all_zero};
use crate::consts::{BLOCK_BYTES, FORMAT_VERSION};
use crate::error::{Damage, Structure};

/// One block in memory.
pub(crate) type Block = [u8; BLOCK_BYTES];

const MAGIC_BYTES: usize = 8;
const CRC_AT: usize = MAGIC_BYTES + 4 + 4;
const CRC_BYTES: usize = 4;

/// Bytes of the prologue.
pub(crate) const PROLOGUE_BYTES: usize = CRC_AT + CRC_BYTES + 4;

const _: () = assert!(CRC_AT == 16 && PROLOGUE_BYTES == 24);

/// A structure that is whole, but not yet known to be where it belongs: a misdirected write, a misdirected read and a
/// block of an earlier life are all whole. It has no fields to read but the identity it claims; `at` compares that
/// with the place it was read at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked<T>(pub(crate) T);

/// Checks all that can be checked without knowing the structure, and returns a reader of its own fields.
///
/// The crc comes before the version: a block of a newer version is known to be one only when it is whole.
#[inline]
pub(crate) fn open(block: &[u8], structure: Structure) -> Result<Reader<'_>, Damage> {
    let Ok(block) = <&Block>::try_from(block) else {
        return Err(Damage::Length {
            found: block.len() as u64,
        });
    };
    let mut prologue = Reader::new(block);
    if prologue.array::<MAGIC_BYTES>()? != structure.magic() {
        return Err(if all_zero(block) {
            Damage::Blank(structure)
        } else {
            Damage::Magic(structure)
        });
    }
    let version = prologue.u32()?;
    let length = prologue.u32()?;
    let stored = prologue.u32()?;
    let computed = crc(block);
    if stored != computed {
        return Err(Damage::Checksum { stored, computed });
    }
    if version != FORMAT_VERSION {
        return Err(Damage::Version { found: version });
    }
    prologue.reserved(PROLOGUE_BYTES - CRC_AT - CRC_BYTES)?;
    let impossible = Damage::Length {
        found: u64::from(length),
    };
    let own_bytes = (length as usize)
        .checked_sub(PROLOGUE_BYTES)
        .ok_or(impossible)?;
    let own = prologue.slice(own_bytes).map_err(|_| impossible)?;
    if all_zero(prologue.rest()) {
        Ok(Reader::new(own))
    } else {
        Err(Damage::Reserved)
    }
}

/// Zeroes a block and returns a writer of the structure's own fields; [`seal`] completes the block.
pub(crate) fn begin(block: &mut Block) -> Writer<'_> {
    block.fill(0);
    let mut writer = Writer::new(block);
    writer.reserved(PROLOGUE_BYTES);
    writer
}

/// Writes the prologue of a block whose fields are in place. `length` counts the prologue too.
pub(crate) fn seal(block: &mut Block, structure: Structure, length: u32) {
    let mut prologue = Writer::new(block);
    prologue.bytes(&structure.magic());
    prologue.u32(FORMAT_VERSION);
    prologue.u32(length);
    let crc = crc(block);
    let mut prologue = Writer::new(block);
    prologue.reserved(CRC_AT);
    prologue.u32(crc);
}

/// The CRC-32 of a block, as if its crc field were zero.
#[inline]
fn crc(block: &Block) -> u32 {
    let (before, rest) = block.split_at(CRC_AT);
    let (_, after) = rest.split_at(CRC_BYTES);
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(before);
    hasher.update(&[0; CRC_BYTES]);
    hasher.update(after);
    hasher.finalize()
}
