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
//! it waits. Nothing of a killed task runs again, destructors included: the memory that it holds
//! is never freed.
//!
//! | module | content |
//! |---|---|
//! | [`task`] | the scheduler: worlds, processes, tasks, queues of waiting tasks |
//! | [`sync`] | locks and condition variables, with the interface of `parking_lot` |
//! | [`thread`] | threads, with the interface of `std::thread` |
//! | [`time`] | the virtual clock, with the interface of `std::time` |
//!
//! Outside a world the locks work as long as nothing has to wait, and the clock stands still.

pub mod sync;
pub mod task;
pub mod thread;
pub mod time;

pub use task::{Process, Queue, Setup, Step, World};
