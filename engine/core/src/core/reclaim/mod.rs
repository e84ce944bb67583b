//! Reclaim: empties segments, so that they can be written again. `pick` chooses them: usually the
//! segment with the fewest live blocks. Tombstones that must be forwarded count like pages.
//!
//! | module | decides |
//! |---|---|
//! | `wanted` | when a segment is emptied that a caller names |
//! | `tools` | (offline tools, which name the segments that they empty) |
//! | `plan` | which pages and records of a victim are kept |
//! | `duplicates` | which tombstones of a victim lie in another segment too |
//! | `pick` | which segment is emptied |
//! | `emergency` | which segment is given up when there is no room for copies |
//!
//! One victim is emptied at a time, in steps:
//!
//! ```text
//!   Idle --victim picked--> Reading --descriptors read--> Planning --planned--> Copying --> Idle
//! ```
//!
//! Reclaim requests its reads and copies as the core requests writes: with an [`Effect`]. A step is
//! short, so that other callers get the core between two of them. Copies are a put that keeps the
//! pages' versions. Their descriptors are written after their bytes: a page that fails its checksum
//! on the way spoils no segment. The victim is released once a sync covers everything that was
//! forwarded out of it, and no reader is in it.
//!
//! Reclaim must go on even when no segment is free. Repeated crashes lead there: each recovery
//! seals the segments that were open, part-filled. Without a free segment, and without room in one
//! that takes copies, it gives up another victim, the coldest, and evicts its pages (`emergency`).
//! Tombstones, which must not be lost, go into gaps of sealed segments, whose headers are written
//! again to list them (`Segments::place_record`). Without a gap, the copies of tombstones that
//! earlier tries have left in other segments count (`duplicates`).
//!
//! A segment whose free header cannot be written, and a victim whose descriptors cannot be read, is
//! tried again now and then and is not waited for. The limit of the store falls as if the segment
//! did not exist (`Segments::set_unusable`). So reclaim goes on when a volume fails, and the limit
//! rises again when the volume works.
//!
//! The constants (`COLD_SHARE`, the limit of 7/8, the free target) follow from a simulation: exact
//! page LRU over a one-hour chat trace of 288,500 block references (2026-11). With 87.5 % of the
//! room in use the write amplification is 1.19 with 63 segments and 1.09 with 255; at 90 % it is
//! 1.3 to 1.6. Copies and new pages share no segment: mixed, it rises from 1.2 to 1.9. The victim
//! with the fewest live bytes is never worse than a victim by cost-benefit or by age. Evicting the
//! coldest twentieth of the cache instead of copying it saves up to half of the copies, and costs
//! at most 0.03 points of hit rate. More free segments than needed raise the amplification, since
//! they come out of the same slack.

mod duplicates;
mod emergency;
mod pick;
mod plan;
mod tools;
mod wanted;

use std::sync::Arc;

use larder_format::DescriptorBlock;

use super::puts::{Below, Origin, Puts, Reserver, is_live};
use super::types::{
    Copied, Descriptors, Effect, Emptying, Fault, Move, PageCopy, RequestId, Victim,
};
use crate::grants::{Finding, ReservationId};
use crate::index::SegmentId;
use crate::planted;
use crate::status::PutStatus;
pub use pick::GAIN_SHARE;
use pick::{View, next_victim};
use plan::{Forwarding, Plan, Progress};
pub use tools::SegmentView;
pub(super) use tools::{plan_whole, room_for_copies, sealed, take_named};
use wanted::Wanted;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Reclaim {
    work: Work,
    stopping: bool,
    /// A segment that a caller names. It is the victim once it is being emptied.
    wanted: Option<Wanted>,
}

#[derive(Debug, Default)]
enum Work {
    #[default]
    Idle,
    Reading(Victim),
    Planning(Victim, Box<Plan>),
    Copying(Copying),
}

/// Pages of a victim on their way out of it.
#[derive(Debug)]
struct Copying {
    victim: Victim,
    /// The descriptors of all its pages.
    blocks: Vec<DescriptorBlock>,
    /// Pages still to be copied.
    rest: Vec<Move>,
    /// A batch is being read and written.
    is_busy: bool,
    /// Batches without all their statuses.
    unsettled: usize,
    copied_all: bool,
}

/// How many of these pages, at least one, are copied together when that is done `blocks_max`
/// blocks at a time.
pub fn batch(moves: &[Move], blocks_max: u64) -> usize {
    let mut blocks = 0;
    let fitting = moves.iter().take_while(|page| {
        blocks += u64::from(page.record.stored);
        blocks <= blocks_max
    });
    fitting.count().clamp(1, moves.len().max(1))
}

impl Reclaim {
    /// Requests a step where there is something to empty.
    pub(super) fn check(&self, below: &mut Below<'_>) {
        if self.wanted.is_some() || View::new(below).wants_reclaim() {
            below.base.call_reclaim();
        }
    }

    /// Does one step, in which about `pages` pages are looked at. Returns whether another step can
    /// follow at once; if not, [`Effect::Reclaim`] announces the next one.
    pub(super) fn step(&mut self, puts: &mut Puts, below: &mut Below<'_>, pages: usize) -> bool {
        match std::mem::take(&mut self.work) {
            Work::Idle => {
                if self.stopping {
                    self.end_wanted(below, Err(Fault::NoRoom));
                } else if let Some(victim) = next_victim(below).or_else(|| self.take_wanted(below))
                {
                    self.work = Work::Reading(victim);
                    below.base.emit(Effect::ReadDescriptors(victim));
                }
                false
            }
            Work::Reading(victim) => {
                self.work = Work::Reading(victim);
                false
            }
            Work::Planning(victim, plan) if self.stops() && !plan.is_reading() => {
                self.finish(below, &victim, &[], false);
                false
            }
            Work::Planning(victim, mut plan) => {
                let progress = plan.go_on(puts, below, pages);
                let is_ready = !matches!(progress, Progress::Reading);
                self.work = match progress {
                    Progress::Step | Progress::Reading => Work::Planning(victim, plan),
                    Progress::Planned(moves) => Work::Copying(Copying {
                        victim,
                        blocks: plan.into_blocks(),
                        rest: self.in_wanted_order(moves),
                        is_busy: false,
                        unsettled: 0,
                        copied_all: true,
                    }),
                };
                is_ready
            }
            Work::Copying(copying) => self.go_on_copying(puts, below, copying),
        }
    }

    fn go_on_copying(
        &mut self,
        puts: &mut Puts,
        below: &mut Below<'_>,
        mut copying: Copying,
    ) -> bool {
        let is_last = !copying.copied_all || self.stops() || copying.rest.is_empty();
        if copying.is_busy || is_last && copying.unsettled > 0 {
            self.work = Work::Copying(copying);
            return false;
        }
        if is_last {
            let copied_all = copying.copied_all && copying.rest.is_empty();
            let Copying { victim, blocks, .. } = copying;
            return self.finish(below, &victim, &blocks, copied_all) && !self.stopping;
        }
        let count = batch(&copying.rest, below.base.config.copy_blocks_max);
        let later = copying.rest.split_off(count);
        let batch = std::mem::replace(&mut copying.rest, later);
        copying.unsettled += 1;
        let (_, is_busy) = request_copies(puts, below, Reserver::Reclaim, &batch);
        copying.is_busy = is_busy;
        self.work = Work::Copying(copying);
        !is_busy
    }

    /// Answers [`Effect::ReadDescriptors`].
    pub(super) fn descriptors_read(&mut self, below: &mut Below<'_>, read: Descriptors) {
        if let Work::Planning(_, plan) = &mut self.work {
            plan.descriptors_read(below, &read);
            below.base.call_reclaim();
            return;
        }
        let Work::Reading(victim) = std::mem::take(&mut self.work) else {
            debug_assert!(false, "an answer to a read that was not requested");
            return;
        };
        if read.some_unreadable {
            put_back_unread(below, &victim);
            self.emptied(below, false);
        } else {
            below.segments.answers_again(below.base, victim.segment);
            let mut plan = Plan::begin(below, &victim, read.blocks);
            plan.keeps_all = self.is_emptying_wanted();
            self.work = Work::Planning(victim, Box::new(plan));
        }
        below.base.call_reclaim();
    }

    /// Copies pages for a caller, who gets their statuses as those of a put.
    pub(super) fn copy(puts: &mut Puts, below: &mut Below<'_>, moves: &[Move]) -> ReservationId {
        request_copies(puts, below, Reserver::Caller, moves).0
    }

    /// Answers [`Effect::Copy`], in the order of its pages.
    pub(super) fn copied(
        &mut self,
        puts: &mut Puts,
        below: &mut Below<'_>,
        id: ReservationId,
        outcomes: &[Copied],
    ) {
        // The copies of a caller wait for nothing: the caller has patience.
        let is_of_a_caller = !matches!(self.work, Work::Copying(_));
        if let Work::Copying(copying) = &mut self.work {
            copying.is_busy = false;
            below.base.call_reclaim();
        }
        let now_ms = below.base.now_ms;
        let mut proofs = Vec::new();
        let mut landed = Vec::with_capacity(outcomes.len());
        for ((index, ticket), outcome) in puts.granted(id).into_iter().zip(outcomes) {
            let Some(origin) = puts.granted_page(ticket) else {
                continue;
            };
            proofs.resize(index + 1, None);
            match *outcome {
                Copied::Written(mut proof) => {
                    if let Some(seal) = &mut proof.seal
                        && planted!(LocationInAad)
                    {
                        seal.tag[0] ^= 1;
                    }
                    proofs[index] = Some(proof);
                    landed.push((index, true));
                }
                Copied::NotWritten => landed.push((index, false)),
                Copied::NotRead => puts.not_written(ticket),
                Copied::Damaged(finding) => {
                    puts.not_written(ticket);
                    if let Origin::Copy(page) = origin
                        && (finding != Finding::Unreadable
                            || is_of_a_caller
                            || below.segments.stays_unread(page.from.segment, now_ms))
                    {
                        let key = page.record.key;
                        puts.found(below, page.namespace, &key, page.from, finding);
                    }
                }
            }
        }
        puts.landed(below, id, &landed);
        puts.commit(below, id, &proofs);
    }

    /// A batch has all its statuses.
    pub(super) fn copies_settled(&mut self, below: &mut Below<'_>, copied_all: bool) {
        if let Work::Copying(copying) = &mut self.work {
            copying.unsettled -= 1;
            copying.copied_all &= copied_all;
            below.base.call_reclaim();
        }
    }

    /// The victim's pages have been moved, as far as they could be. If all were, `blocks` are its
    /// descriptors.
    fn finish(
        &mut self,
        below: &mut Below<'_>,
        victim: &Victim,
        blocks: &[DescriptorBlock],
        moved_all: bool,
    ) -> bool {
        let is_returning = finish_victim(below, victim, moved_all);
        if is_returning {
            let (segment, generation) = (victim.segment, victim.sequence);
            below.base.evicted.read(segment, generation, blocks, true);
        }
        self.emptied(below, is_returning);
        is_returning
    }

    /// Ends reclaim with the pages that are being copied now.
    pub(super) fn stop(&mut self) {
        self.stopping = true;
    }

    /// Whether a victim is being emptied.
    pub(super) fn is_busy(&self) -> bool {
        !matches!(self.work, Work::Idle)
    }
}

/// Gives copies of these pages extents, and requests them to be written there. Returns whether
/// there is one to be written.
fn request_copies(
    puts: &mut Puts,
    below: &mut Below<'_>,
    reserver: Reserver,
    moves: &[Move],
) -> (ReservationId, bool) {
    let id = puts.new_reservation(below.base, reserver, moves.len());
    let mut pages = Vec::with_capacity(moves.len());
    for (index, page) in moves.iter().enumerate() {
        // A copy of a page that has been deleted since would be younger than the deletion.
        if !is_live(below.base, page) {
            puts.set_status(below.base, id, index, PutStatus::Duplicate);
            continue;
        }
        match puts.grant(below, id, index, page.into(), Origin::Copy(*page)) {
            Ok(to) => {
                let from = below.segments.extent(page.from);
                let page = *page;
                pages.push(PageCopy { page, from, to });
            }
            Err(why) => puts.set_status(below.base, id, index, PutStatus::Refused(why)),
        }
    }
    let is_requested = !pages.is_empty();
    if is_requested {
        below.base.emit(Effect::Copy(id, pages));
    }
    (id, is_requested)
}

/// A victim's pages have been moved, as far as they could be. If some found no room, the victim is
/// tried again later, and so it is if a record found none. Pages that no readable descriptor names
/// are dropped as damaged. Returns whether the victim is on its way to be free.
pub(super) fn finish_victim(below: &mut Below<'_>, victim: &Victim, moved_all: bool) -> bool {
    let id = victim.segment;
    let is_stuck = below.segments.get_mut(id).take_stuck();
    if !moved_all {
        below.segments.put_back(id);
        below.base.retry_later();
        return false;
    }
    if below.segments.get(id).live() > 0 {
        drop_pages(below, id);
    }
    let Below {
        base,
        segments,
        journal,
        durability,
    } = below;
    if is_stuck {
        durability.put_back_stuck(base, segments, journal, id);
    } else {
        segments.empty(id);
        durability.release_when_forwarded(base, segments, journal, id);
    }
    !is_stuck
}

/// A victim's descriptors could not all be read, and may be readable another time. Until then it is
/// left alone, and another one may be emptied.
fn put_back_unread(below: &mut Below<'_>, victim: &Victim) {
    let is_unsure = below.segments.get(victim.segment).is_unsure();
    if is_unsure
        && below
            .segments
            .stays_unread(victim.segment, below.base.now_ms)
    {
        // A suspect that stays unreadable: with its device gone nothing would ever be durable
        // again. Its records are written elsewhere, as far as a failed sync may have lost them, and
        // its pages are dropped.
        below.segments.get_mut(victim.segment).note_rewritten();
        plan_whole(below, victim, &[]);
        drop_pages(below, victim.segment);
    }
    below.segments.put_back(victim.segment);
    below.segments.set_unusable(victim.segment, true);
    below.base.retry_later();
}

/// Drops the pages of a segment from the index as damaged.
fn drop_pages(below: &mut Below<'_>, id: SegmentId) {
    let Below { base, segments, .. } = below;
    let (index, generation) = (Arc::clone(&base.index), segments.get(id).generation());
    index.forget_segment(id, |page| {
        let (namespace, key, place) = (page.namespace, page.key, page.place);
        let blocks = base.namespaces.stored_blocks(namespace, place);
        segments.drop_live(place.segment, blocks);
        base.evicted.left(namespace, key, place, generation);
        segments.note_damaged(base, namespace, key, place, Finding::Unreadable);
    });
}
