//! Windows and states of requests: the copies within L1, around forwards.

use larder_kernels::{ChunkAt, DeviceError, ForeignStream, LayerTickets, RowCopy, Ticket};

use super::agree::Call;
use super::error::PrepareError;
use super::{Cache, Section};
use crate::core::{Request, TailCopy};
use crate::tree::LoadId;

impl Cache {
    /// Prepares the forward that computes the tokens of a request up to the first `tokens`: the
    /// request gets the window pages for them, and the state from which it starts is copied to its
    /// own block, on `stream` if the device has streams. Call it before each forward of a model
    /// with windows or states. On a device without streams, the loads of the request have ended.
    ///
    /// # Errors
    /// A pool has no room, the request is broken, or the stream is missing. Try again.
    pub fn prepare(
        &mut self,
        request: &mut Request,
        tokens: usize,
        stream: Option<ForeignStream>,
    ) -> Result<Option<Ticket>, PrepareError> {
        self.agreed.called(Call::Prepare, [tokens as u64]);
        self.look_at_forwards();
        if request.awaits_state() {
            self.check_stream(stream)?;
            let loads = request.row_and_loads().1.to_vec();
            self.hold_stream(&loads, stream)?;
        }
        let copies = self.core.prepare(request, tokens);
        self.clean();
        self.carry_out();
        Ok(self.copy_within(request, &copies?, stream))
    }

    /// Reports that the first `tokens` tokens of a request are computed by this forward. Copies the
    /// states at a border of pages, before the next forward changes them, and frees window pages
    /// behind. Call it after each forward of a model with windows or states. On a device without
    /// streams, the forward has ended.
    ///
    /// # Errors
    /// The stream is missing, or the device has none. Nothing has changed.
    pub fn passed(
        &mut self,
        request: &mut Request,
        tokens: usize,
        forward: &Ticket,
        stream: Option<ForeignStream>,
    ) -> Result<Option<Ticket>, DeviceError> {
        self.agreed.called(Call::Passed, [tokens as u64]);
        self.look_at_forwards();
        if request.state_pools() > 0 {
            self.check_stream(stream)?;
        }
        let fence = self.fence(forward);
        let copies = self.core.passed(request, tokens, fence);
        self.carry_out();
        Ok(self.copy_within(request, &copies, stream))
    }

    fn check_stream(&self, stream: Option<ForeignStream>) -> Result<(), DeviceError> {
        match (self.device.has_streams(), stream) {
            (true, None) => Err(DeviceError::StreamNeeded),
            (false, Some(_)) => Err(DeviceError::NoStreams),
            _ => Ok(()),
        }
    }

    /// Makes the stream wait for these loads. Without a stream they have ended.
    fn hold_stream(
        &self,
        loads: &[LoadId],
        stream: Option<ForeignStream>,
    ) -> Result<(), PrepareError> {
        let Some(stream) = stream else {
            // All ranks agree on this.
            let mut loads = loads.iter();
            return match loads.any(|load| self.core.is_loading(*load)) {
                true => Err(PrepareError::Loading),
                false => Ok(()),
            };
        };
        let gates = loads.iter().filter_map(|load| self.loads.get(load));
        for ticket in gates.flatten().flat_map(LayerTickets::tickets) {
            self.device.hold(stream, &ticket)?;
        }
        Ok(())
    }

    /// Copies pages of tail pools. Returns the ticket of the last copy that has not succeeded yet.
    fn copy_within(
        &mut self,
        request: &Request,
        copies: &[TailCopy],
        stream: Option<ForeignStream>,
    ) -> Option<Ticket> {
        let mut last = None;
        for copy in copies {
            let sections = self.tails.get(copy.pool).cloned().unwrap_or_default();
            for Section { l1, .. } in &sections {
                let rows = RowCopy {
                    from: copy.from,
                    to: copy.to,
                    rows: l1.shape().page_tokens(),
                };
                // SAFETY: both pages are held by the request or its own, and no transfer writes
                // them: the load of the source has ended, or the stream waits for it. The forwards
                // that touch them are on the stream, or have ended.
                let copied = unsafe { self.device.copy_rows(l1, rows, stream) };
                let ticket = copied.unwrap_or_else(Ticket::failed);
                let fence = self.fence(&ticket);
                self.core.tails_copied(request, &[*copy], fence);
                if self.agreed.has_ranks() || ticket.poll() != Ok(true) {
                    last = Some(ticket);
                }
            }
        }
        self.look_at_forwards();
        last
    }

    /// Zeroes the pages of tail pools that requests got with bytes of others.
    pub(super) fn clean_tails(&mut self) {
        let pages = self.core.take_unclean_tails();
        if self.device.has_streams() {
            return;
        }
        for (pool, page) in pages {
            for Section { l1, .. } in self.tails.get(pool).into_iter().flatten() {
                let shape = *l1.shape();
                let zeros = vec![0; shape.chunk_bytes() as usize];
                let places = (0..shape.parts())
                    .flat_map(|part| (0..shape.layers()).map(move |layer| (part, layer)));
                for (part, layer) in places {
                    let at = ChunkAt { part, layer, page };
                    // SAFETY: as for pages of full attention: the request owns the page, and
                    // nothing else touches it.
                    let zeroed = unsafe { self.device.write_l1(l1, at, &zeros) };
                    if let Err(error) = zeroed {
                        // runbook: rows of another tenant were not zeroed
                        tracing::error!("rows of another tenant were not zeroed: {error}");
                    }
                }
            }
        }
    }
}
