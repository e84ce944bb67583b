//! The types of the index: ids, places on disk, the heat of a page (its recency), and the structs
//! that its calls take and return.

use larder_base::ids::NamespaceId;
use larder_format::{KeyPrefix, PageRecord, Proof};

use crate::policy::{Use, Worth};
use serde::{Deserialize, Serialize};

use crate::hint::Hint;

/// Most segments a store may have: an entry keeps its segment in 24 bits.
pub const SEGMENTS_MAX: usize = 1 << 24;

/// Most blocks a segment may have: an entry keeps its start block in 20 bits (4 GiB of 4 KiB
/// blocks).
pub const SEGMENT_BLOCKS_MAX: u32 = 1 << 20;

/// Number of a namespace while the store is open; the core hands them out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceSlot(pub u16);

impl From<NamespaceId> for NamespaceSlot {
    fn from(id: NamespaceId) -> NamespaceSlot {
        NamespaceSlot(id.0)
    }
}

/// Store-wide number of a segment, below [`SEGMENTS_MAX`] and below the count the index was made
/// for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SegmentId(pub u32);

/// Where a page's payload lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Place {
    /// The segment that holds the page.
    pub segment: SegmentId,
    /// First block of the page within the segment, below [`SEGMENT_BLOCKS_MAX`].
    pub start: u32,
    /// Blocks of the plain page that are not stored: zero, unless a codec made it smaller.
    pub saved: u32,
}

impl Place {
    /// The place of a page by its record in this segment.
    #[must_use]
    pub fn of(segment: SegmentId, record: &PageRecord) -> Place {
        Place {
            segment,
            start: record.start,
            saved: record.blocks.saturating_sub(record.stored),
        }
    }
}

/// How recently a page was used: the stamp of the last call that used it. Greater is hotter.
///
/// Stamps have 31 bits. When they run out, the index lowers all of them at once, and keeps their
/// order. A `Heat` read before that compares too hot with one read after, so do not keep heats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Heat(pub u32);

/// The purpose of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReadAs {
    /// A request needs the page: the read heats it and ends its lease, and its age counts.
    Use,
    /// A copy or a check of the page: a policy does not hear of it.
    Check,
}

/// The terms of the leases that one lookup takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// The caller's clock, in milliseconds; the same clock as for `evict_coldest`.
    pub now_ms: u64,
    /// How long the lease protects the confirmed pages, in milliseconds.
    pub duration_ms: u64,
    /// Blocks that one page of the namespace takes: a leased page counts as many against the limit.
    pub blocks_per_page: u32,
}

/// A located page, for a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Located {
    /// Where its payload lies.
    pub place: Place,
    /// What shows that bytes are its own: a checksum that also covers its whole key and its
    /// namespace.
    pub proof: Proof,
    /// Its write may not have completed before the last crash: a failed checksum is not damage
    /// then.
    pub unproven: bool,
}

/// A page stored with an unknown parent, and the parent that a caller names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Adoption {
    /// The namespace of both.
    pub namespace: NamespaceSlot,
    /// The page without a parent.
    pub child: KeyPrefix,
    /// The page before it in its chain.
    pub parent: KeyPrefix,
}

/// The predecessor of a page in its chain, as far as its writer knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parent {
    /// None: the page heads its chain (depth 0).
    Head,
    /// A page that the writer did not name.
    Unknown,
    /// The page of this key, whether it is stored or not.
    Key(KeyPrefix),
}

/// One page to make visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Publish {
    /// Its namespace.
    pub namespace: NamespaceSlot,
    /// Its key.
    pub key: KeyPrefix,
    /// The page before it.
    pub parent: Parent,
    /// Where its payload lies.
    pub place: Place,
    /// What shows that bytes are its own.
    pub proof: Proof,
    /// Found by recovery above the synced commit number: its write may not have completed.
    pub unproven: bool,
    /// Facts for policies.
    pub told: Told,
}

/// Facts of a page that only its writer knows. Kept if a policy is chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Told {
    /// Pages before it in its chain.
    pub depth: u32,
    /// Blocks that it takes.
    pub blocks: u32,
    /// The hint of its put.
    pub hint: Hint,
    /// Pages that its put asked for and that were not stored, where that is known.
    pub new_pages: Option<u32>,
}

/// The result of `publish` for one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// The key was not stored.
    New,
    /// The key was stored at this place, whose bytes are dead from now on.
    Replaced(Place),
}

/// A page that left the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departed {
    /// Its namespace.
    pub namespace: NamespaceSlot,
    /// Its key.
    pub key: KeyPrefix,
    /// Where its bytes lie, dead from now on.
    pub place: Place,
    /// Its worth when it left, by the policy: the heat, unless another one is chosen.
    pub worth: Worth,
    /// The scale of that worth.
    pub scale: u64,
}

/// The facts for the decision of reclaim between copying a page and dropping it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveInfo {
    /// When it was last used.
    pub heat: Heat,
    /// Its worth, by the policy: the heat, unless another one is chosen.
    pub worth: Worth,
    /// Number of its stored children: it may be dropped only at 0.
    pub children: u32,
    /// A lookup confirmed it for a reader that has not read it yet.
    pub leased: bool,
}

/// One page, for inspection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageView {
    /// Its namespace.
    pub namespace: NamespaceSlot,
    /// Its key.
    pub key: KeyPrefix,
    /// Its parent, if it is stored and linked.
    pub parent: Option<KeyPrefix>,
    /// Where its payload lies.
    pub place: Place,
    /// What shows that bytes are its own.
    pub proof: Proof,
    /// When it was last used.
    pub heat: Heat,
    /// Number of its stored children.
    pub children: u32,
    /// Its write may not have completed before the last crash.
    pub unproven: bool,
    /// It has a parent, but the parent is unknown or not stored.
    pub orphan: bool,
}

/// A call that uses pages, for a policy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Used {
    pub(super) by: Use,
    /// The pages have it from now on.
    pub(super) hint: Option<Hint>,
    /// Keys of the call that are not stored.
    pub(super) new_pages: Option<u32>,
    /// The time, where the caller knows it.
    pub(super) now_ms: Option<u64>,
}
