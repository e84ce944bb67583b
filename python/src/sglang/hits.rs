//! The restorable part of a chain if several pools must have their part of it.
//!
//! Arithmetic over the pages that each pool holds. A prefix of `n` pages is *restorable* if every
//! gating pool has its required pages: all pages, or those of a window that ends at `n`. The
//! restorable lengths may have gaps, and ranks hold different pages. Therefore the set is reported
//! and not only its maximum, and the caller intersects the sets.

/// The pages of a prefix that a pool must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Every page.
    All,
    /// The last `n` pages, or fewer if there are fewer.
    Trailing(usize),
    /// Whole groups of keys, one for each block of pages from the start. Its pages are reported,
    /// but it does not gate.
    Groups {
        /// Pages per block.
        block: usize,
        /// Keys per group.
        group: usize,
    },
}

/// The answer to SGLang's `batch_exists_v2`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    /// Pages of the longest restorable prefix.
    pub pages: usize,
    /// Number of leading pages that the anchor alone holds.
    pub anchor: usize,
    /// Number of pages that each pool alone allows, in the order of the request.
    pub reaches: Vec<usize>,
    /// Every restorable length, ascending.
    pub restorable: Vec<usize>,
}

impl Hits {
    /// Restores no more than so many pages. The content of the pools is reported unchanged.
    pub fn limit(&mut self, pages: usize) {
        self.restorable.retain(|length| *length <= pages);
        self.pages = self.restorable.last().copied().unwrap_or(0);
    }
}

/// The result for a chain with `anchor` leading pages in the anchor. `pools` has the policy of each
/// pool and the pages that it holds; pages beyond the end of a list are not held.
pub fn restorable(anchor: usize, pools: &[(Policy, Vec<bool>)]) -> Hits {
    let mut legal = vec![true; anchor];
    let mut reaches = Vec::with_capacity(pools.len());
    for (policy, held) in pools {
        let own = match *policy {
            Policy::All => {
                let run = leading(held).min(anchor);
                (1..=anchor).map(|length| length <= run).collect()
            }
            Policy::Trailing(window) => windows(held, anchor, window.max(1)),
            Policy::Groups { block, group } => {
                reaches.push(groups(held, anchor, block, group));
                continue;
            }
        };
        reaches.push(longest(&own));
        for (legal, own) in legal.iter_mut().zip(own) {
            *legal &= own;
        }
    }
    let restorable = (1..=anchor).filter(|length| legal[length - 1]);
    Hits {
        pages: longest(&legal),
        anchor,
        reaches,
        restorable: restorable.collect(),
    }
}

fn leading(held: &[bool]) -> usize {
    held.iter().take_while(|held| **held).count()
}

fn longest(legal: &[bool]) -> usize {
    legal
        .iter()
        .rposition(|legal| *legal)
        .map_or(0, |at| at + 1)
}

/// For each length, whether the window that ends there is complete.
fn windows(held: &[bool], anchor: usize, window: usize) -> Vec<bool> {
    let mut run = 0;
    (0..anchor)
        .map(|page| {
            run = if held.get(page) == Some(&true) {
                run + 1
            } else {
                0
            };
            run >= window.min(page + 1)
        })
        .collect()
}

/// Number of pages covered by the leading complete groups. The keys of the last pages of a block
/// identify its group.
fn groups(held: &[bool], anchor: usize, block: usize, group: usize) -> usize {
    if block == 0 || group == 0 || group > block {
        return 0;
    }
    let complete = held[..held.len().min(anchor)]
        .chunks_exact(block)
        .take_while(|pages| pages[block - group..].iter().all(|held| *held));
    complete.count() * block
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn held(text: &str) -> Vec<bool> {
        text.chars().map(|c| c == 'x').collect()
    }

    #[test]
    fn without_other_pools_every_prefix_of_the_anchor_can_be_restored() {
        let hits = restorable(3, &[]);
        assert_eq!((hits.pages, hits.restorable), (3, vec![1, 2, 3]));
        assert_eq!(restorable(0, &[]), Hits::default());
    }

    #[test]
    fn a_pool_of_all_pages_ends_the_prefix_at_its_first_gap() {
        let hits = restorable(5, &[(Policy::All, held("xx.xx"))]);
        assert_eq!(hits.pages, 2);
        assert_eq!(hits.reaches, [2]);
        assert_eq!(hits.restorable, [1, 2]);
    }

    #[test]
    fn a_state_at_some_lengths_leaves_gaps_between_restorable_lengths() {
        let hits = restorable(6, &[(Policy::Trailing(1), held(".x..x."))]);
        assert_eq!(hits.pages, 5);
        assert_eq!(hits.restorable, [2, 5]);
        assert_eq!(hits.reaches, [5]);
    }

    #[test]
    fn a_limit_keeps_the_lengths_up_to_it_and_what_the_pools_hold() {
        let mut hits = restorable(6, &[(Policy::Trailing(1), held(".x..x."))]);
        hits.limit(4);
        assert_eq!((hits.pages, hits.anchor), (2, 6));
        assert_eq!((hits.restorable, hits.reaches), (vec![2], vec![5]));
    }

    #[test]
    fn a_window_counts_if_it_is_complete_or_starts_with_the_chain() {
        let hits = restorable(6, &[(Policy::Trailing(3), held("xx.xxx"))]);
        assert_eq!(hits.restorable, [1, 2, 6]);
        let none = restorable(6, &[(Policy::Trailing(3), held("..xx.."))]);
        assert_eq!((none.pages, none.restorable), (0, vec![]));
    }

    #[test]
    fn pools_are_intersected_and_each_reports_its_own_reach() {
        let pools = [
            (Policy::All, held("xxxx.")),
            (Policy::Trailing(1), held("x...x")),
        ];
        let hits = restorable(5, &pools);
        assert_eq!(hits.pages, 1);
        assert_eq!(hits.reaches, [4, 5]);
        assert_eq!(hits.restorable, [1]);
    }

    #[test]
    fn pages_beyond_the_list_of_a_pool_are_not_held() {
        assert_eq!(restorable(4, &[(Policy::All, held("xx"))]).pages, 2);
        assert_eq!(restorable(4, &[(Policy::Trailing(1), held("xx"))]).pages, 2);
    }

    #[test]
    fn groups_report_whole_leading_blocks_and_do_not_gate() {
        let policy = Policy::Groups { block: 4, group: 1 };
        let hits = restorable(9, &[(policy, held("...x...x."))]);
        assert_eq!((hits.pages, hits.reaches), (9, vec![8]));
        let hits = restorable(8, &[(policy, held("xxx.xxxx"))]);
        assert_eq!((hits.pages, hits.reaches), (8, vec![0]));
        let senseless = Policy::Groups { block: 0, group: 1 };
        assert_eq!(restorable(2, &[(senseless, held("xx"))]).reaches, [0]);
    }
}
