//! Jobs that threads of Rust carry out, for an engine that must not wait: submit, poll, eventfd.
//!
//! ```text
//!   engine's thread            threads of the queue                     engine's thread
//!   submit --> waiting, by lane --> running (store call) --> done --> event_fd, poll
//!                   \                                        /
//!                    +--- deadline passes (timekeeper) -----+
//! ```
//!
//! Invariants:
//! - A job is reported exactly once: the thread that takes it out of `waiting` or `running`, under
//!   the lock, puts it into `done`.
//! - A job with rows that runs is reported by its own thread alone, after the call of the store has
//!   returned: no I/O can touch its rows any more. Past its deadline it counts as stuck meanwhile.
//!   Except a put with a recall: it is reported at its deadline too, and its rows stay mapped, for
//!   the device may still read them, until the call has returned.
//! - A job that has not started at its deadline is reported then. So is a lookup, which has no
//!   rows, even if it runs: its late answer is dropped.
//! - A lease is returned: a refused job takes none, and a job that returns leases is done although
//!   the queue refuses further ones.
//! - The event is readable if and only if `done` is not empty, unless the caller read it.
//! - The lock is held for memory operations alone: submit and poll never wait for the device or
//!   another process.
//!
//! Reads, writes and lookups have threads of their own, so that none waits behind another kind.
//! Threads are started when a job finds none idle, up to the limit.

mod work;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_base::fork::Origin;
use larder_base::seldom::Seldom;
use larder_engine::{PutOptions, Recall, StoreError};
use larder_format::PageKey;
use larder_sync::{Condvar, Mutex, MutexGuard, descriptors};
use rustix::event::{EventfdFlags, eventfd};

use super::{Handle, Space, all};
use crate::chain::Chain;
use crate::region::Region;
use crate::status::Status;

/// Kinds of work, each with its own threads.
const LANES: usize = 3;

/// Limits of a queue.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Threads for reads, and as many for writes. Lookups have one.
    pub threads: usize,
    /// Most jobs that are not reported yet.
    pub jobs: usize,
    /// Most bytes of their pages.
    pub bytes: usize,
}

/// The work of a job.
#[derive(Clone, Copy, Debug)]
pub enum Task {
    /// Reads pages into rows.
    Get,
    /// Stores pages of rows.
    Put {
        /// Where they stand, if they are a chain.
        chain: Option<Chain>,
        /// The wait for room, and the hint.
        options: PutOptions,
    },
    /// Looks pages up.
    Lookup {
        /// Takes a counted lease of each page that is there.
        leases: bool,
    },
    /// Returns counted leases. Not reported.
    Unlease,
    /// Marks pages as used. Not reported.
    Touch,
    /// Pins pages. Not reported.
    Pin {
        /// Its end, in seconds since 1970.
        until_unix_s: u32,
    },
}

impl Task {
    fn lane(self) -> usize {
        match self {
            Task::Get => 0,
            Task::Put { .. } | Task::Pin { .. } => 1,
            Task::Lookup { .. } | Task::Unlease | Task::Touch => 2,
        }
    }

    fn is_reported(self) -> bool {
        !matches!(self, Task::Touch | Task::Unlease | Task::Pin { .. })
    }

    fn has_rows(self) -> bool {
        matches!(self, Task::Get | Task::Put { .. })
    }
}

/// The memory of a job's pages.
#[derive(Debug)]
pub struct Rows {
    /// Keeps the memory mapped; `None` if the caller does.
    pub region: Option<Arc<Region>>,
    /// The first byte of each part, page after page. Within the region, if there is one. For a
    /// read, no two parts overlap.
    pub starts: Vec<usize>,
}

/// A job to be done.
pub struct Job {
    /// Its work.
    pub task: Task,
    /// The namespace.
    pub space: Arc<Space>,
    /// The pages.
    pub keys: Vec<PageKey>,
    /// Their memory; `None` for tasks without.
    pub rows: Option<Rows>,
    /// When it must have started.
    pub deadline: Option<Instant>,
    /// Gives up a put at its deadline.
    pub recall: Option<Arc<Recall>>,
}

impl Job {
    fn bytes(&self) -> usize {
        match self.rows {
            Some(_) => self.keys.len() * self.space.page_bytes(),
            None => 0,
        }
    }
}

/// A job with its number.
struct Numbered {
    number: u64,
    submitted: Instant,
    job: Job,
}

/// A job that a thread is doing.
struct Running {
    task: Task,
    pages: usize,
    bytes: usize,
    submitted: Instant,
    deadline: Option<Instant>,
    recall: Option<Arc<Recall>>,
    /// It was given up.
    is_reported: bool,
}

/// A finished job.
#[derive(Debug)]
pub struct Done {
    /// Its number.
    pub job: u64,
    /// One [`Status`] a page.
    pub statuses: Vec<u8>,
    /// From submit to finish.
    pub took: Duration,
    /// Bytes of the pages that were read or written.
    pub bytes: usize,
    /// Bytes of all its pages.
    held: usize,
}

/// Why a job is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The limits are reached.
    #[error("the queue is full: poll finished jobs, or submit later")]
    Full,
    /// The pages of the job are more than an empty queue takes.
    #[error(
        "the pages of the job have {bytes} bytes, and the queue takes at most {limit} (`bytes`): \
         split the job, or make a queue with a higher limit"
    )]
    TooLarge {
        /// Bytes of its pages.
        bytes: usize,
        /// The queue's limit.
        limit: usize,
    },
    /// The namespace is of another handle of a store.
    #[error(
        "the namespace is of another store: it was made by the handle of {theirs}, the queue by a \
         handle of {ours}"
    )]
    OtherStore {
        /// The volume of the namespace.
        theirs: String,
        /// The volume of the queue.
        ours: String,
    },
    /// The queue or the store is closed.
    #[error("the queue is closed")]
    Closed,
    /// This process is a forked child.
    #[error(transparent)]
    Forked(StoreError),
    /// There is no thread for it.
    #[error("no thread can be started: {0}; raise the limit on threads (ulimit -u, TasksMax=)")]
    Thread(io::Error),
}

/// Counts since the queue was made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Jobs accepted.
    pub submitted: u64,
    /// Jobs not accepted, since the queue was full.
    pub refused: u64,
    /// Touches dropped, since the queue was full.
    pub dropped_touches: u64,
    /// Jobs that had not started by their deadline, and lookups without an answer by it.
    pub late: u64,
    /// Jobs that the device held beyond their deadline.
    pub stuck: u64,
}

#[derive(Default)]
struct State {
    next: u64,
    waiting: [BTreeMap<u64, Numbered>; LANES],
    running: HashMap<u64, Running>,
    /// The deadlines of waiting and running jobs.
    due: BTreeSet<(Instant, u64)>,
    done: VecDeque<Done>,
    /// Jobs accepted and not reported, touches included; and bytes of their pages.
    held: usize,
    held_bytes: usize,
    started: [usize; LANES],
    idle: [usize; LANES],
    has_timekeeper: bool,
    refuses: bool,
    counters: Counters,
}

/// See the module.
pub struct Queue {
    handle: Arc<Handle>,
    limits: Limits,
    state: Mutex<State>,
    work: [Condvar; LANES],
    /// A job has finished.
    finished: Condvar,
    /// The first deadline has changed, or the queue refuses jobs.
    clock: Condvar,
    event: OwnedFd,
    lates: Seldom,
    origin: Origin,
}

impl Queue {
    /// A queue of jobs on a store.
    ///
    /// # Errors
    /// There is no file descriptor for its event.
    pub fn new(handle: &Arc<Handle>, limits: Limits) -> io::Result<Arc<Queue>> {
        descriptors::cover()?;
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let queue = Arc::new(Queue {
            handle: handle.clone(),
            limits,
            state: Mutex::default(),
            work: Default::default(),
            finished: Condvar::new(),
            clock: Condvar::new(),
            event,
            lates: Seldom::default(),
            origin: Origin::here(),
        });
        handle.watch(&queue);
        Ok(queue)
    }

    /// The descriptor that is readable while there are finished jobs.
    pub fn event_fd(&self) -> i32 {
        self.event.as_raw_fd()
    }

    /// Queues a job. Returns its number. Never waits.
    ///
    /// # Errors
    /// See [`SubmitError`]: then nothing was accepted.
    pub fn submit(self: &Arc<Self>, job: Job) -> Result<u64, SubmitError> {
        if self.origin.is_inherited() {
            return Err(SubmitError::Forked(StoreError::Forked));
        }
        if !Arc::ptr_eq(&job.space.handle, &self.handle) {
            let name = |handle: &Handle| handle.volume().display().to_string();
            return Err(SubmitError::OtherStore {
                theirs: name(&job.space.handle),
                ours: name(&self.handle),
            });
        }
        let bytes = job.bytes();
        if bytes > self.limits.bytes {
            let limit = self.limits.bytes;
            return Err(SubmitError::TooLarge { bytes, limit });
        }
        let submitted = Instant::now();
        let mut state = self.state.lock();
        if state.refuses {
            return Err(SubmitError::Closed);
        }
        let is_full = state.held >= self.limits.jobs
            || bytes > self.limits.bytes.saturating_sub(state.held_bytes);
        if is_full {
            match job.task {
                Task::Touch | Task::Unlease | Task::Pin { .. } => {
                    state.counters.dropped_touches += 1;
                }
                _ => state.counters.refused += 1,
            }
            return Err(SubmitError::Full);
        }
        let lane = job.task.lane();
        let lookup = match job.task {
            // An owner answers from memory.
            Task::Lookup { leases } if self.handle.is_owner() => Some(leases),
            _ => None,
        };
        if lookup.is_none() {
            self.staff(&mut state, lane, job.deadline.is_some())?;
        }
        let number = state.next;
        state.next += 1;
        state.held += 1;
        state.held_bytes += bytes;
        state.counters.submitted += 1;
        if let Some(leases) = lookup {
            drop(state);
            let done = Done {
                job: number,
                statuses: work::look_up(&job, leases),
                took: submitted.elapsed(),
                bytes: 0,
                held: 0,
            };
            self.report(&mut self.state.lock(), done);
            return Ok(number);
        }
        if let Some(deadline) = job.deadline {
            let is_first = state.due.first().is_none_or(|(first, _)| deadline < *first);
            state.due.insert((deadline, number));
            if is_first {
                self.clock.notify_one();
            }
        }
        let numbered = Numbered {
            number,
            submitted,
            job,
        };
        state.waiting[lane].insert(number, numbered);
        drop(state);
        self.work[lane].notify_one();
        Ok(number)
    }

    /// Finished jobs, at most `limit`; each is returned once.
    pub fn poll(&self, limit: usize) -> Vec<Done> {
        if self.origin.is_inherited() {
            return Vec::new();
        }
        let mut state = self.state.lock();
        if state.done.is_empty() {
            return Vec::new();
        }
        let count = limit.min(state.done.len());
        let done: Vec<Done> = state.done.drain(..count).collect();
        state.held -= done.len();
        state.held_bytes -= done.iter().map(|done| done.held).sum::<usize>();
        if state.done.is_empty() {
            let mut count = [0; 8];
            // Empty already if the caller read it.
            let _ = rustix::io::read(&self.event, &mut count);
        }
        done
    }

    /// Takes finished jobs back that did not reach the caller: the next poll returns them.
    pub fn put_back(&self, done: Vec<Done>) {
        if done.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        state.held += done.len();
        state.held_bytes += done.iter().map(|done| done.held).sum::<usize>();
        for done in done.into_iter().rev() {
            state.done.push_front(done);
        }
        self.signal();
    }

    /// Waits until there is a finished job to poll. False if `until` passed first, or if the queue
    /// is over.
    pub fn wait(&self, until: Option<Instant>) -> bool {
        self.wait_for(until, |state| !state.done.is_empty() || state.is_over());
        !self.origin.is_inherited() && !self.state.lock().done.is_empty()
    }

    /// Whether the queue is closed, and each of its jobs was polled.
    pub fn is_over(&self) -> bool {
        !self.origin.is_inherited() && self.state.lock().is_over()
    }

    /// Waits until no job waits or runs. False if `until` passed first.
    pub fn drain(&self, until: Option<Instant>) -> bool {
        self.wait_for(until, State::is_quiet)
    }

    fn wait_for(&self, until: Option<Instant>, is_so: impl Fn(&State) -> bool) -> bool {
        if self.origin.is_inherited() {
            return false;
        }
        let mut state = self.state.lock();
        while !is_so(&state) {
            match until {
                None => self.finished.wait(&mut state),
                Some(until) => {
                    if self.finished.wait_until(&mut state, until).timed_out() {
                        return is_so(&state);
                    }
                }
            }
        }
        true
    }

    /// Accepted jobs that have not finished.
    pub fn pending(&self) -> usize {
        match self.origin.is_inherited() {
            true => 0,
            false => self.state.lock().pending(),
        }
    }

    /// Jobs that the device holds beyond their deadline, now.
    pub fn stuck(&self) -> usize {
        if self.origin.is_inherited() {
            return 0;
        }
        let now = Instant::now();
        let is_stuck = |running: &&Running| {
            running.task.has_rows() && running.deadline.is_some_and(|deadline| deadline < now)
        };
        self.state.lock().running.values().filter(is_stuck).count()
    }

    /// Counts so far.
    pub fn counters(&self) -> Counters {
        match self.origin.is_inherited() {
            true => Counters::default(),
            false => self.state.lock().counters,
        }
    }

    /// Refuses further jobs. Jobs that wait finish as closed, but leases are returned.
    pub fn refuse(&self) {
        if self.origin.is_inherited() {
            return;
        }
        let mut state = self.state.lock();
        state.refuses = true;
        for lane in 0..LANES {
            let is_given_up =
                |_: &u64, waiting: &mut Numbered| !matches!(waiting.job.task, Task::Unlease);
            let given_up: Vec<_> = state.waiting[lane].extract_if(.., is_given_up).collect();
            for (_, waiting) in given_up {
                self.give_up(&mut state, waiting, Status::Closed);
            }
            self.work[lane].notify_all();
        }
        self.clock.notify_all();
        self.finished.notify_all();
    }

    /// Refuses further jobs, and waits for running jobs. False if `until` passed first.
    pub fn close(&self, until: Option<Instant>) -> bool {
        self.refuse();
        self.origin.is_inherited() || self.drain(until)
    }

    /// Ends a job that no thread does.
    fn give_up(&self, state: &mut State, waiting: Numbered, why: Status) {
        let Numbered {
            number,
            submitted,
            job,
        } = waiting;
        if let Some(deadline) = job.deadline {
            state.due.remove(&(deadline, number));
        }
        if !job.task.is_reported() {
            state.held -= 1;
            self.finished.notify_all();
            return;
        }
        let done = Done {
            job: number,
            statuses: all(why, job.keys.len()),
            took: submitted.elapsed(),
            bytes: 0,
            held: job.bytes(),
        };
        self.report(state, done);
    }

    /// Lets the caller have a finished job.
    fn report(&self, state: &mut State, done: Done) {
        state.done.push_back(done);
        self.signal();
    }

    /// There is a finished job.
    fn signal(&self) {
        // Fails only when 2^64 jobs are unreported.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        self.finished.notify_all();
    }

    /// Ensures that there are threads for a job of this lane.
    fn staff(
        self: &Arc<Self>,
        state: &mut MutexGuard<'_, State>,
        lane: usize,
        has_deadline: bool,
    ) -> Result<(), SubmitError> {
        let limit = if lane == 2 { 1 } else { self.limits.threads };
        let is_short = state.idle[lane] <= state.waiting[lane].len();
        if is_short && state.started[lane] < limit {
            let queue = self.clone();
            match spawn(
                ["larder-reads", "larder-writes", "larder-asks"][lane],
                move || {
                    queue.work(lane);
                },
            ) {
                Ok(()) => state.started[lane] += 1,
                Err(error) if state.started[lane] == 0 => return Err(SubmitError::Thread(error)),
                // The others do its work.
                Err(_) => {}
            }
        }
        if has_deadline && !state.has_timekeeper {
            let queue = self.clone();
            spawn("larder-timer", move || queue.keep_time()).map_err(SubmitError::Thread)?;
            state.has_timekeeper = true;
        }
        Ok(())
    }
}

impl State {
    fn is_over(&self) -> bool {
        self.refuses && self.is_quiet() && self.done.is_empty()
    }

    fn is_quiet(&self) -> bool {
        self.pending() == 0
    }

    fn pending(&self) -> usize {
        self.waiting.iter().map(BTreeMap::len).sum::<usize>() + self.running.len()
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(work).map(drop)
}
