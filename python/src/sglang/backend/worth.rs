//! Found pages that are computed faster than read: lookups do not report them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_engine::{AlignedBuf, Count as Counted, GetPage, GetStatus, MissReason};
use larder_format::PageKey;
use larder_handle::store::Patience;

use super::{Backend, Registered};
use crate::sglang::bounce::Shape;
use crate::sglang::explained::Cause;
use crate::sglang::hits::Policy;
use crate::sglang::meters::Count;
use crate::worth::{Found, Why, Worth};

/// Most pages of a measurement.
const MEASURED_PAGES: usize = 16;

/// Most bytes of a measurement, unless one page has more.
const MEASURED_BYTES: usize = 16 << 20;

/// Time after which a measurement starts no more reads.
const MEASURED_TIME: Duration = Duration::from_secs(1);

impl Backend {
    /// How many of the first `found` pages of `keys` are worth a read from these pools. Counts and
    /// explains the others.
    pub(super) fn worthwhile(
        self: &Arc<Self>,
        keys: &[PageKey],
        found: usize,
        pools: &[(&str, Policy)],
    ) -> usize {
        let Some(worth) = &self.worth else {
            return found;
        };
        let mut asked = Found {
            pages: found,
            page_tokens: 0,
            page_bytes: 0,
            more_bytes: 0,
            limit: None,
        };
        let mut measured = None;
        for (name, policy) in pools {
            let Some(pool) = self.pool(name) else {
                continue;
            };
            match policy {
                Policy::All => asked.page_bytes += pool.page_bytes(),
                Policy::Trailing(window) => asked.more_bytes += window * pool.page_bytes(),
                Policy::Groups { .. } => {}
            }
            // A state has one token per page; the KV, which is first, has all of them.
            asked.page_tokens = asked.page_tokens.max(pool.page_tokens);
            if *policy == Policy::All && pool.page_bytes() > 0 {
                measured.get_or_insert(pool);
            }
        }
        let tokens = u32::try_from(keys.len() * asked.page_tokens).unwrap_or(u32::MAX);
        let limit = |(base, per_token): (f64, f64)| {
            Duration::try_from_secs_f64(base + per_token * f64::from(tokens)).ok()
        };
        asked.limit = self.server.prefetch_limit.and_then(limit);
        let (pages, why) = worth.worthwhile(asked);
        let left = found - pages;
        let (count, cause) = match why {
            None => return pages,
            Some(Why::Slow) => (Count::Slow, Cause::Slow),
            Some(Why::Unmeasured) => (Count::Unmeasured, Cause::Unmeasured),
        };
        self.meters.add(count, left);
        self.explained.explain(cause);
        if let Some(pool) = &measured
            && let Some((_store, space)) = self.space_of(pool)
        {
            let (slow, unmeasured) = match count {
                Count::Slow => (left as u64, 0),
                _ => (0, left as u64),
            };
            space.count(Counted::Unread { slow, unmeasured });
        }
        if let Some(pool) = measured
            && worth.should_measure()
        {
            self.measure(pool, &keys[..found]);
        }
        pages
    }

    /// Reads some of these pages into memory of its own, beside the requests.
    fn measure(self: &Arc<Self>, pool: Arc<Registered>, keys: &[PageKey]) {
        let most = (MEASURED_BYTES / pool.page_bytes()).clamp(1, MEASURED_PAGES);
        let keys: Vec<PageKey> = keys.iter().copied().take(most).collect();
        let backend = self.clone();
        let thread = std::thread::Builder::new().name("larder-measure".to_owned());
        let started = thread.spawn(move || {
            backend.measure_now(&pool, &keys);
            backend.worth.iter().for_each(Worth::has_measured);
        });
        if let Err(error) = started {
            tracing::warn!(%error, "no thread to measure the time of a read");
            self.worth.iter().for_each(Worth::has_measured);
        }
    }

    fn measure_now(&self, pool: &Registered, keys: &[PageKey]) {
        let shape = Shape::new(&pool.parts);
        let Ok(mut memory) = AlignedBuf::zeroed(shape.bytes_of(keys.len())) else {
            return;
        };
        let mut parts = shape.pages_mut(&mut memory);
        let mut pages: Vec<GetPage<'_, '_>> = keys
            .iter()
            .zip(&mut parts)
            .map(|(key, parts)| GetPage { key: *key, parts })
            .collect();
        let Some((_store, space)) = self.space_of(pool) else {
            return;
        };
        let started = Instant::now();
        let deadline = started + MEASURED_TIME;
        let statuses = space.get_pages(&mut pages, Some(deadline), Patience::Read(None));
        let took = started.elapsed();
        let read = statuses.iter().filter(|status| status.is_hit()).count();
        let is_late = |status: &GetStatus| {
            matches!(
                status,
                GetStatus::Miss(MissReason::Deadline | MissReason::Hung)
            )
        };
        // A page that did not come in time takes at least that time.
        let moved = read + usize::from(statuses.iter().any(is_late));
        if let Some(worth) = self.worth.as_ref().filter(|_| moved > 0) {
            worth.read(pool.bytes_of(moved), took);
        }
    }
}
