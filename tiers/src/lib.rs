//! The tiers: an L1/L2 radix cache over any L3, with HiCache's semantics and none of its races.
//!
//! A [`Cache`] is what an engine embeds: it matches prompts against a radix tree of pages, hands out rows of L1 pages, copies pages
//! to the host tier and to L3, and brings them back. What it decides, the [`mod@core`] decides, which does no I/O and reads no clock;
//! the cache carries it out.
//!
//! ```text
//!              scheduler (one thread)
//!                    |
//!   +----------------v-----------------+
//!   | cache   carries out orders       |---- device: L1 <-> L2, tickets        (larder-kernels)
//!   |  +----------------------------+  |---- threads: L2 <-> L3                (l3)
//!   |  | core    decides            |  |---- the other ranks: what is agreed   (ranks)
//!   |  |   tree    who has what     |  |
//!   |  |   pool    which page is    |  |
//!   |  |           free             |  |
//!   |  +----------------------------+  |
//!   +----------------------------------+
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`cache`] | the core with a device, an L3 and other ranks around it: what an engine embeds |
//! | [`mod@core`] | the deciding state machine: requests, room, transfers, prefetches |
//! | [`tree`] | the radix tree |
//! | [`pool`] | which pages are free, and the rows of requests |
//! | [`runs`] | page numbers of a pool, as runs |
//! | [`prompt`] | tokens as the tree compares them, and their page keys |
//! | [`l3`] | what is below: the page store, or a directory of files |
//! | [`ranks`] | how the ranks of one engine agree |
//! | [`chunk`] | the cache of engines that run with caching off |
//! | [`config`] | what can be set |
//! | [`planted`](mod@planted) | bugs for the model test to find; nothing in any other build |
//!
//! Where it differs from HiCache, on purpose:
//! - What leaves L1 needs no lock of L2 to be gone: pages that L3 still reads in L2 do not hold L1.
//! - What is on its way to L3 takes at most half of L2.
//! - Nothing is inserted behind a load in flight. Nothing is copied to L2 before the forward that
//!   computes it, and every forward before that, has ended well. A failed load or forward takes its
//!   pages out of the tree with all that was computed on them. So no page of L2 or L3 stands on
//!   bytes that were never there ([`cache`] says what a caller does).
//! - A backup that ends before its parent is in L2 is thrown away, whatever the order in which copies end.

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
