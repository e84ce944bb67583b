//! Which volumes have gone silent.
//!
//! A volume counts as hung if it owes answers to reads of this handle and has given none of them
//! for the hang limit. Reads of its pages then miss at once instead of piling up. Any answer ends
//! this state. One read in each hang limit goes through as a probe, so that an answer can come at
//! all.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use larder_base::runtime::Instant;
use larder_disk::DiskError;

/// Longest limit. A longer one has the same effect.
const LIMIT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

pub(crate) struct Hangs {
    volumes: Vec<Silence>,
    epoch: Instant,
    limit: Duration,
}

/// Moments in milliseconds since the epoch, which is at one; zero for none.
#[derive(Default)]
struct Silence {
    /// Reads that were requested and have not ended.
    owed: AtomicU64,
    answered_at: AtomicU64,
    /// Start of the silence, once a caller has given up waiting for an answer.
    owes_since: AtomicU64,
    /// When the next read may go through.
    probe_at: AtomicU64,
}

impl Hangs {
    pub(super) fn new(volumes: usize, limit: Duration) -> Hangs {
        Hangs {
            volumes: (0..volumes).map(|_| Silence::default()).collect(),
            epoch: Instant::now(),
            limit: limit.min(LIMIT_MAX),
        }
    }

    /// How long a volume may be silent.
    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// Whether a read of this volume must miss at once.
    pub(super) fn is_hung(&self, volume: usize) -> bool {
        self.volumes[volume].is_hung(self.now_ms(), self.limit_ms())
    }

    /// A read of this volume is requested.
    pub(super) fn asked(&self, volume: usize) {
        self.volumes[volume].owed.fetch_add(1, Relaxed);
    }

    /// A caller has waited for an answer of this volume for `waited`, and none came.
    pub(super) fn fell_silent(&self, volume: usize, waited: Duration) {
        self.volumes[volume].fell_silent(self.now_ms(), millis(waited));
    }

    /// A requested read of this volume has ended with this result.
    pub(super) fn answered<T>(&self, volume: usize, result: &Result<T, DiskError>) {
        self.volumes[volume].ended();
        // A read that was refused before it reached the volume is no sign of life.
        if !matches!(result, Err(DiskError::Deadline | DiskError::Shutdown)) {
            self.volumes[volume].answered(self.now_ms());
        }
    }

    fn limit_ms(&self) -> u64 {
        millis(self.limit).max(1)
    }

    fn now_ms(&self) -> u64 {
        millis(self.epoch.elapsed()) + 1
    }
}

impl Silence {
    fn is_hung(&self, now: u64, limit: u64) -> bool {
        let owes_since = self.owes_since.load(Relaxed);
        if owes_since == 0 || self.owed.load(Relaxed) == 0 || now < owes_since + limit {
            return false;
        }
        let probe_at = self.probe_at.load(Relaxed);
        if now < probe_at {
            return true;
        }
        // The thread that advances the probe time is the probe and goes through. At the first time
        // there is no probe: that thread only detects the silence.
        let moved = self
            .probe_at
            .compare_exchange(probe_at, now + limit, Relaxed, Relaxed);
        probe_at == 0 || moved.is_err()
    }

    fn fell_silent(&self, now: u64, waited: u64) {
        let since = now.saturating_sub(waited).max(1);
        // One missing answer is no silence while others arrive.
        if self.answered_at.load(Relaxed) <= since {
            let _ = self.owes_since.compare_exchange(0, since, Relaxed, Relaxed);
        }
    }

    fn ended(&self) {
        if self.owed.fetch_sub(1, Relaxed) == 1 {
            self.clear();
        }
    }

    fn answered(&self, now: u64) {
        self.answered_at.store(now, Relaxed);
        self.clear();
    }

    fn clear(&self) {
        self.owes_since.store(0, Relaxed);
        self.probe_at.store(0, Relaxed);
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 10_000;

    fn owing() -> Silence {
        Silence {
            owed: AtomicU64::new(1),
            ..Silence::default()
        }
    }

    #[test]
    fn a_silent_volume_is_hung_until_it_answers_and_its_neighbour_is_not() {
        let hangs = Hangs::new(2, Duration::from_secs(3600));
        assert!(!hangs.is_hung(0));
        (0..4).for_each(|_| hangs.asked(0));
        hangs.volumes[0].fell_silent(1 << 40, hangs.limit_ms());
        let is_hung = |volume: usize| hangs.volumes[volume].is_hung(1 << 40, hangs.limit_ms());
        assert!(is_hung(0) && !is_hung(1));
        for no_answer in [DiskError::Deadline, DiskError::Shutdown] {
            hangs.answered(0, &Err::<(), _>(no_answer));
            assert!(is_hung(0));
        }
        hangs.answered(0, &Err::<(), _>(DiskError::Os(libc::EIO)));
        assert!(!is_hung(0));
    }

    #[test]
    fn a_volume_that_owes_nothing_is_not_silent() {
        let hangs = Hangs::new(1, Duration::from_secs(3600));
        hangs.asked(0);
        // Its deadline passed before it got to the device.
        hangs.fell_silent(0, Duration::ZERO);
        hangs.answered(0, &Err::<(), _>(DiskError::Deadline));
        hangs.asked(0);
        assert!(!hangs.volumes[0].is_hung(1 << 40, hangs.limit_ms()));
    }

    #[test]
    fn one_read_goes_through_after_each_hang_limit_while_others_wait() {
        let silence = owing();
        silence.fell_silent(50_000, LIMIT);
        assert!(silence.is_hung(50_000, LIMIT));
        // The call without an answer reports the silence again and again.
        silence.fell_silent(59_000, LIMIT);
        assert!(silence.is_hung(59_999, LIMIT));
        assert!(!silence.is_hung(60_000, LIMIT), "the probe goes through");
        assert!(
            silence.is_hung(60_000, LIMIT),
            "the next waits for its answer"
        );
        silence.answered(60_001);
        assert!(!silence.is_hung(60_001, LIMIT));
    }

    #[test]
    fn a_volume_that_answers_others_is_not_silent() {
        let silence = owing();
        silence.answered(45_000);
        silence.fell_silent(50_000, LIMIT);
        assert!(!silence.is_hung(90_000, LIMIT));
        silence.fell_silent(55_000, LIMIT);
        assert!(silence.is_hung(55_000, LIMIT));
    }

    #[test]
    fn waits_that_are_shorter_than_the_limit_count_together() {
        let silence = owing();
        for now in [1_000, 2_000, 9_000] {
            silence.fell_silent(now, 1_000);
            assert!(!silence.is_hung(now, LIMIT));
        }
        assert!(silence.is_hung(10_001, LIMIT));
    }
}
