//! `larder compact` on the command line: its report, and refused requests.

use larder_format::PageKey;
use serde_json::Value;

use crate::home::block_offset;
use crate::support::home::Home;
use crate::support::sparse::pack;
use crate::support::{chain, flip};

fn chains() -> Vec<Vec<PageKey>> {
    (1..=9).map(|seed| chain(seed, 60)).collect()
}

fn scattered() -> Home {
    let home = Home::new();
    home.with(|pool| pool.put_in_turns(&chains()));
    home
}

#[test]
fn before_and_after_are_told_and_every_page_is_there() {
    let home = scattered();
    let document = home.report("compact", &[], 0);
    let (before, after) = (&document["before"], &document["after"]);
    assert_eq!(
        (&before["pages"], &after["pages"]),
        (&540.into(), &540.into())
    );
    assert!(before["mean_run_pages"].as_f64().unwrap() < 1.5);
    assert!(
        after["mean_run_pages"].as_f64().unwrap() > 40.0,
        "{document:#}"
    );
    assert_eq!(after["dead_bytes"], 0);
    assert_eq!(document["in_place"]["pages_moved"], 540);
    assert_eq!(
        home.json("verify", &["--deep"], 0)["deep"]["good_pages"],
        540
    );
    home.with(|pool| assert_eq!(pool.hits(&chains().concat()), 540));
    home.says(
        "compact",
        &[],
        0,
        &["540 pages", "0 pages to move", "average contiguous piece"],
    );
}

#[test]
fn a_dry_run_changes_no_byte() {
    let home = scattered();
    let before = pack(&home.path);
    let document = home.report("compact", &["--dry-run"], 0);
    assert_eq!(document["in_place"]["planned_pages"], 540);
    assert_eq!(document["after"], Value::Null);
    let new = home.beside("new");
    home.report(
        "compact",
        &["--dry-run", "--into", new.to_str().unwrap()],
        0,
    );
    assert!(before == pack(&home.path) && !new.exists());
}

#[test]
fn into_a_new_store_everything_is_written_in_order_and_the_old_one_stays() {
    let home = scattered();
    let before = pack(&home.path);
    let new = home.beside("new");
    let document = home.report("compact", &["--into", new.to_str().unwrap()], 0);
    assert_eq!(document["copied"]["pages_put"], 540);
    assert_eq!(document["after"]["used_segments"], 3);
    assert!(document["after"]["mean_run_pages"].as_f64().unwrap() > 40.0);
    assert!(before == pack(&home.path));
    let Home { directory, .. } = home;
    let home = Home {
        directory,
        path: new,
    };
    home.with(|pool| assert_eq!(pool.hits(&chains().concat()), 540));
    // Not over an existing store, and not into a store that is too small.
    let foreign = home.beside("foreign");
    std::fs::write(&foreign, "a letter").unwrap();
    for (taken, what) in [
        (home.beside("store"), "already holds a Larder store"),
        (foreign, "holds data that is not"),
    ] {
        let into = ["--into", taken.to_str().unwrap()];
        home.says("compact", &into, 3, &[what, "remove it"]);
    }
    let small = home.beside("small");
    let options = ["--into", small.to_str().unwrap(), "--size", "98MiB"];
    home.says("compact", &options, 2, &["larger --size"]);
    assert!(!small.exists());
}

#[test]
fn a_damaged_store_is_sent_to_repair_and_not_touched() {
    let home = scattered();
    let (segment, _) = home.written_segment();
    flip(&home.path, block_offset(segment, 3) + 200);
    let before = pack(&home.path);
    home.says("compact", &[], 1, &["1 damaged place", "verify --repair"]);
    assert!(before == pack(&home.path));
    home.json("verify", &["--repair"], 0);
    home.report("compact", &[], 0);
    home.json("verify", &["--deep"], 0);
}

#[test]
fn a_page_found_damaged_on_the_way_is_dropped_and_told() {
    let home = scattered();
    flip(&home.path, home.offset_of(&chains()[3][3]) + 99);
    let document = home.report("compact", &[], 1);
    assert_eq!(document["in_place"]["damaged_pages"], 1);
    assert_eq!(
        home.json("verify", &["--deep"], 0)["deep"]["good_pages"],
        539
    );
}

#[test]
fn a_store_in_use_is_refused_with_the_name_of_its_holder() {
    let home = scattered();
    let store = home.open();
    let holder = format!("in use by process {}", std::process::id());
    home.says("compact", &[], 3, &[&holder]);
    drop(store);
}
