//! The facts of stored pages as words: what a store knows of its pages until its next open.
//!
//! ```text
//!   127..64  the first 8 bytes of the key
//!    63..32  last use, in ticks
//!    31..16  class, memory, superseded
//!    15..0   epoch of the last use
//! ```
//!
//! Keys are hashes: the words, sorted, lie in buckets of about eight by their highest bits. Pages
//! of one key in two namespaces share a word, that of either one.

use larder_base::ahead::fetch;
use larder_format::KeyPrefix;

use super::pages::Page;

/// Notes in a bucket, about.
const BUCKET: usize = 8;

/// Most notes.
const NOTES_MAX: usize = 1 << 30;

/// The number that names a key.
pub(super) fn named(key: KeyPrefix) -> u64 {
    let (high, _) = key
        .as_bytes()
        .split_first_chunk::<8>()
        .expect("it has 12 bytes");
    u64::from_be_bytes(*high)
}

pub(super) fn write(key: KeyPrefix, page: &Page) -> u128 {
    let facts = u64::from(page.last) << 32 | u64::from(page.traits()) << 16 | u64::from(page.epoch);
    u128::from(named(key)) << 64 | u128::from(facts)
}

fn name_of(note: u128) -> u64 {
    (note >> 64) as u64
}

/// The page of a note.
fn read(note: u128) -> Page {
    let facts = note as u64;
    Page::with((facts >> 32) as u32, (facts >> 16) as u16, facts as u16)
}

/// The notes of an earlier open, while its pages arrive.
#[derive(Debug, Default)]
pub(super) struct Notes {
    notes: Vec<u128>,
    /// The end of each bucket. Their number is a power of two, or zero.
    ends: Vec<u32>,
}

impl Notes {
    /// None of notes that are not sorted.
    pub(super) fn new(notes: Vec<u128>) -> Notes {
        if notes.is_empty() || notes.len() > NOTES_MAX || !notes.is_sorted() {
            return Notes::default();
        }
        let mut found = Notes {
            ends: vec![0; notes.len().div_ceil(BUCKET).next_power_of_two()],
            notes,
        };
        let mut bucket = 0;
        for (at, note) in (0..).zip(&found.notes) {
            let of = bucket_of(name_of(*note), found.ends.len());
            found.ends[bucket..of].fill(at);
            bucket = of;
        }
        found.ends[bucket..].fill(found.notes.len() as u32);
        found
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    fn bucket(&self, name: u64) -> &[u128] {
        let bucket = bucket_of(name, self.ends.len());
        let begin = bucket.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.notes[begin as usize..self.ends[bucket] as usize]
    }

    /// Fetches the cache lines of the bucket of a key.
    pub(super) fn fetch(&self, key: KeyPrefix) {
        if !self.is_empty() {
            let bucket = self.bucket(named(key));
            bucket
                .first()
                .into_iter()
                .chain(bucket.last())
                .for_each(fetch);
        }
    }

    pub(super) fn find(&self, key: KeyPrefix) -> Option<Page> {
        if self.is_empty() {
            return None;
        }
        let name = named(key);
        let bucket = self.bucket(name);
        let at = bucket.partition_point(|note| name_of(*note) < name);
        let note = bucket.get(at).filter(|note| name_of(**note) == name)?;
        Some(read(*note))
    }
}

fn bucket_of(name: u64, buckets: usize) -> usize {
    // Without a bit to shift by there is one bucket.
    name.checked_shr(u64::BITS - buckets.trailing_zeros())
        .unwrap_or(0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ghost::Memory;

    fn key(number: u64) -> KeyPrefix {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&number.to_be_bytes());
        KeyPrefix::from_bytes(bytes)
    }

    fn page(number: u32) -> Page {
        let mut page = Page::new(Memory::NEW.used().with_child());
        page.last = number;
        page.set_class((number % 512) as u16);
        page.epoch = number as u16;
        page
    }

    fn check(names: &[u64]) {
        let notes = (0..).zip(names);
        let mut notes: Vec<u128> = notes
            .map(|(at, name)| write(key(*name), &page(at)))
            .collect();
        notes.sort_unstable();
        let found = Notes::new(notes);
        for (at, name) in (0..).zip(names) {
            let (seen, wrote) = (found.find(key(*name)).expect("it is there"), page(at));
            assert_eq!((seen.last, seen.epoch), (wrote.last, wrote.epoch));
            assert_eq!(seen.traits(), wrote.traits());
            assert!(found.find(key(*name ^ 1)).is_none() || names.contains(&(*name ^ 1)));
        }
    }

    #[test]
    fn a_page_is_found_by_its_key_whatever_the_keys_are() {
        check(&[5]);
        check(&[0, u64::MAX]);
        let in_order: Vec<u64> = (0..1000).collect();
        check(&in_order);
        let spread = (1..5000_u64).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        check(&spread.collect::<Vec<u64>>());
    }

    #[test]
    fn notes_out_of_order_are_ignored() {
        assert!(Notes::new(vec![2 << 64, 1 << 64]).is_empty());
        assert!(Notes::default().find(key(0)).is_none());
    }
}
