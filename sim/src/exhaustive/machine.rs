//! One script in execution: a core, a volume whose writes wait for a sync, and the promises so far.
//!
//! The device finishes one operation at a time, its oldest or its newest. A [`Witness`] sees every
//! change of the state that a crash could leave.
//!
//! It drives [`Core`] and recovery alone, through the commands and effects that are open to any
//! driver. The handle and its threads are not in it: without threads and without a clock, thousands
//! of states a second can be tried. All decisions are the core's: the machine moves bytes, and
//! answers. `store` of this package plays the handle itself.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use larder_engine::SyncPolicy;
use larder_engine::catalog::{Finding, Grant, ReservationId};
use larder_engine::core::{Copied, Core, Effect, Fault, Io, IoId, PageCopy, RequestId, Victim};
use larder_engine::format::{BLOCK_BYTES, OpenState, Run, Superblock};
use larder_engine::index::{Index, NamespaceSlot};
use larder_engine::recovery::scan::{Spot, read_descriptors};
use larder_engine::{Hint, PutStatus};

use super::image::{Image, Platter, Written};
use super::promises::{Crash, Deletion, Judge, Names, Promises, Version, adoptions};
use super::store::{CHAIN, NAMES, Store};

/// Operations that the device finishes in one step of a script before the step counts as stuck.
const PATIENCE: usize = 10_000;

/// One operation of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    PutPage,
    PutChain,
    Get,
    Delete,
    Clear,
    Flush,
    Reclaim,
    Close,
    Kill,
    PowerLoss,
}

impl Operation {
    pub const ALL: [Operation; 10] = [
        Operation::PutPage,
        Operation::PutChain,
        Operation::Get,
        Operation::Delete,
        Operation::Clear,
        Operation::Flush,
        Operation::Reclaim,
        Operation::Close,
        Operation::Kill,
        Operation::PowerLoss,
    ];
}

/// The operation in flight that the device finishes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Oldest,
    Newest,
}

/// Everything that decides which states a crash at this moment can leave, and which pages it must
/// not lose.
pub struct Moment<'a> {
    pub durable: &'a Image,
    /// Blocks written since the last sync, then blocks in flight, in order.
    pub blocks: &'a [Written],
    /// Number of these blocks that have been written.
    pub completed: usize,
    pub superblock: &'a Superblock,
    pub promises: &'a Promises,
}

/// Examines the moments of a script.
pub trait Witness {
    /// # Errors
    /// The promise that a crash at this moment would break.
    fn see(&mut self, moment: &Moment<'_>) -> Result<(), String>;
    fn judge(&mut self) -> &mut Judge;
}

enum Flight {
    Metadata(IoId, Vec<Written>),
    Sync(IoId, usize),
    Data(ReservationId, usize, Vec<Written>),
    Copy(usize, Vec<Written>),
}

pub struct Machine<'w, W: Witness> {
    store: Rc<Store>,
    witness: &'w mut W,
    /// Whether the witness examines moments.
    pub watched: bool,
    order: Order,
    superblock: Superblock,
    core: Core,
    index: Arc<Index>,
    slot: NamespaceSlot,
    platter: Platter,
    durable: Image,
    unsynced: Vec<Written>,
    flights: VecDeque<Flight>,
    settled: BTreeMap<ReservationId, Vec<PutStatus>>,
    finished: BTreeMap<RequestId, Result<(), Fault>>,
    /// Copies in progress. `NotWritten` until the write has ended.
    copying: Option<(ReservationId, Vec<Copied>)>,
    promises: Promises,
    attempts: [usize; NAMES],
    requests: u64,
    clock: u64,
}

impl<'w, W: Witness> Machine<'w, W> {
    /// A machine over a store that was never opened.
    pub fn new(
        store: Rc<Store>,
        order: Order,
        witness: &'w mut W,
    ) -> Result<Machine<'w, W>, String> {
        let superblock = store.superblock(Run::FIRST, OpenState::Clean);
        let blank = store.blank();
        let platter = Platter::new(blank.clone());
        let (index, recovery) = store.recover(&platter, &superblock, false);
        let core = Core::new(store.config.clone(), recovery.recovered, index.clone());
        let mut machine = Machine {
            witness,
            watched: false,
            order,
            superblock,
            core,
            index,
            slot: NamespaceSlot(0),
            platter,
            durable: blank,
            unsynced: Vec::new(),
            flights: VecDeque::new(),
            settled: BTreeMap::new(),
            finished: BTreeMap::new(),
            copying: None,
            promises: Promises::default(),
            attempts: [0; NAMES],
            requests: 0,
            clock: 0,
            store,
        };
        machine.open(None)?;
        Ok(machine)
    }

    /// Fills the store until reclaim is due, with pages worth a copy in each segment.
    pub fn fill(&mut self) -> Result<(), String> {
        for chain in 1..NAMES / CHAIN {
            if self.core.space_view().free_segments < 2 {
                break;
            }
            self.put(chain * CHAIN..(chain + 1) * CHAIN)?;
            for warm in (1..=chain).step_by(2) {
                let keys = &self.store.keys[warm * CHAIN..(warm + 1) * CHAIN];
                self.index.touch(self.slot, keys);
            }
        }
        self.flush()?;
        self.settle_down()
    }

    pub fn play(&mut self, operation: Operation) -> Result<(), String> {
        match operation {
            Operation::PutPage => self.put(0..1),
            Operation::PutChain => self.put(0..CHAIN),
            Operation::Get => self.get(),
            Operation::Delete => self.delete(1),
            Operation::Clear => self.delete(Names::MAX),
            Operation::Flush => self.flush(),
            Operation::Reclaim => self.reclaim(),
            Operation::Close => self.close(),
            Operation::Kill => self.crash(Crash::Kill),
            Operation::PowerLoss => self.crash(Crash::Power),
        }
    }

    /// Lets the device finish everything.
    pub fn settle_down(&mut self) -> Result<(), String> {
        self.until("everything", |machine| machine.flights.is_empty())
    }

    // ---- the device

    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) -> Result<(), String> {
        for _ in 0..PATIENCE {
            if done(self) {
                return Ok(());
            }
            let flight = match self.order {
                Order::Oldest => self.flights.pop_front(),
                Order::Newest => self.flights.pop_back(),
            };
            match flight {
                Some(flight) => self.arrive(flight)?,
                None => break,
            }
        }
        Err(format!("{what} does not end"))
    }

    fn arrive(&mut self, flight: Flight) -> Result<(), String> {
        match flight {
            Flight::Metadata(id, blocks) => {
                self.write(blocks);
                self.look()?;
                self.with_core(|core| core.io_done(id, Ok(())))?;
            }
            Flight::Data(reservation, at, blocks) => {
                self.write(blocks);
                self.look()?;
                self.with_core(|core| core.landed(reservation, &[(at, true)]))?;
            }
            Flight::Copy(at, blocks) => {
                self.write(blocks);
                self.look()?;
                if let Some((_, outcomes)) = &mut self.copying {
                    outcomes[at] = Copied::Written;
                }
                self.end_copying()?;
            }
            Flight::Sync(id, covers) => {
                for written in self.unsynced.drain(..covers) {
                    self.durable.put(&written);
                }
                self.look()?;
                self.with_core(|core| core.io_done(id, Ok(())))?;
            }
        }
        Ok(())
    }

    fn write(&mut self, blocks: Vec<Written>) {
        let mut image = self.platter.image();
        for written in &blocks {
            image.put(written);
        }
        drop(image);
        self.unsynced.extend(blocks);
    }

    fn with_core<R>(&mut self, command: impl FnOnce(&mut Core) -> R) -> Result<R, String> {
        self.clock += 1;
        let result = command(&mut self.core);
        for effect in self.core.take_effects() {
            match effect {
                Effect::Io {
                    id, io: Io::Sync, ..
                } => {
                    self.flights
                        .push_back(Flight::Sync(id, self.unsynced.len()));
                }
                Effect::Io {
                    id,
                    io: Io::Write { offset, bytes },
                    ..
                } => {
                    let blocks = Written::blocks(offset, &bytes);
                    self.flights.push_back(Flight::Metadata(id, blocks));
                }
                Effect::Settled(id, statuses) => {
                    self.settled.insert(id, statuses);
                }
                Effect::Finished(id, result) => {
                    self.finished.insert(id, result);
                }
                Effect::ReadDescriptors(victim) => self.read_descriptors(&victim)?,
                Effect::Copy(id, pages) => {
                    self.begin_copying(id, &pages);
                    self.end_copying()?;
                }
                Effect::Reclaim if self.core.is_reclaiming() => self.step_reclaim()?,
                Effect::Room | Effect::Reclaim | Effect::ReadOnly(..) | Effect::ReadWrite(_) => {}
            }
        }
        self.core.check_invariants()?;
        self.look()?;
        Ok(result)
    }

    // ---- promises

    /// Names of the indexed pages with correct bytes.
    fn present(&self) -> Names {
        let image = self.platter.image();
        let mut names = 0;
        self.index.each(|page| {
            if let Some(name) = self.store.name_of(page.key)
                && self.store.checksum_at(name, page.place, &image) == page.checksum
            {
                names |= 1 << name;
            }
        });
        names
    }

    fn look(&mut self) -> Result<(), String> {
        self.promises.present = self.present();
        self.promises.durable &= self.promises.present;
        if !self.watched {
            return Ok(());
        }
        let mut blocks = self.unsynced.clone();
        let completed = blocks.len();
        for flight in &self.flights {
            match flight {
                Flight::Metadata(_, written)
                | Flight::Data(_, _, written)
                | Flight::Copy(_, written) => {
                    blocks.extend_from_slice(written);
                }
                Flight::Sync(..) => {}
            }
        }
        self.witness.see(&Moment {
            durable: &self.durable,
            blocks: &blocks,
            completed,
            superblock: &self.superblock,
            promises: &self.promises,
        })
    }

    fn is_always(&self) -> bool {
        self.store.config.sync == SyncPolicy::Always
    }

    // ---- operations

    fn put(&mut self, names: std::ops::Range<usize>) -> Result<(), String> {
        let asks: Vec<_> = names.clone().map(|name| self.store.ask(name)).collect();
        let slot = self.slot;
        let born = self.clock;
        let (id, grants) = self.with_core(|core| core.reserve(slot, &asks, Hint::default()))?;
        let mut checksums = Vec::new();
        for (at, (name, grant)) in names.clone().zip(&grants).enumerate() {
            let Grant::Write(extent) = grant else {
                checksums.push(None);
                continue;
            };
            self.attempts[name] += 1;
            let (bytes, checksum) = self.store.payload(name, self.attempts[name]);
            self.promises.versions.push(Version {
                name,
                checksum,
                born,
            });
            checksums.push(Some(checksum));
            let blocks = Written::blocks(extent.offset, &bytes);
            self.flights.push_back(Flight::Data(id, at, blocks));
        }
        self.look()?;
        self.with_core(|core| core.commit(id, &checksums))?;
        self.until("a put", |machine| machine.settled.contains_key(&id))?;
        let statuses = self.settled.remove(&id).unwrap_or_default();
        for (name, status) in names.zip(statuses) {
            match status {
                PutStatus::Failed(why) => return Err(format!("a put fails, {why:?}")),
                PutStatus::Refused(_) => {}
                PutStatus::Stored | PutStatus::Duplicate => {
                    if self.promises.present >> name & 1 == 0 {
                        return Err(format!("page {name} is {status:?}, and is missing"));
                    }
                    self.promises.durable |= Names::from(self.is_always()) << name;
                }
                other => return Err(format!("an unknown status {other:?}")),
            }
        }
        self.look()
    }

    /// Reads every page that the index knows, and reports the findings.
    fn get(&mut self) -> Result<(), String> {
        for name in 0..NAMES {
            let key = self.store.keys[name];
            let Some(found) = self.index.locate(self.slot, &key) else {
                continue;
            };
            let checksum = self
                .store
                .checksum_at(name, found.place, &self.platter.image());
            let finding = if checksum == found.checksum {
                Finding::Good
            } else {
                Finding::Mismatch
            };
            if finding == Finding::Mismatch && !found.unproven {
                return Err(format!("page {name} reads as {finding:?}"));
            }
            let slot = self.slot;
            self.with_core(|core| core.found(slot, &key, found.place, finding))?;
        }
        Ok(())
    }

    /// Runs a request. Returns false if there was no room for its record.
    fn request(&mut self, command: impl FnOnce(&mut Core, RequestId)) -> Result<bool, String> {
        self.requests += 1;
        let id = RequestId(self.requests);
        self.with_core(|core| command(core, id))?;
        self.until("a request", |machine| machine.finished.contains_key(&id))?;
        match self.finished.remove(&id) {
            Some(Err(Fault::NoRoom)) => Ok(false),
            Some(Err(fault)) => Err(format!("a request fails: {fault:?}")),
            _ => Ok(true),
        }
    }

    /// Deletes the first page, or the whole namespace.
    fn delete(&mut self, names: Names) -> Result<(), String> {
        self.clock += 1;
        let at = self.promises.deletions.len();
        self.promises.deletions.push(Deletion {
            names,
            at: self.clock,
            acked: false,
            durable: false,
        });
        let slot = self.slot;
        let key = self.store.keys[0];
        let written = self.request(|core, id| {
            if names == 1 {
                core.delete(id, slot, &[key]);
            } else {
                core.clear(id, slot);
            }
        })?;
        let is_always = self.is_always();
        let deletion = &mut self.promises.deletions[at];
        deletion.acked = written;
        deletion.durable = written && is_always;
        self.look()
    }

    fn flush(&mut self) -> Result<(), String> {
        let owed = self.promises.present;
        let deletions: Vec<bool> = self.promises.deletions.iter().map(|d| d.acked).collect();
        if !self.request(Core::flush)? {
            return Err("a flush finds no room".to_owned());
        }
        self.promises.durable |= owed & self.promises.present;
        for (deletion, owed) in self.promises.deletions.iter_mut().zip(deletions) {
            deletion.durable |= owed;
        }
        self.look()
    }

    /// Empties one segment, if reclaim is due.
    fn reclaim(&mut self) -> Result<(), String> {
        self.step_reclaim()?;
        self.until("reclaim", |machine| !machine.core.is_reclaiming())
    }

    /// Takes steps of reclaim until it waits for the device, or has emptied a segment.
    fn step_reclaim(&mut self) -> Result<(), String> {
        while self.with_core(|core| core.reclaim_step(usize::MAX))? && self.core.is_reclaiming() {}
        Ok(())
    }

    fn read_descriptors(&mut self, victim: &Victim) -> Result<(), String> {
        let spot = Spot {
            store: self.store.config.store,
            volume: victim.volume,
            number: victim.number,
            segment_blocks: self.store.config.segment_blocks,
        };
        let read = read_descriptors(&self.platter, &spot, victim);
        self.with_core(|core| core.descriptors_read(read))
    }

    /// Reads the pages of a copy, and starts the writes of the good ones.
    fn begin_copying(&mut self, id: ReservationId, pages: &[PageCopy]) {
        let mut outcomes = Vec::new();
        let image = self.platter.image();
        for (at, PageCopy { page, from, to }) in pages.iter().enumerate() {
            let name = self.store.name_of(page.record.key.prefix());
            let name = name.expect("a page that was never put");
            if self.store.checksum_at(name, page.from, &image) != page.record.checksum {
                outcomes.push(Copied::Damaged(Finding::Mismatch));
                continue;
            }
            let mut bytes = vec![0; self.store.page_blocks as usize * BLOCK_BYTES];
            image.read(from.offset, &mut bytes);
            let blocks = Written::blocks(to.offset, &bytes);
            self.flights.push_back(Flight::Copy(at, blocks));
            outcomes.push(Copied::NotWritten);
        }
        drop(image);
        self.copying = Some((id, outcomes));
    }

    /// Ends the copies once all of them are written.
    fn end_copying(&mut self) -> Result<(), String> {
        let is_over =
            |(_, outcomes): &mut (_, Vec<Copied>)| !outcomes.contains(&Copied::NotWritten);
        if let Some((id, outcomes)) = self.copying.take_if(is_over) {
            self.with_core(|core| core.copied(id, &outcomes))?;
        }
        Ok(())
    }

    /// Closes in order and opens again.
    fn close(&mut self) -> Result<(), String> {
        for _ in 0..2 {
            self.with_core(Core::write_evictions)?;
            self.flush()?;
            self.until("a close", |machine| machine.core.is_idle())?;
        }
        for (_, offset, bytes) in self
            .core
            .closing_headers()
            .map_err(|error| error.to_string())?
        {
            self.write(Written::blocks(offset, &bytes));
        }
        self.look()?;
        self.sync_all();
        self.look()?;
        self.superblock.state = OpenState::Clean;
        self.look()?;
        self.open(Some(Crash::Power))
    }

    /// Ends the epoch in the middle of its work. A kill leaves all written blocks, a power loss
    /// every second block.
    fn crash(&mut self, crash: Crash) -> Result<(), String> {
        let flights = std::mem::take(&mut self.flights);
        if crash == Crash::Power {
            let mut blocks = std::mem::take(&mut self.unsynced);
            for flight in flights {
                if let Flight::Metadata(_, written)
                | Flight::Data(_, _, written)
                | Flight::Copy(_, written) = flight
                {
                    blocks.extend(written);
                }
            }
            for written in blocks.iter().step_by(2) {
                self.durable.put(written);
            }
            *self.platter.image() = self.durable.clone();
        }
        self.open(Some(crash))
    }

    fn sync_all(&mut self) {
        self.unsynced.clear();
        self.durable = self.platter.image().clone();
    }

    /// Opens the store after a crash, or for the first time.
    fn open(&mut self, crash: Option<Crash>) -> Result<(), String> {
        self.flights.clear();
        self.copying = None;
        self.settled.clear();
        self.finished.clear();
        let verdict = self
            .witness
            .judge()
            .verdict(&self.platter, &self.superblock)?;
        if let Some(crash) = crash {
            self.promises.check(&verdict, crash)?;
            self.promises.end_run(&verdict, crash);
        }
        let (index, recovery) = self.store.recover(&self.platter, &self.superblock, false);
        self.index = index;
        let adopted = adoptions(&self.store, &recovery);
        // Writing the superblocks syncs the volume, including everything that an earlier epoch left
        // unsynced.
        self.sync_all();
        self.superblock = self
            .store
            .superblock(recovery.recovered.first.run(), OpenState::Open);
        self.look()?;
        self.write(adopted);
        self.look()?;
        self.core = Core::new(
            self.store.config.clone(),
            recovery.recovered,
            self.index.clone(),
        );
        let namespace = self.store.namespace.clone();
        let id = self.with_core(|core| core.open_namespace(&namespace))?;
        self.slot = id.ok_or("no namespace")?.into();
        self.with_core(Core::start)
    }
}
