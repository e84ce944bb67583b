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
fn the_length_of_a_namespace_is_in_no_clear_field() {
    let header = |tenant: &str| {
        let mut block = namespace_block();
        let Body::Namespace(namespace) = &mut block.body else {
            panic!("another body");
        };
        let mut fields = namespace.fields().clone();
        fields.extra.insert("tenant".to_owned(), tenant.to_owned());
        *namespace = Namespace::new(fields).unwrap();
        let bytes = sealed(&block);
        let mut opened = bytes;
        DescriptorBlock::unseal(&mut opened, open).unwrap();
        assert_eq!(decode_block(&opened), Ok(block));
        // Other bytes behind it are no namespace.
        let at = 160 + NAMESPACE_BYTES_MAX - 1;
        let other = patched(&opened, at, &[1]);
        let found = refused(DescriptorBlock::check(&other));
        assert_eq!(found, Damage::Namespace(NamespaceError::NotCanonical));
        [&bytes[..16], &bytes[20..84]].concat()
    };
    assert_eq!(header("a"), header(&"long ".repeat(40)));
}

#[test]
fn a_block_that_was_not_encrypted_is_blank() {
    let mut block = encode_block(&records_block());
    let refused = DescriptorBlock::seal(&mut block, |_, _| Err(7));
    assert_eq!(refused, Err(7));
    assert_eq!(block, [0; BLOCK_BYTES]);
}

/// Without the key the header is read, and whatever a block without a key shows as damage.
#[test]
fn a_reader_without_the_key_has_the_header_and_no_records() {
    for block in [records_block(), void_block(), namespace_block()] {
        for bytes in [sealed(&block), encode_block(&block)] {
            let checked = DescriptorBlock::check_locked(&bytes).unwrap();
            let identity = DescriptorBlock::check(&encode_block(&block))
                .unwrap()
                .identity();
            assert_eq!(checked.identity(), identity);
            let mut torn = bytes;
            torn[2000] ^= 1;
            assert!(matches!(
                refused(DescriptorBlock::check_locked(&torn)),
                Damage::Checksum { .. }
            ));
        }
    }
}

#[test]
fn quotas_are_encrypted_block_by_block_and_come_back() {
    let quota = |number: usize| Quota {
        group: QuotaGroup::Tenant(format!("a tenant {number:03}")),
        min: 1,
        max: None,
        max_age_s: None,
    };
    for groups in [0, 1, 15, 16, 40] {
        let quotas = Quotas {
            generation: 3,
            list: (0..groups).map(quota).collect(),
        };
        let clear = quotas.encode(STORE).unwrap();
        let mut copy = clear.clone();
        Quotas::seal(&mut copy, seal).unwrap();
        assert!(!copy.windows(8).any(|part| part == b"a tenant"));
        assert!(Quotas::decode(&copy, STORE).is_err());
        // Another row behind it is of no account.
        let rows = groups.div_ceil(15).max(1) * BLOCK_BYTES;
        copy[rows..].fill(7);
        let mut opened = copy.clone();
        Quotas::unseal(&mut opened, open).unwrap();
        assert_eq!(Quotas::decode(&opened, STORE), Ok(quotas));
        for block in (0..rows).step_by(BLOCK_BYTES) {
            let mut torn = copy.clone();
            torn[block..block + BLOCK_BYTES].fill(0);
            assert!(Quotas::unseal(&mut torn, open).is_err());
        }
        assert_eq!(
            Quotas::unseal(&mut clear.clone(), open),
            Err(Damage::Sealed)
        );
    }
    let mut blank = vec![0; QUOTAS_BYTES];
    assert_eq!(Quotas::unseal(&mut blank, open), Ok(()));
    let lost = Err(Damage::Blank(Structure::Quotas));
    assert_eq!(Quotas::decode(&blank, STORE), lost);
}
