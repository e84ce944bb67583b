//! A queue of transfers, executed in order.
//!
//! Invariant: the thread holds no lock while it copies. While it holds the lock, it waits only for
//! work.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use larder_sync::{Condvar, Mutex};

use super::copy;
use super::faults::{Faults, Moment};
use crate::error::DeviceError;
use crate::ticket::{Promise, Ticket};
use crate::transfer::{Direction, Plan};

/// One direction of a host device.
pub(super) struct Stream {
    direction: Direction,
    faults: Arc<Faults>,
    line: Arc<Line>,
}

/// The part of a stream that wakers can reach.
struct Line {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    closed: bool,
}

/// A queued or running transfer.
pub(super) struct Job {
    plan: Arc<Plan>,
    /// The remaining promises: one per layer, or one for all layers.
    promises: VecDeque<Promise>,
    after: Ticket,
    next_layer: u32,
    _counted: Counted,
}

/// Counts a job while it lives.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Job {
    /// The caller has already incremented `in_flight` for this job. The drop of the job decrements
    /// it.
    pub(super) fn new(
        plan: Arc<Plan>,
        promises: VecDeque<Promise>,
        after: Ticket,
        in_flight: Arc<AtomicUsize>,
    ) -> Job {
        Job {
            next_layer: plan.layers.start,
            plan,
            promises,
            after,
            _counted: Counted(in_flight),
        }
    }

    fn is_over(&self) -> bool {
        self.promises.is_empty()
    }

    /// Fails all remaining promises.
    fn fail(&mut self, error: &DeviceError) {
        for promise in self.promises.drain(..) {
            promise.settle(Err(error.clone()));
        }
    }

    /// Copies one layer.
    fn advance(&mut self, direction: Direction, faults: &Faults) {
        let layer = self.next_layer;
        if let Err(error) = faults(Moment::Copy(direction, layer)) {
            self.fail(&error);
            return;
        }
        // SAFETY: the device accepts only its own pools, which are in host memory. The creator of
        // the transfer guarantees exclusive access to its pages until it is handed back. The
        // promises left in this job prevent the hand-back. `after` has settled.
        unsafe { copy::layer(&self.plan, direction, layer) };
        self.next_layer += 1;
        let left = self.plan.layers.end - self.next_layer;
        // A store has one promise, settled with the last layer. A load has one per layer.
        if self.promises.len() > left as usize
            && let Some(promise) = self.promises.pop_front()
        {
            promise.settle(Ok(()));
        }
    }
}

impl Stream {
    pub(super) fn new(direction: Direction, faults: Arc<Faults>) -> Stream {
        Stream {
            direction,
            faults,
            line: Arc::new(Line {
                state: Mutex::default(),
                changed: Condvar::new(),
            }),
        }
    }

    pub(super) fn push(&self, job: Job) {
        self.line.state.lock().jobs.push_back(job);
        self.line.changed.notify_one();
    }

    /// Executes transfers until the stream is closed.
    pub(super) fn run(&self) {
        let waker = Waker::from(self.line.clone());
        while let Some(mut job) = self.next(&waker) {
            while !job.is_over() {
                if self.line.state.lock().closed {
                    job.fail(&DeviceError::Closed);
                    return;
                }
                job.advance(self.direction, &self.faults);
            }
        }
    }

    /// Waits for the next transfer that may begin. `None` after the stream is closed.
    fn next(&self, waker: &Waker) -> Option<Job> {
        let mut state = self.line.state.lock();
        loop {
            if state.closed {
                return None;
            }
            match state.ready(waker) {
                Some(job) => return Some(job),
                None => self.line.changed.wait(&mut state),
            }
        }
    }

    /// Executes one layer of the transfer at the head, if it may begin.
    pub(super) fn step(&self) -> bool {
        let Some(mut job) = self.line.state.lock().ready(Waker::noop()) else {
            return false;
        };
        if !job.is_over() {
            job.advance(self.direction, &self.faults);
        }
        if !job.is_over() {
            self.line.state.lock().jobs.push_front(job);
        }
        true
    }

    /// Fails all queued transfers and ends the thread.
    pub(super) fn close(&self) {
        let jobs = {
            let mut state = self.line.state.lock();
            state.closed = true;
            std::mem::take(&mut state.jobs)
        };
        self.line.changed.notify_all();
        for mut job in jobs {
            job.fail(&DeviceError::Closed);
        }
    }
}

impl State {
    /// Takes the head of the queue if its `after` has settled. Otherwise registers `waker` with
    /// `after`.
    fn ready(&mut self, waker: &Waker) -> Option<Job> {
        let after = &self.jobs.front()?.after;
        let Poll::Ready(outcome) = after.poll_settled(&Context::from_waker(waker)) else {
            return None;
        };
        let mut job = self.jobs.pop_front()?;
        if let Err(error) = outcome {
            job.fail(&DeviceError::After(Arc::new(error)));
        }
        Some(job)
    }
}

impl Wake for Line {
    fn wake(self: Arc<Self>) {
        // Takes the lock so that the notification cannot fall between the check of the ticket and
        // the wait.
        let _state = self.state.lock();
        self.changed.notify_one();
    }
}
