//! The view of a simulation into the encryption of pages.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use larder_format::{Fingerprint, KeyringCopy, PageKey, Proof};
use larder_seal::{KeyringError, WrappingKey};

use super::Keys;

/// A page that was encrypted.
#[derive(Debug)]
pub struct SealedPage {
    /// The namespace.
    pub namespace: Fingerprint,
    /// The key.
    pub key: PageKey,
    /// Its first bytes in clear: as many as a block has, or all.
    pub clear: Vec<u8>,
    /// The stored bytes.
    pub stored: Vec<u8>,
    /// Their checksum and their seal.
    pub proof: Proof,
}

thread_local! {
    static SEALED: RefCell<Vec<SealedPage>> = const { RefCell::new(Vec::new()) };
    static WORLD: Cell<u8> = const { Cell::new(0) };
}

pub(crate) fn note(page: SealedPage) {
    SEALED.with_borrow_mut(|sealed| sealed.push(page));
}

/// The pages that stores of this thread have encrypted since the last call.
#[must_use]
pub fn take_sealed() -> Vec<SealedPage> {
    SEALED.take()
}

/// The number of the world that this thread plays: worlds with the same randomness of all else draw
/// other salts and keys.
pub fn set_world(number: u8) {
    WORLD.set(number);
}

pub(super) fn differ(bytes: &mut [u8]) {
    bytes.iter_mut().for_each(|byte| *byte ^= WORLD.get());
}

impl Keys {
    /// The keys of a copy of the keyring.
    ///
    /// # Errors
    /// See [`larder_seal::Keyring::open`].
    pub fn of(copy: KeyringCopy, wrapping: &WrappingKey) -> Result<Arc<Keys>, KeyringError> {
        super::unlock(copy, wrapping).map(Arc::new)
    }
}
