//! The small store of the scripts: one volume of few and short segments, one namespace, chains of
//! three pages.

use std::cell::RefCell;
use std::collections::HashMap;

use larder_engine::SyncPolicy;
use larder_engine::capacity::segments_min;
use larder_engine::catalog::{Ask, SegmentMap};
use larder_engine::core::Config;
use larder_engine::format::{
    BLOCK_BYTES, Features, Holder, Namespace, OpenState, PageChecksum, PageKey, PageShape, Run,
    SEGMENTS_OFFSET, StoreId, Superblock, VolumeEntry, VolumeId,
};
use larder_engine::index::Index;
use larder_sim_runtime::dice::mix;

use super::image::Image;

const SEGMENT_BLOCKS: u32 = 16;
const PAGE_BLOCKS: u32 = 2;

/// Pages in a chain.
pub const CHAIN: usize = 3;

/// All pages that a script may put.
pub const NAMES: usize = 13 * CHAIN;

pub struct Store {
    pub config: Config,
    pub namespace: Namespace,
    pub page_blocks: u32,
    pub keys: Vec<PageKey>,
    pub map: SegmentMap,
    /// Checksums of content that was read before.
    pub sums: RefCell<HashMap<(usize, u128), u64>>,
    segments: u32,
}

impl Store {
    pub fn new(sync: SyncPolicy) -> Store {
        let segments = u32::try_from(segments_min(1)).expect("few segments");
        let namespace = Namespace::builder(
            "m",
            "",
            64,
            PageShape::new(&[PAGE_BLOCKS * BLOCK_BYTES as u32]).expect("a small page"),
        )
        .build();
        Store {
            config: Config {
                store: StoreId::from_bytes([7; 16]),
                segment_blocks: SEGMENT_BLOCKS,
                sync,
                write_bytes_max: 1 << 30,
                copy_blocks_max: 1 << 20,
                read_only: false,
            },
            namespace: namespace.expect("plain fields"),
            page_blocks: PAGE_BLOCKS,
            keys: (0..NAMES).map(key).collect(),
            map: SegmentMap::new(&[segments], SEGMENT_BLOCKS),
            sums: RefCell::default(),
            segments,
        }
    }

    pub fn blank(&self) -> Image {
        Image::blank((self.segments * SEGMENT_BLOCKS) as usize)
    }

    pub fn index(&self) -> Index {
        let blocks = u64::from(self.segments * SEGMENT_BLOCKS);
        Index::new(self.segments as usize, blocks)
    }

    pub fn superblock(&self, run: Run, state: OpenState) -> Superblock {
        Superblock {
            store: self.config.store,
            volume: 0,
            generation: 1,
            run,
            state,
            created_unix_s: 0,
            holder: Holder {
                pid: 1,
                pid_scope: [0; 16],
            },
            segment_blocks: SEGMENT_BLOCKS,
            features: Features::default(),
            volumes: vec![VolumeEntry {
                id: VolumeId::from_bytes([1; 16]),
                segments: self.segments,
                lost: false,
                path: "volume".to_owned(),
            }],
        }
    }

    pub fn segment_offset(&self, segment: u32) -> u64 {
        SEGMENTS_OFFSET + u64::from(segment * SEGMENT_BLOCKS) * BLOCK_BYTES as u64
    }

    /// Names are numbered chain by chain.
    pub fn ask(&self, name: usize) -> Ask {
        let depth = name % CHAIN;
        Ask {
            key: self.keys[name],
            parent: (depth > 0).then(|| self.keys[name - 1]),
            depth: u32::try_from(depth).expect("short chains"),
        }
    }

    /// The bytes of the `version`-th attempt to store a page, different for every attempt, and
    /// their checksum.
    pub fn payload(&self, name: usize, version: usize) -> (Vec<u8>, u64) {
        let mut bytes = vec![0; self.page_blocks as usize * BLOCK_BYTES];
        for (block, out) in (1..).zip(bytes.chunks_exact_mut(BLOCK_BYTES)) {
            let word = mix(mix(name as u64, version as u64), block);
            for out in out.as_chunks_mut::<8>().0 {
                *out = word.to_le_bytes();
            }
        }
        let mut checksum = PageChecksum::new(self.namespace.fingerprint(), &self.keys[name]);
        checksum.blocks(&bytes);
        (bytes, checksum.finish())
    }
}

fn key(name: usize) -> PageKey {
    let mut bytes = [0; 32];
    for (at, out) in (0..).zip(bytes.as_chunks_mut::<8>().0) {
        *out = mix(name as u64 + 1, at).to_le_bytes();
    }
    PageKey::from_bytes(bytes)
}
