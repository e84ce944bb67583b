//! Checks of the invariants on a whole tree, and its digest, which compares the trees of two ranks.

use std::collections::HashMap;

use super::node::{BACKING_UP, NONE, Node, PENDING, PUTTING, WARM};
use super::{Tree, TreeCounts, unwritten_pages};
use crate::runs::{Runs, Tier};

/// A violated invariant of a tree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("node {node}: {what}")]
pub struct Flaw {
    /// The slot of the node.
    pub node: u32,
    /// The problem.
    pub what: &'static str,
}

impl Tree {
    /// Checks the invariants of the tree. The time grows with the tree.
    ///
    /// # Errors
    /// The first violation found.
    pub fn validate(&self) -> Result<(), Flaw> {
        let mut counts = TreeCounts::default();
        let mut listed = [0; 4];
        let mut entered = 0;
        for at in self.live() {
            let node = self.node(at);
            let flaw = |what| Err(Flaw { node: at, what });
            counts.nodes += 1;
            counts.l1_pages += node.l1.pages() as usize;
            counts.l2_pages += node.l2.pages() as usize;
            counts.unwritten_pages += unwritten_pages(node);
            if node.is_l1_held() {
                counts.l1_locked_pages += node.l1.pages() as usize;
            }
            if !self.leaves.is_exact(at, node) {
                return flaw("it is not listed where it belongs");
            }
            let member = self.leaves.membership(node);
            let sets = [member.l1, member.l2, member.double, member.unwritten];
            for (count, is_in) in listed.iter_mut().zip(sets) {
                *count += usize::from(is_in);
            }
            self.validate_children(at)?;
            if node.is_root() {
                let key = self.root_keys.get(&at);
                if node.parent != NONE || key.and_then(|key| self.roots.get(key)) != Some(&at) {
                    return flaw("it is a root that is not registered");
                }
                if node.first_child == NONE && !node.is_locked() {
                    return flaw("it is a root without children or locks");
                }
            } else {
                self.validate_node(at)?;
                entered += usize::from(self.has_siblings(at));
            }
        }
        let flaw = |what| Err(Flaw { node: NONE, what });
        if listed != self.leaves.lengths() {
            return flaw("a leaf set lists a removed node");
        }
        if counts != self.counts {
            return flaw("pages or nodes are not counted right");
        }
        if entered != self.table.len() {
            return flaw("the table does not hold exactly the nodes with siblings");
        }
        Ok(())
    }

    fn live(&self) -> impl Iterator<Item = u32> + '_ {
        let numbered = (0u32..).zip(&self.nodes);
        numbered
            .filter(|(at, node)| !node.is_root() || self.root_keys.contains_key(at))
            .map(|(at, _)| at)
    }

    fn validate_node(&self, at: u32) -> Result<(), Flaw> {
        let node = self.node(at);
        let parent = self.node(node.parent);
        let pages = node.pages();
        let fits = |pages_of: u32| pages_of == 0 || pages_of as usize == pages;
        let is_l2_way = self.write_back || parent.is_root() || !parent.l2.is_empty();
        let found = self.child(node.parent, &node.words[..self.page_tokens]);
        let checks = [
            (
                node.words.len() == pages * self.page_tokens,
                "its words do not fill its pages",
            ),
            (
                fits(node.l1.pages()) && fits(node.l2.pages()),
                "its runs do not fit its pages",
            ),
            (
                !node.is_bare() || node.first_child != NONE || node.is_locked(),
                "it is neither in L1 nor in L2, and nothing needs it",
            ),
            (
                node.depth as usize == parent.end(),
                "its depth is not where its parent ends",
            ),
            (
                node.l1.is_empty() || parent.is_root() || !parent.l1.is_empty(),
                "it is in L1 and its parent is not",
            ),
            (
                node.l2.is_empty() || is_l2_way,
                "it is in L2 and its parent is not",
            ),
            (
                node.load().is_none() || !node.l1.is_empty() && !node.l2.is_empty(),
                "it is being loaded and not in both tiers",
            ),
            (
                node.load().is_none() || node.l1_locks > 0,
                "it is being loaded and not held",
            ),
            (
                !node.has(BACKING_UP) || !node.l1.is_empty() && node.l2.is_empty(),
                "it is being backed up and not in L1 alone",
            ),
            (
                !node.has(BACKING_UP) || node.l1_locks > 0,
                "it is being backed up and not held",
            ),
            (
                !node.has(PUTTING) || node.l2_locks > 0,
                "it is queued for L3 and not held",
            ),
            (
                !node.has(PENDING) || !node.l1.is_empty() && node.load().is_none(),
                "its forward has not ended, and its pages are not there or loaded",
            ),
            (
                !node.has(PENDING) || !node.has(BACKING_UP),
                "it is being backed up before its forward has ended",
            ),
            (found == Some(at), "it cannot be found"),
        ];
        match checks.iter().find(|(holds, _)| !holds) {
            Some((_, what)) => Err(Flaw { node: at, what }),
            None => Ok(()),
        }
    }

    /// Checks a node against its children: links in both directions, counts, and no more locks
    /// below than on it.
    fn validate_children(&self, at: u32) -> Result<(), Flaw> {
        let node = self.node(at);
        let flaw = |what| Err(Flaw { node: at, what });
        let (mut in_l1, mut l1_locks, mut l2_locks) = (0, 0, 0);
        let mut previous = NONE;
        for child in self.children(at) {
            let below = self.node(child);
            if below.parent != at || below.previous != previous {
                return flaw("a child does not know it");
            }
            previous = child;
            in_l1 += u32::from(!below.l1.is_empty());
            l1_locks += below.l1_locks;
            l2_locks += below.l2_locks;
        }
        if in_l1 != node.l1_children {
            return flaw("its children in L1 are not counted right");
        }
        if l1_locks > node.l1_locks || l2_locks > node.l2_locks {
            return flaw("a lock below it is not counted on it");
        }
        Ok(())
    }

    /// Number of pages whose forward has not ended.
    #[must_use]
    pub fn pending_pages(&self) -> usize {
        let live = self.live().map(|at| self.node(at));
        live.filter(|node| node.has(PENDING)).map(Node::pages).sum()
    }

    /// Number of held locks, by kind.
    #[must_use]
    pub fn locks_out(&self) -> (u32, u32) {
        let roots = self.roots.values().map(|at| self.node(*at));
        roots.fold((0, 0), |(l1, l2), root| {
            (l1 + root.l1_locks, l2 + root.l2_locks)
        })
    }

    /// Marks every page that the tree owns in these tables, with one entry per page of the pool.
    ///
    /// # Errors
    /// A page does not exist in the pool or is already marked.
    pub fn claim_pages(&self, l1: &mut [bool], l2: &mut [bool]) -> Result<(), Flaw> {
        for at in self.live() {
            let node = self.node(at);
            claim(&node.l1, l1).map_err(|what| Flaw { node: at, what })?;
            claim(&node.l2, l2).map_err(|what| Flaw { node: at, what })?;
        }
        Ok(())
    }

    /// A digest of all state that two ranks must agree on. Equal trees have equal digests; page
    /// numbers are not included.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut places: HashMap<u32, u64> = HashMap::new();
        let mut sum = 0u64;
        let mut pending: Vec<u32> = self.roots.values().copied().collect();
        while let Some(at) = pending.pop() {
            let node = self.node(at);
            let above = places.get(&node.parent).copied().unwrap_or(0);
            let own = digest_node(node, above);
            places.insert(at, own);
            sum = sum.wrapping_add(own);
            pending.extend(self.children(at));
        }
        sum
    }
}

/// Marks pages.
pub(crate) fn claim<T: Tier>(runs: &Runs<T>, table: &mut [bool]) -> Result<(), &'static str> {
    for page in runs.page_numbers() {
        match table.get_mut(page as usize) {
            None => return Err("it has a page that its pool does not have"),
            Some(true) => return Err("one of its pages has another owner"),
            Some(owned) => *owned = true,
        }
    }
    Ok(())
}

fn digest_node(node: &Node, above: u64) -> u64 {
    let state = [
        u64::from(!node.l1.is_empty()) | u64::from(!node.l2.is_empty()) << 1,
        u64::from(node.flags & !WARM),
        u64::from(node.hits),
        u64::from(node.l1_locks),
        u64::from(node.l2_locks),
        node.used,
        u64::from(node.loading),
    ];
    let last = node
        .keys
        .last()
        .map(|key| *key.as_bytes())
        .unwrap_or_default();
    let (key_words, _) = last.as_chunks::<8>();
    let keys = key_words.iter().map(|word| u64::from_le_bytes(*word));
    keys.chain(state).fold(above ^ 0x9e37_79b9_7f4a_7c15, mix)
}

/// Mixes two words into one (the finalizer of SplitMix64).
fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(23) ^ b.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
