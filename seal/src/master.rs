//! The master key: encryption of metadata, the names of tenants in a keyring, and those of
//! namespaces wherever they are shown.
//!
//! It is random, and used for nothing itself: each use has a key that is derived from it.

use larder_format::{Fingerprint, MetadataSeal, Namespace, TenantId};
use zeroize::Zeroizing;

use crate::cipher::{KEY_BYTES, hmac};
use crate::page::{OpenError, SealError};
use crate::salts::{Random, nonce};
use crate::vault::{Key, Vault, VaultError};
use crate::xaes::{self, LONG_NONCE_BYTES};

/// A master key.
#[derive(Clone, Debug)]
pub struct MasterKey {
    root: Key,
    metadata: Key,
    names: Key,
    spaces: Key,
    keyring: Key,
}

impl MasterKey {
    /// A new key.
    pub(crate) fn draw(vault: &Vault, random: &mut dyn Random) -> Result<MasterKey, SealError> {
        MasterKey::of(vault.keep(|key| random.fill(key).map_err(SealError::from))?)
    }

    /// The keys derived from a root.
    pub(crate) fn of<E: From<VaultError>>(root: Key) -> Result<MasterKey, E> {
        Ok(MasterKey {
            metadata: derived(&root, b"larder metadata 1")?,
            names: derived(&root, b"larder tenant names 1")?,
            spaces: derived(&root, b"larder namespace names 1")?,
            keyring: derived(&root, b"larder keyring 1")?,
            root,
        })
    }

    pub(crate) fn root(&self) -> &Key {
        &self.root
    }

    /// The key of the keyring: of its tag, and of the wraps of tenants' keys.
    pub(crate) fn keyring(&self) -> &Key {
        &self.keyring
    }

    /// A tenant, as the keyring names it.
    ///
    /// # Errors
    /// The key cannot be used, or the cipher failed.
    pub fn tenant(&self, name: &str) -> Result<TenantId, VaultError> {
        let [id, _] = halves(self.names.with(|key| hmac(key, name.as_bytes()))??);
        Ok(TenantId::from_bytes(id))
    }

    /// A namespace, as the store names it.
    ///
    /// # Errors
    /// The key cannot be used, or the cipher failed.
    pub fn namespace(&self, namespace: &Namespace) -> Result<Namespace, VaultError> {
        let [name, _] = halves(self.spaces.with(|key| hmac(key, namespace.encode()))??);
        Ok(namespace.named(Fingerprint::from_bytes(name)))
    }

    /// Encrypts metadata in place. `associated` names the structure and its place: metadata that is
    /// moved there from another place does not open.
    ///
    /// # Errors
    /// See [`SealError`]. The text is zeroed then.
    pub fn seal(
        &self,
        random: &mut dyn Random,
        associated: &[u8],
        text: &mut [u8],
    ) -> Result<MetadataSeal, SealError> {
        let sealed = seal_with(&self.metadata, random, associated, text);
        if sealed.is_err() {
            text.fill(0);
        }
        sealed
    }

    /// Decrypts metadata in place.
    ///
    /// # Errors
    /// See [`OpenError`]. The text is zeroed then.
    pub fn open(
        &self,
        seal: &MetadataSeal,
        associated: &[u8],
        text: &mut [u8],
    ) -> Result<(), OpenError> {
        open_with(&self.metadata, seal, associated, text)
    }
}

/// The key for a use, derived from a root, in the memory of the root.
pub(crate) fn derived(root: &Key, label: &[u8]) -> Result<Key, VaultError> {
    let bytes = Zeroizing::new(root.with(|root| hmac(root, label))??);
    root.vault().keep(|key| {
        *key = *bytes;
        Ok(())
    })
}

/// Encrypts a text in place under a key.
pub(crate) fn seal_with(
    key: &Key,
    random: &mut dyn Random,
    associated: &[u8],
    text: &mut [u8],
) -> Result<MetadataSeal, SealError> {
    let nonce = nonce::<LONG_NONCE_BYTES>(random)?;
    let tag = key.with(|key| xaes::seal(key, &nonce, associated, text))??;
    Ok(MetadataSeal { nonce, tag })
}

/// Decrypts a text in place under a key. If the tag is wrong the text is zeroed.
pub(crate) fn open_with(
    key: &Key,
    seal: &MetadataSeal,
    associated: &[u8],
    text: &mut [u8],
) -> Result<(), OpenError> {
    let open = |key: &[u8; KEY_BYTES]| xaes::open(key, &seal.nonce, associated, text, &seal.tag);
    match key.with(open).and_then(|opened| Ok(opened?)) {
        Ok(true) => Ok(()),
        Ok(false) => Err(OpenError::Tag),
        Err(error) => {
            text.fill(0);
            Err(error.into())
        }
    }
}

/// A digest as two halves.
pub(crate) fn halves(digest: [u8; 32]) -> [[u8; 16]; 2] {
    let mut halves = [[0; 16]; 2];
    halves.as_flattened_mut().copy_from_slice(&digest);
    halves
}
