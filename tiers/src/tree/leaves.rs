//! The leaf sets: the nodes that eviction may take, in eviction order.
//!
//! Four sets, exact at all times:
//!
//! | set | location of its nodes | conditions |
//! |---|---|---|
//! | L1 | in L1 | no child in L1, no lock on L1, forward ended |
//! | L2 | in L2, not in L1 | no child, no lock of either kind, not unwritten |
//! | doubles | in L1 and L2 | no lock on L2 only, no transfer in flight, forward ended |
//! | unwritten | in L2 | L3 was not asked to store it: inner nodes, too, and always in LRU order |
//!
//! The third set is used only with write_back, the fourth only where L3 is written late. An entry
//! contains the rank that its node had when it was listed. A change that affects a rank or a
//! membership must unlist the node before and list it after; only `Tree::change` does.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::node::{BACKING_UP, NONE, Node, PENDING};
use crate::planted::planted;

/// Which of the candidate nodes is evicted first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvictionOrder {
    /// Least recently used.
    #[default]
    Lru,
    /// Least often hit, then least recently used.
    Lfu,
    /// First created.
    Fifo,
    /// Most recently used.
    Mru,
    /// Last created.
    Filo,
    /// Lowest priority, then least recently used.
    Priority,
}

impl EvictionOrder {
    /// All orders.
    pub const ALL: [EvictionOrder; 6] = [
        EvictionOrder::Lru,
        EvictionOrder::Lfu,
        EvictionOrder::Fifo,
        EvictionOrder::Mru,
        EvictionOrder::Filo,
        EvictionOrder::Priority,
    ];

    fn rank(self, node: &Node) -> Rank {
        match self {
            EvictionOrder::Lru => (node.used, node.made),
            EvictionOrder::Lfu => (u64::from(node.hits), node.used),
            EvictionOrder::Fifo => (node.made, 0),
            EvictionOrder::Mru => (!node.used, node.made),
            EvictionOrder::Filo => (!node.made, 0),
            // Flipping the sign bit maps the order of signed numbers to that of unsigned numbers.
            EvictionOrder::Priority => {
                let unsigned = node.priority.cast_unsigned() ^ (1 << 31);
                (u64::from(unsigned), node.used)
            }
        }
    }
}

type Rank = (u64, u64);

/// One leaf set. Equal ranks are ordered by slab number, which is the same on every rank of a
/// group.
#[derive(Debug, Default)]
struct LeafSet(BTreeSet<(Rank, u32)>);

/// The three sets.
#[derive(Debug)]
pub(super) struct Leaves {
    order: EvictionOrder,
    with_doubles: bool,
    with_unwritten: bool,
    l1: LeafSet,
    l2: LeafSet,
    doubles: LeafSet,
    unwritten: LeafSet,
}

/// The sets of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Membership {
    pub(super) l1: bool,
    pub(super) l2: bool,
    pub(super) double: bool,
    pub(super) unwritten: bool,
}

impl Leaves {
    pub(super) fn new(order: EvictionOrder, with_doubles: bool) -> Leaves {
        Leaves {
            order,
            with_doubles,
            with_unwritten: false,
            l1: LeafSet::default(),
            l2: LeafSet::default(),
            doubles: LeafSet::default(),
            unwritten: LeafSet::default(),
        }
    }

    /// Keeps the set of unwritten nodes from now on. The tree is empty.
    pub(super) fn keep_unwritten(&mut self) {
        self.with_unwritten = true;
    }

    pub(super) fn membership(&self, node: &Node) -> Membership {
        let (in_l1, in_l2) = (!node.l1.is_empty(), !node.l2.is_empty());
        let heeds_locks = !planted!(EvictsLocked);
        Membership {
            l1: in_l1 && node.l1_children == 0 && !(heeds_locks && node.is_l1_held()),
            l2: in_l2
                && !in_l1
                && node.first_child == NONE
                && !(heeds_locks && node.is_locked())
                && !(self.with_unwritten && node.is_unwritten()),
            double: self.with_doubles
                && in_l1
                && in_l2
                && node.l2_locks == 0
                && node.load().is_none()
                && !node.has(BACKING_UP | PENDING),
            unwritten: self.with_unwritten && node.is_unwritten(),
        }
    }

    /// The sets of a node, with its rank in each.
    fn sets(&mut self, node: &Node) -> impl Iterator<Item = (Rank, &mut LeafSet)> {
        let of = self.membership(node);
        let (rank, by_use) = (self.order.rank(node), EvictionOrder::Lru.rank(node));
        let sets = [
            (of.l1, rank, &mut self.l1),
            (of.l2, rank, &mut self.l2),
            (of.double, rank, &mut self.doubles),
            (of.unwritten, by_use, &mut self.unwritten),
        ];
        sets.into_iter()
            .filter_map(|(is_in, rank, set)| is_in.then_some((rank, set)))
    }

    /// Whether a node is in any set.
    pub(super) fn is_listed(&self, node: &Node) -> bool {
        let of = self.membership(node);
        of.l1 || of.l2 || of.double || of.unwritten
    }

    pub(super) fn unlist(&mut self, at: u32, node: &Node) {
        for (rank, set) in self.sets(node) {
            set.0.remove(&(rank, at));
        }
    }

    pub(super) fn list(&mut self, at: u32, node: &Node) {
        for (rank, set) in self.sets(node) {
            set.0.insert((rank, at));
        }
    }

    /// The nodes that may leave L1, in order.
    pub(super) fn l1(&self) -> impl Iterator<Item = u32> + '_ {
        self.l1.0.iter().map(|(_, at)| *at)
    }

    pub(super) fn first_l2(&self) -> Option<u32> {
        self.l2.0.first().map(|(_, at)| *at)
    }

    /// The unwritten nodes, the one used before all others first.
    pub(super) fn unwritten(&self) -> impl Iterator<Item = u32> + '_ {
        self.unwritten.0.iter().map(|(_, at)| *at)
    }

    pub(super) fn first_double(&self) -> Option<u32> {
        self.doubles.0.first().map(|(_, at)| *at)
    }

    /// Whether a node is listed exactly in its sets, with its rank.
    pub(super) fn is_exact(&self, at: u32, node: &Node) -> bool {
        let entry = (self.order.rank(node), at);
        let by_use = (EvictionOrder::Lru.rank(node), at);
        let listed = Membership {
            l1: self.l1.0.contains(&entry),
            l2: self.l2.0.contains(&entry),
            double: self.doubles.0.contains(&entry),
            unwritten: self.unwritten.0.contains(&by_use),
        };
        listed == self.membership(node)
    }

    /// Entries of each set.
    pub(super) fn lengths(&self) -> [usize; 4] {
        [&self.l1, &self.l2, &self.doubles, &self.unwritten].map(|set| set.0.len())
    }

    /// Estimated bytes: entries of B-tree nodes that are two thirds full.
    pub(super) fn heap_bytes(&self) -> usize {
        self.lengths().iter().sum::<usize>() * size_of::<(Rank, u32)>() * 3 / 2
    }
}
