//! The quotas of a shared store: a client asks the owner to change them.

use super::Store;
use super::role::Decider;
use super::wire::{Reply, Request};
use crate::error::StoreError;
use crate::quotas::{QuotaChange, QuotaReport};

/// Changes the quotas of an open store. They are durable, and in force, when this returns.
///
/// # Errors
/// [`StoreError::Quotas`] if the change is refused; [`StoreError::OwnerOlder`] if the owner's
/// release has no quotas; errors of the device, after which a later open may find the former
/// quotas or these.
pub fn change_quotas(store: &Store, change: &QuotaChange) -> Result<QuotaReport, StoreError> {
    let role = store.inner.role().ok_or(StoreError::OwnerGone)?;
    match role.decider().ok_or(StoreError::OwnerGone)? {
        Decider::Owner(owner) => owner.store.change_quotas(change),
        Decider::Client(client) => {
            let change = Box::new(change.clone());
            match client.remote.ask(&Request::Quotas(change)) {
                Ok(Reply::Quotas(report)) => Ok(*report),
                Ok(Reply::Failed(failure)) => Err(failure.into()),
                Ok(_) | Err(_) => Err(StoreError::OwnerGone),
            }
        }
    }
}
