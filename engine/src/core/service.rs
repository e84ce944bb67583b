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

use larder_format::{BLOCK_BYTES, HEADER_BLOCKS, SEGMENTS_OFFSET, SegmentState};

use super::{Core, Effect, Io, log};
use crate::disk::DiskError;
use crate::index::SegmentId;
use crate::memory::AlignedBuf;
use crate::planted;

/// How long after a refused probe the next one is sent, in milliseconds.
const PROBE_MS: u64 = 1000;

/// Blocks of a probe: 1 MiB.
const PROBE_BLOCKS: u32 = 256;

/// A block between the superblocks and the first segment.
const UNUSED_OFFSET: u64 = SEGMENTS_OFFSET - BLOCK_BYTES as u64;

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

impl Core {
    /// The volumes in read-only service, each with the error of its last refused write.
    #[must_use]
    pub fn read_only_volumes(&self) -> Vec<(usize, DiskError)> {
        let volumes = self.space.volumes.iter().enumerate();
        let read_only = volumes.filter_map(|(index, volume)| match volume.service {
            Service::ReadOnly(_, error) => Some((index, error)),
            Service::ReadWrite | Service::Doubted(_) => None,
        });
        read_only.collect()
    }

    /// The device refused a write on a volume. The error is unknown for page data.
    pub(super) fn write_refused(&mut self, volume: usize, error: Option<DiskError>) {
        let of_all = error.filter(DiskError::is_of_every_write);
        let now = self.now_ms;
        let service = &mut self.space.volumes[volume].service;
        match (service, of_all) {
            (Service::ReadOnly(..), _) | (Service::Doubted(_), None) => {}
            (service @ Service::ReadWrite, None) => {
                *service = Service::Doubted(Probe::due(now));
                self.send_probe(volume);
            }
            (_, Some(error)) => self.end_writes(volume, error),
        }
    }

    /// Puts a volume into read-only service.
    fn end_writes(&mut self, volume: usize, error: DiskError) {
        let service = &mut self.space.volumes[volume].service;
        let probe = match std::mem::replace(service, Service::ReadWrite) {
            Service::ReadWrite => Probe::due(self.now_ms.saturating_add(PROBE_MS)),
            Service::Doubted(probe) | Service::ReadOnly(probe, _) => probe,
        };
        *service = Service::ReadOnly(probe, error);
        // Refused free headers are no loss of capacity: they are written when the volume is back.
        for id in &self.syncs.unfreed {
            if self.space.volume_of(*id) == volume {
                self.space.strand(*id, false);
            }
        }
        self.space.recount();
        self.effects.push(Effect::ReadOnly(volume, error));
    }

    /// Puts a volume back into service, and resumes the work that waited for that.
    fn begin_writes(&mut self, volume: usize) {
        let service = &mut self.space.volumes[volume].service;
        let before = std::mem::replace(service, Service::ReadWrite);
        let (probe, was_read_only) = match before {
            Service::ReadWrite => return,
            Service::Doubted(probe) => (probe, false),
            Service::ReadOnly(probe, _) => (probe, true),
        };
        if let Some(segment) = probe.segment {
            self.space.take_back(segment);
        }
        self.index.unpark();
        self.space.recount();
        if was_read_only {
            for id in self.space.extract_on(volume, &mut self.syncs.unfreed) {
                self.write_header(id, SegmentState::Free);
            }
            self.write_homeless();
            self.effects.push(Effect::ReadWrite(volume));
        }
        self.space.welcome();
        self.has_more_room = true;
        self.effects.push(Effect::Reclaim);
    }

    /// Sends the next probe of a volume. Without memory for it, it is due again later.
    fn send_probe(&mut self, volume: usize) {
        let later = self.now_ms.saturating_add(PROBE_MS);
        let segment_blocks = self.config.segment_blocks;
        let Some(probe) = self.space.probe_on(volume) else {
            return;
        };
        let blocks = match probe.segment {
            Some(_) => PROBE_BLOCKS.min(segment_blocks.saturating_sub(probe.next)),
            None => 1,
        };
        let Ok(bytes) = AlignedBuf::zeroed(blocks as usize * BLOCK_BYTES) else {
            probe.due_ms = Some(later);
            return;
        };
        probe.due_ms = None;
        let (segment, next) = (probe.segment, probe.next);
        let offset = match segment {
            Some(id) => self.space.offset_of(id) + u64::from(next) * BLOCK_BYTES as u64,
            None => UNUSED_OFFSET,
        };
        let id = self.log.io(log::IoContext::Probe(volume, blocks));
        let io = Io::Write { offset, bytes };
        self.effects.push(Effect::Io { id, volume, io });
    }

    pub(super) fn probe_done(&mut self, volume: usize, blocks: u32, result: Result<(), DiskError>) {
        let segment_blocks = self.config.segment_blocks;
        let again_ms = self.now_ms.saturating_add(PROBE_MS);
        let service = &mut self.space.volumes[volume].service;
        match (service, result) {
            (Service::ReadWrite, _) => {}
            (Service::Doubted(_), Ok(())) => self.begin_writes(volume),
            (Service::Doubted(probe), Err(error)) => {
                probe.due_ms = Some(again_ms);
                self.end_writes(volume, error);
            }
            (Service::ReadOnly(probe, _), Ok(())) => {
                probe.next += blocks;
                if probe.segment.is_none() || probe.next >= segment_blocks {
                    self.begin_writes(volume);
                } else {
                    self.send_probe(volume);
                }
            }
            (Service::ReadOnly(probe, latest), Err(error)) => {
                probe.due_ms = Some(again_ms);
                *latest = error;
            }
        }
    }

    /// When the next probe is due.
    pub(super) fn probes_due(&self) -> Option<u64> {
        let volumes = self.space.volumes.iter();
        volumes
            .filter_map(|volume| volume.service.probe_due_ms())
            .min()
    }

    pub(super) fn probe_when_due(&mut self) {
        for volume in 0..self.space.volumes.len() {
            let due = self.space.volumes[volume].service.probe_due_ms();
            if due.is_some_and(|due| due <= self.now_ms) {
                self.send_probe(volume);
            }
        }
    }
}
