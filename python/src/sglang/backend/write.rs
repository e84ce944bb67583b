//! Storing pages: from the host pool, or from flat buffers.

use std::io::IoSlice;
use std::time::{Duration, Instant};

use larder_engine::{PutOptions, PutStatus, Refusal};
use larder_format::PageKey;
use larder_handle::chain::{self, Chain};
use larder_handle::store::Patience;

use super::{Backend, Registered};
use crate::sglang::bounce::Shape;
use crate::sglang::explained::Cause;
use crate::sglang::meters::Count;
use crate::sglang::trial::Way;

/// Bytes per put. The deadline is checked between two puts.
const PUT_BYTES: usize = 256 << 20;

/// Longest wait for room for a page, so that reclaim can free segments.
const ROOM_PATIENCE: Duration = Duration::from_millis(500);

impl Backend {
    /// Stores pages of the host pool: a chain, or each by itself. Returns for each whether nothing
    /// is left to do.
    pub fn set(
        &self,
        pool: &str,
        keys: &[PageKey],
        indices: &[i64],
        chain: Option<Chain>,
    ) -> Vec<bool> {
        self.with_slots(pool, keys.len(), indices, |registered, pool, pages| {
            // SAFETY: SGLang keeps the pool mapped until `close` has returned that this call is
            // over, and holds the locks of these slots until the call returns.
            let memory = pages.iter().map(|&page| unsafe { pool.pieces(page) });
            self.write(registered, keys, &memory.collect::<Vec<_>>(), chain)
        })
    }

    /// The same for flat pages.
    pub fn set_flat(
        &self,
        pool: &str,
        keys: &[PageKey],
        buffers: &[&[u8]],
        chain: Option<Chain>,
    ) -> Vec<bool> {
        let lengths: Vec<usize> = buffers.iter().map(|buffer| buffer.len()).collect();
        self.with_flat(pool, keys.len(), &lengths, |registered| {
            let memory = buffers.iter().map(|buffer| cut(buffer, &registered.parts));
            self.write(registered, keys, &memory.collect::<Vec<_>>(), chain)
        })
    }

    fn write(
        &self,
        pool: &Registered,
        keys: &[PageKey],
        memory: &[Vec<IoSlice<'_>>],
        chain: Option<Chain>,
    ) -> Vec<bool> {
        if self.follows_what_was_left_out(pool, keys, chain) {
            self.meters.add(Count::Dropped, keys.len());
            self.explained.explain(Cause::Tail);
            return vec![true; keys.len()];
        }
        let started = Instant::now();
        let statuses = self.write_pieces(pool, keys, memory, chain, started + self.timeout);
        let stored = self.count_puts(&statuses);
        self.meters
            .set(keys.len(), pool.bytes_of(stored), started.elapsed());
        if statuses.iter().any(|status| is_left_out(*status)) {
            *pool.left_out.lock() = keys.last().copied();
        }
        statuses
            .into_iter()
            .map(|status| status.is_present() || is_left_out(status))
            .collect()
    }

    /// Whether the pages before these were left out, so these would be unreachable. Detected from
    /// the keys before a batch, which SGLang passes in.
    fn follows_what_was_left_out(
        &self,
        pool: &Registered,
        keys: &[PageKey],
        chain: Option<Chain>,
    ) -> bool {
        let before = chain.and_then(|chain| chain.before);
        let mut left_out = pool.left_out.lock();
        let follows = left_out.is_some() && *left_out == before;
        *left_out = if follows { keys.last().copied() } else { None };
        follows
    }

    fn write_pieces(
        &self,
        pool: &Registered,
        keys: &[PageKey],
        memory: &[Vec<IoSlice<'_>>],
        chain: Option<Chain>,
        deadline: Instant,
    ) -> Vec<PutStatus> {
        let per_put = (PUT_BYTES / pool.page_bytes().max(1)).max(1);
        let mut statuses: Vec<PutStatus> = Vec::with_capacity(keys.len());
        while statuses.len() < keys.len() {
            let at = statuses.len();
            let (way, pages) = pool.puts.next(keys.len() - at, pool.page_bytes());
            let run = at..at + pages.min(per_put);
            let begun = Instant::now();
            let chain = chain.map(|chain| chain.after(&keys[..at]));
            let (some_keys, memory) = (&keys[run.clone()], &memory[run]);
            let some = self.write_once(pool, way, some_keys, memory, chain, deadline);
            self.count_way(way, some.len());
            let bytes = pool.bytes_of(some.len());
            if some.iter().all(|status| *status == PutStatus::Stored)
                && let Some(way) = pool.puts.ran(way, bytes, begun.elapsed())
            {
                tracing::info!("{}: writes go {way}", pool.described);
            }
            let stop = some
                .iter()
                .copied()
                .find(|status| !status.is_present())
                .or_else(|| late(deadline));
            statuses.extend(some);
            if let Some(why) = stop {
                // Pages of a chain are unreachable behind a missing page, and there is no room for
                // other pages either.
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
        chain: Option<Chain>,
        deadline: Instant,
    ) -> Vec<PutStatus> {
        const GONE: PutStatus = PutStatus::Refused(Refusal::Closed);
        let Some((_store, space)) = self.space_of(pool) else {
            return vec![GONE; keys.len()];
        };
        let write = |keys: &[PageKey], memory: &[Vec<IoSlice<'_>>], chain| {
            let memory = memory.iter().map(Vec::as_slice);
            let pages = chain::pages(keys, chain, memory);
            let options = PutOptions::waiting(ROOM_PATIENCE);
            space.put_pages(&pages, options, Patience::Put(deadline))
        };
        match way {
            Way::Direct => write(keys, memory, chain),
            // Gathering stored pages again would be useless.
            Way::Bounce if !self.syncs_always && space.held_now(keys).iter().all(|is| *is) => {
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
                _ => {}
            }
        }
        let failed = statuses.len() - stored - duplicate - dropped;
        for cause in causes(statuses) {
            self.explained.explain(cause);
        }
        self.meters.add(Count::Stored, stored);
        self.meters.add(Count::Duplicate, duplicate);
        self.meters.add(Count::Dropped, dropped);
        self.meters.add(Count::Failed, failed);
        stored
    }
}

/// Why pages were not stored: the cause of omitted pages, and the cause of failed pages.
fn causes(statuses: &[PutStatus]) -> impl Iterator<Item = Cause> {
    let has = |refusal| statuses.contains(&PutStatus::Refused(refusal));
    let left_out = statuses.iter().any(|status| is_left_out(*status));
    let failed = statuses
        .iter()
        .any(|status| !status.is_present() && !is_left_out(*status));
    let left_out = left_out.then(|| match has(Refusal::ReadOnlyService) {
        true => Cause::ReadOnly,
        false => Cause::NoRoom,
    });
    let failed = failed.then(|| match has(Refusal::Closed) {
        true => Cause::NoStore,
        false => Cause::Failed,
    });
    left_out.into_iter().chain(failed)
}

/// The parts of a flat page.
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
    matches!(
        status,
        PutStatus::Refused(
            Refusal::NoSpace
                | Refusal::Busy
                | Refusal::Unreachable
                | Refusal::ReadOnlyService
                | Refusal::NotAdmitted
                | Refusal::Budget
                | Refusal::Quota
                | Refusal::Erased
                | Refusal::KeyringFull
        )
    )
}

fn late(deadline: Instant) -> Option<PutStatus> {
    (Instant::now() >= deadline).then_some(PutStatus::Refused(Refusal::Busy))
}

#[cfg(test)]
mod tests {
    use larder_engine::PutFailure;

    use super::*;

    #[test]
    fn pages_that_read_only_service_refuses_are_left_out_for_a_cause_of_its_own() {
        let refused = PutStatus::Refused;
        let read_only = refused(Refusal::ReadOnlyService);
        let failed = PutStatus::Failed(PutFailure::Write);
        assert!(is_left_out(read_only));
        let cases: [(&[PutStatus], &[Cause]); 6] = [
            (&[PutStatus::Stored, PutStatus::Duplicate], &[]),
            (&[PutStatus::Stored, read_only], &[Cause::ReadOnly]),
            // The wait for room ends when the volume is put into read-only service.
            (&[refused(Refusal::Busy), read_only], &[Cause::ReadOnly]),
            (&[refused(Refusal::NoSpace)], &[Cause::NoRoom]),
            (&[failed, read_only], &[Cause::ReadOnly, Cause::Failed]),
            (&[refused(Refusal::Closed)], &[Cause::NoStore]),
        ];
        for (statuses, causes) in cases {
            let found: Vec<Cause> = super::causes(statuses).collect();
            assert_eq!(found, causes, "{statuses:?}");
        }
    }
}
