//! The tiers: an L1/L2 radix cache over any L3, with the semantics of HiCache but without its
//! races.
//!
//! An engine embeds a [`PrefixCache`], or, with a scheduler of its own or with several ranks, a
//! [`Cache`]. The cache matches prompts against a radix tree of pages, returns rows of L1 pages,
//! copies pages to the host tier and to L3, and loads them again. The [`mod@core`] makes all
//! decisions; it does no I/O and reads no clock. The cache executes them.
//!
//! ```text
//!   prefix   opens, polls, waits, frees     or: scheduler (one thread)
//!                    |
//!   +----------------v-----------------+
//!   | cache   executes orders          |---- device: L1 <-> L2, tickets        (larder-kernels)
//!   |  +----------------------------+  |---- threads: L2 <-> L3                (l3)
//!   |  | core    decides            |  |---- the other ranks: agreement        (ranks)
//!   |  |   tails   windows, states  |  |
//!   |  |   tree    nodes and pages  |  |
//!   |  |   pool    free pages       |  |
//!   |  |                            |  |
//!   |  +----------------------------+  |
//!   +----------------------------------+
//! ```
//!
//! A module imports only the modules below it.
//!
//! | module | contents |
//! |---|---|
//! | [`handover`] | requests that a prefill process hands over to a decode process of its node |
//! | [`transfer`] | pages of a request from the ranks of one engine to those of another node |
//! | [`prefix`] | a cache that polls itself, with sequences instead of requests |
//! | [`cache`] | the core combined with a device, an L3 and other ranks |
//! | [`chunk`] | the cache of engines that run with caching disabled |
//! | [`mod@core`] | the state machine that decides: requests, eviction, transfers, prefetches |
//! | [`config`] | the configuration |
//! | [`tails`] | pages that only the end of a prefix needs: windows and states |
//! | [`tree`] | the radix tree |
//! | [`prompt`] | tokens in the form that the tree compares, and their page keys |
//! | [`pool`] | free pages of the pools, and the rows of requests |
//! | [`runs`] | page numbers of a pool, as runs |
//! | [`mod@model`] | a model, the part of its KV that a rank holds, and its namespace |
//! | [`l3`] | the tier below: the page store, or a directory of files |
//! | [`ranks`] | agreement between the ranks of one engine |
//! | [`planted`](mod@planted) | bugs for the model test to detect; empty in release builds |
//!
//! Intended differences from HiCache:
//! - Pages can leave L1 without releasing L2 locks: pages that L3 still reads in L2 do not hold L1.
//! - Pages queued for L3 take at most half of L2.
//! - Nothing is inserted behind a load in flight. Nothing is copied to L2 before the forward that
//!   computes it, and every earlier forward, has ended successfully. A failed load or forward
//!   removes its pages from the tree, with all pages that were computed from them. So no page of L2
//!   or L3 depends on bytes that were never valid (see [`cache`] for the duties of a caller).
//! - A backup that ends before its parent is in L2 is discarded, in whichever order copies end.

pub mod cache;
pub mod chunk;
pub mod config;
pub mod core;
pub mod handover;
pub mod l3;
pub mod model;
pub mod planted;
pub mod pool;
pub mod prefix;
pub mod prompt;
pub mod ranks;
pub mod runs;
pub mod tails;
pub mod transfer;
pub mod tree;

pub use cache::{Cache, CacheError, Parts};
pub use config::Config;
pub use model::{Component, Model, Role};
pub use prefix::{Ask, PrefixCache, PrefixOptions, RowAt, Sequence, Slots};
