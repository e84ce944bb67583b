//! Prefixes whose runs are not known, for a search in the remote.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use larder_base::runtime::Instant;
use larder_format::{Fingerprint, KeyPrefix, PageKey};

use crate::run::RunName;

/// Most searches that wait: beyond it the oldest are dropped.
const SEARCHES_MAX: usize = 256;

/// Most runs of a search.
const RUNS_MAX: usize = 4096;

/// Most runs that are remembered as absent.
const ABSENT_MAX: usize = 1 << 16;

/// Consecutive runs of a chain.
pub(super) struct Search(pub(super) Vec<RunName>);

/// The searches that wait, and the runs that were not found.
#[derive(Default)]
pub(super) struct Searches {
    waiting: VecDeque<Search>,
    /// First runs of searches that wait or were in vain, with the end of their memory.
    absent: HashMap<(Fingerprint, KeyPrefix), Instant>,
    /// In the order of their insertion.
    order: VecDeque<(Fingerprint, KeyPrefix)>,
}

impl Searches {
    /// Queues a search for the consecutive runs that end in these pages, unless the first was
    /// searched for in the last `memory`. Returns whether it is queued.
    pub(super) fn add<'a>(
        &mut self,
        namespace: Fingerprint,
        last: impl Iterator<Item = &'a PageKey>,
        now: Instant,
        memory: Duration,
    ) -> bool {
        let name = |last: &PageKey| RunName {
            namespace,
            last: *last,
        };
        let runs: Vec<RunName> = last.take(RUNS_MAX).map(name).collect();
        let Some(first) = runs.first() else {
            return false;
        };
        let is_absent = self.absent.get(&id(first));
        if is_absent.is_some_and(|until| now < *until) {
            return false;
        }
        self.note_absent(first, now + memory);
        self.waiting.push_back(Search(runs));
        if self.waiting.len() > SEARCHES_MAX {
            self.waiting.pop_front();
        }
        true
    }

    /// A run was not found: it is not searched for until this moment.
    pub(super) fn note_absent(&mut self, run: &RunName, until: Instant) {
        if self.absent.insert(id(run), until).is_some() {
            return;
        }
        self.order.push_back(id(run));
        if self.order.len() > ABSENT_MAX {
            let oldest = self.order.pop_front();
            oldest.and_then(|oldest| self.absent.remove(&oldest));
        }
    }

    pub(super) fn next(&mut self) -> Option<Search> {
        self.waiting.pop_front()
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }
}

fn id(run: &RunName) -> (Fingerprint, KeyPrefix) {
    (run.namespace, run.last.prefix())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_searched_for_once_in_a_while() {
        let space = Fingerprint::from_bytes([1; 16]);
        let pages: Vec<PageKey> = (0..3).map(|at| PageKey::from_bytes([at; 32])).collect();
        let (mut searches, now, memory) =
            (Searches::default(), Instant::now(), Duration::from_secs(60));
        assert!(!searches.add(space, [].iter(), now, memory));
        assert!(searches.add(space, pages.iter(), now, memory));
        assert!(!searches.add(space, pages.iter(), now + memory / 2, memory));
        let found = searches.next().map(|search| search.0);
        let last = found.unwrap_or_default();
        let last: Vec<PageKey> = last.iter().map(|run| run.last).collect();
        assert_eq!(last, pages);
        assert!(searches.next().is_none());
        assert!(searches.add(space, pages.iter(), now + memory, memory));
    }
}
