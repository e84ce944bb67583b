//! What only a tool asks that has the store to itself: to empty a segment that it names, with every page kept, and what each segment
//! holds.
//!
//! Nothing here evicts. A segment whose descriptors could not all be read may be emptied too, of what the others name; its
//! free header then names a life above any that an unread block may carry, so that nothing in it ever counts again.

use larder_format::{DescriptorBlock, HEADER_BLOCKS};

use super::segment::{State, Stream};
use super::{Core, Move, Victim};
use crate::index::SegmentId;

/// What a segment holds that takes no more pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentView {
    /// Which.
    pub segment: SegmentId,
    /// Blocks of pages that count.
    pub live: u64,
    /// Data blocks written that hold nothing that counts.
    pub dead: u64,
}

impl Core {
    /// Takes a segment as a victim: a sealed one, or one whose descriptors could not all be read. `None` for any other, and when
    /// the serials of this run are used up.
    pub(crate) fn take_named(&mut self, id: SegmentId) -> Option<Victim> {
        match self.space.segment(id).state {
            State::Sealed => {}
            State::Unreadable => {
                let free_as = self.log.next_serial()?;
                self.space.segment_mut(id).free_as = Some(free_as);
            }
            _ => return None,
        }
        Some(self.take_victim(id))
    }

    /// Whether [`Core::take_named`] has something to take there.
    pub(crate) fn holds_something(&self, id: SegmentId) -> bool {
        matches!(
            self.space.segment(id).state,
            State::Sealed | State::Unreadable
        )
    }

    /// Whether its descriptors could not all be read when the store was opened.
    pub(crate) fn is_unreadable(&self, id: SegmentId) -> bool {
        self.space.segment(id).state == State::Unreadable
    }

    /// The pages to be moved out of a victim: all of them.
    pub(crate) fn plan_whole(&mut self, victim: &Victim, blocks: &[DescriptorBlock]) -> Vec<Move> {
        let mut carrying = self.begin_carrying(victim, blocks.to_vec());
        self.carry_some(&mut carrying, usize::MAX);
        self.pump();
        carrying.pages
    }

    /// Blocks of pages in a segment that count.
    pub(crate) fn live_in(&self, id: SegmentId) -> u64 {
        self.space.segment(id).live
    }

    /// The segments that are sealed.
    pub(crate) fn sealed(&self) -> Vec<SegmentView> {
        let sealed = self.space.iter().filter(|(_, s)| s.state == State::Sealed);
        let view = |(segment, s): (SegmentId, &super::Segment)| SegmentView {
            segment,
            live: s.live,
            dead: u64::from(s.data_end.saturating_sub(HEADER_BLOCKS)).saturating_sub(s.live),
        };
        sealed.map(view).collect()
    }

    /// Whoever has the store to itself makes copies alone: of the segments that were left open,
    /// the one with the most room takes them.
    pub(crate) fn open_for_copies(&mut self) {
        self.space.open_for_copies();
    }

    /// Segments that hold nothing.
    pub(crate) fn free_segments(&self) -> usize {
        self.space.free_segments()
    }

    /// Blocks that copies can take now: of free segments, and of those that take copies.
    pub(crate) fn room_for_copies(&self) -> u64 {
        let open = self
            .space
            .iter()
            .filter(|(_, s)| s.state == State::Open(Stream::Copy));
        let left = |(_, s): (SegmentId, &super::Segment)| {
            u64::from(self.config.segment_blocks)
                .saturating_sub(u64::from(s.data_end) + u64::from(s.blocks) + u64::from(s.credits))
        };
        open.map(left).sum::<u64>() + self.space.free_segments() as u64 * self.space.data_blocks()
    }
}
