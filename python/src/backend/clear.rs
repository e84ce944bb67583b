//! Deleting everything that this server stored. SGLang tells nobody when that fails: so from the moment it is asked for nothing is
//! served before it is done, however long the store takes to have an owner, or to be there at all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use larder_engine::{PageStore, SharedStore, StoreError};
use parking_lot::{Mutex, MutexGuard};

use super::{Backend, OWNER_PATIENCE, Place};

/// How long a clear waits for an owner.
const PATIENCE: Duration = Duration::from_secs(8);

/// What has been asked for and is not done.
#[derive(Default)]
pub(super) struct Debt {
    is_owed: AtomicBool,
    /// Held by whoever clears.
    paying: Mutex<()>,
}

impl Backend {
    /// Deletes every page of this server's pools. Other models and servers keep theirs. Without a store it is done as soon as
    /// there is one.
    ///
    /// # Errors
    /// Why it could not be done yet: it is tried again before anything is served.
    pub fn clear(&self) -> Result<u64, StoreError> {
        self.debt.is_owed.store(true, Ordering::SeqCst);
        let until = Instant::now() + PATIENCE;
        loop {
            let place = self.place.read();
            let store = match &*place {
                Place::Attached(store) => store,
                Place::Empty => return Ok(0),
                Place::Closed => return Err(StoreError::Closed),
            };
            match self.pay(store, self.debt.paying.lock()) {
                Err(StoreError::OwnerGone) if Instant::now() < until => {
                    // In short turns: a close waits for this.
                    store.wait_for_owner(until.min(Instant::now() + OWNER_PATIENCE));
                }
                paid => return paid,
            }
        }
    }

    /// Whether pages may be served: nothing is owed any more.
    pub(super) fn is_clear(&self, store: &SharedStore) -> bool {
        if !self.debt.is_owed.load(Ordering::SeqCst) {
            return true;
        }
        // Others miss meanwhile.
        let Some(turn) = self.debt.paying.try_lock() else {
            return false;
        };
        match self.pay(store, turn) {
            Ok(pages) => {
                tracing::info!(pages, "cleared, as was asked for before");
                true
            }
            Err(error) => {
                tracing::debug!(%error, "not cleared yet: nothing is served");
                false
            }
        }
    }

    fn pay(&self, store: &SharedStore, _turn: MutexGuard<'_, ()>) -> Result<u64, StoreError> {
        if !self.debt.is_owed.load(Ordering::SeqCst) {
            return Ok(0);
        }
        let mut deleted = 0;
        let spaces: Vec<_> = {
            let pools = self.pools.read();
            pools
                .values()
                .filter_map(|pool| pool.space.get().copied())
                .collect()
        };
        for space in spaces {
            deleted += store.clear_namespace(space)?;
        }
        self.debt.is_owed.store(false, Ordering::SeqCst);
        Ok(deleted)
    }
}
