//! The windows and states of a request, from its start to its end.
//!
//! ```text
//!  start      the longest prefix that L1 can continue; a longer one of L1 and L2 is wished
//!  load_back  the wished prefix is loaded, or given up
//!  extend     the states get their own blocks
//!  prepare    before each forward: window pages; the state of the start is copied to the own block
//!  passed     after each forward: a state at a border is copied; window pages behind are freed
//!  insert     window pages and copied states are given to the pools, pending as pages of the tree
//! ```
//!
//! Invariant: a request that depends on a page whose forward or load has not ended holds it, so a
//! failure breaks the request; its inserts name such pages, so the failure reaches these too.

use super::flight::{Pending, PendingTails, TailIds};
use super::order::TailCopy;
use super::request::Request;
use super::side::{OfPool, RequestTails, State, Window, WindowPage, Wish};
use super::{Core, ExtendError, Fence, LoadBack, NoRoom};
use crate::config::TailKind;
use crate::planted::planted;
use crate::prompt::RootKey;
use crate::tails::{Hold as TailHold, longest};
use crate::tree::{Hold, LoadId, Matched, NodeId};
use larder_format::PageKey;

/// Number of copied states that a request has before it gives them to the pools. The older ones are
/// freed.
const KEPT_MAX: usize = 2;

impl Core {
    /// The longest prefix of this chain that all tail pools can continue.
    pub(super) fn longest_tail(&self, keys: &[PageKey], in_l1: bool) -> usize {
        let trailing: Vec<usize> = self.tails.iter().map(|of| of.pool.trailing()).collect();
        longest(keys.len(), &trailing, |pool, page| {
            self.tail_key(pool, keys, page, in_l1).is_some()
        })
    }

    /// The key under which a pool has a page of a chain.
    fn tail_key(&self, of: usize, keys: &[PageKey], page: usize, in_l1: bool) -> Option<PageKey> {
        let tail = &self.tails[of];
        let has = |key: &&PageKey| tail.pool.has(key, in_l1);
        let key = keys.get(page).filter(has).copied();
        let is_state = matches!(tail.kind, TailKind::State { .. });
        if key.is_none() && is_state && planted!(StateOfAnotherBorder) {
            return keys.get(page.checked_sub(1)?).filter(has).copied();
        }
        key
    }

    /// Holds the pages that continue a chain, by pool.
    fn hold_tails(&mut self, keys: &[PageKey], in_l1: bool) -> Vec<Vec<TailHold>> {
        let mut all = Vec::new();
        for of in 0..self.tails.len() {
            let first = keys.len().saturating_sub(self.tails[of].pool.trailing());
            let mut holds = Vec::new();
            for page in first..keys.len() {
                let key = self.tail_key(of, keys, page, in_l1);
                let pool = &mut self.tails[of].pool;
                let id = key.and_then(|key| pool.find(&key));
                holds.extend(id.map(|id| pool.hold(id)));
            }
            all.push(holds);
        }
        all
    }

    fn release_tails(&mut self, holds: Vec<Vec<TailHold>>) {
        for (tail, holds) in self.tails.iter_mut().zip(holds) {
            for hold in holds {
                tail.pool.release(hold);
            }
        }
    }

    fn starting(&self, pages: usize, holds: Vec<Vec<TailHold>>) -> Vec<OfPool> {
        let kinds = self.tails.iter().map(|tail| tail.kind).zip(holds);
        kinds
            .map(|(kind, holds)| OfPool::starting(kind, pages, holds))
            .collect()
    }

    /// The loads that fill held pages.
    fn tail_loads(&self, tails: &RequestTails) -> Vec<LoadId> {
        let loads = tails.holds();
        loads
            .filter_map(|(pool, hold)| self.tails[pool].pool.load_of(hold))
            .collect()
    }

    /// The cached part of a prompt that can be continued: the row has `l1`, and `l2_pages` more can
    /// be had by a load, up to `end`. `l1_end` holds all pages of L1 up to there.
    pub(super) fn match_tails(
        &mut self,
        root: RootKey,
        words: &[u32],
    ) -> (Matched, Option<Box<RequestTails>>) {
        let per_page = self.page_tokens.get() as usize;
        let all = self.tree.match_prefix(root, words);
        let keys = all
            .end
            .map_or_else(Vec::new, |end| self.tree.path_keys(end));
        let in_l1 = self.longest_tail(&keys[..all.l1.pages() as usize], true);
        let longest = self.longest_tail(&keys, false);
        let mut matched = self.tree.match_prefix(root, &words[..in_l1 * per_page]);
        let holds = self.hold_tails(&keys[..in_l1], true);
        let mut tails = RequestTails {
            first: in_l1,
            computed: in_l1 * per_page,
            wish: None,
            pools: self.starting(in_l1, holds),
            retired: Vec::new(),
            has_begun: false,
        };
        if longest > in_l1 {
            let wished = self.tree.match_prefix(root, &words[..longest * per_page]);
            tails.wish = Some(Wish {
                pages: longest,
                holds: self.hold_tails(&keys[..longest], false),
            });
            matched.l1_end = wished.l1_end;
            matched.end = wished.end;
            matched.l2_pages = longest - in_l1;
        }
        matched.loads.extend(self.tail_loads(&tails));
        (matched, Some(Box::new(tails)))
    }

    /// As [`Core::load_back`], with tail pools: the wished prefix is loaded, or given up.
    pub(super) fn try_load_tails(
        &mut self,
        request: &mut Request,
        end: NodeId,
        pages_max: usize,
    ) -> LoadBack {
        let Some(wish) = request.tails.as_mut().and_then(|tails| tails.wish.take()) else {
            return LoadBack::Nothing;
        };
        let result = self.load_wish(request, &wish, end, pages_max);
        match result {
            Ok(loaded) => {
                self.start_on_wish(request, wish, end);
                loaded
            }
            Err(declined) => {
                self.give_up_wish(request, wish);
                declined
            }
        }
    }

    /// The request stays with the prefix of L1.
    fn give_up_wish(&mut self, request: &mut Request, wish: Wish) {
        self.release_tails(wish.holds);
        let per_page = self.page_tokens.get() as usize;
        let words = &request.prompt.words()[..request.row.shared_pages() * per_page];
        let end = self.tree.match_prefix(request.prompt.root(), words).l1_end;
        let lock = end.and_then(|end| self.tree.lock(end, Hold::L1));
        if let Some(before) = std::mem::replace(&mut request.lock, lock) {
            self.tree.unlock(before);
        }
    }

    /// Orders the load of a wished prefix. `Err`: it is declined.
    fn load_wish(
        &mut self,
        request: &Request,
        wish: &Wish,
        end: NodeId,
        pages_max: usize,
    ) -> Result<LoadBack, LoadBack> {
        let nodes = self.tree.wanting_load(end);
        let keys = nodes.iter().filter_map(|node| self.tree.keys(*node));
        let pages: usize = keys.map(<[_]>::len).sum();
        let gained = wish.pages - request.row.shared_pages();
        let mut of_l2 = TailIds::new();
        for (pool, holds) in wish.holds.iter().enumerate() {
            let absent = holds.iter().map(TailHold::id);
            let absent = absent.filter(|id| !self.tails[pool].pool.is_in_l1(*id));
            of_l2.extend(absent.map(|id| (pool, id)));
        }
        let is_load = pages > 0 || !of_l2.is_empty();
        let has_begun = request.tails.as_ref().is_none_or(|tails| tails.has_begun);
        if has_begun || !request.row.own_pages().is_empty() {
            return Err(LoadBack::Nothing);
        }
        if gained < self.config.pages_of(self.config.load_threshold_tokens) {
            return Err(LoadBack::BelowThreshold);
        }
        if pages > pages_max || is_load && self.loads >= self.config.loads_max as usize {
            return Err(LoadBack::OverQuota);
        }
        if !is_load {
            return Ok(LoadBack::Nothing);
        }
        let Some(l1) = self.take_l1(pages) else {
            return Err(LoadBack::NoRoom);
        };
        let mut into = Vec::new();
        for (pool, id) in &of_l2 {
            let page = self.tails[*pool].pool.take_l1();
            into.extend(page.map(|page| (*pool, *id, page)));
        }
        if into.len() < of_l2.len() {
            for (pool, _, page) in into {
                self.tails[pool].pool.free_l1(page);
            }
            self.free_l1(&l1);
            return Err(LoadBack::NoRoom);
        }
        let numbers: Vec<u32> = l1.page_numbers().collect();
        let load = self.start_load(end, &nodes, l1, into);
        self.take_over(&numbers, request.prompt.tenant(), true);
        let load = load.ok_or(LoadBack::Nothing)?;
        Ok(LoadBack::Started(load, gained))
    }

    /// The request starts from its wished prefix: all its pages are in L1 or being loaded.
    fn start_on_wish(&mut self, request: &mut Request, wish: Wish, end: NodeId) {
        let per_page = self.page_tokens.get() as usize;
        let words = &request.prompt.words()[..wish.pages * per_page];
        let matched = self.tree.match_prefix(request.prompt.root(), words);
        let lock = self.tree.lock(end, Hold::L1);
        if let Some(before) = std::mem::replace(&mut request.lock, lock) {
            self.tree.unlock(before);
        }
        let mut row = self.row();
        row.share(&matched.l1);
        request.row = row;
        request.loads = matched.loads;
        // A hold of the page of L2 becomes one of that of L1.
        let mut holds = Vec::new();
        for (tail, wished) in self.tails.iter_mut().zip(wish.holds) {
            let mut of_pool = Vec::new();
            for hold in wished {
                of_pool.push(tail.pool.hold(hold.id()));
                tail.pool.release(hold);
            }
            holds.push(of_pool);
        }
        let pools = self.starting(wish.pages, holds);
        if let Some(tails) = &mut request.tails {
            let former = std::mem::replace(&mut tails.pools, pools);
            tails.first = wish.pages;
            tails.computed = wish.pages * per_page;
            for (pool, of) in former.into_iter().enumerate() {
                for hold in of.into_parts().0 {
                    retire(&mut tails.retired, pool, hold);
                }
            }
        }
        self.release_settled(request);
        let loads = request.tails.as_ref().map(|tails| self.tail_loads(tails));
        for load in loads.into_iter().flatten() {
            if !request.loads.contains(&load) {
                request.loads.push(load);
            }
        }
    }

    /// Releases the holds that are not needed and whose forwards and loads have ended.
    fn release_settled(&mut self, request: &mut Request) {
        let Some(tails) = &mut request.tails else {
            return;
        };
        for (pool, hold) in std::mem::take(&mut tails.retired) {
            let of = &mut self.tails[pool];
            if of.pool.is_settled(&hold) && !of.pool.is_lost(&hold) {
                touch(&mut of.touched, hold.page(), self.newest);
                of.pool.release(hold);
            } else {
                tails.retired.push((pool, hold));
            }
        }
    }

    /// The prefix of a request changes no more, and its states get their own blocks.
    ///
    /// # Errors
    /// A pool has no room for a state.
    pub(super) fn begin_tails(&mut self, request: &mut Request) -> Result<(), ExtendError> {
        let Some(tails) = request.tails.as_mut().filter(|tails| !tails.has_begun) else {
            return Ok(());
        };
        let wish = tails.wish.take();
        if let Some(wish) = wish {
            self.give_up_wish(request, wish);
        }
        if let Some(lock) = request.l2_lock.take() {
            self.tree.unlock(lock);
            request.l2_pages = 0;
        }
        let Some(tails) = request.tails.as_mut() else {
            return Ok(());
        };
        for (at, of) in tails.pools.iter_mut().enumerate() {
            let OfPool::State(State { own, start, .. }) = of else {
                continue;
            };
            if own.is_some() {
                continue;
            }
            let block = self.tails[at].pool.take_l1();
            let Some(block) = block else {
                return Err(self.no_tail_room(1));
            };
            *own = Some(block);
            if start.is_none() {
                self.tails_unclean.push((at, block));
            }
        }
        tails.has_begun = true;
        Ok(())
    }

    fn no_tail_room(&self, short: usize) -> ExtendError {
        let pending = self.tail_backups_out();
        NoRoom { short, pending }.into()
    }

    /// Gives a request the window pages for its first `tokens` tokens, before the forward that
    /// computes them. Returns the copies that must be carried out before that forward, and be
    /// reported by [`Core::tails_copied`].
    ///
    /// # Errors
    /// A pool has no room, or the request is broken. Nothing is lost: try again.
    pub fn prepare(
        &mut self,
        request: &mut Request,
        tokens: usize,
    ) -> Result<Vec<TailCopy>, ExtendError> {
        self.check(request)?;
        self.begin_tails(request)?;
        self.release_settled(request);
        let per_page = self.page_tokens.get() as usize;
        let pages = tokens.min(request.row.tokens()).div_ceil(per_page);
        let Some(tails) = request.tails.as_mut() else {
            return Ok(Vec::new());
        };
        for (at, of) in tails.pools.iter_mut().enumerate() {
            let OfPool::Window(window) = of else {
                continue;
            };
            while window.end() < pages {
                let Some(page) = self.tails[at].pool.take_l1() else {
                    let short = pages - window.end();
                    return Err(self.no_tail_room(short));
                };
                window.pages.push_back(WindowPage::Own(page));
                if self.has_tenants {
                    self.tails_unclean.push((at, page));
                }
            }
        }
        let mut copies = Vec::new();
        for (pool, of) in tails.pools.iter_mut().enumerate() {
            let OfPool::State(state) = of else {
                continue;
            };
            let Some(to) = state.own else {
                continue;
            };
            if let Some(hold) = state.start.take() {
                copies.extend(hold.page().map(|from| TailCopy { pool, from, to }));
                retire(&mut tails.retired, pool, hold);
            }
        }
        Ok(copies)
    }

    /// The first `tokens` tokens of a request have been computed by this forward, which has been
    /// reported. Frees window pages behind it. Returns the copies of states at a border that must
    /// be carried out before the next forward, and be reported by [`Core::tails_copied`].
    pub fn passed(&mut self, request: &mut Request, tokens: usize, by: Fence) -> Vec<TailCopy> {
        let per_page = self.page_tokens.get() as usize;
        if self.is_broken(request) || request.tails.is_none() {
            return Vec::new();
        }
        self.newest = self.newest.max(by);
        if let Some(tails) = &mut request.tails {
            tails.computed = tails.computed.max(tokens);
        }
        let border = tokens / per_page;
        let ends_at = tokens - usize::from(planted!(StateCopiedLate) && tokens > 0);
        let copies = match ends_at.is_multiple_of(per_page) {
            true => self.keep_states(request, border),
            false => Vec::new(),
        };
        self.free_behind(request, border);
        self.release_settled(request);
        copies
    }

    /// Takes pages for the states at a border, from all pools or from none.
    fn keep_states(&mut self, request: &mut Request, border: usize) -> Vec<TailCopy> {
        let has_key = border <= request.prompt.pages() && border > 0;
        let Some(tails) = request.tails.as_mut().filter(|_| has_key) else {
            return Vec::new();
        };
        let is_due = |kind: TailKind| match kind {
            TailKind::State { every } => border.is_multiple_of(every.max(1) as usize),
            TailKind::Window { .. } => true,
        };
        if border <= tails.first || !self.tails.iter().all(|tail| is_due(tail.kind)) {
            return Vec::new();
        }
        let mut copies: Vec<TailCopy> = Vec::new();
        for (pool, of) in tails.pools.iter().enumerate() {
            let OfPool::State(state) = of else {
                continue;
            };
            let to = self.tails[pool].pool.take_l1();
            let (Some(from), Some(to), false) = (state.own, to, state.kept.contains_key(&border))
            else {
                self.stats.states_no_room += u64::from(to.is_none());
                to.into_iter()
                    .for_each(|to| self.tails[pool].pool.free_l1(to));
                for copy in copies {
                    self.tails[copy.pool].pool.free_l1(copy.to);
                }
                return Vec::new();
            };
            copies.push(TailCopy { pool, from, to });
        }
        for copy in &copies {
            let of = &mut self.tails[copy.pool];
            if let Some(OfPool::State(state)) = tails.pools.get_mut(copy.pool) {
                state.kept.insert(border, copy.to);
                if state.kept.len() > KEPT_MAX
                    && let Some((_, page)) = state.kept.pop_first()
                {
                    touch(&mut of.touched, Some(page), self.newest);
                    of.pool.free_l1(page);
                }
            }
        }
        copies
    }

    /// Frees the window pages that neither a later position nor the last border needs.
    fn free_behind(&mut self, request: &mut Request, border: usize) {
        let Some(tails) = &mut request.tails else {
            return;
        };
        for (pool, of) in tails.pools.iter_mut().enumerate() {
            let OfPool::Window(window) = of else {
                continue;
            };
            let first = border.saturating_sub(self.tails[pool].pool.trailing());
            while window.first < first {
                let Some(page) = window.pages.pop_front() else {
                    break;
                };
                window.first += 1;
                match page {
                    WindowPage::Own(page) => {
                        let of = &mut self.tails[pool];
                        touch(&mut of.touched, Some(page), self.newest);
                        of.pool.free_l1(page);
                    }
                    WindowPage::Held(hold, _) => retire(&mut tails.retired, pool, hold),
                }
            }
        }
    }

    /// Reports that copies of [`Core::prepare`] or [`Core::passed`] have ended with this forward:
    /// it runs behind them, or is one of them.
    pub fn tails_copied(&mut self, request: &Request, copies: &[TailCopy], forward: Fence) {
        self.newest = self.newest.max(forward);
        for copy in copies {
            let touched = &mut self.tails[copy.pool].touched;
            touch(touched, Some(copy.from), forward);
            touch(touched, Some(copy.to), forward);
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

    /// Whether a page of a tail pool that a request has was lost.
    pub(super) fn has_lost_tails(&self, request: &Request) -> bool {
        let is_lost = |(pool, hold): (usize, &TailHold)| self.tails[pool].pool.is_lost(hold);
        let tails = request.tails.as_ref();
        tails.is_some_and(|tails| tails.holds().any(is_lost))
    }

    /// Whether a load of tail pages for a request is in flight: it may insert nothing.
    pub(super) fn awaits_tails(&self, request: &Request) -> bool {
        request.tails.is_some() && request.loads.iter().any(|load| self.is_loading(*load))
    }

    /// Gives the pools the window pages and states of a request in its first `pages` pages. Returns
    /// their entries, and those on which the request depends.
    pub(super) fn give_tails(
        &mut self,
        request: &mut Request,
        pages: usize,
    ) -> Option<Box<PendingTails>> {
        request.tails.as_ref()?;
        let is_pending = self.newest > self.ended && !planted!(BackupBeforeForward);
        let keys = request.prompt.keys(&self.vocabulary, pages);
        let tails = request.tails.as_mut()?;
        let mut on = TailIds::new();
        for (pool, hold) in tails.holds() {
            if self.tails[pool].pool.is_pending(hold.id()) {
                on.push((pool, hold.id()));
            }
        }
        let mut given = TailIds::new();
        for (at, of) in tails.pools.iter_mut().enumerate() {
            let pool = &mut self.tails[at].pool;
            match of {
                OfPool::Window(Window { first, pages: own }) => {
                    for (key, page) in keys.iter().skip(*first).zip(own) {
                        let WindowPage::Own(number) = *page else {
                            continue;
                        };
                        if let Some(id) = pool.give_l1(*key, number, is_pending) {
                            *page = WindowPage::Held(pool.hold(id), number);
                            given.push((at, id));
                        }
                    }
                }
                OfPool::State(state) => {
                    let behind = state.kept.split_off(&(pages + 1));
                    for (border, page) in std::mem::replace(&mut state.kept, behind) {
                        let key = keys[border - 1];
                        match pool.give_l1(key, page, is_pending) {
                            Some(id) => given.push((at, id)),
                            None => pool.free_l1(page),
                        }
                    }
                }
            }
        }
        Some(Box::new(PendingTails { given, on }))
    }

    /// Releases all pages of a request that ends. No forward after `forward` uses them.
    pub(super) fn end_tails(&mut self, tails: RequestTails, forward: Fence) {
        if let Some(wish) = tails.wish {
            self.release_tails(wish.holds);
        }
        for (pool, hold) in tails.retired {
            touch(&mut self.tails[pool].touched, hold.page(), forward);
            self.tails[pool].pool.release(hold);
        }
        for (pool, of) in tails.pools.into_iter().enumerate() {
            let of_pool = &mut self.tails[pool];
            let (holds, own) = of.into_parts();
            for page in own {
                touch(&mut of_pool.touched, Some(page), forward);
                of_pool.pool.free_l1(page);
            }
            for hold in holds {
                touch(&mut of_pool.touched, hold.page(), forward);
                of_pool.pool.release(hold);
            }
        }
    }

    /// The pages of tail pools that requests got since the last call, and whose bytes are those of
    /// others: a state at the first token, or pages of other tenants.
    pub fn take_unclean_tails(&mut self) -> Vec<(usize, u32)> {
        std::mem::take(&mut self.tails_unclean)
    }
}

fn retire(retired: &mut Vec<(usize, TailHold)>, pool: usize, hold: TailHold) {
    retired.push((pool, hold));
}

/// A page has been used by this forward and earlier ones.
fn touch(touched: &mut [Fence], page: Option<u32>, forward: Fence) {
    let at = page.and_then(|page| touched.get_mut(page as usize));
    if let Some(at) = at {
        *at = forward.max(*at);
    }
}

impl Request {
    /// The window pages of a tail pool that a request has: the number of the first one in the
    /// prompt, and the pages.
    #[must_use]
    pub fn window(&self, pool: usize) -> Option<(usize, Vec<u32>)> {
        match self.tails.as_ref()?.pools.get(pool)? {
            OfPool::Window(window) => {
                let pages = window.pages.iter().map(WindowPage::number);
                Some((window.first, pages.collect()))
            }
            OfPool::State(_) => None,
        }
    }

    /// The page of the window of a tail pool with this number in the prompt, and whether the
    /// request owns it.
    #[must_use]
    pub fn window_page(&self, pool: usize, number: usize) -> Option<(u32, bool)> {
        let OfPool::Window(window) = self.tails.as_ref()?.pools.get(pool)? else {
            return None;
        };
        let page = window.pages.get(number.checked_sub(window.first)?)?;
        Some((page.number(), matches!(page, WindowPage::Own(_))))
    }

    /// Number of states.
    #[must_use]
    pub fn state_pools(&self) -> usize {
        let tails = self.tails.iter().flat_map(|tails| &tails.pools);
        tails.filter(|of| matches!(of, OfPool::State(_))).count()
    }

    /// The block of a state that forwards of a request change.
    #[must_use]
    pub fn state(&self, pool: usize) -> Option<u32> {
        match self.tails.as_ref()?.pools.get(pool)? {
            OfPool::State(state) => state.own,
            OfPool::Window(_) => None,
        }
    }

    /// Whether the state from which a request starts has not been copied to its own block.
    #[must_use]
    pub fn awaits_state(&self) -> bool {
        let tails = self.tails.iter().flat_map(|tails| &tails.pools);
        let mut states = tails.filter_map(|of| match of {
            OfPool::State(state) => Some(state),
            OfPool::Window(_) => None,
        });
        states.any(|state| state.start.is_some() || state.own.is_none())
    }
}
