//! Compacts a store in place.
//!
//! The pages of the plan are copied, in order, into free segments. Segments in which nothing counts
//! any more are released. The two steps repeat. When free segments run short while the old segments
//! still hold pages, the emptiest old segment is emptied with its pages kept. Such pages move
//! twice: this is the price of little room. Each page is put in its order once, and each emptied
//! segment turns dead blocks into free ones, so the compaction ends.
//!
//! A kill seals the open segments, and their unused room is wasted until they are emptied. Without
//! a free segment no later compaction could begin. So one segment stays free if possible: it takes
//! no pages for the order, and takes pages that make way only if nothing else has room. A
//! compaction that finds no further free segment begins with the segments that kills have wasted.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use larder_core::core::{InitState, Move};
use larder_core::index::{NamespaceSlot, SegmentId};
use larder_format::{BLOCK_BYTES, HEADER_BLOCKS, KeyPrefix};
use larder_store::api::OpenOptions;
use larder_store::error::StoreError;
use larder_store::recovery::{Found, Whole, spots_in};
use larder_store::store::mover::move_pages;
use larder_store::store::opening::{Opening, open_volumes};
use larder_store::volume::Access;
use serde::Serialize;

use super::order::{self, Plan, Site};
use super::owner::{MOVE_BYTES, Owner, Progress, sizes, stored_blocks};

/// Segments that stay free if possible.
const KEPT_FREE: u64 = 1;

/// The result of a compaction, or of a dry run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Compacted {
    /// Strands of chains that lie in several short pieces.
    #[serde(rename = "scattered_chains")]
    pub scattered: u64,
    /// Pages to be moved.
    pub planned_pages: u64,
    /// Bytes of those pages.
    pub planned_bytes: u64,
    /// Pages copied; some may count twice.
    #[serde(rename = "pages_moved")]
    pub moved_pages: u64,
    /// Segments released.
    pub freed_segments: u64,
    /// Pages that stay where they were: there was no room to move them in order, or it was
    /// interrupted.
    pub left_pages: u64,
    /// Pages whose bytes did not match their checksum: dropped, as a get would drop them.
    pub damaged_pages: u64,
    /// Pages whose writes the last crash had interrupted: dropped.
    pub unfinished_pages: u64,
    /// Whether `progress` ended it early.
    #[serde(skip)]
    pub interrupted: bool,
}

/// Puts the pages of the store at `path` in order. Chains come to lie in one piece, dead space is
/// dropped, versions are kept, and nothing is evicted. With `dry_run` nothing is written. A store
/// that is in order already is not written to either.
///
/// # Errors
/// [`StoreError::Locked`] when a process has it open, [`StoreError::Unsound`] when structures are
/// damaged, else as for an open. After any error the store is as after a crash: sound.
pub fn compact(
    path: &Path,
    options: &OpenOptions,
    dry_run: bool,
    progress: &mut Progress<'_>,
) -> Result<Compacted, StoreError> {
    let access = if dry_run {
        Access::Held
    } else {
        Access::Exclusive
    };
    let (volumes, disk) = open_volumes(path, options, access)?;
    let opening: Opening<Whole> = Opening::new(volumes, disk, options)?;
    let plan = match plan(path, &opening) {
        Ok(plan) if !(dry_run || plan.is_empty()) => plan,
        outcome => {
            opening.give_up();
            return outcome.map(|plan| planned(&plan));
        }
    };
    let segments = opening.recovery.recovered.segments.iter();
    let free = segments.filter(|segment| segment.state == InitState::Free);
    let mut closed = plan.empty.clone();
    if free.count() as u64 <= KEPT_FREE {
        // The open segments that take copies may be the only room.
        let takers = takers(&opening);
        closed.retain(|id| !takers.contains(id));
    }
    Compaction::begin(opening, plan, &closed, options)?.run(progress)
}

fn plan(path: &Path, opening: &Opening<Whole>) -> Result<Plan, StoreError> {
    if !opening.recovery.damage.is_empty() {
        return Err(StoreError::Unsound {
            path: path.to_owned(),
            flaws: opening.recovery.damage.len(),
        });
    }
    let superblock = opening.volumes.superblock();
    let recovered = &opening.recovery.recovered;
    let sites: Vec<Site> = spots_in(&opening.volumes)
        .iter()
        .zip(&recovered.segments)
        .map(|(spot, segment)| Site {
            volume: spot.volume,
            can_be_emptied: matches!(segment.state, InitState::Open | InitState::Sealed),
            is_open: segment.state == InitState::Open,
            data_end: segment.data_end,
            blocks: segment.blocks,
        })
        .collect();
    let sizes = sizes(&recovered.namespaces);
    let blocks = |page: &Found<Whole>| stored_blocks(&sizes, page);
    let data_blocks = u64::from(superblock.segment_blocks - HEADER_BLOCKS);
    Ok(order::plan(&opening.pages, blocks, &sites, data_blocks))
}

/// The open segments that take copies: on each volume the one with the most room.
fn takers(opening: &Opening<Whole>) -> Vec<SegmentId> {
    let spots = spots_in(&opening.volumes);
    let segments = &opening.recovery.recovered.segments;
    let mut takers = BTreeMap::new();
    for (id, (spot, segment)) in (0..).zip(spots.iter().zip(segments)) {
        if segment.state == InitState::Open {
            let taker = (Reverse(segment.data_end + segment.blocks), SegmentId(id));
            let best = takers.entry(spot.volume).or_insert(taker);
            *best = taker.max(*best);
        }
    }
    takers.into_values().map(|(_, id)| id).collect()
}

pub(super) fn planned(plan: &Plan) -> Compacted {
    Compacted {
        scattered: plan.scattered,
        planned_pages: plan.pages.len() as u64,
        planned_bytes: plan.page_blocks * BLOCK_BYTES as u64,
        ..Compacted::default()
    }
}

/// A compaction in progress.
pub(super) struct Compaction {
    owner: Owner,
    pages: Vec<Found<Whole>>,
    plan: Plan,
    /// Segments that are to be empty in the end, and still hold pages.
    wasted: BTreeSet<SegmentId>,
    /// Number of pages of the plan that have been handled.
    next: usize,
    /// Blocks of those pages.
    done_blocks: u64,
    /// Position of a page in the plan, for pages that must be moved before their turn.
    ranks: HashMap<(NamespaceSlot, KeyPrefix), usize>,
    outcome: Compacted,
}

impl Compaction {
    /// Begins to carry a plan out. Open segments among `closed` take no pages.
    pub(super) fn begin(
        opening: Opening<Whole>,
        plan: Plan,
        closed: &[SegmentId],
        options: &OpenOptions,
    ) -> Result<Compaction, StoreError> {
        let (owner, pages) = Owner::begin(opening, closed, options)?;
        let ranks = plan.pages.iter().enumerate();
        let ranks = ranks.map(|(rank, &page)| ((pages[page].slot, pages[page].key), rank));
        Ok(Compaction {
            ranks: ranks.collect(),
            wasted: plan.empty.iter().copied().collect(),
            owner,
            pages,
            outcome: planned(&plan),
            plan,
            next: 0,
            done_blocks: 0,
        })
    }

    pub(super) fn run(mut self, progress: &mut Progress<'_>) -> Result<Compacted, StoreError> {
        self.give_back_dead()?;
        while self.has_little_room() && self.gain_room(progress)? {}
        while self.next < self.plan.pages.len() && !self.outcome.interrupted {
            let before = self.next;
            self.put_in_order(progress);
            self.give_back_dead()?;
            if self.next == before && !self.gain_room(progress)? {
                break;
            }
        }
        // Pages that had to make way lay among pages in order, and have left holes there.
        while self.gain_room(progress)? {}
        self.outcome.left_pages = self.left();
        let counters = self.owner.local.with_core(|core| core.counters());
        self.outcome.moved_pages = counters.store.moved;
        self.outcome.damaged_pages = counters.store.damaged;
        self.outcome.unfinished_pages = counters.store.unfinished;
        self.owner.close()?;
        let counters = self.owner.local.with_core(|core| core.counters());
        self.outcome.freed_segments = counters.store.reclaimed;
        Ok(self.outcome)
    }

    /// Moves pages in order while there is room for them beside the reserve.
    fn put_in_order(&mut self, progress: &mut Progress<'_>) {
        while self.next < self.plan.pages.len() {
            let batch = self.next_batch(self.owner.room_beside(KEPT_FREE));
            let Some(&(last, _)) = batch.last() else {
                return;
            };
            let moves: Vec<Move> = batch.iter().map(|(_, page)| *page).collect();
            let statuses = move_pages(&self.owner.local, &moves);
            let moved_all = statuses.iter().all(|status| status.is_present());
            let stays = |(_, page): &&(usize, Move)| self.owner.is_at(page, page.from);
            let first_left = batch.iter().find(stays).filter(|_| !moved_all);
            self.next = first_left.map_or(last + 1, |(at, _)| *at);
            let moved: u64 = moves.iter().map(|page| u64::from(page.record.stored)).sum();
            self.done_blocks += moved;
            self.report(progress);
            if first_left.is_some() || self.outcome.interrupted {
                return;
            }
        }
    }

    /// Reports the progress. The callback may end the compaction early.
    fn report(&mut self, progress: &mut Progress<'_>) {
        let total = self.outcome.planned_bytes;
        let done = (self.done_blocks * BLOCK_BYTES as u64).min(total);
        self.outcome.interrupted = progress(done, total).is_break();
    }

    /// The next pages of the plan, with their positions in it: at most as many as fit into `room`
    /// blocks and are moved at once, but at least one, however large.
    fn next_batch(&mut self, room: u64) -> Vec<(usize, Move)> {
        let mut batch = Vec::new();
        let mut blocks = 0;
        for at in self.next..self.plan.pages.len() {
            let Some(page) = self.owner.move_of(&self.pages[self.plan.pages[at]]) else {
                continue;
            };
            // Each very large page needs a descriptor block of its own.
            blocks += u64::from(page.record.stored) + 1;
            let is_much = blocks > MOVE_BYTES / BLOCK_BYTES as u64;
            if blocks > room || is_much && !batch.is_empty() {
                break;
            }
            batch.push((at, page));
        }
        if batch.is_empty() && blocks == 0 {
            self.next = self.plan.pages.len();
        }
        batch
    }

    /// Number of pages that have not been handled.
    fn left(&self) -> u64 {
        let left = self.plan.pages[self.next..].iter();
        left.filter(|page| self.owner.move_of(&self.pages[**page]).is_some())
            .count() as u64
    }

    fn has_little_room(&self) -> bool {
        let free = self.owner.local.with_core(|core| core.free_segments());
        free as u64 <= KEPT_FREE && !self.plan.pages.is_empty()
    }

    fn give_back_dead(&mut self) -> Result<(), StoreError> {
        for segment in self.owner.give_back_dead()? {
            self.wasted.remove(&segment);
        }
        Ok(())
    }

    /// Makes one segment free. False if none can be freed, or if the callback ended the compaction.
    fn gain_room(&mut self, progress: &mut Progress<'_>) -> Result<bool, StoreError> {
        if self.outcome.interrupted {
            return Ok(false);
        }
        let rank = |page: &Move| {
            let name = (page.namespace, page.record.key.prefix());
            (self.ranks.get(&name).copied(), page.from)
        };
        let is_wasted = |segment| self.wasted.contains(&segment);
        for kept_free in [KEPT_FREE, 0] {
            if let Some(segment) = self.owner.gain_room(kept_free, is_wasted, rank)? {
                self.wasted.remove(&segment);
                self.report(progress);
                return Ok(true);
            }
        }
        Ok(false)
    }
}
