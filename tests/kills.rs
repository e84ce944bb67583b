//! SIGKILL at random moments: acknowledged pages are there, and no returned byte is wrong.
//!
//! `LARDER_KILLS=n` makes n kills in each test instead of the usual number. Any command that
//! changes a store can be killed so: `survives(&mut stage, |stage| stage.larder("COMMAND", &[]),
//! ...)`, on a stage that writers have filled.
#![allow(clippy::unwrap_used)]

mod support;

use std::process::Command;

use rand::RngExt;
use serde_json::Value;
use support::stage::{AMPLE, Promise, Stage, is_used_up, kills, stages_max};

/// Starts commands and kills them in the middle, and checks the store after each, until `enough`.
/// Some are killed on the rest of the one before, without a check in between. Returns the number of
/// kills.
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
fn nothing_is_missing(volumes: usize, kills: usize, seed: u64) {
    let (mut left, mut stages) = (kills, seed..seed + stages_max(kills));
    while left > 0 {
        let stage = stages.next().expect("commands end before they are killed");
        let mut stage = Stage::new(volumes, AMPLE, stage);
        let killed = survives(&mut stage, writer, |killed, report| {
            assert_eq!(report["check"]["missing_pages"], 0, "{report:#}");
            killed >= left || is_used_up(killed, report)
        });
        println!("{killed} kills, {left} were to come");
        left = left.saturating_sub(killed);
    }
}

#[test]
fn no_acknowledged_page_is_missing_after_any_of_a_hundred_kills() {
    nothing_is_missing(1, kills(100), 1000);
}

#[test]
fn no_acknowledged_page_is_missing_on_two_volumes_after_any_of_a_hundred_kills() {
    nothing_is_missing(2, kills(100), 2000);
}

/// Most pages of those put lately that a kill costs a full store on one volume. It leaves two
/// segments filled in part, the newest of all; being the emptiest they are reclaimed first, and
/// reclaim keeps at most half a segment of each.
const LOST_PAGES_MAX: u64 = 16 << 20 >> 16;

#[test]
fn kills_of_a_full_store_leave_it_sound_and_cost_at_most_the_newest_of_two_segments_each() {
    let mut stage = Stage::new(1, "512MiB", 3000);
    // Filled first, so that every later page costs another one its place.
    let is_full = (0..20).any(|_| {
        let writer = writer(&mut stage);
        stage.finish(writer);
        let missing = stage.check()["check"]["missing_pages"].as_u64();
        missing.unwrap() > 0
    });
    assert!(is_full, "all that is put stays");
    let enough = kills(15);
    survives(&mut stage, writer, |killed, report| {
        let lost = report["check"]["lost_pages"].as_u64().unwrap();
        assert!(
            lost <= killed as u64 * LOST_PAGES_MAX,
            "{killed} kills: {report:#}"
        );
        killed >= enough
    });
}
