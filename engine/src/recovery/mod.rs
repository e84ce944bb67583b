//! Recovery: from what the segments' descriptors say to the state of a core and an index.
//!
//! Every segment is scanned ([`scan`]). Then records are set against one another:
//!
//! - of several records of one key the highest birth counts, of equal births (copies) the highest commit; but where that one is
//!   not proven, the newest that is whole (`doubt`): the only case in which payload is read;
//! - a deletion kills the pages of its key (a clear: of its namespace) that were born before it;
//! - a page is *proven* when its commit is covered by its segment's sealed header, or by a `synced` mark that some block
//!   or header of the same run carries; else it is served only as far as its checksum holds.
//!
//! Pages enter the index in the order of their commits, so that after a restart the oldest are the coldest; what
//! reclaim thought worth a copy counts from then on. Evictions are records too: without them a crash would bring back what
//! was dropped, and the pages that were kept instead would have to make room for it.
//!
//! Recovery writes nothing. It names the headers that the opener has to write ([`Recovery::adoptions`]) so that segments left open
//! by a crash need no second scan, and so that what is unproven stays so.

mod doubt;
pub mod scan;

use std::collections::{BTreeMap, HashMap, HashSet};

use larder_format::{
    Body, Fingerprint, HEADER_BLOCKS, KeyPrefix, Namespace, OpenState, PageKey, PageRecord, Record,
    Run, SegmentHeader, SegmentNo, SegmentState, Serial, Superblock,
};

use crate::core::{InitState, NAMESPACES_MAX, NamespaceInit, Recovered, SegmentInit};
use crate::disk::Disk;
use crate::index::{Adoption, Index, NamespaceSlot, Parent, Place, Publish, SegmentId};
use crate::planted;
use doubt::{Doubt, Payloads};
use scan::{Case, Fault, FaultReason, SegmentScan, Spot};

/// Pages published together.
const PUBLISH_BATCH: usize = 256;

/// What is kept of each page beyond what recovery needs: nothing for an open, which must be fast with millions of them.
pub(crate) trait Extra: Copy {
    /// Takes it from the page's descriptor.
    fn of(page: &PageRecord) -> Self;
}

impl Extra for () {
    fn of(_: &PageRecord) {}
}

/// A page that a descriptor names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found<E = ()> {
    pub slot: NamespaceSlot,
    pub key: KeyPrefix,
    pub birth: Serial,
    pub commit: Serial,
    pub place: Place,
    pub checksum: u64,
    pub parent: Option<KeyPrefix>,
    pub head: bool,
    pub proven: bool,
    pub extra: E,
}

/// What became of a page that a descriptor names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is what its key stands for.
    Live,
    /// The key was put again, or the page was copied elsewhere.
    Superseded,
    /// A crash cut its write short, and an older record of the key is whole.
    Unfinished,
    /// Its key was deleted or evicted, by a record of this birth.
    Gone(Serial),
    /// Its namespace was cleared, by a record of this birth.
    Cleared(Serial),
}

/// A segment's block that could not be used.
#[derive(Clone, Debug)]
pub struct Damage {
    /// Index of the volume.
    pub volume: usize,
    /// The segment's number there.
    pub segment: u32,
    /// What, and where.
    pub fault: Fault,
}

/// What recovery found.
#[derive(Debug)]
pub struct Recovery {
    /// For the core.
    pub recovered: Recovered,
    /// Headers to write before the store is used: volume, header.
    pub adoptions: Vec<(usize, SegmentHeader)>,
    /// What was broken.
    pub damage: Vec<Damage>,
    /// Pages that are not proven.
    pub unproven: u64,
    /// Highest run that any block or header carries.
    pub highest_run: Run,
}

/// The records of all segments, to be set against one another.
pub(crate) struct Gathered<E = ()> {
    pub namespaces: Vec<NamespaceInit>,
    slots: HashMap<Fingerprint, NamespaceSlot>,
    pages: Vec<Found<E>>,
    /// Births below these were deleted or dropped.
    gone: HashMap<(NamespaceSlot, KeyPrefix), Serial>,
    clears: HashMap<NamespaceSlot, Serial>,
    /// The whole keys of pages that their own segment's header does not vouch for.
    keys: HashMap<(NamespaceSlot, KeyPrefix), PageKey>,
    /// Highest synced mark of each run.
    marks: BTreeMap<Run, Serial>,
    pub damage: Vec<Damage>,
    pub highest: Serial,
}

/// The places of all segments that a superblock names, by volume.
#[must_use]
pub fn spots_of(superblock: &Superblock) -> Vec<Spot> {
    let mut spots = Vec::new();
    for (volume, entry) in superblock.volumes.iter().enumerate() {
        for number in 0..entry.segments {
            spots.push(Spot {
                store: superblock.store,
                volume,
                number,
                segment_blocks: superblock.segment_blocks,
            });
        }
    }
    spots
}

/// Reads a store's descriptors into `index`, which must be empty. `superblocks` are those of its volumes, in its order, `None` for
/// a lost one. With `proven_only` only pages known to be whole on the device, in segments that take no more, are taken in:
/// what a reader without the lock may see.
///
/// # Panics
/// When no volume is there.
pub fn recover(
    disk: &dyn Disk,
    superblocks: &[Option<&Superblock>],
    index: &Index,
    proven_only: bool,
) -> Recovery {
    let there = || superblocks.iter().copied().flatten();
    let superblock = there()
        .next()
        .expect("a store is recovered from at least one volume");
    let clean = there().all(|superblock| superblock.state == OpenState::Clean);
    let newest_run = there()
        .map(|superblock| superblock.run)
        .fold(Run::FIRST, Run::max);
    let all = spots_of(superblock);
    let present: Vec<Spot> = all
        .iter()
        .filter(|spot| superblocks.get(spot.volume).is_some_and(Option::is_some))
        .copied()
        .collect();
    let mut gathered: Gathered = Gathered::new();
    let mut scans: HashMap<(usize, u32), SegmentSummary> = HashMap::with_capacity(present.len());
    let ids: HashMap<(usize, u32), SegmentId> = all
        .iter()
        .zip(0..)
        .map(|(spot, id)| ((spot.volume, spot.number), SegmentId(id)))
        .collect();
    scan::scan(disk, &present, clean, |spot, scan| {
        let key = (spot.volume, spot.number);
        let summary = gathered.take(ids[&key], spot, scan, proven_only);
        scans.insert(key, summary);
    });
    gathered.prove(scans.values_mut());
    let highest_run = gathered.highest.run().max(Run::FIRST);
    let last = newest_run.max(highest_run);
    let next = if planted!(RunNotBumped) {
        Some(last)
    } else {
        last.next()
    };
    let run = next.unwrap_or(highest_run);
    let first = Serial::first_of(run);
    let unproven = gathered.publish(disk, &all, index, proven_only);
    let mut adoptions = Vec::new();
    let segments = all
        .iter()
        .map(|spot| match scans.get(&(spot.volume, spot.number)) {
            None => SegmentInit {
                state: InitState::Lost,
                sequence: Serial::ZERO,
                data_end: HEADER_BLOCKS,
                blocks: 0,
                last_commit: Serial::ZERO,
                proven: Serial::ZERO,
            },
            Some(summary) => summary.init(spot, first, &mut adoptions),
        })
        .collect();
    let recovered = Recovered {
        volumes: superblock
            .volumes
            .iter()
            .map(|entry| entry.segments)
            .collect(),
        segments,
        namespaces: gathered.namespaces,
        first,
        clean,
    };
    Recovery {
        recovered,
        adoptions,
        damage: gathered.damage,
        unproven,
        highest_run,
    }
}

/// What is kept of a scan once its records have been gathered.
#[derive(Debug)]
pub(crate) struct SegmentSummary {
    pub case: Case,
    pub header: Option<SegmentHeader>,
    pub sequence: Serial,
    pub block_count: u32,
    pub data_end: u32,
    last_commit: Serial,
    /// Part of what tells about it could not be read, which is not the same as empty.
    unreadable: bool,
    /// Lowest commit in it that its header does not vouch for.
    unvouched: Option<Serial>,
    /// Commits up to here are whole on the device.
    pub proven: Serial,
    /// Positions of its pages among those gathered.
    pub pages: std::ops::Range<usize>,
}

impl SegmentSummary {
    fn init(
        &self,
        spot: &Spot,
        first: Serial,
        adoptions: &mut Vec<(usize, SegmentHeader)>,
    ) -> SegmentInit {
        let state = match (self.case, self.header.as_ref().map(|header| header.state)) {
            _ if self.unreadable => InitState::Unreadable,
            (Case::Blank | Case::Free, _) => InitState::Free,
            (Case::Listed, Some(SegmentState::Open)) => InitState::Open,
            _ => InitState::Sealed,
        };
        // A segment whose headers and blocks are all broken has some life; give it one that is younger than all others.
        let unknown = state == InitState::Sealed && self.sequence == Serial::ZERO;
        let sequence = if unknown { first } else { self.sequence };
        let adopted = matches!(self.case, Case::Unlisted | Case::Newer | Case::Hidden);
        if adopted && !self.unreadable {
            adoptions.push((
                spot.volume,
                SegmentHeader {
                    store: spot.store,
                    volume: u16::try_from(spot.volume).unwrap_or(u16::MAX),
                    segment: SegmentNo(spot.number),
                    sequence,
                    state: SegmentState::Sealed,
                    blocks: self.block_count,
                    data_end: self.data_end,
                    proven: self.proven,
                    synced: Serial::ZERO,
                },
            ));
        }
        SegmentInit {
            state,
            sequence,
            data_end: self.data_end,
            blocks: self.block_count,
            last_commit: self.last_commit,
            proven: self.proven,
        }
    }
}

impl<E: Extra> Gathered<E> {
    pub(crate) fn new() -> Gathered<E> {
        Gathered {
            namespaces: Vec::new(),
            slots: HashMap::new(),
            pages: Vec::new(),
            gone: HashMap::new(),
            clears: HashMap::new(),
            keys: HashMap::new(),
            marks: BTreeMap::new(),
            damage: Vec::new(),
            highest: Serial::ZERO,
        }
    }

    /// Takes in what one segment holds.
    pub(crate) fn take(
        &mut self,
        id: SegmentId,
        spot: &Spot,
        scan: SegmentScan,
        proven_only: bool,
    ) -> SegmentSummary {
        let unreadable = scan
            .faults
            .iter()
            .any(|fault| matches!(fault.reason, FaultReason::Unreadable(_)));
        for fault in scan.faults {
            self.damage.push(Damage {
                volume: spot.volume,
                segment: spot.number,
                fault,
            });
        }
        self.highest = self.highest.max(scan.sequence);
        if let Some(header) = &scan.header {
            self.mark(header.synced);
        }
        let first = self.pages.len();
        let mut last_commit = Serial::ZERO;
        let mut unvouched: Option<Serial> = None;
        let word = scan.header.as_ref().map_or(Serial::ZERO, |h| h.proven);
        // A reader beside a writer leaves segments alone that may still be written.
        let visible = !proven_only || matches!(scan.case, Case::Listed);
        let vouched = match (scan.case, &scan.header) {
            (Case::Listed, Some(header)) => header.proven,
            _ => Serial::ZERO,
        };
        for block in &scan.blocks {
            self.mark(block.header.synced);
            self.highest = self.highest.max(block.header.commit);
            last_commit = last_commit.max(block.header.commit);
            if block.header.commit > word {
                let lowest = unvouched.get_or_insert(block.header.commit);
                *lowest = block.header.commit.min(*lowest);
            }
            match &block.body {
                Body::Namespace(record) => self.namespace(id, record),
                Body::Records(records) => {
                    let commit = block.header.commit;
                    for record in records {
                        self.record(id, commit, record, visible);
                        if let Record::Page(page) = record
                            && commit > vouched
                            && let Some(&slot) = self.slots.get(&page.namespace)
                        {
                            self.keys.insert((slot, page.key.prefix()), page.key);
                        }
                    }
                }
            }
        }
        SegmentSummary {
            case: scan.case,
            unreadable,
            header: scan.header,
            sequence: scan.sequence,
            block_count: scan.block_count,
            data_end: scan.data_end,
            last_commit,
            unvouched,
            proven: Serial::ZERO,
            pages: first..self.pages.len(),
        }
    }

    fn mark(&mut self, synced: Serial) {
        let mark = self.marks.entry(synced.run()).or_insert(synced);
        *mark = (*mark).max(synced);
    }

    fn namespace(&mut self, home: SegmentId, record: &Namespace) {
        let blocks = record.shape().page_blocks();
        let Some(slot) = self.slot(record.fingerprint(), blocks) else {
            return;
        };
        let init = &mut self.namespaces[slot.0 as usize];
        init.record = Some((record.clone(), home));
    }

    /// The slot of a namespace; `None` when there are too many, or when its pages do not all have one size: then somebody lies.
    fn slot(&mut self, fingerprint: Fingerprint, blocks: u32) -> Option<NamespaceSlot> {
        if let Some(&slot) = self.slots.get(&fingerprint) {
            let init = &mut self.namespaces[slot.0 as usize];
            if init.page_blocks == 0 {
                init.page_blocks = blocks;
            }
            return (blocks == 0 || init.page_blocks == blocks).then_some(slot);
        }
        if self.namespaces.len() >= NAMESPACES_MAX {
            return None;
        }
        let slot = NamespaceSlot(u16::try_from(self.namespaces.len()).ok()?);
        self.namespaces.push(NamespaceInit {
            fingerprint,
            record: None,
            page_blocks: blocks,
        });
        self.slots.insert(fingerprint, slot);
        Some(slot)
    }

    fn record(&mut self, segment: SegmentId, commit: Serial, record: &Record, visible: bool) {
        match record {
            Record::Page(page) => self.page(segment, commit, page, visible),
            Record::Delete {
                namespace,
                key,
                birth,
            } => {
                if let Some(slot) = self.slot(*namespace, 0) {
                    let deleted = self.gone.entry((slot, key.prefix())).or_insert(*birth);
                    *deleted = if planted!(LowerBirthWins) {
                        (*deleted).min(*birth)
                    } else {
                        (*deleted).max(*birth)
                    };
                }
            }
            Record::Evict {
                namespace,
                key,
                birth,
                ..
            } => {
                if let Some(slot) = self.slot(*namespace, 0) {
                    let gone = self.gone.entry((slot, *key)).or_insert(*birth);
                    *gone = (*gone).max(*birth);
                }
            }
            Record::Clear { namespace, birth } => {
                if let Some(slot) = self.slot(*namespace, 0) {
                    let cleared = self.clears.entry(slot).or_insert(*birth);
                    *cleared = (*cleared).max(*birth);
                }
            }
        }
    }

    fn page(&mut self, segment: SegmentId, commit: Serial, page: &PageRecord, visible: bool) {
        let Some(slot) = self.slot(page.namespace, page.blocks) else {
            return;
        };
        if !visible {
            return;
        }
        self.pages.push(Found {
            slot,
            key: page.key.prefix(),
            birth: page.birth,
            commit,
            place: Place {
                segment,
                start: page.start,
            },
            checksum: page.checksum,
            parent: page.parent,
            head: page.depth == 0,
            proven: false,
            extra: E::of(page),
        });
    }

    /// Decides which pages are proven. A sealed header's word counts for its segment; where there is none the marks do, each
    /// for its own run only: a later run's syncs say nothing of what an earlier one left unfinished.
    pub(crate) fn prove<'a>(&mut self, scans: impl Iterator<Item = &'a mut SegmentSummary>) {
        for summary in scans {
            // A segment may hold commits of several runs: of one that left it open at a clean close and of the next, or of one
            // that added records when it was sealed. What the header vouches for comes first.
            let mark = summary
                .unvouched
                .and_then(|commit| {
                    let mark = self.marks.get(&commit.run());
                    mark.copied().filter(|mark| *mark >= commit)
                })
                // Not further than what was found: the header that says so must not vouch for blocks that are added later.
                .map_or(Serial::ZERO, |mark| mark.min(summary.last_commit));
            let closed = summary
                .header
                .as_ref()
                .map_or(Serial::ZERO, |header| header.proven);
            summary.proven = summary.word().unwrap_or(mark.max(closed));
            for found in &mut self.pages[summary.pages.clone()] {
                found.proven = found.commit <= summary.proven || planted!(UnprovenProven);
            }
        }
    }

    /// Sets records against one another. Gives out the pages, in the order of namespaces, keys and ages, and what became of each.
    pub(crate) fn judge(&mut self, disk: &dyn Disk, spots: &[Spot]) -> (Vec<Found<E>>, Vec<Fate>) {
        let mut pages = std::mem::take(&mut self.pages);
        pages.sort_unstable_by_key(|page| (page.slot, page.key, page.birth, page.commit));
        let mut fates: Vec<Fate> = pages
            .iter()
            .map(|page| self.fate_by_deletions(page))
            .collect();
        let mut doubts = Vec::new();
        let mut first = 0;
        for records in pages.chunk_by(|a, b| (a.slot, a.key) == (b.slot, b.key)) {
            let here = first..first + records.len();
            first = here.end;
            if records.len() > 1 {
                doubts.extend(self.judge_key(&pages, here, &mut fates));
            }
        }
        let payloads = Payloads {
            disk,
            spots,
            namespaces: &self.namespaces,
            pages: &pages,
        };
        let settled = payloads.settle(&doubts);
        for (doubt, whole) in doubts.iter().zip(settled) {
            // Where none is whole the newest stays; its bytes will miss when they are asked for.
            let Some(whole) = whole else { continue };
            for &newer in doubt.candidates.iter().take_while(|at| **at != whole) {
                fates[newer] = Fate::Unfinished;
            }
            fates[whole] = Fate::Live;
            pages[whole].proven = true;
        }
        (pages, fates)
    }

    /// Of the records of one key that no deletion kills, leaves the newest. Gives back the doubt about it, if there is one.
    fn judge_key(
        &self,
        pages: &[Found<E>],
        records: std::ops::Range<usize>,
        fates: &mut [Fate],
    ) -> Option<Doubt> {
        let mut living: Vec<usize> = records.rev().collect();
        living.retain(|&at| fates[at] == Fate::Live);
        if planted!(LowerBirthWins) {
            living.reverse();
        }
        let (&newest, older) = living.split_first()?;
        for &at in older {
            fates[at] = Fate::Superseded;
        }
        if older.is_empty() || pages[newest].proven {
            return None;
        }
        let key = *self.keys.get(&(pages[newest].slot, pages[newest].key))?;
        let mut candidates = vec![newest];
        for &at in older {
            candidates.push(at);
            if pages[at].proven {
                break;
            }
        }
        Some(Doubt { key, candidates })
    }

    fn fate_by_deletions(&self, page: &Found<E>) -> Fate {
        let gone = self.gone.get(&(page.slot, page.key));
        if let Some(&birth) = gone.filter(|birth| page.birth < **birth) {
            return Fate::Gone(birth);
        }
        let cleared = self.clears.get(&page.slot);
        match cleared.filter(|birth| page.birth < **birth) {
            Some(&birth) => Fate::Cleared(birth),
            None => Fate::Live,
        }
    }
}

impl Gathered {
    /// Publishes the pages that count. Returns how many of them are not proven.
    fn publish(
        &mut self,
        disk: &dyn Disk,
        spots: &[Spot],
        index: &Index,
        proven_only: bool,
    ) -> u64 {
        if proven_only {
            self.pages.retain(|page| page.proven);
        }
        let (pages, fates) = self.judge(disk, spots);
        let live = pages
            .into_iter()
            .zip(fates)
            .filter(|(_, fate)| *fate == Fate::Live);
        let mut kept: Vec<Found> = live.map(|(page, _)| page).collect();
        kept.sort_unstable_by_key(|page| (page.commit, page.birth));
        index.expect(kept.len());
        for batch in kept.chunks(PUBLISH_BATCH) {
            let batch: Vec<Publish> = batch.iter().map(Found::publish).collect();
            index.publish(&batch);
        }
        adopt_late(index, &kept);
        kept.iter().filter(|page| !page.proven).count() as u64
    }
}

/// Links pages whose parents were published after them: written later, as when a page was evicted and put again.
fn adopt_late(index: &Index, pages: &[Found]) {
    let mut orphans = HashSet::new();
    index.each(|page| {
        if page.orphan {
            orphans.insert((page.namespace, page.key));
        }
    });
    let late: Vec<Adoption> = pages
        .iter()
        .filter(|page| orphans.contains(&(page.slot, page.key)))
        .filter_map(|page| {
            Some(Adoption {
                namespace: page.slot,
                child: page.key,
                parent: page.parent?,
            })
        })
        .collect();
    for batch in late.chunks(PUBLISH_BATCH) {
        index.adopt(batch);
    }
}

impl SegmentSummary {
    /// Up to which commit the segment's own header vouches for it.
    fn word(&self) -> Option<Serial> {
        match (self.case, &self.header) {
            (Case::Listed, Some(header)) => Some(header.proven),
            _ => None,
        }
    }
}

impl Found {
    fn publish(&self) -> Publish {
        let parent = match self.parent {
            Some(key) => Parent::Key(key),
            None if self.head => Parent::Head,
            None => Parent::Unknown,
        };
        Publish {
            namespace: self.slot,
            key: self.key,
            parent,
            place: self.place,
            checksum: self.checksum,
            unproven: !self.proven,
        }
    }
}
