//! Code shared by the tests: pages in their stores, and the offsets of structures.
#![allow(dead_code)]

use std::io::{IoSlice, IoSliceMut};
use std::time::Duration;

use larder_engine::{
    AlignedBuf, GetPage, NamespaceId, PageStore, PutOptions, PutPage, PutStatus, Store,
};
use larder_format::{Namespace, PageKey, PageShape};
use serde_json::Value;

use crate::support::home::{Home, SEGMENT_BYTES};
use crate::support::{noise, smooth};

pub const BLOCK_BYTES: u64 = 4096;
pub const PAGE_BYTES: u32 = 64 << 10;

impl Home {
    /// Works on the store and closes it in order.
    pub fn with<T>(&self, work: impl FnOnce(&Pool<'_>) -> T) -> T {
        let store = self.open();
        let value = work(&Pool::new(&store));
        store.close().unwrap();
        value
    }

    /// Works on the store and leaves it as a crash does.
    pub fn crash_after<T>(&self, work: impl FnOnce(&Pool<'_>) -> T) -> T {
        let store = self.open();
        work(&Pool::new(&store))
    }

    /// Runs a command with `--json` that must end with `code`: with 1 where it says that there is
    /// damage.
    #[track_caller]
    pub fn json(&self, command: &str, options: &[&str], code: i32) -> Value {
        let document = self.report(command, options, code);
        assert_eq!(document["damaged"], code == 1);
        document
    }

    /// The first segment that was written, and how many descriptor blocks it has.
    pub fn written_segment(&self) -> (u64, u64) {
        let document = self.json("inspect", &["--segments"], 0);
        let list = document["segment_list"].as_array().unwrap().clone();
        let written = list.iter().find(|segment| segment["records"] != 0).unwrap();
        (
            written["offset"].as_u64().unwrap(),
            written["descriptor_blocks"].as_u64().unwrap(),
        )
    }
}

/// A namespace in an open store.
pub struct Pool<'a> {
    pub store: &'a Store,
    id: NamespaceId,
    /// The bytes of each page.
    content: Vec<u8>,
}

impl<'a> Pool<'a> {
    /// No codec makes its pages smaller.
    pub fn new(store: &'a Store) -> Pool<'a> {
        Pool::of(store, noise(0, PAGE_BYTES as usize))
    }

    /// The codec makes its pages smaller.
    pub fn smooth(store: &'a Store) -> Pool<'a> {
        Pool::of(store, smooth(0, PAGE_BYTES as usize))
    }

    fn of(store: &'a Store, content: Vec<u8>) -> Pool<'a> {
        let namespace =
            Namespace::builder("tiny", "w1", 64, PageShape::new(&[PAGE_BYTES]).unwrap()).build();
        let id = store.namespace(&namespace.unwrap()).unwrap();
        Pool { store, id, content }
    }

    /// Stores the pages of a whole chain in one call.
    pub fn put(&self, keys: &[PageKey]) {
        let parts = [IoSlice::new(&self.content)];
        let parents = std::iter::once(None).chain(keys.iter().copied().map(Some));
        let pages: Vec<PutPage<'_>> = keys
            .iter()
            .zip(parents)
            .zip(0..)
            .map(|((key, parent), depth)| PutPage {
                key: *key,
                parent,
                depth,
                parts: &parts,
            })
            .collect();
        let options = PutOptions::waiting(Duration::from_secs(120));
        let statuses = self.store.put(self.id, &pages, options);
        assert_eq!(statuses, vec![PutStatus::Stored; keys.len()]);
    }

    /// Stores the next page of each chain in turns, so that no two pages of one lie together.
    pub fn put_in_turns(&self, chains: &[Vec<PageKey>]) {
        let parts = [IoSlice::new(&self.content)];
        for depth in 0..chains.iter().map(Vec::len).max().unwrap_or(0) {
            for keys in chains.iter().filter(|keys| keys.len() > depth) {
                let page = PutPage {
                    key: keys[depth],
                    parent: depth.checked_sub(1).map(|before| keys[before]),
                    depth: u32::try_from(depth).unwrap(),
                    parts: &parts,
                };
                let options = PutOptions::waiting(Duration::from_secs(120));
                let statuses = self.store.put(self.id, &[page], options);
                assert_eq!(statuses, [PutStatus::Stored]);
            }
        }
    }

    /// How many of these pages are there, with the bytes that were put.
    pub fn hits(&self, keys: &[PageKey]) -> usize {
        let mut memory = AlignedBuf::zeroed(PAGE_BYTES as usize).unwrap();
        let is_hit = |key: &PageKey| {
            memory.fill(0);
            let mut parts = [IoSliceMut::new(&mut memory)];
            let mut pages = [GetPage {
                key: *key,
                parts: &mut parts,
            }];
            let hit = self.store.get(self.id, &mut pages, None)[0].is_hit();
            assert!(!hit || *memory == *self.content);
            hit
        };
        keys.iter().copied().filter(is_hit).count()
    }

    pub fn clear(&self) {
        self.store.clear_namespace(self.id).unwrap();
    }

    pub fn delete(&self, key: PageKey) {
        assert_eq!(self.store.delete(self.id, &[key]).unwrap(), 1);
    }
}

/// Where descriptor block `index` of the segment at `segment_offset` lies.
pub fn block_offset(segment_offset: u64, index: u64) -> u64 {
    segment_offset + SEGMENT_BYTES - (index + 1) * BLOCK_BYTES
}

/// The one finding of a document.
#[track_caller]
pub fn finding(document: &Value) -> &Value {
    let damage = document["damage"].as_array().unwrap();
    assert_eq!(damage.len(), 1, "{document:#}");
    &damage[0]
}
