//! Processes that fork with a store open, and whose children do not execute another program: the
//! child misses and holds nothing, the parent goes on.
//!
//! The processes are this same program, with their role in an environment variable: a process that
//! forks has no other tests' threads then.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::honest::{Process, eventually};
use common::{Home, MIB, Pool, chain};
use larder_engine::{
    GetStatus, Hint, MissReason, OpenOptions, PageStore, Part, PutOptions, PutStatus, Refusal,
    SharedReads, Store, StoreError, report,
};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, alarm, fork};

const ROLE: &str = "LARDER_TEST_FORK_ROLE";
const PAGES: usize = 5;

/// Limit for a child's calls that touch nothing.
const AT_ONCE: Duration = Duration::from_secs(5);

fn attach(path: &Path) -> Store {
    let mut options = OpenOptions::default();
    options.shared_reads = SharedReads::On;
    Store::attach(path, options).unwrap()
}

/// Ends the child with the result of `work`, and the parent goes on with it.
fn in_child(work: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child makes only the calls under test, which must support a forked child, and
    // ends by `_exit`.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            // A child that hangs ends by a signal.
            alarm::set(60);
            let code = work();
            // SAFETY: there is no other thread.
            unsafe { libc::_exit(code) }
        }
        ForkResult::Parent { child } => match waitpid(child, None).unwrap() {
            WaitStatus::Exited(_, code) => code,
            other => panic!("the child ended otherwise: {other:?}"),
        },
    }
}

/// Calls everything in a child. Returns the number of the first call with a wrong result.
fn calls(store: Box<dyn PageStore>, id: larder_engine::NamespaceId) -> i32 {
    let begun = Instant::now();
    let pool = Pool {
        store: &*store,
        id,
        model: "m".to_owned(),
        parts: vec![65536],
    };
    let keys = chain(1, PAGES);
    let wait = PutOptions::waiting(Duration::from_secs(60));
    let is_forked = |outcome: Result<(), StoreError>| matches!(outcome, Err(StoreError::Forked));
    let memory = larder_engine::AlignedBuf::zeroed(1 << 20).unwrap();
    let answers = [
        pool.get(&keys) == vec![GetStatus::Miss(MissReason::Closed); PAGES],
        pool.put_from(&keys, 0, wait) == vec![PutStatus::Refused(Refusal::Closed); PAGES],
        store.longest_prefix(id, &keys) == 0,
        store.contains(id, &keys) == vec![false; PAGES],
        is_forked(
            store
                .namespace(&common::namespace("other", &[4096]))
                .map(drop),
        ),
        is_forked(store.delete(id, &keys).map(drop)),
        is_forked(store.clear_namespace(id).map(drop)),
        is_forked(store.flush()),
        store.stats().pages == 0,
        store
            .register(larder_base::memory::leak(memory))
            .1
            .contains("before a fork"),
        is_forked(store.close()),
    ];
    store.touch(id, &keys, Hint::default());
    drop(store);
    let wrong = answers.iter().position(|is_right| !is_right);
    match wrong {
        Some(at) => i32::try_from(at).unwrap() + 1,
        None if begun.elapsed() > AT_ONCE => 100,
        None => 0,
    }
}

/// The parent's handle, which the child must not drop along with its own copy.
fn copy_of<T>(handle: &T) -> T {
    // SAFETY: for a child process alone: there the original is never used or dropped.
    unsafe { std::ptr::read(handle) }
}

/// A process that has a store open forks, and then goes on.
fn parent_goes_on(role: &str, path: &Path) {
    let other = (role == "client").then(|| attach(path));
    let keys = chain(1, PAGES);
    if role == "alone" {
        let store = Store::open(path, OpenOptions::default()).unwrap();
        let pool = Pool::new(&store, "m", &[65536]);
        assert_eq!(pool.put(&keys), vec![PutStatus::Stored; PAGES]);
        assert_eq!(in_child(|| calls(Box::new(copy_of(&store)), pool.id)), 0);
        assert_eq!(pool.hits(&keys), PAGES);
        assert_eq!(pool.put(&chain(2, PAGES)), vec![PutStatus::Stored; PAGES]);
        store.close().unwrap();
        return;
    }
    let store = attach(path);
    let pool = Pool::new(&store, "m", &[65536]);
    assert_eq!(pool.put(&keys), vec![PutStatus::Stored; PAGES]);
    assert_eq!(pool.hits(&keys), PAGES);
    assert_eq!(in_child(|| calls(Box::new(copy_of(&store)), pool.id)), 0);
    // A child may open the store anew, beside its parent.
    let anew = in_child(|| {
        let own = attach(path);
        let hits = Pool::new(&own, "m", &[65536]).hits(&keys);
        let is_client = own.part() == Part::Client;
        own.close().unwrap();
        i32::from(!(hits == PAGES && is_client))
    });
    assert_eq!(anew, 0);
    assert_eq!(pool.hits(&keys), PAGES);
    assert_eq!(pool.put(&chain(2, PAGES)), vec![PutStatus::Stored; PAGES]);
    store.close().unwrap();
    if let Some(other) = other {
        other.close().unwrap();
    }
}

/// A process with a store open forks, and waits to be killed. So does its child, which ends with
/// standard input.
fn parent_is_killed(path: &Path) {
    let store = attach(path);
    let pool = Pool::new(&store, "m", &[65536]);
    let seed = if store.part() == Part::Owner { 1 } else { 2 };
    assert_eq!(
        pool.put(&chain(seed, PAGES)),
        vec![PutStatus::Stored; PAGES]
    );
    // SAFETY: the child only reads.
    if let ForkResult::Parent { .. } = unsafe { fork() }.unwrap() {
        println!("forked");
    }
    let _ = std::io::stdin().read(&mut [0]);
    // SAFETY: nothing is left to do.
    unsafe { libc::_exit(0) };
}

/// Starts another process of this program in a role. In that process, plays the role and reports
/// it.
fn play(test: &str, role: &str, path: &Path) -> Option<Process> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env(ROLE, format!("{role},{}", path.display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    Some(Process(command.spawn().unwrap()))
}

/// The role of this process, if it has one.
fn role() -> Option<(String, std::path::PathBuf)> {
    let role = std::env::var(ROLE).ok()?;
    let (role, path) = role.split_once(',')?;
    Some((role.to_owned(), path.into()))
}

#[test]
fn in_a_child_every_call_misses_or_fails_at_once_and_the_parent_goes_on() {
    if let Some((role, path)) = role() {
        parent_goes_on(&role, &path);
        return;
    }
    let test = "in_a_child_every_call_misses_or_fails_at_once_and_the_parent_goes_on";
    for role in ["alone", "owner", "client"] {
        let home = Home::with_store(256 * MIB);
        let mut process = play(test, role, &home.path).unwrap();
        let ended = process.0.wait().unwrap();
        assert!(ended.success(), "{role}: {ended}");
        assert_eq!(home.open().stats().pages, 2 * PAGES as u64, "{role}");
    }
}

#[test]
fn a_child_keeps_neither_the_lock_nor_the_connections_of_a_parent_that_was_killed() {
    if let Some((_, path)) = role() {
        parent_is_killed(&path);
        return;
    }
    let test = "a_child_keeps_neither_the_lock_nor_the_connections_of_a_parent_that_was_killed";
    let home = Home::with_store(256 * MIB);
    let start = || {
        let mut process = play(test, "", &home.path).unwrap();
        let said = BufReader::new(process.0.stdout.take().unwrap()).lines();
        let mut said = said.map_while(Result::ok);
        assert!(said.any(|line| line == "forked"));
        // Kept from here on: its end would end the child.
        let stdin = process.0.stdin.take().unwrap();
        (process, stdin)
    };
    let (owner, _child_of_owner) = start();
    let (client, _child_of_client) = start();
    drop(client);
    eventually("the client's resources are released", || {
        let report_now = report(&home.path).unwrap();
        (report_now.clients, report_now.lingering) == (0, 0)
    });
    drop(owner);
    let next = attach(&home.path);
    assert_eq!(next.part(), Part::Owner);
    let pool = Pool::new(&next, "m", &[65536]);
    for seed in [1, 2] {
        assert_eq!(pool.hits(&chain(seed, PAGES)), PAGES);
    }
    next.close().unwrap();
}
