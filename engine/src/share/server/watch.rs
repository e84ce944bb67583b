//! Looks after clients that are there and say nothing: stopped by a signal or a debugger, or being dumped, in the middle of a put or a
//! read.
//!
//! Such a put holds up those of everybody else: groups of descriptors complete in their order, syncs cover complete ones, and whoever
//! puts the same page waits for it. So while puts of clients are under way somebody looks at them now and then, and gives up those of
//! which nothing has been heard for [`SILENCE`] at least ([`Ledger::look`](super::ledger::Ledger::look)). However long a device
//! takes, a client that waits for it says so ([`Putting::stay`](crate::catalog::Putting::stay)).
//!
//! A read keeps the segments it reads from being written again, in the end all of them. Its pages are kept for half a minute in which no
//! read of the same client begins or ends; one that takes longer and then finds something else asks once more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::Shared;
use super::ledger::LOOKS;
use crate::seldom::Seldom;

/// How long a client may say nothing of a put: several times as long as one that is only slow.
const SILENCE: Duration = Duration::from_secs(4);

/// Between two looks: the first may come right after a put began.
const EVERY: Duration = Duration::from_millis(SILENCE.as_millis() as u64 / (LOOKS - 1) as u64);

/// When to look.
#[derive(Default)]
pub(super) struct Watch {
    /// Puts or reads may be under way.
    is_due: AtomicBool,
    calling: Mutex<()>,
    called: Condvar,
    /// Limits the lines on puts that are given up, and on pins that are taken back.
    puts: Seldom,
    pins: Seldom,
}

impl Watch {
    /// A put or a read has begun: its client's ledger has it.
    pub(super) fn call(&self) {
        if !self.is_due.load(Ordering::SeqCst) {
            self.is_due.store(true, Ordering::SeqCst);
            self.wake();
        }
    }

    /// Has it notice that the server is being stopped, too.
    pub(super) fn wake(&self) {
        let _guard = self.calling.lock();
        self.called.notify_one();
    }

    fn wait_for_call(&self, stop: &AtomicBool) {
        let mut guard = self.calling.lock();
        while !self.is_due.load(Ordering::SeqCst) && !stop.load(Ordering::SeqCst) {
            self.called.wait(&mut guard);
        }
    }
}

impl Shared {
    /// Looks after clients until the server is stopped.
    pub(super) fn watch(&self) {
        loop {
            self.watch.wait_for_call(&self.stop);
            self.pause(EVERY);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            // Before the look: what begins during it calls again.
            self.watch.is_due.store(false, Ordering::SeqCst);
            if self.look() {
                self.watch.is_due.store(true, Ordering::SeqCst);
            }
        }
    }

    /// Whether another look is due.
    fn look(&self) -> bool {
        let sessions: Vec<_> = self.sessions.lock().values().cloned().collect();
        let mut is_due = false;
        for session in sessions {
            let look = session.ledger.look(self.store.catalog(), &self.map);
            is_due |= look.is_due;
            if !look.given_up.is_empty()
                && let Some(more) = self.watch.puts.is_due()
            {
                tracing::warn!(
                    client = session.id.0,
                    puts = look.given_up.len(),
                    more,
                    "a client has stopped in the middle of puts: they are given up (said once a minute)"
                );
            }
            if look.pins_taken_back > 0
                && let Some(more) = self.watch.pins.is_due()
            {
                tracing::warn!(
                    client = session.id.0,
                    pages = look.pins_taken_back,
                    more,
                    "a client has stopped in the middle of reads: the pages are no longer kept for it (said once a minute)"
                );
            }
        }
        is_due
    }
}
