//! Totals of all processes of a store since their counting began. They outlast the owner.
//!
//! The owner adds up its own counters and those of its clients. It sends the totals to its clients
//! once a second, if they have changed, and before each report. A client that becomes the owner
//! begins with its copy, so the totals of two reports never go down as long as one process stays
//! attached. Without a copy they begin at zero; the owner's start time then changes, too.
//!
//! Totals travel by name, in JSON: see [`protocol`](crate::protocol).

use larder_core::counters::{Counted, Counts, Latencies, StoreCounts};
use serde::{Deserialize, Serialize};

use crate::spaces::{AgesOfSpaces, Spaces};

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Totals {
    /// The calls of all processes.
    pub counts: Counts,
    /// The decisions of the owners.
    pub store: StoreCounts,
    /// The times of calls and of device operations in all processes.
    pub latencies: Latencies,
    /// Their reads by namespace.
    pub spaces: Spaces,
    /// The ages of pages at their use and at their eviction, by namespace. The owners count them.
    pub ages: AgesOfSpaces,
}

/// The measurements that a client sends beside its counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Measures {
    #[serde(flatten)]
    pub latencies: Latencies,
    pub spaces: Spaces,
}

impl Measures {
    /// Combines each counter with that of `other`.
    pub(crate) fn combine(&mut self, other: &Measures, with: &mut impl FnMut(u64, u64) -> u64) {
        self.latencies.combine(&other.latencies, with);
        self.spaces.combine(&other.spaces, with);
    }

    /// Adds the measures of another process.
    pub(crate) fn add(&mut self, other: &Measures) {
        self.combine(other, &mut u64::saturating_add);
    }
}

impl Totals {
    /// Adds the measures of a process.
    pub(crate) fn measured(&mut self, measures: &Measures) {
        self.latencies.add(&measures.latencies);
        self.spaces.add(&measures.spaces);
    }
}
