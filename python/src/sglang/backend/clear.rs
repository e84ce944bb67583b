//! Deletion of all pages of this server. SGLang does not report a failed clear to anyone.
//! Therefore, once a clear has been requested, nothing is served before it is done, however long it
//! takes until the store has an owner or exists.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use larder_engine::{Part, StoreError};
use larder_format::Fingerprint;
use larder_sync::{Mutex, MutexGuard};

use super::{Backend, Place, Registered};

/// How long a clear waits for an owner.
const PATIENCE: Duration = Duration::from_secs(8);

/// Longest single wait for an owner.
const LOOK: Duration = Duration::from_secs(1);

/// Pause between attempts by calls to complete a failed clear.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Why a clear is not done yet.
#[derive(Debug, thiserror::Error)]
pub enum ClearError {
    /// The server was started without a store, which may have pages of it.
    #[error("no store is attached yet")]
    NoStore,
    /// An error of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The requested clears that are not done.
#[derive(Default)]
pub(super) struct Debt {
    /// Number of clears requested.
    asked: AtomicU64,
    /// Number of clears done.
    paid: AtomicU64,
    /// Locked during a clear.
    paying: Mutex<Paying>,
}

/// The progress of a clear.
#[derive(Default)]
pub(super) struct Paying {
    /// The number of the clear, and the namespaces that are done.
    asked: u64,
    done: Vec<Fingerprint>,
    tried: Option<Instant>,
    /// The last logged error.
    logged: String,
}

impl Debt {
    fn is_owed(&self) -> bool {
        self.paid.load(Ordering::SeqCst) < self.asked.load(Ordering::SeqCst)
    }
}

impl Backend {
    /// Deletes every page of this server's pools. Other models and servers keep their pages.
    ///
    /// # Errors
    /// Why it could not be done yet. It is retried before anything is served. Only this process
    /// knows of it: if it ends first, the pages stay.
    pub fn clear(&self) -> Result<u64, ClearError> {
        if self.is_inherited() {
            return Err(StoreError::Forked.into());
        }
        self.debt.asked.fetch_add(1, Ordering::SeqCst);
        let until = Instant::now() + PATIENCE;
        let mut deleted = 0;
        loop {
            if self.is_closing() {
                return Err(StoreError::Closed.into());
            }
            let place = self.place.read();
            let store = match &*place {
                Place::Attached(store) => store,
                // There was no store at the start. Pages that others put into it since then are
                // deleted before anything is served.
                Place::Unmade => return Ok(0),
                Place::Empty => return Err(ClearError::NoStore),
                Place::Closed => return Err(StoreError::Closed.into()),
            };
            match self.pay(self.debt.paying.lock(), &mut deleted) {
                Err(StoreError::OwnerGone)
                    if store.part() == Part::Nobody && Instant::now() < until =>
                {
                    // In short intervals, because a close waits for this lock.
                    store.insist_on_owner(until.min(Instant::now() + LOOK));
                }
                paid => return paid.map(|()| deleted).map_err(ClearError::from),
            }
        }
    }

    /// Whether pages may be served: no clear is outstanding.
    pub(super) fn is_clear(&self) -> bool {
        if !self.debt.is_owed() {
            return true;
        }
        // Other calls are misses in the meantime.
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
        match self.pay(paying, &mut deleted) {
            Ok(()) => {
                tracing::info!(deleted, "completed an earlier clear");
                true
            }
            Err(_) => false,
        }
    }

    fn pay(&self, mut paying: MutexGuard<'_, Paying>, deleted: &mut u64) -> Result<(), StoreError> {
        let asked = self.debt.asked.load(Ordering::SeqCst);
        if paying.asked != asked {
            *paying = Paying {
                asked,
                tried: paying.tried,
                ..Paying::default()
            };
        }
        let pools: Vec<Arc<Registered>> = self.pools.read().values().cloned().collect();
        let mut failed = None;
        for space in pools.iter().filter_map(|pool| pool.space.get()) {
            let name = space.namespace.fingerprint();
            if paying.done.contains(&name) {
                continue;
            }
            match space.clear() {
                Ok(pages) => {
                    *deleted += pages;
                    paying.done.push(name);
                }
                Err(error) => failed = Some(error),
            }
        }
        let Some(error) = failed else {
            self.debt.paid.fetch_max(asked, Ordering::SeqCst);
            return Ok(());
        };
        let why = error.to_string();
        if paying.logged != why {
            tracing::warn!(%error, "clear not finished: all lookups miss until then");
            paying.logged = why;
        }
        Err(error)
    }
}
