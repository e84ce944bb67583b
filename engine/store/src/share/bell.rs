//! The bell of a handle: it wakes the role monitor, and the calls that wait for an owner.

use std::sync::Arc;
use std::time::Duration;

use larder_base::ids::ClientId;
use larder_base::runtime::{Condvar, Instant, Mutex, MutexGuard};

use crate::totals::Totals;

/// How a process would be the owner.
pub(super) struct Wish<'a> {
    /// The group whose members it admits.
    pub(super) group: Option<u32>,
    /// The totals that it begins with.
    pub(super) former: &'a Totals,
    /// Called by clients that ask for the ownership.
    pub(super) bell: &'a Arc<Bell>,
    /// Whether it may become the owner now.
    pub(super) may_own: bool,
}

/// See the module.
pub(super) struct Bell {
    calls: Mutex<Calls>,
    rung: Condvar,
}

/// A reason to call the role monitor.
#[derive(Default)]
struct Calls {
    /// The handle is being closed.
    stop: bool,
    /// The client that asked for the ownership.
    heir: Option<ClientId>,
}

/// While it lives, no thread begins to wait for the bell.
pub(super) struct Quiet<'a>(MutexGuard<'a, Calls>);

impl Quiet<'_> {
    pub(super) fn is_stopped(&self) -> bool {
        self.0.stop
    }
}

impl Bell {
    pub(super) fn new() -> Bell {
        Bell {
            calls: Mutex::default(),
            rung: Condvar::new(),
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.calls.lock().stop
    }

    /// The handle is being closed.
    pub(super) fn stop(&self) {
        self.calls.lock().stop = true;
        self.rung.notify_all();
    }

    /// A client asks for the ownership.
    pub(super) fn ask(&self, heir: ClientId) {
        self.calls.lock().heir = Some(heir);
        self.rung.notify_all();
    }

    /// The role has changed.
    pub(super) fn role_changed(&self) -> Quiet<'_> {
        let quiet = Quiet(self.calls.lock());
        self.rung.notify_all();
        quiet
    }

    /// Waits for a client that asks for the ownership; `None` once the handle is being closed.
    pub(super) fn wait_for_heir(&self) -> Option<ClientId> {
        let mut calls = self.calls.lock();
        loop {
            if calls.stop {
                return None;
            }
            if let Some(heir) = calls.heir.take() {
                return Some(heir);
            }
            self.rung.wait(&mut calls);
        }
    }

    /// Waits while `goes_on`, until the handle is being closed, or until `until`.
    pub(super) fn wait_while(&self, until: Instant, goes_on: impl Fn() -> bool) {
        let mut calls = self.calls.lock();
        while !calls.stop && goes_on() {
            if self.rung.wait_until(&mut calls, until).timed_out() {
                return;
            }
        }
    }

    /// Sleeps, unless the handle is being closed.
    pub(super) fn pause(&self, pause: Duration) {
        let mut calls = self.calls.lock();
        if !calls.stop {
            self.rung.wait_for(&mut calls, pause);
        }
    }
}
