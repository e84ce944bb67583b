//! The device interface used by the tiers.

use std::fmt;

use crate::error::DeviceError;
use crate::layout::Layout;
use crate::pool::{ChunkAt, HostMemory, L1Pool, L2Pool};
use crate::shape::KvShape;
use crate::tensors::Tensors;
use crate::ticket::{Gated, Ticket};
use crate::transfer::{RowCopy, Transfer};

/// Holds an L1 pool and copies between it and L2 pools of the host.
///
/// Loads run in submission order, and so do stores. Between a load and a store only `after` defines
/// an order. A failed transfer leaves its destination bytes undefined and does not affect other
/// transfers.
pub trait Device: Send + Sync {
    /// The name for logs and statistics.
    fn name(&self) -> String;

    /// Registers host memory as an L2 pool that this device can copy from and to.
    ///
    /// # Errors
    /// The memory is too small, or the device cannot use it. The memory is dropped.
    fn register(
        &self,
        memory: HostMemory,
        layout: Layout,
        shape: &KvShape,
        pages: u32,
    ) -> Result<L2Pool, DeviceError>;

    /// Allocates a zeroed L1 pool.
    ///
    /// # Errors
    /// There is not enough memory.
    fn alloc_l1(&self, shape: &KvShape, pages: u32) -> Result<L1Pool, DeviceError>;

    /// Adopts the engine's own memory as an L1 pool, with its current contents.
    ///
    /// # Errors
    /// [`DeviceError::Tensors`]: the memory does not match the shape, or is not in this device's
    /// memory. The memory is dropped.
    fn adopt_l1(
        &self,
        tensors: Tensors,
        shape: &KvShape,
        pages: u32,
    ) -> Result<L1Pool, DeviceError>;

    /// Copies L2 to L1 layer by layer, with one ticket for each layer of the transfer. Nothing is
    /// written before `after` has settled. `after` must cover the last computation that reads or
    /// writes those L1 pages, and all writes to the L2 pages.
    ///
    /// # Errors
    /// The device refuses the transfer and returns it untouched.
    fn load(&self, transfer: Transfer, after: &Ticket) -> Result<Gated<Transfer>, Refused>;

    /// Copies all layers of the transfer from L1 to L2, with one ticket. Nothing is read before
    /// `after` has settled. `after` must cover the computation that writes those pages.
    ///
    /// # Errors
    /// The device refuses the transfer and returns it untouched.
    fn store(&self, transfer: Transfer, after: &Ticket) -> Result<Gated<Transfer>, Refused>;

    /// A ticket for all work enqueued so far on a foreign stream. Used as `after` of loads and
    /// stores.
    ///
    /// # Errors
    /// The device has no streams, or is dead; or the stream cannot be used.
    fn record(&self, stream: ForeignStream) -> Result<Ticket, DeviceError>;

    /// Makes all later work on a foreign stream wait for a ticket. The caller does not wait.
    ///
    /// # Errors
    /// The device has no streams, is dead, or cannot make a stream wait for this ticket; or the
    /// stream cannot be used.
    fn hold(&self, stream: ForeignStream, ticket: &Ticket) -> Result<(), DeviceError>;

    /// Whether forwards run on streams, behind which the rows of a page are copied.
    fn has_streams(&self) -> bool;

    /// Copies the first rows of a page to another page of the pool, in all layers and parts, behind
    /// all work enqueued so far on the stream of the forwards. Work enqueued on it later finds
    /// them. A device without streams gets none, and has copied the rows when it returns.
    ///
    /// # Errors
    /// There are no such pages or rows; the stream is missing, or cannot be used; or the device has
    /// no streams, or is dead.
    ///
    /// # Safety
    /// Until the ticket settles, nothing outside the stream writes the source or touches the
    /// destination.
    unsafe fn copy_rows(
        &self,
        pool: &L1Pool,
        copy: RowCopy,
        stream: Option<ForeignStream>,
    ) -> Result<Ticket, DeviceError>;

    /// Copies one chunk out of L1 and waits for the copy. For checks, not for serving.
    ///
    /// # Errors
    /// There is no such chunk, or `into` does not have the size of a chunk.
    ///
    /// # Safety
    /// No other access writes the chunk during the call.
    unsafe fn read_l1(
        &self,
        pool: &L1Pool,
        at: ChunkAt,
        into: &mut [u8],
    ) -> Result<(), DeviceError>;

    /// Copies one chunk into L1 and waits for the copy. For tests and replays without computation.
    ///
    /// # Errors
    /// There is no such chunk, or `from` does not have the size of a chunk.
    ///
    /// # Safety
    /// No other access reads or writes the chunk during the call.
    unsafe fn write_l1(&self, pool: &L1Pool, at: ChunkAt, from: &[u8]) -> Result<(), DeviceError>;
}

/// A stream created outside this crate, for example by torch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForeignStream(usize);

impl ForeignStream {
    /// A `CUstream` by its address. 0 is the default stream.
    ///
    /// # Safety
    /// The stream belongs to the device's context and outlives all uses of this value.
    #[must_use]
    pub unsafe fn new(stream: usize) -> ForeignStream {
        ForeignStream(stream)
    }

    /// The address of the stream.
    #[must_use]
    pub fn address(self) -> usize {
        self.0
    }
}

/// A transfer that a device refused.
#[derive(Debug)]
pub struct Refused {
    /// The reason.
    pub error: DeviceError,
    /// The transfer, untouched.
    pub transfer: Transfer,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the device refused a transfer of {} pages: {}",
            self.transfer.pairs().len(),
            self.error
        )
    }
}

impl std::error::Error for Refused {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}
