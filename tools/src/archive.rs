//! Archive files: the structures of [`larder_format`]'s archives with the payloads between them,
//! written to and read from streams.
//!
//! Both directions hold one batch of pages in memory and need no seeking, so an archive can go
//! through a pipe. Structures and payloads are checked before they are returned. The first
//! difference from the written bytes ends the reading, with its place and the reason ([`Fault`]).
//!
//! This module does not know stores: `export` chooses the pages, `import` stores them.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};

use larder_engine::format::{
    ARCHIVED_PAGES_MAX, ArchiveHead, ArchiveId, ArchiveItem, ArchiveReader, ArchiveWriter,
    ArchivedNamespace, ArchivedPage, BLOCK_BYTES, Damage, Fingerprint, PageChecksum, PageKey,
};
use larder_remote::run::SEALS_MAGIC;

/// Bytes of payload collected before they are written, unless a single page has more.
const BATCH_BYTES: usize = 8 << 20;

/// Upper bound of an archive's bytes, for these numbers of namespaces, pages and payload bytes.
pub fn bytes_max(namespaces: usize, pages: u64, payload_bytes: u64) -> u64 {
    // A batch ends for one of three reasons: it has the maximum number of pages; the next page did
    // not fit, so with that page it would exceed the batch size; its namespace ends.
    let full = pages / ARCHIVED_PAGES_MAX as u64 + payload_bytes / BATCH_BYTES as u64 * 2;
    let structures = full + 2 * namespaces as u64 + 2;
    payload_bytes + structures * BLOCK_BYTES as u64
}

/// Writes an archive.
pub struct ArchiveSink<W> {
    out: W,
    writer: ArchiveWriter,
    /// Pages not written yet, and their payloads.
    pages: Vec<ArchivedPage>,
    payloads: Vec<u8>,
    written: u64,
}

impl<W: Write> ArchiveSink<W> {
    /// Begins an archive.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn begin(out: W, archive: ArchiveId, head: ArchiveHead) -> io::Result<Self> {
        let mut sink = ArchiveSink {
            out,
            writer: ArchiveWriter::new(archive),
            pages: Vec::with_capacity(ARCHIVED_PAGES_MAX),
            payloads: Vec::new(),
            written: 0,
        };
        sink.item(&ArchiveItem::Head(head))?;
        Ok(sink)
    }

    /// Names the namespace of the pages that follow.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn namespace(&mut self, namespace: ArchivedNamespace) -> io::Result<()> {
        self.write_batch()?;
        self.item(&ArchiveItem::Namespace(namespace))
    }

    /// Adds a page with its payload, padding included.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn page(&mut self, page: ArchivedPage, payload: &[u8]) -> io::Result<()> {
        let is_full = self.payloads.len() + payload.len() > BATCH_BYTES;
        if is_full || self.pages.len() == ARCHIVED_PAGES_MAX {
            self.write_batch()?;
        }
        self.pages.push(page);
        self.payloads.extend_from_slice(payload);
        Ok(())
    }

    /// Ends the archive. Returns its writer, and its length in bytes.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn end(mut self, left_out: u64) -> io::Result<(W, u64)> {
        self.write_batch()?;
        self.item(&ArchiveItem::End(self.writer.counts(left_out)))?;
        self.out.flush()?;
        Ok((self.out, self.written))
    }

    fn write_batch(&mut self) -> io::Result<()> {
        if self.pages.is_empty() {
            return Ok(());
        }
        let pages = std::mem::take(&mut self.pages);
        self.item(&ArchiveItem::Pages(pages))?;
        self.out.write_all(&self.payloads)?;
        self.written += self.payloads.len() as u64;
        self.payloads.clear();
        Ok(())
    }

    fn item(&mut self, item: &ArchiveItem) -> io::Result<()> {
        let block = self.writer.item(item).map_err(io::Error::other)?;
        self.written += block.len() as u64;
        self.out.write_all(&*block)
    }
}

/// The reason why the rest of an archive cannot be used.
#[derive(Debug)]
pub struct Fault {
    /// The place: bytes from the start.
    pub offset: u64,
    /// The fault at that place.
    pub reason: FaultReason,
}

/// A fault of an archive.
#[derive(Debug, thiserror::Error)]
pub enum FaultReason {
    /// A structure differs from the written one.
    #[error("a structure of the archive: {0}")]
    Structure(Damage),
    /// A payload differs from the written one.
    #[error(
        "the bytes of page {key} have the checksum {found:016x}, but {stored:016x} was written"
    )]
    Payload {
        /// The page.
        key: PageKey,
        /// The checksum of the bytes read.
        found: u64,
        /// The checksum that its archive states.
        stored: u64,
    },
    /// The archive ends early.
    #[error("it is cut off here: its end is missing")]
    CutOff,
    /// Bytes follow the end of the archive.
    #[error("something follows its end")]
    Surplus,
    /// It cannot be read.
    #[error("unreadable: {0}")]
    Unreadable(io::Error),
}

/// Reads an archive.
pub struct ArchiveSource<R> {
    input: R,
    reader: ArchiveReader,
    /// Bytes read or skipped so far.
    position: u64,
}

impl<R: Read> ArchiveSource<R> {
    /// Begins to read.
    pub fn new(input: R) -> Self {
        ArchiveSource {
            input,
            reader: ArchiveReader::new(),
            position: 0,
        }
    }

    /// The next structure, or `None` behind the end. The payloads of the structure before must have
    /// been read or skipped.
    ///
    /// # Errors
    /// [`Fault`]; nothing can be read after it.
    pub fn item(&mut self) -> Result<Option<ArchiveItem>, Fault> {
        debug_assert_eq!(self.position, self.reader.offset(), "payloads left unread");
        let offset = self.position;
        if self.reader.is_over() {
            return self.nothing_follows().map(|()| None);
        }
        let mut block = [0; BLOCK_BYTES];
        self.fill(&mut block)?;
        let item = self.reader.item(&block).map_err(|damage| Fault {
            offset,
            reason: FaultReason::Structure(damage),
        })?;
        Ok(Some(item))
    }

    /// Reads the payload of a page of a namespace and checks it.
    ///
    /// # Errors
    /// [`Fault`]; nothing can be read after it.
    pub fn payload(
        &mut self,
        namespace: Fingerprint,
        page: &ArchivedPage,
        payload: &mut [u8],
    ) -> Result<(), Fault> {
        let offset = self.position;
        self.fill(payload)?;
        let mut checksum = PageChecksum::new(namespace, &page.key);
        checksum.blocks(payload);
        let (found, stored) = (checksum.finish(), page.checksum);
        if found == stored {
            return Ok(());
        }
        let key = page.key;
        Err(Fault {
            offset,
            reason: FaultReason::Payload { key, found, stored },
        })
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < bytes.len() {
            match self.input.read(&mut bytes[done..]) {
                Ok(0) => return Err(self.fault(FaultReason::CutOff)),
                Ok(count) => {
                    done += count;
                    self.position += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.fault(FaultReason::Unreadable(error))),
            }
        }
        Ok(())
    }

    fn nothing_follows(&mut self) -> Result<(), Fault> {
        // Seals are for nodes that share a remote.
        let mut behind = Vec::new();
        let mut input = self.input.by_ref().take(SEALS_MAGIC.len() as u64);
        match input.read_to_end(&mut behind) {
            Ok(_) if behind.is_empty() => Ok(()),
            Ok(_) if behind == SEALS_MAGIC => match io::copy(&mut self.input, &mut io::sink()) {
                Ok(_) => Ok(()),
                Err(error) => Err(self.fault(FaultReason::Unreadable(error))),
            },
            Ok(_) => Err(self.fault(FaultReason::Surplus)),
            Err(error) => Err(self.fault(FaultReason::Unreadable(error))),
        }
    }

    /// A fault at the current position.
    pub fn fault(&self, reason: FaultReason) -> Fault {
        Fault {
            offset: self.position,
            reason,
        }
    }
}

impl ArchiveSource<File> {
    /// Skips the payloads up to the next structure without reading them.
    ///
    /// # Errors
    /// [`Fault`]; nothing can be read after it.
    pub fn skip_payloads(&mut self) -> Result<(), Fault> {
        let next = self.reader.offset();
        self.input
            .seek(SeekFrom::Start(next))
            .map_err(|error| self.fault(FaultReason::Unreadable(error)))?;
        self.position = next;
        Ok(())
    }
}

/// The head of an archive, which must come first. The source continues behind it.
///
/// # Errors
/// [`Fault`].
pub fn read_head<R: Read>(source: &mut ArchiveSource<R>) -> Result<ArchiveHead, Fault> {
    match source.item()? {
        Some(ArchiveItem::Head(head)) => Ok(head),
        // The reader returns no other structure first.
        _ => Err(source.fault(FaultReason::CutOff)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use larder_engine::format::StoreId;

    use super::*;
    use crate::workload::{self, chain};

    /// Pages of one block, and of two with padding in both.
    const SHAPES: [&[u32]; 2] = [&[4096], &[100, 4000]];

    fn namespace(shape: usize) -> ArchivedNamespace {
        let shape = larder_engine::format::PageShape::new(SHAPES[shape]).unwrap();
        ArchivedNamespace::Whole(workload::namespace("archive", 1, shape).unwrap())
    }

    fn payload(shape: usize, key: &PageKey) -> Vec<u8> {
        let part = |&bytes: &u32| {
            let mut part = vec![key.as_bytes()[0]; bytes as usize];
            part.resize(part.len().next_multiple_of(BLOCK_BYTES), 0);
            part
        };
        SHAPES[shape].iter().flat_map(part).collect()
    }

    /// An archive with a few pages in each of two namespaces.
    fn sample() -> Vec<u8> {
        let keys = chain(&[1, 2, 3]);
        let head = ArchiveHead {
            store: StoreId::from_bytes([7; 16]),
            created_unix_s: 1,
            pages: 6,
            blocks: 9,
        };
        let mut out = Vec::new();
        let id = ArchiveId::from_bytes([9; 16]);
        let mut sink = ArchiveSink::begin(&mut out, id, head).unwrap();
        for shape in 0..SHAPES.len() {
            let namespace = namespace(shape);
            let fingerprint = namespace.fingerprint();
            sink.namespace(namespace).unwrap();
            for (key, depth) in keys.iter().zip(0..) {
                let payload = payload(shape, key);
                let mut checksum = PageChecksum::new(fingerprint, key);
                checksum.blocks(&payload);
                let page = ArchivedPage {
                    key: *key,
                    parent: None,
                    depth,
                    checksum: checksum.finish(),
                    saved: 0,
                };
                sink.page(page, &payload).unwrap();
            }
        }
        let (_, written) = sink.end(0).unwrap();
        assert_eq!(written, out.len() as u64);
        out
    }

    /// Reads an archive and verifies its pages. Returns the number of pages, and the end of the
    /// reading.
    fn read(archive: &[u8]) -> (usize, Result<(), Fault>) {
        let mut source = ArchiveSource::new(archive);
        let mut pages = 0;
        let mut read = || {
            let mut named = None;
            while let Some(item) = source.item()? {
                match item {
                    ArchiveItem::Namespace(namespace) => named = Some(namespace),
                    ArchiveItem::Pages(list) => {
                        let namespace = named.clone().unwrap();
                        let shape = usize::from(namespace.page_blocks() == 2);
                        for page in list {
                            let expected = payload(shape, &page.key);
                            let mut found = vec![0xee; expected.len()];
                            source.payload(namespace.fingerprint(), &page, &mut found)?;
                            assert!(found == expected);
                            pages += 1;
                        }
                    }
                    ArchiveItem::Head(_) | ArchiveItem::End(_) => {}
                }
            }
            Ok(())
        };
        let ended = read();
        (pages, ended)
    }

    #[test]
    fn what_was_written_is_read() {
        let (pages, ended) = read(&sample());
        assert_eq!(pages, 6);
        ended.unwrap();
    }

    #[test]
    fn every_flipped_byte_ends_the_reading_in_its_block_or_page() {
        let whole = sample();
        for at in 0..whole.len() {
            let mut archive = whole.clone();
            archive[at] ^= 0x04;
            let fault = read(&archive).1.unwrap_err();
            let place = usize::try_from(fault.offset).unwrap();
            assert!(
                place <= at && at < place + 2 * BLOCK_BYTES,
                "{at}: {fault:?}"
            );
        }
    }

    #[test]
    fn every_cut_is_found_where_it_is() {
        let whole = sample();
        for cut in 0..whole.len() {
            let fault = read(&whole[..cut]).1.unwrap_err();
            assert_eq!(fault.offset, cut as u64);
            assert!(matches!(fault.reason, FaultReason::CutOff), "{fault:?}");
        }
    }

    #[test]
    fn whatever_follows_the_end_is_found() {
        let mut archive = sample();
        let end = archive.len() as u64;
        archive.push(0);
        let fault = read(&archive).1.unwrap_err();
        assert_eq!(fault.offset, end);
        assert!(matches!(fault.reason, FaultReason::Surplus), "{fault:?}");
    }

    #[test]
    fn no_archive_takes_more_than_was_foretold() {
        let archive = sample().len() as u64;
        assert!(archive <= bytes_max(2, 6, 9 * BLOCK_BYTES as u64));
    }
}
