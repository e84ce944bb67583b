//! Memory for keys: locked, in no dump of the process, and zero in a forked child.
//!
//! It grows by pages of the processor, each with [`KEYS_PER_PAGE`] keys. Most stores need one. The
//! first slot of a page has a mark. A page without its mark was wiped: this process is a forked
//! child, and its keys are gone. So no zeros are ever taken for a key.

use std::io;
use std::sync::Arc;

use larder_sync::RwLock;
use memmap2::{Advice, MmapMut};
use zeroize::Zeroize;

use crate::cipher::{CipherError, KEY_BYTES};

/// Bytes that are locked at once. A processor with larger pages locks more.
const PAGE_BYTES: usize = 4096;

/// Keys of a page.
const KEYS_PER_PAGE: usize = PAGE_BYTES / KEY_BYTES - 1;

const MARK: [u8; KEY_BYTES] = *b"memory for keys of larder: whole";

/// Why a key cannot be kept or used.
#[derive(Debug, thiserror::Error)]
pub enum VaultError {
    /// There is no memory that suits.
    #[error(
        "no memory for keys that is locked and in no dump ({step}: {source}): raise the limit of \
         locked memory (ulimit -l, LimitMEMLOCK) by {PAGE_BYTES} bytes"
    )]
    Memory {
        /// The step that failed.
        step: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// This process was forked from the one with the keys.
    #[error("a forked process has no keys: open the store in it")]
    Forked,
    /// The cipher failed.
    #[error(transparent)]
    Cipher(#[from] CipherError),
}

/// Memory for keys. A clone is the same memory.
#[derive(Clone, Default)]
pub struct Vault {
    pages: Arc<RwLock<Vec<Page>>>,
    is_plain: bool,
}

/// A key in a vault. It is wiped when the last clone is dropped.
#[derive(Clone)]
pub(crate) struct Key {
    held: Arc<Held>,
}

struct Held {
    vault: Vault,
    page: usize,
    slot: usize,
}

struct Page {
    memory: Memory,
    used: Vec<bool>,
}

enum Memory {
    Locked(MmapMut),
    Plain(Box<[u8; PAGE_BYTES]>),
}

impl Vault {
    /// A vault without keys. It takes memory with the first one.
    #[must_use]
    pub fn new() -> Vault {
        Vault::default()
    }

    /// A vault in ordinary memory, for a simulation: locked memory would outlive the processes that
    /// it kills.
    #[doc(hidden)]
    #[must_use]
    pub fn plain() -> Vault {
        Vault {
            is_plain: true,
            ..Vault::default()
        }
    }

    /// Keeps a key that `write` writes into the memory of the vault. `write` uses no key of this
    /// vault: the lock is held meanwhile.
    pub(crate) fn keep<E: From<VaultError>>(
        &self,
        write: impl FnOnce(&mut [u8; KEY_BYTES]) -> Result<(), E>,
    ) -> Result<Key, E> {
        let mut pages = self.pages.write();
        let room = pages.iter().position(|page| page.used.contains(&false));
        let at = match room {
            Some(at) => at,
            None => {
                pages.push(match self.is_plain {
                    true => Page::plain(),
                    false => Page::locked()?,
                });
                pages.len().saturating_sub(1)
            }
        };
        let page = pages.get_mut(at).ok_or(VaultError::Forked)?;
        let slot = page.used.iter().position(|used| !used);
        let slot = slot.ok_or(VaultError::Forked)?;
        let memory = page.slot_mut(slot).ok_or(VaultError::Forked)?;
        if let Err(error) = write(memory) {
            memory.zeroize();
            return Err(error);
        }
        page.take(slot, true);
        drop(pages);
        let held = Held {
            vault: self.clone(),
            page: at,
            slot,
        };
        Ok(Key {
            held: Arc::new(held),
        })
    }

    /// Number of keys.
    #[cfg(test)]
    fn keys(&self) -> usize {
        let pages = self.pages.read();
        pages
            .iter()
            .flat_map(|page| &page.used)
            .filter(|used| **used)
            .count()
    }
}

impl Key {
    /// The vault with this key.
    pub(crate) fn vault(&self) -> &Vault {
        &self.held.vault
    }

    /// Uses the key. It is not copied.
    pub(crate) fn with<T>(
        &self,
        work: impl FnOnce(&[u8; KEY_BYTES]) -> T,
    ) -> Result<T, VaultError> {
        let pages = self.held.vault.pages.read();
        let page = pages.get(self.held.page).ok_or(VaultError::Forked)?;
        let key = page.slot(self.held.slot).ok_or(VaultError::Forked)?;
        Ok(work(key))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut pages = self.vault.pages.write();
        if let Some(page) = pages.get_mut(self.page) {
            if let Some(key) = page.slot_mut(self.slot) {
                key.zeroize();
            }
            page.take(self.slot, false);
        }
    }
}

impl Page {
    fn locked() -> Result<Page, VaultError> {
        let failed = |step| move |source| VaultError::Memory { step, source };
        let mut memory = MmapMut::map_anon(PAGE_BYTES).map_err(failed("mapping"))?;
        let at = memory.as_mut_ptr().cast();
        // SAFETY: the range is that of the mapping. A lock changes no byte, and ends with it.
        let locked = unsafe { rustix::mm::mlock(at, PAGE_BYTES) };
        locked.map_err(|error| failed("locking")(error.into()))?;
        let advice = rustix::mm::Advice::LinuxWipeOnFork;
        // SAFETY: the range is that of the mapping. The advice changes no byte in this process. A
        // forked child has zeros, which are valid bytes.
        let wiped = unsafe { rustix::mm::madvise(at, PAGE_BYTES, advice) };
        wiped.map_err(|error| failed("wiping in forked processes")(error.into()))?;
        memory
            .advise(Advice::DontDump)
            .map_err(failed("leaving out of dumps"))?;
        Ok(Page::of(Memory::Locked(memory)))
    }

    fn plain() -> Page {
        Page::of(Memory::Plain(Box::new([0; PAGE_BYTES])))
    }

    fn of(mut memory: Memory) -> Page {
        if let Some(first) = memory.bytes_mut().first_chunk_mut() {
            *first = MARK;
        }
        Page {
            memory,
            used: vec![false; KEYS_PER_PAGE],
        }
    }

    /// A key, unless the page was wiped.
    fn slot(&self, slot: usize) -> Option<&[u8; KEY_BYTES]> {
        let (mark, keys) = self.memory.bytes().as_chunks().0.split_first()?;
        keys.get(slot).filter(|_| *mark == MARK)
    }

    fn slot_mut(&mut self, slot: usize) -> Option<&mut [u8; KEY_BYTES]> {
        let (mark, keys) = self
            .memory
            .bytes_mut()
            .as_chunks_mut()
            .0
            .split_first_mut()?;
        keys.get_mut(slot).filter(|_| *mark == MARK)
    }

    fn take(&mut self, slot: usize, takes: bool) {
        if let Some(used) = self.used.get_mut(slot) {
            *used = takes;
        }
    }
}

impl Memory {
    fn bytes(&self) -> &[u8] {
        match self {
            Memory::Locked(memory) => memory,
            Memory::Plain(memory) => &memory[..],
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Memory::Locked(memory) => memory,
            Memory::Plain(memory) => &mut memory[..],
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.memory.bytes_mut().zeroize();
    }
}

impl std::fmt::Debug for Vault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Vault(..)")
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

#[cfg(test)]
#[path = "vault/tests.rs"]
mod tests;
