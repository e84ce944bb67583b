//! Prefetches: from L3 to L2, for a waiting request.
//!
//! ```text
//!  asked --exists--> reading batch 0 --> reading batch 1 --> ... --> ended (pages in the tree)
//!    |                  |   closed by the policy or cancelled: no further batch
//!    +---> declined     +--> draining: the batch in flight still owns its pages, then removed
//! ```
//!
//! Invariants: L2 pages are allocated only after L3 has returned its number of pages. A page that a
//! read may still write belongs to the prefetch until that read has ended. The parent node is held
//! in L2 from the first lookup to the end. Arrived pages are held until the request polls, and
//! count towards the L2 share of prefetches until then.
//!
//! With tail pools, L3 answers with the longest prefix that can be continued. The pages of tail
//! pools that it needs are read first: all of them, or the prefetch ends.
//!
//! Faults covered: L3 reports more pages than it has (the batch is cut at the first missing page),
//! fails (no page arrives), or never answers (the policy closes the prefetch; its pages stay
//! reserved, and no other work waits).

use super::flight::{Claim, Prefetch, Stage};
use super::{
    Core, Declined, Declines, OpId, Order, PrefetchId, PrefetchState, Tail, TailAsk, TailLookup,
    TailPage, TierName,
};
use crate::config::PrefetchPolicy;
use crate::planted::planted;
use crate::prompt::Prompt;
use crate::runs::{L2, Runs};
use crate::tree::{Hold, NodeId};
use larder_format::PageKey;

/// Number of consecutive prefetches declined because computing is faster, after which one is read
/// anyway. Only a read shows whether L3 has become faster.
const GIVEN_UP_MAX: u32 = 15;

/// Limits the prefetch attempts of a request: not in every scheduling pass, and not indefinitely.
#[derive(Clone, Copy, Debug, Default)]
pub struct Retries {
    attempts: u32,
    next_pass: u64,
}

impl Retries {
    /// Whether to try in this scheduling pass: the first time at once, later after `retry_passes`.
    /// A request at the head of the queue, or a request whose prefetch lost its parent node
    /// (`is_urgent`), does not have to wait. Counts the attempt.
    pub fn is_due(&mut self, core: &Core, pass: u64, is_urgent: bool) -> bool {
        let config = &core.config().prefetch;
        let is_due = self.attempts < config.attempts_max
            && (self.attempts == 0 || is_urgent || pass >= self.next_pass);
        if is_due {
            self.attempts += 1;
            self.next_pass = pass + u64::from(config.retry_passes);
        }
        is_due
    }
}

impl Core {
    /// Starts to read into L2 the pages that L3 has after the cached part of a prompt, at most as
    /// many as the share of prefetches in L2 has left.
    ///
    /// # Errors
    /// Nothing was started, with the reason.
    pub fn prefetch(&mut self, prompt: &mut Prompt) -> Result<PrefetchId, Declined> {
        prompt.renew(&self.weights);
        let result = self.try_prefetch(prompt);
        if let Err(declined) = result {
            self.count_declined(declined);
        }
        result
    }

    fn try_prefetch(&mut self, prompt: &mut Prompt) -> Result<PrefetchId, Declined> {
        let per_page = self.page_tokens.get() as usize;
        // A prefix is continued with at least one token behind it.
        let end = match self.tails.is_empty() {
            true => prompt.pages(),
            false => self.usable(prompt) / per_page,
        };
        let words = &prompt.words()[..end * per_page];
        let matched = self.tree.match_prefix(prompt.root(), words);
        if matched.end.is_some() && !matched.ends_in_l2 {
            return Err(Declined::AnchorNotInL2);
        }
        let (from, threshold) = (matched.pages(), self.prefetch_threshold());
        let known = match matched.end.filter(|_| !self.tails.is_empty()) {
            Some(node) => self.longest_tail(&self.tree.path_keys(node), false),
            None => from,
        };
        if end - known < threshold.max(usize::from(!self.tails.is_empty())) {
            return Err(Declined::BelowThreshold);
        }
        let wanted = (end - from).min(self.prefetch_share_left());
        if from + wanted - known < threshold {
            return Err(Declined::L2Share);
        }
        let pages = from + wanted;
        let keys = prompt.keys(&self.vocabulary, pages).to_vec();
        let tails = self.tail_lookup(&keys, from);
        let anchor = matched.end.and_then(|end| self.tree.lock(end, Hold::L2));
        let OpId(number) = self.fresh_id();
        let id = PrefetchId(number);
        self.orders.push_back(Order::Exists {
            id: OpId(number),
            keys: keys[from..].to_vec(),
            is_counted: prompt.is_first_lookup(),
            tails,
        });
        let words = prompt.words()[..pages * per_page].to_vec();
        let prefetch = Prefetch {
            stage: Stage::Asked,
            claim: Some(Claim {
                root: prompt.root(),
                words,
                keys,
                from,
                known,
                anchor,
                tails: Vec::new(),
            }),
            blocked_since: None,
        };
        self.prefetches.insert(id, prefetch);
        self.prefetch_pages += wanted;
        self.stats.prefetches += 1;
        Ok(id)
    }

    /// The part of a lookup of the pages from `from` on that concerns tail pools.
    fn tail_lookup(&self, keys: &[PageKey], from: usize) -> Option<TailLookup> {
        let ask = |(pool, tail): (usize, &Tail)| TailAsk {
            pool,
            trailing: tail.pool.trailing(),
            known: keys.iter().map(|key| tail.pool.has(key, false)).collect(),
        };
        (!self.tails.is_empty()).then(|| TailLookup {
            before: keys[..from].to_vec(),
            pools: self.tails.iter().enumerate().map(ask).collect(),
        })
    }

    /// Number of pages of L2 that further prefetches may take.
    fn prefetch_share_left(&self) -> usize {
        let percent = u64::from(self.config.prefetch.l2_percent_max);
        let share = u64::from(self.l2.pages()) * percent / 100;
        let share = usize::try_from(share).unwrap_or(usize::MAX);
        share.saturating_sub(self.prefetch_pages)
    }

    /// Number of prefetches that have not been polled to their end or cancelled.
    #[must_use]
    pub fn prefetches_out(&self) -> usize {
        self.prefetches.len()
    }

    fn prefetch_threshold(&self) -> usize {
        self.config.pages_of(self.config.prefetch.threshold_tokens)
    }

    fn count_declined(&mut self, declined: Declined) {
        let Declines {
            anchor_not_in_l2,
            below_threshold,
            l2_share,
            l3_miss,
            break_even,
            l2_room,
        } = &mut self.stats.declined;
        *match declined {
            Declined::AnchorNotInL2 => anchor_not_in_l2,
            Declined::BelowThreshold => below_threshold,
            Declined::L2Share => l2_share,
            Declined::L3Miss => l3_miss,
            Declined::BreakEven => break_even,
            Declined::L2Room => l2_room,
        } += 1;
    }

    /// Records the duration of a read from L3, for the break-even decision.
    pub fn observe_read(&mut self, bytes: u64, micros: u64) {
        let now = bytes as f64 * 1e6 / micros.max(1) as f64;
        let mean = self.read_speed.map_or(now, |mean| mean * 0.8 + now * 0.2);
        self.read_speed = Some(mean);
    }

    /// Whether reading this many pages is expected to take no longer than computing them. Also true
    /// if either speed is unknown.
    fn is_worth_reading(&self, pages: usize) -> bool {
        let rate = self.config.prefetch.break_even_tokens_per_second;
        let (Some(rate), Some(bytes_per_second)) = (rate, self.read_speed) else {
            return true;
        };
        let read_seconds = pages as f64 * self.config.page_bytes as f64 / bytes_per_second;
        let tokens = pages as f64 * f64::from(self.page_tokens.get());
        read_seconds <= tokens / f64::from(rate.get())
    }

    /// Whether to read this many pages: because it is worth it, or to measure the speed of L3.
    fn may_be_read(&mut self, pages: usize) -> bool {
        let is_read = self.is_worth_reading(pages) || self.given_up >= GIVEN_UP_MAX;
        self.given_up = if is_read { 0 } else { self.given_up + 1 };
        is_read
    }

    /// Whether the waiting time of a request for a prefetch has expired. `now` is in microseconds.
    /// The first call for an unfinished prefetch starts the clock. With several ranks, one rank
    /// that returns `true` decides for all.
    pub fn is_prefetch_overdue(&mut self, id: PrefetchId, now: u64) -> bool {
        let config = &self.config.prefetch;
        let Some(prefetch) = self.prefetches.get_mut(&id) else {
            return false;
        };
        let Some(claim) = &prefetch.claim else {
            return false;
        };
        match config.policy {
            PrefetchPolicy::BestEffort => true,
            PrefetchPolicy::WaitComplete => false,
            PrefetchPolicy::Timeout => {
                let tokens = claim.wanted() as u64 * u64::from(self.page_tokens.get());
                let per_1024 = config.timeout_per_1024_tokens_us;
                let for_tokens = per_1024.saturating_mul(tokens) / 1024;
                let allowed = config.timeout_base_us.saturating_add(for_tokens);
                let since = *prefetch.blocked_since.get_or_insert(now);
                now.saturating_sub(since) > allowed
            }
        }
    }

    /// Whether a prefetch has not ended.
    #[must_use]
    pub fn is_prefetch_waiting(&self, id: PrefetchId) -> bool {
        let stage = self.prefetches.get(&id).map(|prefetch| &prefetch.stage);
        matches!(
            stage,
            Some(Stage::Asked | Stage::ReadingTails { .. } | Stage::Reading { .. })
        )
    }

    /// The state of a prefetch. With `overdue`, the prefetch ends now with the pages that have
    /// arrived. A prefetch that is over is removed.
    pub fn poll_prefetch(&mut self, id: PrefetchId, overdue: bool) -> PrefetchState {
        let Some(prefetch) = self.prefetches.get(&id) else {
            return PrefetchState::Unknown;
        };
        match &prefetch.stage {
            Stage::Over(state) => {
                let state = *state;
                self.forget_prefetch(id);
                state
            }
            Stage::Draining { .. } => PrefetchState::Unknown,
            Stage::Asked | Stage::ReadingTails { .. } | Stage::Reading { .. } if overdue => {
                PrefetchState::Ended(self.leave_prefetch(id, true))
            }
            Stage::Asked | Stage::ReadingTails { .. } | Stage::Reading { .. } => {
                PrefetchState::Waiting
            }
        }
    }

    /// Cancels a prefetch whose request has ended. No page is kept. Pages that a read may still
    /// write are freed after that read.
    pub fn cancel_prefetch(&mut self, id: PrefetchId) {
        if self
            .prefetches
            .get(&id)
            .is_some_and(|prefetch| matches!(prefetch.stage, Stage::Over(_)))
        {
            self.forget_prefetch(id);
        } else {
            self.leave_prefetch(id, false);
        }
        self.copy_down_refused();
    }

    /// Removes a prefetch that is over.
    fn forget_prefetch(&mut self, id: PrefetchId) {
        self.drop_claim(id);
        self.prefetches.remove(&id);
    }

    /// Processes the answer to an order of a prefetch.
    pub(super) fn prefetch_answered(&mut self, id: PrefetchId, pages: usize) {
        let Some(prefetch) = self.prefetches.get_mut(&id) else {
            return;
        };
        match &mut prefetch.stage {
            Stage::Asked => match self.prefetch_confirmed(id, pages) {
                Ok(()) => self.read_next(id),
                Err(declined) => {
                    self.count_declined(declined);
                    self.drop_claim(id);
                    self.set_stage(id, Stage::Over(PrefetchState::Declined(declined)));
                }
            },
            Stage::Reading { arrived, batch, .. } => {
                let asked = std::mem::take(batch);
                let came = if planted!(TrustsShortRead) {
                    asked
                } else {
                    pages.min(asked)
                };
                *arrived += came;
                self.stats.prefetch_short += (asked - came) as u64;
                if came < asked {
                    self.end_reading(id);
                } else {
                    self.read_batch(id);
                }
            }
            Stage::ReadingTails { tails, l2 } => {
                let (tails, l2) = (std::mem::take(tails), std::mem::take(l2));
                let has_all = pages >= tails.len();
                self.tails_arrived(id, tails, has_all);
                let (arrived, batch) = (0, 0);
                self.set_stage(id, Stage::Reading { l2, arrived, batch });
                if has_all {
                    self.read_batch(id);
                } else {
                    self.end_reading(id);
                }
            }
            Stage::Draining { l2, tails } => {
                let (l2, tails) = (std::mem::take(l2), std::mem::take(tails));
                self.free_l2(&l2);
                self.free_tails_read(&tails);
                self.prefetches.remove(&id);
            }
            Stage::Over(_) => {}
        }
    }

    /// L3 has returned its number of pages: allocates L2 pages for as many as are worth reading.
    fn prefetch_confirmed(&mut self, id: PrefetchId, found: usize) -> Result<(), Declined> {
        let claim = self
            .prefetches
            .get(&id)
            .and_then(|prefetch| prefetch.claim.as_ref());
        let threshold = self.prefetch_threshold();
        if !self.tails.is_empty() {
            let end = found.min(claim.map_or(0, |claim| claim.keys.len()));
            return self.prefetch_confirmed_tails(id, end);
        }
        let found = found.min(claim.map_or(0, Claim::wanted));
        if found < threshold {
            return Err(Declined::L3Miss);
        }
        if !self.may_be_read(found) {
            return Err(Declined::BreakEven);
        }
        self.make_l2_room(found);
        let room = (found as u32).min(self.l2.free_pages());
        if (room as usize) < threshold {
            return Err(Declined::L2Room);
        }
        let l2 = self.l2.allocate(room).ok_or(Declined::L2Room)?;
        self.stats.prefetch_no_room += found as u64 - u64::from(room);
        let (arrived, batch) = (0, 0);
        self.set_stage(id, Stage::Reading { l2, arrived, batch });
        Ok(())
    }

    /// As [`Core::prefetch_confirmed`], for the longest prefix that can be continued.
    fn prefetch_confirmed_tails(&mut self, id: PrefetchId, end: usize) -> Result<(), Declined> {
        let claim = self.prefetches.get(&id).and_then(|of| of.claim.as_ref());
        let claim = claim.ok_or(Declined::L3Miss)?;
        let (from, known, keys) = (claim.from, claim.known, claim.keys[..end].to_vec());
        if end <= known || end - known < self.prefetch_threshold() {
            return Err(Declined::L3Miss);
        }
        let found = end.saturating_sub(from);
        if !self.may_be_read(found) {
            return Err(Declined::BreakEven);
        }
        let l2 = self.take_l2(found).ok_or(Declined::L2Room)?;
        let (mut tails, mut holds, mut has_room) = (Vec::new(), Vec::new(), true);
        for (number, tail) in self.tails.iter_mut().enumerate() {
            let pool = &mut tail.pool;
            for key in &keys[end.saturating_sub(pool.trailing())..] {
                if let Some(of) = pool.find(key) {
                    holds.push((number, pool.hold(of)));
                } else if let Some(l2) = pool.take_l2() {
                    tails.push(TailPage {
                        pool: number,
                        key: *key,
                        l2,
                    });
                } else {
                    has_room = false;
                }
            }
        }
        if let Some(claim) = self
            .prefetches
            .get_mut(&id)
            .and_then(|of| of.claim.as_mut())
        {
            claim.tails = holds;
        }
        if !has_room {
            self.free_l2(&l2);
            self.free_tails_read(&tails);
            return Err(Declined::L2Room);
        }
        self.set_stage(id, Stage::ReadingTails { tails, l2 });
        Ok(())
    }

    /// Orders the first read.
    fn read_next(&mut self, id: PrefetchId) {
        let Some(Prefetch {
            stage: Stage::ReadingTails { tails, l2 },
            ..
        }) = self.prefetches.get_mut(&id)
        else {
            return self.read_batch(id);
        };
        if tails.is_empty() {
            let l2 = std::mem::take(l2);
            let (arrived, batch) = (0, 0);
            self.set_stage(id, Stage::Reading { l2, arrived, batch });
            return self.read_batch(id);
        }
        let pages = tails.clone();
        self.orders.push_back(Order::GetTails {
            id: OpId(id.0),
            pages,
        });
    }

    /// Pages of tail pools have arrived, or not.
    fn tails_arrived(&mut self, id: PrefetchId, tails: Vec<TailPage>, has_all: bool) {
        if !has_all {
            self.stats.prefetch_short += tails.len() as u64;
            return self.free_tails_read(&tails);
        }
        let mut holds = Vec::new();
        for TailPage { pool, key, l2 } in tails {
            let of = &mut self.tails[pool].pool;
            let given = of.give_l2(key, l2);
            if given.is_none() {
                of.free_l2(l2);
                self.stats.prefetch_wasted += 1;
            }
            holds.extend(of.find(&key).map(|entry| (pool, of.hold(entry))));
        }
        if let Some(claim) = self
            .prefetches
            .get_mut(&id)
            .and_then(|of| of.claim.as_mut())
        {
            claim.tails.extend(holds);
        }
    }

    fn free_tails_read(&mut self, tails: &[TailPage]) {
        for page in tails {
            self.tails[page.pool].pool.free_l2(page.l2);
        }
    }

    /// Orders the next batch, or ends the prefetch if there is none.
    fn read_batch(&mut self, id: PrefetchId) {
        let batch_max = self.config.prefetch.batch_pages as usize;
        let Some(Prefetch {
            stage: Stage::Reading { l2, arrived, batch },
            claim: Some(claim),
            ..
        }) = self.prefetches.get_mut(&id)
        else {
            return;
        };
        let left = l2.pages() as usize - *arrived;
        if left == 0 {
            return self.end_reading(id);
        }
        *batch = left.min(batch_max);
        let mut into = l2.clone().split_off(*arrived as u32);
        let _later = into.split_off(*batch as u32);
        let first = claim.from + *arrived;
        let order = Order::Get {
            id: OpId(id.0),
            keys: claim.keys[first..first + *batch].to_vec(),
            l2: into,
        };
        self.orders.push_back(order);
    }

    /// Ends a prefetch after all its reads.
    fn end_reading(&mut self, id: PrefetchId) {
        let pages = self.end_pages(id, true);
        self.set_stage(id, Stage::Over(PrefetchState::Ended(pages)));
    }

    /// Ends a prefetch for which no request waits, by [`Core::end_pages`]. If an answer is
    /// outstanding, the prefetch drains.
    fn leave_prefetch(&mut self, id: PrefetchId, keep: bool) -> usize {
        let pages = self.end_pages(id, keep);
        self.drop_claim(id);
        pages
    }

    /// Frees the pages into which no read is in progress. With `keep`, inserts the arrived pages
    /// into the tree first and returns their number.
    fn end_pages(&mut self, id: PrefetchId, keep: bool) -> usize {
        let Some(prefetch) = self.prefetches.get_mut(&id) else {
            return 0;
        };
        let drained = Stage::Draining {
            l2: Runs::default(),
            tails: Vec::new(),
        };
        let (mut came, arrived, batch) = match std::mem::replace(&mut prefetch.stage, drained) {
            Stage::Reading { l2, arrived, batch } => (l2, arrived, batch),
            stage @ (Stage::Draining { .. } | Stage::Over(_)) => {
                prefetch.stage = stage;
                return 0;
            }
            Stage::Asked => (Runs::default(), 0, 0),
            Stage::ReadingTails { tails, l2 } => {
                prefetch.stage = Stage::Draining {
                    l2: Runs::default(),
                    tails,
                };
                self.free_l2(&l2);
                return 0;
            }
        };
        let mut flying = came.split_off(arrived as u32);
        let unread = flying.split_off(if planted!(SlotFreedUnderRead) {
            0
        } else {
            batch as u32
        });
        self.free_l2(&unread);
        let tails = Vec::new();
        self.set_stage(id, Stage::Draining { l2: flying, tails });
        if keep {
            return self.keep_arrived(id, came);
        }
        self.stats.prefetch_wasted += u64::from(came.pages());
        self.free_l2(&came);
        0
    }

    /// Inserts arrived pages into the tree and holds them. Returns how many the tree took.
    fn keep_arrived(&mut self, id: PrefetchId, came: Runs<L2>) -> usize {
        let Some(Prefetch {
            claim: Some(claim), ..
        }) = self.prefetches.get(&id)
        else {
            return 0;
        };
        let until = claim.from + came.pages() as usize;
        let words = &claim.words[..until * self.page_tokens.get() as usize];
        let keys = &claim.keys[..until];
        let inserted = self
            .tree
            .insert_host(claim.root, words, keys, claim.from, came);
        self.stats.prefetch_wasted += u64::from(inserted.duplicates.pages());
        self.stats.prefetch_orphans += u64::from(inserted.orphans.pages());
        self.stats.l3_hits += inserted.pages as u64;
        self.free_l2(&inserted.duplicates);
        self.free_l2(&inserted.orphans);
        if let Some(node) = inserted.node {
            self.emit_stored(TierName::L2, node);
            self.hold_arrived(id, node);
        }
        inserted.pages
    }

    /// Holds the arrived pages up to this node, including the anchor.
    fn hold_arrived(&mut self, id: PrefetchId, node: NodeId) {
        let held = self.tree.lock(node, Hold::L2);
        let claim = self.prefetches.get_mut(&id);
        let claim = claim.and_then(|prefetch| prefetch.claim.as_mut());
        let before = match claim {
            Some(claim) => std::mem::replace(&mut claim.anchor, held),
            None => held,
        };
        if let Some(before) = before {
            self.tree.unlock(before);
        }
    }

    fn set_stage(&mut self, id: PrefetchId, stage: Stage) {
        if let Some(prefetch) = self.prefetches.get_mut(&id) {
            prefetch.stage = stage;
        }
    }

    fn drop_claim(&mut self, id: PrefetchId) {
        let claim = self
            .prefetches
            .get_mut(&id)
            .and_then(|prefetch| prefetch.claim.take());
        if let Some(claim) = claim {
            self.prefetch_pages -= claim.wanted();
            if let Some(anchor) = claim.anchor {
                self.tree.unlock(anchor);
            }
            for (pool, hold) in claim.tails {
                self.tails[pool].pool.release(hold);
            }
        }
    }
}
