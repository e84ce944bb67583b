//! From tokens to nodes: match and insert.
//!
//! A match includes the loads in flight on its path: their pages are not readable before the load
//! has ended. Nothing is inserted behind such a load. If it fails, no page depends on pages that
//! were never filled.

use larder_format::PageKey;

use super::node::{BACKING_UP, DECLINED, IN_L3, Node, PENDING, PUTTING, WARM};
use super::{LoadId, NodeId, Tree};
use crate::planted::planted;
use crate::prompt::RootKey;
use crate::runs::{L1, L2, Run, Runs};

/// The cached part of a prompt.
#[derive(Clone, Debug, Default)]
pub struct Matched {
    /// The first pages, in L1.
    pub l1: Runs<L1>,
    /// Loads that fill some of those, in order.
    pub loads: Vec<LoadId>,
    /// The node in which the L1 part ends; `None` if it has no page.
    pub l1_end: Option<NodeId>,
    /// Number of following pages that are in L2 only.
    pub l2_pages: usize,
    /// The node in which the match ends; `None` if nothing matches.
    pub end: Option<NodeId>,
    /// Whether the match ends in L2: pages of L3 can be inserted after it.
    pub ends_in_l2: bool,
}

impl Matched {
    /// Number of pages in L1 and L2.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.l1.pages() as usize + self.l2_pages
    }
}

/// The pages that a request offers to the tree.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// The root of the prompt.
    pub root: RootKey,
    /// The words of whole pages.
    pub words: &'a [u32],
    /// The keys of the pages.
    pub keys: &'a [PageKey],
    /// The L1 pages. Those before `own_from` belong to the tree.
    pub pages: &'a [u32],
    /// Index of the first page that the request owns.
    pub own_from: usize,
    /// Number of pages that have already been counted as hits.
    pub counted: usize,
    /// The priority of the request.
    pub priority: i32,
}

/// The result of an offer.
#[derive(Debug, Default)]
pub struct Inserted {
    /// Number of pages of the prompt that the tree has.
    pub pages: usize,
    /// The tree's pages from `own_from` on.
    pub runs: Runs<L1>,
    /// The request's pages that the tree did not need. They must be freed.
    pub duplicates: Runs<L1>,
    /// Nodes with pages that the tree took from the request: the last nodes of the path, ending
    /// with `end`.
    pub taken: Vec<NodeId>,
    /// The node in which the prompt ends; `None` if it has no page.
    pub end: Option<NodeId>,
}

/// The result of inserting pages read from L3.
#[derive(Debug, Default)]
pub struct HostInserted {
    /// Pages that the tree got from elsewhere in the meantime. They must be freed.
    pub duplicates: Runs<L2>,
    /// Pages that the tree took.
    pub pages: usize,
    /// Pages that could not be inserted below a parent that has left L2. They must be freed.
    pub orphans: Runs<L2>,
    /// The new node.
    pub node: Option<NodeId>,
}

/// The copies to a lower tier that a path wants now.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Wanting {
    /// Nodes to copy, from the root down.
    pub nodes: Vec<NodeId>,
    /// Whether nodes behind them wait for a node whose copy has failed.
    pub wait: Option<Wait>,
}

/// What nodes behind a failed copy wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The end of the next attempt, which is in flight or the last of the wanted copies.
    Attempt,
    /// This progress of the core, at which the next attempt may begin.
    Until(u64),
}

/// The wish of one node, for [`Tree::wanting`].
enum Wish {
    /// A copy.
    Copy,
    /// Nothing; the nodes behind it may wish something.
    Nothing,
    /// Nothing, and neither may the nodes behind it.
    End,
}

/// A part of a chain.
#[derive(Clone, Debug)]
pub struct Span {
    /// The keys.
    pub keys: Vec<PageKey>,
    /// The key before the first one, if there is one.
    pub parent: Option<PageKey>,
    /// Number of pages before it.
    pub depth: usize,
    /// The L2 pages.
    pub l2: Runs<L2>,
}

impl Tree {
    /// Finds the nodes for the beginning of `words`, and splits the last one where the words
    /// differ. The nodes are left in `self.path`, without the root. Returns their number of pages.
    fn descend(&mut self, root: u32, words: &[u32]) -> usize {
        self.path.clear();
        let per_page = self.page_tokens;
        let (mut at, mut rest, mut pages) = (root, words, 0);
        while rest.len() >= per_page {
            let Some(child) = self.child(at, &rest[..per_page]) else {
                break;
            };
            let node = self.node(child);
            let of_node = node.pages();
            let common = common_pages(&node.words, rest, per_page);
            pages += common;
            if common < of_node {
                let first = self.split(child, common);
                self.path.push(first);
                break;
            }
            self.path.push(child);
            at = child;
            rest = &rest[common * per_page..];
        }
        pages
    }

    /// The cached part of a prompt. Its nodes count as used. Splits the last node where the prompt
    /// differs.
    pub fn match_prefix(&mut self, root: RootKey, words: &[u32]) -> Matched {
        self.tick += 1;
        let Some(&root) = self.roots.get(&root) else {
            return Matched::default();
        };
        self.descend(root, words);
        if !planted!(MatchesLostPages) {
            let found = self.path.iter().position(|at| self.node(*at).is_bare());
            self.path.truncate(found.unwrap_or(self.path.len()));
        }
        let mut runs: Vec<Run<L1>> = Vec::new();
        let mut matched = Matched::default();
        for at in 0..self.path.len() {
            let at = self.path[at];
            self.touch(at, 0, None);
            let node = self.node(at);
            if node.l1.is_empty() {
                matched.l2_pages += node.pages();
            } else {
                runs.extend(node.l1.iter());
                matched.l1_end = Some(self.id(at));
                let load = node.load().filter(|_| !planted!(HitOnUnfinishedLoad));
                if load.is_some() && load != matched.loads.last().copied() {
                    matched.loads.extend(load);
                }
            }
        }
        if let Some(&end) = self.path.last() {
            matched.end = Some(self.id(end));
            matched.ends_in_l2 = !self.node(end).l2.is_empty();
        }
        matched.l1 = runs.into_iter().collect();
        matched
    }

    /// Number of pages of a prompt in L1, and number of following pages in L2. Changes nothing.
    #[must_use]
    pub fn peek(&self, root: RootKey, words: &[u32]) -> (usize, usize) {
        let (mut l1, mut l2) = (0, 0);
        self.look(root, words, |node, pages| {
            *(if node.l1.is_empty() { &mut l2 } else { &mut l1 }) += pages;
        });
        (l1, l2)
    }

    /// The keys of the pages of a prompt in L1 and L2, and how many of them are in L1. Changes
    /// nothing.
    pub(crate) fn peek_keys(&self, root: RootKey, words: &[u32]) -> (Vec<PageKey>, usize) {
        let (mut keys, mut l1) = (Vec::new(), 0);
        self.look(root, words, |node, pages| {
            keys.extend(&node.keys[..pages]);
            l1 += if node.l1.is_empty() { 0 } else { pages };
        });
        (keys, l1)
    }

    /// Number of pages of a prompt in L1, and how many of those could be evicted. Changes nothing.
    pub(crate) fn peek_l1(&self, root: RootKey, words: &[u32]) -> (usize, usize) {
        let (mut l1, mut evictable) = (0, 0);
        self.look(root, words, |node, pages| {
            if !node.l1.is_empty() {
                l1 += pages;
                evictable += if node.is_l1_held() { 0 } else { pages };
            }
        });
        (l1, evictable)
    }

    /// Looks at the nodes of a prompt, with the number of pages that it has of each.
    fn look(&self, root: RootKey, words: &[u32], mut at_node: impl FnMut(&Node, usize)) {
        let Some(&root) = self.roots.get(&root) else {
            return;
        };
        let per_page = self.page_tokens;
        let (mut at, mut rest) = (root, words);
        while rest.len() >= per_page {
            let Some(child) = self.child(at, &rest[..per_page]) else {
                break;
            };
            let node = self.node(child);
            if node.is_bare() {
                break;
            }
            let common = common_pages(&node.words, rest, per_page);
            at_node(node, common);
            if common < node.pages() {
                break;
            }
            at = child;
            rest = &rest[common * per_page..];
        }
    }

    /// Records a use of a node.
    fn touch(&mut self, at: u32, hits: u32, priority: Option<i32>) {
        let tick = self.tick;
        let node = self.node(at);
        if node.has(IN_L3) && !node.has(WARM) {
            self.nodes[at as usize].flags |= WARM;
            self.warm.push(self.id(at));
        }
        let touched = |node: &mut Node| {
            node.used = tick;
            node.hits = node.hits.saturating_add(hits);
            node.priority = priority.map_or(node.priority, |priority| node.priority.max(priority));
        };
        // The rank is only needed while the node is in a leaf set.
        if self.leaves.is_listed(self.node(at)) || self.node(at).has(DECLINED) {
            self.change(at, |node| {
                touched(node);
                // A use shows that it is of use: L3 may be asked again.
                node.flags &= !DECLINED;
            });
        } else {
            touched(&mut self.nodes[at as usize]);
        }
    }

    /// Takes over the pages of a request: new nodes for tokens that the tree does not have, L1
    /// pages for nodes without L1 pages. Pages for tokens that are already in L1 are duplicates.
    /// Stops before a load in flight.
    ///
    /// The nodes that take pages are the last ones of the path, because the parent of a node in L1
    /// is in L1.
    pub fn insert(&mut self, offer: &Offer<'_>) -> Inserted {
        self.tick += 1;
        if offer.keys.is_empty() {
            return Inserted::default();
        }
        let root = self.root_or_new(offer.root);
        let matched = self.descend(root, offer.words);
        let mut inserted = Inserted::default();
        let mut runs: Vec<Run<L1>> = Vec::new();
        let mut parent = root;
        let mut is_open = true;
        for at in 0..self.path.len() {
            let at = self.path[at];
            let (depth, end) = (self.node(at).depth as usize, self.node(at).end());
            if self.node(at).load().is_some() {
                is_open = false;
                break;
            }
            let is_new_hit = depth >= offer.counted || planted!(CountsHitsTwice);
            self.touch(at, u32::from(is_new_hit), Some(offer.priority));
            if self.node(at).l1.is_empty() {
                let own = Runs::of_pages(&offer.pages[depth..end]);
                self.set_l1(at, own);
                inserted.taken.push(self.id(at));
            } else if end > offer.own_from {
                let from = depth.max(offer.own_from);
                let mut of_tree = self.node(at).l1.clone();
                let of_tree = of_tree.split_off((from - depth) as u32);
                let of_request = Runs::of_pages(&offer.pages[from..end]);
                let duplicates = if planted!(FreesTheTreesPages) {
                    of_tree.clone()
                } else {
                    of_request
                };
                if !planted!(KeepsDuplicates) {
                    inserted.duplicates = inserted.duplicates.followed_by(&duplicates);
                }
            }
            if end > offer.own_from {
                let skipped = offer.own_from.saturating_sub(depth);
                let mut of_node = self.node(at).l1.clone();
                runs.extend(of_node.split_off(skipped as u32).iter());
            }
            inserted.pages = end;
            parent = at;
        }
        if is_open && matched < offer.keys.len() {
            let own = Runs::of_pages(&offer.pages[matched..]);
            runs.extend(own.iter());
            let node = self.new_node(offer.words, offer.keys, matched);
            parent = self.attach(
                parent,
                Node {
                    l1: own,
                    hits: 1,
                    priority: offer.priority,
                    ..node
                },
            );
            inserted.taken.push(self.id(parent));
            inserted.pages = offer.keys.len();
        }
        inserted.runs = runs.into_iter().collect();
        inserted.end = (parent != root).then(|| self.id(parent));
        self.drop_bare(root);
        inserted
    }

    /// A new node for the pages from `from` on.
    fn new_node(&self, words: &[u32], keys: &[PageKey], from: usize) -> Node {
        Node {
            words: words[from * self.page_tokens..].into(),
            keys: keys[from..].into(),
            depth: from as u32,
            used: self.tick,
            made: self.tick,
            ..Node::empty()
        }
    }

    /// Takes over L2 pages for the pages from `from` on, read from L3. Pages that the tree has got
    /// in the meantime are duplicates. If the path has left L2, the rest are orphans (except with
    /// write_back).
    pub fn insert_host(
        &mut self,
        root: RootKey,
        words: &[u32],
        keys: &[PageKey],
        from: usize,
        mut pages: Runs<L2>,
    ) -> HostInserted {
        self.tick += 1;
        let mut inserted = HostInserted::default();
        if pages.is_empty() {
            return inserted;
        }
        let root = self.root_or_new(root);
        let matched = self.descend(root, words);
        let parent = self.path.last().copied().unwrap_or(root);
        let is_l2_way = |at: &u32| {
            let node = self.node(*at);
            let is_way_of_l1 = self.write_back && !node.is_bare();
            is_way_of_l1 || node.is_root() || !node.l2.is_empty()
        };
        let has_way = matched >= from && (is_l2_way(&parent) || planted!(InsertsBelowLostParent));
        let known = (matched.max(from) - from) as u32;
        let rest = pages.split_off(known.min(pages.pages()));
        inserted.duplicates = pages;
        if rest.is_empty() {
            // All pages have arrived in another way.
        } else if has_way {
            inserted.pages = rest.pages() as usize;
            let node = self.new_node(words, keys, matched);
            let node = Node {
                l2: rest,
                flags: IN_L3,
                ..node
            };
            let at = self.attach(parent, node);
            inserted.node = Some(self.id(at));
        } else {
            inserted.orphans = rest;
        }
        self.drop_bare(root);
        inserted
    }

    /// Nodes on the path to `end` that are neither in L2 nor being copied there, from the root
    /// down, as long as each has `hits` hits and its forward has ended.
    #[must_use]
    pub fn wanting_backup(&self, end: NodeId, hits: u32, now: u64) -> Wanting {
        let wish = |node: &Node| match node {
            node if !node.l2.is_empty() || node.has(BACKING_UP) => Wish::Nothing,
            node if node.hits >= hits && !node.l1.is_empty() && !node.has(PENDING) => Wish::Copy,
            _ => Wish::End,
        };
        self.wanting(end, now, |node| !node.l2.is_empty(), wish)
    }

    /// Nodes on the path to `end` that are in L2, not known to be in L3, and have `hits` hits, from
    /// the root down.
    #[must_use]
    pub fn wanting_put_path(&self, end: NodeId, hits: u32, now: u64) -> Wanting {
        let wish = |node: &Node| {
            let is_wanting = !node.l2.is_empty() && !node.has(PUTTING) && node.hits >= hits;
            if is_wanting {
                Wish::Copy
            } else {
                Wish::Nothing
            }
        };
        self.wanting(end, now, |node| node.has(IN_L3), wish)
    }

    /// The wishes of a path, from the root down. Behind a node whose copy has failed, all wait
    /// until an attempt with that node alone has succeeded: L3 finds no page without those before
    /// it.
    fn wanting(
        &self,
        end: NodeId,
        now: u64,
        is_done: impl Fn(&Node) -> bool,
        wish: impl Fn(&Node) -> Wish,
    ) -> Wanting {
        let mut wanting = Wanting::default();
        let Some(end) = self.place(end) else {
            return wanting;
        };
        let mut path: Vec<u32> = self.upward(end).collect();
        path.reverse();
        for at in path {
            let node = self.node(at);
            if node.is_root() || is_done(node) {
                continue;
            }
            if node.has_failed() && node.has(PUTTING | BACKING_UP) {
                wanting.wait = Some(Wait::Attempt);
                break;
            }
            if node.has_failed() && node.due > now {
                wanting.wait = Some(Wait::Until(node.due));
                break;
            }
            match wish(node) {
                Wish::Copy => wanting.nodes.push(self.id(at)),
                Wish::Nothing => continue,
                Wish::End => break,
            }
            if node.has_failed() {
                wanting.wait = (at != end).then_some(Wait::Attempt);
                break;
            }
        }
        wanting
    }

    /// Ends the pauses of a path: each failed copy may be tried again now.
    pub(crate) fn end_pause(&mut self, end: NodeId) {
        let Some(end) = self.place(end) else {
            return;
        };
        let path: Vec<u32> = self.upward(end).collect();
        for at in path {
            self.nodes[at as usize].due = 0;
        }
    }

    /// Number of requests that inserted the tokens of a node; 0 if it has been removed.
    #[must_use]
    pub fn hits(&self, node: NodeId) -> u32 {
        self.place(node).map_or(0, |at| self.node(at).hits)
    }

    /// Nodes on the path to `end` that are in L2 only, from the root down. A load must include
    /// them.
    #[must_use]
    pub fn wanting_load(&self, end: NodeId) -> Vec<NodeId> {
        let Some(end) = self.place(end) else {
            return Vec::new();
        };
        let above = self.upward(end);
        let absent =
            above.take_while(|at| self.node(*at).l1.is_empty() && !self.node(*at).is_root());
        let mut absent: Vec<NodeId> = absent.map(|at| self.id(at)).collect();
        absent.reverse();
        absent
    }
}

/// Number of words compared at once: long enough for the fastest comparison, short enough to search
/// for the difference.
const CHUNK_WORDS: usize = 1024;

/// Number of whole pages in the common prefix of two word sequences.
fn common_pages(node: &[u32], rest: &[u32], per_page: usize) -> usize {
    let length = node.len().min(rest.len());
    let (node, rest) = (&node[..length], &rest[..length]);
    if node == rest {
        return length / per_page;
    }
    let chunks = node.chunks(CHUNK_WORDS).zip(rest.chunks(CHUNK_WORDS));
    let equal = chunks.take_while(|(a, b)| a == b).count() * CHUNK_WORDS;
    let equal = equal.min(length);
    let behind = node[equal..].iter().zip(&rest[equal..]);
    (equal + behind.take_while(|(a, b)| a == b).count()) / per_page
}
