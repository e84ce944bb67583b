//! The keys of an open encrypted store, in the process that owns it.

use std::io;
use std::num::NonZeroU16;
use std::sync::Arc;

use larder_base::planted;
use larder_base::runtime::RwLock;
use larder_base::system::processes;
use larder_format::{
    BLOCK_BYTES, Damage, DescriptorBlock, KeyringCopy, Namespace, PageKey, Serial, StoreId,
    Structure, TENANT_FIELD,
};
use larder_seal::{Keyring, KeyringError, MasterKey, NO_TENANT, Salts, SealError, TenantKey};

/// See the module.
#[derive(Debug)]
pub struct Keys {
    ring: RwLock<Keyring>,
    master: MasterKey,
}

/// The tenant of a namespace in an encrypted store.
#[derive(Clone, Debug)]
pub struct Tenant {
    keys: Arc<Keys>,
    name: String,
}

/// Random bytes of the machine, or of the simulated one.
fn random(bytes: &mut [u8]) -> io::Result<()> {
    processes::fill_random(bytes)?;
    #[cfg(feature = "simulated")]
    simulated::differ(bytes);
    Ok(())
}

/// Calls `work` with the salts of so many pages, the first with this key.
pub(crate) fn with_salts<R>(
    first: &PageKey,
    pages: usize,
    work: impl FnOnce(&mut Salts<'_>) -> R,
) -> R {
    let mut random = |bytes: &mut [u8]| {
        random(bytes)?;
        for salt in bytes.as_chunks_mut().0 {
            if planted!(SaltKept) {
                *salt = *first.prefix().as_bytes();
            }
            if planted!(SaltOfSerial) {
                salt[..8].copy_from_slice(&processes::unix_ms().to_le_bytes());
                salt[8..].fill(0);
            }
        }
        Ok(())
    };
    work(&mut Salts::of(&mut random, pages))
}

impl Keys {
    pub(crate) fn new(ring: Keyring) -> Keys {
        Keys {
            master: ring.master().clone(),
            ring: RwLock::new(ring),
        }
    }

    pub(crate) fn tenant_of(self: &Arc<Keys>, namespace: &Namespace) -> Tenant {
        let name = namespace.fields().extra.get(TENANT_FIELD);
        Tenant {
            keys: self.clone(),
            name: name.map_or_else(|| NO_TENANT.to_owned(), Clone::clone),
        }
    }

    /// The keyring with a key for a new tenant. It is not used before [`Keys::settle`].
    pub(crate) fn with_tenant(
        &self,
        tenant: &Tenant,
        unix_s: u64,
    ) -> Result<Keyring, KeyringError> {
        let mut next = self.ring.read().clone();
        // No slot is given again: the oldest generation on the volumes is not known here.
        next.add_tenant(&tenant.name, Serial::ZERO, &mut random, unix_s)?;
        Ok(next)
    }

    /// Uses a keyring whose copy is durable.
    pub(crate) fn settle(&self, next: Keyring) {
        *self.ring.write() = next;
    }

    /// A keyring with the next generation may have been written in part.
    pub(crate) fn skip_generation(&self) {
        self.ring.write().skip_generation();
    }

    /// Encrypts the descriptor blocks among these blocks, which the core has encoded.
    pub(crate) fn seal_blocks(&self, bytes: &mut [u8]) -> Result<(), SealError> {
        let magic = Structure::DescriptorBlock.magic();
        for block in bytes.as_chunks_mut::<BLOCK_BYTES>().0 {
            if block.starts_with(&magic) {
                DescriptorBlock::seal(block, |named, body| {
                    self.master.seal(&mut random, named, body)
                })?;
            }
        }
        Ok(())
    }

    /// A descriptor block with a clear body.
    ///
    /// # Errors
    /// See [`DescriptorBlock::unseal`].
    pub fn open_block(&self, bytes: &[u8]) -> Result<[u8; BLOCK_BYTES], Damage> {
        let mut block: [u8; BLOCK_BYTES] = bytes.try_into().map_err(|_| Damage::Length {
            found: bytes.len() as u64,
        })?;
        DescriptorBlock::unseal(&mut block, |named, body, seal| {
            self.master.open(seal, named, body).is_ok()
        })?;
        Ok(block)
    }
}

impl Tenant {
    /// The key for new pages; `None` as long as the tenant has none.
    pub(crate) fn current(&self) -> Option<TenantKey> {
        let ring = self.keys.ring.read();
        ring.current(&self.name).ok().flatten().cloned()
    }

    /// The key of a slot.
    pub(crate) fn key(&self, slot: NonZeroU16) -> Option<TenantKey> {
        self.keys.ring.read().key(slot).cloned()
    }
}

/// The keyring of a store that is opened.
pub(crate) fn unlock(
    copy: KeyringCopy,
    wrapping: &larder_seal::WrappingKey,
) -> Result<Keys, KeyringError> {
    Ok(Keys::new(Keyring::open(copy, wrapping, wrapping.vault())?))
}

/// The keyring of a planted bug.
pub(crate) fn empty(
    store: StoreId,
    wrapping: &larder_seal::WrappingKey,
) -> Result<Keys, KeyringError> {
    let ring = Keyring::create(store, wrapping, wrapping.vault(), &mut random, 0);
    ring.map(Keys::new)
}

#[cfg(feature = "simulated")]
#[path = "keys/simulated.rs"]
pub mod simulated;

#[cfg(all(test, not(feature = "simulated")))]
#[path = "keys/tests.rs"]
mod tests;
