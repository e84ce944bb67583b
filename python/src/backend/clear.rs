//! Deleting everything that this server stored. SGLang tells nobody when that fails: so from the moment it is asked for nothing is
//! served before it is done, however long the store takes to have an owner, or to be there at all.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use larder_engine::share::Part;
use larder_engine::{NamespaceId, PageStore, SharedStore, StoreError};
use parking_lot::{Mutex, MutexGuard};

use super::{Backend, OWNER_PATIENCE, Place};

/// How long a clear waits for an owner.
const PATIENCE: Duration = Duration::from_secs(8);

/// How often calls try again what could not be cleared.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// What has been asked for and is not done.
#[derive(Default)]
pub(super) struct Debt {
    /// Clears that have been asked for.
    asked: AtomicU64,
    /// How many of them are done.
    paid: AtomicU64,
    /// Held by whoever clears.
    paying: Mutex<Paying>,
}

/// How far somebody has come.
#[derive(Default)]
pub(super) struct Paying {
    /// The clear that it is about, and the namespaces that are done.
    asked: u64,
    done: Vec<NamespaceId>,
    tried: Option<Instant>,
    /// Why it failed last, as it was told.
    told: String,
}

impl Debt {
    fn is_owed(&self) -> bool {
        self.paid.load(Ordering::SeqCst) < self.asked.load(Ordering::SeqCst)
    }
}

impl Backend {
    /// Deletes every page of this server's pools. Other models and servers keep theirs. Without a store it is done as soon as
    /// there is one.
    ///
    /// # Errors
    /// Why it could not be done yet: it is tried again before anything is served.
    pub fn clear(&self) -> Result<u64, StoreError> {
        if self.is_inherited() {
            return Err(StoreError::Forked);
        }
        self.debt.asked.fetch_add(1, Ordering::SeqCst);
        let until = Instant::now() + PATIENCE;
        let mut deleted = 0;
        loop {
            if self.is_closing() {
                return Err(StoreError::Closed);
            }
            let place = self.place.read();
            let store = match &*place {
                Place::Attached(store) => store,
                Place::Unmade | Place::Empty => return Ok(0),
                Place::Closed => return Err(StoreError::Closed),
            };
            match self.pay(store, self.debt.paying.lock(), &mut deleted) {
                Err(StoreError::OwnerGone)
                    if store.part() == Part::Nobody && Instant::now() < until =>
                {
                    // In short turns: a close waits for this.
                    store.wait_for_owner(until.min(Instant::now() + OWNER_PATIENCE));
                }
                paid => return paid.map(|()| deleted),
            }
        }
    }

    /// Whether pages may be served: nothing is owed any more.
    pub(super) fn is_clear(&self, store: &SharedStore) -> bool {
        if !self.debt.is_owed() {
            return true;
        }
        // Others miss meanwhile.
        let Some(mut paying) = self.debt.paying.try_lock() else {
            return false;
        };
        if paying
            .tried
            .is_some_and(|tried| tried.elapsed() < TRY_AGAIN)
        {
            return false;
        }
        paying.tried = Some(Instant::now());
        let mut deleted = 0;
        match self.pay(store, paying, &mut deleted) {
            Ok(()) => {
                tracing::info!(deleted, "cleared, as was asked for before");
                true
            }
            Err(_) => false,
        }
    }

    fn pay(
        &self,
        store: &SharedStore,
        mut paying: MutexGuard<'_, Paying>,
        deleted: &mut u64,
    ) -> Result<(), StoreError> {
        let asked = self.debt.asked.load(Ordering::SeqCst);
        if paying.asked != asked {
            *paying = Paying {
                asked,
                tried: paying.tried,
                ..Paying::default()
            };
        }
        let spaces: Vec<NamespaceId> = {
            let pools = self.pools.read();
            let spaces = pools.values().filter_map(|pool| pool.space.get());
            spaces.copied().collect()
        };
        let mut failed = None;
        for space in spaces {
            if paying.done.contains(&space) {
                continue;
            }
            match store.clear_namespace(space) {
                Ok(pages) => {
                    *deleted += pages;
                    paying.done.push(space);
                }
                Err(error) => failed = Some(error),
            }
        }
        let Some(error) = failed else {
            self.debt.paid.fetch_max(asked, Ordering::SeqCst);
            return Ok(());
        };
        let why = error.to_string();
        if paying.told != why {
            tracing::warn!(%error, "not cleared yet: nothing is served until it is");
            paying.told = why;
        }
        Err(error)
    }
}
