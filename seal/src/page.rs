//! Encryption of pages.
//!
//! ```text
//!  key of a page   HMAC-SHA256(tenant's key, "larder page 1" | namespace | key | salt)
//!  nonce           the salt
//!  associated      namespace | key | key slot | blocks | stored blocks
//! ```
//!
//! The pair of key and nonce repeats only if two encryptions of the same page draw one salt: for
//! 2^16 encryptions of a page among 2^48 of a store, less often than once in 2^33 stores. The place
//! and the version of a page are no input, so a move copies the stored bytes, the salt and the tag.
//!
//! The whole stored blocks are encrypted, padding included.

use std::io;
use std::num::NonZeroU16;

use larder_format::{BLOCK_BYTES, Fingerprint, PageKey, Seal};
use zeroize::{Zeroize, Zeroizing};

use crate::cipher::{CipherError, Direction, Gcm, KEY_BYTES, NONCE_BYTES, STEP_BYTES, hmac};
use crate::salts::Salts;
use crate::vault::{Key, Vault, VaultError};

const LABEL: &[u8; 13] = b"larder page 1";
const _: () = assert!(STEP_BYTES.is_multiple_of(BLOCK_BYTES));

/// The identity of a page, which its tag covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageName {
    /// The namespace.
    pub namespace: Fingerprint,
    /// The key.
    pub key: PageKey,
    /// Number of blocks in the shape of the namespace.
    pub blocks: u32,
    /// Number of stored blocks.
    pub stored: u32,
}

/// Why a page was not encrypted.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    /// There are no random bytes.
    #[error("there are no random bytes: {0}")]
    Random(#[from] io::Error),
    /// The key cannot be used, or the cipher failed.
    #[error(transparent)]
    Vault(#[from] VaultError),
    /// The parts do not fill the memory for the stored bytes.
    #[error("the parts of a page are not as long as its stored bytes")]
    Length,
}

impl From<CipherError> for SealError {
    fn from(error: CipherError) -> SealError {
        SealError::Vault(error.into())
    }
}

/// Why a page was not decrypted. Its buffers are zeroed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The tag is wrong: the stored bytes, the name, the salt or the key is another one.
    #[error("the tag is wrong")]
    Tag,
    /// The key cannot be used, or the cipher failed.
    #[error(transparent)]
    Vault(#[from] VaultError),
}

/// A tenant's key.
#[derive(Clone, Debug)]
pub struct TenantKey {
    key: Key,
    slot: NonZeroU16,
}

impl TenantKey {
    pub(crate) fn new(key: Key, slot: NonZeroU16) -> TenantKey {
        TenantKey { key, slot }
    }

    /// Keeps a key that the process with the keyring gives to another one. `take` writes it.
    ///
    /// # Errors
    /// There is no memory for keys, or `take` failed.
    pub fn taken<E: From<VaultError>>(
        vault: &Vault,
        slot: NonZeroU16,
        take: impl FnOnce(&mut [u8; KEY_BYTES]) -> Result<(), E>,
    ) -> Result<TenantKey, E> {
        let key = vault.keep(take)?;
        Ok(TenantKey::new(key, slot))
    }

    /// Shows the key to `give`, which passes it to another process of the store and keeps no copy.
    ///
    /// # Errors
    /// The key cannot be used.
    pub fn given<R>(&self, give: impl FnOnce(&[u8; KEY_BYTES]) -> R) -> Result<R, VaultError> {
        self.key.with(give)
    }

    /// Its slot in the keyring.
    #[must_use]
    pub fn slot(&self) -> NonZeroU16 {
        self.slot
    }

    /// Encrypts a page in place. `each` sees the stored bytes in order, in whole blocks.
    ///
    /// # Errors
    /// See [`SealError`]. The buffer is zeroed then.
    pub fn seal(
        &self,
        salts: &mut Salts<'_>,
        page: &PageName,
        stored: &mut [u8],
        each: impl FnMut(&[u8]),
    ) -> Result<Seal, SealError> {
        let sealed = self.begin_seal(salts, page).and_then(|(salt, mut gcm)| {
            gcm.in_place(stored, each)?;
            let tag = gcm.tag()?;
            Ok(Seal {
                slot: self.slot,
                salt,
                tag,
            })
        });
        if sealed.is_err() {
            stored.fill(0);
        }
        sealed
    }

    /// Encrypts the parts of a page into other memory, each part padded to whole blocks. The parts
    /// are read once. `each` sees the stored bytes in order, in whole blocks.
    ///
    /// # Errors
    /// See [`SealError`]. The memory for the stored bytes is zeroed then.
    pub fn seal_parts(
        &self,
        salts: &mut Salts<'_>,
        page: &PageName,
        parts: &[&[u8]],
        stored: &mut [u8],
        each: impl FnMut(&[u8]),
    ) -> Result<Seal, SealError> {
        let sealed = self.begin_seal(salts, page).and_then(|(salt, mut gcm)| {
            seal_parts(&mut gcm, parts, stored, each)?;
            let tag = gcm.tag()?;
            Ok(Seal {
                slot: self.slot,
                salt,
                tag,
            })
        });
        if sealed.is_err() {
            stored.fill(0);
        }
        sealed
    }

    /// Decrypts a page in place. A second call on the same bytes would fail: the bytes are no
    /// longer the stored ones.
    ///
    /// # Errors
    /// See [`OpenError`]. The buffers are zeroed then.
    pub fn open(
        &self,
        page: &PageName,
        seal: &Seal,
        stored: &mut [&mut [u8]],
    ) -> Result<(), OpenError> {
        let opened = self.begin(Direction::Open, page, seal.slot, &seal.salt);
        let opened = opened.and_then(|mut gcm| {
            for part in stored.iter_mut() {
                gcm.in_place(part, |_| ())?;
            }
            Ok(gcm.has_tag(&seal.tag))
        });
        match opened {
            Ok(true) => return Ok(()),
            Ok(false) | Err(_) => stored.iter_mut().for_each(|part| part.fill(0)),
        }
        Err(opened.err().map_or(OpenError::Tag, OpenError::Vault))
    }

    fn begin_seal(
        &self,
        salts: &mut Salts<'_>,
        page: &PageName,
    ) -> Result<([u8; NONCE_BYTES], Gcm), SealError> {
        let salt = salts.next()?;
        let gcm = self.begin(Direction::Seal, page, self.slot, &salt)?;
        Ok((salt, gcm))
    }

    fn begin(
        &self,
        direction: Direction,
        page: &PageName,
        slot: NonZeroU16,
        salt: &[u8; NONCE_BYTES],
    ) -> Result<Gcm, VaultError> {
        let mut input = [0; LABEL.len() + 16 + 32 + NONCE_BYTES];
        join(
            &mut input,
            &[LABEL, page.namespace.as_bytes(), page.key.as_bytes(), salt],
        );
        let derived = Zeroizing::new(self.key.with(|key| hmac(key, &input))??);
        let mut associated = [0; 16 + 32 + 2 + 4 + 4];
        join(
            &mut associated,
            &[
                page.namespace.as_bytes(),
                page.key.as_bytes(),
                &slot.get().to_le_bytes(),
                &page.blocks.to_le_bytes(),
                &page.stored.to_le_bytes(),
            ],
        );
        Ok(Gcm::begin(direction, &derived, salt, &associated)?)
    }
}

/// Encrypts parts, with their padding, in steps.
fn seal_parts(
    gcm: &mut Gcm,
    parts: &[&[u8]],
    stored: &mut [u8],
    mut each: impl FnMut(&[u8]),
) -> Result<(), SealError> {
    let mut rest = stored;
    for part in parts {
        let padded = part.len().next_multiple_of(BLOCK_BYTES);
        let (room, later) = rest.split_at_mut_checked(padded).ok_or(SealError::Length)?;
        rest = later;
        for (from, to) in part.chunks(STEP_BYTES).zip(room.chunks_mut(STEP_BYTES)) {
            let (text, padding) = to
                .split_at_mut_checked(from.len())
                .ok_or(SealError::Length)?;
            gcm.copy(from, text)?;
            padding.zeroize();
            gcm.in_place(padding, |_| ())?;
            each(to);
        }
    }
    if rest.is_empty() {
        Ok(())
    } else {
        Err(SealError::Length)
    }
}

/// Fills an array with pieces that have its length together.
fn join(array: &mut [u8], pieces: &[&[u8]]) {
    let bytes = pieces.iter().flat_map(|piece| piece.iter());
    array
        .iter_mut()
        .zip(bytes)
        .for_each(|(to, from)| *to = *from);
}
