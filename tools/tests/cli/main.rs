//! The `larder` binary as people and scripts use it: its output, its exit status, its files.

#![allow(clippy::unwrap_used, missing_docs)]

mod bench;
mod bundle;
mod containers;
mod displaced;
mod documents;
mod hung;
mod limits;
mod metrics;
mod operator;
mod page;
mod pins;
mod prometheus;
mod quotas;
mod sealed;
mod served;
#[path = "../../../tests/support/mod.rs"]
mod support;
mod terminal;
mod told;
mod trouble;

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use larder_engine::{OpenOptions, PageStore, Store};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use support::honest::{Process, skipped};
use support::sparse::pack;
use support::{directory, ends, fails, json, larder, report, says, stderr, text};
use tempfile::TempDir;

const STORE_SIZE: &str = "256MiB";

/// The output of `larder doctor`. Its exit status depends on the machine.
fn doctor(arguments: &[&str]) -> String {
    let output = larder(&[&["doctor"], arguments].concat()).output();
    String::from_utf8(output.unwrap().stdout).unwrap()
}

fn store_in(directory: &TempDir) -> PathBuf {
    let path = directory.path().join("store");
    json(&["create", text(&path), "--size", STORE_SIZE]);
    path
}

/// A trace of `requests` conversations turns: every second request repeats the one before it and
/// adds `blocks`.
fn trace_in(directory: &TempDir, requests: u64, blocks: u64) -> PathBuf {
    let path = directory.path().join("trace.jsonl");
    let mut lines = String::new();
    for request in 0..requests {
        let first = request / 2 * 2 * blocks;
        let ids: Vec<u64> = (first..first + (1 + request % 2) * blocks).collect();
        let tokens = ids.len() * 512;
        let line = serde_json::json!({
            "timestamp": request, "input_length": tokens, "output_length": 1, "hash_ids": ids
        });
        writeln!(lines, "{line}").unwrap();
    }
    std::fs::write(&path, lines).unwrap();
    path
}

fn replay<'a>(trace: &'a Path, store: &'a Path, page_bytes: &'a str) -> Vec<&'a str> {
    vec![
        "replay",
        "store",
        text(trace),
        "--store",
        text(store),
        "--capacity",
        STORE_SIZE,
        "--page-bytes",
        page_bytes,
    ]
}

#[test]
fn create_says_what_it_made() {
    let directory = directory();
    let path = directory.path().join("store");
    let created = json(&[
        "create",
        text(&path),
        "--size",
        STORE_SIZE,
        "--segment-size",
        "16MiB",
    ]);
    assert_eq!(created["capacity_bytes"], 256 << 20);
    assert_eq!(created["segment_bytes"], 16 << 20);
    assert_eq!(created["volumes"], serde_json::json!([path]));
    assert!(created["usable_bytes"].as_u64().unwrap() > 128 << 20);
    assert_eq!(path.metadata().unwrap().len(), 256 << 20);
    let again = ["create", text(&path), "--size", STORE_SIZE, "--force"];
    says(&again, 0, &["Capacity          256 MiB\n"]);
}

#[test]
fn a_dry_run_checks_and_makes_nothing() {
    let directory = directory();
    let path = directory.path().join("store");
    let would = json(&["create", text(&path), "--size", STORE_SIZE, "--dry-run"]);
    assert_eq!(would["dry_run"], true);
    assert!(!path.exists());
    fails(
        &["create", text(&path), "--size", "1MiB", "--dry-run"],
        2,
        &["1048576"],
    );
}

#[test]
fn sizes_that_make_no_store_are_usage_errors_and_leave_nothing() {
    let directory = directory();
    let path = directory.path().join("store");
    let path_text = text(&path);
    fails(&["create", path_text, "--size", "1MiB"], 2, &["1048576"]);
    fails(
        &["create", path_text, "--size", "256MB"],
        2,
        &["`MB` is not a unit", "MiB"],
    );
    fails(
        &["create", path_text, "--size", "big"],
        2,
        &["`big` is not a size"],
    );
    fails(
        &[
            "create",
            path_text,
            "--size",
            STORE_SIZE,
            "--segment-size",
            "128KiB",
        ],
        2,
        &["segment", "256 KiB"],
    );
    assert!(!path.exists());
}

#[test]
fn an_existing_store_is_destroyed_only_by_force() {
    let directory = directory();
    let path = store_in(&directory);
    let before = pack(&path);
    fails(
        &["create", text(&path), "--size", STORE_SIZE],
        3,
        &[text(&path), "already holds a Larder store", "--force"],
    );
    assert!(pack(&path) == before, "the store was changed");
    json(&["create", text(&path), "--size", STORE_SIZE, "--force"]);
    assert!(pack(&path) != before, "the store was not made anew");
}

#[test]
fn a_foreign_file_is_refused_and_kept() {
    let directory = directory();
    for (name, content) in [
        ("letter", "Dear all".to_owned()),
        ("book", "Call me Ishmael. ".repeat(100_000)),
    ] {
        let path = directory.path().join(name);
        std::fs::write(&path, &content).unwrap();
        let foreign = [text(&path), "not a Larder store"];
        fails(&["create", text(&path), "--size", STORE_SIZE], 3, &foreign);
        fails(
            &["create", text(&path), "--size", STORE_SIZE, "--dry-run"],
            3,
            &foreign,
        );
        fails(&["bench", text(&path), "--op", "get"], 3, &foreign);
        assert_eq!(std::fs::read(&path).unwrap(), content.as_bytes());
    }
}

#[test]
fn a_missing_directory_is_named() {
    let directory = directory();
    let path = directory.path().join("nowhere/store");
    fails(
        &["create", text(&path), "--size", STORE_SIZE],
        3,
        &[text(&path), "directory"],
    );
    fails(
        &["bench", text(&path), "--op", "get"],
        3,
        &[text(&path), "check the path"],
    );
    fails(
        &[
            "doctor",
            text(&directory.path().join("nowhere/deeper/store")),
        ],
        3,
        &["nowhere", "check the path"],
    );
}

#[test]
fn a_store_in_use_names_its_holder() {
    let directory = directory();
    let path = store_in(&directory);
    let store = Store::open(&path, OpenOptions::default()).unwrap();
    let pid = format!("process {}", std::process::id());
    fails(
        &["bench", text(&path), "--op", "get"],
        3,
        &[text(&path), "in use", &pid],
    );
    let said = doctor(&[text(&path)]);
    assert!(said.contains(&format!("yes, by {pid}")), "{said}");
    store.close().unwrap();
    drop(store);
    let said = doctor(&[text(&path)]);
    assert!(said.contains("closed cleanly"), "{said}");
}

#[test]
fn replay_hits_what_earlier_requests_put_and_continues_a_store() {
    let directory = directory();
    let trace = trace_in(&directory, 20, 3);
    let store = directory.path().join("replayed");
    let arguments = replay(&trace, &store, "64KiB");
    let first = json(&arguments);
    assert_eq!(
        (&first["requests"], &first["pages_requested"]),
        (&20.into(), &90.into())
    );
    assert_eq!(
        (&first["pages_hit"], &first["pages_put"]),
        (&30.into(), &60.into())
    );
    assert_eq!(first["bytes_read"], 30 * 65536);
    let losses = [
        "wrong_pages",
        "refused_pages",
        "failed_pages",
        "damaged_pages",
        "evicted_pages",
        "lapsed_pages",
    ];
    for count in losses {
        assert_eq!(first[count], 0, "{count}");
    }
    assert!(first["write_amplification"].as_f64().unwrap() >= 1.0);
    assert!(first["peak_rss_bytes"].as_u64().unwrap() > 0);
    let again = json(&[&arguments[..], &["--limit", "10"]].concat());
    assert_eq!(
        (&again["requests"], &again["hit_rate"]),
        (&10.into(), &1.0.into())
    );
}

#[test]
fn replay_refuses_a_store_of_another_size_or_page() {
    let directory = directory();
    let trace = trace_in(&directory, 4, 3);
    let store = directory.path().join("replayed");
    json(&replay(&trace, &store, "64KiB"));
    let mut larger = replay(&trace, &store, "64KiB");
    larger[6] = "512MiB";
    fails(
        &larger,
        2,
        &[text(&store), "268435456", "536870912", "--capacity"],
    );
    fails(
        &replay(&trace, &store, "128KiB"),
        2,
        &[
            "namespace mismatch",
            "65536 bytes",
            "131072 bytes",
            "--page-bytes",
        ],
    );
    assert_eq!(json(&replay(&trace, &store, "64KiB"))["hit_rate"], 1.0);
}

#[test]
fn a_store_that_would_be_too_small_names_the_flag_that_says_its_size() {
    let directory = directory();
    let trace = trace_in(&directory, 4, 3);
    let path = directory.path().join("store");
    let mut small = replay(&trace, &path, "64KiB");
    small[6] = "64MiB";
    let create = ["create", text(&path), "--size", "64MiB"];
    let flags = ["--capacity", "--size"];
    for (arguments, flag) in [&small[..], &create].into_iter().zip(flags) {
        let words = ["64 MiB", "1 volume needs 6", "102760448 bytes (98 MiB)"];
        fails(arguments, 2, &[&words[..], &[flag]].concat());
        let message = stderr(&larder(arguments).output().unwrap());
        for other in flags.into_iter().filter(|other| *other != flag) {
            assert!(!message.contains(other), "{arguments:?}: {message}");
        }
    }
    assert!(!path.exists());
    small[6] = "102760448";
    assert_eq!(json(&small)["path"], text(&path));
}

#[test]
fn replay_names_what_is_wrong_with_its_input() {
    let directory = directory();
    let store = directory.path().join("replayed");
    let missing = directory.path().join("missing.jsonl");
    fails(
        &replay(&missing, &store, "64KiB"),
        3,
        &[text(&missing), "cannot read the trace"],
    );
    assert!(
        !store.exists(),
        "no store is made for a trace that is not there"
    );
    let other = directory.path().join("other");
    std::fs::write(&other, "no trace\n").unwrap();
    fails(
        &replay(&other, &store, "64KiB"),
        2,
        &[text(&other), "line 1", "not a request"],
    );
    assert!(!store.exists(), "nor for a file that is no trace");
    let trace = trace_in(&directory, 4, 3);
    std::fs::write(
        &trace,
        std::fs::read_to_string(&trace).unwrap() + "{\"hash_ids\": 7}\n",
    )
    .unwrap();
    fails(
        &replay(&trace, &store, "64KiB"),
        2,
        &[text(&trace), "line 5"],
    );
    let good = trace_in(&directory, 4, 3);
    assert_eq!(
        json(&replay(&good, &store, "64KiB"))["hit_rate"],
        1.0,
        "what was put before the bad line stays"
    );
}

/// A replay whose acknowledgements are read through a pipe: each line read is an acknowledged page.
fn replay_until_acknowledged(
    arguments: &[&str],
    pages: usize,
) -> (Child, BufReader<std::process::ChildStdout>, String) {
    let mut child = larder(arguments)
        .args(["--ack-log", "/dev/stdout", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut log = String::new();
    while log.matches("put ").count() < pages {
        assert!(
            lines.read_line(&mut log).unwrap() > 0,
            "it ended early: {log}"
        );
    }
    (child, lines, log)
}

#[test]
fn every_page_acknowledged_before_a_sigkill_is_found_after_it() {
    let directory = directory();
    let trace = trace_in(&directory, 1000, 8);
    let store = directory.path().join("replayed");
    let acks = directory.path().join("acks");
    let arguments = replay(&trace, &store, "4KiB");
    let mut log = String::new();
    for pages in [40, 200, 500] {
        let (mut child, mut rest, lines) = replay_until_acknowledged(&arguments, pages);
        child.kill().unwrap();
        child.wait().unwrap();
        log += &lines;
        rest.read_to_string(&mut log).unwrap();
        std::fs::write(&acks, &log).unwrap();
        let check = json(
            &[
                &arguments[..],
                &["--limit", "0", "--check-log", text(&acks)],
            ]
            .concat(),
        );
        let check = &check["check"];
        assert!(
            check["acknowledged_pages"].as_u64().unwrap() >= pages as u64,
            "{check}"
        );
        assert_eq!(check["found_pages"], check["acknowledged_pages"], "{check}");
        assert!(check["owed_pages"].as_u64().unwrap() > 0, "{check}");
        assert_eq!(
            (&check["wrong_pages"], &check["lost_pages"]),
            (&0.into(), &0.into()),
            "{check}"
        );
    }
}

#[test]
fn a_page_that_is_owed_and_missing_is_a_finding() {
    let directory = directory();
    let trace = trace_in(&directory, 4, 3);
    let store = directory.path().join("replayed");
    let acks = directory.path().join("acks");
    json(&replay(&trace, &store, "64KiB"));
    std::fs::write(&acks, format!("put {}\n", "ab".repeat(32))).unwrap();
    let arguments = [
        &replay(&trace, &store, "64KiB")[..],
        &["--check-log", text(&acks)],
    ]
    .concat();
    assert_eq!(report(&arguments, 1)["check"]["lost_pages"], 1);
}

#[test]
fn ctrl_c_ends_a_replay_cleanly_with_what_it_has_done() {
    let directory = directory();
    let trace = trace_in(&directory, 2000, 8);
    let store = directory.path().join("replayed");
    let arguments = replay(&trace, &store, "64KiB");
    let (mut child, mut rest, mut log) = replay_until_acknowledged(&arguments, 40);
    // As `timeout` does it, which signals the process and then its group.
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
        kill(pid, signal).unwrap();
    }
    rest.read_to_string(&mut log).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let document: Value = serde_json::from_str(&log[log.find('{').unwrap()..]).unwrap();
    assert_eq!(document["interrupted"], true);
    assert!(document["requests"].as_u64().unwrap() < 2000, "{document}");
    let said = doctor(&[text(&store)]);
    assert!(said.contains("closed cleanly"), "{said}");
}

#[test]
fn doctor_judges_the_place_it_is_asked_about() {
    let directory = directory();
    let report = json(&["doctor", text(directory.path())]);
    let facts = report["facts"].as_array().unwrap();
    for name in [
        "kernel",
        "io_uring",
        "locked memory",
        "huge pages",
        "file system",
        "direct I/O",
        "scheduler",
        "free space",
    ] {
        let fact = facts.iter().find(|fact| fact["name"] == name);
        let fact = fact.unwrap_or_else(|| panic!("nothing about {name}: {report}"));
        assert!(
            ["ok", "warn"].contains(&fact["level"].as_str().unwrap()),
            "{fact}"
        );
    }
    let lines = doctor(&[text(directory.path())]);
    assert_eq!(lines.lines().count(), facts.len());
    assert!(
        lines
            .lines()
            .all(|line| line.starts_with("ok ") || line.starts_with("warn ")),
        "{lines}"
    );
}

#[test]
fn a_reader_that_is_gone_ends_the_output_and_nothing_else() {
    for arguments in [
        &["doctor"][..],
        &["doctor", "--json"],
        &["--help"],
        &["create", "--help"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = larder(arguments).stdout(writer).output().unwrap();
        assert_eq!(stderr(&output), "", "{arguments:?}");
        assert_ne!(output.status.code(), Some(101), "{arguments:?}");
    }
}

#[test]
fn a_watch_ends_when_its_reader_is_gone() {
    let directory = directory();
    let path = store_in(&directory);
    let owner = larder(&["serve", text(&path)])
        .stdout(Stdio::piped())
        .spawn();
    let mut owner = Process(owner.unwrap());
    let mut served = String::new();
    let mut told = BufReader::new(owner.0.stdout.take().unwrap());
    told.read_line(&mut served).unwrap();
    for arguments in [&["--json"][..], &[]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let watch = ["stat", text(&path), "--watch", "0.01"];
        let output = larder(&[&watch[..], arguments].concat())
            .stdout(writer)
            .output()
            .unwrap();
        assert_eq!(stderr(&output), "", "{served}");
        assert_eq!(output.status.code(), Some(0));
    }
}

#[test]
fn what_makes_no_sense_is_a_usage_error() {
    fails(&[], 2, &["Usage"]);
    fails(&["put"], 2, &["unrecognized subcommand"]);
    fails(&["bench", "store"], 2, &["--op"]);
    fails(
        &[
            "replay",
            "store",
            "trace",
            "--store",
            "s",
            "--capacity",
            "4GiB",
        ],
        2,
        &["--page-bytes"],
    );
    for pause in ["0", "1e-9", "-1", "inf"] {
        let watch = format!("--watch={pause}");
        fails(&["stat", "s", &watch], 2, &["--watch", "0.01"]);
    }
    ends(&["--version"], 0);
}

#[test]
fn the_demo_survives_its_kill_and_cleans_up() {
    let directory = directory();
    let shown = json(&["demo", "--dir", text(directory.path())]);
    assert_eq!(shown["survived_pages"], shown["acknowledged_pages"]);
    assert!(shown["acknowledged_pages"].as_u64().unwrap() > 0);
    assert!(shown["requests"].as_u64() > shown["killed_after_requests"].as_u64());
    assert_eq!(shown["wrong_pages"], 0);
    assert!(shown["hit_rate"].as_f64().unwrap() > 0.5);
    assert!(shown["second_process_pages_hit"].as_u64().unwrap() > 0);
    assert_eq!(
        shown["second_process_pages_hit"],
        shown["second_process_pages_requested"]
    );
    page::is_complete("demo", &page::keys_of(&shown), &[]);
    assert_eq!(
        std::fs::read_dir(directory.path()).unwrap().count(),
        0,
        "the demo left something behind"
    );
}
