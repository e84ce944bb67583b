//! Processes, with the interface of the engine's `system::processes`.

use std::io;

use crate::kernel::with_if_there;
use crate::task::{self, Process};
use crate::time::{Clocks, Instant};

/// The user of all processes.
pub(crate) const USER: u32 = 1000;

/// The group of all processes.
pub(crate) const GROUP: u32 = 1000;

/// Pids begin above this number.
const FIRST_PID: u32 = 100;

/// The pid of a process.
pub(crate) fn id_of(process: Process) -> u32 {
    FIRST_PID + process.id()
}

/// The pid of this process. The driver has the first one.
#[must_use]
pub fn id() -> u32 {
    Process::current().map_or(FIRST_PID, id_of)
}

/// Seconds since 1970 by the time of day: on the virtual clock, which begins in 1970, as far as the
/// machine's time of day is not set to another time.
#[must_use]
pub fn unix_seconds() -> f64 {
    let seconds = std::time::Duration::from_nanos(Instant::now().0).as_secs_f64();
    (seconds + Clocks::get().ahead_ms as f64 / 1e3).max(0.0)
}

/// Milliseconds on the virtual clock, and of the machine's sleep.
#[must_use]
pub fn boottime_ms() -> u64 {
    Instant::now().0 / 1_000_000 + Clocks::get().asleep_ms
}

/// Whether a time service keeps the time of day right.
#[must_use]
pub fn is_clock_synchronised() -> bool {
    Clocks::get().is_synchronised
}

/// The same in milliseconds.
#[must_use]
pub fn unix_ms() -> u64 {
    (unix_seconds() * 1e3) as u64
}

/// Nanoseconds on the virtual clock, which all processes share.
#[must_use]
pub fn monotonic_nanoseconds() -> u64 {
    Instant::now().0
}

/// A thread of this process cannot go on. Its panic ends the world.
pub fn abort() {}

/// Whether a process exists.
#[must_use]
pub fn exists(pid: u32) -> bool {
    task::processes()
        .find(|process| id_of(*process) == pid)
        .is_some_and(Process::is_alive)
}

/// The name of the program of a process: not shown.
#[must_use]
pub fn command(_pid: u32) -> Option<String> {
    None
}

/// Whether a process is stopped: not shown.
#[must_use]
pub fn is_stopped(_pid: u32) -> Option<bool> {
    None
}

/// The scope of pids: the same for all processes.
#[must_use]
pub fn pid_scope() -> Option<[u8; 16]> {
    Some([7; 16])
}

/// The user of this process.
#[must_use]
pub fn user() -> u32 {
    USER
}

/// The groups of this process.
#[must_use]
pub fn groups() -> Vec<u32> {
    vec![GROUP]
}

/// The two kinds of ids.
#[derive(Clone, Copy, Debug)]
pub enum IdKind {
    /// Users.
    User,
    /// Groups.
    Group,
}

/// The map of ids: every id stands for itself.
#[must_use]
pub fn id_map(_kind: IdKind) -> (Option<String>, Option<u32>) {
    (None, None)
}

/// Resident memory of this process: unknown.
#[must_use]
pub fn resident_bytes() -> u64 {
    0
}

/// Fills memory with bytes that the seed chooses.
///
/// # Errors
/// None.
pub fn fill_random(bytes: &mut [u8]) -> io::Result<()> {
    with_if_there(|kernel| {
        for byte in bytes {
            *byte = kernel.dice.below(256) as u8;
        }
    });
    Ok(())
}
