//! The keys of a tenant in a client, as its owner has lent them.

use std::fs::File;
use std::io::{self, Read};
use std::num::NonZeroU16;
use std::os::fd::OwnedFd;

use larder_base::runtime::{RwLock, RwLockReadGuard};
use larder_seal::{TenantKey, Vault, VaultError};

use super::{Slots, is_behind};

/// See the module. Shared by all calls of a namespace.
#[derive(Debug, Default)]
pub(crate) struct Lent {
    keys: RwLock<LentKeys>,
}

/// The keys of a tenant.
#[derive(Debug, Default)]
pub(crate) struct LentKeys {
    /// The first key is for new pages.
    has_current: bool,
    keys: Vec<TenantKey>,
    erased_until: u64,
}

/// Why keys did not arrive.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeysLost {
    #[error("the owner did not send the keys whole: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Vault(#[from] VaultError),
}

impl Lent {
    pub(crate) fn keys(&self) -> RwLockReadGuard<'_, LentKeys> {
        self.keys.read()
    }

    pub(crate) fn set(&self, keys: LentKeys) {
        *self.keys.write() = keys;
    }

    /// The slots of the keys. `None` while they change.
    #[cfg(any(test, feature = "simulated"))]
    pub(crate) fn slots(&self) -> Option<Vec<NonZeroU16>> {
        let keys = self.keys.try_read()?;
        Some(keys.keys.iter().map(TenantKey::slot).collect())
    }

    /// Wipes the keys of these slots. No call uses one any more when this returns.
    pub(crate) fn forget(&self, slots: &[NonZeroU16]) {
        let mut keys = self.keys.write();
        *keys = std::mem::take(&mut *keys).without(slots);
    }
}

impl LentKeys {
    /// Takes the keys of these slots from a pipe.
    pub(crate) fn take(slots: &Slots, pipe: OwnedFd, vault: &Vault) -> Result<LentKeys, KeysLost> {
        // Reads of a pipe are not those of the simulated files.
        let mut pipe = File::from(pipe);
        let key = |slot: &NonZeroU16| {
            TenantKey::taken(vault, *slot, |key| Ok::<_, KeysLost>(pipe.read_exact(key)?))
        };
        Ok(LentKeys {
            has_current: slots.current.is_some(),
            keys: slots.all.iter().map(key).collect::<Result<_, _>>()?,
            erased_until: slots.erased_until,
        })
    }

    /// The same without the keys of these slots.
    pub(crate) fn without(mut self, slots: &[NonZeroU16]) -> LentKeys {
        let is_gone = |key: &TenantKey| slots.contains(&key.slot());
        self.has_current &= !self.keys.first().is_some_and(is_gone);
        self.keys.retain(|key| !is_gone(key));
        self
    }

    pub(super) fn takes(&self, made_unix_s: Option<u64>) -> bool {
        made_unix_s.is_none_or(|made| is_behind(made, self.erased_until))
    }

    pub(super) fn current(&self) -> Option<&TenantKey> {
        self.keys.first().filter(|_| self.has_current)
    }

    pub(super) fn key(&self, slot: NonZeroU16) -> Option<&TenantKey> {
        self.keys.iter().find(|key| key.slot() == slot)
    }

    /// Whether a key is there.
    pub(crate) fn has(&self, slot: NonZeroU16) -> bool {
        self.key(slot).is_some()
    }
}
