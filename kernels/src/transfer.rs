//! What is to be copied: pairs of pages of two pools, and the copies that come of them.
//!
//! Invariants of a [`Transfer`]: both pools have one shape, every page exists in its pool, and no page is in it twice. So every
//! address computed from it lies in its pool, and no two copies of it overlap.
//!
//! Neighbours are merged: a run of pages that are neighbours in both pools is one copy a layer and part. Each copy is rows
//! of one width with two pitches, which one call of a copy engine can do ([`Copy2d`]).

use std::sync::Arc;

use crate::error::DeviceError;
use crate::layout::{Strides, pool_bytes};
use crate::pool::{ChunkAt, L1Pool, L2Pool, Tier, page_exists};
use crate::shape::KvShape;

/// A page of L1 and the page of L2 with the same bytes, before or after a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct PagePair {
    /// Page of the L1 pool.
    pub l1: u32,
    /// Page of the L2 pool.
    pub l2: u32,
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// L2 to L1.
    Load,
    /// L1 to L2.
    Store,
}

/// Pages to be copied between two pools. Whoever has it may touch those pages; a device has it while it copies.
#[derive(Debug)]
pub struct Transfer(Arc<Plan>);

/// What a transfer and the jobs that carry it out share.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) l1: L1Pool,
    pub(crate) l2: L2Pool,
    /// By L2 page.
    pairs: Vec<PagePair>,
    runs: Vec<Run>,
}

/// Pages that are neighbours in both pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first: PagePair,
    pages: u32,
}

impl Transfer {
    /// The pages of `pairs`, in any order.
    ///
    /// # Errors
    /// Shapes that differ, pools that overlap, a page that does not exist, or one that is named twice.
    ///
    /// # Safety
    /// Until the transfer comes back, or is dropped without having been given to a device, nobody writes the pages that are
    /// copied from (from the moment that the `after` ticket settles), and nobody touches those that are copied to, except
    /// for a layer of them whose ticket has settled.
    pub unsafe fn new(
        l1: &L1Pool,
        l2: &L2Pool,
        mut pairs: Vec<PagePair>,
    ) -> Result<Transfer, DeviceError> {
        if l1.shape() != l2.shape() {
            return Err(DeviceError::ShapesDiffer);
        }
        if l1.touches(l2.address(), pool_bytes(l2.shape(), l2.pages())) {
            return Err(DeviceError::PoolsOverlap);
        }
        for pair in &pairs {
            page_exists(Tier::L1, pair.l1, l1.pages())?;
            page_exists(Tier::L2, pair.l2, l2.pages())?;
        }
        let mut l1_pages: Vec<u32> = pairs.iter().map(|pair| pair.l1).collect();
        l1_pages.sort_unstable();
        pairs.sort_unstable_by_key(|pair| pair.l2);
        no_page_twice(Tier::L1, &l1_pages, |page| *page)?;
        no_page_twice(Tier::L2, &pairs, |pair| pair.l2)?;
        let runs = runs(&pairs);
        Ok(Transfer(Arc::new(Plan {
            l1: l1.clone(),
            l2: l2.clone(),
            pairs,
            runs,
        })))
    }

    /// Its pages, by L2 page.
    #[must_use]
    pub fn pairs(&self) -> &[PagePair] {
        &self.0.pairs
    }

    /// The pool on the device.
    #[must_use]
    pub fn l1(&self) -> &L1Pool {
        &self.0.l1
    }

    /// The pool on the host.
    #[must_use]
    pub fn l2(&self) -> &L2Pool {
        &self.0.l2
    }

    /// Bytes to be copied.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.pairs.len() as u64 * u64::from(self.0.l1.shape().page_bytes())
    }

    /// The copies that one layer takes.
    pub fn copies(&self, layer: u32) -> impl Iterator<Item = Copy2d> + '_ {
        self.0.copies(layer)
    }

    pub(crate) fn plan(&self) -> Arc<Plan> {
        self.0.clone()
    }
}

impl Plan {
    pub(crate) fn shape(&self) -> &KvShape {
        self.l1.shape()
    }

    pub(crate) fn copies(&self, layer: u32) -> impl Iterator<Item = Copy2d> + '_ {
        let l2 = self.l2.strides();
        let parts = 0..self.shape().parts();
        parts.flat_map(move |part| {
            self.runs.iter().map(move |run| Copy2d {
                l1: self.l1.chunk(ChunkAt {
                    part,
                    layer,
                    page: run.first.l1,
                }),
                l2: l2.page_offset(part, layer, run.first.l2),
                rows: Rows::of(self.shape(), l2, run.pages),
            })
        })
    }
}

/// Rows of one width, each so far from the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Bytes of a row.
    pub width: u64,
    /// How many.
    pub count: u64,
    /// Bytes from one to the next in L1.
    pub l1_pitch: u64,
    /// Bytes from one to the next in L2.
    pub l2_pitch: u64,
}

/// One copy: rows from one place to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy2d {
    /// Address of the first row in L1.
    pub l1: u64,
    /// Offset of the first row in the L2 pool, in bytes.
    pub l2: u64,
    /// The rows.
    pub rows: Rows,
}

impl Rows {
    /// A run of pages, in one layer of one part.
    fn of(shape: &KvShape, l2: &Strides, pages: u32) -> Rows {
        let page = Rows {
            width: u64::from(shape.row_bytes()),
            count: u64::from(shape.page_tokens()),
            l1_pitch: u64::from(shape.row_bytes()),
            l2_pitch: l2.token,
        };
        let page = page.merged();
        let pages = u64::from(pages);
        let run = if page.count == 1 {
            Rows {
                count: pages,
                l1_pitch: u64::from(shape.chunk_bytes()),
                l2_pitch: l2.page,
                ..page
            }
        } else {
            // Tokens that lie apart on either side lie evenly there, across pages too: no layout puts anything between pages.
            debug_assert_eq!(l2.page, page.count * page.l2_pitch);
            Rows {
                count: pages * page.count,
                ..page
            }
        };
        run.merged()
    }

    /// Rows that touch on both sides are one.
    fn merged(self) -> Rows {
        if self.count == 1 || (self.l1_pitch == self.width && self.l2_pitch == self.width) {
            let width = self.width * self.count;
            return Rows {
                width,
                count: 1,
                l1_pitch: width,
                l2_pitch: width,
            };
        }
        self
    }
}

fn no_page_twice<T>(tier: Tier, sorted: &[T], page: impl Fn(&T) -> u32) -> Result<(), DeviceError> {
    let twice = sorted
        .iter()
        .zip(sorted.iter().skip(1))
        .find(|(one, next)| page(one) == page(next));
    match twice {
        Some((one, _)) => Err(DeviceError::PageTwice {
            tier,
            page: page(one),
        }),
        None => Ok(()),
    }
}

fn runs(pairs: &[PagePair]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for pair in pairs {
        match runs.last_mut() {
            Some(run)
                if run.first.l1 + run.pages == pair.l1 && run.first.l2 + run.pages == pair.l2 =>
            {
                run.pages += 1;
            }
            _ => runs.push(Run {
                first: *pair,
                pages: 1,
            }),
        }
    }
    runs
}
