//! The remotes beneath a store end in a forked child, and where no thread can be started.
#![allow(clippy::unwrap_used)]

mod common;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::chain;
use common::member::{Home, Member, RUN_PAGES, eventually};
use larder_engine::{PageStore, report};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, alarm, fork};

const CHILDREN: usize = 20;

/// A member that has read the memory of puts, and would write it when it is closed.
fn owner(home: &Home) -> Member {
    let owner = home.member();
    owner.put(&chain(1, RUN_PAGES));
    eventually(|| {
        let beneath = report(&home.store).unwrap().beneath.unwrap();
        beneath.counts["listings"] > 0
    });
    owner
}

/// Closes the remotes in a forked child. Returns how the child ended.
fn close_in_child(owner: &Member) -> WaitStatus {
    // SAFETY: the child closes the remotes and ends by `_exit`. Allocation is allowed in a child
    // of a process with threads (glibc).
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            // A child that hangs ends by a signal.
            alarm::set(60);
            owner.l4.close();
            // SAFETY: nothing is left to do.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => waitpid(child, None).unwrap(),
    }
}

#[test]
fn a_forked_child_leaves_the_remotes_to_its_parent() {
    let home = Home::new();
    let owner = owner(&home);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        // Lookups hold the locks of the agent at the moment of a fork.
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                owner.store.longest_prefix(owner.id, &chain(2, RUN_PAGES));
            }
        });
        let is_bad =
            |end: &WaitStatus| !matches!(end, WaitStatus::Exited(_, 0)) || home.memory().exists();
        let bad = (0..CHILDREN).map(|_| close_in_child(&owner)).find(is_bad);
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(bad, None);
    });
    owner.close();
    assert!(home.memory().exists());
}

/// This thread can start no other from now on, as at the limit of threads.
fn forbid_threads() {
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let number = |call: libc::c_long| u32::try_from(call).unwrap();
    // Load the number of the system call; clone3 or clone fail, the others go on.
    let filter = [
        step(0x20, 0, 0, 0),
        step(0x15, 2, 0, number(libc::SYS_clone3)),
        step(0x15, 1, 0, number(libc::SYS_clone)),
        step(0x06, 0, 0, 0x7fff_0000),
        step(0x06, 0, 0, 0x0005_0000 | libc::EAGAIN.unsigned_abs()),
    ];
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).unwrap(),
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: plain numbers.
    let privileges = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(privileges, 0);
    // SAFETY: the program and its filter outlive the call, which copies them.
    let installed = unsafe { libc::prctl(libc::PR_SET_SECCOMP, 2, &raw const program) };
    assert_eq!(installed, 0, "{}", io::Error::last_os_error());
}

#[test]
fn the_remotes_are_closed_without_a_thread_more() {
    let home = Home::new();
    let owner = owner(&home);
    thread::scope(|scope| {
        scope.spawn(|| {
            forbid_threads();
            assert!(thread::Builder::new().spawn(|| {}).is_err());
            owner.l4.close();
        });
    });
    assert!(home.memory().exists());
    owner.close();
}
