//! A running request: its cached rows, its slots, and its computed tokens.
//!
//! Rows on a CPU are slices of L1. They are sound because:
//! - the pages of a sequence stay until it ends: those of the tree are locked, the others are its
//!   own. A slice borrows the sequence, so none is left when it ends;
//! - a page of the tree is written only by the load that fills it, and [`Sequence::row`] waits for
//!   that load. Another sequence wrote its rows through `&mut` before it gave them to the tree;
//! - an own page is in no transfer: orders of the core contain pages of the tree only. It is
//!   written through `&mut self` alone, but for rows that another process computes
//!   ([`filling`](super::filling)): [`Sequence::row`] waits for them as for a load.
//!
//! So the request stays in here: a call of the cache with it could write its own pages.

use std::slice;
use std::sync::Arc;
use std::time::Duration;

use larder_base::runtime::after;
use larder_format::PageKey;
use larder_kernels::{ChunkAt, ForeignStream, LayerTickets, Ticket};

use super::error::{Closed, RowError, SequenceError};
use super::filling::{DeviceCopies, Handed};
use super::shared::Shared;
use crate::cache::Cache;
use crate::core::{Broken, ExtendError, Fence, NoRoom, Request};
use crate::planted::planted;
use crate::pool::Row;

/// The tokens of a prompt whose KV was not computed, by the tier in which it was. The first tokens
/// were in L1, the next in L2, the last in L3. Pages that another request has brought from L3
/// count as L2, or as L1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cached {
    /// Tokens found in L1.
    pub l1: usize,
    /// Tokens found in L2.
    pub l2: usize,
    /// Tokens found in L3.
    pub l3: usize,
}

impl Cached {
    /// All cached tokens: a multiple of the page size, and fewer than the prompt has. After a
    /// truncation within them: the kept ones.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.l1 + self.l2 + self.l3
    }

    fn truncate(&mut self, mut tokens: usize) {
        for tier in [&mut self.l1, &mut self.l2, &mut self.l3] {
            *tier = tokens.min(*tier);
            tokens -= *tier;
        }
    }
}

/// A page of a sequence in place of which it has a page of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replaced {
    /// Its place in [`Slots::pages`].
    pub at: usize,
    /// The page that the sequence had.
    pub former: u32,
    /// The page of the tree.
    pub page: u32,
}

/// Where the KV of a sequence is. A forward writes only the slots of tokens that are not cached. It
/// reads the cached ones of a layer behind the tickets of that layer. If a load fails after the
/// launch, the sequence is broken.
#[derive(Clone, Copy, Debug)]
pub struct Slots<'a> {
    row: &'a Row,
    loads: &'a [LayerTickets],
}

impl<'a> Slots<'a> {
    /// The pages, in the order of their tokens.
    #[must_use]
    pub fn pages(&self) -> &'a [u32] {
        self.row.pages()
    }

    /// Number of tokens with a slot.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.row.tokens()
    }

    /// The slot of a token: `page_tokens` slots a page.
    #[must_use]
    pub fn slot(&self, token: usize) -> Option<u64> {
        self.row.slot(token)
    }

    /// The tickets of the loads that fill this layer of the cached pages. A stream waits for each
    /// of them ([`Device::hold`]); the host need not.
    ///
    /// [`Device::hold`]: larder_kernels::Device::hold
    pub fn tickets(&self, layer: u32) -> impl Iterator<Item = Ticket> + use<'a> {
        self.loads.iter().map(move |load| load.layer(layer))
    }
}

/// The result of an attempt to keep a sequence.
#[expect(
    clippy::large_enum_variant,
    reason = "it is matched at once, never kept"
)]
pub enum Kept {
    /// It has ended, and so many of its tokens are shared.
    Ended(usize),
    /// The loads of its cached pages have not ended: try again later.
    Later(Sequence),
}

/// See the module documentation. A drop abandons it: its pages are freed, except the pages that
/// it has shared.
#[must_use = "a dropped sequence is abandoned"]
pub struct Sequence {
    pub(super) shared: Arc<Shared>,
    /// `None` after its end.
    pub(super) request: Option<Request>,
    /// The loads that fill its cached pages.
    pub(super) gates: Vec<LayerTickets>,
    cached: Cached,
    tokens: usize,
    computed: usize,
    /// Of its newest forward.
    pub(super) ticket: Ticket,
    /// The newest forward behind its output.
    pub(super) forward: Fence,
    /// The tokens whose rows come from another process.
    pub(super) handed: Option<Handed>,
    /// From and to another process.
    pub(super) copies: Arc<DeviceCopies>,
}

impl Sequence {
    pub(super) fn new(
        shared: Arc<Shared>,
        cache: &mut Cache,
        request: Request,
        cached: Cached,
        tokens: usize,
    ) -> Sequence {
        // A request that has just started is not broken.
        let gates = cache.pages(&request).map(|pages| pages.gates().to_vec());
        Sequence {
            shared,
            gates: gates.unwrap_or_default(),
            cached,
            tokens,
            computed: cached.tokens(),
            ticket: Ticket::done(),
            forward: cache.newest_forward(),
            request: Some(request),
            handed: None,
            copies: Arc::default(),
        }
    }

    /// The cached tokens: the computation begins behind them.
    #[must_use]
    pub fn cached(&self) -> Cached {
        self.cached
    }

    /// Number of tokens: the prompt and the pushed ones.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a sequence has a prompt")]
    pub fn len(&self) -> usize {
        self.tokens
    }

    /// Whether the loads of its cached pages have ended, successfully or not: no row waits. And on
    /// a device, whether the copies of rows that it offers or has taken have ended.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        if !self.shared.has_ranks() {
            return self.are_gates_over();
        }
        let is_over = self.shared.with_any(|cache| self.is_loaded_in(cache));
        is_over.unwrap_or(true)
    }

    /// As [`Sequence::is_loaded`]. With other ranks, the answer is the same on all.
    fn is_loaded_in(&self, cache: &Cache) -> bool {
        if !cache.has_ranks() {
            return self.are_gates_over();
        }
        let loads = self.request().map(|request| request.row_and_loads().1);
        let mut loads = loads.into_iter().flatten();
        !loads.any(|load| cache.core().is_loading(*load))
    }

    fn are_gates_over(&self) -> bool {
        let mut gates = self.gates.iter();
        let is_handed = self.handed.as_ref().is_none_or(Handed::is_over);
        gates.all(|gate| gate.outcome().is_some()) && is_handed && self.copies.are_over()
    }

    /// The row of a position: KV of one token in one layer of one part (0: K or latent, 1: V).
    /// Waits for the load that fills it. That load waits for the forwards of the former owners of
    /// its pages.
    ///
    /// A row that was not written yet has any bytes. The rows of a broken sequence, or of a closed
    /// cache, are still read without an error: [`Sequence::verify`] answers whether they are valid.
    ///
    /// # Errors
    /// The load failed; there is no such row; or L1 is not in host memory.
    pub fn row(&self, part: u32, layer: u32, position: usize) -> Result<&[u8], RowError> {
        let (start, bytes) = self.place(part, layer, position)?;
        if position < self.waits_until() {
            for gate in &self.gates {
                gate.layer(layer).wait().map_err(RowError::Load)?;
            }
        }
        // SAFETY: the row lies in the pool, which `self.shared` holds. Nothing writes it while
        // `self` is borrowed: see the module documentation.
        Ok(unsafe { slice::from_raw_parts(start, bytes) })
    }

    /// The row of a position that is not cached, to be written.
    ///
    /// # Errors
    /// The row is cached, shared or handed over; there is no such row; or L1 is not in host memory.
    pub fn row_mut(
        &mut self,
        part: u32,
        layer: u32,
        position: usize,
    ) -> Result<&mut [u8], RowError> {
        let first = self.first_own();
        if position < first {
            return Err(RowError::Cached { position, first });
        }
        let (start, bytes) = self.place(part, layer, position)?;
        // SAFETY: the row lies in the pool, in a page that the sequence owns. Nothing else touches
        // it while `self` is borrowed exclusively: see the module documentation.
        Ok(unsafe { slice::from_raw_parts_mut(start, bytes) })
    }

    /// The start of a row, and its bytes.
    fn place(&self, part: u32, layer: u32, position: usize) -> Result<(*mut u8, usize), RowError> {
        if !self.shared.is_on_host() {
            return Err(RowError::NotOnHost);
        }
        let (l1, page_tokens) = (self.shared.l1(), self.shared.page_tokens());
        let row = self.row_of_pages();
        let slots = row.map_or(0, Row::tokens);
        let page = row.and_then(|row| row.pages().get(position / page_tokens));
        let (Some(&page), true) = (page, position < slots) else {
            return Err(RowError::NoSlot { position, slots });
        };
        let chunk = l1.address(ChunkAt { part, layer, page });
        let chunk = chunk.map_err(|_| RowError::NoSuchRow { part, layer })?;
        let bytes = l1.shape().row_bytes() as usize;
        let start = chunk as usize + position % page_tokens * bytes;
        Ok((std::ptr::with_exposed_provenance_mut(start), bytes))
    }

    /// The first row that it may write: those before are cached, shared or handed over.
    fn first_own(&self) -> usize {
        let shared = self.row_of_pages().map_or(0, Row::shared_pages);
        let handed = self.handed.as_ref().map_or(0, |handed| handed.tokens);
        handed.max(shared * self.shared.page_tokens())
    }

    /// Rows before this wait for the tickets.
    pub(super) fn waits_until(&self) -> usize {
        let handed = self.handed.as_ref().map_or(0, |handed| handed.tokens);
        handed.max(self.cached.tokens())
    }

    fn row_of_pages(&self) -> Option<&Row> {
        self.request().map(|request| request.row_and_loads().0)
    }

    /// The pages of L1 that it has, at once, and the tickets of the loads that fill the cached
    /// ones. For a forward that is launched before these loads have ended.
    ///
    /// # Errors
    /// The sequence is broken, or the cache is closed.
    pub fn slots(&self) -> Result<Slots<'_>, SequenceError> {
        let request = self.unbroken()?;
        Ok(Slots {
            row: request.row_and_loads().0,
            loads: &self.gates,
        })
    }

    pub(super) fn unbroken(&self) -> Result<&Request, SequenceError> {
        let request = self.request().ok_or(Closed::Ended)?;
        match self.shared.with(|cache| cache.is_broken(request))? {
            true => Err(Broken.into()),
            false => Ok(request),
        }
    }

    /// Appends a token, with its slot. Does not wait.
    ///
    /// # Errors
    /// Those of [`Sequence::push_within`].
    pub fn push(&mut self, token: u64) -> Result<(), SequenceError> {
        self.push_within(token, Duration::ZERO)
    }

    /// As [`Sequence::push`], but waits for copies that will free pages, at most `wait`.
    ///
    /// # Errors
    /// L1 has no room, the sequence is broken, or the cache is closed: nothing has changed. While
    /// copies will free pages ([`NoRoom::pending`]), a later attempt may succeed.
    pub fn push_within(&mut self, token: u64, wait: Duration) -> Result<(), SequenceError> {
        let (shared, tokens) = (self.shared.clone(), self.tokens);
        let request = self.request.as_mut().ok_or(Closed::Ended)?;
        if request.tokens() <= tokens {
            let deadline = after(wait);
            let mut last = NoRoom::default();
            let extended = shared.wait(deadline, |cache, _| match cache.extend(request, 1) {
                Err(ExtendError::NoRoom(no_room)) if no_room.pending > 0 => {
                    last = no_room;
                    None
                }
                result => Some(result),
            })?;
            match extended.unwrap_or(Err(last.into())) {
                Ok(()) => {}
                Err(ExtendError::NoRoom(no_room)) => return Err(no_room.into()),
                Err(ExtendError::Broken(broken)) => return Err(broken.into()),
            }
        }
        // A token with a reserved slot has extended nothing.
        shared.with(|cache| {
            if cache.is_broken(request) {
                return Err(Broken);
            }
            cache.extend_or_cut(request.prompt_mut(), &[token]);
            Ok(())
        })??;
        self.tokens += 1;
        Ok(())
    }

    /// Keeps the first `tokens` tokens, or all if it has no more: those behind were rejected. Their
    /// slots stay for later tokens, as far as the sequence owns them. Report the forwards that have
    /// written them before.
    ///
    /// Shared pages never change. If the kept tokens end within one, their rows are copied to an
    /// own page, at once. The sequence takes that page from its reserved ones, if it has any
    /// ([`Ask::reserved`]). On a GPU the copy needs the stream of the forwards:
    /// [`Sequence::truncate_on`].
    ///
    /// [`Ask::reserved`]: super::Ask::reserved
    ///
    /// # Errors
    /// The sequence is broken, or the cache is closed. The kept tokens end in shared pages that are
    /// not settled, or L1 has no page for their rows. Or L1 is on a GPU.
    pub fn truncate(&mut self, tokens: usize) -> Result<(), SequenceError> {
        self.cut(tokens, None)
    }

    /// As [`Sequence::truncate`], on a GPU. The copy of the rows, if it is needed, runs on the
    /// stream of the forwards: behind all that are enqueued on it, and before later ones. If it
    /// fails, the sequence is broken.
    ///
    /// # Errors
    /// Those of [`Sequence::truncate`]. Or the device has no streams.
    pub fn truncate_on(
        &mut self,
        tokens: usize,
        stream: ForeignStream,
    ) -> Result<(), SequenceError> {
        self.cut(tokens, Some(stream))
    }

    fn cut(&mut self, tokens: usize, stream: Option<ForeignStream>) -> Result<(), SequenceError> {
        if tokens >= self.tokens {
            return Ok(());
        }
        let is_copied = self.handed.is_some() || !self.copies.are_over();
        if is_copied && !self.is_loaded() {
            return Err(SequenceError::Unsettled);
        }
        // A load that has ended is over for the core only after a poll.
        self.shared.poll()?;
        let request = self.request.as_mut().ok_or(Closed::Ended)?;
        let (copied, forward) = self.shared.with(|cache| {
            let copied = cache.truncate(request, tokens, stream);
            (copied, cache.newest_forward())
        })?;
        if let Some(ticket) = copied? {
            (self.ticket, self.forward) = (ticket, forward);
        }
        self.tokens = tokens;
        self.computed = self.computed.min(tokens);
        self.cached.truncate(tokens);
        if let Some(handed) = &mut self.handed {
            handed.tokens = handed.tokens.min(tokens);
        }
        Ok(())
    }

    /// The rows of the first `tokens` tokens are there, or behind its gates.
    pub(super) fn reported(&mut self, tokens: usize) {
        self.computed = self.computed.max(tokens);
    }

    /// Reports that the KV of the first `tokens` tokens is in their rows, by forwards that have
    /// ended.
    ///
    /// # Errors
    /// Those of [`Sequence::computed_by`].
    pub fn computed(&mut self, tokens: usize) -> Result<(), SequenceError> {
        self.computed_by(tokens, &Ticket::done())
    }

    /// Reports that the KV of the first `tokens` tokens is in their rows when `forward` has
    /// settled. It fails if it is not valid. Report every forward before the sequence is dropped:
    /// loads into its pages wait for the reported ones. Other forwards use these pages without a
    /// wait, so all forwards of a cache execute in the order of their reports. A forward that has
    /// failed, and touches no page any more, is reported with [`Ticket::failed`], or not at all if
    /// the sequence is dropped.
    ///
    /// With states, it has written them when this is called; on a device without streams whose pool
    /// is the engine's own, the call waits for that.
    ///
    /// # Errors
    /// The sequence is broken, or `forward` has already failed. The sequence has fewer tokens. Or
    /// the cache is closed.
    pub fn computed_by(&mut self, tokens: usize, forward: &Ticket) -> Result<(), SequenceError> {
        self.computed_with(tokens, forward, None)
    }

    /// As [`Sequence::computed_by`], for a model with states on a GPU. If the tokens end at a
    /// border of pages, their state is copied on the stream of the forwards, behind those enqueued
    /// and before later ones.
    ///
    /// # Errors
    /// Those of [`Sequence::computed_by`]. Or the device has no streams.
    pub fn computed_on(
        &mut self,
        tokens: usize,
        forward: &Ticket,
        stream: ForeignStream,
    ) -> Result<(), SequenceError> {
        self.computed_with(tokens, forward, Some(stream))
    }

    fn computed_with(
        &mut self,
        tokens: usize,
        forward: &Ticket,
        stream: Option<ForeignStream>,
    ) -> Result<(), SequenceError> {
        if tokens > self.tokens {
            return Err(SequenceError::Beyond {
                computed: tokens,
                tokens: self.tokens,
            });
        }
        self.ticket = forward.clone();
        self.gates.retain(|gate| gate.outcome() != Some(Ok(())));
        // Other ranks may not see its end yet.
        if !self.shared.has_ranks() && forward.poll() == Ok(true) {
            self.unbroken()?;
        } else {
            // The tree takes no page yet, but the core knows the forward of the request.
            self.insert(0)?;
        }
        if self.shared.is_hybrid() {
            let request = self.request.as_mut().ok_or(Closed::Ended)?;
            if stream.is_none() && !self.shared.is_on_host() && request.state_pools() > 0 {
                // No stream orders the copy of a state behind it. Its outcome is found by a poll.
                let _outcome = forward.wait();
            }
            let (copied, newest) = self.shared.with(|cache| {
                let copied = cache.passed(request, tokens, forward, stream);
                (copied, cache.newest_forward())
            })?;
            if let Some(ticket) = copied? {
                (self.ticket, self.forward) = (ticket, newest);
            }
        }
        self.reported(tokens);
        Ok(())
    }

    /// Gives the computed whole pages to the tree, where other sequences find them, and from where
    /// they go to L2 and L3. For example after a prefill.
    ///
    /// Returns the pages that the tree already had: the sequence has those of the tree now, and its
    /// own are free. Forwards that are launched later use the pages of the tree.
    ///
    /// No page enters the tree behind pages that may never be filled. So the pages stay with the
    /// sequence while its cached pages are being loaded: share them when [`Sequence::is_loaded`] is
    /// true, or at the end ([`Sequence::keep`]). They also stay behind a load of the same pages
    /// that another sequence has begun since.
    ///
    /// # Errors
    /// The sequence is broken, or the cache is closed.
    pub fn share(&mut self) -> Result<Vec<Replaced>, SequenceError> {
        let tokens = if self.is_loaded() { self.computed } else { 0 };
        let row = self.row_of_pages().ok_or(Closed::Ended)?;
        let (first, former) = (row.shared_pages(), row.own_pages().to_vec());
        self.insert(tokens)?;
        let row = self.row_of_pages().ok_or(Closed::Ended)?;
        let pages = row.pages()[first..].iter().zip(former).enumerate();
        let replaced = pages.filter(|(_, (page, former))| *page != former);
        let replaced = replaced.map(|(at, (page, former))| Replaced {
            at: first + at,
            former,
            page: *page,
        });
        Ok(replaced.collect())
    }

    fn insert(&mut self, tokens: usize) -> Result<(), SequenceError> {
        // A load that has ended is over for the core only after a poll.
        self.shared.poll()?;
        let request = self.request.as_mut().ok_or(Closed::Ended)?;
        let ticket = &self.ticket;
        let (inserted, forward) = self.shared.with(|cache| {
            let inserted = cache.insert_first(request, tokens, ticket);
            (inserted, cache.newest_forward())
        })?;
        self.forward = forward;
        inserted?;
        Ok(())
    }

    /// Whether all forwards and loads behind the output so far have ended successfully. Until then
    /// the output may be wrong. Never false on a CPU whose forwards end before they are reported,
    /// and which has read the cached rows ([`Sequence::row`]).
    ///
    /// # Errors
    /// One of them has failed, or the weights were replaced: the output since then is wrong, drop
    /// the sequence. Or the cache is closed.
    pub fn verify(&mut self) -> Result<bool, SequenceError> {
        self.shared.poll()?;
        let request = self.request.as_ref().ok_or(Closed::Ended)?;
        let forward = self.forward;
        let (is_broken, is_over) = self.shared.with(|cache| {
            let is_broken = cache.is_broken(request);
            let is_over = cache.core().is_over(forward);
            let is_loaded = !cache.has_ranks() || self.is_loaded_in(cache);
            (is_broken, is_over && is_loaded)
        })?;
        if is_broken {
            return Err(Broken.into());
        }
        if self.shared.has_ranks() {
            return Ok(is_over);
        }
        // A load that has failed since the poll has broken the sequence, which the next poll finds.
        let mut outcomes = self.gates.iter().map(LayerTickets::outcome);
        let is_handed = self.handed.as_ref().is_none_or(Handed::is_over);
        Ok(is_over && is_handed && outcomes.all(|outcome| outcome == Some(Ok(()))))
    }

    /// Ends the sequence and keeps its computed whole pages, as [`Sequence::share`] does. Returns
    /// the number of their tokens. Waits for the loads of its cached pages, as [`Sequence::row`]
    /// does.
    ///
    /// # Errors
    /// The sequence is broken: it keeps nothing that it has not shared. Or the cache is closed.
    pub fn keep(self) -> Result<usize, SequenceError> {
        let request = self.request.as_ref().ok_or(Closed::Ended)?;
        if !self.is_loaded() {
            self.shared.wait(after(Duration::MAX), |cache, _| {
                (self.is_loaded_in(cache) || cache.is_broken(request)).then_some(())
            })?;
        }
        self.end()
    }

    /// As [`Sequence::keep`], without a wait.
    ///
    /// # Errors
    /// Those of [`Sequence::keep`].
    pub fn try_keep(self) -> Result<Kept, SequenceError> {
        self.shared.poll()?;
        let request = self.request.as_ref().ok_or(Closed::Ended)?;
        let is_broken = self.shared.with(|cache| cache.is_broken(request))?;
        match self.is_loaded() || is_broken {
            true => self.end().map(Kept::Ended),
            false => Ok(Kept::Later(self)),
        }
    }

    fn end(mut self) -> Result<usize, SequenceError> {
        self.insert(self.computed)?;
        let shared = self.row_of_pages().map_or(0, Row::shared_pages);
        Ok(shared * self.shared.page_tokens())
    }

    /// A digest of its first tokens, its scope and its weights, which names them in any process.
    /// `None` if the vocabulary was full before ([`Config::wide_tokens_max`]).
    ///
    /// [`Config::wide_tokens_max`]: crate::Config::wide_tokens_max
    ///
    /// # Errors
    /// The sequence is broken, or the cache is closed.
    pub fn digest(&self, tokens: usize) -> Result<Option<PageKey>, SequenceError> {
        let request = self.unbroken()?;
        let digest = |cache: &mut Cache| cache.core().digest_of(request.prompt(), tokens);
        Ok(self.shared.with(digest)?)
    }

    /// Number of tokens whose rows it has, cached or reported as computed.
    #[must_use]
    pub fn computed_tokens(&self) -> usize {
        self.computed
    }

    /// The request. `None` after the end.
    pub(super) fn request(&self) -> Option<&Request> {
        self.request.as_ref()
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        // No row comes into pages that are free.
        drop(self.handed.take());
        if let Some(request) = self.request.take() {
            let (ticket, mut copies) = (&self.ticket, self.copies.left());
            if planted!(FreesUnderCopy) {
                copies.clear();
            }
            // After the end of the cache there is nothing to free.
            let _closed = self
                .shared
                .with_any(|cache| cache.finish_behind(request, ticket, copies));
            self.shared.has_freed();
        }
    }
}
