//! Restores the two copies of a segment's header to the same content.
//!
//! A copy is rewritten only from the other copy, and only if that one is whole and this one is
//! broken, unreadable, or of an older state. So a torn write here loses nothing. Recovery decides
//! which of two whole copies counts. Recovery also handles a segment without any whole copy: it
//! knows the blocks.

use larder_base::memory::AlignedBuf;
use larder_disk::Disk;
use larder_disk::mailbox::WriteAt;
use larder_format::{BLOCK_BYTES, SegmentHeader, SegmentState};
use larder_store::error::{StoreError, io_error};
use larder_store::recovery::scan::{FaultReason, Spot, newer};
use larder_store::volume::Volumes;

use super::owner::SegmentName;

/// Rewrites the bad copies of these segments' headers. Returns the number of copies written. A copy
/// that the device refuses stays bad.
pub(super) fn restore(
    volumes: &Volumes,
    disk: &dyn Disk,
    spots: &[Spot],
    segments: &[SegmentName],
) -> Result<u64, StoreError> {
    let mut written = 0;
    for name in segments {
        let (Some(id), Some(Some(volume))) = (name.id(spots), volumes.list.get(name.volume)) else {
            continue;
        };
        let spot = &spots[id.0 as usize];
        let copies = spot.read_copies(disk);
        for copy in &copies {
            // The unread copy may be the newer.
            if let Err(FaultReason::Unreadable(source)) = copy
                && source.is_of_this_process()
            {
                return Err(StoreError::NotRead {
                    path: volume.path.clone(),
                    source: *source,
                });
            }
        }
        let Some((copy, header)) = bad_copy(&copies) else {
            continue;
        };
        let mut bytes = AlignedBuf::zeroed(BLOCK_BYTES)
            .map_err(|error| io_error("repairing", &volume.path, error))?;
        if let Ok(block) = (&mut bytes[..]).try_into() {
            header.encode(block);
        }
        let offset = spot.headers().offset + (copy * BLOCK_BYTES) as u64;
        let write = WriteAt {
            volume: name.volume,
            offset,
            memory: bytes,
        };
        let written_once = volumes.write(disk, vec![write]);
        match written_once.and_then(|()| volumes.sync(disk)) {
            Ok(()) => written += 1,
            Err(error) => {
                tracing::warn!("a bad copy of a header could not be written again: {error}");
            }
        }
    }
    Ok(written)
}

/// The copy to write, and its content; `None` if both copies are equal, or neither is whole.
fn bad_copy(copies: &[Result<SegmentHeader, FaultReason>; 2]) -> Option<(usize, SegmentHeader)> {
    match copies {
        [Ok(a), Ok(b)] if a == b || is_freed(a, b) => None,
        [Ok(a), Ok(b)] => {
            let header = newer(Some(*a), *b);
            Some((usize::from(header == *a), header))
        }
        [Ok(a), Err(_)] => Some((1, *a)),
        [Err(_), Ok(b)] => Some((0, *b)),
        [Err(_), Err(_)] => None,
    }
}

/// A free header goes to one copy, and leaves the other unchanged.
fn is_freed(a: &SegmentHeader, b: &SegmentHeader) -> bool {
    let is_free = a.state == SegmentState::Free || b.state == SegmentState::Free;
    is_free && a.sequence == b.sequence
}
