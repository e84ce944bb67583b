//! What the core tells: counters, and what entered and left each tier.

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

/// Pages that entered or left a tier. Keys follow one another in their chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// They can be read there.
    Stored {
        /// Where.
        tier: TierName,
        /// Which.
        keys: Vec<PageKey>,
        /// The key before the first, if there is one.
        parent: Option<PageKey>,
    },
    /// They cannot any more. L3 does not say when it drops a page.
    Removed {
        /// Where from.
        tier: TierName,
        /// Which.
        keys: Vec<PageKey>,
    },
}

/// Counters since the start. Pages unless said otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Pages of prompts that started.
    pub requested: u64,
    /// Of those, found in L1.
    pub l1_hits: u64,
    /// Of those, found in L2 alone.
    pub l2_hits: u64,
    /// Brought into L2 by prefetches.
    pub l3_hits: u64,
    /// Taken over from requests.
    pub inserted: u64,
    /// Of requests, that the tree had already.
    pub duplicates: u64,
    /// Copied to L2.
    pub backed_up: u64,
    /// Not copied to L2: it had no room.
    pub backup_no_room: u64,
    /// Not copied to L2: the copy failed, or the parent's did.
    pub backup_failed: u64,
    /// Loaded into L1.
    pub loaded: u64,
    /// Whose load failed, or that of a page before them.
    pub load_failed: u64,
    /// Lost from L1: a forward that failed was to write them, or pages before them.
    pub forward_failed: u64,
    /// Loads that were declined, requests.
    pub loads_declined: u64,
    /// Left L1, still in L2.
    pub l1_evicted: u64,
    /// Left L1 and with it the tree, never copied to L2.
    pub l1_dropped: u64,
    /// Left L2.
    pub l2_evicted: u64,
    /// Dropped with an ancestor that could not be backed up.
    pub subtree_dropped: u64,
    /// Written to L3, or found there.
    pub put: u64,
    /// Not given to L3: too much was on its way.
    pub put_refused: u64,
    /// That L3 did not store.
    pub put_failed: u64,
    /// Prefetches that began.
    pub prefetches: u64,
    /// Read from L3, thrown away: the parent had left L2.
    pub prefetch_orphans: u64,
    /// Read from L3, thrown away: they had come by another way, or the request was gone.
    pub prefetch_wasted: u64,
    /// That L3 confirmed and then did not give.
    pub prefetch_short: u64,
    /// That L3 has and L2 had no room for.
    pub prefetch_no_room: u64,
    /// Prefetches declined, by reason.
    pub declined: Declines,
}

/// Prefetches declined, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Declines {
    /// The match ended in L1 alone.
    pub anchor_not_in_l2: u64,
    /// Too few tokens were left.
    pub below_threshold: u64,
    /// Prefetches under way ask for as much of L2 as they may.
    pub l2_share: u64,
    /// L3 has too few of the tokens.
    pub l3_miss: u64,
    /// Computing them is faster.
    pub break_even: u64,
    /// L2 had no room.
    pub l2_room: u64,
}
