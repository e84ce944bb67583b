//! The Python package: SGLang's HiCache storage backend over a Larder store, the command line, and copies between an engine's tensors
//! and host memory.
//!
//! Everything is decided here, in Rust; the Python class reads SGLang's objects and makes one call a batch. Without the feature
//! `module` this is a plain library that needs no Python, which is how the workspace builds and tests it.
//!
//! ```text
//!   SGLang's threads         larder/sglang.py          here                      larder-engine
//!  +---------------------+  +-----------------+  +-------------------+  +---------------------+
//!  | exists, get, set,   |->| LarderHiCache   |->| Backend           |->| SharedStore         |
//!  | clear, stats, close |  | reads tensors   |  | addresses, policy |  | owner or client     |
//!  +---------------------+  +-----------------+  +-------------------+  +---------------------+
//!                                                  pages straight between host pool and device
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`config`] | the extra config: every key and its type |
//! | [`place`] | from a path to a store that is attached to, made if need be |
//! | [`space`] | what SGLang says, as a namespace |
//! | [`weights`] | the weights tag |
//! | [`pool`] | where a host pool's pages lie in memory |
//! | [`backend`] | lookups, reads, writes: what SGLang calls |
//! | [`bounce`] | gathering and spreading through huge pages |
//! | [`trial`] | direct or bounce: the faster one |
//! | [`hits`] | prefixes that several pools can restore |
//! | [`meters`] | what passed through |
//! | [`explained`] | one log line for each way in which counts of failures grow |
//! | [`doctor`] | checking a configuration before a server is started |
//! | `module` | the Python module |
//! | `device` | its classes for engines that copy between their own tensors and host memory |

pub mod backend;
pub mod bounce;
pub mod config;
#[cfg(feature = "module")]
mod device;
pub mod doctor;
pub mod explained;
pub mod hits;
pub mod meters;
#[cfg(feature = "module")]
mod module;
pub mod place;
pub mod pool;
pub mod space;
pub mod trial;
pub mod weights;
