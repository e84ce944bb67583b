//! The device for machines without a GPU: L1 in host memory, copies by memcpy.
//!
//! Owns: two streams, one for loads and one for stores. Each is a queue with one thread. In stepped
//! mode there are no threads, and a test or a simulation runs the steps itself
//! ([`HostDevice::stepped`]).
//!
//! Invariants: a stream executes its transfers in order, each only after its `after` has settled. A
//! job holds both pools and settles all its promises in every case.
//!
//! Faults covered: a failed `after` fails the transfer, and nothing is copied. Transfers in flight
//! fail when the device is dropped. More than [`IN_FLIGHT_MAX`] transfers are refused. Tests inject
//! their own faults ([`HostDevice::with_faults`]).

mod copy;
mod faults;
mod stream;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use crate::device::{Device, ForeignStream, Refused};
use crate::error::DeviceError;
use crate::layout::{Layout, pool_bytes};
use crate::pool::{ChunkAt, DeviceId, HostMemory, L1Pool, L2Pool, ZeroedBytes};
use crate::shape::KvShape;
use crate::tensors::Tensors;
use crate::ticket::{Gated, LayerTickets, Ticket};
use crate::transfer::{Direction, RowCopy, Transfer};
pub use faults::{Faults, Moment};
use stream::{Job, Stream};

/// Maximum number of transfers in flight, both directions together.
pub const IN_FLIGHT_MAX: usize = 1024;

/// The device of machines without a GPU.
pub struct HostDevice {
    id: DeviceId,
    faults: Arc<Faults>,
    loads: Arc<Stream>,
    stores: Arc<Stream>,
    in_flight: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
    /// The process that created the device. A forked child has a copy of the device but none of its
    /// threads.
    process: u32,
}

impl HostDevice {
    /// A device with one thread per direction.
    ///
    /// # Errors
    /// The threads cannot be started.
    pub fn new() -> Result<HostDevice, DeviceError> {
        Self::with_faults(Box::new(|_| Ok(())))
    }

    /// As [`HostDevice::new`], with faults injected by `faults`.
    ///
    /// # Errors
    /// The threads cannot be started.
    pub fn with_faults(faults: Faults) -> Result<HostDevice, DeviceError> {
        let mut device = Self::stepped(faults);
        for (name, stream) in [("load", &device.loads), ("store", &device.stores)] {
            let stream = stream.clone();
            let thread = std::thread::Builder::new()
                .name(format!("larder-{name}"))
                .spawn(move || stream.run())
                .map_err(|error| DeviceError::Unavailable {
                    why: format!("no thread for the {name} stream: {error}"),
                })?;
            device.threads.push(thread);
        }
        Ok(device)
    }

    /// A device without threads that copies only in [`HostDevice::step`]. For simulations and tests
    /// of order.
    #[must_use]
    pub fn stepped(faults: Faults) -> HostDevice {
        let faults = Arc::new(faults);
        let stream = |direction| Arc::new(Stream::new(direction, faults.clone()));
        HostDevice {
            id: DeviceId::next(),
            loads: stream(Direction::Load),
            stores: stream(Direction::Store),
            faults,
            in_flight: Arc::new(AtomicUsize::new(0)),
            threads: Vec::new(),
            process: std::process::id(),
        }
    }

    /// For a device without threads: copies one layer of the transfer at the head of the queue, or
    /// completes that transfer if nothing is left to copy. Returns whether it did anything. It does
    /// nothing if the queue is empty or the head waits for its `after`.
    #[must_use]
    pub fn step(&self, direction: Direction) -> bool {
        self.stream(direction).step()
    }

    fn stream(&self, direction: Direction) -> &Arc<Stream> {
        match direction {
            Direction::Load => &self.loads,
            Direction::Store => &self.stores,
        }
    }

    fn submit(
        &self,
        direction: Direction,
        transfer: Transfer,
        after: &Ticket,
    ) -> Result<Gated<Transfer>, Refused> {
        if let Err(error) = self.admit(direction, &transfer, after) {
            return Err(Refused { error, transfer });
        }
        let tickets = match direction {
            Direction::Load => transfer.layers().len(),
            Direction::Store => 1,
        };
        let (promises, tickets) = (0..tickets).map(|_| Ticket::promised()).unzip();
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.stream(direction).push(Job::new(
            transfer.plan(),
            promises,
            after.clone(),
            self.in_flight.clone(),
        ));
        Ok(Gated::free(transfer).behind(LayerTickets::by_layer(tickets)))
    }

    fn admit(
        &self,
        direction: Direction,
        transfer: &Transfer,
        after: &Ticket,
    ) -> Result<(), DeviceError> {
        if transfer.l1().device() != self.id {
            return Err(DeviceError::ForeignPool);
        }
        if transfer.l2().device() != self.id {
            return Err(DeviceError::NotRegistered);
        }
        if after.waits_for_gpu() {
            return Err(DeviceError::ForeignTicket);
        }
        let in_flight = self.in_flight.load(Ordering::Relaxed);
        if in_flight >= IN_FLIGHT_MAX {
            return Err(DeviceError::Busy { in_flight });
        }
        (self.faults)(Moment::Submit(direction))
    }

    /// The address of the chunk in host memory. Fails if `bytes` is not its size.
    fn chunk(&self, pool: &L1Pool, at: ChunkAt, bytes: usize) -> Result<*mut u8, DeviceError> {
        if pool.device() != self.id {
            return Err(DeviceError::ForeignPool);
        }
        Ok(copy::host_pointer(pool.chunk_of(at, bytes)?))
    }
}

impl Device for HostDevice {
    fn name(&self) -> String {
        "host memory".to_owned()
    }

    fn register(
        &self,
        memory: HostMemory,
        layout: Layout,
        shape: &KvShape,
        pages: u32,
    ) -> Result<L2Pool, DeviceError> {
        (self.faults)(Moment::Register)?;
        L2Pool::new(self.id, memory, layout, shape, pages, None)
    }

    fn alloc_l1(&self, shape: &KvShape, pages: u32) -> Result<L1Pool, DeviceError> {
        (self.faults)(Moment::Allocate)?;
        let memory = ZeroedBytes::new("an L1 pool", pool_bytes(shape, pages))?;
        let start = memory.start().as_ptr().expose_provenance() as u64;
        let memory = Box::new(memory);
        Ok(L1Pool::in_one_piece(self.id, memory, start, shape, pages))
    }

    fn adopt_l1(
        &self,
        tensors: Tensors,
        shape: &KvShape,
        pages: u32,
    ) -> Result<L1Pool, DeviceError> {
        (self.faults)(Moment::Allocate)?;
        let bases = tensors.bases(shape, pages)?;
        Ok(L1Pool::at(self.id, Box::new(tensors), bases, shape, pages))
    }

    fn load(&self, transfer: Transfer, after: &Ticket) -> Result<Gated<Transfer>, Refused> {
        self.submit(Direction::Load, transfer, after)
    }

    fn store(&self, transfer: Transfer, after: &Ticket) -> Result<Gated<Transfer>, Refused> {
        self.submit(Direction::Store, transfer, after)
    }

    fn record(&self, _stream: ForeignStream) -> Result<Ticket, DeviceError> {
        Err(DeviceError::NoStreams)
    }

    fn hold(&self, _stream: ForeignStream, _ticket: &Ticket) -> Result<(), DeviceError> {
        Err(DeviceError::NoStreams)
    }

    fn has_streams(&self) -> bool {
        false
    }

    unsafe fn copy_rows(
        &self,
        pool: &L1Pool,
        rows: RowCopy,
        stream: Option<ForeignStream>,
    ) -> Result<Ticket, DeviceError> {
        if stream.is_some() {
            return Err(DeviceError::NoStreams);
        }
        if pool.device() != self.id {
            return Err(DeviceError::ForeignPool);
        }
        let (bytes, pieces) = rows.pieces(pool)?;
        for (from, to) in pieces {
            let (from, to) = (copy::host_pointer(from), copy::host_pointer(to));
            // SAFETY: the rows of two different pages of the pool. The caller ensures that nothing
            // else writes the source or touches the destination.
            unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        }
        Ok(Ticket::done())
    }

    unsafe fn read_l1(
        &self,
        pool: &L1Pool,
        at: ChunkAt,
        into: &mut [u8],
    ) -> Result<(), DeviceError> {
        let chunk = self.chunk(pool, at, into.len())?;
        // SAFETY: the chunk is `into.len()` bytes inside the pool, and the caller ensures that it
        // is not written. `into` is borrowed exclusively.
        unsafe { std::ptr::copy_nonoverlapping(chunk, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    unsafe fn write_l1(&self, pool: &L1Pool, at: ChunkAt, from: &[u8]) -> Result<(), DeviceError> {
        let chunk = self.chunk(pool, at, from.len())?;
        // SAFETY: the chunk is `from.len()` bytes inside the pool, and the caller has exclusive
        // access to it. No borrowed memory overlaps it.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), chunk, from.len()) };
        Ok(())
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Do not wait for or lock anything here: a thread of the parent may have held any lock
            // at the moment of the fork.
            self.threads.drain(..).for_each(std::mem::forget);
            std::mem::forget((self.loads.clone(), self.stores.clone()));
            return;
        }
        self.loads.close();
        self.stores.close();
        for thread in self.threads.drain(..) {
            // A panicked thread has dropped its promises, so its waiters were notified.
            let _ = thread.join();
        }
    }
}
