//! The keys of an open encrypted store: all of them in the process that owns it, and in a client
//! those of the tenants whose namespaces it has opened.
//!
//! A key is used in place, under a lock. Once it was removed, no call uses it any more.

mod lent;

use std::io::{self, Write};
use std::num::NonZeroU16;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use larder_base::planted;
use larder_base::runtime::{RwLock, descriptors};
use larder_base::system::processes;
use larder_format::{
    BLOCK_BYTES, Damage, DescriptorBlock, KeyringCopy, Namespace, PageChecksum, PageKey,
    PageRecord, Proof, Quotas, Run, Seal, Serial, StoreId, Structure, TENANT_FIELD,
};
use larder_seal::{
    Keyring, KeyringError, MasterKey, NO_TENANT, PageName, Salts, SealError, TenantKey, VaultError,
    WrappingKey,
};
use serde::{Deserialize, Serialize};

pub(crate) use lent::{Lent, LentKeys};

/// Most keys of a tenant that a client gets: as many as the smallest pipe holds.
const LENT_MAX: usize = 4096 / 32;

/// See the module.
#[derive(Debug)]
pub struct Keys {
    ring: RwLock<Ring>,
    master: MasterKey,
}

#[derive(Debug)]
struct Ring {
    keys: Keyring,
    /// The slots of the tenant that is being erased: no page is encrypted with their keys.
    erasing: Vec<NonZeroU16>,
    /// Pages of former keys are encrypted anew when they move.
    is_renewing: bool,
}

/// While it lives, a tenant is being erased.
#[derive(Debug)]
pub(crate) struct Erasing<'k> {
    keys: &'k Keys,
    /// The slots of its keys.
    pub(crate) slots: Vec<NonZeroU16>,
    /// The keyring without them. It is not used before [`Keys::settle`].
    pub(crate) next: Keyring,
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
    /// See [`Keyring::erased_until`].
    pub(crate) erased_until: u64,
}

/// What a client needs the keys of a tenant for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeyUse {
    /// For pages that are stored.
    Get,
    /// For new pages, or for pages that come back from elsewhere and were made at this time. The
    /// put waits so long for another key that is being made.
    Put {
        made_unix_s: Option<u64>,
        wait_ms: u64,
    },
}

impl KeyUse {
    /// That of a put.
    pub(crate) fn of_put(made_unix_s: Option<u64>, wait: Duration) -> KeyUse {
        KeyUse::Put {
            made_unix_s,
            wait_ms: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
        }
    }
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

/// Why a page was not encrypted anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unrenewed {
    /// Its former key does not open it.
    Unopened,
    /// There are no random bytes, or the cipher failed. Its bytes are gone from this memory.
    NotSealed,
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
            ring: RwLock::new(Ring {
                keys: ring,
                erasing: Vec::new(),
                is_renewing: false,
            }),
        }
    }

    pub(crate) fn tenant_of(self: &Arc<Keys>, namespace: &Namespace) -> Tenant {
        let name = namespace.fields().extra.get(TENANT_FIELD);
        Tenant(Source::Own {
            keys: self.clone(),
            name: name.map_or_else(|| NO_TENANT.to_owned(), Clone::clone),
        })
    }

    /// A namespace by its name in this store. The fingerprint of its fields, which has the tenant's
    /// name in it, is given to no caller, metric or log: who knows it can test guesses.
    ///
    /// # Errors
    /// The key cannot be used, or the cipher failed.
    pub fn named(&self, namespace: &Namespace) -> Result<Namespace, VaultError> {
        self.master.namespace(namespace)
    }

    /// A tenant as metrics and logs have it: by the slot of its key, or by its identity in the
    /// keyring as long as it has none.
    pub(crate) fn shown_tenant(&self, name: &str) -> String {
        let slot = self.ring.read().current(name).map(TenantKey::slot);
        match (slot, self.master.tenant(name)) {
            (Some(slot), _) => format!("slot {slot}"),
            (None, Ok(id)) => format!("without a key {id}"),
            (None, Err(_)) => "without a key".to_owned(),
        }
    }

    /// The keyring with a key for a new tenant. It is not used before [`Keys::settle`]. `oldest` is
    /// the lowest generation on any volume.
    fn with_tenant(
        &self,
        tenant: &str,
        oldest: Serial,
        unix_s: u64,
    ) -> Result<Keyring, KeyringError> {
        let mut next = self.ring.read().keys.clone();
        next.add_tenant(tenant, oldest, &mut random, unix_s)?;
        Ok(next)
    }

    /// The keyring with its master key wrapped by one key in place of another.
    pub(crate) fn rewrapped(
        &self,
        from: &WrappingKey,
        to: &WrappingKey,
    ) -> Result<Keyring, KeyringError> {
        let mut next = self.ring.read().keys.clone();
        next.add_wrap(to, &mut random)?;
        next.remove_wrap(from.id(), &mut random)?;
        Ok(next)
    }

    /// The keyring with a new key for all tenants, or for one of them.
    pub(crate) fn with_new_keys(
        &self,
        tenant: Option<&str>,
        unix_s: u64,
    ) -> Result<Keyring, KeyringError> {
        let mut next = self.ring.read().keys.clone();
        next.renew(tenant, &mut random, unix_s)?;
        Ok(next)
    }

    /// The keyring without the former keys of all tenants, or of one of them. `run` is that of the
    /// last open.
    pub(crate) fn without_former_keys(
        &self,
        tenant: Option<&str>,
        run: Run,
    ) -> Result<Keyring, KeyringError> {
        let mut next = self.ring.read().keys.clone();
        next.erase_earlier(tenant, above(run), &mut random)?;
        Ok(next)
    }

    /// From here on pages of former keys are encrypted anew when they move.
    pub(crate) fn renew(&self) {
        self.ring.write().is_renewing = true;
    }

    /// Whether the key of a slot is a former one, and the tenant has another one.
    #[must_use]
    pub fn is_renewed(&self, slot: NonZeroU16) -> bool {
        self.ring.read().keys.renewed(slot).is_some()
    }

    /// Encrypts the stored bytes of a page anew. `None`, and the bytes as they are, if keys are not
    /// renewed, or the page has a present one.
    pub(crate) fn renewed(
        &self,
        page: &PageRecord,
        stored: &mut [u8],
    ) -> Option<Result<Proof, Unrenewed>> {
        let ring = self.ring.read();
        let seal = page.seal.as_ref().filter(|_| ring.is_renewing)?;
        let to = ring.keys.renewed(seal.slot)?;
        let from = ring.keys.key(seal.slot)?;
        let name = PageName {
            namespace: page.namespace,
            key: page.key,
            blocks: page.blocks,
            stored: page.stored,
        };
        if from.open(&name, seal, &mut [stored]).is_err() {
            return Some(Err(Unrenewed::Unopened));
        }
        let mut checksum = PageChecksum::new(page.namespace, &page.key);
        let sealed = with_salts(&page.key, 1, |salts| {
            to.seal(salts, &name, stored, |bytes| checksum.blocks(bytes))
        });
        let proof = sealed.map(|seal| Proof {
            checksum: checksum.finish(),
            seal: Some(seal),
        });
        Some(proof.map_err(|_| Unrenewed::NotSealed))
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
        let key = ring.keys.key(seal.slot).ok_or(Unopened::Erased)?;
        let opened = key.open(name, seal, &mut [stored]);
        opened.map_err(|_| Unopened::Tag)
    }

    /// Begins to erase a tenant. From here on no page is encrypted with its keys, and no page that
    /// was encrypted with them is stored. `run` is that of this open: the pages of the keys are in
    /// no later generation.
    pub(crate) fn erase(&self, tenant: &str, run: Run) -> Result<Erasing<'_>, KeyringError> {
        let serial = above(run);
        let mut ring = self.ring.write();
        let mut next = ring.keys.clone();
        let slots = next.erase(tenant, serial, &mut random)?;
        ring.erasing.clone_from(&slots);
        let keys = self;
        Ok(Erasing { keys, slots, next })
    }

    /// Uses a keyring whose copy is durable. Keys that it lacks are wiped.
    pub(crate) fn settle(&self, next: Keyring) {
        self.ring.write().keys = next;
    }

    /// A keyring may have been written in part: no later one has its generation.
    pub(crate) fn skip_past(&self, written: &Keyring) {
        let mut ring = self.ring.write();
        while ring.keys.copy().generation < written.copy().generation {
            ring.keys.skip_generation();
        }
    }

    /// A page that is stored now has a key: else it would never open.
    pub(crate) fn accepts(&self, proof: &Proof) -> bool {
        let seal = proof.seal.as_ref();
        seal.is_some_and(|seal| self.ring.read().has(seal.slot) || planted!(LateSealed))
    }

    /// Whether the key of a slot is erased.
    pub(crate) fn is_erased(&self, slot: NonZeroU16) -> bool {
        self.ring.read().keys.is_erased(slot)
    }

    /// Whether the key of a slot is not erased, as far as no other thread changes the keyring.
    #[cfg(feature = "simulated")]
    pub(crate) fn may_have(&self, slot: NonZeroU16) -> bool {
        let ring = self.ring.try_read();
        ring.is_none_or(|ring| !ring.keys.is_erased(slot))
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
            .map_while(|slot| ring.keys.key(*slot))
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
            self.master.seal(&mut random, named, groups)
        })
    }

    /// Decrypts the groups of a copy of the quotas.
    pub(crate) fn open_quotas(&self, copy: &mut [u8]) -> Result<(), Damage> {
        Quotas::unseal(copy, |named, groups, seal| {
            self.master.open(seal, named, groups).is_ok()
        })
    }

    /// The copy of the keyring to write.
    #[cfg(not(feature = "simulated"))]
    pub(crate) fn copy(&self) -> KeyringCopy {
        self.ring.read().keys.copy().clone()
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

impl Ring {
    /// Whether pages may be encrypted with the key of a slot.
    fn has(&self, slot: NonZeroU16) -> bool {
        self.keys.key(slot).is_some() && !self.erasing.contains(&slot)
    }

    /// The key for new pages of a tenant.
    fn current(&self, tenant: &str) -> Option<&TenantKey> {
        let key = self.keys.current(tenant).ok().flatten();
        key.filter(|key| self.has(key.slot()))
    }

    /// Whether pages of a tenant are taken that were made at this time; see [`Tenant::takes`].
    fn takes(&self, tenant: &str, made_unix_s: Option<u64>) -> bool {
        let until = || self.keys.erased_until(tenant).unwrap_or(u64::MAX);
        made_unix_s.is_none_or(|made| is_behind(made, until()))
    }
}

impl Drop for Erasing<'_> {
    fn drop(&mut self) {
        self.keys.ring.write().erasing.clear();
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

    /// Uses the key for new pages that were made at this time; `None` as long as the tenant has
    /// none, or where it takes no such pages.
    pub(crate) fn with_current<R>(
        &self,
        made_unix_s: Option<u64>,
        work: impl FnOnce(&TenantKey) -> R,
    ) -> Option<R> {
        match &self.0 {
            Source::Own { keys, name } => {
                let ring = keys.ring.read();
                let takes = ring.takes(name, made_unix_s);
                ring.current(name).filter(|_| takes).map(work)
            }
            Source::Lent(lent) => {
                let keys = lent.keys();
                let takes = keys.takes(made_unix_s);
                keys.current().filter(|_| takes).map(work)
            }
        }
    }

    /// Whether pages are taken that were made at this time, in seconds since 1970. After an erasure
    /// of the tenant none of before its new key is: archives and remotes may still have them.
    /// `None`: they are computed now.
    pub(crate) fn takes(&self, made_unix_s: Option<u64>) -> bool {
        match &self.0 {
            Source::Own { keys, name } => keys.ring.read().takes(name, made_unix_s),
            Source::Lent(lent) => lent.keys().takes(made_unix_s),
        }
    }

    /// Uses the key of a slot.
    pub(crate) fn with_key<R>(
        &self,
        slot: NonZeroU16,
        work: impl FnOnce(&TenantKey) -> R,
    ) -> Option<R> {
        match &self.0 {
            Source::Own { keys, .. } => keys.ring.read().keys.key(slot).map(work),
            Source::Lent(lent) => lent.keys().key(slot).map(work),
        }
    }

    /// Whether new pages can be encrypted.
    pub(crate) fn has_key(&self) -> bool {
        self.with_current(None, |_| ()).is_some()
    }

    /// The keyring of the owner with a key for this new tenant. It is not used before
    /// [`Keys::settle`].
    pub(crate) fn added(
        &self,
        oldest: Serial,
        unix_s: u64,
    ) -> Option<Result<Keyring, KeyringError>> {
        match &self.0 {
            Source::Own { keys, name } => Some(keys.with_tenant(name, oldest, unix_s)),
            Source::Lent(_) => None,
        }
    }

    /// Whether the tenant is being erased.
    pub(crate) fn is_erasing(&self) -> bool {
        let Source::Own { keys, name } = &self.0 else {
            return false;
        };
        let ring = keys.ring.read();
        let current = ring.keys.current(name).ok().flatten();
        current.is_some_and(|key| ring.erasing.contains(&key.slot()))
    }

    /// The slots of the keys that a client of this tenant gets.
    pub(crate) fn slots(&self) -> Result<Slots, VaultError> {
        let Source::Own { keys, name } = &self.0 else {
            return Ok(Slots::default());
        };
        let ring = keys.ring.read();
        let (current, earlier) = ring.keys.keys_of(name)?;
        let may_use = |key: &&TenantKey| ring.has(key.slot());
        let current = current.filter(may_use);
        let all = current
            .into_iter()
            .chain(earlier.into_iter().filter(may_use));
        Ok(Slots {
            current: current.map(TenantKey::slot),
            all: all.map(TenantKey::slot).take(LENT_MAX).collect(),
            erased_until: ring.keys.erased_until(name)?,
        })
    }
}

/// Whether a time is after the erasure of a tenant, if there was one.
fn is_behind(made_unix_s: u64, erased_until: u64) -> bool {
    erased_until == 0 || made_unix_s > erased_until
}

/// Above the generations of this run, and of all before it.
fn above(run: Run) -> Serial {
    run.next().map_or(Serial::MAX, Serial::first_of)
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
