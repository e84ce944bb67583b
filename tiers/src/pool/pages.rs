//! The pages of a pool: one bit each, set while the page is free.
//!
//! ```text
//!  summary   [ 1 0 1 ...    one bit per word of `free`: not zero
//!  free      [ 0110... | 0000... | 1111... ]      one bit per page
//! ```
//!
//! Invariants: page 0 is never free, so a row may use it for padding. `free_count` is the number of
//! set bits. A summary bit is set exactly if its word is not zero.
//!
//! Faults covered: freeing a page twice, or a page that the pool does not have, is an error that
//! changes nothing.
//!
//! Allocation prefers one run of neighbours, so that copies merge. The search starts at the end of
//! the last allocation and is bounded; if it fails, the pages are allocated in pieces.

use std::marker::PhantomData;

use crate::runs::{Run, Runs, Tier};

/// Number of free runs that an allocation examines before it takes pieces.
const RUNS_SEARCHED_MAX: usize = 128;

/// Why pages could not be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The page is already free.
    #[error("page {page} of {tier} was freed twice")]
    DoubleFree {
        /// The pool.
        tier: &'static str,
        /// The page.
        page: u32,
    },
    /// The pool does not have this page.
    #[error("page {page} does not belong to {tier}, whose pages are 1 to {last}")]
    Foreign {
        /// The pool.
        tier: &'static str,
        /// The page.
        page: u32,
        /// The last page of the pool.
        last: u32,
    },
}

/// The free pages of a pool.
#[derive(Clone, Debug)]
pub struct PagePool<T> {
    free: Vec<u64>,
    summary: Vec<u64>,
    free_count: u32,
    pages: u32,
    /// The start of the next search.
    cursor: u32,
    tier: PhantomData<T>,
}

impl<T: Tier> PagePool<T> {
    /// A pool of `pages` free pages, numbered from 1. Page 0 is padding.
    ///
    /// # Panics
    /// With `u32::MAX` pages or more.
    #[must_use]
    pub fn new(pages: u32) -> PagePool<T> {
        assert!(pages < u32::MAX, "a pool numbers its pages with 32 bits");
        let words = (pages as usize + 1).div_ceil(64);
        let mut pool = PagePool {
            free: vec![0; words],
            summary: vec![0; words.div_ceil(64)],
            free_count: 0,
            pages,
            cursor: 1,
            tier: PhantomData,
        };
        if pages > 0 {
            pool.set(Run::new(1, pages), true);
        }
        pool
    }

    /// Total number of pages, without padding.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Number of free pages.
    #[must_use]
    pub fn free_pages(&self) -> u32 {
        self.free_count
    }

    /// Whether this page is free.
    #[must_use]
    pub fn is_free(&self, page: u32) -> bool {
        let word = self.free.get(page as usize / 64);
        word.is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    /// Allocates `pages` pages, in as few runs as a short search finds. `None`, and no change, if
    /// there are fewer free pages.
    #[must_use]
    pub fn allocate(&mut self, pages: u32) -> Option<Runs<T>> {
        if pages > self.free_count {
            return None;
        }
        if pages == 0 {
            return Some(Runs::default());
        }
        let runs = match self.search(pages) {
            Some(start) => Runs::from(Run::new(start, pages)),
            None => self.pieces(pages),
        };
        for run in runs.iter() {
            self.set(run, false);
            self.cursor = run.end();
        }
        Some(runs)
    }

    /// Frees pages.
    ///
    /// # Errors
    /// A page is already free or does not belong to the pool: nothing is freed.
    pub fn free(&mut self, runs: &Runs<T>) -> Result<(), PoolError> {
        for run in runs.iter() {
            if run.start() == 0 || run.end() - 1 > self.pages {
                let page = if run.start() == 0 { 0 } else { run.end() - 1 };
                return Err(PoolError::Foreign {
                    tier: T::NAME,
                    page,
                    last: self.pages,
                });
            }
        }
        for (at, run) in runs.iter().enumerate() {
            if let Some(page) = self.first_free_in(run) {
                // Only this check detects runs that overlap each other.
                runs.iter().take(at).for_each(|run| self.set(run, false));
                return Err(PoolError::DoubleFree {
                    tier: T::NAME,
                    page,
                });
            }
            self.set(run, true);
        }
        Ok(())
    }

    /// The first page of a free run of this many pages, if a short search finds one.
    fn search(&self, pages: u32) -> Option<u32> {
        let behind = self.free_runs(self.cursor, pages);
        let runs = behind.chain(self.free_runs(1, pages));
        runs.take(RUNS_SEARCHED_MAX)
            .find(|(_, length)| *length >= pages)
            .map(|(start, _)| start)
    }

    /// The first `pages` free pages in order of their numbers, starting at the cursor.
    fn pieces(&self, pages: u32) -> Runs<T> {
        let mut left = pages;
        let mut runs = Vec::new();
        let behind = self.free_runs(self.cursor, pages);
        let before = self
            .free_runs(1, pages)
            .take_while(|(start, _)| *start < self.cursor);
        // A run across the cursor is found from both sides.
        let before = before.map(|(start, length)| (start, length.min(self.cursor - start)));
        for (start, length) in behind.chain(before) {
            if left == 0 {
                break;
            }
            let taken = length.min(left);
            runs.push(Run::new(start, taken));
            left -= taken;
        }
        assert_eq!(left, 0, "the pool counts more free pages than it has");
        runs.into_iter().collect()
    }

    /// The free runs from `from` on, as start and length. A run longer than `longest` is returned
    /// in pieces of that length, so that the search does not have to find the end of a long run.
    fn free_runs(&self, from: u32, longest: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let mut at = from;
        std::iter::from_fn(move || {
            let start = self.next_free(at)?;
            let end = self.next_taken(start, start.saturating_add(longest));
            at = end;
            Some((start, end - start))
        })
    }

    /// The first free page, starting at `from`.
    fn next_free(&self, from: u32) -> Option<u32> {
        let mut word = from as usize / 64;
        let first = *self.free.get(word)? & (u64::MAX << (from % 64));
        if first != 0 {
            return Some(page_at(word, first.trailing_zeros()));
        }
        word += 1;
        let mut group = word / 64;
        let mut words = *self.summary.get(group)? & (u64::MAX << (word % 64));
        while words == 0 {
            group += 1;
            words = *self.summary.get(group)?;
        }
        let word = group * 64 + words.trailing_zeros() as usize;
        Some(page_at(word, self.free[word].trailing_zeros()))
    }

    /// The first page that is not free, starting at `from`; or `until`, or the page after the
    /// pool's last.
    fn next_taken(&self, from: u32, until: u32) -> u32 {
        let until = until.min(self.pages + 1);
        let mut word = from as usize / 64;
        let mut taken = !self.free[word] & (u64::MAX << (from % 64));
        while taken == 0 {
            word += 1;
            match self.free.get(word) {
                Some(free) if word * 64 < until as usize => taken = !free,
                _ => return until,
            }
        }
        page_at(word, taken.trailing_zeros()).min(until)
    }

    fn first_free_in(&self, run: Run<T>) -> Option<u32> {
        words_of(run).find_map(|(word, mask)| {
            let free = self.free[word] & mask;
            (free != 0).then(|| page_at(word, free.trailing_zeros()))
        })
    }

    fn set(&mut self, run: Run<T>, free: bool) {
        for (word, mask) in words_of(run) {
            if free {
                self.free[word] |= mask;
            } else {
                self.free[word] &= !mask;
            }
            let bit = 1 << (word % 64);
            if self.free[word] == 0 {
                self.summary[word / 64] &= !bit;
            } else {
                self.summary[word / 64] |= bit;
            }
        }
        if free {
            self.free_count += run.pages();
        } else {
            self.free_count -= run.pages();
        }
    }
}

/// The words that a run covers, with the bits of the run in each.
fn words_of<T: Tier>(run: Run<T>) -> impl Iterator<Item = (usize, u64)> {
    let (first, last) = (run.start(), run.end() - 1);
    (first / 64..=last / 64).map(move |word| {
        let low = if word == first / 64 { first % 64 } else { 0 };
        let high = if word == last / 64 { last % 64 } else { 63 };
        (word as usize, u64::MAX << low & u64::MAX >> (63 - high))
    })
}

fn page_at(word: usize, bit: u32) -> u32 {
    u32::try_from(word * 64).map_or(u32::MAX, |page| page + bit)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rand::{RngExt, SeedableRng};
    use rand_pcg::Pcg64Mcg;

    use super::*;
    use crate::runs::L1;

    fn runs(pages: &[u32]) -> Runs<L1> {
        Runs::of_pages(pages)
    }

    #[test]
    fn a_fresh_pool_allocates_one_run_and_never_page_zero() {
        let mut pool = PagePool::<L1>::new(200);
        let all = pool.allocate(200).unwrap();
        assert_eq!(all.iter().count(), 1);
        assert_eq!(all.iter().next().unwrap().start(), 1);
        assert_eq!(pool.allocate(1), None);
    }

    #[test]
    fn a_run_is_preferred_to_pieces_that_come_first() {
        let mut pool = PagePool::<L1>::new(300);
        let all = pool.allocate(300).unwrap();
        pool.free(&runs(&[10, 12, 14])).unwrap();
        pool.free(&Runs::from(Run::new(100, 70))).unwrap();
        assert_eq!(pool.allocate(65).unwrap().iter().count(), 1);
        assert_eq!(
            pool.allocate(8).unwrap().pages(),
            8,
            "pieces when no run is left"
        );
        assert_eq!(pool.free_pages(), 0);
        pool.free(&all).unwrap();
    }

    #[test]
    fn freeing_a_page_twice_or_a_foreign_page_is_an_error_that_changes_nothing() {
        let mut pool = PagePool::<L1>::new(100);
        let taken = pool.allocate(10).unwrap();
        let tier = "L1";
        let free = |pool: &mut PagePool<L1>, pages: &[u32]| pool.free(&runs(pages));
        let twice = |page| Err(PoolError::DoubleFree { tier, page });
        let foreign = |page| {
            Err(PoolError::Foreign {
                tier,
                page,
                last: 100,
            })
        };
        assert_eq!(free(&mut pool, &[1, 2, 11]), twice(11));
        assert_eq!(free(&mut pool, &[1, 3, 1]), twice(1));
        assert_eq!(free(&mut pool, &[1, 101]), foreign(101));
        assert_eq!(free(&mut pool, &[0]), foreign(0));
        assert_eq!(pool.free_pages(), 90);
        pool.free(&taken).unwrap();
        assert_eq!(pool.free_pages(), 100);
    }

    #[test]
    fn a_million_random_operations_match_a_plain_set() {
        let mut dice = Pcg64Mcg::seed_from_u64(1);
        for pages in [0, 1, 62, 63, 64, 130, 5000] {
            let mut pool = PagePool::<L1>::new(pages);
            let mut held: Vec<Runs<L1>> = Vec::new();
            let mut taken = vec![false; pages as usize + 1];
            for _ in 0..2000 {
                if dice.random_bool(0.55) || held.is_empty() {
                    let want = dice.random_range(0..=pages.min(150));
                    let free = taken.iter().skip(1).filter(|taken| !**taken).count();
                    match pool.allocate(want) {
                        None => assert!(free < want as usize),
                        Some(runs) => {
                            assert_eq!(runs.pages(), want);
                            for page in runs.page_numbers() {
                                assert!(!std::mem::replace(&mut taken[page as usize], true));
                            }
                            held.push(runs);
                        }
                    }
                } else {
                    let runs = held.swap_remove(dice.random_range(0..held.len()));
                    runs.page_numbers()
                        .for_each(|page| taken[page as usize] = false);
                    pool.free(&runs).unwrap();
                }
                let free = taken.iter().skip(1).filter(|taken| !**taken).count();
                assert_eq!(pool.free_pages() as usize, free);
            }
        }
    }
}
