//! A trace through L1, L2 and a store: no wrong byte, no lost page, and the expected gain of each
//! tier.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use support::honest::eventually;
use support::{chat_trace, directory, fails, json, larder, make_trace};

/// Requests of the made trace.
const REQUESTS: usize = 150;

/// The arguments of a replay whose pools turn over: L1 holds some three of the longest requests of
/// the made trace, L2 twelve, the store most of it. Requests come 1 ms apart in the trace, and one
/// in two seconds so.
fn arguments<'a>(trace: &'a Path, store: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let (trace, store) = (trace.to_str().unwrap(), store.to_str().unwrap());
    let sizes = ["--l1", "5GiB", "--l2", "20GiB", "--page-size", "256"];
    let mut arguments = vec!["replay", "tiers", trace, "--store", store];
    // Pages of 32 MiB, of which 8 KiB are moved.
    arguments.extend(["--capacity", "512GiB", "--scale", "4096"]);
    arguments.extend(["--rate", "0.0005", "--link", "55"]);
    arguments.extend(sizes.iter().chain(more));
    arguments
}

/// A made trace in a directory, and where a store may be.
fn stage() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let directory = directory();
    let trace = directory.path().join("trace.jsonl");
    make_trace(&trace, REQUESTS, 11);
    let store = directory.path().join("store");
    (directory, trace, store)
}

fn settings(report: &Value) -> &Vec<Value> {
    report["settings"].as_array().unwrap()
}

#[track_caller]
fn is_sound(report: &Value) {
    for setting in settings(report) {
        assert_eq!(setting["wrong_pages"], 0, "{report:#}");
        assert_eq!(setting["leaked_pages"], 0, "{report:#}");
        assert_eq!(setting["leaks"], serde_json::json!([]), "{report:#}");
    }
    assert_eq!(report["store"]["damaged_pages"], 0, "{report:#}");
}

fn number(setting: &Value, field: &str) -> f64 {
    setting[field].as_f64().unwrap()
}

#[test]
fn every_write_and_prefetch_policy_gives_right_pages_and_leaks_none() {
    let (directory, trace, _) = stage();
    for write in ["write_through", "write_through_selective", "write_back"] {
        for prefetch in ["best_effort", "wait_complete", "timeout"] {
            let store = directory.path().join(format!("{write}-{prefetch}"));
            let policies = [
                "--write-policy",
                write,
                "--prefetch-policy",
                prefetch,
                "--only",
            ];
            let report = json(&arguments(&trace, &store, &policies));
            is_sound(&report);
            let all = &settings(&report)[0];
            // The longest do not fit L1.
            let (served, not) = (number(all, "requests"), number(all, "too_long_requests"));
            assert!(served + not == REQUESTS as f64 && not > 0.0, "{report:#}");
            for moved in ["pages_loaded", "pages_backed_up", "pages_put", "prefetches"] {
                assert!(number(all, moved) > 0.0, "{moved}: {report:#}");
            }
            for found in ["l1_tokens", "l2_tokens"] {
                assert!(number(all, found) > 0.0, "{found}: {report:#}");
            }
            // Who does not wait may find nothing there; of the other write policies one puts little
            // in L2, one has nothing there to hang a prefetch on.
            if write == "write_through" && prefetch != "best_effort" {
                assert!(number(all, "l3_tokens") > 0.0, "{report:#}");
            }
            std::fs::remove_file(&store).unwrap();
        }
    }
}

#[test]
fn each_tier_finds_more_and_shortens_the_time_to_the_first_token() {
    let (_directory, trace, store) = stage();
    // A request that waits finds all stored pages, however slow the disk is.
    let more = ["--tflops", "2000", "--prefetch-policy", "wait_complete"];
    let report = json(&arguments(&trace, &store, &more));
    is_sound(&report);
    let names: Vec<&str> = settings(&report)
        .iter()
        .map(|setting| setting["setting"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["L1", "L1+L2", "L1+L2+L3", "L3 not told"]);
    assert_eq!(report["ttft_refused"], Value::Null, "{report:#}");
    let [l1, l2, l3, _] = &settings(&report)[..] else {
        unreachable!("there are four");
    };
    for (less, more) in [(l1, l2), (l2, l3)] {
        assert!(
            number(less, "hit_rate") < number(more, "hit_rate"),
            "{report:#}"
        );
        assert!(number(less, "load") > number(more, "load"), "{report:#}");
    }
    let asked = number(l1, "input_tokens");
    for setting in settings(&report) {
        assert_eq!(number(setting, "input_tokens"), asked);
        let found = ["l1_tokens", "l2_tokens", "l3_tokens", "computed_tokens"];
        let parts: f64 = found.iter().map(|part| number(setting, part)).sum();
        assert_eq!(parts, asked, "{setting:#}");
        let ttft = setting["ttft"]["p99_seconds"].as_f64().unwrap();
        assert!(ttft >= setting["service"]["p99_seconds"].as_f64().unwrap());
    }
    assert_eq!(number(l1, "l2_tokens"), 0.0);
    assert_eq!(number(l1, "pages_backed_up"), 0.0);
    assert_eq!(number(l2, "pages_put") + number(l2, "disk_busy"), 0.0);
}

#[test]
fn where_the_load_is_above_what_the_servers_can_do_times_are_not_compared() {
    let (_directory, trace, store) = stage();
    let slow = arguments(&trace, &store, &["--tflops", "20"]);
    let report = json(&slow);
    is_sound(&report);
    let reason = report["ttft_refused"].as_str().unwrap();
    assert!(reason.contains("times with L1"), "{reason}");
    for setting in settings(&report) {
        assert_eq!(setting["ttft"], Value::Null);
        assert_eq!(setting["queueing"], Value::Null);
        assert!(number(&setting["service"], "p50_seconds") > 0.0);
    }
    // Faster servers can, and say so to people.
    let more = ["--only", "--instances", "4", "--tflops", "2000"];
    let people = larder(&arguments(&trace, &store, &more)).output().unwrap();
    let text = String::from_utf8(people.stdout).unwrap();
    assert!(text.contains("TTFT p50 p90 p99"), "{text}");
    assert!(!text.contains("not compared"), "{text}");
}

#[test]
fn servers_find_in_the_store_what_others_put_there() {
    let (_directory, trace, store) = stage();
    let more = [
        "--only",
        "--instances",
        "3",
        "--prefetch-policy",
        "wait_complete",
    ];
    let report = json(&arguments(&trace, &store, &more));
    is_sound(&report);
    assert!(number(&settings(&report)[0], "l3_tokens") > 0.0);
    // A later run finds all that this one left, and is not compared with one on an empty store.
    let again = arguments(&trace, &store, &["--prefetch-policy", "wait_complete"]);
    let again = json(&again);
    is_sound(&again);
    assert_eq!(settings(&again).len(), 3);
    assert!(number(&again["store"], "pages_before") > 0.0);
    let (first, second) = (&settings(&report)[0], &settings(&again)[2]);
    assert!(
        number(second, "hit_rate") > number(first, "hit_rate") + 0.2,
        "{again:#}"
    );
}

#[test]
fn where_computing_is_faster_nothing_is_read() {
    let (_directory, trace, store) = stage();
    let more = [
        "--only",
        "--break-even",
        "--tflops",
        "1000000",
        "--hbm",
        "1000000",
    ];
    let report = json(&arguments(&trace, &store, &more));
    is_sound(&report);
    let all = &settings(&report)[0];
    assert!(number(all, "break_even_prefetches") > 0.0, "{report:#}");
    // It takes a read to know how long one takes.
    assert!(number(all, "pages_prefetched") < number(all, "pages_put") / 10.0);
}

#[test]
fn every_model_has_pages_that_come_back_right() {
    let (directory, trace, _) = stage();
    for model in ["llama-3.1-70b", "qwen3-32b", "deepseek-v3"] {
        let store = directory.path().join(model);
        let more = [
            "--only",
            "--model",
            model,
            "--limit",
            "60",
            "--instances",
            "2",
        ];
        let report = json(&arguments(&trace, &store, &more));
        is_sound(&report);
        assert_eq!(report["model"], model);
        assert!(
            number(&settings(&report)[0], "pages_loaded") > 0.0,
            "{report:#}"
        );
    }
}

#[test]
fn the_chat_trace_goes_through_all_tiers() {
    let Some(trace) = chat_trace() else { return };
    let directory = directory();
    let store = directory.path().join("store");
    let (trace, store) = (trace.to_str().unwrap(), store.to_str().unwrap());
    let mut arguments = vec!["replay", "tiers", trace, "--store", store, "--limit", "400"];
    arguments.extend(["--l1", "40GiB", "--l2", "80GiB", "--capacity", "512GiB"]);
    arguments.extend(["--page-size", "128", "--scale", "2048", "--instances", "2"]);
    arguments.extend(["--prefetch-policy", "wait_complete"]);
    let report = json(&arguments);
    is_sound(&report);
    assert_eq!(settings(&report)[2]["requests"], 400);
    assert!(
        number(&settings(&report)[2], "l3_tokens") > 0.0,
        "{report:#}"
    );
}

#[test]
fn what_makes_no_sense_is_refused_before_anything_is_made() {
    let (directory, trace, store) = stage();
    let with = |more: &[&'static str]| -> Vec<String> {
        arguments(&trace, &store, more)
            .into_iter()
            .map(str::to_owned)
            .collect()
    };
    let cases: [(&[&str], &[&str]); 5] = [
        (&["--model", "gpt-2"], &["gpt-2", "qwen3-32b"]),
        (&["--write-policy", "back"], &["write_back"]),
        (&["--prefetch-policy", "none"], &["wait_complete"]),
        (&["--tflops", "0"], &["above 0"]),
        (&["--instances", "0"], &["instances"]),
    ];
    for (more, words) in cases {
        let given = with(more);
        fails(
            &given.iter().map(String::as_str).collect::<Vec<_>>(),
            2,
            words,
        );
    }
    let (trace_text, store_text) = (trace.to_str().unwrap(), store.to_str().unwrap());
    let least = [
        "replay",
        "tiers",
        trace_text,
        "--store",
        store_text,
        "--capacity",
        "1GiB",
    ];
    fails(&least, 2, &["--l1", "--l2"]);
    let tiny = [&least[..], &["--l1", "1MiB", "--l2", "1GiB"]].concat();
    fails(&tiny, 2, &["--l1 1 MiB", "0 pages of 8 MiB"]);
    let narrow = [&least[..], &["--l1", "1GiB", "--l2", "80MiB"]].concat();
    let said = [
        "pages in --l2 = 10",
        "raise it to --l1 or more",
        "--write-policy write_back",
    ];
    fails(&narrow, 2, &said);
    let nowhere = directory.path().join("nowhere.jsonl");
    let missing = arguments(&nowhere, &store, &[]);
    fails(&missing, 3, &["nowhere.jsonl", "check the path"]);
    let small = arguments(&trace, &store, &[]);
    let small: Vec<&str> = small
        .iter()
        .map(|word| if *word == "512GiB" { "1GiB" } else { word })
        .collect();
    fails(&small, 2, &["--scale"]);
    // No machine has as many.
    fails(
        &arguments(&trace, &store, &["--cuda", "4096"]),
        3,
        &["L1", "--cuda"],
    );
    assert!(!store.exists());
    // Without times the moment of a request is not known.
    let timeless = directory.path().join("timeless.jsonl");
    std::fs::write(&timeless, "{\"hash_ids\": [1, 2]}\n").unwrap();
    fails(
        &arguments(&timeless, &store, &[]),
        2,
        &["timestamp", "replay store"],
    );
}

#[test]
fn a_replay_that_is_asked_to_end_says_what_it_did() {
    let (_directory, trace, store) = stage();
    let mut child = larder(&arguments(&trace, &store, &["--json"]))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("it makes its store", || {
        assert_eq!(child.try_wait().unwrap(), None, "it ended by itself");
        store.exists()
    });
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
    kill(pid, Signal::SIGINT).unwrap();
    let mut text = String::new();
    child
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{text}");
}
