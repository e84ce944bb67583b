//! Taking turns with other processes, call by call.
//!
//! On a machine whose speed changes from second to second, two runs one after the other cannot be
//! compared. Processes that take turns see the same state of the machine. A process that is ready
//! for a call prints a line of JSON on standard output. It continues when it reads a line of
//! standard input, or when standard input is closed.

use std::io::{self, BufRead, Write};
use std::time::Duration;

use serde::Serialize;

/// The message of a process that is ready.
#[derive(Serialize)]
struct Turn {
    /// Number of its calls so far.
    calls: usize,
    /// Duration of the last call.
    last_us: Option<f64>,
}

/// Waits for the turn of a process that has made these calls.
pub fn wait(calls: &[Duration]) {
    // If no process gives turns, there is nothing to wait for.
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
