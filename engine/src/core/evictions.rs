//! Evictions are written down: a crash must not bring an evicted page back in place of one that was kept.
//!
//! They wait for room in blocks that are written anyway, and for spare room of a segment; a clean close writes the rest.
//! What is lost of them costs no page: one that was evicted may come back.

use std::collections::VecDeque;

use larder_format::{KeyPrefix, RECORDS_PER_BLOCK, Record, SegmentNo, Serial};

use super::Core;
use super::log::{Note, NoteBody, Queue, Teller};
use crate::index::{NamespaceSlot, SegmentId};
use crate::planted;

/// Evictions that wait to be written down; past that the oldest are let go, and may come back after a crash.
const EVICTIONS_MAX: usize = 1 << 16;

/// Evictions that are not written down yet, oldest first.
#[derive(Debug, Default)]
pub(super) struct Evictions(VecDeque<Record>);

impl Evictions {
    /// Has an eviction written down (again) with a later group.
    pub(super) fn keep(&mut self, record: Record) {
        self.0.push_back(record);
        if self.0.len() > EVICTIONS_MAX {
            self.0.pop_front();
        }
    }
}

impl Core {
    /// Remembers that a page left `segment`, so that a crash does not bring it back in place of pages that were kept. Written
    /// down when a group has room for it.
    pub(super) fn log_eviction(
        &mut self,
        namespace: NamespaceSlot,
        key: KeyPrefix,
        segment: SegmentId,
    ) {
        // A put of the same key that is under way was born after the page that leaves, and must stay.
        let put = self.in_flight.get(&(namespace, key));
        let birth = match put {
            Some(&ticket) => Some(self.pending[ticket].birth),
            None => self.log.next_serial(),
        };
        if let Some(birth) = birth {
            self.log_eviction_born(namespace, key, segment, birth);
        }
    }

    pub(super) fn log_eviction_born(
        &mut self,
        namespace: NamespaceSlot,
        key: KeyPrefix,
        segment: SegmentId,
        birth: Serial,
    ) {
        let record = Record::Evict {
            namespace: self.namespaces[namespace.0 as usize].fingerprint,
            key,
            birth,
            volume: u16::try_from(self.space.volume_of(segment)).unwrap_or(u16::MAX),
            segment: SegmentNo(self.space.number_of(segment)),
            sequence: self.space.segment(segment).sequence,
        };
        if !planted!(UnwrittenEviction) {
            self.log.evictions.keep(record);
        }
    }

    /// The evictions to write with a queue: as many as fit its blocks beside the pages, and as many blocks more as it has
    /// itself, where the segment has room for them.
    pub(super) fn evictions_for(&mut self, id: SegmentId, queue: &mut Queue) -> Vec<Record> {
        let records = queue.records();
        let blocks = records.div_ceil(RECORDS_PER_BLOCK);
        let waiting = self.log.evictions.0.len();
        let mut room = blocks * RECORDS_PER_BLOCK - records;
        let more = waiting
            .saturating_sub(room)
            .div_ceil(RECORDS_PER_BLOCK)
            .min(blocks);
        let more = u32::try_from(more).unwrap_or(0);
        if more > 0 && self.space.promise_blocks(id, more) {
            queue.credits += more;
            room += more as usize * RECORDS_PER_BLOCK;
        }
        self.log.evictions.0.drain(..waiting.min(room)).collect()
    }

    /// Writes down every eviction that still waits, for a clean close. Returns how many find no room: they go on waiting.
    pub fn write_evictions(&mut self) -> usize {
        let records = Vec::from(std::mem::take(&mut self.log.evictions.0));
        let mut left = records.len();
        for chunk in records.chunks(RECORDS_PER_BLOCK) {
            let Some(segment) = self.place_note(1) else {
                self.log
                    .evictions
                    .0
                    .extend(&records[records.len() - left..]);
                break;
            };
            left -= chunk.len();
            let mut credit = 1;
            for record in chunk {
                let note = Note::new(NoteBody::Record(*record), Teller::Nobody);
                self.log.queue_note(segment, note, credit);
                credit = 0;
            }
        }
        self.pump();
        left
    }
}
