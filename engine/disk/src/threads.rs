//! The disk for systems that forbid io_uring: `preadv` and `pwritev` on a few threads a volume.
//!
//! Owns: one queue and up to [`THREADS_MAX`] threads for each volume that is there.
//!
//! Invariants: an operation is in the queue, or on exactly one thread; a thread has one operation
//! at a time, so that at most `depth` are in the kernel; sinks are called without a lock held;
//! operations in the queue at a shutdown are answered by its threads before they end.
//!
//! Faults defended against: those of the module `job`. A sink that panics ends the process.
//!
//! It does not merge operations, or register memory. Their order is that of the module `queue`.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use larder_base::failure::DiskError;
use larder_base::fork::Origin;
use larder_base::runtime::thread::{self, JoinHandle};
use larder_base::runtime::{Condvar, Mutex};
use larder_base::system::files::{self, Handle};
use larder_base::system::processes::monotonic_nanoseconds as now;

use super::job::{
    AbortOnPanic, Answers, Job, Refusals, Step, Times, forget_others, give_up, iovecs, join_others,
    refuse, submit_by_volume,
};
use super::pace::{Ended, Nanos, Traffic};
use super::queue::{Next, Queue};
use super::{Choice, Disk, DiskOptions, Kind, Op, Piece};

/// Most threads a volume.
pub const THREADS_MAX: u32 = 16;

/// Moves bytes with blocking calls on its own threads.
pub struct Threads {
    lanes: Vec<Option<Arc<Lane>>>,
    workers: Mutex<Vec<JoinHandle<()>>>,
    choice: Choice,
    origin: Origin,
}

/// The state shared by the threads of one volume.
struct Lane {
    refusals: Refusals,
    times: Times,
    file: Arc<Handle>,
    inbox: Mutex<Inbox>,
    filled: Condvar,
}

struct Inbox {
    queue: Queue,
    open: bool,
    /// The moment at which the first of the threads looks at the queue again.
    timed_until: Option<Nanos>,
}

impl Threads {
    /// Starts `min(depth, 16)` threads, at least one, for each volume that is there. `reason`
    /// states why this disk was chosen.
    ///
    /// # Errors
    /// The system's, if it cannot start a thread.
    pub fn open(mut options: DiskOptions, reason: String) -> Result<Self, io::Error> {
        let mut disk = Self {
            lanes: Vec::with_capacity(options.files.len()),
            workers: Mutex::new(Vec::new()),
            choice: Choice {
                kind: Kind::Threads,
                reason,
            },
            origin: Origin::here(),
        };
        for (volume, file) in std::mem::take(&mut options.files).into_iter().enumerate() {
            let queue = Queue::new(volume, options.pacing.clone());
            let times = Times::of(volume, &options);
            let lane = file.map(|file| Arc::new(Lane::new(file, queue, times)));
            disk.lanes.push(lane.clone());
            for worker in 0..options.depth.clamp(1, THREADS_MAX) {
                let Some(lane) = lane.clone() else { break };
                let thread = thread::Builder::new()
                    .name(format!("larder-io-{volume}.{worker}"))
                    .spawn(move || serve(&lane))?;
                disk.workers.get_mut().push(thread);
            }
        }
        Ok(disk)
    }

    fn push(&self, volume: usize, ops: Vec<Op>, answers: &mut Answers) {
        let Some(lane) = self.lanes.get(volume).and_then(Option::as_ref) else {
            return ops
                .into_iter()
                .for_each(|op| refuse(op, DiskError::Os(libc::ENODEV), answers));
        };
        let mut inbox = lane.inbox.lock();
        if !inbox.open {
            drop(inbox);
            return ops
                .into_iter()
                .for_each(|op| refuse(op, DiskError::Shutdown, answers));
        }
        let count = ops.len();
        inbox.queue.extend(ops, now());
        drop(inbox);
        (0..count.min(THREADS_MAX as usize)).for_each(|_| {
            lane.filled.notify_one();
        });
    }
}

impl Disk for Threads {
    unsafe fn submit(&self, ops: Vec<Op>) {
        submit_by_volume(ops, |volume, ops, answers| self.push(volume, ops, answers));
    }

    fn expire(&self) {
        let lanes = self.lanes.iter().flatten();
        give_up(lanes.map(|lane| lane.inbox.lock().queue.take_late()));
    }

    unsafe fn register(&self, _memory: &[Piece]) -> String {
        "not registered: only io_uring can register memory".to_owned()
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn shutdown(&self) {
        if self.origin.is_inherited() {
            forget_others(&self.workers);
            return;
        }
        for lane in self.lanes.iter().flatten() {
            lane.inbox.lock().open = false;
            lane.filled.notify_all();
        }
        join_others(&mut self.workers.lock());
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Lane {
    fn new(file: Arc<Handle>, queue: Queue, times: Times) -> Self {
        let inbox = Inbox {
            queue,
            open: true,
            timed_until: None,
        };
        Self {
            refusals: Refusals::default(),
            times,
            file,
            inbox: Mutex::new(inbox),
            filled: Condvar::new(),
        }
    }

    /// The next operation, and whether it may still be started; waits for one. `None` once the lane
    /// is closed and empty. `ended` are the operations that the thread has finished since.
    fn take(&self, ended: Ended) -> Option<Result<Op, (Op, DiskError)>> {
        let mut inbox = self.inbox.lock();
        inbox.queue.end(ended, now());
        loop {
            if !inbox.open {
                let op = inbox.queue.pop()?;
                return Some(Err((op, DiskError::Shutdown)));
            }
            let now = now();
            let held_until = match inbox.queue.next(now) {
                Next::Start(op) => {
                    // The end of this thread's last operation may let another one start, too.
                    if !inbox.queue.is_empty() {
                        self.filled.notify_one();
                    }
                    return Some(Ok(op));
                }
                Next::Late(op) => return Some(Err((op, DiskError::Deadline))),
                Next::Held(until) => until,
                Next::Nothing => None,
            };
            let moments = [held_until, inbox.queue.renew(now)].into_iter().flatten();
            match moments.min() {
                Some(moment) if inbox.timed_until.is_none_or(|until| moment < until) => {
                    inbox.timed_until = Some(moment);
                    let left = Duration::from_nanos(moment.saturating_sub(now));
                    self.filled.wait_for(&mut inbox, left);
                    inbox.timed_until.take_if(|until| *until == moment);
                }
                _ => self.filled.wait(&mut inbox),
            }
        }
    }
}

fn serve(lane: &Lane) {
    let _guard = AbortOnPanic;
    let mut answers = Answers::default();
    let mut ended = Ended::default();
    while let Some(taken) = lane.take(std::mem::take(&mut ended)) {
        match taken {
            Err((op, error)) => refuse(op, error, &mut answers),
            Ok(op) => {
                ended.add(Traffic::of(&op));
                if let Some(mut job) = Job::admit(op, &mut answers) {
                    job.begin(&lane.times);
                    let result = job.run(|step| call(&lane.file, step));
                    lane.refusals.record(lane.times.volume, &job, result);
                    job.record(&lane.times);
                    job.answer(result, &mut answers);
                }
            }
        }
        answers.deliver();
    }
}

fn call(file: &Handle, step: Step<'_>) -> Result<usize, i32> {
    match step {
        // SAFETY: the memory behind the pieces belongs to the operation until it is answered
        // (contract of `Disk::submit`), which is after this call.
        Step::Read { offset, pieces } => unsafe {
            files::read_pieces(file, offset, iovecs(pieces))
        },
        // SAFETY: as above.
        Step::Write { offset, pieces } => unsafe {
            files::write_pieces(file, offset, iovecs(pieces))
        },
        Step::Sync => files::sync_data(file).map(|()| 0),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::mailbox::Mailbox;
    use crate::{Action, Buffer, Pacing, Purpose};
    use larder_base::memory::AlignedBuf;

    #[test]
    fn a_thread_without_work_renews_the_claim_of_a_read_on_another_thread() {
        let pacing = Arc::new(Pacing::create());
        let queue = Queue::new(0, pacing.clone());
        let file = Arc::new(Handle::from(tempfile::tempfile().unwrap()));
        let times = Times {
            volume: 0,
            latencies: Arc::default(),
            board: Arc::default(),
        };
        let lane = Lane::new(file, queue, times);
        let read = Op {
            volume: 0,
            action: Action::Read {
                offset: 0,
                buffer: Buffer::Owned(AlignedBuf::zeroed(4096).unwrap()),
            },
            purpose: Purpose::Call,
            deadline: None,
            tag: 0,
            sink: Arc::new(Mailbox::default()),
        };
        lane.inbox.lock().queue.extend(vec![read], now());
        // This thread has the read, and does not come back with it.
        assert!(matches!(lane.take(Ended::default()), Some(Ok(_))));
        thread::scope(|scope| {
            let other = scope.spawn(|| lane.take(Ended::default()).is_none());
            let is_renewed = pacing.is_renewed(0);
            lane.inbox.lock().open = false;
            lane.filled.notify_all();
            assert!(other.join().unwrap());
            assert!(is_renewed);
        });
    }
}
