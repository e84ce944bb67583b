//! Departures are written down: pages that were evicted, and puts that failed. The next open must
//! not bring an evicted page back in place of a page that was kept, and must not find a page whose
//! put failed after its descriptor was sent to the device.
//!
//! They wait for room in blocks that are written anyway, and for spare room of a segment; a clean
//! close writes the rest. A lost departure costs no page: its page may come back.

use std::collections::VecDeque;

use larder_format::{RECORDS_PER_BLOCK, Record};

use super::records::{Content, Metadata, Origin};
use super::{Journal, Queue};
use crate::core::base::Base;
use crate::core::segments::Segments;
use crate::index::SegmentId;

/// Departures that wait to be written. Beyond that the oldest are dropped, and their pages may come
/// back at the next open.
const WAITING_MAX: usize = 1 << 16;

/// Departures that are not written yet, oldest first.
#[derive(Debug, Default)]
pub(super) struct Departures {
    waiting: VecDeque<Record>,
    /// Departures that were never written.
    dropped: u64,
}

impl Journal {
    /// Writes a departure (again) with a later group.
    pub(in crate::core) fn keep_departure(&mut self, record: Record) {
        let Departures { waiting, dropped } = &mut self.departures;
        waiting.push_back(record);
        if waiting.len() > WAITING_MAX {
            waiting.pop_front();
            *dropped += 1;
        }
    }

    /// Adds departures to a queue that is being written: as many as fit its blocks beside the
    /// pages, and as many blocks more as it has itself, where the segment has room for them.
    pub(super) fn add_departures(
        &mut self,
        segments: &mut Segments,
        id: SegmentId,
        queue: &mut Queue,
    ) {
        let waiting = &mut self.departures.waiting;
        let records = queue.records();
        let blocks = records.div_ceil(RECORDS_PER_BLOCK);
        let mut room = blocks * RECORDS_PER_BLOCK - records;
        let more = waiting.len().saturating_sub(room);
        let more = more.div_ceil(RECORDS_PER_BLOCK).min(blocks);
        let more = u32::try_from(more).unwrap_or(0);
        if more > 0 && segments.reserve_blocks(id, more) {
            queue.reserved += more;
            room += more as usize * RECORDS_PER_BLOCK;
        }
        let taken = waiting.drain(..waiting.len().min(room));
        let taken = taken.map(|record| Metadata::new(Content::Record(record), Origin::Store));
        queue.metadata.extend(taken);
    }

    /// Writes every departure that still waits, for a clean close. Returns how many find no room.
    pub(in crate::core) fn write_departures(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
    ) -> usize {
        let mut records = Vec::from(std::mem::take(&mut self.departures.waiting));
        let placed = self.write_all(base, segments, Origin::Store, &records);
        self.departures.waiting.extend(records.drain(placed..));
        self.departures.waiting.len()
    }

    /// Departures of this epoch that are not on the device.
    pub(in crate::core) fn unwritten_departures(&self) -> u64 {
        self.departures.waiting.len() as u64 + self.departures.dropped
    }
}
