//! The role monitor: the thread of a handle that finds a new owner, or makes this process it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_base::ids::ClientId;
use larder_base::runtime::Instant;

use super::bell::Wish;
use super::role::{Client, NotYet, Role, may_serve};
use super::server::may_give_to;
use super::{Inner, TRY_AGAIN};
use crate::error::StoreError;
use crate::totals::Totals;

/// Longest pause between two tries. The pause grows by an eighth each time, and reaches this after
/// about ten seconds.
const TRY_AGAIN_MAX: Duration = Duration::from_secs(1);

/// How long the other processes leave the ownership to an heir. It covers the close of the former
/// owner, which waits for the writes of its clients.
const HEIR_PATIENCE: Duration = Duration::from_secs(5);

/// The owners before, as far as the next role depends on them.
struct Past {
    /// The group to serve as owner: the configured group; else the group that the last owner
    /// served, if this process may give the socket to it.
    group: Option<u32>,
    /// Pid of the last owner.
    owner: Option<u32>,
    /// The last totals.
    totals: Totals,
    /// Until then the ownership is left to the heir, which is another process.
    left_until: Option<Instant>,
    /// The last owner handed the store over to this process.
    is_heir: bool,
    /// This process asks owners for the ownership.
    asks: bool,
    /// It was logged that this process cannot own the store for want of its key.
    is_told: bool,
}

impl Past {
    fn may_own(&self) -> bool {
        self.left_until.is_none_or(|until| Instant::now() >= until)
    }
}

impl Inner {
    /// The role monitor: makes sure that there is an owner, for as long as the handle is open.
    pub(super) fn monitor_role(&self) {
        let mut past = Past {
            group: self.options.group,
            owner: None,
            totals: Totals::default(),
            left_until: None,
            is_heir: false,
            asks: self.options.keeps_ownership,
            is_told: false,
        };
        let mut pause = TRY_AGAIN;
        // The last warning about why this process could not become the owner.
        let mut last_warning = String::new();
        loop {
            if self.stay(&mut past) {
                pause = TRY_AGAIN;
            }
            if self.bell.is_stopped() {
                return;
            }
            let wish = Wish {
                group: past.group,
                former: &past.totals,
                bell: &self.bell,
                may_own: past.may_own(),
            };
            match Role::find(&self.path, &self.options, &wish) {
                Ok(role) => {
                    if !self.begin(role, &past) {
                        return;
                    }
                    last_warning.clear();
                    continue;
                }
                Err(NotYet::TryAgain(_)) => {}
                Err(NotYet::Never(error)) => {
                    // An owner that gave the store to this process would give it away in vain.
                    past.asks = false;
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
            self.bell.pause(pause);
            pause = (pause + pause / 8).min(TRY_AGAIN_MAX);
        }
    }

    /// Begins a new role. False if the handle is being closed.
    fn begin(&self, role: Role, past: &Past) -> bool {
        self.compare_settings(&role);
        let path = self.path.display();
        match &role {
            Role::Owner(_) if past.is_heir => tracing::info!(
                %path,
                former_owner = past.owner,
                "this process owns the store now, the former owner handed it over"
            ),
            Role::Owner(_) => tracing::warn!(
                %path,
                former_owner = past.owner,
                "takeover: this process owns the store now, the former owner ended"
            ),
            _ => {}
        }
        let mut present = self.role.write();
        *present = role;
        // Under the lock: a call that has found no owner sees another number, or no role yet.
        self.turns.fetch_add(1, Ordering::AcqRel);
        drop(present);
        // A thread that has just found no owner cannot begin to wait after this. A `close` that
        // runs after it hangs up on the new owner. A `close` that ran before found no connection.
        !self.bell.role_changed().is_stopped()
    }

    /// Stays in the present role to its end. False if there is none.
    fn stay(&self, past: &mut Past) -> bool {
        let client = match &*self.role.read() {
            Role::Client(client) => Some(client.clone()),
            Role::Owner(_) => None,
            Role::Nobody | Role::Closed => return false,
        };
        match client {
            Some(client) => self.stay_client(client, past),
            None => self.stay_owner(past),
        }
        true
    }

    /// A client until the owner goes.
    fn stay_client(&self, client: Arc<Client>, past: &mut Past) {
        if past.asks {
            past.asks = self.ask_for_ownership(&client);
        }
        past.owner = client.remote.owner_pid();
        if client.remote.is_sealed() && self.options.wrapping.is_none() && !past.is_told {
            past.is_told = true;
            tracing::info!(
                path = %self.path.display(),
                "the store is encrypted, and this process has no key of it: it never takes the \
                 store over"
            );
        }
        let end = client.wait_for_owner_end();
        if let Some(last) = end.totals {
            past.totals = last;
        }
        past.is_heir = end.heir == Some(client.remote.client());
        let is_left = end.heir.is_some() && !past.is_heir;
        past.left_until = is_left.then(|| Instant::now() + HEIR_PATIENCE);
        let served = client.group.filter(|gid| may_give_to(*gid));
        past.group = self.options.group.or(served);
        drop(client);
        self.lose_owner();
    }

    /// Whether the owner may be asked again.
    fn ask_for_ownership(&self, client: &Client) -> bool {
        match self.may_own(client) {
            Ok(()) => {
                client.remote.ask_for_ownership();
                true
            }
            Err(error) => {
                tracing::warn!(
                    %error,
                    "this process does not ask for the ownership: it could not serve the store"
                );
                false
            }
        }
    }

    /// Whether this process could own the store of this client.
    fn may_own(&self, client: &Client) -> Result<(), StoreError> {
        if client.remote.is_sealed() && self.options.wrapping.is_none() {
            return Err(StoreError::Sealed(self.path.clone()));
        }
        may_serve(&self.path)
    }

    /// The owner until the handle is being closed, or until a client takes the store over.
    fn stay_owner(&self, past: &mut Past) {
        while let Some(heir) = self.bell.wait_for_heir() {
            if let Some(totals) = self.hand_over(heir) {
                past.owner = None;
                past.is_heir = false;
                past.left_until = Some(Instant::now() + HEIR_PATIENCE);
                past.totals = totals;
                return;
            }
        }
    }

    /// Closes the store in order for a client that owns it next. Returns the last totals; `None`
    /// if nothing was done, because the client has gone or the handle is being closed.
    fn hand_over(&self, heir: ClientId) -> Option<Totals> {
        // Waits for the calls in progress.
        let mut role = self.role.write();
        let has_it = matches!(&*role, Role::Owner(owner) if owner.serves(heir));
        if !has_it || self.bell.is_stopped() {
            return None;
        }
        let Role::Owner(mut owner) = std::mem::replace(&mut *role, Role::Nobody) else {
            return None;
        };
        self.turns.fetch_add(1, Ordering::AcqRel);
        drop(role);
        let path = self.path.display();
        tracing::info!(%path, "handing the store over to a client that asked for the ownership");
        let totals = owner.service.as_mut().map(|service| {
            service.server.stop(Some(heir));
            service.server.totals()
        });
        if let Err(error) = owner.end(&self.path) {
            tracing::warn!(
                %path,
                %error,
                "the store was handed over without a clean close: the next owner recovers it"
            );
        }
        totals
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
}
