//! The connection of a request that is taken, and the copies of its rows out of the lent memory.
//!
//! With L1 in host memory, this thread copies: few pages at a time, because the end of the sequence
//! waits for that. A layer has a promised ticket. With L1 on a device, the device copies behind the
//! forwards of former sequences. A layer has the tickets of its copies, so the sequence is given to
//! the engine when all of them have begun.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_base::fork::{Private, keep_private};
use larder_base::system::processes;
use larder_base::system::sockets::{self, UnixStream};
use larder_kernels::{Direction, LayerTickets, Promise, Ticket};

use super::device::Job;
use super::error::{HandoverError, garbled};
use super::memory::{Loan, Memory};
use super::serve::name_of;
use super::wire::{Inbox, Lent, ToDecode, ToPrefill, arrives, frame};
use crate::planted::planted;
use crate::prefix::{DeviceCopies, Filling, Rows, Sequence};

/// Bytes that a thread copies at a time.
const COPY_BYTES: usize = 1 << 20;

/// Copies of a device wake no one: the pause between two looks at them.
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// Forwards wake no one either.
const HELD_AGAIN: Duration = Duration::from_millis(1);

/// The request, with its time.
pub(super) struct Terms<'t> {
    pub(super) id: &'t str,
    pub(super) timeout: Duration,
    pub(super) until: Instant,
}

impl Terms<'_> {
    fn late(&self, what: &'static str) -> HandoverError {
        HandoverError::Late {
            what,
            timeout: self.timeout,
        }
    }
}

/// A connection to the prefill process, and its messages.
pub(super) struct Link<'t> {
    terms: &'t Terms<'t>,
    stream: Arc<UnixStream>,
    inbox: Inbox,
    lent: Option<Lent>,
    /// Tokens of each layer in the memory.
    layers: Vec<usize>,
    end: Option<(u64, Vec<u8>)>,
    is_open: bool,
    _private: Private,
}

impl<'t> Link<'t> {
    /// Connects to the prefill process.
    ///
    /// # Errors
    /// It does not listen, or belongs to another user.
    pub(super) fn connect(
        socket: &Path,
        layers: u32,
        terms: &'t Terms<'t>,
    ) -> Result<Link<'t>, HandoverError> {
        let failed = |error: io::Error| HandoverError::Socket {
            what: "connecting to",
            path: socket.display().to_string(),
            why: error.to_string(),
        };
        let left = terms.until.saturating_duration_since(Instant::now());
        let left = left.max(Duration::from_millis(1));
        let connect = || {
            let name = name_of(socket)?;
            let stream = sockets::connect(name.path(), left)?;
            let peer = sockets::peer(&stream)?;
            stream.set_nonblocking(true)?;
            Ok((stream, peer))
        };
        let (stream, peer) = connect().map_err(failed)?;
        if peer.user != processes::user() {
            return Err(HandoverError::Foreign { uid: peer.user });
        }
        Ok(Link {
            terms,
            _private: keep_private(&stream),
            stream: Arc::new(stream),
            inbox: Inbox::default(),
            lent: None,
            layers: vec![0; layers as usize],
            end: None,
            is_open: true,
        })
    }

    /// The stream, to be shut down.
    pub(super) fn stream(&self) -> Arc<UnixStream> {
        self.stream.clone()
    }

    /// Sends a message. The socket has room for all that a decode process sends.
    ///
    /// # Errors
    /// The prefill process has ended.
    pub(super) fn send(&self, message: &ToPrefill) -> Result<(), HandoverError> {
        let frame = frame(message)?;
        let mut sent = 0;
        while sent < frame.len() {
            match sockets::send(&self.stream, &frame[sent..], None) {
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(HandoverError::Gone),
            }
        }
        Ok(())
    }

    /// Processes the messages that have arrived.
    ///
    /// # Errors
    /// The prefill process refuses, or sent nonsense.
    pub(super) fn absorb(&mut self) -> Result<(), HandoverError> {
        if self.is_open {
            self.is_open = self.inbox.read(&self.stream).unwrap_or(false);
        }
        while let Some(message) = self.inbox.next()? {
            match message {
                ToDecode::Lent(lent) => self.lent = Some(lent),
                ToDecode::Layers(layers) => {
                    for (layer, tokens) in layers {
                        let known = self.layers.get_mut(layer as usize);
                        let known = known.ok_or_else(|| garbled(format!("layer {layer}")))?;
                        *known = (tokens as usize).max(*known);
                    }
                }
                ToDecode::End { token, data } => self.end = Some((token, data)),
                ToDecode::Refused(refusal) => {
                    let Terms { id, timeout, .. } = *self.terms;
                    return Err(HandoverError::of(refusal, id, timeout));
                }
            }
        }
        Ok(())
    }

    /// Waits for messages until a moment, and processes them. False if there was none.
    ///
    /// # Errors
    /// Those of [`Link::absorb`]. Or the prefill process has ended.
    pub(super) fn wait(&mut self, until: Instant) -> Result<bool, HandoverError> {
        if !self.is_open {
            return Err(HandoverError::Gone);
        }
        let left = until.saturating_duration_since(Instant::now());
        let has_come = arrives(&self.stream, left + Duration::from_micros(50));
        let has_come = has_come.map_err(|_| HandoverError::Gone)?;
        self.absorb()?;
        Ok(has_come)
    }

    /// Waits for the loan, and the file of the memory.
    ///
    /// # Errors
    /// Those of [`Link::wait`]. Or it does not come in time.
    pub(super) fn lent(&mut self) -> Result<(Lent, Option<OwnedFd>), HandoverError> {
        loop {
            if let Some(lent) = self.lent.take() {
                return Ok((lent, self.inbox.take_file()));
            }
            if Instant::now() >= self.terms.until {
                return Err(self.terms.late("an offer of this request"));
            }
            self.wait(self.terms.until)?;
        }
    }

    /// Whether the token and the data have come, and were not taken.
    pub(super) fn has_end(&self) -> bool {
        self.end.is_some()
    }

    /// The token and the data, once they have come.
    pub(super) fn take_end(&mut self) -> Option<(u64, Vec<u8>)> {
        self.end.take()
    }

    /// Waits for the token and the data.
    ///
    /// # Errors
    /// Those of [`Link::wait`]. Or they do not come in time.
    pub(super) fn end(&mut self) -> Result<(u64, Vec<u8>), HandoverError> {
        loop {
            if let Some(end) = self.take_end() {
                return Ok(end);
            }
            if Instant::now() >= self.terms.until {
                return Err(self.terms.late("the first token"));
            }
            self.wait(self.terms.until)?;
        }
    }
}

/// The rows of a request on their way from the memory to L1.
pub(super) struct Copies<'m> {
    memory: &'m Memory,
    loan: Loan,
    /// The page of the sequence that is in the first block.
    first_page: usize,
    page_tokens: usize,
    tokens: usize,
    /// The tokens of each layer in L1, or on their way.
    done: Vec<usize>,
    /// Forwards of former sequences that may still touch the pages.
    after: Ticket,
    /// They had not ended at the last attempt to copy.
    is_held: bool,
    by: By,
}

/// What copies the rows.
enum By {
    /// This thread.
    Thread {
        /// Tokens of a copy.
        step: usize,
        /// Dropped after the [`Filling`], which breaks the sequence first.
        promises: Vec<Option<Promise>>,
    },
    /// The device that has L1. The layers of each copy, and its tickets, until the end of the copy
    /// was seen.
    Device(Vec<(Range<u32>, LayerTickets)>),
}

/// Where the copies of a request end, and where they begin.
pub(super) struct Span {
    pub(super) from: usize,
    pub(super) tokens: usize,
    pub(super) page_tokens: usize,
    /// Bytes of a token in one layer, all parts.
    pub(super) layer_bytes: usize,
}

impl<'m> Copies<'m> {
    /// Copies of the rows of a span, and the tickets of its layers, if a thread copies.
    pub(super) fn new(
        memory: &'m Memory,
        lent: &Lent,
        span: &Span,
        layers: u32,
        after: Ticket,
    ) -> (Copies<'m>, Option<LayerTickets>) {
        let (by, tickets) = match memory.pool() {
            Some(_) => (By::Device(Vec::new()), None),
            None => {
                let tickets = (0..layers).map(|_| Ticket::promised());
                let (promises, tickets): (Vec<Promise>, Vec<Ticket>) = tickets.unzip();
                let by = By::Thread {
                    step: (COPY_BYTES / span.layer_bytes).max(1),
                    promises: promises.into_iter().map(Some).collect(),
                };
                (by, Some(LayerTickets::by_layer(tickets)))
            }
        };
        let copies = Copies {
            memory,
            loan: lent.loan.clone(),
            first_page: lent.from as usize / span.page_tokens,
            page_tokens: span.page_tokens,
            tokens: span.tokens,
            done: vec![span.from; layers as usize],
            after,
            is_held: false,
            by,
        };
        (copies, tickets)
    }

    /// Whether all rows are in L1, or on their way.
    fn is_whole(&self) -> bool {
        self.done.iter().all(|done| *done >= self.tokens)
    }

    /// Whether the engine may have the sequence: each layer has the tickets of all its copies.
    pub(super) fn has_tickets(&self) -> bool {
        match self.by {
            By::Thread { .. } => true,
            By::Device(_) => self.is_whole(),
        }
    }

    /// The tickets of the copies that go to the engine with the sequence.
    pub(super) fn give(&self, sequence: &mut Sequence) {
        if let By::Device(copies) = &self.by
            && !planted!(TicketsBeforeCopy)
        {
            sequence.comes_behind(gates(self.done.len(), copies));
        }
    }

    /// Whether all rows are in L1, and are those of the loan.
    ///
    /// # Errors
    /// A copy has failed, or the memory was taken back.
    pub(super) fn are_over(&mut self) -> Result<bool, HandoverError> {
        if let By::Device(copies) = &mut self.by {
            let mut failed = Ok(());
            copies.retain(|(_, tickets)| match tickets.outcome() {
                None => true,
                Some(outcome) => {
                    failed = failed.clone().and(outcome);
                    false
                }
            });
            failed.map_err(HandoverError::Load)?;
            if !copies.is_empty() || !self.is_whole() {
                return Ok(false);
            }
            self.check_loan()?;
        }
        Ok(self.is_whole())
    }

    fn check_loan(&self) -> Result<(), HandoverError> {
        match self.memory.is_lent(&self.loan) {
            true => Ok(()),
            false => Err(HandoverError::TakenBack),
        }
    }

    /// Copies some rows that have come into the memory. False if there are none.
    ///
    /// # Errors
    /// The memory was taken back, the sequence has ended, or the device refuses a copy.
    pub(super) fn copy(
        &mut self,
        link: &Link<'_>,
        filling: &Filling,
    ) -> Result<bool, HandoverError> {
        match self.by {
            By::Thread { step, .. } => self.copy_here(step, link, filling),
            By::Device(_) => self.order_copy(link, filling),
        }
    }

    /// Orders the copies of the first layers that have the same new rows.
    fn order_copy(&mut self, link: &Link<'_>, filling: &Filling) -> Result<bool, HandoverError> {
        let come = link.layers.iter().map(|come| self.tokens.min(*come));
        let both: Vec<(usize, usize)> = self.done.iter().copied().zip(come).collect();
        let Some(first) = both.iter().position(|(done, come)| done < come) else {
            return Ok(false);
        };
        let (from, until) = both[first];
        let same = both[first..].iter().take_while(|of| **of == (from, until));
        let end = first + same.count();
        let (Some(pool), By::Device(flying)) = (self.memory.pool(), &mut self.by) else {
            return Ok(false);
        };
        self.is_held = pool.waits() && !self.after.is_settled();
        if self.is_held {
            return Ok(false);
        }
        self.done[first..end].fill(until);
        let narrow = |layer: usize| u32::try_from(layer).unwrap_or(u32::MAX);
        let layers = narrow(first)..narrow(end);
        let mut begun = Vec::new();
        let copied = filling.copied_by(|rows: &Rows, copies: &DeviceCopies| {
            let job = Job {
                rows,
                layers: layers.clone(),
                tokens: from..until,
                first_page: self.first_page,
                blocks: &self.loan.blocks,
            };
            // SAFETY: the pages stay those of the sequence until `copies` have ended. Only rows
            // that no slice covers are handed over: they are read behind the tickets of these
            // copies, and not written. The rows are not used before `are_over`, which looks at the
            // loan.
            let copied = unsafe {
                let memory = self.memory;
                memory.copy_by_device(Direction::Load, &job, &self.after, &mut begun)
            };
            copies.add(begun.iter().flat_map(LayerTickets::tickets));
            copied
        });
        flying.extend(begun.into_iter().map(|tickets| (layers.clone(), tickets)));
        match copied {
            None => Err(HandoverError::Cancelled),
            Some(copied) => copied.map(|()| true).map_err(HandoverError::Load),
        }
    }

    fn copy_here(
        &mut self,
        step: usize,
        link: &Link<'_>,
        filling: &Filling,
    ) -> Result<bool, HandoverError> {
        self.is_held = !self.after.is_settled();
        if self.is_held {
            return Ok(false);
        }
        let come = link.layers.iter().map(|come| self.tokens.min(*come));
        let mut both = (0_u32..).zip(&mut self.done).zip(come);
        let Some(((layer, done), come)) = both.find(|((_, done), come)| **done < *come) else {
            return Ok(false);
        };
        let from = *done;
        let page_end = (from / self.page_tokens + 1) * self.page_tokens;
        let until = come.min((from + step).max(page_end));
        *done = until;
        let (memory, loan, first_page) = (self.memory, &self.loan, self.first_page);
        let all = filling.with(|rows| {
            let mut pieces = rows.pieces(layer, from..until).into_iter();
            pieces.all(|piece| {
                let block = loan.blocks.get(piece.page - first_page);
                block.is_some_and(|block| {
                    let to = std::ptr::with_exposed_provenance_mut(piece.address as usize);
                    // SAFETY: the piece is in own pages of the sequence, which stay its own while
                    // `filling` is locked. Only rows that no slice covers are handed over: the
                    // sequence reads them behind their ticket, and does not write them. Former
                    // forwards have ended.
                    unsafe { memory.copy_out(*block, piece.offset, to, piece.bytes) }
                })
            })
        });
        match all {
            None => return Err(HandoverError::Cancelled),
            Some(false) => return Err(garbled("a row outside of the memory".to_owned())),
            Some(true) => {}
        }
        self.check_loan()?;
        if planted!(SettlesAllLayers) {
            self.settle();
        }
        let is_whole = self.is_whole();
        // The last tickets settle after the end of `filling`.
        if until >= self.tokens
            && !is_whole
            && let By::Thread { promises, .. } = &mut self.by
            && let Some(promise) = promises[layer as usize].take()
        {
            promise.settle(Ok(()));
        }
        Ok(true)
    }

    /// Settles the tickets that are left: all rows are in L1.
    pub(super) fn settle(&mut self) {
        let By::Thread { promises, .. } = &mut self.by else {
            return;
        };
        for promise in promises.iter_mut().filter_map(Option::take) {
            promise.settle(Ok(()));
        }
    }

    /// How long to wait for forwards of former sequences, or copies of a device, which wake no one.
    /// Those whose end the last attempts to copy and [`Copies::are_over`] have not seen: they may
    /// have ended since.
    pub(super) fn pause(&self) -> Option<Duration> {
        let is_flying = match &self.by {
            By::Thread { .. } => false,
            By::Device(copies) => !copies.is_empty(),
        };
        match (is_flying, self.is_held) {
            (true, _) => Some(LOOK_AGAIN),
            (false, true) => Some(HELD_AGAIN),
            (false, false) => None,
        }
    }
}

/// Copies of some layers each, as gates of all layers: for each layer the copies that have not
/// ended well.
fn gates(layers: usize, copies: &[(Range<u32>, LayerTickets)]) -> Vec<LayerTickets> {
    let mut by_layer: Vec<Vec<Ticket>> = vec![Vec::new(); layers];
    for (of, tickets) in copies {
        for (layer, ticket) in of.clone().zip(tickets.tickets()) {
            if ticket.poll() != Ok(true) {
                by_layer[layer as usize].push(ticket);
            }
        }
    }
    let count = by_layer.iter().map(Vec::len).max().unwrap_or(0);
    let gate = |number| {
        let of_layer = |of: &Vec<Ticket>| of.get(number).cloned().unwrap_or_else(Ticket::done);
        LayerTickets::by_layer(by_layer.iter().map(of_layer).collect())
    };
    (0..count).map(gate).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use larder_kernels::KvShape;

    use super::*;
    use crate::Model;
    use crate::prefix::PrefixOptions;

    /// One copy of a request of two layers. The first layer is in the memory. Returns the outcome,
    /// and whether each layer's ticket has settled. With `takes_back`, the memory is taken back
    /// between the message of the prefill process and the copy: the decode process was stopped
    /// there.
    fn copied(takes_back: bool) -> (Result<bool, HandoverError>, Vec<bool>) {
        with_copies(takes_back, Ticket::done(), || {})
    }

    /// As [`copied`], behind forwards. `then` comes just after the attempt.
    fn with_copies(
        takes_back: bool,
        after: Ticket,
        then: impl FnOnce(),
    ) -> (Result<bool, HandoverError>, Vec<bool>) {
        let shape = KvShape::mha(2, 1, 4, 4, 4).unwrap();
        let options = PrefixOptions::new(&Model::new("rows", "", "f32", shape), 4, 4);
        let cache = options.over(None).unwrap();
        let mut sequence = cache.begin(&[1, 2, 3]).unwrap();
        let memory = Memory::create(1, &shape).unwrap();
        let (number, blocks) = (1, vec![0]);
        let loan = Loan { number, blocks };
        memory.lend(&loan);
        let lent = Lent {
            memory: 0,
            blocks: 1,
            from: 0,
            loan: loan.clone(),
        };
        let span = Span {
            from: 0,
            tokens: 3,
            page_tokens: 4,
            layer_bytes: 32,
        };
        let (mut copies, tickets) = Copies::new(&memory, &lent, &span, 2, after);
        let filling = sequence.fill(3, tickets.clone(), || {}).unwrap();
        let tickets = tickets.unwrap();
        let terms = Terms {
            id: "one",
            timeout: Duration::ZERO,
            until: Instant::now(),
        };
        let (stream, _other) = UnixStream::pair().unwrap();
        let link = Link {
            terms: &terms,
            _private: keep_private(&stream),
            stream: Arc::new(stream),
            inbox: Inbox::default(),
            lent: None,
            layers: vec![3, 2],
            end: None,
            is_open: true,
        };
        if takes_back {
            memory.take_back(&loan);
        }
        let copied = copies.copy(&link, &filling);
        then();
        assert_eq!(copies.pause().is_some(), copied == Ok(false));
        let settled = tickets.tickets().map(|ticket| ticket.is_settled());
        let settled = settled.collect();
        drop(filling);
        drop(copies);
        assert!(sequence.verify().is_err());
        (copied, settled)
    }

    #[test]
    fn forwards_that_end_after_an_attempt_to_copy_are_seen_soon() {
        let (promise, ticket) = Ticket::promised();
        let (outcome, _) = with_copies(false, ticket, || promise.settle(Ok(())));
        assert_eq!(outcome, Ok(false));
    }

    #[test]
    fn a_ticket_settles_with_its_layer() {
        assert_eq!(copied(false), (Ok(true), vec![true, false]));
    }

    #[test]
    fn rows_of_memory_that_was_taken_back_are_not_used() {
        let taken_back = Err(HandoverError::TakenBack);
        assert_eq!(copied(true), (taken_back, vec![false, false]));
    }

    #[cfg(debug_assertions)]
    #[test]
    fn the_use_of_such_memory_and_an_early_ticket_are_noticed() {
        use crate::planted::{Bug, plant};

        plant(Some(Bug::TrustsReturnedMemory));
        let trusting = copied(true).0;
        plant(Some(Bug::SettlesAllLayers));
        let settling = copied(false).1;
        plant::<Bug>(None);
        assert_ne!(trusting, Err(HandoverError::TakenBack));
        assert_ne!(settling, [true, false]);
    }
}
