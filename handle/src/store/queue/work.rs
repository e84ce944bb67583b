//! The threads of a queue: workers and the timekeeper.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use larder_engine::{Hint, PutOptions};
use larder_sync::MutexGuard;

use super::{Done, Job, Numbered, Queue, Running, State, Task};
use crate::region::{slices, slices_mut};
use crate::status::Status;
use crate::store::all;

/// Pause between two attempts to recall a put.
const RECALL_AGAIN: Duration = Duration::from_millis(1);

impl Queue {
    /// Does the jobs of a lane until the queue refuses more.
    pub(super) fn work(&self, lane: usize) {
        let mut state = self.state.lock();
        loop {
            let Some((_, next)) = state.waiting[lane].pop_first() else {
                if state.refuses {
                    state.started[lane] -= 1;
                    return;
                }
                state.idle[lane] += 1;
                self.work[lane].wait(&mut state);
                state.idle[lane] -= 1;
                continue;
            };
            let Numbered {
                number,
                submitted,
                mut job,
            } = next;
            let running = Running {
                task: job.task,
                pages: job.keys.len(),
                bytes: job.bytes(),
                submitted,
                deadline: job.deadline,
                recall: job.recall.clone(),
                is_reported: false,
            };
            state.running.insert(number, running);
            drop(state);
            let statuses = run(&job);
            let page_bytes = job.space.page_bytes();
            // Before it is reported: the caller may free the owner of the rows.
            drop(job.rows.take());
            state = self.state.lock();
            if !self.finish(&mut state, number, &statuses, page_bytes) {
                drop(state);
                drop_leases(&job, &statuses);
                state = self.state.lock();
            }
        }
    }

    /// Reports a job that ran, unless the timekeeper has. Whether it did.
    fn finish(&self, state: &mut State, number: u64, statuses: &[u8], page_bytes: usize) -> bool {
        let Some(running) = state.running.remove(&number) else {
            return false;
        };
        if let Some(deadline) = running.deadline {
            state.due.remove(&(deadline, number));
        }
        if running.is_reported {
            self.finished.notify_all();
            return true;
        }
        if !running.task.is_reported() {
            state.held -= 1;
            self.finished.notify_all();
            return true;
        }
        let is_good = |code: &&u8| **code <= Status::Duplicate as u8;
        let good = statuses.iter().filter(is_good).count();
        let bytes = if running.task.has_rows() {
            good * page_bytes
        } else {
            0
        };
        let done = Done {
            job: number,
            statuses: statuses.to_vec(),
            took: running.submitted.elapsed(),
            bytes,
            held: running.bytes,
        };
        self.report(state, done);
        true
    }

    /// Ends jobs at their deadlines, until the queue refuses more and has no deadline left.
    pub(super) fn keep_time(&self) {
        let mut state = self.state.lock();
        loop {
            let now = Instant::now();
            match state.due.first().copied() {
                Some((due, number)) if due <= now => {
                    state.due.pop_first();
                    if let Some(why) = self.expire(&mut state, number) {
                        // A log line may wait for its reader.
                        MutexGuard::unlocked(&mut state, || self.explain(why));
                    }
                }
                Some((due, _)) => {
                    self.clock.wait_until(&mut state, due);
                }
                None if state.refuses => {
                    state.has_timekeeper = false;
                    return;
                }
                None => self.clock.wait(&mut state),
            }
        }
    }

    /// The deadline of a job has passed. Returns a sentence for the log.
    fn expire(&self, state: &mut State, number: u64) -> Option<&'static str> {
        let lanes = &mut state.waiting;
        if let Some(waiting) = lanes.iter_mut().find_map(|lane| lane.remove(&number)) {
            state.counters.late += 1;
            self.give_up(state, waiting, Status::Deadline);
            return Some("jobs did not start by their deadline (counted in `late`)");
        }
        let running = state.running.get_mut(&number)?;
        if let Some(is_given_up) = running.recall.as_ref().map(|recall| recall.recall()) {
            if is_given_up {
                running.is_reported = true;
                let done = Done {
                    job: number,
                    statuses: all(Status::Hung, running.pages),
                    took: running.submitted.elapsed(),
                    bytes: 0,
                    held: running.bytes,
                };
                state.counters.stuck += 1;
                self.report(state, done);
                return Some("puts are given up at their deadline (counted in `stuck`)");
            }
            // It reads its rows at this moment.
            state.due.insert((Instant::now() + RECALL_AGAIN, number));
            return None;
        }
        if running.task.has_rows() {
            state.counters.stuck += 1;
            return Some(
                "jobs are in the device beyond their deadline, and are reported when it answers \
                 (counted in `stuck`)",
            );
        }
        let (statuses, took) = (
            all(Status::Deadline, running.pages),
            running.submitted.elapsed(),
        );
        let is_reported = running.task.is_reported();
        state.running.remove(&number);
        if !is_reported {
            state.held -= 1;
            return None;
        }
        state.counters.late += 1;
        let done = Done {
            job: number,
            statuses,
            took,
            bytes: 0,
            held: 0,
        };
        self.report(state, done);
        Some("lookups have no answer by their deadline (counted in `late`)")
    }

    fn explain(&self, what: &str) {
        if let Some(more) = self.lates.is_due() {
            let volume = self.handle.volume().display();
            tracing::warn!(
                more,
                "{volume}: {what}; the disk or the store's owner is slow"
            );
        }
    }
}

/// Answers a lookup.
pub(super) fn look_up(job: &Job, leases: bool) -> Vec<u8> {
    match leases {
        true => job.space.lease(&job.keys),
        false => job.space.contains(&job.keys, job.deadline),
    }
}

/// Returns the leases of a lookup whose answer came too late.
fn drop_leases(job: &Job, statuses: &[u8]) {
    if let Task::Lookup { leases: true } = job.task {
        let taken = job.keys.iter().zip(statuses);
        let taken = taken.filter(|(_, code)| **code == Status::Ok as u8);
        let keys: Vec<_> = taken.map(|(key, _)| *key).collect();
        job.space.unlease(&keys);
    }
}

/// Does a job, and returns one status a page.
fn run(job: &Job) -> Vec<u8> {
    let pages = job.keys.len();
    if job
        .deadline
        .is_some_and(|deadline| deadline <= Instant::now())
    {
        return all(Status::Deadline, pages);
    }
    let outcome = catch_unwind(AssertUnwindSafe(|| call(job)));
    outcome.unwrap_or_else(|_| {
        tracing::error!("a job failed in a way that should not be possible; its pages miss");
        all(Status::Other, pages)
    })
}

fn call(job: &Job) -> Vec<u8> {
    let (space, keys) = (&job.space, &job.keys);
    let starts = job.rows.as_ref().map_or(&[][..], |rows| &rows.starts);
    match job.task {
        Task::Get => {
            // SAFETY: no two parts overlap, and the region or the caller keeps them mapped. The
            // caller leaves the rows to the job until it is reported.
            let mut memory = unsafe { slices_mut(starts, &space.parts) };
            space.get(keys, &mut memory, job.deadline)
        }
        Task::Put { chain, options } => {
            // SAFETY: as above; the rows are only read, and after a recall not even that.
            let memory = unsafe { slices(starts, &space.parts) };
            let left = job
                .deadline
                .map(|end| end.saturating_duration_since(Instant::now()));
            let wait = options.wait.min(left.unwrap_or(Duration::MAX));
            let options = PutOptions::waiting(wait).hinting(options.hint);
            space.put(keys, chain, &memory, options, job.recall.as_deref())
        }
        Task::Lookup { leases } => look_up(job, leases),
        Task::Unlease => {
            space.unlease(keys);
            Vec::new()
        }
        Task::Touch => {
            space.touch(keys, Hint::default());
            Vec::new()
        }
        Task::Pin { until_unix_s } => {
            space.pin_unreported(keys, until_unix_s);
            Vec::new()
        }
    }
}
