//! NVRTC, if installed: compiles CUDA C++ to PTX or to a cubin.
//!
//! Owns: locating the library and calling it. The library is loaded by name at run time, and every
//! function is looked up first, so a missing or incomplete library is an error value. The library
//! is never unloaded, because it leaves threads and handlers behind.
//!
//! Does not decide when to compile. Production does not need NVRTC (see [`image`](super::image)).

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// Environment variable with the directory to search first, for example that of a Python wheel.
pub const DIR_VARIABLE: &str = "LARDER_NVRTC_DIR";

/// Names of the library, newest first.
const NAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];

/// Why compilation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvrtcError {
    /// NVRTC was not found.
    #[error("no NVRTC: {0}; set {DIR_VARIABLE} to the directory of libnvrtc.so")]
    Missing(String),
    /// The source is not valid, or this version does not support the target.
    #[error("NVRTC: {call} failed ({why}){log}")]
    Failed {
        /// The NVRTC function.
        call: &'static str,
        /// The name of its error.
        why: String,
        /// The compiler log.
        log: String,
    },
}

/// The output format of a compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Machine code for one architecture: `sm_90`.
    Cubin(String),
    /// Code for this architecture and later ones, compiled by the driver when it is loaded:
    /// `compute_80`.
    Ptx(String),
}

impl Target {
    /// The name of the architecture.
    #[must_use]
    pub fn arch(&self) -> &str {
        match self {
            Target::Cubin(arch) | Target::Ptx(arch) => arch,
        }
    }
}

/// The result of a compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The cubin, or the PTX without its final NUL.
    pub image: Vec<u8>,
    /// The compiler log. For a cubin: registers and spills of each kernel.
    pub log: String,
}

type Program = *mut c_void;
type Status = c_int;

/// A loaded NVRTC.
#[derive(Clone, Copy, Debug)]
pub struct Nvrtc {
    version: (i32, i32),
    calls: Calls,
}

#[derive(Clone, Copy, Debug)]
struct Calls {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    error: unsafe extern "C" fn(Status) -> *const c_char,
    log: Output,
    ptx: Output,
    cubin: Output,
}

/// A pair of functions: the size of an output, and the output.
#[derive(Clone, Copy, Debug)]
struct Output {
    size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    bytes: unsafe extern "C" fn(Program, *mut c_char) -> Status,
}

impl Nvrtc {
    /// Loads NVRTC from the directory in [`DIR_VARIABLE`], or through the system loader.
    ///
    /// # Errors
    /// The library is missing or lacks a function.
    pub fn find() -> Result<Nvrtc, NvrtcError> {
        let directory = std::env::var_os(DIR_VARIABLE).map(PathBuf::from);
        Self::load(directory.as_deref())
    }

    /// Loads NVRTC from this directory, or through the system loader.
    ///
    /// # Errors
    /// The library is missing or lacks a function.
    pub fn load(directory: Option<&Path>) -> Result<Nvrtc, NvrtcError> {
        if let Some(directory) = directory {
            load_builtins(directory);
        }
        let mut why = String::new();
        for name in NAMES {
            let path = directory.map_or_else(|| PathBuf::from(name), |dir| dir.join(name));
            match open(&path) {
                Ok(library) => return Self::of(library),
                Err(error) => why = error.to_string(),
            }
        }
        Err(NvrtcError::Missing(why))
    }

    fn of(library: &Library) -> Result<Nvrtc, NvrtcError> {
        // SAFETY: the type of nvrtcVersion in nvrtc.h of CUDA 12 and 13, like the types below.
        let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status =
            unsafe { symbol(library, c"nvrtcVersion") }?;
        let calls = Calls::of(library)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both point to integers.
        let status = unsafe { version(&raw mut major, &raw mut minor) };
        calls.check("nvrtcVersion", status, String::new())?;
        Ok(Nvrtc {
            version: (major, minor),
            calls,
        })
    }

    /// Major and minor version.
    #[must_use]
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles a source.
    ///
    /// # Errors
    /// The source does not compile, or this version does not support the target.
    pub fn compile(&self, source: &str, target: &Target) -> Result<Compiled, NvrtcError> {
        let mut options = vec![
            format!("--gpu-architecture={}", target.arch()),
            "--std=c++17".to_owned(),
        ];
        if matches!(target, Target::Cubin(_)) {
            options.push("--ptxas-options=-v".to_owned());
        }
        let program = Open::new(&self.calls, source)?;
        program.compile(&options)?;
        let log = program.log();
        let image = match target {
            Target::Cubin(_) => program.output("nvrtcGetCUBIN", self.calls.cubin)?,
            Target::Ptx(_) => {
                let mut ptx = program.output("nvrtcGetPTX", self.calls.ptx)?;
                while ptx.last() == Some(&0) {
                    ptx.pop();
                }
                ptx
            }
        };
        Ok(Compiled { image, log })
    }
}

impl Calls {
    fn of(library: &Library) -> Result<Calls, NvrtcError> {
        // SAFETY: the types in nvrtc.h.
        let create = unsafe { symbol(library, c"nvrtcCreateProgram") }?;
        // SAFETY: the type in nvrtc.h.
        let compile = unsafe { symbol(library, c"nvrtcCompileProgram") }?;
        // SAFETY: the type in nvrtc.h.
        let destroy = unsafe { symbol(library, c"nvrtcDestroyProgram") }?;
        // SAFETY: the type in nvrtc.h.
        let error = unsafe { symbol(library, c"nvrtcGetErrorString") }?;
        Ok(Calls {
            create,
            compile,
            destroy,
            error,
            log: Output::of(library, c"nvrtcGetProgramLogSize", c"nvrtcGetProgramLog")?,
            ptx: Output::of(library, c"nvrtcGetPTXSize", c"nvrtcGetPTX")?,
            cubin: Output::of(library, c"nvrtcGetCUBINSize", c"nvrtcGetCUBIN")?,
        })
    }

    fn check(&self, call: &'static str, status: Status, log: String) -> Result<(), NvrtcError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: accepts any number.
        let name = unsafe { (self.error)(status) };
        let why = if name.is_null() {
            status.to_string()
        } else {
            // SAFETY: a static string of the library, which stays loaded.
            unsafe { CStr::from_ptr(name) }
                .to_string_lossy()
                .into_owned()
        };
        Err(NvrtcError::Failed { call, why, log })
    }
}

impl Output {
    fn of(library: &Library, size: &CStr, bytes: &CStr) -> Result<Output, NvrtcError> {
        // SAFETY: the types in nvrtc.h.
        let size = unsafe { symbol(library, size) }?;
        // SAFETY: the type in nvrtc.h.
        let bytes = unsafe { symbol(library, bytes) }?;
        Ok(Output { size, bytes })
    }
}

/// A program being compiled.
struct Open<'a> {
    calls: &'a Calls,
    program: Program,
}

impl<'a> Open<'a> {
    fn new(calls: &'a Calls, source: &str) -> Result<Open<'a>, NvrtcError> {
        let source = CString::new(source).map_err(|_| NvrtcError::Failed {
            call: "nvrtcCreateProgram",
            why: "the source has a NUL".to_owned(),
            log: String::new(),
        })?;
        let mut program = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: the strings outlive the call, which copies them. There are no headers.
        let status = unsafe {
            (calls.create)(
                &raw mut program,
                source.as_ptr(),
                c"kv_copy.cu".as_ptr(),
                0,
                none,
                none,
            )
        };
        calls.check("nvrtcCreateProgram", status, String::new())?;
        Ok(Open { calls, program })
    }

    fn compile(&self, options: &[String]) -> Result<(), NvrtcError> {
        let options: Vec<CString> = options
            .iter()
            .filter_map(|option| CString::new(option.as_str()).ok())
            .collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: `pointers.len()` strings, which outlive the call.
        let status = unsafe {
            (self.calls.compile)(self.program, pointers.len() as c_int, pointers.as_ptr())
        };
        let log = if status == 0 {
            String::new()
        } else {
            format!(":\n{}", self.log())
        };
        self.calls.check("nvrtcCompileProgram", status, log)
    }

    fn log(&self) -> String {
        let log = self.output("nvrtcGetProgramLog", self.calls.log);
        let log = log.unwrap_or_default();
        String::from_utf8_lossy(&log)
            .trim_end_matches('\0')
            .to_owned()
    }

    fn output(&self, call: &'static str, output: Output) -> Result<Vec<u8>, NvrtcError> {
        let mut size = 0;
        // SAFETY: `size` is a valid output pointer.
        let status = unsafe { (output.size)(self.program, &raw mut size) };
        self.calls.check(call, status, String::new())?;
        let mut bytes = vec![0u8; size];
        // SAFETY: the buffer has the reported size.
        let status = unsafe { (output.bytes)(self.program, bytes.as_mut_ptr().cast()) };
        self.calls.check(call, status, String::new())?;
        Ok(bytes)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `create`, destroyed once.
        unsafe { (self.calls.destroy)(&raw mut self.program) };
    }
}

/// Loads the builtins library. NVRTC of CUDA 13 opens it by its bare name and does not search its
/// own directory.
fn load_builtins(directory: &Path) {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with("libnvrtc-builtins.so.") {
            // A wrong version is harmless. A missing library causes an error at the first
            // compilation.
            let _ = open(&entry.path());
        }
    }
}

/// Loads a library for the rest of the process.
fn open(path: &Path) -> Result<&'static Library, libloading::Error> {
    // SAFETY: the initialisers of NVIDIA's libraries have no preconditions.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }?;
    Ok(Box::leak(Box::new(library)))
}

/// # Safety
/// `T` is the type of the function.
unsafe fn symbol<T: Copy>(library: &Library, name: &CStr) -> Result<T, NvrtcError> {
    // SAFETY: guaranteed by the caller.
    let found = unsafe { library.get::<T>(name.to_bytes_with_nul()) };
    match found {
        Ok(symbol) => Ok(*symbol),
        Err(error) => Err(NvrtcError::Missing(error.to_string())),
    }
}
