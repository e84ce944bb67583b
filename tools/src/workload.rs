//! Test pages: their keys, their content, and their buffers.
//!
//! The bytes of a page are a pure function of its key and of the position in it. So every byte from
//! a store can be checked without a record of the input. Each 8-byte word depends on the key, the
//! part and the place in the part: mistaken pages, swapped parts and shifted or stale blocks all
//! differ. Making and comparing cost a few additions a word, well above device speed. The words are
//! not random in any stronger sense.
//!
//! Keys are chains of hashes made by [`page_keys`] with one token a page, as an engine would make
//! them.
//!
//! The choice of pages is elsewhere (`bench`, `replay`, `demo`). Measurement goes through the given
//! [`Meter`] alone.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use larder_engine::AlignedBuf;
use larder_engine::{GetPage, GetStatus, NamespaceId, PageStore, PutPage, PutStatus};
use larder_format::{
    Namespace, NamespaceFields, PARTS_MAX, PageKey, PageShape, Rank, ShapeError, TokenUnits,
    page_keys,
};
use larder_kernels::{KvShape, Layout};
use larder_tiers::Model;

use crate::failure::Failure;
use crate::open::patient;
use crate::size::ByteSize;
use crate::usage::Meter;

/// Bytes made or compared in one step.
const STEP_BYTES: usize = 64;

/// Words of a step.
const LANES: usize = STEP_BYTES / 8;

/// Bytes compared between checks of the outcome.
const COMPARE_BYTES: usize = 4096;

/// Distance between neighbouring words before mixing: odd, so that no two words of a part are
/// alike.
const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;

/// The weights of pages that are no model's.
const MADE_UP: &str = "made-up";

/// Mixes the numbers that name words: odd.
const MIX: u64 = 0xd129_42f1_9e21_5a55;

/// Words between the starts of neighbouring parts: more than a part can have.
const PART_WORDS: u64 = 1 << 32;

/// The keys of a chain with one token a page.
pub fn chain(tokens: &[u64]) -> Vec<PageKey> {
    page_keys(tokens, NonZeroUsize::MIN, None, TokenUnits::Single)
}

/// The keys of `pages` pages behind the pages of `seed`. The pages of `seed` name the chain and are
/// not part of it.
pub fn chain_after(seed: &[u64], pages: u64) -> Vec<PageKey> {
    let tokens: Vec<u64> = (0..pages).collect();
    page_keys(
        &tokens,
        NonZeroUsize::MIN,
        chain(seed).last().copied(),
        TokenUnits::Single,
    )
}

/// The shape of pages of `page_bytes` in `parts` equal parts.
///
/// # Errors
/// When the page cannot be divided so, or the format has no such shape.
pub fn shape(page_bytes: ByteSize, parts: u32) -> Result<PageShape, Failure> {
    let usage = |reason: &dyn std::fmt::Display| {
        Failure::usage(format!(
            "pages of {} bytes in {parts} parts: {reason}; choose other --page-bytes{}",
            page_bytes.0,
            if parts == 1 { "" } else { " or --parts" }
        ))
    };
    if parts as usize > PARTS_MAX {
        return Err(usage(&ShapeError::Count {
            found: parts as usize,
        }));
    }
    if parts == 0 || !page_bytes.0.is_multiple_of(u64::from(parts)) {
        return Err(usage(&"a page is divided into equal parts"));
    }
    let part_bytes = u32::try_from(page_bytes.0 / u64::from(parts))
        .map_err(|_| usage(&"a page is less than 1 GiB"))?;
    let part_bytes = vec![part_bytes; parts as usize];
    PageShape::new(&part_bytes).map_err(|error| usage(&error))
}

/// The namespace of test pages. The command that makes them stands for the model.
///
/// # Errors
/// If the format refuses it: an empty command, or no tokens a page.
pub fn namespace(command: &str, page_tokens: u32, shape: PageShape) -> Result<Namespace, Failure> {
    let fields = NamespaceFields {
        model: command.to_owned(),
        weights: MADE_UP.to_owned(),
        dtype: "bytes".to_owned(),
        layout: "page_first_direct".to_owned(),
        page_tokens,
        shape,
        tp: Rank::ALONE,
        pp: Rank::ALONE,
        cp: Rank::ALONE,
        pool: "kv".to_owned(),
        extra: BTreeMap::new(),
    };
    Namespace::new(fields).map_err(|error| Failure::usage(format!("namespace {command}: {error}")))
}

/// The namespace of a command whose pages go through the tiers.
///
/// # Errors
/// When a page is too large.
pub fn model_namespace(command: &str, shape: &KvShape) -> Result<Namespace, Failure> {
    let namespace =
        Model::new(command, MADE_UP, "bytes", *shape).namespace(Layout::PageFirstDirect);
    namespace.map_err(|error| Failure::usage(format!("namespace {command}: {error}")))
}

/// The words of one part of one page, or of a piece of it.
#[derive(Clone, Copy)]
pub struct Words {
    start: u64,
    salt: u64,
}

impl Words {
    fn of(key: &PageKey, part: usize) -> Self {
        let half = |index: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&key.as_bytes()[index..index + 8]);
            u64::from_le_bytes(bytes)
        };
        let first = (part as u64).wrapping_mul(PART_WORDS).wrapping_mul(STRIDE);
        Words {
            start: half(0).wrapping_add(first),
            salt: half(8),
        }
    }

    /// The words for these numbers.
    pub fn named(numbers: [u64; 4]) -> Self {
        let mix = |state: u64, number: u64| {
            let mixed = (state ^ number).wrapping_mul(STRIDE);
            (mixed ^ (mixed >> 29)).wrapping_mul(MIX)
        };
        let start = numbers.into_iter().fold(STRIDE, mix);
        Words {
            start,
            salt: mix(start, 0),
        }
    }

    /// The bytes of step `step`, counted from the start of the part.
    #[inline(always)]
    fn step(self, step: usize) -> [u64; LANES] {
        let first = self
            .start
            .wrapping_add((step as u64).wrapping_mul(STRIDE.wrapping_mul(LANES as u64)));
        let mut lanes = [0; LANES];
        for (index, lane) in lanes.iter_mut().enumerate() {
            let word = first.wrapping_add(STRIDE.wrapping_mul(index as u64));
            *lane = (word ^ (word >> 31)).wrapping_add(self.salt).to_le();
        }
        lanes
    }

    #[inline(always)]
    fn fill_step(self, step: usize, bytes: &mut [u8; STEP_BYTES]) {
        let (words, _) = bytes.as_chunks_mut();
        for (word, lane) in words.iter_mut().zip(self.step(step)) {
            *word = lane.to_ne_bytes();
        }
    }

    fn step_bytes(self, step: usize) -> [u8; STEP_BYTES] {
        let mut bytes = [0; STEP_BYTES];
        self.fill_step(step, &mut bytes);
        bytes
    }

    /// Writes the words.
    pub fn fill(self, part: &mut [u8]) {
        let (steps, tail) = part.as_chunks_mut();
        let count = steps.len();
        for (step, bytes) in steps.iter_mut().enumerate() {
            self.fill_step(step, bytes);
        }
        tail.copy_from_slice(&self.step_bytes(count)[..tail.len()]);
    }

    /// Whether `part` holds these words.
    pub fn match_part(self, part: &[u8]) -> bool {
        let mut step = 0;
        for block in part.chunks(COMPARE_BYTES) {
            let (steps, tail) = block.as_chunks::<STEP_BYTES>();
            let mut difference = [0; LANES];
            for bytes in steps {
                let (words, _) = bytes.as_chunks();
                let expected = self.step(step);
                for ((difference, word), lane) in difference.iter_mut().zip(words).zip(expected) {
                    *difference |= u64::from_ne_bytes(*word) ^ lane;
                }
                step += 1;
            }
            if difference != [0; LANES] || *tail != self.step_bytes(step)[..tail.len()] {
                return false;
            }
        }
        true
    }
}

/// The content of pages.
#[derive(Clone, Debug, Default)]
pub enum Content {
    /// Words that follow from key, part and place. No codec makes them smaller.
    #[default]
    Words,
    /// Pieces of these bytes, chosen by the key: KV of a model, for example.
    Pieces(Arc<[u8]>),
}

impl Content {
    /// The pieces of a file, which has a part of a page at least. Words without a file.
    ///
    /// # Errors
    /// If it cannot be read, or is too short.
    pub fn of(file: Option<&Path>, shape: &PageShape) -> Result<Self, Failure> {
        let Some(path) = file else {
            return Ok(Content::Words);
        };
        let failed = |why: String| Failure::usage(format!("{}: {why}", path.display()));
        let bytes = fs::read(path).map_err(|error| failed(error.to_string()))?;
        let part = (0..shape.parts()).map(|part| shape.part_bytes(part)).max();
        if bytes.len() < part.unwrap_or(0) as usize {
            return Err(failed("it is shorter than a part of a page".to_owned()));
        }
        Ok(Content::Pieces(bytes.into()))
    }

    fn fill(&self, key: &PageKey, part: usize, out: &mut [u8]) {
        match self {
            Content::Words => Words::of(key, part).fill(out),
            Content::Pieces(bytes) => out.copy_from_slice(piece(bytes, key, part, out.len())),
        }
    }

    fn is(&self, key: &PageKey, part: usize, found: &[u8]) -> bool {
        match self {
            Content::Words => Words::of(key, part).match_part(found),
            Content::Pieces(bytes) => found == piece(bytes, key, part, found.len()),
        }
    }
}

/// The piece of a part of a page. Pieces begin at whole blocks.
fn piece<'a>(bytes: &'a [u8], key: &PageKey, part: usize, length: usize) -> &'a [u8] {
    let starts = (bytes.len() - length) / larder_format::BLOCK_BYTES + 1;
    let drawn = Words::of(key, part).start % starts as u64;
    let start = usize::try_from(drawn).unwrap_or(0) * larder_format::BLOCK_BYTES;
    &bytes[start..start + length]
}

/// A page of a chain: its key and where it stands.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// Its key.
    pub key: PageKey,
    /// The key before it.
    pub parent: Option<PageKey>,
    /// Pages before it.
    pub depth: u32,
}

/// The links of a whole chain.
pub fn links(keys: &[PageKey]) -> Vec<Link> {
    let parents = std::iter::once(None).chain(keys.iter().copied().map(Some));
    keys.iter()
        .zip(parents)
        .zip(0..)
        .map(|((key, parent), depth)| Link {
            key: *key,
            parent,
            depth,
        })
        .collect()
}

/// Space for a number of pages of one shape, in huge-page backed memory: contiguous parts, each
/// aligned for direct I/O.
pub struct PageBuffers {
    /// For the life of the process, as a server's host pool is.
    memory: &'static mut [u8],
    content: Content,
    shape: PageShape,
    slots: usize,
    slot_bytes: usize,
}

impl PageBuffers {
    /// Space for `slots` pages. All of it is touched already, so that no page fault is measured
    /// later.
    ///
    /// # Errors
    /// If there is no such memory.
    pub fn new(shape: &PageShape, slots: usize) -> Result<Self, Failure> {
        let slot_bytes = shape.page_blocks() as usize * larder_format::BLOCK_BYTES;
        let memory = slots
            .checked_mul(slot_bytes)
            .ok_or_else(|| io::ErrorKind::OutOfMemory.into());
        let memory = memory.and_then(AlignedBuf::zeroed).map_err(|error| {
            let bytes = ByteSize((slots as u64).saturating_mul(slot_bytes as u64));
            Failure::environment(format!(
                "no memory for {slots} pages ({bytes}): {error}; raise the limit on it, or ask for \
                 fewer or smaller pages"
            ))
        })?;
        let memory = larder_base::memory::leak(memory);
        memory.fill(0xa5);
        Ok(PageBuffers {
            memory,
            content: Content::Words,
            shape: *shape,
            slots,
            slot_bytes,
        })
    }

    /// These buffers, for pages with this content.
    #[must_use]
    pub fn with(mut self, content: Content) -> Self {
        self.content = content;
        self
    }

    /// Registers the memory with the store's disk.
    pub fn register(&mut self, store: &dyn PageStore) {
        let (memory, _) = store.register(std::mem::take(&mut self.memory));
        self.memory = memory;
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Start of the memory, for probing its page size.
    pub fn address(&self) -> *const u8 {
        self.memory.as_ptr()
    }

    /// The byte range of a part within its slot.
    fn part_range(&self, part: usize) -> std::ops::Range<usize> {
        let start = usize::try_from(self.shape.part_offset(part)).unwrap_or(usize::MAX);
        start..start.saturating_add(self.shape.part_bytes(part) as usize)
    }

    /// Makes the bytes of page `key` in `slot`.
    pub fn fill(&mut self, slot: usize, key: &PageKey) {
        for part in 0..self.shape.parts() {
            let range = self.part_range(part);
            let start = slot * self.slot_bytes;
            let part_memory = &mut self.memory[start + range.start..start + range.end];
            self.content.fill(key, part, part_memory);
        }
    }

    /// Whether `slot` holds exactly the bytes of page `key`.
    pub fn holds(&self, slot: usize, key: &PageKey) -> bool {
        let bytes = &self.memory[slot * self.slot_bytes..][..self.slot_bytes];
        (0..self.shape.parts())
            .all(|part| self.content.is(key, part, &bytes[self.part_range(part)]))
    }

    /// Makes the bytes of `pages`, at most as many as there are slots, and then puts them, `batch`
    /// a call. The meter counts the store's calls alone.
    pub fn put(
        &mut self,
        store: &dyn PageStore,
        namespace: NamespaceId,
        pages: &[Link],
        batch: usize,
        meter: &mut Meter,
    ) -> Vec<PutStatus> {
        assert!(pages.len() <= self.slots, "the pages fit the buffers");
        for (slot, page) in pages.iter().enumerate() {
            self.fill(slot, &page.key);
        }
        let slots = self.memory.chunks_exact(self.slot_bytes).take(pages.len());
        let part_count = self.shape.parts();
        let parts: Vec<IoSlice<'_>> = slots
            .flat_map(|slot| (0..part_count).map(move |part| (slot, part)))
            .map(|(slot, part)| IoSlice::new(&slot[self.part_range(part)]))
            .collect();
        let pages: Vec<PutPage<'_>> = pages
            .iter()
            .zip(parts.chunks_exact(part_count))
            .map(|(page, parts)| PutPage {
                key: page.key,
                parent: page.parent,
                depth: page.depth,
                parts,
            })
            .collect();
        let calls = pages.chunks(batch);
        calls
            .flat_map(|pages| meter.measure(|| store.put(namespace, pages, patient())))
            .collect()
    }

    /// Reads the pages `keys`, at most as many as there are slots, `batch` a call; page `i` goes to
    /// slot `i`. The meter counts the store's calls alone.
    pub fn get(
        &mut self,
        store: &dyn PageStore,
        namespace: NamespaceId,
        keys: &[PageKey],
        batch: usize,
        meter: &mut Meter,
    ) -> Vec<GetStatus> {
        assert!(keys.len() <= self.slots, "the pages fit the buffers");
        let part_count = self.shape.parts();
        let ranges: Vec<_> = (0..part_count).map(|part| self.part_range(part)).collect();
        let mut parts = Vec::with_capacity(keys.len() * part_count);
        for mut slot in self
            .memory
            .chunks_exact_mut(self.slot_bytes)
            .take(keys.len())
        {
            let mut taken = 0;
            for range in &ranges {
                let (part, rest) = slot.split_at_mut(range.end - taken);
                parts.push(IoSliceMut::new(&mut part[range.start - taken..]));
                (slot, taken) = (rest, range.end);
            }
        }
        let mut pages: Vec<GetPage<'_, '_>> = keys
            .iter()
            .zip(parts.chunks_exact_mut(part_count))
            .map(|(key, parts)| GetPage { key: *key, parts })
            .collect();
        let calls = pages.chunks_mut(batch);
        calls
            .flat_map(|pages| meter.measure(|| store.get(namespace, pages, None)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn buffers(part_bytes: &[u32], slots: usize) -> PageBuffers {
        PageBuffers::new(&PageShape::new(part_bytes).unwrap(), slots).unwrap()
    }

    #[test]
    fn a_page_holds_its_own_bytes_and_no_other_pages() {
        let keys = chain(&[1, 2, 3]);
        let mut buffers = buffers(&[8192, 100, 4097], 3);
        for (slot, key) in keys.iter().enumerate() {
            buffers.fill(slot, key);
        }
        for (slot, _) in keys.iter().enumerate() {
            let held: Vec<usize> = (0..3)
                .filter(|other| buffers.holds(slot, &keys[*other]))
                .collect();
            assert_eq!(held, [slot]);
        }
    }

    #[test]
    fn any_changed_byte_is_noticed() {
        let key = chain(&[7])[0];
        let mut buffers = buffers(&[4096, 133], 1);
        buffers.fill(0, &key);
        for at in (0..4096)
            .step_by(97)
            .chain([4095, 4096, 4096 + 63, 4096 + 64, 4096 + 132])
        {
            buffers.memory[at] ^= 0x10;
            assert!(!buffers.holds(0, &key), "byte {at}");
            buffers.memory[at] ^= 0x10;
        }
        assert!(buffers.holds(0, &key));
    }

    #[test]
    fn swapped_parts_and_shifted_blocks_are_noticed() {
        let key = chain(&[7])[0];
        let mut buffers = buffers(&[8192, 8192], 1);
        buffers.fill(0, &key);
        let good = buffers.memory.to_vec();
        buffers.memory[..8192].copy_from_slice(&good[8192..]);
        buffers.memory[8192..].copy_from_slice(&good[..8192]);
        assert!(!buffers.holds(0, &key));
        buffers.memory.copy_from_slice(&good);
        buffers.memory[..4096].copy_from_slice(&good[4096..8192]);
        assert!(!buffers.holds(0, &key));
    }

    #[test]
    fn keys_chain_so_that_equal_prefixes_and_nothing_else_share_them() {
        let (one, two) = (chain(&[1, 2, 3, 9]), chain(&[1, 2, 4, 9]));
        assert_eq!(one[..2], two[..2]);
        assert!(one[2..].iter().all(|key| !two.contains(key)));
        let links = links(&one);
        assert_eq!((links[0].parent, links[0].depth), (None, 0));
        assert_eq!((links[3].parent, links[3].depth), (Some(one[2]), 3));
    }

    #[test]
    fn shapes_that_cannot_be_are_refused_with_the_options_to_change() {
        for (page_bytes, parts) in [(4096, 0), (4097, 2), (0, 1), (4096, 4096), (1 << 40, 1)] {
            let error = shape(ByteSize(page_bytes), parts)
                .err()
                .unwrap()
                .to_string();
            assert!(error.contains("choose other --page-bytes"), "{error}");
        }
        assert_eq!(shape(ByteSize(4 << 20), 2).unwrap().part_bytes(1), 2 << 20);
    }
}
