//! The owner's directory of the staging area: which pages are staged, and where.
//!
//! If several processes want a page, the first of them reads it straight into a slot, and all
//! of them copy it from there, the reader included. When ranks walk the same pages in the same
//! order, the rank that is ahead reads for the rest.
//!
//! Owns: the units of the area, the names of the slots (namespace, key, checksum), and the hold
//! count of each.
//!
//! Invariants:
//! - A slot's units are reused only when the slot has no holder. Holders are the process that reads
//!   into it, each process that copies from it, and a killed process that was reading into it and
//!   may still have reads in flight ([`guard`](super::guard)). Each holds it once.
//! - A name leads to at most one slot, and only for the checksum that the index has for the page at
//!   that moment: a page that was deleted meanwhile, or put again with other bytes, is not found.
//! - The words of the area are read as hints and never trusted.
//!
//! Slots without holders stay until room is needed, and are reused in the order of their last use.
//! A page that finds no room, because all slots are held or it is larger than the area, is read by
//! each process for itself.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use larder_base::ids::NamespaceId;
use larder_base::runtime::Mutex;
use larder_format::PageKey;
use serde::{Deserialize, Serialize};

use super::area::{Area, Look, SlotId, UNIT_BYTES};

/// Generations are 30 bits.
const GENERATION_MASK: u32 = (1 << 30) - 1;

/// The end of a client's use of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotEnd {
    /// The slot's first unit.
    pub unit: u32,
    /// The client was assigned to read into it, and has no more reads into it in flight.
    pub filled: bool,
    /// How the read of the page went.
    pub served: Served,
}

/// Counters of the staging area since the store was opened, and its present content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StagingReport {
    /// Bytes of the area; 0 while there is none.
    pub area_bytes: u64,
    /// Bytes of it that slots take now.
    pub used_bytes: u64,
    /// Pages in the area now.
    pub pages: u64,
    /// Pages that a process was assigned to read into the area.
    #[serde(rename = "pages_filled")]
    pub fills: u64,
    /// Pages found there.
    #[serde(rename = "pages_hit")]
    pub hits: u64,
    /// Pages found there while they were still being read.
    #[serde(rename = "pages_awaited")]
    pub waits: u64,
    /// Waits that timed out: the reading process was too slow.
    #[serde(rename = "late_pages")]
    pub timeouts: u64,
    /// Copies that failed their checksum and were read from the device instead.
    #[serde(rename = "mismatched_pages")]
    pub mismatches: u64,
    /// Pages that found no room in the area.
    #[serde(rename = "crowded_pages")]
    pub crowded: u64,
}

/// The slot given to a process for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// Its place.
    pub id: SlotId,
    /// The receiver must read the page into the slot; else it waits for the page and copies it.
    pub fill: bool,
}

/// How the use of a slot ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Served {
    /// As intended, or not at all for reasons that are visible elsewhere.
    Well,
    /// The page was not there in time.
    Late,
    /// The copy failed its checksum.
    Wrongly,
}

/// The name under which a page is staged.
type Name = (u16, PageKey);

struct Entry {
    units: u32,
    generation: u32,
    holds: u32,
    /// `None` once the slot can no longer be found.
    name: Option<Name>,
    checksum: u64,
    used: u64,
}

/// See the module.
pub(crate) struct Staging {
    pub area: Arc<Area>,
    directory: Mutex<Directory>,
}

#[derive(Default)]
struct Directory {
    names: HashMap<Name, u32>,
    /// By first unit.
    slots: HashMap<u32, Entry>,
    /// Free runs of units: first unit, and length. No two are adjacent.
    free: BTreeMap<u32, u32>,
    /// Slots without holders, by last use.
    idle: BTreeMap<u64, u32>,
    clock: u64,
    generation: u32,
    used_units: u64,
    counters: StagingReport,
}

impl Staging {
    pub(crate) fn new(area: Area) -> Staging {
        let units = area.units();
        let directory = Directory {
            free: BTreeMap::from([(units.start, units.end - units.start)]),
            ..Directory::default()
        };
        Staging {
            area: Arc::new(area),
            directory: Mutex::new(directory),
        }
    }

    /// Returns a page's slot, with one hold: the slot that has the page, or a new one. `None` when
    /// there is no room.
    pub(crate) fn give(
        &self,
        namespace: NamespaceId,
        key: &PageKey,
        checksum: u64,
        bytes: usize,
    ) -> Option<Slot> {
        let mut directory = self.directory.lock();
        let name = (namespace.0, *key);
        if let Some(&unit) = directory.names.get(&name) {
            let id = directory.id(unit);
            let look = self.area.look(id);
            if directory.slots[&unit].checksum == checksum && look != Look::Over {
                directory.counters.hits += u64::from(look == Look::Ready);
                directory.counters.waits += u64::from(look == Look::Filling);
                directory.hold(unit);
                return Some(Slot { id, fill: false });
            }
            directory.forget(unit);
        }
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES).max(1)).ok()?;
        let Some(unit) = directory.make_room(units, &self.area) else {
            directory.counters.crowded += 1;
            return None;
        };
        let id = directory.take(unit, units, name, checksum);
        directory.counters.fills += 1;
        self.area.begin(id);
        Some(Slot { id, fill: true })
    }

    /// Counts a page that was refused room for reasons outside this module.
    pub(crate) fn turn_away(&self) {
        self.directory.lock().counters.crowded += 1;
    }

    /// Releases one hold of a slot.
    pub(crate) fn give_back(&self, unit: u32, filled: bool, served: Served) {
        let mut directory = self.directory.lock();
        if filled {
            // The reader has settled the slot by now. If it has not, it never will.
            self.area.settle(directory.id(unit), false);
        }
        match served {
            Served::Well => {}
            Served::Late => directory.counters.timeouts += 1,
            Served::Wrongly => directory.counters.mismatches += 1,
        }
        if served != Served::Well {
            directory.forget(unit);
        }
        directory.let_go(unit);
    }

    /// The process that reads into a slot has gone: ends all waits for the page. The slot stays
    /// held.
    pub(crate) fn abandon(&self, unit: u32) {
        let mut directory = self.directory.lock();
        self.area.settle(directory.id(unit), false);
        directory.forget(unit);
    }

    pub(crate) fn report(&self) -> StagingReport {
        let directory = self.directory.lock();
        StagingReport {
            area_bytes: self.area.bytes() as u64,
            used_bytes: directory.used_units * UNIT_BYTES as u64,
            pages: directory.slots.len() as u64,
            ..directory.counters
        }
    }
}

impl Directory {
    fn id(&self, unit: u32) -> SlotId {
        let generation = self.slots.get(&unit).map_or(0, |slot| slot.generation);
        SlotId { unit, generation }
    }

    fn take(&mut self, unit: u32, units: u32, name: Name, checksum: u64) -> SlotId {
        self.generation = (self.generation + 1) & GENERATION_MASK;
        let entry = Entry {
            units,
            generation: self.generation,
            holds: 1,
            name: Some(name),
            checksum,
            used: 0,
        };
        self.names.insert(name, unit);
        self.slots.insert(unit, entry);
        self.used_units += u64::from(units);
        self.id(unit)
    }

    fn hold(&mut self, unit: u32) {
        if let Some(slot) = self.slots.get_mut(&unit) {
            if slot.holds == 0 {
                self.idle.remove(&slot.used);
            }
            slot.holds += 1;
        }
    }

    fn let_go(&mut self, unit: u32) {
        self.clock += 1;
        let Some(slot) = self.slots.get_mut(&unit) else {
            return;
        };
        slot.holds = slot.holds.saturating_sub(1);
        if slot.holds > 0 {
            return;
        }
        slot.used = self.clock;
        if slot.name.is_some() {
            self.idle.insert(self.clock, unit);
        } else {
            self.free(unit);
        }
    }

    /// Removes a slot's name.
    fn forget(&mut self, unit: u32) {
        let Some(slot) = self.slots.get_mut(&unit) else {
            return;
        };
        if let Some(name) = slot.name.take() {
            self.names.remove(&name);
        }
        if slot.holds == 0 {
            self.idle.remove(&slot.used);
            self.free(unit);
        }
    }

    fn free(&mut self, unit: u32) {
        let Some(slot) = self.slots.remove(&unit) else {
            return;
        };
        self.used_units -= u64::from(slot.units);
        let (mut first, mut units) = (unit, slot.units);
        if let Some((&before, &run)) = self.free.range(..unit).next_back()
            && before + run == unit
        {
            (first, units) = (before, run + units);
        }
        if let Some(run) = self.free.remove(&(unit + slot.units)) {
            units += run;
        }
        self.free.insert(first, units);
    }

    /// Finds a run of free units, and frees idle slots if necessary. Returns its first unit, no
    /// longer free.
    fn make_room(&mut self, units: u32, area: &Area) -> Option<u32> {
        let all = area.units();
        if units > all.end - all.start {
            return None;
        }
        loop {
            let fit = self.free.iter().find(|(_, run)| **run >= units);
            if let Some((&first, &run)) = fit {
                self.free.remove(&first);
                if run > units {
                    self.free.insert(first + units, run - units);
                }
                return Some(first);
            }
            let (_, &coldest) = self.idle.first_key_value()?;
            self.forget(coldest);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    const SPACE: NamespaceId = NamespaceId(0);

    /// An area with 63 units for slots.
    fn staging() -> Staging {
        Staging::new(Area::create(4 << 20).unwrap())
    }

    fn key(number: u8) -> PageKey {
        PageKey::from_bytes([number; 32])
    }

    fn give(staging: &Staging, number: u8, units: usize) -> Option<Slot> {
        staging.give(SPACE, &key(number), u64::from(number), units * UNIT_BYTES)
    }

    /// Reads a page into its slot, and leaves it there.
    fn stage(staging: &Staging, number: u8, units: usize) {
        let slot = give(staging, number, units).unwrap();
        assert!(slot.fill);
        staging.area.settle(slot.id, true);
        staging.give_back(slot.id.unit, true, Served::Well);
    }

    #[test]
    fn the_first_reads_and_the_others_find_it() {
        let staging = staging();
        let first = give(&staging, 1, 9).unwrap();
        let second = give(&staging, 1, 9).unwrap();
        assert!(first.fill && !second.fill);
        assert_eq!(first.id, second.id);
        staging.area.settle(first.id, true);
        let third = give(&staging, 1, 9).unwrap();
        assert_eq!((third.fill, third.id), (false, first.id));
        let report = staging.report();
        assert_eq!((report.fills, report.waits, report.hits), (1, 1, 1));
        assert_eq!(
            (report.pages, report.used_bytes),
            (1, 9 * UNIT_BYTES as u64)
        );
    }

    #[test]
    fn other_namespaces_and_other_bytes_are_other_pages() {
        let staging = staging();
        stage(&staging, 1, 1);
        let other = staging.give(NamespaceId(1), &key(1), 1, UNIT_BYTES);
        assert!(other.unwrap().fill);
        let again = staging.give(SPACE, &key(1), 99, UNIT_BYTES);
        assert!(
            again.unwrap().fill,
            "the page was put again with other bytes"
        );
    }

    #[test]
    fn the_longest_unused_slot_goes_first_and_a_held_slot_never() {
        let staging = staging();
        for number in 0..7 {
            stage(&staging, number, 9);
        }
        assert!(!give(&staging, 0, 9).unwrap().fill, "held from here on");
        let used = give(&staging, 1, 9).unwrap();
        staging.give_back(used.id.unit, false, Served::Well);
        assert!(give(&staging, 10, 18).unwrap().fill);
        let is_there = |number| {
            let directory = staging.directory.lock();
            directory.names.contains_key(&(SPACE.0, key(number)))
        };
        let there: Vec<u8> = (0..7).filter(|number| is_there(*number)).collect();
        assert_eq!(there, [0, 1, 4, 5, 6]);
        assert_eq!(
            give(&staging, 20, 50),
            None,
            "there is no room beside the held slots"
        );
        assert_eq!(give(&staging, 21, 64), None, "larger than the area");
        assert_eq!(staging.report().crowded, 2);
    }

    #[test]
    fn a_slot_whose_reader_has_gone_is_neither_found_nor_used_again_until_it_is_let_go() {
        let staging = staging();
        let gone = give(&staging, 1, 63).unwrap();
        let waits = give(&staging, 1, 63).unwrap();
        staging.abandon(gone.id.unit);
        assert_eq!(staging.area.look(waits.id), Look::Over);
        assert_eq!(give(&staging, 1, 63), None);
        staging.give_back(waits.id.unit, false, Served::Well);
        assert_eq!(give(&staging, 1, 63), None);
        staging.give_back(gone.id.unit, true, Served::Well);
        assert!(give(&staging, 1, 63).unwrap().fill);
    }

    #[test]
    fn a_late_or_wrong_page_is_read_again_by_the_next_process() {
        for served in [Served::Late, Served::Wrongly] {
            let staging = staging();
            let fill = give(&staging, 1, 1).unwrap();
            let waits = give(&staging, 1, 1).unwrap();
            staging.give_back(waits.id.unit, false, served);
            let next = give(&staging, 1, 1).unwrap();
            assert!(next.fill && next.id.unit != fill.id.unit);
            let report = staging.report();
            assert_eq!(report.timeouts + report.mismatches, 1);
        }
    }

    proptest! {
        #[test]
        fn units_are_given_once_and_all_come_back(
            steps in prop::collection::vec((any::<u8>(), 1_usize..20, any::<bool>()), 1..200),
        ) {
            let staging = staging();
            let mut held: Vec<Slot> = Vec::new();
            for (number, units, gives_back) in steps {
                if gives_back && !held.is_empty() {
                    let slot = held.swap_remove(usize::from(number) % held.len());
                    staging.give_back(slot.id.unit, slot.fill, Served::Well);
                } else {
                    held.extend(give(&staging, number % 8, units));
                }
                let directory = staging.directory.lock();
                let free = directory.free.iter().map(|(a, b)| (*a, *b));
                let mut runs: Vec<(u32, u32)> = free.collect();
                runs.extend(directory.slots.iter().map(|(unit, slot)| (*unit, slot.units)));
                runs.sort_unstable();
                let mut next = staging.area.units().start;
                for (first, units) in runs {
                    prop_assert_eq!(first, next, "no gap, no overlap");
                    next = first + units;
                }
                prop_assert_eq!(next, staging.area.units().end);
                let holds: u32 = directory.slots.values().map(|slot| slot.holds).sum();
                prop_assert_eq!(holds as usize, held.len());
            }
            for slot in held {
                staging.give_back(slot.id.unit, slot.fill, Served::Well);
            }
            prop_assert!(give(&staging, 100, 63).unwrap().fill);
        }
    }
}
