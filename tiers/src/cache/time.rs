//! The time of a cache: real time, or the time of a replay in which copies take as long as on
//! another machine.

use std::time::Instant;

use crate::core::{OpId, Order};

/// See the module documentation.
pub trait Time: Send {
    /// Microseconds since a fixed moment.
    fn now_us(&mut self) -> u64;

    /// Called when an order that needs an answer is passed to the device or L3.
    fn begun(&mut self, order: &Order);

    /// The duration of a read from L3 in microseconds, given the `measured` real duration. Called
    /// before [`Time::is_over`]; the result is used once that returns `true`.
    fn read_us(&mut self, id: OpId, measured: u64) -> u64;

    /// Whether a completed order of the device or L3 has also ended in this time. Called at every
    /// poll until it returns `true`.
    fn is_over(&mut self, id: OpId) -> bool;
}

/// Real time.
pub(super) struct RealTime(pub(super) Instant);

impl Time for RealTime {
    fn now_us(&mut self) -> u64 {
        u64::try_from(self.0.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn begun(&mut self, _order: &Order) {}

    fn read_us(&mut self, _id: OpId, measured: u64) -> u64 {
        measured
    }

    fn is_over(&mut self, _id: OpId) -> bool {
        true
    }
}
