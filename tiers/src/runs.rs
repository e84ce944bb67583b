//! Page numbers of a pool, as runs of neighbours. Used for the pages of a node, of an allocation
//! and of a transfer.
//!
//! Invariants: a run is never empty and never exceeds `u32`; adjacent runs are merged. The type of
//! a run contains the tier of its numbers, so L1 and L2 pages cannot be confused.

use std::fmt::Debug;
use std::marker::PhantomData;

/// The pool of page numbers.
pub trait Tier: Copy + Debug + PartialEq + Eq + Send + Sync + 'static {
    /// The name used in messages.
    const NAME: &'static str;
}

/// The device pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L1;

/// The host pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L2;

impl Tier for L1 {
    const NAME: &'static str = "L1";
}

impl Tier for L2 {
    const NAME: &'static str = "L2";
}

/// Pages `start..start + pages` of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run<T> {
    start: u32,
    pages: u32,
    tier: PhantomData<T>,
}

impl<T: Tier> Run<T> {
    /// The run of `pages` pages that starts at `start`.
    ///
    /// # Panics
    /// If the run is empty or its end exceeds `u32`: no pool has such a run.
    #[must_use]
    pub fn new(start: u32, pages: u32) -> Run<T> {
        assert!(
            pages > 0 && start.checked_add(pages).is_some(),
            "no run: {pages} pages from {start}"
        );
        Run {
            start,
            pages,
            tier: PhantomData,
        }
    }

    /// The first page.
    #[must_use]
    pub fn start(self) -> u32 {
        self.start
    }

    /// Number of pages: at least one.
    #[must_use]
    pub fn pages(self) -> u32 {
        self.pages
    }

    /// The page after the last one.
    #[must_use]
    pub fn end(self) -> u32 {
        self.start + self.pages
    }
}

/// Pages of a pool in a given order: page `i` of a span is stored in the `i`-th of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runs<T>(Repr<T>);

/// One run, the common case, needs no allocation. `One` with zero pages is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Repr<T> {
    One { start: u32, pages: u32 },
    Many(Box<[Run<T>]>),
}

impl<T: Tier> Default for Runs<T> {
    fn default() -> Self {
        Runs(Repr::One { start: 0, pages: 0 })
    }
}

impl<T: Tier> From<Run<T>> for Runs<T> {
    fn from(run: Run<T>) -> Self {
        Runs(Repr::One {
            start: run.start,
            pages: run.pages,
        })
    }
}

impl<T: Tier> FromIterator<Run<T>> for Runs<T> {
    fn from_iter<I: IntoIterator<Item = Run<T>>>(runs: I) -> Self {
        let mut merged: Vec<Run<T>> = Vec::new();
        for run in runs {
            match merged.last_mut() {
                Some(last) if last.end() == run.start => last.pages += run.pages,
                _ => merged.push(run),
            }
        }
        match merged.as_slice() {
            [] => Runs::default(),
            [run] => Runs::from(*run),
            _ => Runs(Repr::Many(merged.into_boxed_slice())),
        }
    }
}

impl<T: Tier> Runs<T> {
    /// The runs of these pages, in this order.
    #[must_use]
    pub fn of_pages(pages: &[u32]) -> Runs<T> {
        pages.iter().map(|page| Run::new(*page, 1)).collect()
    }

    /// Whether there are no pages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        matches!(self.0, Repr::One { pages: 0, .. })
    }

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        match &self.0 {
            Repr::One { pages, .. } => *pages,
            Repr::Many(runs) => runs.iter().map(|run| run.pages).sum(),
        }
    }

    /// The runs, in order.
    pub fn iter(&self) -> impl Iterator<Item = Run<T>> + '_ {
        let (one, many): (Option<Run<T>>, &[Run<T>]) = match &self.0 {
            Repr::One { pages: 0, .. } => (None, &[]),
            Repr::One { start, pages } => (Some(Run::new(*start, *pages)), &[]),
            Repr::Many(runs) => (None, runs),
        };
        one.into_iter().chain(many.iter().copied())
    }

    /// The page numbers, in order.
    pub fn page_numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.iter().flat_map(|run| run.start..run.end())
    }

    /// Keeps the first `pages` pages and returns the others.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn split_off(&mut self, pages: u32) -> Runs<T> {
        let total = self.pages();
        assert!(pages <= total, "a split at {pages} of {total} pages");
        let mut left = pages;
        let (mut head, mut tail) = (Vec::new(), Vec::new());
        for run in self.iter() {
            let first = run.pages.min(left);
            left -= first;
            if first > 0 {
                head.push(Run::new(run.start, first));
            }
            if first < run.pages {
                tail.push(Run::new(run.start + first, run.pages - first));
            }
        }
        *self = head.into_iter().collect();
        tail.into_iter().collect()
    }

    /// These runs followed by `others`.
    #[must_use]
    pub fn followed_by(&self, others: &Runs<T>) -> Runs<T> {
        self.iter().chain(others.iter()).collect()
    }

    /// Bytes allocated in addition to the value itself.
    pub(crate) fn heap_bytes(&self) -> usize {
        match &self.0 {
            Repr::One { .. } => 0,
            Repr::Many(runs) => size_of_val(&**runs),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(runs: &Runs<L1>) -> Vec<u32> {
        runs.page_numbers().collect()
    }

    #[test]
    fn neighbours_become_one_run() {
        let runs = Runs::<L1>::of_pages(&[4, 5, 6, 9, 8, 9]);
        let shape: Vec<(u32, u32)> = runs.iter().map(|run| (run.start(), run.pages())).collect();
        assert_eq!(shape, [(4, 3), (9, 1), (8, 2)]);
        assert_eq!(runs.pages(), 6);
    }

    #[test]
    fn a_split_at_every_page_loses_none_and_keeps_their_order() {
        let pages = [4, 5, 6, 9, 8, 2, 3];
        for at in 0..=7 {
            let mut head = Runs::<L1>::of_pages(&pages);
            let tail = head.split_off(at);
            assert_eq!(head.pages(), at);
            assert_eq!(numbers(&head.followed_by(&tail)), pages);
            assert_eq!(head.followed_by(&tail), Runs::of_pages(&pages));
        }
    }

    #[test]
    fn the_runs_of_a_node_take_sixteen_bytes() {
        assert_eq!(size_of::<Runs<L1>>(), 16);
    }
}
