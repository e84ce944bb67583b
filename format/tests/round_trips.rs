//! Every structure decodes to the encoded value and has exactly one encoding.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use larder_format::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn a_superblock_survives_the_disk(superblock in any_superblock()) {
        let block = superblock.encode().unwrap();
        prop_assert_eq!(Superblock::decode(block.as_slice()), Ok(superblock.clone()));
        let saved = superblock.encode_saved().unwrap();
        prop_assert_eq!(Superblock::decode(saved.as_slice()), Err(SuperblockError::NotLarder));
        prop_assert_eq!(Superblock::decode_saved(saved.as_slice()), Ok(superblock));
    }

    #[test]
    fn a_segment_header_survives_the_disk(header in any_segment_header()) {
        prop_assert_eq!(decode_header(&encode_header(&header)), Ok(header));
    }

    #[test]
    fn a_closing_statement_survives_the_disk(statement in any_closing_statement()) {
        prop_assert_eq!(decode_closing(&encode_closing(&statement)), Ok(statement));
    }

    #[test]
    fn a_block_of_records_survives_the_disk(descriptors in any_records_block()) {
        prop_assert_eq!(decode_block(&encode_block(&descriptors)), Ok(descriptors));
    }

    #[test]
    fn a_namespace_survives_the_disk(namespace in any_namespace()) {
        prop_assert_eq!(Namespace::decode(namespace.encode()), Ok(namespace.clone()));
        let descriptors = DescriptorBlock {
            header: block_header(),
            body: Body::Namespace(namespace),
        };
        prop_assert_eq!(decode_block(&encode_block(&descriptors)), Ok(descriptors));
    }

    #[test]
    fn a_namespace_is_shown_on_one_line(namespace in any_namespace()) {
        prop_assert_eq!(namespace.to_string().lines().count(), 1);
    }

    #[test]
    fn identities_survive_text(bytes: [u8; 16]) {
        let store = StoreId::from_bytes(bytes);
        prop_assert_eq!(store.to_string().parse(), Ok(store));
        let fingerprint = Fingerprint::from_bytes(bytes);
        prop_assert_eq!(fingerprint.to_string().parse(), Ok(fingerprint));
    }

    #[test]
    fn serials_order_by_run_then_counter(
        a in (0..1_u32 << 24, 0..1_u64 << 40),
        b in (0..1_u32 << 24, 0..1_u64 << 40),
    ) {
        let (first, second) = (serial(a.0, a.1), serial(b.0, b.1));
        prop_assert_eq!(first.cmp(&second), a.cmp(&b));
        prop_assert_eq!((first.run().get(), first.counter()), a);
        prop_assert_eq!(first.to_string(), format!("{}.{}", a.0, a.1));
        prop_assert_eq!(Serial::from_raw(first.get()), first);
    }
}

#[test]
fn a_full_block_of_records_survives_the_disk() {
    let descriptors = DescriptorBlock {
        header: block_header(),
        body: Body::Records(vec![Record::Page(page_record()); RECORDS_PER_BLOCK]),
    };
    assert_eq!(decode_block(&encode_block(&descriptors)), Ok(descriptors));
}

#[test]
#[should_panic(expected = "too many records")]
fn more_records_than_fit_are_a_bug_of_the_writer() {
    encode_block(&DescriptorBlock {
        header: block_header(),
        body: Body::Records(vec![Record::Page(page_record()); RECORDS_PER_BLOCK + 1]),
    });
}
