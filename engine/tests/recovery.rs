//! Recovery over a disk in memory: states that occur on real devices, and that a test cannot
//! produce there.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::memory::{self, Memory, STORE};

use larder_core::core::{InitState, Victim};
use larder_core::index::{Index, NamespaceSlot, SegmentId};
use larder_engine::format::{
    BLOCK_BYTES, BlockHeader, Body, DescriptorBlock, Fingerprint, HEADER_BLOCKS, OpenState,
    PageKey, PageRecord, Record, Run, SegmentHeader, SegmentNo, SegmentState, Serial, Superblock,
};
use larder_store::recovery::scan::{Bodies, Spot, read_descriptors};
use larder_store::recovery::{Recovery, recover};

const SEGMENT_BLOCKS: u32 = 64;
const SEGMENTS: u32 = 6;

fn superblock(run: Run, state: OpenState) -> Superblock {
    memory::superblock(run, state, SEGMENTS, SEGMENT_BLOCKS)
}

fn header(segment: u32, sequence: Serial, state: SegmentState, mark: Serial) -> [u8; BLOCK_BYTES] {
    let mut bytes = [0; BLOCK_BYTES];
    SegmentHeader {
        store: STORE,
        volume: 0,
        segment: SegmentNo(segment),
        sequence,
        state,
        blocks: u32::from(state == SegmentState::Sealed),
        data_end: HEADER_BLOCKS + u32::from(state == SegmentState::Sealed),
        proven: mark,
        synced: mark,
        born_ms: 0,
    }
    .encode(&mut bytes);
    bytes
}

/// Block `index` of a segment's generation, with one page of one block that lies behind `index`
/// others.
fn page_block(
    segment: u32,
    sequence: Serial,
    (birth, commit): (Serial, Serial),
    index: u32,
    key: u8,
) -> [u8; BLOCK_BYTES] {
    let page = Record::Page(PageRecord {
        namespace: Fingerprint::from_bytes([3; 16]),
        key: PageKey::from_bytes([key; 32]),
        parent: None,
        depth: 0,
        birth,
        start: HEADER_BLOCKS + index,
        blocks: 1,
        stored: 1,
        put_unix_s: 0,
        checksum: u64::from(segment) + 1,
        seal: None,
    });
    let mut bytes = [0; BLOCK_BYTES];
    DescriptorBlock {
        header: BlockHeader {
            store: STORE,
            volume: 0,
            segment: SegmentNo(segment),
            sequence,
            index,
            commit,
            data_end: HEADER_BLOCKS + index + 1,
            synced: Serial::ZERO,
        },
        body: Body::Records(vec![page]),
    }
    .encode(&mut bytes);
    bytes
}

/// The index that recovery makes of these blocks, counted from the start of segment 0.
fn recovered(blocks: BTreeMap<u32, [u8; BLOCK_BYTES]>, superblock: &Superblock) -> Index {
    recovered_around(blocks, BTreeSet::new(), superblock).1
}

fn recovered_around(
    blocks: BTreeMap<u32, [u8; BLOCK_BYTES]>,
    bad: BTreeSet<u32>,
    superblock: &Superblock,
) -> (Recovery, Index) {
    let disk = Memory::new(blocks, bad);
    let index = Index::new(SEGMENTS as usize, u64::from(SEGMENTS * SEGMENT_BLOCKS));
    let recovery = recover(&disk, &[Some(superblock)], &index, false);
    (recovery, index)
}

/// The first serials of the second epoch, in order.
fn serials<const N: usize>() -> [Serial; N] {
    let mut last = Serial::first_of(Run::FIRST.next().unwrap());
    [(); N].map(|()| {
        last = last.next().unwrap();
        last
    })
}

/// A segment with an open header that lists nothing, a damaged block and a whole one behind it, in
/// a store that was closed cleanly.
fn pages_behind_a_rotten_block(sequence: Serial, mark: Serial, closed: Run) -> usize {
    let [_, a, b, c, d] = serials();
    let mut rotten = page_block(0, sequence, (a, b), 0, 1);
    rotten[100] ^= 1;
    let open = header(0, sequence, SegmentState::Open, mark);
    let blocks = BTreeMap::from([
        (0, open),
        (1, open),
        (SEGMENT_BLOCKS - 1, rotten),
        (SEGMENT_BLOCKS - 2, page_block(0, sequence, (c, d), 1, 2)),
    ]);
    recovered(blocks, &superblock(closed, OpenState::Clean)).len()
}

/// The segment could not be read completely, so the epochs after the crash left it alone.
#[test]
fn an_open_header_of_a_crashed_run_lists_nothing_in_a_store_that_was_closed_since() {
    let [sequence] = serials();
    let closed = sequence.run().next().unwrap();
    assert_eq!(
        pages_behind_a_rotten_block(sequence, Serial::ZERO, closed),
        1
    );
}

/// A failed sync dropped the header that had sealed it.
#[test]
fn an_open_header_that_the_close_did_not_write_lists_nothing() {
    let [sequence] = serials();
    let mark = Serial::first_of(sequence.run());
    assert_eq!(
        pages_behind_a_rotten_block(sequence, mark, sequence.run()),
        1
    );
}

/// The failure of the page's later write was recorded in its segment's header, and nowhere else.
#[test]
fn a_page_under_two_bad_headers_replaces_no_whole_page() {
    let [first, a, b, second, c, d] = serials();
    let sealed = header(0, first, SegmentState::Sealed, d);
    let mut bad = header(1, second, SegmentState::Sealed, d);
    bad[100] ^= 1;
    let blocks = BTreeMap::from([
        (0, sealed),
        (1, sealed),
        (SEGMENT_BLOCKS - 1, page_block(0, first, (a, b), 0, 1)),
        (SEGMENT_BLOCKS, bad),
        (SEGMENT_BLOCKS + 1, bad),
        (2 * SEGMENT_BLOCKS - 1, page_block(1, second, (c, d), 0, 1)),
    ]);
    let index = recovered(blocks, &superblock(first.run(), OpenState::Open));
    let found = index.locate(NamespaceSlot(0), &PageKey::from_bytes([1; 32]));
    assert_eq!(found.map(|found| found.place.segment), Some(SegmentId(0)));
}

/// The bytes of a key's newest page, which is unproven, cannot be read at the moment. The older
/// page serves. The segment of the newer one must stay until its bytes can be read.
#[test]
fn a_segment_with_an_unreadable_newest_page_stays_as_it_is() {
    let [first, a, b, second, c, d] = serials();
    let proven = header(0, first, SegmentState::Sealed, b);
    let excluded = header(1, second, SegmentState::Sealed, Serial::ZERO);
    let blocks = BTreeMap::from([
        (0, proven),
        (1, proven),
        (SEGMENT_BLOCKS - 1, page_block(0, first, (a, b), 0, 1)),
        (SEGMENT_BLOCKS, excluded),
        (SEGMENT_BLOCKS + 1, excluded),
        (2 * SEGMENT_BLOCKS - 1, page_block(1, second, (c, d), 0, 1)),
    ]);
    let closed = superblock(first.run(), OpenState::Clean);
    let data = SEGMENT_BLOCKS + HEADER_BLOCKS;
    for (bad, state) in [
        (BTreeSet::from([data]), InitState::Unreadable),
        (BTreeSet::new(), InitState::Sealed),
    ] {
        let is_bad = !bad.is_empty();
        let (recovery, index) = recovered_around(blocks.clone(), bad, &closed);
        let found = index.locate(NamespaceSlot(0), &PageKey::from_bytes([1; 32]));
        assert_eq!(found.map(|found| found.place.segment), Some(SegmentId(0)));
        assert_eq!(recovery.recovered.segments[1].state, state);
        assert_eq!(recovery.recovered.is_partial, is_bad);
        assert_eq!(recovery.damage.len(), usize::from(is_bad));
    }
}

/// A power loss kept one descriptor block and neither header, and the place of one header cannot be
/// read at the moment. Once it is readable again it holds no header. So the pages served meanwhile
/// need a header of their own.
#[test]
fn a_generation_with_unreadable_headers_gets_a_new_header() {
    let [sequence, a, b] = serials();
    let mut blocks = BTreeMap::from([(SEGMENT_BLOCKS - 2, page_block(0, sequence, (a, b), 1, 1))]);
    let crashed = superblock(sequence.run(), OpenState::Open);
    let bad = BTreeSet::from([1]);
    let (recovery, index) = recovered_around(blocks.clone(), bad, &crashed);
    assert_eq!(index.len(), 1);
    let first = recovery.recovered.first;
    for (_, header) in recovery.adoptions {
        let at = header.segment.0 * SEGMENT_BLOCKS;
        let mut bytes = [0; BLOCK_BYTES];
        header.encode(&mut bytes);
        blocks.extend([(at, bytes), (at + 1, bytes)]);
    }
    let closed = superblock(first.run(), OpenState::Clean);
    assert_eq!(recovered(blocks, &closed).len(), 1);
}

/// The device had refused a page whose descriptor is on disk, so the header that sealed its segment
/// excludes the page. Then a record went into the segment's spare room, and a power loss came
/// before a header listed it.
#[test]
fn no_durable_watermark_proves_a_page_that_a_sealed_header_excludes() {
    let [first, a, b, c, d, second, e, f] = serials();
    let sealed = header(0, first, SegmentState::Sealed, Serial::ZERO);
    let later = header(1, second, SegmentState::Sealed, f);
    let blocks = BTreeMap::from([
        (0, sealed),
        (1, sealed),
        (SEGMENT_BLOCKS - 1, page_block(0, first, (a, b), 0, 1)),
        (SEGMENT_BLOCKS - 2, page_block(0, first, (c, d), 1, 2)),
        (SEGMENT_BLOCKS, later),
        (SEGMENT_BLOCKS + 1, later),
        (2 * SEGMENT_BLOCKS - 1, page_block(1, second, (e, f), 0, 3)),
    ]);
    let crashed = superblock(first.run(), OpenState::Open);
    let (recovery, index) = recovered_around(blocks, BTreeSet::new(), &crashed);
    assert_eq!((index.len(), recovery.unproven), (3, 2));
}

/// The power went between the two copies of the header that sealed a segment.
#[test]
fn a_header_that_a_crash_left_in_one_copy_is_written_in_both_copies() {
    let [sequence, a, b] = serials();
    let blocks = BTreeMap::from([
        (0, header(0, sequence, SegmentState::Sealed, b)),
        (1, header(0, sequence, SegmentState::Open, Serial::ZERO)),
        (SEGMENT_BLOCKS - 1, page_block(0, sequence, (a, b), 0, 1)),
    ]);
    let crashed = superblock(sequence.run(), OpenState::Open);
    let (recovery, index) = recovered_around(blocks, BTreeSet::new(), &crashed);
    assert_eq!((index.len(), recovery.unproven), (1, 0));
    let written: Vec<_> = recovery
        .adoptions
        .iter()
        .map(|(_, header)| header)
        .collect();
    assert_eq!(written.len(), 1);
    assert_eq!((written[0].blocks, written[0].proven), (1, b));
}

/// One copy of a header states that the segment was released, and cannot be read at the moment. The
/// pages of the other copy are served, and so that header is written in both copies.
#[test]
fn a_header_with_one_unreadable_copy_is_written_in_both_copies() {
    let [sequence, a, b] = serials();
    let blocks = BTreeMap::from([
        (0, header(0, sequence, SegmentState::Free, b)),
        (1, header(0, sequence, SegmentState::Sealed, b)),
        (SEGMENT_BLOCKS - 1, page_block(0, sequence, (a, b), 0, 1)),
    ]);
    let crashed = superblock(sequence.run(), OpenState::Open);
    let (recovery, index) = recovered_around(blocks, BTreeSet::from([0]), &crashed);
    assert_eq!((index.len(), recovery.unproven), (1, 0));
    let written: Vec<_> = recovery
        .adoptions
        .iter()
        .map(|(_, header)| (header.state, header.blocks, header.proven))
        .collect();
    assert_eq!(written, [(SegmentState::Sealed, 1, b)]);
}

/// A power loss undid the first header of a generation, and left blocks of it. Then the first write
/// of the next generation was cut short.
#[test]
fn a_generation_undone_by_a_power_loss_does_not_come_back_behind_a_torn_block() {
    let [sequence, a, b] = serials();
    let mut cut = page_block(0, sequence, (a, b), 0, 1);
    cut[BLOCK_BYTES / 2..].fill(0xa5);
    let left = page_block(0, sequence, (a, b), 1, 2);
    let crashed = superblock(sequence.run(), OpenState::Open);
    for header in [None, Some(header(0, sequence, SegmentState::Open, b))] {
        let mut blocks = BTreeMap::from([(SEGMENT_BLOCKS - 1, cut), (SEGMENT_BLOCKS - 2, left)]);
        if let Some(mut header) = header {
            header[100] ^= 1;
            blocks.insert(0, header);
        }
        let (recovery, index) = recovered_around(blocks, BTreeSet::new(), &crashed);
        assert_eq!((index.len(), recovery.damage.len()), (0, 0));
    }
}

/// An epoch added a block to a sealed segment and crashed before a header listed it. The next epoch
/// wrote over that block, lost this write to a power loss, and kept the header that lists it.
#[test]
fn reclaim_reads_no_block_that_recovery_does_not_take_in() {
    let [sequence, first, relic, later, last] = serials();
    let births: [Serial; 8] = serials();
    let mut sealed = [0; BLOCK_BYTES];
    SegmentHeader {
        store: STORE,
        volume: 0,
        segment: SegmentNo(0),
        sequence,
        state: SegmentState::Sealed,
        blocks: 3,
        data_end: HEADER_BLOCKS + 3,
        proven: Serial::ZERO,
        synced: Serial::ZERO,
        born_ms: 0,
    }
    .encode(&mut sealed);
    let block = |index: u32, commit| {
        let key = u8::try_from(index).unwrap() + 1;
        let bytes = page_block(0, sequence, (births[index as usize], commit), index, key);
        (SEGMENT_BLOCKS - 1 - index, bytes)
    };
    let commits_and_blocks = [
        ([first, relic, later], vec![0, 1, 2]),
        ([later, relic, last], vec![0, 2]),
    ];
    for (commits, expected) in commits_and_blocks {
        let blocks = (0..)
            .zip(commits)
            .map(|(index, commit)| block(index, commit));
        let blocks: BTreeMap<_, _> = blocks.chain([(0, sealed), (1, sealed)]).collect();
        let spot = Spot {
            store: STORE,
            volume: 0,
            number: 0,
            segment_blocks: SEGMENT_BLOCKS,
            bodies: Bodies::Clear,
        };
        let victim = Victim {
            segment: SegmentId(0),
            volume: 0,
            number: 0,
            sequence,
            blocks: 3,
            is_given_up: false,
        };
        let read = read_descriptors(
            &Memory::new(blocks.clone(), BTreeSet::new()),
            &spot,
            &victim,
        );
        let read: Vec<u32> = read.blocks.iter().map(|block| block.header.index).collect();
        assert_eq!(read, expected);
        let index = recovered(blocks, &superblock(sequence.run(), OpenState::Open));
        assert_eq!(index.len(), expected.len());
    }
}
