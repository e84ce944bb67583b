//! Resolves doubts: finds the newest whole record of a key whose newest record is not proven.
//!
//! A crash may leave the descriptor of a page whose bytes never reached the device. The causes: a
//! put that repeats an unproven page, a copy that reclaim was making, a failed write. The page that
//! the record was to replace may be acknowledged, and still lies at its old place. Only the bytes
//! can decide, so recovery reads the pages of such keys. The newest record whose bytes match
//! counts. A proven record counts without a read. Only keys that were in the store and were being
//! written again at the last crash are in doubt. A store that was closed in order has almost none.

use larder_core::core::NamespaceInit;
use larder_disk::mailbox::{ReadAt, read_all};
use larder_disk::{Disk, DiskError};
use larder_format::{PageChecksum, PageKey};

use super::found::Found;
use super::scan::Spot;

/// Most bytes of pages that are read at once.
const BATCH_BYTES: usize = 64 << 20;

/// The records of one key that no deletion kills, newest first, down to the first proven record.
/// Positions among all pages. At least two.
pub(super) struct Doubt {
    pub key: PageKey,
    pub candidates: Vec<usize>,
}

/// The record that counts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Settled {
    /// It is whole.
    Whole(usize),
    /// Its bytes cannot be read now.
    Unread(usize),
}

/// The outcome of a doubt.
#[derive(Default)]
pub(super) struct Outcome {
    /// The record that counts. `None` if all bytes are wrong.
    pub settled: Option<Settled>,
    /// The records whose bytes cannot be read now, newest first, each with the error.
    pub unread: Vec<(usize, DiskError)>,
}

/// The pages, their places, and the means to verify them.
pub(super) struct Payloads<'a, E> {
    pub disk: &'a dyn Disk,
    pub spots: &'a [Spot],
    pub namespaces: &'a [NamespaceInit],
    pub pages: &'a [Found<E>],
}

impl<E> Payloads<'_, E> {
    /// The record of each key that counts: the newest whole one (proven, or read and verified). If
    /// there is none, the newest whose bytes cannot be read: they may be right.
    pub(super) fn settle(&self, doubts: &[Doubt]) -> Vec<Outcome> {
        let mut whole: Vec<Option<usize>> = vec![None; doubts.len()];
        let mut unread: Vec<Vec<(usize, DiskError)>> = vec![Vec::new(); doubts.len()];
        let most = doubts.iter().map(|doubt| doubt.candidates.len()).max();
        for age in 0..most.unwrap_or(0) {
            let mut asked = Vec::new();
            for (at, doubt) in doubts.iter().enumerate() {
                match doubt.candidates.get(age) {
                    Some(&page) if whole[at].is_none() && self.pages[page].proven => {
                        whole[at] = Some(page);
                    }
                    Some(&page) if whole[at].is_none() => asked.push((at, page)),
                    _ => {}
                }
            }
            self.read(doubts, &asked, |at, page, sum| match sum {
                Ok(sum) if sum == self.pages[page].checksum => whole[at] = Some(page),
                Ok(_) => {}
                Err(error) => unread[at].push((page, error)),
            });
        }
        let outcomes = whole.into_iter().zip(unread);
        let outcomes = outcomes.map(|(whole, unread)| {
            let newest = unread.first().map(|(page, _)| Settled::Unread(*page));
            let settled = whole.map(Settled::Whole).or(newest);
            Outcome { settled, unread }
        });
        outcomes.collect()
    }

    /// Passes the checksum of each page's bytes to `found`, or the error of reading them.
    fn read(
        &self,
        doubts: &[Doubt],
        asked: &[(usize, usize)],
        mut found: impl FnMut(usize, usize, Result<u64, DiskError>),
    ) {
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
                found(at, page, checksum);
            }
            rest = later;
        }
    }

    /// The checksums of the bytes at the places of these pages.
    fn checksums(&self, doubts: &[Doubt], asked: &[(usize, usize)]) -> Vec<Result<u64, DiskError>> {
        let mut sums: Vec<Result<PageChecksum, DiskError>> = Vec::with_capacity(asked.len());
        let mut pieces: Vec<(usize, ReadAt)> = Vec::with_capacity(asked.len());
        for &(at, page) in asked {
            let found = &self.pages[page];
            let namespace = self.namespaces[usize::from(found.slot.0)].fingerprint;
            pieces.extend(pieces_of(self.place(found)).map(|piece| (sums.len(), piece)));
            sums.push(Ok(PageChecksum::new(namespace, &doubts[at].key)));
        }
        // More than one piece is a single large page: a record's size field must not size an
        // allocation.
        let at_once = if asked.len() > 1 { pieces.len() } else { 1 };
        for pieces in pieces.chunks(at_once.max(1)) {
            let reads: Vec<ReadAt> = pieces.iter().map(|(_, piece)| *piece).collect();
            for ((page, _), bytes) in pieces.iter().zip(read_all(self.disk, &reads)) {
                match (bytes, &mut sums[*page]) {
                    (Ok(bytes), Ok(sum)) => sum.blocks(&bytes),
                    (Err(error), sum) => *sum = Err(error),
                    (Ok(_), Err(_)) => {}
                }
            }
        }
        sums.into_iter()
            .map(|sum| sum.map(PageChecksum::finish))
            .collect()
    }

    fn place(&self, found: &Found<E>) -> ReadAt {
        let plain = self.namespaces[usize::from(found.slot.0)].page_blocks;
        let blocks = plain.saturating_sub(found.place.saved);
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
