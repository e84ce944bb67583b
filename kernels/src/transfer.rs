//! What is to be copied: pairs of pages of two pools, and the copies that come of them.
//!
//! Invariants of a [`Transfer`]: both pools have one shape, every page exists in its pool, and no page is in it twice. So every
//! address computed from it lies in its pool, and no two copies of it overlap.
//!
//! Neighbours are merged: a run of pages that are neighbours in both pools is one copy a layer and part. Each copy is rows
//! of one width with two pitches, which one call of a copy engine can do ([`Copy2d`]).

use std::sync::Arc;

use crate::error::DeviceError;
use crate::layout::Strides;
use crate::pool::{L1Pool, L2Pool, Tier, page_exists};
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
    /// Shapes that differ, a page that does not exist, or one that is named twice.
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
        let parts = 0..self.shape().parts();
        parts.flat_map(move |part| {
            self.runs
                .iter()
                .flat_map(move |run| self.of_run(part, layer, *run))
        })
    }

    fn of_run(&self, part: u32, layer: u32, run: Run) -> impl Iterator<Item = Copy2d> + use<> {
        let (l1, l2) = (*self.l1.strides(), *self.l2.strides());
        let whole = Rows::of(self.shape(), &l1, &l2, run.pages);
        // Where a run is not one pattern of rows, each of its pages is.
        let (rows, calls) = match whole {
            Some(rows) => (rows, 1),
            None => (Rows::of_page(self.shape(), &l1, &l2), run.pages),
        };
        (0..calls).map(move |page| Copy2d {
            l1: l1.page_offset(part, layer, run.first.l1 + page),
            l2: l2.page_offset(part, layer, run.first.l2 + page),
            rows,
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

/// One copy: rows from one offset to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy2d {
    /// Offset of the first row in the L1 pool, in bytes.
    pub l1: u64,
    /// Offset of the first row in the L2 pool, in bytes.
    pub l2: u64,
    /// The rows.
    pub rows: Rows,
}

impl Rows {
    /// One page.
    fn of_page(shape: &KvShape, l1: &Strides, l2: &Strides) -> Rows {
        let rows = Rows {
            width: u64::from(shape.row_bytes()),
            count: u64::from(shape.page_tokens()),
            l1_pitch: l1.token,
            l2_pitch: l2.token,
        };
        rows.merged()
    }

    /// A run of pages, if they are one pattern.
    fn of(shape: &KvShape, l1: &Strides, l2: &Strides, pages: u32) -> Option<Rows> {
        let page = Rows::of_page(shape, l1, l2);
        let pages = u64::from(pages);
        if pages == 1 {
            return Some(page);
        }
        let run = if page.count == 1 {
            Rows {
                count: pages,
                l1_pitch: l1.page,
                l2_pitch: l2.page,
                ..page
            }
        } else if l1.page == page.count * page.l1_pitch && l2.page == page.count * page.l2_pitch {
            Rows {
                count: pages * page.count,
                ..page
            }
        } else {
            return None;
        };
        Some(run.merged())
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
