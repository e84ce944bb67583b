//! Pages and segments: whether pages of a size fit the segments of a store, and the segment size
//! that suits a page.
//!
//! No page lies in two segments. A segment keeps two blocks for its headers and at least one for
//! descriptors; the rest is room for pages. All sizes are bytes on the device, with each part of a
//! page padded to whole blocks.

use larder_core::capacity::segments_min;
use larder_format::{BLOCK_BYTES, HEADER_BLOCKS, OVERHEAD_BYTES, PageShape, SEGMENT_BYTES_MAX};

use crate::error::StoreError;

/// With so many pages or more in a segment, the unused room at its end is small.
const PAGES_WANTED: u64 = 8;

/// With so many segments a store follows the learned order of eviction with a margin, and reclaim
/// has enough of them to choose from. More are of little use, and each costs memory and blocks.
const SEGMENTS_WANTED: u64 = 1024;

/// Fewer segments than this are worse than waste at their ends.
const SEGMENTS_LEAST: u64 = 32;

/// The least bytes of a segment that is chosen. Smaller ones cost puts too much.
pub(crate) const SHARE_MIN: u64 = 16 << 20;

/// The most bytes of a segment that is chosen by the size of the store alone.
const SHARE_MAX: u64 = 256 << 20;

/// The least bytes of a segment for pages of an unknown size, in a store that has 256 of these.
const UNKNOWN_MIN: u64 = 64 << 20;

/// Segment sizes chosen for a page are multiples of this, in bytes.
const STEP: u64 = 1 << 20;

/// The bytes of a segment that divide all volumes into the wanted number of segments.
fn share(size: u64, volumes: usize) -> u64 {
    let volumes = (volumes as u64).max(1);
    let room = (size / volumes).saturating_sub(OVERHEAD_BYTES);
    let share = room / SEGMENTS_WANTED.div_ceil(volumes) / STEP * STEP;
    share.clamp(SHARE_MIN, SHARE_MAX)
}

/// How pages of a size fit the segments of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageFit {
    /// They fit, and little room is left over.
    Good,
    /// One page fills more than half of a segment, and so many hundredths of the segment are left
    /// over.
    Wasteful(u64),
    /// A page is larger than a segment's room: none can ever be stored.
    Never,
}

/// The largest page that fits a segment of this size.
#[must_use]
pub fn largest_page(segment_bytes: u64) -> u64 {
    segment_bytes.saturating_sub((u64::from(HEADER_BLOCKS) + 1) * BLOCK_BYTES as u64)
}

/// Bytes of a page of this shape on the device.
#[must_use]
pub fn page_bytes_on_disk(shape: &PageShape) -> u64 {
    u64::from(shape.page_blocks()) * BLOCK_BYTES as u64
}

/// Checks that segments of `segment_bytes` hold pages of this shape. Zero is a size that is not
/// known.
///
/// # Errors
/// [`StoreError::PageTooLarge`].
pub fn check_page(segment_bytes: u64, shape: &PageShape) -> Result<(), StoreError> {
    let page_bytes = page_bytes_on_disk(shape);
    if segment_bytes > 0 && page_fit(segment_bytes, page_bytes) == PageFit::Never {
        return Err(StoreError::PageTooLarge {
            page_bytes,
            largest_bytes: largest_page(segment_bytes),
        });
    }
    Ok(())
}

/// How pages of `page_bytes` fit segments of `segment_bytes`.
#[must_use]
pub fn page_fit(segment_bytes: u64, page_bytes: u64) -> PageFit {
    let room = largest_page(segment_bytes);
    match room.checked_div(page_bytes) {
        Some(0) => PageFit::Never,
        Some(1) => PageFit::waste(100 - page_bytes * 100 / room),
        _ => PageFit::Good,
    }
}

impl PageFit {
    fn waste(hundredths: u64) -> PageFit {
        const SMALL: u64 = 10;
        if hundredths > SMALL {
            PageFit::Wasteful(hundredths)
        } else {
            PageFit::Good
        }
    }
}

/// The segment size for a store of `size` bytes on `volumes` volumes that keeps pages of
/// `page_bytes`, if their size is known. `None` if no page fits a store of this size.
///
/// Segments for known pages are as large as leaves the store 1,024 of them, from 16 to 256 MiB, or
/// large enough for eight pages. For unknown pages they have 64 MiB or more, in stores below
/// 16 GiB a power of two near a 256th of the size, and 16 MiB or more.
#[must_use]
pub fn segment_bytes_for(size: u64, volumes: usize, page_bytes: Option<u64>) -> Option<u64> {
    let share = share(size, volumes);
    let Some(page_bytes) = page_bytes else {
        let small = 1 << (size / 256).max(1).ilog2();
        return Some(share.max(UNKNOWN_MIN.min(small)));
    };
    let of = |pages: u64| {
        // One block describes 32 pages; evictions and deletions need some more.
        let descriptors = 16 * BLOCK_BYTES as u64;
        let needed = page_bytes.saturating_mul(pages).saturating_add(descriptors);
        let stepped = needed.checked_next_multiple_of(STEP).unwrap_or(u64::MAX);
        stepped.max(SHARE_MIN)
    };
    let pages = largest_page(share) / page_bytes.max(1);
    if pages >= PAGES_WANTED {
        return Some(share.min(of(pages)));
    }
    let fits = |segment_bytes: u64, least: u64| {
        let segments = size / segment_bytes;
        segment_bytes <= SEGMENT_BYTES_MAX && segments >= least
    };
    let is_good = |segment: &u64| page_fit(*segment, page_bytes) == PageFit::Good;
    let least = segments_min(volumes) + 1;
    let mut many = (1..=PAGES_WANTED).rev().map(of).filter(is_good);
    let mut few = (1..=PAGES_WANTED).map(of).filter(is_good);
    many.find(|&segment| fits(segment, SEGMENTS_LEAST))
        .or_else(|| few.find(|&segment| fits(segment, least)))
        .or_else(|| Some(of(1)).filter(|&segment| fits(segment, least)))
}

/// The least size of a store on `volumes` volumes that keeps pages of `page_bytes`; `None` if no
/// segment holds one.
#[must_use]
pub fn least_size(volumes: usize, page_bytes: u64) -> Option<u64> {
    let segment = page_bytes
        .saturating_add(16 * BLOCK_BYTES as u64)
        .checked_next_multiple_of(STEP)?
        .max(SHARE_MIN);
    let size = segment.saturating_mul(segments_min(volumes) + 1);
    (segment <= SEGMENT_BYTES_MAX).then_some(size)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_page_of_a_segments_size_does_not_fit_and_one_less_three_blocks_does() {
        assert_eq!(page_fit(16 * MIB, 16 * MIB), PageFit::Never);
        assert_eq!(page_fit(16 * MIB, 16 * MIB - 2 * 4096), PageFit::Never);
        assert_eq!(page_fit(16 * MIB, 16 * MIB - 3 * 4096), PageFit::Good);
        assert_eq!(page_fit(16 * MIB, 9 * MIB), PageFit::Wasteful(44));
        assert_eq!(page_fit(16 * MIB, 8 * MIB), PageFit::Wasteful(50));
        assert_eq!(page_fit(16 * MIB, 7 * MIB), PageFit::Good);
        assert_eq!(page_fit(16 * MIB, 0), PageFit::Good);
    }

    #[test]
    fn the_chosen_segment_holds_the_page_and_wastes_little() {
        for size in [256 * MIB, 1 << 30, 8 << 30, 100 << 30, 4 << 40] {
            for page in [4096, MIB, 9 * MIB, 16 * MIB, 32 * MIB, 150 * MIB, 700 * MIB] {
                let Some(segment) = segment_bytes_for(size, 1, Some(page)) else {
                    assert!(least_size(1, page).unwrap() > size, "{size} {page}");
                    continue;
                };
                let fit = page_fit(segment, page);
                assert_ne!(fit, PageFit::Never, "{size} {page}: {segment}");
                let may_waste = size / segment < SEGMENTS_LEAST;
                assert!(
                    may_waste || fit == PageFit::Good,
                    "{size} {page}: {segment}"
                );
                let segments = (size - MIB) / segment;
                assert!(segments >= segments_min(1), "{size} {page}: {segment}");
                assert!(segment.is_multiple_of(4096) && segment >= SHARE_MIN);
            }
        }
    }

    #[test]
    fn a_store_for_known_pages_has_1024_segments_where_eight_pages_fit_them() {
        for (size, page, segment) in [
            (2 << 30, 64 << 10, 16),
            (15 << 30, 64 << 10, 16),
            (16 << 30, 64 << 10, 16),
            (100 << 30, 64 << 10, 99),
            (100 << 30, 2 * MIB, 99),
            (2 << 40, 64 << 10, 256),
            // Eight pages need more than a 1,024th of the store.
            (16 << 30, 2 * MIB, 17),
            (100 << 30, 16 * MIB, 129),
            (2 << 40, 64 * MIB, 513),
            // In a small store as many as leave it 32 segments.
            (2 << 30, 16 * MIB, 49),
        ] {
            let chosen = segment_bytes_for(size, 1, Some(page)).unwrap();
            assert_eq!(chosen, segment * MIB, "{size} {page}");
        }
        for (volumes, size) in [(1, (16 << 30) + 2 * MIB), (3, 17 << 30), (16, 1 << 40)] {
            let chosen = segment_bytes_for(size, volumes, Some(4096)).unwrap();
            let each = (size / volumes as u64 - 2 * MIB) / chosen;
            assert!(each * volumes as u64 >= 1024, "{size} {volumes}: {chosen}");
        }
    }

    #[test]
    fn segments_for_unknown_pages_have_64_mib_or_more_from_16_gib_on() {
        for (size, segment) in [
            (256 * MIB, 16),
            (2 << 30, 16),
            (15 << 30, 32),
            (16 << 30, 64),
            (64 << 30, 64),
            (100 << 30, 99),
            (2 << 40, 256),
        ] {
            let chosen = segment_bytes_for(size, 1, None);
            assert_eq!(chosen, Some(segment * MIB), "{size}");
        }
    }

    #[test]
    fn a_page_too_large_for_a_store_has_no_segment() {
        assert_eq!(segment_bytes_for(64 * MIB, 1, Some(32 * MIB)), None);
        assert_eq!(segment_bytes_for(1 << 40, 1, Some(u64::MAX)), None);
        assert_eq!(least_size(1, 8 << 30), None);
    }
}
