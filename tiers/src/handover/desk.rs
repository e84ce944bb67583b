//! The offers and the loans of a prefill process, behind one lock.
//!
//! Invariants:
//! - Each block is free, or lent to one offer that is not over.
//! - An offer is over once, with its first outcome. Its loan ends then; while its engine or a
//!   device copies into the memory, at the end of these copies.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use larder_base::fork::{Private, keep_private};
use larder_base::runtime::descriptors;
use larder_format::PageKey;
use larder_kernels::Ticket;
use larder_sync::{Condvar, Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};

use super::State;
use super::error::HandoverError;
use super::memory::{Loan, Memory};
use crate::planted::planted;
use crate::prefix::Lender;

/// Copies of a device wake no one: the pause between two looks at them.
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// The end of an offer.
pub(super) type Outcome = Result<(), HandoverError>;

/// Copies of a device into the memory.
pub(super) struct Flight {
    /// These layers have so many tokens in the memory behind the copies.
    pub(super) layers: Range<u32>,
    pub(super) tokens: usize,
    pub(super) copies: Vec<Ticket>,
    /// The forward and the loads that fill the rows.
    pub(super) sources: Vec<Ticket>,
}

impl Flight {
    /// `None` while a copy has not ended.
    fn outcome(&self) -> Option<Outcome> {
        if !self.copies.iter().all(Ticket::is_settled) {
            return None;
        }
        let mut all = self.copies.iter().chain(&self.sources);
        Some(all.try_for_each(|ticket| ticket.poll().map(drop).map_err(HandoverError::Load)))
    }
}

/// How copies into the memory have ended, or go on.
pub(super) enum Written {
    /// The rows could not be read.
    Nothing,
    /// These layers have so many tokens in the memory.
    Layers(Range<u32>, usize),
    /// A device copies.
    Flights(Vec<Flight>),
}

/// A request on offer.
pub(super) struct Entry {
    pub(super) id: String,
    pub(super) prompt: PageKey,
    pub(super) tokens: usize,
    /// The first token with rows in the memory.
    pub(super) from: usize,
    pub(super) loan: Loan,
    /// Its engine copies rows into the memory now.
    pub(super) is_writing: bool,
    /// In the order in which a device copies.
    pub(super) flights: VecDeque<Flight>,
    /// It goes with the last of its copies.
    pub(super) is_dropped: bool,
    /// The tokens of each layer in the memory, those before `from` included.
    pub(super) layers: Vec<usize>,
    pub(super) end: Option<(u64, Vec<u8>)>,
    pub(super) deadline: Instant,
    pub(super) timeout: Duration,
    /// The connection that takes it.
    pub(super) taker: Option<u64>,
    pub(super) outcome: Option<Outcome>,
}

impl Entry {
    fn come(&mut self, layers: Range<u32>, tokens: usize) {
        for layer in layers {
            let known = &mut self.layers[layer as usize];
            *known = tokens.max(*known);
        }
    }

    /// A layer that is not complete, with its tokens.
    pub(super) fn missing(&self) -> Option<(u32, usize)> {
        let mut layers = (0..).zip(self.layers.iter().copied());
        layers.find(|(_, tokens)| *tokens < self.tokens)
    }

    /// Whether something writes into its loan.
    fn is_written(&self) -> bool {
        self.is_writing || !self.flights.is_empty() && !planted!(LendsUnderCopy)
    }

    pub(super) fn state(&self) -> State {
        match (&self.outcome, self.taker) {
            (Some(Ok(())), _) => State::Success,
            (Some(Err(error)), _) => State::Failed(error.clone()),
            (None, Some(_)) => State::Transferring,
            (None, None) => State::Waiting,
        }
    }
}

/// See the module documentation.
pub(super) struct Table {
    pub(super) offers: BTreeMap<u64, Entry>,
    free: Vec<u32>,
    numbers: u64,
    pub(super) is_ending: bool,
}

pub(super) struct Desk {
    pub(super) memory: Memory,
    /// Names the memory.
    pub(super) name: u64,
    pub(super) cache: Lender,
    table: Mutex<Table>,
    changed: Condvar,
    /// Wakes the thread that serves.
    pub(super) bell: OwnedFd,
    _private: Private,
}

impl Desk {
    /// A desk over all of this memory.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn new(memory: Memory, name: u64, cache: Lender) -> io::Result<Desk> {
        descriptors::cover()?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Desk {
            table: Mutex::new(Table {
                offers: BTreeMap::new(),
                free: (0..memory.blocks()).rev().collect(),
                numbers: 0,
                is_ending: false,
            }),
            _private: keep_private(&bell),
            memory,
            name,
            cache,
            changed: Condvar::new(),
            bell,
        })
    }

    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    /// Something has changed for the thread that serves.
    pub(super) fn ring(&self) {
        // A full counter is a bell that rings.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Something has changed for engines that wait.
    pub(super) fn tell(&self) {
        self.changed.notify_all();
    }

    /// Waits for a change until a moment.
    pub(super) fn wait(&self, table: &mut MutexGuard<'_, Table>, until: Instant) {
        let _timed_out = self.changed.wait_until(table, until);
    }

    /// Blocks that are not lent.
    pub(super) fn free_blocks(&self) -> usize {
        self.table.lock().free.len()
    }

    /// Puts a request on offer, with a loan of so many blocks. Returns its number.
    pub(super) fn offer(
        &self,
        blocks: usize,
        entry: impl FnOnce(Loan) -> Entry,
        id: &str,
    ) -> Result<u64, HandoverError> {
        let mut table = self.table.lock();
        self.expire(&mut table, Instant::now());
        if table.is_ending {
            return Err(HandoverError::Closed);
        }
        let mut offers = table.offers.values();
        if offers.any(|entry| entry.id == id && entry.outcome.is_none()) {
            return Err(HandoverError::Twice { id: id.to_owned() });
        }
        let free = table.free.len();
        let Some(rest) = free.checked_sub(blocks) else {
            return Err(HandoverError::NoRoom {
                needed: blocks,
                free,
                all: self.memory.blocks() as usize,
            });
        };
        table.numbers += 1;
        let number = table.numbers;
        let blocks = match planted!(LendsTwice) {
            true => table.free[rest..].to_vec(),
            false => table.free.split_off(rest),
        };
        let loan = Loan { number, blocks };
        self.memory.lend(&loan);
        table.offers.insert(number, entry(loan));
        drop(table);
        self.ring();
        Ok(number)
    }

    /// Ends an offer with this outcome, if it is not over.
    pub(super) fn over(&self, table: &mut Table, number: u64, outcome: Outcome) {
        let Some(entry) = table.offers.get_mut(&number) else {
            return;
        };
        if entry.outcome.is_none() {
            entry.outcome = Some(outcome);
            self.take_back(table, number);
            self.tell();
        }
    }

    /// The engine has dropped an offer.
    pub(super) fn drop_offer(&self, number: u64) {
        let mut table = self.table.lock();
        self.over(&mut table, number, Err(HandoverError::Cancelled));
        if let Some(entry) = table.offers.get_mut(&number) {
            entry.is_dropped = true;
        }
        self.take_back(&mut table, number);
        drop(table);
        self.ring();
    }

    /// Takes the copies of a device that have ended: their layers are in the memory.
    fn land(&self, table: &mut Table) {
        let flying = table.offers.iter().filter(|of| !of.1.flights.is_empty());
        for number in flying.map(|of| *of.0).collect::<Vec<_>>() {
            let mut failed = None;
            let Some(entry) = table.offers.get_mut(&number) else {
                continue;
            };
            while let Some(first) = entry.flights.front()
                && let Some(outcome) = first.outcome()
            {
                let Some(flight) = entry.flights.pop_front() else {
                    break;
                };
                match outcome {
                    Ok(()) => entry.come(flight.layers, flight.tokens),
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
            if let Some(error) = failed {
                self.over(table, number, Err(error));
            }
            self.take_back(table, number);
        }
    }

    /// Ends the loan of an offer that is over, if nothing writes into it any more.
    fn take_back(&self, table: &mut Table, number: u64) {
        let Some(entry) = table.offers.get_mut(&number) else {
            return;
        };
        if entry.outcome.is_none() || entry.is_written() {
            return;
        }
        self.memory.take_back(&entry.loan);
        table.free.append(&mut entry.loan.blocks);
        if entry.is_dropped {
            table.offers.remove(&number);
        }
    }

    /// Takes the copies that have ended, and ends the offers whose time is over. Returns the moment
    /// at which to do so again.
    pub(super) fn expire(&self, table: &mut Table, now: Instant) -> Option<Instant> {
        self.land(table);
        let open = |table: &Table| {
            let open = table.offers.iter();
            let open = open.filter(|(_, entry)| entry.outcome.is_none());
            let open = open.filter(|_| !planted!(WaitsForEver));
            open.map(|(number, entry)| (entry.deadline, *number))
                .collect::<Vec<_>>()
        };
        for (_, number) in open(table).into_iter().filter(|(until, _)| *until <= now) {
            let entry = &table.offers[&number];
            let what = match entry.taker {
                Some(_) => "the answer of the decode process",
                None => "a decode process",
            };
            let timeout = entry.timeout;
            self.over(table, number, Err(HandoverError::Late { what, timeout }));
        }
        let is_flying = table.offers.values().any(|of| !of.flights.is_empty());
        let again = is_flying.then(|| now + LOOK_AGAIN);
        let open = open(table).into_iter().map(|(until, _)| until);
        open.chain(again).min()
    }

    /// The engine copies rows into the loan of an offer. The copies end with
    /// [`Desk::has_written`].
    pub(super) fn writes(&self, number: u64) -> Result<Loan, HandoverError> {
        let mut table = self.table.lock();
        self.expire(&mut table, Instant::now());
        let entry = table.offers.get_mut(&number).ok_or(HandoverError::Closed)?;
        match &entry.outcome {
            Some(Err(error)) => Err(error.clone()),
            Some(Ok(())) => Err(HandoverError::Closed),
            None => {
                entry.is_writing = true;
                Ok(entry.loan.clone())
            }
        }
    }

    /// The end of the copies that began with [`Desk::writes`], unless a device goes on with them.
    pub(super) fn has_written(&self, number: u64, written: Written) {
        let mut table = self.table.lock();
        let Some(entry) = table.offers.get_mut(&number) else {
            return;
        };
        entry.is_writing = false;
        match written {
            Written::Nothing => {}
            Written::Layers(layers, tokens) => entry.come(layers, tokens),
            Written::Flights(flights) => entry.flights.extend(flights),
        }
        if planted!(LendsBeforeAnswer) && entry.missing().is_none() {
            let blocks = entry.loan.blocks.clone();
            table.free.extend(blocks);
        }
        self.take_back(&mut table, number);
        drop(table);
        self.ring();
    }
}
