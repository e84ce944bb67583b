//! The pages of puts, and the runs that they make.

use std::collections::{HashMap, VecDeque};

use larder_format::{Fingerprint, KeyPrefix};

use crate::run::{RunPage, whole_run};

/// Pages that are remembered, of all namespaces; about 250 bytes each, with the tables.
pub(super) const PAGES_MAX: usize = 1 << 17;

/// A page of a namespace.
pub(super) type PageId = (Fingerprint, KeyPrefix);

/// The last pages that puts asked to store.
#[derive(Default)]
pub(super) struct Chains {
    pages: HashMap<PageId, RunPage>,
    /// In the order of their arrival.
    order: VecDeque<PageId>,
}

impl Chains {
    /// Remembers a page, in place of the oldest one of any namespace.
    pub(super) fn add(&mut self, namespace: Fingerprint, page: RunPage) {
        let id = (namespace, page.key.prefix());
        if self.pages.insert(id, page).is_some() {
            return;
        }
        self.order.push_back(id);
        if self.order.len() > PAGES_MAX {
            let oldest = self.order.pop_front();
            oldest.and_then(|oldest| self.pages.remove(&oldest));
        }
    }

    /// Pages before this one in its chain, if it is remembered.
    pub(super) fn depth(&self, page: &PageId) -> Option<u32> {
        self.pages.get(page).map(|page| page.depth)
    }

    /// The pages that are remembered, in the order of their arrival, with their namespaces.
    pub(super) fn pages(&self) -> impl Iterator<Item = (Fingerprint, &RunPage)> {
        let page = |id: &PageId| Some((id.0, self.pages.get(id)?));
        self.order.iter().filter_map(page)
    }

    /// The run of `run_pages` pages that ends in this page; `None` if it ends elsewhere, or if
    /// pages of it are not remembered.
    pub(super) fn run(&self, &(namespace, last): &PageId, run_pages: u32) -> Option<Vec<RunPage>> {
        let place = |page: &RunPage| (page.parent.map(|parent| parent.prefix()), page.depth);
        let page = |key| self.pages.get(&(namespace, key)).copied();
        whole_run(page(last)?, run_pages, place, page)
    }
}

#[cfg(test)]
mod tests {
    use larder_format::PageKey;

    use super::*;

    fn page(number: u8, depth: u32) -> RunPage {
        let key = |number: u8| PageKey::from_bytes([number; 32]);
        RunPage {
            key: key(number),
            parent: (depth > 0).then(|| key(number - 1)),
            depth,
        }
    }

    #[test]
    fn a_run_is_whole_and_aligned() {
        let mut chains = Chains::default();
        let pages: Vec<RunPage> = (0..6).map(|at| page(10 + at, u32::from(at))).collect();
        let space = Fingerprint::from_bytes([1; 16]);
        pages.iter().for_each(|page| chains.add(space, *page));
        let tail = |at: usize| (space, pages[at].key.prefix());
        let run = chains.run(&tail(3), 2).map(|run| run.len());
        assert_eq!(run, Some(2));
        assert_eq!(chains.run(&tail(2), 2), None);
        assert_eq!(chains.run(&tail(3), 4).map(|run| run[0].depth), Some(0));
        let mut part = Chains::default();
        pages[1..].iter().for_each(|page| part.add(space, *page));
        assert_eq!(part.run(&tail(1), 2), None);
        assert!(part.run(&tail(3), 2).is_some());
    }
}
