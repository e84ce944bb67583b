//! The Python package: a page store for any engine, SGLang's storage backend over it, the command
//! line, and copies between an engine's tensors and host memory.
//!
//! All logic is here, in Rust. Without the feature `module` this is a plain library that does not
//! need Python; the workspace builds and tests it in this form.
//!
//! ```text
//!   larder.sglang       any engine in Python       larder.device       python -m larder
//!  +-----------------+ +------------------------+ +------------------+ +---------------+
//!  | sglang: policy  | | module: classes        | | device           | | larder_tools  |
//!  +-----------------+-+------------------------+ +------------------+ +---------------+
//!  | store, queue: a Handle, its Spaces, jobs   | | larder_kernels   |
//!  +--------------------------------------------+ +------------------+
//!  | larder_engine: Store                       |
//!  +--------------------------------------------+
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`store`] | a store and its namespaces: every call of the engine |
//! | [`queue`] | jobs on a store, for an engine that must not wait |
//! | [`chain`] | where pages stand in their chain |
//! | [`region`] | memory whose pages are named by row |
//! | [`status`] | the codes of the answers |
//! | [`config`] | the configuration: every key and its type |
//! | [`place`] | from a path to an attached store, which is created if necessary |
//! | [`mount`] | the file system of a path |
//! | [`weights`] | the weights tag |
//! | [`worth`] | whether pages are read faster than computed |
//! | [`doctor`] | checks of a configuration before a server is started |
//! | [`sglang`] | SGLang's policy, and nothing else of SGLang |
//! | `module` | the Python module |
//! | `device` | its classes for engines that copy between their own tensors and host memory |

pub mod chain;
pub mod config;
#[cfg(feature = "module")]
mod device;
pub mod doctor;
#[cfg(feature = "module")]
mod module;
pub mod mount;
pub mod place;
pub mod queue;
pub mod region;
pub mod sglang;
pub mod status;
pub mod store;
pub mod weights;
pub mod worth;
