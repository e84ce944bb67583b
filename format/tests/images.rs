//! Images of every released version decode to the original values and encode to the same bytes.
//!
//! `LARDER_BLESS=1` writes the images of the current version instead of comparing them. Use it only
//! for a new version, never to make a failing test of a released version pass.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::PathBuf;

use common::*;
use larder_format::*;

fn image(name: &str, current: &Block) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/images")
        .join(name);
    if std::env::var_os("LARDER_BLESS").is_some() {
        std::fs::write(&path, current).unwrap();
    }
    std::fs::read(&path).unwrap()
}

#[test]
fn the_superblock_of_version_2_is_read_and_written_alike() {
    let current = superblock().encode().unwrap();
    let image = image("v2-superblock.bin", &current);
    assert_eq!(Superblock::decode(&image), Ok(superblock()));
    assert_eq!(image, current.as_slice());
}

#[test]
fn the_superblock_of_a_store_with_features_is_read_and_written_alike() {
    let current = featured().encode().unwrap();
    let image = image("v2-features.bin", &current);
    assert_eq!(Superblock::decode(&image), Ok(featured()));
    assert_eq!(image, current.as_slice());
}

#[test]
fn the_segment_header_of_version_2_is_read_and_written_alike() {
    let current = encode_header(&segment_header());
    let image = image("v2-segment.bin", &current);
    assert_eq!(decode_header(&image), Ok(segment_header()));
    assert_eq!(image, current);
}

#[test]
fn the_records_of_version_2_are_read_and_written_alike() {
    let current = encode_block(&records_block());
    let image = image("v2-descriptors.bin", &current);
    assert_eq!(decode_block(&image), Ok(records_block()));
    assert_eq!(image, current);
}

#[test]
fn the_record_of_a_failed_put_is_read_and_written_alike() {
    let current = encode_block(&void_block());
    let image = image("v2-void.bin", &current);
    assert_eq!(decode_block(&image), Ok(void_block()));
    assert_eq!(image, current);
}

#[test]
fn the_closing_statement_of_version_2_is_read_and_written_alike() {
    let current = encode_closing(&closing_statement());
    let image = image("v2-closing.bin", &current);
    assert_eq!(decode_closing(&image), Ok(closing_statement()));
    assert_eq!(image, current);
}

#[test]
fn the_namespace_of_version_2_is_read_and_written_alike() {
    let current = encode_block(&namespace_block());
    let image = image("v2-namespace.bin", &current);
    assert_eq!(decode_block(&image), Ok(namespace_block()));
    assert_eq!(image, current);
}

#[test]
fn the_structures_of_an_archive_of_version_2_are_read_and_written_alike() {
    let current = encode_archive(ARCHIVE, &archive_items());
    for (place, (current, item)) in current.iter().zip(archive_items()).enumerate() {
        let image = image(&format!("v2-archive-{place}.bin"), current);
        let mut reader = ArchiveReader::new();
        for before in &encode_archive(ARCHIVE, &archive_items())[..place] {
            reader.item(before).unwrap();
        }
        assert_eq!(reader.item(&image), Ok(item));
        assert_eq!(image, current);
    }
}

#[test]
fn names_and_checksums_do_not_change() {
    assert_eq!(
        namespace().fingerprint().to_string(),
        "2444e675c50cffc4757e68874246b2e5"
    );
    // The expected value comes from an independent bitwise CRC-64/NVME.
    let mut checksum = PageChecksum::new(namespace().fingerprint(), &key(0x11));
    checksum.part(b"the first part");
    checksum.part(&[7; 5000]);
    assert_eq!(checksum.finish(), 0xd46e_c883_6db8_69f2);
}
