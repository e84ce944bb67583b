//! The staging area: memory that all processes of a store map, through which pages read once reach
//! several readers.
//!
//! ```text
//!   units:  | words ... | page ......... | page ......... |   free   | page ...
//!             one word a unit: the state of the slot that begins there
//! ```
//!
//! A *slot* is the run of units that one page occupies, named by its first unit and a generation.
//! Its word is the state of the page: being read into the slot, ready, or over. A waiter in any
//! process sleeps on the word (`futex(2)`).
//!
//! Owns: the memory ([`sealed`](larder_base::sealed)), and the meaning of the words.
//! [`staging`](super::staging) decides which page is where.
//!
//! Invariants:
//! - There is never a reference into the memory, except to its words, which are atomics: the
//!   device, or any process that has the area mapped, may change its bytes at any moment.
//! - So no decision rests on the content of the area. A process that copies a page out verifies its
//!   private copy. A word is only a hint for when to look.
//!
//! Does not defend against: a process that forges a page and its CRC. Every process that may map
//! the area may write to the volumes as well.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use larder_base::runtime::Instant;
use larder_base::sealed::Sealed;
use larder_base::system::words;
use larder_disk::Piece;
use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};

/// Bytes of a unit, the granularity of allocation.
pub(crate) const UNIT_BYTES: usize = 64 << 10;

/// Lengths are multiples of a huge page of 2 MiB on each machine, whatever the size of its own
/// memory pages.
const HUGE_BYTES: usize = 2 << 20;

/// Bytes of a unit's word.
const WORD_BYTES: usize = size_of::<AtomicU32>();

/// Longest area, in bytes. A longer one would stage no more pages.
const AREA_BYTES_MAX: u64 = 64 << 30;

/// Largest area made of pre-reserved huge pages (hugetlb). The kernel zeroes these pages at
/// creation while a client waits: 64 MiB took 16 ms, so this limit takes about a quarter of a
/// second.
const SET_ASIDE_BYTES_MAX: usize = 1 << 30;

/// Longest wait. A moment much further off could not be represented as an `Instant`.
const PATIENCE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// States in a word's two lowest bits; the generation is above them.
const FILLING: u32 = 0;
const READY: u32 = 1;
const OVER: u32 = 2;

/// One use of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotId {
    /// Its first unit.
    pub unit: u32,
    /// Number of the use of that unit. 30 bits.
    pub generation: u32,
}

impl SlotId {
    fn word(self, state: u32) -> u32 {
        self.generation << 2 | state
    }
}

/// The state in a slot's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// The page is being read.
    Filling,
    /// The page is there.
    Ready,
    /// The page will not come, or has gone.
    Over,
}

/// See the module.
pub(crate) struct Area {
    memory: Sealed,
}

impl Area {
    /// Makes an area of about `bytes`: of huge pages where the system has reserved some, else of
    /// normal ones.
    ///
    /// # Errors
    /// The kernel's, when there is no such memory.
    pub(crate) fn create(bytes: u64) -> io::Result<Area> {
        let bytes = bytes.min(AREA_BYTES_MAX);
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let bytes = bytes.max(1).next_multiple_of(HUGE_BYTES);
        let of = |flags| Sealed::create("larder-staging", bytes, flags);
        // The size is named: that of a machine without the name may be 512 MiB or 1 GiB.
        let reserved = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let set_aside = (bytes <= SET_ASIDE_BYTES_MAX).then(|| of(reserved));
        let memory = match set_aside {
            Some(Ok(memory)) => memory,
            _ => of(MemfdFlags::empty())?,
        };
        Ok(Area { memory })
    }

    /// Maps the area behind a file that another process has made.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a file that could be truncated or has no valid length;
    /// the kernel's.
    pub(crate) fn adopt(file: OwnedFd) -> io::Result<Area> {
        let suits = |bytes: u64| bytes <= AREA_BYTES_MAX && bytes.is_multiple_of(HUGE_BYTES as u64);
        let memory = Sealed::adopt(file, suits)?;
        Ok(Area { memory })
    }

    /// The file, to be passed to another process.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.memory.file()
    }

    /// Bytes of the whole area.
    pub(crate) fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// The units available for slots.
    pub(crate) fn units(&self) -> std::ops::Range<u32> {
        let units = self.bytes() / UNIT_BYTES;
        let first = (units * WORD_BYTES).div_ceil(UNIT_BYTES);
        let number = |units: usize| u32::try_from(units).unwrap_or(u32::MAX);
        number(first)..number(units)
    }

    /// Address of a slot with `bytes` bytes; `None` beyond the area.
    fn start(&self, unit: u32, bytes: usize) -> Option<*mut u8> {
        let offset = (unit as usize).checked_mul(UNIT_BYTES)?;
        let end = offset.checked_add(bytes)?;
        let inside = self.units().contains(&unit) && end <= self.bytes();
        let base = self.memory.start()?;
        inside.then(|| base.wrapping_add(offset))
    }

    /// The memory of a page in a slot, for the device to read into. Valid for as long as the area.
    pub(crate) fn piece(&self, slot: SlotId, bytes: usize) -> Option<Piece> {
        let ptr = self.start(slot.unit, bytes)?;
        Some(Piece { ptr, len: bytes })
    }

    /// Copies bytes of a slot out; false beyond the area. The copy may mix old and new bytes.
    pub(crate) fn copy(&self, slot: SlotId, offset: usize, to: &mut [u8]) -> bool {
        let end = offset.saturating_add(to.len());
        let Some(start) = self.start(slot.unit, end) else {
            return false;
        };
        let from = start.wrapping_add(offset);
        // SAFETY: `offset + to.len()` bytes from `start` are within the mapping, whose file cannot
        // shrink; `to` is borrowed exclusively and so is elsewhere. Other processes may write to
        // the memory meanwhile: every byte value is valid.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
        true
    }

    /// All its bytes, for a test or a simulation.
    #[cfg(any(test, feature = "simulated"))]
    pub(crate) fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes()];
        let read = rustix::io::pread(self.file(), &mut bytes, 0);
        bytes.truncate(read.unwrap_or(0));
        bytes
    }

    /// Writes bytes into a slot, for a planted bug.
    #[cfg(debug_assertions)]
    pub(crate) fn overwrite(&self, slot: SlotId, bytes: &[u8]) {
        let offset = u64::from(slot.unit) * UNIT_BYTES as u64;
        let _ = rustix::io::pwrite(self.file(), bytes, offset);
    }

    fn word(&self, unit: u32) -> Option<&AtomicU32> {
        if !self.units().contains(&unit) {
            return None;
        }
        let base = self.memory.start()?;
        let at = base.wrapping_add(unit as usize * WORD_BYTES);
        #[expect(
            clippy::cast_ptr_alignment,
            reason = "a mapping begins on a page, words lie four bytes apart"
        )]
        let word = at.cast::<u32>();
        // SAFETY: the words of all units are before the first unit of slots, within the mapping,
        // aligned, and are accessed as atomics only, here and in other processes of this program;
        // the borrow of `self` keeps the mapping.
        Some(unsafe { AtomicU32::from_ptr(word) })
    }

    /// Begins a use of a slot: its page is being read.
    pub(crate) fn begin(&self, slot: SlotId) {
        if let Some(word) = self.word(slot.unit) {
            word.store(slot.word(FILLING), Ordering::Release);
        }
    }

    /// Ends the wait for a slot's page, unless it has ended: the page is there, or will not come.
    pub(crate) fn settle(&self, slot: SlotId, is_there: bool) {
        let Some(word) = self.word(slot.unit) else {
            return;
        };
        let state = if is_there { READY } else { OVER };
        let settled = word.compare_exchange(
            slot.word(FILLING),
            slot.word(state),
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
        if settled.is_ok() {
            words::wake_all(word);
        }
    }

    /// The present state in a slot's word.
    pub(crate) fn look(&self, slot: SlotId) -> Look {
        match self
            .word(slot.unit)
            .map(|word| word.load(Ordering::Acquire))
        {
            Some(word) if word == slot.word(FILLING) => Look::Filling,
            Some(word) if word == slot.word(READY) => Look::Ready,
            _ => Look::Over,
        }
    }

    /// Waits until a slot's page is settled, at most `patience`; [`Look::Filling`] after that.
    pub(crate) fn wait(&self, slot: SlotId, patience: Duration) -> Look {
        let look = self.look(slot);
        let Some(word) = self.word(slot.unit).filter(|_| look == Look::Filling) else {
            return look;
        };
        let until = Instant::now() + patience.min(PATIENCE_MAX);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let slept = words::wait(word, slot.word(FILLING), left);
            let look = self.look(slot);
            let is_late = slept.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut);
            if look != Look::Filling || is_late {
                return look;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const SLOT: SlotId = SlotId {
        unit: 3,
        generation: 7,
    };

    #[test]
    fn bytes_written_in_one_mapping_are_copied_from_the_other() {
        let made = Area::create(3 << 20).unwrap();
        assert_eq!((made.bytes(), made.units()), (4 << 20, 1..64));
        let taken = Area::adopt(made.file().try_clone_to_owned().unwrap()).unwrap();
        let piece = made.piece(SLOT, 100_000).unwrap();
        // SAFETY: the piece is in the mapping.
        unsafe { std::ptr::write_bytes(piece.ptr, 5, piece.len) };
        let mut copy = vec![0; 90_000];
        assert!(taken.copy(SLOT, 10_000, &mut copy));
        assert!(copy.iter().all(|byte| *byte == 5));
    }

    #[test]
    fn nothing_beyond_the_area_is_touched() {
        let area = Area::create(4 << 20).unwrap();
        let at = |unit| SlotId {
            unit,
            generation: 0,
        };
        assert!(area.piece(at(63), UNIT_BYTES).is_some());
        for (unit, bytes) in [
            (63, UNIT_BYTES + 1),
            (64, 1),
            (u32::MAX, 1),
            (0, 1),
            (1, 4 << 20),
        ] {
            assert!(area.piece(at(unit), bytes).is_none(), "{unit} {bytes}");
            assert!(!area.copy(at(unit), bytes - 1, &mut [0]));
        }
        area.settle(at(u32::MAX), true);
        assert_eq!(area.wait(at(64), Duration::MAX), Look::Over);
    }

    #[test]
    fn a_file_that_could_be_cut_short_is_not_mapped() {
        let open =
            rustix::fs::memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let open = open.unwrap();
        rustix::fs::ftruncate(&open, 4 << 20).unwrap();
        assert!(Area::adopt(open).is_err());
        let made = Area::create(1).unwrap();
        assert!(rustix::fs::ftruncate(made.file(), 0).is_err());
        let file = tempfile::tempfile().unwrap();
        assert!(Area::adopt(file.into()).is_err());
    }

    #[test]
    fn a_waiter_is_woken_through_another_mapping_and_stops_at_its_patience() {
        let made = Area::create(1).unwrap();
        let taken = Area::adopt(made.file().try_clone_to_owned().unwrap()).unwrap();
        for (is_there, look) in [(true, Look::Ready), (false, Look::Over)] {
            made.begin(SLOT);
            assert_eq!(taken.wait(SLOT, Duration::ZERO), Look::Filling);
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| taken.wait(SLOT, Duration::from_secs(1000)));
                made.settle(SLOT, is_there);
                assert_eq!(waiter.join().unwrap(), look);
            });
            // A slot is settled once.
            made.settle(SLOT, !is_there);
            assert_eq!(made.look(SLOT), look);
        }
        let later = SlotId {
            generation: 8,
            ..SLOT
        };
        made.begin(later);
        assert_eq!(taken.look(SLOT), Look::Over);
        made.settle(SLOT, true);
        assert_eq!(taken.look(later), Look::Filling);
    }
}
