//! Where the rows of a pool lie: every layout is affine, four strides and nothing else.
//!
//! ```text
//!  layer_first         [part][layer][page][token] row
//!  page_first          [part][page][token][layer] row
//!  page_first_direct   [part][page][layer][token] row
//! ```
//!
//! L1 is always `layer_first`, the order in which attention kernels read it. One copy routine and one kernel therefore do
//! for all pairs: they are handed two [`Strides`].
//!
//! Invariant: the offset of every row that exists, and its end, is at most [`pool_bytes`], which fits an `i64`.

use std::fmt;
use std::str::FromStr;

use crate::shape::KvShape;

/// How a host pool orders its rows. The names are SGLang's, and those that namespaces carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Layer by layer, as the device has it.
    LayerFirst,
    /// A part of a page is one run of bytes, token by token.
    PageFirst,
    /// A part of a page is one run of bytes, layer by layer: what the device copies best.
    PageFirstDirect,
}

impl Layout {
    /// All of them.
    pub const ALL: [Layout; 3] = [
        Layout::LayerFirst,
        Layout::PageFirst,
        Layout::PageFirstDirect,
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Layout::LayerFirst => "layer_first",
            Layout::PageFirst => "page_first",
            Layout::PageFirstDirect => "page_first_direct",
        }
    }

    /// Strides of a pool of `pages` pages.
    #[must_use]
    pub fn strides(self, shape: &KvShape, pages: u32) -> Strides {
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
            },
            Layout::PageFirst => Strides {
                part,
                layer: row,
                page: part_of_page,
                token: row * u64::from(shape.layers()),
            },
            Layout::PageFirstDirect => Strides {
                part,
                layer: chunk,
                page: part_of_page,
                token: row,
            },
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no layout; take layer_first, page_first or page_first_direct")]
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

/// Bytes from one row of a pool to the next, in each direction.
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
}

impl Strides {
    /// Byte offset of the first row of a page, in one layer of one part. For indices that exist.
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
