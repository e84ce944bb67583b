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
use std::ptr::NonNull;

use larder_engine::{GetPage, PutPage};
use larder_format::PageKey;
use larder_kernels::{DeviceError, L2Pool, Layout};

use crate::l3::L3;
use crate::runs::{L2, Runs};

/// The pages of an order, in each section of a component.
pub(super) struct LentPages {
    sections: Vec<L2Pool>,
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
    pub(super) unsafe fn new(
        sections: Vec<L2Pool>,
        runs: &Runs<L2>,
    ) -> Result<LentPages, DeviceError> {
        let pages: Vec<u32> = runs.page_numbers().collect();
        for (pool, page) in sections
            .iter()
            .flat_map(|pool| pages.iter().map(move |p| (pool, *p)))
        {
            let _exists = pool.page_runs(page)?;
        }
        Ok(LentPages { sections, pages })
    }

    /// Bytes of the pages.
    pub(super) fn bytes(&self) -> u64 {
        self.pages.len() as u64 * self.page_bytes() as u64
    }

    fn is_gathered(&self) -> bool {
        let mut sections = self.sections.iter();
        sections.any(|pool| pool.layout() == Layout::LayerFirst)
    }

    /// The sizes of the parts of a page.
    fn part_sizes(&self) -> Vec<usize> {
        let shapes = self.sections.iter().map(L2Pool::shape);
        let sizes = shapes.map(|of| vec![of.part_bytes() as usize; of.parts() as usize]);
        sizes.flatten().collect()
    }

    fn page_bytes(&self) -> usize {
        self.part_sizes().iter().sum()
    }

    /// The byte runs of a page, section by section.
    fn page_runs(&self, page: u32) -> impl Iterator<Item = (NonNull<u8>, u32)> + '_ {
        let sections = self.sections.iter();
        sections.flat_map(move |pool| pool.page_runs(page).into_iter().flatten())
    }

    /// The pieces of each page, in storage order.
    fn pieces(&self) -> impl Iterator<Item = Vec<&[u8]>> {
        self.pages.iter().map(|page| {
            let runs = self.page_runs(*page);
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
            let runs = self.page_runs(*page);
            runs.map(|(start, bytes)| {
                // SAFETY: the run lies in its pool, and no other code touches the page while it is
                // lent. Runs of a page do not overlap, an order contains no page twice, sections
                // are different pools, and `self` stays borrowed exclusively.
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
            let sizes = self.part_sizes();
            let parts = copies.iter().map(|copy| {
                let mut rest = copy.as_slice();
                let parts = sizes.iter().filter_map(|size| rest.split_off(..*size));
                parts.map(IoSlice::new).collect()
            });
            parts.collect()
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
        let sizes = self.part_sizes();
        let mut copies = vec![vec![0; self.page_bytes()]; keys.len()];
        let parts = copies.iter_mut().map(|copy| {
            let mut rest = copy.as_mut_slice();
            let parts = sizes.iter().filter_map(|size| rest.split_off_mut(..*size));
            parts.map(IoSliceMut::new).collect()
        });
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
