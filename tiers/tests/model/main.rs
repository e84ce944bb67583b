//! The core against a model: random requests, transfers, prefetches and faults over small pools,
//! with every policy. The invariants are checked after each operation. Each planted bug must be
//! detected.
//!
//! `LARDER_TIERS_SEEDS` sets the number of seeds, `LARDER_TIERS_SEED` runs one seed.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a broken expectation is the finding"
)]

#[cfg(debug_assertions)]
#[path = "../support/planted.rs"]
mod planted;
mod world;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::Value;
use world::World;

/// Operations of one seed.
const OPS: u64 = 1000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn random_operations_under_every_policy_keep_every_invariant_and_leak_nothing() {
    if let Some(seed) = number("LARDER_TIERS_SEED") {
        World::new(seed).play(OPS);
        return;
    }
    let mut totals = BTreeMap::new();
    for seed in 0..number("LARDER_TIERS_SEEDS").unwrap_or(500) {
        let mut world = World::new(seed);
        let played = catch_unwind(AssertUnwindSafe(|| world.play(OPS)));
        assert!(
            played.is_ok(),
            "seed {seed} fails after {} operations: LARDER_TIERS_SEED={seed}",
            world.ops
        );
        add(&mut totals, "", &world.stats());
    }
    println!("{totals:#?}");
    let never: Vec<_> = totals.iter().filter(|(_, count)| **count == 0).collect();
    // Reads are not timed here, so the break-even is never decided. The model has no states.
    assert_eq!(
        never,
        [
            (&".declined.break_even".to_owned(), &0),
            (&".states_no_room".to_owned(), &0)
        ],
        "an event that never happens is not tested"
    );
}

/// Adds up the counters of a run by path.
fn add(totals: &mut BTreeMap<String, u64>, path: &str, stats: &Value) {
    match stats {
        Value::Object(fields) => {
            fields
                .iter()
                .for_each(|(name, value)| add(totals, &format!("{path}.{name}"), value));
        }
        count => *totals.entry(path.to_owned()).or_insert(0) += count.as_u64().unwrap(),
    }
}

#[cfg(debug_assertions)]
#[test]
fn every_planted_bug_is_noticed() {
    use larder_tiers::planted::Bug;

    planted::all_are_noticed(Bug::ALL.iter().copied(), 1000, |_, seed| {
        World::new(seed).play(OPS);
    });
}
