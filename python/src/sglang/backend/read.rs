//! Reading pages: into the host pool, or into flat buffers.

use std::io::IoSliceMut;
use std::time::Instant;

use larder_engine::{Count as Counted, GetPage, GetStatus, MissReason};
use larder_format::PageKey;
use larder_handle::store::Patience;

use super::{Backend, Registered};
use crate::sglang::bounce::Shape;
use crate::sglang::explained::Cause;
use crate::sglang::meters::Count;
use crate::sglang::trial::Way;

/// The status of a page while there is no store, or the store has no owner.
const CLOSED: GetStatus = GetStatus::Miss(MissReason::Closed);

impl Backend {
    /// Reads pages into the host pool. Returns whether each was read.
    pub fn get(&self, pool: &str, keys: &[PageKey], indices: &[i64]) -> Vec<bool> {
        self.with_slots(pool, keys.len(), indices, |registered, pool, pages| {
            // SAFETY: SGLang keeps the pool mapped until `close` has returned that this call is
            // over, and touches none of these slots before the call returns. `pages` contains each
            // of them once.
            let memory = pages.iter().map(|&page| unsafe { pool.pieces_mut(page) });
            self.read(registered, keys, memory.collect())
        })
    }

    /// Reads pages into flat buffers. Returns whether each was read.
    pub fn get_flat(&self, pool: &str, keys: &[PageKey], buffers: Vec<&mut [u8]>) -> Vec<bool> {
        let lengths: Vec<usize> = buffers.iter().map(|buffer| buffer.len()).collect();
        self.with_flat(pool, keys.len(), &lengths, |registered| {
            let memory = buffers
                .into_iter()
                .map(|buffer| cut_mut(buffer, &registered.parts))
                .collect();
            self.read(registered, keys, memory)
        })
    }

    /// Reads pages into these pieces of memory.
    fn read(
        &self,
        pool: &Registered,
        keys: &[PageKey],
        mut memory: Vec<Vec<IoSliceMut<'_>>>,
    ) -> Vec<bool> {
        let started = Instant::now();
        let deadline = started + self.timeout;
        let mut statuses = Vec::with_capacity(keys.len());
        while statuses.len() < keys.len() {
            let at = statuses.len();
            let (way, pages) = pool.gets.next(keys.len() - at, pool.page_bytes());
            let run = at..at + pages;
            let begun = Instant::now();
            let memory = &mut memory[run.clone()];
            let some = self.read_pieces(pool, way, &keys[run], memory, deadline);
            self.count_way(way, pages);
            if some.iter().all(|status| status.is_hit())
                && let Some(way) = pool.gets.ran(way, pool.bytes_of(pages), begun.elapsed())
            {
                tracing::info!("{}: reads go {way}", pool.described);
            }
            statuses.extend(some);
        }
        let read = self.count_gets(&statuses);
        self.count_served(pool, read);
        let (bytes, took) = (pool.bytes_of(read), started.elapsed());
        self.meters.got(keys.len(), bytes, took);
        if let Some(worth) = &self.worth {
            worth.read(bytes, took);
        }
        statuses.iter().map(|status| status.is_hit()).collect()
    }

    fn read_pieces(
        &self,
        pool: &Registered,
        way: Way,
        keys: &[PageKey],
        memory: &mut [Vec<IoSliceMut<'_>>],
        deadline: Instant,
    ) -> Vec<GetStatus> {
        let Some((_store, space)) = self.space_of(pool) else {
            return vec![CLOSED; keys.len()];
        };
        let read = |keys: &[PageKey], memory: &mut [Vec<IoSliceMut<'_>>]| {
            let mut pages: Vec<GetPage<'_, '_>> = keys
                .iter()
                .zip(&mut *memory)
                .map(|(key, parts)| GetPage { key: *key, parts })
                .collect();
            space.get_pages(&mut pages, Some(deadline), Patience::Read(None))
        };
        match way {
            Way::Direct => read(keys, memory),
            Way::Bounce => {
                let shape = Shape::new(&pool.parts);
                self.arenas[0].read(&shape, keys, memory, read)
            }
        }
    }

    /// Counts the tokens of pages that were read, on the rank and for the pool that count requests.
    fn count_served(&self, pool: &Registered, pages: usize) {
        if !self.server.is_first_rank() || !pool.is_anchor || pages == 0 {
            return;
        }
        let rate = self.config.prefill_rate.map(|rate| rate.get().into());
        if let Some((_store, space)) = self.space_of(pool) {
            space.count(Counted::Served {
                tokens: (pages * pool.page_tokens) as u64,
                prefill_rate: rate,
            });
        }
    }

    fn count_gets(&self, statuses: &[GetStatus]) -> usize {
        let (mut read, mut damaged, mut late) = (0, 0, 0);
        for status in statuses {
            match status {
                GetStatus::Hit => read += 1,
                GetStatus::Miss(
                    MissReason::Damaged | MissReason::Unfinished | MissReason::ReadError,
                ) => damaged += 1,
                GetStatus::Miss(MissReason::Deadline | MissReason::Hung) => late += 1,
                GetStatus::Miss(_) => {}
            }
        }
        if damaged > 0 {
            self.explained.explain(Cause::Damaged);
        }
        if late > 0 {
            self.explained.explain(Cause::Late);
        }
        self.meters.add(Count::Read, read);
        self.meters.add(Count::Missed, statuses.len() - read);
        self.meters.add(Count::Damaged, damaged);
        self.meters.add(Count::Late, late);
        read
    }
}

/// The parts of a flat page, for writing.
fn cut_mut<'a>(mut page: &'a mut [u8], part_bytes: &[usize]) -> Vec<IoSliceMut<'a>> {
    let mut parts = Vec::with_capacity(part_bytes.len());
    for &bytes in part_bytes {
        let (part, rest) = page.split_at_mut(bytes);
        parts.push(IoSliceMut::new(part));
        page = rest;
    }
    parts
}
