//! Pacing as a store uses it: the words of its volumes, and what pacing did.
//!
//! Owns: the words of all volumes, and the counters of this process. [`pace`](super::pace) decides.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use larder_format::VOLUMES_MAX;
use rustix::time::{ClockId, clock_gettime};

use super::pace::{Nanos, Pace, Traffic, Words};
use super::{Op, Purpose};
use crate::api::Stats;
use crate::latency::Latency;

/// The present moment, on the clock that all processes of a machine share.
pub(super) fn now() -> Nanos {
    let now = clock_gettime(ClockId::Monotonic);
    let part = |part: i64| u64::try_from(part).unwrap_or(0);
    part(now.tv_sec) * 1_000_000_000 + part(now.tv_nsec)
}

/// See the module. By default nothing is paced.
#[derive(Debug, Default)]
pub struct Pacing {
    words: Option<Box<[Words; VOLUMES_MAX]>>,
    volumes: [Volume; VOLUMES_MAX],
    /// How long writes of puts waited for their turn.
    waits: Latency,
}

/// What pacing did on one volume.
#[derive(Debug, Default)]
struct Volume {
    /// The last rate, in bytes per second.
    rate: AtomicU64,
    paced_writes: AtomicU64,
    paced_bytes: AtomicU64,
}

impl Pacing {
    /// Pacing among the operations of this process.
    #[must_use]
    pub fn local() -> Pacing {
        Pacing {
            words: Some(Box::default()),
            ..Pacing::default()
        }
    }

    /// The words of a volume; `None` if nothing is paced.
    pub(super) fn words(&self, volume: usize) -> Option<&Words> {
        self.words.as_ref()?.get(volume)
    }

    /// A write of a put, or an operation in the background, gets its turn after a wait.
    pub(super) fn note(&self, volume: usize, pace: &Pace, op: &Op, waited: Nanos) {
        if op.purpose == Purpose::Call {
            self.waits.record(Duration::from_nanos(waited));
        }
        let Some(counters) = self.volumes.get(volume).filter(|_| pace.is_beside()) else {
            return;
        };
        counters.rate.store(pace.rate() as u64, Relaxed);
        counters.paced_writes.fetch_add(1, Relaxed);
        let bytes = Traffic::of(op).bytes();
        counters.paced_bytes.fetch_add(bytes, Relaxed);
    }

    /// Fills in what pacing did in this process.
    pub(crate) fn count_into(&self, stats: &mut Stats) {
        (stats.paced_writes, stats.paced_bytes) = (0, 0);
        (stats.paced_rate, stats.read_slowdown) = (0, 0.0);
        let now = self.words.as_ref().map_or(0, |_| now());
        for (volume, counters) in self.volumes.iter().enumerate() {
            stats.paced_writes += counters.paced_writes.load(Relaxed);
            stats.paced_bytes += counters.paced_bytes.load(Relaxed);
            let claimed = self.words(volume).filter(|words| words.is_claimed(now));
            if let Some(words) = claimed {
                stats.paced_rate += counters.rate.load(Relaxed);
                stats.read_slowdown = stats.read_slowdown.max(words.slowdown());
            }
        }
        stats.pacing = match self.words {
            Some(_) => "local".to_owned(),
            None => "off".to_owned(),
        };
        stats.put_wait_latency = self.waits.summary();
    }
}
