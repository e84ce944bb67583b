//! Which volumes have gone silent.
//!
//! A volume that owes answers and gives none for the hang limit counts as hung: reads of its pages miss at once instead
//! of piling up. Any answer clears it. So that an answer can come at all, one call in each hang limit goes through.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest limit that is told apart from none.
const LIMIT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

pub(crate) struct Hangs {
    /// By volume: when the next call may go through, in milliseconds since `epoch`; zero while the volume answers.
    probe_at_ms: Vec<AtomicU64>,
    epoch: Instant,
    limit: Duration,
}

impl Hangs {
    pub(super) fn new(volumes: usize, limit: Duration) -> Hangs {
        Hangs {
            probe_at_ms: (0..volumes).map(|_| AtomicU64::new(0)).collect(),
            epoch: Instant::now(),
            limit: limit.min(LIMIT_MAX),
        }
    }

    /// How long a volume may be silent.
    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// Whether a read of this volume is to miss at once.
    pub(super) fn is_hung(&self, volume: usize) -> bool {
        let probe_at = self.probe_at_ms[volume].load(Ordering::Relaxed);
        if probe_at == 0 {
            return false;
        }
        let now = self.now_ms();
        let next = now + self.limit_ms();
        // Whoever moves the time on is the one that goes through.
        now < probe_at
            || self.probe_at_ms[volume]
                .compare_exchange(probe_at, next, Ordering::Relaxed, Ordering::Relaxed)
                .is_err()
    }

    pub(super) fn fell_silent(&self, volume: usize) {
        self.probe_at_ms[volume].store(self.now_ms() + self.limit_ms(), Ordering::Relaxed);
    }

    pub(super) fn answered(&self, volume: usize) {
        self.probe_at_ms[volume].store(0, Ordering::Relaxed);
    }

    fn limit_ms(&self) -> u64 {
        u64::try_from(self.limit.as_millis()).map_or(u64::MAX / 4, |limit| limit.max(1))
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX / 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_volume_is_hung_until_it_answers_and_its_neighbour_is_not() {
        let hangs = Hangs::new(2, Duration::from_secs(3600));
        assert!(!hangs.is_hung(0));
        hangs.fell_silent(0);
        assert!(hangs.is_hung(0) && !hangs.is_hung(1));
        hangs.answered(0);
        assert!(!hangs.is_hung(0));
    }

    #[test]
    fn one_call_goes_through_each_time_the_limit_has_passed() {
        let hangs = Hangs::new(1, Duration::from_secs(3600));
        hangs.probe_at_ms[0].store(1, Ordering::Relaxed);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(2) {}
        assert!(!hangs.is_hung(0), "the probe goes through");
        assert!(hangs.is_hung(0), "the next call waits for its answer");
    }
}
