//! From a hash to the slots that may hold it: some thousand small hash tables of slot numbers.
//!
//! One big table would rehash everything at once when it grows. Here each growth step rehashes one
//! shard, and each shard grows at its own time. Their number follows the capacity: a step takes
//! about 65 ns an entry.
//!
//! ```text
//! Line (64 bytes: one cache line)
//!   0  tags      12 x u8   8 bits of each hash; 0 is an empty place
//!  12  passed    u32       entries that lie in a later line, because this one was full
//!  16  ids       12 x u32  slot numbers
//! ```
//!
//! A lookup costs one cache miss: the line of the hash has the tags and the numbers. `passed`
//! counts the entries that a full line sent on to the next line; a search ends at a line where it
//! is 0. A removal subtracts its entry from `passed`, so that churn leaves nothing behind: a store
//! at its capacity churns for ever.
//!
//! The first version used hashbrown: 177 us for 2,048 keys of ten million. With this table and the
//! passes of `lookup` that fetch lines ahead, for which hashbrown has no call, it was 98 us. The
//! share of each of the two was not measured. RAM just after growth is 9.6 bytes a page here, 11.4
//! there by arithmetic.

use std::hash::{BuildHasher, RandomState};

use larder_base::ahead::fetch;
use larder_base::random::random_bytes;
use larder_format::KeyPrefix;

use super::slab::PageId;
use super::types::NamespaceSlot;

/// Blocks of capacity for each shard. A store full of pages of 64 KiB has up to 4,096 of them in a
/// shard; smaller pages make the steps longer in proportion. Measured with 2,441 in a shard: most
/// steps take 0.15 to 0.25 ms, the worst took 0.84 ms on a busy machine. (Four times the shards
/// cost lookups a tenth, as their headers no longer fit the nearest cache.)
const SHARD_BLOCKS: u64 = 1 << 16;

/// Fewest and most shards: 8 KiB and 2 MiB of headers.
const SHARDS_MIN: u64 = 1 << 8;
const SHARDS_MAX: u64 = 1 << 16;

/// Places in a line.
const PLACES: usize = 12;

/// Most entries a shard takes for each of its lines before it grows: about one in twenty lies one
/// line further on.
const FILL_MAX: usize = 10;

// A hash, from below: 32 bits choose the line, 8 are the tag, up to 16 choose the shard.
const TAG_SHIFT: u32 = 32;
const SHARD_SHIFT: u32 = 40;

/// Hashes the names of pages.
///
/// Page keys are SHA-256 outputs, so their bits would serve as they are. One multiplication spreads
/// the same key in several namespaces (ranks, pools) and keeps a caller's own keys from colliding.
/// Each hasher has secrets of its own: a caller who chooses keys does not know their places.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NameHasher {
    secrets: [u64; 2],
}

impl NameHasher {
    pub(crate) fn new() -> NameHasher {
        // Drawn where the simulation can decide it: collisions decide which locks are taken.
        let drawn = random_bytes::<16>().map(u128::from_le_bytes);
        NameHasher {
            // Without random bytes, those of the process's hash maps.
            secrets: drawn.map_or_else(
                |_| {
                    let random = RandomState::new();
                    [random.hash_one(0), random.hash_one(1)]
                },
                |drawn| [drawn as u64, (drawn >> 64) as u64],
            ),
        }
    }

    #[inline]
    pub(crate) fn hash(&self, namespace: NamespaceSlot, key: KeyPrefix) -> u64 {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = *key.as_bytes();
        let low = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        let high = u64::from(u32::from_le_bytes([i, j, k, l])) | u64::from(namespace.0) << 32;
        let product = u128::from(low ^ self.secrets[0]) * u128::from(high ^ self.secrets[1]);
        product as u64 ^ (product >> 64) as u64
    }
}

/// The tag of a hash, repeated in every byte; never 0.
#[inline]
const fn tag_bytes(hash: u64) -> u64 {
    let tag = (hash >> TAG_SHIFT) as u8;
    (if tag == 0 { 1 } else { tag as u64 }) * EACH_BYTE
}

const EACH_BYTE: u64 = 0x0101_0101_0101_0101;

/// The top bit of each byte of `word` that is 0.
#[inline]
const fn zero_bytes(word: u64) -> u64 {
    const LOW: u64 = 0x7f * EACH_BYTE;
    !(((word & LOW) + LOW) | word | LOW)
}

/// See the module. The second word holds four tags, and `passed` in its upper half.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line {
    tags: [u64; 2],
    ids: [u32; PLACES],
}

const _: () = assert!(size_of::<Line>() == 64);

impl Line {
    const EMPTY: Self = Self {
        tags: [0; 2],
        ids: [0; PLACES],
    };
    const ONE_PASSED: u64 = 1 << 32;

    const fn has_passed(&self) -> bool {
        self.tags[1] >= Self::ONE_PASSED
    }

    /// Bit `8 i + 7` is set where place `i` has that tag.
    #[inline]
    const fn places_of(&self, tag_bytes: u64) -> u128 {
        let first = zero_bytes(self.tags[0] ^ tag_bytes);
        let second = zero_bytes(self.tags[1] ^ tag_bytes) & (u32::MAX as u64);
        (second as u128) << 64 | first as u128
    }

    #[inline]
    fn first_of(&self, tag_bytes: u64) -> Option<PageId> {
        let place = (self.places_of(tag_bytes).trailing_zeros() / 8) as usize;
        self.ids.get(place).map(|id| PageId(*id))
    }

    #[inline]
    fn find(&self, tag_bytes: u64, mut is: impl FnMut(PageId) -> bool) -> Option<usize> {
        let mut places = self.places_of(tag_bytes);
        while places != 0 {
            let place = (places.trailing_zeros() / 8) as usize;
            if is(PageId(self.ids[place])) {
                return Some(place);
            }
            places &= places - 1;
        }
        None
    }

    const fn set_tag(&mut self, place: usize, tag: u64) {
        let shift = place % 8 * 8;
        let word = &mut self.tags[place / 8];
        *word = *word & !(0xff << shift) | tag << shift;
    }

    /// Puts an entry into an empty place, if there is one.
    fn put(&mut self, tag_bytes: u64, id: PageId) -> bool {
        let place = (self.places_of(0).trailing_zeros() / 8) as usize;
        let Some(empty) = self.ids.get_mut(place) else {
            return false;
        };
        *empty = id.0;
        self.set_tag(place, tag_bytes & 0xff);
        true
    }
}

#[derive(Debug, Default)]
struct Shard {
    lines: Vec<Line>,
    len: usize,
}

impl Shard {
    #[inline]
    fn home(&self, hash: u64) -> usize {
        (((hash & u64::from(u32::MAX)) * self.lines.len() as u64) >> 32) as usize
    }

    const fn after(&self, line: usize) -> usize {
        if line + 1 == self.lines.len() {
            0
        } else {
            line + 1
        }
    }

    /// Line and place of the slot that `is` accepts.
    #[inline]
    fn find(&self, hash: u64, mut is: impl FnMut(PageId) -> bool) -> Option<(usize, usize)> {
        let tag = tag_bytes(hash);
        let mut at = self.home(hash);
        for _ in 0..self.lines.len() {
            let line = &self.lines[at];
            if let Some(place) = line.find(tag, &mut is) {
                return Some((at, place));
            }
            if !line.has_passed() {
                return None;
            }
            at = self.after(at);
        }
        None
    }

    /// Puts an entry into the first line with room. There is one: no shard is ever filled beyond
    /// `FILL_MAX`.
    fn put(&mut self, hash: u64, id: PageId) {
        let tag = tag_bytes(hash);
        let mut at = self.home(hash);
        while !self.lines[at].put(tag, id) {
            self.lines[at].tags[1] += Line::ONE_PASSED;
            at = self.after(at);
        }
        self.len += 1;
    }

    fn remove(&mut self, hash: u64, id: PageId) -> bool {
        let Some((line, place)) = self.find(hash, |other| other == id) else {
            return false;
        };
        self.lines[line].set_tag(place, 0);
        self.len -= 1;
        let mut at = self.home(hash);
        while at != line {
            self.lines[at].tags[1] -= Line::ONE_PASSED;
            at = self.after(at);
        }
        true
    }

    fn is_full(&self) -> bool {
        self.len >= self.lines.len() * FILL_MAX
    }

    /// By half, not by twice: this costs more rehashing, and saves RAM just after it.
    fn grow(&mut self, hash_of: &impl Fn(PageId) -> u64) {
        let more = vec![Line::EMPTY; self.lines.len() * 3 / 2 + 1];
        let lines = std::mem::replace(&mut self.lines, more);
        self.len = 0;
        for line in &lines {
            for (place, id) in line.ids.iter().enumerate() {
                if line.tags[place / 8] >> (place % 8 * 8) & 0xff != 0 {
                    let id = PageId(*id);
                    self.put(hash_of(id), id);
                }
            }
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Table {
    shards: Box<[Shard]>,
}

impl Table {
    pub(super) fn new(capacity_blocks: u64) -> Self {
        let wanted = (capacity_blocks / SHARD_BLOCKS).clamp(SHARDS_MIN, SHARDS_MAX);
        Self {
            shards: (0..wanted.next_power_of_two())
                .map(|_| Shard::default())
                .collect(),
        }
    }

    /// Gives every shard the lines for its share of `entries`, so that filling them causes no
    /// rehash. If the share is so small that most shards would get no line, each shard allocates
    /// its own later.
    pub(super) fn expect(&mut self, entries: usize) {
        if entries < self.shards.len() {
            return;
        }
        // A little less than full: shards get more or less than their share.
        let lines = entries / self.shards.len() / (FILL_MAX - 1) + 1;
        for shard in &mut self.shards {
            if shard.lines.is_empty() {
                shard.lines = vec![Line::EMPTY; lines];
            }
        }
    }

    #[inline]
    fn shard(&self, hash: u64) -> &Shard {
        &self.shards[(hash >> SHARD_SHIFT) as usize & (self.shards.len() - 1)]
    }

    fn shard_mut(&mut self, hash: u64) -> &mut Shard {
        let shard = (hash >> SHARD_SHIFT) as usize & (self.shards.len() - 1);
        &mut self.shards[shard]
    }

    /// Fetches the line of a hash into the cache.
    #[inline]
    pub(super) fn fetch(&self, hash: u64) {
        let shard = self.shard(hash);
        shard
            .lines
            .get(shard.home(hash))
            .into_iter()
            .for_each(fetch);
    }

    /// The result of the hash's own line. A slot it names belongs to another page once in
    /// twenty-five times.
    #[inline]
    pub(super) fn guess(&self, hash: u64) -> Guess {
        let shard = self.shard(hash);
        let Some(line) = shard.lines.get(shard.home(hash)) else {
            return Guess::Absent;
        };
        match line.first_of(tag_bytes(hash)) {
            Some(id) => Guess::Perhaps(id),
            None if line.has_passed() => Guess::Elsewhere,
            None => Guess::Absent,
        }
    }

    /// The slot with this hash that `is` accepts.
    #[inline]
    pub(super) fn find(&self, hash: u64, is: impl FnMut(PageId) -> bool) -> Option<PageId> {
        let shard = self.shard(hash);
        shard
            .find(hash, is)
            .map(|(line, place)| PageId(shard.lines[line].ids[place]))
    }

    /// Adds a slot that is not in the table; `hash_of` gives the hash of any slot that is.
    /// Returns whether a shard grew for it.
    pub(super) fn insert(
        &mut self,
        hash: u64,
        id: PageId,
        hash_of: impl Fn(PageId) -> u64,
    ) -> bool {
        let shard = self.shard_mut(hash);
        let grows = shard.is_full();
        if grows {
            shard.grow(&hash_of);
        }
        shard.put(hash, id);
        grows
    }

    /// Removes a slot; false if it was not there.
    pub(super) fn remove(&mut self, hash: u64, id: PageId) -> bool {
        self.shard_mut(hash).remove(hash, id)
    }

    /// Slots in the table.
    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.len).sum()
    }

    /// Bytes allocated.
    pub(super) fn ram_bytes(&self) -> usize {
        let lines: usize = self.shards.iter().map(|shard| shard.lines.capacity()).sum();
        lines * size_of::<Line>() + size_of_val(&*self.shards)
    }
}

/// The result of the hash's own line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Guess {
    /// No slot has this hash.
    Absent,
    /// This slot has the tag.
    Perhaps(PageId),
    /// No slot here has the tag; a later line may hold one.
    Elsewhere,
}
