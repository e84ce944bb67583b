//! Space: the volumes' segments, which of them take new pages, and how full each is.
//!
//! Invariants: data and descriptor blocks never meet (`data_end + blocks + credits <= segment_blocks`, where a credit is a
//! descriptor block promised to pages that have been given extents); the last free segments are kept for copies and
//! records, so that reclaim can always go on; `live` counts exactly the blocks of indexed pages.

use std::collections::VecDeque;

use larder_format::{HEADER_BLOCKS, Serial};

use super::segment::{STREAMS, Segment, State, Stream};
use super::service::{Probe, Service};
use crate::index::{Place, SegmentId};

/// Bytes of a put that go to one volume before the next one gets its turn: long enough that a chain's neighbours are
/// neighbours on disk, short enough that a large put uses every volume.
pub(crate) const RUN_BYTES: u64 = 4 << 20;

/// Free segments that only copies and records may use.
const FREE_KEPT_FOR_COPIES: usize = 1;

#[derive(Debug)]
pub(crate) struct VolumeSpace {
    /// Store-wide number of its first segment.
    pub base: u32,
    pub segments: u32,
    /// Written to since its last good sync.
    pub dirty: bool,
    pub service: Service,
    /// Usable blocks that its indexed pages take.
    taken_blocks: u64,
    free: VecDeque<SegmentId>,
    /// How many from the front on are not to be lent: they were, or were used.
    unlendable: usize,
    open: [Option<SegmentId>; STREAMS],
}

/// All segments of the store.
#[derive(Debug)]
pub(crate) struct Space {
    pub segment_blocks: u32,
    pub volumes: Vec<VolumeSpace>,
    segments: Vec<Segment>,
    /// How many of them are on volumes that are there.
    pub segments_there: usize,
    /// Most blocks of pages kept at once.
    pub usable_blocks: u64,
    /// The same when no segment is stranded.
    pub usable_blocks_max: u64,
    /// Most blocks of pages kept at once on volumes that take writes.
    usable_blocks_writable: u64,
    /// Volumes and segments that this counts on.
    counted: (usize, u64),
    /// How many segments are stranded.
    pub stranded: u64,
    pub live_blocks: u64,
    /// Blocks given to pages that are not settled yet.
    pub reserved_blocks: u64,
    /// What both take of the usable blocks: their footprints.
    pub taken_blocks: u64,
    /// A sealed segment lost its last page: it can be given back at no cost.
    pub some_died: bool,
    /// Those on their way back: emptied, or being released.
    coming: Vec<SegmentId>,
    /// Those that are shunned, and some that no longer are.
    shunned: Vec<SegmentId>,
    turn: usize,
    turn_left: u64,
}

/// How many blocks of pages a store of this geometry keeps at most: 87.5 % of the room of all segments, and always less than
/// all by those that are open and those that reclaim keeps free. The rest is what reclaim works with: the less there
/// is, the more it copies. The figures are in the module documentation of `reclaim`.
#[must_use]
pub fn usable_blocks(segments: u64, volumes: usize, segment_blocks: u32) -> u64 {
    let room = u64::from(segment_blocks.saturating_sub(HEADER_BLOCKS));
    let share = segments.saturating_mul(room) / 8 * 7;
    share.min(
        segments
            .saturating_sub(kept_back(volumes))
            .saturating_mul(room),
    )
}

/// Blocks that a page takes of the usable ones: its own, and its share of a segment's end in which no page more of its size fits. Counted
/// by their own blocks alone, pages of more than a third of a segment would never reach the limit, and fill all segments before.
#[must_use]
pub fn footprint(segment_blocks: u32, page_blocks: u32) -> u64 {
    let room = segment_blocks.saturating_sub(HEADER_BLOCKS);
    // One block at least tells of them.
    let fitting = room.saturating_sub(1).checked_div(page_blocks);
    fitting.map_or(0, |pages| u64::from(room / pages.max(1)))
}

/// Fewest segments that a store on this many volumes works with.
#[must_use]
pub fn segments_min(volumes: usize) -> u64 {
    kept_back(volumes) + 2
}

/// Segments that may be partly filled or free at any moment: the open ones of each volume and two free ones.
fn kept_back(volumes: usize) -> u64 {
    (STREAMS * volumes) as u64 + 2
}

impl VolumeSpace {
    /// The free segment that is opened next.
    fn pop_free(&mut self) -> Option<SegmentId> {
        let id = self.free.pop_front()?;
        self.unlendable = self.unlendable.saturating_sub(1);
        Some(id)
    }
}

impl Space {
    /// `volumes` are the segment counts; `segments` the state of each, in the order of the volumes.
    pub(crate) fn new(segment_blocks: u32, volumes: &[u32], segments: Vec<Segment>) -> Space {
        let mut base = 0;
        let mut spaces = Vec::with_capacity(volumes.len());
        for &count in volumes {
            spaces.push(VolumeSpace {
                base,
                segments: count,
                dirty: false,
                service: Service::ReadWrite,
                taken_blocks: 0,
                free: VecDeque::new(),
                unlendable: 0,
                open: [None; STREAMS],
            });
            base += count;
        }
        let present = segments
            .iter()
            .filter(|segment| !matches!(segment.state, State::Lost | State::Unreadable))
            .count();
        let is_there = |volume: &&VolumeSpace| {
            let range = volume.base as usize..(volume.base + volume.segments) as usize;
            let own = segments.get(range).unwrap_or_default();
            own.iter().any(|segment| segment.state != State::Lost)
        };
        let volumes_there = spaces.iter().filter(is_there).count();
        let lost = |segment: &&Segment| segment.state == State::Lost;
        let segments_there = segments.len() - segments.iter().filter(lost).count();
        let usable = usable_blocks(present as u64, volumes_there, segment_blocks);
        let mut space = Space {
            segment_blocks,
            volumes: spaces,
            usable_blocks: usable,
            usable_blocks_max: usable,
            usable_blocks_writable: usable,
            counted: (volumes_there, present as u64),
            stranded: 0,
            live_blocks: 0,
            reserved_blocks: 0,
            taken_blocks: 0,
            segments_there,
            segments,
            some_died: false,
            coming: Vec::new(),
            shunned: Vec::new(),
            turn: 0,
            turn_left: RUN_BYTES,
        };
        space.list();
        space
    }

    /// Fills the lists of free and open segments from the segments' states.
    fn list(&mut self) {
        for index in 0..self.segments.len() {
            let id = SegmentId(u32::try_from(index).unwrap_or(u32::MAX));
            let volume = self.volume_of(id);
            match self.segments[index].state {
                State::Free => self.volumes[volume].free.push_back(id),
                State::Open(stream) => {
                    let slot = &mut self.volumes[volume].open[stream as usize];
                    assert!(
                        slot.is_none(),
                        "two open segments for one purpose on one volume"
                    );
                    *slot = Some(id);
                }
                _ => {}
            }
        }
        for volume in &mut self.volumes {
            // Oldest life first, so that wear spreads over the volume.
            volume
                .free
                .make_contiguous()
                .sort_by_key(|id| self.segments[id.0 as usize].sequence);
        }
    }

    pub(crate) fn segment(&self, id: SegmentId) -> &Segment {
        &self.segments[id.0 as usize]
    }

    pub(crate) fn segment_mut(&mut self, id: SegmentId) -> &mut Segment {
        &mut self.segments[id.0 as usize]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        self.segments
            .iter()
            .enumerate()
            .map(|(index, segment)| (SegmentId(u32::try_from(index).unwrap_or(u32::MAX)), segment))
    }

    pub(crate) fn volume_of(&self, id: SegmentId) -> usize {
        self.volumes
            .partition_point(|volume| volume.base + volume.segments <= id.0)
    }

    /// The segment's number within its volume.
    pub(crate) fn number_of(&self, id: SegmentId) -> u32 {
        id.0 - self.volumes[self.volume_of(id)].base
    }

    /// The segment of a number on a volume; `None` when there is none.
    pub(crate) fn id_of(&self, volume: usize, number: u32) -> Option<SegmentId> {
        let volume = self.volumes.get(volume)?;
        (number < volume.segments).then(|| SegmentId(volume.base + number))
    }

    /// Whether a volume is gone for good.
    pub(crate) fn is_lost(&self, volume: usize) -> bool {
        let first = SegmentId(self.volumes[volume].base);
        self.segment(first).state == State::Lost
    }

    /// Byte offset of a segment in its volume.
    pub(crate) fn offset_of(&self, id: SegmentId) -> u64 {
        let bytes = u64::from(self.segment_blocks) * larder_format::BLOCK_BYTES as u64;
        larder_format::SEGMENTS_OFFSET + u64::from(self.number_of(id)) * bytes
    }

    /// Free segments of volumes that take writes.
    pub(crate) fn free_segments(&self) -> usize {
        self.writable().map(|volume| volume.free.len()).sum()
    }

    /// Free segments of all volumes.
    pub(crate) fn free_segments_of_all(&self) -> usize {
        let free = |volume: &VolumeSpace| volume.free.len() + volume.service.segments_probed();
        self.volumes.iter().map(free).sum()
    }

    fn writable(&self) -> impl Iterator<Item = &VolumeSpace> {
        self.volumes
            .iter()
            .filter(|volume| !volume.service.is_read_only())
    }

    /// Whether some volume is not in read-only service.
    pub(crate) fn takes_writes(&self) -> bool {
        self.writable().next().is_some()
    }

    /// Whether the volume of this segment may reuse the room of an evicted page.
    pub(crate) fn may_evict(&self, id: SegmentId) -> bool {
        self.volumes[self.volume_of(id)].service.is_read_write()
    }

    pub(crate) fn may_evict_somewhere(&self) -> bool {
        self.volumes
            .iter()
            .any(|volume| volume.service.is_read_write())
    }

    /// Whether the volume of this segment is in read-only service.
    pub(crate) fn is_read_only(&self, id: SegmentId) -> bool {
        self.volumes[self.volume_of(id)].service.is_read_only()
    }

    /// The probe of a volume. It holds a free segment, which is in no list, where there is one.
    pub(crate) fn probe_on(&mut self, volume: usize) -> Option<&mut Probe> {
        let volume = &mut self.volumes[volume];
        if volume.service.probe()?.segment.is_none() {
            volume.service.probe()?.segment = volume.pop_free();
        }
        volume.service.probe()
    }

    /// Blocks of a segment that pages can use.
    pub(crate) fn data_blocks(&self) -> u64 {
        u64::from(self.segment_blocks.saturating_sub(HEADER_BLOCKS))
    }

    /// Blocks of a segment that its life has never used.
    pub(crate) fn unused_blocks(&self, id: SegmentId) -> u64 {
        let segment = self.segment(id);
        let used = segment.data_end + segment.blocks;
        u64::from(self.segment_blocks.saturating_sub(used))
    }

    /// Finds room for a page of `data` blocks; `holds_credit` tells whether a descriptor of this reservation in a segment
    /// still fits a descriptor block already promised to it. Segments that turn out full are closed and new ones opened:
    /// both are reported in `changed`.
    pub(crate) fn place_page(
        &mut self,
        stream: Stream,
        data: u32,
        holds_credit: impl Fn(SegmentId) -> bool,
        serials: &mut impl FnMut() -> Option<Serial>,
        changed: &mut Changed,
    ) -> Option<(Place, bool)> {
        let bytes = u64::from(data) * larder_format::BLOCK_BYTES as u64;
        if self.turn_left < bytes {
            self.turn = (self.turn + 1) % self.volumes.len();
            self.turn_left = RUN_BYTES.max(bytes);
        }
        for step in 0..self.volumes.len() {
            let volume = (self.turn + step) % self.volumes.len();
            let need = |id: SegmentId| if holds_credit(id) { 0 } else { 1 };
            let Some(id) = self.open_with_room(volume, stream, data, need, serials, changed) else {
                continue;
            };
            let credit = need(id);
            let segment = self.segment_mut(id);
            let place = Place {
                segment: id,
                start: segment.data_end,
            };
            segment.data_end += data;
            segment.credits += credit;
            segment.pending += 1;
            self.reserved_blocks += u64::from(data);
            self.taken_blocks += self.footprint(data);
            self.turn_left = self.turn_left.saturating_sub(bytes);
            return Some((place, credit == 1));
        }
        None
    }

    /// A write into this segment failed: what comes next goes to the volume behind its own, that written again first of all.
    pub(crate) fn turn_from(&mut self, id: SegmentId) {
        self.turn = (self.volume_of(id) + 1) % self.volumes.len();
        self.turn_left = RUN_BYTES;
    }

    /// Finds room for `descriptors` descriptor blocks that carry no pages, and promises them.
    pub(crate) fn place_records(
        &mut self,
        descriptors: u32,
        serials: &mut impl FnMut() -> Option<Serial>,
        changed: &mut Changed,
    ) -> Option<SegmentId> {
        let volumes = self.volumes.len();
        for stream in [Stream::Put, Stream::Copy] {
            for step in 0..volumes {
                let volume = (self.turn + step) % volumes;
                if let Some(id) =
                    self.open_with_room(volume, stream, 0, |_| descriptors, serials, changed)
                {
                    self.segment_mut(id).credits += descriptors;
                    return Some(id);
                }
            }
        }
        None
    }

    /// A page that was given an extent is settled.
    pub(crate) fn drop_reserved(&mut self, blocks: u32) {
        self.reserved_blocks -= u64::from(blocks);
        self.taken_blocks -= self.footprint(blocks);
    }

    /// Whether a page more fits under the limit: that of the store, and that of the volumes that
    /// take writes.
    pub(crate) fn has_room(&self, blocks: u32) -> bool {
        let read_only = self
            .volumes
            .iter()
            .filter(|volume| volume.service.is_read_only());
        let elsewhere: u64 = read_only.map(|volume| volume.taken_blocks).sum();
        let taken = self.taken_blocks + self.footprint(blocks);
        taken <= self.usable_blocks && taken - elsewhere <= self.usable_blocks_writable
    }

    pub(crate) fn footprint(&self, blocks: u32) -> u64 {
        footprint(self.segment_blocks, blocks)
    }

    /// Whether an open segment takes so many blocks of copies and their descriptors, without a free one.
    pub(crate) fn copies_fit(&self, blocks: u32) -> bool {
        let open = |volume: &VolumeSpace| volume.open[Stream::Copy as usize];
        let mut open = self.writable().filter_map(open);
        open.any(|id| self.segment(id).room_for(self.segment_blocks, blocks, 0))
    }

    /// Promises further descriptor blocks of a segment that has records to write; false when it has no room for them.
    pub(crate) fn promise_blocks(&mut self, id: SegmentId, blocks: u32) -> bool {
        let segment_blocks = self.segment_blocks;
        let segment = self.segment_mut(id);
        let fits = segment.room_for(segment_blocks, 0, blocks);
        if fits {
            segment.credits += blocks;
        }
        fits
    }

    /// The last resort for records: the gap that a sealed segment has left between data and descriptors.
    pub(crate) fn extend_sealed(&mut self, descriptors: u32) -> Option<SegmentId> {
        let segment_blocks = self.segment_blocks;
        let (id, _) = self
            .iter()
            .filter(|(id, s)| {
                let takes = s.state == State::Sealed || s.extended && s.state == State::Draining;
                !s.suspect
                    && takes
                    && s.room_for(segment_blocks, 0, descriptors)
                    && !self.is_read_only(*id)
            })
            // One that takes records already; else the one that stays longest. One that has failed before may fail again.
            .max_by_key(|(_, s)| (!s.poisoned, s.extended, s.live))?;
        let segment = self.segment_mut(id);
        segment.state = State::Draining;
        segment.extended = true;
        segment.credits += descriptors;
        Some(id)
    }

    /// After a failed sync: nothing carried out of any segment since `synced` is certain.
    pub(crate) fn doubt_carried(&mut self, synced: Serial) {
        for segment in &mut self.segments {
            segment.carried_to_suspect |= segment.carried > synced || segment.carrying > 0;
        }
    }

    /// There is room again: what reclaim got nowhere with for lack of it is worth another try.
    pub(crate) fn welcome(&mut self) {
        let segments = &mut self.segments;
        self.shunned.retain(|id| {
            let segment = &mut segments[id.0 as usize];
            segment.shunned &= segment.stranded;
            segment.shunned
        });
    }

    /// Time has passed: what the device did not give it may give now. That is seen by one segment of each volume.
    pub(crate) fn welcome_after_a_while(&mut self) {
        self.welcome();
        let mut shunned = std::mem::take(&mut self.shunned);
        for id in self.take_first_of_each(&mut shunned) {
            self.segment_mut(id).shunned = false;
        }
        self.shunned = shunned;
    }

    /// A volume gives what it did not give before.
    pub(crate) fn welcome_stranded(&mut self, volume: usize) {
        let shunned = std::mem::take(&mut self.shunned);
        let is_there = |id: &SegmentId| self.volume_of(*id) == volume;
        let (welcome, shunned): (Vec<_>, Vec<_>) = shunned.into_iter().partition(is_there);
        self.shunned = shunned;
        for id in welcome {
            self.segment_mut(id).shunned = false;
        }
    }

    /// Takes the first segment of each volume out of a list.
    pub(crate) fn take_first_of_each(&self, list: &mut Vec<SegmentId>) -> Vec<SegmentId> {
        let mut taken = vec![false; self.volumes.len()];
        let is_first =
            |id: &mut SegmentId| !std::mem::replace(&mut taken[self.volume_of(*id)], true);
        list.extract_if(.., is_first).collect()
    }

    /// A victim has been emptied: it is on its way back.
    pub(crate) fn empty(&mut self, id: SegmentId) {
        self.coming.push(id);
        let segment = self.segment_mut(id);
        segment.state = State::Emptied;
        segment.rewritten = true;
    }

    /// Whether a segment could not be given back, since its free header could not be written, or not be emptied, since its descriptors
    /// could not be read. One that is stranded may be so for good: it is not waited for, and the store keeps as much less as if it had
    /// never been. Else what is left would be full of live pages, and nothing in it worth reclaiming.
    ///
    /// Whether that is new.
    pub(crate) fn strand(&mut self, id: SegmentId, stranded: bool) -> bool {
        if std::mem::replace(&mut self.segment_mut(id).stranded, stranded) == stranded {
            return false;
        }
        if stranded {
            self.stranded += 1;
        } else {
            self.stranded -= 1;
        }
        self.recount();
        true
    }

    /// The limits, after a segment was stranded, or a volume changed its service.
    pub(crate) fn recount(&mut self) {
        let (volumes, segments) = self.counted;
        let left = segments.saturating_sub(self.stranded);
        self.usable_blocks = usable_blocks(left, volumes, self.segment_blocks);
        let is_there =
            |s: &Segment| !s.stranded && !matches!(s.state, State::Lost | State::Unreadable);
        let read_only = self
            .volumes
            .iter()
            .filter(|volume| volume.service.is_read_only());
        let (mut gone, mut gone_segments) = (0, 0);
        for volume in read_only {
            let range = volume.base as usize..(volume.base + volume.segments) as usize;
            let own = self.segments.get(range).unwrap_or_default();
            gone += 1;
            gone_segments += own.iter().filter(|segment| is_there(segment)).count() as u64;
        }
        let (volumes, left) = (
            volumes.saturating_sub(gone),
            left.saturating_sub(gone_segments),
        );
        self.usable_blocks_writable = usable_blocks(left, volumes, self.segment_blocks);
    }

    /// Takes the segments of a volume out of a list.
    pub(crate) fn extract_on(&self, volume: usize, list: &mut Vec<SegmentId>) -> Vec<SegmentId> {
        list.extract_if(.., |id| self.volume_of(*id) == volume)
            .collect()
    }

    /// A victim that could not be emptied, or not be given back, is what it was until there is more room.
    pub(crate) fn put_back(&mut self, id: SegmentId) {
        self.coming.retain(|other| *other != id);
        self.shunned.push(id);
        let segment = self.segment_mut(id);
        segment.shunned = true;
        segment.state = match segment.free_as {
            Some(_) => State::Unreadable,
            None => State::Sealed,
        };
    }

    /// Those on their way back.
    pub(crate) fn coming(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        self.coming.iter().map(|id| (*id, self.segment(*id)))
    }

    fn open_with_room(
        &mut self,
        volume: usize,
        stream: Stream,
        data: u32,
        descriptors: impl Fn(SegmentId) -> u32,
        serials: &mut impl FnMut() -> Option<Serial>,
        changed: &mut Changed,
    ) -> Option<SegmentId> {
        if self.volumes[volume].service.is_read_only() {
            return None;
        }
        let slot = stream as usize;
        if let Some(id) = self.volumes[volume].open[slot] {
            if self
                .segment(id)
                .room_for(self.segment_blocks, data, descriptors(id))
            {
                return Some(id);
            }
            if !self.may_open(volume, stream) {
                return None;
            }
            self.close(id);
            changed.closed.push(id);
        }
        if !self.may_open(volume, stream) {
            return None;
        }
        let sequence = serials()?;
        let id = self.volumes[volume].pop_free()?;
        self.segment_mut(id).begin(sequence, stream);
        self.volumes[volume].open[slot] = Some(id);
        changed.opened.push(id);
        self.welcome();
        let fits = self
            .segment(id)
            .room_for(self.segment_blocks, data, descriptors(id));
        fits.then_some(id)
    }

    fn may_open(&self, volume: usize, stream: Stream) -> bool {
        let kept = if stream == Stream::Put {
            FREE_KEPT_FOR_COPIES
        } else {
            0
        };
        !self.volumes[volume].free.is_empty() && self.free_segments() > kept
    }

    /// Of the open segments of a volume the one with the most room takes copies.
    pub(crate) fn open_for_copies(&mut self) {
        let (put, copy) = (Stream::Put as usize, Stream::Copy as usize);
        for volume in 0..self.volumes.len() {
            let open = self.volumes[volume].open;
            let room = |id: Option<SegmentId>| id.map(|id| self.unused_blocks(id));
            if room(open[put]) <= room(open[copy]) {
                continue;
            }
            self.volumes[volume].open.swap(put, copy);
            for (stream, id) in [(Stream::Copy, open[put]), (Stream::Put, open[copy])] {
                if let Some(id) = id {
                    self.segment_mut(id).state = State::Open(stream);
                }
            }
        }
    }

    /// Takes no more pages into an open segment.
    pub(crate) fn close(&mut self, id: SegmentId) {
        let volume = self.volume_of(id);
        for slot in &mut self.volumes[volume].open {
            if *slot == Some(id) {
                *slot = None;
            }
        }
        self.segment_mut(id).state = State::Draining;
    }

    /// Gives a released segment back. Its life stays on disk until the next one begins.
    pub(crate) fn release(&mut self, id: SegmentId) {
        let segment = self.segment(id);
        let sequence = segment.free_as.unwrap_or(segment.sequence);
        *self.segment_mut(id) = Segment::free(sequence);
        self.coming.retain(|other| *other != id);
        self.welcome();
        let volume = self.volume_of(id);
        self.volumes[volume].free.push_back(id);
    }

    /// Takes the first segment that was never used, and never lent, out of the lists of free ones.
    pub(crate) fn lend_unused(&mut self) -> Option<SegmentId> {
        let segments = &self.segments;
        let is_unused = |id: &SegmentId| {
            let segment = &segments[id.0 as usize];
            segment.sequence == Serial::ZERO && !segment.lent
        };
        let takes_writes = |volume: &&mut VolumeSpace| !volume.service.is_read_only();
        let id = self
            .volumes
            .iter_mut()
            .filter(takes_writes)
            .find_map(|volume| {
                let from = volume.unlendable;
                let place = volume.free.range(from..).position(is_unused);
                volume.unlendable = place.map_or(volume.free.len(), |place| from + place);
                volume.free.remove(volume.unlendable)
            })?;
        self.segment_mut(id).lent = true;
        Some(id)
    }

    /// Puts a lent segment back, to be opened next.
    pub(crate) fn take_back(&mut self, id: SegmentId) {
        let volume = self.volume_of(id);
        let volume = &mut self.volumes[volume];
        volume.free.push_front(id);
        volume.unlendable += 1;
    }

    pub(crate) fn add_live(&mut self, id: SegmentId, blocks: u32) {
        self.segment_mut(id).live += u64::from(blocks);
        self.live_blocks += u64::from(blocks);
        let taken = self.footprint(blocks);
        let volume = self.volume_of(id);
        self.volumes[volume].taken_blocks += taken;
        self.taken_blocks += taken;
    }

    pub(crate) fn drop_live(&mut self, id: SegmentId, blocks: u32) {
        let segment = self.segment_mut(id);
        segment.live = segment
            .live
            .checked_sub(u64::from(blocks))
            .expect("a page left a segment that did not count it");
        let died = segment.live == 0 && segment.state == State::Sealed;
        self.some_died |= died;
        self.live_blocks -= u64::from(blocks);
        let taken = self.footprint(blocks);
        let volume = self.volume_of(id);
        self.volumes[volume].taken_blocks -= taken;
        self.taken_blocks -= taken;
    }

    /// The lists of segments hold those that they are of.
    pub(crate) fn check_lists(&self) -> Result<(), String> {
        for (id, segment) in self.iter() {
            let comes = matches!(segment.state, State::Emptied | State::Releasing);
            let listed = self.coming.iter().filter(|other| **other == id).count();
            if listed != usize::from(comes) {
                return Err(format!(
                    "segment {id:?}: {:?}, and {listed} times among those on their way back",
                    segment.state
                ));
            }
            if segment.shunned && !self.shunned.contains(&id) {
                return Err(format!("segment {id:?}: shunned for good"));
            }
        }
        let stranded = self.segments.iter().filter(|s| s.stranded).count() as u64;
        if stranded != self.stranded {
            return Err(format!("{stranded} stranded, {} counted", self.stranded));
        }
        Ok(())
    }

    /// The oldest life that the next open may find, in free segments too: what is on disk, and what a power loss brings back.
    /// Commits up to `synced` are durable.
    pub(crate) fn oldest_life(&self, synced: Serial) -> Option<Serial> {
        let present = self.segments.iter().filter(|s| s.state != State::Lost);
        let life = |s: &Segment| {
            let is_durable = s.first_commit > Serial::ZERO && s.first_commit <= synced;
            match s.state {
                // Nothing is known of it: any.
                State::Unreadable if s.sequence == Serial::ZERO => Some(Serial::ZERO),
                _ if s.former > Serial::ZERO && !is_durable => Some(s.former),
                _ => Some(s.sequence).filter(|life| *life > Serial::ZERO),
            }
        };
        present.filter_map(life).min()
    }
}

/// Segments that changed while room was sought.
#[derive(Debug, Default)]
pub(crate) struct Changed {
    pub opened: Vec<SegmentId>,
    pub closed: Vec<SegmentId>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn serial(raw: u64) -> Serial {
        Serial::from_raw(raw)
    }

    /// One volume; states and lives.
    fn space(segments: &[(State, u64)]) -> Space {
        let segment = |&(state, life)| Segment {
            state,
            ..Segment::free(serial(life))
        };
        let count = u32::try_from(segments.len()).unwrap();
        Space::new(64, &[count], segments.iter().map(segment).collect())
    }

    #[test]
    fn a_life_counts_until_nothing_can_bring_it_back() {
        let mut space = space(&[(State::Free, 5), (State::Sealed, 9), (State::Lost, 1)]);
        assert_eq!(space.oldest_life(Serial::ZERO), Some(serial(5)));
        space
            .segment_mut(SegmentId(0))
            .begin(serial(20), Stream::Put);
        // Its header may never arrive, and then nor may its first block.
        assert_eq!(space.oldest_life(serial(19)), Some(serial(5)));
        space.segment_mut(SegmentId(0)).first_commit = serial(21);
        assert_eq!(space.oldest_life(serial(20)), Some(serial(5)));
        assert_eq!(space.oldest_life(serial(21)), Some(serial(9)));
    }

    #[test]
    fn copies_go_to_the_open_segment_with_the_most_room() {
        let states = [State::Open(Stream::Put), State::Open(Stream::Copy)];
        for roomy in 0..2 {
            let mut space = space(&states.map(|state| (state, 5)));
            space.segment_mut(SegmentId(1 - roomy)).data_end = 60;
            space.open_for_copies();
            let ids = [1 - roomy, roomy].map(SegmentId);
            assert_eq!(space.volumes[0].open, ids.map(Some));
            assert_eq!(ids.map(|id| space.segment(id).state), states);
        }
        let mut space = space(&[(states[0], 5)]);
        space.open_for_copies();
        assert_eq!(space.volumes[0].open, [None, Some(SegmentId(0))]);
    }

    #[test]
    fn a_segment_of_which_nothing_could_be_read_may_hold_any_life() {
        let known = space(&[(State::Unreadable, 7), (State::Sealed, 9), (State::Free, 0)]);
        assert_eq!(known.oldest_life(Serial::ZERO), Some(serial(7)));
        let unknown = space(&[(State::Unreadable, 0), (State::Sealed, 9)]);
        assert_eq!(unknown.oldest_life(Serial::ZERO), Some(Serial::ZERO));
    }

    #[test]
    fn volumes_that_are_gone_take_no_room_from_those_that_are_there() {
        let there = (State::Free, 0);
        let gone = (State::Lost, 0);
        let segments: Vec<Segment> = [[there; 6], [gone; 6]]
            .as_flattened()
            .iter()
            .map(|&(state, life)| Segment {
                state,
                ..Segment::free(serial(life))
            })
            .collect();
        let space = Space::new(64, &[6, 6], segments);
        assert_eq!(space.usable_blocks, usable_blocks(6, 1, 64));
        assert!(space.usable_blocks > 0);
    }
}
