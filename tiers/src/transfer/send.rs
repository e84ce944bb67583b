//! The transfer of a sender: its thread.
//!
//! It takes the receivers that have come, and the sequence when the engine gives it. It reads rows
//! only while a connection has room for them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_format::PageKey;

use super::link::{Link, linger, wait};
use super::part::Identity;
use super::rows::{Chunks, Source, Wanted, check_pools, digest};
use super::slot::{Publishes, Slot};
use super::wire::{Hello, Message, Name, millis, of_other};
use super::{NOTE_BYTES_MAX, Patience, Refusal, Room, State, TransferError, beat};
use crate::planted::planted;
use crate::prefix::Sequence;

/// A receiver that has come.
struct Receiver {
    link: Link,
    rank: u32,
    chunks: Chunks,
    source: Source,
    pages: Vec<u32>,
    /// Chunks that were queued.
    sent: u64,
    has_last: bool,
    /// It has all rows of all senders.
    is_done: bool,
    /// How long it waits for a sign.
    silence: Duration,
}

pub(super) struct Sender {
    pub(super) slot: Arc<Slot>,
    pub(super) own: Identity,
    pub(super) room: Room,
    pub(super) patience: Patience,
}

/// The values in which all receivers agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Agreed {
    ranks: u32,
    prompt: [u8; 32],
    tokens: u64,
}

struct Work {
    sender: Sender,
    agreed: Option<Agreed>,
    receivers: Vec<Receiver>,
    /// With its note.
    sequence: Option<(Sequence, Vec<u8>)>,
    /// Whether the sequence is that of the receivers.
    is_checked: bool,
}

impl Sender {
    /// The thread. `forget` runs before the end is published: no receiver comes any more.
    pub(super) fn run(self, forget: impl FnOnce()) {
        let publishes = Publishes::new(self.slot.clone());
        let (slot, silence) = (self.slot.clone(), self.patience.silence);
        let mut work = Work {
            sender: self,
            agreed: None,
            receivers: Vec::new(),
            sequence: None,
            is_checked: false,
        };
        let outcome = work.work();
        if let Err(error) = &outcome {
            for receiver in &mut work.receivers {
                receiver.link.queue(&Message::Failed(error.clone()));
                receiver.link.flush();
            }
        }
        forget();
        let sequence = work.sequence.map(|given| given.0);
        publishes.publish(sequence, outcome.map(|()| Vec::new()));
        let links = work.receivers.into_iter().map(|receiver| receiver.link);
        linger(links.collect(), &slot.waker, silence);
    }
}

impl Work {
    fn work(&mut self) -> Result<(), TransferError> {
        let begun = Instant::now();
        let Patience { bootstrap, silence } = self.sender.patience;
        loop {
            let news = self.sender.slot.news();
            self.sequence = news.given.or(self.sequence.take());
            for (link, hello) in news.arrived {
                self.admit(link, hello)?;
            }
            if news.is_ending {
                return Err(TransferError::Ended);
            }
            for receiver in &mut self.receivers {
                receiver.hear()?;
            }
            let all = self.agreed.map(|agreed| agreed.ranks as usize);
            if all == Some(self.receivers.len()) {
                self.go_on()?;
                if self.receivers.iter().all(|receiver| receiver.is_done) {
                    return Ok(());
                }
            } else if begun.elapsed() >= bootstrap {
                return Err(self.missing(bootstrap));
            }
            let mut until = Instant::now() + silence / 4;
            if all != Some(self.receivers.len()) {
                until = until.min(begun + bootstrap);
            }
            for receiver in self.receivers.iter_mut().filter(|of| !of.is_done) {
                let every = beat(silence, receiver.silence);
                receiver.link.beat(every);
                receiver.link.flush();
                receiver.link.check_silence(silence)?;
                until = until.min(Instant::now() + every);
                until = until.min(receiver.link.silent_at(silence));
                if self.is_checked && !receiver.has_last && receiver.link.has_room() {
                    // More rows can be queued at once.
                    until = Instant::now();
                }
            }
            let links = self.receivers.iter().map(|receiver| &receiver.link);
            wait(&self.sender.slot.waker, None, links, until);
        }
    }

    /// A receiver has come.
    fn admit(&mut self, mut link: Link, hello: Hello) -> Result<(), TransferError> {
        let checked = self.check(&hello);
        let name = Name {
            namespace: self.sender.own.namespace.fingerprint(),
            prompt: PageKey::from_bytes(hello.prompt),
        };
        if checked.is_ok() {
            link.queue(&Message::Welcome {
                namespace: self.sender.own.namespace.encode().to_owned(),
                silence_ms: millis(self.sender.patience.silence),
            });
        }
        link.call(format!("decode rank {}", hello.rank), name);
        let wanted = wanted(&hello, &self.sender.own);
        self.receivers.push(Receiver {
            link,
            rank: hello.rank,
            chunks: Chunks::new(&self.sender.own, wanted, hello.wants),
            source: Source::default(),
            pages: hello.pages,
            sent: 0,
            has_last: false,
            is_done: false,
            silence: Duration::from_millis(hello.silence_ms),
        });
        checked
    }

    fn check(&mut self, hello: &Hello) -> Result<(), TransferError> {
        let own = &self.sender.own;
        own.agree(&hello.namespace)?;
        let said = Agreed {
            ranks: hello.ranks,
            prompt: hello.prompt,
            tokens: hello.tokens.end,
        };
        let agreed = *self.agreed.get_or_insert(said);
        if (agreed.prompt, agreed.tokens) != (said.prompt, said.tokens) {
            return Err(Refusal::Prompt(self.sender.room.0).into());
        }
        let is_twice = self.receivers.iter().any(|of| of.rank == hello.rank);
        if agreed.ranks != said.ranks || hello.rank >= said.ranks || is_twice {
            let what = format!(
                "decode rank {} of {} has come beside others of {}, or twice",
                hello.rank, said.ranks, agreed.ranks
            );
            return Err(Refusal::Ranks(what).into());
        }
        let wants_own = hello.wants.as_ref().is_none_or(|wants| own.held.has(wants));
        if !wants_own || wanted(hello, own).pages() != hello.pages.len() {
            let what = format!(
                "decode rank {} wants what prefill rank {} lacks",
                hello.rank, own.rank
            );
            return Err(Refusal::Ranks(what).into());
        }
        Ok(())
    }

    fn missing(&self, timeout: Duration) -> TransferError {
        let missing = match self.agreed {
            None => "no decode rank has come".to_owned(),
            Some(agreed) => {
                let has = |rank: &u32| self.receivers.iter().any(|of| of.rank == *rank);
                let missing = (0..agreed.ranks).filter(|rank| !has(rank));
                format!(
                    "decode ranks {:?} have not come",
                    missing.collect::<Vec<_>>()
                )
            }
        };
        TransferError::NotAgreed { missing, timeout }
    }

    /// All receivers have come.
    fn go_on(&mut self) -> Result<(), TransferError> {
        let Some((sequence, note)) = &self.sequence else {
            self.sender.slot.reach(State::WaitingForInput);
            return Ok(());
        };
        if !self.is_checked {
            self.check_sequence(sequence, note)?;
            self.is_checked = true;
            self.sender.slot.reach(State::Transferring);
        }
        for receiver in &mut self.receivers {
            receiver.send(sequence, &self.sender.own, note)?;
        }
        Ok(())
    }

    fn check_sequence(&self, sequence: &Sequence, note: &[u8]) -> Result<(), TransferError> {
        let Some(agreed) = self.agreed else {
            return Ok(());
        };
        let tokens = usize::try_from(agreed.tokens).unwrap_or(usize::MAX);
        if note.len() > NOTE_BYTES_MAX {
            let what = format!(
                "a note of {} bytes; the most are {NOTE_BYTES_MAX}",
                note.len()
            );
            return Err(TransferError::Sequence(what));
        }
        check_pools(sequence, &self.sender.own)?;
        if digest(sequence, tokens)?.as_bytes() != &agreed.prompt && !planted!(PromptNotCompared) {
            return Err(Refusal::Prompt(self.sender.room.0).into());
        }
        if sequence.computed_tokens() < tokens {
            let what = format!(
                "{} tokens are computed, and {tokens} are sent",
                sequence.computed_tokens()
            );
            return Err(TransferError::Sequence(what));
        }
        Ok(())
    }
}

/// The tokens that a receiver wants.
fn wanted(hello: &Hello, own: &Identity) -> Wanted {
    let at = |token: u64| usize::try_from(token).unwrap_or(usize::MAX);
    Wanted {
        tokens: at(hello.tokens.start)..at(hello.tokens.end),
        page_tokens: own.shape.page_tokens() as usize,
    }
}

impl Receiver {
    /// Takes its messages.
    fn hear(&mut self) -> Result<(), TransferError> {
        self.link.turn();
        while !self.is_done {
            let Some(frame) = self.link.next()? else {
                return Ok(());
            };
            match frame.message {
                Message::Alive => {}
                Message::Done if self.has_last => self.is_done = true,
                Message::Failed(error) => return Err(of_other(self.link.peer(), error)),
                _ => return Err(self.link.garbled("a message out of order".to_owned())),
            }
        }
        Ok(())
    }

    /// Queues rows while there is room for them.
    fn send(
        &mut self,
        sequence: &Sequence,
        own: &Identity,
        note: &[u8],
    ) -> Result<(), TransferError> {
        while self.link.has_room() && !self.has_last {
            match self.chunks.place(self.sent) {
                Some(mut of) => {
                    of.page = self.pages.get(of.at as usize).copied().unwrap_or_default();
                    let (chunks, source) = (&self.chunks, &mut self.source);
                    let rows = |into: &mut Vec<u8>| chunks.gather(sequence, source, own, &of, into);
                    self.link.queue_with(&Message::Chunk(of), rows)?;
                    self.sent += 1;
                }
                None => {
                    self.link.queue(&Message::Last {
                        chunks: self.sent,
                        note: note.to_owned(),
                    });
                    self.has_last = true;
                }
            }
        }
        Ok(())
    }
}
