//! The volumes of a simulated machine, the open descriptions of their files, and the transfers in
//! flight: `files` begins them, the driver of the machine carries them out.

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr;
use std::time::Duration;

use larder_format::BLOCK_BYTES;

use crate::machine::{Event, Kernel};
use crate::medium::{Arrival, Content, Medium, shortest};
use crate::task::{self, Process};
use crate::time::Instant;

/// Longest time that a write of a killed process takes, in transfers.
const ORPHAN_TRANSFERS_MAX: u64 = 4000;

/// A lock on a whole file, which excludes those of other descriptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Alone.
    Exclusive,
    /// Beside other shared locks.
    Shared,
    /// Releases the lock.
    None,
}

/// All media, the open descriptions, and the transfers in flight.
#[derive(Default)]
pub(crate) struct Storage {
    volumes: Vec<Volume>,
    descriptions: BTreeMap<u64, Description>,
    transfers: BTreeMap<u64, Transfer>,
}

pub(crate) struct Volume {
    pub(crate) id: u64,
    medium: Medium,
    /// As its file states it.
    pub(crate) bytes: u64,
    /// By description.
    pub(crate) locks: BTreeMap<u64, Lock>,
    pub(crate) byte_locks: Vec<(u64, Range<i64>)>,
}

struct Description {
    process: Process,
    volume: usize,
    may_write: bool,
    is_closed: bool,
}

/// A piece of the memory of a process.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) start: *mut u8,
    pub(crate) bytes: usize,
}

pub(crate) enum Work {
    Read(Vec<Memory>),
    Write(Vec<Memory>),
    /// The bytes of a write of a killed process.
    OrphanWrite(Vec<Content>),
    /// Covers the writes before this one.
    Sync(u64),
}

struct Transfer {
    description: u64,
    process: Process,
    offset: u64,
    work: Work,
    due: Instant,
    outcome: Option<Result<usize, i32>>,
}

impl Volume {
    /// The number that a sync gets which covers all writes so far.
    pub(crate) fn writes(&self) -> u64 {
        self.medium.next()
    }
}

impl Storage {
    pub(crate) fn add(&mut self, medium: Medium, id: u64) -> usize {
        self.volumes.push(Volume {
            id,
            bytes: (medium.blocks() * BLOCK_BYTES) as u64,
            medium,
            locks: BTreeMap::new(),
            byte_locks: Vec::new(),
        });
        self.volumes.len() - 1
    }

    pub(crate) fn medium(&mut self, number: usize) -> &mut Medium {
        &mut self.volumes[number].medium
    }

    pub(crate) fn state_length(&mut self, number: usize, bytes: u64) {
        self.volumes[number].bytes = bytes;
    }

    /// Whether another process has a write in flight to some of the blocks of this one.
    fn collides(&self, process: Process, volume: usize, offset: u64, bytes: usize) -> bool {
        let collides = |other: &Transfer| {
            let bytes_of_other = match &other.work {
                Work::Write(memory) => memory.iter().map(|piece| piece.bytes).sum(),
                Work::OrphanWrite(blocks) => blocks.len() * BLOCK_BYTES,
                Work::Read(_) | Work::Sync(_) => return false,
            };
            other.process != process
                && other.outcome.is_none()
                && self.descriptions[&other.description].volume == volume
                && other.offset < offset + bytes as u64
                && offset < other.offset + bytes_of_other as u64
        };
        self.transfers.values().any(collides)
    }

    /// Byte offset and process of each write in flight.
    pub(crate) fn writes(&self) -> impl Iterator<Item = (u64, Process)> {
        let is_write = |transfer: &&Transfer| {
            let is_write = matches!(transfer.work, Work::Write(_) | Work::OrphanWrite(_));
            is_write && transfer.outcome.is_none()
        };
        let writes = self.transfers.values().filter(is_write);
        writes.map(|transfer| (transfer.offset, transfer.process))
    }

    fn orphan_transfers(&self) -> impl Iterator<Item = &Transfer> {
        let transfers = self.transfers.values();
        transfers.filter(|transfer| matches!(transfer.work, Work::OrphanWrite(_)))
    }

    pub(crate) fn orphans(&self) -> usize {
        self.orphan_transfers().count()
    }

    pub(crate) fn next_orphan(&self) -> Option<Instant> {
        self.orphan_transfers().map(|transfer| transfer.due).min()
    }

    fn has_transfers(&self, description: u64) -> bool {
        let mut transfers = self.transfers.values();
        transfers.any(|transfer| transfer.description == description && transfer.outcome.is_none())
    }

    /// Ends a description that is closed, once its last transfer is over.
    fn release(&mut self, number: u64) {
        let is_over = self
            .descriptions
            .get(&number)
            .is_some_and(|description| description.is_closed);
        if is_over && !self.has_transfers(number) {
            self.descriptions.remove(&number);
            for volume in &mut self.volumes {
                volume.locks.remove(&number);
                volume.byte_locks.retain(|(owner, _)| *owner != number);
            }
        }
    }

    /// The volume of an open description; `None` for a closed one.
    pub(crate) fn volume_of(&mut self, number: u64) -> Option<&mut Volume> {
        let description = self.descriptions.get(&number);
        let description = description.filter(|description| !description.is_closed)?;
        Some(&mut self.volumes[description.volume])
    }

    pub(crate) fn open(&mut self, number: u64, process: Process, volume: usize, may_write: bool) {
        let description = Description {
            process,
            volume,
            may_write,
            is_closed: false,
        };
        self.descriptions.insert(number, description);
    }

    pub(crate) fn close(&mut self, number: u64) {
        if let Some(description) = self.descriptions.get_mut(&number) {
            description.is_closed = true;
        }
        self.release(number);
    }

    /// The process that holds the exclusive lock of a volume.
    pub(crate) fn holder_of(&self, volume: usize) -> Option<Process> {
        let locks = &self.volumes[volume].locks;
        let (holder, _) = locks.iter().find(|(_, lock)| **lock == Lock::Exclusive)?;
        Some(self.descriptions.get(holder)?.process)
    }
}

impl Kernel {
    /// A process is about to be killed: copies the writes that happen in spite of that.
    pub(crate) fn end_transfers(&mut self, process: Process) {
        let numbers: Vec<u64> = self
            .storage
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.process == process && transfer.outcome.is_none())
            .map(|(number, _)| *number)
            .collect();
        for number in numbers {
            let happens = !self.dice.chance(0.2);
            let late = self
                .dice
                .pick(&[0, 20, ORPHAN_TRANSFERS_MAX / 10, ORPHAN_TRANSFERS_MAX]);
            let usual = u64::try_from(self.odds.transfer.as_nanos()).unwrap_or(0);
            let delay = Duration::from_nanos(self.dice.between(0, late * usual));
            let Some(transfer) = self.storage.transfers.get_mut(&number) else {
                continue;
            };
            match &transfer.work {
                Work::Write(memory) if happens => {
                    // SAFETY: the process has not been killed yet. The memory of its writes in
                    // flight is valid, as the caller of `write_pieces` promises.
                    let bytes = unsafe { gather(memory) };
                    transfer.work = Work::OrphanWrite(shortest(&bytes));
                    transfer.due = transfer.due.max(task::now() + delay);
                    self.count(Event::OrphanWrite);
                }
                Work::Write(_) => {
                    self.storage.transfers.remove(&number);
                    self.count(Event::UnstartedWrite);
                }
                Work::Read(_) | Work::OrphanWrite(_) | Work::Sync(_) => {
                    self.storage.transfers.remove(&number);
                }
            }
        }
        let storage = &mut self.storage;
        storage
            .transfers
            .retain(|_, transfer| transfer.process != process || transfer.outcome.is_none());
    }

    /// Closes the descriptors of a killed process.
    pub(crate) fn close_files_of(&mut self, process: Process) {
        let own = |(number, description): (&u64, &mut Description)| {
            (description.process == process).then(|| {
                description.is_closed = true;
                *number
            })
        };
        let closed: Vec<u64> = self
            .storage
            .descriptions
            .iter_mut()
            .filter_map(own)
            .collect();
        for number in closed {
            if self.storage.has_transfers(number) {
                self.count(Event::LockKeptByTransfer);
            }
            self.storage.release(number);
        }
    }

    /// Carries out the transfers that are due, in their order.
    pub(crate) fn settle(&mut self) {
        let now = task::now();
        let mut due: Vec<(Instant, u64)> = self
            .storage
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.due <= now && transfer.outcome.is_none())
            .map(|(number, transfer)| (transfer.due, *number))
            .collect();
        due.sort_unstable();
        for (_, number) in due {
            self.carry_out(number);
        }
    }

    /// Carries out one transfer.
    fn carry_out(&mut self, number: u64) {
        let Some(mut transfer) = self.storage.transfers.remove(&number) else {
            return;
        };
        let outcome = match &transfer.work {
            Work::Read(memory) => self.read(&transfer, memory),
            Work::Write(memory) => {
                if transfer.process.is_stopped() {
                    self.count(Event::WriteOfStopped);
                }
                // SAFETY: the caller of `write_pieces` waits for this transfer: its memory is valid
                // and is not written to.
                let bytes = unsafe { gather(memory) };
                self.write(&transfer, &shortest(&bytes))
            }
            Work::OrphanWrite(blocks) => self.write(&transfer, blocks),
            Work::Sync(end) => self.sync(&transfer, *end),
        };
        let description = transfer.description;
        if !matches!(transfer.work, Work::OrphanWrite(_)) {
            transfer.outcome = Some(outcome);
            self.storage.transfers.insert(number, transfer);
        }
        self.storage.release(description);
    }

    fn place(&self, transfer: &Transfer) -> (usize, usize) {
        let volume = self.storage.descriptions[&transfer.description].volume;
        let block = usize::try_from(transfer.offset).unwrap_or(usize::MAX) / BLOCK_BYTES;
        (volume, block)
    }

    /// An answer of the kernel that makes the caller try again.
    fn interruption(&mut self) -> Option<i32> {
        let errors = [libc::EINTR, libc::EAGAIN, libc::ECANCELED];
        let strikes = self.strikes(Event::Interrupted, self.odds.interrupted);
        strikes.then(|| self.dice.pick(&errors))
    }

    /// The number of bytes that a transfer moves: at least one block, not always whole blocks.
    fn moved(&mut self, bytes: usize, event: Event) -> usize {
        if bytes <= BLOCK_BYTES || !self.strikes(event, self.odds.short) {
            return bytes;
        }
        BLOCK_BYTES + self.dice.below(bytes - BLOCK_BYTES)
    }

    fn read(&mut self, transfer: &Transfer, memory: &[Memory]) -> Result<usize, i32> {
        if let Some(error) = self.interruption() {
            return Err(error);
        }
        let (volume, block) = self.place(transfer);
        let wanted: usize = memory.iter().map(|piece| piece.bytes).sum();
        let there = self.storage.volumes[volume].medium.blocks();
        let wanted = wanted.min(there.saturating_sub(block) * BLOCK_BYTES);
        let count = wanted / BLOCK_BYTES;
        let fails = self.storage.volumes[volume].medium.fails(block, count);
        if fails || self.strikes(Event::ReadError, self.odds.read_error) {
            return Err(libc::EIO);
        }
        let moved = self.moved(wanted, Event::ShortRead);
        let medium = &self.storage.volumes[volume].medium;
        let mut pieces = Pieces::new(memory);
        for (at, done) in (block..).zip((0..moved).step_by(BLOCK_BYTES)) {
            let mut bytes = [0; BLOCK_BYTES];
            medium.visible(at).render(&mut bytes);
            // SAFETY: the caller of `read_pieces` waits for this transfer: its memory is valid and
            // not otherwise used.
            unsafe { pieces.fill(&bytes[..BLOCK_BYTES.min(moved - done)]) };
        }
        Ok(moved)
    }

    fn write(&mut self, transfer: &Transfer, blocks: &[Content]) -> Result<usize, i32> {
        let is_orphan = matches!(transfer.work, Work::OrphanWrite(_));
        if !is_orphan && let Some(error) = self.interruption() {
            return Err(error);
        }
        let (volume, block) = self.place(transfer);
        let there = self.storage.volumes[volume].medium.blocks();
        if block + blocks.len() > there {
            return Err(libc::ENOSPC);
        }
        if is_orphan {
            let arrival = Arrival::draw(&mut self.dice, blocks.len());
            self.note(|| format!("a write of {} blocks at {block} lands late", blocks.len()));
            let medium = &mut self.storage.volumes[volume].medium;
            medium.write_part(block, blocks, &arrival);
            return Ok(0);
        }
        if self.strikes(Event::WriteError, self.odds.write_error) {
            let arrival = Arrival::draw(&mut self.dice, blocks.len());
            let medium = &mut self.storage.volumes[volume].medium;
            medium.write_part(block, blocks, &arrival);
            return Err(libc::EIO);
        }
        let moved = self.moved(blocks.len() * BLOCK_BYTES, Event::ShortWrite);
        let medium = &mut self.storage.volumes[volume].medium;
        medium.write(block, &blocks[..moved / BLOCK_BYTES], || true);
        Ok(moved)
    }

    fn sync(&mut self, transfer: &Transfer, end: u64) -> Result<usize, i32> {
        let (number, _) = self.place(transfer);
        // An interrupted sync has failed. A cancelled one never ran.
        if self.strikes(Event::Interrupted, self.odds.interrupted) {
            return Err(libc::ECANCELED);
        }
        let fails = self.strikes(Event::SyncError, self.odds.sync_error);
        let volume = &mut self.storage.volumes[number];
        if fails {
            let keep = self.dice.pick(&[0.0, 0.5, 1.0]);
            let stays = self.dice.pick(&[0.0, 0.5, 1.0]);
            volume
                .medium
                .sync_failed(0..end, &mut self.dice, keep, stays);
            return Err(libc::EIO);
        }
        volume.medium.synced(end);
        Ok(0)
    }

    pub(crate) fn lose_power(&mut self) {
        let open = self.storage.descriptions.values();
        assert!(
            open.clone().all(|description| description.is_closed),
            "a power loss while a process has files open"
        );
        let numbers: Vec<u64> = self.storage.transfers.keys().copied().collect();
        for number in numbers {
            // The content that a write in flight leaves is drawn when it is carried out.
            if self.dice.chance(0.5) {
                self.carry_out(number);
            } else {
                self.storage.transfers.remove(&number);
            }
        }
        self.storage.transfers.clear();
        self.storage.descriptions.clear();
        for number in 0..self.storage.volumes.len() {
            let volume = &mut self.storage.volumes[number];
            volume.locks.clear();
            volume.byte_locks.clear();
            if volume.medium.lose_power(&mut self.dice) {
                self.count(Event::TornByPowerLoss);
            }
        }
    }

    /// Begins a transfer. Returns its number and the time that it takes.
    pub(crate) fn submit(
        &mut self,
        opened: u64,
        offset: u64,
        work: Work,
    ) -> Result<(u64, Duration), i32> {
        let description = self.storage.descriptions.get(&opened);
        let Some(description) = description.filter(|of| !of.is_closed) else {
            return Err(libc::EBADF);
        };
        let may = description.may_write || !matches!(work, Work::Write(_));
        if !may || !offset.is_multiple_of(BLOCK_BYTES as u64) {
            return Err(if may { libc::EINVAL } else { libc::EBADF });
        }
        let (process, volume) = (description.process, description.volume);
        if let Work::Write(memory) = &work {
            let bytes = memory.iter().map(|piece| piece.bytes).sum();
            if self.storage.collides(process, volume, offset, bytes) {
                self.count(Event::WritesCollide);
                self.note(|| format!("a write at {offset} collides with one of another process"));
            }
        }
        let time = self.draw_time();
        let number = self.number();
        self.storage.transfers.insert(
            number,
            Transfer {
                description: opened,
                process,
                offset,
                work,
                due: task::now() + time,
                outcome: None,
            },
        );
        Ok((number, time))
    }

    /// The outcome of a transfer whose time is over.
    pub(crate) fn end_transfer(&mut self, number: u64) -> Result<usize, i32> {
        // The driver has carried it out, unless it calls `Machine::settle` too seldom.
        let due = self.storage.transfers.get(&number);
        if due.is_some_and(|transfer| transfer.outcome.is_none()) {
            self.carry_out(number);
        }
        let over = self.storage.transfers.remove(&number);
        let outcome = over.and_then(|transfer| transfer.outcome);
        outcome.unwrap_or(Err(libc::EIO))
    }
}

/// # Safety
/// The memory is valid and not written to during the call.
unsafe fn gather(memory: &[Memory]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(memory.iter().map(|piece| piece.bytes).sum());
    for piece in memory {
        // SAFETY: as the caller promises.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(piece.start, piece.bytes) });
    }
    bytes
}

/// Memory that is filled from its start on.
struct Pieces<'a> {
    rest: &'a [Memory],
    /// The number of bytes of the first piece that are filled.
    filled: usize,
}

impl<'a> Pieces<'a> {
    fn new(memory: &'a [Memory]) -> Pieces<'a> {
        Pieces {
            rest: memory,
            filled: 0,
        }
    }

    /// # Safety
    /// The memory is valid, and is not used during the call.
    unsafe fn fill(&mut self, mut bytes: &[u8]) {
        while let [piece, rest @ ..] = self.rest {
            let count = (piece.bytes - self.filled).min(bytes.len());
            let (part, later) = bytes.split_at(count);
            let to = piece.start.wrapping_add(self.filled);
            // SAFETY: as the caller promises; `part` is memory of the machine, and `filled` and
            // `count` end within the piece.
            unsafe { ptr::copy_nonoverlapping(part.as_ptr(), to, count) };
            bytes = later;
            self.filled += count;
            if self.filled < piece.bytes {
                return;
            }
            (self.rest, self.filled) = (rest, 0);
        }
    }
}
