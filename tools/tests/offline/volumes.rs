//! `larder volume add` and `larder volume retire` on the command line, killed at any moment, too.

use larder_format::PageKey;
use nix::sys::signal::Signal;
use rand::{RngExt, SeedableRng};
use serde_json::Value;

use crate::copies::copied;
use crate::kills::{Watch, kills, started, stop};
use crate::support::home::{Home, SEGMENTS};
use crate::support::honest::Process;
use crate::support::{chain, ends, fails, report, says, text};

fn chains() -> Vec<Vec<PageKey>> {
    (1..=8).map(|seed| chain(seed, 60)).collect()
}

/// A store on these volumes, with pages on each of them.
fn filled(further: &[&str]) -> Home {
    copied("volumes", further, |home| {
        home.with(|pool| pool.put_in_turns(&chains()));
    })
}

/// All pages are there and good, and the store is sound.
#[track_caller]
fn is_whole(home: &Home) {
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["deep"]["good_pages"], 480);
    home.with(|pool| assert_eq!(pool.hits(&chains().concat()), 480));
}

/// The volumes that the store has.
fn volumes(home: &Home) -> usize {
    let document = home.json("inspect", &[], 0);
    let list = document["volumes"].as_array().unwrap().clone();
    list.iter()
        .filter(|volume| volume["state"] == "present")
        .count()
}

/// Page records on a volume.
fn records(home: &Home, volume: u64) -> u64 {
    let document = home.json("inspect", &["--segments"], 0);
    let segments = document["segment_list"].as_array().unwrap().clone();
    let own = segments
        .iter()
        .filter(|segment| segment["volume"] == volume);
    own.map(|segment| segment["records"].as_u64().unwrap())
        .sum()
}

#[test]
fn a_volume_is_added_once_and_takes_new_pages() {
    let home = filled(&[]);
    let new = home.beside("new");
    let at = [text(&home.path), text(&new)];
    let planned = report(&["volume", "add", at[0], at[1], "--dry-run"], 0);
    assert_eq!(
        (&planned["added"], planned["segments"].as_u64()),
        (&true.into(), Some(2 * SEGMENTS))
    );
    assert!(!new.exists());
    let added = report(&["volume", "add", at[0], at[1]], 0);
    assert_eq!(added["usable_bytes"], planned["usable_bytes"]);
    let again = report(&["volume", "add", at[0], at[1]], 0);
    assert_eq!(
        (&again["added"], &again["segments"]),
        (&false.into(), &added["segments"])
    );
    assert_eq!((volumes(&home), records(&home, 1)), (2, 0));
    is_whole(&home);
    home.with(|pool| (20..40).for_each(|seed| pool.put(&chain(seed, 60))));
    assert!(records(&home, 1) > 300, "{}", records(&home, 1));
    let stored: Vec<PageKey> = (20..40).flat_map(|seed| chain(seed, 60)).collect();
    home.with(|pool| assert_eq!(pool.hits(&stored), 1200));
    says(
        &["volume", "add", at[0], at[1]],
        0,
        &["Is a volume already"],
    );
    // It grows evenly, as any other store.
    let size = (4 * SEGMENTS * (16 << 20) + (2 << 20)).to_string();
    home.report("create", &["--size", &size, "--grow"], 0);
    home.with(|pool| assert_eq!(pool.hits(&stored), 1200));
}

#[test]
fn what_is_no_new_volume_is_refused() {
    let home = filled(&["second"]);
    let other = filled(&[]);
    let at = text(&home.path);
    let foreign = home.beside("foreign");
    std::fs::write(&foreign, "a letter").unwrap();
    fails(
        &["volume", "add", at, text(&foreign)],
        3,
        &["not a Larder store"],
    );
    fails(
        &["volume", "add", at, text(&other.path)],
        3,
        &["holds a Larder store"],
    );
    let small = home.beside("small");
    fails(
        &["volume", "add", at, text(&small), "--size", "1MiB"],
        2,
        &["--size"],
    );
    fails(
        &["volume", "retire", at, at],
        2,
        &["first volume", "larder export"],
    );
    fails(
        &["volume", "retire", at, text(&other.path)],
        2,
        &["no volume of this store"],
    );
    fails(&["volume", "retire", at, text(&small)], 3, &["small"]);
    let store = home.open();
    let second = home.beside("second");
    fails(&["volume", "retire", at, text(&second)], 3, &["in use"]);
    fails(&["volume", "add", at, text(&small)], 3, &["in use"]);
    drop(store);
    assert!(!small.exists());
    is_whole(&home);
}

#[test]
fn an_old_copy_of_the_first_volume_does_not_cost_a_used_one() {
    let home = filled(&[]);
    let (old, new) = (home.beside("old"), home.beside("new"));
    std::fs::copy(&home.path, &old).unwrap();
    let at = [text(&home.path), text(&new)];
    ends(&["volume", "add", at[0], at[1]], 0);
    is_whole(&home);
    std::fs::rename(&old, &home.path).unwrap();
    let before = std::fs::read(&new).unwrap();
    let refused = ["volume", "add", at[0], at[1]];
    fails(&refused, 3, &["holds a Larder store"]);
    fails(
        &[&refused[..], &["--dry-run"]].concat(),
        3,
        &["holds a Larder store"],
    );
    assert!(before == std::fs::read(&new).unwrap());
}

#[test]
fn an_addition_killed_at_any_moment_is_run_again_and_ends_the_same() {
    let run = |home: &Home, events: usize| {
        let watch = Watch::on_directory(home);
        let new = home.beside("new");
        let Process(child) = &mut started(home, &["volume add", text(&new)]);
        let seen = watch.await_writes(child, events);
        stop(child, Signal::SIGKILL);
        (seen, child.wait().unwrap().code())
    };
    let (events, code) = run(&filled(&["second"]), usize::MAX);
    assert_eq!(code, Some(0));
    let mut killed = 0;
    for after in 0..events {
        let home = filled(&["second"]);
        let (_, code) = run(&home, after);
        killed += u32::from(code.is_none());
        is_whole(&home);
        let new = home.beside("new");
        ends(&["volume", "add", text(&home.path), text(&new)], 0);
        assert_eq!(volumes(&home), 3, "{after} of {events}");
        is_whole(&home);
    }
    assert!(killed > 0);
}

#[test]
fn the_pages_of_a_retired_volume_move_to_the_others() {
    let home = filled(&["second", "third"]);
    let (at, third) = (text(&home.path), home.beside("third"));
    let on_it = records(&home, 2);
    assert!(on_it > 50, "{on_it}");
    let planned = report(&["volume", "retire", at, text(&third), "--dry-run"], 0);
    assert_eq!(
        (&planned["pages"], &planned["excess_bytes"]),
        (&on_it.into(), &0.into())
    );
    assert_eq!(planned["retired"], false);
    let done = report(&["volume", "retire", at, text(&third)], 0);
    assert_eq!(
        (&done["pages_moved"], &done["evicted_pages"]),
        (&on_it.into(), &0.into())
    );
    says(
        &["volume", "retire", at, text(&third)],
        0,
        &["Was retired already"],
    );
    std::fs::remove_file(&third).unwrap();
    is_whole(&home);
    assert_eq!(volumes(&home), 2);
    // The place of a retired volume is not used again, its file may be.
    report(&["volume", "add", at, text(&third)], 0);
    assert_eq!(volumes(&home), 3);
    is_whole(&home);
    home.with(|pool| (20..26).for_each(|seed| pool.put(&chain(seed, 60))));
    assert!(records(&home, 3) > 0);
}

#[test]
fn without_room_the_coldest_pages_go_and_are_counted() {
    let home = Home::with_volumes(&["second"]);
    let (at, second) = (text(&home.path), home.beside("second"));
    let count = |first, last| -> usize {
        let keys: Vec<PageKey> = (first..last).flat_map(|seed| chain(seed, 60)).collect();
        home.with(|pool| pool.hits(&keys))
    };
    home.with(|pool| (1..60).for_each(|seed| pool.put(&chain(seed, 60))));
    let before = count(1, 60);
    let planned = report(&["volume", "retire", at, text(&second), "--dry-run"], 0);
    assert!(planned["excess_bytes"].as_u64().unwrap() > 0, "{planned:#}");
    let done = report(&["volume", "retire", at, text(&second)], 0);
    let evicted = done["evicted_pages"].as_u64().unwrap();
    assert!(evicted > 0, "{done:#}");
    let document: Value = home.json("verify", &["--deep"], 0);
    let left = before as u64 - evicted;
    assert_eq!(document["deep"]["good_pages"], left);
    assert_eq!((count(1, 60) as u64, count(50, 60)), (left, 600));
}

#[test]
fn a_retirement_killed_at_any_moment_leaves_every_page_and_the_next_one_finishes() {
    let run = |home: &Home, events: usize, signal| {
        let watch = Watch::on_directory(home);
        let second = home.beside("second");
        let Process(child) = &mut started(home, &["volume retire", text(&second)]);
        let seen = watch.await_writes(child, events);
        stop(child, signal);
        (seen, child.wait().unwrap().code())
    };
    let (events, code) = run(&filled(&["second"]), usize::MAX, Signal::SIGKILL);
    assert_eq!(code, Some(0));
    let mut random = rand_pcg::Pcg64Mcg::seed_from_u64(11);
    let mut killed = 0;
    for round in 0..kills() / 2 {
        let home = filled(&["second"]);
        let after = match round {
            // Its last writes are those of superblocks.
            0..5 => events - 1 - round as usize,
            _ => random.random_range(0..events),
        };
        let signal = match round % 5 {
            4 => Signal::SIGINT,
            _ => Signal::SIGKILL,
        };
        let (_, code) = run(&home, after, signal);
        killed += u32::from(code.is_none());
        is_whole(&home);
        let second = home.beside("second");
        ends(&["volume", "retire", text(&home.path), text(&second)], 0);
        assert_eq!(volumes(&home), 1, "{after} of {events}");
        std::fs::remove_file(&second).unwrap();
        is_whole(&home);
    }
    assert!(killed > 0);
}
