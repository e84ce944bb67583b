//! One store used by processes in different namespaces, like containers of one node: each has its
//! own pids, mounts, network, System V memory and users. An owner is killed, the others go on.
//!
//! Needs root and `unshare`; skips with a message where either is missing. The workers are this
//! same program, with their role in an environment variable.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::honest::{PATIENCE, Process, skipped};
use common::{Home, MIB, Pool, chain};
use larder_engine::{GetStatus, OpenOptions, Part, PutOptions, SharedReads, Store, report};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const ROLE: &str = "LARDER_TEST_NAMESPACES_WORKER";
const PAGES: usize = 4;

/// Group of all workers in the test with different users.
const GROUP: u32 = 7000;

/// Ids that a user namespace maps, to the same ones.
const IDS: &str = "0 0 60000";

/// A worker's report after each round.
#[derive(Clone, Debug)]
struct Round {
    part: String,
    stored: usize,
    /// Pages found of the first chain of the first worker.
    found: usize,
}

fn seed(worker: usize, round: u64) -> u64 {
    1000 * (worker as u64 + 1) + round
}

/// Puts chains and looks for the first one of the first worker, until standard output is closed.
fn work(role: &str) {
    let mut words = role.split(',');
    let (worker, group, path) = (words.next(), words.next(), words.next());
    let worker: usize = worker.unwrap().parse().unwrap();
    std::thread::spawn(|| {
        // The test has ended.
        let _ = std::io::stdin().lock().lines().count();
        std::process::exit(0);
    });
    let mut options = OpenOptions::default().with(|o| o.group = group.unwrap().parse().ok());
    options.shared_reads = SharedReads::On;
    let store = Store::attach(Path::new(path.unwrap()), options).unwrap();
    let pool = Pool::new(&store, "m", &[65536]);
    for round in 0.. {
        let wait = Duration::from_secs(1);
        let statuses = pool.put_from(
            &chain(seed(worker, round), PAGES),
            0,
            PutOptions::waiting(wait),
        );
        let stored = statuses.iter().filter(|status| status.is_present()).count();
        let found = pool.get(&chain(seed(0, 0), PAGES));
        let found = found
            .iter()
            .filter(|status| **status == GetStatus::Hit)
            .count();
        let part = format!("{:?}", store.part());
        if writeln!(std::io::stdout(), "round {part} {stored} {found}").is_err() {
            return;
        }
    }
}

struct Worker {
    process: Process,
    rounds: Receiver<Round>,
    _stdin: ChildStdin,
}

/// The difference between the workers of a test, besides their namespaces.
#[derive(Clone, Copy)]
enum Users {
    /// None: each is root, in a user namespace that maps no other user.
    Same,
    /// Each has a user of its own; all are members of one group.
    Group,
}

impl Worker {
    /// Starts a worker; `None` where there are no such namespaces.
    fn start(test: &str, users: Users, worker: usize, path: &Path) -> Option<Worker> {
        let program = std::env::current_exe().unwrap();
        let uid = (1001 + worker).to_string();
        let (maps, change) = match users {
            Users::Same => (&["--map-root-user"][..], String::new()),
            Users::Group => {
                let change = format!(
                    "setpriv --reuid {uid} --regid {uid} --groups {GROUP} --inh-caps -all \
                     --ambient-caps -all"
                );
                (&["--user", "--keep-caps"][..], change)
            }
        };
        let script = format!("echo made; read go; exec {change} \"$0\" \"$@\"");
        let mut command = Command::new("unshare");
        command
            .args(maps)
            .args(["--pid", "--mount", "--net", "--ipc", "--fork", "sh", "-c"])
            .arg(script)
            .arg(program)
            .args(["--exact", test, "--nocapture"]);
        let group = match users {
            Users::Same => String::new(),
            Users::Group => GROUP.to_string(),
        };
        command.env(ROLE, format!("{worker},{group},{}", path.display()));
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut process = Process(child.ok()?);
        let mut lines = BufReader::new(process.0.stdout.take().unwrap()).lines();
        // Without it `unshare` could not make the namespaces.
        lines.next()?.ok()?;
        let mut stdin = process.0.stdin.take().unwrap();
        if let Users::Group = users {
            for map in ["uid_map", "gid_map"] {
                let map = format!("/proc/{}/{map}", process.0.id());
                std::fs::write(map, IDS).ok()?;
            }
        }
        writeln!(stdin, "go").unwrap();
        let (sender, rounds) = channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let words: Vec<&str> = line.split(' ').collect();
                if let ["round", part, stored, found] = words[..] {
                    let round = Round {
                        part: part.to_owned(),
                        stored: stored.parse().unwrap(),
                        found: found.parse().unwrap(),
                    };
                    let _ = sender.send(round);
                }
            }
        });
        Some(Worker {
            process,
            rounds,
            _stdin: stdin,
        })
    }

    /// Waits for a round that satisfies a condition.
    #[track_caller]
    fn comes_to(&self, what: &str, is_it: impl Fn(&Round) -> bool) {
        loop {
            let round = self.rounds.recv_timeout(PATIENCE);
            let round = round.unwrap_or_else(|_| panic!("a worker never came to this: {what}"));
            if is_it(&round) {
                return;
            }
        }
    }

    /// Kills the worker itself: `unshare` and the shell only wait for it.
    fn kill(mut self) {
        let mut pid = self.process.0.id();
        while let Some(child) = child_of(pid) {
            pid = child;
        }
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
        self.process.0.wait().unwrap();
    }
}

fn child_of(pid: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    children.ok()?.split_whitespace().next()?.parse().ok()
}

fn go_on_after_the_owner(test: &str, users: Users) {
    if let Ok(role) = std::env::var(ROLE) {
        work(&role);
        return;
    }
    if !rustix::process::geteuid().is_root() {
        skipped("a store shared across namespaces", "this is not root");
        return;
    }
    let home = Home::with_store(256 * MIB);
    if let Users::Group = users {
        for (path, mode) in [(home.directory.path(), 0o2770), (&home.path, 0o660)] {
            std::os::unix::fs::chown(path, Some(1001), Some(GROUP)).unwrap();
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        }
    }
    let start = |worker| Worker::start(test, users, worker, &home.path);
    let Some(owner) = start(0) else {
        skipped(
            "a store shared across namespaces",
            "`unshare` makes none here",
        );
        return;
    };
    let all = |round: &Round| (round.stored, round.found) == (PAGES, PAGES);
    owner.comes_to("it owns the store", |round| {
        round.part == format!("{:?}", Part::Owner) && all(round)
    });
    let others = [start(1).unwrap(), start(2).unwrap()];
    for other in &others {
        other.comes_to("it is a client that stores and finds", |round| {
            round.part == format!("{:?}", Part::Client) && all(round)
        });
    }
    // The owner is visible from here, though it does not see this process.
    let report_now = report(&home.path).unwrap();
    assert!(
        report_now
            .pid
            .is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists())
    );
    assert!(report_now.staging.area_bytes > 0);
    owner.kill();
    let successor = format!("{:?}", Part::Owner);
    let has_successor = || {
        let mut parts = others.iter().map(|other| {
            let round = other.rounds.recv_timeout(PATIENCE).unwrap();
            round.part == successor
        });
        parts.any(|is_owner| is_owner)
    };
    common::honest::eventually("another worker owns the store", has_successor);
    for other in &others {
        other.comes_to("it stores and finds under the next owner", |round| {
            round.part != format!("{:?}", Part::Nobody) && all(round)
        });
    }
}

#[test]
fn one_user_in_namespaces_of_each_process() {
    go_on_after_the_owner("one_user_in_namespaces_of_each_process", Users::Same);
}

#[test]
fn members_of_one_group_in_namespaces_of_each_process() {
    go_on_after_the_owner(
        "members_of_one_group_in_namespaces_of_each_process",
        Users::Group,
    );
}
