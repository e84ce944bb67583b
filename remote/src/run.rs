//! Runs of pages, and the objects that hold them.
//!
//! A run is a number of consecutive pages of a chain, aligned: run `r` of a chain has the pages
//! from `r * n` to `(r + 1) * n`, where `n` is [`pages_of_run`]. Its name is the key of its last
//! page below the fingerprint of its namespace. A key covers all tokens before it, so two nodes
//! that computed the same prefix make the same name.
//!
//! An object is an archive (see `larder_format`'s `archive` module), and in a sealed object seals
//! behind its end. `larder import` takes the archive and ignores the seals.
//!
//! ```text
//!  block   0      1           2       3 ..                              n     n+1 ..
//!          +------+-----------+-------+----------+-------+- ... -+-----+-------+
//!          | head | namespace | pages | payloads | pages |       | end | seals |
//!          +------+-----------+-------+----------+-------+- ... -+-----+-------+
//!
//!  seals   magic "LARDSEAL" (8), identity of the key (8), pages (8), zero (8),
//!          seal of the run (32), seal of each page (32); then zeros to a whole block
//! ```
//!
//! The seal of a page covers the fingerprint, the page's record without its checksum, and its
//! payload. The seal of the run covers its name, its number of pages and their seals. So a damaged
//! payload costs its page alone, and no page or run stands for another. [`open`] reports each page
//! by itself; no byte of a page is returned before its seal was verified.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use larder_format::{
    ARCHIVED_PAGES_MAX, ArchiveHead, ArchiveId, ArchiveItem, ArchiveReader, ArchiveWriter,
    ArchivedNamespace, ArchivedPage, BLOCK_BYTES, Damage, Fingerprint, HexError, KeyPrefix,
    Namespace, PageChecksum, PageKey, StoreId,
};

use crate::buffer::Buffer;
use crate::error::RemoteError;
use crate::keys::{SealKey, SealKeyId, Trust};

/// Tokens of a run, unless a node is configured otherwise.
pub const RUN_TOKENS: u32 = 512;

/// Bytes of the longest object that is taken where the length of a run is not known. Other writers
/// of a remote may be hostile.
pub const OBJECT_BYTES_MAX: usize = 4 << 30;

/// Version of the layout of names and objects: the first component of every name.
pub(crate) const VERSION: &str = "v1";
const SUFFIX: &str = ".run";

/// First component of the names of the marks of use. They are no part of a listing of objects.
pub(crate) const USED: &str = "v1-used";

/// Begins the seals behind an archive.
pub const SEALS_MAGIC: [u8; 8] = *b"LARDSEAL";
const SEALS_HEADER_BYTES: usize = 32;
const SEAL_BYTES: usize = 32;

/// A message authentication code.
type Seal = blake3::Hash;

/// Number of pages of a run with so many tokens: at least one.
#[must_use]
pub fn pages_of_run(namespace: &Namespace, run_tokens: u32) -> NonZeroU32 {
    let pages = run_tokens / namespace.fields().page_tokens.max(1);
    NonZeroU32::new(pages).unwrap_or(NonZeroU32::MIN)
}

/// The name of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunName {
    /// Its namespace.
    pub namespace: Fingerprint,
    /// The key of its last page.
    pub last: PageKey,
}

impl RunName {
    /// The name of no run: a page has no such key.
    #[cfg(feature = "s3")]
    pub(crate) const NONE: RunName = RunName {
        namespace: Fingerprint::from_bytes([0; 16]),
        last: PageKey::from_bytes([0; 32]),
    };

    /// The prefix of the names of all runs of a namespace, or of all runs.
    #[must_use]
    pub fn prefix(namespace: Option<Fingerprint>) -> String {
        match namespace {
            Some(fingerprint) => format!("{VERSION}/{fingerprint}"),
            None => VERSION.to_owned(),
        }
    }

    /// The name of the mark of its last use: an empty object.
    #[must_use]
    pub(crate) fn mark(&self) -> String {
        let [first, ..] = self.last.as_bytes();
        let RunName { namespace, last } = self;
        format!("{USED}/{namespace}/{first:02x}/{last}")
    }

    /// The run of a mark with this name.
    pub(crate) fn of_mark(name: &str) -> Option<RunName> {
        let run = name.strip_prefix(USED)?;
        format!("{VERSION}{run}{SUFFIX}").parse().ok()
    }

    fn archive(&self) -> ArchiveId {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.namespace.as_bytes());
        hasher.update(self.last.as_bytes());
        let mut id = [0; 16];
        hasher.finalize_xof().fill(&mut id);
        ArchiveId::from_bytes(id)
    }
}

impl fmt::Display for RunName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, ..] = self.last.as_bytes();
        let RunName { namespace, last } = self;
        write!(f, "{VERSION}/{namespace}/{first:02x}/{last}{SUFFIX}")
    }
}

/// A text is not the name of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not the name of a run")]
pub struct NoRunName;

impl From<HexError> for NoRunName {
    fn from(_: HexError) -> NoRunName {
        NoRunName
    }
}

impl FromStr for RunName {
    type Err = NoRunName;

    fn from_str(text: &str) -> Result<RunName, NoRunName> {
        let mut components = text.split('/');
        let (version, namespace) = (components.next(), components.next().ok_or(NoRunName)?);
        let (_, file) = (components.next(), components.next().ok_or(NoRunName)?);
        let name = RunName {
            namespace: namespace.parse()?,
            last: file.strip_suffix(SUFFIX).ok_or(NoRunName)?.parse()?,
        };
        // A name has one spelling.
        if version == Some(VERSION) && name.to_string() == text {
            Ok(name)
        } else {
            Err(NoRunName)
        }
    }
}

/// The place of everything in the object of a run.
#[derive(Clone, Copy, Debug)]
struct Layout {
    pages: usize,
    page_bytes: usize,
    sealed: bool,
}

impl Layout {
    /// Byte offset of a page's payload.
    fn payload(self, page: usize) -> usize {
        let groups = page / ARCHIVED_PAGES_MAX + 1;
        (2 + groups) * BLOCK_BYTES + page * self.page_bytes
    }

    /// Bytes of the archive: the offset of the seals.
    fn archive_bytes(self) -> usize {
        let groups = self.pages.div_ceil(ARCHIVED_PAGES_MAX);
        (3 + groups) * BLOCK_BYTES + self.pages * self.page_bytes
    }

    fn bytes(self) -> usize {
        let seals = SEALS_HEADER_BYTES + (1 + self.pages) * SEAL_BYTES;
        let seals = if self.sealed { seals } else { 0 };
        self.archive_bytes() + seals.next_multiple_of(BLOCK_BYTES)
    }
}

/// Bytes of the object of a run with so many pages, with seals.
#[must_use]
pub fn object_bytes(namespace: &Namespace, pages: usize) -> usize {
    layout(namespace, pages, true).bytes()
}

fn layout(namespace: &Namespace, pages: usize, sealed: bool) -> Layout {
    Layout {
        pages,
        page_bytes: namespace.shape().page_blocks() as usize * BLOCK_BYTES,
        sealed,
    }
}

/// A page of a run: its key, and its place in the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunPage {
    /// Its key.
    pub key: PageKey,
    /// The key of the page before it, of which only the first 96 bits count.
    pub parent: Option<PageKey>,
    /// Number of pages before it.
    pub depth: u32,
}

/// The run of `run_pages` pages that ends in `last`, in the order of its chain. `None` if it ends
/// elsewhere, or if a page of it is unknown to `page`. `place` returns the key of the page before a
/// page, and the depth of the page.
pub(crate) fn whole_run<P>(
    last: P,
    run_pages: u32,
    place: impl Fn(&P) -> (Option<KeyPrefix>, u32),
    page: impl Fn(KeyPrefix) -> Option<P>,
) -> Option<Vec<P>> {
    let (mut parent, mut depth) = place(&last);
    if !depth.checked_add(1)?.is_multiple_of(run_pages) {
        return None;
    }
    let mut run = vec![last];
    for _ in 1..run_pages {
        let before = page(parent?)?;
        let expected = depth.checked_sub(1);
        (parent, depth) = place(&before);
        if Some(depth) != expected {
            return None;
        }
        run.push(before);
    }
    run.reverse();
    Some(run)
}

/// An object in the making: memory into which a store reads the pages of a run.
pub struct Draft {
    bytes: Buffer,
    layout: Layout,
    namespace: Namespace,
    pages: Vec<RunPage>,
    trust: Trust,
}

impl Draft {
    /// Memory for the pages of a run. Their padding is zero, all other bytes are to be written.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new(
        namespace: Namespace,
        pages: Vec<RunPage>,
        trust: Trust,
    ) -> Result<Draft, RemoteError> {
        let layout = layout(&namespace, pages.len(), matches!(trust, Trust::Sealed(_)));
        let mut draft = Draft {
            bytes: Buffer::of(layout.bytes())?,
            layout,
            namespace,
            pages,
            trust,
        };
        draft.clear_padding();
        Ok(draft)
    }

    /// Used memory may have the bytes of another tenant.
    fn clear_padding(&mut self) {
        let shape = *self.namespace.shape();
        for payload in self.payloads() {
            let mut rest = payload;
            for part in 0..shape.parts() {
                let bytes = shape.part_bytes(part) as usize;
                let (padded, behind) = rest.split_at_mut(bytes.next_multiple_of(BLOCK_BYTES));
                padded[bytes..].fill(0);
                rest = behind;
            }
        }
    }

    /// The name of the run; `None` without pages.
    #[must_use]
    pub fn name(&self) -> Option<RunName> {
        self.pages.last().map(|page| RunName {
            namespace: self.namespace.fingerprint(),
            last: page.key,
        })
    }

    /// The memory of each page, in order: its parts, each padded with zeros to whole blocks.
    pub fn payloads(&mut self) -> Vec<&mut [u8]> {
        let layout = self.layout;
        let mut rest = &mut self.bytes[..];
        let mut begin = 0;
        let mut payloads = Vec::with_capacity(layout.pages);
        for page in 0..layout.pages {
            let (_, from) = rest.split_at_mut(layout.payload(page) - begin);
            let (payload, behind) = from.split_at_mut(layout.page_bytes);
            payloads.push(payload);
            begin = layout.payload(page) + layout.page_bytes;
            rest = behind;
        }
        payloads
    }

    /// Writes the structures, and seals the pages. `store` and the time are for people.
    ///
    /// # Errors
    /// The run has no pages, or more than an archive can state.
    pub fn finish(mut self, store: StoreId, created_unix_s: u64) -> Result<Buffer, Damage> {
        let name = self.name().ok_or(Damage::Field {
            field: "pages",
            value: 0,
        })?;
        let key = match &self.trust {
            Trust::Sealed(keys) => Some(keys.current().clone()),
            Trust::Unsigned => None,
        };
        let (records, of_pages) = self.sealed(key.as_ref());
        let mut writer = ArchiveWriter::new(name.archive());
        let blocks = self.layout.page_bytes / BLOCK_BYTES * self.layout.pages;
        let head = ArchiveItem::Head(ArchiveHead {
            store,
            created_unix_s,
            pages: records.len() as u64,
            blocks: blocks as u64,
        });
        self.structure(0, &head, &mut writer)?;
        let namespace = ArchivedNamespace::Whole(self.namespace.clone());
        self.structure(1, &ArchiveItem::Namespace(namespace), &mut writer)?;
        for (group, pages) in records.chunks(ARCHIVED_PAGES_MAX).enumerate() {
            let payloads = self.layout.payload(group * ARCHIVED_PAGES_MAX) / BLOCK_BYTES;
            let pages = ArchiveItem::Pages(pages.to_vec());
            self.structure(payloads - 1, &pages, &mut writer)?;
        }
        let end = ArchiveItem::End(writer.counts(0));
        let archive_bytes = self.layout.archive_bytes();
        self.structure(archive_bytes / BLOCK_BYTES - 1, &end, &mut writer)?;
        if let Some(key) = &key {
            let seals = encode_seals(key, &name, &of_pages);
            let (of_seals, padding) = self.bytes[archive_bytes..].split_at_mut(seals.len());
            of_seals.copy_from_slice(&seals);
            padding.fill(0);
        }
        Ok(self.bytes)
    }

    /// The record of each page, and with a key its seal. Each payload is read once from memory, and
    /// the second time from the processor's cache.
    fn sealed(&self, key: Option<&SealKey>) -> (Vec<ArchivedPage>, Vec<Seal>) {
        let fingerprint = self.namespace.fingerprint();
        let (mut records, mut seals) = (Vec::new(), Vec::new());
        for (at, page) in self.pages.iter().enumerate() {
            let payload = self.payload(at);
            let mut checksum = PageChecksum::new(fingerprint, &page.key);
            checksum.blocks(payload);
            let record = ArchivedPage {
                key: page.key,
                parent: page.parent.map(|parent| parent.prefix()),
                depth: page.depth,
                checksum: checksum.finish(),
                saved: 0,
            };
            seals.extend(key.map(|key| page_seal(key, fingerprint, &record, payload)));
            records.push(record);
        }
        (records, seals)
    }

    fn structure(
        &mut self,
        block: usize,
        item: &ArchiveItem,
        writer: &mut ArchiveWriter,
    ) -> Result<(), Damage> {
        let encoded = writer.item(item)?;
        let start = block * BLOCK_BYTES;
        self.bytes[start..start + BLOCK_BYTES].copy_from_slice(&*encoded);
        Ok(())
    }

    fn payload(&self, page: usize) -> &[u8] {
        let start = self.layout.payload(page);
        &self.bytes[start..start + self.layout.page_bytes]
    }
}

/// The seals of an object, encoded.
fn encode_seals(key: &SealKey, name: &RunName, of_pages: &[Seal]) -> Vec<u8> {
    let mut bytes = Vec::from(SEALS_MAGIC);
    bytes.extend(key.id().0);
    bytes.extend((of_pages.len() as u64).to_le_bytes());
    bytes.extend([0_u8; 8]);
    bytes.extend(run_seal(key, name, of_pages).as_bytes());
    for seal in of_pages {
        bytes.extend(seal.as_bytes());
    }
    bytes
}

fn page_seal(key: &SealKey, namespace: Fingerprint, page: &ArchivedPage, payload: &[u8]) -> Seal {
    let mut hasher = key.of_page();
    hasher.update(namespace.as_bytes());
    hasher.update(page.key.as_bytes());
    hasher.update(&page.depth.to_le_bytes());
    hasher.update(&[u8::from(page.parent.is_some())]);
    let parent = page.parent.map_or([0; 12], |parent| *parent.as_bytes());
    hasher.update(&parent);
    hasher.update(payload);
    hasher.finalize()
}

fn run_seal(key: &SealKey, name: &RunName, seals: &[Seal]) -> Seal {
    let mut hasher = key.of_run();
    hasher.update(name.namespace.as_bytes());
    hasher.update(name.last.as_bytes());
    hasher.update(&(seals.len() as u64).to_le_bytes());
    for seal in seals {
        hasher.update(seal.as_bytes());
    }
    hasher.finalize()
}

/// A page of an object.
#[derive(Debug)]
pub struct OpenedPage<'a> {
    /// Its record.
    pub page: ArchivedPage,
    /// Its payload, padding included, or the reason why it may not be used.
    pub payload: Result<&'a [u8], PageFault>,
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

/// Reads an object and verifies it.
#[must_use]
pub fn open<'a>(object: &'a [u8], name: &RunName, trust: &Trust) -> Opened<'a> {
    let mut reading = Reading {
        object,
        name,
        trust,
        reader: ArchiveReader::new(),
        announced: 0,
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
                }
                ArchiveItem::Namespace(namespace) => self.namespace(namespace)?,
                // Runs are plain.
                ArchiveItem::Pages(pages) if pages.iter().any(|page| page.saved > 0) => {
                    return Err(RunFault::Pages);
                }
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
        // A number of pages beyond the object's bytes is no number of pages.
        if self.announced > self.object.len() / BLOCK_BYTES {
            return Err(RunFault::CutOff);
        }
        if let Trust::Sealed(keys) = self.trust {
            let start = layout(&namespace, self.announced, true).archive_bytes();
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
        let page_bytes = namespace.shape().page_blocks() as usize * BLOCK_BYTES;
        self.check_order(pages)?;
        for (at, page) in pages.iter().enumerate() {
            let bytes = self.slice(start + at * page_bytes, page_bytes)?;
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
