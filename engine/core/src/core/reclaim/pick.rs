//! Which segment is emptied next.

use larder_format::Serial;

use super::emergency::emergency_victim;
use crate::core::base::{Base, Event};
use crate::core::durability::Durability;
use crate::core::puts::Below;
use crate::core::segments::Segments;
use crate::core::segments::segment::{Segment, State};
use crate::core::types::Victim;
use crate::index::SegmentId;
use crate::planted;

/// A segment is worth reclaiming if at least this share of its room is dead.
pub const GAIN_SHARE: u64 = 32;

/// The rooms that a choice looks at.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub base: &'a Base,
    pub segments: &'a Segments,
    pub durability: &'a Durability,
}

impl<'a> View<'a> {
    pub(super) fn new(below: &'a Below<'_>) -> View<'a> {
        View {
            base: below.base,
            segments: below.segments,
            durability: below.durability,
        }
    }

    pub(super) fn wants_reclaim(self) -> bool {
        if self.durability.has_suspects(self.segments) || self.must_be_emptied().is_some() {
            return true;
        }
        if self.segments.free_segments() < self.segments.free_target() && self.may_cost_pages() {
            return self.pick().is_some() || self.open_blocker().is_some();
        }
        self.candidates().any(|(_, segment)| segment.is_dead())
    }

    /// Whether room is worth pages. Where a part of the store could not be read at the open, there
    /// may be room enough, and nothing leaves before a call needs it.
    fn may_cost_pages(self) -> bool {
        self.base.is_room_asked_for() || !self.base.is_partial || planted!(EvictsAtOpen)
    }

    /// Segments that may become victims.
    pub(super) fn candidates(self) -> impl Iterator<Item = (SegmentId, &'a Segment)> {
        // A volume that refuses writes cannot take a free header.
        let all = self.segments.iter();
        all.filter(move |(id, s)| s.is_candidate() && self.segments.may_evict(*id))
    }

    /// A segment that is emptied however many are free.
    fn must_be_emptied(self) -> Option<SegmentId> {
        if !self.durability.is_held() && !self.segments.some_unusable() {
            return None;
        }
        let mut candidates = self.candidates();
        let found = candidates.find(|(_, segment)| segment.must_be_emptied());
        found.map(|(id, _)| id)
    }

    /// Whether emptying a segment that keeps `kept` blocks is worth the copies.
    fn gains(self, kept: u64) -> bool {
        let room = self.segments.data_blocks();
        room - kept.min(room) >= room / GAIN_SHARE
    }

    fn pick(self) -> Option<SegmentId> {
        let suspect = self.durability.suspect(self.segments);
        if let Some(id) = suspect.or_else(|| self.must_be_emptied()) {
            return Some(id);
        }
        let lightest = self
            .candidates()
            .filter(|(_, segment)| self.gains(segment.weight()))
            .min_by_key(|(_, segment)| (segment.weight(), segment.generation()));
        if let Some((id, _)) = lightest {
            return Some(id);
        }
        // A blocker that cannot be emptied may block the others for good. Tombstones that have not
        // been forwarded before may be of few keys. Afterwards all are forwarded ones, so this
        // ends: soon, if they fill half of the segment.
        let not_forwarded = || {
            let half = self.segments.data_blocks() / 2;
            let candidates = self.candidates();
            let candidates = candidates.filter(|(_, s)| s.least_weight() <= half);
            let fewest = candidates.min_by_key(|(_, s)| (s.least_weight(), s.generation()));
            fewest.map(|(id, _)| id)
        };
        let is_candidate =
            |id: &SegmentId| self.segments.get(*id).is_candidate() && self.segments.may_evict(*id);
        self.blocker().filter(is_candidate).or_else(not_forwarded)
    }

    /// Where tombstones take the room of segments that would be worth emptying: the oldest
    /// generation that keeps those tombstones needed and does not end by itself. The generation of
    /// a free segment ends by itself, since the next copies go there.
    fn blocker(self) -> Option<SegmentId> {
        if !self
            .candidates()
            .any(|(_, segment)| self.gains(segment.live()))
        {
            return None;
        }
        let ends = |segment: &Segment| match segment.state() {
            State::Free | State::Releasing | State::Lost => true,
            // Readers may hold it for any time.
            State::Emptied => !segment.is_held_by_pins(),
            _ => false,
        };
        let stays = self.segments.iter().filter(|(_, s)| !ends(s));
        let oldest = stays.min_by_key(|(_, segment)| segment.generation());
        oldest.map(|(id, _)| id)
    }

    /// The blocker, if it still takes pages.
    fn open_blocker(self) -> Option<SegmentId> {
        let is_open = |id: &SegmentId| self.segments.get(*id).is_open();
        let is_stuck = self.pick().is_none();
        is_stuck.then(|| self.blocker().filter(is_open))?
    }
}

/// Takes the next segment to empty, if any should be.
pub(super) fn next_victim(below: &mut Below<'_>) -> Option<Victim> {
    below.segments.retry_freeing_when_due(below.base);
    let view = View::new(below);
    let segments = view.segments;
    // A segment on its way to be free counts as free: further victims would only add copies. But
    // not while a reader is in it: one read that hangs would end all puts.
    let returning = segments.returning() - segments.held_by_pins();
    let is_short = segments.free_segments() + returning < segments.free_target();
    let runs_short = is_short && view.may_cost_pages();
    let Some(id) = view.pick() else {
        let open = view.open_blocker().filter(|id| segments.may_evict(*id));
        if let Some(open) = open.filter(|_| runs_short) {
            // Once sealed, it is the next victim.
            below.segments.close(open);
            below.base.announce(Event::Drain(open));
        }
        return None;
    };
    let segment = segments.get(id);
    let must_go = segment.is_dead() || segment.is_suspect() || segment.must_be_emptied();
    if !runs_short && !must_go {
        return None;
    }
    let emergency = emergency_victim(view, id);
    let mut victim = take_victim(below.segments, emergency.unwrap_or(id), None);
    victim.is_given_up = emergency.is_some();
    Some(victim)
}

/// Makes a segment the victim. `free_as` is the generation of its free header, if it was not read
/// completely.
pub(super) fn take_victim(
    segments: &mut Segments,
    id: SegmentId,
    free_as: Option<Serial>,
) -> Victim {
    segments.get_mut(id).become_victim(free_as);
    victim_of(segments, id)
}

/// Where the descriptors of a segment lie.
pub(super) fn victim_of(segments: &Segments, id: SegmentId) -> Victim {
    let segment = segments.get(id);
    Victim {
        segment: id,
        volume: segments.volume_of(id),
        number: segments.number_of(id),
        sequence: segment.generation(),
        blocks: segment.blocks(),
        is_given_up: false,
    }
}
