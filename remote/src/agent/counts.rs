//! The counters of an agent.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counts {
    ($($count:ident $name:literal,)*) => {
        /// A counter.
        #[derive(Clone, Copy, Debug)]
        pub(super) enum Count {
            $($count,)*
        }

        /// The names of the counters, in their order.
        const NAMES: &[&str] = &[$($name,)*];
    };
}

counts! {
    RunsPublished "published_runs",
    BytesPublished "published_bytes",
    RunsPresent "present_runs",
    RunsTouched "touched_runs",
    RunsDroppedQueue "dropped_queue_runs",
    RunsDroppedBudget "dropped_budget_runs",
    RunsDroppedAbsent "dropped_absent_runs",
    RunsDroppedFailed "dropped_failed_runs",
    PagesPromised "promised_pages",
    RunsTooSlow "too_slow_runs",
    RunsFetched "fetched_runs",
    BytesFetched "fetched_bytes",
    PagesStored "stored_pages",
    PagesRefused "refused_pages",
    PagesFaulty "faulty_pages",
    RunsFaulty "faulty_runs",
    RunsUnreadable "unreadable_runs",
    RunsGone "gone_runs",
    RunsLate "late_runs",
    FetchesFailed "failed_fetches",
    BreakerOpenings "breaker_openings",
    Questions "search_requests",
    RunsSearched "searched_runs",
    Listings "listings",
    ListingsFailed "failed_listings",
}

/// Counters since the agent was made.
#[derive(Default)]
pub(super) struct Counts([AtomicU64; NAMES.len()]);

impl Counts {
    pub(super) fn add(&self, what: Count, number: u64) {
        self.0[what as usize].fetch_add(number, Ordering::Relaxed);
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
