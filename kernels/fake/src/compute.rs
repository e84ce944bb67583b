//! A stand-in for the forward pass. In its own streams, `kv_read` of `cu/kv_copy.cu` reads L1 layer
//! by layer and counts wrong words. Marks record times by the device's clock. Calls the driver
//! directly, as an engine does.

#![allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "calls that belong together, for one reason"
)]

use std::ffi::{CString, c_void};

use cudarc::driver::{result, sys};
use larder_kernels::cuda::image::PTX;
use larder_kernels::{ChunkAt, ForeignStream, L1Pool};

/// The multiplier of each word.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Maximum number of layers that the kernel distinguishes.
const LAYERS: u64 = 4096;

/// A word of the page with this seed.
pub fn word(seed: u64, words: u64, (part, layer, word): (u32, u32, u64)) -> u64 {
    let first = (u64::from(part) * LAYERS + u64::from(layer)) * words;
    seed.wrapping_add(first + word).wrapping_mul(GOLDEN)
}

/// A page and the seed of its words: `KvExpected` of the source.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Expected {
    /// The page of L1.
    pub page: u64,
    /// The seed of its words.
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

/// The argument for idling for `cycles` cycles without reading.
fn idling(cycles: u64, wrong: u64) -> Read {
    Read {
        pool: 0,
        expected: 0,
        wrong,
        cycles,
        step: [0; 4],
        words: 0,
        layer: 0,
        parts: 0,
        pages: 0,
    }
}

/// Blocks, and threads per block.
pub type Threads = (u32, u32);

/// One compute stream.
pub struct Compute {
    stream: sys::CUstream,
    module: sys::CUmodule,
    function: sys::CUfunction,
    /// One counter per thread.
    wrong: u64,
    threads: Threads,
}

/// A list of pages to read, in device memory. Freed in the order of the stream that uploaded it.
pub struct List {
    stream: sys::CUstream,
    address: u64,
    pages: u32,
}

/// A position in a stream, timed by the device's clock.
pub struct Mark(sys::CUevent);

impl Compute {
    /// A stream in the primary context of device 0, which becomes current in this thread. Every
    /// launch has `threads` threads.
    pub fn new(threads: Threads) -> Compute {
        result::init().unwrap();
        // SAFETY: the device exists and is released in `drop`. The image ends with a NUL and
        // contains the kernel.
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
            result::stream::synchronize(stream).unwrap();
            Compute {
                stream,
                module,
                function,
                wrong,
                threads,
            }
        }
    }

    /// Number of multiprocessors of device 0. The fake reports 0.
    pub fn processors() -> u32 {
        result::init().unwrap();
        let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        // SAFETY: the device exists.
        let count =
            unsafe { result::device::get_attribute(result::device::get(0).unwrap(), count) };
        u32::try_from(count.unwrap()).unwrap()
    }

    /// The stream.
    pub fn stream(&self) -> ForeignStream {
        // SAFETY: a stream of the device's context, destroyed after its last use.
        unsafe { ForeignStream::new(self.stream as usize) }
    }

    /// Uploads a list of pages, in stream order.
    pub fn list(&self, expected: &[Expected]) -> List {
        // SAFETY: the list is in pageable memory, so the call copies it before it returns.
        let address = unsafe {
            let address = result::malloc_async(self.stream, size_of_val(expected)).unwrap();
            result::memcpy_htod_async(address, expected, self.stream).unwrap();
            address
        };
        List {
            stream: self.stream,
            address,
            pages: u32::try_from(expected.len()).unwrap(),
        }
    }

    /// Enqueues the read of a layer, after `cycles` cycles of idling.
    pub fn read(&self, l1: &L1Pool, layer: u32, expected: &[Expected], cycles: u64) {
        let list = self.list(expected);
        self.read_listed(l1, layer, &list, cycles);
    }

    /// [`Compute::read`] for pages that are already listed.
    pub fn read_listed(&self, l1: &L1Pool, layer: u32, list: &List, cycles: u64) {
        let first = ChunkAt {
            part: 0,
            layer,
            page: 0,
        };
        let (shape, step) = (l1.shape(), l1.strides(&(layer..layer + 1)).unwrap());
        self.launch(&Read {
            pool: l1.address(first).unwrap(),
            expected: list.address,
            wrong: self.wrong,
            cycles,
            step: [step.part, step.layer, step.page, step.token],
            words: u64::from(shape.chunk_bytes()) / 8,
            layer: layer.into(),
            parts: shape.parts(),
            pages: list.pages,
        });
    }

    /// Keeps the stream busy for this number of cycles.
    pub fn idle(&self, cycles: u64) {
        self.launch(&idling(cycles, self.wrong));
    }

    /// [`Compute::idle`] with few threads, which use almost none of the device.
    pub fn idle_apart(&self, cycles: u64) {
        self.launch_with((1, 32.min(self.threads.1)), &idling(cycles, self.wrong));
    }

    /// Reads an invalid address, which destroys the context. Only for real devices.
    pub fn fault(&self) {
        self.launch(&Read {
            expected: 16,
            words: 1,
            parts: 1,
            pages: 1,
            ..idling(0, self.wrong)
        });
    }

    fn launch(&self, read: &Read) {
        self.launch_with(self.threads, read);
    }

    fn launch_with(&self, (grid, block): Threads, read: &Read) {
        let mut arguments = [(&raw const *read).cast_mut().cast::<c_void>()];
        // SAFETY: the kernel takes a `KvRead`, whose memory lives until the stream has passed the
        // kernel. There is a counter for every thread.
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

    /// A mark after all work enqueued so far.
    pub fn mark(&self) -> Mark {
        Mark::new(self.stream())
    }

    /// Waits for the stream.
    pub fn wait(&self) {
        // SAFETY: the stream exists.
        unsafe { result::stream::synchronize(self.stream) }.unwrap();
    }

    /// Waits for the stream. Returns the number of wrong words since the previous call.
    pub fn wrong(&self) -> u64 {
        let mut wrong = vec![0u64; (self.threads.0 * self.threads.1) as usize];
        // SAFETY: one counter per thread.
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
        // SAFETY: all created by `new` and freed once. Errors of a dead context do not matter.
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

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: allocated in this stream, freed once. Errors of a dead context do not matter.
        let _ = unsafe { result::free_async(self.address, self.stream) };
    }
}

impl Mark {
    /// A mark after all work enqueued so far on a stream.
    pub fn new(stream: ForeignStream) -> Mark {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).unwrap();
        // SAFETY: both exist.
        unsafe { result::event::record(event, stream.address() as sys::CUstream) }.unwrap();
        Mark(event)
    }

    /// Whether the device has reached the mark.
    pub fn has_passed(&self) -> bool {
        // SAFETY: the event exists.
        match unsafe { result::event::query(self.0) } {
            Ok(()) => true,
            Err(result::DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => false,
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Milliseconds from another mark to this one. Both must have passed.
    pub fn ms_since(&self, other: &Mark) -> f64 {
        type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
        let mut ms = 0.0;
        // SAFETY: both exist, and all drivers have this function. Only newer drivers have the
        // function used by the bindings.
        unsafe {
            let elapsed = sys::culib().get::<Elapsed>(b"cuEventElapsedTime").unwrap();
            elapsed(&raw mut ms, other.0, self.0).result().unwrap();
        }
        ms.into()
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
