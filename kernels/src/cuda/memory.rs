//! Memory known to the driver: pools, page lists, adopted tensors, registered host memory.
//!
//! Invariant: memory is freed, unregistered or returned only after both streams have drained, or in
//! stream order. Copies hold no reference that the CPU could count.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::result::DriverError;
use cudarc::driver::{result, sys};

use super::driver::{Context, MemoryAt, Streams, name};
use super::pieces::Piece;
use crate::error::DeviceError;
use crate::shape::KvShape;
use crate::tensors::{Place, Tensor, Tensors, TensorsError};
use crate::transfer::{Direction, PagePair};

/// Memory of the device.
pub(crate) struct DeviceMemory {
    streams: Arc<Streams>,
    address: u64,
}

impl DeviceMemory {
    /// Allocates zeroed memory.
    pub(super) fn zeroed(streams: &Arc<Streams>, bytes: u64) -> Result<DeviceMemory, DeviceError> {
        let context = &streams.context;
        context.alive()?;
        let none = |_| DeviceError::NoMemory {
            what: "an L1 pool",
            bytes,
        };
        let size = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        // SAFETY: zeroed below, before the first read.
        let address = context.attempt(|| unsafe { result::malloc_sync(size) });
        let memory = DeviceMemory {
            streams: streams.clone(),
            address: address.map_err(none)?,
        };
        context.call("cuMemsetD8Async", || {
            // SAFETY: the size of the allocation.
            unsafe {
                result::memset_d8_async(memory.address, 0, size, streams.of(Direction::Load).0)
            }
        })?;
        streams.synchronize(streams.of(Direction::Load))?;
        Ok(memory)
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.streams.drain();
        // SAFETY: allocated by `zeroed`, freed once, and no copy is in flight.
        let _ = self
            .streams
            .context
            .attempt(|| unsafe { result::free_sync(self.address) });
    }
}

/// Device memory allocated outside this crate.
pub(super) struct Adopted {
    streams: Arc<Streams>,
    _tensors: Tensors,
}

impl Adopted {
    /// Adopts tensors that form a pool of this shape.
    ///
    /// # Errors
    /// A tensor is not, or no longer, in the memory of this device.
    pub(super) fn new(
        streams: &Arc<Streams>,
        tensors: Tensors,
        shape: &KvShape,
    ) -> Result<Adopted, DeviceError> {
        streams.context.alive()?;
        for (place, tensor) in tensors.each(shape) {
            is_here(&streams.context, place, tensor)?;
        }
        Ok(Adopted {
            streams: streams.clone(),
            _tensors: tensors,
        })
    }
}

impl Drop for Adopted {
    /// Drains the streams before the tensors are dropped.
    fn drop(&mut self) {
        self.streams.drain();
    }
}

/// Checks that both ends of a tensor are in the memory of the device. The bytes between them are
/// not checked: an allocator may have mapped them piece by piece.
fn is_here(context: &Context, place: Place, tensor: Tensor) -> Result<(), TensorsError> {
    let last = tensor.address + tensor.bytes.saturating_sub(1);
    for address in [tensor.address, last] {
        let found = context.memory_at(address);
        let why = match found {
            Ok(MemoryAt::Device(ordinal)) if context.is(ordinal) => continue,
            Ok(MemoryAt::Device(ordinal)) => format!("it is in that of device {ordinal}"),
            Ok(MemoryAt::Host) => "it is in the host's".to_owned(),
            Err(error) => name(error),
        };
        return Err(TensorsError::Elsewhere { place, why });
    }
    Ok(())
}

/// The pairs of one copy of a list. Longer copies from memory that is not page-locked may wait for
/// the stream. Source: "API synchronization behavior" in the CUDA driver API.
const PAIRS_MAX: usize = (64 << 10) / size_of::<PagePair>();

/// Device memory allocated and freed in stream order.
pub(super) struct Upload<'a> {
    streams: &'a Streams,
    direction: Direction,
    pub(super) address: u64,
}

impl<'a> Upload<'a> {
    /// Allocates memory and uploads the pairs, in the kernel's format. `None`: the GPU has no
    /// memory for them.
    ///
    /// The pairs stay valid until the copy is done. A driver that reads host memory directly may
    /// read them late.
    pub(super) fn new(
        streams: &'a Streams,
        direction: Direction,
        pairs: &[PagePair],
    ) -> Result<Option<Upload<'a>>, DeviceError> {
        let (context, stream) = (&streams.context, streams.of(direction).0);
        context.alive()?;
        // SAFETY: read only after the copies below, in stream order.
        let allocate = || unsafe { result::malloc_async(stream, size_of_val(pairs)) };
        let address = match context.attempt(allocate) {
            Ok(address) => address,
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => return Ok(None),
            Err(error) => return Err(context.die("cuMemAllocAsync", error)),
        };
        let upload = Upload {
            streams,
            direction,
            address,
        };
        for (part, pairs) in pairs.chunks(PAIRS_MAX).enumerate() {
            let at = address + (part * PAIRS_MAX * size_of::<PagePair>()) as u64;
            context.call("cuMemcpyHtoDAsync", || {
                // SAFETY: within the allocation.
                unsafe { result::memcpy_htod_async(at, pairs, stream) }
            })?;
        }
        Ok(Some(upload))
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        let stream = self.streams.of(self.direction).0;
        // SAFETY: allocated in this stream and freed once, in stream order.
        let _ = self
            .streams
            .context
            .attempt(|| unsafe { result::free_async(self.address, stream) });
    }
}

/// Host memory registered with the device.
pub(super) struct Registration {
    streams: Arc<Streams>,
    registered: Vec<u64>,
    /// Whether kernels can use the host addresses.
    pub(super) same_addresses: bool,
}

impl Registration {
    /// Registers memory piece by piece.
    ///
    /// # Errors
    /// The kernel or the driver refuses, usually because of the limit on lockable memory. The
    /// device stays usable.
    pub(super) fn new(
        streams: &Arc<Streams>,
        start: u64,
        pieces: &[Piece],
    ) -> Result<Registration, DeviceError> {
        streams.context.alive()?;
        let mut registration = Registration {
            streams: streams.clone(),
            registered: Vec::new(),
            same_addresses: true,
        };
        for piece in pieces {
            registration.add(start + piece.start, piece.end - piece.start)?;
        }
        Ok(registration)
    }

    /// Finds the pieces of memory that its owner has registered. This value never unregisters them.
    ///
    /// # Errors
    /// Some of the memory is not registered, or the driver does not report its range.
    pub(super) fn found(
        streams: &Arc<Streams>,
        start: u64,
        bytes: u64,
    ) -> Result<(Registration, Vec<Piece>), DeviceError> {
        streams.context.alive()?;
        let mut registration = Registration {
            streams: streams.clone(),
            registered: Vec::new(),
            same_addresses: true,
        };
        let mut pieces = Vec::new();
        let mut at = 0;
        while at < bytes {
            let refused = |why| DeviceError::NotLockable {
                bytes: bytes - at,
                why,
            };
            let context = &streams.context;
            let end = match context
                .memory_at(start + at)
                .map_err(|error| refused(name(error)))?
            {
                MemoryAt::Host => context.end_of_range(start + at),
                MemoryAt::Device(_) => {
                    return Err(refused("it is in a device's memory".to_owned()));
                }
            };
            let end = end.map_err(|error| refused(name(error)))?;
            // The driver must report a range that extends past this address.
            if end <= start + at {
                return Err(refused(
                    "the driver does not report where it ends".to_owned(),
                ));
            }
            let end = (end - start).min(bytes);
            registration.look_up(start + at, end - at)?;
            pieces.push(at..end);
            at = end;
        }
        Ok((registration, pieces))
    }

    fn add(&mut self, address: u64, bytes: u64) -> Result<(), DeviceError> {
        let host = address as *mut c_void;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        self.streams
            .context
            .attempt(|| {
                // SAFETY: the owner of the memory keeps it until this value is dropped.
                unsafe { sys::cuMemHostRegister_v2(host, bytes as usize, flags) }.result()
            })
            .map_err(|error| not_lockable(bytes, error))?;
        self.registered.push(address);
        self.look_up(address, bytes)
    }

    /// Checks whether kernels see registered memory at its host address.
    fn look_up(&mut self, address: u64, bytes: u64) -> Result<(), DeviceError> {
        let host = address as *mut c_void;
        let mut device = 0;
        self.streams
            .context
            .attempt(|| {
                // SAFETY: the memory is registered.
                unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut device, host, 0) }.result()
            })
            .map_err(|error| not_lockable(bytes, error))?;
        self.same_addresses &= device == address;
        Ok(())
    }
}

fn not_lockable(bytes: u64, error: DriverError) -> DeviceError {
    DeviceError::NotLockable {
        bytes,
        why: name(error),
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.streams.drain();
        for address in &self.registered {
            let host = *address as *mut c_void;
            // SAFETY: registered with exactly this address, unregistered once, and no copy is in
            // flight.
            let _ = self
                .streams
                .context
                .attempt(|| unsafe { sys::cuMemHostUnregister(host) }.result());
        }
    }
}
