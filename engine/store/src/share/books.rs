//! The books of a shared store: a client asks the owner for them.

use larder_base::ids::NamespaceId;
use larder_core::core::Evictions;
use larder_format::{Fingerprint, KeyPrefix, Namespace, PageKey};

use super::keys::blob;
use super::remote::Remote;
use super::role::{Client, Decider, Role};
use super::wire::{DigestBytes, KEYS_MAX, Reply, Request};
use super::{Inner, Store};
use crate::error::StoreError;
use crate::inventory::{Cursor, Inventory, Kept, KeptPage, Leased, Listing, Usage};

impl Inventory for Remote {
    fn lease(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<Leased> {
        let mut outcomes = Vec::with_capacity(keys.len());
        for some in keys.chunks(KEYS_MAX) {
            let request = Request::Lease {
                namespace: namespace.0,
                keys: blob(some),
            };
            match self.ask_fast(&request) {
                Ok(Reply::Leased(leased)) if leased.len() == some.len() => outcomes.extend(leased),
                _ => outcomes.extend(some.iter().map(|_| Leased::Absent)),
            }
        }
        outcomes
    }

    fn unlease(&self, namespace: NamespaceId, keys: &[PageKey]) {
        for some in keys.chunks(KEYS_MAX) {
            // If the message is lost, the owner is lost too, and the leases with it.
            let _ = self.ask_fast(&Request::Unlease {
                namespace: namespace.0,
                keys: blob(some),
            });
        }
    }

    fn keep(
        &self,
        namespace: NamespaceId,
        keys: &[PageKey],
        until_unix_s: u32,
    ) -> Result<Vec<Kept>, StoreError> {
        let mut outcomes = Vec::with_capacity(keys.len());
        for some in keys.chunks(KEYS_MAX) {
            let request = Request::Keep {
                namespace: namespace.0,
                keys: blob(some),
                until_unix_s,
            };
            match self.ask(&request) {
                Ok(Reply::Kept(kept)) if kept.len() == some.len() => outcomes.extend(kept),
                reply => return Err(failure(reply.ok())),
            }
        }
        Ok(outcomes)
    }

    fn kept(&self, from: u32) -> Result<Vec<KeptPage>, StoreError> {
        let page = |(digest, key, until_unix_s, bytes): (DigestBytes, _, u32, u64)| KeptPage {
            namespace: Fingerprint::from_bytes(digest),
            key: KeyPrefix::from_bytes(key),
            until_unix_s,
            bytes,
        };
        match self.ask(&Request::KeptPages { from }) {
            Ok(Reply::KeptPages(pages)) => Ok(pages.into_iter().map(page).collect()),
            reply => Err(failure(reply.ok())),
        }
    }

    fn list(&self, namespace: NamespaceId, cursor: Cursor) -> Result<Listing, StoreError> {
        let (namespace, Cursor(cursor)) = (namespace.0, cursor);
        match self.ask(&Request::List { namespace, cursor }) {
            Ok(Reply::Listed { keys, next }) => Ok(Listing {
                keys: keys.into_iter().map(PageKey::from_bytes).collect(),
                next: next.map(Cursor),
            }),
            reply => Err(failure(reply.ok())),
        }
    }

    fn evictions(&self, since: u64) -> Result<Evictions, StoreError> {
        let page = |(namespace, key): (DigestBytes, _)| {
            (Fingerprint::from_bytes(namespace), PageKey::from_bytes(key))
        };
        match self.ask(&Request::Evictions { since }) {
            Ok(Reply::Evicted {
                next,
                missed,
                pages,
            }) => Ok(Evictions {
                next,
                missed,
                pages: pages.into_iter().map(page).collect(),
            }),
            reply => Err(failure(reply.ok())),
        }
    }

    fn usage(&self) -> Result<Vec<Usage>, StoreError> {
        let row = |(digest, pages, bytes, plain_bytes): (DigestBytes, u64, u64, u64)| Usage {
            namespace: Fingerprint::from_bytes(digest),
            pages,
            bytes,
            plain_bytes,
        };
        match self.ask(&Request::Usage) {
            Ok(Reply::Usage(rows)) => Ok(rows.into_iter().map(row).collect()),
            reply => Err(failure(reply.ok())),
        }
    }

    fn records(&self) -> Result<Vec<Namespace>, StoreError> {
        match self.ask(&Request::Records) {
            Ok(Reply::Records(records)) => {
                let named = records.iter().filter_map(|(name, record)| {
                    let record = Namespace::decode(record).ok()?;
                    Some(record.named(Fingerprint::from_bytes(*name)))
                });
                Ok(named.collect())
            }
            reply => Err(failure(reply.ok())),
        }
    }
}

fn failure(reply: Option<Reply>) -> StoreError {
    match reply {
        Some(Reply::Failed(failure)) => failure.into(),
        _ => StoreError::OwnerGone,
    }
}

impl Inner {
    /// Calls `ask` with the books of the owner.
    fn with_books<R>(
        &self,
        ask: impl FnOnce(&dyn Inventory) -> Result<R, StoreError>,
    ) -> Result<R, StoreError> {
        match self.role().as_deref() {
            Some(Role::Owner(owner)) => ask(&*owner.store),
            Some(Role::Client(client)) => ask(&*client.remote),
            Some(Role::Nobody | Role::Closed) | None => Err(self.unavailable()),
        }
    }
}

fn books<'a>(decider: Decider<'a>) -> &'a dyn Inventory {
    match decider {
        Decider::Owner(owner) => &*owner.store,
        Decider::Client(Client { remote, .. }) => &**remote,
    }
}

impl Inventory for Store {
    fn lease(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<Leased> {
        self.inner
            .with(namespace, |decider, space| {
                books(decider).lease(space.id, keys)
            })
            .unwrap_or_else(|| vec![Leased::Absent; keys.len()])
    }

    fn unlease(&self, namespace: NamespaceId, keys: &[PageKey]) {
        self.inner.with(namespace, |decider, space| {
            books(decider).unlease(space.id, keys);
        });
    }

    fn keep(
        &self,
        namespace: NamespaceId,
        keys: &[PageKey],
        until_unix_s: u32,
    ) -> Result<Vec<Kept>, StoreError> {
        self.inner
            .with(namespace, |decider, space| {
                books(decider).keep(space.id, keys, until_unix_s)
            })
            .unwrap_or_else(|| Err(self.inner.unavailable()))
    }

    fn kept(&self, from: u32) -> Result<Vec<KeptPage>, StoreError> {
        self.inner.with_books(|books| books.kept(from))
    }

    fn list(&self, namespace: NamespaceId, cursor: Cursor) -> Result<Listing, StoreError> {
        self.inner
            .with(namespace, |decider, space| {
                books(decider).list(space.id, cursor)
            })
            .unwrap_or_else(|| Err(self.inner.unavailable()))
    }

    fn evictions(&self, since: u64) -> Result<Evictions, StoreError> {
        self.inner.with_books(|books| books.evictions(since))
    }

    fn usage(&self) -> Result<Vec<Usage>, StoreError> {
        self.inner.with_books(|books| books.usage())
    }

    fn records(&self) -> Result<Vec<Namespace>, StoreError> {
        self.inner.with_books(|books| books.records())
    }
}
