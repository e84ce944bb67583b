//! The guard: LRU and the learned order on two ghost caches, side by side. The store follows the
//! policy with more hits lately.
//!
//! A ghost cache knows pages by their keys alone. It sees the uses of watched chains: all of them
//! in a small store, one in eight in others. A chain is watched as a whole, from the page where it
//! leaves another chain. Its capacity is the most watched pages that the store held. What
//! reclaim drops from the store while that follows the learned order is dropped there too: the
//! learned order pays for the copies that it saves.

use std::collections::HashMap;

use rapidhash::quality::RandomState;

use super::ClassId;
use super::class::Classes;
use super::ghost::Memory;
use super::hazard::Hazards;
use super::leaves::Leaves;

/// Stores of more pages watch one chain in eight.
const ALL_PAGES_MAX: usize = 1 << 15;

const SHARE_BITS: u32 = 3;

/// Hits by which an order has to be ahead before the store follows it.
const LEAD_MIN: f32 = 16.0;

/// The same for each page of capacity.
const LEAD_SHARE: f32 = 1.0 / 256.0;

/// An order of eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Order {
    #[default]
    Lru,
    Learned,
}

/// A use of a watched page.
#[derive(Debug, Clone, Copy)]
pub(super) struct Used {
    pub key: u32,
    pub parent: Option<u32>,
    pub class: ClassId,
    pub memory: Memory,
    pub now: u32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Guard {
    lru: GhostCache,
    learned: GhostCache,
    /// Hits of the learned order less those of LRU; the past fades with one capacity of misses.
    lead: f32,
    leader: Order,
    switches: u64,
    /// The store has evicted: it is full.
    is_full: bool,
    capacity: usize,
    /// The page that was used last.
    last: Option<u32>,
    /// One chain in 2^shift.
    shift: u32,
    /// It watches nothing.
    is_off: bool,
}

impl Default for Guard {
    fn default() -> Guard {
        Guard {
            lru: GhostCache::new(Order::Lru),
            learned: GhostCache::new(Order::Learned),
            lead: 0.0,
            leader: Order::Lru,
            switches: 0,
            is_full: false,
            capacity: 0,
            last: None,
            shift: 0,
            is_off: false,
        }
    }
}

impl Guard {
    pub(super) fn leader(&self) -> Order {
        self.leader
    }

    pub(super) fn switches(&self) -> u64 {
        self.switches
    }

    /// The store follows LRU for good.
    pub(super) fn stay_with_lru(&mut self) {
        self.is_off = true;
    }

    /// Whether a page is watched that begins a chain or leaves one.
    pub(super) fn watches(&self, key: u32) -> bool {
        !self.is_off && (key >> 16).trailing_zeros() >= self.shift
    }

    /// The store holds so many pages: fewer chains are watched in a large one.
    pub(super) fn expect(&mut self, pages: usize) {
        if pages > ALL_PAGES_MAX && self.shift == 0 {
            self.shift = SHARE_BITS;
            self.lru = GhostCache::new(Order::Lru);
            self.learned = GhostCache::new(Order::Learned);
        }
    }

    /// The store evicts, and holds so many watched pages.
    pub(super) fn fill(&mut self, watched: usize) {
        // A store that reclaim emptied below its limit has the capacity that it had before: LRU
        // must not pay for the drops of the learned order.
        (self.is_full, self.capacity) = (true, self.capacity.max(watched));
    }

    /// A watched page is used. Whether the store has to follow another order.
    pub(super) fn used(
        &mut self,
        used: Used,
        classes: &mut Classes,
        hazards: &mut Hazards,
    ) -> bool {
        let goes_on = used.parent.is_some() && used.parent == self.last;
        self.last = Some(used.key);
        if self.is_full && !goes_on {
            self.lru.shrink(self.capacity, used.now, hazards);
            self.learned.shrink(self.capacity, used.now, hazards);
        }
        let before = self.lead;
        if self.learned.used(&used, classes, hazards) {
            self.lead += 1.0;
        }
        if self.lru.used(&used, classes, hazards) {
            self.lead -= 1.0;
        } else if self.capacity > 0 {
            self.lead -= before / self.capacity as f32;
        }
        let margin = LEAD_MIN.max(LEAD_SHARE * self.capacity as f32);
        let wanted = match self.leader {
            Order::Lru if self.lead > margin => Order::Learned,
            Order::Learned if self.lead < -margin => Order::Lru,
            leader => leader,
        };
        let switches = wanted != self.leader;
        self.switches += u64::from(switches);
        self.leader = wanted;
        switches
    }

    /// The index of all classes has changed.
    pub(super) fn forget_values(&mut self) {
        self.learned.leaves.forget_values();
    }

    /// A page has another class from now on.
    pub(super) fn change_class(&mut self, key: u32, class: ClassId) {
        self.learned.change_class(key, class);
    }

    /// Reclaim dropped a page.
    pub(super) fn dropped(&mut self, key: u32) {
        if self.leader == Order::Learned {
            self.learned.drop_leaf(key);
        }
    }

    pub(super) fn ram_bytes(&self) -> usize {
        self.lru.ram_bytes() + self.learned.ram_bytes()
    }
}

#[derive(Debug, Clone, Copy)]
struct Node {
    key: u32,
    parent: u32,
    child: u32,
    children: u32,
    last: u32,
    class: ClassId,
    memory: Memory,
    is_superseded: bool,
}

const NONE: u32 = u32::MAX;

/// A free node has itself as its parent.
impl Node {
    fn is_free(&self, at: u32) -> bool {
        self.parent == at
    }
}

#[derive(Debug)]
struct GhostCache {
    order: Order,
    nodes: Vec<Node>,
    by_key: HashMap<u32, u32, RandomState>,
    free: Vec<u32>,
    leaves: Leaves,
}

impl GhostCache {
    fn new(order: Order) -> GhostCache {
        GhostCache {
            order,
            nodes: Vec::new(),
            by_key: HashMap::default(),
            free: Vec::new(),
            leaves: Leaves::default(),
        }
    }

    fn node(&mut self, at: u32) -> &mut Node {
        &mut self.nodes[at as usize]
    }

    /// A page is used. Whether it was there.
    fn used(&mut self, used: &Used, classes: &mut Classes, hazards: &mut Hazards) -> bool {
        let parent = used.parent.and_then(|key| self.by_key.get(&key).copied());
        let found = self.by_key.get(&used.key).copied();
        // LRU has one class.
        let class = match self.order {
            Order::Lru => 0,
            Order::Learned => used.class,
        };
        let at = found.unwrap_or_else(|| self.insert(used.key, parent.unwrap_or(NONE)));
        let node = self.node(at);
        let is_filed = found.is_some() && node.class == class;
        (node.class, node.last, node.memory) = (class, used.now, used.memory);
        node.is_superseded = false;
        if !is_filed && node.children == 0 {
            self.leaves.file(class, used.now, at);
        }
        if let (Some(parent), Order::Learned) = (parent, self.order) {
            let above = self.node(parent);
            let old = std::mem::replace(&mut above.child, at);
            if old != at && !above.memory.is_shared() {
                self.supersede(old, classes, hazards);
            }
        }
        found.is_some()
    }

    fn insert(&mut self, key: u32, parent: u32) -> u32 {
        let node = Node {
            key,
            parent,
            child: NONE,
            children: 0,
            last: 0,
            class: 0,
            memory: Memory::NEW,
            is_superseded: false,
        };
        let at = self.free.pop().unwrap_or_else(|| {
            self.nodes.push(node);
            (self.nodes.len() - 1) as u32
        });
        *self.node(at) = node;
        self.by_key.insert(key, at);
        if parent != NONE {
            self.node(parent).children += 1;
        }
        at
    }

    fn supersede(&mut self, branch: u32, classes: &mut Classes, hazards: &mut Hazards) {
        let mut at = branch;
        while at != NONE && !self.node(at).is_superseded {
            let node = self.node(at);
            node.is_superseded = true;
            let (key, class, below) = (node.key, node.class, node.child);
            let traits = classes.traits(class).superseded();
            let class = classes.of(traits, hazards);
            self.change_class(key, class);
            at = below;
        }
    }

    fn change_class(&mut self, key: u32, class: ClassId) {
        let Some(at) = self.by_key.get(&key).copied() else {
            return;
        };
        let node = self.node(at);
        if node.class != class {
            node.class = class;
            let (last, is_leaf) = (node.last, node.children == 0);
            if is_leaf {
                self.leaves.file(class, last, at);
            }
        }
    }

    /// Evicts until so many pages are left.
    fn shrink(&mut self, capacity: usize, now: u32, hazards: &Hazards) {
        while self.by_key.len() > capacity {
            let nodes = &self.nodes;
            let standing = |at: u32| {
                let node = &nodes[at as usize];
                let is_leaf = !node.is_free(at) && node.children == 0;
                is_leaf.then_some((node.class, node.last))
            };
            let index = |class, last| match self.order {
                Order::Lru => 0.0,
                Order::Learned => hazards.index(class, now.saturating_sub(last)),
            };
            let Some(at) = self.leaves.take_least(now, standing, index) else {
                return;
            };
            self.remove(at);
        }
    }

    fn remove(&mut self, at: u32) {
        let Node { key, parent, .. } = *self.node(at);
        self.by_key.remove(&key);
        self.node(at).parent = at;
        self.free.push(at);
        if parent == NONE {
            return;
        }
        let above = self.node(parent);
        above.children -= 1;
        if above.child == at {
            above.child = NONE;
        }
        if above.children == 0 {
            let (class, last) = (above.class, above.last);
            self.leaves.file(class, last, parent);
        }
    }

    fn drop_leaf(&mut self, key: u32) {
        if let Some(at) = self.by_key.get(&key).copied()
            && self.node(at).children == 0
        {
            self.remove(at);
        }
    }

    fn ram_bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>()
            + self.by_key.capacity() * (size_of::<(u32, u32)>() + 1)
            + self.free.capacity() * size_of::<u32>()
            + self.leaves.ram_bytes()
    }
}
