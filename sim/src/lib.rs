//! A deterministic simulation of the store: the engine's core and recovery over a disk that loses, tears, refuses and rots,
//! against a model of what was promised. One seed is one run, bit for bit.
//!
//! It panics where a promise is broken: whoever plays a seed catches that, and plays it again with a [`Journal`] to see what led
//! there ([`report`]).
//!
//! | module | what it is |
//! |---|---|
//! | `dice` | the one source of chance |
//! | `classes` | what can go wrong, and how often it did |
//! | `setup` | what a seed draws before it begins |
//! | `disk` | a disk that can lose, tear, refuse and rot |
//! | `kernel` | the system calls on the way to it |
//! | `superblocks` | both copies of each volume's superblock on it |
//! | `oracle` | what was promised |
//! | `world` | the core and its effects |
//! | `checks` | what is checked between any two steps |
//! | `clients` | callers |
//! | `keeper` | the housekeeper |
//! | `run` | a seed from end to end, step by step |
//! | `faults` | what goes wrong at the device, and what that excuses |
//! | `clock` | time, and its jumps |
//! | `opening` | recovery, and what it must have found |
//! | `ending` | crashes, closes, the quiet end |
//! | `shared` | an owner and its clients, each a process of its own |
//! | `totals` | what a run did |
//! | [`exhaustive`] | every crash of every short script, without chance |
//!
//! Which test, which generator and which counter stands for each fault class is listed in `tests/matrix.md`.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a broken expectation is the finding"
)]

mod checks;
mod classes;
mod clients;
mod clock;
mod dice;
mod disk;
mod ending;
pub mod exhaustive;
mod faults;
mod keeper;
mod kernel;
mod opening;
mod oracle;
mod run;
mod setup;
mod shared;
mod superblocks;
mod totals;
mod world;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

pub use classes::{Class, Tally};
pub use run::play_script;
pub use totals::Totals;
pub use world::Journal;

/// Failing seeds after which a campaign gives up.
const FAILURES_MAX: usize = 20;

/// Who uses the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The callers of one process.
    Alone,
    /// An owner and its clients.
    Shared,
}

impl Mode {
    /// Plays a seed. Returns a digest of all that happened, and what that was.
    ///
    /// # Panics
    /// When a promise is broken.
    #[must_use]
    pub fn play(self, seed: u64, journal: Option<Journal>) -> (u64, Totals, Tally) {
        match self {
            Mode::Alone => run::play(seed, journal),
            Mode::Shared => shared::play(seed, journal),
        }
    }

    /// How `larder-sim` is told to play a seed again.
    #[must_use]
    pub fn command(self, seed: u64) -> String {
        let mode = match self {
            Mode::Alone => "",
            Mode::Shared => "--shared ",
        };
        format!("larder-sim {mode}--seed {seed}")
    }
}

/// What playing many seeds came to.
#[derive(Debug, Default)]
pub struct Campaign {
    /// How many were played.
    pub played: u64,
    /// Those that broke a promise.
    pub failed: Vec<u64>,
    /// What happened in the others.
    pub totals: Totals,
    /// What went wrong in the others.
    pub tally: Tally,
}

/// Plays the seeds from `first` up to `end`, on `threads` threads, no longer than until `until`.
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
                    let outcome = catch_unwind(|| mode.play(seed, None));
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
                        }
                    }
                }
            });
        }
    });
    result.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Plays a seed again, listening, and prints its last events on standard error. Whether it fails.
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
