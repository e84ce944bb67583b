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
//! Faults covered: L3 reports more pages than it has (the batch is cut at the first missing page),
//! fails (no page arrives), or never answers (the policy closes the prefetch; its pages stay
//! reserved, and no other work waits).

use super::flight::{Claim, Prefetch, Stage};
use super::{Core, Declined, Declines, OpId, Order, PrefetchId, PrefetchState, TierName};
use crate::config::PrefetchPolicy;
use crate::planted::planted;
use crate::prompt::Prompt;
use crate::runs::{L2, Runs};
use crate::tree::{Hold, NodeId};

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
        let matched = self.match_prefix(prompt);
        if matched.end.is_some() && !matched.ends_in_l2 {
            return Err(Declined::AnchorNotInL2);
        }
        let (from, threshold) = (matched.pages(), self.prefetch_threshold());
        let missing = prompt.pages() - from;
        if missing < threshold {
            return Err(Declined::BelowThreshold);
        }
        let wanted = missing.min(self.prefetch_share_left());
        if wanted < threshold {
            return Err(Declined::L2Share);
        }
        let pages = from + wanted;
        let keys = prompt.keys(&self.vocabulary, pages).to_vec();
        let anchor = matched.end.and_then(|end| self.tree.lock(end, Hold::L2));
        let OpId(number) = self.fresh_id();
        let id = PrefetchId(number);
        self.orders.push_back(Order::Exists {
            id: OpId(number),
            keys: keys[from..].to_vec(),
            is_counted: prompt.is_first_lookup(),
        });
        let words = prompt.words()[..pages * self.page_tokens.get() as usize].to_vec();
        let prefetch = Prefetch {
            stage: Stage::Asked,
            claim: Some(Claim {
                root: prompt.root(),
                words,
                keys,
                from,
                anchor,
            }),
            blocked_since: None,
        };
        self.prefetches.insert(id, prefetch);
        self.prefetch_pages += wanted;
        self.stats.prefetches += 1;
        Ok(id)
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
        matches!(stage, Some(Stage::Asked | Stage::Reading { .. }))
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
            Stage::Asked | Stage::Reading { .. } if overdue => {
                PrefetchState::Ended(self.leave_prefetch(id, true))
            }
            Stage::Asked | Stage::Reading { .. } => PrefetchState::Waiting,
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
                Ok(()) => self.read_batch(id),
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
            Stage::Draining { l2 } => {
                let l2 = std::mem::take(l2);
                self.free_l2(&l2);
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
        let found = found.min(claim.map_or(0, Claim::wanted));
        let threshold = self.prefetch_threshold();
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
        };
        let (mut came, arrived, batch) = match std::mem::replace(&mut prefetch.stage, drained) {
            Stage::Reading { l2, arrived, batch } => (l2, arrived, batch),
            stage @ (Stage::Draining { .. } | Stage::Over(_)) => {
                prefetch.stage = stage;
                return 0;
            }
            Stage::Asked => (Runs::default(), 0, 0),
        };
        let mut flying = came.split_off(arrived as u32);
        let unread = flying.split_off(if planted!(SlotFreedUnderRead) {
            0
        } else {
            batch as u32
        });
        self.free_l2(&unread);
        self.set_stage(id, Stage::Draining { l2: flying });
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
        }
    }
}
