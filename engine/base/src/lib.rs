//! The ground of the engine: threads, time, files, memory, and the numbers of an open store.
//!
//! Crates of this project alone use it: those of `engine/`, `larder-tiers`, `larder-remote`, the
//! tools, Python bindings, fuzz targets and simulations. It has no stable interface.
//!
//! From the top down: a module imports only modules below its own row.
//!
//! | module | content |
//! |---|---|
//! | [`latency`] | histograms of latencies: of the devices, and of calls |
//! | [`failure`] | why a disk did not carry out an operation |
//! | [`memory`] | aligned, huge-page backed buffers |
//! | [`ahead`] | cache lines that are fetched ahead |
//! | [`sidecar`] | a small file beside a store that the store can do without |
//! | [`seldom`] | limits how often a log line is repeated |
//! | [`random`] | random bytes for identities |
//! | [`sealed`] | memory that several processes map |
//! | [`system`] | the calls to the operating system that a simulation has to control |
//! | [`fork`] | handles in a forked child |
//! | [`runtime`] | threads, locks and time: those of the system, or of a simulation |
//! | [`ids`] | numbers of an open store, which no file holds |
//! | [`mod@bugs`] | bugs that tests plant, in each crate |

// The unit tests are those of the engine that ships.
#![cfg(not(all(test, feature = "simulated")))]
#![allow(missing_docs, reason = "no crate outside of this project uses it")]

pub mod ahead;
pub mod bugs;
pub mod failure;
#[cfg(not(feature = "simulated"))]
pub mod fork;
pub mod ids;
pub mod latency;
pub mod memory;
pub mod random;
pub mod runtime;
pub mod sealed;
pub mod seldom;
#[cfg(not(feature = "simulated"))]
pub mod sidecar;
pub mod system;

#[cfg(feature = "simulated")]
pub use larder_sim_runtime::{fork, sidecar};
