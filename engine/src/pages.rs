//! The pages of one namespace, and the chains they form. An engine holds them instead of ids,
//! parents and depths.

use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroUsize;
use std::ops::Deref;

use larder_base::ids::NamespaceId;
use larder_base::runtime::Instant;
use larder_format::{Namespace, PageKey, TokenUnits, page_keys};

use larder_core::hint::Hint;
use larder_core::status::{MissReason, PutStatus};
use larder_store::api::{GetPage, LentPage, PageStore, PutOptions, PutPage};
use larder_store::error::StoreError;
use larder_store::fit::check_page;

/// Consecutive pages of one prompt: their keys, the key before the first, and its depth.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    before: Option<PageKey>,
    depth: u32,
    keys: Vec<PageKey>,
}

impl Chain {
    /// A chain from its head.
    #[must_use]
    pub fn new(keys: Vec<PageKey>) -> Chain {
        Chain::after(None, 0, keys)
    }

    /// A part of a chain: behind `depth` pages, of which the last has the key `before`.
    #[must_use]
    pub fn after(before: Option<PageKey>, depth: u32, keys: Vec<PageKey>) -> Chain {
        Chain {
            before,
            depth,
            keys,
        }
    }

    /// The keys, in order.
    #[must_use]
    pub fn keys(&self) -> &[PageKey] {
        &self.keys
    }

    /// The part behind the first `pages` pages; empty if there are no more.
    #[must_use]
    pub fn skip(&self, pages: usize) -> Chain {
        let pages = pages.min(self.keys.len());
        let depth = u32::try_from(pages).unwrap_or(u32::MAX);
        Chain {
            before: self.before_page(pages),
            depth: self.depth.saturating_add(depth),
            keys: self.keys[pages..].to_vec(),
        }
    }

    /// The pages to put, with these parts; as many as the shorter of both.
    pub fn pages<'a>(
        &self,
        parts: impl IntoIterator<Item = &'a [IoSlice<'a>]>,
    ) -> Vec<PutPage<'a>> {
        let pages = self.keys.iter().zip(parts).enumerate();
        pages
            .map(|(at, (key, parts))| PutPage {
                key: *key,
                parent: self.before_page(at),
                depth: self
                    .depth
                    .saturating_add(u32::try_from(at).unwrap_or(u32::MAX)),
                parts,
            })
            .collect()
    }

    /// The key before the page at `at`.
    fn before_page(&self, at: usize) -> Option<PageKey> {
        match at.checked_sub(1) {
            Some(before) => self.keys.get(before).copied(),
            None => self.before,
        }
    }
}

/// The pages of one namespace in a store: `S` is a `&Store`, an `Arc<Store>`, or a pointer to any
/// other [`PageStore`].
#[derive(Clone, Debug)]
pub struct NamespaceHandle<S> {
    store: S,
    id: NamespaceId,
    namespace: Namespace,
}

impl<S: Deref<Target: PageStore>> NamespaceHandle<S> {
    /// Registers a namespace.
    ///
    /// # Errors
    /// Those of [`PageStore::namespace`]; [`StoreError::PageTooLarge`].
    pub fn new(store: S, namespace: Namespace) -> Result<NamespaceHandle<S>, StoreError> {
        check_page(store.stats().segment_bytes, namespace.shape())?;
        let id = store.namespace(&namespace)?;
        Ok(NamespaceHandle {
            store,
            id,
            namespace,
        })
    }

    /// Its id, for the calls of [`PageStore`].
    #[must_use]
    pub fn id(&self) -> NamespaceId {
        self.id
    }

    /// The namespace.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The chain of a prompt: one key for each full page of its tokens. Tokens behind the last full
    /// page have no key: they are computed again.
    #[must_use]
    pub fn chain(&self, tokens: &[u64]) -> Chain {
        let page_tokens =
            usize::try_from(self.namespace.fields().page_tokens).unwrap_or(usize::MAX);
        let page_tokens = NonZeroUsize::new(page_tokens).unwrap_or(NonZeroUsize::MIN);
        Chain::new(page_keys(tokens, page_tokens, None, TokenUnits::Single))
    }

    /// Buffers for so many pages, aligned for the device, each with the parts of the namespace.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn buffers(&self, pages: usize) -> std::io::Result<Vec<LentPage>> {
        let shape = *self.namespace.shape();
        (0..pages).map(|_| LentPage::zeroed(shape)).collect()
    }

    /// See [`PageStore::longest_prefix`].
    #[must_use]
    pub fn longest_prefix(&self, chain: &Chain) -> usize {
        self.store.longest_prefix(self.id, chain.keys())
    }

    /// Reads pages of a chain from its first on, as many as there are `slots` for. Returns how many
    /// were read without a gap; the contents of the slots behind them are unspecified.
    pub fn read_prefix<'a, P: AsMut<[IoSliceMut<'a>]>>(
        &self,
        chain: &Chain,
        slots: &mut [P],
        deadline: Option<Instant>,
    ) -> usize {
        let keys = chain.keys();
        let found = self.store.longest_prefix(self.id, keys).min(slots.len());
        let pages = keys.iter().zip(&mut slots[..found]);
        let mut pages: Vec<GetPage<'_, '_>> = pages
            .map(|(key, parts)| GetPage {
                key: *key,
                parts: parts.as_mut(),
            })
            .collect();
        let statuses = self.store.get(self.id, &mut pages, deadline);
        statuses.iter().take_while(|s| s.is_hit()).count()
    }

    /// Stores the pages of a chain, as many as there are `slots` of; one status a page.
    pub fn append<'a, P: AsRef<[IoSlice<'a>]>>(
        &self,
        chain: &Chain,
        slots: &'a [P],
        options: PutOptions,
    ) -> Vec<PutStatus> {
        let pages = chain.pages(slots.iter().map(AsRef::as_ref));
        self.store.put(self.id, &pages, options)
    }

    /// Reads pages of a chain into memory lent by the store. See [`PageStore::get_lent`].
    #[must_use]
    pub fn get_lent(
        &self,
        chain: &Chain,
        deadline: Option<Instant>,
    ) -> Vec<Result<LentPage, MissReason>> {
        self.store.get_lent(self.id, chain.keys(), deadline)
    }

    /// See [`PageStore::touch`].
    pub fn touch(&self, chain: &Chain, hint: Hint) {
        self.store.touch(self.id, chain.keys(), hint);
    }

    /// See [`PageStore::delete`].
    ///
    /// # Errors
    /// When the deletion could not be recorded.
    pub fn delete(&self, chain: &Chain) -> Result<u64, StoreError> {
        self.store.delete(self.id, chain.keys())
    }
}
