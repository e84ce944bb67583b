//! The two copies of a segment's header, made one again.
//!
//! A copy is rewritten only from its twin, and only when that is whole and the copy is broken, unreadable, or of an older state: so a
//! torn write here loses nothing. Which of two whole copies counts is recovery's decision. A segment without any whole copy is
//! left to recovery, which knows its blocks.

use larder_format::{BLOCK_BYTES, SegmentHeader, SegmentState};

use super::SegmentName;
use crate::disk::Disk;
use crate::disk::mailbox::WriteAt;
use crate::error::StoreError;
use crate::memory::AlignedBuf;
use crate::recovery::scan::{FaultReason, Spot, newer};
use crate::volume::Volumes;

/// Writes the bad copies of these segments' headers anew. Returns how many were written; one that the device refuses stays bad.
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
            // The one that was not read may be the newer.
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
            .map_err(|error| StoreError::io("repairing", &volume.path, error))?;
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
            Err(error) => tracing::warn!("{error}"),
        }
    }
    Ok(written)
}

/// Which copy is to be written, and with what; `None` when both say the same, or neither is whole.
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

/// A free mark goes to one copy, and leaves the other as it was.
fn is_freed(a: &SegmentHeader, b: &SegmentHeader) -> bool {
    let is_free = a.state == SegmentState::Free || b.state == SegmentState::Free;
    is_free && a.sequence == b.sequence
}
