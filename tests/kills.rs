//! SIGKILL at random moments: what was acknowledged is there, and nothing is ever wrong.
//!
//! `LARDER_KILLS=n` makes n kills in each test instead of the usual number.
#![allow(clippy::unwrap_used)]

mod support;

use std::process::Command;

use rand::RngExt;
use serde_json::Value;
use support::stage::{Promise, Stage, is_filling, kills};

/// Starts commands and kills them in the middle, and checks the store after each, until `enough`. Some are killed over what the
/// one before left, without a look in between. Returns how many were killed.
fn survives(
    stage: &mut Stage,
    command: impl Fn(&mut Stage) -> Command,
    mut enough: impl FnMut(usize, &Value) -> bool,
) -> usize {
    let mut killed = 0;
    for round in 1.. {
        let over = usize::from(stage.dice.random_range(0..4) == 0);
        for _ in 0..=over {
            let next = command(stage);
            killed += usize::from(stage.kill(next));
        }
        assert!(
            round < 20 + 10 * killed,
            "commands end before they are killed"
        );
        if enough(killed, &stage.check()) {
            break;
        }
    }
    killed
}

fn writer(stage: &mut Stage) -> Command {
    stage.writer(Promise::Kill)
}

/// Kills writers in stores with room for all that they write: then no page may be missing.
fn nothing_is_missing(volumes: usize, capacity: &'static str, kills: usize, seed: u64) {
    let (mut left, mut stages) = (kills, seed..);
    while left > 0 {
        let mut stage = Stage::new(volumes, capacity, stages.next().unwrap());
        let killed = survives(&mut stage, writer, |killed, report| {
            assert_eq!(report["check"]["missing_pages"], 0, "{report:#}");
            killed >= left || is_filling(report)
        });
        println!("{killed} kills, {left} were to come");
        left = left.saturating_sub(killed);
    }
}

#[test]
fn no_acknowledged_page_is_missing_after_any_of_a_hundred_kills() {
    nothing_is_missing(1, "320MiB", kills(100), 1000);
}

#[test]
fn no_acknowledged_page_is_missing_on_two_volumes_after_any_of_a_hundred_kills() {
    nothing_is_missing(2, "416MiB", kills(100), 2000);
}

#[test]
fn kills_of_stores_that_evict_lose_nothing_that_was_put_lately() {
    for (volumes, capacity, seed) in [(1, "192MiB", 3000), (2, "320MiB", 3001)] {
        let enough = kills(20);
        let mut evicted = false;
        let mut stage = Stage::new(volumes, capacity, seed);
        survives(&mut stage, writer, |killed, report| {
            evicted |= report["check"]["missing_pages"] != 0;
            killed >= enough && evicted
        });
    }
}
