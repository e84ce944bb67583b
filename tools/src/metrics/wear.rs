//! The reports of the drives under a store, for its metrics.
//!
//! A drive may hang: then the metrics are needed most. So a thread of its own asks them, one at a
//! time, and its callers wait for a short time. Until it has ended they get the reports of the
//! reading before. A process with a thread that hangs in the kernel cannot end. So no reading
//! begins while the owner waits for a volume.

use std::path::PathBuf;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use larder_disk::health::Health;
use larder_store::share::Report;

use crate::drives;

/// How often drives are asked: they change slowly.
const DRIVES_EVERY: Duration = Duration::from_secs(60);

/// Age of an operation of a volume from which no reading begins.
const LATE_SECONDS: f64 = 1.0;

/// Longest wait for a reading, from its begin.
const DRIVES_PATIENCE: Duration = Duration::from_secs(1);

/// The name of a drive, and its health; `None` if it cannot be read.
pub(super) type Drive = (String, Option<Health>);

/// The state of the readings of this process.
struct Readings {
    last: Vec<Drive>,
    /// The end of the last one.
    ended: Option<Instant>,
    /// The begin of the one in progress.
    begun: Option<Instant>,
}

static READINGS: Mutex<Readings> = Mutex::new(Readings {
    last: Vec::new(),
    ended: None,
    begun: None,
});

/// Wakes the callers that wait for a reading.
static ENDED: Condvar = Condvar::new();

fn readings() -> MutexGuard<'static, Readings> {
    READINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The drives under the volumes of an owner's report, and their health, as they were within the
/// last minute. If the drives do not answer soon, the last known health; none before the first
/// answer, and none without an owner.
pub fn wear(report: Option<&Report>) -> Vec<Drive> {
    let volumes = report.map_or(&[][..], |report| &report.answering_volumes);
    let is_late = volumes.iter().any(|of| of.oldest_seconds >= LATE_SECONDS);
    let mut readings = readings();
    let is_new = |ended: Instant| ended.elapsed() < DRIVES_EVERY;
    if readings.ended.is_some_and(is_new) || is_late || volumes.is_empty() {
        return readings.last.clone();
    }
    let begun = match readings.begun {
        Some(begun) => begun,
        None => {
            let paths: Vec<PathBuf> = volumes.iter().map(|of| of.path.clone()).collect();
            let reading = std::thread::Builder::new()
                .name("drives".to_owned())
                .spawn(move || read(&paths));
            if let Err(error) = reading {
                tracing::debug!(%error, "no thread to read the reports of the drives");
                return readings.last.clone();
            }
            *readings.begun.insert(Instant::now())
        }
    };
    let left = DRIVES_PATIENCE.saturating_sub(begun.elapsed());
    let waited = ENDED.wait_timeout_while(readings, left, |readings| readings.begun.is_some());
    let (readings, _) = waited.unwrap_or_else(PoisonError::into_inner);
    readings.last.clone()
}

fn read(volumes: &[PathBuf]) {
    let drives = drives::under_all(volumes).into_iter();
    let health = drives.map(|drive| (drive.name, drive.health.ok()));
    let last = health.collect();
    *readings() = Readings {
        last,
        ended: Some(Instant::now()),
        begun: None,
    };
    ENDED.notify_all();
}
