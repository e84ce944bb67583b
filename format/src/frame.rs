//! The parts common to all structures: one block, a prologue, and two levels of trust.
//!
//! ```text
//!  offset  bytes  field
//!       0      8  magic        which structure this is
//!       8      4  version      FORMAT_VERSION
//!      12      4  length       bytes in use, prologue included; all bytes behind are zero
//!      16      4  crc          CRC-32 of the whole block, computed with this field zero
//!      20      4  zero
//!      24      -  the structure's own fields
//! ```
//!
//! The positions of magic, version and crc, and the range of the crc, are fixed for all future
//! versions. Any build can therefore distinguish a newer block from a damaged block.
//!
//! Trust is a type. Raw bytes become a [`Checked`] structure after the magic, crc, version, length
//! and the range of each field are checked. A `Checked` structure gives access to its fields only
//! after a comparison with the location from which it was read.

use crate::bytes::{Reader, Writer, all_zero};
use crate::consts::{BLOCK_BYTES, FORMAT_VERSION};
use crate::error::{Damage, Structure};

/// One block in memory.
pub(crate) type Block = [u8; BLOCK_BYTES];

const MAGIC_BYTES: usize = 8;
/// Offset of the CRC, behind magic, version and length.
pub(crate) const CRC_AT: usize = MAGIC_BYTES + 4 + 4;
const CRC_BYTES: usize = 4;

/// Bytes of the prologue.
pub(crate) const PROLOGUE_BYTES: usize = CRC_AT + CRC_BYTES + 4;

const _: () = assert!(CRC_AT == 16 && PROLOGUE_BYTES == 24);

/// A structure that is whole, but not yet compared with its location. Misdirected writes,
/// misdirected reads and blocks of an earlier generation are all whole. Only the claimed identity
/// can be read; `at` compares it with the location that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked<T>(pub(crate) T);

/// Runs all checks that do not depend on the structure, and returns a reader of the structure's own
/// fields.
///
/// The crc is checked before the version: the version field of a damaged block means nothing.
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
    if !(structure.oldest_version()..=FORMAT_VERSION).contains(&version) {
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

impl Reader<'_> {
    /// Skips bytes that this version does not use. A non-zero byte means that the writer used a
    /// field unknown to this version.
    #[inline]
    pub(crate) fn reserved(&mut self, bytes: usize) -> Result<(), Damage> {
        if all_zero(self.slice(bytes)?) {
            Ok(())
        } else {
            Err(Damage::Reserved)
        }
    }
}

/// The version that the prologue of a block states.
pub(crate) fn version_of(block: &[u8]) -> u32 {
    let stated = block.get(MAGIC_BYTES..).and_then(<[u8]>::first_chunk);
    stated.map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// Zeroes a block and returns a writer of the structure's own fields. [`seal`] completes the block.
pub(crate) fn begin(block: &mut Block) -> Writer<'_> {
    block.fill(0);
    let mut writer = Writer::new(block);
    writer.reserved(PROLOGUE_BYTES);
    writer
}

/// Writes the prologue of a block whose fields are already written. `length` includes the prologue.
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

/// The CRC-32 of a block, computed with the crc field as zero.
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
