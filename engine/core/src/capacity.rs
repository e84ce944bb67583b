//! How many pages a store of a given geometry keeps.

use larder_format::HEADER_BLOCKS;

/// Segments that a volume writes at the same time: one for new pages, one for copies.
pub(crate) const STREAMS: usize = 2;

/// Most blocks of pages that a store of this geometry keeps: 87.5 % of the room of all segments,
/// and always less than all of it by the open segments and the segments that reclaim keeps free.
/// The rest is the room that reclaim works with: the smaller it is, the more reclaim copies. The
/// figures are in the module documentation of `core::reclaim`.
#[must_use]
pub fn usable_blocks(segments: u64, volumes: usize, segment_blocks: u32) -> u64 {
    let room = u64::from(segment_blocks.saturating_sub(HEADER_BLOCKS));
    let share = segments.saturating_mul(room) / 8 * 7;
    let rest = segments.saturating_sub(kept_back(volumes));
    share.min(rest.saturating_mul(room))
}

/// Usable blocks that one page takes: its own blocks, and its share of the end of a segment, where
/// no further page of its size fits. Without that share, pages of more than a third of a segment
/// would fill all segments before they reach the limit.
#[must_use]
pub fn footprint(segment_blocks: u32, page_blocks: u32) -> u64 {
    let room = segment_blocks.saturating_sub(HEADER_BLOCKS);
    // At least one block of the segment holds descriptors.
    let fitting = room.saturating_sub(1).checked_div(page_blocks);
    fitting.map_or(0, |pages| u64::from(room / pages.max(1)))
}

/// Fewest segments that a store on this many volumes works with.
#[must_use]
pub fn segments_min(volumes: usize) -> u64 {
    kept_back(volumes) + 2
}

/// Segments that may be partly filled or free at any moment: the open ones of each volume, and two
/// free ones.
fn kept_back(volumes: usize) -> u64 {
    (STREAMS * volumes) as u64 + 2
}
