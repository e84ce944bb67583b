//! Offers of a prefill process.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_base::fork::Origin;
use larder_base::runtime::after;
use larder_base::system::processes;
use larder_kernels::{Direction, LayerTickets, Ticket};

use super::desk::{Desk, Entry, Flight, Outcome, Written};
use super::device::Job;
use super::error::HandoverError;
use super::memory::{Loan, Memory};
use super::wire::PAGES_MAX;
use super::{DATA_BYTES_MAX, State, serve, start};
use crate::core::RequestId;
use crate::planted::planted;
use crate::prefix::{PrefixCache, Sequence};

/// The end of a prefill process: a socket at which decode processes take requests, and memory that
/// it lends to them. A drop ends all offers.
pub struct Prefill {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
    origin: Origin,
}

impl Prefill {
    /// Listens at `socket`, with memory of about `memory_bytes` bytes for the rows of requests on
    /// offer: whole pages, and at least one. The file of the socket is for the user of this process
    /// alone. A socket that a process left behind is replaced.
    ///
    /// # Errors
    /// The socket or the memory: with L1 on a device, this locks the memory to be lent. Or the
    /// cache has ranks or components.
    pub fn bind(
        socket: &Path,
        cache: &PrefixCache,
        memory_bytes: u64,
    ) -> Result<Prefill, HandoverError> {
        let cache = cache.lender();
        if let Some(what) = cache.unsupported() {
            return Err(HandoverError::Unsupported { what });
        }
        let shape = *cache.shape();
        let page_bytes = shape.page_bytes();
        let blocks = (memory_bytes / u64::from(page_bytes)).clamp(1, u32::MAX.into());
        let no_memory = |error: std::io::Error| HandoverError::Memory {
            bytes: memory_bytes,
            why: error.to_string(),
        };
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let memory = Memory::create(blocks, &shape).map_err(no_memory)?;
        let memory = memory.registered(cache.device()?, &shape);
        let memory = memory.map_err(|error| HandoverError::Memory {
            bytes: memory_bytes,
            why: error.to_string(),
        })?;
        let mut name = [0; 8];
        processes::fill_random(&mut name).map_err(no_memory)?;
        let desk = Desk::new(memory, u64::from_ne_bytes(name), cache).map_err(no_memory)?;
        let desk = Arc::new(desk);
        let failed = |what| {
            move |error: std::io::Error| HandoverError::Socket {
                what,
                path: socket.display().to_string(),
                why: error.to_string(),
            }
        };
        let listener = serve::listen(socket).map_err(failed("listening at"))?;
        let served = desk.clone();
        let thread = start("larder-prefill", move || serve::serve(&served, &listener));
        Ok(Prefill {
            desk,
            thread: Some(thread.map_err(failed("a thread for"))?),
            origin: Origin::here(),
        })
    }

    /// Offers the tokens that a sequence has now, under a name that the decode process gives, too:
    /// their rows, computed or not, from token `from` on; and at the end the next token. The tokens
    /// before `from`, rounded down to whole pages, go through the store.
    ///
    /// [`Sequence::cached`] is a good `from`: cached pages are in the store, or soon will be. 0
    /// hands all rows over. The last page goes through the memory in any case.
    ///
    /// The offer ends within `timeout`. The sequence can be kept or dropped after
    /// [`Offer::end`].
    ///
    /// # Errors
    /// Others have the memory, or the name. The sequence is broken or of another cache.
    pub fn offer(
        &self,
        id: &str,
        sequence: &Sequence,
        from: usize,
        timeout: Duration,
    ) -> Result<Offer, HandoverError> {
        if !sequence.is_of(&self.desk.cache) {
            let what = "a sequence of another cache";
            return Err(HandoverError::NoSuchRows { what });
        }
        let (request, prompt) = sequence.identity()?;
        let what = "a prompt with tokens that cannot be numbered";
        let prompt = prompt.ok_or(HandoverError::Unsupported { what })?;
        let (page, tokens) = (
            self.desk.cache.shape().page_tokens() as usize,
            sequence.len(),
        );
        let from = from.min(tokens - 1) / page * page;
        let blocks = (tokens - from).div_ceil(page);
        if blocks > PAGES_MAX || u32::try_from(tokens).is_err() || id.len() > DATA_BYTES_MAX {
            let (bytes, max) = (blocks.max(id.len()), DATA_BYTES_MAX);
            return Err(HandoverError::TooLong { bytes, max });
        }
        let layers = self.desk.cache.shape().layers() as usize;
        let entry = |loan| Entry {
            id: id.to_owned(),
            prompt,
            tokens,
            from,
            loan,
            is_writing: false,
            flights: VecDeque::new(),
            is_dropped: false,
            layers: vec![from; layers],
            end: None,
            deadline: after(timeout),
            timeout,
            taker: None,
            outcome: None,
        };
        let number = self.desk.offer(blocks, entry, id)?;
        Ok(Offer {
            desk: self.desk.clone(),
            number,
            request,
            from,
            tokens,
            given: vec![from; layers],
        })
    }

    /// Pages of the memory that no request has.
    #[must_use]
    pub fn free_pages(&self) -> usize {
        self.desk.free_blocks()
    }
}

impl Drop for Prefill {
    fn drop(&mut self) {
        if self.origin.is_inherited() {
            // A forked child has neither the thread nor the socket.
            std::mem::forget((self.thread.take(), self.desk.clone()));
            return;
        }
        self.desk.table().is_ending = true;
        self.desk.ring();
        if let Some(thread) = self.thread.take() {
            // A panic has been reported.
            let _ = thread.join();
        }
    }
}

/// A request on offer. A drop takes it back: the decode process fails, unless it has all.
#[must_use = "a dropped offer is taken back"]
pub struct Offer {
    desk: Arc<Desk>,
    number: u64,
    request: RequestId,
    from: usize,
    tokens: usize,
    /// The tokens of each layer in the memory, or on their way.
    given: Vec<usize>,
}

impl Offer {
    /// The rows of the first `tokens` tokens are computed in this layer: they are copied to the
    /// memory, and the decode process copies them on. Layers and chunks of a prompt come in any
    /// order.
    ///
    /// # Errors
    /// The hand-over has failed; there are no such rows; or a load of a cached row has failed.
    pub fn layer(
        &mut self,
        sequence: &Sequence,
        layer: u32,
        tokens: usize,
    ) -> Result<(), HandoverError> {
        self.layer_behind(sequence, layer, tokens, &Ticket::done())
    }

    /// As [`Offer::layer`], behind a forward that may not have ended, for example all work enqueued
    /// so far on the stream of the forwards ([`Device::record`]). With L1 on a device, the device
    /// copies behind the forward, and this does not wait, unless the driver does not lock the
    /// memory that is lent. The pages of the sequence stay its own until these copies have ended,
    /// also after its drop.
    ///
    /// [`Device::record`]: larder_kernels::Device::record
    ///
    /// # Errors
    /// Those of [`Offer::layer`]. Or the device refuses the copy.
    pub fn layer_behind(
        &mut self,
        sequence: &Sequence,
        layer: u32,
        tokens: usize,
        forward: &Ticket,
    ) -> Result<(), HandoverError> {
        self.give(sequence, layer..layer.saturating_add(1), tokens, forward)
    }

    /// As [`Offer::layer`], for all layers.
    ///
    /// # Errors
    /// Those of [`Offer::layer`].
    pub fn layers(&mut self, sequence: &Sequence, tokens: usize) -> Result<(), HandoverError> {
        let layers = 0..self.desk.cache.shape().layers();
        match self.desk.memory.pool() {
            Some(_) => self.give(sequence, layers, tokens, &Ticket::done()),
            // The decode process copies each layer when it is there.
            None => layers
                .into_iter()
                .try_for_each(|layer| self.layer(sequence, layer, tokens)),
        }
    }

    fn give(
        &mut self,
        sequence: &Sequence,
        layers: Range<u32>,
        tokens: usize,
        forward: &Ticket,
    ) -> Result<(), HandoverError> {
        let no = |what| Err(HandoverError::NoSuchRows { what });
        if !sequence.is_of(&self.desk.cache) || sequence.number() != Some(self.request) {
            return no("a layer of another sequence than the offered one");
        }
        if tokens > self.tokens || layers.end as usize > self.given.len() {
            return no("a layer or tokens that the request does not have");
        }
        let loan = self.desk.writes(self.number)?;
        if planted!(AnnouncesBeforeCopy) {
            let written = Written::Layers(layers.clone(), tokens);
            self.desk.has_written(self.number, written);
            std::thread::yield_now();
        }
        let (written, given) = match self.desk.memory.pool() {
            Some(_) => self.fly(sequence, (layers.clone(), tokens), &loan, forward),
            None => match self.copy_all(sequence, (layers.clone(), tokens), &loan, forward) {
                Ok(()) => (Written::Layers(layers.clone(), tokens), Ok(())),
                Err(error) => (Written::Nothing, Err(error)),
            },
        };
        self.desk.has_written(self.number, written);
        given?;
        for given in &mut self.given[layers.start as usize..layers.end as usize] {
            *given = tokens.max(*given);
        }
        Ok(())
    }

    fn first_page(&self) -> usize {
        self.from / self.desk.cache.shape().page_tokens() as usize
    }

    /// Begins the copies of a device.
    fn fly(
        &self,
        sequence: &Sequence,
        (layers, tokens): (Range<u32>, usize),
        loan: &Loan,
        forward: &Ticket,
    ) -> (Written, Result<(), HandoverError>) {
        let mut sources = sequence.filled_by(0..layers.end);
        sources.push(forward.clone());
        sources.retain(|ticket| ticket.poll() != Ok(true));
        let after = match planted!(CopiesBeforeForward) {
            true => Ticket::done(),
            false => Ticket::all_over(sources.iter().cloned()),
        };
        let mut flights = Vec::new();
        let all = &self.given[layers.start as usize..layers.end as usize];
        let mut first = layers.start;
        // Layers with the same rows go together.
        for of in all.chunk_by(|one, other| one == other) {
            let layers = first..first + u32::try_from(of.len()).unwrap_or(0);
            first = layers.end;
            let given = of.first().copied().unwrap_or(tokens);
            let mut begun = Vec::new();
            let copied = sequence.copied_by(|rows, copies| {
                let job = Job {
                    rows,
                    layers: layers.clone(),
                    tokens: given..tokens.max(given),
                    first_page: self.first_page(),
                    blocks: &loan.blocks,
                };
                // SAFETY: the pages stay those of the sequence until `copies` have ended, and its
                // engine does not write computed rows. The blocks are lent to this offer until its
                // flights have ended.
                let copied = unsafe {
                    let memory = &self.desk.memory;
                    memory.copy_by_device(Direction::Store, &job, &after, &mut begun)
                };
                copies.add(begun.iter().flat_map(LayerTickets::tickets));
                copied
            });
            let mut flight = Flight {
                layers,
                tokens,
                copies: begun.iter().flat_map(LayerTickets::tickets).collect(),
                sources: sources.clone(),
            };
            if let Err(error) = copied {
                flight.sources.push(Ticket::failed(error.clone()));
                flights.push(flight);
                return (Written::Flights(flights), Err(HandoverError::Load(error)));
            }
            flights.push(flight);
        }
        (Written::Flights(flights), Ok(()))
    }

    /// Copies rows in host memory.
    fn copy_all(
        &self,
        sequence: &Sequence,
        (mut layers, tokens): (Range<u32>, usize),
        loan: &Loan,
        forward: &Ticket,
    ) -> Result<(), HandoverError> {
        forward.wait().map_err(HandoverError::Load)?;
        layers.try_for_each(|layer| {
            let given = self.given[layer as usize];
            self.copy(sequence, layer, given..tokens.max(given), &loan.blocks)
        })
    }

    fn copy(
        &self,
        sequence: &Sequence,
        layer: u32,
        tokens: Range<usize>,
        blocks: &[u32],
    ) -> Result<(), HandoverError> {
        let first_page = self.first_page();
        let all = sequence.with_rows(layer, tokens.start, |rows| {
            let mut pieces = rows.pieces(layer, tokens).into_iter();
            pieces.all(|piece| {
                let block = blocks.get(piece.page - first_page);
                block.is_some_and(|block| {
                    let from = std::ptr::with_exposed_provenance(piece.address as usize);
                    // SAFETY: the piece is in pages of the sequence, which is borrowed: its rows
                    // are written through `&mut` or behind the tickets that were waited for. The
                    // block is lent to this offer, until `has_written`.
                    unsafe {
                        self.desk
                            .memory
                            .copy_in(*block, piece.offset, from, piece.bytes)
                    }
                })
            })
        });
        match all.map_err(HandoverError::Load)? {
            true => Ok(()),
            false => Err(HandoverError::NoSuchRows {
                what: "a row outside of the memory",
            }),
        }
    }

    /// All rows are computed, and this is the next token, with data of the engine, for example of
    /// its sampling: at most [`DATA_BYTES_MAX`] bytes. On a GPU, [`Sequence::verify`] was true: the
    /// token is output. The sequence is not needed any more.
    ///
    /// # Errors
    /// The hand-over has failed. Rows are missing, or the data are too long.
    pub fn end(&mut self, token: u64, data: &[u8]) -> Result<(), HandoverError> {
        let (bytes, max) = (data.len(), DATA_BYTES_MAX);
        if bytes > max {
            return Err(HandoverError::TooLong { bytes, max });
        }
        let mut table = self.desk.table();
        let entry = table.offers.get_mut(&self.number);
        let entry = entry.ok_or(HandoverError::Closed)?;
        if let Some(Err(error)) = &entry.outcome {
            return Err(error.clone());
        }
        let mut given = (0..).zip(self.given.iter().copied());
        if let Some((layer, tokens)) = given.find(|of| of.1 < self.tokens) {
            let all = self.tokens;
            return Err(HandoverError::NotComputed { layer, tokens, all });
        }
        entry.end = Some((token, data.to_vec()));
        drop(table);
        self.desk.ring();
        Ok(())
    }

    /// Where it is. Does not wait.
    #[must_use]
    pub fn state(&self) -> State {
        let mut table = self.desk.table();
        self.desk.expire(&mut table, Instant::now());
        let entry = table.offers.get(&self.number);
        entry.map_or(State::Failed(HandoverError::Closed), Entry::state)
    }

    /// Waits until the decode process has all, at most until the end of its time.
    ///
    /// # Errors
    /// Why the hand-over has failed.
    pub fn wait(&self) -> Outcome {
        let mut table = self.desk.table();
        loop {
            self.desk.expire(&mut table, Instant::now());
            let entry = table.offers.get(&self.number);
            let entry = entry.ok_or(HandoverError::Closed)?;
            if let Some(outcome) = &entry.outcome {
                return outcome.clone();
            }
            let until = entry.deadline;
            self.desk.wait(&mut table, until);
        }
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.desk.drop_offer(self.number);
    }
}
