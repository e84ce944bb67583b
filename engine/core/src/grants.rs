//! The words of a put with the core: the pages that it asks to store, and the extents that it is
//! granted.

use larder_format::PageKey;
use serde::{Deserialize, Serialize};

use crate::index::Place;
use crate::status::Refusal;

/// The place of a page's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index of the volume.
    pub volume: usize,
    /// Byte offset in the volume.
    pub offset: u64,
    /// Segment and block, as in the index.
    pub place: Place,
}

/// The layout of segments: maps a place to an extent. Fixed while a store is open.
#[derive(Clone, Debug)]
pub struct SegmentMap {
    /// Store-wide number of each volume's first segment.
    bases: Vec<u32>,
    segment_blocks: u32,
}

impl SegmentMap {
    /// From the volumes' segment counts.
    #[must_use]
    pub fn new(volumes: &[u32], segment_blocks: u32) -> SegmentMap {
        let mut next = 0_u32;
        let bases = volumes
            .iter()
            .map(|&count| {
                let base = next;
                next = base.saturating_add(count);
                base
            })
            .collect();
        SegmentMap {
            bases,
            segment_blocks,
        }
    }

    /// Blocks of a segment.
    #[must_use]
    pub fn segment_blocks(&self) -> u32 {
        self.segment_blocks
    }

    /// The extent of the page at a place.
    #[must_use]
    pub fn extent(&self, place: Place) -> Extent {
        let segment = place.segment.0;
        let volume = self
            .bases
            .partition_point(|&base| base <= segment)
            .saturating_sub(1);
        let number = segment - self.bases.get(volume).copied().unwrap_or(segment);
        // An invalid place, which a client may name, has an extent too, but it is never read.
        let blocks = u64::from(number) * u64::from(self.segment_blocks) + u64::from(place.start);
        let bytes = blocks.saturating_mul(larder_format::BLOCK_BYTES as u64);
        Extent {
            volume,
            offset: larder_format::SEGMENTS_OFFSET.saturating_add(bytes),
            place,
        }
    }
}

/// A page that a put requests to store.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// Its key.
    pub key: PageKey,
    /// The key before it.
    pub parent: Option<PageKey>,
    /// Pages before it in its chain.
    pub depth: u32,
    /// Blocks of the plain page that are not stored, below the number of its blocks: zero, unless a
    /// codec made it smaller.
    pub saved: u32,
}

/// The answer to one [`Ask`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// Write the page here, then commit.
    Write(Extent),
    /// Nothing to write; the status comes with the wait of the put. The page is a duplicate, or
    /// another put is writing it.
    Settles,
    /// Refused for now. Every later page of the request is refused too.
    Refused(Refusal),
}

/// The reservation of extents by one put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReservationId(pub u64);

/// The finding of a read of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Finding {
    /// Its bytes match its checksum.
    Good,
    /// Its bytes do not match its checksum.
    Mismatch,
    /// The device could not read them.
    Unreadable,
    /// Its bytes match its checksum, and the codec cannot decode them.
    Undecodable,
}
