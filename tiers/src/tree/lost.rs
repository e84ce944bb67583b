//! Lost pages: L1 pages whose bytes are not valid, because a load or a forward failed.
//!
//! A loss covers the L1 pages of a node and of all L1 nodes below it, because those were computed
//! from them. Nodes with L2 pages stay: their L2 copies are older than the loss. A node without L2
//! pages becomes bare: it has no page, but is still part of the path of its locks. A match ends
//! before a bare node, an insert gives it new pages, and it leaves the tree with its last lock and
//! child.
//!
//! Lost pages are not free at once: requests and loads that hold the nodes may still touch them.
//! Each loss counts the locks taken before it, and its pages are freed when all of these are
//! released. A later lock on the same nodes with new pages neither delays the release nor is
//! affected by the loss.

use larder_format::PageKey;

use super::hold::{Hold, Lock};
use super::loss::Loss;
use super::node::{NONE, PENDING, WARM};
use super::{NodeId, Tree};
use crate::planted::planted;
use crate::runs::{L1, Runs};

/// The result of a loss.
#[derive(Debug, Default)]
pub(crate) struct Lost {
    /// Number of L1 pages.
    pub(crate) pages: usize,
    /// The keys of the pages that were readable, by node.
    pub(crate) readable: Vec<Vec<PageKey>>,
    /// The nodes that had them.
    pub(crate) nodes: Vec<NodeId>,
}

impl Tree {
    /// Marks the last `pages` L1 pages up to a node's end, and all L1 pages below, as lost.
    pub(crate) fn lose(&mut self, node: NodeId, pages: usize) -> Lost {
        let mut lost = Lost::default();
        let parts = self.parts(node, pages);
        let top = if planted!(LossReachesOneFragment) {
            parts.first()
        } else {
            parts.last()
        };
        let Some(&top) = top else {
            return lost;
        };
        let nodes: Vec<NodeId> = self
            .in_l1_from(top)
            .into_iter()
            .map(|at| self.id(at))
            .collect();
        self.losses += 1;
        let mut loss = Loss {
            number: self.losses,
            top: self.id(top),
            holders: self.node(top).l1_locks,
            l1: Runs::default(),
        };
        if planted!(FreesLostPagesAtOnce) {
            loss.holders = 0;
        }
        // From the leaves up: a node leaves L1 after its children.
        for &id in nodes.iter().rev() {
            let at = self.held(id);
            if self.node(at).load().is_none() {
                lost.readable.push(self.node(at).keys.to_vec());
            }
            let pages = self.take_l1(at);
            lost.pages += pages.pages() as usize;
            loss.l1 = loss.l1.followed_by(&pages);
            self.change(at, |node| {
                node.loading = NONE;
                node.flags &= !PENDING;
                if node.is_bare() {
                    // It was never computed successfully, so no request has inserted it.
                    node.hits = 0;
                    node.flags &= WARM;
                }
            });
        }
        self.lost.push(loss);
        for &id in nodes.iter().rev() {
            if let Some(at) = self.place(id) {
                self.drop_bare(at);
            }
        }
        lost.nodes = nodes;
        lost
    }

    /// A node and all nodes below it that are in L1, parents first.
    fn in_l1_from(&self, top: u32) -> Vec<u32> {
        let mut nodes = vec![top];
        let mut next = 0;
        while let Some(&at) = nodes.get(next) {
            let children = self.children(at);
            nodes.extend(children.filter(|child| !self.node(*child).l1.is_empty()));
            next += 1;
        }
        nodes
    }

    /// Whether L1 pages under a lock were lost since it was taken.
    #[must_use]
    pub fn is_lost(&self, lock: &Lock) -> bool {
        self.losses_of(lock).next().is_some()
    }

    /// The losses, as indices in the list, that affect a lock.
    fn losses_of<'a>(&'a self, lock: &'a Lock) -> impl Iterator<Item = usize> + 'a {
        let later = self.lost.iter().enumerate();
        let later =
            later.filter(|(_, loss)| lock.hold == Hold::L1 && loss.number > lock.taken_after);
        let is_above = |top: NodeId| {
            let mut path = self.upward(self.held(lock.node()));
            path.any(|at| self.id(at) == top)
        };
        later.filter_map(move |(index, loss)| is_above(loss.top).then_some(index))
    }

    /// A lock is released: the losses since it was taken have one holder less.
    pub(super) fn release_losses(&mut self, lock: &Lock) {
        if self.lost.is_empty() {
            return;
        }
        let losses: Vec<usize> = self.losses_of(lock).collect();
        for index in losses {
            let holders = &mut self.lost[index].holders;
            *holders = holders.saturating_sub(1);
        }
    }

    /// The pages of losses without remaining holders.
    pub(crate) fn take_free_losses(&mut self) -> Vec<Runs<L1>> {
        let over = self.lost.extract_if(.., |loss| loss.holders == 0);
        over.map(|loss| loss.l1).collect()
    }

    /// The pages of the losses that still have holders.
    pub(crate) fn lost_pages(&self) -> impl Iterator<Item = &Runs<L1>> {
        self.lost.iter().map(|loss| &loss.l1)
    }

    /// Removes a node without page, child and lock; then its parent, if the same holds for it.
    pub(super) fn drop_bare(&mut self, from: u32) {
        let mut at = from;
        while at != NONE {
            let node = self.node(at);
            if !node.is_bare() || node.first_child != NONE || node.is_locked() {
                return;
            }
            let parent = node.parent;
            if node.is_root() {
                self.drop_root(at);
            } else if planted!(KeepsBareNodes) {
                return;
            } else {
                self.unlink(at);
            }
            at = parent;
        }
    }
}
