//! The part of one client in the staging area.

use std::collections::{BTreeMap, BTreeSet};

use larder_base::ids::NamespaceId;
use larder_format::PageKey;

use crate::staging::{Slot, SlotEnd, Staging, UNIT_BYTES};

/// One client's part of the area.
#[derive(Default)]
pub(super) struct HeldReads {
    pub(super) gone: bool,
    /// Namespaces that the client has registered.
    pub(super) spaces: BTreeSet<u16>,
    /// Slots, by first unit.
    pub(super) slots: BTreeMap<u32, Hold>,
    /// Units of the slots; a slot counts once per hold.
    pub(super) units: u64,
}

/// A client's hold on a slot.
pub(super) struct Hold {
    pub(super) units: u64,
    /// How many of the client's gets copy from it.
    pub(super) copies: u64,
    /// The client reads into it.
    pub(super) fills: bool,
}

impl HeldReads {
    /// Takes a slot for a page, unless this client already holds its share of the area.
    pub(super) fn take(
        &mut self,
        staging: &Staging,
        namespace: NamespaceId,
        key: &PageKey,
        checksum: u64,
        bytes: usize,
    ) -> Option<Slot> {
        let units = bytes.div_ceil(UNIT_BYTES) as u64;
        let all = staging.area.units();
        if self.gone || self.units + units > u64::from(all.end - all.start) / 2 {
            staging.turn_away();
            return None;
        }
        let slot = staging.give(namespace, key, checksum, bytes)?;
        self.units += units;
        let hold = self.slots.entry(slot.id.unit).or_insert(Hold {
            units,
            copies: 0,
            fills: false,
        });
        if slot.fill {
            hold.fills = true;
        } else {
            hold.copies += 1;
        }
        Some(slot)
    }

    /// Ends one hold. False when there is none.
    pub(super) fn let_go(&mut self, end: &SlotEnd) -> bool {
        let Some(hold) = self.slots.get_mut(&end.unit) else {
            return false;
        };
        if end.filled {
            if !std::mem::take(&mut hold.fills) {
                return false;
            }
        } else if hold.copies == 0 {
            return false;
        } else {
            hold.copies -= 1;
        }
        self.units = self.units.saturating_sub(hold.units);
        if hold.copies == 0 && !hold.fills {
            self.slots.remove(&end.unit);
        }
        true
    }
}
