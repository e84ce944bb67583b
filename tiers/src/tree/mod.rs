//! The radix tree: spans of pages, where they lie in L1 and L2, and who holds them. It decides nothing and moves nothing.
//!
//! ```text
//!  roots   one for each (extra key, cache salt, bigram): a node without pages
//!    |
//!   node   words  keys   one a page
//!    |     l1            none, or one page a page
//!   node   l2            none, or one page a page
//! ```
//!
//! Invariants, proven by [`Tree::validate`]:
//! - words, keys and runs of a node line up; every node but a root is in L1 or L2, or its pages
//!   were lost and something holds it or hangs below it;
//! - a node in L1 has all its ancestors in L1; unless under write_back, a node in L2 has all its ancestors in L2;
//! - siblings differ in their first page;
//! - a lock on a node is counted on every node up to its root, so that a split carries it and its receipt releases both parts;
//! - the leaf sets, from which eviction takes, are exact.
//!
//! A split keeps the number of the node for its *last* part: whoever holds a node's number holds its end, and everything
//! before it is found on the way up. That is why an acknowledgement that names a node and a count of pages reaches every part.
//!
//! | module | what it is |
//! |---|---|
//! | `node` | one node |
//! | `leaves` | which nodes may go, in which order |
//! | `links` | parents, children, the table that finds a child, splitting |
//! | `path` | from tokens to nodes: match, insert |
//! | `hold` | locks and states of transfers |
//! | `go` | leaving L1, leaving L2, leaving the tree |
//! | `lost` | L1 pages whose load or forward failed |
//! | `validate` | the invariants |

mod go;
mod hold;
mod leaves;
mod links;
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
use lost::Loss;
use node::{NONE, Node};

pub use go::Gone;
pub use hold::{Hold, Lock};
pub use leaves::EvictionOrder;
pub use node::{LoadId, NodeId};
pub use path::{HostInserted, Inserted, Matched, Offer, Span};
pub use validate::Flaw;
pub(crate) use validate::claim;

/// Pages of the tree, by where they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeCounts {
    /// Nodes, roots included.
    pub nodes: usize,
    /// Pages in L1.
    pub l1_pages: usize,
    /// Pages in L1 that a lock holds, or whose forward has not ended.
    pub l1_locked_pages: usize,
    /// Pages in L2.
    pub l2_pages: usize,
}

/// See the module.
#[derive(Debug)]
pub struct Tree {
    nodes: Vec<Node>,
    /// Places of `nodes` that hold none.
    vacant: Vec<u32>,
    roots: HashMap<RootKey, u32>,
    root_keys: HashMap<u32, RootKey>,
    /// Children by parent and first page, those that are not the only ones.
    table: HashTable<u32>,
    hasher: RandomState,
    leaves: Leaves,
    counts: TreeCounts,
    /// Nodes of the last descent.
    path: Vec<u32>,
    /// Nodes that are WARM.
    warm: Vec<NodeId>,
    /// Losses so far, and those whose pages are still held.
    losses: u64,
    lost: Vec<Loss>,
    page_tokens: usize,
    write_back: bool,
    /// Operations so far: the tree's clock, the same on every rank of a group.
    tick: u64,
}

impl Tree {
    /// An empty tree over pages of `page_tokens` tokens. Under `write_back`, a node may be in L2 though its parent is not.
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
            losses: 0,
            lost: Vec::new(),
            page_tokens: page_tokens.get(),
            write_back,
            tick: 0,
        }
    }

    /// Makes room for so many nodes, so that none has to move when more come. Memory is taken when it is first used.
    pub fn reserve(&mut self, nodes: usize) {
        self.nodes.reserve(nodes);
        let nodes_of_slab = &self.nodes;
        let hash = |at: &u32| links::spread(nodes_of_slab[*at as usize].tag);
        self.table.reserve(nodes, hash);
    }

    /// Sizes at this moment.
    #[must_use]
    pub fn counts(&self) -> TreeCounts {
        self.counts
    }

    /// Bytes of the tree, tokens aside, allocators' overhead aside.
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

    /// The place of a node, while it is in the tree.
    fn place(&self, id: NodeId) -> Option<u32> {
        let node = self.nodes.get(id.at as usize)?;
        (node.generation == id.generation).then_some(id.at)
    }

    /// The place of a node that somebody holds.
    ///
    /// # Panics
    /// When it has gone: what is locked never goes.
    fn held(&self, id: NodeId) -> u32 {
        self.place(id).expect("a node that is held is in the tree")
    }

    /// Changes a node. All that the leaf sets depend on is changed through here, so that they stay exact.
    fn change<R>(&mut self, at: u32, change: impl FnOnce(&mut Node) -> R) -> R {
        let node = &mut self.nodes[at as usize];
        self.leaves.unlist(at, node);
        let l1 = node.l1.pages() as usize;
        let locked = if node.is_l1_held() { l1 } else { 0 };
        self.counts.l1_pages -= l1;
        self.counts.l1_locked_pages -= locked;
        self.counts.l2_pages -= node.l2.pages() as usize;
        let result = change(node);
        let l1 = node.l1.pages() as usize;
        let locked = if node.is_l1_held() { l1 } else { 0 };
        self.counts.l1_pages += l1;
        self.counts.l1_locked_pages += locked;
        self.counts.l2_pages += node.l2.pages() as usize;
        self.leaves.list(at, node);
        result
    }

    /// The keys of a node's pages.
    #[must_use]
    pub fn keys(&self, id: NodeId) -> Option<&[PageKey]> {
        Some(&self.node(self.place(id)?).keys)
    }

    /// The key before a node's first, if there is one.
    #[must_use]
    pub fn parent_key(&self, id: NodeId) -> Option<PageKey> {
        let parent = self.node(self.place(id)?).parent;
        self.node(parent).keys.last().copied()
    }

    /// The places from a node up to its root, both included.
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
