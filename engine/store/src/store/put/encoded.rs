//! The pages of a window as a codec or a cipher made them.

use std::ops::Range;

use larder_base::memory::AlignedBuf;
use larder_core::counters::Counts;
use larder_disk::Piece;
use larder_format::{BLOCK_BYTES, PageChecksum, PageKey, Proof};

use super::{Call, read};
use crate::keys::with_salts;
use crate::store::coding::ENCODED_BYTES;

/// Encoded or encrypted pages, one after the other in one piece of memory.
#[derive(Default)]
pub(super) struct Encoded {
    memory: Option<AlignedBuf>,
    /// By position in the asks; `None` for a plain page.
    pages: Vec<Option<Page>>,
}

struct Page {
    bytes: Range<usize>,
    saved: u32,
    proof: Proof,
}

impl Encoded {
    fn page(&self, ask: usize) -> Option<&Page> {
        self.pages.get(ask)?.as_ref()
    }

    /// Blocks that the codec saved of a page.
    pub(super) fn saved(&self, ask: usize) -> u32 {
        self.page(ask).map_or(0, |page| page.saved)
    }

    /// The proofs of the encoded pages among so many.
    pub(super) fn proofs(&self, asks: usize) -> Vec<Option<Proof>> {
        let proof = |ask| self.page(ask).map(|page| page.proof);
        (0..asks).map(proof).collect()
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
    /// makes them smaller. A page that is evicted after the look at the index is written plain. In
    /// an encrypted store all of these pages are encrypted, and the others are not written.
    pub(super) fn encode(&mut self, members: &[usize]) -> Encoded {
        let mut encoded = Encoded::default();
        let (page_bytes, encoding) = (self.page_bytes(), &self.data.encoding);
        let key = match self.shape.tenant.as_ref().map(|tenant| tenant.current()) {
            Some(None) => return encoded,
            Some(key) => key,
            None => None,
        };
        let encoder = self.shape.encoder.as_ref();
        let encoder = encoder.filter(|_| page_bytes <= ENCODED_BYTES);
        if encoder.is_none() && key.is_none() {
            return encoded;
        }
        let takes = || encoder.is_some_and(|encoder| encoder.takes());
        let keys: Vec<PageKey> = members.iter().map(|&index| self.pages[index].key).collect();
        let is_stored = self.putting.peek(&keys);
        let new = (0..members.len()).filter(|&at| !is_stored.get(at).copied().unwrap_or(false));
        let new = new.map(|at| (at, takes()));
        let new: Vec<(usize, bool)> = new.filter(|(_, takes)| *takes || key.is_some()).collect();
        let Some(mut memory) = encoding.memory(new.len() * page_bytes) else {
            return encoded;
        };
        encoded.pages.resize_with(members.len(), || None);
        let (mut end, mut counts) = (0, Counts::default());
        with_salts(new.len(), |salts| {
            for (at, takes) in new {
                let Some(_reading) = read(self.recall) else {
                    break;
                };
                let page = &self.pages[members[at]];
                let parts: Vec<&[u8]> = page.parts.iter().map(|part| &**part).collect();
                let into = &mut memory[end..];
                let made = takes.then(|| {
                    let _timed = encoding.times.timed();
                    encoding.codec.encode(&parts, BLOCK_BYTES, into)
                });
                let made = made.flatten();
                let bytes = end..end + made.unwrap_or(page_bytes);
                if let (Some(encoder), true) = (encoder, takes) {
                    encoder.took(blocks(page_bytes), blocks(bytes.len()));
                }
                if made.is_none() && key.is_none() {
                    continue;
                }
                let mut checksum = PageChecksum::new(self.shape.fingerprint, &page.key);
                let stored = &mut memory[bytes.clone()];
                let seal = match &key {
                    None => {
                        checksum.blocks(stored);
                        None
                    }
                    Some(key) => {
                        let name = self.shape.name_of(&page.key, stored.len());
                        let each = |stored: &[u8]| checksum.blocks(stored);
                        let sealed = match made {
                            Some(_) => key.seal(salts, &name, stored, each),
                            None => key.seal_parts(salts, &name, &parts, stored, each),
                        };
                        match sealed {
                            Ok(seal) => Some(seal),
                            Err(error) => {
                                self.data.notices.unsealed(&error);
                                continue;
                            }
                        }
                    }
                };
                if made.is_some() {
                    counts.encoded_plain_bytes += page_bytes as u64;
                    counts.encoded_stored_bytes += bytes.len() as u64;
                }
                end = bytes.end;
                encoded.pages[at] = Some(Page {
                    saved: blocks(page_bytes - bytes.len()),
                    proof: Proof {
                        checksum: checksum.finish(),
                        seal,
                    },
                    bytes,
                });
            }
        });
        self.data.counters.calls.add(counts);
        encoded.memory = Some(memory);
        encoded
    }
}

fn blocks(bytes: usize) -> u32 {
    u32::try_from(bytes / BLOCK_BYTES).unwrap_or(u32::MAX)
}
