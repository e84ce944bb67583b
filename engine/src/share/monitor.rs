//! The role monitor: the thread of a handle that finds a new owner, or makes this process it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::role::{NotYet, Role};
use super::server::may_give_to;
use super::{Inner, TRY_AGAIN};
use crate::totals::Totals;

/// Longest pause between two tries. The pause grows by an eighth each time, and reaches this after
/// about ten seconds.
const TRY_AGAIN_MAX: Duration = Duration::from_secs(1);

impl Inner {
    /// The role monitor: makes sure that there is an owner, for as long as the handle is open.
    pub(super) fn monitor_role(&self) {
        let mut pause = TRY_AGAIN;
        // The group to serve as owner: the configured group; else the group that the last owner
        // served, if this process may give the socket to it.
        let mut group = self.options.group;
        // The last warning about why this process could not become the owner.
        let mut last_warning = String::new();
        // Pid of the last owner, and the last totals that it sent.
        let mut former = None;
        let mut totals = Totals::default();
        loop {
            let client = match &*self.role.read() {
                Role::Client(client) => Some(client.clone()),
                Role::Closed => return,
                Role::Owner(_) | Role::Nobody => None,
            };
            let had_client = client.is_some();
            if let Some(client) = client {
                former = client.remote.owner_pid();
                if let Some(last) = client.remote.wait_for_owner_end(|| client.send_latencies()) {
                    totals = last;
                }
                let served = client.group.filter(|gid| may_give_to(*gid));
                group = self.options.group.or(served);
            }
            if had_client {
                self.lose_owner();
                pause = TRY_AGAIN;
            }
            if self.is_stopped() {
                return;
            }
            if matches!(*self.role.read(), Role::Owner(_)) {
                let mut stop = self.stop.lock();
                while !*stop {
                    self.stopped.wait(&mut stop);
                }
                return;
            }
            match Role::find(&self.path, &self.options, group, &totals) {
                Ok(role) => {
                    self.compare_settings(&role);
                    if matches!(role, Role::Owner(_)) {
                        tracing::warn!(
                            path = %self.path.display(),
                            former_owner = former,
                            "takeover: this process owns the store now, the former owner ended"
                        );
                    }
                    *self.role.write() = role;
                    self.turns.fetch_add(1, Ordering::AcqRel);
                    // Notified under the lock, so that a thread that has just found no owner cannot
                    // begin to wait after this notification.
                    let stop = self.stop.lock();
                    self.stopped.notify_all();
                    // A `close` that runs after this hangs up on the new owner. A `close` that ran
                    // before found no connection.
                    if *stop {
                        return;
                    }
                    drop(stop);
                    last_warning.clear();
                    continue;
                }
                Err(NotYet::TryAgain(_)) => {}
                Err(NotYet::Never(error)) => {
                    let why = error.to_string();
                    if why != last_warning {
                        tracing::warn!(
                            %error,
                            "the store has no owner, and this process cannot become it; trying \
                             again"
                        );
                        last_warning = why;
                    }
                }
            }
            self.pause(pause);
            pause = (pause + pause / 8).min(TRY_AGAIN_MAX);
        }
    }

    /// Warns, once for the same settings, if the owner has other settings than this process asked
    /// for. The owner's settings apply.
    pub(super) fn compare_settings(&self, role: &Role) {
        let Role::Client(client) = role else {
            return;
        };
        let Ok(report) = client.remote.report() else {
            return;
        };
        let wanted = self.options.settings();
        let before = self.seen.lock().replace(report.settings);
        if report.settings != wanted && before != Some(report.settings) {
            tracing::warn!(
                "{}: the owner's settings hold: {}; this process is configured with {wanted}. Use \
                 the same settings everywhere",
                self.path.display(),
                report.settings
            );
        }
    }

    /// The owner has gone. Waits for the calls in progress, which end as soon as the device lets
    /// them, and closes the volumes, so that another process can become the owner.
    fn lose_owner(&self) {
        let mut role = self.role.write();
        if matches!(*role, Role::Client(_)) {
            let lost = std::mem::replace(&mut *role, Role::Nobody);
            self.turns.fetch_add(1, Ordering::AcqRel);
            drop(role);
            // Dropped after unlocking: `drop` waits for reads that are still in flight.
            drop(lost);
        }
    }

    fn pause(&self, pause: Duration) {
        let mut stop = self.stop.lock();
        if !*stop {
            self.stopped.wait_for(&mut stop, pause);
        }
    }
}
