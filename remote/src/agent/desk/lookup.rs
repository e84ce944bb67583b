//! Lookups: the pages that arrive in time, and the fetches that begin for them.

use std::time::Duration;

use larder_base::runtime::Instant;
use larder_format::{BLOCK_BYTES, Fingerprint, PageKey};

use super::{Desk, Incoming, Space};
use crate::agent::options::AgentOptions;
use crate::flights::Flight;
use crate::planted::planted;
use crate::run::RunName;

/// Fetches at once that are tried, for each that is known to be fast enough.
const GROWTH: usize = 4;

/// The part of a lookup that the remote has.
#[derive(Default)]
struct Reach {
    /// Pages from the first without a gap.
    pages: usize,
    /// Runs for them that are on their way.
    arriving: Vec<RunName>,
    /// Runs for them that are not on their way yet.
    begun: Vec<Incoming>,
    /// The next runs, which are known and too slow, as far as they are looked for.
    late: Vec<Incoming>,
    too_slow: u64,
    /// No run behind these pages is known.
    is_end: bool,
}

/// The state of a run, as far as the agent knows it.
enum Found {
    Arriving(RunName),
    Known(RunName),
    /// It could not be taken, and its pause is not over.
    Paused,
    Unknown,
}

/// The answer to a lookup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::agent) struct Missed {
    /// Pages that will be stored in time.
    pub(in crate::agent) promised: usize,
    /// Fetches that begin.
    pub(in crate::agent) begun: u64,
    /// Searches that begin.
    pub(in crate::agent) searches: u64,
    /// Runs that are known and would arrive too late, or later than they are computed.
    pub(in crate::agent) too_slow: u64,
}

impl Desk {
    /// Begins fetches for the pages of a chain behind the first `found`, and a search for runs
    /// behind the known ones.
    ///
    /// A known run is found by the key of its last page, and has a fixed number of pages: so the
    /// place of `keys` in their chain need not be known. A search begins at the chain's head,
    /// unless a put has shown where the chain stands.
    pub(in crate::agent) fn missed(
        &mut self,
        namespace: Fingerprint,
        keys: &[PageKey],
        found: usize,
        now: Instant,
        options: &AgentOptions,
    ) -> Missed {
        let mut missed = Missed::default();
        let Some(space) = self.spaces.get(&namespace) else {
            return missed;
        };
        if !self.may_ask() {
            return missed;
        }
        let page_tokens = space.namespace.fields().page_tokens;
        let run_pages = space.run_pages.get() as usize;
        // The store refuses the end of a longer chain.
        let page_bytes = u64::from(space.namespace.shape().page_blocks()) * BLOCK_BYTES as u64;
        let kept = usize::try_from(self.usable_bytes / page_bytes).unwrap_or(usize::MAX);
        let keys = &keys[..keys.len().min(kept.max(found))];
        let mut reach = self.reach(namespace, &keys[found..], now, options);
        let last = match reach.pages {
            0 => self.last_of_run(namespace, keys, found, run_pages),
            // Known runs end where others begin.
            pages => found + pages + run_pages - 1,
        };
        if reach.is_end {
            let last = keys.iter().skip(last).step_by(run_pages);
            let runs = last.map(|last| space.names.name(last));
            let is_new = self.searches.add(runs, now);
            missed.searches = u64::from(is_new);
        }
        let in_time = self.fetching.len() + reach.begun.len();
        self.leave_computed(&mut reach, page_tokens, options);
        if !reach.begun.is_empty() {
            self.slow_pause = None;
        }
        if !self.try_late(&mut reach, in_time, now, options) {
            self.tried.0 = self.tried.0.max(in_time);
        }
        missed.too_slow = reach.too_slow;
        missed.promised = if self.speed.is_known() {
            reach.pages
        } else {
            0
        };
        missed.begun = reach.begun.len() as u64;
        for run in reach.arriving.iter().filter(|_| !planted!(OldPromise)) {
            let until = now + options.patience;
            self.fetching.entry(*run).and_modify(|then| *then = until);
        }
        for run in reach.begun {
            self.begin(run, now);
        }
        missed
    }

    /// The last page of the run that has page `at` of a lookup.
    fn last_of_run(
        &self,
        namespace: Fingerprint,
        keys: &[PageKey],
        at: usize,
        run_pages: usize,
    ) -> usize {
        let depth = |at: usize| {
            let page = (namespace, keys.get(at)?.prefix());
            (self.chains.depth(&page)? as usize).checked_sub(at)
        };
        // Other lookups begin at the head of their chain.
        let first = depth(0).or_else(|| depth(at.checked_sub(1)?));
        at + run_pages - 1 - (first.unwrap_or(0) + at) % run_pages
    }

    /// Leaves out the pages that the engine computes faster than they arrive.
    fn leave_computed(&self, reach: &mut Reach, page_tokens: u32, options: &AgentOptions) {
        let (Some(rate), Some(first)) = (options.prefill_rate, reach.begun.first()) else {
            return;
        };
        let time = self.time_of(reach.begun.len(), first.flight, 0);
        let tokens = reach.pages as f64 * f64::from(page_tokens);
        if time.is_some_and(|time| time.as_secs_f64() > tokens / rate) {
            reach.too_slow += reach.begun.len() as u64;
            reach.begun.append(&mut reach.late);
            reach.late = std::mem::take(&mut reach.begun);
            reach.pages = 0;
        }
    }

    /// The time until so many runs arrive, and these bytes in others; `None` if it is not known.
    fn time_of(&self, runs: usize, run: Flight, others: u64) -> Option<Duration> {
        let runs = runs + usize::try_from(others.div_ceil(run.bytes)).unwrap_or(usize::MAX);
        let most = self.flights.most_of(run);
        self.speed.time_of(runs, run.bytes, most)
    }

    /// The age of a measurement at which the speed is measured again. Where no run is fast enough,
    /// it is a pause that grows until one is.
    fn trial_age(&self, in_time: usize, refresh: Duration) -> Duration {
        match in_time {
            0 => self.pauses.next(self.slow_pause),
            _ => refresh,
        }
    }

    /// Most runs of a lookup that are begun to measure the speed, if its other runs arrive in time.
    /// Fetches alone measure it: it is not known for more at once than were begun before, and one
    /// slow answer would end all of them.
    fn trial(&self, in_time: usize, run: Flight, now: Instant, age: Duration) -> usize {
        if !self.trial.is_empty() {
            return 0;
        }
        if in_time == 0 {
            return usize::from(self.speed.is_due(now, age));
        }
        let (tried, at) = self.tried;
        let at_once = (GROWTH * in_time).min(self.flights.most_of(run));
        let is_old = at.is_none_or(|at| now >= at + age);
        // The promises to other lookups may be broken.
        let is_new = self.fetching.is_empty() && at_once >= 2 * tried;
        match is_new || is_old {
            true => at_once.saturating_sub(self.fetching.len()),
            false => 0,
        }
    }

    /// Begins runs of a lookup that are too slow, at times, to measure the speed. Returns whether
    /// it does: nothing is promised then.
    fn try_late(
        &mut self,
        reach: &mut Reach,
        in_time: usize,
        now: Instant,
        options: &AgentOptions,
    ) -> bool {
        let Some(first) = reach.late.first() else {
            return false;
        };
        let age = self.trial_age(in_time, options.refresh);
        let most = self.trial(in_time, first.flight, now, age);
        if most <= reach.begun.len() {
            return false;
        }
        let runs = most.min(reach.begun.len() + reach.late.len());
        let at_once = self.fetching.len() + runs;
        // The engine is faster than so many.
        let is_known = reach.begun.is_empty() && at_once <= self.tried.0;
        if is_known && !self.speed.is_due(now, age) {
            return false;
        }
        if in_time == 0 {
            self.slow_pause = Some(age);
        }
        reach.begun.append(&mut reach.late);
        reach.begun.truncate(runs);
        reach.pages = 0;
        self.trial.extend(reach.begun.iter().map(|run| run.name));
        self.speed.tried(now);
        if in_time > 0 {
            self.tried = (at_once, Some(now));
        }
        true
    }

    /// The run of a namespace that ends in this page, as far as it is known.
    fn found(&self, space: &Space, last: &PageKey, now: Instant) -> Found {
        let mut found = Found::Unknown;
        for name in space.names.all(last) {
            let (of, last) = name.id();
            let runs = self.names.of(of);
            if self.fetching.contains_key(&name) {
                return Found::Arriving(name);
            }
            if runs.is_some_and(|runs| runs.has(&last, now)) {
                return Found::Known(name);
            }
            if runs.is_some_and(|runs| runs.pauses(&last, now)) {
                found = Found::Paused;
            }
        }
        found
    }

    /// The runs for the first of these pages that are known and arrive in time.
    fn reach(
        &self,
        namespace: Fingerprint,
        keys: &[PageKey],
        now: Instant,
        options: &AgentOptions,
    ) -> Reach {
        let mut reach = Reach::default();
        let requests = usize::try_from(self.hour.left(now)).unwrap_or(usize::MAX);
        let Some(space) = self.spaces.get(&namespace) else {
            return reach;
        };
        let run_pages = space.run_pages.get() as usize;
        // Pages of the runs found.
        let mut pages = 0;
        for (at, key) in keys.iter().enumerate() {
            if at - pages >= run_pages {
                break;
            }
            let (name, is_arriving) = match self.found(space, key, now) {
                Found::Arriving(name) => (name, true),
                Found::Known(name) => (name, false),
                // The run is there, or was, and is left alone for now.
                Found::Paused => return reach,
                Found::Unknown => continue,
            };
            if self.trial.contains(&name) {
                reach.too_slow += 1;
                return reach;
            }
            if is_arriving {
                if !reach.late.is_empty() {
                    return reach;
                }
                reach.arriving.push(name);
            } else {
                if (reach.begun.len() + reach.late.len() + 1) * space.run.requests > requests {
                    return reach;
                }
                let run = Incoming {
                    name,
                    namespace,
                    pages: keys[pages..=at].to_vec(),
                    flight: space.run,
                    until: now + options.patience,
                };
                let (begun, others) = (reach.begun.len() + 1, self.arriving_bytes);
                let time = self.time_of(begun, run.flight, others);
                let is_late = time.is_some_and(|time| time > options.patience);
                if is_late && !planted!(LateByte) {
                    reach.too_slow += u64::from(reach.late.is_empty());
                    reach.late.push(run);
                    let in_time = self.fetching.len() + reach.begun.len();
                    let age = self.trial_age(in_time, options.refresh);
                    let most = self.trial(in_time, space.run, now, age);
                    if reach.begun.len() + reach.late.len() >= most {
                        return reach;
                    }
                    pages = at + 1;
                    continue;
                }
                reach.begun.push(run);
                if time.is_none() {
                    // Fetched to measure the speed; nothing is promised.
                    reach.pages = at + 1;
                    return reach;
                }
            }
            pages = at + 1;
            reach.pages = pages;
        }
        reach.is_end = reach.late.is_empty();
        reach
    }
}
