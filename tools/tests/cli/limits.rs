//! Limits of the command line: durations, names that are no UTF-8, and the end of a replay of
//! several sizes.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::support::honest::eventually;
use super::*;

#[test]
fn a_duration_that_the_clock_has_no_room_for_is_a_usage_error() {
    let remote = ["remote", "ls", "file:///no/such/place"];
    let prune = ["remote", "prune", "file:///no/such/place"];
    for (command, option) in [
        (&remote[..], "--timeout"),
        (&prune, "--older-than"),
        (&["bench", "s", "--op", "get"], "--lease"),
        (&["serve", "s"], "--lease"),
        (&["serve", "s", "--l4", "file:///l4"], "--l4-patience"),
        (&["serve", "s", "--l4", "file:///l4"], "--l4-timeout"),
        (&["serve", "s", "--l4", "file:///l4"], "--l4-refresh"),
    ] {
        for duration in ["18446744073709551615", "36501d"] {
            let with = [command, &[option, duration]].concat();
            fails(&with, 2, &[option, "100 years"]);
        }
    }
}

/// The document of a command with a last argument that may be no UTF-8.
#[track_caller]
fn document(arguments: &[&str], last: &OsStr) -> Value {
    let output = larder(arguments).arg(last).arg("--json").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn documents_show_names_that_are_no_utf_8() {
    let directory = directory();
    let name = |name: &[u8]| {
        directory
            .path()
            .join(OsStr::from_bytes(name))
            .into_os_string()
    };
    let shown = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let key = name(b"k\xff");
    assert_eq!(
        document(&["remote", "key"], &key)["file"],
        shown("k\u{fffd}")
    );
    assert!(Path::new(&key).exists());

    let store = store_in(&directory);
    let link: OsString = name(b"s\xff");
    symlink(&store, &link).unwrap();
    for command in [&["inspect"][..], &["verify"], &["compact"], &["doctor"]] {
        let told = larder(command).arg(&link).arg("--json").output().unwrap();
        let told: Value = serde_json::from_slice(&told.stdout).unwrap();
        assert_eq!(told["path"], shown("s\u{fffd}"), "{command:?}");
    }
    let exported = document(&["export", text(&store)], &name(b"a\xff"));
    assert_eq!(exported["file"], shown("a\u{fffd}"));
}

/// A replay against stores of two sizes, whose trace comes through a pipe.
struct Replay {
    directory: TempDir,
    child: Process,
    pipe: PathBuf,
    lines: Vec<u8>,
}

impl Replay {
    fn start() -> Replay {
        let directory = directory();
        let lines = std::fs::read(trace_in(&directory, 2, 1)).unwrap();
        let pipe = directory.path().join("pipe");
        mkfifo(&pipe, Mode::S_IRWXU).unwrap();
        let stores = directory.path().join("stores");
        std::fs::create_dir(&stores).unwrap();
        let child = larder(&[
            "replay",
            "store",
            text(&pipe),
            "--page-bytes",
            "64KiB",
            "--json",
        ])
        .args(["--capacity", "98MiB,114MiB", "--store"])
        .arg(stores.join("store"))
        .stdout(Stdio::piped())
        .spawn();
        Replay {
            directory,
            child: Process(child.unwrap()),
            pipe,
            lines,
        }
    }

    /// Waits until the trace is opened.
    fn opened(&self) -> File {
        File::options().write(true).open(&self.pipe).unwrap()
    }

    /// The file of the first store, in a directory of the replay.
    fn store(&self) -> Option<PathBuf> {
        let made = std::fs::read_dir(self.directory.path().join("stores")).unwrap();
        let stores = made.map(|made| made.unwrap().path().join("store-0"));
        stores.into_iter().find(|store| store.exists())
    }

    /// Interrupts it. Its output.
    #[track_caller]
    fn interrupt(mut self) -> String {
        kill(
            Pid::from_raw(i32::try_from(self.child.0.id()).unwrap()),
            Signal::SIGINT,
        )
        .unwrap();
        assert_eq!(self.child.0.wait().unwrap().code(), Some(130));
        let mut said = String::new();
        let mut told = self.child.0.stdout.take().unwrap();
        told.read_to_string(&mut said).unwrap();
        said
    }
}

#[test]
fn a_trace_that_is_gone_after_its_first_reading_is_refused() {
    let directory = directory();
    let trace = File::open(trace_in(&directory, 4, 3)).unwrap();
    let store = directory.path().join("store");
    // A pipe is at its end after the first reading.
    let mut feeder = Command::new("cat")
        .stdin(trace)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = larder(&["replay", "store", "/dev/stdin", "--page-bytes", "64KiB"])
        .args(["--capacity", "98MiB,114MiB", "--store", text(&store)])
        .stdin(feeder.stdout.take().unwrap())
        .output()
        .unwrap();
    feeder.wait().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("give a file"));
}

#[test]
fn a_replay_that_is_interrupted_before_its_first_size_has_no_result() {
    let replay = Replay::start();
    let mut pipe = replay.opened();
    pipe.write_all(&replay.lines).unwrap();
    assert_eq!(replay.interrupt(), "");
}

#[test]
fn a_replay_that_is_interrupted_between_two_sizes_has_the_sizes_until_then() {
    let replay = Replay::start();
    replay.opened().write_all(&replay.lines).unwrap();
    // The ceiling is known: the directory of the stores is there.
    eventually("the first size", || {
        let mut made = std::fs::read_dir(replay.directory.path().join("stores")).unwrap();
        made.next().is_some()
    });
    let mut pipe = replay.opened();
    let first = replay.lines.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    let (first, rest) = replay.lines.split_at(first);
    pipe.write_all(first).unwrap();
    eventually("the first store", || replay.store().is_some());
    pipe.write_all(rest).unwrap();
    drop(pipe);
    eventually("the end of the first store", || replay.store().is_none());
    let document: Value = serde_json::from_str(&replay.interrupt()).unwrap();
    assert_eq!(document["interrupted"], true);
    assert_eq!(document["sizes"].as_array().unwrap().len(), 1);
}
