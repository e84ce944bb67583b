//! The file beside a store in which an agent remembers the pages of puts from owner to owner.
//!
//! A run is published when its pages are used again, which may be after a restart. The file is
//! `NAME.touched` (see [`Sidecar`]). A file that is missing, too long, torn or of another release
//! is ignored. Names of pages that the store does not have do no harm: their publication finds
//! none.
//!
//! ```text
//!   magic, 8 bytes | BLAKE3 of the rest, 32 bytes | pages, the newest last:
//!   namespace, 16 bytes | key, 32 bytes | parent, 32 bytes | depth, 4 bytes
//! ```
//!
//! The parent of a page at depth 0 is zero. Of a remote with keys the file is encrypted, like an
//! archive: else it would show which prompts the node has seen.
//!
//! ```text
//!   magic, 8 bytes | wrap: id, 16 bytes; nonce, 24 bytes; wrapped key, 48 bytes |
//!   nonce, 24 bytes | tag, 16 bytes | the pages, encrypted
//! ```

use std::io;
use std::path::Path;

use larder_base::runtime::{Mutex, MutexGuard};
use larder_base::sidecar::Sidecar;
use larder_base::system::processes::fill_random;
use larder_format::{Fingerprint, KeyWrap, MetadataSeal, PageKey, WrapId, WrappedKey};
use larder_seal::{ArchiveKey, SealError};

use super::chains::{Chains, PAGES_MAX};
use crate::keys::{Keyring, Trust};
use crate::run::RunPage;

const MAGIC: [u8; 8] = *b"LarderT1";
const SEALED_MAGIC: [u8; 8] = *b"LarderT2";
const HEAD: usize = 40;
const SEALED_HEAD: usize = 8 + 16 + 24 + 48 + 24 + 16;
const PAGE: usize = 84;

/// Longest file.
const LENGTH_MAX: usize = SEALED_HEAD + PAGES_MAX * PAGE;

/// See the module.
pub(super) struct Memory {
    file: Sidecar,
    /// Of a remote with keys.
    keys: Option<Keyring>,
    /// This agent writes the file. Others read it.
    keeps: bool,
    /// Held while the file is written.
    writing: Mutex<()>,
}

impl Memory {
    /// The file of a store; `None` where there can be none.
    pub(super) fn beside(volume: &Path, keeps: bool, trust: &Trust) -> Option<Memory> {
        let file = Sidecar::beside(volume, ".touched", LENGTH_MAX)?;
        Some(Memory {
            file,
            keys: trust.keys().cloned(),
            keeps,
            writing: Mutex::new(()),
        })
    }

    /// The pages of the file. None if there is no such file.
    pub(super) fn read(&self) -> Chains {
        match self.file.read() {
            Ok(Some(bytes)) => self.decode(&bytes).unwrap_or_else(|| {
                tracing::warn!(
                    "{}: no memory of puts of this release, or damaged; runs that were put before \
                     are published when they are put again",
                    self.file.path().display()
                );
                Chains::default()
            }),
            Ok(None) => Chains::default(),
            Err(error) => {
                self.complain("read", &error);
                Chains::default()
            }
        }
    }

    pub(super) fn keeps(&self) -> bool {
        self.keeps
    }

    /// Waits for the end of another write.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.writing.lock()
    }

    /// Replaces the file by one with these [`pages`].
    pub(super) fn write(&self, pages: Vec<u8>) {
        let bytes = match &self.keys {
            None => Ok(plain(&pages)),
            Some(keys) => sealed(keys, pages).map_err(io::Error::other),
        };
        if let Err(error) = bytes.and_then(|bytes| self.file.replace(&bytes)) {
            self.complain("written", &error);
        }
    }

    /// The pages of a file; `None` if it is not whole, or not one of this remote.
    fn decode(&self, bytes: &[u8]) -> Option<Chains> {
        match &self.keys {
            None => decode(bytes),
            Some(keys) => read_pages(&opened(keys, bytes)?),
        }
    }

    fn complain(&self, done: &str, error: &io::Error) {
        tracing::warn!(
            "{}: the memory of puts cannot be {done} ({error}); runs that were put before the next \
             start are published when they are put again",
            self.file.path().display()
        );
    }
}

/// The pages as bytes.
pub(super) fn pages(chains: &Chains) -> Vec<u8> {
    let mut pages = Vec::new();
    for (namespace, page) in chains.pages() {
        pages.extend_from_slice(namespace.as_bytes());
        pages.extend_from_slice(page.key.as_bytes());
        let parent = page.parent.unwrap_or(PageKey::from_bytes([0; 32]));
        pages.extend_from_slice(parent.as_bytes());
        pages.extend_from_slice(&page.depth.to_le_bytes());
    }
    pages
}

/// A plain file.
fn plain(pages: &[u8]) -> Vec<u8> {
    let sum = blake3::hash(pages);
    [&MAGIC, sum.as_bytes().as_slice(), pages].concat()
}

/// An encrypted file.
fn sealed(keys: &Keyring, mut pages: Vec<u8>) -> Result<Vec<u8>, SealError> {
    let wrapping = keys.current().wrapping();
    let key = ArchiveKey::draw(wrapping, &mut fill_random)?;
    let wrap = key.wrap(wrapping, &mut fill_random, &SEALED_MAGIC)?;
    let seal = key.seal(&mut fill_random, &SEALED_MAGIC, &mut pages)?;
    let parts: [&[u8]; 7] = [
        &SEALED_MAGIC,
        wrap.id.as_bytes(),
        &wrap.key.nonce,
        &wrap.key.bytes,
        &seal.nonce,
        &seal.tag,
        &pages,
    ];
    Ok(parts.concat())
}

/// The pages of an encrypted file.
fn opened(keys: &Keyring, bytes: &[u8]) -> Option<Vec<u8>> {
    let rest = bytes.strip_prefix(&SEALED_MAGIC)?;
    let (id, rest) = rest.split_first_chunk()?;
    let (nonce, rest) = rest.split_first_chunk()?;
    let (wrapped, rest) = rest.split_first_chunk()?;
    let wrap = KeyWrap {
        id: WrapId::from_bytes(*id),
        key: WrappedKey {
            nonce: *nonce,
            bytes: *wrapped,
        },
    };
    let (nonce, rest) = rest.split_first_chunk()?;
    let (tag, rest) = rest.split_first_chunk()?;
    let seal = MetadataSeal {
        nonce: *nonce,
        tag: *tag,
    };
    let wrapping = keys.find(wrap.id)?.wrapping();
    let key = ArchiveKey::unwrap(wrapping, &wrap, &SEALED_MAGIC).ok()?;
    let mut pages = rest.to_vec();
    key.open(&seal, &SEALED_MAGIC, &mut pages).ok()?;
    Some(pages)
}

/// The pages of a plain file; `None` if it is not whole.
fn decode(bytes: &[u8]) -> Option<Chains> {
    let (head, pages) = bytes.split_at_checked(HEAD)?;
    let is_whole = head[..8] == MAGIC && head[8..] == *blake3::hash(pages).as_bytes();
    if !is_whole {
        return None;
    }
    read_pages(pages)
}

fn read_pages(pages: &[u8]) -> Option<Chains> {
    if !pages.len().is_multiple_of(PAGE) || pages.len() > PAGES_MAX * PAGE {
        return None;
    }
    let mut all = Chains::default();
    for page in pages.chunks_exact(PAGE) {
        let (namespace, page) = page.split_first_chunk::<16>()?;
        let (key, page) = page.split_first_chunk::<32>()?;
        let (parent, depth) = page.split_first_chunk::<32>()?;
        let depth = u32::from_le_bytes(depth.try_into().ok()?);
        let page = RunPage {
            key: PageKey::from_bytes(*key),
            parent: (depth > 0).then(|| PageKey::from_bytes(*parent)),
            depth,
        };
        all.add(Fingerprint::from_bytes(*namespace), page);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::keys::SealKey;

    fn page(at: u32) -> RunPage {
        let key = |at: u32| PageKey::from_bytes([u8::try_from(at).unwrap_or(0); 32]);
        RunPage {
            key: key(at + 1),
            parent: (at > 0).then(|| key(at)),
            depth: at,
        }
    }

    fn space() -> Fingerprint {
        Fingerprint::from_bytes([7; 16])
    }

    fn remembered() -> Chains {
        let mut chains = Chains::default();
        (0..4).for_each(|at| chains.add(space(), page(at)));
        chains.add(Fingerprint::from_bytes([8; 16]), page(0));
        chains
    }

    #[test]
    fn pages_come_back_in_their_order() {
        let chains = remembered();
        let read = decode(&plain(&pages(&chains))).unwrap_or_default();
        assert!(read.pages().eq(chains.pages()));
        assert_eq!(read.pages().count(), 5);
        let last = (space(), page(3).key.prefix());
        assert_eq!(read.run(&last, 4).map(|run| run.len()), Some(4));
    }

    #[test]
    fn a_file_that_is_not_whole_is_ignored() {
        let bytes = plain(&pages(&remembered()));
        for cut in [0, 1, HEAD - 1, HEAD, bytes.len() - PAGE, bytes.len() - 1] {
            assert!(decode(&bytes[..cut]).is_none(), "cut to {cut} bytes");
        }
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1;
            assert!(decode(&flipped).is_none(), "byte {at}");
        }
        let nothing = plain(&pages(&Chains::default()));
        assert!(decode(&nothing).is_some_and(|chains| chains.pages().next().is_none()));
    }

    #[test]
    fn the_file_of_a_remote_with_keys_opens_with_them_alone_and_shows_no_page() {
        let keys = |byte| Keyring::new(SealKey::new(&[byte; 32]).unwrap(), None);
        let chains = remembered();
        let bytes = sealed(&keys(1), pages(&chains)).unwrap();
        let again = |keys: &Keyring, bytes: &[u8]| read_pages(&opened(keys, bytes)?);
        let read = again(&keys(1), &bytes).unwrap();
        assert!(read.pages().eq(chains.pages()));
        assert!(again(&keys(2), &bytes).is_none());
        assert!(again(&keys(1), &plain(&pages(&chains))).is_none());
        let rotating = Keyring::new(
            SealKey::new(&[2; 32]).unwrap(),
            Some(SealKey::new(&[1; 32]).unwrap()),
        );
        assert!(again(&rotating, &bytes).is_some());
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1;
            assert!(again(&keys(1), &flipped).is_none(), "byte {at}");
            assert!(again(&keys(1), &bytes[..at]).is_none(), "cut to {at} bytes");
        }
        let key = *page(2).key.as_bytes();
        assert!(!bytes.windows(12).any(|window| window == &key[..12]));
    }
}
