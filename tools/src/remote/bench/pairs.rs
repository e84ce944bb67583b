//! Measurements in pairs.

use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::failure::Failure;
use crate::usage::{cpu_time, per_gib, per_second};

/// Why a measurement has no result.
pub enum Stop {
    /// A signal has come.
    Interrupted,
    Failed(Failure),
}

impl<E: Into<Failure>> From<E> for Stop {
    fn from(error: E) -> Stop {
        Stop::Failed(error.into())
    }
}

/// Bytes that were moved, and the time for it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    pub bytes: u64,
    pub wall: Duration,
    /// CPU time of this process.
    pub cpu: Duration,
}

impl Sample {
    /// Measures work that moves so many bytes.
    pub fn of<E>(bytes: u64, work: impl FnOnce() -> Result<(), E>) -> Result<Sample, E> {
        let (cpu, begin) = (cpu_time(), Instant::now());
        work()?;
        Ok(Sample {
            bytes,
            wall: begin.elapsed(),
            cpu: cpu_time().saturating_sub(cpu),
        })
    }

    pub fn bytes_per_second(&self) -> f64 {
        per_second(self.bytes, self.wall.as_secs_f64())
    }

    pub fn cpu_seconds_per_gib(&self) -> f64 {
        per_gib(self.cpu.as_secs_f64(), self.bytes)
    }

    fn add(&mut self, other: &Sample) {
        self.bytes += other.bytes;
        self.wall += other.wall;
        self.cpu += other.cpu;
    }
}

/// Ratios of pairs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RatioReport {
    median: f64,
    lowest: f64,
    highest: f64,
    pairs: usize,
}

impl fmt::Display for RatioReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RatioReport {
            median,
            lowest,
            highest,
            pairs,
        } = self;
        write!(
            f,
            "{median:.2} ({lowest:.2} to {highest:.2}, {pairs} pairs)"
        )
    }
}

/// Pairs: the measured way, and another for comparison.
#[derive(Default)]
pub struct Pairs(Vec<(Sample, Sample)>);

impl Pairs {
    pub fn add(&mut self, measured: Sample, other: Sample) {
        self.0.push((measured, other));
    }

    /// All samples of each way together.
    pub fn sums(&self) -> (Sample, Sample) {
        let mut sums = (Sample::default(), Sample::default());
        for (measured, other) in &self.0 {
            sums.0.add(measured);
            sums.1.add(other);
        }
        sums
    }

    /// The ratios of the speeds of pairs.
    pub fn ratios(&self) -> RatioReport {
        let speeds =
            |pair: &(Sample, Sample)| pair.0.bytes_per_second() / pair.1.bytes_per_second();
        let mut ratios: Vec<f64> = self.0.iter().map(speeds).collect();
        ratios.sort_unstable_by(f64::total_cmp);
        let at = |at: usize| ratios.get(at).copied().unwrap_or(0.0);
        let last = ratios.len().saturating_sub(1);
        RatioReport {
            median: f64::midpoint(at(last / 2), at(last.div_ceil(2))),
            lowest: at(0),
            highest: at(last),
            pairs: ratios.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratios_are_those_of_pairs() {
        let sample = |bytes: u64| Sample {
            bytes,
            wall: Duration::from_secs(1),
            cpu: Duration::ZERO,
        };
        let mut pairs = Pairs::default();
        [(80, 100), (120, 100), (100, 200)]
            .into_iter()
            .for_each(|(measured, other)| pairs.add(sample(measured), sample(other)));
        let ratios = pairs.ratios();
        let found = [ratios.lowest, ratios.median, ratios.highest];
        assert_eq!(found, [0.5, 0.8, 1.2]);
        assert_eq!(pairs.sums().1.bytes, 400);
    }
}
