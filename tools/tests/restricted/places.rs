//! Places where a store cannot be written, or not be made: each in a mount namespace of its own.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::support::honest::{Process, eventually, skipped};
use crate::support::{directory, ends, json, larder, report, says, text};

/// Marks the process that runs a test inside its namespaces.
const INSIDE: &str = "LARDER_TEST_INSIDE";

/// Runs a test in a process that may mount, where the system allows that.
fn where_mounts_are_allowed(test: &str, work: impl FnOnce(&Path)) {
    let directory = directory();
    if std::env::var_os(INSIDE).is_some() {
        return work(directory.path());
    }
    // The user of the namespace is root there.
    let unshare = || {
        let mut unshare = Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--mount"]);
        unshare
    };
    let tried = unshare().arg("true").stderr(Stdio::null()).status();
    if !tried.is_ok_and(|status| status.success()) {
        return skipped(test, "no mount namespace can be had");
    }
    let status = unshare()
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .status();
    assert!(status.unwrap().success());
}

/// A file system in memory of so many MiB.
fn mounted(beside: &Path, mib: u64) -> PathBuf {
    let path = beside.join("mounted");
    std::fs::create_dir(&path).unwrap();
    let size = format!("size={mib}m");
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", &size, "tmpfs", text(&path)]);
    assert!(mount.status().unwrap().success());
    path
}

fn remount_read_only(path: &Path) {
    let mut mount = Command::new("mount");
    mount.args(["-o", "remount,ro", text(path)]);
    assert!(mount.status().unwrap().success());
}

/// Fills a file system up to so many MiB.
fn fill(directory: &Path, left_mib: u64) -> PathBuf {
    let path = directory.join("filling");
    let space = rustix::fs::statvfs(directory).unwrap();
    let bytes = space.f_bavail * space.f_frsize - (left_mib << 20);
    let file = File::create(&path).unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes).unwrap();
    path
}

const PAGES: [&str; 6] = ["--page-bytes", "1MiB", "--pages", "24", "--batch", "8"];

fn bench<'a>(store: &'a str, op: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["bench", store, "--op", op][..], &PAGES, more].concat()
}

/// A fact of the doctor: its level and its text.
fn fact(path: &str, code: i32, name: &str) -> (String, String) {
    let document = report(&["doctor", path], code);
    let facts = document["facts"].as_array().unwrap();
    let found = facts.iter().find(|fact| fact["name"] == name);
    let found = found.unwrap_or_else(|| panic!("no {name} in {document:#}"));
    let word = |key: &str| found[key].as_str().unwrap().to_owned();
    (word("level"), word("what"))
}

fn read_only_volumes(store: &str) -> Vec<Value> {
    let stat = json(&["stat", store]);
    assert_eq!(stat["evicted_pages"], 0, "{stat:#}");
    stat["read_only_volumes"].as_array().unwrap().clone()
}

#[test]
fn a_sparse_copy_on_a_full_file_system_serves_its_pages_and_takes_puts_when_there_is_room() {
    let test = "places::\
        a_sparse_copy_on_a_full_file_system_serves_its_pages_and_takes_puts_when_there_is_room";
    where_mounts_are_allowed(test, |outside| {
        let original = outside.join("original");
        json(&["create", text(&original), "--size", "160MiB"]);
        json(&bench(text(&original), "get", &[]));
        let mounted = mounted(outside, 200);
        let store = mounted.join("store");
        let mut copy = Command::new("cp");
        copy.args(["--sparse=always", text(&original), text(&store)]);
        assert!(copy.status().unwrap().success());
        let store = text(&store);
        let (level, what) = fact(store, 0, "blocks");
        assert_eq!(level, "warn");
        assert!(
            what.contains("not allocated") && what.contains("fallocate"),
            "{what}"
        );
        let filling = fill(&mounted, 1);
        assert_eq!(fact(store, 1, "blocks").0, "fail");

        let log = outside.join("log");
        let owner = larder(&["serve", store])
            .stdout(Stdio::piped())
            .stderr(File::create(&log).unwrap())
            .spawn();
        let mut owner = Process(owner.unwrap());
        let mut first = String::new();
        let mut told = BufReader::new(owner.0.stdout.take().unwrap());
        told.read_line(&mut first).unwrap();
        assert!(
            !first.is_empty(),
            "{}",
            std::fs::read_to_string(&log).unwrap()
        );
        let load: Vec<_> = (0..3)
            .map(|_| larder(&bench(store, "put", &["--shared", "--force"])).output())
            .collect();
        for output in load {
            assert_eq!(output.unwrap().status.code(), Some(1));
        }
        let [volume] = &read_only_volumes(store)[..] else {
            panic!("the volume is not in read-only service");
        };
        assert!(volume["reason"].as_str().unwrap().contains("os error 28"));
        let probe = ["stat", store, "--check"];
        let troubles = report(&probe, 1)["troubles"].to_string();
        assert!(troubles.contains("read-only service"), "{troubles}");
        let refused = report(&bench(store, "put", &["--shared", "--force"]), 1);
        let reason = refused["unstored_reason"].as_str().unwrap();
        assert!(reason.contains("read-only service"), "{reason}");
        let (level, what) = fact(store, 1, "service");
        assert_eq!(level, "fail");
        assert!(what.contains("refuses writes"), "{what}");
        let got = json(&bench(store, "get", &["--shared", "--force"]));
        assert_eq!(got["verified_pages"], 24);

        std::fs::remove_file(filling).unwrap();
        eventually("puts are stored again", || {
            let put = larder(&bench(store, "put", &["--shared", "--force"])).output();
            put.unwrap().status.success()
        });
        assert_eq!(read_only_volumes(store), Vec::<Value>::new());
        report(&probe, 0);
        kill(Pid::from_raw(owner.0.id().cast_signed()), Signal::SIGTERM).unwrap();
        assert!(owner.0.wait().unwrap().success());
        let said = std::fs::read_to_string(&log).unwrap();
        assert!(said.lines().count() <= 10, "{said}");
        assert!(said.contains("takes writes again"), "{said}");
        let verified = json(&["verify", store, "--deep"]);
        assert!(verified["deep"]["good_pages"].as_u64().unwrap() >= 48);
    });
}

#[test]
fn the_doctor_names_a_read_only_mount_and_a_full_disk_and_a_dry_run_writes_nothing() {
    let test =
        "places::the_doctor_names_a_read_only_mount_and_a_full_disk_and_a_dry_run_writes_nothing";
    where_mounts_are_allowed(test, |outside| {
        let mounted = mounted(outside, 200);
        let store = mounted.join("store");
        let store = text(&store);
        json(&["create", store, "--size", "128MiB"]);
        json(&bench(store, "get", &[]));
        fill(&mounted, 0);
        let (level, what) = fact(text(&mounted), 1, "preallocation");
        assert_eq!(level, "fail");
        assert!(what.contains("free some space"), "{what}");
        // A store whose blocks are its own works on a full disk.
        json(&bench(store, "get", &[]));
        assert_eq!(fact(store, 0, "blocks").0, "ok");

        remount_read_only(&mounted);
        for path in [text(&mounted), store] {
            let (level, what) = fact(path, 1, "writable");
            assert_eq!(level, "fail");
            assert!(what.contains("mounted read-only: remount"), "{what}");
        }
        let planned = json(&["compact", store, "--dry-run"]);
        assert_eq!(planned["dry_run"], true);
        ends(&["compact", store], 3);
        says(&["verify", store, "--deep"], 0, &["24 good"]);
    });
}

/// A loop device, which is let go of with its test.
struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn a_device_of_4_kib_sectors_holds_a_store_and_the_doctor_says_how_it_is_aligned() {
    let directory = directory();
    let backing = directory.path().join("device");
    File::create(&backing).unwrap().set_len(160 << 20).unwrap();
    let options = ["--find", "--show", "--sector-size", "4096", text(&backing)];
    let made = Command::new("losetup").args(options).output();
    let Some(made) = made.ok().filter(|output| output.status.success()) else {
        return skipped("a device of 4 KiB sectors", "no loop device can be made");
    };
    let device = Loop(String::from_utf8(made.stdout).unwrap().trim().to_owned());
    let (level, what) = fact(&device.0, 0, "store");
    assert_eq!(level, "warn");
    assert!(what.contains("larder superblock restore"), "{what}");
    let (level, what) = fact(&device.0, 0, "direct I/O");
    assert_eq!(level, "ok");
    assert!(what.contains("offsets to 4096"), "{what}");
    json(&["create", &device.0]);
    let got = json(&bench(&device.0, "get", &[]));
    assert_eq!(got["verified_pages"], 24);
}
