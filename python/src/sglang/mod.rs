//! SGLang's HiCache storage backend: its policy over a [`Handle`](larder_handle::store::Handle).
//!
//! ```text
//!   SGLang's threads         larder/sglang.py          here                      neutral
//!  +---------------------+  +-----------------+  +-------------------+  +---------------------+
//!  | exists, get, set,   |->| LarderHiCache   |->| Backend           |->| Handle, Space       |
//!  | clear, stats, close |  | reads tensors   |  | addresses, policy |  | of `larder_handle`  |
//!  +---------------------+  +-----------------+  +-------------------+  +---------------------+
//!                                            pages move directly between host pool and device
//! ```
//!
//! A module imports only those below it:
//!
//! | module | contents |
//! |---|---|
//! | `class` | the Python class |
//! | [`doctor`] | checks of SGLang's keys before a server is started |
//! | [`config`] | SGLang's keys beside Larder's |
//! | [`backend`] | lookups, reads, writes: the calls of SGLang |
//! | [`explained`] | log lines that explain counters of failures |
//! | [`meters`] | counters and rates of this rank |
//! | [`hits`] | prefixes that several pools can restore |
//! | [`bounce`] | gather and scatter through huge pages |
//! | [`trial`] | direct or bounce: the faster one |
//! | [`space`] | the namespace of a server and its pools |
//! | [`pool`] | the memory of the pages of a host pool |

pub mod backend;
pub mod bounce;
#[cfg(feature = "module")]
pub mod class;
pub mod config;
pub mod doctor;
pub mod explained;
pub mod hits;
pub mod meters;
pub mod pool;
pub mod space;
pub mod trial;
