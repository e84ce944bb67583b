//! The facts of pages that left: a page that comes back is no new one.
//!
//! A table of buckets of 16 words. A word is a tag of 18 bits of the key, the facts, and when the
//! page was used last: 5 bytes. A bucket forgets its oldest word. A new page is taken for one of
//! the 16 of its bucket once in 16,000 times. There are three words for two pages that the store
//! held at once: the pages that LRU would still hold are among them, because it would have evicted
//! them by as many new pages as the store holds.
//!
//! The table grows by one bucket at a time (linear hashing): the next one in turn is split.
//!
//! A page that leaves is noted, and remembered later: its bucket is fetched meanwhile.

use super::recency::Epoch;
use larder_base::ahead::fetch;
use larder_core::chunks::Chunks;

/// What is remembered of a page: hits and children, both counted up to a limit. It has 6 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory(u8);

const HITS_MAX: u8 = 6;
const CHILDREN_MAX: u8 = 5;
const SHARED_CHILDREN: u8 = 4;
const CHILDREN_SHIFT: u32 = 3;

impl Memory {
    pub(super) const NEW: Memory = Memory(0);
    pub(super) const BITS: u32 = 6;

    pub(super) fn bits(self) -> u8 {
        self.0
    }

    pub(super) fn from_bits(bits: u8) -> Memory {
        Memory(bits)
    }

    /// Itself; nothing known if no page can have these bits.
    pub(super) fn valid(self) -> Memory {
        let is_valid = self.hits() <= HITS_MAX && self.children() <= CHILDREN_MAX;
        if is_valid { self } else { Memory::NEW }
    }

    /// Uses after the first one.
    pub(super) fn hits(self) -> u8 {
        self.0 & 7
    }

    /// Children that the page ever had.
    pub(super) fn children(self) -> u8 {
        self.0 >> CHILDREN_SHIFT
    }

    /// Whether requests of several conversations go through the page: another child does not say
    /// that the last one was left.
    pub(super) fn is_shared(self) -> bool {
        self.children() > SHARED_CHILDREN
    }

    /// With one hit more.
    pub(super) fn used(self) -> Memory {
        Memory(self.0 + u8::from(self.hits() < HITS_MAX))
    }

    /// With one child more.
    pub(super) fn with_child(self) -> Memory {
        Memory(self.0 + (u8::from(self.children() < CHILDREN_MAX) << CHILDREN_SHIFT))
    }
}

const WAYS: usize = 16;

/// Words for two pages that the store held at once.
const SHARE: usize = 3;

/// A power of two: 82 KiB.
const BUCKET_BITS: u32 = 10;

/// The newest word comes first. Two cache lines, or three.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Bucket {
    tags: [u16; WAYS],
    epochs: [Epoch; WAYS],
    /// Bits of the tag above the facts.
    facts: [u8; WAYS],
    words: u8,
}

impl Bucket {
    /// Moves the words from `at` on by one place.
    fn open(&mut self, at: usize) {
        self.facts.copy_within(at..WAYS - 1, at + 1);
        self.tags.copy_within(at..WAYS - 1, at + 1);
        self.epochs.copy_within(at..WAYS - 1, at + 1);
        self.words = (self.words + 1).min(WAYS as u8);
    }

    fn close(&mut self, at: usize) {
        self.facts.copy_within(at + 1.., at);
        self.tags.copy_within(at + 1.., at);
        self.epochs.copy_within(at + 1.., at);
        self.words -= 1;
    }
}

/// Most pages that have left and are not remembered yet.
const NOTED_MAX: usize = 16;

/// See the module.
#[derive(Debug)]
pub(super) struct Ghosts {
    buckets: Chunks<Bucket, BUCKET_BITS>,
    /// The page that left last comes last.
    noted: Vec<(u64, Memory, Epoch)>,
}

impl Default for Ghosts {
    fn default() -> Ghosts {
        Ghosts {
            buckets: Chunks::new(),
            noted: Vec::with_capacity(NOTED_MAX),
        }
    }
}

/// The bucket of a key among so many.
fn bucket_of(key: u64, buckets: usize) -> usize {
    let round = buckets.next_power_of_two();
    let at = key as usize & (round - 1);
    // This one was not split off yet.
    if at < buckets { at } else { at - round / 2 }
}

fn tag_of(key: u64) -> (u16, u8) {
    let high = (key >> 46) as u32;
    ((high >> 2) as u16, ((high & 3) as u8) << Memory::BITS)
}

impl Ghosts {
    /// Makes room for the ghosts of a store of so many pages.
    pub(super) fn expect(&mut self, pages: usize) {
        let wanted = (pages * SHARE).div_ceil(2 * WAYS);
        while self.buckets.len() < wanted {
            self.remember_noted();
            let new = self.buckets.len();
            // A word does not say to which of the two it belongs: both get a copy.
            let split = match new.checked_ilog2() {
                Some(level) => *self.buckets.get(new - (1 << level)),
                None => Bucket::default(),
            };
            self.buckets.push(split);
        }
    }

    /// Fetches the cache lines of the bucket of a key.
    #[inline]
    pub(super) fn fetch(&self, key: u64) {
        if self.buckets.len() > 0 {
            let bucket = self.buckets.get(bucket_of(key, self.buckets.len()));
            fetch(&bucket.tags);
            fetch(&bucket.facts);
            fetch(&bucket.words);
        }
    }

    /// Remembers a page.
    pub(super) fn put(&mut self, key: u64, memory: Memory, epoch: Epoch) {
        self.fetch(key);
        self.noted.push((key, memory, epoch));
        if self.noted.len() == NOTED_MAX {
            self.remember_noted();
        }
    }

    fn remember_noted(&mut self) {
        for (key, memory, epoch) in self.noted.drain(..) {
            if self.buckets.len() > 0 {
                let (tag, rest) = tag_of(key);
                let at = bucket_of(key, self.buckets.len());
                let bucket = self.buckets.get_mut(at);
                bucket.open(0);
                bucket.facts[0] = rest | memory.bits();
                (bucket.tags[0], bucket.epochs[0]) = (tag, epoch);
            }
        }
    }

    /// Forgets a page that comes back; its facts.
    pub(super) fn take(&mut self, key: u64) -> Option<(Memory, Epoch)> {
        self.remember_noted();
        if self.buckets.len() == 0 {
            return None;
        }
        let (tag, rest) = tag_of(key);
        let bucket = self.buckets.get_mut(bucket_of(key, self.buckets.len()));
        let is_it = |at: &usize| {
            bucket.tags[*at] == tag && bucket.facts[*at] >> Memory::BITS == rest >> Memory::BITS
        };
        let at = (0..usize::from(bucket.words)).find(is_it)?;
        let memory = Memory::from_bits(bucket.facts[at] & ((1 << Memory::BITS) - 1));
        let epoch = bucket.epochs[at];
        bucket.close(at);
        Some((memory, epoch))
    }

    pub(super) fn ram_bytes(&self) -> usize {
        self.buckets.ram_bytes() + self.noted.capacity() * size_of::<(u64, Memory, Epoch)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u64) -> u64 {
        number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31)
    }

    #[test]
    fn a_page_that_comes_back_has_its_facts_again_and_only_once() {
        let mut ghosts = Ghosts::default();
        ghosts.expect(100);
        let memory = Memory::NEW.used().with_child();
        ghosts.put(key(1), memory, 7);
        assert_eq!(ghosts.take(key(2)), None);
        assert_eq!(ghosts.take(key(1)), Some((memory, 7)));
        assert_eq!(ghosts.take(key(1)), None);
    }

    #[test]
    fn hits_and_children_are_counted_up_to_a_limit_and_apart() {
        let used = (0..20).fold(Memory::NEW, |memory, _| memory.used());
        assert_eq!((used.hits(), used.children()), (6, 0));
        let both = (0..20).fold(used, |memory, _| memory.with_child());
        assert_eq!((both.hits(), both.children()), (6, 5));
        assert!(both.bits() < 1 << Memory::BITS);
    }

    #[test]
    fn the_newest_pages_are_remembered_as_many_as_the_store_holds_and_half_as_many_more() {
        const PAGES: u64 = 1 << 16;
        let mut ghosts = Ghosts::default();
        for pages in 1..=PAGES {
            ghosts.expect(pages as usize);
        }
        for number in 0..PAGES * 8 {
            ghosts.put(key(number), Memory::NEW, 0);
        }
        let found = |ghosts: &mut Ghosts, numbers: std::ops::Range<u64>| {
            numbers
                .filter(|number| ghosts.take(key(*number)).is_some())
                .count() as u64
        };
        assert!(found(&mut ghosts, PAGES * 7..PAGES * 8) > PAGES * 9 / 10);
        assert!(found(&mut ghosts, 0..PAGES * 5) < PAGES / 10);
        assert!(ghosts.ram_bytes() < 9 * PAGES as usize);
    }

    #[test]
    fn a_page_is_remembered_while_the_table_grows() {
        let mut ghosts = Ghosts::default();
        ghosts.expect(64);
        for number in 0..32 {
            ghosts.put(key(number), Memory::NEW.used(), 3);
        }
        for pages in 64..5000 {
            ghosts.expect(pages);
        }
        let known =
            (0..32).filter(|number| ghosts.take(key(*number)) == Some((Memory::NEW.used(), 3)));
        assert!(known.count() > 28);
    }
}
