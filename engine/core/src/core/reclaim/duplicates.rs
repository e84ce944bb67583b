//! Tombstones of a victim that find no room: a tombstone that another segment holds too needs none.
//!
//! Repeated crashes lead there. Reclaim forwards the tombstones of a victim into the last gap, and
//! a crash comes before the victim is released. The next process forwards them again, into the next
//! gap, until no gap is left and no victim can be released. But then the copies are on disk: the
//! descriptors of the other segments are read, one segment after another, until each tombstone has
//! been found, in the same version or a later one.
//!
//! Nor does a tombstone need room that deletes pages of the victim alone: it comes back only with
//! them. It is forwarded where there is room, since a device may lose the free header of the victim
//! after some of its blocks have been written again.
//!
//! A copy counts where recovery would find it: in a sealed segment that no failed write or sync has
//! touched. It also has to be durable: proven by an earlier epoch, or written in this one, and then
//! the victim waits for a sync of everything that has been written so far. A copy of an earlier
//! epoch that is not proven may be in the kernel's cache alone since a sync failed, and no sync of
//! this epoch changes that. The segment with the copy stays, since reclaim empties one segment at a
//! time.

use std::collections::HashMap;

use larder_format::{Body, Fingerprint, PageKey, Record, Serial};

use super::pick::victim_of;
use super::plan::deleted_by;
use crate::core::puts::Below;
use crate::core::types::{Descriptors, Effect};
use crate::index::SegmentId;

/// See the module.
#[derive(Debug)]
pub(super) struct Search {
    victim: SegmentId,
    /// The versions that no segment was found to hold.
    missing: HashMap<(Fingerprint, Option<PageKey>), Serial>,
    /// Segments that have not been looked at.
    rest: Vec<SegmentId>,
    /// The segment whose descriptors are being read.
    asked: Option<SegmentId>,
}

impl Search {
    pub(super) fn begin(below: &Below<'_>, victim: SegmentId, unplaced: &[Record]) -> Search {
        let synced = below.base.marks.synced;
        let oldest = below.segments.oldest_generation_but(Some(victim), synced);
        let is_needed = |record: &&Record| oldest.is_some_and(|oldest| oldest < record.birth());
        let named = |record: &Record| Some((deleted_by(record)?, record.birth()));
        let others = below.segments.iter().map(|(id, _)| id);
        Search {
            victim,
            missing: unplaced
                .iter()
                .filter(is_needed)
                .filter_map(named)
                .collect(),
            rest: others.filter(|id| *id != victim).collect(),
            asked: None,
        }
    }

    /// Asks for the descriptors of the next segment. Returns whether there is one; if not, the
    /// search has ended.
    pub(super) fn go_on(&mut self, below: &mut Below<'_>) -> bool {
        if self.asked.is_none() && !self.missing.is_empty() {
            let holds = |id: &SegmentId| below.segments.get(*id).holds_records();
            self.asked = std::iter::from_fn(|| self.rest.pop()).find(holds);
            if let Some(id) = self.asked {
                let read = Effect::ReadDescriptors(victim_of(below.segments, id));
                below.base.emit(read);
            }
        }
        self.asked.is_some()
    }

    /// Answers the request for descriptors.
    pub(super) fn read(&mut self, below: &mut Below<'_>, read: &Descriptors) {
        let Some(id) = self.asked.take() else {
            return;
        };
        // A sync may have failed since.
        if !below.segments.get(id).holds_records() {
            return;
        }
        let proven = below.segments.get(id).proven();
        for block in &read.blocks {
            let commit = block.header.commit;
            let is_proven = commit <= proven;
            if !is_proven && commit.run() != below.journal.last_commit().run() {
                continue;
            }
            // A failed sync may have lost this block. Its records were then written again.
            let awaited = if is_proven {
                commit
            } else {
                below.journal.last_commit()
            };
            let Body::Records(records) = &block.body else {
                continue;
            };
            for record in records {
                let Some(name) = deleted_by(record) else {
                    continue;
                };
                let is_later = |birth: &Serial| *birth <= record.birth();
                if self.missing.get(&name).is_some_and(is_later) {
                    self.missing.remove(&name);
                    below.segments.forwarded(self.victim, id, awaited);
                }
            }
        }
    }

    pub(super) fn is_reading(&self) -> bool {
        self.asked.is_some()
    }

    pub(super) fn found_all(&self) -> bool {
        self.missing.is_empty()
    }
}
