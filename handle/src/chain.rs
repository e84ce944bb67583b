//! Where pages stand in their chain.

use std::io::IoSlice;

use larder_engine::PutPage;
use larder_format::PageKey;

/// The position in its chain of a batch of consecutive pages.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chain {
    /// The key before the first key of the batch, if known.
    pub before: Option<PageKey>,
    /// Number of pages before the batch.
    pub depth: u32,
}

impl Chain {
    /// The position after `keys` of this batch.
    #[must_use]
    pub fn after(self, keys: &[PageKey]) -> Chain {
        let more = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        Chain {
            before: keys.last().copied().or(self.before),
            depth: self.depth.saturating_add(more),
        }
    }
}

/// The pages to put, with these parts. Each key is the parent of the next; without a chain, no page
/// has a parent.
pub fn pages<'a>(
    keys: &[PageKey],
    chain: Option<Chain>,
    parts: impl Iterator<Item = &'a [IoSlice<'a>]>,
) -> Vec<PutPage<'a>> {
    let page = |(at, parts): (usize, _)| {
        let Chain { before, depth } = chain
            .map(|chain| chain.after(&keys[..at]))
            .unwrap_or_default();
        PutPage {
            key: keys[at],
            parent: before,
            depth,
            parts,
        }
    };
    parts.take(keys.len()).enumerate().map(page).collect()
}
