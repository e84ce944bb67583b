//! Whole chains: a call states its own pages, and the links between pages are in the calls before.

use std::collections::HashMap;

/// Pages whose links are remembered: twice as many at most, about 100 MB.
const PAGES_MAX: usize = 2 << 20;

/// Longest chain that is completed. It ends a walk in links that make no chain.
const CHAIN_MAX: usize = 1 << 16;

/// See the module. The links used longest ago are forgotten.
#[derive(Default)]
pub struct Parents {
    young: HashMap<u64, u64>,
    old: HashMap<u64, u64>,
}

impl Parents {
    /// Learns the links of consecutive pages.
    pub fn learn(&mut self, parent: Option<u64>, pages: &[u64]) {
        let mut parent = parent;
        for page in pages {
            if let Some(parent) = parent
                && parent != *page
                && self.of(*page).is_none()
            {
                self.insert(*page, parent);
            }
            parent = Some(*page);
        }
    }

    fn insert(&mut self, page: u64, parent: u64) {
        if self.young.len() >= PAGES_MAX {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(page, parent);
    }

    fn of(&mut self, page: u64) -> Option<u64> {
        if let Some(parent) = self.young.get(&page) {
            return Some(*parent);
        }
        let parent = self.old.remove(&page)?;
        self.insert(page, parent);
        Some(parent)
    }

    /// The chain that ends in these pages, and how many pages of it come before them.
    pub fn whole(&mut self, pages: &[u64]) -> (Vec<u64>, usize) {
        let mut before = Vec::new();
        let mut page = pages.first().copied();
        while let Some(parent) = page.and_then(|page| self.of(page)) {
            if before.len() >= CHAIN_MAX {
                return (pages.to_vec(), 0);
            }
            before.push(parent);
            page = Some(parent);
        }
        before.reverse();
        let first = before.len();
        before.extend_from_slice(pages);
        (before, first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_completed_as_far_as_its_links_are_known() {
        let mut parents = Parents::default();
        parents.learn(None, &[1, 2, 3]);
        parents.learn(Some(3), &[4]);
        parents.learn(Some(9), &[4]);
        assert_eq!(parents.whole(&[4, 5]), (vec![1, 2, 3, 4, 5], 3));
        assert_eq!(parents.whole(&[1]), (vec![1], 0));
        assert_eq!(parents.whole(&[]), (vec![], 0));
    }

    #[test]
    fn links_that_make_a_ring_end() {
        let mut parents = Parents::default();
        parents.learn(Some(2), &[1]);
        parents.learn(Some(1), &[2]);
        assert_eq!(parents.whole(&[1]), (vec![1], 0));
    }
}
