//! The functions of queues.

use std::collections::HashMap;
use std::sync::Arc;

use larder_format::PageKey;
use larder_handle::store::Space;
use larder_handle::store::queue::{Done, Job, Limits, Queue as Inner, Rows, Task};
use larder_sync::Mutex;

use crate::answer::{Code, Error, Failure, answer, caught};
use crate::given;
use crate::pages::{Namespace, putting};
use crate::store::{Owner, Store};
use crate::types::{Finished, Part, PutOptions, QueueOptions};

/// `larder_queue`.
pub struct Queue {
    inner: Arc<Inner>,
    /// Jobs that were not polled yet, by their number. Locked while a job is submitted, so that a
    /// poll finds each.
    jobs: Mutex<HashMap<u64, Posted>>,
    owner: Arc<Owner>,
}

/// What the caller gave with a job.
struct Posted {
    tag: u64,
    statuses: Statuses,
}

/// Where the statuses of a job go.
struct Statuses(*mut u8);

// SAFETY: the memory belongs to the job, which is with one thread at a time.
unsafe impl Send for Statuses {}

impl Drop for Queue {
    fn drop(&mut self) {
        self.inner.close(None);
    }
}

fn limit(name: &str, given: u64, usual: usize, most: usize) -> Result<usize, Failure> {
    match usize::try_from(given) {
        Ok(0) => Ok(usual),
        Ok(given) if given <= most => Ok(given),
        _ => Err(Failure::argument(format!(
            "`{name}`: {given} is more than {most}"
        ))),
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_queue_open(
    store: *mut Store,
    options: *const QueueOptions,
    queue: *mut *mut Queue,
    error: *mut *mut Error,
) -> i32 {
    let call = || {
        let place = given::place(queue, "queue")?;
        // SAFETY: by the header.
        let store = unsafe { given::object(store, "store") }?;
        // SAFETY: by the header.
        let options = unsafe { given::options(options) }?;
        let limits = Limits {
            threads: limit("threads", options.threads, 2, 64)?,
            jobs: limit("jobs", options.jobs, 1024, 1 << 32)?,
            bytes: limit("job_bytes", options.job_bytes, usize::MAX, usize::MAX)?,
        };
        let owner = store.owner.clone();
        owner.handle.refuse_closed()?;
        let failed = |error| Failure::new(Code::Store, format!("making an eventfd: {error}"));
        let inner = Inner::new(&owner.handle, limits).map_err(failed)?;
        let jobs = Mutex::default();
        let made = Queue { inner, jobs, owner };
        // SAFETY: by the header.
        unsafe { place.write(Box::into_raw(Box::new(made))) };
        Ok(())
    };
    // SAFETY: by the header.
    unsafe { answer("larder_queue_open", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_queue_fd(queue: *const Queue) -> i32 {
    // SAFETY: by the header.
    let queue = unsafe { queue.as_ref() };
    let number = || queue.map_or(-1, |queue| queue.inner.event_fd());
    caught("larder_queue_fd", number).unwrap_or(-1)
}

/// What both kinds of jobs have in common.
struct Posting {
    queue: *mut Queue,
    ns: *mut Namespace,
    keys: *const u8,
    parts: *const Part,
    pages: usize,
    timeout_ms: u64,
    tag: u64,
    statuses: *mut u8,
    job: *mut u64,
}

impl Posting {
    /// Queues a job.
    ///
    /// # Safety
    /// By the header.
    unsafe fn submit(&self, task: impl FnOnce() -> Result<Task, Failure>) -> Result<(), Failure> {
        // SAFETY: by the header.
        let queue = unsafe { given::object(self.queue, "queue") }?;
        // SAFETY: by the header.
        let ns = unsafe { given::object(self.ns, "ns") }?;
        // SAFETY: by the header.
        let keys: &[PageKey] = unsafe { given::keys(self.keys, self.pages) }?;
        let space: &Arc<Space> = &ns.space;
        let task = task()?;
        let apart = matches!(task, Task::Get);
        // SAFETY: by the header.
        let starts = unsafe { given::part_starts(self.parts, self.pages, &space.parts, apart) }?;
        given::place_for(self.statuses, self.pages)?;
        let job = Job {
            task,
            space: space.clone(),
            keys: keys.to_vec(),
            rows: Some(Rows {
                region: None,
                starts,
            }),
            deadline: given::moment(self.timeout_ms),
            recall: None,
        };
        queue.refuse_forked()?;
        let posted = Posted {
            tag: self.tag,
            statuses: Statuses(self.statuses),
        };
        let mut jobs = queue.jobs.lock();
        let number = queue.inner.submit(job)?;
        jobs.insert(number, posted);
        drop(jobs);
        // SAFETY: by the header.
        unsafe { given::set(self.job, number) };
        Ok(())
    }
}

impl Queue {
    fn refuse_forked(&self) -> Result<(), Failure> {
        match self.owner.handle.is_inherited() {
            true => Err(larder_engine::StoreError::Forked.into()),
            false => Ok(()),
        }
    }

    /// Gives the statuses of a finished job to the caller.
    ///
    /// # Safety
    /// By the header.
    unsafe fn hand_over(&self, done: &Done) -> Option<Finished> {
        let posted = self.jobs.lock().remove(&done.job)?;
        // SAFETY: the memory was the job's until now, by the header.
        unsafe { given::set_all(posted.statuses.0, &done.statuses) };
        Some(Finished {
            job: done.job,
            tag: posted.tag,
            pages: done.statuses.len(),
        })
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_submit_put(
    queue: *mut Queue,
    ns: *mut Namespace,
    keys: *const u8,
    parts: *const Part,
    pages: usize,
    options: *const PutOptions,
    timeout_ms: u64,
    tag: u64,
    statuses: *mut u8,
    job: *mut u64,
    error: *mut *mut Error,
) -> i32 {
    let posting = Posting {
        queue,
        ns,
        keys,
        parts,
        pages,
        timeout_ms,
        tag,
        statuses,
        job,
    };
    let task = || {
        // SAFETY: by the header.
        let (chain, options) = unsafe { putting(options) }?;
        Ok(Task::Put { chain, options })
    };
    // SAFETY: by the header.
    let call = || unsafe { posting.submit(task) };
    // SAFETY: by the header.
    unsafe { answer("larder_submit_put", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_submit_get(
    queue: *mut Queue,
    ns: *mut Namespace,
    keys: *const u8,
    parts: *const Part,
    pages: usize,
    timeout_ms: u64,
    tag: u64,
    statuses: *mut u8,
    job: *mut u64,
    error: *mut *mut Error,
) -> i32 {
    let posting = Posting {
        queue,
        ns,
        keys,
        parts,
        pages,
        timeout_ms,
        tag,
        statuses,
        job,
    };
    // SAFETY: by the header.
    let call = || unsafe { posting.submit(|| Ok(Task::Get)) };
    // SAFETY: by the header.
    unsafe { answer("larder_submit_get", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_poll(
    queue: *mut Queue,
    finished: *mut Finished,
    room: usize,
    wait_ms: u64,
    count: *mut usize,
    error: *mut *mut Error,
) -> i32 {
    let call = || {
        let place = given::place(count, "count")?;
        // SAFETY: by the header.
        let queue = unsafe { given::object(queue, "queue") }?;
        if room > 0 {
            given::place(finished, "finished")?;
        }
        queue.refuse_forked()?;
        if room > 0 && wait_ms > 0 {
            queue.inner.wait(given::moment(wait_ms));
        }
        let done = queue.inner.poll(room);
        if done.is_empty() && queue.inner.is_over() {
            return Err(larder_engine::StoreError::Closed.into());
        }
        // SAFETY: by the header.
        let handed = done
            .iter()
            .filter_map(|done| unsafe { queue.hand_over(done) });
        let handed: Vec<Finished> = handed.collect();
        // SAFETY: by the header; no more than there is room for.
        unsafe { given::set_all(finished, &handed) };
        // SAFETY: by the header.
        unsafe { place.write(handed.len()) };
        Ok(())
    };
    // SAFETY: by the header.
    unsafe { answer("larder_poll", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_queue_free(queue: *mut Queue) {
    // SAFETY: by the header.
    unsafe { given::release("larder_queue_free", queue) };
}
