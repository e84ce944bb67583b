//! Descriptor blocks: the log of a segment.
//!
//! Block `index` is the block `segment_blocks - 1 - index` of the segment: descriptor blocks grow
//! down from the end, towards the page data. A block is written once per generation of its segment.
//! If that write fails, an empty block takes its place. A block contains its own identity: store,
//! volume, segment, segment generation (`sequence`), `index` and `commit`. A block of an earlier
//! generation, of another location or of another store is therefore detected independently of the
//! blocks around it.
//!
//! ```text
//!  offset  bytes  field
//!       0     24  prologue      its length is 160 and the body's bytes
//!      24     16  store
//!      40      8  sequence      the generation of the segment
//!      48      8  commit        the group that this block belongs to
//!      56      8  synced        the highest commit known to be synced on every volume
//!      64      4  segment
//!      68      4  index
//!      72      4  data_end      first unused data block, after this block's pages
//!      76      2  volume
//!      78      2  body          1 records, 2 namespace
//!      80      4  count         records, or bytes of the namespace
//!      84     24  nonce         these two of an encrypted body
//!     108     16  tag
//!     124     36  zero
//!     160      -  body          records, see `record`; or an encoded namespace
//! ```
//!
//! An encrypted store has encrypted bodies, and clear headers. The CRC covers the encrypted body,
//! so that torn, foreign and blank blocks are known without a key. [`DescriptorBlock::check`] takes
//! a block with a clear body: [`DescriptorBlock::unseal`] makes one.
//!
//! Invariants of a decoded block: `sequence <= commit`, `synced < commit`, every version (`birth`)
//! is `< commit`, every page lies within `2..data_end`, and `data_end` is not above this block. A
//! version may belong to any earlier epoch, because a copy keeps its version. The block does not
//! prove that the payload of a page was written; only the payload checksum does.

use crate::bytes::Reader;
use crate::consts::BLOCK_BYTES;
use crate::error::{Damage, Elsewhere, Structure};
use crate::frame::{self, Checked, PROLOGUE_BYTES};
use crate::geometry::{HEADER_BLOCKS, descriptor_block};
use crate::ids::{SegmentNo, StoreId};
use crate::namespace::{NAMESPACE_BYTES_MAX, Namespace};
use crate::record::{RECORD_BYTES, Record};
use crate::sealed::{MetadataSeal, Sealable};
use crate::segment::{Identity, SegmentAddress};
use crate::serial::Serial;

/// Maximum number of records of a block.
pub const RECORDS_PER_BLOCK: usize = (BLOCK_BYTES - HEADER_BYTES) / RECORD_BYTES;

const HEADER_BYTES: usize = 160;
const HEADER_RESERVED: usize = HEADER_BYTES - PROLOGUE_BYTES - (16 + 3 * 8 + 3 * 4 + 2 * 2 + 4);
const NONCE_AT: usize = HEADER_BYTES - HEADER_RESERVED;
const BODY_RECORDS: u16 = 1;
const BODY_NAMESPACE: u16 = 2;
const SEALABLE: Sealable = Sealable {
    structure: Structure::DescriptorBlock,
    nonce_at: NONCE_AT,
    body_at: HEADER_BYTES,
};
const _: () = assert!(RECORDS_PER_BLOCK == 32 && HEADER_RESERVED == 76 && NONCE_AT == 84);
const _: () = assert!(HEADER_BYTES + NAMESPACE_BYTES_MAX <= BLOCK_BYTES);

/// The header of a descriptor block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHeader {
    /// The store of the block.
    pub store: StoreId,
    /// The volume of the block, as an index in the volume list of the store.
    pub volume: u16,
    /// The segment of the block.
    pub segment: SegmentNo,
    /// The generation of the segment.
    pub sequence: Serial,
    /// The descriptor index: 0 is the last block of the segment.
    pub index: u32,
    /// The commit group of the block.
    pub commit: Serial,
    /// The first unused data block after this block's pages, counted in blocks of the segment.
    pub data_end: u32,
    /// The durable watermark at the time of the write: the highest commit known to be synced on
    /// every volume. [`Serial::ZERO`] if there is none.
    pub synced: Serial,
}

/// The body of a descriptor block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// At most [`RECORDS_PER_BLOCK`] records, in log order.
    Records(Vec<Record>),
    /// A complete namespace. Records refer to it by its fingerprint.
    Namespace(Namespace),
}

/// A descriptor block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescriptorBlock {
    /// The header.
    pub header: BlockHeader,
    /// The body.
    pub body: Body,
}

/// The location from which a descriptor block was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockAddress {
    /// The store.
    pub store: StoreId,
    /// The volume, as an index in the volume list of the store.
    pub volume: u16,
    /// The segment number on that volume.
    pub segment: SegmentNo,
    /// Blocks per segment of this store.
    pub segment_blocks: u32,
    /// The descriptor index in the segment.
    pub index: u32,
}

impl DescriptorBlock {
    /// Encodes the block. Does not allocate.
    ///
    /// # Panics
    /// With more than [`RECORDS_PER_BLOCK`] records.
    #[expect(clippy::cast_possible_truncation, reason = "the body fits a block")]
    pub fn encode(&self, out: &mut [u8; BLOCK_BYTES]) {
        debug_assert_eq!(self.validate(), Ok(()), "no reader would take this block");
        let header = &self.header;
        let (kind, count, bytes) = match &self.body {
            Body::Records(records) => {
                assert!(
                    records.len() <= RECORDS_PER_BLOCK,
                    "too many records for a descriptor block"
                );
                (
                    BODY_RECORDS,
                    records.len(),
                    records.len().saturating_mul(RECORD_BYTES),
                )
            }
            Body::Namespace(_) => (BODY_NAMESPACE, NAMESPACE_BYTES_MAX, NAMESPACE_BYTES_MAX),
        };
        let mut writer = frame::begin(out);
        writer.bytes(header.store.as_bytes());
        writer.u64(header.sequence.get());
        writer.u64(header.commit.get());
        writer.u64(header.synced.get());
        writer.u32(header.segment.0);
        writer.u32(header.index);
        writer.u32(header.data_end);
        writer.u16(header.volume);
        writer.u16(kind);
        writer.u32(count as u32);
        writer.reserved(HEADER_RESERVED);
        match &self.body {
            Body::Records(records) => records.iter().for_each(|record| record.write(&mut writer)),
            Body::Namespace(namespace) => writer.bytes(namespace.encode()),
        }
        let length = HEADER_BYTES.saturating_add(bytes);
        frame::seal(out, Structure::DescriptorBlock, length as u32);
    }

    /// Checks that a block is a whole descriptor block.
    ///
    /// # Errors
    /// The block is not valid; see [`Damage`].
    pub fn check(block: &[u8]) -> Result<Checked<DescriptorBlock>, Damage> {
        let (header, (kind, count), mut reader) = read_header(block)?;
        reader.reserved(HEADER_RESERVED)?;
        let body = match kind {
            BODY_RECORDS => Body::Records(read_records(reader.rest(), count)?),
            BODY_NAMESPACE => Body::Namespace(read_namespace(reader.rest(), count)?),
            other => return Err(damaged("body", other)),
        };
        let block = DescriptorBlock { header, body };
        block.validate()?;
        Ok(Checked(block))
    }

    /// The same for a reader without the key of an encrypted body. The block that it returns has
    /// the header, and no records: it must not be written.
    ///
    /// # Errors
    /// The block is not valid; see [`Damage`].
    pub fn check_locked(block: &[u8]) -> Result<Checked<DescriptorBlock>, Damage> {
        let (header, _, _) = read_header(block)?;
        header.validate()?;
        let body = Body::Records(Vec::new());
        Ok(Checked(DescriptorBlock { header, body }))
    }

    /// Encrypts the body of an encoded block. `seal` gets what the tag covers besides the body, and
    /// the body.
    ///
    /// # Errors
    /// That of `seal`. The block is blank then.
    pub fn seal<E>(
        block: &mut [u8; BLOCK_BYTES],
        seal: impl FnOnce(&[u8], &mut [u8]) -> Result<MetadataSeal, E>,
    ) -> Result<(), E> {
        SEALABLE.seal(block, seal)
    }

    /// Decrypts the body of a block of an encrypted store. `open` gets what the tag covers besides
    /// the body, the body, and its seal. It returns whether the tag is right.
    ///
    /// # Errors
    /// The block is not whole; or [`Damage::Sealed`], if the tag is wrong or the body is not
    /// encrypted.
    pub fn unseal(
        block: &mut [u8; BLOCK_BYTES],
        open: impl FnOnce(&[u8], &mut [u8], &MetadataSeal) -> bool,
    ) -> Result<(), Damage> {
        SEALABLE.unseal(block, open)
    }

    /// Checks the rules that do not depend on the location.
    #[inline]
    fn validate(&self) -> Result<(), Damage> {
        let header = &self.header;
        header.validate()?;
        match &self.body {
            Body::Records(records) => records
                .iter()
                .try_for_each(|record| record.validate(header.commit, header.data_end)),
            Body::Namespace(_) => Ok(()),
        }
    }
}

impl BlockHeader {
    /// Checks the rules that do not depend on the location.
    #[inline]
    fn validate(&self) -> Result<(), Damage> {
        if !self.sequence.is_drawn() {
            return Err(damaged("sequence", self.sequence.get()));
        }
        if self.commit < self.sequence {
            return Err(damaged("commit", self.commit.get()));
        }
        let synced_is_one = self.synced.is_drawn() || self.synced == Serial::ZERO;
        if !synced_is_one || self.synced >= self.commit {
            return Err(damaged("synced", self.synced.get()));
        }
        if self.data_end < HEADER_BLOCKS {
            return Err(damaged("data_end", self.data_end));
        }
        Ok(())
    }
}

impl Checked<DescriptorBlock> {
    /// The claimed location and generation. Distinguishes a block of an older generation from
    /// garbage.
    #[must_use]
    pub fn identity(&self) -> Identity {
        let header = &self.0.header;
        Identity {
            store: header.store,
            volume: header.volume,
            segment: header.segment,
            sequence: header.sequence,
        }
    }

    /// Returns the block if it matches the location from which it was read, and if all its pages
    /// lie below it in the segment.
    ///
    /// # Errors
    /// [`Damage::Elsewhere`], or [`Damage::Field`] for data that would overlap the descriptor
    /// blocks.
    pub fn at(self, address: &BlockAddress) -> Result<DescriptorBlock, Damage> {
        self.identity().at(&SegmentAddress {
            store: address.store,
            volume: address.volume,
            segment: address.segment,
            segment_blocks: address.segment_blocks,
        })?;
        let header = &self.0.header;
        if header.index != address.index {
            return Err(Damage::Elsewhere(Elsewhere::Index {
                claimed: header.index,
                expected: address.index,
            }));
        }
        let own = descriptor_block(address.segment_blocks, header.index);
        match own {
            Some(own) if header.data_end <= own => Ok(self.0),
            Some(_) => Err(damaged("data_end", header.data_end)),
            None => Err(damaged("index", header.index)),
        }
    }
}

/// The header of a whole block, the kind and the count of its body, and a reader of the rest.
fn read_header(block: &[u8]) -> Result<(BlockHeader, (u16, u32), Reader<'_>), Damage> {
    let mut reader = frame::open(block, Structure::DescriptorBlock)?;
    let store = StoreId::from_bytes(reader.array()?);
    let sequence = Serial::from_raw(reader.u64()?);
    let commit = Serial::from_raw(reader.u64()?);
    let synced = Serial::from_raw(reader.u64()?);
    let segment = SegmentNo(reader.u32()?);
    let index = reader.u32()?;
    let data_end = reader.u32()?;
    let volume = reader.u16()?;
    let kind = reader.u16()?;
    let count = reader.u32()?;
    let header = BlockHeader {
        store,
        volume,
        segment,
        sequence,
        index,
        commit,
        data_end,
        synced,
    };
    Ok((header, (kind, count), reader))
}

fn read_records(body: &[u8], count: u32) -> Result<Vec<Record>, Damage> {
    let (records, rest) = body.as_chunks::<RECORD_BYTES>();
    // The body lies within one block. This check bounds the number of records before any
    // allocation.
    if records.len() != count as usize || !rest.is_empty() {
        return Err(damaged("count", count));
    }
    records.iter().map(Record::read).collect()
}

fn read_namespace(body: &[u8], count: u32) -> Result<Namespace, Damage> {
    if body.len() != count as usize {
        return Err(damaged("count", count));
    }
    Ok(Namespace::decode_padded(body)?)
}

fn damaged(field: &'static str, value: impl Into<u64>) -> Damage {
    Damage::Field {
        field,
        value: value.into(),
    }
}
