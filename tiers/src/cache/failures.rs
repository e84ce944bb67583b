//! Log lines of the counters that count failures: one at the first growth of a counter, then at
//! most one a minute.

use std::time::{Duration, Instant};

use crate::core::Stats;

/// Least time between two lines of one counter.
const PAUSE: Duration = Duration::from_secs(60);

/// A counter, and the meaning of its growth with the remedy.
struct Counter {
    of: fn(&Stats) -> u64,
    line: &'static str,
}

const COUNTERS: [Counter; 12] = [
    Counter {
        of: |stats| stats.backup_no_room,
        line: "pages were not copied to L2, because it has no room: enlarge L2",
    },
    Counter {
        of: |stats| stats.states_no_room,
        line: "states were not kept at borders of pages, because L1 has no room for them: enlarge \
               the pool of states",
    },
    Counter {
        of: |stats| stats.backup_failed,
        line: "copies of pages to L2 failed, or those of pages before them: L3 does not get them",
    },
    Counter {
        of: |stats| stats.load_failed,
        line: "loads of pages into L1 failed: their requests are broken and must be restarted",
    },
    Counter {
        of: |stats| stats.forward_failed,
        line: "pages left L1 because a forward failed: their requests must be restarted",
    },
    Counter {
        of: |stats| stats.subtree_dropped,
        line: "pages were dropped with a page before them that could not be copied to L2: \
               enlarge L2",
    },
    Counter {
        of: |stats| stats.put_refused,
        line: "pages left L2 without a write to L3: they come faster than L3 writes, or L3 did not \
               store them. A longer queue of writes takes longer bursts",
    },
    Counter {
        of: |stats| stats.put_declined,
        line: "pages left L2 that L3 had not taken late: a budget of writes does so, and other \
               refusals",
    },
    Counter {
        of: |stats| stats.put_failed,
        line: "L3 did not store pages; see its own log lines and counters of refused pages",
    },
    Counter {
        of: |stats| stats.prefetch_short,
        line: "L3 did not return pages that it had confirmed",
    },
    Counter {
        of: |stats| stats.prefetch_no_room,
        line: "pages of L3 were not read, because L2 has no room: enlarge L2",
    },
    Counter {
        of: |stats| stats.prefetch_orphans,
        line: "pages read from L3 were discarded, because the page before them had left L2: \
               enlarge L2",
    },
];

/// The counters at the last call and at their last lines.
#[derive(Default)]
pub(super) struct Failures {
    logged: [(u64, Option<Instant>); COUNTERS.len()],
}

impl Failures {
    /// Logs the counters that have grown since their last lines.
    pub(super) fn log(&mut self, stats: &Stats) {
        for (counter, (logged, last)) in COUNTERS.iter().zip(&mut self.logged) {
            let found = (counter.of)(stats);
            if found == *logged || last.is_some_and(|last| last.elapsed() < PAUSE) {
                continue;
            }
            // runbook: pages were not copied to L2, because it has no room
            // runbook: states were not kept at borders of pages
            // runbook: copies of pages to L2 failed
            // runbook: loads of pages into L1 failed
            // runbook: pages left L1 because a forward failed
            // runbook: pages were dropped with a page before them
            // runbook: pages left L2 without a write to L3
            // runbook: pages left L2 that L3 had not taken late
            // runbook: L3 did not store pages
            // runbook: L3 did not return pages that it had confirmed
            // runbook: pages of L3 were not read, because L2 has no room
            // runbook: pages read from L3 were discarded
            tracing::warn!("{} {}", found - *logged, counter.line);
            (*logged, *last) = (found, Some(Instant::now()));
        }
    }
}
