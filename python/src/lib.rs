//! The Python package: a page store for any engine, SGLang's storage backend over it, the command
//! line, and copies between an engine's tensors and host memory.
//!
//! All logic is here, in Rust. Without the feature `module` this is a plain library that does not
//! need Python; the workspace builds and tests it in this form.
//!
//! ```text
//!   larder_kv.sglang   any engine in Python       larder_kv.device   python -m larder_kv
//!  +-----------------+ +------------------------+ +------------------+ +---------------+
//!  | sglang: policy  | | module: classes        | | device           | | larder_tools  |
//!  +-----------------+-+------------------------+ +------------------+ +---------------+
//!  | larder_handle: Handles, Spaces, Queues     | | larder_kernels   |
//!  +--------------------------------------------+ +------------------+
//!  | larder_engine: Store                       |
//!  +--------------------------------------------+
//! ```
//!
//! A module imports only those below it:
//!
//! | module | contents |
//! |---|---|
//! | `module` | the Python module |
//! | `device` | its classes for engines that copy between their own tensors and host memory |
//! | [`sglang`] | SGLang's policy, and nothing else of SGLang |
//! | [`doctor`] | checks of a configuration before a server is started |
//! | [`worth`] | whether pages are read faster than computed |
//! | [`weights`] | the weights tag |
//! | `log` | the log, whose lines go to Python |
//! | `program` | the command line of this package |

#[cfg(feature = "module")]
mod device;
pub mod doctor;
#[cfg(feature = "module")]
mod log;
#[cfg(feature = "module")]
mod module;
#[cfg(feature = "module")]
mod program;
pub mod sglang;
pub mod weights;
pub mod worth;
