//! The driver that tests stand on: the fake, in a process of its own, or the real one.
//!
//! The driver is loaded once a process, so that each test that needs one runs in a process of its own. Needs a C++ compiler, or a
//! GPU: with `LARDER_REQUIRE_GPU=1` the real driver is used, and has to be there.

use std::ffi::c_void;
use std::path::Path;
use std::process::{Command, Output};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::{result, sys};
use larder_kernels::kernel::SOURCE;
use larder_kernels::{ForeignStream, Tensor, Tensors};

use super::compute::{Compute, Threads};
use super::honest::skipped;

const SHIM: &str = include_str!("../../cu/cpu_shim.h");
pub const FAKE: &str = include_str!("../../cu/fake_driver.cc");

/// Set in the processes that tests start: there the tests below do what they are named after.
const CHILD: &str = "LARDER_TEST_CUDA_CHILD";

/// Set on a machine with a GPU: the real driver is used, and has to be there.
const REQUIRE: &str = "LARDER_REQUIRE_GPU";

pub fn has_gpu() -> bool {
    std::env::var_os(REQUIRE).is_some()
}

/// A forward's streams, with few threads where each of them is run by the CPU.
pub fn compute() -> Compute {
    const THREADS: [Threads; 2] = [(1, 8), (8, 512)];
    Compute::new(THREADS[usize::from(has_gpu())])
}

/// What an engine allocated on the device: freed when nobody keeps it any more.
struct Allocated(Vec<u64>);

impl Drop for Allocated {
    fn drop(&mut self) {
        for address in &self.0 {
            // SAFETY: allocated once, freed once; in this thread the context is current.
            let _ = unsafe { result::free_sync(*address) };
        }
    }
}

/// Tensors in memory of the device that begin so many bytes behind what the driver gave, in no order. The context has to be current.
pub fn device_tensors((count, bytes): (usize, usize), skip: usize) -> Tensors {
    // SAFETY: written before it is read.
    let allocate = |_| unsafe { result::malloc_sync(bytes + 16) }.unwrap();
    let allocated: Vec<u64> = (0..count).map(allocate).collect();
    let tensors = allocated.iter().rev().map(|address| Tensor {
        address: address + skip as u64,
        bytes: bytes as u64,
    });
    let tensors = tensors.collect();
    // SAFETY: nobody else has it.
    unsafe { Tensors::new(tensors, Box::new(Allocated(allocated))) }
}

/// Memory of the host that an engine locks, in pieces: of so many bytes each but for the last.
pub struct Locked {
    memory: Vec<u8>,
    skip: usize,
    pieces: Vec<AtomicBool>,
    piece_bytes: usize,
}

impl Locked {
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
            // SAFETY: memory of its own, which is unlocked before it goes.
            let done = unsafe { sys::cuMemHostRegister_v2(locked.at(piece), piece_bytes, 0) };
            done.result().unwrap();
        }
        Arc::new(locked)
    }

    pub fn start(&self) -> NonNull<u8> {
        NonNull::new(self.at(0).cast()).unwrap()
    }

    fn at(&self, piece: usize) -> *mut c_void {
        let offset = self.skip + piece * self.piece_bytes;
        self.memory.as_ptr().wrapping_add(offset).cast_mut().cast()
    }

    /// One piece of it.
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

/// The directory with the fake, as the library that is looked for: compiled once a run. None, and said so, where there is no
/// compiler.
pub fn fake() -> Option<&'static Path> {
    static THERE: OnceLock<bool> = OnceLock::new();
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    THERE
        .get_or_init(|| compile(directory))
        .then_some(directory)
}

fn compile(directory: &Path) -> bool {
    let building = tempfile::tempdir_in(directory).unwrap();
    for (name, text) in [
        ("kv_copy.cu", SOURCE),
        ("cpu_shim.h", SHIM),
        ("fake_driver.cc", FAKE),
    ] {
        std::fs::write(building.path().join(name), text).unwrap();
    }
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let library = building.path().join("libcuda.so");
    let compiled = Command::new(&compiler)
        .args([
            "-std=c++17",
            "-O1",
            "-Wno-unknown-pragmas",
            "-shared",
            "-fPIC",
            "-o",
        ])
        .arg(&library)
        .arg(building.path().join("fake_driver.cc"))
        .output();
    match compiled {
        Err(error) => {
            let why = format!("there is no C++ compiler {compiler}: {error}");
            skipped("the CUDA device on a fake driver", why);
            false
        }
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success(),
                "{compiler} does not take the fake driver:\n{said}"
            );
            std::fs::rename(library, directory.join("libcuda.so")).unwrap();
            true
        }
    }
}

/// Runs a test, or what is ignored as none, in a process with a fake driver.
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

/// Whether to go on, in the process of a test's own; elsewhere starts that and checks how it went.
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

/// As [`in_a_process_of_its_own`], on a GPU too: for tests after which the process has no device any more.
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

/// The same library with this function's name in its table of symbols made another.
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

pub fn default_stream() -> ForeignStream {
    // SAFETY: the default stream.
    unsafe { ForeignStream::new(0) }
}

/// The calls of the fake that steer it.
pub struct Steering(libloading::Library);

impl Steering {
    pub fn new() -> Steering {
        // SAFETY: the fake driver.
        Steering(unsafe { libloading::Library::new("libcuda.so") }.unwrap())
    }

    fn tell(&self, what: &str, number: i64) {
        // SAFETY: all functions that are told something have that type.
        let tell = unsafe { self.0.get::<unsafe extern "C" fn(i64)>(what.as_bytes()) }.unwrap();
        // SAFETY: they take any number, and no context is open where that matters.
        unsafe { tell(number) };
    }

    /// Begins anew, and has this call fail and every one after it.
    pub fn fail(&self, nth: i64) {
        self.tell("fake_fail", nth);
    }

    /// From here on, with what there is.
    pub fn fail_after(&self, nth: i64) {
        self.tell("fake_fail_after", nth);
    }

    /// Copies take their time and move nothing.
    pub fn still(&self, yes: bool) {
        self.tell("fake_still", yes.into());
    }

    /// From here on it is this device.
    pub fn device(&self, number: u8) {
        self.tell("fake_device", number.into());
    }

    fn ask(&self, what: &str) -> i64 {
        // SAFETY: all functions that are asked something have that type.
        let ask = unsafe { self.0.get::<unsafe extern "C" fn() -> i64>(what.as_bytes()) }.unwrap();
        // SAFETY: they only look.
        unsafe { ask() }
    }

    pub fn calls(&self) -> i64 {
        self.ask("fake_calls")
    }

    /// Its time, in nanoseconds.
    pub fn now(&self) -> i64 {
        self.ask("fake_now")
    }

    /// Nanoseconds that a KiB takes: by copies, batches, kernels.
    pub fn speeds(&self, [copies, batch, kernel]: [i64; 3]) {
        // SAFETY: the function has that type.
        let speeds = unsafe {
            self.0
                .get::<unsafe extern "C" fn(i64, i64, i64)>(b"fake_speeds")
        };
        // SAFETY: takes any numbers.
        unsafe { speeds.unwrap()(copies, batch, kernel) };
    }

    /// Copies, batches and kernels since it was last asked.
    pub fn counted(&self) -> [i64; 3] {
        // SAFETY: the function has that type.
        let counted = unsafe {
            self.0
                .get::<unsafe extern "C" fn(i64) -> i64>(b"fake_counted")
        }
        .unwrap();
        // SAFETY: takes the numbers of the three.
        [0, 1, 2].map(|way| unsafe { counted(way) })
    }
}
