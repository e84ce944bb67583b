//! Errors of a device. Every fault is a value and never terminates the process.

use std::sync::Arc;

use crate::layout::Tier;
use crate::tensors::TensorsError;

/// Why a device did not execute a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// There is no such device on this machine. The host device takes its place.
    #[error("no CUDA device: {why}")]
    Unavailable {
        /// The missing component.
        why: String,
    },
    /// The memory is not available.
    #[error("no memory for {what} ({bytes} bytes); make the pool smaller")]
    NoMemory {
        /// The purpose of the memory.
        what: &'static str,
        /// The size in bytes.
        bytes: u64,
    },
    /// The memory is too small for its pool.
    #[error("a host pool of {pages} pages needs {needed} bytes, the memory has {found}")]
    MemoryTooSmall {
        /// Pages of the pool.
        pages: u32,
        /// Required bytes.
        needed: u64,
        /// Available bytes.
        found: u64,
    },
    /// The tensors are not valid as an L1 pool.
    #[error("no L1 pool: {0}")]
    Tensors(#[from] TensorsError),
    /// The pools share memory.
    #[error("the L1 and the L2 pool overlap")]
    PoolsOverlap,
    /// The pools have different shapes, so pages cannot be copied between them.
    #[error("the L1 and the L2 pool have different KV shapes")]
    ShapesDiffer,
    /// The pool does not have this page.
    #[error("{tier} has {pages} pages, there is no page {page}")]
    NoSuchPage {
        /// The pool.
        tier: Tier,
        /// Page number.
        page: u32,
        /// Pages of that pool.
        pages: u32,
    },
    /// A page occurs twice in one transfer: one of the copies would be lost.
    #[error("page {page} of {tier} is in the same transfer twice")]
    PageTwice {
        /// The pool.
        tier: Tier,
        /// Page number.
        page: u32,
    },
    /// The shape does not have this part or layer.
    #[error("the KV shape has no layer {layer} of part {part}")]
    NoSuchLayer {
        /// Part number.
        part: u32,
        /// Layer number.
        layer: u32,
    },
    /// The buffer does not have the size of a chunk.
    #[error("a chunk of this pool has {chunk_bytes} bytes, the buffer {bytes}")]
    ChunkSize {
        /// Bytes of a chunk.
        chunk_bytes: u32,
        /// Bytes of the buffer.
        bytes: usize,
    },
    /// The pool was allocated by another device.
    #[error("the L1 pool belongs to another device")]
    ForeignPool,
    /// The memory was not registered, or was registered with another device.
    #[error("the L2 pool is not registered with this device")]
    NotRegistered,
    /// The host memory cannot be page-locked.
    #[error(
        "{bytes} bytes of the L2 pool cannot be page-locked: {why}; see also the limit of locked \
         memory (ulimit -l)"
    )]
    NotLockable {
        /// Bytes of the piece.
        bytes: u64,
        /// The driver's error.
        why: String,
    },
    /// Too many transfers are in flight.
    #[error("{in_flight} transfers are in flight, no more are taken; poll their tickets first")]
    Busy {
        /// Transfers in flight.
        in_flight: usize,
    },
    /// A prerequisite of the transfer failed, so nothing was copied.
    #[error("a prerequisite of the transfer failed: {0}")]
    After(Arc<DeviceError>),
    /// The promise behind a ticket was dropped.
    #[error("the operation was abandoned before it completed")]
    Abandoned,
    /// A copy failed. The contents of its destination are undefined.
    #[error("copying layer {layer} failed: {why}")]
    Copy {
        /// Layer number.
        layer: u32,
        /// The device's error.
        why: String,
    },
    /// A driver call failed, and the device is dead.
    #[error("{call} failed: {why}; the device is no longer used, the host continues to serve")]
    Driver {
        /// The driver function.
        call: &'static str,
        /// Name of the error.
        why: String,
    },
    /// The stream of an engine is not usable. The device stays usable.
    #[error("the stream cannot be used: {call} failed: {why}")]
    Stream {
        /// The driver function.
        call: &'static str,
        /// Name of the error.
        why: String,
    },
    /// The stream is being captured into a graph, so nothing on it runs now.
    #[error(
        "the stream is being captured into a graph; record and hold before the capture begins, or \
         after it has ended"
    )]
    Capturing,
    /// The device died in an earlier failure.
    #[error("the device is no longer used after an earlier failure: {0}")]
    Dead(Arc<DeviceError>),
    /// The device is closing.
    #[error("the device was closed")]
    Closed,
    /// A stream was passed to a device without streams.
    #[error("the host device has no streams; wait for the ticket itself")]
    NoStreams,
    /// Rows are copied behind the forwards, and their stream was not passed.
    #[error("rows of a GPU are copied on the stream of the forwards; pass that stream")]
    StreamNeeded,
    /// The pages do not have these rows.
    #[error("a page has {page_tokens} rows, {rows} cannot be copied")]
    NoSuchRows {
        /// Rows to copy.
        rows: u32,
        /// Rows of a page.
        page_tokens: u32,
    },
    /// The device cannot make a stream wait for this ticket.
    #[error("the ticket is of another device and not settled; wait for it first")]
    ForeignTicket,
}
