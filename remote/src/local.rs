//! Pages of an object, into a store.

use std::io::IoSlice;

use larder_engine::{NamespaceId, PageStore, PutOptions, PutPage, PutStatus};
use larder_format::PageShape;

use crate::run::OpenedPage;

/// Puts the pages of an object that were verified; one status for each of them.
pub fn put(
    store: &dyn PageStore,
    namespace: NamespaceId,
    shape: &PageShape,
    opened: &[&OpenedPage<'_>],
    options: PutOptions,
) -> Vec<PutStatus> {
    let payloads = opened.iter().filter_map(|opened| opened.payload.ok());
    let parts: Vec<Vec<IoSlice<'_>>> = payloads
        .map(|payload| {
            let part = |part| {
                let start = usize::try_from(shape.part_offset(part)).unwrap_or(usize::MAX);
                IoSlice::new(&payload[start..][..shape.part_bytes(part) as usize])
            };
            (0..shape.parts()).map(part).collect()
        })
        .collect();
    let good = opened.iter().filter(|opened| opened.payload.is_ok());
    let pages: Vec<PutPage<'_>> = good
        .zip(&parts)
        .map(|(opened, parts)| PutPage {
            key: opened.page.key,
            parent: opened.page.parent.map(|parent| parent.padded()),
            depth: opened.page.depth,
            parts,
        })
        .collect();
    store.put(namespace, &pages, options)
}
