//! Pages of an object, into a store.

use std::io::IoSlice;

use larder_engine::{NamespaceId, PageStore, PutOptions, PutPage, PutStatus};
use larder_format::{BLOCK_BYTES, PageShape};

use crate::buffer::Buffer;
use crate::error::RemoteError;
use crate::run::{OpenedPage, PageFault};

/// Bytes of plain pages that are put by one call.
const PUT_BYTES: usize = 32 << 20;

/// The outcome of a put of the pages of an object.
#[derive(Debug, Default)]
pub struct Put {
    /// Of the pages that were given to the store.
    pub statuses: Vec<PutStatus>,
    /// Pages that may not be used.
    pub faulty: Vec<PageFault>,
}

/// Puts the pages of an object that may be used.
///
/// # Errors
/// There is no memory to decode pages.
pub fn put(
    store: &dyn PageStore,
    namespace: NamespaceId,
    shape: &PageShape,
    opened: &[OpenedPage<'_>],
    options: PutOptions,
) -> Result<Put, RemoteError> {
    let page_bytes = shape.page_blocks() as usize * BLOCK_BYTES;
    let at_once = (PUT_BYTES / page_bytes).max(1);
    let mut put = Put::default();
    for opened in opened.chunks(at_once) {
        let coded = opened.iter().filter(|opened| opened.page.saved > 0);
        let mut memory = Buffer::of(coded.count() * page_bytes)?;
        let mut rest = &mut memory[..];
        let mut good = Vec::with_capacity(opened.len());
        for opened in opened {
            let (memory, behind) = match opened.page.saved {
                0 => rest.split_at_mut(0),
                _ => rest.split_at_mut(page_bytes),
            };
            rest = behind;
            match opened.plain(shape, memory) {
                Ok(plain) => good.push((opened.page, parts_of(plain, shape))),
                Err(fault) => put.faulty.push(fault),
            }
        }
        let pages: Vec<PutPage<'_>> = good
            .iter()
            .map(|(page, parts)| PutPage {
                key: page.key,
                parent: page.parent.map(|parent| parent.padded()),
                depth: page.depth,
                parts,
            })
            .collect();
        put.statuses.extend(store.put(namespace, &pages, options));
    }
    Ok(put)
}

/// The parts of a page, without their padding.
fn parts_of<'a>(page: &'a [u8], shape: &PageShape) -> Vec<IoSlice<'a>> {
    let part = |part| {
        let start = usize::try_from(shape.part_offset(part)).unwrap_or(usize::MAX);
        IoSlice::new(&page[start..][..shape.part_bytes(part) as usize])
    };
    (0..shape.parts()).map(part).collect()
}
