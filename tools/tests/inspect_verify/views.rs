//! The views of a store, and refused requests.

use std::process::Stdio;

use larder_engine::PageStore;
use larder_format::SUPERBLOCK_OFFSETS;
use serde_json::Value;

use crate::home::{PAGE_BYTES, Pool};
use crate::support::home::{Home, SEGMENTS};
use crate::support::sparse::pack;
use crate::support::{chain, ends, fails, flip, text};

#[test]
fn a_store_closed_in_order_is_sound_and_every_page_put_is_checked() {
    let home = Home::new();
    home.with(|pool| (1..=7).for_each(|seed| pool.put(&chain(seed, 50))));
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["condition"], "clean");
    assert_eq!(document["pages"], 350);
    assert_eq!(document["deep"]["pages_checked"], 350);
    assert_eq!(document["deep"]["good_pages"], 350);
    assert_eq!(
        document["deep"]["bytes_checked"],
        350 * u64::from(PAGE_BYTES)
    );
    assert_eq!(document["deep"]["unfinished_pages"], 0);
    home.says("verify", &[], 0, &["closed cleanly", "sound"]);
    let document = home.json("inspect", &[], 0);
    assert_eq!(document["condition"], "clean");
    assert_eq!(document["pages"], 350);
    assert_eq!(document["live_bytes"], 350 * u64::from(PAGE_BYTES));
    assert_eq!(document["unproven_pages"], 0);
    assert_eq!(document["segments"], SEGMENTS);
    assert_eq!(document["namespaces"][0]["pages"], 350);
    assert_eq!(document["namespaces"][0]["record"]["model"], "tiny");
    home.says(
        "inspect",
        &[],
        0,
        &["closed cleanly", "tiny@w1 bf16", "350 pages"],
    );
    assert_eq!(
        home.with(|pool| pool.store.stats().usable_bytes),
        document["usable_bytes"].as_u64().unwrap()
    );
}

#[test]
fn an_empty_store_is_sound_and_says_so() {
    let home = Home::new();
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["deep"]["pages_checked"], 0);
    home.says("inspect", &[], 0, &["closed cleanly", "8 never written"]);
    home.says("inspect", &["--chains"], 0, &["namespace"]);
}

#[test]
fn a_store_in_use_is_not_verified_and_inspected_with_the_name_of_its_holder() {
    let home = Home::new();
    let me = format!("process {}", std::process::id());
    let store = home.open();
    let pool = Pool::new(&store);
    pool.put(&chain(1, 10));
    home.says("verify", &[], 3, &["in use", &me, "larder inspect"]);
    home.says("inspect", &[], 0, &["IN USE", &me, "a snapshot"]);
    let document = home.json("inspect", &[], 0);
    assert_eq!(document["condition"], "in_use");
    assert_eq!(document["holder"]["pid"], std::process::id());
    assert_eq!(document["holder"]["alive"], true);
    assert_eq!(document["pages"], 10);
    // Looking was no hindrance.
    pool.put(&chain(2, 10));
    store.close().unwrap();
    home.json("verify", &["--deep"], 0);
}

#[test]
fn what_is_no_store_is_refused_with_a_reason() {
    let home = Home::new();
    let foreign = home.beside("foreign");
    let short = home.beside("short");
    let empty = home.beside("empty");
    std::fs::write(&foreign, vec![7; 3 << 20]).unwrap();
    std::fs::write(&short, "hello").unwrap();
    std::fs::write(&empty, "").unwrap();
    let absent = home.beside("absent");
    let directory = home.directory.path().to_owned();
    let cases = [
        (&foreign, "not a Larder store"),
        (&short, "not a Larder store"),
        (&empty, "not a Larder store"),
        (&absent, "check the path"),
        (&directory, "is a directory"),
    ];
    for (path, reason) in cases {
        for command in ["inspect", "verify"] {
            let arguments = [command, text(path)];
            fails(&arguments, 3, &[reason, text(path)]);
            assert!(ends(&arguments, 3).stdout.is_empty());
        }
    }
    assert_eq!(std::fs::read(&short).unwrap(), b"hello");
}

#[test]
fn a_volume_that_is_not_the_first_one_names_the_first() {
    let home = Home::with_volumes(&["second"]);
    let second = home.beside("second");
    let words = ["not the first volume", text(&home.path)];
    fails(&["inspect", text(&second)], 3, &words);
}

#[test]
fn a_key_is_shown_with_all_that_happened_to_it() {
    let home = Home::new();
    let keys = chain(1, 3);
    home.with(|pool| {
        pool.put(&keys);
        pool.delete(keys[2]);
    });
    let shown = |options: &[&str]| home.json("inspect", options, 0)["key"].clone();
    let whole = keys[2].to_string();
    let key = shown(&["--key", &whole]);
    assert_eq!(key["records"].as_array().unwrap().len(), 1);
    assert_eq!(key["records"][0]["fate"], "gone");
    assert_eq!(key["removals"][0]["kind"], "deleted");
    assert_eq!(key["records"][0]["removed_by"], key["removals"][0]["birth"]);
    assert_eq!(key["records"][0]["depth"], 2);
    assert_eq!(key["records"][0]["parent"], keys[1].prefix().to_string());
    home.with(|pool| pool.put(&keys[2..]));
    let key = shown(&["--key", &whole]);
    let fates: Vec<&Value> = key["records"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| &r["fate"])
        .collect();
    assert_eq!(fates, ["gone", "live"]);
    assert_eq!(shown(&["--key", &keys[2].prefix().to_string()]), key);
    assert_eq!(shown(&["--key", &whole.to_uppercase()]), key);
    home.says(
        "inspect",
        &["--key", &whole],
        0,
        &[&whole, "live", "proven", "deleted at"],
    );
    let unknown = chain(9, 1)[0].to_string();
    home.says(
        "inspect",
        &["--key", &unknown],
        0,
        &["No record of this key"],
    );
    home.says("inspect", &["--key", "12"], 2, &["64 hex digits"]);
    home.says(
        "inspect",
        &["--key", &whole, "--segments"],
        2,
        &["cannot be used with"],
    );
}

#[test]
fn chains_are_counted_and_a_page_without_its_parent_is_an_orphan() {
    let home = Home::new();
    let keys = chain(1, 5);
    home.with(|pool| {
        pool.put(&keys);
        pool.put(&chain(2, 3));
    });
    let chains = home.json("inspect", &["--chains"], 0)["chains"][0].clone();
    assert_eq!((&chains["pages"], &chains["heads"]), (&8.into(), &2.into()));
    assert_eq!(
        (&chains["orphans"], &chains["longest"]),
        (&0.into(), &5.into())
    );
    assert_eq!(chains["mean_run_pages"], 4.0);
    home.with(|pool| pool.delete(keys[1]));
    let chains = home.json("inspect", &["--chains"], 0)["chains"][0].clone();
    assert_eq!(
        (&chains["pages"], &chains["orphans"]),
        (&7.into(), &1.into())
    );
    assert_eq!(chains["longest"], 3);
    home.says("inspect", &["--chains"], 0, &["orphans", "pages in a row"]);
    home.says("inspect", &["--segments"], 0, &["life", "blank", "open"]);
}

#[test]
fn neither_command_changes_a_byte() {
    let home = Home::new();
    home.crash_after(|pool| pool.put(&chain(1, 10)));
    flip(&home.path, SUPERBLOCK_OFFSETS[0] + 73);
    let before = pack(&home.path);
    home.says("inspect", &["--segments"], 1, &["left open"]);
    home.says("verify", &["--deep"], 1, &["superblock copy"]);
    assert!(before == pack(&home.path), "the store was changed");
}

#[test]
fn a_reader_that_has_seen_enough_ends_the_output_and_nothing_else() {
    let home = Home::new();
    for (command, options) in [("inspect", &["--segments"][..]), ("verify", &["--json"])] {
        let mut child = home
            .larder(command, options)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(
            output.stderr.is_empty(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}
