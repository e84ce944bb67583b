//! Work on several runs at once, whose outcomes are taken in order.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::thread;

use larder_base::runtime::{Condvar, Mutex};
use larder_remote::flights::{Flight, Flights};

use crate::failure::Failure;

/// The state of the work.
struct Work<R> {
    flights: Flights,
    /// The next item.
    next: usize,
    outcomes: BTreeMap<usize, R>,
    /// No other item is begun.
    is_over: bool,
}

/// Does the work for items, so many at once and no more bytes in memory than [`Flights`] takes.
/// `each` gets the outcomes in the order of the items, until it breaks.
pub fn in_order<T: Sync, R: Send>(
    at_once: usize,
    items: &[T],
    bytes: impl Fn(&T) -> u64 + Sync,
    work: impl Fn(&T) -> R + Sync,
    mut each: impl FnMut(&T, R) -> Result<ControlFlow<()>, Failure>,
) -> Result<(), Failure> {
    let state = Mutex::new(Work {
        flights: Flights::new(at_once),
        next: 0,
        outcomes: BTreeMap::new(),
        is_over: false,
    });
    let changed = Condvar::new();
    let flight = |item: &T| Flight {
        bytes: bytes(item),
        requests: 1,
    };
    let worker = || {
        loop {
            let mut now = state.lock();
            let (at, item) = loop {
                let item = items.get(now.next).filter(|_| !now.is_over);
                let Some(item) = item else { return };
                if now.flights.has_room(flight(item)) {
                    break (now.next, item);
                }
                changed.wait(&mut now);
            };
            now.next += 1;
            now.flights.begin(flight(item));
            drop(now);
            let outcome = work(item);
            let mut now = state.lock();
            now.flights.answered(flight(item));
            now.outcomes.insert(at, outcome);
            changed.notify_all();
        }
    };
    let take = |at: usize| {
        let mut now = state.lock();
        loop {
            match now.outcomes.remove(&at) {
                Some(outcome) => return outcome,
                None => changed.wait(&mut now),
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..at_once.min(items.len()) {
            scope.spawn(worker);
        }
        let mut taken = Ok(ControlFlow::Continue(()));
        for (at, item) in items.iter().enumerate() {
            taken = each(item, take(at));
            let mut now = state.lock();
            now.flights.end(flight(item));
            now.is_over = !matches!(taken, Ok(ControlFlow::Continue(())));
            changed.notify_all();
            if now.is_over {
                break;
            }
        }
        taken.map(|_| ())
    })
}
