//! Volumes in small files: only the blocks that are not zero.
//!
//! ```text
//! "LARDER VOLUME 1\n" its length in bytes (8) then, of each block that is not zero: offset (8)
//! length (4) bytes
//! ```
//!
//! Numbers are little-endian. The zeros at the end of a block are left out as well.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{Advice, SeekFrom, fadvise, seek};
use rustix::io::Errno;

const MAGIC: &[u8; 16] = b"LARDER VOLUME 1\n";

const BLOCK_BYTES: usize = 4096;

/// Bytes read at once.
const PIECE_BYTES: u64 = 1 << 20;

/// The volume at `path` in small. Two volumes that hold the same have the same.
pub fn pack(path: &Path) -> Vec<u8> {
    let file = File::open(path).unwrap();
    // Reading ahead would make data of holes.
    fadvise(&file, 0, None, Advice::Random).unwrap();
    let length = file.metadata().unwrap().len();
    let mut packed = MAGIC.to_vec();
    packed.extend(length.to_le_bytes());
    let mut from = 0;
    while let Some(data) = piece_of_data(&file, from) {
        from = data.end;
        let end = data.end.min(length);
        let mut bytes = vec![0; usize::try_from(end - data.start).unwrap()];
        file.read_exact_at(&mut bytes, data.start).unwrap();
        for (at, block) in (data.start..)
            .step_by(BLOCK_BYTES)
            .zip(bytes.chunks(BLOCK_BYTES))
        {
            pack_block(at, block, &mut packed);
        }
    }
    packed
}

/// Whole blocks behind an offset that are no hole, or not all of it.
fn piece_of_data(file: &File, from: u64) -> Option<Range<u64>> {
    let start = match seek(file, SeekFrom::Data(from)) {
        Err(Errno::NXIO) => return None,
        found => found.unwrap(),
    };
    let end = seek(file, SeekFrom::Hole(start)).unwrap();
    let start = start / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
    let end = end.next_multiple_of(BLOCK_BYTES as u64);
    Some(start..end.min(start + PIECE_BYTES))
}

fn pack_block(at: u64, block: &[u8], packed: &mut Vec<u8>) {
    if *block == [0; BLOCK_BYTES][..block.len()] {
        return;
    }
    let last = block.iter().rposition(|byte| *byte != 0).unwrap();
    packed.extend(at.to_le_bytes());
    packed.extend(u32::try_from(last + 1).unwrap().to_le_bytes());
    packed.extend(&block[..=last]);
}

/// Makes the volume at `path` that was packed, as a sparse file.
pub fn unpack(packed: &[u8], path: &Path) {
    let (magic, mut rest) = packed.split_first_chunk::<16>().unwrap();
    assert_eq!(magic, MAGIC);
    let file = File::create(path).unwrap();
    file.set_len(number(&mut rest)).unwrap();
    while !rest.is_empty() {
        let offset = number(&mut rest);
        let (length, behind) = rest.split_first_chunk::<4>().unwrap();
        let (bytes, behind) = behind.split_at(u32::from_le_bytes(*length) as usize);
        file.write_all_at(bytes, offset).unwrap();
        rest = behind;
    }
}

fn number(rest: &mut &[u8]) -> u64 {
    let (bytes, behind) = rest.split_first_chunk::<8>().unwrap();
    *rest = behind;
    u64::from_le_bytes(*bytes)
}
