//! Writes to L3 late: pages are put when they leave a window of L2, not when they are made.
//!
//! ```text
//!   backup --> unwritten --- least recently used of a full window, or of L2 ---> queued for L3
//!                 ^                                                               |       |
//!                 |                                               L3 does not take it   takes it
//!                 |                                                               v       v
//!                 +------------------ used again --------------------------- declined   in L3
//! ```
//!
//! So L3 is asked late, when a page was not used for a while. It may refuse it, as under a budget
//! of writes; then the page leaves L2 without having been written, unless it is used before. A page
//! goes with all pages before it in its chain that L3 lacks, as one order. Behind a page that L3
//! has declined, none is written.
//!
//! A caller that waits for L3 ([`Core::retry_failed`]) empties the window. It fills again once
//! nothing is in flight.

use super::Core;
use super::flight::Late;
use crate::config::L3Write;
use crate::planted::planted;
use crate::tree::{self, NodeId};

impl Core {
    /// Asks L3 to store a node that it was not asked for, with those before it. `None` if there is
    /// nothing to ask: L3 has it, or is not written late.
    pub(super) fn put_late(&mut self, node: NodeId) -> Option<Late> {
        if self.config.l3_write != L3Write::Late || self.tree.is_in_l3(node) {
            return None;
        }
        let span = match self.tree.wanting_late(node) {
            tree::Late::Span(span) => span,
            tree::Late::Waits => return Some(Late::Waits),
            tree::Late::Orphan | tree::Late::Nothing => {
                self.tree.decline(&[node]);
                return Some(Late::Declined);
            }
        };
        let given = span.keys.len().min(self.put_room());
        if given == 0 {
            return Some(Late::NoRoom);
        }
        self.order_put(node, span, given).map(|_| Late::Queued)
    }

    /// Asks L3 to store the unwritten node that was used before all others. Returns its pages, too.
    pub(super) fn put_oldest(&mut self) -> Option<(Late, usize)> {
        let oldest = self.tree.first_unwritten()?;
        let pages = self.tree.keys(oldest)?.len();
        self.put_late(oldest).map(|late| (late, pages))
    }

    /// Asks L3 to store the pages that the window has no room for.
    pub(super) fn leave_window(&mut self) {
        if self.config.l3_write != L3Write::Late {
            return;
        }
        let is_flushing = self.is_flushing && !planted!(FlushSparesTheWindow);
        let window = if is_flushing {
            0
        } else {
            self.config.window_pages()
        };
        while self.tree.counts().unwritten_pages > window
            && let Some((Late::Queued | Late::Declined, _)) = self.put_oldest()
        {}
        self.is_flushing &= !(self.flights.is_empty() && self.pending.is_empty());
    }

    /// Asks L3 to store all pages of L2, each once.
    pub(super) fn flush(&mut self) {
        if self.config.l3_write == L3Write::Late {
            self.tree.end_declines();
            self.is_flushing = true;
            self.leave_window();
        }
    }
}
