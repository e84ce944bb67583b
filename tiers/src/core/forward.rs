//! Forward passes: what waits for the end of one, and what a failed one takes with it.
//!
//! ```text
//!   insert(forward) --> pending --forwards_ended--> backed up, written to L3
//!                          |
//!                          +-----forward_failed---> lost: out of L1, and of the tree where L2 has no older copy
//! ```
//!
//! Inserted pages are readable at once: a later forward of the same engine comes after the one that
//! writes them. They are copied to L2 only when that forward, and every one before it, has ended
//! well. So no page of a failed forward ever reaches L2 or L3, and nothing has to be taken back
//! from there.
//!
//! A forward that fails loses the pages that its requests inserted with it and later, and all L1
//! pages below those in the tree: they were computed on them. A request is broken from then on when
//! it was inserted with that forward, or holds any lost page.

use std::collections::BTreeSet;

use super::request::RequestId;
use super::{Core, Event, Fence, Request, TierName};
use crate::planted::planted;
use crate::tree::{Lock, NodeId};

/// An insert whose forward has not ended.
#[derive(Debug)]
pub(super) struct Pending {
    forward: Fence,
    /// The newest forward at that time: the path may hold pages of any up to this one.
    until: Fence,
    request: RequestId,
    is_running: bool,
    /// Where the inserted path ends; `None` when it has no whole page.
    end: Option<NodeId>,
    /// How many pages at its end the tree took from the request. They cannot leave L1 meanwhile.
    pages: usize,
}

/// Pages that a request stands on were lost: a forward or a load has failed. The request cannot go
/// on. Restart it ([`Core::restart`]), or finish it without keeping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pages that the request stands on were lost with a failed forward or load; restart it")]
pub struct Broken;

impl Core {
    /// All forwards up to this one have ended. Those that failed were reported before, by
    /// [`Core::forward_failed`].
    pub fn forwards_ended(&mut self, until: Fence) {
        self.ended = self.ended.max(until);
        let ended = self.ended;
        let is_over = |pending: &mut Pending| pending.until <= ended;
        let over: Vec<Pending> = self.pending.extract_if(.., is_over).collect();
        let ends = over
            .into_iter()
            .filter_map(|over| Some((over.end?, over.pages)));
        for (end, pages) in ends {
            if pages > 0 {
                self.tree.end_forward(end, pages);
            }
            self.copy_down(end);
        }
    }

    /// A forward has failed: the pages that it wrote are undefined, and nothing touches them for it
    /// any more. What was inserted with it is lost, and its requests are broken.
    pub fn forward_failed(&mut self, forward: Fence) {
        if planted!(IgnoresFailedForward) {
            return;
        }
        // What a request inserted later may begin in a page that this forward has filled in part.
        let mut requests = BTreeSet::new();
        let has_failed = |pending: &mut Pending| {
            if pending.forward == forward {
                requests.insert(pending.request);
            }
            requests.contains(&pending.request) && !planted!(FailureSparesLaterInserts)
                || pending.forward == forward
        };
        let failed: Vec<Pending> = self.pending.extract_if(.., has_failed).collect();
        for pending in failed {
            if pending.is_running && !planted!(RequestOutlivesItsForward) {
                self.broken.insert(pending.request);
            }
            // The loss of an earlier insert may have taken a later one along.
            if let Some(end) = pending.end.filter(|end| self.tree.is_pending(*end)) {
                self.stats.forward_failed += self.lose(end, pending.pages) as u64;
            }
        }
        self.take_in_loads();
        self.free_lost();
    }

    /// Takes an insert in: the path to `end`, and how many pages of it are new. It waits for the
    /// newest forward where that has not ended.
    pub(super) fn inserted(
        &mut self,
        request: RequestId,
        end: Option<NodeId>,
        taken: &[NodeId],
        forward: Fence,
    ) {
        let keys = taken.iter().filter_map(|node| self.tree.keys(*node));
        let pages = keys.map(<[_]>::len).sum();
        if self.newest <= self.ended || planted!(BackupBeforeForward) {
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
        });
    }

    /// Whether a request stands on lost pages.
    #[must_use]
    pub fn is_broken(&self, request: &Request) -> bool {
        let is_lost = |lock: &Lock| self.tree.is_lost(lock) && !planted!(HidesLosses);
        self.broken.contains(&request.id()) || request.l1_lock().is_some_and(is_lost)
    }

    pub(super) fn check(&self, request: &Request) -> Result<(), Broken> {
        if self.is_broken(request) {
            return Err(Broken);
        }
        Ok(())
    }

    /// A request has ended: its inserts go on without it.
    pub(super) fn leave_pending(&mut self, request: RequestId) {
        self.broken.remove(&request);
        for pending in &mut self.pending {
            pending.is_running &= pending.request != request;
        }
    }

    /// The last `pages` L1 pages up to a node's end are no good, and all L1 pages below. How many
    /// those are together.
    pub(super) fn lose(&mut self, node: NodeId, pages: usize) -> usize {
        let lost = self.tree.lose(node, pages);
        for keys in lost.readable {
            let tier = TierName::L1;
            self.tell(Event::Removed { tier, keys });
        }
        // Inserts of these pages wait for nothing any more, whatever becomes of their forwards: new
        // pages may take their place meanwhile, and those wait for forwards of their own.
        if !planted!(LostInsertsWaitOn) {
            let is_lost = |end: NodeId| lost.nodes.contains(&end);
            let pending = &mut self.pending;
            pending.retain(|pending| !pending.end.is_some_and(is_lost));
        }
        lost.pages
    }

    /// Gives back the lost pages that nothing from before their loss holds any more.
    pub(super) fn free_lost(&mut self) {
        for pages in self.tree.take_free_losses() {
            self.free_l1(&pages);
        }
    }

    /// Inserts whose forwards have not ended.
    #[must_use]
    pub fn inserts_pending(&self) -> usize {
        self.pending.len()
    }

    /// Pages that they brought, counted.
    pub(super) fn pages_pending(&self) -> usize {
        self.pending.iter().map(|pending| pending.pages).sum()
    }
}
