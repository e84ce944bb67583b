//! Forward passes: work that waits for their end, and the effects of a failure.
//!
//! ```text
//!   insert(forward) --> pending --forwards_ended--> backed up, written to L3
//!                          |
//!                          +-----forward_failed---> lost: removed from L1, and from the tree
//!                                                   unless L2 has an older copy
//! ```
//!
//! Inserted pages are readable at once, because a later forward of the same engine runs after the
//! forward that writes them. They are copied to L2 only after that forward and every earlier
//! forward have ended successfully. A page of a failed forward therefore never reaches L2 or L3,
//! and nothing must be removed from there.
//!
//! A failed forward loses the pages that its requests inserted with it and later, and all L1 pages
//! below those in the tree, because they were computed from them. A request is then broken if it
//! was inserted with that forward or holds any lost page.

use std::collections::BTreeSet;

use super::flight::{Pending, PendingTails};
use super::{Core, Event, Fence, RequestId, TierName};
use crate::planted::planted;
use crate::runs::{L1, Runs};
use crate::tree::NodeId;

/// Pages of the request were lost in a failed forward or load. The request cannot continue. Restart
/// it ([`Core::restart`]), or finish it without keeping its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request depends on pages that were lost in a failed forward or load; restart it")]
pub struct Broken;

impl Core {
    /// Reports that all forwards up to this one have ended. Failed forwards must have been reported
    /// before, by [`Core::forward_failed`].
    pub fn forwards_ended(&mut self, until: Fence) {
        self.ended = self.ended.max(until);
        let ended = self.ended;
        let is_over = |pending: &mut Pending| pending.until <= ended;
        let over: Vec<Pending> = self.pending.extract_if(.., is_over).collect();
        for over in over {
            if let Some(tails) = &over.tails {
                self.settle_tails(&tails.given);
            }
            let Some(end) = over.end else {
                continue;
            };
            if over.pages > 0 {
                self.tree.end_forward(end, over.pages);
            }
            self.copy_down(end);
        }
    }

    /// Reports that a forward has failed and no longer touches any page. Its pages are undefined.
    /// All pages inserted with it are lost, and its requests are broken.
    pub fn forward_failed(&mut self, forward: Fence) {
        if planted!(IgnoresFailedForward) {
            return;
        }
        // Later inserts of the same request may begin in a page that this forward filled in part.
        // So do those of requests that have started from a window or state of a failed insert.
        let (mut requests, mut void) = (BTreeSet::new(), BTreeSet::new());
        let has_failed = |pending: &mut Pending| {
            let (given, on) = match &pending.tails {
                Some(tails) => (&tails.given[..], &tails.on[..]),
                None => (&[][..], &[][..]),
            };
            if pending.forward == forward || on.iter().any(|of| void.contains(of)) {
                requests.insert(pending.request);
            }
            let has_failed = requests.contains(&pending.request)
                && !planted!(FailureSparesLaterInserts)
                || pending.forward == forward;
            if has_failed {
                void.extend(given.iter().copied());
            }
            has_failed
        };
        let failed: Vec<Pending> = self.pending.extract_if(.., has_failed).collect();
        for pending in failed {
            if pending.is_running && !planted!(RequestOutlivesItsForward) {
                self.broken.insert(pending.request);
            }
            // The loss of an earlier insert may include a later insert.
            if let Some(end) = pending.end.filter(|end| self.tree.is_pending(*end)) {
                self.stats.forward_failed += self.lose(end, pending.pages) as u64;
            }
        }
        for (pool, id) in void {
            self.stats.forward_failed += u64::from(self.tails[pool].pool.lose(id));
        }
        self.take_in_loads();
        self.free_lost();
    }

    /// Rows of a running request will not come: it is broken.
    pub(crate) fn rows_missing(&mut self, request: RequestId) {
        self.broken.insert(request);
    }

    /// Records an insert: the path to `end`, and the number of new pages in it. It waits for the
    /// newest forward if that has not ended.
    pub(super) fn inserted(
        &mut self,
        request: RequestId,
        end: Option<NodeId>,
        taken: &[NodeId],
        forward: Fence,
        tails: Option<Box<PendingTails>>,
    ) {
        self.progress += 1;
        let keys = taken.iter().filter_map(|node| self.tree.keys(*node));
        let pages = keys.map(<[_]>::len).sum();
        if self.newest <= self.ended || planted!(BackupBeforeForward) {
            if let Some(tails) = &tails {
                self.settle_tails(&tails.given);
            }
            end.into_iter().for_each(|end| self.copy_down(end));
            return;
        }
        for node in taken {
            self.tree.begin_forward(*node);
        }
        self.pending.push(Pending {
            forward,
            until: self.newest,
            request,
            is_running: true,
            end,
            pages,
            tails,
        });
    }

    /// A request that had these pages has none of them any more, or ends. No forward after
    /// `forward` touches them for it.
    pub(super) fn touched(&mut self, pages: impl IntoIterator<Item = u32>, forward: Fence) {
        for page in pages {
            if let Some(touched) = self.touched.get_mut(page as usize) {
                *touched = forward.max(*touched);
            }
        }
    }

    /// The newest forward that may still touch these free pages.
    pub(super) fn last_touch(&self, pages: &Runs<L1>) -> Fence {
        let fences = pages.page_numbers();
        let fences = fences.filter_map(|page| self.touched.get(page as usize).copied());
        fences.max().unwrap_or_default()
    }

    /// A request has ended. Its pending inserts continue without it.
    pub(super) fn leave_pending(&mut self, request: RequestId) {
        self.broken.remove(&request);
        for pending in &mut self.pending {
            pending.is_running &= pending.request != request;
        }
    }

    /// Marks the last `pages` L1 pages up to a node's end, and all L1 pages below them, as lost.
    /// Returns their number.
    pub(super) fn lose(&mut self, node: NodeId, pages: usize) -> usize {
        let lost = self.tree.lose(node, pages);
        self.lose_tails(&lost.readable);
        for keys in lost.readable {
            let tier = TierName::L1;
            self.emit(Event::Removed { tier, keys });
        }
        // Inserts of these pages no longer wait for their forwards. New pages may take their place
        // in the meantime, and those wait for their own forwards. A running request still depends
        // on its forward: a truncation may have given the lost pages up.
        if !planted!(LostInsertsWaitOn) {
            self.pending.retain_mut(|pending| {
                let is_lost = pending.end.is_some_and(|end| lost.nodes.contains(&end));
                if is_lost {
                    (pending.end, pending.pages) = (None, 0);
                }
                pending.is_running || !is_lost || pending.tails.is_some()
            });
        }
        lost.pages
    }

    /// Frees the lost pages that have no holder from before their loss.
    pub(super) fn free_lost(&mut self) {
        for pages in self.tree.take_free_losses() {
            self.free_l1(&pages);
        }
    }

    /// Whether this forward and all earlier ones are over.
    #[must_use]
    pub fn is_over(&self, forward: Fence) -> bool {
        forward <= self.ended
    }

    /// Inserts whose forwards have not ended.
    #[must_use]
    pub fn inserts_pending(&self) -> usize {
        self.pending.len()
    }

    /// Number of pages in pending inserts.
    pub(super) fn pages_pending(&self) -> usize {
        self.pending.iter().map(|pending| pending.pages).sum()
    }
}
