//! Verifications of output behind loads that fail.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};

use larder_kernels::{DeviceError, Ticket};
use larder_tiers::Ask;
use larder_tiers::core::Broken;
use larder_tiers::prefix::{RowError, SequenceError};

use super::engine::PAGE;
use super::honest::eventually;
use super::loads::with_a_held_load;
use super::rules::{options, prompt};

/// Lets a load fail, and waits until it has.
struct Fails {
    may_fail: Arc<AtomicBool>,
    load: Mutex<Vec<Ticket>>,
}

impl Wake for Fails {
    fn wake(self: Arc<Self>) {
        self.may_fail.store(true, Ordering::Release);
        let load = self.load.lock().unwrap();
        eventually("the load fails", || load.iter().all(Ticket::is_settled));
    }
}

#[test]
fn a_load_that_fails_during_a_verification_is_not_verified() {
    let (cache, may_fail) = with_a_held_load(Err(DeviceError::Closed));
    let mut loading = cache.begin(&prompt(3)).unwrap();
    assert_eq!(
        (loading.cached().l2, loading.is_loaded()),
        (3 * PAGE, false)
    );
    let slots = loading.slots().unwrap();
    let load = [0, 1].into_iter().flat_map(|layer| slots.tickets(layer));
    let load = Mutex::new(load.collect());
    let other: Vec<u64> = prompt(3).into_iter().rev().collect();
    let mut running = cache.begin(&other).unwrap();
    let (promise, ticket) = Ticket::promised();
    running.computed_by(PAGE, &ticket).unwrap();
    // A future without room is woken by the progress of the verification.
    let waker = Waker::from(Arc::new(Fails { may_fail, load }));
    let mut asked = pin!(cache.ask(&Ask::new(&prompt(8)[1..])).unwrap());
    let mut context = Context::from_waker(&waker);
    assert!(asked.as_mut().poll(&mut context).is_pending());
    promise.settle(Ok(()));
    assert_eq!(loading.verify(), Ok(false));
    assert!(loading.is_loaded());
    let verified = loading.verify();
    assert!(
        matches!(verified, Err(SequenceError::Broken(_))),
        "{verified:?}"
    );
    let row = loading.row(0, 1, 0).map(drop);
    assert_eq!(row, Err(RowError::Load(DeviceError::Closed)));
}

#[test]
fn a_report_after_a_failed_forward_says_that_the_sequence_is_broken() {
    let cache = options(20, 40).over(None).unwrap();
    let prompt = prompt(3);
    let mut sequence = cache.begin(&prompt).unwrap();
    let (promise, ticket) = Ticket::promised();
    sequence.computed_by(PAGE, &ticket).unwrap();
    drop(promise);
    let broken = Err(SequenceError::Broken(Broken));
    assert_eq!(sequence.computed(prompt.len()), broken);
    let (_running, ticket) = Ticket::promised();
    assert_eq!(sequence.computed_by(prompt.len(), &ticket), broken);
    assert_eq!(sequence.verify().map(drop), broken);
}
