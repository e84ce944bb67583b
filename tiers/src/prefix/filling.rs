//! Rows of a sequence that come from another process, while they come.
//!
//! A thread writes them into own pages of the sequence, behind a ticket for each layer. Invariants:
//! - The thread writes while it holds the lock of [`Handed`] alone, and the end of the sequence
//!   takes the pages out of it first. So no page is written after it is free.
//! - [`Sequence::row`] waits for the tickets of such rows, and no slice of them is written.
//! - If the rows do not come, the sequence is broken before its tickets fail: no page of it enters
//!   the tree.
//!
//! [`Sequence::row`]: super::Sequence::row

use std::ops::Range;
use std::sync::Arc;

use larder_kernels::{ChunkAt, L1Pool};
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

/// The pages into which rows may still be written; `None` from the end on.
type Open = Arc<Mutex<Option<Rows>>>;

/// The part of a sequence whose rows come from another process.
pub(super) struct Handed {
    /// Its tokens, counted from the first of the sequence.
    pub(super) tokens: usize,
    open: Open,
    stop: Box<dyn Fn() + Send + Sync>,
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
}

/// Rows of the first `tokens` tokens of a request come into these pages. `stop` is called at the
/// end of its sequence, if they are not complete then.
pub(super) fn filling(
    cache: Arc<Shared>,
    request: RequestId,
    rows: Rows,
    tokens: usize,
    stop: impl Fn() + Send + Sync + 'static,
) -> (Filling, Handed) {
    let open = Arc::new(Mutex::new(Some(rows)));
    let filling = Filling {
        cache,
        request,
        open: open.clone(),
    };
    let stop = Box::new(stop);
    (filling, Handed { tokens, open, stop })
}

impl Filling {
    /// Calls `copy` with the rows, whose pages stay the sequence's meanwhile. `None` after the end
    /// of the sequence.
    pub(crate) fn with<R>(&self, copy: impl FnOnce(&Rows) -> R) -> Option<R> {
        self.open.lock().as_ref().map(copy)
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
    }
}
