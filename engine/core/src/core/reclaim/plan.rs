//! Decides which pages of a victim segment to copy and which to evict.
//!
//! Planning takes milliseconds, so it is split into steps that release the core's lock. The facts
//! that a step saw may have changed by the next: a page may have been deleted, replaced, moved,
//! evicted or used. The code that evicts or copies a page looks again. A forwarded record may no
//! longer be needed: that costs its few bytes. Nothing is added meanwhile, since nothing is written
//! into a victim. If the scale of worths changes between two steps, the pages are weighed anew.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use larder_format::{BLOCK_BYTES, Body, DescriptorBlock, Fingerprint, PageKey, Record, Serial};

use super::duplicates::Search;
use crate::core::base::Base;
use crate::core::journal::records::{Content, Metadata, Origin};
use crate::core::puts::{Below, Puts, is_live};
use crate::core::segments::segment::State;
use crate::core::types::{Descriptors, Move, Victim};
use crate::index::{NamespaceSlot, Place, SegmentId};
use crate::planted;
use crate::policy::{ReclaimLines, Worth};

/// Pages colder than this share of the range between the coldest and the hottest are dropped rather
/// than copied.
const COLD_SHARE: u32 = 20;

/// Pages hotter than this share of that range are copied rather than dropped, also when they fill
/// more than half a segment.
const WARM_SHARE: u32 = 4;

/// Of the pages that are left of a victim, this share is evicted elsewhere before the plan looks at
/// the victim's pages again.
const EVICTED_SHARE: usize = 16;

/// See the module.
#[derive(Debug)]
pub(super) struct Plan {
    forwarding: Forwarding,
    stage: Stage,
    /// No page is evicted.
    pub keeps_all: bool,
}

#[derive(Debug)]
enum Stage {
    Forward,
    /// Tombstones found no room.
    Search(Search),
    Weigh(Weighing),
    Drop(Dropping),
}

/// Records on their way to another segment, and the pages that they name.
#[derive(Debug)]
pub(super) struct Forwarding {
    victim: Victim,
    blocks: Vec<DescriptorBlock>,
    /// How many of the blocks have been looked at.
    seen: usize,
    oldest: Option<Serial>,
    /// Written records that a sync which failed, or is about to, may have lost.
    unsynced: Vec<Content>,
    once: Once,
    /// Tombstones that found no room.
    pub unplaced: Vec<Record>,
    pub pages: Vec<Move>,
}

/// How far a plan has come.
#[derive(Debug)]
pub(super) enum Progress {
    /// Another step can follow at once.
    Step,
    /// Descriptors of another segment are being read.
    Reading,
    /// The pages to move.
    Planned(Vec<Move>),
}

/// Pages whose worth is being looked up.
#[derive(Debug)]
struct Weighing {
    /// The scale of the worths.
    scale: u64,
    rest: Vec<Move>,
    worths: Vec<(Worth, Move)>,
}

/// Pages of which the cold ones are being evicted.
#[derive(Debug)]
struct Dropping {
    /// The scale of all worths here.
    scale: u64,
    /// The pages that this pass has not looked at, the coldest first, and the pages that stay.
    rest: std::vec::IntoIter<(Worth, Move)>,
    kept: Vec<(Worth, Move)>,
    pass: Pass,
    /// Blocks of both.
    total: u64,
    /// Blocks that may be copied.
    limit: u64,
    /// Pages up to this worth go in any case.
    line: Option<Worth>,
    /// Pages from this worth on stay in any case.
    warm: Worth,
}

#[derive(Clone, Copy, Debug)]
enum Pass {
    /// Evicts leaves among the pages of the victim: the number of these pages before the pass.
    Leaves(usize),
    /// Evicts this number of pages of the whole store.
    Elsewhere(usize),
    /// Leaves out the pages of the victim that `Elsewhere` has evicted.
    Look { is_last: bool },
}

/// Lets each metadata record pass once, and of several tombstones of one key the latest: records
/// must not multiply on their way from segment to segment.
#[derive(Debug)]
struct Once {
    latest: HashMap<(Fingerprint, Option<PageKey>), Serial>,
    others: HashSet<Record>,
}

impl Once {
    fn new(blocks: &[DescriptorBlock], unsynced: &[Content]) -> Once {
        let listed = blocks.iter().flat_map(|block| match &block.body {
            Body::Records(records) => records.as_slice(),
            Body::Namespace(_) => &[],
        });
        let unsynced = unsynced.iter().filter_map(|content| match content {
            Content::Record(record) => Some(record),
            Content::Namespace(_) => None,
        });
        let mut latest: HashMap<_, Serial> = HashMap::new();
        for record in listed.chain(unsynced) {
            if let Some(name) = deleted_by(record) {
                let version = latest.entry(name).or_insert(record.birth());
                *version = record.birth().max(*version);
            }
        }
        Once {
            latest,
            others: HashSet::new(),
        }
    }

    fn admits(&mut self, record: &Record) -> bool {
        let Some(name) = deleted_by(record) else {
            return self.others.insert(*record);
        };
        let is_latest = self.latest.get(&name) == Some(&record.birth());
        if is_latest {
            self.latest.remove(&name);
        }
        is_latest
    }
}

/// The key that a tombstone deletes; `None` in its place for a whole namespace.
pub(super) fn deleted_by(record: &Record) -> Option<(Fingerprint, Option<PageKey>)> {
    match record {
        Record::Delete { namespace, key, .. } => Some((*namespace, Some(*key))),
        Record::Clear { namespace, .. } => Some((*namespace, None)),
        Record::Page(_) | Record::Evict { .. } | Record::Void { .. } | Record::Pin { .. } => None,
    }
}

impl Plan {
    /// Begins to plan for a victim with these descriptor blocks.
    pub(super) fn begin(below: &Below<'_>, victim: &Victim, blocks: Vec<DescriptorBlock>) -> Plan {
        Plan {
            forwarding: Forwarding::begin(below, victim, blocks),
            stage: Stage::Forward,
            keeps_all: false,
        }
    }

    /// Looks at about `at_once` pages more: evicts pages that are not worth a copy, and queues
    /// namespaces and tombstones that must not be lost with the victim.
    pub(super) fn go_on(
        &mut self,
        puts: &mut Puts,
        below: &mut Below<'_>,
        at_once: usize,
    ) -> Progress {
        let victim = self.forwarding.victim;
        match &mut self.stage {
            Stage::Forward => {
                if !self.forwarding.go_on(below, at_once) {
                    return Progress::Step;
                }
                let unplaced = std::mem::take(&mut self.forwarding.unplaced);
                if unplaced.is_empty() {
                    return self.forwarded(puts, below);
                }
                self.stage = Stage::Search(Search::begin(below, victim.segment, &unplaced));
                Progress::Step
            }
            Stage::Search(search) => {
                if search.go_on(below) {
                    return Progress::Reading;
                }
                if !search.found_all() {
                    below.segments.get_mut(victim.segment).set_stuck(true);
                }
                self.forwarded(puts, below)
            }
            Stage::Weigh(weighing) => {
                if weighing.scale != below.base.index.scale() {
                    let weighed = weighing.worths.drain(..).map(|(_, page)| page);
                    let pages = weighed.chain(weighing.rest.drain(..)).collect();
                    self.stage = Stage::Weigh(Weighing::begin(below.base, pages));
                } else if weighing.go_on(below.base, at_once) {
                    let worths = std::mem::take(&mut weighing.worths);
                    let scale = weighing.scale;
                    let dropping = Dropping::begin(puts, below, victim.segment, scale, worths);
                    self.stage = Stage::Drop(dropping);
                }
                Progress::Step
            }
            Stage::Drop(dropping) => {
                // On a volume that refuses writes the victim cannot be released. Its pages stay:
                // their copies are refused.
                let is_won = below.segments.may_evict(victim.segment);
                if is_won && dropping.scale != below.base.index.scale() {
                    self.stage = Stage::Weigh(Weighing::begin(below.base, dropping.pages()));
                    return Progress::Step;
                }
                if is_won && !dropping.go_on(puts, below, at_once) {
                    return Progress::Step;
                }
                planned(dropping.pages())
            }
        }
    }

    /// All records have been forwarded, as far as there was room.
    fn forwarded(&mut self, puts: &mut Puts, below: &mut Below<'_>) -> Progress {
        let victim = self.forwarding.victim;
        let pages = std::mem::take(&mut self.forwarding.pages);
        let segment = below.segments.get(victim.segment);
        if !victim.is_given_up && !segment.is_suspect() && !self.keeps_all {
            self.stage = Stage::Weigh(Weighing::begin(below.base, pages));
            return Progress::Step;
        }
        // Evicting the pages of a segment with a tombstone that has to stay gains nothing. A
        // suspect is made whole so.
        let is_won = !segment.is_stuck() || segment.is_suspect();
        if victim.is_given_up && is_won && below.segments.may_evict(victim.segment) {
            for page in &pages {
                puts.evict_anyway(below, page);
            }
            return Progress::Planned(Vec::new());
        }
        planned(pages)
    }

    /// Answers the request for descriptors of another segment.
    pub(super) fn descriptors_read(&mut self, below: &mut Below<'_>, read: &Descriptors) {
        if let Stage::Search(search) = &mut self.stage {
            search.read(below, read);
        }
    }

    /// The descriptors of the victim.
    pub(super) fn into_blocks(self) -> Vec<DescriptorBlock> {
        self.forwarding.blocks
    }

    pub(super) fn is_reading(&self) -> bool {
        matches!(&self.stage, Stage::Search(search) if search.is_reading())
    }
}

fn planned(mut pages: Vec<Move>) -> Progress {
    pages.sort_unstable_by_key(|page| page.from);
    Progress::Planned(pages)
}

impl Forwarding {
    pub(super) fn begin(
        below: &Below<'_>,
        victim: &Victim,
        blocks: Vec<DescriptorBlock>,
    ) -> Forwarding {
        let unsynced = below.journal.unsynced_in(victim.segment);
        let synced = below.base.marks.synced;
        Forwarding {
            victim: *victim,
            seen: 0,
            oldest: below.segments.oldest_generation(synced),
            once: Once::new(&blocks, &unsynced),
            unsynced,
            blocks,
            unplaced: Vec::new(),
            pages: Vec::new(),
        }
    }

    /// Forwards the records of some blocks, of about `at_once` records. Returns whether these were
    /// the last.
    pub(super) fn go_on(&mut self, below: &mut Below<'_>, at_once: usize) -> bool {
        let mut looked_at = 0;
        while let Some(block) = self.blocks.get(self.seen) {
            if looked_at >= at_once {
                return false;
            }
            self.seen += 1;
            match &block.body {
                Body::Namespace(namespace) => {
                    let fingerprint = namespace.fingerprint();
                    forward_namespace(below, self.victim.segment, &fingerprint);
                }
                Body::Records(records) => {
                    looked_at += records.len();
                    for record in records.clone() {
                        self.forward_record(below, &record);
                    }
                }
            }
        }
        let is_suspect = below.segments.get(self.victim.segment).is_suspect();
        for content in std::mem::take(&mut self.unsynced) {
            match content {
                Content::Record(record) => self.forward_record(below, &record),
                Content::Namespace(slot) if is_suspect => {
                    write_namespace(below, self.victim.segment, slot);
                }
                // It is written again where it is needed.
                Content::Namespace(_) => {}
            }
        }
        true
    }

    fn forward_record(&mut self, below: &mut Below<'_>, record: &Record) {
        let segment = self.victim.segment;
        match record {
            // Most victims hold no page any more.
            Record::Page(_) if below.segments.get(segment).live() == 0 => {}
            Record::Page(record) => {
                let Some(namespace) = below.base.namespaces.slot_of(&record.namespace) else {
                    return;
                };
                let page = Move {
                    namespace,
                    record: *record,
                    from: Place::of(segment, record),
                };
                // A record of another size is wrong: recovery did not trust it either.
                let blocks = below.base.namespaces.page_blocks(namespace);
                if record.blocks == blocks && is_live(below.base, &page) {
                    self.pages.push(page);
                }
            }
            Record::Evict { home, .. } | Record::Void { home, .. } => {
                let lay_in = below
                    .segments
                    .id_of(usize::from(home.volume), home.segment.0);
                // The generation of a segment that could not be read is not known.
                let is_there = |id| {
                    let segment = below.segments.get(id);
                    segment.generation() == home.sequence || segment.state() == State::Unreadable
                };
                if lay_in.is_some_and(is_there)
                    && lay_in != Some(segment)
                    && self.once.admits(record)
                {
                    below.journal.keep_departure(*record);
                }
            }
            Record::Delete { birth, .. } | Record::Clear { birth, .. } => {
                let needed = self.oldest.is_some_and(|oldest| oldest < *birth);
                if needed
                    && self.once.admits(record)
                    && !planted!(DroppedDeletion)
                    && !forward(below, segment, Content::Record(*record))
                {
                    self.unplaced.push(*record);
                }
            }
            // A pin that has ended goes on for as long as a pin that it replaced may be there. A
            // pin that was replaced stays behind: it must not outlive its successor.
            Record::Pin {
                birth,
                until_unix_s,
                ..
            } => {
                let has_ended = u64::from(*until_unix_s) <= below.base.unix_ms() / 1000;
                let replaces = has_ended && self.oldest.is_some_and(|oldest| oldest < *birth);
                if (replaces || below.base.is_pinned_by(record))
                    && self.once.admits(record)
                    && !planted!(DroppedPin)
                    && !forward(below, segment, Content::Record(*record))
                {
                    below.segments.get_mut(segment).set_stuck(true);
                }
            }
        }
    }
}

/// Writes a namespace's record again, if it is wanted. Otherwise it is forgotten at the next open:
/// servers name new namespaces with every change of theirs, and a store takes a limited number.
fn forward_namespace(below: &mut Below<'_>, segment: SegmentId, fingerprint: &Fingerprint) {
    let Some(slot) = below.base.namespaces.slot_of(fingerprint) else {
        return;
    };
    if below.base.namespaces.get(slot).home != Some(segment) {
        return;
    }
    if below.base.is_wanted(slot) {
        write_namespace(below, segment, slot);
    } else {
        below.base.namespaces.get_mut(slot).home = None;
    }
}

/// Writes a namespace's record again. Without room it stays unwritten until there is some: pages do
/// not need it.
fn write_namespace(below: &mut Below<'_>, segment: SegmentId, slot: NamespaceSlot) {
    if !forward(below, segment, Content::Namespace(slot)) {
        below.base.namespaces.get_mut(slot).home = None;
    }
}

/// Writes a record of the victim again. The victim is not released before the new record is synced.
/// Returns whether there was room.
fn forward(below: &mut Below<'_>, segment: SegmentId, content: Content) -> bool {
    let Below {
        base,
        segments,
        journal,
        ..
    } = below;
    let record = Metadata::new(content, Origin::Victim(segment));
    let is_queued = journal.queue_anywhere(base, segments, record).is_ok();
    if is_queued {
        segments.get_mut(segment).begin_forwarding();
    }
    is_queued
}

/// The worth of a page; `None` when it is not there any more.
fn worth_of(base: &Base, page: &Move) -> Option<Worth> {
    let prefix = page.record.key.prefix();
    let index = &base.index;
    let info = index.live(page.namespace, prefix, page.from, base.now_ms)?;
    Some(info.worth)
}

impl Weighing {
    fn begin(base: &Base, pages: Vec<Move>) -> Weighing {
        Weighing {
            scale: base.index.scale(),
            worths: Vec::with_capacity(pages.len()),
            rest: pages,
        }
    }

    /// Looks up the worth of some pages. Returns whether these were the last.
    fn go_on(&mut self, base: &Base, at_once: usize) -> bool {
        let some = self.rest.split_off(self.rest.len().saturating_sub(at_once));
        let worths = some.into_iter();
        let worths = worths.filter_map(|page| Some((worth_of(base, &page)?, page)));
        self.worths.extend(worths);
        self.rest.is_empty()
    }
}

impl Dropping {
    /// Cold pages are evicted, leaves first, until the rest fits half a segment; after that the
    /// coldest pages of the whole store, whose parents these pages may be. Warm pages are copied
    /// beyond that too, as long as one page more would fit beside the copies: after crashes the
    /// emptiest segment may hold the newest pages. Room that a crash left unused in the victim is
    /// won without an eviction. The end of a full segment, in which none of its pages would fit, is
    /// no such room: it is lost again wherever they are moved.
    fn begin(
        puts: &Puts,
        below: &Below<'_>,
        victim: SegmentId,
        scale: u64,
        mut worths: Vec<(Worth, Move)>,
    ) -> Dropping {
        let segments = &*below.segments;
        let unused = segments.unused_blocks(victim);
        let sizes = worths.iter().map(|(_, page)| u64::from(page.record.stored));
        let page = sizes.clone().max().unwrap_or(0);
        let total: u64 = sizes.sum();
        let won = if unused > page { unused } else { 0 };
        let (line, warm) = lines_of(puts, below.base);
        // With a descriptor block for each page, which is the worst case, and one page more.
        let with_one_more = total + worths.len() as u64 + page + 1;
        let fits = with_one_more <= segments.data_blocks();
        worths.sort_unstable_by_key(coldest_first);
        Dropping {
            scale,
            pass: Pass::Leaves(worths.len()),
            rest: worths.into_iter(),
            kept: Vec::new(),
            total,
            limit: segments.data_blocks() / 2 + won,
            line,
            warm: if fits { warm } else { Worth(u32::MAX) },
        }
    }

    /// The pages that stay, so far.
    fn pages(&mut self) -> Vec<Move> {
        let kept = std::mem::take(&mut self.kept).into_iter();
        let pages = kept.chain(self.rest.by_ref());
        pages.map(|(_, page)| page).collect()
    }

    /// Looks at so many pages. Returns whether these were the last.
    fn go_on(&mut self, puts: &mut Puts, below: &mut Below<'_>, at_once: usize) -> bool {
        match self.pass {
            Pass::Leaves(before) => self.drop_leaves(puts, below, at_once, before),
            Pass::Elsewhere(left) => {
                self.evict_elsewhere(puts, below, at_once, left);
                false
            }
            Pass::Look { is_last } => self.look(below.base, at_once, is_last),
        }
    }

    fn drop_leaves(
        &mut self,
        puts: &mut Puts,
        below: &mut Below<'_>,
        at_once: usize,
        before: usize,
    ) -> bool {
        for (worth, page) in self.rest.by_ref().take(at_once) {
            let cold = self.line.is_some_and(|line| worth <= line);
            let may_go = cold || self.total > self.limit && worth < self.warm;
            if !may_go {
                self.kept.push((worth, page));
                continue;
            }
            match worth_of(below.base, &page) {
                // Used since: it has its turn after the pages that are colder now.
                Some(now) if now > worth => self.kept.push((now, page)),
                Some(_) if !puts.evict_chain(below, &page) => self.kept.push((worth, page)),
                Some(_) | None => self.total -= u64::from(page.record.stored),
            }
        }
        if self.rest.len() > 0 {
            return false;
        }
        self.kept.sort_unstable_by_key(coldest_first);
        let coldest = self.kept.first();
        let is_warm = coldest.is_none_or(|(worth, _)| *worth >= self.warm);
        if self.total <= self.limit || is_warm {
            return true;
        }
        let left = self.kept.len();
        self.next_pass(if left < before {
            Pass::Leaves(left)
        } else {
            // So many at once that the repeated passes do not take longer than the evictions.
            Pass::Elsewhere(left / EVICTED_SHARE + 1)
        });
        false
    }

    fn evict_elsewhere(
        &mut self,
        puts: &mut Puts,
        below: &mut Below<'_>,
        at_once: usize,
        left: usize,
    ) {
        let now = left.min(at_once);
        let warm = self.warm;
        // A segment that lost its last page comes back at no cost: no page has to go for this one.
        let is_last = (0..now).any(|_| {
            below.segments.some_died()
                || !puts.evict_one(below, None)
                || puts
                    .frontier(&below.base.index)
                    .is_some_and(|worth| worth >= warm)
        });
        self.pass = if is_last || now == left {
            Pass::Look { is_last }
        } else {
            Pass::Elsewhere(left - now)
        };
    }

    fn look(&mut self, base: &Base, at_once: usize, is_last: bool) -> bool {
        for (worth, page) in self.rest.by_ref().take(at_once) {
            if worth_of(base, &page).is_some() {
                self.kept.push((worth, page));
            } else {
                self.total -= u64::from(page.record.stored);
            }
        }
        if self.rest.len() > 0 {
            return false;
        }
        if !is_last {
            self.next_pass(Pass::Leaves(self.kept.len()));
        }
        is_last
    }

    fn next_pass(&mut self, pass: Pass) {
        self.rest = std::mem::take(&mut self.kept).into_iter();
        self.pass = pass;
    }
}

/// The lines of the policy. Those of the default, whose worths are stamps: up to the first one a
/// page is among the next to be evicted anyway (none before the store has filled).
fn lines_of(puts: &Puts, base: &Base) -> (Option<Worth>, Worth) {
    let written = &base.counters.store.written;
    let blocks = |bytes: u64| bytes / BLOCK_BYTES as u64;
    if let Some(ReclaimLines {
        drop_up_to,
        keep_from,
        ..
    }) = base
        .index
        .lines(blocks(written.pages_bytes), blocks(written.copies_bytes))
    {
        return (drop_up_to, keep_from);
    }
    let hottest = base.index.hottest().0;
    // Read after the hottest: so it is no hotter, also where heats are lowered at this moment.
    let coldest = puts.frontier(&base.index);
    let line = |coldest: Worth| Worth(coldest.0 + (hottest - coldest.0) / COLD_SHARE);
    let from = coldest.unwrap_or_default().0;
    let warm = Worth(from + (hottest - from).div_ceil(WARM_SHARE));
    (coldest.map(line), warm)
}

/// Of equally warm pages the deeper goes first: it is nearer to being a leaf.
fn coldest_first((worth, page): &(Worth, Move)) -> (Worth, Reverse<u32>, Place) {
    (*worth, Reverse(page.record.depth), page.from)
}
