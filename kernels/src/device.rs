//! What the tiers ask of a device.

use std::fmt;

use crate::error::DeviceError;
use crate::layout::Layout;
use crate::pool::{ChunkAt, HostMemory, L1Pool, L2Pool};
use crate::shape::KvShape;
use crate::tensors::Tensors;
use crate::ticket::{Gated, Ticket};
use crate::transfer::Transfer;

/// Holds an L1 pool, and copies between it and L2 pools of the host.
///
/// Loads are carried out in the order in which they were given, and so are stores; between a load and a store only `after`
/// orders. A transfer that fails leaves the bytes it was to write undefined, and hurts no other.
pub trait Device: Send + Sync {
    /// What it is, for logs and stats.
    fn name(&self) -> String;

    /// Makes memory of the host an L2 pool that this device can copy from and to.
    ///
    /// # Errors
    /// The memory is too small, or the device cannot use it. The memory is given up.
    fn register(
        &self,
        memory: HostMemory,
        layout: Layout,
        shape: &KvShape,
        pages: u32,
    ) -> Result<L2Pool, DeviceError>;

    /// Allocates an L1 pool, zeroed.
    ///
    /// # Errors
    /// There is not that much memory.
    fn alloc_l1(&self, shape: &KvShape, pages: u32) -> Result<L1Pool, DeviceError>;

    /// Makes memory of an engine's own an L1 pool, with the bytes that it has.
    ///
    /// # Errors
    /// [`DeviceError::Tensors`]: it is not what the shape needs, or not in this device's memory. The memory is given up.
    fn adopt_l1(
        &self,
        tensors: Tensors,
        shape: &KvShape,
        pages: u32,
    ) -> Result<L1Pool, DeviceError>;

    /// L2 to L1, layer by layer, a ticket a layer. Nothing is written before `after` has settled: the last compute that reads
    /// or writes those pages of L1, and whatever fills those of L2.
    ///
    /// # Errors
    /// The device does not take it; the transfer comes back untouched.
    fn load(&self, transfer: Transfer, after: &Ticket) -> Result<Gated<Transfer>, Refused>;

    /// L1 to L2, all layers, one ticket. Nothing is read before `after` has settled: the compute that writes those pages.
    ///
    /// # Errors
    /// The device does not take it; the transfer comes back untouched.
    fn store(&self, transfer: Transfer, after: &Ticket) -> Result<Gated<Transfer>, Refused>;

    /// A ticket for all that has been put into a stream of somebody else so far: the `after` of loads and stores.
    ///
    /// # Errors
    /// The device has no streams, or is dead.
    fn record(&self, stream: ForeignStream) -> Result<Ticket, DeviceError>;

    /// Has all that is put into a stream of somebody else from here on wait for a ticket; the caller does not wait.
    ///
    /// # Errors
    /// The device has no streams, is dead, or cannot make a stream wait for this ticket.
    fn hold(&self, stream: ForeignStream, ticket: &Ticket) -> Result<(), DeviceError>;

    /// Copies one chunk out of L1 and waits for it: for checks, not for serving.
    ///
    /// # Errors
    /// There is no such chunk, or `into` has another size than a chunk.
    ///
    /// # Safety
    /// Nobody writes that chunk meanwhile.
    unsafe fn read_l1(
        &self,
        pool: &L1Pool,
        at: ChunkAt,
        into: &mut [u8],
    ) -> Result<(), DeviceError>;

    /// Copies one chunk into L1 and waits for it: for tests and replays, where nothing computes.
    ///
    /// # Errors
    /// There is no such chunk, or `from` has another size than a chunk.
    ///
    /// # Safety
    /// Nobody reads or writes that chunk meanwhile.
    unsafe fn write_l1(&self, pool: &L1Pool, at: ChunkAt, from: &[u8]) -> Result<(), DeviceError>;
}

/// A stream that somebody else made: torch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForeignStream(usize);

impl ForeignStream {
    /// A `CUstream` by its address; 0 is the default stream.
    ///
    /// # Safety
    /// The stream is of the device's context and outlives all uses of this value.
    #[must_use]
    pub unsafe fn new(stream: usize) -> ForeignStream {
        ForeignStream(stream)
    }

    /// Its address.
    #[must_use]
    pub fn address(self) -> usize {
        self.0
    }
}

/// A transfer that a device did not take.
#[derive(Debug)]
pub struct Refused {
    /// Why.
    pub error: DeviceError,
    /// The transfer.
    pub transfer: Transfer,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the device took none of {} pages: {}",
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
