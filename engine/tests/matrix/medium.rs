//! Wrong bytes on the volume: rows 1, 5, 7, 17 and 18.

use larder_engine::format::{
    BLOCK_BYTES, BlockHeader, Body, DescriptorBlock, PageRecord, Record, SEGMENTS_OFFSET,
    SUPERBLOCK_OFFSETS, SegmentHeader, SegmentNo, SegmentState, Serial, Superblock,
    SuperblockError, superblock_offsets,
};
use larder_engine::{OpenOptions, PageStore, PutStatus, Store, StoreError};
use larder_offline::survey::{Survey, SurveyOptions};
use larder_store::share::Inside;

use super::common::faulty::{Fault, Seen, open_faulty};
use super::common::{Home, Pool, chain, namespace};
use super::{SEGMENT, SIZE, descriptor, find, flip, read, write};

const EIO: i32 = 5;

/// A store with three chains of four pages, each in a descriptor block of its own behind that of
/// the namespace, left as a crash leaves it.
fn crashed() -> Home {
    let home = Home::with_store(SIZE);
    drop(filled(&home));
    home
}

/// The same, still open.
fn filled(home: &Home) -> Store {
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    for seed in 1..=3 {
        assert_eq!(pool.put(&chain(seed, 4)), [PutStatus::Stored; 4]);
    }
    store
}

/// How many pages of each chain a fresh open finds whole.
fn hits(home: &Home) -> [usize; 3] {
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    let hits = [1, 2, 3].map(|seed| pool.hits(&chain(seed, 4)));
    store.local().unwrap().check_invariants().unwrap();
    hits
}

#[test]
fn row_01_a_torn_page_costs_itself_and_a_torn_descriptor_its_records_alone() {
    // At a sector and at a block, of the last page and of the last descriptor block.
    for torn in [512, 4096, 61_440] {
        let home = crashed();
        let last = find(&home.path, &chain(3, 4)[3]);
        write(
            &home.path,
            last + torn,
            &vec![0; 65536 - usize::try_from(torn).unwrap()],
        );
        assert_eq!(hits(&home), [4, 4, 3], "{torn}");
    }
    for torn in [512, 1024, 3584] {
        let home = crashed();
        // Records fill the front of the block: the tear leaves an older generation's bytes behind
        // it.
        write(
            &home.path,
            descriptor(3) + torn,
            &vec![7; BLOCK_BYTES - usize::try_from(torn).unwrap()],
        );
        assert_eq!(hits(&home), [4, 4, 0], "{torn}");
    }
}

#[test]
fn row_05_rot_in_any_structure_costs_at_most_that_structure() {
    let home = crashed();
    let page = find(&home.path, &chain(2, 4)[1]);
    let block = BLOCK_BYTES as u64;
    let cases = [
        ("a superblock", SUPERBLOCK_OFFSETS[0] + 70, [4, 4, 4]),
        (
            "the other superblock",
            SUPERBLOCK_OFFSETS[1] + 70,
            [4, 4, 4],
        ),
        ("a segment header", SEGMENTS_OFFSET + 40, [4, 4, 4]),
        ("its other copy", SEGMENTS_OFFSET + block + 40, [4, 4, 4]),
        ("the namespace", descriptor(0) + 200, [4, 4, 4]),
        ("a header's padding", SEGMENTS_OFFSET + 4000, [4, 4, 4]),
        ("descriptors", descriptor(2) + 200, [4, 0, 4]),
        (
            "the padding behind descriptors",
            descriptor(1) + 4000,
            [0, 4, 4],
        ),
        ("a page", page + 12_345, [4, 3, 4]),
    ];
    drop(home);
    for (what, offset, left) in cases {
        let home = crashed();
        flip(&home.path, offset);
        assert_eq!(hits(&home), left, "{what}");
    }
}

/// How many flaws a survey of a store that is not in use finds.
fn flaws(home: &Home) -> usize {
    Survey::new(&home.path, &SurveyOptions::default())
        .unwrap()
        .flaws
        .len()
}

#[test]
fn row_05_rot_that_was_reported_once_is_reported_until_it_is_repaired() {
    let home = Home::with_store(SIZE);
    // In a store that was closed cleanly nothing but rot explains it.
    filled(&home).close().unwrap();
    assert_eq!(flaws(&home), 0);
    flip(&home.path, descriptor(3) + 100);
    for _ in 0..3 {
        assert_eq!(flaws(&home), 1);
        let store = home.open();
        assert_eq!(Pool::new(&store, "m", &[65536]).hits(&chain(2, 4)), 4);
        store.close().unwrap();
    }
}

#[test]
fn row_07_a_descriptor_write_that_failed_is_no_damage_later() {
    let home = Home::with_store(SIZE);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[65536]);
    let (first, second) = (chain(1, 4), chain(2, 4));
    assert_eq!(pool.put(&first), [PutStatus::Stored; 4]);
    let is_descriptor = |seen| {
        matches!(
            seen,
            Seen::Write {
                bytes: BLOCK_BYTES,
                ..
            }
        )
    };
    disk.when(Fault::Fails(EIO), 1, is_descriptor);
    assert_eq!(pool.put(&second), [PutStatus::Stored; 4]);
    assert_eq!(disk.hits(), 1);
    store.flush().unwrap();
    store.close().unwrap();
    drop(store);
    assert_eq!(flaws(&home), 0);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    assert_eq!((pool.hits(&first), pool.hits(&second)), (4, 4));
    store.close().unwrap();
    assert_eq!(flaws(&home), 0);
}

#[test]
fn row_05_rot_in_the_padding_of_a_part_never_reaches_the_caller() {
    let home = Home::with_store(SIZE);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[5000]);
    let keys = chain(1, 2);
    assert_eq!(pool.put(&keys), [PutStatus::Stored; 2]);
    drop(store);
    flip(&home.path, find(&home.path, &keys[0]) + 6000);
    let store = home.open();
    // `hits` compares the bytes. Whether padding counts is decided by the checksum; the returned
    // bytes are right.
    let pool = Pool::new(&store, "m", &[5000]);
    assert_eq!(pool.hits(&keys[1..]), 1);
    assert!(pool.hits(&keys[..1]) <= 1);
}

/// Gives all superblocks another version, with a right CRC.
fn set_version(home: &Home, version: u32) {
    let bytes = std::fs::metadata(&home.path).unwrap().len();
    for offset in superblock_offsets(bytes) {
        let mut block = read(&home.path, offset, BLOCK_BYTES);
        block[8..12].copy_from_slice(&version.to_le_bytes());
        block[16..20].fill(0);
        let crc = crc32fast::hash(&block);
        block[16..20].copy_from_slice(&crc.to_le_bytes());
        write(&home.path, offset, &block);
    }
}

#[test]
fn row_17_a_store_of_another_version_is_refused_by_name_and_not_touched() {
    let home = crashed();
    let before = read(&home.path, SUPERBLOCK_OFFSETS[0], BLOCK_BYTES);
    set_version(&home, 3);
    let newer = read(&home.path, 0, usize::try_from(SEGMENTS_OFFSET).unwrap());
    for read_only in [false, true] {
        let options = OpenOptions::default().with(|o| o.read_only = read_only);
        let error = Store::open(&home.path, options).err().unwrap();
        let StoreError::Superblock {
            source: SuperblockError::Newer { version: 3, .. },
            ..
        } = error
        else {
            panic!("{error}");
        };
    }
    assert!(
        read(&home.path, 0, newer.len()) == newer,
        "a store of a newer version was written to"
    );
    set_version(&home, 0);
    let error = Store::open(&home.path, OpenOptions::default())
        .err()
        .unwrap();
    assert!(
        matches!(
            error,
            StoreError::Superblock {
                source: SuperblockError::Older { version: 0 },
                ..
            }
        ),
        "{error}"
    );
    set_version(&home, 2);
    assert_eq!(read(&home.path, SUPERBLOCK_OFFSETS[0], BLOCK_BYTES), before);
    assert_eq!(hits(&home), [4, 4, 4]);
}

/// Writes a segment that is whole and invalid: its CRCs are right, its claims are not.
fn write_lies(home: &Home) {
    let block = read(&home.path, SUPERBLOCK_OFFSETS[0], BLOCK_BYTES);
    let superblock = Superblock::decode(&block).unwrap();
    let header = read(&home.path, SEGMENTS_OFFSET, BLOCK_BYTES);
    let address = larder_engine::format::SegmentAddress {
        store: superblock.store,
        volume: 0,
        segment: SegmentNo(0),
        segment_blocks: superblock.segment_blocks,
    };
    let truth = SegmentHeader::check(&header).unwrap().at(&address).unwrap();
    let sequence = truth.sequence;
    let late = Serial::from_raw(sequence.get() + 1_000_000);
    let keys = chain(1, 4);
    let page = |key: usize, start: u32, parent: usize| {
        Record::Page(PageRecord {
            namespace: namespace("m", &[65536]).fingerprint(),
            key: keys[key],
            parent: Some(keys[parent].prefix()),
            depth: u32::MAX,
            birth: sequence,
            start,
            blocks: 16,
            stored: 16,
            put_unix_s: 0,
            checksum: 1,
            seal: None,
        })
    };
    // Parents in a circle, a page that is its own parent, overlapping extents, impossible sizes.
    let mut records = vec![
        page(0, 2, 1),
        page(1, 2, 0),
        page(2, 3, 2),
        page(3, 2, 3),
        page(3, 2, 0),
    ];
    if let Record::Page(page) = &mut records[4] {
        page.blocks = 3000;
        page.stored = 3000;
    }
    let header = SegmentHeader {
        segment: SegmentNo(1),
        state: SegmentState::Sealed,
        blocks: 1,
        data_end: 3100,
        proven: late,
        synced: Serial::ZERO,
        ..truth
    };
    let lies = DescriptorBlock {
        header: BlockHeader {
            store: superblock.store,
            volume: 0,
            segment: SegmentNo(1),
            sequence,
            index: 0,
            commit: late,
            data_end: 3100,
            synced: Serial::ZERO,
        },
        body: Body::Records(records),
    };
    let mut bytes = [0; BLOCK_BYTES];
    header.encode(&mut bytes);
    write(&home.path, SEGMENTS_OFFSET + SEGMENT, &bytes);
    write(
        &home.path,
        SEGMENTS_OFFSET + SEGMENT + BLOCK_BYTES as u64,
        &bytes,
    );
    lies.encode(&mut bytes);
    write(
        &home.path,
        SEGMENTS_OFFSET + 2 * SEGMENT - BLOCK_BYTES as u64,
        &bytes,
    );
}

#[test]
fn row_18_records_that_lie_under_right_checksums_cost_misses_and_never_wrong_bytes() {
    let home = crashed();
    // A second segment claims the first one's generation.
    write_lies(&home);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    // The forged records are younger, so their pages miss. Pages that they do not name are
    // untouched.
    let liars = pool.hits(&chain(1, 4));
    assert!(liars <= 4);
    assert_eq!([2, 3].map(|seed| pool.hits(&chain(seed, 4))), [4, 4]);
    store.local().unwrap().check_invariants().unwrap();
    // And the store goes on: it takes the pages again, and fills and empties every segment.
    assert!(
        pool.put(&chain(1, 4))
            .iter()
            .all(|status| status.is_present())
    );
    assert_eq!(pool.hits(&chain(1, 4)), 4);
    for seed in 10..22 {
        assert!(
            pool.put(&chain(seed, 150))
                .iter()
                .all(|status| status.is_present())
        );
    }
    assert_eq!(pool.hits(&chain(21, 150)), 150);
    store.local().unwrap().check_invariants().unwrap();
    store.close().unwrap();
    assert_eq!(home.open().stats().damaged, 0);
}
