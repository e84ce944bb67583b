//! Puts: pages on their way, from the reservation that gives a page its extent to its status.
//!
//! | module | decides |
//! |---|---|
//! | `reservations` | which pages are admitted, and where they go |
//! | `publish` | when a page becomes visible |
//! | `forget` | evictions, deletions, and pages that turn out damaged |
//! | `budget` | which new pages are stored under a budget of writes |
//! | `seen` | the pages that puts asked for lately |

mod budget;
mod forget;
mod publish;
mod reservations;
mod seen;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

use larder_format::{BLOCK_BYTES, KeyPrefix, PageKey, PageRecord, Proof, Serial};
use rapidhash::quality::RandomState;
use slotmap::SlotMap;

use super::base::{Base, Event, Ticket};
use super::durability::Durability;
use super::journal::Journal;
use super::segments::Segments;
use super::types::Move;
use crate::grants::ReservationId;
use crate::hint::Hint;
use crate::index::{Index, NamespaceSlot, Parent, Place, SegmentId};
use crate::planted;
use crate::policy::{AdmissionPolicy, Worth};
use crate::status::{PutFailure, PutStatus};
use budget::Budget;
pub(super) use reservations::Reserver;
use reservations::{Reservation, Run};

/// The rooms below.
pub(super) struct Below<'a> {
    pub base: &'a mut Base,
    pub segments: &'a mut Segments,
    pub journal: &'a mut Journal,
    pub durability: &'a mut Durability,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Origin {
    Put,
    /// A copy of this page.
    Copy(Move),
}

/// A page between its reservation and its status.
#[derive(Debug)]
struct Pending {
    reservation: ReservationId,
    index: usize,
    page: NewPage,
    version: Serial,
    place: Place,
    /// Blocks at its place.
    blocks: u32,
    /// When it was put, in seconds since 1970.
    put_unix_s: u32,
    proof: Proof,
    origin: Origin,
    /// Whether its bytes are on the device.
    landed: Option<bool>,
    /// Whether its descriptor is on the device.
    described: Option<bool>,
    /// The commit of its descriptor.
    commit: Option<Serial>,
    /// Another write into its segment failed first.
    spoiled: bool,
    /// Deleted while it was being written.
    deleted: bool,
    /// Puts of the same key that share its outcome.
    followers: Vec<(ReservationId, usize)>,
    /// Its children that became visible before it.
    orphans: Vec<KeyPrefix>,
}

/// The name of a page, and its place in its chain.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewPage {
    pub namespace: NamespaceSlot,
    pub key: PageKey,
    pub parent: Option<KeyPrefix>,
    pub depth: u32,
    /// See [`Place`].
    pub saved: u32,
    pub hint: Hint,
    /// See [`Told`](crate::index::Told).
    pub new_pages: Option<u32>,
}

impl From<&Move> for NewPage {
    fn from(page: &Move) -> NewPage {
        NewPage {
            namespace: page.namespace,
            key: page.record.key,
            parent: page.record.parent,
            depth: page.record.depth,
            saved: page.from.saved,
            // The index keeps it.
            hint: Hint::default(),
            new_pages: None,
        }
    }
}

impl NewPage {
    fn name(&self) -> (NamespaceSlot, KeyPrefix) {
        (self.namespace, self.key.prefix())
    }

    fn parent(&self) -> Parent {
        match self.parent {
            Some(key) => Parent::Key(key),
            None if self.depth == 0 => Parent::Head,
            None => Parent::Unknown,
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Puts {
    pending: SlotMap<Ticket, Pending>,
    /// Puts under way: a second put of a key shares the first one's outcome. A put that a deletion
    /// overtook is not listed: its page will not be there for a later put.
    in_flight: HashMap<(NamespaceSlot, KeyPrefix), Ticket, RandomState>,
    /// Pages under way, counted by their parent.
    awaited: HashMap<(NamespaceSlot, KeyPrefix), u32, RandomState>,
    reservations: BTreeMap<ReservationId, Reservation>,
    next_reservation: u64,
    /// Pages whose bytes and descriptor are on the device, to be published together.
    ready: Vec<Ticket>,
    /// Such pages in segments whose first header is still being written.
    unopened: Vec<Ticket>,
    /// Scale and worth of the page evicted last: the cold end of the cache.
    frontier: Option<(u64, Worth)>,
    /// Decides which new pages are stored; without one, all are.
    admission: Option<Box<dyn AdmissionPolicy>>,
    /// The budget of writes, if there is one.
    budget: Option<Box<Budget>>,
}

impl Puts {
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.reservations.is_empty()
    }

    /// The worth of the page evicted last, if it is of the present scale.
    pub(super) fn frontier(&self, index: &Index) -> Option<Worth> {
        let (scale, worth) = self.frontier?;
        (scale == index.scale()).then_some(worth)
    }

    /// Admits pages by this policy from now on.
    pub(super) fn admit_by(&mut self, policy: Box<dyn AdmissionPolicy>) {
        self.admission = Some(policy);
    }

    /// Writes at most so many bytes a day from now on.
    pub(super) fn limit_writes(&mut self, base: &Base, bytes_a_day: u64) {
        let budget = Budget::new(bytes_a_day, base.now_ms, &base.counters.store.written);
        self.budget = Some(Box::new(budget));
    }

    // ---- pages under way

    /// Takes the proofs of a reservation's pages, by their position in the asks; `None` gives a
    /// page up.
    pub(super) fn commit(
        &mut self,
        below: &mut Below<'_>,
        id: ReservationId,
        proofs: &[Option<Proof>],
    ) {
        let Some(reservation) = self.reservations.get_mut(&id) else {
            return;
        };
        for run in std::mem::take(&mut reservation.runs) {
            let Run {
                segment,
                records,
                blocks,
            } = run;
            below.journal.add_reserved(segment, blocks, records);
        }
        let mut given_up = Vec::new();
        for (index, ticket) in self.granted(id) {
            let Some(page) = self.pending.get_mut(ticket) else {
                continue;
            };
            match proofs.get(index).copied().flatten() {
                Some(proof) if !page.spoiled => {
                    page.proof = proof;
                    let record = page.record(below.base);
                    below.journal.queue_page(page.place.segment, ticket, record);
                }
                _ => {
                    page.described = Some(false);
                    given_up.push(ticket);
                }
            }
        }
        for ticket in given_up {
            self.settle(below, ticket);
        }
    }

    /// States which pages of a reservation have been written, by their position in the asks.
    pub(super) fn landed(
        &mut self,
        below: &mut Below<'_>,
        id: ReservationId,
        pages: &[(usize, bool)],
    ) {
        for &(index, good) in pages {
            let reservation = self.reservations.get(&id);
            let ticket = reservation.and_then(|r| r.tickets.get(index).copied().flatten());
            let Some(page) = ticket.and_then(|ticket| self.pending.get_mut(ticket)) else {
                continue;
            };
            page.landed = Some(good);
            let segment = page.place.segment;
            let written = &mut below.base.counters.store.written;
            let bytes = match page.origin {
                Origin::Copy(_) => &mut written.copies_bytes,
                Origin::Put => &mut written.pages_bytes,
            };
            *bytes += u64::from(page.blocks) * BLOCK_BYTES as u64;
            below.segments.mark_dirty(segment, good);
            if !good {
                below.segments.write_refused(below.base, segment, None);
                let is_first = below.segments.poison(segment);
                self.poisoned(below, segment, is_first);
            }
            if let Some(ticket) = ticket {
                self.settle(below, ticket);
            }
        }
    }

    /// Gives up a granted page of which nothing was written.
    pub(super) fn not_written(&mut self, ticket: Ticket) {
        if let Some(page) = self.pending.get_mut(ticket) {
            page.landed = Some(true);
        }
    }

    /// The origin of a granted page.
    pub(super) fn granted_page(&self, ticket: Ticket) -> Option<Origin> {
        Some(self.pending.get(ticket)?.origin)
    }

    /// The descriptors of these pages are part of this commit.
    pub(super) fn grouped(&mut self, tickets: &[Ticket], commit: Serial) {
        for ticket in tickets {
            if let Some(page) = self.pending.get_mut(*ticket) {
                page.commit = Some(commit);
            }
        }
    }

    /// The descriptors of these pages have been written, or could not be.
    pub(super) fn described(&mut self, below: &mut Below<'_>, tickets: &[Ticket], good: bool) {
        for &ticket in tickets {
            if let Some(page) = self.pending.get_mut(ticket) {
                page.described = Some(good);
                self.settle(below, ticket);
            }
        }
    }

    /// The first header of a segment is written, or its write failed.
    pub(super) fn opened(&mut self, below: &mut Below<'_>, id: SegmentId) {
        for ticket in std::mem::take(&mut self.unopened) {
            if self.pending[ticket].place.segment == id {
                self.settle(below, ticket);
            } else {
                self.unopened.push(ticket);
            }
        }
    }

    /// A write into a segment failed: its pages that are not visible yet fail.
    pub(super) fn poisoned(&mut self, below: &mut Below<'_>, id: SegmentId, is_first: bool) {
        // No page has been placed there since the first failure.
        if is_first {
            let there = |page: &&mut Pending| page.place.segment == id;
            for page in self.pending.values_mut().filter(there) {
                page.spoiled = true;
            }
        }
        below.journal.respool(below.base, below.segments, id);
        below.base.announce(Event::Drain(id));
    }

    /// Settles a page once its bytes and its descriptor are both answered for.
    fn settle(&mut self, below: &mut Below<'_>, ticket: Ticket) {
        // A failed write may have settled it on the way here, with all others in its segment.
        let Some(page) = self.pending.get(ticket) else {
            return;
        };
        let landed = page.landed.or(planted!(EarlyPublish).then_some(true));
        let (Some(landed), Some(described)) = (landed, page.described) else {
            return;
        };
        if !landed || !described || page.spoiled {
            self.settle_failed(below, ticket);
            return;
        }
        // Recovery finds a segment by its first header, or by its first block: neither is certain
        // to be there before the header is.
        let is_opening = below.segments.get(page.place.segment).is_opening();
        if is_opening && !planted!(UnopenedSegment) {
            self.unopened.push(ticket);
        } else {
            self.ready.push(ticket);
        }
    }

    fn settle_failed(&mut self, below: &mut Below<'_>, ticket: Ticket) {
        let page = &self.pending[ticket];
        if page.landed == Some(false)
            && !planted!(UnheldGroup)
            && let Some(commit) = page.commit
        {
            let segment = page.place.segment;
            below.durability.hold(below.segments, segment, commit);
        }
        let page = self.remove_pending(below, ticket);
        let status = match page.origin {
            // The page has left its place meanwhile: there is nothing to copy.
            Origin::Copy(from) if !is_live(below.base, &from) => PutStatus::Duplicate,
            Origin::Copy(_) => PutStatus::Failed(PutFailure::Write),
            Origin::Put => {
                if page.commit.is_some() {
                    let (namespace, key) = page.page.name();
                    self.write_void(below, namespace, key, page.place.segment, page.version);
                }
                PutStatus::Failed(PutFailure::Write)
            }
        };
        self.set_status(below.base, page.reservation, page.index, status);
        for (id, index) in page.followers {
            self.set_status(below.base, id, index, status);
        }
    }

    /// Takes a page off the lists of pages under way.
    fn remove_pending(&mut self, below: &mut Below<'_>, ticket: Ticket) -> Pending {
        let page = self
            .pending
            .remove(ticket)
            .expect("a ticket is settled once");
        let name = page.page.name();
        if self.in_flight.get(&name) == Some(&ticket) {
            self.in_flight.remove(&name);
        }
        if matches!(page.origin, Origin::Put)
            && let Some(parent) = page.page.parent
            && let Entry::Occupied(mut children) = self.awaited.entry((name.0, parent))
        {
            *children.get_mut() -= 1;
            if *children.get() == 0 {
                children.remove();
            }
        }
        if matches!(page.origin, Origin::Put) && !below.base.quotas.is_empty() {
            below.base.index.came(name.0, page.blocks);
        }
        let segment = page.place.segment;
        below.segments.drop_in_flight(segment, page.blocks);
        if let Some(commit) = page.commit {
            below.journal.resolve(commit);
        }
        below.base.announce(Event::Drain(segment));
        below.base.has_room();
        page
    }

    /// The pages that are being put, each with its blocks.
    pub(super) fn coming(&self) -> impl Iterator<Item = (NamespaceSlot, u32)> {
        let put = |page: &&Pending| matches!(page.origin, Origin::Put);
        let put = self.pending.values().filter(put);
        put.map(|page| (page.page.namespace, page.blocks))
    }

    /// # Errors
    /// The first invariant found broken.
    pub(super) fn check(&self, base: &Base) -> Result<(), String> {
        if let Some(budget) = &self.budget {
            budget.check(base.now_ms, base.counters.store.written.pages_bytes)?;
        }
        let put =
            |page: &&Pending| matches!(page.origin, Origin::Put) && page.page.parent.is_some();
        let put = self.pending.values().filter(put).count();
        let awaited: u32 = self.awaited.values().sum();
        if put != awaited as usize {
            return Err(format!(
                "{put} pages with parents under way, {awaited} awaited"
            ));
        }
        Ok(())
    }
}

impl Pending {
    fn record(&self, base: &Base) -> PageRecord {
        PageRecord {
            namespace: base.namespaces.get(self.page.namespace).fingerprint,
            key: self.page.key,
            parent: self.page.parent,
            depth: self.page.depth,
            birth: self.version,
            start: self.place.start,
            blocks: self.blocks + self.place.saved,
            stored: self.blocks,
            put_unix_s: self.put_unix_s,
            checksum: self.proof.checksum,
            seal: self.proof.seal,
        }
    }
}

/// Whether a page lies where it is to be moved from.
pub(super) fn is_live(base: &Base, page: &Move) -> bool {
    let prefix = page.record.key.prefix();
    let found = base
        .index
        .live(page.namespace, prefix, page.from, base.now_ms);
    found.is_some()
}
