//! Waits for answers: a [`Sink`] that a thread can sleep on, batches of reads or writes that return
//! when all are done, and long sequences of reads into reused memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use larder_base::failure::DiskError;
use larder_base::memory::AlignedBuf;
use larder_base::runtime::{Condvar, Instant, Mutex};

pub use super::operations::ReadAt;
use super::{Action, Buffer, Disk, Done, Op, Piece, Purpose, Sink};

/// Longest single wait: an [`Instant`] cannot represent a much later moment.
const PATIENCE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Collects answers for one waiting thread.
#[derive(Default)]
pub struct Mailbox {
    answers: Mutex<VecDeque<Done>>,
    arrived: Condvar,
}

impl Sink for Mailbox {
    fn done(&self, answers: Vec<Done>) {
        self.answers.lock().extend(answers);
        self.arrived.notify_one();
    }
}

impl Mailbox {
    /// All answers received; waits for the first one, at most `patience`. Empty after a timeout.
    pub fn take(&self, patience: Duration) -> VecDeque<Done> {
        let mut answers = self.answers.lock();
        if answers.is_empty() {
            let until = Instant::now() + patience.min(PATIENCE_MAX);
            while answers.is_empty() {
                if self.arrived.wait_until(&mut answers, until).timed_out() {
                    break;
                }
            }
        }
        std::mem::take(&mut *answers)
    }
}

/// How long one wait for answers lasts before it is begun again. The device itself has no time
/// limit.
const PATIENCE: Duration = Duration::from_secs(60);

/// Carries out all reads in the background, as many at once as the disk allows; one result each, in
/// order. A disk with patience tries failed ones again.
pub fn read_all(disk: &dyn Disk, reads: &[ReadAt]) -> Vec<Result<AlignedBuf, DiskError>> {
    let mut results = read_once(disk, reads);
    disk.try_again(reads, &mut results);
    results
}

/// The same, without further tries.
pub(super) fn read_once(disk: &dyn Disk, reads: &[ReadAt]) -> Vec<Result<AlignedBuf, DiskError>> {
    read_all_for(disk, reads, Purpose::Background, None)
}

/// As [`read_all`], for a call, and returns at the deadline at the latest. Reads not finished by
/// then are [`DiskError::Deadline`].
pub fn read_all_until(
    disk: &dyn Disk,
    reads: &[ReadAt],
    deadline: Option<Instant>,
) -> Vec<Result<AlignedBuf, DiskError>> {
    read_all_for(disk, reads, Purpose::Call, deadline)
}

fn read_all_for(
    disk: &dyn Disk,
    reads: &[ReadAt],
    purpose: Purpose,
    deadline: Option<Instant>,
) -> Vec<Result<AlignedBuf, DiskError>> {
    let mut results: Vec<Result<AlignedBuf, DiskError>> = Vec::with_capacity(reads.len());
    let mut actions = Vec::with_capacity(reads.len());
    for (read, at) in reads.iter().zip(0..) {
        match AlignedBuf::zeroed(read.bytes) {
            Ok(memory) => {
                results.push(Err(DiskError::Deadline));
                let action = Action::Read {
                    offset: read.offset,
                    buffer: Buffer::Owned(memory),
                };
                actions.push((at, read.volume, action));
            }
            Err(error) => {
                let error = DiskError::Os(error.raw_os_error().unwrap_or(libc::ENOMEM));
                results.push(Err(error));
            }
        }
    }
    carry_out_all(disk, actions, purpose, deadline, |at, done| {
        results[at] = match (done.result, done.buffer) {
            (Ok(()), Some(memory)) => Ok(memory),
            (Ok(()), None) => Err(DiskError::Shutdown),
            (Err(error), _) => Err(error),
        };
    });
    results
}

/// One write of memory of its own.
pub struct WriteAt {
    /// Index of the volume.
    pub volume: usize,
    /// Byte offset.
    pub offset: u64,
    /// The bytes to write.
    pub memory: AlignedBuf,
}

/// Carries out all writes of records, as many at once as the disk allows; one result each, in
/// order.
pub fn write_all(disk: &dyn Disk, writes: Vec<WriteAt>) -> Vec<Result<(), DiskError>> {
    let action = |write: WriteAt| {
        let action = Action::Write {
            offset: write.offset,
            buffer: Buffer::Owned(write.memory),
        };
        (write.volume, action)
    };
    change_all(disk, writes.into_iter().map(action))
}

/// Syncs volumes, all at once; one result each, in order.
pub fn sync_all(disk: &dyn Disk, volumes: &[usize]) -> Vec<Result<(), DiskError>> {
    change_all(disk, volumes.iter().map(|volume| (*volume, Action::Sync)))
}

/// Carries out writes or syncs of records; one result each, in order.
fn change_all(
    disk: &dyn Disk,
    actions: impl ExactSizeIterator<Item = (usize, Action)>,
) -> Vec<Result<(), DiskError>> {
    let mut results = vec![Err(DiskError::Shutdown); actions.len()];
    let actions = (0..).zip(actions);
    let actions = actions.map(|(at, (volume, action))| (at, volume, action));
    carry_out_all(
        disk,
        actions.collect(),
        Purpose::Record,
        None,
        |at, done| {
            results[at] = done.result;
        },
    );
    results
}

/// Carries out actions that own their memory, each with a number of its own and a volume. Passes
/// each answer that comes before the deadline to `take`.
fn carry_out_all(
    disk: &dyn Disk,
    actions: Vec<(usize, usize, Action)>,
    purpose: Purpose,
    deadline: Option<Instant>,
    mut take: impl FnMut(usize, Done),
) {
    let mailbox = Arc::new(Mailbox::default());
    let ops: Vec<Op> = actions
        .into_iter()
        .map(|(at, volume, action)| Op {
            volume,
            action,
            purpose,
            deadline,
            tag: at as u64,
            sink: mailbox.clone(),
        })
        .collect();
    let mut left = ops.len();
    // SAFETY: every operation owns its buffer.
    unsafe { disk.submit(ops) };
    while left > 0 {
        let patience = deadline.map_or(PATIENCE, |until| {
            until.saturating_duration_since(Instant::now())
        });
        let answers = mailbox.take(patience);
        if answers.is_empty() && deadline.is_some_and(|until| until <= Instant::now()) {
            disk.expire();
            return;
        }
        for done in answers {
            left -= 1;
            if let Ok(at) = usize::try_from(done.tag) {
                take(at, done);
            }
        }
    }
}

/// A long sequence of reads in the background, several in flight at once, into memory that is
/// allocated once. Results come in the order in which the reads were started. Dropping it waits for
/// the reads in flight.
pub struct ReadAhead<'a> {
    disk: &'a dyn Disk,
    mailbox: Arc<Mailbox>,
    slots: Vec<Slot>,
    /// Number of reads started, answered and taken so far. Read `n` uses slot `n % slots.len()`.
    started: u64,
    answered: u64,
    taken: u64,
}

struct Slot {
    memory: AlignedBuf,
    bytes: usize,
    answer: Option<Result<(), DiskError>>,
}

impl<'a> ReadAhead<'a> {
    /// Room for `depth` reads of at most `bytes` bytes.
    ///
    /// # Errors
    /// When there is too little memory.
    pub fn new(disk: &'a dyn Disk, depth: usize, bytes: usize) -> Result<Self, std::io::Error> {
        let slots = (0..depth.max(1)).map(|_| {
            Ok(Slot {
                memory: AlignedBuf::zeroed(bytes)?,
                bytes: 0,
                answer: None,
            })
        });
        Ok(ReadAhead {
            disk,
            mailbox: Arc::default(),
            slots: slots.collect::<Result<_, std::io::Error>>()?,
            started: 0,
            answered: 0,
            taken: 0,
        })
    }

    /// Whether another read can be started before the next result is taken.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.started - self.taken < self.slots.len() as u64
    }

    /// Starts a read.
    ///
    /// # Panics
    /// Without room for it, or when it is longer than the memory of a read.
    pub fn start(&mut self, read: ReadAt) {
        assert!(self.has_room(), "every buffer is in use");
        let tag = self.started;
        let index = self.index(tag);
        let slot = &mut self.slots[index];
        slot.bytes = read.bytes;
        slot.answer = None;
        let piece = Piece {
            ptr: slot.memory[..read.bytes].as_mut_ptr(),
            len: read.bytes,
        };
        self.started += 1;
        let op = Op {
            volume: read.volume,
            action: Action::Read {
                offset: read.offset,
                buffer: Buffer::Borrowed(vec![piece]),
            },
            purpose: Purpose::Background,
            deadline: None,
            tag,
            sink: self.mailbox.clone(),
        };
        // SAFETY: the piece lies within the slot's memory, which is owned here and not used until
        // the answer: a slot is read only after its answer has come, is reused only after that, and
        // dropping `self` waits for all answers. If `self` is forgotten instead, the memory is
        // never freed.
        unsafe { self.disk.submit(vec![op]) };
    }

    /// The result of the oldest read not taken yet; waits for it. `None` when there is none.
    pub fn take(&mut self) -> Option<Result<&[u8], DiskError>> {
        if self.taken == self.started {
            return None;
        }
        let index = self.index(self.taken);
        let answer = loop {
            if let Some(answer) = self.slots[index].answer.take() {
                break answer;
            }
            self.wait();
        };
        self.taken += 1;
        let slot = &self.slots[index];
        Some(answer.map(|()| &slot.memory[..slot.bytes]))
    }

    fn wait(&mut self) {
        for done in self.mailbox.take(PATIENCE) {
            self.answered += 1;
            let index = self.index(done.tag);
            self.slots[index].answer = Some(done.result);
        }
    }

    fn index(&self, read: u64) -> usize {
        usize::try_from(read % self.slots.len() as u64).unwrap_or(0)
    }
}

impl Drop for ReadAhead<'_> {
    fn drop(&mut self) {
        while self.answered < self.started {
            self.wait();
        }
    }
}
