//! Removal from L1, from L2, and from the tree. The leaf sets define the candidates; the caller
//! selects one.

use larder_format::PageKey;

use super::node::{IN_L3, NONE};
use super::{NodeId, Tree};
use crate::runs::{L1, L2, Runs};

/// The pages removed with a node.
#[derive(Debug, Default)]
pub struct Gone {
    /// The L1 pages, which must be freed.
    pub l1: Runs<L1>,
    /// The L2 pages, which must be freed.
    pub l2: Runs<L2>,
    /// The keys of the pages that left L1.
    pub l1_keys: Vec<PageKey>,
    /// The keys of the pages that left L2.
    pub l2_keys: Vec<PageKey>,
}

impl Tree {
    /// The next node to leave L1, except those in `passed`, and whether it is also in L2.
    #[must_use]
    pub fn next_of_l1(&self, passed: &[NodeId]) -> Option<(NodeId, bool)> {
        let at = self
            .leaves
            .l1()
            .find(|at| !passed.contains(&self.id(*at)))?;
        Some((self.id(at), !self.node(at).l2.is_empty()))
    }

    /// Whether a node may leave L1: nothing holds it. The node may have been removed.
    #[must_use]
    pub fn may_leave_l1(&self, node: NodeId) -> bool {
        let node = self.place(node).map(|at| self.node(at));
        node.is_some_and(|node| self.leaves.membership(node).l1)
    }

    /// Whether a node may leave L2 and the tree: nothing holds it. The node may have been removed.
    #[must_use]
    pub fn may_leave_l2(&self, node: NodeId) -> bool {
        let node = self.place(node).map(|at| self.node(at));
        node.is_some_and(|node| self.leaves.membership(node).l2)
    }

    /// The next node to leave L2, and with it the tree. Unwritten nodes stay.
    #[must_use]
    pub fn next_of_l2(&self) -> Option<NodeId> {
        self.leaves.first_l2().map(|at| self.id(at))
    }

    /// The unwritten node that could leave L2 next, if it did not have to be written first.
    pub(crate) fn next_unwritten_leaf(&self) -> Option<NodeId> {
        let is_free = |at: &u32| {
            let node = self.node(*at);
            node.l1.is_empty() && node.first_child == NONE && !node.is_locked()
        };
        let leaf = self.leaves.unwritten().find(is_free);
        leaf.map(|at| self.id(at))
    }

    /// The next node in L1 whose L2 copy is dropped.
    #[must_use]
    pub fn next_double(&self) -> Option<NodeId> {
        self.leaves.first_double().map(|at| self.id(at))
    }

    /// Removes a node from L1 that is also in L2.
    ///
    /// # Panics
    /// If the node is held, or is not in both tiers: only nodes from the leaf sets may leave.
    pub fn leave_l1(&mut self, node: NodeId) -> Gone {
        let at = self.held(node);
        assert!(
            !self.node(at).l2.is_empty(),
            "a node that leaves only L1 is in L2"
        );
        Gone {
            l1: self.take_l1(at),
            l1_keys: self.node(at).keys.to_vec(),
            ..Gone::default()
        }
    }

    /// Removes the L2 copy of a node that is also in L1.
    ///
    /// # Panics
    /// As [`Tree::leave_l1`].
    pub fn leave_l2(&mut self, node: NodeId) -> Gone {
        let at = self.held(node);
        assert!(
            !self.node(at).l1.is_empty(),
            "a node that leaves only L2 is in L1"
        );
        Gone {
            l2: self.change(at, |node| std::mem::take(&mut node.l2)),
            l2_keys: self.node(at).keys.to_vec(),
            ..Gone::default()
        }
    }

    /// Removes a node without children.
    ///
    /// # Panics
    /// As [`Tree::leave_l1`].
    pub fn remove(&mut self, node: NodeId) -> Gone {
        let at = self.held(node);
        let node = self.detach(at);
        let keys = node.keys.into_vec();
        let (in_l1, in_l2) = (!node.l1.is_empty(), !node.l2.is_empty());
        let (l1_keys, l2_keys) = match (in_l1, in_l2) {
            (true, true) => (keys.clone(), keys),
            (true, false) => (keys, Vec::new()),
            (false, true) => (Vec::new(), keys),
            (false, false) => (Vec::new(), Vec::new()),
        };
        Gone {
            l1: node.l1,
            l2: node.l2,
            l1_keys,
            l2_keys,
        }
    }

    /// Removes a node that is not in L1, with all nodes below it. `None`, and no change, if any of
    /// them is held.
    pub fn remove_subtree(&mut self, node: NodeId) -> Option<Gone> {
        let top = self.held(node);
        let mut order = vec![top];
        let mut next = 0;
        while let Some(&at) = order.get(next) {
            if self.node(at).is_locked() {
                return None;
            }
            order.extend(self.children(at));
            next += 1;
        }
        let mut all = Gone::default();
        let nodes: Vec<NodeId> = order.into_iter().map(|at| self.id(at)).collect();
        for node in nodes.into_iter().rev() {
            // A bare node was already removed together with its last child.
            if self.place(node).is_none() {
                continue;
            }
            let gone = self.remove(node);
            all.l1 = all.l1.followed_by(&gone.l1);
            all.l2 = all.l2.followed_by(&gone.l2);
            all.l1_keys.extend(gone.l1_keys);
            all.l2_keys.extend(gone.l2_keys);
        }
        Some(all)
    }

    /// Whether L3 has a node's pages.
    #[must_use]
    pub fn is_in_l3(&self, node: NodeId) -> bool {
        self.place(node).is_some_and(|at| self.node(at).has(IN_L3))
    }
}
