//! The tiers: an L1/L2 radix cache over any L3, with HiCache's semantics.
//!
//! | module | what it is |
//! |---|---|
//! | [`runs`] | page numbers of a pool, as runs |
//! | [`pool`] | which pages are free, and the rows of requests |
//! | [`prompt`] | tokens as the tree compares them, and their page keys |
//! | [`tree`] | the radix tree |
//! | [`mod@core`] | the deciding state machine: requests, room, transfers, prefetches |
//! | [`cache`] | the core with a device, an L3 and other ranks around it: what an engine embeds |
//! | [`l3`] | what is below: the page store, or a directory of files |
//! | [`chunk`] | the cache of engines that run with caching off |
//! | [`config`] | what can be set |
//! | [`planted`](mod@planted) | bugs for the model test to find; nothing in any other build |
//! | [`ranks`] | how the ranks of one engine agree |

pub mod cache;
pub mod chunk;
pub mod config;
pub mod core;
pub mod l3;
pub mod planted;
pub mod pool;
pub mod prompt;
pub mod ranks;
pub mod runs;
pub mod tree;

pub use cache::{Cache, CacheError, Parts};
pub use config::Config;
