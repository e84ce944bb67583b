//! Reading pages: into the host pool, or into flat buffers.

use std::io::IoSliceMut;
use std::time::Instant;

use larder_engine::{GetPage, GetStatus, MissReason, PageStore};
use larder_format::PageKey;

use super::{Backend, Memory, Registered, refuse, steadily};
use crate::bounce::Shape;
use crate::meters::Count;
use crate::trial::Way;

/// What a page is while there is no store, or nobody in it who decides.
const CLOSED: GetStatus = GetStatus::Miss(MissReason::Closed);

impl Backend {
    /// Reads pages into the host pool; whether each is there now.
    pub fn get(&self, pool: &str, keys: &[PageKey], indices: &[i64]) -> Vec<bool> {
        let Some(registered) = self.pool(pool) else {
            tracing::warn!(pool, "a pool that was never registered is to be read into");
            return vec![false; keys.len()];
        };
        let memory = match &registered.memory {
            Memory::Logical => return vec![true; keys.len()],
            Memory::Flat(_) => return vec![false; keys.len()],
            Memory::Mapped(memory) => memory,
        };
        let pages = match memory.pages(indices, keys.len()) {
            Ok(pages) => pages,
            Err(error) => return refuse(pool, keys.len(), &error),
        };
        // SAFETY: SGLang keeps the pool mapped until `close`, which waits for this call, and touches none of these slots before it
        // returns; `pages` names each of them once.
        let memory = pages.iter().map(|&page| unsafe { memory.pieces_mut(page) });
        self.read(&registered, keys, memory.collect())
    }

    /// Reads pages into flat buffers; whether each is there now.
    pub fn get_flat(&self, pool: &str, keys: &[PageKey], buffers: Vec<&mut [u8]>) -> Vec<bool> {
        let Some(registered) = self.pool(pool) else {
            return vec![false; keys.len()];
        };
        if matches!(registered.memory, Memory::Logical) {
            return vec![true; keys.len()];
        }
        let fits = buffers.len() == keys.len()
            && buffers
                .iter()
                .all(|buffer| buffer.len() == registered.page_bytes());
        if !fits {
            tracing::warn!(pool, "flat pages of another size than the pool's");
            return vec![false; keys.len()];
        }
        let memory = buffers
            .into_iter()
            .map(|buffer| cut_mut(buffer, &registered.parts))
            .collect();
        self.read(&registered, keys, memory)
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
        let way = pool.gets.way();
        let statuses = self.read_pieces(pool, way, keys, &mut memory, deadline);
        let read = self.count_gets(&statuses);
        self.count_way(way, keys.len());
        let bytes = (read * pool.page_bytes()) as u64;
        let took = started.elapsed();
        self.meters.got(keys.len(), bytes, took);
        if read == keys.len()
            && let Some(chosen) = pool.gets.ran(way, bytes, took)
        {
            tracing::info!("{}: reads go {chosen}", pool.described);
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
        let (Some(guard), Some(space)) = (self.store(), pool.space) else {
            return vec![CLOSED; keys.len()];
        };
        let Some(store) = guard.as_ref() else {
            return vec![CLOSED; keys.len()];
        };
        let some_missed = |statuses: &Vec<GetStatus>| statuses.iter().any(|page| !page.is_hit());
        let read = |keys: &[PageKey], memory: &mut [Vec<IoSliceMut<'_>>]| {
            steadily(store, some_missed, || {
                let mut pages: Vec<GetPage<'_, '_>> = keys
                    .iter()
                    .zip(&mut *memory)
                    .map(|(key, parts)| GetPage { key: *key, parts })
                    .collect();
                store.get(space, &mut pages, Some(deadline))
            })
        };
        match way {
            Way::Direct => read(keys, memory),
            Way::Bounce => {
                let shape = Shape::new(&pool.parts);
                self.arenas[0].read(&shape, keys, memory, read)
            }
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
        self.meters.add(Count::Read, read);
        self.meters.add(Count::Missed, statuses.len() - read);
        self.meters.add(Count::Damaged, damaged);
        self.meters.add(Count::Late, late);
        read
    }
}

/// A flat page's parts, to be filled.
fn cut_mut<'a>(mut page: &'a mut [u8], part_bytes: &[usize]) -> Vec<IoSliceMut<'a>> {
    let mut parts = Vec::with_capacity(part_bytes.len());
    for &bytes in part_bytes {
        let (part, rest) = page.split_at_mut(bytes);
        parts.push(IoSliceMut::new(part));
        page = rest;
    }
    parts
}
