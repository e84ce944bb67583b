//! Sequences whose loads are in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use larder_kernels::host::Moment;
use larder_kernels::{Direction, HostDevice, Ticket};
use larder_tiers::core::Core;
use larder_tiers::prefix::L1Memory;

use super::engine::PAGE;
use super::honest::eventually;
use super::rules::{options, prompt};
use super::{PATIENCE, serve, toy};

#[test]
fn pages_computed_behind_a_load_in_flight_are_kept() {
    let may_load = Arc::new(AtomicBool::new(false));
    let is_free = may_load.clone();
    let device = HostDevice::with_faults(Box::new(move |moment| {
        if moment == Moment::Copy(Direction::Load, 1) {
            eventually("the load may end", || is_free.load(Ordering::Acquire));
        }
        Ok(())
    }));
    let options = options(10, 20).with(|o| {
        o.polls_itself = false;
        o.l1 = Some(L1Memory::Host(device.unwrap()));
    });
    let cache = options.over(None).unwrap();
    serve(&cache, &toy(), &prompt(3));
    assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
    cache.evict(10).unwrap();
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
