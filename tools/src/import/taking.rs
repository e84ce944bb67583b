//! Stores the batches of an archive, page by page as a server puts them.

use std::io::IoSlice;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender};

use indicatif::ProgressBar;
use larder_engine::AlignedBuf;
use larder_engine::format::{ArchivedNamespace, ArchivedPage, BLOCK_BYTES, PageShape};
use larder_engine::{NamespaceId, PageStore, PutPage, PutStatus, Refusal, Store};
use larder_store::encoder::decode;
use larder_store::inventory::Inventory;

use super::batches::Step;
use super::{ImportReport, Why};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::open::patient;

/// The reason why pages of a namespace whose record was lost cannot be taken.
const UNKNOWN_NAMESPACE: Why = Why {
    kind: "unknown_namespace",
    reason: "of a namespace whose record the exported store had lost, and which this store does \
        not know: let the server that \
             uses it open this store once, then import again",
};

/// The reason why the rest of an archive is not stored that would evict other pages.
const SPARES_OTHERS: Why = Why {
    kind: "no_space",
    reason: "no room without evicting other pages: enlarge the store with `larder create --grow`, \
        or use --force, and import again",
};

/// The reason why a page that its archive holds encoded is not stored.
const UNDECODABLE: Why = Why {
    kind: "undecodable",
    reason: "not what the codec makes of a page: it was encoded wrongly, or by a later release",
};

/// The storing half of an import.
pub(super) struct Taking<'a> {
    pub(super) store: &'a Store,
    /// Whether no page may be evicted for those of the archive.
    pub(super) spares: bool,
    /// When the archive was made.
    pub(super) made_unix_s: u64,
    pub(super) interrupt: &'a Interrupt,
}

impl Taking<'_> {
    /// Stores the batches of the reading thread.
    pub(super) fn take(
        &self,
        steps: &Receiver<Step>,
        spare: &Sender<AlignedBuf>,
        report: &mut ImportReport,
        bar: &ProgressBar,
    ) -> Result<(), Failure> {
        let (mut home, mut is_full) = (None, false);
        for step in steps {
            if self.interrupt.is_raised() {
                report.interrupted = true;
                return Ok(());
            }
            match step {
                Step::Namespace(namespace) => {
                    home = Home::find(self.store, &namespace, self.made_unix_s)?;
                    is_full = false;
                }
                Step::Pages(pages, mut memory) => {
                    // Others may have taken the room since it was checked, and a pipe tells neither
                    // the sizes of its pages nor whether they are in the store. After the first
                    // refused page, later ones of its chain would be stored in vain.
                    let has_room = |home: &Home| !is_full && home.has_room(self.store, &pages);
                    match &home {
                        Some(home) if self.spares && !has_room(home) => {
                            is_full = true;
                            home.refuse(self.store, &pages, report);
                        }
                        Some(home) => bar.inc(home.take(self.store, &pages, &mut memory, report)),
                        None => report.refuse(UNKNOWN_NAMESPACE, pages.len() as u64),
                    }
                    // The reader may have ended already.
                    let _ = spare.send(memory);
                }
            }
        }
        Ok(())
    }
}

/// The namespace of the pages.
struct Home {
    id: NamespaceId,
    shape: PageShape,
    made_unix_s: u64,
}

impl Home {
    /// `None` for an unnamed namespace that the store does not know either.
    fn find(
        store: &Store,
        archived: &ArchivedNamespace,
        made_unix_s: u64,
    ) -> Result<Option<Home>, Failure> {
        let namespace = match archived {
            ArchivedNamespace::Whole(namespace) => Some(namespace.clone()),
            ArchivedNamespace::Unnamed {
                fingerprint,
                page_blocks,
            } => store.records()?.into_iter().find(|held| {
                let names = [held.fingerprint(), held.plain().fingerprint()];
                names.contains(fingerprint) && held.shape().page_blocks() == *page_blocks
            }),
        };
        let Some(namespace) = namespace else {
            return Ok(None);
        };
        Ok(Some(Home {
            id: store.namespace(&namespace)?,
            shape: *namespace.shape(),
            made_unix_s,
        }))
    }

    /// Whether pages can be stored without an eviction. Pages that fit no segment need no room:
    /// they are refused.
    fn has_room(&self, store: &Store, pages: &[ArchivedPage]) -> bool {
        let (stats, page_bytes) = (store.stats(), self.page_bytes() as u64);
        stats.usable_pages(page_bytes) == 0
            || self.absent(store, pages) <= stats.free_pages(page_bytes)
    }

    /// Counts pages for which there is no room.
    fn refuse(&self, store: &Store, pages: &[ArchivedPage], report: &mut ImportReport) {
        let absent = self.absent(store, pages);
        report.duplicate_pages += pages.len() as u64 - absent;
        if absent > 0 {
            report.refuse(SPARES_OTHERS, absent);
        }
    }

    fn absent(&self, store: &Store, pages: &[ArchivedPage]) -> u64 {
        let keys: Vec<_> = pages.iter().map(|page| page.key).collect();
        let there = store.contains(self.id, &keys);
        there.into_iter().filter(|there| !there).count() as u64
    }

    fn page_bytes(&self) -> usize {
        self.shape.page_blocks() as usize * BLOCK_BYTES
    }

    /// Stores pages, each with its payload at the begin of its share of `memory`. Returns their
    /// bytes.
    fn take(
        &self,
        store: &Store,
        pages: &[ArchivedPage],
        memory: &mut [u8],
        report: &mut ImportReport,
    ) -> u64 {
        let page_bytes = self.page_bytes();
        let pages = &self.decoded(pages, memory, report)[..];
        let statuses = if report.dry_run {
            let keys: Vec<_> = pages.iter().map(|page| page.key).collect();
            let there = store.contains(self.id, &keys);
            let fits = store.stats().usable_pages(page_bytes as u64) > 0;
            there
                .into_iter()
                .map(|there| would_be(there, fits))
                .collect()
        } else {
            self.put(store, pages, memory, page_bytes)
        };
        for status in statuses {
            report.note(status, page_bytes as u64);
        }
        (pages.len() * page_bytes) as u64
    }

    /// Makes the pages in `memory` plain and contiguous. Returns them, without pages that cannot be
    /// decoded.
    fn decoded(
        &self,
        pages: &[ArchivedPage],
        memory: &mut [u8],
        report: &mut ImportReport,
    ) -> Vec<ArchivedPage> {
        let page_bytes = self.page_bytes();
        let mut plain = Vec::with_capacity(pages.len());
        for (at, page) in pages.iter().enumerate() {
            let share = at * page_bytes..(at + 1) * page_bytes;
            if page.saved > 0 {
                let stored = page_bytes - page.saved as usize * BLOCK_BYTES;
                let stream = memory[share.clone()][..stored].to_vec();
                if decode(&self.shape, &stream, &mut memory[share.clone()]).is_err() {
                    report.refuse(UNDECODABLE, 1);
                    continue;
                }
            }
            memory.copy_within(share, plain.len() * page_bytes);
            plain.push(*page);
        }
        plain
    }

    fn put(
        &self,
        store: &Store,
        pages: &[ArchivedPage],
        payloads: &[u8],
        page_bytes: usize,
    ) -> Vec<PutStatus> {
        let payloads = payloads.chunks_exact(page_bytes).take(pages.len());
        let parts: Vec<IoSlice<'_>> = payloads
            .flat_map(|payload| (0..self.shape.parts()).map(move |part| (payload, part)))
            .map(|(payload, part)| IoSlice::new(&payload[self.part_range(part)]))
            .collect();
        let pages: Vec<PutPage<'_>> = pages
            .iter()
            .zip(parts.chunks_exact(self.shape.parts()))
            .map(|(page, parts)| PutPage {
                key: page.key,
                parent: page.parent.map(|parent| parent.padded()),
                depth: page.depth,
                parts,
            })
            .collect();
        store.put(self.id, &pages, patient().made_at(self.made_unix_s))
    }

    /// The range of a part in its payload.
    fn part_range(&self, part: usize) -> Range<usize> {
        let start = usize::try_from(self.shape.part_offset(part)).unwrap_or(usize::MAX);
        start..start.saturating_add(self.shape.part_bytes(part) as usize)
    }
}

/// The expected status of a put of a page, from a lookup alone.
fn would_be(there: bool, fits: bool) -> PutStatus {
    match (there, fits) {
        (true, _) => PutStatus::Duplicate,
        (false, true) => PutStatus::Stored,
        (false, false) => PutStatus::Refused(Refusal::TooLarge),
    }
}
