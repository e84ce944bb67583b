//! Page numbers of a pool, as runs of neighbours: what a node holds, what a pool hands out, what a transfer copies.
//!
//! Invariant: a run is never empty and never reaches beyond `u32`; neighbouring runs that could be one are one. A run knows by
//! its type which tier its numbers belong to, so that L1 and L2 pages cannot be mixed up.

use std::fmt::Debug;
use std::marker::PhantomData;

/// Which pool page numbers belong to.
pub trait Tier: Copy + Debug + PartialEq + Eq + Send + Sync + 'static {
    /// Its name in messages.
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
    /// The run of `pages` pages from `start` on.
    ///
    /// # Panics
    /// When it is empty or its end is beyond `u32`: the pool that counts pages makes no such run.
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

    /// Its first page.
    #[must_use]
    pub fn start(self) -> u32 {
        self.start
    }

    /// How many pages: at least one.
    #[must_use]
    pub fn pages(self) -> u32 {
        self.pages
    }

    /// The page after its last one.
    #[must_use]
    pub fn end(self) -> u32 {
        self.start + self.pages
    }
}

/// Pages of a pool in an order of their own: page `i` of a span lies in the `i`-th of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runs<T>(Repr<T>);

/// One run, the common case, costs no allocation. `One` of zero pages is no run.
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

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        matches!(self.0, Repr::One { pages: 0, .. })
    }

    /// How many pages.
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

    /// Keeps the first `pages` pages and gives back the others.
    ///
    /// # Panics
    /// When there are fewer.
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

    /// These runs and then those.
    #[must_use]
    pub fn followed_by(&self, others: &Runs<T>) -> Runs<T> {
        self.iter().chain(others.iter()).collect()
    }

    /// Bytes allocated beside the value itself.
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
    fn a_node_pays_sixteen_bytes_for_its_runs() {
        assert_eq!(size_of::<Runs<L1>>(), 16);
    }
}
