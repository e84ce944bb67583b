//! Reports of the core: counters, and events of pages entering and leaving tiers.

use larder_format::PageKey;
use serde::Serialize;

/// A tier, in events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TierName {
    /// The device pool.
    L1,
    /// The host pool.
    L2,
    /// The store.
    L3,
}

/// Pages that entered or left a tier. Keys are consecutive in their chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The pages are readable in the tier.
    Stored {
        /// The tier.
        tier: TierName,
        /// The keys.
        keys: Vec<PageKey>,
        /// The key before the first one, if there is one.
        parent: Option<PageKey>,
    },
    /// The pages are no longer readable. L3 does not report when it drops a page.
    Removed {
        /// The tier.
        tier: TierName,
        /// The keys.
        keys: Vec<PageKey>,
    },
}

/// Counters since the start, in pages unless noted otherwise. Copies, loads, writes and losses
/// include the pages of windows and states.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Pages of prompts of started requests.
    pub requested: u64,
    /// Requested pages found in L1.
    pub l1_hits: u64,
    /// Requested pages found in L2 only.
    pub l2_hits: u64,
    /// Pages read into L2 by prefetches.
    pub l3_hits: u64,
    /// Pages taken over from requests.
    pub inserted: u64,
    /// Pages of requests that the tree already had.
    pub duplicates: u64,
    /// Pages copied to L2.
    pub backed_up: u64,
    /// Pages not copied to L2 when their forward had ended: no room. The copy is ordered again when
    /// no transfer is in flight.
    pub backup_no_room: u64,
    /// States that were not kept at a border: a pool of states has no room in L1.
    pub states_no_room: u64,
    /// Pages not copied to L2: the copy of the pages or of their parent failed. They are tried
    /// again as those of [`Stats::put_failed`].
    pub backup_failed: u64,
    /// Pages loaded into L1.
    pub loaded: u64,
    /// Pages whose load failed, or the load of a page before them.
    pub load_failed: u64,
    /// Pages lost from L1 by a failed forward that wrote them or pages before them.
    pub forward_failed: u64,
    /// Requests whose load was declined.
    pub loads_declined: u64,
    /// Pages evicted from L1 that stay in L2.
    pub l1_evicted: u64,
    /// Pages evicted from L1 and from the tree without a copy in L2.
    pub l1_dropped: u64,
    /// Pages evicted from L2.
    pub l2_evicted: u64,
    /// Pages dropped with an ancestor that could not be backed up.
    pub subtree_dropped: u64,
    /// Pages written to L3, or found there.
    pub put: u64,
    /// Pages not queued for L3 when they were in L2: the queue was full. They are queued again when
    /// no transfer is in flight, unless they have been evicted ([`Stats::put_refused`]).
    pub put_delayed: u64,
    /// Pages evicted from L2 that should have been written to L3 before: the queue was full, or L3
    /// had not stored them.
    pub put_refused: u64,
    /// Pages evicted from L2 that L3 had not taken late: a budget of writes, for example, refuses
    /// those whose use is the least likely.
    pub put_declined: u64,
    /// Pages that L3 did not store. They are tried again after pauses, and when a caller waits for
    /// L3 ([`Core::retry_failed`](super::Core::retry_failed)).
    pub put_failed: u64,
    /// Prefetches started.
    pub prefetches: u64,
    /// Pages read from L3 and discarded: the parent had left L2.
    pub prefetch_orphans: u64,
    /// Pages read from L3 and discarded: another request had provided them, or the request had
    /// ended.
    pub prefetch_wasted: u64,
    /// Pages that L3 confirmed but did not return.
    pub prefetch_short: u64,
    /// Pages in L3 for which L2 had no room.
    pub prefetch_no_room: u64,
    /// Prefetches declined, by reason.
    pub declined: Declines,
}

/// Prefetches declined, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Declines {
    /// The cached part ended in L1 only.
    pub anchor_not_in_l2: u64,
    /// Too few tokens remained.
    pub below_threshold: u64,
    /// Prefetches in progress had reached their share of L2.
    pub l2_share: u64,
    /// L3 has too few of the tokens.
    pub l3_miss: u64,
    /// Computing the tokens is faster.
    pub break_even: u64,
    /// L2 had no room.
    pub l2_room: u64,
}
