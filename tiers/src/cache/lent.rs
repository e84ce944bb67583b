//! Pages of the host pool, lent to an L3 thread as slices for the duration of an order.
//!
//! The pool returns addresses; the core's orders define which page may be used. A [`LentPages`] is
//! created from an order and lives until its answer has been sent. The core does not reuse any page
//! of the order before it has the answer. This is the safety argument for every slice created here.
//!
//! A page of a `layer_first` pool consists of one piece per layer and part, which can exceed the
//! number of pieces allowed in the store. Such a page is copied through a buffer in
//! `page_first_direct` order, with one piece per part.

use std::io::{IoSlice, IoSliceMut};

use larder_engine::{GetPage, PutPage};
use larder_format::PageKey;
use larder_kernels::{DeviceError, L2Pool, Layout};

use crate::l3::L3;
use crate::runs::{L2, Runs};

/// The pages of an order.
pub(super) struct LentPages {
    pool: L2Pool,
    pages: Vec<u32>,
}

impl LentPages {
    /// Lends the pages of an order.
    ///
    /// # Safety
    /// Until this value is dropped, no other code writes these pages. For [`LentPages::get`], no
    /// other code reads them either.
    ///
    /// # Errors
    /// The pool does not have all of them.
    pub(super) unsafe fn new(pool: &L2Pool, runs: &Runs<L2>) -> Result<LentPages, DeviceError> {
        let pages: Vec<u32> = runs.page_numbers().collect();
        for page in &pages {
            let _exists = pool.page_runs(*page)?;
        }
        Ok(LentPages {
            pool: pool.clone(),
            pages,
        })
    }

    /// Bytes of the pages.
    pub(super) fn bytes(&self) -> u64 {
        self.pages.len() as u64 * u64::from(self.pool.shape().page_bytes())
    }

    fn is_gathered(&self) -> bool {
        self.pool.layout() == Layout::LayerFirst
    }

    fn part_bytes(&self) -> usize {
        self.pool.shape().part_bytes() as usize
    }

    /// The pieces of each page, in storage order.
    fn pieces(&self) -> impl Iterator<Item = Vec<&[u8]>> {
        self.pages.iter().map(|page| {
            let runs = self.pool.page_runs(*page).into_iter().flatten();
            runs.map(|(start, bytes)| {
                // SAFETY: the run lies in the pool, which this value holds. No other code writes
                // the page while it is lent.
                unsafe { std::slice::from_raw_parts(start.as_ptr(), bytes as usize) }
            })
            .collect()
        })
    }

    /// The pieces of each page, for writing.
    fn pieces_mut(&mut self) -> impl Iterator<Item = Vec<&mut [u8]>> {
        self.pages.iter().map(|page| {
            let runs = self.pool.page_runs(*page).into_iter().flatten();
            runs.map(|(start, bytes)| {
                // SAFETY: the run lies in the pool, and no other code touches the page while it is
                // lent. Runs of a page do not overlap, an order contains no page twice, and `self`
                // stays borrowed exclusively.
                unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes as usize) }
            })
            .collect()
        })
    }

    /// Writes the pages to L3. Returns how many of them L3 then has.
    pub(super) fn put(
        &self,
        l3: &dyn L3,
        keys: &[PageKey],
        parent: Option<PageKey>,
        depth: usize,
    ) -> usize {
        let mut copies: Vec<Vec<u8>> = Vec::new();
        let parts: Vec<Vec<IoSlice<'_>>> = if self.is_gathered() {
            copies.extend(self.pieces().map(|pieces| pieces.concat()));
            let of_copy = |copy| {
                <[u8]>::chunks(copy, self.part_bytes())
                    .map(IoSlice::new)
                    .collect()
            };
            copies.iter().map(|copy| of_copy(copy)).collect()
        } else {
            let slices = |pieces: Vec<_>| pieces.into_iter().map(IoSlice::new).collect();
            self.pieces().map(slices).collect()
        };
        let parents = std::iter::once(parent).chain(keys.iter().copied().map(Some));
        let pages: Vec<PutPage<'_>> = keys
            .iter()
            .zip(&parts)
            .zip(parents)
            .zip(depth..)
            .map(|(((key, parts), parent), depth)| PutPage {
                key: *key,
                parent,
                depth: u32::try_from(depth).unwrap_or(u32::MAX),
                parts,
            })
            .collect();
        l3.put(&pages)
    }

    /// Fills the pages from L3. Returns how many are whole, counted from the first.
    pub(super) fn get(&mut self, l3: &dyn L3, keys: &[PageKey]) -> usize {
        if !self.is_gathered() {
            let slices = |pieces: Vec<_>| pieces.into_iter().map(IoSliceMut::new).collect();
            return get_parts(l3, keys, self.pieces_mut().map(slices).collect());
        }
        let page_bytes = self.pool.shape().page_bytes() as usize;
        let part_bytes = self.part_bytes();
        let mut copies = vec![vec![0; page_bytes]; keys.len()];
        let parts = copies
            .iter_mut()
            .map(|copy| copy.chunks_mut(part_bytes).map(IoSliceMut::new).collect());
        let good = get_parts(l3, keys, parts.collect());
        for (pieces, copy) in self.pieces_mut().zip(&copies).take(good) {
            let mut rest = copy.as_slice();
            for piece in pieces {
                let (own, behind) = rest.split_at(piece.len());
                piece.copy_from_slice(own);
                rest = behind;
            }
        }
        good
    }
}

fn get_parts(l3: &dyn L3, keys: &[PageKey], mut parts: Vec<Vec<IoSliceMut<'_>>>) -> usize {
    let asked = keys.iter().zip(&mut parts);
    let mut asked: Vec<GetPage<'_, '_>> = asked
        .map(|(key, parts)| GetPage { key: *key, parts })
        .collect();
    l3.get(&mut asked)
}
