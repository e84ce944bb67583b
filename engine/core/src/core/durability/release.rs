//! Sealing and releasing: the end of a segment's generation, each step when everything before it is
//! durable.

use larder_format::{RECORDS_PER_BLOCK, SegmentState};

use super::{Durability, Waiter};
use crate::core::base::{Base, Event};
use crate::core::journal::Journal;
use crate::core::journal::records::{Content, Metadata, Origin};
use crate::core::segments::Segments;
use crate::core::segments::segment::{Extension, State};
use crate::index::SegmentId;
use crate::planted;

impl Durability {
    // ---- sealing

    /// Moves a segment that takes no more pages on, once nothing is under way in it.
    pub(in crate::core) fn drain(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        journal: &mut Journal,
        id: SegmentId,
    ) {
        let is_drained = segments.get(id).is_drained();
        if !is_drained || journal.has_queued(id) || journal.fill_holes(base, segments, id) {
            return;
        }
        let segment = segments.get_mut(id);
        let seal = Waiter::Seal(id, segment.generation());
        if segment.has_held() || journal.is_unlisted(id) {
            segment.begin_sealing();
            segments.write_header(base, id, SegmentState::Sealed);
        } else if segment.is_suspect() || segment.is_extended() {
            segment.seal();
            base.call_reclaim();
        } else if planted!(EarlySeal) {
            self.synced_for(base, segments, journal, &seal);
        } else if !self.waits(&seal) {
            let last_commit = segment.last_commit();
            self.wait(last_commit, seal);
        }
    }

    /// A header has been written, or its write failed.
    pub(in crate::core) fn header_written(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        journal: &mut Journal,
        id: SegmentId,
        state: SegmentState,
        good: bool,
    ) {
        let segment = segments.get_mut(id);
        match state {
            SegmentState::Open => {
                segment.end_opening(good);
                journal.header_written(base, segments, id, good);
                base.announce(Event::Drain(id));
            }
            SegmentState::Sealed => {
                if segment.end_sealing(good) {
                    if good {
                        segments.end_quarantine();
                    }
                    if self.has_suspects(segments) {
                        base.call_reclaim();
                    }
                    journal.header_written(base, segments, id, good);
                }
                if good {
                    self.end_holds(segments, id);
                }
                base.announce(Event::CheckReclaim);
            }
            SegmentState::Free => {
                segment.note_free_header(good);
                if good {
                    self.end_holds(segments, id);
                }
                self.free_header_written(base, segments, id, good);
            }
        }
    }

    /// A header excludes the pages of this segment that are not to be trusted.
    fn end_holds(&mut self, segments: &mut Segments, id: SegmentId) {
        for commit in segments.get_mut(id).take_held() {
            self.held.let_go(commit);
        }
    }

    // ---- releasing

    /// Moves an emptied segment on once every record forwarded out of it has been written.
    pub(in crate::core) fn release_when_forwarded(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        journal: &mut Journal,
        id: SegmentId,
    ) {
        let segment = segments.get_mut(id);
        if segment.state() != State::Emptied || segment.is_forwarding() {
            return;
        }
        if segment.take_stuck() {
            self.put_back_stuck(base, segments, journal, id);
            return;
        }
        let forwarded = segment.forwarded();
        if forwarded <= base.marks.synced || planted!(EarlyRelease) {
            self.release_when_unpinned(base, segments, journal, id);
        } else if !self.waits(&Waiter::Release(id)) {
            // A second waiter would outlive the segment, and release its next generation.
            self.wait(forwarded, Waiter::Release(id));
        }
    }

    /// Releases an emptied segment once no reader is in it.
    pub(in crate::core) fn release_when_unpinned(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        journal: &mut Journal,
        id: SegmentId,
    ) {
        let segment = segments.get_mut(id);
        if segment.state() != State::Emptied {
            return;
        }
        segment.forget_forwarded();
        if !base.index.await_readers(id) && !planted!(MissingPin) {
            return;
        }
        segment.begin_releasing();
        journal.forget_in(id);
        segments.write_header(base, id, SegmentState::Free);
    }

    /// The free header of a segment has been written: it is free when that is durable. Or it could
    /// not be written, and is tried again.
    fn free_header_written(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        id: SegmentId,
        good: bool,
    ) {
        let unsure = self.unsure.iter().position(|other| *other == id);
        if let Some(at) = unsure {
            self.unsure.swap_remove(at);
        }
        if !good {
            segments.not_freed(base, id);
            return;
        }
        segments.answers_again(base, id);
        if unsure.is_some() {
            segments.get_mut(id).note_free_header(false);
            segments.write_header(base, id, SegmentState::Free);
        } else if planted!(EarlyReuse) {
            base.announce(Event::Released(id));
        } else {
            self.freed.push(id);
        }
    }

    /// Writes the free headers again that a failed sync may have lost: those it was to cover, those
    /// answered since it began, and those on their way as soon as they are answered.
    pub(super) fn free_again(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        mut freed: Vec<SegmentId>,
    ) {
        if planted!(HastyFree) {
            for id in freed.drain(..) {
                base.announce(Event::Released(id));
            }
        }
        if !planted!(LaterFree) {
            freed.append(&mut self.freed);
        }
        let releasing = segments.releasing();
        let is_unknown = |id: &&SegmentId| !freed.contains(*id) && !segments.is_unfreed(**id);
        if !planted!(SureHeader) {
            self.unsure = releasing.iter().filter(is_unknown).copied().collect();
        }
        // It may have lost headers that exclude pages, too.
        let mark = base.marks.durable;
        for id in releasing {
            if segments.get(id).is_beyond(mark) {
                self.make_suspect(segments, id);
            }
        }
        for id in freed {
            segments.write_header(base, id, SegmentState::Free);
        }
    }

    /// A segment stays, since one of its records finds no room elsewhere.
    pub(in crate::core) fn put_back_stuck(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        journal: &mut Journal,
        id: SegmentId,
    ) {
        segments.put_back(id);
        base.retry_later();
        let segment = segments.get_mut(id);
        if segment.is_suspect() {
            segment.suspect_again();
            self.rewrite_records(base, segments, journal, id);
        }
    }

    /// Writes the records of a suspect that holds no page any more into the suspect itself, behind
    /// the others, since they found no room elsewhere. Its header makes it whole again, and
    /// excludes the pages that it had.
    fn rewrite_records(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        journal: &mut Journal,
        id: SegmentId,
    ) {
        let unsynced = journal.unsynced_in(id);
        let is_record = |content: &&Content| matches!(content, Content::Record(_));
        let records = unsynced.iter().filter(is_record).count();
        let blocks = records.div_ceil(RECORDS_PER_BLOCK) + unsynced.len() - records;
        let mut blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let size = segments.segment_blocks();
        if !segments.get(id).has_room(size, 0, blocks) {
            return;
        }
        segments.get_mut(id).extend(Extension::Rewrite, blocks);
        if unsynced.is_empty() {
            segments.get_mut(id).begin_sealing();
            segments.write_header(base, id, SegmentState::Sealed);
        }
        for content in unsynced {
            let reserved = std::mem::take(&mut blocks);
            journal.queue_record(id, Metadata::new(content, Origin::Store), reserved);
        }
    }
}
