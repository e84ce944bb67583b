//! The running program: the way to start it again, and its messages on stderr.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// Whether each line on stderr is a JSON object.
static IS_JSON: AtomicBool = AtomicBool::new(false);

/// The way to start this command line again, for commands that need a process of their own.
pub struct Program {
    /// `None`: the running binary.
    path: Option<PathBuf>,
    arguments: Vec<OsString>,
}

impl Program {
    /// A program, and the arguments before the command line's own.
    #[must_use]
    pub fn new(path: PathBuf, arguments: Vec<OsString>) -> Program {
        Program {
            path: Some(path),
            arguments,
        }
    }

    /// The running binary.
    #[must_use]
    pub fn running() -> Program {
        Program {
            path: None,
            arguments: Vec::new(),
        }
    }

    /// # Errors
    /// If the system cannot name the running binary.
    pub(crate) fn command(&self) -> io::Result<std::process::Command> {
        let path = match &self.path {
            Some(path) => path.clone(),
            None => env::current_exe()?,
        };
        let mut command = std::process::Command::new(path);
        command.args(&self.arguments);
        Ok(command)
    }
}

/// The sentence about a file system of the kernel that is not mounted, if one is missing.
/// Containers and chroot directories may lack it.
pub(crate) fn lacks() -> Option<&'static str> {
    lacks_under(Path::new("/"))
}

fn lacks_under(root: &Path) -> Option<&'static str> {
    let is_absent = |path| matches!(root.join(path).try_exists(), Ok(false));
    if is_absent("proc/self/stat") {
        return Some(
            "/proc is not mounted, which tells processes and open files apart: \
             mount -t proc proc /proc",
        );
    }
    if is_absent("dev/null") || is_absent("dev/urandom") {
        return Some(
            "/dev has no null and urandom, which are needed for closed descriptors and \
             identities: mount -t devtmpfs dev /dev",
        );
    }
    None
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn each_file_system_that_is_not_mounted_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let make = |path: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        };
        assert!(lacks_under(root).unwrap().starts_with("/proc "));
        make("proc/self/stat");
        make("dev/null");
        assert!(lacks_under(root).unwrap().starts_with("/dev "));
        make("dev/urandom");
        assert_eq!(lacks_under(root), None);
        assert_eq!(lacks(), None);
    }
}
