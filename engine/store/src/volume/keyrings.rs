//! The keyring of an encrypted store, in three copies in each of its volumes.
//!
//! A writer replaces the copies one after the other, the oldest first, and syncs each before the
//! next. Copies that are not whole are the oldest. So a crash at any moment leaves the old keyring
//! or the new one whole. Then the superblocks state its generation: an older keyring is no keyring
//! of the store any more.
//!
//! A store whose superblock states a keyring is never opened without one: a keyring that cannot be
//! read is not taken for an empty one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_base::memory::AlignedBuf;
use larder_base::planted;
use larder_disk::mailbox::{ReadAt, WriteAt, read_all};
use larder_disk::{Disk, DiskError};
use larder_format::{Damage, KEYRING_BYTES, KeyringCopy, keyring_offsets};
use larder_seal::WrappingKey;

use super::Volumes;
use crate::error::{StoreError, io_error};
use crate::keys::{empty, unlock};

/// Why a copy cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Fault {
    #[error("unreadable: {0}")]
    Unreadable(DiskError),
    #[error("{0}")]
    Damaged(Damage),
}

/// The place of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    volume: usize,
    offset: u64,
}

/// The copies as they were read.
#[derive(Debug)]
struct Copies(Vec<(Place, Result<KeyringCopy, Fault>)>);

impl Copies {
    /// The whole copy that counts.
    fn newest(&self) -> Option<&KeyringCopy> {
        let whole = self.0.iter().filter_map(|(_, copy)| copy.as_ref().ok());
        whole.max_by_key(|copy| copy.generation)
    }

    /// The places in the order in which a writer replaces the copies that are not `next`.
    fn behind(&self, next: &KeyringCopy) -> Vec<Place> {
        let behind = self.0.iter().filter(|(_, copy)| copy.as_ref() != Ok(next));
        let mut behind: Vec<_> = behind.collect();
        // Stable: of equal ones the first.
        behind.sort_by_key(|(_, copy)| copy.as_ref().map_or(0, |copy| copy.generation));
        behind.into_iter().map(|(place, _)| *place).collect()
    }

    /// The fault of the first copy that cannot be used.
    fn fault(&self) -> String {
        let mut faults = self.0.iter().filter_map(|(_, copy)| copy.as_ref().err());
        faults.next().map_or_else(String::new, ToString::to_string)
    }
}

fn not_encrypted(path: &Path) -> StoreError {
    let path = path.display();
    StoreError::Usage(format!(
        "{path}: the store is not encrypted, and a key is given"
    ))
}

impl Volumes {
    /// Unlocks the keyring of a store that is opened. Writes nothing.
    ///
    /// # Errors
    /// [`StoreError::WrongKey`], and those of [`Volumes::newest_keyring`].
    pub(crate) fn unlock_keyring(
        &mut self,
        disk: &dyn Disk,
        wrapping: &WrappingKey,
    ) -> Result<(), StoreError> {
        let path = self.first_path();
        let newest = self.newest_keyring(disk);
        if newest.is_err() && planted!(EmptyKeyring) {
            self.keys = empty(self.superblock().store, wrapping).ok().map(Arc::new);
            return Ok(());
        }
        let Some(newest) = newest? else {
            return Err(not_encrypted(&path));
        };
        let keys = unlock(newest, wrapping).map_err(|error| StoreError::WrongKey {
            path,
            reason: error.to_string(),
        })?;
        self.keys = Some(Arc::new(keys));
        Ok(())
    }

    /// Whether this process fits an owner whose store is encrypted or not, with the key that it
    /// has, if any. Such a key must be one of the store, for a later take-over.
    ///
    /// # Errors
    /// [`StoreError::OtherVolumes`], [`StoreError::WrongKey`], [`StoreError::Usage`].
    pub(crate) fn check_key(
        &self,
        disk: &dyn Disk,
        is_sealed: bool,
        wrapping: Option<&WrappingKey>,
    ) -> Result<(), StoreError> {
        let path = self.first_path();
        if is_sealed != (self.keyring_generation() > 0) {
            return Err(StoreError::OtherVolumes(path));
        }
        let Some(wrapping) = wrapping else {
            return Ok(());
        };
        if !is_sealed {
            return Err(not_encrypted(&path));
        }
        // The owner may be replacing the copies: a later take-over judges them.
        let Ok(Some(newest)) = self.newest_keyring(disk) else {
            return Ok(());
        };
        wrapping
            .check(&newest)
            .map_err(|error| StoreError::WrongKey {
                path,
                reason: error.to_string(),
            })
    }

    /// The keyring that counts; `None` for a store that is not encrypted.
    ///
    /// # Errors
    /// [`StoreError::Keyring`]: no copy can be used, or the newest one is older than the
    /// superblocks state.
    pub(crate) fn newest_keyring(
        &self,
        disk: &dyn Disk,
    ) -> Result<Option<KeyringCopy>, StoreError> {
        let stated = self.keyring_generation();
        if stated == 0 {
            return Ok(None);
        }
        let copies = self.keyring_copies(disk);
        let unusable = |reason| StoreError::Keyring {
            path: self.first_path(),
            reason,
        };
        let Some(newest) = copies.newest() else {
            return Err(unusable(copies.fault()));
        };
        if newest.generation < stated {
            return Err(unusable(format!(
                "its newest whole copy has generation {}, and the superblocks state {stated}",
                newest.generation
            )));
        }
        Ok(Some(newest.clone()))
    }

    /// Replaces the keyring, and makes it durable on all volumes. If this fails a later open may
    /// find the old one or this one, so the next one has another generation. `sync` makes all
    /// writes to a volume durable: in a store in use by its core, which has to know of a failed
    /// sync.
    ///
    /// # Errors
    /// A write or a sync failed.
    pub fn set_keyring(
        &mut self,
        disk: &dyn Disk,
        next: &KeyringCopy,
        sync: impl Fn(&Volumes, usize) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let encoded = next.encode();
        for Place { volume, offset } in self.keyring_copies(disk).behind(next) {
            let path = || {
                let volume = self.list.get(volume).and_then(Option::as_ref);
                volume.map_or_else(PathBuf::new, |volume| volume.path.clone())
            };
            let memory = AlignedBuf::zeroed(encoded.len());
            let mut memory =
                memory.map_err(|error| io_error("writing the keyring of", &path(), error))?;
            memory.copy_from_slice(&encoded);
            let write = WriteAt {
                volume,
                offset,
                memory,
            };
            self.write(disk, vec![write])?;
            sync(self, volume)?;
        }
        self.state_keyring(disk, next.generation, sync)
    }

    /// Writes the keyring to all places that lack it: it completes a change that a crash cut short,
    /// and repairs single copies. An opening does so before it writes anything else.
    ///
    /// # Errors
    /// Those of [`Volumes::newest_keyring`]; a write or a sync failed.
    pub(crate) fn mend_keyring(&mut self, disk: &dyn Disk) -> Result<(), StoreError> {
        let Some(newest) = self.newest_keyring(disk)? else {
            return Ok(());
        };
        let sync = |volumes: &Volumes, volume| volumes.sync_one(disk, volume);
        self.set_keyring(disk, &newest, sync)
    }

    /// The highest generation of a keyring in any superblock; 0 for a store that is not encrypted.
    #[must_use]
    pub fn keyring_generation(&self) -> u64 {
        let stated = self.present().map(|(_, volume)| volume.superblock.keyring);
        stated.max().unwrap_or(0)
    }

    fn keyring_copies(&self, disk: &dyn Disk) -> Copies {
        let of = |(index, bytes)| {
            keyring_offsets(bytes).map(|offset| Place {
                volume: index,
                offset,
            })
        };
        let volumes = self.present().map(|(index, volume)| (index, volume.bytes));
        let places: Vec<Place> = volumes.flat_map(of).collect();
        let reads: Vec<ReadAt> = places
            .iter()
            .map(|place| ReadAt {
                volume: place.volume,
                offset: place.offset,
                bytes: KEYRING_BYTES,
            })
            .collect();
        let store = self.superblock().store;
        let copies = read_all(disk, &reads).into_iter().map(|copy| {
            let copy = copy.map_err(Fault::Unreadable)?;
            KeyringCopy::decode(&copy, store).map_err(Fault::Damaged)
        });
        Copies(places.into_iter().zip(copies).collect())
    }
}

#[cfg(all(test, not(feature = "simulated")))]
#[path = "keyrings/tests.rs"]
mod tests;
