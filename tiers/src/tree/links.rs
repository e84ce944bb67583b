//! Parents and children, the hash table of children by first page, and splitting.

use std::hash::{BuildHasher, Hash, Hasher};

use super::node::{IN_L3, NONE, Node, WARM, spread};
use super::{NodeId, Tree, unwritten_pages};
use crate::planted::planted;
use crate::prompt::RootKey;
use crate::runs::Runs;

impl Tree {
    fn tag(&self, parent: u32, page: &[u32]) -> u32 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write_u32(parent);
        page.hash(&mut hasher);
        (hasher.finish() >> 32) as u32
    }

    /// The child of `parent` that starts with this page.
    pub(super) fn child(&self, parent: u32, page: &[u32]) -> Option<u32> {
        let first = self.node(parent).first_child;
        if first == NONE {
            return None;
        }
        let begins = |at: u32| self.node(at).words.get(..page.len()) == Some(page);
        // Most nodes of a conversation have one child. Comparing it is cheaper than hashing.
        if self.node(first).next == NONE {
            return begins(first).then_some(first);
        }
        let tag = self.tag(parent, page);
        let is_it = |at: &u32| {
            let node = self.node(*at);
            node.tag == tag && node.parent == parent && begins(*at)
        };
        self.table.find(spread(tag), is_it).copied()
    }

    /// The root of these prompts, created if it does not exist.
    pub(super) fn root_or_new(&mut self, key: RootKey) -> u32 {
        if let Some(at) = self.roots.get(&key) {
            return *at;
        }
        let at = self.place_node(Node::empty());
        self.roots.insert(key, at);
        self.root_keys.insert(at, key);
        at
    }

    /// Removes a root without children.
    pub(super) fn drop_root(&mut self, at: u32) {
        if let Some(key) = self.root_keys.remove(&at) {
            self.roots.remove(&key);
        }
        self.vacate(at);
    }

    fn place_node(&mut self, mut node: Node) -> u32 {
        self.counts.nodes += 1;
        if let Some(at) = self.vacant.pop() {
            node.generation = self.node(at).generation;
            self.nodes[at as usize] = node;
            return at;
        }
        let at = u32::try_from(self.nodes.len()).unwrap_or(NONE);
        assert_ne!(at, NONE, "a tree has fewer than 2^32 - 1 nodes");
        self.nodes.push(node);
        at
    }

    fn vacate(&mut self, at: u32) -> Node {
        let vacant = Node {
            generation: self.node(at).generation.wrapping_add(1),
            ..Node::empty()
        };
        self.vacant.push(at);
        self.counts.nodes -= 1;
        std::mem::replace(&mut self.nodes[at as usize], vacant)
    }

    /// Inserts a new node below `parent`. It has words, keys and runs; this function sets its
    /// links.
    pub(super) fn attach(&mut self, parent: u32, mut node: Node) -> u32 {
        node.parent = parent;
        node.next = self.node(parent).first_child;
        let (next, in_l1) = (node.next, !node.l1.is_empty());
        let (l1, l2) = (node.l1.pages() as usize, node.l2.pages() as usize);
        let at = self.place_node(node);
        if next != NONE {
            if !self.has_siblings(next) {
                self.enter(next);
            }
            self.nodes[next as usize].previous = at;
            self.enter(at);
        }
        self.change(parent, |parent| {
            parent.first_child = at;
            parent.l1_children += u32::from(in_l1);
        });
        self.counts.l1_pages += l1;
        self.counts.l2_pages += l2;
        self.counts.unwritten_pages += unwritten_pages(self.node(at));
        self.leaves.list(at, &self.nodes[at as usize]);
        at
    }

    /// Whether a node has siblings and is therefore in the table.
    pub(super) fn has_siblings(&self, at: u32) -> bool {
        let node = self.node(at);
        node.next != NONE || node.previous != NONE
    }

    fn enter(&mut self, at: u32) {
        let node = self.node(at);
        let tag = self.tag(node.parent, &node.words[..self.page_tokens]);
        self.nodes[at as usize].tag = tag;
        let nodes = &self.nodes;
        let hash = |at: &u32| spread(nodes[*at as usize].tag);
        self.table.insert_unique(spread(tag), at, hash);
    }

    fn leave(&mut self, at: u32) {
        let entry = self
            .table
            .find_entry(spread(self.node(at).tag), |other| *other == at);
        entry
            .expect("every node with siblings is in the table")
            .remove();
    }

    /// Removes a node without children from the tree, and then the nodes above that become bare.
    pub(super) fn detach(&mut self, at: u32) -> Node {
        let parent = self.node(at).parent;
        let node = self.unlink(at);
        self.drop_bare(parent);
        node
    }

    /// Removes a node without children from the tree. The parent always stays.
    pub(super) fn unlink(&mut self, at: u32) -> Node {
        let node = self.node(at);
        assert_eq!(node.first_child, NONE, "nodes leave from the leaves up");
        let (parent, next, previous) = (node.parent, node.next, node.previous);
        let was_in_l1 = !node.l1.is_empty();
        self.leaves.unlist(at, &self.nodes[at as usize]);
        if self.has_siblings(at) {
            self.leave(at);
        }
        if next != NONE {
            self.nodes[next as usize].previous = previous;
        }
        if previous != NONE {
            self.nodes[previous as usize].next = next;
        }
        for sibling in [next, previous] {
            if sibling != NONE && !self.has_siblings(sibling) {
                self.leave(sibling);
            }
        }
        let relink = |parent: &mut Node| {
            parent.l1_children -= u32::from(was_in_l1);
            if previous == NONE {
                parent.first_child = next;
            }
        };
        if planted!(StaleLeafSet) {
            relink(&mut self.nodes[parent as usize]);
        } else {
            self.change(parent, relink);
        }
        let above = self.node(parent);
        if !above.is_root() && (above.l2.is_empty() || !above.has(IN_L3)) {
            self.bereft.push(self.id(parent));
        }
        let node = self.vacate(at);
        self.counts.l1_pages -= node.l1.pages() as usize;
        self.counts.l2_pages -= node.l2.pages() as usize;
        self.counts.unwritten_pages -= unwritten_pages(&node);
        if node.is_l1_held() {
            self.counts.l1_locked_pages -= node.l1.pages() as usize;
        }
        node
    }

    /// Splits a node after its first `pages` pages. Its number stays with the last part. Returns
    /// the first part.
    pub(super) fn split(&mut self, at: u32, pages: usize) -> u32 {
        let node = &mut self.nodes[at as usize];
        assert!(pages > 0 && pages < node.pages(), "a split makes two parts");
        let count = pages as u32;
        let (words, rest) = divide(&mut node.words, pages * self.page_tokens);
        node.words = rest;
        let (keys, rest) = divide(&mut node.keys, pages);
        node.keys = rest;
        let mut front = Node {
            words,
            keys,
            l1: divide_runs(&mut node.l1, count),
            l2: divide_runs(&mut node.l2, count),
            first_child: at,
            generation: 0,
            l1_children: u32::from(!node.l1.is_empty()),
            ..*node
        };
        node.depth += count;
        if planted!(SplitForgetsHostRun) {
            front.l2 = Runs::default();
        }
        if planted!(SplitForgetsLocks) {
            front.l1_locks = 0;
            front.l2_locks = 0;
        }
        let (parent, next, previous) = (front.parent, front.next, front.previous);
        let has_siblings = self.has_siblings(at);
        if has_siblings {
            self.leave(at);
        }
        let first = self.place_node(front);
        let rest = &mut self.nodes[at as usize];
        rest.parent = first;
        rest.next = NONE;
        rest.previous = NONE;
        if has_siblings {
            self.enter(first);
        }
        if next != NONE {
            self.nodes[next as usize].previous = first;
        }
        if previous == NONE {
            self.nodes[parent as usize].first_child = first;
        } else {
            self.nodes[previous as usize].next = first;
        }
        self.leaves.list(first, &self.nodes[first as usize]);
        if self.node(first).has(WARM) {
            self.warm.push(self.id(first));
        }
        first
    }

    /// The parts that contain the last `pages` pages up to a node's end: the node itself, then its
    /// ancestors.
    pub(super) fn parts(&self, node: NodeId, pages: usize) -> Vec<u32> {
        let mut left = pages;
        let mut parts = Vec::new();
        for at in self.upward(self.held(node)) {
            if left == 0 {
                break;
            }
            let own = self.node(at).pages();
            assert!(own <= left, "nodes are split, never joined");
            left -= own;
            parts.push(at);
        }
        parts
    }
}

fn divide<T: Clone>(whole: &mut Box<[T]>, at: usize) -> (Box<[T]>, Box<[T]>) {
    let rest = whole[at..].into();
    let mut first = std::mem::take(whole).into_vec();
    first.truncate(at);
    (first.into_boxed_slice(), rest)
}

/// Keeps the last part in `runs` and returns the first part.
fn divide_runs<T: crate::runs::Tier>(runs: &mut Runs<T>, pages: u32) -> Runs<T> {
    if runs.is_empty() {
        return Runs::default();
    }
    let rest = runs.split_off(pages);
    std::mem::replace(runs, rest)
}
