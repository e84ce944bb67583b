//! Lookups: the pages that arrive in time, and the fetches that begin for them.

use larder_base::runtime::Instant;
use larder_format::{Fingerprint, PageKey};

use super::{Desk, Incoming};
use crate::agent::options::AgentOptions;
use crate::planted::planted;
use crate::run::RunName;

/// The part of a lookup that the remote has.
#[derive(Default)]
struct Reach {
    /// Pages from the first without a gap.
    pages: usize,
    /// Runs for them that are on their way.
    arriving: Vec<RunName>,
    /// Runs for them that are not on their way yet.
    begun: Vec<Incoming>,
    /// Their bytes.
    bytes: u64,
    /// The first run that is known and too slow.
    late: Option<Incoming>,
    too_slow: u64,
    /// No run behind these pages is known.
    is_end: bool,
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
        let mut reach = self.reach(namespace, &keys[found..], now, options);
        let last = match reach.pages {
            0 => self.last_of_run(namespace, keys, found, run_pages),
            // Known runs end where others begin.
            pages => found + pages + run_pages - 1,
        };
        if reach.is_end {
            let last = keys.iter().skip(last).step_by(run_pages);
            let is_new = self.searches.add(namespace, last, now, options.refresh);
            missed.searches = u64::from(is_new);
        }
        self.leave_computed(&mut reach, page_tokens, options);
        self.measure_late(&mut reach, now, options);
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
        reach.begun.into_iter().for_each(|run| self.begin(run));
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
        let time = self.speed.time_of(reach.bytes);
        let (Some(rate), Some(time)) = (options.prefill_rate, time) else {
            return;
        };
        let tokens = reach.pages as f64 * f64::from(page_tokens);
        if time.as_secs_f64() > tokens / rate {
            reach.too_slow += reach.begun.len() as u64;
            reach.late = reach.begun.drain(..).next().or(reach.late.take());
            reach.pages = 0;
        }
    }

    /// Begins the fetch of a run that is too slow, if none has measured the speed for some time.
    /// Fetches alone measure it: one slow answer would else end them for ever.
    fn measure_late(&mut self, reach: &mut Reach, now: Instant, options: &AgentOptions) {
        let is_idle = reach.begun.is_empty() && self.measuring.is_none();
        let is_due = is_idle && self.speed.is_due(now, options.refresh);
        if let Some(run) = reach.late.take().filter(|_| is_due) {
            self.speed.tried(now);
            self.measuring = Some(run.name);
            reach.too_slow -= 1;
            reach.begun.push(run);
        }
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
        let (Some(space), runs) = (self.spaces.get(&namespace), self.names.of(namespace)) else {
            return reach;
        };
        let run_pages = space.run_pages.get() as usize;
        for (at, key) in keys.iter().enumerate() {
            if at - reach.pages >= run_pages {
                break;
            }
            let name = RunName {
                namespace,
                last: *key,
            };
            let is_arriving = self.fetching.contains_key(&name);
            let is_known = runs.is_some_and(|runs| runs.has(&key.prefix()));
            if !is_arriving && !is_known {
                continue;
            }
            if self.measuring == Some(name) {
                reach.too_slow += 1;
                return reach;
            }
            if is_arriving {
                reach.arriving.push(name);
            } else {
                let run = Incoming {
                    name,
                    pages: keys[reach.pages..=at].to_vec(),
                    bytes: space.run_bytes,
                    until: now + options.patience,
                };
                let bytes = reach.bytes + run.bytes;
                let time = self.speed.time_of(self.arriving_bytes + bytes);
                let is_late = time.is_some_and(|time| time > options.patience);
                if is_late && !planted!(LateByte) {
                    reach.late = Some(run);
                    reach.too_slow += 1;
                    return reach;
                }
                reach.bytes = bytes;
                reach.begun.push(run);
                if time.is_none() {
                    // Fetched to measure the speed; nothing is promised.
                    reach.pages = at + 1;
                    return reach;
                }
            }
            reach.pages = at + 1;
        }
        reach.is_end = true;
        reach
    }
}
