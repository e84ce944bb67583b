//! The names of the runs in the remote.
//!
//! A name is noted by a listing, a search or a publication. It carries the number of the last
//! listing that had begun by then. So the end of a complete listing tells the names of runs that
//! are gone, without a second set of names.

use std::collections::HashMap;

use larder_format::{Fingerprint, KeyPrefix};

use crate::planted::planted;
use crate::remote::Listed;
use crate::run::RunName;

/// Most runs whose names are known; 13 bytes each, and as much for the table.
pub(super) const RUNS_MAX: usize = 4 << 20;

/// Most runs of a namespace that are noted as unreadable. Others are read again.
const UNREADABLE_MAX: usize = 1 << 16;

/// The runs of a namespace in the remote.
#[derive(Default)]
pub(super) struct Runs {
    /// With the number of a listing.
    known: HashMap<KeyPrefix, u8>,
    /// Runs with a fault: they are not fetched again, nor published while they are there.
    faulty: HashMap<KeyPrefix, u8>,
    /// Runs that could not be read: neither, until a listing shows them again.
    unreadable: HashMap<KeyPrefix, u8>,
    /// A listed run to measure the speed with.
    sample: Option<Listed>,
}

impl Runs {
    fn is_empty(&self) -> bool {
        self.known.is_empty() && self.faulty.is_empty() && self.unreadable.is_empty()
    }

    pub(super) fn has(&self, last: &KeyPrefix) -> bool {
        self.known.contains_key(last)
    }
}

/// See the [module](self).
#[derive(Default)]
pub(super) struct Names {
    runs: HashMap<Fingerprint, Runs>,
    /// Known runs of all namespaces.
    known: usize,
    /// The number of the last listing that has begun.
    listing: u8,
}

impl Names {
    pub(super) fn len(&self) -> usize {
        self.known
    }

    pub(super) fn of(&self, namespace: Fingerprint) -> Option<&Runs> {
        self.runs.get(&namespace)
    }

    /// Whether a run is in the remote, as far as it is known. A faulty or unreadable one is: its
    /// object has the name.
    pub(super) fn has(&self, (namespace, last): (Fingerprint, KeyPrefix)) -> bool {
        let is_there = |runs: &Runs| {
            let others = [&runs.faulty, &runs.unreadable];
            runs.has(&last) || others.iter().any(|runs| runs.contains_key(&last))
        };
        self.of(namespace).is_some_and(is_there)
    }

    /// A run is in the remote. False if there is no room for its name.
    pub(super) fn add(&mut self, (namespace, last): (Fingerprint, KeyPrefix)) -> bool {
        if let Some(runs) = self.runs.get_mut(&namespace) {
            let known = runs.known.get_mut(&last);
            if let Some(listing) = known.or_else(|| runs.faulty.get_mut(&last)) {
                *listing = self.listing;
                return true;
            }
        }
        if self.known >= RUNS_MAX {
            return false;
        }
        let runs = self.runs.entry(namespace).or_default();
        runs.unreadable.remove(&last);
        runs.known.insert(last, self.listing);
        self.known += 1;
        true
    }

    /// A run is in the remote, and cannot be read.
    pub(super) fn note_unreadable(&mut self, name: &RunName) {
        let runs = self.runs.entry(name.namespace).or_default();
        let last = name.last.prefix();
        if runs.known.remove(&last).is_some() {
            self.known -= 1;
        }
        if runs.unreadable.len() < UNREADABLE_MAX {
            runs.unreadable.insert(last, self.listing);
        }
    }

    /// A run is not in the remote any more, or has a fault.
    pub(super) fn forget(&mut self, name: &RunName, is_faulty: bool) {
        let runs = self.runs.entry(name.namespace).or_default();
        let last = name.last.prefix();
        let is_kept = planted!(StaleName) && !is_faulty;
        if !is_kept && runs.known.remove(&last).is_some() {
            self.known -= 1;
        }
        if is_faulty && !planted!(FaultAgain) {
            runs.faulty.insert(last, self.listing);
        }
    }

    pub(super) fn begin_listing(&mut self) {
        // Where a listing of long ago has the same number, a name is forgotten a listing later.
        self.listing = self.listing.wrapping_add(1);
    }

    /// The listing shows an object. False if there is no room for its name. The longest object of
    /// at most `run_bytes` becomes the sample of its namespace; without one, the last object.
    pub(super) fn list(&mut self, object: &Listed, run_bytes: u64) -> bool {
        let id = (object.run.namespace, object.run.last.prefix());
        let has_room = self.add(id);
        if let Some(runs) = self.runs.get_mut(&object.run.namespace) {
            let best = runs.sample.filter(|best| best.bytes <= run_bytes);
            let fits = object.bytes <= run_bytes;
            if best.is_none_or(|best| fits && object.bytes >= best.bytes) {
                runs.sample = Some(*object);
            }
        }
        has_room
    }

    /// The listing was complete: a name from before it that it did not show is forgotten. So there
    /// is room for the next listing if there was none for this one.
    pub(super) fn end_listing(&mut self) {
        if planted!(OldName) {
            return;
        }
        let listing = self.listing;
        for runs in self.runs.values_mut() {
            runs.known.retain(|_, last| *last == listing);
            runs.faulty.retain(|_, last| *last == listing);
            runs.unreadable.retain(|_, last| *last == listing);
        }
        self.runs.retain(|_, runs| !runs.is_empty());
        self.known = self.runs.values().map(|runs| runs.known.len()).sum();
    }

    /// Whether there is a run of this namespace to measure the speed with.
    pub(super) fn has_sample(&self, namespace: Fingerprint) -> bool {
        self.of(namespace).is_some_and(|runs| runs.sample.is_some())
    }

    /// Takes it, until the next listing. `None` if it is longer than `run_bytes`, or not known any
    /// more.
    pub(super) fn take_sample(
        &mut self,
        namespace: Fingerprint,
        run_bytes: u64,
    ) -> Option<RunName> {
        let runs = self.runs.get_mut(&namespace)?;
        let sample = runs.sample.take()?;
        let is_known = runs.has(&sample.run.last.prefix());
        (is_known && sample.bytes <= run_bytes).then_some(sample.run)
    }
}
