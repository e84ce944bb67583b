//! Which volumes take writes.
//!
//! ```text
//!   ReadWrite  a write is refused                                -> Doubted
//!   Doubted    the probe is written                              -> ReadWrite
//!   Doubted    the probe is refused                              -> ReadOnly
//!   either     an error that every write gets (full, read-only)  -> ReadOnly
//!   ReadOnly   probes have filled a free segment                 -> ReadWrite
//! ```
//!
//! A doubted volume takes pages: the next segment may take a write that this one refused. No page
//! is evicted there, since its room may be of no use. In *read-only service* a volume's pages are
//! read. No page is placed, evicted or reclaimed there, and no capacity is given up. Pages there do
//! not count against the limit of the other volumes.
//!
//! A probe is sent at once when a volume becomes doubted, and every [`PROBE_MS`] in read-only
//! service. Probes must fill a whole free segment, because a single block may still fit into a file
//! system that is full.
//!
//! A probe writes zeros to blocks that hold no data. These are data blocks of a free segment, which
//! leaves the free list meanwhile. Without a free segment it is a block that the format never uses.

use larder_base::failure::DiskError;
use larder_base::memory::AlignedBuf;
use larder_format::{BLOCK_BYTES, HEADER_BLOCKS, PROBE_OFFSET};

use super::segment::State;
use super::{Segments, Volume};
use crate::core::base::{Base, IoContext};
use crate::core::types::Effect;
use crate::index::SegmentId;
use crate::planted;

/// How long after a refused probe the next one is sent, in milliseconds.
const PROBE_MS: u64 = 1000;

/// Blocks of a probe: 1 MiB.
const PROBE_BLOCKS: u32 = 256;

/// How a volume is used.
#[derive(Debug)]
pub(super) enum Service {
    ReadWrite,
    Doubted(Probe),
    ReadOnly(Probe, DiskError),
}

/// The probes of a volume.
#[derive(Debug)]
pub(super) struct Probe {
    /// The free segment that they go to.
    pub(super) segment: Option<SegmentId>,
    /// First block of it that is still to be written.
    next: u32,
    /// When the next one is sent; `None` while one is under way.
    due_ms: Option<u64>,
}

impl Volume {
    /// Whether pages and records may be placed on it.
    pub(super) fn takes_pages(&self) -> bool {
        !self.is_retiring && !self.service.is_read_only()
    }

    /// Whether it is in read-only service and keeps its capacity. A retiring volume has none.
    pub(super) fn rests(&self) -> bool {
        self.service.is_read_only() && !self.is_retiring
    }
}

impl Service {
    pub(super) fn is_read_write(&self) -> bool {
        matches!(self, Service::ReadWrite) || planted!(EvictionInVain)
    }

    pub(super) fn is_read_only(&self) -> bool {
        matches!(self, Service::ReadOnly(..))
    }

    pub(super) fn probe(&mut self) -> Option<&mut Probe> {
        match self {
            Service::ReadWrite => None,
            Service::Doubted(probe) | Service::ReadOnly(probe, _) => Some(probe),
        }
    }

    /// Free segments that are held for probes.
    pub(super) fn segments_probed(&self) -> usize {
        match self {
            Service::ReadWrite => 0,
            Service::Doubted(probe) | Service::ReadOnly(probe, _) => {
                usize::from(probe.segment.is_some())
            }
        }
    }

    fn probe_due_ms(&self) -> Option<u64> {
        match self {
            Service::ReadWrite => None,
            Service::Doubted(probe) | Service::ReadOnly(probe, _) => probe.due_ms,
        }
    }
}

impl Probe {
    fn due(due_ms: u64) -> Probe {
        Probe {
            segment: None,
            next: HEADER_BLOCKS,
            due_ms: Some(due_ms),
        }
    }
}

impl Segments {
    /// The volumes in read-only service, each with the error of its last refused write.
    pub(in crate::core) fn read_only_volumes(&self) -> Vec<(usize, DiskError)> {
        let volumes = self.volumes.iter().enumerate();
        let read_only = volumes.filter_map(|(index, volume)| match volume.service {
            Service::ReadOnly(_, error) => Some((index, error)),
            Service::ReadWrite | Service::Doubted(_) => None,
        });
        read_only.collect()
    }

    pub(super) fn writable(&self) -> impl Iterator<Item = &Volume> {
        let volumes = self.volumes.iter();
        volumes.filter(|volume| volume.takes_pages())
    }

    /// Ends the use of a volume: it takes nothing more, and the limits are those of the others.
    pub(in crate::core) fn retire(&mut self, volume: usize) {
        if std::mem::replace(&mut self.volumes[volume].is_retiring, true) {
            return;
        }
        let own = self.segments_of(&self.volumes[volume]).iter();
        let counted = own.filter(|s| !matches!(s.state(), State::Lost | State::Unreadable));
        let counted = counted.count() as u64;
        self.counted.0 -= 1;
        self.counted.1 -= counted;
        self.recount();
        self.limits.max = self.limits.now;
    }

    /// Whether the volume of this segment is to be removed from the store.
    pub(super) fn is_retiring(&self, id: SegmentId) -> bool {
        self.volumes[self.volume_of(id)].is_retiring
    }

    /// Whether some volume is not in read-only service.
    pub(in crate::core) fn takes_writes(&self) -> bool {
        self.writable().next().is_some()
    }

    /// Whether the volume of this segment may reuse the room of an evicted page.
    pub(in crate::core) fn may_evict(&self, id: SegmentId) -> bool {
        self.volumes[self.volume_of(id)].service.is_read_write()
    }

    pub(in crate::core) fn may_evict_somewhere(&self) -> bool {
        let mut volumes = self.volumes.iter();
        volumes.any(|volume| volume.service.is_read_write())
    }

    /// Whether the volume of this segment is in read-only service.
    pub(in crate::core) fn is_read_only(&self, id: SegmentId) -> bool {
        self.volumes[self.volume_of(id)].service.is_read_only()
    }

    /// The device refused a write into this segment. The error is unknown for page data.
    pub(in crate::core) fn write_refused(
        &mut self,
        base: &mut Base,
        id: SegmentId,
        error: Option<DiskError>,
    ) {
        let volume = self.volume_of(id);
        let of_all = error.filter(DiskError::is_of_every_write);
        let service = &mut self.volumes[volume].service;
        match (service, of_all) {
            (Service::ReadOnly(..), _) | (Service::Doubted(_), None) => {}
            (service @ Service::ReadWrite, None) => {
                *service = Service::Doubted(Probe::due(base.now_ms));
                self.send_probe(base, volume);
            }
            (_, Some(error)) => self.end_writes(base, volume, error),
        }
    }

    /// Puts a volume into read-only service.
    fn end_writes(&mut self, base: &mut Base, volume: usize, error: DiskError) {
        let service = &mut self.volumes[volume].service;
        let probe = match std::mem::replace(service, Service::ReadWrite) {
            Service::ReadWrite => Probe::due(base.now_ms.saturating_add(PROBE_MS)),
            Service::Doubted(probe) | Service::ReadOnly(probe, _) => probe,
        };
        *service = Service::ReadOnly(probe, error);
        // Refused free headers are no loss of capacity: they are written when the volume is back.
        for id in self.unfreed.clone() {
            if self.volume_of(id) == volume {
                self.set_unusable(id, false);
            }
        }
        self.recount();
        base.emit(Effect::ReadOnly(volume, error));
    }

    /// Puts a volume back into service, and resumes the work that waited for that.
    fn begin_writes(&mut self, base: &mut Base, volume: usize) {
        let service = &mut self.volumes[volume].service;
        let before = std::mem::replace(service, Service::ReadWrite);
        let (probe, was_read_only) = match before {
            Service::ReadWrite => return,
            Service::Doubted(probe) => (probe, false),
            Service::ReadOnly(probe, _) => (probe, true),
        };
        if let Some(segment) = probe.segment {
            self.take_back(segment);
        }
        base.index.unpark();
        self.recount();
        if was_read_only {
            self.retry_freeing_on(base, volume);
            base.emit(Effect::ReadWrite(volume));
        }
        self.end_quarantine();
        Segments::announce_room(base);
        base.call_reclaim();
    }

    /// Sends the next probe of a volume. Without memory for it, it is due again later.
    fn send_probe(&mut self, base: &mut Base, volume: usize) {
        let segment_blocks = self.segment_blocks;
        let place = &mut self.volumes[volume];
        if place
            .service
            .probe()
            .is_some_and(|probe| probe.segment.is_none())
        {
            let free = place.pop_free();
            if let Some(probe) = place.service.probe() {
                probe.segment = free;
            }
        }
        let Some(probe) = place.service.probe() else {
            return;
        };
        let blocks = match probe.segment {
            Some(_) => PROBE_BLOCKS.min(segment_blocks.saturating_sub(probe.next)),
            None => 1,
        };
        let Ok(bytes) = AlignedBuf::zeroed(blocks as usize * BLOCK_BYTES) else {
            probe.due_ms = Some(base.now_ms.saturating_add(PROBE_MS));
            return;
        };
        probe.due_ms = None;
        let (segment, next) = (probe.segment, probe.next);
        let offset = match segment {
            Some(id) => self.offset_of(id) + u64::from(next) * BLOCK_BYTES as u64,
            None => PROBE_OFFSET,
        };
        base.write(volume, offset, bytes, IoContext::Probe(volume, blocks));
    }

    pub(in crate::core) fn probe_done(
        &mut self,
        base: &mut Base,
        volume: usize,
        blocks: u32,
        result: Result<(), DiskError>,
    ) {
        let segment_blocks = self.segment_blocks;
        let again_ms = base.now_ms.saturating_add(PROBE_MS);
        let service = &mut self.volumes[volume].service;
        match (service, result) {
            (Service::ReadWrite, _) => {}
            (Service::Doubted(_), Ok(())) => self.begin_writes(base, volume),
            (Service::Doubted(probe), Err(error)) => {
                probe.due_ms = Some(again_ms);
                self.end_writes(base, volume, error);
            }
            (Service::ReadOnly(probe, _), Ok(())) => {
                probe.next += blocks;
                if probe.segment.is_none() || probe.next >= segment_blocks {
                    self.begin_writes(base, volume);
                } else {
                    self.send_probe(base, volume);
                }
            }
            (Service::ReadOnly(probe, latest), Err(error)) => {
                probe.due_ms = Some(again_ms);
                *latest = error;
            }
        }
    }

    /// When the next probe is due.
    pub(in crate::core) fn probes_due(&self) -> Option<u64> {
        let volumes = self.volumes.iter();
        let due = volumes.filter_map(|volume| volume.service.probe_due_ms());
        due.min()
    }

    pub(in crate::core) fn probe_when_due(&mut self, base: &mut Base) {
        for volume in 0..self.volumes.len() {
            let due = self.volumes[volume].service.probe_due_ms();
            if due.is_some_and(|due| due <= base.now_ms) {
                self.send_probe(base, volume);
            }
        }
    }
}
