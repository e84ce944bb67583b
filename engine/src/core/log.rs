//! The log: descriptors are gathered into groups, a group is written as blocks, a page whose descriptor and bytes are both
//! on the device becomes visible.
//!
//! While a few groups are in flight later descriptors gather for the next one, so that many small puts share
//! blocks and a lone put waits for nobody. A group has one commit number; it is *complete* when each of its block
//! writes is answered and each of its pages is settled. Syncs cover complete groups only.

use std::collections::{BTreeMap, HashMap};

use larder_format::{
    BLOCK_BYTES, BlockHeader, Body, DescriptorBlock, PageRecord, RECORDS_PER_BLOCK, Record,
    SegmentNo, SegmentState, Serial,
};

use super::evictions::Evictions;
use super::holds::Holds;
use super::segment::Hole;
use super::{Core, Effect, Io, IoId, RequestId, SyncPolicy, Ticket, Waiter};
use crate::catalog::ReservationId;
use crate::index::SegmentId;
use crate::memory::AlignedBuf;
use crate::planted;

/// Records a descriptor block holds.
pub(super) const RECORDS: u32 = RECORDS_PER_BLOCK as u32;

/// Groups in flight at once. Deep enough to keep a device busy, shallow enough that descriptors gather.
const GROUPS_MAX: usize = 8;

/// Descriptor blocks in flight at once. A crash leaves holes of at most this many blocks among written ones; recovery looks
/// further than that past the last block it finds.
pub(crate) const BLOCKS_IN_FLIGHT_MAX: u32 = 512;

/// Least number of writes that a record which is no page is given. On a store of more volumes there is one more than volumes: each
/// write that fails costs the segment that it went to, so a device that takes none may not be asked until nothing is left.
const NOTE_WRITES_MIN: usize = 3;

/// A record that is no page.
#[derive(Debug)]
pub(super) struct Note {
    pub body: NoteBody,
    /// Who is told when it is written.
    pub teller: Teller,
    /// Writes of it that have failed.
    pub failed: usize,
}

impl Note {
    pub(super) fn new(body: NoteBody, teller: Teller) -> Note {
        Note {
            body,
            teller,
            failed: 0,
        }
    }
}

/// Who waits for a note.
#[derive(Clone, Copy, Debug)]
pub(super) enum Teller {
    Nobody,
    /// A caller's deletion.
    Request(RequestId),
    /// The segment that reclaim carries it out of.
    Victim(SegmentId),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum NoteBody {
    Record(Record),
    /// The full record of a namespace, by its slot.
    Namespace(u16),
}

/// A note that has been written and is not known to be durable: a failed sync may lose it.
#[derive(Debug)]
struct Written {
    segment: SegmentId,
    commit: Serial,
    body: NoteBody,
}

/// Descriptors waiting for a group, all of one segment.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pages: Vec<Ticket>,
    notes: Vec<Note>,
    /// Of these, those of namespaces.
    namespaces: usize,
    /// Descriptor blocks promised to them.
    pub credits: u32,
}

impl Queue {
    /// Records that it takes up in blocks: a namespace has a block of its own.
    pub(super) fn records(&self) -> usize {
        self.pages.len() + self.notes.len() - self.namespaces
    }

    /// Leaves so many records, which fill their blocks; all else, namespaces too, fits what is left of the promise.
    fn split_off(&mut self, records: usize) -> Queue {
        let pages = self.pages.split_off(records.min(self.pages.len()));
        let mut room = records - self.pages.len();
        let mut stays = |note: &Note| {
            let stays = room > 0 && matches!(note.body, NoteBody::Record(_));
            room -= usize::from(stays);
            stays
        };
        let (notes, later) = std::mem::take(&mut self.notes)
            .into_iter()
            .partition(&mut stays);
        self.notes = notes;
        let blocks = u32::try_from(records / RECORDS_PER_BLOCK).unwrap_or(u32::MAX);
        let credits = self.credits.saturating_sub(blocks);
        self.credits -= credits;
        Queue {
            pages,
            notes: later,
            namespaces: std::mem::take(&mut self.namespaces),
            credits,
        }
    }
}

/// One write of neighbouring descriptor blocks.
#[derive(Debug)]
pub(super) struct BlockWrite {
    commit: Serial,
    pub segment: SegmentId,
    /// The commit of what was written before it into this segment.
    behind: Serial,
    /// Number of its first block.
    first: u32,
    blocks: u32,
    pages: Vec<Ticket>,
    notes: Vec<Note>,
}

#[derive(Debug)]
pub(super) enum IoContext {
    Blocks(BlockWrite),
    /// Empty blocks, behind this commit.
    Fill(SegmentId, Serial),
    Header(SegmentId, SegmentState),
    Sync(usize),
    /// So many blocks of zeros.
    Probe(usize, u32),
}

#[derive(Debug)]
pub(super) struct Log {
    /// The last serial drawn.
    serial: Serial,
    /// The last commit number drawn.
    pub last_commit: Serial,
    queues: BTreeMap<SegmentId, Queue>,
    /// What each incomplete group still waits for: block writes and pages.
    groups: BTreeMap<Serial, usize>,
    /// Groups that wait for nothing but a header: how many parts of each. They do not keep others from being written.
    held: Holds,
    blocks_in_flight: u32,
    ios: HashMap<IoId, IoContext>,
    next_io: u64,
    /// Pages whose bytes and descriptor are on the device, to be published together.
    pub ready: Vec<Ticket>,
    /// Such pages in segments whose first header is still being written.
    pub unopened: Vec<Ticket>,
    pub evictions: Evictions,
    /// Requests waiting for notes: how many are left, and the highest commit of those that are written.
    requests: BTreeMap<RequestId, (usize, Serial)>,
    /// Notes written into segments whose headers do not tell of them yet: ones that are just being opened, and sealed ones.
    unlisted_notes: BTreeMap<SegmentId, Vec<(Note, Serial)>>,
    /// Groups with blocks in such segments, a group for each block write.
    unlisted_blocks: BTreeMap<SegmentId, Vec<Serial>>,
    /// Notes that no sync has covered yet.
    unsynced_notes: Vec<Written>,
}

impl Log {
    pub(super) fn new(first: Serial) -> Log {
        Log {
            serial: first,
            last_commit: first,
            queues: BTreeMap::new(),
            groups: BTreeMap::new(),
            held: Holds::default(),
            blocks_in_flight: 0,
            ios: HashMap::new(),
            next_io: 0,
            ready: Vec::new(),
            unopened: Vec::new(),
            evictions: Evictions::default(),
            requests: BTreeMap::new(),
            unlisted_notes: BTreeMap::new(),
            unlisted_blocks: BTreeMap::new(),
            unsynced_notes: Vec::new(),
        }
    }

    /// Draws the next serial; `None` when this run has used all of its own.
    pub(super) fn next_serial(&mut self) -> Option<Serial> {
        self.serial = self.serial.next()?;
        Some(self.serial)
    }

    pub(super) fn io(&mut self, context: IoContext) -> IoId {
        let id = IoId(self.next_io);
        self.next_io += 1;
        self.ios.insert(id, context);
        id
    }

    pub(super) fn take_io(&mut self, id: IoId) -> Option<IoContext> {
        self.ios.remove(&id)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.ios.is_empty() && self.queues.is_empty() && self.groups.is_empty()
    }

    /// `parts` of what a group waits for are over.
    pub(super) fn resolve(&mut self, commit: Serial, parts: usize) {
        if let Some(left) = self.groups.get_mut(&commit) {
            *left -= parts;
            if *left == 0 {
                self.groups.remove(&commit);
            }
        }
    }

    /// Every group up to this one is complete.
    pub(super) fn complete_through(&self) -> Serial {
        match self.groups.first_key_value() {
            Some((lowest, _)) => Serial::from_raw(lowest.get().saturating_sub(1)),
            None => self.last_commit,
        }
    }

    /// Whether descriptors of this segment wait for a group.
    pub(super) fn has_queued(&self, segment: SegmentId) -> bool {
        self.queues.contains_key(&segment)
    }

    /// It has blocks that a header has to list.
    pub(super) fn is_unlisted(&self, segment: SegmentId) -> bool {
        self.unlisted_blocks.contains_key(&segment)
    }

    /// A queue whose promised blocks have room for one more record.
    pub(super) fn queue_with_spare(&self) -> Option<SegmentId> {
        let has_spare = |queue: &Queue| {
            let blocks = (queue.credits as usize).saturating_sub(queue.namespaces);
            queue.records() < blocks * RECORDS_PER_BLOCK
        };
        let found = self.queues.iter().find(|(_, queue)| has_spare(queue));
        found.map(|(segment, _)| *segment)
    }

    pub(super) fn queue_note(&mut self, segment: SegmentId, note: Note, credits: u32) {
        let queue = self.queues.entry(segment).or_default();
        queue.namespaces += usize::from(matches!(note.body, NoteBody::Namespace(_)));
        queue.notes.push(note);
        queue.credits += credits;
    }

    pub(super) fn expect_notes(&mut self, request: RequestId, notes: usize) {
        self.requests.entry(request).or_insert((0, Serial::ZERO)).0 += notes;
    }

    /// One note of a request is written. When it was the last: the highest commit of all of them.
    fn note_written(&mut self, request: RequestId, commit: Serial) -> Option<Serial> {
        let (left, highest) = self.requests.get_mut(&request)?;
        *left -= 1;
        *highest = commit.max(*highest);
        if *left > 0 {
            return None;
        }
        self.requests.remove(&request).map(|(_, highest)| highest)
    }

    /// Everything up to `synced` is durable.
    pub(super) fn forget_synced_notes(&mut self, synced: Serial) {
        self.unsynced_notes.retain(|note| note.commit > synced);
    }

    /// What was written into `segment` and may have been lost by a failed sync.
    pub(super) fn unsynced_notes_in(&self, segment: SegmentId) -> Vec<NoteBody> {
        let there = |note: &&Written| note.segment == segment && !planted!(ForgottenNotes);
        self.unsynced_notes
            .iter()
            .filter(there)
            .map(|note| note.body)
            .collect()
    }

    /// Everything that lay in `segment` has been written elsewhere.
    pub(super) fn forget_notes_in(&mut self, segment: SegmentId) {
        self.unsynced_notes.retain(|note| note.segment != segment);
    }

    /// A request failed: later notes of it tell nobody.
    pub(super) fn drop_request(&mut self, request: RequestId) -> bool {
        self.requests.remove(&request).is_some()
    }
}

impl Core {
    /// Hands over the checksums of a reservation's pages, by their position in the asks; `None` gives a page up.
    pub fn commit(&mut self, id: ReservationId, checksums: &[Option<u64>]) {
        let Some(reservation) = self.reservations.get_mut(&id) else {
            return;
        };
        let tickets = reservation.tickets.clone();
        let runs = std::mem::take(&mut reservation.runs);
        for run in runs {
            let queue = self.log.queues.entry(run.segment).or_default();
            queue.credits += run.credits;
            queue.pages.reserve(run.records as usize);
        }
        let mut given_up = Vec::new();
        for (index, ticket) in tickets.into_iter().enumerate() {
            let Some(ticket) = ticket else { continue };
            let Some(page) = self.pending.get_mut(ticket) else {
                continue;
            };
            match checksums.get(index).copied().flatten() {
                Some(checksum) if !page.spoiled => {
                    page.checksum = checksum;
                    let queue = self.log.queues.entry(page.place.segment).or_default();
                    queue.pages.push(ticket);
                }
                _ => {
                    page.written = Some(false);
                    given_up.push(ticket);
                }
            }
        }
        for ticket in given_up {
            self.settle(ticket);
        }
        self.pump();
    }

    pub(super) fn pump_groups(&mut self) {
        while !self.log.queues.is_empty()
            && self.log.groups.len() < GROUPS_MAX + self.log.held.len()
            && self.log.blocks_in_flight < BLOCKS_IN_FLIGHT_MAX
        {
            let Some(commit) = self.log.next_serial() else {
                self.fail_queued();
                return;
            };
            self.write_group(commit);
        }
    }

    /// Writes all that is queued, as far as the limit on blocks in flight allows, as one group.
    fn write_group(&mut self, commit: Serial) {
        let segments: Vec<SegmentId> = self.log.queues.keys().copied().collect();
        let mut parts = 0;
        for segment in segments {
            if self.log.blocks_in_flight >= BLOCKS_IN_FLIGHT_MAX {
                break;
            }
            let Some(queue) = self.log.queues.remove(&segment) else {
                continue;
            };
            parts += self.write_queue(commit, segment, queue);
        }
        if parts > 0 {
            self.log.last_commit = commit;
            self.log.groups.insert(commit, parts);
        }
    }

    /// Writes one segment's queue; returns how many parts it adds to the group.
    fn write_queue(&mut self, commit: Serial, id: SegmentId, mut queue: Queue) -> usize {
        let allowed =
            (BLOCKS_IN_FLIGHT_MAX - self.log.blocks_in_flight) as usize * RECORDS_PER_BLOCK;
        if queue.records() > allowed {
            let rest = queue.split_off(allowed);
            self.log.queues.insert(id, rest);
        }
        let evictions = self.evictions_for(id, &mut queue);
        let bodies = self.bodies(&queue, evictions);
        let blocks = u32::try_from(bodies.len()).unwrap_or(u32::MAX);
        let segment = self.space.segment_mut(id);
        assert!(
            blocks <= queue.credits,
            "more descriptor blocks than were promised"
        );
        segment.credits -= queue.credits;
        if bodies.is_empty() {
            self.drain(id);
            return 0;
        }
        let first = segment.blocks;
        segment.blocks += blocks;
        segment.writing += 1;
        let behind = std::mem::replace(&mut segment.last_commit, commit);
        if segment.first_commit == Serial::ZERO {
            segment.first_commit = commit;
        }
        let Some(bytes) = self.encode_blocks(commit, id, first, bodies) else {
            let write = BlockWrite {
                commit,
                segment: id,
                behind,
                first,
                blocks,
                pages: queue.pages,
                notes: queue.notes,
            };
            self.log.blocks_in_flight += blocks;
            self.blocks_done(write, false);
            return 0;
        };
        for &ticket in &queue.pages {
            self.pending[ticket].commit = Some(commit);
        }
        let parts = queue.pages.len() + 1;
        self.log.blocks_in_flight += blocks;
        self.counters.blocks_written += u64::from(blocks);
        let write = BlockWrite {
            commit,
            segment: id,
            behind,
            first,
            blocks,
            pages: queue.pages,
            notes: queue.notes,
        };
        self.write_blocks(id, first + blocks, bytes, IoContext::Blocks(write));
        parts
    }

    /// Writes descriptor blocks of a segment, of which the last is the one before number `end`.
    fn write_blocks(&mut self, id: SegmentId, end: u32, bytes: AlignedBuf, context: IoContext) {
        // Block `i` lies `i + 1` blocks before the segment's end, so that a group's last block comes first.
        let place = u64::from(self.config.segment_blocks - end) * BLOCK_BYTES as u64;
        let offset = self.space.offset_of(id) + place;
        let volume = self.space.volume_of(id);
        let io = self.log.io(context);
        self.effects.push(Effect::Io {
            id: io,
            volume,
            io: Io::Write { offset, bytes },
        });
    }

    fn bodies(&self, queue: &Queue, evictions: Vec<Record>) -> Vec<Body> {
        let pages = queue
            .pages
            .iter()
            .map(|&ticket| Record::Page(self.record(ticket)));
        let notes = queue.notes.iter().filter_map(|note| match &note.body {
            NoteBody::Record(record) => Some(*record),
            NoteBody::Namespace(_) => None,
        });
        let mut records = pages.chain(notes).chain(evictions);
        let block = || {
            let mut block = Vec::with_capacity(RECORDS_PER_BLOCK);
            block.extend(records.by_ref().take(RECORDS_PER_BLOCK));
            block
        };
        let blocks = std::iter::repeat_with(block).take_while(|block| !block.is_empty());
        let mut bodies: Vec<Body> = blocks.map(Body::Records).collect();
        for note in &queue.notes {
            if let NoteBody::Namespace(slot) = note.body
                && let Some(record) = &self.namespaces[slot as usize].record
            {
                bodies.push(Body::Namespace(record.clone()));
            }
        }
        bodies
    }

    fn record(&self, ticket: Ticket) -> PageRecord {
        let page = &self.pending[ticket];
        PageRecord {
            namespace: self.namespaces[page.namespace.0 as usize].fingerprint,
            key: page.key,
            parent: page.parent,
            depth: page.depth,
            birth: page.birth,
            start: page.place.start,
            blocks: page.blocks,
            checksum: page.checksum,
        }
    }

    fn encode_blocks(
        &self,
        commit: Serial,
        id: SegmentId,
        first: u32,
        bodies: Vec<Body>,
    ) -> Option<AlignedBuf> {
        let mut bytes = AlignedBuf::zeroed(bodies.len() * BLOCK_BYTES).ok()?;
        let data_end = self.space.segment(id).data_end;
        let sequence = self.space.segment(id).sequence;
        for ((body, out), index) in bodies
            .into_iter()
            .zip(bytes.rchunks_exact_mut(BLOCK_BYTES))
            .zip(first..)
        {
            let header = BlockHeader {
                store: self.config.store,
                volume: u16::try_from(self.space.volume_of(id)).unwrap_or(u16::MAX),
                segment: SegmentNo(self.space.number_of(id)),
                sequence,
                index,
                commit,
                data_end,
                // A block's mark is below its own commit.
                synced: Some(self.syncs.mark)
                    .filter(|mark| *mark < commit)
                    .unwrap_or(Serial::ZERO),
            };
            let out: &mut [u8; BLOCK_BYTES] = out.try_into().ok()?;
            DescriptorBlock { header, body }.encode(out);
        }
        Some(bytes)
    }

    pub(super) fn blocks_done(&mut self, write: BlockWrite, good: bool) {
        let BlockWrite {
            commit,
            segment,
            behind,
            first,
            blocks,
            pages,
            notes,
        } = write;
        self.log.blocks_in_flight -= blocks;
        self.space.segment_mut(segment).writing -= 1;
        self.mark_dirty(segment, good);
        if !good {
            let place = self.space.segment_mut(segment);
            if place.extended {
                // No header lists it.
                place.vouch_no_further(behind);
            } else {
                place.holes.push(Hole {
                    first,
                    blocks,
                    commit,
                    behind,
                });
            }
            self.poison(segment);
        }
        for ticket in pages {
            if let Some(page) = self.pending.get_mut(ticket) {
                page.written = Some(good);
                self.settle(ticket);
            }
        }
        let extends = good && self.space.segment(segment).extended;
        let waits = good && self.space.segment(segment).opening;
        let is_found = good && !self.space.segment(segment).headless;
        for note in notes {
            if extends || waits {
                let unlisted = self.log.unlisted_notes.entry(segment).or_default();
                unlisted.push((note, commit));
            } else if is_found {
                self.finish_note(&note, segment, commit);
            } else {
                self.retry_note(note);
            }
        }
        if extends || waits {
            // A sync that does not cover the header does not make sure that recovery finds this block.
            self.log.held.hold(commit);
            let unlisted = self.log.unlisted_blocks.entry(segment).or_default();
            unlisted.push(commit);
        } else {
            self.log.resolve(commit, 1);
        }
        self.drain(segment);
    }

    /// Writes empty blocks where descriptor writes failed, once in all: a header that vouches for what lies behind would call a hole
    /// damage. Whether there was something to write.
    pub(super) fn fill_holes(&mut self, id: SegmentId) -> bool {
        let holes = std::mem::take(&mut self.space.segment_mut(id).holes);
        let mut any = false;
        for hole in holes {
            let bodies = vec![Body::Records(Vec::new()); hole.blocks as usize];
            let Some(bytes) = self.encode_blocks(hole.commit, id, hole.first, bodies) else {
                self.space.segment_mut(id).vouch_no_further(hole.behind);
                continue;
            };
            self.space.segment_mut(id).writing += 1;
            self.counters.blocks_written += u64::from(hole.blocks);
            let context = IoContext::Fill(id, hole.behind);
            self.write_blocks(id, hole.first + hole.blocks, bytes, context);
            any = true;
        }
        any
    }

    /// A hole is filled, or cannot be.
    pub(super) fn hole_filled(&mut self, id: SegmentId, behind: Serial, good: bool) {
        self.mark_dirty(id, good);
        let segment = self.space.segment_mut(id);
        segment.writing -= 1;
        if !good {
            segment.vouch_no_further(behind);
        }
        self.drain(id);
    }

    /// The header that a segment's blocks and notes waited for is written, or its write failed.
    pub(super) fn finish_unlisted(&mut self, segment: SegmentId, good: bool) {
        let notes = self.log.unlisted_notes.remove(&segment);
        for (note, commit) in notes.into_iter().flatten() {
            if good {
                self.finish_note(&note, segment, commit);
            } else {
                self.retry_note(note);
            }
        }
        let blocks = self.log.unlisted_blocks.remove(&segment);
        for commit in blocks.into_iter().flatten() {
            self.log.held.let_go(commit);
            self.log.resolve(commit, 1);
        }
    }

    /// A note's write failed: it is written elsewhere, on another volume where there is one, or given up.
    fn retry_note(&mut self, mut note: Note) {
        note.failed += 1;
        if note.failed < NOTE_WRITES_MIN.max(self.space.volumes.len() + 1) {
            self.replace_note(note);
        } else {
            self.fail_note(&note);
        }
    }

    fn finish_note(&mut self, note: &Note, segment: SegmentId, commit: Serial) {
        if !matches!(note.body, NoteBody::Record(Record::Evict { .. })) {
            let records = match note.body {
                NoteBody::Namespace(_) => RECORDS_PER_BLOCK,
                NoteBody::Record(_) => 1,
            };
            let place = self.space.segment_mut(segment);
            let records = u32::try_from(records).unwrap_or(u32::MAX);
            place.notes = place.notes.saturating_add(records);
            place.is_carried_to |= matches!(note.teller, Teller::Victim(_));
            self.log.unsynced_notes.push(Written {
                segment,
                commit,
                body: note.body,
            });
        }
        let request = match note.teller {
            Teller::Nobody => return,
            Teller::Victim(victim) => {
                self.carried_out(victim, segment, commit);
                self.space.segment_mut(victim).carrying -= 1;
                self.release_when_carried(victim);
                return;
            }
            Teller::Request(request) => request,
        };
        let Some(commit) = self.log.note_written(request, commit) else {
            return;
        };
        if self.config.sync == SyncPolicy::Always {
            self.wait_for_sync(commit, Waiter::Request(request));
        } else {
            // Only now: a sync that began while it was being written does not cover it.
            self.note_unsynced();
            self.effects.push(Effect::Finished(request, Ok(())));
        }
    }

    /// Takes a failed segment's queue apart: pages fail, notes go elsewhere.
    pub(super) fn respool(&mut self, id: SegmentId) {
        let Some(queue) = self.log.queues.remove(&id) else {
            return;
        };
        self.space.segment_mut(id).credits -= queue.credits;
        for ticket in queue.pages {
            self.pending[ticket].written = Some(false);
            self.settle(ticket);
        }
        for note in queue.notes {
            self.replace_note(note);
        }
    }

    /// No serial is left in this run: what is queued cannot be written.
    fn fail_queued(&mut self) {
        let segments: Vec<SegmentId> = self.log.queues.keys().copied().collect();
        for id in segments {
            if let Some(queue) = self.log.queues.remove(&id) {
                self.space.segment_mut(id).credits -= queue.credits;
                for ticket in queue.pages {
                    self.pending[ticket].written = Some(false);
                    self.settle(ticket);
                }
                for note in queue.notes {
                    self.fail_note(&note);
                }
            }
        }
    }
}
