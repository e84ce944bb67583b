//! The fault matrix on real files: at least one test for each class of fault that a file, a disk or
//! a caller can cause. The classes about crashes are in the simulation's tests; `tests/matrix.md`
//! lists all of them.
//!
//! `device`: faults of the disk. `silent`: devices that do not answer. `refusing`: parts of a
//! device that fail for good. `read_only`: volumes that refuse every write. `medium`: wrong bytes
//! on the volume. `records`: records that are no pages. `moment`: reads that fail for a while.
//! `closing`: stores that were closed in order. `place`: where and how a store is opened.
#![allow(clippy::unwrap_used)]

mod closing;
#[path = "../common/mod.rs"]
mod common;
mod device;
mod medium;
mod moment;
mod place;
mod read_only;
mod records;
mod refusing;
mod silent;

use std::os::unix::fs::FileExt;
use std::path::Path;

use common::{MIB, fill};
use larder_engine::format::{BLOCK_BYTES, PageKey, SEGMENTS_OFFSET};

/// The store that most rows are tested on: seven segments.
pub const SIZE: u64 = 128 * MIB;

/// The segment size of every store here.
pub const SEGMENT: u64 = 16 * MIB;

/// Bytes of the volume.
pub fn read(path: &Path, offset: u64, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    std::fs::File::open(path)
        .unwrap()
        .read_exact_at(&mut out, offset)
        .unwrap();
    out
}

/// Changes the volume behind the store's back.
pub fn write(path: &Path, offset: u64, bytes: &[u8]) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(bytes, offset).unwrap();
}

/// Turns one bit.
pub fn flip(path: &Path, offset: u64) {
    let byte = read(path, offset, 1)[0];
    write(path, offset, &[byte ^ 0x10]);
}

/// Offset of a page of the model `m` on a volume whose first segment holds it.
pub fn find(path: &Path, key: &PageKey) -> u64 {
    let mut start = [0; 64];
    fill("m", key, 0, &mut start);
    let segment = read(path, SEGMENTS_OFFSET, usize::try_from(SEGMENT).unwrap());
    let mut blocks = segment.chunks_exact(BLOCK_BYTES);
    let at = blocks.position(|block| block[..64] == start);
    SEGMENTS_OFFSET + (at.expect("the page lies in the first segment") * BLOCK_BYTES) as u64
}

/// Offset of a descriptor block of the first segment, counted from its end.
pub fn descriptor(index: u64) -> u64 {
    SEGMENTS_OFFSET + SEGMENT - (index + 1) * BLOCK_BYTES as u64
}
