//! A forked child has memory for objects, whatever the threads of its parent did at the fork.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use larder_remote::Buffer;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, alarm, fork};

const CHILDREN: usize = 50;

/// Takes memory and gives it back.
fn use_memory() {
    drop(Buffer::copy_of(b"an object").unwrap());
}

/// Uses memory in a forked child. Returns how the child ended.
fn in_child() -> WaitStatus {
    // SAFETY: the child uses memory and ends by `_exit`. Allocation is allowed in a child of a
    // process with threads (glibc).
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            // A child that hangs ends by a signal.
            alarm::set(60);
            use_memory();
            // SAFETY: nothing is left to do.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => waitpid(child, None).unwrap(),
    }
}

#[test]
fn a_child_has_memory_while_its_parent_uses_its_own() {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    use_memory();
                }
            });
        }
        let has_failed = |end: &WaitStatus| !matches!(end, WaitStatus::Exited(_, 0));
        let failed = (0..CHILDREN).map(|_| in_child()).find(has_failed);
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(failed, None);
    });
}
