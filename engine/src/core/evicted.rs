//! The pages that the store evicted by itself, with their whole keys, for callers who keep books of
//! their own.
//!
//! The index knows 96 bits of a key. The whole key of an evicted page is read from its descriptor:
//! by the caller who asks, while the page's segment still holds it, or by reclaim when it empties
//! that segment, whichever comes first. A page that reclaim evicts itself comes with its key.
//!
//! Nothing is recorded before the first caller asks. Only the last entries are kept: a caller that
//! asks too rarely learns that it missed some.

use std::collections::{HashMap, VecDeque};

use larder_format::{Body, DescriptorBlock, KeyPrefix, PageKey, Record, Run, Serial};

use crate::index::{NamespaceSlot, Place, SegmentId};

/// Most entries that are kept: 6 MiB.
const ENTRIES_MAX: usize = 1 << 16;

/// Bits of a number below those of the run.
const COUNTER_BITS: u32 = 36;

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
        if !self.is_on {
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

    /// Takes whole keys from the descriptors of a segment's generation. Entries of that segment
    /// without a descriptor there are lost.
    pub(super) fn read(
        &mut self,
        segment: SegmentId,
        generation: Serial,
        blocks: &[DescriptorBlock],
    ) {
        let Some(numbers) = self.pending.remove(&segment) else {
            return;
        };
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
                // Of another generation: its descriptors are gone.
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
        for number in wanted.into_values().flatten() {
            self.set(number, Key::Lost);
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
