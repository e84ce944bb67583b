//! Publishing: pages whose bytes and descriptor are on the device become visible.

use larder_format::Serial;

use super::{Below, Origin, Puts};
use crate::core::base::Ticket;
use crate::core::types::{Move, SyncPolicy};
use crate::index::{Adoption, Parent, Publish, Published, Told};
use crate::planted;
use crate::status::PutStatus;

/// Most steps along chains, in one call, for links between a page and a child that was there first.
/// Longer searches are left to lookups.
const ADOPTION_STEPS_MAX: usize = 1 << 14;

impl Puts {
    /// Makes every ready page visible, in one pass over the index.
    pub(in crate::core) fn publish_ready(&mut self, below: &mut Below<'_>) {
        if self.ready.is_empty() {
            return;
        }
        let mut ready = std::mem::take(&mut self.ready);
        let mut batch = Vec::with_capacity(ready.len());
        let mut published = Vec::with_capacity(ready.len());
        for ticket in ready.drain(..) {
            let page = &self.pending[ticket];
            let (namespace, key) = page.page.name();
            let cleared = page.version < below.base.namespaces.get(namespace).cleared;
            match page.origin {
                Origin::Put if (page.deleted || cleared) && !planted!(UndeadPut) => {
                    self.settle_stored(below, ticket, None);
                }
                Origin::Put => {
                    batch.push(Publish {
                        namespace,
                        key,
                        parent: page.page.parent(),
                        place: page.place,
                        proof: page.proof,
                        unproven: false,
                        told: Told {
                            depth: page.page.depth,
                            blocks: page.blocks,
                            hint: page.page.hint,
                            new_pages: page.page.new_pages,
                        },
                    });
                    published.push(ticket);
                }
                Origin::Copy(page) => self.settle_copy(below, ticket, &page),
            }
        }
        let outcomes = below.base.index.publish(&batch);
        if below.base.index.keeps_times() {
            for (ticket, page) in published.iter().zip(&batch) {
                let put_unix_s = self.pending[*ticket].put_unix_s;
                below
                    .base
                    .index
                    .note_put(page.namespace, page.key, put_unix_s);
            }
        }
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
            self.settle_stored(below, ticket, Some(outcome));
        }
        below
            .base
            .index
            .adopt_within(&adoptions, &mut { ADOPTION_STEPS_MAX });
        self.await_parents(&batch);
        // Its memory is used again.
        if self.ready.is_empty() {
            self.ready = ready;
        }
    }

    /// Pages of one chain land in any order, and eviction must take none before its descendants: a
    /// parent that is still on its way collects its children.
    fn await_parents(&mut self, batch: &[Publish]) {
        for page in batch {
            if let Parent::Key(parent) = page.parent
                && let Some(&ticket) = self.in_flight.get(&(page.namespace, parent))
            {
                self.pending[ticket].orphans.push(page.key);
            }
        }
    }

    /// A put page is on the device. `outcome` is the index's answer, `None` when a deletion came
    /// first.
    fn settle_stored(&mut self, below: &mut Below<'_>, ticket: Ticket, outcome: Option<Published>) {
        let page = self.remove_pending(below, ticket);
        let counters = &mut below.base.counters;
        counters.pages_put += 1;
        counters.blocks_put += u64::from(page.blocks);
        let commit = page.commit.unwrap_or(Serial::ZERO);
        let segment = page.place.segment;
        match outcome {
            Some(_) => below.segments.add_live(segment, page.blocks),
            None => counters.store.deleted += 1,
        }
        if let Some(Published::Replaced(old)) = outcome {
            let namespaces = &below.base.namespaces;
            let blocks = namespaces.stored_blocks(page.page.namespace, old);
            below.segments.drop_live(old.segment, blocks);
            below.segments.forwarded(old.segment, segment, commit);
            below.base.counters.replaced += 1;
            // The pin was of the page before.
            let (namespace, key) = (page.page.namespace, page.page.key.prefix());
            below.base.index.let_go(namespace, key);
        }
        let first = (page.reservation, page.index, PutStatus::Stored);
        let followers = page.followers.into_iter();
        let followers = followers.map(|(id, index)| (id, index, PutStatus::Duplicate));
        for (id, index, status) in std::iter::once(first).chain(followers) {
            if status == PutStatus::Duplicate {
                below.base.counters.duplicates += 1;
            }
            if below.base.config.sync == SyncPolicy::Always {
                below.durability.wait_for_page(commit, id, index, status);
            } else {
                self.set_status(below.base, id, index, status);
            }
        }
        below.durability.note_unsynced(below.base);
    }

    fn settle_copy(&mut self, below: &mut Below<'_>, ticket: Ticket, from: &Move) {
        let page = self.remove_pending(below, ticket);
        let (namespace, key) = page.page.name();
        let (index, from) = (&below.base.index, from.from);
        if index.relocate(namespace, key, from, page.place) {
            if index.keeps_times() {
                let put_unix_s = match planted!(RenewedAge) {
                    true => u32::try_from(below.base.unix_ms() / 1000).unwrap_or(u32::MAX),
                    false => page.put_unix_s,
                };
                index.note_put(namespace, key, put_unix_s);
            }
            // Its bytes were verified on the way.
            index.prove(namespace, key, page.place);
            let to = page.place.segment;
            below.segments.drop_live(from.segment, page.blocks);
            below.segments.add_live(to, page.blocks);
            let commit = page.commit.unwrap_or(Serial::ZERO);
            below.segments.forwarded(from.segment, to, commit);
            below.base.counters.store.moved += 1;
        } else if index.locate_any(namespace, &page.page.key).is_none() {
            // The page left while it was being copied, and the copy must not come back either. A
            // newer put in its place is not killed: a crash may leave that put unfinished.
            let version = Serial::from_raw(page.version.get().saturating_add(1));
            self.write_eviction(below, namespace, key, page.place.segment, version);
        }
        self.set_status(below.base, page.reservation, page.index, PutStatus::Stored);
    }
}
