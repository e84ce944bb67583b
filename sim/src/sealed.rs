//! Encrypted stores: their keyring on the device, and the pages that they encrypt.
//!
//! Invariants: a page is stored encrypted only, under the key of its own tenant. No page is
//! encrypted twice with one salt, in this world or in another one with a copy of its disk. A store
//! opens with a sound copy of its keyring, and with no other.

use std::num::NonZeroU16;
use std::sync::Arc;

use larder_engine::StoreError;
use larder_engine::format::{
    Checked, Damage, DescriptorBlock, KEYRING_BYTES, KeyringCopy, Namespace, SlotState, StoreId,
    TENANT_FIELD, keyring_offsets,
};
use larder_seal::WrappingKey;
use larder_sim_runtime::medium::{Block, Content, Medium, shortest};
use larder_store::keys::Keys;
use larder_store::keys::simulated::{SealedPage, take_sealed};

use crate::classes::Class;
use crate::expected::Expected;
use crate::oracle::Name;
use crate::secrets::Sealed;
use crate::setup::BLOCK;
use crate::world::World;

/// Of the faults of a keyring at rest, this share concerns all copies.
const ALL_COPIES: f64 = 0.1;

/// The first blocks of the copies of the keyring, on a volume of so many blocks.
fn copies_of(blocks: usize) -> impl Iterator<Item = usize> {
    let offsets = keyring_offsets((blocks * BLOCK) as u64);
    offsets.into_iter().map(|offset| offset as usize / BLOCK)
}

/// Whether a write is one of a copy of the keyring, on a volume of so many blocks.
pub fn is_keyring(blocks: usize, start: usize) -> bool {
    copies_of(blocks).any(|at| at == start)
}

fn copy_at(volume: &Medium, start: usize, store: StoreId) -> Option<KeyringCopy> {
    let blocks = volume.all_visible(start, KEYRING_BYTES / BLOCK);
    let mut bytes = vec![0; KEYRING_BYTES];
    for (block, out) in blocks.iter().zip(bytes.chunks_exact_mut(BLOCK)) {
        block.render(out);
    }
    KeyringCopy::decode(&bytes, store).ok()
}

/// The tenant of a namespace.
pub fn tenant_of(space: &Namespace) -> String {
    let tenant = space.fields().extra.get(TENANT_FIELD);
    tenant.cloned().unwrap_or_default()
}

/// Writes and syncs all copies of a keyring on a volume.
pub fn write_keyring(volume: &mut Medium, keyring: &KeyringCopy) {
    let blocks = shortest(&keyring.encode());
    for at in copies_of(volume.blocks()) {
        volume.write(at, &blocks, || true);
    }
    volume.synced(volume.next());
}

impl World {
    /// Writes and syncs all copies of the keyring of a new store.
    pub fn create_keyring(&mut self) {
        let Some(sealed) = &self.sealed else {
            return;
        };
        for volume in self.disk.volumes().iter_mut() {
            write_keyring(volume, &sealed.first);
        }
    }

    pub fn keys(&self) -> Option<&Arc<Keys>> {
        self.sealed.as_ref().map(|sealed| &sealed.keys)
    }

    /// A whole descriptor block, of whatever place.
    pub fn check_descriptor(&self, block: &Block) -> Result<Checked<DescriptorBlock>, Damage> {
        match self.keys() {
            None => DescriptorBlock::check(&block[..]),
            Some(keys) => DescriptorBlock::check(&keys.open_block(&block[..])?),
        }
    }

    /// An opening begins. Its keyring may have been spoiled meanwhile.
    pub fn begin_sealed(&mut self) {
        let opens = self.totals.opens;
        let Some(sealed) = &self.sealed else {
            return;
        };
        if sealed.differs_from.is_some_and(|from| from <= opens) {
            sealed.differ();
        }
        if !self.strikes(Class::RotKeyring, self.setup.faults.rot_keyring) {
            return;
        }
        let is_all = self.fault(ALL_COPIES);
        let volume = self.dice.below(self.setup.volumes.len());
        let copy = self.dice.below(3);
        let mut volumes = self.disk.volumes();
        for (number, medium) in volumes.iter_mut().enumerate() {
            for (at, start) in copies_of(medium.blocks()).enumerate() {
                if is_all || (number, at) == (volume, copy) {
                    medium.rot(start);
                }
            }
        }
    }

    /// Whether some copy of the keyring is whole, and not older than the superblocks state.
    fn has_keyring(&self) -> bool {
        let there = || self.superblocks.iter().zip(0..);
        let known =
            || there().filter_map(|(superblock, volume)| Some((superblock.as_ref()?, volume)));
        let stated = known().map(|(superblock, _)| superblock.keyring).max();
        let volumes = self.disk.volumes();
        known().any(|(_, volume)| {
            let medium: &Medium = &volumes[volume];
            copies_of(medium.blocks()).any(|start| {
                let copy = copy_at(medium, start, self.store);
                copy.is_some_and(|copy| Some(copy.generation) >= stated)
            })
        })
    }

    /// The names of the pages of a tenant.
    pub fn names_of_tenant(&self, tenant: &str) -> Vec<Name> {
        let spaces = self.setup.namespaces.iter().enumerate();
        let own = spaces.filter(|(_, space)| tenant_of(space) == tenant);
        own.flat_map(|(namespace, _)| self.oracle.names_of(namespace))
            .collect()
    }

    /// An opening begins: by the newest keyring on the volumes a tenant that was being erased is
    /// erased or whole. Pages of erased keys are not expected.
    pub fn expect_unerased(&mut self, expected: &mut Expected) {
        let Some(newest) = self.newest_keyring() else {
            return;
        };
        let Some(sealed) = &mut self.sealed else {
            return;
        };
        let wraps = |key: &WrappingKey| newest.wraps.iter().any(|wrap| wrap.id == key.id());
        sealed.settle(wraps);
        let is_erased = |slot: &NonZeroU16| {
            let slot = newest.slots.get(usize::from(slot.get()) - 1);
            slot.is_some_and(|slot| matches!(slot.state, SlotState::Erased(_)))
        };
        let pages = &expected.pages;
        expected.names.retain(|name, _| {
            let slots = sealed.slots.get(&pages[name].0);
            !slots.is_some_and(|slots| slots.iter().any(is_erased))
        });
        // Such a slot may be given to another tenant.
        sealed.tenants.retain(|slot, _| !is_erased(slot));
    }

    /// The whole copy of the keyring that counts.
    fn newest_keyring(&self) -> Option<KeyringCopy> {
        let volumes = self.disk.volumes();
        let there = self.superblocks.iter().zip(0..);
        let there = there.filter(|(superblock, _)| superblock.is_some());
        let copies = there.flat_map(|(_, volume): (_, usize)| {
            let medium: &Medium = &volumes[volume];
            let copies = copies_of(medium.blocks());
            copies.filter_map(|start| copy_at(medium, start, self.store))
        });
        copies.max_by_key(|copy| copy.generation)
    }

    /// An opening has got through recovery.
    pub fn check_unlocked(&self) {
        assert!(
            self.sealed.is_none() || self.has_keyring(),
            "an encrypted store opens without a sound keyring"
        );
    }

    /// An opening was refused for its keyring. Returns whether it always will be.
    pub fn check_locked(&mut self, error: &StoreError) -> bool {
        if !matches!(
            error,
            StoreError::Keyring { .. } | StoreError::WrongKey { .. }
        ) {
            return false;
        }
        if self.has_keyring() {
            // It may take an older copy, whose change was not stated, if it cannot read the newest.
            let rotates = self.sealed.as_ref().is_some_and(Sealed::rotates);
            let is_right = matches!(error, StoreError::Keyring { .. }) || rotates;
            assert!(
                self.has_outage && is_right,
                "an opening does not take a sound keyring: {error}"
            );
            self.count(Class::OpenRefused);
            return false;
        }
        let faults = &self.setup.faults;
        assert!(
            faults.rot_keyring > 0.0 || faults.spoils(),
            "the keyring is lost without a fault: {error}"
        );
        self.count(Class::KeyringLost);
        true
    }

    /// Takes the pages that the store has encrypted since the last look.
    pub fn look_at_sealed(&mut self) {
        if self.sealed.is_some() {
            take_sealed()
                .into_iter()
                .for_each(|page| self.note_sealed(&page));
        }
    }

    fn note_sealed(&mut self, page: &SealedPage) {
        let opens = self.totals.opens;
        let (Some(sealed), Some(seal)) = (&mut self.sealed, &page.proof.seal) else {
            panic!("a page is encrypted in a store without keys");
        };
        let is_new = sealed
            .salts
            .insert((opens, seal.slot, page.namespace, page.key, seal.salt));
        let is_other = (1..opens).all(|before| {
            let salt = (before, seal.slot, page.namespace, page.key, seal.salt);
            !sealed.salts.contains(&salt)
        });
        assert!(
            is_new && is_other,
            "a page is encrypted twice with one salt"
        );
        let space = self.setup.namespaces.iter();
        let space = space
            .clone()
            .find(|space| space.fingerprint() == page.namespace);
        let tenant = space.map_or_else(String::new, tenant_of);
        let known = sealed
            .tenants
            .entry(seal.slot)
            .or_insert_with(|| tenant.clone());
        assert!(*known == tenant, "two tenants have one key");
        let first: Block = page.clear[..].try_into().expect("a block");
        let owner = self.oracle.owner(&self.oracle.content_of(&first));
        let version = owner.expect("a page is encrypted that was never put");
        let namespace = self.namespace_of(page.namespace);
        let name = self.oracle.by_key(namespace, page.key.prefix().as_bytes());
        assert!(
            name == Some(self.oracle.version(version).name),
            "{version:?} is encrypted under another name"
        );
        self.oracle
            .sealed(version, page.proof.checksum, &page.stored);
        if let Some(sealed) = &mut self.sealed {
            sealed.slots.entry(version).or_default().insert(seal.slot);
        }
    }

    /// A writer without the key changes a page: its bytes have the checksum that was stated.
    pub fn forge(&mut self, volume: usize, at: usize, content: &Content) {
        if let Some((version, wrong)) = self.oracle.forge(content) {
            self.count(Class::Forged);
            self.note(at as u64, || {
                format!("{version:?} is forged at {volume}:{at}")
            });
            let known = self.oracle.version_mut(version);
            known.rotten = true;
            known.forged = true;
            self.disk.volumes()[volume].spoil(at, wrong);
        }
    }
}
