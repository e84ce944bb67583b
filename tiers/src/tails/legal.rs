//! The prefixes that all pools can continue.

use crate::planted::planted;

/// Whether a pool has each page of a chain, and the number of pages at the end of a prefix that it
/// needs.
type Held = (Vec<bool>, usize);

/// Number of pages that a prefix needs of a pool.
fn needed(trailing: usize) -> usize {
    if planted!(WindowOnePageShort) && trailing > 1 {
        trailing - 1
    } else {
        trailing
    }
}

/// The longest prefix of at most `pages` pages that all pools can continue. `has` answers for a
/// pool, by its index in `trailing`, and a page.
pub fn longest(
    pages: usize,
    trailing: &[usize],
    mut has: impl FnMut(usize, usize) -> bool,
) -> usize {
    let mut longest = pages;
    // A missing page rules out all prefixes whose windows have it, so none is asked for twice.
    while longest > 0 {
        let missing = trailing.iter().enumerate().find_map(|(pool, trailing)| {
            let first = longest.saturating_sub(needed(*trailing));
            (first..longest).rev().find(|page| !has(pool, *page))
        });
        match missing {
            None => break,
            Some(page) => longest = page,
        }
    }
    longest
}

/// The set of the prefixes of a chain that a tier can continue, by their number of pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Legal {
    /// One bit per number of pages, from 0 on.
    is_legal: Vec<bool>,
}

impl Legal {
    /// The legal prefixes of at most `pages` pages, of pools that have these pages. The empty
    /// prefix is always legal.
    #[must_use]
    pub fn new(pages: usize, pools: &[Held]) -> Legal {
        let mut is_legal = vec![true; pages + 1];
        for (held, trailing) in pools {
            let mut run = 0;
            for (page, is_legal) in is_legal.iter_mut().skip(1).enumerate() {
                run = match held.get(page) {
                    Some(true) => run + 1,
                    _ => 0,
                };
                *is_legal &= run >= needed(*trailing).min(page + 1);
            }
        }
        Legal { is_legal }
    }

    /// The longest legal prefix of at most `pages` pages.
    #[must_use]
    pub fn longest_within(&self, pages: usize) -> usize {
        let end = self.is_legal.len().min(pages.saturating_add(1));
        let mut legal = self.is_legal[..end].iter();
        legal.rposition(|is_legal| *is_legal).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(text: &str) -> Vec<bool> {
        text.chars().map(|page| page == 'x').collect()
    }

    #[test]
    fn a_prefix_is_legal_if_its_last_pages_are_held() {
        let legal = |pages, window: &str, state: &str| {
            let set = Legal::new(pages, &[(held(window), 2), (held(state), 1)]);
            let both = [held(window), held(state)];
            let found = longest(pages, &[2, 1], |pool, page| both[pool][page]);
            assert_eq!(found, set.longest_within(usize::MAX));
            (0..=pages)
                .filter(|p| set.longest_within(*p) == *p)
                .collect::<Vec<_>>()
        };
        assert_eq!(legal(5, "xxxxx", "xxxxx"), [0, 1, 2, 3, 4, 5]);
        assert_eq!(legal(5, ".xx.x", "xxxxx"), [0, 3]);
        assert_eq!(legal(5, "xxxxx", ".x..."), [0, 2]);
        assert_eq!(legal(3, "xxxxx", "...xx"), [0]);
        assert_eq!(legal(5, "x....", "x...."), [0, 1]);
    }
}
