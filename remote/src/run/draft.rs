//! An object in the making.

use std::ops::Range;

use larder_base::system::processes::fill_random;
use larder_codec::Codec;
use larder_format::{
    ArchiveHead, ArchiveItem, ArchiveWriter, ArchivedNamespace, ArchivedPage, BLOCK_BYTES, Damage,
    Namespace, PageChecksum, PageShape, StoreId,
};
use larder_seal::{ArchiveKey, Salts, SealError};
use larder_store::encoder::{Encoder, sealed_unit};

use super::{
    RunName, RunNames, RunPage, archive_bytes, group_pages, object_bytes, page_blocks, page_name,
};
use crate::buffer::Buffer;
use crate::error::RemoteError;
use crate::keys::Trust;

/// Why an object is not made.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// The run has no pages, or more than an archive can state.
    #[error(transparent)]
    Structure(#[from] Damage),
    /// It cannot be encrypted.
    #[error(transparent)]
    Seal(#[from] SealError),
}

/// An object in the making: memory into which a store reads the pages of a run.
pub struct Draft {
    bytes: Buffer,
    namespace: Namespace,
    pages: Vec<RunPage>,
    /// Blocks of each page that the codec saved. An encoded page is at the begin of its memory.
    saved: Vec<u32>,
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
        let mut draft = Draft {
            bytes: Buffer::of(object_bytes(&namespace, pages.len()))?,
            saved: vec![0; pages.len()],
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
        let names = RunNames::of(&self.trust, self.namespace.fingerprint());
        self.pages.last().map(|page| names.name(&page.key))
    }

    /// Pages of a group: their records are in one block.
    fn group_pages(&self) -> usize {
        group_pages(self.trust.encrypts())
    }

    /// The memory of each page, in order: its parts, each padded with zeros to whole blocks.
    pub fn payloads(&mut self) -> Vec<&mut [u8]> {
        let page_bytes = page_blocks(&self.namespace) * BLOCK_BYTES;
        let group_pages = self.group_pages();
        let mut rest = &mut self.bytes[2 * BLOCK_BYTES..];
        let mut payloads = Vec::with_capacity(self.pages.len());
        for page in 0..self.pages.len() {
            if page.is_multiple_of(group_pages) {
                rest = &mut rest[BLOCK_BYTES..];
            }
            let (payload, behind) = rest.split_at_mut(page_bytes);
            payloads.push(payload);
            rest = behind;
        }
        payloads
    }

    /// Encodes the pages that get smaller by it. A length tells something of the content: in an
    /// encrypted object it is one of few.
    pub fn encode(&mut self, encoder: &Encoder) {
        let shape = *self.namespace.shape();
        let unit = match self.trust.encrypts() {
            true => sealed_unit(page_blocks(&self.namespace) * BLOCK_BYTES),
            false => BLOCK_BYTES,
        };
        let mut stream = vec![0; page_blocks(&self.namespace) * BLOCK_BYTES];
        let mut saved = std::mem::take(&mut self.saved);
        for (page, saved) in self.payloads().into_iter().zip(&mut saved) {
            if !encoder.takes() {
                continue;
            }
            let plain = shape.page_blocks();
            let stored = Codec::new().encode(&parts_of(page, &shape), unit, &mut stream);
            if let Some(stored) = stored {
                page[..stored].copy_from_slice(&stream[..stored]);
                *saved = plain - (stored / BLOCK_BYTES) as u32;
            }
            encoder.took(plain, plain - *saved);
        }
        self.saved = saved;
    }

    /// Writes the structures, and encrypts them and the pages. `store` and the time are for people,
    /// and the time for nodes that have erased the tenant since.
    ///
    /// # Errors
    /// See [`DraftError`].
    pub fn finish(mut self, store: StoreId, created_unix_s: u64) -> Result<Buffer, DraftError> {
        let name = self.name().ok_or(Damage::Field {
            field: "pages",
            value: 0,
        })?;
        let places = self.pack();
        let blocks = places.iter().map(Range::len).sum::<usize>() / BLOCK_BYTES;
        let mut head = ArchiveHead {
            store,
            created_unix_s,
            pages: places.len() as u64,
            blocks: blocks as u64,
            wrap: None,
        };
        let key = match self.trust.keys() {
            None => None,
            Some(keys) => {
                let wrapping = keys.current().wrapping();
                let key = ArchiveKey::draw(wrapping, &mut fill_random)?;
                let named = head.named(name.archive());
                head.wrap = Some(key.wrap(wrapping, &mut fill_random, &named)?);
                Some(key)
            }
        };
        let records = self.sealed(&places, key.as_ref())?;
        let mut writer = ArchiveWriter::new(name.archive());
        let mut structure = |bytes: &mut Buffer, start: usize, item: &ArchiveItem| {
            let mut block = writer.item(item)?;
            if let (Some(key), true) = (&key, start > 0) {
                let seal = |named: &[u8], body: &mut [u8]| key.seal(&mut fill_random, named, body);
                ArchiveWriter::seal(&mut block, seal)?;
            }
            bytes[start..start + BLOCK_BYTES].copy_from_slice(&*block);
            Ok::<_, DraftError>(writer.counts(0))
        };
        let namespace = ArchivedNamespace::Whole(self.namespace.clone());
        structure(&mut self.bytes, 0, &ArchiveItem::Head(head))?;
        structure(
            &mut self.bytes,
            BLOCK_BYTES,
            &ArchiveItem::Namespace(namespace),
        )?;
        let group_pages = group_pages(key.is_some());
        let (mut end, mut counts) = (2 * BLOCK_BYTES, None);
        for (pages, places) in records.chunks(group_pages).zip(places.chunks(group_pages)) {
            let start = places
                .first()
                .map_or(end, |place| place.start - BLOCK_BYTES);
            let pages = ArchiveItem::Pages(pages.to_vec());
            counts = Some(structure(&mut self.bytes, start, &pages)?);
            end = places.last().map_or(end, |place| place.end);
        }
        structure(
            &mut self.bytes,
            end,
            &ArchiveItem::End(counts.unwrap_or_default()),
        )?;
        self.bytes
            .truncate(archive_bytes(records.len(), blocks, key.is_some()));
        Ok(self.bytes)
    }

    /// Moves the payloads to their places in the object, and returns these.
    fn pack(&mut self) -> Vec<Range<usize>> {
        let (page_blocks, group_pages) = (page_blocks(&self.namespace), self.group_pages());
        let (mut from, mut to) = (2 * BLOCK_BYTES, 2 * BLOCK_BYTES);
        let mut places = Vec::with_capacity(self.pages.len());
        for (page, saved) in self.saved.iter().enumerate() {
            if page.is_multiple_of(group_pages) {
                from += BLOCK_BYTES;
                to += BLOCK_BYTES;
            }
            let stored = (page_blocks - *saved as usize) * BLOCK_BYTES;
            self.bytes.copy_within(from..from + stored, to);
            places.push(to..to + stored);
            from += page_blocks * BLOCK_BYTES;
            to += stored;
        }
        places
    }

    /// The record of each page. With a key the payloads are encrypted.
    fn sealed(
        &mut self,
        places: &[Range<usize>],
        key: Option<&ArchiveKey>,
    ) -> Result<Vec<ArchivedPage>, SealError> {
        let fingerprint = self.namespace.fingerprint();
        let mut random = fill_random;
        let mut salts = Salts::of(&mut random, places.len());
        let mut records = Vec::with_capacity(places.len());
        let pages = self.pages.iter().zip(&self.saved).zip(places);
        for ((page, saved), place) in pages {
            let payload = &mut self.bytes[place.clone()];
            let mut checksum = PageChecksum::new(fingerprint, &page.key);
            let seal = match key {
                None => {
                    checksum.blocks(payload);
                    None
                }
                Some(key) => {
                    let name = page_name(&self.namespace, &page.key, payload.len());
                    let each = |stored: &[u8]| checksum.blocks(stored);
                    Some(key.payloads().seal(&mut salts, &name, payload, each)?)
                }
            };
            records.push(ArchivedPage {
                key: page.key,
                parent: page.parent.map(|parent| parent.prefix()),
                depth: page.depth,
                checksum: checksum.finish(),
                saved: *saved,
                seal,
            });
        }
        Ok(records)
    }
}

/// The parts of a page, without their padding.
fn parts_of<'a>(page: &'a [u8], shape: &PageShape) -> Vec<&'a [u8]> {
    let part = |part| {
        let start = usize::try_from(shape.part_offset(part)).unwrap_or(usize::MAX);
        &page[start..][..shape.part_bytes(part) as usize]
    };
    (0..shape.parts()).map(part).collect()
}
