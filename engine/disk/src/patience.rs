//! The time that an open spends on reads that fail and are tried again.
//!
//! A controller that resets, or a fabric that switches paths, fails reads for a second or two. One
//! [`Patience`] covers all reads of an open, so that a medium with many bad places delays the open
//! once.

use larder_base::runtime::{Instant, Mutex, thread};
use std::time::Duration;

/// Most time of one open for further tries.
const MOST: Duration = Duration::from_secs(4);

/// The pause before the first further try. It doubles with each try, up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// The time that is left for further tries.
#[derive(Debug)]
pub struct Patience {
    left: Mutex<Duration>,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            left: Mutex::new(MOST),
        }
    }
}

impl Patience {
    /// Without time for a further try.
    pub fn none() -> Patience {
        Patience {
            left: Mutex::new(Duration::ZERO),
        }
    }

    /// Calls `again` after growing pauses, until it returns `true` or no time is left.
    pub fn spend(&self, mut again: impl FnMut() -> bool) {
        let mut pause = PAUSE_MIN;
        loop {
            let left = *self.left.lock();
            if left.is_zero() {
                return;
            }
            pause = pause.min(left);
            let begun = Instant::now();
            thread::sleep(pause);
            let is_over = again();
            // The pause counts even if the clock stands still.
            let spent = begun.elapsed().max(pause);
            let mut left = self.left.lock();
            *left = left.saturating_sub(spent);
            if is_over {
                return;
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}
