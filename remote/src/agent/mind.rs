//! The remote's state: its breaker, its speed, and the names of its runs.

use std::cell::Cell;
use std::fmt::Display;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_base::runtime::Instant;

use super::Agent;
use super::counts::Count;
use super::desk::{Desk, Mark, Request};
use super::limits::Pauses;
use super::memory::{Memory, pages};
use super::search::Search;
use super::speed::arrived;
use crate::error::RemoteError;
use crate::remote::LISTED_MAX;
use crate::remote::{Listed, Unreadable, gallop};

/// Longest time of a listing: other regular work waits for its end.
pub(super) const LISTING_MAX: Duration = Duration::from_hours(1);

/// How a listing ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    Whole,
    /// Its time or the requests of the hour are used up: a retry after a pause would end as it did.
    Left,
    /// It is tried again after a pause.
    Failed,
}

impl Agent {
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.options.timeout
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
        if !desk.failed(error, Instant::now()) {
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
        match self.look() {
            Some(Ok(())) => self.found_mark(),
            Some(Err(RemoteError::Unmarked(place))) => self.missed_mark(place),
            Some(Err(error)) => {
                let now = Instant::now();
                self.desk.lock().failed(&error, now);
            }
            None => {}
        }
    }

    /// Looks at the remote; `None` if the requests of the hour are used up.
    fn look(&self) -> Option<Result<(), RemoteError>> {
        let may = self.may_request(Request::Read);
        may.then(|| self.remote.look(self.deadline()))
    }

    /// Takes a request from the budget.
    fn may_request(&self, request: Request) -> bool {
        let now = Instant::now();
        self.desk.lock().may_request(1, request, now)
    }

    fn found_mark(&self) {
        self.succeeded();
        self.learn_codec();
        let before = std::mem::replace(&mut self.desk.lock().mark, Mark::Found);
        match before {
            Mark::Found => return,
            Mark::Missing(_) => tracing::info!("{} is a remote", self.options.place),
            Mark::Unknown => {}
        }
        // Runs may wait for it.
        self.work.notify_all();
    }

    /// Reads the setting of the codec. An unknown one stays as it was.
    fn learn_codec(&self) {
        if !self.may_request(Request::Read) {
            return;
        }
        match self.remote.codec(self.deadline()) {
            Ok(codec) => {
                if self.desk.lock().set_codec(codec) {
                    tracing::info!("objects for {} have the codec {codec}", self.options.place);
                }
            }
            Err(error) => {
                if !self.threads.has_no_codec.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "the codec of {} is not known: {error}; objects stay as they were before \
                         (logged once)",
                        self.options.place
                    );
                }
            }
        }
    }

    /// The remote answers, and has no mark.
    pub(super) fn missed_mark(&self, place: String) {
        self.succeeded();
        let reason = RemoteError::Unmarked(place).to_string();
        let mut desk = self.desk.lock();
        let mark = Mark::Missing(reason.clone());
        let before = std::mem::replace(&mut desk.mark, mark);
        // There is no run.
        desk.names.begin_listing();
        desk.names.end_listing();
        drop(desk);
        if !matches!(before, Mark::Missing(_)) {
            tracing::warn!(
                "nothing is published to {}: {reason}; it is looked for after growing pauses",
                self.options.place
            );
        }
    }

    /// A request for one object failed. Returns whether this object alone is at fault, and not the
    /// remote. Counts and notes a fault of the remote.
    pub(super) fn is_of_object(&self, error: &RemoteError) -> bool {
        match error {
            RemoteError::TooLong { .. } => return true,
            RemoteError::Deadline
            | RemoteError::Overloaded(_)
            | RemoteError::Memory(_)
            | RemoteError::NoService(_) => {
                self.failed(error);
                return false;
            }
            _ => {}
        }
        match self.look() {
            Some(Ok(())) => {
                self.succeeded();
                return true;
            }
            Some(Err(RemoteError::Unmarked(place))) => self.missed_mark(place),
            Some(Err(error)) => self.failed(&error),
            None => self.failed(error),
        }
        false
    }

    /// An object cannot be read. Others can.
    pub(super) fn left_out(&self, object: &dyn Display, reason: &dyn Display) {
        self.count(Count::RunsUnreadable, 1);
        if !self.threads.has_left_out.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{object} of {} is left out: {reason}; `larder remote verify` lists all such \
                 objects (logged once)",
                self.options.place
            );
        }
    }

    /// The listing shows an object, or fails to. False if there is no room for its name.
    fn listed(&self, desk: &mut Desk, object: &Result<Listed, Unreadable>) -> bool {
        match object {
            Ok(object) => desk.list(object),
            Err(object) => {
                if let Some(run) = &object.run {
                    desk.fail(run, true, Instant::now());
                }
                self.left_out(&"an object", &object.reason);
                true
            }
        }
    }

    /// Looks for the mark. Notes the names of all runs, and forgets those of runs that are gone.
    /// Returns whether this is all for now: else it is tried again after a pause.
    pub(super) fn list(&self) -> bool {
        let ended = match self.look() {
            Some(Ok(())) => {
                self.found_mark();
                self.list_runs()
            }
            Some(Err(RemoteError::Unmarked(place))) => {
                self.missed_mark(place);
                Ended::Failed
            }
            Some(Err(error)) => {
                self.failed(&error);
                Ended::Failed
            }
            None => Ended::Failed,
        };
        let count = match ended {
            Ended::Whole => Count::Listings,
            Ended::Left | Ended::Failed => Count::ListingsFailed,
        };
        self.count(count, 1);
        ended != Ended::Failed
    }

    fn list_runs(&self) -> Ended {
        self.desk.lock().names.begin_listing();
        let until = Instant::now() + LISTING_MAX;
        let (mut is_full, is_late, is_stopped) = (false, Cell::new(false), Cell::new(false));
        let go_on = |desk: &Desk| {
            is_late.set(Instant::now() >= until);
            is_stopped.set(is_late.get() || !desk.may_ask());
            match is_stopped.get() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        let is_short = Cell::new(false);
        let mut part = || {
            let mut desk = self.desk.lock();
            is_short.set(!desk.may_request(1, Request::Read, Instant::now()));
            match is_short.get() {
                true => ControlFlow::Break(()),
                false => go_on(&desk),
            }
        };
        let mut each = |object| {
            let mut desk = self.desk.lock();
            // The others that are known are noted all the same.
            is_full |= !self.listed(&mut desk, &object);
            go_on(&desk)
        };
        let patience = self.options.timeout;
        let listed = self.remote.list(None, &mut part, &mut each, patience);
        if let Err(error) = listed {
            let is_of_listing = matches!(error, RemoteError::Foreign(_) | RemoteError::Endless(_));
            if !is_of_listing {
                self.failed(&error);
            } else if !self.threads.has_ended_early.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    "the listing of {} ends early: {error}; other runs are found by searches alone \
                     (logged once)",
                    self.options.place
                );
            }
            return Ended::Failed;
        }
        if is_late.get() {
            tracing::warn!(
                "the listing of {} did not end in an hour: names of runs that are gone stay known; \
                 remove old runs",
                self.options.place
            );
        }
        if is_short.get() {
            tracing::warn!(
                "the listing of {} is left: the requests of the hour are used up \
                 (l4_requests_per_hour), so that the runs of other nodes are not known",
                self.options.place
            );
        }
        if is_late.get() || is_short.get() {
            return Ended::Left;
        }
        if is_stopped.get() {
            return Ended::Failed;
        }
        self.succeeded();
        self.desk.lock().names.end_listing();
        if is_full {
            tracing::warn!("more than {LISTED_MAX} runs are listed: the others are not known here");
        }
        Ended::Whole
    }

    /// Fetches a run to measure the speed. No writer of the remote sets the bound of its length.
    pub(super) fn sample(&self) {
        let (run, bytes_max) = {
            let mut desk = self.desk.lock();
            let Some((run, flight)) = desk.take_sample() else {
                return;
            };
            if !desk.may_request(flight.requests as u64, Request::Read, Instant::now()) {
                return;
            }
            (run, usize::try_from(flight.bytes).unwrap_or(usize::MAX))
        };
        let measured = self.desk.lock().speed.begin(Instant::now());
        let fetched = self.remote.fetch(&run, bytes_max, self.deadline());
        let (bytes, now) = (arrived(&fetched), Instant::now());
        self.desk.lock().speed.end(measured, bytes, now);
        match fetched {
            Ok(Some(_)) => {}
            Ok(None) => {
                self.desk.lock().fail(&run, false, Instant::now());
            }
            Err(error) if self.is_of_object(&error) => {
                self.desk.lock().fail(&run, true, Instant::now());
                self.left_out(&run, &error);
            }
            Err(_) => {}
        }
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
            match self.remote.holds(&search.0[at], deadline) {
                // The search ends before this run.
                Err(error) if self.is_of_object(&error) => {
                    self.left_out(&search.0[at], &error);
                    Ok(false)
                }
                holds => holds,
            }
        });
        // A question that was not asked is no answer. A failure has been counted.
        if has_asked && !is_cut_off && there.is_ok() {
            self.succeeded();
        }
        let there = there.unwrap_or(0);
        self.desk.lock().searched(search, there, Instant::now());
        self.count(Count::RunsSearched, there as u64);
    }

    pub(super) fn pauses(&self) -> Pauses {
        Pauses::of(&self.options)
    }

    /// Takes a question from the budget of requests.
    fn may_search(&self) -> bool {
        let mut desk = self.desk.lock();
        desk.may_ask() && desk.may_request(1, Request::Other, Instant::now())
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
        let written = memory.map(|memory| (memory, pages(&desk.chains)));
        let changed = change(&mut desk);
        drop(desk);
        if let Some((memory, pages)) = written {
            memory.write(pages);
        }
        changed
    }
}
