//! Lookups.

use std::sync::Arc;

use larder_engine::Count as Counted;
use larder_format::PageKey;
use larder_handle::chain::Chain;

use super::{Backend, Memory, Registered};
use crate::sglang::hits::{self, Hits, Policy};
use crate::sglang::meters::Count;

/// The request of a lookup, for the counters of tokens.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Whether it is the request's first lookup.
    pub is_first: bool,
    /// Pages of the request from the first of the lookup on. SGLang asks for no page behind a
    /// missing one.
    pub pages: usize,
}

impl Backend {
    /// Number of leading `keys` that are stored in `pool` and worth a read. Counts the tokens of
    /// the request, if there is one.
    pub fn exists(
        self: &Arc<Self>,
        pool: &str,
        keys: &[PageKey],
        chain: Chain,
        request: Option<Request>,
    ) -> usize {
        let found = self.found(pool, keys, chain);
        self.count_tokens(pool, keys.len(), found, request);
        self.worthwhile(keys, found, &[(pool, Policy::All)])
    }

    fn count_tokens(&self, pool: &str, asked: usize, found: usize, request: Option<Request>) {
        let request = request.filter(|_| self.server.is_first_rank());
        let (Some(request), Some(pool)) = (request, self.pool(pool)) else {
            return;
        };
        // The rest of a request behind its first missing page.
        let asked = match found < asked {
            true => request.pages.max(asked),
            false => found,
        };
        let tokens = |pages: usize| (pages * pool.page_tokens) as u64;
        if let Some((_store, space)) = self.space_of(&pool) {
            space.count(Counted::Asked {
                tokens: tokens(asked),
                found: tokens(found),
                is_first: request.is_first,
            });
        }
    }

    fn found(&self, pool: &str, keys: &[PageKey], chain: Chain) -> usize {
        let Some(pool) = self.pool(pool) else {
            return 0;
        };
        self.meters.add(Count::LookedUp, keys.len());
        let found = self.leading(&pool, keys, chain);
        self.meters.add(Count::Found, found);
        found
    }

    fn leading(&self, pool: &Registered, keys: &[PageKey], chain: Chain) -> usize {
        if matches!(pool.memory, Memory::Logical) {
            return keys.len();
        }
        let Some((_store, space)) = self.space_of(pool) else {
            return 0;
        };
        let Some(before) = chain.before else {
            return space.longest_prefix(keys);
        };
        // With the page before them: a lookup of consecutive pages records their parents, and shows
        // a remote beneath the store where they stand in their chain.
        let after: Vec<PageKey> = std::iter::once(before)
            .chain(keys.iter().copied())
            .collect();
        match space.longest_prefix(&after) {
            0 => space.longest_prefix(keys),
            found => found - 1,
        }
    }

    /// The pages that several pools hold of a chain whose KV is in `anchor`, as far as they are
    /// worth a read.
    pub fn exists_in(
        self: &Arc<Self>,
        anchor: &str,
        keys: &[PageKey],
        chain: Chain,
        pools: &[(String, Policy)],
        request: Option<Request>,
    ) -> Hits {
        let pages = self.found(anchor, keys, chain);
        let held = pools
            .iter()
            .map(|(name, policy)| (*policy, self.held(name, &keys[..pages])))
            .collect::<Vec<_>>();
        let mut hits = hits::restorable(pages, &held);
        self.count_tokens(anchor, keys.len(), hits.pages, request);
        let read: Vec<(&str, Policy)> = std::iter::once((anchor, Policy::All))
            .chain(pools.iter().map(|(name, policy)| (name.as_str(), *policy)))
            .collect();
        hits.limit(self.worthwhile(keys, hits.pages, &read));
        hits
    }

    fn held(&self, pool: &str, keys: &[PageKey]) -> Vec<bool> {
        let Some(pool) = self.pool(pool) else {
            return Vec::new();
        };
        if matches!(pool.memory, Memory::Logical) {
            return vec![true; keys.len()];
        }
        let Some((_store, space)) = self.space_of(&pool) else {
            return Vec::new();
        };
        space.held(keys, None)
    }
}
