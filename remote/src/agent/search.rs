//! Prefixes whose runs are not known, for a search in the remote.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use larder_base::runtime::Instant;

use super::limits::Pauses;
use crate::run::{RunId, RunName};

/// Most searches that wait: beyond it the oldest are dropped.
const SEARCHES_MAX: usize = 256;

/// Most runs of a search.
const RUNS_MAX: usize = 4096;

/// Most runs that are remembered as absent.
const ABSENT_MAX: usize = 1 << 16;

/// Consecutive runs of a chain.
pub(super) struct Search(pub(super) Vec<RunName>);

/// A run that was not found, or whose question failed.
struct Absent {
    until: Instant,
    pause: Duration,
}

/// The searches that wait, and the runs that were not found. Such a run is searched for after a
/// pause. Each time that it is not found doubles the pause.
#[derive(Default)]
pub(super) struct Searches {
    waiting: VecDeque<Search>,
    /// First runs of searches that wait or are being made.
    begun: HashSet<RunId>,
    absent: HashMap<RunId, Absent>,
    /// In the order of their insertion.
    order: VecDeque<RunId>,
}

impl Searches {
    /// Queues a search for these consecutive runs, unless one for the first has begun, or a pause
    /// of it is not over. Returns whether it is queued.
    pub(super) fn add(&mut self, runs: impl Iterator<Item = RunName>, now: Instant) -> bool {
        let mut runs = runs.peekable();
        let Some(first) = runs.peek().map(RunName::id) else {
            return false;
        };
        let absent = self.absent.get(&first);
        if absent.is_some_and(|run| now < run.until) || !self.begun.insert(first) {
            return false;
        }
        self.waiting
            .push_back(Search(runs.take(RUNS_MAX).collect()));
        if self.waiting.len() > SEARCHES_MAX {
            let oldest = self.waiting.pop_front();
            oldest.iter().for_each(|search| self.forget(search));
        }
        true
    }

    fn forget(&mut self, Search(runs): &Search) {
        if let Some(first) = runs.first() {
            self.begun.remove(&first.id());
        }
    }

    /// A search is over. It found all runs before this one.
    pub(super) fn end(
        &mut self,
        search: &Search,
        absent: Option<&RunName>,
        now: Instant,
        pauses: Pauses,
    ) {
        self.forget(search);
        let found = search.0.iter().take_while(|run| Some(*run) != absent);
        for run in found {
            self.absent.remove(&run.id());
        }
        let Some(absent) = absent.map(RunName::id) else {
            return;
        };
        let before = self.absent.get(&absent).map(|run| run.pause);
        let pause = pauses.next(before);
        let until = now + pause;
        self.absent.insert(absent, Absent { until, pause });
        if before.is_some() {
            return;
        }
        self.order.push_back(absent);
        if self.order.len() > ABSENT_MAX {
            let oldest = self.order.pop_front();
            oldest.and_then(|oldest| self.absent.remove(&oldest));
        }
    }

    pub(super) fn next(&mut self) -> Option<Search> {
        self.waiting.pop_front()
    }

    pub(super) fn clear(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        waiting.iter().for_each(|search| self.forget(search));
    }
}

#[cfg(test)]
mod tests {
    use larder_format::{Fingerprint, PageKey};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn run(at: usize) -> RunName {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&at.to_le_bytes());
        RunName {
            namespace: Fingerprint::from_bytes([1; 16]),
            last: PageKey::from_bytes(bytes),
        }
    }

    #[test]
    fn a_prefix_is_searched_for_after_a_pause_that_grows() {
        let runs: Vec<RunName> = (0..3).map(run).collect();
        let (mut searches, mut now) = (Searches::default(), Instant::now());
        let pauses = Pauses {
            first: SECOND,
            longest: 3 * SECOND,
        };
        assert!(!searches.add([].into_iter(), now));
        for pause in [1, 2, 3, 3] {
            assert!(searches.add(runs.iter().copied(), now));
            assert!(!searches.add(runs.iter().copied(), now + 9 * SECOND));
            let search = searches.next();
            let search = search.unwrap_or_else(|| Search(Vec::new()));
            assert_eq!(search.0, runs);
            // It is being made.
            assert!(!searches.add(runs.iter().copied(), now));
            searches.end(&search, search.0.first(), now, pauses);
            assert!(!searches.add(runs.iter().copied(), now + pause * SECOND / 2));
            now += pause * SECOND;
        }
        assert!(searches.add(runs.iter().copied(), now));
        let found = searches.next().unwrap_or_else(|| Search(Vec::new()));
        searches.end(&found, found.0.get(1), now, pauses);
        // It may be forgotten at once.
        assert!(searches.add(runs.iter().copied(), now));
        assert!(!searches.add(runs[1..].iter().copied(), now));
    }

    #[test]
    fn a_search_that_was_dropped_may_be_made_at_once() {
        let (mut searches, now) = (Searches::default(), Instant::now());
        let mut add = |at: usize| searches.add([run(at)].into_iter(), now);
        assert!((0..=SEARCHES_MAX).all(&mut add));
        assert!(add(0) && !add(SEARCHES_MAX));
        searches.clear();
        assert!(searches.add([run(SEARCHES_MAX)].into_iter(), now));
    }
}
