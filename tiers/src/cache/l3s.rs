//! The tiers below L2 of all components, and what a lookup finds in them together.

use std::sync::Arc;

use larder_format::PageKey;

use crate::core::TailLookup;
use crate::l3::L3;
use crate::tails::Legal;

/// The L3 of each component.
#[derive(Clone)]
pub(super) struct L3s {
    /// Of the model, then of its followers.
    pub(super) main: Vec<Arc<dyn L3>>,
    pub(super) tails: Vec<Arc<dyn L3>>,
}

impl L3s {
    /// Number of these pages that all have, counted from the first.
    pub(super) fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        let mut found = keys.len();
        for l3 in &self.main {
            found = l3.longest_prefix(&keys[..found]);
        }
        found
    }

    /// The prefixes that can be continued with the pages of a lookup.
    pub(super) fn legal(&self, lookup: &TailLookup, keys: &[PageKey], found: usize) -> Legal {
        let pages = lookup.before.len() + found;
        let all = lookup.before.iter().chain(keys);
        let all: Vec<PageKey> = all.take(pages).copied().collect();
        let held = lookup.pools.iter().map(|ask| {
            let mut held = ask.known.clone();
            held.truncate(pages);
            let asked: Vec<usize> = (0..held.len()).filter(|page| !held[*page]).collect();
            let keys: Vec<PageKey> = asked.iter().map(|page| all[*page]).collect();
            let found = self.tails.get(ask.pool).map(|l3| l3.contains(&keys));
            for (page, has) in asked.into_iter().zip(found.unwrap_or_default()) {
                held[page] = has;
            }
            (held, ask.trailing)
        });
        Legal::new(pages, &held.collect::<Vec<_>>())
    }
}
