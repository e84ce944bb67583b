//! Pins: callers pin pages and take pins back.
//!
//! Three rules are checked. A pinned page is not evicted for room (`policies`). An opening keeps
//! each page whose pin was confirmed. It keeps no page whose present version was never pinned.

use larder_core::core::Kept;
use larder_core::index::Index;
use larder_engine::format::PageKey;
use larder_engine::{NamespaceId, PageStore, StoreError};
use larder_store::inventory::Inventory;

use super::calls::Caller;
use super::state::{Call, Phase, State};
use crate::classes::Class;
use crate::world::Epoch;

/// Most pages of one call.
const PINS_MAX: usize = 8;

/// Ends of pins: beyond the time of a run, or in the past.
const LATE_S: u32 = u32::MAX;
const PASSED_S: u32 = 1;

impl State {
    /// An opening has found these pages.
    pub fn check_pins(&mut self, epoch: &Epoch, index: &Index) {
        let faults = &self.world.setup.faults;
        let lost = self.world.superblocks.iter().any(Option::is_none);
        let is_exact = !lost && !faults.spoils() && !faults.misleads() && !faults.fail_writes();
        let namespaces = self.world.namespaces_by_slot(epoch);
        let pages = self.world.snapshot(index, &namespaces);
        let mut kept = Vec::new();
        for (name, (version, ..)) in pages {
            let known = self.world.oracle.name(name);
            let Some(slot) = epoch.slots[known.namespace] else {
                continue;
            };
            if index
                .locate(slot, &known.key)
                .is_some_and(|found| found.unproven)
            {
                self.leases.note_unproven(NamespaceId(slot.0), &known.key);
            }
            let is_sure = self.pins.sure.get(&name) == Some(&version);
            let is_kept = index.kept(slot, known.key.prefix()).is_some();
            if is_kept && self.pins.asked.contains(&name) {
                self.pins.maybe.insert((name, version));
            }
            match is_kept {
                true => assert!(
                    self.pins.may_be(name, version),
                    "{version:?} of {name:?} is pinned, and nobody pinned it"
                ),
                false => assert!(
                    !is_sure || !is_exact,
                    "{version:?} of {name:?} is pinned no more after an opening"
                ),
            }
            if is_sure && is_kept && !self.lives.on {
                kept.push((NamespaceId(slot.0), known.key));
            }
        }
        self.pins.asked.clear();
        for (namespace, key) in kept {
            self.leases.pin(namespace, &[key]);
        }
    }
}

impl Caller<'_> {
    /// Pins pages, or takes pins back.
    pub fn pin(&self) {
        let Some(pages) = self.draw(Call::Other, PINS_MAX) else {
            return;
        };
        let id = self.id(&pages);
        let until_unix_s = {
            let mut state = self.shared.lock();
            if std::mem::replace(&mut state.pins.is_busy, true) {
                return;
            }
            for (name, there) in pages.names.iter().zip(&pages.before) {
                state.pins.asked.insert(*name);
                state.pins.sure.remove(name);
                if let Some((version, _)) = there {
                    state.pins.maybe.insert((*name, *version));
                }
            }
            state.leases.unpin(id, &pages.keys);
            state.world.dice.pick(&[LATE_S, LATE_S, PASSED_S, 0])
        };
        let departed = self.shared.lock().leases.departed();
        let outcomes = self.store.keep(id, &pages.keys, until_unix_s);
        // A power loss may undo what no sync covers.
        let is_synced = self.store.flush().is_ok();
        let mut state = self.shared.lock();
        state.pins.is_busy = false;
        for name in &pages.names {
            state.pins.asked.remove(name);
        }
        let now = state.there(&pages.names);
        let outcomes = match outcomes {
            Ok(outcomes) => outcomes,
            Err(error) => {
                let faults = &state.world.setup.faults;
                let may = faults.fail_writes() || faults.spoils() || faults.sync_error > 0.0;
                let is_open = state.phase == Phase::Open;
                let is_room = matches!(error, StoreError::NoRoom);
                assert!(
                    may || is_room || !is_open,
                    "pins fail without a fault: {error}"
                );
                return;
            }
        };
        state.world.note(until_unix_s.into(), || {
            format!(
                "pins of {:?} until {until_unix_s} end: {outcomes:?}",
                pages.names
            )
        });
        let is_still = is_synced && departed == state.leases.departed();
        let mut pinned: Vec<PageKey> = Vec::new();
        for (at, outcome) in outcomes.iter().enumerate() {
            let name = pages.names[at];
            if let Some((version, _)) = now[at] {
                state.pins.maybe.insert((name, version));
            }
            let Some((version, _)) = now[at].filter(|now| {
                let before = pages.before[at].map(|(version, _)| version);
                before == Some(now.0)
            }) else {
                continue;
            };
            match (*outcome, until_unix_s) {
                (Kept::Yes, LATE_S) if is_still => {
                    state.pins.sure.insert(name, version);
                    pinned.push(pages.keys[at]);
                }
                (Kept::Yes, 0) if is_still => {
                    state.pins.maybe.remove(&(name, version));
                }
                (Kept::Absent, LATE_S | PASSED_S) => assert!(
                    state.phase != Phase::Open,
                    "{name:?} is stored, and a pin finds it absent"
                ),
                _ => {}
            }
        }
        state
            .world
            .tally
            .count_many(Class::Pinned, pinned.len() as u64);
        // A later put takes the place of a page that is too old, and of its pin.
        if !state.lives.on {
            state.leases.pin(id, &pinned);
        }
    }
}
