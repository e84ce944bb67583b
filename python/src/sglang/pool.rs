//! The memory of the pages of a host pool. Only this module creates slices from SGLang's addresses.
//!
//! A pool has one or more *buffers*; page `i` of a buffer has `bytes` bytes and starts at
//! `base + i * stride`. A *part* of a page is one buffer's piece, or several joined in order:
//! SGLang's `layer_first` pools scatter a part over one buffer per layer.
//!
//! Invariants: every piece returned by a [`Pool`] is inside the registered ranges. Pieces of
//! different pages or buffers never overlap. One call returns each page once.
//!
//! Two conditions cannot be checked here and are guaranteed by SGLang: the pool stays mapped until
//! `close`, and no other code touches the slots of a call before it returns.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;

/// One buffer of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Address of page 0's piece.
    pub base: usize,
    /// Distance between the pieces of consecutive pages, in bytes.
    pub stride: usize,
    /// Bytes per piece.
    pub bytes: usize,
}

/// A pool's memory.
#[derive(Clone, Debug)]
pub struct Pool {
    buffers: Vec<Buffer>,
    /// The buffers of each part, in order.
    parts: Vec<Vec<usize>>,
    page_tokens: usize,
    pages: usize,
}

/// Why addresses do not form a pool, or indices do not identify pages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The geometry is contradictory.
    #[error("the pool's buffers are not valid: {0}")]
    Geometry(&'static str),
    /// The number of indices does not match the keys.
    #[error("{found} host indices for {keys} keys, {expected} expected")]
    Count {
        /// Indices given.
        found: usize,
        /// Keys given.
        keys: usize,
        /// Indices required for the keys.
        expected: usize,
    },
    /// An index is not the first of a page, or is outside the pool.
    #[error("host index {0} is not the first of a page of this pool")]
    Index(i64),
    /// A page occurs twice.
    #[error("host index {0} occurs twice")]
    Twice(i64),
}

impl Pool {
    /// A pool of `pages` pages of `page_tokens` tokens. `parts` lists the buffers of each part.
    ///
    /// # Errors
    /// Buffers overlap or exceed the address space; a part has no buffer, or a buffer twice.
    pub fn new(
        buffers: Vec<Buffer>,
        parts: Vec<Vec<usize>>,
        page_tokens: usize,
        pages: usize,
    ) -> Result<Pool, PoolError> {
        let refuse = |why| Err(PoolError::Geometry(why));
        if page_tokens == 0 || pages == 0 || buffers.is_empty() {
            return refuse("it has no pages");
        }
        let mut named: Vec<usize> = parts.iter().flatten().copied().collect();
        named.sort_unstable();
        if parts.iter().any(Vec::is_empty) || !named.iter().copied().eq(0..buffers.len()) {
            return refuse("each buffer belongs to one part");
        }
        for (at, buffer) in buffers.iter().enumerate() {
            if buffer.bytes == 0 || buffer.base == 0 {
                return refuse("a buffer is empty");
            }
            if buffer.bytes > buffer.stride && pages > 1 {
                return refuse("pages of a buffer overlap");
            }
            let Some(end) = end_of(buffer, pages) else {
                return refuse("a buffer leaves the address space");
            };
            for other in &buffers[..at] {
                let apart =
                    end <= other.base || end_of(other, pages).is_some_and(|end| end <= buffer.base);
                if !apart && !interleave(buffer, other) {
                    return refuse("buffers overlap");
                }
            }
        }
        Ok(Pool {
            buffers,
            parts,
            page_tokens,
            pages,
        })
    }

    /// Bytes of each part.
    #[must_use]
    pub fn part_bytes(&self) -> Vec<usize> {
        let of = |part: &Vec<usize>| part.iter().map(|&at| self.buffers[at].bytes).sum();
        self.parts.iter().map(of).collect()
    }

    /// Bytes per page.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.bytes).sum()
    }

    /// Whether every part of every page is one piece, so that nothing must be gathered.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.parts.iter().all(|part| part.len() == 1)
    }

    /// Whether every piece starts and ends at a multiple of `align` bytes.
    #[must_use]
    pub fn is_aligned(&self, align: usize) -> bool {
        self.buffers.iter().all(|buffer| {
            [buffer.base, buffer.stride, buffer.bytes]
                .iter()
                .all(|number| number.is_multiple_of(align))
        })
    }

    /// The address of the first byte of the pool.
    #[must_use]
    pub fn base(&self) -> usize {
        self.buffers[0].base
    }

    /// The memory of the pool. Ranges do not overlap.
    #[must_use]
    pub fn ranges(&self) -> Vec<Range<usize>> {
        let end = |buffer: &Buffer| end_of(buffer, self.pages).unwrap_or(buffer.base);
        let range = |buffer: &Buffer| buffer.base..end(buffer);
        let mut all: Vec<Range<usize>> = self.buffers.iter().map(range).collect();
        all.sort_unstable_by_key(|range| range.start);
        all.dedup_by(|next, before| {
            let meet = next.start <= before.end;
            if meet {
                before.end = before.end.max(next.end);
            }
            meet
        });
        all
    }

    /// The pages that SGLang's indices identify: one index per token, and the first of each page is
    /// used.
    ///
    /// # Errors
    /// The number of indices does not match the keys; an index is not the first of a page; a page
    /// occurs twice.
    pub fn pages(&self, indices: &[i64], keys: usize) -> Result<Vec<usize>, PoolError> {
        let expected = keys.saturating_mul(self.page_tokens);
        if indices.len() != expected {
            return Err(PoolError::Count {
                found: indices.len(),
                keys,
                expected,
            });
        }
        let mut pages = Vec::with_capacity(keys);
        for &index in indices.iter().step_by(self.page_tokens) {
            let slot = usize::try_from(index).map_err(|_| PoolError::Index(index))?;
            let page = slot / self.page_tokens;
            if !slot.is_multiple_of(self.page_tokens) || page >= self.pages {
                return Err(PoolError::Index(index));
            }
            pages.push(page);
        }
        let mut sorted = pages.clone();
        sorted.sort_unstable();
        match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(PoolError::Twice(
                i64::try_from(pair[0] * self.page_tokens).unwrap_or(i64::MAX),
            )),
            None => Ok(pages),
        }
    }

    /// The pieces of a page, in the order of parts, for reading.
    ///
    /// # Safety
    /// The pool is mapped and no other code writes to this page while the pieces are used.
    #[must_use]
    pub unsafe fn pieces(&self, page: usize) -> Vec<IoSlice<'_>> {
        let slice = |buffer: Buffer| {
            let start = self.address(buffer, page);
            // SAFETY: the caller guarantees the memory, and `address` its bounds.
            IoSlice::new(unsafe { std::slice::from_raw_parts(start, buffer.bytes) })
        };
        self.in_order().map(slice).collect()
    }

    /// The pieces of a page, in the order of parts, for writing.
    ///
    /// # Safety
    /// The pool is mapped and no other code touches this page while the pieces are used. No page is
    /// requested twice during that time.
    #[must_use]
    pub unsafe fn pieces_mut<'a>(&self, page: usize) -> Vec<IoSliceMut<'a>> {
        let slice = |buffer: Buffer| {
            let start = self.address(buffer, page);
            // SAFETY: the caller guarantees the memory, and `address` its bounds. `new` has checked
            // that pieces of a page do not overlap, and that pages do not.
            IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(start, buffer.bytes) })
        };
        self.in_order().map(slice).collect()
    }

    fn in_order(&self) -> impl Iterator<Item = Buffer> + '_ {
        self.parts.iter().flatten().map(|&at| self.buffers[at])
    }

    /// Panics instead of leaving the pool.
    fn address(&self, buffer: Buffer, page: usize) -> *mut u8 {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        std::ptr::with_exposed_provenance_mut(buffer.base + page * buffer.stride)
    }
}

fn end_of(buffer: &Buffer, pages: usize) -> Option<usize> {
    let last = buffer.stride.checked_mul(pages - 1)?;
    buffer.base.checked_add(last)?.checked_add(buffer.bytes)
}

/// Whether the pieces of two buffers are adjacent in each page of one region.
fn interleave(a: &Buffer, b: &Buffer) -> bool {
    let (low, high) = if a.base <= b.base { (a, b) } else { (b, a) };
    if low.stride != high.stride || low.stride == 0 {
        return false;
    }
    let offset = (high.base - low.base) % low.stride;
    offset >= low.bytes && low.stride - offset >= high.bytes
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn buffer(base: usize, stride: usize, bytes: usize) -> Buffer {
        Buffer {
            base,
            stride,
            bytes,
        }
    }

    fn pool(memory: &mut [u8]) -> Pool {
        let base = memory.as_mut_ptr().expose_provenance();
        let half = memory.len() / 2;
        let buffers = vec![buffer(base, 8, 8), buffer(base + half, 8, 8)];
        Pool::new(buffers, vec![vec![0], vec![1]], 4, half / 8).unwrap()
    }

    #[test]
    fn a_page_is_read_and_written_in_the_memory_of_sglang() {
        let mut memory: Vec<u8> = (0..64).collect();
        let pool = pool(&mut memory);
        let pages = pool.pages(&[8, 9, 10, 11, 0, 1, 2, 3], 2).unwrap();
        assert_eq!(pages, [2, 0]);
        // SAFETY: the memory belongs to this test, and no other code uses it during the call.
        let pieces = unsafe { pool.pieces(pages[0]) };
        assert_eq!(&*pieces[0], &[16, 17, 18, 19, 20, 21, 22, 23]);
        assert_eq!(&*pieces[1], &[48, 49, 50, 51, 52, 53, 54, 55]);
        // SAFETY: as above, and the pieces for reading are no longer used.
        let mut pieces = unsafe { pool.pieces_mut(pages[1]) };
        pieces[1].fill(7);
        assert_eq!(memory[32..40], [7; 8]);
        assert_eq!(memory[40], 40);
    }

    #[test]
    fn indices_that_identify_no_page_are_refused() {
        let mut memory = vec![0; 64];
        let pool = pool(&mut memory);
        let refused = |indices: &[i64], keys| pool.pages(indices, keys).unwrap_err();
        assert!(matches!(refused(&[0, 1, 2], 1), PoolError::Count { .. }));
        assert_eq!(refused(&[1, 2, 3, 4], 1), PoolError::Index(1));
        assert_eq!(refused(&[16, 17, 18, 19], 1), PoolError::Index(16));
        assert_eq!(refused(&[-4, 0, 0, 0], 1), PoolError::Index(-4));
        assert_eq!(refused(&[4, 5, 6, 7, 4, 5, 6, 7], 2), PoolError::Twice(4));
    }

    #[test]
    fn buffers_that_could_overlap_are_refused() {
        let parts = || vec![vec![0], vec![1]];
        let make = |a, b| Pool::new(vec![a, b], parts(), 1, 4);
        assert!(make(buffer(4096, 8, 8), buffer(4128, 8, 8)).is_ok());
        assert!(make(buffer(4096, 16, 8), buffer(4104, 16, 8)).is_ok());
        for (a, b) in [
            (buffer(4096, 8, 8), buffer(4120, 8, 8)),
            (buffer(4096, 16, 8), buffer(4100, 16, 8)),
            (buffer(4096, 4, 8), buffer(8192, 8, 8)),
            (buffer(usize::MAX - 8, 8, 8), buffer(4096, 8, 8)),
            (buffer(0, 8, 8), buffer(4096, 8, 8)),
        ] {
            assert!(make(a, b).is_err(), "{a:?} {b:?}");
        }
        let one = || vec![buffer(4096, 8, 8)];
        assert!(Pool::new(one(), vec![vec![0], vec![0]], 1, 4).is_err());
        assert!(Pool::new(one(), vec![vec![]], 1, 4).is_err());
        assert!(Pool::new(one(), vec![vec![0]], 0, 4).is_err());
    }

    #[test]
    fn the_ranges_of_a_pool_cover_its_buffers_once() {
        let ranges = |a, b| {
            let pool = Pool::new(vec![a, b], vec![vec![0], vec![1]], 1, 4);
            pool.unwrap().ranges()
        };
        let apart = ranges(buffer(8192, 16, 8), buffer(4096, 8, 8));
        assert_eq!(apart, [4096..4128, 8192..8248]);
        let interleaved = ranges(buffer(4096, 16, 8), buffer(4104, 16, 8));
        let whole = 4096..4160;
        assert_eq!(interleaved, [whole]);
    }

    #[test]
    fn a_part_may_be_joined_from_pieces_of_several_buffers() {
        let mut memory: Vec<u8> = (0..32).collect();
        let base = memory.as_mut_ptr().expose_provenance();
        let buffers = vec![buffer(base, 4, 4), buffer(base + 16, 4, 4)];
        let pool = Pool::new(buffers, vec![vec![1, 0]], 1, 4).unwrap();
        assert_eq!(pool.part_bytes(), [8]);
        assert!(!pool.is_whole());
        // SAFETY: the memory belongs to this test, and no other code uses it during the call.
        let pieces = unsafe { pool.pieces(1) };
        let bytes: Vec<u8> = pieces.iter().flat_map(|piece| piece.to_vec()).collect();
        assert_eq!(bytes, [20, 21, 22, 23, 4, 5, 6, 7]);
    }
}
