//! The volumes of a simulated store: superblocks, and files for their locks. The bytes are on the
//! simulated disk.

use std::path::PathBuf;
use std::sync::Arc;

use larder_base::fork::keep_private;
use larder_base::latency::DeviceLatencies;
use larder_base::system::files;
use larder_format::{BLOCK_BYTES, SEGMENT_BYTES_MIN, Superblock, SuperblockError};

use super::set::Volumes;
use super::{Volume, length};
use crate::error::{StoreError, io_error};

/// Simulated segments may be far smaller than the format allows. Then a superblock on a simulated
/// volume states their size multiplied by this factor. A size that is no multiple of it is true.
const SCALE: u32 = 256;

/// The block of a superblock with segments of a simulated size.
///
/// # Errors
/// See [`Superblock::encode`].
pub fn encode(superblock: &Superblock) -> Result<Box<[u8; BLOCK_BYTES]>, SuperblockError> {
    let mut scaled = superblock.clone();
    if u64::from(scaled.segment_blocks) * (BLOCK_BYTES as u64) < SEGMENT_BYTES_MIN {
        scaled.segment_blocks *= SCALE;
    }
    scaled.encode()
}

/// The superblock of such a block.
///
/// # Errors
/// See [`Superblock::decode`].
pub fn decode(block: &[u8]) -> Result<Superblock, SuperblockError> {
    let mut superblock = Superblock::decode(block)?;
    if superblock.segment_blocks.is_multiple_of(SCALE) {
        superblock.segment_blocks /= SCALE;
    }
    Ok(superblock)
}

/// Volumes with these superblocks: of each, the newest valid copy, and which copy it is.
///
/// # Errors
/// If the machine has no file `volume0`, `volume1`, ...: their locks and lengths are used, not
/// their bytes.
pub fn volumes(superblocks: Vec<Option<(Superblock, usize)>>) -> Result<Volumes, StoreError> {
    let volume = |(superblock, counting_copy): (Superblock, usize)| {
        let path = PathBuf::from(format!("volume{}", superblock.volume));
        let how = files::How {
            writes: true,
            alone: false,
        };
        let (file, _) =
            files::open(&path, how).map_err(|e| io_error("opening the volume", &path, e))?;
        let bytes = length(&file, &path)?;
        Ok(Volume {
            private: keep_private(&file),
            file: Arc::new(file),
            path,
            superblock,
            bytes,
            counting_copy,
            direct: true,
        })
    };
    let list = superblocks.into_iter();
    Ok(Volumes {
        list: list
            .map(|known| known.map(volume).transpose())
            .collect::<Result<_, StoreError>>()?,
        latencies: Arc::new(DeviceLatencies::default()),
        pacing: Arc::default(),
        board: Arc::default(),
        keys: None,
        patience: Arc::default(),
    })
}
