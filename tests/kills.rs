//! SIGKILL at random moments: what was acknowledged is there, and nothing is ever wrong.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use rand::{RngExt, SeedableRng};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::inotify;
use serde_json::Value;
use support::{directory, json, larder, make_trace};

const KILLS: usize = 5;

struct Replay {
    trace: PathBuf,
    store: PathBuf,
    log: PathBuf,
    capacity: &'static str,
    disk: &'static str,
}

impl Replay {
    fn arguments<'a>(&'a self, log: &'a str) -> Vec<&'a str> {
        let text = |path: &'a Path| path.to_str().unwrap();
        vec![
            "replay",
            text(&self.trace),
            "--store",
            text(&self.store),
            "--capacity",
            self.capacity,
            "--segment-size",
            "16MiB",
            "--page-bytes",
            "64KiB",
            "--disk",
            self.disk,
            log,
            text(&self.log),
        ]
    }

    /// Starts the replay and kills it once its log has grown by `bytes`; false when it finished first.
    fn kill_after(&self, bytes: u64) -> bool {
        let length = |path: &Path| std::fs::metadata(path).map_or(0, |found| found.len());
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
        inotify::add_watch(&watch, &self.log, inotify::WatchFlags::MODIFY).unwrap();
        let until = length(&self.log) + bytes;
        let mut child = larder(&self.arguments("--ack-log"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let ended = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        loop {
            let mut events = [
                PollFd::new(&watch, PollFlags::IN),
                PollFd::new(&ended, PollFlags::IN),
            ];
            poll(&mut events, None).unwrap();
            let finished = !events[1].revents().is_empty();
            if !finished {
                let mut ignored = [0_u8; 4096];
                rustix::io::read(&watch, &mut ignored).unwrap();
                if length(&self.log) < until {
                    continue;
                }
            }
            // A process that has ended takes no harm from being killed.
            child.kill().unwrap();
            let status = child.wait().unwrap();
            assert!(!finished || status.success());
            return !finished;
        }
    }

    /// Runs it to its end, with what was acknowledged before checked first.
    fn finish(&self) -> Value {
        json(&self.arguments("--check-log"))
    }
}

fn survives_kills(capacity: &'static str, disk: &'static str, requests: usize, seed: u64) -> Value {
    let directory = directory();
    let replay = Replay {
        trace: directory.path().join("trace.jsonl"),
        store: directory.path().join("store"),
        log: directory.path().join("log"),
        capacity,
        disk,
    };
    make_trace(&replay.trace, requests, seed);
    std::fs::write(&replay.log, "").unwrap();
    let mut random = rand_pcg::Pcg64Mcg::seed_from_u64(seed);
    for kill in 0..KILLS {
        // A line of the log is 69 bytes; a restarted replay first finds what is there, then goes on.
        let bytes = random.random_range(1..200_000);
        let killed = replay.kill_after(bytes);
        println!(
            "kill {kill}: after {bytes} bytes of log: {}",
            if killed { "killed" } else { "had finished" }
        );
    }
    let report = replay.finish();
    assert_eq!(report["wrong_pages"], 0, "{report:#}");
    let check = &report["check"];
    assert!(check["acknowledged_pages"].as_u64().unwrap() > 0);
    assert_eq!(check["wrong_pages"], 0, "{report:#}");
    assert_eq!(check["lost_pages"], 0, "{report:#}");
    report
}

#[test]
fn every_page_acknowledged_before_five_kills_is_there_when_nothing_had_to_be_evicted() {
    for disk in ["auto", "threads"] {
        let report = survives_kills("1GiB", disk, 700, 11);
        assert_eq!(
            report["evicted_pages"], 0,
            "the store is too small for this test"
        );
        assert_eq!(report["check"]["missing_pages"], 0, "{report:#}");
    }
}

#[test]
fn five_kills_of_a_store_that_evicts_lose_nothing_that_was_used_lately() {
    let report = survives_kills("256MiB", "auto", 1500, 12);
    assert!(report["evicted_pages"].as_u64().unwrap() > 0);
}
