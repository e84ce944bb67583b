//! The content of a small volume, block by block, and a disk that answers at once.
//!
//! An [`Image`] keeps a digest of itself that changes with each block. So an image that was judged
//! before is recognised without reading it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_disk::{Action, Buffer, Choice, Disk, DiskError, Op, Piece};
use larder_engine::format::{
    BLOCK_BYTES, CLOSING_OFFSET, SEGMENTS_OFFSET, SUPERBLOCK_OFFSETS, Superblock, SuperblockError,
    TAIL_BYTES, quotas_offsets,
};
use larder_sim_runtime::dice::mix;
use larder_sim_runtime::medium::Block;
use larder_store::volume::choose;
use larder_store::volume::simulated::decode;
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};

use crate::lines::{answer, choice, each_block};

/// A block on its way to a volume: its position among the blocks in use, and a fingerprint of it.
#[derive(Clone, Debug)]
pub struct Written {
    pub at: usize,
    bytes: Arc<Block>,
    pub print: u128,
}

impl Written {
    fn new(at: usize, bytes: &Block) -> Written {
        Written {
            at,
            bytes: Arc::new(*bytes),
            print: print(at, bytes),
        }
    }

    /// The blocks of a write at a byte offset of the volume.
    pub fn blocks(offset: u64, buffer: &Buffer) -> Vec<Written> {
        let mut blocks = Vec::with_capacity(buffer.len() / BLOCK_BYTES);
        let first = block_of(offset);
        each_block(buffer, |block| {
            blocks.push(Written::new(first + blocks.len(), block));
        });
        blocks
    }
}

/// The blocks before the segments that are in use: the first copies of the superblock, and the
/// closing statement.
const BEFORE: [u64; 3] = [SUPERBLOCK_OFFSETS[0], SUPERBLOCK_OFFSETS[1], CLOSING_OFFSET];

/// The position of a block: those before the segments come first, and the last copy of the
/// superblock comes last.
fn block_of(offset: u64) -> usize {
    match offset.checked_sub(SEGMENTS_OFFSET) {
        Some(offset) => {
            BEFORE.len() + usize::try_from(offset).expect("a small volume") / BLOCK_BYTES
        }
        None => {
            let at = BEFORE.iter().position(|at| *at == offset);
            at.expect("a block in use")
        }
    }
}

/// Zero for a block of zeros, at any position.
fn print(at: usize, bytes: &Block) -> u128 {
    if *bytes == [0; BLOCK_BYTES] {
        return 0;
    }
    let lane = |salt| rapidhash_v3_seeded(bytes, &RapidSecrets::seed(mix(at as u64, salt)));
    u128::from(lane(1)) << 64 | u128::from(lane(2))
}

/// The blocks of a volume that are in use.
#[derive(Clone, Default)]
pub struct Image {
    blocks: Vec<(Arc<Block>, u128)>,
    digest: u128,
}

impl Image {
    /// A new volume: the copies of its superblock, and blocks of zeros in segments.
    pub fn new(superblock: &Block, blocks: usize) -> Image {
        let zero: Arc<Block> = Arc::new([0; BLOCK_BYTES]);
        let mut image = Image {
            blocks: vec![(zero, 0); BEFORE.len() + blocks + 1],
            digest: 0,
        };
        for at in image.superblocks() {
            image.put(&Written::new(at, superblock));
        }
        image
    }

    pub fn put(&mut self, written: &Written) {
        let block = &mut self.blocks[written.at];
        self.digest ^= block.1 ^ written.print;
        *block = (written.bytes.clone(), written.print);
    }

    /// A digest: the same for equal images, and different for different ones but for negligible
    /// odds.
    pub fn digest(&self) -> u128 {
        self.digest
    }

    /// The positions of the copies of the superblock. The last one follows the segments.
    fn superblocks(&self) -> [usize; 3] {
        [0, 1, self.blocks.len() - 1]
    }

    /// The newest valid copy of the superblock, and which copy it is.
    pub fn superblock(&self) -> Result<(Superblock, usize), SuperblockError> {
        choose(&self.superblocks().map(|at| decode(&self.blocks[at].0[..])))
    }

    /// The places of the quotas, which are blank. The last one is behind the last superblock.
    fn quotas(&self) -> [u64; 3] {
        let segments = self.blocks.len().saturating_sub(BEFORE.len() + 1) * BLOCK_BYTES;
        quotas_offsets(SEGMENTS_OFFSET + segments as u64 + TAIL_BYTES)
    }

    /// Carries out a read at a byte offset of the volume.
    pub fn read(&self, offset: u64, buffer: &mut Buffer) -> Result<(), DiskError> {
        let are_quotas = self.quotas().contains(&offset);
        let blocks = match are_quotas {
            true => None,
            false => self.blocks_at(offset, buffer.len() / BLOCK_BYTES),
        };
        // SAFETY: the operation has not been answered.
        let parts = unsafe { buffer.parts_mut() };
        if are_quotas {
            parts.for_each(|part| part.fill(0));
            return Ok(());
        }
        let out = parts.flat_map(|part| part.chunks_exact_mut(BLOCK_BYTES));
        for (out, (bytes, _)) in out.zip(blocks.ok_or(DiskError::NoProgress)?) {
            out.copy_from_slice(&bytes[..]);
        }
        Ok(())
    }

    /// Blocks at a byte offset of the volume, each with a digest. `None` beyond the volume's end.
    pub fn blocks_at(&self, offset: u64, count: usize) -> Option<&[(Arc<Block>, u128)]> {
        let first = block_of(offset);
        self.blocks.get(first..first + count)
    }
}

/// A volume in memory. It answers at once.
pub struct Platter {
    image: Mutex<Image>,
    choice: Choice,
}

impl Platter {
    pub fn new() -> Platter {
        Platter {
            image: Mutex::default(),
            choice: choice(),
        }
    }

    pub fn image(&self) -> MutexGuard<'_, Image> {
        self.image.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Disk for Platter {
    unsafe fn submit(&self, ops: Vec<Op>) {
        for mut op in ops {
            let result = match &mut op.action {
                Action::Read { offset, buffer } => self.image().read(*offset, buffer),
                Action::Write { offset, buffer } => {
                    let blocks = Written::blocks(*offset, buffer);
                    blocks.iter().for_each(|block| self.image().put(block));
                    Ok(())
                }
                Action::Sync => Ok(()),
            };
            let (sink, done) = answer(op, result);
            sink.done(vec![done]);
        }
    }

    unsafe fn register(&self, _: &[Piece]) -> String {
        "simulated".to_owned()
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn shutdown(&self) {}
}
