//! Checks between two steps of the world: owners, writes and evictions.

use std::num::NonZeroU16;
use std::rc::Rc;

use larder_core::core::{Core, Counters};
use larder_engine::Part;
use larder_engine::format::{BLOCK_BYTES, SEGMENTS_OFFSET};
use larder_sim_runtime::{Event, Process};
use larder_store::keys::simulated::take_sealed;
use larder_store::share::Inside;

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

    /// No page is stored whose key is erased.
    pub(super) fn look_at_keys(&self) {
        for store in self.running.iter().filter_map(|running| running.local()) {
            store.check_keys();
        }
    }

    /// No client has a key whose erasure was reported as complete.
    pub(super) fn look_at_erased(&self) {
        let erased = std::mem::take(&mut self.shared.borrow_mut().erased);
        if erased.is_empty() {
            return;
        }
        for running in &self.running {
            let lent = running
                .store
                .borrow()
                .as_ref()
                .and_then(|store| store.lent());
            let has = |slot: &NonZeroU16| lent.iter().flatten().any(|lent| lent == slot);
            assert!(
                !erased.iter().any(has),
                "a client has the key of an erased tenant"
            );
        }
    }

    /// No page is encrypted twice with one salt.
    pub(super) fn look_at_sealed(&self) {
        let state = &mut *self.shared.borrow_mut();
        for page in take_sealed() {
            let Some(seal) = page.proof.seal else {
                panic!("a page is encrypted without a seal");
            };
            let salt = (seal.slot, page.namespace, page.key, seal.salt);
            assert!(
                state.plan.seal.is_some() && state.salts.insert(salt),
                "a page is encrypted twice with one salt"
            );
        }
    }

    /// The memory for shared reads of an encrypted store has no page in clear.
    pub(super) fn look_at_shared_memory(&self) {
        if self.shared.borrow().plan.seal.is_none() {
            return;
        }
        for running in &self.running {
            let staged = running.store.borrow().as_ref().map(|store| store.staged());
            self.check_sealed(&staged.unwrap_or_default(), "the memory for shared reads");
        }
    }

    /// The volumes of an encrypted store have no page in clear.
    pub(super) fn look_at_volumes(&self) {
        let (is_sealed, volumes) = {
            let plan = &self.shared.borrow().plan;
            (plan.seal.is_some(), plan.volumes.clone())
        };
        for path in volumes.iter().filter(|_| is_sealed) {
            self.machine.with_medium(path, |medium| {
                let mut block = [0; BLOCK_BYTES];
                for at in 0..medium.blocks() {
                    medium.visible(at).render(&mut block);
                    self.check_sealed(&block, "a volume");
                }
            });
        }
    }

    fn check_sealed(&self, bytes: &[u8], place: &str) {
        let promises = &self.shared.borrow().promises;
        let mut blocks = bytes.as_chunks().0.iter();
        assert!(
            !blocks.any(|block| promises.has_block(block)),
            "{place} of an encrypted store has a page in clear"
        );
    }

    /// A store never has two owners.
    pub(super) fn look_at_owners(&mut self) {
        let is_owner = |running: &&Rc<Running>| running.part() == Some(Part::Owner);
        let owners = self.running.iter().filter(is_owner);
        let owners: Vec<(Process, u64)> = owners
            .map(|running| (running.process, running.turns()))
            .collect();
        assert!(owners.len() <= 1, "the store has two owners: {owners:?}");
        let mut all = self.running.iter().filter(is_owner);
        assert!(
            all.all(|running| running.has_key.get()),
            "a process without the key owns an encrypted store"
        );
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
