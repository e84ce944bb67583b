//! The facts of a survey about the store as a whole, and its faults.

use std::path::PathBuf;

use larder_base::system::holder::LockHolder;
use larder_disk::probe::Want;
use larder_format::{Fingerprint, KeyPrefix, Namespace, PageKey, Run};
use larder_seal::WrappingKey;

use larder_store::error::StoreError;
use larder_store::recovery::scan::{Disbelief, Spot};

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
    /// How an encrypted store is read.
    pub sealed: Sealed,
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
            sealed: Sealed::Refused,
            disk: Want::Auto,
            depth: 32,
        }
    }
}

/// How a survey reads an encrypted store.
#[derive(Clone, Debug)]
pub enum Sealed {
    /// Not at all.
    Refused,
    /// Without its key: all but the namespaces and the pages.
    Locked,
    /// With this key. A store that is not encrypted is refused.
    Unlocked(WrappingKey),
}

impl Sealed {
    /// The same, but an encrypted store without its key is read as far as that goes.
    #[must_use]
    pub fn or_locked(self) -> Sealed {
        match self {
            Sealed::Refused => Sealed::Locked,
            with_key => with_key,
        }
    }
}

/// Whether a surveyed store is encrypted, and was read with its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encryption {
    /// It is not encrypted.
    None,
    /// Its namespaces and pages are not known: it was read without its key.
    Locked {
        /// Pages at the last clean close, if that still counts.
        pages: Option<u64>,
    },
    /// It was read with its key.
    Unlocked,
}

/// Why a store could not be surveyed.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    /// The same errors as at an open.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No superblock is left that identifies the store.
    #[error(
        "{path}: no copy of the superblock can be used; if a process serves the store, stop \
         it in order: its close writes them again; else write them back with `larder superblock \
         restore`, from the file of a `larder superblock save`, or name another volume of the \
         store with --volume; without a saved file create the store anew"
    )]
    NoSuperblock {
        /// The first volume.
        path: PathBuf,
        /// The faults of all copies.
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
    /// A copy of the keyring.
    #[error("keyring copy: {reason}")]
    Keyring {
        /// The fault.
        reason: String,
        /// Whether another copy can be used.
        other_is_good: bool,
    },
    /// A copy of the quotas.
    #[error("copy of the quotas: {reason}")]
    Quotas {
        /// The fault.
        reason: String,
        /// Whether another copy can be used.
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
            FlawReason::Keyring { .. } => "keyring",
            FlawReason::Quotas { .. } => "quotas",
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
                "another copy is good, nothing is lost: the next open for writing, or `larder \
                 verify --repair`, writes all anew"
            }
            FlawReason::Superblock { .. } => {
                "the volume cannot be opened: write its superblocks back with `larder superblock \
                 restore`, from the file of a `larder superblock save`; `larder verify --repair \
                 --degraded` gives up its pages, for any volume but the first"
            }
            FlawReason::Keyring {
                other_is_good: true,
                ..
            }
            | FlawReason::Quotas {
                other_is_good: true,
                ..
            } => {
                "another copy is good, nothing is lost: the next open for writing, or `larder \
                 verify --repair`, writes all anew"
            }
            FlawReason::Keyring { .. } => {
                "without its keyring no page of the store can be read: bring back all volumes, or \
                 a copy of them that is whole, or superblocks with `larder superblock restore`; \
                 else create the store anew"
            }
            FlawReason::Quotas { .. } => {
                "no quota is in force, and no page is lost: `larder quota --clear` removes all, \
                 then set each anew"
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
                 writes all copies anew"
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
    pub(super) fn at(volume: usize, offset: u64, reason: FlawReason) -> Flaw {
        Flaw {
            volume,
            segment: None,
            offset: Some(offset),
            reason,
        }
    }

    pub(super) fn of_volume(volume: usize, reason: FlawReason) -> Flaw {
        Flaw {
            volume,
            segment: None,
            offset: None,
            reason,
        }
    }

    pub(super) fn in_segment(spot: &Spot, offset: Option<u64>, reason: FlawReason) -> Flaw {
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

impl NamespaceFacts {
    /// Its name outside of the store, if its record is known.
    #[must_use]
    pub fn outside(&self) -> Fingerprint {
        let record = self.record.as_ref();
        record.map_or(self.fingerprint, |record| record.plain().fingerprint())
    }
}
