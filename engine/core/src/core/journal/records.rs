//! Metadata records: records that are no pages. They are tombstones, namespaces and
//! departures (see [`departures`](super::departures)).
//!
//! A tombstone has a version of its own. It kills every page of its key (or namespace) with an
//! older version, also pages that only a stale copy on disk still holds. So it is written even when
//! the key is not in the index, and reclaim forwards it as long as any segment holds a generation
//! that is older than it.

use larder_format::{RECORDS_PER_BLOCK, Record, Serial};

use super::Journal;
use crate::core::base::{Base, Event};
use crate::core::segments::Segments;
use crate::core::segments::placement::Room;
use crate::core::types::{Fault, RequestId};
use crate::index::{NamespaceSlot, SegmentId};
use crate::planted;

/// Least number of writes that a metadata record gets. On a store of more volumes it gets one more
/// than there are volumes: each failed write costs the segment that it went to, and a device that
/// takes no write must not use up all segments.
const WRITES_MIN: usize = 3;

/// See the module.
#[derive(Debug)]
pub(in crate::core) struct Metadata {
    pub content: Content,
    pub origin: Origin,
    /// Writes of it that have failed.
    failed: usize,
}

#[derive(Clone, Copy, Debug)]
pub(in crate::core) enum Content {
    Record(Record),
    /// The full record of a namespace.
    Namespace(NamespaceSlot),
}

/// Who waits for a metadata record.
#[derive(Clone, Copy, Debug)]
pub(in crate::core) enum Origin {
    Store,
    /// A caller's deletion.
    Request(RequestId),
    /// The victim that reclaim forwards it out of.
    Victim(SegmentId),
}

/// A record that has been written and is not known to be durable: a failed sync may lose it.
#[derive(Debug)]
pub(super) struct Written {
    segment: SegmentId,
    commit: Serial,
    content: Content,
}

impl Metadata {
    pub(in crate::core) fn new(content: Content, origin: Origin) -> Metadata {
        Metadata {
            content,
            origin,
            failed: 0,
        }
    }
}

impl Journal {
    /// Writes the records of a caller's deletion. Returns how many found room: if not all, the
    /// request has failed.
    pub(in crate::core) fn write_request(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        request: RequestId,
        records: &[Record],
    ) -> usize {
        if records.is_empty() {
            base.finish(request, Ok(()));
            return 0;
        }
        let left = self.requests.entry(request).or_insert((0, Serial::ZERO));
        left.0 += records.len();
        let placed = self.write_all(base, segments, Origin::Request(request), records);
        if placed < records.len() {
            self.requests.remove(&request);
            base.finish(request, Err(Fault::NoRoom));
            base.call_reclaim();
        }
        placed
    }

    /// Queues records, as many to a block as it holds. Returns how many found room.
    pub(super) fn write_all(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        origin: Origin,
        records: &[Record],
    ) -> usize {
        let placed = records.iter().take_while(|record| {
            let record = Metadata::new(Content::Record(**record), origin);
            self.queue_anywhere(base, segments, record).is_ok()
        });
        placed.count()
    }

    /// Queues a record in a segment, with descriptor blocks that were reserved there.
    pub(in crate::core) fn queue_record(
        &mut self,
        segment: SegmentId,
        record: Metadata,
        reserved: u32,
    ) {
        let queue = self.queues.entry(segment).or_default();
        queue.namespaces += usize::from(matches!(record.content, Content::Namespace(_)));
        queue.metadata.push(record);
        queue.reserved += reserved;
    }

    /// Queues a record in any segment with room; returns it when there is none.
    #[expect(clippy::result_large_err, reason = "the record is moved either way")]
    pub(in crate::core) fn queue_anywhere(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        record: Metadata,
    ) -> Result<(), Metadata> {
        let is_record = matches!(record.content, Content::Record(_));
        let spare = self.queue_with_spare().filter(|_| is_record);
        let placed = match spare {
            Some(segment) => Some((segment, 0)),
            None => {
                let room = match record.origin {
                    Origin::Request(_) => Room::Puts,
                    Origin::Store => Room::Copies,
                    Origin::Victim(_) => Room::Gaps,
                };
                let placed = segments.place_record(base, room);
                placed.map(|segment| (segment, 1))
            }
        };
        let Some((segment, reserved)) = placed else {
            return Err(record);
        };
        if let Content::Namespace(slot) = record.content {
            base.namespaces.get_mut(slot).home = Some(segment);
        }
        self.queue_record(segment, record, reserved);
        Ok(())
    }

    /// A queue whose reserved blocks have room for one more record.
    fn queue_with_spare(&self) -> Option<SegmentId> {
        let mut queues = self.queues.iter();
        let found = queues.find(|(_, queue)| {
            let blocks = (queue.reserved as usize).saturating_sub(queue.namespaces);
            queue.records() < blocks * RECORDS_PER_BLOCK
        });
        found.map(|(segment, _)| *segment)
    }

    /// Queues a record in any segment with room; fails it when there is none.
    pub(super) fn place_record(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        record: Metadata,
    ) {
        if let Err(record) = self.queue_anywhere(base, segments, record) {
            self.fail_record(base, segments, &record);
        }
    }

    /// The write of a record failed: it is written elsewhere, on another volume where there is one,
    /// or fails.
    pub(super) fn retry_record(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        mut record: Metadata,
    ) {
        if let Content::Record(departure @ (Record::Evict { .. } | Record::Void { .. })) =
            record.content
        {
            self.keep_departure(departure);
            return;
        }
        record.failed += 1;
        if record.failed < WRITES_MIN.max(segments.volumes() + 1) {
            self.place_record(base, segments, record);
        } else {
            self.fail_record(base, segments, &record);
        }
    }

    pub(super) fn record_written(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        record: &Metadata,
        segment: SegmentId,
        commit: Serial,
    ) {
        let weight = match record.content {
            Content::Record(Record::Evict { .. } | Record::Void { .. }) => 0,
            Content::Record(_) => 1,
            Content::Namespace(_) => super::RECORDS,
        };
        if weight > 0 {
            let is_forwarded = matches!(record.origin, Origin::Victim(_));
            segments.get_mut(segment).add_record(weight, is_forwarded);
            self.unsynced.push(Written {
                segment,
                commit,
                content: record.content,
            });
        }
        match record.origin {
            Origin::Store => {}
            Origin::Victim(victim) => {
                segments.forwarded(victim, segment, commit);
                segments.get_mut(victim).end_forwarding(true);
                base.announce(Event::Forwarded(victim));
            }
            Origin::Request(request) => {
                if let Some(commit) = self.count_written(request, commit) {
                    base.announce(Event::RequestWritten(request, commit));
                }
            }
        }
    }

    /// One record of a request is written. If it was the last: the highest commit of all of them.
    fn count_written(&mut self, request: RequestId, commit: Serial) -> Option<Serial> {
        let (left, highest) = self.requests.get_mut(&request)?;
        *left -= 1;
        *highest = commit.max(*highest);
        if *left > 0 {
            return None;
        }
        self.requests.remove(&request).map(|(_, highest)| highest)
    }

    pub(super) fn fail_record(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        record: &Metadata,
    ) {
        if let Content::Namespace(slot) = record.content {
            base.namespaces.get_mut(slot).home = None;
        }
        match record.origin {
            Origin::Store => {}
            // Later records of the request end silently.
            Origin::Request(request) => {
                if self.requests.remove(&request).is_some() {
                    base.finish(request, Err(Fault::Write));
                }
            }
            Origin::Victim(id) => {
                segments.get_mut(id).end_forwarding(false);
                base.announce(Event::Forwarded(id));
            }
        }
    }

    // ---- records that a failed sync may lose

    /// Everything up to `synced` is durable.
    pub(in crate::core) fn forget_synced(&mut self, synced: Serial) {
        self.unsynced.retain(|written| written.commit > synced);
    }

    /// Records that were written into `segment` and may have been lost by a failed sync.
    pub(in crate::core) fn unsynced_in(&self, segment: SegmentId) -> Vec<Content> {
        let there = |written: &&Written| written.segment == segment && !planted!(ForgottenNotes);
        let there = self.unsynced.iter().filter(there);
        there.map(|written| written.content).collect()
    }

    /// Every record of `segment` has been written elsewhere.
    pub(in crate::core) fn forget_in(&mut self, segment: SegmentId) {
        self.unsynced.retain(|written| written.segment != segment);
    }

    // ---- namespaces

    /// Queues the full record of a namespace. Without room it stays unwritten until there is some:
    /// pages do not need it.
    pub(in crate::core) fn write_namespace(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        slot: NamespaceSlot,
    ) {
        let record = Metadata::new(Content::Namespace(slot), Origin::Store);
        // Refused: the namespace has no home until `write_homeless` finds one.
        let _ = self.queue_anywhere(base, segments, record);
    }

    /// Writes the namespaces that found no room before.
    pub(in crate::core) fn write_homeless(&mut self, base: &mut Base, segments: &mut Segments) {
        let all = base.namespaces.iter();
        let homeless = all.filter(|(_, state)| state.home.is_none() && state.record.is_some());
        let homeless: Vec<NamespaceSlot> = homeless.map(|(slot, _)| slot).collect();
        for slot in homeless {
            if base.is_wanted(slot) {
                self.write_namespace(base, segments, slot);
            }
        }
    }
}
