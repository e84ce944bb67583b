//! The decisions of the engine: where pages go, which of them are found, kept and evicted. No I/O,
//! and no clock.
//!
//! Crates of this project alone use it: those of `engine/` above it, `larder-remote`, and the
//! tools, Python bindings, tests and simulations that look inside. It has no stable interface.
//!
//! From the top down: a module imports only modules below its own row. The tables in the modules
//! keep the same order, and `tests/floors` checks them.
//!
//! | module | content |
//! |---|---|
//! | [`core`](mod@core) | the deciding state machine: segments, journal, syncs, puts, reclaim |
//! | [`grants`] | the pages that a put asks to store, and the extents that it is granted |
//! | [`ages`] | ages of pages at use and at eviction, in buckets, by namespace |
//! | [`index`] | key to place, in RAM |
//! | [`policy`] | which pages a store takes, keeps and copies: the seams for policies |
//! | [`hint`] | callers' knowledge of pages, for policies |
//! | [`counters`] | the table of the counters, with their names, metrics and meanings |
//! | [`status`] | the results of puts and gets, page by page |
//! | [`capacity`] | how many pages a store of a given geometry keeps |
//! | [`chunks`] | arrays that grow without a copy of all their elements |
//! | [`mod@planted`] | bugs for the simulation to find; empty in other builds |

// The unit tests are those of the engine that ships.
#![cfg(not(all(test, feature = "simulated")))]
#![allow(
    missing_docs,
    clippy::new_without_default,
    clippy::len_without_is_empty,
    reason = "the engine has the face"
)]

pub mod ages;
pub mod capacity;
pub mod chunks;
pub mod core;
pub mod counters;
pub mod grants;
pub mod hint;
pub mod index;
pub mod planted;
pub mod policy;
pub mod status;

use larder_base::planted;
