//! Recovery: builds the state of a core and an index from the descriptors of all segments.
//!
//! First every segment is scanned ([`scan`]). Then the records are compared (`judge`):
//!
//! - Of several records of one key, the highest version counts. Of equal versions (copies), the
//!   highest commit counts. If that record is not proven, the newest whole record counts (`doubt`).
//!   Recovery reads payload in this case only.
//! - A deletion kills the pages of its key that have a lower version. A clear does so for its
//!   namespace.
//! - A page is *proven* if its commit is covered by its segment's header, or by a `synced`
//!   watermark in any block or header of the same epoch. The header must be sealed, or open and
//!   written by a clean close. An unproven page is served only if its checksum matches. A segment
//!   whose headers are both bad has no proven page: only the header excluded the pages whose writes
//!   the device had refused.
//!
//! Pages enter the index in the order of their commits, so the oldest pages are the coldest after a
//! restart. A page that reclaim copied counts from its copy on. Evictions are records too. Without
//! them a crash would bring evicted pages back, and the pages that were kept instead would have to
//! make room for them.
//!
//! A record with a good checksum may still be wrong. Recovery disbelieves combinations that no
//! writer produces, and reports them:
//!
//! - Pages of another size than their namespace's. The namespace's own record decides (its
//!   fingerprint covers the size), else the first page.
//! - Pages that take more room than their segment's data has. So live data never exceeds the
//!   volumes.
//! - More namespaces than the index can number.
//!
//! Recovery writes nothing. It returns the headers that the opener has to write
//! ([`Recovery::adoptions`]). Then segments that a crash left open need no second scan, and
//! unproven pages stay unproven.

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

/// Data kept of each page beyond the needs of recovery. An open keeps none: it must be fast with
/// millions of pages.
pub(crate) trait Extra: Copy {
    /// Takes the data from the page's descriptor.
    fn of(page: &PageRecord) -> Self;
}

impl Extra for () {
    fn of(_: &PageRecord) {}
}

/// The data of a descriptor that an open does not need.
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
    /// Disbelieved: the record of its namespace states another size.
    pub is_disbelieved: bool,
    pub extra: E,
}

/// A block of a segment that could not be used.
#[derive(Clone, Debug)]
pub struct Damage {
    /// Index of the volume.
    pub volume: usize,
    /// Number of the segment in the volume.
    pub segment: u32,
    /// The fault and its place.
    pub fault: Fault,
}

/// The result of recovery.
#[derive(Debug)]
pub struct Recovery {
    /// For the core.
    pub recovered: Recovered,
    /// Headers to write before the store is used: volume, header.
    pub adoptions: Vec<(usize, SegmentHeader)>,
    /// The faults found.
    pub damage: Vec<Damage>,
    /// Number of pages that are not proven.
    pub unproven: u64,
    /// Upper bound of the pages that count again although a lost record had removed them.
    pub doubtful: u64,
    /// Highest epoch in any block or header.
    pub highest_run: Run,
}

impl Recovery {
    /// Leaves a segment as it is: its header cannot be written.
    pub fn leave_alone(&mut self, volume: usize, segment: SegmentNo) {
        let before = self.recovered.volumes.iter().take(volume);
        let at = before.sum::<u32>().saturating_add(segment.0);
        if let Some(segment) = self.recovered.segments.get_mut(at as usize) {
            segment.state = InitState::Unreadable;
        }
    }
}

/// The newest epoch that must be recorded on every volume: a record was written in it, or it ended
/// in order, and both come after the superblocks of all volumes. A volume without this epoch is an
/// old copy. (An epoch that no superblock knows does not distinguish the volumes.)
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

/// The records of all segments, before they are compared.
pub(crate) struct Gathered<E = ()> {
    pub namespaces: Vec<NamespaceInit>,
    slots: HashMap<Fingerprint, NamespaceSlot>,
    pages: Vec<Found<E>>,
    /// Pages with a version below this were deleted or evicted.
    pub gone: HashMap<(NamespaceSlot, KeyPrefix), Serial>,
    clears: HashMap<NamespaceSlot, Serial>,
    /// By namespace: so many of the first pages gathered have been proven to be of a wrong size.
    wrong_size_until: HashMap<NamespaceSlot, usize>,
    /// The full keys of pages that their own segment's header does not cover.
    keys: HashMap<(NamespaceSlot, KeyPrefix), PageKey>,
    /// Highest synced watermark of each epoch.
    watermarks: BTreeMap<Run, Serial>,
    pub damage: Vec<Damage>,
    /// Above the commit of every lost record; zero if none is lost.
    pub lost_until: Serial,
    pub highest: Serial,
}

/// The room that the pages of one generation share: the data below the highest data end that its
/// blocks have stated so far. So a wrong record takes no room from the pages of later blocks.
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

/// Reads a store's descriptors into `index`, which must be empty. `superblocks` has one entry for
/// each volume, in the store's order; `None` for a lost volume. With `proven_only`, recovery takes
/// only pages that are proven to be on the device, in segments that take no more pages: a reader
/// without the lock may see only these.
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

/// As [`recover`]; also returns the pages that count, in the order in which they entered the index.
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

/// The part of a scan that is kept after its records have been gathered.
#[derive(Debug)]
pub(crate) struct SegmentSummary {
    pub case: Case,
    pub header: Option<SegmentHeader>,
    pub sequence: Serial,
    pub block_count: u32,
    pub data_end: u32,
    last_commit: Serial,
    /// A part of its headers or blocks could not be read. Unreadable is not empty.
    unreadable: bool,
    /// Both copies of its header are bad.
    headless: bool,
    /// One copy of its header is whole, and the other differs from it.
    uneven: bool,
    /// Lowest commit in it that its header does not cover.
    uncovered: Option<Serial>,
    /// Commits up to here are whole on the device.
    pub proven: Serial,
    /// Positions of its pages among the gathered pages.
    pub pages: std::ops::Range<usize>,
    /// Number of its page records that are disbelieved, by reason.
    pub disbelieved: BTreeMap<Disbelief, u64>,
}

impl SegmentSummary {
    /// Whether it was open in the epoch that a crash ended. The crash may have interrupted a write
    /// of its header: either copy may hold anything, and the next open writes both.
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
        // A segment whose headers and blocks are all broken has an unknown generation. It gets one
        // above all others.
        let unknown = state == InitState::Sealed && self.sequence == Serial::ZERO;
        let sequence = if unknown { first } else { self.sequence };
        let unlisted = matches!(self.case, Case::Unlisted | Case::Newer | Case::Hidden);
        // A crash interrupted the write of its header, or one copy is bad. The next header must not
        // leave the segment without a good copy, or with a good copy other than the one it was
        // served by.
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
            wrong_size_until: HashMap::new(),
            keys: HashMap::new(),
            watermarks: BTreeMap::new(),
            damage: Vec::new(),
            lost_until: Serial::ZERO,
            highest: Serial::ZERO,
        }
    }

    /// Removes the damage of this segment's header copies that are not whole: a crash may leave
    /// them. A copy that the device cannot read stays damage.
    fn forget_torn_headers(&mut self, spot: &Spot) {
        self.damage.retain(|damage| {
            (damage.volume, damage.segment) != (spot.volume, spot.number)
                || damage.fault.structure != Structure::SegmentHeader
                || matches!(damage.fault.reason, FaultReason::Unreadable(_))
        });
    }

    /// Takes in the content of one segment.
    pub(crate) fn take(
        &mut self,
        id: SegmentId,
        spot: &Spot,
        scan: SegmentScan,
        proven_only: bool,
    ) -> SegmentSummary {
        let is_header = |fault: &Fault| fault.structure == Structure::SegmentHeader;
        self.lost_until = self.lost_until.max(scan.lost_until(spot));
        // Headers that cannot be read are written again, like damaged ones. They may hold the only
        // information on this generation, and once they become readable they may state something
        // else.
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
            self.raise_watermark(header.synced);
        }
        let first = self.pages.len();
        let mut last_commit = Serial::ZERO;
        let mut uncovered: Option<Serial> = None;
        let word = scan.header.as_ref().map_or(Serial::ZERO, |h| h.proven);
        // A reader beside a writer skips segments that may still be written.
        let visible = !proven_only || matches!(scan.case, Case::Listed);
        let mut room = Room::default();
        let mut disbelieved = BTreeMap::new();
        let vouched = match (scan.case, &scan.header) {
            (Case::Listed, Some(header)) => header.proven,
            _ => Serial::ZERO,
        };
        for block in &scan.blocks {
            self.raise_watermark(block.header.synced);
            self.highest = self.highest.max(block.header.commit);
            last_commit = last_commit.max(block.header.commit);
            room.grow(block.header.data_end);
            if block.header.commit > word {
                let lowest = uncovered.get_or_insert(block.header.commit);
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
            uncovered,
            proven: Serial::ZERO,
            pages: first..self.pages.len(),
            disbelieved,
        }
    }

    fn raise_watermark(&mut self, synced: Serial) {
        let watermark = self.watermarks.entry(synced.run()).or_insert(synced);
        *watermark = (*watermark).max(synced);
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
            self.wrong_size_until.insert(slot, self.pages.len());
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

    /// Takes in a record. `room` is the room that the pages of its segment share.
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
        // A namespace without a slot has no pages that this record could affect.
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
            is_disbelieved: false,
            extra: E::of(page),
        });
        Ok(())
    }

    /// Decides which pages are proven. A sealed header decides for its segment. Without one the
    /// watermarks decide, each for its own epoch only: the syncs of a later epoch do not prove
    /// writes that an earlier epoch left unfinished.
    pub(crate) fn prove<'a>(&mut self, scans: impl Iterator<Item = &'a mut SegmentSummary>) {
        for summary in scans {
            // A segment may hold commits of several epochs: an epoch left it open at a clean close
            // and the next went on, or an epoch added records after it was sealed. Commits that the
            // header covers come first.
            let watermark = summary
                .uncovered
                .filter(|_| !summary.headless)
                .and_then(|commit| {
                    let watermark = self.watermarks.get(&commit.run());
                    watermark.copied().filter(|watermark| *watermark >= commit)
                })
                // Not above the last commit found: the header with this watermark must not cover
                // blocks that are added later.
                .map_or(Serial::ZERO, |watermark| watermark.min(summary.last_commit));
            let closed = summary
                .header
                .as_ref()
                .map_or(Serial::ZERO, |header| header.proven);
            summary.proven = summary.proven_by_header().unwrap_or(watermark.max(closed));
            for (found, at) in self.pages[summary.pages.clone()]
                .iter_mut()
                .zip(summary.pages.start..)
            {
                found.proven = found.commit <= summary.proven || planted!(UnprovenProven);
                found.is_disbelieved = self
                    .wrong_size_until
                    .get(&found.slot)
                    .is_some_and(|count| at < *count);
                if found.is_disbelieved {
                    *summary.disbelieved.entry(Disbelief::Size).or_default() += 1;
                }
            }
        }
    }

    /// Publishes the pages that count. Returns them in the order of publication.
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
    /// The commit up to which the segment's own header proves its pages. A sealed header decides
    /// for good: the device may have refused the write of a page that it does not cover, whatever
    /// was synced or written later.
    fn proven_by_header(&self) -> Option<Serial> {
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
