//! The transfers between the memory of processes and the media: `files` begins them, the driver of
//! the machine carries them out.

use std::ptr;
use std::time::Duration;

use larder_format::BLOCK_BYTES;

use crate::kernel::{Event, Kernel};
use crate::medium::{Arrival, Content, shortest};
use crate::task::Process;
use crate::time::Instant;
use crate::volumes::{Description, Memory, Transfer, Work};

/// Longest time that a write of a killed process takes, in transfers.
const ORPHAN_TRANSFERS_MAX: u64 = 4000;

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
                    transfer.due = transfer.due.max(Instant::now() + delay);
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
        let now = Instant::now();
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
        self.lose_sides();
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
                due: Instant::now() + time,
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
