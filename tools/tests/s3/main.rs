//! `larder remote` against a real S3 server: SeaweedFS, as one process.
//!
//! Without the program `weed` the tests are skipped. Further servers: `tests/run --remote`.

#![allow(clippy::unwrap_used, missing_docs)]

mod erasure;
mod fake;
mod faults;
#[path = "../transfer/home.rs"]
#[allow(dead_code)]
mod home;
mod incidents;
#[path = "../l4/node.rs"]
#[allow(dead_code)]
mod node;
#[path = "../cli/page.rs"]
mod page;
mod ports;
#[path = "../incidents/runbook.rs"]
mod runbook;
#[path = "../incidents/scene.rs"]
#[allow(dead_code)]
mod scene;
#[allow(dead_code)]
mod server;
#[path = "../../../tests/support/mod.rs"]
mod support;
#[path = "../incidents/watch.rs"]
#[allow(dead_code)]
mod watch;
#[allow(dead_code)]
mod weed;

use std::fs;
use std::io::Read;
use std::thread;
use std::time::Duration;

use larder_remote::RunName;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use faults::{Answer, Faults};
use home::{EVEN, put};
use node::Node;
use server::{Identity, SMALL_RUNS, Server};
use support::home::Home;
use support::honest::{Process, eventually, skipped};
use support::{chain, directory, larder, text};

/// A store with two runs of four pages of 16 tokens.
fn node() -> Home {
    let node = Home::new();
    node.with(|store| put(store, EVEN, &chain(1, 8)));
    node
}

/// Tokens of a run.
const RUN_TOKENS: &str = "64";
const RUN: [&str; 2] = ["--run-tokens", RUN_TOKENS];

fn server() -> Option<Server> {
    let server = weed::single();
    if server.is_none() {
        skipped(
            "a remote on an S3 server",
            "there is no `weed`: tests/run installs it",
        );
    }
    server
}

#[test]
fn runs_go_from_node_to_node_through_a_bucket() {
    let Some(server) = server() else { return };
    let (source, node) = (node(), Home::new());
    // Nodes with the same pages at the same moment create each object once.
    let twin = Home::new();
    twin.with(|store| put(store, EVEN, &chain(1, 8)));
    let pushed: Vec<_> = thread::scope(|scope| {
        let push = |home: &Home| {
            let path = text(&home.path).to_owned();
            let server = &server;
            scope.spawn(move || server.remote(&["push", &path], &RUN, Identity::Writer, 0))
        };
        let both = [push(&source), push(&twin)];
        both.into_iter().map(|push| push.join().unwrap()).collect()
    });
    let sum = |field: &str| {
        pushed
            .iter()
            .filter_map(|push| push[field].as_u64())
            .sum::<u64>()
    };
    assert_eq!((sum("runs_pushed"), sum("present_runs")), (2, 2));

    let listed = server.remote(&["ls"], &[], Identity::Reader, 0);
    assert_eq!(listed["runs"], 2);
    let verified = server.remote(&["verify"], &[], Identity::Reader, 0);
    assert_eq!(verified["good_pages"], 8);
    // An identity that may only read.
    let pull = ["pull", text(&node.path)];
    let pulled = server.remote(&pull, &[], Identity::Reader, 0);
    assert_eq!(pulled["pages_put"], 8);
    assert_eq!(node.having(EVEN, &chain(1, 8)), 8);

    let further = Home::new();
    further.with(|store| put(store, EVEN, &chain(2, 4)));
    let push = ["push", text(&further.path)];
    let denied = server.fails(&push, &RUN, Identity::Reader);
    assert!(denied.contains("access is denied"), "{denied}");
    let fingerprint = EVEN.fingerprint();
    let of_model = ["--namespace", fingerprint.as_str()];
    let denied = server.fails(&["prune"], &of_model, Identity::Reader);
    assert!(denied.contains("access is denied"), "{denied}");

    let pruned = server.remote(&["prune"], &of_model, Identity::Writer, 0);
    assert_eq!(pruned["removed_runs"], 2);
    assert_eq!(server.remote(&["ls"], &[], Identity::Reader, 0)["runs"], 0);
}

#[test]
fn a_bucket_that_is_missing_and_a_server_that_is_stopped_are_named_in_time() {
    let Some(server) = server() else { return };
    let source = node();
    let path = text(&source.path);
    let missing = server.fails_at("s3://no-such-bucket", &["ls"], &[]);
    assert!(missing.contains("does not exist"), "{missing}");

    let stopped = server.stopped(|| {
        let patience = [&RUN[..], &["--timeout", "300ms"]].concat();
        server.fails(&["push", path], &patience, Identity::Writer)
    });
    assert!(stopped.contains("no answer by the deadline"), "{stopped}");
    let pushed = server.remote(&["push", path], &RUN, Identity::Writer, 0);
    assert_eq!(pushed["runs_pushed"], 2);
}

#[test]
fn an_object_that_a_node_may_not_read_is_named_and_its_bucket_is_not_closed() {
    let endpoint = fake::start(1, Duration::ZERO);
    let verified = of_fake(&endpoint, &["verify", "s3://kvpages", "--unsigned"], 1);
    assert_eq!(
        (&verified["runs"], &verified["faults"]),
        (&json!(0), &json!([]))
    );
    let left_out = verified["unreadable"].as_array().unwrap();
    assert_eq!(left_out.len(), 1);
    assert!(left_out[0]["reason"].as_str().unwrap().contains("403"));
}

/// The document of `larder remote`, for a server without objects to give out.
#[track_caller]
fn of_fake(endpoint: &str, arguments: &[&str], code: i32) -> Value {
    let mut command = larder(&[&["remote"], arguments].concat());
    command.args(["--json", "--endpoint", endpoint]);
    let output = command.envs(Identity::Reader.variables()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_listing_may_take_longer_than_each_of_its_parts() {
    let endpoint = fake::start(5, Duration::from_secs(1));
    let listed = of_fake(&endpoint, &["ls", "s3://kvpages", "--timeout", "4s"], 0);
    assert_eq!(listed["runs"], 5);
}

#[test]
fn a_name_that_the_client_does_not_take_is_named_with_its_remedy() {
    for name in ["v1//stray", "v1/../stray"] {
        let endpoint = fake::start_with(Some(name), 1, Duration::ZERO);
        let mut ls = larder(&["remote", "ls", "s3://kvpages", "--endpoint", &endpoint]);
        let output = ls.envs(Identity::Reader.variables()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success());
        let is_clear = said.contains(name) && said.contains("remove the object");
        assert!(is_clear && !said.contains("network"), "{said}");
    }
}

#[test]
fn a_prefix_that_the_client_would_change_is_refused() {
    let code = |prefix: &str| {
        let url = format!("s3://kvpages/{prefix}");
        let mut ls = larder(&["remote", "ls", &url, "--timeout", "1s"]);
        // There is no server.
        ls.args(["--endpoint", "http://127.0.0.1:1"]);
        let output = ls.envs(Identity::Reader.variables()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), said.contains("its prefix"))
    };
    for prefix in ["a~b", "50%", "a#b", "a*", "what?", "a//b", "é", "a/./b"] {
        assert_eq!(code(prefix), (Some(2), true), "{prefix}");
    }
    for prefix in ["", "a/", "of/a test/A-b_c.9"] {
        assert_eq!(code(prefix), (Some(3), false), "{prefix}");
    }
}

/// `larder remote SUBCOMMAND` for a server with faults; its exit code, document and message.
fn of_faults(server: &Faults, subcommand: &[&str], options: &[&str]) -> (i32, Value, String) {
    let is_trusting = ["push", "pull", "verify"].contains(&subcommand[0]);
    let unsigned: &[&str] = if is_trusting { &["--unsigned"] } else { &[] };
    let place = ["s3://b", "--endpoint", &server.endpoint, "--json"];
    let arguments = [&["remote"], subcommand, &place[..], options, unsigned].concat();
    let mut command = larder(&arguments);
    let output = command.envs(Identity::Writer.variables()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let document = serde_json::from_slice(&output.stdout).unwrap_or_default();
    (output.status.code().unwrap(), document, said)
}

const PUSH_NEW: [&str; 3] = ["--run-tokens", RUN_TOKENS, "--new"];

/// A server with four runs, and their store.
fn with_runs() -> (Faults, Home) {
    let (server, source) = (Faults::start(), Home::new());
    source.with(|store| {
        put(store, EVEN, &chain(1, 8));
        put(store, EVEN, &chain(2, 8));
    });
    let push = ["push", text(&source.path)];
    let (code, pushed, said) = of_faults(&server, &push, &PUSH_NEW);
    assert_eq!((code, &pushed["runs_pushed"]), (0, &json!(4)), "{said}");
    (server, source)
}

/// A console, or the page of a portal.
#[test]
fn an_endpoint_that_answers_all_with_a_page_is_no_service() {
    let (server, source, node) = (Faults::start(), node(), Home::new());
    for method in ["GET", "HEAD", "PUT", "DELETE"] {
        server.at(method, "/", Answer::Html);
    }
    let path = text(&source.path);
    let commands: [(&[&str], &[&str]); 7] = [
        (&["ls"], &[]),
        (&["push", path], &RUN),
        (&["push", path], &PUSH_NEW),
        (&["pull", text(&node.path)], &[]),
        (&["verify"], &[]),
        (&["prune"], &["--older-than", "1h"]),
        (&["init"], &["--new"]),
    ];
    for (command, options) in commands {
        let (code, document, said) = of_faults(&server, command, options);
        let is_init = command[0] == "init";
        assert_eq!(code, if is_init { 1 } else { 3 }, "{command:?} {said}");
        let said = if is_init {
            document["problem"].to_string()
        } else {
            said
        };
        assert!(
            said.contains("no S3 service at the endpoint"),
            "{command:?} {said}"
        );
    }
    let l4 = [
        "--l4",
        "s3://b",
        "--l4-endpoint",
        &server.endpoint,
        "--l4-unsigned",
    ];
    let through = ["--l4-admission", "through"];
    let owner = Node::with(
        Home::new(),
        &[&l4[..], &through].concat(),
        &Identity::Writer.variables(),
    );
    owner.put(EVEN, &chain(1, 8));
    eventually("a refusal", || owner.state().contains("no S3 service"));
    assert_eq!(owner.count("breaker_openings"), 1);
    assert_eq!(
        owner.count("present_runs") + owner.count("published_runs"),
        0
    );
    assert_eq!(owner.doctor("l4").0, "warn");
}

#[test]
fn a_run_is_not_there_already_where_all_objects_are() {
    let (server, _) = with_runs();
    server.at("HEAD", "/", Answer::Html);
    let owner = owner(&server, &[]);
    owner.put(EVEN, &chain(3, 8));
    eventually("a failure", || owner.state().contains("never there"));
    assert_eq!(owner.count("present_runs"), 0);
}

/// An owner that publishes each run, over the remote of a server with faults.
fn owner(server: &Faults, options: &[&str]) -> Node {
    let l4 = ["--l4", "s3://b", "--l4-endpoint", &server.endpoint];
    let through = ["--l4-unsigned", "--l4-admission", "through"];
    let l4 = [&l4[..], &through, options].concat();
    Node::with(Home::new(), &l4, &Identity::Writer.variables())
}

#[test]
fn an_owner_publishes_into_a_new_bucket_when_it_is_a_remote() {
    let server = Faults::start();
    let owner = owner(&server, &["--l4-refresh", "100ms"]);
    owner.put(EVEN, &chain(1, 8));
    eventually("a look", || owner.state().contains("larder remote init"));
    owner.reaches("waiting_runs", 2);
    assert_eq!(owner.doctor("l4").0, "warn");
    assert_eq!(server.runs().len(), 0);
    let (code, init, said) = of_faults(&server, &["init"], &["--new"]);
    assert_eq!((code, &init["is_marked"]), (0, &json!(true)), "{said}");
    owner.reaches("published_runs", 2);
    assert_eq!(owner.state(), "in use");
    assert_eq!(server.runs().len(), 2);
}

/// The server counts: failed requests, and the parts of listings, are requests too.
#[test]
fn an_owner_makes_no_more_requests_than_its_budget() {
    for budget in [0_u64, 40] {
        let (server, source) = with_runs();
        server.at("PUT", ".run", Answer::Status("500 Internal Server Error"));
        let before = server.requests();
        let hour = budget.to_string();
        let often = ["--l4-requests-per-hour", &hour, "--l4-refresh", "100ms"];
        let owner = owner(&server, &often);
        owner.put(EVEN, &chain(3, 8));
        let is_used_up = || {
            owner.found(EVEN, &chain(1, 8));
            owner.found(EVEN, &chain(4, 8));
            owner.state().contains("l4_requests_per_hour")
        };
        eventually("the requests are used up", is_used_up);
        owner.put(EVEN, &chain(5, 8));
        for _ in 0..100 {
            let _ = is_used_up();
        }
        let made = server.requests() - before;
        assert!(
            (budget.saturating_sub(1)..=budget + 1).contains(&made),
            "{made} of {budget}"
        );
        assert_eq!(owner.count("published_runs"), 0);
        drop(source);
    }
}

/// One object of four has a fault.
#[test]
fn a_fault_of_one_object_costs_this_object_alone() {
    let faults = [
        Answer::Status("500 Internal Server Error"),
        Answer::Status("403 Forbidden"),
        Answer::Status("404 Not Found"),
        Answer::Long,
    ];
    let (server, _source) = with_runs();
    let broken = server.runs().remove(1);
    for fault in faults {
        server.heal();
        server.at("GET", &broken, fault);
        let (code, verified, said) = of_faults(&server, &["verify"], &[]);
        assert_eq!(
            (code, &verified["runs"]),
            (1, &json!(3)),
            "{fault:?} {said}"
        );
        is_named(&verified, &[&broken]);
        let node = Home::new();
        let (code, pulled, said) = of_faults(&server, &["pull", text(&node.path)], &[]);
        assert_eq!(
            (code, &pulled["runs_pulled"]),
            (1, &json!(3)),
            "{fault:?} {said}"
        );
        is_named(&pulled, &[&broken]);
    }
    server.heal();
    server.at("GET", &broken, Answer::Html);
    let (code, verified, said) = of_faults(&server, &["verify"], &[]);
    assert_eq!(
        (code, &verified["faults"][0]["run"]),
        (1, &json!(broken)),
        "{said}"
    );
    server.heal();
    server.at(
        "DELETE",
        &broken,
        Answer::Status("500 Internal Server Error"),
    );
    let fingerprint = EVEN.fingerprint();
    let prune = ["--namespace", fingerprint.as_str()];
    let (code, pruned, said) = of_faults(&server, &["prune"], &prune);
    assert_eq!((code, &pruned["removed_runs"]), (1, &json!(3)), "{said}");
    is_named(&pruned, &[&broken]);
    assert_eq!(server.runs(), [broken]);
}

/// Each object is refused, and the bucket is not.
#[test]
fn refused_objects_are_no_faultless_ones() {
    let (server, _source) = with_runs();
    for status in ["403 Forbidden", "404 Not Found"] {
        server.heal();
        server.at("GET", ".run", Answer::Status(status));
        let (code, verified, said) = of_faults(&server, &["verify"], &[]);
        assert_eq!(code, 1, "{said}");
        let runs = server.runs();
        let names: Vec<&str> = runs.iter().map(String::as_str).collect();
        is_named(&verified, &names);
        let node = Home::new();
        let (code, pulled, _) = of_faults(&server, &["pull", text(&node.path)], &[]);
        assert_eq!(code, 1);
        is_named(&pulled, &names);
    }
}

#[test]
fn a_push_leaves_out_an_object_that_is_not_taken() {
    for (method, status) in [
        ("PUT", "500 Internal Server Error"),
        ("PUT", "403 Forbidden"),
    ] {
        let (server, source) = with_runs();
        let broken = server.runs().remove(2);
        let fingerprint = EVEN.fingerprint();
        let prune = ["--namespace", fingerprint.as_str()];
        assert_eq!(of_faults(&server, &["prune"], &prune).0, 0);
        server.at(method, &broken, Answer::Status(status));
        let push = ["push", text(&source.path)];
        let (code, pushed, said) = of_faults(&server, &push, &RUN);
        assert_eq!(
            (code, &pushed["runs_pushed"]),
            (1, &json!(3)),
            "{method} {status} {said}"
        );
        is_named(&pushed, &[&broken]);
        is_documented(&pushed);
    }
}

/// The document has exactly the names of these objects as left out.
#[track_caller]
fn is_named(document: &Value, names: &[&str]) {
    let left_out = document["unreadable"].as_array().unwrap();
    let mut found: Vec<&str> = left_out
        .iter()
        .filter_map(|row| row["run"].as_str())
        .collect();
    found.sort_unstable();
    assert_eq!(found, names, "{document}");
}

/// The server is months behind this node.
#[test]
fn an_age_is_taken_from_the_clock_of_the_server() {
    let (server, _source) = with_runs();
    let runs = server.runs();
    server.date(&runs[0], faults::NEW);
    server.date(&runs[3], faults::OLD);
    let (code, pruned, said) = of_faults(&server, &["prune"], &["--older-than", "24h"]);
    assert_eq!((code, &pruned["removed_runs"]), (0, &json!(1)), "{said}");
    assert_eq!(server.runs(), runs[..3]);
}

/// All objects are equally old.
#[test]
fn the_object_in_use_is_kept() {
    let (server, _source) = with_runs();
    server
        .runs()
        .iter()
        .for_each(|run| server.date(run, faults::OLD));
    let (owner, used) = (owner(&server, &[]), chain(2, 4));
    eventually("the pages", || owner.found(EVEN, &used) == 4);
    assert_eq!(owner.read(EVEN, &used), [true; 4]);
    owner.reaches("touched_runs", 1);
    let (_, all, _) = of_faults(&server, &["prune"], &["--keep", "0", "--dry-run"]);
    let one = all["removed_bytes"].as_u64().unwrap() / 4;
    let (code, pruned, said) = of_faults(&server, &["prune"], &["--keep", &one.to_string()]);
    assert_eq!((code, &pruned["removed_runs"]), (0, &json!(3)), "{said}");
    let name = RunName {
        namespace: EVEN.namespace().fingerprint(),
        last: used[3],
    };
    assert_eq!(server.runs(), [name.to_string()]);
}

/// docs/json.md has exactly the keys of a document.
#[track_caller]
fn is_documented(document: &Value) {
    let command = document["command"].as_str().unwrap();
    let keys = page::keys_of(document);
    page::knows(command, &keys);
    page::is_complete(command, &keys, &[]);
}

#[test]
fn a_bench_measures_each_round_beside_the_client_alone() {
    let Some(server) = server() else { return };
    let place = directory();
    let bench = ["bench", text(place.path())];
    let options = [&SMALL_RUNS[..], &["--rounds", "2"]].concat();
    let measured = server.remote(&bench, &options, Identity::Writer, 0);
    is_documented(&measured);
    for way in ["publish", "fetch"] {
        assert_eq!(measured[way]["speed"]["pairs"], 2, "{measured}");
        assert!(measured[way]["speed"]["lowest"].as_f64() > Some(0.0));
        assert!(measured[way]["encryption_cpu_seconds_per_gib"].as_f64() > Some(0.0));
        let bare = &measured[format!("bare_{way}")];
        assert_eq!(bare["speed"]["pairs"], 2, "{measured}");
        assert!(bare["speed"]["lowest"].as_f64() > Some(0.0));
    }
    assert!(measured["idle_put"]["lowest"].as_f64() > Some(0.0));
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
}

/// Ends a process by one signal. Returns its exit code and its output.
fn ended(mut process: Process, signal: Signal) -> (Option<i32>, String) {
    let id = i32::try_from(process.0.id()).unwrap();
    kill(Pid::from_raw(id), signal).unwrap();
    eventually("an end by one signal", || {
        process.0.try_wait().unwrap().is_some()
    });
    let mut said = String::new();
    let mut stdout = process.0.stdout.take().unwrap();
    stdout.read_to_string(&mut said).unwrap();
    (process.0.wait().unwrap().code(), said)
}

#[test]
fn a_bench_ends_at_its_first_signal_also_while_the_server_is_stopped() {
    let Some(server) = server() else { return };
    let bench = |signal, is_stopped: bool| {
        let place = directory();
        let before = server.data_bytes();
        let process = server.endless_bench(place.path());
        eventually("objects", || server.data_bytes() > before + (1 << 20));
        let outcome = match is_stopped {
            true => server.stopped(|| ended(process, signal)),
            false => ended(process, signal),
        };
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
        outcome
    };
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let (code, said) = bench(signal, false);
        assert_eq!(code, Some(130), "{said}");
        let document: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(document["interrupted"], true);
    }
    // Its objects cannot be removed, which it says.
    assert_eq!(bench(Signal::SIGINT, true).0, Some(3));
}

#[test]
fn the_archive_of_doctor_has_no_name_of_a_bucket() {
    let Some(server) = server() else { return };
    let l4 = [
        "--l4",
        "s3://acme-pages/of-umbrella",
        "--l4-endpoint",
        &server.endpoint,
    ];
    let variables = Identity::Writer.variables();
    let node = Node::with(
        Home::new(),
        &[&l4[..], &["--l4-unsigned"]].concat(),
        &variables,
    );
    eventually("a refusal", || node.state().contains("does not exist"));
    let place = directory();
    let archive = place.path().join("facts.tar");
    let path = text(&node.home.path);
    let mut doctor = larder(&["doctor", path, "--bundle", text(&archive)]);
    assert!(
        doctor
            .output()
            .unwrap()
            .status
            .code()
            .is_some_and(|code| code <= 1)
    );
    let bytes = fs::read(&archive).unwrap();
    let has = |word: &str| {
        bytes
            .windows(word.len())
            .any(|some| some == word.as_bytes())
    };
    assert!(has("does not exist"), "the reason");
    for secret in ["acme-pages", "umbrella"] {
        assert!(!has(secret), "{secret}");
    }
}

#[test]
fn the_settings_of_a_bucket_are_printed() {
    let Some(server) = server() else { return };
    let printed = server.remote(&["init"], &["--days", "3"], Identity::Reader, 0);
    is_documented(&printed);
    assert_eq!(printed["problem"], Value::Null);
    for (rule, prefix) in ["of/a-test/v1/", "of/a-test/v1-used/"].iter().enumerate() {
        let rule = &printed["lifecycle"]["Rules"][rule];
        assert_eq!(rule["Expiration"]["Days"], 3);
        assert_eq!(rule["Filter"]["Prefix"], *prefix);
    }
    let of_objects = &printed["policy"]["Statement"][0];
    assert_eq!(
        of_objects["Action"],
        serde_json::json!(["s3:GetObject", "s3:PutObject"])
    );
    let resources = ["v1/*", "v1-used/*", "v1-codec"];
    let resources = resources.map(|of| format!("arn:aws:s3:::kvpages/of/a-test/{of}"));
    assert_eq!(of_objects["Resource"], json!(resources));
    let read_only = server.remote(&["init"], &["--read-only"], Identity::Reader, 0);
    let actions = &read_only["policy"]["Statement"][0]["Action"];
    assert_eq!(*actions, serde_json::json!(["s3:GetObject"]));
    let missing = server.missing_bucket(&["init"], 1);
    let problem = missing["problem"].as_str().unwrap();
    assert!(problem.contains("does not exist"), "{problem}");
}

#[test]
fn a_missing_bucket_and_a_refused_access_are_named_in_stat_and_doctor() {
    let Some(server) = server() else { return };
    let serving = |url: &str, secret: &str| {
        let l4 = [
            "--l4",
            url,
            "--l4-endpoint",
            &server.endpoint,
            "--l4-unsigned",
        ];
        let mut variables = Identity::Writer.variables();
        variables[1].1 = secret;
        Node::with(Home::new(), &l4, &variables)
    };
    let says = |node: &Node, words: &str| {
        eventually(words, || node.state().contains(words));
        let (level, what) = node.doctor("l4");
        assert!(level == "warn" && what.contains(words), "{level} {what}");
    };
    let node = serving("s3://no-such-bucket", "SKSKSKSK");
    says(&node, "does not exist");
    // A test of the bucket does not find it either: the pause doubles.
    eventually("a failed test", || {
        let state = node.state();
        assert!(state.contains("does not exist"), "{state}");
        let pause = state.split_once("attempt in ").unwrap().1;
        let pause = pause.split(' ').next().unwrap();
        pause.parse::<u64>().unwrap() > 5
    });
    let (_, cost) = node.doctor("l4 cost");
    assert!(cost.contains("a month for requests"), "{cost}");
    says(
        &serving("s3://kvpages", "not-the-secret"),
        "access is denied",
    );
}

#[test]
fn nodes_share_pages_through_a_bucket_and_go_on_while_its_server_is_stopped() {
    let Some(server) = server() else { return };
    let serving = |options: &[&str]| {
        let l4 = server.l4();
        let l4: Vec<&str> = l4.iter().map(String::as_str).collect();
        let variables = Identity::Writer.variables();
        Node::with(Home::new(), &[&l4[..], options].concat(), &variables)
    };
    let through = ["--l4-admission", "through"];
    let first = serving(&through);
    first.put(EVEN, &chain(1, 8));
    first.put(EVEN, &chain(2, 8));
    first.reaches("published_runs", 4);

    let second = serving(&["--l4-timeout", "300ms"]);
    second.knows(EVEN, 4);
    assert_eq!(second.found(EVEN, &chain(1, 8)), 8);
    assert_eq!(second.read(EVEN, &chain(1, 8)), [true; 8]);
    server.stopped(|| {
        eventually("an end of the requests", || {
            // Each lookup begins fetches, until the failures are enough.
            second.found(EVEN, &chain(2, 8));
            second.count("breaker_openings") == 1
        });
        assert_eq!(second.found(EVEN, &chain(2, 8)), 0);
        second.put(EVEN, &chain(3, 4));
        assert_eq!(second.read(EVEN, &chain(3, 4)), [true; 4]);
        assert_eq!(second.read(EVEN, &chain(1, 8)), [true; 8]);
    });
    // By itself: a request tests the server after some seconds.
    eventually("the requests again", || {
        second.found(EVEN, &chain(2, 8)) == 8
    });
    assert_eq!(second.read(EVEN, &chain(2, 8)), [true; 8]);
}
