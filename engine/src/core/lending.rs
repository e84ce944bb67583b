//! Free segments lent to whoever writes their blocks for the first time.
//!
//! A lent segment stays free and holds nothing, but is in no list that segments are opened from: until it is taken back nobody else
//! writes it. Only segments without a life on disk are lent, and only while many are free: reclaim, and puts that need room,
//! never miss one.

use larder_format::{BLOCK_BYTES, Serial};

use super::Core;
use crate::index::SegmentId;

/// A free segment that its holder alone may write.
#[derive(Debug)]
pub(crate) struct Lent {
    segment: SegmentId,
    /// Index of its volume.
    pub volume: usize,
    /// Where it begins there, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

impl Core {
    /// Lends the segment that is opened next of those that were never used and not lent before; `None` when there is none, or when
    /// few are free.
    pub(crate) fn lend_unused(&mut self) -> Option<Lent> {
        if self.space.free_segments() <= 2 * self.free_target() {
            return None;
        }
        let segment = self.space.lend_unused()?;
        Some(Lent {
            segment,
            volume: self.space.volume_of(segment),
            offset: self.space.offset_of(segment),
            bytes: u64::from(self.config.segment_blocks) * BLOCK_BYTES as u64,
        })
    }

    /// Takes a segment back. Nothing of the holder's may be under way in it any more.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "who gives it back has it no more"
    )]
    pub(crate) fn take_back(&mut self, lent: Lent) {
        debug_assert_eq!(self.space.segment(lent.segment).sequence, Serial::ZERO);
        self.space.take_back(lent.segment);
        self.write_homeless();
        self.has_more_room = true;
    }
}

#[cfg(test)]
mod tests {
    use larder_format::Run;

    use super::*;
    use crate::core::segment::{Segment, Stream};
    use crate::core::space::{Changed, Space};

    const SEGMENTS: usize = 8;

    fn space(used: usize) -> Space {
        let life = |at: usize| match at < used {
            true => Serial::first_of(Run::FIRST),
            false => Serial::ZERO,
        };
        let segments = (0..SEGMENTS).map(|at| Segment::free(life(at))).collect();
        Space::new(4096, &[SEGMENTS as u32], segments)
    }

    /// Opens segments one after another, for pages that fill one each.
    fn opened(space: &mut Space) -> Vec<SegmentId> {
        let mut serials = || Some(Serial::first_of(Run::FIRST));
        let mut changed = Changed::default();
        while space
            .place_page(Stream::Copy, 4000, |_| false, &mut serials, &mut changed)
            .is_some()
        {}
        changed.opened
    }

    #[test]
    fn what_is_lent_is_opened_by_nobody_and_next_once_it_is_back() {
        let mut space = space(0);
        let lent = space.lend_unused();
        let others = opened(&mut space);
        assert_eq!(others.len(), SEGMENTS - 1);
        assert!(lent.is_some_and(|lent| !others.contains(&lent)));
        lent.into_iter().for_each(|lent| space.take_back(lent));
        assert_eq!(opened(&mut space), Vec::from_iter(lent));
    }

    #[test]
    fn each_segment_that_was_never_used_is_lent_once() {
        let mut space = space(3);
        let mut lent = Vec::new();
        while let Some(id) = space.lend_unused() {
            space.take_back(id);
            lent.push(id.0);
        }
        lent.sort_unstable();
        assert_eq!(lent, [3, 4, 5, 6, 7]);
        assert_eq!(opened(&mut space).len(), SEGMENTS);
    }

    #[test]
    fn segments_that_are_opened_and_given_back_meanwhile_change_nothing_of_that() {
        let mut space = space(0);
        let mut serials = || Some(Serial::first_of(Run::FIRST));
        let mut used = Vec::new();
        let mut lent = Vec::new();
        while let Some(id) = space.lend_unused() {
            space.take_back(id);
            lent.push(id);
            // The one that has just come back is opened, and its room is given back.
            let mut changed = Changed::default();
            space.place_page(Stream::Copy, 4000, |_| false, &mut serials, &mut changed);
            for id in changed.opened {
                space.close(id);
                space.release(id);
                used.push(id);
            }
        }
        assert_eq!(lent.len(), SEGMENTS);
        assert_eq!(used, lent);
        assert_eq!(opened(&mut space).len(), SEGMENTS);
    }
}
