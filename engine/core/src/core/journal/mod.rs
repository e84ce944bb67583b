//! The journal: descriptors are gathered into groups, and a group is written as blocks.
//!
//! While a few groups are in flight, later descriptors gather for the next one: many small puts
//! share blocks, and a lone put waits for no other. A group has one commit number. It is *complete*
//! when each of its block writes is answered and each of its pages is published or failed. Under
//! `always` the statuses come later, after a sync. Syncs cover complete groups only.
//!
//! The journal knows commits and records. A page is a [`Ticket`] to it: the rooms above learn from
//! events which tickets were grouped and described.
//!
//! | module | decides |
//! |---|---|
//! | `departures` | when evictions and failed puts are written down |
//! | `records` | the writes of records that are no pages |
//! | `holds` | (commits that are held back) |

mod departures;
pub(super) mod holds;
pub(super) mod records;

use std::collections::{BTreeMap, HashMap};

use larder_base::failure::DiskError;
use larder_base::memory::AlignedBuf;
use larder_format::{
    BLOCK_BYTES, BlockHeader, Body, DescriptorBlock, PageRecord, RECORDS_PER_BLOCK, Record,
    SegmentNo, Serial,
};

use super::base::{Base, Event, IoContext, Ticket};
use super::segments::Segments;
use super::segments::segment::Hole;
use super::types::{IoId, RequestId};
use crate::index::{NamespaceSlot, SegmentId};
use departures::Departures;
use holds::Holds;
use records::{Content, Metadata, Written};

/// Records that a descriptor block holds.
pub(super) const RECORDS: u32 = RECORDS_PER_BLOCK as u32;

/// Groups in flight at once. Deep enough to keep a device busy, shallow enough that descriptors
/// gather.
const GROUPS_MAX: usize = 8;

/// Descriptor blocks in flight at once. A crash leaves holes of at most this many blocks among
/// written ones; recovery looks further than that past the last block it finds.
pub const BLOCKS_IN_FLIGHT_MAX: u32 = 512;

/// Descriptors that wait for a group, all of one segment.
#[derive(Debug, Default)]
struct Queue {
    pages: Vec<(Ticket, PageRecord)>,
    metadata: Vec<Metadata>,
    /// Namespace records among the metadata.
    namespaces: usize,
    /// Descriptor blocks reserved for them.
    reserved: u32,
}

impl Queue {
    /// Records that share blocks: a namespace has a block of its own.
    fn records(&self) -> usize {
        self.pages.len() + self.metadata.len() - self.namespaces
    }

    /// Leaves so many records, which fill their blocks. All other descriptors, namespaces too, fit
    /// the rest of the reserved blocks.
    fn split_off(&mut self, records: usize) -> Queue {
        let pages = self.pages.split_off(records.min(self.pages.len()));
        let mut room = records - self.pages.len();
        let mut stays = |record: &Metadata| {
            let stays = room > 0 && matches!(record.content, Content::Record(_));
            room -= usize::from(stays);
            stays
        };
        let (metadata, later) = std::mem::take(&mut self.metadata)
            .into_iter()
            .partition(&mut stays);
        self.metadata = metadata;
        let blocks = u32::try_from(records / RECORDS_PER_BLOCK).unwrap_or(u32::MAX);
        let reserved = self.reserved.saturating_sub(blocks);
        self.reserved -= reserved;
        Queue {
            pages,
            metadata: later,
            namespaces: std::mem::take(&mut self.namespaces),
            reserved,
        }
    }

    fn tickets(&self) -> Vec<Ticket> {
        self.pages.iter().map(|(ticket, _)| *ticket).collect()
    }
}

/// One write of neighbouring descriptor blocks.
#[derive(Debug)]
struct BlockWrite {
    segment: SegmentId,
    hole: Hole,
    queue: Queue,
}

#[derive(Debug)]
enum Flight {
    Blocks(BlockWrite),
    /// Empty blocks in place of blocks whose write failed, behind this commit.
    Fill(SegmentId, Serial),
}

impl Flight {
    fn segment(&self) -> SegmentId {
        match self {
            Flight::Blocks(write) => write.segment,
            Flight::Fill(segment, _) => *segment,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Journal {
    /// The last commit number drawn.
    last_commit: Serial,
    queues: BTreeMap<SegmentId, Queue>,
    /// Open parts of each incomplete group: block writes and pages.
    groups: BTreeMap<Serial, usize>,
    /// Groups that wait for nothing but a header. They do not keep others from being written.
    held: Holds,
    flights: HashMap<IoId, Flight>,
    blocks_in_flight: u32,
    departures: Departures,
    /// Requests that wait for records: how many are left, and the highest commit of the others.
    requests: BTreeMap<RequestId, (usize, Serial)>,
    /// Records in blocks that no header lists yet: of segments that are being opened, and of
    /// sealed ones.
    unlisted_records: BTreeMap<SegmentId, Vec<(Metadata, Serial)>>,
    /// Groups with such blocks, one entry for each block write.
    unlisted_blocks: BTreeMap<SegmentId, Vec<Serial>>,
    /// Written records that no sync has covered yet.
    unsynced: Vec<Written>,
}

impl Journal {
    pub(super) fn new(first: Serial) -> Journal {
        Journal {
            last_commit: first,
            queues: BTreeMap::new(),
            groups: BTreeMap::new(),
            held: Holds::default(),
            flights: HashMap::new(),
            blocks_in_flight: 0,
            departures: Departures::default(),
            requests: BTreeMap::new(),
            unlisted_records: BTreeMap::new(),
            unlisted_blocks: BTreeMap::new(),
            unsynced: Vec::new(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queues.is_empty() && self.groups.is_empty()
    }

    pub(super) fn last_commit(&self) -> Serial {
        self.last_commit
    }

    /// Every group up to this one is complete.
    pub(super) fn complete_through(&self) -> Serial {
        match self.groups.first_key_value() {
            Some((lowest, _)) => Serial::from_raw(lowest.get().saturating_sub(1)),
            None => self.last_commit,
        }
    }

    /// One part of a group has ended.
    pub(super) fn resolve(&mut self, commit: Serial) {
        if let Some(left) = self.groups.get_mut(&commit) {
            *left -= 1;
            if *left == 0 {
                self.groups.remove(&commit);
            }
        }
    }

    /// Whether descriptors of this segment wait for a group.
    pub(super) fn has_queued(&self, segment: SegmentId) -> bool {
        self.queues.contains_key(&segment)
    }

    /// Whether a segment has blocks that a header has to list.
    pub(super) fn is_unlisted(&self, segment: SegmentId) -> bool {
        self.unlisted_blocks.contains_key(&segment)
    }

    /// Hands over descriptor blocks that were reserved for pages of a segment.
    pub(super) fn add_reserved(&mut self, segment: SegmentId, blocks: u32, pages: u32) {
        let queue = self.queues.entry(segment).or_default();
        queue.reserved += blocks;
        queue.pages.reserve(pages as usize);
    }

    pub(super) fn queue_page(&mut self, segment: SegmentId, ticket: Ticket, record: PageRecord) {
        let queue = self.queues.entry(segment).or_default();
        queue.pages.push((ticket, record));
    }

    /// Forms groups, as far as the limits allow.
    pub(super) fn pump(&mut self, base: &mut Base, segments: &mut Segments) {
        while !self.queues.is_empty()
            && self.groups.len() < GROUPS_MAX + self.held.len()
            && self.blocks_in_flight < BLOCKS_IN_FLIGHT_MAX
        {
            match base.next_serial() {
                Some(commit) => self.write_group(base, segments, commit),
                None => self.fail_queued(base, segments),
            }
        }
    }

    /// Writes everything that is queued as one group, as far as the limit on blocks in flight
    /// allows.
    fn write_group(&mut self, base: &mut Base, segments: &mut Segments, commit: Serial) {
        let queued: Vec<SegmentId> = self.queues.keys().copied().collect();
        let mut parts = 0;
        for id in queued {
            if self.blocks_in_flight >= BLOCKS_IN_FLIGHT_MAX {
                break;
            }
            if let Some(queue) = self.queues.remove(&id) {
                parts += self.write_queue(base, segments, commit, id, queue);
            }
        }
        if parts > 0 {
            self.last_commit = commit;
            self.groups.insert(commit, parts);
        }
    }

    /// Writes the queue of one segment; the parts that it adds to the group.
    fn write_queue(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        commit: Serial,
        id: SegmentId,
        mut queue: Queue,
    ) -> usize {
        let allowed = (BLOCKS_IN_FLIGHT_MAX - self.blocks_in_flight) as usize * RECORDS_PER_BLOCK;
        if queue.records() > allowed {
            let rest = queue.split_off(allowed);
            self.queues.insert(id, rest);
        }
        self.add_departures(segments, id, &mut queue);
        let bodies = bodies(base, &queue);
        let blocks = u32::try_from(bodies.len()).unwrap_or(u32::MAX);
        assert!(
            blocks <= queue.reserved,
            "more descriptor blocks than were reserved"
        );
        let segment = segments.get_mut(id);
        segment.end_reservation(queue.reserved);
        if bodies.is_empty() {
            base.announce(Event::Drain(id));
            return 0;
        }
        let hole = segment.begin_blocks(blocks, commit);
        self.blocks_in_flight += blocks;
        let (tickets, parts) = (queue.tickets(), queue.pages.len() + 1);
        let write = BlockWrite {
            segment: id,
            hole,
            queue,
        };
        let Some(bytes) = encode_blocks(base, segments, id, &hole, bodies) else {
            self.blocks_done(base, segments, write, false);
            return 0;
        };
        base.announce(Event::Grouped(tickets, commit));
        self.write_blocks(base, segments, &hole, bytes, Flight::Blocks(write));
        parts
    }

    /// Writes descriptor blocks of a segment.
    fn write_blocks(
        &mut self,
        base: &mut Base,
        segments: &Segments,
        blocks: &Hole,
        bytes: AlignedBuf,
        flight: Flight,
    ) {
        let id = flight.segment();
        // Block `i` lies `i + 1` blocks before the segment's end: the last block of a group comes
        // first.
        let end = blocks.first + blocks.blocks;
        let place = u64::from(segments.segment_blocks() - end) * BLOCK_BYTES as u64;
        let (volume, offset) = (segments.volume_of(id), segments.offset_of(id) + place);
        base.counters.store.written.descriptors_bytes +=
            u64::from(blocks.blocks) * BLOCK_BYTES as u64;
        let io = base.write(volume, offset, bytes, IoContext::Blocks);
        self.flights.insert(io, flight);
    }

    /// A write of this room is answered.
    pub(super) fn done(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        io: IoId,
        result: Result<(), DiskError>,
    ) {
        let good = result.is_ok();
        let Some(flight) = self.flights.remove(&io) else {
            return;
        };
        if let Err(error) = result {
            segments.write_refused(base, flight.segment(), Some(error));
        }
        match flight {
            Flight::Blocks(write) => self.blocks_done(base, segments, write, good),
            Flight::Fill(id, behind) => {
                segments.mark_dirty(id, good);
                segments.get_mut(id).end_filling(behind, good);
                base.announce(Event::Drain(id));
            }
        }
    }

    fn blocks_done(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        write: BlockWrite,
        good: bool,
    ) {
        let BlockWrite {
            segment: id,
            hole,
            queue,
        } = write;
        let commit = hole.commit;
        self.blocks_in_flight -= hole.blocks;
        segments.mark_dirty(id, good);
        segments.get_mut(id).end_blocks(hole, good);
        if !good {
            let is_first = segments.poison(id);
            base.announce(Event::Poison(id, is_first));
        }
        base.announce(Event::Described(queue.tickets(), good));
        let segment = segments.get(id);
        let is_unlisted = good && (segment.is_extended() || segment.is_opening());
        let is_found = good && !segment.is_headless();
        for record in queue.metadata {
            if is_unlisted {
                let unlisted = self.unlisted_records.entry(id).or_default();
                unlisted.push((record, commit));
            } else if is_found {
                self.record_written(base, segments, &record, id, commit);
            } else {
                self.retry_record(base, segments, record);
            }
        }
        if is_unlisted {
            // A sync that does not cover the header does not ensure that recovery finds this block.
            self.held.hold(commit);
            self.unlisted_blocks.entry(id).or_default().push(commit);
        } else {
            self.resolve(commit);
        }
        base.announce(Event::Drain(id));
    }

    /// Writes empty blocks where descriptor writes failed, once each: otherwise a header that
    /// proves the blocks behind a hole would make the hole look like damage. Returns whether there
    /// was something to write.
    pub(super) fn fill_holes(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        id: SegmentId,
    ) -> bool {
        let mut any = false;
        for hole in segments.get_mut(id).begin_filling() {
            let bodies = vec![Body::Records(Vec::new()); hole.blocks as usize];
            let Some(bytes) = encode_blocks(base, segments, id, &hole, bodies) else {
                segments.get_mut(id).end_filling(hole.behind, false);
                continue;
            };
            let flight = Flight::Fill(id, hole.behind);
            self.write_blocks(base, segments, &hole, bytes, flight);
            any = true;
        }
        any
    }

    /// The header that a segment's unlisted blocks and records waited for is written, or its write
    /// failed.
    pub(super) fn header_written(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        id: SegmentId,
        good: bool,
    ) {
        let records = self.unlisted_records.remove(&id);
        for (record, commit) in records.into_iter().flatten() {
            if good {
                self.record_written(base, segments, &record, id, commit);
            } else {
                self.retry_record(base, segments, record);
            }
        }
        let blocks = self.unlisted_blocks.remove(&id);
        for commit in blocks.into_iter().flatten() {
            self.held.let_go(commit);
            self.resolve(commit);
        }
    }

    /// Takes the queue of a failed segment apart: its pages fail, its records go elsewhere.
    pub(super) fn respool(&mut self, base: &mut Base, segments: &mut Segments, id: SegmentId) {
        if let Some(queue) = self.take_queue(base, segments, id) {
            for record in queue {
                self.place_record(base, segments, record);
            }
        }
    }

    /// No serial is left in this epoch: the queued descriptors cannot be written.
    fn fail_queued(&mut self, base: &mut Base, segments: &mut Segments) {
        let queued: Vec<SegmentId> = self.queues.keys().copied().collect();
        for id in queued {
            let records = self.take_queue(base, segments, id);
            for record in records.into_iter().flatten() {
                self.fail_record(base, segments, &record);
            }
        }
    }

    /// Takes a queue back and fails its pages; its records that are no pages.
    fn take_queue(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        id: SegmentId,
    ) -> Option<Vec<Metadata>> {
        let queue = self.queues.remove(&id)?;
        segments.get_mut(id).end_reservation(queue.reserved);
        base.announce(Event::Described(queue.tickets(), false));
        Some(queue.metadata)
    }
}

fn bodies(base: &Base, queue: &Queue) -> Vec<Body> {
    let pages = queue.pages.iter().map(|(_, record)| Record::Page(*record));
    let metadata = queue.metadata.iter();
    let metadata = metadata.filter_map(|record| match &record.content {
        Content::Record(record) => Some(*record),
        Content::Namespace(_) => None,
    });
    let mut records = pages.chain(metadata);
    let block = || {
        let mut block = Vec::with_capacity(RECORDS_PER_BLOCK);
        block.extend(records.by_ref().take(RECORDS_PER_BLOCK));
        block
    };
    let blocks = std::iter::repeat_with(block).take_while(|block| !block.is_empty());
    let mut bodies: Vec<Body> = blocks.map(Body::Records).collect();
    for record in &queue.metadata {
        if let Content::Namespace(NamespaceSlot(slot)) = record.content
            && let Some(record) = base.namespaces.record_of(slot)
        {
            bodies.push(Body::Namespace(record.clone()));
        }
    }
    bodies
}

fn encode_blocks(
    base: &Base,
    segments: &Segments,
    id: SegmentId,
    place: &Hole,
    bodies: Vec<Body>,
) -> Option<AlignedBuf> {
    let mut bytes = AlignedBuf::zeroed(bodies.len() * BLOCK_BYTES).ok()?;
    let segment = segments.get(id);
    let blocks = bytes.rchunks_exact_mut(BLOCK_BYTES);
    for ((body, out), index) in bodies.into_iter().zip(blocks).zip(place.first..) {
        let header = BlockHeader {
            store: base.config.store,
            volume: segments.volume_number(id),
            segment: SegmentNo(segments.number_of(id)),
            sequence: segment.generation(),
            index,
            commit: place.commit,
            data_end: segment.data_end(),
            // The watermark of a block is below its own commit.
            synced: Some(base.marks.durable)
                .filter(|mark| *mark < place.commit)
                .unwrap_or(Serial::ZERO),
        };
        let out: &mut [u8; BLOCK_BYTES] = out.try_into().ok()?;
        DescriptorBlock { header, body }.encode(out);
    }
    Some(bytes)
}
