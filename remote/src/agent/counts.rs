//! The counters of an agent.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// A counter.
#[derive(Clone, Copy, Debug)]
pub(super) enum Count {
    RunsPublished,
    BytesPublished,
    RunsPresent,
    RunsDroppedQueue,
    RunsDroppedBudget,
    RunsDroppedAbsent,
    RunsDroppedFailed,
    PagesPromised,
    RunsTooSlow,
    RunsFetched,
    BytesFetched,
    PagesStored,
    PagesRefused,
    PagesFaulty,
    RunsFaulty,
    RunsUnreadable,
    RunsGone,
    RunsLate,
    FetchesFailed,
    BreakerOpenings,
    Questions,
    RunsSearched,
    Listings,
}

const NAMES: [&str; 23] = [
    "published_runs",
    "published_bytes",
    "present_runs",
    "dropped_queue_runs",
    "dropped_budget_runs",
    "dropped_absent_runs",
    "dropped_failed_runs",
    "promised_pages",
    "too_slow_runs",
    "fetched_runs",
    "fetched_bytes",
    "stored_pages",
    "refused_pages",
    "faulty_pages",
    "faulty_runs",
    "unreadable_runs",
    "gone_runs",
    "late_runs",
    "failed_fetches",
    "breaker_openings",
    "search_requests",
    "searched_runs",
    "listings",
];

/// Counters since the agent was made.
#[derive(Default)]
pub(super) struct Counts([AtomicU64; NAMES.len()]);

impl Counts {
    pub(super) fn add(&self, what: Count, number: u64) {
        self.0[what as usize].fetch_add(number, Ordering::Relaxed);
    }

    pub(super) fn of(&self, what: Count) -> u64 {
        self.0[what as usize].load(Ordering::Relaxed)
    }

    /// All of them by name, with the present sizes.
    pub(super) fn all(&self, sizes: &[(&str, u64)]) -> BTreeMap<String, u64> {
        let counts = NAMES.iter().zip(&self.0);
        let counts = counts.map(|(name, count)| (*name, count.load(Ordering::Relaxed)));
        let all = counts.chain(sizes.iter().copied());
        all.map(|(name, number)| (name.to_owned(), number))
            .collect()
    }
}
