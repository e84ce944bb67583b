//! Segment headers: written when a segment is opened, sealed and released, and once more at a
//! clean close.

use larder_base::memory::AlignedBuf;
use larder_format::{BLOCK_BYTES, SegmentHeader, SegmentNo, SegmentState, Serial};

use super::Segments;
use super::segment::{Segment, State};
use crate::core::base::{Base, Event, IoContext};
use crate::index::SegmentId;

impl Segments {
    pub(in crate::core) fn write_header(
        &mut self,
        base: &mut Base,
        id: SegmentId,
        state: SegmentState,
    ) {
        let header = self.header(base, id, state);
        debug_assert!(
            header.sequence > Serial::ZERO,
            "a header names a generation"
        );
        // Opening and sealing write both copies. One copy suffices to mark a segment free, and
        // leaves the other copy to a reader that looks at this moment. Both are written where the
        // other copy is in doubt: no header of this generation was written (the other copy may be
        // blank), or none has named the pages that are not proven.
        let segment = self.get(id);
        let other_is_good = !segment.has_held() && !segment.is_suspect() && !segment.is_headless();
        let is_free = state == SegmentState::Free;
        let copies = if is_free && other_is_good { 1 } else { 2 };
        let (volume, offset) = (self.volume_of(id), self.offset_of(id));
        let context = IoContext::Header(id, state);
        match encode(&header, copies) {
            Some(bytes) => {
                base.counters.store.written.headers_bytes += (copies * BLOCK_BYTES) as u64;
                base.write(volume, offset, bytes, context);
            }
            // Without memory for two blocks: a header is a hint, the descriptor blocks hold the
            // same facts.
            None => base.announce(Event::Header(id, state, false)),
        }
    }

    fn header(&self, base: &Base, id: SegmentId, state: SegmentState) -> SegmentHeader {
        let segment = self.get(id);
        let free_as = segment.free_as().filter(|_| state == SegmentState::Free);
        SegmentHeader {
            store: base.config.store,
            volume: self.volume_number(id),
            segment: SegmentNo(self.number_of(id)),
            sequence: free_as.unwrap_or(segment.generation()),
            state,
            blocks: segment.blocks(),
            data_end: segment.data_end(),
            proven: segment.proven(),
            synced: base.marks.durable,
            born_ms: base.index.born_ms(id),
        }
    }

    /// Headers for every segment whose header on disk does not state its content: open segments,
    /// and those whose last header write failed or was skipped. Volume, byte offset, bytes.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub(in crate::core) fn closing_headers(
        &mut self,
        base: &Base,
    ) -> Result<Vec<(usize, u64, AlignedBuf)>, std::io::Error> {
        let is_old = |s: &Segment| {
            let is_there = !matches!(s.state(), State::Lost | State::Unreadable);
            is_there && !s.is_header_current()
        };
        let old = self.iter().filter(|(_, segment)| is_old(segment));
        let old: Vec<SegmentId> = old.map(|(id, _)| id).collect();
        let mut headers = Vec::with_capacity(old.len());
        for id in old {
            let segment = self.get_mut(id);
            // After a failed write its header already limits the proven pages. Nothing of an
            // emptied suspect is proven.
            if !segment.is_poisoned() && !segment.is_suspect() {
                segment.prove();
            }
            let state = match segment.state() {
                State::Free | State::Releasing => SegmentState::Free,
                State::Open(_) => SegmentState::Open,
                _ => SegmentState::Sealed,
            };
            let header = self.header(base, id, state);
            let bytes = encode(&header, 2).ok_or(std::io::ErrorKind::OutOfMemory)?;
            headers.push((self.volume_of(id), self.offset_of(id), bytes));
        }
        Ok(headers)
    }
}

fn encode(header: &SegmentHeader, copies: usize) -> Option<AlignedBuf> {
    let mut bytes = AlignedBuf::zeroed(copies * BLOCK_BYTES).ok()?;
    for copy in bytes.chunks_exact_mut(BLOCK_BYTES) {
        header.encode(copy.try_into().ok()?);
    }
    Some(bytes)
}
