//! Edits of an image, as a fuzzer's input describes them: from a flipped bit to a structure with
//! wrong content and a valid checksum.
//!
//! ```text
//!  offset  bytes  parts of a block's layout that edits use
//!       0      8  magic
//!      16      4  crc
//!      24      -  fields: numbers of 2, 4 and 8 bytes
//!     160     96  each record of a descriptor block
//! ```

use larder_engine::format::{BLOCK_BYTES, OpenState, Run, SegmentHeader, Structure, Superblock};

use crate::feed::Feed;
use crate::machine::{Image, segment_start};
use crate::memory_disk::Block;

const CRC_AT: usize = 16;
/// Offset of the first record in a descriptor block, in bytes.
pub const RECORDS_AT: usize = 160;

/// Bytes of one record.
pub const RECORD_BYTES: usize = 96;

/// Offset and width of the fields of a segment header and of a descriptor block's header.
pub const FIELDS: [(usize, usize); 13] = [
    (12, 4),
    (24, 8),
    (40, 8),
    (48, 8),
    (56, 8),
    (64, 4),
    (68, 4),
    (72, 4),
    (76, 2),
    (78, 2),
    (80, 8),
    (96, 8),
    (160, 8),
];

/// Offset in a record and width of its fields.
pub const RECORD_FIELDS: [(usize, usize); 11] = [
    (0, 1),
    (1, 1),
    (4, 4),
    (8, 8),
    (24, 8),
    (56, 8),
    (68, 4),
    (72, 4),
    (80, 8),
    (88, 8),
    (32, 8),
];

/// Sets the CRC of a block to its valid value.
pub fn fix_checksum(block: &mut Block) {
    block[CRC_AT..CRC_AT + 4].fill(0);
    let crc = crc32fast::hash(block);
    block[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Whether a block begins with the magic of one of the format's structures.
#[must_use]
pub fn is_structure(block: &Block) -> bool {
    [
        Structure::Superblock,
        Structure::SegmentHeader,
        Structure::DescriptorBlock,
    ]
    .iter()
    .any(|structure| block.starts_with(&structure.magic()))
}

/// Performs edits until the input requests the end, or ends.
pub fn edit(image: &mut Image, feed: &mut Feed<'_>) {
    while !feed.is_empty() && edit_once(image, feed) {}
}

/// One edit. Returns false when the input requests the end.
fn edit_once(image: &mut Image, feed: &mut Feed<'_>) -> bool {
    let volume = feed.below(image.volumes.len());
    match feed.byte() % 16 {
        0 => return false,
        1 => flip(image, volume, feed),
        2 => set_field(image, volume, feed, &FIELDS),
        3..=6 => set_record_field(image, volume, feed),
        7 => copy_field(image, volume, feed),
        8 => copy_block(image, volume, feed),
        9 => copy_record(image, volume, feed),
        10 => wipe(image, volume, feed),
        11 => {
            let block = any_written(image, volume, feed);
            image.volumes[volume].make_unreadable(block);
        }
        12 => overwrite(image, volume, feed),
        13 => set_superblock(image, volume, feed),
        14 => parent_in_a_circle(image, volume, feed),
        _ => count_records_anew(image, volume, feed),
    }
    true
}

/// A non-zero block, mostly a structure.
fn any_written(image: &Image, volume: usize, feed: &mut Feed<'_>) -> u64 {
    let written = image.volumes[volume].written();
    if feed.byte() < 16 {
        return feed.pick(&written).unwrap_or(0);
    }
    any_structure(image, volume, feed)
}

fn any_structure(image: &Image, volume: usize, feed: &mut Feed<'_>) -> u64 {
    let held = &image.volumes[volume];
    let structures: Vec<u64> = held
        .written()
        .into_iter()
        .filter(|at| is_structure(&held.block(*at)))
        .collect();
    feed.pick(&structures)
        .unwrap_or_else(|| segment_start(image.segment_blocks(), 0))
}

fn any_descriptors(image: &Image, volume: usize, feed: &mut Feed<'_>) -> Option<u64> {
    let held = &image.volumes[volume];
    let magic = Structure::DescriptorBlock.magic();
    let blocks: Vec<u64> = held
        .written()
        .into_iter()
        .filter(|at| held.block(*at).starts_with(&magic))
        .collect();
    feed.pick(&blocks)
}

/// Changes a block, and updates its checksum.
fn change(image: &mut Image, volume: usize, at: u64, with: impl FnOnce(&mut Block)) {
    let mut block = image.volumes[volume].block(at);
    with(&mut block);
    if is_structure(&block) {
        fix_checksum(&mut block);
    }
    image.volumes[volume].put(at, block);
}

fn write_number(block: &mut Block, at: usize, width: usize, value: u64) {
    block[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
}

fn read_number(block: &Block, at: usize, width: usize) -> u64 {
    let mut word = [0; 8];
    word[..width].copy_from_slice(&block[at..at + width]);
    u64::from_le_bytes(word)
}

/// A number to replace another: near it, or at a limit.
fn instead_of(old: u64, feed: &mut Feed<'_>) -> u64 {
    match feed.byte() {
        0..48 => old.wrapping_add(1),
        48..96 => old.wrapping_sub(1),
        96..128 => old.wrapping_add(u64::from(feed.byte())),
        128..160 => old ^ 1 << (feed.byte() % 64),
        _ => feed.awkward(),
    }
}

fn flip(image: &mut Image, volume: usize, feed: &mut Feed<'_>) {
    let at = any_written(image, volume, feed);
    let mut block = image.volumes[volume].block(at);
    let bit = usize::from(feed.short());
    block[bit / 8 % BLOCK_BYTES] ^= 1 << (bit % 8);
    image.volumes[volume].put(at, block);
}

fn set_field(image: &mut Image, volume: usize, feed: &mut Feed<'_>, fields: &[(usize, usize)]) {
    let at = any_structure(image, volume, feed);
    let (offset, width) = feed.pick(fields).unwrap_or((64, 4));
    change(image, volume, at, |block| {
        let value = instead_of(read_number(block, offset, width), feed);
        write_number(block, offset, width, value);
    });
}

fn record_at(feed: &mut Feed<'_>) -> usize {
    let most = (BLOCK_BYTES - RECORDS_AT) / RECORD_BYTES;
    RECORDS_AT + feed.below(most) * RECORD_BYTES
}

fn set_record_field(image: &mut Image, volume: usize, feed: &mut Feed<'_>) {
    let Some(at) = any_descriptors(image, volume, feed) else {
        return;
    };
    let record = record_at(feed);
    let (offset, width) = feed.pick(&RECORD_FIELDS).unwrap_or((68, 4));
    change(image, volume, at, |block| {
        let value = instead_of(read_number(block, record + offset, width), feed);
        write_number(block, record + offset, width, value);
    });
}

/// Copies a field of one structure to another.
fn copy_field(image: &mut Image, volume: usize, feed: &mut Feed<'_>) {
    let from = any_structure(image, volume, feed);
    let to = any_structure(image, volume, feed);
    let (offset, width) = feed.pick(&FIELDS).unwrap_or((40, 8));
    let value = read_number(&image.volumes[volume].block(from), offset, width);
    change(image, volume, to, |block| {
        write_number(block, offset, width, value);
    });
}

/// Copies a block to the address of another one. Half of the time its header states the new
/// address.
fn copy_block(image: &mut Image, volume: usize, feed: &mut Feed<'_>) {
    let segment_blocks = image.segment_blocks();
    let from = any_structure(image, volume, feed);
    let segments = image.superblocks[0].volumes[volume].segments;
    let segment = feed.below(segments as usize) as u32;
    let index = feed.below(segment_blocks as usize) as u32;
    let mut block = image.volumes[volume].block(from);
    if feed.byte() < 128 {
        write_number(&mut block, 64, 4, segment.into());
        write_number(&mut block, 76, 2, volume as u64);
        if block.starts_with(&Structure::DescriptorBlock.magic()) {
            write_number(&mut block, 68, 4, index.into());
        }
        fix_checksum(&mut block);
    }
    let first = segment_start(segment_blocks, segment);
    let at = first + u64::from(segment_blocks - 1 - index);
    image.volumes[volume].put(at, block);
}

fn copy_record(image: &mut Image, volume: usize, feed: &mut Feed<'_>) {
    with_two_records(image, volume, feed, |source, to| to.copy_from_slice(source));
}

/// Changes one record by the content of another, or of itself.
fn with_two_records(
    image: &mut Image,
    volume: usize,
    feed: &mut Feed<'_>,
    edit: impl FnOnce(&[u8], &mut [u8]),
) {
    let (Some(from), Some(to)) = (
        any_descriptors(image, volume, feed),
        any_descriptors(image, volume, feed),
    ) else {
        return;
    };
    let (a, b) = (record_at(feed), record_at(feed));
    let source = image.volumes[volume].block(from);
    change(image, volume, to, |block| {
        edit(
            &source[a..a + RECORD_BYTES],
            &mut block[b..b + RECORD_BYTES],
        );
    });
}

fn wipe(image: &mut Image, volume: usize, feed: &mut Feed<'_>) {
    let at = any_written(image, volume, feed);
    image.volumes[volume].put(at, [0; BLOCK_BYTES]);
}

/// Writes bytes of the input into a block.
fn overwrite(image: &mut Image, volume: usize, feed: &mut Feed<'_>) {
    let at = any_structure(image, volume, feed);
    let offset = usize::from(feed.short()) % BLOCK_BYTES;
    let count = usize::from(feed.byte()).min(BLOCK_BYTES - offset);
    let bytes = feed.bytes(count).to_vec();
    change(image, volume, at, |block| {
        block[offset..offset + bytes.len()].copy_from_slice(&bytes);
    });
}

/// Changes the valid superblock, within the limits that an opening accepts.
fn set_superblock(image: &mut Image, volume: usize, feed: &mut Feed<'_>) {
    let superblock: &mut Superblock = &mut image.superblocks[volume];
    match feed.byte() % 4 {
        0 => superblock.state = OpenState::Clean,
        1 => superblock.state = OpenState::Open,
        2 => superblock.generation = feed.awkward(),
        _ => {
            let run = Run::new((feed.awkward() & 0xff_ffff) as u32);
            superblock.run = run.filter(|run| *run >= Run::FIRST).unwrap_or(Run::FIRST);
        }
    }
}

/// Makes a page the parent of another one, or of itself.
fn parent_in_a_circle(image: &mut Image, volume: usize, feed: &mut Feed<'_>) {
    with_two_records(image, volume, feed, |parent, record| {
        record[1] = 1;
        record[56..68].copy_from_slice(&parent[24..36]);
    });
}

/// Changes the number of records in a block. Added records are copies of the first.
fn count_records_anew(image: &mut Image, volume: usize, feed: &mut Feed<'_>) {
    let Some(at) = any_descriptors(image, volume, feed) else {
        return;
    };
    let most = (BLOCK_BYTES - RECORDS_AT) / RECORD_BYTES;
    let count = feed.below(most + 1);
    let step = feed.byte();
    change(image, volume, at, |block| {
        let old = read_number(block, 80, 4) as usize;
        for record in old.clamp(1, most)..count {
            let to = RECORDS_AT + record * RECORD_BYTES;
            block.copy_within(RECORDS_AT..RECORDS_AT + RECORD_BYTES, to);
            block[to + 24] = block[to + 24].wrapping_add(step.wrapping_mul(record as u8));
        }
        let end = RECORDS_AT + count * RECORD_BYTES;
        block[end..].fill(0);
        write_number(block, 80, 4, count as u64);
        write_number(block, 12, 4, end as u64);
    });
}

/// Writes both copies of a header.
pub fn put_header(image: &mut Image, header: &SegmentHeader) {
    let first = segment_start(image.segment_blocks(), header.segment.0);
    let mut block = [0; BLOCK_BYTES];
    header.encode(&mut block);
    for copy in 0..2 {
        image.volumes[usize::from(header.volume)].put(first + copy, block);
    }
}
