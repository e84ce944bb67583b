//! The keys of an open encrypted store: all of them in the process that owns it, and in a client
//! those of the tenants whose namespaces it has opened.
//!
//! A key is used in place, under a lock. Once it was removed, no call uses it any more.

mod lent;

use std::io::{self, Write};
use std::num::NonZeroU16;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use larder_base::planted;
use larder_base::runtime::{RwLock, descriptors};
use larder_base::system::processes;
use larder_format::{
    BLOCK_BYTES, Damage, DescriptorBlock, KeyringCopy, Namespace, PageKey, Proof, Quotas, Seal,
    Serial, StoreId, Structure, TENANT_FIELD,
};
use larder_seal::{
    Keyring, KeyringError, MasterKey, NO_TENANT, PageName, Salts, SealError, TenantKey, VaultError,
    WrappingKey,
};

pub(crate) use lent::{Lent, LentKeys};

/// Most keys of a tenant that a client gets: as many as the smallest pipe holds.
const LENT_MAX: usize = 4096 / 32;

/// See the module.
#[derive(Debug)]
pub struct Keys {
    ring: RwLock<Keyring>,
    master: MasterKey,
}

/// The tenant of a namespace in an encrypted store.
#[derive(Clone, Debug)]
pub struct Tenant(Source);

#[derive(Clone, Debug)]
enum Source {
    /// This process owns the store.
    Own {
        keys: Arc<Keys>,
        name: String,
    },
    Lent(Arc<Lent>),
}

/// The slots of the keys of a tenant that a client gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slots {
    /// That of the key for new pages.
    pub(crate) current: Option<NonZeroU16>,
    /// All of them, that one first.
    pub(crate) all: Vec<NonZeroU16>,
}

/// Why a page with the right checksum does not open. It is not damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Unopened {
    /// Its tenant was erased.
    #[error("its tenant was erased")]
    Erased,
    /// The key is wrong, or a writer without it changed the record.
    #[error("the key of its tenant does not open it")]
    Tag,
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
        Tenant(Source::Own {
            keys: self.clone(),
            name: name.map_or_else(|| NO_TENANT.to_owned(), Clone::clone),
        })
    }

    /// The keyring with a key for a new tenant. It is not used before [`Keys::settle`].
    fn with_tenant(&self, tenant: &str, unix_s: u64) -> Result<Keyring, KeyringError> {
        let mut next = self.ring.read().clone();
        // No slot is given again: the oldest generation on the volumes is not known here.
        next.add_tenant(tenant, Serial::ZERO, &mut random, unix_s)?;
        Ok(next)
    }

    /// The keyring with its master key wrapped by one key in place of another.
    pub(crate) fn rewrapped(
        &self,
        from: &WrappingKey,
        to: &WrappingKey,
    ) -> Result<Keyring, KeyringError> {
        let mut next = self.ring.read().clone();
        next.add_wrap(to, &mut random)?;
        next.remove_wrap(from.id(), &mut random)?;
        Ok(next)
    }

    /// Decrypts a page in place, whose stored bytes have the right checksum.
    ///
    /// # Errors
    /// See [`Unopened`].
    pub fn open_page(
        &self,
        name: &PageName,
        seal: &Seal,
        stored: &mut [u8],
    ) -> Result<(), Unopened> {
        let ring = self.ring.read();
        let key = ring.key(seal.slot).ok_or(Unopened::Erased)?;
        let opened = key.open(name, seal, &mut [stored]);
        opened.map_err(|_| Unopened::Tag)
    }

    /// Uses a keyring whose copy is durable.
    pub(crate) fn settle(&self, next: Keyring) {
        *self.ring.write() = next;
    }

    /// A keyring with the next generation may have been written in part.
    pub(crate) fn skip_generation(&self) {
        self.ring.write().skip_generation();
    }

    /// A page that is stored now has a key: else it would never open.
    pub(crate) fn accepts(&self, proof: &Proof) -> bool {
        let seal = proof.seal.as_ref();
        seal.is_some_and(|seal| self.ring.read().key(seal.slot).is_some())
    }

    /// The keys of these slots, to be read from a pipe. A key that has been erased meanwhile, and
    /// all behind it, are not in it.
    pub(crate) fn pass(&self, slots: &[NonZeroU16]) -> io::Result<OwnedFd> {
        descriptors::cover()?;
        let (reader, mut writer) = io::pipe()?;
        let ring = self.ring.read();
        for key in slots
            .iter()
            .take(LENT_MAX)
            .map_while(|slot| ring.key(*slot))
        {
            let given = key.given(|key| writer.write_all(key));
            given.map_err(io::Error::other)??;
        }
        Ok(reader.into())
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

    /// Encrypts the groups of an encoded copy of the quotas.
    pub(crate) fn seal_quotas(&self, copy: &mut [u8]) -> Result<(), SealError> {
        Quotas::seal(copy, |named, groups| {
            let label = quotas_label(named);
            self.master.seal(&mut random, &label, groups)
        })
    }

    /// Decrypts the groups of a copy of the quotas.
    pub(crate) fn open_quotas(&self, copy: &mut [u8]) -> Result<(), Damage> {
        Quotas::unseal(copy, |named, groups, seal| {
            let label = quotas_label(named);
            self.master.open(seal, &label, groups).is_ok()
        })
    }

    /// The copy of the keyring to write.
    #[cfg(not(feature = "simulated"))]
    pub(crate) fn copy(&self) -> KeyringCopy {
        self.ring.read().copy().clone()
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
    /// A tenant whose keys the owner lends to this process.
    pub(crate) fn lent(keys: Arc<Lent>) -> Tenant {
        Tenant(Source::Lent(keys))
    }

    /// The keys that the owner has lent, in a client.
    pub(crate) fn as_lent(&self) -> Option<&Lent> {
        match &self.0 {
            Source::Own { .. } => None,
            Source::Lent(lent) => Some(lent),
        }
    }

    /// Uses the key for new pages; `None` as long as the tenant has none.
    pub(crate) fn with_current<R>(&self, work: impl FnOnce(&TenantKey) -> R) -> Option<R> {
        match &self.0 {
            Source::Own { keys, name } => {
                let ring = keys.ring.read();
                ring.current(name).ok().flatten().map(work)
            }
            Source::Lent(lent) => lent.keys().current().map(work),
        }
    }

    /// Uses the key of a slot.
    pub(crate) fn with_key<R>(
        &self,
        slot: NonZeroU16,
        work: impl FnOnce(&TenantKey) -> R,
    ) -> Option<R> {
        match &self.0 {
            Source::Own { keys, .. } => keys.ring.read().key(slot).map(work),
            Source::Lent(lent) => lent.keys().key(slot).map(work),
        }
    }

    /// Whether new pages can be encrypted.
    pub(crate) fn has_key(&self) -> bool {
        self.with_current(|_| ()).is_some()
    }

    /// The keyring of the owner with a key for this new tenant. It is not used before
    /// [`Keys::settle`].
    pub(crate) fn added(&self, unix_s: u64) -> Option<Result<Keyring, KeyringError>> {
        match &self.0 {
            Source::Own { keys, name } => Some(keys.with_tenant(name, unix_s)),
            Source::Lent(_) => None,
        }
    }

    /// The slots of the keys that a client of this tenant gets.
    pub(crate) fn slots(&self) -> Result<Slots, VaultError> {
        let Source::Own { keys, name } = &self.0 else {
            return Ok(Slots::default());
        };
        let ring = keys.ring.read();
        let (current, earlier) = ring.keys_of(name)?;
        let all = current.into_iter().chain(earlier);
        Ok(Slots {
            current: current.map(TenantKey::slot),
            all: all.map(TenantKey::slot).take(LENT_MAX).collect(),
        })
    }
}

/// What the tag of a block of quotas covers besides its groups. Blocks of descriptors have labels
/// of another length.
fn quotas_label(named: &[u8]) -> Vec<u8> {
    [&b"larder quotas 1"[..], named].concat()
}

/// The keys of a new store.
pub(crate) fn create(
    store: StoreId,
    wrapping: &WrappingKey,
    unix_s: u64,
) -> Result<Keys, KeyringError> {
    let ring = Keyring::create(store, wrapping, wrapping.vault(), &mut random, unix_s);
    ring.map(Keys::new)
}

/// The keyring of a store that is opened.
pub(crate) fn unlock(copy: KeyringCopy, wrapping: &WrappingKey) -> Result<Keys, KeyringError> {
    Ok(Keys::new(Keyring::open(copy, wrapping, wrapping.vault())?))
}

/// The keyring of a planted bug.
pub(crate) fn empty(store: StoreId, wrapping: &WrappingKey) -> Result<Keys, KeyringError> {
    create(store, wrapping, 0)
}

#[cfg(feature = "simulated")]
#[path = "keys/simulated.rs"]
pub mod simulated;

#[cfg(all(test, not(feature = "simulated")))]
#[path = "keys/tests.rs"]
pub(crate) mod tests;
