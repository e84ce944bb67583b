//! One operation in progress, and the batching of answers: common to all disks.
//!
//! Owns: the remaining part of an operation ([`Job`]), the number of its retries, and the batches
//! of answers by receiver ([`Answers`]).
//!
//! Invariants: a [`Job`] owns the memory that travels with it until it is answered; every operation
//! becomes exactly one [`Done`]; the remaining part only shrinks.
//!
//! Faults defended against:
//! - short transfers: resumed at a whole block, because direct I/O cannot start inside one;
//! - interrupted and cancelled transfers: retried a bounded number of times;
//! - the kernel's end of file: no progress, an error;
//! - read errors that go away, and offsets with a special meaning for the kernel.
//!
//! It does no I/O, and does not order operations (`queue`).

use std::sync::Arc;
use std::time::Duration;

use larder_base::failure::{DiskError, is_of_the_medium};
use larder_base::latency::DeviceLatencies;
use larder_base::memory::AlignedBuf;
use larder_base::runtime::{Instant, Mutex, thread};
use larder_base::system::processes;
use larder_base::system::processes::monotonic_nanoseconds as now;

use super::board::Board;
use super::pace::{Nanos, Traffic};
use super::{Action, Buffer, DiskOptions, Done, Op, PIECES_MAX, Piece, Sink};

/// Transfers are resumed at multiples of this, in bytes.
const BLOCK_BYTES: u64 = 4096;

/// Retries of an operation that was interrupted, refused for the moment or cancelled.
const TRANSIENT_RETRIES_MAX: u32 = 64;

/// Least time between two log lines on writes that fail.
const REFUSAL_PAUSE: Duration = Duration::from_secs(60);

/// Attempts in all of a read that fails because of the medium.
pub const MEDIUM_READS_MAX: u32 = 3;

// Pieces are handed to the kernel as they are.
const _: () = assert!(
    size_of::<Piece>() == size_of::<libc::iovec>()
        && std::mem::offset_of!(Piece, ptr) == std::mem::offset_of!(libc::iovec, iov_base)
        && std::mem::offset_of!(Piece, len) == std::mem::offset_of!(libc::iovec, iov_len)
);

/// Pieces as the kernel takes them.
pub(super) fn iovecs(pieces: &[Piece]) -> &[libc::iovec] {
    // SAFETY: a `Piece` has the size and the fields of an `iovec` at the same places (asserted
    // above), and both have the alignment of a pointer; the borrow goes on.
    unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast(), pieces.len()) }
}

/// The next request to the kernel for an operation.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// Read into the pieces, from the offset on.
    Read {
        /// Byte offset in the volume.
        offset: u64,
        /// The destination of the bytes.
        pieces: &'a [Piece],
    },
    /// Write the pieces, from the offset on.
    Write {
        /// Byte offset in the volume.
        offset: u64,
        /// The source of the bytes.
        pieces: &'a [Piece],
    },
    /// `fdatasync`.
    Sync,
}

/// Receives the times of the operations of one volume.
pub(super) struct Times {
    pub(super) volume: usize,
    pub(super) latencies: Arc<DeviceLatencies>,
    pub(super) board: Arc<Board>,
}

impl Times {
    pub(super) fn of(volume: usize, options: &DiskOptions) -> Times {
        Times {
            volume,
            latencies: options.latencies.clone(),
            board: options.board.clone(),
        }
    }
}

/// An operation that has been admitted and not yet answered.
pub(super) struct Job {
    tag: u64,
    sink: Arc<dyn Sink>,
    work: Work,
    kind: Kind,
    traffic: Traffic,
    begun: Nanos,
    owned: Option<AlignedBuf>,
    transient_retries: u32,
    failed_reads: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Sync,
}

enum Work {
    Read(Transfer),
    Write(Transfer),
    Sync,
    Over,
}

/// The rest of a transfer: `left_bytes` from `offset` on, in `pieces[first..]`.
struct Transfer {
    offset: u64,
    pieces: Vec<Piece>,
    first: usize,
    left_bytes: usize,
}

impl Job {
    /// Admits an operation that is about to be handed to the kernel, or answers it at once.
    pub(super) fn admit(op: Op, answers: &mut Answers) -> Option<Self> {
        if is_late(&op, Instant::now()) {
            refuse(op, DiskError::Deadline, answers);
            return None;
        }
        let traffic = Traffic::of(&op);
        let (kind, work, owned) = match op.action {
            Action::Read { offset, buffer } => {
                let (transfer, owned) = Transfer::new(offset, buffer);
                (Kind::Read, Work::Read(transfer), owned)
            }
            Action::Write { offset, buffer } => {
                let (transfer, owned) = Transfer::new(offset, buffer);
                (Kind::Write, Work::Write(transfer), owned)
            }
            Action::Sync => (Kind::Sync, Work::Sync, None),
        };
        let job = Self {
            tag: op.tag,
            sink: op.sink,
            work,
            kind,
            traffic,
            begun: 0,
            owned,
            transient_retries: 0,
            failed_reads: 0,
        };
        match job.work {
            Work::Read(ref transfer) | Work::Write(ref transfer) if transfer.left_bytes == 0 => {
                job.answer(Ok(()), answers);
                None
            }
            // To io_uring the highest offset means the file's current position.
            Work::Read(ref transfer) | Work::Write(ref transfer)
                if i64::try_from(transfer.offset).is_err() =>
            {
                job.answer(Err(DiskError::Os(libc::EINVAL)), answers);
                None
            }
            _ => Some(job),
        }
    }

    /// The next request to the kernel; `None` once the job is done in full. The list of pieces and
    /// the memory behind them stay at their addresses until [`Job::after`] is called.
    pub(super) fn next(&self) -> Option<Step<'_>> {
        match &self.work {
            Work::Read(transfer) => Some(Step::Read {
                offset: transfer.offset,
                pieces: transfer.rest(),
            }),
            Work::Write(transfer) => Some(Step::Write {
                offset: transfer.offset,
                pieces: transfer.rest(),
            }),
            Work::Sync => Some(Step::Sync),
            Work::Over => None,
        }
    }

    /// Takes in the result of the last step: bytes moved, or an error number.
    ///
    /// # Errors
    /// Why the job is over without being done.
    pub(super) fn after(&mut self, outcome: Result<usize, i32>) -> Result<(), DiskError> {
        match outcome {
            Ok(moved_bytes) => self.progress(moved_bytes),
            Err(errno) if self.try_again(errno) => Ok(()),
            Err(errno) => Err(DiskError::Os(errno)),
        }
    }

    /// Passes one step after another to `kernel` until the job is done, or over without being done.
    ///
    /// # Errors
    /// Why it is over without being done.
    pub(super) fn run(
        &mut self,
        mut kernel: impl FnMut(Step<'_>) -> Result<usize, i32>,
    ) -> Result<(), DiskError> {
        while let Some(step) = self.next() {
            let outcome = kernel(step);
            self.after(outcome)?;
        }
        Ok(())
    }

    fn progress(&mut self, moved_bytes: usize) -> Result<(), DiskError> {
        let over = match &mut self.work {
            Work::Read(transfer) | Work::Write(transfer) => transfer.advance(moved_bytes)?,
            Work::Sync | Work::Over => true,
        };
        if over {
            self.work = Work::Over;
        }
        Ok(())
    }

    /// A sync is retried only if it was cancelled, which means that it never ran. An interrupted
    /// sync may have consumed the report of a failed write-back, and the next would claim success.
    fn try_again(&mut self, errno: i32) -> bool {
        match (&self.work, errno) {
            (Work::Read(_), errno) if is_of_the_medium(errno) => {
                self.failed_reads += 1;
                self.failed_reads < MEDIUM_READS_MAX
            }
            (Work::Read(_) | Work::Write(_), libc::EINTR | libc::EAGAIN) | (_, libc::ECANCELED) => {
                self.transient_retries += 1;
                self.transient_retries <= TRANSIENT_RETRIES_MAX
            }
            _ => false,
        }
    }

    /// Its part in the pacing.
    pub(super) fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Its time begins: it goes to the kernel.
    pub(super) fn begin(&mut self, times: &Times) {
        self.begun = times.board.begin(times.volume);
    }

    /// Records its time, once it is over.
    pub(super) fn record(&self, times: &Times) {
        let latency = match self.kind {
            Kind::Read => &times.latencies.reads,
            Kind::Write => &times.latencies.writes,
            Kind::Sync => &times.latencies.syncs,
        };
        let took = now().saturating_sub(self.begun);
        latency.record(Duration::from_nanos(took));
        let took = (self.kind != Kind::Sync).then_some(took);
        times.board.end(times.volume, self.begun, took);
    }

    /// Ends the job.
    pub(super) fn answer(self, result: Result<(), DiskError>, answers: &mut Answers) {
        answers.push(
            self.sink,
            Done {
                tag: self.tag,
                result,
                buffer: self.owned,
            },
        );
    }
}

impl Transfer {
    fn new(offset: u64, buffer: Buffer) -> (Self, Option<AlignedBuf>) {
        let left_bytes = buffer.len();
        let (pieces, owned) = match buffer {
            Buffer::Borrowed(pieces) => (pieces, None),
            Buffer::Owned(mut memory) => (
                vec![Piece {
                    ptr: memory.as_mut_ptr(),
                    len: memory.len(),
                }],
                Some(memory),
            ),
        };
        let mut transfer = Self {
            offset,
            pieces,
            first: 0,
            left_bytes,
        };
        transfer.skip_empty();
        (transfer, owned)
    }

    /// The next pieces, no more than one request may carry.
    fn rest(&self) -> &[Piece] {
        let end = self.pieces.len().min(self.first + PIECES_MAX);
        &self.pieces[self.first..end]
    }

    /// Advances by the bytes transferred. Returns whether the transfer is complete.
    fn advance(&mut self, moved_bytes: usize) -> Result<bool, DiskError> {
        let mut step_bytes = self.whole_blocks(moved_bytes);
        if step_bytes == 0 {
            return Err(DiskError::NoProgress);
        }
        self.offset = self.offset.saturating_add(step_bytes as u64);
        self.left_bytes -= step_bytes;
        while step_bytes > 0 {
            let piece = &mut self.pieces[self.first];
            let part_bytes = step_bytes.min(piece.len);
            piece.ptr = piece.ptr.wrapping_add(part_bytes);
            piece.len -= part_bytes;
            step_bytes -= part_bytes;
            self.skip_empty();
        }
        Ok(self.left_bytes == 0)
    }

    /// The part of a transfer that counts: all of it when it is complete, else the part up to the
    /// last block boundary. So the end of a file inside a block shows as no progress, and not as an
    /// error of alignment on the next try.
    fn whole_blocks(&self, moved_bytes: usize) -> usize {
        if moved_bytes >= self.left_bytes {
            return self.left_bytes;
        }
        let past_boundary = self.offset.saturating_add(moved_bytes as u64) % BLOCK_BYTES;
        moved_bytes.saturating_sub(usize::try_from(past_boundary).unwrap_or(usize::MAX))
    }

    fn skip_empty(&mut self) {
        while self
            .pieces
            .get(self.first)
            .is_some_and(|piece| piece.len == 0)
        {
            self.first += 1;
        }
    }
}

/// Carries one operation out and answers it. `kernel` stands for the system calls: it receives one
/// step after another, and returns the bytes moved or the error number. No disk has any other layer
/// between an operation and the kernel, so a simulation with a kernel of its own runs the real
/// rules of progress.
pub fn carry_out(op: Op, kernel: impl FnMut(Step<'_>) -> Result<usize, i32>) {
    let mut answers = Answers::default();
    if let Some(mut job) = Job::admit(op, &mut answers) {
        let result = job.run(kernel);
        job.answer(result, &mut answers);
    }
    answers.deliver();
}

/// Logs that a volume refuses writes or syncs: the answers do not name the reason.
#[derive(Default)]
pub(super) struct Refusals {
    /// The time of the last log line.
    logged_at: Mutex<Option<Instant>>,
}

impl Refusals {
    /// Takes in the result of a job.
    pub(super) fn record(&self, volume: usize, job: &Job, result: Result<(), DiskError>) {
        let Err(error @ (DiskError::Os(_) | DiskError::NoProgress)) = result else {
            return;
        };
        if job.kind == Kind::Read {
            return;
        }
        let mut logged_at = self.logged_at.lock();
        if logged_at.is_none_or(|logged_at| logged_at.elapsed() >= REFUSAL_PAUSE) {
            *logged_at = Some(Instant::now());
            tracing::warn!(
                volume,
                call = ?job.kind,
                %error,
                "the volume refuses a write or a sync (logged at most once a minute)"
            );
        }
    }
}

/// Whether an operation must not be started any more.
pub(super) fn is_late(op: &Op, now: Instant) -> bool {
    op.deadline.is_some_and(|deadline| deadline <= now)
}

/// Answers the operations that were taken out of queues because they are late.
pub(super) fn give_up(late: impl Iterator<Item = Vec<Op>>) {
    let mut answers = Answers::default();
    for op in late.flatten() {
        refuse(op, DiskError::Deadline, &mut answers);
    }
    answers.deliver();
}

/// Answers an operation that never became a job.
pub(super) fn refuse(op: Op, error: DiskError, answers: &mut Answers) {
    let buffer = match op.action {
        Action::Read {
            buffer: Buffer::Owned(memory),
            ..
        }
        | Action::Write {
            buffer: Buffer::Owned(memory),
            ..
        } => Some(memory),
        Action::Read { .. } | Action::Write { .. } | Action::Sync => None,
    };
    answers.push(
        op.sink,
        Done {
            tag: op.tag,
            result: Err(error),
            buffer,
        },
    );
}

/// Answers waiting to be delivered, one batch for each sink.
#[derive(Default)]
pub(super) struct Answers {
    batches: Vec<(Arc<dyn Sink>, Vec<Done>)>,
}

impl Answers {
    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    fn push(&mut self, sink: Arc<dyn Sink>, done: Done) {
        // Newest first: neighbouring answers mostly go to the same sink.
        match self
            .batches
            .iter_mut()
            .rev()
            .find(|(known, _)| Arc::ptr_eq(known, &sink))
        {
            Some((_, batch)) => batch.push(done),
            None => self.batches.push((sink, vec![done])),
        }
    }

    /// Hands every batch to its sink. Must be called without any lock held: a sink may submit
    /// again.
    pub(super) fn deliver(&mut self) {
        for (sink, batch) in self.batches.drain(..) {
            sink.done(batch);
        }
    }
}

/// Splits a batch by volume, keeps the order within each volume, and passes each part to `push`,
/// which takes it or answers it.
pub(super) fn submit_by_volume(
    mut ops: Vec<Op>,
    mut push: impl FnMut(usize, Vec<Op>, &mut Answers),
) {
    let mut answers = Answers::default();
    ops.sort_by_key(|op| op.volume);
    while let Some(volume) = ops.first().map(|op| op.volume) {
        let rest = ops.split_off(ops.partition_point(|op| op.volume == volume));
        push(volume, ops, &mut answers);
        ops = rest;
    }
    answers.deliver();
}

/// Ends the process when the thread that holds it unwinds. The kernel may still own memory that
/// unwinding would free, and pending answers would never come.
pub(super) struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            processes::abort();
        }
    }
}

/// Forgets a disk's threads, in a forked child, which has none of them.
pub(super) fn forget_others(threads: &Mutex<Vec<thread::JoinHandle<()>>>) {
    if let Some(mut threads) = threads.try_lock() {
        std::mem::forget(std::mem::take(&mut *threads));
    }
}

/// Joins a disk's threads, except the calling one: the last owner of a disk may be a sink, which is
/// dropped on one of them.
pub(super) fn join_others(threads: &mut Vec<thread::JoinHandle<()>>) {
    let own = thread::current().id();
    for thread in threads
        .drain(..)
        .filter(|thread| thread.thread().id() != own)
    {
        // A thread that panicked has ended the process (`AbortOnPanic`).
        let _ = thread.join();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::Purpose;
    use std::sync::Mutex;
    use std::time::Duration;

    #[derive(Default)]
    struct Record(Mutex<Vec<Vec<u64>>>);

    impl Sink for Record {
        fn done(&self, answers: Vec<Done>) {
            self.0
                .lock()
                .unwrap()
                .push(answers.iter().map(|done| done.tag).collect());
        }
    }

    /// Pieces at invalid addresses: these tests never dereference them.
    fn pieces(lengths: &[usize]) -> Vec<Piece> {
        let at = |index: usize| std::ptr::without_provenance_mut(0x10_0000 * (index + 1));
        lengths
            .iter()
            .enumerate()
            .map(|(index, len)| Piece {
                ptr: at(index),
                len: *len,
            })
            .collect()
    }

    fn op(action: Action) -> Op {
        Op {
            volume: 0,
            action,
            purpose: Purpose::Call,
            deadline: None,
            tag: 0,
            sink: Arc::new(Record::default()),
        }
    }

    fn job(action: Action) -> Job {
        Job::admit(op(action), &mut Answers::default()).unwrap()
    }

    fn read(offset: u64, lengths: &[usize]) -> Job {
        job(Action::Read {
            offset,
            buffer: Buffer::Borrowed(pieces(lengths)),
        })
    }

    fn write(offset: u64, lengths: &[usize]) -> Job {
        job(Action::Write {
            offset,
            buffer: Buffer::Borrowed(pieces(lengths)),
        })
    }

    /// The offset, and the address and length of each piece, of the next request.
    fn next(job: &Job) -> Option<(u64, Vec<(usize, usize)>)> {
        match job.next()? {
            Step::Read { offset, pieces } | Step::Write { offset, pieces } => Some((
                offset,
                pieces
                    .iter()
                    .map(|piece| (piece.ptr.addr(), piece.len))
                    .collect(),
            )),
            Step::Sync => None,
        }
    }

    #[test]
    fn row_10_a_short_transfer_is_resumed_in_the_middle_of_a_piece() {
        let mut job = read(8192, &[4096, 0, 12288, 4096]);
        assert_eq!(job.after(Ok(8192)), Ok(()));
        assert_eq!(
            next(&job),
            Some((16384, vec![(0x30_1000, 8192), (0x40_0000, 4096)]))
        );
        assert_eq!(job.after(Ok(12288)), Ok(()));
        assert!(job.next().is_none());
    }

    #[test]
    fn a_transfer_that_ends_inside_a_block_is_resumed_at_that_block() {
        let mut job = read(4096, &[12288]);
        assert_eq!(job.after(Ok(4096 + 100)), Ok(()));
        assert_eq!(next(&job), Some((8192, vec![(0x10_1000, 8192)])));
        assert_eq!(job.after(Ok(100)), Err(DiskError::NoProgress));
    }

    #[test]
    fn a_last_piece_that_is_no_whole_block_is_done_when_it_is_all_moved() {
        let mut job = write(0, &[4096, 100]);
        assert_eq!(job.after(Ok(4196)), Ok(()));
        assert!(job.next().is_none());
    }

    #[test]
    fn more_pieces_than_one_request_takes_are_moved_in_turns() {
        let mut job = write(0, &[4096; PIECES_MAX + 3]);
        assert_eq!(next(&job).unwrap().1.len(), PIECES_MAX);
        assert_eq!(job.after(Ok(PIECES_MAX * 4096)), Ok(()));
        assert_eq!(next(&job).unwrap().1.len(), 3);
    }

    #[test]
    fn row_11_interrupted_transfers_are_tried_again_a_bounded_number_of_times() {
        for errno in [libc::EINTR, libc::EAGAIN, libc::ECANCELED] {
            let mut job = write(0, &[4096]);
            for _ in 0..TRANSIENT_RETRIES_MAX {
                assert_eq!(job.after(Err(errno)), Ok(()));
            }
            assert_eq!(job.after(Err(errno)), Err(DiskError::Os(errno)));
        }
    }

    #[test]
    fn a_read_error_is_believed_the_third_time_and_a_write_error_the_first() {
        // A drive reports a sector that it cannot read as `ENODATA`.
        for errno in [libc::EIO, libc::ENODATA, libc::EILSEQ] {
            let mut job = read(0, &[4096]);
            assert_eq!(job.after(Err(errno)), Ok(()));
            assert_eq!(job.after(Err(errno)), Ok(()));
            assert_eq!(job.after(Err(errno)), Err(DiskError::Os(errno)));
        }
        assert_eq!(
            write(0, &[4096]).after(Err(libc::EIO)),
            Err(DiskError::Os(libc::EIO))
        );
    }

    #[test]
    fn a_sync_that_may_have_run_is_never_tried_again() {
        for errno in [libc::EIO, libc::EINTR, libc::EAGAIN] {
            assert_eq!(
                job(Action::Sync).after(Err(errno)),
                Err(DiskError::Os(errno))
            );
        }
        let mut cancelled = job(Action::Sync);
        assert_eq!(cancelled.after(Err(libc::ECANCELED)), Ok(()));
        assert!(matches!(cancelled.next(), Some(Step::Sync)));
        assert_eq!(cancelled.after(Ok(0)), Ok(()));
        assert!(cancelled.next().is_none());
    }

    #[test]
    fn answers_to_one_sink_come_in_one_batch() {
        let sinks = [Arc::new(Record::default()), Arc::new(Record::default())];
        let mut answers = Answers::default();
        for tag in 0..4u64 {
            let sink: Arc<dyn Sink> = sinks[(tag % 2) as usize].clone();
            let late = Some(Instant::now() - Duration::from_millis(1));
            let op = Op {
                tag,
                sink,
                deadline: late,
                ..op(Action::Sync)
            };
            assert!(Job::admit(op, &mut answers).is_none());
        }
        answers.deliver();
        assert!(answers.is_empty());
        assert_eq!(*sinks[0].0.lock().unwrap(), [[0, 2]]);
        assert_eq!(*sinks[1].0.lock().unwrap(), [[1, 3]]);
    }

    #[test]
    fn a_batch_is_split_by_volume_and_stays_in_order_within_each() {
        let ops = [(2, 0), (0, 1), (2, 2), (0, 3)].map(|(volume, tag)| Op {
            volume,
            tag,
            ..op(Action::Sync)
        });
        let mut seen = Vec::new();
        submit_by_volume(ops.into(), |volume, ops, _| {
            seen.push((volume, ops.iter().map(|op| op.tag).collect::<Vec<_>>()));
        });
        assert_eq!(seen, [(0, vec![1, 3]), (2, vec![0, 2])]);
    }
}
