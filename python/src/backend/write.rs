//! Storing pages: from the host pool, or from flat buffers.

use std::io::IoSlice;
use std::time::{Duration, Instant};

use larder_engine::{PageStore, PutOptions, PutPage, PutStatus, Refusal};
use larder_format::PageKey;

use super::{Backend, Chain, Memory, Registered, refuse, steadily};
use crate::bounce::Shape;
use crate::meters::Count;
use crate::trial::Way;

/// Bytes of one put: between two of them the clock is looked at.
const PUT_BYTES: usize = 256 << 20;

/// Longest wait for room for a page, so that reclaim can catch up.
const ROOM_PATIENCE: Duration = Duration::from_millis(500);

impl Backend {
    /// Stores pages of the host pool; whether there is nothing left to do for each.
    pub fn set(&self, pool: &str, keys: &[PageKey], indices: &[i64], chain: Chain) -> Vec<bool> {
        let Some(registered) = self.pool(pool) else {
            tracing::warn!(pool, "a pool that was never registered is to be stored");
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
        // SAFETY: SGLang keeps the pool mapped until `close`, which waits for this call, and holds these slots' locks until it has
        // been answered.
        let memory: Vec<_> = pages
            .iter()
            .map(|&page| unsafe { memory.pieces(page) })
            .collect();
        self.write(&registered, keys, &memory, chain)
    }

    /// Stores flat pages; whether there is nothing left to do for each.
    pub fn set_flat(
        &self,
        pool: &str,
        keys: &[PageKey],
        buffers: &[&[u8]],
        chain: Chain,
    ) -> Vec<bool> {
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
        let memory: Vec<_> = buffers
            .iter()
            .map(|buffer| cut(buffer, &registered.parts))
            .collect();
        self.write(&registered, keys, &memory, chain)
    }

    fn write(
        &self,
        pool: &Registered,
        keys: &[PageKey],
        memory: &[Vec<IoSlice<'_>>],
        chain: Chain,
    ) -> Vec<bool> {
        if self.follows_what_was_left_out(pool, keys, chain) {
            self.meters.add(Count::Dropped, keys.len());
            return vec![true; keys.len()];
        }
        let started = Instant::now();
        let way = pool.puts.way();
        let statuses = self.write_pieces(pool, way, keys, memory, chain, started + self.timeout);
        let stored = self.count_puts(&statuses);
        self.count_way(way, keys.len());
        let took = started.elapsed();
        let bytes = (stored * pool.page_bytes()) as u64;
        self.meters.set(keys.len(), bytes, took);
        if stored == keys.len()
            && let Some(chosen) = pool.puts.ran(way, bytes, took)
        {
            tracing::info!("{}: writes go {chosen}", pool.described);
        }
        if statuses.iter().any(|status| is_left_out(*status)) {
            *pool.left_out.lock() = keys.last().copied();
        }
        statuses
            .into_iter()
            .map(|status| status.is_present() || is_left_out(status))
            .collect()
    }

    /// Whether the pages before these were left out, so that these could not be reached. With the keys before a batch SGLang says so.
    fn follows_what_was_left_out(&self, pool: &Registered, keys: &[PageKey], chain: Chain) -> bool {
        let mut left_out = pool.left_out.lock();
        let follows = left_out.is_some() && *left_out == chain.before;
        *left_out = if follows { keys.last().copied() } else { None };
        follows
    }

    fn write_pieces(
        &self,
        pool: &Registered,
        way: Way,
        keys: &[PageKey],
        memory: &[Vec<IoSlice<'_>>],
        chain: Chain,
        deadline: Instant,
    ) -> Vec<PutStatus> {
        let per_put = (PUT_BYTES / pool.page_bytes().max(1)).max(1);
        let mut statuses: Vec<PutStatus> = Vec::with_capacity(keys.len());
        while statuses.len() < keys.len() {
            let at = statuses.len();
            let end = (at + per_put).min(keys.len());
            let before = if at == 0 {
                chain.before
            } else {
                Some(keys[at - 1])
            };
            let depth = chain
                .depth
                .saturating_add(u32::try_from(at).unwrap_or(u32::MAX));
            let chain = Chain { before, depth };
            let run = (&keys[at..end], &memory[at..end]);
            let some = self.write_once(pool, way, run.0, run.1, chain);
            let stop = some
                .iter()
                .copied()
                .find(|status| !status.is_present())
                .or_else(|| late(deadline));
            statuses.extend(some);
            if let Some(why) = stop {
                // Behind a page that is not there nothing can be reached.
                statuses.resize(keys.len(), why);
            }
        }
        statuses
    }

    fn write_once(
        &self,
        pool: &Registered,
        way: Way,
        keys: &[PageKey],
        memory: &[Vec<IoSlice<'_>>],
        chain: Chain,
    ) -> Vec<PutStatus> {
        const GONE: PutStatus = PutStatus::Refused(Refusal::Closed);
        let gone = || vec![GONE; keys.len()];
        let (Some(guard), Some(space)) = (self.store(), pool.space) else {
            return gone();
        };
        let Some(store) = guard.as_ref() else {
            return gone();
        };
        let write = |keys: &[PageKey], memory: &[Vec<IoSlice<'_>>], chain: Chain| {
            let pages: Vec<PutPage<'_>> = keys
                .iter()
                .zip(memory)
                .enumerate()
                .map(|(at, (key, parts))| PutPage {
                    key: *key,
                    parent: at.checked_sub(1).map(|at| keys[at]).or(chain.before),
                    depth: chain
                        .depth
                        .saturating_add(u32::try_from(at).unwrap_or(u32::MAX)),
                    parts,
                })
                .collect();
            let wait = ROOM_PATIENCE;
            let some_refused = |statuses: &Vec<PutStatus>| statuses.contains(&GONE);
            // What was stored before the owner went is a duplicate the second time.
            steadily(store, some_refused, || {
                store.put(space, &pages, PutOptions { wait })
            })
        };
        match way {
            Way::Direct => write(keys, memory, chain),
            // Gathering what is stored already would be for nothing.
            Way::Bounce
                if !self.syncs_always && store.contains(space, keys).iter().all(|is| *is) =>
            {
                vec![PutStatus::Duplicate; keys.len()]
            }
            Way::Bounce => {
                let shape = Shape::new(&pool.parts);
                self.arenas[1].write(&shape, keys, memory, chain, write)
            }
        }
    }

    fn count_puts(&self, statuses: &[PutStatus]) -> usize {
        let (mut stored, mut duplicate, mut dropped) = (0, 0, 0);
        for status in statuses {
            match status {
                PutStatus::Stored => stored += 1,
                PutStatus::Duplicate => duplicate += 1,
                status if is_left_out(*status) => dropped += 1,
                PutStatus::Refused(_) | PutStatus::Failed(_) => {}
            }
        }
        self.meters.add(Count::Stored, stored);
        self.meters.add(Count::Duplicate, duplicate);
        self.meters.add(Count::Dropped, dropped);
        self.meters
            .add(Count::Failed, statuses.len() - stored - duplicate - dropped);
        stored
    }
}

/// A flat page's parts.
fn cut<'a>(mut page: &'a [u8], part_bytes: &[usize]) -> Vec<IoSlice<'a>> {
    let mut parts = Vec::with_capacity(part_bytes.len());
    for &bytes in part_bytes {
        let (part, rest) = page.split_at(bytes);
        parts.push(IoSlice::new(part));
        page = rest;
    }
    parts
}

/// Whether a page was deliberately not stored.
fn is_left_out(status: PutStatus) -> bool {
    matches!(status, PutStatus::Refused(Refusal::NoSpace | Refusal::Busy))
}

fn late(deadline: Instant) -> Option<PutStatus> {
    (Instant::now() >= deadline).then_some(PutStatus::Refused(Refusal::Busy))
}
