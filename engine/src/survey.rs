//! Reads a store without opening it, for the tools: the content of the volumes, the pages that
//! count, and the faults.
//!
//! A survey writes nothing. It goes on past every fault and lists it with its place ([`Flaw`]).
//! Recovery's own rules interpret the records, so a survey shows the pages that an open would find.
//! [`SurveyOptions::hold`] keeps writers away while the survey lasts. Without it, a survey of a
//! store in use shows one moment.
//!
//! Writes that a crash may have interrupted are no flaws. Descriptor blocks and header copies in
//! flight at the crash count as unfinished. So do pages that no sync covers and whose bytes fail
//! their checksum ([`Survey::check_payloads`]).
//!
//! | module | task |
//! |---|---|
//! | `volumes` | opens the volumes that are there |
//! | `segments` | scans the segments and finds the faults |
//! | `chains` | measures the placement of chains on disk |
//! | `payloads` | reads every live page and verifies its bytes |
//! | `extract` | returns pages with their bytes, chain by chain |
//! | `losses` | sums up the cost of damage, per namespace |
//!
//! It does not repair, and does not print.

mod chains;
mod extract;
mod losses;
mod payloads;
mod segments;
mod volumes;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_format::{
    BLOCK_BYTES, Features, Fingerprint, KeyPrefix, Namespace, PageKey, Run, Serial, StoreId,
    Superblock,
};

use crate::capacity::usable_blocks;
use crate::core::NamespaceInit;
use crate::disk::mailbox::ReadAt;
use crate::disk::probe::{Want, open_disk};
use crate::disk::{Disk, DiskOptions, Witness};
use crate::error::StoreError;
use crate::recovery::scan::{Disbelief, Spot};
use crate::recovery::{Fate, Found, Statement, Whole};
use crate::volume::LockHolder;

pub use chains::ChainFacts;
pub use extract::{Ancestry, RecordId};
pub use losses::{Losses, NamespaceLosses};
pub use payloads::{BadPage, PayloadFault, Payloads};
pub use segments::{Removal, RemovalKind, SegmentFacts};
use volumes::{Opened, Opening};
pub use volumes::{VolumeFacts, VolumeState};

/// How often a store in use is read again when something looks broken: a write may have been in
/// progress.
const LOOKS_MAX: usize = 3;

/// Options of a survey.
#[derive(Clone, Debug)]
pub struct SurveyOptions {
    /// Paths of volumes other than the first, if they differ from the paths stored in the
    /// superblock.
    pub volumes: Vec<PathBuf>,
    /// Refuse a store that a process has open, and keep writers away until the survey is dropped.
    pub hold: bool,
    /// Also list the deletions, evictions and clears of this key.
    pub key: Option<KeyPrefix>,
    /// The disk to read with.
    pub disk: Want,
    /// Operations of one volume in the kernel at once.
    pub depth: u32,
}

impl Default for SurveyOptions {
    fn default() -> Self {
        SurveyOptions {
            volumes: Vec::new(),
            hold: false,
            key: None,
            disk: Want::Auto,
            depth: 32,
        }
    }
}

/// Why a store could not be surveyed.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    /// The same errors as at an open.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No superblock is left that identifies the store.
    #[error(
        "{path}: neither copy of the superblock can be used; name another volume of the store \
         with --volume, restore the volume's first 128 KiB from a backup, or create the store anew"
    )]
    NoSuperblock {
        /// The first volume.
        path: PathBuf,
        /// The faults of both copies.
        flaws: Vec<Flaw>,
    },
}

/// Whether a store is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Closed in order.
    Clean,
    /// Left without being closed: the next open recovers it.
    NotClosed,
    /// A process has it open.
    InUse,
}

/// The process that opened the store last.
#[derive(Clone, Debug)]
pub struct HolderFacts {
    /// The process, as far as this one can determine.
    pub process: LockHolder,
    /// Its name, while the process exists.
    pub command: Option<String>,
}

/// A structure with other bytes than were written.
#[derive(Clone, Debug)]
pub struct Flaw {
    /// Index of the volume.
    pub volume: usize,
    /// Number of the segment in the volume, if the flaw concerns a segment.
    pub segment: Option<u32>,
    /// Byte offset in the volume, if the flaw concerns a place.
    pub offset: Option<u64>,
    /// The kind of flaw.
    pub reason: FlawReason,
}

/// The kind of flaw.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FlawReason {
    /// A volume is not there.
    #[error("the volume is missing: {0}")]
    Missing(String),
    /// A volume is too short.
    #[error("the volume is {found} bytes long, its segments need {needed}: its end is cut off")]
    Truncated {
        /// Its length.
        found: u64,
        /// Its expected length.
        needed: u64,
    },
    /// A volume does not know an epoch that all volumes had recorded.
    #[error("the volume is of run {run}, the store has been in run {newest} since: an old copy")]
    Stale {
        /// Its epoch.
        run: Run,
        /// The epoch of the store.
        newest: Run,
    },
    /// A copy of a superblock.
    #[error("superblock copy: {reason}")]
    Superblock {
        /// The fault.
        reason: String,
        /// Whether the volume's other copy can be used.
        other_is_good: bool,
    },
    /// A copy of a segment's header.
    #[error("header copy: {reason}")]
    Header {
        /// The fault.
        reason: String,
        /// Whether the other copy can be used.
        other_is_good: bool,
    },
    /// Neither the headers nor the descriptor blocks of a segment can be used.
    #[error("the segment is lost: {0}; no descriptor block of it can be used")]
    LostSegment(String),
    /// A descriptor block.
    #[error("descriptor block: {0}")]
    Descriptor(String),
    /// The volume holds less than when the store was closed in order.
    #[error(
        "since the store was closed in order, the contents of {segments} of its segments are \
         lost, and {pages} pages are gone"
    )]
    LostContents {
        /// Number of segments.
        segments: u32,
        /// Number of pages.
        pages: u64,
    },
    /// The closing statement of a volume, or the volume differs from it.
    #[error("closing statement: {0}")]
    ClosingStatement(String),
    /// Page records in a combination that no writer produces.
    #[error("{pages} page records {why}")]
    Disbelieved {
        /// Number of pages.
        pages: u64,
        /// The reason for the disbelief.
        why: Disbelief,
    },
    /// Two live pages claim one place.
    #[error("the page overlaps another one, so that at least one of them is lost")]
    Overlap(PageKey),
}

impl FlawReason {
    /// One word for programs.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            FlawReason::Missing(_) => "volume_missing",
            FlawReason::Truncated { .. } => "volume_truncated",
            FlawReason::Stale { .. } => "volume_stale",
            FlawReason::Superblock { .. } => "superblock",
            FlawReason::Header { .. } => "header",
            FlawReason::LostSegment(_) => "lost_segment",
            FlawReason::Descriptor(_) => "descriptor",
            FlawReason::LostContents { .. } => "lost_contents",
            FlawReason::ClosingStatement(_) => "closing_statement",
            FlawReason::Disbelieved { why, .. } => match why {
                Disbelief::Size => "wrong_size",
                Disbelief::Overlap => "overlap",
                Disbelief::Namespaces => "namespaces",
            },
            FlawReason::Overlap(_) => "overlap",
        }
    }

    /// The page that the flaw concerns, if it concerns one.
    #[must_use]
    pub fn key(&self) -> Option<PageKey> {
        match self {
            FlawReason::Overlap(key) => Some(*key),
            _ => None,
        }
    }

    /// The cost, and the remedy.
    #[must_use]
    pub fn advice(&self) -> &'static str {
        match self {
            FlawReason::Missing(_) => {
                "bring the volume back, or name its new path with --volume; `larder verify \
                 --repair --degraded` gives up its pages"
            }
            FlawReason::Truncated { .. } => {
                "restore the volume; the pages of the segments cut off are lost"
            }
            FlawReason::Stale { .. } => {
                "bring the current volume back; `larder verify --repair --degraded` gives up its \
                 pages, for any volume but the first"
            }
            FlawReason::Superblock {
                other_is_good: true,
                ..
            } => {
                "the other copy is good, nothing is lost: the next open for writing, or `larder \
                 verify --repair`, writes both anew"
            }
            FlawReason::Superblock { .. } => {
                "the volume cannot be opened: restore its first 128 KiB from a backup; `larder \
                 verify --repair --degraded` gives up its pages, for any volume but the first"
            }
            FlawReason::Header {
                other_is_good: true,
                ..
            } => {
                "the other copy is good, nothing is lost: `larder verify --repair` writes the bad \
                 one anew"
            }
            FlawReason::Header { .. } => {
                "the descriptor blocks hold the same information: the next open for writing \
                 writes both copies anew"
            }
            FlawReason::LostSegment(_) => {
                "its pages are lost and miss; putting them again repairs that, and `larder \
                 verify --repair` gives the segment back. Pages that its records had deleted, \
                 evicted or cleared may be found again: where that must not be, clear their \
                 namespaces"
            }
            FlawReason::Descriptor(_) | FlawReason::Disbelieved { .. } => {
                "its pages are lost and miss; putting them again repairs that, and `larder verify \
                 --repair` saves the pages around them"
            }
            FlawReason::LostContents { .. } => {
                "the device has lost what it had acknowledged: look at its log, and at what \
                 discards its blocks; the pages miss, and putting them again repairs that; \
                 `larder verify --repair` accepts the loss. Pages that lost records had deleted, \
                 evicted or cleared may be found again: where that must not be, clear their \
                 namespaces"
            }
            FlawReason::ClosingStatement(_) => {
                "losses since the last clean close may go unnoticed; `larder verify --repair`, or \
                 the next clean close, writes it anew"
            }
            FlawReason::Overlap(_) => {
                "reads check every page; putting the lost one again repairs that"
            }
        }
    }
}

impl Flaw {
    fn at(volume: usize, offset: u64, reason: FlawReason) -> Flaw {
        Flaw {
            volume,
            segment: None,
            offset: Some(offset),
            reason,
        }
    }

    fn of_volume(volume: usize, reason: FlawReason) -> Flaw {
        Flaw {
            volume,
            segment: None,
            offset: None,
            reason,
        }
    }

    fn in_segment(spot: &Spot, offset: Option<u64>, reason: FlawReason) -> Flaw {
        Flaw {
            volume: spot.volume,
            segment: Some(spot.number),
            offset,
            reason,
        }
    }
}

/// A namespace, as far as it is known.
#[derive(Clone, Debug)]
pub struct NamespaceFacts {
    /// The fingerprint that its pages name.
    pub fingerprint: Fingerprint,
    /// Its full record; `None` when the store does not hold it.
    pub record: Option<Namespace>,
    /// Its live pages.
    pub pages: u64,
    /// Bytes of those pages, padding included.
    pub bytes: u64,
}

/// A page that a descriptor names.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// Position of its namespace in [`Survey::namespaces`].
    pub namespace: usize,
    /// Its key.
    pub key: PageKey,
    /// The key before it in its chain.
    pub parent: Option<KeyPrefix>,
    /// Number of pages before it in its chain.
    pub depth: u32,
    /// Position of its segment in [`Survey::segments`].
    pub segment: usize,
    /// Byte offset of its payload in the segment's volume.
    pub offset: u64,
    /// Bytes of its payload, padding included.
    pub bytes: u64,
    /// The version: when the page was put.
    pub birth: Serial,
    /// The group that holds this record of the page.
    pub commit: Serial,
    /// The checksum of its payload at the put.
    pub checksum: u64,
    /// Whether its payload is proven to be on the device.
    pub proven: bool,
    /// The outcome of the page.
    pub fate: Fate,
}

/// A surveyed store. Writers are admitted again when it is dropped.
pub struct Survey {
    reference: Superblock,
    /// Whether the store is closed.
    pub condition: Condition,
    /// The process that opened it last.
    pub holder: HolderFacts,
    /// The highest epoch in any superblock.
    pub run: Run,
    /// Its volumes, in the store's order.
    pub volumes: Vec<VolumeFacts>,
    /// The segments of all volumes, in the order of the volumes. Includes every segment whose
    /// beginning is there.
    pub segments: Vec<SegmentFacts>,
    /// The number of further segments, on missing volumes or behind the end of a volume. Only
    /// counted: a superblock may claim millions, and must not size an allocation.
    pub unreachable: u64,
    /// Its namespaces, also those without pages.
    pub namespaces: Vec<NamespaceFacts>,
    /// The faults found.
    pub flaws: Vec<Flaw>,
    /// Descriptor blocks and header copies that the last crash interrupted.
    pub unfinished_blocks: u64,
    /// The removals of the requested key, oldest first.
    pub removals: Vec<Removal>,
    losses: Option<Losses>,
    /// By volume.
    statements: Vec<Statement>,
    spots: Vec<Spot>,
    records: Records,
    disk: Arc<Witness>,
    /// Held for their locks.
    opened: Vec<Option<Opened>>,
}

/// Every page record, in the order of namespaces, keys and ages.
#[derive(Default)]
struct Records {
    found: Vec<Found<Whole>>,
    fates: Vec<Fate>,
    /// Positions of the live ones.
    live: Vec<usize>,
    page_blocks: Vec<u32>,
}

impl Survey {
    /// Surveys the store whose first volume is at `path`.
    ///
    /// # Errors
    /// [`SurveyError`]: the file is no store, or a store of a newer version; no superblock is
    /// usable; the store is in use and `hold` is set; this process cannot read it.
    pub fn new(path: &Path, options: &SurveyOptions) -> Result<Survey, SurveyError> {
        Survey::through(path, options, |disk| disk)
    }

    /// The same, through a disk before the store's own.
    pub(crate) fn through(
        path: &Path,
        options: &SurveyOptions,
        through: impl FnOnce(Arc<dyn Disk>) -> Arc<dyn Disk>,
    ) -> Result<Survey, SurveyError> {
        let opening = Opening::new(path, options)?;
        let files = opening.opened.iter();
        let disk = open_disk(
            DiskOptions {
                files: files
                    .map(|opened| opened.as_ref().map(|opened| opened.file.file.clone()))
                    .collect(),
                depth: options.depth.max(1),
                latencies: Arc::default(),
                pacing: Arc::default(),
            },
            options.disk,
        )
        .map_err(StoreError::from)?;
        let condition = opening.condition(options.hold);
        let mut survey = Survey {
            condition,
            holder: opening.holder(),
            run: opening.newest_run(),
            spots: opening.spots(),
            unreachable: 0,
            reference: opening.reference,
            volumes: opening.facts,
            segments: Vec::new(),
            namespaces: Vec::new(),
            flaws: Vec::new(),
            unfinished_blocks: 0,
            removals: Vec::new(),
            losses: None,
            statements: Vec::new(),
            records: Records::default(),
            disk: Arc::new(Witness::new(through(disk), opening.patience)),
            opened: opening.opened,
        };
        let claimed = survey.volumes.iter().map(|facts| u64::from(facts.segments));
        survey.unreachable = claimed.sum::<u64>() - survey.spots.len() as u64;
        for _ in 0..LOOKS_MAX {
            survey.flaws.clone_from(&opening.flaws);
            survey.scan(options.key);
            if survey.condition != Condition::InUse || survey.flaws.len() == opening.flaws.len() {
                break;
            }
        }
        survey
            .disk
            .verdict()
            .map_err(|source| StoreError::NotRead {
                path: path.to_owned(),
                source,
            })?;
        Ok(survey)
    }

    /// The store's identity.
    #[must_use]
    pub fn store(&self) -> StoreId {
        self.reference.store
    }

    /// When it was created: seconds since 1970.
    #[must_use]
    pub fn created_unix_s(&self) -> u64 {
        self.reference.created_unix_s
    }

    /// Its features, and the release that wrote its superblock.
    #[must_use]
    pub fn features(&self) -> Features {
        self.reference.features
    }

    /// Bytes of a segment.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        u64::from(self.reference.segment_blocks) * BLOCK_BYTES as u64
    }

    /// Most bytes of pages that the store keeps at once, without the volumes that are missing.
    #[must_use]
    pub fn usable_bytes(&self) -> u64 {
        let reachable = self.segments.iter().filter(|facts| facts.case.is_some());
        let there = |volume: &&VolumeFacts| volume.bytes.is_some();
        let blocks = usable_blocks(
            reachable.count() as u64,
            self.volumes.iter().filter(there).count(),
            self.reference.segment_blocks,
        );
        blocks * BLOCK_BYTES as u64
    }

    /// The pages that count, in the order of namespaces and keys.
    pub fn live(&self) -> impl ExactSizeIterator<Item = Page> + '_ {
        self.records.live.iter().map(|&index| self.page(index))
    }

    /// Number of page records, live or not.
    #[must_use]
    pub fn record_count(&self) -> usize {
        self.records.found.len()
    }

    /// Number of page records whose write a crash interrupted, and whose key has an older whole
    /// record.
    #[must_use]
    pub fn unfinished_records(&self) -> usize {
        let fates = self.records.fates.iter();
        fates.filter(|fate| **fate == Fate::Unfinished).count()
    }

    /// Every record of a key, in all namespaces; oldest first in each namespace.
    pub fn records_of(&self, key: KeyPrefix) -> impl Iterator<Item = Page> + '_ {
        let ranges = (0..self.namespaces.len()).map(move |slot| self.records.range(slot, key));
        ranges.flatten().map(|index| self.page(index))
    }

    /// The records that recovery keeps of the pages that count, the oldest commits first.
    pub(crate) fn live_found(&self) -> Vec<Found<Whole>> {
        let live = self.records.live.iter();
        let mut live: Vec<_> = live.map(|&index| self.records.found[index]).collect();
        live.sort_unstable_by_key(|page| (page.commit, page.birth));
        live
    }

    /// Blocks of a page.
    pub(crate) fn page_blocks(&self, page: &Found<Whole>) -> u32 {
        self.records.blocks(page)
    }

    /// The place of a page's payload.
    pub(crate) fn place_of(&self, page: &Found<Whole>) -> ReadAt {
        self.spots[page.place.segment.0 as usize].data(page.place.start, self.records.blocks(page))
    }

    /// The disk of the survey.
    pub(crate) fn disk(&self) -> &dyn Disk {
        self.disk.as_ref()
    }

    fn page(&self, index: usize) -> Page {
        let found = &self.records.found[index];
        let segment = found.place.segment.0 as usize;
        let namespace = usize::from(found.slot.0);
        Page {
            namespace,
            key: found.extra.key,
            parent: found.parent,
            depth: found.extra.depth,
            segment,
            offset: self.offset(found),
            bytes: self.records.bytes(found),
            birth: found.birth,
            commit: found.commit,
            checksum: found.checksum,
            proven: found.proven,
            fate: self.records.fates[index],
        }
    }

    fn offset(&self, found: &Found<Whole>) -> u64 {
        let segment = self.spots[found.place.segment.0 as usize].headers().offset;
        segment + u64::from(found.place.start) * BLOCK_BYTES as u64
    }
}

impl Records {
    fn new(found: Vec<Found<Whole>>, fates: Vec<Fate>, namespaces: &[NamespaceInit]) -> Records {
        let live = (0..fates.len()).filter(|&index| fates[index] == Fate::Live);
        Records {
            live: live.collect(),
            page_blocks: namespaces.iter().map(|init| init.page_blocks).collect(),
            found,
            fates,
        }
    }

    fn range(&self, slot: usize, key: KeyPrefix) -> Range<usize> {
        let wanted = (slot, key);
        let place = |found: &Found<Whole>| (usize::from(found.slot.0), found.key);
        let start = self.found.partition_point(|found| place(found) < wanted);
        let end = self.found.partition_point(|found| place(found) <= wanted);
        start..end
    }

    fn blocks(&self, found: &Found<Whole>) -> u32 {
        self.page_blocks[usize::from(found.slot.0)]
    }

    fn bytes(&self, found: &Found<Whole>) -> u64 {
        u64::from(self.blocks(found)) * BLOCK_BYTES as u64
    }
}

impl Drop for Survey {
    fn drop(&mut self) {
        self.disk.shutdown();
    }
}
