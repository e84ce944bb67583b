//! What every test owes whoever reads its output: what it leaves out it says, what it waits for it does not wait for without end,
//! and nothing that it started outlives it.
#![allow(dead_code)]

use std::fmt::Display;
use std::io::Write;
use std::process::Child;
use std::time::{Duration, Instant};

/// How long anything is waited for: longer than a busy machine takes for it.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Says what is not tested here, and why. Past libtest, which shows what `eprintln!` prints of tests that fail alone, and in one
/// piece: `tests/run` gathers these lines.
pub fn skipped(what: &str, why: impl Display) {
    let line = format!("SKIPPED: {what}, {why}\n");
    let written = std::io::stderr().write_all(line.as_bytes());
    written.expect("standard error");
}

/// Asks again and again until it is so: another thread, or another process, is on its way there.
#[track_caller]
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    found(what, || is_so().then_some(()));
}

/// Looks again and again until it is there.
#[track_caller]
pub fn found<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "it never came to this: {what}");
        std::thread::yield_now();
    }
}

/// A process that ends with its test, whatever becomes of that.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
