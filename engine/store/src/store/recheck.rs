//! For a handle without the lock, beside a writer: checks whether segments are still in the
//! generation that they had when the store was opened.

use larder_base::memory::AlignedBuf;
use larder_base::runtime::Instant;
use larder_core::core::SegmentInit;
use larder_core::status::MissReason;
use larder_disk::mailbox::read_all_until;
use larder_disk::{Disk, DiskError};
use larder_format::{SegmentHeader, Serial, Superblock};

use super::get::{Job, is_without_its_bytes};
use crate::recovery::scan::{FaultReason, Spot};
use crate::recovery::spots_of;

/// The headers to check, and the expected generations.
pub(super) struct Recheck {
    spots: Vec<Spot>,
    sequences: Vec<Serial>,
}

impl Recheck {
    pub(super) fn new(superblock: &Superblock, segments: &[SegmentInit]) -> Recheck {
        Recheck {
            spots: spots_of(superblock),
            sequences: segments.iter().map(|segment| segment.sequence).collect(),
        }
    }

    /// The jobs with a segment in another generation, or with a header that cannot be read before
    /// the deadline, and the reason of the miss. Segments of pages that were not read are not
    /// checked either: their volume may have gone silent. `miss` is the present result for a page.
    pub(super) fn stale<'a>(
        &self,
        disk: &dyn Disk,
        jobs: &'a [Job],
        deadline: Option<Instant>,
        miss: impl Fn(usize) -> Option<MissReason>,
    ) -> Vec<(&'a Job, MissReason)> {
        let segment = |job: &Job| job.pinned.extent.place.segment.0 as usize;
        let was_read = |job: &&Job| miss(job.page).is_none_or(is_without_its_bytes);
        let read: Vec<&Job> = jobs.iter().filter(was_read).collect();
        let mut segments: Vec<usize> = read.iter().map(|job| segment(job)).collect();
        segments.sort_unstable();
        segments.dedup();
        let others = self.in_another_generation(disk, &segments, deadline);
        let why = |job: &Job| others.iter().find(|(other, _)| *other == segment(job));
        read.into_iter()
            .filter_map(|job| why(job).map(|(_, why)| (job, *why)))
            .collect()
    }

    fn in_another_generation(
        &self,
        disk: &dyn Disk,
        segments: &[usize],
        deadline: Option<Instant>,
    ) -> Vec<(usize, MissReason)> {
        let reads: Vec<_> = segments
            .iter()
            .map(|&segment| self.spots[segment].headers())
            .collect();
        let headers = read_all_until(disk, &reads, deadline);
        let look = |(&segment, bytes): (&usize, Result<AlignedBuf, DiskError>)| {
            let spot = &self.spots[segment];
            let copies = match bytes {
                Ok(bytes) => spot
                    .parse_headers(&bytes)
                    .map(|copy| copy.map_err(FaultReason::Damaged)),
                Err(_) => spot.read_copies_until(disk, deadline),
            };
            let is_late = |copy| matches!(copy, &Err(FaultReason::Unreadable(DiskError::Deadline)));
            match self.is_as_it_was(segment, &copies) {
                true => None,
                false if copies.iter().any(is_late) => Some((segment, MissReason::Deadline)),
                false => Some((segment, MissReason::Stale)),
            }
        };
        segments.iter().zip(headers).filter_map(look).collect()
    }

    fn is_as_it_was(
        &self,
        segment: usize,
        copies: &[Result<SegmentHeader, FaultReason>; 2],
    ) -> bool {
        let sequences = copies.iter().flatten().map(|header| header.sequence);
        match sequences.max() {
            Some(latest) => latest == self.sequences[segment],
            // A damaged header is not from a writer. An unreadable header may be.
            None => !copies
                .iter()
                .any(|copy| matches!(copy, Err(FaultReason::Unreadable(_)))),
        }
    }
}
