//! Syncs: what is durable, who waits for it, and what a failed sync costs.
//!
//! A round syncs every volume that something was written to since its last sync, and then proves all groups that were complete when
//! it began. Rounds are started only for somebody who waits: a flush, a put under `always`, a segment to be sealed
//! or given back, the interval.
//!
//! After a failed sync the kernel may have dropped what it could not write and call the next sync good, so the next one
//! proves nothing. Every segment of that volume written since the last good sync becomes *suspect*: reclaim reads each of
//! its pages back, verifies it and writes it anew. Until that is done `synced` stands still and flushes fail, and so does
//! whoever waited for one. Only segments that reclaim has emptied since are given back meanwhile, by *partial* rounds: without them a
//! full store would have nowhere to write anew. Once it is done nothing on the volume is waited for: one whose every sync fails is in no
//! round before something has been written to it again. A suspect that cannot be read however often it is tried is done without, its
//! pages forgotten.
//!
//! What callers are told and what recovery is told are two things. What was lost still has its descriptors, and a *mark* past them, in a
//! header or block, would vouch for it: for what a failed sync took, and for pages that nobody was told of, whose bytes the device had
//! refused after their descriptors were written. So the mark stands still until headers say of all of these that they are not proven,
//! and a sync that begins then makes those headers durable with it. A further failed sync may lose a header too, and it is written
//! again. A device may never take one: that keeps back the mark, and neither flushes nor reclaim. The price is paid by the next opening
//! after a crash, to which more pages are unproven than need be.

use std::collections::{BTreeMap, BTreeSet};

use larder_format::{SegmentState, Serial};

use super::holds::Holds;
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
    /// Where the mark goes when it has been good.
    vouches: Serial,
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
    /// The same as recovery is told it, in headers and blocks: a commit that it has reached vouches for all pages of that group.
    pub mark: Serial,
    /// Commits that the mark must not reach: each once for every page of the group that is not to be believed.
    pub held: Holds,
    waiters: BTreeMap<Serial, Vec<Waiter>>,
    round: Option<Round>,
    /// Segments whose free headers no round has covered yet. Writing such a segment now would, after a power loss, leave its old
    /// life with the new one's bytes.
    freed: Vec<SegmentId>,
    /// Segments on their way back whose headers could not be written.
    pub unfreed: Vec<SegmentId>,
    /// When they are written again.
    unfreed_due_ms: u64,
    /// Segments whose free headers were on their way when a sync failed: it may have taken them with it.
    unsure: Vec<SegmentId>,
    /// When the first write since the last round was acknowledged.
    unsynced_since_ms: Option<u64>,
    /// The suspects, and some that no longer are.
    suspects: BTreeSet<SegmentId>,
    /// After a failed round: no other one before this moment.
    pause_until_ms: Option<u64>,
}

/// How long after a failed round the next one is tried, in milliseconds.
const PAUSE_MS: u64 = 1000;

impl Syncs {
    /// After a crash nothing is known to be durable before the first sync: not what the runs before acknowledged either.
    pub(super) fn new(first: Serial, clean: bool) -> Syncs {
        let synced = if clean { first } else { Serial::ZERO };
        Syncs {
            synced,
            mark: synced,
            held: Holds::default(),
            waiters: BTreeMap::new(),
            round: None,
            freed: Vec::new(),
            unfreed: Vec::new(),
            unfreed_due_ms: 0,
            unsure: Vec::new(),
            unsynced_since_ms: None,
            suspects: BTreeSet::new(),
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
            self.space.welcome();
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
        self.suspects().any(|(_, segment)| segment.is_unsure())
    }

    /// Segments that a failed sync may have taken something of.
    pub(super) fn suspects(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        let listed = self.syncs.suspects.iter();
        let listed = listed.map(|id| (*id, self.space.segment(*id)));
        listed.filter(|(_, segment)| segment.suspect)
    }

    fn suspect_segment(&mut self, id: SegmentId) -> &mut Segment {
        self.syncs.suspects.insert(id);
        let segment = self.space.segment_mut(id);
        segment.suspect = true;
        // A header written since the last good sync may be lost too.
        segment.listed = false;
        segment
    }

    /// How far a round that begins now, and proves all up to `covers`, takes the mark: it makes the headers durable that have been
    /// written until now, and what these say is not to be believed is not.
    fn vouches(&self, covers: Serial) -> Serial {
        let mark = self.syncs.mark;
        if self.suspects().any(|(_, segment)| !segment.listed) {
            return mark;
        }
        let held = self.syncs.held.lowest();
        let below = held.map(|commit| Serial::from_raw(commit.get().saturating_sub(1)));
        below.map_or(covers, |below| below.min(covers)).max(mark)
    }

    pub(super) fn pump_syncs(&mut self) {
        if self.syncs.waiters.is_empty() && self.syncs.freed.is_empty() {
            return;
        }
        if self.has_suspects() {
            self.refuse_callers();
            // Not for those that wait to be tried again: a device that fails would be asked without end.
            if self.suspect().is_some() {
                self.effects.push(Effect::Reclaim);
            }
            self.start_partial_round();
            return;
        }
        let is_suspect = |id: &SegmentId| self.space.segment(*id).suspect;
        self.syncs.suspects.retain(is_suspect);
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

    /// As [`Core::retry_freeing`], when that is due, and one of each volume: of one that takes no writes there may be thousands. When one
    /// is written the others are.
    pub(super) fn retry_freeing_when_due(&mut self) {
        if self.syncs.unfreed_due_ms <= self.now_ms && !self.syncs.unfreed.is_empty() {
            self.syncs.unfreed_due_ms = self.retry_reclaim_later();
            let mut due = std::mem::take(&mut self.syncs.unfreed);
            let mut writable = due
                .extract_if(.., |id| !self.space.is_read_only(*id))
                .collect();
            let first = self.space.take_first_of_each(&mut writable);
            due.append(&mut writable);
            self.syncs.unfreed = due;
            for id in first {
                self.write_header(id, SegmentState::Free);
            }
        }
    }

    /// Writes the free headers again that could not be written: without one a segment must not be reused.
    pub fn retry_freeing(&mut self) {
        for id in std::mem::take(&mut self.syncs.unfreed) {
            self.write_header(id, SegmentState::Free);
        }
    }

    /// Segments that will be free by themselves.
    pub(super) fn coming(&self) -> usize {
        self.on_their_way().count()
    }

    fn on_their_way(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        let coming = self.space.coming();
        coming.filter(|(id, segment)| !segment.stranded && !self.space.is_read_only(*id))
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
            self.answers_again(id);
        }
        if good && unsure.is_some() {
            self.space.segment_mut(id).listed = false;
            self.write_header(id, SegmentState::Free);
        } else if good && planted!(EarlyReuse) {
            self.released(id);
        } else if good {
            self.syncs.freed.push(id);
        } else {
            self.syncs.unfreed.push(id);
            // A volume in read-only service keeps its capacity.
            self.space.strand(id, !self.space.is_read_only(id));
            self.retry_reclaim_later();
        }
    }

    /// A header was written, or descriptors read, of a segment of which they could not be before.
    pub(super) fn answers_again(&mut self, id: SegmentId) {
        if self.space.strand(id, false) {
            let volume = self.space.volume_of(id);
            self.space.welcome_stranded(volume);
            for id in self.space.extract_on(volume, &mut self.syncs.unfreed) {
                self.write_header(id, SegmentState::Free);
            }
            self.has_more_room = true;
            self.effects.push(Effect::Reclaim);
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
        let vouches = self.vouches(covers);
        self.syncs.round = Some(Round {
            covers,
            vouches,
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
        self.syncs.mark = round.vouches;
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
        // It may have taken the headers with it that told of what was lost before, too.
        let mark = self.syncs.mark;
        let releasing = self
            .space
            .coming()
            .filter(|(_, segment)| segment.state == State::Releasing && segment.is_beyond(mark));
        let releasing: Vec<SegmentId> = releasing.map(|(id, _)| id).collect();
        for id in releasing {
            self.suspect_segment(id);
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
        let Syncs { synced, mark, .. } = self.syncs;
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
                    && (segment.is_beyond(mark) || !segment.is_quiet())
            })
            .map(|(id, _)| id)
            .collect();
        for id in touched {
            let segment = self.suspect_segment(id);
            // What is being written into it again may be among what was lost.
            segment.healing = false;
            match segment.state {
                State::Open(_) => self.space.close(id),
                State::Sealing => segment.doubted = true,
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
