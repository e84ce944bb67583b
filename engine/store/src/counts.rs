//! The processes that use a store, with the counters of their calls.

use larder_core::counters::Counts;
use serde::{Deserialize, Serialize};

/// A process that uses a store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Process {
    /// Its number among the clients of this owner; `None` for the owner itself.
    pub client: Option<u32>,
    /// Its pid in the owner's pid namespace. `None` if it is not visible there.
    pub pid: Option<u32>,
    /// The name of its program, as the system shows it; `None` if it is not known.
    pub name: Option<String>,
    /// Its release.
    pub release: String,
    /// Seconds since it opened the store, or attached to this owner.
    pub uptime_seconds: f64,
    /// Its counters; `None` if its release does not send them.
    pub counts: Option<Counts>,
}

/// The clients of an owner that have gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Departed {
    /// How many there were.
    pub clients: u64,
    /// Their counters together.
    pub counts: Counts,
}
