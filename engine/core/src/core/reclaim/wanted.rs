//! A segment that a caller wants emptied, with all its pages kept and in the order that it names:
//! for a compaction while the store is in use.
//!
//! Reclaim's own victims go first. One segment stays free meanwhile: without it reclaim would have
//! to give up pages. While segments return, the caller waits for them.

use std::collections::HashMap;

use larder_format::Serial;

use super::pick::take_victim;
use super::tools::room_for_copies;
use super::{Emptying, Fault, Move, Reclaim, RequestId, Victim};
use crate::core::puts::Below;
use crate::core::segments::segment::State;
use crate::index::SegmentId;
use crate::planted;

/// See the module.
#[derive(Debug)]
pub(super) struct Wanted {
    request: RequestId,
    segment: SegmentId,
    generation: Serial,
    /// Position of each page by its first block.
    order: HashMap<u32, usize>,
    stage: Stage,
    /// Pages moved before.
    moved: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waits,
    /// It is the victim.
    Begun,
    /// It is the victim, and the caller has withdrawn.
    Withdrawn,
}

/// Whether a segment can be emptied now.
enum Turn {
    Now,
    /// When more segments are free.
    Later,
    Never,
}

impl Reclaim {
    /// Empties a segment, and then finishes `request`. False if there is no such segment, or it is
    /// of another generation or takes pages; then `request` has no answer.
    pub(in crate::core) fn empty(
        &mut self,
        below: &mut Below<'_>,
        request: RequestId,
        wanted: &Emptying,
    ) -> bool {
        let generation = wanted.sequence;
        let found = below.segments.id_of(wanted.volume, wanted.number);
        let Some(segment) = found.filter(|id| is_there(below, *id, generation)) else {
            return false;
        };
        if self.stopping || self.wanted.is_some() {
            below.base.finish(request, Err(Fault::NoRoom));
            return true;
        }
        let positions = wanted.starts.iter().enumerate();
        self.wanted = Some(Wanted {
            request,
            segment,
            generation,
            order: positions.map(|(at, start)| (*start, at)).collect(),
            stage: Stage::Waits,
            moved: 0,
        });
        below.base.call_reclaim();
        true
    }

    /// The caller of [`Reclaim::empty`] waits no longer for its turn. With `at_once` a segment that
    /// is being emptied keeps the pages that have not been moved.
    pub(in crate::core) fn withdraw(
        &mut self,
        below: &mut Below<'_>,
        request: RequestId,
        at_once: bool,
    ) {
        let wanted = self.wanted.as_mut();
        match wanted.filter(|wanted| wanted.request == request) {
            Some(wanted) if wanted.stage == Stage::Waits => {
                self.end_wanted(below, Err(Fault::NoRoom));
            }
            Some(wanted) if at_once => {
                wanted.stage = Stage::Withdrawn;
                below.base.call_reclaim();
            }
            _ => {}
        }
    }

    /// Takes the wanted segment as a victim when its turn has come.
    pub(super) fn take_wanted(&mut self, below: &mut Below<'_>) -> Option<Victim> {
        let wanted = self.wanted.as_mut()?;
        match wanted.turn(below) {
            Turn::Now => {
                wanted.stage = Stage::Begun;
                wanted.moved = below.base.counters.store.moved;
                Some(take_victim(below.segments, wanted.segment, None))
            }
            Turn::Later => None,
            Turn::Never => {
                self.end_wanted(below, Err(Fault::NoRoom));
                None
            }
        }
    }

    pub(super) fn is_emptying_wanted(&self) -> bool {
        let wanted = self.wanted.as_ref();
        wanted.is_some_and(|wanted| wanted.stage != Stage::Waits)
    }

    /// Whether the victim is to be left as it is.
    pub(super) fn stops(&self) -> bool {
        let wanted = self.wanted.as_ref();
        self.stopping || wanted.is_some_and(|wanted| wanted.stage == Stage::Withdrawn)
    }

    pub(super) fn in_wanted_order(&self, mut moves: Vec<Move>) -> Vec<Move> {
        if let Some(wanted) = self.wanted.as_ref().filter(|w| w.stage != Stage::Waits) {
            let position = |page: &Move| wanted.order.get(&page.from.start).copied();
            moves.sort_by_key(|page| position(page).unwrap_or(usize::MAX));
        }
        moves
    }

    /// A victim has been dealt with.
    pub(super) fn emptied(&mut self, below: &mut Below<'_>, is_returning: bool) {
        if let Some(wanted) = self.wanted.as_ref().filter(|w| w.stage != Stage::Waits) {
            let counters = &mut below.base.counters;
            counters.moved_as_wanted += counters.store.moved - wanted.moved;
            let is_emptied = is_returning || planted!(VainEmptying);
            self.end_wanted(below, is_emptied.then_some(()).ok_or(Fault::NoRoom));
        }
    }

    pub(super) fn end_wanted(&mut self, below: &mut Below<'_>, result: Result<(), Fault>) {
        if let Some(wanted) = self.wanted.take() {
            below.base.finish(wanted.request, result);
        }
    }
}

impl Wanted {
    fn turn(&self, below: &Below<'_>) -> Turn {
        let segments = &*below.segments;
        if !is_there(below, self.segment, self.generation) {
            return Turn::Never;
        }
        // A volume that refuses writes takes no free header.
        if !segments.may_evict(self.segment) {
            return Turn::Never;
        }
        let segment = segments.get(self.segment);
        let blocks = segment.live() + u64::from(segment.blocks());
        let room = room_for_copies(segments);
        // Puts leave the last free segment to copies: so these find room in any case.
        if segments.free_segments() > 1 && blocks + segments.data_blocks() <= room {
            Turn::Now
        } else if segments.returning() > segments.held_by_pins() {
            Turn::Later
        } else {
            Turn::Never
        }
    }
}

/// Whether a segment is sealed, trusted and of this generation.
fn is_there(below: &Below<'_>, id: SegmentId, generation: Serial) -> bool {
    let segment = below.segments.get(id);
    segment.state() == State::Sealed && !segment.is_suspect() && segment.generation() == generation
}
