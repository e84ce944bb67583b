//! The connection of a request that is taken, and the copies of its rows out of the lent memory.
//!
//! A copy is of few pages, because the end of the sequence waits for it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_base::fork::{Private, keep_private};
use larder_base::system::processes;
use larder_base::system::sockets::{self, UnixStream};
use larder_kernels::{LayerTickets, Promise, Ticket};

use super::error::{HandoverError, garbled};
use super::memory::{Loan, Memory};
use super::serve::name_of;
use super::wire::{Inbox, Lent, ToDecode, ToPrefill, arrives, frame};
use crate::planted::planted;
use crate::prefix::Filling;

/// Bytes that are copied at a time.
const COPY_BYTES: usize = 1 << 20;

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

/// A connection to the prefill process, and what it has said.
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
    /// Tokens of a copy.
    step: usize,
    tokens: usize,
    /// The tokens of each layer in L1.
    done: Vec<usize>,
    /// Dropped after the [`Filling`], which breaks the sequence first.
    promises: Vec<Option<Promise>>,
    /// Forwards of former sequences that may still touch the pages.
    after: Ticket,
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
    /// Copies of the rows of a span, and the tickets of its layers.
    pub(super) fn new(
        memory: &'m Memory,
        lent: &Lent,
        span: &Span,
        layers: u32,
        after: Ticket,
    ) -> (Copies<'m>, LayerTickets) {
        let tickets = (0..layers).map(|_| Ticket::promised());
        let (promises, tickets): (Vec<Promise>, Vec<Ticket>) = tickets.unzip();
        let copies = Copies {
            memory,
            loan: lent.loan.clone(),
            first_page: lent.from as usize / span.page_tokens,
            page_tokens: span.page_tokens,
            step: (COPY_BYTES / span.layer_bytes).max(1),
            tokens: span.tokens,
            done: vec![span.from; layers as usize],
            promises: promises.into_iter().map(Some).collect(),
            after,
        };
        (copies, LayerTickets::by_layer(tickets))
    }

    /// Whether all rows are in L1.
    pub(super) fn is_whole(&self) -> bool {
        self.done.iter().all(|done| *done >= self.tokens)
    }

    /// Copies some rows that have come into the memory. False if there are none.
    ///
    /// # Errors
    /// The memory was taken back, or the sequence has ended.
    pub(super) fn copy(
        &mut self,
        link: &Link<'_>,
        filling: &Filling,
    ) -> Result<bool, HandoverError> {
        if !self.after.is_settled() {
            return Ok(false);
        }
        let come = link.layers.iter().map(|come| self.tokens.min(*come));
        let mut both = (0_u32..).zip(&mut self.done).zip(come);
        let Some(((layer, done), come)) = both.find(|((_, done), come)| **done < *come) else {
            return Ok(false);
        };
        let from = *done;
        let page_end = (from / self.page_tokens + 1) * self.page_tokens;
        let until = come.min((from + self.step).max(page_end));
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
        if !self.memory.is_lent(&self.loan) {
            return Err(HandoverError::TakenBack);
        }
        if planted!(SettlesAllLayers) {
            self.settle();
        }
        // The last tickets settle after the end of `filling`.
        if until >= self.tokens
            && !self.is_whole()
            && let Some(promise) = self.promises[layer as usize].take()
        {
            promise.settle(Ok(()));
        }
        Ok(true)
    }

    /// Settles the tickets that are left: all rows are in L1.
    pub(super) fn settle(&mut self) {
        for promise in self.promises.iter_mut().filter_map(Option::take) {
            promise.settle(Ok(()));
        }
    }

    /// How long to wait for the forwards of former sequences, which wake no one.
    pub(super) fn pause(&self) -> Option<Duration> {
        (!self.after.is_settled()).then_some(Duration::from_millis(1))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use larder_kernels::KvShape;

    use super::*;
    use crate::Model;
    use crate::prefix::PrefixOptions;

    /// One copy of a request of two layers, the first of which is in the memory. Returns the
    /// outcome, and whether each layer's ticket has settled. With `takes_back`, the memory is taken
    /// back between the message of the prefill process and the copy: the decode process was stopped
    /// there.
    fn copied(takes_back: bool) -> (Result<bool, HandoverError>, Vec<bool>) {
        let shape = KvShape::mha(2, 1, 4, 4, 4).unwrap();
        let options = PrefixOptions::new(&Model::new("rows", "", "f32", shape), 4, 4);
        let cache = options.over(None).unwrap();
        let mut sequence = cache.begin(&[1, 2, 3]).unwrap();
        let memory = Memory::create(1, shape.page_bytes() as usize).unwrap();
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
        let (mut copies, tickets) = Copies::new(&memory, &lent, &span, 2, Ticket::done());
        let filling = sequence.fill(3, tickets.clone(), || {}).unwrap();
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
        let settled = tickets.tickets().map(|ticket| ticket.is_settled());
        let settled = settled.collect();
        drop(filling);
        drop(copies);
        assert!(sequence.verify().is_err());
        (copied, settled)
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
