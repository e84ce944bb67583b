//! Transfers in flight: backups, loads, puts, and the effects of their completions.
//!
//! | order | held from order to end | after success | after failure |
//! |---|---|---|---|
//! | back up | node in L1, its L2 pages | parts get their L2 pages; put to L3 | L2 pages freed |
//! | load | path in L1 | readable, once the pages above are | L1 pages lost, also of loads below |
//! | put | node in L2 | L3 has the pages | ordered again after a pause |
//!
//! A backup without room in L2, and the pages that the queue of L3 has no room for, are ordered
//! again when no transfer is in flight: after the end of a transfer, a prefetch or a request.
//!
//! A copy that has failed is ordered again only after progress: inserts, and pages stored in L3.
//! The first pause takes one step of it, each further one twice as many. All copies behind it on
//! its path wait until it has succeeded. So without progress no order follows an order that
//! failed, and a page that L3 never takes costs a number of attempts that grows with the logarithm
//! of the progress. A caller that waits for L3 ends the pauses once ([`Core::retry_failed`]).
//!
//! A backup whose parent is not in L2 is discarded even if the copy succeeded: every node in L2
//! must be reachable from above. It is ordered again when no transfer is in flight.

use super::flight::{Flight, Prefetch};
use super::{Core, Done, DoneError, Event, Fence, Order, Outcome, PrefetchId, TierName};
use crate::config::L3Write;
use crate::planted::planted;
use crate::runs::{L1, L2, Runs};
use crate::tails::TailId;
use crate::tree::{Hold, LoadId, Lock, NodeId, Span, Wait};

impl Core {
    /// Processes the completion of an order.
    ///
    /// # Errors
    /// The completion matches no outstanding order: nothing changes.
    pub fn complete(&mut self, done: Done) -> Result<(), DoneError> {
        let Done { id, outcome } = done;
        let wrong = DoneError::WrongKind { id, found: outcome };
        let prefetch = PrefetchId(id.0);
        if self
            .prefetches
            .get(&prefetch)
            .is_some_and(Prefetch::is_waiting)
        {
            let Outcome::Pages(pages) = outcome else {
                return Err(wrong);
            };
            self.prefetch_answered(prefetch, pages);
            self.copy_down_refused();
            return Ok(());
        }
        let flight = self.flights.remove(&id).ok_or(DoneError::Unknown(id))?;
        match (flight, outcome) {
            (Flight::Backup { lock, l2, evicts }, Outcome::Copied(is_good)) => {
                self.backup_ended(lock, l2, evicts, is_good || planted!(TrustsFailedBackup));
            }
            (
                Flight::Load {
                    lock,
                    pages,
                    tails,
                    ended: None,
                },
                Outcome::Copied(is_good),
            ) => {
                let flight = Flight::Load {
                    lock,
                    pages,
                    tails,
                    ended: Some(is_good || planted!(KeepsFailedLoad)),
                };
                self.flights.insert(id, flight);
                self.take_in_loads();
            }
            (flight @ Flight::Load { ended: Some(_), .. }, _) => {
                self.flights.insert(id, flight);
                return Err(DoneError::Unknown(id));
            }
            (Flight::Put { lock, pages, given }, Outcome::Pages(stored)) => {
                self.put_ended(lock, pages, given, stored.min(given));
            }
            (Flight::TailBackup(holds), Outcome::Copied(is_good)) => {
                self.tails_backed_up(holds, is_good);
            }
            (Flight::TailPut(pool, hold), Outcome::Pages(stored)) => {
                self.tail_put_ended(pool, hold, stored > 0);
            }
            (flight, _) => {
                self.flights.insert(id, flight);
                return Err(wrong);
            }
        }
        self.free_lost();
        self.copy_down_refused();
        self.leave_window();
        Ok(())
    }

    /// Remembers a node whose copy has no room, or waits for an attempt in flight. Forgets nodes
    /// that have left the tree before they are the majority.
    pub(super) fn refuse(&mut self, node: NodeId) {
        self.refused.insert(node);
        if self.refused.len() > 2 * self.tree.counts().nodes {
            let tree = &self.tree;
            self.refused.retain(|node| tree.keys(*node).is_some());
        }
    }

    /// Remembers a node whose copy has failed, or waits behind such a node, until this progress.
    /// Forgets nodes that have left the tree before they are the majority.
    pub(super) fn pause(&mut self, due: u64, node: NodeId) {
        self.paused.insert((due, node));
        // A node waits for few moments at a time: the pauses of the nodes before it.
        if self.paused.len() > 4 * self.tree.counts().nodes {
            let tree = &self.tree;
            self.paused.retain(|(_, node)| tree.keys(*node).is_some());
        }
    }

    /// Tries the copies again that have failed, each at most once, whatever is left of its pause:
    /// for a caller that waits until all pages are in L3, as far as L3 takes them.
    pub fn retry_failed(&mut self) {
        for (_, node) in std::mem::take(&mut self.paused) {
            self.tree.end_pause(node);
            self.refused.insert(node);
        }
        self.retry_tails();
        self.copy_down_refused();
        self.flush();
    }

    /// Orders the copies again that had no room or whose pause is over, if no transfer is in
    /// flight, whose end would order them. Called at the end of a transfer, a prefetch or a
    /// request, which gives pages of L2 back. Nodes that have no room now either stay refused.
    pub(super) fn copy_down_refused(&mut self) {
        let writes_l3 = !matches!(self.config.l3_write, L3Write::Late | L3Write::Never);
        for node in self.tree.take_bereft(writes_l3) {
            self.refuse(node);
        }
        if !self.flights.is_empty() {
            return;
        }
        let counted = (self.stats.backup_no_room, self.stats.put_delayed);
        let mut nodes = std::mem::take(&mut self.refused);
        let later = self.paused.split_off(&(self.progress + 1, NodeId::LEAST));
        let due = std::mem::replace(&mut self.paused, later);
        nodes.extend(due.into_iter().map(|(_, node)| node));
        for node in nodes {
            self.copy_down(node);
        }
        // They were counted when they were first refused.
        (self.stats.backup_no_room, self.stats.put_delayed) = counted;
    }

    /// Starts the copy of a node to L2. Returns the number of pages, or `None` if L2 has no room.
    pub(super) fn start_backup(&mut self, node: NodeId, evicts: bool) -> Option<usize> {
        let pages = self.tree.keys(node)?.len();
        // Locked first, so that the eviction for room cannot take the node.
        let lock = self.tree.lock(node, Hold::L1)?;
        let Some(l2) = self.take_l2(pages) else {
            self.stats.backup_no_room += pages as u64;
            self.tree.unlock(lock);
            if !evicts {
                self.refuse(node);
            }
            return None;
        };
        let l1 = self.tree.begin_backup(node);
        let id = self.fresh_id();
        let order = Order::BackUp {
            id,
            l1,
            l2: l2.clone(),
        };
        self.orders.push_back(order);
        let flight = Flight::Backup { lock, l2, evicts };
        self.flights.insert(id, flight);
        Some(pages)
    }

    fn backup_ended(&mut self, lock: Lock, l2: Runs<L2>, evicts: bool, is_good: bool) {
        let (node, pages) = (lock.node(), l2.pages() as usize);
        let has_way = self.tree.may_enter_l2(node, pages);
        let (into, unused) = if is_good && has_way {
            (Some(l2), None)
        } else {
            (None, Some(l2))
        };
        let parts = self.tree.end_backup(node, pages, into);
        self.tree.unlock(lock);
        if let Some(l2) = unused {
            self.stats.backup_failed += pages as u64;
            self.free_l2(&l2);
            if evicts {
                self.drop_after_failed_backup(&parts);
            } else if is_good {
                self.refuse(node);
            } else {
                let due = self.tree.fail_copy(node, pages, self.progress);
                self.pause(due, node);
            }
            return;
        }
        self.stats.backed_up += pages as u64;
        for part in &parts {
            self.emit_stored(TierName::L2, *part);
            if self.is_put_due(*part) && !self.waits_for_failed_put(*part) {
                self.start_put(*part);
            }
        }
        if evicts {
            for part in parts.iter().rev() {
                if self.tree.may_leave_l1(*part) {
                    self.leave_l1(*part);
                }
            }
        }
    }

    /// Whether a node waits behind a node whose write to L3 has failed. It is then remembered.
    fn waits_for_failed_put(&mut self, node: NodeId) -> bool {
        let wanting = self.tree.wanting_put_path(node, 0, self.progress);
        match wanting.wait {
            None => return false,
            Some(Wait::Attempt) => self.refuse(node),
            Some(Wait::Until(due)) => self.pause(due, node),
        }
        true
    }

    /// Whether the policy writes a node to L3 while it is in L2.
    pub(super) fn is_put_due(&self, node: NodeId) -> bool {
        match self.config.l3_write {
            L3Write::OnBackup => true,
            L3Write::Selective => self.tree.hits(node) >= self.config.selective_hits,
            L3Write::Late | L3Write::Never => false,
        }
    }

    /// Drops nodes that should leave L1 but could not be copied. Nodes in use again stay.
    fn drop_after_failed_backup(&mut self, parts: &[NodeId]) {
        for part in parts.iter().rev() {
            if self.tree.may_leave_l1(*part) {
                self.drop_subtree(*part);
            }
        }
    }

    /// Starts to load nodes that are in L2 only, from the root down to `end`, into these L1 pages.
    /// And pages of tail pools into their pages of L1.
    pub(super) fn start_load(
        &mut self,
        end: NodeId,
        nodes: &[NodeId],
        l1: Runs<L1>,
        into: Vec<(usize, TailId, u32)>,
    ) -> Option<LoadId> {
        let lock = self.tree.lock(end, Hold::L1)?;
        let id = self.fresh_id();
        let load = LoadId(id.0);
        let l2 = self.tree.begin_load(nodes, load, l1.clone());
        let (tails, held, touched) = self.begin_tail_load(into, load);
        let flight = Flight::Load {
            lock,
            pages: l1.pages() as usize,
            tails: held,
            ended: None,
        };
        let after = if planted!(LoadBeforeForward) {
            Fence::default()
        } else {
            touched.max(self.last_touch(&l1))
        };
        let order = Order::Load {
            id,
            l2,
            l1,
            tails,
            after,
        };
        self.orders.push_back(order);
        self.flights.insert(id, flight);
        self.loads += 1;
        Some(load)
    }

    /// Processes completed loads that have no load in flight above them, until none is left.
    pub(super) fn take_in_loads(&mut self) {
        let tree = &self.tree;
        let is_ripe = |flight: &Flight| match flight {
            Flight::Load {
                lock,
                pages,
                ended: Some(_),
                ..
            } => tree.is_lost(lock) || !tree.is_behind_load(lock.node(), *pages),
            _ => false,
        };
        let ripe = self.flights.iter().find(|(_, flight)| is_ripe(flight));
        let Some(id) = ripe.map(|(id, _)| *id) else {
            return;
        };
        let flight = self.flights.remove(&id);
        if let Some(Flight::Load {
            lock,
            pages,
            tails,
            ended,
        }) = flight
        {
            self.end_tail_load(tails, ended == Some(true));
            self.load_ended(lock, pages, ended == Some(true));
            self.take_in_loads();
        }
    }

    fn load_ended(&mut self, lock: Lock, pages: usize, is_good: bool) {
        self.loads -= 1;
        let node = lock.node();
        if self.tree.is_lost(&lock) {
            // The pages were already lost with a failed load or forward above.
        } else if is_good {
            self.stats.loaded += pages as u64;
            for part in self.tree.end_load(node, pages) {
                self.emit_stored(TierName::L1, part);
            }
        } else {
            self.stats.load_failed += self.lose(node, pages) as u64;
        }
        self.tree.unlock(lock);
    }

    /// Starts to write a node to L3, up to the limit of the queue. Returns the number of pages.
    /// `None` if L3 has them, if they are already queued, or if the queue is full.
    pub(super) fn start_put(&mut self, node: NodeId) -> Option<usize> {
        let span = self.tree.wanting_put(node)?;
        let pages = span.keys.len();
        let given = pages.min(self.put_room());
        if given < pages {
            self.stats.put_delayed += (pages - given) as u64;
            // The number of a node stays with its last part.
            self.refuse(node);
        }
        if given == 0 {
            return None;
        }
        if given < pages {
            let first = self.tree.split_at(node, given)?;
            return self.start_put(first);
        }
        self.order_put(node, span, given)
    }

    /// Number of pages that the queue of L3 has room for.
    pub(super) fn put_room(&self) -> usize {
        self.config.put_pages_max().saturating_sub(self.put_pages)
    }

    /// Orders the write of the first `given` pages of a span that ends in a node. Returns its
    /// number of pages.
    pub(super) fn order_put(
        &mut self,
        node: NodeId,
        mut span: Span,
        given: usize,
    ) -> Option<usize> {
        let pages = span.keys.len();
        span.keys.truncate(given);
        let _later = span.l2.split_off(given as u32);
        let lock = self.tree.lock(node, Hold::L2)?;
        self.tree.begin_put(node, pages);
        self.put_pages += given;
        let id = self.fresh_id();
        self.orders.push_back(Order::Put {
            id,
            keys: span.keys,
            parent: span.parent,
            depth: span.depth,
            l2: span.l2,
            is_skipped: !self.config.writes_l3,
        });
        let flight = Flight::Put { lock, pages, given };
        self.flights.insert(id, flight);
        Some(pages)
    }

    fn put_ended(&mut self, lock: Lock, pages: usize, given: usize, stored: usize) {
        let node = lock.node();
        self.put_pages -= given;
        self.stats.put += stored as u64;
        self.stats.put_failed += (given - stored) as u64;
        self.progress += stored as u64;
        let parts = self.tree.end_put(node, pages, stored);
        if stored < given && self.config.l3_write == L3Write::Late {
            self.tree.decline(&parts);
        } else if stored < given {
            let due = self.tree.fail_copy(node, pages - stored, self.progress);
            self.pause(due, node);
        }
        self.tree.unlock(lock);
        for part in &parts {
            if self.tree.is_in_l3(*part) {
                self.emit_stored(TierName::L3, *part);
            }
        }
    }

    pub(super) fn emit_stored(&mut self, tier: TierName, node: NodeId) {
        if self.config.events
            && let Some(keys) = self.tree.keys(node)
        {
            let keys = keys.to_vec();
            let parent = self.tree.parent_key(node);
            self.emit(Event::Stored { tier, keys, parent });
        }
    }

    /// Number of locks held by transfers, by kind.
    pub(super) fn flight_locks(&self) -> (u32, u32) {
        let (mut l1, mut l2) = (0, 0);
        for flight in self.flights.values() {
            match flight {
                Flight::Backup { .. } | Flight::Load { .. } => l1 += 1,
                Flight::Put { .. } => l2 += 1,
                Flight::TailBackup(_) | Flight::TailPut(..) => {}
            }
        }
        (l1, l2)
    }

    /// Number of pages queued for L3.
    pub(super) fn put_pages_out(&self) -> usize {
        let given = self.flights.values().map(|flight| match flight {
            Flight::Put { given, .. } => *given,
            _ => 0,
        });
        given.sum()
    }

    /// Number of loads in flight.
    pub(super) fn loads_out(&self) -> usize {
        let is_load = |flight: &&Flight| matches!(flight, Flight::Load { .. });
        self.flights.values().filter(is_load).count()
    }

    /// Number of pages in backups.
    pub(super) fn backup_pages_out(&self) -> usize {
        let pages = self.flight_l2().map(|l2| l2.pages() as usize);
        pages.sum()
    }

    /// L2 pages that backups are filling.
    pub(super) fn flight_l2(&self) -> impl Iterator<Item = &Runs<L2>> {
        self.flights.values().filter_map(|flight| match flight {
            Flight::Backup { l2, .. } => Some(l2),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::config::Config;
    use crate::prompt::Scope;

    #[test]
    fn nodes_that_have_left_the_tree_are_not_remembered_as_refused() {
        let mut config = Config::new(1, 1, 8, 8);
        config.l3_queue_bytes_max = 1;
        let mut core = Core::new(config).unwrap();
        for first in 0..1000 {
            let mut prompt = core.prompt(&Scope::default());
            core.extend_prompt(&mut prompt, [2 * first, 2 * first + 1])
                .unwrap();
            let mut request = core.start(prompt, 0);
            core.extend(&mut request, 2).unwrap();
            core.finish(request, true, Fence::default());
            while let Some(order) = core.next_order() {
                // L3 never answers.
                if let Order::BackUp { id, .. } = order {
                    let outcome = Outcome::Copied(true);
                    core.complete(Done { id, outcome }).unwrap();
                }
            }
        }
        assert!(core.stats.put_delayed > 900, "{:?}", core.stats);
        assert!(core.refused.len() < 50, "{}", core.refused.len());
    }
}
