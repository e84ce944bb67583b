//! Volumes in small files: only what is not zero.
//!
//! ```text
//!  "LARDER VOLUME 1\n"   its length in bytes (8)   then, of each block that is not zero:   offset (8)  length (4)  bytes
//! ```
//!
//! Numbers are little-endian. The zeros at the end of a block are left out as well.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const MAGIC: &[u8; 16] = b"LARDER VOLUME 1\n";

const BLOCK_BYTES: usize = 4096;

/// The volume at `path` in small.
pub fn pack(path: &Path) -> Vec<u8> {
    let bytes = std::fs::read(path).unwrap();
    let mut packed = MAGIC.to_vec();
    packed.extend((bytes.len() as u64).to_le_bytes());
    for (index, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
        let Some(last) = block.iter().rposition(|byte| *byte != 0) else {
            continue;
        };
        packed.extend(((index * BLOCK_BYTES) as u64).to_le_bytes());
        packed.extend(u32::try_from(last + 1).unwrap().to_le_bytes());
        packed.extend(&block[..=last]);
    }
    packed
}

/// Makes the volume at `path` that was packed, as a sparse file.
pub fn unpack(packed: &[u8], path: &Path) {
    let (magic, mut rest) = packed.split_first_chunk::<16>().unwrap();
    assert_eq!(magic, MAGIC);
    let file = File::create_new(path).unwrap();
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
