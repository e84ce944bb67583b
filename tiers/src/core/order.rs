//! Orders to the device and to L3, and their completions.

use larder_format::PageKey;

use super::ids::{Fence, OpId};
use crate::runs::{L1, L2, Runs};

/// Work for the device or L3. Each order is answered by one [`Done`] with its number, in any order,
/// except [`Order::Touch`].
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
