//! A page as blocks and entries.

use std::mem;
use std::ops::Range;

use thiserror::Error;

use crate::block::{BLOCK_BYTES, ENTRY_BYTES, Entry, Stored, base_of, is_whole};
use crate::forms::Form;

/// Encodes and decodes pages.
#[derive(Clone, Copy, Debug)]
pub struct Codec {
    form: Form,
}

/// Bytes that no encoder wrote for a page of this length, or that a decoder misread.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Malformed {
    /// The stream is too short for its entries, or these state more bytes than it has.
    #[error("a page of {plain} bytes cannot have this stream of {stored} bytes")]
    Length {
        /// Bytes of the page.
        plain: usize,
        /// Bytes of the stream.
        stored: usize,
    },
    /// An entry has values that are never written.
    #[error("the entry of block {block} has values that are never written")]
    Entry {
        /// The block's place in the page.
        block: usize,
    },
    /// The codes of a block have another number of escapes than its entry states.
    #[error("block {block} has another number of escapes than its entry states")]
    Escapes {
        /// The block's place in the page.
        block: usize,
    },
    /// The values of a block have another sum than its entry states.
    #[error("the values of block {block} have another sum than its entry states")]
    Sum {
        /// The block's place in the page.
        block: usize,
    },
}

impl Codec {
    /// The fastest form of this processor.
    #[must_use]
    pub fn new() -> Self {
        Self { form: Form::best() }
    }

    /// A given form.
    #[must_use]
    pub fn of(form: Form) -> Self {
        Self { form }
    }

    /// Writes the stream of a page, whose bytes are those of all `parts`, to the start of `into`,
    /// which has at least as many bytes as the page. Its length is a multiple of `unit`.
    ///
    /// Returns the length, or `None` if the plain page has no more units than its stream.
    ///
    /// # Panics
    ///
    /// If `into` is shorter than the page, or `unit` is zero.
    #[must_use]
    pub fn encode(&self, parts: &[&[u8]], unit: usize, into: &mut [u8]) -> Option<usize> {
        let plain_bytes = parts.iter().map(|part| part.len()).sum();
        assert!(into.len() >= plain_bytes, "a buffer shorter than the page");
        let entry_bytes = plain_bytes.div_ceil(BLOCK_BYTES) * ENTRY_BYTES;
        let most = (plain_bytes.div_ceil(unit) * unit).checked_sub(unit)?;
        let mut plain = Gather {
            parts: parts.iter().copied(),
            part: &[],
            block: Vec::new(),
        };
        let (mut entries, mut at) = (Vec::with_capacity(entry_bytes), 0);
        for block in lengths(plain_bytes) {
            let entry = self.encode_block(plain.next(block), &mut into[at..]);
            entries.extend(entry.encode());
            at += entry.stored.bytes(block);
            if at + entry_bytes > most {
                return None;
            }
        }
        let length = (at + entry_bytes).next_multiple_of(unit);
        let (zeros, last) = into[at..length].split_at_mut(length - at - entry_bytes);
        zeros.fill(0);
        last.copy_from_slice(&entries);
        Some(length)
    }

    fn encode_block(&self, plain: &[u8], into: &mut [u8]) -> Entry {
        if is_whole(plain.len()) {
            let base = base_of(plain);
            if let Some((escapes, sum)) = self.form.encode(plain, base, into) {
                // Fewer than the values of a block.
                return Entry {
                    stored: Stored::Coded {
                        base,
                        escapes: escapes as u16,
                    },
                    sum,
                };
            }
        }
        into[..plain.len()].copy_from_slice(plain);
        Entry {
            stored: Stored::Raw,
            sum: self.form.sum(plain),
        }
    }

    /// Reads a page from its stream into the memory of `parts`. After an error that memory has
    /// bytes without a meaning.
    ///
    /// # Errors
    ///
    /// If the stream is not one of a page of this length.
    pub fn decode(&self, stream: &[u8], parts: &mut [&mut [u8]]) -> Result<(), Malformed> {
        let plain_bytes = parts.iter().map(|part| part.len()).sum();
        let blocks_max = blocks_max(stream.len(), plain_bytes)?;
        let (entries, _) = entries_of(&stream[blocks_max..], stream.len(), plain_bytes)?;
        let mut into = Scatter {
            parts: parts.iter_mut(),
            part: &mut [],
            block: Vec::new(),
        };
        let mut rest = stream;
        for (block, (entry, plain)) in entries.iter().zip(lengths(plain_bytes)).enumerate() {
            let (stored, later) = rest.split_at(entry.stored.bytes(plain));
            rest = later;
            into.next(plain, |plain| {
                self.decode_block(block, *entry, stored, plain)
            })?;
        }
        Ok(())
    }

    /// Reads a page from its stream, which is the first `stored` bytes of `page`. After an error
    /// `page` has bytes without a meaning.
    ///
    /// # Errors
    ///
    /// If the stream is not one of a page of this length.
    pub fn decode_in_place(&self, page: &mut [u8], stored: usize) -> Result<(), Malformed> {
        let plain_bytes = page.len();
        let stream = page.get(..stored).ok_or(Malformed::Length {
            plain: plain_bytes,
            stored,
        })?;
        let blocks_max = blocks_max(stored, plain_bytes)?;
        let (entries, mut end) = entries_of(&stream[blocks_max..], stored, plain_bytes)?;
        let mut copy = [0; BLOCK_BYTES];
        for (block, entry) in entries.iter().enumerate().rev() {
            let first = block * BLOCK_BYTES;
            let last = plain_bytes.min(first + BLOCK_BYTES);
            let start = end - entry.stored.bytes(last - first);
            // The processor follows no stream of addresses from a block to the one before it.
            self.form
                .fetch(&page[start.saturating_sub(BLOCK_BYTES)..start]);
            self.form
                .fetch(&page[first.saturating_sub(BLOCK_BYTES)..first]);
            // No block is longer than its plain bytes, so neither are all before this one.
            if end <= first {
                let (before, plain) = page.split_at_mut(first);
                let plain = &mut plain[..last - first];
                self.decode_block(block, *entry, &before[start..end], plain)?;
            } else {
                let copy = &mut copy[..end - start];
                copy.copy_from_slice(&page[start..end]);
                self.decode_block(block, *entry, copy, &mut page[first..last])?;
            }
            end = start;
        }
        Ok(())
    }

    /// The same for a page in several parts: its stream is the first `stored` bytes of all parts
    /// together. Each block is copied once more than in a page of one part.
    ///
    /// # Errors
    /// As [`Codec::decode_in_place`].
    pub fn decode_in_parts(&self, parts: &mut [&mut [u8]], stored: usize) -> Result<(), Malformed> {
        if let [page] = parts {
            return self.decode_in_place(page, stored);
        }
        let plain_bytes = parts.iter().map(|part| part.len()).sum();
        if stored > plain_bytes {
            return Err(Malformed::Length {
                plain: plain_bytes,
                stored,
            });
        }
        let blocks_max = blocks_max(stored, plain_bytes)?;
        let mut entries = vec![0; stored - blocks_max];
        copy_out(parts, blocks_max, &mut entries);
        let (entries, mut end) = entries_of(&entries, stored, plain_bytes)?;
        let (mut copy, mut apart) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
        for (block, entry) in entries.iter().enumerate().rev() {
            let first = block * BLOCK_BYTES;
            let last = plain_bytes.min(first + BLOCK_BYTES);
            let start = end - entry.stored.bytes(last - first);
            let stored = &mut copy[..end - start];
            copy_out(parts, start, stored);
            match within(parts, first..last) {
                Some(plain) => self.decode_block(block, *entry, stored, plain)?,
                None => {
                    let plain = &mut apart[..last - first];
                    self.decode_block(block, *entry, stored, plain)?;
                    copy_in(parts, first, plain);
                }
            }
            end = start;
        }
        Ok(())
    }

    fn decode_block(
        &self,
        block: usize,
        entry: Entry,
        stored: &[u8],
        plain: &mut [u8],
    ) -> Result<(), Malformed> {
        let sum = match entry.stored {
            Stored::Raw => {
                plain.copy_from_slice(stored);
                self.form.sum(plain)
            }
            Stored::Coded { base, .. } => self
                .form
                .decode(stored, base, plain)
                .ok_or(Malformed::Escapes { block })?,
        };
        if sum == entry.sum {
            Ok(())
        } else {
            Err(Malformed::Sum { block })
        }
    }
}

impl Default for Codec {
    fn default() -> Self {
        Self::new()
    }
}

/// The plain lengths of the blocks of a page.
fn lengths(plain_bytes: usize) -> impl Iterator<Item = usize> {
    let starts = (0..plain_bytes).step_by(BLOCK_BYTES);
    starts.map(move |start| BLOCK_BYTES.min(plain_bytes - start))
}

/// Most bytes that the blocks of a stream have.
fn blocks_max(stored: usize, plain: usize) -> Result<usize, Malformed> {
    let entry_bytes = plain.div_ceil(BLOCK_BYTES) * ENTRY_BYTES;
    let length = Malformed::Length { plain, stored };
    stored.checked_sub(entry_bytes).ok_or(length)
}

/// The entries of a stream of `stored` bytes, whose blocks lie before them, and the end of its
/// blocks.
fn entries_of(
    bytes: &[u8],
    stored: usize,
    plain_bytes: usize,
) -> Result<(Vec<Entry>, usize), Malformed> {
    let (entries, _) = bytes.as_chunks::<ENTRY_BYTES>();
    let (mut found, mut end) = (Vec::with_capacity(entries.len()), 0);
    for (block, (entry, plain)) in entries.iter().zip(lengths(plain_bytes)).enumerate() {
        let entry = Entry::decode(*entry, plain).ok_or(Malformed::Entry { block })?;
        end += entry.stored.bytes(plain);
        found.push(entry);
    }
    if end + bytes.len() > stored {
        return Err(Malformed::Length {
            plain: plain_bytes,
            stored,
        });
    }
    Ok((found, end))
}

/// The bytes of some parts at a range, if they lie in one part.
fn within<'a>(parts: &'a mut [&mut [u8]], range: Range<usize>) -> Option<&'a mut [u8]> {
    let mut begin = 0;
    for part in parts {
        let end = begin + part.len();
        if range.start < end {
            return part.get_mut(range.start - begin..range.end - begin);
        }
        begin = end;
    }
    None
}

/// Copies bytes out of parts, from a position among all their bytes on.
fn copy_out(parts: &[&mut [u8]], mut from: usize, mut into: &mut [u8]) {
    for part in parts {
        let some = part.get(from..).unwrap_or_default();
        from = from.saturating_sub(part.len());
        let (now, later) = into.split_at_mut(some.len().min(into.len()));
        now.copy_from_slice(&some[..now.len()]);
        into = later;
    }
}

/// Copies bytes into parts, from a position among all their bytes on.
fn copy_in(parts: &mut [&mut [u8]], mut at: usize, mut bytes: &[u8]) {
    for part in parts {
        let length = part.len();
        let some = part.get_mut(at..).unwrap_or_default();
        at = at.saturating_sub(length);
        let (now, later) = bytes.split_at(some.len().min(bytes.len()));
        some[..now.len()].copy_from_slice(now);
        bytes = later;
    }
}

/// Takes blocks from the parts of a page. A block in several parts is copied.
struct Gather<'a, Parts> {
    parts: Parts,
    part: &'a [u8],
    block: Vec<u8>,
}

impl<'a, Parts: Iterator<Item = &'a [u8]>> Gather<'a, Parts> {
    /// The next bytes. The parts must have so many.
    fn next(&mut self, bytes: usize) -> &[u8] {
        self.skip_empty();
        if let Some(whole) = self.part.split_off(..bytes) {
            return whole;
        }
        self.block.clear();
        while self.block.len() < bytes {
            let wanted = self.part.len().min(bytes - self.block.len());
            let (taken, rest) = self.part.split_at(wanted);
            self.block.extend_from_slice(taken);
            self.part = rest;
            self.skip_empty();
        }
        &self.block
    }

    fn skip_empty(&mut self) {
        while self.part.is_empty()
            && let Some(next) = self.parts.next()
        {
            self.part = next;
        }
    }
}

/// Puts blocks into the parts of a page. A block in several parts is copied.
struct Scatter<'a, Parts> {
    parts: Parts,
    part: &'a mut [u8],
    block: Vec<u8>,
}

impl<'a, 'p: 'a, Parts: Iterator<Item = &'a mut &'p mut [u8]>> Scatter<'a, Parts> {
    /// Fills the next bytes. The parts must have so many.
    fn next<E>(
        &mut self,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.skip_empty();
        if let Some(whole) = self.part.split_off_mut(..bytes) {
            return fill(whole);
        }
        self.block.resize(bytes, 0);
        fill(&mut self.block)?;
        let mut rest = mem::take(&mut self.block);
        let mut from = &rest[..];
        while !from.is_empty() {
            let (taken, later) = from.split_at(self.part.len().min(from.len()));
            let part = mem::take(&mut self.part);
            let (into, part) = part.split_at_mut(taken.len());
            into.copy_from_slice(taken);
            self.part = part;
            from = later;
            self.skip_empty();
        }
        rest.clear();
        self.block = rest;
        Ok(())
    }

    fn skip_empty(&mut self) {
        while self.part.is_empty()
            && let Some(next) = self.parts.next()
        {
            self.part = next;
        }
    }
}
