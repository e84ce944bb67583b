//! Where the wrapping key is read: a file, a credential of the service manager, or a command.
//!
//! The text is 64 hexadecimal digits, and a line end. Never an environment variable: children have
//! it, and `/proc` shows it.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use zeroize::Zeroizing;

use crate::cipher::KEY_BYTES;
use crate::vault::{Vault, VaultError};
use crate::wrapping::WrappingKey;

/// The name of the credential.
const CREDENTIAL: &str = "larder.kek";

/// The directory with the credentials of a service.
const CREDENTIALS: &str = "CREDENTIALS_DIRECTORY";

/// How long a command may take.
const COMMAND_LIMIT: Duration = Duration::from_secs(10);

const DIGITS: usize = 2 * KEY_BYTES;
/// The digits, a line end of two bytes, and a byte more, which shows a text that is too long.
const TEXT_BYTES: usize = DIGITS + 3;

/// Where the wrapping key is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// A file that its owner alone can read.
    File(PathBuf),
    /// The credential `larder.kek` of the service manager.
    Credential,
    /// The output of a command, which a shell runs.
    Command(String),
}

impl FromStr for KeySource {
    type Err = SourceError;

    /// `file:PATH`, `credential`, or `command:LINE`.
    fn from_str(text: &str) -> Result<KeySource, SourceError> {
        match text.split_once(':') {
            Some(("file", path)) if !path.is_empty() => Ok(KeySource::File(path.into())),
            Some(("command", line)) if !line.is_empty() => Ok(KeySource::Command(line.to_owned())),
            None if text == "credential" => Ok(KeySource::Credential),
            _ => Err(SourceError::Unknown),
        }
    }
}

impl FromStr for WrappingKey {
    type Err = SourceError;

    /// Reads the key from the source that the text names: `file:PATH`, `credential`, or
    /// `command:LINE`.
    fn from_str(text: &str) -> Result<WrappingKey, SourceError> {
        text.parse::<KeySource>()?.read(&Vault::new())
    }
}

/// Why there is no wrapping key.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The text names no source.
    #[error("not a source of a key: file:PATH, credential and command:LINE are")]
    Unknown,
    /// A file cannot be read.
    #[error("cannot read the key file {path}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// Others than the owner can use the file.
    #[error(
        "the key file {path} has mode {mode:04o}, so that others can use it: chmod 0400",
        path = path.display()
    )]
    Mode {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The file belongs to another user.
    #[error(
        "the key file {path} belongs to user {owner}: it has to belong to the user of this \
         process, or to root",
        path = path.display()
    )]
    Owner {
        /// The file.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// No service manager gave credentials.
    #[error("{CREDENTIALS} is not set: no service manager gave the credential {CREDENTIAL}")]
    NoCredentials,
    /// The text is no key.
    #[error("{from} gives no key: {DIGITS} hexadecimal digits and a line end are one")]
    Text {
        /// The file or command.
        from: String,
    },
    /// The command cannot be run.
    #[error("cannot run the key command: {0}")]
    Command(io::Error),
    /// The command failed.
    #[error("the key command failed ({0})")]
    Failed(std::process::ExitStatus),
    /// The command took too long.
    #[error(
        "the key command gave no key within {} seconds, and was ended",
        COMMAND_LIMIT.as_secs()
    )]
    Late,
    /// The key cannot be kept.
    #[error(transparent)]
    Vault(#[from] VaultError),
}

impl KeySource {
    /// Reads the key.
    ///
    /// # Errors
    /// See [`SourceError`].
    pub fn read(&self, vault: &Vault) -> Result<WrappingKey, SourceError> {
        self.read_within(vault, COMMAND_LIMIT)
    }

    fn read_within(&self, vault: &Vault, limit: Duration) -> Result<WrappingKey, SourceError> {
        let mut memory = Zeroizing::new([0; TEXT_BYTES]);
        let text = memory.as_mut_slice();
        let (bytes, from) = match self {
            KeySource::File(path) => {
                let others = 0o077;
                (read_file(path, others, text)?, path.display().to_string())
            }
            KeySource::Credential => {
                let directory = std::env::var_os(CREDENTIALS).ok_or(SourceError::NoCredentials)?;
                let path = Path::new(&directory).join(CREDENTIAL);
                // An access list for the service's user shows as rights of the group.
                let others = 0o007;
                (read_file(&path, others, text)?, path.display().to_string())
            }
            KeySource::Command(command) => {
                let bytes = read_command(command, text, limit)?;
                (bytes, "the key command".to_owned())
            }
        };
        let text = text.get(..bytes).unwrap_or_default();
        let text = text.strip_suffix(b"\n").unwrap_or(text);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        WrappingKey::keep(vault, |key| match parse(text, key) {
            true => Ok(()),
            false => Err(SourceError::Text { from }),
        })
    }
}

/// Reads a file that others must not be able to use. Returns the number of bytes.
fn read_file(path: &Path, others: u32, text: &mut [u8]) -> Result<usize, SourceError> {
    let failed = |source| SourceError::File {
        path: path.to_owned(),
        source,
    };
    let mut file = File::open(path).map_err(failed)?;
    let facts = file.metadata().map_err(failed)?;
    let (mode, owner) = (facts.mode() & 0o7777, facts.uid());
    if mode & others != 0 {
        let path = path.to_owned();
        return Err(SourceError::Mode { path, mode });
    }
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        let path = path.to_owned();
        return Err(SourceError::Owner { path, owner });
    }
    read_up_to(&mut file, text).map_err(failed)
}

/// Reads until the end or the end of the memory. Returns the number of bytes.
fn read_up_to(file: &mut impl Read, text: &mut [u8]) -> io::Result<usize> {
    let mut done = 0_usize;
    while let Some(rest) = text.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read(rest) {
            Ok(0) => break,
            Ok(count) => done = done.saturating_add(count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Runs a command and reads its output. Returns the number of bytes.
fn read_command(command: &str, text: &mut [u8], limit: Duration) -> Result<usize, SourceError> {
    let end = Instant::now().checked_add(limit);
    let child = Command::new("/bin/sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(SourceError::Command)?;
    let mut running = Running { child };
    let read = running.read(text, end);
    let ended = read.and_then(|bytes| Ok((bytes, running.wait(end)?)));
    match ended {
        Ok((bytes, status)) if status.success() => Ok(bytes),
        Ok((_, status)) => Err(SourceError::Failed(status)),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(SourceError::Late),
        Err(error) => Err(SourceError::Command(error)),
    }
}

/// A command. It is ended with all of its group when this is dropped.
struct Running {
    child: Child,
}

impl Running {
    fn read(&mut self, text: &mut [u8], end: Option<Instant>) -> io::Result<usize> {
        let Some(output) = &mut self.child.stdout else {
            return Ok(0);
        };
        let mut done = 0_usize;
        while let Some(rest) = text.get_mut(done..).filter(|rest| !rest.is_empty()) {
            wait_for(&output, end)?;
            match output.read(rest) {
                Ok(0) => break,
                Ok(count) => done = done.saturating_add(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn wait(&mut self, end: Option<Instant>) -> io::Result<std::process::ExitStatus> {
        // A writer of more than a key is not kept waiting.
        self.child.stdout = None;
        if let Some(pid) = self.pid() {
            wait_for(&pidfd_open(pid, PidfdFlags::empty())?, end)?;
        }
        self.child.wait()
    }

    fn pid(&self) -> Option<Pid> {
        Pid::from_raw(i32::try_from(self.child.id()).ok()?)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let (Ok(None), Some(pid)) = (self.child.try_wait(), self.pid()) {
            let _ = kill_process_group(pid, Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

/// Waits until something can be read, or the other end is closed.
fn wait_for(file: &impl AsFd, end: Option<Instant>) -> io::Result<()> {
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let left = left.map(Timespec::try_from).transpose();
        let left = left.map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut files = [PollFd::new(file, PollFlags::IN)];
        match poll(&mut files, left.as_ref()) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Parses a key. Returns whether the text is one.
fn parse(text: &[u8], key: &mut [u8; KEY_BYTES]) -> bool {
    let (digits, rest) = text.as_chunks::<2>();
    let mut is_key = digits.len() == KEY_BYTES && rest.is_empty();
    for ([high, low], byte) in digits.iter().zip(key) {
        match (value_of(*high), value_of(*low)) {
            (Some(high), Some(low)) => *byte = high << 4 | low,
            _ => is_key = false,
        }
    }
    is_key
}

fn value_of(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit.wrapping_sub(b'0')),
        b'a'..=b'f' => Some(digit.wrapping_sub(b'a').wrapping_add(10)),
        b'A'..=b'F' => Some(digit.wrapping_sub(b'A').wrapping_add(10)),
        _ => None,
    }
}

#[cfg(test)]
#[path = "source/tests.rs"]
mod tests;
