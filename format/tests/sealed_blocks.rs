//! Descriptor blocks of an encrypted store: their clear part, and blocks that do not open.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use larder_format::*;

/// A cipher for tests: it shows its input.
fn seal(named: &[u8], body: &mut [u8]) -> Result<MetadataSeal, ()> {
    body.iter_mut().for_each(|byte| *byte ^= 0x5a);
    let sum = named
        .iter()
        .fold(1_u8, |sum, byte| sum.rotate_left(1) ^ byte);
    let nonce = [9; 24];
    Ok(MetadataSeal {
        nonce,
        tag: [sum; 16],
    })
}

fn open(named: &[u8], body: &mut [u8], found: &MetadataSeal) -> bool {
    seal(named, body).is_ok_and(|expected| expected == *found)
}

fn sealed(block: &DescriptorBlock) -> Block {
    let mut bytes = encode_block(block);
    DescriptorBlock::seal(&mut bytes, seal).unwrap();
    bytes
}

#[test]
fn a_body_is_encrypted_and_comes_back_and_the_header_stays() {
    for block in [records_block(), void_block(), namespace_block()] {
        let clear = encode_block(&block);
        let mut bytes = sealed(&block);
        assert_eq!(bytes[24..84], clear[24..84]);
        let length = u32::from_le_bytes(clear[12..16].try_into().unwrap()) as usize;
        let pairs = bytes[160..length].iter().zip(&clear[160..length]);
        assert!(pairs.clone().all(|(sealed, clear)| sealed != clear));
        assert_eq!(refused(DescriptorBlock::check(&bytes)), Damage::Reserved);
        DescriptorBlock::unseal(&mut bytes, open).unwrap();
        assert!(bytes == clear);
        assert_eq!(decode_block(&bytes), Ok(block));
    }
}

#[test]
fn a_block_that_is_changed_moved_or_clear_does_not_open() {
    let block = sealed(&records_block());
    let unsealed = |mut block: Block| DescriptorBlock::unseal(&mut block, open);
    assert_eq!(unsealed(block), Ok(()));
    // The store, the place, the commit, the nonce and the tag.
    for at in [24, 41, 50, 64, 68, 72, 76, 80, 84, 108, 123] {
        let changed = patched(&block, at, &[block[at] ^ 1]);
        assert_eq!(unsealed(changed), Err(Damage::Sealed), "byte {at}");
    }
    assert_eq!(
        unsealed(encode_block(&records_block())),
        Err(Damage::Sealed)
    );
    // Without a key, as ever.
    let mut torn = block;
    torn[2000] ^= 1;
    assert!(matches!(unsealed(torn), Err(Damage::Checksum { .. })));
    let blank = Damage::Blank(Structure::DescriptorBlock);
    assert_eq!(unsealed([0; BLOCK_BYTES]), Err(blank));
}

#[test]
fn a_block_that_was_not_encrypted_is_blank() {
    let mut block = encode_block(&records_block());
    let refused = DescriptorBlock::seal(&mut block, |_, _| Err(7));
    assert_eq!(refused, Err(7));
    assert_eq!(block, [0; BLOCK_BYTES]);
}
