//! Recovery over a disk in memory: states that real devices leave and a test cannot make them leave.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use larder_engine::disk::{Action, Buffer, Choice, Disk, Done, Kind, Op, Piece};
use larder_engine::format::{
    BLOCK_BYTES, BlockHeader, Body, DescriptorBlock, Fingerprint, HEADER_BLOCKS, Holder, OpenState,
    PageKey, PageRecord, Record, Run, SEGMENTS_OFFSET, SegmentHeader, SegmentNo, SegmentState,
    Serial, StoreId, Superblock, VolumeEntry, VolumeId,
};
use larder_engine::index::Index;
use larder_engine::recovery::recover;

const STORE: StoreId = StoreId::from_bytes([7; 16]);
const SEGMENT_BLOCKS: u32 = 64;
const SEGMENTS: u32 = 6;

/// One volume that can only be read; what was never written is zero.
struct Memory {
    blocks: BTreeMap<u32, [u8; BLOCK_BYTES]>,
    choice: Choice,
}

impl Disk for Memory {
    unsafe fn submit(&self, ops: Vec<Op>) {
        for op in ops {
            let Action::Read {
                offset,
                buffer: Buffer::Owned(mut bytes),
            } = op.action
            else {
                panic!("recovery reads into memory of its own, and does nothing else");
            };
            let first = u32::try_from((offset - SEGMENTS_OFFSET) / BLOCK_BYTES as u64).unwrap();
            for (out, at) in bytes.chunks_exact_mut(BLOCK_BYTES).zip(first..) {
                if let Some(block) = self.blocks.get(&at) {
                    out.copy_from_slice(block);
                }
            }
            op.sink.done(vec![Done {
                tag: op.tag,
                result: Ok(()),
                buffer: Some(bytes),
            }]);
        }
    }

    unsafe fn register(&self, _: &[Piece]) -> String {
        String::new()
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn shutdown(&self) {}
}

fn superblock(run: Run, state: OpenState) -> Superblock {
    Superblock {
        store: STORE,
        volume: 0,
        generation: 1,
        run,
        state,
        created_unix_s: 0,
        holder: Holder {
            pid: 1,
            boot_id: [0; 16],
        },
        segment_blocks: SEGMENT_BLOCKS,
        volumes: vec![VolumeEntry {
            id: VolumeId::from_bytes([1; 16]),
            segments: SEGMENTS,
            lost: false,
            path: String::new(),
        }],
    }
}

fn open_header(sequence: Serial, synced: Serial) -> [u8; BLOCK_BYTES] {
    let mut bytes = [0; BLOCK_BYTES];
    SegmentHeader {
        store: STORE,
        volume: 0,
        segment: SegmentNo(0),
        sequence,
        state: SegmentState::Open,
        blocks: 0,
        data_end: HEADER_BLOCKS,
        proven: Serial::ZERO,
        synced,
    }
    .encode(&mut bytes);
    bytes
}

fn page_block(sequence: Serial, birth: Serial, index: u32) -> [u8; BLOCK_BYTES] {
    let commit = birth.next().unwrap();
    let page = Record::Page(PageRecord {
        namespace: Fingerprint::from_bytes([3; 16]),
        key: PageKey::from_bytes([u8::try_from(index).unwrap(); 32]),
        parent: None,
        depth: 0,
        birth,
        start: HEADER_BLOCKS + index,
        blocks: 1,
        checksum: 0,
    });
    let mut bytes = [0; BLOCK_BYTES];
    DescriptorBlock {
        header: BlockHeader {
            store: STORE,
            volume: 0,
            segment: SegmentNo(0),
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

/// A segment that could not be read in whole was left alone by the runs after the crash; then the store was closed in order.
#[test]
fn an_open_header_of_a_crashed_run_lists_nothing_in_a_store_that_was_closed_since() {
    let run = Run::FIRST.next().unwrap();
    let sequence = Serial::first_of(run).next().unwrap();
    let first = sequence.next().unwrap();
    let second = first.next().and_then(Serial::next).unwrap();
    let mut rotten = page_block(sequence, first, 0);
    rotten[100] ^= 1;
    let header = open_header(sequence, Serial::ZERO);
    let blocks = BTreeMap::from([
        (0, header),
        (1, header),
        (SEGMENT_BLOCKS - 1, rotten),
        (SEGMENT_BLOCKS - 2, page_block(sequence, second, 1)),
    ]);
    let disk = Memory {
        blocks,
        choice: Choice {
            kind: Kind::Threads,
            reason: String::new(),
        },
    };
    let index = Index::new(SEGMENTS as usize, u64::from(SEGMENTS * SEGMENT_BLOCKS));
    let closed = superblock(run.next().unwrap(), OpenState::Clean);
    recover(&disk, &[Some(&closed)], &index, false);
    assert_eq!(index.len(), 1, "the whole block behind the rotten one");
}
