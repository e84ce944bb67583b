//! The windows and states of a truncation.
//!
//! A state cannot be taken back, so the kept tokens end at a border whose state is kept, by the
//! request or by the pool, and whose window is there. Tokens that were not computed are always
//! taken back. Without states, the kept tokens may also end in a window page that the request owns.

use super::side::{OfPool, RequestTails, State, Window, WindowPage};
use super::{Core, Request};
use larder_format::PageKey;

impl Core {
    /// Whether a request can keep so many units. `Err`: the most units below that it can keep.
    pub(super) fn check_tails_cut(
        &mut self,
        request: &mut Request,
        units: usize,
    ) -> Result<(), usize> {
        let per_page = self.page_tokens.get() as usize;
        let pages = units / per_page;
        let is_computed = |request: &Request| {
            let tails = request.tails.as_ref();
            tails.is_some_and(|tails| units < tails.computed)
        };
        if !is_computed(request) {
            return Ok(());
        }
        let keys = request.prompt.keys(&self.vocabulary, pages).to_vec();
        let is_border = units.is_multiple_of(per_page);
        if self.can_cut(request, &keys, is_border) {
            return Ok(());
        }
        let below = (1..=pages).rev();
        let mut below = below.filter(|pages| self.can_cut(request, &keys[..*pages], true));
        Err(below.next().unwrap_or(0) * per_page)
    }

    /// Whether a request can keep a chain; and, unless `is_border`, units of the page behind it.
    fn can_cut(&self, request: &Request, keys: &[PageKey], is_border: bool) -> bool {
        let Some(tails) = &request.tails else {
            return true;
        };
        let pages = keys.len();
        let mut pools = tails.pools.iter().zip(&self.tails);
        pools.all(|(of, tail)| match of {
            OfPool::State(state) => {
                let is_kept = |key| state.kept.contains_key(&pages) || tail.pool.is_readable(key);
                is_border && keys.last().is_some_and(is_kept)
            }
            OfPool::Window(window) => {
                let first = pages.saturating_sub(tail.pool.trailing());
                let behind = first..pages.min(window.first);
                let is_own = |page: &WindowPage| matches!(page, WindowPage::Own(_));
                let last = pages.checked_sub(window.first);
                let last = last.and_then(|at| window.pages.get(at));
                (is_border || last.is_some_and(is_own))
                    && pages <= window.end()
                    && keys[behind].iter().all(|key| tail.pool.is_readable(key))
            }
        })
    }

    /// The request keeps so many units, which [`Core::check_tails_cut`] allows.
    pub(super) fn cut_tails(&mut self, request: &mut Request, units: usize) {
        let per_page = self.page_tokens.get() as usize;
        let (pages, is_border) = (units / per_page, units.is_multiple_of(per_page));
        let is_computed = |of: &&mut Box<RequestTails>| units < of.computed;
        let Some(tails) = request.tails.as_mut().filter(is_computed) else {
            return;
        };
        let keys = request.prompt.keys(&self.vocabulary, pages);
        tails.computed = units;
        tails.first = tails.first.min(pages);
        for (number, of) in tails.pools.iter_mut().enumerate() {
            match of {
                OfPool::State(state) => {
                    let former = state.own;
                    let key = keys.last().copied();
                    self.state_at(number, state, pages, key);
                    if state.own != former {
                        self.free_tail(number, former);
                    }
                    let behind = state.kept.split_off(&pages);
                    for page in behind.into_values() {
                        self.free_tail(number, Some(page));
                    }
                }
                OfPool::Window(window) => {
                    let last = pages + usize::from(!is_border);
                    while window.end() > last {
                        match window.pages.pop_back() {
                            Some(WindowPage::Held(hold, _)) => tails.retired.push((number, hold)),
                            Some(WindowPage::Own(page)) => self.free_tail(number, Some(page)),
                            None => break,
                        }
                    }
                    self.window_behind(number, window, keys);
                }
            }
        }
    }

    /// The state at a border becomes that of the request: its own copy, or that of the pool, which
    /// is copied before the next forward.
    fn state_at(&mut self, number: usize, state: &mut State, pages: usize, key: Option<PageKey>) {
        if let Some(start) = state.start.take() {
            self.tails[number].pool.release(start);
        }
        if let Some(kept) = state.kept.remove(&pages) {
            state.own = Some(kept);
            return;
        }
        let pool = &mut self.tails[number].pool;
        let id = key.and_then(|key| pool.find(&key));
        state.start = id.map(|id| pool.hold(id));
    }

    /// Holds the window pages before the first page that a request has.
    fn window_behind(&mut self, number: usize, window: &mut Window, keys: &[PageKey]) {
        let pool = &mut self.tails[number].pool;
        let first = keys.len().saturating_sub(pool.trailing());
        if window.pages.is_empty() {
            window.first = keys.len();
        }
        while window.first > first {
            let Some(id) = pool.find(&keys[window.first - 1]) else {
                return;
            };
            let hold = pool.hold(id);
            let page = hold.page().unwrap_or_default();
            window.pages.push_front(WindowPage::Held(hold, page));
            window.first -= 1;
        }
    }

    fn free_tail(&mut self, number: usize, page: Option<u32>) {
        let newest = self.newest;
        let tail = &mut self.tails[number];
        if let Some(page) = page {
            if let Some(touched) = tail.touched.get_mut(page as usize) {
                *touched = newest.max(*touched);
            }
            tail.pool.free_l1(page);
        }
    }
}
