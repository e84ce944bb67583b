//! The entries: 32 bytes that every lookup reads, and, apart from them, 8 bytes that only eviction
//! reads. Of a page that a codec made smaller, 4 more bytes: the saved blocks. Of an encrypted
//! page, 28 more bytes: its salt and its tag. Their chunks take memory only where there are such
//! pages.
//!
//! ```text
//! Entry (32 bytes, never across a cache line)      Link (8 bytes, under the same number)
//!   0  spot      u64  segment 24 | start 20          0  parent    u32  slot, 2^32 - 1: none
//!                     | namespace 16 | flags 4       4  children  u32  live pages below it
//!   8  checksum  u64; of an encrypted page: slot of its key 16 | low bits of the checksum 48
//!  16  key       12 bytes of the page key
//!  28  mark      u32  stamp 31 | leased 1
//! ```
//!
//! A slot is in one of three states, by LIVE and the count of children:
//!
//! | LIVE | children | state |
//! |---|---|---|
//! | 1 | any | a stored page |
//! | 0 | > 0 | a *ghost*: the page left before its children |
//! | 0 | 0 | free; the free slots are chained through `parent` |
//!
//! A ghost keeps its slot and its key until its last child has left or the page has come back, so
//! that no child ever points at another page. It has no parent, and lookups take it for absent.
//!
//! Stamp and lease share one atomic word, so that a lookup (which holds only the read lock) can
//! renew both in one step. The greater word wins: a newer call beats an older one, and of one
//! call's two words the leased one wins. All other fields change under the write lock only.

use std::num::NonZeroU16;
use std::sync::atomic::{AtomicU32, Ordering};

use larder_base::ahead::fetch;
use larder_base::planted;
use larder_format::{KeyPrefix, Proof, Seal};

use super::types::{Heat, NamespaceSlot, Place, SEGMENT_BLOCKS_MAX, SEGMENTS_MAX, SegmentId};
use crate::chunks::{Chunks, Sparse};

/// Number of an entry's slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageId(pub u32);

impl PageId {
    pub(super) const NONE: Self = Self(u32::MAX);

    #[inline]
    const fn at(self) -> usize {
        self.0 as usize
    }
}

/// The page is stored (see the table above).
pub(super) const LIVE: u64 = 1;
/// Its payload may not have landed before the last crash.
pub(super) const UNPROVEN: u64 = 2;
/// It has a parent, but the parent is unknown, or was not stored when the page was published.
pub(super) const ORPHAN: u64 = 4;
/// The coldness queue holds this slot's number. The flag belongs to the slot, not to the page: it
/// outlives a page that leaves by another way than eviction, because the queue is corrected only by
/// pops.
pub(super) const QUEUED: u64 = 8;
const FLAGS: u64 = 15;

const NAMESPACE_SHIFT: u32 = 4;
const START_SHIFT: u32 = 20;
const SEGMENT_SHIFT: u32 = 40;

/// An entry's place, namespace and flags in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spot(u64);

impl Spot {
    /// # Panics
    ///
    /// When the place exceeds the limits of an entry: the core checks a store's geometry when it
    /// opens it.
    pub(super) fn new(place: Place, namespace: NamespaceSlot, flags: u64) -> Self {
        assert!(
            (place.segment.0 as usize) < SEGMENTS_MAX && place.start < SEGMENT_BLOCKS_MAX,
            "{place:?} is beyond the store's limits"
        );
        Self(
            u64::from(place.segment.0) << SEGMENT_SHIFT
                | u64::from(place.start) << START_SHIFT
                | u64::from(namespace.0) << NAMESPACE_SHIFT
                | (flags & FLAGS),
        )
    }

    #[inline]
    pub(super) const fn segment(self) -> SegmentId {
        SegmentId((self.0 >> SEGMENT_SHIFT) as u32)
    }

    const fn start(self) -> u32 {
        (self.0 >> START_SHIFT) as u32 & (SEGMENT_BLOCKS_MAX - 1)
    }

    #[inline]
    pub(super) const fn namespace(self) -> NamespaceSlot {
        NamespaceSlot((self.0 >> NAMESPACE_SHIFT) as u16)
    }

    pub(super) const fn flags(self) -> u64 {
        self.0 & FLAGS
    }

    #[inline]
    pub(super) const fn has(self, flag: u64) -> bool {
        self.0 & flag != 0
    }

    pub(super) const fn set(&mut self, flags: u64) {
        self.0 |= flags & FLAGS;
    }

    pub(super) const fn clear(&mut self, flags: u64) {
        self.0 &= !(flags & FLAGS);
    }
}

/// Bytes of salt and tag.
const SEAL_BYTES: usize = 12 + 16;

const SEALED_CHECKSUM_BITS: u32 = Proof::SEALED_CHECKSUM_BITS;
const SEALED_CHECKSUM_MASK: u64 = (1 << SEALED_CHECKSUM_BITS) - 1;

/// Number of stamps.
pub(super) const HEAT_END: u32 = 1 << 31;

/// A page's heat, and whether the call that set it leased the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mark(pub(super) u32);

impl Mark {
    #[inline]
    pub(super) const fn new(heat: Heat, leased: bool) -> Self {
        Self(heat.0 << 1 | leased as u32)
    }

    #[inline]
    pub(super) const fn heat(self) -> Heat {
        Heat(self.0 >> 1)
    }

    /// Whether that call leased it; the lease may have lapsed since.
    #[inline]
    pub(super) const fn has_lease(self) -> bool {
        self.0 & 1 != 0
    }

    /// Whether it is leased now. `floor` is the oldest call with valid leases.
    pub(super) fn is_leased(self, floor: Heat) -> bool {
        self.has_lease() && self.heat() >= floor
    }
}

/// See the module.
#[derive(Debug)]
#[repr(C, align(32))]
pub(super) struct Entry {
    pub(super) spot: Spot,
    /// See the module; [`Slab::proof`] reads it.
    checksum: u64,
    key: [u8; 12],
    mark: AtomicU32,
}

const _: () = assert!(size_of::<Entry>() == 32);

impl Entry {
    /// Without a proof yet.
    pub(super) fn new(spot: Spot, key: KeyPrefix, mark: Mark) -> Self {
        Self {
            spot,
            checksum: 0,
            key: *key.as_bytes(),
            mark: AtomicU32::new(mark.0),
        }
    }

    pub(super) fn key(&self) -> KeyPrefix {
        KeyPrefix::from_bytes(self.key)
    }

    /// Whether this is the page, or the ghost, of that name.
    #[inline]
    pub(super) fn is(&self, namespace: NamespaceSlot, key: &[u8; 12]) -> bool {
        self.key == *key && self.spot.namespace() == namespace
    }

    #[inline]
    pub(super) fn mark(&self) -> Mark {
        // Relaxed, here and below: the lock orders marks against the structure; among readers only
        // the greatest matters.
        Mark(self.mark.load(Ordering::Relaxed))
    }

    /// Raises the mark to `mark`. Returns the previous mark.
    #[inline]
    pub(super) fn raise(&self, mark: Mark) -> Mark {
        Mark(self.mark.fetch_max(mark.0, Ordering::Relaxed))
    }

    pub(super) fn set_mark(&mut self, mark: Mark) {
        *self.mark.get_mut() = mark.0;
    }
}

/// See the module.
#[derive(Debug, Clone, Copy)]
pub(super) struct Link {
    pub(super) parent: PageId,
    pub(super) children: u32,
}

const _: () = assert!(size_of::<Link>() == 8);

const UNLINKED: Link = Link {
    parent: PageId::NONE,
    children: 0,
};

/// All slots.
#[derive(Debug)]
pub(super) struct Slab {
    entries: Chunks<Entry>,
    links: Chunks<Link>,
    saved: Sparse<u32>,
    /// Salt and tag.
    seals: Sparse<[u8; SEAL_BYTES]>,
    free_head: PageId,
    free_count: usize,
}

impl Slab {
    pub(super) const fn new() -> Self {
        Self {
            entries: Chunks::new(),
            links: Chunks::new(),
            saved: Sparse::new(),
            seals: Sparse::new(),
            free_head: PageId::NONE,
            free_count: 0,
        }
    }

    #[inline]
    pub(super) fn entry(&self, id: PageId) -> &Entry {
        self.entries.get(id.at())
    }

    #[inline]
    pub(super) fn entry_mut(&mut self, id: PageId) -> &mut Entry {
        self.entries.get_mut(id.at())
    }

    pub(super) fn place(&self, id: PageId) -> Place {
        let spot = self.entry(id).spot;
        Place {
            segment: spot.segment(),
            start: spot.start(),
            saved: self.saved.get(id.at()),
        }
    }

    /// Sets the place of a page, with its namespace and flags.
    ///
    /// # Panics
    ///
    /// As [`Spot::new`].
    pub(super) fn set_spot(
        &mut self,
        id: PageId,
        place: Place,
        namespace: NamespaceSlot,
        flags: u64,
    ) {
        self.entry_mut(id).spot = Spot::new(place, namespace, flags);
        if !planted!(KeptLength) {
            self.saved.set(id.at(), place.saved);
        }
    }

    /// What shows that bytes are those of a page. Of an encrypted page the checksum has the bits
    /// that count.
    pub(super) fn proof(&self, id: PageId) -> Proof {
        let checksum = self.entry(id).checksum;
        let seal = self.seals.get(id.at());
        if seal == [0; SEAL_BYTES] {
            return checksum.into();
        }
        let slot = NonZeroU16::new((checksum >> SEALED_CHECKSUM_BITS) as u16);
        let (mut salt, mut tag) = ([0; 12], [0; 16]);
        salt.copy_from_slice(&seal[..12]);
        tag.copy_from_slice(&seal[12..]);
        Proof {
            checksum: checksum & SEALED_CHECKSUM_MASK,
            seal: slot.map(|slot| Seal { slot, salt, tag }),
        }
    }

    pub(super) fn set_proof(&mut self, id: PageId, proof: Proof) {
        let mut bytes = [0; SEAL_BYTES];
        let checksum = match proof.seal {
            None => proof.checksum,
            Some(seal) => {
                bytes[..12].copy_from_slice(&seal.salt);
                bytes[12..].copy_from_slice(&seal.tag);
                let slot = u64::from(seal.slot.get()) << SEALED_CHECKSUM_BITS;
                slot | proof.checksum & SEALED_CHECKSUM_MASK
            }
        };
        self.seals.set(id.at(), bytes);
        self.entry_mut(id).checksum = checksum;
    }

    pub(super) fn link(&self, id: PageId) -> Link {
        *self.links.get(id.at())
    }

    /// Fetches the cache line of a link.
    pub(super) fn fetch_link(&self, id: PageId) {
        fetch(self.links.get(id.at()));
    }

    pub(super) fn link_mut(&mut self, id: PageId) -> &mut Link {
        self.links.get_mut(id.at())
    }

    /// Puts `entry`, of a page with so many saved blocks, into a free slot or a new one. The slot's
    /// QUEUED flag does not change.
    ///
    /// # Panics
    ///
    /// At 2^32 - 1 slots, which take 172 GB of RAM.
    pub(super) fn insert(&mut self, entry: Entry, saved: u32) -> PageId {
        let id = self.put(entry);
        self.saved.set(id.at(), saved);
        id
    }

    fn put(&mut self, mut entry: Entry) -> PageId {
        let id = self.free_head;
        if id == PageId::NONE {
            let id = PageId(u32::try_from(self.entries.len()).unwrap_or(u32::MAX));
            assert!(
                id != PageId::NONE,
                "the index is full: {} slots",
                self.entries.len()
            );
            self.entries.push(entry);
            self.links.push(UNLINKED);
            return id;
        }
        let slot = self.entries.get_mut(id.at());
        entry.spot.set(slot.spot.flags() & QUEUED);
        *slot = entry;
        self.free_head = std::mem::replace(self.links.get_mut(id.at()), UNLINKED).parent;
        self.free_count -= 1;
        id
    }

    /// Frees a slot to which nothing but the coldness queue refers.
    pub(super) fn free(&mut self, id: PageId) {
        let link = self.links.get_mut(id.at());
        assert!(
            link.children == 0 && link.parent == PageId::NONE,
            "slot {} is still linked",
            id.0
        );
        link.parent = self.free_head;
        self.free_head = id;
        self.free_count += 1;
        self.entries
            .get_mut(id.at())
            .spot
            .clear(LIVE | UNPROVEN | ORPHAN);
    }

    /// Number of slots, free ones included; slot numbers are below it.
    pub(super) const fn slots(&self) -> usize {
        self.entries.len()
    }

    pub(super) const fn free_count(&self) -> usize {
        self.free_count
    }

    /// Numbers of all slots.
    pub(super) fn ids(&self) -> impl Iterator<Item = PageId> + use<> {
        (0..self.entries.len() as u32).map(PageId)
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter()
    }

    pub(super) fn entries_mut(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.entries.iter_mut()
    }

    /// Bytes allocated.
    pub(super) fn ram_bytes(&self) -> usize {
        self.entries.ram_bytes()
            + self.links.ram_bytes()
            + self.saved.ram_bytes()
            + self.seals.ram_bytes()
    }
}
