//! The watchdog for clients that are connected and silent: stopped by a signal or a debugger, or
//! being dumped, in the middle of a put or a read.
//!
//! Such a put blocks the puts of all others: groups of descriptors complete in their order, syncs
//! cover complete groups, and other puts of the same page wait for it. So while clients' puts are
//! in progress, the watchdog checks them regularly, and aborts the puts that were silent for at
//! least [`SILENCE`] ([`Ledger::look`](super::ledger::Ledger::look)). A client that waits for a
//! slow device sends heartbeats ([`Putting::stay`](crate::catalog::Putting::stay)).
//!
//! A client that has not run for [`STOPPED`], by the board, in the middle of a read or a put is
//! reported as stopped. A client that waits for a slow device runs.
//!
//! A read keeps its segments from being written again, in the end all segments of the store. So a
//! client's pins are revoked after half a minute in which none of its reads begins or ends. A
//! longer read that then finds other bytes asks once more.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use larder_base::planted;
use larder_base::runtime::{Condvar, Mutex};
use larder_base::seldom::Seldom;
use larder_base::system::processes;

use super::ledger::{LOOKS, Look};
use super::session::Session;
use super::shared::Shared;
use crate::share::wire::{EndedClient, StoppedClient};
use crate::volume::row_of;

/// How long a put may be silent: several times as long as a client that is merely slow.
const SILENCE: Duration = Duration::from_secs(4);

/// How long a client that is stopped has not run. A client on a busy machine runs more often.
const STOPPED: Duration = Duration::from_secs(5);

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
    /// Limits the warnings about clients that are stopped, and that ended.
    stops: Seldom,
    ends: Seldom,
    /// Pages of aborted puts.
    aborted_pages: AtomicU64,
    /// The last client that ended in the middle of puts.
    ended: Mutex<Option<EndedClient>>,
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

    /// Pages of puts that were given up.
    pub(super) fn aborted_pages(&self) -> u64 {
        self.aborted_pages.load(Ordering::Relaxed)
    }

    /// The last client that ended in the middle of puts.
    pub(super) fn ended(&self) -> Option<EndedClient> {
        self.ended.lock().clone()
    }

    fn count(&self, look: &Look) {
        self.aborted_pages
            .fetch_add(look.pages_given_up, Ordering::Relaxed);
    }

    /// A client has gone, and these of its puts were given up.
    pub(super) fn left(&self, session: &Session, look: &Look) {
        self.count(look);
        if look.pages_given_up == 0 {
            return;
        }
        *self.ended.lock() = Some(EndedClient {
            pid: session.pid,
            name: session.name(),
            ended_unix_s: processes::unix_seconds(),
            pages: look.pages_given_up,
        });
        if let Some(more) = self.ends.is_due() {
            tracing::warn!(
                client = session.id.0,
                pid = session.pid,
                pages = look.pages_given_up,
                more,
                "a client has ended in the middle of puts: these pages are not stored (logged \
                 once a minute)"
            );
        }
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

    /// This client, if it is stopped in the middle of reads or puts.
    pub(super) fn stopped(&self, session: &Session) -> Option<StoppedClient> {
        let (reads_in_flight, puts_in_flight) = session.ledger.counts();
        let silence = self.store.data.board.silence_of(row_of(session.id))?;
        if silence < STOPPED || reads_in_flight + puts_in_flight == 0 {
            return None;
        }
        Some(StoppedClient {
            pid: session.pid,
            name: session.name(),
            stopped_seconds: silence.as_secs_f64(),
            reads_in_flight,
            puts_in_flight,
        })
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
            self.watch.count(&look);
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
            if let Some(stopped) = self.stopped(&session)
                && let Some(more) = self.watch.stops.is_due()
            {
                tracing::warn!(
                    client = session.id.0,
                    pid = session.pid,
                    pages = stopped.reads_in_flight,
                    puts = stopped.puts_in_flight,
                    stopped_s = stopped.stopped_seconds,
                    more,
                    "a client is stopped, in the middle of reads or puts: let it go on, or end it \
                     (logged once a minute)"
                );
            }
            if look.pins_taken_back > 0
                && let Some(more) = self.watch.pins.is_due()
            {
                let (client, pid) = (session.id.0, session.pid);
                let pages = look.pins_taken_back;
                let waits = self.store.data.board.oldest_of(row_of(session.id));
                if let Some(age) = waits {
                    tracing::warn!(
                        client,
                        pid,
                        pages,
                        oldest_operation_s = age.as_secs(),
                        more,
                        "a client waits for a slow volume in the middle of reads: the pages are no \
                         longer kept for it (logged once a minute)"
                    );
                } else {
                    tracing::warn!(
                        client,
                        pid,
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
