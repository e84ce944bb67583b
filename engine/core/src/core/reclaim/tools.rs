//! Calls of offline tools, which have the store to themselves: they empty the segments that they
//! name, with every page kept, and look at the content of each segment.
//!
//! Nothing here evicts. A segment whose descriptors could not all be read can be emptied too, of
//! the pages that were read. Its free header then names a generation above any that an unread block
//! may hold, so that nothing in it ever counts again.

use larder_format::{DescriptorBlock, HEADER_BLOCKS};

use super::Forwarding;
use super::pick::take_victim;
use crate::core::puts::Below;
use crate::core::segments::Segments;
use crate::core::segments::segment::{Segment, State, Stream};
use crate::core::types::{Move, Victim};
use crate::index::SegmentId;

/// The content of a segment that takes no more pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentView {
    /// The segment.
    pub segment: SegmentId,
    /// Blocks of live pages.
    pub live: u64,
    /// Data blocks written that hold no live page.
    pub dead: u64,
}

/// Takes a segment as a victim: a sealed one, or one whose descriptors could not all be read.
/// `None` for any other, and when the serials of this epoch are used up.
pub(in crate::core) fn take_named(below: &mut Below<'_>, id: SegmentId) -> Option<Victim> {
    let free_as = match below.segments.get(id).state() {
        State::Sealed => None,
        State::Unreadable => Some(below.base.next_serial()?),
        _ => return None,
    };
    Some(take_victim(below.segments, id, free_as))
}

/// The pages to be moved out of a victim: all of them.
pub(in crate::core) fn plan_whole(
    below: &mut Below<'_>,
    victim: &Victim,
    blocks: &[DescriptorBlock],
) -> Vec<Move> {
    let mut forwarding = Forwarding::begin(below, victim, blocks.to_vec());
    forwarding.go_on(below, usize::MAX);
    let victim = below.segments.get_mut(victim.segment);
    victim.set_stuck(!forwarding.unplaced.is_empty());
    forwarding.pages
}

/// The sealed segments.
pub(in crate::core) fn sealed(segments: &Segments) -> Vec<SegmentView> {
    let sealed = segments.iter().filter(|(_, s)| s.state() == State::Sealed);
    let view = |(segment, s): (SegmentId, &Segment)| SegmentView {
        segment,
        live: s.live(),
        dead: u64::from(s.data_end().saturating_sub(HEADER_BLOCKS)).saturating_sub(s.live()),
    };
    sealed.map(view).collect()
}

/// Blocks that copies can take now, in free segments and in segments that take copies.
pub(in crate::core) fn room_for_copies(segments: &Segments) -> u64 {
    let takes_copies = |(_, s): &(SegmentId, &Segment)| s.state() == State::Open(Stream::Copy);
    let left = |(_, s): (SegmentId, &Segment)| {
        u64::from(segments.segment_blocks()).saturating_sub(s.taken_blocks())
    };
    let open = segments.iter().filter(takes_copies);
    open.map(left).sum::<u64>() + segments.free_segments() as u64 * segments.data_blocks()
}
