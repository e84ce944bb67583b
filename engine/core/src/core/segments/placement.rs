//! Placement: the segment that takes a page, or descriptor blocks of records.

use larder_format::{BLOCK_BYTES, HEADER_BLOCKS, SegmentState};

use super::segment::{Extension, Segment, Stream};
use super::{Segments, Volume};
use crate::core::base::{Base, Event};
use crate::index::{Place, SegmentId};

/// Bytes of a put that go to one volume before the next volume gets its turn: long enough that
/// neighbours in a chain are neighbours on disk, short enough that a large put uses every volume.
pub const RUN_BYTES: u64 = 4 << 20;

/// Free segments that only copies and records may use.
const FREE_KEPT_FOR_COPIES: usize = 1;

/// The room that a record may take. A segment with a tombstone can be emptied only if there is room
/// for the tombstone elsewhere. So only records that reclaim forwards take the last room: if others
/// had taken it, no segment with a tombstone could be emptied any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum Room {
    /// Where puts go.
    Puts,
    /// Also the room that is kept for copies.
    Copies,
    /// Also the gaps of sealed segments.
    Gaps,
}

impl Volume {
    /// The free segment that is opened next.
    pub(super) fn pop_free(&mut self) -> Option<SegmentId> {
        let id = self.free.pop_front()?;
        self.unlendable = self.unlendable.saturating_sub(1);
        Some(id)
    }
}

impl Segments {
    /// Finds room for a page of `data` blocks that was put at `born_ms`. `has_reserved` tells
    /// whether its descriptor fits a descriptor block already reserved in a segment. Returns
    /// whether a block was reserved for it.
    pub(in crate::core) fn place_page(
        &mut self,
        base: &mut Base,
        stream: Stream,
        data: u32,
        born_ms: u64,
        has_reserved: impl Fn(SegmentId) -> bool,
    ) -> Option<(Place, bool)> {
        let bytes = u64::from(data) * BLOCK_BYTES as u64;
        if self.turn_left < bytes {
            self.turn = (self.turn + 1) % self.volumes.len();
            self.turn_left = RUN_BYTES.max(bytes);
        }
        for step in 0..self.volumes.len() {
            let volume = (self.turn + step) % self.volumes.len();
            let need = |id: SegmentId| if has_reserved(id) { 0 } else { 1 };
            let Some(id) = self.open_with_room(base, volume, stream, data, need) else {
                continue;
            };
            let reserved = need(id);
            let before = self.get(id).data_end() - HEADER_BLOCKS;
            base.index.bear(id, before, data, born_ms);
            let place = Place {
                segment: id,
                start: self.get_mut(id).take_page(data, reserved),
                saved: 0,
            };
            self.in_flight_blocks += u64::from(data);
            self.taken_blocks += self.footprint(data);
            self.turn_left = self.turn_left.saturating_sub(bytes);
            return Some((place, reserved == 1));
        }
        None
    }

    /// A write into this segment failed: the next ones go to another volume.
    pub(in crate::core) fn turn_from(&mut self, id: SegmentId) {
        self.turn = (self.volume_of(id) + 1) % self.volumes.len();
        self.turn_left = RUN_BYTES;
    }

    /// Reserves a descriptor block for a record.
    pub(in crate::core) fn place_record(
        &mut self,
        base: &mut Base,
        room: Room,
    ) -> Option<SegmentId> {
        let streams: &[Stream] = match room {
            Room::Puts => &[Stream::Put],
            Room::Copies | Room::Gaps => &[Stream::Put, Stream::Copy],
        };
        let volumes = self.volumes.len();
        for &stream in streams {
            for step in 0..volumes {
                let volume = (self.turn + step) % volumes;
                if let Some(id) = self.open_with_room(base, volume, stream, 0, |_| 1) {
                    self.get_mut(id).reserve(1);
                    return Some(id);
                }
            }
        }
        match room {
            Room::Gaps => self.extend_sealed(),
            Room::Puts | Room::Copies => None,
        }
    }

    /// Reserves further descriptor blocks in a segment; false when it has no room for them.
    pub(in crate::core) fn reserve_blocks(&mut self, id: SegmentId, blocks: u32) -> bool {
        let segment_blocks = self.segment_blocks;
        let segment = self.get_mut(id);
        let fits = segment.has_room(segment_blocks, 0, blocks);
        if fits {
            segment.reserve(blocks);
        }
        fits
    }

    /// The last resort for forwarded records: the gap that a sealed segment has left between data
    /// and descriptors.
    fn extend_sealed(&mut self) -> Option<SegmentId> {
        let takes = |(id, s): &(SegmentId, &Segment)| {
            !s.is_suspect()
                && s.may_be_extended()
                && s.has_room(self.segment_blocks, 0, 1)
                && !self.is_read_only(*id)
                && !self.is_retiring(*id)
        };
        // A segment that takes records already, else the segment that stays longest. A write that
        // failed before may fail again.
        let worth = |(_, s): &(SegmentId, &Segment)| (!s.is_poisoned(), s.is_extended(), s.live());
        let (id, _) = self.iter().filter(takes).max_by_key(worth)?;
        self.get_mut(id).extend(Extension::Records, 1);
        Some(id)
    }

    /// Whether an open segment takes so many blocks of copies and descriptors, without a free one.
    pub(in crate::core) fn copies_fit(&self, blocks: u32) -> bool {
        let open = |volume: &Volume| volume.open[Stream::Copy as usize];
        let mut open = self.writable().filter_map(open);
        open.any(|id| self.get(id).has_room(self.segment_blocks, blocks, 0))
    }

    fn open_with_room(
        &mut self,
        base: &mut Base,
        volume: usize,
        stream: Stream,
        data: u32,
        blocks: impl Fn(SegmentId) -> u32,
    ) -> Option<SegmentId> {
        if !self.volumes[volume].takes_pages() {
            return None;
        }
        let slot = stream as usize;
        if let Some(id) = self.volumes[volume].open[slot] {
            if self.get(id).has_room(self.segment_blocks, data, blocks(id)) {
                return Some(id);
            }
            if !self.may_open(volume, stream) {
                return None;
            }
            self.close(id);
            base.announce(Event::Drain(id));
            base.announce(Event::CheckReclaim);
        }
        if !self.may_open(volume, stream) {
            return None;
        }
        let generation = base.next_serial()?;
        let id = self.volumes[volume].pop_free()?;
        self.get_mut(id).begin(generation, stream);
        base.index.bear(id, 0, 1, base.unix_ms());
        self.volumes[volume].open[slot] = Some(id);
        self.end_quarantine();
        self.write_header(base, id, SegmentState::Open);
        base.announce(Event::CheckReclaim);
        let fits = self.get(id).has_room(self.segment_blocks, data, blocks(id));
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

    /// On each volume, the open segment with the most room takes copies.
    pub(in crate::core) fn open_for_copies(&mut self) {
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
                    self.get_mut(id).change_stream(stream);
                }
            }
        }
    }

    /// Takes nothing more into an open segment.
    pub(in crate::core) fn close(&mut self, id: SegmentId) {
        let volume = self.volume_of(id);
        for slot in &mut self.volumes[volume].open {
            if *slot == Some(id) {
                *slot = None;
            }
        }
        self.get_mut(id).close();
    }
}
