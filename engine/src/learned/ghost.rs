//! The facts of pages that left: a page that comes back is no new one.
//!
//! A table of buckets of 16 words, one cache line each. A word is a tag of 25 bits of the key, and
//! the facts. A bucket forgets its oldest word. About twice as many pages are remembered as are
//! stored, for 6 to 11 bytes of each stored page. A new page is taken for one of the 16 of its
//! bucket once in two million times.

/// What is remembered of a page: hits and children, both counted up to a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory(u8);

const HITS_MAX: u8 = 6;
const CHILDREN_MAX: u8 = 5;
const SHARED_CHILDREN: u8 = 4;
const CHILDREN_SHIFT: u32 = 3;
const BITS: u32 = 6;

impl Memory {
    pub(super) const NEW: Memory = Memory(0);

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

    pub(super) fn count_child(&mut self) {
        if self.children() < CHILDREN_MAX {
            self.0 += 1 << CHILDREN_SHIFT;
        }
    }
}

const WAYS: usize = 16;

/// Fewest words for five stored pages; the table doubles, so that there are twice as many at most.
const SHARE: usize = 7;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Ghosts {
    /// A power of two; the newest word of each comes first. 0 is no word.
    buckets: Vec<[u32; WAYS]>,
}

impl Ghosts {
    /// Makes room for the ghosts of a store of so many pages.
    pub(super) fn expect(&mut self, pages: usize) {
        let wanted = (pages * SHARE).div_ceil(5 * WAYS);
        if wanted <= self.buckets.len() {
            return;
        }
        // A tag has no more bits of its key than the bucket leaves: the old words stay where the
        // keys lead in the smaller table, so they are put into both halves of the larger one.
        let old = std::mem::take(&mut self.buckets);
        self.buckets = match old.len() {
            0 => vec![[0; WAYS]; 1],
            _ => [old.as_slice(), &old].concat(),
        };
    }

    fn spot(&self, key: u64) -> (usize, u32) {
        let bucket = key as usize & (self.buckets.len() - 1);
        let tag = (key >> 32) as u32 >> BITS << BITS;
        // Bit 6 keeps words apart from no word.
        (bucket, tag | 1 << BITS)
    }

    /// Remembers a page.
    pub(super) fn put(&mut self, key: u64, memory: Memory) {
        if self.buckets.is_empty() {
            return;
        }
        let (bucket, tag) = self.spot(key);
        let words = &mut self.buckets[bucket];
        words.copy_within(..WAYS - 1, 1);
        words[0] = tag | u32::from(memory.0);
    }

    /// Forgets a page that comes back; its facts.
    pub(super) fn take(&mut self, key: u64) -> Option<Memory> {
        if self.buckets.is_empty() {
            return None;
        }
        let (bucket, tag) = self.spot(key);
        let words = &mut self.buckets[bucket];
        let at = words.iter().position(|word| word >> BITS << BITS == tag)?;
        let memory = Memory((words[at] & ((1 << BITS) - 1)) as u8);
        words.copy_within(at + 1.., at);
        words[WAYS - 1] = 0;
        Some(memory)
    }

    pub(super) fn ram_bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<[u32; WAYS]>()
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
        let mut memory = Memory::NEW.used();
        memory.count_child();
        ghosts.put(key(1), memory);
        assert_eq!(ghosts.take(key(2)), None);
        assert_eq!(ghosts.take(key(1)), Some(memory));
        assert_eq!(ghosts.take(key(1)), None);
    }

    #[test]
    fn hits_and_children_are_counted_up_to_a_limit_and_apart() {
        let mut memory = Memory::NEW;
        for _ in 0..20 {
            memory = memory.used();
        }
        assert_eq!((memory.hits(), memory.children()), (6, 0));
        for _ in 0..20 {
            memory.count_child();
        }
        assert_eq!((memory.hits(), memory.children()), (6, 5));
    }

    #[test]
    fn about_as_many_pages_are_remembered_as_the_store_holds_and_the_newest_ones() {
        const PAGES: u64 = 4096;
        let mut ghosts = Ghosts::default();
        for pages in 1..=PAGES {
            ghosts.expect(pages as usize);
        }
        for number in 0..PAGES * 8 {
            ghosts.put(key(number), Memory::NEW);
        }
        let found = |ghosts: &mut Ghosts, numbers: std::ops::Range<u64>| {
            numbers
                .filter(|number| ghosts.take(key(*number)).is_some())
                .count() as u64
        };
        assert!(found(&mut ghosts, PAGES * 7..PAGES * 8) > PAGES * 9 / 10);
        assert!(found(&mut ghosts, 0..PAGES * 4) < PAGES / 10);
    }
}
