//! Commands under trouble: a closed output, too little room, an input that never comes.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::process::{Command, Output, Stdio};

use larder_engine::format::SEGMENTS_OFFSET;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use serde_json::Value;

use super::bench::io_uring_works;
use super::{directory, fails, json, larder, replay, skipped, stderr, store_in, text, trace_in};

/// Runs `larder` to its end.
fn run(arguments: &[&str]) -> Output {
    larder(arguments).output().unwrap()
}

const SEGMENT_BYTES: u64 = 16 << 20;

/// Where nothing can be written.
fn full() -> Stdio {
    File::options()
        .write(true)
        .open("/dev/full")
        .unwrap()
        .into()
}

/// `larder` that may write nothing beyond a mebibyte of any file, or half of one, as the shell
/// counts: nowhere in a store's segments.
fn limited(arguments: &[&str]) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -f 1024; exec \"$0\" \"$@\""]);
    shell.arg(env!("CARGO_BIN_EXE_larder")).args(arguments);
    shell.env_remove("LARDER_LOG");
    shell
}

#[test]
fn pages_that_fit_no_segment_are_refused_before_anything_is_made_or_written() {
    let directory = directory();
    let (trace, store) = (
        trace_in(&directory, 2, 2),
        directory.path().join("replayed"),
    );
    let words = ["does not fit a segment", "--page-bytes"];
    let least = ["keeps no page", "at least", "--capacity"];
    fails(&replay(&trace, &store, "40MiB"), 2, &least);
    assert!(!store.exists());
    json(&replay(&trace, &store, "15MiB"));
    fails(&replay(&trace, &store, "16MiB"), 2, &["--page-bytes"]);
    let made = store_in(&directory);
    fails(&replay(&trace, &made, "16MiB"), 2, &["--page-bytes"]);
    let put = ["bench", text(&made), "--op", "put", "--pages", "512"];
    let more = ["--batch", "512", "--page-bytes", "16MiB"];
    fails(&[&put[..], &more].concat(), 2, &words);
    // Of one call some would have gone before the last has come.
    let more = ["--batch", "512", "--page-bytes", "1MiB"];
    let words = ["do not fit together", "--batch"];
    fails(&[&put[..], &more].concat(), 2, &words);
}

#[test]
fn a_volume_that_does_not_take_writes_is_named_with_the_reason() {
    let directory = directory();
    let path = store_in(&directory);
    let larger = ["create", text(&path), "--grow", "--size", "512MiB"];
    let output = limited(&larger).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(stderr(&output).contains("File too large"));
    for disk in ["uring", "threads"] {
        if disk == "uring" && !io_uring_works() {
            skipped("writes that io_uring refuses", "doctor finds none");
            continue;
        }
        let put = ["bench", text(&path), "--op", "put", "--pages", "2"];
        let mut bench = limited(&[&put[..], &["--page-bytes", "64KiB", "--disk", disk]].concat());
        let mut bench = bench.stderr(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(bench.stderr.take().unwrap()).lines();
        let warning = said
            .map_while(Result::ok)
            .find(|line| line.contains("refuses a write"));
        bench.kill().unwrap();
        bench.wait().unwrap();
        let warning = warning.unwrap();
        assert!(warning.contains("volume=0"), "{warning}");
        assert!(warning.contains("File too large"), "{warning}");
    }
}

#[test]
fn what_cannot_be_said_on_stderr_ends_nothing() {
    let directory = directory();
    let missing = directory.path().join("missing");
    let mut inspect = larder(&["inspect", text(&missing)]);
    assert_eq!(inspect.stderr(full()).status().unwrap().code(), Some(3));
    let path = store_in(&directory);
    json(&[
        "bench",
        text(&path),
        "--op",
        "put",
        "--page-bytes",
        "64KiB",
        "--pages",
        "64",
    ]);
    // The header that a server will complain of.
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[7; 4096], SEGMENTS_OFFSET).unwrap();
    let mut owner = larder(&["serve", text(&path)])
        .stdout(Stdio::piped())
        .stderr(full())
        .spawn()
        .unwrap();
    let mut told = BufReader::new(owner.stdout.take().unwrap());
    told.read_line(&mut String::new()).unwrap();
    assert!(json(&["stat", text(&path)])["pages"].as_u64().unwrap() > 0);
    kill(Pid::from_raw(owner.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(owner.wait().unwrap().code(), Some(0));
}

#[test]
fn pages_of_others_are_spared_also_from_pages_of_which_few_fit_a_segment() {
    let directory = directory();
    let path = directory.path().join("store");
    let trace = trace_in(&directory, 40, 40);
    let put = json(&replay(&trace, &path, "64KiB"));
    assert_eq!(put["evicted_pages"], 0);
    // 15 segments: as many bytes of these as of smaller ones there is room for, but not as many
    // pages.
    let bench = [
        "bench",
        text(&path),
        "--op",
        "put",
        "--page-bytes",
        "9MiB",
        "--pages",
    ];
    fails(
        &[&bench[..], &["13"]].concat(),
        2,
        &["has room for", "--force"],
    );
    assert_eq!(json(&[&bench[..], &["2"]].concat())["evicted_pages"], 0);
    let archive = directory.path().join("archive");
    let other = directory.path().join("other");
    json(&["create", text(&other), "--size", "1GiB"]);
    let fill = [
        "bench",
        text(&other),
        "--op",
        "put",
        "--page-bytes",
        "9MiB",
        "--pages",
        "13",
    ];
    json(&fill);
    json(&["export", text(&other), text(&archive)]);
    for dry_run in [&[][..], &["--dry-run"]] {
        let import = [&["import", text(&path), text(&archive)], dry_run].concat();
        fails(&import, 3, &["no room", "--force"]);
    }
    // By their bytes alone there is room for the pages of a pipe.
    let half = directory.path().join("half");
    json(&["create", text(&half), "--size", "128MiB"]);
    let few = ["bench", text(&half), "--op", "put", "--page-bytes", "5MiB"];
    json(&[&few[..], &["--pages", "4"]].concat());
    let largest = directory.path().join("largest");
    json(&["create", text(&largest), "--size", "512MiB"]);
    let fill = ["bench", text(&largest), "--op", "put", "--page-bytes"];
    json(&[&fill[..], &["9MiB", "--pages", "2"]].concat());
    json(&["export", text(&largest), text(&archive), "--force"]);
    let before = json(&["inspect", text(&half)])["pages"].clone();
    let output = larder(&["import", text(&half), "-", "--json"])
        .stdin(File::open(&archive).unwrap())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["evicted_pages"], 0, "{said}");
    assert_eq!(said["refusals"][0]["kind"], "no_space", "{said}");
    let stored = said["pages_put"].as_u64().unwrap();
    assert_eq!((stored, &said["refused_pages"]), (1, &1.into()));
    let after = json(&["inspect", text(&half)])["pages"].clone();
    assert_eq!(after, before.as_u64().unwrap() + stored);
}

#[test]
fn a_size_of_nothing_is_refused() {
    let directory = directory();
    let path = store_in(&directory);
    let new = directory.path().join("new");
    for size in ["0", "0.5"] {
        let of_nothing = &["is nothing"];
        fails(&["create", text(&new), "--size", size], 2, of_nothing);
        let add = ["volume", "add", text(&path), text(&new), "--size", size];
        fails(&add, 2, of_nothing);
        let verify = ["verify", text(&path), "--online", "--rate", size];
        fails(&verify, 2, of_nothing);
    }
    assert!(!new.exists());
}

#[test]
fn what_fits_no_segment_is_refused_by_a_dry_run_too() {
    let directory = directory();
    let (large, archive) = (
        directory.path().join("large"),
        directory.path().join("archive"),
    );
    json(&[
        "create",
        text(&large),
        "--size",
        "512MiB",
        "--segment-size",
        "64MiB",
    ]);
    json(&[
        "bench",
        text(&large),
        "--op",
        "put",
        "--page-bytes",
        "20MiB",
        "--pages",
        "2",
    ]);
    json(&["export", text(&large), text(&archive)]);
    let path = store_in(&directory);
    for dry_run in [&["--dry-run"][..], &[]] {
        let output = run(&[&["import", text(&path), text(&archive)], dry_run].concat());
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains("larger than a segment"), "{said}");
    }
}

#[test]
fn a_replay_over_damage_or_refusals_ends_with_findings() {
    let directory = directory();
    let trace = trace_in(&directory, 8, 4);
    let path = directory.path().join("store");
    json(&replay(&trace, &path, "64KiB"));
    let file = File::options().write(true).open(&path).unwrap();
    let pages = usize::try_from(SEGMENT_BYTES / 2).unwrap();
    file.write_all_at(&vec![7; pages], SEGMENTS_OFFSET + (1 << 16))
        .unwrap();
    assert_eq!(run(&replay(&trace, &path, "64KiB")).status.code(), Some(1));
    // It has put them anew.
    json(&replay(&trace, &path, "64KiB"));
    // A chain of more pages than there are segments, each of which takes one.
    let (trace, path) = (trace_in(&directory, 2, 30), directory.path().join("small"));
    let output = run(&[&replay(&trace, &path, "15MiB")[..], &["--json"]].concat());
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["wrong_pages"], 0);
    assert!(report["refused_pages"].as_u64() > Some(0));
    let reason = report["unstored_reason"].as_str().unwrap();
    assert!(reason.contains("are more than the store keeps"), "{reason}");
}

#[test]
fn a_store_is_not_compacted_into_itself() {
    let directory = directory();
    let path = store_in(&directory);
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    for itself in [&path, &link] {
        let into = ["compact", text(&path), "--into", text(itself)];
        fails(&into, 2, &["is the store itself"]);
    }
}

/// The same command with the default action of SIGHUP. The tests may be started with `nohup`, and
/// commands leave a signal ignored that was ignored at their start.
fn heeding_hangups(command: &Command) -> Command {
    let mut heeding = Command::new("env");
    heeding
        .arg("--default-signal=HUP")
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => heeding.env(name, value),
            None => heeding.env_remove(name),
        };
    }
    heeding
}

#[test]
fn what_reads_a_pipe_in_the_file_system_is_ended_by_one_signal() {
    let directory = directory();
    let path = store_in(&directory);
    let replayed = directory.path().join("replayed");
    let pipe = directory.path().join("pipe");
    mkfifo(&pipe, Mode::S_IRWXU).unwrap();
    let import = vec!["import", text(&path), text(&pipe)];
    let replay = replay(&pipe, &replayed, "64KiB");
    for (command, first) in [
        (&import, ""),
        (&replay, ""),
        (&replay, "{\"hash_ids\": [1]}\n{"),
    ] {
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            let mut reader = heeding_hangups(&larder(command)).spawn().unwrap();
            // It opens when the reader does, and gets no more than this.
            let mut writer = File::options().write(true).open(&pipe).unwrap();
            writer.write_all(first.as_bytes()).unwrap();
            kill(Pid::from_raw(reader.id().cast_signed()), signal).unwrap();
            assert_eq!(
                reader.wait().unwrap().code(),
                Some(130),
                "{command:?} {signal}"
            );
            drop(writer);
        }
    }
}
