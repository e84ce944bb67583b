//! Lifetimes of pages in a store in use: the times of their puts are read from descriptors where
//! the index lacks them, old pages are removed, and the clock of the store is noted.
//!
//! Old pages are absent at once, whatever the time of day is: the clock of a store in use is the
//! one that goes on while the machine sleeps. But while the store was closed the time of day
//! counted, which may have been wrong. So old pages are removed only once the kernel has stated for
//! [`SETTLED_MS`] that a time service keeps the time of day right: a wrong clock empties no store.
//!
//! The time of day may be set while the store is in use. A close notes both clocks in the
//! superblock, and that settles it. Against a crash they are noted in use, too: when they differ
//! otherwise than at the last note, and from time to time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use larder_base::planted;
use larder_base::seldom::Seldom;
use larder_base::system::processes;
use larder_format::Clock;

use super::local::Local;
use super::turns::Turns;
use crate::catalog::Catalog;
use crate::error::StoreError;
use crate::recovery::scan::read_descriptors;
use crate::volume::Volumes;

/// How often the housekeeper looks at the clocks, in milliseconds.
const LOOK_MS: u64 = 60_000;

/// How long the kernel has to state a synchronised clock before old pages are removed.
const SETTLED_MS: u64 = 600_000;

/// Longest time between two notes.
const NOTE_MS: u64 = 600_000;

/// A smaller change between the two clocks is no reason to note them.
const JUMP_MS: u64 = 1000;

/// What the threads of a store share of this.
#[derive(Default)]
pub(super) struct Lives {
    /// A quota has a limit.
    are_limited: AtomicBool,
    /// Since when the kernel states a synchronised clock, on the clock of the core, plus one; zero
    /// if it does not.
    synchronised_ms: AtomicU64,
    failures: Seldom,
}

/// The housekeeper's part.
pub(super) struct Watch {
    volumes: Arc<Turns>,
    /// When it looks next.
    due_ms: u64,
}

impl Watch {
    pub(super) fn new(volumes: Arc<Turns>) -> Watch {
        Watch { volumes, due_ms: 0 }
    }

    /// When to look next.
    pub(super) fn due(&self, local: &Local) -> Option<u64> {
        let are_limited = local.lives.are_limited.load(Ordering::Relaxed);
        are_limited.then_some(self.due_ms)
    }

    /// Looks at the clocks if it is time, and removes old pages if they are right.
    pub(super) fn look(&mut self, local: &Local) {
        let now_ms = local.now_ms();
        if self.due(local).is_none_or(|due| due > now_ms) {
            return;
        }
        self.due_ms = now_ms.saturating_add(LOOK_MS);
        local.learn_puts();
        // A change of the quotas notes them itself.
        if let Some(mut volumes) = self.volumes.try_lock() {
            local.note_clock(&mut volumes, false);
        }
        if local.look_at_time_service(now_ms) {
            let mut next = Some(0);
            while let Some(from) = next {
                next = local.with_core_by_turns(|core| core.remove_old(from));
            }
        }
    }
}

impl Local {
    /// Some quota has a limit, or none has.
    pub(super) fn limit_lives(&self, are_limited: bool) {
        self.lives.are_limited.store(are_limited, Ordering::Relaxed);
        self.inbox.lock().quotas = true;
        self.inbox_changed.notify_one();
    }

    /// Whether old pages are removed; `None` without a limit.
    pub(super) fn removes_old_pages(&self) -> Option<bool> {
        let are_limited = self.lives.are_limited.load(Ordering::Relaxed);
        are_limited.then(|| self.is_settled(self.now_ms()))
    }

    fn is_settled(&self, now_ms: u64) -> bool {
        let since = self.lives.synchronised_ms.load(Ordering::Relaxed);
        since != 0 && now_ms >= (since - 1).saturating_add(SETTLED_MS) || planted!(HastyExpiry)
    }

    /// Asks the kernel whether a time service keeps the time of day right. Returns whether it has
    /// for long enough.
    fn look_at_time_service(&self, now_ms: u64) -> bool {
        let since = &self.lives.synchronised_ms;
        if !processes::is_clock_synchronised() {
            since.store(0, Ordering::Relaxed);
        } else if since.load(Ordering::Relaxed) == 0 {
            since.store(now_ms.saturating_add(1), Ordering::Relaxed);
        }
        let is_settled = self.is_settled(now_ms);
        if !is_settled && now_ms > SETTLED_MS + LOOK_MS {
            self.note_unsettled_clock();
        }
        is_settled
    }

    /// Learns from descriptors when the pages were put whose times the index lacks. The pages of
    /// descriptors that cannot be read are absent until they can be.
    pub(super) fn learn_puts(&self) {
        if !self.index.lacks_puts() || planted!(UnreadPuts) {
            return;
        }
        let (mut from, mut are_all) = (0, true);
        loop {
            let victim = self.with_core_by_turns(|core| core.books().segment_with_pages(from));
            let Some(victim) = victim else { break };
            let read = read_descriptors(self.disk.as_ref(), &self.spot(&victim), &victim);
            are_all &= !read.some_unreadable;
            self.with_core(|core| core.books().learn_puts(&victim, &read.blocks));
            from = victim.segment.0 + 1;
        }
        self.index.puts_are_learned(are_all);
    }

    /// Notes the clocks in the superblock of the first volume, if it is time or `now`.
    pub(super) fn note_clock(&self, volumes: &mut Volumes, now: bool) {
        let (noted, clock) = (volumes.superblock().clock, self.clock());
        let ahead = |of: Clock| of.unix_ms.wrapping_sub(of.store_ms).cast_signed();
        let is_due = clock.store_ms.saturating_sub(noted.store_ms) >= NOTE_MS
            || ahead(clock).abs_diff(ahead(noted)) >= JUMP_MS;
        if !(is_due || now) || planted!(UnnotedClock) {
            return;
        }
        let sync = || self.sync_first();
        let outcome = volumes.note_clock(self.disk.as_ref(), clock, sync);
        if let Err(error) = outcome
            && self.lives.failures.is_due().is_some()
        {
            tracing::warn!(
                "the clock of the store cannot be noted ({error}): after a crash pages may be \
                 taken for older or younger than they are (logged once a minute)"
            );
        }
    }

    /// Makes writes beside the segments of the first volume durable.
    pub(super) fn sync_first(&self) -> Result<(), StoreError> {
        self.sync_beside(0)
    }

    /// The same for any volume.
    pub(super) fn sync_beside(&self, volume: usize) -> Result<(), StoreError> {
        self.with_core(|core| core.written_beside(volume));
        // A round of syncs that runs already may not cover the write: the next one does.
        Catalog::flush(self)?;
        Catalog::flush(self)
    }
}
