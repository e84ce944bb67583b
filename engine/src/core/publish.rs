//! Pages whose bytes and descriptor are both on the device become visible, and their callers are told.

use larder_format::Serial;

use super::{Core, Origin, SyncPolicy, Ticket, Waiter};
use crate::api::PutStatus;
use crate::index::{Adoption, Parent, Place, Publish, Published, SegmentId};
use crate::planted;

/// Most steps along chains for the links between pages of which the child was there first, at one go: what takes more is left to
/// lookups.
const ADOPTION_STEPS_MAX: usize = 1 << 14;

impl Core {
    /// Makes every ready page visible, in one pass over the index.
    pub(super) fn publish_ready(&mut self) {
        if self.log.ready.is_empty() {
            return;
        }
        let mut ready = std::mem::take(&mut self.log.ready);
        let mut batch = Vec::with_capacity(ready.len());
        let mut published = Vec::with_capacity(ready.len());
        for ticket in ready.drain(..) {
            let page = &self.pending[ticket];
            let cleared = page.birth < self.namespaces[page.namespace.0 as usize].cleared;
            match page.origin {
                Origin::Put if (page.deleted || cleared) && !planted!(UndeadPut) => {
                    self.settle_stored(ticket, None);
                }
                Origin::Put => {
                    batch.push(Publish {
                        namespace: page.namespace,
                        key: page.key.prefix(),
                        parent: page.parent(),
                        place: page.place,
                        checksum: page.checksum,
                        unproven: false,
                    });
                    published.push(ticket);
                }
                Origin::Copy(page) => self.settle_copy(ticket, page.from),
            }
        }
        let outcomes = self.index.publish(&batch);
        let mut adoptions = Vec::new();
        for (ticket, page) in published.iter().zip(&batch) {
            let orphans = std::mem::take(&mut self.pending[*ticket].orphans);
            adoptions.extend(orphans.into_iter().map(|child| Adoption {
                namespace: page.namespace,
                child,
                parent: page.key,
            }));
        }
        for (ticket, outcome) in published.into_iter().zip(outcomes) {
            self.settle_stored(ticket, Some(outcome));
        }
        self.index
            .adopt_within(&adoptions, &mut { ADOPTION_STEPS_MAX });
        self.await_parents(&batch);
        // Its memory is used again.
        if self.log.ready.is_empty() {
            self.log.ready = ready;
        }
    }

    /// Pages of one chain land in any order, and eviction must take none before its descendants: where a parent is on its way, it is told
    /// of its children.
    fn await_parents(&mut self, batch: &[Publish]) {
        for page in batch {
            if let Parent::Key(parent) = page.parent
                && let Some(&ticket) = self.in_flight.get(&(page.namespace, parent))
            {
                self.pending[ticket].orphans.push(page.key);
            }
        }
    }

    /// A put page is on the device; `outcome` is what the index made of it, `None` when a deletion came first.
    fn settle_stored(&mut self, ticket: Ticket, outcome: Option<Published>) {
        let page = self.remove_pending(ticket);
        self.counters.pages_put += 1;
        self.counters.blocks_put += u64::from(page.blocks);
        let commit = page.commit.unwrap_or(Serial::ZERO);
        match outcome {
            Some(_) => self.space.add_live(page.place.segment, page.blocks),
            None => self.counters.deleted += 1,
        }
        if let Some(Published::Replaced(old)) = outcome {
            self.space.drop_live(old.segment, page.blocks);
            self.carried_out(old.segment, page.place.segment, commit);
            self.counters.replaced += 1;
        }
        let first = (page.reservation, page.index, PutStatus::Stored);
        let followers = page.followers.into_iter();
        let followers = followers.map(|(id, index)| (id, index, PutStatus::Duplicate));
        for (id, index, status) in std::iter::once(first).chain(followers) {
            if status == PutStatus::Duplicate {
                self.counters.duplicates += 1;
            }
            if self.config.sync == SyncPolicy::Always {
                self.wait_for_sync(commit, Waiter::Page(id, index, status));
            } else {
                self.set_status(id, index, status);
            }
        }
        self.note_unsynced();
    }

    fn settle_copy(&mut self, ticket: Ticket, from: Place) {
        let page = self.remove_pending(ticket);
        if self
            .index
            .relocate(page.namespace, page.key.prefix(), from, page.place)
        {
            self.space.drop_live(from.segment, page.blocks);
            self.space.add_live(page.place.segment, page.blocks);
            // Its bytes were verified on the way.
            self.index
                .prove(page.namespace, page.key.prefix(), page.place);
            let commit = page.commit.unwrap_or(Serial::ZERO);
            self.carried_out(from.segment, page.place.segment, commit);
            self.counters.moved += 1;
        } else if self.index.locate(page.namespace, &page.key).is_none() {
            // The page left while it was being copied, and the copy must not come back either. Where a newer put took its
            // place it is not killed: a crash may leave that one unfinished.
            let birth = Serial::from_raw(page.birth.get().saturating_add(1));
            self.log_eviction_born(page.namespace, page.key.prefix(), page.place.segment, birth);
        }
        self.set_status(page.reservation, page.index, PutStatus::Stored);
    }

    /// The newer version of something in `segment` went out with `commit`: the segment stays until that is synced.
    pub(super) fn carried_out(&mut self, segment: SegmentId, to: SegmentId, commit: Serial) {
        let to_suspect = self.space.segment(to).suspect;
        let segment = self.space.segment_mut(segment);
        segment.carried = segment.carried.max(commit);
        segment.carried_to_suspect |= to_suspect;
    }
}
