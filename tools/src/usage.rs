//! The resource use of this process so far, and meters that add up the use of single calls.
//!
//! CPU time is that of all threads of the process, user and system, ended ones included. It comes
//! from the scheduler's own nanosecond clock rather than from ticks: a call of a few microseconds
//! would round to nothing. It does not include kernel threads and interrupts on behalf of the
//! process.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::size::ByteSize;
use crate::turns;

/// CPU time of the whole process since its start.
pub fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanoseconds = u32::try_from(now.tv_nsec).unwrap_or(0);
    Duration::new(seconds, nanoseconds)
}

/// Most memory the process ever had resident, in bytes; 0 if `/proc` has no figure.
pub fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map_or(0, |kib| kib * 1024)
}

/// Adds up wall time and CPU time of the calls given to it, and nothing in between.
#[derive(Default)]
pub struct Meter {
    wall: Duration,
    cpu: Duration,
    calls: Vec<Duration>,
    by_turns: bool,
}

impl Meter {
    /// An empty meter. `by_turns`: each call waits for its turn first, which is not counted.
    pub fn new(by_turns: bool) -> Meter {
        Meter {
            by_turns,
            ..Meter::default()
        }
    }

    /// Makes a call and counts it.
    pub fn measure<T>(&mut self, call: impl FnOnce() -> T) -> T {
        self.take_turn();
        let (cpu_before, started) = (cpu_time(), Instant::now());
        let value = call();
        let wall = started.elapsed();
        self.cpu += cpu_time().saturating_sub(cpu_before);
        self.wall += wall;
        self.calls.push(wall);
        value
    }

    /// After the last call: a process that takes turns must not exit before the others have had
    /// theirs.
    pub fn end(&self) {
        self.take_turn();
    }

    fn take_turn(&self) {
        if self.by_turns {
            turns::wait(&self.calls);
        }
    }

    /// Wall time of all calls.
    pub fn seconds(&self) -> f64 {
        self.wall.as_secs_f64()
    }

    /// CPU time of the process during all calls.
    pub fn cpu_seconds(&self) -> f64 {
        self.cpu.as_secs_f64()
    }

    /// The wall time in microseconds that `percent` of the calls did not exceed (nearest rank); 0
    /// without calls.
    pub fn percentile_us(&self, percent: usize) -> f64 {
        let mut calls = self.calls.clone();
        calls.sort_unstable();
        nearest_rank(&calls, percent).map_or(0.0, |wall| wall.as_secs_f64() * 1e6)
    }
}

/// The least of the sorted values that `percent` of them do not exceed; `None` without values.
pub fn nearest_rank<T: Copy>(sorted: &[T], percent: usize) -> Option<T> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

/// `count` a second; 0 when no time has passed.
pub fn per_second(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 {
        count as f64 / seconds
    } else {
        0.0
    }
}

/// `part / whole`; 0 when there is no whole.
pub fn ratio(part: u64, whole: u64) -> f64 {
    if whole > 0 {
        part as f64 / whole as f64
    } else {
        0.0
    }
}

/// CPU seconds for each GiB moved; 0 when nothing was.
pub fn per_gib(cpu_seconds: f64, bytes: u64) -> f64 {
    if bytes > 0 {
        cpu_seconds * (1_u64 << 30) as f64 / bytes as f64
    } else {
        0.0
    }
}

/// Bytes a second as people read them: `3.4 GiB/s`.
pub fn rate(bytes_per_second: f64) -> String {
    let whole = bytes_per_second as u64;
    format!("{}/s", ByteSize(whole))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_meter_counts_cpu_time_of_calls_on_any_thread_and_none_between_them() {
        let mut meter = Meter::default();
        let spin = || {
            let until = cpu_time() + Duration::from_millis(2);
            while cpu_time() < until {
                std::hint::spin_loop();
            }
        };
        meter.measure(|| std::thread::spawn(spin).join().unwrap());
        let counted = meter.cpu_seconds();
        assert!(counted >= 0.002, "{counted}");
        spin();
        assert!((meter.cpu_seconds() - counted).abs() < f64::EPSILON);
    }

    #[test]
    fn percentiles_are_the_nearest_rank() {
        let calls = (1..=200).map(Duration::from_micros).collect();
        let meter = Meter {
            calls,
            ..Meter::default()
        };
        assert_eq!(meter.percentile_us(50).round(), 100.0);
        assert_eq!(meter.percentile_us(99).round(), 198.0);
        assert_eq!(meter.percentile_us(100).round(), 200.0);
        assert_eq!(Meter::default().percentile_us(50), 0.0);
    }

    #[test]
    fn the_process_has_had_memory_resident() {
        assert!(peak_rss_bytes() > 0);
    }
}
