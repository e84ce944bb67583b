//! The inputs and outputs of a core.

use std::fmt;
use std::time::Duration;

use larder_base::failure::DiskError;
use larder_base::memory::AlignedBuf;
use larder_format::{
    DescriptorBlock, Fingerprint, KeyPrefix, Namespace, PageRecord, Proof, Serial, StoreId,
};

use serde::{Deserialize, Serialize};

use crate::counters::StoreCounts;
use crate::grants::{Extent, Finding, ReservationId};
use crate::index::{NamespaceSlot, Place, SegmentId};
use crate::status::PutStatus;

/// When a put is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SyncPolicy {
    /// Synced when a segment is sealed and on `flush`.
    Relaxed,
    /// As `Relaxed`, and at the latest this long after the first unsynced write. The default, with
    /// one second.
    Interval(Duration),
    /// Before the put returns.
    Always,
}

impl fmt::Display for SyncPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SyncPolicy::Relaxed => f.write_str("relaxed"),
            SyncPolicy::Interval(interval) => write!(f, "interval of {interval:?}"),
            SyncPolicy::Always => f.write_str("always"),
        }
    }
}

impl Default for SyncPolicy {
    fn default() -> Self {
        SyncPolicy::Interval(Duration::from_secs(1))
    }
}

/// Names an I/O request of the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IoId(pub u64);

/// Names a caller's request other than a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// A segment to be emptied, or to be searched for tombstones of the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim {
    /// The segment.
    pub segment: SegmentId,
    /// Index of its volume.
    pub volume: usize,
    /// Its number in the volume.
    pub number: u32,
    /// The generation whose blocks are to be read.
    pub sequence: Serial,
    /// How many descriptor blocks it has.
    pub blocks: u32,
    /// Its pages are evicted, since there is no room for copies.
    pub is_given_up: bool,
}

/// A segment that a caller wants emptied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Emptying {
    /// Index of its volume.
    pub volume: usize,
    /// Its number in the volume.
    pub number: u32,
    /// The generation whose pages the caller knows.
    pub sequence: Serial,
    /// First blocks of its pages, in the order in which they are copied. Pages that are not among
    /// them come last.
    pub starts: Vec<u32>,
}

/// A page to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Its namespace.
    pub namespace: NamespaceSlot,
    /// Its descriptor; the copy keeps all but the place.
    pub record: PageRecord,
    /// Where it lies now.
    pub from: Place,
}

/// A page to be copied from one place to another.
#[derive(Clone, Copy, Debug)]
pub struct PageCopy {
    /// The page.
    pub page: Move,
    /// Where it lies.
    pub from: Extent,
    /// Where its copy goes.
    pub to: Extent,
}

impl PageCopy {
    /// The outcome of a copy of its bytes as they are.
    #[must_use]
    pub fn written(&self) -> Copied {
        Copied::Written(Proof {
            checksum: self.page.record.checksum,
            seal: self.page.record.seal,
        })
    }
}

/// The outcome of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// Its bytes held their checksum, and have been written. They have this proof now: another one
    /// if they were encrypted with another key.
    Written(Proof),
    /// The write failed.
    NotWritten,
    /// The page could not be read this time. Nothing was written.
    NotRead,
    /// The page has other bytes than were put, or the medium does not return it. Nothing was
    /// written.
    Damaged(Finding),
}

/// The descriptor blocks of a victim's generation.
#[derive(Debug, Default)]
pub struct Descriptors {
    /// The blocks that are whole.
    pub blocks: Vec<DescriptorBlock>,
    /// The device did not give some blocks. Unreadable is not the same as empty.
    pub some_unreadable: bool,
}

/// A metadata write or a sync.
#[derive(Debug)]
pub enum Io {
    /// Write these blocks.
    Write {
        /// Byte offset in the volume.
        offset: u64,
        /// The blocks.
        bytes: AlignedBuf,
    },
    /// Make every answered write durable.
    Sync,
}

/// A request of the core to its runtime. The order of effects is free.
#[derive(Debug)]
pub enum Effect {
    /// Carry out an I/O request and answer it with [`Core::io_done`](super::Core::io_done).
    Io {
        /// To answer it by.
        id: IoId,
        /// Index of the volume.
        volume: usize,
        /// The request.
        io: Io,
    },
    /// Every page of a reservation has its status.
    Settled(ReservationId, Vec<PutStatus>),
    /// A request is finished.
    Finished(RequestId, Result<(), Fault>),
    /// Space or write budget has become available.
    Room,
    /// Read the descriptor blocks of a segment, and answer with
    /// [`Core::descriptors_read`](super::Core::descriptors_read).
    ReadDescriptors(Victim),
    /// Copy pages, and answer with [`Core::copied`](super::Core::copied).
    Copy(ReservationId, Vec<PageCopy>),
    /// [`Core::reclaim_step`](super::Core::reclaim_step) may have work.
    Reclaim,
    /// A volume refuses writes: it is in read-only service.
    ReadOnly(usize, DiskError),
    /// A volume that was in read-only service takes writes again.
    ReadWrite(usize),
    /// A page was dropped as damaged: only for the first [`DAMAGED_TOLD_MAX`] of a core.
    Damaged(DamagedPage),
}

/// Most damaged pages with an effect of their own. The counter has all of them.
pub const DAMAGED_TOLD_MAX: u64 = 10;

/// A page that does not read back as it was written.
#[derive(Clone, Copy, Debug)]
pub struct DamagedPage {
    /// The fingerprint of its namespace.
    pub namespace: Fingerprint,
    /// The begin of its key.
    pub key: KeyPrefix,
    /// Its segment's number in the volume.
    pub segment: u32,
    /// Where it lies.
    pub at: Extent,
    /// The fault.
    pub finding: Finding,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A write failed.
    Write,
    /// A sync failed.
    Sync,
    /// No segment had room.
    NoRoom,
    /// Every volume is in read-only service.
    ReadOnly,
}

/// Settings that do not change while the store is open.
#[derive(Clone, Debug)]
pub struct Config {
    /// The store's identity, part of everything written.
    pub store: StoreId,
    /// Blocks a segment.
    pub segment_blocks: u32,
    /// When puts are durable.
    pub sync: SyncPolicy,
    /// Most bytes of puts in flight.
    pub write_bytes_max: u64,
    /// Most blocks of pages that reclaim copies at once.
    pub copy_blocks_max: u64,
    /// Nothing is written, not even the record of a new namespace.
    pub read_only: bool,
    /// The clock of the store at the beginning of that of [`Core::tick`](super::Core::tick): see
    /// [`larder_format::Clock`]. For ages of pages alone.
    pub began_ms: u64,
}

/// A segment as recovery found it.
#[derive(Clone, Copy, Debug)]
pub struct SegmentInit {
    /// Its state.
    pub state: InitState,
    /// The generation on disk; zero when it was never written.
    pub sequence: Serial,
    /// First unused data block.
    pub data_end: u32,
    /// Descriptor blocks.
    pub blocks: u32,
    /// Highest commit number in it.
    pub last_commit: Serial,
    /// Commits up to here are known to be whole on the device.
    pub proven: Serial,
    /// The mean time at which its pages were put, in milliseconds since 1970; 0 if unknown.
    pub born_ms: u64,
}

/// The state of a segment after recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitState {
    /// Holds nothing.
    Free,
    /// Open when the store was cleanly closed: may be written on.
    Open,
    /// As `Open`, and takes no more pages. Its header still has to be written.
    Closed,
    /// Holds pages and takes no more.
    Sealed,
    /// Some of its descriptors could not be read, or its header not be written. The pages that were
    /// read are served, and nothing is written there.
    Unreadable,
    /// On a lost volume.
    Lost,
}

/// A namespace as recovery found it.
#[derive(Clone, Debug)]
pub struct NamespaceInit {
    /// Its fingerprint.
    pub fingerprint: Fingerprint,
    /// Its full record, if one was found, and the segment that holds it.
    pub record: Option<(Namespace, SegmentId)>,
    /// Blocks of each of its pages; zero while none is known.
    pub page_blocks: u32,
}

/// The result of recovery.
#[derive(Debug)]
pub struct Recovered {
    /// Segment count of each volume.
    pub volumes: Vec<u32>,
    /// Every segment, in the order of the volumes.
    pub segments: Vec<SegmentInit>,
    /// Every namespace; its position is its slot.
    pub namespaces: Vec<NamespaceInit>,
    /// First serial of this epoch.
    pub first: Serial,
    /// Whether the store was cleanly closed.
    pub clean: bool,
    /// Pages that the clean close counted and that are gone.
    pub lost_pages: u64,
    /// A part of the store could not be read, or a header not be written: there may be more room,
    /// and more pages, than were found.
    pub is_partial: bool,
}

/// Counters since the store was opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Those of the table.
    pub store: StoreCounts,
    /// Pages stored by puts.
    pub pages_put: u64,
    /// Their blocks.
    pub blocks_put: u64,
    /// Pages already stored.
    pub duplicates: u64,
    /// Pages refused.
    pub refused: u64,
    /// Unproven pages that a put wrote again.
    pub replaced: u64,
    /// Pages that were gone when the store was opened, though the clean close had counted them.
    /// The damaged pages do not include them.
    pub lost: u64,
    /// Pages moved out of segments that a caller wanted emptied.
    pub moved_as_wanted: u64,
}

/// Space as it is now, for statistics.
#[derive(Clone, Copy, Debug, Default)]
pub struct SpaceView {
    /// Blocks of a segment.
    pub segment_blocks: u32,
    /// Blocks of indexed pages.
    pub live_blocks: u64,
    /// Most blocks that pages may take.
    pub usable_blocks: u64,
    /// Footprints of the pages, also of pages that are being written: see
    /// [`footprint`](crate::capacity::footprint).
    pub taken_blocks: u64,
    /// Segments of all volumes.
    pub segments: u64,
    /// Free segments.
    pub free_segments: u64,
    /// Segments that take pages or are being closed.
    pub open_segments: u64,
    /// Segments that hold pages and take no more.
    pub sealed_segments: u64,
    /// Segments that reclaim empties.
    pub reclaiming_segments: u64,
    /// Segments whose descriptors could not all be read, or whose header not be written. Nothing is
    /// written there until the next open.
    pub unreadable_segments: u64,
}
