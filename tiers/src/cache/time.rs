//! Time as a cache knows it: the machine's own, or that of a replay, in which copies take as long as they would elsewhere.

use std::time::Instant;

use crate::core::{OpId, Order};

/// See the module.
pub trait Time: Send {
    /// Microseconds since a moment of its own.
    fn now_us(&mut self) -> u64;

    /// An order that will be answered is given to the device or to L3.
    fn begun(&mut self, order: &Order);

    /// How long a read of L3 took, in microseconds, that took `measured` on the machine. Asked before [`Time::is_over`], and
    /// believed when that says yes.
    fn read_us(&mut self, id: OpId, measured: u64) -> u64;

    /// Whether an order that the device or L3 is done with has ended in this time too. Asked at every poll until it says yes.
    fn is_over(&mut self, id: OpId) -> bool;
}

/// The machine's own.
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
