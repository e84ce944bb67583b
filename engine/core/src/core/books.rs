//! Calls for callers who keep books of their own: lists of pages, evictions, usage.

use larder_format::{
    Body, DescriptorBlock, Fingerprint, Namespace, PageKey, PageRecord, Record, Serial,
};

use super::Core;
use super::base::Base;
use super::puts::is_live;
use super::segments::Segments;
use super::types::{Move, Victim};
use crate::ages::AgesBySlot;
use crate::core::evicted::Evictions;
use crate::index::{NamespaceSlot, Place, SegmentId};

/// Pages found in a segment.
#[derive(Debug, Default)]
pub struct Found {
    /// Their keys.
    pub keys: Vec<PageKey>,
    /// How many page records have been looked at, if more are left.
    pub next: Option<usize>,
}

/// The pages of one namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceUse {
    /// Its fingerprint.
    pub namespace: Fingerprint,
    /// Stored pages.
    pub pages: u64,
    /// Their blocks, as plain pages.
    pub blocks: u64,
    /// Their blocks, as stored.
    pub stored: u64,
}

/// See the module.
pub struct Books<'a> {
    pub(super) base: &'a mut Base,
    pub(super) segments: &'a Segments,
}

impl Core {
    /// No segment that an open may find has a generation below this.
    #[must_use]
    pub fn generation_floor(&self) -> Serial {
        if self.segments.has_lost_volume() {
            return Serial::ZERO;
        }
        let oldest = self.segments.oldest_generation(self.base.marks.synced);
        oldest.unwrap_or(Serial::MAX)
    }

    /// The ages of the pages that were evicted, at their eviction.
    #[must_use]
    pub fn evicted_ages(&self) -> AgesBySlot {
        self.base.ages.clone()
    }
}

impl Books<'_> {
    /// The first segment from number `from` on that holds pages, and where its descriptors are.
    pub fn segment_with_pages(&self, from: u32) -> Option<Victim> {
        let mut rest = self.segments.iter().skip(from as usize);
        let (id, _) = rest.find(|(_, segment)| segment.live() > 0)?;
        Some(self.descriptors_of(id))
    }

    fn descriptors_of(&self, id: SegmentId) -> Victim {
        let segment = self.segments.get(id);
        Victim {
            segment: id,
            volume: self.segments.volume_of(id),
            number: self.segments.number_of(id),
            sequence: segment.generation(),
            blocks: segment.blocks(),
            is_given_up: false,
        }
    }

    /// At most `room` pages of a namespace that lie in a segment, from its descriptors. Begins
    /// after `seen` page records.
    pub fn pages_in(
        &self,
        namespace: NamespaceSlot,
        victim: &Victim,
        blocks: &[DescriptorBlock],
        seen: usize,
        room: usize,
    ) -> Found {
        let mut found = Found::default();
        let segment = victim.segment;
        if self.segments.get(segment).generation() != victim.sequence {
            // Emptied meanwhile: its pages lie elsewhere.
            return found;
        }
        let fingerprint = self.base.namespaces.get(namespace).fingerprint;
        for (record, at) in page_records(blocks).zip(0..).skip(seen) {
            if found.keys.len() == room {
                found.next = Some(at);
                return found;
            }
            let page = Move {
                namespace,
                record: *record,
                from: Place::of(segment, record),
            };
            if record.namespace == fingerprint && is_live(self.base, &page) {
                found.keys.push(record.key);
            }
        }
        found
    }

    /// Learns from descriptors of a segment when its pages were put.
    pub fn learn_puts(&self, victim: &Victim, blocks: &[DescriptorBlock]) {
        if self.segments.get(victim.segment).generation() != victim.sequence {
            // Emptied meanwhile: its pages lie elsewhere, and their times went with them.
            return;
        }
        let learned = page_records(blocks).filter_map(|record| {
            let slot = self.base.namespaces.slot_of(&record.namespace)?;
            let place = Place::of(victim.segment, record);
            Some((slot, record.key.prefix(), place, record.put_unix_s))
        });
        let learned: Vec<_> = learned.collect();
        self.base.index.learn_puts(&learned);
    }

    /// Begins to record evictions, if that has not begun. Returns where the descriptors are that
    /// name the pages evicted since a number, as far as they are still to be read.
    pub fn unread_evictions(&mut self, since: u64, limit: usize) -> Vec<Victim> {
        self.base.evicted.turn_on();
        let segments = self.base.evicted.unread(since, limit);
        segments
            .into_iter()
            .map(|id| self.descriptors_of(id))
            .collect()
    }

    /// The descriptors of a segment have been read. It may hold more of them by now.
    pub fn evictions_read(&mut self, victim: &Victim, blocks: &[DescriptorBlock]) {
        let segment = self.segments.get(victim.segment);
        let are_all = segment.blocks() == victim.blocks;
        self.base
            .evicted
            .read(victim.segment, victim.sequence, blocks, are_all);
    }

    /// At most `limit` pages evicted since a number.
    pub fn evictions(&self, since: u64, limit: usize) -> Evictions {
        let found = self.base.evicted.since(since, limit);
        let named = |(namespace, key)| (self.base.namespaces.get(namespace).fingerprint, key);
        Evictions {
            next: found.next,
            missed: found.missed,
            pages: found.pages.into_iter().map(named).collect(),
        }
    }

    /// The namespaces with pages.
    pub fn usage(&self) -> Vec<NamespaceUse> {
        let states = self.base.namespaces.iter();
        let usage = states.map(|(slot, state)| {
            let pages = self.base.index.pages_of(slot) as u64;
            let saved = self.base.index.saved_of(slot);
            let blocks = pages * u64::from(state.page_blocks);
            NamespaceUse {
                namespace: state.fingerprint,
                pages,
                blocks,
                stored: blocks.saturating_sub(saved),
            }
        });
        usage.filter(|usage| usage.pages > 0).collect()
    }

    /// The namespaces whose records are known.
    pub fn records(&self) -> Vec<Namespace> {
        let states = self.base.namespaces.iter();
        states
            .filter_map(|(_, state)| state.record.clone())
            .collect()
    }
}

/// The page records of some descriptor blocks, in their order.
pub(super) fn page_records(blocks: &[DescriptorBlock]) -> impl Iterator<Item = &PageRecord> {
    let records = blocks.iter().flat_map(|block| match &block.body {
        Body::Records(records) => records.as_slice(),
        Body::Namespace(_) => &[],
    });
    records.filter_map(|record| match record {
        Record::Page(page) => Some(page),
        Record::Delete { .. }
        | Record::Clear { .. }
        | Record::Evict { .. }
        | Record::Void { .. }
        | Record::Pin { .. } => None,
    })
}
