//! A sparse disk in memory: blocks that were never written are zeros and take no memory.
//!
//! It answers at once, on the caller's thread, and never loses a write. Copies are cheap: blocks
//! are shared until one of the copies writes its own. It takes only operations that own their
//! memory. It panics at transfers above [`TRANSFER_BYTES_MAX`]: there, bytes from disk have decided
//! the size of an allocation.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_disk::{Action, Buffer, Choice, Disk, DiskError, Done, Kind, Op, Piece};
use larder_engine::format::BLOCK_BYTES;

/// One block.
pub type Block = [u8; BLOCK_BYTES];

/// Longest allowed transfer, in bytes.
pub const TRANSFER_BYTES_MAX: usize = 256 << 20;

/// The volumes' blocks.
#[derive(Clone, Debug)]
pub struct Volume {
    blocks: u64,
    written: HashMap<u64, Arc<Block>>,
    unreadable: HashSet<u64>,
}

impl Volume {
    /// A volume of zeros, with this many blocks.
    #[must_use]
    pub fn new(blocks: u64) -> Volume {
        Volume {
            blocks,
            written: HashMap::new(),
            unreadable: HashSet::new(),
        }
    }

    /// Its length in blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Truncates the volume, or appends zeros.
    pub fn resize(&mut self, blocks: u64) {
        self.blocks = blocks;
        self.written.retain(|at, _| *at < blocks);
    }

    /// A block's bytes. Zeros where nothing was written.
    #[must_use]
    pub fn block(&self, at: u64) -> Block {
        self.written
            .get(&at)
            .map_or([0; BLOCK_BYTES], |block| **block)
    }

    /// Replaces a block. A block beyond the end is dropped.
    pub fn put(&mut self, at: u64, block: Block) {
        if at >= self.blocks {
            return;
        }
        self.unreadable.remove(&at);
        if block == [0; BLOCK_BYTES] {
            self.written.remove(&at);
        } else {
            self.written.insert(at, Arc::new(block));
        }
    }

    /// Makes a block unreadable until it is written again.
    pub fn make_unreadable(&mut self, at: u64) {
        self.unreadable.insert(at);
    }

    /// The non-zero blocks, in order.
    #[must_use]
    pub fn written(&self) -> Vec<u64> {
        let mut places: Vec<u64> = self.written.keys().copied().collect();
        places.sort_unstable();
        places
    }

    /// The blocks in the range of `start` and `bytes`. `None` when they are not whole blocks of
    /// this volume.
    fn range(&self, start: u64, bytes: usize) -> Option<std::ops::Range<u64>> {
        let block = BLOCK_BYTES as u64;
        let count = bytes as u64 / block;
        let is_whole = start.is_multiple_of(block) && bytes.is_multiple_of(BLOCK_BYTES);
        let first = start / block;
        let end = first.checked_add(count)?;
        (is_whole && end <= self.blocks).then_some(first..end)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), DiskError> {
        let range = self.range(offset, out.len()).ok_or(DiskError::NoProgress)?;
        for (at, out) in range.zip(out.chunks_exact_mut(BLOCK_BYTES)) {
            if self.unreadable.contains(&at) {
                return Err(DiskError::Os(5));
            }
            match self.written.get(&at) {
                Some(block) => out.copy_from_slice(&block[..]),
                None => out.fill(0),
            }
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DiskError> {
        let range = self
            .range(offset, bytes.len())
            .ok_or(DiskError::NoProgress)?;
        for (at, bytes) in range.zip(bytes.chunks_exact(BLOCK_BYTES)) {
            let mut block = [0; BLOCK_BYTES];
            block.copy_from_slice(bytes);
            self.put(at, block);
        }
        Ok(())
    }
}

/// See the module.
#[derive(Debug)]
pub struct MemoryDisk {
    volumes: Mutex<Vec<Volume>>,
    choice: Choice,
}

impl MemoryDisk {
    /// A disk of these volumes.
    #[must_use]
    pub fn new(volumes: Vec<Volume>) -> Arc<MemoryDisk> {
        Arc::new(MemoryDisk {
            volumes: Mutex::new(volumes),
            choice: Choice {
                kind: Kind::Threads,
                reason: "in memory".to_owned(),
            },
        })
    }

    /// The volumes, to read and to change.
    pub fn volumes(&self) -> MutexGuard<'_, Vec<Volume>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn carry_out(&self, op: Op) -> Done {
        let mut volumes = self.volumes();
        let volume = volumes.get_mut(op.volume);
        let (result, buffer) = match (op.action, volume) {
            (Action::Sync, Some(_)) => (Ok(()), None),
            (Action::Read { offset, mut buffer }, Some(volume)) => {
                let bytes = buffer.len();
                assert!(
                    bytes <= TRANSFER_BYTES_MAX,
                    "{bytes} bytes are read at once"
                );
                let mut at = offset;
                // SAFETY: the operation is answered after this.
                let read = unsafe { buffer.parts_mut() }.try_for_each(|part| {
                    let read = volume.read(at, part);
                    at += part.len() as u64;
                    read
                });
                (read, buffer.into_owned())
            }
            (
                Action::Write {
                    offset,
                    buffer: Buffer::Owned(bytes),
                },
                Some(volume),
            ) => (volume.write(offset, &bytes), Some(bytes)),
            (Action::Write { .. }, Some(_)) => (Err(DiskError::Os(22)), None),
            (_, None) => (Err(DiskError::Os(19)), None),
        };
        Done {
            tag: op.tag,
            result,
            buffer,
        }
    }
}

impl Disk for MemoryDisk {
    unsafe fn submit(&self, ops: Vec<Op>) {
        for op in ops {
            let sink = op.sink.clone();
            sink.done(vec![self.carry_out(op)]);
        }
    }

    unsafe fn register(&self, _: &[Piece]) -> String {
        "in memory".to_owned()
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn shutdown(&self) {}
}
