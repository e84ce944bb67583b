//! Recovery: from what the segments' descriptors say to the state of a core and an index.
//!
//! Every segment is scanned ([`scan`]). Then records are set against one another (`judge`):
//!
//! - of several records of one key the highest birth counts, of equal births (copies) the highest commit; but where that one is
//!   not proven, the newest that is whole (`doubt`): the only case in which payload is read;
//! - a deletion kills the pages of its key (a clear: of its namespace) that were born before it;
//! - a page is *proven* when its commit is covered by its segment's sealed header, or by a `synced` mark that some block
//!   or header of the same run carries; else it is served only as far as its checksum holds. A segment both of whose headers
//!   are bad has nothing proven: which of its pages the device had refused stood there alone.
//!
//! Pages enter the index in the order of their commits, so that after a restart the oldest are the coldest; what
//! reclaim thought worth a copy counts from then on. Evictions are records too: without them a crash would bring back what
//! was dropped, and the pages that were kept instead would have to make room for it.
//!
//! A record whose checksum holds may lie all the same. What no writer writes together is not believed, and said: pages of another size
//! than their namespace's (its own record, whose fingerprint covers the size, is right; else the first page), pages that take more room
//! than their segment's data has, so that what is live never exceeds the volumes, and more namespaces than the index can number.
//!
//! Recovery writes nothing. It names the headers that the opener has to write ([`Recovery::adoptions`]) so that segments left open
//! by a crash need no second scan, and so that what is unproven stays so.

mod doubt;
mod judge;
pub mod scan;

use std::collections::{BTreeMap, HashMap};

use larder_format::{
    Body, Fingerprint, HEADER_BLOCKS, KeyPrefix, Namespace, OpenState, PageKey, PageRecord, Record,
    Run, SegmentHeader, SegmentNo, SegmentState, Serial, Structure, Superblock,
};

use crate::core::{InitState, NAMESPACES_MAX, NamespaceInit, Recovered, SegmentInit};
use crate::disk::Disk;
use crate::index::{Index, NamespaceSlot, Parent, Place, Publish, SegmentId};
use crate::planted;
pub use judge::Fate;
use scan::{Case, Disbelief, Fault, FaultReason, SegmentScan, Spot};

/// What is kept of each page beyond what recovery needs: nothing for an open, which must be fast with millions of them.
pub(crate) trait Extra: Copy {
    /// Takes it from the page's descriptor.
    fn of(page: &PageRecord) -> Self;
}

impl Extra for () {
    fn of(_: &PageRecord) {}
}

/// What a descriptor says beyond what an open needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Whole {
    pub key: PageKey,
    pub depth: u32,
}

impl Extra for Whole {
    fn of(page: &PageRecord) -> Self {
        Whole {
            key: page.key,
            depth: page.depth,
        }
    }
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
    /// Not believed any more: its namespace's own record says another size.
    pub is_lie: bool,
    pub extra: E,
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
    /// At most so many pages count again although a record that is lost had removed them.
    pub doubtful: u64,
    /// Highest run that any block or header carries.
    pub highest_run: Run,
}

impl Recovery {
    /// Has a segment left as it is: its header cannot be written.
    pub fn leave_alone(&mut self, volume: usize, segment: SegmentNo) {
        let before = self.recovered.volumes.iter().take(volume);
        let at = before.sum::<u32>().saturating_add(segment.0);
        if let Some(segment) = self.recovered.segments.get_mut(at as usize) {
            segment.state = InitState::Unreadable;
        }
    }
}

/// The newest run that all volumes were told of before it went on: something was written in it, or it ended in order. A volume
/// that does not know it is an old copy. (A run that no superblock knows says nothing of one volume rather than another.)
pub fn known_to_all<'a>(
    superblocks: impl Iterator<Item = &'a Superblock> + Clone,
    highest_run: Run,
) -> Run {
    let newest = superblocks.clone().map(|superblock| superblock.run).max();
    let closed = superblocks.filter(|superblock| superblock.state == OpenState::Clean);
    let closed = closed.map(|superblock| superblock.run).max();
    highest_run
        .max(closed.unwrap_or(highest_run))
        .min(newest.unwrap_or(highest_run))
}

/// The records of all segments, to be set against one another.
pub(crate) struct Gathered<E = ()> {
    pub namespaces: Vec<NamespaceInit>,
    slots: HashMap<Fingerprint, NamespaceSlot>,
    pages: Vec<Found<E>>,
    /// Births below these were deleted or dropped.
    pub gone: HashMap<(NamespaceSlot, KeyPrefix), Serial>,
    clears: HashMap<NamespaceSlot, Serial>,
    /// Pages of these that were gathered so far, by their count, have been proven to be of a wrong size.
    lies: HashMap<NamespaceSlot, usize>,
    /// The whole keys of pages that their own segment's header does not vouch for.
    keys: HashMap<(NamespaceSlot, KeyPrefix), PageKey>,
    /// Highest synced mark of each run.
    marks: BTreeMap<Run, Serial>,
    pub damage: Vec<Damage>,
    /// Above the commit of every record that is lost; zero where none is.
    pub lost_until: Serial,
    pub highest: Serial,
}

/// What the pages of one life may take together: the data below the highest mark that its blocks have stated so far. So a lie
/// takes nothing from the pages of later blocks.
#[derive(Default)]
struct Room {
    data_end: u32,
    taken: u32,
}

impl Room {
    fn grow(&mut self, data_end: u32) {
        self.data_end = self.data_end.max(data_end);
    }

    fn take(&mut self, blocks: u32) -> Result<(), Disbelief> {
        let taken = self.taken.checked_add(blocks);
        let most = self.data_end.saturating_sub(HEADER_BLOCKS);
        let taken = taken.filter(|taken| *taken <= most);
        self.taken = taken.ok_or(Disbelief::Overlap)?;
        Ok(())
    }
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
    recover_pages::<()>(disk, superblocks, index, proven_only).0
}

/// As [`recover`]; also gives out the pages that count, in the order in which they entered the index.
pub(crate) fn recover_pages<E: Extra>(
    disk: &dyn Disk,
    superblocks: &[Option<&Superblock>],
    index: &Index,
    proven_only: bool,
) -> (Recovery, Vec<Found<E>>) {
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
    let mut gathered: Gathered<E> = Gathered::new();
    let mut scans: HashMap<(usize, u32), SegmentSummary> = HashMap::with_capacity(present.len());
    let ids: HashMap<(usize, u32), SegmentId> = all
        .iter()
        .zip(0..)
        .map(|(spot, id)| ((spot.volume, spot.number), SegmentId(id)))
        .collect();
    scan::scan(disk, &present, clean.then_some(newest_run), |spot, scan| {
        let key = (spot.volume, spot.number);
        let summary = gathered.take(ids[&key], spot, scan, proven_only);
        scans.insert(key, summary);
    });
    gathered.prove(scans.values_mut());
    for spot in &present {
        let summary = &scans[&(spot.volume, spot.number)];
        if !clean && summary.was_open_in(newest_run) {
            gathered.forget_torn_headers(spot);
        }
        let disbelieved = summary.disbelieved.iter();
        gathered
            .damage
            .extend(disbelieved.map(|(why, pages)| Damage {
                volume: spot.volume,
                segment: spot.number,
                fault: Fault {
                    offset: spot.headers().offset,
                    structure: Structure::DescriptorBlock,
                    reason: FaultReason::Disbelieved(*pages, *why),
                },
            }));
    }
    let highest_run = gathered.highest.run().max(Run::FIRST);
    let last = newest_run.max(highest_run);
    let next = if planted!(RunNotBumped) {
        Some(last)
    } else {
        last.next()
    };
    let run = next.unwrap_or(highest_run);
    let first = Serial::first_of(run);
    let pages = gathered.publish(disk, &all, index, proven_only);
    let unproven = pages.iter().filter(|page| !page.proven).count() as u64;
    let is_doubtful = |page: &&Found<E>| page.commit < gathered.lost_until;
    let doubtful = pages.iter().filter(is_doubtful).count() as u64;
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
    let recovery = Recovery {
        recovered,
        adoptions,
        damage: gathered.damage,
        unproven,
        doubtful,
        highest_run,
    };
    (recovery, pages)
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
    /// Both copies of its header are bad.
    headless: bool,
    /// One is whole, and the other is not the same.
    uneven: bool,
    /// Lowest commit in it that its header does not vouch for.
    unvouched: Option<Serial>,
    /// Commits up to here are whole on the device.
    pub proven: Serial,
    /// Positions of its pages among those gathered.
    pub pages: std::ops::Range<usize>,
    /// How many of its page records are not believed, and why.
    pub disbelieved: BTreeMap<Disbelief, u64>,
}

impl SegmentSummary {
    /// Whether it was open in the run that a crash ended. The crash may have cut short a write of its header: either copy may be
    /// anything, and the next opening writes both.
    pub(crate) fn was_open_in(&self, run: Run) -> bool {
        matches!(self.case, Case::Unlisted | Case::Newer) && self.sequence.run() >= run
    }

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
        let unlisted = matches!(self.case, Case::Unlisted | Case::Newer | Case::Hidden);
        // A crash cut the write of its header short, or one copy is bad: the next one must not leave it without a good copy, or
        // with another one than it was served by.
        let uneven = self.uneven && self.case == Case::Listed && state == InitState::Sealed;
        let adopted = unlisted || uneven;
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
            lies: HashMap::new(),
            keys: HashMap::new(),
            marks: BTreeMap::new(),
            damage: Vec::new(),
            lost_until: Serial::ZERO,
            highest: Serial::ZERO,
        }
    }

    /// Copies of this segment's header that are not whole are no damage. One that the device does not give is.
    fn forget_torn_headers(&mut self, spot: &Spot) {
        self.damage.retain(|damage| {
            (damage.volume, damage.segment) != (spot.volume, spot.number)
                || damage.fault.structure != Structure::SegmentHeader
                || matches!(damage.fault.reason, FaultReason::Unreadable(_))
        });
    }

    /// Takes in what one segment holds.
    pub(crate) fn take(
        &mut self,
        id: SegmentId,
        spot: &Spot,
        scan: SegmentScan,
        proven_only: bool,
    ) -> SegmentSummary {
        let is_header = |fault: &Fault| fault.structure == Structure::SegmentHeader;
        self.lost_until = self.lost_until.max(scan.lost_until(spot));
        // Headers that cannot be read are written anew, as damaged ones are: what they said may be all that tells of this life, and
        // once they can be read they may say something else.
        let unreadable = scan
            .faults
            .iter()
            .any(|fault| matches!(fault.reason, FaultReason::Unreadable(_)) && !is_header(fault));
        let headless = scan.header.is_none() && scan.faults.iter().any(is_header);
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
        let mut room = Room::default();
        let mut disbelieved = BTreeMap::new();
        let vouched = match (scan.case, &scan.header) {
            (Case::Listed, Some(header)) => header.proven,
            _ => Serial::ZERO,
        };
        for block in &scan.blocks {
            self.mark(block.header.synced);
            self.highest = self.highest.max(block.header.commit);
            last_commit = last_commit.max(block.header.commit);
            room.grow(block.header.data_end);
            if block.header.commit > word {
                let lowest = unvouched.get_or_insert(block.header.commit);
                *lowest = block.header.commit.min(*lowest);
            }
            match &block.body {
                Body::Namespace(record) => self.namespace(id, record),
                Body::Records(records) => {
                    let commit = block.header.commit;
                    for record in records {
                        if let Err(why) = self.record(id, commit, record, visible, &mut room) {
                            *disbelieved.entry(why).or_default() += 1;
                        } else if let Record::Page(page) = record
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
            headless,
            uneven: scan.uneven,
            header: scan.header,
            sequence: scan.sequence,
            block_count: scan.block_count,
            data_end: scan.data_end,
            last_commit,
            unvouched,
            proven: Serial::ZERO,
            pages: first..self.pages.len(),
            disbelieved,
        }
    }

    fn mark(&mut self, synced: Serial) {
        let mark = self.marks.entry(synced.run()).or_insert(synced);
        *mark = (*mark).max(synced);
    }

    fn namespace(&mut self, home: SegmentId, record: &Namespace) {
        let blocks = record.shape().page_blocks();
        let Ok(slot) = self.slot(record.fingerprint()) else {
            return;
        };
        let init = &mut self.namespaces[slot.0 as usize];
        init.record = Some((record.clone(), home));
        let claimed = std::mem::replace(&mut init.page_blocks, blocks);
        if claimed != 0 && claimed != blocks {
            self.lies.insert(slot, self.pages.len());
        }
    }

    /// The slot of a namespace.
    fn slot(&mut self, fingerprint: Fingerprint) -> Result<NamespaceSlot, Disbelief> {
        if let Some(&slot) = self.slots.get(&fingerprint) {
            return Ok(slot);
        }
        let slot = u16::try_from(self.namespaces.len()).ok();
        let slot = slot.filter(|slot| usize::from(*slot) < NAMESPACES_MAX);
        let slot = NamespaceSlot(slot.ok_or(Disbelief::Namespaces)?);
        self.namespaces.push(NamespaceInit {
            fingerprint,
            record: None,
            page_blocks: 0,
        });
        self.slots.insert(fingerprint, slot);
        Ok(slot)
    }

    /// Takes a record in; `room` is what pages of its segment may take.
    fn record(
        &mut self,
        segment: SegmentId,
        commit: Serial,
        record: &Record,
        visible: bool,
        room: &mut Room,
    ) -> Result<(), Disbelief> {
        let (name, birth) = match record {
            Record::Page(page) => return self.page(segment, commit, page, visible, room),
            Record::Delete { key, birth, .. } => (Some(key.prefix()), *birth),
            Record::Evict { key, birth, .. } => (Some(*key), *birth),
            Record::Clear { birth, .. } => (None, *birth),
        };
        // A namespace without a slot has no pages that this could concern.
        let Ok(slot) = self.slot(record.namespace()) else {
            return Ok(());
        };
        let latest = match name {
            Some(key) => self.gone.entry((slot, key)).or_insert(birth),
            None => self.clears.entry(slot).or_insert(birth),
        };
        *latest = if planted!(LowerBirthWins) {
            (*latest).min(birth)
        } else {
            (*latest).max(birth)
        };
        Ok(())
    }

    fn page(
        &mut self,
        segment: SegmentId,
        commit: Serial,
        page: &PageRecord,
        visible: bool,
        room: &mut Room,
    ) -> Result<(), Disbelief> {
        let slot = self.slot(page.namespace)?;
        let size = &mut self.namespaces[slot.0 as usize].page_blocks;
        if *size == 0 {
            *size = page.blocks;
        }
        if *size != page.blocks {
            return Err(Disbelief::Size);
        }
        room.take(page.blocks)?;
        if !visible {
            return Ok(());
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
            is_lie: false,
            extra: E::of(page),
        });
        Ok(())
    }

    /// Decides which pages are proven. A sealed header's word counts for its segment; where there is none the marks do, each
    /// for its own run only: a later run's syncs say nothing of what an earlier one left unfinished.
    pub(crate) fn prove<'a>(&mut self, scans: impl Iterator<Item = &'a mut SegmentSummary>) {
        for summary in scans {
            // A segment may hold commits of several runs: of one that left it open at a clean close and of the next, or of one
            // that added records when it was sealed. What the header vouches for comes first.
            let mark = summary
                .unvouched
                .filter(|_| !summary.headless)
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
            for (found, at) in self.pages[summary.pages.clone()]
                .iter_mut()
                .zip(summary.pages.start..)
            {
                found.proven = found.commit <= summary.proven || planted!(UnprovenProven);
                found.is_lie = self.lies.get(&found.slot).is_some_and(|count| at < *count);
                if found.is_lie {
                    *summary.disbelieved.entry(Disbelief::Size).or_default() += 1;
                }
            }
        }
    }

    /// Publishes the pages that count, and gives them back in that order.
    fn publish(
        &mut self,
        disk: &dyn Disk,
        spots: &[Spot],
        index: &Index,
        proven_only: bool,
    ) -> Vec<Found<E>> {
        if proven_only {
            self.pages.retain(|page| page.proven);
        }
        let (pages, fates) = self.judge(disk, spots);
        let live = pages
            .into_iter()
            .zip(fates)
            .filter(|(_, fate)| *fate == Fate::Live);
        let mut kept: Vec<Found<E>> = live.map(|(page, _)| page).collect();
        kept.sort_unstable_by_key(|page| (page.commit, page.birth));
        let pages: Vec<Publish> = kept.iter().map(Found::publish).collect();
        index.load(&pages);
        kept
    }
}

impl SegmentSummary {
    /// Up to which commit the segment's own header vouches for it. What seals a segment says so for good: a page that it does not
    /// vouch for may be one that the device had refused, whatever was synced since and whatever was written behind it.
    fn word(&self) -> Option<Serial> {
        let header = self.header.as_ref()?;
        let is_sealed = header.state == SegmentState::Sealed && header.sequence == self.sequence;
        (is_sealed || self.case == Case::Listed).then_some(header.proven)
    }
}

impl<E> Found<E> {
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
