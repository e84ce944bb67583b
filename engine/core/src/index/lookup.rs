//! The calls of callers' threads: look up, lease, pin, touch. They hold only the read lock, for at
//! most [`HOLD_KEYS`] keys at a time, so that no writer waits for a long list and no list waits
//! long for a writer.
//!
//! Ten million pages are far more than the caches hold, so a lookup costs a few cache misses a key
//! and nothing else. They are made to overlap: the keys of a hold are taken together through each
//! step, so that no key waits for another key's miss.

use std::sync::atomic::Ordering;

use larder_base::ahead::fetch;
use larder_base::runtime::RwLockReadGuard;
use larder_format::{KeyPrefix, PageKey};

use super::slab::{LIVE, Mark, ORPHAN, PageId, UNPROVEN};
use super::state::State;
use super::table::Guess;
use super::types::{Adoption, Heat, Lease, Located, NamespaceSlot, ReadAs, SegmentId, Used};
use super::{Index, Stamp};
use crate::hint::Hint;
use crate::policy::Use;

/// Most keys looked up in one hold of the lock: about 15 us.
const HOLD_KEYS: usize = 256;

/// On a segment's count of pins: the core waits for the count to fall to zero.
const AWAITED: u32 = 1 << 31;

impl Index {
    /// The number of `keys`, a chain from its head, that are stored without a gap from the first.
    ///
    /// Leases and heats the confirmed pages. Pairs whose link the index lacks are appended to
    /// `orphans`, for the core to `adopt`.
    pub fn longest_prefix(
        &self,
        namespace: NamespaceSlot,
        keys: &[PageKey],
        lease: Lease,
        orphans: &mut Vec<Adoption>,
    ) -> usize {
        let mut found = 0;
        self.confirm(namespace, keys, lease, orphans, |ids| {
            let run = ids
                .iter()
                .position(|id| *id == PageId::NONE)
                .unwrap_or(ids.len());
            ids[run..].fill(PageId::NONE);
            found += run;
            run == ids.len()
        });
        found
    }

    /// For each of `keys`, in the order of their chain (gaps allowed), whether it is stored.
    ///
    /// Leases and heats the confirmed pages, and reports `orphans`, as `longest_prefix` does.
    pub fn contains(
        &self,
        namespace: NamespaceSlot,
        keys: &[PageKey],
        lease: Lease,
        orphans: &mut Vec<Adoption>,
    ) -> Vec<bool> {
        let mut stored = Vec::with_capacity(keys.len());
        self.confirm(namespace, keys, lease, orphans, |ids| {
            stored.extend(ids.iter().map(|id| *id != PageId::NONE));
            true
        });
        stored
    }

    /// For each of `keys` whether it is stored. Changes no lease and no heat.
    pub fn peek(&self, namespace: NamespaceSlot, keys: &[PageKey]) -> Vec<bool> {
        let mut stored = Vec::with_capacity(keys.len());
        let mut ids = [PageId::NONE; HOLD_KEYS];
        for keys in keys.chunks(HOLD_KEYS) {
            let ids = &mut ids[..keys.len()];
            self.find_all(&self.state.read(), namespace, keys, ids);
            stored.extend(ids.iter().map(|id| *id != PageId::NONE));
        }
        stored
    }

    /// Locates pages for reading, and takes one pin of the segment for each page found. Until
    /// [`Index::unpin`] returns the pin, the bytes at that place do not change. A use also heats
    /// the pages and ends their leases.
    pub fn pin(
        &self,
        namespace: NamespaceSlot,
        keys: &[PageKey],
        read_as: ReadAs,
    ) -> Vec<Option<Located>> {
        let mut located = Vec::with_capacity(keys.len());
        let mut pin_all = |state: &State, ids: &[PageId]| {
            // Neighbours in a chain are neighbours on disk: one addition pins the whole run.
            let mut run: Option<(SegmentId, u32)> = None;
            for id in ids {
                let found = locate(state, *id);
                located.push(found);
                let Some(segment) = found.map(|found| found.place.segment) else {
                    continue;
                };
                run = match run {
                    Some((same, pages)) if same == segment => Some((same, pages + 1)),
                    other => {
                        self.add_pins(other);
                        Some((segment, 1))
                    }
                };
            }
            self.add_pins(run);
        };
        match read_as {
            ReadAs::Use => {
                let used = Used {
                    by: Use::Read,
                    hint: None,
                    new_pages: None,
                    now_ms: None,
                };
                self.heat_all(namespace, keys, used, pin_all);
            }
            ReadAs::Check => {
                let mut ids = [PageId::NONE; HOLD_KEYS];
                for keys in keys.chunks(HOLD_KEYS) {
                    let ids = &mut ids[..keys.len()];
                    let state = self.state.read();
                    self.find_all(&state, namespace, keys, ids);
                    pin_all(&state, ids);
                }
            }
        }
        located
    }

    fn add_pins(&self, run: Option<(SegmentId, u32)>) {
        if let Some((segment, pages)) = run {
            // Relaxed: the lock under which the entry still points there orders this before any
            // later move.
            self.pins[segment.0 as usize].fetch_add(pages, Ordering::Relaxed);
        }
    }

    /// Takes a pin for each of these segments, into which pages are being written: the core waits
    /// until all such pins are returned.
    pub fn keep(&self, segments: &[SegmentId]) {
        for segment in segments {
            self.add_pins(Some((*segment, 1)));
        }
    }

    /// Returns one pin; true when it was the last of a segment that the core waits for.
    ///
    /// # Panics
    ///
    /// When the segment is not pinned: a pin returned twice would free bytes under another reader.
    pub fn unpin(&self, segment: SegmentId) -> bool {
        // Release: the reader's use of the bytes comes before any action of the core on seeing 0.
        let before = self.pins[segment.0 as usize].fetch_sub(1, Ordering::Release);
        assert!(
            before & !AWAITED > 0,
            "segment {} is unpinned more often than pinned",
            segment.0
        );
        before == AWAITED | 1
    }

    /// Whether no reader is left in a segment that no entry points to. If not, the last `unpin`
    /// returns true.
    pub fn await_readers(&self, segment: SegmentId) -> bool {
        let pins = &self.pins[segment.0 as usize];
        let left = pins.fetch_or(AWAITED, Ordering::AcqRel) & !AWAITED == 0;
        if left {
            // No thread can pin it any more, so the flag is not needed any more.
            pins.store(0, Ordering::Release);
        }
        left
    }

    /// Pins on a segment now. Once no entry points there, and no page is being written there, the
    /// number can only fall.
    pub fn pins(&self, segment: SegmentId) -> u32 {
        self.pins[segment.0 as usize].load(Ordering::Acquire) & !AWAITED
    }

    /// Heats the stored ones of `keys`, all alike, and ends their leases.
    pub fn touch(&self, namespace: NamespaceSlot, keys: &[PageKey]) {
        let used = Used {
            by: Use::Touch,
            hint: None,
            new_pages: None,
            now_ms: None,
        };
        self.heat_all(namespace, keys, used, |_, _| ());
    }

    /// Whether pages are evicted in the order of a policy, and not the least recently used first.
    pub fn has_policy(&self) -> bool {
        self.state.read().chosen().is_some()
    }

    /// As [`Index::touch`], at `now_ms`. The pages have this hint from now on, unless it is empty.
    /// Returns the number of keys that are not stored, if a policy is chosen.
    pub fn touch_as(
        &self,
        namespace: NamespaceSlot,
        keys: &[PageKey],
        hint: Hint,
        now_ms: u64,
    ) -> Option<u32> {
        let has_policy = self.has_policy();
        let new_pages = has_policy.then(|| {
            let stored = self.peek(namespace, keys);
            stored.iter().filter(|is_stored| !**is_stored).count() as u32
        });
        let used = Used {
            by: Use::Touch,
            hint: Some(hint).filter(|hint| *hint != Hint::default()),
            new_pages,
            now_ms: Some(now_ms),
        };
        self.heat_all(namespace, keys, used, |_, _| ());
        new_pages
    }

    /// The place of a page. Changes no pin, no heat and no lease.
    pub fn locate(&self, namespace: NamespaceSlot, key: &PageKey) -> Option<Located> {
        let state = self.state.read();
        let id = state.find(namespace, key.prefix());
        locate(&state, id.filter(|_| !self.is_old(&state, namespace, id))?)
    }

    /// The same, however old the page is.
    pub fn locate_any(&self, namespace: NamespaceSlot, key: &PageKey) -> Option<Located> {
        let state = self.state.read();
        locate(&state, state.find(namespace, key.prefix())?)
    }

    /// Whether a page is stored. Changes nothing.
    pub fn has(&self, namespace: NamespaceSlot, key: KeyPrefix) -> bool {
        let state = self.state.read();
        let id = state.find(namespace, key);
        id.is_some() && !self.is_old(&state, namespace, id)
    }

    /// The slot of each key, `PageId::NONE` for a key that is not stored.
    fn find_all(
        &self,
        state: &State,
        namespace: NamespaceSlot,
        keys: &[PageKey],
        ids: &mut [PageId],
    ) {
        find_all(state, namespace, keys, ids);
        if let Some(lifetimes) = state.lifetimes() {
            lifetimes.hide(namespace, ids, self.age_ms.load(Ordering::Relaxed));
        }
    }

    /// Finds `keys` hold by hold. Leases and heats the slots that `take` leaves in its list, until
    /// `take` returns that it is enough.
    fn confirm(
        &self,
        namespace: NamespaceSlot,
        keys: &[PageKey],
        lease: Lease,
        orphans: &mut Vec<Adoption>,
        mut take: impl FnMut(&mut [PageId]) -> bool,
    ) {
        let mut stamp = None;
        let mut ids = [PageId::NONE; HOLD_KEYS];
        let mut before_is_stored = false;
        for (hold, some) in keys.chunks(HOLD_KEYS).enumerate() {
            let ids = &mut ids[..some.len()];
            let (state, heat) = self.read_stamped(&mut stamp, Some(lease));
            self.find_all(&state, namespace, some, ids);
            let goes_on = take(ids);
            for (at, id) in ids.iter().enumerate() {
                let is_stored = *id != PageId::NONE;
                if is_stored && before_is_stored && state.slab().entry(*id).spot.has(ORPHAN) {
                    let child = hold * HOLD_KEYS + at;
                    orphans.push(Adoption {
                        namespace,
                        child: keys[child].prefix(),
                        parent: keys[child - 1].prefix(),
                    });
                }
                before_is_stored = is_stored;
            }
            self.lease_all(&state, ids, heat);
            let used = Used {
                by: Use::Lookup,
                hint: None,
                new_pages: None,
                now_ms: None,
            };
            self.note_uses(state, ids, used);
            if !goes_on {
                break;
            }
        }
        if let Some(stamp) = stamp {
            self.leases.lock().close(stamp.heat);
        }
    }

    /// Leases as many of the slots as the limit allows, the first ones first, and heats all of
    /// them.
    fn lease_all(&self, state: &State, ids: &[PageId], heat: Heat) {
        let found = ids.iter().filter(|id| **id != PageId::NONE).count();
        if found == 0 {
            return;
        }
        let granted = self.leases.lock().reserve(heat, found);
        let mut left = granted;
        let mut ended = EndedLeases::default();
        for id in ids.iter().filter(|id| **id != PageId::NONE) {
            let mark = Mark::new(heat, left > 0);
            let before = state.slab().entry(*id).raise(mark);
            if before < mark {
                left = left.saturating_sub(1);
                ended.add(before, 1);
            }
        }
        ended.add(Mark::new(heat, true), left as u64);
        self.leases.lock().settle(&ended.0);
    }

    /// Finds `keys` hold by hold, heats them, ends their leases, and passes each hold's slots to
    /// `see`.
    fn heat_all(
        &self,
        namespace: NamespaceSlot,
        keys: &[PageKey],
        used: Used,
        mut see: impl FnMut(&State, &[PageId]),
    ) {
        let mut stamp = None;
        let mut ids = [PageId::NONE; HOLD_KEYS];
        for keys in keys.chunks(HOLD_KEYS) {
            let ids = &mut ids[..keys.len()];
            let (state, heat) = self.read_stamped(&mut stamp, None);
            if let Some(now_ms) = used.now_ms {
                state.note_time(heat, now_ms);
            }
            self.find_all(&state, namespace, keys, ids);
            let mark = Mark::new(heat, false);
            let mut ended = EndedLeases::default();
            for id in ids.iter().filter(|id| **id != PageId::NONE) {
                let before = state.slab().entry(*id).raise(mark);
                if before < mark {
                    ended.add(before, 1);
                }
            }
            see(&state, ids);
            if !ended.0.is_empty() {
                self.leases.lock().settle(&ended.0);
            }
            self.note_uses(state, ids, used);
        }
    }

    /// Ends a hold: notes the uses of its pages for a policy, and gives it all noted ones if there
    /// are many.
    #[inline]
    fn note_uses(&self, state: RwLockReadGuard<'_, State>, ids: &[PageId], used: Used) {
        if let Some(chosen) = state.chosen()
            && chosen.note_uses(ids, used)
        {
            drop(state);
            self.state.write().report_uses();
        }
    }

    /// The read lock, and the call's stamp: drawn at its first hold, and drawn again (with a new
    /// lease record) in the rare case that heats were lowered since.
    fn read_stamped(
        &self,
        stamp: &mut Option<Stamp>,
        terms: Option<Lease>,
    ) -> (RwLockReadGuard<'_, State>, Heat) {
        loop {
            let state = self.state.read();
            let had = stamp.map(|stamp| stamp.epoch);
            if let Some(heat) = Stamp::of(stamp, &state) {
                if let Some(terms) = &terms
                    && had != Some(state.epoch())
                {
                    self.leases.lock().open(heat, terms);
                    state.note_time(heat, terms.now_ms);
                }
                return (state, heat);
            }
            drop(state);
            self.lower_heats(&mut self.state.write());
        }
    }
}

/// Leases that a call ended, summed over runs: a chain is mostly leased by one call.
#[derive(Default)]
struct EndedLeases(Vec<(Heat, u64)>);

impl EndedLeases {
    fn add(&mut self, mark: Mark, pages: u64) {
        if !mark.has_lease() || pages == 0 {
            return;
        }
        match self.0.last_mut() {
            Some((heat, sum)) if *heat == mark.heat() => *sum += pages,
            _ => self.0.push((mark.heat(), pages)),
        }
    }
}

fn locate(state: &State, id: PageId) -> Option<Located> {
    if id == PageId::NONE {
        return None;
    }
    let entry = state.slab().entry(id);
    Some(Located {
        place: state.slab().place(id),
        proof: state.slab().proof(id),
        unproven: entry.spot.has(UNPROVEN),
    })
}

/// The slot of each key, of whatever age: `PageId::NONE` if it is not there.
///
/// In four passes, so that the misses of one pass overlap: the first and the third do not wait for
/// memory.
fn find_all(state: &State, namespace: NamespaceSlot, keys: &[PageKey], ids: &mut [PageId]) {
    let mut hashes = [0; HOLD_KEYS];
    let hashes = &mut hashes[..keys.len()];
    let names = state.names();
    for (key, hash) in keys.iter().zip(&mut *hashes) {
        *hash = names.hash(namespace, key.prefix());
        state.table().fetch(*hash);
    }
    for ((hash, key), id) in hashes.iter().zip(keys).zip(&mut *ids) {
        *id = match state.table().guess(*hash) {
            Guess::Perhaps(id) => id,
            Guess::Absent => PageId::NONE,
            Guess::Elsewhere => state.find(namespace, key.prefix()).unwrap_or(PageId::NONE),
        };
    }
    for id in ids.iter().filter(|id| **id != PageId::NONE) {
        fetch(state.slab().entry(*id));
    }
    for (key, id) in keys.iter().zip(ids) {
        if *id == PageId::NONE {
            continue;
        }
        let entry = state.slab().entry(*id);
        let key = key.prefix();
        if !(entry.is(namespace, key.as_bytes()) && entry.spot.has(LIVE)) {
            *id = state.find(namespace, key).unwrap_or(PageId::NONE);
        }
    }
}
