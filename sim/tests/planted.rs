//! The test of the tests: each bug of `larder_core::planted` and of `larder_remote::planted` is
//! switched on, and a run of the simulation must fail. A bug that no run notices is a
//! promise without a check.
#![cfg(debug_assertions)]
#![allow(clippy::unwrap_used)]

use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_core::planted::{Bug, plant};
use larder_remote::planted::Bug as AgentBug;
use larder_sim::exhaustive::{Limits, Part, exhaust};
use larder_sim::{Heap, Mode};

#[global_allocator]
static HEAP: Heap = Heap;

/// The seeds that a campaign plays by default.
const SEEDS: u64 = 10_000;

/// The detection of a bug: the lowest failing seed that was played, and its panic message.
type Catch = (u64, String);

/// Plays seeds with a bug switched on, until one fails. Without a bug none of the first seeds fails
/// (`tests/seeds.rs`).
fn hunt(mode: Mode, plant: impl Fn() + Sync, seeds: u64) -> Option<Catch> {
    let next = AtomicU64::new(0);
    let caught: Mutex<Option<Catch>> = Mutex::new(None);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                plant();
                while caught.lock().unwrap().is_none() {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        break;
                    }
                    if let Err(panic) = catch_unwind(|| mode.play_apart(seed)) {
                        let said = panic.downcast_ref::<String>().cloned();
                        let said =
                            said.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
                        let mut caught = caught.lock().unwrap();
                        if caught.as_ref().is_none_or(|(first, _)| seed < *first) {
                            *caught = Some((seed, said.unwrap_or_default()));
                        }
                    }
                }
                // SAFETY: the panic is dropped, and its text was copied outside of the run.
                unsafe { larder_sim::heap::leave() };
            });
        }
    });
    caught.into_inner().unwrap()
}

/// With LARDER_BUG, the bug of this name alone.
#[test]
fn every_planted_bug_is_noticed_within_the_default_number_of_seeds() {
    // Every detection is a panic. Only the last message is worth reading.
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = Vec::new();
    let only = std::env::var("LARDER_BUG").ok();
    let mut check = |mode: Mode, bug: String, plant: &(dyn Fn() + Sync)| {
        if only.as_ref().is_some_and(|only| bug != *only) {
            return;
        }
        match hunt(mode, plant, SEEDS) {
            Some((seed, said)) => {
                let said = said.lines().next().unwrap_or_default();
                let said: String = said.chars().take(120).collect();
                println!("{bug:20} {:5} seeds: {said}", seed + 1);
            }
            None => missed.push(bug),
        }
    };
    for (mode, bugs) in [(Mode::Store, Bug::STORE), (Mode::Shared, Bug::SHARED)] {
        for &bug in bugs {
            check(mode, format!("{bug:?}"), &|| plant(Some(bug)));
        }
    }
    for &bug in AgentBug::ALL {
        check(Mode::Agents, format!("{bug:?}"), &|| plant(Some(bug)));
    }
    let _ = std::panic::take_hook();
    assert!(
        missed.is_empty(),
        "not noticed in {SEEDS} seeds: {missed:?}"
    );
}

/// Bugs that crashes alone reveal, without another fault, a reader in the way, a second caller or a
/// longer script.
const REVEALED_BY_CRASHES: [Bug; 11] = [
    Bug::EarlyPublish,
    Bug::UnopenedSegment,
    Bug::EarlyFlush,
    Bug::EarlySeal,
    Bug::EarlyRelease,
    Bug::LowerBirthWins,
    Bug::FirstGapEnds,
    Bug::UnprovenProven,
    Bug::RunNotBumped,
    Bug::StaleSequence,
    Bug::EarlyDelete,
];

#[test]
fn the_exhaustive_mode_notices_bugs_that_crashes_reveal() {
    let missed: Mutex<Vec<Bug>> = Mutex::default();
    let next = AtomicU64::new(0);
    let limits = Limits {
        operations: 3,
        blocks: 5,
        part: Part::All,
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let at = usize::try_from(next.fetch_add(1, Ordering::Relaxed)).unwrap();
                    let Some(&bug) = REVEALED_BY_CRASHES.get(at) else {
                        return;
                    };
                    // A panic may leave the thread unfit for another run.
                    let hunt = std::thread::spawn(move || {
                        plant(Some(bug));
                        exhaust(limits, 1)
                    });
                    match hunt.join().unwrap() {
                        Ok(_) => missed.lock().unwrap().push(bug),
                        Err(why) => {
                            let why: String = why.chars().take(220).collect();
                            println!("{:20} {why}", format!("{bug:?}"));
                        }
                    }
                }
            });
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "not noticed: {missed:?}");
}
