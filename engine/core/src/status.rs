//! The results of puts and gets, page by page.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The result of a put for one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PutStatus {
    /// Stored now.
    Stored,
    /// Stored before, and as durable as the sync policy requires.
    Duplicate,
    /// Not admitted; nothing was written.
    Refused(Refusal),
    /// Written, but not successfully.
    Failed(PutFailure),
}

impl PutStatus {
    /// Whether the page is in the store now.
    #[must_use]
    pub fn is_present(self) -> bool {
        matches!(self, PutStatus::Stored | PutStatus::Duplicate)
    }
}

/// Why a page was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// No room now: reclaim has not caught up, or everything is leased.
    NoSpace,
    /// Too many bytes of writes are in flight.
    Busy,
    /// Its parts do not have the namespace's shape.
    WrongShape,
    /// The page does not fit a segment of this store.
    TooLarge,
    /// The page and its ancestors are more than the store keeps. No page is evicted for it: without
    /// all its ancestors no lookup would find it.
    Unreachable,
    /// The store was opened read-only.
    ReadOnly,
    /// The store is closed, or a shared store has no owner.
    Closed,
    /// The serial numbers of the store's epoch are used up: reopen it.
    Exhausted,
    /// Every volume is in read-only service: its device refuses writes.
    ReadOnlyService,
    /// The policy of admission does not take it, or a page before it in the call.
    NotAdmitted,
    /// The budget of writes does not take it, or a page before it in the call.
    Budget,
    /// Its group is at the maximum of its quota and has no page that can go; or the page and its
    /// ancestors are more than that maximum; or its namespace is in two groups.
    Quota,
    /// Its tenant is being erased.
    Erased,
    /// Its tenant is new, and the keyring has as many tenants as it takes.
    KeyringFull,
}

/// Why a page could not be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PutFailure {
    /// The device failed the write, and the retry in another segment. Or its segment failed for
    /// another reason: another write, or a client that was given up.
    Write,
    /// The device failed the sync that this put waited for.
    Sync,
}

/// The result of a get for one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetStatus {
    /// Its bytes are in the caller's memory, whole and verified.
    Hit,
    /// The page was not read.
    Miss(MissReason),
}

impl GetStatus {
    /// Whether the page was read.
    #[must_use]
    pub fn is_hit(self) -> bool {
        self == GetStatus::Hit
    }
}

/// Why a page was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissReason {
    /// Not in the store.
    Absent,
    /// Its bytes failed their checksum; the page is forgotten.
    Damaged,
    /// Its write was in progress at the last crash and never finished; the page is forgotten.
    Unfinished,
    /// The device failed the read; the page is forgotten.
    ReadError,
    /// The deadline passed first.
    Deadline,
    /// The volume has not answered for longer than the hang limit.
    Hung,
    /// The page's segment was reused while a read-only handle read it.
    Stale,
    /// The parts do not have the namespace's shape.
    WrongShape,
    /// The store is closed.
    Closed,
    /// Its bytes hold their checksum, and cannot be decoded; the page is forgotten.
    Undecodable,
    /// Its bytes hold their checksum, and the key of its tenant does not open them, or is erased.
    /// It is not forgotten.
    Sealed,
}

impl fmt::Display for MissReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MissReason::Absent => "absent",
            MissReason::Damaged => "damaged",
            MissReason::Unfinished => "unfinished",
            MissReason::ReadError => "read error",
            MissReason::Deadline => "deadline",
            MissReason::Hung => "hung",
            MissReason::Stale => "stale",
            MissReason::WrongShape => "wrong shape",
            MissReason::Closed => "closed",
            MissReason::Undecodable => "undecodable",
            MissReason::Sealed => "sealed",
        })
    }
}
