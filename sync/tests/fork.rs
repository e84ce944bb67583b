//! A child of a process with waiting threads uses locks and condition variables of its own.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::thread;

use larder_sync::{Condvar, Mutex};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, alarm, fork};

const THREADS: usize = 32;
const ROUNDS: usize = 200;
const CHILDREN: usize = 5;

/// A gate that threads pass in order of their numbers.
#[derive(Default)]
struct Gate {
    turn: Mutex<usize>,
    changed: Condvar,
}

impl Gate {
    fn wait_for(&self, turn: usize) {
        let mut now = self.turn.lock();
        while *now < turn {
            self.changed.wait(&mut now);
        }
    }

    fn advance(&self) {
        *self.turn.lock() += 1;
        self.changed.notify_all();
    }
}

/// Threads that wait for each other in a ring, each at a gate of its own.
fn pass_round() {
    let gates: Vec<Gate> = (0..THREADS).map(|_| Gate::default()).collect();
    thread::scope(|scope| {
        for (at, gate) in gates.iter().enumerate() {
            let next = &gates[(at + 1) % THREADS];
            scope.spawn(move || {
                for round in 1..=ROUNDS {
                    gate.wait_for(round);
                    next.advance();
                }
            });
        }
        gates[0].advance();
    });
}

/// Plays the rounds in a forked child.
fn in_child() {
    // SAFETY: the child starts threads, waits for them, and ends by `_exit`. Allocation is allowed
    // in a child of a process with threads (glibc).
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            // A child that hangs ends by a signal.
            alarm::set(60);
            pass_round();
            // SAFETY: nothing is left to do.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));
        }
    }
}

#[test]
fn a_child_of_a_process_with_waiting_threads_waits_and_wakes() {
    let gates: Arc<Vec<Gate>> = Arc::new((0..THREADS).map(|_| Gate::default()).collect());
    let waiting: Vec<_> = (0..THREADS)
        .map(|at| {
            let gates = gates.clone();
            thread::spawn(move || {
                gates[at].wait_for(1);
                gates[at].wait_for(2);
            })
        })
        .collect();
    for gate in &*gates {
        gate.advance();
    }
    for _ in 0..CHILDREN {
        in_child();
    }
    for gate in &*gates {
        gate.advance();
    }
    for thread in waiting {
        thread.join().unwrap();
    }
}
