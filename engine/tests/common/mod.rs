//! Shared by the store's tests: stores in a directory of their own, pages whose bytes are a pure
//! function of their key.
#![allow(dead_code)]

pub mod faulty;
#[path = "../../../tests/support/honest.rs"]
pub mod honest;
pub mod memory;
pub mod release;

use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use larder_engine::format::{Namespace, PageKey, PageShape, TokenUnits, page_keys};
use larder_engine::{
    AlignedBuf, CreateOptions, GetPage, GetStatus, NamespaceId, OpenOptions, PageStore, PutOptions,
    PutPage, PutStatus, Store, create,
};

pub const MIB: u64 = 1 << 20;

/// A directory on a real filesystem, and a store's path in it.
pub struct Home {
    pub directory: tempfile::TempDir,
    pub path: PathBuf,
}

impl Home {
    pub fn new() -> Home {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = directory.path().join("store");
        Home { directory, path }
    }

    pub fn with_store(size: u64) -> Home {
        Home::on_volumes(1, size)
    }

    /// A store on `count` volumes of `size` bytes each.
    pub fn on_volumes(count: usize, size: u64) -> Home {
        let home = Home::new();
        let beside = |number| home.directory.path().join(format!("volume {number}"));
        let options = CreateOptions::new(count as u64 * size).with(|o| {
            o.segment_size = Some(16 * MIB);
            o.volumes = (1..count).map(beside).collect();
        });
        create(&home.path, &options).unwrap();
        home
    }

    pub fn open(&self) -> Store {
        self.open_with(OpenOptions::default())
    }

    pub fn open_with(&self, options: OpenOptions) -> Store {
        Store::open(&self.path, options).unwrap()
    }
}

pub fn namespace(model: &str, parts: &[u32]) -> Namespace {
    Namespace::builder(model, "w1", 64, PageShape::new(parts).unwrap())
        .build()
        .unwrap()
}

/// Keys of one chain of `pages` pages; chains of different seeds share nothing.
pub fn chain(seed: u64, pages: usize) -> Vec<PageKey> {
    let tokens: Vec<u64> = (0..pages as u64).map(|page| seed << 24 | page).collect();
    page_keys(&tokens, NonZeroUsize::MIN, None, TokenUnits::Single)
}

/// The begin of the names of models with pages that a codec makes smaller.
pub const SMOOTH: &str = "smooth";

/// The bytes of a part: a pure function of namespace, key and part.
pub fn fill(model: &str, key: &PageKey, part: usize, out: &mut [u8]) {
    let mut state = u64::from_le_bytes(key.as_bytes()[..8].try_into().unwrap()) ^ part as u64;
    for byte in model.bytes() {
        state = state.wrapping_mul(31).wrapping_add(u64::from(byte));
    }
    for chunk in out.chunks_mut(8) {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
    if model.starts_with(SMOOTH) {
        // Values in bf16 with exponents of eight neighbours.
        for [_, high] in out.as_chunks_mut().0 {
            *high = *high & 0x83 | 0x3c;
        }
    }
}

/// A namespace in an open store, with its pages' sizes: puts and gets whole chains.
pub struct Pool<'a> {
    pub store: &'a dyn PageStore,
    pub id: NamespaceId,
    pub model: String,
    pub parts: Vec<u32>,
}

impl<'a> Pool<'a> {
    pub fn new(store: &'a dyn PageStore, model: &str, parts: &[u32]) -> Pool<'a> {
        let id = store.namespace(&namespace(model, parts)).unwrap();
        Pool {
            store,
            id,
            model: model.to_owned(),
            parts: parts.to_vec(),
        }
    }

    fn memory(&self) -> Vec<AlignedBuf> {
        self.parts
            .iter()
            .map(|&bytes| AlignedBuf::zeroed(bytes as usize).unwrap())
            .collect()
    }

    /// Puts consecutive pages of a chain: `keys[from..]`.
    pub fn put_from(&self, keys: &[PageKey], from: usize, options: PutOptions) -> Vec<PutStatus> {
        let place = |index: usize| {
            let depth = u32::try_from(from + index).unwrap();
            (
                (from + index).checked_sub(1).map(|before| keys[before]),
                depth,
            )
        };
        self.put_at(&keys[from..], place, options)
    }

    /// Puts pages that are each the head of a chain.
    pub fn put_heads(&self, keys: &[PageKey], options: PutOptions) -> Vec<PutStatus> {
        self.put_at(keys, |_| (None, 0), options)
    }

    /// Puts pages. `place` returns the parent and the depth of each by its position.
    fn put_at(
        &self,
        keys: &[PageKey],
        place: impl Fn(usize) -> (Option<PageKey>, u32),
        options: PutOptions,
    ) -> Vec<PutStatus> {
        let mut memory: Vec<Vec<AlignedBuf>> = Vec::new();
        for key in keys {
            let mut parts = self.memory();
            for (index, part) in parts.iter_mut().enumerate() {
                fill(&self.model, key, index, part);
            }
            memory.push(parts);
        }
        let slices: Vec<Vec<IoSlice<'_>>> = memory
            .iter()
            .map(|parts| parts.iter().map(|part| IoSlice::new(part)).collect())
            .collect();
        let pages: Vec<PutPage<'_>> = slices
            .iter()
            .enumerate()
            .map(|(index, parts)| {
                let (parent, depth) = place(index);
                PutPage {
                    key: keys[index],
                    parent,
                    depth,
                    parts,
                }
            })
            .collect();
        self.store.put(self.id, &pages, options)
    }

    /// Puts a chain, waiting for room.
    pub fn put(&self, keys: &[PageKey]) -> Vec<PutStatus> {
        self.put_from(keys, 0, PutOptions::waiting(Duration::from_secs(120)))
    }

    /// Gets pages, and panics when a hit has other bytes than were put.
    pub fn get(&self, keys: &[PageKey]) -> Vec<GetStatus> {
        self.get_until(keys, None)
    }

    /// Like [`Pool::get`], with a deadline.
    pub fn get_until(&self, keys: &[PageKey], deadline: Option<Instant>) -> Vec<GetStatus> {
        let mut memory: Vec<Vec<AlignedBuf>> = keys.iter().map(|_| self.memory()).collect();
        let mut slices: Vec<Vec<IoSliceMut<'_>>> = memory
            .iter_mut()
            .map(|parts| parts.iter_mut().map(|part| IoSliceMut::new(part)).collect())
            .collect();
        let mut pages: Vec<GetPage<'_, '_>> = keys
            .iter()
            .zip(&mut slices)
            .map(|(key, parts)| GetPage { key: *key, parts })
            .collect();
        let statuses = self.store.get(self.id, &mut pages, deadline);
        drop(pages);
        drop(slices);
        for ((key, parts), status) in keys.iter().zip(&memory).zip(&statuses) {
            if status.is_hit() {
                for (index, part) in parts.iter().enumerate() {
                    let mut expected = vec![0; part.len()];
                    fill(&self.model, key, index, &mut expected);
                    assert!(expected == part[..], "wrong bytes for {key} part {index}");
                }
            }
        }
        statuses
    }

    pub fn hits(&self, keys: &[PageKey]) -> usize {
        self.get(keys)
            .iter()
            .filter(|status| status.is_hit())
            .count()
    }
}
