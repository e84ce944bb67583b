//! A pool of this server: its memory, and its namespace in the store.

use std::sync::{Arc, OnceLock};

use larder_engine::StoreError;
use larder_format::{Namespace, PageKey};
use larder_handle::place::Misfit;
use larder_handle::store::{Handle, Space};
use larder_sync::Mutex;

use crate::sglang::pool::Pool;
use crate::sglang::trial::Trial;

/// Alignment required for direct transfers to the device, in bytes.
pub(super) const ALIGN: usize = 4096;

/// How this backend accesses the pages of a pool.
pub enum Memory {
    /// By address.
    Mapped(Pool),
    /// Pages are passed in one by one as flat buffers of this length in bytes.
    Flat(usize),
    /// The pool holds no bytes: every page counts as present, and other pools determine the pages
    /// that can be restored (DeepSeek-V4).
    Logical,
}

/// A registered pool.
pub(super) struct Registered {
    pub(super) memory: Memory,
    /// Bytes per part.
    pub(super) parts: Vec<usize>,
    /// Whether lookups begin with it: the pool of the model's KV.
    pub(super) is_anchor: bool,
    pub(super) page_tokens: usize,
    /// The namespace of its pages; `None` if it holds no bytes.
    pub(super) namespace: Option<Namespace>,
    /// The namespace in the store, set once there is a store.
    pub(super) space: OnceLock<Space>,
    pub(super) gets: Trial,
    pub(super) puts: Trial,
    pub(super) described: String,
    /// The last page of a chain whose tail was left out. The pages that follow it are left out too.
    pub(super) left_out: Mutex<Option<PageKey>>,
}

impl Registered {
    pub(super) fn page_bytes(&self) -> usize {
        self.parts.iter().sum()
    }

    pub(super) fn bytes_of(&self, pages: usize) -> u64 {
        (pages * self.page_bytes()) as u64
    }

    /// Bytes per page on the device; `None` if the pool holds no bytes.
    pub(super) fn stored_bytes(&self) -> Option<u64> {
        let shape = self.namespace.as_ref()?.shape();
        Some(u64::from(shape.page_blocks()) * ALIGN as u64)
    }

    /// Why its pages do not suit a store, if they do not.
    pub(super) fn misfit(&self, store: &Handle) -> Option<Misfit> {
        store.misfit(self.stored_bytes()?)
    }

    /// Registers its namespace in the store, with its quota if the configuration has one.
    pub(super) fn enter(&self, store: &Arc<Handle>, quota: Option<&str>) -> Result<(), StoreError> {
        if let Some(namespace) = &self.namespace {
            let space = store.space(namespace.clone())?;
            if let Some(Err(error)) = quota.map(|quota| space.limit(quota)) {
                tracing::warn!("the quota of a namespace is not set: {error}");
            }
            self.space.get_or_init(|| space);
        }
        Ok(())
    }
}
