//! A cache with a queue in front of a slow L3, and its end.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use larder_engine::{GetPage, PutPage};
use larder_format::PageKey;
use larder_tiers::Ask;
use larder_tiers::cache::{Stuck, leaked_bytes};
use larder_tiers::l3::L3;
use larder_tiers::prefix::CloseError;

use super::honest::eventually;
use super::rules::{options, prompt};
use super::{PATIENCE, answer, serve, toy};

/// An L3 whose writes wait until only one thread of the cache is left: the writer. By then the
/// cache has begun to end its threads.
struct Slow {
    own: Weak<Slow>,
    puts: AtomicUsize,
}

impl L3 for Slow {
    fn longest_prefix(&self, _: &[PageKey]) -> usize {
        0
    }

    fn get(&self, _: &mut [GetPage<'_, '_>]) -> usize {
        0
    }

    fn put(&self, pages: &[PutPage<'_>]) -> usize {
        self.puts.fetch_add(1, Ordering::Relaxed);
        // The test has one reference, and each thread.
        eventually("the other threads end", || self.own.strong_count() == 2);
        pages.len()
    }

    fn touch(&self, _: &[PageKey]) {}
}

#[test]
fn a_close_waits_for_the_write_in_progress_and_not_for_the_queue_behind_it() {
    const PROMPTS: usize = 5;
    let l3 = Arc::new_cyclic(|own| Slow {
        own: own.clone(),
        puts: AtomicUsize::new(0),
    });
    // A quarter of it is for the write in progress.
    let options = options(20, 40).with(|o| o.close_wait = Duration::from_secs(8));
    let cache = options.over(Some(l3.clone())).unwrap();
    for first in 0..PROMPTS {
        let mut tokens = prompt(2);
        tokens[0] = first as u64;
        serve(&cache, &toy(), &tokens);
    }
    eventually("all writes are queued", || {
        cache.stats().unwrap().backed_up == 2 * PROMPTS as u64
    });
    let closed = cache.close();
    let is_right =
        matches!(closed, Err(CloseError::Unfinished { orders, .. }) if orders == PROMPTS);
    assert!(is_right, "{closed:?}");
    assert_eq!(l3.puts.load(Ordering::Relaxed), 1);
}

#[test]
fn pages_that_leave_l2_before_a_slow_l3_has_them_are_counted() {
    let l3 = Arc::new_cyclic(|own| Slow {
        own: own.clone(),
        puts: AtomicUsize::new(0),
    });
    let options = options(4, 4).with(|o| o.close_wait = Duration::from_millis(1));
    let cache = options.over(Some(l3.clone())).unwrap();
    for first in 0..4 {
        let mut tokens = prompt(2);
        tokens[0] = first;
        serve(&cache, &toy(), &tokens);
    }
    eventually("pages leave L2", || cache.stats().unwrap().l2_evicted > 0);
    let stats = cache.stats().unwrap();
    assert_eq!((stats.put_refused, stats.put), (stats.l2_evicted, 0));
}

/// An L3 whose calls of one kind do not return while the flag is true.
struct Never {
    call: &'static str,
    is_stuck: AtomicBool,
    calls: AtomicUsize,
}

impl Never {
    fn call(&self, name: &str) {
        if name == self.call {
            self.calls.fetch_add(1, Ordering::Release);
            while self.is_stuck.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        }
    }
}

impl L3 for Never {
    fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        self.call("lookup");
        keys.len()
    }

    fn get(&self, pages: &mut [GetPage<'_, '_>]) -> usize {
        self.call("get");
        for part in pages.iter_mut().flat_map(|page| page.parts.iter_mut()) {
            part.fill(0x55);
        }
        0
    }

    fn put(&self, pages: &[PutPage<'_>]) -> usize {
        self.call("put");
        pages.len()
    }

    fn touch(&self, _: &[PageKey]) {}
}

#[test]
fn a_call_of_l3_that_never_returns_delays_no_end_and_keeps_its_memory() {
    let page_bytes = u64::from(toy().model().shape().page_bytes());
    for (call, pages) in [("lookup", 0), ("get", 2), ("put", 2)] {
        for closes in [true, false] {
            let l3 = Arc::new(Never {
                call,
                is_stuck: AtomicBool::new(true),
                calls: AtomicUsize::new(0),
            });
            let options = options(20, 40).with(|o| o.close_wait = Duration::from_millis(40));
            let cache = options.over(Some(l3.clone())).unwrap();
            let asked = match call {
                "put" => {
                    let mut sequence = cache
                        .ask(&Ask::new(&prompt(2)))
                        .unwrap()
                        .begin_within(PATIENCE)
                        .unwrap();
                    answer(&toy(), &mut sequence, &prompt(2));
                    sequence.keep().unwrap();
                    None
                }
                _ => Some(cache.ask(&Ask::new(&prompt(2))).unwrap()),
            };
            eventually("the call has begun", || {
                l3.calls.load(Ordering::Acquire) > 0
            });
            let (bytes, before) = (pages * page_bytes, leaked_bytes());
            if closes {
                let closed = cache.close();
                let expected = Stuck { calls: 1, bytes };
                assert!(
                    matches!(closed, Err(CloseError::Stuck(stuck)) if stuck == expected),
                    "{call}: {closed:?}"
                );
            } else {
                drop(cache);
            }
            assert!(leaked_bytes() >= before + bytes);
            drop(asked);
            // The call still uses the memory.
            l3.is_stuck.store(false, Ordering::Release);
            eventually("the thread ends", || Arc::strong_count(&l3) == 1);
        }
    }
}
