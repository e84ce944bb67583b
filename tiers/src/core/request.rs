//! A request's way: start, load back, extend, insert, finish.
//!
//! A request holds what it was matched with by one lock at a time: the L1 part once it runs on it, the whole match until it has
//! been decided whether the L2 part is loaded. Its row names pages of the tree and pages of its own.
//!
//! Invariant: what a request inserts was computed on pages that were there. Behind a load in flight
//! nothing is inserted, and a request that is broken inserts nothing any more: pages that it holds
//! were lost, or its forward failed.

use super::{Broken, Core, Fence, TierName};
use crate::config::{L3Write, WritePolicy};
use crate::pool::Row;
use crate::prompt::Prompt;
use crate::tree::{Hold, LoadId, Lock, NodeId, Offer};

/// Number of a request: each one of a core has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// A running request.
#[derive(Debug)]
#[must_use = "a request that is not finished holds its pages for ever"]
pub struct Request {
    id: RequestId,
    prompt: Prompt,
    row: Row,
    priority: i32,
    /// Holds the L1 part.
    lock: Option<Lock>,
    /// Holds the L2 part behind it while it may still be loaded.
    l2_lock: Option<Lock>,
    l2_pages: usize,
    /// Loads that fill pages of its row.
    loads: Vec<LoadId>,
    /// Pages that have been counted as hits.
    counted: usize,
}

impl Request {
    /// Its number.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.id
    }

    pub(super) fn l1_lock(&self) -> Option<&Lock> {
        self.lock.as_ref()
    }

    /// Its prompt; [`Core::extend_prompt`] makes it longer as it is answered.
    pub fn prompt_mut(&mut self) -> &mut Prompt {
        &mut self.prompt
    }

    /// Its prompt.
    #[must_use]
    pub fn prompt(&self) -> &Prompt {
        &self.prompt
    }

    /// Pages of its prompt that L2 has behind those in its row, while they may be loaded.
    #[must_use]
    pub fn l2_pages(&self) -> usize {
        self.l2_pages
    }

    /// How many tokens of it have a slot.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.row.tokens()
    }

    /// Its pages of L1, and the loads that have to end before all of those are readable: one cannot be had without the other.
    #[must_use]
    pub fn pages(&self) -> (&Row, &[LoadId]) {
        (&self.row, &self.loads)
    }

    /// The pages of its row that are its own.
    #[must_use]
    pub fn own_pages(&self) -> &[u32] {
        self.row.own_pages()
    }

    /// Locks that it holds, by kind.
    #[must_use]
    pub fn locks(&self) -> (u32, u32) {
        (
            u32::from(self.lock.is_some()),
            u32::from(self.l2_lock.is_some()),
        )
    }
}

/// What became of loading a request's L2 part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadBack {
    /// It is on its way: so many pages, readable when the load has ended.
    Started(LoadId, usize),
    /// There is nothing to load.
    Nothing,
    /// Too few tokens to be worth it; the request computes them.
    BelowThreshold,
    /// As many loads are in flight as may be, or more pages than the caller allows; the request computes them.
    OverQuota,
    /// L1 has no room; the request computes them as far as there is.
    NoRoom,
}

/// L1 has too few pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{short} pages of L1 are missing, {pending} of them will be free when backups have ended; wait, or take a request back"
)]
pub struct NoRoom {
    /// Pages missing.
    pub short: usize,
    /// Pages that backups under way will free.
    pub pending: usize,
}

/// Why a request gets no further slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExtendError {
    /// L1 has too few pages.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// Pages that it stands on were lost.
    #[error(transparent)]
    Broken(#[from] Broken),
}

/// What became of an insert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InsertEnd {
    /// Pages of the request, from its first, that are the tree's.
    pub pages: usize,
    /// Pages that it gave back because the tree had those tokens.
    pub duplicates: usize,
}

impl Core {
    /// Begins a request on what L1 has of its prompt, its last token aside, which is always computed. What L2 has behind it is
    /// held until [`Core::load_back`] decides.
    pub fn start(&mut self, prompt: Prompt, priority: i32) -> Request {
        let per_page = self.page_tokens.get() as usize;
        let usable = prompt.words().len().saturating_sub(1) / per_page * per_page;
        let matched = self
            .tree
            .match_prefix(prompt.root(), &prompt.words()[..usable]);
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
            priority,
        }
    }

    /// Decides whether the L2 part of a request is loaded, at most `quota` pages of it or none.
    /// Where it is not, nothing changes but that the request computes those tokens. The load comes
    /// after all forwards up to `after`.
    ///
    /// # Errors
    /// The request is broken.
    pub fn load_back(
        &mut self,
        request: &mut Request,
        quota: usize,
        after: Fence,
    ) -> Result<LoadBack, Broken> {
        self.newest = self.newest.max(after);
        self.check(request)?;
        let Some(l2_lock) = request.l2_lock.take() else {
            return Ok(LoadBack::Nothing);
        };
        request.l2_pages = 0;
        let end = l2_lock.node();
        let result = self.try_load(request, end, quota);
        self.tree.unlock(l2_lock);
        if !matches!(result, LoadBack::Started(..)) {
            self.stats.loads_declined += 1;
        }
        Ok(result)
    }

    fn try_load(&mut self, request: &mut Request, end: NodeId, quota: usize) -> LoadBack {
        let nodes = self.tree.wanting_load(end);
        let pages: usize = nodes
            .iter()
            .filter_map(|node| self.tree.keys(*node))
            .map(<[_]>::len)
            .sum();
        let is_behind_row = self.tree.depth_of_end(end) == Some(request.row.shared_pages() + pages);
        if pages == 0 || !is_behind_row || !request.row.own_pages().is_empty() {
            // Another request has brought it to L1 meanwhile, or this one computes it already: a new match would tell.
            return LoadBack::Nothing;
        }
        if pages < self.config.pages_of(self.config.load_threshold_tokens) {
            return LoadBack::BelowThreshold;
        }
        if pages > quota || self.loads >= self.config.loads_max as usize {
            return LoadBack::OverQuota;
        }
        let Some(l1) = self.take_l1(pages) else {
            return LoadBack::NoRoom;
        };
        let lock = self.tree.lock(end, Hold::L1);
        let Some(load) = self.start_load(&nodes, l1.clone()) else {
            self.free_l1(&l1);
            return LoadBack::Nothing;
        };
        if let Some(before) = std::mem::replace(&mut request.lock, lock) {
            self.tree.unlock(before);
        }
        request.row.share(&l1);
        request.loads.push(load);
        LoadBack::Started(load, pages)
    }

    /// Gives a request slots for `tokens` further tokens, making room where there is too little.
    ///
    /// # Errors
    /// There is no room: nothing changes but what was evicted on the way. Or the request is broken.
    pub fn extend(&mut self, request: &mut Request, tokens: usize) -> Result<(), ExtendError> {
        self.check(request)?;
        let needed = request.row.pages_short(tokens);
        let free = self.l1.free_pages() as usize;
        let mut pending = 0;
        if free < needed {
            pending = self.evict(needed - free).pending;
        }
        let extended = request.row.extend(&mut self.l1, tokens);
        extended.ok_or_else(|| {
            let short = needed.saturating_sub(self.l1.free_pages() as usize);
            NoRoom { short, pending }.into()
        })
    }

    /// Whether a load is not over yet.
    #[must_use]
    pub fn is_loading(&self, load: LoadId) -> bool {
        self.flights.contains_key(&load.into())
    }

    /// Hands the whole pages that a request has computed over to the tree, its prompt being as long
    /// as its answer so far. What the tree has already is given back, and the row names the tree's
    /// pages from then on; the partly filled page stays the request's.
    ///
    /// `forward` is the forward that writes these pages, or the last of several. Requests may match
    /// them at once. They are copied to L2 when [`Core::forwards_ended`] has reached it;
    /// [`Core::forward_failed`] takes them out of the tree.
    ///
    /// # Errors
    /// The request is broken: nothing is inserted.
    pub fn insert(&mut self, request: &mut Request, forward: Fence) -> Result<InsertEnd, Broken> {
        self.newest = self.newest.max(forward);
        self.check(request)?;
        let per_page = self.page_tokens.get() as usize;
        let pages = request.prompt.pages().min(request.row.tokens() / per_page);
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
            self.tell_stored(TierName::L1, *node);
        }
        self.inserted(request.id, inserted.end, &inserted.taken, forward);
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

    /// The request holds the path to `end` instead of what it held.
    fn move_lock(&mut self, request: &mut Request, end: NodeId) {
        if request.lock.as_ref().map(Lock::node) == Some(end) {
            return;
        }
        let lock = self.tree.lock(end, Hold::L1);
        if let Some(before) = std::mem::replace(&mut request.lock, lock) {
            self.tree.unlock(before);
        }
    }

    /// Has a path whose forwards have ended copied to L2 and written to L3, as the policies ask
    /// for.
    pub(super) fn copy_down(&mut self, end: NodeId) {
        self.back_up_path(end);
        self.put_path(end);
    }

    /// Has what the write policy asks for copied to L2, from the root down; what L2 has no room for stays in L1 alone, and so
    /// does all below it.
    fn back_up_path(&mut self, end: NodeId) {
        let hits = match self.config.write_policy {
            WritePolicy::WriteThrough => 0,
            WritePolicy::WriteThroughSelective => self.config.selective_hits,
            WritePolicy::WriteBack => return,
        };
        for node in self.tree.wanting_backup(end, hits) {
            if self.start_backup(node, false).is_none() {
                break;
            }
        }
    }

    /// Has what L2 has of the path written to L3, as far as the policy asks and L3 has not been given it.
    fn put_path(&mut self, end: NodeId) {
        let hits = match self.config.l3_write {
            L3Write::OnBackup => 0,
            L3Write::Selective => self.config.selective_hits,
            L3Write::OnEviction | L3Write::Never => return,
        };
        for node in self.tree.wanting_put_path(end, hits) {
            self.start_put(node, false);
        }
    }

    /// Ends a request. With `keep`, what it has computed is inserted first, unless it is broken or
    /// a load in flight lies before it; the rest is given back. No forward after `forward` may use
    /// its pages.
    pub fn finish(&mut self, mut request: Request, keep: bool, forward: Fence) -> InsertEnd {
        // A broken request keeps nothing, and there is nobody left who has to know.
        let inserted = keep.then(|| self.insert(&mut request, forward).ok());
        let _prompt = self.end(request, forward);
        inserted.flatten().unwrap_or_default()
    }

    /// Ends a request without keeping what it has not inserted, and begins it again on what is
    /// cached now of the first `tokens` tokens of its prompt: for one that is broken, or whose
    /// forward has failed. Words of a failed forward, and all after them, are not among those
    /// tokens. No forward after `forward` may use the pages that the request had.
    pub fn restart(&mut self, request: Request, tokens: usize, forward: Fence) -> Request {
        let priority = request.priority;
        let mut prompt = self.end(request, forward);
        prompt.truncate(tokens);
        self.start(prompt, priority)
    }

    fn end(&mut self, request: Request, forward: Fence) -> Prompt {
        self.newest = self.newest.max(forward);
        for lock in [request.lock, request.l2_lock].into_iter().flatten() {
            self.tree.unlock(lock);
        }
        let own = request.row.into_own_pages();
        self.free_l1(&own);
        self.leave_pending(request.id);
        self.free_lost();
        request.prompt
    }
}
