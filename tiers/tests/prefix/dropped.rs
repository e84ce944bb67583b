//! A cache that is dropped without a close, while others wait for it.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use larder_tiers::Ask;
use larder_tiers::prefix::{BeginError, SequenceError};

use super::honest::eventually;
use super::rules::{filled, options, prompt};
use super::{PATIENCE, serve, toy};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The result of a future, on a thread that sleeps until it is woken.
fn awaited<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let (mut future, mut context) = (pin!(future), Context::from_waker(&waker));
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(result) => return result,
            Poll::Pending => thread::park(),
        }
    }
}

/// With a thread of the cache, and with an engine that polls in its loop.
#[test]
fn requests_of_a_dropped_cache_end_before_l3_answers() {
    for polls_itself in [true, false] {
        let l3 = filled(3);
        l3.is_stuck.store(true, Ordering::Release);
        let options = options(20, 40).with(|o| {
            o.polls_itself = polls_itself;
            o.config.prefetch.timeout_base_us = u64::MAX / 2;
        });
        let cache = options.over(Some(l3.clone())).unwrap();
        let ask = || cache.ask(&Ask::new(&prompt(3))).unwrap();
        let (polled, sleeping, waiting) = (ask(), ask(), ask());
        let (tell, told) = mpsc::channel();
        let of_future = tell.clone();
        thread::spawn(move || of_future.send(awaited(sleeping).map(drop)));
        thread::spawn(move || tell.send(waiting.begin_within(Duration::MAX).map(drop)));
        let dropping = thread::spawn(move || drop(cache));
        for _ in 0..2 {
            let ended = told.recv_timeout(PATIENCE);
            assert!(matches!(ended, Ok(Err(BeginError::Closed(_)))), "{ended:?}");
        }
        assert!(matches!(awaited(polled).err(), Some(BeginError::Closed(_))));
        // The drop itself waits for the call of L3.
        l3.is_stuck.store(false, Ordering::Release);
        dropping.join().unwrap();
    }
}

#[test]
fn sequences_of_a_dropped_cache_end_with_an_error_and_their_rows_stay() {
    let cache = options(20, 40).over(None).unwrap();
    serve(&cache, &toy(), &prompt(3));
    let mut running = cache.begin(&prompt(3)).unwrap();
    let row = running.row(0, 0, 0).unwrap().to_vec();
    eventually("the pages are in L2", || {
        cache.stats().unwrap().backed_up == 3
    });
    drop(cache);
    assert_eq!(running.row(0, 0, 0).unwrap(), row);
    assert!(matches!(running.push(1), Err(SequenceError::Closed(_))));
    assert!(matches!(running.verify(), Err(SequenceError::Closed(_))));
    assert!(matches!(running.computed(1), Err(SequenceError::Closed(_))));
    assert!(matches!(running.keep(), Err(SequenceError::Closed(_))));
}
