//! Serves requests from a store with the use pattern of a server: the longest stored prefix is
//! read, the rest put, every byte checked.
//!
//! Shared by `replay` and `demo`. Pages are made and compared between the store's calls. Only these
//! calls are timed. A page that a lookup confirmed and a read missed ends the prefix there. It and
//! the following pages are put again.

use std::ops::{Add, Range};

use larder_engine::{NamespaceId, PageStore, PutStatus};
use larder_format::{PageKey, PageShape};
use larder_store::fit::page_bytes_on_disk;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::usage::Meter;
use crate::workload::{self, Content, Link, PageBuffers};

/// Most bytes of pages in one call; longer chains take several.
const CALL_BYTES: u64 = 32 << 20;

/// The outcome for requests and pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Requests served.
    pub requests: u64,
    /// Pages of their inputs, a last partial one included.
    pub pages_requested: u64,
    /// Pages of the longest stored prefixes that were read.
    pub pages_hit: u64,
    /// Pages stored.
    pub pages_put: u64,
    /// Pages that were stored already when they were put.
    pub duplicate_pages: u64,
    /// Pages whose bytes differ from the content that their key defines. Must be 0.
    pub wrong_pages: u64,
    /// Pages that a lookup confirmed and a read missed, for any reason.
    pub lapsed_pages: u64,
    /// Pages that the store did not admit.
    pub refused_pages: u64,
    /// Pages whose write failed.
    pub failed_pages: u64,
}

impl Add for Counts {
    type Output = Counts;

    fn add(self, other: Counts) -> Counts {
        Counts {
            requests: self.requests + other.requests,
            pages_requested: self.pages_requested + other.pages_requested,
            pages_hit: self.pages_hit + other.pages_hit,
            pages_put: self.pages_put + other.pages_put,
            duplicate_pages: self.duplicate_pages + other.duplicate_pages,
            wrong_pages: self.wrong_pages + other.wrong_pages,
            lapsed_pages: self.lapsed_pages + other.lapsed_pages,
            refused_pages: self.refused_pages + other.refused_pages,
            failed_pages: self.failed_pages + other.failed_pages,
        }
    }
}

/// Receives the store's acknowledgements as soon as they come.
pub trait Witness {
    /// These pages were read.
    ///
    /// # Errors
    /// Ends the session.
    fn hit(&mut self, keys: &[PageKey]) -> Result<(), Failure>;

    /// These pages were acknowledged.
    ///
    /// # Errors
    /// Ends the session.
    fn acknowledged(&mut self, keys: &[PageKey]) -> Result<(), Failure>;
}

/// The result of reading pages back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Read and right.
    pub right: u64,
    /// Read and wrong.
    pub wrong: u64,
    /// Not read.
    pub missing: u64,
}

/// A session on one store in one namespace.
pub struct Session<'a> {
    store: &'a dyn PageStore,
    namespace: NamespaceId,
    buffers: PageBuffers,
    /// Time and CPU of the store's gets.
    pub gets: Meter,
    /// Time and CPU of the store's puts.
    pub puts: Meter,
    /// The outcome for the pages so far.
    pub counts: Counts,
    /// The store's status of the first page that it did not store.
    pub unstored: Option<PutStatus>,
}

impl<'a> Session<'a> {
    /// A session with pages of `shape`.
    ///
    /// # Errors
    /// When there is no memory for its buffers.
    pub fn new(
        store: &'a dyn PageStore,
        namespace: NamespaceId,
        shape: &PageShape,
    ) -> Result<Self, Failure> {
        let slots = (CALL_BYTES / page_bytes_on_disk(shape)).max(1);
        let mut buffers = PageBuffers::new(shape, usize::try_from(slots).unwrap_or(usize::MAX))?;
        buffers.register(store);
        Ok(Session {
            store,
            namespace,
            buffers,
            gets: Meter::default(),
            puts: Meter::default(),
            counts: Counts::default(),
            unstored: None,
        })
    }

    /// This session, for pages with this content.
    #[must_use]
    pub fn with(mut self, content: Content) -> Self {
        self.buffers = self.buffers.with(content);
        self
    }

    /// Serves one request, whose pages have these keys.
    ///
    /// # Errors
    /// The witness's.
    pub fn serve(&mut self, keys: &[PageKey], witness: &mut dyn Witness) -> Result<(), Failure> {
        self.serve_part(keys, 0..keys.len(), keys.len(), witness)
    }

    /// Serves one request that asks for some pages of a chain alone. From the first of them on, the
    /// first `stored` pages of the chain are stored.
    ///
    /// # Errors
    /// The witness's.
    pub fn serve_part(
        &mut self,
        keys: &[PageKey],
        asked: Range<usize>,
        stored: usize,
        witness: &mut dyn Witness,
    ) -> Result<(), Failure> {
        let pages = &keys[asked.clone()];
        let found = self.store.longest_prefix(self.namespace, pages);
        let hit = self.read_prefix(&pages[..found]);
        witness.hit(&pages[..hit])?;
        let links = workload::links(keys);
        let new = links.get(asked.start + hit..stored).unwrap_or_default();
        for batch in new.chunks(self.buffers.slots()) {
            let acknowledged = self.put(batch);
            witness.acknowledged(&acknowledged)?;
        }
        self.counts.requests += u64::from(!pages.is_empty());
        self.counts.pages_requested += pages.len() as u64;
        self.counts.pages_hit += hit as u64;
        Ok(())
    }

    /// Reads a confirmed prefix. Returns the number of pages up to the first miss.
    fn read_prefix(&mut self, keys: &[PageKey]) -> usize {
        let mut hit = 0;
        for batch in keys.chunks(self.buffers.slots()) {
            let statuses = self.buffers.get(
                self.store,
                self.namespace,
                batch,
                batch.len(),
                &mut self.gets,
            );
            for (slot, (key, status)) in batch.iter().zip(&statuses).enumerate() {
                self.counts.lapsed_pages += u64::from(!status.is_hit());
                if status.is_hit() && !self.buffers.holds(slot, key) {
                    self.counts.wrong_pages += 1;
                }
            }
            let came = statuses.iter().take_while(|status| status.is_hit()).count();
            hit += came;
            if came < batch.len() {
                break;
            }
        }
        hit
    }

    /// Puts a batch. Returns the pages that the store now has.
    fn put(&mut self, batch: &[Link]) -> Vec<PageKey> {
        let statuses = self.buffers.put(
            self.store,
            self.namespace,
            batch,
            batch.len(),
            &mut self.puts,
        );
        for status in &statuses {
            match status {
                PutStatus::Stored => self.counts.pages_put += 1,
                PutStatus::Duplicate => self.counts.duplicate_pages += 1,
                PutStatus::Refused(_) => self.counts.refused_pages += 1,
                PutStatus::Failed(_) => self.counts.failed_pages += 1,
            }
        }
        let is_unstored = |status: &&PutStatus| !status.is_present();
        self.unstored = self.unstored.or(statuses.iter().find(is_unstored).copied());
        let present = batch
            .iter()
            .zip(statuses)
            .filter(|(_, status)| status.is_present());
        present.map(|(link, _)| link.key).collect()
    }

    /// Reads pages back and compares them. Not part of the session's figures.
    pub fn check(&mut self, keys: &[PageKey]) -> Checked {
        let mut checked = Checked::default();
        for batch in keys.chunks(self.buffers.slots()) {
            let statuses = self.buffers.get(
                self.store,
                self.namespace,
                batch,
                batch.len(),
                &mut Meter::default(),
            );
            for (slot, (key, status)) in batch.iter().zip(statuses).enumerate() {
                let count = match (status.is_hit(), self.buffers.holds(slot, key)) {
                    (false, _) => &mut checked.missing,
                    (true, true) => &mut checked.right,
                    (true, false) => &mut checked.wrong,
                };
                *count += 1;
            }
        }
        checked
    }
}
