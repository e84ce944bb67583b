//! A disk and a store with nothing to do cost nothing. One test, in a process of its own, because
//! it counts the activity of all threads of the engine.

#![allow(clippy::unwrap_used)]

mod common;

use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use larder_disk::probe::{Want, open_disk};
use larder_disk::{Action, DiskOptions, Done, Op, Purpose, Sink};
use larder_engine::{OpenOptions, PageStore, Store};

/// CPU time that the rest of the process spends while the disk is idle: a poll every 10 ms would
/// show many times over.
const SPENT: Duration = Duration::from_millis(300);

/// Times the disk's threads may still give up the processor after their last answer, on their way
/// to sleep.
const SETTLING: u64 = 4;

/// The same for each client: its own threads' way to sleep, and the owner's that served it.
const SETTLING_OF_A_CLIENT: u64 = 2;

struct Mailbox(mpsc::Sender<Done>);

impl Sink for Mailbox {
    fn done(&self, answers: Vec<Done>) {
        answers
            .into_iter()
            .for_each(|answer| self.0.send(answer).unwrap());
    }
}

/// Times a second that threads of an owner with clients wake up: one looks whether the copies of
/// the totals are current, and the disk's reads a block of the volume; and room for preemptions.
const LOOKS_PER_SECOND: u64 = 5;

/// The same for each client, which shows that it is alive.
const BEATS_PER_SECOND: u64 = 1;

/// Context switches, of both kinds, of all threads of this process that belong to the engine.
fn switches_of_engine_threads() -> u64 {
    let mut switches = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let status =
            std::fs::read_to_string(task.unwrap().path().join("status")).unwrap_or_default();
        let field = |name: &str| {
            status.lines().find_map(|line| {
                line.strip_prefix(name)?
                    .trim_start_matches(':')
                    .trim()
                    .parse::<u64>()
                    .ok()
            })
        };
        if status
            .lines()
            .next()
            .is_some_and(|name| name.contains("larder-"))
        {
            switches += field("voluntary_ctxt_switches").unwrap()
                + field("nonvoluntary_ctxt_switches").unwrap();
        }
    }
    switches
}

/// CPU time of the calling thread.
fn thread_cpu_time() -> Duration {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(
        schedstat
            .split_whitespace()
            .next()
            .unwrap()
            .parse()
            .unwrap(),
    )
}

/// Spends CPU time beside the engine's threads, which must not wake up meanwhile.
#[track_caller]
fn sleeps(what: &str, settling: u64, per_second: u64) {
    let begun = Instant::now();
    let before = switches_of_engine_threads();
    assert!(before > 0, "the engine's threads are counted");
    let end = thread_cpu_time() + SPENT;
    while thread_cpu_time() < end {}
    let switches = switches_of_engine_threads() - before;
    let allowed = settling + (begun.elapsed().as_secs() + 1) * per_second;
    assert!(
        switches <= allowed,
        "{what}: {switches} switches while idle"
    );
}

#[test]
fn threads_with_nothing_to_do_sleep() {
    an_idle_disk();
    an_idle_store();
    an_idle_owner_and_its_clients();
}

/// All of them in this process: the activity of eight clients' threads and the owner's own.
fn an_idle_owner_and_its_clients() {
    let home = common::Home::with_store(256 * common::MIB);
    let attach = || Store::attach(&home.path, OpenOptions::default()).unwrap();
    let owner = attach();
    let clients: Vec<Store> = (0..8).map(|_| attach()).collect();
    let keys = common::chain(1, 200);
    common::Pool::new(&owner, "m", &[65536]).put(&keys);
    for store in clients.iter().chain([&owner]) {
        let pool = common::Pool::new(store, "m", &[65536]);
        assert_eq!(pool.hits(&keys), 200);
    }
    assert!(clients.iter().any(|client| client.stats().staged_pages > 0));
    // Clients do not wait until their releases after a get are processed.
    common::honest::eventually("the read pages are unpinned", || {
        owner.report().unwrap().reads_in_flight == 0
    });
    owner.flush().unwrap();
    owner.flush().unwrap();
    // Clients send their latencies after each change of the totals.
    common::honest::eventually("the latencies of all gets are in the totals", || {
        owner.report().unwrap().totals.latencies.get.count() == 9
    });
    let settling = SETTLING + 8 * SETTLING_OF_A_CLIENT;
    let per_second = LOOKS_PER_SECOND + 8 * BEATS_PER_SECOND;
    sleeps("an owner with eight clients", settling, per_second);
}

fn an_idle_store() {
    for disk in [Want::Auto, Want::Threads] {
        let home = common::Home::with_store(128 * common::MIB);
        let store = home.open_with(OpenOptions::default().with(|o| o.disk = disk));
        let pool = common::Pool::new(&store, "m", &[65536]);
        pool.put(&common::chain(1, 500));
        assert_eq!(pool.hits(&common::chain(1, 500)), 500);
        // The last sync of the interval is over. Segments sealed after it settle within the allowed
        // switches.
        store.flush().unwrap();
        store.flush().unwrap();
        sleeps(&format!("a store, {disk}"), SETTLING, 0);
    }
}

fn an_idle_disk() {
    for want in [Want::Auto, Want::Threads] {
        let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let files = vec![Some(Arc::new(OwnedFd::from(file)))];
        let disk = open_disk(
            DiskOptions {
                files,
                depth: 2,
                latencies: Arc::default(),
                pacing: Arc::default(),
                board: Arc::default(),
            },
            want,
        )
        .unwrap();
        let (sender, answers) = mpsc::channel();
        let sink = Arc::new(Mailbox(sender));
        for tag in 0..10 {
            let op = Op {
                volume: 0,
                action: Action::Sync,
                purpose: Purpose::Call,
                deadline: None,
                tag,
                sink: sink.clone(),
            };
            // SAFETY: a sync has no memory.
            unsafe { disk.submit(vec![op]) };
            assert_eq!(answers.recv().unwrap().result, Ok(()));
        }
        sleeps(&format!("a disk, {want}"), SETTLING, 0);
    }
}
