//! The requests whose futures wait, in the order in which they began to wait.
//!
//! Progress wakes a request if its prefetch is over, or if L1 has room for it beside the requests
//! that were woken before it and have not begun. A request that is woken and does not come back
//! loses that room after a while.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use crate::cache::Cache;
use crate::core::PrefetchId;
use crate::prompt::Prompt;

/// A place in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(u64);

/// What a request waits for.
pub(super) enum Need {
    /// The end of its prefetch.
    Prefetch(PrefetchId),
    /// Room in L1 for so many pages, some of which the tree may have.
    Room { pages: usize, prompt: Arc<Prompt> },
}

struct Waiter {
    place: Place,
    need: Need,
    /// `None`: it was woken, and has not come back.
    waker: Option<Waker>,
}

/// See the module documentation.
#[derive(Default)]
pub(super) struct Queue {
    waiters: Vec<Waiter>,
    last: u64,
    /// When it was last examined.
    examined: Option<Instant>,
}

impl Queue {
    pub(super) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Whether requests wait, and were not examined for a while.
    pub(super) fn is_overdue(&mut self, pause: Duration) -> bool {
        let is_late = self.examined.is_none_or(|last| last.elapsed() >= pause);
        if is_late {
            // They may never come back: their room is for others.
            self.waiters.retain(|waiter| waiter.waker.is_some());
        }
        is_late && !self.waiters.is_empty()
    }

    /// A request waits, at its place if it has waited before.
    pub(super) fn wait(&mut self, place: Option<Place>, need: Need, waker: &Waker) -> Place {
        let known = |waiter: &&mut Waiter| Some(waiter.place) == place;
        if let Some(waiter) = self.waiters.iter_mut().find(known) {
            (waiter.need, waiter.waker) = (need, Some(waker.clone()));
            return waiter.place;
        }
        let place = place.unwrap_or_else(|| {
            self.last += 1;
            Place(self.last)
        });
        let waiter = Waiter {
            place,
            need,
            waker: Some(waker.clone()),
        };
        let before = |of: &Waiter| of.place.0 < place.0;
        let at = self.waiters.partition_point(before);
        self.waiters.insert(at, waiter);
        place
    }

    /// A request waits no longer.
    pub(super) fn leave(&mut self, place: Place) {
        self.waiters.retain(|waiter| waiter.place != place);
    }

    /// The wakers of the requests that can go on. Each is taken once.
    pub(super) fn ready(&mut self, cache: &mut Cache) -> Vec<Waker> {
        if self.waiters.is_empty() {
            return Vec::new();
        }
        self.examined = Some(Instant::now());
        let mut room = cache.core().available_pages();
        let mut ready = Vec::new();
        for waiter in &mut self.waiters {
            let can_go_on = match &waiter.need {
                Need::Prefetch(id) => cache.is_prefetch_over(*id),
                Need::Room { pages, prompt } => {
                    let needed = cache.core().room_for(prompt, *pages);
                    let has_room = needed <= room;
                    if has_room {
                        room -= needed;
                    }
                    has_room
                }
            };
            if can_go_on {
                ready.extend(waiter.waker.take());
            }
        }
        ready
    }

    /// The wakers of all requests: the cache has ended.
    pub(super) fn take_all(&mut self) -> Vec<Waker> {
        let waiters = self.waiters.drain(..);
        waiters.filter_map(|waiter| waiter.waker).collect()
    }
}
