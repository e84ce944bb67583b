//! The keys of an encrypted store, and the salts that it has drawn.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::num::NonZeroU16;
use std::sync::Arc;

use larder_engine::format::{Fingerprint, KeyringCopy, Namespace, PageKey, StoreId};
use larder_seal::{Keyring, Vault, WrappingKey};
use larder_sim_runtime::dice::Dice;
use larder_store::keys::Keys;
use larder_store::keys::simulated::{set_world, take_sealed};

use crate::oracle::VersionId;

/// The number of a second world with the same dice.
const OTHER_WORLD: u8 = 0x5a;

/// A page was encrypted: the number of the opening, its key slot, its name, and its salt.
pub type Salt = (u64, NonZeroU16, Fingerprint, PageKey, [u8; 12]);

/// The knowledge about an encrypted store.
pub struct Sealed {
    /// The key that opens the store.
    pub wrapping: WrappingKey,
    /// The key that was to follow it, while it is not known whether it does.
    pub next: Option<WrappingKey>,
    /// The other key of a rotation that a crash cut short.
    other: Option<WrappingKey>,
    /// A key that does not open the store.
    pub wrong: WrappingKey,
    vault: Vault,
    rotations: u8,
    pub keys: Arc<Keys>,
    /// The keyring of the new store.
    pub first: KeyringCopy,
    pub salts: BTreeSet<Salt>,
    pub tenants: BTreeMap<NonZeroU16, String>,
    /// The slots of the keys that a version was encrypted with.
    pub slots: BTreeMap<VersionId, BTreeSet<NonZeroU16>>,
    /// From this opening on, salts and keys differ from those of the world with the same dice.
    pub differs_from: Option<u64>,
}

/// The world of this thread ends: nothing of it is left for the next one. Tasks that were killed
/// may keep the world itself.
pub fn end_world() {
    set_world(0);
    drop(take_sealed());
}

impl Sealed {
    /// A new key is to wrap the master key.
    pub fn begin_rotation(&mut self) -> WrappingKey {
        self.rotations = self.rotations.wrapping_add(1).max(4);
        let next = WrappingKey::new(&self.vault, &[self.rotations; 32]).unwrap();
        self.next = Some(next.clone());
        next
    }

    /// The new key opens the store, and the former one never does again.
    pub fn rotated(&mut self) {
        if let Some(next) = self.next.take() {
            self.wrong = std::mem::replace(&mut self.wrapping, next);
            self.other = None;
        }
    }

    /// Whether a crash cut a rotation short.
    pub fn rotates(&self) -> bool {
        self.other.is_some()
    }

    /// After a crash: which of the two keys opens the store. Another crash may change that.
    pub fn settle(&mut self, opens: impl Fn(&WrappingKey) -> bool) {
        self.other = self.next.take().or_else(|| self.other.take());
        if let Some(other) = &mut self.other {
            if opens(other) {
                std::mem::swap(other, &mut self.wrapping);
            }
            self.wrong = other.clone();
        }
    }

    /// From here on it draws other salts and keys than a world with the same dice.
    pub fn differ(&self) {
        set_world(OTHER_WORLD);
    }

    /// Namespaces by their names in the store, as the store tells of them.
    pub fn name(&self, namespaces: &mut [Namespace]) {
        for namespace in namespaces {
            *namespace = self.keys.named(namespace).unwrap();
        }
    }

    pub fn new(store: StoreId, mut dice: Dice, differs_from: Option<u64>) -> Sealed {
        let vault = Vault::plain();
        let mut random = |bytes: &mut [u8]| -> io::Result<()> {
            bytes
                .iter_mut()
                .for_each(|byte| *byte = dice.below(256) as u8);
            Ok(())
        };
        let [wrapping, wrong] = [3, 2].map(|byte| WrappingKey::new(&vault, &[byte; 32]).unwrap());
        let ring = Keyring::create(store, &wrapping, &vault, &mut random, 0).unwrap();
        Sealed {
            keys: Keys::of(ring.copy().clone(), &wrapping).unwrap(),
            wrapping,
            next: None,
            other: None,
            wrong,
            rotations: 3,
            vault,
            first: ring.copy().clone(),
            salts: BTreeSet::new(),
            tenants: BTreeMap::new(),
            slots: BTreeMap::new(),
            differs_from,
        }
    }
}
