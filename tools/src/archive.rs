//! Archive files: the structures of [`larder_format`]'s archives with the payloads between them,
//! written to and read from streams.
//!
//! Both directions hold one batch of pages in memory and need no seeking, so an archive can go
//! through a pipe. Structures and payloads are checked before they are returned. The first
//! difference from the written bytes ends the reading, with its place and the reason ([`Fault`]).
//!
//! An encrypted archive is written and read with the key that wraps its own. A change by a writer
//! without the key ends the reading, too, and is no damage.
//!
//! This module does not know stores: `export` chooses the pages, `import` stores them.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};

use larder_base::system::processes::fill_random;
use larder_engine::format::{
    ARCHIVED_PAGES_MAX, ArchiveHead, ArchiveId, ArchiveItem, ArchiveReader, ArchiveWriter,
    ArchivedNamespace, ArchivedPage, BLOCK_BYTES, Damage, PageChecksum, PageKey,
};
use larder_format::{SEALED_PAGES_MAX, WrapId};
use larder_seal::{ArchiveKey, OpenError, PageName, Salts, VaultError, WrappingKey};

/// Bytes of payload collected before they are written, unless a single page has more.
const BATCH_BYTES: usize = 8 << 20;

/// Upper bound of an archive's bytes, for these numbers of namespaces, pages and payload bytes.
pub fn bytes_max(namespaces: usize, pages: u64, payload_bytes: u64) -> u64 {
    // A batch ends for one of three reasons: it has the maximum number of pages; the next page did
    // not fit, so with that page it would exceed the batch size; its namespace ends.
    let full = pages / SEALED_PAGES_MAX as u64 + payload_bytes / BATCH_BYTES as u64 * 2;
    let structures = full + 2 * namespaces as u64 + 2;
    payload_bytes + structures * BLOCK_BYTES as u64
}

/// Writes an archive.
pub struct ArchiveSink<W> {
    out: W,
    writer: ArchiveWriter,
    /// Of an encrypted archive.
    key: Option<ArchiveKey>,
    namespace: Option<ArchivedNamespace>,
    /// Pages not written yet, and their payloads.
    pages: Vec<ArchivedPage>,
    payloads: Vec<u8>,
    written: u64,
}

impl<W: Write> ArchiveSink<W> {
    /// Begins an archive. It is encrypted if there is a key to wrap its own.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn begin(
        out: W,
        archive: ArchiveId,
        head: ArchiveHead,
        wrapping: Option<&WrappingKey>,
    ) -> io::Result<Self> {
        let mut head = head;
        let key = match wrapping {
            None => None,
            Some(wrapping) => {
                let key = ArchiveKey::draw(wrapping, &mut fill_random).map_err(io::Error::other)?;
                let wrap = key.wrap(wrapping, &mut fill_random, &head.named(archive));
                head.wrap = Some(wrap.map_err(io::Error::other)?);
                Some(key)
            }
        };
        let mut sink = ArchiveSink {
            out,
            writer: ArchiveWriter::new(archive),
            key,
            namespace: None,
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
        let namespace = match namespace {
            ArchivedNamespace::Whole(record) => ArchivedNamespace::Whole(record.plain()),
            unnamed @ ArchivedNamespace::Unnamed { .. } => unnamed,
        };
        self.namespace = Some(namespace.clone());
        self.item(&ArchiveItem::Namespace(namespace))
    }

    /// Adds a page with its clear payload, padding included.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn page(&mut self, page: ArchivedPage, payload: &[u8]) -> io::Result<()> {
        let is_full = self.payloads.len() + payload.len() > BATCH_BYTES;
        let pages_max = match self.key {
            None => ARCHIVED_PAGES_MAX,
            Some(_) => SEALED_PAGES_MAX,
        };
        if is_full || self.pages.len() == pages_max {
            self.write_batch()?;
        }
        let start = self.payloads.len();
        self.payloads.extend_from_slice(payload);
        let mut page = page;
        if let Some((key, namespace)) = self.key.as_ref().zip(self.namespace.as_ref()) {
            let payload = &mut self.payloads[start..];
            let mut checksum = PageChecksum::new(namespace.fingerprint(), &page.key);
            let sealed = key.payloads().seal(
                &mut Salts::of(&mut fill_random, 1),
                &name_of(namespace, &page, payload),
                payload,
                |stored| checksum.blocks(stored),
            );
            page.seal = Some(sealed.map_err(io::Error::other)?);
            page.checksum = checksum.finish();
        }
        self.pages.push(page);
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
        let mut block = self.writer.item(item).map_err(io::Error::other)?;
        if let Some(key) = self
            .key
            .as_ref()
            .filter(|_| !matches!(item, ArchiveItem::Head(_)))
        {
            let seal = |named: &[u8], body: &mut [u8]| key.seal(&mut fill_random, named, body);
            ArchiveWriter::seal(&mut block, seal).map_err(io::Error::other)?;
        }
        self.written += block.len() as u64;
        self.out.write_all(&*block)
    }
}

/// What the tag of a payload covers besides it.
fn name_of(namespace: &ArchivedNamespace, page: &ArchivedPage, payload: &[u8]) -> PageName {
    PageName {
        namespace: namespace.fingerprint(),
        key: page.key,
        blocks: namespace.page_blocks(),
        stored: u32::try_from(payload.len() / BLOCK_BYTES).unwrap_or(u32::MAX),
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
    /// The payload is the written one, and does not open with the key of the archive.
    #[error("page {0} does not open with the key of the archive: another writer changed it")]
    Sealed(PageKey),
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

impl Fault {
    /// Whether a writer without the key changed the archive, and nothing is damaged.
    pub fn is_forged(&self) -> bool {
        matches!(
            self.reason,
            FaultReason::Structure(Damage::Sealed | Damage::Disowned) | FaultReason::Sealed(_)
        )
    }
}

/// Why an encrypted archive is not read.
#[derive(Debug, thiserror::Error)]
pub enum Locked {
    /// No key was given.
    #[error("is encrypted for the key {0}, and no key is given")]
    NoKey(WrapId),
    /// Another key was given.
    #[error("is encrypted for the key {wanted}, and the key {given} is given")]
    OtherKey {
        /// The key of the archive.
        wanted: WrapId,
        /// The key that was given.
        given: WrapId,
    },
    /// The head does not open with its key.
    #[error("its head does not open with its key: a writer without the key changed it")]
    Forged,
    /// The key cannot be used.
    #[error(transparent)]
    Vault(VaultError),
}

/// Reads an archive.
pub struct ArchiveSource<R> {
    input: R,
    reader: ArchiveReader,
    /// Of an encrypted archive.
    key: Option<ArchiveKey>,
    /// Bytes read or skipped so far.
    position: u64,
}

impl<R: Read> ArchiveSource<R> {
    /// Begins to read.
    pub fn new(input: R) -> Self {
        ArchiveSource {
            input,
            reader: ArchiveReader::new(),
            key: None,
            position: 0,
        }
    }

    /// Takes the key of an encrypted archive, behind its head.
    ///
    /// # Errors
    /// See [`Locked`]. Nothing can be read then.
    pub fn unlock(
        &mut self,
        head: &ArchiveHead,
        wrapping: Option<&WrappingKey>,
    ) -> Result<(), Locked> {
        let (Some(wrap), Some(archive)) = (&head.wrap, self.reader.archive()) else {
            return Ok(());
        };
        let wrapping = wrapping.ok_or(Locked::NoKey(wrap.id))?;
        let (wanted, given) = (wrap.id, wrapping.id());
        if wanted != given {
            return Err(Locked::OtherKey { wanted, given });
        }
        let key = ArchiveKey::unwrap(wrapping, wrap, &head.named(archive));
        self.key = Some(key.map_err(|error| match error {
            OpenError::Tag => Locked::Forged,
            OpenError::Vault(error) => Locked::Vault(error),
        })?);
        Ok(())
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
        let item = match &self.key {
            None => self.reader.item(&block),
            Some(key) => self.reader.sealed_item(&block, |named, body, seal| {
                key.open(seal, named, body).is_ok()
            }),
        };
        let reason = FaultReason::Structure;
        let item = item.map_err(|damage| Fault {
            offset,
            reason: reason(damage),
        })?;
        Ok(Some(item))
    }

    /// Reads the payload of a page of a namespace, checks it, and decrypts it.
    ///
    /// # Errors
    /// [`Fault`]; nothing can be read after it.
    pub fn payload(
        &mut self,
        namespace: &ArchivedNamespace,
        page: &ArchivedPage,
        payload: &mut [u8],
    ) -> Result<(), Fault> {
        let offset = self.position;
        self.fill(payload)?;
        let mut checksum = PageChecksum::new(namespace.fingerprint(), &page.key);
        checksum.blocks(payload);
        let (found, stored) = (checksum.finish(), page.checksum);
        let key = page.key;
        if found != stored {
            let reason = FaultReason::Payload { key, found, stored };
            return Err(Fault { offset, reason });
        }
        let Some((keys, seal)) = self.key.as_ref().zip(page.seal.as_ref()) else {
            return Ok(());
        };
        let name = name_of(namespace, page, payload);
        let opened = keys.payloads().open(&name, seal, &mut [payload]);
        opened.map_err(|_| Fault {
            offset,
            reason: FaultReason::Sealed(key),
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
        let mut behind = Vec::new();
        match self.input.by_ref().take(1).read_to_end(&mut behind) {
            Ok(0) => Ok(()),
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
    use larder_seal::Vault;

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

    fn wrapping(byte: u8) -> WrappingKey {
        WrappingKey::new(&Vault::new(), &[byte; 32]).unwrap()
    }

    /// An archive with a few pages in each of two namespaces.
    fn sample(wrapping: Option<&WrappingKey>) -> Vec<u8> {
        let keys = chain(&[1, 2, 3]);
        let head = ArchiveHead {
            store: StoreId::from_bytes([7; 16]),
            created_unix_s: 1,
            pages: 6,
            blocks: 9,
            wrap: None,
        };
        let mut out = Vec::new();
        let id = ArchiveId::from_bytes([9; 16]);
        let mut sink = ArchiveSink::begin(&mut out, id, head, wrapping).unwrap();
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
                    seal: None,
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
        read_with(archive, None)
    }

    /// The same with a key. Panics for a head that does not open.
    fn read_with(archive: &[u8], key: Option<&WrappingKey>) -> (usize, Result<(), Fault>) {
        let mut source = ArchiveSource::new(archive);
        let mut pages = 0;
        let mut read = || {
            let mut named = None;
            let head = read_head(&mut source)?;
            source.unlock(&head, key).unwrap();
            while let Some(item) = source.item()? {
                match item {
                    ArchiveItem::Namespace(namespace) => named = Some(namespace),
                    ArchiveItem::Pages(list) => {
                        let namespace = named.clone().unwrap();
                        let shape = usize::from(namespace.page_blocks() == 2);
                        for page in list {
                            let expected = payload(shape, &page.key);
                            let mut found = vec![0xee; expected.len()];
                            source.payload(&namespace, &page, &mut found)?;
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
        let (pages, ended) = read(&sample(None));
        assert_eq!(pages, 6);
        ended.unwrap();
    }

    #[test]
    fn every_flipped_byte_ends_the_reading_in_its_block_or_page() {
        let whole = sample(None);
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
        let whole = sample(None);
        for cut in 0..whole.len() {
            let fault = read(&whole[..cut]).1.unwrap_err();
            assert_eq!(fault.offset, cut as u64);
            assert!(matches!(fault.reason, FaultReason::CutOff), "{fault:?}");
        }
    }

    #[test]
    fn whatever_follows_the_end_is_found() {
        let mut archive = sample(None);
        let end = archive.len() as u64;
        archive.push(0);
        let fault = read(&archive).1.unwrap_err();
        assert_eq!(fault.offset, end);
        assert!(matches!(fault.reason, FaultReason::Surplus), "{fault:?}");
    }

    #[test]
    fn no_archive_takes_more_than_was_foretold() {
        let archive = sample(None).len() as u64;
        assert!(archive <= bytes_max(2, 6, 9 * BLOCK_BYTES as u64));
    }

    #[test]
    fn what_was_encrypted_is_read_with_its_key_alone() {
        let (key, other) = (wrapping(1), wrapping(2));
        let archive = sample(Some(&key));
        assert_eq!(archive.len(), sample(None).len());
        let (pages, ended) = read_with(&archive, Some(&key));
        assert_eq!(pages, 6);
        ended.unwrap();
        let unlocked = |archive: &[u8], key| {
            let mut source = ArchiveSource::new(archive);
            let head = read_head(&mut source).unwrap();
            source.unlock(&head, key)
        };
        assert!(matches!(unlocked(&archive, None), Err(Locked::NoKey(_))));
        let wrong = unlocked(&archive, Some(&other));
        assert!(matches!(wrong, Err(Locked::OtherKey { .. })));
        // A plain archive needs none.
        let plain = sample(None);
        assert!(unlocked(&plain, Some(&key)).is_ok());
        // Two archives of the same pages have nothing in common but the identity and the head.
        let again = sample(Some(&key));
        let blocks = |archive: &[u8]| archive.as_chunks::<16>().0[8..].to_vec();
        let differing = blocks(&archive).into_iter().zip(blocks(&again));
        let equal = differing.filter(|(a, b)| a == b && *a != [0; 16]).count();
        // The headers of structures: the magic and the identity, in 16 bytes each.
        assert!(equal <= 2 * 6, "{equal}");
    }

    /// The block with this number, changed, and with a right CRC.
    fn with_crc(archive: &mut [u8], block: usize) {
        let block = &mut archive[block * BLOCK_BYTES..][..BLOCK_BYTES];
        block[16..20].fill(0);
        let crc = crc32fast::hash(block);
        block[16..20].copy_from_slice(&crc.to_le_bytes());
    }

    #[test]
    fn no_page_is_read_behind_a_change_by_a_writer_without_the_key() {
        let key = wrapping(1);
        let whole = sample(Some(&key));
        // Head, namespace, pages, 3 payloads, namespace, pages, 6 payloads, end.
        for (block, before) in [(1, 0), (2, 0), (6, 3), (7, 3), (14, 6)] {
            for at in (24..BLOCK_BYTES).step_by(37) {
                let mut archive = whole.clone();
                archive[block * BLOCK_BYTES + at] ^= 0x10;
                with_crc(&mut archive, block);
                let (pages, ended) = read_with(&archive, Some(&key));
                let fault = ended.unwrap_err();
                assert_eq!(
                    (pages, fault.offset),
                    (before, (block * BLOCK_BYTES) as u64)
                );
                // Bytes behind the body are not covered: they have to be zero.
                let is_padding = matches!(fault.reason, FaultReason::Structure(Damage::Reserved));
                assert!(fault.is_forged() || is_padding, "{block}, {at}: {fault:?}");
            }
        }
        // Wrong payloads are damage, also in an encrypted archive.
        for block in [3, 5, 8, 13] {
            let mut archive = whole.clone();
            archive[block * BLOCK_BYTES + 77] ^= 1;
            let fault = read_with(&archive, Some(&key)).1.unwrap_err();
            assert!(
                matches!(fault.reason, FaultReason::Payload { .. }),
                "{fault:?}"
            );
        }
        // The head: the fields that are shown, and the wrapped key.
        for at in [24, 80, 96, 104, 112, 120, 136, 160, 200] {
            let mut archive = whole.clone();
            archive[at] ^= 1;
            with_crc(&mut archive, 0);
            let mut source = ArchiveSource::new(&archive[..]);
            let head = read_head(&mut source).unwrap();
            let unlocked = source.unlock(&head, Some(&key));
            let is_refused = match at {
                // The identity of the key.
                120 => matches!(unlocked, Err(Locked::OtherKey { .. })),
                _ => matches!(unlocked, Err(Locked::Forged)),
            };
            assert!(is_refused, "{at}: {unlocked:?}");
        }
        // A clear block in place of an encrypted one.
        let plain = sample(None);
        for block in [1, 2] {
            let mut archive = whole.clone();
            let range = block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES;
            archive[range.clone()].copy_from_slice(&plain[range]);
            assert!(read_with(&archive, Some(&key)).1.unwrap_err().is_forged());
        }
    }
}
