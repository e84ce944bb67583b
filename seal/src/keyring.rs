//! The keys of a store: the master key and a key for each tenant.
//!
//! A keyring is changed as a value: a change returns the copy to write, with the next generation.
//! The caller makes the copy durable on all volumes before a page uses a new key, and before an
//! erasure is reported.
//!
//! | structure | key | associated |
//! |---|---|---|
//! | tag of a copy | keyring key of the master key | label, all else of the copy |
//! | key of a slot | keyring key of the master key | label, store, number, tenant, time |
//! | master key | wrapping key | label, store, wrapping key's id |

use std::collections::HashMap;
use std::num::NonZeroU16;

use larder_format::{
    KEY_SLOTS_MAX, KeyWrap, KeyringCopy, KeyringSlot, MetadataSeal, Serial, SlotState, StoreId,
    TenantId, WRAPS_MAX, WrapId,
};

use crate::cipher::TAG_BYTES;
use crate::master::{MasterKey, open_with, seal_with};
use crate::page::{OpenError, SealError, TenantKey};
use crate::salts::Random;
use crate::vault::{Vault, VaultError};
use crate::wrapping::{WrappingKey, unwrap_key, wrap_key};

/// In the slot of a former key that is erased: no tenant has this id.
const OF_NO_TENANT: TenantId = TenantId::from_bytes([0; 16]);

/// The name of the tenant of namespaces that name none.
pub const NO_TENANT: &str = "";

/// Why a keyring does not open, or is not changed.
#[derive(Debug, thiserror::Error)]
pub enum KeyringError {
    /// The wrapping key is not one of this store.
    #[error(
        "the key {given} is not a key of this store, whose keyring is wrapped by {}: name the \
         file or command of such a key",
        list(wraps)
    )]
    WrongKey {
        /// The key that was given.
        given: WrapId,
        /// The keys that wrap the master key.
        wraps: Vec<WrapId>,
    },
    /// The keyring is whole, and was not written with this key.
    #[error("the keyring was changed by a writer without its key: restore the volumes")]
    Forged,
    /// There is no room for a tenant.
    #[error(
        "the keyring has {KEY_SLOTS_MAX} tenants, and takes no more: erase some, or use a second \
         store"
    )]
    Full,
    /// No tenant has this name.
    #[error("the keyring has no such tenant")]
    NoTenant,
    /// There is no room for a wrap.
    #[error("the keyring has {WRAPS_MAX} wrapping keys, and takes no more: remove some")]
    TooManyWraps,
    /// The last wrap would go.
    #[error("this is the only wrapping key of the store: add another one first")]
    LastWrap,
    /// There is no such wrap.
    #[error("no wrapping key of the store has the id {0}")]
    NoWrap(WrapId),
    /// There are no random bytes, or the cipher failed.
    #[error(transparent)]
    Seal(#[from] SealError),
}

impl From<VaultError> for KeyringError {
    fn from(error: VaultError) -> KeyringError {
        KeyringError::Seal(error.into())
    }
}

fn list(ids: &[WrapId]) -> String {
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    ids.join(", ")
}

/// The keys of a store.
#[derive(Clone, Debug)]
pub struct Keyring {
    copy: KeyringCopy,
    vault: Vault,
    master: MasterKey,
    /// By the number of the slot, less one. `None`: erased.
    keys: Vec<Option<TenantKey>>,
    current: HashMap<TenantId, NonZeroU16>,
}

impl Keyring {
    /// The keyring of a new store. It has a key for namespaces without a tenant.
    ///
    /// # Errors
    /// There are no random bytes, no memory for keys, or the cipher failed.
    pub fn create(
        store: StoreId,
        wrapping: &WrappingKey,
        vault: &Vault,
        random: &mut dyn Random,
        unix_s: u64,
    ) -> Result<Keyring, KeyringError> {
        let master = MasterKey::draw(vault, random)?;
        let copy = KeyringCopy {
            store,
            generation: 0,
            nonce: [0; 24],
            tag: [0; TAG_BYTES],
            wraps: vec![wrapping.wrap(random, store, &master)?],
            slots: Vec::new(),
        };
        let mut keyring = Keyring {
            copy,
            vault: vault.clone(),
            master,
            keys: Vec::new(),
            current: HashMap::new(),
        };
        keyring.add_tenant(NO_TENANT, Serial::ZERO, random, unix_s)?;
        Ok(keyring)
    }

    /// The keyring of a copy.
    ///
    /// # Errors
    /// See [`KeyringError`].
    pub fn open(
        copy: KeyringCopy,
        wrapping: &WrappingKey,
        vault: &Vault,
    ) -> Result<Keyring, KeyringError> {
        let wrap = wrap_of(&copy, wrapping)?;
        let master = wrapping.unwrap(vault, copy.store, wrap).map_err(forged)?;
        let seal = MetadataSeal {
            nonce: copy.nonce,
            tag: copy.tag,
        };
        open_with(master.keyring(), &seal, &covered(&copy), &mut []).map_err(forged)?;
        let mut keyring = Keyring {
            keys: Vec::with_capacity(copy.slots.len()),
            current: HashMap::new(),
            vault: vault.clone(),
            copy,
            master,
        };
        for (number, slot) in numbers().zip(&keyring.copy.slots) {
            let key = match slot.state {
                SlotState::Erased(_) => None,
                SlotState::Current(key) | SlotState::Earlier(key) => {
                    let label = label(keyring.copy.store, number, slot);
                    let key = unwrap_key(keyring.master.keyring(), vault, &label, &key);
                    Some(TenantKey::new(key.map_err(forged)?, number))
                }
            };
            keyring.keys.push(key);
            if matches!(slot.state, SlotState::Current(_)) {
                keyring.current.insert(slot.tenant, number);
            }
        }
        Ok(keyring)
    }

    /// The master key.
    #[must_use]
    pub fn master(&self) -> &MasterKey {
        &self.master
    }

    /// The copy to write.
    #[must_use]
    pub fn copy(&self) -> &KeyringCopy {
        &self.copy
    }

    /// The key for new pages of a tenant; `None` if the tenant is new or erased.
    ///
    /// # Errors
    /// The key cannot be used, or the cipher failed.
    pub fn current(&self, tenant: &str) -> Result<Option<&TenantKey>, VaultError> {
        let slot = self.current.get(&self.master.tenant(tenant)?);
        Ok(slot.and_then(|slot| self.key(*slot)))
    }

    /// The time until which pages of a tenant were made that come back from elsewhere after its
    /// erasure, in seconds since 1970: that of its first key since then, and no end without one. 0
    /// if the tenant was not erased.
    ///
    /// # Errors
    /// The key cannot be used, or the cipher failed.
    pub fn erased_until(&self, tenant: &str) -> Result<u64, VaultError> {
        let tenant = self.master.tenant(tenant)?;
        let slots = || self.copy.slots.iter().filter(|slot| slot.tenant == tenant);
        let is_erased = |slot: &KeyringSlot| matches!(slot.state, SlotState::Erased(_));
        if !slots().any(is_erased) {
            return Ok(0);
        }
        let first = slots().filter(|slot| !is_erased(slot));
        let first = first.map(|slot| slot.created_unix_s).min();
        Ok(first.unwrap_or(u64::MAX))
    }

    /// Whether the key of a slot is erased.
    #[must_use]
    pub fn is_erased(&self, slot: NonZeroU16) -> bool {
        let slot = self.copy.slots.get(place_of(slot));
        slot.is_some_and(|slot| matches!(slot.state, SlotState::Erased(_)))
    }

    /// The keys of a tenant: that for new pages, then the earlier ones, the newest first.
    ///
    /// # Errors
    /// The key cannot be used, or the cipher failed.
    pub fn keys_of(
        &self,
        tenant: &str,
    ) -> Result<(Option<&TenantKey>, Vec<&TenantKey>), VaultError> {
        let tenant = self.master.tenant(tenant)?;
        let current = self.current.get(&tenant).copied();
        let mut earlier: Vec<_> = numbers()
            .zip(&self.copy.slots)
            .filter(|(number, slot)| slot.tenant == tenant && Some(*number) != current)
            .collect();
        earlier.sort_by_key(|(_, slot)| std::cmp::Reverse(slot.created_unix_s));
        let earlier = earlier
            .into_iter()
            .filter_map(|(number, _)| self.key(number));
        Ok((current.and_then(|slot| self.key(slot)), earlier.collect()))
    }

    /// The key of a slot; `None` if it is erased, or was never given.
    #[must_use]
    pub fn key(&self, slot: NonZeroU16) -> Option<&TenantKey> {
        self.keys.get(place_of(slot))?.as_ref()
    }

    /// Gives a tenant a new key, and returns its slot. A former key stays for the pages that have
    /// it. An erased slot is given again if no segment has a generation below its erasure: `oldest`
    /// is the lowest generation on any volume. That of an erased tenant is given in a full keyring
    /// only, since it is the memory of that erasure.
    ///
    /// # Errors
    /// See [`KeyringError`]. The keyring is unchanged then.
    pub fn add_tenant(
        &mut self,
        tenant: &str,
        oldest: Serial,
        random: &mut dyn Random,
        unix_s: u64,
    ) -> Result<NonZeroU16, KeyringError> {
        let tenant = self.master.tenant(tenant)?;
        self.add_key(tenant, oldest, random, unix_s)
    }

    fn add_key(
        &mut self,
        tenant: TenantId,
        oldest: Serial,
        random: &mut dyn Random,
        unix_s: u64,
    ) -> Result<NonZeroU16, KeyringError> {
        let mut next = self.copy.clone();
        let place = place_in(&next.slots, oldest);
        let number = numbers().nth(place).filter(|_| place < KEY_SLOTS_MAX);
        let number = number.ok_or(KeyringError::Full)?;
        let key = self
            .vault
            .keep(|key| random.fill(key).map_err(SealError::from))?;
        let mut slot = KeyringSlot {
            tenant,
            created_unix_s: unix_s,
            state: SlotState::Erased(Serial::ZERO),
        };
        let label = label(next.store, number, &slot);
        slot.state = SlotState::Current(wrap_key(self.master.keyring(), random, &label, &key)?);
        if let Some(former) = self.former(tenant, &mut next)
            && let SlotState::Current(key) = former.state
        {
            former.state = SlotState::Earlier(key);
        }
        match next.slots.get_mut(place) {
            Some(free) => *free = slot,
            None => next.slots.push(slot),
        }
        self.settle(next, random)?;
        let key = Some(TenantKey::new(key, number));
        match self.keys.get_mut(place) {
            Some(free) => *free = key,
            None => self.keys.push(key),
        }
        self.current.insert(tenant, number);
        Ok(number)
    }

    /// Gives each tenant a new key, or one of them. Tenants that still have an earlier key keep
    /// theirs: the pages of one renewal are encrypted anew before the next renewal.
    ///
    /// # Errors
    /// See [`KeyringError`]. The keyring is of no use then.
    pub fn renew(
        &mut self,
        tenant: Option<&str>,
        random: &mut dyn Random,
        unix_s: u64,
    ) -> Result<(), KeyringError> {
        let mut tenants: Vec<TenantId> = match tenant {
            None => self.current.keys().copied().collect(),
            Some(name) => {
                let tenant = self.master.tenant(name)?;
                if !self.current.contains_key(&tenant) {
                    return Err(KeyringError::NoTenant);
                }
                vec![tenant]
            }
        };
        let has_earlier = |tenant: &TenantId| {
            let mut slots = self.copy.slots.iter();
            slots.any(|it| it.tenant == *tenant && matches!(it.state, SlotState::Earlier(_)))
        };
        tenants.retain(|tenant| !has_earlier(tenant));
        tenants.sort_unstable();
        for tenant in tenants {
            self.add_key(tenant, Serial::ZERO, random, unix_s)?;
        }
        Ok(())
    }

    /// The key for new pages of the tenant with an earlier key in this slot; `None` if the key in
    /// the slot is no earlier one.
    #[must_use]
    pub fn renewed(&self, slot: NonZeroU16) -> Option<&TenantKey> {
        let slot = self.copy.slots.get(place_of(slot))?;
        let is_earlier = matches!(slot.state, SlotState::Earlier(_));
        let current = self.current.get(&slot.tenant).filter(|_| is_earlier);
        self.key(*current?)
    }

    /// Erases a tenant: its keys are gone from the memory of this process, and from the next copy.
    /// `serial` is above the generation of each segment that may have its pages. Returns the slots.
    ///
    /// # Errors
    /// See [`KeyringError`]. The keyring is unchanged then.
    pub fn erase(
        &mut self,
        tenant: &str,
        serial: Serial,
        random: &mut dyn Random,
    ) -> Result<Vec<NonZeroU16>, KeyringError> {
        let tenant = self.master.tenant(tenant)?;
        let erased = self.erase_slots(serial, random, |slot| slot.tenant == tenant)?;
        self.current.remove(&tenant);
        Ok(erased)
    }

    /// Erases the earlier keys of all tenants, or of one of them, as [`Keyring::erase`]. Their
    /// slots are no tenant's any more: the tenants are not erased.
    ///
    /// # Errors
    /// See [`KeyringError`]. The keyring is unchanged then.
    pub fn erase_earlier(
        &mut self,
        tenant: Option<&str>,
        serial: Serial,
        random: &mut dyn Random,
    ) -> Result<Vec<NonZeroU16>, KeyringError> {
        let tenant = tenant.map(|name| self.master.tenant(name)).transpose()?;
        self.erase_slots(serial, random, |slot| {
            let is_earlier = matches!(slot.state, SlotState::Earlier(_));
            let is_meant = is_earlier && tenant.is_none_or(|tenant| slot.tenant == tenant);
            if is_meant {
                slot.tenant = OF_NO_TENANT;
            }
            is_meant
        })
    }

    fn erase_slots(
        &mut self,
        serial: Serial,
        random: &mut dyn Random,
        is_meant: impl Fn(&mut KeyringSlot) -> bool,
    ) -> Result<Vec<NonZeroU16>, KeyringError> {
        let mut next = self.copy.clone();
        let mut erased = Vec::new();
        for (number, slot) in numbers().zip(&mut next.slots) {
            if !matches!(slot.state, SlotState::Erased(_)) && is_meant(slot) {
                slot.state = SlotState::Erased(serial);
                erased.push(number);
            }
        }
        if !erased.is_empty() {
            self.settle(next, random)?;
        }
        for slot in &erased {
            if let Some(key) = self.keys.get_mut(place_of(*slot)) {
                *key = None;
            }
        }
        Ok(erased)
    }

    /// Adds a key that wraps the master key. No page is written again.
    ///
    /// # Errors
    /// See [`KeyringError`]. The keyring is unchanged then.
    pub fn add_wrap(
        &mut self,
        wrapping: &WrappingKey,
        random: &mut dyn Random,
    ) -> Result<(), KeyringError> {
        let mut next = self.copy.clone();
        next.wraps.retain(|wrap| wrap.id != wrapping.id());
        if next.wraps.len() >= WRAPS_MAX {
            return Err(KeyringError::TooManyWraps);
        }
        let wrap = wrapping.wrap(random, next.store, &self.master)?;
        next.wraps.push(wrap);
        self.settle(next, random)
    }

    /// Removes a key that wraps the master key. An older copy of the keyring still opens with it.
    ///
    /// # Errors
    /// See [`KeyringError`]. The keyring is unchanged then.
    pub fn remove_wrap(&mut self, id: WrapId, random: &mut dyn Random) -> Result<(), KeyringError> {
        let mut next = self.copy.clone();
        next.wraps.retain(|wrap| wrap.id != id);
        if next.wraps.len() == self.copy.wraps.len() {
            return Err(KeyringError::NoWrap(id));
        }
        if next.wraps.is_empty() {
            return Err(KeyringError::LastWrap);
        }
        self.settle(next, random)
    }

    /// Leaves a generation out: a change with it may have been written in part. Two different
    /// copies of one generation must not lie on the volumes.
    pub fn skip_generation(&mut self) {
        self.copy.generation = self.copy.generation.saturating_add(1);
    }

    /// The slot of a tenant's key for new pages.
    fn former<'a>(
        &self,
        tenant: TenantId,
        copy: &'a mut KeyringCopy,
    ) -> Option<&'a mut KeyringSlot> {
        let slot = self.current.get(&tenant)?;
        copy.slots.get_mut(place_of(*slot))
    }

    /// Takes a changed copy, with the next generation and its tag.
    fn settle(&mut self, next: KeyringCopy, random: &mut dyn Random) -> Result<(), KeyringError> {
        let mut next = next;
        next.generation = next.generation.saturating_add(1);
        let seal = seal_with(self.master.keyring(), random, &covered(&next), &mut [])?;
        (next.nonce, next.tag) = (seal.nonce, seal.tag);
        self.copy = next;
        Ok(())
    }
}

impl WrappingKey {
    /// Fails if it is not a key of this keyring.
    ///
    /// # Errors
    /// [`KeyringError::WrongKey`].
    pub fn check(&self, copy: &KeyringCopy) -> Result<(), KeyringError> {
        wrap_of(copy, self).map(drop)
    }
}

fn wrap_of<'a>(copy: &'a KeyringCopy, wrapping: &WrappingKey) -> Result<&'a KeyWrap, KeyringError> {
    let mut wraps = copy.wraps.iter();
    let wrap = wraps.find(|wrap| wrap.id == wrapping.id());
    wrap.ok_or_else(|| KeyringError::WrongKey {
        given: wrapping.id(),
        wraps: copy.wraps.iter().map(|wrap| wrap.id).collect(),
    })
}

/// The numbers of the slots.
fn numbers() -> impl Iterator<Item = NonZeroU16> {
    (1..=u16::MAX).filter_map(NonZeroU16::new)
}

/// The place of the next key.
fn place_in(slots: &[KeyringSlot], oldest: Serial) -> usize {
    let erased = slots
        .iter()
        .enumerate()
        .filter_map(|(place, slot)| match slot.state {
            SlotState::Erased(erased) => Some((erased, place, slot.tenant)),
            SlotState::Current(_) | SlotState::Earlier(_) => None,
        });
    let is_full = slots.len() >= KEY_SLOTS_MAX;
    let mut free = erased
        .filter(|(erased, _, tenant)| *erased <= oldest && (is_full || *tenant == OF_NO_TENANT));
    // The memory of the oldest erasure goes first.
    let first = match is_full {
        true => free.min_by_key(|(erased, place, _)| (*erased, *place)),
        false => free.next(),
    };
    first.map_or(slots.len(), |(_, place, _)| place)
}

/// The place of a slot in the list.
fn place_of(slot: NonZeroU16) -> usize {
    usize::from(slot.get()).saturating_sub(1)
}

/// What the tag of a copy covers.
fn covered(copy: &KeyringCopy) -> Vec<u8> {
    let mut bytes = b"larder keyring copy 1".to_vec();
    bytes.extend_from_slice(&copy.authenticated());
    bytes
}

/// What the wrap of a slot's key covers.
fn label(store: StoreId, number: NonZeroU16, slot: &KeyringSlot) -> Vec<u8> {
    [
        &b"larder tenant key 1"[..],
        store.as_bytes(),
        &number.get().to_le_bytes(),
        slot.tenant.as_bytes(),
        &slot.created_unix_s.to_le_bytes(),
    ]
    .concat()
}

fn forged(error: OpenError) -> KeyringError {
    match error {
        OpenError::Tag => KeyringError::Forged,
        OpenError::Vault(error) => error.into(),
    }
}
