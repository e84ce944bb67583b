//! Evictions are written down: a crash must not bring an evicted page back in place of a page that
//! was kept.
//!
//! They wait for room in blocks that are written anyway, and for spare room of a segment; a clean
//! close writes the rest. A lost eviction costs no page: an evicted page may come back.

use std::collections::VecDeque;

use larder_format::{RECORDS_PER_BLOCK, Record};

use super::records::Origin;
use super::{Journal, Queue};
use crate::core::base::Base;
use crate::core::segments::Segments;
use crate::index::SegmentId;

/// Evictions that wait to be written. Beyond that the oldest are dropped, and their pages may come
/// back after a crash.
const EVICTIONS_MAX: usize = 1 << 16;

/// Evictions that are not written yet, oldest first.
#[derive(Debug, Default)]
pub(super) struct Evictions(VecDeque<Record>);

impl Journal {
    /// Writes an eviction (again) with a later group.
    pub(in crate::core) fn keep_eviction(&mut self, record: Record) {
        let Evictions(waiting) = &mut self.evictions;
        waiting.push_back(record);
        if waiting.len() > EVICTIONS_MAX {
            waiting.pop_front();
        }
    }

    /// The evictions to write with a queue: as many as fit its blocks beside the pages, and as many
    /// blocks more as it has itself, where the segment has room for them.
    pub(super) fn evictions_for(
        &mut self,
        segments: &mut Segments,
        id: SegmentId,
        queue: &mut Queue,
    ) -> Vec<Record> {
        let Evictions(waiting) = &mut self.evictions;
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
        waiting.drain(..waiting.len().min(room)).collect()
    }

    /// Writes every eviction that still waits, for a clean close. Returns how many find no room.
    pub(in crate::core) fn write_evictions(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
    ) -> usize {
        let mut records = Vec::from(std::mem::take(&mut self.evictions.0));
        let placed = self.write_all(base, segments, Origin::Store, &records);
        self.evictions.0.extend(records.drain(placed..));
        self.evictions.0.len()
    }
}
