//! Locks and condition variables, with the interface of `parking_lot`. Each lock is one of
//! `parking_lot`, taken without waiting; a task that does not get it waits in the scheduler. To
//! take a lock may give another task the turn.
//!
//! A `RwLock` gives waiting writers the preference, as that of `parking_lot` does.

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
    lock: parking_lot::Mutex<T>,
}

impl<T> Mutex<T> {
    /// A lock over a value.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex {
            freed: Queue::new(),
            lock: parking_lot::Mutex::new(value),
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
        self.lock.is_locked()
    }

    fn guard<'a>(&'a self, guard: parking_lot::MutexGuard<'a, T>) -> MutexGuard<'a, T> {
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
    guard: parking_lot::MutexGuard<'a, T>,
    #[expect(dead_code, reason = "for its drop")]
    freed: WakeOne<'a>,
    mutex: &'a Mutex<T>,
}

impl<T> MutexGuard<'_, T> {
    /// Frees the lock, and gives a waiting task the turn.
    pub fn unlock_fair(s: Self) {
        drop(s);
        task::yield_now();
    }

    /// Frees the lock while `f` runs.
    #[track_caller]
    pub fn unlocked<U>(s: &mut Self, f: impl FnOnce() -> U) -> U {
        let mutex = s.mutex;
        parking_lot::MutexGuard::unlocked(&mut s.guard, || {
            mutex.freed.wake_one();
            let result = f();
            // `parking_lot` takes the lock again. No other task runs in between.
            while mutex.lock.is_locked() {
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
    /// Guards of readers.
    readers: AtomicUsize,
    /// Writers that wait. New readers wait behind them.
    writers: AtomicUsize,
    lock: parking_lot::RwLock<T>,
}

impl<T> RwLock<T> {
    /// A lock over a value.
    pub const fn new(value: T) -> RwLock<T> {
        RwLock {
            freed: Queue::new(),
            readers: AtomicUsize::new(0),
            writers: AtomicUsize::new(0),
            lock: parking_lot::RwLock::new(value),
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
        self.readers.fetch_add(1, Ordering::Relaxed);
        Some(RwLockReadGuard {
            guard,
            left: Left(self, true),
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

    /// Waits as a writer until `take` succeeds.
    #[track_caller]
    fn wait_as_writer<G>(&self, take: impl Fn() -> Option<G>) -> G {
        loop {
            if let Some(guard) = take() {
                return guard;
            }
            self.writers.fetch_add(1, Ordering::Relaxed);
            self.freed.wait("a lock, to write", None);
            self.writers.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Takes the lock as the writer.
    #[track_caller]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        task::pass();
        let guard = self.wait_as_writer(|| self.lock.try_write());
        RwLockWriteGuard {
            guard,
            left: Left(self, false),
        }
    }

    /// Takes the lock as the writer, if that needs no wait.
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        task::pass();
        let guard = self.lock.try_write()?;
        Some(RwLockWriteGuard {
            guard,
            left: Left(self, false),
        })
    }

    /// Takes the lock as the one reader that may become the writer.
    #[track_caller]
    pub fn upgradable_read(&self) -> RwLockUpgradableReadGuard<'_, T> {
        task::pass();
        loop {
            if let Some(guard) = self.lock.try_upgradable_read() {
                return RwLockUpgradableReadGuard {
                    guard,
                    left: Left(self, false),
                };
            }
            self.freed.wait("a lock, to read and then write", None);
        }
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

/// The end of a guard, by a reader (`true`) or not: dropped after the lock is free.
struct Left<'a, T>(&'a RwLock<T>, bool);

impl<T> Drop for Left<'_, T> {
    fn drop(&mut self) {
        if self.1 {
            self.0.readers.fetch_sub(1, Ordering::Relaxed);
        }
        self.0.freed.wake_all();
    }
}

/// A [`RwLock`] taken by a reader.
#[must_use]
pub struct RwLockReadGuard<'a, T> {
    guard: parking_lot::RwLockReadGuard<'a, T>,
    #[expect(dead_code, reason = "for its drop")]
    left: Left<'a, T>,
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
    guard: parking_lot::RwLockWriteGuard<'a, T>,
    #[expect(dead_code, reason = "for its drop")]
    left: Left<'a, T>,
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

/// A [`RwLock`] taken by the reader that may become the writer.
#[must_use]
pub struct RwLockUpgradableReadGuard<'a, T> {
    guard: parking_lot::RwLockUpgradableReadGuard<'a, T>,
    left: Left<'a, T>,
}

impl<T> RwLockUpgradableReadGuard<'_, T> {
    /// Writes: waits until the readers have left.
    #[track_caller]
    pub fn with_upgraded<R>(&mut self, f: impl FnOnce(&mut T) -> R) -> R {
        let lock = self.left.0;
        lock.wait_as_writer(|| (lock.readers.load(Ordering::Relaxed) == 0).then_some(()));
        // `parking_lot` waits for readers. There are none, and no other task runs in between.
        self.guard.with_upgraded(f)
    }
}

impl<T> Deref for RwLockUpgradableReadGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
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
