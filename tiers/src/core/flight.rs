//! Work in progress: transfers, inserts whose forward has not ended, and prefetches.

use larder_format::PageKey;

use super::ids::{Fence, RequestId};
use super::order::TailPage;
use crate::prompt::RootKey;
use crate::runs::{L2, Runs};
use crate::tails::{Hold, TailId};
use crate::tree::{Lock, NodeId};

/// Entries of tail pools, by pool.
pub(super) type TailIds = Vec<(usize, TailId)>;

/// A transfer in flight. Its lock holds the node in which its pages end.
#[derive(Debug)]
pub(super) enum Flight {
    Backup {
        lock: Lock,
        l2: Runs<L2>,
        /// The node leaves L1 once it is in L2.
        evicts: bool,
    },
    Load {
        lock: Lock,
        pages: usize,
        /// Pages of tail pools, by pool.
        tails: Vec<(usize, Hold)>,
        /// The outcome, while it waits for a load above it: pages below a load in flight are not
        /// readable.
        ended: Option<bool>,
    },
    Put {
        lock: Lock,
        /// Pages of the node, and how many of them are queued.
        pages: usize,
        given: usize,
    },
    /// A copy of pages of tail pools, by pool, with their pages of L2.
    TailBackup(Vec<(usize, Hold, u32)>),
    /// A write of a page of a tail pool.
    TailPut(usize, Hold),
}

/// The state of a node that has to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Late {
    /// It is queued for L3.
    Queued,
    /// Pages before it are.
    Waits,
    /// L3 has declined it, or pages before it.
    Declined,
    /// The queue of L3 is full.
    NoRoom,
}

/// An insert whose forward has not ended.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) forward: Fence,
    /// The newest forward at that time. The path may contain pages of any forward up to this one.
    pub(super) until: Fence,
    pub(super) request: RequestId,
    pub(super) is_running: bool,
    /// The end of the inserted path; `None` if it has no whole page.
    pub(super) end: Option<NodeId>,
    /// Number of pages at the end of the path that the tree took from the request. They cannot
    /// leave L1 while the insert is pending.
    pub(super) pages: usize,
    /// With tail pools.
    pub(super) tails: Option<Box<PendingTails>>,
}

/// The entries of tail pools that an insert concerns.
#[derive(Debug, Default)]
pub(super) struct PendingTails {
    /// Entries that the request gave.
    pub(super) given: TailIds,
    /// Entries from which it has started and whose forwards had not ended.
    pub(super) on: TailIds,
}

/// Why a prefetch was not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Declined {
    /// The cached part ends in a node that is not in L2, so nothing can be inserted below it there.
    AnchorNotInL2,
    /// The remaining tokens are below the threshold.
    BelowThreshold,
    /// Prefetches in progress leave less than the threshold of their share of L2: try again later.
    L2Share,
    /// L3 has fewer tokens than the threshold.
    L3Miss,
    /// Computing the tokens is expected to be faster.
    BreakEven,
    /// L2 has no room for the minimum number of pages: try again later.
    L2Room,
}

/// The state of a prefetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefetchState {
    /// The request must wait.
    Waiting,
    /// The prefetch has ended with this number of pages in L2, and is removed.
    Ended(usize),
    /// Nothing was read. The prefetch is removed.
    Declined(Declined),
    /// There is no such prefetch.
    Unknown,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// Waiting for the lookup in L3.
    Asked,
    /// Pages of tail pools arrive, before the others.
    ReadingTails { tails: Vec<TailPage>, l2: Runs<L2> },
    /// Pages arrive in batches.
    Reading {
        l2: Runs<L2>,
        /// Pages that have arrived.
        arrived: usize,
        /// Pages of the batch in flight: at least one.
        batch: usize,
    },
    /// No request waits any more. An answer is outstanding. If it is that of a read, these pages
    /// belong to it.
    Draining { l2: Runs<L2>, tails: Vec<TailPage> },
    /// Over, but not polled yet.
    Over(PrefetchState),
}

/// A prefetch.
#[derive(Debug)]
pub(super) struct Prefetch {
    pub(super) stage: Stage,
    /// The requested pages, until the prefetch is over and the request has polled.
    pub(super) claim: Option<Claim>,
    /// The first time a request had to wait for it, in microseconds.
    pub(super) blocked_since: Option<u64>,
}

/// The requested pages and the held node of a prefetch.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) root: RootKey,
    /// Words and keys from the start of the prompt to the last requested page.
    pub(super) words: Vec<u32>,
    pub(super) keys: Vec<PageKey>,
    /// The first requested page.
    pub(super) from: usize,
    /// The prefix that the upper tiers could continue before.
    pub(super) known: usize,
    /// Holds the parent node, later the last arrived node.
    pub(super) anchor: Option<Lock>,
    /// Holds the pages of tail pools that have arrived or were in L2, by pool.
    pub(super) tails: Vec<(usize, Hold)>,
}

impl Claim {
    pub(super) fn wanted(&self) -> usize {
        self.keys.len() - self.from
    }
}

impl Prefetch {
    /// Whether an order of this prefetch is outstanding.
    pub(super) fn is_waiting(&self) -> bool {
        !matches!(self.stage, Stage::Over(_))
    }

    /// Number of requested pages.
    pub(super) fn wanted(&self) -> usize {
        self.claim.as_ref().map_or(0, Claim::wanted)
    }

    /// Whether it holds a node.
    pub(super) fn holds_anchor(&self) -> bool {
        self.claim
            .as_ref()
            .is_some_and(|claim| claim.anchor.is_some())
    }

    /// L2 pages owned by the prefetch.
    pub(super) fn l2(&self) -> Option<&Runs<L2>> {
        match &self.stage {
            Stage::Reading { l2, .. }
            | Stage::ReadingTails { l2, .. }
            | Stage::Draining { l2, .. } => Some(l2),
            Stage::Asked | Stage::Over(_) => None,
        }
    }

    /// Pages of tail pools that it owns.
    pub(super) fn tails(&self) -> &[TailPage] {
        match &self.stage {
            Stage::ReadingTails { tails, .. } | Stage::Draining { tails, .. } => tails,
            Stage::Asked | Stage::Reading { .. } | Stage::Over(_) => &[],
        }
    }
}
