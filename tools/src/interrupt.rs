//! Ctrl-C and `kill`: asks a long command to end cleanly instead of killing it.
//!
//! The signals are blocked and a thread waits for them, so that no code runs inside a signal handler. The first one raises
//! a flag, which commands look at between store calls; the second ends the process at once, which a store survives like
//! any crash. Children start with nothing blocked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};

/// Exit code after a second signal.
const EXIT_INTERRUPTED: i32 = 130;

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
    /// Starts to watch for SIGINT and SIGTERM. Must be called before the process has other threads: they inherit the
    /// block. Where signals cannot be blocked they go on ending the process at once.
    pub fn watch() -> Self {
        let raised = Arc::new(Raised::default());
        let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
        if signals.thread_block().is_ok() {
            let raise = Arc::clone(&raised);
            let waiter = std::thread::Builder::new()
                .name("signals".to_owned())
                .spawn(move || wait(&signals, &raise));
            if waiter.is_err() {
                // Nobody waits for the signals: let them act as usual.
                let _ = signals.thread_unblock();
            }
        }
        Interrupt(raised)
    }

    /// Whether a signal has come.
    pub fn is_raised(&self) -> bool {
        self.0.flag.load(Ordering::SeqCst)
    }

    /// Sleeps until a signal has come, or for `patience`. Whether one has come.
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

fn wait(signals: &SigSet, raised: &Raised) {
    while signals.wait().is_ok() {
        if raised.flag.swap(true, Ordering::SeqCst) {
            std::process::exit(EXIT_INTERRUPTED);
        }
        drop(raised.lock.lock().unwrap_or_else(PoisonError::into_inner));
        raised.changed.notify_all();
        eprintln!("larder: ending after the call under way; once more to stop at once");
    }
}
