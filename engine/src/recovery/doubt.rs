//! Resolves doubts: finds the newest whole record of a key whose newest record is not proven.
//!
//! A crash may leave the descriptor of a page whose bytes never reached the device. The causes: a
//! put that repeats an unproven page, a copy that reclaim was making, a failed write. The page that
//! the record was to replace may be acknowledged, and still lies at its old place. Only the bytes
//! can decide, so recovery reads the pages of such keys. The newest record whose bytes match
//! counts. A proven record counts without a read. Only keys that were in the store and were being
//! written again at the last crash are in doubt. A store that was closed in order has almost none.

use larder_format::{PageChecksum, PageKey};

use super::Found;
use super::scan::Spot;
use crate::core::NamespaceInit;
use crate::disk::Disk;
use crate::disk::mailbox::{ReadAt, read_all};

/// Most bytes of pages that are read at once.
const BATCH_BYTES: usize = 64 << 20;

/// The records of one key that no deletion kills, newest first, down to the first proven record.
/// Positions among all pages. At least two.
pub(super) struct Doubt {
    pub key: PageKey,
    pub candidates: Vec<usize>,
}

/// The pages, their places, and the means to verify them.
pub(super) struct Payloads<'a, E> {
    pub disk: &'a dyn Disk,
    pub spots: &'a [Spot],
    pub namespaces: &'a [NamespaceInit],
    pub pages: &'a [Found<E>],
}

impl<E> Payloads<'_, E> {
    /// The newest whole record of each key: proven, or read and verified. `None` if no record is
    /// whole.
    pub(super) fn settle(&self, doubts: &[Doubt]) -> Vec<Option<usize>> {
        let mut settled: Vec<Option<usize>> = vec![None; doubts.len()];
        let most = doubts.iter().map(|doubt| doubt.candidates.len()).max();
        for age in 0..most.unwrap_or(0) {
            let mut asked = Vec::new();
            for (at, doubt) in doubts.iter().enumerate() {
                match doubt.candidates.get(age) {
                    Some(&page) if settled[at].is_none() && self.pages[page].proven => {
                        settled[at] = Some(page);
                    }
                    Some(&page) if settled[at].is_none() => asked.push((at, page)),
                    _ => {}
                }
            }
            self.read(doubts, &asked, &mut settled);
        }
        settled
    }

    fn read(&self, doubts: &[Doubt], asked: &[(usize, usize)], settled: &mut [Option<usize>]) {
        let mut rest = asked;
        while !rest.is_empty() {
            let mut bytes = 0;
            let count = rest
                .iter()
                .take_while(|(_, page)| {
                    bytes += self.place(&self.pages[*page]).bytes;
                    bytes <= BATCH_BYTES
                })
                .count()
                .max(1);
            let (now, later) = rest.split_at(count);
            for (&(at, page), checksum) in now.iter().zip(self.checksums(doubts, now)) {
                if checksum == Some(self.pages[page].checksum) {
                    settled[at] = Some(page);
                }
            }
            rest = later;
        }
    }

    /// The checksums of the bytes at the places of these pages; `None` if the bytes cannot be read.
    fn checksums(&self, doubts: &[Doubt], asked: &[(usize, usize)]) -> Vec<Option<u64>> {
        let mut sums: Vec<Option<PageChecksum>> = Vec::with_capacity(asked.len());
        let mut pieces: Vec<(usize, ReadAt)> = Vec::with_capacity(asked.len());
        for &(at, page) in asked {
            let found = &self.pages[page];
            let namespace = self.namespaces[usize::from(found.slot.0)].fingerprint;
            pieces.extend(pieces_of(self.place(found)).map(|piece| (sums.len(), piece)));
            sums.push(Some(PageChecksum::new(namespace, &doubts[at].key)));
        }
        // More than one piece is a single large page: a record's size field must not size an
        // allocation.
        let at_once = if asked.len() > 1 { pieces.len() } else { 1 };
        for pieces in pieces.chunks(at_once.max(1)) {
            let reads: Vec<ReadAt> = pieces.iter().map(|(_, piece)| *piece).collect();
            for ((page, _), bytes) in pieces.iter().zip(read_all(self.disk, &reads)) {
                match (bytes, &mut sums[*page]) {
                    (Ok(bytes), Some(sum)) => sum.blocks(&bytes),
                    (_, sum) => *sum = None,
                }
            }
        }
        sums.into_iter()
            .map(|sum| sum.map(PageChecksum::finish))
            .collect()
    }

    fn place(&self, found: &Found<E>) -> ReadAt {
        let blocks = self.namespaces[usize::from(found.slot.0)].page_blocks;
        self.spots[found.place.segment.0 as usize].data(found.place.start, blocks)
    }
}

fn pieces_of(whole: ReadAt) -> impl Iterator<Item = ReadAt> {
    let starts = (0..whole.bytes).step_by(BATCH_BYTES);
    starts.map(move |start| ReadAt {
        offset: whole.offset + start as u64,
        bytes: BATCH_BYTES.min(whole.bytes - start),
        ..whole
    })
}
