//! An object in the making.

use std::ops::Range;

use larder_codec::Codec;
use larder_format::{
    ARCHIVED_PAGES_MAX, ArchiveHead, ArchiveItem, ArchiveWriter, ArchivedNamespace, ArchivedPage,
    BLOCK_BYTES, Damage, Namespace, PageChecksum, PageShape, StoreId,
};
use larder_store::encoder::Encoder;

use super::{
    RunName, RunPage, Seal, archive_bytes, encode_seals, object_bytes, page_blocks, page_seal,
    seal_blocks,
};
use crate::buffer::Buffer;
use crate::error::RemoteError;
use crate::keys::{SealKey, Trust};

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
        self.pages.last().map(|page| RunName {
            namespace: self.namespace.fingerprint(),
            last: page.key,
        })
    }

    /// The memory of each page, in order: its parts, each padded with zeros to whole blocks.
    pub fn payloads(&mut self) -> Vec<&mut [u8]> {
        let page_bytes = page_blocks(&self.namespace) * BLOCK_BYTES;
        let mut rest = &mut self.bytes[2 * BLOCK_BYTES..];
        let mut payloads = Vec::with_capacity(self.pages.len());
        for page in 0..self.pages.len() {
            if begins_group(page) {
                rest = &mut rest[BLOCK_BYTES..];
            }
            let (payload, behind) = rest.split_at_mut(page_bytes);
            payloads.push(payload);
            rest = behind;
        }
        payloads
    }

    /// Encodes the pages that get smaller by it.
    pub fn encode(&mut self, encoder: &Encoder) {
        let shape = *self.namespace.shape();
        let mut stream = vec![0; page_blocks(&self.namespace) * BLOCK_BYTES];
        let mut saved = std::mem::take(&mut self.saved);
        for (page, saved) in self.payloads().into_iter().zip(&mut saved) {
            if !encoder.takes() {
                continue;
            }
            let plain = shape.page_blocks();
            let stored = Codec::new().encode(&parts_of(page, &shape), BLOCK_BYTES, &mut stream);
            if let Some(stored) = stored {
                page[..stored].copy_from_slice(&stream[..stored]);
                *saved = plain - (stored / BLOCK_BYTES) as u32;
            }
            encoder.took(plain, plain - *saved);
        }
        self.saved = saved;
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
        let places = self.pack();
        let (records, of_pages) = self.sealed(&places, key.as_ref());
        let mut writer = ArchiveWriter::new(name.archive());
        let blocks = places.iter().map(Range::len).sum::<usize>() / BLOCK_BYTES;
        let head = ArchiveItem::Head(ArchiveHead {
            store,
            created_unix_s,
            pages: records.len() as u64,
            blocks: blocks as u64,
            wrap: None,
        });
        self.structure(0, &head, &mut writer)?;
        let namespace = ArchivedNamespace::Whole(self.namespace.clone());
        self.structure(BLOCK_BYTES, &ArchiveItem::Namespace(namespace), &mut writer)?;
        let groups = places.chunks(ARCHIVED_PAGES_MAX);
        for (pages, places) in records.chunks(ARCHIVED_PAGES_MAX).zip(groups) {
            let pages = ArchiveItem::Pages(pages.to_vec());
            self.structure(places[0].start - BLOCK_BYTES, &pages, &mut writer)?;
        }
        let end = ArchiveItem::End(writer.counts(0));
        let mut bytes = archive_bytes(records.len(), blocks);
        self.structure(bytes - BLOCK_BYTES, &end, &mut writer)?;
        if let Some(key) = &key {
            let seals = encode_seals(key, &name, &of_pages);
            let (of_seals, padding) = self.bytes[bytes..].split_at_mut(seals.len());
            of_seals.copy_from_slice(&seals);
            bytes += seal_blocks(records.len()) * BLOCK_BYTES;
            padding[..bytes - archive_bytes(records.len(), blocks) - seals.len()].fill(0);
        }
        self.bytes.truncate(bytes);
        Ok(self.bytes)
    }

    /// Moves the payloads to their places in the object, and returns these.
    fn pack(&mut self) -> Vec<Range<usize>> {
        let page_blocks = page_blocks(&self.namespace);
        let (mut from, mut to) = (2 * BLOCK_BYTES, 2 * BLOCK_BYTES);
        let mut places = Vec::with_capacity(self.pages.len());
        for (page, saved) in self.saved.iter().enumerate() {
            if begins_group(page) {
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

    /// The record of each page, and with a key its seal. Each payload is read once from memory, and
    /// the second time from the processor's cache.
    fn sealed(
        &self,
        places: &[Range<usize>],
        key: Option<&SealKey>,
    ) -> (Vec<ArchivedPage>, Vec<Seal>) {
        let fingerprint = self.namespace.fingerprint();
        let (mut records, mut seals) = (Vec::new(), Vec::new());
        let pages = self.pages.iter().zip(&self.saved).zip(places);
        for ((page, saved), place) in pages {
            let payload = &self.bytes[place.clone()];
            let mut checksum = PageChecksum::new(fingerprint, &page.key);
            checksum.blocks(payload);
            let record = ArchivedPage {
                key: page.key,
                parent: page.parent.map(|parent| parent.prefix()),
                depth: page.depth,
                checksum: checksum.finish(),
                saved: *saved,
                seal: None,
            };
            seals.extend(key.map(|key| page_seal(key, fingerprint, &record, payload)));
            records.push(record);
        }
        (records, seals)
    }

    fn structure(
        &mut self,
        start: usize,
        item: &ArchiveItem,
        writer: &mut ArchiveWriter,
    ) -> Result<(), Damage> {
        let encoded = writer.item(item)?;
        self.bytes[start..start + BLOCK_BYTES].copy_from_slice(&*encoded);
        Ok(())
    }
}

/// Whether the records of a group, a block, are before the payload of this page.
fn begins_group(page: usize) -> bool {
    page.is_multiple_of(ARCHIVED_PAGES_MAX)
}

/// The parts of a page, without their padding.
fn parts_of<'a>(page: &'a [u8], shape: &PageShape) -> Vec<&'a [u8]> {
    let part = |part| {
        let start = usize::try_from(shape.part_offset(part)).unwrap_or(usize::MAX);
        &page[start..][..shape.part_bytes(part) as usize]
    };
    (0..shape.parts()).map(part).collect()
}
