//! What of a victim is worth a copy.
//!
//! To look at every page of a segment takes milliseconds, and nobody who stores pages is to wait for that: a [`Plan`] is made in steps,
//! and whoever else needs the core comes in between. What a step has seen may be over by the next. A page may have been deleted,
//! replaced, moved, evicted or used: whoever evicts or copies it looks again. A record that is carried on may no longer be needed: that costs
//! its few bytes. Nothing is added meanwhile, since nothing is written into a victim.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use larder_format::{Body, DescriptorBlock, Fingerprint, KeyPrefix, PageKey, Record, Serial};

use super::Core;
use super::log::{Note, NoteBody, Teller};
use super::reclaim::{Move, Victim};
use crate::index::{Heat, Place, SegmentId};
use crate::planted;

/// Pages colder than this share of the range between the coldest and the hottest are dropped rather than copied.
const COLD_SHARE: u32 = 20;

/// Pages hotter than this share of that range are copied rather than dropped, also when more than half a segment is.
const WARM_SHARE: u32 = 4;

/// Of the pages that are left of a victim, as many as this share are evicted elsewhere before it is seen what became of them.
const EVICTED_SHARE: usize = 16;

/// See the module.
#[derive(Debug)]
pub(super) struct Plan {
    carrying: Carrying,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Carry,
    Weigh(Weighing),
    Drop(Dropping),
}

/// Records on their way to where they are kept, and the pages that they tell of.
#[derive(Debug)]
pub(super) struct Carrying {
    victim: Victim,
    blocks: Vec<DescriptorBlock>,
    /// How many of the blocks have been looked at.
    seen: usize,
    oldest: Option<Serial>,
    /// A sync that fails, or is about to, may have lost the blocks of the latest.
    unsynced: Vec<NoteBody>,
    once: Once,
    pub(super) pages: Vec<Move>,
}

/// Pages of which it is being asked how hot they are.
#[derive(Debug)]
struct Weighing {
    rest: Vec<Move>,
    heats: Vec<(Heat, Move)>,
}

/// Pages of which the cold ones are being evicted.
#[derive(Debug)]
struct Dropping {
    /// Those that have not been looked at in this pass, the coldest first, and those that stay.
    rest: std::vec::IntoIter<(Heat, Move)>,
    kept: Vec<(Heat, Move)>,
    pass: Pass,
    /// Blocks that they take.
    total: u64,
    /// Blocks that may be copied.
    limit: u64,
    /// Up to this heat pages go in any case.
    line: Option<Heat>,
    /// From this heat on they stay in any case.
    warm: Heat,
}

#[derive(Clone, Copy, Debug)]
enum Pass {
    /// Leaves among them go. So many there were before.
    Leaves(usize),
    /// So many pages more of the whole store go.
    Elsewhere(usize),
    /// Some of them may have been among these. Whether that is all.
    Look { is_last: bool },
}

/// Lets each record that is no page pass once, and of several deletions of one key the latest: what is carried from segment to
/// segment must not multiply on the way.
#[derive(Debug)]
struct Once {
    latest: HashMap<(Fingerprint, Option<PageKey>), Serial>,
    evictions: HashSet<(Fingerprint, KeyPrefix, Serial)>,
}

impl Once {
    fn new(blocks: &[DescriptorBlock], notes: &[NoteBody]) -> Once {
        let listed = blocks.iter().flat_map(|block| match &block.body {
            Body::Records(records) => records.as_slice(),
            Body::Namespace(_) => &[],
        });
        let noted = notes.iter().filter_map(|body| match body {
            NoteBody::Record(record) => Some(record),
            NoteBody::Namespace(_) => None,
        });
        let mut latest: HashMap<_, Serial> = HashMap::new();
        for record in listed.chain(noted) {
            if let Some(name) = deleted_by(record) {
                let birth = latest.entry(name).or_insert(record.birth());
                *birth = record.birth().max(*birth);
            }
        }
        Once {
            latest,
            evictions: HashSet::new(),
        }
    }

    fn admits(&mut self, record: &Record) -> bool {
        if let Record::Evict {
            namespace,
            key,
            birth,
            ..
        } = record
        {
            return self.evictions.insert((*namespace, *key, *birth));
        }
        let Some(name) = deleted_by(record) else {
            return true;
        };
        let is_latest = self.latest.get(&name) == Some(&record.birth());
        if is_latest {
            self.latest.remove(&name);
        }
        is_latest
    }
}

/// The key that a record deletes; `None` in its place for a whole namespace.
fn deleted_by(record: &Record) -> Option<(Fingerprint, Option<PageKey>)> {
    match record {
        Record::Delete { namespace, key, .. } => Some((*namespace, Some(*key))),
        Record::Clear { namespace, .. } => Some((*namespace, None)),
        Record::Page(_) | Record::Evict { .. } => None,
    }
}

impl Core {
    /// Begins to plan what is to be moved out of a victim whose descriptor blocks are these.
    pub(super) fn begin_plan(&mut self, victim: &Victim, blocks: Vec<DescriptorBlock>) -> Plan {
        self.answers_again(victim.segment);
        Plan {
            carrying: self.begin_carrying(victim, blocks),
            stage: Stage::Carry,
        }
    }

    /// Looks at about so many pages more of a plan's: evicts what is not worth a copy, and queues namespaces and deletions that must not
    /// be lost with the victim. What is to be moved, once nothing is left to be looked at.
    pub(super) fn go_on_planning(&mut self, plan: &mut Plan, at_once: usize) -> Option<Vec<Move>> {
        match &mut plan.stage {
            Stage::Carry => {
                if !self.carry_some(&mut plan.carrying, at_once) {
                    return None;
                }
                let victim = plan.carrying.victim;
                let mut pages = std::mem::take(&mut plan.carrying.pages);
                let segment = self.space.segment(victim.segment);
                if !victim.is_given_up && !segment.suspect {
                    plan.stage = Stage::Weigh(Weighing {
                        heats: Vec::with_capacity(pages.len()),
                        rest: pages,
                    });
                    return None;
                }
                // One that a deletion has to stay in is not won by evicting its pages; a suspect is healed so.
                let is_won = !segment.stuck || segment.suspect;
                if victim.is_given_up && is_won && self.space.may_evict(victim.segment) {
                    self.give_up(&mut pages);
                }
                Some(self.planned(pages))
            }
            Stage::Weigh(weighing) => {
                if self.weigh_some(weighing, at_once) {
                    let heats = std::mem::take(&mut weighing.heats);
                    plan.stage =
                        Stage::Drop(self.begin_dropping(plan.carrying.victim.segment, heats));
                }
                None
            }
            Stage::Drop(dropping) => {
                // On a volume that refuses writes the victim cannot be freed. Its pages stay: their
                // copies are refused.
                let is_won = self.space.may_evict(plan.carrying.victim.segment);
                if is_won && !self.drop_some(dropping, at_once) {
                    return None;
                }
                let kept = std::mem::take(&mut dropping.kept).into_iter();
                let pages = kept.chain(dropping.rest.by_ref());
                let pages = pages.map(|(_, page)| page).collect();
                Some(self.planned(pages))
            }
        }
    }

    fn planned(&mut self, mut pages: Vec<Move>) -> Vec<Move> {
        pages.sort_unstable_by_key(|page| page.from);
        self.pump();
        pages
    }

    pub(super) fn begin_carrying(
        &mut self,
        victim: &Victim,
        blocks: Vec<DescriptorBlock>,
    ) -> Carrying {
        let unsynced = self.log.unsynced_notes_in(victim.segment);
        Carrying {
            victim: *victim,
            seen: 0,
            oldest: self.space.oldest_life(self.syncs.synced),
            once: Once::new(&blocks, &unsynced),
            unsynced,
            blocks,
            pages: Vec::new(),
        }
    }

    /// Carries the records of some blocks on, of about so many; whether these were the last.
    pub(super) fn carry_some(&mut self, carrying: &mut Carrying, at_once: usize) -> bool {
        let Carrying {
            victim,
            blocks,
            seen,
            oldest,
            unsynced,
            once,
            pages,
        } = carrying;
        let mut looked_at = 0;
        while let Some(block) = blocks.get(*seen) {
            if looked_at >= at_once {
                return false;
            }
            *seen += 1;
            match &block.body {
                Body::Namespace(namespace) => {
                    self.carry_namespace(victim.segment, namespace.fingerprint());
                }
                Body::Records(records) => {
                    looked_at += records.len();
                    for record in records {
                        self.plan_record(victim.segment, *oldest, record, once, pages);
                    }
                }
            }
        }
        let is_suspect = self.space.segment(victim.segment).suspect;
        for body in unsynced.drain(..) {
            match body {
                NoteBody::Record(record) => {
                    self.plan_record(victim.segment, *oldest, &record, once, pages);
                }
                // Where it is needed it is written again.
                NoteBody::Namespace(_) if is_suspect => self.carry_note(victim.segment, body),
                NoteBody::Namespace(_) => {}
            }
        }
        true
    }

    fn plan_record(
        &mut self,
        segment: SegmentId,
        oldest: Option<Serial>,
        record: &Record,
        once: &mut Once,
        moves: &mut Vec<Move>,
    ) {
        match record {
            // Most victims hold no page any more.
            Record::Page(_) if self.space.segment(segment).live == 0 => {}
            Record::Page(record) => {
                let Some(&namespace) = self.slots.get(&record.namespace) else {
                    return;
                };
                let from = Place {
                    segment,
                    start: record.start,
                };
                // A record of another size is a lie that recovery did not believe either.
                let is_true = record.blocks == self.namespaces[namespace.0 as usize].page_blocks;
                if is_true
                    && self
                        .index
                        .live(namespace, record.key.prefix(), from, self.now_ms)
                        .is_some()
                {
                    moves.push(Move {
                        namespace,
                        record: *record,
                        from,
                    });
                }
            }
            Record::Evict {
                volume,
                segment: number,
                sequence,
                ..
            } => {
                let lay_in = self.space.id_of(usize::from(*volume), number.0);
                let there = lay_in.is_some_and(|id| self.space.segment(id).sequence == *sequence);
                if there && lay_in != Some(segment) && once.admits(record) {
                    self.log.evictions.keep(*record);
                }
            }
            Record::Delete { birth, .. } | Record::Clear { birth, .. } => {
                let needed = oldest.is_some_and(|oldest| oldest < *birth);
                if needed && once.admits(record) && !planted!(DroppedDeletion) {
                    self.carry_note(segment, NoteBody::Record(*record));
                }
            }
        }
    }

    /// Writes a namespace's record again. One that nobody wants is forgotten at the next opening: servers name new ones with every
    /// change of theirs, and the store takes so many and no more.
    fn carry_namespace(&mut self, segment: SegmentId, fingerprint: Fingerprint) {
        let Some(&slot) = self.slots.get(&fingerprint) else {
            return;
        };
        if self.namespaces[slot.0 as usize].home != Some(segment) {
            return;
        }
        if self.is_wanted(slot) {
            self.carry_note(segment, NoteBody::Namespace(slot.0));
        } else {
            self.namespaces[slot.0 as usize].home = None;
        }
    }

    /// Writes a record of the victim again. The victim is not given back before the copy is synced; without room for it
    /// the victim stays as it is until the next try.
    fn carry_note(&mut self, segment: SegmentId, body: NoteBody) {
        let note = Note::new(body, Teller::Victim(segment));
        match (self.queue_anywhere(note), body) {
            (Ok(()), _) => self.space.segment_mut(segment).carrying += 1,
            // Pages do not need it; it is written again as soon as there is room.
            (Err(_), NoteBody::Namespace(slot)) => self.namespaces[slot as usize].home = None,
            (Err(_), NoteBody::Record(_)) => self.space.segment_mut(segment).stuck = true,
        }
    }

    /// Asks of so many pages how hot they are; whether these were the last.
    fn weigh_some(&self, weighing: &mut Weighing, at_once: usize) -> bool {
        let Weighing { rest, heats } = weighing;
        let some = rest.split_off(rest.len().saturating_sub(at_once));
        heats.extend(
            some.into_iter()
                .filter_map(|page| Some((self.heat_of(&page)?, page))),
        );
        rest.is_empty()
    }

    /// How hot a page is; `None` when it is not there any more.
    fn heat_of(&self, page: &Move) -> Option<Heat> {
        let prefix = page.record.key.prefix();
        let info = self
            .index
            .live(page.namespace, prefix, page.from, self.now_ms)?;
        Some(info.heat)
    }

    /// Cold pages are to be evicted, leaves first, until what is left fits half a segment; past that, the coldest pages
    /// of the whole store, whose parents these may be. What is warm is copied past that too, as long as one page more would fit
    /// beside the copies: after crashes the emptiest segment may hold the newest pages. Room that a crash left unused in the victim
    /// is won without an eviction. The end of a full segment, in which none of its pages would fit, is no such room: wherever they
    /// are moved, as much is left over again.
    fn begin_dropping(&self, victim: SegmentId, mut heats: Vec<(Heat, Move)>) -> Dropping {
        let unused = self.space.unused_blocks(victim);
        let sizes = heats.iter().map(|(_, page)| u64::from(page.record.blocks));
        let page = sizes.clone().max().unwrap_or(0);
        let total: u64 = sizes.sum();
        let won = if unused > page { unused } else { 0 };
        // With a descriptor block for each, which is the worst that can come, and one page more.
        let with_one_more = total + heats.len() as u64 + page + 1;
        let warm = if with_one_more <= self.space.data_blocks() {
            self.warm_line()
        } else {
            Heat(u32::MAX)
        };
        heats.sort_unstable_by_key(coldest_first);
        Dropping {
            pass: Pass::Leaves(heats.len()),
            rest: heats.into_iter(),
            kept: Vec::new(),
            total,
            limit: self.space.data_blocks() / 2 + won,
            line: self.cold_line(),
            warm,
        }
    }

    /// Looks at so many pages; whether that is all.
    fn drop_some(&mut self, dropping: &mut Dropping, at_once: usize) -> bool {
        match dropping.pass {
            Pass::Leaves(before) => {
                for (heat, page) in dropping.rest.by_ref().take(at_once) {
                    let cold = dropping.line.is_some_and(|line| heat <= line);
                    let may_go = cold || dropping.total > dropping.limit && heat < dropping.warm;
                    if !may_go {
                        dropping.kept.push((heat, page));
                        continue;
                    }
                    match self.heat_of(&page) {
                        // Used since: it has its turn after what is colder now.
                        Some(now) if now > heat => dropping.kept.push((now, page)),
                        Some(_) if !self.evict_if_leaf(&page) => dropping.kept.push((heat, page)),
                        Some(_) | None => dropping.total -= u64::from(page.record.blocks),
                    }
                }
                if dropping.rest.len() > 0 {
                    return false;
                }
                dropping.kept.sort_unstable_by_key(coldest_first);
                let coldest = dropping.kept.first();
                if dropping.total <= dropping.limit
                    || coldest.is_none_or(|(heat, _)| *heat >= dropping.warm)
                {
                    return true;
                }
                let left = dropping.kept.len();
                dropping.next_pass(if left < before {
                    Pass::Leaves(left)
                } else {
                    // So many at once that looking through these again and again does not take longer than they do.
                    Pass::Elsewhere(left / EVICTED_SHARE + 1)
                });
            }
            Pass::Elsewhere(left) => {
                let now = left.min(at_once);
                let warm = dropping.warm;
                // A segment in which nothing counts any more comes back at no cost, and nobody need go for this one's sake.
                let is_last = (0..now).any(|_| {
                    self.space.some_died
                        || !self.evict_one(None)
                        || self.frontier.is_some_and(|heat| heat >= warm)
                });
                dropping.pass = if is_last || now == left {
                    Pass::Look { is_last }
                } else {
                    Pass::Elsewhere(left - now)
                };
            }
            Pass::Look { is_last } => {
                for (heat, page) in dropping.rest.by_ref().take(at_once) {
                    if self.heat_of(&page).is_some() {
                        dropping.kept.push((heat, page));
                    } else {
                        dropping.total -= u64::from(page.record.blocks);
                    }
                }
                if dropping.rest.len() > 0 {
                    return false;
                }
                if is_last {
                    return true;
                }
                dropping.next_pass(Pass::Leaves(dropping.kept.len()));
            }
        }
        false
    }

    /// Heat below which a page is among the next to be evicted anyway; none before the store has filled.
    fn cold_line(&self) -> Option<Heat> {
        let hottest = self.index.hottest();
        // Heats are lowered once in a while; a frontier from before that says nothing.
        let coldest = self.frontier.filter(|frontier| *frontier <= hottest)?;
        Some(Heat(
            coldest.0 + hottest.0.saturating_sub(coldest.0) / COLD_SHARE,
        ))
    }

    /// Heat from which on a page is not dropped to save its copy.
    fn warm_line(&self) -> Heat {
        let hottest = self.index.hottest();
        let coldest = self.frontier.filter(|frontier| *frontier <= hottest);
        let coldest = coldest.unwrap_or(Heat(0));
        Heat(coldest.0 + (hottest.0 - coldest.0).div_ceil(WARM_SHARE))
    }

    fn evict_if_leaf(&mut self, page: &Move) -> bool {
        let name = (page.namespace, page.record.key.prefix());
        let evicted = !self.awaited.contains_key(&name)
            && self.index.evict_if_leaf(
                page.namespace,
                page.record.key.prefix(),
                page.from,
                self.now_ms,
            );
        if evicted {
            self.space.drop_live(page.from.segment, page.record.blocks);
            self.counters.evicted += 1;
            self.log_eviction(page.namespace, page.record.key.prefix(), page.from.segment);
        }
        evicted
    }
}

/// Of equally warm pages the deeper goes first: it is nearer to being a leaf.
fn coldest_first((heat, page): &(Heat, Move)) -> (Heat, Reverse<u32>, Place) {
    (*heat, Reverse(page.record.depth), page.from)
}

impl Dropping {
    fn next_pass(&mut self, pass: Pass) {
        self.rest = std::mem::take(&mut self.kept).into_iter();
        self.pass = pass;
    }
}
