//! The page store as L3.
//!
//! All pages of a cache have one size. So after the store has refused a page for a reason that
//! never changes, it is asked for no further one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use larder_engine::{
    Count, GetPage, GetStatus, Hint, NamespaceId, PageStore, PutOptions, PutPage, PutStatus,
    Refusal, StoreError,
};
use larder_format::{Namespace, PageKey};
use larder_store::fit::check_page;

use super::L3;

/// One namespace of a page store, in this process or in another.
pub struct StoreL3 {
    store: Arc<dyn PageStore>,
    id: NamespaceId,
    namespace: Namespace,
    options: PutOptions,
    /// It never takes a page.
    is_final: AtomicBool,
}

impl StoreL3 {
    /// The pages of this namespace.
    ///
    /// # Errors
    /// The segments of the store are smaller than a page. Or it cannot hold another namespace, or
    /// is closed.
    pub fn new(store: Arc<dyn PageStore>, namespace: &Namespace) -> Result<StoreL3, StoreError> {
        check_page(store.stats().segment_bytes, namespace.shape())?;
        let id = store.namespace(namespace)?;
        Ok(StoreL3 {
            store,
            id,
            namespace: namespace.clone(),
            options: PutOptions::default(),
            is_final: AtomicBool::new(false),
        })
    }

    /// Sets the options of its puts.
    #[must_use]
    pub fn with_puts(self, options: PutOptions) -> StoreL3 {
        StoreL3 { options, ..self }
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn PageStore> {
        &self.store
    }
}

/// Whether a page was refused for a reason that holds for all pages, as long as the store is open.
fn is_final(status: PutStatus) -> bool {
    matches!(
        status,
        PutStatus::Refused(Refusal::TooLarge | Refusal::WrongShape | Refusal::ReadOnly)
    )
}

impl L3 for StoreL3 {
    fn namespace(&self) -> Option<&Namespace> {
        Some(&self.namespace)
    }

    fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        self.store.longest_prefix(self.id, keys)
    }

    fn contains(&self, keys: &[PageKey]) -> Vec<bool> {
        self.store.contains(self.id, keys)
    }

    fn get(&self, pages: &mut [GetPage<'_, '_>]) -> usize {
        let statuses = self.store.get(self.id, pages, None);
        statuses
            .into_iter()
            .take_while(|status| GetStatus::is_hit(*status))
            .count()
    }

    fn put(&self, pages: &[PutPage<'_>]) -> usize {
        if self.is_final.load(Ordering::Relaxed) {
            return 0;
        }
        let statuses = self.store.put(self.id, pages, self.options);
        if statuses.iter().any(|status| is_final(*status)) {
            self.is_final.store(true, Ordering::Relaxed);
        }
        statuses
            .into_iter()
            .take_while(|status| PutStatus::is_present(*status))
            .count()
    }

    fn touch(&self, keys: &[PageKey]) {
        self.store.touch(self.id, keys, Hint::default());
    }

    fn count(&self, count: Count) {
        self.store.count(self.id, count);
    }
}
