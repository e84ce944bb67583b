//! Blocks with a clear header and a body that can be encrypted.
//!
//! The header has room for a nonce and a tag, which are zero as long as the body is clear. The CRC
//! of the block covers the body as it is.

use crate::bytes::{Reader, Writer};
use crate::consts::BLOCK_BYTES;
use crate::error::{Damage, Structure};
use crate::frame::{self, CRC_AT, PROLOGUE_BYTES};

/// Bytes of a nonce.
pub(crate) const NONCE_BYTES: usize = 24;

/// Bytes of a tag.
pub(crate) const TAG_BYTES: usize = 16;

const LENGTH_AT: usize = 8 + 4;

/// What decryption of metadata needs besides the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetadataSeal {
    /// Random bytes, drawn for this encryption alone.
    pub nonce: [u8; NONCE_BYTES],
    /// The tag over the text, its structure and its place.
    pub tag: [u8; TAG_BYTES],
}

const CLEAR: MetadataSeal = MetadataSeal {
    nonce: [0; NONCE_BYTES],
    tag: [0; TAG_BYTES],
};

/// A structure whose body can be encrypted.
pub(crate) struct Sealable {
    pub(crate) structure: Structure,
    /// Offset of nonce and tag. The tag covers all before these but the CRC.
    pub(crate) nonce_at: usize,
    /// Offset of the body.
    pub(crate) body_at: usize,
}

impl Sealable {
    /// Encrypts the body of an encoded block. `seal` gets what the tag covers besides the body, and
    /// the body. If it fails the block is blank.
    pub(crate) fn seal<E>(
        &self,
        block: &mut [u8; BLOCK_BYTES],
        seal: impl FnOnce(&[u8], &mut [u8]) -> Result<MetadataSeal, E>,
    ) -> Result<(), E> {
        let length = self.length_of(block);
        let (header, body) = self.split(block, length);
        let sealed = seal(&self.named(header), body);
        let seal = sealed.inspect_err(|_| block.fill(0))?;
        self.write(block, &seal);
        frame::seal(block, self.structure, length);
        Ok(())
    }

    /// Decrypts the body of a whole block. `open` gets what the tag covers besides the body, the
    /// body, and its seal. It returns whether the tag is right.
    pub(crate) fn unseal(
        &self,
        block: &mut [u8; BLOCK_BYTES],
        open: impl FnOnce(&[u8], &mut [u8], &MetadataSeal) -> bool,
    ) -> Result<(), Damage> {
        frame::open(block, self.structure)?;
        let mut reader = Reader::new(block.get(self.nonce_at..).unwrap_or_default());
        let seal = MetadataSeal {
            nonce: reader.array()?,
            tag: reader.array()?,
        };
        let length = self.length_of(block);
        let (header, body) = self.split(block, length);
        if seal == CLEAR || !open(&self.named(header), body, &seal) {
            return Err(Damage::Sealed);
        }
        self.write(block, &CLEAR);
        frame::seal(block, self.structure, length);
        Ok(())
    }

    /// The length that the prologue states: at most a block, and the header at least.
    #[expect(clippy::cast_possible_truncation, reason = "a block has 4096 bytes")]
    fn length_of(&self, block: &[u8; BLOCK_BYTES]) -> u32 {
        let stated = block.get(LENGTH_AT..).and_then(<[u8]>::first_chunk);
        let stated = stated.map_or(0, |bytes| u32::from_le_bytes(*bytes));
        stated.clamp(self.body_at as u32, BLOCK_BYTES as u32)
    }

    /// What the tag covers of the header: magic, version and length, and the structure's own
    /// fields.
    fn named(&self, header: &[u8]) -> Vec<u8> {
        let prologue = header.get(..CRC_AT).unwrap_or_default();
        let own = header.get(PROLOGUE_BYTES..self.nonce_at);
        [prologue, own.unwrap_or_default()].concat()
    }

    /// The header of a block, and its body of this length with the header.
    fn split<'b>(
        &self,
        block: &'b mut [u8; BLOCK_BYTES],
        length: u32,
    ) -> (&'b mut [u8], &'b mut [u8]) {
        let (header, rest) = block.split_at_mut(self.body_at);
        let bytes = (length as usize).saturating_sub(self.body_at);
        (header, rest.get_mut(..bytes).unwrap_or_default())
    }

    fn write(&self, block: &mut [u8; BLOCK_BYTES], seal: &MetadataSeal) {
        let mut writer = Writer::new(block);
        writer.reserved(self.nonce_at);
        writer.bytes(&seal.nonce);
        writer.bytes(&seal.tag);
    }
}
