//! The operating system as an open store uses it: files, sockets, processes, shared memory.
//!
//! Every call to the system that opening a store, attaching to it, serving it and taking it over
//! depend on goes through these modules. The simulator puts its own in their place, with the same
//! names. So a function here makes one call, or a few that belong together, and decides nothing
//! about stores.
//!
//! Outside are: io_uring, which needs the kernel itself; the creation of stores and offline work;
//! memory of this process alone ([`memory`](crate::memory)); facts for `doctor`.
//!
//! | module | content |
//! |---|---|
//! | `files` | open files: identity, length, bytes, locks |
//! | `sockets` | Unix stream sockets, and the files of listening ones |
//! | `words` | sleeping on a word of shared memory |
//! | `direct` | whether a file bypasses the page cache |
//! | `holder` | the process that a superblock names |
//! | `processes` | this process and others: pids, users, groups, clocks |
//! | `devices` | the device below a file, for people |
//! | `pages` | the sizes of memory pages |

pub mod devices;
pub mod direct;
pub mod holder;
pub mod pages;

#[cfg(not(feature = "simulated"))]
pub mod files;
#[cfg(not(feature = "simulated"))]
pub mod processes;
#[cfg(not(feature = "simulated"))]
pub mod sockets;
#[cfg(not(feature = "simulated"))]
pub mod words;

#[cfg(feature = "simulated")]
pub use larder_sim_runtime::{files, processes, sockets, words};
