//! Gathers the records of all segments, and decides which pages are proven.

use std::collections::{BTreeMap, HashMap, HashSet};

use larder_base::planted;
use larder_core::core::{InitState, NAMESPACES_MAX, NamespaceInit, SegmentInit};
use larder_core::hint::Hint;
use larder_core::index::{Index, Keep, NamespaceSlot, Parent, Place, Publish, SegmentId, Told};
use larder_disk::Disk;
use larder_format::{
    Body, Fingerprint, HEADER_BLOCKS, KeyPrefix, Namespace, PageKey, PageRecord, Proof, Record,
    Run, Seal, SegmentHeader, SegmentNo, SegmentState, Serial, Structure,
};
use rapidhash::quality::RandomState;

use super::found::{Damage, Extra, Found};
use super::judge::Fate;
use super::scan::{Case, Disbelief, Fault, FaultReason, SegmentScan, Spot};

/// A map with lookups for each record.
type Names<K, V> = HashMap<K, V, RandomState>;

/// The records of all segments, before they are compared.
pub struct Gathered<E = ()> {
    pub namespaces: Vec<NamespaceInit>,
    slots: Names<Fingerprint, NamespaceSlot>,
    pub(super) pages: Vec<Found<E>>,
    /// Pages with a version below this were deleted or evicted.
    pub gone: Names<(NamespaceSlot, KeyPrefix), Serial>,
    /// Versions whose puts failed.
    pub(super) void: HashSet<(NamespaceSlot, KeyPrefix, Serial), RandomState>,
    pub(super) clears: Names<NamespaceSlot, Serial>,
    /// By namespace: so many of the first pages gathered have been proven to be of a wrong size.
    wrong_size_until: Names<NamespaceSlot, usize>,
    /// The full keys of pages that their own segment's header does not cover.
    pub(super) keys: Names<(NamespaceSlot, KeyPrefix), PageKey>,
    /// The newest pin of each key.
    pins: Names<(NamespaceSlot, KeyPrefix), Keep>,
    /// By place. Apart from the pages: an open of a plain store may have millions of them.
    pub seals: HashMap<(SegmentId, u32), Seal>,
    /// Segments with a page whose bytes cannot be read now, and that may be the newest of its key.
    pub(super) unread: HashSet<SegmentId>,
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

/// The part of a scan that is kept after its records have been gathered.
#[derive(Debug)]
pub struct SegmentSummary {
    pub case: Case,
    pub header: Option<SegmentHeader>,
    pub sequence: Serial,
    pub block_count: u32,
    pub data_end: u32,
    last_commit: Serial,
    /// A part of its headers, blocks or pages could not be read. Unreadable is not empty.
    pub(super) unreadable: bool,
    /// No copy of its header is whole, and one is bad.
    headless: bool,
    /// One copy of its header is whole, and the other differs from it.
    uneven: bool,
    /// A clean close left no page of its volume unproven.
    is_vouched: bool,
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
    /// Whether a part of its blocks could not be read.
    pub(crate) fn is_unreadable(&self) -> bool {
        self.unreadable
    }

    /// Whether it was open in the epoch that a crash ended. The crash may have interrupted a write
    /// of its header: either copy may hold anything, and the next open writes both.
    pub fn was_open_in(&self, run: Run) -> bool {
        matches!(self.case, Case::Unlisted | Case::Newer) && self.sequence.run() >= run
    }

    pub(super) fn init(
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
        let own = self
            .header
            .as_ref()
            .filter(|header| header.sequence == sequence);
        let born_ms = own.map_or(0, |header| header.born_ms);
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
                    born_ms,
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
            born_ms,
        }
    }
}

impl<E: Extra> Gathered<E> {
    pub fn new() -> Gathered<E> {
        Gathered {
            namespaces: Vec::new(),
            slots: Names::default(),
            pages: Vec::new(),
            gone: Names::default(),
            void: HashSet::default(),
            seals: HashMap::new(),
            clears: Names::default(),
            wrong_size_until: Names::default(),
            keys: Names::default(),
            pins: Names::default(),
            unread: HashSet::new(),
            watermarks: BTreeMap::new(),
            damage: Vec::new(),
            lost_until: Serial::ZERO,
            highest: Serial::ZERO,
        }
    }

    /// Takes note of a difference from the last clean close. Records may be lost with the contents
    /// of the segments.
    pub fn note_difference(&mut self, volume: usize, fault: Fault) {
        let is_of_contents = matches!(
            fault.reason,
            FaultReason::Emptied { .. } | FaultReason::OtherGenerations
        );
        if is_of_contents {
            self.lost_until = Serial::MAX;
        }
        self.damage.push(Damage {
            volume,
            segment: None,
            fault,
        });
    }

    /// Removes the damage of this segment's header copies that are not whole: a crash may leave
    /// them. A copy that the device cannot read stays damage.
    pub(super) fn forget_torn_headers(&mut self, spot: &Spot) {
        self.damage.retain(|damage| {
            (damage.volume, damage.segment) != (spot.volume, Some(spot.number))
                || damage.fault.structure != Structure::SegmentHeader
                || matches!(damage.fault.reason, FaultReason::Unreadable(_))
        });
    }

    /// Takes in the content of one segment. `is_vouched`: a clean close left no page of its volume
    /// unproven.
    pub fn take(
        &mut self,
        id: SegmentId,
        spot: &Spot,
        scan: SegmentScan,
        proven_only: bool,
        is_vouched: bool,
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
                segment: Some(spot.number),
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
                        let visible = visible && !spot.is_erased(record);
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
            is_vouched,
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
            Record::Pin {
                key,
                birth,
                until_unix_s,
                ..
            } => {
                if let Ok(slot) = self.slot(record.namespace()) {
                    self.pin(slot, key.prefix(), *birth, *until_unix_s);
                }
                return Ok(());
            }
            Record::Void { key, birth, .. } => {
                if let Ok(slot) = self.slot(record.namespace()) {
                    self.void.insert((slot, *key, *birth));
                    if planted!(VoidsOlder) {
                        let older = self.gone.entry((slot, *key)).or_insert(*birth);
                        *older = (*older).max(*birth);
                    }
                }
                return Ok(());
            }
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

    fn pin(&mut self, slot: NamespaceSlot, key: KeyPrefix, birth: Serial, until_unix_s: u32) {
        let keep = Keep {
            until_unix_s,
            birth,
        };
        let newest = self.pins.entry((slot, key)).or_insert(keep);
        if newest.birth < birth {
            *newest = keep;
        }
    }

    /// Keeps the pages that are pinned. A pin counts for the page that its key had then.
    fn keep_pinned(&self, pages: &[Found<E>], index: &Index) {
        if self.pins.is_empty() {
            return;
        }
        for page in pages {
            let keep = self.pins.get(&(page.slot, page.key));
            let counts = |keep: &&Keep| {
                keep.until_unix_s > 0 && (page.birth < keep.birth || planted!(HauntingPin))
            };
            if let Some(keep) = keep.filter(counts) {
                let plain = self.namespaces[usize::from(page.slot.0)].page_blocks;
                let blocks = plain.saturating_sub(page.place.saved);
                index.keep_until(page.slot, page.key, blocks, *keep);
            }
        }
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
        room.take(page.stored)?;
        if !visible {
            return Ok(());
        }
        if let Some(seal) = page.seal {
            self.seals.insert((segment, page.start), seal);
        }
        self.pages.push(Found {
            slot,
            key: page.key.prefix(),
            birth: page.birth,
            commit,
            place: Place::of(segment, page),
            checksum: page.checksum,
            parent: page.parent,
            depth: page.depth,
            proven: false,
            is_disbelieved: false,
            extra: E::of(page),
        });
        Ok(())
    }

    /// Decides which pages are proven. A sealed header decides for its segment. Without one the
    /// watermarks decide, each for its own epoch only: the syncs of a later epoch do not prove
    /// writes that an earlier epoch left unfinished.
    pub fn prove<'a>(&mut self, scans: impl Iterator<Item = &'a mut SegmentSummary>) {
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
            let by_others = match summary.is_vouched {
                true => summary.last_commit,
                false => watermark.max(closed),
            };
            summary.proven = summary.proven_by_header().unwrap_or(by_others);
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
    pub(super) fn publish(
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
        let blocks = |slot: NamespaceSlot| self.namespaces[usize::from(slot.0)].page_blocks;
        let seal = |place: Place| self.seals.get(&(place.segment, place.start)).copied();
        let publish = |page: &Found<E>| page.publish(blocks(page.slot), seal(page.place));
        let pages = kept.iter().map(publish);
        let pages: Vec<Publish> = pages.collect();
        index.load(&pages);
        self.keep_pinned(&kept, index);
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
    fn publish(&self, plain_blocks: u32, seal: Option<Seal>) -> Publish {
        let parent = match self.parent {
            Some(key) => Parent::Key(key),
            None if self.depth == 0 => Parent::Head,
            None => Parent::Unknown,
        };
        Publish {
            namespace: self.slot,
            key: self.key,
            parent,
            place: self.place,
            proof: Proof {
                checksum: self.checksum,
                seal,
            },
            unproven: !self.proven,
            told: Told {
                depth: self.depth,
                blocks: plain_blocks.saturating_sub(self.place.saved),
                hint: Hint::default(),
                new_pages: None,
            },
        }
    }
}
