//! Memory that the owner of a store makes and its clients map, since each process does its own I/O:
//! the words of pacing, and the board of answers.
//!
//! All of it is atomics with hints: they are valid with any content.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use larder_base::sealed::Sealed;
use larder_format::VOLUMES_MAX;
use rustix::fs::MemfdFlags;

use super::pace::Words;

/// Bytes of the memory.
const BYTES: usize = 32 << 10;

/// Most processes with a row. Further ones count their operations, and do not show their oldest.
pub(super) const ROWS: usize = 64;

/// Upper bounds of the classes of times, in milliseconds. A last class has no bound.
pub const BOUNDS_MS: [u64; 11] = [10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000];

/// Operations by class of time.
pub type Classes = [u32; BOUNDS_MS.len() + 1];

/// The board: see [`board`](super::board).
#[derive(Debug)]
#[repr(C)]
pub(super) struct BoardWords {
    pub(super) ended: [Ended; VOLUMES_MAX],
    pub(super) rows: [Row; ROWS],
}

/// The operations of one volume that have ended, by class.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Ended(pub(super) [AtomicU32; BOUNDS_MS.len() + 1]);

#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Row {
    /// The process, by a number of its own; zero if the row is free.
    pub(super) process: AtomicU64,
    pub(super) beat_at: AtomicU64,
    /// By volume; zero if no operation is in the kernel.
    pub(super) oldest: [AtomicU64; VOLUMES_MAX],
}

impl Default for BoardWords {
    fn default() -> BoardWords {
        BoardWords {
            ended: Default::default(),
            rows: std::array::from_fn(|_| Row::default()),
        }
    }
}

/// The content. Processes of other releases use it too: new words come last.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Content {
    pub(super) pace: [Words; VOLUMES_MAX],
    pub(super) board: BoardWords,
}

const _: () = assert!(size_of::<Content>() <= BYTES && align_of::<Content>() <= 4096);

/// See the module.
#[derive(Debug)]
pub struct Common {
    memory: Memory,
    /// Another process has the memory.
    is_shared: AtomicBool,
}

#[derive(Debug)]
enum Memory {
    /// Of this process alone, and why.
    Own(Box<Content>, String),
    Shared(Sealed),
}

impl Common {
    /// Memory for other processes too, if there is any.
    #[must_use]
    pub fn create() -> Common {
        match Sealed::create("larder-common", BYTES, MemfdFlags::empty()) {
            Ok(memory) => Common::with(Memory::Shared(memory), false),
            Err(error) => Common::local(format!("no memory to share: {error}")),
        }
    }

    /// Memory of this process alone.
    #[must_use]
    pub fn local(why: String) -> Common {
        Common::with(Memory::Own(Box::default(), why), false)
    }

    /// The memory that another process has made.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if it is no such memory; the kernel's.
    pub fn adopt(file: OwnedFd) -> io::Result<Common> {
        let memory = Sealed::adopt(file, |bytes| bytes == BYTES as u64)?;
        Ok(Common::with(Memory::Shared(memory), true))
    }

    fn with(memory: Memory, is_shared: bool) -> Common {
        Common {
            memory,
            is_shared: AtomicBool::new(is_shared),
        }
    }

    /// The memory, to be passed to another process; `None` if it is this process's own.
    pub fn share(&self) -> Option<BorrowedFd<'_>> {
        let Memory::Shared(memory) = &self.memory else {
            return None;
        };
        self.is_shared.store(true, Relaxed);
        Some(memory.file())
    }

    /// Which processes have it: `shared`, or `local` with the reason if there is one.
    pub(super) fn state(&self) -> String {
        match &self.memory {
            Memory::Own(_, why) => format!("local: {why}"),
            Memory::Shared(_) if self.is_shared.load(Relaxed) => "shared".to_owned(),
            Memory::Shared(_) => "local".to_owned(),
        }
    }

    /// `None` in a forked child.
    pub(super) fn content(&self) -> Option<&Content> {
        match &self.memory {
            Memory::Own(content, _) => Some(content),
            Memory::Shared(memory) => {
                let content = memory.start()?.cast::<Content>();
                // SAFETY: the mapping has the size and the alignment (asserted above), holds only
                // atomics, which are valid with any content, and lives as long as `self`.
                Some(unsafe { &*content })
            }
        }
    }
}
