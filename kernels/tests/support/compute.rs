//! A stand-in for the forward: streams of its own in which `kv_read` of `cu/kv_copy.cu` reads L1 layer by layer, and counts the words
//! that are not what they should be. Calls the driver itself, as an engine would.

#![allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "calls that belong together, for one reason"
)]

use std::ffi::{CString, c_void};

use cudarc::driver::{result, sys};
use larder_kernels::cuda::image::PTX;
use larder_kernels::{ForeignStream, L1Pool};

use super::driver::has_gpu;

/// What each word is multiplied with.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Layers that the kernel tells apart.
const LAYERS: u64 = 4096;

/// A word of a page with this seed.
pub fn word(seed: u64, words: u64, (part, layer, word): (u32, u32, u64)) -> u64 {
    let first = (u64::from(part) * LAYERS + u64::from(layer)) * words;
    seed.wrapping_add(first + word).wrapping_mul(GOLDEN)
}

/// A page and the seed that its words follow from: `KvExpected` of the source.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Expected {
    pub page: u64,
    pub seed: u64,
}

/// `KvRead` of the source.
#[repr(C)]
struct Read {
    pool: u64,
    expected: u64,
    wrong: u64,
    cycles: u64,
    step: [u64; 4],
    words: u64,
    layer: u64,
    parts: u32,
    pages: u32,
}

/// Of each thread: not where the CPU runs them one after another.
fn idling(cycles: u64) -> u64 {
    if has_gpu() { cycles } else { 0 }
}

/// One stream of it.
pub struct Compute {
    stream: sys::CUstream,
    module: sys::CUmodule,
    function: sys::CUfunction,
    /// A number a thread.
    wrong: u64,
    threads: (u32, u32),
}

impl Compute {
    /// In the primary context of device 0, which is made current in this thread.
    pub fn new() -> Compute {
        result::init().unwrap();
        // A few threads where each of them is run by the CPU.
        let threads = if has_gpu() { (8, 512) } else { (1, 8) };
        // SAFETY: a device that exists; released when this is dropped. The image ends with a NUL, and has that kernel.
        unsafe {
            let device = result::device::get(0).unwrap();
            let context = result::primary_ctx::retain(device).unwrap();
            result::ctx::set_current(context).unwrap();
            let kind = result::stream::StreamKind::NonBlocking;
            let stream = result::stream::create_with_priority(kind, 0).unwrap();
            let image = [PTX.as_bytes(), &[0]].concat();
            let module = result::module::load_data(image.as_ptr().cast()).unwrap();
            let name = CString::new("kv_read").unwrap();
            let function = result::module::get_function(module, name).unwrap();
            let bytes = (threads.0 * threads.1) as usize * 8;
            let wrong = result::malloc_sync(bytes).unwrap();
            result::memset_d8_async(wrong, 0, bytes, stream).unwrap();
            Compute {
                stream,
                module,
                function,
                wrong,
                threads,
            }
        }
    }

    pub fn stream(&self) -> ForeignStream {
        // SAFETY: of the device's context; destroyed when nobody uses it any more.
        unsafe { ForeignStream::new(self.stream as usize) }
    }

    /// Puts the reading of a layer into the stream, after so many cycles of idling.
    pub fn read(&self, l1: &L1Pool, layer: u32, expected: &[Expected], cycles: u64) {
        let (shape, step) = (l1.shape(), l1.strides());
        let list = size_of_val(expected);
        // SAFETY: the list is taken by the call, being in memory that is not locked, and freed in the order of the stream.
        let address = unsafe {
            let address = result::malloc_async(self.stream, list).unwrap();
            result::memcpy_htod_async(address, expected, self.stream).unwrap();
            address
        };
        self.launch(&Read {
            pool: l1.address() + step.layer * u64::from(layer),
            expected: address,
            wrong: self.wrong,
            cycles: idling(cycles),
            step: [step.part, step.layer, step.page, step.token],
            words: u64::from(shape.chunk_bytes()) / 8,
            layer: layer.into(),
            parts: shape.parts(),
            pages: u32::try_from(expected.len()).unwrap(),
        });
        // SAFETY: allocated above.
        unsafe { result::free_async(address, self.stream) }.unwrap();
    }

    /// Keeps the stream busy for so many cycles.
    pub fn idle(&self, cycles: u64) {
        self.launch(&Read {
            pool: 0,
            expected: 0,
            wrong: self.wrong,
            cycles: idling(cycles),
            step: [0; 4],
            words: 0,
            layer: 0,
            parts: 0,
            pages: 0,
        });
    }

    /// Reads where nothing is, which is the end of the context. Only for real devices.
    pub fn fault(&self) {
        self.launch(&Read {
            pool: 0,
            expected: 16,
            wrong: self.wrong,
            cycles: 0,
            step: [0; 4],
            words: 1,
            layer: 0,
            parts: 1,
            pages: 1,
        });
    }

    fn launch(&self, read: &Read) {
        let mut arguments = [(&raw const *read).cast_mut().cast::<c_void>()];
        let (grid, block) = self.threads;
        // SAFETY: the kernel takes a `KvRead`, whose memory lives until the stream is past it.
        unsafe {
            result::launch_kernel(
                self.function,
                (grid, 1, 1),
                (block, 1, 1),
                0,
                self.stream,
                &mut arguments,
            )
        }
        .unwrap();
    }

    /// Waits for the stream. How many words were wrong since it was last asked.
    pub fn wrong(&self) -> u64 {
        let mut wrong = vec![0u64; (self.threads.0 * self.threads.1) as usize];
        // SAFETY: as many as there are threads.
        unsafe {
            result::memcpy_dtoh_async(&mut wrong, self.wrong, self.stream).unwrap();
            result::memset_d8_async(self.wrong, 0, size_of_val(&wrong[..]), self.stream).unwrap();
            result::stream::synchronize(self.stream).unwrap();
        }
        wrong.iter().sum()
    }
}

impl Drop for Compute {
    fn drop(&mut self) {
        // SAFETY: all made by `new`, and given back once. What a dead context says to it does not matter.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _ = result::free_sync(self.wrong);
            let _ = result::module::unload(self.module);
            let _ = result::stream::destroy(self.stream);
            if let Ok(device) = result::device::get(0) {
                let _ = result::primary_ctx::release(device);
            }
        }
    }
}
