//! Rows: the location in L1 of the KV of a running request, and the table of all rows.
//!
//! ```text
//!  tokens   0 ............ shared ................... tokens
//!  pages    | the tree's pages   | the request's own pages  |   the last may be partly filled
//! ```
//!
//! Invariants of a row: it has exactly the pages that its tokens need. The first `shared` pages
//! belong to the tree; the request exclusively owns the others. Shared pages are full.

use std::num::NonZeroU32;

use crate::planted::planted;
use crate::pool::pages::PagePool;
use crate::runs::{L1, Runs};

/// The L1 pages of a request.
#[derive(Clone, Debug)]
pub struct Row {
    pages: Vec<u32>,
    tokens: usize,
    shared: usize,
    page_tokens: NonZeroU32,
}

impl Row {
    /// A row without tokens.
    #[must_use]
    pub fn new(page_tokens: NonZeroU32) -> Row {
        Row {
            pages: Vec::new(),
            tokens: 0,
            shared: 0,
            page_tokens,
        }
    }

    /// Number of tokens with a slot.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The pages, in order.
    #[must_use]
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Number of pages at the front that belong to the tree.
    #[must_use]
    pub fn shared_pages(&self) -> usize {
        self.shared
    }

    /// The location of a token's KV: a slot of the L1 pool, with `page_tokens` slots per page.
    #[must_use]
    pub fn slot(&self, token: usize) -> Option<u64> {
        let per_page = self.page_tokens.get() as usize;
        let page = self.pages.get(token / per_page)?;
        (token < self.tokens).then(|| {
            u64::from(*page) * u64::from(self.page_tokens.get()) + (token % per_page) as u64
        })
    }

    /// Number of pages that `more` further tokens need beyond those of the row: zero while they fit
    /// in the partly filled last page.
    #[must_use]
    pub fn pages_short(&self, more: usize) -> usize {
        let tokens = self.tokens.saturating_add(more);
        let needed = tokens.div_ceil(self.page_tokens.get() as usize);
        needed - self.pages.len()
    }

    /// Allocates a slot for each of `more` further tokens, first in the partly filled last page.
    /// `None`, and no change, if the pool has too few pages.
    #[must_use]
    pub fn extend(&mut self, pool: &mut PagePool<L1>, more: usize) -> Option<()> {
        let short = u32::try_from(self.pages_short(more)).ok()?;
        let runs = pool.allocate(short)?;
        self.pages.extend(runs.page_numbers());
        self.tokens += more;
        Some(())
    }

    /// Appends pages of the tree to the shared pages of a row without own pages.
    ///
    /// # Panics
    /// If the row has own pages.
    pub(crate) fn share(&mut self, runs: &Runs<L1>) {
        assert_eq!(
            self.shared,
            self.pages.len(),
            "shared pages lie before a request's own"
        );
        self.pages.extend(runs.page_numbers());
        self.shared = self.pages.len();
        self.tokens = self.shared * self.page_tokens.get() as usize;
    }

    /// Replaces the pages from `from` on with `runs`, which are pages of the tree. All pages up to
    /// the end of `runs` then belong to the tree.
    pub(crate) fn hand_over(&mut self, from: usize, runs: &Runs<L1>) {
        let until = from + runs.pages() as usize;
        for (page, number) in self.pages[from..until].iter_mut().zip(runs.page_numbers()) {
            *page = number;
        }
        self.shared = self.shared.max(until);
    }

    /// Keeps the first `tokens` tokens, which end in the pages of the tree: `own` is the first own
    /// page of the row if it has none, and gets the rows of a page of the tree that is kept in
    /// part. Own pages that the row has stay, with their slots.
    ///
    /// Returns the pages of the tree that the row had behind the whole ones.
    pub(crate) fn cut(&mut self, tokens: usize, own: &Runs<L1>) -> Vec<u32> {
        let per_page = self.page_tokens.get() as usize;
        let mut kept = tokens / per_page;
        if planted!(CutKeepsTheTreesPage) && !tokens.is_multiple_of(per_page) {
            kept += 1;
        }
        let gone: Vec<u32> = self.pages.drain(kept..self.shared).collect();
        self.pages.extend(own.page_numbers());
        self.tokens = tokens.max(self.tokens - gone.len() * per_page);
        self.shared = tokens / per_page;
        gone
    }

    /// Ends the row and returns its own pages, which must be freed.
    #[must_use]
    pub(crate) fn into_own_pages(self) -> Runs<L1> {
        Runs::of_pages(&self.pages[self.shared..])
    }

    /// The pages that the request owns.
    #[must_use]
    pub fn own_pages(&self) -> &[u32] {
        &self.pages[self.shared..]
    }
}

/// Number of a running request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u32);

/// Why a request's row is not available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// No number is free.
    #[error("{requests} requests are running, no more fit; finish one or raise requests_max")]
    Full {
        /// Capacity of the table.
        requests: u32,
    },
    /// No such request.
    #[error("request {} is not running", .0.0)]
    Unknown(RequestId),
}

/// The running requests with their data: SGLang's `ReqToTokenPool`, with rows that know their owned
/// pages.
#[derive(Debug)]
pub struct RequestTable<R> {
    rows: Vec<Option<R>>,
    free: Vec<u32>,
}

impl<R> RequestTable<R> {
    /// A table for this many requests.
    #[must_use]
    pub fn new(requests_max: u32) -> RequestTable<R> {
        RequestTable {
            rows: (0..requests_max).map(|_| None).collect(),
            free: (0..requests_max).rev().collect(),
        }
    }

    /// Adds a request.
    ///
    /// # Errors
    /// The table is full.
    pub fn add(&mut self, row: R) -> Result<RequestId, TableError> {
        let requests = u32::try_from(self.rows.len()).unwrap_or(u32::MAX);
        let id = self.free.pop().ok_or(TableError::Full { requests })?;
        self.rows[id as usize] = Some(row);
        Ok(RequestId(id))
    }

    /// A request's row.
    ///
    /// # Errors
    /// No such request is running.
    pub fn get(&self, id: RequestId) -> Result<&R, TableError> {
        let row = self.rows.get(id.0 as usize).and_then(Option::as_ref);
        row.ok_or(TableError::Unknown(id))
    }

    /// A request's row.
    ///
    /// # Errors
    /// No such request is running.
    pub fn get_mut(&mut self, id: RequestId) -> Result<&mut R, TableError> {
        let row = self.rows.get_mut(id.0 as usize).and_then(Option::as_mut);
        row.ok_or(TableError::Unknown(id))
    }

    /// Ends a request.
    ///
    /// # Errors
    /// No such request is running.
    pub fn remove(&mut self, id: RequestId) -> Result<R, TableError> {
        let row = self.rows.get_mut(id.0 as usize).and_then(Option::take);
        let row = row.ok_or(TableError::Unknown(id))?;
        self.free.push(id.0);
        Ok(row)
    }

    /// The running requests.
    pub fn iter(&self) -> impl Iterator<Item = (RequestId, &R)> {
        let numbered = (0u32..).zip(&self.rows);
        numbered.filter_map(|(id, row)| row.as_ref().map(|row| (RequestId(id), row)))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn row(page_tokens: u32) -> Row {
        Row::new(NonZeroU32::new(page_tokens).unwrap())
    }

    #[test]
    fn tokens_continue_a_partly_filled_page_before_they_take_another() {
        let mut pool = PagePool::new(3);
        let mut row = row(4);
        row.extend(&mut pool, 6).unwrap();
        assert_eq!(row.pages(), [1, 2]);
        row.extend(&mut pool, 2).unwrap();
        assert_eq!((row.pages().len(), row.tokens()), (2, 8));
        row.extend(&mut pool, 1).unwrap();
        assert_eq!(row.pages(), [1, 2, 3]);
        assert_eq!(
            (row.slot(0), row.slot(7), row.slot(8)),
            (Some(4), Some(11), Some(12))
        );
        assert_eq!(row.slot(9), None);
    }

    #[test]
    fn a_row_that_does_not_fit_the_pool_is_unchanged() {
        let mut pool = PagePool::new(2);
        let mut row = row(4);
        row.extend(&mut pool, 5).unwrap();
        assert_eq!(row.extend(&mut pool, 4), None);
        assert_eq!(row.extend(&mut pool, usize::MAX), None);
        assert_eq!((row.tokens(), row.pages().len()), (5, 2));
        pool.free(&row.into_own_pages()).unwrap();
        assert_eq!(pool.free_pages(), 2);
    }

    #[test]
    fn a_full_table_refuses_requests_and_unknown_requests_are_errors() {
        let mut table = RequestTable::new(1);
        let id = table.add('a').unwrap();
        assert_eq!(table.add('b'), Err(TableError::Full { requests: 1 }));
        assert_eq!(table.remove(id), Ok('a'));
        assert_eq!(table.get(id), Err(TableError::Unknown(id)));
        assert_eq!(table.remove(id), Err(TableError::Unknown(id)));
        assert!(table.add('c').is_ok());
    }
}
