//! Which of two ways is faster here, found out on the work itself.
//!
//! Reading straight into a pool of 4 KiB memory pages can be slower than reading into huge pages and copying: it depends on the
//! kernel, the disk and how the pool was allocated. So the first batches go both ways in turn, and the way with the
//! better best run is kept. The best and not the mean: whatever else the machine does only ever makes a run slower.

use std::time::Duration;

use parking_lot::Mutex;

use crate::config::Transfer;

/// Runs of each way before one is chosen.
const RUNS: u32 = 4;

/// Bytes below which a run says nothing.
const BYTES_MIN: u64 = 256 << 10;

/// How page data goes between pool and device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Straight.
    Direct,
    /// Through a buffer on huge pages.
    Bounce,
}

/// One direction of one pool.
#[derive(Debug)]
pub struct Trial {
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// Runs and bytes per second of the best one, straight and through the buffer.
    Open {
        direct: (u32, f64),
        bounce: (u32, f64),
    },
    Chosen(Way, String),
}

impl Trial {
    /// A trial, unless the way is prescribed or there is only one, or the pool lies on huge pages itself.
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

    /// The way for the next batch.
    #[must_use]
    pub fn way(&self) -> Way {
        match &*self.state.lock() {
            State::Chosen(way, _) => *way,
            State::Open { direct, bounce } if bounce.0 < direct.0 => Way::Bounce,
            State::Open { .. } => Way::Direct,
        }
    }

    /// What came of a batch: bytes that really moved. Says what was chosen, if that is now.
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
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
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

    /// The way and why, for people.
    #[must_use]
    pub fn describe(&self) -> String {
        match &*self.state.lock() {
            State::Chosen(way, why) => format!("{} ({why})", name(*way)),
            State::Open { .. } => {
                "direct or bounce (to be measured on the first batches)".to_owned()
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
            let way = trial.way();
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
        assert_eq!(trial.way(), Way::Bounce);
        assert!(said.starts_with("bounce"), "{said}");
        let (trial, said) = run(3, 10);
        assert_eq!(trial.way(), Way::Direct);
        assert!(said.starts_with("direct"), "{said}");
        assert!(trial.describe().contains("GB/s"));
    }

    #[test]
    fn what_is_prescribed_or_needed_is_not_tried() {
        let way = |transfer, needs, aligned| Trial::new(transfer, needs, aligned, true).way();
        assert_eq!(way(Transfer::Direct, Some("gathered"), true), Way::Bounce);
        assert_eq!(way(Transfer::Bounce, None, true), Way::Bounce);
        assert_eq!(way(Transfer::Auto, None, false), Way::Direct);
        let huge = Trial::new(Transfer::Auto, None, true, true);
        assert!(huge.describe().contains("huge pages"));
    }

    #[test]
    fn runs_that_moved_little_decide_nothing() {
        let trial = Trial::new(Transfer::Auto, None, true, false);
        for _ in 0..100 {
            assert_eq!(trial.ran(Way::Direct, 4096, Duration::from_millis(1)), None);
        }
        assert_eq!(trial.way(), Way::Direct);
    }
}
