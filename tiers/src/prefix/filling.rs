//! Rows of a sequence that come from another process, while they come.
//!
//! A thread writes them into own pages of the sequence, behind a ticket for each layer. Invariants:
//! - The thread writes, or orders a copy of a device, while it holds the lock of [`Handed`] alone,
//!   and the end of the sequence takes the pages out of it first. Pages that copies of a device
//!   still touch then are free when these have ended ([`DeviceCopies`]). So no page is written
//!   after it is free.
//! - [`Sequence::row`] waits for the tickets of such rows, and no slice of them is written.
//! - If the rows do not come, the sequence is broken before its tickets fail, or before
//!   [`Handed::is_over`]: no page of it enters the tree.
//!
//! [`Sequence::row`]: super::Sequence::row

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use larder_kernels::{ChunkAt, L1Pool, Ticket};
use larder_sync::Mutex;

use super::shared::Shared;
use crate::core::RequestId;
use crate::planted::planted;

/// Consecutive rows of one page, in one layer of one part.
pub(crate) struct Piece {
    /// Their address in L1.
    pub(crate) address: u64,
    pub(crate) bytes: usize,
    /// The number of the page in its sequence.
    pub(crate) page: usize,
    /// Where they are in the page: `[part][layer][token]` rows.
    pub(crate) offset: usize,
}

/// The same rows of neighbouring pages of a sequence.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PageRows {
    /// The numbers of the pages in their sequence.
    pub(crate) pages: Range<usize>,
    pub(crate) rows: Range<u32>,
}

/// The rows of a sequence in L1.
#[derive(Debug)]
pub(crate) struct Rows {
    l1: L1Pool,
    pages: Vec<u32>,
}

impl Rows {
    pub(super) fn new(l1: L1Pool, pages: Vec<u32>) -> Rows {
        Rows { l1, pages }
    }

    pub(crate) fn l1(&self) -> &L1Pool {
        &self.l1
    }

    /// A page of L1, by its number in the sequence.
    pub(crate) fn page(&self, number: usize) -> Option<u32> {
        self.pages.get(number).copied()
    }

    /// Some tokens as rows of pages: whole pages, and the parts of a page before and behind them.
    pub(crate) fn of_pages(&self, tokens: Range<usize>) -> Vec<PageRows> {
        page_rows(self.l1.shape().page_tokens(), tokens)
    }

    /// The pieces of some tokens in a layer of all parts.
    pub(crate) fn pieces(&self, layer: u32, tokens: Range<usize>) -> Vec<Piece> {
        let shape = self.l1.shape();
        let (row, chunk) = (shape.row_bytes() as usize, shape.chunk_bytes() as usize);
        let page_tokens = shape.page_tokens() as usize;
        let mut pieces = Vec::new();
        for part in 0..shape.parts() {
            let mut at = tokens.start;
            while at < tokens.end {
                let page = at / page_tokens;
                let until = tokens.end.min((page + 1) * page_tokens);
                let number = self.pages.get(page).copied().unwrap_or(u32::MAX);
                let of = ChunkAt {
                    part,
                    layer,
                    page: number,
                };
                let Ok(start) = self.l1.address(of) else {
                    break;
                };
                let first = at % page_tokens * row;
                pieces.push(Piece {
                    address: start + first as u64,
                    bytes: (until - at) * row,
                    page,
                    offset: (part * shape.layers() + layer) as usize * chunk + first,
                });
                at = until;
            }
        }
        pieces
    }
}

fn page_rows(page_tokens: u32, tokens: Range<usize>) -> Vec<PageRows> {
    let per_page = page_tokens as usize;
    let (mut all, mut at) = (Vec::new(), tokens.start);
    while at < tokens.end {
        let (page, first) = (at / per_page, at % per_page);
        let until = match first == 0 && tokens.end - at >= per_page {
            true => tokens.end / per_page * per_page,
            false => tokens.end.min((page + 1) * per_page),
        };
        let (pages, rows) = match until - at < per_page {
            true => (page..page + 1, first..first + until - at),
            false => (page..until / per_page, 0..per_page),
        };
        let narrow = |row: usize| u32::try_from(row).unwrap_or(page_tokens);
        all.push(PageRows {
            pages,
            rows: narrow(rows.start)..narrow(rows.end),
        });
        at = until;
    }
    all
}

/// Copies of a device that touch rows of a sequence, from or to another process.
#[derive(Debug, Default)]
pub(crate) struct DeviceCopies(Mutex<Vec<Ticket>>);

impl DeviceCopies {
    pub(crate) fn add(&self, tickets: impl IntoIterator<Item = Ticket>) {
        self.0.lock().extend(tickets);
    }

    /// The copies that have not ended.
    pub(super) fn left(&self) -> Vec<Ticket> {
        let mut copies = self.0.lock();
        copies.retain(|ticket| !ticket.is_settled());
        copies.clone()
    }

    pub(super) fn are_over(&self) -> bool {
        self.left().is_empty()
    }
}

/// The pages into which rows may still be written; `None` from the end on.
type Open = Arc<Mutex<Option<Rows>>>;

/// The part of a sequence whose rows come from another process.
pub(super) struct Handed {
    /// Its tokens, counted from the first of the sequence.
    pub(super) tokens: usize,
    open: Open,
    is_over: Arc<AtomicBool>,
    stop: Box<dyn Fn() + Send + Sync>,
}

impl Handed {
    /// Whether all rows are there, or the sequence is broken.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        if planted!(FillsFreedPages) {
            return;
        }
        if self.open.lock().take().is_some() {
            (self.stop)();
        }
    }
}

/// The obligation to fill rows of a sequence. A drop breaks it if they are not complete.
pub(crate) struct Filling {
    cache: Arc<Shared>,
    request: RequestId,
    open: Open,
    is_over: Arc<AtomicBool>,
    copies: Arc<DeviceCopies>,
}

/// Rows of the first `tokens` tokens of a request come into these pages. `stop` is called at the
/// end of its sequence, if they are not complete then.
pub(super) fn filling(
    cache: Arc<Shared>,
    request: RequestId,
    (rows, copies): (Rows, Arc<DeviceCopies>),
    tokens: usize,
    stop: impl Fn() + Send + Sync + 'static,
) -> (Filling, Handed) {
    let (open, is_over) = (
        Arc::new(Mutex::new(Some(rows))),
        Arc::<AtomicBool>::default(),
    );
    let filling = Filling {
        cache,
        request,
        open: open.clone(),
        is_over: is_over.clone(),
        copies,
    };
    let handed = Handed {
        tokens,
        open,
        is_over,
        stop: Box::new(stop),
    };
    (filling, handed)
}

impl Filling {
    /// Calls `copy` with the rows, whose pages stay the sequence's meanwhile. `None` after the end
    /// of the sequence.
    pub(crate) fn with<R>(&self, copy: impl FnOnce(&Rows) -> R) -> Option<R> {
        self.open.lock().as_ref().map(copy)
    }

    /// As [`Filling::with`], for copies of a device, which `copy` adds.
    pub(crate) fn copied_by<R>(&self, copy: impl FnOnce(&Rows, &DeviceCopies) -> R) -> Option<R> {
        self.with(|rows| copy(rows, &self.copies))
    }

    /// All rows are there. False if the sequence has ended before.
    pub(crate) fn complete(self) -> bool {
        self.open.lock().take().is_some()
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        let mut open = self.open.lock();
        if open.take().is_some() && !planted!(KeepsUnfilledRows) {
            let request = self.request;
            // A closed cache has no sequences.
            let _closed = self.cache.with_any(|cache| cache.rows_missing(request));
        }
        drop(open);
        self.is_over.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_whole_pages_between_two_parts_of_a_page() {
        let of = |tokens| {
            let all = page_rows(4, tokens).into_iter();
            all.map(|of| (of.pages, of.rows)).collect::<Vec<_>>()
        };
        assert_eq!(of(3..3), []);
        assert_eq!(of(1..3), [(0..1, 1..3)]);
        assert_eq!(of(4..12), [(1..3, 0..4)]);
        assert_eq!(of(4..6), [(1..2, 0..2)]);
        assert_eq!(of(2..6), [(0..1, 2..4), (1..2, 0..2)]);
        assert_eq!(of(3..13), [(0..1, 3..4), (1..3, 0..4), (3..4, 0..1)]);
        for (from, until) in (0..14).flat_map(|from| (from..14).map(move |until| (from, until))) {
            let each = of(from..until).into_iter().flat_map(|(pages, rows)| {
                pages.flat_map(move |page| rows.clone().map(move |row| page * 4 + row as usize))
            });
            assert_eq!(each.collect::<Vec<_>>(), (from..until).collect::<Vec<_>>());
        }
    }
}
