//! One node: a span of whole pages, their location, and their locks.

use larder_format::PageKey;

use crate::planted::planted;
use crate::runs::{L1, L2, Runs};

/// No node.
pub(super) const NONE: u32 = u32::MAX;

/// Identifies a node by its slot in the slab and the generation of the slot. A removed node is
/// never confused with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId {
    pub(super) at: u32,
    pub(super) generation: u32,
}

/// Number of a load in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoadId(pub u32);

/// L3 has all pages of the node.
pub(super) const IN_L3: u8 = 1;
/// The pages are queued for L3.
pub(super) const PUTTING: u8 = 2;
/// The pages are being copied from L1 to L2.
pub(super) const BACKING_UP: u8 = 4;
/// The node was used since the last report to L3.
pub(super) const WARM: u8 = 8;
/// The forward that writes the L1 pages has not ended: they can neither leave nor be copied.
pub(super) const PENDING: u8 = 16;
/// L3 has not taken the pages when they were offered late. They were not used since.
pub(super) const DECLINED: u8 = 32;

/// See the module documentation. A root is a node without pages.
#[derive(Debug)]
pub(super) struct Node {
    /// `page_tokens` words per page.
    pub(super) words: Box<[u32]>,
    /// One key per page.
    pub(super) keys: Box<[PageKey]>,
    /// Empty, or one L1 page per page.
    pub(super) l1: Runs<L1>,
    /// Empty, or one L2 page per page.
    pub(super) l2: Runs<L2>,
    /// The last operation that used the node.
    pub(super) used: u64,
    /// The operation that created the node.
    pub(super) made: u64,
    pub(super) parent: u32,
    /// The children form a linked list: the first child, then the `next` of each.
    pub(super) first_child: u32,
    pub(super) next: u32,
    pub(super) previous: u32,
    pub(super) generation: u32,
    /// Number of pages before the node in its chain.
    pub(super) depth: u32,
    /// Number of children in L1.
    pub(super) l1_children: u32,
    /// Locks on the node or below it that hold its L1 pages, and therefore its L2 pages too.
    pub(super) l1_locks: u32,
    /// Locks on the node or below it that hold its L2 pages.
    pub(super) l2_locks: u32,
    /// Number of requests that inserted its tokens.
    pub(super) hits: u32,
    pub(super) priority: i32,
    /// The upper half of its hash in the table of children, while it has siblings.
    pub(super) tag: u32,
    /// The load that fills its L1 pages, or [`NONE`].
    pub(super) loading: u32,
    /// Number of copies to L2, or then of writes to L3, that have failed in a row.
    pub(super) failures: u8,
    pub(super) flags: u8,
    /// After a failure: the progress of the core at which the next attempt may begin.
    pub(super) due: u64,
}

impl NodeId {
    /// Not behind any other.
    pub(crate) const LEAST: NodeId = NodeId {
        at: 0,
        generation: 0,
    };
}

impl Node {
    pub(super) fn empty() -> Node {
        Node {
            words: Box::default(),
            keys: Box::default(),
            l1: Runs::default(),
            l2: Runs::default(),
            used: 0,
            made: 0,
            parent: NONE,
            first_child: NONE,
            next: NONE,
            previous: NONE,
            generation: 0,
            depth: 0,
            l1_children: 0,
            l1_locks: 0,
            l2_locks: 0,
            hits: 0,
            priority: 0,
            tag: 0,
            loading: NONE,
            failures: 0,
            flags: 0,
            due: 0,
        }
    }

    pub(super) fn pages(&self) -> usize {
        self.keys.len()
    }

    /// The end of the node, in pages from the start of the chain.
    pub(super) fn end(&self) -> usize {
        self.depth as usize + self.pages()
    }

    pub(super) fn is_root(&self) -> bool {
        self.keys.is_empty()
    }

    /// Whether the node has no page in L1 or L2: a root, or a node whose pages were lost.
    pub(super) fn is_bare(&self) -> bool {
        self.l1.is_empty() && self.l2.is_empty()
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Whether its pages are in L2, and neither in L3 nor queued for it nor declined.
    pub(super) fn is_unwritten(&self) -> bool {
        !self.l2.is_empty() && !self.has(IN_L3 | PUTTING | DECLINED)
    }

    /// Whether its last copy to a lower tier has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.failures > 0
    }

    /// Records a failed copy. Each pause is twice as long as the one before.
    pub(super) fn fail(&mut self, now: u64) {
        self.due = now.saturating_add(1 << self.failures.min(62));
        self.failures = self.failures.saturating_add(1);
        if planted!(NoPauseAfterFailure) {
            self.due = now;
        }
    }

    pub(super) fn load(&self) -> Option<LoadId> {
        (self.loading != NONE).then_some(LoadId(self.loading))
    }

    /// Whether the L1 pages must stay.
    pub(super) fn is_l1_held(&self) -> bool {
        self.l1_locks > 0 || self.has(PENDING)
    }

    pub(super) fn is_locked(&self) -> bool {
        self.l1_locks > 0 || self.l2_locks > 0
    }
}

/// The table's hash of a tag. Both its upper and its lower bits are significant.
pub(super) fn spread(tag: u32) -> u64 {
    u64::from(tag).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
