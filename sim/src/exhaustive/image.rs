//! The content of a small volume, block by block, and a disk that reads it.
//!
//! An [`Image`] keeps a digest of itself that changes with each block. So an image that was judged
//! before is recognised without reading it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_engine::disk::{Action, Choice, Disk, DiskError, Done, Kind, Op, Piece};
use larder_engine::format::{BLOCK_BYTES, SEGMENTS_OFFSET};
use larder_sim_runtime::dice::mix;
use larder_sim_runtime::medium::Block;
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};

/// A block on its way to a volume: its position, counted from the first segment, and a fingerprint
/// of it.
#[derive(Clone, Debug)]
pub struct Written {
    pub at: usize,
    bytes: Arc<Block>,
    pub print: u128,
}

impl Written {
    /// The blocks of a write at a byte offset of the volume.
    pub fn blocks(offset: u64, bytes: &[u8]) -> Vec<Written> {
        let first = block_of(offset);
        let blocks = bytes.as_chunks::<BLOCK_BYTES>().0;
        let block = |(at, bytes): (usize, &Block)| Written {
            at,
            bytes: Arc::new(*bytes),
            print: print(at, bytes),
        };
        (first..).zip(blocks).map(block).collect()
    }
}

fn block_of(offset: u64) -> usize {
    usize::try_from(offset - SEGMENTS_OFFSET).expect("a small volume") / BLOCK_BYTES
}

/// Zero for a block of zeros, at any position.
fn print(at: usize, bytes: &Block) -> u128 {
    if *bytes == [0; BLOCK_BYTES] {
        return 0;
    }
    let lane = |salt| rapidhash_v3_seeded(bytes, &RapidSecrets::seed(mix(at as u64, salt)));
    u128::from(lane(1)) << 64 | u128::from(lane(2))
}

/// The segments of a volume.
#[derive(Clone)]
pub struct Image {
    blocks: Vec<(Arc<Block>, u128)>,
    digest: u128,
}

impl Image {
    pub fn blank(blocks: usize) -> Image {
        let zero: Arc<Block> = Arc::new([0; BLOCK_BYTES]);
        Image {
            blocks: vec![(zero, 0); blocks],
            digest: 0,
        }
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

    /// Reads at a byte offset of the volume into zeroed memory. Returns false beyond the volume's
    /// end.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        let Some(blocks) = self.blocks_at(offset, out.len() / BLOCK_BYTES) else {
            return false;
        };
        for ((bytes, print), out) in blocks.iter().zip(out.chunks_exact_mut(BLOCK_BYTES)) {
            match *print {
                0 => out.fill(0),
                _ => out.copy_from_slice(&bytes[..]),
            }
        }
        true
    }

    /// A digest of some blocks and their positions.
    pub fn print(&self, offset: u64, count: usize) -> u128 {
        let blocks = self.blocks_at(offset, count).unwrap_or_default();
        blocks.iter().fold(u128::from(offset), |sum, (_, print)| {
            sum.rotate_left(1) ^ print
        })
    }

    fn blocks_at(&self, offset: u64, count: usize) -> Option<&[(Arc<Block>, u128)]> {
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
    pub fn new(image: Image) -> Platter {
        Platter {
            image: Mutex::new(image),
            choice: Choice {
                kind: Kind::Threads,
                reason: "simulated".to_owned(),
            },
        }
    }

    pub fn image(&self) -> MutexGuard<'_, Image> {
        self.image.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Disk for Platter {
    unsafe fn submit(&self, ops: Vec<Op>) {
        for op in ops {
            let Action::Read { offset, mut buffer } = op.action else {
                panic!("only reads use the disk interface");
            };
            let mut at = offset;
            // SAFETY: the operation is answered below.
            let is_read = unsafe { buffer.parts_mut() }.all(|part| {
                let is_read = self.image().read(at, part);
                at += part.len() as u64;
                is_read
            });
            let result = if is_read {
                Ok(())
            } else {
                Err(DiskError::NoProgress)
            };
            op.sink.done(vec![Done {
                tag: op.tag,
                result,
                buffer: buffer.into_owned(),
            }]);
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
