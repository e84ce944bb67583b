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
use larder_base::system::processes;
use larder_disk::mailbox::{ReadAt, WriteAt, read_all};
use larder_disk::{Disk, DiskError};
use larder_format::{Damage, KEYRING_BYTES, KeyringCopy, StoreId, keyring_offsets};
use larder_seal::{Keyring, KeyringError, WrappingKey};

use super::Volumes;
use crate::error::{StoreError, io_error};
use crate::keys::{Keys, empty, unlock};

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
pub struct Copies(Vec<(Place, Result<KeyringCopy, Fault>)>);

/// A copy that is not as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadCopy {
    /// Index of its volume.
    pub volume: usize,
    /// Its offset there.
    pub offset: u64,
    /// What is wrong.
    pub reason: String,
}

impl Copies {
    /// Reads the copies in volumes with these numbers and lengths.
    pub fn read(
        disk: &dyn Disk,
        volumes: impl IntoIterator<Item = (usize, u64)>,
        store: StoreId,
    ) -> Copies {
        let of = |(volume, bytes)| keyring_offsets(bytes).map(|offset| Place { volume, offset });
        let places: Vec<Place> = volumes.into_iter().flat_map(of).collect();
        let reads: Vec<ReadAt> = places
            .iter()
            .map(|place| ReadAt {
                volume: place.volume,
                offset: place.offset,
                bytes: KEYRING_BYTES,
            })
            .collect();
        let copies = read_all(disk, &reads).into_iter().map(|copy| {
            let copy = copy.map_err(Fault::Unreadable)?;
            KeyringCopy::decode(&copy, store).map_err(Fault::Damaged)
        });
        Copies(places.into_iter().zip(copies).collect())
    }

    /// The copy that counts, in a store whose superblocks state this generation.
    ///
    /// # Errors
    /// Why there is none.
    pub fn counting(&self, stated: u64) -> Result<&KeyringCopy, String> {
        let newest = self.newest().ok_or_else(|| self.fault())?;
        match newest.generation < stated {
            true => Err(format!(
                "its newest whole copy has generation {}, and the superblocks state {stated}",
                newest.generation
            )),
            false => Ok(newest),
        }
    }

    /// Why the store is encrypted although its superblocks state no keyring, if it is: its volumes
    /// have one. A writer without the key changed the superblocks.
    pub fn disowned(&self, stated: u64) -> Option<String> {
        let has_one = self.0.iter().any(|(_, copy)| copy.is_ok());
        (stated == 0 && has_one).then(|| {
            "the superblocks state none, and the volumes have one: a writer without the key \
             changed the superblocks"
                .to_owned()
        })
    }

    /// The copies that are not as they were written, beside `newest`. One that is a generation
    /// behind was left by a crash.
    pub fn bad(&self, newest: Option<&KeyringCopy>) -> Vec<BadCopy> {
        let bad = self.0.iter().filter_map(|(place, copy)| {
            let newest = newest.map_or(0, |newest| newest.generation);
            let reason = match copy {
                Err(fault) => fault.to_string(),
                Ok(copy) if copy.generation.saturating_add(1) < newest => format!(
                    "it is of generation {}, another copy of generation {newest}: writes to it \
                     were lost",
                    copy.generation
                ),
                Ok(_) => return None,
            };
            let Place { volume, offset } = *place;
            Some(BadCopy {
                volume,
                offset,
                reason,
            })
        });
        bad.collect()
    }

    /// The whole copy that is the newest.
    fn newest(&self) -> Option<&KeyringCopy> {
        let whole = self.0.iter().filter_map(|(_, copy)| copy.as_ref().ok());
        whole.max_by_key(|copy| copy.generation)
    }

    /// The places in the order in which a writer replaces the copies that are not `next`. If `next`
    /// is not stated, its own copies come first: a failed sync may have lost them, and reads return
    /// them all the same. Until one of them is durable, no other copy is replaced.
    fn places(&self, next: &KeyringCopy, stated: u64) -> Vec<Place> {
        let there = self.0.iter().filter(|(_, copy)| copy.as_ref() == Ok(next));
        let there = there.filter(|_| next.generation > stated);
        let there = there.map(|(place, _)| *place);
        there.chain(self.behind(next)).collect()
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
            self.refuse_disowned(disk)?;
            return Err(not_encrypted(&path));
        };
        self.keys = Some(Arc::new(unlocked(&path, newest, wrapping)?));
        Ok(())
    }

    /// Refuses a store that is encrypted although its superblocks state no keyring: a write
    /// to it as to a plain store is in clear, and destroys its pages.
    ///
    /// # Errors
    /// [`StoreError::Keyring`].
    pub(crate) fn refuse_disowned(&self, disk: &dyn Disk) -> Result<(), StoreError> {
        let disowned = self
            .keyring_copies(disk)
            .disowned(self.keyring_generation());
        let path = self.first_path();
        disowned.map_or(Ok(()), |reason| Err(StoreError::Keyring { path, reason }))
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
        copies
            .counting(stated)
            .map(|newest| Some(newest.clone()))
            .map_err(unusable)
    }

    /// Replaces the keyring, and makes it durable on all volumes. If this fails a later open may
    /// find the old keyring or this one, so the next keyring has another generation. `sync` makes
    /// all writes to a volume durable: in a store in use by its core, which has to know of a failed
    /// sync.
    ///
    /// A change that failed, or that a crash cut short, is completed first. So all copies but
    /// the replaced copy are durable: a copy whose sync failed may be lost, and the next change
    /// must not replace the last durable copy.
    ///
    /// # Errors
    /// A write or a sync failed.
    pub fn set_keyring(
        &mut self,
        disk: &dyn Disk,
        next: &KeyringCopy,
        sync: impl Fn(&Volumes, usize) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let stated = self.keyring_generation();
        let newest = self.keyring_copies(disk).newest().cloned();
        if let Some(newest) = newest.filter(|of| of != next && of.generation > stated) {
            self.write_keyring(disk, &newest, &sync)?;
        }
        self.write_keyring(disk, next, &sync)
    }

    fn write_keyring(
        &mut self,
        disk: &dyn Disk,
        next: &KeyringCopy,
        sync: &impl Fn(&Volumes, usize) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let encoded = next.encode();
        let stated = self.keyring_generation();
        for Place { volume, offset } in self.keyring_copies(disk).places(next, stated) {
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

    /// Wraps the master key with another key, and removes the wrap of the present one: a rotation
    /// of the wrapping key. No page is written. A crash leaves the old keyring or the new one.
    ///
    /// # Errors
    /// The store is not unlocked, or a write or a sync failed.
    pub fn rewrap(
        &mut self,
        disk: &dyn Disk,
        from: &WrappingKey,
        to: &WrappingKey,
    ) -> Result<(), StoreError> {
        if from.id() == to.id() {
            return Err(StoreError::Usage(format!(
                "{}: the new key is the present one: make a new key first",
                self.first_path().display()
            )));
        }
        self.change_keyring(disk, |keys| keys.rewrapped(from, to))
    }

    /// Gives all tenants new keys, or one of them. Pages of their former keys are encrypted anew
    /// when they move.
    ///
    /// # Errors
    /// The store is not encrypted, has no such tenant, or no room for the keys; or a write or a
    /// sync failed.
    pub fn renew_keys(&mut self, disk: &dyn Disk, tenant: Option<&str>) -> Result<(), StoreError> {
        let unix_s = processes::unix_ms() / 1000;
        self.change_keyring(disk, |keys| keys.with_new_keys(tenant, unix_s))?;
        self.keys.iter().for_each(|keys| keys.renew());
        Ok(())
    }

    /// Erases the former keys of all tenants, or of one of them: no page has them any more.
    ///
    /// # Errors
    /// As for [`Volumes::renew_keys`].
    pub fn erase_former_keys(
        &mut self,
        disk: &dyn Disk,
        tenant: Option<&str>,
    ) -> Result<(), StoreError> {
        let run = self.superblock().run;
        self.change_keyring(disk, |keys| keys.without_former_keys(tenant, run))
    }

    /// The keyring that [`Volumes::renew_keys`] would write.
    ///
    /// # Errors
    /// As there, but for writes.
    pub fn keys_to_renew(&self, tenant: Option<&str>) -> Result<Keyring, StoreError> {
        let unix_s = processes::unix_ms() / 1000;
        let (_, next) = self.changed(|keys| keys.with_new_keys(tenant, unix_s))?;
        Ok(next)
    }

    fn change_keyring(
        &mut self,
        disk: &dyn Disk,
        change: impl FnOnce(&Keys) -> Result<Keyring, KeyringError>,
    ) -> Result<(), StoreError> {
        let (keys, next) = self.changed(change)?;
        let sync = |volumes: &Volumes, volume| volumes.sync_one(disk, volume);
        self.set_keyring(disk, next.copy(), sync)?;
        keys.settle(next);
        Ok(())
    }

    /// The keys, and the keyring that follows.
    fn changed(
        &self,
        change: impl FnOnce(&Keys) -> Result<Keyring, KeyringError>,
    ) -> Result<(Arc<Keys>, Keyring), StoreError> {
        let path = self.first_path();
        let keys = self.keys.clone().ok_or_else(|| not_encrypted(&path))?;
        let next = change(&keys).map_err(|error| match error {
            KeyringError::WrongKey { .. } => not_usable(&path, &error),
            KeyringError::NoTenant => StoreError::Usage(format!(
                "{}: no tenant of this name has a key, and nothing was written: check the name",
                path.display()
            )),
            error => StoreError::Keyring {
                path,
                reason: error.to_string(),
            },
        })?;
        Ok((keys, next))
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
        let volumes = self.present().map(|(index, volume)| (index, volume.bytes));
        Copies::read(disk, volumes, self.superblock().store)
    }
}

/// The keys of a keyring of the store at `path`.
///
/// # Errors
/// [`StoreError::WrongKey`].
pub fn unlocked(
    path: &Path,
    copy: KeyringCopy,
    wrapping: &WrappingKey,
) -> Result<Keys, StoreError> {
    unlock(copy, wrapping).map_err(|error| not_usable(path, &error))
}

/// The error for a key that does not open the keyring, or for a keyring that cannot be made.
pub(super) fn not_usable(path: &Path, error: &KeyringError) -> StoreError {
    StoreError::WrongKey {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

/// The error for a key that is given for a store without encryption: its pages are plain, and a
/// caller with a key expects otherwise.
#[must_use]
pub fn not_encrypted(path: &Path) -> StoreError {
    StoreError::Usage(format!(
        "{}: the store is not encrypted, and a key is given",
        path.display()
    ))
}

#[cfg(all(test, not(feature = "simulated")))]
#[path = "keyrings/tests.rs"]
mod tests;
