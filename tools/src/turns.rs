//! Taking turns with other processes, call by call.
//!
//! A machine whose speed changes from second to second tells little of two runs, one after the other. Processes that take turns
//! find it in the same state. Whoever is ready for a call says so with a line of JSON on standard output, and goes on when it
//! reads a line of standard input, or when nobody gives turns any more.

use std::io::{self, BufRead, Write};
use std::time::Duration;

use serde::Serialize;

/// Says that a process is ready.
#[derive(Serialize)]
struct Turn {
    /// Calls that it has made.
    calls: usize,
    /// What the last of them took.
    last_us: Option<f64>,
}

/// Waits for the turn of a process that has made these calls.
pub fn wait(calls: &[Duration]) {
    // Without anybody who gives turns there is nothing to wait for.
    let _ = say(calls).and_then(|()| io::stdin().lock().read_line(&mut String::new()));
}

fn say(calls: &[Duration]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let turn = Turn {
        calls: calls.len(),
        last_us: calls.last().map(|wall| wall.as_secs_f64() * 1e6),
    };
    serde_json::to_writer(&mut out, &turn)?;
    out.write_all(b"\n")?;
    out.flush()
}
