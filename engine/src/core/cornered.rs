//! Reclaim without room for copies: which segment is given up, with all its pages.
//!
//! Crashes bring a store there. The last free segments are kept for copies, and no put takes them; but the copies of a victim take
//! one, and a crash before the victim is given back seals it, part-filled, beside the victim. As many crashes in a row use up any
//! reserve, so there is none beyond that one, and puts wait at each open until reclaim has won it back.
//!
//! The rule: when not even the emptiest segment finds room for its copies, and no free one will come by itself, the segment goes
//! *whose hottest page is the coldest*. A page counts as hot as the hottest of its descendants, wherever they lie, since
//! eviction takes leaves. So every page that is lost, and every page that loses its parent, is colder than some page of each other
//! segment: those of a segment that has just been written, or read, stay. The emptiest segment would cost fewer pages, but after kills
//! these are the newest. That of equal heat which costs least goes first.
//!
//! It goes on from there: a whole segment is won, and those that crashes left part-filled fit into it together. What has no live
//! page is given back as ever, and a segment whose pages find room is never given up.
//!
//! Leases do not count: what is leased was just looked up, so it is among the hottest. Pages that a reader holds keep their segment
//! from being written again, not from being given up; and a free segment that comes only when somebody lets go of it (a reader, or a
//! process that was stopped where it was to write) does not come by itself. Open segments take part when they are sealed. A suspect, which must be
//! rewritten before anything is durable again, is given up itself: room won elsewhere would come too late, with the next good sync.

use super::reclaim::Move;
use super::{Core, SegmentId};

impl Core {
    /// The segment to give up, where there is no room for copies of what lies in `emptiest`.
    pub(super) fn to_give_up(&self, emptiest: SegmentId) -> Option<SegmentId> {
        if !self.space.may_evict(emptiest) || !self.is_cornered(emptiest) {
            return None;
        }
        if self.space.segment(emptiest).suspect {
            return Some(emptiest);
        }
        let heats = self.index.hottest_by_segment();
        self.candidates()
            .filter(|(_, segment)| !segment.suspect)
            .min_by_key(|(id, segment)| {
                let hottest = heats.get(id.0 as usize).copied().flatten();
                (hottest, segment.live, segment.sequence)
            })
            .map(|(id, _)| id)
    }

    /// Whether there is no room for copies of what lies in a segment, and none will come but by reclaim.
    fn is_cornered(&self, id: SegmentId) -> bool {
        let live = self.space.segment(id).live;
        live > 0
            && self.space.free_segments() == 0
            && (self.coming() == self.held_by_readers() || self.has_suspects())
            && !self.space.copies_fit(self.blocks_to_copy(live))
    }

    /// Most blocks that copies of so many take: a descriptor block for each page is the worst that can come.
    fn blocks_to_copy(&self, live: u64) -> u32 {
        let sizes = self.namespaces.iter().map(|state| state.page_blocks);
        let smallest = sizes.filter(|blocks| *blocks > 0).min().unwrap_or(1);
        let blocks = live + live / u64::from(smallest);
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }

    /// Evicts everything, whoever leased or descends from it: the price of going on at all.
    pub(super) fn give_up(&mut self, moves: &mut Vec<Move>) {
        for page in moves.drain(..) {
            let key = page.record.key.prefix();
            if self.index.forget(page.namespace, key, page.from) {
                self.space.drop_live(page.from.segment, page.record.blocks);
                self.counters.evicted += 1;
                self.log_eviction(page.namespace, key, page.from.segment);
            }
        }
    }
}
