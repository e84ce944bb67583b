//! Reclaim: emptying the segment with the fewest live bytes, so that it can be written again. Deletions that must be carried on count
//! like pages.
//!
//! The steps, which the [`reclaimer`](super::reclaimer) takes: `next_victim` picks a segment; its
//! descriptor blocks are read; a [`Plan`](super::plan::Plan) decides which pages are worth a copy,
//! and evicts the rest; the copies are written; `finish_victim` forgets the pages that could not be
//! read. The segment is given back once a sync covers all that was carried out of it and no reader
//! is in it.
//!
//! It must go on in the worst of states, since a crash in the middle of it seals what was open: with no free segment at all, and no room
//! in one that takes copies, it gives up another victim, the coldest, whose pages are evicted, not copied (`cornered`); and deletions,
//! which must not be lost, go into gaps of sealed segments, whose headers are written again to list them ([`Plan`](super::plan::Plan),
//! `Space::extend_sealed`).
//!
//! What a device refuses is done without. A segment whose free header cannot be written, and a victim whose descriptors cannot be read, is
//! tried again now and then and is not waited for, and the store keeps as much less as if it were not there (`Space::strand`): with the
//! limit of all segments, those that are left would fill with live pages, of which none is worth reclaiming. So it goes on without a
//! volume that dies, and has its room back when that does its work again.
//!
//! What the constants stand on (exact page-LRU over a one-hour chat trace of 288,500 block references, simulated 2026-11): copies in a
//! segment of their own are essential: mixed with new pages they doubled the write amplification (1.2 to 1.9 in the
//! steady state); with 87.5 % of the room in use it is 1.19 with 63 segments and 1.09 with 255, at 90 % 1.3 to 1.6; picking the victim by
//! fewest live bytes was never worse than cost-benefit or age; dropping the coldest twentieth of the cache instead of copying
//! it saves up to half of the copies at a cost of at most 0.03 points of hit rate. More free segments than needed cost
//! amplification, since they come out of the same slack.

use larder_format::{PageKey, PageRecord, RECORDS_PER_BLOCK, SegmentState, Serial};

use super::log::{Note, NoteBody, Teller};
use super::segment::{Segment, State};
use super::{Core, Effect};
use crate::catalog::Finding;
use crate::index::{NamespaceSlot, Place, SegmentId};
use crate::planted;

/// How long a victim that could not be emptied is left alone, in milliseconds, when nothing changes meanwhile.
const RETRY_MS: u64 = 1000;

/// A segment without at least this share of its room dead is not worth reclaiming.
pub(crate) const GAIN_SHARE: u64 = 32;

/// A segment to be emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim {
    /// The segment.
    pub segment: SegmentId,
    /// Index of its volume.
    pub volume: usize,
    /// Its number in the volume.
    pub number: u32,
    /// The life whose blocks are to be read.
    pub sequence: Serial,
    /// How many descriptor blocks it has.
    pub blocks: u32,
    /// Its pages are evicted, since there is no room for copies.
    pub is_given_up: bool,
}

/// A page to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Its namespace.
    pub namespace: NamespaceSlot,
    /// Its descriptor; the copy keeps all but the place.
    pub record: PageRecord,
    /// Where it lies now.
    pub from: Place,
}

impl Core {
    /// Free segments that reclaim tries to keep: two, or a sixty-fourth of the store.
    pub(super) fn free_target(&self) -> usize {
        (self.space.segments_there / 64).max(2)
    }

    pub(super) fn wants_reclaim(&self) -> bool {
        if self.has_suspects() || self.overdue().is_some() {
            return true;
        }
        if self.space.free_segments() < self.free_target() {
            return self.pick().is_some() || self.open_that_holds_up().is_some();
        }
        self.candidates().any(|(_, segment)| segment.is_dead())
    }

    /// Segments that may become victims.
    pub(super) fn candidates(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        let candidates = self.space.iter().filter(|(_, s)| s.is_candidate());
        // A volume that refuses writes cannot take a free header.
        candidates.filter(|(id, _)| self.space.may_evict(*id))
    }

    /// A suspect that may become a victim.
    pub(super) fn suspect(&self) -> Option<SegmentId> {
        // A suspect on a volume in read-only service is rewritten on another volume.
        let elsewhere = self.space.takes_writes();
        let may_move = |id| self.space.may_evict(id) || elsewhere && self.space.is_read_only(id);
        let mut suspects = self.suspects();
        suspects.find_map(|(id, segment)| (segment.is_candidate() && may_move(id)).then_some(id))
    }

    /// A segment that is to be emptied however many are free.
    fn overdue(&self) -> Option<SegmentId> {
        if self.syncs.held.is_empty() && self.space.stranded == 0 {
            return None;
        }
        let mut candidates = self.candidates();
        let found = candidates.find(|(_, segment)| segment.is_overdue());
        found.map(|(id, _)| id)
    }

    fn pick(&self) -> Option<SegmentId> {
        if let Some(id) = self.suspect().or_else(|| self.overdue()) {
            return Some(id);
        }
        let room = self.space.data_blocks();
        let gains = |weight: u64| room - weight.min(room) >= room / GAIN_SHARE;
        // Its deletions are carried on like its pages.
        let weight = |segment: &Segment| {
            segment.live + u64::from(segment.notes).div_ceil(RECORDS_PER_BLOCK as u64)
        };
        let lightest = self
            .candidates()
            .filter(|(_, segment)| gains(weight(segment)))
            .min_by_key(|(_, segment)| (weight(segment), segment.sequence));
        if let Some((id, _)) = lightest {
            return Some(id);
        }
        let is_candidate =
            |id: &SegmentId| self.space.segment(*id).is_candidate() && self.space.may_evict(*id);
        // What cannot be emptied may hold the others up for good. Deletions that nobody has carried yet may be of few keys.
        let first_hand = || {
            let first_hand = self
                .candidates()
                .filter(|(_, segment)| gains(segment.live) && !segment.is_carried_to);
            let fewest = first_hand.min_by_key(|(_, segment)| (segment.live, segment.sequence));
            fewest.map(|(id, _)| id)
        };
        self.holds_up().filter(is_candidate).or_else(first_hand)
    }

    /// Where deletions take up the room of segments that would be worth emptying: of the lives that have them carried on, and that do
    /// not end by themselves, the oldest. That of a free segment does: the next copies go there.
    fn holds_up(&self) -> Option<SegmentId> {
        let room = self.space.data_blocks();
        let gains = |segment: &Segment| room - segment.live.min(room) >= room / GAIN_SHARE;
        if !self.candidates().any(|(_, segment)| gains(segment)) {
            return None;
        }
        let ends = |segment: &Segment| match segment.state {
            State::Free | State::Releasing | State::Lost => true,
            // Readers may hold one for as long as they like.
            State::Emptied => segment.carrying > 0 || segment.carried > Serial::ZERO,
            _ => false,
        };
        let stays = self.space.iter().filter(|(_, s)| !ends(s));
        let oldest = stays.min_by_key(|(_, segment)| segment.sequence);
        oldest.map(|(id, _)| id)
    }

    /// What holds up everything else, if it still takes pages.
    fn open_that_holds_up(&self) -> Option<SegmentId> {
        let is_open = |id: &SegmentId| matches!(self.space.segment(*id).state, State::Open(_));
        self.pick()
            .is_none()
            .then(|| self.holds_up().filter(is_open))?
    }

    /// The next segment to empty, if any should be.
    pub(super) fn next_victim(&mut self) -> Option<Victim> {
        // One that is on its way back counts as free: reclaiming further segments meanwhile would only add copies.
        self.retry_freeing_when_due();
        // But not for as long as a reader is in it, or one read that hangs would end all puts.
        let coming = self.coming() - self.held_by_readers();
        let runs_short = self.space.free_segments() + coming < self.free_target();
        let Some(id) = self.pick() else {
            let open = self.open_that_holds_up();
            if runs_short && let Some(open) = open.filter(|id| self.space.may_evict(*id)) {
                // Sealed, it is the next.
                self.space.close(open);
                self.drain(open);
                self.pump();
            }
            return None;
        };
        let segment = self.space.segment(id);
        let must_go = segment.is_dead() || segment.suspect || segment.is_overdue();
        if !runs_short && !must_go {
            return None;
        }
        let given_up = self.to_give_up(id);
        let mut victim = self.take_victim(given_up.unwrap_or(id));
        victim.is_given_up = given_up.is_some();
        Some(victim)
    }

    pub(super) fn take_victim(&mut self, id: SegmentId) -> Victim {
        let segment = self.space.segment_mut(id);
        segment.state = State::Victim;
        let (sequence, blocks) = (segment.sequence, segment.blocks);
        Victim {
            segment: id,
            volume: self.space.volume_of(id),
            number: self.space.number_of(id),
            sequence,
            blocks,
            is_given_up: false,
        }
    }

    /// Whether a page lies where it is to be moved from.
    pub(super) fn is_live(&self, page: &Move) -> bool {
        let prefix = page.record.key.prefix();
        let found = self
            .index
            .live(page.namespace, prefix, page.from, self.now_ms);
        found.is_some()
    }

    /// Takes note of what reading pages showed: proves good ones, forgets the others.
    pub fn found(
        &mut self,
        namespace: NamespaceSlot,
        key: &PageKey,
        place: Place,
        finding: Finding,
    ) {
        let prefix = key.prefix();
        if finding == Finding::Good {
            self.index.prove(namespace, prefix, place);
            return;
        }
        let unproven = self
            .index
            .locate(namespace, key)
            .is_some_and(|found| found.place == place && found.unproven);
        if self.index.forget(namespace, prefix, place) {
            let blocks = self.namespaces[namespace.0 as usize].page_blocks;
            self.space.drop_live(place.segment, blocks);
            self.log_eviction(namespace, prefix, place.segment);
            if unproven {
                self.counters.unfinished += 1;
            } else {
                self.counters.damaged += 1;
            }
        }
    }

    /// A victim's descriptors could not all be read, and may be another time. Until then it is left alone, and another one may be
    /// emptied.
    pub(super) fn put_back_unread(&mut self, victim: &Victim) {
        let segment = self.space.segment(victim.segment);
        if segment.is_unsure() && segment.stranded {
            self.do_without(victim);
        }
        self.space.put_back(victim.segment);
        self.space.strand(victim.segment, true);
        self.retry_reclaim_later();
        self.pump();
    }

    /// A suspect that cannot be read however often it is tried: with its device gone nothing would ever be durable again. What a failed
    /// sync may have lost of its records is written elsewhere, and its pages are forgotten.
    fn do_without(&mut self, victim: &Victim) {
        let segment = self.space.segment_mut(victim.segment);
        segment.stuck = false;
        segment.rewritten = true;
        let mut carrying = self.begin_carrying(victim, Vec::new());
        self.carry_some(&mut carrying, usize::MAX);
        self.forget_pages(victim.segment);
    }

    fn forget_pages(&mut self, id: SegmentId) {
        let (space, namespaces, counters) = (&mut self.space, &self.namespaces, &mut self.counters);
        self.index.forget_segment(id, |page| {
            space.drop_live(
                page.place.segment,
                namespaces[page.namespace.0 as usize].page_blocks,
            );
            counters.damaged += 1;
        });
    }

    /// A victim's pages have been moved, as far as they could be. `moved_all` is false when some found no room: then the
    /// victim is tried again later, and so it is when a record found none. Pages that no readable descriptor named are
    /// forgotten as damaged. Returns whether the victim is on its way back.
    pub(crate) fn finish_victim(&mut self, victim: &Victim, moved_all: bool) -> bool {
        let segment = self.space.segment_mut(victim.segment);
        let is_stuck = std::mem::take(&mut segment.stuck);
        if !moved_all {
            self.space.put_back(victim.segment);
            self.retry_reclaim_later();
            // What a plan that was broken off has queued.
            self.pump();
            return false;
        }
        if segment.live > 0 {
            self.forget_pages(victim.segment);
        }
        if is_stuck {
            self.put_back_stuck(victim.segment);
            return false;
        }
        self.space.empty(victim.segment);
        self.release_when_carried(victim.segment);
        self.pump();
        true
    }

    /// A segment stays what it is, since one of its records finds no room elsewhere.
    fn put_back_stuck(&mut self, id: SegmentId) {
        self.space.put_back(id);
        self.retry_reclaim_later();
        let segment = self.space.segment_mut(id);
        segment.rewritten = false;
        if segment.suspect {
            self.heal(id);
        }
    }

    /// Has reclaim look again after a while. When that is.
    pub(super) fn retry_reclaim_later(&mut self) -> u64 {
        let due = self.now_ms.saturating_add(RETRY_MS);
        self.retry_reclaim_ms = Some(due);
        due
    }

    /// A suspect segment that holds no page any more, and whose records found no room elsewhere: those that a failed sync may have
    /// lost are written into it again, behind the others. It is as good as new when its header says so, and that it had pages that are
    /// not to be believed.
    fn heal(&mut self, id: SegmentId) {
        let notes = self.log.unsynced_notes_in(id);
        let is_record = |note: &&NoteBody| matches!(note, NoteBody::Record(_));
        let records = notes.iter().filter(is_record).count();
        let blocks = records.div_ceil(RECORDS_PER_BLOCK) + notes.len() - records;
        let mut blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        if self.space.promise_blocks(id, blocks) {
            let is_empty = notes.is_empty();
            let segment = self.space.segment_mut(id);
            segment.extended = true;
            segment.healing = true;
            segment.state = if is_empty {
                State::Sealing
            } else {
                State::Draining
            };
            if is_empty {
                self.write_header(id, SegmentState::Sealed);
            }
            for body in notes {
                let credits = std::mem::take(&mut blocks);
                self.log
                    .queue_note(id, Note::new(body, Teller::Nobody), credits);
            }
        }
        self.pump();
    }

    /// Moves an emptied segment on once every record carried out of it has been written.
    pub(super) fn release_when_carried(&mut self, id: SegmentId) {
        let segment = self.space.segment_mut(id);
        if segment.state != State::Emptied || segment.carrying > 0 {
            return;
        }
        if std::mem::take(&mut segment.stuck) {
            self.put_back_stuck(id);
            return;
        }
        let carried = segment.carried;
        if carried <= self.syncs.synced || planted!(EarlyRelease) {
            self.release_when_unpinned(id);
        } else {
            self.wait_for_release(id, carried);
        }
    }

    /// Marks an emptied segment free once no reader is in it.
    pub(super) fn release_when_unpinned(&mut self, id: SegmentId) {
        let segment = self.space.segment_mut(id);
        if segment.state != State::Emptied {
            return;
        }
        // Zero says that only readers hold it now.
        segment.carried = Serial::ZERO;
        if !self.index.await_readers(id) && !planted!(MissingPin) {
            return;
        }
        segment.state = State::Releasing;
        self.log.forget_notes_in(id);
        self.write_header(id, SegmentState::Free);
    }

    /// The last reader left a segment.
    pub fn unpinned(&mut self, id: SegmentId) {
        let segment = self.space.segment(id);
        if segment.state == State::Emptied
            && segment.carrying == 0
            && segment.carried == Serial::ZERO
        {
            self.release_when_unpinned(id);
            self.pump();
        }
    }

    /// Called once after opening: evicts what a crash brought back beyond the limit (evictions are not written down), and
    /// asks for reclaim where it is wanted.
    pub fn start(&mut self) {
        self.make_room(0, None);
        if self.wants_reclaim() {
            self.effects.push(Effect::Reclaim);
        }
        self.pump();
    }
}
