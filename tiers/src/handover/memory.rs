//! The memory of a prefill process that decode processes map: blocks of one page each.
//!
//! ```text
//!   words: one u64 a block | to a page of the host | [part][block][layer][token] row
//! ```
//!
//! Each process whose L1 is on a device registers the blocks with it: they are a host pool in the
//! layout `page_first_direct`.
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
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use larder_base::sealed::Sealed;
use larder_kernels::{Device, DeviceError, Direction, HostMemory, KvShape, LayerTickets, Ticket};
use rustix::fs::MemfdFlags;
use rustix::mm::{Advice, madvise};
use serde::{Deserialize, Serialize};

use super::device::{DevicePool, Job, Move};
use crate::planted::planted;

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
pub(super) struct Memory {
    sealed: Arc<Sealed>,
    blocks: u32,
    place: Place,
    /// If L1 of this process is on a device.
    pool: Option<DevicePool>,
}

/// Where the rows of a block are.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Bytes before the blocks.
    head: usize,
    /// All bytes.
    bytes: usize,
    /// Bytes of a part of a block.
    part: usize,
    /// Parts of a block.
    parts: usize,
}

impl Place {
    fn of(blocks: u32, shape: &KvShape) -> Option<Place> {
        let (part, parts) = (shape.part_bytes() as usize, shape.parts() as usize);
        let words = (blocks as usize).checked_mul(WORD_BYTES)?;
        let head = words.checked_next_multiple_of(rustix::param::page_size())?;
        let rows = (blocks as usize).checked_mul(part)?.checked_mul(parts)?;
        Some(Place {
            head,
            bytes: head.checked_add(rows)?,
            part,
            parts,
        })
    }
}

impl Memory {
    /// Makes memory of so many blocks.
    ///
    /// # Errors
    /// The kernel's, when there is no such memory.
    pub(super) fn create(blocks: u32, shape: &KvShape) -> io::Result<Memory> {
        let place = Place::of(blocks, shape).ok_or(io::ErrorKind::OutOfMemory)?;
        let sealed = Sealed::create("larder-handover", place.bytes, MemfdFlags::empty())?;
        Ok(Memory::over(sealed, blocks, place))
    }

    /// Maps the memory that another process has made.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a file that could be truncated or has another length;
    /// the kernel's.
    pub(super) fn adopt(file: OwnedFd, blocks: u32, shape: &KvShape) -> io::Result<Memory> {
        let place = Place::of(blocks, shape).ok_or(io::ErrorKind::InvalidInput)?;
        let sealed = Sealed::adopt(file, |found| found == place.bytes as u64)?;
        Ok(Memory::over(sealed, blocks, place))
    }

    /// Registers the blocks with the device that has L1, if one has it.
    ///
    /// # Errors
    /// The device cannot use them.
    pub(super) fn registered(
        mut self,
        device: Option<Arc<dyn Device>>,
        shape: &KvShape,
    ) -> Result<Memory, DeviceError> {
        let Some(device) = device else {
            return Ok(self);
        };
        let start = self.sealed.start();
        let start = start.map(|start| start.wrapping_add(self.place.head));
        let start = start.and_then(NonNull::new).ok_or(DeviceError::Closed)?;
        let bytes = self.place.bytes - self.place.head;
        // SAFETY: the blocks of the mapping, which the owner keeps. They are initialised, and every
        // value of them is valid. This process accesses a block within its loan alone. Another
        // process may access the bytes at any moment, which no reference of this one sees.
        let memory = unsafe { HostMemory::new(start, bytes, Box::new(self.sealed.clone())) };
        self.pool = Some(DevicePool::new(device, memory, shape, self.blocks)?);
        Ok(self)
    }

    /// The blocks as a pool of the device that has L1. `None`: L1 is in host memory.
    pub(super) fn pool(&self) -> Option<&DevicePool> {
        self.pool.as_ref()
    }

    /// Has the device that has L1 copy rows, out of the memory (`Load`) or into it (`Store`).
    ///
    /// # Errors
    /// Those of [`DevicePool::copy`].
    ///
    /// # Safety
    /// As for [`DevicePool::copy`].
    pub(super) unsafe fn copy_by_device(
        &self,
        direction: Direction,
        job: &Job<'_>,
        after: &Ticket,
        begun: &mut Vec<LayerTickets>,
    ) -> Result<(), DeviceError> {
        let pool = self.pool.as_ref().ok_or(DeviceError::NotRegistered)?;
        let move_bytes = |of: Move| match of.direction {
            // SAFETY: the bytes are in a buffer of the pool, for which it is this thread's turn.
            Direction::Load => unsafe { self.copy_out(of.block, of.offset, of.at, of.bytes) },
            // SAFETY: as above. The caller has the block on loan.
            Direction::Store => unsafe { self.copy_in(of.block, of.offset, of.at, of.bytes) },
        };
        // SAFETY: guaranteed by the caller.
        unsafe { pool.copy(direction, job, after, begun, move_bytes) }
    }

    fn over(sealed: Sealed, blocks: u32, place: Place) -> Memory {
        if let Some(start) = sealed.start() {
            // The first touch of each page takes longer than its copy.
            // SAFETY: the range is this mapping, and its bytes stay the same.
            let _refused =
                unsafe { madvise(start.cast(), sealed.bytes(), Advice::LinuxPopulateWrite) };
        }
        Memory {
            sealed: Arc::new(sealed),
            blocks,
            place,
            pool: None,
        }
    }

    /// The file, to be passed to another process.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.sealed.file()
    }

    pub(super) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// The address of `bytes` bytes of a part of a block; `None` beyond it. `offset` counts from
    /// the first part of the block.
    fn place(&self, block: u32, offset: usize, bytes: usize) -> Option<*mut u8> {
        let Place {
            head, part, parts, ..
        } = self.place;
        let (number, rest) = (offset.checked_div(part)?, offset.checked_rem(part)?);
        let is_inside = block < self.blocks && number < parts && rest.checked_add(bytes)? <= part;
        let before = (number * self.blocks as usize).checked_add(block as usize)?;
        let at = head + before.checked_mul(part)? + rest;
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

    /// Two parts of 500 bytes a block.
    fn shape(tokens: u32) -> KvShape {
        KvShape::mha(5, 1, 5, 4, tokens).unwrap()
    }

    fn pair() -> (Memory, Memory) {
        let made = Memory::create(3, &shape(5)).unwrap();
        let file = made.file().try_clone_to_owned().unwrap();
        (made, Memory::adopt(file, 3, &shape(5)).unwrap())
    }

    #[test]
    fn bytes_of_one_mapping_are_copied_from_the_other() {
        let (made, taken) = pair();
        let (from, mut to) = ([7_u8; 300], [0_u8; 300]);
        for (block, offset) in [(0, 0), (2, 200), (1, 700), (2, 700)] {
            // SAFETY: buffers of this test.
            assert!(unsafe { made.copy_in(block, offset, from.as_ptr(), 300) });
        }
        let mut other = [1_u8; 300];
        // SAFETY: as above.
        assert!(unsafe { made.copy_in(0, 700, other.as_ptr(), 300) });
        // SAFETY: as above.
        assert!(unsafe { taken.copy_out(2, 700, to.as_mut_ptr(), 300) });
        assert_eq!(from, to);
        // SAFETY: as above.
        assert!(unsafe { taken.copy_out(2, 200, other.as_mut_ptr(), 300) });
        assert_eq!(from, other);
    }

    #[test]
    fn nothing_beyond_a_block_is_touched() {
        let (made, _) = pair();
        let mut bytes = [0_u8; 301];
        for (block, offset, count) in [
            (2, 700, 301),
            (0, 300, 201),
            (3, 0, 1),
            (0, 1000, 1),
            (0, usize::MAX, 2),
        ] {
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
        for (blocks, tokens) in [(2, 5), (3, 4), (u32::MAX, 5)] {
            let file = made.file().try_clone_to_owned().unwrap();
            assert!(Memory::adopt(file, blocks, &shape(tokens)).is_err());
        }
    }
}
