//! Sleeping on a word of memory that several processes map (`futex(2)`).

use std::io;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::thread::futex;

/// Sleeps while the word has this value, at most `patience`.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] after that; the kernel's. Success says nothing about the word.
pub fn wait(word: &AtomicU32, value: u32, patience: Duration) -> io::Result<()> {
    let left = rustix::thread::Timespec::try_from(patience);
    let left = left.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
    Ok(futex::wait(
        word,
        futex::Flags::empty(),
        value,
        Some(&left),
    )?)
}

/// Wakes all sleepers.
pub fn wake_all(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}
