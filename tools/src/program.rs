//! The running program: the way to start it again, and its messages on stderr.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write};
use std::path::PathBuf;

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

/// Prints a message on stderr. If stderr cannot be written (a full disk, a closed reader), the
/// message is lost, and the work continues.
pub fn complain(message: &dyn fmt::Display) {
    let _ = writeln!(io::stderr(), "larder: {message}");
}
