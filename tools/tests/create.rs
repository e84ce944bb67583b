//! `larder create`: files that it replaces and files that it refuses, its messages, and the rest of
//! an interrupted run.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../tests/support/mod.rs"]
mod support;

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use support::honest::eventually;
use support::sparse::pack;
use support::{directory, ends, json, larder, says, stderr, text};
use tempfile::TempDir;

/// A process that ends with its scope.
struct Owner(Child);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

const STORE_SIZE: &str = "256MiB";

/// So much that a signal comes before every block is written.
const SLOW_SIZE: &str = "2GiB";

/// The arguments of a creation.
fn creation<'a>(path: &'a Path, options: &[&'a str]) -> Vec<&'a str> {
    [&["create", text(path)], options].concat()
}

fn start(path: &Path, options: &[&str]) -> Child {
    let mut larder = larder(&creation(path, options));
    let larder = larder.stdout(Stdio::piped()).stderr(Stdio::piped());
    larder.spawn().unwrap()
}

#[track_caller]
fn creates(path: &Path, options: &[&str]) {
    ends(&creation(path, options), 0);
}

/// Runs a creation that must end with `code` and a message that holds all of `words`, also as a dry
/// run.
#[track_caller]
fn fails(path: &Path, options: &[&str], code: i32, words: &[&str]) -> String {
    let creation = creation(path, options);
    let dry = ends(&[&creation[..], &["--dry-run"]].concat(), code);
    let message = support::fails(&creation, code, words);
    assert_eq!(message, stderr(&dry));
    message
}

/// A path to make a store at, and the name that it has meanwhile.
fn names(directory: &TempDir) -> (PathBuf, PathBuf) {
    let path = directory.path().join("store");
    let temporary = directory.path().join("store.creating");
    (path, temporary)
}

#[test]
fn what_a_killed_creation_did_not_leave_is_kept() {
    let directory = directory();
    let (path, temporary) = names(&directory);
    let refused = || {
        let words = [text(&temporary), "killed creation", "move it away"];
        fails(&path, &["--size", STORE_SIZE], 3, &words);
        assert!(!path.exists());
    };
    let late = [vec![0; 9 << 20], b"Dear all".to_vec()].concat();
    for content in [b"Dear all".to_vec(), late] {
        std::fs::write(&temporary, &content).unwrap();
        refused();
        assert!(std::fs::read(&temporary).unwrap() == content);
    }
    std::fs::remove_file(&temporary).unwrap();
    creates(&temporary, &["--size", STORE_SIZE]);
    let store = pack(&temporary);
    refused();
    assert!(pack(&temporary) == store);
    let elsewhere = directory.path().join("elsewhere");
    std::fs::rename(&temporary, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &temporary).unwrap();
    refused();
    assert!(temporary.is_symlink());
}

#[test]
fn what_a_killed_creation_left_is_removed_wherever_it_was_killed() {
    let directory = directory();
    let (path, temporary) = names(&directory);
    let unwritten = std::fs::File::create(&temporary).unwrap();
    creates(&path, &["--size", STORE_SIZE]);
    // All of it is there but for the name.
    for _ in 0..2 {
        std::fs::rename(&path, &temporary).unwrap();
        creates(&path, &["--size", STORE_SIZE]);
        assert!(!temporary.exists());
    }
    std::fs::remove_file(&path).unwrap();
    drop(unwritten);
    std::fs::write(&temporary, vec![0; 9 << 20]).unwrap();
    creates(&path, &["--size", STORE_SIZE]);
    assert!(!temporary.exists());
}

#[test]
fn of_creations_at_once_one_makes_the_store_and_the_others_say_so() {
    let directory = directory();
    let (path, temporary) = names(&directory);
    for _ in 0..5 {
        let creations: Vec<Child> = (0..4)
            .map(|_| start(&path, &["--size", STORE_SIZE]))
            .collect();
        let mut made = 0;
        for creation in creations {
            let output = creation.wait_with_output().unwrap();
            let message = stderr(&output);
            if output.status.code() == Some(0) {
                made += 1;
            } else {
                assert!(
                    message.contains("already holds a Larder store"),
                    "{message}"
                );
            }
        }
        assert_eq!(made, 1);
        assert!(!temporary.exists());
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_missing_size_is_what_is_asked_for() {
    let directory = directory();
    let (path, _) = names(&directory);
    let asked_for = &[text(&path), "needs a size", "--size"];
    fails(&path, &[], 2, asked_for);
    creates(&path, &["--size", STORE_SIZE]);
    fails(&path, &["--grow"], 2, asked_for);
}

#[test]
fn a_store_that_cannot_grow_by_a_segment_says_which_size_would_do() {
    let directory = directory();
    let (path, _) = names(&directory);
    creates(&path, &["--size", "258MiB"]);
    for size in ["1", "256MiB", "273MiB"] {
        let words = [
            "whole segments",
            "never shrinks",
            "287309824 bytes (274 MiB)",
        ];
        fails(&path, &["--grow", "--size", size], 2, &words);
    }
    creates(&path, &["--grow", "--size", "287309824"]);
}

#[test]
fn the_same_growth_twice_leaves_the_store_as_it_is() {
    let directory = directory();
    let (path, _) = names(&directory);
    creates(&path, &["--size", "258MiB"]);
    // Sizes with and without a rest that holds no segment.
    for (size, segments) in [("274MiB", 17), ("300MiB", 18)] {
        let grow = ["create", text(&path), "--grow", "--size", size];
        let first = json(&grow);
        assert_eq!(
            (&first["grown"], &first["segments"]),
            (&true.into(), &segments.into())
        );
        let bytes = pack(&path);
        let mut again = json(&grow);
        assert_eq!(again["grown"], false);
        again["grown"] = true.into();
        assert_eq!(again, first);
        says(
            &[&grow[..], &["--dry-run"]].concat(),
            0,
            &["Has this size already"],
        );
        assert!(pack(&path) == bytes);
    }
}

#[test]
fn a_file_that_is_named_twice_is_no_second_volume() {
    let directory = directory();
    let (path, temporary) = names(&directory);
    let dotted = directory.path().join("./store");
    let arguments = ["--size", STORE_SIZE, "--volume", text(&dotted)];
    fails(&path, &arguments, 2, &[text(&dotted), "named twice"]);
    assert!(!path.exists() && !temporary.exists());
    std::fs::write(&path, b"").unwrap();
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let arguments = ["--size", STORE_SIZE, "--volume", text(&link)];
    fails(&path, &arguments, 2, &[text(&link), "named twice"]);
}

#[test]
fn smaller_segments_are_advised_only_where_they_would_do() {
    let directory = directory();
    let (path, _) = names(&directory);
    let message = fails(&path, &["--size", "32MiB"], 2, &["--size"]);
    assert!(!message.contains("smaller segments"), "{message}");
    let large = ["--size", STORE_SIZE, "--segment-size", "128MiB"];
    fails(&path, &large, 2, &["or smaller segments"]);
}

/// Segments and bytes of each that a creation of this size makes.
#[track_caller]
fn segments(path: &Path, size: &str, options: &[&str]) -> (u64, u64) {
    let arguments = [&["--size", size], options].concat();
    let made = json(&creation(path, &arguments));
    let number = |key: &str| made[key].as_u64().unwrap();
    (number("segments"), number("segment_bytes"))
}

#[test]
fn a_store_for_pages_of_a_known_size_has_1024_segments_from_16_gib_on() {
    const MIB: u64 = 1 << 20;
    let directory = directory();
    let (path, _) = names(&directory);
    // The space of a file that is there is not compared with the size.
    std::fs::write(&path, b"").unwrap();
    let planned = |size: &str, page_bytes: Option<&str>| {
        let page = page_bytes.map_or(vec![], |page_bytes| vec!["--page-bytes", page_bytes]);
        segments(&path, size, &[&page[..], &["--dry-run"]].concat())
    };
    for (size, unknown, small_pages, large_pages) in [
        ("2GiB", (127, 16), (127, 16), (120, 17)),
        ("15GiB", (479, 32), (959, 16), (903, 17)),
        // The first MiB and the last hold no segment.
        ("16GiB", (255, 64), (1023, 16), (963, 17)),
        ("16386MiB", (256, 64), (1024, 16), (963, 17)),
        ("17GiB", (271, 64), (1087, 16), (1023, 17)),
        ("100GiB", (1034, 99), (1034, 99), (1034, 99)),
        ("2TiB", (8191, 256), (8191, 256), (8224, 255)),
    ] {
        let in_mib = |(segments, bytes): (u64, u64)| (segments, bytes / MIB);
        assert_eq!(in_mib(planned(size, None)), unknown, "{size}");
        assert_eq!(in_mib(planned(size, Some("64KiB"))), small_pages, "{size}");
        assert_eq!(in_mib(planned(size, Some("2MiB"))), large_pages, "{size}");
    }
    for (size, page_bytes, least) in [("100GiB", "16MiB", 600), ("2TiB", "100MiB", 1024)] {
        let (segments, segment_bytes) = planned(size, Some(page_bytes));
        let page_bytes = page_bytes.trim_end_matches("MiB").parse::<u64>().unwrap() * MIB;
        assert!(
            segments >= least && segment_bytes / page_bytes == 8,
            "{size}"
        );
    }
    let made = segments(&path, "2GiB", &["--page-bytes", "64KiB"]);
    assert_eq!(made, (127, 16 * MIB));
    let both = [
        "--size",
        "2GiB",
        "--page-bytes",
        "64KiB",
        "--segment-size",
        "16MiB",
    ];
    let words = ["--page-bytes", "--segment-size"];
    support::fails(&creation(&path, &both), 2, &words);
    let none = ["--size", "1GiB", "--page-bytes", "200MiB", "--force"];
    fails(
        &path,
        &none,
        2,
        &["keeps no page of", "(200 MiB)", "at least", "--size"],
    );
}

/// Ends a command that writes every block after it has begun. Returns its output.
#[track_caller]
fn interrupted(path: &Path, arguments: &[&str], signal: Signal, begun: &dyn Fn() -> bool) -> Value {
    let mut child = start(path, &[arguments, &["--prewrite", "--json"]].concat());
    eventually("it begins to write", || {
        assert_eq!(child.try_wait().unwrap(), None, "it ended by itself");
        begun()
    });
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["interrupted"], true);
    assert_eq!(document["prewritten"], false);
    document
}

#[test]
fn a_creation_that_is_ended_leaves_nothing() {
    let directory = directory();
    let (path, temporary) = names(&directory);
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let begun = || temporary.exists();
        interrupted(&path, &["--size", SLOW_SIZE], signal, &begun);
        assert!(!path.exists() && !temporary.exists());
    }
}

/// Runs a creation with `--if-absent`, and returns its document.
fn if_absent(path: &Path, options: &[&str]) -> Value {
    json(&[&creation(path, &["--if-absent"])[..], options].concat())
}

#[test]
fn a_store_that_is_there_is_left_as_it_is_if_only_an_absent_one_is_wanted() {
    let directory = directory();
    let (path, _) = names(&directory);
    let second = directory.path().join("second");
    let volumes = ["--volume", text(&second)];
    let made = if_absent(&path, &[&volumes[..], &["--size", STORE_SIZE]].concat());
    assert_eq!(made["existed"], false);
    let before = pack(&path);

    let owner = larder(&["serve", text(&path), "--json"])
        .stdout(Stdio::piped())
        .spawn();
    let owner = Owner(owner.unwrap());
    eventually("the store is served", || {
        let asked = larder(&["stat", text(&path), "--check"]).output();
        asked.unwrap().status.success()
    });
    let found = if_absent(&path, &["--size", "64GiB"]);
    assert_eq!(found["existed"], true);
    for key in ["volumes", "segments", "segment_bytes", "usable_bytes"] {
        assert_eq!(found[key], made[key], "{key}");
    }
    says(
        &creation(&path, &["--if-absent"]),
        0,
        &["Exists already", text(&second)],
    );
    drop(owner);
    let found = if_absent(&path, &["--dry-run"]);
    assert_eq!(
        (&found["existed"], pack(&path).len()),
        (&true.into(), before.len())
    );

    let elsewhere = directory.path().join("elsewhere");
    std::fs::rename(&second, &elsewhere).unwrap();
    let half = creation(&path, &["--if-absent"]);
    support::fails(&half, 3, &[text(&second)]);
    std::fs::write(&path, b"Dear all").unwrap();
    let size = ["--if-absent", "--size", STORE_SIZE];
    fails(&path, &size, 3, &["not a Larder store", "--force"]);
}

#[test]
fn of_creations_at_once_all_end_well_if_only_an_absent_store_is_wanted() {
    let directory = directory();
    let (path, _) = names(&directory);
    let options = ["--size", STORE_SIZE, "--if-absent", "--json"];
    let creations = [(); 4].map(|()| start(&path, &options));
    let mut made = 0;
    for creation in creations {
        let output = creation.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        made += u32::from(told["existed"] == false);
    }
    assert_eq!(made, 1);
}

/// Permission bits and group.
fn access(path: &Path) -> (u32, u32) {
    let found = path.symlink_metadata().unwrap();
    (found.mode() & 0o7777, found.gid())
}

#[test]
fn a_store_of_a_group_has_its_permissions_after_each_start() {
    let directory = directory();
    let home = directory.path().join("larder");
    std::fs::create_dir(&home).unwrap();
    let path = home.join("store");
    let own = nix::unistd::getegid().as_raw();
    let gid = if nix::unistd::geteuid().is_root() {
        7000
    } else {
        own
    };
    let group = ["--group", &gid.to_string()];
    let options = [&["--size", STORE_SIZE][..], &group].concat();
    for _ in 0..2 {
        if_absent(&path, &options);
        assert_eq!(
            (access(&home), access(&path)),
            ((0o2770, gid), (0o660, gid))
        );
        // As after a change by hand.
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    }
    if_absent(&path, &[&options[..], &["--mode", "640"]].concat());
    assert_eq!((access(&home).0, access(&path).0), (0o2750, 0o640));

    // Without a group the directory stays as it is.
    let alone = home.join("alone");
    if_absent(&alone, &["--size", STORE_SIZE, "--mode", "600"]);
    assert_eq!((access(&home).0, access(&alone).0), (0o2750, 0o600));
    fails(&alone, &["--mode", "440"], 2, &["octal"]);
}

#[test]
fn no_permissions_are_given_through_a_link() {
    let directory = directory();
    let (path, _) = names(&directory);
    let target = directory.path().join("target");
    creates(&target, &["--size", STORE_SIZE]);
    let before = access(&target);
    std::os::unix::fs::symlink(&target, &path).unwrap();
    let options = creation(&path, &["--if-absent", "--mode", "666"]);
    support::fails(&options, 3, &[text(&path), "opening it"]);
    assert_eq!(access(&target), before);
}

#[test]
fn a_store_whose_growth_is_ended_is_as_it_was() {
    let directory = directory();
    let (path, _) = names(&directory);
    creates(&path, &["--size", STORE_SIZE]);
    let (before, length) = (pack(&path), path.metadata().unwrap().len());
    let begun = || path.metadata().unwrap().len() > length;
    let grow = ["--grow", "--size", SLOW_SIZE];
    interrupted(&path, &grow, Signal::SIGINT, &begun);
    assert!(pack(&path) == before);
}

#[test]
fn a_growth_after_one_that_was_killed_has_its_own_size_and_writes_all_that_it_adds() {
    let directory = directory();
    let (path, _) = names(&directory);
    creates(&path, &["--size", STORE_SIZE]);
    let length = || path.metadata().unwrap().len();
    let before = length();
    let mut killed = start(&path, &["--grow", "--size", SLOW_SIZE, "--prewrite"]);
    eventually("it begins to grow", || length() > before);
    killed.kill().unwrap();
    killed.wait().unwrap();
    let grown = 1 << 29;
    let size = grown.to_string();
    creates(&path, &["--grow", "--size", &size, "--prewrite"]);
    assert_eq!(length(), grown);
    // Allocated bytes that were never written are a hole to the kernel.
    let file = std::fs::File::open(&path).unwrap();
    match rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(before)) {
        Ok(hole) => assert_eq!(hole, grown),
        Err(error) => assert_eq!(error, rustix::io::Errno::INVAL),
    }
    ends(&["verify", text(&path)], 0);
}

#[test]
fn of_growths_at_once_each_finds_the_store_as_the_last_one_left_it() {
    let directory = directory();
    let (path, _) = names(&directory);
    creates(&path, &["--size", STORE_SIZE]);
    for round in 0..8_u64 {
        let size = ((288 + 16 * round) << 20).to_string();
        let growths = [(); 4].map(|()| start(&path, &["--grow", "--size", &size]));
        let mut grown = 0;
        for growth in growths {
            let output = growth.wait_with_output().unwrap();
            let said = stderr(&output);
            let late = said.contains("in use");
            assert!(output.status.success() || late, "{said}");
            let told = String::from_utf8(output.stdout).unwrap();
            grown += u32::from(told.contains("Enlarged"));
        }
        assert_eq!(grown, 1);
    }
    ends(&["verify", text(&path)], 0);
}
