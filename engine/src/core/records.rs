//! Records that are no pages: namespaces, and deletions.
//!
//! A deletion is a record with a birth of its own and kills every page of its key (or namespace) born before it, also
//! ones that only a stale copy on disk still knows. So it is written even when the key is not in the index, and reclaim carries it
//! forward for as long as any segment holds a life older than it.

use larder_format::{Fingerprint, Namespace, PageKey, RECORDS_PER_BLOCK, Record, Serial};

use super::log::{Note, NoteBody, Teller};
use super::space::Changed;
use super::{Core, Effect, Fault, NamespaceState, RequestId};
use crate::api::NamespaceId;
use crate::index::{NamespaceSlot, SegmentId};

/// Most namespaces of one store: what 16 bits of an index entry can name.
pub const NAMESPACES_MAX: usize = u16::MAX as usize;

impl Core {
    /// Names a namespace, and writes its full record where the store does not hold it. `None` when the limit is reached.
    pub fn open_namespace(&mut self, namespace: &Namespace) -> Option<NamespaceId> {
        let fingerprint = namespace.fingerprint();
        let blocks = namespace.shape().page_blocks();
        let slot = match self.slots.get(&fingerprint) {
            Some(&slot) => slot,
            None if self.namespaces.len() >= NAMESPACES_MAX => return None,
            None => self.add_namespace(fingerprint, None, None, blocks),
        };
        self.settle_page_size(slot, blocks);
        let state = &mut self.namespaces[slot.0 as usize];
        state.record.get_or_insert_with(|| namespace.clone());
        state.is_named = true;
        if state.home.is_none() && !self.config.read_only {
            self.write_namespace(slot);
        }
        self.pump();
        Some(NamespaceId(slot.0))
    }

    /// Sizes the pages of a namespace. Records of other sizes under its fingerprint, which covers the size, are lies: what
    /// they name is forgotten.
    fn settle_page_size(&mut self, slot: NamespaceSlot, blocks: u32) {
        let state = &mut self.namespaces[slot.0 as usize];
        let claimed = std::mem::replace(&mut state.page_blocks, blocks);
        if claimed == 0 || claimed == blocks {
            return;
        }
        let (space, counters) = (&mut self.space, &mut self.counters);
        self.index.remove_namespace(slot, |page| {
            space.drop_live(page.place.segment, claimed);
            counters.damaged += 1;
        });
    }

    pub(super) fn add_namespace(
        &mut self,
        fingerprint: Fingerprint,
        record: Option<Namespace>,
        home: Option<SegmentId>,
        page_blocks: u32,
    ) -> NamespaceSlot {
        let slot = NamespaceSlot(
            u16::try_from(self.namespaces.len()).expect("at most NAMESPACES_MAX namespaces"),
        );
        self.namespaces.push(NamespaceState {
            fingerprint,
            record,
            home,
            is_named: false,
            page_blocks,
            cleared: Serial::ZERO,
        });
        self.slots.insert(fingerprint, slot);
        slot
    }

    /// Queues the full record of a namespace. Without room it stays unwritten, and is tried again when it is next opened:
    /// pages do not need it.
    pub(super) fn write_namespace(&mut self, slot: NamespaceSlot) {
        if let Some(segment) = self.place_note(1) {
            self.namespaces[slot.0 as usize].home = Some(segment);
            self.log.queue_note(
                segment,
                Note::new(NoteBody::Namespace(slot.0), Teller::Nobody),
                1,
            );
        }
    }

    /// Writes the namespaces down that found no room before.
    pub(super) fn write_homeless(&mut self) {
        for slot in 0..self.namespaces.len() {
            let state = &self.namespaces[slot];
            let is_homeless = state.home.is_none() && state.record.is_some();
            let slot = NamespaceSlot(u16::try_from(slot).unwrap_or(u16::MAX));
            if is_homeless && self.is_wanted(slot) {
                self.write_namespace(slot);
            }
        }
    }

    /// Whether a namespace has pages, or somebody has named it since the store was opened.
    pub(super) fn is_wanted(&self, slot: NamespaceSlot) -> bool {
        self.namespaces[slot.0 as usize].is_named || self.index.pages_of(slot) > 0
    }

    /// The namespaces of the store, as far as their full records are known.
    pub fn namespaces(&self) -> impl Iterator<Item = &Namespace> {
        self.namespaces
            .iter()
            .filter_map(|state| state.record.as_ref())
    }

    /// The namespace of an id; `None` for an id that this core did not give.
    #[must_use]
    pub fn namespace_of(&self, id: NamespaceId) -> Option<&Namespace> {
        self.namespaces.get(id.0 as usize)?.record.as_ref()
    }

    /// Deletes keys: from the index at once, from the disk when `request` is finished. Returns how many were there.
    pub fn delete(
        &mut self,
        request: RequestId,
        namespace: NamespaceSlot,
        keys: &[PageKey],
    ) -> u64 {
        if self.refuses_records(request) {
            return 0;
        }
        let mut found = 0;
        for key in keys {
            if let Some(ticket) = self.in_flight.remove(&(namespace, key.prefix())) {
                self.pending[ticket].deleted = true;
            }
            if let Some(place) = self.index.remove(namespace, key.prefix()) {
                let blocks = self.namespaces[namespace.0 as usize].page_blocks;
                self.space.drop_live(place.segment, blocks);
                found += 1;
            }
        }
        self.counters.deleted += found;
        let fingerprint = self.namespaces[namespace.0 as usize].fingerprint;
        let mut records = Vec::with_capacity(keys.len());
        for key in keys {
            let Some(birth) = self.log.next_serial() else {
                self.effects
                    .push(Effect::Finished(request, Err(Fault::NoRoom)));
                return found;
            };
            records.push(Record::Delete {
                namespace: fingerprint,
                key: *key,
                birth,
            });
        }
        self.write_records(request, &records);
        found
    }

    /// A step ahead of [`Core::clear`], which has less to do then: takes out some pages of a namespace, among the entries of the
    /// index from `from` on, which is zero for the first step. How many they were, and where the next step begins.
    pub fn clear_some(&mut self, namespace: NamespaceSlot, from: u32) -> (u64, Option<u32>) {
        if !self.space.takes_writes() {
            return (0, None);
        }
        let blocks = self.namespaces[namespace.0 as usize].page_blocks;
        let space = &mut self.space;
        let mut found = 0;
        let next = self.index.remove_some_of(namespace, from, |page| {
            space.drop_live(page.place.segment, blocks);
            found += 1;
        });
        self.counters.deleted += found;
        (found, next)
    }

    /// Deletes a whole namespace. Returns how many pages it had.
    pub fn clear(&mut self, request: RequestId, namespace: NamespaceSlot) -> u64 {
        if self.refuses_records(request) {
            return 0;
        }
        let Some(birth) = self.log.next_serial() else {
            self.effects
                .push(Effect::Finished(request, Err(Fault::NoRoom)));
            return 0;
        };
        let state = &mut self.namespaces[namespace.0 as usize];
        // Puts that are under way were born before the clear, and will find themselves cleared when they settle.
        state.cleared = birth;
        self.in_flight.retain(|(other, _), _| *other != namespace);
        let (fingerprint, blocks) = (state.fingerprint, state.page_blocks);
        let space = &mut self.space;
        let mut found = 0;
        self.index.remove_namespace(namespace, |page| {
            space.drop_live(page.place.segment, blocks);
            found += 1;
        });
        self.counters.deleted += found;
        self.write_records(
            request,
            &[Record::Clear {
                namespace: fingerprint,
                birth,
            }],
        );
        found
    }

    /// A record that no volume would take is refused before it has any effect; whether it is.
    fn refuses_records(&mut self, request: RequestId) -> bool {
        let refuses = !self.space.takes_writes();
        if refuses {
            self.effects
                .push(Effect::Finished(request, Err(Fault::ReadOnly)));
        }
        refuses
    }

    fn write_records(&mut self, request: RequestId, records: &[Record]) {
        if records.is_empty() {
            self.effects.push(Effect::Finished(request, Ok(())));
            return;
        }
        self.log.expect_notes(request, records.len());
        for chunk in records.chunks(RECORDS_PER_BLOCK) {
            let Some(segment) = self.place_note(1) else {
                self.log.drop_request(request);
                self.effects
                    .push(Effect::Finished(request, Err(Fault::NoRoom)));
                break;
            };
            let mut credit = 1;
            for record in chunk {
                let note = Note::new(NoteBody::Record(*record), Teller::Request(request));
                self.log.queue_note(segment, note, credit);
                credit = 0;
            }
        }
        self.pump();
    }

    /// Room for descriptor blocks that carry no pages, in an open segment; promises them.
    pub(super) fn place_note(&mut self, blocks: u32) -> Option<SegmentId> {
        let mut changed = Changed::default();
        let log = &mut self.log;
        let placed = self
            .space
            .place_records(blocks, &mut || log.next_serial(), &mut changed)
            .or_else(|| self.space.extend_sealed(blocks));
        self.after_change(changed);
        placed
    }

    /// Queues a note wherever there is room; gives it back when there is none.
    pub(super) fn queue_anywhere(&mut self, note: Note) -> Result<(), Note> {
        let is_record = matches!(note.body, NoteBody::Record(_));
        let spare = self.log.queue_with_spare().filter(|_| is_record);
        let placed = match spare {
            Some(segment) => Some((segment, 0)),
            None => self.place_note(1).map(|segment| (segment, 1)),
        };
        let Some((segment, credits)) = placed else {
            return Err(note);
        };
        if let NoteBody::Namespace(slot) = note.body {
            self.namespaces[slot as usize].home = Some(segment);
        }
        self.log.queue_note(segment, note, credits);
        Ok(())
    }

    /// A note cannot be written where it was to be: it is written elsewhere, or given up where there is no room.
    pub(super) fn replace_note(&mut self, note: Note) {
        if let Err(note) = self.queue_anywhere(note) {
            self.fail_note(&note);
        }
    }

    pub(super) fn fail_note(&mut self, note: &Note) {
        if let NoteBody::Namespace(slot) = note.body {
            self.namespaces[slot as usize].home = None;
        }
        match note.teller {
            Teller::Nobody => {}
            Teller::Request(request) => {
                if self.log.drop_request(request) {
                    self.effects
                        .push(Effect::Finished(request, Err(Fault::Write)));
                }
            }
            Teller::Victim(id) => {
                let segment = self.space.segment_mut(id);
                segment.carrying -= 1;
                segment.stuck = true;
                self.release_when_carried(id);
            }
        }
    }
}
