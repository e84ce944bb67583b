//! The names of the runs in the remote.
//!
//! A name is noted by a listing, a search or a publication. It carries the number of the last
//! listing that had begun by then. So the end of a complete listing tells the names of runs that
//! are gone, without a second set of names.
//!
//! A run that fails is left alone for a pause, whatever its failure: a wrong body, a refusal, an
//! object that is listed and not there. Each failure in a row doubles the pause.

use std::collections::HashMap;
use std::time::Duration;

use larder_base::runtime::Instant;
use larder_format::{Fingerprint, KeyPrefix};

use super::limits::Pauses;
use crate::planted::planted;
use crate::remote::{LISTED_MAX, Listed};
use crate::run::{RunId, RunName};

/// Most runs of a namespace whose failures are noted. Others are fetched again.
const FAILING_MAX: usize = 1 << 16;

/// A run that could not be taken. It is fetched again after a pause.
struct Failing {
    until: Instant,
    pause: Duration,
    /// Its object is there, as far as it is known.
    is_there: bool,
    /// The number of a listing.
    listing: u8,
}

/// The runs of a namespace in the remote.
#[derive(Default)]
pub(super) struct Runs {
    /// With the number of a listing.
    known: HashMap<KeyPrefix, u8>,
    /// Runs that failed. They are not published while their objects are there.
    failing: HashMap<KeyPrefix, Failing>,
    /// A listed run to measure the speed with.
    sample: Option<Listed>,
}

impl Runs {
    fn is_empty(&self) -> bool {
        self.known.is_empty() && self.failing.is_empty()
    }

    /// Whether a run is there and may be fetched, as far as it is known.
    pub(super) fn has(&self, last: &KeyPrefix, now: Instant) -> bool {
        let is_due = |run: &Failing| run.is_there && now >= run.until;
        self.known.contains_key(last) || self.failing.get(last).is_some_and(is_due)
    }

    /// Whether a run has failed, and its pause is not over.
    pub(super) fn pauses(&self, last: &KeyPrefix, now: Instant) -> bool {
        self.failing.get(last).is_some_and(|run| now < run.until)
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

    /// Those of a namespace, by its name in the remote.
    pub(super) fn of(&self, space: Fingerprint) -> Option<&Runs> {
        self.runs.get(&space)
    }

    /// Whether a run is in the remote and does not fail, as far as it is known.
    pub(super) fn knows(&self, (namespace, last): RunId) -> bool {
        let runs = self.of(namespace);
        runs.is_some_and(|runs| runs.known.contains_key(&last))
    }

    /// Whether a run is in the remote, as far as it is known. A failing run may be: its object has
    /// the name, or the question for it has failed.
    pub(super) fn has(&self, (namespace, last): RunId, now: Instant) -> bool {
        let is_there = |runs: &Runs| {
            let fails = |run: &Failing| run.is_there || now < run.until;
            runs.known.contains_key(&last) || runs.failing.get(&last).is_some_and(fails)
        };
        self.of(namespace).is_some_and(is_there)
    }

    /// A run is in the remote. False if there is no room for its name.
    pub(super) fn add(&mut self, (namespace, last): RunId) -> bool {
        if let Some(runs) = self.runs.get_mut(&namespace) {
            if let Some(listing) = runs.known.get_mut(&last) {
                *listing = self.listing;
                return true;
            }
            if let Some(run) = runs.failing.get_mut(&last) {
                (run.is_there, run.listing) = (true, self.listing);
                return true;
            }
        }
        if self.known >= LISTED_MAX {
            return false;
        }
        let runs = self.runs.entry(namespace).or_default();
        runs.known.insert(last, self.listing);
        self.known += 1;
        true
    }

    /// A run could not be taken: it is not fetched again before the end of a pause. Returns this
    /// moment.
    pub(super) fn fail(
        &mut self,
        name: &RunName,
        is_there: bool,
        now: Instant,
        pauses: Pauses,
    ) -> Instant {
        let runs = self.runs.entry(name.namespace).or_default();
        let last = name.last.prefix();
        let is_kept = planted!(StaleName) && !is_there;
        if !is_kept && runs.known.remove(&last).is_some() {
            self.known -= 1;
        }
        let before = runs.failing.get(&last);
        // Several attempts in a pause are one failure.
        let (pause, until) = match before {
            Some(run) if now < run.until => (run.pause, run.until),
            _ => {
                let pause = pauses.next(before.map(|run| run.pause));
                (pause, now + pause)
            }
        };
        let has_room = before.is_some() || runs.failing.len() < FAILING_MAX;
        if has_room && !planted!(FaultAgain) {
            let run = Failing {
                until,
                pause,
                is_there,
                listing: self.listing,
            };
            runs.failing.insert(last, run);
        }
        until
    }

    /// A run was taken.
    pub(super) fn recover(&mut self, name: &RunName) {
        let failing = self
            .runs
            .get_mut(&name.namespace)
            .map(|runs| &mut runs.failing);
        if failing.is_some_and(|failing| failing.remove(&name.last.prefix()).is_some()) {
            self.add(name.id());
        }
    }

    pub(super) fn begin_listing(&mut self) {
        // Where a listing of long ago has the same number, a name is forgotten a listing later.
        self.listing = self.listing.wrapping_add(1);
    }

    /// The listing shows an object. False if there is no room for its name. The longest object of
    /// at most `run_bytes` becomes the sample of its namespace; without one, the last object.
    pub(super) fn list(&mut self, object: &Listed, run_bytes: u64) -> bool {
        let id = object.run.id();
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
            runs.failing.retain(|_, run| run.listing == listing);
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
        let is_known = runs.known.contains_key(&sample.run.last.prefix());
        (is_known && sample.bytes <= run_bytes).then_some(sample.run)
    }
}
