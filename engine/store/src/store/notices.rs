//! One log line for each kind of counted failure. The counter gives the number, the line explains
//! the failure.
//!
//! Each line is written the first time only. The counters go on.

use std::sync::atomic::{AtomicU32, Ordering};

use larder_core::core::Counters;
use larder_core::status::Refusal;
use larder_seal::SealError;

/// The kinds that have been logged, one bit each.
#[derive(Debug, Default)]
pub(crate) struct Notices(AtomicU32);

impl Notices {
    fn is_first(&self, kind: u32) -> bool {
        let bit = 1 << kind;
        // A plain load first: this is called again and again.
        self.0.load(Ordering::Relaxed) & bit == 0
            && self.0.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }

    /// Pages of this size were refused.
    pub(crate) fn refused(&self, why: Refusal, page_bytes: u64) {
        let (kind, what) = match why {
            Refusal::NoSpace => (
                0,
                "there is no room now: all pages are leased or being written, or reclaim has \
                 not caught up",
            ),
            Refusal::Busy => (
                1,
                "too many bytes of writes are in flight: the device is slower than the puts",
            ),
            Refusal::WrongShape => (
                2,
                "their parts do not have the shape that their namespace states",
            ),
            Refusal::TooLarge => (
                3,
                "they do not fit a segment: none of this size can ever be stored; create the \
                 store anew with a larger --segment-size",
            ),
            Refusal::Unreachable => (
                4,
                "their chain is longer than all that the store keeps: create a larger store",
            ),
            Refusal::ReadOnly => (5, "the store was opened read-only"),
            Refusal::Closed => (6, "the store is closed or has no owner"),
            Refusal::Quota => (
                13,
                "their group is at the maximum of its quota, and none of its pages can go now; or \
                 their chain is longer than that maximum, or their namespace is in two groups \
                 (`larder quota PATH`)",
            ),
            Refusal::Erased => (20, "their tenant was erased, or is being erased"),
            // The volume's change of service, and a tenant without a key, are logged with their
            // reason; a policy logs for itself.
            Refusal::ReadOnlyService | Refusal::NotAdmitted | Refusal::KeyringFull => return,
            Refusal::Budget => (
                11,
                "the budget of writes does not take them: it takes those first that promise the \
                 most uses; a larger one (--write-budget) stores more of them",
            ),
            Refusal::Exhausted => (
                7,
                "the serial numbers of this run are used up: open the store again",
            ),
        };
        if self.is_first(kind) {
            tracing::warn!(
                page_bytes,
                "pages are refused: {what} (counted in refused_pages; logged once)"
            );
        }
    }

    /// A counted lease was refused.
    pub(crate) fn refused_lease(&self) {
        if self.is_first(8) {
            tracing::warn!(
                "leases are refused: the pages under leases that callers have not returned take a \
                 quarter of the store (logged once)"
            );
        }
    }

    /// Descriptors were not encrypted, and so not written.
    pub(crate) fn unsealed(&self, error: &SealError) {
        if self.is_first(17) {
            tracing::error!(
                %error,
                "descriptors cannot be encrypted: their pages are not stored (logged once)"
            );
        }
    }

    /// A tenant got no key.
    pub(crate) fn keyless(&self, error: &dyn std::error::Error) {
        if self.is_first(18) {
            tracing::error!(
                %error,
                "a tenant gets no key: its pages are refused (logged once)"
            );
        }
    }

    /// A page has its checksum, and does not open.
    pub(crate) fn sealed(&self) {
        if self.is_first(19) {
            tracing::warn!(
                "a page does not open with the key of its tenant, or its tenant is erased: it is \
                 not served, and stays (counted in misses.sealed; logged once)"
            );
        }
    }

    /// Old pages are not removed.
    pub(crate) fn unsettled_clock(&self) {
        if self.is_first(15) {
            tracing::warn!(
                "pages older than the limit of their group are not served, and are not removed: \
                 the kernel does not state that a time service keeps the clock right (logged once)"
            );
        }
    }

    /// Logs the kinds of failure that the core has counted.
    pub(crate) fn counted(&self, counters: &Counters) {
        let kinds = [
            (
                9,
                counters.store.failed_syncs,
                "a sync failed: the pages that it covered are read back and written again \
                 (counted in failed_syncs; logged once)",
            ),
            (
                10,
                counters.store.unfinished,
                "a page whose write the last crash cut short is forgotten (counted in \
                 unfinished_pages; logged once)",
            ),
            (
                12,
                counters.store.evicted_below_minimum,
                "a group lost pages below the minimum of its quota, since nothing else could give \
                 room (counted in evicted_below_minimum_pages; logged once)",
            ),
            (
                14,
                counters.store.expired,
                "pages older than the limit of their group are removed (counted in expired_pages; \
                 logged once)",
            ),
            (
                16,
                counters.store.evicted_pinned,
                "a pinned page was evicted, since nothing else could give room (counted in \
                 evicted_pinned_pages; logged once)",
            ),
        ];
        for (kind, count, what) in kinds {
            if count > 0 && self.is_first(kind) {
                // runbook: a sync failed: the pages that it covered are read back and written again
                // runbook: a page whose write the last crash cut short is forgotten
                // runbook: a group lost pages below the minimum of its quota
                // runbook: pages older than the limit of their group are removed
                // runbook: a pinned page was evicted
                tracing::warn!("{what}");
            }
        }
    }
}
