//! Scans the segments: the content of each, and its faults.
//!
//! There are three checks, all by the structures' own checksums. First, both copies of every header
//! are compared, because a scan needs only one. Second, recovery's scan determines the generation
//! of a segment and its bad blocks. Third, where no header lists the blocks, holes are searched.
//! Blocks are written in the order of their commits, so a hole below a proven block is a lost
//! block. A crash may have left any other hole.

use std::collections::{HashMap, HashSet};

use larder_base::memory::AlignedBuf;
use larder_core::core::NamespaceInit;
use larder_core::index::SegmentId;
use larder_disk::DiskError;
use larder_disk::mailbox::read_all;
use larder_format::{
    BLOCK_BYTES, Body, CLOSING_OFFSET, Damage, Fingerprint, HEADER_BLOCKS, KeyPrefix, Record,
    SegmentHeader, SegmentState, Serial, Structure,
};
use larder_store::recovery::scan::{Case, Fault, FaultReason, SegmentScan, Spot, scan};
use larder_store::recovery::{
    Found, FoundHoldings, Gathered, SegmentSummary, Statement, Whole, judge_closed, known_to_all,
    read_statements,
};

use super::facts::{Condition, Encryption, Flaw, FlawReason, NamespaceFacts};
use super::volumes::{VolumeFacts, VolumeState};
use super::{Records, Survey};

/// Segments whose headers are read together.
const LOOKS: usize = 1024;

/// A segment, as far as it is known.
#[derive(Clone, Debug)]
pub struct SegmentFacts {
    /// Index of its volume.
    pub volume: usize,
    /// Its number in the volume.
    pub number: u32,
    /// Its byte offset in the volume.
    pub offset: u64,
    /// Its case in the scan; `None` if it cannot be read.
    pub case: Option<Case>,
    /// The state in the header of its generation.
    pub state: Option<SegmentState>,
    /// Its generation; zero if it has none, or an unknown one.
    pub sequence: Serial,
    /// Number of its descriptor blocks.
    pub descriptor_blocks: u32,
    /// Page records in these blocks.
    pub records: u64,
    /// Bytes of page data written in this generation.
    pub data_bytes: u64,
    /// Pages in it that count.
    pub live_pages: u64,
    /// Bytes of those pages, padding included.
    pub live_bytes: u64,
    /// Number of faults in it.
    pub flaws: u64,
    /// Neither its headers nor its descriptor blocks can be used.
    pub is_lost: bool,
}

/// A record that removed pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Removal {
    /// Why the pages are gone: deleted, evicted or cleared.
    pub kind: RemovalKind,
    /// The namespace concerned.
    pub namespace: Fingerprint,
    /// Pages with a lower version are gone.
    pub birth: Serial,
    /// The group that holds the record.
    pub commit: Serial,
    /// Index of the volume that holds it.
    pub volume: usize,
    /// The segment that holds it.
    pub segment: u32,
}

/// The kind of removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovalKind {
    /// A caller deleted the key.
    Deleted,
    /// The page was evicted to make room, or dropped because it was damaged.
    Evicted,
    /// A caller cleared the namespace.
    Cleared,
}

/// Checked again when all watermarks are known.
struct Scanned {
    summary: SegmentSummary,
    /// Missing blocks of a segment without a list: index, and commit of the next block found.
    holes: Vec<(u32, Serial)>,
}

/// Both copies of a segment's header.
type Copies = Result<[Result<SegmentHeader, Damage>; 2], DiskError>;

impl Survey {
    /// Reads every descriptor and fills in all findings.
    pub(super) fn scan(&mut self, key: Option<KeyPrefix>) {
        let present: Vec<Spot> = self.readable().collect();
        let ids: HashMap<(usize, u32), u32> = self
            .spots
            .iter()
            .zip(0..)
            .map(|(spot, id)| ((spot.volume, spot.number), id))
            .collect();
        self.segments = self.spots.iter().map(SegmentFacts::unknown).collect();
        self.unfinished_blocks = 0;
        self.removals.clear();
        let mut gathered: Gathered<Whole> = Gathered::new();
        let mut scans: HashMap<u32, Scanned> = HashMap::with_capacity(present.len());
        let closed = (self.condition == Condition::Clean).then_some(self.run);
        let disk = self.disk.clone();
        self.statements = self.read_statements();
        if let Encryption::Locked { pages } = &mut self.encryption {
            let stated = self.statements.iter().map(Statement::pages);
            *pages = stated.sum();
        }
        let mut holdings = vec![FoundHoldings::default(); self.volumes.len()];
        scan(disk.as_ref(), &present, closed, |spot, found| {
            let id = ids[&(spot.volume, spot.number)];
            let statement = &self.statements[spot.volume];
            let is_vouched = statement.proves_all();
            let found = judge_closed(spot, found, statement);
            self.add_scan(id as usize, spot, &found);
            if let Some(key) = key {
                self.add_removals(spot, &found, key);
            }
            let holes = found.holes();
            let summary = gathered.take(SegmentId(id), spot, found, false, is_vouched);
            holdings[spot.volume].add(&summary);
            scans.insert(id, Scanned { summary, holes });
        });
        gathered.prove(scans.values_mut().map(|scanned| &mut scanned.summary));
        let flaws = self.flaws.iter();
        let reported = flaws.filter_map(|flaw| Some((flaw.volume, flaw.offset?)));
        let reported: HashSet<(usize, u64)> = reported.collect();
        for spots in present.chunks(LOOKS) {
            let copies = self.headers(spots);
            for (spot, copies) in spots.iter().zip(copies) {
                let id = ids[&(spot.volume, spot.number)];
                if let Some(scanned) = scans.get(&id) {
                    for (&why, &pages) in &scanned.summary.disbelieved {
                        let reason = FlawReason::Disbelieved { pages, why };
                        self.flaw(Flaw::in_segment(spot, None, reason));
                    }
                    if !self.segments[id as usize].is_lost {
                        self.compare_headers(spot, &copies, &scanned.summary);
                    }
                    let lost_until = self.judge_holes(spot, scanned, &reported);
                    gathered.lost_until = gathered.lost_until.max(lost_until);
                }
            }
        }
        self.add_stale_volumes(gathered.highest);
        self.removals.sort_by_key(|removal| removal.birth);
        for (volume, (held, statement)) in holdings.iter().zip(&self.statements).enumerate() {
            if let Some(fault) = held.compare(statement) {
                gathered.note_difference(volume, fault);
            }
        }
        self.take_records(gathered, &holdings);
    }

    /// The closing statements of the volumes that are there.
    fn read_statements(&self) -> Vec<Statement> {
        if self.condition != Condition::Clean {
            return vec![Statement::None; self.volumes.len()];
        }
        let present = self.volumes.iter().zip(&self.opened);
        let superblocks = present.map(|(facts, opened)| {
            let opened = opened
                .as_ref()
                .filter(|_| facts.state == VolumeState::Present);
            opened?.superblock.as_ref()
        });
        read_statements(self.disk.as_ref(), &superblocks.collect::<Vec<_>>())
    }

    /// Adds a flaw for each volume that does not hold what its closing statement states.
    fn compare_with_close(&mut self, holdings: &[FoundHoldings]) {
        let mut pages = vec![0; self.volumes.len()];
        for facts in &self.segments {
            pages[facts.volume] += facts.live_pages;
        }
        let mut flaws = Vec::new();
        let is_locked = matches!(self.encryption, Encryption::Locked { .. });
        for (volume, (held, statement)) in holdings.iter().zip(&self.statements).enumerate() {
            let lost = held.lost_pages(statement, pages[volume]);
            let reason = match held.compare(statement).map(|fault| fault.reason) {
                Some(reason) if is_locked => FlawReason::ClosingStatement(reason.to_string()),
                Some(FaultReason::Emptied { lost: segments, .. }) => FlawReason::LostContents {
                    segments,
                    pages: lost,
                },
                Some(reason) => FlawReason::ClosingStatement(reason.to_string()),
                None => continue,
            };
            flaws.push(Flaw::at(volume, CLOSING_OFFSET, reason));
        }
        self.flaws.extend(flaws);
    }

    /// Segments on volumes that are there, within the part that is there.
    fn readable(&self) -> impl Iterator<Item = Spot> + '_ {
        let bytes = self.segment_bytes();
        let is_readable = move |spot: &&Spot| {
            let volume = &self.volumes[spot.volume];
            let end = spot.headers().offset.saturating_add(bytes);
            match volume.state {
                VolumeState::Present => true,
                VolumeState::Truncated => volume.bytes.is_some_and(|length| end <= length),
                VolumeState::Missing | VolumeState::GivenUp => false,
            }
        };
        self.spots.iter().filter(is_readable).cloned()
    }

    fn flaw(&mut self, flaw: Flaw) {
        let index = flaw
            .segment
            .and_then(|number| self.index_of(flaw.volume, number));
        if let Some(index) = index {
            self.segments[index].flaws += 1;
        }
        self.flaws.push(flaw);
    }

    /// Segments are in the order of volumes and numbers.
    fn index_of(&self, volume: usize, number: u32) -> Option<usize> {
        let place = |facts: &SegmentFacts| (facts.volume, facts.number);
        self.segments
            .binary_search_by_key(&(volume, number), place)
            .ok()
    }

    /// The facts of a segment, if it is there.
    pub(super) fn facts_of(&self, volume: usize, number: u32) -> Option<&SegmentFacts> {
        Some(&self.segments[self.index_of(volume, number)?])
    }

    fn add_scan(&mut self, id: usize, spot: &Spot, scan: &SegmentScan) {
        let records = scan.blocks.iter().map(|block| match &block.body {
            Body::Records(records) => records
                .iter()
                .filter(|record| matches!(record, Record::Page(_)))
                .count() as u64,
            Body::Namespace(_) => 0,
        });
        let data_blocks = scan.data_end.saturating_sub(HEADER_BLOCKS);
        let facts = &mut self.segments[id];
        facts.case = Some(scan.case);
        facts.state = scan.header.map(|header| header.state);
        facts.sequence = scan.sequence;
        facts.descriptor_blocks = scan.block_count;
        facts.records = records.sum();
        facts.data_bytes = u64::from(data_blocks) * BLOCK_BYTES as u64;
        facts.is_lost = is_lost(scan);
        if facts.is_lost {
            let mut faults: Vec<String> = scan.faults.iter().map(Fault::to_string).collect();
            // Usually both copies of the header.
            faults.dedup();
            let reason = faults.join("; ");
            let reason = FlawReason::LostSegment(reason);
            self.flaw(Flaw::in_segment(spot, None, reason));
            return;
        }
        for fault in &scan.faults {
            // Headers are compared later, copy by copy.
            if fault.structure != Structure::SegmentHeader {
                let reason = FlawReason::Descriptor(fault.reason.to_string());
                self.flaw(Flaw::in_segment(spot, Some(fault.offset), reason));
            }
        }
    }

    fn add_removals(&mut self, spot: &Spot, scan: &SegmentScan, wanted: KeyPrefix) {
        for block in &scan.blocks {
            let Body::Records(records) = &block.body else {
                continue;
            };
            for record in records {
                let kind = match record {
                    Record::Delete { key, .. } if key.prefix() == wanted => RemovalKind::Deleted,
                    Record::Evict { key, .. } if *key == wanted => RemovalKind::Evicted,
                    Record::Clear { .. } => RemovalKind::Cleared,
                    _ => continue,
                };
                self.removals.push(Removal {
                    kind,
                    namespace: record.namespace(),
                    birth: record.birth(),
                    commit: block.header.commit,
                    volume: spot.volume,
                    segment: spot.number,
                });
            }
        }
    }

    fn headers(&self, spots: &[Spot]) -> Vec<Copies> {
        let reads: Vec<_> = spots.iter().map(Spot::headers).collect();
        let parse = |(spot, bytes): (&Spot, Result<AlignedBuf, DiskError>)| {
            bytes.map(|bytes| spot.parse_headers(&bytes))
        };
        let results = read_all(self.disk.as_ref(), &reads);
        spots.iter().zip(results).map(parse).collect()
    }

    /// Whether the crash of the last epoch may have interrupted the write of the segment's header.
    /// Of a segment that was open then, either copy may hold anything. Of other segments of any
    /// epoch, two whole copies may differ: an open seals the segments that earlier epochs left
    /// open, and reclaim frees a segment or adds to its list.
    fn is_left_by_crash(&self, summary: &SegmentSummary, both_whole: bool) -> bool {
        let was_open = summary.was_open_in(self.run);
        self.condition != Condition::Clean && (was_open || both_whole)
    }

    fn compare_headers(&mut self, spot: &Spot, copies: &Copies, summary: &SegmentSummary) {
        let offset = spot.headers().offset;
        let offsets = [offset, offset + BLOCK_BYTES as u64];
        let copies = match copies {
            Ok(copies) => copies,
            Err(error) => {
                let reason = FlawReason::Header {
                    reason: format!("unreadable: {error}"),
                    other_is_good: false,
                };
                self.flaw(Flaw::in_segment(spot, Some(offset), reason));
                return;
            }
        };
        let mut bad: Vec<(u64, String)> = Vec::new();
        match copies {
            [Err(Damage::Blank(_)), Err(Damage::Blank(_))] if summary.case == Case::Blank => {}
            // Recovery has found a later generation behind it.
            [Ok(a), Ok(_)] if summary.header.is_none() && self.condition == Condition::Clean => {
                let why = format!("it is of generation {}, an older one", a.sequence);
                bad.push((offset, why));
            }
            [Ok(a), Ok(b)] => {
                bad.extend(disagreement(a, b).map(|(copy, why)| (offsets[copy], why)));
            }
            copies => {
                let broken = copies.iter().zip(offsets);
                bad.extend(
                    broken.filter_map(|(copy, at)| Some((at, copy.as_ref().err()?.to_string()))),
                );
            }
        }
        if self.is_left_by_crash(summary, copies.iter().all(Result::is_ok)) {
            self.unfinished_blocks += bad.len() as u64;
            return;
        }
        let other_is_good = copies.iter().any(Result::is_ok);
        for (at, reason) in bad {
            let reason = FlawReason::Header {
                reason,
                other_is_good,
            };
            self.flaw(Flaw::in_segment(spot, Some(at), reason));
        }
    }

    /// `reported` are the places that the scan has reported already. Returns a serial above the
    /// commits of all records that the holes have lost; zero if they have lost none.
    fn judge_holes(
        &mut self,
        spot: &Spot,
        scanned: &Scanned,
        reported: &HashSet<(usize, u64)>,
    ) -> Serial {
        let proven = scanned.summary.proven;
        let mut lost_until = Serial::ZERO;
        for &(index, next_commit) in &scanned.holes {
            let offset = spot.block_offset(index);
            if next_commit > proven {
                self.unfinished_blocks += 1;
            } else if !reported.contains(&(spot.volume, offset)) {
                let read = read_all(self.disk.as_ref(), &[spot.blocks(index, 1)]).pop();
                let reason = match read {
                    Some(Ok(bytes)) => match spot.parse_block(index, &bytes) {
                        Ok(_) => "it is of an older generation of the segment: its write was lost"
                            .to_owned(),
                        Err(damage) => damage.to_string(),
                    },
                    Some(Err(error)) => format!("unreadable: {error}"),
                    None => continue,
                };
                let reason = FlawReason::Descriptor(reason);
                self.flaw(Flaw::in_segment(spot, Some(offset), reason));
                lost_until = lost_until.max(next_commit);
            }
        }
        lost_until
    }

    /// Adds a flaw for each stale volume. A crash while an open was writing its epoch to the
    /// volumes leaves some behind: these are not stale.
    fn add_stale_volumes(&mut self, highest: Serial) {
        let superblocks = self.opened.iter().flatten();
        let superblocks = superblocks.filter_map(|opened| opened.superblock.as_ref());
        let newest = known_to_all(superblocks, highest.run());
        for volume in 0..self.volumes.len() {
            if let Some(run) = self.volumes[volume].run.filter(|run| *run < newest) {
                self.flaw(Flaw::of_volume(volume, FlawReason::Stale { run, newest }));
            }
        }
    }

    fn take_records(&mut self, mut gathered: Gathered<Whole>, holdings: &[FoundHoldings]) {
        let (found, fates) = gathered.judge(self.disk.as_ref(), &self.spots);
        let is_removed = |page: &Found<Whole>, key| gathered.gone.contains_key(&(page.slot, key));
        let lost_until = self.lost_until(gathered.lost_until);
        let namespaces = gathered.namespaces;
        self.records = Records::new(found, fates, &namespaces, gathered.seals);
        self.namespaces = namespaces.into_iter().map(NamespaceFacts::empty).collect();
        for &index in &self.records.live {
            let found = &self.records.found[index];
            let bytes = self.records.bytes(found);
            let namespace = &mut self.namespaces[usize::from(found.slot.0)];
            namespace.pages += 1;
            namespace.bytes += bytes;
            let segment = &mut self.segments[found.place.segment.0 as usize];
            segment.live_pages += 1;
            segment.live_bytes += bytes;
        }
        self.compare_with_close(holdings);
        self.losses =
            (lost_until > Serial::ZERO).then(|| self.sum_up_losses(lost_until, is_removed));
        self.add_overlaps();
    }

    /// Above the commit of every lost record, also on missing volumes. Records on volumes that were
    /// given up are not counted as lost again.
    fn lost_until(&self, in_segments: Serial) -> Serial {
        let is_away = |facts: &VolumeFacts| {
            matches!(facts.state, VolumeState::Missing | VolumeState::Truncated)
        };
        if self.volumes.iter().any(is_away) {
            Serial::MAX
        } else {
            in_segments
        }
    }

    fn add_overlaps(&mut self) {
        let mut live = self.records.live.clone();
        live.sort_unstable_by_key(|&index| self.records.found[index].place);
        let mut flaws = Vec::new();
        for pair in live.windows(2) {
            let [a, b] = [pair[0], pair[1]].map(|index| &self.records.found[index]);
            let end = a.place.start + self.records.blocks(a);
            if a.place.segment == b.place.segment && b.place.start < end {
                let spot = &self.spots[b.place.segment.0 as usize];
                let reason = FlawReason::Overlap(b.extra.key);
                flaws.push(Flaw::in_segment(spot, Some(self.offset(b)), reason));
            }
        }
        for flaw in flaws {
            self.flaw(flaw);
        }
    }
}

impl SegmentFacts {
    fn unknown(spot: &Spot) -> SegmentFacts {
        SegmentFacts {
            volume: spot.volume,
            number: spot.number,
            offset: spot.headers().offset,
            case: None,
            state: None,
            sequence: Serial::ZERO,
            descriptor_blocks: 0,
            records: 0,
            data_bytes: 0,
            live_pages: 0,
            live_bytes: 0,
            flaws: 0,
            is_lost: false,
        }
    }
}

impl NamespaceFacts {
    fn empty(init: NamespaceInit) -> NamespaceFacts {
        NamespaceFacts {
            fingerprint: init.fingerprint,
            record: init.record.map(|(record, _)| record),
            pages: 0,
            bytes: 0,
        }
    }
}

/// Whether no header and no block of a segment is left. A segment that the device cannot read is
/// not lost yet.
fn is_lost(scan: &SegmentScan) -> bool {
    let is_readable = |fault: &Fault| !fault.reason.is_unread();
    scan.is_lost() && scan.faults.iter().all(is_readable)
}

/// The copy, of two whole ones, that was not written when it should have been, and the evidence.
/// Both copies are written each time, except that a free header goes to one copy.
fn disagreement(a: &SegmentHeader, b: &SegmentHeader) -> Option<(usize, String)> {
    let freed = |free: &SegmentHeader, other: &SegmentHeader| {
        free.state == SegmentState::Free && free.sequence == other.sequence
    };
    if a == b || freed(a, b) || freed(b, a) {
        return None;
    }
    let rank = |header: &SegmentHeader| (header.sequence, header.state != SegmentState::Open);
    let older = usize::from(rank(b) < rank(a));
    Some((
        older,
        "it is older than the other copy: its last write was lost".to_owned(),
    ))
}
