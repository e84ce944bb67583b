//! SIGKILL of `compact` and of `verify --repair` at random moments: no page is lost or wrong, and
//! running it again finishes.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Stdio};

use larder_format::{PageKey, SEGMENTS_OFFSET, SUPERBLOCK_OFFSETS};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::{RngExt, SeedableRng};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;

use crate::home::{BLOCK_BYTES, block_offset};
use crate::support::home::Home;
use crate::support::honest::{PATIENCE, Process};
use crate::support::sparse::{pack, unpack};
use crate::support::{chain, flip, larder, text};

/// Kills of each command; `LARDER_KILLS` asks for more.
const KILLS: u32 = 20;

pub fn kills() -> u32 {
    let wanted = std::env::var("LARDER_KILLS").ok();
    wanted.map_or(KILLS, |kills| kills.parse().unwrap())
}

/// Runs a command and stops it with `signal` when so many writes to the store have been seen.
/// Returns how many were seen when it ended, and its exit code, if it has one.
fn run(home: &Home, command: &[&str], writes: usize, signal: Signal) -> (usize, Option<i32>) {
    let watch = Watch::on(home);
    let Process(child) = &mut started(home, command);
    let seen = watch.await_writes(child, writes);
    stop(child, signal);
    (seen, child.wait().unwrap().code())
}

/// Starts a command. Its output is of no interest.
pub fn started(home: &Home, command: &[&str]) -> Process {
    let words = command[0].split(' ').chain([text(&home.path)]);
    let arguments: Vec<&str> = words.chain(command[1..].iter().copied()).collect();
    let mut command = larder(&arguments);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    Process(command.spawn().unwrap())
}

/// Sees writes to a store, of any process.
pub struct Watch(OwnedFd);

impl Watch {
    pub fn on(home: &Home) -> Watch {
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
        inotify::add_watch(&watch, &home.path, inotify::WatchFlags::MODIFY).unwrap();
        Watch(watch)
    }

    /// Sees changes of all files beside the store, too.
    pub fn on_directory(home: &Home) -> Watch {
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
        let changes = inotify::WatchFlags::MODIFY
            | inotify::WatchFlags::CREATE
            | inotify::WatchFlags::MOVED_TO;
        inotify::add_watch(&watch, home.directory.path(), changes).unwrap();
        Watch(watch)
    }

    /// Waits until so many writes have been seen, or `child` has ended. Returns how many were seen.
    pub fn await_writes(&self, child: &Child, writes: usize) -> usize {
        let pid = rustix::process::Pid::from_child(child);
        let ended = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let patience = Timespec::try_from(PATIENCE).unwrap();
        let mut seen = 0;
        while seen < writes {
            let mut events = [
                PollFd::new(&self.0, PollFlags::IN),
                PollFd::new(&ended, PollFlags::IN),
            ];
            let ready = poll(&mut events, Some(&patience)).unwrap();
            assert!(ready > 0, "the command neither goes on nor ends");
            // Writes that came before the end count.
            if events[0].revents().is_empty() {
                break;
            }
            let mut ignored = [0_u8; 4096];
            rustix::io::read(&self.0, &mut ignored).unwrap();
            seen += 1;
        }
        seen
    }
}

/// A process that has ended and has not been waited for takes no harm from a signal.
pub fn stop(child: &Child, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
}

fn chains() -> Vec<Vec<PageKey>> {
    (1..=8).map(|seed| chain(seed, 60)).collect()
}

/// A store on these volumes, with scattered chains, one of them half deleted, and a copy of it.
fn scattered(further: &[&str]) -> (Home, Vec<PageKey>) {
    let home = Home::with_volumes(further);
    let chains = chains();
    home.with(|pool| {
        pool.put_in_turns(&chains);
        chains[7][40..].iter().for_each(|key| pool.delete(*key));
    });
    for name in std::iter::once(&"store").chain(further) {
        unpack(&pack(&home.beside(name)), &copy_of(&home, name));
    }
    let mut keys = chains.concat();
    keys.truncate(460);
    (home, keys)
}

fn copy_of(home: &Home, name: &str) -> PathBuf {
    home.beside(&format!("{name}-copy"))
}

/// Restores the volumes from their copies.
fn restore(home: &Home, further: &[&str]) {
    for name in std::iter::once(&"store").chain(further) {
        unpack(&pack(&copy_of(home, name)), &home.beside(name));
    }
}

#[test]
fn a_compaction_killed_at_any_moment_leaves_every_page_and_the_next_one_finishes() {
    compaction_survives_kills(&[], 3);
}

#[test]
fn so_does_one_of_a_store_on_two_volumes() {
    compaction_survives_kills(&["second"], 5);
}

fn compaction_survives_kills(further: &[&str], seed: u64) {
    let (home, keys) = scattered(further);
    let (writes, code) = run(&home, &["compact"], usize::MAX, Signal::SIGKILL);
    assert_eq!(code, Some(0));
    let mut random = rand_pcg::Pcg64Mcg::seed_from_u64(seed);
    let mut killed = 0;
    for round in 0..kills() {
        restore(&home, further);
        let after = random.random_range(0..writes);
        let (_, code) = run(&home, &["compact"], after, Signal::SIGKILL);
        killed += u32::from(code.is_none());
        let document = home.json("verify", &["--deep"], 0);
        assert_eq!(
            document["deep"]["good_pages"], 460,
            "round {round}, {after}"
        );
        // Half of the times the store is used before it is compacted again.
        if round % 2 == 0 {
            home.with(|pool| assert_eq!(pool.hits(&keys), 460, "round {round}, {after}"));
        }
        home.says("compact", &[], 0, &["460 pages"]);
        let document = home.json("verify", &["--deep"], 0);
        assert_eq!(
            document["deep"]["good_pages"], 460,
            "round {round}, {after}"
        );
        home.with(|pool| {
            assert_eq!(pool.hits(&keys), 460);
            assert_eq!(pool.hits(&chains()[7][40..]), 0);
        });
    }
    println!(
        "{killed} of {} compactions were killed before they ended",
        kills()
    );
    assert!(killed > 0);
}

#[test]
fn a_repair_killed_at_any_moment_is_run_again_and_ends_the_same() {
    let (home, keys) = scattered(&[]);
    let copy = copy_of(&home, "store");
    for index in [1, 7, 30] {
        flip(&copy, block_offset(SEGMENTS_OFFSET, index) + 200);
    }
    for page in [0, 50, 100, 150] {
        flip(
            &copy,
            SEGMENTS_OFFSET + 2 * BLOCK_BYTES + page * (64 << 10) + 77,
        );
    }
    flip(&copy, SEGMENTS_OFFSET + BLOCK_BYTES + 41);
    flip(&copy, SUPERBLOCK_OFFSETS[0] + 73);
    restore(&home, &[]);
    let command = ["verify", "--repair"];
    let (writes, code) = run(&home, &command, usize::MAX, Signal::SIGKILL);
    assert_eq!(code, Some(0));
    let whole = home.json("verify", &["--deep"], 0);
    let good = whole["deep"]["good_pages"].as_u64().unwrap();
    assert!((450..=456).contains(&good), "{good}");
    let mut random = rand_pcg::Pcg64Mcg::seed_from_u64(4);
    let mut killed = 0;
    for round in 0..kills() {
        restore(&home, &[]);
        let after = random.random_range(0..writes);
        let (_, code) = run(&home, &command, after, Signal::SIGKILL);
        killed += u32::from(code.is_none());
        home.says("verify", &["--repair"], 0, &[]);
        let document = home.json("verify", &["--deep"], 0);
        assert_eq!(
            document["deep"]["good_pages"], good,
            "round {round}, {after}"
        );
        home.with(|pool| assert_eq!(pool.hits(&keys) as u64, good));
    }
    println!(
        "{killed} of {} repairs were killed before they ended",
        kills()
    );
    assert!(killed > 0);
}

#[test]
fn an_interrupted_compaction_closes_the_store_in_order() {
    let (home, keys) = scattered(&[]);
    let (_, code) = run(&home, &["compact"], 5, Signal::SIGINT);
    // It may have been past its last page already.
    assert!(matches!(code, Some(130 | 0)), "{code:?}");
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(document["condition"], "clean");
    assert_eq!(document["deep"]["good_pages"], 460);
    home.with(|pool| assert_eq!(pool.hits(&keys), 460));
}
