//! The driver: contexts, streams, events, copies, kernels.
//!
//! Owns: every call into libcuda except those in `memory` and `copies`. cudarc resolves each
//! function at its first call and panics if it is missing. Therefore `present` first looks up the
//! library and all of [`FUNCTIONS`], and this crate calls no function outside that list. The only
//! exception is the batched copy, which only newer drivers have; callers must check
//! [`has_batches`](super::copies::has_batches) first.
//!
//! Invariant: each object holds its context, so handles stay valid while they are in use.
//!
//! Faults covered: a missing library, no device, a function missing in an old driver. Each is
//! [`DeviceError::Unavailable`]. A failed call marks the device as dead permanently; later calls
//! return the original reason. Not every error of CUDA ends the work of the GPU, so events and
//! waits ask the driver on a dead device too.
//!
//! An engine may capture its streams into a graph at any time. Calls of other threads that are
//! unsafe during a capture would invalidate it. Every call here is made in the relaxed capture mode
//! of its thread, in which they are allowed, and uses streams that are not captured.
//!
//! Not covered: an error code that is unknown to the bindings. cudarc represents results as an
//! enum, so the bindings must be as new as the newest driver.

use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::{Arc, OnceLock};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use larder_sync::descriptors;

use super::copies::{Batch, rows_2d};
use crate::error::DeviceError;
use crate::ticket::StreamEvent;
use crate::transfer::{Copy2d, Direction};

/// All driver functions that this crate calls.
const FUNCTIONS: [&str; 40] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxGetStreamPriorityRange",
    "cuStreamCreateWithPriority",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamDestroy_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemsetD8Async",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer_v2",
    "cuPointerGetAttribute",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpy2DAsync_v2",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuLaunchKernel",
];

/// Maximum pitch of a 2D copy, in bytes.
const PITCH_MAX: u64 = i32::MAX as u64;

fn unavailable(why: impl Into<String>) -> DeviceError {
    DeviceError::Unavailable { why: why.into() }
}

/// The name of the error. Does not call the driver, which may itself have failed.
pub(super) fn name(error: DriverError) -> String {
    format!("{:?}", error.0)
}

/// Checks that the driver is present and has all required functions.
fn present() -> Result<(), DeviceError> {
    // SAFETY: loads libcuda, whose initialisers have no preconditions.
    if !unsafe { sys::is_culib_present() } {
        return Err(unavailable("libcuda is not installed"));
    }
    // SAFETY: libcuda is present.
    let library = unsafe { sys::culib() };
    for function in FUNCTIONS {
        // SAFETY: the function is looked up and not called.
        let found = unsafe { library.get::<unsafe extern "C" fn()>(function.as_bytes()) };
        if found.is_err() {
            return Err(unavailable(format!(
                "the driver does not have {function}; install a newer driver"
            )));
        }
    }
    Ok(())
}

/// The primary context of a device, which torch also uses.
pub(crate) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    dead: OnceLock<DeviceError>,
}

// SAFETY: a context may be current in any thread, and in several at once.
unsafe impl Send for Context {}
// SAFETY: see `Send`.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn open(ordinal: u32) -> Result<Arc<Context>, DeviceError> {
        present()?;
        let no = |error| unavailable(name(error));
        // The driver keeps descriptors of its own.
        descriptors::cover().map_err(|error| unavailable(error.to_string()))?;
        result::init().map_err(no)?;
        let count = result::device::get_count().map_err(no)?;
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        if ordinal >= count {
            return Err(unavailable(format!(
                "device {ordinal} does not exist (number of devices: {count})"
            )));
        }
        let device = result::device::get(ordinal).map_err(no)?;
        // SAFETY: the device exists. `drop` releases the context.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(no)?;
        Ok(Arc::new(Context {
            device,
            context,
            dead: OnceLock::new(),
        }))
    }

    /// Returns an error once the device is dead.
    pub(super) fn alive(&self) -> Result<(), DeviceError> {
        match self.dead.get() {
            None => Ok(()),
            Some(error) => Err(DeviceError::Dead(Arc::new(error.clone()))),
        }
    }

    /// Makes a call whose failure marks the device as dead.
    pub(super) fn call<T>(
        &self,
        call: &'static str,
        run: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DeviceError> {
        self.alive()?;
        self.attempt(run).map_err(|error| self.die(call, error))
    }

    /// Makes a call on a stream of an engine. The failure concerns this call alone.
    fn ask<T>(
        &self,
        call: &'static str,
        run: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DeviceError> {
        self.alive()?;
        self.attempt(run).map_err(|error| DeviceError::Stream {
            call,
            why: name(error),
        })
    }

    /// Makes a call that may fail. Restores the thread's previous context, which may belong to
    /// another device, and its capture mode.
    pub(super) fn attempt<T>(
        &self,
        run: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let before = result::ctx::get_current()?.unwrap_or(std::ptr::null_mut());
        if before == self.context {
            return relaxed(run);
        }
        // SAFETY: the context is retained while this value lives.
        unsafe { result::ctx::set_current(self.context) }?;
        let done = relaxed(run);
        // SAFETY: this context was current before, or it is null.
        unsafe { result::ctx::set_current(before) }?;
        done
    }

    pub(super) fn die(&self, call: &'static str, error: DriverError) -> DeviceError {
        let why = name(error);
        let error = DeviceError::Driver { call, why };
        self.dead.get_or_init(|| error).clone()
    }

    pub(super) fn device_name(&self) -> String {
        result::device::get_name(self.device).unwrap_or_else(name)
    }

    /// The UUID of the device.
    pub(super) fn uuid(&self) -> Result<[u8; 16], DeviceError> {
        let uuid = self.call("cuDeviceGetUuid", || result::device::get_uuid(self.device))?;
        Ok(uuid.bytes.map(|byte| byte.to_ne_bytes()[0]))
    }

    /// The driver version, in the driver's encoding.
    pub(super) fn driver_version(&self) -> Result<i32, DeviceError> {
        let mut version = 0;
        self.call("cuDriverGetVersion", || {
            // SAFETY: `version` is a valid output pointer.
            unsafe { sys::cuDriverGetVersion(&raw mut version) }.result()
        })?;
        Ok(version)
    }

    /// The architecture, for example `sm_90`.
    pub(super) fn arch(&self) -> Result<String, DeviceError> {
        use sys::CUdevice_attribute as Attribute;
        let major = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(format!("sm_{major}{minor}"))
    }

    /// Whether the device supports stream-ordered allocation, which the kernel's page lists need.
    pub(super) fn allocates_in_streams(&self) -> Result<bool, DeviceError> {
        let supported = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        Ok(self.attribute(supported)? != 0)
    }

    /// The memory that contains an address.
    pub(super) fn memory_at(&self, address: u64) -> Result<MemoryAt, DriverError> {
        use sys::CUpointer_attribute_enum as Attribute;
        // The memory kind is a `u32` and an ordinal an `i32`. Both are used only as bits here.
        let kind: u32 = self.pointer(address, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)?;
        if kind == sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32 {
            return Ok(MemoryAt::Host);
        }
        self.pointer(address, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
            .map(MemoryAt::Device)
    }

    /// The end of the allocation or registration that contains an address.
    pub(super) fn end_of_range(&self, address: u64) -> Result<u64, DriverError> {
        use sys::CUpointer_attribute_enum as Attribute;
        let start: u64 = self.pointer(address, Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)?;
        let bytes: u64 = self.pointer(address, Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE)?;
        Ok(start.saturating_add(bytes))
    }

    /// An attribute of an address. Fails for memory unknown to the driver; such a failure does not
    /// mark the device as dead.
    fn pointer<T: Default>(
        &self,
        address: u64,
        attribute: sys::CUpointer_attribute_enum,
    ) -> Result<T, DriverError> {
        let mut value = T::default();
        self.attempt(|| {
            let into = (&raw mut value).cast();
            // SAFETY: the callers' types have the width of the requested attributes.
            unsafe { sys::cuPointerGetAttribute(into, attribute, address) }.result()
        })?;
        Ok(value)
    }

    /// Whether this is the context of the device with this number.
    pub(super) fn is(&self, ordinal: i32) -> bool {
        self.device == ordinal
    }

    fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32, DeviceError> {
        self.call("cuDeviceGetAttribute", || {
            // SAFETY: the device exists.
            unsafe { result::device::get_attribute(self.device, attribute) }
        })
    }
}

/// Makes a call in the relaxed capture mode. Source: `cuThreadExchangeStreamCaptureMode` in the
/// CUDA driver API.
fn relaxed<T>(run: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DriverError> {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: swaps the mode of this thread with the value.
    let mut exchange = || unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result();
    exchange()?;
    let done = run();
    exchange()?;
    done
}

/// The memory that contains an address.
pub(super) enum MemoryAt {
    /// Page-locked host memory.
    Host,
    /// Memory of the device with this number.
    Device(i32),
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once. All objects created in the context hold this value, so none is
        // left.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// A stream of this crate or of another owner.
#[derive(Clone, Copy)]
pub(super) struct RawStream(pub(super) sys::CUstream);

// SAFETY: streams may be used from any thread.
unsafe impl Send for RawStream {}
// SAFETY: see `Send`.
unsafe impl Sync for RawStream {}

/// The two streams of a device.
pub(crate) struct Streams {
    pub(super) context: Arc<Context>,
    /// Highest priority: computation waits for loads.
    load: RawStream,
    /// Lowest priority: stores must not delay other work.
    store: RawStream,
    /// Kernels in flight need their module.
    pub(super) module: OnceLock<Module>,
}

impl Streams {
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Streams>, DeviceError> {
        let (least, greatest) = context.call("cuCtxGetStreamPriorityRange", || {
            result::stream::get_priority_range()
        })?;
        let stream = |priority| {
            context.call("cuStreamCreateWithPriority", || {
                let kind = result::stream::StreamKind::NonBlocking;
                result::stream::create_with_priority(kind, priority)
            })
        };
        Ok(Arc::new(Streams {
            context: context.clone(),
            load: RawStream(stream(greatest)?),
            store: RawStream(stream(least)?),
            module: OnceLock::new(),
        }))
    }

    pub(super) fn of(&self, direction: Direction) -> RawStream {
        match direction {
            Direction::Load => self.load,
            Direction::Store => self.store,
        }
    }

    /// Waits until a stream is empty. A dead device may still run its work; if it does not, the
    /// driver returns an error.
    pub(super) fn synchronize(&self, stream: RawStream) -> Result<(), DeviceError> {
        // SAFETY: the stream exists.
        let wait = || unsafe { result::stream::synchronize(stream.0) };
        let waited = self.context.attempt(wait);
        waited.map_err(|error| self.context.die("cuStreamSynchronize", error))
    }

    /// Waits until nothing is in flight.
    pub(super) fn drain(&self) {
        for stream in [self.load, self.store] {
            // A failed wait has lost the context, which runs nothing.
            let _ = self.synchronize(stream);
        }
    }

    /// Makes a call that enqueues on a stream. Its failure makes the device dead, unless the stream
    /// is an engine's.
    fn enqueue(
        &self,
        stream: RawStream,
        call: &'static str,
        run: impl FnOnce() -> Result<(), DriverError>,
    ) -> Result<(), DeviceError> {
        if [self.load.0, self.store.0].contains(&stream.0) {
            return self.context.call(call, run);
        }
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        self.context.ask("cuStreamIsCapturing", || {
            // SAFETY: the stream exists, and `status` is a valid output pointer.
            unsafe { sys::cuStreamIsCapturing(stream.0, &raw mut status) }.result()
        })?;
        if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Err(DeviceError::Capturing);
        }
        self.context.ask(call, run)
    }

    pub(super) fn wait_event(&self, stream: RawStream, event: &Event) -> Result<(), DeviceError> {
        self.enqueue(stream, "cuStreamWaitEvent", || {
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            // SAFETY: both exist.
            unsafe { result::stream::wait_event(stream.0, event.event, flags) }
        })
    }

    /// Records an event after all work enqueued on a stream so far.
    pub(super) fn record(&self, stream: RawStream) -> Result<Event, DeviceError> {
        let event = self.context.call("cuEventCreate", || {
            result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
        })?;
        let event = Event {
            context: self.context.clone(),
            event,
        };
        self.enqueue(stream, "cuEventRecord", || {
            // SAFETY: both exist.
            unsafe { result::event::record(event.event, stream.0) }
        })?;
        Ok(event)
    }

    /// One copy, by a copy engine.
    ///
    /// # Safety
    /// The rows lie in device memory and in one piece of the registered memory that starts at `l2`.
    /// No other access touches them until the copy is done.
    pub(super) unsafe fn copy(
        &self,
        direction: Direction,
        l2: u64,
        copy: &Copy2d,
    ) -> Result<(), DeviceError> {
        let rows = copy.rows;
        if rows.count > 1 && rows.l1_pitch <= PITCH_MAX && rows.l2_pitch <= PITCH_MAX {
            let plan = rows_2d(direction, l2, copy);
            return self.context.call("cuMemcpy2DAsync", || {
                // SAFETY: guaranteed by the caller.
                unsafe { sys::cuMemcpy2DAsync_v2(&raw const plan, self.of(direction).0) }.result()
            });
        }
        for row in 0..rows.count {
            let l1 = copy.l1 + row * rows.l1_pitch;
            let l2 = l2 + copy.l2 + row * rows.l2_pitch;
            // SAFETY: guaranteed by the caller.
            unsafe { self.copy_row(direction, l1, l2, rows.width) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Streams::copy`]; both are addresses.
    unsafe fn copy_row(
        &self,
        direction: Direction,
        l1: u64,
        l2: u64,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        let (stream, host, bytes) = (self.of(direction).0, l2 as *mut c_void, bytes as usize);
        match direction {
            Direction::Load => self.context.call("cuMemcpyHtoDAsync", || {
                // SAFETY: guaranteed by the caller.
                unsafe { sys::cuMemcpyHtoDAsync_v2(l1, host, bytes, stream) }.result()
            }),
            Direction::Store => self.context.call("cuMemcpyDtoHAsync", || {
                // SAFETY: guaranteed by the caller.
                unsafe { sys::cuMemcpyDtoHAsync_v2(host, l1, bytes, stream) }.result()
            }),
        }
    }

    /// One copy from device memory to device memory, on a stream of an engine.
    ///
    /// # Safety
    /// `bytes` bytes at both addresses are valid and do not overlap. Until the copy is done,
    /// nothing outside the stream writes the source or touches the destination.
    pub(super) unsafe fn copy_within(
        &self,
        stream: RawStream,
        from: u64,
        to: u64,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.enqueue(stream, "cuMemcpyDtoDAsync", || {
            // SAFETY: guaranteed by the caller.
            unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream.0) }.result()
        })
    }

    /// Many copies, by copy engines.
    ///
    /// # Safety
    /// The driver supports batches. All rows lie in device memory and in registered host memory,
    /// each row within one piece. No other access touches them until the copies are done.
    pub(super) unsafe fn copy_batch(
        &self,
        direction: Direction,
        batch: &mut Batch,
    ) -> Result<(), DeviceError> {
        if batch.is_empty() {
            return Ok(());
        }
        let stream = self.of(direction);
        // SAFETY: guaranteed by the caller.
        self.context
            .call("cuMemcpyBatchAsync", || unsafe { batch.submit(stream.0) })
    }

    /// [`Streams::copy_batch`] with a driver that may refuse it. Returns whether the driver
    /// accepted the batch. A refusal does not mark the device as dead, unless the context is dead.
    ///
    /// # Safety
    /// As for [`Streams::copy_batch`].
    pub(super) unsafe fn try_batch(&self, direction: Direction, batch: &mut Batch) -> bool {
        let stream = self.of(direction);
        // SAFETY: guaranteed by the caller.
        let outcome = self.context.attempt(|| unsafe { batch.submit(stream.0) });
        outcome.is_ok()
    }

    /// Copies between device memory and unregistered memory of this process, and waits for the
    /// copy.
    ///
    /// # Safety
    /// `bytes` bytes at both addresses are valid, and no other access touches them.
    pub(super) unsafe fn copy_now(
        &self,
        direction: Direction,
        l1: u64,
        host: *mut u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.copy_row(direction, l1, host.addr() as u64, bytes as u64) }?;
        self.synchronize(self.of(direction))
    }

    /// Enqueues a kernel on the stream of `direction`.
    ///
    /// # Safety
    /// `argument` has the type that the kernel takes by value, and all its fields are valid.
    pub(super) unsafe fn launch<T>(
        &self,
        direction: Direction,
        function: Function,
        (grid, block): (u32, u32),
        argument: &T,
    ) -> Result<(), DeviceError> {
        let mut arguments = [(&raw const *argument).cast_mut().cast::<c_void>()];
        let stream = self.of(direction).0;
        self.context.call("cuLaunchKernel", || {
            // SAFETY: guaranteed by the caller. The driver copies the argument before the call
            // returns.
            unsafe {
                result::launch_kernel(
                    function.0,
                    (grid, 1, 1),
                    (block, 1, 1),
                    0,
                    stream,
                    &mut arguments,
                )
            }
        })
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.drain();
        for stream in [self.load, self.store] {
            // SAFETY: created by `new`, destroyed once.
            let _ = self
                .context
                .attempt(|| unsafe { result::stream::destroy(stream.0) });
        }
    }
}

/// A position in a stream.
pub(crate) struct Event {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: see `Send`.
unsafe impl Sync for Event {}

impl StreamEvent for Event {
    fn poll(&self) -> Result<bool, DeviceError> {
        // SAFETY: the event exists.
        let query = || unsafe { result::event::query(self.event) };
        match self.context.attempt(query) {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(self.context.die("cuEventQuery", error)),
        }
    }

    fn wait(&self) -> Result<(), DeviceError> {
        // SAFETY: the event exists.
        let wait = || unsafe { result::event::synchronize(self.event) };
        let waited = self.context.attempt(wait);
        waited.map_err(|error| self.context.die("cuEventSynchronize", error))
    }
}

impl Event {
    pub(super) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Event")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once. The driver defers the destruction of an event that
        // still has waiters.
        let _ = self
            .context
            .attempt(|| unsafe { result::event::destroy(self.event) });
    }
}

/// A loaded image.
pub(super) struct Module {
    context: Arc<Context>,
    module: sys::CUmodule,
}

/// A kernel. Valid while its module is loaded.
#[derive(Clone, Copy)]
pub(super) struct Function(sys::CUfunction);

// SAFETY: a function may be launched from any thread.
unsafe impl Send for Function {}
// SAFETY: see `Send`.
unsafe impl Sync for Function {}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: see `Send`.
unsafe impl Sync for Module {}

impl Module {
    /// Returns `None` if the driver refuses the image. The copy engines do not need it.
    pub(super) fn load(context: &Arc<Context>, image: &[u8]) -> Option<Module> {
        let data = image.as_ptr().cast();
        // SAFETY: a cubin, or PTX with a final NUL. The driver reads it only during the call.
        let module = context.attempt(|| unsafe { result::module::load_data(data) });
        Some(Module {
            context: context.clone(),
            module: module.ok()?,
        })
    }

    pub(super) fn function(&self, name: &str) -> Option<Function> {
        let name = CString::new(name).ok()?;
        let function = self.context.attempt(|| {
            // SAFETY: the module is loaded.
            unsafe { result::module::get_function(self.module, name) }
        });
        function.ok().map(Function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once. The streams that run its kernels own it and have been
        // drained, or none of its kernels was ever launched.
        let _ = self
            .context
            .attempt(|| unsafe { result::module::unload(self.module) });
    }
}
