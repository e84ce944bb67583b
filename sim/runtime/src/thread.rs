//! Threads, with the interface of `std::thread`. A thread is a task of the process of its creator.
//!
//! A panic of a task ends the world ([`crate::World::step`] passes it on), so a join never returns
//! one.

use std::any::Any;
use std::io;
use std::sync::Arc;
pub use std::thread::panicking;
use std::time::Duration;

use larder_sync::Mutex;

use crate::task::{self, Process, Queue, World};

/// The result of a thread: never an error.
pub type Result<T> = std::result::Result<T, Box<dyn Any + Send + 'static>>;

/// The properties of a new thread.
#[derive(Debug, Default)]
pub struct Builder {
    name: Option<String>,
}

impl Builder {
    /// A thread without a name.
    #[must_use]
    pub fn new() -> Builder {
        Builder::default()
    }

    /// Names the thread.
    #[must_use]
    pub fn name(mut self, name: String) -> Builder {
        self.name = Some(name);
        self
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// None: the signature is that of `std`.
    ///
    /// # Panics
    /// Outside a task.
    pub fn spawn<T: Send + 'static>(
        self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let process = Process::current().expect("a thread that no task starts");
        let name = self.name.unwrap_or_else(|| "a thread".to_owned());
        Ok(spawn_in(process, name, f))
    }
}

/// Starts a thread.
///
/// # Panics
/// Outside a task.
pub fn spawn<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    let spawned = Builder::new().spawn(f);
    spawned.expect("the start of a thread never fails")
}

/// Identifies a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ThreadId(u32);

/// A thread.
#[derive(Clone, Copy, Debug)]
pub struct Thread(ThreadId);

impl Thread {
    /// Its identity.
    #[must_use]
    pub fn id(&self) -> ThreadId {
        self.0
    }
}

/// The thread that calls.
///
/// # Panics
/// Outside a task.
#[must_use]
pub fn current() -> Thread {
    Thread(ThreadId(task::current()))
}

/// The outcome of a thread, and the tasks that wait for it.
struct Packet<T> {
    ended: Queue,
    outcome: Mutex<Outcome<T>>,
}

enum Outcome<T> {
    Running,
    Ended(T),
    Taken,
}

impl World {
    /// Starts a task.
    pub fn spawn<T: 'static>(
        &self,
        process: Process,
        name: &str,
        f: impl FnOnce() -> T + 'static,
    ) -> JoinHandle<T> {
        spawn_in(process, name.to_owned(), f)
    }
}

/// Starts a task in a process.
fn spawn_in<T: 'static>(
    process: Process,
    name: String,
    f: impl FnOnce() -> T + 'static,
) -> JoinHandle<T> {
    let packet = Arc::new(Packet {
        ended: Queue::new(),
        outcome: Mutex::new(Outcome::Running),
    });
    let own = packet.clone();
    let task = task::start(process, name, move || {
        let value = f();
        *own.outcome.lock() = Outcome::Ended(value);
        own.ended.wake_all();
    });
    JoinHandle {
        packet,
        thread: Thread(ThreadId(task)),
    }
}

/// The right to wait for the end of a thread.
pub struct JoinHandle<T> {
    packet: Arc<Packet<T>>,
    thread: Thread,
}

impl<T> std::fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JoinHandle { .. }")
    }
}

impl<T> JoinHandle<T> {
    /// The thread.
    #[must_use]
    pub fn thread(&self) -> &Thread {
        &self.thread
    }

    /// Waits for the end of the thread.
    ///
    /// # Errors
    /// None: a panic of a thread ends the world.
    #[track_caller]
    pub fn join(self) -> Result<T> {
        loop {
            if let Some(value) = self.take() {
                return Ok(value);
            }
            self.packet.ended.wait("the end of a thread", None);
        }
    }

    /// The result, if the thread has ended.
    #[must_use]
    pub fn take(&self) -> Option<T> {
        let mut outcome = self.packet.outcome.lock();
        if let Outcome::Running = *outcome {
            return None;
        }
        match std::mem::replace(&mut *outcome, Outcome::Taken) {
            Outcome::Ended(value) => Some(value),
            Outcome::Running | Outcome::Taken => None,
        }
    }

    /// Whether the thread has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        !matches!(*self.packet.outcome.lock(), Outcome::Running)
    }
}

/// Waits for a time of the virtual clock.
#[track_caller]
pub fn sleep(duration: Duration) {
    task::sleep(duration);
}

/// Gives another task the turn.
pub fn yield_now() {
    task::yield_now();
}
