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
//! The parent of a page at depth 0 is zero.

use std::io;
use std::path::Path;

use larder_base::runtime::{Mutex, MutexGuard};
use larder_base::sidecar::Sidecar;
use larder_format::{Fingerprint, PageKey};

use super::chains::{Chains, PAGES_MAX};
use crate::run::RunPage;

const MAGIC: [u8; 8] = *b"LarderT1";
const HEAD: usize = 40;
const PAGE: usize = 84;

/// Longest file.
const LENGTH_MAX: usize = HEAD + PAGES_MAX * PAGE;

/// See the module.
pub(super) struct Memory {
    file: Sidecar,
    /// This agent writes the file. Others read it.
    keeps: bool,
    /// Held while the file is written.
    writing: Mutex<()>,
}

impl Memory {
    /// The file of a store; `None` where there can be none.
    pub(super) fn beside(volume: &Path, keeps: bool) -> Option<Memory> {
        let file = Sidecar::beside(volume, ".touched", LENGTH_MAX)?;
        Some(Memory {
            file,
            keeps,
            writing: Mutex::new(()),
        })
    }

    /// The pages of the file. None if there is no such file.
    pub(super) fn read(&self) -> Chains {
        match self.file.read() {
            Ok(Some(bytes)) => decode(&bytes).unwrap_or_else(|| {
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

    /// Replaces the file.
    pub(super) fn write(&self, bytes: &[u8]) {
        if let Err(error) = self.file.replace(bytes) {
            self.complain("written", &error);
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

/// The pages as the bytes of a file.
pub(super) fn encode(chains: &Chains) -> Vec<u8> {
    let mut pages = Vec::new();
    for (namespace, page) in chains.pages() {
        pages.extend_from_slice(namespace.as_bytes());
        pages.extend_from_slice(page.key.as_bytes());
        let parent = page.parent.unwrap_or(PageKey::from_bytes([0; 32]));
        pages.extend_from_slice(parent.as_bytes());
        pages.extend_from_slice(&page.depth.to_le_bytes());
    }
    let sum = blake3::hash(&pages);
    [&MAGIC, sum.as_bytes().as_slice(), &pages].concat()
}

/// The pages of a file; `None` if it is not whole.
fn decode(bytes: &[u8]) -> Option<Chains> {
    let (head, pages) = bytes.split_at_checked(HEAD)?;
    let is_whole = head[..8] == MAGIC
        && head[8..] == *blake3::hash(pages).as_bytes()
        && pages.len().is_multiple_of(PAGE)
        && bytes.len() <= LENGTH_MAX;
    if !is_whole {
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
    use super::*;

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
        let read = decode(&encode(&chains)).unwrap_or_default();
        assert!(read.pages().eq(chains.pages()));
        assert_eq!(read.pages().count(), 5);
        let last = (space(), page(3).key.prefix());
        assert_eq!(read.run(&last, 4).map(|run| run.len()), Some(4));
    }

    #[test]
    fn a_file_that_is_not_whole_is_ignored() {
        let bytes = encode(&remembered());
        for cut in [0, 1, HEAD - 1, HEAD, bytes.len() - PAGE, bytes.len() - 1] {
            assert!(decode(&bytes[..cut]).is_none(), "cut to {cut} bytes");
        }
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1;
            assert!(decode(&flipped).is_none(), "byte {at}");
        }
        let nothing = encode(&Chains::default());
        assert!(decode(&nothing).is_some_and(|chains| chains.pages().next().is_none()));
    }
}
