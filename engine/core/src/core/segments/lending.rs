//! Free segments lent to a holder that writes their blocks for the first time.
//!
//! A lent segment stays free and holds nothing, but is in no list that segments are opened from:
//! until it is taken back only its holder writes it. Only segments without a generation on disk are
//! lent, and only while many are free: reclaim, and puts that need room, never miss one.

use larder_format::{BLOCK_BYTES, Serial};

use super::{Segments, Volume};
use crate::core::base::Base;
use crate::index::SegmentId;

/// A free segment that its holder alone may write.
#[derive(Debug)]
pub struct Lent {
    segment: SegmentId,
    /// Index of its volume.
    pub volume: usize,
    /// Where it begins there, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

impl Segments {
    /// Lends the segment that is opened next, among the segments never used and not lent before;
    /// `None` when there is none, or when few are free.
    pub(in crate::core) fn lend(&mut self) -> Option<Lent> {
        if self.free_segments() <= 2 * self.free_target() {
            return None;
        }
        let segment = self.lend_unused()?;
        Some(Lent {
            segment,
            volume: self.volume_of(segment),
            offset: self.offset_of(segment),
            bytes: u64::from(self.segment_blocks) * BLOCK_BYTES as u64,
        })
    }

    /// Takes a segment back. No write of the holder may be under way in it any more.
    pub(in crate::core) fn return_lent(&mut self, base: &mut Base, lent: &Lent) {
        debug_assert_eq!(self.get(lent.segment).generation(), Serial::ZERO);
        self.take_back(lent.segment);
        Segments::announce_room(base);
    }

    /// Takes the first segment that was never used, and never lent, out of the free lists.
    fn lend_unused(&mut self) -> Option<SegmentId> {
        let segments = &self.segments;
        let is_unused = |id: &SegmentId| {
            let segment = &segments[id.0 as usize];
            segment.generation() == Serial::ZERO && !segment.was_lent()
        };
        let takes_writes = |volume: &&mut Volume| !volume.service.is_read_only();
        let mut volumes = self.volumes.iter_mut().filter(takes_writes);
        let id = volumes.find_map(|volume| {
            let from = volume.unlendable;
            let place = volume.free.range(from..).position(is_unused);
            volume.unlendable = place.map_or(volume.free.len(), |place| from + place);
            volume.free.remove(volume.unlendable)
        })?;
        self.get_mut(id).lend().then_some(id)
    }

    /// Puts a lent segment back, to be opened next.
    pub(super) fn take_back(&mut self, id: SegmentId) {
        let volume = self.volume_of(id);
        let volume = &mut self.volumes[volume];
        volume.free.push_front(id);
        volume.unlendable += 1;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::core::segments::segment::Stream;
    use crate::core::segments::tests::segments_on;
    use crate::core::types::InitState;

    const SEGMENTS: usize = 8;

    fn segments(used: usize) -> Segments {
        let generation = |at: usize| u64::from(at < used);
        let list: Vec<_> = (0..SEGMENTS)
            .map(|at| (InitState::Free, generation(at)))
            .collect();
        segments_on(4096, &[SEGMENTS as u32], &list)
    }

    /// Opens one more segment, for a page that fills it.
    fn open(segments: &mut Segments, base: &mut Base) -> Option<SegmentId> {
        let placed = segments.place_page(base, Stream::Copy, 4000, 0, |_| false);
        placed.map(|(place, _)| place.segment)
    }

    /// Opens segments as long as there are free ones.
    fn opened(segments: &mut Segments) -> Vec<SegmentId> {
        let mut base = Base::of_tests();
        std::iter::from_fn(|| open(segments, &mut base)).collect()
    }

    #[test]
    fn a_lent_segment_is_opened_next_once_it_is_back_and_not_before() {
        let mut segments = segments(0);
        let lent = segments.lend_unused();
        let others = opened(&mut segments);
        assert_eq!(others.len(), SEGMENTS - 1);
        assert!(lent.is_some_and(|lent| !others.contains(&lent)));
        lent.into_iter().for_each(|lent| segments.take_back(lent));
        assert_eq!(opened(&mut segments), Vec::from_iter(lent));
    }

    #[test]
    fn each_segment_that_was_never_used_is_lent_once() {
        let mut segments = segments(3);
        let mut lent = Vec::new();
        while let Some(id) = segments.lend_unused() {
            segments.take_back(id);
            lent.push(id.0);
        }
        lent.sort_unstable();
        assert_eq!(lent, [3, 4, 5, 6, 7]);
        assert_eq!(opened(&mut segments).len(), SEGMENTS);
    }

    #[test]
    fn segments_opened_and_released_meanwhile_are_not_lent_again() {
        let mut segments = segments(0);
        let mut base = Base::of_tests();
        let mut used = Vec::new();
        let mut lent = Vec::new();
        while let Some(id) = segments.lend_unused() {
            segments.take_back(id);
            lent.push(id);
            // The segment that has just come back is opened, and released.
            let opened = open(&mut segments, &mut base).unwrap();
            segments.close(opened);
            segments.get_mut(opened).seal();
            segments.get_mut(opened).become_victim(None);
            segments.empty(opened);
            segments.get_mut(opened).begin_releasing();
            segments.release(opened);
            used.push(opened);
        }
        assert_eq!(lent.len(), SEGMENTS);
        assert_eq!(used, lent);
        assert_eq!(opened(&mut segments).len(), SEGMENTS);
    }
}
