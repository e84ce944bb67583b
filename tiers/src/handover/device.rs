//! The memory that is lent as a host pool of the device that has L1, and its copies.
//!
//! If the driver does not lock the memory, rows go through a buffer that it locks, a few pages at a
//! time: a caller waits for each copy then.

use std::ops::Range;
use std::sync::Arc;

use larder_kernels::{
    Device, DeviceError, Direction, HostMemory, KvShape, L2Pool, LayerTickets, Layout, PagePair,
    Ticket, Tier, Transfer, pool_bytes,
};
use larder_sync::Mutex;

use crate::prefix::Rows;

/// The row order of the memory.
const LAYOUT: Layout = Layout::PageFirstDirect;

/// The most bytes of a buffer.
const BUFFER_BYTES: u64 = 4 << 20;

/// See the module documentation.
pub(super) struct DevicePool {
    device: Arc<dyn Device>,
    pool: L2Pool,
    /// If `pool` is a buffer: held by its user.
    turn: Option<Mutex<()>>,
}

/// The rows that a device copies: these tokens of these layers of a sequence, and their blocks.
pub(super) struct Job<'r> {
    pub(super) rows: &'r Rows,
    pub(super) layers: Range<u32>,
    pub(super) tokens: Range<usize>,
    /// The page of the sequence that is in the first block.
    pub(super) first_page: usize,
    pub(super) blocks: &'r [u32],
}

impl Job<'_> {
    /// The L1 pages and the blocks of some pages of the sequence.
    fn pairs(&self, pages: Range<usize>) -> Result<Vec<PagePair>, DeviceError> {
        let pair = |page: usize| {
            let block = page.checked_sub(self.first_page);
            let l2 = block.and_then(|block| self.blocks.get(block)).copied();
            let l1 = self.rows.page(page);
            Some(PagePair { l1: l1?, l2: l2? })
        };
        let pairs: Option<Vec<PagePair>> = pages.clone().map(pair).collect();
        pairs.ok_or_else(|| DeviceError::NoSuchPage {
            tier: Tier::L2,
            page: u32::try_from(pages.end).unwrap_or(u32::MAX),
            pages: u32::try_from(self.first_page + self.blocks.len()).unwrap_or(u32::MAX),
        })
    }
}

/// Bytes of a block that a thread moves from or to a buffer.
#[derive(Clone, Copy)]
pub(super) struct Move {
    pub(super) direction: Direction,
    pub(super) block: u32,
    /// Counted from the first part of the block.
    pub(super) offset: usize,
    /// In the buffer.
    pub(super) at: *mut u8,
    pub(super) bytes: usize,
}

impl DevicePool {
    /// Registers memory of so many blocks of a page with a device, or a buffer for them.
    ///
    /// # Errors
    /// The device can use neither.
    pub(super) fn new(
        device: Arc<dyn Device>,
        memory: HostMemory,
        shape: &KvShape,
        blocks: u32,
    ) -> Result<DevicePool, DeviceError> {
        let refused = match device.register(memory, LAYOUT, shape, blocks) {
            Ok(pool) => {
                let turn = None;
                return Ok(DevicePool { device, pool, turn });
            }
            Err(error @ DeviceError::NotLockable { .. }) => error,
            Err(error) => return Err(error),
        };
        let most = BUFFER_BYTES / u64::from(shape.page_bytes());
        let mut pages = u32::try_from(most).unwrap_or(u32::MAX).clamp(1, blocks);
        loop {
            let buffer = HostMemory::zeroed(pool_bytes(shape, pages))?;
            match device.register(buffer, LAYOUT, shape, pages) {
                Ok(pool) => {
                    tracing::warn!(
                        "the memory that is lent goes through a buffer of {pages} pages: {refused}"
                    );
                    let turn = Some(Mutex::new(()));
                    return Ok(DevicePool { device, pool, turn });
                }
                Err(error) if pages == 1 => return Err(error),
                Err(_) => pages /= 2,
            }
        }
    }

    /// Whether copies are waited for.
    pub(super) fn waits(&self) -> bool {
        self.turn.is_some()
    }

    /// Begins to copy, out of the memory (`Load`) or into it (`Store`), behind `after`. The copies
    /// that have begun are added to `begun`, also before an error. `move_bytes` copies between the
    /// memory and a buffer; false beyond the memory.
    ///
    /// # Errors
    /// The rows are not in the memory, or the device refuses a copy. Or a copy that was waited for
    /// has failed.
    ///
    /// # Safety
    /// Until the copies have ended, the pages of the sequence stay its own, and nothing else
    /// touches these rows, or writes them if they are the source. The blocks are lent meanwhile, or
    /// the rows are not used.
    pub(super) unsafe fn copy(
        &self,
        direction: Direction,
        job: &Job<'_>,
        after: &Ticket,
        begun: &mut Vec<LayerTickets>,
        move_bytes: impl Fn(Move) -> bool,
    ) -> Result<(), DeviceError> {
        let turn = self.turn.as_ref().map(Mutex::lock);
        let most = match turn {
            Some(_) => self.pool.pages() as usize,
            None => usize::MAX,
        };
        for part in job.rows.of_pages(job.tokens.clone()) {
            let mut pages = part.pages.clone();
            while !pages.is_empty() {
                let end = pages.end.min(pages.start.saturating_add(most));
                let mut pairs = job.pairs(pages.start..end)?;
                pages.start = end;
                let moves = match turn {
                    Some(_) => self.moves(direction, job, &mut pairs, &part.rows),
                    None => Vec::new(),
                };
                let mut moved = true;
                if direction == Direction::Load {
                    moved = moves.iter().all(|of| move_bytes(*of));
                }
                // SAFETY: guaranteed by the caller. A buffer is used by the holder of the turn.
                let transfer = unsafe { Transfer::new(job.rows.l1(), &self.pool, pairs) }?;
                let transfer = transfer.only(job.layers.clone(), part.rows.clone())?;
                let copying = match direction {
                    Direction::Load => self.device.load(transfer, after),
                    Direction::Store => self.device.store(transfer, after),
                };
                let copying = copying.map_err(|refused| refused.error)?;
                match turn {
                    // The pages are guarded by the tickets alone.
                    None => begun.extend(copying.gates().iter().cloned()),
                    Some(_) => copying.wait().1?,
                }
                if direction == Direction::Store {
                    moved = moves.iter().all(|of| move_bytes(*of));
                }
                if !moved {
                    return Err(DeviceError::NotRegistered);
                }
            }
        }
        Ok(())
    }

    /// The moves between blocks and the first pages of a buffer, which take the place of the blocks
    /// in `pairs`.
    fn moves(
        &self,
        direction: Direction,
        job: &Job<'_>,
        pairs: &mut [PagePair],
        rows: &Range<u32>,
    ) -> Vec<Move> {
        let (shape, strides) = (*self.pool.shape(), *self.pool.strides());
        let (row, chunk) = (shape.row_bytes() as usize, shape.chunk_bytes() as usize);
        let (first, start) = (rows.start as usize * row, self.pool.start().as_ptr());
        let mut moves = Vec::new();
        for (page, pair) in (0..).zip(pairs) {
            let block = std::mem::replace(&mut pair.l2, page);
            for part in 0..shape.parts() {
                for layer in job.layers.clone() {
                    let at = strides.page_offset(part, layer, page) as usize + first;
                    moves.push(Move {
                        direction,
                        block,
                        offset: (part * shape.layers() + layer) as usize * chunk + first,
                        at: start.wrapping_add(at),
                        bytes: rows.len() * row,
                    });
                }
            }
        }
        moves
    }
}
