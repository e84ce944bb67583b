//! The radix tree: spans of pages, their location in L1 and L2, and their locks. It makes no
//! decisions and moves no data.
//!
//! ```text
//!  roots   one for each (extra key, cache salt, bigram): a node without pages
//!    |
//!   node   words  keys   one key per page
//!    |     l1            empty, or one L1 page per page
//!   node   l2            empty, or one L2 page per page
//! ```
//!
//! Invariants, checked by [`Tree::validate`]:
//! - words, keys and runs of a node have matching lengths; every node but a root is in L1 or L2, or
//!   its pages were lost and it has a lock or a child;
//! - a node in L1 has all its ancestors in L1; except with write_back, a node in L2 has all its
//!   ancestors in L2;
//! - siblings differ in their first page;
//! - a lock on a node is counted on every node up to its root, so that both parts of a split have
//!   it and its receipt releases both;
//! - the leaf sets, from which eviction takes its candidates, are exact.
//!
//! After a split, the node number belongs to the *last* part: a node number identifies the end of
//! the node, and everything before it is found on the path up. A completion with a node and a page
//! count therefore reaches every part.
//!
//! A module imports only the modules below it.
//!
//! | module | contents |
//! |---|---|
//! | `validate` | checks of the invariants |
//! | `go` | removal from L1, from L2, from the tree |
//! | `lost` | L1 pages whose load or forward failed |
//! | `hold` | locks and states of transfers |
//! | `path` | from tokens to nodes: match, insert |
//! | `links` | parents, children, the table of children, splitting |
//! | `leaves` | the eviction candidates, in order |
//! | `loss` | one loss of L1 pages |
//! | `node` | one node |

mod go;
mod hold;
mod leaves;
mod links;
mod loss;
mod lost;
mod node;
mod path;
mod validate;

use std::collections::HashMap;
use std::num::NonZeroUsize;

use hashbrown::HashTable;
use larder_format::PageKey;
use rapidhash::quality::RandomState;

use crate::prompt::RootKey;
use leaves::Leaves;
use loss::Loss;
use node::{NONE, Node, spread};

pub use go::Gone;
pub(crate) use hold::Late;
pub use hold::{Hold, Lock};
pub use leaves::EvictionOrder;
pub use node::{LoadId, NodeId};
pub use path::{HostInserted, Inserted, Matched, Offer, Span, Wait, Wanting};
pub use validate::Flaw;
pub(crate) use validate::claim;

/// Number of pages of the tree, by location.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeCounts {
    /// Nodes, including roots.
    pub nodes: usize,
    /// Pages in L1.
    pub l1_pages: usize,
    /// Pages in L1 that are locked or whose forward has not ended.
    pub l1_locked_pages: usize,
    /// Pages in L2.
    pub l2_pages: usize,
    /// Pages in L2 that are neither in L3 nor queued for it nor declined by it.
    pub unwritten_pages: usize,
}

/// See the module documentation.
#[derive(Debug)]
pub struct Tree {
    nodes: Vec<Node>,
    /// Unused slots of `nodes`.
    vacant: Vec<u32>,
    roots: HashMap<RootKey, u32>,
    root_keys: HashMap<u32, RootKey>,
    /// Children by parent and first page, for children with siblings.
    table: HashTable<u32>,
    hasher: RandomState,
    leaves: Leaves,
    counts: TreeCounts,
    /// Nodes of the last descent.
    path: Vec<u32>,
    /// Nodes that are WARM.
    warm: Vec<NodeId>,
    /// Nodes that have lost a child and may lack a copy in a lower tier.
    bereft: Vec<NodeId>,
    /// Number of losses so far, and the losses whose pages are still held.
    losses: u64,
    lost: Vec<Loss>,
    page_tokens: usize,
    write_back: bool,
    /// Number of operations so far: the tree's clock, equal on every rank of a group.
    tick: u64,
}

impl Tree {
    /// An empty tree over pages of `page_tokens` tokens. With `write_back`, a node may be in L2
    /// although its parent is not.
    #[must_use]
    pub fn new(page_tokens: NonZeroUsize, order: EvictionOrder, write_back: bool) -> Tree {
        Tree {
            nodes: Vec::new(),
            vacant: Vec::new(),
            roots: HashMap::new(),
            root_keys: HashMap::new(),
            table: HashTable::new(),
            hasher: RandomState::new(),
            leaves: Leaves::new(order, write_back),
            counts: TreeCounts::default(),
            path: Vec::new(),
            warm: Vec::new(),
            bereft: Vec::new(),
            losses: 0,
            lost: Vec::new(),
            page_tokens: page_tokens.get(),
            write_back,
            tick: 0,
        }
    }

    /// Keeps the nodes in order whose pages L3 was not asked to store: for an empty tree and an L3
    /// that is written late.
    #[must_use]
    pub fn with_unwritten(mut self) -> Tree {
        self.leaves.keep_unwritten();
        self
    }

    /// Reserves space for this many nodes, so that later inserts do not reallocate. Memory is used
    /// only when it is first touched.
    pub fn reserve(&mut self, nodes: usize) {
        self.nodes.reserve(nodes);
        let nodes_of_slab = &self.nodes;
        let hash = |at: &u32| spread(nodes_of_slab[*at as usize].tag);
        self.table.reserve(nodes, hash);
    }

    /// The current counts.
    #[must_use]
    pub fn counts(&self) -> TreeCounts {
        self.counts
    }

    /// Bytes of the tree, without tokens and allocator overhead.
    #[must_use]
    pub fn ram_bytes(&self) -> usize {
        let of_nodes: usize = self
            .nodes
            .iter()
            .map(|node| {
                size_of::<Node>()
                    + size_of_val(&*node.keys)
                    + node.l1.heap_bytes()
                    + node.l2.heap_bytes()
            })
            .sum();
        let of_table = self.table.allocation_size();
        of_nodes + of_table + self.leaves.heap_bytes() + self.vacant.capacity() * size_of::<u32>()
    }

    fn node(&self, at: u32) -> &Node {
        &self.nodes[at as usize]
    }

    fn id(&self, at: u32) -> NodeId {
        let generation = self.node(at).generation;
        NodeId { at, generation }
    }

    /// The slot of a node, while it is in the tree.
    fn place(&self, id: NodeId) -> Option<u32> {
        let node = self.nodes.get(id.at as usize)?;
        (node.generation == id.generation).then_some(id.at)
    }

    /// The slot of a held node.
    ///
    /// # Panics
    /// If the node has been removed: locked nodes are never removed.
    fn held(&self, id: NodeId) -> u32 {
        self.place(id).expect("a node that is held is in the tree")
    }

    /// Changes a node. All changes that affect the leaf sets must go through this function.
    fn change<R>(&mut self, at: u32, change: impl FnOnce(&mut Node) -> R) -> R {
        let node = &mut self.nodes[at as usize];
        self.leaves.unlist(at, node);
        let l1 = node.l1.pages() as usize;
        let locked = if node.is_l1_held() { l1 } else { 0 };
        self.counts.l1_pages -= l1;
        self.counts.l1_locked_pages -= locked;
        self.counts.l2_pages -= node.l2.pages() as usize;
        self.counts.unwritten_pages -= unwritten_pages(node);
        let result = change(node);
        let l1 = node.l1.pages() as usize;
        let locked = if node.is_l1_held() { l1 } else { 0 };
        self.counts.l1_pages += l1;
        self.counts.l1_locked_pages += locked;
        self.counts.l2_pages += node.l2.pages() as usize;
        self.counts.unwritten_pages += unwritten_pages(node);
        self.leaves.list(at, node);
        result
    }

    /// The keys of a node's pages.
    #[must_use]
    pub fn keys(&self, id: NodeId) -> Option<&[PageKey]> {
        Some(&self.node(self.place(id)?).keys)
    }

    /// The keys of all pages up to the end of a node.
    pub(crate) fn path_keys(&self, id: NodeId) -> Vec<PageKey> {
        let mut path: Vec<u32> = self
            .place(id)
            .map_or_else(Vec::new, |at| self.upward(at).collect());
        path.reverse();
        let keys = path.into_iter().flat_map(|at| self.node(at).keys.iter());
        keys.copied().collect()
    }

    /// The key before the first key of a node, if there is one.
    #[must_use]
    pub fn parent_key(&self, id: NodeId) -> Option<PageKey> {
        let parent = self.node(self.place(id)?).parent;
        self.node(parent).keys.last().copied()
    }

    /// The slots from a node up to its root, both included.
    fn upward(&self, from: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors((from != NONE).then_some(from), |at| {
            let parent = self.node(*at).parent;
            (parent != NONE).then_some(parent)
        })
    }

    fn children(&self, of: u32) -> impl Iterator<Item = u32> + '_ {
        let first = self.node(of).first_child;
        std::iter::successors((first != NONE).then_some(first), |at| {
            let next = self.node(*at).next;
            (next != NONE).then_some(next)
        })
    }
}

/// The pages of a node that L3 was not asked to store.
fn unwritten_pages(node: &Node) -> usize {
    if node.is_unwritten() { node.pages() } else { 0 }
}
