//! An L3 that refuses pages: all of them, or for a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use larder_engine::{
    GetPage, GetStatus, Hint, MissReason, NamespaceId, PageStore, PutOptions, PutPage, PutStatus,
    Recall, Refusal, Stats, StoreError,
};
use larder_format::{Namespace, PageKey};
use larder_tiers::core::Core;
use larder_tiers::l3::{L3, StoreL3};

use super::engine::PAGE;
use super::memory::Memory;
use super::rules::{options, prompt};
use super::{PATIENCE, serve, toy};

/// Pages go to `memory` unless it refuses.
#[derive(Default)]
struct Gate {
    memory: Memory,
    refuses: AtomicBool,
    puts: AtomicUsize,
}

impl L3 for Gate {
    fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        self.memory.longest_prefix(keys)
    }

    fn get(&self, pages: &mut [GetPage<'_, '_>]) -> usize {
        self.memory.get(pages)
    }

    fn put(&self, pages: &[PutPage<'_>]) -> usize {
        self.puts.fetch_add(pages.len(), Ordering::Relaxed);
        match self.refuses.load(Ordering::Acquire) {
            true => 0,
            false => self.memory.put(pages),
        }
    }

    fn touch(&self, _: &[PageKey]) {}
}

/// Prompts of more pages than L3's queue takes at once, and of fewer.
#[test]
fn settle_and_close_end_while_l3_refuses_every_page() {
    for pages in [3, 11, 19] {
        let l3 = Arc::new(Gate::default());
        l3.refuses.store(true, Ordering::Release);
        let cache = options(24, 24).over(Some(l3.clone())).unwrap();
        serve(&cache, &toy(), &prompt(pages));
        let mut asked = 0;
        for attempt in 1..=3 {
            assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
            asked = l3.puts.load(Ordering::Relaxed);
            let most = (1 + attempt) * (pages + 1);
            assert!((1..=most).contains(&asked), "{asked} of {pages} pages");
        }
        cache.close().unwrap();
        assert!(l3.puts.load(Ordering::Relaxed) <= asked + pages + 1);
    }
}

#[test]
fn refused_pages_are_in_l3_after_a_close_if_it_takes_pages_by_then() {
    for pages in [3, 11, 19] {
        let l3 = Arc::new(Gate::default());
        l3.refuses.store(true, Ordering::Release);
        let cache = options(24, 24).over(Some(l3.clone())).unwrap();
        serve(&cache, &toy(), &prompt(pages));
        assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
        assert_eq!(l3.memory.len(), 0);
        l3.refuses.store(false, Ordering::Release);
        cache.close().unwrap();
        let cache = options(24, 24).over(Some(l3.clone())).unwrap();
        let share = cache.with_core(|core| core.config().l2_pages / 2).unwrap() as usize;
        let cached = serve(&cache, &toy(), &prompt(pages));
        assert_eq!(cached.l3, pages.min(share) * PAGE, "{pages} pages");
    }
}

/// Requests go on while L3 refuses: they bring the pages of earlier ones to L3 later.
#[test]
fn pages_that_were_refused_for_a_while_follow_with_later_requests() {
    let l3 = Arc::new(Gate::default());
    let cache = options(60, 60).over(Some(l3.clone())).unwrap();
    let of = |first: u64| {
        let mut tokens = prompt(3);
        tokens[0] = first;
        tokens
    };
    for first in 0..6 {
        l3.refuses.store(first < 3, Ordering::Release);
        serve(&cache, &toy(), &of(first));
        super::honest::eventually("nothing is in flight", || {
            cache.with_core(Core::orders_out).unwrap() == 0
        });
    }
    // The pauses of three refusals are over by then.
    assert_eq!(l3.memory.len(), 6 * 3);
    cache.close().unwrap();
}

/// A store that refuses each page for one reason.
struct Refusing {
    why: Refusal,
    asked: AtomicUsize,
}

impl PageStore for Refusing {
    fn namespace(&self, _: &Namespace) -> Result<NamespaceId, StoreError> {
        Ok(NamespaceId(0))
    }

    fn put_recallable(
        &self,
        _: NamespaceId,
        pages: &[PutPage<'_>],
        _: PutOptions,
        _: Option<&Recall>,
    ) -> Vec<PutStatus> {
        self.asked.fetch_add(pages.len(), Ordering::Relaxed);
        vec![PutStatus::Refused(self.why); pages.len()]
    }

    fn get(
        &self,
        _: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        _: Option<Instant>,
    ) -> Vec<GetStatus> {
        vec![GetStatus::Miss(MissReason::Absent); pages.len()]
    }

    fn longest_prefix(&self, _: NamespaceId, _: &[PageKey]) -> usize {
        0
    }

    fn contains(&self, _: NamespaceId, keys: &[PageKey]) -> Vec<bool> {
        vec![false; keys.len()]
    }

    fn touch(&self, _: NamespaceId, _: &[PageKey], _: Hint) {}

    fn delete(&self, _: NamespaceId, _: &[PageKey]) -> Result<u64, StoreError> {
        Ok(0)
    }

    fn clear_namespace(&self, _: NamespaceId) -> Result<u64, StoreError> {
        Ok(0)
    }

    fn flush(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn register(&self, memory: &'static mut [u8]) -> (&'static mut [u8], String) {
        (memory, String::new())
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }

    fn close(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

#[test]
fn a_store_that_never_takes_such_a_page_is_asked_for_one_put() {
    let cases = [
        (Refusal::TooLarge, true),
        (Refusal::WrongShape, true),
        (Refusal::ReadOnly, true),
        (Refusal::NoSpace, false),
        (Refusal::Closed, false),
        (Refusal::NotAdmitted, false),
        (Refusal::Quota, false),
    ];
    for (why, is_final) in cases {
        let store = Arc::new(Refusing {
            why,
            asked: AtomicUsize::new(0),
        });
        let options = options(24, 24);
        let l3 = StoreL3::new(store.clone(), &options.namespace().unwrap()).unwrap();
        let cache = options.over(Some(Arc::new(l3))).unwrap();
        for _ in 0..3 {
            serve(&cache, &toy(), &prompt(5));
            assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
        }
        let asked = store.asked.load(Ordering::Relaxed);
        assert_eq!(asked == 5, is_final, "{why:?}: {asked}");
    }
}
