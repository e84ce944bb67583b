//! A store in memory that evicts and refuses, and takes no wrong byte.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Instant;

use larder_core::grants::Ask;
use larder_engine::{
    GetPage, GetStatus, Hint, MissReason, NamespaceId, PageStore, PutOptions, PutPage, PutStatus,
    Stats, StoreError,
};
use larder_format::{Namespace, PageKey};
use larder_store::beneath::Beneath;
use larder_sync::Mutex;

use super::{Agent, PAGES, content, key, namespace};

pub struct Shelf {
    pages: Mutex<HashSet<PageKey>>,
    agent: Weak<Agent>,
}

impl Shelf {
    pub fn new(agent: &Arc<Agent>) -> Shelf {
        Shelf {
            pages: Mutex::default(),
            agent: Arc::downgrade(agent),
        }
    }

    pub fn keep(&self, key: &PageKey) {
        self.pages.lock().insert(*key);
    }

    pub fn evict(&self, key: &PageKey) {
        self.pages.lock().remove(key);
    }

    /// The disk is replaced.
    pub fn clear(&self) {
        self.pages.lock().clear();
    }

    pub fn holds(&self, key: &PageKey) -> bool {
        self.pages.lock().contains(key)
    }

    /// Pages of a chain without a gap from its head.
    pub fn prefix(&self, chain: usize) -> usize {
        let pages = self.pages.lock();
        (0..PAGES)
            .take_while(|at| pages.contains(&key(chain, *at)))
            .count()
    }
}

impl PageStore for Shelf {
    fn namespace(&self, _: &Namespace) -> Result<NamespaceId, StoreError> {
        Ok(NamespaceId(0))
    }

    fn put(&self, _: NamespaceId, pages: &[PutPage<'_>], _: PutOptions) -> Vec<PutStatus> {
        let asks = pages.iter().map(|page| Ask {
            key: page.key,
            parent: page.parent,
            depth: page.depth,
        });
        if let Some(agent) = self.agent.upgrade() {
            agent.asked(namespace().fingerprint(), &asks.collect::<Vec<_>>());
        }
        let put = |page: &PutPage<'_>| {
            assert!(
                *page.parts[0] == content(&page.key),
                "a wrong byte was stored"
            );
            self.keep(&page.key);
            PutStatus::Stored
        };
        pages.iter().map(put).collect()
    }

    fn get(
        &self,
        _: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        _: Option<Instant>,
    ) -> Vec<GetStatus> {
        let mut get = |page: &mut GetPage<'_, '_>| match self.holds(&page.key) {
            true => {
                page.parts[0].copy_from_slice(&content(&page.key));
                GetStatus::Hit
            }
            false => GetStatus::Miss(MissReason::Absent),
        };
        pages.iter_mut().map(&mut get).collect()
    }

    fn longest_prefix(&self, _: NamespaceId, keys: &[PageKey]) -> usize {
        keys.iter().take_while(|key| self.holds(key)).count()
    }

    fn contains(&self, _: NamespaceId, keys: &[PageKey]) -> Vec<bool> {
        keys.iter().map(|key| self.holds(key)).collect()
    }

    fn touch(&self, _: NamespaceId, _: &[PageKey], _: Hint) {}

    fn delete(&self, _: NamespaceId, keys: &[PageKey]) -> Result<u64, StoreError> {
        keys.iter().for_each(|key| self.evict(key));
        Ok(keys.len() as u64)
    }

    fn clear_namespace(&self, _: NamespaceId) -> Result<u64, StoreError> {
        Ok(0)
    }

    fn flush(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn register(&self, memory: &'static mut [u8]) -> (&'static mut [u8], String) {
        (memory, String::new())
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }

    fn close(&self) -> Result<(), StoreError> {
        Ok(())
    }
}
