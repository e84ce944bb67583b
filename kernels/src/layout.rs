//! The location of rows in a pool. Every layout is affine: five strides define it.
//!
//! ```text
//!  layer_first         [part][layer][page][token] row
//!  page_first          [part][page][token][layer] row
//!  page_first_direct   [part][page][layer][token] row
//!  page_head           [part][page][head][token][layer] values of a head
//! ```
//!
//! A row is one run of bytes, head by head, in all of them but `page_head`, which keeps a run of
//! bytes for each head of a page: ranks that hold some of the heads find them together.
//!
//! L1 is always `layer_first`, the order in which attention kernels read it. One copy routine and
//! one kernel therefore cover all pairs of layouts; they take two [`Strides`].
//!
//! Invariant: the offset and the end of every existing row are at most [`pool_bytes`], which fits
//! in an `i64`.

use std::fmt;
use std::str::FromStr;

use crate::shape::KvShape;

/// The pool of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    /// The device's pool.
    L1,
    /// The host's pool.
    L2,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::L1 => "L1",
            Tier::L2 => "L2",
        })
    }
}

/// The row order of a host pool. The names are SGLang's, and namespaces use the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Layer by layer, as on the device.
    LayerFirst,
    /// A part of a page is one run of bytes, token by token.
    PageFirst,
    /// A part of a page is one run of bytes, layer by layer. The device copies this layout fastest.
    PageFirstDirect,
    /// A part of a page is one run of bytes, head by head, in each token by token.
    PageHead,
}

impl Layout {
    /// All layouts.
    pub const ALL: [Layout; 4] = [
        Layout::LayerFirst,
        Layout::PageFirst,
        Layout::PageFirstDirect,
        Layout::PageHead,
    ];

    /// The name of the layout.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Layout::LayerFirst => "layer_first",
            Layout::PageFirst => "page_first",
            Layout::PageFirstDirect => "page_first_direct",
            Layout::PageHead => "page_head",
        }
    }

    /// Strides of a pool of `pages` pages.
    #[must_use]
    pub fn strides(self, shape: &KvShape, pages: u32) -> Strides {
        let head = u64::from(shape.head_bytes());
        let row = u64::from(shape.row_bytes());
        let chunk = u64::from(shape.chunk_bytes());
        let part_of_page = u64::from(shape.part_bytes());
        let part = part_of_page * u64::from(pages);
        match self {
            Layout::LayerFirst => Strides {
                part,
                layer: chunk * u64::from(pages),
                page: chunk,
                token: row,
                head,
            },
            Layout::PageFirst => Strides {
                part,
                layer: row,
                page: part_of_page,
                token: row * u64::from(shape.layers()),
                head,
            },
            Layout::PageFirstDirect => Strides {
                part,
                layer: chunk,
                page: part_of_page,
                token: row,
                head,
            },
            Layout::PageHead => Strides {
                part,
                layer: head,
                page: part_of_page,
                token: head * u64::from(shape.layers()),
                head: part_of_page / u64::from(shape.heads()),
            },
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The name does not denote a layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no layout; take layer_first, page_first, page_first_direct or page_head")]
pub struct NoSuchLayout(String);

impl FromStr for Layout {
    type Err = NoSuchLayout;

    fn from_str(name: &str) -> Result<Layout, NoSuchLayout> {
        Layout::ALL
            .into_iter()
            .find(|layout| layout.name() == name)
            .ok_or_else(|| NoSuchLayout(name.to_owned()))
    }
}

/// Distances in bytes between rows of a pool, in each dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// To the next part.
    pub part: u64,
    /// To the next layer.
    pub layer: u64,
    /// To the next page.
    pub page: u64,
    /// To the next token of a page.
    pub token: u64,
    /// To the next head of a row.
    pub head: u64,
}

impl Strides {
    /// Number of pieces of a row that are not contiguous: its heads, or one.
    #[must_use]
    pub fn row_pieces(&self, shape: &KvShape) -> u32 {
        if self.head == u64::from(shape.head_bytes()) {
            1
        } else {
            shape.heads()
        }
    }

    /// Byte offset of the first row of a page, in one layer of one part. The indices must exist.
    #[must_use]
    pub fn page_offset(&self, part: u32, layer: u32, page: u32) -> u64 {
        self.part * u64::from(part) + self.layer * u64::from(layer) + self.page * u64::from(page)
    }
}

/// Bytes of a pool of `pages` pages, below 2^62.
#[must_use]
pub fn pool_bytes(shape: &KvShape, pages: u32) -> u64 {
    u64::from(shape.page_bytes()) * u64::from(pages)
}
