//! The page store as L3.

use std::sync::Arc;

use larder_engine::{
    GetPage, GetStatus, Hint, NamespaceId, PageStore, PutOptions, PutPage, PutStatus, StoreError,
};
use larder_format::{Namespace, PageKey};
use larder_engine::fit::check_page;

use super::L3;

/// One namespace of a page store, in this process or in another.
pub struct StoreL3 {
    store: Arc<dyn PageStore>,
    id: NamespaceId,
    namespace: Namespace,
    options: PutOptions,
}

impl StoreL3 {
    /// The pages of this namespace.
    ///
    /// # Errors
    /// The segments of the store are smaller than a page. Or it cannot hold another namespace, or
    /// is closed.
    pub fn new(store: Arc<dyn PageStore>, namespace: &Namespace) -> Result<StoreL3, StoreError> {
        let id = store.namespace(namespace)?;
        Ok(StoreL3 {
            store,
            id,
            namespace: namespace.clone(),
            options: PutOptions::default(),
        })
        check_page(store.stats().segment_bytes, namespace.shape())?;
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

impl L3 for StoreL3 {
    fn namespace(&self) -> Option<&Namespace> {
        Some(&self.namespace)
    }

    fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        self.store.longest_prefix(self.id, keys)
    }

    fn get(&self, pages: &mut [GetPage<'_, '_>]) -> usize {
        let statuses = self.store.get(self.id, pages, None);
        statuses
            .into_iter()
            .take_while(|status| GetStatus::is_hit(*status))
            .count()
    }

    fn put(&self, pages: &[PutPage<'_>]) -> usize {
        let statuses = self.store.put(self.id, pages, self.options);
        statuses
            .into_iter()
            .take_while(|status| PutStatus::is_present(*status))
            .count()
    }

    fn touch(&self, keys: &[PageKey]) {
        self.store.touch(self.id, keys, Hint::default());
    }
}
