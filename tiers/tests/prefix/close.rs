//! A cache with a queue in front of a slow L3, and its end.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use larder_engine::{GetPage, PutPage};
use larder_format::PageKey;
use larder_tiers::l3::L3;
use larder_tiers::prefix::CloseError;

use super::honest::eventually;
use super::rules::{options, prompt};
use super::{serve, toy};

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
    let options = options(20, 40).with(|o| o.close_wait = Duration::from_millis(1));
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
