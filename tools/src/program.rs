//! The running program: the way to start it again, and its messages on stderr.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// Whether each line on stderr is a JSON object.
static IS_JSON: AtomicBool = AtomicBool::new(false);

/// The way to start this command line again, for commands that need a process of their own.
pub struct Program {
    path: PathBuf,
    arguments: Vec<OsString>,
}

impl Program {
    /// A program, and the arguments before the command line's own.
    #[must_use]
    pub fn new(path: PathBuf, arguments: Vec<OsString>) -> Program {
        Program { path, arguments }
    }

    /// The running binary.
    ///
    /// # Errors
    /// If the system cannot name it.
    pub fn running() -> io::Result<Program> {
        Ok(Program::new(env::current_exe()?, Vec::new()))
    }

    pub(crate) fn command(&self) -> std::process::Command {
        let mut command = std::process::Command::new(&self.path);
        command.args(&self.arguments);
        command
    }
}

/// From here on, each line on stderr is a JSON object.
pub(crate) fn complain_in_json() {
    IS_JSON.store(true, Ordering::Relaxed);
}

/// Whether stderr takes lines for people.
pub(crate) fn is_for_people() -> bool {
    !IS_JSON.load(Ordering::Relaxed)
}

/// Prints a message on stderr. If stderr cannot be written (a full disk, a closed reader), the
/// message is lost, and the work continues.
pub fn complain(message: &dyn fmt::Display) {
    let line = match is_for_people() {
        true => format!("larder: {message}"),
        false => object(message),
    };
    let _ = writeln!(io::stderr(), "{line}");
}

/// A message in the form of the log's lines.
fn object(message: &dyn fmt::Display) -> String {
    let mut timestamp = String::new();
    // Writing to a string does not fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    let message = message.to_string();
    let target = "larder";
    json!({"timestamp": timestamp, "level": "ERROR", "message": message, "target": target})
        .to_string()
}
