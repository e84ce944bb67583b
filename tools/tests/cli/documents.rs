//! docs/json.md against the output of the commands: the section of a command has exactly the keys
//! that the command prints.

use std::collections::{BTreeMap, BTreeSet};

use larder_format::{SEGMENTS_OFFSET, SUPERBLOCK_OFFSETS};

use super::page::{is_complete, keys_of, knows, sections};
use super::served::{absent_keys, namespace};
use super::support::{flip, overwrite, superblocks};
use super::*;

/// Keys that nothing here brings about.
const ABSENT: [(&str, &str); 14] = [
    ("replay tiers", "ttft_refused"),
    ("stat", "reason"),
    ("stat", "damage"),
    ("stat", "places"),
    // Of a client that is stopped or ends in a call, see `tests/incidents`.
    ("stat", "stopped_seconds"),
    ("stat", "ended_unix_s"),
    // Of objects that were left out, which `tests/remote` and `tests/s3` compare.
    ("remote push", "run"),
    ("remote push", "reason"),
    ("remote pull", "run"),
    ("remote pull", "reason"),
    ("remote ls", "run"),
    ("remote ls", "reason"),
    ("remote prune", "run"),
    ("remote prune", "reason"),
];

/// Commands whose keys are compared elsewhere: `demo` runs for long, and a bucket needs the feature
/// `remote` and a server (`tests/s3`).
const NOT_RUN: [&str; 3] = ["demo", "remote bench", "remote init"];

/// The keys that commands have printed.
#[derive(Default)]
struct Printed(BTreeMap<String, BTreeSet<String>>);

impl Printed {
    /// Runs a command that must end with `code`; the last object that it prints.
    #[track_caller]
    fn run(&mut self, arguments: &[&str], code: i32) -> Value {
        let output = larder(arguments).arg("--json").output().unwrap();
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        self.note(arguments[0], &output.stdout)
    }

    #[track_caller]
    fn note(&mut self, command: &str, text: &[u8]) -> Value {
        let objects = serde_json::Deserializer::from_slice(text).into_iter::<Value>();
        let objects: Vec<Value> = objects.map(Result::unwrap).collect();
        for object in &objects {
            // The lines before the document of a command do not name the command.
            let command = object["command"].as_str().unwrap_or(command);
            let keys = keys_of(object);
            knows(command, &keys);
            self.0.entry(command.to_owned()).or_default().extend(keys);
        }
        objects.into_iter().next_back().unwrap()
    }
}

/// The document that a command prints on stdout before it goes on.
pub(super) fn first_document(child: &mut Child) -> String {
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut document = String::new();
    while !document.ends_with("\n}\n") {
        assert!(lines.read_line(&mut document).unwrap() > 0, "{document}");
    }
    document
}

#[test]
fn every_key_that_is_printed_is_documented_and_the_other_way_round() {
    let directory = directory();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let mut printed = Printed::default();
    let size = ["--size", "98MiB"];

    // A store with pages of a replay.
    let trace = trace_in(&directory, 4, 3);
    let (trace, store, acks) = (text(&trace), &at("store"), &at("acks"));
    let replay = [
        "replay",
        "store",
        trace,
        "--store",
        store,
        "--capacity",
        "98MiB",
    ];
    let pages = ["--page-bytes", "64KiB"];
    let log = ["--ack-log", acks];
    printed.run(&[&replay[..], &pages, &log].concat(), 0);
    let log = ["--limit", "0", "--check-log", acks];
    printed.run(&[&replay[..], &pages, &log].concat(), 0);
    let sizes = [
        "replay",
        "store",
        trace,
        "--store",
        store,
        "--capacity",
        "98MiB,114MiB",
    ];
    printed.run(&[&sizes[..], &pages].concat(), 0);
    let policy = ["replay", "policy", trace, "--percent", "200"];
    printed.run(
        &[&policy[..], &["--write-budget", "50", "--l2", "50"]].concat(),
        0,
    );
    printed.run(&["replay", "l4", trace], 0);
    let disk = [
        "--disk-read",
        "5",
        "--disk-write",
        "2",
        "--drive-writes",
        "9",
    ];
    let plan = ["plan", "--trace", trace, "--size", "1TiB"];
    printed.run(&[&plan[..], &disk].concat(), 0);
    let acks = std::fs::read_to_string(acks).unwrap();
    let key = acks.split_whitespace().nth(1).unwrap();

    for view in [&["--segments"][..], &["--chains"], &["--key", key]] {
        printed.run(&[&["inspect", store][..], view].concat(), 0);
    }
    printed.run(&["pin", store, "--key", key, "--until", "1h"], 0);
    printed.run(&["pin", store], 0);
    printed.run(&["unpin", store, "--key", key], 0);
    printed.run(&["verify", store, "--deep"], 0);
    printed.run(&["compact", store], 0);
    printed.run(&["compact", store, "--into", &at("compacted")], 0);
    printed.run(&["doctor", text(directory.path())], 0);

    let archive = &at("archive");
    printed.run(&["export", store, archive, "--key", key], 0);
    let empty = &at("empty");
    printed.run(&[&["create", empty][..], &size].concat(), 0);
    printed.run(&["import", empty, archive, "--dry-run"], 0);
    let length = std::fs::metadata(archive).unwrap().len();
    flip(Path::new(archive), length / 2);
    printed.run(&["import", empty, archive], 1);

    let (key_file, shared) = (&at("key"), at("shared"));
    std::fs::create_dir(&shared).unwrap();
    printed.run(&["remote", "key", key_file], 0);
    let url = &format!("file://{shared}");
    let keys = ["--key-file", key_file];
    let few = ["--run-tokens", "1", "--new"];
    printed.run(
        &[&["remote", "push", store, url][..], &keys, &few].concat(),
        0,
    );
    printed.run(&["remote", "ls", url], 0);
    printed.run(&["remote", "verify", url, "--key-file", key_file], 0);
    let another = &at("another-key");
    printed.run(&["remote", "key", another], 0);
    printed.run(&["remote", "verify", url, "--key-file", another], 1);
    let puller = &at("puller");
    printed.run(&[&["create", puller][..], &size].concat(), 0);
    printed.run(&[&["remote", "pull", puller, url][..], &keys].concat(), 0);
    printed.run(&["remote", "prune", url, "--older-than", "1h"], 0);

    // Pages that the other store has no segments for.
    let large = &at("large");
    let segments = ["--size", "256MiB", "--segment-size", "32MiB"];
    printed.run(&[&["create", large][..], &segments].concat(), 0);
    let one = ["--page-bytes", "20MiB", "--pages", "1", "--batch", "1"];
    printed.run(&[&["bench", large, "--op", "put"][..], &one].concat(), 0);
    printed.run(&["export", large, archive, "--force"], 0);
    let second = &at("second");
    printed.run(&["volume", "add", large, second], 0);
    printed.run(&["volume", "retire", large, second], 0);
    let (first, other) = (&at("first-key"), &at("other-key"));
    printed.run(&["key", "make", first], 0);
    printed.run(&["key", "make", other], 0);
    let sealed = &at("sealed");
    let keys = ["--key-file", first];
    printed.run(&[&["create", sealed], &size[..], &keys].concat(), 0);
    let erase = ["erase", sealed, "--tenant", "acme"];
    printed.run(&[&erase[..], &keys].concat(), 0);
    let from = ["--remote", url, "--remote-key-file", key_file];
    printed.run(&[&erase[..], &keys, &from].concat(), 0);
    let blocked = sealed::blocked_erasure();
    printed.note("erase", blocked.to_string().as_bytes());
    let rotate = ["key", "rotate", sealed, "--new-key-file", other];
    printed.run(&[&rotate[..], &keys].concat(), 0);
    let keys = ["--key-file", other];
    printed.run(
        &[&["export", sealed, &at("sealed-archive")], &keys[..]].concat(),
        0,
    );
    let saved = &at("saved");
    printed.run(&["superblock", "save", large, saved], 0);
    printed.run(&["superblock", "restore", large, saved], 0);
    let refused = printed.run(&["import", empty, archive], 1);
    assert_eq!(refused["refusals"][0]["kind"], "too_large");

    let few = ["--page-bytes", "64KiB", "--pages", "4", "--batch", "2"];
    let turns = ["bench", empty, "--op", "get", "--turns"];
    printed.run(&[&turns[..], &few].concat(), 0);
    let load = ["bench", empty, "--op", "load"];
    printed.run(&[&load[..], &few].concat(), 0);

    printed.run(&["delete", empty, "--model", "bench", "--dry-run"], 0);
    printed.run(&["quota", empty, "--model", "bench", "--max", "1GiB"], 0);
    printed.run(&["quota", empty, "--clear"], 0);
    let mut exporter = larder(&["exporter", empty, "--listen", "127.0.0.1:0", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let exported = first_document(&mut exporter);
    drop(Process(exporter));
    printed.note("exporter", exported.as_bytes());

    let l4 = ["--l4", url, "--l4-key-file", key_file];
    let mut owner = larder(&[&["serve", empty, "--json"][..], &l4].concat())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let served = first_document(&mut owner);
    let client = Store::attach(Path::new(empty), OpenOptions::default());
    if let Ok(client) = &client {
        let looked = client.namespace(&namespace());
        looked
            .map(|id| client.longest_prefix(id, &absent_keys(1)))
            .unwrap();
    }
    let told = larder(&["stat", empty, "--json"]).output().unwrap();
    let checked = larder(&["stat", empty, "--check", "--json"])
        .output()
        .unwrap();
    let recorded = larder(&["record", empty, &at("traffic"), "--for", "1ms", "--json"])
        .output()
        .unwrap();
    let off = larder(&["remote", "off", empty, "--json"])
        .output()
        .unwrap();
    let on = larder(&["remote", "on", empty, "--json"]).output().unwrap();
    // Ended before the assertions: a failure leaves no process running.
    let pid = Pid::from_raw(i32::try_from(owner.id()).unwrap());
    kill(pid, Signal::SIGTERM).unwrap();
    assert!(owner.wait().unwrap().success());
    client.unwrap().close().unwrap();
    printed.note("serve", served.as_bytes());
    let told = printed.note("stat", &told.stdout);
    printed.note("stat", &checked.stdout);
    printed.note("record", &recorded.stdout);
    printed.note("remote on", &[off.stdout, on.stdout].concat());
    assert!(["uring", "threads"].contains(&told["disk"].as_str().unwrap()));

    // Pages of 32 MiB, of which 8 KiB are moved.
    let tiered = &at("tiered");
    let tiers = [
        "replay",
        "tiers",
        trace,
        "--store",
        tiered,
        "--capacity",
        "512GiB",
    ];
    let pools = ["--l1", "5GiB", "--l2", "20GiB", "--page-size", "256"];
    let virtual_time = ["--scale", "4096", "--rate", "0.0005", "--only"];
    printed.run(&[&tiers[..], &pools, &virtual_time].concat(), 0);

    // A lost segment: of the last pages of a chain that fills two.
    let chain = ["--page-bytes", "64KiB", "--pages", "400", "--batch", "400"];
    printed.run(
        &[&["bench", large, "--op", "put", "--force"][..], &chain].concat(),
        0,
    );
    overwrite(Path::new(large), SEGMENTS_OFFSET, &vec![7; 32 << 20]);
    printed.run(&["inspect", large], 1);
    printed.run(&["verify", large], 1);

    // Damage that can be mended, and then none.
    flip(Path::new(store), SUPERBLOCK_OFFSETS[0] + 73);
    printed.run(&["inspect", store], 1);
    printed.run(&["verify", store, "--repair", "--dry-run"], 1);
    for offset in &superblocks(Path::new(store))[1..] {
        flip(Path::new(store), offset + 73);
    }
    for arguments in [&["inspect", store][..], &["verify", store]] {
        printed.run(arguments, 1);
    }
    printed.run(&["export", store, archive, "--force"], 1);

    for (command, keys) in &printed.0 {
        is_complete(command, keys, &ABSENT);
    }
    let commands = printed.0.keys().map(String::as_str);
    let commands: BTreeSet<&str> = commands.chain(NOT_RUN).collect();
    for section in sections().keys() {
        let is_of_all = ["", "Findings"].contains(section);
        assert!(is_of_all || commands.contains(section), "{section}");
    }
}
