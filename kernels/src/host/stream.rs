//! A line of transfers, carried out in order.
//!
//! Invariant: while the thread works it holds no lock, and while it holds the lock it never waits for anything but work.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use parking_lot::{Condvar, Mutex};

use super::{Faults, Moment, copy};
use crate::error::DeviceError;
use crate::ticket::{Promise, Ticket};
use crate::transfer::{Direction, Plan};

/// One direction of a host device.
pub(super) struct Stream {
    direction: Direction,
    faults: Arc<Faults>,
    line: Arc<Line>,
}

/// What wakers reach.
struct Line {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    closed: bool,
}

/// A transfer on its way.
pub(super) struct Job {
    plan: Arc<Plan>,
    /// One a layer, or one for all; those that are left.
    promises: VecDeque<Promise>,
    after: Ticket,
    next_layer: u32,
    _counted: Counted,
}

/// Counts a job for as long as it lives.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Job {
    /// `in_flight` has been raised for this job, and sinks when it ends.
    pub(super) fn new(
        plan: Arc<Plan>,
        promises: VecDeque<Promise>,
        after: Ticket,
        in_flight: Arc<AtomicUsize>,
    ) -> Job {
        Job {
            plan,
            promises,
            after,
            next_layer: 0,
            _counted: Counted(in_flight),
        }
    }

    fn is_over(&self) -> bool {
        self.promises.is_empty()
    }

    /// All that is left of it fails.
    fn fail(&mut self, error: &DeviceError) {
        for promise in self.promises.drain(..) {
            promise.settle(Err(error.clone()));
        }
    }

    /// One layer.
    fn advance(&mut self, direction: Direction, faults: &Faults) {
        let layer = self.next_layer;
        if let Err(error) = faults(Moment::Copy(direction, layer)) {
            self.fail(&error);
            return;
        }
        // SAFETY: the device takes only pools of its own, which are in host memory. Whoever made the transfer vouched for its pages
        // until it is handed back, which the promises left in this job prevent; `after` has settled.
        unsafe { copy::layer(&self.plan, direction, layer) };
        self.next_layer += 1;
        let left = self.plan.l1.shape().layers() - self.next_layer;
        // Of a store there is one promise, kept with the last layer; of a load one a layer.
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

    /// Carries transfers out until the stream is closed.
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

    /// The next transfer that may begin; waits for one. None once the stream is closed.
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

    /// One layer of the transfer at the head, if it may begin.
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

    /// Fails what is in line, and ends the thread.
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
    /// Takes the head of the line if its `after` has settled; else has `waker` woken when it does.
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
        // With the lock, so that it cannot fall between a look at the ticket and the wait.
        let _state = self.state.lock();
        self.changed.notify_one();
    }
}
