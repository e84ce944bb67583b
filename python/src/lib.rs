//! The Python package: SGLang's HiCache storage backend over a Larder store, the command line, and
//! copies between an engine's tensors and host memory.
//!
//! All logic is here, in Rust. The Python class reads SGLang's objects and makes one call per
//! batch. Without the feature `module` this is a plain library that does not need Python; the
//! workspace builds and tests it in this form.
//!
//! ```text
//!   SGLang's threads         larder/sglang.py          here                      larder-engine
//!  +---------------------+  +-----------------+  +-------------------+  +---------------------+
//!  | exists, get, set,   |->| LarderHiCache   |->| Backend           |->| Store         |
//!  | clear, stats, close |  | reads tensors   |  | addresses, policy |  | owner or client     |
//!  +---------------------+  +-----------------+  +-------------------+  +---------------------+
//!                                            pages move directly between host pool and device
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`config`] | the extra config: every key and its type |
//! | [`place`] | from a path to an attached store, which is created if necessary |
//! | [`space`] | the namespace of a server and its pools |
//! | [`weights`] | the weights tag |
//! | [`pool`] | the memory of the pages of a host pool |
//! | [`backend`] | lookups, reads, writes: the calls of SGLang |
//! | [`bounce`] | gather and scatter through huge pages |
//! | [`trial`] | direct or bounce: the faster one |
//! | [`hits`] | prefixes that several pools can restore |
//! | [`meters`] | counters and rates of this rank |
//! | [`explained`] | log lines that explain counters of failures |
//! | [`store`] | a store and its namespaces, without an engine's policy |
//! | [`queue`] | jobs on a store, for an engine that must not wait |
//! | [`region`] | memory whose pages are named by row |
//! | [`status`] | the codes of the answers |
//! | [`doctor`] | checks of a configuration before a server is started |
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
pub mod queue;
pub mod region;
pub mod space;
pub mod status;
pub mod store;
pub mod trial;
pub mod weights;
