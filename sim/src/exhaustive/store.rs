//! The small store of the scripts: one volume of few and short segments, one namespace, chains of
//! three pages.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use larder_core::capacity::segments_min;
use larder_core::grants::SegmentMap;
use larder_core::index::Place;
use larder_engine::format::{
    BLOCK_BYTES, KeyPrefix, Namespace, PageChecksum, PageKey, SEGMENTS_OFFSET, StoreId,
};
use larder_engine::{OpenOptions, SyncPolicy};
use larder_sim_runtime::dice::mix;
use larder_sim_runtime::heap;
use larder_store::volume::simulated::encode;

use super::image::Image;
use crate::setup::{namespace, superblocks};

const SEGMENT_BLOCKS: u32 = 16;
const PAGE_BLOCKS: usize = 2;

pub const PAGE_BYTES: usize = PAGE_BLOCKS * BLOCK_BYTES;

/// Pages in a chain.
pub const CHAIN: usize = 3;

/// All pages that a script may put.
pub const NAMES: usize = 13 * CHAIN;

pub struct Store {
    pub sync: SyncPolicy,
    pub namespace: Namespace,
    pub keys: Vec<PageKey>,
    map: SegmentMap,
    /// Checksums of content that was read before.
    sums: Mutex<HashMap<(usize, u128), u64>>,
    segments: u32,
}

impl Store {
    pub fn new(sync: SyncPolicy) -> Store {
        let segments = u32::try_from(segments_min(1)).expect("few segments");
        Store {
            sync,
            namespace: namespace(0, PAGE_BLOCKS as u32),
            keys: (0..NAMES).map(key).collect(),
            map: SegmentMap::new(&[segments], SEGMENT_BLOCKS),
            sums: Mutex::default(),
            segments,
        }
    }

    pub fn options(&self, read_only: bool) -> OpenOptions {
        OpenOptions::default().with(|o| {
            o.sync = self.sync;
            o.lease = Duration::ZERO;
            o.read_only = read_only;
        })
    }

    /// Blocks in segments.
    pub fn blocks(&self) -> usize {
        (self.segments * SEGMENT_BLOCKS) as usize
    }

    /// A volume that was never opened.
    pub fn blank(&self) -> Image {
        let store = StoreId::from_bytes([7; 16]);
        let volumes = std::iter::once((self.segments, "volume0".to_owned()));
        let superblock = superblocks(store, SEGMENT_BLOCKS, volumes).remove(0);
        let superblock = encode(&superblock).expect("a superblock that readers reject");
        Image::new(&superblock, self.blocks())
    }

    pub fn name_of(&self, key: KeyPrefix) -> Option<usize> {
        (0..NAMES).find(|name| self.keys[*name].prefix() == key)
    }

    /// Fills a page with the `version`-th attempt to store it, different for every attempt. Returns
    /// the checksum.
    pub fn write(&self, name: usize, version: usize, page: &mut [u8]) -> u64 {
        for (block, out) in (1..).zip(page.chunks_exact_mut(BLOCK_BYTES)) {
            let word = mix(mix(name as u64, version as u64), block);
            for out in out.as_chunks_mut::<8>().0 {
                *out = word.to_le_bytes();
            }
        }
        self.checksum(name, page)
    }

    /// The checksum of a page's bytes.
    pub fn checksum(&self, name: usize, page: &[u8]) -> u64 {
        let mut checksum = PageChecksum::new(self.namespace.fingerprint(), &self.keys[name]);
        checksum.blocks(page);
        checksum.finish()
    }

    /// The checksum of the bytes at a place, under a name.
    pub fn checksum_at(&self, name: usize, place: Place, image: &Image) -> u64 {
        let offset = self.map.extent(place).offset;
        let blocks = image.blocks_at(offset, PAGE_BLOCKS).unwrap_or_default();
        let digest = |sum: u128, (_, digest): &(_, u128)| sum.rotate_left(1) ^ digest;
        let content = (name, blocks.iter().fold(offset.into(), digest));
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sum) = sums.get(&content) {
            return *sum;
        }
        let page: Vec<&[u8]> = blocks.iter().map(|(bytes, _)| &bytes[..]).collect();
        let sum = self.checksum(name, &page.concat());
        heap::outside(|| sums.insert(content, sum));
        sum
    }
}

/// The segment at a byte offset of the volume.
pub fn segment_at(offset: u64) -> u64 {
    offset.saturating_sub(SEGMENTS_OFFSET) / (u64::from(SEGMENT_BLOCKS) * BLOCK_BYTES as u64)
}

fn key(name: usize) -> PageKey {
    let mut bytes = [0; 32];
    for (at, out) in (0..).zip(bytes.as_chunks_mut::<8>().0) {
        *out = mix(name as u64 + 1, at).to_le_bytes();
    }
    PageKey::from_bytes(bytes)
}
