//! A stage for kills: a store, the log of its acknowledged pages, and dice.
//!
//! Each round starts a command on the store and kills it at a random moment. Then the store must
//! verify as sound and return no wrong byte. [`Stage::check`] returns the pages of the log that it
//! still has. A command may write pages ([`Stage::writer`]) or only move them ([`Stage::larder`]).

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::Value;

use super::honest::PATIENCE;
use super::{larder, make_trace, smooth, text};

/// Longest life of a command that is killed after a time rather than after some progress.
const DELAY_MAX: Duration = Duration::from_millis(120);

/// Most bytes by which the log of a command grows before it is killed: a thousand lines of 69
/// bytes, a page each.
const GROWTH_MAX: u64 = 1 << 16;

/// Requests of a trace: more than any command gets to serve.
const REQUESTS: usize = 400;

/// See the module documentation.
pub struct Stage {
    directory: tempfile::TempDir,
    /// The store's first volume.
    pub store: PathBuf,
    log: PathBuf,
    capacity: &'static str,
    /// The pages are smooth values, and the store has a codec.
    encodes: bool,
    pub dice: Pcg64Mcg,
}

/// The durability of a page at the moment of its acknowledgement.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// The page survives a kill.
    Kill,
    /// The page survives power loss.
    PowerLoss,
}

impl Stage {
    /// A stage with a new store of so many volumes in `capacity` bytes. Every second one encodes.
    pub fn new(volumes: usize, capacity: &'static str, seed: u64) -> Stage {
        let directory = super::directory();
        let store = directory.path().join("store");
        let log = directory.path().join("log");
        std::fs::write(&log, "").unwrap();
        let mut create = larder(&["create", text(&store), "--size", capacity]);
        create.args(["--segment-size", "16MiB", "--json"]);
        for volume in 1..volumes {
            let path = directory.path().join(format!("volume-{volume}"));
            create.arg("--volume").arg(path);
        }
        assert!(create.stdout(Stdio::null()).status().unwrap().success());
        let encodes = seed % 2 == 1;
        println!("stage: seed {seed}, encodes: {encodes}");
        std::fs::write(directory.path().join("content"), smooth(seed, 1 << 20)).unwrap();
        Stage {
            directory,
            store,
            log,
            capacity,
            encodes,
            dice: Pcg64Mcg::seed_from_u64(seed),
        }
    }

    /// A file beside the store.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// `larder COMMAND STORE OPTIONS...`.
    pub fn larder(&self, command: &str, options: &[&str]) -> Command {
        let words: Vec<&str> = command.split(' ').collect();
        let mut child = larder(&words);
        child.arg(&self.store).args(options);
        child
    }

    /// A command that writes pages which the store has not seen, on a disk and with syncs that the
    /// dice choose.
    pub fn writer(&mut self, promise: Promise) -> Command {
        let trace = self.beside("trace.jsonl");
        make_trace(&trace, REQUESTS, self.dice.random());
        let disk = self.one_of(&["uring", "threads"]);
        let mut child = self.replay(&trace);
        child.args(["--ack-log", text(&self.log), "--disk", disk]);
        match promise {
            Promise::Kill => {
                let sync = self.one_of(&["relaxed", "interval", "always"]);
                child.args(["--sync", sync]);
            }
            Promise::PowerLoss if self.dice.random() => {
                child.args(["--sync", "always"]);
            }
            Promise::PowerLoss => {
                let every = self.one_of(&["1", "2", "7"]);
                child.args(["--sync", "relaxed", "--flush-every", every]);
            }
        }
        child
    }

    fn one_of(&mut self, choices: &[&'static str]) -> &'static str {
        choices[self.dice.random_range(0..choices.len())]
    }

    fn replay(&self, trace: &Path) -> Command {
        let mut child = larder(&["replay", "store", text(trace), "--store", text(&self.store)]);
        child.args(["--capacity", self.capacity, "--page-bytes", "64KiB"]);
        if self.encodes {
            let content = self.beside("content");
            child.args(["--codec", "bf16", "--content", text(&content)]);
        }
        child
    }

    /// Starts a command and, at a moment that the dice choose, calls `strike`, which must kill it;
    /// false when it had ended by then.
    pub fn interrupt(&mut self, mut command: Command, strike: impl FnOnce(&mut Child)) -> bool {
        let by_growth: bool = self.dice.random();
        let delay = self.dice.random_range(Duration::ZERO..DELAY_MAX);
        // Small numbers as likely as large ones: the beginning is where a store is opened and
        // recovered.
        let growth = 1 << self.dice.random_range(1..=GROWTH_MAX.ilog2());
        let until = length(&self.log) + self.dice.random_range(growth / 2..growth) + 1;
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
        inotify::add_watch(&watch, &self.log, inotify::WatchFlags::MODIFY).unwrap();
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let ended = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let started = Instant::now();
        let (lives, stands_still) = loop {
            let left = if by_growth {
                PATIENCE
            } else {
                delay.saturating_sub(started.elapsed())
            };
            let patience = Timespec::try_from(left).unwrap();
            let mut events = [
                PollFd::new(&ended, PollFlags::IN),
                PollFd::new(&watch, PollFlags::IN),
            ];
            let ready = poll(&mut events, Some(&patience)).unwrap();
            if !events[0].revents().is_empty() {
                break (false, false);
            }
            if !events[1].revents().is_empty() {
                rustix::io::read(&watch, &mut [0_u8; 4096]).unwrap();
            }
            if ready == 0 || (by_growth && length(&self.log) >= until) {
                break (true, by_growth && ready == 0);
            }
        };
        if lives {
            strike(&mut child);
        }
        let output = child.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        let what = "neither goes on nor ends";
        assert!(!stands_still, "{command:?} {what}: {errors}");
        assert!(lives || output.status.success(), "{command:?}: {errors}");
        lives
    }

    /// Runs a command, which must succeed, to its end.
    pub fn finish(&self, mut command: Command) {
        assert!(command.stdout(Stdio::null()).status().unwrap().success());
    }

    /// The key of a page that was acknowledged.
    pub fn acknowledged(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap();
        let mut puts = log.lines().filter_map(|line| line.strip_prefix("put "));
        puts.next().unwrap().to_owned()
    }

    /// Starts a command and kills it at a moment that the dice choose; false when it had ended by
    /// then.
    pub fn kill(&mut self, command: Command) -> bool {
        self.interrupt(command, |child| child.kill().unwrap())
    }

    /// The store must be sound and return no wrong byte. Returns the report, with the acknowledged
    /// pages that are lost.
    #[track_caller]
    pub fn check(&self) -> Value {
        let found = self
            .larder("verify", &["--deep", "--json"])
            .output()
            .unwrap();
        let shown = String::from_utf8_lossy(&found.stdout);
        assert_eq!(found.status.code(), Some(0), "{shown}");
        let nothing = self.beside("no-requests");
        std::fs::write(&nothing, "").unwrap();
        let mut check = self.replay(&nothing);
        check.args(["--check-log", text(&self.log), "--json"]);
        let output = check.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        assert!(!report.is_null(), "{errors}");
        assert_eq!(report["check"]["wrong_pages"], 0, "{report:#}");
        report
    }
}

/// A capacity in which nothing has to be evicted before [`is_used_up`].
pub const AMPLE: &str = "2GiB";

/// Whether a stage of [`AMPLE`] capacity has seen enough: a kill leaves some segments filled in
/// part, two a volume at most, which count as used until reclaim has come round to them. So do as
/// many pages as a few segments hold.
pub fn is_used_up(kills: usize, report: &Value) -> bool {
    kills >= 20 || report["check"]["acknowledged_pages"].as_u64().unwrap() > 2000
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |found| found.len())
}

/// Most stages that so many kills take: some are used up before anything is killed on them.
pub fn stages_max(kills: usize) -> u64 {
    20 + kills as u64
}

/// How many kills a test is to make: `LARDER_KILLS`, or else `usual`.
pub fn kills(usual: usize) -> usize {
    let asked = std::env::var("LARDER_KILLS").ok();
    asked.map_or(usual, |count| count.parse().unwrap())
}
