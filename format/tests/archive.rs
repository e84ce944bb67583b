//! Archives: a reader returns the written items and refuses everything else.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use larder_format::*;
use proptest::prelude::*;

const OTHER: ArchiveId = ArchiveId::from_bytes([0xa2; 16]);

fn read(blocks: &[Block]) -> Result<Vec<ArchiveItem>, Damage> {
    let mut reader = ArchiveReader::new();
    blocks.iter().map(|block| reader.item(block)).collect()
}

#[track_caller]
fn refused(items: &[ArchiveItem], field: &'static str) {
    let (last, before) = items.split_last().unwrap();
    let mut writer = ArchiveWriter::new(ARCHIVE);
    for item in before {
        writer.item(item).unwrap();
    }
    match writer.item(last) {
        Err(Damage::Field { field: found, .. }) => assert_eq!(found, field),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_reader_returns_the_written_items_and_the_offset_of_the_next_structure() {
    let items = archive_items();
    let mut reader = ArchiveReader::new();
    let page_blocks = u64::from(namespace().shape().page_blocks());
    let places = [
        0,
        1,
        2,
        3 + 2 * page_blocks,
        4 + 2 * page_blocks,
        15 + 2 * page_blocks,
    ];
    for ((block, item), place) in encode_archive(ARCHIVE, &items)
        .iter()
        .zip(&items)
        .zip(places)
    {
        assert_eq!(reader.offset(), place * BLOCK_BYTES as u64);
        assert!(!reader.is_over());
        assert_eq!(reader.item(block).as_ref(), Ok(item));
    }
    assert!(reader.is_over());
    assert_eq!(reader.offset(), (16 + 2 * page_blocks) * BLOCK_BYTES as u64);
}

#[test]
fn the_writer_counts_written_pages_and_blocks() {
    let items = archive_items();
    let mut writer = ArchiveWriter::new(ARCHIVE);
    for item in &items[..5] {
        writer.item(item).unwrap();
    }
    assert_eq!(ArchiveItem::End(writer.counts(1)), items[5]);
}

#[test]
fn payloads_of_encoded_pages_have_fewer_blocks() {
    let pages = |saved: [u32; 2]| {
        ArchiveItem::Pages(
            saved
                .map(|saved| ArchivedPage {
                    saved,
                    ..archived_page(1)
                })
                .to_vec(),
        )
    };
    let head = archive_head(2, 10);
    let mut writer = ArchiveWriter::new(ARCHIVE);
    let mut reader = ArchiveReader::new();
    for item in [head, archive_unnamed(5), pages([0, 2])] {
        let block = writer.item(&item).unwrap();
        assert_eq!(reader.item(&*block), Ok(item));
    }
    assert_eq!(writer.counts(0).blocks, 5 + 3);
    assert_eq!(reader.offset(), (3 + 5 + 3) * BLOCK_BYTES as u64);
    for saved in [5, 6] {
        assert!(writer.item(&pages([0, saved])).is_err());
    }
}

#[test]
fn any_flipped_byte_of_a_structure_is_refused() {
    let blocks = encode_archive(ARCHIVE, &archive_items());
    for (index, block) in blocks.iter().enumerate() {
        let mut reader = ArchiveReader::new();
        for before in &blocks[..index] {
            reader.item(before).unwrap();
        }
        for at in 0..BLOCK_BYTES {
            let mut block = *block;
            block[at] ^= 0x10;
            assert!(reader.clone().item(&block).is_err(), "byte {at} of {index}");
        }
    }
}

#[test]
fn structures_of_another_archive_or_another_place_are_refused() {
    let items = archive_items();
    let (blocks, others) = (
        encode_archive(ARCHIVE, &items),
        encode_archive(OTHER, &items),
    );
    for index in 1..blocks.len() {
        let mut spliced = blocks.clone();
        spliced[index] = others[index];
        assert_eq!(
            read(&spliced),
            Err(Damage::Elsewhere(Elsewhere::Archive {
                claimed: OTHER,
                expected: ARCHIVE
            }))
        );
        let mut cut = blocks.clone();
        cut.remove(index);
        assert_eq!(read(&cut).is_err(), index + 1 < blocks.len());
        let mut repeated = blocks.clone();
        repeated.insert(index, blocks[index]);
        let damage = read(&repeated).unwrap_err();
        assert!(
            matches!(damage, Damage::Elsewhere(Elsewhere::Position { .. })),
            "{damage}"
        );
    }
    assert!(read(&blocks[1..]).is_err());
}

#[test]
fn an_archive_begins_with_its_head_and_names_a_namespace_before_its_pages() {
    let pages = ArchiveItem::Pages(vec![archived_page(1)]);
    refused(&[archive_unnamed(1)], "body");
    refused(std::slice::from_ref(&pages), "body");
    refused(&[archive_end(0, 0, 0)], "body");
    refused(&[archive_head(1, 1), archive_head(1, 1)], "body");
    refused(&[archive_head(1, 1), pages], "body");
}

#[test]
fn nothing_follows_the_end() {
    let whole = [archive_head(0, 0), archive_end(0, 0, 0)];
    refused(&[&whole[..], &[archive_unnamed(1)]].concat(), "body");
    refused(&[&whole[..], &[archive_end(0, 0, 0)]].concat(), "body");
}

#[test]
fn wrong_counts_are_refused() {
    let opening = |pages, blocks| [archive_head(pages, blocks), archive_unnamed(3)];
    let pages = |count| ArchiveItem::Pages(vec![archived_page(1); count]);
    refused(&[&opening(9, 99)[..], &[pages(0)]].concat(), "count");
    let many = ARCHIVED_PAGES_MAX + 1;
    refused(&[&opening(99, 999)[..], &[pages(many)]].concat(), "count");
    // More than the counts in the head.
    refused(&[&opening(1, 99)[..], &[pages(2)]].concat(), "count");
    refused(&[&opening(2, 5)[..], &[pages(2)]].concat(), "count");
    let two = |last| [&opening(3, 9)[..], &[pages(2), last]].concat();
    refused(&two(archive_end(1, 6, 2)), "pages");
    refused(&two(archive_end(2, 7, 1)), "blocks");
    refused(&two(archive_end(2, 6, 0)), "left_out");
    refused(&two(archive_end(2, 6, u64::MAX)), "left_out");
    assert!(read(&encode_archive(ARCHIVE, &two(archive_end(2, 6, 1)))).is_ok());
}

#[test]
fn a_page_is_of_one_block_at_least_and_below_the_limit() {
    refused(&[archive_head(1, 1), archive_unnamed(0)], "page_blocks");
    refused(
        &[archive_head(1, 1), archive_unnamed(1 << 18)],
        "page_blocks",
    );
    refused(
        &[archive_head(1, 1), archive_unnamed(u32::MAX)],
        "page_blocks",
    );
}

#[test]
fn hostile_structures_with_a_right_crc_are_refused() {
    let blocks = encode_archive(ARCHIVE, &archive_items());
    let mut reader = ArchiveReader::new();
    for block in &blocks[..2] {
        reader.item(block).unwrap();
    }
    let refused = |at: usize, bytes: &[u8]| {
        let block = patched(&blocks[2], at, bytes);
        assert!(reader.clone().item(&block).is_err(), "{bytes:?} at {at}");
    };
    refused(8, &3_u32.to_le_bytes());
    refused(12, &u32::MAX.to_le_bytes());
    refused(12, &80_u32.to_le_bytes());
    refused(48, &9_u16.to_le_bytes());
    refused(50, &[1]);
    refused(52, &3_u32.to_le_bytes());
    refused(52, &u32::MAX.to_le_bytes());
    refused(60, &[1]);
    // A flag that no writer sets, a codec without saved blocks, a key slot in a plain archive, and
    // a parent without the parent flag.
    refused(80, &[2]);
    refused(81, &[1]);
    refused(82, &[1]);
    refused(80 + 40, &[1]);
    refused(80 + 52, &[1]);
}

/// A cipher for tests: the text is inverted, and the tag is a sum.
fn sum(named: &[u8], text: &[u8]) -> MetadataSeal {
    let bytes = named.iter().chain(text);
    let sum = bytes.fold(7_u64, |sum, byte| {
        sum.rotate_left(5).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(*byte)
    });
    let mut tag = [0xee; 16];
    tag[..8].copy_from_slice(&sum.to_le_bytes());
    MetadataSeal {
        nonce: [0xdd; 24],
        tag,
    }
}

fn invert(text: &mut [u8]) {
    text.iter_mut().for_each(|byte| *byte = !*byte);
}

fn sealed_items() -> Vec<ArchiveItem> {
    let mut items = archive_items();
    for (number, item) in items.iter_mut().enumerate() {
        match item {
            ArchiveItem::Head(head) => {
                head.wrap = Some(KeyWrap {
                    id: WrapId::from_bytes([0x1d; 16]),
                    key: WrappedKey {
                        nonce: [0x2d; 24],
                        bytes: [0x3d; 48],
                    },
                });
            }
            ArchiveItem::Pages(pages) => pages.iter_mut().for_each(|page| {
                page.seal = Some(Seal {
                    slot: std::num::NonZeroU16::new(1).unwrap(),
                    salt: [number as u8; 12],
                    tag: [!number as u8; 16],
                });
            }),
            _ => {}
        }
    }
    items
}

fn encode_sealed(id: ArchiveId) -> Vec<Block> {
    let mut blocks = encode_archive(id, &sealed_items());
    for block in &mut blocks[1..] {
        let sealed = ArchiveWriter::seal(block, |named, text| {
            let seal = sum(named, text);
            invert(text);
            Ok::<_, ()>(seal)
        });
        sealed.unwrap();
    }
    blocks
}

fn read_sealed(blocks: &[Block]) -> Result<Vec<ArchiveItem>, Damage> {
    let mut reader = ArchiveReader::new();
    let mut items = Vec::new();
    for block in blocks {
        items.push(match reader.archive() {
            None => reader.item(block)?,
            Some(_) => reader.sealed_item(block, |named, text, seal| {
                invert(text);
                *seal == sum(named, text)
            })?,
        });
    }
    Ok(items)
}

#[test]
fn an_encrypted_archive_is_read_as_it_was_written_and_shows_its_head_alone() {
    let (items, blocks) = (sealed_items(), encode_sealed(ARCHIVE));
    assert_eq!(read_sealed(&blocks), Ok(items.clone()));
    let clear = encode_archive(ARCHIVE, &items);
    assert_eq!(blocks[0], clear[0]);
    for (block, clear) in blocks.iter().zip(&clear).skip(1) {
        assert_ne!(block[96..112], clear[96..112]);
    }
    // Neither form is taken for the other one.
    assert_eq!(read(&blocks), Err(Damage::Disowned));
    assert_eq!(read_sealed(&clear), Err(Damage::Sealed));
    let plain = archive_items();
    let mixed = [&items[..2], &plain[2..]].concat();
    refused(&mixed[..3], "key slot");
    refused(&[&plain[..2], &items[2..3]].concat(), "key slot");
}

#[test]
fn a_changed_or_moved_block_of_an_encrypted_archive_is_refused() {
    let (blocks, others) = (encode_sealed(ARCHIVE), encode_sealed(OTHER));
    let refused = |changed: &[Block]| read_sealed(changed).unwrap_err();
    for index in 1..blocks.len() {
        // With a right CRC.
        for at in [24, 40, 48, 52, 56, 80, 96, 100] {
            let mut changed = blocks.clone();
            changed[index] = patched(&blocks[index], at, &[blocks[index][at] ^ 1]);
            assert_eq!(refused(&changed), Damage::Sealed, "byte {at} of {index}");
        }
        let mut changed = blocks.clone();
        changed[index][100] ^= 1;
        assert!(matches!(refused(&changed), Damage::Checksum { .. }));
        changed[index] = others[index];
        assert!(matches!(refused(&changed), Damage::Elsewhere(_)));
        changed[index] = blocks[1 + index % (blocks.len() - 1)];
        assert!(matches!(refused(&changed), Damage::Elsewhere(_)));
    }
}

#[test]
fn another_version_is_named() {
    let block = &encode_archive(ARCHIVE, &archive_items())[0];
    for found in [0_u32, 3] {
        let block = patched(block, 8, &found.to_le_bytes());
        let damage = ArchiveReader::new().item(&block).unwrap_err();
        assert_eq!(damage, Damage::Version { found });
    }
}

prop_compose! {
    fn any_archived_page()(
        key in any::<[u8; 32]>(),
        parent in any::<Option<[u8; 12]>>(),
        depth in any::<u32>(),
        checksum in any::<u64>(),
    ) -> ArchivedPage {
        ArchivedPage {
            key: PageKey::from_bytes(key),
            parent: parent.map(KeyPrefix::from_bytes),
            depth,
            checksum,
            saved: 0,
            seal: None,
        }
    }
}

fn any_section() -> impl Strategy<Value = Vec<ArchiveItem>> {
    let named = any_namespace().prop_map(ArchivedNamespace::Whole);
    let nameless = (any::<[u8; 16]>(), 1..1_u32 << 18).prop_map(|(fingerprint, page_blocks)| {
        ArchivedNamespace::Unnamed {
            fingerprint: Fingerprint::from_bytes(fingerprint),
            page_blocks,
        }
    });
    let pages = prop::collection::vec(any_archived_page(), 1..=ARCHIVED_PAGES_MAX);
    (
        prop_oneof![named, nameless],
        prop::collection::vec(pages, 0..4),
    )
        .prop_map(|(namespace, blocks)| {
            let pages = blocks.into_iter().map(ArchiveItem::Pages);
            std::iter::once(ArchiveItem::Namespace(namespace))
                .chain(pages)
                .collect()
        })
}

proptest! {
    #[test]
    fn every_archive_is_read_as_it_was_written(
        sections in prop::collection::vec(any_section(), 0..4),
        left_out in 0..100_u64,
    ) {
        let mut writer = ArchiveWriter::new(ARCHIVE);
        let mut items: Vec<ArchiveItem> = sections.concat();
        let pages: usize = items.iter().map(|item| match item {
            ArchiveItem::Pages(pages) => pages.len(),
            _ => 0,
        }).sum();
        items.insert(0, archive_head(pages as u64 + left_out, u64::MAX));
        let mut blocks: Vec<Block> = items.iter().map(|item| *writer.item(item).unwrap()).collect();
        items.push(ArchiveItem::End(writer.counts(left_out)));
        blocks.push(*writer.item(items.last().unwrap()).unwrap());
        prop_assert_eq!(read(&blocks), Ok(items));
    }

    #[test]
    fn arbitrary_blocks_are_refused_without_harm(
        bytes in prop::collection::vec(any::<u8>(), BLOCK_BYTES),
        place in 0..5_usize,
    ) {
        let mut reader = ArchiveReader::new();
        for block in &encode_archive(ARCHIVE, &archive_items())[..place] {
            reader.item(block).unwrap();
        }
        prop_assert!(reader.item(&bytes).is_err());
    }
}
