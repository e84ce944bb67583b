//! Threads, locks and time under a deterministic scheduler: the runtime that the simulation puts in
//! place of the operating system's. Code that blocks runs on it unchanged.
//!
//! A *task* is a thread of the simulation: a coroutine with a stack of its own. All tasks of a
//! [`World`] run on one thread of the operating system, one at a time. A task runs until it waits,
//! or until it takes a lock and the seed gives another task the turn. The seed chooses the next
//! task. The clock is virtual: it jumps to the next timer when no task can run. The same seed
//! gives the same run.
//!
//! A [`Process`] is a group of tasks. It can be killed and stopped at each point where a task of
//! it waits. Nothing of a killed task runs again, destructors included: only the end of the run
//! frees the memory that it holds ([`heap`]).
//!
//! A module imports only those below it:
//!
//! | module | content |
//! |---|---|
//! | [`machine`] | the simulated machine: its faults, and the end of processes |
//! | [`files`] | files and their locks, with the interface of the engine's `system` |
//! | [`sidecar`] | small files beside a store, likewise |
//! | [`sockets`] | Unix sockets, likewise |
//! | [`processes`], [`words`], [`fork`] | pids, waits on shared memory, forked handles, likewise |
//! | `transfers` | reads, writes and syncs of files, from their begin to their end |
//! | `kernel` | the state of a machine, and the draws of its faults |
//! | `connections` | the connections of a machine, and its listening sockets |
//! | `volumes` | the volumes under the files, and the transfers in flight |
//! | [`medium`] | the device under a volume |
//! | [`dice`] | randomness |
//! | [`sync`] | locks and condition variables, with the interface of `larder_sync` |
//! | [`thread`] | threads, with the interface of `std::thread` |
//! | [`heap`] | the memory of a run |
//! | [`task`] | the scheduler: worlds, processes, tasks, queues of waiting tasks |
//! | [`time`] | the virtual clock, with the interface of `std::time` |
//!
//! Outside a world the locks work as long as nothing has to wait, and the clock stands still.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a failed expectation is a test result"
)]

mod connections;
pub mod dice;
pub mod files;
pub mod fork;
pub mod heap;
mod kernel;
pub mod machine;
pub mod medium;
pub mod processes;
pub mod sidecar;
pub mod sockets;
pub mod sync;
pub mod task;
pub mod thread;
pub mod time;
mod transfers;
mod volumes;
pub mod words;

pub use kernel::{Event, Odds, note};
pub use machine::Machine;
pub use task::{Process, Queue, Setup, Step, World};
