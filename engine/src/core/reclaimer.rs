//! The reclaimer: empties one victim at a time, in steps.
//!
//! ```text
//!   Idle --victim picked--> Reading --descriptors read--> Planning --planned--> Copying --> Idle
//! ```
//!
//! It asks for its reads and copies as the core asks for writes: with an [`Effect`]. A step is
//! short, so that other callers get the core between two of them. Copies are a put that keeps the
//! pages' versions. Their descriptors are written after their bytes: a page that fails its checksum
//! on the way spoils no segment.

use super::pages::{Origin, Reserver};
use super::plan::Plan;
use super::reclaim::{Move, Victim};
use super::types::{Copied, Descriptors, PageCopy};
use super::{Core, Effect};
use crate::api::PutStatus;
use crate::catalog::ReservationId;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Reclaimer {
    work: Work,
    stopping: bool,
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
pub(crate) fn batch(moves: &[Move], blocks_max: u64) -> usize {
    let mut blocks = 0;
    let fitting = moves.iter().take_while(|page| {
        blocks += u64::from(page.record.blocks);
        blocks <= blocks_max
    });
    fitting.count().clamp(1, moves.len().max(1))
}

impl Core {
    /// Does one step of reclaim, in which about `pages` pages are looked at. Whether another step
    /// can follow at once; if not, [`Effect::Reclaim`] announces the next one.
    pub fn reclaim_step(&mut self, pages: usize) -> bool {
        match std::mem::take(&mut self.reclaimer.work) {
            Work::Idle => {
                if !self.reclaimer.stopping
                    && let Some(victim) = self.next_victim()
                {
                    self.reclaimer.work = Work::Reading(victim);
                    self.effects.push(Effect::ReadDescriptors(victim));
                }
                false
            }
            Work::Reading(victim) => {
                self.reclaimer.work = Work::Reading(victim);
                false
            }
            Work::Planning(victim, _) if self.reclaimer.stopping => {
                self.finish_victim(&victim, false);
                false
            }
            Work::Planning(victim, mut plan) => {
                self.reclaimer.work = match self.go_on_planning(&mut plan, pages) {
                    None => Work::Planning(victim, plan),
                    Some(moves) => Work::Copying(Copying {
                        victim,
                        rest: moves,
                        is_busy: false,
                        unsettled: 0,
                        copied_all: true,
                    }),
                };
                true
            }
            Work::Copying(copying) => self.go_on_copying(copying),
        }
    }

    fn go_on_copying(&mut self, mut copying: Copying) -> bool {
        let is_last = !copying.copied_all || self.reclaimer.stopping || copying.rest.is_empty();
        if copying.is_busy || is_last && copying.unsettled > 0 {
            self.reclaimer.work = Work::Copying(copying);
            return false;
        }
        if is_last {
            let copied_all = copying.copied_all && copying.rest.is_empty();
            return self.finish_victim(&copying.victim, copied_all) && !self.reclaimer.stopping;
        }
        let later = copying
            .rest
            .split_off(batch(&copying.rest, self.config.copy_blocks_max));
        let batch = std::mem::replace(&mut copying.rest, later);
        copying.unsettled += 1;
        copying.is_busy = true;
        self.reclaimer.work = Work::Copying(copying);
        let (_, is_asked) = self.ask_for_copies(Reserver::Reclaim, &batch);
        if let Work::Copying(copying) = &mut self.reclaimer.work {
            copying.is_busy = is_asked;
        }
        !is_asked
    }

    /// Answers [`Effect::ReadDescriptors`].
    pub fn descriptors_read(&mut self, read: Descriptors) {
        let Work::Reading(victim) = std::mem::take(&mut self.reclaimer.work) else {
            debug_assert!(false, "an answer to a read that was not asked for");
            return;
        };
        if read.some_unreadable {
            self.put_back_unread(&victim);
        } else {
            let plan = self.begin_plan(&victim, read.blocks);
            self.reclaimer.work = Work::Planning(victim, Box::new(plan));
        }
        self.effects.push(Effect::Reclaim);
    }

    /// Copies pages for a caller, who gets their statuses as those of a put.
    pub fn copy(&mut self, moves: &[Move]) -> ReservationId {
        self.ask_for_copies(Reserver::Caller, moves).0
    }

    /// Gives copies of these pages extents, and asks for them to be written there; whether there
    /// is one to be written.
    fn ask_for_copies(&mut self, reserver: Reserver, moves: &[Move]) -> (ReservationId, bool) {
        let id = self.new_reservation(reserver, moves.len());
        let mut pages = Vec::with_capacity(moves.len());
        for (index, page) in moves.iter().enumerate() {
            // A copy of a page that has been deleted since would be younger than the deletion.
            if !self.is_live(page) {
                self.set_status(id, index, PutStatus::Duplicate);
                continue;
            }
            match self.grant(id, index, page.into(), Origin::Copy(*page)) {
                Ok(to) => {
                    let from = self.extent(page.from);
                    let page = *page;
                    pages.push(PageCopy { page, from, to });
                }
                Err(why) => self.set_status(id, index, PutStatus::Refused(why)),
            }
        }
        let is_asked = !pages.is_empty();
        if is_asked {
            self.effects.push(Effect::Copy(id, pages));
        }
        self.pump();
        (id, is_asked)
    }

    /// Answers [`Effect::Copy`], in the order of its pages.
    pub fn copied(&mut self, id: ReservationId, outcomes: &[Copied]) {
        let Some(reservation) = self.reservations.get(&id) else {
            debug_assert!(false, "an answer to copies that were not asked for");
            return;
        };
        if let (Reserver::Reclaim, Work::Copying(copying)) =
            (reservation.reserver, &mut self.reclaimer.work)
        {
            copying.is_busy = false;
            self.effects.push(Effect::Reclaim);
        }
        let tickets = reservation.tickets.clone();
        let asked = (0..)
            .zip(&tickets)
            .filter_map(|(at, ticket)| Some((at, (*ticket)?)));
        let mut checksums = vec![None; tickets.len()];
        let mut landed = Vec::with_capacity(outcomes.len());
        for ((index, ticket), outcome) in asked.zip(outcomes) {
            let pending = &mut self.pending[ticket];
            match *outcome {
                Copied::Written => {
                    checksums[index] = Some(pending.checksum);
                    landed.push((index, true));
                }
                Copied::NotWritten => landed.push((index, false)),
                // Nothing was written: the page is given up, and spoils nothing.
                Copied::NotRead | Copied::Damaged(_) => pending.landed = Some(true),
            }
            if let (Copied::Damaged(finding), Origin::Copy(page)) = (*outcome, pending.origin) {
                self.found(page.namespace, &page.record.key, page.from, finding);
            }
        }
        self.landed(id, &landed);
        self.commit(id, &checksums);
    }

    /// A batch of the reclaimer's has all its statuses.
    pub(super) fn copies_settled(&mut self, statuses: &[PutStatus]) {
        if let Work::Copying(copying) = &mut self.reclaimer.work {
            copying.unsettled -= 1;
            copying.copied_all &= statuses.iter().all(|status| status.is_present());
            self.effects.push(Effect::Reclaim);
        }
    }

    /// Ends reclaim with the pages that are being copied now.
    pub fn stop_reclaim(&mut self) {
        self.reclaimer.stopping = true;
    }

    /// Whether a victim is being emptied.
    #[must_use]
    pub fn is_reclaiming(&self) -> bool {
        !matches!(self.reclaimer.work, Work::Idle)
    }
}
