//! Forwards: submitted, run in order, sometimes failing; and the notifications of their ends to the
//! core.

use std::ops::Range;

use larder_tiers::core::{Broken, ExtendError, Fence, OpId, Order, Request};
use rand::RngExt;

use super::{Flight, Forward, Running, World};

impl World {
    pub(super) fn has_failed_load(&self, request: &Request) -> bool {
        let mut loads = request.row_and_loads().1.iter();
        loads.any(|load| self.failed_loads.contains(&OpId::from(*load)))
    }

    /// Whether a forward that has not run, or a load that has not ended, writes this page.
    pub(super) fn is_unwritten(&self, page: u32) -> bool {
        let writes = |forward: &Forward| forward.writes.iter().any(|(of, _)| *of == page);
        let loads = |flight: &Flight| match &flight.order {
            Order::Load { l1, .. } => l1.page_numbers().any(|of| of == page),
            _ => false,
        };
        self.forwards.iter().any(writes) || self.flights.values().any(loads)
    }

    /// Whether a page is tainted by a failed forward that the core knows of.
    pub(super) fn is_lost(&self, page: u32) -> bool {
        let root = self.taint.get(&page);
        root.is_some_and(|root| self.known_failed.contains(root)) && !self.is_unwritten(page)
    }

    /// Submits the next chunk of a request: slots, a forward that reads the existing pages and
    /// writes the rest, and sometimes an insert.
    pub(super) fn forward(&mut self) {
        let at = self.below(self.running.len().max(1));
        self.forward_of(at);
    }

    pub(super) fn forward_of(&mut self, at: usize) {
        if at >= self.running.len() {
            return;
        }
        if self.core.is_broken(&self.running[at].request) {
            return self.leave_broken(at);
        }
        let wanted = 1 + self.below(8);
        let decoded = self.below(3) as u64;
        let units = self.running[at].request.prompt().words().len();
        let has = self.running[at].request.tokens();
        let more = if has < units {
            wanted.min(units - has)
        } else {
            let running = &mut self.running[at];
            running.tokens.push(decoded);
            let prompt = running.request.prompt_mut();
            self.core.extend_prompt(prompt, [decoded]).unwrap();
            1
        };
        // A truncation leaves slots.
        let computed = has.min(units);
        let slots = (computed + more).saturating_sub(has);
        let running = &mut self.running[at];
        let before = running.request.row_and_loads().0.pages().len();
        if self.core.extend(&mut running.request, slots).is_err() {
            if self.below(3) == 0 {
                self.finish_one(at, false);
            }
            return;
        }
        self.got(at, before);
        for page in self.running[at].request.own_pages() {
            self.inserted.remove(page);
        }
        self.submit(at, computed..computed + more);
        if self.below(3) > 0 {
            self.insert(at);
        }
    }

    /// Finishes or restarts a broken request, its only valid operations.
    pub(super) fn leave_broken(&mut self, at: usize) {
        let fence = Fence(self.fence);
        let request = &mut self.running[at].request;
        assert_eq!(
            self.core.extend(request, 1),
            Err(ExtendError::Broken(Broken))
        );
        assert_eq!(self.core.insert(request, fence), Err(Broken));
        if self.below(2) == 0 {
            return self.finish_one(at, self.fence.is_multiple_of(2));
        }
        let Running {
            request,
            scope,
            mut tokens,
            ..
        } = self.running.swap_remove(at);
        tokens.truncate(2 + self.below(tokens.len() - 1));
        let request = self.core.restart(request, tokens.len(), fence);
        self.run_request(request, scope, tokens);
    }

    /// Submits the forward for these tokens of a request.
    pub(super) fn submit(&mut self, at: usize, tokens: Range<usize>) {
        self.fence += 1;
        let running = &self.running[at];
        let keys = self.keys(&running.scope, &running.tokens);
        let (row, loads) = running.request.row_and_loads();
        let read_to = tokens.start / self.page_tokens;
        let whole = row.pages().iter().copied().zip(keys.iter().copied());
        let reads = whole.take(read_to).chain(running.copied).collect();
        let full = tokens.end / self.page_tokens;
        let pages = row.pages().iter().enumerate();
        let pages = pages.take(tokens.end.div_ceil(self.page_tokens));
        let pages = pages.skip(read_to);
        // A partly filled page has no content yet.
        let writes = pages
            .map(|(at, page)| (*page, keys.get(at).copied().filter(|_| at < full)))
            .collect();
        let is_begun = !tokens.start.is_multiple_of(self.page_tokens);
        self.forwards.push(Forward {
            fence: self.fence,
            since: running.since_insert.clone(),
            goes_on: row.pages().get(read_to).copied().filter(|_| is_begun),
            reads,
            writes,
            loads: loads.iter().map(|load| OpId::from(*load)).collect(),
        });
        self.running[at].copied = None;
        self.running[at].forwards = self.fence;
        self.running[at].since_insert.push(self.fence);
    }

    pub(super) fn insert(&mut self, at: usize) {
        let fence = self.running[at].forwards;
        // Evictions for its slots precede its next hit count.
        self.take_events();
        let running = &mut self.running[at];
        if self.known_failed.contains(&fence) {
            return;
        }
        let own = running.request.own_pages().to_vec();
        let Ok(inserted) = self.core.insert(&mut running.request, Fence(fence)) else {
            return;
        };
        self.progress += 1;
        running.inserted_with.push(fence);
        let id = running.request.id();
        self.inserts.entry(fence).or_default().insert(id);
        let since = std::mem::take(&mut running.since_insert);
        self.speaks.extend(since.iter().map(|of| (*of, fence)));
        let row = running.request.row_and_loads().0;
        let shared = &row.pages()[..row.shared_pages()];
        for page in own {
            if shared.contains(&page) {
                self.inserted.insert(page, (fence, id));
            }
            // From now on this ticket covers the forwards that have filled the page.
            if let Some(root) = self.taint.get_mut(&page)
                && since.contains(root)
            {
                *root = fence;
            }
        }
        self.count_hits(at, inserted.pages);
        // The shared pages of the row are the tree's pages, which a match finds.
        let row = self.running[at].request.row_and_loads().0;
        assert!(row.shared_pages() >= inserted.pages);
    }

    pub(super) fn count_hits(&mut self, at: usize, pages: usize) {
        let keys = self.keys(&self.running[at].scope, &self.running[at].tokens);
        let from = self.running[at].counted;
        for key in keys.iter().take(pages).skip(from) {
            *self.counts.entry(*key).or_insert(0) += 1;
        }
        self.running[at].counted = from.max(pages);
    }

    /// Runs the oldest forward, if its prerequisite has ended.
    pub(super) fn run_forward(&mut self) {
        let Some(forward) = self.forwards.first() else {
            return;
        };
        if forward
            .loads
            .iter()
            .any(|load| self.loads_out.contains(load))
        {
            return;
        }
        let forward = self.forwards.remove(0);
        let is_unloaded = forward
            .loads
            .iter()
            .any(|load| self.failed_loads.contains(load));
        let roots = forward.reads.iter();
        let mut root = roots
            .filter_map(|(page, _)| self.taint.get(page))
            .min()
            .copied();
        let mut is_spoiled = is_unloaded;
        for (page, key) in &forward.reads {
            let is_right = self.l1[*page as usize] == Some(*key);
            assert!(
                is_right || is_unloaded || root.is_some(),
                "a forward reads wrong bytes"
            );
            is_spoiled |= !is_right;
        }
        let fails = self.forward_faults > 0.0 && self.dice.random_bool(self.forward_faults);
        let fails = fails
            || forward
                .since
                .iter()
                .any(|fence| self.failed.contains(fence));
        if fails {
            self.failed.insert(forward.fence);
            let speaks = self.speaks.get(&forward.fence).copied();
            root = Some(speaks.unwrap_or(forward.fence));
        }
        for (page, content) in forward.writes {
            let before = self.taint.get(&page).copied();
            let before = before.filter(|_| forward.goes_on == Some(page));
            let root = root.or(before);
            let is_left_out = fails && self.below(2) == 0;
            let is_written = !(is_spoiled || is_left_out || before.is_some());
            self.l1[page as usize] = content.filter(|_| is_written);
            self.taint.remove(&page);
            self.taint.extend(root.map(|root| (page, root)));
        }
        self.fence_passed = forward.fence;
        self.ran.insert(forward.fence, !fails);
    }

    /// Notifies the core of the end of a forward that has run.
    pub(super) fn report_forward(&mut self) {
        if self.ran.is_empty() {
            return;
        }
        // Successful ends are reported in order, failures in any order.
        let at = self.below(self.ran.len());
        let (&picked, &is_good) = self.ran.iter().nth(at).unwrap();
        let first = self
            .ran
            .first_key_value()
            .map(|(fence, good)| (*fence, *good));
        let (fence, is_good) = first.filter(|_| is_good).unwrap_or((picked, is_good));
        if !is_good {
            self.core.forward_failed(Fence(fence));
            self.known_failed.insert(fence);
            self.expect_broken(fence);
        }
        self.ran.remove(&fence);
        let running = self.forwards.iter().map(|forward| forward.fence);
        let open = running.chain(self.ran.keys().copied()).min();
        let until = open.map_or(self.fence, |open| open - 1);
        self.core.forwards_ended(Fence(until));
    }

    /// Marks the requests that cannot continue, now that the core knows of this failure.
    pub(super) fn expect_broken(&mut self, fence: u64) {
        for at in 0..self.running.len() {
            let running = &self.running[at];
            let row = running.request.row_and_loads().0;
            let shared = &row.pages()[..row.shared_pages()];
            // Pages inserted after a failed forward of the same request are lost too.
            let is_of_it = |page: &u32| {
                let inserted = self.inserted.get(page);
                inserted.is_some_and(|(with, by)| {
                    *with >= fence && self.inserts.get(&fence).is_some_and(|of| of.contains(by))
                })
            };
            let must = running.inserted_with.contains(&fence)
                || shared
                    .iter()
                    .any(|page| is_of_it(page) || self.is_lost(*page));
            let may = must || shared.iter().any(|page| self.taint.contains_key(page));
            let running = &mut self.running[at];
            running.must_break |= must;
            running.may_break |= may;
        }
    }
}
