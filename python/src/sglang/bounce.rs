//! Transfers through a bounce buffer: aligned, on huge pages, reused.
//!
//! For pools with scattered parts, which are gathered here into storage order, and for pools that
//! the device accesses more slowly than this memory. There is one [`Arena`] per direction. SGLang
//! has one thread for reads and one for writes; any other thread waits.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};

use larder_engine::{AlignedBuf, GetStatus, MissReason, PutStatus, Refusal};
use larder_format::PageKey;
use larder_handle::chain::Chain;
use larder_sync::Mutex;

use crate::sglang::trial::RUN_BYTES as ARENA_BYTES;

/// Pieces of a batch that are read concurrently.
const LANES: usize = 2;

/// Number of pieces of a batch, if that makes them no longer than a lane.
const PIECES: usize = 8;

/// Alignment of parts, in bytes.
const ALIGN: usize = 4096;

/// The location of the parts of a page in an arena.
pub struct Shape {
    /// Offset and bytes of each part.
    parts: Vec<(usize, usize)>,
    page_bytes: usize,
}

impl Shape {
    /// The shape for parts of these lengths.
    #[must_use]
    pub fn new(part_bytes: &[usize]) -> Shape {
        let mut page_bytes = 0;
        let mut parts = Vec::with_capacity(part_bytes.len());
        for &bytes in part_bytes {
            parts.push((page_bytes, bytes));
            page_bytes += bytes.next_multiple_of(ALIGN);
        }
        Shape { parts, page_bytes }
    }

    /// Bytes of memory for so many pages.
    #[must_use]
    pub fn bytes_of(&self, pages: usize) -> usize {
        pages * self.page_bytes
    }

    /// The parts of each page in memory for whole pages.
    pub fn pages_mut<'a>(&self, memory: &'a mut [u8]) -> Vec<Vec<IoSliceMut<'a>>> {
        let pages = memory.chunks_exact_mut(self.page_bytes);
        pages.map(|page| parts_mut(self, page)).collect()
    }

    fn pages_at_once(&self) -> usize {
        (ARENA_BYTES / self.page_bytes.max(1)).max(1)
    }
}

/// Memory for one direction: 64 MiB, or more if one page needs more. This size keeps a fast disk
/// busy.
#[derive(Default)]
pub struct Arena {
    memory: Mutex<Option<AlignedBuf>>,
    bytes: AtomicUsize,
}

impl Arena {
    /// Bytes of the arena. Does not wait for its users.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The memory, grown to the size needed for pages of this shape. `None` if it cannot be
    /// allocated.
    fn grown<'a>(&self, memory: &'a mut Option<AlignedBuf>, shape: &Shape) -> Option<&'a mut [u8]> {
        let bytes = shape.pages_at_once() * shape.page_bytes;
        if memory.as_ref().is_none_or(|memory| memory.len() < bytes) {
            *memory = None;
            match AlignedBuf::zeroed(bytes) {
                Ok(larger) => *memory = Some(larger),
                Err(error) => {
                    tracing::warn!(%error, bytes, "no memory for a buffer: the batch misses");
                }
            }
            let bytes = memory.as_ref().map_or(0, |memory| memory.len());
            self.bytes.store(bytes, Ordering::Relaxed);
        }
        memory.as_deref_mut()
    }

    /// Reads pages with `read`, some at a time, and scatters the arrived pages to `memory`. Two
    /// lanes let the device work on some pages while others are copied.
    pub fn read(
        &self,
        shape: &Shape,
        keys: &[PageKey],
        memory: &mut [Vec<IoSliceMut<'_>>],
        read: impl Fn(&[PageKey], &mut [Vec<IoSliceMut<'_>>]) -> Vec<GetStatus> + Sync,
    ) -> Vec<GetStatus> {
        let mut held = self.memory.lock();
        let closed = vec![GetStatus::Miss(MissReason::Closed); keys.len()];
        let Some(arena) = self.grown(&mut held, shape) else {
            return closed;
        };
        let lanes = LANES.min(shape.pages_at_once()).min(keys.len());
        let room = shape.pages_at_once() / lanes.max(1);
        let some = keys.len().div_ceil(PIECES).clamp(1, room);
        let statuses = Mutex::new(closed);
        let pieces = Mutex::new((0..).zip(keys.chunks(some).zip(memory.chunks_mut(some))));
        let work = |lane: &mut [u8]| {
            loop {
                let Some((at, (keys, memory))) = pieces.lock().next() else {
                    return;
                };
                let mut pages: Vec<Vec<IoSliceMut<'_>>> = lane
                    .chunks_exact_mut(shape.page_bytes)
                    .take(keys.len())
                    .map(|page| parts_mut(shape, page))
                    .collect();
                let found = read(keys, &mut pages);
                for ((page, pieces), status) in pages.iter().zip(memory).zip(&found) {
                    if status.is_hit() {
                        copy(page, pieces);
                    }
                }
                statuses.lock()[at * some..][..keys.len()].copy_from_slice(&found);
            }
        };
        std::thread::scope(|scope| {
            let mut lanes = arena.chunks_exact_mut(room * shape.page_bytes).take(lanes);
            let own = lanes.next();
            for lane in lanes {
                let thread = std::thread::Builder::new().name("larder-bounce".to_owned());
                // Without the thread, this thread does all the work.
                let _ = thread.spawn_scoped(scope, || work(lane));
            }
            own.map(work)
        });
        statuses.into_inner()
    }

    /// Gathers pages from `memory`, some at a time, and stores them with `write`. Stops after a
    /// page that was not stored: later pages of a chain would be unreachable, and there is no room
    /// for other pages.
    pub fn write(
        &self,
        shape: &Shape,
        keys: &[PageKey],
        memory: &[Vec<IoSlice<'_>>],
        chain: Option<Chain>,
        write: impl Fn(&[PageKey], &[Vec<IoSlice<'_>>], Option<Chain>) -> Vec<PutStatus>,
    ) -> Vec<PutStatus> {
        let mut held = self.memory.lock();
        let Some(arena) = self.grown(&mut held, shape) else {
            return vec![PutStatus::Refused(Refusal::Busy); keys.len()];
        };
        let mut statuses = Vec::with_capacity(keys.len());
        let some = shape.pages_at_once();
        for (at, (keys_now, memory)) in (0..).zip(keys.chunks(some).zip(memory.chunks(some))) {
            for (page, pieces) in arena.chunks_exact_mut(shape.page_bytes).zip(memory) {
                copy(pieces, &mut parts_mut(shape, page));
            }
            let pages: Vec<Vec<IoSlice<'_>>> = arena
                .chunks_exact(shape.page_bytes)
                .take(keys_now.len())
                .map(|page| parts(shape, page))
                .collect();
            let chain = chain.map(|chain| chain.after(&keys[..at * some]));
            let some = write(keys_now, &pages, chain);
            let stop = some.iter().copied().find(|status| !status.is_present());
            statuses.extend(some);
            if let Some(why) = stop {
                statuses.resize(keys.len(), why);
                break;
            }
        }
        statuses
    }
}

fn parts_mut<'a>(shape: &Shape, page: &'a mut [u8]) -> Vec<IoSliceMut<'a>> {
    let mut rest = page;
    let mut parts = Vec::with_capacity(shape.parts.len());
    for &(_, bytes) in &shape.parts {
        let (part, tail) = std::mem::take(&mut rest).split_at_mut(bytes.next_multiple_of(ALIGN));
        parts.push(IoSliceMut::new(&mut part[..bytes]));
        rest = tail;
    }
    parts
}

fn parts<'a>(shape: &Shape, page: &'a [u8]) -> Vec<IoSlice<'a>> {
    let part = |&(offset, bytes): &(usize, usize)| IoSlice::new(&page[offset..offset + bytes]);
    shape.parts.iter().map(part).collect()
}

/// Copies the bytes of a page between two lists of pieces with different boundaries.
fn copy(from: &[impl Deref<Target = [u8]>], to: &mut [IoSliceMut<'_>]) {
    let mut from = from.iter();
    let mut rest: &[u8] = &[];
    for piece in to {
        let mut to: &mut [u8] = piece;
        while !to.is_empty() {
            if rest.is_empty() {
                let Some(next) = from.next() else { return };
                rest = next;
            }
            let count = rest.len().min(to.len());
            let (now, later) = rest.split_at(count);
            let (here, there) = std::mem::take(&mut to).split_at_mut(count);
            here.copy_from_slice(now);
            (rest, to) = (later, there);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::collections::HashMap;
    use std::sync::Mutex as StdMutex;

    fn key(at: usize) -> PageKey {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&at.to_le_bytes());
        PageKey::from_bytes(bytes)
    }

    #[test]
    fn pages_are_read_back_unchanged_for_any_division_into_pieces() {
        // Two parts of 6 and 4 bytes, each gathered from two pieces, and more pages than fit in the
        // arena.
        let shape = Shape::new(&[6 << 20, 4 << 20]);
        let pieces = [2 << 20, 4 << 20, 3 << 20, 1 << 20];
        let count = 2 * shape.pages_at_once() + 1;
        let keys: Vec<PageKey> = (0..count).map(key).collect();
        let byte = |page: usize, piece: usize| u8::try_from(page * 4 + piece).unwrap();
        let made: Vec<Vec<Vec<u8>>> = (0..count)
            .map(|page| {
                let piece = |(at, bytes): (usize, &usize)| vec![byte(page, at); *bytes];
                pieces.iter().enumerate().map(piece).collect()
            })
            .collect();
        let memory: Vec<Vec<IoSlice<'_>>> = made
            .iter()
            .map(|page| page.iter().map(|piece| IoSlice::new(piece)).collect())
            .collect();
        let stored: StdMutex<HashMap<PageKey, Vec<Vec<u8>>>> = StdMutex::default();
        let seen: StdMutex<Vec<(Option<PageKey>, u32)>> = StdMutex::default();
        let arena = Arena::default();
        let statuses = arena.write(
            &shape,
            &keys,
            &memory,
            Some(Chain::default()),
            |keys, pages, chain| {
                let chain = chain.unwrap();
                seen.lock().unwrap().push((chain.before, chain.depth));
                for (key, parts) in keys.iter().zip(pages) {
                    let parts = parts.iter().map(|part| part.to_vec()).collect();
                    stored.lock().unwrap().insert(*key, parts);
                }
                vec![PutStatus::Stored; keys.len()]
            },
        );
        assert_eq!(statuses, vec![PutStatus::Stored; count]);
        let some = shape.pages_at_once();
        let depth = u32::try_from(some).unwrap();
        assert_eq!(
            *seen.lock().unwrap(),
            [
                (None, 0),
                (Some(keys[some - 1]), depth),
                (Some(keys[2 * some - 1]), 2 * depth)
            ]
        );
        let mut back: Vec<Vec<Vec<u8>>> = made
            .iter()
            .map(|page| page.iter().map(|piece| vec![0; piece.len()]).collect())
            .collect();
        let mut memory: Vec<Vec<IoSliceMut<'_>>> = back
            .iter_mut()
            .map(|page| {
                page.iter_mut()
                    .map(|piece| IoSliceMut::new(piece))
                    .collect()
            })
            .collect();
        let statuses = arena.read(&shape, &keys, &mut memory, |keys, pages| {
            for (key, parts) in keys.iter().zip(pages) {
                for (part, bytes) in parts.iter_mut().zip(&stored.lock().unwrap()[key]) {
                    part.copy_from_slice(bytes);
                }
            }
            vec![GetStatus::Hit; keys.len()]
        });
        assert_eq!(statuses, vec![GetStatus::Hit; count]);
        assert!(back == made);
    }

    #[test]
    fn a_missed_page_leaves_its_memory_unchanged() {
        let shape = Shape::new(&[4096]);
        let mut bytes = vec![7; 4096];
        let mut memory = vec![vec![IoSliceMut::new(&mut bytes)]];
        Arena::default().read(&shape, &[key(0)], &mut memory, |keys, _| {
            vec![GetStatus::Miss(MissReason::Absent); keys.len()]
        });
        assert_eq!(bytes, vec![7; 4096]);
    }

    #[test]
    fn nothing_is_written_after_a_refused_page() {
        let shape = Shape::new(&[ARENA_BYTES]);
        let page = vec![1; ARENA_BYTES];
        let memory = vec![vec![IoSlice::new(&page)]; 3];
        let keys: Vec<PageKey> = (0..3).map(key).collect();
        let calls = StdMutex::new(0);
        let refused = PutStatus::Refused(Refusal::NoSpace);
        let statuses = Arena::default().write(&shape, &keys, &memory, None, |_, _, _| {
            *calls.lock().unwrap() += 1;
            let first = *calls.lock().unwrap() == 1;
            vec![if first { PutStatus::Stored } else { refused }]
        });
        assert_eq!(statuses, [PutStatus::Stored, refused, refused]);
        assert_eq!(*calls.lock().unwrap(), 2);
    }
}
