//! Requests that are computed on one node and answered on another: each word depends on all bytes
//! that were transferred, against the same transformer without a cache.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a broken expectation is the finding"
)]

#[path = "../../examples/engine.rs"]
mod engine;
mod kills;
#[path = "../prefix/memory.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod memory;
#[cfg(debug_assertions)]
#[path = "../support/planted.rs"]
mod noticed;
mod one_sided;
mod planted;
mod proxy;
mod random;
mod rules;
mod side;

use std::time::Duration;

/// Longer than any test takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A number of the environment.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}
