//! The remote's state: its breaker, its speed, and the names of its runs.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use super::Agent;
use super::counts::Count;
use super::desk::Desk;
use super::memory::{Memory, encode};
use super::names::RUNS_MAX;
use super::search::Search;
use crate::remote::{RemoteError, gallop};
use crate::run::RunName;

/// Longest time of a listing: other regular work waits for its end.
pub(super) const LISTING_MAX: Duration = Duration::from_hours(1);

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
        if !desk.failed(error, self.now()) {
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
        // Not by a listing: another writer of the remote may have made a name that ends each one.
        match self.remote.fetch(&RunName::NONE, 0, self.deadline()) {
            Ok(_) => self.succeeded(),
            Err(error) => {
                let now = self.now();
                self.desk.lock().failed(&error, now);
            }
        }
    }

    /// Notes the names of all runs, and forgets those of runs that are gone.
    pub(super) fn list(&self) {
        self.desk.lock().names.begin_listing();
        let until = self.now() + LISTING_MAX;
        let (mut is_full, mut is_late, mut is_stopped) = (false, false, false);
        let mut each = |object| {
            let mut desk = self.desk.lock();
            // The others that are known are noted all the same.
            is_full |= !desk.list(&object);
            is_late = self.now() >= until;
            is_stopped = is_late || !desk.may_ask();
            match is_stopped {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        let listed = self.remote.list(None, &mut each, self.options.timeout);
        if let Err(error) = listed {
            match error {
                RemoteError::Foreign(_) => tracing::warn!(
                    "the listing of {} ends early: {error}; other runs are found by searches alone",
                    self.options.place
                ),
                _ => self.failed(&error),
            }
            return;
        }
        if is_late {
            tracing::warn!(
                "the listing of {} did not end in an hour: names of runs that are gone stay known; \
                 remove old runs",
                self.options.place
            );
        }
        if is_stopped {
            return;
        }
        self.succeeded();
        self.count(Count::Listings, 1);
        self.desk.lock().names.end_listing();
        if is_full {
            tracing::warn!("more than {RUNS_MAX} runs are listed: the others are not known here");
        }
    }

    /// Fetches a run to measure the speed. No writer of the remote sets the bound of its length.
    pub(super) fn sample(&self) {
        let sample = self.desk.lock().take_sample();
        let Some((run, bytes_max)) = sample else {
            return;
        };
        let begin = self.now();
        match self.remote.fetch(&run, bytes_max, self.deadline()) {
            Ok(Some(object)) => self.measured(object.len() as u64, begin),
            Ok(None) => self.desk.lock().names.forget(&run, false),
            Err(error) => self.failed(&error),
        }
    }

    /// So many bytes arrived since `begin`.
    pub(super) fn measured(&self, bytes: u64, begin: Instant) {
        let now = self.now();
        let took = now.saturating_duration_since(begin);
        self.desk.lock().speed.measure(bytes, took, now);
    }

    /// Searches for the runs of a prefix, and notes those found.
    pub(super) fn search(&self, search: &Search) {
        let deadline = self.deadline();
        let (mut has_asked, mut is_cut_off) = (false, false);
        let there = gallop(search.0.len(), |at| {
            if !self.may_search() {
                // As if it were absent: the search ends soon.
                is_cut_off = true;
                return Ok(false);
            }
            has_asked = true;
            self.count(Count::Questions, 1);
            self.remote.holds(&search.0[at], deadline)
        });
        match there {
            Ok(there) => {
                // A question that was not asked is no answer.
                if has_asked && !is_cut_off {
                    self.succeeded();
                }
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

    /// Recalls the pages that were put to former owners. In the next use of the store the file may
    /// be another one.
    pub(super) fn recall(&self) {
        let current = self.desk.lock().current_use();
        let recalled = self.memory.get().map(Memory::read);
        let mut desk = self.desk.lock();
        if current.is_some() && desk.current_use() == current {
            desk.recall(recalled.unwrap_or_default());
        }
    }

    /// Writes the memory of pages that were put, to this owner and to former ones.
    pub(super) fn remember(&self) {
        self.remember_and(|_| {});
    }

    /// Ends the use of the store, and leaves its memory to the next owner.
    pub(super) fn end_use(&self) {
        let (late, dropped) = self.remember_and(Desk::end_use);
        self.count(Count::RunsLate, late);
        self.count(Count::RunsDroppedQueue, dropped);
    }

    /// Writes the memory, and changes the desk at the moment of its state. The file is not written
    /// after the end of a use: the next owner keeps it.
    fn remember_and<T>(&self, change: impl FnOnce(&mut Desk) -> T) -> T {
        let memory = self.memory.get().filter(|memory| memory.keeps());
        let _turn = memory.map(Memory::turn);
        let mut desk = self.desk.lock();
        let memory = memory.filter(|_| desk.has_recalled());
        let bytes = memory.map(|memory| (memory, encode(&desk.chains)));
        let changed = change(&mut desk);
        drop(desk);
        if let Some((memory, bytes)) = bytes {
            memory.write(&bytes);
        }
        changed
    }
}
