//! Log lines that explain why pages are not stored or not read. A counter gives the number of
//! cases; the line gives their meaning.
//!
//! Each line is logged only once.

use std::sync::atomic::{AtomicU32, Ordering};

/// A cause that increases a counter of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// There is no store, or it has no owner.
    NoStore,
    /// Pages after a page that was left out are left out too.
    Tail,
    /// The store had no room for them.
    NoRoom,
    /// Every volume refuses writes.
    ReadOnly,
    /// They could not be stored.
    Failed,
    /// They were read, but differ from the stored pages.
    Damaged,
    /// The time limit of a call expired.
    Late,
    /// They are found, and computed faster than read.
    Slow,
    /// They are found, and the time of a read is not known yet.
    Unmeasured,
}

impl Cause {
    /// The counter, and the explanation of the cause.
    fn text(self) -> (&'static str, &'static str) {
        match self {
            Cause::NoStore => (
                "failed",
                "there is no store at the moment, or it has no owner: nothing is stored",
            ),
            Cause::Tail => (
                "dropped",
                "the pages before them in their chain were left out, so these could not be reached",
            ),
            Cause::NoRoom => (
                "dropped",
                "the store has no room for them now: it is too small for the amount written, \
                 or its disk is too slow",
            ),
            Cause::ReadOnly => (
                "dropped",
                "every volume of the store refuses writes and is in read-only service: reads go \
                 on, and nothing is stored; `larder doctor` says why",
            ),
            Cause::Failed => (
                "failed",
                "pages could not be stored: a log line of larder_engine gives the reason",
            ),
            Cause::Damaged => (
                "rank_damaged_pages",
                "pages do not read back as they were stored; they count as misses: look at the \
                 disk",
            ),
            Cause::Late => (
                "late",
                "a batch took longer than `timeout`, and its rest counts as missed: the disk \
                 is too slow for it",
            ),
            Cause::Slow => (
                "rank_slow_pages",
                "stored pages are computed again instead of read: at the configured \
                 `prefill_rate` that takes less time, or SGLang would stop waiting for them",
            ),
            Cause::Unmeasured => (
                "rank_unmeasured_pages",
                "stored pages are computed again instead of read, until the time of a read is \
                 known: it is being measured",
            ),
        }
    }
}

/// The causes that have been explained.
#[derive(Debug, Default)]
pub struct Explained(AtomicU32);

impl Explained {
    /// Explains a cause, the first time.
    pub fn explain(&self, cause: Cause) {
        let bit = 1 << cause as u32;
        if self.0.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            let (count, what) = cause.text();
            tracing::warn!("{what} (counted in `{count}`; logged once)");
        }
    }
}
