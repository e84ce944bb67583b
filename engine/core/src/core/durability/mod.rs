//! Durability: sync rounds, the callers that wait for them, and the cost of a failed sync.
//!
//! A round syncs every volume that was written to since its last sync. It covers all commits below
//! the lowest group that was incomplete when the round began. A round starts only if something
//! waits for it: a flush, a put under `always`, a segment to be sealed or released, the interval.
//!
//! After a failed sync the kernel may have dropped the pages that it could not write, and call the
//! next sync good. So the next sync proves nothing. Every segment of that volume that was written
//! since the last good sync becomes a *suspect*: reclaim reads each of its pages back, verifies it
//! and writes it again. Until all suspects are rewritten, the flush watermark stands still, and
//! flushes fail. Meanwhile *partial* rounds release emptied segments of which no forwarded data is
//! in a suspect: without them a full store would have no room to write again. Once its suspects are
//! rewritten elsewhere, nothing waits for that volume: rounds leave it out until it is written to
//! again. If a suspect stays unreadable, its pages are dropped from the index.
//!
//! There are two watermarks ([`Watermarks`](super::base::Watermarks)). A flush succeeds when the
//! flush watermark (`synced`) reaches its commit. Recovery trusts the durable watermark
//! (`durable`). After a failed sync, or a failed write of a page's bytes, the durable watermark has
//! to stay below every commit whose payload may be missing, since its descriptor may be on disk. It
//! moves again when headers exclude those pages and a sync that began after that has made these
//! headers durable. A further failed sync may lose a header too, and the header is written again.
//! If a device refuses such a header for good, the durable watermark stands still. Flushes and
//! reclaim go on. The price: after a crash more pages are unproven than necessary.

mod release;

use std::collections::{BTreeMap, BTreeSet};

use larder_format::{SegmentState, Serial};

use super::base::{Base, Event};
use super::journal::Journal;
use super::journal::holds::Holds;
use super::segments::Segments;
use super::segments::segment::{Segment, State};
use super::types::{Fault, RequestId};
use crate::core::types::SyncPolicy;
use crate::grants::ReservationId;
use crate::index::SegmentId;
use crate::planted;
use crate::status::{PutFailure, PutStatus};

/// Who waits for a commit to be durable.
#[derive(Debug, PartialEq, Eq)]
enum Waiter {
    Page(ReservationId, usize, PutStatus),
    Request(RequestId),
    /// A drained segment that can be sealed then, and its generation: a failed sync seals a segment
    /// at once, and its next generation may be draining when this waiter's turn comes.
    Seal(SegmentId, Serial),
    /// An emptied segment that can be released then.
    Release(SegmentId),
    /// The interval has passed.
    Interval,
}

#[derive(Debug)]
struct Round {
    covers: Serial,
    /// The durable watermark after a good round.
    durable: Serial,
    left: usize,
    failed: bool,
    /// There are suspects: it proves the writes since the last failure, and no earlier ones.
    is_partial: bool,
    /// Segments whose free headers were written before it began.
    freed: Vec<SegmentId>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Durability {
    /// Commits that the durable watermark must not reach: one entry for every page that it would
    /// prove wrongly.
    held: Holds,
    waiters: BTreeMap<Serial, Vec<Waiter>>,
    round: Option<Round>,
    /// Segments whose free headers no round has covered yet. A write into such a segment now would,
    /// after a power loss, leave its old generation with the new one's bytes.
    freed: Vec<SegmentId>,
    /// Segments whose free headers were on their way when a sync failed: it may have lost them.
    unsure: Vec<SegmentId>,
    /// When the first write since the last round was acknowledged.
    unsynced_since_ms: Option<u64>,
    /// The suspects, and some segments that no longer are.
    suspects: BTreeSet<SegmentId>,
    /// After a failed round: no other one before this moment.
    pause_until_ms: Option<u64>,
}

/// How long after a failed round the next one is tried, in milliseconds.
const PAUSE_MS: u64 = 1000;

impl Durability {
    pub(super) fn is_idle(&self) -> bool {
        self.round.is_none() && self.waiters.is_empty()
    }

    // ---- waiting

    /// Finishes `request` when everything acknowledged so far is durable.
    pub(super) fn flush(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        journal: &Journal,
        request: RequestId,
    ) {
        if planted!(EarlyFlush) {
            base.finish(request, Ok(()));
            return;
        }
        if self.has_suspects(segments) {
            base.finish(request, Err(Fault::Sync));
            // A flush is a reason for reclaim to try again.
            segments.end_quarantine();
            base.call_reclaim();
            return;
        }
        // The pause keeps the store itself from trying without end. It does not hold up callers.
        self.pause_until_ms = None;
        self.wait(journal.last_commit(), Waiter::Request(request));
    }

    /// Registers a waiter. If its commit is durable already (and its volumes are clean), it is
    /// served at the next pump.
    fn wait(&mut self, commit: Serial, waiter: Waiter) {
        self.waiters.entry(commit).or_default().push(waiter);
    }

    fn waits(&self, waiter: &Waiter) -> bool {
        let mut waiters = self.waiters.values().flatten();
        waiters.any(|other| other == waiter)
    }

    /// A page gets its status when this commit is durable.
    pub(super) fn wait_for_page(
        &mut self,
        commit: Serial,
        id: ReservationId,
        index: usize,
        status: PutStatus,
    ) {
        self.wait(commit, Waiter::Page(id, index, status));
    }

    /// All records of a request have been written.
    pub(super) fn request_written(&mut self, base: &mut Base, request: RequestId, commit: Serial) {
        if base.config.sync == SyncPolicy::Always {
            self.wait(commit, Waiter::Request(request));
        } else {
            // Only now: a sync that began while it was being written does not cover it.
            self.note_unsynced(base);
            base.finish(request, Ok(()));
        }
    }

    /// Something was acknowledged that no sync has covered.
    pub(super) fn note_unsynced(&mut self, base: &Base) {
        self.unsynced_since_ms.get_or_insert(base.now_ms);
    }

    /// When the next sync is due for no other reason than time.
    pub(super) fn due(&self, base: &Base) -> Option<u64> {
        let due = [self.interval_due(base), self.pause_until_ms];
        due.into_iter().flatten().min()
    }

    fn interval_due(&self, base: &Base) -> Option<u64> {
        match base.config.sync {
            SyncPolicy::Interval(every) => {
                let every = u64::try_from(every.as_millis()).unwrap_or(u64::MAX);
                let since = self.unsynced_since_ms;
                since.map(|since| since.saturating_add(every))
            }
            SyncPolicy::Relaxed | SyncPolicy::Always => None,
        }
    }

    /// Whether time has made a round due.
    pub(super) fn tick(&mut self, base: &Base, segments: &Segments, journal: &Journal) -> bool {
        let is_paused = self.pause_until_ms;
        let ends_pause = is_paused.is_some_and(|until| until <= base.now_ms);
        if ends_pause {
            self.pause_until_ms = None;
        }
        let is_due = self
            .interval_due(base)
            .is_some_and(|due| due <= base.now_ms);
        if is_due {
            self.unsynced_since_ms = None;
            // While suspects exist, an interval waiter that is queued already is enough.
            if !self.has_suspects(segments) || !self.waits(&Waiter::Interval) {
                self.wait(journal.last_commit(), Waiter::Interval);
            }
        }
        ends_pause || is_due
    }

    // ---- suspects

    /// Whether a segment that may have lost something is still to be written again.
    pub(super) fn has_suspects(&self, segments: &Segments) -> bool {
        let mut suspects = self.suspects(segments);
        suspects.any(|(_, segment)| segment.is_unsure())
    }

    /// Segments of which a failed sync may have lost something.
    pub(super) fn suspects<'a>(
        &'a self,
        segments: &'a Segments,
    ) -> impl Iterator<Item = (SegmentId, &'a Segment)> {
        let listed = self.suspects.iter().map(|id| (*id, segments.get(*id)));
        listed.filter(|(_, segment)| segment.is_suspect())
    }

    /// A suspect that may become a victim.
    pub(super) fn suspect(&self, segments: &Segments) -> Option<SegmentId> {
        // A suspect on a volume in read-only service is written again on another volume.
        let elsewhere = segments.takes_writes();
        let may_move = |id| segments.may_evict(id) || elsewhere && segments.is_read_only(id);
        let mut suspects = self.suspects(segments);
        suspects.find_map(|(id, segment)| (segment.is_candidate() && may_move(id)).then_some(id))
    }

    fn make_suspect(&mut self, segments: &mut Segments, id: SegmentId) {
        self.suspects.insert(id);
        segments.get_mut(id).suspect();
    }

    /// A sync of a volume failed.
    fn suspect_volume(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        journal: &mut Journal,
        volume: usize,
    ) {
        let marks = base.marks;
        segments.doubt_forwarded(marks.synced);
        let is_touched = |(id, segment): &(SegmentId, &Segment)| {
            let is_written = !matches!(
                segment.state(),
                State::Free | State::Releasing | State::Unreadable | State::Lost
            );
            segments.volume_of(*id) == volume
                && is_written
                // This run has written nothing into a segment that could not be read.
                && segment.free_as().is_none()
                && (segment.is_beyond(marks.durable) || !segment.is_quiet())
        };
        let touched: Vec<SegmentId> = segments
            .iter()
            .filter(is_touched)
            .map(|(id, _)| id)
            .collect();
        for id in touched {
            self.make_suspect(segments, id);
            if segments.get(id).is_open() {
                segments.close(id);
            }
            self.drain(base, segments, journal, id);
        }
    }

    // ---- the durable watermark

    /// Keeps the durable watermark below a commit until a header of this segment is written.
    pub(super) fn hold(&mut self, segments: &mut Segments, id: SegmentId, commit: Serial) {
        segments.get_mut(id).hold(commit);
        self.held.hold(commit);
    }

    /// The durable watermark stands still for some segment.
    pub(super) fn is_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// The durable watermark after a round that begins now and proves all commits up to `covers`.
    /// It makes the headers durable that have been written until now.
    fn durable_after(&self, base: &Base, segments: &Segments, covers: Serial) -> Serial {
        let mark = base.marks.durable;
        let mut suspects = self.suspects(segments);
        if suspects.any(|(_, segment)| !segment.is_header_current()) {
            return mark;
        }
        let held = self.held.lowest();
        let below = held.map(|commit| Serial::from_raw(commit.get().saturating_sub(1)));
        below.map_or(covers, |below| below.min(covers)).max(mark)
    }

    // ---- rounds

    /// Starts the rounds that something waits for.
    pub(super) fn pump(&mut self, base: &mut Base, segments: &mut Segments, journal: &mut Journal) {
        if self.waiters.is_empty() && self.freed.is_empty() {
            return;
        }
        if self.has_suspects(segments) {
            self.refuse_callers(base, segments, journal);
            // Not for suspects in quarantine: a device that fails would be asked without end.
            if self.suspect(segments).is_some() {
                base.call_reclaim();
            }
            self.start_partial_round(base, segments, journal);
            return;
        }
        let is_suspect = |id: &SegmentId| segments.get(*id).is_suspect();
        self.suspects.retain(is_suspect);
        while self.round.is_none() && self.pause_until_ms.is_none() {
            let covers = journal.complete_through();
            let first = self.waiters.first_key_value();
            let is_awaited = first.is_some_and(|(&commit, _)| commit <= covers);
            if !is_awaited && !self.needs_freed(segments) {
                return;
            }
            self.start_round(base, segments, journal, covers, false);
        }
    }

    /// Reclaim needs the segments that it has emptied, also while it works on suspects. A sync that
    /// covers everything that was forwarded out of such a segment frees it, unless some of that
    /// lies in a suspect.
    fn start_partial_round(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        journal: &mut Journal,
    ) {
        let covers = journal.complete_through();
        let mut covered = self.waiters.range(..=covers).flat_map(|(_, list)| list);
        let is_wanted = covered.any(|waiter| is_released_by_partial(segments, waiter));
        if (is_wanted || self.needs_freed(segments))
            && self.round.is_none()
            && self.pause_until_ms.is_none()
        {
            self.start_round(base, segments, journal, covers, true);
        }
    }

    /// A freed segment waits for the next round, whatever starts it. Only when segments run short
    /// a round is started for it alone.
    fn needs_freed(&self, segments: &Segments) -> bool {
        !self.freed.is_empty() && segments.free_segments() < segments.free_target()
    }

    /// While there are suspects no sync proves anything: callers get an error.
    fn refuse_callers(&mut self, base: &mut Base, segments: &mut Segments, journal: &Journal) {
        for (commit, waiters) in std::mem::take(&mut self.waiters) {
            for waiter in waiters {
                match waiter {
                    Waiter::Page(..) | Waiter::Request(_) => {
                        self.sync_failed_for(base, segments, journal, &waiter);
                    }
                    Waiter::Seal(..) | Waiter::Release(_) | Waiter::Interval => {
                        self.wait(commit, waiter);
                    }
                }
            }
        }
    }

    fn start_round(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        journal: &mut Journal,
        covers: Serial,
        is_partial: bool,
    ) {
        self.unsynced_since_ms = None;
        let dirty: Vec<usize> = (0..segments.volumes())
            .filter(|volume| segments.take_dirty(*volume))
            .collect();
        for volume in &dirty {
            base.sync(*volume);
        }
        self.round = Some(Round {
            covers,
            durable: self.durable_after(base, segments, covers),
            left: dirty.len(),
            failed: false,
            is_partial,
            freed: std::mem::take(&mut self.freed),
        });
        if dirty.is_empty() {
            self.end_round(base, segments, journal);
        }
    }

    pub(super) fn sync_done(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        journal: &mut Journal,
        volume: usize,
        good: bool,
    ) {
        if !good && planted!(RetriedSync) {
            base.sync(volume);
            return;
        }
        if good {
            base.counters.store.syncs += 1;
        } else {
            base.counters.store.failed_syncs += 1;
            self.suspect_volume(base, segments, journal, volume);
        }
        let Some(round) = self.round.as_mut() else {
            return;
        };
        round.failed |= !good;
        round.left -= 1;
        if round.left == 0 {
            self.end_round(base, segments, journal);
        }
    }

    fn end_round(&mut self, base: &mut Base, segments: &mut Segments, journal: &mut Journal) {
        let Some(round) = self.round.take() else {
            return;
        };
        let beyond = Serial::from_raw(round.covers.get().saturating_add(1));
        let later = self.waiters.split_off(&beyond);
        let served = std::mem::replace(&mut self.waiters, later);
        if round.failed {
            self.pause_until_ms = Some(base.now_ms.saturating_add(PAUSE_MS));
            self.free_again(base, segments, round.freed);
            for waiter in served.into_values().flatten() {
                self.sync_failed_for(base, segments, journal, &waiter);
            }
            self.refuse_callers(base, segments, journal);
            base.call_reclaim();
            return;
        }
        for id in round.freed {
            base.announce(Event::Released(id));
        }
        if round.is_partial {
            for (commit, waiters) in served {
                for waiter in waiters {
                    if is_released_by_partial(segments, &waiter) {
                        self.synced_for(base, segments, journal, &waiter);
                    } else {
                        self.wait(commit, waiter);
                    }
                }
            }
            return;
        }
        base.marks.synced = base.marks.synced.max(round.covers);
        base.marks.durable = round.durable;
        journal.forget_synced(base.marks.synced);
        for waiter in served.into_values().flatten() {
            self.synced_for(base, segments, journal, &waiter);
        }
    }

    fn synced_for(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        journal: &mut Journal,
        waiter: &Waiter,
    ) {
        match *waiter {
            Waiter::Page(id, index, status) => base.announce(Event::Synced(id, index, status)),
            Waiter::Request(request) => base.finish(request, Ok(())),
            Waiter::Interval => {}
            Waiter::Seal(id, generation) => {
                let segment = segments.get_mut(id);
                if segment.generation() == generation && segment.is_drained() {
                    segment.prove();
                    segment.begin_sealing();
                    segments.write_header(base, id, SegmentState::Sealed);
                }
            }
            Waiter::Release(id) => self.release_when_unpinned(base, segments, journal, id),
        }
    }

    fn sync_failed_for(
        &mut self,
        base: &mut Base,
        segments: &mut Segments,
        journal: &Journal,
        waiter: &Waiter,
    ) {
        match *waiter {
            Waiter::Page(id, index, _) => {
                let status = PutStatus::Failed(PutFailure::Sync);
                base.announce(Event::Synced(id, index, status));
            }
            Waiter::Request(request) => base.finish(request, Err(Fault::Sync)),
            Waiter::Interval => {}
            // Suspect or not, it takes no more pages: reclaim does not need its sealed header.
            Waiter::Seal(id, generation) => {
                let segment = segments.get_mut(id);
                if segment.generation() == generation && segment.is_drained() {
                    segment.seal();
                }
            }
            // Copies of its pages may be lost: it stays until they have been written again and
            // synced.
            Waiter::Release(id) => self.wait(journal.last_commit(), Waiter::Release(id)),
        }
    }
}

fn is_released_by_partial(segments: &Segments, waiter: &Waiter) -> bool {
    match *waiter {
        Waiter::Release(id) => !segments.get(id).is_forwarded_to_suspect(),
        _ => false,
    }
}
