//! Claims without content take no memory: ten million namespaces named by pages, millions of
//! segments that do not exist.
//!
//! A test binary of its own with one test, since it measures the memory of the whole process.

#![allow(clippy::unwrap_used)]

use larder_core::core::NAMESPACES_MAX;
use larder_disk::{Action, Choice, Disk, DiskError, Done, Kind, Op, Piece};
use larder_engine::Store;
use larder_engine::format::{
    BLOCK_BYTES, Body, Fingerprint, RECORDS_PER_BLOCK, Record, SEGMENTS_MAX, SEGMENTS_OFFSET,
    SUPERBLOCK_OFFSETS, SegmentState,
};
use larder_fuzz::forge::{Forged, key, page, serial};
use larder_fuzz::memory_disk::Block;
use larder_fuzz::raw::{MemoryFile, options};
use larder_fuzz::sample::{REAL_SEGMENT_BLOCKS, fresh};
use larder_offline::survey::{Survey, SurveyOptions};
use larder_store::recovery::scan::{Disbelief, FaultReason};

const NAMESPACES: u64 = 10_000_000;

/// Descriptor blocks of a segment: as many as its space for the described pages allows.
const BLOCKS: u64 = 97;

/// Limit of the process's memory, in KiB.
const MEMORY_KIB_MAX: u64 = 512 << 10;

/// A disk that generates the content of reads.
struct Endless {
    choice: Choice,
}

fn segment(number: u32, bodies: Vec<Body>) -> Forged {
    let generation = serial(2, u64::from(number) << 31);
    let data_end = REAL_SEGMENT_BLOCKS - BLOCKS as u32 - 1;
    Forged::sealed(number, generation, data_end, bodies)
}

/// The number of descriptor blocks of a segment: fewer in the last one.
fn blocks_of(number: u32) -> u64 {
    let all = NAMESPACES.div_ceil(RECORDS_PER_BLOCK as u64);
    BLOCKS.min(all - u64::from(number) * BLOCKS)
}

impl Endless {
    fn block(at: u64) -> Block {
        let mut bytes = [0; BLOCK_BYTES];
        let Some(within) = at.checked_sub(SEGMENTS_OFFSET / BLOCK_BYTES as u64) else {
            return bytes;
        };
        let number = (within / u64::from(REAL_SEGMENT_BLOCKS)) as u32;
        let index = u64::from(REAL_SEGMENT_BLOCKS) - 1 - within % u64::from(REAL_SEGMENT_BLOCKS);
        if index >= u64::from(REAL_SEGMENT_BLOCKS) - 2 {
            let mut header = segment(number, Vec::new()).header(SegmentState::Sealed);
            header.blocks = blocks_of(number) as u32;
            header.encode(&mut bytes);
            return bytes;
        }
        let first = (u64::from(number) * BLOCKS + index) * RECORDS_PER_BLOCK as u64;
        if index >= BLOCKS || first >= NAMESPACES {
            return bytes;
        }
        let records: Vec<Record> = (first..NAMESPACES.min(first + RECORDS_PER_BLOCK as u64))
            .map(|namespace| {
                let mut fingerprint = [0; 16];
                fingerprint[..8].copy_from_slice(&namespace.to_le_bytes());
                let start = 2 + (namespace % (BLOCKS * RECORDS_PER_BLOCK as u64)) as u32;
                let fingerprint = Fingerprint::from_bytes(fingerprint);
                Record::Page(page(fingerprint, key(namespace), serial(2, 1), start))
            })
            .collect();
        segment(number, Vec::new()).block_of(index as u32, Body::Records(records))
    }
}

impl Disk for Endless {
    unsafe fn submit(&self, ops: Vec<Op>) {
        for op in ops {
            let Action::Read { offset, mut buffer } = op.action else {
                panic!("an opening only reads");
            };
            let first = offset / BLOCK_BYTES as u64;
            // SAFETY: the operation is answered below.
            let parts = unsafe { buffer.parts_mut() };
            let out = parts.flat_map(|part| part.chunks_exact_mut(BLOCK_BYTES));
            for (at, out) in (first..).zip(out) {
                out.copy_from_slice(&Endless::block(at));
            }
            op.sink.done(vec![Done {
                tag: op.tag,
                result: Ok::<(), DiskError>(()),
                buffer: buffer.into_owned(),
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

fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let number = line.unwrap().split_ascii_whitespace().nth(1).unwrap();
    number.parse().unwrap()
}

#[test]
fn millions_of_namespaces_and_of_segments_take_bounded_memory_and_are_reported() {
    millions_of_segments();
    ten_million_namespaces();
    assert!(peak_kib() < MEMORY_KIB_MAX, "{} KiB", peak_kib());
}

/// A file of a megabyte claims to be a volume of 2^24 segments, or the first of two.
fn millions_of_segments() {
    let claims = [vec![SEGMENTS_MAX], vec![1, SEGMENTS_MAX - 1]];
    for segments in claims {
        let superblock = fresh(&segments, REAL_SEGMENT_BLOCKS).superblocks[0]
            .encode()
            .unwrap();
        let file = MemoryFile::new(2 << 20);
        for offset in SUPERBLOCK_OFFSETS {
            file.write(offset, &superblock[..]);
        }
        let survey = Survey::new(&file.path(), &SurveyOptions::default()).unwrap();
        let total: u32 = segments.iter().sum();
        assert_eq!(
            survey.segments.len() as u64 + survey.unreachable,
            u64::from(total)
        );
        assert!(!survey.flaws.is_empty(), "no fault is reported");
        for read_only in [true, false] {
            assert!(Store::open(&file.path(), options(read_only)).is_err());
        }
    }
}

fn ten_million_namespaces() {
    let blocks = NAMESPACES.div_ceil(RECORDS_PER_BLOCK as u64);
    let segments = blocks.div_ceil(BLOCKS) as u32;
    let image = fresh(&[segments], REAL_SEGMENT_BLOCKS);
    let index = image.index();
    let disk = Endless {
        choice: Choice {
            kind: Kind::Threads,
            reason: String::new(),
        },
    };
    let recovery = image.recover(&disk, &index, false);
    assert_eq!(recovery.recovered.namespaces.len(), NAMESPACES_MAX);
    assert_eq!(index.len(), NAMESPACES_MAX);
    // Each segment reports once the number of its namespaces beyond the limit.
    let mut unreported = NAMESPACES - NAMESPACES_MAX as u64;
    assert!(recovery.damage.len() <= segments as usize);
    for damage in &recovery.damage {
        let FaultReason::Disbelieved(pages, Disbelief::Namespaces) = damage.fault.reason else {
            panic!("{damage:?}");
        };
        unreported -= pages;
    }
    assert_eq!(unreported, 0, "some namespaces are not reported");
}
