//! What the handle of a transfer and its thread share.
//!
//! Invariant: the thread publishes the end, with the sequence, when it will not touch the sequence
//! any more. So a handle that has the end has the only way to the pages.

use std::sync::Arc;
use std::time::Duration;

use larder_base::fork::Origin;
use larder_base::runtime::after;
use larder_sync::{Condvar, Mutex};

use super::link::{Link, Waker};
use super::wire::Hello;
use super::{Ended, Sending, State, Transfer, TransferError};
use crate::prefix::Sequence;

pub(super) struct Slot {
    inner: Mutex<Inner>,
    changed: Condvar,
    pub(super) waker: Waker,
    origin: Origin,
}

struct Inner {
    state: State,
    news: News,
    end: End,
}

enum End {
    None,
    Published(Box<Ended>),
    Taken,
}

/// What the thread has not seen.
#[derive(Default)]
pub(super) struct News {
    pub(super) given: Option<(Sequence, Vec<u8>)>,
    /// Receivers.
    pub(super) arrived: Vec<(Link, Hello)>,
    pub(super) is_ending: bool,
}

impl Slot {
    /// # Errors
    /// There is no descriptor.
    pub(super) fn new() -> Result<Arc<Slot>, TransferError> {
        Ok(Arc::new(Slot {
            inner: Mutex::new(Inner {
                state: State::Bootstrapping,
                news: News::default(),
                end: End::None,
            }),
            changed: Condvar::default(),
            waker: Waker::new()?,
            origin: Origin::here(),
        }))
    }

    /// For the thread.
    pub(super) fn news(&self) -> News {
        let mut inner = self.inner.lock();
        let is_ending = inner.news.is_ending;
        let news = std::mem::take(&mut inner.news);
        inner.news.is_ending = is_ending;
        news
    }

    pub(super) fn reach(&self, state: State) {
        self.inner.lock().state = state;
    }

    /// A receiver has come. It is dropped after the end.
    pub(super) fn arrive(&self, link: Link, hello: Hello) {
        let mut inner = self.inner.lock();
        if matches!(inner.end, End::None) {
            inner.news.arrived.push((link, hello));
        }
        drop(inner);
        self.waker.wake();
    }

    fn give(&self, sequence: Sequence, note: &[u8]) {
        let mut inner = self.inner.lock();
        match &mut inner.end {
            End::None => inner.news.given = Some((sequence, note.to_owned())),
            // It comes back with the end.
            End::Published(ended) => ended.sequence = Some(sequence),
            End::Taken => {}
        }
        drop(inner);
        self.waker.wake();
    }

    fn publish(&self, sequence: Option<Sequence>, outcome: Result<Vec<u8>, TransferError>) {
        let mut inner = self.inner.lock();
        let unseen = inner.news.given.take().map(|given| given.0);
        inner.news.arrived.clear();
        inner.state = match outcome {
            Ok(_) => State::Success,
            Err(_) => State::Failed,
        };
        inner.end = End::Published(Box::new(Ended {
            sequence: sequence.or(unseen),
            outcome,
        }));
        self.changed.notify_all();
    }
}

/// The duty of a thread to publish the end.
pub(super) struct Publishes(Option<Arc<Slot>>);

impl Publishes {
    pub(super) fn new(slot: Arc<Slot>) -> Publishes {
        Publishes(Some(slot))
    }

    pub(super) fn publish(
        mut self,
        sequence: Option<Sequence>,
        outcome: Result<Vec<u8>, TransferError>,
    ) {
        if let Some(slot) = self.0.take() {
            slot.publish(sequence, outcome);
        }
    }
}

impl Drop for Publishes {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            let why = "a panic".to_owned();
            let what = "the thread of a transfer".to_owned();
            slot.publish(None, Err(TransferError::System { what, why }));
        }
    }
}

/// The handle of a transfer.
pub(super) struct Handle(pub(super) Arc<Slot>);

impl Handle {
    fn take(&self) -> Ended {
        let gone = || Ended {
            sequence: None,
            outcome: Err(TransferError::Ended),
        };
        if self.0.origin.is_inherited() {
            // A forked child does not have the thread, and the lock may be held for ever.
            return gone();
        }
        let mut inner = self.0.inner.lock();
        inner.news.is_ending = true;
        self.0.waker.wake();
        while matches!(inner.end, End::None) {
            self.0.changed.wait(&mut inner);
        }
        match std::mem::replace(&mut inner.end, End::Taken) {
            End::Published(ended) => *ended,
            End::None | End::Taken => gone(),
        }
    }
}

impl Transfer for Handle {
    fn state(&self) -> State {
        match self.0.origin.is_inherited() {
            true => State::Failed,
            false => self.0.inner.lock().state,
        }
    }

    fn wait(&self, most: Duration) -> State {
        if self.0.origin.is_inherited() {
            return State::Failed;
        }
        let until = after(most);
        let mut inner = self.0.inner.lock();
        while !inner.state.is_final() {
            if self.0.changed.wait_until(&mut inner, until).timed_out() {
                break;
            }
        }
        inner.state
    }

    fn end(self: Box<Self>) -> Ended {
        self.take()
    }
}

impl Sending for Handle {
    fn send(self: Box<Self>, sequence: Sequence, note: &[u8]) -> Box<dyn Transfer> {
        if !self.0.origin.is_inherited() {
            self.0.give(sequence, note);
        }
        self
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // The sequence ends in this thread: ranks drop theirs in the same order.
        drop(self.take());
    }
}
