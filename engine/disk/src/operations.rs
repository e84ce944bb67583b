//! The trait of all disks, the operations that it takes, and their answers.

use std::fmt;
use std::sync::Arc;

use larder_base::failure::DiskError;
use larder_base::memory::AlignedBuf;
use larder_base::runtime::Instant;

/// Largest transfer into which neighbouring extents are merged, in bytes. Larger single pages are
/// not split: one 16 MiB read ran at the device's full speed from huge-page buffers.
pub const MERGE_BYTES_MAX: usize = 1 << 20;

/// Most scatter-gather entries of one operation (the kernel's `IOV_MAX` is 1024).
pub const PIECES_MAX: usize = 256;

/// A piece of memory that an operation reads into or writes from: the kernel's `iovec`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Piece {
    /// Start of the piece.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

// SAFETY: a `Piece` is an address. The submitter promises (see `Op::read`, `Op::write`) that the
// memory is valid and not otherwise used until the operation is answered, from any thread.
unsafe impl Send for Piece {}
// SAFETY: as above; a shared `Piece` gives no access to the memory without unsafe code.
unsafe impl Sync for Piece {}

/// The memory of an operation.
#[derive(Debug)]
pub enum Buffer {
    /// Memory of the caller, valid until the answer.
    Borrowed(Vec<Piece>),
    /// Memory that travels with the operation and comes back with the answer.
    Owned(AlignedBuf),
}

/// The kind of an operation.
#[derive(Debug)]
pub enum Action {
    /// Read `buffer.len()` bytes at `offset`.
    Read {
        /// Byte offset in the volume; a multiple of the block size.
        offset: u64,
        /// The destination of the bytes.
        buffer: Buffer,
    },
    /// Write `buffer.len()` bytes at `offset`.
    Write {
        /// Byte offset in the volume; a multiple of the block size.
        offset: u64,
        /// The source of the bytes.
        buffer: Buffer,
    },
    /// Make everything written and answered so far durable (`fdatasync`).
    Sync,
}

/// Who waits for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A call: pages that a get reads or a put writes.
    Call,
    /// All who use the store: its own records (superblocks, headers, descriptors), and syncs.
    Record,
    /// No call: copies of reclaim, recovery, surveys, writes of unused blocks.
    Background,
}

/// One operation on one volume.
pub struct Op {
    /// Index of the volume in the store.
    pub volume: usize,
    /// The action.
    pub action: Action,
    /// Who waits for it.
    pub purpose: Purpose,
    /// Not handed to the kernel after this moment.
    pub deadline: Option<Instant>,
    /// The submitter's own number for the operation, returned with the answer.
    pub tag: u64,
    /// The receiver of the answer.
    pub sink: Arc<dyn Sink>,
}

/// The answer to one operation.
#[derive(Debug)]
pub struct Done {
    /// The operation's tag.
    pub tag: u64,
    /// Done in full, or the reason.
    pub result: Result<(), DiskError>,
    /// The memory of an operation that owned it.
    pub buffer: Option<AlignedBuf>,
}

/// Receives answers: on a disk's own thread, or on the submitter's for operations that cannot be
/// taken at all (the disk is shut down, the volume is not there). Must be quick and must not wait
/// for the disk. May submit to it. A panic in it ends the process.
pub trait Sink: Send + Sync {
    /// Takes a batch of answers. Every operation is answered exactly once.
    fn done(&self, answers: Vec<Done>);
}

/// Moves bytes between memory and the volumes of one store.
pub trait Disk: Send + Sync {
    /// Takes a batch of operations without waiting for any of them. After
    /// [`Disk::shutdown`] they are answered [`DiskError::Shutdown`]; on a volume that is not there,
    /// [`DiskError::Os`] with `ENODEV`.
    ///
    /// # Safety
    /// Memory behind every [`Buffer::Borrowed`] must stay valid, and must not be used in a
    /// conflicting way, until its operation has been answered.
    unsafe fn submit(&self, ops: Vec<Op>);

    /// Tries reads again whose results are errors, and replaces the results. A disk that only
    /// moves bytes ignores it.
    fn try_again(&self, _: &[ReadAt], _: &mut [Result<AlignedBuf, DiskError>]) {}

    /// Answers, on the caller's thread, waiting operations that must not be started any more
    /// because their deadline has passed. A disk without a queue ignores it.
    fn expire(&self) {}

    /// Registers long-lived memory with the kernel so that transfers inside it need no page
    /// pinning. Best effort: returns the result as text (for `doctor`, logs and stats), never
    /// fails.
    ///
    /// # Safety
    /// The memory must stay mapped until the disk has been dropped.
    unsafe fn register(&self, memory: &[Piece]) -> String;

    /// The kind of this disk, and why it was chosen, for `doctor`, logs and stats.
    fn choice(&self) -> &Choice;

    /// Answers every operation not yet started with [`DiskError::Shutdown`], waits until the kernel
    /// has finished the others, and stops the threads. Idempotent.
    fn shutdown(&self);
}

/// The kind of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// io_uring.
    Uring,
    /// `pread`/`pwrite` on threads.
    Threads,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Uring => "uring",
            Kind::Threads => "threads",
        })
    }
}

/// The chosen disk, and the reason.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The disk.
    pub kind: Kind,
    /// One line: why this disk was chosen, which kernel features it uses.
    pub reason: String,
}

/// One read into memory of its own.
#[derive(Clone, Copy, Debug)]
pub struct ReadAt {
    /// Index of the volume.
    pub volume: usize,
    /// Byte offset.
    pub offset: u64,
    /// Bytes.
    pub bytes: usize,
}

impl Buffer {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Buffer::Borrowed(pieces) => pieces.iter().map(|piece| piece.len).sum(),
            Buffer::Owned(memory) => memory.len(),
        }
    }

    /// Whether there is nothing to move.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory of a read, in order, for a disk that fills it itself. It may hold other bytes.
    ///
    /// # Safety
    /// The operation of the buffer was submitted, and is not answered before the last use of a
    /// part: until then borrowed memory is valid, and the disk's alone.
    pub unsafe fn parts_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let (owned, borrowed) = match self {
            Buffer::Owned(memory) => (Some(&mut memory[..]), [].as_slice()),
            Buffer::Borrowed(pieces) => (None, pieces.as_slice()),
        };
        let of_piece = |piece: &Piece| {
            // SAFETY: the caller's promise.
            unsafe { std::slice::from_raw_parts_mut(piece.ptr, piece.len) }
        };
        owned.into_iter().chain(borrowed.iter().map(of_piece))
    }

    /// The memory that goes back with the answer.
    pub fn into_owned(self) -> Option<AlignedBuf> {
        match self {
            Buffer::Owned(memory) => Some(memory),
            Buffer::Borrowed(_) => None,
        }
    }
}
