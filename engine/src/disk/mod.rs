//! The disk: moves bytes between memory and volumes, behind the [`Disk`] trait.
//!
//! A disk takes batches of operations ([`Op`]) on the store's volumes. It answers each one exactly
//! once, through the [`Sink`] that came with it. It decides nothing: the core decides which bytes
//! go where, and the reader verifies them. It owns four things:
//!
//! - *Progress*: a short transfer is resumed. An interrupted, cancelled or postponed one is retried
//!   a bounded number of times. A transfer without progress is a failure ([`DiskError`]). A read
//!   that fails because of the medium is tried three times. A failed sync is never retried: the
//!   kernel reports a lost write once.
//! - *Depth*: at most `depth` operations of a volume are in the kernel at once. The rest wait.
//! - *Order*: reads of calls, the store's own structures (superblocks, headers, descriptors) and
//!   syncs come first, then writes of puts, then work in the background ([`Purpose`]). While a call
//!   reads, puts and work in the background are paced (`pace`).
//! - *Deadlines*: an operation that has not been handed to the kernel by its deadline never is. It
//!   is answered [`DiskError::Deadline`] when its turn comes, or at a call of [`Disk::expire`]. An
//!   operation in the kernel is always waited for: its buffers belong to the kernel.
//!
//! | module | task |
//! |---|---|
//! | [`health`] | the drive's own report of its wear and faults |
//! | `witness` | tries failed reads again, and notes errors that are no evidence on volumes |
//! | `patience` | the time for these further tries |
//! | [`probe`] | chooses between the disks by trying, with a reason in plain text |
//! | [`uring`] | moves bytes with one io_uring and one thread a volume |
//! | [`threads`] | moves bytes with `pread`/`pwrite`, where io_uring is forbidden |
//! | `queue` | the order of the operations of a volume that wait for the device |
//! | `job` | the progress of one operation, common to both: resume, retry, give up |
//! | `pacing` | the pace of a whole store, and its counters |
//! | `pace` | the rate of writes while reads are in progress |
//! | [`mailbox`] | waits for answers |
//!
//! All disks use [`carry_out`] for one operation. A simulated disk uses it with its own system
//! calls.
//!
//! An idle disk sleeps in the kernel: no polling, no timers. A timer runs only while a paced
//! operation waits for its moment.
//!
//! A disk is the only way to the bytes of an open store: pages, descriptors, headers and
//! superblocks, from the first read of recovery to the last write of a close. So a layer over it
//! ([`DiskWrapper`](crate::DiskWrapper)) sees them all. The exceptions:
//!
//! | exception | where | bytes |
//! |---|---|---|
//! | creating and enlarging | [`volume::create`](crate::volume::create) | new structures (1) |
//! | finding and locking volumes | [`volume`](crate::volume) | superblocks (2) |
//! | choosing the disk | [`probe`] | one block of each volume, read with each candidate |
//! | surveys of a store that is not open | [`survey`](crate::survey) | superblocks, read only |
//!
//! (1) First superblocks, and headers and blocks of new segments.
//!
//! (2) Read before there is a disk. They are read again through the disk, and only the second read
//! counts.
//!
//! The kernel is asked directly for locks, lengths and holes of the files: these calls move no
//! bytes.

pub mod health;
mod job;
pub mod mailbox;
mod pace;
mod pacing;
mod patience;
pub mod probe;
mod queue;
pub mod threads;
pub mod uring;
mod witness;

use std::fmt;
use std::io;
use std::sync::Arc;

pub(crate) use job::MEDIUM_READS_MAX;
pub use job::{Step, carry_out};
use larder_base::latency::DeviceLatencies;
use larder_base::memory::AlignedBuf;
use larder_base::runtime::Instant;
use larder_base::system::files::Handle;
use mailbox::ReadAt;
pub use pacing::Pacing;
pub(crate) use patience::Patience;
pub(crate) use witness::Witness;

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

/// Why an operation was not carried out in full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The kernel refused or the device failed.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
    /// The kernel reported success without moving a byte.
    #[error("the transfer made no progress (end of the volume?)")]
    NoProgress,
    /// Never handed to the kernel: its deadline had passed.
    #[error("the deadline passed before the operation was started")]
    Deadline,
    /// The disk was shut down before the operation was started.
    #[error("the disk is shut down")]
    Shutdown,
}

/// Whether an error number is about the bytes on the medium. The kernel reports an unrecovered read
/// of a drive as `ENODATA`, and bytes that fail their protection as `EILSEQ` (`blk_errors` in its
/// block/blk-core.c).
pub(crate) fn is_of_the_medium(errno: i32) -> bool {
    matches!(
        errno,
        libc::EIO | libc::EILSEQ | libc::ENODATA | libc::EREMOTEIO | libc::EBADMSG
    )
}

impl DiskError {
    /// Whether it is about the bytes on the medium, rather than about this attempt to read them
    /// (memory, limits).
    pub(crate) fn is_of_the_medium(&self) -> bool {
        match self {
            DiskError::Os(errno) => is_of_the_medium(*errno),
            DiskError::NoProgress => true,
            DiskError::Deadline | DiskError::Shutdown => false,
        }
    }

    /// Whether the cause is this process, or its limits: no worker threads, no memory, no
    /// permission.
    pub(crate) fn is_of_this_process(&self) -> bool {
        match self {
            DiskError::Os(errno) => matches!(
                *errno,
                libc::ECANCELED
                    | libc::EAGAIN
                    | libc::EINTR
                    | libc::ENOMEM
                    | libc::EPERM
                    | libc::EACCES
            ),
            DiskError::NoProgress => false,
            DiskError::Deadline | DiskError::Shutdown => true,
        }
    }

    /// Whether a volume that answers a write with this error refuses every other write too: it is
    /// full or read-only, or its device is gone.
    pub(crate) fn is_of_every_write(&self) -> bool {
        let DiskError::Os(errno) = self else {
            return false;
        };
        matches!(
            *errno,
            libc::ENOSPC
                | libc::EDQUOT
                | libc::EROFS
                | libc::ENODEV
                | libc::ENXIO
                | libc::ENOMEDIUM
        )
    }

    /// Succeeds if the error is a fact of the medium.
    ///
    /// # Errors
    /// The error itself, if it concerns this process, or the path to the medium.
    pub(crate) fn on_the_medium(&self) -> io::Result<()> {
        match self.is_of_the_medium() {
            true => Ok(()),
            false => Err((*self).into()),
        }
    }
}

impl From<DiskError> for io::Error {
    fn from(error: DiskError) -> io::Error {
        match error {
            DiskError::Os(errno) => io::Error::from_raw_os_error(errno),
            error => io::Error::other(error),
        }
    }
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

/// The options of a disk.
pub struct DiskOptions {
    /// The volumes' files, in the store's order; `None` for a lost volume. The disk holds these
    /// very descriptions until its last write is over, so that a lock on them lives exactly as
    /// long.
    pub files: Vec<Option<Arc<Handle>>>,
    /// Operations of one volume in the kernel at once.
    pub depth: u32,
    /// Receives the latency of each operation.
    pub latencies: Arc<DeviceLatencies>,
    /// Paces writes beside reads. By default nothing is paced.
    pub pacing: Arc<Pacing>,
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
