//! The placement of chains: whether parents are there, and whether neighbours in a chain are
//! neighbours on disk. A prefetch can read such neighbours in one piece.

use std::collections::HashMap;

use larder_store::recovery::{Found, Whole};

use super::Survey;

/// The chains of one namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainFacts {
    /// Live pages.
    pub pages: u64,
    /// Pages that head a chain.
    pub heads: u64,
    /// Pages that head no chain, and whose parent is unknown or missing: no lookup from the start
    /// of their chain finds them.
    pub orphans: u64,
    /// Pages of the longest unbroken chain that begins with a head.
    pub longest: u64,
    /// Runs: stretches of a chain that are contiguous on disk.
    pub runs: u64,
}

impl ChainFacts {
    /// Pages per run, on average; 0 without pages.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "an average for people")]
    pub fn mean_run_pages(&self) -> f64 {
        if self.runs == 0 {
            0.0
        } else {
            self.pages as f64 / self.runs as f64
        }
    }
}

/// The position of a live page in its chain.
#[derive(Clone, Copy)]
enum Standing {
    /// Not visited yet.
    Unknown,
    /// On the path that is being followed.
    Visited,
    /// Number of pages in an unbroken chain up to this page; 0 if the chain does not begin with a
    /// head.
    Depth(u64),
}

impl Survey {
    /// The chains of each namespace, in the order of [`Survey::namespaces`].
    #[must_use]
    pub fn chains(&self) -> Vec<ChainFacts> {
        let live: Vec<&Found<Whole>> = self
            .records
            .live
            .iter()
            .map(|&index| &self.records.found[index])
            .collect();
        let places: HashMap<_, usize> = live
            .iter()
            .zip(0..)
            .map(|(page, place)| ((page.slot, page.key), place))
            .collect();
        let parent_of = |page: &Found<Whole>| places.get(&(page.slot, page.parent?)).copied();
        let parents: Vec<Option<usize>> = live.iter().map(|page| parent_of(page)).collect();
        let mut standing = vec![Standing::Unknown; live.len()];
        let mut chains = vec![ChainFacts::default(); self.namespaces.len()];
        for (index, page) in live.iter().enumerate() {
            let facts = &mut chains[usize::from(page.slot.0)];
            let parent = parents[index].map(|parent| live[parent]);
            facts.pages += 1;
            facts.heads += u64::from(is_head(page));
            facts.orphans += u64::from(!is_head(page) && parent.is_none());
            facts.runs +=
                u64::from(!parent.is_some_and(|parent| self.are_neighbours(parent, page)));
            facts.longest = facts
                .longest
                .max(follow(&live, &parents, &mut standing, index));
        }
        chains
    }

    fn are_neighbours(&self, page: &Found<Whole>, next: &Found<Whole>) -> bool {
        page.place.segment == next.place.segment
            && page.place.start + self.records.blocks(page) == next.place.start
    }
}

pub(super) fn is_head(page: &Found<Whole>) -> bool {
    page.depth == 0 && page.parent.is_none()
}

/// The number of pages in an unbroken chain up to a page. It is 0 for pages whose descriptors claim
/// a circle.
fn follow(
    live: &[&Found<Whole>],
    parents: &[Option<usize>],
    standing: &mut [Standing],
    from: usize,
) -> u64 {
    let mut way = Vec::new();
    let mut at = from;
    let mut depth = loop {
        match standing[at] {
            Standing::Depth(depth) => break depth,
            Standing::Visited => break 0,
            Standing::Unknown => {}
        }
        standing[at] = Standing::Visited;
        way.push(at);
        match parents[at] {
            Some(parent) => at = parent,
            None if is_head(live[at]) => {
                way.pop();
                standing[at] = Standing::Depth(1);
                break 1;
            }
            None => break 0,
        }
    };
    for index in way.into_iter().rev() {
        depth += u64::from(depth > 0);
        standing[index] = Standing::Depth(depth);
    }
    depth
}
