//! Memory of the caller whose pages are named by row.

use std::any::Any;
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use larder_base::memory::move_to_huge_pages;

/// A stretch of memory in this process. Row `r` begins at `address + r * stride`.
///
/// A page lies in one piece from the start of its row. It may be shorter than the stride, or
/// longer: in an arena whose buffers begin at multiples of the stride.
pub struct Region {
    address: usize,
    length: usize,
    stride: usize,
    /// Bytes on huge pages, once the move to them has ended.
    moved: OnceLock<usize>,
    /// Keeps the memory alive.
    _owner: Option<Box<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("address", &self.address)
            .field("length", &self.length)
            .field("stride", &self.stride)
            .finish_non_exhaustive()
    }
}

/// Why a region or its rows are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// The region is not memory.
    #[error("{length} bytes at {address:#x} with rows of {stride} are no region of memory")]
    Bounds {
        /// The address.
        address: usize,
        /// The length in bytes.
        length: usize,
        /// The stride in bytes.
        stride: usize,
    },
    /// A page at this row would not lie in the region.
    #[error("row {row}: a page of {page_bytes} bytes at it is not inside the region")]
    Outside {
        /// The row.
        row: i64,
        /// Bytes of a page.
        page_bytes: usize,
    },
    /// Two pages would be read into the same memory.
    #[error("row {0}: two pages would be read into it")]
    Twice(i64),
    /// There are not as many rows as keys.
    #[error("{rows} rows for {keys} keys")]
    Count {
        /// Rows.
        rows: usize,
        /// Keys.
        keys: usize,
    },
}

impl Region {
    /// The region of `length` bytes at `address`. `owner` is dropped with it.
    ///
    /// # Safety
    /// The memory stays mapped, readable and writable for as long as the region exists.
    ///
    /// # Errors
    /// The numbers are no memory.
    pub unsafe fn new(
        address: usize,
        length: usize,
        stride: usize,
        owner: Option<Box<dyn Any + Send + Sync>>,
    ) -> Result<Region, RegionError> {
        let ends = address.checked_add(length);
        let is_memory = address > 0 && length > 0 && stride > 0 && stride <= length;
        if !is_memory || ends.is_none() || length > isize::MAX as usize {
            return Err(RegionError::Bounds {
                address,
                length,
                stride,
            });
        }
        Ok(Region {
            address,
            length,
            stride,
            moved: OnceLock::new(),
            _owner: owner,
        })
    }

    /// Moves the region to huge pages, see [`move_in_background`], until it is done or the region
    /// is dropped.
    pub fn move_to_huge_pages(self: &Arc<Region>) {
        let region = Arc::downgrade(self);
        let held = region.clone();
        let end = move |moved| {
            if let Some(region) = region.upgrade() {
                // The first of several moves counts.
                let _ = region.moved.set(moved);
            }
        };
        let memory = self.address..self.address + self.length;
        move_in_background(vec![memory], move || held.strong_count() > 0, end);
    }

    /// Bytes on huge pages after [`Region::move_to_huge_pages`]; `None` until it has ended.
    #[must_use]
    pub fn huge_bytes(&self) -> Option<usize> {
        self.moved.get().copied()
    }

    /// Its first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.address
    }

    /// Bytes.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }

    /// Bytes from the start of a row to the start of the next.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Whole rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.length / self.stride
    }

    /// The first bytes of the pages at these rows, checked: each page lies in the region. With
    /// `apart`, no two of them overlap.
    ///
    /// # Errors
    /// See [`RegionError`].
    pub fn starts(
        &self,
        rows: impl ExactSizeIterator<Item = i64>,
        keys: usize,
        page_bytes: usize,
        apart: bool,
    ) -> Result<Vec<usize>, RegionError> {
        if rows.len() != keys {
            let rows = rows.len();
            return Err(RegionError::Count { rows, keys });
        }
        let start = |row: i64| {
            let outside = RegionError::Outside { row, page_bytes };
            let offset = usize::try_from(row)
                .ok()
                .and_then(|row| row.checked_mul(self.stride));
            let offset = offset.ok_or(outside)?;
            let end = offset.checked_add(page_bytes).ok_or(outside)?;
            if end > self.length {
                return Err(outside);
            }
            Ok(self.address + offset)
        };
        let starts: Vec<usize> = rows.map(start).collect::<Result<_, _>>()?;
        let pages = starts.iter().map(|&start| (start, page_bytes));
        if apart && let Some(start) = overlap(pages) {
            let row = (start - self.address) / self.stride;
            return Err(RegionError::Twice(i64::try_from(row).unwrap_or(i64::MAX)));
        }
        Ok(starts)
    }
}

/// Moves ranges of memory to huge pages on a thread of its own, and calls `end` with the bytes that
/// are on huge pages then. It ends early when `is_wanted` is no longer true. Reads and writes are
/// faster after it: a device gets a list of the pieces of memory of each transfer, and small pages
/// lie all over memory.
///
/// The thread is not required: without it, the memory works on the pages that it has.
pub fn move_in_background(
    ranges: Vec<Range<usize>>,
    is_wanted: impl Fn() -> bool + Send + 'static,
    end: impl FnOnce(usize) + Send + 'static,
) {
    let work = move || {
        let to_move = ranges.iter();
        let moved = to_move.map(|range| move_to_huge_pages(range.start, range.len(), &is_wanted));
        let moved: usize = moved.sum();
        if is_wanted() {
            let of: usize = ranges.iter().map(Range::len).sum();
            let (moved, of) = (moved >> 20, of >> 20);
            tracing::info!("{moved} of {of} MiB registered memory are on huge pages");
        }
        end(moved);
    };
    let named = std::thread::Builder::new().name("larder-huge".to_owned());
    if let Err(error) = named.spawn(work) {
        tracing::warn!(%error, "registered memory stays on small pages: no thread moves it");
    }
}

/// The start of a piece of memory that lies in another one. A piece is its start and its bytes.
pub fn overlap(pieces: impl Iterator<Item = (usize, usize)> + Clone) -> Option<usize> {
    let mut end = 0;
    let mut is_ascending = |(start, bytes): (usize, usize)| {
        let is_behind = start >= end;
        end = start.saturating_add(bytes);
        is_behind
    };
    if pieces.clone().all(&mut is_ascending) {
        return None;
    }
    let mut sorted: Vec<_> = pieces.collect();
    sorted.sort_unstable();
    let pairs = sorted.array_windows();
    let mut overlaps =
        pairs.filter(|[(start, bytes), (next, _)]| *next < start.saturating_add(*bytes));
    overlaps.next().map(|[_, (next, _)]| *next)
}

/// The first byte of each part, page after page, of pages whose parts lie one after the other.
#[must_use]
pub fn part_starts(pages: &[usize], parts: &[usize]) -> Vec<usize> {
    let of_page = |&start| {
        let next = |at: &mut usize, bytes: &usize| {
            let start = *at;
            *at += bytes;
            Some(start)
        };
        parts.iter().scan(start, next)
    };
    pages.iter().flat_map(of_page).collect()
}

/// The memory of parts for a put. `starts` has the first byte of each, page after page; `parts` the
/// bytes of the parts of one page.
///
/// # Safety
/// At each start lie as many readable bytes as its part has. They do not change while the slices
/// are in use.
pub unsafe fn slices<'a>(starts: &[usize], parts: &[usize]) -> Vec<IoSlice<'a>> {
    let slice = |(&start, &bytes)| {
        let start = std::ptr::with_exposed_provenance::<u8>(start);
        // SAFETY: guaranteed by the caller.
        IoSlice::new(unsafe { std::slice::from_raw_parts(start, bytes) })
    };
    starts.iter().zip(parts.iter().cycle()).map(slice).collect()
}

/// The same for a get.
///
/// # Safety
/// At each start lie as many bytes as its part has. No parts overlap, and nothing else touches them
/// while the slices are in use.
pub unsafe fn slices_mut<'a>(starts: &[usize], parts: &[usize]) -> Vec<IoSliceMut<'a>> {
    let slice = |(&start, &bytes)| {
        let start = std::ptr::with_exposed_provenance_mut::<u8>(start);
        // SAFETY: guaranteed by the caller.
        IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(start, bytes) })
    };
    starts.iter().zip(parts.iter().cycle()).map(slice).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn region(stride: usize) -> Region {
        // SAFETY: no test touches the memory.
        unsafe { Region::new(4096, 1000, stride, None) }.unwrap()
    }

    #[test]
    fn pieces_overlap_in_any_order_and_parts_lie_one_after_the_other() {
        let found = |pieces: &[(usize, usize)]| overlap(pieces.iter().copied());
        assert_eq!(found(&[(10, 5), (15, 5), (0, 10)]), None);
        assert_eq!(found(&[(15, 5), (10, 6)]), Some(15));
        assert_eq!(found(&[(10, 5), (10, 5)]), Some(10));
        assert_eq!(found(&[(10, usize::MAX), (20, 1)]), Some(20));
        assert_eq!(found(&[]), None);
        assert_eq!(part_starts(&[100, 50], &[8, 4]), [100, 108, 50, 58]);
    }

    #[test]
    fn rows_begin_at_multiples_of_the_stride() {
        let region = region(100);
        assert_eq!(region.rows(), 10);
        let starts = region.starts([0, 9, 3].into_iter(), 3, 100, true);
        assert_eq!(starts.unwrap(), [4096, 4996, 4396]);
    }

    #[test]
    fn a_page_longer_than_the_stride_reaches_into_the_next_rows() {
        let region = region(10);
        let starts = region.starts([0, 25].into_iter(), 2, 250, true);
        assert_eq!(starts.unwrap(), [4096, 4346]);
        let refused = |rows: [i64; 2]| region.starts(rows.into_iter(), 2, 250, true).unwrap_err();
        assert_eq!(refused([0, 24]), RegionError::Twice(24));
        assert_eq!(refused([24, 0]), RegionError::Twice(24));
        let outside = RegionError::Outside {
            row: 76,
            page_bytes: 250,
        };
        assert_eq!(refused([0, 76]), outside);
    }

    #[test]
    fn rows_that_are_no_memory_of_the_region_are_refused() {
        let region = region(100);
        for row in [-1, 10, i64::MAX, i64::MIN] {
            let refused = region.starts([row].into_iter(), 1, 100, true).unwrap_err();
            assert!(matches!(refused, RegionError::Outside { .. }), "{refused}");
        }
        let refused = region.starts([1, 1].into_iter(), 2, 8, true);
        assert_eq!(refused.unwrap_err(), RegionError::Twice(1));
        assert!(region.starts([1, 1].into_iter(), 2, 8, false).is_ok());
        let refused = region.starts([1].into_iter(), 2, 8, false).unwrap_err();
        assert_eq!(refused, RegionError::Count { rows: 1, keys: 2 });
        for (address, length, stride) in [
            (0, 10, 1),
            (1, 0, 1),
            (1, 10, 0),
            (1, 10, 11),
            (usize::MAX, 10, 1),
        ] {
            // SAFETY: no test touches the memory.
            let refused = unsafe { Region::new(address, length, stride, None) };
            assert!(refused.is_err(), "{address} {length} {stride}");
        }
    }
}
