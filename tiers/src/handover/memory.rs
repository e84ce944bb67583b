//! The memory of a prefill process that decode processes map: blocks of one page each.
//!
//! ```text
//!   words: one u64 a block | block: [part][layer][token] row | block | ...
//! ```
//!
//! A loan is a set of blocks under a number that is never used again. The word of its first block
//! has that number while it is lent.
//!
//! Invariants:
//! - There is never a reference into the memory, except to its words, which are atomics: another
//!   process may change its bytes at any moment.
//! - A loan ends before one of its blocks is written for another. So rows that were copied out are
//!   those of the loan if it is still lent after the copy ([`Memory::is_lent`]), also in a process
//!   that was stopped meanwhile.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use larder_base::sealed::Sealed;
use rustix::fs::MemfdFlags;
use rustix::mm::{Advice, madvise};
use serde::{Deserialize, Serialize};

use crate::planted::planted;

/// The blocks begin on a multiple of this.
const HEAD_ALIGN: usize = 4096;

/// Bytes of a block's word.
const WORD_BYTES: usize = size_of::<AtomicU64>();

/// Blocks that are lent together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Loan {
    /// Not zero.
    pub(super) number: u64,
    /// At least one, and no block twice.
    pub(super) blocks: Vec<u32>,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Memory {
    sealed: Sealed,
    blocks: u32,
    block_bytes: usize,
}

/// Bytes before the blocks, and of all.
fn sizes(blocks: u32, block_bytes: usize) -> Option<(usize, usize)> {
    let words = (blocks as usize).checked_mul(WORD_BYTES)?;
    let head = words.checked_next_multiple_of(HEAD_ALIGN)?;
    let bytes = (blocks as usize).checked_mul(block_bytes)?;
    Some((head, head.checked_add(bytes)?))
}

impl Memory {
    /// Makes memory of so many blocks.
    ///
    /// # Errors
    /// The kernel's, when there is no such memory.
    pub(super) fn create(blocks: u32, block_bytes: usize) -> io::Result<Memory> {
        let (_, bytes) = sizes(blocks, block_bytes).ok_or(io::ErrorKind::OutOfMemory)?;
        let sealed = Sealed::create("larder-handover", bytes, MemfdFlags::empty())?;
        Ok(Memory::over(sealed, blocks, block_bytes))
    }

    /// Maps the memory that another process has made.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a file that could be truncated or has another length;
    /// the kernel's.
    pub(super) fn adopt(file: OwnedFd, blocks: u32, block_bytes: usize) -> io::Result<Memory> {
        let (_, bytes) = sizes(blocks, block_bytes).ok_or(io::ErrorKind::InvalidInput)?;
        let sealed = Sealed::adopt(file, |found| found == bytes as u64)?;
        Ok(Memory::over(sealed, blocks, block_bytes))
    }

    fn over(sealed: Sealed, blocks: u32, block_bytes: usize) -> Memory {
        if let Some(start) = sealed.start() {
            // The first touch of each page takes longer than its copy.
            // SAFETY: the range is this mapping, and its bytes stay the same.
            let _refused =
                unsafe { madvise(start.cast(), sealed.bytes(), Advice::LinuxPopulateWrite) };
        }
        Memory {
            sealed,
            blocks,
            block_bytes,
        }
    }

    /// The file, to be passed to another process.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.sealed.file()
    }

    pub(super) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// The address of `bytes` bytes of a block; `None` beyond it.
    fn place(&self, block: u32, offset: usize, bytes: usize) -> Option<*mut u8> {
        let is_inside = block < self.blocks && offset.checked_add(bytes)? <= self.block_bytes;
        let (head, _) = sizes(self.blocks, self.block_bytes)?;
        let at = head + block as usize * self.block_bytes + offset;
        let start = self.sealed.start().filter(|_| is_inside)?;
        Some(start.wrapping_add(at))
    }

    fn word(&self, block: u32) -> Option<&AtomicU64> {
        let start = self.sealed.start().filter(|_| block < self.blocks)?;
        let at = start.wrapping_add(block as usize * WORD_BYTES);
        #[expect(
            clippy::cast_ptr_alignment,
            reason = "a mapping begins on a page, words lie eight bytes apart"
        )]
        let word = at.cast::<u64>();
        // SAFETY: the words of all blocks are before the first block, within the mapping, aligned,
        // and are accessed as atomics only; the borrow of `self` keeps the mapping.
        Some(unsafe { AtomicU64::from_ptr(word) })
    }

    fn word_of(&self, loan: &Loan) -> Option<&AtomicU64> {
        self.word(*loan.blocks.first()?)
    }

    /// Begins a loan.
    pub(super) fn lend(&self, loan: &Loan) {
        if let Some(word) = self.word_of(loan) {
            word.store(loan.number, Ordering::Release);
        }
    }

    /// Ends a loan. Writes for another come after this.
    pub(super) fn take_back(&self, loan: &Loan) {
        if let Some(word) = self.word_of(loan) {
            word.store(0, Ordering::Relaxed);
            fence(Ordering::Release);
        }
    }

    /// Whether a loan was in force until now: all that was copied from it before is its own.
    pub(super) fn is_lent(&self, loan: &Loan) -> bool {
        if planted!(TrustsReturnedMemory) {
            return true;
        }
        fence(Ordering::Acquire);
        let word = self.word_of(loan);
        word.is_some_and(|word| word.load(Ordering::Relaxed) == loan.number)
    }

    /// Copies bytes into a block. False beyond it.
    ///
    /// # Safety
    /// `bytes` bytes from `from` are readable, and nothing writes them meanwhile. This process has
    /// lent the block, and no other call copies to these bytes.
    pub(super) unsafe fn copy_in(
        &self,
        block: u32,
        offset: usize,
        from: *const u8,
        bytes: usize,
    ) -> bool {
        let Some(to) = self.place(block, offset, bytes) else {
            return false;
        };
        // SAFETY: `to` has `bytes` bytes in the mapping, whose file cannot shrink, and which no
        // other memory of this process overlaps. The rest is guaranteed by the caller.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        true
    }

    /// Copies bytes out of a block. False beyond it.
    ///
    /// # Safety
    /// `bytes` bytes from `to` are writable, and nothing else touches them meanwhile.
    pub(super) unsafe fn copy_out(
        &self,
        block: u32,
        offset: usize,
        to: *mut u8,
        bytes: usize,
    ) -> bool {
        let Some(from) = self.place(block, offset, bytes) else {
            return false;
        };
        // SAFETY: as above. Another process may write the bytes meanwhile: every value is valid.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        true
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn loan(number: u64, blocks: &[u32]) -> Loan {
        Loan {
            number,
            blocks: blocks.to_vec(),
        }
    }

    fn pair() -> (Memory, Memory) {
        let made = Memory::create(3, 1000).unwrap();
        let file = made.file().try_clone_to_owned().unwrap();
        (made, Memory::adopt(file, 3, 1000).unwrap())
    }

    #[test]
    fn bytes_of_one_mapping_are_copied_from_the_other() {
        let (made, taken) = pair();
        let (from, mut to) = ([7_u8; 300], [0_u8; 300]);
        // SAFETY: buffers of this test.
        assert!(unsafe { made.copy_in(2, 700, from.as_ptr(), 300) });
        // SAFETY: as above.
        assert!(unsafe { taken.copy_out(2, 700, to.as_mut_ptr(), 300) });
        assert_eq!(from, to);
    }

    #[test]
    fn nothing_beyond_a_block_is_touched() {
        let (made, _) = pair();
        let mut bytes = [0_u8; 301];
        for (block, offset, count) in [(2, 700, 301), (3, 0, 1), (0, usize::MAX, 2)] {
            // SAFETY: buffers of this test.
            assert!(!unsafe { made.copy_in(block, offset, bytes.as_ptr(), count) });
            // SAFETY: as above.
            assert!(!unsafe { made.copy_out(block, offset, bytes.as_mut_ptr(), count) });
        }
        assert!(!made.is_lent(&loan(1, &[3])) && !made.is_lent(&loan(1, &[])));
    }

    #[test]
    fn a_loan_is_in_force_until_it_is_taken_back() {
        let (made, taken) = pair();
        let (first, second) = (loan(1, &[1, 0]), loan(2, &[2, 1]));
        made.lend(&first);
        assert!(taken.is_lent(&first) && !taken.is_lent(&second));
        made.take_back(&first);
        assert!(!taken.is_lent(&first));
        made.lend(&second);
        assert!(taken.is_lent(&second) && !taken.is_lent(&first));
    }

    #[test]
    fn memory_of_another_length_is_not_mapped() {
        let (made, _) = pair();
        for (blocks, bytes) in [(2, 1000), (3, 999), (u32::MAX, usize::MAX)] {
            let file = made.file().try_clone_to_owned().unwrap();
            assert!(Memory::adopt(file, blocks, bytes).is_err());
        }
    }
}
