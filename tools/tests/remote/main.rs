//! `larder remote`: pages go from one node's store to another's through a directory, once, whole
//! and verified.

#![allow(clippy::unwrap_used, missing_docs)]

mod broken;
mod clock;
mod codec;
#[path = "../transfer/home.rs"]
#[allow(dead_code)]
mod home;
mod names;
#[path = "../cli/page.rs"]
mod page;
mod prune;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use broken::{Broken, Fault};
use clock::Clock;
use fuser::Errno;
use home::{EVEN, Model, RAGGED, put, put_from};
use larder_engine::PageStore;
use names::names;
use serde_json::{Value, json};
use support::home::Home;
use support::{chain, ends, fails, flip, larder, report, text};

/// Pages of a run: of 16 tokens each.
const RUN_TOKENS: &str = "64";
const RUN_PAGES: usize = 4;

/// A directory that nodes share, and the file with their key.
struct Shared {
    home: tempfile::TempDir,
}

impl Shared {
    fn new() -> Shared {
        let home = support::directory();
        let shared = Shared { home };
        fs::create_dir_all(shared.root().join("v1")).unwrap();
        report(&["remote", "key", text(&shared.key_file("key"))], 0);
        shared
    }

    fn key_file(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn root(&self) -> PathBuf {
        self.home.path().join("remote")
    }

    fn url(&self) -> String {
        format!("file://{}", self.root().display())
    }

    /// `larder remote SUBCOMMAND`, with the store and the key if it takes them.
    #[track_caller]
    fn remote(&self, subcommand: &str, store: Option<&Home>, options: &[&str], code: i32) -> Value {
        let (url, key) = (self.url(), self.key_file("key"));
        let mut arguments = vec!["remote", subcommand];
        arguments.extend(store.map(|store| text(&store.path)));
        arguments.push(&url);
        if ["push", "pull", "verify"].contains(&subcommand) {
            arguments.extend(["--key-file", text(&key)]);
        }
        arguments.extend(options);
        report(&arguments, code)
    }

    #[track_caller]
    fn push(&self, store: &Home, code: i32) -> Value {
        self.remote("push", Some(store), &["--run-tokens", RUN_TOKENS], code)
    }

    /// The name of a model's namespace.
    fn space(&self, model: Model) -> String {
        let names = names(&self.key_file("key"), model);
        names.spaces().next().unwrap().to_string()
    }

    /// The files of all objects.
    fn objects(&self) -> Vec<PathBuf> {
        let mut objects = Vec::new();
        let mut left = vec![self.root()];
        while let Some(directory) = left.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => left.push(path),
                    false => objects.push(path),
                }
            }
        }
        objects.sort();
        objects
    }
}

/// Chains of 10 and of 7 pages, and a branch behind the sixth page of the first.
fn populated() -> Home {
    let home = Home::new();
    home.with(|store| {
        put(store, EVEN, &chain(1, 10));
        put(store, RAGGED, &chain(2, 7));
        put_from(store, EVEN, &branch(), 6);
    });
    home
}

fn branch() -> Vec<larder_format::PageKey> {
    let mut branch = chain(1, 6);
    branch.extend(chain(3, 3));
    branch
}

#[test]
fn a_node_that_never_saw_a_prompt_serves_its_whole_runs_from_its_own_disk() {
    let (shared, source) = (Shared::new(), populated());
    let pushed = shared.push(&source, 0);
    // Two runs of the first chain, one behind the branch, one of the ragged chain.
    assert_eq!(pushed["runs_pushed"], 4);
    assert_eq!(shared.objects().len(), 4);
    // Each chain ends behind its last whole run: by 2 pages, 1 and 3.
    assert_eq!(pushed["left_out_pages"], 2 + 1 + 3);

    // Of stores of other shapes, too.
    let node = Home::shaped(&["second"], 5, 24 << 20);
    let pulled = shared.remote("pull", Some(&node), &[], 0);
    assert_eq!(pulled["runs_pulled"], 4);
    // The branch's run has two pages of the first chain.
    assert_eq!(pulled["pages_put"], 8 + 2 + 4);
    assert_eq!(pulled["duplicate_pages"], 2);
    // The bytes of each page are compared.
    assert_eq!(node.having(EVEN, &chain(1, 8)), 8);
    assert_eq!(node.having(EVEN, &branch()[..8]), 8);
    assert_eq!(node.having(RAGGED, &chain(2, 4)), 4);
    let home = source.pages();
    assert!(node.pages().iter().all(|page| home.contains(page)));
    node.report("verify", &["--deep"], 0);

    let again = shared.remote("pull", Some(&node), &[], 0);
    assert_eq!(again["runs_pulled"], 0);
    assert_eq!(again["present_runs"], 4);
}

#[test]
fn two_nodes_publish_a_run_once() {
    let shared = Shared::new();
    let nodes = [Home::new(), Home::new()];
    for node in &nodes {
        node.with(|store| put(store, EVEN, &chain(1, 8)));
    }
    assert_eq!(shared.push(&nodes[0], 0)["runs_pushed"], 2);
    let second = shared.push(&nodes[1], 0);
    assert_eq!(second["runs_pushed"], 0);
    assert_eq!(second["present_runs"], 2);
}

#[test]
fn a_flipped_byte_is_a_page_that_is_not_taken_and_the_others_are() {
    let shared = Shared::new();
    let source = Home::new();
    source.with(|store| put(store, EVEN, &chain(1, 4)));
    shared.push(&source, 0);
    // In the third of four payloads of 64 KiB, behind three blocks.
    flip(&shared.objects()[0], 3 * 4096 + 2 * 65536 + 1234);
    let verified = shared.remote("verify", None, &[], 1);
    assert_eq!(verified["good_pages"], 3);
    assert_eq!(verified["faults"][0]["key"], chain(1, 4)[2].to_string());
    let node = Home::new();
    let pulled = shared.remote("pull", Some(&node), &[], 1);
    assert_eq!(pulled["faulty_pages"], 1);
    assert_eq!(pulled["pages_put"], 3);
    assert_eq!(node.having(EVEN, &chain(1, 4)), 3);
    // The object is good again: the gap is filled.
    flip(&shared.objects()[0], 3 * 4096 + 2 * 65536 + 1234);
    let pulled = shared.remote("pull", Some(&node), &[], 0);
    assert_eq!(
        (&pulled["pages_put"], &pulled["present_runs"]),
        (&json!(1), &json!(0))
    );
    assert_eq!(node.having(EVEN, &chain(1, 4)), 4);
    let pulled = shared.remote("pull", Some(&node), &[], 0);
    assert_eq!(
        (&pulled["runs_pulled"], &pulled["present_runs"]),
        (&json!(0), &json!(1))
    );
}

#[test]
fn pages_of_another_key_are_not_taken_and_keys_can_be_rotated() {
    let (shared, source) = (Shared::new(), populated());
    shared.push(&source, 0);
    let own = fs::read_to_string(shared.key_file("key")).unwrap();
    let other = shared.key_file("other");
    report(&["remote", "key", text(&other)], 0);
    let other = fs::read_to_string(other).unwrap();
    fs::write(shared.key_file("key"), &other).unwrap();
    let node = Home::new();
    let pulled = shared.remote("pull", Some(&node), &[], 1);
    assert_eq!(pulled["faulty_runs"], 4);
    assert_eq!(pulled["pages_put"], 0);
    assert!(node.pages().is_empty());
    fs::write(shared.key_file("key"), other + &own).unwrap();
    shared.remote("verify", None, &[], 0);
    assert_eq!(shared.remote("pull", Some(&node), &[], 0)["runs_pulled"], 4);
}

#[test]
fn of_a_namespace_that_a_pull_does_not_choose_no_object_is_read_whole() {
    let (shared, source) = (Shared::new(), populated());
    shared.push(&source, 0);
    // Each object that is read counts: the records of its pages are damaged.
    let foreign = shared.space(EVEN);
    let foreign = shared
        .objects()
        .into_iter()
        .filter(|object| text(object).contains(&foreign));
    assert_eq!(
        foreign.map(|object| flip(&object, 2 * 4096 + 99)).count(),
        3
    );
    let node = Home::new();
    let pulled = shared.remote("pull", Some(&node), &["--model", "ragged"], 0);
    assert_eq!(pulled["faulty_runs"], 0);
    assert_eq!(pulled["runs_pulled"], 1);
}

#[test]
fn an_object_that_is_too_long_is_left_out_and_the_others_are_read() {
    let (shared, source) = (Shared::new(), populated());
    shared.push(&source, 0);
    let huge = fs::File::options().write(true).open(&shared.objects()[0]);
    huge.unwrap().set_len(1 << 40).unwrap();
    let verified = shared.remote("verify", None, &[], 1);
    assert_eq!(verified["runs"], 3);
    assert_eq!(verified["good_pages"], 3 * RUN_PAGES);
    let left_out = &verified["unreadable"][0];
    assert!(shared.objects()[0].ends_with(left_out["run"].as_str().unwrap()));
    assert_eq!(left_out["reason"], "it is longer than 4 GiB");
    let pulled = shared.remote("pull", Some(&Home::new()), &[], 1);
    assert_eq!(pulled["unreadable"], verified["unreadable"]);
    assert_eq!(pulled["runs_pulled"], 3);
}

#[test]
fn damaged_pages_of_the_store_are_not_pushed() {
    let (shared, source) = (Shared::new(), populated());
    flip(&source.path, source.offset_of(&chain(1, 10)[1]) + 99);
    let pushed = shared.push(&source, 1);
    assert_eq!(pushed["damaged_runs"], 1);
    assert_eq!(pushed["runs_pushed"], 3);
    shared.remote("verify", None, &[], 0);
}

#[test]
fn a_full_store_keeps_its_pages_and_takes_whole_prefixes() {
    let (shared, source) = (Shared::new(), Home::new());
    let chains: Vec<_> = (1..=40).map(|seed| chain(seed, 32)).collect();
    source.with(|store| chains.iter().for_each(|chain| put(store, EVEN, chain)));
    shared.push(&source, 0);
    let node = Home::shaped(&[], 6, 16 << 20);
    node.with(|store| put(store, RAGGED, &chain(99, 8)));
    let pulled = shared.remote("pull", Some(&node), &[], 0);
    assert_eq!(pulled["full"], true);
    let put = pulled["pages_put"].as_u64().unwrap();
    assert!(put > 0);
    assert_eq!(node.having(RAGGED, &chain(99, 8)), 8);
    let reached = node.with(|store| {
        let id = store.namespace(&EVEN.namespace()).unwrap();
        let reached = |chain: &Vec<_>| store.longest_prefix(id, chain) as u64;
        chains.iter().map(reached).sum::<u64>()
    });
    assert_eq!(reached, put);
}

#[test]
fn a_pull_goes_to_a_store_that_is_served() {
    let (shared, source) = (Shared::new(), populated());
    shared.push(&source, 0);
    let node = Home::new();
    let mut owner = support::honest::Process(larder(&["serve", text(&node.path)]).spawn().unwrap());
    support::honest::eventually("an owner", || larder_engine::report(&node.path).is_ok());
    let pulled = shared.remote("pull", Some(&node), &[], 0);
    assert_eq!(pulled["runs_pulled"], 4);
    owner.0.kill().unwrap();
    owner.0.wait().unwrap();
    assert_eq!(node.having(EVEN, &chain(1, 8)), 8);
}

#[test]
fn namespaces_are_chosen_listed_and_pruned() {
    let (shared, source) = (Shared::new(), populated());
    let model = ["--run-tokens", RUN_TOKENS, "--model", "ragged"];
    assert_eq!(
        shared.remote("push", Some(&source), &model, 0)["runs_pushed"],
        1
    );
    shared.push(&source, 0);
    let listed = shared.remote("ls", None, &[], 0);
    assert_eq!(listed["runs"], 4);
    assert_eq!(listed["namespaces"].as_array().unwrap().len(), 2);
    let node = Home::new();
    let even = EVEN.fingerprint();
    let one = ["--namespace", even.as_str()];
    assert_eq!(
        shared.remote("pull", Some(&node), &one, 0)["runs_pulled"],
        3
    );
    let young = ["--older-than", "1h"];
    assert_eq!(shared.remote("prune", None, &young, 0)["removed_runs"], 0);
    // As `larder remote ls` shows it.
    let shown = shared.space(EVEN);
    let row_of = |listed: &Value| {
        let rows = listed["namespaces"].as_array().unwrap();
        let row = rows.iter().find(|row| row["fingerprint"] == shown.as_str());
        row.unwrap().clone()
    };
    assert_eq!(row_of(&listed)["model"], Value::Null);
    let key = shared.key_file("key");
    let with_key = shared.remote("ls", None, &["--key-file", text(&key)], 0);
    let row = row_of(&with_key);
    assert_eq!(
        (&row["model"], &row["tenant"]),
        (&json!("even"), &Value::Null)
    );
    let one = ["--namespace", shown.as_str()];
    let dry = [&one[..], &["--dry-run"]].concat();
    assert_eq!(shared.remote("prune", None, &dry, 0)["removed_runs"], 3);
    assert_eq!(shared.objects().len(), 4);
    let pruned = shared.remote("prune", None, &one, 0);
    assert_eq!(pruned["removed_runs"], 3);
    assert_eq!(pruned["kept_runs"], 1);
    assert_eq!(shared.objects().len(), 1);
}

/// The directory of a mount without the mount.
#[test]
fn a_place_without_the_mark_takes_nothing_before_the_word() {
    let (shared, source) = (Shared::new(), populated());
    fs::remove_dir(shared.root().join("v1")).unwrap();
    let (url, key) = (shared.url(), shared.key_file("key"));
    let node = Home::new();
    let commands: [&[&str]; 5] = [
        &["push", text(&source.path), &url, "--key-file", text(&key)],
        &["pull", text(&node.path), &url, "--key-file", text(&key)],
        &["verify", &url, "--key-file", text(&key)],
        &["ls", &url],
        &["prune", &url, "--older-than", "1h"],
    ];
    for command in commands {
        let command = [&["remote"], command].concat();
        fails(
            &command,
            3,
            &["no remote yet", "larder remote init", "--new"],
        );
    }
    assert_eq!(report(&["remote", "init", &url], 0)["is_marked"], false);
    assert_eq!(fs::read_dir(shared.root()).unwrap().count(), 0);
    let new = ["--run-tokens", RUN_TOKENS, "--new"];
    let pushed = shared.remote("push", Some(&source), &new, 0);
    assert_eq!(pushed["runs_pushed"], 4);
    assert_eq!(shared.push(&source, 0)["present_runs"], 4);
    // Of no run, too.
    let other = Shared::new();
    fs::remove_dir(other.root().join("v1")).unwrap();
    let init = report(&["remote", "init", &other.url(), "--new"], 0);
    assert_eq!(
        (&init["is_marked"], &init["policy"]),
        (&json!(true), &Value::Null)
    );
    assert_eq!(other.remote("ls", None, &[], 0)["runs"], 0);
}

/// The node is years ahead of the file system, or behind it.
#[test]
fn an_age_is_taken_from_the_clock_of_the_file_system() {
    let run = |fill: &str| format!("v1/{}/{fill}/{}.run", "0".repeat(32), fill.repeat(32));
    let [young, old] = ["0a", "0b"].map(run);
    let beside = |name: &str| format!("v1/{}/0a/.unfinished-{name}", "0".repeat(32));
    let [writing, left] = ["writing", "left"].map(beside);
    let minutes = Duration::from_mins;
    let files = [
        (young.as_str(), minutes(20)),
        (old.as_str(), minutes(40)),
        (writing.as_str(), minutes(50)),
        (left.as_str(), minutes(70)),
    ];
    let years = Duration::from_hours(5 * 365 * 24);
    for now in [SystemTime::now() - years, SystemTime::now() + years] {
        let shared = Shared::new();
        let Some(clock) = Clock::mount(&shared.root(), now, &files) else {
            return;
        };
        let names = |paths: &[&String]| -> Vec<String> {
            let names = paths.iter().map(|path| path.rsplit_once('/').unwrap().1);
            names.map(str::to_owned).collect()
        };
        assert_eq!(shared.remote("ls", None, &[], 0)["runs"], 2);
        assert_eq!(clock.files(), names(&[&writing, &young, &old]));
        let pruned = shared.remote("prune", None, &["--older-than", "30m"], 0);
        let removed = (&pruned["removed_runs"], &pruned["kept_runs"]);
        assert_eq!(removed, (&json!(1), &json!(1)));
        assert_eq!(clock.files(), names(&[&writing, &young]));
    }
}

/// Bad sectors, servers that are not there, files that were replaced: each belongs to one object.
#[test]
fn an_object_that_cannot_be_read_is_left_out_and_named_and_the_others_are_used() {
    let (shared, source) = (Shared::new(), Home::new());
    source.with(|store| {
        (1..=4).for_each(|seed| put(store, EVEN, &chain(seed, 8)));
    });
    shared.push(&source, 0);
    let objects = shared.objects();
    assert_eq!(objects.len(), 8);
    let faults = [
        Fault::Stat(Errno::EIO),
        Fault::Stat(Errno::ESTALE),
        Fault::Open(Errno::ENXIO),
        Fault::Read(Errno::ENODATA),
        Fault::List(Errno::from_i32(libc::EUCLEAN)),
    ];
    let mut mounts = Vec::new();
    for (object, fault) in objects.iter().zip(faults) {
        let Some(mount) = Broken::over(object, fault) else {
            return;
        };
        mounts.push(mount);
    }
    // Of a listing: two objects, and a directory.
    let listed = shared.remote("ls", None, &[], 1);
    assert_eq!(listed["runs"], 5);
    are_named(&listed, &objects[..2]);
    are_named(&listed, &[objects[4].parent().unwrap().to_owned()]);

    let verified = shared.remote("verify", None, &[], 1);
    assert_eq!(
        (&verified["runs"], &verified["faults"]),
        (&json!(3), &json!([]))
    );
    are_named(&verified, &objects[..4]);

    let node = Home::new();
    let pulled = shared.remote("pull", Some(&node), &[], 1);
    assert_eq!(
        (&pulled["runs_pulled"], &pulled["faulty_runs"]),
        (&json!(3), &json!(0))
    );
    are_named(&pulled, &objects[..4]);

    // Those of a broken directory cannot be removed.
    let space = shared.space(EVEN);
    let pruned = shared.remote("prune", None, &["--namespace", &space], 1);
    assert_eq!(pruned["removed_runs"], 3);
    are_named(&pruned, &objects[..4]);
    for document in [&listed, &verified, &pulled, &pruned] {
        let command = document["command"].as_str().unwrap();
        let keys = page::keys_of(document);
        page::knows(command, &keys);
        // There is no fault of a page.
        page::is_complete(command, &keys, &[("remote verify", "key")]);
    }
    drop(mounts);
    assert_eq!(shared.objects(), objects[..5]);
}

/// The document has the name of each of these as left out.
#[track_caller]
fn are_named(document: &Value, paths: &[PathBuf]) {
    let left_out = document["unreadable"].as_array().unwrap();
    for path in paths {
        let name = path.file_name().unwrap().to_str().unwrap();
        let is_named = left_out.iter().any(|row| {
            row["run"].as_str().is_some_and(|run| run.ends_with(name))
                || row["reason"].as_str().unwrap().contains(text(path))
        });
        assert!(is_named, "{name}: {left_out:?}");
    }
}

#[test]
fn mistakes_are_named() {
    let (shared, source) = (Shared::new(), Home::new());
    let store = text(&source.path);
    let url = shared.url();
    fails(&["remote", "push", store, &url], 2, &["--key-file"]);
    fails(&["remote", "ls", "nowhere"], 2, &["file:///DIRECTORY"]);
    fails(&["remote", "prune", &url], 2, &["--older-than"]);
    let gone = "file:///no/such/place";
    fails(&["remote", "ls", gone], 3, &["does not exist"]);
    let key = shared.key_file("key");
    fails(&["remote", "key", text(&key)], 3, &["exists"]);
    fs::write(&key, "short\n").unwrap();
    let keyed = ["remote", "verify", &url, "--key-file", text(&key)];
    fails(&keyed, 2, &["64 lowercase hex digits"]);
    ends(&["remote", "verify", &url, "--unsigned"], 0);
}
