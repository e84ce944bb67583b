//! Orders to the device and to L3, and their completions.

use larder_format::PageKey;

use super::ids::{Fence, OpId};
use crate::runs::{L1, L2, Runs};

/// A page of a tail pool in both tiers, to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailPair {
    /// The pool.
    pub pool: usize,
    /// Its page of L1.
    pub l1: u32,
    /// Its page of L2.
    pub l2: u32,
}

/// A page of a tail pool in L2 and L3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailPage {
    /// The pool.
    pub pool: usize,
    /// Its key.
    pub key: PageKey,
    /// Its page of L2.
    pub l2: u32,
}

/// The pages of a tail pool that the prefixes of a lookup need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TailAsk {
    /// The pool.
    pub pool: usize,
    /// Number of pages at the end of a prefix that it needs.
    pub trailing: usize,
    /// For each page of the prompt, whether L1 or L2 has it.
    pub known: Vec<bool>,
}

/// The part of a lookup that concerns tail pools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TailLookup {
    /// The keys of the pages before those of the lookup, which are in L2.
    pub before: Vec<PageKey>,
    /// The pools.
    pub pools: Vec<TailAsk>,
}

/// A copy within L1 of a page of a tail pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailCopy {
    /// The pool.
    pub pool: usize,
    /// The page that is copied.
    pub from: u32,
    /// The page that gets it.
    pub to: u32,
}

/// Work for the device or L3. Each order is answered by one [`Done`] with its number, in any order,
/// except [`Order::Touch`] and [`Order::TouchTails`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Copy L1 to L2, all layers.
    BackUp {
        /// The number of the order.
        id: OpId,
        /// The source.
        l1: Runs<L1>,
        /// The destination.
        l2: Runs<L2>,
    },
    /// Copy L2 to L1, layer by layer.
    Load {
        /// The number of the order.
        id: OpId,
        /// The source.
        l2: Runs<L2>,
        /// The destination.
        l1: Runs<L1>,
        /// Pages of tail pools, loaded with them.
        tails: Vec<TailPair>,
        /// Starts after all forwards up to this one have ended, whether they succeeded or failed:
        /// no later one of a former owner touches the destination.
        after: Fence,
    },
    /// Write pages of L2 to L3.
    Put {
        /// The number of the order.
        id: OpId,
        /// The keys, consecutive in their chain.
        keys: Vec<PageKey>,
        /// The key before the first one.
        parent: Option<PageKey>,
        /// Number of pages before the first one.
        depth: usize,
        /// The source.
        l2: Runs<L2>,
        /// Whether another rank writes these pages. Then there is nothing to do, and all pages
        /// count as stored.
        is_skipped: bool,
    },
    /// Look up how many of these pages L3 has, counted from the first.
    Exists {
        /// The number of the order.
        id: OpId,
        /// The keys, consecutive in their chain.
        keys: Vec<PageKey>,
        /// Whether it counts as a request: it is the first one for its prompt.
        is_counted: bool,
        /// With tail pools, the answer is the longest prefix that can be continued.
        tails: Option<TailLookup>,
    },
    /// Copy pages of tail pools from L1 to L2.
    BackUpTails {
        /// The number of the order.
        id: OpId,
        /// The pages.
        pairs: Vec<TailPair>,
    },
    /// Write a page of a tail pool to L3.
    PutTail {
        /// The number of the order.
        id: OpId,
        /// The page.
        page: TailPage,
    },
    /// Read pages of tail pools from L3: all, or none counts.
    GetTails {
        /// The number of the order.
        id: OpId,
        /// The pages.
        pages: Vec<TailPage>,
    },
    /// Read pages of L3 into L2.
    Get {
        /// The number of the order.
        id: OpId,
        /// The keys, consecutive in their chain.
        keys: Vec<PageKey>,
        /// The destination.
        l2: Runs<L2>,
    },
    /// Report to L3 that these pages were used. Not answered.
    Touch {
        /// The keys.
        keys: Vec<PageKey>,
    },
    /// Report to L3 that these pages of a tail pool were used. Not answered.
    TouchTails {
        /// The pool.
        pool: usize,
        /// The keys.
        keys: Vec<PageKey>,
    },
}

impl Order {
    /// Whether it is answered.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        !matches!(self, Order::Touch { .. } | Order::TouchTails { .. })
    }
}

/// The outcome of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Of a backup or load: whether everything was copied.
    Copied(bool),
    /// Of a put, exists or get: number of pages, counted from the first.
    Pages(usize),
}

/// The completion of an order. Nothing outside the core touches its pages any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The order.
    pub id: OpId,
    /// The outcome.
    pub outcome: Outcome,
}

/// A completion that does not match an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DoneError {
    /// No such order is outstanding.
    #[error("order {} is not outstanding: it was answered twice, or never issued", .0.0)]
    Unknown(OpId),
    /// The outcome does not match the kind of the order.
    #[error("order {} was answered by {found:?}, which does not match its kind", .id.0)]
    WrongKind {
        /// The order.
        id: OpId,
        /// The outcome.
        found: Outcome,
    },
}
