//! The truncation of a request: tokens whose speculation was rejected.
//!
//! A page of the tree never changes. If the kept tokens end within one, their rows are copied to an
//! own page of the request. All forwards and loads of the shared pages have ended by then, so the
//! request depends on the tree's page no longer. The copy is one more forward of the request: its
//! failure breaks the request. It runs behind the forwards that still touch the page that gets the
//! rows; where no stream orders it behind them, they have ended.

use larder_kernels::RowCopy;

use super::flight::Pending;
use super::{Broken, Core, Fence, NoRoom, Request};
use crate::planted::planted;
use crate::runs::Runs;
use crate::tree::{Hold, Lock};

/// Why a request keeps its tokens: nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TruncateError {
    /// Pages of the request were lost.
    #[error(transparent)]
    Broken(#[from] Broken),
    /// L1 has no page for the rows.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// The kept tokens end at no border whose state and window are there.
    #[error("there is no state at the end of the kept tokens, or no window before it")]
    NoState {
        /// The most tokens below that can be kept; 0 if none.
        kept: usize,
    },
    /// A forward or load of the shared pages, in which the kept tokens end, has not ended.
    #[error(
        "the kept tokens end in shared pages, and a forward or load of those has not ended; try \
         again when all of them have"
    )]
    Unsettled,
}

impl Core {
    /// Keeps the first `tokens` tokens of a request, whose forwards have all been reported. Own
    /// pages stay with their slots; pages of the tree behind the kept tokens are given up. Returns
    /// the copy of rows that the caller must carry out before the next forward, and report by
    /// [`Core::rows_copied`]. `is_ordered`: a stream orders that copy behind all forwards so far;
    /// else it is carried out at once.
    ///
    /// # Errors
    /// Nothing has changed, except evicted pages.
    pub fn truncate(
        &mut self,
        request: &mut Request,
        tokens: usize,
        is_ordered: bool,
    ) -> Result<Option<RowCopy>, TruncateError> {
        self.check(request)?;
        let per_page = self.page_tokens.get() as usize;
        let units = request.prompt.units_of(tokens);
        self.check_tails_cut(request, units)
            .map_err(|kept| TruncateError::NoState { kept })?;
        let copy = if units < request.row.shared_pages() * per_page {
            self.truncate_shared(request, units, is_ordered)?
        } else {
            None
        };
        if let Some(lock) = request.l2_lock.take() {
            self.tree.unlock(lock);
            request.l2_pages = 0;
        }
        self.cut_tails(request, units);
        if !planted!(CutKeepsThePrompt) {
            request.prompt.truncate(tokens);
        }
        request.counted = request.counted.min(units / per_page);
        Ok(copy)
    }

    /// As [`Core::truncate`], within the pages of the tree.
    fn truncate_shared(
        &mut self,
        request: &mut Request,
        units: usize,
        is_ordered: bool,
    ) -> Result<Option<RowCopy>, TruncateError> {
        let per_page = self.page_tokens.get() as usize;
        let (kept, rows) = (units / per_page, units % per_page);
        let is_pending = |lock: &Lock| self.tree.is_path_pending(lock.node());
        let is_settled = !request.lock.as_ref().is_some_and(is_pending)
            && !request.loads.iter().any(|load| self.is_loading(*load));
        if !is_settled && !planted!(CutsUnsettledPages) {
            return Err(TruncateError::Unsettled);
        }
        let own = match rows > 0 && request.row.own_pages().is_empty() {
            true => self.take_l1(1).ok_or_else(|| NoRoom {
                short: 1,
                pending: self.backup_pages_out(),
            })?,
            false => Runs::default(),
        };
        let is_running = self.pending.iter().any(|of| of.request == request.id);
        let is_over = !is_running && self.last_touch(&own) <= self.ended;
        if rows > 0 && !is_ordered && !is_over && !planted!(CopiesRowsUnderForward) {
            self.free_l1(&own);
            return Err(TruncateError::Unsettled);
        }
        let words = &request.prompt.words()[..kept * per_page];
        let end = self.tree.match_prefix(request.prompt.root(), words).l1_end;
        let lock = end.and_then(|end| self.tree.lock(end, Hold::L1));
        if let Some(before) = std::mem::replace(&mut request.lock, lock) {
            self.tree.unlock(before);
        }
        let gone = request.row.cut(units, &own);
        let own: Vec<u32> = own.page_numbers().collect();
        self.take_over(&own, request.prompt.tenant(), false);
        request.loads.clear();
        if !planted!(UntouchedCut) {
            self.touched(gone.iter().copied(), self.newest);
        }
        let to = request.row.own_pages().first().filter(|_| rows > 0);
        let copy = gone.first().zip(to).map(|(from, to)| RowCopy {
            from: *from,
            to: *to,
            rows: u32::try_from(rows).unwrap_or(u32::MAX),
        });
        Ok(copy)
    }

    /// Reports that the copy of a truncation has ended with this forward: it runs behind the copy,
    /// or is the copy itself.
    pub fn rows_copied(&mut self, request: &Request, copy: RowCopy, forward: Fence) {
        self.newest = self.newest.max(forward);
        if !planted!(UntouchedCut) {
            self.touched([copy.from, copy.to], forward);
        }
        if forward > self.ended {
            self.pending.push(Pending {
                forward,
                until: self.newest,
                request: request.id,
                is_running: true,
                end: None,
                pages: 0,
                tails: None,
            });
        }
    }
}
