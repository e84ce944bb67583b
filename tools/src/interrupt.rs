//! Ctrl-C, `kill` and a closed terminal: they ask a long command to end cleanly instead of killing
//! it.
//!
//! The signals are blocked and a thread waits for them, so that no code runs inside a signal
//! handler. The first one raises a flag, which commands check between store calls. A later one ends
//! the process at once; a store survives that like any crash. Signals that come together count as
//! one: `timeout` and shells signal a process and then its whole group. Children start with nothing
//! blocked.

use std::fs::File;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{SigSet, Signal};
use rustix::fs::OFlags;

use crate::program::complain;

/// Exit code after a second signal.
const EXIT_INTERRUPTED: i32 = 130;

/// Signals that come so close together are one.
const TOGETHER: Duration = Duration::from_millis(500);

/// Interval at which a wait for input checks for a signal.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Whether the operator has asked the command to end.
#[derive(Clone)]
pub struct Interrupt(Arc<Raised>);

#[derive(Default)]
struct Raised {
    flag: AtomicBool,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Interrupt {
    /// Starts to watch for SIGINT, SIGTERM and, unless it is ignored (`nohup`), SIGHUP. Must be
    /// called before the process has other threads: they inherit the block. If signals cannot be
    /// blocked, they still end the process at once.
    pub fn watch() -> Self {
        let raised = Arc::new(Raised::default());
        let mut signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
        if !ignores_hangups() {
            signals.add(Signal::SIGHUP);
        }
        if signals.thread_block().is_ok() {
            let raise = Arc::clone(&raised);
            let waiter = std::thread::Builder::new()
                .name("signals".to_owned())
                .spawn(move || wait(&signals, &raise));
            if waiter.is_err() {
                // Without a thread that waits for the signals, they act as usual.
                let _ = signals.thread_unblock();
            }
        }
        Interrupt(raised)
    }

    /// Signals act as usual.
    #[cfg(test)]
    pub fn never() -> Self {
        Interrupt(Arc::default())
    }

    /// Whether a signal has come.
    pub fn is_raised(&self) -> bool {
        self.0.flag.load(Ordering::SeqCst)
    }

    /// Shows the progress of a work, which ends early when a signal has come.
    pub fn advance(&self, bar: &ProgressBar, done: u64, total: u64) -> ControlFlow<()> {
        bar.set_length(total);
        bar.set_position(done);
        self.flow()
    }

    /// Ends a work early when a signal has come.
    pub fn flow(&self) -> ControlFlow<()> {
        match self.is_raised() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    /// Sleeps until a signal has come, or for `patience`. Returns whether one has come.
    pub fn wait(&self, patience: Duration) -> bool {
        let guard = self.0.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .0
            .changed
            .wait_timeout_while(guard, patience, |()| !self.is_raised());
        drop(waited);
        self.is_raised()
    }
}

/// A file or a pipe. A signal during a wait for input ends the read with an error.
pub struct Input {
    file: File,
    interrupt: Interrupt,
}

impl Input {
    /// # Errors
    /// When there is no standard input.
    pub fn stdin(interrupt: &Interrupt) -> io::Result<Input> {
        Ok(Input {
            file: File::from(io::stdin().as_fd().try_clone_to_owned()?),
            interrupt: interrupt.clone(),
        })
    }

    /// # Errors
    /// When it cannot be opened.
    pub fn open(path: &Path, interrupt: &Interrupt) -> io::Result<Input> {
        // Otherwise the open would wait here for a writer of the pipe.
        let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
        let options = File::options()
            .read(true)
            .custom_flags(nonblocking)
            .open(path);
        Ok(Input {
            file: options?,
            interrupt: interrupt.clone(),
        })
    }
}

impl Read for Input {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let patience = u16::try_from(LOOK_AGAIN.as_millis()).unwrap_or(u16::MAX);
        while !self.interrupt.is_raised() {
            let mut waited = [PollFd::new(self.file.as_fd(), PollFlags::POLLIN)];
            match poll(&mut waited, patience) {
                Ok(0) | Err(Errno::EINTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
            match self.file.read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
        Err(io::Error::other(EndAskedFor))
    }
}

/// The error of reading [`Input`] after a signal.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
struct EndAskedFor;

/// Whether reading [`Input`] ended because a signal had come.
pub fn is_end_asked_for(error: &io::Error) -> bool {
    error
        .get_ref()
        .is_some_and(<dyn std::error::Error + Send + Sync>::is::<EndAskedFor>)
}

/// Whether the process was started with SIGHUP ignored. A signal in the waited set is delivered
/// even then.
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (Signal::SIGHUP as u32 - 1) & 1 == 1)
}

fn wait(signals: &SigSet, raised: &Raised) {
    let mut first: Option<Instant> = None;
    while signals.wait().is_ok() {
        if first.is_some_and(|first| first.elapsed() < TOGETHER) {
            continue;
        }
        first.get_or_insert_with(Instant::now);
        if raised.flag.swap(true, Ordering::SeqCst) {
            std::process::exit(EXIT_INTERRUPTED);
        }
        drop(raised.lock.lock().unwrap_or_else(PoisonError::into_inner));
        raised.changed.notify_all();
        complain(&"ending after the call under way; once more to stop at once");
    }
}
