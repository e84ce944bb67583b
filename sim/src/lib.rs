//! A deterministic simulation of the store. The engine that ships runs on the threads, locks and
//! clock of `larder_sim_runtime`, over a disk that loses, tears, refuses and rots blocks. A model
//! of the store's promises checks the results. One seed is one run, bit for bit.
//!
//! A broken promise panics. The player of a seed catches the panic, and plays the seed again with a
//! [`Journal`] to show the events before it ([`report`]).
//!
//! A module imports only those below it:
//!
//! | module | content |
//! |---|---|
//! | [`exhaustive`] | every crash of every short script, without randomness |
//! | `mode` | a seed of one of the simulations, with memory of its own |
//! | `agents` | two nodes, and a remote beneath their stores |
//! | `store` | one process that uses a store |
//! | `processes` | an owner and its clients: several processes |
//! | `faults` | device faults, and the losses that they excuse |
//! | `outage` | reads that fail for a while |
//! | `recovered` | the checks of a recovery |
//! | `sealed` | the keyring and the pages of encrypted stores |
//! | `superblocks` | the copies of the superblock of each volume |
//! | `expected` | the pages that a recovery must find |
//! | `checks` | the checks of the metadata that the core writes |
//! | `world` | the facts of a seed of `store` that outlive its process |
//! | `secrets` | the keys and the salts of an encrypted store |
//! | `totals` | counts over a run |
//! | `oracle` | the promises |
//! | `disk` | a disk over the media of `larder_sim_runtime`, with its faults |
//! | `lines` | the threads of a simulated disk |
//! | `coded` | contents that a codec can shrink |
//! | `setup` | the parameters that a seed draws before its run |
//! | `kernel` | the system calls on the way to the disk |
//! | `classes` | the classes of faults, with counts |
//!
//! `tests/matrix.md` lists the test, the generator and the counter of each fault class.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a failed expectation is a test result"
)]

mod agents;
mod checks;
mod classes;
mod coded;
mod disk;
pub mod exhaustive;
mod expected;
mod faults;
mod kernel;
mod lines;
mod mode;
mod oracle;
mod outage;
mod processes;
mod recovered;
mod sealed;
mod secrets;
mod setup;
mod store;
mod superblocks;
mod totals;
mod world;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

pub use larder_sim_runtime::heap::{self, Heap};

pub use classes::{Class, Tally};
pub use mode::Mode;
pub use totals::Totals;
pub use world::Journal;

/// Failing seeds after which a campaign gives up.
const FAILURES_MAX: usize = 20;

/// Plays a script on a store of one process: its bytes replace the randomness of callers and
/// faults. Returns as [`Mode::play`] does.
///
/// # Panics
/// If a promise is broken.
pub fn play_script(script: &[u8]) -> (u64, Totals, Tally) {
    Mode::Store.apart(|| store::play_script(script))
}

/// The result of a campaign of many seeds.
#[derive(Debug, Default)]
pub struct Campaign {
    /// Seeds played.
    pub played: u64,
    /// Seeds that broke a promise.
    pub failed: Vec<u64>,
    /// Counts over the seeds that passed.
    pub totals: Totals,
    /// Faults in the seeds that passed.
    pub tally: Tally,
}

/// Plays the seeds from `first` up to `end`, on `threads` threads, until `until` at the latest.
#[must_use]
pub fn campaign(
    mode: Mode,
    first: u64,
    end: u64,
    threads: usize,
    until: Option<Instant>,
) -> Campaign {
    let next = AtomicU64::new(first);
    let result = Mutex::new(Campaign::default());
    let lock = || result.lock().unwrap_or_else(PoisonError::into_inner);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let is_late = until.is_some_and(|until| Instant::now() >= until);
                    if seed >= end || is_late || lock().failed.len() >= FAILURES_MAX {
                        return;
                    }
                    let outcome = catch_unwind(|| mode.play_apart(seed));
                    let mut result = lock();
                    result.played += 1;
                    match outcome {
                        Ok((_, totals, tally)) => {
                            result.totals.add(&totals);
                            result.tally.add(&tally);
                        }
                        Err(_) => {
                            eprintln!("seed {seed} fails: {}", mode.command(seed));
                            result.failed.push(seed);
                            // A task had to wait while it panicked: the thread stays in that state.
                            if std::thread::panicking() {
                                return;
                            }
                        }
                    }
                }
            });
        }
    });
    result.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Plays a seed again with a journal, and prints its last events to standard error. Returns whether
/// the seed fails.
#[must_use]
pub fn report(mode: Mode, seed: u64) -> bool {
    let journal: Journal = Arc::new(Mutex::new(VecDeque::new()));
    let outcome = catch_unwind(AssertUnwindSafe(|| mode.play(seed, Some(journal.clone()))));
    let events = journal.lock().unwrap_or_else(PoisonError::into_inner);
    for event in events.iter() {
        eprintln!("{event}");
    }
    match outcome {
        Ok((digest, totals, _)) => eprintln!("seed {seed}: {digest:016x} {totals:?}"),
        Err(_) => eprintln!("seed {seed} fails"),
    }
    outcome.is_err()
}
