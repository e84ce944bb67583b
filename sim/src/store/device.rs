//! The disk of the simulated process: operations in flight, each with its own latency, over the
//! medium of [`SimDisk`](crate::disk::SimDisk) with its faults.
//!
//! The thread of a volume (`lines`) ends operations in the order in which they are due, and passes
//! answers for one receiver on in one message if they are due together.
//!
//! A sync that fails may lose more than the writes that it covers: also later ones, and writes that
//! the device has in its cache and has not answered yet. Such a write succeeds, and its bytes are
//! lost all the same.

use std::sync::Arc;
use std::time::Duration;

use larder_core::index::SegmentId;
use larder_disk::{Action, Buffer, DiskError, Done, Op, Piece, Purpose, Sink};
use larder_engine::format::{CLOSING_OFFSET, SegmentState};
use larder_sim_runtime::medium::{Block, Content};
use larder_sim_runtime::time::Instant;

use super::flight::{Flight, What};
use super::limits::is_copy;
use super::state::{Shared, State};
use crate::classes::Class;
use crate::lines::{Answers, Device, Lines, answer, each_block};
use crate::oracle::VersionId;
use crate::sealed::is_keyring;
use crate::setup::{BLOCK, Faults, blocks_of};
use crate::superblocks::decode;
use crate::world::World;

/// Latency of an operation without a fault, in microseconds.
const LATENCY_US: (u64, u64) = (5, 200);

/// Longest delay of a delayed operation, in microseconds.
const DELAY_US_MAX: u64 = 20_000;

/// Fills an operation's memory with these blocks.
fn fill(buffer: &mut Buffer, blocks: &[Content]) {
    // SAFETY: the operation is in flight. All tasks run on this thread.
    let parts = unsafe { buffer.parts_mut() };
    let out = parts.flat_map(|part| part.chunks_exact_mut(BLOCK));
    out.zip(blocks).for_each(|(out, block)| block.render(out));
}

/// Memory that a get has lent may be written until the get returns. An open store lends no other.
fn check_lent(buffer: &Buffer, lent: &[(usize, usize)]) {
    let Buffer::Borrowed(pieces) = buffer else {
        return;
    };
    let is_lent = |piece: &Piece| {
        let (first, end) = (piece.ptr.addr(), piece.ptr.addr() + piece.len);
        let mut lent = lent.iter();
        lent.any(|(start, length)| *start <= first && end <= start + length)
    };
    assert!(
        pieces.iter().all(is_lent),
        "a read ends in memory whose get has returned"
    );
}

fn contents_of(world: &World, buffer: &Buffer) -> Vec<Content> {
    let mut contents = Vec::with_capacity(buffer.len() / BLOCK);
    each_block(buffer, |block| {
        contents.push(world.oracle.content_of(block));
    });
    contents
}

/// Whether a block of memory has this content.
fn holds(block: &Block, content: &Content) -> bool {
    let word = match content {
        Content::Zero => 0,
        Content::Data(word) => *word,
        Content::Coded(_, bytes) | Content::Bytes(bytes) => return **bytes == *block,
    };
    block[..8] == word.to_le_bytes() && block[8..] == block[..BLOCK - 8]
}

impl State {
    /// Starts an operation. Returns whether it is due before the others of its volume.
    fn launch(&mut self, disk: u64, op: Op) -> bool {
        self.world.look_at_sealed();
        let is_owner = disk == self.owner_disk;
        let mut blocks = Vec::new();
        let mut pins = None;
        let (what, start) = match &op.action {
            Action::Sync => (What::Sync(self.world.begin_sync(op.volume)), 0),
            Action::Read { offset, .. } => {
                let start = block_at(*offset);
                if is_owner && self.must_stay(&op) {
                    pins = self.begin_read(op.volume, start);
                }
                (What::Read, start)
            }
            Action::Write { offset, buffer } => {
                assert!(is_owner, "a reader writes");
                self.opening_writes += 1;
                let start = block_at(*offset);
                blocks = contents_of(&self.world, buffer);
                (self.begin_write(op.volume, start, &blocks), start)
            }
        };
        let world = &mut self.world;
        let mut micros = |low, high| Duration::from_micros(world.dice.between(low, high));
        let begins = Instant::now() + micros(0, LATENCY_US.0);
        let mut due = begins + micros(LATENCY_US.0, LATENCY_US.1);
        if world.strikes(Class::Delayed, world.setup.faults.delay) {
            due += Duration::from_micros(world.dice.between(1, DELAY_US_MAX));
        }
        self.launched += 1;
        let is_before =
            |other: &Flight| other.disk == disk && other.op.volume == op.volume && other.due <= due;
        let is_first = !self.flights.iter().any(is_before);
        self.flights.push(Flight {
            op,
            disk,
            what,
            start,
            blocks,
            number: self.launched,
            begins,
            due,
            is_lost: false,
            pins,
        });
        is_first
    }

    /// Whether the segment of a read must not be released under it. Descriptors that are read for
    /// lists of pages and for the times of puts may go: their reader looks whether the segment has
    /// begun a new generation.
    fn must_stay(&self, op: &Op) -> bool {
        op.purpose == Purpose::Call || self.listing == 0 && !self.lives.on
    }

    fn begin_read(&mut self, volume: usize, start: usize) -> Option<SegmentId> {
        let epoch = self.epoch.as_mut()?;
        if !self.world.is_in_segment(volume, start) {
            return None;
        }
        let segment = self.world.locate_block(volume, start).0;
        *epoch.pins.entry(segment).or_default() += 1;
        Some(segment)
    }

    fn end_read(&mut self, flight: &Flight) {
        if let Some(segment) = flight.pins
            && let Some(epoch) = &mut self.epoch
            && let Some(pins) = epoch.pins.get_mut(&segment)
        {
            *pins = pins.saturating_sub(1);
        }
    }

    /// Checks a write before it starts.
    fn begin_write(&mut self, volume: usize, start: usize, blocks: &[Content]) -> What {
        if self.world.superblock_at(volume, start).is_some() {
            return What::Superblock;
        }
        if start == block_at(CLOSING_OFFSET) {
            return What::ClosingStatement;
        }
        let length = self.world.setup.volume_blocks()[volume];
        if is_copy(volume, length, start) {
            return What::Quotas;
        }
        if is_keyring(length, start) {
            return What::Keyring;
        }
        let world = &mut self.world;
        world.clock += 1;
        let mut is_pages = false;
        for block in blocks {
            if let Some(version) = world.oracle.owner(block) {
                is_pages = true;
                let is_clear = matches!(block, Content::Data(_));
                assert!(
                    !is_clear || !world.setup.sealed,
                    "{version:?} is written in clear"
                );
                // The core granted the page before this moment.
                if self.putting.contains(&version) {
                    world.oracle.version_mut(version).reserved_at = world.clock;
                }
            }
        }
        if is_pages {
            return What::Pages;
        }
        let Some(epoch) = self.epoch.as_mut() else {
            return What::Descriptors;
        };
        // A close writes the headers of open segments once more.
        if self.closing && world.is_header_again(epoch, volume, start, &blocks[0]) {
            return What::Header(SegmentState::Sealed);
        }
        match world.inspect(epoch, volume, start, blocks) {
            Some(state) => What::Header(state),
            None if blocks.iter().all(|block| *block == Content::Zero) => What::Probe,
            None => What::Descriptors,
        }
    }

    /// Ends an operation. Returns its receiver and its answer.
    fn land(&mut self, mut flight: Flight) -> (Arc<dyn Sink>, Done) {
        let (volume, start) = (flight.op.volume, flight.start);
        let is_late = flight
            .op
            .deadline
            .is_some_and(|until| until <= flight.begins);
        let overtakes = |other: &Flight| other.number < flight.number && other.volume() == volume;
        if self.flights.iter().any(overtakes) {
            self.world.count(Class::Reordered);
        }
        let result = match flight.what {
            _ if is_late => Err(DiskError::Deadline),
            What::Read => self.land_read(&mut flight),
            What::Sync(covers) => self.land_sync(volume, covers),
            what => self.land_write(&mut flight, what),
        };
        self.end_read(&flight);
        let what = flight.what;
        self.world.note(start as u64, || {
            format!("{what:?} at {volume}:{start} ends: {result:?}")
        });
        if let (Err(error), Some(epoch)) = (&result, &mut self.epoch)
            && what != What::Read
        {
            epoch.failures += u64::from(*error != DiskError::Deadline);
        }
        answer(flight.op, result)
    }

    fn land_read(&mut self, flight: &mut Flight) -> Result<(), DiskError> {
        let (volume, start) = (flight.op.volume, flight.start);
        let Action::Read { buffer, .. } = &mut flight.op.action else {
            return Ok(());
        };
        let count = buffer.len() / BLOCK;
        // Reads of calls drop a page at the first error of the medium.
        let may_wait = flight.op.purpose == Purpose::Background && self.listing == 0;
        if may_wait && let Some(errno) = self.world.outage_of(volume, start, count) {
            return Err(DiskError::Os(errno));
        }
        let is_page = {
            let volumes = self.world.disk.volumes();
            let content = volumes[volume].visible(start);
            matches!(content, Content::Data(_) | Content::Coded(..))
        };
        let (misdirected, from) = match is_page && self.epoch.is_some() {
            true => self.world.read_from(volume, start, count),
            false => (false, start),
        };
        self.misdirected += u64::from(misdirected);
        let is_opened = self.opened.contains(&flight.disk);
        let lent = is_opened.then_some(&self.lent);
        self.world.disk.read(volume, from, count, |blocks| {
            if let Some(lent) = lent {
                check_lent(buffer, lent);
            }
            fill(buffer, blocks);
        })
    }

    fn land_write(&mut self, flight: &mut Flight, what: What) -> Result<(), DiskError> {
        let (volume, start) = (flight.op.volume, flight.start);
        let mut recalled = None;
        if let Action::Write { buffer, .. } = &flight.op.action {
            let mut blocks = flight.blocks.iter();
            let mut is_same = true;
            each_block(buffer, |block| {
                is_same &= blocks.next().is_some_and(|content| holds(block, content));
            });
            if !is_same {
                assert!(
                    self.is_recalled(&flight.blocks),
                    "the memory of a write at {volume}:{start} changes before the write ends"
                );
                recalled = Some(contents_of(&self.world, buffer));
            }
        }
        // The device may have read the memory before it changed.
        let blocks = match recalled {
            Some(blocks) if self.world.dice.chance(0.5) => blocks,
            _ => std::mem::take(&mut flight.blocks),
        };
        let error = |faults: &Faults| match what {
            What::Superblock => (faults.superblock_error, Class::SuperblockError),
            What::Header(_) => (faults.header_error, Class::HeaderError),
            What::Pages => (faults.data_error, Class::DataError),
            _ => (faults.meta_error, Class::DescriptorError),
        };
        let copy = self.world.superblock_at(volume, start);
        if let Some(copy) = copy {
            // A fault that spoils the copy resets this.
            self.world.copies[volume][copy] = decode(&blocks[0])
                .ok()
                .map(|superblock| superblock.generation);
        }
        let before = self.world.disk.volumes()[volume].next();
        let result = self.world.write(volume, start, &blocks, error);
        if flight.is_lost {
            self.world.lose_written(volume, before);
        }
        if let (Some(copy), true) = (copy, result.is_err()) {
            self.world.copies[volume][copy] = None;
        }
        if let Some(epoch) = &mut self.epoch {
            epoch.has_written |= what != What::Superblock;
        }
        result
    }

    fn land_sync(&mut self, volume: usize, covers: Option<u64>) -> Result<(), DiskError> {
        if self.world.sync(volume, covers) {
            return Ok(());
        }
        self.forget_unsynced_superblocks();
        self.world.draw_power_soon();
        let share = self.world.dice.pick(&[0.0, 0.5, 1.0]);
        let now = Instant::now();
        for flight in &mut self.flights {
            let is_begun = flight.volume() == volume && flight.begins <= now;
            let is_lost = is_begun && flight.is_write() && flight.what != What::Superblock;
            if is_lost && self.world.dice.chance(share) {
                flight.is_lost = true;
                self.world.tally.count(Class::SyncLostInFlight);
            }
        }
        Err(DiskError::Os(5))
    }

    /// Whether these blocks belong to a put that was recalled: the device may see other bytes.
    fn is_recalled(&mut self, blocks: &[Content]) -> bool {
        let oracle = &mut self.world.oracle;
        let owners = blocks.iter().filter_map(|block| oracle.owner(block));
        let owners: Vec<VersionId> = owners.collect();
        let is_recalled = owners.iter().any(|version| self.recalled.contains(version));
        for version in owners.into_iter().filter(|_| is_recalled) {
            // As a write that the device refuses: any bytes may be there, and the put knows it.
            oracle.version_mut(version).refused = true;
        }
        is_recalled
    }

    /// Copies of superblocks that are not durable may be lost.
    pub fn forget_unsynced_superblocks(&mut self) {
        let volumes = self.world.disk.volumes();
        for (copies, volume) in self.world.copies.iter_mut().zip(volumes.iter()) {
            for (copy, at) in copies.iter_mut().zip(blocks_of(volume.blocks())) {
                let found = decode(volume.durable(at)).ok();
                let found = found.map(|superblock| superblock.generation);
                if volume.visible(at) != volume.durable(at) || found != *copy {
                    *copy = None;
                }
            }
        }
    }

    /// Ends the operations of a volume that are due. Returns the answers by receiver, and the
    /// moment when the next operation is due.
    fn land_due(&mut self, disk: u64, volume: usize) -> (Vec<Answers>, Option<Instant>) {
        let now = Instant::now();
        let mut answers: Vec<Answers> = Vec::new();
        let next = loop {
            let own = self.flights.iter().enumerate();
            let own = own.filter(|(_, flight)| flight.disk == disk && flight.volume() == volume);
            let first = own.min_by_key(|(_, flight)| (flight.due, flight.number));
            let Some((at, first)) = first else {
                break None;
            };
            if first.due > now {
                break Some(first.due);
            }
            let flight = self.flights.swap_remove(at);
            let (sink, done) = self.land(flight);
            match answers
                .iter_mut()
                .find(|(known, _)| Arc::ptr_eq(known, &sink))
            {
                Some((_, batch)) => {
                    batch.push(done);
                }
                None => answers.push((sink, vec![done])),
            }
        };
        (answers, next)
    }
}

fn block_at(offset: u64) -> usize {
    assert!(
        offset.is_multiple_of(BLOCK as u64),
        "direct I/O begins at a block"
    );
    usize::try_from(offset).expect("a small volume") / BLOCK
}

/// The device of one disk.
pub struct Own {
    shared: Shared,
    /// The number of the disk.
    number: u64,
}

/// The disk of the calling process, and its number.
pub fn disk(shared: &Shared, volumes: usize) -> (Arc<Lines<Own>>, u64) {
    let number = {
        let mut state = shared.lock();
        state.disks += 1;
        state.disks
    };
    let shared = shared.clone();
    (Lines::new(Own { shared, number }, volumes), number)
}

impl Device for Own {
    fn launch(&self, op: Op) -> bool {
        self.shared.lock().launch(self.number, op)
    }

    fn land(&self, volume: usize) -> (Vec<Answers>, Option<Instant>) {
        self.shared.lock().land_due(self.number, volume)
    }

    fn expire(&self) -> Vec<Op> {
        let mut state = self.shared.lock();
        let now = Instant::now();
        let state = &mut *state;
        let is_over = |flight: &mut Flight| {
            flight.disk == self.number
                && flight.begins > now
                && flight.op.deadline.is_some_and(|until| until <= now)
        };
        let expired: Vec<Flight> = state.flights.extract_if(.., is_over).collect();
        for flight in &expired {
            state.end_read(flight);
        }
        expired.into_iter().map(|flight| flight.op).collect()
    }
}
