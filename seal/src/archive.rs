//! The key of an archive.
//!
//! It is random, and used for this archive alone. The head of the archive has it, wrapped by a key
//! that the reader holds. So an archive has no key of a store or of a tenant.
//!
//! ```text
//!  structures   XAES-256-GCM under a key that is derived for them
//!  payloads     as pages of a store, under a key that is derived for them
//!  wrap         associated: label | archive and head | wrapping key's id
//! ```

use std::num::NonZeroU16;

use larder_format::{KeyWrap, MetadataSeal};

use crate::master::{derived, open_with, seal_with};
use crate::page::{OpenError, SealError, TenantKey};
use crate::salts::Random;
use crate::vault::{Key, VaultError};
use crate::wrapping::{WrappingKey, unwrap_key, wrap_key};

/// The slot that payloads name: an archive has one key for them.
const SLOT: NonZeroU16 = NonZeroU16::MIN;

/// The key of an archive.
#[derive(Clone, Debug)]
pub struct ArchiveKey {
    root: Key,
    structures: Key,
    payloads: TenantKey,
}

impl ArchiveKey {
    /// A new key, in the memory of the key that is to wrap it.
    ///
    /// # Errors
    /// There are no random bytes, no memory for keys, or the cipher failed.
    pub fn draw(wrapping: &WrappingKey, random: &mut dyn Random) -> Result<ArchiveKey, SealError> {
        let root = wrapping
            .vault()
            .keep(|key| random.fill(key).map_err(SealError::from))?;
        Ok(ArchiveKey::of(root)?)
    }

    fn of(root: Key) -> Result<ArchiveKey, VaultError> {
        let payloads = derived(&root, b"larder archive payloads 1")?;
        Ok(ArchiveKey {
            structures: derived(&root, b"larder archive structures 1")?,
            payloads: TenantKey::new(payloads, SLOT),
            root,
        })
    }

    /// The key, wrapped. `named` is [`ArchiveHead::named`](larder_format::ArchiveHead::named).
    ///
    /// # Errors
    /// See [`SealError`].
    pub fn wrap(
        &self,
        wrapping: &WrappingKey,
        random: &mut dyn Random,
        named: &[u8],
    ) -> Result<KeyWrap, SealError> {
        let id = wrapping.id();
        let label = label(named, id.as_bytes());
        let key = wrap_key(wrapping.key(), random, &label, &self.root)?;
        Ok(KeyWrap { id, key })
    }

    /// The key in the head of an archive. The caller has compared the identity of the wrap.
    ///
    /// # Errors
    /// See [`OpenError`]: the head was changed, or is of another archive.
    pub fn unwrap(
        wrapping: &WrappingKey,
        wrap: &KeyWrap,
        named: &[u8],
    ) -> Result<ArchiveKey, OpenError> {
        let label = label(named, wrap.id.as_bytes());
        let root = unwrap_key(wrapping.key(), wrapping.vault(), &label, &wrap.key)?;
        Ok(ArchiveKey::of(root)?)
    }

    /// The key of the payloads.
    #[must_use]
    pub fn payloads(&self) -> &TenantKey {
        &self.payloads
    }

    /// Encrypts the body of a structure in place. `associated` names the structure and its place.
    ///
    /// # Errors
    /// See [`SealError`]. The text is zeroed then.
    pub fn seal(
        &self,
        random: &mut dyn Random,
        associated: &[u8],
        text: &mut [u8],
    ) -> Result<MetadataSeal, SealError> {
        let sealed = seal_with(&self.structures, random, associated, text);
        if sealed.is_err() {
            text.fill(0);
        }
        sealed
    }

    /// Decrypts the body of a structure in place.
    ///
    /// # Errors
    /// See [`OpenError`]. The text is zeroed then.
    pub fn open(
        &self,
        seal: &MetadataSeal,
        associated: &[u8],
        text: &mut [u8],
    ) -> Result<(), OpenError> {
        open_with(&self.structures, seal, associated, text)
    }
}

/// What the tag of the wrap covers.
fn label(named: &[u8], id: &[u8]) -> Vec<u8> {
    [&b"larder archive key 1"[..], named, id].concat()
}
