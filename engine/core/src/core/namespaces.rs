//! The namespaces that this run knows, each under the slot that the index names it by.

use std::collections::HashMap;

use larder_format::{Fingerprint, Namespace, Serial};

use super::types::NamespaceInit;
use crate::index::{NamespaceSlot, Place, SegmentId};

/// Most namespaces of one store: as many as 16 bits of an index entry can name.
pub const NAMESPACES_MAX: usize = u16::MAX as usize;

#[derive(Debug)]
pub(super) struct NamespaceState {
    pub fingerprint: Fingerprint,
    pub record: Option<Namespace>,
    /// Segment that holds the full record.
    pub home: Option<SegmentId>,
    /// A caller has named it in this run.
    pub is_named: bool,
    /// Blocks of each page; zero while that is unknown.
    pub page_blocks: u32,
    /// Pages of an older version have been cleared.
    pub cleared: Serial,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    list: Vec<NamespaceState>,
    slots: HashMap<Fingerprint, NamespaceSlot>,
}

impl Namespaces {
    pub(super) fn new(recovered: Vec<NamespaceInit>) -> Namespaces {
        let mut namespaces = Namespaces::default();
        for init in recovered {
            let slot = namespaces.add(init.fingerprint, init.page_blocks);
            if let Some((record, home)) = init.record {
                let state = namespaces.get_mut(slot);
                state.record = Some(record);
                state.home = Some(home);
            }
        }
        namespaces
    }

    pub(super) fn add(&mut self, fingerprint: Fingerprint, page_blocks: u32) -> NamespaceSlot {
        let slot = u16::try_from(self.list.len()).expect("at most NAMESPACES_MAX namespaces");
        self.list.push(NamespaceState {
            fingerprint,
            record: None,
            home: None,
            is_named: false,
            page_blocks,
            cleared: Serial::ZERO,
        });
        self.slots.insert(fingerprint, NamespaceSlot(slot));
        NamespaceSlot(slot)
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn slot_of(&self, fingerprint: &Fingerprint) -> Option<NamespaceSlot> {
        self.slots.get(fingerprint).copied()
    }

    /// # Panics
    /// For a slot that this run did not give.
    pub(super) fn get(&self, slot: NamespaceSlot) -> &NamespaceState {
        &self.list[usize::from(slot.0)]
    }

    /// # Panics
    /// As [`Namespaces::get`].
    pub(super) fn get_mut(&mut self, slot: NamespaceSlot) -> &mut NamespaceState {
        &mut self.list[usize::from(slot.0)]
    }

    /// The full record of a namespace; `None` also for a slot that this run did not give.
    pub(super) fn record_of(&self, slot: u16) -> Option<&Namespace> {
        self.list.get(usize::from(slot))?.record.as_ref()
    }

    /// Blocks of a plain page.
    pub(super) fn page_blocks(&self, slot: NamespaceSlot) -> u32 {
        self.get(slot).page_blocks
    }

    /// Blocks that a page takes at its place.
    pub(super) fn stored_blocks(&self, slot: NamespaceSlot, place: Place) -> u32 {
        self.page_blocks(slot).saturating_sub(place.saved)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (NamespaceSlot, &NamespaceState)> {
        (0..=u16::MAX).map(NamespaceSlot).zip(&self.list)
    }
}
