//! The faults that a test injects into a host device.

use crate::error::DeviceError;
use crate::transfer::Direction;

/// A point at which a test can make a [`HostDevice`](super::HostDevice) fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// A host pool is registered.
    Register,
    /// An L1 pool is allocated.
    Allocate,
    /// A transfer is submitted to the device.
    Submit(Direction),
    /// A layer is about to be copied.
    Copy(Direction, u32),
}

/// Decides which operations fail.
pub type Faults = Box<dyn Fn(Moment) -> Result<(), DeviceError> + Send + Sync>;
