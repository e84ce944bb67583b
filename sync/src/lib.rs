//! Care for the program around a library: locks and condition variables that a forked child process
//! can use, and standard descriptors that stay the program's ([`descriptors`]).
//!
//! A child has the memory of its parent and none of the other threads. A lock without state
//! outside of itself stays usable there, unless another thread held it at the moment of the fork.
//! The locks of the standard library are such locks: a futex each. `parking_lot` is not used: its
//! waiting threads stand in one table of the process. In a child that table still leads to the
//! stacks of threads that are gone, where new threads run then.
//!
//! The difference to the standard library: a panic of a holder does not poison a lock. Data that a
//! panic may leave inconsistent is guarded where it is changed.
//!
//! | type | use |
//! |---|---|
//! | [`Mutex`], [`MutexGuard`] | one holder |
//! | [`Condvar`] | waits for a change of the value of a mutex |
//! | [`RwLock`] | many readers or one writer; new readers wait behind a waiting writer |

pub mod descriptors;

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{self, LockResult, PoisonError, TryLockError, TryLockResult};
use std::time::{Duration, Instant};

pub use std::sync::{RwLockReadGuard, RwLockWriteGuard, WaitTimeoutResult};

/// The guard, poisoned or not.
fn any<G>(outcome: LockResult<G>) -> G {
    outcome.unwrap_or_else(PoisonError::into_inner)
}

/// The guard, poisoned or not; `None` if a wait would be needed.
fn any_at_once<G>(outcome: TryLockResult<G>) -> Option<G> {
    match outcome {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// A mutual exclusion lock.
#[derive(Default)]
pub struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    /// A lock over a value.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(sync::Mutex::new(value))
    }

    /// The value.
    pub fn into_inner(self) -> T {
        any(self.0.into_inner())
    }

    /// The value, without locking.
    pub fn get_mut(&mut self) -> &mut T {
        any(self.0.get_mut())
    }

    /// Takes the lock. Waits for its holder.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.guard(any(self.0.lock()))
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        any_at_once(self.0.try_lock()).map(|guard| self.guard(guard))
    }

    fn guard<'a>(&'a self, guard: sync::MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        MutexGuard {
            mutex: self,
            held: Some(guard),
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A taken [`Mutex`].
#[must_use = "the lock is free again at once"]
pub struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    /// `None` only within [`MutexGuard::unlocked`] and the waits of a [`Condvar`], which borrow the
    /// guard meanwhile.
    held: Option<sync::MutexGuard<'a, T>>,
}

impl<T> MutexGuard<'_, T> {
    /// Runs `work` with the lock free.
    pub fn unlocked<R>(this: &mut Self, work: impl FnOnce() -> R) -> R {
        this.held = None;
        let result = work();
        this.held = Some(any(this.mutex.0.lock()));
        result
    }
}

const HELD: &str = "a borrowed guard is not used";

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.held.as_deref().expect(HELD)
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.held.as_deref_mut().expect(HELD)
    }
}

impl<T: fmt::Debug> fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// A condition variable. As everywhere, the condition changes only under the mutex of the waiting
/// threads.
#[derive(Debug, Default)]
pub struct Condvar {
    condition: sync::Condvar,
    /// Waiting threads. A notification of none saves a system call. A thread enters itself under
    /// the mutex, so a change of the condition that it has not seen is followed by a notification
    /// that sees it.
    waiting: AtomicUsize,
}

impl Condvar {
    /// A condition that no thread waits for.
    #[must_use]
    pub const fn new() -> Condvar {
        Condvar {
            condition: sync::Condvar::new(),
            waiting: AtomicUsize::new(0),
        }
    }

    /// Waits for a notification, with the lock free meanwhile. May return without one.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let held = guard.held.take().expect(HELD);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        guard.held = Some(any(self.condition.wait(held)));
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// The same, for a time at most.
    pub fn wait_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        patience: Duration,
    ) -> WaitTimeoutResult {
        let held = guard.held.take().expect(HELD);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let (held, result) = any(self.condition.wait_timeout(held, patience));
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard.held = Some(held);
        result
    }

    /// The same, until a moment at most.
    pub fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        until: Instant,
    ) -> WaitTimeoutResult {
        self.wait_for(guard, until.saturating_duration_since(Instant::now()))
    }

    /// Wakes one waiting thread, if there is one.
    pub fn notify_one(&self) {
        if self.has_waiting() {
            self.condition.notify_one();
        }
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        if self.has_waiting() {
            self.condition.notify_all();
        }
    }

    fn has_waiting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }
}

/// A lock for many readers or one writer.
#[derive(Default)]
pub struct RwLock<T>(sync::RwLock<T>);

impl<T> RwLock<T> {
    /// A lock over a value.
    pub const fn new(value: T) -> RwLock<T> {
        RwLock(sync::RwLock::new(value))
    }

    /// The value.
    pub fn into_inner(self) -> T {
        any(self.0.into_inner())
    }

    /// The value, without locking.
    pub fn get_mut(&mut self) -> &mut T {
        any(self.0.get_mut())
    }

    /// Takes the lock as a reader. A thread that has it as a reader already may wait for ever,
    /// behind a writer.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        any(self.0.read())
    }

    /// Takes the lock as a reader if no writer has it or waits for it.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        any_at_once(self.0.try_read())
    }

    /// Takes the lock as the writer.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        any(self.0.write())
    }

    /// Takes the lock as the writer if it is free.
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        any_at_once(self.0.try_write())
    }
}

impl<T: fmt::Debug> fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
