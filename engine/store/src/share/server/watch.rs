//! The watchdog for clients that are connected and silent: stopped by a signal or a debugger, or
//! being dumped, in the middle of a put or a read.
//!
//! Such a put blocks the puts of all others: groups of descriptors complete in their order, syncs
//! cover complete groups, and other puts of the same page wait for it. So while clients' puts are
//! in progress, the watchdog checks them regularly, and aborts the puts that were silent for at
//! least [`SILENCE`] ([`Ledger::look`](super::ledger::Ledger::look)). A client that waits for a
//! slow device sends heartbeats ([`Putting::stay`](crate::catalog::Putting::stay)).
//!
//! A read keeps its segments from being written again, in the end all segments of the store. So a
//! client's pins are revoked after half a minute in which none of its reads begins or ends. A
//! longer read that then finds other bytes asks once more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use larder_base::planted;
use larder_base::runtime::{Condvar, Mutex};
use larder_base::seldom::Seldom;

use super::ledger::LOOKS;
use super::shared::Shared;
use crate::volume::row_of;

/// How long a put may be silent: several times as long as a client that is merely slow.
const SILENCE: Duration = Duration::from_secs(4);

/// Interval between two checks. The first check may come right after a put began.
const EVERY: Duration = Duration::from_millis(SILENCE.as_millis() as u64 / (LOOKS - 1) as u64);

/// The schedule of the checks.
#[derive(Default)]
pub(super) struct Watch {
    /// Puts or reads may be in progress.
    is_due: AtomicBool,
    calling: Mutex<()>,
    called: Condvar,
    /// Limit the warnings about aborted puts, and about revoked pins.
    puts: Seldom,
    pins: Seldom,
}

impl Watch {
    /// A put or a read has begun, and is entered in its client's ledger.
    pub(super) fn call(&self) {
        if !self.is_due.load(Ordering::SeqCst) {
            self.is_due.store(true, Ordering::SeqCst);
            self.wake();
        }
    }

    /// Wakes the watchdog. It also sees that the server is being stopped.
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
    /// Checks clients until the server is stopped.
    pub(super) fn watch(&self) {
        loop {
            self.watch.wait_for_call(&self.stop);
            self.pause(EVERY);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            // Before the check: a put or read that begins during it sets the flag again.
            self.watch.is_due.store(false, Ordering::SeqCst);
            if self.look() {
                self.watch.is_due.store(true, Ordering::SeqCst);
            }
        }
    }

    /// Checks all clients once. Returns whether another check is due.
    fn look(&self) -> bool {
        let sessions: Vec<_> = self.sessions.lock().values().cloned().collect();
        let mut is_due = false;
        if planted!(BlindWatchdog) {
            return true;
        }
        for session in sessions {
            let look = session.ledger.look(self.store.catalog(), &self.map);
            is_due |= look.is_due;
            if !look.given_up.is_empty()
                && let Some(more) = self.watch.puts.is_due()
            {
                tracing::warn!(
                    client = session.id.0,
                    pid = session.pid,
                    puts = look.given_up.len(),
                    more,
                    "a client has stopped in the middle of puts: they are aborted (logged once \
                     a minute)"
                );
            }
            if look.pins_taken_back > 0
                && let Some(more) = self.watch.pins.is_due()
            {
                let (client, pages) = (session.id.0, look.pins_taken_back);
                let waits = self.store.data.board.oldest_of(row_of(session.id));
                if let Some(age) = waits {
                    tracing::warn!(
                        client,
                        pid = session.pid,
                        pages,
                        oldest_operation_s = age.as_secs(),
                        more,
                        "a client waits for a slow volume in the middle of reads: the pages are no \
                         longer kept for it (logged once a minute)"
                    );
                } else {
                    tracing::warn!(
                        client,
                        pid = session.pid,
                        pages,
                        more,
                        "a client has stopped in the middle of reads: the pages are no longer kept \
                         for it (logged once a minute)"
                    );
                }
            }
        }
        is_due
    }
}
