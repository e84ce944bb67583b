//! Threads, locks and time. The engine uses these alone where it waits.
//!
//! They are those of the operating system; the locks can be used in a forked child
//! (`larder_sync`). With the feature `simulated` they are the ones of
//! `larder_sim_runtime`: all threads run on a deterministic scheduler and a virtual clock. The
//! package `larder-engine-simulated` is the engine with that feature. It is a package of its own,
//! so that no build of the workspace switches the feature on for the engine that ships.
//!
//! The standard descriptors are those of the real process in both.
//!
//! Not simulated, and so not from here: atomics; the locks of the leases, of a policy's facts and
//! of the latency histograms, under which nothing waits. The calls to the operating system are in
//! [`crate::system`].

use std::time::Duration;

pub use larder_sync::descriptors;

#[cfg(feature = "simulated")]
pub use larder_sim_runtime::{
    sync::{Condvar, Mutex, MutexGuard, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard},
    thread,
    time::Instant,
};
#[cfg(not(feature = "simulated"))]
pub use larder_sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(not(feature = "simulated"))]
pub use std::{sync::OnceLock, thread, time::Instant};

/// The longest wait. A moment much further off could not be represented as an [`Instant`].
const WAIT_MAX: Duration = Duration::from_hours(365 * 24);

/// The moment after a wait.
#[must_use]
pub fn after(wait: Duration) -> Instant {
    Instant::now() + wait.min(WAIT_MAX)
}
