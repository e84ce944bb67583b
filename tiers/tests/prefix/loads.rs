//! Sequences whose loads are in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use larder_kernels::host::Moment;
use larder_kernels::{DeviceError, Direction, HostDevice, Ticket};
use larder_tiers::core::Core;
use larder_tiers::prefix::{Kept, L1Memory, SequenceError};
use larder_tiers::{Ask, PrefixCache};

use super::engine::PAGE;
use super::honest::eventually;
use super::rules::{is_empty, options, prompt};
use super::{PATIENCE, serve, toy};

/// A cache that has three pages of [`prompt`] in L2 alone. The second layer of a load waits until
/// the flag is true, and ends as given.
pub fn with_a_held_load(outcome: Result<(), DeviceError>) -> (PrefixCache, Arc<AtomicBool>) {
    let may_end = Arc::new(AtomicBool::new(false));
    let is_free = may_end.clone();
    let device = HostDevice::with_faults(Box::new(move |moment| {
        if moment != Moment::Copy(Direction::Load, 1) {
            return Ok(());
        }
        eventually("the load may end", || is_free.load(Ordering::Acquire));
        outcome.clone()
    }));
    let options = options(10, 20).with(|o| {
        o.polls_itself = false;
        o.l1 = Some(L1Memory::Host(device.unwrap()));
    });
    let cache = options.over(None).unwrap();
    serve(&cache, &toy(), &prompt(3));
    assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
    cache.evict(10).unwrap();
    (cache, may_end)
}

#[test]
fn pages_computed_behind_a_load_in_flight_are_kept() {
    let (cache, may_load) = with_a_held_load(Ok(()));
    let all = prompt(6);
    let mut sequence = cache.begin(&all).unwrap();
    assert_eq!(
        (sequence.cached().l2, sequence.is_loaded()),
        (3 * PAGE, false)
    );
    // The forward of a device: launched behind the tickets of the load, and reported at once.
    let (promise, ticket) = Ticket::promised();
    sequence.computed_by(all.len(), &ticket).unwrap();
    // It does not wait, and gives nothing.
    sequence.share().unwrap();
    promise.settle(Ok(()));
    let inserts = || cache.with_core(Core::inserts_pending).unwrap();
    assert!(inserts() > 0);
    thread::scope(|scope| {
        let kept = scope.spawn(|| sequence.keep());
        // Only the call polls.
        eventually("the call has begun", || inserts() == 0);
        may_load.store(true, Ordering::Release);
        assert_eq!(kept.join().unwrap(), Ok(6 * PAGE));
    });
    assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
    assert_eq!(cache.begin(&all).unwrap().cached().tokens(), 6 * PAGE);
}

#[test]
fn a_load_does_not_wait_for_a_forward_that_had_none_of_its_pages() {
    let cache = options(20, 40).over(None).unwrap();
    serve(&cache, &toy(), &prompt(3));
    assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
    cache.evict(20).unwrap();
    let other: Vec<u64> = prompt(3).into_iter().rev().collect();
    let mut running = cache.begin(&other).unwrap();
    let (promise, ticket) = Ticket::promised();
    running.computed_by(other.len(), &ticket).unwrap();
    let again = cache.begin(&prompt(3)).unwrap();
    assert_eq!(again.cached().l2, 3 * PAGE);
    let slots = again.slots().unwrap();
    assert_eq!((slots.pages().len(), slots.tokens()), (4, prompt(3).len()));
    let taken = running.slots().unwrap();
    assert!(
        slots
            .pages()
            .iter()
            .all(|page| !taken.pages().contains(page))
    );
    slots.tickets(1).for_each(|ticket| ticket.wait().unwrap());
    assert!(again.is_loaded());
    promise.settle(Ok(()));
    drop((running, again));
    is_empty(&cache);
}

#[test]
fn nothing_of_a_forward_behind_a_load_that_fails_is_kept() {
    let (cache, may_fail) = with_a_held_load(Err(DeviceError::Closed));
    let all = prompt(6);
    let mut sequence = cache.begin(&all).unwrap();
    let slots = sequence.slots().unwrap();
    assert_eq!((sequence.cached().l2, slots.pages().len()), (3 * PAGE, 7));
    let load: Vec<Ticket> = slots.tickets(1).collect();
    let (promise, ticket) = Ticket::promised();
    sequence.computed_by(all.len(), &ticket).unwrap();
    promise.settle(Ok(()));
    assert_eq!(sequence.verify(), Ok(false));
    sequence.share().unwrap();
    may_fail.store(true, Ordering::Release);
    eventually("the load fails", || load.iter().all(Ticket::is_settled));
    eventually("the sequence is broken", || {
        let verified = sequence.verify();
        assert_ne!(verified, Ok(true));
        matches!(verified, Err(SequenceError::Broken(_)))
    });
    assert!(matches!(sequence.keep(), Err(SequenceError::Broken(_))));
    assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
    assert_eq!(cache.begin(&all).unwrap().cached().tokens(), 3 * PAGE);
}

#[test]
fn a_sequence_is_kept_without_a_wait_when_its_load_has_ended() {
    let (cache, may_load) = with_a_held_load(Ok(()));
    let all = prompt(3);
    let asked = cache.ask(&Ask::new(&all)).unwrap();
    let found = asked.cached().unwrap();
    assert_eq!((found.l1, found.l2, found.l3), (0, 3 * PAGE, 0));
    let mut sequence = asked.begin_within(PATIENCE).unwrap();
    sequence.computed(all.len()).unwrap();
    let mut kept = sequence.try_keep().unwrap();
    assert!(matches!(kept, Kept::Later(_)));
    assert_eq!(cache.is_settled(), Ok(false));
    may_load.store(true, Ordering::Release);
    eventually("the load has ended", || {
        if let Kept::Later(sequence) = std::mem::replace(&mut kept, Kept::Ended(0)) {
            kept = sequence.try_keep().unwrap();
        }
        matches!(kept, Kept::Ended(tokens) if tokens == 3 * PAGE)
    });
    eventually("the cache is settled", || cache.is_settled().unwrap());
    let again = cache.ask(&Ask::new(&all)).unwrap();
    assert_eq!(again.cached().unwrap().l1, 3 * PAGE);
    drop(again);
    // A handle of another thread.
    let cache = Arc::new(cache);
    thread::scope(|scope| {
        let other = cache.clone();
        scope.spawn(move || other.close().unwrap());
    });
    assert!(cache.stats().is_err());
    cache.close().unwrap();
}
