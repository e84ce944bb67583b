//! Decides in which order the pages of chains should lie, and which pages are worth moving.
//!
//! The order follows the reader: a parent comes before its children, and directly before the child
//! with the longest chain. So every path from a head to a leaf is divided into *strands*, each of
//! which can lie in one piece. Trees come in the order in which they were written, and so do the
//! branches of a tree. Pages that were written at the same time lie in the same segments, and these
//! segments are dead soonest when their pages leave one after the other. This order also keeps the
//! order of ages, which is the only measure of heat after an open.
//!
//! A strand is moved if it is *scattered*. This means two things: it has gaps that a fresh copy
//! would not have, and its pieces are on average shorter than one read of the store. Longer pieces
//! need hardly more reads. A single gap does not count, for the same reason, and because every
//! segment that makes way where room is little leaves a gap in the strand that it begins with. Two
//! other kinds of pages are moved too, if this saves a segment: pages of segments that are partly
//! dead, and pages of segments that were sealed before they were full. The output of a compaction
//! is of neither kind, so a second compaction finds nothing to do.
//!
//! The functions are pure functions of the result of recovery. Descriptors that claim a circle only
//! spoil its order.

use std::collections::HashMap;

use larder_disk::MERGE_BYTES_MAX;
use larder_format::{BLOCK_BYTES, HEADER_BLOCKS};

use larder_core::core::{GAIN_SHARE, RUN_BYTES};
use larder_core::index::SegmentId;
use larder_store::recovery::{Found, Whole};

/// No page.
const NONE: u32 = u32::MAX;

/// A page at its position in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Its index among the pages.
    pub page: usize,
    /// Its parent is the step before.
    pub follows: bool,
}

/// The facts of a segment that matter for the order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site {
    /// Index of its volume.
    pub volume: usize,
    /// Whether its pages may be moved out of it.
    pub can_be_emptied: bool,
    /// Whether it still takes pages.
    pub is_open: bool,
    /// First unused data block.
    pub data_end: u32,
    /// Descriptor blocks.
    pub blocks: u32,
}

/// The pages to be moved.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Indexes of the pages that move, in their new order.
    pub pages: Vec<usize>,
    /// Blocks of those pages.
    pub page_blocks: u64,
    /// Segments that are to be empty in the end.
    pub empty: Vec<SegmentId>,
    /// Strands that are scattered.
    pub scattered: u64,
}

impl Plan {
    /// Whether there is nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.empty.is_empty()
    }
}

/// The order in which pages should lie. `pages` are in the order in which they were written.
pub(crate) fn order(pages: &[Found<Whole>]) -> Vec<Step> {
    let tree = Tree::new(pages);
    let mut steps = Vec::with_capacity(pages.len());
    let mut seen = vec![false; pages.len()];
    let mut stack = Vec::new();
    let mut last = NONE;
    // Roots first. The remaining pages are in circles.
    let roots = (0..pages.len()).filter(|&page| tree.parents[page] == NONE);
    for root in roots.chain(0..pages.len()) {
        stack.push(number(root));
        while let Some(page) = stack.pop() {
            let at = page as usize;
            if std::mem::replace(&mut seen[at], true) {
                continue;
            }
            steps.push(Step {
                page: at,
                follows: tree.parents[at] == last && last != NONE,
            });
            last = page;
            stack.extend(tree.children_of(at).iter().rev());
        }
    }
    steps
}

/// Parents and children by position.
struct Tree {
    parents: Vec<u32>,
    /// The children of page `n` are `children[starts[n]..starts[n + 1]]`: first the child with the
    /// longest chain, then the others in the order in which they were written.
    starts: Vec<u32>,
    children: Vec<u32>,
}

impl Tree {
    fn new(pages: &[Found<Whole>]) -> Tree {
        let places: HashMap<_, u32> = pages
            .iter()
            .enumerate()
            .map(|(at, page)| ((page.slot, page.key), number(at)))
            .collect();
        let parent_of = |page: &Found<Whole>| places.get(&(page.slot, page.parent?)).copied();
        let parents: Vec<u32> = pages
            .iter()
            .map(|page| parent_of(page).unwrap_or(NONE))
            .collect();
        drop(places);
        let mut starts = vec![0_u32; pages.len() + 1];
        for &parent in parents.iter().filter(|parent| **parent != NONE) {
            starts[parent as usize + 1] += 1;
        }
        for at in 0..pages.len() {
            starts[at + 1] += starts[at];
        }
        let mut children = vec![NONE; starts.last().map_or(0, |&end| end as usize)];
        let mut next = starts.clone();
        for (child, &parent) in parents.iter().enumerate() {
            if parent != NONE {
                children[next[parent as usize] as usize] = number(child);
                next[parent as usize] += 1;
            }
        }
        let mut tree = Tree {
            parents,
            starts,
            children,
        };
        tree.put_longest_first();
        tree
    }

    fn range_of(&self, page: usize) -> std::ops::Range<usize> {
        self.starts[page] as usize..self.starts[page + 1] as usize
    }

    fn children_of(&self, page: usize) -> &[u32] {
        &self.children[self.range_of(page)]
    }

    fn put_longest_first(&mut self) {
        let lengths = self.lengths();
        for page in 0..self.parents.len() {
            let range = self.range_of(page);
            let children = &mut self.children[range];
            // Of equal lengths the first.
            let longest = children
                .iter()
                .enumerate()
                .max_by_key(|(at, child)| (lengths[**child as usize], std::cmp::Reverse(*at)));
            if let Some((at, _)) = longest {
                children[..=at].rotate_right(1);
            }
        }
    }

    /// Pages of the longest chain that begins with each page. Leaves first, so that children are
    /// known before their parents. Pages in a circle keep zero.
    fn lengths(&self) -> Vec<u32> {
        let mut left: Vec<u32> = (0..self.parents.len())
            .map(|page| number(self.range_of(page).len()))
            .collect();
        let mut lengths = vec![0_u32; self.parents.len()];
        let mut ready: Vec<usize> = (0..left.len()).filter(|&page| left[page] == 0).collect();
        while let Some(page) = ready.pop() {
            lengths[page] += 1;
            let parent = self.parents[page];
            if parent == NONE {
                continue;
            }
            let parent = parent as usize;
            lengths[parent] = lengths[parent].max(lengths[page]);
            left[parent] -= 1;
            if left[parent] == 0 {
                ready.push(parent);
            }
        }
        lengths
    }
}

fn number(position: usize) -> u32 {
    u32::try_from(position).expect("fewer than 2^32 pages: 2^24 segments are never that full")
}

/// Decides which pages are moved. `page_blocks` returns the size of a page, `sites` describes each
/// segment, `data_blocks` is the room of a segment.
pub(crate) fn plan(
    pages: &[Found<Whole>],
    page_blocks: impl Fn(&Found<Whole>) -> u32,
    sites: &[Site],
    data_blocks: u64,
) -> Plan {
    let steps = order(pages);
    let volumes = sites.iter().map(|site| site.volume).max().unwrap_or(0) + 1;
    let mut moves = vec![false; pages.len()];
    let mut plan = Plan::default();
    for strand in steps.chunk_by(|_, next| next.follows) {
        let movable = |step: &Step| sites[segment_of(&pages[step.page])].can_be_emptied;
        if is_scattered(strand, pages, &page_blocks, sites, volumes) && strand.iter().all(movable) {
            plan.scattered += 1;
            strand.iter().for_each(|step| moves[step.page] = true);
        }
    }
    let mut staying = vec![0_u64; sites.len()];
    let mut largest = 0;
    for (page, moves) in pages.iter().zip(&moves) {
        let blocks = u64::from(page_blocks(page));
        largest = blocks.max(largest);
        if !moves {
            staying[segment_of(page)] += blocks;
        }
    }
    let empties = empties(sites, &staying, largest, data_blocks);
    for (page, moves) in pages.iter().zip(&mut moves) {
        *moves |= empties[segment_of(page)];
    }
    let moving = steps
        .iter()
        .map(|step| step.page)
        .filter(|&page| moves[page]);
    plan.pages = moving.collect();
    plan.page_blocks = plan
        .pages
        .iter()
        .map(|&page| u64::from(page_blocks(&pages[page])))
        .sum();
    plan.empty = (0..)
        .zip(&empties)
        .filter(|(_, empty)| **empty)
        .map(|(id, _)| SegmentId(id))
        .collect();
    plan
}

fn segment_of(page: &Found<Whole>) -> usize {
    page.place.segment.0 as usize
}

/// Whether a strand has several gaps that a fresh copy would not have, and lies in short pieces.
pub(super) fn is_scattered(
    strand: &[Step],
    pages: &[Found<Whole>],
    page_blocks: impl Fn(&Found<Whole>) -> u32,
    sites: &[Site],
    volumes: usize,
) -> bool {
    let dealt = RUN_BYTES / BLOCK_BYTES as u64;
    let (mut total, mut pieces, mut gaps) = (0, 1_u64, 0_u64);
    // Blocks since the last change of the volume, and whether there was no change yet.
    let (mut turn, mut is_first_turn) = (0, true);
    let mut before: Option<&Found<Whole>> = None;
    for step in strand {
        let page = &pages[step.page];
        let blocks = u64::from(page_blocks(page));
        if let Some(before) = before.filter(|before| !adjoin(before, page, &page_blocks)) {
            let changes = sites[segment_of(before)].volume != sites[segment_of(page)].volume;
            // A copy continues at the start of another segment when its segment is full, and on
            // another volume when the volumes take turns.
            let is_turn = volumes > 1 && changes && (is_first_turn || turn + blocks > dealt);
            gaps += u64::from(page.place.start != HEADER_BLOCKS && !is_turn);
            pieces += 1;
            if changes {
                (turn, is_first_turn) = (0, false);
            }
        }
        turn += blocks;
        total += blocks;
        before = Some(page);
    }
    let read = MERGE_BYTES_MAX as u64 / BLOCK_BYTES as u64;
    gaps > 1 && total < pieces * read
}

fn adjoin(
    page: &Found<Whole>,
    next: &Found<Whole>,
    page_blocks: impl Fn(&Found<Whole>) -> u32,
) -> bool {
    page.place.segment == next.place.segment
        && page.place.start + page_blocks(page) == next.place.start
}

/// The segments that should be empty in the end, if `staying` blocks of each stay.
pub(super) fn empties(
    sites: &[Site],
    staying: &[u64],
    largest: u64,
    data_blocks: u64,
) -> Vec<bool> {
    let gain = (data_blocks / GAIN_SHARE).max(1);
    let written = |site: &Site| u64::from(site.data_end.saturating_sub(HEADER_BLOCKS));
    let mut empties: Vec<bool> = sites
        .iter()
        .zip(staying)
        .map(|(site, &stays)| {
            let dead = written(site).saturating_sub(stays);
            site.can_be_emptied && dead > 0 && (stays == 0 || dead >= gain)
        })
        .collect();
    // Room that no page of this store could use is not wasted.
    let room = data_blocks.saturating_sub(largest);
    let used = |at: usize| staying[at] + u64::from(sites[at].blocks);
    let is_half_full = |at: &usize| {
        let is_closed = sites[*at].can_be_emptied && !sites[*at].is_open && !empties[*at];
        is_closed && staying[*at] > 0 && used(*at) + gain <= room
    };
    let half_full: Vec<usize> = (0..sites.len()).filter(is_half_full).collect();
    let blocks: u64 = half_full.iter().map(|&at| used(at)).sum();
    if blocks.div_ceil(room.max(1)) < half_full.len() as u64 {
        half_full.into_iter().for_each(|at| empties[at] = true);
    }
    empties
}

#[cfg(test)]
mod tests {
    use larder_format::{KeyPrefix, PageKey, Serial};

    use super::*;
    use larder_core::index::{NamespaceSlot, Place};

    /// Page `name` with a parent, in segment 0, four blocks long.
    fn page(name: u8, parent: Option<u8>, start: u32) -> Found<Whole> {
        let key = PageKey::from_bytes([name; 32]);
        let prefix = |name: u8| -> KeyPrefix { PageKey::from_bytes([name; 32]).prefix() };
        Found {
            slot: NamespaceSlot(0),
            key: key.prefix(),
            birth: Serial::ZERO,
            commit: Serial::ZERO,
            place: Place {
                segment: SegmentId(0),
                start,
                saved: 0,
            },
            checksum: 0,
            parent: parent.map(prefix),
            depth: u32::from(parent.is_some()),
            proven: true,
            is_disbelieved: false,
            extra: Whole {
                key,
                depth: 0,
                put_unix_s: 0,
            },
        }
    }

    fn names(pages: &[Found<Whole>]) -> Vec<(u8, bool)> {
        let name = |step: &Step| (pages[step.page].extra.key.as_bytes()[0], step.follows);
        order(pages).iter().map(name).collect()
    }

    #[test]
    fn a_parent_comes_before_its_children_and_the_longest_way_on_comes_at_once() {
        // Page 1 has the children 2 (a leaf), 3 (with child 5) and 4 (a leaf). Page 9 is a chain of
        // its own, written in between.
        let pages = [
            page(1, None, 2),
            page(2, Some(1), 6),
            page(9, None, 10),
            page(5, Some(3), 14),
            page(3, Some(1), 18),
            page(4, Some(1), 22),
        ];
        let expected = [
            (1, false),
            (3, true),
            (5, true),
            (2, false),
            (4, false),
            (9, false),
        ];
        assert_eq!(names(&pages), expected);
    }

    #[test]
    fn circles_and_missing_parents_cost_the_order_and_no_page() {
        let pages = [
            page(1, Some(3), 2),
            page(2, Some(1), 6),
            page(3, Some(2), 10),
            page(4, Some(4), 14),
            page(5, Some(99), 18),
            page(6, Some(5), 22),
        ];
        let mut found = names(&pages);
        assert_eq!(found[..2], [(5, false), (6, true)]);
        found.sort_unstable();
        let found: Vec<u8> = found.into_iter().map(|(name, _)| name).collect();
        assert_eq!(found, [1, 2, 3, 4, 5, 6]);
    }

    /// The plan for pages of four blocks in a segment of `data_end`, and another segment.
    fn planned(pages: &[Found<Whole>], data_end: u32) -> Plan {
        let site = |data_end| Site {
            volume: 0,
            can_be_emptied: true,
            is_open: false,
            data_end,
            blocks: 1,
        };
        plan(pages, |_| 4, &[site(data_end), site(HEADER_BLOCKS)], 4094)
    }

    #[test]
    fn a_chain_in_two_pieces_stays_and_one_in_three_pieces_moves() {
        let whole = [page(1, None, 2), page(2, Some(1), 6), page(3, Some(2), 10)];
        assert!(planned(&whole, 14).is_empty());
        let torn = [page(1, None, 2), page(9, None, 6), page(2, Some(1), 10)];
        assert!(planned(&torn, 14).is_empty());
        let scattered = [
            page(1, None, 2),
            page(9, None, 6),
            page(2, Some(1), 10),
            page(8, None, 14),
            page(3, Some(2), 18),
        ];
        let plan = planned(&scattered, 22);
        assert_eq!((plan.pages, plan.scattered), (vec![0, 2, 4], 1));
    }

    #[test]
    fn a_segment_is_emptied_when_a_thirty_second_part_of_it_is_dead() {
        let whole = [page(1, None, 2), page(2, Some(1), 6)];
        assert!(planned(&whole, 10 + 126).is_empty());
        let plan = planned(&whole, 10 + 128);
        assert_eq!((plan.pages, plan.empty), (vec![0, 1], vec![SegmentId(0)]));
    }
}
