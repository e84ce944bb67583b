//! Reclaim without room for copies: the segment that is given up, with all its pages.
//!
//! Crashes bring a store there. The last free segment is kept for copies, and no put takes it.
//! But the copies of a victim take it, and a crash before the victim is released seals it,
//! part-filled, beside the victim. As many crashes in a row use up any reserve. So there is none
//! beyond that one segment, and puts wait at each open until reclaim has won it back.
//!
//! The rule: if not even the emptiest segment finds room for its copies, and no free segment will
//! come by itself, the segment goes *whose hottest page is the coldest*. A page counts as hot as
//! the hottest of its descendants, wherever they lie, since eviction takes leaves. So every page
//! that is lost, and every page that loses its parent, is colder than some page of each other
//! segment: the pages of a segment that has just been written, or read, stay. The emptiest segment
//! would cost fewer pages, but after kills these are the newest. Among segments of equal heat the
//! one with the fewest live blocks goes first.
//!
//! After that a whole segment is free, and the segments that crashes left part-filled fit into it
//! together. A segment without live pages is released as always, and a segment whose pages find
//! room is never given up.
//!
//! Leases do not count: a leased page was just looked up, so it is among the hottest. Pages that a
//! reader holds keep their segment from being written again, not from being given up. A free
//! segment that comes only when a reader or a stopped process lets go of it does not come by
//! itself. Open segments take part when they are sealed. A suspect, which must be written again
//! before anything is durable, is given up itself: room won elsewhere would come with the next good
//! sync, too late.

use super::pick::View;
use crate::index::SegmentId;

/// The segment to give up, if there is no room for copies of the pages in `emptiest`.
pub(super) fn emergency_victim(view: View<'_>, emptiest: SegmentId) -> Option<SegmentId> {
    if !view.segments.may_evict(emptiest) || !has_no_room(view, emptiest) {
        return None;
    }
    if view.segments.get(emptiest).is_suspect() {
        return Some(emptiest);
    }
    let worths = view.base.index.worthiest_by_segment();
    let candidates = view.candidates().filter(|(_, s)| !s.is_suspect());
    let coldest = candidates.min_by_key(|(id, segment)| {
        let worthiest = worths.get(id.0 as usize).copied().flatten();
        (worthiest, segment.live(), segment.generation())
    });
    coldest.map(|(id, _)| id)
}

/// Whether there is no room for copies of a segment's pages, and none will come but by reclaim.
fn has_no_room(view: View<'_>, id: SegmentId) -> bool {
    let segments = view.segments;
    let live = segments.get(id).live();
    let none_returns = segments.returning() == segments.held_by_pins();
    live > 0
        && segments.free_segments() == 0
        && (none_returns || view.durability.has_suspects(segments))
        && !segments.copies_fit(blocks_to_copy(view, live))
}

/// Most blocks that copies of so many blocks take: a descriptor block for each page is the worst
/// case. A codec stores three of four blocks at least.
fn blocks_to_copy(view: View<'_>, live: u64) -> u32 {
    let sizes = view
        .base
        .namespaces
        .iter()
        .map(|(_, state)| state.page_blocks - state.page_blocks / 4);
    let smallest = sizes.filter(|blocks| *blocks > 0).min().unwrap_or(1);
    let blocks = live + live / u64::from(smallest);
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
