//! Images with wrong content and valid checksums: sizes, counts and offsets at every extreme,
//! circles in chains, two segments of one generation, overlapping pages. They are surveyed, opened,
//! worked on and opened again. None of that may panic, hang, or take memory beyond the real content
//! of the image. The faults are reported.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_core::index::NamespaceSlot;
use larder_disk::{Action, Choice, Disk, Op, Piece};
use larder_engine::format::{
    BLOCK_BYTES, Body, Fingerprint, OpenState, PageRecord, Record, SegmentState, Serial, Structure,
};
use larder_fuzz::edits::{
    FIELDS, RECORD_BYTES, RECORD_FIELDS, RECORDS_AT, fix_checksum, is_structure, put_header,
};
use larder_fuzz::examine::{live_on, look, open_and_read, read_all};
use larder_fuzz::feed::Feed;
use larder_fuzz::forge::{Forged, bodies, key, page, prefix, serial};
use larder_fuzz::machine::{Image, Machine, segment_range};
use larder_fuzz::memory_disk::{Block, MemoryDisk};
use larder_fuzz::raw::{MemoryFile, survey};
use larder_fuzz::sample::{
    REAL_SEGMENT_BLOCKS, SMALL_SEGMENT_BLOCKS, Truth, fresh, namespaces, sample,
};
use larder_offline::survey::{FlawReason, Survey, SurveyOptions};

/// Numbers at every extreme.
const EXTREMES: [u64; 14] = [
    0,
    1,
    2,
    3,
    63,
    64,
    65,
    0xffff,
    0x0010_0000,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 40,
    u64::MAX - 1,
    u64::MAX,
];

fn small() -> Image {
    fresh(&[6], SMALL_SEGMENT_BLOCKS)
}

fn real() -> Image {
    fresh(&[6], REAL_SEGMENT_BLOCKS)
}

fn fingerprint() -> Fingerprint {
    namespaces()[0].fingerprint()
}

/// Works on an open image with a fixed input.
fn live_on_fixed(image: Image, truth: &Truth) {
    let work: Vec<u8> = (0..120_u8).map(|at| at.wrapping_mul(71)).collect();
    live_on(image, truth.clone(), &mut Feed::new(&work));
}

/// Changes one number of one block, updates the checksum, and works on the image.
fn with_number(image: &Image, truth: &Truth, at: u64, (offset, width): (usize, usize), value: u64) {
    let mut image = image.clone();
    let mut block: Block = image.volumes[0].block(at);
    block[offset..offset + width].copy_from_slice(&value.to_le_bytes()[..width]);
    fix_checksum(&mut block);
    image.volumes[0].put(at, block);
    live_on_fixed(image, truth);
}

/// The first four blocks of a structure.
fn some_structures(image: &Image, structure: Structure) -> Vec<u64> {
    let volume = &image.volumes[0];
    let mut all: Vec<u64> = volume
        .written()
        .into_iter()
        .filter(|at| volume.block(*at).starts_with(&structure.magic()))
        .collect();
    all.truncate(4);
    all
}

/// Sets every field of such structures to every extreme. `records` are the records that contain the
/// `fields`, none for the structure itself.
fn at_every_extreme(
    recipe: usize,
    structure: Structure,
    fields: &[(usize, usize)],
    records: &[usize],
) {
    let sample = sample(recipe);
    let starts: Vec<usize> = match records {
        [] => vec![0],
        _ => records
            .iter()
            .map(|record| RECORDS_AT + record * RECORD_BYTES)
            .collect(),
    };
    for at in some_structures(&sample.image, structure) {
        for start in &starts {
            for (offset, width) in fields {
                for value in EXTREMES {
                    let field = (start + offset, *width);
                    with_number(&sample.image, &sample.truth, at, field, value);
                }
            }
        }
    }
}

#[test]
fn every_number_of_a_header_may_be_at_any_extreme() {
    for recipe in [1, 2, 3, 4] {
        at_every_extreme(recipe, Structure::SegmentHeader, &FIELDS, &[]);
    }
}

#[test]
fn every_number_of_a_descriptor_block_may_be_at_any_extreme() {
    for recipe in [2, 3] {
        at_every_extreme(recipe, Structure::DescriptorBlock, &FIELDS, &[]);
    }
}

#[test]
fn every_number_of_a_record_may_be_at_any_extreme() {
    for recipe in [2, 4] {
        let records = [0, 1, 7];
        at_every_extreme(recipe, Structure::DescriptorBlock, &RECORD_FIELDS, &records);
    }
}

#[test]
fn any_structure_may_be_at_the_address_of_any_other() {
    for recipe in [2, 4] {
        let sample = sample(recipe);
        let volume = &sample.image.volumes[0];
        let structures: Vec<u64> = volume
            .written()
            .into_iter()
            .filter(|at| is_structure(&volume.block(*at)))
            .take(12)
            .collect();
        for &from in &structures {
            for &to in &structures {
                let mut image = sample.image.clone();
                let block = volume.block(from);
                image.volumes[0].put(to, block);
                live_on_fixed(image, &sample.truth);
            }
        }
    }
}

/// Pages of one block each, with the given parents: (number, parent's number).
fn chain_image(mut image: Image, pages: &[(u64, Option<u64>)]) -> Image {
    let most = image.segment_blocks() / 2;
    for (chunk, number) in pages.chunks(most as usize).zip(0..) {
        let sequence = serial(2, u64::from(number) << 32);
        let records: Vec<Record> = (3..)
            .zip(chunk)
            .map(|(start, (page_number, parent))| {
                let birth = Serial::from_raw(sequence.get() + u64::from(start));
                Record::Page(PageRecord {
                    parent: parent.map(prefix),
                    depth: parent.map_or(0, |_| 1),
                    ..page(fingerprint(), key(*page_number), birth, start)
                })
            })
            .collect();
        Forged::sealed(number, sequence, most + 8, bodies(&records)).put(&mut image);
    }
    image
}

fn slot_of(machine: &mut Machine) -> NamespaceSlot {
    machine.namespace(&namespaces()[0]).unwrap()
}

#[test]
fn pages_that_are_their_own_ancestors_are_served_evicted_and_surveyed() {
    let circle = |of: u64| (0..of).map(move |n| (n, Some((n + 1) % of)));
    for pages in [
        vec![(1, Some(1))],
        circle(2).collect::<Vec<_>>(),
        circle(20).collect(),
        circle(20).rev().collect(),
        // A circle with a tail, in the order tail first.
        circle(5)
            .chain((5..12).map(|n| (n, Some(n - 1))))
            .rev()
            .collect(),
        // Two pages that are parents of each other, put twice.
        vec![
            (1, Some(2)),
            (2, Some(1)),
            (1, None),
            (2, Some(1)),
            (1, Some(2)),
        ],
    ] {
        let image = chain_image(small(), &pages);
        live_on_fixed(image, &Truth::default());
        let image = chain_image(real(), &pages);
        let (mut machine, damage) = Machine::open(image.clone()).unwrap();
        assert!(damage.is_empty(), "{damage:?}");
        let slot = slot_of(&mut machine);
        let numbers: BTreeSet<u64> = pages.iter().map(|(number, _)| *number).collect();
        for number in numbers {
            assert!(machine.index.locate(slot, &key(number)).is_some());
            assert_eq!(machine.get(slot, &key(number), 1), None, "no such bytes");
        }
        machine.check();
        survey(&MemoryFile::of(&image).path());
    }
}

#[test]
fn a_comb_of_long_chains_is_opened_with_every_page_under_its_parent() {
    // One chain has half of the pages. The other pages come in pairs: one names the chain's end as
    // its parent, and is the parent of the other, which comes later. A search for circles at each
    // page would walk the whole chain each time.
    let half = 100_000;
    let mut chain: Vec<(u64, Option<u64>)> = vec![(0, None)];
    chain.extend((1..half).map(|n| (n, Some(n - 1))));
    let (mut teeth, mut tips) = (Vec::new(), Vec::new());
    for n in (half..2 * half).step_by(2) {
        teeth.push((n, Some(half - 1)));
        tips.push((n + 1, Some(n)));
    }
    let pages = [teeth, chain, tips].concat();
    let segments = 2 * half as u32 / (REAL_SEGMENT_BLOCKS / 2) + 6;
    let image = chain_image(fresh(&[segments], REAL_SEGMENT_BLOCKS), &pages);
    let (machine, damage) = Machine::open(image.clone()).unwrap();
    assert!(damage.is_empty());
    assert_eq!(machine.index.len(), pages.len());
    let mut orphans = 0;
    machine.index.each(|page| orphans += u64::from(page.orphan));
    assert_eq!(orphans, 0, "every page finds its parent");
    survey(&MemoryFile::of(&image).path());
}

#[test]
fn two_segments_of_one_generation_are_both_read() {
    let record = |number: u64, start| {
        Record::Page(page(
            fingerprint(),
            key(number),
            serial(2, 5 + number),
            start,
        ))
    };
    for state in [None, Some(SegmentState::Open), Some(SegmentState::Sealed)] {
        let mut image = small();
        for number in 0..2 {
            Forged {
                state,
                ..Forged::sealed(
                    number,
                    serial(2, 0),
                    20,
                    bodies(&[record(u64::from(number), 4), record(9, 5)]),
                )
            }
            .put(&mut image);
        }
        image.superblocks[0].state = OpenState::Open;
        let (mut machine, _) = Machine::open(image.clone()).unwrap();
        let slot = slot_of(&mut machine);
        for number in [0, 1, 9] {
            assert!(machine.index.locate(slot, &key(number)).is_some());
        }
        live_on_fixed(image, &Truth::default());
    }
}

/// Pages of `blocks` blocks at overlapping starts, in a segment of their own. Returns the number of
/// data blocks.
fn overlapping(image: &mut Image, pages: u64, blocks: u32) -> u64 {
    let room = image.segment_blocks() / 2;
    let records: Vec<Record> = (0..pages)
        .map(|number| {
            let start = 2 + number as u32 % (room - blocks - 2);
            Record::Page(PageRecord {
                blocks,
                stored: blocks,
                ..page(fingerprint(), key(number), serial(2, 1 + number), start)
            })
        })
        .collect();
    Forged::sealed(0, serial(2, 0), room, bodies(&records)).put(image);
    u64::from(room - 2)
}

#[test]
fn overlapping_pages_count_for_no_more_than_their_segment_holds() {
    let mut image = small();
    let room = overlapping(&mut image, 41 * 8, 1);
    let (machine, damage) = Machine::open(image.clone()).unwrap();
    assert!(
        machine.index.len() as u64 <= room,
        "{}",
        machine.index.len()
    );
    assert!(!damage.is_empty(), "no fault is reported");
    live_on_fixed(image, &Truth::default());
}

#[test]
fn a_deep_verification_of_overlapping_pages_reads_no_more_than_the_store_holds() {
    let mut image = real();
    overlapping(&mut image, 41 * 200, 1500);
    let file = MemoryFile::of(&image);
    let survey = Survey::new(&file.path(), &SurveyOptions::default()).unwrap();
    let bytes = image.volumes[0].blocks() * BLOCK_BYTES as u64;
    assert!(survey.live_bytes() <= bytes, "{}", survey.live_bytes());
    let reported = survey.flaws.iter();
    let reported = reported.filter(|flaw| !matches!(flaw.reason, FlawReason::Overlap(_)));
    assert!(reported.count() > 0, "no fault is reported");
}

#[test]
fn a_page_in_doubt_that_claims_a_gigabyte_is_not_read_in_one_piece() {
    let blocks = (600 << 20) / BLOCK_BYTES as u32;
    let mut image = fresh(&[6], 1 << 19);
    let twice = [1, 2].map(|counter| {
        Record::Page(PageRecord {
            blocks,
            stored: blocks,
            ..page(fingerprint(), key(1), serial(2, counter), 2)
        })
    });
    let [older, newer] = twice.map(|record| bodies(&[record]));
    for (number, bodies) in [(0, older), (1, newer)] {
        Forged {
            state: Some(SegmentState::Open),
            proven: Serial::ZERO,
            ..Forged::sealed(number, serial(2, 0), blocks + 2, bodies)
        }
        .put(&mut image);
    }
    image.superblocks[0].state = OpenState::Open;
    look(&image);
    // The disk refuses a transfer above its limit.
    let index = image.index();
    let disk = MemoryDisk::new(image.volumes.clone());
    image.recover(&*disk, &index, false);
    assert_eq!(index.len(), 1);
}

/// A disk in memory that counts reads and bytes.
struct Counting {
    disk: Arc<MemoryDisk>,
    reads: AtomicU64,
    bytes: AtomicU64,
}

impl Disk for Counting {
    unsafe fn submit(&self, ops: Vec<Op>) {
        for op in &ops {
            if let Action::Read { buffer, .. } = &op.action {
                self.reads.fetch_add(1, Ordering::Relaxed);
                self.bytes.fetch_add(buffer.len() as u64, Ordering::Relaxed);
            }
        }
        // SAFETY: the contract of this call is the contract of the inner disk's call.
        unsafe { self.disk.submit(ops) };
    }

    unsafe fn register(&self, memory: &[Piece]) -> String {
        // SAFETY: as above.
        unsafe { self.disk.register(memory) }
    }

    fn choice(&self) -> &Choice {
        self.disk.choice()
    }

    fn shutdown(&self) {}
}

/// One descriptor block in this many is present. It shows that the blocks before it were written.
const ONE_IN: u32 = 900;

/// A segment with this many descriptor blocks, most of them missing.
fn missing_blocks(blocks: u32, state: Option<SegmentState>) -> Image {
    let mut image = fresh(&[6], 1 << 18);
    let mut forged = Forged::sealed(0, serial(2, 0), 20, Vec::new());
    let end = segment_range(1 << 18, 0).end;
    for index in (0..blocks).step_by(ONE_IN as usize) {
        let block = forged.block_of(index, Body::Records(Vec::new()));
        image.volumes[0].put(end - 1 - u64::from(index), block);
    }
    if let Some(state) = state {
        forged.state = Some(state);
        let mut header = forged.header(state);
        header.blocks = blocks;
        put_header(&mut image, &header);
    }
    image.superblocks[0].state = OpenState::Open;
    image
}

/// The number of faults that an opening reports, and its reads and bytes.
fn opening_of(image: &Image) -> (u64, [u64; 2]) {
    let disk = Counting {
        disk: MemoryDisk::new(image.volumes.clone()),
        reads: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
    };
    let recovery = image.recover(&disk, &image.index(), false);
    let work = [disk.reads.into_inner(), disk.bytes.into_inner()];
    (recovery.damage.len() as u64, work)
}

#[test]
fn reads_that_report_missing_blocks_grow_linearly_with_their_number() {
    const BLOCKS: u32 = 200_000;
    for state in [None, Some(SegmentState::Open), Some(SegmentState::Sealed)] {
        let image = missing_blocks(BLOCKS, state);
        let (reported, work) = opening_of(&image);
        let missing = u64::from(BLOCKS - BLOCKS.div_ceil(ONE_IN));
        // Only a sealed segment's header proves them.
        let is_sealed = state == Some(SegmentState::Sealed);
        assert_eq!(reported, if is_sealed { missing } else { 0 }, "{state:?}");
        let (_, quarter) = opening_of(&missing_blocks(BLOCKS / 4, state));
        for (all, quarter) in work.into_iter().zip(quarter) {
            assert!(
                all < 5 * quarter,
                "{state:?}: {quarter} for a quarter, {all} for all"
            );
        }
        open_and_read(image.clone(), &Truth::default()).unwrap();
        survey(&MemoryFile::of(&image).path());
    }
}

#[test]
fn records_of_one_place_with_two_sizes_keep_the_page_counts_right() {
    let record = |number: u64, blocks, counter, start| {
        Record::Page(PageRecord {
            blocks,
            stored: blocks,
            ..page(fingerprint(), key(number), serial(2, counter), start)
        })
    };
    let mut image = small();
    for number in 0..6 {
        // The first segment states the true size. In the others a wrong record precedes each page,
        // with the same place. No segment is free, so reclaim has to evict the pages that it finds.
        let records = [
            record(100 + u64::from(number), 1, 1, 3),
            record(u64::from(number), 3, 2, 5),
            record(u64::from(number), 1, 3, 5),
        ];
        let sequence = serial(2, u64::from(number) << 20);
        Forged::sealed(number, sequence, 30, bodies(&records)).put(&mut image);
    }
    let (mut machine, damage) = Machine::open(image.clone()).unwrap();
    machine.reclaim();
    machine.check();
    assert_eq!(damage.len(), 6, "{damage:?}");
    live_on_fixed(image, &Truth::default());
}

#[test]
fn a_wrong_page_size_of_a_namespace_does_not_cost_its_valid_pages() {
    let sample = sample(1);
    let mut image = sample.image.clone();
    let wrong = Record::Page(PageRecord {
        blocks: 7,
        stored: 7,
        ..page(fingerprint(), key(1), serial(1, 1), 5)
    });
    // The wrong record must be read before all others.
    let free = (0..6).rev().find(|number| {
        let range = segment_range(SMALL_SEGMENT_BLOCKS, *number);
        image.volumes[0].block(range.end - 1) == [0; BLOCK_BYTES]
    });
    let free = free.unwrap();
    // The content of the first segment moves there, and the wrong record takes its place.
    let first = segment_range(SMALL_SEGMENT_BLOCKS, 0);
    let spare = segment_range(SMALL_SEGMENT_BLOCKS, free);
    for (from, to) in first.clone().zip(spare) {
        let mut block = image.volumes[0].block(from);
        if is_structure(&block) {
            block[64..68].copy_from_slice(&free.to_le_bytes());
            fix_checksum(&mut block);
        }
        image.volumes[0].put(to, block);
        image.volumes[0].put(from, [0; BLOCK_BYTES]);
    }
    Forged::sealed(0, serial(1, 1 << 35), 30, bodies(&[wrong])).put(&mut image);
    let (mut machine, damage) = Machine::open(image).unwrap();
    assert!(!damage.is_empty(), "the wrong record is not reported");
    let hits = read_all(&mut machine, &sample.truth);
    for name in &sample.kept {
        assert!(hits.contains(name), "{name:?} is lost to a wrong record");
    }
}
