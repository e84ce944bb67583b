//! The content that keeps a segment from being released, and the attempts of reclaim to empty it.

use larder_format::{RECORDS_PER_BLOCK, Serial};

use super::{Attempts, Body, Content, InQuarantine, Phase, Segment, Stage, State};

impl Segment {
    fn attempts(&self) -> Attempts {
        match self.content().map(|content| &content.phase) {
            Some(Phase::Closed(attempts, _)) => *attempts,
            _ => Attempts::default(),
        }
    }

    /// # Panics
    /// For a segment that reclaim cannot have tried to empty.
    fn attempts_mut(&mut self) -> &mut Attempts {
        match &mut self.content_mut().phase {
            Phase::Closed(attempts, _) => attempts,
            Phase::Open(..) | Phase::Draining(_) => panic!("an open segment is emptied"),
        }
    }

    // ---- content

    /// Blocks of indexed pages.
    pub(in crate::core) fn live(&self) -> u64 {
        self.content().map_or(0, |it| it.live)
    }

    pub(in crate::core::segments) fn add_live(&mut self, blocks: u32) {
        self.content_mut().live += u64::from(blocks);
    }

    /// A page has left it. Returns whether that was the last page of a sealed segment.
    pub(in crate::core::segments) fn drop_live(&mut self, blocks: u32) -> bool {
        let live = &mut self.content_mut().live;
        *live = live
            .checked_sub(u64::from(blocks))
            .expect("a page left a segment that did not count it");
        *live == 0 && self.state() == State::Sealed
    }

    /// A record of this weight was written here.
    pub(in crate::core) fn add_record(&mut self, weight: u32, is_forwarded: bool) {
        let content = self.content_mut();
        content.records = content.records.saturating_add(weight);
        if is_forwarded {
            content.forwards = content.forwards.saturating_add(weight);
        }
    }

    /// Blocks that are copied out of it for certain. Of the tombstones that were not forwarded here
    /// none may be left: later ones may be of the same keys.
    pub(in crate::core) fn least_weight(&self) -> u64 {
        self.weight_with(|it| it.forwards)
    }

    /// Nothing has to be copied out of it. Tombstones are forwarded without end: a segment of them
    /// alone would be emptied into the next one again and again.
    pub(in crate::core) fn is_dead(&self) -> bool {
        self.weight() == 0
    }

    /// Blocks that have to be copied out of it: its tombstones are forwarded like its pages.
    pub(in crate::core) fn weight(&self) -> u64 {
        self.weight_with(|it| it.records)
    }

    fn weight_with(&self, records: impl Fn(&Content) -> u32) -> u64 {
        let records = self.content().map_or(0, records);
        self.live() + u64::from(records).div_ceil(RECORDS_PER_BLOCK as u64)
    }

    // ---- attempts

    /// It may become a victim.
    pub(in crate::core) fn is_candidate(&self) -> bool {
        matches!(self.stage(), Some(Stage::Sealed(InQuarantine(false))))
    }

    /// It must be emptied however many segments are free: (a) its header could not be written, so
    /// the durable watermark stays below it; or (b) its descriptors were unreadable when last tried
    /// and it holds no page, so the store gains a segment as soon as they can be read.
    pub(in crate::core) fn must_be_emptied(&self) -> bool {
        self.has_held() || self.is_unusable() && self.live() == 0
    }

    pub(in crate::core::segments) fn in_quarantine(&self) -> bool {
        let quarantine = |stage: &Stage| match stage {
            Stage::Sealed(it) | Stage::Unreadable(it) => it.0,
            _ => false,
        };
        self.stage().is_some_and(quarantine)
    }

    pub(in crate::core::segments) fn end_quarantine(&mut self) {
        if let Some(Stage::Sealed(it) | Stage::Unreadable(it)) = self.stage_mut() {
            *it = InQuarantine(false);
        }
    }

    pub(in crate::core) fn is_unusable(&self) -> bool {
        self.attempts().unusable
    }

    /// Returns whether that is new.
    pub(in crate::core::segments) fn set_unusable(&mut self, unusable: bool) -> bool {
        std::mem::replace(&mut self.attempts_mut().unusable, unusable) != unusable
    }

    /// A read of it failed. Returns when the first one in a row did: failures further apart than
    /// `apart_ms` are different incidents.
    pub(in crate::core::segments) fn note_unread(&mut self, now_ms: u64, apart_ms: u64) -> u64 {
        let unread = &mut self.attempts_mut().unread_ms;
        let first = match *unread {
            Some((first, last)) if now_ms.saturating_sub(last) <= apart_ms => first,
            _ => now_ms,
        };
        *unread = Some((first, now_ms));
        first
    }

    /// A record of it is on its way elsewhere.
    pub(in crate::core) fn begin_forwarding(&mut self) {
        self.attempts_mut().forwarding += 1;
    }

    /// That record is written elsewhere, or found no room.
    pub(in crate::core) fn end_forwarding(&mut self, good: bool) {
        let attempts = self.attempts_mut();
        attempts.forwarding -= 1;
        attempts.is_stuck |= !good;
    }

    pub(in crate::core) fn is_forwarding(&self) -> bool {
        self.attempts().forwarding > 0
    }

    /// A record could not be forwarded for lack of room.
    pub(in crate::core) fn is_stuck(&self) -> bool {
        self.attempts().is_stuck
    }

    pub(in crate::core) fn set_stuck(&mut self, is_stuck: bool) {
        self.attempts_mut().is_stuck = is_stuck;
    }

    /// Ends an attempt. Returns whether a record found no room.
    pub(in crate::core) fn take_stuck(&mut self) -> bool {
        std::mem::take(&mut self.attempts_mut().is_stuck)
    }

    /// A newer version of something that lay here was written elsewhere with this commit.
    pub(in crate::core::segments) fn note_forwarded(&mut self, commit: Serial, to_suspect: bool) {
        let content = self.content_mut();
        content.forwarded = content.forwarded.max(commit);
        content.forwarded_to_suspect |= to_suspect;
    }

    /// After a failed sync: nothing that was forwarded since `synced` is certain.
    pub(in crate::core::segments) fn doubt_forwarded(&mut self, synced: Serial) {
        let is_forwarding = self.is_forwarding();
        if let Body::Written(content) = &mut self.body {
            content.forwarded_to_suspect |= content.forwarded > synced || is_forwarding;
        }
    }

    /// Everything that left it is durable. Only readers hold it now.
    pub(in crate::core) fn forget_forwarded(&mut self) {
        self.content_mut().forwarded = Serial::ZERO;
    }

    /// The commit that everything that left it waits for.
    pub(in crate::core) fn forwarded(&self) -> Serial {
        self.content().map_or(Serial::ZERO, |it| it.forwarded)
    }

    /// A failed sync may have lost something that left it.
    pub(in crate::core) fn is_forwarded_to_suspect(&self) -> bool {
        self.content().is_some_and(|it| it.forwarded_to_suspect)
    }

    /// Only readers, or writers that were stopped, keep it from being released.
    pub(in crate::core) fn is_held_by_pins(&self) -> bool {
        let is_forwarded = !self.is_forwarding() && self.forwarded() == Serial::ZERO;
        self.state() == State::Emptied && is_forwarded
    }
}
