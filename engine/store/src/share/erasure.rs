//! The erasure of a tenant of an encrypted store: a client asks the owner for it.

use std::time::Duration;

use larder_base::runtime::{Instant, after};

use super::Store;
use super::role::Decider;
use super::wire::{Erasure, Reply, Request};
use crate::error::StoreError;

/// Erases a tenant: its keys, and with them its pages. When this returns, the keyring without them
/// is durable on all volumes, no page of the tenant is found, and the clients were asked to forget
/// the keys. Waits for their answers, at most so long. It is not complete while
/// [`Erasure::waits_for`] names some: then it may be called again.
///
/// A later put of the tenant gets a new key.
///
/// # Errors
/// [`StoreError::Usage`] if the store is not encrypted; errors of the device, after which the
/// tenant is erased or whole.
pub fn erase_tenant(
    store: &Store,
    tenant: &str,
    patience: Duration,
) -> Result<Erasure, StoreError> {
    let until = after(patience);
    let role = store.inner.role().ok_or(StoreError::OwnerGone)?;
    let eraser = match role.decider().ok_or(StoreError::OwnerGone)? {
        Decider::Owner(owner) => match &owner.service {
            Some(service) => service.server.eraser(),
            None => {
                let (slots, pages) = owner.store.erase(tenant)?;
                return Ok(Erasure {
                    slots,
                    pages,
                    waits_for: Vec::new(),
                });
            }
        },
        Decider::Client(client) => {
            let patience = until.saturating_duration_since(Instant::now());
            let request = Request::Erase {
                tenant,
                patience_ms: u32::try_from(patience.as_millis()).unwrap_or(u32::MAX),
            };
            return match client.remote.ask(&request) {
                Ok(Reply::Erased(erasure)) => Ok(*erasure),
                Ok(Reply::Failed(failure)) => Err(failure.into()),
                Ok(_) | Err(_) => Err(StoreError::OwnerGone),
            };
        }
    };
    // The role may change during the wait.
    drop(role);
    eraser.erase(tenant, until)
}

/// Whether a store is encrypted; `None` while it has no owner.
pub fn is_encrypted(store: &Store) -> Option<bool> {
    let role = store.inner.role()?;
    Some(match role.decider()? {
        Decider::Owner(owner) => owner.store.is_sealed(),
        Decider::Client(client) => client.remote.is_sealed(),
    })
}
