//! Damaged blocks are refused, and no input causes a panic.
#![allow(clippy::unwrap_used)]

mod common;

use common::keyring::*;
use common::quotas::*;
use common::*;
use larder_format::*;
use proptest::prelude::*;

/// A sample of each kind of valid block, with its decoder and encoder.
struct Sample {
    name: &'static str,
    block: Block,
    /// The block after decode and encode, or `None` if decode refuses it.
    again: fn(&[u8]) -> Option<Block>,
}

fn samples() -> [Sample; 9] {
    let superblock = |block: &[u8]| {
        Superblock::decode(block)
            .ok()
            .map(|it| *it.encode().unwrap())
    };
    let header = |block: &[u8]| decode_header(block).ok().map(|it| encode_header(&it));
    let descriptors = |block: &[u8]| decode_block(block).ok().map(|it| encode_block(&it));
    [
        Sample {
            name: "superblock",
            block: *common::superblock().encode().unwrap(),
            again: superblock,
        },
        Sample {
            name: "saved superblock",
            block: *common::superblock().encode_saved().unwrap(),
            again: |block| {
                let saved = Superblock::decode_saved(block).ok();
                saved.map(|it| *it.encode_saved().unwrap())
            },
        },
        Sample {
            name: "segment header",
            block: encode_header(&segment_header()),
            again: header,
        },
        Sample {
            name: "records",
            block: encode_block(&records_block()),
            again: descriptors,
        },
        Sample {
            name: "record of a failed put",
            block: encode_block(&void_block()),
            again: descriptors,
        },
        Sample {
            name: "closing statement",
            block: encode_closing(&closing_statement()),
            again: |block| decode_closing(block).ok().map(|it| encode_closing(&it)),
        },
        Sample {
            name: "quotas",
            block: encode_quotas(&quotas()),
            again: |block| decode_quotas(block).ok().map(|it| encode_quotas(&it)),
        },
        Sample {
            name: "keyring",
            block: encode_keyring(&keyring(0)),
            again: |block| decode_keyring(block).ok().map(|it| encode_keyring(&it)),
        },
        Sample {
            name: "namespace",
            block: encode_block(&namespace_block()),
            again: descriptors,
        },
    ]
}

#[test]
fn any_single_flipped_bit_of_a_block_is_refused() {
    for sample in samples() {
        assert_eq!(
            (sample.again)(&sample.block),
            Some(sample.block),
            "{}",
            sample.name
        );
        let mut block = sample.block;
        for bit in 0..BLOCK_BYTES * 8 {
            block[bit / 8] ^= 1 << (bit % 8);
            assert_eq!((sample.again)(&block), None, "{}: bit {bit}", sample.name);
            block[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

#[test]
fn a_torn_block_is_refused_at_every_sector() {
    for sample in samples() {
        for older in [[0; BLOCK_BYTES], [0xff; BLOCK_BYTES]] {
            for cut in (512..BLOCK_BYTES).step_by(512) {
                let mut block = sample.block;
                block[cut..].copy_from_slice(&older[cut..]);
                let unchanged = block == sample.block;
                assert_eq!(
                    (sample.again)(&block).is_some(),
                    unchanged,
                    "{} at {cut}",
                    sample.name
                );
            }
        }
    }
}

#[test]
fn a_slice_of_another_length_is_refused() {
    for sample in samples() {
        for bytes in [0, 1, 23, 24, 159, 4095] {
            assert_eq!(
                (sample.again)(&sample.block[..bytes]),
                None,
                "{}: {bytes}",
                sample.name
            );
        }
        let long = [sample.block, sample.block].concat();
        assert_eq!((sample.again)(&long), None, "{}", sample.name);
    }
}

#[test]
fn one_structure_is_never_taken_for_another() {
    let magic = |structure: Structure| Damage::Magic(structure);
    let superblock = superblock().encode().unwrap();
    let descriptors = encode_block(&records_block());
    assert_eq!(
        refused(SegmentHeader::check(&*superblock)),
        magic(Structure::SegmentHeader)
    );
    assert_eq!(
        refused(SegmentHeader::check(&descriptors)),
        magic(Structure::SegmentHeader)
    );
    assert_eq!(
        refused(decode_closing(&descriptors)),
        magic(Structure::ClosingStatement)
    );
    assert_eq!(
        refused(decode_quotas(&descriptors)),
        magic(Structure::Quotas)
    );
    assert_eq!(
        refused(decode_keyring(&descriptors)),
        magic(Structure::Keyring)
    );
    assert_eq!(
        refused(DescriptorBlock::check(&*superblock)),
        magic(Structure::DescriptorBlock)
    );
    assert_eq!(
        refused(Superblock::decode(&descriptors)),
        SuperblockError::NotLarder
    );
    assert_eq!(
        refused(Superblock::decode(&[0; BLOCK_BYTES])),
        SuperblockError::Blank
    );
    for (structure, damage) in [
        (
            Structure::SegmentHeader,
            refused(SegmentHeader::check(&[0; BLOCK_BYTES])),
        ),
        (
            Structure::DescriptorBlock,
            refused(DescriptorBlock::check(&[0; BLOCK_BYTES])),
        ),
    ] {
        assert_eq!(damage, Damage::Blank(structure));
    }
}

fn hostile_word() -> impl Strategy<Value = u32> {
    let limits = [
        0,
        1,
        2,
        3,
        16,
        17,
        32,
        33,
        159,
        160,
        200,
        201,
        4095,
        4096,
        4097,
        65_535,
        65_536,
        1 << 20,
    ];
    prop_oneof![
        prop::sample::select(limits.to_vec()),
        Just(u32::MAX),
        Just(u32::MAX - 1),
        Just(1 << 31),
        any::<u32>(),
    ]
}

/// Changes to a block: offset, value, and width (two or four bytes).
fn changes() -> impl Strategy<Value = Vec<(usize, u32, bool)>> {
    // Most fields of all structures are in the first 352 bytes.
    let place = prop_oneof![4 => 8..352_usize, 1 => 8..BLOCK_BYTES - 4];
    prop::collection::vec((place, hostile_word(), any::<bool>()), 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

    #[test]
    fn a_whole_block_with_hostile_fields_is_refused_or_is_canonical(changes in changes()) {
        for sample in samples() {
            let mut block = sample.block;
            for (at, word, wide) in &changes {
                let bytes = if *wide { 4 } else { 2 };
                let at = at & !(bytes - 1);
                block[at..at + bytes].copy_from_slice(&word.to_le_bytes()[..bytes]);
            }
            let block = with_right_crc(block);
            if let Some(again) = (sample.again)(&block) {
                prop_assert!(again == block, "{} has two encodings", sample.name);
            }
        }
    }

    #[test]
    fn a_whole_block_of_garbage_behind_the_prologue_is_refused(
        tail in prop::collection::vec(any::<u8>(), BLOCK_BYTES - 24),
        length in prop_oneof![Just(4096_u32), any::<u32>()],
    ) {
        for sample in samples() {
            let mut block = sample.block;
            block[12..16].copy_from_slice(&length.to_le_bytes());
            block[24..].copy_from_slice(&tail);
            prop_assert!((sample.again)(&with_right_crc(block)).is_none(), "{}", sample.name);
        }
    }

    #[test]
    fn arbitrary_bytes_are_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..BLOCK_BYTES + 64),
    ) {
        for sample in samples() {
            prop_assert!((sample.again)(&bytes).is_none());
        }
        prop_assert!(Namespace::decode(&bytes).is_err());
    }

    #[test]
    fn changed_bytes_of_a_namespace_are_refused_or_are_another_namespace(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        end in any::<prop::sample::Index>(),
        cut: bool,
    ) {
        let mut bytes = namespace().encode().to_vec();
        for (at, byte) in &changes {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        if cut {
            bytes.truncate(end.index(bytes.len()));
        }
        if let Ok(decoded) = Namespace::decode(&bytes) {
            prop_assert_eq!(decoded.encode(), bytes.as_slice());
            let same = bytes == namespace().encode();
            prop_assert_eq!(decoded.fingerprint() == namespace().fingerprint(), same);
        }
    }
}

#[test]
fn a_namespace_has_no_second_encoding() {
    let bytes = namespace().encode().to_vec();
    let mut longer = bytes.clone();
    longer.push(0);
    assert_eq!(
        refused(Namespace::decode(&longer)),
        NamespaceError::NotCanonical
    );
    // The two extra names in swapped order.
    let at = |needle: &[u8]| {
        bytes
            .windows(needle.len())
            .position(|window| window == needle)
            .unwrap()
    };
    let (rope, tag) = (at(b"\x04\x00rope"), at(b"\x03\x00tag"));
    let swapped = [&bytes[..rope], &bytes[tag..], &bytes[rope..tag]].concat();
    assert_eq!(
        refused(Namespace::decode(&swapped)),
        NamespaceError::NotCanonical
    );
    // One extra name twice.
    let mut twice = [&bytes[..tag], &bytes[rope..tag]].concat();
    let length = u32::try_from(twice.len()).unwrap();
    twice[12..16].copy_from_slice(&length.to_le_bytes());
    assert_eq!(
        refused(Namespace::decode(&twice)),
        NamespaceError::NotCanonical
    );
}
