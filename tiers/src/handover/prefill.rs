//! Offers of a prefill process.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_base::fork::Origin;
use larder_base::runtime::after;
use larder_base::system::processes;

use super::desk::{Desk, Entry, Outcome};
use super::error::HandoverError;
use super::memory::Memory;
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
    /// The socket or the memory. Or the cache has ranks, components, or L1 on a GPU.
    pub fn bind(
        socket: &Path,
        cache: &PrefixCache,
        memory_bytes: u64,
    ) -> Result<Prefill, HandoverError> {
        let cache = cache.lender();
        if let Some(what) = cache.unsupported() {
            return Err(HandoverError::Unsupported { what });
        }
        let page_bytes = cache.shape().page_bytes();
        let blocks = (memory_bytes / u64::from(page_bytes)).clamp(1, u32::MAX.into());
        let no_memory = |error: std::io::Error| HandoverError::Memory {
            bytes: memory_bytes,
            why: error.to_string(),
        };
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let memory = Memory::create(blocks, page_bytes as usize).map_err(no_memory)?;
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
    /// The tokens of each layer in the memory.
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
        self.give(sequence, layer..layer + 1, tokens)
    }

    /// As [`Offer::layer`], for all layers.
    ///
    /// # Errors
    /// Those of [`Offer::layer`].
    pub fn layers(&mut self, sequence: &Sequence, tokens: usize) -> Result<(), HandoverError> {
        (0..self.desk.cache.shape().layers())
            .try_for_each(|layer| self.layer(sequence, layer, tokens))
    }

    fn give(
        &mut self,
        sequence: &Sequence,
        layers: Range<u32>,
        tokens: usize,
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
            self.desk
                .has_written(self.number, Some((layers.clone(), tokens)));
            std::thread::yield_now();
        }
        let mut copied = Ok(());
        for layer in layers.clone() {
            let given = self.given[layer as usize];
            copied = self.copy(sequence, layer, given..tokens.max(given), &loan.blocks);
            if copied.is_err() {
                break;
            }
        }
        let written = copied.is_ok().then_some((layers.clone(), tokens));
        self.desk.has_written(self.number, written);
        copied?;
        for given in &mut self.given[layers.start as usize..layers.end as usize] {
            *given = tokens.max(*given);
        }
        Ok(())
    }

    fn copy(
        &self,
        sequence: &Sequence,
        layer: u32,
        tokens: Range<usize>,
        blocks: &[u32],
    ) -> Result<(), HandoverError> {
        let first_page = self.from / self.desk.cache.shape().page_tokens() as usize;
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
    /// its sampling: at most [`DATA_BYTES_MAX`] bytes. The sequence is not needed any more.
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
        if let Some((layer, tokens)) = entry.missing() {
            let all = entry.tokens;
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
        let mut table = self.desk.table();
        self.desk
            .over(&mut table, self.number, Err(HandoverError::Cancelled));
        table.offers.remove(&self.number);
        drop(table);
        self.desk.ring();
    }
}
