//! Selects the faster of two transfer modes by measuring the actual transfers.
//!
//! Reading directly into a pool of 4 KiB memory pages can be slower than reading into huge pages
//! and copying. It depends on the kernel, the disk and the allocation of the pool. Therefore the
//! first transfers alternate between both modes, in runs of at most [`RUN_BYTES`], and the mode
//! with the faster best run is kept. The best run is used and not the mean, because other load on
//! the machine only makes runs slower. Batches of large pages are divided into several runs, so
//! that at most a gigabyte is transferred before the choice.

use std::time::Duration;

use larder_handle::config::Transfer;
use larder_sync::Mutex;

/// Runs of each mode before the choice.
const RUNS: u32 = 4;

/// Bytes per run, unless one page needs more: the capacity of a buffer.
pub const RUN_BYTES: usize = 64 << 20;

/// Minimum bytes of a run that counts.
const BYTES_MIN: u64 = 256 << 10;

/// How page data is transferred between pool and device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Directly.
    Direct,
    /// Through a buffer on huge pages.
    Bounce,
}

/// The trial for one direction of one pool.
#[derive(Debug)]
pub struct Trial {
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// Number of runs and bytes per second of the best run: direct, and through the buffer.
    Open {
        direct: (u32, f64),
        bounce: (u32, f64),
    },
    Chosen(Way, String),
}

impl Trial {
    /// Starts a trial. There is none if the mode is configured, if only one mode is possible, or if
    /// the pool is on huge pages.
    #[must_use]
    pub fn new(
        transfer: Transfer,
        needs_bounce: Option<&str>,
        is_aligned: bool,
        is_huge: bool,
    ) -> Trial {
        let chosen = |way, why: &str| State::Chosen(way, why.to_owned());
        let state = match (needs_bounce, transfer) {
            (Some(why), _) => chosen(Way::Bounce, why),
            (None, _) if !is_aligned => chosen(Way::Direct, "not aligned: the engine copies"),
            (None, Transfer::Direct) => chosen(Way::Direct, "configured"),
            (None, Transfer::Bounce) => chosen(Way::Bounce, "configured"),
            (None, Transfer::Auto) if is_huge => chosen(Way::Direct, "the pool has huge pages"),
            (None, Transfer::Auto) => State::Open {
                direct: (0, 0.0),
                bounce: (0, 0.0),
            },
        };
        Trial {
            state: Mutex::new(state),
        }
    }

    /// The next mode, and the maximum number of pages before the next call. The batch has `pages`
    /// pages of `page_bytes` bytes.
    #[must_use]
    pub fn next(&self, pages: usize, page_bytes: usize) -> (Way, usize) {
        let run = (RUN_BYTES / page_bytes.max(1)).clamp(1, pages.max(1));
        match &*self.state.lock() {
            State::Chosen(way, _) => (*way, pages),
            State::Open { direct, bounce } if bounce.0 < direct.0 => (Way::Bounce, run),
            State::Open { .. } => (Way::Direct, run),
        }
    }

    /// Records the result of a run with the bytes actually transferred. Returns a description of
    /// the choice, if it was made now.
    pub fn ran(&self, way: Way, bytes: u64, took: Duration) -> Option<String> {
        let mut state = self.state.lock();
        let State::Open { direct, bounce } = &mut *state else {
            return None;
        };
        if bytes < BYTES_MIN || took.is_zero() {
            return None;
        }
        let run = match way {
            Way::Direct => &mut *direct,
            Way::Bounce => &mut *bounce,
        };
        let rate = bytes as f64 / took.as_secs_f64();
        *run = (run.0 + 1, run.1.max(rate));
        if direct.0 < RUNS || bounce.0 < RUNS {
            return None;
        }
        let (straight, copied) = (direct.1 / 1e9, bounce.1 / 1e9);
        let way = if copied > straight {
            Way::Bounce
        } else {
            Way::Direct
        };
        let why =
            format!("measured: direct {straight:.2} GB/s, through huge pages {copied:.2} GB/s");
        let said = format!("{}, {why}", name(way));
        *state = State::Chosen(way, why);
        Some(said)
    }

    /// The mode and the reason, for logs.
    #[must_use]
    pub fn describe(&self) -> String {
        match &*self.state.lock() {
            State::Chosen(way, why) => format!("{} ({why})", name(*way)),
            State::Open { direct, bounce } => {
                let runs = direct.0.min(RUNS) + bounce.0.min(RUNS);
                format!(
                    "direct or bounce (measured on the first transfers: {runs} of {} runs)",
                    2 * RUNS
                )
            }
        }
    }
}

fn name(way: Way) -> &'static str {
    match way {
        Way::Direct => "direct",
        Way::Bounce => "bounce",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn run(direct_ms: u64, bounce_ms: u64) -> (Trial, String) {
        let trial = Trial::new(Transfer::Auto, None, true, false);
        for _ in 0..100 {
            let (way, _) = trial.next(1, 1 << 20);
            let took = match way {
                Way::Direct => direct_ms,
                Way::Bounce => bounce_ms,
            };
            if let Some(said) = trial.ran(way, 1 << 20, Duration::from_millis(took)) {
                return (trial, said);
            }
        }
        panic!("nothing was chosen");
    }

    #[test]
    fn the_faster_way_is_kept() {
        let (trial, said) = run(10, 3);
        assert_eq!(trial.next(8, 1 << 20), (Way::Bounce, 8));
        assert!(said.starts_with("bounce"), "{said}");
        let (trial, said) = run(3, 10);
        assert_eq!(trial.next(8, 1 << 20), (Way::Direct, 8));
        assert!(said.starts_with("direct"), "{said}");
        assert!(trial.describe().contains("GB/s"));
    }

    #[test]
    fn a_configured_or_required_mode_is_not_measured() {
        let way = |transfer, needs, aligned| {
            let trial = Trial::new(transfer, needs, aligned, true);
            trial.next(1, 4096).0
        };
        assert_eq!(way(Transfer::Direct, Some("gathered"), true), Way::Bounce);
        assert_eq!(way(Transfer::Bounce, None, true), Way::Bounce);
        assert_eq!(way(Transfer::Auto, None, false), Way::Direct);
        let huge = Trial::new(Transfer::Auto, None, true, true);
        assert!(huge.describe().contains("huge pages"));
    }

    #[test]
    fn small_runs_do_not_count() {
        let trial = Trial::new(Transfer::Auto, None, true, false);
        for _ in 0..100 {
            assert_eq!(trial.ran(Way::Direct, 4096, Duration::from_millis(1)), None);
        }
        assert_eq!(trial.next(1, 4096).0, Way::Direct);
        assert!(trial.describe().contains("0 of 8 runs"));
        trial.ran(Way::Direct, 1 << 20, Duration::from_millis(1));
        trial.ran(Way::Bounce, 1 << 20, Duration::from_millis(1));
        trial.ran(Way::Direct, 1 << 20, Duration::from_millis(1));
        assert!(trial.describe().contains("3 of 8 runs"));
    }

    #[test]
    fn during_a_trial_a_large_batch_is_divided_into_runs() {
        let trial = Trial::new(Transfer::Auto, None, true, false);
        let pages = |page_bytes| trial.next(128, page_bytes).1;
        assert_eq!(pages(128 << 10), 128);
        assert_eq!(pages(1 << 20), RUN_BYTES >> 20);
        assert_eq!(pages(2 * RUN_BYTES), 1);
        assert_eq!(trial.next(3, 1 << 20).1, 3);
    }
}
