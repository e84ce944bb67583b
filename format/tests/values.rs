//! The value types: namespaces, ranks, page shapes, serials, geometry, checksums.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use larder_format::*;
use proptest::prelude::*;

#[test]
fn empty_fields_and_control_characters_make_no_namespace() {
    type Change = fn(&mut NamespaceFields);
    let empty = |field| NamespaceError::Empty { field };
    let control = |field| NamespaceError::Control { field };
    let cases: [(NamespaceError, Change); 8] = [
        (empty("model"), |it| it.model.clear()),
        (empty("dtype"), |it| it.dtype.clear()),
        (empty("layout"), |it| it.layout.clear()),
        (empty("page_tokens"), |it| it.page_tokens = 0),
        (empty("extra"), |it| {
            drop(it.extra.insert(String::new(), "x".to_owned()));
        }),
        (control("pool"), |it| it.pool.push('\n')),
        (control("model"), |it| it.model.push('\u{1b}')),
        (control("extra"), |it| {
            drop(it.extra.insert("x".to_owned(), "\0".to_owned()));
        }),
    ];
    for (reason, change) in cases {
        let mut fields = namespace().fields().clone();
        change(&mut fields);
        assert_eq!(refused(Namespace::new(fields)), reason);
    }
}

#[test]
fn a_namespace_fills_a_block_to_its_limit_and_not_beyond() {
    let fields = |spare: usize| NamespaceFields {
        weights: "w".repeat(spare),
        ..namespace().fields().clone()
    };
    let used = namespace().encode().len() - namespace().fields().weights.len();
    let largest = Namespace::new(fields(NAMESPACE_BYTES_MAX - used)).unwrap();
    assert_eq!(largest.encode().len(), NAMESPACE_BYTES_MAX);
    let descriptors = DescriptorBlock {
        header: block_header(),
        body: Body::Namespace(largest),
    };
    assert_eq!(decode_block(&encode_block(&descriptors)), Ok(descriptors));
    for spare in [NAMESPACE_BYTES_MAX - used + 1, 100_000] {
        let bytes = used + spare;
        assert_eq!(
            refused(Namespace::new(fields(spare))),
            NamespaceError::TooLong { bytes }
        );
    }
}

#[test]
fn every_field_of_a_namespace_changes_its_fingerprint() {
    type Change = fn(&mut NamespaceFields);
    let changes: [Change; 12] = [
        |it| it.model.push('x'),
        |it| it.weights.push('x'),
        |it| it.dtype.push('x'),
        |it| it.layout.push('x'),
        |it| it.page_tokens = 32,
        |it| it.shape = PageShape::new(&[4_718_592]).unwrap(),
        |it| it.tp = Rank::new(0, 4).unwrap(),
        |it| it.pp = Rank::new(1, 4).unwrap(),
        |it| it.cp = Rank::new(1, 4).unwrap(),
        |it| it.pool.push('x'),
        |it| it.extra.clear(),
        // One character moves from one field to the next.
        |it| {
            it.weights = format!("{}a", it.weights);
            it.dtype = it.dtype.split_off(1);
        },
    ];
    let mut seen = vec![namespace().fingerprint()];
    for change in changes {
        let mut fields = namespace().fields().clone();
        change(&mut fields);
        let fingerprint = Namespace::new(fields).unwrap().fingerprint();
        assert!(!seen.contains(&fingerprint));
        seen.push(fingerprint);
    }
}

#[test]
fn a_rank_is_below_its_size() {
    assert_eq!(Rank::new(0, 0), None);
    assert_eq!(Rank::new(4, 4), None);
    assert_eq!(Rank::new(0, 1), Some(Rank::ALONE));
}

#[test]
fn a_page_lies_as_its_parts_padded_to_blocks() {
    let shape = PageShape::new(&[1, 4096, 4097]).unwrap();
    assert_eq!(shape.part_sizes(), [1, 4096, 4097]);
    assert_eq!([0, 1, 2].map(|part| shape.part_blocks(part)), [1, 1, 2]);
    assert_eq!(
        [0, 1, 2].map(|part| shape.part_offset(part)),
        [0, 4096, 8192]
    );
    assert_eq!((shape.page_blocks(), shape.page_bytes()), (4, 8194));
    assert!(!shape.is_aligned());
    assert!(PageShape::new(&[4096, 8192]).unwrap().is_aligned());
}

#[test]
fn parts_that_make_no_page_are_refused() {
    assert_eq!(refused(PageShape::new(&[])), ShapeError::Count { found: 0 });
    assert_eq!(
        refused(PageShape::new(&[1; 9])),
        ShapeError::Count { found: 9 }
    );
    assert_eq!(
        refused(PageShape::new(&[1; 300])),
        ShapeError::Count { found: 300 }
    );
    assert_eq!(
        refused(PageShape::new(&[1, 0])),
        ShapeError::Empty { part: 1 }
    );
    assert_eq!(
        refused(PageShape::new(&[1 << 29, (1 << 29) - 4095])),
        ShapeError::TooLarge { bytes: 1 << 30 }
    );
    assert!(PageShape::new(&[1 << 29, (1 << 29) - 4096]).is_ok());
    assert!(matches!(
        refused(PageShape::new(&[u32::MAX; 8])),
        ShapeError::TooLarge { .. }
    ));
}

#[test]
fn runs_and_serials_run_out_instead_of_wrapping() {
    let last = Run::new((1 << 24) - 1).unwrap();
    assert_eq!(Run::new(1 << 24), None);
    assert_eq!(last.next(), None);
    assert_eq!(Run::FIRST.next(), Run::new(2));
    assert_eq!(Serial::MAX.run(), last);
    assert_eq!(Serial::MAX.next(), None);
    assert_eq!(serial(5, (1 << 40) - 1).next(), None);
    assert_eq!(serial(5, 7).next(), Some(serial(5, 8)));
    assert_eq!(Serial::first_of(Run::ZERO), Serial::ZERO);
    assert!(serial(5, (1 << 40) - 1) < Serial::first_of(Run::new(6).unwrap()));
}

#[test]
fn a_volume_has_a_mebibyte_before_its_segments_and_one_behind_them() {
    let geometry = Geometry::new(4096, 3).unwrap();
    assert_eq!(geometry.segment_bytes(), 16 << 20);
    assert_eq!(geometry.segment_offset(SegmentNo(0)), SEGMENTS_OFFSET);
    assert_eq!(
        geometry.segment_offset(SegmentNo(2)),
        (1 << 20) + (32 << 20)
    );
    assert_eq!(
        geometry.block_offset(SegmentNo(1), 2),
        (1 << 20) + (16 << 20) + 8192
    );
    assert_eq!(geometry.volume_bytes(), (2 << 20) + (48 << 20));
    assert_eq!(geometry.descriptor_block(0), Some(4095));
    assert_eq!(geometry.descriptor_block(4093), Some(2));
    assert_eq!(geometry.descriptor_block(4094), None);
    assert_eq!(geometry.data_blocks(), 4093);
    assert!(geometry.segment_offset(SegmentNo(u32::MAX)) > geometry.volume_bytes());
    assert_eq!(
        refused(Geometry::new(63, 1)),
        GeometryError::SegmentBlocks { blocks: 63 }
    );
    assert_eq!(
        refused(Geometry::new(4096, 0)),
        GeometryError::Segments { segments: 0 }
    );
    let sizes = superblock().geometry(2).unwrap();
    assert_eq!(
        (sizes.segment_blocks(), sizes.segments()),
        (SEGMENT_BLOCKS, 12)
    );
    let field = "volume";
    assert_eq!(
        refused(superblock().geometry(3)),
        SuperblockError::Invalid { field, value: 3 }
    );
}

/// The superblocks overlap no segment and no reserved place.
#[test]
fn superblocks_lie_before_the_first_segment_and_behind_the_last_one() {
    let geometry = Geometry::new(4096, 3).unwrap();
    let bytes = geometry.volume_bytes();
    for bytes in [bytes, bytes + 4095, bytes + 4096, bytes + (5 << 30) + 7] {
        let [a, b, end] = superblock_offsets(bytes);
        assert_eq!([a, b], SUPERBLOCK_OFFSETS);
        assert!(a + 4096 <= b && b + 4096 <= RESERVED_OFFSET);
        assert!(end >= geometry.segment_offset(SegmentNo(3)));
        assert!(end.is_multiple_of(4096) && end + TAIL_BYTES <= bytes);
        assert!(end + TAIL_BYTES + 4096 > bytes);
    }
    let others = [
        RESERVED_OFFSET,
        CLOSING_OFFSET,
        PROBE_OFFSET,
        SEGMENTS_OFFSET,
    ];
    assert!(others.is_sorted_by(|a, b| a + 4096 <= *b));
}

proptest! {
    #[test]
    fn as_many_segments_fit_as_do_not_exceed_the_volume(
        volume_bytes in prop_oneof![0..1_u64 << 44, any::<u64>()],
        segment_blocks in 4096..=1_u32 << 20,
    ) {
        let segment_bytes = u64::from(segment_blocks) * BLOCK_BYTES as u64;
        let segments = segments_that_fit(volume_bytes, segment_bytes);
        let bytes = |segments: u32| {
            u128::from(OVERHEAD_BYTES) + u128::from(segments) * u128::from(segment_bytes)
        };
        prop_assert!(segments == 0 || bytes(segments) <= u128::from(volume_bytes));
        prop_assert!(segments == SEGMENTS_MAX || bytes(segments + 1) > u128::from(volume_bytes));
    }

    #[test]
    fn a_checksum_is_of_the_blocks_on_disk_however_they_are_handed_in(
        parts in prop::collection::vec((1..100_000_u32, 1..u32::MAX), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let name = (namespace().fingerprint(), key(1));
        let mut by_part = PageChecksum::new(name.0, &name.1);
        let mut disk = Vec::new();
        for (length, step) in parts {
            let part: Vec<u8> =
                (0..length).map(|n| n.wrapping_mul(step).to_be_bytes()[0]).collect();
            by_part.part(&part);
            disk.extend(part);
            disk.resize(disk.len().next_multiple_of(BLOCK_BYTES), 0);
        }
        let cut = cut.index(disk.len() / BLOCK_BYTES) * BLOCK_BYTES;
        let mut by_block = PageChecksum::new(name.0, &name.1);
        by_block.blocks(&disk[..cut]);
        by_block.blocks(&disk[cut..]);
        prop_assert_eq!(by_part.finish(), by_block.finish());
    }
}

#[test]
fn a_page_under_a_wrong_name_fails_its_checksum() {
    let payload = [3; 8192];
    let of = |namespace: Fingerprint, key: &PageKey| {
        let mut checksum = PageChecksum::new(namespace, key);
        checksum.blocks(&payload);
        checksum.finish()
    };
    let right = of(namespace().fingerprint(), &key(1));
    assert_ne!(right, of(Fingerprint::from_bytes([0; 16]), &key(1)));
    // Two keys that share the bits compared by the index.
    let mut bytes = *key(1).as_bytes();
    bytes[31] ^= 1;
    let twin = PageKey::from_bytes(bytes);
    assert_eq!(twin.prefix(), key(1).prefix());
    assert_ne!(right, of(namespace().fingerprint(), &twin));
}
