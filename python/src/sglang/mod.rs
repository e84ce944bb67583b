//! SGLang's HiCache storage backend: its policy over a [`Handle`](crate::store::Handle).
//!
//! ```text
//!   SGLang's threads         larder/sglang.py          here                      neutral
//!  +---------------------+  +-----------------+  +-------------------+  +---------------------+
//!  | exists, get, set,   |->| LarderHiCache   |->| Backend           |->| Handle, Space       |
//!  | clear, stats, close |  | reads tensors   |  | addresses, policy |  | of `crate::store`   |
//!  +---------------------+  +-----------------+  +-------------------+  +---------------------+
//!                                            pages move directly between host pool and device
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`config`] | SGLang's keys beside Larder's |
//! | [`doctor`] | checks of those keys before a server is started |
//! | [`space`] | the namespace of a server and its pools |
//! | [`pool`] | the memory of the pages of a host pool |
//! | [`backend`] | lookups, reads, writes: the calls of SGLang |
//! | [`bounce`] | gather and scatter through huge pages |
//! | [`trial`] | direct or bounce: the faster one |
//! | [`hits`] | prefixes that several pools can restore |
//! | [`meters`] | counters and rates of this rank |
//! | [`explained`] | log lines that explain counters of failures |
//! | `class` | the Python class |

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
