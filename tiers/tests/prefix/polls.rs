//! A cache without a thread, polled by its engine.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use larder_tiers::{Ask, PrefixCache};

use super::honest::eventually;
use super::memory::Memory;
use super::rules::{filled, options, prompt};
use super::{PATIENCE, serve, toy};

fn polled_by_the_engine(l3: &Arc<Memory>, timeout_us: u64) -> PrefixCache {
    let options = options(20, 40).with(|o| {
        o.polls_itself = false;
        o.config.prefetch.timeout_base_us = timeout_us;
    });
    options.over(Some(l3.clone())).unwrap()
}

#[test]
fn polls_of_the_engine_report_used_pages_to_l3() {
    let l3 = filled(3);
    let cache = polled_by_the_engine(&l3, u64::MAX / 2);
    serve(&cache, &toy(), &prompt(3));
    eventually("the pages are reported as used", || {
        cache.poll().unwrap();
        l3.touched.load(Ordering::Relaxed) >= 3
    });
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn polls_of_the_engine_wake_a_future_whose_time_for_l3_is_over() {
    let l3 = filled(3);
    let cache = polled_by_the_engine(&l3, 0);
    l3.is_stuck.store(true, Ordering::Release);
    let mut asked = pin!(cache.ask(&Ask::new(&prompt(3))).unwrap());
    let flag = Arc::new(Flag(AtomicBool::new(true)));
    let waker = Waker::from(flag.clone());
    let mut context = Context::from_waker(&waker);
    let mut begun = None;
    // In either case the threads of the cache must end.
    let deadline = Instant::now() + PATIENCE;
    while begun.is_none() && Instant::now() < deadline {
        cache.poll().unwrap();
        if flag.0.swap(false, Ordering::Acquire)
            && let Poll::Ready(sequence) = asked.as_mut().poll(&mut context)
        {
            begun = Some(sequence.unwrap());
        }
        std::thread::yield_now();
    }
    l3.is_stuck.store(false, Ordering::Release);
    assert_eq!(begun.unwrap().cached().tokens(), 0);
}
