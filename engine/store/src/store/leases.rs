//! The leases that a handle has taken.

use std::collections::HashMap;

use larder_base::ids::NamespaceId;
use larder_base::runtime::Mutex;
use larder_core::index::Leased;
use larder_format::PageKey;

use crate::inventory::Inventory;

/// The leases that one handle has taken, so that it returns no others.
///
/// If a leased page was deleted, and is put and leased again by another handle, the return of the
/// first lease ends the second: the page may then be evicted early.
#[derive(Debug, Default)]
pub struct LeaseBook(Mutex<Entered>);

#[derive(Debug, Default)]
struct Entered {
    counts: HashMap<(NamespaceId, PageKey), u32>,
    /// The handle has gone, and takes no more.
    is_over: bool,
}

impl LeaseBook {
    /// Takes leases, and enters them.
    pub(crate) fn lease(
        &self,
        books: &(impl Inventory + ?Sized),
        namespace: NamespaceId,
        keys: &[PageKey],
    ) -> Vec<Leased> {
        let mut taken = self.0.lock();
        if taken.is_over {
            return vec![Leased::Absent; keys.len()];
        }
        let outcomes = books.lease(namespace, keys);
        for (key, _) in keys
            .iter()
            .zip(&outcomes)
            .filter(|(_, leased)| **leased == Leased::Yes)
        {
            *taken.counts.entry((namespace, *key)).or_default() += 1;
        }
        outcomes
    }

    /// Returns leases that are entered.
    pub(crate) fn unlease(
        &self,
        books: &(impl Inventory + ?Sized),
        namespace: NamespaceId,
        keys: &[PageKey],
    ) {
        let mut taken = self.0.lock();
        let is_own = |key: &&PageKey| {
            let name = (namespace, **key);
            let Some(count) = taken.counts.get_mut(&name) else {
                return false;
            };
            *count -= 1;
            if *count == 0 {
                taken.counts.remove(&name);
            }
            true
        };
        let own: Vec<PageKey> = keys.iter().filter(is_own).copied().collect();
        drop(taken);
        books.unlease(namespace, &own);
    }

    /// Returns all of them, for a handle that has gone.
    pub(crate) fn end(&self, books: &(impl Inventory + ?Sized)) {
        let mut taken = self.0.lock();
        taken.is_over = true;
        for ((namespace, key), count) in std::mem::take(&mut taken.counts) {
            for _ in 0..count {
                books.unlease(namespace, &[key]);
            }
        }
    }
}
