//! What can go wrong at a device. Every fault is a value; none takes the process down.

use std::sync::Arc;

use crate::pool::Tier;
use crate::tensors::TensorsError;

/// Why a device did not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// There is no such device here: the host device serves instead.
    #[error("no CUDA device: {why}")]
    Unavailable {
        /// What is missing.
        why: String,
    },
    /// Memory that is not there.
    #[error("{bytes} bytes for {what} are not to be had; make the pool smaller")]
    NoMemory {
        /// What it was for.
        what: &'static str,
        /// How much, in bytes.
        bytes: u64,
    },
    /// Memory that is too small for the pool meant for it.
    #[error("a host pool of {pages} pages needs {needed} bytes, the memory has {found}")]
    MemoryTooSmall {
        /// Pages of the pool.
        pages: u32,
        /// Bytes that they need.
        needed: u64,
        /// Bytes there are.
        found: u64,
    },
    /// Tensors that make no L1 pool.
    #[error("no L1 pool: {0}")]
    Tensors(#[from] TensorsError),
    /// Pools that share memory.
    #[error("the L1 and the L2 pool overlap")]
    PoolsOverlap,
    /// Pools between which nothing can be copied.
    #[error("the L1 and the L2 pool have different KV shapes")]
    ShapesDiffer,
    /// A page that its pool does not have.
    #[error("{tier} has {pages} pages, there is no page {page}")]
    NoSuchPage {
        /// In which pool.
        tier: Tier,
        /// Page number.
        page: u32,
        /// Pages of that pool.
        pages: u32,
    },
    /// A page named twice in one transfer: one of the copies would be lost.
    #[error("page {page} of {tier} is in the same transfer twice")]
    PageTwice {
        /// In which pool.
        tier: Tier,
        /// Page number.
        page: u32,
    },
    /// A part or layer that the shape does not have.
    #[error("the KV shape has no layer {layer} of part {part}")]
    NoSuchLayer {
        /// Part number.
        part: u32,
        /// Layer number.
        layer: u32,
    },
    /// A buffer that is not the size of a chunk.
    #[error("a chunk of this pool has {chunk_bytes} bytes, the buffer {bytes}")]
    ChunkSize {
        /// Bytes of a chunk.
        chunk_bytes: u32,
        /// Bytes of the buffer.
        bytes: usize,
    },
    /// A pool that another device allocated.
    #[error("the L1 pool belongs to another device")]
    ForeignPool,
    /// Memory that was not registered first, or not with this device.
    #[error("the L2 pool is not registered with this device")]
    NotRegistered,
    /// Memory of the host that cannot be page-locked.
    #[error(
        "{bytes} bytes of the L2 pool cannot be page-locked: {why}; see also the limit of locked memory (ulimit -l)"
    )]
    NotLockable {
        /// Bytes of the piece.
        bytes: u64,
        /// What the driver said.
        why: String,
    },
    /// Too much in flight.
    #[error("{in_flight} transfers are in flight, no more are taken; poll their tickets first")]
    Busy {
        /// Transfers in flight.
        in_flight: usize,
    },
    /// What had to happen first failed, so that nothing was copied.
    #[error("what the transfer had to come after failed: {0}")]
    After(Arc<DeviceError>),
    /// The promise behind a ticket was dropped.
    #[error("whoever was to complete this gave it up")]
    Abandoned,
    /// A copy failed. What it was to overwrite is undefined.
    #[error("copying layer {layer} failed: {why}")]
    Copy {
        /// Layer number.
        layer: u32,
        /// What the device said.
        why: String,
    },
    /// A call to the driver failed, and the device with it.
    #[error("{call} failed: {why}; the device is given up, the host serves on")]
    Driver {
        /// The call.
        call: &'static str,
        /// Name of the error.
        why: String,
    },
    /// The device was given up after an earlier failure.
    #[error("the device was given up after an earlier failure: {0}")]
    Dead(Arc<DeviceError>),
    /// The device is going away.
    #[error("the device was closed")]
    Closed,
    /// Streams of a device that has none.
    #[error("the host device has no streams; wait for the ticket itself")]
    NoStreams,
    /// A ticket that the device cannot wait for in a stream.
    #[error("the ticket is of another device and not settled; wait for it first")]
    ForeignTicket,
}
