//! Whether pages of a prompt are read faster than computed.
//!
//! Computing takes a time in proportion to the tokens, which is configured. Reading takes a time in
//! proportion to the bytes, which is measured on the reads of this process. A slower read replaces
//! the measured time at once, a faster one shortens it by a part: a read that was not worth it
//! costs the user time, a page that was computed costs nothing more than without a store.
//!
//! While no time is known, nothing is worth a read. Where pages are left unread there are no reads
//! to learn from, so [`Worth::should_measure`] says when to read some of them beside the requests.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use larder_sync::Mutex;

/// Minimum bytes of a read that is measured: the time of a shorter one is mostly its call.
const BYTES_MIN: u64 = 64 << 10;

/// The part of the difference by which a faster read shortens the measured time.
const EASE: f64 = 0.25;

/// Pause between two measurements while pages are left unread.
const MEASURE_AGAIN: Duration = Duration::from_secs(5);

/// The part of an engine's own limit on a read that is used: times vary.
const CAUTION: f64 = 0.75;

/// Pages that a lookup has found.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// How many, from the start of those requested.
    pub pages: usize,
    /// Tokens per page.
    pub page_tokens: usize,
    /// Bytes per page.
    pub page_bytes: usize,
    /// Bytes that a read moves in addition, for any number of pages.
    pub more_bytes: usize,
    /// How long the engine waits for a read of them.
    pub limit: Option<Duration>,
}

/// Why found pages are left unread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Computing them is faster, or the engine would stop waiting for them.
    Slow,
    /// The time of a read is not known yet.
    Unmeasured,
}

#[derive(Debug, Default)]
struct State {
    seconds_per_byte: Option<f64>,
    measured: Option<Instant>,
    is_measuring: bool,
}

/// See the module documentation.
#[derive(Debug)]
pub struct Worth {
    tokens_per_second: f64,
    state: Mutex<State>,
}

impl Worth {
    /// For an engine that computes so many tokens per second.
    #[must_use]
    pub fn new(tokens_per_second: NonZeroU32) -> Worth {
        Worth {
            tokens_per_second: f64::from(tokens_per_second.get()),
            state: Mutex::default(),
        }
    }

    /// Records the time of a read of so many bytes.
    pub fn read(&self, bytes: u64, took: Duration) {
        if bytes < BYTES_MIN {
            return;
        }
        let now = took.as_secs_f64() / bytes as f64;
        let mut state = self.state.lock();
        state.measured = Some(Instant::now());
        state.seconds_per_byte = Some(match state.seconds_per_byte {
            Some(known) if now < known => known + (now - known) * EASE,
            _ => now,
        });
    }

    /// Seconds that a read of so many bytes takes, if known.
    #[must_use]
    pub fn seconds(&self, bytes: usize) -> Option<f64> {
        Some(self.state.lock().seconds_per_byte? * bytes as f64)
    }

    /// How many of the found pages to read, and why the others are left.
    #[must_use]
    pub fn worthwhile(&self, found: Found) -> (usize, Option<Why>) {
        if found.pages == 0 {
            return (0, None);
        }
        let reading = |pages: usize| self.seconds(pages * found.page_bytes + found.more_bytes);
        let Some(all) = reading(found.pages) else {
            return (0, Some(Why::Unmeasured));
        };
        let computing = |pages: usize| (pages * found.page_tokens) as f64 / self.tokens_per_second;
        let limit = found
            .limit
            .map_or(f64::INFINITY, |limit| limit.as_secs_f64() * CAUTION);
        if all <= limit && all < computing(found.pages) {
            return (found.pages, None);
        }
        // Both times grow evenly: the longest prefix within the limit is worth most.
        let mut pages = found.pages;
        if all > limit {
            let is_in_time = |pages: usize| reading(pages).is_some_and(|read| read <= limit);
            pages = longest(found.pages, is_in_time);
        }
        match reading(pages) {
            Some(read) if read < computing(pages) => (pages, Some(Why::Slow)),
            _ => (0, Some(Why::Slow)),
        }
    }

    /// Whether some of the pages that were left unread should be read now, to learn the time. True
    /// for one caller, until it calls [`Worth::has_measured`].
    #[must_use]
    pub fn should_measure(&self) -> bool {
        let mut state = self.state.lock();
        let is_due = |at: Instant| at.elapsed() >= MEASURE_AGAIN;
        if state.is_measuring || !state.measured.is_none_or(is_due) {
            return false;
        }
        state.is_measuring = true;
        true
    }

    /// The measurement is over.
    pub fn has_measured(&self) {
        self.state.lock().is_measuring = false;
    }
}

/// The largest number up to `most` for which `holds`, which holds for all smaller ones too.
fn longest(most: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut good, mut bad) = (0, most + 1);
    while bad - good > 1 {
        let middle = good.midpoint(bad);
        match holds(middle) {
            true => good = middle,
            false => bad = middle,
        }
    }
    good
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const MIB: u64 = 1 << 20;

    /// 64 tokens a page, and a second of computing for 6,400 tokens: 10 ms a page.
    fn worth() -> Worth {
        Worth::new(NonZeroU32::new(6400).unwrap())
    }

    fn found(pages: usize) -> Found {
        Found {
            pages,
            page_tokens: 64,
            page_bytes: 1 << 20,
            more_bytes: 0,
            limit: None,
        }
    }

    #[test]
    fn without_a_measured_read_nothing_is_read() {
        let worth = worth();
        assert_eq!(worth.worthwhile(found(8)), (0, Some(Why::Unmeasured)));
        assert_eq!(worth.worthwhile(found(0)), (0, None));
        // A call that moves next to nothing says nothing of the disk.
        worth.read(4096, Duration::from_secs(1));
        assert_eq!(worth.worthwhile(found(8)), (0, Some(Why::Unmeasured)));
    }

    #[test]
    fn the_faster_of_reading_and_computing_is_chosen_at_every_length() {
        let worth = worth();
        // 9 ms a page, then 11 ms.
        worth.read(10 * MIB, Duration::from_millis(90));
        for pages in [1, 4, 128, 1000] {
            assert_eq!(worth.worthwhile(found(pages)), (pages, None));
        }
        worth.read(10 * MIB, Duration::from_millis(110));
        for pages in [1, 4, 128, 1000] {
            assert_eq!(worth.worthwhile(found(pages)), (0, Some(Why::Slow)));
        }
    }

    #[test]
    fn bytes_that_any_read_moves_make_short_prefixes_worthless() {
        let worth = worth();
        worth.read(10 * MIB, Duration::from_millis(50));
        // A window of 8 pages: 40 ms, and 5 ms a page.
        let found = |pages| Found {
            more_bytes: 8 << 20,
            ..found(pages)
        };
        assert_eq!(worth.worthwhile(found(8)), (0, Some(Why::Slow)));
        assert_eq!(worth.worthwhile(found(9)), (9, None));
    }

    #[test]
    fn no_more_is_read_than_the_engine_waits_for() {
        let worth = worth();
        worth.read(10 * MIB, Duration::from_millis(50));
        let limited = |pages, limit| Found {
            limit: Some(limit),
            ..found(pages)
        };
        // 75 ms of the limit are used, at 5 ms a page.
        let limit = Duration::from_millis(100);
        assert_eq!(worth.worthwhile(limited(15, limit)), (15, None));
        assert_eq!(worth.worthwhile(limited(16, limit)), (15, Some(Why::Slow)));
        let short = Duration::from_millis(4);
        assert_eq!(worth.worthwhile(limited(16, short)), (0, Some(Why::Slow)));
    }

    #[test]
    fn a_slow_read_counts_at_once_and_fast_ones_little_by_little() {
        let worth = worth();
        worth.read(10 * MIB, Duration::from_millis(50));
        worth.read(10 * MIB, Duration::from_millis(450));
        assert!((worth.seconds(10 << 20).unwrap() - 0.45).abs() < 1e-6);
        worth.read(10 * MIB, Duration::from_millis(50));
        assert!((worth.seconds(10 << 20).unwrap() - 0.35).abs() < 1e-6);
        for _ in 0..20 {
            worth.read(10 * MIB, Duration::from_millis(50));
        }
        assert_eq!(worth.worthwhile(found(8)), (8, None));
    }

    #[test]
    fn one_caller_at_a_time_measures_and_not_at_once_again() {
        let worth = worth();
        assert!(worth.should_measure());
        assert!(!worth.should_measure());
        worth.has_measured();
        // It found nothing to read.
        assert!(worth.should_measure());
        worth.read(10 * MIB, Duration::from_millis(50));
        worth.has_measured();
        assert!(!worth.should_measure());
    }
}
