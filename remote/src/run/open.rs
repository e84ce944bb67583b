//! An object, read and verified.

use larder_format::{
    ArchiveItem, ArchiveReader, ArchivedNamespace, ArchivedPage, BLOCK_BYTES, Damage, Fingerprint,
    Namespace, PageChecksum, PageShape,
};
use larder_store::encoder;

use super::{
    RunName, SEAL_BYTES, SEALS_HEADER_BYTES, SEALS_MAGIC, Seal, archive_bytes, page_blocks,
    page_seal, run_seal,
};
use crate::keys::{SealKey, SealKeyId, Trust};

/// A page of an object.
#[derive(Debug)]
pub struct OpenedPage<'a> {
    /// Its record.
    pub page: ArchivedPage,
    /// Its payload, padding included, or the reason why it may not be used. It is encoded if the
    /// record has saved blocks.
    pub payload: Result<&'a [u8], PageFault>,
}

impl<'a> OpenedPage<'a> {
    /// Its plain page, padding included. An encoded one is decoded into `memory`, which has the
    /// length of a page of this shape.
    ///
    /// # Errors
    /// It may not be used.
    pub fn plain<'m>(&self, shape: &PageShape, memory: &'m mut [u8]) -> Result<&'m [u8], PageFault>
    where
        'a: 'm,
    {
        let payload = self.payload?;
        if self.page.saved == 0 {
            return Ok(payload);
        }
        encoder::decode(shape, payload, memory).map_err(|_| PageFault::Undecodable)?;
        Ok(memory)
    }
}

/// Why a page of an object may not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageFault {
    /// Its bytes differ from the written ones.
    #[error("its bytes do not match their checksum")]
    Checksum,
    /// Its bytes have the right checksum and the wrong seal: a writer without the key made them.
    #[error("its bytes match their checksum and not their seal: it is forged")]
    Seal,
    /// The codec does not make such bytes.
    #[error("its bytes match their checksum, and no codec of this release decodes them")]
    Undecodable,
}

/// Why an object, or the rest of one, may not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunFault {
    /// A structure differs from the written one.
    #[error("a structure: {0}")]
    Structure(Damage),
    /// It is shorter than its structures state.
    #[error("it is cut off")]
    CutOff,
    /// Something follows its end.
    #[error("something follows its end")]
    Surplus,
    /// It is of another namespace.
    #[error("it is of another namespace than its name")]
    Namespace,
    /// It has no seals.
    #[error("it is not sealed")]
    Unsealed,
    /// It is sealed with a key that this node does not have.
    #[error("it is sealed with key {0}, which this node does not have")]
    UnknownKey(SealKeyId),
    /// Its seals are wrong.
    #[error("its seals are wrong: they are damaged, forged, or of another run")]
    Seal,
    /// Its pages are not the consecutive pages that end in its name.
    #[error("its pages are not a run that ends in its name")]
    Pages,
}

/// The content of an object.
#[derive(Debug)]
pub struct Opened<'a> {
    /// Its namespace; `None` if a fault comes before it.
    pub namespace: Option<Namespace>,
    /// Its pages, up to the first fault of a structure.
    pub pages: Vec<OpenedPage<'a>>,
    /// Why there are no more pages.
    pub fault: Option<RunFault>,
}

impl Opened<'_> {
    /// The pages that may not be used. Encoded ones are decoded to know it.
    pub fn page_faults(&self) -> impl Iterator<Item = (&ArchivedPage, PageFault)> {
        let shape = self.namespace.as_ref().map(Namespace::shape);
        let bytes = shape.map_or(0, |shape| shape.page_blocks() as usize * BLOCK_BYTES);
        let mut memory = vec![0; bytes];
        self.pages.iter().filter_map(move |opened| {
            let fault = opened.plain(shape?, &mut memory).err()?;
            Some((&opened.page, fault))
        })
    }
}

/// Reads an object and verifies it.
#[must_use]
pub fn open<'a>(object: &'a [u8], name: &RunName, trust: &Trust) -> Opened<'a> {
    let mut reading = Reading {
        object,
        name,
        trust,
        reader: ArchiveReader::new(),
        announced: 0,
        blocks: 0,
        seals: None,
        opened: Opened {
            namespace: None,
            pages: Vec::new(),
            fault: None,
        },
    };
    let read = reading.read();
    let mut opened = reading.opened;
    opened.fault = read.err();
    opened
}

/// Bytes at the begin of an object that have its [`Outline`].
pub const OUTLINE_BYTES: usize = 3 * BLOCK_BYTES;

/// The begin of a run, as its object states it. It is not verified.
#[derive(Debug)]
pub struct Outline {
    /// Its namespace.
    pub namespace: Namespace,
    /// Its first pages: all, if they are few; none, if their records are damaged.
    pub pages: Vec<ArchivedPage>,
}

/// The outline of a run by the first bytes of its object; `None` if its namespace is damaged, or
/// another one.
#[must_use]
pub fn outline(begin: &[u8], name: &RunName) -> Option<Outline> {
    let mut reader = ArchiveReader::new();
    let (mut namespace, mut pages) = (None, Vec::new());
    for block in begin.chunks_exact(BLOCK_BYTES) {
        match reader.item(block) {
            Ok(ArchiveItem::Head(_)) => {}
            Ok(ArchiveItem::Namespace(ArchivedNamespace::Whole(whole))) => namespace = Some(whole),
            Ok(ArchiveItem::Pages(first)) => pages = first,
            _ => break,
        }
    }
    let namespace = namespace.filter(|it: &Namespace| it.fingerprint() == name.namespace)?;
    Some(Outline { namespace, pages })
}

struct Reading<'a, 'b> {
    object: &'a [u8],
    name: &'b RunName,
    trust: &'b Trust,
    reader: ArchiveReader,
    /// Pages that the head states.
    announced: usize,
    /// Blocks of their payloads, as the head states them.
    blocks: usize,
    /// The key, and the seal of each page.
    seals: Option<(&'b SealKey, Vec<Seal>)>,
    opened: Opened<'a>,
}

impl<'a> Reading<'a, '_> {
    fn read(&mut self) -> Result<(), RunFault> {
        while !self.reader.is_over() {
            let start = self.offset();
            let block = self.slice(start, BLOCK_BYTES)?;
            let item = self.reader.item(block).map_err(RunFault::Structure)?;
            match item {
                ArchiveItem::Head(head) => {
                    self.announced = usize::try_from(head.pages).unwrap_or(usize::MAX);
                    self.blocks = usize::try_from(head.blocks).unwrap_or(usize::MAX);
                }
                ArchiveItem::Namespace(namespace) => self.namespace(namespace)?,
                ArchiveItem::Pages(pages) => self.group(&pages, start + BLOCK_BYTES)?,
                ArchiveItem::End(_) => {}
            }
        }
        let behind = self.object.len() - self.offset();
        let is_sealed = self.object[self.offset()..].starts_with(&SEALS_MAGIC);
        let seals = SEALS_HEADER_BYTES + (1 + self.opened.pages.len()) * SEAL_BYTES;
        if behind > 0 && !(is_sealed && behind == seals.next_multiple_of(BLOCK_BYTES)) {
            return Err(RunFault::Surplus);
        }
        let last = self.opened.pages.last();
        if last.is_some_and(|last| last.page.key == self.name.last) {
            Ok(())
        } else {
            Err(RunFault::Pages)
        }
    }

    fn offset(&self) -> usize {
        usize::try_from(self.reader.offset()).unwrap_or(usize::MAX)
    }

    fn slice(&self, start: usize, bytes: usize) -> Result<&'a [u8], RunFault> {
        let end = start.checked_add(bytes).ok_or(RunFault::CutOff)?;
        self.object.get(start..end).ok_or(RunFault::CutOff)
    }

    fn namespace(&mut self, namespace: ArchivedNamespace) -> Result<(), RunFault> {
        let ArchivedNamespace::Whole(namespace) = namespace else {
            return Err(RunFault::Namespace);
        };
        if namespace.fingerprint() != self.name.namespace {
            return Err(RunFault::Namespace);
        }
        // A number of pages or blocks beyond the object's bytes is no such number.
        if self.announced.max(self.blocks) > self.object.len() / BLOCK_BYTES {
            return Err(RunFault::CutOff);
        }
        if let Trust::Sealed(keys) = self.trust {
            let start = archive_bytes(self.announced, self.blocks);
            if start == self.object.len() {
                return Err(RunFault::Unsealed);
            }
            let header = self.slice(start, SEALS_HEADER_BYTES + SEAL_BYTES)?;
            if !header.starts_with(&SEALS_MAGIC) {
                return Err(RunFault::Unsealed);
            }
            let mut id = [0; 8];
            id.copy_from_slice(&header[8..16]);
            let id = SealKeyId(id);
            let key = keys.find(id).ok_or(RunFault::UnknownKey(id))?;
            let (_, of_run) = header.split_at(SEALS_HEADER_BYTES);
            let of_pages = self.slice(start + header.len(), self.announced * SEAL_BYTES)?;
            let (of_pages, _) = of_pages.as_chunks::<SEAL_BYTES>();
            let of_pages: Vec<Seal> = of_pages.iter().copied().map(Seal::from).collect();
            // Seals are compared in constant time.
            let is_counted = header[16..24] == (self.announced as u64).to_le_bytes();
            if !is_counted || run_seal(key, self.name, &of_pages) != *of_run {
                return Err(RunFault::Seal);
            }
            self.seals = Some((key, of_pages));
        }
        self.opened.namespace = Some(namespace);
        Ok(())
    }

    /// The pages of a group, whose payloads begin at `start`.
    fn group(&mut self, pages: &[ArchivedPage], start: usize) -> Result<(), RunFault> {
        let namespace = self.opened.namespace.as_ref().ok_or(RunFault::Namespace)?;
        let page_blocks = page_blocks(namespace);
        self.check_order(pages)?;
        let mut start = start;
        for page in pages {
            let stored = page_blocks.checked_sub(page.saved as usize);
            let bytes = self.slice(start, stored.ok_or(RunFault::Pages)? * BLOCK_BYTES)?;
            start += bytes.len();
            let payload = match &self.seals {
                None => verify(self.name.namespace, page, bytes, None),
                Some((key, seals)) => {
                    let seal = seals.get(self.opened.pages.len()).ok_or(RunFault::Seal)?;
                    verify(self.name.namespace, page, bytes, Some((*key, seal)))
                }
            };
            let page = *page;
            self.opened.pages.push(OpenedPage { page, payload });
        }
        Ok(())
    }

    /// Pages are consecutive in their chain.
    fn check_order(&self, pages: &[ArchivedPage]) -> Result<(), RunFault> {
        let mut before = self.opened.pages.last().map(|opened| opened.page);
        for page in pages {
            let follows = before.is_none_or(|before| {
                page.parent == Some(before.key.prefix())
                    && before.depth.checked_add(1) == Some(page.depth)
            });
            if !follows {
                return Err(RunFault::Pages);
            }
            before = Some(*page);
        }
        Ok(())
    }
}

fn verify<'a>(
    namespace: Fingerprint,
    page: &ArchivedPage,
    bytes: &'a [u8],
    seal: Option<(&SealKey, &Seal)>,
) -> Result<&'a [u8], PageFault> {
    let is_whole = || {
        let mut checksum = PageChecksum::new(namespace, &page.key);
        checksum.blocks(bytes);
        checksum.finish() == page.checksum
    };
    match seal {
        // The store that takes the page computes a checksum of its own.
        Some((key, seal)) if page_seal(key, namespace, page, bytes) == *seal => Ok(bytes),
        Some(_) if is_whole() => Err(PageFault::Seal),
        None if is_whole() => Ok(bytes),
        _ => Err(PageFault::Checksum),
    }
}
