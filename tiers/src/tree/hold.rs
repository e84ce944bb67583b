//! Locks, and the state that transfers store in their nodes.

use larder_format::PageKey;

use super::node::{BACKING_UP, DECLINED, IN_L3, NONE, Node, PENDING, PUTTING, WARM};
use super::path::Span;
use super::{LoadId, NodeId, Tree};
use crate::planted::planted;
use crate::runs::{L1, L2, Runs};

/// The pages that a lock holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Protects L1 and L2 pages from eviction: a request uses them, or a copy between the tiers is
    /// in flight.
    L1,
    /// Protects L2 pages alone: a write to L3 is reading them, or they are about to be loaded into
    /// L1, or to get child pages.
    L2,
}

/// The receipt of a lock. The pages from a node up to its root stay until the lock is released. It
/// survives splits.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a lock that is not given back holds its pages for ever"]
pub struct Lock {
    node: NodeId,
    pub(super) hold: Hold,
    /// Number of losses before it was taken.
    pub(super) taken_after: u64,
}

impl Lock {
    /// The node at the end of the locked path.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.node
    }
}

/// Pages for an L3 that is written late.
#[derive(Debug)]
pub(crate) enum Late {
    /// These.
    Span(Span),
    /// None.
    Nothing,
    /// Pages before them are being written.
    Waits,
    /// L3 has not taken pages before them, or they are not in L2: it never gets these.
    Orphan,
}

impl Tree {
    /// Locks the path from a node up to its root. `None` if the node has been removed.
    pub fn lock(&mut self, node: NodeId, hold: Hold) -> Option<Lock> {
        let from = self.place(node)?;
        self.count_locks(from, hold, |locks| *locks += 1);
        let taken_after = self.losses;
        Some(Lock {
            node,
            hold,
            taken_after,
        })
    }

    /// Releases a lock.
    #[expect(clippy::needless_pass_by_value, reason = "a receipt is used up")]
    pub fn unlock(&mut self, lock: Lock) {
        let from = self.held(lock.node);
        self.release_losses(&lock);
        self.count_locks(from, lock.hold, |locks| {
            *locks = locks.checked_sub(1).expect("a lock is given back once");
        });
        self.drop_bare(from);
    }

    /// Changes the locks from a node up to its root.
    fn count_locks(&mut self, from: u32, hold: Hold, count: impl Fn(&mut u32)) {
        let mut at = from;
        loop {
            let node = self.node(at);
            let parent = node.parent;
            if parent == NONE && planted!(LockLeak) {
                return;
            }
            self.change(at, |node| match hold {
                Hold::L1 => count(&mut node.l1_locks),
                Hold::L2 => count(&mut node.l2_locks),
            });
            if parent == NONE {
                return;
            }
            at = parent;
        }
    }

    /// Marks the forward that writes the L1 pages of a node as pending.
    pub(crate) fn begin_forward(&mut self, node: NodeId) {
        let at = self.held(node);
        self.change(at, |node| node.flags |= PENDING);
    }

    /// Whether the forward that writes the L1 pages of a node is pending. The node may have been
    /// removed.
    pub(crate) fn is_pending(&self, node: NodeId) -> bool {
        self.place(node)
            .is_some_and(|at| self.node(at).has(PENDING))
    }

    /// Whether a forward that writes L1 pages on the path to a node is pending.
    pub(crate) fn is_path_pending(&self, node: NodeId) -> bool {
        let from = self.place(node).unwrap_or(NONE);
        self.upward(from).any(|at| self.node(at).has(PENDING))
    }

    /// The forward that writes the last `pages` L1 pages up to a node's end has ended successfully.
    pub(crate) fn end_forward(&mut self, node: NodeId, pages: usize) {
        for at in self.parts(node, pages) {
            self.change(at, |node| node.flags &= !PENDING);
        }
    }

    /// A backup of a node begins. Returns its L1 pages.
    pub(crate) fn begin_backup(&mut self, node: NodeId) -> Runs<L1> {
        let at = self.held(node);
        self.change(at, |node| node.flags |= BACKING_UP);
        self.node(at).l1.clone()
    }

    /// The copy of the last `pages` pages up to a node's end to a lower tier has failed. Returns
    /// the progress of the core at which the first of them may be tried again.
    pub(crate) fn fail_copy(&mut self, node: NodeId, pages: usize, now: u64) -> u64 {
        let Some(first) = self.parts(node, pages).pop() else {
            return now;
        };
        let first = &mut self.nodes[first as usize];
        first.fail(now);
        first.due
    }

    /// The backup of the last `l2.pages()` pages up to a node's end has ended. Each part gets its
    /// L2 pages, or none does if `l2` is `None`. Returns the parts, first one first.
    pub(crate) fn end_backup(
        &mut self,
        node: NodeId,
        pages: usize,
        l2: Option<Runs<L2>>,
    ) -> Vec<NodeId> {
        let mut parts = self.parts(node, pages);
        let mut left = l2;
        if planted!(AckCoversOneFragment) {
            parts.truncate(1);
        }
        for &at in &parts {
            let count = self.node(at).pages() as u32;
            let own = left
                .as_mut()
                .map(|left| left.split_off(left.pages() - count));
            self.change(at, |node| {
                node.flags &= !BACKING_UP;
                if let Some(own) = own {
                    node.l2 = own;
                    node.failures = 0;
                }
            });
        }
        parts.reverse();
        parts.into_iter().map(|at| self.id(at)).collect()
    }

    /// A load into these L1 pages begins, for nodes from the root down that are in L2 only. Returns
    /// their L2 pages.
    pub(crate) fn begin_load(
        &mut self,
        nodes: &[NodeId],
        id: LoadId,
        mut l1: Runs<L1>,
    ) -> Runs<L2> {
        let mut l2 = Vec::new();
        for node in nodes {
            let at = self.held(*node);
            let rest = l1.split_off(self.node(at).pages() as u32);
            let own = std::mem::replace(&mut l1, rest);
            self.change(at, |node| node.loading = id.0);
            self.set_l1(at, own);
            l2.extend(self.node(at).l2.iter());
        }
        l2.into_iter().collect()
    }

    /// The load of the last `pages` pages up to a node's end has ended successfully. Returns the
    /// parts, first one first.
    pub(crate) fn end_load(&mut self, node: NodeId, pages: usize) -> Vec<NodeId> {
        let parts = self.parts(node, pages);
        for &at in &parts {
            self.change(at, |node| node.loading = NONE);
        }
        parts.into_iter().rev().map(|at| self.id(at)).collect()
    }

    /// Whether the parent of the last `pages` pages up to a node's end is being loaded.
    pub(crate) fn is_behind_load(&self, node: NodeId, pages: usize) -> bool {
        let top = self.parts(node, pages).pop();
        top.is_some_and(|top| self.node(self.node(top).parent).load().is_some())
    }

    /// Whether the last `pages` pages up to a node's end may enter L2: their parent is in L2, or
    /// does not have to be.
    pub(crate) fn may_enter_l2(&self, node: NodeId, pages: usize) -> bool {
        let top = self.parts(node, pages).pop();
        top.is_some_and(|top| {
            let parent = self.node(self.node(top).parent);
            self.write_back || parent.is_root() || !parent.l2.is_empty()
        })
    }

    /// The end of a node, in pages from the start of its chain.
    pub(crate) fn depth_of_end(&self, node: NodeId) -> Option<usize> {
        Some(self.node(self.place(node)?).end())
    }

    /// The pages of a node that L3 does not have. `None` unless all pages of the node are in L2 and
    /// none is queued for L3.
    #[must_use]
    pub(crate) fn wanting_put(&self, node: NodeId) -> Option<Span> {
        let at = self.place(node)?;
        let node = self.node(at);
        let in_l3 = node.has(IN_L3) && !planted!(WritesTwice);
        if node.l2.is_empty() || in_l3 || node.has(PUTTING) {
            return None;
        }
        Some(Span {
            keys: node.keys.to_vec(),
            parent: self.node(node.parent).keys.last().copied(),
            depth: node.depth as usize,
            l2: node.l2.clone(),
        })
    }

    /// The pages up to the end of a node that an L3 that is written late lacks: it gets them with
    /// all those before them.
    pub(crate) fn wanting_late(&self, node: NodeId) -> Late {
        let Some(end) = self.place(node).filter(|at| self.node(*at).is_unwritten()) else {
            return Late::Nothing;
        };
        let mut path = Vec::new();
        for at in self.upward(end) {
            let node = self.node(at);
            if node.is_root() || node.has(IN_L3) {
                break;
            }
            if !node.is_unwritten() && !planted!(WritesChildAlone) {
                return match node.has(PUTTING) {
                    true => Late::Waits,
                    false => Late::Orphan,
                };
            }
            if !node.is_unwritten() {
                break;
            }
            path.push(at);
        }
        path.reverse();
        let nodes = || path.iter().map(|at| self.node(*at));
        let Some(first) = nodes().next() else {
            return Late::Nothing;
        };
        Late::Span(Span {
            keys: nodes().flat_map(|node| node.keys.iter().copied()).collect(),
            parent: self.node(first.parent).keys.last().copied(),
            depth: first.depth as usize,
            l2: nodes().flat_map(|node| node.l2.iter()).collect(),
        })
    }

    /// The unwritten node that was used before all others.
    pub(crate) fn first_unwritten(&self) -> Option<NodeId> {
        let first = self.leaves.unwritten().next();
        first.map(|at| self.id(at))
    }

    /// L3 does not take these nodes until they are used again.
    pub(crate) fn decline(&mut self, nodes: &[NodeId]) {
        for node in nodes {
            let Some(at) = self.place(*node) else {
                continue;
            };
            self.change(at, |node| {
                if !node.has(IN_L3) {
                    node.flags |= DECLINED;
                }
            });
        }
    }

    /// L3 may be asked for all nodes again.
    pub(crate) fn end_declines(&mut self) {
        for at in 0..self.nodes.len() as u32 {
            if self.node(at).has(DECLINED) {
                self.change(at, |node| node.flags &= !DECLINED);
            }
        }
    }

    /// Splits a node after its first `pages` pages: more than none, and not all. Its number stays
    /// with the last part. Returns the first part.
    pub(crate) fn split_at(&mut self, node: NodeId, pages: usize) -> Option<NodeId> {
        let at = self.place(node)?;
        let first = self.split(at, pages);
        Some(self.id(first))
    }

    /// The last `pages` pages up to a node's end are queued for L3.
    pub(crate) fn begin_put(&mut self, node: NodeId, pages: usize) {
        for at in self.parts(node, pages) {
            self.change(at, |node| node.flags |= PUTTING);
        }
    }

    /// The put of the last `pages` pages up to a node's end has ended. L3 has the first `stored` of
    /// them: the part in which they end is split there. Returns the parts, first one first.
    pub(crate) fn end_put(&mut self, node: NodeId, pages: usize, stored: usize) -> Vec<NodeId> {
        let mut end = pages;
        for at in self.parts(node, pages) {
            let start = end - self.node(at).pages();
            if (start + 1..end).contains(&stored) {
                self.split(at, stored - start);
            }
            end = start;
        }
        end = pages;
        let parts = self.parts(node, pages);
        for &at in &parts {
            self.change(at, |node| {
                node.flags &= !PUTTING;
                if end <= stored {
                    node.flags |= IN_L3;
                    node.failures = 0;
                }
            });
            end -= self.node(at).pages();
        }
        parts.into_iter().rev().map(|at| self.id(at)).collect()
    }

    /// Nodes that have lost a child since the last call and lack a copy in L2, or in L3 if that is
    /// written. A copy of their path that was to be ordered later may have been remembered by the
    /// child.
    pub(crate) fn take_bereft(&mut self, writes_l3: bool) -> Vec<NodeId> {
        let mut bereft = std::mem::take(&mut self.bereft);
        bereft.retain(|id| {
            let node = self.place(*id).map(|at| self.node(at));
            node.is_some_and(|node| node.l2.is_empty() || writes_l3 && !node.has(IN_L3))
        });
        bereft
    }

    /// The keys of pages in L3 that were used since the last call.
    pub fn take_warm(&mut self) -> Vec<PageKey> {
        let mut keys = Vec::new();
        for id in std::mem::take(&mut self.warm) {
            if let Some(at) = self.place(id) {
                self.nodes[at as usize].flags &= !WARM;
                keys.extend_from_slice(&self.node(at).keys);
            }
        }
        keys
    }

    /// Assigns L1 pages to a node.
    pub(super) fn set_l1(&mut self, at: u32, l1: Runs<L1>) {
        let parent = self.node(at).parent;
        self.change(at, |node: &mut Node| node.l1 = l1);
        self.change(parent, |parent| parent.l1_children += 1);
    }

    /// Removes the L1 pages of a node.
    pub(super) fn take_l1(&mut self, at: u32) -> Runs<L1> {
        assert_eq!(
            self.node(at).l1_children,
            0,
            "L1 is left from the leaves up"
        );
        let parent = self.node(at).parent;
        let l1 = self.change(at, |node| std::mem::take(&mut node.l1));
        if planted!(StaleLeafSet) {
            self.nodes[parent as usize].l1_children -= 1;
        } else {
            self.change(parent, |parent| parent.l1_children -= 1);
        }
        l1
    }
}
