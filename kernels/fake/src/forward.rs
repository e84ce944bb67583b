//! The forward pass of the model on a device: the kernels of `cu/forward.cu` on one stream, as an
//! engine launches them. Calls the driver directly.

#![allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "calls that belong together, for one reason"
)]

use std::ffi::{CString, c_void};

use cudarc::driver::{result, sys};
use larder_kernels::kernel::SOURCE;
use larder_kernels::{ChunkAt, ForeignStream, KvShape, L1Pool};

use crate::compute::Mark;
use crate::model::{WORDS, row_words};

/// The kernels as PTX, compiled by the driver. The first line identifies the source.
pub const PTX: &str = include_str!("../cu/forward.ptx");

/// The source of the kernels: behind that of the copies, whose names they use.
#[must_use]
pub fn source() -> String {
    [SOURCE, include_str!("../cu/forward.cu")].concat()
}

/// `KvForward` of the source.
#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    pool: u64,
    pages: u64,
    tokens: u64,
    output: u64,
    states: u64,
    next: u64,
    sums: u64,
    step: [u64; 4],
    layer: u64,
    parts: u32,
    words: u32,
    page_tokens: u32,
    first: u32,
    count: u32,
    lanes: u32,
}

/// The names of the kernels, in the order of a pass.
pub const KERNELS: [&str; 3] = ["forward_rows", "forward_read", "forward_output"];

/// Threads of a block.
const BLOCK: u32 = 128;

/// The kernels, their stream and their memory. Passes follow each other on the stream.
pub struct Forward {
    stream: sys::CUstream,
    module: sys::CUmodule,
    kernels: [sys::CUfunction; 3],
    shape: KvShape,
    tokens_max: usize,
    lanes: u32,
    /// The states of the tokens of a pass, twice.
    states: u64,
    sums: u64,
}

/// One pass over some tokens of a sequence: its input and output in device memory.
pub struct Pass {
    stream: sys::CUstream,
    memory: u64,
    arguments: Arguments,
}

impl Forward {
    /// A stream in the primary context of device 0, which becomes current in this thread. A pass
    /// has at most `tokens_max` tokens, with about `threads` threads each.
    pub fn new(shape: &KvShape, tokens_max: usize, threads: u32) -> Forward {
        let lanes = threads.next_multiple_of(row_words(shape));
        result::init().unwrap();
        // SAFETY: the device exists and is released in `drop`. The image ends with a NUL and has
        // the kernels.
        unsafe {
            let device = result::device::get(0).unwrap();
            let context = result::primary_ctx::retain(device).unwrap();
            result::ctx::set_current(context).unwrap();
            let kind = result::stream::StreamKind::NonBlocking;
            let stream = result::stream::create_with_priority(kind, 0).unwrap();
            let image = [PTX.as_bytes(), &[0]].concat();
            let module = result::module::load_data(image.as_ptr().cast()).unwrap();
            let kernel = |name| {
                let name = CString::new(name).unwrap();
                result::module::get_function(module, name).unwrap()
            };
            Forward {
                stream,
                module,
                kernels: KERNELS.map(kernel),
                shape: *shape,
                tokens_max,
                lanes,
                states: result::malloc_sync(tokens_max * 16).unwrap(),
                sums: result::malloc_sync(tokens_max * lanes as usize * 8).unwrap(),
            }
        }
    }

    /// The stream of all passes.
    pub fn stream(&self) -> ForeignStream {
        // SAFETY: a stream of the device's context, destroyed after its last use.
        unsafe { ForeignStream::new(self.stream as usize) }
    }

    /// A mark after all work enqueued so far.
    pub fn mark(&self) -> Mark {
        Mark::new(self.stream())
    }

    /// Uploads the input of a pass, in stream order: the tokens from place `first` on, and the
    /// pages of the sequence.
    pub fn pass(&self, first: usize, tokens: &[u64], pages: &[u32]) -> Pass {
        assert!(tokens.len() <= self.tokens_max, "a pass of too many tokens");
        // SAFETY: the input is in pageable memory, so the calls copy it before they return. The
        // output is written before it is read.
        let memory = unsafe {
            let bytes = size_of_val(tokens) * 2 + size_of_val(pages);
            let memory = result::malloc_async(self.stream, bytes).unwrap();
            result::memcpy_htod_async(memory, tokens, self.stream).unwrap();
            let place = memory + size_of_val(tokens) as u64 * 2;
            result::memcpy_htod_async(place, pages, self.stream).unwrap();
            memory
        };
        let bytes = size_of_val(tokens) as u64;
        let arguments = Arguments {
            pool: 0,
            pages: memory + bytes * 2,
            tokens: memory,
            output: memory + bytes,
            states: self.states,
            next: self.states + self.tokens_max as u64 * 8,
            sums: self.sums,
            step: [0; 4],
            layer: 0,
            parts: self.shape.parts(),
            words: row_words(&self.shape),
            page_tokens: self.shape.page_tokens(),
            first: u32::try_from(first).unwrap(),
            count: u32::try_from(tokens.len()).unwrap(),
            lanes: self.lanes,
        };
        Pass {
            stream: self.stream,
            memory,
            arguments,
        }
    }

    /// Enqueues a layer: writes the rows of the tokens of the pass, and reads those of all tokens
    /// up to each.
    pub fn layer(&self, pass: &mut Pass, l1: &L1Pool, layer: u32) {
        let first = ChunkAt {
            part: 0,
            layer,
            page: 0,
        };
        let step = l1.strides(&(layer..layer + 1)).unwrap();
        let arguments = &mut pass.arguments;
        arguments.pool = l1.address(first).unwrap();
        arguments.step = [step.part, step.layer, step.page, step.token];
        arguments.layer = layer.into();
        let arguments = *arguments;
        let words = arguments.count * arguments.parts * arguments.words;
        self.launch(0, words, &arguments);
        self.launch(1, arguments.count * arguments.lanes, &arguments);
        let arguments = &mut pass.arguments;
        std::mem::swap(&mut arguments.states, &mut arguments.next);
    }

    /// Enqueues the output, behind the last layer.
    pub fn output(&self, pass: &mut Pass) {
        pass.arguments.layer += 1;
        self.launch(2, pass.arguments.count, &pass.arguments);
    }

    fn launch(&self, kernel: usize, threads: u32, arguments: &Arguments) {
        let mut arguments = [(&raw const *arguments).cast_mut().cast::<c_void>()];
        // SAFETY: the kernels take a `KvForward`, whose memory lives until the stream has passed
        // them: passes are freed in the order of the stream.
        unsafe {
            result::launch_kernel(
                self.kernels[kernel],
                (threads.div_ceil(BLOCK), 1, 1),
                (BLOCK, 1, 1),
                0,
                self.stream,
                &mut arguments,
            )
        }
        .unwrap();
    }

    /// Waits for the stream.
    pub fn wait(&self) {
        // SAFETY: the stream exists.
        unsafe { result::stream::synchronize(self.stream) }.unwrap();
    }
}

impl Pass {
    /// Number of its tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.arguments.count as usize
    }

    /// Waits for the pass. Returns the word behind each of its tokens.
    pub fn words(self) -> Vec<u64> {
        let mut output = vec![0u64; self.arguments.count as usize];
        // SAFETY: the memory has a number for each token, which is there when the stream has ended.
        unsafe {
            result::memcpy_dtoh_async(&mut output, self.arguments.output, self.stream).unwrap();
            result::stream::synchronize(self.stream).unwrap();
        }
        output.iter().map(|state| state % WORDS).collect()
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        // SAFETY: allocated in this stream, freed once. Errors of a dead context do not matter.
        let _ = unsafe { result::free_async(self.memory, self.stream) };
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        // SAFETY: all created by `new` and freed once. Errors of a dead context do not matter.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _ = result::free_sync(self.states);
            let _ = result::free_sync(self.sums);
            let _ = result::module::unload(self.module);
            let _ = result::stream::destroy(self.stream);
            if let Ok(device) = result::device::get(0) {
                let _ = result::primary_ctx::release(device);
            }
        }
    }
}
