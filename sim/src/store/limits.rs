//! The known quotas and pins of the store, and the places of the quotas.

use std::collections::{BTreeMap, BTreeSet};

use larder_core::core::QuotaLevel;
use larder_core::counters::StoreCounts;
use larder_engine::format::quotas_offsets;
use larder_store::quotas::QuotaSpec;

use crate::oracle::{Name, VersionId};
use crate::setup::BLOCK;

/// The quotas that an opening may find, and the last look at the groups.
#[derive(Default)]
pub struct Quotas {
    /// The last is that of the last change.
    pub may_be: Vec<Vec<QuotaSpec>>,
    /// A change is in progress.
    pub changes: u32,
    /// Those in force now. `None` while they may change.
    pub in_force: Option<Vec<QuotaSpec>>,
    /// Begins and ends of changes so far.
    pub count: u64,
    pub seen: Option<Look>,
}

/// The groups at one moment.
pub struct Look {
    pub groups: Vec<QuotaLevel>,
    pub levels: Vec<u64>,
    pub counts: StoreCounts,
    pub replaced: u64,
}

impl Quotas {
    /// A run of the process begins.
    pub fn begin(&mut self) {
        self.seen = None;
        self.changes = 0;
        self.in_force = None;
        self.count += 1;
        if self.may_be.is_empty() {
            self.may_be.push(Vec::new());
        }
    }
}

/// The pins that the store may have.
#[derive(Default)]
pub struct Pins {
    /// Confirmed pins that no caller has taken back.
    pub sure: BTreeMap<Name, VersionId>,
    /// Versions that may be pinned.
    pub maybe: BTreeSet<(Name, VersionId)>,
    /// Names of a call in progress, or that a crash ended: any version of them may be pinned.
    pub asked: BTreeSet<Name>,
    /// A call is in progress.
    pub is_busy: bool,
}

impl Pins {
    /// Whether this version may be pinned: it, or a later version in whose place it is found.
    pub fn may_be(&self, name: Name, version: VersionId) -> bool {
        let mut later = self.maybe.range((name, version)..);
        later.next().is_some_and(|(found, _)| *found == name)
    }

    /// A run of the process begins.
    pub fn begin(&mut self) {
        self.is_busy = false;
    }
}

/// Whether a write is one of a copy of the quotas, on a volume of so many blocks.
pub fn is_copy(volume: usize, blocks: usize, start: usize) -> bool {
    let offsets = quotas_offsets((blocks * BLOCK) as u64);
    volume == 0 && offsets.contains(&((start * BLOCK) as u64))
}
