//! Segments: the volumes' segments, the pages and records that each takes, and the limits.
//!
//! | module | decides |
//! |---|---|
//! | `recovered` | the states of the segments after a recovery |
//! | `placement` | the segment that a page or record goes to |
//! | `headers` | the content of a segment's header |
//! | `holdings` | (how much the segments hold, at a clean close) |
//! | `lending` | the free segments that are written beforehand |
//! | `failures` | which segments are poisoned, in quarantine, or unusable |
//! | `service` | the volumes that take writes |
//! | `segment` | the states of a segment, and the facts of each |
//!
//! Invariants: data and descriptor blocks never meet (`data_end + blocks + reserved <=
//! segment_blocks`); no put and no deletion opens the last free segment, so that reclaim can always
//! go on; `live` counts exactly the blocks of indexed pages.

mod failures;
pub(super) mod headers;
mod holdings;
mod lending;
pub(super) mod placement;
mod recovered;
pub(super) mod segment;
mod service;

use std::collections::{BTreeMap, VecDeque};

use larder_format::{BLOCK_BYTES, HEADER_BLOCKS, KeyPrefix, SEGMENTS_OFFSET, Serial};

use super::base::{Base, Event};
use super::types::{DAMAGED_TOLD_MAX, DamagedPage, Effect};
use crate::capacity::{STREAMS, footprint, usable_blocks};
use crate::grants::{Extent, Finding};
use crate::index::{NamespaceSlot, Place, SegmentId};
use crate::planted;
pub use lending::Lent;
pub use placement::RUN_BYTES;
use segment::{Segment, State};
use service::Service;

#[derive(Debug)]
struct Volume {
    /// Store-wide number of its first segment.
    base: u32,
    segments: u32,
    /// Written to since it was last taken for a sync.
    is_dirty: bool,
    service: Service,
    /// It takes nothing any more, and is to be removed from the store.
    is_retiring: bool,
    /// Usable blocks that its indexed pages take.
    taken_blocks: u64,
    free: VecDeque<SegmentId>,
    /// As many free segments, from the front on, cannot be lent: they were lent, or were used.
    unlendable: usize,
    open: [Option<SegmentId>; STREAMS],
}

/// See the module.
#[derive(Debug)]
pub(super) struct Segments {
    segment_blocks: u32,
    volumes: Vec<Volume>,
    segments: Vec<Segment>,
    /// Segments on volumes that are there.
    there: usize,
    limits: Limits,
    /// Volumes and segments that the limits are computed from.
    counted: (usize, u64),
    /// Segments that are unusable now.
    unusable: u64,
    live_blocks: u64,
    /// Blocks of pages without a status.
    in_flight_blocks: u64,
    /// Footprints of live and in-flight pages.
    taken_blocks: u64,
    /// A sealed segment lost its last page: it can be released at no cost.
    some_died: bool,
    /// Segments that are emptied or being released.
    returning: Vec<SegmentId>,
    /// Segments whose free header could not be written.
    unfreed: Vec<SegmentId>,
    /// When those headers are written again.
    unfreed_due_ms: u64,
    /// Segments in quarantine, and some that no longer are.
    quarantine: Vec<SegmentId>,
    turn: usize,
    turn_left: u64,
}

/// Most blocks of pages kept at once.
#[derive(Clone, Copy, Debug)]
struct Limits {
    now: u64,
    /// With every segment usable.
    max: u64,
    /// On volumes that take writes.
    writable: u64,
}

impl Segments {
    /// `volumes` are the segment counts; `segments` the state of each, in the order of the volumes.
    fn new(segment_blocks: u32, volumes: &[u32], segments: Vec<Segment>) -> Segments {
        let mut base = 0;
        let mut list = Vec::with_capacity(volumes.len());
        for &count in volumes {
            list.push(Volume {
                base,
                segments: count,
                is_dirty: false,
                service: Service::ReadWrite,
                is_retiring: false,
                taken_blocks: 0,
                free: VecDeque::new(),
                unlendable: 0,
                open: [None; STREAMS],
            });
            base += count;
        }
        let count = |matches: fn(State) -> bool| {
            let states = segments.iter().map(Segment::state);
            states.filter(|state| matches(*state)).count()
        };
        let readable = count(|state| !matches!(state, State::Lost | State::Unreadable)) as u64;
        let there = count(|state| state != State::Lost);
        let is_there = |volume: &&Volume| {
            let range = volume.base as usize..(volume.base + volume.segments) as usize;
            let own = segments.get(range).unwrap_or_default();
            own.iter().any(|segment| segment.state() != State::Lost)
        };
        let counted = (list.iter().filter(is_there).count(), readable);
        let usable = usable_blocks(readable, counted.0, segment_blocks);
        let mut segments = Segments {
            segment_blocks,
            volumes: list,
            segments,
            there,
            limits: Limits {
                now: usable,
                max: usable,
                writable: usable,
            },
            counted,
            unusable: 0,
            live_blocks: 0,
            in_flight_blocks: 0,
            taken_blocks: 0,
            some_died: false,
            returning: Vec::new(),
            unfreed: Vec::new(),
            unfreed_due_ms: 0,
            quarantine: Vec::new(),
            turn: 0,
            turn_left: RUN_BYTES,
        };
        segments.list();
        segments
    }

    /// Fills the lists of free and open segments from the segments' states.
    fn list(&mut self) {
        for index in 0..self.segments.len() {
            let id = SegmentId(u32::try_from(index).unwrap_or(u32::MAX));
            let volume = self.volume_of(id);
            match self.segments[index].state() {
                State::Free => self.volumes[volume].free.push_back(id),
                State::Open(stream) => {
                    let slot = &mut self.volumes[volume].open[stream as usize];
                    assert!(
                        slot.is_none(),
                        "two open segments for one stream on one volume"
                    );
                    *slot = Some(id);
                }
                _ => {}
            }
        }
        for volume in &mut self.volumes {
            // Oldest generation first, so that wear spreads over the volume.
            volume
                .free
                .make_contiguous()
                .sort_by_key(|id| self.segments[id.0 as usize].generation());
        }
    }

    // ---- addresses

    pub(super) fn get(&self, id: SegmentId) -> &Segment {
        &self.segments[id.0 as usize]
    }

    pub(super) fn get_mut(&mut self, id: SegmentId) -> &mut Segment {
        &mut self.segments[id.0 as usize]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        (0..).map(SegmentId).zip(&self.segments)
    }

    pub(super) fn volumes(&self) -> usize {
        self.volumes.len()
    }

    pub(super) fn volume_of(&self, id: SegmentId) -> usize {
        self.volumes
            .partition_point(|volume| volume.base + volume.segments <= id.0)
    }

    /// The volume's index as records and headers state it.
    pub(super) fn volume_number(&self, id: SegmentId) -> u16 {
        u16::try_from(self.volume_of(id)).unwrap_or(u16::MAX)
    }

    /// The segment's number within its volume.
    pub(super) fn number_of(&self, id: SegmentId) -> u32 {
        id.0 - self.volumes[self.volume_of(id)].base
    }

    /// The segment of a number on a volume; `None` when there is none.
    pub(super) fn id_of(&self, volume: usize, number: u32) -> Option<SegmentId> {
        let volume = self.volumes.get(volume)?;
        (number < volume.segments).then(|| SegmentId(volume.base + number))
    }

    /// Byte offset of a segment in its volume.
    pub(super) fn offset_of(&self, id: SegmentId) -> u64 {
        let bytes = u64::from(self.segment_blocks) * BLOCK_BYTES as u64;
        SEGMENTS_OFFSET + u64::from(self.number_of(id)) * bytes
    }

    /// Volume and offset of a place.
    pub(super) fn extent(&self, place: Place) -> Extent {
        let start = u64::from(place.start) * BLOCK_BYTES as u64;
        Extent {
            volume: self.volume_of(place.segment),
            offset: self.offset_of(place.segment) + start,
            place,
        }
    }

    /// Counts a page that is dropped because it does not read back as it was written.
    pub(super) fn note_damaged(
        &self,
        base: &mut Base,
        namespace: NamespaceSlot,
        key: KeyPrefix,
        place: Place,
        finding: Finding,
    ) {
        base.counters.store.damaged += 1;
        if base.counters.store.damaged <= DAMAGED_TOLD_MAX {
            let page = DamagedPage {
                namespace: base.namespaces.get(namespace).fingerprint,
                key,
                segment: self.number_of(place.segment),
                at: self.extent(place),
                finding,
            };
            base.emit(Effect::Damaged(page));
        }
    }

    // ---- volumes

    /// Whether a volume is gone for good.
    fn is_lost(&self, volume: usize) -> bool {
        let first = SegmentId(self.volumes[volume].base);
        self.get(first).state() == State::Lost
    }

    /// After a crash the device's cache may hold writes that earlier runs acknowledged: the first
    /// sync has to cover every volume.
    fn mark_all_dirty(&mut self) {
        for volume in 0..self.volumes.len() {
            self.volumes[volume].is_dirty = !self.is_lost(volume);
        }
    }

    /// A write into a segment ended. A refused write needs no sync: nothing relies on it.
    pub(super) fn mark_dirty(&mut self, id: SegmentId, good: bool) {
        let volume = self.volume_of(id);
        if volume == 0 || !planted!(ForgottenVolume) {
            self.volumes[volume].is_dirty |= good;
        }
    }

    /// The first volume was written to outside of its segments.
    pub(super) fn mark_volume_dirty(&mut self, volume: usize) {
        if let Some(volume) = self.volumes.get_mut(volume) {
            volume.is_dirty = true;
        }
    }

    /// Whether a volume was written to since it was last taken for a sync.
    pub(super) fn take_dirty(&mut self, volume: usize) -> bool {
        std::mem::take(&mut self.volumes[volume].is_dirty)
    }

    // ---- capacity

    /// Blocks of a segment that pages can use.
    pub(super) fn data_blocks(&self) -> u64 {
        u64::from(self.segment_blocks.saturating_sub(HEADER_BLOCKS))
    }

    pub(super) fn segment_blocks(&self) -> u32 {
        self.segment_blocks
    }

    /// Blocks of a segment that its generation has never used.
    pub(super) fn unused_blocks(&self, id: SegmentId) -> u64 {
        let segment = self.get(id);
        let used = segment.data_end() + segment.blocks();
        u64::from(self.segment_blocks.saturating_sub(used))
    }

    pub(super) fn footprint(&self, blocks: u32) -> u64 {
        footprint(self.segment_blocks, blocks)
    }

    /// Most blocks of pages kept at once, and the same with every segment usable.
    pub(super) fn usable_blocks(&self) -> (u64, u64) {
        (self.limits.now, self.limits.max)
    }

    pub(super) fn live_blocks(&self) -> u64 {
        self.live_blocks
    }

    pub(super) fn in_flight_blocks(&self) -> u64 {
        self.in_flight_blocks
    }

    pub(super) fn taken_blocks(&self) -> u64 {
        self.taken_blocks
    }

    /// Whether one more page fits under the limit of the store, and under that of the volumes that
    /// take writes.
    pub(super) fn has_room(&self, blocks: u32) -> bool {
        let resting = self.volumes.iter().filter(|volume| volume.rests());
        let elsewhere: u64 = resting.map(|volume| volume.taken_blocks).sum();
        let taken = self.taken_blocks + self.footprint(blocks);
        taken <= self.limits.now && taken - elsewhere <= self.limits.writable
    }

    /// Lowers the limit of the store to so many blocks.
    pub(super) fn keep_at_most(&mut self, blocks: u64) {
        self.limits.max = self.limits.max.min(blocks);
        self.recount();
    }

    /// Recomputes the limits after a segment became unusable, or a volume changed its service.
    fn recount(&mut self) {
        let (volumes, segments) = self.counted;
        let is_unusable = |s: &&Segment| s.is_unusable();
        let retiring = self.volumes.iter().filter(|volume| volume.is_retiring);
        let retiring = retiring.flat_map(|volume| self.segments_of(volume));
        let uncounted = retiring.filter(is_unusable).count() as u64;
        let left = segments.saturating_sub(self.unusable - uncounted);
        self.limits.now = usable_blocks(left, volumes, self.segment_blocks).min(self.limits.max);
        let is_there =
            |s: &Segment| !s.is_unusable() && !matches!(s.state(), State::Lost | State::Unreadable);
        let (mut gone, mut gone_segments) = (0, 0);
        for volume in self.volumes.iter().filter(|volume| volume.rests()) {
            let own = self.segments_of(volume).iter();
            gone += 1;
            gone_segments += own.filter(|segment| is_there(segment)).count() as u64;
        }
        let (volumes, left) = (
            volumes.saturating_sub(gone),
            left.saturating_sub(gone_segments),
        );
        self.limits.writable = usable_blocks(left, volumes, self.segment_blocks);
    }

    fn segments_of(&self, volume: &Volume) -> &[Segment] {
        let range = volume.base as usize..(volume.base + volume.segments) as usize;
        self.segments.get(range).unwrap_or_default()
    }

    pub(super) fn add_live(&mut self, id: SegmentId, blocks: u32) {
        self.get_mut(id).add_live(blocks);
        self.live_blocks += u64::from(blocks);
        let taken = self.footprint(blocks);
        let volume = self.volume_of(id);
        self.volumes[volume].taken_blocks += taken;
        self.taken_blocks += taken;
    }

    pub(super) fn drop_live(&mut self, id: SegmentId, blocks: u32) {
        self.some_died |= self.get_mut(id).drop_live(blocks);
        self.live_blocks -= u64::from(blocks);
        let taken = self.footprint(blocks);
        let volume = self.volume_of(id);
        self.volumes[volume].taken_blocks -= taken;
        self.taken_blocks -= taken;
    }

    /// A page with an extent has its status.
    pub(super) fn drop_in_flight(&mut self, id: SegmentId, blocks: u32) {
        self.in_flight_blocks -= u64::from(blocks);
        self.taken_blocks -= self.footprint(blocks);
        self.get_mut(id).end_page();
    }

    /// A sealed segment has lost its last page since this was last cleared.
    pub(super) fn some_died(&self) -> bool {
        self.some_died
    }

    pub(super) fn take_some_died(&mut self) -> bool {
        std::mem::take(&mut self.some_died)
    }

    // ---- free segments

    /// Free segments of volumes that take writes.
    pub(super) fn free_segments(&self) -> usize {
        self.writable().map(|volume| volume.free.len()).sum()
    }

    /// Free segments of all volumes.
    pub(super) fn free_segments_of_all(&self) -> usize {
        let free = |volume: &Volume| volume.free.len() + volume.service.segments_probed();
        self.volumes.iter().map(free).sum()
    }

    /// Free segments that reclaim tries to keep: two, or a sixty-fourth of the store.
    pub(super) fn free_target(&self) -> usize {
        (self.there / 64).max(2)
    }

    /// Segments on their way to be free by themselves.
    pub(super) fn returning(&self) -> usize {
        self.on_their_way().count()
    }

    fn on_their_way(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        let all = self.returning_of_all();
        all.filter(|(id, segment)| !segment.is_unusable() && !self.is_read_only(*id))
    }

    fn returning_of_all(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        self.returning.iter().map(|id| (*id, self.get(*id)))
    }

    /// Segments that are being released.
    pub(super) fn releasing(&self) -> Vec<SegmentId> {
        let releasing = self.returning_of_all();
        let releasing = releasing.filter(|(_, segment)| segment.state() == State::Releasing);
        releasing.map(|(id, _)| id).collect()
    }

    /// Emptied segments that only pins hold. A silent device may hold a reader for any time, and a
    /// stopped process the segment that it was to write to.
    pub(super) fn held_by_pins(&self) -> usize {
        let returning = self.on_their_way();
        let held = returning.filter(|(_, segment)| segment.is_held_by_pins());
        held.count()
    }

    /// A victim has been emptied.
    pub(super) fn empty(&mut self, id: SegmentId) {
        self.returning.push(id);
        self.get_mut(id).empty();
    }

    /// Puts a segment that could not be emptied or released back, into quarantine.
    pub(super) fn put_back(&mut self, id: SegmentId) {
        self.returning.retain(|other| *other != id);
        self.quarantine.push(id);
        self.get_mut(id).put_back();
    }

    /// The free header of a segment is durable: it can be written again.
    pub(super) fn release(&mut self, id: SegmentId) {
        self.get_mut(id).end();
        self.returning.retain(|other| *other != id);
        self.end_quarantine();
        let volume = self.volume_of(id);
        self.volumes[volume].free.push_back(id);
    }

    /// The oldest generation that the next open may find, in free segments too: the generation on
    /// disk, and the generation that a power loss brings back. Commits up to `synced` are durable.
    pub(super) fn oldest_generation(&self, synced: Serial) -> Option<Serial> {
        self.oldest_generation_but(None, synced)
    }

    /// Whether a volume is gone: it may come back with generations of any age.
    pub(super) fn has_lost_volume(&self) -> bool {
        (0..self.volumes.len()).any(|volume| self.is_lost(volume))
    }

    /// The same, of the other segments.
    pub(super) fn oldest_generation_but(
        &self,
        left_out: Option<SegmentId>,
        synced: Serial,
    ) -> Option<Serial> {
        let segments = self.iter().filter(|(id, _)| Some(*id) != left_out);
        let generations = segments.filter_map(|(_, segment)| segment.oldest_generation(synced));
        generations.min()
    }

    /// # Errors
    /// The first segment that has not so many live blocks as these, which the index lists.
    pub(super) fn check_live(&self, listed: &BTreeMap<SegmentId, u64>) -> Result<(), String> {
        for (id, segment) in self.iter() {
            let counted = listed.get(&id).copied().unwrap_or(0);
            let own = segment.live();
            if counted != own {
                return Err(format!(
                    "segment {id:?}: {counted} live blocks indexed, {own} counted"
                ));
            }
            let state = segment.state();
            let is_empty = matches!(state, State::Free | State::Emptied | State::Releasing);
            if is_empty && counted > 0 {
                return Err(format!("segment {id:?}: {state:?}, yet it holds pages"));
            }
        }
        Ok(())
    }

    /// # Errors
    /// The first invariant found broken.
    pub(super) fn check(&self) -> Result<(), String> {
        for (id, segment) in self.iter() {
            let returns = matches!(segment.state(), State::Emptied | State::Releasing);
            let listed = self.returning.iter().filter(|other| **other == id).count();
            if listed != usize::from(returns) {
                return Err(format!(
                    "segment {id:?}: {:?}, and {listed} times in the list of returning segments",
                    segment.state()
                ));
            }
            if segment.in_quarantine() && !self.quarantine.contains(&id) {
                return Err(format!("segment {id:?}: in quarantine for good"));
            }
            if !segment.has_room(self.segment_blocks, 0, 0) {
                return Err(format!("segment {id:?}: data and descriptors overlap"));
            }
        }
        let unusable = self.segments.iter().filter(|s| s.is_unusable()).count() as u64;
        if unusable != self.unusable {
            return Err(format!("{unusable} unusable, {} counted", self.unusable));
        }
        Ok(())
    }

    /// Announces that there may be room for records that found none, and for reclaim to go on.
    fn announce_room(base: &mut Base) {
        base.has_room();
        base.announce(Event::MoreRoom);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::recovered::recovered_segments;
    use super::segment::Stream;
    use super::*;
    use crate::core::types::InitState::{self, Free, Lost, Open, Sealed, Unreadable};
    use crate::core::types::SegmentInit;

    fn serial(raw: u64) -> Serial {
        Serial::from_raw(raw)
    }

    /// A segment without content, of this state and generation.
    pub(super) fn init(&(state, generation): &(InitState, u64)) -> SegmentInit {
        SegmentInit {
            state,
            sequence: serial(generation),
            data_end: HEADER_BLOCKS,
            born_ms: 0,
            blocks: 0,
            last_commit: Serial::ZERO,
            proven: Serial::ZERO,
        }
    }

    /// Such segments, on volumes with so many each.
    pub(super) fn segments_on(
        segment_blocks: u32,
        volumes: &[u32],
        list: &[(InitState, u64)],
    ) -> Segments {
        let list: Vec<SegmentInit> = list.iter().map(init).collect();
        let segments = recovered_segments(volumes, &list);
        Segments::new(segment_blocks, volumes, segments)
    }

    fn segments(list: &[(InitState, u64)]) -> Segments {
        segments_on(64, &[u32::try_from(list.len()).unwrap()], list)
    }

    #[test]
    fn a_generation_counts_until_no_power_loss_can_bring_it_back() {
        let mut segments = segments(&[(Free, 5), (Sealed, 9), (Lost, 1)]);
        assert_eq!(segments.oldest_generation(Serial::ZERO), Some(serial(5)));
        let first = segments.get_mut(SegmentId(0));
        first.begin(serial(20), Stream::Put);
        // Its header may never arrive, and then nor may its first block.
        assert_eq!(segments.oldest_generation(serial(19)), Some(serial(5)));
        segments.get_mut(SegmentId(0)).begin_blocks(1, serial(21));
        assert_eq!(segments.oldest_generation(serial(20)), Some(serial(5)));
        assert_eq!(segments.oldest_generation(serial(21)), Some(serial(9)));
    }

    #[test]
    fn a_segment_that_could_not_be_read_at_all_may_hold_any_generation() {
        let known = segments(&[(Unreadable, 7), (Sealed, 9), (Free, 0)]);
        assert_eq!(known.oldest_generation(Serial::ZERO), Some(serial(7)));
        let unknown = segments(&[(Unreadable, 0), (Sealed, 9)]);
        assert_eq!(unknown.oldest_generation(Serial::ZERO), Some(Serial::ZERO));
    }

    #[test]
    fn lost_volumes_take_no_room_from_the_others() {
        let list = [[(Free, 0); 6], [(Lost, 0); 6]];
        let segments = segments_on(64, &[6, 6], list.as_flattened());
        assert_eq!(segments.usable_blocks().0, usable_blocks(6, 1, 64));
        assert!(segments.usable_blocks().0 > 0);
    }

    #[test]
    fn copies_go_to_the_open_segment_with_the_most_room() {
        let states = [Stream::Put, Stream::Copy].map(State::Open);
        for roomy in [0, 1] {
            let mut segments = segments(&[(Open, 5), (Open, 6)]);
            segments
                .get_mut(SegmentId(1 - roomy))
                .take_page(60 - HEADER_BLOCKS, 0);
            segments.open_for_copies();
            let ids = [1 - roomy, roomy].map(SegmentId);
            assert_eq!(segments.volumes[0].open, ids.map(Some));
            assert_eq!(ids.map(|id| segments.get(id).state()), states);
        }
        let mut segments = segments(&[(Open, 5)]);
        segments.open_for_copies();
        assert_eq!(segments.volumes[0].open, [None, Some(SegmentId(0))]);
    }
}
