//! The thread of one ring.
//!
//! Owns: the ring, the operations in the kernel, and the table of registered buffers.
//!
//! Invariants:
//! - An operation in the kernel stays in `jobs` until its completion has been reaped, with its list
//!   of pieces and the memory that travels with it. So the kernel never holds an address of freed
//!   memory. A panic ends the process.
//! - At most `depth` operations and one read of the bell are outstanding, and the ring has room for
//!   twice as many. So the submission queue is never full at a push, and the completion queue never
//!   overflows.
//! - The bell is armed only after the inbox was seen open. So a thread that closes the inbox finds
//!   the bell armed, or never to be armed again, and the ring's thread ends once nothing is
//!   outstanding.
//! - Free places are filled from the inbox and submitted to the kernel before sinks are called, so
//!   that the device has work meanwhile.
//!
//! It does not check deadlines again once an operation is in the kernel.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use io_uring::types::{Fixed, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{CompletionQueue, EnterFlags, IoUring, SubmissionQueue, Submitter, opcode, squeue};
use larder_base::failure::DiskError;
use larder_base::fork::{Private, keep_private};
use larder_base::memory::AlignedBuf;
use larder_base::runtime::thread;
use larder_base::system::files::{self, Handle};
use larder_base::system::processes::monotonic_nanoseconds as now;

use super::{FIXED_BUFFERS_MAX, Features, Lane};
use crate::job::{AbortOnPanic, Answers, Job, Step, refuse};
use crate::pace::{Ended, Nanos, Traffic};
use crate::queue::Next;
use crate::{Op, Piece};

/// Places in the table of registered files.
const VOLUME: Fixed = Fixed(0);
const BELL: Fixed = Fixed(1);

/// Tag of the bell's read among completions. Operations are tagged by their place in `jobs`.
const BELL_RUNG: u64 = u64::MAX;

/// Longest transfer the kernel makes in one go, in bytes.
const REQUEST_BYTES_MAX: u32 = 0x7fff_f000;

/// Pause before the kernel is entered again after a refusal.
const REFUSED_PAUSE: Duration = Duration::from_millis(1);

/// Sets up the ring on this, its own thread, reports the result to `started`, and serves the lane
/// until it is closed.
pub(super) fn run(
    lane: &Lane,
    file: Arc<Handle>,
    depth: u32,
    features: Features,
    started: &mpsc::Sender<Result<(), io::Error>>,
) {
    let (mut ring, bell_count, _private) = match set_up(lane, &file, depth, features) {
        Ok(parts) => parts,
        Err(error) => {
            let _ = started.send(Err(error));
            return;
        }
    };
    let _ = started.send(Ok(()));
    let (mut submitter, submissions, completions) = ring.split();
    // Saves a look-up of the ring on every entry; kernels before 5.18 always look it up.
    let _ = submitter.register_ring_fd();
    let mut worker = Worker::new(
        lane,
        depth,
        features,
        bell_count,
        submitter,
        submissions,
        completions,
    );
    worker.serve();
    worker.tear_down();
    drop(ring);
    // Last, so that the lock on the file is not released before the ring has released the file.
    drop(file);
}

fn set_up(
    lane: &Lane,
    file: &Handle,
    depth: u32,
    features: Features,
) -> Result<(IoUring, AlignedBuf, Private), io::Error> {
    let descriptor = files::descriptor(file).ok_or(io::ErrorKind::Unsupported)?;
    let bell_count = AlignedBuf::zeroed(size_of::<u64>())?;
    let ring = features.setup.build((depth + 1).next_power_of_two())?;
    // A child that keeps a ring open keeps the files that are registered with it, and their locks.
    // SAFETY: the ring outlives the borrow.
    let private = keep_private(unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) });
    ring.submitter()
        .register_files(&[descriptor.as_raw_fd(), lane.bell_fd()])?;
    if features.fixed_buffers {
        ring.submitter()
            .register_buffers_sparse(u32::from(FIXED_BUFFERS_MAX))?;
    }
    Ok((ring, bell_count, private))
}

struct Worker<'r> {
    lane: &'r Lane,
    submitter: Submitter<'r>,
    submissions: SubmissionQueue<'r>,
    completions: CompletionQueue<'r>,
    vectored_fixed: bool,
    /// Operations with the kernel, by place.
    jobs: Vec<Option<Job>>,
    /// Places of `jobs` that are free.
    free: Vec<usize>,
    fixed: FixedBuffers,
    answers: Answers,
    /// Operations just taken from the inbox; kept for its capacity.
    taken: Vec<Op>,
    /// Operations that have ended since the inbox was last locked.
    ended: Ended,
    /// When to look at the queue again, if nothing ends before.
    wake_at: Option<Nanos>,
    /// Whether the inbox was open at the last check.
    open: bool,
    bell_armed: bool,
    /// The destination of the bell's read: the number of rings is unused.
    bell_count: AlignedBuf,
    refused: bool,
}

impl<'r> Worker<'r> {
    fn new(
        lane: &'r Lane,
        depth: u32,
        features: Features,
        bell_count: AlignedBuf,
        submitter: Submitter<'r>,
        submissions: SubmissionQueue<'r>,
        completions: CompletionQueue<'r>,
    ) -> Self {
        let depth = depth as usize;
        Self {
            lane,
            submitter,
            submissions,
            completions,
            vectored_fixed: features.vectored_fixed,
            jobs: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            fixed: FixedBuffers::default(),
            answers: Answers::default(),
            taken: Vec::with_capacity(depth),
            ended: Ended::default(),
            wake_at: None,
            open: true,
            bell_armed: false,
            bell_count,
            refused: false,
        }
    }

    fn serve(&mut self) {
        // In this frame, so that unwinding ends the process before it drops the fields of `self`.
        let _guard = AbortOnPanic;
        loop {
            self.fill();
            if !self.answers.is_empty() {
                self.enter(0);
                self.answers.deliver();
            } else if self.open || self.bell_armed || self.free.len() < self.jobs.len() {
                self.enter(1);
                self.reap();
            } else {
                return;
            }
        }
    }

    /// Takes operations from the inbox while there is room, and queues them for the kernel. Leaves
    /// the inbox marked `asleep` if none in it may start, there is room for more, and the thread
    /// will sleep next.
    fn fill(&mut self) {
        let may_sleep = self.answers.is_empty();
        let mut late = Vec::new();
        let now = now();
        let mut inbox = self.lane.inbox.lock();
        self.open = inbox.open;
        inbox.queue.end(mem::take(&mut self.ended), now);
        let mut held_until = None;
        let mut is_room_left = true;
        if self.open {
            loop {
                is_room_left = self.taken.len() < self.free.len();
                if !is_room_left {
                    break;
                }
                match inbox.queue.next(now) {
                    Next::Start(op) => self.taken.push(op),
                    Next::Late(op) => late.push(op),
                    Next::Held(until) => {
                        held_until = until;
                        break;
                    }
                    Next::Nothing => break,
                }
            }
        } else {
            self.taken.extend(inbox.queue.drain());
        }
        self.wake_at = [held_until, inbox.queue.renew(now)]
            .into_iter()
            .flatten()
            .min();
        let registrations = mem::take(&mut inbox.registrations);
        inbox.asleep = may_sleep && late.is_empty() && is_room_left;
        drop(inbox);
        for op in late {
            refuse(op, DiskError::Deadline, &mut self.answers);
        }

        for registration in registrations {
            let registered = self.fixed.add(&self.submitter, registration.buffer);
            let _ = registration.reply.send(registered);
        }
        let mut taken = mem::take(&mut self.taken);
        for op in taken.drain(..) {
            self.start(op);
        }
        self.taken = taken;
        if self.open && !self.bell_armed {
            self.arm_bell();
        }
    }

    fn start(&mut self, op: Op) {
        if !self.open {
            return refuse(op, DiskError::Shutdown, &mut self.answers);
        }
        let traffic = Traffic::of(&op);
        let Some(mut job) = Job::admit(op, &mut self.answers) else {
            self.ended.add(traffic);
            return;
        };
        if let Some(place) = self.free.pop() {
            job.begin(&self.lane.times);
            self.jobs[place] = Some(job);
            self.issue(place);
        }
    }

    /// Queues the next step of a job for the kernel, or answers the job if there is none.
    fn issue(&mut self, place: usize) {
        let job = self.jobs[place].as_ref();
        match job.and_then(Job::next).map(|step| self.entry(&step)) {
            Some(entry) => self.push(&entry.user_data(place as u64)),
            None => self.finish(place, Ok(())),
        }
    }

    fn entry(&self, step: &Step<'_>) -> squeue::Entry {
        match *step {
            Step::Sync => opcode::Fsync::new(VOLUME)
                .flags(FsyncFlags::DATASYNC)
                .build(),
            Step::Read { offset, pieces } => self.read(offset, pieces),
            Step::Write { offset, pieces } => self.write(offset, pieces),
        }
    }

    fn read(&self, offset: u64, pieces: &[Piece]) -> squeue::Entry {
        let (list, count) = (pieces.as_ptr().cast(), pieces.len() as u32);
        match (pieces, self.fixed.holding(pieces)) {
            (&[Piece { ptr, len }], Some(buffer)) => {
                opcode::ReadFixed::new(VOLUME, ptr, request_bytes(len), buffer)
                    .offset(offset)
                    .build()
            }
            (&[Piece { ptr, len }], None) => opcode::Read::new(VOLUME, ptr, request_bytes(len))
                .offset(offset)
                .build(),
            (_, Some(buffer)) if self.vectored_fixed => {
                opcode::ReadvFixed::new(VOLUME, list, count, buffer)
                    .offset(offset)
                    .build()
            }
            _ => opcode::Readv::new(VOLUME, list, count)
                .offset(offset)
                .build(),
        }
    }

    fn write(&self, offset: u64, pieces: &[Piece]) -> squeue::Entry {
        let (list, count) = (pieces.as_ptr().cast(), pieces.len() as u32);
        match (pieces, self.fixed.holding(pieces)) {
            (&[Piece { ptr, len }], Some(buffer)) => {
                opcode::WriteFixed::new(VOLUME, ptr, request_bytes(len), buffer)
                    .offset(offset)
                    .build()
            }
            (&[Piece { ptr, len }], None) => opcode::Write::new(VOLUME, ptr, request_bytes(len))
                .offset(offset)
                .build(),
            (_, Some(buffer)) if self.vectored_fixed => {
                opcode::WritevFixed::new(VOLUME, list, count, buffer)
                    .offset(offset)
                    .build()
            }
            _ => opcode::Writev::new(VOLUME, list, count)
                .offset(offset)
                .build(),
        }
    }

    fn arm_bell(&mut self) {
        let count = self.bell_count.as_mut_ptr();
        let read = opcode::Read::new(BELL, count, size_of::<u64>() as u32).build();
        self.push(&read.user_data(BELL_RUNG));
        self.bell_armed = true;
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the targets of the entry's pointers live until its completion: the list of
        // pieces, and memory that travels with the operation, in the job that stays in its place
        // until then; borrowed memory by the contract of `Disk::submit`; the bell's count in
        // `self`, which `serve` does not leave while the bell is armed.
        let pushed = unsafe { self.submissions.push(entry) };
        assert!(
            pushed.is_ok(),
            "the submission queue has room for every place and the bell"
        );
    }

    /// Submits the queued entries and waits for at least `want` completions, or until the
    /// queue is to be looked at again.
    fn enter(&mut self, want: usize) {
        self.submissions.sync();
        if want == 0 && self.submissions.is_empty() {
            return;
        }
        let entered = match self.wake_at.filter(|_| want > 0) {
            None => self.submitter.submit_and_wait(want),
            Some(until) => {
                let left = Timespec::from(Duration::from_nanos(until.saturating_sub(now())));
                let limit = SubmitArgs::new().timespec(&left);
                self.submitter.submit_with_args(want, &limit)
            }
        };
        if let Err(error) = entered {
            self.after_refusal(&error);
        }
        self.submissions.sync();
    }

    /// Handles a refusal of the kernel to be entered. It may be out of memory for the moment
    /// (`EAGAIN`, `EBUSY`). In every case queued entries stay queued and are submitted again. Waits
    /// a little, so that a long refusal does not use up a core. Processes finished operations,
    /// because they may hold resources that the kernel lacks.
    fn after_refusal(&mut self, error: &io::Error) {
        if matches!(error.raw_os_error(), Some(libc::EINTR | libc::ETIME)) {
            return;
        }
        if !mem::replace(&mut self.refused, true) {
            tracing::warn!(
                %error,
                "the kernel refuses io_uring requests; trying again until it takes them"
            );
        }
        thread::sleep(REFUSED_PAUSE);
        // SAFETY: nothing is submitted and no argument passed.
        let _ = unsafe {
            self.submitter
                .enter::<libc::sigset_t>(0, 0, EnterFlags::GETEVENTS.bits(), None)
        };
    }

    fn reap(&mut self) {
        self.completions.sync();
        while let Some(completion) = self.completions.next() {
            let (name, result) = (completion.user_data(), completion.result());
            if name == BELL_RUNG {
                self.bell_armed = false;
            } else {
                self.completed(name as usize, result);
            }
        }
        self.completions.sync();
    }

    fn completed(&mut self, place: usize, result: i32) {
        let job = self.jobs.get_mut(place).and_then(Option::as_mut);
        assert!(
            job.is_some(),
            "every completion belongs to an operation with the kernel"
        );
        let Some(job) = job else { return };
        match job.after(usize::try_from(result).map_err(|_| result.wrapping_neg())) {
            Ok(()) => self.issue(place),
            Err(error) => self.finish(place, Err(error)),
        }
    }

    fn finish(&mut self, place: usize, result: Result<(), DiskError>) {
        if let Some(job) = self.jobs[place].take() {
            self.free.push(place);
            self.ended.add(job.traffic());
            self.lane
                .refusals
                .record(self.lane.times.volume, &job, result);
            job.record(&self.lane.times);
            job.answer(result, &mut self.answers);
        }
    }

    /// Makes the ring release the file and the buffers now: the kernel frees a ring later,
    /// asynchronously.
    fn tear_down(mut self) {
        let _ = self.submitter.unregister_files();
        let _ = self.submitter.unregister_buffers();
        let _ = self.submitter.unregister_ring_fd();
    }
}

/// The length of one request.
fn request_bytes(len: usize) -> u32 {
    u32::try_from(len).map_or(REQUEST_BYTES_MAX, |len| len.min(REQUEST_BYTES_MAX))
}

/// The buffers registered with the ring, by address.
#[derive(Default)]
struct FixedBuffers {
    buffers: Vec<FixedBuffer>,
}

struct FixedBuffer {
    start: usize,
    end: usize,
    index: u16,
}

impl FixedBuffers {
    fn add(&mut self, submitter: &Submitter<'_>, buffer: Piece) -> Result<(), io::Error> {
        let index = u16::try_from(self.buffers.len())
            .ok()
            .filter(|index| *index < FIXED_BUFFERS_MAX);
        let index =
            index.ok_or_else(|| io::Error::other("all places for registered buffers are taken"))?;
        let start = buffer.ptr.addr();
        let vector = libc::iovec {
            iov_base: buffer.ptr.cast(),
            iov_len: buffer.len,
        };
        // SAFETY: the memory stays mapped until the disk has been dropped (contract of
        // `Disk::register`), which is after this thread has unregistered it.
        unsafe { submitter.register_buffers_update(u32::from(index), &[vector], None) }?;
        let place = self.buffers.partition_point(|known| known.start <= start);
        self.buffers.insert(
            place,
            FixedBuffer {
                start,
                end: start + buffer.len,
                index,
            },
        );
        Ok(())
    }

    /// The one buffer that holds all pieces.
    fn holding(&self, pieces: &[Piece]) -> Option<u16> {
        let first = pieces.first()?.ptr.addr();
        let place = self
            .buffers
            .partition_point(|known| known.start <= first)
            .checked_sub(1)?;
        let buffer = self.buffers.get(place)?;
        let inside = |piece: &Piece| {
            let end = piece.ptr.addr().checked_add(piece.len);
            piece.ptr.addr() >= buffer.start && end.is_some_and(|end| end <= buffer.end)
        };
        pieces.iter().all(inside).then_some(buffer.index)
    }
}
