//! Erased keys: the clients that have them wipe them, and say so.
//!
//! A client may have keys from its marks on. It has none of an erased tenant once it has answered,
//! or has gone with its marks: it wipes all keys before it takes the marks off, and a process that
//! ended has neither.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_base::planted;
use larder_base::runtime::Instant;

use super::session::Session;
use super::shared::Shared;
use crate::error::StoreError;
use crate::share::wire::{Erasure, Keyholder, Reply, send};
use crate::volume::guard::Marks;

/// Pause between two looks whether clients have answered.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Longest wait for clients that one request may ask for.
const PATIENCE_MAX: Duration = Duration::from_secs(60);

/// The part of a server that erases tenants. It may outlive the server: then it waits for none.
pub(in crate::share) struct Eraser(pub(super) Arc<Shared>);

impl Eraser {
    /// Erases a tenant, and waits until no client has its keys, at most until a moment.
    pub(in crate::share) fn erase(
        &self,
        tenant: &str,
        until: Instant,
    ) -> Result<Erasure, StoreError> {
        self.0.erase(tenant, until)
    }
}

impl Shared {
    /// Erases a tenant, and waits until no client has its keys, at most until a moment.
    pub(super) fn erase(&self, tenant: &str, until: Instant) -> Result<Erasure, StoreError> {
        let (slots, pages) = self.store.erase(tenant)?;
        if !slots.is_empty() {
            self.have_forgotten(&slots);
        }
        let until = until.min(Instant::now() + PATIENCE_MAX);
        loop {
            let waits_for = self.keyholders();
            let is_over = waits_for.is_empty() || self.stop.load(Ordering::SeqCst);
            if is_over || Instant::now() >= until {
                return Ok(Erasure {
                    slots,
                    pages,
                    waits_for,
                });
            }
            self.pause(LOOK_EVERY);
        }
    }

    /// Has all clients wipe these keys.
    fn have_forgotten(&self, slots: &[NonZeroU16]) {
        let number = self.forgetting.next();
        let message = Reply::Forget {
            number,
            slots: slots.to_vec(),
        };
        let mut frame = Vec::new();
        if send(&mut std::io::sink(), &mut frame, &message).is_err() {
            return;
        }
        for session in self.sessions.lock().values() {
            session.forgotten.ask(number);
            session.told.lock().send_last(&frame);
        }
    }

    /// The clients that may have an erased key.
    fn keyholders(&self) -> Vec<Keyholder> {
        if planted!(UnawaitedForget) {
            return Vec::new();
        }
        let sessions = self.sessions.lock();
        let awaited = sessions
            .values()
            .filter(|session| session.ledger.is_marked() && session.forgotten.is_awaited());
        let awaited: Vec<Keyholder> = awaited.map(|session| keyholder(session)).collect();
        drop(sessions);
        let mut gone = self.forgetting.gone.lock();
        gone.retain(|client, _| self.probes.are_on_any(*client));
        awaited.into_iter().chain(gone.values().cloned()).collect()
    }

    /// A client has gone. It may have keys as long as its marks are there.
    pub(super) fn note_keyholder(&self, session: &Session) {
        if self.store.is_sealed() && session.ledger.is_marked() {
            let mut gone = self.forgetting.gone.lock();
            gone.retain(|client, _| self.probes.are_on_any(*client));
            gone.insert(session.id, keyholder(session));
        }
    }
}

fn keyholder(session: &Session) -> Keyholder {
    Keyholder {
        pid: session.pid,
        name: session.name().unwrap_or_default(),
    }
}
