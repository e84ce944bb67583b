//! The pages that the store evicted by itself, with their whole keys, for callers who keep books of
//! their own.
//!
//! The index knows 96 bits of a key. The whole key of an evicted page is read from its descriptor:
//! by the caller who asks, while the page's segment still holds it, or by reclaim when it has
//! emptied that segment, whichever comes first. A page that reclaim evicts itself comes with its
//! key.
//!
//! Nothing is recorded before the first caller asks. Only the last entries are kept: a caller that
//! asks too rarely learns that it missed some.

use std::collections::{HashMap, VecDeque};

use larder_format::{Body, DescriptorBlock, Fingerprint, KeyPrefix, PageKey, Record, Run, Serial};

use crate::index::{NamespaceSlot, Place, SegmentId};
use crate::planted;

/// Most entries that are kept: 6 MiB.
const ENTRIES_MAX: usize = 1 << 16;

/// Bits of a number below those of the run.
const COUNTER_BITS: u32 = 36;

/// Pages that the store dropped by itself, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evictions {
    /// The number to ask with next.
    pub next: u64,
    /// Some are not among them: they were too many since the last call, their keys are lost, or
    /// the store has another owner since.
    pub missed: bool,
    /// Namespace and key of each.
    pub pages: Vec<(Fingerprint, PageKey)>,
}

/// A page that left.
#[derive(Clone, Copy, Debug)]
struct Entry {
    namespace: NamespaceSlot,
    key: Key,
    place: Place,
    /// The generation of its segment.
    generation: Serial,
}

#[derive(Clone, Copy, Debug)]
enum Key {
    Whole(PageKey),
    Prefix(KeyPrefix),
    /// Its descriptor was lost before it was read.
    Lost,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Evicted {
    is_on: bool,
    entries: VecDeque<Entry>,
    /// The number of the first entry kept, counted from the first ever.
    first: u64,
    /// Numbers of the entries without whole keys, by segment.
    pending: HashMap<SegmentId, Vec<u64>>,
}

/// The pages evicted since a number, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Since {
    /// The number to ask with next.
    pub next: u64,
    /// Pages before the first one are not known any more, or their keys are lost.
    pub missed: bool,
    /// Namespace and key of each.
    pub pages: Vec<(NamespaceSlot, PageKey)>,
}

impl Evicted {
    /// Entries are numbered on from a number that no other run gives.
    pub(super) fn new(run: Run) -> Evicted {
        Evicted {
            first: u64::from(run.get()) << COUNTER_BITS,
            ..Evicted::default()
        }
    }

    /// Begins to record.
    pub(super) fn turn_on(&mut self) {
        self.is_on = true;
    }

    /// A page with this prefix left its place.
    pub(super) fn left(
        &mut self,
        namespace: NamespaceSlot,
        key: KeyPrefix,
        place: Place,
        generation: Serial,
    ) {
        if !self.is_on || planted!(UntoldEviction) {
            return;
        }
        let number = self.push(Entry {
            namespace,
            key: Key::Prefix(key),
            place,
            generation,
        });
        self.pending.entry(place.segment).or_default().push(number);
    }

    /// A page with this key left.
    pub(super) fn left_whole(&mut self, namespace: NamespaceSlot, key: PageKey, place: Place) {
        if self.is_on {
            self.push(Entry {
                namespace,
                key: Key::Whole(key),
                place,
                generation: Serial::ZERO,
            });
        }
    }

    fn push(&mut self, entry: Entry) -> u64 {
        if self.entries.len() == ENTRIES_MAX
            && let Some(oldest) = self.entries.pop_front()
        {
            if let Key::Prefix(_) = oldest.key
                && let Some(numbers) = self.pending.get_mut(&oldest.place.segment)
            {
                numbers.retain(|number| *number != self.first);
                if numbers.is_empty() {
                    self.pending.remove(&oldest.place.segment);
                }
            }
            self.first += 1;
        }
        self.entries.push_back(entry);
        self.first + self.entries.len() as u64 - 1
    }

    /// Takes whole keys from the descriptors of a segment's generation. If these are all of them,
    /// entries of that generation without a descriptor among them are lost.
    pub(super) fn read(
        &mut self,
        segment: SegmentId,
        generation: Serial,
        blocks: &[DescriptorBlock],
        are_all: bool,
    ) {
        let Some(numbers) = self.pending.remove(&segment) else {
            return;
        };
        // Entries whose descriptors are still to be read.
        let mut later = Vec::new();
        let mut wanted: HashMap<(u32, KeyPrefix), Vec<u64>> = HashMap::new();
        for number in numbers {
            let Some(entry) = self.entry(number) else {
                continue;
            };
            match entry.key {
                Key::Prefix(key) if entry.generation == generation => {
                    wanted
                        .entry((entry.place.start, key))
                        .or_default()
                        .push(number);
                }
                // The segment was emptied since the read, and written again.
                Key::Prefix(_) if entry.generation > generation => later.push(number),
                // The descriptors of an older generation are gone.
                _ => self.set(number, Key::Lost),
            }
        }
        for block in blocks {
            let Body::Records(records) = &block.body else {
                continue;
            };
            for record in records {
                let Record::Page(page) = record else { continue };
                let found = wanted.remove(&(page.start, page.key.prefix()));
                for number in found.into_iter().flatten() {
                    self.set(number, Key::Whole(page.key));
                }
            }
        }
        let unnamed = wanted.into_values().flatten();
        match are_all {
            true => unnamed.for_each(|number| self.set(number, Key::Lost)),
            false => later.extend(unnamed),
        }
        if !later.is_empty() {
            self.pending.insert(segment, later);
        }
    }

    /// The segments of at most `limit` entries since `since` whose descriptors are still to be
    /// read.
    pub(super) fn unread(&self, since: u64, limit: usize) -> Vec<SegmentId> {
        let mut segments = Vec::new();
        for entry in self.entries.iter().skip(self.at(since)).take(limit) {
            if let Key::Prefix(_) = entry.key
                && !segments.contains(&entry.place.segment)
            {
                segments.push(entry.place.segment);
            }
        }
        segments
    }

    /// At most `limit` pages evicted since number `since`, up to the first one whose key is still
    /// to be read.
    pub(super) fn since(&self, since: u64, limit: usize) -> Since {
        let end = self.first + self.entries.len() as u64;
        let since = if since == 0 { end } else { since };
        let mut found = Since {
            next: since.clamp(self.first, end),
            missed: since < self.first || since > end,
            pages: Vec::new(),
        };
        for entry in self.entries.iter().skip(self.at(since)).take(limit) {
            match entry.key {
                Key::Whole(key) => found.pages.push((entry.namespace, key)),
                Key::Lost => found.missed = true,
                Key::Prefix(_) => break,
            }
            found.next += 1;
        }
        found
    }

    fn at(&self, number: u64) -> usize {
        let after = number.saturating_sub(self.first);
        usize::try_from(after)
            .unwrap_or(usize::MAX)
            .min(self.entries.len())
    }

    fn entry(&self, number: u64) -> Option<Entry> {
        let at = number.checked_sub(self.first)?;
        self.entries.get(usize::try_from(at).ok()?).copied()
    }

    fn set(&mut self, number: u64, key: Key) {
        let at = number
            .checked_sub(self.first)
            .and_then(|at| usize::try_from(at).ok());
        if let Some(entry) = at.and_then(|at| self.entries.get_mut(at)) {
            entry.key = key;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use larder_format::{BlockHeader, Fingerprint, PageRecord, SegmentNo, StoreId};

    use super::*;

    const SEGMENT: SegmentId = SegmentId(3);

    fn key(number: u8) -> PageKey {
        PageKey::from_bytes([number; 32])
    }

    fn generation(number: u64) -> Serial {
        Serial::from_raw(Serial::first_of(Run::FIRST).get() + number)
    }

    /// A block with the descriptor of one page.
    fn block(number: u8, generation: Serial) -> DescriptorBlock {
        DescriptorBlock {
            header: BlockHeader {
                store: StoreId::from_bytes([1; 16]),
                volume: 0,
                segment: SegmentNo(SEGMENT.0),
                sequence: generation,
                index: number.into(),
                commit: generation,
                data_end: 0,
                synced: Serial::ZERO,
            },
            body: Body::Records(vec![Record::Page(PageRecord {
                namespace: Fingerprint::from_bytes([1; 16]),
                key: key(number),
                parent: None,
                depth: 0,
                birth: generation,
                start: number.into(),
                blocks: 1,
                stored: 1,
                put_unix_s: 0,
                checksum: 0,
                seal: None,
            })]),
        }
    }

    /// Records evictions of these pages of the segment, one after the other.
    fn evict(evicted: &mut Evicted, numbers: &[u8], generation: Serial) {
        for &number in numbers {
            let place = Place {
                segment: SEGMENT,
                start: number.into(),
                saved: 0,
            };
            evicted.left(NamespaceSlot(0), key(number).prefix(), place, generation);
        }
    }

    fn begun() -> (Evicted, u64) {
        let mut evicted = Evicted::new(Run::FIRST);
        evicted.turn_on();
        let begin = evicted.since(0, 100).next;
        (evicted, begin)
    }

    fn keys(found: &Since) -> Vec<PageKey> {
        found.pages.iter().map(|(_, key)| *key).collect()
    }

    #[test]
    fn row_27_a_page_put_and_evicted_while_its_segment_is_read_is_told_later() {
        let (mut evicted, begin) = begun();
        let now = generation(1);
        evict(&mut evicted, &[1], now);
        assert_eq!(evicted.unread(begin, 100), [SEGMENT]);
        // Its descriptor comes after the ones that the read covers.
        evict(&mut evicted, &[2], now);
        evicted.read(SEGMENT, now, &[block(1, now)], false);
        let found = evicted.since(begin, 100);
        assert_eq!((keys(&found), found.missed), (vec![key(1)], false));
        assert_eq!(evicted.unread(found.next, 100), [SEGMENT]);
        evicted.read(SEGMENT, now, &[block(1, now), block(2, now)], true);
        let found = evicted.since(found.next, 100);
        assert_eq!((keys(&found), found.missed), (vec![key(2)], false));
    }

    #[test]
    fn a_page_of_a_segment_written_again_while_its_descriptors_are_read_is_told_later() {
        let (mut evicted, begin) = begun();
        let (before, now) = (generation(1), generation(2));
        evict(&mut evicted, &[1], before);
        evicted.read(SEGMENT, before, &[block(1, before)], true);
        evict(&mut evicted, &[2], now);
        // The answer to a read that began before the segment was emptied.
        evicted.read(SEGMENT, before, &[block(1, before)], false);
        let found = evicted.since(begin, 100);
        assert_eq!((keys(&found), found.missed), (vec![key(1)], false));
        evicted.read(SEGMENT, now, &[block(2, now)], true);
        let found = evicted.since(found.next, 100);
        assert_eq!((keys(&found), found.missed), (vec![key(2)], false));
    }

    #[test]
    fn a_key_that_no_descriptor_names_is_told_as_missed() {
        let (mut evicted, begin) = begun();
        let now = generation(1);
        evict(&mut evicted, &[1, 2], now);
        evicted.read(SEGMENT, now, &[block(1, now)], true);
        let found = evicted.since(begin, 100);
        assert_eq!((keys(&found), found.missed), (vec![key(1)], true));
        assert_eq!(found.next, begin + 2);
    }
}
