//! The parsers of on-disk structures, one block at a time: the bytes as they are, and framed with a
//! valid checksum, so that the later checks are reached. A parser may accept only bytes that its
//! encoder writes. Two encodings of one value, or bytes that no encoder writes, show a missing
//! check.

use larder_engine::format::{
    BLOCK_BYTES, BlockAddress, DescriptorBlock, FORMAT_VERSION, Namespace, SegmentAddress,
    SegmentHeader, Structure, Superblock, newest,
};

use crate::edits::fix_checksum;
use crate::memory_disk::Block;

const PROLOGUE_BYTES: usize = 24;

/// A block of a structure. The first two bytes of the input are its length, the others its own
/// fields.
pub(crate) fn framed(structure: Structure, data: &[u8]) -> Block {
    let mut block = [0; BLOCK_BYTES];
    block[..8].copy_from_slice(&structure.magic());
    block[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    let (length, own) = data.split_at(data.len().min(2));
    block[12..12 + length.len()].copy_from_slice(length);
    let own = &own[..own.len().min(BLOCK_BYTES - PROLOGUE_BYTES)];
    block[PROLOGUE_BYTES..PROLOGUE_BYTES + own.len()].copy_from_slice(own);
    fix_checksum(&mut block);
    block
}

/// A block that begins with these bytes.
fn padded(data: &[u8]) -> Block {
    let mut block = [0; BLOCK_BYTES];
    let bytes = data.len().min(BLOCK_BYTES);
    block[..bytes].copy_from_slice(&data[..bytes]);
    block
}

/// Superblocks: each alone, and the choice between two.
///
/// # Panics
/// If the parser accepts bytes that the encoder does not write: here, and in the functions below.
pub fn superblock(data: &[u8]) {
    let _ = Superblock::decode(data);
    let _ = Superblock::decode_saved(data);
    let mut repaired = padded(data);
    fix_checksum(&mut repaired);
    let blocks = [padded(data), repaired, framed(Structure::Superblock, data)];
    for block in &blocks {
        if let Ok(superblock) = Superblock::decode(block) {
            let again = superblock.encode().expect("a decoded superblock is valid");
            assert!(*again == *block, "a superblock has two encodings");
            let saved = superblock.encode_saved().expect("it is valid");
            assert_eq!(Superblock::decode_saved(&saved[..]), Ok(superblock.clone()));
            for volume in 0..=u16::try_from(superblock.volumes.len()).unwrap_or(u16::MAX) {
                let _ = superblock.geometry(volume);
            }
        }
    }
    let copies = blocks.each_ref().map(|block| Superblock::decode(block));
    let _ = newest(copies).map_err(|error| error.to_string());
}

/// Segment headers, read at the address that they state and elsewhere.
pub fn segment_header(data: &[u8]) {
    let _ = SegmentHeader::check(data);
    for block in [padded(data), framed(Structure::SegmentHeader, data)] {
        let checked = match SegmentHeader::check(&block) {
            Ok(checked) => checked,
            Err(damage) => {
                let _ = damage.to_string();
                continue;
            }
        };
        let claimed = checked.identity();
        for segment_blocks in [4096, 1 << 20, 64] {
            let address = SegmentAddress {
                store: claimed.store,
                volume: claimed.volume,
                segment: claimed.segment,
                segment_blocks,
            };
            if let Ok(header) = checked.clone().at(&address) {
                assert!(
                    header.data_end + header.blocks <= segment_blocks,
                    "a header's sizes do not fit its segment"
                );
                let mut again = [0; BLOCK_BYTES];
                header.encode(&mut again);
                assert!(again == block, "a header has two encodings");
            }
            let elsewhere = SegmentAddress {
                volume: claimed.volume.wrapping_add(1),
                ..address
            };
            assert!(
                checked.clone().at(&elsewhere).is_err(),
                "a header is accepted for another volume"
            );
        }
    }
}

/// Descriptor blocks, read at the address that they state and elsewhere.
pub fn descriptor_block(data: &[u8]) {
    let _ = DescriptorBlock::check(data);
    for block in [padded(data), framed(Structure::DescriptorBlock, data)] {
        let checked = match DescriptorBlock::check(&block) {
            Ok(checked) => checked,
            Err(damage) => {
                let _ = damage.to_string();
                continue;
            }
        };
        let claimed = checked.identity();
        let index = u32::from_le_bytes([block[68], block[69], block[70], block[71]]);
        for segment_blocks in [4096, 1 << 20, 64] {
            let address = BlockAddress {
                store: claimed.store,
                volume: claimed.volume,
                segment: claimed.segment,
                segment_blocks,
                index,
            };
            if let Ok(descriptors) = checked.clone().at(&address) {
                let own = segment_blocks - 1 - index;
                assert!(
                    descriptors.header.data_end <= own,
                    "page data reaches into the descriptor blocks"
                );
                let mut again = [0; BLOCK_BYTES];
                descriptors.encode(&mut again);
                assert!(again == block, "a descriptor block has two encodings");
            }
            let elsewhere = BlockAddress {
                index: index.wrapping_add(1),
                ..address
            };
            assert!(
                checked.clone().at(&elsewhere).is_err(),
                "a descriptor block is accepted at another index"
            );
        }
    }
}

/// Namespace records.
pub fn namespace_record(data: &[u8]) {
    match Namespace::decode(data) {
        Ok(namespace) => {
            assert!(namespace.encode() == data, "a namespace has two encodings");
            let again = Namespace::new(namespace.fields().clone());
            assert!(
                again.is_ok_and(|again| again.fingerprint() == namespace.fingerprint()),
                "a namespace differs from its fields"
            );
            assert!(
                !namespace.to_string().chars().any(char::is_control),
                "a namespace has control characters for a terminal"
            );
        }
        Err(error) => {
            let _ = error.to_string();
        }
    }
}
