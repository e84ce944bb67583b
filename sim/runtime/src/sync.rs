//! Locks and condition variables, with the interface of `larder_sync`. Each lock is one of
//! `larder_sync`, taken without waiting; a task that does not get it waits in the scheduler. To
//! take a lock may give another task the turn.
//!
//! A `RwLock` gives waiting writers the preference, as that of `larder_sync` does.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::task::{self, Queue};
use crate::time::Instant;

/// A mutual exclusion lock.
// The queue comes first, so that a lock inside the value has another address.
#[repr(C)]
pub struct Mutex<T> {
    freed: Queue,
    lock: larder_sync::Mutex<T>,
}

impl<T> Mutex<T> {
    /// A lock over a value.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex {
            freed: Queue::new(),
            lock: larder_sync::Mutex::new(value),
        }
    }

    /// The value.
    pub fn into_inner(self) -> T {
        self.lock.into_inner()
    }

    /// The value, without locking.
    pub fn get_mut(&mut self) -> &mut T {
        self.lock.get_mut()
    }

    /// Takes the lock.
    #[track_caller]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        task::pass();
        loop {
            if let Some(guard) = self.lock.try_lock() {
                return self.guard(guard);
            }
            self.freed.wait("a mutex", None);
        }
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        task::pass();
        self.lock.try_lock().map(|guard| self.guard(guard))
    }

    /// Whether the lock is taken.
    pub fn is_locked(&self) -> bool {
        self.lock.try_lock().is_none()
    }

    fn guard<'a>(&'a self, guard: larder_sync::MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        MutexGuard {
            guard,
            freed: WakeOne(&self.freed),
            mutex: self,
        }
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Mutex<T> {
        Mutex::new(T::default())
    }
}

impl<T: fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

/// Wakes a task that waits for a lock: dropped after the lock is free.
struct WakeOne<'a>(&'a Queue);

impl Drop for WakeOne<'_> {
    fn drop(&mut self) {
        self.0.wake_one();
    }
}

/// A taken [`Mutex`].
#[must_use]
pub struct MutexGuard<'a, T> {
    // Dropped in this order.
    guard: larder_sync::MutexGuard<'a, T>,
    #[expect(dead_code, reason = "for its drop")]
    freed: WakeOne<'a>,
    mutex: &'a Mutex<T>,
}

impl<T> MutexGuard<'_, T> {
    /// Frees the lock while `f` runs.
    #[track_caller]
    pub fn unlocked<U>(s: &mut Self, f: impl FnOnce() -> U) -> U {
        let mutex = s.mutex;
        larder_sync::MutexGuard::unlocked(&mut s.guard, || {
            mutex.freed.wake_one();
            let result = f();
            // The inner guard takes the lock again. No other task runs in between.
            while mutex.is_locked() {
                mutex.freed.wait("a mutex", None);
            }
            result
        })
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T: fmt::Debug> fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.guard.fmt(f)
    }
}

/// The outcome of a wait with a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Whether the time was over before a notification.
    #[must_use]
    pub fn timed_out(self) -> bool {
        self.0
    }
}

/// A condition variable.
#[derive(Debug, Default)]
pub struct Condvar(Queue);

impl Condvar {
    /// A condition that no task waits for.
    #[must_use]
    pub const fn new() -> Condvar {
        Condvar(Queue::new())
    }

    /// Waits for a notification, with the lock free meanwhile.
    #[track_caller]
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.wait_inner(guard, None);
    }

    /// The same, until a moment.
    #[track_caller]
    pub fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        until: Instant,
    ) -> WaitTimeoutResult {
        self.wait_inner(guard, Some(until))
    }

    /// The same, for a time.
    #[track_caller]
    pub fn wait_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        patience: Duration,
    ) -> WaitTimeoutResult {
        self.wait_inner(guard, Instant::now().checked_add(patience))
    }

    #[track_caller]
    fn wait_inner<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        until: Option<Instant>,
    ) -> WaitTimeoutResult {
        let woken = MutexGuard::unlocked(guard, || self.0.wait("a notification", until));
        WaitTimeoutResult(!woken)
    }

    /// Wakes one waiting task. Returns whether there was one.
    pub fn notify_one(&self) -> bool {
        self.0.wake_one()
    }

    /// Wakes all waiting tasks. Returns their number.
    pub fn notify_all(&self) -> usize {
        self.0.wake_all()
    }
}

/// A lock for many readers or one writer.
#[repr(C)]
pub struct RwLock<T> {
    freed: Queue,
    /// Writers that wait. New readers wait behind them.
    writers: AtomicUsize,
    lock: larder_sync::RwLock<T>,
}

impl<T> RwLock<T> {
    /// A lock over a value.
    pub const fn new(value: T) -> RwLock<T> {
        RwLock {
            freed: Queue::new(),
            writers: AtomicUsize::new(0),
            lock: larder_sync::RwLock::new(value),
        }
    }

    /// The value.
    pub fn into_inner(self) -> T {
        self.lock.into_inner()
    }

    /// The value, without locking.
    pub fn get_mut(&mut self) -> &mut T {
        self.lock.get_mut()
    }

    fn has_writers(&self) -> bool {
        self.writers.load(Ordering::Relaxed) > 0
    }

    fn read_now(&self) -> Option<RwLockReadGuard<'_, T>> {
        let guard = self.lock.try_read()?;
        Some(RwLockReadGuard {
            guard,
            freed: WakeAll(&self.freed),
        })
    }

    /// Takes the lock as a reader.
    #[track_caller]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        task::pass();
        loop {
            if !self.has_writers()
                && let Some(guard) = self.read_now()
            {
                return guard;
            }
            self.freed.wait("a lock, to read", None);
        }
    }

    /// Takes the lock as a reader, if that needs no wait.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        task::pass();
        if self.has_writers() {
            return None;
        }
        self.read_now()
    }

    /// Takes the lock as the writer.
    #[track_caller]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        task::pass();
        loop {
            if let Some(guard) = self.write_now() {
                return guard;
            }
            self.writers.fetch_add(1, Ordering::Relaxed);
            self.freed.wait("a lock, to write", None);
            self.writers.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Takes the lock as the writer, if that needs no wait.
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        task::pass();
        self.write_now()
    }

    fn write_now(&self) -> Option<RwLockWriteGuard<'_, T>> {
        let guard = self.lock.try_write()?;
        Some(RwLockWriteGuard {
            guard,
            freed: WakeAll(&self.freed),
        })
    }
}

impl<T: Default> Default for RwLock<T> {
    fn default() -> RwLock<T> {
        RwLock::new(T::default())
    }
}

impl<T: fmt::Debug> fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

/// Wakes all tasks that wait for a lock: dropped after the lock is free.
struct WakeAll<'a>(&'a Queue);

impl Drop for WakeAll<'_> {
    fn drop(&mut self) {
        self.0.wake_all();
    }
}

/// A [`RwLock`] taken by a reader.
#[must_use]
pub struct RwLockReadGuard<'a, T> {
    guard: larder_sync::RwLockReadGuard<'a, T>,
    #[expect(dead_code, reason = "for its drop")]
    freed: WakeAll<'a>,
}

impl<T> Deref for RwLockReadGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

/// A [`RwLock`] taken by the writer.
#[must_use]
pub struct RwLockWriteGuard<'a, T> {
    guard: larder_sync::RwLockWriteGuard<'a, T>,
    #[expect(dead_code, reason = "for its drop")]
    freed: WakeAll<'a>,
}

impl<T> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for RwLockWriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// A value that is made once, with the interface of `std::sync::OnceLock`. The function that makes
/// it may wait.
#[derive(Default)]
pub struct OnceLock<T> {
    making: Mutex<()>,
    value: std::sync::OnceLock<T>,
}

impl<T> OnceLock<T> {
    /// Without a value.
    pub const fn new() -> OnceLock<T> {
        OnceLock {
            making: Mutex::new(()),
            value: std::sync::OnceLock::new(),
        }
    }

    /// The value, if it has been made.
    pub fn get(&self) -> Option<&T> {
        self.value.get()
    }

    /// The value. The first caller makes it, others wait.
    ///
    /// # Panics
    /// With `make`.
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        if self.value.get().is_none() {
            let _making = self.making.lock();
            if self.value.get().is_none() {
                let value = make();
                return self.value.get_or_init(|| value);
            }
        }
        self.value
            .get()
            .expect("made above, and a value never leaves")
    }
}
