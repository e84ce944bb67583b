//! Numbers of forwards, orders, requests and prefetches.

use crate::tree::LoadId;

/// Number of a forward pass, in the order in which they are inserted. 0 is before the first:
/// nothing to wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fence(pub u64);

/// Number of a transfer in progress. Loads are [`LoadId`]s with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u32);

impl From<LoadId> for OpId {
    fn from(load: LoadId) -> OpId {
        OpId(load.0)
    }
}

/// Number of a request, unique within a core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Number of a prefetch. Until it is polled to its end or cancelled, its pages count towards the
/// share of prefetches in L2.
#[must_use = "a prefetch that is neither polled to its end nor cancelled keeps its share of L2"]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PrefetchId(pub u32);
