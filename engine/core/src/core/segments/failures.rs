//! Failed segments: poisoned by a write, in quarantine after a failed attempt of reclaim, or
//! unusable.

use larder_format::{SegmentState, Serial};

use super::Segments;
use crate::core::base::Base;
use crate::index::SegmentId;
use crate::planted;

/// A medium that refuses a read for so long has lost the bytes.
const UNREAD_MS: u64 = 4000;

/// Failed reads of one segment that are further apart are different incidents.
const UNREAD_APART_MS: u64 = 30_000;

impl Segments {
    /// A write into a segment failed: it takes nothing more, and nothing in it is acknowledged that
    /// is not visible yet. Returns whether it is the first failure there.
    pub(in crate::core) fn poison(&mut self, id: SegmentId) -> bool {
        if planted!(UnpoisonedSegment) {
            return false;
        }
        self.turn_from(id);
        let segment = self.get_mut(id);
        let is_first = segment.poison();
        if segment.is_open() {
            self.close(id);
        }
        is_first
    }

    /// The newer version of something in `id` was written with `commit`: the segment stays until
    /// that commit is synced.
    pub(in crate::core) fn forwarded(&mut self, id: SegmentId, to: SegmentId, commit: Serial) {
        let to_suspect = self.get(to).is_suspect();
        self.get_mut(id).note_forwarded(commit, to_suspect);
    }

    /// After a failed sync: nothing that was forwarded since `synced` is certain.
    pub(in crate::core) fn doubt_forwarded(&mut self, synced: Serial) {
        for segment in &mut self.segments {
            segment.doubt_forwarded(synced);
        }
    }

    /// There is more room: every usable segment in quarantine is worth another try.
    pub(in crate::core) fn end_quarantine(&mut self) {
        let segments = &mut self.segments;
        self.quarantine.retain(|id| {
            let segment = &mut segments[id.0 as usize];
            if !segment.is_unusable() {
                segment.end_quarantine();
            }
            segment.in_quarantine()
        });
    }

    /// Time has passed: one unusable segment of each volume is tried again too.
    pub(in crate::core) fn retry_quarantined(&mut self) {
        self.end_quarantine();
        let mut quarantine = std::mem::take(&mut self.quarantine);
        for id in self.take_first_of_each(&mut quarantine) {
            self.get_mut(id).end_quarantine();
        }
        self.quarantine = quarantine;
    }

    /// Some segment is unusable.
    pub(in crate::core) fn some_unusable(&self) -> bool {
        self.unusable > 0
    }

    /// Whether a segment's free header cannot be written, or its descriptors cannot be read. An
    /// unusable segment may stay so for good. It is not waited for, and the store keeps as many
    /// pages less as if the segment had never been: otherwise all other segments would fill with
    /// live pages, none of them worth reclaiming. Returns whether that is new.
    pub(in crate::core) fn set_unusable(&mut self, id: SegmentId, unusable: bool) -> bool {
        if !self.get_mut(id).set_unusable(unusable) {
            return false;
        }
        if unusable {
            self.unusable += 1;
        } else {
            self.unusable -= 1;
        }
        self.recount();
        true
    }

    /// Takes note of a read in a segment that the medium refused to reclaim. Returns whether its
    /// reads have failed for [`UNREAD_MS`]. Until then the bytes may be readable another time, and
    /// what lies there is not lost.
    pub(in crate::core) fn stays_unread(&mut self, id: SegmentId, now_ms: u64) -> bool {
        let first = self.get_mut(id).note_unread(now_ms, UNREAD_APART_MS);
        now_ms.saturating_sub(first) >= UNREAD_MS || planted!(HastyLoss)
    }

    /// A header was written, or descriptors read, of a segment that was unusable. The others of its
    /// volume are tried again.
    pub(in crate::core) fn answers_again(&mut self, base: &mut Base, id: SegmentId) {
        if !self.set_unusable(id, false) {
            return;
        }
        let volume = self.volume_of(id);
        for id in std::mem::take(&mut self.quarantine) {
            if self.volume_of(id) == volume {
                self.get_mut(id).end_quarantine();
            } else {
                self.quarantine.push(id);
            }
        }
        self.retry_freeing_on(base, volume);
        base.has_room();
        base.call_reclaim();
    }

    /// A free header could not be written.
    pub(in crate::core) fn not_freed(&mut self, base: &mut Base, id: SegmentId) {
        self.unfreed.push(id);
        // A volume in read-only service keeps its capacity.
        self.set_unusable(id, !self.is_read_only(id));
        base.retry_later();
    }

    pub(in crate::core) fn is_unfreed(&self, id: SegmentId) -> bool {
        self.unfreed.contains(&id)
    }

    /// Writes every free header again that could not be written.
    pub(in crate::core) fn retry_freeing(&mut self, base: &mut Base) {
        for id in std::mem::take(&mut self.unfreed) {
            self.write_header(base, id, SegmentState::Free);
        }
    }

    /// The same for one volume.
    pub(super) fn retry_freeing_on(&mut self, base: &mut Base, volume: usize) {
        let mut unfreed = std::mem::take(&mut self.unfreed);
        let on_volume = unfreed.extract_if(.., |id| self.volume_of(*id) == volume);
        let on_volume: Vec<SegmentId> = on_volume.collect();
        self.unfreed = unfreed;
        for id in on_volume {
            self.write_header(base, id, SegmentState::Free);
        }
    }

    /// The same when it is due, for one segment of each volume that takes writes: a volume that
    /// refuses them may have thousands. When one header is written, the others follow.
    pub(in crate::core) fn retry_freeing_when_due(&mut self, base: &mut Base) {
        if self.unfreed_due_ms > base.now_ms || self.unfreed.is_empty() {
            return;
        }
        self.unfreed_due_ms = base.retry_later();
        let mut due = std::mem::take(&mut self.unfreed);
        let mut writable = due
            .extract_if(.., |id| !self.is_read_only(*id))
            .collect::<Vec<_>>();
        let first = self.take_first_of_each(&mut writable);
        due.append(&mut writable);
        self.unfreed = due;
        for id in first {
            self.write_header(base, id, SegmentState::Free);
        }
    }

    /// Takes the first segment of each volume out of a list.
    fn take_first_of_each(&self, list: &mut Vec<SegmentId>) -> Vec<SegmentId> {
        let mut taken = vec![false; self.volumes.len()];
        let is_first =
            |id: &mut SegmentId| !std::mem::replace(&mut taken[self.volume_of(*id)], true);
        list.extract_if(.., is_first).collect()
    }
}
