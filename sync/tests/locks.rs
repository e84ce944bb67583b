//! Promises of the locks beyond those of the standard library.
#![allow(clippy::unwrap_used)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use larder_sync::{Condvar, Mutex, MutexGuard, RwLock};

/// Calls `work`, which panics.
fn panics(work: impl FnOnce()) {
    assert!(catch_unwind(AssertUnwindSafe(work)).is_err());
}

#[test]
fn a_panic_of_a_holder_leaves_the_lock_usable() {
    let mut mutex = Mutex::new(1);
    panics(|| {
        let mut held = mutex.lock();
        *held = 2;
        panic!("with the mutex");
    });
    assert_eq!(*mutex.lock(), 2);
    assert_eq!(mutex.try_lock().as_deref(), Some(&2));
    assert_eq!(*mutex.get_mut(), 2);
    assert_eq!(mutex.into_inner(), 2);

    let mut lock = RwLock::new(1);
    panics(|| {
        let mut held = lock.write();
        *held = 2;
        panic!("with the lock");
    });
    assert_eq!(*lock.read(), 2);
    assert_eq!(lock.try_read().as_deref(), Some(&2));
    assert_eq!(*lock.write(), 2);
    assert_eq!(lock.try_write().as_deref(), Some(&2));
    assert_eq!(*lock.get_mut(), 2);
    assert_eq!(lock.into_inner(), 2);
}

#[test]
fn a_guard_gives_the_lock_up_for_a_call_and_has_it_again() {
    let mutex = Mutex::new(1);
    let mut held = mutex.lock();
    assert!(mutex.try_lock().is_none());
    MutexGuard::unlocked(&mut held, || *mutex.try_lock().unwrap() = 2);
    assert_eq!(*held, 2);
    assert!(mutex.try_lock().is_none());

    panics(|| MutexGuard::unlocked(&mut held, || panic!("without the lock")));
    assert!(mutex.try_lock().is_some());
}

#[test]
fn a_wait_ends_at_its_moment_with_the_lock() {
    let (mutex, changed) = (Mutex::new(1), Condvar::new());
    let mut held = mutex.lock();
    let begun = Instant::now();
    let past = changed.wait_until(&mut held, begun);
    assert!(past.timed_out());
    let pause = Duration::from_millis(20);
    while !changed.wait_for(&mut held, pause).timed_out() {}
    assert!(begun.elapsed() >= pause);
    assert_eq!((*held, mutex.try_lock().is_none()), (1, true));
}

#[test]
fn the_last_guard_frees_a_lock_for_the_other_kind() {
    let lock = RwLock::new(1);
    let first = lock.read();
    let second = lock.try_read();
    assert!(second.is_some() && lock.try_write().is_none());
    drop((first, second));
    let writer = lock.write();
    assert!(lock.try_read().is_none() && lock.try_write().is_none());
    drop(writer);
    assert!(lock.try_read().is_some());
}
