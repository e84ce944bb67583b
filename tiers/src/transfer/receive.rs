//! The transfer of a receiver: its thread.
//!
//! It asks the bootstrap place until all ranks of the other engine are there and can be reached.
//! Then it sends its pages to all of them, also to senders from which it takes no row: each sender
//! counts the receivers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_format::PageKey;

use super::link::{Link, linger, wait};
use super::part::{Entry, Identity, chunk_bytes_max, taken_from};
use super::rows::{Chunks, Wanted};
use super::slot::{Publishes, Slot};
use super::wire::{Hello, Message, Name, millis, of_other};
use super::{Patience, Room, State, TransferError, beat};
use crate::prefix::Sequence;

/// The pause before the place is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// A sender.
struct Source {
    link: Link,
    chunks: Chunks,
    is_agreed: bool,
    /// By number.
    has: Vec<bool>,
    missing: u64,
    note: Option<Vec<u8>>,
    silence: Duration,
}

pub(super) struct Receiver {
    pub(super) slot: Arc<Slot>,
    pub(super) own: Identity,
    pub(super) room: Room,
    pub(super) place: SocketAddr,
    pub(super) patience: Patience,
    pub(super) wanted: Wanted,
    pub(super) pages: Vec<u32>,
    pub(super) prompt: PageKey,
    pub(super) sequence: Sequence,
}

struct Work {
    receiver: Receiver,
    begun: Instant,
    sources: Vec<Source>,
}

impl Receiver {
    /// The thread.
    pub(super) fn run(self) {
        let publishes = Publishes::new(self.slot.clone());
        let (slot, silence) = (self.slot.clone(), self.patience.silence);
        let mut work = Work {
            receiver: self,
            begun: Instant::now(),
            sources: Vec::new(),
        };
        let outcome = work.work();
        let last = match &outcome {
            Ok(_) => Message::Done,
            Err(error) => Message::Failed(error.clone()),
        };
        for source in &mut work.sources {
            source.link.queue(&last);
            source.link.flush();
        }
        publishes.publish(Some(work.receiver.sequence), outcome);
        let links = work.sources.into_iter().map(|source| source.link);
        linger(links.collect(), &slot.waker, silence);
    }
}

impl Work {
    fn work(&mut self) -> Result<Vec<u8>, TransferError> {
        let mut missing = "the bootstrap place does not answer".to_owned();
        let (entries, links) = loop {
            if let Some(entries) = self.ask(&mut missing)?
                && let Some(links) = self.connect(&entries, &mut missing)?
            {
                break (entries, links);
            }
            self.pause(&[], ASK_AGAIN, &missing)?;
        };
        let taken = taken_from(&self.receiver.own, &entries)?;
        for ((link, entry), held) in links.into_iter().zip(entries).zip(taken) {
            let chunks = Chunks::new(&self.receiver.own, self.receiver.wanted.clone(), held);
            self.greet(link, entry.rank, chunks);
        }
        loop {
            if let Some(note) = self.turn()? {
                return Ok(note);
            }
            let silence = self.receiver.patience.silence;
            let mut until = Instant::now() + silence / 4;
            for source in &mut self.sources {
                let every = beat(silence, source.silence);
                source.link.beat(every);
                source.link.flush();
                until = until.min(Instant::now() + every);
                // Senders that have not begun give no sign.
                if source.is_agreed {
                    source.link.check_silence(silence)?;
                    until = until.min(source.link.silent_at(silence));
                } else {
                    until = until.min(self.begun + self.receiver.patience.bootstrap);
                }
            }
            let links = self.sources.iter().map(|source| &source.link);
            wait(&self.receiver.slot.waker, None, links, until);
        }
    }

    /// Waits for one of these links, or so long.
    ///
    /// # Errors
    /// The engine ends the transfer, or the time to agree is over.
    fn pause(&self, links: &[Link], most: Duration, missing: &str) -> Result<(), TransferError> {
        self.check_time(missing)?;
        let until = (Instant::now() + most).min(self.begun + self.receiver.patience.bootstrap);
        wait(&self.receiver.slot.waker, None, links, until);
        self.check_time(missing)
    }

    fn check_time(&self, missing: &str) -> Result<(), TransferError> {
        if self.receiver.slot.news().is_ending {
            return Err(TransferError::Ended);
        }
        let timeout = self.receiver.patience.bootstrap;
        if self.begun.elapsed() < timeout {
            return Ok(());
        }
        let missing = missing.to_owned();
        Err(TransferError::NotAgreed { missing, timeout })
    }

    /// The ranks of the other engine. `None`: not all of them are there yet.
    fn ask(&self, missing: &mut String) -> Result<Option<Vec<Entry>>, TransferError> {
        let peer = "the bootstrap place".to_owned();
        let Ok(mut link) = Link::connect(self.receiver.place, peer) else {
            return Ok(None);
        };
        link.queue(&Message::Ask);
        loop {
            link.turn();
            match link.next() {
                Ok(None) => {}
                Ok(Some(frame)) => {
                    let Message::Known(entries) = frame.message else {
                        return Ok(None);
                    };
                    let ranks = entries.first().map_or(1, |entry| entry.ranks);
                    let has = |rank: &u32| entries.iter().any(|entry| entry.rank == *rank);
                    let lacking: Vec<u32> = (0..ranks).filter(|rank| !has(rank)).collect();
                    if lacking.is_empty() && entries.len() == ranks as usize {
                        return Ok(Some(entries));
                    }
                    *missing = format!("prefill ranks {lacking:?} have not registered");
                    return Ok(None);
                }
                Err(_) => return Ok(None),
            }
            let only = std::slice::from_ref(&link);
            self.pause(only, self.receiver.patience.silence, missing)?;
        }
    }

    /// Connections to all ranks. `None`: not all of them can be reached.
    fn connect(
        &self,
        entries: &[Entry],
        missing: &mut String,
    ) -> Result<Option<Vec<Link>>, TransferError> {
        let mut links = Vec::new();
        for entry in entries {
            *missing = format!(
                "prefill rank {} cannot be reached at {}",
                entry.rank, entry.address
            );
            let Ok(address) = entry.address.parse() else {
                return Ok(None);
            };
            match Link::connect(address, format!("prefill rank {}", entry.rank)) {
                Ok(link) => links.push(link),
                Err(_) => return Ok(None),
            }
        }
        loop {
            links.iter_mut().for_each(Link::turn);
            if let Some((_, entry)) = links.iter().zip(entries).find(|(link, _)| link.is_over()) {
                let Entry { rank, address, .. } = entry;
                *missing = format!("prefill rank {rank} cannot be reached at {address}");
                return Ok(None);
            }
            if !links.iter().any(Link::is_connecting) {
                return Ok(Some(links));
            }
            self.pause(&links, self.receiver.patience.silence, missing)?;
        }
    }

    /// Sends the pages to a sender.
    fn greet(&mut self, mut link: Link, rank: u32, chunks: Chunks) {
        let Receiver {
            own,
            room,
            wanted,
            pages,
            prompt,
            patience,
            ..
        } = &self.receiver;
        link.queue(&Message::Hello(Hello {
            room: *room,
            namespace: own.namespace.encode().to_owned(),
            rank: own.rank,
            ranks: own.ranks,
            wants: chunks.held.clone(),
            tokens: wanted.tokens.start as u64..wanted.tokens.end as u64,
            prompt: *prompt.as_bytes(),
            pages: pages.clone(),
            silence_ms: millis(patience.silence),
        }));
        let name = Name {
            namespace: own.namespace.fingerprint(),
            prompt: *prompt,
        };
        link.call(format!("prefill rank {rank}"), name);
        link.allow_chunks(chunk_bytes_max(&own.shape));
        let missing = chunks.count();
        self.sources.push(Source {
            link,
            is_agreed: false,
            has: vec![false; usize::try_from(missing).unwrap_or_default()],
            missing,
            chunks,
            note: None,
            silence: patience.silence,
        });
    }

    /// Takes the messages that have arrived. Returns the note when all rows are there.
    fn turn(&mut self) -> Result<Option<Vec<u8>>, TransferError> {
        if self.receiver.slot.news().is_ending {
            return Err(TransferError::Ended);
        }
        for source in &mut self.sources {
            source.hear(&mut self.receiver)?;
        }
        if let Some(waiting) = self.sources.iter().find(|source| !source.is_agreed) {
            self.check_time(&format!("{} has not agreed", waiting.link.peer()))?;
            return Ok(None);
        }
        let has_rows = self.sources.iter().any(Source::has_begun);
        self.receiver.slot.reach(match has_rows {
            true => State::Transferring,
            false => State::WaitingForInput,
        });
        let is_whole = |source: &Source| source.missing == 0 && source.note.is_some();
        if !self.sources.iter().all(is_whole) {
            return Ok(None);
        }
        let note = self.sources.first().and_then(|source| source.note.clone());
        let other = self.sources.iter().find(|source| source.note != note);
        match other {
            Some(source) => Err(source
                .link
                .garbled("another note than the others".to_owned())),
            None => Ok(Some(note.unwrap_or_default())),
        }
    }
}

impl Source {
    fn has_begun(&self) -> bool {
        self.note.is_some() || self.missing < self.has.len() as u64
    }

    /// Takes its messages.
    fn hear(&mut self, receiver: &mut Receiver) -> Result<(), TransferError> {
        self.link.turn();
        while self.missing > 0 || self.note.is_none() {
            let Some(frame) = self.link.next()? else {
                return Ok(());
            };
            let is_wrong = match frame.message {
                Message::Welcome {
                    namespace,
                    silence_ms,
                } if !self.is_agreed => {
                    receiver.own.agree(&namespace)?;
                    self.is_agreed = true;
                    self.silence = Duration::from_millis(silence_ms);
                    false
                }
                Message::Alive => false,
                Message::Failed(error) => return Err(of_other(self.link.peer(), error)),
                Message::Chunk(of) if self.is_agreed && self.note.is_none() => {
                    let number = self.chunks.number(&of);
                    let number = number.and_then(|number| usize::try_from(number).ok());
                    let new = number.filter(|number| !self.has[*number]);
                    let is_own = receiver.pages.get(of.at as usize) == Some(&of.page);
                    match new.filter(|_| is_own) {
                        Some(number) => {
                            let (sequence, own) = (&mut receiver.sequence, &receiver.own);
                            let is_right = self.chunks.scatter(sequence, own, &of, frame.rows)?;
                            self.has[number] = true;
                            self.missing -= 1;
                            !is_right
                        }
                        None => true,
                    }
                }
                Message::Last { chunks, note } if chunks == self.has.len() as u64 => {
                    self.note = Some(note);
                    self.missing > 0
                }
                _ => true,
            };
            if is_wrong {
                return Err(self.link.garbled("a message out of order".to_owned()));
            }
        }
        Ok(())
    }
}
