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
//!  | store: a Handle, its Spaces, its Queues    | | larder_kernels   |
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
//! | [`store`] | a store, its namespaces with every call of the engine, and its queues of jobs |
//! | [`place`] | from a path to an attached store, which is created if necessary |
//! | [`config`] | the configuration: every key and its type |
//! | [`weights`] | the weights tag |
//! | [`mount`] | the file system of a path |
//! | [`region`] | memory whose pages are named by row |
//! | [`chain`] | where pages stand in their chain |
//! | [`status`] | the codes of the answers |
//! | `named` | enums whose values have names in Python |
//! | `log` | the log, whose lines go to Python |
//! | `program` | the command line of this package |

pub mod chain;
pub mod config;
#[cfg(feature = "module")]
mod device;
pub mod doctor;
#[cfg(feature = "module")]
mod log;
#[cfg(feature = "module")]
mod module;
pub mod mount;
mod named;
pub mod place;
#[cfg(feature = "module")]
mod program;
pub mod region;
pub mod sglang;
pub mod status;
pub mod store;
pub mod weights;
pub mod worth;
