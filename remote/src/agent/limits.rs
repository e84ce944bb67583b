//! The budgets of requests and publications, and the breaker. They read no clock: callers pass the
//! time.

use std::time::Duration;

use larder_base::runtime::Instant;

use super::options::AgentOptions;
use crate::error::RemoteError;

/// Failures in a row that open the breaker.
const FAILURES_MAX: u32 = 5;

/// Time in which a budget that was halved doubles.
const DOUBLING: Duration = Duration::from_mins(1);

/// Longest time whose share of a budget is there at its begin.
const BEGIN: Duration = Duration::from_hours(1);

/// A budget: an amount for each period. The rest of it may be spent at once.
#[derive(Clone, Copy)]
pub(super) struct Budget {
    /// The amount as it is configured.
    whole: f64,
    /// The amount at present.
    most: f64,
    period: Duration,
    left: f64,
    at: Instant,
}

impl Budget {
    /// A budget with the share of an hour: restarts do not multiply the amount of a day.
    pub(super) fn new(whole: u64, period: Duration, now: Instant) -> Budget {
        let whole = whole as f64;
        Budget {
            whole,
            most: whole,
            period,
            left: whole * BEGIN.div_duration_f64(period).min(1.0),
            at: now,
        }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at);
        self.at = now;
        let gained = self.most * passed.div_duration_f64(self.period);
        let grown = self.most * passed.div_duration_f64(DOUBLING).exp2();
        self.most = grown.min(self.whole);
        self.left = (self.left + gained).min(self.most);
    }

    /// Whether there is any.
    pub(super) fn is_any(&self) -> bool {
        self.whole > 0.0
    }

    /// Whether this amount is left now.
    pub(super) fn has(&mut self, amount: u64, now: Instant) -> bool {
        self.refill(now);
        self.left >= amount as f64
    }

    /// Spends an amount, if this is left behind it.
    pub(super) fn take(&mut self, amount: u64, left: u64, now: Instant) -> bool {
        let may = self.has(amount.saturating_add(left), now);
        if may {
            self.spend(amount, now);
        }
        may
    }

    /// Gives back an amount that was spent and is not needed.
    pub(super) fn give_back(&mut self, amount: u64) {
        self.left = (self.left + amount as f64).min(self.most);
    }

    /// Spends an amount, even if less is left.
    pub(super) fn spend(&mut self, amount: u64, now: Instant) {
        self.refill(now);
        self.left -= amount as f64;
    }

    /// The time until this amount is left.
    pub(super) fn wait(mut self, amount: u64, now: Instant) -> Duration {
        self.refill(now);
        let lacks = amount as f64 - self.left;
        if lacks <= 0.0 {
            return Duration::ZERO;
        }
        self.period.mul_f64((lacks / self.most).min(1000.0))
    }

    /// Whole units of the amount that are left.
    pub(super) fn left(mut self, now: Instant) -> u64 {
        self.refill(now);
        self.left as u64
    }

    /// Halves the amount, down to a hundredth of the configured one. It grows back.
    pub(super) fn halve(&mut self, now: Instant) {
        self.refill(now);
        self.most = (self.most / 2.0).max(self.whole / 100.0);
        self.left = self.left.min(self.most);
    }
}

/// The pauses after failures: of the remote, of its listing, and of single runs. Each failure in a
/// row doubles the pause.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pauses {
    pub(super) first: Duration,
    pub(super) longest: Duration,
}

impl Pauses {
    pub(super) fn of(options: &AgentOptions) -> Pauses {
        Pauses {
            first: options.pause,
            longest: options.refresh,
        }
    }

    /// The pause after a failure, by the one before it.
    pub(super) fn next(self, before: Option<Duration>) -> Duration {
        let next = before.map_or(self.first, |before| before * 2);
        next.min(self.longest)
    }
}

/// Keeps requests from a remote that fails.
pub(super) enum Breaker {
    /// Requests are made.
    Closed { failures: u32 },
    /// None is made but a probe, from `until` on.
    Open {
        until: Instant,
        pause: Duration,
        reason: String,
    },
}

impl Breaker {
    pub(super) fn is_closed(&self) -> bool {
        matches!(self, Breaker::Closed { .. })
    }

    /// A request was answered, or a probe.
    pub(super) fn succeeded(&mut self) {
        *self = Breaker::Closed { failures: 0 };
    }

    /// A request failed, or a probe. Returns whether the breaker opened.
    pub(super) fn failed(&mut self, error: &RemoteError, now: Instant, pauses: Pauses) -> bool {
        let is_final = matches!(
            error,
            RemoteError::Denied(_) | RemoteError::Missing(_) | RemoteError::NoService(_)
        );
        let (pause, opens) = match self {
            Breaker::Closed { failures } if !is_final && *failures + 1 < FAILURES_MAX => {
                *failures += 1;
                return false;
            }
            Breaker::Closed { .. } => (pauses.next(None), true),
            Breaker::Open { until, pause, .. } if now >= *until => {
                (pauses.next(Some(*pause)), false)
            }
            // A request that began before it opened.
            Breaker::Open { .. } => return false,
        };
        *self = Breaker::Open {
            until: now + pause,
            pause,
            reason: error.to_string(),
        };
        opens
    }

    /// The time of the next probe; `None` while it is closed.
    pub(super) fn probe_at(&self) -> Option<Instant> {
        match self {
            Breaker::Closed { .. } => None,
            Breaker::Open { until, .. } => Some(*until),
        }
    }

    /// Why it is open.
    pub(super) fn reason(&self) -> Option<&str> {
        match self {
            Breaker::Closed { .. } => None,
            Breaker::Open { reason, .. } => Some(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    const PAUSE: Duration = Duration::from_secs(5);
    const PAUSES: Pauses = Pauses {
        first: PAUSE,
        longest: Duration::from_secs(12),
    };

    #[test]
    fn a_budget_is_spent_and_refilled() {
        let begin = Instant::now();
        let mut budget = Budget::new(100, 10 * SECOND, begin);
        assert!(budget.has(100, begin) && !budget.has(101, begin));
        budget.spend(150, begin);
        assert_eq!(budget.wait(0, begin), 5 * SECOND);
        assert_eq!(budget.wait(50, begin), 10 * SECOND);
        assert_eq!(
            (budget.left(begin), budget.left(begin + 10 * SECOND)),
            (0, 50)
        );
        assert!(!budget.has(1, begin + 5 * SECOND));
        assert!(budget.has(50, begin + 10 * SECOND));
        assert!(!budget.has(101, begin + 1000 * SECOND));
        budget.spend(60, begin + 1000 * SECOND);
        budget.give_back(50);
        assert!(budget.has(90, begin + 1000 * SECOND) && !budget.has(91, begin + 1000 * SECOND));
        budget.give_back(50);
        assert!(!budget.has(101, begin + 1000 * SECOND));
    }

    #[test]
    fn a_budget_of_nothing_has_nothing_for_ever() {
        let begin = Instant::now();
        let mut budget = Budget::new(0, SECOND, begin);
        budget.halve(begin);
        assert!(!budget.take(1, 0, begin + 1000 * SECOND));
        assert_eq!(budget.left(begin + 1000 * SECOND), 0);
        assert_eq!(budget.wait(1, begin), 1000 * SECOND);
    }

    #[test]
    fn a_part_of_a_budget_can_be_left_to_others() {
        let begin = Instant::now();
        let mut budget = Budget::new(100, SECOND, begin);
        assert!(budget.take(90, 10, begin) && !budget.take(1, 10, begin));
        assert!(budget.take(10, 0, begin) && !budget.take(1, 0, begin));
    }

    #[test]
    fn a_budget_that_was_halved_grows_back() {
        let begin = Instant::now();
        let mut budget = Budget::new(1000, SECOND, begin);
        (0..3).for_each(|_| budget.halve(begin));
        assert!(budget.has(125, begin) && !budget.has(126, begin));
        assert!(budget.has(250, begin + DOUBLING) && !budget.has(251, begin + DOUBLING));
        (0..20).for_each(|_| budget.halve(begin + DOUBLING));
        assert!(budget.has(10, begin + DOUBLING) && !budget.has(11, begin + DOUBLING));
        let late = begin + 100 * DOUBLING;
        assert!(budget.has(1000, late) && !budget.has(1001, late));
    }

    #[test]
    fn a_budget_begins_with_the_share_of_an_hour() {
        let begin = Instant::now();
        let mut day = Budget::new(2400, 24 * BEGIN, begin);
        assert!(day.has(100, begin) && !day.has(101, begin));
        assert!(day.has(2400, begin + 23 * BEGIN) && !day.has(2401, begin + 48 * BEGIN));
    }

    #[test]
    fn a_breaker_opens_after_failures_in_a_row_and_closes_with_a_probe() {
        let begin = Instant::now();
        let failed = RemoteError::Deadline;
        let mut breaker = Breaker::Closed { failures: 0 };
        for _ in 1..FAILURES_MAX {
            assert!(!breaker.failed(&failed, begin, PAUSES));
        }
        breaker.succeeded();
        for _ in 1..FAILURES_MAX {
            assert!(!breaker.failed(&failed, begin, PAUSES));
        }
        assert!(breaker.failed(&failed, begin, PAUSES));
        assert_eq!(breaker.probe_at(), Some(begin + PAUSE));
        // Requests from before do not prolong it, probes do.
        assert!(!breaker.failed(&failed, begin, PAUSES));
        assert_eq!(breaker.probe_at(), Some(begin + PAUSE));
        assert!(!breaker.failed(&failed, begin + PAUSE, PAUSES));
        assert_eq!(breaker.probe_at(), Some(begin + 3 * PAUSE));
        assert!(!breaker.failed(&failed, begin + 3 * PAUSE, PAUSES));
        assert_eq!(breaker.probe_at(), Some(begin + 3 * PAUSE + PAUSES.longest));
        breaker.succeeded();
        assert!(breaker.is_closed());
    }

    #[test]
    fn a_denial_opens_the_breaker_at_once() {
        let mut breaker = Breaker::Closed { failures: 0 };
        let denied = RemoteError::Denied("no".to_owned());
        assert!(breaker.failed(&denied, Instant::now(), PAUSES));
        assert!(
            breaker
                .reason()
                .is_some_and(|reason| reason.contains("denied"))
        );
    }
}
