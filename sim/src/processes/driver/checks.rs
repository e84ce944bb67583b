//! Checks between two steps of the world: owners, writes and evictions.

use std::rc::Rc;

use larder_core::core::{Core, Counters};
use larder_engine::Part;
use larder_engine::format::SEGMENTS_OFFSET;
use larder_sim_runtime::{Event, Process};

use super::{Driver, Running};
use crate::classes::Class;

impl Driver {
    /// Two processes never write to the same blocks at once. An owner keeps the segments to which
    /// others may write: by a put in progress, or by a pin.
    pub(super) fn look_at_writes(&self) {
        for owner in &self.running {
            let Some(store) = owner.local() else { continue };
            let is_idle = store.try_core(Core::is_idle) == Some(true);
            let is_written = || self.machine.has_writes(owner.process, SEGMENTS_OFFSET);
            assert!(
                !is_idle || store.pins() != Some(0) || !is_written(),
                "a process writes to a segment that the owner does not keep"
            );
        }
        let collisions = self.machine.count_of(Event::WritesCollide);
        assert!(
            collisions == 0,
            "two processes write to the same blocks at once"
        );
    }

    /// No more pages are missing than were evicted, and none is evicted while all have their room.
    pub(super) fn look_at_evictions(&self) {
        let owner = self.running.iter().find_map(|running| running.counters());
        let state = self.shared.borrow();
        if let (Some(former), Some(present)) = (state.evicted, owner) {
            let (missing, evicted) = (state.promises.missing, former + present.store.evicted);
            assert!(
                evicted == 0 || state.may_have_evicted(),
                "{evicted} pages were evicted from a roomy store"
            );
            assert!(
                missing <= evicted,
                "{missing} pages are missing, and {evicted} were evicted"
            );
        }
    }

    /// Adds the last counters of an owner. `None` if they are not known.
    pub(super) fn note_evictions(&self, counters: Option<Counters>) {
        let state = &mut *self.shared.borrow_mut();
        let evicted = counters.map(|counters| counters.store.evicted);
        state.evicted = state.evicted.zip(evicted).map(|(a, b)| a + b);
        if let Some(counters) = counters {
            state.totals.evicted += counters.store.evicted;
            state.totals.moved += counters.store.moved;
            state.totals.reclaimed += counters.store.reclaimed;
        }
    }

    /// A store never has two owners.
    pub(super) fn look_at_owners(&mut self) {
        let is_owner = |running: &&Rc<Running>| running.part() == Some(Part::Owner);
        let owners = self.running.iter().filter(is_owner);
        let owners: Vec<(Process, u64)> = owners
            .map(|running| (running.process, running.turns()))
            .collect();
        assert!(owners.len() <= 1, "the store has two owners: {owners:?}");
        if let Some((owner, turns)) = owners.first()
            && (self.owner, self.owner_turns) != (Some(*owner), *turns)
        {
            let is_former = |running: &Rc<Running>| self.owner == Some(running.process);
            if self.running.iter().any(is_former) {
                self.count(Class::HandOver);
                self.note_evictions(None);
            } else if self.clients.contains(owner) {
                self.count(Class::Takeover);
                if std::mem::take(&mut self.fell_in_reclaim) {
                    self.count(Class::TakeoverInReclaim);
                }
            }
            (self.owner, self.owner_turns) = (Some(*owner), *turns);
        }
        let is_client = |running: &&Rc<Running>| running.part() == Some(Part::Client);
        for running in self.running.iter().filter(is_client) {
            if !self.clients.contains(&running.process) {
                self.clients.push(running.process);
            }
        }
    }
}
