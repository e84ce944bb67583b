//! Rules for all tests: a test reports each part that it skips, its waits have a limit, and its
//! processes end with it.
#![allow(dead_code)]

use std::fmt::Display;
use std::io::Write;
use std::process::Child;
use std::time::{Duration, Instant};

/// Limit of each wait: more than a busy machine needs.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Reports a skipped part of a test, and the reason. It does not use `eprintln!`, because libtest
/// shows that output of failed tests only. The line is written in one piece, for `tests/run`.
pub fn skipped(what: &str, why: impl Display) {
    let line = format!("SKIPPED: {what}, {why}\n");
    let written = std::io::stderr().write_all(line.as_bytes());
    written.expect("standard error");
}

/// Waits until a condition holds that another thread or process brings about.
#[track_caller]
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    found(what, || is_so().then_some(()));
}

/// Most of the time of one look that counts. A halt of the machine for minutes is no wait.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// Waits until `look` finds a value.
#[track_caller]
pub fn found<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let mut waited = Duration::ZERO;
    loop {
        let begun = Instant::now();
        if let Some(found) = look() {
            return found;
        }
        assert!(waited < PATIENCE, "it never came to this: {what}");
        std::thread::yield_now();
        waited += begun.elapsed().min(LOOK_MAX);
    }
}

/// A process that ends with its test, also when the test fails.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
