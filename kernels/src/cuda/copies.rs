//! Copies in the forms that the copy engines accept: 2D and batched.

use std::ffi::c_void;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys;

use crate::transfer::{Copy2d, Direction};

/// The driver function that copies many rows in one call.
const BATCH: &str = "cuMemcpyBatchAsync_v2";

/// Whether the driver supports batched copies. The driver must be present.
pub(super) fn has_batches() -> bool {
    // SAFETY: libcuda is present.
    let library = unsafe { sys::culib() };
    // SAFETY: the function is looked up and not called.
    unsafe { library.get::<unsafe extern "C" fn()>(BATCH.as_bytes()) }.is_ok()
}

/// Rows to copy in one call.
#[derive(Default)]
pub(super) struct Batch {
    to: Vec<sys::CUdeviceptr>,
    from: Vec<sys::CUdeviceptr>,
    bytes: Vec<usize>,
}

impl Batch {
    /// Whether the batch is empty. The driver refuses an empty batch.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Adds a row, by addresses.
    pub(super) fn push(&mut self, direction: Direction, l1: u64, l2: u64, bytes: u64) {
        let (from, to) = match direction {
            Direction::Load => (l2, l1),
            Direction::Store => (l1, l2),
        };
        self.from.push(from);
        self.to.push(to);
        self.bytes.push(bytes as usize);
    }

    /// Enqueues the batch on a stream.
    ///
    /// # Safety
    /// As for [`Streams::copy_batch`](super::driver::Streams::copy_batch).
    pub(super) unsafe fn submit(&mut self, stream: sys::CUstream) -> Result<(), DriverError> {
        let nowhere = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID,
            id: 0,
        };
        let overlap = sys::CUmemcpyFlags::CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: overlap as u32,
        };
        let mut first = 0;
        // SAFETY: three lists of the same length, and one attribute that applies from index 0. The
        // driver copies all of them before the call returns.
        let status = unsafe {
            sys::cuMemcpyBatchAsync_v2(
                self.to.as_mut_ptr(),
                self.from.as_mut_ptr(),
                self.bytes.as_mut_ptr(),
                self.bytes.len(),
                &raw mut attributes,
                &raw mut first,
                1,
                stream,
            )
        };
        status.result()
    }
}

/// A 2D copy between device memory and host memory. `l2` is the start of the host memory.
pub(super) fn rows_2d(direction: Direction, l2: u64, copy: &Copy2d) -> sys::CUDA_MEMCPY2D {
    let rows = copy.rows;
    let (host, device) = ((l2 + copy.l2) as *mut c_void, copy.l1);
    let (host_pitch, device_pitch) = (rows.l2_pitch as usize, rows.l1_pitch as usize);
    let (on_host, on_device) = (
        sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
    );
    let (from, to, from_pitch, to_pitch) = match direction {
        Direction::Load => (on_host, on_device, host_pitch, device_pitch),
        Direction::Store => (on_device, on_host, device_pitch, host_pitch),
    };
    // The memory type of each side selects which of its two addresses the driver uses.
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: from,
        srcHost: host,
        srcDevice: device,
        srcArray: std::ptr::null_mut(),
        srcPitch: from_pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: to,
        dstHost: host,
        dstDevice: device,
        dstArray: std::ptr::null_mut(),
        dstPitch: to_pitch,
        WidthInBytes: rows.width as usize,
        Height: rows.count as usize,
    }
}
