//! The keys of an encrypted store, and the salts that it has drawn.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::num::NonZeroU16;
use std::sync::Arc;

use larder_engine::format::{Fingerprint, KeyringCopy, PageKey, StoreId};
use larder_seal::{Keyring, Vault, WrappingKey};
use larder_sim_runtime::dice::Dice;
use larder_store::keys::Keys;
use larder_store::keys::simulated::{set_world, take_sealed};

/// The number of a second world with the same dice.
const OTHER_WORLD: u8 = 0x5a;

/// A page was encrypted: the number of the opening, its key slot, its name, and its salt.
pub type Salt = (u64, NonZeroU16, Fingerprint, PageKey, [u8; 12]);

/// The knowledge about an encrypted store.
pub struct Sealed {
    pub wrapping: WrappingKey,
    pub keys: Arc<Keys>,
    /// The keyring of the new store.
    pub first: KeyringCopy,
    pub salts: BTreeSet<Salt>,
    pub tenants: BTreeMap<NonZeroU16, Option<String>>,
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
    /// From here on it draws other salts and keys than a world with the same dice.
    pub fn differ(&self) {
        set_world(OTHER_WORLD);
    }

    pub fn new(store: StoreId, mut dice: Dice, differs_from: Option<u64>) -> Sealed {
        let vault = Vault::plain();
        let mut random = |bytes: &mut [u8]| -> io::Result<()> {
            bytes
                .iter_mut()
                .for_each(|byte| *byte = dice.below(256) as u8);
            Ok(())
        };
        let wrapping = WrappingKey::new(&vault, &[3; 32]).unwrap();
        let ring = Keyring::create(store, &wrapping, &vault, &mut random, 0).unwrap();
        Sealed {
            keys: Keys::of(ring.copy().clone(), &wrapping).unwrap(),
            wrapping,
            first: ring.copy().clone(),
            salts: BTreeSet::new(),
            tenants: BTreeMap::new(),
            differs_from,
        }
    }
}
