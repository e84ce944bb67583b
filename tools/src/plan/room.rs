//! How many pages a store of a size keeps, and the size that keeps them.

use larder_core::capacity::{footprint, usable_blocks};
use larder_format::{BLOCK_BYTES, OVERHEAD_BYTES};
use larder_store::fit::segment_bytes_for;

/// The largest store that is looked for.
const SIZE_MAX: u64 = 1 << 60;

/// Sizes to buy are whole GiB.
const STEP: u64 = 1 << 30;

/// The segments of a new store of a size on one volume, for pages of so many bytes, and their size.
/// `None` if no segment takes such pages.
pub fn segments(size: u64, page_bytes: u64) -> Option<(u64, u64)> {
    let segment_bytes = segment_bytes_for(size, 1, Some(page_bytes))?;
    Some((
        size.saturating_sub(OVERHEAD_BYTES) / segment_bytes,
        segment_bytes,
    ))
}

/// Pages of so many bytes on the device that a new store of a size keeps on one volume.
pub fn pages(size: u64, page_bytes: u64) -> u64 {
    let Some((segments, segment_bytes)) = segments(size, page_bytes) else {
        return 0;
    };
    let block = BLOCK_BYTES as u64;
    let blocks = |bytes: u64| u32::try_from(bytes / block).unwrap_or(u32::MAX);
    let taken = footprint(blocks(segment_bytes), blocks(page_bytes));
    usable_blocks(segments, 1, blocks(segment_bytes)) / taken.max(1)
}

/// The least size, in whole GiB, of a store that keeps so many pages; `None` if there is none.
pub fn size(wanted: u64, page_bytes: u64) -> Option<u64> {
    let keeps = |gibs: u64| pages(gibs * STEP, page_bytes) >= wanted;
    let (mut small, mut large) = (0, SIZE_MAX / STEP);
    if !keeps(large) {
        return None;
    }
    while large - small > 1 {
        let middle = small + (large - small) / 2;
        match keeps(middle) {
            true => large = middle,
            false => small = middle,
        }
    }
    Some(large * STEP)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_size_found_keeps_the_pages_with_the_fill_counted() {
        for (wanted, page_bytes) in [(1_000, 20 << 20), (1_000_000, 64 << 10), (1, 4096)] {
            let size = size(wanted, page_bytes).unwrap();
            assert!(pages(size, page_bytes) >= wanted, "{wanted} {page_bytes}");
            let bytes = wanted * page_bytes;
            assert!(
                size <= (bytes + bytes / 4).next_multiple_of(STEP) + 2 * STEP,
                "{size}"
            );
        }
        assert_eq!(size(u64::MAX, 4096), None);
    }
}
