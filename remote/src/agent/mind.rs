//! The remote's state: its breaker, its speed, and the names of its runs.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use larder_format::{Fingerprint, PageKey};

use super::Agent;
use super::counts::Count;
use super::desk::RUNS_MAX;
use super::memory::encode;
use super::search::Search;
use crate::remote::{RemoteError, gallop};
use crate::run::RunName;

/// Longest time of a listing.
const LISTING_TIMEOUT: Duration = Duration::from_secs(60);

/// Objects of a listing that are noted at once.
const LISTED_AT_ONCE: usize = 4096;

impl Agent {
    pub(super) fn deadline(&self) -> Instant {
        self.now() + self.options.timeout
    }

    pub(super) fn succeeded(&self) {
        let mut desk = self.desk.lock();
        let was_open = !desk.breaker.is_closed();
        desk.breaker.succeeded();
        drop(desk);
        if was_open {
            tracing::info!("{} answers again", self.options.place);
            self.work.notify_all();
        }
    }

    pub(super) fn failed(&self, error: &RemoteError) {
        let mut desk = self.desk.lock();
        if !desk.failed(error, self.now(), &self.options) {
            return;
        }
        let late = desk.give_up();
        drop(desk);
        self.count(Count::BreakerOpenings, 1);
        self.count(Count::RunsLate, late);
        tracing::warn!(
            "no requests to {} for some time: {error}; lookups answer from the local store alone",
            self.options.place
        );
        self.changed.notify_all();
        // The minder probes.
        self.work.notify_all();
    }

    /// Tests whether the remote answers again.
    pub(super) fn probe(&self) {
        let no_run = RunName {
            namespace: Fingerprint::from_bytes([0; 16]),
            last: PageKey::from_bytes([0; 32]),
        };
        match self.remote.holds(&no_run, self.deadline()) {
            Ok(_) => self.succeeded(),
            Err(error) => {
                let now = self.now();
                self.desk.lock().failed(&error, now, &self.options);
            }
        }
    }

    /// Notes the names of all runs. Fetches one if the speed is not known.
    pub(super) fn list(&self) {
        let (mut some, mut last, mut is_full) = (Vec::new(), None, false);
        let note = |some: &mut Vec<RunName>| {
            let mut desk = self.desk.lock();
            let noted = some
                .drain(..)
                .all(|name| desk.add_known((name.namespace, name.last.prefix())));
            !noted || desk.is_closed()
        };
        let mut each = |object: crate::remote::Listed| {
            some.push(object.run);
            last = Some(object);
            if some.len() >= LISTED_AT_ONCE {
                is_full = note(&mut some);
            }
            match is_full {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        let until = self.now() + LISTING_TIMEOUT;
        let listed = self.remote.list(None, &mut each, until);
        is_full |= note(&mut some);
        if let Err(error) = listed {
            self.failed(&error);
            return;
        }
        self.succeeded();
        self.count(Count::Listings, 1);
        if is_full && !self.desk.lock().is_closed() {
            tracing::warn!("more than {RUNS_MAX} runs are listed: the others are not known here");
        }
        let is_measured = self.desk.lock().speed.bytes_per_second() > 0;
        let Some(object) = last.filter(|_| !is_measured) else {
            return;
        };
        let (begin, bytes) = (self.now(), usize::try_from(object.bytes));
        let fetched = self
            .remote
            .fetch(&object.run, bytes.unwrap_or(usize::MAX), self.deadline());
        match fetched {
            Ok(Some(fetched)) => {
                let bytes = fetched.len() as u64;
                self.desk
                    .lock()
                    .speed
                    .measure(bytes, self.now().saturating_duration_since(begin));
            }
            Ok(None) => {}
            Err(error) => self.failed(&error),
        }
    }

    /// Searches for the runs of a prefix, and notes those found.
    pub(super) fn search(&self, search: &Search) {
        let deadline = self.deadline();
        let there = gallop(search.0.len(), |at| {
            if !self.may_search() {
                // As if it were absent: the search ends soon.
                return Ok(false);
            }
            self.count(Count::Questions, 1);
            self.remote.holds(&search.0[at], deadline)
        });
        match there {
            Ok(there) => {
                self.succeeded();
                let now = self.now();
                let until = now + self.options.refresh;
                self.desk.lock().searched(search, there, until);
                self.count(Count::RunsSearched, there as u64);
            }
            Err(error) => self.failed(&error),
        }
    }

    /// Takes a question from the budget of requests.
    fn may_search(&self) -> bool {
        let mut desk = self.desk.lock();
        let may = desk.may_ask() && desk.hour.has(1, self.now());
        if may {
            desk.hour.spend(1);
        }
        may
    }

    /// Writes the memory of pages that were put.
    pub(super) fn remember(&self) {
        let Some(memory) = self.memory.get() else {
            return;
        };
        let bytes = {
            let desk = self.desk.lock();
            desk.is_in_use().then(|| encode(desk.chains()))
        };
        bytes.iter().for_each(|bytes| memory.write(bytes));
    }
}
