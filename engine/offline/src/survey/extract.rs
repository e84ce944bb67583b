//! Returns live pages with their bytes, in the order of their chains, for an export.
//!
//! The order: parents before children, and each chain in one stretch. Chains that share no page
//! come in the order of their places on disk. A circle, which only wrong descriptors claim, is
//! entered at the page with the lowest place.
//!
//! The bytes: the pages are one stream, cut into large reads with many in flight. Neighbours on
//! disk share a read. Each page is verified before it is returned. A page covered by a failed read
//! is read again by itself. Memory is bounded by the reads in flight and one page.
//!
//! It needs no lock. A concurrent writer may reuse a segment between the survey and the read: such
//! a page fails its checksum.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::ops::{ControlFlow, Range};

use larder_disk::DiskError;
use larder_disk::mailbox::{ReadAhead, read_all};
use larder_format::{BLOCK_BYTES, KeyPrefix, PageChecksum, PageKey};
use larder_store::recovery::{Fate, Found};

use super::chains::is_head;
use super::payloads::{PayloadFault, READ_BYTES, READS_MAX, read_at};
use super::{Page, Survey, Whole};

/// A record of this survey, by its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordId(usize);

/// A page and its ancestors.
#[derive(Clone, Debug)]
pub struct Ancestry {
    /// The pages, the first of the chain first.
    pub pages: Vec<RecordId>,
    /// Whether they begin with the head of the chain; if not, a part of the chain is not stored.
    pub complete: bool,
}

impl Survey {
    /// The page of a record.
    ///
    /// # Panics
    /// For an id of another survey.
    #[must_use]
    pub fn page_of(&self, id: RecordId) -> Page {
        self.page(id.0)
    }

    /// The live pages of a namespace, by its position in [`Survey::namespaces`], in the order of
    /// their chains.
    #[must_use]
    pub fn chain_order(&self, namespace: usize) -> Vec<RecordId> {
        let live = self.live_in(namespace);
        let mut by_place: Vec<usize> = (0..live.len()).collect();
        by_place.sort_unstable_by_key(|&at| self.record(live[at]).place);
        let family = Family::new(self, live, &by_place);
        let mut order = Vec::with_capacity(live.len());
        let mut visited = vec![false; live.len()];
        let heads = by_place.iter().filter(|&&at| family.parents[at].is_none());
        // Only circles are left after the heads.
        for &start in heads.chain(&by_place) {
            family.descend(start, &mut visited, |at| order.push(RecordId(live[at])));
        }
        order
    }

    /// A live page of a namespace with its stored ancestors up to the first gap; `None` if there is
    /// no such page.
    #[must_use]
    pub fn ancestry(&self, namespace: usize, key: &PageKey) -> Option<Ancestry> {
        let mut pages = Vec::new();
        let mut seen = HashSet::new();
        let first = self.live_record(namespace, key.prefix())?;
        if self.record(first).extra.key != *key {
            return None;
        }
        let mut next = Some(first);
        while let Some(at) = next.filter(|&at| seen.insert(at)) {
            pages.push(RecordId(at));
            let parent = self.record(at).parent;
            next = parent.and_then(|parent| self.live_record(namespace, parent));
        }
        let complete = pages
            .last()
            .is_some_and(|last| is_head(self.record(last.0)));
        pages.reverse();
        Some(Ancestry { pages, complete })
    }

    /// Reads pages in the given order. Passes each to `each` with its bytes, padding included, or
    /// with the reason why they are not available. Pages of an encrypted store are decrypted,
    /// and come as those of a plain one. `each` may end the reading early.
    ///
    /// # Errors
    /// When this process cannot read, or has too little memory: the pages themselves may be good.
    pub fn read_pages(
        &self,
        pages: &[RecordId],
        mut each: impl FnMut(&Page, Result<&[u8], PayloadFault>) -> ControlFlow<()>,
    ) -> Result<(), io::Error> {
        let bytes = usize::try_from(READ_BYTES).unwrap_or(usize::MAX);
        let mut reads = ReadAhead::new(self.disk.as_ref(), READS_MAX / 2, bytes)?;
        let mut under_way: VecDeque<u64> = VecDeque::new();
        let mut plan = Plan::new(self, pages);
        let mut assembly = Assembly::new(self, pages);
        loop {
            while reads.has_room()
                && let Some((volume, range)) = plan.next()
            {
                under_way.push_back(range.end - range.start);
                reads.start(read_at(volume, &range));
            }
            let (Some(length), Some(result)) = (under_way.pop_front(), reads.take()) else {
                return Ok(());
            };
            if assembly.take(length, result.ok(), &mut each)?.is_break() {
                return Ok(());
            }
        }
    }

    fn record(&self, at: usize) -> &Found<Whole> {
        &self.records.found[at]
    }

    /// Positions of the live records of a namespace, in the order of their keys.
    fn live_in(&self, namespace: usize) -> &[usize] {
        let live = &self.records.live;
        let slot = |at: usize| usize::from(self.record(at).slot.0);
        let start = live.partition_point(|&at| slot(at) < namespace);
        let end = live.partition_point(|&at| slot(at) <= namespace);
        &live[start..end]
    }

    fn live_record(&self, namespace: usize, key: KeyPrefix) -> Option<usize> {
        let mut records = self.records.range(namespace, key);
        records.find(|&at| self.records.fates[at] == Fate::Live)
    }
}

/// Parents and children among the live pages of a namespace. Pages are positions in the list of
/// live pages.
struct Family {
    parents: Vec<Option<usize>>,
    /// The children of page `n`, in the order of their places, are `children[starts[n]..starts[n +
    /// 1]]`.
    children: Vec<usize>,
    starts: Vec<usize>,
}

impl Family {
    /// `live` is in the order of keys.
    fn new(survey: &Survey, live: &[usize], by_place: &[usize]) -> Family {
        let find = |key: KeyPrefix| live.binary_search_by_key(&key, |&at| survey.record(at).key);
        let parent_of = |&at: &usize| find(survey.record(at).parent?).ok();
        let parents: Vec<Option<usize>> = live.iter().map(parent_of).collect();
        let mut starts = vec![0; live.len() + 1];
        for parent in parents.iter().flatten() {
            starts[parent + 1] += 1;
        }
        for at in 0..live.len() {
            starts[at + 1] += starts[at];
        }
        let mut children = vec![0; starts[live.len()]];
        let mut free = starts.clone();
        for &at in by_place {
            if let Some(parent) = parents[at] {
                children[free[parent]] = at;
                free[parent] += 1;
            }
        }
        Family {
            parents,
            children,
            starts,
        }
    }

    /// Visits a page and all its descendants, each directly after its parent or after the last
    /// descendant of an elder sibling.
    fn descend(&self, start: usize, visited: &mut [bool], mut visit: impl FnMut(usize)) {
        let mut left = vec![start];
        while let Some(at) = left.pop() {
            if std::mem::replace(&mut visited[at], true) {
                continue;
            }
            visit(at);
            let children = &self.children[self.starts[at]..self.starts[at + 1]];
            left.extend(children.iter().rev());
        }
    }
}

/// The pages as one stream of bytes, cut into reads.
struct Plan<'a> {
    survey: &'a Survey,
    pages: &'a [RecordId],
    /// The first page not planned in full, and the number of its bytes planned.
    next: usize,
    planned: u64,
}

impl<'a> Plan<'a> {
    fn new(survey: &'a Survey, pages: &'a [RecordId]) -> Plan<'a> {
        Plan {
            survey,
            pages,
            next: 0,
            planned: 0,
        }
    }
}

impl Iterator for Plan<'_> {
    type Item = (usize, Range<u64>);

    fn next(&mut self) -> Option<(usize, Range<u64>)> {
        let page = self.survey.page_of(*self.pages.get(self.next)?);
        let volume = self.survey.segments[page.segment].volume;
        let start = page.offset + self.planned;
        let mut end = start + (page.bytes - self.planned).min(READ_BYTES);
        self.planned += end - start;
        if self.planned < page.bytes {
            return Some((volume, start..end));
        }
        (self.next, self.planned) = (self.next + 1, 0);
        while let Some(&id) = self.pages.get(self.next) {
            let page = self.survey.page_of(id);
            let follows = self.survey.segments[page.segment].volume == volume && page.offset == end;
            if !follows || end + page.bytes - start > READ_BYTES {
                break;
            }
            end += page.bytes;
            self.next += 1;
        }
        Some((volume, start..end))
    }
}

/// The pages, assembled from the reads.
struct Assembly<'a> {
    survey: &'a Survey,
    pages: &'a [RecordId],
    /// The first page that has not been returned.
    next: usize,
    /// The number of its bytes that have been read, and the bytes, unless a read of it failed.
    come: u64,
    bytes: Option<Vec<u8>>,
}

impl<'a> Assembly<'a> {
    fn new(survey: &'a Survey, pages: &'a [RecordId]) -> Assembly<'a> {
        Assembly {
            survey,
            pages,
            next: 0,
            come: 0,
            bytes: Some(Vec::new()),
        }
    }

    /// Takes in the next `length` bytes of the stream, or the failure to read them.
    fn take(
        &mut self,
        length: u64,
        bytes: Option<&[u8]>,
        each: &mut impl FnMut(&Page, Result<&[u8], PayloadFault>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, io::Error> {
        let mut taken = 0;
        while taken < length
            && let Some(&id) = self.pages.get(self.next)
        {
            let page = self.survey.page_of(id);
            let part = (page.bytes - self.come).min(length - taken);
            let piece = bytes.map(|bytes| &bytes[at(taken)..at(taken + part)]);
            taken += part;
            let flow = if part == page.bytes {
                self.next += 1;
                self.hand_out(id, piece, each)?
            } else {
                self.add(&page, piece, part)?;
                if self.come < page.bytes {
                    continue;
                }
                let whole = self.bytes.replace(Vec::new());
                (self.next, self.come) = (self.next + 1, 0);
                self.hand_out(id, whole.as_deref(), each)?
            };
            if flow.is_break() {
                return Ok(flow);
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn add(&mut self, page: &Page, piece: Option<&[u8]>, length: u64) -> Result<(), io::Error> {
        self.come += length;
        match (piece, &mut self.bytes) {
            (Some(piece), Some(bytes)) => {
                bytes
                    .try_reserve_exact(at(page.bytes) - bytes.len())
                    .map_err(|_| io::ErrorKind::OutOfMemory)?;
                bytes.extend_from_slice(piece);
            }
            _ => self.bytes = None,
        }
        Ok(())
    }

    /// Verifies a page and passes it on; `None` for a page whose read failed.
    fn hand_out(
        &self,
        id: RecordId,
        bytes: Option<&[u8]>,
        each: &mut impl FnMut(&Page, Result<&[u8], PayloadFault>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, io::Error> {
        let page = self.survey.page_of(id);
        let again;
        let bytes = match bytes {
            Some(bytes) => bytes,
            None => match self.read_again(&page)? {
                Ok(bytes) => {
                    again = bytes;
                    &again
                }
                Err(error) => {
                    error.on_the_medium()?;
                    return Ok(each(&page, Err(PayloadFault::Unreadable(error))));
                }
            },
        };
        let namespace = self.survey.namespaces[page.namespace].fingerprint;
        let mut checksum = PageChecksum::new(namespace, &page.key);
        checksum.blocks(bytes);
        let (found, stored) = (checksum.finish(), page.checksum);
        if found == stored && !self.survey.is_unlocked() {
            return Ok(each(&page, Ok(bytes)));
        }
        if found == stored {
            let mut plain = Vec::new();
            plain
                .try_reserve_exact(bytes.len())
                .map_err(|_| io::ErrorKind::OutOfMemory)?;
            plain.extend_from_slice(bytes);
            if let Err(unopened) = self.survey.open_page(&page, &mut plain) {
                return Ok(each(&page, Err(PayloadFault::Sealed(unopened))));
            }
            let outside = self.survey.namespaces[page.namespace].outside();
            let mut checksum = PageChecksum::new(outside, &page.key);
            checksum.blocks(&plain);
            let page = Page {
                checksum: checksum.finish(),
                seal: None,
                ..page
            };
            return Ok(each(&page, Ok(&plain)));
        }
        Ok(each(&page, Err(PayloadFault::Mismatch { found, stored })))
    }

    /// Reads a page by itself, so that one bad sector costs one page.
    fn read_again(&self, page: &Page) -> Result<Result<Vec<u8>, DiskError>, io::Error> {
        let volume = self.survey.segments[page.segment].volume;
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(at(page.bytes))
            .map_err(|_| io::ErrorKind::OutOfMemory)?;
        for start in (0..page.bytes).step_by(at(READ_BYTES)) {
            let end = (start + READ_BYTES).min(page.bytes);
            let piece = page.offset + start..page.offset + end;
            let read = read_all(self.survey.disk.as_ref(), &[read_at(volume, &piece)]).pop();
            match read.unwrap_or(Err(DiskError::Shutdown)) {
                Ok(piece) => bytes.extend_from_slice(&piece),
                Err(error) => return Ok(Err(error)),
            }
        }
        debug_assert!(bytes.len().is_multiple_of(BLOCK_BYTES));
        Ok(Ok(bytes))
    }
}

/// An offset in memory: pages are below 1 GiB, reads far below.
fn at(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}
