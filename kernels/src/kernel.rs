//! The launch argument of the copy kernel in `cu/kv_copy.cu`.
//!
//! Owns: [`KvCopyArgs`], the only argument of the kernel, with the same fields as in the source;
//! and the checks that the kernel omits. Invariants: all addresses and strides are multiples of 16,
//! all counts are at least one, there are fewer than 2^32 segments, and `lanes` is a power of two
//! up to 32, so it divides any whole number of warps. L1 strides to the next part and the next
//! layer wrap around, as the kernel's additions do, because an engine's tensors can be in any
//! order.

use std::ops::Range;

use crate::layout::Strides;
use crate::pool::ChunkAt;
use crate::transfer::{Direction, Transfer};

/// The source of all kernels.
pub const SOURCE: &str = include_str!("../cu/kv_copy.cu");

/// Bytes that a thread moves in one instruction.
pub const UNIT_BYTES: u64 = 16;

/// Units that a thread has in flight.
const UNROLL: u32 = 8;

/// Minimum number of threads per row: 128 bytes, the transfer size of the link and of the memory on
/// both sides.
const LANES_MIN: u32 = 8;

/// Maximum number of threads per row: a warp.
const LANES_MAX: u32 = 32;

/// The argument of `kv_copy`. Addresses are as the kernel sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct KvCopyArgs {
    /// Source address: the first row to copy of page 0 of part 0, in the first layer.
    pub from: u64,
    /// Destination address, likewise.
    pub to: u64,
    /// Address of the pairs of pages: [`Transfer::pairs`] in memory order.
    pub pairs: u64,
    /// Strides of the source, in bytes.
    pub from_step: Steps,
    /// Strides of the destination, in bytes.
    pub to_step: Steps,
    /// To the next head of the source, in bytes.
    pub from_head: u64,
    /// To the next head of the destination, in bytes.
    pub to_head: u64,
    /// Parts of a page.
    pub parts: u32,
    /// Layers to copy.
    pub layers: u32,
    /// Pairs of pages.
    pub pages: u32,
    /// Tokens per page, layer and part: 1 if those to copy are contiguous on both sides.
    pub tokens: u32,
    /// Units per row, or per head of it.
    pub row_units: u32,
    /// Threads per row.
    pub lanes: u32,
    /// Segments per row.
    pub row_segments: u32,
    /// Segments of all rows.
    pub segments: u32,
    /// Index of the source page in a pair: 0 is L1, 1 is L2.
    pub from_index: u32,
    /// Pieces of a row that are not contiguous on both sides: its heads, or 1.
    pub heads: u32,
}

/// [`Strides`] in the kernel's order, but for that of heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Steps {
    /// To the next part.
    pub part: u64,
    /// To the next layer.
    pub layer: u64,
    /// To the next page.
    pub page: u64,
    /// To the next token of a page.
    pub token: u64,
}

impl From<&Strides> for Steps {
    fn from(strides: &Strides) -> Steps {
        let Strides {
            part,
            layer,
            page,
            token,
            head: _,
        } = *strides;
        Steps {
            part,
            layer,
            page,
            token,
        }
    }
}

impl KvCopyArgs {
    /// The argument for some of the layers of a transfer. `None` if the kernel cannot execute it
    /// and the copy engines must: nothing to copy, rows or addresses that are not multiples of 16
    /// bytes, layers that are not evenly spaced, or too many segments for one launch.
    ///
    /// `pairs` is the address of the pairs of pages. The kernel must see the L2 pool at its host
    /// address.
    #[must_use]
    pub fn new(
        transfer: &Transfer,
        direction: Direction,
        layers: Range<u32>,
        pairs: u64,
    ) -> Option<KvCopyArgs> {
        let shape = transfer.l1().shape();
        let (l1, l2) = (transfer.l1().strides(&layers)?, transfer.l2().strides());
        let heads = l2.row_pieces(shape);
        let piece_bytes = u64::from(shape.row_bytes() / heads);
        let together = heads == 1 && l2.token == piece_bytes;
        let rows = transfer.rows();
        let (first, count) = (u64::from(rows.start), rows.end - rows.start);
        let (tokens, row_bytes) = if together {
            (1, u64::from(count) * u64::from(shape.row_bytes()))
        } else {
            (count, piece_bytes)
        };
        // The strides within a layer are multiples of the size of a piece.
        let l2_start = transfer.l2().address();
        let rows_are = [row_bytes, piece_bytes, l2_start];
        let are_aligned = rows_are.iter().all(|it| it.is_multiple_of(UNIT_BYTES));
        if !are_aligned || !transfer.l1().is_aligned(UNIT_BYTES) {
            return None;
        }
        let row_units = u32::try_from(row_bytes / UNIT_BYTES).ok()?;
        let lanes = row_units
            .div_ceil(UNROLL)
            .next_power_of_two()
            .clamp(LANES_MIN, LANES_MAX);
        let row_segments = row_units.div_ceil(lanes * UNROLL);
        // The kernel's index into the pairs is twice the page number.
        let pages = u32::try_from(transfer.pairs().len()).ok()?;
        pages.checked_mul(2)?;
        let count = layers.end.checked_sub(layers.start)?;
        let segments = [count, pages, tokens, heads, row_segments]
            .into_iter()
            .try_fold(shape.parts(), u32::checked_mul)?;
        if segments == 0 {
            return None;
        }
        let l1_at = transfer.l1().chunk(ChunkAt {
            part: 0,
            layer: layers.start,
            page: 0,
        });
        let l1_at = l1_at + first * l1.token;
        let l2_at = l2_start + u64::from(layers.start) * l2.layer + first * l2.token;
        let (from, to, from_step, to_step, from_index) = match direction {
            Direction::Load => (l2_at, l1_at, l2, &l1, 1),
            Direction::Store => (l1_at, l2_at, &l1, l2, 0),
        };
        Some(KvCopyArgs {
            from,
            to,
            pairs,
            from_step: from_step.into(),
            to_step: to_step.into(),
            from_head: from_step.head,
            to_head: to_step.head,
            parts: shape.parts(),
            layers: count,
            pages,
            tokens,
            row_units,
            lanes,
            row_segments,
            segments,
            from_index,
            heads,
        })
    }

    /// Number of blocks of `threads` threads that have work, at most `blocks`.
    #[must_use]
    pub fn grid(&self, blocks: u32, threads: u32) -> u32 {
        let workers = (threads / self.lanes).max(1);
        self.segments.div_ceil(workers).min(blocks).max(1)
    }

    /// The bytes of the argument, as the kernel reads them.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let steps = |steps: &Steps| [steps.part, steps.layer, steps.page, steps.token];
        let wide = [self.from, self.to, self.pairs]
            .into_iter()
            .chain(steps(&self.from_step))
            .chain(steps(&self.to_step))
            .chain([self.from_head, self.to_head]);
        let narrow = [
            self.parts,
            self.layers,
            self.pages,
            self.tokens,
            self.row_units,
            self.lanes,
            self.row_segments,
            self.segments,
            self.from_index,
            self.heads,
        ];
        wide.flat_map(u64::to_ne_bytes)
            .chain(narrow.into_iter().flat_map(u32::to_ne_bytes))
            .collect()
    }
}

const _: () = assert!(size_of::<KvCopyArgs>() == 13 * 8 + 10 * 4, "no padding");
