//! The pages of a window as a codec or a cipher made them.

use std::ops::Range;
use std::sync::Arc;

use larder_base::memory::AlignedBuf;
use larder_core::counters::Counts;
use larder_core::grants::Grant;
use larder_disk::Piece;
use larder_format::{BLOCK_BYTES, PageChecksum, PageKey, Proof};
use larder_seal::TenantKey;

use super::{Call, read};
use crate::encoder::{Encoder, sealed_unit};
#[cfg(feature = "simulated")]
use crate::keys::simulated::{SealedPage, note};
use crate::keys::with_salts;
use crate::store::coding::ENCODED_BYTES;

/// Encoded or encrypted pages, one after the other in few pieces of memory.
#[derive(Default)]
pub(super) struct Encoded {
    memory: Vec<AlignedBuf>,
    /// By position in the asks; `None` for a plain page.
    pages: Vec<Option<Page>>,
}

struct Page {
    /// The piece of memory, and the bytes in it.
    memory: usize,
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
        let page = self.page(ask)?;
        let bytes = self.memory.get(page.memory)?.get(page.bytes.clone())?;
        Some(Piece {
            ptr: bytes.as_ptr().cast_mut(),
            len: bytes.len(),
        })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.memory.iter().map(|memory| memory.len()).sum()
    }

    pub(super) fn into_memory(self) -> Vec<AlignedBuf> {
        self.memory
    }
}

impl Call<'_> {
    /// Encodes the pages at these positions that are not stored yet, as far as a codec is on and
    /// makes them smaller. A page that is evicted after the look at the index is written plain. In
    /// an encrypted store all of these pages are encrypted, and the others are not written.
    pub(super) fn encode(&mut self, members: &[usize]) -> Encoded {
        let mut encoded = Encoded::default();
        let encoder = self.encoder();
        if encoder.is_none() && self.shape.tenant.is_none() {
            return encoded;
        }
        let takes = || encoder.as_ref().is_some_and(|encoder| encoder.takes());
        let keys: Vec<PageKey> = members.iter().map(|&index| self.pages[index].key).collect();
        let is_stored = self.putting.peek(&keys);
        let new = (0..members.len()).filter(|&at| !is_stored.get(at).copied().unwrap_or(false));
        let new = new.map(|at| (at, takes()));
        let is_sealed = self.shape.tenant.is_some();
        let new: Vec<(usize, bool)> = new.filter(|(_, takes)| *takes || is_sealed).collect();
        self.fill(&mut encoded, members, new);
        encoded
    }

    /// In an encrypted store: encrypts the granted pages that are not encrypted yet. The catalog
    /// held them when it was asked, and has no use for them: they were not proven, or were evicted
    /// since.
    pub(super) fn encrypt(&mut self, encoded: &mut Encoded, members: &[usize], grants: &[Grant]) {
        let asks = grants.iter().enumerate();
        let granted = asks
            .filter(|(at, grant)| matches!(grant, Grant::Write(_)) && encoded.page(*at).is_none());
        let missing: Vec<(usize, bool)> = granted.map(|(at, _)| (at, false)).collect();
        self.fill(encoded, members, missing);
    }

    fn encoder(&self) -> Option<Arc<Encoder>> {
        let encoder = self.shape.encoder.clone();
        encoder.filter(|_| self.page_bytes() <= ENCODED_BYTES)
    }

    /// Encodes and encrypts the pages at these positions; whether the codec takes each. Without a
    /// key none of an encrypted store is.
    fn fill(&self, encoded: &mut Encoded, members: &[usize], new: Vec<(usize, bool)>) {
        match &self.shape.tenant {
            None => self.fill_with(None, encoded, members, new),
            Some(tenant) => {
                tenant.with_current(self.made_unix_s, |key| {
                    self.fill_with(Some(key), encoded, members, new);
                });
            }
        }
    }

    fn fill_with(
        &self,
        key: Option<&TenantKey>,
        encoded: &mut Encoded,
        members: &[usize],
        new: Vec<(usize, bool)>,
    ) {
        let (page_bytes, encoding, encoder) =
            (self.page_bytes(), &self.data.encoding, self.encoder());
        let Some(mut memory) = encoding.memory(new.len() * page_bytes) else {
            return;
        };
        let number = encoded.memory.len();
        encoded.pages.resize_with(members.len(), || None);
        let unit = match key {
            Some(_) => sealed_unit(page_bytes),
            None => BLOCK_BYTES,
        };
        let (mut end, mut counts) = (0, Counts::default());
        let first = &self.pages[members[new[0].0]].key;
        with_salts(first, new.len(), |salts| {
            for (at, takes) in new {
                let Some(_reading) = read(self.recall) else {
                    break;
                };
                let page = &self.pages[members[at]];
                let parts: Vec<&[u8]> = page.parts.iter().map(|part| &**part).collect();
                let into = &mut memory[end..];
                let made = takes.then(|| {
                    let _timed = encoding.times.timed();
                    encoding.codec.encode(&parts, unit, into)
                });
                let made = made.flatten();
                let bytes = end..end + made.unwrap_or(page_bytes);
                if let (Some(encoder), true) = (&encoder, takes) {
                    encoder.took(blocks(page_bytes), blocks(bytes.len()));
                }
                if made.is_none() && key.is_none() {
                    continue;
                }
                let mut checksum = PageChecksum::new(self.shape.fingerprint, &page.key);
                let stored = &mut memory[bytes.clone()];
                let seal = match key {
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
                let proof = Proof {
                    checksum: checksum.finish(),
                    seal,
                };
                #[cfg(feature = "simulated")]
                if proof.seal.is_some() {
                    note(SealedPage {
                        namespace: self.shape.fingerprint,
                        key: page.key,
                        clear: parts[0][..parts[0].len().min(BLOCK_BYTES)].to_vec(),
                        stored: memory[bytes.clone()].to_vec(),
                        proof,
                    });
                }
                end = bytes.end;
                encoded.pages[at] = Some(Page {
                    memory: number,
                    saved: blocks(page_bytes - bytes.len()),
                    proof,
                    bytes,
                });
            }
        });
        self.data.counters.calls.add(counts);
        encoded.memory.push(memory);
    }
}

fn blocks(bytes: usize) -> u32 {
    u32::try_from(bytes / BLOCK_BYTES).unwrap_or(u32::MAX)
}
