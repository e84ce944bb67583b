//! Segment headers: written when a segment is opened, sealed and freed, and once more at a clean close.

use larder_format::{BLOCK_BYTES, SegmentHeader, SegmentNo, SegmentState, Serial};

use super::segment::State;
use super::{Core, Effect, Io, log};
use crate::index::SegmentId;
use crate::memory::AlignedBuf;

impl Core {
    pub(super) fn write_header(&mut self, id: SegmentId, state: SegmentState) {
        let header = self.header(id, state);
        // Opening and sealing write both copies. One copy suffices to mark a segment free, and
        // leaves the other copy to a reader that looks at this moment. Both are written where the
        // other copy is in doubt: no header of this generation was written (the other copy may be
        // blank), or none has named the pages that are not proven.
        let segment = self.space.segment(id);
        let other_is_good = segment.held.is_empty() && !segment.suspect && !segment.headless;
        let is_free = state == SegmentState::Free;
        let copies = if is_free && other_is_good { 1 } else { 2 };
        let Some(bytes) = encode_headers(&header, copies) else {
            // Without memory for two blocks: a header is a hint, the descriptor blocks tell the same.
            self.header_done(id, state, false);
            return;
        };
        debug_assert!(header.sequence > Serial::ZERO, "a header names a life");
        let offset = self.space.offset_of(id);
        let volume = self.space.volume_of(id);
        self.counters.blocks_written += copies as u64;
        let io = self.log.io(log::IoContext::Header(id, state));
        self.effects.push(Effect::Io {
            id: io,
            volume,
            io: Io::Write { offset, bytes },
        });
    }

    pub(super) fn header(&self, id: SegmentId, state: SegmentState) -> SegmentHeader {
        let segment = self.space.segment(id);
        let free_as = segment.free_as.filter(|_| state == SegmentState::Free);
        SegmentHeader {
            store: self.config.store,
            volume: u16::try_from(self.space.volume_of(id)).unwrap_or(u16::MAX),
            segment: SegmentNo(self.space.number_of(id)),
            sequence: free_as.unwrap_or(segment.sequence),
            state,
            blocks: segment.blocks,
            data_end: segment.data_end,
            proven: segment.proven,
            synced: self.syncs.mark,
        }
    }

    pub(super) fn header_done(&mut self, id: SegmentId, state: SegmentState, good: bool) {
        match state {
            SegmentState::Open => {
                self.space.segment_mut(id).opening = false;
                self.opened(id, good);
            }
            SegmentState::Sealed => {
                let segment = self.space.segment_mut(id);
                let in_doubt = std::mem::take(&mut segment.doubted);
                segment.listed = good && !in_doubt;
                segment.state = State::Sealed;
                if std::mem::take(&mut segment.extended) {
                    segment.poisoned |= !good;
                    if std::mem::take(&mut segment.healing) {
                        segment.suspect = !good;
                    }
                    if good {
                        self.space.welcome();
                    }
                    if self.has_suspects() {
                        self.effects.push(Effect::Reclaim);
                    }
                    self.finish_unlisted(id, good);
                }
                if good {
                    self.resolve_held(id);
                }
                if self.wants_reclaim() {
                    self.effects.push(Effect::Reclaim);
                }
            }
            SegmentState::Free => {
                self.space.segment_mut(id).listed = good;
                if good {
                    self.resolve_held(id);
                }
                self.free_at_next_sync(id, good);
            }
        }
    }

    /// A header says what is not to be believed of this segment.
    fn resolve_held(&mut self, id: SegmentId) {
        for commit in std::mem::take(&mut self.space.segment_mut(id).held) {
            self.syncs.held.let_go(commit);
        }
    }

    /// Keeps the mark below a commit until a header of this segment is written.
    pub(super) fn hold(&mut self, id: SegmentId, commit: Serial) {
        self.space.segment_mut(id).held.push(commit);
        self.syncs.held.hold(commit);
    }

    /// A segment's free header is durable: it may be written again.
    pub(super) fn released(&mut self, id: SegmentId) {
        let listed = self.space.segment(id).listed;
        self.space.release(id);
        self.space.segment_mut(id).listed = listed;
        self.counters.reclaimed += 1;
        self.write_homeless();
        self.has_more_room = true;
        if self.wants_reclaim() {
            self.effects.push(Effect::Reclaim);
        }
    }

    /// The first header of a segment is written, or its write failed: then nothing in it is acknowledged.
    pub(super) fn opened(&mut self, id: SegmentId, good: bool) {
        if !good {
            self.space.segment_mut(id).headless = true;
            self.poison(id);
        }
        let waiting = std::mem::take(&mut self.log.unopened);
        for ticket in waiting {
            if self.pending[ticket].place.segment == id {
                self.settle(ticket);
            } else {
                self.log.unopened.push(ticket);
            }
        }
        self.finish_unlisted(id, good);
        self.drain(id);
    }

    /// Headers for every segment whose header on disk does not state what it holds: open ones, and those whose last header
    /// write failed or was skipped. Written as the last thing before a clean close, when nothing is under way. Volume, byte
    /// offset, bytes.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub fn closing_headers(&mut self) -> Result<Vec<(usize, u64, AlignedBuf)>, std::io::Error> {
        let lively: Vec<SegmentId> = self
            .space
            .iter()
            .filter(|(_, s)| !s.listed && !matches!(s.state, State::Lost | State::Unreadable))
            .map(|(id, _)| id)
            .collect();
        let mut headers = Vec::new();
        for id in lively {
            let segment = self.space.segment_mut(id);
            // One with a failed write has said how far it is to be trusted; of a suspect that has been emptied nothing is.
            if !segment.poisoned && !segment.suspect {
                segment.prove();
            }
            let state = match segment.state {
                State::Free | State::Releasing => SegmentState::Free,
                State::Open(_) => SegmentState::Open,
                _ => SegmentState::Sealed,
            };
            let header = self.header(id, state);
            let bytes = encode_headers(&header, 2).ok_or(std::io::ErrorKind::OutOfMemory)?;
            let offset = self.space.offset_of(id);
            headers.push((self.space.volume_of(id), offset, bytes));
        }
        Ok(headers)
    }
}

fn encode_headers(header: &SegmentHeader, copies: usize) -> Option<AlignedBuf> {
    let mut bytes = AlignedBuf::zeroed(copies * BLOCK_BYTES).ok()?;
    for copy in bytes.chunks_exact_mut(BLOCK_BYTES) {
        header.encode(copy.try_into().ok()?);
    }
    Some(bytes)
}
