//! A volume in memory, for a core without files.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use larder_core::core::Config;
use larder_disk::{Action, Choice, Disk, DiskError, Done, Kind, Op, Piece};
use larder_engine::SyncPolicy;
use larder_engine::format::{
    BLOCK_BYTES, Clock, Features, History, Holder, OpenState, Run, SEGMENTS_OFFSET, StoreId,
    Superblock, VolumeEntry, VolumeId,
};

pub const STORE: StoreId = StoreId::from_bytes([7; 16]);

pub type Block = [u8; BLOCK_BYTES];

/// Blocks that were never written are zero. Blocks are counted from the start of segment 0.
pub struct Memory {
    blocks: Mutex<BTreeMap<u64, Block>>,
    /// Blocks that cannot be read.
    bad: BTreeSet<u32>,
    choice: Choice,
}

impl Memory {
    pub fn new(blocks: BTreeMap<u32, Block>, bad: BTreeSet<u32>) -> Memory {
        let blocks = blocks.into_iter().map(|(at, block)| (u64::from(at), block));
        Memory {
            blocks: Mutex::new(blocks.collect()),
            bad,
            choice: Choice {
                kind: Kind::Threads,
                reason: String::new(),
            },
        }
    }

    /// Writes whole blocks at an offset in the volume.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        let blocks = bytes.as_chunks::<BLOCK_BYTES>().0.iter().copied();
        let mut written = self.blocks.lock().unwrap();
        written.extend((block_at(offset)..).zip(blocks));
    }

    /// Reads whole blocks from an offset in the volume.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), DiskError> {
        let blocks = self.blocks.lock().unwrap();
        for (out, at) in out.chunks_exact_mut(BLOCK_BYTES).zip(block_at(offset)..) {
            if u32::try_from(at).is_ok_and(|at| self.bad.contains(&at)) {
                return Err(DiskError::Os(5));
            }
            out.copy_from_slice(blocks.get(&at).unwrap_or(&[0; BLOCK_BYTES]));
        }
        Ok(())
    }
}

/// The number of a block. Blocks before the segments have numbers that no segment has.
fn block_at(offset: u64) -> u64 {
    offset.wrapping_sub(SEGMENTS_OFFSET) / BLOCK_BYTES as u64
}

impl Disk for Memory {
    unsafe fn submit(&self, ops: Vec<Op>) {
        for op in ops {
            let Action::Read { offset, mut buffer } = op.action else {
                panic!("only reads go through the disk's interface");
            };
            let mut at = offset;
            // SAFETY: the operation is answered below.
            let result = unsafe { buffer.parts_mut() }.try_for_each(|part| {
                let read = self.read(at, part);
                at += part.len() as u64;
                read
            });
            op.sink.done(vec![Done {
                tag: op.tag,
                result,
                buffer: buffer.into_owned(),
            }]);
        }
    }

    unsafe fn register(&self, _: &[Piece]) -> String {
        String::new()
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn shutdown(&self) {}
}

/// The time of day at which a core's clock begins.
pub const BEGAN_MS: u64 = 1_800_000_000_000;

pub fn config(segment_blocks: u32) -> Config {
    Config {
        store: STORE,
        segment_blocks,
        sync: SyncPolicy::Relaxed,
        write_bytes_max: 1 << 30,
        copy_blocks_max: 64,
        read_only: false,
        began_ms: BEGAN_MS,
    }
}

/// The superblock of a store of one volume.
pub fn superblock(run: Run, state: OpenState, segments: u32, segment_blocks: u32) -> Superblock {
    Superblock {
        store: STORE,
        volume: 0,
        generation: 1,
        run,
        state,
        created_unix_s: 0,
        holder: Holder {
            pid: 1,
            pid_scope: [0; 16],
        },
        history: History::default(),
        clock: Clock::default(),
        keyring: 0,
        quotas: 0,
        segment_blocks,
        features: Features::default(),
        volumes: vec![VolumeEntry {
            id: VolumeId::from_bytes([1; 16]),
            segments,
            lost: false,
            path: String::new(),
        }],
    }
}
