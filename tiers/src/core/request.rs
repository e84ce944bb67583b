//! The steps of a request: start, load back, extend, insert, finish.
//!
//! A request holds its match by one lock at a time: the L1 part once it runs, the whole match until
//! the load of the L2 part has been decided. Its row contains pages of the tree and pages of its
//! own.
//!
//! Invariant: inserted pages were computed from valid pages. Nothing is inserted behind a load in
//! flight. A broken request inserts nothing: pages that it holds were lost, or its forward failed.

use super::side::RequestTails;
use super::{Broken, Core, Fence, RequestId, TierName};
use crate::config::{L3Write, WritePolicy};
use crate::planted::planted;
use crate::pool::Row;
use crate::prompt::Prompt;
use crate::tree::{Hold, LoadId, Lock, NodeId, Offer, Wait};

/// A running request.
#[derive(Debug)]
#[must_use = "a request that is not finished holds its pages for ever"]
pub struct Request {
    pub(super) id: RequestId,
    pub(super) prompt: Prompt,
    pub(super) row: Row,
    priority: i32,
    /// Holds the L1 part.
    pub(super) lock: Option<Lock>,
    /// Holds the L2 part after the L1 part while it may still be loaded.
    pub(super) l2_lock: Option<Lock>,
    pub(super) l2_pages: usize,
    /// Loads that fill pages of the row.
    pub(super) loads: Vec<LoadId>,
    /// Number of pages that have been counted as hits.
    pub(super) counted: usize,
    /// With tail pools: its window pages and states.
    pub(super) tails: Option<Box<RequestTails>>,
}

impl Request {
    /// The number of the request.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The prompt. [`Core::extend_prompt`] extends it as the answer is generated.
    pub fn prompt_mut(&mut self) -> &mut Prompt {
        &mut self.prompt
    }

    /// The prompt.
    #[must_use]
    pub fn prompt(&self) -> &Prompt {
        &self.prompt
    }

    /// Number of pages of the prompt in L2 after those in the row, while they may still be loaded.
    #[must_use]
    pub fn l2_pages(&self) -> usize {
        self.l2_pages
    }

    /// Number of tokens with a slot.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.row.tokens()
    }

    /// The row of L1 pages, and the loads that must end before all of them are readable. Returned
    /// together so that the loads cannot be overlooked. [`Cache::pages`](crate::Cache::pages) has
    /// the row behind the tickets of those loads.
    #[must_use]
    pub fn row_and_loads(&self) -> (&Row, &[LoadId]) {
        (&self.row, &self.loads)
    }

    /// The pages of the row that the request owns.
    #[must_use]
    pub fn own_pages(&self) -> &[u32] {
        self.row.own_pages()
    }

    /// Number of locks held, by kind.
    #[must_use]
    pub fn locks(&self) -> (u32, u32) {
        (
            u32::from(self.lock.is_some()),
            u32::from(self.l2_lock.is_some()),
        )
    }
}

/// The result of loading the L2 part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadBack {
    /// A load of this many pages was started. They are readable when it has ended.
    Started(LoadId, usize),
    /// There is nothing to load.
    Nothing,
    /// The number of tokens is below the threshold; the request computes them.
    BelowThreshold,
    /// The maximum number of loads is in flight, or the pages exceed the caller's maximum; the
    /// request computes them.
    OverQuota,
    /// L1 has no room; the request computes the tokens that fit.
    NoRoom,
}

/// L1 has too few pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, thiserror::Error)]
#[error(
    "{short} pages of L1 are missing, {pending} pages are held by backups in progress; wait for \
     those, or retract a request"
)]
pub struct NoRoom {
    /// Missing pages.
    pub short: usize,
    /// Pages that backups in progress hold. They can be evicted afterwards, unless requests hold
    /// them, too.
    pub pending: usize,
}

/// Why a request gets no slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExtendError {
    /// L1 has too few pages.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// Pages of the request were lost.
    #[error(transparent)]
    Broken(#[from] Broken),
}

/// The result of an insert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InsertEnd {
    /// Number of pages of the request, from the first, that belong to the tree.
    pub pages: usize,
    /// Number of pages freed because the tree already had their tokens.
    pub duplicates: usize,
}

impl Core {
    /// Starts a request on the part of its prompt that is in L1. The last token is excluded,
    /// because it is always computed. The following part in L2 is held until [`Core::load_back`]
    /// decides.
    pub fn start(&mut self, mut prompt: Prompt, priority: i32) -> Request {
        prompt.renew(&self.weights);
        let usable = self.usable(&prompt);
        let words = &prompt.words()[..usable];
        let (matched, tails) = match self.tails.is_empty() {
            true => (self.tree.match_prefix(prompt.root(), words), None),
            false => self.match_tails(prompt.root(), words),
        };
        let mut row = self.row();
        row.share(&matched.l1);
        self.stats.requested += prompt.pages() as u64;
        self.stats.l1_hits += u64::from(matched.l1.pages());
        self.stats.l2_hits += matched.l2_pages as u64;
        let mut lock =
            |node: Option<NodeId>, hold| node.and_then(|node| self.tree.lock(node, hold));
        let l2_end = matched.end.filter(|_| matched.l2_pages > 0);
        let id = RequestId(self.next_request);
        self.next_request += 1;
        Request {
            id,
            lock: lock(matched.l1_end, Hold::L1),
            l2_lock: lock(l2_end, Hold::L2),
            l2_pages: matched.l2_pages,
            loads: matched.loads,
            counted: 0,
            prompt,
            row,
            tails,
            priority,
        }
    }

    /// Number of words of a prompt that a request may have from the tree.
    pub(super) fn usable(&self, prompt: &Prompt) -> usize {
        let per_page = self.page_tokens.get() as usize;
        prompt.words().len().saturating_sub(1) / per_page * per_page
    }

    /// Number of available pages ([`Core::available_pages`]) with which L1 has room for a request
    /// of `pages` pages. Its pages in L1 are not available to itself.
    #[must_use]
    pub fn room_for(&self, prompt: &Prompt, pages: usize) -> usize {
        let words = &prompt.words()[..self.usable(prompt)];
        let root = prompt.root_under(&self.weights);
        let (in_l1, evictable) = self.tree.peek_l1(root, words);
        pages.saturating_sub(in_l1) + evictable
    }

    /// Decides whether the L2 part of a request is loaded: at most `pages_max` pages, or none.
    /// Without a load, the request computes those tokens and nothing else changes.
    ///
    /// # Errors
    /// The request is broken.
    pub fn load_back(
        &mut self,
        request: &mut Request,
        pages_max: usize,
    ) -> Result<LoadBack, Broken> {
        self.check(request)?;
        let Some(l2_lock) = request.l2_lock.take() else {
            return Ok(LoadBack::Nothing);
        };
        request.l2_pages = 0;
        let end = l2_lock.node();
        let result = match request.tails.is_some() {
            false => self.try_load(request, end, pages_max),
            true => self.try_load_tails(request, end, pages_max),
        };
        self.tree.unlock(l2_lock);
        if !matches!(result, LoadBack::Started(..)) {
            self.stats.loads_declined += 1;
        }
        Ok(result)
    }

    fn try_load(&mut self, request: &mut Request, end: NodeId, pages_max: usize) -> LoadBack {
        let nodes = self.tree.wanting_load(end);
        let pages: usize = nodes
            .iter()
            .filter_map(|node| self.tree.keys(*node))
            .map(<[_]>::len)
            .sum();
        let is_behind_row = self.tree.depth_of_end(end) == Some(request.row.shared_pages() + pages);
        if pages == 0 || !is_behind_row || !request.row.own_pages().is_empty() {
            // Another request has loaded it, or this one already computes it. A new match would
            // show this.
            return LoadBack::Nothing;
        }
        if pages < self.config.pages_of(self.config.load_threshold_tokens) {
            return LoadBack::BelowThreshold;
        }
        if pages > pages_max || self.loads >= self.config.loads_max as usize {
            return LoadBack::OverQuota;
        }
        let Some(l1) = self.take_l1(pages) else {
            return LoadBack::NoRoom;
        };
        let lock = self.tree.lock(end, Hold::L1);
        let Some(load) = self.start_load(end, &nodes, l1.clone(), Vec::new()) else {
            self.free_l1(&l1);
            return LoadBack::Nothing;
        };
        if let Some(before) = std::mem::replace(&mut request.lock, lock) {
            self.tree.unlock(before);
        }
        let before = request.row.pages().len();
        request.row.share(&l1);
        let tenant = request.prompt.tenant();
        self.take_over(&request.row.pages()[before..], tenant, true);
        request.loads.push(load);
        LoadBack::Started(load, pages)
    }

    /// Allocates slots for `tokens` further tokens, and evicts pages if necessary.
    ///
    /// # Errors
    /// There is no room: nothing changes except the evicted pages. Or the request is broken.
    pub fn extend(&mut self, request: &mut Request, tokens: usize) -> Result<(), ExtendError> {
        self.check(request)?;
        self.begin_tails(request)?;
        let needed = request.row.pages_short(tokens);
        let free = self.l1.free_pages() as usize;
        if free < needed {
            self.evict_l1(needed - free);
        }
        let before = request.row.pages().len();
        let extended = request.row.extend(&mut self.l1, tokens);
        let tenant = request.prompt.tenant();
        self.take_over(&request.row.pages()[before..], tenant, false);
        extended.ok_or_else(|| {
            let short = needed.saturating_sub(self.l1.free_pages() as usize);
            let pending = self.backup_pages_out();
            NoRoom { short, pending }.into()
        })
    }

    /// Whether a request depends on lost pages.
    #[must_use]
    pub fn is_broken(&self, request: &Request) -> bool {
        let is_lost = |lock: &Lock| self.tree.is_lost(lock) && !planted!(HidesLosses);
        let is_old = request.prompt.weights() != self.weights.changes();
        is_old && !planted!(OutlivesItsWeights)
            || self.broken.contains(&request.id)
            || request.lock.as_ref().is_some_and(is_lost)
            || self.has_lost_tails(request)
    }

    pub(super) fn check(&self, request: &Request) -> Result<(), Broken> {
        if self.is_broken(request) {
            return Err(Broken);
        }
        Ok(())
    }

    /// Whether a load is not over yet.
    #[must_use]
    pub fn is_loading(&self, load: LoadId) -> bool {
        self.flights.contains_key(&load.into())
    }

    /// Moves the computed whole pages of a request to the tree. The prompt must be extended by the
    /// answer so far. Pages that the tree already has are freed, and the row then contains the
    /// tree's pages instead. The partly filled page stays with the request.
    ///
    /// `forward` is the forward that writes these pages, or the last of several. Requests may match
    /// them at once. They are copied to L2 after [`Core::forwards_ended`] has reached it;
    /// [`Core::forward_failed`] removes them from the tree.
    ///
    /// # Errors
    /// The request is broken: nothing is inserted.
    pub fn insert(&mut self, request: &mut Request, forward: Fence) -> Result<InsertEnd, Broken> {
        self.insert_first(request, usize::MAX, forward)
    }

    /// As [`Core::insert`], for a request that has computed only its first `tokens` tokens: further
    /// tokens of its prompt have slots, but no KV yet.
    ///
    /// # Errors
    /// The request is broken: nothing is inserted.
    pub fn insert_first(
        &mut self,
        request: &mut Request,
        tokens: usize,
        forward: Fence,
    ) -> Result<InsertEnd, Broken> {
        self.newest = self.newest.max(forward);
        self.check(request)?;
        let per_page = self.page_tokens.get() as usize;
        let computed = request.row.tokens().min(tokens);
        let computed = request.prompt.pages().min(computed / per_page);
        let computed = match self.awaits_tails(request) {
            true => 0,
            false => computed,
        };
        // Pages of the tree have been computed.
        let pages = computed.max(request.row.shared_pages());
        let (root, own_from) = (request.prompt.root(), request.row.shared_pages());
        let (words, keys) = request.prompt.words_and_keys(&self.vocabulary, pages);
        let inserted = self.tree.insert(&Offer {
            root,
            words,
            keys,
            pages: &request.row.pages()[..pages],
            own_from,
            counted: request.counted,
            priority: request.priority,
        });
        if !planted!(UntouchedDuplicates) {
            self.touched(inserted.duplicates.page_numbers(), forward);
        }
        self.free_l1(&inserted.duplicates);
        request.row.hand_over(own_from, &inserted.runs);
        request.counted = request.counted.max(inserted.pages);
        let taken = inserted
            .runs
            .pages()
            .saturating_sub(inserted.duplicates.pages());
        self.stats.inserted += u64::from(taken);
        self.stats.duplicates += u64::from(inserted.duplicates.pages());
        for node in &inserted.taken {
            self.emit_stored(TierName::L1, *node);
        }
        let tails = self.give_tails(request, inserted.pages.min(computed));
        self.inserted(request.id, inserted.end, &inserted.taken, forward, tails);
        if let Some(end) = inserted.end
            && request.row.shared_pages() == inserted.pages
        {
            self.move_lock(request, end);
        }
        Ok(InsertEnd {
            pages: request.row.shared_pages(),
            duplicates: inserted.duplicates.pages() as usize,
        })
    }

    /// Replaces the request's lock with a lock on the path to `end`.
    fn move_lock(&mut self, request: &mut Request, end: NodeId) {
        if request.lock.as_ref().map(Lock::node) == Some(end) {
            return;
        }
        let lock = self.tree.lock(end, Hold::L1);
        if let Some(before) = std::mem::replace(&mut request.lock, lock) {
            self.tree.unlock(before);
        }
    }

    /// Orders the copy to L2 and the write to L3 of a path whose forwards have ended, as required
    /// by the policies. A path that has no room, or waits behind a failed copy, is remembered.
    pub(super) fn copy_down(&mut self, end: NodeId) {
        let waits = [self.back_up_path(end), self.put_path(end)];
        match waits.into_iter().flatten().next() {
            None => {}
            Some(Wait::Attempt) => self.refuse(end),
            Some(Wait::Until(due)) => self.pause(due, end),
        }
    }

    /// Orders the copies to L2 that the write policy requires, from the root down. If L2 has no
    /// room for a node, that node and all nodes below it stay in L1 only.
    fn back_up_path(&mut self, end: NodeId) -> Option<Wait> {
        let hits = match self.config.write_policy {
            WritePolicy::WriteThrough => 0,
            WritePolicy::WriteThroughSelective => self.config.selective_hits,
            WritePolicy::WriteBack => return None,
        };
        if self.l2.pages() == 0 {
            return None;
        }
        let wanting = self.tree.wanting_backup(end, hits, self.progress);
        for node in wanting.nodes {
            if self.start_backup(node, false).is_none() {
                break;
            }
        }
        wanting.wait
    }

    /// Orders the writes to L3 that the policy requires, for nodes of the path that are in L2 and
    /// have not been queued.
    fn put_path(&mut self, end: NodeId) -> Option<Wait> {
        let hits = match self.config.l3_write {
            L3Write::OnBackup => 0,
            L3Write::Selective => self.config.selective_hits,
            L3Write::Late | L3Write::Never => return None,
        };
        let wanting = self.tree.wanting_put_path(end, hits, self.progress);
        for node in wanting.nodes {
            self.start_put(node);
        }
        wanting.wait
    }

    /// Ends a request. With `keep`, its computed pages are inserted first, unless the request is
    /// broken or is behind a load in flight. All other pages are freed. No forward after `forward`
    /// may use its pages.
    pub fn finish(&mut self, mut request: Request, keep: bool, forward: Fence) -> InsertEnd {
        // A broken request keeps no pages. The request ends here, so the error needs no report.
        let inserted = keep.then(|| self.insert(&mut request, forward).ok());
        let _prompt = self.end(request, forward);
        self.copy_down_refused();
        inserted.flatten().unwrap_or_default()
    }

    /// Ends a request without keeping pages that it has not inserted, and starts it again on the
    /// cached part of the first `tokens` tokens of its prompt. For a request that is broken, or
    /// whose forward has failed. `tokens` must not include the output of a failed forward or
    /// anything after it. No forward after `forward` may use the pages that the request had.
    pub fn restart(&mut self, request: Request, tokens: usize, forward: Fence) -> Request {
        let priority = request.priority;
        let mut prompt = self.end(request, forward);
        prompt.truncate(tokens);
        self.start(prompt, priority)
    }

    fn end(&mut self, request: Request, forward: Fence) -> Prompt {
        self.newest = self.newest.max(forward);
        let first = match planted!(UntouchedSharedPages) {
            true => request.row.shared_pages(),
            false => 0,
        };
        self.touched(request.row.pages()[first..].iter().copied(), forward);
        for lock in [request.lock, request.l2_lock].into_iter().flatten() {
            self.tree.unlock(lock);
        }
        if let Some(tails) = request.tails {
            self.end_tails(*tails, forward);
        }
        let own = request.row.into_own_pages();
        self.free_l1(&own);
        self.leave_pending(request.id);
        self.free_lost();
        request.prompt
    }
}
