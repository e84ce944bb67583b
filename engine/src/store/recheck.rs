//! Whether segments still are what they were when the store was opened: for a handle that holds no lock, beside a writer.

use larder_format::{SegmentHeader, Serial, Superblock};

use super::get::{Job, is_without_its_bytes};
use crate::api::MissReason;
use crate::core::SegmentInit;
use crate::disk::Disk;
use crate::disk::mailbox::read_all;
use crate::recovery::scan::{FaultReason, Spot};
use crate::recovery::spots_of;

/// What a segment's header is compared with.
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

    /// Those of the jobs whose segment has begun another life. What was not read is not asked for either: its volume may have
    /// gone silent. `miss` is what came of a page so far.
    pub(super) fn stale<'a>(
        &self,
        disk: &dyn Disk,
        jobs: &'a [Job],
        miss: impl Fn(usize) -> Option<MissReason>,
    ) -> Vec<&'a Job> {
        let segment = |job: &Job| job.pinned.extent.place.segment.0 as usize;
        let was_read = |job: &&Job| miss(job.page).is_none_or(is_without_its_bytes);
        let read: Vec<&Job> = jobs.iter().filter(was_read).collect();
        let mut segments: Vec<usize> = read.iter().map(|job| segment(job)).collect();
        segments.sort_unstable();
        segments.dedup();
        let others = self.in_another_life(disk, segments);
        read.into_iter()
            .filter(|job| others.contains(&segment(job)))
            .collect()
    }

    fn in_another_life(&self, disk: &dyn Disk, mut segments: Vec<usize>) -> Vec<usize> {
        let reads: Vec<_> = segments
            .iter()
            .map(|&segment| self.spots[segment].headers())
            .collect();
        let mut headers = read_all(disk, &reads).into_iter();
        segments.retain(|&segment| {
            let spot = &self.spots[segment];
            let copies = match headers.next() {
                Some(Ok(bytes)) => spot
                    .parse_headers(&bytes)
                    .map(|copy| copy.map_err(FaultReason::Damaged)),
                _ => spot.read_copies(disk),
            };
            !self.is_as_it_was(segment, &copies)
        });
        segments
    }

    fn is_as_it_was(
        &self,
        segment: usize,
        copies: &[Result<SegmentHeader, FaultReason>; 2],
    ) -> bool {
        let sequences = copies.iter().flatten().map(|header| header.sequence);
        match sequences.max() {
            Some(latest) => latest == self.sequences[segment],
            // Damaged ones are no writer's; unreadable ones may be.
            None => !copies
                .iter()
                .any(|copy| matches!(copy, Err(FaultReason::Unreadable(_)))),
        }
    }
}
