//! Reading a store without opening it, for the tools: what is on the volumes, what counts of it, and what is broken.
//!
//! A survey writes nothing, whatever it finds, and goes on past everything that is broken: each flaw is written down with its
//! place ([`Flaw`]). What a record means is decided by recovery's own rules, so that a survey shows what an open would find.
//! [`SurveyOptions::hold`] keeps writers away while it lasts; without it a survey of a store in use is one moment's look.
//!
//! What a crash may have cut short is no flaw: descriptor blocks and header copies that were under way count as unfinished, and so
//! do pages that no sync covers and whose bytes fail their checksum ([`Survey::check_payloads`]).
//!
//! | module | what it does |
//! |---|---|
//! | `volumes` | opens what is there of the volumes |
//! | `segments` | scans them and finds what is broken |
//! | `chains` | how the pages of a chain lie |
//! | `payloads` | reads every live page and checks its bytes |
//! | `extract` | gives out pages with their bytes, chain by chain |
//! | `losses` | sums up the cost of damage, per namespace |
//!
//! Does not repair anything, and does not know what to print.

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
    BLOCK_BYTES, Fingerprint, KeyPrefix, Namespace, PageKey, Run, Serial, StoreId, Superblock,
};

use crate::capacity::usable_blocks;
use crate::core::NamespaceInit;
use crate::disk::mailbox::ReadAt;
use crate::disk::probe::{Want, open_disk};
use crate::disk::{Disk, DiskOptions, Witness};
use crate::error::StoreError;
use crate::recovery::scan::{Disbelief, Spot};
use crate::recovery::{Fate, Found, Whole};
use crate::volume::LockHolder;

pub use chains::ChainFacts;
pub use extract::{Ancestry, RecordId};
pub use losses::{Losses, NamespaceLosses};
pub use payloads::{BadPage, PayloadFault, Payloads};
pub use segments::{Removal, RemovalKind, SegmentFacts};
use volumes::{Opened, Opening};
pub use volumes::{VolumeFacts, VolumeState};

/// How often a store in use is read again when something looks broken: it may have been written at that moment.
const LOOKS_MAX: usize = 3;

/// How a store is surveyed.
#[derive(Clone, Debug)]
pub struct SurveyOptions {
    /// Where volumes other than the first are, if not where the store remembers them.
    pub volumes: Vec<PathBuf>,
    /// Refuse a store that somebody has open, and keep writers away until the survey is dropped.
    pub hold: bool,
    /// Also list the deletions, evictions and clears that concern this key.
    pub key: Option<KeyPrefix>,
    /// Which disk to read with.
    pub disk: Want,
    /// Operations of one volume with the kernel at once.
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

/// Why a store could not be surveyed at all.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    /// As when it is opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Nothing is left that says what the store is.
    #[error(
        "{path}: neither copy of the superblock can be used; name another volume of the store with --volume, restore the \
         volume's first 128 KiB from a backup, or create the store anew"
    )]
    NoSuperblock {
        /// The first volume.
        path: PathBuf,
        /// What is wrong with each copy.
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
    /// Somebody has it open.
    InUse,
}

/// Who opened the store last.
#[derive(Clone, Debug)]
pub struct HolderFacts {
    /// Its process, as far as this one can see.
    pub process: LockHolder,
    /// Its name, while it exists.
    pub command: Option<String>,
}

/// Something that is not as it was written.
#[derive(Clone, Debug)]
pub struct Flaw {
    /// Index of the volume.
    pub volume: usize,
    /// The segment's number there, when it is about one.
    pub segment: Option<u32>,
    /// Byte offset in the volume, when it is about a place.
    pub offset: Option<u64>,
    /// What is wrong.
    pub reason: FlawReason,
}

/// What is wrong.
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
        /// What it should be.
        needed: u64,
    },
    /// A volume does not know a run that all volumes were told of.
    #[error("the volume is of run {run}, the store has been in run {newest} since: an old copy")]
    Stale {
        /// Its run.
        run: Run,
        /// The store's.
        newest: Run,
    },
    /// A copy of a superblock.
    #[error("superblock copy: {reason}")]
    Superblock {
        /// What is wrong with it.
        reason: String,
        /// Whether the volume's other copy can be used.
        other_is_good: bool,
    },
    /// A copy of a segment's header.
    #[error("header copy: {reason}")]
    Header {
        /// What is wrong with it.
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
    /// Page records that no writer writes together.
    #[error("{pages} page records {why}")]
    Disbelieved {
        /// How many.
        pages: u64,
        /// Why they are not believed.
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
            FlawReason::Disbelieved { why, .. } => match why {
                Disbelief::Size => "wrong_size",
                Disbelief::Overlap => "overlap",
                Disbelief::Namespaces => "namespaces",
            },
            FlawReason::Overlap(_) => "overlap",
        }
    }

    /// The page it is about, if it is about one.
    #[must_use]
    pub fn key(&self) -> Option<PageKey> {
        match self {
            FlawReason::Overlap(key) => Some(*key),
            _ => None,
        }
    }

    /// What it costs, and what to do about it.
    #[must_use]
    pub fn advice(&self) -> &'static str {
        match self {
            FlawReason::Missing(_) => {
                "bring the volume back, or name its new path with --volume; `larder verify --repair --degraded` gives up its pages"
            }
            FlawReason::Truncated { .. } => {
                "restore the volume; the pages of the segments cut off are lost"
            }
            FlawReason::Stale { .. } => {
                "bring the current volume back; `larder verify --repair --degraded` gives up its pages, for any volume but the first"
            }
            FlawReason::Superblock {
                other_is_good: true,
                ..
            } => {
                "the other copy is good, nothing is lost: the next open for writing, or `larder verify --repair`, writes both anew"
            }
            FlawReason::Superblock { .. } => {
                "the volume cannot be opened: restore its first 128 KiB from a backup; `larder verify --repair --degraded` gives up its pages, for any volume but the first"
            }
            FlawReason::Header {
                other_is_good: true,
                ..
            } => {
                "the other copy is good, nothing is lost: `larder verify --repair` writes the bad one anew"
            }
            FlawReason::Header { .. } => {
                "the descriptor blocks tell the same: the next open for writing writes both copies anew"
            }
            FlawReason::LostSegment(_) => {
                "its pages are lost and miss; putting them again repairs that, and `larder \
                 verify --repair` gives the segment back. Pages that its records had deleted, \
                 evicted or cleared may be found again: where that must not be, clear their \
                 namespaces"
            }
            FlawReason::Descriptor(_) | FlawReason::Disbelieved { .. } => {
                "its pages are lost and miss; putting them again repairs that, and `larder verify --repair` saves what lies around them"
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
    /// The name by which its pages know it.
    pub fingerprint: Fingerprint,
    /// Its full record; `None` when the store does not hold it.
    pub record: Option<Namespace>,
    /// Its live pages.
    pub pages: u64,
    /// Bytes of those, padding included.
    pub bytes: u64,
}

/// A page that some descriptor names.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// Position of its namespace in [`Survey::namespaces`].
    pub namespace: usize,
    /// Its key.
    pub key: PageKey,
    /// The key before it in its chain.
    pub parent: Option<KeyPrefix>,
    /// Pages before it in its chain.
    pub depth: u32,
    /// Position of its segment in [`Survey::segments`].
    pub segment: usize,
    /// Byte offset of its payload in the segment's volume.
    pub offset: u64,
    /// Bytes of its payload, padding included.
    pub bytes: u64,
    /// When it was put.
    pub birth: Serial,
    /// The group that carries this record of it.
    pub commit: Serial,
    /// The checksum of its payload, as it was put.
    pub checksum: u64,
    /// Whether its payload is known to be on the device.
    pub proven: bool,
    /// What became of it.
    pub fate: Fate,
}

/// A store that was looked at. Dropping it lets writers in again.
pub struct Survey {
    reference: Superblock,
    /// Whether it is closed.
    pub condition: Condition,
    /// Who opened it last.
    pub holder: HolderFacts,
    /// The highest run that a superblock has seen.
    pub run: Run,
    /// Its volumes, in its order.
    pub volumes: Vec<VolumeFacts>,
    /// The segments of all volumes, in the order of the volumes, as far as at least their beginning is there.
    pub segments: Vec<SegmentFacts>,
    /// How many more there should be, on volumes that are missing or behind the end of one. Only counted: a superblock may claim
    /// millions, and must not size anything.
    pub unreachable: u64,
    /// Its namespaces, those with no page left among them.
    pub namespaces: Vec<NamespaceFacts>,
    /// What is broken.
    pub flaws: Vec<Flaw>,
    /// Descriptor blocks and header copies that the last crash cut short.
    pub unfinished_blocks: u64,
    /// What was done to the key asked for, other than puts; oldest first.
    pub removals: Vec<Removal>,
    losses: Option<Losses>,
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
    /// Looks at the store whose first volume is at `path`.
    ///
    /// # Errors
    /// [`SurveyError`]: it is no store, of a newer version, without a superblock, or in use although it must not be; or this process
    /// cannot read it.
    pub fn new(path: &Path, options: &SurveyOptions) -> Result<Survey, SurveyError> {
        Survey::through(path, options, |disk| disk)
    }

    /// The same through a disk that is put before the store's own.
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
            records: Records::default(),
            disk: Arc::new(Witness::new(through(disk))),
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

    /// Bytes of a segment.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        u64::from(self.reference.segment_blocks) * BLOCK_BYTES as u64
    }

    /// Most bytes of pages that the store keeps at once, counting only the volumes that are there.
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

    /// How many page records there are, live or not.
    #[must_use]
    pub fn record_count(&self) -> usize {
        self.records.found.len()
    }

    /// How many page records are writes that a crash cut short, while an older record of the key is whole.
    #[must_use]
    pub fn unfinished_records(&self) -> usize {
        let fates = self.records.fates.iter();
        fates.filter(|fate| **fate == Fate::Unfinished).count()
    }

    /// Every record of a key, in all namespaces; of each namespace the oldest first.
    pub fn records_of(&self, key: KeyPrefix) -> impl Iterator<Item = Page> + '_ {
        let ranges = (0..self.namespaces.len()).map(move |slot| self.records.range(slot, key));
        ranges.flatten().map(|index| self.page(index))
    }

    /// What recovery keeps of the pages that count, the oldest commits first.
    pub(crate) fn live_found(&self) -> Vec<Found<Whole>> {
        let live = self.records.live.iter();
        let mut live: Vec<_> = live.map(|&index| self.records.found[index]).collect();
        live.sort_unstable_by_key(|page| (page.commit, page.birth));
        live
    }

    /// Where a page's payload is read.
    pub(crate) fn place_of(&self, page: &Found<Whole>) -> ReadAt {
        self.spots[page.place.segment.0 as usize].data(page.place.start, self.records.blocks(page))
    }

    /// The disk that it reads with.
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
