//! Hybrid models as an engine sees them: a toy model with full attention, a follower, a sliding
//! window and a state, whose every word depends on all bytes that a token sees, against the same
//! model without a cache.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a broken expectation is the finding"
)]

mod kills;
#[path = "../prefix/memory.rs"]
mod memory;
mod random;
mod ranks;
mod rules;
#[path = "../../examples/hybrid_engine.rs"]
mod toy;

use std::time::Duration;

/// Tokens of an answer.
const ANSWER: usize = 9;

/// Longer than any test takes.
const PATIENCE: Duration = Duration::from_secs(60);
