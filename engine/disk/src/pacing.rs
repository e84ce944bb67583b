//! Pacing as a store uses it: the words of its volumes, and the counters.
//!
//! Owns: the counters of this process. [`pace`](super::pace) decides. The words are in the memory
//! that the processes of a store share ([`Common`]). A process without it paces its own operations
//! alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use larder_base::latency::{Latency, LatencySummary};
use larder_base::system::processes::monotonic_nanoseconds as now;
use larder_format::VOLUMES_MAX;

use super::common::Common;
#[cfg(test)]
use super::pace::{CLAIM, MS};
use super::pace::{Nanos, Pace, Traffic, Words};
use super::{Op, Purpose};
#[cfg(test)]
use larder_base::runtime::thread;

/// See the module. By default nothing is paced.
#[derive(Debug, Default)]
pub struct Pacing {
    common: Option<Arc<Common>>,
    volumes: [Volume; VOLUMES_MAX],
    /// How long writes of puts waited for their turn.
    waits: Latency,
}

/// The counters of one volume.
#[derive(Debug, Default)]
struct Volume {
    /// The last rate, in bytes per second.
    rate: AtomicU64,
    paced_writes: AtomicU64,
    paced_bytes: AtomicU64,
}

/// The pacing of one process at a moment. `Stats` of the engine explains the figures.
pub struct Paced {
    pub state: String,
    pub writes: u64,
    pub bytes: u64,
    pub rate: u64,
    pub read_slowdown: f64,
    pub waits: LatencySummary,
}

impl Pacing {
    /// Pacing with memory of its own.
    #[must_use]
    pub fn create() -> Pacing {
        Pacing::among(Arc::new(Common::create()))
    }

    /// Pacing among all processes that have this memory.
    #[must_use]
    pub fn among(common: Arc<Common>) -> Pacing {
        Pacing {
            common: Some(common),
            ..Pacing::default()
        }
    }

    /// The words of a volume; `None` if nothing is paced.
    pub(super) fn words(&self, volume: usize) -> Option<&Words> {
        self.common.as_ref()?.content()?.pace.get(volume)
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

    /// The figures of this process.
    pub fn paced(&self) -> Paced {
        let mut paced = Paced {
            state: self
                .common
                .as_ref()
                .map_or_else(|| "off".to_owned(), |common| common.state()),
            writes: 0,
            bytes: 0,
            rate: 0,
            read_slowdown: 0.0,
            waits: self.waits.summary(),
        };
        let is_off = self.common.is_none();
        let now = if is_off { 0 } else { now() };
        for (volume, counters) in self.volumes.iter().enumerate() {
            paced.writes += counters.paced_writes.load(Relaxed);
            paced.bytes += counters.paced_bytes.load(Relaxed);
            let claimed = self.words(volume).filter(|words| words.is_claimed(now));
            if let Some(words) = claimed {
                paced.rate += counters.rate.load(Relaxed);
                paced.read_slowdown = paced.read_slowdown.max(words.slowdown());
            }
        }
        paced
    }
}

#[cfg(test)]
impl Pacing {
    /// Waits for a claim on a volume, and whether it outlasts a claim without renewal.
    pub(super) fn is_renewed(&self, volume: usize) -> bool {
        let is_claimed = |now| {
            self.words(volume)
                .is_some_and(|words| words.is_claimed(now))
        };
        let patience = 60_000 * MS;
        let until = |begun: Nanos, is_over: &dyn Fn(Nanos) -> bool| {
            std::iter::repeat_with(now)
                .inspect(|_| thread::yield_now())
                .take_while(|now| now - begun < patience)
                .find(|now| is_over(*now))
        };
        // A claim may be younger than the moment at which it was looked for, by less than its time.
        until(now(), &is_claimed)
            .and_then(|begun| until(begun, &|now| now > begun + 2 * CLAIM && is_claimed(now)))
            .is_some()
    }
}
