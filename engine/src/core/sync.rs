//! Syncs: what is durable, who waits for it, and what a failed sync costs.
//!
//! A round syncs every volume written since its last good sync, and then proves all groups that were complete when it
//! began. Rounds are started only for somebody who waits: a flush, a put under `always`, a segment to be sealed
//! or given back, the interval.
//!
//! After a failed sync the kernel may have dropped what it could not write and call the next sync good, so the next one
//! proves nothing. Every segment of that volume written since the last good sync becomes *suspect*: reclaim reads each of
//! its pages back, verifies it and writes it anew. Until that is done `synced` stands still and flushes fail, and so does
//! whoever waited for one. Only segments that reclaim has emptied since are given back meanwhile, by *partial* rounds: without them a
//! full store would have nowhere to write anew.
//!
//! What was lost still has its descriptors, and a `synced` mark past them would vouch for it, also for pages that nobody was told of: those
//! that another write's failure spoiled. So an emptied suspect counts as one until a header says that its pages are not proven, and a
//! sync that begins then makes that header durable with the mark. A further failed sync may lose the header too, and it is written again.

use std::collections::BTreeMap;

use larder_format::{SegmentState, Serial};

use super::segment::{Segment, State};
use super::{Core, Effect, Fault, Io, RequestId, SyncPolicy, log};
use crate::api::{PutFailure, PutStatus};
use crate::catalog::ReservationId;
use crate::index::SegmentId;
use crate::planted;

/// Who waits for a commit to be durable.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    Page(ReservationId, usize, PutStatus),
    Request(RequestId),
    /// A drained segment that can be sealed then.
    /// Its life too: a failed sync seals a segment at once, and another life of it may be draining when this one's turn comes.
    Seal(SegmentId, Serial),
    /// An emptied segment that can be given back then.
    Release(SegmentId),
    /// The interval has passed.
    Interval,
}

#[derive(Debug)]
struct Round {
    covers: Serial,
    left: usize,
    failed: bool,
    /// There are suspects: it proves what was written since the last failure, and nothing before.
    is_partial: bool,
    /// Segments whose free headers were written before it began.
    freed: Vec<SegmentId>,
}

#[derive(Debug)]
pub(super) struct Syncs {
    /// Every commit up to here is durable on every volume.
    pub synced: Serial,
    waiters: BTreeMap<Serial, Vec<Waiter>>,
    round: Option<Round>,
    /// Segments whose free headers no round has covered yet. Writing such a segment now would, after a power loss, leave its old
    /// life with the new one's bytes.
    freed: Vec<SegmentId>,
    /// Segments on their way back whose headers could not be written.
    unfreed: Vec<SegmentId>,
    /// Segments whose free headers were on their way when a sync failed: it may have taken them with it.
    unsure: Vec<SegmentId>,
    /// When the first write since the last round was acknowledged.
    unsynced_since_ms: Option<u64>,
    /// There may be suspects: only then they are looked for.
    pub trouble: bool,
    /// After a failed round: no other one before this moment.
    pause_until_ms: Option<u64>,
}

/// How long after a failed round the next one is tried, in milliseconds.
const PAUSE_MS: u64 = 1000;

impl Syncs {
    /// After a crash nothing is known to be durable before the first sync: not what the runs before acknowledged either.
    pub(super) fn new(first: Serial, clean: bool) -> Syncs {
        Syncs {
            synced: if clean { first } else { Serial::ZERO },
            waiters: BTreeMap::new(),
            round: None,
            freed: Vec::new(),
            unfreed: Vec::new(),
            unsure: Vec::new(),
            unsynced_since_ms: None,
            trouble: false,
            pause_until_ms: None,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.round.is_none() && self.waiters.is_empty()
    }
}

impl Core {
    /// Finishes `request` when everything acknowledged so far is durable.
    pub fn flush(&mut self, request: RequestId) {
        if planted!(EarlyFlush) {
            self.effects.push(Effect::Finished(request, Ok(())));
            return;
        }
        if self.has_suspects() {
            self.effects
                .push(Effect::Finished(request, Err(Fault::Sync)));
            // What reclaim gave up on it may try again whenever somebody asks.
            self.space.welcome_all();
            self.effects.push(Effect::Reclaim);
            return;
        }
        // Who asks does not wait for the pause, which keeps the store itself from trying again and again.
        self.syncs.pause_until_ms = None;
        self.wait_for_sync(self.log.last_commit, Waiter::Request(request));
        self.pump();
    }

    /// Registers a waiter; one whose commit is durable already (and whose volumes are clean) is served at the next pump.
    pub(super) fn wait_for_sync(&mut self, commit: Serial, waiter: Waiter) {
        self.syncs.waiters.entry(commit).or_default().push(waiter);
    }

    /// As [`Core::wait_for_sync`], for a segment that may wait already: one that were left over would release another life of it.
    pub(super) fn wait_for_release(&mut self, id: SegmentId, carried: Serial) {
        let waiter = Waiter::Release(id);
        let mut waiters = self.syncs.waiters.values().flatten();
        if !waiters.any(|other| *other == waiter) {
            self.wait_for_sync(carried, waiter);
        }
    }

    /// Something was acknowledged that no sync has covered.
    pub(super) fn note_unsynced(&mut self) {
        self.syncs.unsynced_since_ms.get_or_insert(self.now_ms);
    }

    /// When the next sync is due for no other reason than time.
    pub(super) fn sync_due(&self) -> Option<u64> {
        let interval = self.interval_due();
        match (interval, self.syncs.pause_until_ms) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn interval_due(&self) -> Option<u64> {
        match self.config.sync {
            SyncPolicy::Interval(every) => {
                let every = u64::try_from(every.as_millis()).unwrap_or(u64::MAX);
                self.syncs
                    .unsynced_since_ms
                    .map(|since| since.saturating_add(every))
            }
            SyncPolicy::Relaxed | SyncPolicy::Always => None,
        }
    }

    pub(super) fn sync_when_due(&mut self) {
        if self
            .syncs
            .pause_until_ms
            .is_some_and(|until| until <= self.now_ms)
        {
            self.syncs.pause_until_ms = None;
            self.pump();
        }
        if self.interval_due().is_some_and(|due| due <= self.now_ms) {
            self.syncs.unsynced_since_ms = None;
            // One that waits since before, as long as there are suspects, is served no sooner than a new one.
            let mut waiters = self.syncs.waiters.values().flatten();
            if !self.has_suspects() || !waiters.any(|waiter| *waiter == Waiter::Interval) {
                self.wait_for_sync(self.log.last_commit, Waiter::Interval);
            }
            self.pump();
        }
    }

    /// Whether a segment that may have lost something is still to be rewritten.
    pub(super) fn has_suspects(&self) -> bool {
        self.syncs.trouble
            && self.space.iter().any(|(_, segment)| {
                let is_rewritten = match segment.state {
                    State::Free | State::Lost => true,
                    State::Emptied | State::Releasing => segment.listed,
                    _ => false,
                };
                segment.suspect && (!is_rewritten || segment.carrying > 0)
            })
    }

    pub(super) fn pump_syncs(&mut self) {
        if self.syncs.waiters.is_empty() && self.syncs.freed.is_empty() {
            return;
        }
        if self.has_suspects() {
            self.refuse_callers();
            // Not for those that wait to be tried again: a device that fails would be asked without end.
            if self.candidates().any(|(_, segment)| segment.suspect) {
                self.effects.push(Effect::Reclaim);
            }
            self.start_partial_round();
            return;
        }
        if self.syncs.trouble {
            self.syncs.trouble = self.space.iter().any(|(_, segment)| segment.suspect);
        }
        while self.syncs.round.is_none() && self.syncs.pause_until_ms.is_none() {
            let covers = self.log.complete_through();
            let first = self.syncs.waiters.first_key_value();
            let is_awaited = first.is_some_and(|(&commit, _)| commit <= covers);
            if !is_awaited && !self.needs_freed() {
                return;
            }
            self.start_round(covers, false);
        }
    }

    /// Reclaim needs the segments that it has emptied, also while it works on suspects: a sync that covers all that was
    /// carried out of one frees it, if none of that lies among suspects itself.
    fn start_partial_round(&mut self) {
        let covers = self.log.complete_through();
        let covered = self.syncs.waiters.range(..=covers);
        let is_wanted = covered
            .flat_map(|(_, waiters)| waiters)
            .any(|waiter| self.is_released_by_partial(waiter));
        if (is_wanted || self.needs_freed())
            && self.syncs.round.is_none()
            && self.syncs.pause_until_ms.is_none()
        {
            self.start_round(covers, true);
        }
    }

    /// Writes the headers again that could not be written: without one a segment must not be reused.
    pub fn retry_freeing(&mut self) {
        for id in std::mem::take(&mut self.syncs.unfreed) {
            let state = match self.space.segment(id).state {
                State::Emptied => SegmentState::Sealed,
                _ => SegmentState::Free,
            };
            self.write_header(id, state);
        }
    }

    /// The header of a segment on its way back could not be written, and is tried again. While nothing says what may be believed
    /// there nobody can be told that anything is durable: then not only when segments run short.
    pub(super) fn header_failed(&mut self, id: SegmentId) {
        self.syncs.unfreed.push(id);
        self.space.strand(id, true);
        if self.space.segment(id).is_unsaid() {
            self.retry_reclaim_later();
        }
    }

    /// Segments that will be free by themselves.
    pub(super) fn coming(&self) -> usize {
        self.on_their_way().count()
    }

    fn on_their_way(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        self.space.coming().filter(|(_, segment)| !segment.stranded)
    }

    /// Emptied segments that only pins hold: a device that is silent may hold a reader for as long as it likes, and a process that is
    /// stopped may hold what it was to write to.
    pub(super) fn held_by_readers(&self) -> usize {
        self.on_their_way()
            .filter(|(_, s)| s.state == State::Emptied)
            .filter(|(_, s)| s.carrying == 0 && s.carried == Serial::ZERO)
            .count()
    }

    /// A freed segment waits for the next sync, whoever it is for; only when segments run short one is made for it alone.
    fn needs_freed(&self) -> bool {
        !self.syncs.freed.is_empty() && self.space.free_segments() < self.free_target()
    }

    /// The free header of a segment has been written: it is free when that is durable. Or it could not be, and is tried again.
    pub(super) fn free_at_next_sync(&mut self, id: SegmentId, good: bool) {
        let unsure = self.syncs.unsure.iter().position(|other| *other == id);
        if let Some(at) = unsure {
            self.syncs.unsure.swap_remove(at);
        }
        if good {
            self.space.strand(id, false);
        }
        if good && unsure.is_some() {
            self.space.segment_mut(id).listed = false;
            self.write_header(id, SegmentState::Free);
        } else if good && planted!(EarlyReuse) {
            self.released(id);
        } else if good {
            self.syncs.freed.push(id);
        } else {
            self.header_failed(id);
        }
    }

    fn is_released_by_partial(&self, waiter: &Waiter) -> bool {
        match *waiter {
            Waiter::Release(id) => !self.space.segment(id).carried_to_suspect,
            _ => false,
        }
    }

    /// While there are suspects no sync proves anything: who waits for one is told so.
    fn refuse_callers(&mut self) {
        let waiters = std::mem::take(&mut self.syncs.waiters);
        for (commit, waiters) in waiters {
            for waiter in waiters {
                match waiter {
                    Waiter::Page(..) | Waiter::Request(_) => self.sync_failed_for(&waiter),
                    Waiter::Seal(..) | Waiter::Release(_) | Waiter::Interval => {
                        self.wait_for_sync(commit, waiter);
                    }
                }
            }
        }
    }

    fn start_round(&mut self, covers: Serial, is_partial: bool) {
        self.syncs.unsynced_since_ms = None;
        let mut left = 0;
        for volume in 0..self.space.volumes.len() {
            if std::mem::take(&mut self.space.volumes[volume].dirty) {
                left += 1;
                let id = self.log.io(log::IoContext::Sync(volume));
                self.effects.push(Effect::Io {
                    id,
                    volume,
                    io: Io::Sync,
                });
            }
        }
        self.syncs.round = Some(Round {
            covers,
            left,
            failed: false,
            is_partial,
            freed: std::mem::take(&mut self.syncs.freed),
        });
        if left == 0 {
            self.end_round();
        }
    }

    pub(super) fn sync_done(&mut self, volume: usize, good: bool) {
        if !good && planted!(RetriedSync) {
            let id = self.log.io(log::IoContext::Sync(volume));
            let io = Io::Sync;
            self.effects.push(Effect::Io { id, volume, io });
            return;
        }
        if good {
            self.counters.syncs += 1;
        } else {
            self.counters.failed_syncs += 1;
            self.suspect_volume(volume);
        }
        let Some(round) = self.syncs.round.as_mut() else {
            return;
        };
        round.failed |= !good;
        round.left -= 1;
        if round.left == 0 {
            self.end_round();
        }
    }

    fn end_round(&mut self) {
        let Some(round) = self.syncs.round.take() else {
            return;
        };
        let later = self
            .syncs
            .waiters
            .split_off(&Serial::from_raw(round.covers.get().saturating_add(1)));
        let served = std::mem::replace(&mut self.syncs.waiters, later);
        if round.failed {
            self.syncs.pause_until_ms = Some(self.now_ms.saturating_add(PAUSE_MS));
            for index in 0..self.space.volumes.len() {
                self.space.volumes[index].dirty = !self.space.is_lost(index);
            }
            self.free_again(round.freed);
            for waiter in served.into_values().flatten() {
                self.sync_failed_for(&waiter);
            }
            self.refuse_callers();
            self.effects.push(Effect::Reclaim);
            return;
        }
        for id in round.freed {
            self.released(id);
        }
        if round.is_partial {
            for (commit, waiters) in served {
                for waiter in waiters {
                    if self.is_released_by_partial(&waiter) {
                        self.synced_for(&waiter);
                    } else {
                        self.wait_for_sync(commit, waiter);
                    }
                }
            }
            return;
        }
        self.syncs.synced = self.syncs.synced.max(round.covers);
        self.log.forget_synced_notes(self.syncs.synced);
        for waiter in served.into_values().flatten() {
            self.synced_for(&waiter);
        }
    }

    /// Writes the free headers again that a failed sync may have taken: those it was to cover, those answered since it
    /// began, and, when they are answered, those on their way.
    fn free_again(&mut self, mut freed: Vec<SegmentId>) {
        freed.append(&mut self.syncs.freed);
        let on_their_way = self
            .space
            .coming()
            .filter(|(id, segment)| {
                let is_known = freed.contains(id) || self.syncs.unfreed.contains(id);
                segment.state == State::Releasing && !is_known
            })
            .map(|(id, _)| id);
        self.syncs.unsure = on_their_way.collect();
        let synced = self.syncs.synced;
        for segment in self.space.segments_mut() {
            // It may have taken the header with it that told of what was lost before, too.
            if segment.state == State::Releasing && segment.is_beyond(synced) {
                segment.suspect = true;
                segment.listed = false;
                self.syncs.trouble = true;
            }
        }
        for id in freed {
            self.write_header(id, SegmentState::Free);
        }
    }

    fn synced_for(&mut self, waiter: &Waiter) {
        match *waiter {
            Waiter::Page(id, index, status) => self.set_status(id, index, status),
            Waiter::Request(request) => self.effects.push(Effect::Finished(request, Ok(()))),
            Waiter::Interval => {}
            Waiter::Seal(id, life) => {
                let segment = self.space.segment_mut(id);
                if segment.is_draining(life) {
                    segment.prove();
                    segment.state = State::Sealing;
                    self.write_header(id, SegmentState::Sealed);
                }
            }
            Waiter::Release(id) => self.release_when_unpinned(id),
        }
    }

    fn sync_failed_for(&mut self, waiter: &Waiter) {
        match *waiter {
            Waiter::Page(id, index, _) => {
                self.counters.failed += 1;
                self.set_status(id, index, PutStatus::Failed(PutFailure::Sync));
            }
            Waiter::Request(request) => self
                .effects
                .push(Effect::Finished(request, Err(Fault::Sync))),
            Waiter::Interval => {}
            // Suspect or not, it takes no more pages: it needs no sealed header to be reclaimed.
            Waiter::Seal(id, life) => {
                let segment = self.space.segment_mut(id);
                if segment.is_draining(life) {
                    segment.state = State::Sealed;
                }
            }
            // What was carried out of it may be lost: it stays until the copies have been rewritten and synced.
            Waiter::Release(id) => self.wait_for_sync(self.log.last_commit, Waiter::Release(id)),
        }
    }

    fn suspect_volume(&mut self, volume: usize) {
        self.syncs.trouble = true;
        let synced = self.syncs.synced;
        self.space.doubt_carried(synced);
        let touched: Vec<SegmentId> = self
            .space
            .iter()
            .filter(|(id, segment)| {
                self.space.volume_of(*id) == volume
                    && !matches!(
                        segment.state,
                        State::Free | State::Releasing | State::Unreadable | State::Lost
                    )
                    // This run has written nothing into one that could not be read.
                    && segment.free_as.is_none()
                    && (segment.is_beyond(synced) || !segment.is_quiet())
            })
            .map(|(id, _)| id)
            .collect();
        for id in touched {
            let segment = self.space.segment_mut(id);
            // Of an emptied one: its header is on its way, or waits to be tried again.
            let was_unsaid = segment.is_unsaid();
            segment.suspect = true;
            // A header written since the last good sync may be lost too.
            segment.listed = false;
            // What is being written into it again may be among what was lost.
            segment.healing = false;
            match segment.state {
                State::Open(_) => self.space.close(id),
                State::Sealing => segment.doubted = true,
                State::Emptied if was_unsaid => {
                    segment.doubted = !self.syncs.unfreed.contains(&id);
                }
                State::Emptied => self.write_header(id, SegmentState::Sealed),
                _ => {}
            }
            self.drain(id);
        }
    }

    /// Moves a segment that takes no more pages on, once nothing is under way in it.
    pub(super) fn drain(&mut self, id: SegmentId) {
        let queued = self.log.has_queued(id);
        let segment = self.space.segment_mut(id);
        if segment.state != State::Draining || !segment.is_quiet() || queued {
            return;
        }
        if self.fill_holes(id) {
            return;
        }
        let segment = self.space.segment_mut(id);
        let (suspect, last_commit) = (segment.suspect, segment.last_commit);
        let seal = Waiter::Seal(id, segment.sequence);
        if !segment.held.is_empty() || self.log.is_unlisted(id) {
            segment.state = State::Sealing;
            self.write_header(id, SegmentState::Sealed);
        } else if suspect || segment.extended {
            segment.state = State::Sealed;
            segment.extended = false;
            segment.healing = false;
            self.effects.push(Effect::Reclaim);
        } else {
            let already = self
                .syncs
                .waiters
                .values()
                .flatten()
                .any(|waiter| *waiter == seal);
            if planted!(EarlySeal) {
                self.synced_for(&seal);
            } else if !already {
                self.wait_for_sync(last_commit, seal);
            }
        }
    }
}
