//! The tiers: an L1/L2 radix cache over any L3, with HiCache's semantics.
//!
//! | module | what it is |
//! |---|---|
//! | [`runs`] | page numbers of a pool, as runs |
//! | [`pool`] | which pages are free, and the rows of requests |
//! | [`ranks`] | how the ranks of one engine agree |

pub mod pool;
pub mod ranks;
pub mod runs;
