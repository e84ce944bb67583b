//! Rows of a sequence whose L1 is on a device, on their way through host memory: for
//! [`transfer`](crate::transfer).
//!
//! Invariant: a stage is touched by its owner alone, and by copies that the owner waits for before
//! it touches the stage again.

use std::ops::Range;
use std::sync::Arc;

use larder_kernels::{
    Device, DeviceError, Direction, HostMemory, KvShape, L2Pool, LayerTickets, Layout, PagePair,
    Ticket, Tier, Transfer, pool_bytes,
};

use super::error::Closed;
use super::sequence::Sequence;

/// Host memory for the rows of some pages, known to the device that has L1.
pub(crate) struct Stage {
    device: Arc<dyn Device>,
    pool: L2Pool,
}

/// The values of one head in a row of a stage.
#[derive(Clone, Copy)]
pub(crate) struct HeadAt {
    /// Its number in the stage.
    pub(crate) page: usize,
    pub(crate) part: u32,
    pub(crate) layer: u32,
    pub(crate) token: usize,
    pub(crate) head: usize,
}

impl Stage {
    /// Number of pages.
    pub(crate) fn pages(&self) -> usize {
        self.pool.pages() as usize
    }

    /// The address of the values of a head, and their bytes. `None`: there are none.
    fn at(&self, at: HeadAt) -> Option<(*mut u8, usize)> {
        let (shape, strides) = (self.pool.shape(), self.pool.strides());
        let is_inside = at.page < self.pages()
            && at.part < shape.parts()
            && at.layer < shape.layers()
            && at.token < shape.page_tokens() as usize
            && at.head < shape.heads() as usize;
        let page = u32::try_from(at.page).ok().filter(|_| is_inside)?;
        let offset = strides.page_offset(at.part, at.layer, page)
            + at.token as u64 * strides.token
            + at.head as u64 * strides.head;
        let start = self.pool.start().as_ptr();
        Some((
            start.wrapping_add(offset as usize),
            shape.head_bytes() as usize,
        ))
    }

    /// The values of a head.
    pub(crate) fn get(&self, at: HeadAt) -> Option<&[u8]> {
        let (start, bytes) = self.at(at)?;
        // SAFETY: values of an existing row lie in the pool. No copy runs, and nothing else writes
        // the stage while it is borrowed.
        Some(unsafe { std::slice::from_raw_parts(start, bytes) })
    }

    /// Writes the values of a head. False if there are none, or of another size.
    pub(crate) fn set(&mut self, at: HeadAt, values: &[u8]) -> bool {
        let Some((start, bytes)) = self.at(at).filter(|found| found.1 == values.len()) else {
            return false;
        };
        // SAFETY: as above; the stage is borrowed exclusively.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), start, bytes) };
        true
    }
}

impl Sequence {
    /// The shape of its rows.
    pub(crate) fn shape(&self) -> &KvShape {
        self.shared.l1().shape()
    }

    /// A stage of so many pages. `None`: L1 is in host memory.
    ///
    /// # Errors
    /// There is no memory, or the device cannot use it. Or the cache is closed.
    pub(crate) fn stage(&self, pages: usize) -> Result<Option<Stage>, DeviceError> {
        if self.shared.is_on_host() {
            return Ok(None);
        }
        let device = self.shared.with(|cache| cache.device()).map_err(closed)?;
        let (shape, pages) = (
            *self.shape(),
            u32::try_from(pages.max(1)).unwrap_or(u32::MAX),
        );
        let memory = HostMemory::zeroed(pool_bytes(&shape, pages))?;
        let pool = device.register(memory, Layout::PageHead, &shape, pages)?;
        Ok(Some(Stage { device, pool }))
    }

    /// Copies the rows of some tokens into a stage, in which `first` is the first page. Waits.
    ///
    /// # Errors
    /// The device refuses a copy, or a copy or a load has failed.
    pub(crate) fn copy_out(
        &self,
        stage: &mut Stage,
        first: usize,
        tokens: Range<usize>,
    ) -> Result<(), DeviceError> {
        for ticket in self.filled_by(0..self.shape().layers()) {
            ticket.wait()?;
        }
        let mut begun = Vec::new();
        let after = Ticket::done();
        let copied = self.copy(Direction::Store, stage, (first, tokens), &after, &mut begun);
        let mut tickets = begun.iter().flat_map(LayerTickets::tickets);
        let ended = tickets.try_fold((), |(), ticket| ticket.wait());
        copied.and(ended)
    }

    /// Copies the rows of some tokens from a stage, in which `first` is the first page, behind the
    /// forwards that were reported. The copies that have begun are added to `begun`: they touch the
    /// stage, also after an error.
    ///
    /// # Errors
    /// The device refuses a copy, or the cache is closed.
    pub(crate) fn copy_in(
        &mut self,
        stage: &mut Stage,
        first: usize,
        tokens: Range<usize>,
        begun: &mut Vec<LayerTickets>,
    ) -> Result<(), DeviceError> {
        let after = self.shared.with(|cache| cache.all_forwards());
        let after = after.map_err(closed)?;
        self.copy(Direction::Load, stage, (first, tokens), &after, begun)
    }

    fn copy(
        &self,
        direction: Direction,
        stage: &Stage,
        (first, tokens): (usize, Range<usize>),
        after: &Ticket,
        begun: &mut Vec<LayerTickets>,
    ) -> Result<(), DeviceError> {
        self.copied_by(|rows, copies| {
            for part in rows.of_pages(tokens) {
                let (page, pages) = (part.pages.end as u32, stage.pool.pages());
                let tier = Tier::L2;
                let none = DeviceError::NoSuchPage { tier, page, pages };
                let pair = |page: usize| {
                    let l2 = u32::try_from(page.checked_sub(first)?).ok()?;
                    Some(PagePair {
                        l1: rows.page(page)?,
                        l2,
                    })
                };
                let pairs: Option<Vec<PagePair>> = part.pages.clone().map(pair).collect();
                // SAFETY: the pages stay those of the sequence until `copies` have ended. The owner
                // of the sequence computes none of these rows meanwhile, and waits for the copies
                // before it touches the stage.
                let transfer =
                    unsafe { Transfer::new(rows.l1(), &stage.pool, pairs.ok_or(none)?) }?;
                let layers = 0..rows.l1().shape().layers();
                let transfer = transfer.only(layers, part.rows)?;
                let copying = match direction {
                    Direction::Load => stage.device.load(transfer, after),
                    Direction::Store => stage.device.store(transfer, after),
                };
                let copying = copying.map_err(|refused| refused.error)?;
                for gate in copying.gates() {
                    copies.add(gate.tickets());
                    begun.push(gate.clone());
                }
            }
            Ok(())
        })
    }
}

fn closed(_closed: Closed) -> DeviceError {
    DeviceError::Closed
}
