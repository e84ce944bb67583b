//! The speed of the remote, as fetches measure it, by the number of fetches at once.
//!
//! A server may limit each connection, and a link limits all of them together. So the rate of one
//! fetch is kept for each number of fetches at once. Where none was measured, fewer at once are
//! each at least as fast as more are, and more at once bring at least as many bytes in all.
//!
//! Fetches that begin before the first of them ends are a group. The bytes of a fetch count when
//! it ends, so a group measures when its last fetch ends: by all bytes that arrived meanwhile, and
//! the mean number of fetches at once. It reads no clock: callers pass the time.

use std::time::Duration;

use larder_base::runtime::Instant;

use crate::buffer::Buffer;
use crate::error::RemoteError;

/// Most fetches at once.
pub const CONNECTIONS_MAX: usize = 64;

/// Share of a new measurement in the rate.
const NEWEST: f64 = 0.25;

/// See the [module](self).
pub(super) struct Speed {
    /// Bytes a second of one fetch, by the number of fetches at once, from one on.
    rates: [Option<f64>; CONNECTIONS_MAX],
    /// Time of the last measurement, or of the last attempt at one.
    at: Option<Instant>,
    /// Fetches in progress.
    at_once: usize,
    /// Seconds of all fetches, up to `counted`.
    seconds: f64,
    counted: Option<Instant>,
    /// Bytes that have arrived.
    bytes: u64,
    group: Group,
}

/// Fetches that began before the first of them ended.
#[derive(Clone, Copy, Default)]
struct Group {
    number: u64,
    /// Those of them that are in progress.
    left: usize,
    /// The first has ended: others are not of it.
    is_full: bool,
    /// A fetch of it says nothing about the speed.
    is_void: bool,
    /// At its begin.
    begin: Option<Instant>,
    seconds: f64,
    bytes: u64,
}

/// A fetch in progress: the number of its group, if it is of one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured(Option<u64>);

impl Default for Speed {
    fn default() -> Speed {
        Speed {
            rates: [None; CONNECTIONS_MAX],
            at: None,
            at_once: 0,
            seconds: 0.0,
            counted: None,
            bytes: 0,
            group: Group::default(),
        }
    }
}

impl Speed {
    /// A fetch begins.
    pub(super) fn begin(&mut self, now: Instant) -> Measured {
        self.count(now);
        self.at_once += 1;
        if self.group.left == 0 {
            self.group = Group {
                number: self.group.number + 1,
                begin: Some(now),
                seconds: self.seconds,
                bytes: self.bytes,
                ..Group::default()
            };
        }
        if self.group.is_full {
            return Measured(None);
        }
        self.group.left += 1;
        Measured(Some(self.group.number))
    }

    /// A fetch has brought so many bytes; `None` if it says nothing about the speed.
    pub(super) fn end(&mut self, fetch: Measured, bytes: Option<u64>, now: Instant) {
        self.count(now);
        self.at_once -= 1;
        self.bytes += bytes.unwrap_or_default();
        if fetch.0 != Some(self.group.number) {
            return;
        }
        self.group.is_full = true;
        self.group.is_void |= bytes.is_none();
        self.group.left -= 1;
        let begin = self.group.begin.filter(|_| !self.group.is_void);
        if let (0, Some(begin)) = (self.group.left, begin) {
            let took = now.saturating_duration_since(begin).as_secs_f64().max(1e-6);
            let seconds = (self.seconds - self.group.seconds).max(1e-6);
            let rate = (self.bytes - self.group.bytes) as f64 / seconds;
            self.measure(rate, seconds / took, now);
        }
    }

    fn count(&mut self, now: Instant) {
        let passed = self.counted.map(|at| now.saturating_duration_since(at));
        self.seconds += self.at_once as f64 * passed.unwrap_or_default().as_secs_f64();
        self.counted = Some(now);
    }

    /// Each of so many fetches at once had this rate. Older measurements that contradict it are
    /// corrected.
    fn measure(&mut self, rate: f64, mean_at_once: f64, now: Instant) {
        self.at = Some(now);
        // More would have brought no less in all.
        let at_once = ((mean_at_once - 1e-3).ceil() as usize).clamp(1, CONNECTIONS_MAX);
        let rate = rate * mean_at_once / at_once as f64;
        let is_first = self.rates[at_once - 1].is_none();
        let newest = match self.rate(at_once) {
            Some(before) if rate < before || !is_first => before + NEWEST * (rate - before),
            _ => rate,
        };
        for (others, rate) in (1_usize..).zip(&mut self.rates) {
            let in_all = newest * at_once as f64 / others as f64;
            let (least, most) = (newest.min(in_all), newest.max(in_all));
            *rate = rate.map(|rate| rate.clamp(least, most));
        }
        self.rates[at_once - 1] = Some(newest);
    }

    /// Bytes a second that each of so many fetches at once brings at least; `None` if nothing is
    /// known.
    fn rate(&self, at_once: usize) -> Option<f64> {
        let (fewer, more) = self.rates.split_at(at_once.min(CONNECTIONS_MAX));
        let last = fewer.iter().rposition(Option::is_some);
        let of_fewer = last.and_then(|at| Some(fewer[at]? * (at + 1) as f64 / at_once as f64));
        let of_more = more.iter().find_map(|rate| *rate);
        [of_fewer, of_more].into_iter().flatten().reduce(f64::max)
    }

    /// The time in which so many runs of these bytes each arrive, at most `most` at once; `None` if
    /// it is not known.
    pub(super) fn time_of(&self, runs: usize, run_bytes: u64, most: usize) -> Option<Duration> {
        let at_once = runs.min(most).max(1);
        let turns = runs.div_ceil(at_once) as f64;
        let seconds = turns * run_bytes as f64 / self.rate(at_once)?;
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }

    pub(super) fn is_known(&self) -> bool {
        self.rates.iter().any(Option::is_some)
    }

    /// A run that is too slow is fetched to measure the speed.
    pub(super) fn tried(&mut self, now: Instant) {
        self.at = Some(now);
    }

    /// Whether the last measurement is so old. Fetches alone measure: without one in a while a
    /// low speed would end all of them for ever.
    pub(super) fn is_due(&self, now: Instant, age: Duration) -> bool {
        self.at.is_none_or(|at| now >= at + age)
    }

    /// Of as many fetches at once as are the fastest in all.
    pub(super) fn bytes_per_second(&self) -> u64 {
        let in_all = |(at_once, rate): (usize, &Option<f64>)| Some(rate.as_ref()? * at_once as f64);
        let in_all = (1..).zip(&self.rates).filter_map(in_all);
        in_all.fold(0.0, f64::max) as u64
    }
}

/// The bytes of a fetch, for the speed. Of one without an answer they are few.
pub(super) fn arrived(fetched: &Result<Option<Buffer>, RemoteError>) -> Option<u64> {
    match fetched {
        Ok(object) => object.as_ref().map(|object| object.len() as u64),
        Err(RemoteError::Deadline) => Some(0),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// So many fetches of 1,000 bytes begin at once, and each ends after the time of its number.
    fn fetch(speed: &mut Speed, now: &mut Instant, runs: u32, took: impl Fn(u32) -> Duration) {
        let begin = *now;
        let fetches: Vec<Measured> = (0..runs).map(|_| speed.begin(begin)).collect();
        for (number, fetch) in (1..).zip(fetches) {
            *now = begin + took(number);
            speed.end(fetch, Some(1000), *now);
        }
        *now += SECOND;
    }

    /// The time of so many runs.
    fn time(speed: &Speed, runs: usize, most: usize) -> Option<Duration> {
        speed.time_of(runs, 1000, most)
    }

    #[test]
    fn a_connection_with_a_limit_of_its_own_says_nothing_about_many() {
        let (mut speed, mut now) = (Speed::default(), Instant::now());
        assert_eq!(time(&speed, 1, 1), None);
        assert!(!speed.is_known() && speed.is_due(now, SECOND));
        fetch(&mut speed, &mut now, 1, |_| SECOND);
        assert_eq!(time(&speed, 1, 64), Some(SECOND));
        // Not more is known yet.
        assert_eq!(time(&speed, 16, 64), Some(16 * SECOND));
        fetch(&mut speed, &mut now, 16, |_| SECOND);
        assert_eq!(speed.bytes_per_second(), 16_000);
        for runs in 1..=16 {
            assert_eq!(time(&speed, runs, 64), Some(SECOND), "{runs}");
        }
        assert_eq!(time(&speed, 32, 64), Some(2 * SECOND));
        assert_eq!(time(&speed, 32, 4), Some(8 * SECOND));
        assert_eq!(time(&speed, 5, 4), Some(2 * SECOND));
    }

    #[test]
    fn a_link_with_a_limit_gives_many_no_more_than_one() {
        let (mut speed, mut now) = (Speed::default(), Instant::now());
        fetch(&mut speed, &mut now, 1, |_| SECOND);
        // One after the other, as a queue serves them.
        fetch(&mut speed, &mut now, 8, |number| number * SECOND);
        let took = time(&speed, 8, 64).unwrap_or_default();
        assert!((8 * SECOND..9 * SECOND).contains(&took), "{took:?}");
        // All of them together.
        fetch(&mut speed, &mut now, 8, |_| 8 * SECOND);
        let took = time(&speed, 8, 64).unwrap_or_default();
        assert!((8 * SECOND..9 * SECOND).contains(&took), "{took:?}");
    }

    #[test]
    fn a_newer_measurement_corrects_the_older_ones() {
        let (mut speed, mut now) = (Speed::default(), Instant::now());
        fetch(&mut speed, &mut now, 1, |_| 4 * SECOND);
        // The first one was slow: its connection was made.
        fetch(&mut speed, &mut now, 4, |_| SECOND);
        assert_eq!(time(&speed, 1, 64), Some(SECOND));
        (0..20).for_each(|_| fetch(&mut speed, &mut now, 2, |_| 10 * SECOND));
        let took = time(&speed, 4, 64).unwrap_or_default();
        assert!(took > 9 * SECOND, "{took:?}");
    }

    #[test]
    fn a_fetch_without_an_answer_lowers_the_speed_and_does_not_end_it() {
        let (mut speed, mut now) = (Speed::default(), Instant::now());
        fetch(&mut speed, &mut now, 1, |_| SECOND);
        let late: Vec<Measured> = (0..64).map(|_| speed.begin(now)).collect();
        now += 5 * SECOND;
        for late in late {
            speed.end(late, Some(0), now);
        }
        assert_eq!(speed.bytes_per_second(), 750);
        assert!(!speed.is_due(now, SECOND) && speed.is_due(now + SECOND, SECOND));
        let gone = speed.begin(now);
        speed.end(gone, None, now);
        assert_eq!(speed.bytes_per_second(), 750);
    }
}
