//! Sleeping on a word of shared memory, with the interface of the engine's `system::words`.
//!
//! A word may be mapped at several addresses. So a sleeper looks again after a moment, as if it had
//! been woken for nothing, and needs no queue.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::task;

/// Longest time between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Sleeps for a moment while the word has this value, at most `patience`.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] after that. Success says nothing about the word.
pub fn wait(word: &AtomicU32, value: u32, patience: Duration) -> io::Result<()> {
    if word.load(Ordering::Acquire) != value {
        return Ok(());
    }
    task::sleep(patience.min(LOOK_AGAIN));
    if patience <= LOOK_AGAIN {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(())
}

/// Wakes all sleepers: they look again by themselves.
pub fn wake_all(_word: &AtomicU32) {}
