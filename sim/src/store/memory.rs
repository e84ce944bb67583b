//! The memory of pages: of calls in progress, and a pool of it.

use larder_engine::AlignedBuf;

use crate::setup::BLOCK;

/// A byte that no page consists of.
pub const SCRIBBLE: u8 = 0xa5;

/// The memory of one page: aligned, or a few bytes off.
pub struct Memory {
    buffer: AlignedBuf,
    from: usize,
    bytes: usize,
}

/// Where the page begins in its buffer.
fn from(is_aligned: bool) -> usize {
    if is_aligned { 0 } else { 64 }
}

impl Memory {
    pub fn new(blocks: usize, is_aligned: bool) -> Memory {
        let from = from(is_aligned);
        let whole = (blocks + 1) * BLOCK;
        Memory {
            buffer: AlignedBuf::zeroed(whole).expect("memory"),
            from,
            bytes: blocks * BLOCK,
        }
    }
}

/// Memory of pages that no call uses. Each block differs from all blocks of pages: those repeat
/// their first word.
#[derive(Default)]
pub struct Pool(Vec<Memory>);

impl Pool {
    pub fn take(&mut self, blocks: usize, is_aligned: bool) -> Memory {
        let bytes = blocks * BLOCK;
        match self.0.iter().rposition(|memory| memory.bytes == bytes) {
            Some(at) => {
                let memory = self.0.swap_remove(at);
                let from = from(is_aligned);
                Memory { from, ..memory }
            }
            None => Memory::new(blocks, is_aligned),
        }
    }

    pub fn give_back(&mut self, memory: Vec<Memory>) {
        for mut memory in memory {
            for block in memory.chunks_exact_mut(BLOCK) {
                block[..8].fill(SCRIBBLE);
            }
            self.0.push(memory);
        }
    }
}

impl std::ops::Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[self.from..self.from + self.bytes]
    }
}

impl std::ops::DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[self.from..self.from + self.bytes]
    }
}
