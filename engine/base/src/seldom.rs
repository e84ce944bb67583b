//! Limits how often one log line is written, however often its cause recurs.

use std::time::Duration;

use crate::runtime::{Instant, Mutex};

/// Least time between two lines.
const PAUSE: Duration = Duration::from_secs(60);

/// The limit of one log line.
#[derive(Default)]
pub struct Seldom(Mutex<Lines>);

#[derive(Default)]
struct Lines {
    last: Option<Instant>,
    held_back: u64,
}

impl Seldom {
    /// Counts one occurrence. `Some` if a line is due, with the number of occurrences since the
    /// last line that were not logged.
    #[must_use]
    pub fn is_due(&self) -> Option<u64> {
        let mut lines = self.0.lock();
        if lines.last.is_some_and(|last| last.elapsed() < PAUSE) {
            lines.held_back += 1;
            return None;
        }
        lines.last = Some(Instant::now());
        Some(std::mem::take(&mut lines.held_back))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_first_line_is_due_and_the_next_one_after_the_pause_counts_those_between() {
        let seldom = Seldom::default();
        assert_eq!(seldom.is_due(), Some(0));
        assert_eq!([seldom.is_due(), seldom.is_due()], [None, None]);
        let before = Instant::now().checked_sub(PAUSE).unwrap();
        seldom.0.lock().last = Some(before);
        assert_eq!(seldom.is_due(), Some(2));
        assert_eq!(seldom.is_due(), None);
    }
}
