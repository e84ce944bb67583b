//! One node: a span of whole pages, where they lie, and who holds them.

use larder_format::PageKey;

use crate::runs::{L1, L2, Runs};

/// No node.
pub(super) const NONE: u32 = u32::MAX;

/// A node, by its place in the slab and the life of that place: a node that has gone is never mistaken for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId {
    pub(super) at: u32,
    pub(super) generation: u32,
}

/// Number of a load in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoadId(pub u32);

/// L3 has all of its pages.
pub(super) const IN_L3: u8 = 1;
/// Its pages are on their way to L3.
pub(super) const PUTTING: u8 = 2;
/// Its pages are on their way from L1 to L2.
pub(super) const BACKING_UP: u8 = 4;
/// It was of use since L3 was last told.
pub(super) const WARM: u8 = 8;
/// The forward that writes its L1 pages has not ended: they cannot leave, and are not copied.
pub(super) const PENDING: u8 = 16;

/// See the module. A root is a node without pages.
#[derive(Debug)]
pub(super) struct Node {
    /// `page_tokens` words a page.
    pub(super) words: Box<[u32]>,
    /// One a page.
    pub(super) keys: Box<[PageKey]>,
    /// None, or one page a page.
    pub(super) l1: Runs<L1>,
    /// None, or one page a page.
    pub(super) l2: Runs<L2>,
    /// The last operation that was served from it.
    pub(super) used: u64,
    /// The operation that made it.
    pub(super) made: u64,
    pub(super) parent: u32,
    /// The children are a ring-free list: the first, then each one's `next`.
    pub(super) first_child: u32,
    pub(super) next: u32,
    pub(super) previous: u32,
    pub(super) generation: u32,
    /// Pages before it in its chain.
    pub(super) depth: u32,
    /// Children that are in L1.
    pub(super) l1_children: u32,
    /// Locks on it or below it that hold its L1 pages, and so its L2 pages too.
    pub(super) l1_locks: u32,
    /// Locks on it or below it that hold its L2 pages.
    pub(super) l2_locks: u32,
    /// Requests that inserted its tokens.
    pub(super) hits: u32,
    pub(super) priority: i32,
    /// The upper half of the hash it is found by, while it has siblings.
    pub(super) tag: u32,
    /// The load that fills its L1 pages, or [`NONE`].
    pub(super) loading: u32,
    pub(super) flags: u8,
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
            flags: 0,
        }
    }

    pub(super) fn pages(&self) -> usize {
        self.keys.len()
    }

    /// The pages up to its end.
    pub(super) fn end(&self) -> usize {
        self.depth as usize + self.pages()
    }

    pub(super) fn is_root(&self) -> bool {
        self.keys.is_empty()
    }

    /// Whether it has no page in L1 or L2: a root, or a node whose pages were lost.
    pub(super) fn is_bare(&self) -> bool {
        self.l1.is_empty() && self.l2.is_empty()
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    pub(super) fn load(&self) -> Option<LoadId> {
        (self.loading != NONE).then_some(LoadId(self.loading))
    }

    /// Whether its L1 pages have to stay.
    pub(super) fn is_l1_held(&self) -> bool {
        self.l1_locks > 0 || self.has(PENDING)
    }

    pub(super) fn is_locked(&self) -> bool {
        self.l1_locks > 0 || self.l2_locks > 0
    }
}
