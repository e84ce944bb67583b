//! An object, read and verified.

use larder_format::{
    ArchiveHead, ArchiveItem, ArchiveReader, ArchivedNamespace, ArchivedPage, BLOCK_BYTES, Damage,
    Namespace, PageChecksum, PageShape, WrapId,
};
use larder_seal::{ArchiveKey, OpenError};
use larder_store::encoder;

use super::{RunName, RunNames, page_blocks, page_name};
use crate::keys::Trust;
use crate::planted::planted;

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
    /// Its bytes have the right checksum and the wrong tag: another writer made them.
    #[error("its bytes match their checksum and not their tag: it is forged")]
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
    /// It is plain.
    #[error("it is not encrypted")]
    Unsealed,
    /// It is encrypted with a key that this node does not have.
    #[error("it is encrypted with key {0}, which this node does not have")]
    UnknownKey(WrapId),
    /// It does not open with its key.
    #[error("it does not open with its key: it is forged, or of another run")]
    Seal,
    /// The key cannot be used.
    #[error("{0}")]
    Vault(String),
    /// Its pages are not the consecutive pages that end in its name.
    #[error("its pages are not a run that ends in its name")]
    Pages,
}

/// The content of an object.
#[derive(Debug)]
pub struct Opened<'a> {
    /// When it was made, in seconds since 1970.
    pub created_unix_s: u64,
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

/// Reads an object and verifies it. The payloads of an encrypted one are decrypted in place.
#[must_use]
pub fn open<'a>(object: &'a mut [u8], name: &RunName, trust: &Trust) -> Opened<'a> {
    let mut reading = Reading {
        blocks: object.len() / BLOCK_BYTES,
        rest: object,
        name,
        trust,
        structures: Structures::default(),
        opened: Opened {
            created_unix_s: 0,
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

/// The begin of a run, as its object states it. Without keys it is not verified.
#[derive(Debug)]
pub struct Outline {
    /// Its namespace.
    pub namespace: Namespace,
    /// Its first pages: all, if they are few; none, if their records are damaged.
    pub pages: Vec<ArchivedPage>,
    /// Whether these are all.
    pub is_whole: bool,
}

/// The outline of a run by the first bytes of its object; `None` if its namespace is damaged or
/// forged, or another one.
#[must_use]
pub fn outline(begin: &[u8], name: &RunName, trust: &Trust) -> Option<Outline> {
    let mut structures = Structures::default();
    let (mut namespace, mut pages, mut announced) = (None, Vec::new(), 0);
    for block in begin.chunks_exact(BLOCK_BYTES) {
        match structures.item(block, name, trust) {
            Ok(ArchiveItem::Head(head)) => announced = head.pages,
            Ok(ArchiveItem::Namespace(ArchivedNamespace::Whole(whole))) => namespace = Some(whole),
            Ok(ArchiveItem::Pages(first)) => pages = first,
            _ => break,
        }
    }
    let namespace: Namespace = namespace?;
    let names = RunNames::of(trust, namespace.fingerprint());
    let is_named = names.spaces().any(|space| space == name.namespace);
    is_named.then_some(Outline {
        namespace,
        is_whole: pages.len() as u64 == announced,
        pages,
    })
}

/// The structures of an object.
#[derive(Default)]
struct Structures {
    reader: ArchiveReader,
    key: Option<ArchiveKey>,
}

impl Structures {
    /// The next one.
    fn item(
        &mut self,
        block: &[u8],
        name: &RunName,
        trust: &Trust,
    ) -> Result<ArchiveItem, RunFault> {
        let item = match &self.key {
            None => self.reader.item(block),
            Some(key) => self.reader.sealed_item(block, |named, body, seal| {
                key.open(seal, named, body).is_ok()
            }),
        };
        let item = item.map_err(|damage| match damage {
            Damage::Sealed => RunFault::Seal,
            damage => RunFault::Structure(damage),
        })?;
        if let ArchiveItem::Head(head) = &item {
            self.key = unlock(head, name, trust)?;
        }
        Ok(item)
    }
}

/// The key of an object. The object of another run has another one.
fn unlock(
    head: &ArchiveHead,
    name: &RunName,
    trust: &Trust,
) -> Result<Option<ArchiveKey>, RunFault> {
    let (keys, wrap) = match (trust.keys(), &head.wrap) {
        (None, None) => return Ok(None),
        (Some(_), None) if planted!(UnsealedPage) => return Ok(None),
        (Some(_), None) => return Err(RunFault::Unsealed),
        (None, Some(wrap)) => return Err(RunFault::UnknownKey(wrap.id)),
        (Some(keys), Some(wrap)) => (keys, wrap),
    };
    let key = keys.find(wrap.id).ok_or(RunFault::UnknownKey(wrap.id))?;
    let opened = ArchiveKey::unwrap(key.wrapping(), wrap, &head.named(name.archive()));
    opened.map(Some).map_err(|error| match error {
        OpenError::Tag => RunFault::Seal,
        OpenError::Vault(error) => RunFault::Vault(error.to_string()),
    })
}

struct Reading<'a, 'b> {
    /// Bytes that were not read yet.
    rest: &'a mut [u8],
    /// Blocks of the object.
    blocks: usize,
    name: &'b RunName,
    trust: &'b Trust,
    structures: Structures,
    opened: Opened<'a>,
}

impl<'a> Reading<'a, '_> {
    fn read(&mut self) -> Result<(), RunFault> {
        while !self.structures.reader.is_over() {
            let block = self.take(BLOCK_BYTES)?;
            match self.structures.item(block, self.name, self.trust)? {
                ArchiveItem::Head(head) => {
                    self.opened.created_unix_s = head.created_unix_s;
                    // A number of pages or blocks beyond the object's bytes is no such number.
                    if head.pages.max(head.blocks) > self.blocks as u64 {
                        return Err(RunFault::CutOff);
                    }
                }
                ArchiveItem::Namespace(namespace) => self.namespace(namespace)?,
                ArchiveItem::Pages(pages) => self.group(&pages)?,
                ArchiveItem::End(_) => {}
            }
        }
        if !self.rest.is_empty() {
            return Err(RunFault::Surplus);
        }
        let namespace = self.opened.namespace.as_ref();
        let last = self.opened.pages.last().zip(namespace);
        let is_named = last.is_some_and(|(last, namespace)| {
            let names = RunNames::of(self.trust, namespace.fingerprint());
            names.all(&last.page.key).any(|name| name == *self.name)
        });
        match is_named {
            true => Ok(()),
            false => Err(RunFault::Pages),
        }
    }

    fn take(&mut self, bytes: usize) -> Result<&'a mut [u8], RunFault> {
        let rest = std::mem::take(&mut self.rest);
        let (taken, rest) = rest.split_at_mut_checked(bytes).ok_or(RunFault::CutOff)?;
        self.rest = rest;
        Ok(taken)
    }

    fn namespace(&mut self, namespace: ArchivedNamespace) -> Result<(), RunFault> {
        let ArchivedNamespace::Whole(namespace) = namespace else {
            return Err(RunFault::Namespace);
        };
        let names = RunNames::of(self.trust, namespace.fingerprint());
        let is_named = names.spaces().any(|space| space == self.name.namespace);
        if !is_named || self.opened.namespace.is_some() {
            return Err(RunFault::Namespace);
        }
        self.opened.namespace = Some(namespace);
        Ok(())
    }

    /// The pages of a group, whose payloads are next.
    fn group(&mut self, pages: &[ArchivedPage]) -> Result<(), RunFault> {
        let namespace = self.opened.namespace.clone().ok_or(RunFault::Namespace)?;
        let page_blocks = page_blocks(&namespace);
        self.check_order(pages)?;
        for page in pages {
            let stored = page_blocks.checked_sub(page.saved as usize);
            let bytes = self.take(stored.ok_or(RunFault::Pages)? * BLOCK_BYTES)?;
            let payload = verify(&namespace, page, bytes, self.structures.key.as_ref());
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

/// A payload, decrypted if there is a key.
fn verify<'a>(
    namespace: &Namespace,
    page: &ArchivedPage,
    bytes: &'a mut [u8],
    key: Option<&ArchiveKey>,
) -> Result<&'a [u8], PageFault> {
    let mut checksum = PageChecksum::new(namespace.fingerprint(), &page.key);
    checksum.blocks(bytes);
    if checksum.finish() != page.checksum {
        return Err(PageFault::Checksum);
    }
    if let Some(key) = key {
        let seal = page.seal.as_ref().ok_or(PageFault::Seal)?;
        let name = page_name(namespace, &page.key, bytes.len());
        let opened = key.payloads().open(&name, seal, &mut [&mut *bytes]);
        opened.map_err(|_| PageFault::Seal)?;
    }
    Ok(bytes)
}
