//! The components of a hybrid model in a sequence: followers, windows, states.
//!
//! Rows are sound for the reasons of [`sequence`](super::sequence). A page of a window is written
//! while the sequence owns it; a page of a pool is only read. The block of a state is the
//! sequence's own: copies of it are made while no slice borrows the sequence.

use std::slice;
use std::time::Duration;

use larder_base::runtime::after;
use larder_kernels::{ChunkAt, ForeignStream, L1Pool, LayerTickets};

use super::error::{Closed, RowError, SequenceError};
use super::sequence::Sequence;
use super::shared::Numbering;
use crate::cache::PrepareError;
use crate::core::{ExtendError, NoRoom, Request};
use crate::pool::Row;

/// A row of a component: its layer in one part of one section.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowAt {
    /// The component, by its place in [`Model::components`](crate::Model::components).
    pub component: usize,
    /// The section.
    pub section: usize,
    /// The part of the section.
    pub part: u32,
    /// The layer.
    pub layer: u32,
}

impl Sequence {
    /// Prepares the forward that computes the tokens up to the first `tokens`: gets window pages
    /// for them, and copies the state from which the sequence starts to its own block. Call it
    /// before each forward of a model with windows or states. Waits for the loads of the cached
    /// pages before that copy.
    ///
    /// # Errors
    /// A pool has no room: drop or keep another sequence, or wait while copies will free pages, and
    /// try again. The sequence is broken, or the cache is closed. Or L1 is on a GPU, and the model
    /// has states.
    pub fn prepare(&mut self, tokens: usize) -> Result<(), SequenceError> {
        self.prepare_by(tokens, None, Duration::ZERO)
    }

    /// As [`Sequence::prepare`], but waits for copies that will free pages, at most `wait`.
    ///
    /// # Errors
    /// Those of [`Sequence::prepare`].
    pub fn prepare_within(&mut self, tokens: usize, wait: Duration) -> Result<(), SequenceError> {
        self.prepare_by(tokens, None, wait)
    }

    /// As [`Sequence::prepare`], on a GPU: the copy runs on the stream of the forwards, behind the
    /// loads of the cached pages.
    ///
    /// # Errors
    /// Those of [`Sequence::prepare`]. Or the device has no streams.
    pub fn prepare_on(
        &mut self,
        tokens: usize,
        stream: ForeignStream,
    ) -> Result<(), SequenceError> {
        self.prepare_by(tokens, Some(stream), Duration::ZERO)
    }

    fn prepare_by(
        &mut self,
        tokens: usize,
        stream: Option<ForeignStream>,
        wait: Duration,
    ) -> Result<(), SequenceError> {
        let awaits_state = self.request().is_some_and(Request::awaits_state);
        if awaits_state && stream.is_none() {
            self.wait_loads();
            self.shared.poll()?;
        }
        let request = self.request.as_mut().ok_or(Closed::Ended)?;
        let mut last = NoRoom::default();
        let prepared = self.shared.wait(after(wait), |cache, _| {
            match cache.prepare(request, tokens, stream) {
                Err(PrepareError::Extend(ExtendError::NoRoom(no_room))) if no_room.pending > 0 => {
                    last = no_room;
                    None
                }
                result => Some((result, cache.newest_forward())),
            }
        })?;
        let (prepared, forward) = prepared.ok_or(last)?;
        if let Some(ticket) = prepared? {
            (self.ticket, self.forward) = (ticket, forward);
        }
        Ok(())
    }

    /// The row of a follower or of a window at a position. Waits for the loads of the cached pages
    /// if it is cached.
    ///
    /// # Errors
    /// Those of [`Sequence::row`]. Or the position is outside the window.
    pub fn component_row(&self, at: RowAt, position: usize) -> Result<&[u8], RowError> {
        if position < self.cached().tokens() {
            self.loaded()?;
        }
        let (start, bytes, _) = self.component_place(at, position)?;
        // SAFETY: as for rows of full attention.
        Ok(unsafe { slice::from_raw_parts(start, bytes) })
    }

    /// The row of a follower or of a window at a position, to be written.
    ///
    /// # Errors
    /// Those of [`Sequence::row_mut`]. Or the position is outside the window.
    pub fn component_row_mut(&mut self, at: RowAt, position: usize) -> Result<&mut [u8], RowError> {
        let (start, bytes, is_own) = self.component_place(at, position)?;
        if !is_own {
            let first = position + 1;
            return Err(RowError::Cached { position, first });
        }
        // SAFETY: as for rows of full attention: the sequence owns the page.
        Ok(unsafe { slice::from_raw_parts_mut(start, bytes) })
    }

    /// A layer of a state, as the last forward left it. Zero at the first token.
    ///
    /// # Errors
    /// There is no such layer, L1 is not in host memory, or [`Sequence::prepare`] was not called.
    pub fn state(&self, at: RowAt) -> Result<&[u8], RowError> {
        let (start, bytes) = self.state_place(at)?;
        // SAFETY: the block is in the pool, which `self.shared` holds, and the sequence's own.
        Ok(unsafe { slice::from_raw_parts(start, bytes) })
    }

    /// A layer of a state, to be changed by a forward.
    ///
    /// # Errors
    /// Those of [`Sequence::state`].
    pub fn state_mut(&mut self, at: RowAt) -> Result<&mut [u8], RowError> {
        let (start, bytes) = self.state_place(at)?;
        // SAFETY: as above, and `self` is borrowed exclusively.
        Ok(unsafe { slice::from_raw_parts_mut(start, bytes) })
    }

    /// The window pages that the sequence has: the number of the first one among the pages of the
    /// sequence, and the pages. `None` if the component is no window.
    #[must_use]
    pub fn window_pages(&self, component: usize) -> Option<(usize, Vec<u32>)> {
        match self.shared.component(component)?.place {
            Numbering::Tail(pool) => self.request()?.window(pool),
            Numbering::Follower => None,
        }
    }

    /// The block of a state that forwards change. `None` if the component is no state.
    #[must_use]
    pub fn state_block(&self, component: usize) -> Option<u32> {
        match self.shared.component(component)?.place {
            Numbering::Tail(pool) => self.request()?.state(pool),
            Numbering::Follower => None,
        }
    }

    fn loaded(&self) -> Result<(), RowError> {
        let tickets = self.gates.iter().flat_map(LayerTickets::tickets);
        for ticket in tickets {
            ticket.wait().map_err(RowError::Load)?;
        }
        Ok(())
    }

    /// Waits for the loads, with any outcome.
    fn wait_loads(&self) {
        let tickets = self.gates.iter().flat_map(LayerTickets::tickets);
        for ticket in tickets {
            // The next poll finds the failure.
            let _failed = ticket.wait();
        }
    }

    /// The start of a row of a component, its bytes, and whether the sequence may write it.
    fn component_place(
        &self,
        at: RowAt,
        position: usize,
    ) -> Result<(*mut u8, usize, bool), RowError> {
        let pool = self.section(at)?;
        let place = self.shared.component(at.component).map(|of| of.place);
        let (number, page_tokens) = (
            position / self.shared.page_tokens(),
            self.shared.page_tokens(),
        );
        let request = self.request();
        let found = match place {
            Some(Numbering::Tail(tail)) => {
                request.and_then(|request| request.window_page(tail, number))
            }
            _ => {
                let row = request.map(|request| request.row_and_loads().0);
                let shared = row.map_or(0, Row::shared_pages);
                let page = row.and_then(|row| row.pages().get(number));
                page.map(|page| (*page, number >= shared))
            }
        };
        let slots = request.map_or(0, Request::tokens);
        let Some((page, is_own)) = found.filter(|_| position < slots) else {
            return Err(RowError::NoSlot { position, slots });
        };
        let (start, bytes) = row_in(pool, at, page)?;
        let offset = position % page_tokens * bytes;
        Ok((
            std::ptr::with_exposed_provenance_mut(start + offset),
            bytes,
            is_own,
        ))
    }

    fn state_place(&self, at: RowAt) -> Result<(*mut u8, usize), RowError> {
        let pool = self.section(at)?;
        let awaits = self.request().is_none_or(Request::awaits_state);
        let block = self.state_block(at.component).filter(|_| !awaits);
        let (start, bytes) = row_in(pool, at, block.ok_or(RowError::NotPrepared)?)?;
        Ok((std::ptr::with_exposed_provenance_mut(start), bytes))
    }

    fn section(&self, at: RowAt) -> Result<&L1Pool, RowError> {
        if !self.shared.is_on_host() {
            return Err(RowError::NotOnHost);
        }
        let component = self.shared.component(at.component);
        let section = component.and_then(|of| of.sections.get(at.section));
        section.ok_or(RowError::NoSuchRow {
            part: at.part,
            layer: at.layer,
        })
    }
}

/// The first row of a page in one layer of one part, and the bytes of a row.
fn row_in(pool: &L1Pool, at: RowAt, page: u32) -> Result<(usize, usize), RowError> {
    let RowAt { part, layer, .. } = at;
    let chunk = pool.address(ChunkAt { part, layer, page });
    let chunk = chunk.map_err(|_| RowError::NoSuchRow { part, layer })?;
    Ok((chunk as usize, pool.shape().row_bytes() as usize))
}
