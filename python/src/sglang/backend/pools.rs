//! The pools of this server: their registration, and the calls that name their pages.

use std::fmt;
use std::sync::{Arc, OnceLock};

use larder_engine::StoreError;
use larder_format::TENANT_FIELD;
use larder_handle::config::OnError;
use larder_handle::place::Misfit;
use larder_handle::region::move_in_background;
use larder_sync::Mutex;

use super::Backend;
use super::registered::{ALIGN, Memory, Registered};
use crate::sglang::pool::Pool;
use crate::sglang::space::{PoolFacts, SpaceError, namespace};
use crate::sglang::trial::Trial;

/// SGLang's name of the pool with the model's KV.
const ANCHOR: &str = "kv";

/// Why a pool cannot be registered.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// It has no valid namespace.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// Its parts are too long.
    #[error("pool {0}: a page of it is larger than 4 GiB")]
    TooLarge(String),
    /// The store returned an error.
    #[error("pool {0}: {1}")]
    Store(String, StoreError),
    /// None of its pages can ever be stored.
    #[error("pool {0}: {1}")]
    Misfit(String, Misfit),
}

impl Backend {
    /// Registers the pages of a pool. Returns a description of the result.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn register(&self, facts: &PoolFacts, memory: Memory) -> Result<String, RegisterError> {
        if self.is_inherited() {
            return Err(RegisterError::Store(facts.name.clone(), StoreError::Forked));
        }
        let parts = match &memory {
            Memory::Mapped(pool) => pool.part_bytes(),
            Memory::Flat(bytes) => vec![*bytes],
            Memory::Logical => Vec::new(),
        };
        let mut space = None;
        let mut named = "no bytes of its own".to_owned();
        if !parts.is_empty() {
            let sizes: Result<Vec<u32>, _> =
                parts.iter().map(|&part| u32::try_from(part)).collect();
            let sizes = sizes.map_err(|_| RegisterError::TooLarge(facts.name.clone()))?;
            // No log line has the tenant.
            named = namespace(&self.server, facts, &sizes)?.to_string();
            space = Some(namespace(&self.server, &self.with_tenant(facts), &sizes)?);
        }
        let (needs_bounce, is_aligned, is_huge) = match &memory {
            Memory::Mapped(pool) => (
                (!pool.is_whole()).then_some("parts are scattered by layer and are gathered"),
                pool.is_aligned(ALIGN),
                is_on_huge_pages(pool),
            ),
            Memory::Flat(_) | Memory::Logical => (None, false, false),
        };
        let place = match &memory {
            Memory::Mapped(_) if is_huge => "on huge memory pages",
            Memory::Mapped(_) => {
                "on ordinary memory pages, which are moved to huge ones unless they are pinned"
            }
            Memory::Flat(_) => "passed in page by page",
            Memory::Logical => "other pools determine the pages that can be restored",
        };
        let registered = Registered {
            parts,
            is_anchor: facts.name == ANCHOR,
            page_tokens: facts.page_tokens as usize,
            namespace: space,
            space: OnceLock::new(),
            gets: Trial::new(self.transfer, needs_bounce, is_aligned, is_huge),
            puts: Trial::new(self.transfer, needs_bounce, is_aligned, is_huge),
            described: format!("pool {}: {named}; {place}", facts.name),
            memory,
            left_out: Mutex::default(),
        };
        let mut line = format!(
            "{}; transfer {}",
            registered.described,
            registered.gets.describe()
        );
        // Held until the pool is listed; otherwise a store that is attached in the meantime would
        // miss it.
        let place = self.place.read();
        if let Some(store) = place.store() {
            let refused = |error| RegisterError::Store(facts.name.clone(), error);
            registered
                .enter(store, self.config.quota.as_deref())
                .map_err(refused)?;
            match registered.misfit(store) {
                Some(misfit @ Misfit::Never { .. }) if self.config.on_error == OnError::Fail => {
                    return Err(RegisterError::Misfit(facts.name.clone(), misfit));
                }
                Some(misfit) => {
                    tracing::warn!("a pool does not fit the store: {}: {misfit}", facts.name);
                    line = format!("{line}; {misfit}");
                }
                None => {}
            }
        }
        let registered = Arc::new(registered);
        if !is_huge && let Memory::Mapped(pool) = &registered.memory {
            let held = Arc::downgrade(&registered);
            let is_wanted = move || held.strong_count() > 0;
            move_in_background(pool.ranges(), is_wanted, |_| {});
        }
        self.pools.write().insert(facts.name.clone(), registered);
        Ok(line)
    }

    /// A pool whose pages are of the configured tenant.
    fn with_tenant(&self, facts: &PoolFacts) -> PoolFacts {
        let mut facts = facts.clone();
        let tenant = self.config.tenant.iter();
        facts
            .extra
            .extend(tenant.map(|name| (TENANT_FIELD.to_owned(), name.clone())));
        facts
    }

    pub(super) fn pool(&self, name: &str) -> Option<Arc<Registered>> {
        if self.is_inherited() {
            return None;
        }
        self.pools.read().get(name).cloned()
    }

    /// Calls `work` with a pool and the pages given by SGLang's indices.
    pub(super) fn with_slots(
        &self,
        name: &str,
        keys: usize,
        indices: &[i64],
        work: impl FnOnce(&Registered, &Pool, &[usize]) -> Vec<bool>,
    ) -> Vec<bool> {
        let Some(registered) = self.pool(name) else {
            self.refuse_batch(name, &"the pool was never registered");
            return vec![false; keys];
        };
        let pool = match &registered.memory {
            Memory::Logical => return vec![true; keys],
            Memory::Flat(_) => return vec![false; keys],
            Memory::Mapped(pool) => pool,
        };
        match pool.pages(indices, keys) {
            Ok(pages) => work(&registered, pool, &pages),
            Err(error) => {
                self.refuse_batch(name, &error);
                vec![false; keys]
            }
        }
    }

    /// Logs a batch that counts as missed as a whole.
    fn refuse_batch(&self, pool: &str, why: &dyn fmt::Display) {
        if !self.is_inherited()
            && let Some(more) = self.refused_batches.is_due()
        {
            tracing::warn!(
                pool,
                more,
                "a batch is refused: {why} (logged once a minute)"
            );
        }
    }

    /// Calls `work` with a pool whose pages are passed in as flat buffers of these lengths.
    pub(super) fn with_flat(
        &self,
        name: &str,
        keys: usize,
        lengths: &[usize],
        work: impl FnOnce(&Registered) -> Vec<bool>,
    ) -> Vec<bool> {
        let Some(registered) = self.pool(name) else {
            return vec![false; keys];
        };
        if matches!(registered.memory, Memory::Logical) {
            return vec![true; keys];
        }
        let page_bytes = registered.page_bytes();
        if lengths.len() != keys || lengths.iter().any(|&length| length != page_bytes) {
            self.refuse_batch(name, &"its flat pages are of another size than the pool's");
            return vec![false; keys];
        }
        work(&registered)
    }
}

/// Whether a pool is on huge pages. Uses only the list of mappings, because counting the pages
/// would take seconds for a large pool.
fn is_on_huge_pages(pool: &Pool) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    lies_on_huge_pages(&maps, pool.base())
}

fn lies_on_huge_pages(maps: &str, address: usize) -> bool {
    let covers = |line: &str| {
        let (start, end) = line.split_ascii_whitespace().next()?.split_once('-')?;
        let number = |text| usize::from_str_radix(text, 16).ok();
        Some((number(start)?..number(end)?).contains(&address))
    };
    maps.lines()
        .find(|line| covers(line) == Some(true))
        .is_some_and(|line| line.contains("hugepage") || line.contains("hugetlb"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_detected_from_the_mapping() {
        let maps = "1000-3000 rw-s 00000000 00:01 12 /dev/zero (deleted)\n\
                    200000-600000 rw-s 00000000 00:0f 13 /anon_hugepage (deleted)\n";
        assert!(!lies_on_huge_pages(maps, 0x1000));
        assert!(lies_on_huge_pages(maps, 0x3f_ffff));
        assert!(!lies_on_huge_pages(maps, 0x60_0000));
    }
}
