//! The key that wraps the master key. The operator holds it; no volume does.

use larder_format::{KeyWrap, StoreId, WRAPPED_KEY_BYTES, WrapId, WrappedKey};

use crate::cipher::{Direction, KEY_BYTES, TAG_BYTES, hmac};
use crate::master::{MasterKey, halves, seal_with};
use crate::page::{OpenError, SealError};
use crate::salts::Random;
use crate::vault::{Key, Vault, VaultError};
use crate::xaes;

/// A key that wraps master keys.
#[derive(Clone, Debug)]
pub struct WrappingKey {
    key: Key,
    id: WrapId,
}

impl WrappingKey {
    /// Keeps a key that `write` writes.
    pub(crate) fn keep<E: From<VaultError>>(
        vault: &Vault,
        write: impl FnOnce(&mut [u8; KEY_BYTES]) -> Result<(), E>,
    ) -> Result<WrappingKey, E> {
        let key = vault.keep(write)?;
        let digest = key.with(|key| hmac(key, b"larder wrapping key 1"));
        let [id, _] = halves(digest.and_then(|digest| Ok(digest?))?);
        let id = WrapId::from_bytes(id);
        Ok(WrappingKey { key, id })
    }

    /// Keeps a key. The caller wipes its own copy.
    ///
    /// # Errors
    /// There is no memory for keys, or the cipher failed.
    pub fn new(vault: &Vault, bytes: &[u8; KEY_BYTES]) -> Result<WrappingKey, VaultError> {
        WrappingKey::keep(vault, |key| {
            *key = *bytes;
            Ok(())
        })
    }

    /// The memory with this key.
    #[must_use]
    pub fn vault(&self) -> &Vault {
        self.key.vault()
    }

    /// The identity of the key. It does not show the key.
    #[must_use]
    pub fn id(&self) -> WrapId {
        self.id
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn wrap(
        &self,
        random: &mut dyn Random,
        store: StoreId,
        master: &MasterKey,
    ) -> Result<KeyWrap, SealError> {
        let label = label(store, self.id);
        let key = wrap_key(&self.key, random, &label, master.root())?;
        Ok(KeyWrap { id: self.id, key })
    }

    pub(crate) fn unwrap(
        &self,
        vault: &Vault,
        store: StoreId,
        wrap: &KeyWrap,
    ) -> Result<MasterKey, OpenError> {
        let label = label(store, wrap.id);
        let root = unwrap_key(&self.key, vault, &label, &wrap.key)?;
        MasterKey::of(root)
    }
}

/// Encrypts a key under another one.
pub(crate) fn wrap_key(
    with: &Key,
    random: &mut dyn Random,
    associated: &[u8],
    key: &Key,
) -> Result<WrappedKey, SealError> {
    let mut bytes = [0; WRAPPED_KEY_BYTES];
    let (text, tag) = bytes.split_at_mut(KEY_BYTES);
    key.with(|key| text.copy_from_slice(key))?;
    let sealed = seal_with(with, random, associated, text);
    if sealed.is_err() {
        text.fill(0);
    }
    let seal = sealed?;
    tag.copy_from_slice(&seal.tag);
    let nonce = seal.nonce;
    Ok(WrappedKey { nonce, bytes })
}

/// Decrypts a wrapped key in the memory of a vault.
pub(crate) fn unwrap_key(
    with: &Key,
    vault: &Vault,
    associated: &[u8],
    wrapped: &WrappedKey,
) -> Result<Key, OpenError> {
    let (text, tag) = wrapped.bytes.split_at(KEY_BYTES);
    let mut expected = [0; TAG_BYTES];
    expected.copy_from_slice(tag);
    let opening = |key: &_| xaes::begin(Direction::Open, key, &wrapped.nonce, associated);
    let mut gcm = with.with(opening)?.map_err(VaultError::from)?;
    vault.keep(|key| {
        key.copy_from_slice(text);
        gcm.in_place(key, |_| ()).map_err(VaultError::from)?;
        match gcm.has_tag(&expected) {
            true => Ok(()),
            false => Err(OpenError::Tag),
        }
    })
}

fn label(store: StoreId, id: WrapId) -> Vec<u8> {
    [&b"larder master key 1"[..], store.as_bytes(), id.as_bytes()].concat()
}
