//! Keys and random bytes for tests.
#![allow(dead_code, clippy::unwrap_used)]

use larder_format::{KEYRING_BYTES, KeyringCopy, StoreId};
use larder_seal::{Keyring, KeyringError, Vault, WrappingKey};

pub const STORE: StoreId = StoreId::from_bytes([9; 16]);

/// Random bytes of the system.
pub fn random(bytes: &mut [u8]) -> std::io::Result<()> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let count = rustix::rand::getrandom(&mut *rest, rustix::rand::GetRandomFlags::empty())?;
        rest = &mut rest[count..];
    }
    Ok(())
}

pub fn wrapping(vault: &Vault, byte: u8) -> WrappingKey {
    WrappingKey::new(vault, &[byte; 32]).unwrap()
}

pub fn keyring(vault: &Vault) -> Keyring {
    let key = wrapping(vault, 1);
    Keyring::create(STORE, &key, vault, &mut random, 1_800_000_000).unwrap()
}

/// The keyring as a later open finds it.
pub fn reopened(keyring: &Keyring, vault: &Vault, key: u8) -> Result<Keyring, KeyringError> {
    let bytes = keyring.copy().encode();
    assert_eq!(bytes.len(), KEYRING_BYTES);
    let copy = KeyringCopy::decode(&bytes, STORE).unwrap();
    Keyring::open(copy, &wrapping(vault, key), vault)
}
