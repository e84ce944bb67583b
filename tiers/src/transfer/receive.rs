//! The transfer of a receiver: its thread.
//!
//! It asks the bootstrap place until all ranks of the other engine are there and can be reached.
//! Then it sends its pages to all of them, also to senders from which it takes no row: each sender
//! counts the receivers.
//!
//! With L1 on a device, rows come into a stage in host memory. When all are there, the device
//! copies them to the pages of the sequence, behind the forwards of former sequences.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_format::PageKey;
use larder_kernels::LayerTickets;

use super::link::{Link, linger, wait};
use super::part::{Entry, Identity, chunk_bytes_max, taken_from};
use super::rows::{Chunks, Wanted, of_sequence};
use super::slot::{Publishes, Slot};
use super::wire::{Hello, Message, Name, millis, of_other};
use super::{Patience, Room, State, TransferError, beat};
use crate::planted::planted;
use crate::prefix::{Sequence, Stage};

/// Copies of a device wake no one: the pause between two looks at them.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

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
    /// If L1 is on a device.
    stage: Option<Stage>,
    /// The copies from the stage, once all rows are there.
    copies: Option<Vec<LayerTickets>>,
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
            stage: None,
            copies: None,
        };
        let outcome = work.work();
        // The sequence goes back when nothing copies to its pages any more.
        for copies in work.copies.iter().flatten() {
            copies.tickets().for_each(|ticket| drop(ticket.wait()));
        }
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
        let stage = self.receiver.sequence.stage(self.receiver.wanted.pages());
        self.stage = stage.map_err(|error| of_sequence(&error))?;
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
            if self.copies.is_some() {
                until = until.min(Instant::now() + LOOK_AGAIN);
            }
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
            source.hear(&mut self.receiver, self.stage.as_mut())?;
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
        if !self.sources.iter().all(is_whole) || !self.are_copied()? {
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

impl Work {
    /// All rows have come. Whether they are in the pages of the sequence.
    fn are_copied(&mut self) -> Result<bool, TransferError> {
        let Some(stage) = &mut self.stage else {
            return Ok(true);
        };
        if self.copies.is_none() {
            let Receiver {
                wanted, sequence, ..
            } = &mut self.receiver;
            let begun = self.copies.insert(Vec::new());
            let copied = sequence.copy_in(stage, wanted.first_page(), wanted.tokens.clone(), begun);
            copied.map_err(|error| of_sequence(&error))?;
            if planted!(ReceivedBeforeCopy) {
                begun.clear();
            }
        }
        for copies in self.copies.iter().flatten() {
            match copies.outcome() {
                None => return Ok(false),
                Some(outcome) => outcome.map_err(|error| of_sequence(&error))?,
            }
        }
        Ok(true)
    }
}

impl Source {
    fn has_begun(&self) -> bool {
        self.note.is_some() || self.missing < self.has.len() as u64
    }

    /// Takes its messages.
    fn hear(
        &mut self,
        receiver: &mut Receiver,
        mut stage: Option<&mut Stage>,
    ) -> Result<(), TransferError> {
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
                            let stage = stage.as_deref_mut();
                            let rows = frame.rows;
                            let is_right = self.chunks.scatter(sequence, stage, own, &of, rows)?;
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
