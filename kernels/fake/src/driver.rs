//! The driver used by tests: the fake, in a separate process, or the real driver.
//!
//! The driver is loaded once per process, so each test that needs a driver runs in its own process.
//! Needs a C++ compiler at the build, or a GPU: `LARDER_REQUIRE_GPU=1` uses the real driver, which
//! must then be present.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::process::{Command, Output};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{result, sys};
use larder_kernels::{ForeignStream, Tensor, Tensors};

use crate::compute::{Compute, Threads};
use honest::skipped;

#[path = "../../../tests/support/honest.rs"]
mod honest;

/// The header with which device code is C++.
pub const SHIM: &str = include_str!("../cu/cpu_shim.h");

/// The source of the fake.
pub const FAKE: &str = include_str!("../cu/fake_driver.cc");

/// Set in the processes started by tests. There the test bodies run directly.
const CHILD: &str = "LARDER_TEST_CUDA_CHILD";

/// Set on a machine with a GPU: the real driver is used and must be present.
const REQUIRE: &str = "LARDER_REQUIRE_GPU";

/// Whether the real driver is used.
pub fn has_gpu() -> bool {
    std::env::var_os(REQUIRE).is_some()
}

/// The streams of a forward pass. Few threads on the fake, where the CPU runs each of them.
pub fn compute() -> Compute {
    const THREADS: [Threads; 2] = [(1, 8), (8, 512)];
    Compute::new(THREADS[usize::from(has_gpu())])
}

/// Device memory allocated by an engine. Freed with its last user.
struct Allocated(Vec<u64>);

impl Drop for Allocated {
    fn drop(&mut self) {
        for address in &self.0 {
            // SAFETY: allocated once, freed once. The context is current in this thread.
            let _ = unsafe { result::free_sync(*address) };
        }
    }
}

/// Tensors in device memory, each `skip` bytes after the start of its allocation, in reverse
/// address order. The context must be current.
pub fn device_tensors((count, bytes): (usize, usize), skip: usize) -> Tensors {
    // SAFETY: written before it is read.
    let allocate = |_| unsafe { result::malloc_sync(bytes + 16) }.unwrap();
    let allocated: Vec<u64> = (0..count).map(allocate).collect();
    let tensors = allocated.iter().rev().map(|address| Tensor {
        address: address + skip as u64,
        bytes: bytes as u64,
    });
    let tensors = tensors.collect();
    // SAFETY: no other code has access.
    unsafe { Tensors::new(tensors, Box::new(Allocated(allocated))) }
}

/// Host memory that an engine locks in pieces of `piece_bytes`; the last piece may be shorter.
pub struct Locked {
    memory: Vec<u8>,
    skip: usize,
    pieces: Vec<AtomicBool>,
    piece_bytes: usize,
}

impl Locked {
    /// Memory of so many bytes, locked.
    pub fn new(bytes: usize, piece_bytes: usize) -> Arc<Locked> {
        const PAGE_BYTES: usize = 4096;
        let memory = vec![0; bytes + 2 * PAGE_BYTES];
        let skip = memory.as_ptr().align_offset(PAGE_BYTES);
        let pieces = bytes.div_ceil(piece_bytes);
        let locked = Locked {
            memory,
            skip,
            pieces: (0..pieces).map(|_| AtomicBool::new(true)).collect(),
            piece_bytes,
        };
        for piece in 0..pieces {
            let piece_bytes = piece_bytes.min(bytes - piece * piece_bytes);
            // SAFETY: owned memory, which is unlocked before it is freed.
            let done = unsafe { sys::cuMemHostRegister_v2(locked.at(piece), piece_bytes, 0) };
            done.result().unwrap();
        }
        Arc::new(locked)
    }

    /// The first byte.
    pub fn start(&self) -> NonNull<u8> {
        NonNull::new(self.at(0).cast()).unwrap()
    }

    fn at(&self, piece: usize) -> *mut c_void {
        let offset = self.skip + piece * self.piece_bytes;
        self.memory.as_ptr().wrapping_add(offset).cast_mut().cast()
    }

    /// Unlocks one piece.
    pub fn unlock(&self, piece: usize) {
        if self.pieces[piece].swap(false, Ordering::Relaxed) {
            // SAFETY: locked by `new`, unlocked once.
            let done = unsafe { sys::cuMemHostUnregister(self.at(piece)) };
            done.result().unwrap();
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        (0..self.pieces.len()).for_each(|piece| self.unlock(piece));
    }
}

/// The directory with the fake, under the file name of the real library. `None`, with a message, if
/// there was no compiler.
pub fn fake() -> Option<&'static Path> {
    let directory = Path::new(env!("OUT_DIR"));
    let is_there = directory.join("libcuda.so").exists();
    if !is_there {
        let why = "there was no C++ compiler when it was built";
        skipped("the CUDA device on a fake driver", why);
    }
    is_there.then_some(directory)
}

/// Runs a test, including ignored ones, in a process with a fake driver.
pub fn child(test: &str, directory: &Path, variables: &[(&str, &str)]) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--include-ignored", "--exact", test])
        .args(["--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", directory)
        .env_remove("LARDER_NVRTC_DIR")
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

/// Whether the test body must run here. Returns `true` in the process of the test. Elsewhere it
/// starts that process and checks its result.
pub fn in_a_process_of_its_own(test: &str, variables: &[(&str, &str)]) -> bool {
    if std::env::var_os(CHILD).is_some() || has_gpu() {
        return true;
    }
    if let Some(directory) = fake() {
        let output = child(test, directory, variables);
        let said = [output.stdout, output.stderr].concat();
        assert!(
            output.status.success(),
            "{}:\n{}",
            output.status,
            String::from_utf8_lossy(&said)
        );
    }
    false
}

/// As [`in_a_process_of_its_own`], also on a GPU: for tests after which the process has no device.
pub fn in_a_process_that_may_lose_its_device(test: &str) -> bool {
    if std::env::var_os(CHILD).is_some() || !has_gpu() {
        return in_a_process_of_its_own(test, &[]);
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success(), "{}:\n{said}", output.status);
    false
}

/// The library with one function renamed in its symbol table.
pub fn lacking(library: &[u8], function: &str) -> Vec<u8> {
    let name = format!("\0{function}\0");
    let other = name.replacen("cu", "xx", 1);
    let at = library
        .windows(name.len())
        .position(|bytes| bytes == name.as_bytes());
    let at = at.unwrap();
    let mut lacking = library.to_vec();
    lacking[at..at + name.len()].copy_from_slice(other.as_bytes());
    lacking
}

/// The default stream of the context.
pub fn default_stream() -> ForeignStream {
    // SAFETY: the default stream.
    unsafe { ForeignStream::new(0) }
}

/// The calls that control the fake.
pub struct Steering(libloading::Library);

impl Steering {
    /// Of the fake in this process.
    #[expect(clippy::new_without_default, reason = "it loads a library")]
    pub fn new() -> Steering {
        // SAFETY: the fake driver.
        Steering(unsafe { libloading::Library::new("libcuda.so") }.unwrap())
    }

    fn set(&self, what: &str, number: i64) {
        // SAFETY: all control functions with an argument have this type.
        let set = unsafe { self.0.get::<unsafe extern "C" fn(i64)>(what.as_bytes()) }.unwrap();
        // SAFETY: any number is valid, and no context is open for the functions that require this.
        unsafe { set(number) };
    }

    /// Resets the fake and makes this call and every later one fail.
    pub fn fail(&self, nth: i64) {
        self.set("fake_fail", nth);
    }

    /// As [`Steering::fail`], from now on and without a reset.
    pub fn fail_after(&self, nth: i64) {
        self.set("fake_fail_after", nth);
    }

    /// Makes the next call of this function fail. Work in flight goes on.
    pub fn refuse(&self, function: &'static CStr) {
        // SAFETY: the function has this type.
        let refuse = unsafe {
            self.0
                .get::<unsafe extern "C" fn(*const c_char)>(b"fake_refuse")
        };
        // SAFETY: the name is never freed.
        unsafe { refuse.unwrap()(function.as_ptr()) };
    }

    /// The default stream is captured into a graph.
    pub fn capture(&self, yes: bool) {
        self.set("fake_capture", yes.into());
    }

    /// Calls that would have invalidated the capture.
    pub fn broken(&self) -> i64 {
        self.query("fake_broken")
    }

    /// Puts work that never ends into the default stream.
    pub fn stall(&self) {
        // SAFETY: the function has this type.
        let stall = unsafe { self.0.get::<unsafe extern "C" fn()>(b"fake_stall") };
        // SAFETY: no preconditions.
        unsafe { stall.unwrap()() };
    }

    /// Copies take their time but move nothing.
    pub fn still(&self, yes: bool) {
        self.set("fake_still", yes.into());
    }

    /// Changes the identity of the device.
    pub fn device(&self, number: u8) {
        self.set("fake_device", number.into());
    }

    fn query(&self, what: &str) -> i64 {
        // SAFETY: all query functions have this type.
        let query =
            unsafe { self.0.get::<unsafe extern "C" fn() -> i64>(what.as_bytes()) }.unwrap();
        // SAFETY: they only read.
        unsafe { query() }
    }

    /// All calls since the last reset.
    pub fn calls(&self) -> i64 {
        self.query("fake_calls")
    }

    /// The calls of this function.
    pub fn called(&self, function: &str) -> i64 {
        let name = std::ffi::CString::new(function).unwrap();
        // SAFETY: the function has this type.
        let called = unsafe {
            self.0
                .get::<unsafe extern "C" fn(*const c_char) -> i64>(b"fake_called")
        };
        // SAFETY: the text ends with a NUL.
        unsafe { called.unwrap()(name.as_ptr()) }
    }

    /// The fake's time, in nanoseconds.
    pub fn now(&self) -> i64 {
        self.query("fake_now")
    }

    /// Sets the nanoseconds per KiB of copies, batches and kernels.
    pub fn speeds(&self, [copies, batch, kernel]: [i64; 3]) {
        // SAFETY: the function has this type.
        let speeds = unsafe {
            self.0
                .get::<unsafe extern "C" fn(i64, i64, i64)>(b"fake_speeds")
        };
        // SAFETY: any numbers are valid.
        unsafe { speeds.unwrap()(copies, batch, kernel) };
    }

    /// Copies, batches and kernels since the previous call.
    pub fn counted(&self) -> [i64; 3] {
        // SAFETY: the function has this type.
        let counted = unsafe {
            self.0
                .get::<unsafe extern "C" fn(i64) -> i64>(b"fake_counted")
        }
        .unwrap();
        // SAFETY: the valid numbers of the three ways.
        [0, 1, 2].map(|way| unsafe { counted(way) })
    }
}
