//! Rows: where the KV of one running request lies in L1, and the table of all of them.
//!
//! ```text
//!  tokens   0 ............ shared ................... tokens
//!  pages    | the tree's pages   | the request's own pages  |      the last one may be partly filled
//! ```
//!
//! Invariants of a row: it has exactly the pages that its tokens need; the first `shared` pages belong to the tree, the others
//! to the request and to nobody else; shared pages are full.

use std::num::NonZeroU32;

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

    /// Tokens that have a slot.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Its pages, in order.
    #[must_use]
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// How many pages at its front belong to the tree.
    #[must_use]
    pub fn shared_pages(&self) -> usize {
        self.shared
    }

    /// Where a token's KV lies: a slot of the L1 pool, `page_size` slots a page.
    #[must_use]
    pub fn slot(&self, token: usize) -> Option<u64> {
        let per_page = self.page_tokens.get() as usize;
        let page = self.pages.get(token / per_page)?;
        (token < self.tokens).then(|| {
            u64::from(*page) * u64::from(self.page_tokens.get()) + (token % per_page) as u64
        })
    }

    /// Pages that `more` further tokens need beyond those the row has: none while they fit the partly filled last one.
    #[must_use]
    pub fn pages_short(&self, more: usize) -> usize {
        let needed = (self.tokens + more).div_ceil(self.page_tokens.get() as usize);
        needed - self.pages.len()
    }

    /// Gives `more` further tokens a slot each, first in the partly filled last page. `None`, and no change, when the pool has
    /// too few pages.
    #[must_use]
    pub fn extend(&mut self, pool: &mut PagePool<L1>, more: usize) -> Option<()> {
        let short = u32::try_from(self.pages_short(more)).ok()?;
        let runs = pool.allocate(short)?;
        self.pages.extend(runs.page_numbers());
        self.tokens += more;
        Some(())
    }

    /// Puts pages of the tree behind the shared ones of a row that has no pages of its own.
    ///
    /// # Panics
    /// When the row has pages of its own.
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

    /// Hands the pages up to `until` over to the tree; those from `from` on become these.
    pub(crate) fn hand_over(&mut self, from: usize, runs: &Runs<L1>) {
        let until = from + runs.pages() as usize;
        for (page, number) in self.pages[from..until].iter_mut().zip(runs.page_numbers()) {
            *page = number;
        }
        self.shared = self.shared.max(until);
    }

    /// Ends the row; what is left to give back are the pages of its own.
    #[must_use]
    pub(crate) fn into_own_pages(self) -> Runs<L1> {
        Runs::of_pages(&self.pages[self.shared..])
    }

    /// The pages of its own.
    #[must_use]
    pub fn own_pages(&self) -> &[u32] {
        &self.pages[self.shared..]
    }
}

/// Number of a running request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u32);

/// Why a request's row is not to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// No number is free.
    #[error("{requests} requests are running, no more fit; finish one or raise requests_max")]
    Full {
        /// Requests that fit.
        requests: u32,
    },
    /// No such request.
    #[error("request {} is not running", .0.0)]
    Unknown(RequestId),
}

/// The running requests and what each of them has: SGLang's `ReqToTokenPool`, with rows that know what is theirs.
#[derive(Debug)]
pub struct RequestTable<R> {
    rows: Vec<Option<R>>,
    free: Vec<u32>,
}

impl<R> RequestTable<R> {
    /// A table for so many requests.
    #[must_use]
    pub fn new(requests_max: u32) -> RequestTable<R> {
        RequestTable {
            rows: (0..requests_max).map(|_| None).collect(),
            free: (0..requests_max).rev().collect(),
        }
    }

    /// Takes a request in.
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
    fn a_row_that_does_not_fit_the_pool_is_left_as_it_was() {
        let mut pool = PagePool::new(2);
        let mut row = row(4);
        row.extend(&mut pool, 5).unwrap();
        assert_eq!(row.extend(&mut pool, 4), None);
        assert_eq!((row.tokens(), row.pages().len()), (5, 2));
        pool.free(&row.into_own_pages()).unwrap();
        assert_eq!(pool.free_pages(), 2);
    }

    #[test]
    fn a_table_refuses_what_does_not_fit_and_what_it_does_not_know() {
        let mut table = RequestTable::new(1);
        let id = table.add('a').unwrap();
        assert_eq!(table.add('b'), Err(TableError::Full { requests: 1 }));
        assert_eq!(table.remove(id), Ok('a'));
        assert_eq!(table.get(id), Err(TableError::Unknown(id)));
        assert_eq!(table.remove(id), Err(TableError::Unknown(id)));
        assert!(table.add('c').is_ok());
    }
}
