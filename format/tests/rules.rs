//! The rules of each structure, and the error for each violation.
#![allow(clippy::unwrap_used)]

mod common;

use std::num::NonZeroU16;

use common::*;
use larder_format::*;

fn invalid(field: &'static str, value: u64) -> SuperblockError {
    SuperblockError::Invalid { field, value }
}

fn field(field: &'static str, value: u64) -> Damage {
    Damage::Field { field, value }
}

#[test]
fn a_whole_superblock_of_a_newer_version_is_newer_and_a_torn_one_is_damaged() {
    let block = featured().encode().unwrap();
    let newer = patched(&block, 8, &3_u32.to_le_bytes());
    assert_eq!(
        refused(Superblock::decode(&newer)),
        SuperblockError::Newer {
            version: 3,
            features: Box::new(featured().features),
        }
    );
    let mut torn = newer;
    torn[3000] ^= 1;
    let reason = refused(Superblock::decode(&torn));
    assert!(
        matches!(reason, SuperblockError::Damaged(Damage::Checksum { .. })),
        "{reason}"
    );
    let zero = patched(&block, 8, &0_u32.to_le_bytes());
    let older = SuperblockError::Older { version: 0 };
    assert_eq!(refused(Superblock::decode(&zero)), older);
}

#[test]
fn whole_blocks_of_a_newer_version_are_reported_as_newer() {
    let version = 7_u32.to_le_bytes();
    let header = patched(&encode_header(&segment_header()), 8, &version);
    assert_eq!(
        refused(SegmentHeader::check(&header)),
        Damage::Version { found: 7 }
    );
    let descriptors = patched(&encode_block(&records_block()), 8, &version);
    assert_eq!(
        refused(DescriptorBlock::check(&descriptors)),
        Damage::Version { found: 7 }
    );
}

/// A superblock with one invalid field is neither encoded nor decoded. The decoded blocks are the
/// sample with patched bytes.
#[test]
fn a_superblock_with_an_impossible_field_is_neither_written_nor_read() {
    type Change = fn(&mut Superblock);
    let cases: [(SuperblockError, Change); 11] = [
        (invalid("volumes", 0), |it| it.volumes.clear()),
        (invalid("volumes", 17), |it| {
            it.volumes = vec![it.volumes[0].clone(); 17];
        }),
        (invalid("run", 0), |it| it.run = Run::ZERO),
        (invalid("volume", 3), |it| it.volume = 3),
        (invalid("volume", 1), |it| it.volume = 1),
        (invalid("segment_blocks", 63), |it| {
            it.segment_blocks = 63;
        }),
        (invalid("segment_blocks", (1 << 20) + 1), |it| {
            it.segment_blocks = (1 << 20) + 1;
        }),
        (invalid("segments", 0), |it| it.volumes[1].segments = 0),
        (invalid("segments", (1 << 24) + 1), |it| {
            it.volumes[1].segments = (1 << 24) - 4107;
        }),
        (invalid("path_bytes", 201), |it| {
            it.volumes[1].path = "x".repeat(201);
        }),
        (invalid("id", 0), |it| it.volumes[1].id = it.volumes[0].id),
    ];
    for (reason, change) in cases {
        let mut changed = superblock();
        change(&mut changed);
        assert_eq!(refused(changed.encode()), reason);
    }
    let block = superblock().encode().unwrap();
    let run = (1_u32 << 24).to_le_bytes();
    let reads: [(SuperblockError, usize, &[u8]); 9] = [
        (invalid("run", 0), 72, &[0; 4]),
        (invalid("run", 1 << 24), 72, &run),
        (invalid("segment_blocks", 0), 80, &[0; 4]),
        (invalid("volume", 1), 84, &[1, 0]),
        (invalid("volumes", 17), 86, &[17, 0]),
        (invalid("state", 3), 88, &[3]),
        (invalid("flags", 2), 256 + 20, &[2]),
        (invalid("path_bytes", 201), 256 + 22, &[201]),
        (invalid("path", 1), 256 + 25, &[0xff]),
    ];
    for (reason, at, bytes) in reads {
        assert_eq!(
            refused(Superblock::decode(&patched(&block, at, bytes))),
            reason
        );
    }
}

#[test]
fn a_set_bit_that_should_be_zero_is_refused_though_the_crc_is_right() {
    let superblock = superblock().encode().unwrap();
    for at in [20, 92, 244, 255, 256 + 24 + 14, 4095] {
        let reason = refused(Superblock::decode(&patched(&superblock, at, &[1])));
        assert_eq!(
            reason,
            SuperblockError::Damaged(Damage::Reserved),
            "byte {at}"
        );
    }
    let header = encode_header(&segment_header());
    for at in [20, 88, 4095] {
        assert_eq!(
            refused(SegmentHeader::check(&patched(&header, at, &[1]))),
            Damage::Reserved,
            "byte {at}"
        );
    }
    let descriptors = encode_block(&records_block());
    let [page, head, delete, clear, evict, pin] = [0, 1, 2, 3, 4, 5].map(|n| 160 + n * 123);
    let zeros = [
        20,
        84,
        159,
        page + 1,
        page + 95,
        page + 122,
        head + 56,
        delete + 4,
        delete + 68,
        delete + 75,
        delete + 87,
        clear + 24,
        evict + 73,
        evict + 75,
        pin + 68,
        pin + 87,
        4095,
    ];
    for at in zeros {
        let block = patched(&descriptors, at, &[0x82]);
        assert_eq!(
            refused(DescriptorBlock::check(&block)),
            Damage::Reserved,
            "byte {at}"
        );
    }
}

#[test]
fn the_newer_valid_copy_of_a_superblock_counts() {
    let of = |generation| {
        Ok(Superblock {
            generation,
            ..superblock()
        })
    };
    let torn = || Err(SuperblockError::Damaged(Damage::Short));
    let newer = || {
        Err(SuperblockError::Newer {
            version: 2,
            features: Box::default(),
        })
    };
    let foreign = || Err(SuperblockError::NotLarder);
    let blank = || Err(SuperblockError::Blank);
    for end in [blank(), torn(), foreign()] {
        let of_two = |a, b| newest([a, b, end.clone()]);
        assert_eq!(of_two(of(1), of(2)), of(2));
        assert_eq!(of_two(of(2), of(1)), of(2));
        assert_eq!(of_two(of(3), torn()), of(3));
        assert_eq!(of_two(foreign(), of(3)), of(3));
        assert_eq!(of_two(torn(), foreign()), torn());
        assert_eq!(of_two(foreign(), torn()), torn());
        assert_eq!(of_two(foreign(), foreign()), foreign());
        assert_eq!(of_two(blank(), foreign()), foreign());
        assert_eq!(of_two(blank(), torn()), torn());
        // A newer Larder has written one copy, so the other copies are out of date although they
        // are valid.
        assert_eq!(of_two(of(3), newer()), newer());
        assert_eq!(of_two(newer(), of(3)), newer());
        assert_eq!(of_two(newer(), torn()), newer());
        let other = StoreId::from_bytes([1; 16]);
        let stranger = Ok(Superblock {
            store: other,
            ..superblock()
        });
        assert_eq!(
            of_two(of(3), stranger),
            Err(SuperblockError::TwoStores { a: STORE, b: other })
        );
    }
    assert_eq!(newest([blank(), blank(), blank()]), blank());
}

#[test]
fn the_copy_at_the_end_counts_for_its_own_volume_and_where_nothing_else_is() {
    let of = |generation| Superblock {
        generation,
        ..superblock()
    };
    let blank = || Err(SuperblockError::Blank);
    let torn = || Err(SuperblockError::Damaged(Damage::Short));
    let unreadable = || Err(SuperblockError::Unreadable(5));
    let foreign = || Err(SuperblockError::NotLarder);
    let older = || Err(SuperblockError::Older { version: 1 });
    let newer = || {
        Err(SuperblockError::Newer {
            version: 3,
            features: Box::default(),
        })
    };
    assert_eq!(newest([Ok(of(1)), Ok(of(2)), Ok(of(3))]), Ok(of(3)));
    assert_eq!(newest([Ok(of(2)), Ok(of(3)), Ok(of(1))]), Ok(of(3)));
    assert_eq!(newest([Ok(of(1)), Ok(of(2)), newer()]), newer());
    for stranger in [
        Superblock {
            store: StoreId::from_bytes([1; 16]),
            ..of(9)
        },
        Superblock { volume: 0, ..of(9) },
    ] {
        assert_eq!(newest([Ok(of(1)), torn(), Ok(stranger)]), Ok(of(1)));
    }
    for [a, b] in [
        [blank(), blank()],
        [torn(), blank()],
        [unreadable(), torn()],
    ] {
        assert_eq!(newest([a, b, Ok(of(1))]), Ok(of(1)));
    }
    // Another use of the device, and another version.
    assert_eq!(newest([foreign(), blank(), Ok(of(1))]), foreign());
    assert_eq!(newest([torn(), foreign(), Ok(of(1))]), torn());
    assert_eq!(newest([older(), older(), Ok(of(1))]), older());
    assert_eq!(newest([blank(), blank(), unreadable()]), unreadable());
}

#[test]
fn a_segment_header_read_elsewhere_is_refused_and_still_shows_its_identity() {
    let block = encode_header(&segment_header());
    let checked = SegmentHeader::check(&block).unwrap();
    let identity = checked.identity();
    assert_eq!(
        (identity.segment, identity.sequence),
        (SegmentNo(11), serial(9, 1000))
    );
    let here = segment_address();
    let other = StoreId::from_bytes([0; 16]);
    let cases = [
        (
            SegmentAddress {
                store: other,
                ..here
            },
            Elsewhere::Store {
                claimed: STORE,
                expected: other,
            },
        ),
        (
            SegmentAddress { volume: 0, ..here },
            Elsewhere::Volume {
                claimed: 2,
                expected: 0,
            },
        ),
        (
            SegmentAddress {
                segment: SegmentNo(12),
                ..here
            },
            Elsewhere::Segment {
                claimed: SegmentNo(11),
                expected: SegmentNo(12),
            },
        ),
    ];
    for (address, elsewhere) in cases {
        assert_eq!(
            checked.clone().at(&address),
            Err(Damage::Elsewhere(elsewhere))
        );
    }
    assert_eq!(checked.at(&here), Ok(segment_header()));
}

#[test]
fn a_segment_header_with_an_impossible_field_is_refused() {
    let block = encode_header(&segment_header());
    let u32_at =
        |at: usize, value: u32| refused(decode_header(&patched(&block, at, &value.to_le_bytes())));
    let u64_at =
        |at: usize, value: u64| refused(decode_header(&patched(&block, at, &value.to_le_bytes())));
    assert_eq!(u64_at(40, 0), field("sequence", 0));
    assert_eq!(u64_at(40, 5), field("sequence", 5));
    assert_eq!(u64_at(48, 5), field("proven", 5));
    assert_eq!(u64_at(56, 5), field("synced", 5));
    assert_eq!(u32_at(68, 537), field("blocks", 537));
    assert_eq!(u32_at(68, u32::MAX), field("blocks", u64::from(u32::MAX)));
    assert_eq!(u32_at(72, 1), field("data_end", 1));
    assert_eq!(
        refused(decode_header(&patched(&block, 78, &[0]))),
        field("state", 0)
    );
    assert_eq!(
        refused(decode_header(&patched(&block, 78, &[4]))),
        field("state", 4)
    );
    let open = SegmentHeader {
        blocks: 0,
        data_end: SEGMENT_BLOCKS + 1,
        ..segment_header()
    };
    assert_eq!(
        decode_header(&encode_header(&open)),
        Err(field("data_end", 65_537))
    );
}

#[test]
fn a_segment_that_was_never_used_is_free_without_a_generation() {
    let free = SegmentHeader {
        sequence: Serial::ZERO,
        state: SegmentState::Free,
        blocks: 0,
        data_end: HEADER_BLOCKS,
        proven: Serial::ZERO,
        synced: Serial::ZERO,
        ..segment_header()
    };
    assert_eq!(decode_header(&encode_header(&free)), Ok(free));
}

#[test]
fn a_descriptor_block_read_elsewhere_is_refused_and_still_shows_its_identity() {
    let block = encode_block(&records_block());
    let checked = DescriptorBlock::check(&block).unwrap();
    assert_eq!(checked.identity().sequence, serial(9, 1000));
    let here = block_address();
    let other = StoreId::from_bytes([0; 16]);
    let cases = [
        (
            BlockAddress {
                store: other,
                ..here
            },
            Elsewhere::Store {
                claimed: STORE,
                expected: other,
            },
        ),
        (
            BlockAddress { volume: 0, ..here },
            Elsewhere::Volume {
                claimed: 2,
                expected: 0,
            },
        ),
        (
            BlockAddress {
                segment: SegmentNo(12),
                ..here
            },
            Elsewhere::Segment {
                claimed: SegmentNo(11),
                expected: SegmentNo(12),
            },
        ),
        (
            BlockAddress { index: 4, ..here },
            Elsewhere::Index {
                claimed: 3,
                expected: 4,
            },
        ),
    ];
    for (address, elsewhere) in cases {
        assert_eq!(
            checked.clone().at(&address),
            Err(Damage::Elsewhere(elsewhere))
        );
    }
    assert_eq!(checked.at(&here), Ok(records_block()));
}

#[test]
fn page_data_never_reaches_into_the_descriptor_blocks() {
    let block_of = |data_end, index| {
        encode_block(&DescriptorBlock {
            header: BlockHeader {
                data_end,
                index,
                ..block_header()
            },
            body: Body::Records(Vec::new()),
        })
    };
    let at = |data_end, index| {
        let address = BlockAddress {
            index,
            ..block_address()
        };
        DescriptorBlock::check(&block_of(data_end, index))
            .unwrap()
            .at(&address)
            .map(|it| it.header.data_end)
    };
    assert_eq!(at(SEGMENT_BLOCKS - 1, 0), Ok(SEGMENT_BLOCKS - 1));
    assert_eq!(at(SEGMENT_BLOCKS, 0), Err(field("data_end", 65_536)));
    assert_eq!(at(SEGMENT_BLOCKS - 4, 3), Ok(SEGMENT_BLOCKS - 4));
    assert_eq!(at(SEGMENT_BLOCKS - 3, 3), Err(field("data_end", 65_533)));
    assert_eq!(at(2, SEGMENT_BLOCKS - 3), Ok(2));
    assert_eq!(at(2, SEGMENT_BLOCKS - 2), Err(field("index", 65_534)));
    assert_eq!(at(2, u32::MAX), Err(field("index", u64::from(u32::MAX))));
}

#[test]
fn a_descriptor_block_with_an_impossible_field_is_refused() {
    let block = encode_block(&records_block());
    let u32_at =
        |at: usize, value: u32| refused(decode_block(&patched(&block, at, &value.to_le_bytes())));
    let u64_at =
        |at: usize, value: u64| refused(decode_block(&patched(&block, at, &value.to_le_bytes())));
    let commit = serial(9, 2050).get();
    assert_eq!(u64_at(40, 0), field("sequence", 0));
    assert_eq!(u64_at(40, commit + 1), field("commit", commit));
    assert_eq!(u64_at(56, commit), field("synced", commit));
    assert_eq!(u64_at(56, 3), field("synced", 3));
    assert_eq!(u32_at(72, 1), field("data_end", 1));
    assert_eq!(
        refused(decode_block(&patched(&block, 78, &[3]))),
        field("body", 3)
    );
    assert_eq!(u32_at(80, 3), field("count", 3));
    assert_eq!(u32_at(80, u32::MAX), field("count", u64::from(u32::MAX)));
    let page = 160;
    assert_eq!(
        refused(decode_block(&patched(&block, page + 2 * 123, &[9]))),
        field("kind", 9)
    );
    let placed = |start: u64, blocks: u64, stored: u64| {
        let place = start | blocks << 20 | stored << 38;
        decode_block(&patched(&block, page + 68, &place.to_le_bytes()[..7]))
    };
    assert_eq!(placed(1, 9, 9), Err(field("start", 1)));
    assert_eq!(placed((1 << 20) - 1, 9, 9), Err(field("stored", 9)));
    assert_eq!(placed(2, 9, 0), Err(field("stored", 0)));
    assert_eq!(placed(2, 0, 0), Err(field("stored", 0)));
    assert_eq!(placed(2, 9, 10), Err(field("stored", 10)));
    assert_eq!(placed(2, 5000, 4999), Err(field("stored", 4999)));
    // The last block below the descriptor blocks may be used.
    assert!(placed(2, 4998, 4998).is_ok());
    assert!(placed(2, (1 << 18) - 1, 1).is_ok());
    assert_eq!(u64_at(page + 79, commit), field("birth", commit));
    assert_eq!(u64_at(page + 79, 0), field("birth", 0));
}

#[test]
fn a_seal_belongs_to_a_page_and_is_whole() {
    let block = encode_block(&records_block());
    let (page, delete) = (160, 160 + 2 * 123);
    for record in [page, delete] {
        let slot = patched(&block, record + 2, &[7, 1]);
        assert_eq!(refused(decode_block(&slot)), field("key_slot", 0x107));
    }
    let sealed = patched(&patched(&block, page + 2, &[7, 1]), page + 95, &[5]);
    let Body::Records(records) = decode_block(&sealed).unwrap().body else {
        panic!("records");
    };
    let Record::Page(record) = records[0] else {
        panic!("a page");
    };
    let seal = record.seal.unwrap();
    let salt = [5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(
        (seal.slot.get(), seal.salt, seal.tag),
        (0x107, salt, [0; 16])
    );
    let tombstone = patched(&patched(&block, delete + 2, &[7, 1]), delete + 95, &[5]);
    assert_eq!(refused(decode_block(&tombstone)), Damage::Reserved);
}

/// The tag decides for an encrypted page, so that an index can keep a part of its checksum.
#[test]
fn of_the_checksum_of_an_encrypted_page_the_low_bits_count() {
    let seal = Seal {
        slot: NonZeroU16::MIN,
        salt: [1; 12],
        tag: [2; 16],
    };
    let plain = Proof::from(u64::MAX);
    let sealed = Proof {
        seal: Some(seal),
        ..plain
    };
    for bit in 0..64 {
        let other = u64::MAX ^ 1 << bit;
        assert!(!plain.has_checksum(other));
        assert_eq!(sealed.has_checksum(other), bit >= 48);
    }
    assert!(plain.has_checksum(u64::MAX) && sealed.has_checksum(u64::MAX));
}

#[test]
fn a_length_that_differs_from_the_body_is_refused() {
    let length_of = |block: &Block| u32::from_le_bytes(block[12..16].try_into().unwrap());
    let block = encode_block(&records_block());
    let length = length_of(&block);
    assert_eq!(length, 160 + 6 * 123);
    let with_length =
        |length: u32| DescriptorBlock::check(&patched(&block, 12, &length.to_le_bytes()));
    assert_eq!(refused(with_length(length + 123)), field("count", 6));
    assert_eq!(refused(with_length(length - 123)), Damage::Reserved);
    assert_eq!(refused(with_length(4097)), Damage::Length { found: 4097 });
    assert_eq!(refused(with_length(23)), Damage::Length { found: 23 });
    let header = patched(&encode_header(&segment_header()), 12, &89_u32.to_le_bytes());
    assert_eq!(
        refused(SegmentHeader::check(&header)),
        Damage::Length { found: 89 }
    );
    let superblock = superblock().encode().unwrap();
    assert_eq!(length_of(&superblock), 256 + 3 * 224);
    let longer = patched(&superblock, 12, &(256 + 3 * 224 + 1_u32).to_le_bytes());
    let reason = SuperblockError::Damaged(Damage::Length { found: 929 });
    assert_eq!(refused(Superblock::decode(&longer)), reason);
    let mut empty = [0; BLOCK_BYTES];
    empty[..24].copy_from_slice(&block[..24]);
    let empty = patched(&empty, 12, &24_u32.to_le_bytes());
    assert_eq!(refused(DescriptorBlock::check(&empty)), Damage::Short);
}

#[test]
fn error_messages_give_the_problem_the_place_and_the_remedy() {
    let newer = SuperblockError::Newer {
        version: 3,
        features: Box::new(featured().features),
    };
    assert_eq!(
        newer.to_string(),
        "format version 3 is newer than version 2, which this build reads (features \"tree wide\", \
         written by release 0.1.0): use a newer Larder"
    );
    let elsewhere = Damage::Elsewhere(Elsewhere::Segment {
        claimed: SegmentNo(4),
        expected: SegmentNo(7),
    });
    assert_eq!(
        elsewhere.to_string(),
        "it belongs elsewhere: it names segment 4, this is segment 7"
    );
    let crc = Damage::Checksum {
        stored: 1,
        computed: 0xabcd_ef01,
    };
    assert_eq!(
        crc.to_string(),
        "its CRC-32 is abcdef01, but 00000001 was written"
    );
    assert_eq!(
        namespace().to_string(),
        "Qwen/Qwen3-8B@a1b2c3 bfloat16 page_first_direct pool kv, \
         64 tokens in 9437184 bytes a page (2 parts), \
         tp 1/4, rope=yarn, tag="
    );
}

#[test]
fn an_unreadable_superblock_is_never_reported_as_absent() {
    let unreadable = || Err(SuperblockError::Unreadable(5));
    let absent = || Err(SuperblockError::NotLarder);
    for found in [
        newest([unreadable(), absent(), absent()]),
        newest([absent(), unreadable(), absent()]),
    ] {
        assert!(matches!(found, Err(SuperblockError::Unreadable(5))));
    }
}
