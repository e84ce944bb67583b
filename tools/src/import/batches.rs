//! Reads an archive ahead of the store: batches of checked pages, in memory that is reused.

use std::io::Read;
use std::sync::mpsc::{Receiver, SyncSender};

use larder_engine::AlignedBuf;
use larder_engine::format::{ArchiveItem, ArchivedNamespace, ArchivedPage, BLOCK_BYTES};

use crate::archive::{ArchiveSource, Fault, FaultReason};

/// Bytes of pages stored with one call, unless a single page has more.
const BATCH_BYTES: usize = 8 << 20;

/// A message of the reading thread.
pub enum Step {
    Namespace(ArchivedNamespace),
    /// Pages of the last named namespace, with the payload of each at the begin of its share of
    /// the memory, which has the bytes of a plain page.
    Pages(Vec<ArchivedPage>, AlignedBuf),
}

/// Reads an archive batch by batch.
pub struct Batches<R> {
    source: ArchiveSource<R>,
    out: SyncSender<Step>,
    /// Memory of stored batches, for reuse.
    spares: Receiver<AlignedBuf>,
}

impl<R: Read> Batches<R> {
    /// `spares` returns the memory of stored batches.
    pub fn new(
        source: ArchiveSource<R>,
        out: SyncSender<Step>,
        spares: Receiver<AlignedBuf>,
    ) -> Self {
        Batches {
            source,
            out,
            spares,
        }
    }

    /// Reads to the end, or until the receiver is closed. Returns the number of pages that the
    /// export left out.
    ///
    /// # Errors
    /// At the first fault of the archive. The batches before it are good.
    pub fn read(mut self) -> Result<u64, Fault> {
        let (mut named, mut page_bytes, mut left_out) = (None, 0, 0);
        while let Some(item) = self.source.item()? {
            match item {
                ArchiveItem::Namespace(namespace) => {
                    page_bytes = namespace.page_blocks() as usize * BLOCK_BYTES;
                    named = Some(namespace.clone());
                    if self.out.send(Step::Namespace(namespace)).is_err() {
                        break;
                    }
                }
                ArchiveItem::Pages(pages) => {
                    let Some(namespace) = named.as_ref() else {
                        break;
                    };
                    for pages in pages.chunks((BATCH_BYTES / page_bytes).max(1)) {
                        if !self.batch(namespace, pages, page_bytes)? {
                            return Ok(left_out);
                        }
                    }
                }
                ArchiveItem::End(counts) => left_out = counts.left_out,
                ArchiveItem::Head(_) => {}
            }
        }
        Ok(left_out)
    }

    /// Reads some pages and sends the good ones. Returns false when the receiver is closed.
    fn batch(
        &mut self,
        namespace: &ArchivedNamespace,
        pages: &[ArchivedPage],
        page_bytes: usize,
    ) -> Result<bool, Fault> {
        let mut memory = self.memory(pages.len() * page_bytes)?;
        let payloads = memory.chunks_exact_mut(page_bytes).zip(pages);
        let mut good = 0;
        let mut read = Ok(());
        for (payload, page) in payloads {
            let stored = page_bytes - page.saved as usize * BLOCK_BYTES;
            read = self.source.payload(namespace, page, &mut payload[..stored]);
            if read.is_err() {
                break;
            }
            good += 1;
        }
        let step = Step::Pages(pages[..good].to_vec(), memory);
        let listens = self.out.send(step).is_ok();
        read.map(|()| listens)
    }

    fn memory(&self, bytes: usize) -> Result<AlignedBuf, Fault> {
        let spare = self.spares.try_iter().find(|spare| spare.len() >= bytes);
        let memory = spare.map_or_else(|| AlignedBuf::zeroed(bytes.max(BATCH_BYTES)), Ok);
        memory.map_err(|error| self.source.fault(FaultReason::Unreadable(error)))
    }
}
