//! Copy requests: pairs of pages of two pools, and the copies derived from them.
//!
//! Invariants of a [`Transfer`]: both pools have the same shape, every page exists in its pool, and
//! no page occurs twice. Therefore every address computed from it lies in its pool, and no two of
//! its copies overlap. A transfer may be of some layers only, and of some rows of each page.
//!
//! Neighbours are merged: a run of pages that are neighbours in both pools is one copy per layer
//! and part. Each copy consists of rows of one width with two pitches, which one copy-engine call
//! can execute ([`Copy2d`]). Where the pieces of a row lie apart, each page and head is a copy.

use std::ops::Range;
use std::sync::Arc;

use crate::error::DeviceError;
use crate::layout::{Strides, Tier, pool_bytes};
use crate::pool::{ChunkAt, L1Pool, L2Pool, page_exists};
use crate::shape::KvShape;

/// A page of L1 and its counterpart in L2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct PagePair {
    /// Page of the L1 pool.
    pub l1: u32,
    /// Page of the L2 pool.
    pub l2: u32,
}

/// The first rows of a page of L1, to be copied to another page of L1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCopy {
    /// The page with the rows.
    pub from: u32,
    /// The page that gets them.
    pub to: u32,
    /// Number of rows: of tokens.
    pub rows: u32,
}

impl RowCopy {
    /// The bytes of the rows in one layer of one part, and their addresses in each of them: source
    /// and destination.
    ///
    /// # Errors
    /// The pool has no such pages or rows.
    pub(crate) fn pieces(
        self,
        pool: &L1Pool,
    ) -> Result<(usize, impl Iterator<Item = (u64, u64)> + '_), DeviceError> {
        let shape = pool.shape();
        page_exists(Tier::L1, self.from, pool.pages())?;
        page_exists(Tier::L1, self.to, pool.pages())?;
        let (page, page_tokens) = (self.to, shape.page_tokens());
        if self.from == page {
            let tier = Tier::L1;
            return Err(DeviceError::PageTwice { tier, page });
        }
        if self.rows > page_tokens {
            let rows = self.rows;
            return Err(DeviceError::NoSuchRows { rows, page_tokens });
        }
        let bytes = self.rows as usize * shape.row_bytes() as usize;
        let places = (0..shape.parts())
            .flat_map(move |part| (0..shape.layers()).map(move |layer| (part, layer)));
        let pieces = places.map(move |(part, layer)| {
            let of = |page| pool.chunk(ChunkAt { part, layer, page });
            (of(self.from), of(self.to))
        });
        Ok((bytes, pieces))
    }
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// L2 to L1.
    Load,
    /// L1 to L2.
    Store,
}

/// Pages to copy between two pools. The holder of this value may access those pages; during the
/// copy the device holds it.
#[derive(Debug)]
pub struct Transfer(Arc<Plan>);

/// The data shared by a transfer and its jobs.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) l1: L1Pool,
    pub(crate) l2: L2Pool,
    /// Sorted by L2 page.
    pairs: Vec<PagePair>,
    runs: Vec<Run>,
    /// At least one of each.
    pub(crate) layers: Range<u32>,
    rows: Range<u32>,
}

/// Pages that are neighbours in both pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first: PagePair,
    pages: u32,
}

impl Transfer {
    /// A transfer of `pairs`, in any order.
    ///
    /// # Errors
    /// The shapes differ, the pools overlap, a page does not exist, or a page occurs twice.
    ///
    /// # Safety
    /// These rules hold until the transfer is returned, or is dropped without having been
    /// submitted. No other access writes the source pages after the `after` ticket settles. No
    /// other access touches the destination pages, except a layer whose ticket has settled.
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
            layers: 0..l1.shape().layers(),
            rows: 0..l1.shape().page_tokens(),
        })))
    }

    /// The same transfer, of these layers only, and of these rows of each page.
    ///
    /// # Errors
    /// There are no such layers or rows, or none of them.
    pub fn only(self, layers: Range<u32>, rows: Range<u32>) -> Result<Transfer, DeviceError> {
        let Plan {
            l1,
            l2,
            pairs,
            runs,
            ..
        } = &*self.0;
        let page_tokens = l1.shape().page_tokens();
        if layers.is_empty() || layers.end > l1.shape().layers() {
            let layer = layers.end;
            return Err(DeviceError::NoSuchLayer { part: 0, layer });
        }
        if rows.is_empty() || rows.end > page_tokens {
            let rows = rows.end;
            return Err(DeviceError::NoSuchRows { rows, page_tokens });
        }
        Ok(Transfer(Arc::new(Plan {
            l1: l1.clone(),
            l2: l2.clone(),
            pairs: pairs.clone(),
            runs: runs.clone(),
            layers,
            rows,
        })))
    }

    /// The pairs, sorted by L2 page.
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

    /// Its layers.
    #[must_use]
    pub fn layers(&self) -> Range<u32> {
        self.0.layers.clone()
    }

    /// Its rows of each page: tokens.
    #[must_use]
    pub fn rows(&self) -> Range<u32> {
        self.0.rows.clone()
    }

    /// Bytes to copy.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let Plan { layers, rows, .. } = &*self.0;
        let shape = self.0.shape();
        let rows = (layers.len() * rows.len()) as u64 * u64::from(shape.parts());
        self.0.pairs.len() as u64 * rows * u64::from(shape.row_bytes())
    }

    /// The copies of one layer.
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
        let pieces = self.l2.strides().row_pieces(self.shape());
        let is_one = pieces == 1 && self.joins_pages();
        parts.flat_map(move |part| {
            let runs = self.runs.iter().flat_map(move |run| run.split(is_one));
            runs.flat_map(move |run| {
                (0..pieces).map(move |head| self.copy(part, layer, &run, (head, pieces)))
            })
        })
    }

    /// Whether rows of neighbouring pages are evenly spaced: all rows of each page, or one run of
    /// bytes of each.
    fn joins_pages(&self) -> bool {
        let is_whole = self.rows.len() == self.shape().page_tokens() as usize;
        is_whole || Rows::of(self.shape(), self.l2.strides(), 1, self.tokens()).count == 1
    }

    /// Rows of each page.
    fn tokens(&self) -> u64 {
        self.rows.len() as u64
    }

    /// The copy of a run of pages, or of one of the `pieces` of each of its rows.
    fn copy(&self, part: u32, layer: u32, run: &Run, (head, pieces): (u32, u32)) -> Copy2d {
        let (shape, l2, head) = (self.shape(), self.l2.strides(), u64::from(head));
        let l1 = self.l1.chunk(ChunkAt {
            part,
            layer,
            page: run.first.l1,
        });
        let (l1, first) = (l1 + head * u64::from(shape.head_bytes()), self.rows.start);
        let page = l2.page_offset(part, layer, run.first.l2);
        Copy2d {
            l1: l1 + u64::from(first) * u64::from(shape.row_bytes()),
            l2: page + u64::from(first) * l2.token + head * l2.head,
            rows: match pieces {
                1 => Rows::of(shape, l2, run.pages, self.tokens()),
                _ => Rows::of_head(shape, l2, self.tokens()),
            },
        }
    }
}

impl Run {
    /// The run as a whole, or page by page.
    fn split(&self, is_one: bool) -> impl Iterator<Item = Run> + use<> {
        let (first, pages) = (self.first, self.pages);
        let (runs, pages) = if is_one { (1, pages) } else { (pages, 1) };
        (0..runs).map(move |at| Run {
            first: PagePair {
                l1: first.l1 + at,
                l2: first.l2 + at,
            },
            pages,
        })
    }
}

/// Rows of one width, evenly spaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Bytes of a row.
    pub width: u64,
    /// Number of rows.
    pub count: u64,
    /// Distance between rows in L1, in bytes.
    pub l1_pitch: u64,
    /// Distance between rows in L2, in bytes.
    pub l2_pitch: u64,
}

/// One copy of rows.
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
    /// Some tokens of each page of a run, in one layer of one part.
    fn of(shape: &KvShape, l2: &Strides, pages: u32, tokens: u64) -> Rows {
        let page = Rows {
            width: u64::from(shape.row_bytes()),
            count: tokens,
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
            // If the tokens are not contiguous on a side, they are evenly spaced there, also across
            // pages: no layout has gaps between pages.
            debug_assert!(pages == 1 || l2.page == page.count * page.l2_pitch);
            Rows {
                count: pages * page.count,
                ..page
            }
        };
        run.merged()
    }

    /// One head of some tokens of a page, in one layer of one part.
    fn of_head(shape: &KvShape, l2: &Strides, tokens: u64) -> Rows {
        Rows {
            width: u64::from(shape.head_bytes()),
            count: tokens,
            l1_pitch: u64::from(shape.row_bytes()),
            l2_pitch: l2.token,
        }
        .merged()
    }

    /// Merges rows that are contiguous on both sides.
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
