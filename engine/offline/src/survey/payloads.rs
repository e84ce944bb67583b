//! Reads every live page and verifies its bytes, at the speed of the devices.
//!
//! Pages are read in the order of their places, neighbours together, in large reads with many in
//! flight on every volume. The calling thread computes the checksums meanwhile; it is several times
//! as fast as the devices. A page covered by a failed read is read again by itself, so that one bad
//! sector costs one page.

use std::collections::VecDeque;
use std::io;
use std::ops::{ControlFlow, Range};

use larder_core::capacity::footprint;
use larder_disk::mailbox::{ReadAhead, ReadAt, read_all};
use larder_disk::{Disk, DiskError};
use larder_format::{BLOCK_BYTES, Fingerprint, PageChecksum};
use larder_store::keys::Unopened;
use larder_store::recovery::Statement;

use super::facts::NamespaceFacts;
use super::{Page, Survey};

/// Bytes of one read.
pub(super) const READ_BYTES: u64 = 2 << 20;

/// Reads in flight at once, for each volume and in all.
const READS_PER_VOLUME: usize = 16;
pub(super) const READS_MAX: usize = 64;

/// Unused bytes between two pages that are read along and not skipped.
const BRIDGE_BYTES: u64 = 128 << 10;

/// The result of the check of the payloads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Payloads {
    /// Pages checked.
    pub checked: u64,
    /// Their bytes.
    pub checked_bytes: u64,
    /// Pages whose bytes match.
    pub good: u64,
    /// Unproven pages whose bytes do not match: the last crash interrupted their writes.
    pub unfinished: u64,
    /// Pages that are lost.
    pub bad: u64,
    /// Good pages of an encrypted store that no key opens.
    pub unopened: u64,
}

/// A page that is lost.
#[derive(Clone, Copy, Debug)]
pub struct BadPage {
    /// The page.
    pub page: Page,
    /// The reason.
    pub fault: PayloadFault,
}

/// Why a page is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PayloadFault {
    /// Its bytes do not match.
    #[error("its checksum is {found:016x}, but {stored:016x} was put")]
    Mismatch {
        /// The checksum of the bytes read.
        found: u64,
        /// The checksum in its descriptor.
        stored: u64,
    },
    /// The device could not read it.
    #[error("unreadable: {0}")]
    Unreadable(DiskError),
    /// Its bytes are as they were written, and no key opens them.
    #[error("encrypted: {0}")]
    Sealed(Unopened),
}

impl Survey {
    /// Bytes that [`Survey::check_payloads`] has to check.
    #[must_use]
    pub fn live_bytes(&self) -> u64 {
        self.namespaces.iter().map(|facts| facts.bytes).sum()
    }

    /// Usable bytes that the live pages take in a store with segments of this size: see
    /// [`footprint`].
    #[must_use]
    pub fn taken_bytes(&self) -> u64 {
        let blocks = |bytes: u64| u32::try_from(bytes / BLOCK_BYTES as u64).unwrap_or(u32::MAX);
        let taken = |facts: &NamespaceFacts| {
            let page = blocks(facts.bytes.checked_div(facts.pages).unwrap_or(0));
            facts.pages * footprint(blocks(self.segment_bytes()), page) * BLOCK_BYTES as u64
        };
        self.namespaces.iter().map(taken).sum()
    }

    /// Verifies the bytes of every live page. `progress` receives the number of bytes checked, and
    /// may end the check early. `lost` receives the lost pages, volume by volume in the order of
    /// their places.
    ///
    /// # Errors
    /// When this process cannot read, or has too little memory: the pages themselves may be good.
    pub fn check_payloads(
        &self,
        mut progress: impl FnMut(u64) -> ControlFlow<()>,
        mut lost: impl FnMut(BadPage),
    ) -> Result<Payloads, io::Error> {
        let mut lanes: Vec<Lane<'_>> = (0..self.volumes.len())
            .map(|volume| Lane::new(self, volume))
            .filter(|lane| !lane.pages.is_empty())
            .collect();
        let depth = (lanes.len() * READS_PER_VOLUME).clamp(1, READS_MAX);
        let bytes = usize::try_from(READ_BYTES).unwrap_or(usize::MAX);
        let mut reads = ReadAhead::new(self.disk.as_ref(), depth, bytes)?;
        let mut under_way: VecDeque<(usize, Range<u64>)> = VecDeque::with_capacity(depth);
        let mut counts = Payloads::default();
        let statements = self.statements.iter();
        let mut unfinished: Vec<u64> = statements.map(Statement::unfinished_max).collect();
        let mut turn = 0;
        loop {
            while reads.has_room()
                && let Some((lane, range)) = next_read(&mut lanes, &mut turn)
            {
                reads.start(read_at(lanes[lane].volume, &range));
                under_way.push_back((lane, range));
            }
            let (Some((lane, range)), Some(result)) = (under_way.pop_front(), reads.take()) else {
                return Ok(counts);
            };
            let mut unread = None;
            lanes[lane].take(range, result.ok(), &mut |page, outcome| {
                if let Err(PayloadFault::Unreadable(error)) = outcome
                    && let Err(error) = error.on_the_medium()
                {
                    unread = Some(error);
                } else if let Some(fault) = {
                    let volume = self.segments[page.segment].volume;
                    counts.count(&page, outcome, unfinished.get_mut(volume))
                } {
                    lost(BadPage { page, fault });
                }
            });
            if let Some(error) = unread {
                return Err(error);
            }
            if progress(counts.checked_bytes).is_break() {
                return Ok(counts);
            }
        }
    }
}

impl Payloads {
    /// Counts a page; returns the reason if it is lost. `unfinished` is the number of further pages
    /// of the volume that may be unfinished.
    fn count(
        &mut self,
        page: &Page,
        outcome: Result<Opened, PayloadFault>,
        unfinished: Option<&mut u64>,
    ) -> Option<PayloadFault> {
        self.checked += 1;
        self.checked_bytes += page.bytes;
        match outcome {
            Ok(opened) => {
                self.good += 1;
                self.unopened += u64::from(opened.is_err());
            }
            Err(PayloadFault::Mismatch { .. })
                if !page.proven
                    && let Some(left) = unfinished
                    && *left > 0 =>
            {
                *left -= 1;
                self.unfinished += 1;
            }
            Err(fault) => {
                self.bad += 1;
                return Some(fault);
            }
        }
        None
    }
}

/// The next read of a volume; the volumes take turns.
fn next_read(lanes: &mut [Lane<'_>], turn: &mut usize) -> Option<(usize, Range<u64>)> {
    for _ in 0..lanes.len() {
        let lane = *turn % lanes.len();
        *turn += 1;
        if let Some(range) = lanes[lane].next_read() {
            return Some((lane, range));
        }
    }
    None
}

pub(super) fn read_at(volume: usize, range: &Range<u64>) -> ReadAt {
    ReadAt {
        volume,
        offset: range.start,
        bytes: usize::try_from(range.end - range.start).unwrap_or(usize::MAX),
    }
}

/// The pages of one volume, in the order of their places.
struct Lane<'a> {
    survey: &'a Survey,
    volume: usize,
    /// Positions of the records of its live pages.
    pages: Vec<usize>,
    /// The first page not covered in full by the reads begun so far, and the end of the planned
    /// reads.
    planned: usize,
    planned_end: u64,
    /// The first page that no finished read has touched.
    next: usize,
    /// Pages that finished reads cover in part.
    open: Vec<OpenPage>,
}

/// A page whose end has not been read yet.
struct OpenPage {
    page: Page,
    fingerprint: Fingerprint,
    checksum: PageChecksum,
    stored: u64,
    /// Its bytes so far, if it is to be decrypted.
    bytes: Option<Vec<u8>>,
    /// A read of a piece of it failed.
    failed: bool,
}

/// Whether a good page was decrypted, in an encrypted store.
type Opened = Result<(), Unopened>;

impl<'a> Lane<'a> {
    fn new(survey: &'a Survey, volume: usize) -> Lane<'a> {
        let found = &survey.records.found;
        let is_here = |index: &usize| {
            let segment = found[*index].place.segment.0 as usize;
            survey.spots[segment].volume == volume
        };
        let mut pages: Vec<usize> = survey
            .records
            .live
            .iter()
            .copied()
            .filter(is_here)
            .collect();
        pages.sort_unstable_by_key(|&index| found[index].place);
        Lane {
            survey,
            volume,
            pages,
            planned: 0,
            planned_end: 0,
            next: 0,
            open: Vec::new(),
        }
    }

    fn page(&self, position: usize) -> Option<Page> {
        self.pages
            .get(position)
            .map(|&index| self.survey.page(index))
    }

    /// The next piece to read: from the first byte not planned yet to the end of its read, or of
    /// the run of pages.
    fn next_read(&mut self) -> Option<Range<u64>> {
        let first = self.page(self.planned)?;
        let start = self.planned_end.max(first.offset);
        let limit = start + READ_BYTES;
        let mut end = start;
        while let Some(page) = self.page(self.planned) {
            if page.offset > end + BRIDGE_BYTES || page.offset >= limit {
                break;
            }
            let page_end = page.offset + page.bytes;
            end = end.max(page_end.min(limit));
            if page_end > limit {
                break;
            }
            self.planned += 1;
        }
        self.planned_end = end;
        Some(start..end)
    }

    /// Takes in a piece that was read, or that could not be read.
    fn take(
        &mut self,
        range: Range<u64>,
        bytes: Option<&[u8]>,
        done: &mut dyn FnMut(Page, Result<Opened, PayloadFault>),
    ) {
        while let Some(page) = self.page(self.next).filter(|page| page.offset < range.end) {
            self.open
                .push(OpenPage::new(self.survey, page, self.pages[self.next]));
            self.next += 1;
        }
        for open in &mut self.open {
            open.take(&range, bytes);
        }
        let is_over = |open: &mut OpenPage| open.page.offset + open.page.bytes <= range.end;
        for open in self.open.extract_if(.., is_over) {
            let page = open.page;
            done(page, open.finish(self.survey, self.volume));
        }
    }
}

impl OpenPage {
    fn new(survey: &Survey, page: Page, index: usize) -> OpenPage {
        let fingerprint = survey.namespaces[page.namespace].fingerprint;
        OpenPage {
            page,
            fingerprint,
            checksum: PageChecksum::new(fingerprint, &page.key),
            stored: survey.records.found[index].checksum,
            bytes: survey.is_unlocked().then(Vec::new),
            failed: false,
        }
    }

    /// Adds the bytes of this page in a piece. Pieces come in order.
    fn take(&mut self, piece: &Range<u64>, bytes: Option<&[u8]>) {
        let start = self.page.offset.max(piece.start);
        let end = (self.page.offset + self.page.bytes).min(piece.end);
        let place = |at: u64| usize::try_from(at.saturating_sub(piece.start)).unwrap_or(usize::MAX);
        match bytes.and_then(|bytes| bytes.get(place(start)..place(end))) {
            Some(bytes) => self.add(bytes),
            None => self.failed = true,
        }
    }

    fn add(&mut self, bytes: &[u8]) {
        self.checksum.blocks(bytes);
        if let Some(all) = &mut self.bytes {
            all.extend_from_slice(bytes);
        }
    }

    fn finish(mut self, survey: &Survey, volume: usize) -> Result<Opened, PayloadFault> {
        if self.failed {
            self.read_again(survey.disk.as_ref(), volume)?;
        }
        let found = self.checksum.finish();
        if found == self.stored {
            let page = &self.page;
            let bytes = self.bytes.as_mut();
            Ok(bytes.map_or(Ok(()), |bytes| survey.open_page(page, bytes)))
        } else {
            let stored = self.stored;
            Err(PayloadFault::Mismatch { found, stored })
        }
    }

    /// Reads the page by itself.
    fn read_again(&mut self, disk: &dyn Disk, volume: usize) -> Result<(), PayloadFault> {
        self.checksum = PageChecksum::new(self.fingerprint, &self.page.key);
        self.bytes.iter_mut().for_each(Vec::clear);
        let end = self.page.offset + self.page.bytes;
        let mut start = self.page.offset;
        while start < end {
            let piece = start..end.min(start + READ_BYTES);
            start = piece.end;
            let read = read_all(disk, &[read_at(volume, &piece)]).pop();
            let bytes = read.unwrap_or(Err(DiskError::Shutdown));
            self.add(&bytes.map_err(PayloadFault::Unreadable)?);
        }
        Ok(())
    }
}
