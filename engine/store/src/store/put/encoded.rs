//! The pages of a window as a codec made them.

use std::ops::Range;

use larder_base::memory::AlignedBuf;
use larder_core::counters::Counts;
use larder_disk::Piece;
use larder_format::{BLOCK_BYTES, PageChecksum, PageKey};

use super::{Call, read};
use crate::store::coding::ENCODED_BYTES;

/// Encoded pages, one after the other in one piece of memory.
#[derive(Default)]
pub(super) struct Encoded {
    memory: Option<AlignedBuf>,
    /// By position in the asks; `None` for a plain page.
    pages: Vec<Option<Page>>,
}

struct Page {
    bytes: Range<usize>,
    saved: u32,
    checksum: u64,
}

impl Encoded {
    fn page(&self, ask: usize) -> Option<&Page> {
        self.pages.get(ask)?.as_ref()
    }

    /// Blocks that the codec saved of a page.
    pub(super) fn saved(&self, ask: usize) -> u32 {
        self.page(ask).map_or(0, |page| page.saved)
    }

    /// The checksums of the encoded pages among so many.
    pub(super) fn checksums(&self, asks: usize) -> Vec<Option<u64>> {
        let checksum = |ask| self.page(ask).map(|page| page.checksum);
        (0..asks).map(checksum).collect()
    }

    /// The bytes of a page, if it was encoded.
    pub(super) fn piece(&self, ask: usize) -> Option<Piece> {
        let bytes = self.memory.as_ref()?.get(self.page(ask)?.bytes.clone())?;
        Some(Piece {
            ptr: bytes.as_ptr().cast_mut(),
            len: bytes.len(),
        })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.len())
    }

    pub(super) fn into_memory(self) -> Option<AlignedBuf> {
        self.memory
    }
}

impl Call<'_> {
    /// Encodes the pages at these positions that are not stored yet, as far as a codec is on and
    /// makes them smaller. A page that is evicted after the look at the index is written plain.
    pub(super) fn encode(&mut self, members: &[usize]) -> Encoded {
        let mut encoded = Encoded::default();
        let Some(encoder) = &self.shape.encoder else {
            return encoded;
        };
        let (page_bytes, encoding) = (self.page_bytes(), &self.data.encoding);
        if page_bytes > ENCODED_BYTES {
            return encoded;
        }
        let keys: Vec<PageKey> = members.iter().map(|&index| self.pages[index].key).collect();
        let is_stored = self.putting.peek(&keys);
        let new: Vec<usize> = (0..members.len())
            .filter(|&at| !is_stored.get(at).copied().unwrap_or(false) && encoder.takes())
            .collect();
        let Some(mut memory) = encoding.memory(new.len() * page_bytes) else {
            return encoded;
        };
        encoded.pages.resize_with(members.len(), || None);
        let (mut end, mut counts) = (0, Counts::default());
        for at in new {
            let Some(_reading) = read(self.recall) else {
                break;
            };
            let page = &self.pages[members[at]];
            let timed = encoding.times.timed();
            let parts: Vec<&[u8]> = page.parts.iter().map(|part| &**part).collect();
            let into = &mut memory[end..];
            let made = encoding.codec.encode(&parts, BLOCK_BYTES, into);
            drop(timed);
            let bytes = end..end + made.unwrap_or(page_bytes);
            encoder.took(blocks(page_bytes), blocks(bytes.len()));
            if made.is_none() {
                continue;
            }
            let mut checksum = PageChecksum::new(self.shape.fingerprint, &page.key);
            checksum.blocks(&memory[bytes.clone()]);
            counts.encoded_plain_bytes += page_bytes as u64;
            counts.encoded_stored_bytes += bytes.len() as u64;
            end = bytes.end;
            encoded.pages[at] = Some(Page {
                saved: blocks(page_bytes - bytes.len()),
                checksum: checksum.finish(),
                bytes,
            });
        }
        self.data.counters.calls.add(counts);
        encoded.memory = Some(memory);
        encoded
    }
}

fn blocks(bytes: usize) -> u32 {
    u32::try_from(bytes / BLOCK_BYTES).unwrap_or(u32::MAX)
}
