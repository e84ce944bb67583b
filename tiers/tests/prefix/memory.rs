//! An L3 in memory that outlives its caches, and fails if told to.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use larder_engine::{GetPage, PutPage};
use larder_format::PageKey;
use larder_tiers::l3::L3;

/// See the module documentation.
#[derive(Default)]
pub struct Memory {
    pages: Mutex<HashMap<PageKey, Vec<u8>>>,
    /// One call in this many fails; none if 0.
    pub fails: AtomicUsize,
    calls: AtomicUsize,
    /// No lookup is answered.
    pub is_stuck: AtomicBool,
    /// Number of pages reported as used.
    pub touched: AtomicUsize,
}

impl Memory {
    fn has_failed(&self) -> bool {
        let fails = self.fails.load(Ordering::Relaxed);
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        fails > 0 && call.is_multiple_of(fails)
    }

    /// Number of pages.
    pub fn len(&self) -> usize {
        self.pages.lock().unwrap().len()
    }

    /// Drops the pages for whose keys this holds.
    pub fn evict(&self, mut is_evicted: impl FnMut(&PageKey) -> bool) {
        self.pages.lock().unwrap().retain(|key, _| !is_evicted(key));
    }
}

impl L3 for Memory {
    fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        while self.is_stuck.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        if self.has_failed() {
            return 0;
        }
        let pages = self.pages.lock().unwrap();
        let has = |key: &&PageKey| pages.contains_key(key);
        keys.iter().take_while(has).count()
    }

    fn get(&self, asked: &mut [GetPage<'_, '_>]) -> usize {
        let until = if self.has_failed() {
            asked.len() / 2
        } else {
            asked.len()
        };
        let pages = self.pages.lock().unwrap();
        let read = |page: &mut GetPage<'_, '_>| {
            let mut bytes = pages.get(&page.key)?.as_slice();
            for part in page.parts.iter_mut() {
                let (own, rest) = bytes.split_at(part.len());
                part.copy_from_slice(own);
                bytes = rest;
            }
            Some(())
        };
        let whole = asked[..until].iter_mut().map_while(read).count();
        for page in &mut asked[whole..] {
            page.parts.iter_mut().for_each(|part| part.fill(0x5a));
        }
        whole
    }

    fn put(&self, given: &[PutPage<'_>]) -> usize {
        let until = if self.has_failed() {
            given.len() / 2
        } else {
            given.len()
        };
        let mut pages = self.pages.lock().unwrap();
        for page in &given[..until] {
            let bytes = page.parts.iter().flat_map(|part| part.iter().copied());
            pages.entry(page.key).or_insert_with(|| bytes.collect());
        }
        until
    }

    fn touch(&self, keys: &[PageKey]) {
        self.touched.fetch_add(keys.len(), Ordering::Relaxed);
    }
}
