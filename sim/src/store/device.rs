//! The disk of the simulated process: operations in flight, each with its own latency, over the
//! medium of [`SimDisk`](crate::disk::SimDisk) with its faults.
//!
//! One thread of the process serves each volume. It ends operations in the order in which they are
//! due, and passes answers for one receiver on in one message if they are due together.

use std::sync::Arc;
use std::time::Duration;

use larder_engine::disk::{Action, Buffer, Choice, Disk, DiskError, Done, Kind, Op, Piece, Sink};
use larder_engine::format::{HEADER_BLOCKS, SegmentState};
use larder_sim_runtime::sync::Mutex;
use larder_sim_runtime::thread::{Builder, JoinHandle};
use larder_sim_runtime::time::Instant;
use larder_sim_runtime::{Queue, task};

use super::{Shared, State};
use crate::classes::Class;
use crate::setup::{BLOCK, Faults};
use crate::superblocks::{block_of, decode};
use crate::world::World;
use larder_sim_runtime::medium::{Block, Content};

/// Latency of an operation without a fault, in microseconds.
const LATENCY_US: (u64, u64) = (5, 200);

/// Longest delay of a delayed operation, in microseconds.
const DELAY_US_MAX: u64 = 20_000;

/// The kind of an operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Superblock,
    /// Zeros that find out whether a volume takes writes.
    Probe,
    Header(SegmentState),
    Descriptors,
    Pages,
    Read,
    /// The number of unsynced writes that it covers. `None` when these are lost already.
    Sync(Option<usize>),
}

/// An operation in flight.
pub struct Flight {
    op: Op,
    pub what: What,
    pub start: usize,
    /// The content of a write.
    pub blocks: Vec<Content>,
    number: u64,
    /// The device begins it now. Before, its deadline may pass.
    begins: Instant,
    due: Instant,
}

impl Flight {
    pub fn volume(&self) -> usize {
        self.op.volume
    }

    pub fn is_write(&self) -> bool {
        !matches!(self.what, What::Read | What::Sync(_))
    }
}

/// The bytes of an operation's memory.
fn bytes_of(buffer: &Buffer) -> Vec<u8> {
    match buffer {
        Buffer::Owned(memory) => memory.to_vec(),
        Buffer::Borrowed(pieces) => {
            let mut bytes = Vec::with_capacity(buffer.len());
            for piece in pieces {
                // SAFETY: the submitter keeps the memory valid until the answer. All tasks run on
                // this thread, so nothing writes to it now.
                let piece = unsafe { std::slice::from_raw_parts(piece.ptr, piece.len) };
                bytes.extend_from_slice(piece);
            }
            bytes
        }
    }
}

fn fill(buffer: &mut Buffer, bytes: &[u8]) {
    match buffer {
        Buffer::Owned(memory) => memory.copy_from_slice(bytes),
        Buffer::Borrowed(pieces) => {
            let mut rest = bytes;
            for piece in pieces {
                let (some, more) = rest.split_at(piece.len);
                // SAFETY: as above; the memory of a read is the device's until the answer.
                let piece = unsafe { std::slice::from_raw_parts_mut(piece.ptr, piece.len) };
                piece.copy_from_slice(some);
                rest = more;
            }
        }
    }
}

/// The content of one block.
fn content_of(world: &World, block: &[u8]) -> Content {
    let block: &Block = block.try_into().expect("a block");
    let word = u64::from_le_bytes(block[..8].try_into().expect("a word"));
    if block[8..] == block[..BLOCK - 8] {
        let data = Content::Data(word);
        match word {
            0 => return Content::Zero,
            _ if world.oracle.owner(&data).is_some() => return data,
            _ => {}
        }
    }
    Content::Bytes(Arc::new(*block))
}

fn contents_of(world: &World, bytes: &[u8]) -> Vec<Content> {
    let blocks = bytes.chunks_exact(BLOCK);
    blocks.map(|block| content_of(world, block)).collect()
}

impl State {
    /// Starts an operation.
    fn launch(&mut self, op: Op) {
        let mut blocks = Vec::new();
        let (what, start) = match &op.action {
            Action::Sync => (What::Sync(self.world.begin_sync(op.volume)), 0),
            Action::Read { offset, .. } => {
                let start = block_at(*offset);
                self.begin_read(op.volume, start);
                (What::Read, start)
            }
            Action::Write { offset, buffer } => {
                let start = block_at(*offset);
                blocks = contents_of(&self.world, &bytes_of(buffer));
                (self.begin_write(op.volume, start, &blocks), start)
            }
        };
        let world = &mut self.world;
        let mut micros = |low, high| Duration::from_micros(world.dice.between(low, high));
        let begins = task::now() + micros(0, LATENCY_US.0);
        let mut due = begins + micros(LATENCY_US.0, LATENCY_US.1);
        if world.strikes(Class::Delayed, world.setup.faults.delay) {
            due += Duration::from_micros(world.dice.between(1, DELAY_US_MAX));
        }
        self.launched += 1;
        self.flights.push(Flight {
            op,
            what,
            start,
            blocks,
            number: self.launched,
            begins,
            due,
        });
    }

    fn begin_read(&mut self, volume: usize, start: usize) {
        if let Some(segment) = self.segment_of(volume, start)
            && let Some(epoch) = &mut self.epoch
        {
            *epoch.pins.entry(segment).or_default() += 1;
        }
    }

    fn end_read(&mut self, volume: usize, start: usize) {
        if let Some(segment) = self.segment_of(volume, start)
            && let Some(epoch) = &mut self.epoch
            && let Some(pins) = epoch.pins.get_mut(&segment)
        {
            *pins = pins.saturating_sub(1);
        }
    }

    fn segment_of(&self, volume: usize, block: usize) -> Option<larder_engine::index::SegmentId> {
        let is_in = block >= self.world.segment_first_block(0);
        is_in.then(|| self.world.locate_block(volume, block).0)
    }

    /// Checks a write before it starts.
    fn begin_write(&mut self, volume: usize, start: usize, blocks: &[Content]) -> What {
        if (0..2).any(|copy| block_of(copy) == start) {
            return What::Superblock;
        }
        let world = &mut self.world;
        world.clock += 1;
        let mut is_pages = false;
        for block in blocks {
            if let Some(version) = world.oracle.owner(block) {
                is_pages = true;
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
        if self.closing && start >= world.segment_first_block(0) {
            let (_, _, within) = world.locate_block(volume, start);
            if within < HEADER_BLOCKS {
                return What::Header(SegmentState::Sealed);
            }
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
            what => self.land_write(&flight, what),
        };
        if flight.what == What::Read {
            self.end_read(volume, start);
        }
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
        let is_page = {
            let volumes = self.world.disk.volumes();
            matches!(volumes[volume].visible(start), Content::Data(_))
        };
        let (misdirected, from) = match is_page && self.epoch.is_some() {
            true => self.world.read_from(volume, start, count),
            false => (false, start),
        };
        self.misdirected += u64::from(misdirected);
        let blocks = self.world.disk.read(volume, from, count)?;
        let mut bytes = vec![0; count * BLOCK];
        for (block, out) in blocks.iter().zip(bytes.chunks_exact_mut(BLOCK)) {
            if *block != Content::Zero {
                block.render(out);
            }
        }
        if let Buffer::Borrowed(pieces) = &*buffer {
            let is_lent = |piece: &Piece| {
                let (first, end) = (piece.ptr.addr(), piece.ptr.addr() + piece.len);
                let mut lent = self.lent.iter();
                lent.any(|(start, length)| *start <= first && end <= start + length)
            };
            assert!(
                pieces.iter().all(is_lent),
                "a read ends in memory whose get has returned"
            );
        }
        fill(buffer, &bytes);
        Ok(())
    }

    fn land_write(&mut self, flight: &Flight, what: What) -> Result<(), DiskError> {
        let (volume, start) = (flight.op.volume, flight.start);
        if let Action::Write { buffer, .. } = &flight.op.action {
            let now = contents_of(&self.world, &bytes_of(buffer));
            assert!(
                now == flight.blocks,
                "the memory of a write at {volume}:{start} changes before the write ends"
            );
        }
        let error = |faults: &Faults| match what {
            What::Superblock => (faults.superblock_error, Class::SuperblockError),
            What::Header(_) => (faults.header_error, Class::HeaderError),
            What::Pages => (faults.data_error, Class::DataError),
            _ => (faults.meta_error, Class::DescriptorError),
        };
        let copy = (0..2).find(|copy| block_of(*copy) == start);
        if let Some(copy) = copy {
            // A fault that spoils the copy resets this.
            self.world.copies[volume][copy] = decode(&flight.blocks[0])
                .ok()
                .map(|superblock| superblock.generation);
        }
        let result = self.world.write(volume, start, &flight.blocks, error);
        if let (Some(copy), true) = (copy, result.is_err()) {
            self.world.copies[volume][copy] = None;
        }
        if let Some(epoch) = &mut self.epoch {
            epoch.has_written = true;
        }
        result
    }

    fn land_sync(&mut self, volume: usize, covers: Option<usize>) -> Result<(), DiskError> {
        if self.world.sync(volume, covers) {
            return Ok(());
        }
        self.forget_unsynced_superblocks();
        Err(DiskError::Os(5))
    }

    /// Copies of superblocks that are not durable may be lost.
    pub fn forget_unsynced_superblocks(&mut self) {
        let volumes = self.world.disk.volumes();
        for (copies, volume) in self.world.copies.iter_mut().zip(volumes.iter()) {
            for (copy, at) in copies.iter_mut().zip((0..).map(block_of)) {
                let found = decode(volume.durable(at)).ok();
                let found = found.map(|superblock| superblock.generation);
                if volume.visible(at) != volume.durable(at) || found != *copy {
                    *copy = None;
                }
            }
        }
    }

    /// Ends the operations of a volume that are due.
    fn land_due(&mut self, volume: usize) -> Vec<(Arc<dyn Sink>, Vec<Done>)> {
        let now = task::now();
        let mut answers: Vec<(Arc<dyn Sink>, Vec<Done>)> = Vec::new();
        loop {
            let due = self.flights.iter().enumerate();
            let due = due.filter(|(_, flight)| flight.volume() == volume && flight.due <= now);
            let Some((at, _)) = due.min_by_key(|(_, flight)| (flight.due, flight.number)) else {
                break;
            };
            let flight = self.flights.swap_remove(at);
            let (sink, done) = self.land(flight);
            match answers
                .iter_mut()
                .find(|(known, _)| Arc::ptr_eq(known, &sink))
            {
                Some((_, batch)) => {
                    batch.push(done);
                    self.batched += 1;
                }
                None => answers.push((sink, vec![done])),
            }
        }
        answers
    }
}

fn block_at(offset: u64) -> usize {
    assert!(
        offset.is_multiple_of(BLOCK as u64),
        "direct I/O begins at a block"
    );
    usize::try_from(offset).expect("a small volume") / BLOCK
}

fn answer(op: Op, result: Result<(), DiskError>) -> (Arc<dyn Sink>, Done) {
    let buffer = match op.action {
        Action::Read { buffer, .. } | Action::Write { buffer, .. } => Some(buffer),
        Action::Sync => None,
    };
    let buffer = match buffer {
        Some(Buffer::Owned(memory)) => Some(memory),
        _ => None,
    };
    let done = Done {
        tag: op.tag,
        result,
        buffer,
    };
    (op.sink, done)
}

struct Lines {
    shared: Shared,
    /// By volume: wakes its thread.
    called: Vec<Queue>,
}

pub struct Device {
    lines: Arc<Lines>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    choice: Choice,
}

impl Device {
    /// The disk of the calling process.
    pub fn new(shared: &Shared, volumes: usize) -> Arc<Device> {
        shared.lock().is_shut = false;
        let lines = Arc::new(Lines {
            shared: shared.clone(),
            called: (0..volumes).map(|_| Queue::new()).collect(),
        });
        let thread = |volume: usize| {
            let lines = lines.clone();
            let thread = Builder::new().name(format!("device {volume}"));
            thread.spawn(move || lines.serve(volume)).expect("a thread")
        };
        Arc::new(Device {
            threads: Mutex::new((0..volumes).map(thread).collect()),
            lines,
            choice: Choice {
                kind: Kind::Threads,
                reason: "simulated".to_owned(),
            },
        })
    }
}

impl Lines {
    fn serve(&self, volume: usize) {
        loop {
            let (answers, next, is_shut) = {
                let mut state = self.shared.lock();
                let answers = state.land_due(volume);
                let own = state
                    .flights
                    .iter()
                    .filter(|flight| flight.volume() == volume);
                (answers, own.map(|flight| flight.due).min(), state.is_shut)
            };
            if !answers.is_empty() {
                for (sink, batch) in answers {
                    sink.done(batch);
                }
                // Operations may have come meanwhile.
                continue;
            }
            if next.is_none() && is_shut {
                return;
            }
            self.called[volume].wait("an operation", next);
        }
    }
}

impl Disk for Device {
    unsafe fn submit(&self, ops: Vec<Op>) {
        task::pass();
        let mut refused = Vec::new();
        {
            let mut state = self.lines.shared.lock();
            for op in ops {
                if state.is_shut {
                    refused.push(answer(op, Err(DiskError::Shutdown)));
                } else {
                    state.launch(op);
                }
            }
        }
        for called in &self.lines.called {
            called.wake_all();
        }
        for (sink, done) in refused {
            sink.done(vec![done]);
        }
    }

    fn expire(&self) {
        let expired: Vec<Op> = {
            let mut state = self.lines.shared.lock();
            let now = task::now();
            let state = &mut *state;
            let is_over = |flight: &mut Flight| {
                flight.begins > now && flight.op.deadline.is_some_and(|until| until <= now)
            };
            let expired: Vec<Flight> = state.flights.extract_if(.., is_over).collect();
            for flight in &expired {
                state.end_read(flight.op.volume, flight.start);
            }
            expired.into_iter().map(|flight| flight.op).collect()
        };
        for op in expired {
            let (sink, done) = answer(op, Err(DiskError::Deadline));
            sink.done(vec![done]);
        }
    }

    unsafe fn register(&self, _: &[Piece]) -> String {
        "simulated".to_owned()
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn shutdown(&self) {
        self.lines.shared.lock().is_shut = true;
        for called in &self.lines.called {
            called.wake_all();
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            let _ = thread.join();
        }
    }
}
