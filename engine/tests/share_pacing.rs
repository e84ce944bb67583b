//! Writes of one process give way to the reads of another, as long as it reads.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use common::honest::{Process, eventually};
use common::{Home, MIB, Pool, chain};
use larder_engine::{OpenOptions, PageStore, PutStatus, SharedReads, Stats, Store};
use larder_store::api::speaking;
use larder_store::protocol::{COUNTS, Protocol};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

const ROLE: &str = "LARDER_TEST_PACED_READER";
const PARTS: [u32; 1] = [65536];
const PAGES: usize = 64;

fn options() -> OpenOptions {
    // Each process reads for itself.
    OpenOptions::default().with(|o| o.shared_reads = SharedReads::Off)
}

fn attach(path: &Path) -> Store {
    Store::attach(path, options()).unwrap()
}

/// A store with a chain to read, and its owner.
fn owned(options: OpenOptions) -> (Home, Store) {
    let home = Home::with_store(256 * MIB);
    let owner = Store::attach(&home.path, options).unwrap();
    let pool = Pool::new(&owner, "m", &PARTS);
    assert_eq!(pool.put(&chain(1, PAGES)), vec![PutStatus::Stored; PAGES]);
    (home, owner)
}

/// Reads until it is over.
fn read(store: &Store, is_over: &AtomicBool) {
    let pool = Pool::new(store, "m", &PARTS);
    while !is_over.load(Ordering::Relaxed) {
        pool.get(&chain(1, PAGES));
    }
}

/// Puts chains until the pacing shows this, and returns the number of them.
fn put_until(store: &Store, first: u64, what: &str, holds: impl Fn(&Stats) -> bool) {
    let pool = Pool::new(store, "m", &PARTS);
    let mut seed = first;
    eventually(what, || {
        seed += 1;
        pool.put(&chain(seed, 16));
        holds(&store.stats())
    });
}

#[test]
fn a_stopped_reader_holds_no_writes_of_another_process_back() {
    if let Ok(path) = std::env::var(ROLE) {
        return read(&attach(Path::new(&path)), &AtomicBool::new(false));
    }
    let (home, owner) = owned(options());
    let reader = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "a_stopped_reader_holds_no_writes_of_another_process_back",
        ])
        .env(ROLE, &home.path)
        .stdout(Stdio::null())
        .spawn();
    let reader = Process(reader.unwrap());
    put_until(&owner, 1 << 8, "writes give way", |stats| {
        stats.paced_writes > 0
    });
    assert_eq!(owner.stats().pacing, "shared");

    let pid = Pid::from_raw(reader.0.id().try_into().unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    let stopped = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
    assert_eq!(stopped, WaitStatus::Stopped(pid, Signal::SIGSTOP));
    eventually("its claim ends", || owner.stats().paced_rate == 0);
    let paced = owner.stats().paced_writes;
    let pool = Pool::new(&owner, "m", &PARTS);
    pool.put(&chain(1 << 16, PAGES));
    assert_eq!(owner.stats().paced_writes, paced);

    kill(pid, Signal::SIGCONT).unwrap();
    put_until(&owner, 1 << 17, "writes give way again", |stats| {
        stats.paced_writes > paced
    });
    drop(reader);
    owner.close().unwrap();
}

#[test]
fn a_client_gives_way_to_its_owner_if_both_share_the_page() {
    for (features, pacing) in [(None, "shared"), (Some(COUNTS), "local: ")] {
        let (home, owner) = owned(options());
        let mut protocol = Protocol::default();
        protocol.features = features.unwrap_or(protocol.features);
        let client = Store::attach(&home.path, speaking(options(), protocol)).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| read(&owner, &is_over));
            let is_so = |stats: &Stats| match features {
                None => stats.paced_writes > 0,
                Some(_) => stats.pages_put > 100,
            };
            put_until(&client, 1 << 8, "the client puts", is_so);
            is_over.store(true, Ordering::Relaxed);
        });
        let stats = client.stats();
        assert!(stats.pacing.starts_with(pacing), "{}", stats.pacing);
        assert_eq!(stats.paced_writes > 0, features.is_none());
        client.close().unwrap();
        owner.close().unwrap();
    }
}

#[test]
fn without_pacing_nothing_gives_way() {
    for (owner_paces, client_paces, pacing) in [(false, true, "shared"), (true, false, "off")] {
        let with = |paces| options().with(|o| o.pacing = paces);
        let (home, owner) = owned(with(owner_paces));
        let client = Store::attach(&home.path, with(client_paces)).unwrap();
        let found = client.stats().pacing;
        assert!(found.starts_with(pacing), "{found}");
        client.close().unwrap();
        owner.close().unwrap();
    }
}
