//! What lies in memory for the driver: pools, page lists, memory of others, registered memory of the host.
//!
//! Invariant: memory is freed, unregistered or given back only after both streams have run dry, or in the order of a stream, since copies hold no
//! reference that the CPU could count.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::result::DriverError;
use cudarc::driver::{result, sys};

use super::driver::{Context, MemoryAt, Streams, name};
use super::pieces::Piece;
use crate::error::DeviceError;
use crate::shape::KvShape;
use crate::tensors::{Place, Tensor, Tensors, TensorsError};
use crate::transfer::Direction;

/// Memory of the device.
pub(crate) struct DeviceMemory {
    streams: Arc<Streams>,
    address: u64,
}

impl DeviceMemory {
    /// Zeroed.
    pub(super) fn zeroed(streams: &Arc<Streams>, bytes: u64) -> Result<DeviceMemory, DeviceError> {
        let context = &streams.context;
        context.alive()?;
        let none = |_| DeviceError::NoMemory {
            what: "an L1 pool",
            bytes,
        };
        let size = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        // SAFETY: zeroed below, before anybody reads it.
        let address = context.attempt(|| unsafe { result::malloc_sync(size) });
        let memory = DeviceMemory {
            streams: streams.clone(),
            address: address.map_err(none)?,
        };
        context.call("cuMemsetD8Async", || {
            // SAFETY: as many bytes as were allocated.
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

/// Memory of the device that somebody else allocated.
pub(super) struct Adopted {
    streams: Arc<Streams>,
    _tensors: Tensors,
}

impl Adopted {
    /// Of tensors that make a pool of this shape.
    ///
    /// # Errors
    /// One of them is not in this device's memory, or not any more.
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
    /// The tensors go after this.
    fn drop(&mut self) {
        self.streams.drain();
    }
}

/// Whether both ends of a tensor are in the device's memory. What lies between is not asked for: an allocator may have mapped it piece
/// by piece.
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

/// Device memory that comes and goes in the order of a stream.
pub(super) struct Upload<'a> {
    streams: &'a Streams,
    direction: Direction,
    pub(super) address: u64,
}

impl<'a> Upload<'a> {
    /// With these bytes in it.
    pub(super) fn new(
        streams: &'a Streams,
        direction: Direction,
        bytes: &[u8],
    ) -> Result<Upload<'a>, DeviceError> {
        let stream = streams.of(direction).0;
        let address = streams.context.call("cuMemAllocAsync", || {
            // SAFETY: read only after the copy below, in the order of the stream.
            unsafe { result::malloc_async(stream, bytes.len()) }
        })?;
        let upload = Upload {
            streams,
            direction,
            address,
        };
        // From memory that is not page-locked the bytes are taken before the call returns.
        streams.context.call("cuMemcpyHtoDAsync", || {
            // SAFETY: as many bytes as were allocated.
            unsafe { result::memcpy_htod_async(address, bytes, stream) }
        })?;
        Ok(upload)
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        let stream = self.streams.of(self.direction).0;
        // SAFETY: allocated in this stream, freed once, in its order.
        let _ = self
            .streams
            .context
            .attempt(|| unsafe { result::free_async(self.address, stream) });
    }
}

/// Memory of the host that the device knows of.
pub(super) struct Registration {
    streams: Arc<Streams>,
    registered: Vec<u64>,
    /// Whether kernels reach it by the host's own addresses.
    pub(super) same_addresses: bool,
}

impl Registration {
    /// Registers memory, piece by piece.
    ///
    /// # Errors
    /// The kernel or the driver refuses: for want of lockable memory, mostly. The device lives on.
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

    /// Of memory that its owner has registered, and in which pieces. Nothing of it is unregistered here.
    ///
    /// # Errors
    /// Some of it is not registered, or the driver does not say.
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
            // No progress would be no piece.
            if end <= start + at {
                return Err(refused("the driver does not say where it ends".to_owned()));
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
                // SAFETY: memory that its owner keeps until this is dropped.
                unsafe { sys::cuMemHostRegister_v2(host, bytes as usize, flags) }.result()
            })
            .map_err(|error| not_lockable(bytes, error))?;
        self.registered.push(address);
        self.look_up(address, bytes)
    }

    /// By which address kernels know memory that is registered.
    fn look_up(&mut self, address: u64, bytes: u64) -> Result<(), DeviceError> {
        let host = address as *mut c_void;
        let mut device = 0;
        self.streams
            .context
            .attempt(|| {
                // SAFETY: registered above.
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
            // SAFETY: registered with this very address, unregistered once, and no copy is in flight.
            let _ = self
                .streams
                .context
                .attempt(|| unsafe { sys::cuMemHostUnregister(host) }.result());
        }
    }
}
