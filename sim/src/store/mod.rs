//! One process that uses a store: the engine's own handle, housekeeper, recovery and data path, on
//! the threads, locks and clock of `larder_sim_runtime`, over a simulated disk.
//!
//! Callers are tasks that call the engine's [`LocalStore`](larder_store::store::LocalStore). The
//! driver plays between their steps: it kills the process, spoils the medium, and checks the state
//! that the tasks leave. A kill is possible at each point where a task waits.
//!
//! A module imports only those below it:
//!
//! | module | content |
//! |---|---|
//! | `driver` | a seed from start to end |
//! | `reader` | another process that reads beside the owner |
//! | `process` | the main task of the process |
//! | `rest` | the quiet end: without faults all must come to rest |
//! | `callers` | tasks that call the store |
//! | `books` | counted leases, lists of pages, evictions; segments emptied for a caller |
//! | `quotas` | quotas of namespaces, which callers change |
//! | `pins` | callers pin pages, and take pins back |
//! | `calls` | puts, gets, lookups, deletions, flushes |
//! | `results` | the checks of their results |
//! | `epoch` | one run of the process: its begin, its end, the checks between two steps |
//! | `lives` | lifetimes of pages, and clocks that jump |
//! | `device` | the disk: operations begin and end |
//! | `state` | the state that driver, tasks and device share |
//! | `flight` | an operation of the disk in flight |
//! | `limits` | the known quotas and pins |
//! | `memory` | the memory of pages |
//! | `policies` | eviction and admission by policies of the caller, and leases |
//! | `kept` | what the file beside the store keeps |

mod books;
mod callers;
mod calls;
mod device;
mod driver;
mod epoch;
mod flight;
mod kept;
mod limits;
mod lives;
mod memory;
mod pins;
mod policies;
mod process;
mod quotas;
mod reader;
mod rest;
mod results;
mod state;

use std::collections::BTreeSet;

use larder_sim_runtime::dice::{Dice, mix};

use crate::classes::Tally;
use crate::secrets::Salt;
use crate::setup::{BUDGET, CODEC, SEAL};
use crate::totals::Totals;
use crate::world::{Journal, World};
use driver::Driver;

/// Mixed with a seed, to choose whether it is played in a second world.
const TWIN: u64 = 0x791;

/// One of so many encrypted seeds is, from one of the first openings on.
const TWIN_ONE_IN: u64 = 16;
const TWIN_OPENINGS: u64 = 3;

/// Plays a seed. Returns a digest of all events, and their counts.
pub fn play(seed: u64, journal: Option<Journal>) -> (u64, Totals, Tally) {
    let (played, salts) = play_world(seed, journal, None);
    let seal = mix(seed, TWIN);
    if !salts.is_empty() && seal.is_multiple_of(TWIN_ONE_IN) {
        // Another world: the same up to an opening, as with a copy of the disk.
        let from = 1 + seal / TWIN_ONE_IN % TWIN_OPENINGS;
        let (_, other) = play_world(seed, None, Some(from));
        let of = |salts: BTreeSet<Salt>| -> BTreeSet<_> {
            let salts = salts.into_iter().filter(|salt| salt.0 >= from);
            salts
                .map(|(_, slot, space, key, salt)| (slot, space, key, salt))
                .collect()
        };
        assert!(
            of(salts).is_disjoint(&of(other)),
            "two worlds with copies of one disk encrypt a page with one salt"
        );
    }
    played
}

fn play_world(
    seed: u64,
    journal: Option<Journal>,
    differs_from: Option<u64>,
) -> ((u64, Totals, Tally), BTreeSet<Salt>) {
    let codec = Dice::new(mix(seed, CODEC));
    let budget = Dice::new(mix(seed, BUDGET));
    let seal = (Dice::new(mix(seed, SEAL)), differs_from);
    let dice = Dice::new(seed);
    let world = World::new(dice, seed, Some(codec), Some(budget), Some(seal), journal);
    Driver::new(world, seed).play()
}

/// Plays a script: its bytes replace the randomness of callers and faults. The run has at most as
/// many steps as the script has bytes.
pub fn play_script(script: &[u8]) -> (u64, Totals, Tally) {
    let mut world = World::new(Dice::scripted(script), 0, None, None, None, None);
    world.setup.steps = world.setup.steps.min(script.len());
    let seed = world.dice.between(0, u64::from(u16::MAX));
    Driver::new(world, seed).play().0
}
