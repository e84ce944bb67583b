//! The quotas of a store, in three copies in its first volume, which is never lost.
//!
//! A writer replaces the copies one after the other, the oldest first, and syncs each before the
//! next. Copies that are not whole are the oldest. So a crash at any moment leaves the old quotas
//! or the new ones: the first write harms no copy that counts, unless all three are equal, and
//! then two of these are left.
//!
//! Then the superblock states their generation. Quotas are unreadable if it states one, and each
//! copy is older or not whole.
//!
//! As long as it states none, no change of quotas is complete. The first change of all writes copy
//! A before any other. So a damaged copy A beside two blank ones is a first change that a crash cut
//! short, and there are no quotas yet. A copy that the device does not read is never taken for one.

use std::sync::Arc;

use larder_base::memory::AlignedBuf;
use larder_base::system::files;
use larder_disk::mailbox::{ReadAt, WriteAt, read_all, sync_all};
use larder_disk::{Disk, DiskError};
use larder_format::{Damage, QUOTAS_BYTES, Quota, Quotas, StoreId, Superblock, quotas_offsets};

use super::{Volume, Volumes};
use crate::error::{StoreError, io_error};
use crate::keys::Keys;

/// The volume with the quotas.
const FIRST: usize = 0;

/// What a store knows of its quotas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QuotaState {
    /// They are these.
    Known(Quotas),
    /// There are some, and no copy can be used: the fault of the first copy that is not blank.
    Unreadable(String),
}

impl Default for QuotaState {
    fn default() -> QuotaState {
        QuotaState::Known(Quotas::default())
    }
}

impl QuotaState {
    /// The quotas in force: none while they cannot be read.
    #[must_use]
    pub fn list(&self) -> &[Quota] {
        match self {
            QuotaState::Known(quotas) => &quotas.list,
            QuotaState::Unreadable(_) => &[],
        }
    }

    /// Why they cannot be read.
    #[must_use]
    pub fn fault(&self) -> Option<&str> {
        match self {
            QuotaState::Known(_) => None,
            QuotaState::Unreadable(fault) => Some(fault),
        }
    }
}

/// A copy that is not as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadCopy {
    /// Its offset in the first volume.
    pub offset: u64,
    /// The fault.
    pub reason: String,
}

/// Why a copy cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Fault {
    #[error("unreadable: {0}")]
    Unreadable(DiskError),
    #[error("{0}")]
    Damaged(Damage),
}

/// The three copies as they were read.
#[derive(Debug)]
struct Copies([Result<Quotas, Fault>; 3]);

impl Copies {
    /// Of a store with these keys, if it is encrypted.
    fn of(
        bytes: [Result<Vec<u8>, DiskError>; 3],
        store: StoreId,
        keys: Option<&Arc<Keys>>,
    ) -> Copies {
        Copies(bytes.map(|copy| {
            let mut copy = copy.map_err(Fault::Unreadable)?;
            if let Some(keys) = keys {
                keys.open_quotas(&mut copy).map_err(Fault::Damaged)?;
            }
            Quotas::decode(&copy, store).map_err(Fault::Damaged)
        }))
    }

    /// The same of an encrypted store without its keys, as far as they are readable: generations.
    fn locked(bytes: [Result<Vec<u8>, DiskError>; 3], store: StoreId) -> Copies {
        Copies(bytes.map(|copy| {
            let copy = copy.map_err(Fault::Unreadable)?;
            let generation = Quotas::check_locked(&copy, store).map_err(Fault::Damaged)?;
            let list = Vec::new();
            Ok(Quotas { generation, list })
        }))
    }

    /// The whole copy that counts.
    fn newest(&self) -> Option<&Quotas> {
        let whole = self.0.iter().flatten();
        whole.max_by_key(|quotas| quotas.generation)
    }

    /// The quotas of a store whose superblock states this generation.
    fn state(&self, stated: u64) -> QuotaState {
        if let Some(newest) = self.newest() {
            let found = newest.generation;
            return match found < stated {
                true => QuotaState::Unreadable(format!(
                    "their newest whole copy has generation {found}, and the superblock states \
                     {stated}"
                )),
                false => QuotaState::Known(newest.clone()),
            };
        }
        let is_unread = |copy: &Result<Quotas, Fault>| matches!(copy, Err(Fault::Unreadable(_)));
        let [first, others @ ..] = &self.0;
        if stated == 0 && others.iter().all(is_blank) && !is_unread(first) {
            return QuotaState::default();
        }
        let bad = self.0.iter().filter(|copy| stated > 0 || !is_blank(copy));
        let mut faults = bad.filter_map(|copy| copy.as_ref().err());
        let fault = faults.next().map(ToString::to_string);
        QuotaState::Unreadable(fault.unwrap_or_default())
    }

    /// The copies that are not as they were written. A crash leaves copies that are a generation
    /// behind, and blank ones before a first change is complete. Before the first change there is
    /// nothing to lose.
    fn bad(&self, offsets: [u64; 3], stated: u64) -> Vec<BadCopy> {
        let is_of_none = |newest: &Quotas| newest.generation == 0;
        if stated == 0 && self.newest().is_some_and(is_of_none) {
            return Vec::new();
        }
        let newest = self.newest().map_or(stated, |newest| newest.generation);
        let bad = offsets.into_iter().zip(&self.0);
        let bad = bad.filter_map(|(offset, copy)| {
            let reason = match copy {
                Err(_) if stated == 0 && is_blank(copy) => return None,
                Err(fault) => fault.to_string(),
                Ok(copy) if copy.generation.saturating_add(1) < newest.max(stated) => format!(
                    "it is of generation {}, and generation {} was written: writes to it were \
                     lost",
                    copy.generation,
                    newest.max(stated)
                ),
                Ok(_) => return None,
            };
            Some(BadCopy { offset, reason })
        });
        bad.collect()
    }

    /// The copies in the order in which a writer replaces them.
    fn order(&self) -> [usize; 3] {
        let mut order = [0, 1, 2];
        // Stable: of equal ones copy A is the first.
        order.sort_by_key(|at| self.0[*at].as_ref().map_or(0, |quotas| quotas.generation));
        order
    }

    /// Whether a copy lacks the quotas that count.
    fn some_lag(&self) -> bool {
        let newest = self.newest();
        newest.is_some_and(|newest| self.0.iter().any(|copy| copy.as_ref() != Ok(newest)))
    }
}

fn is_blank(copy: &Result<Quotas, Fault>) -> bool {
    matches!(copy, Err(Fault::Damaged(Damage::Blank(_))))
}

/// The state of the quotas of a closed store, for a reader that writes nothing, and the copies that
/// are not as they were written. `bytes` is the length of the first volume. Without the keys of an
/// encrypted store the quotas themselves are not known.
pub fn survey(
    disk: &dyn Disk,
    superblock: &Superblock,
    bytes: u64,
    keys: Option<&Arc<Keys>>,
) -> (QuotaState, Vec<BadCopy>) {
    let offsets = quotas_offsets(bytes);
    let copies = read(disk, offsets);
    let copies = match keys {
        None if superblock.keyring != 0 => Copies::locked(copies, superblock.store),
        keys => Copies::of(copies, superblock.store, keys),
    };
    let stated = superblock.quotas;
    (copies.state(stated), copies.bad(offsets, stated))
}

/// The copies at these offsets of the first volume.
fn read(disk: &dyn Disk, offsets: [u64; 3]) -> [Result<Vec<u8>, DiskError>; 3] {
    let reads = offsets.map(|offset| ReadAt {
        volume: FIRST,
        offset,
        bytes: QUOTAS_BYTES,
    });
    let mut read = read_all(disk, &reads).into_iter();
    reads.map(|_| match read.next() {
        Some(bytes) => bytes.map(|bytes| bytes.to_vec()),
        None => Err(DiskError::Shutdown),
    })
}

impl Volume {
    /// The quotas of the store of this first volume, read beside its owner, if it has one. `None`
    /// for an encrypted store.
    pub fn quotas_beside_owner(&self) -> Option<QuotaState> {
        if self.superblock.keyring != 0 {
            return None;
        }
        let read = |offset| {
            let mut buffer = AlignedBuf::zeroed(QUOTAS_BYTES).map_err(os)?;
            let mut done = 0;
            while done < QUOTAS_BYTES {
                match files::read_at(&self.file, &mut buffer[done..], offset + done as u64) {
                    Ok(0) => break,
                    Ok(count) => done += count,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(os(error)),
                }
            }
            Ok(buffer[..done].to_vec())
        };
        let copies = quotas_offsets(self.bytes).map(read);
        let copies = Copies::of(copies, self.superblock.store, None);
        Some(copies.state(self.superblock.quotas))
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn os(error: std::io::Error) -> DiskError {
    DiskError::Os(error.raw_os_error().unwrap_or(libc::EIO))
}

impl Volumes {
    #[cfg(test)]
    fn quotas(&self, disk: &dyn Disk) -> QuotaState {
        self.copies(disk).state(self.quotas_generation())
    }

    /// The quotas of a store that is opened, to be written to or not. Before anything else is
    /// written: what a failed sync loses is not known to the store.
    ///
    /// # Errors
    /// A sync failed.
    pub(crate) fn open_quotas(
        &mut self,
        disk: &dyn Disk,
        writes: bool,
    ) -> Result<QuotaState, StoreError> {
        let state = self.copies(disk).state(self.quotas_generation());
        let path = self.first_path();
        if let Some(fault) = state.fault() {
            tracing::error!(
                "{}: the quotas cannot be read ({fault}): none is in force until `larder quota \
                 --clear` removes them and they are set anew",
                path.display()
            );
        } else if writes && let Some(error) = self.mend_quotas(disk)? {
            tracing::warn!("a copy of the quotas cannot be repaired: {error}");
        }
        Ok(state)
    }

    fn copies(&self, disk: &dyn Disk) -> Copies {
        let copies = read(disk, self.quota_places());
        Copies::of(copies, self.superblock().store, self.keys.as_ref())
    }

    /// The generation that the superblock of the first volume states.
    fn quotas_generation(&self) -> u64 {
        let first = self.list[FIRST].as_ref();
        first.map_or(0, |volume| volume.superblock.quotas)
    }

    fn quota_places(&self) -> [u64; 3] {
        let first = self.list[FIRST].as_ref();
        quotas_offsets(first.map_or(0, |volume| volume.bytes))
    }

    /// Sets the quotas. Returns them with their new generation. `sync` makes all writes to the
    /// first volume durable: in a store in use by its core, which has to know of a failed sync.
    ///
    /// # Errors
    /// [`StoreError::Quotas`], and the error of the system: then a later open may find the old ones
    /// or these.
    pub fn set_quotas(
        &mut self,
        disk: &dyn Disk,
        list: Vec<Quota>,
        sync: impl Fn() -> Result<(), StoreError>,
    ) -> Result<Quotas, StoreError> {
        let copies = self.copies(disk);
        let last = copies.newest().map_or(0, |newest| newest.generation);
        let last = last.max(self.quotas_generation());
        let quotas = Quotas {
            generation: last.saturating_add(1),
            list,
        };
        for at in copies.order() {
            self.write_quotas(disk, &quotas, at)?;
            sync()?;
        }
        self.state_quotas(disk, quotas.generation, |_| sync())?;
        Ok(quotas)
    }

    /// Completes a change that a crash cut short, and repairs single copies. Returns the error of a
    /// copy that cannot be written.
    ///
    /// A generation that is not stated yet is written again: a failed sync may have lost the copies
    /// that were read.
    ///
    /// # Errors
    /// A sync failed.
    pub fn mend_quotas(&mut self, disk: &dyn Disk) -> Result<Option<StoreError>, StoreError> {
        let stated = self.quotas_generation();
        let copies = self.copies(disk);
        let Some(newest) = copies.newest().filter(|of| of.generation >= stated) else {
            return Ok(None);
        };
        let is_stated = newest.generation == stated;
        if is_stated && !copies.some_lag() {
            return Ok(None);
        }
        for at in copies.order() {
            if is_stated && copies.0[at].as_ref() == Ok(newest) {
                continue;
            }
            if let Err(error) = self.write_quotas(disk, newest, at) {
                return Ok(Some(error));
            }
            self.sync_first(disk)?;
        }
        let stated = self.state_quotas(disk, newest.generation, |volumes| volumes.sync_first(disk));
        Ok(stated.err())
    }

    fn sync_first(&self, disk: &dyn Disk) -> Result<(), StoreError> {
        let synced: Result<(), DiskError> = sync_all(disk, &[FIRST]).into_iter().collect();
        synced.map_err(|error| io_error("syncing the quotas of", &self.first_path(), error))
    }

    fn write_quotas(&self, disk: &dyn Disk, quotas: &Quotas, at: usize) -> Result<(), StoreError> {
        let copy = quotas.encode(self.superblock().store);
        let mut copy = copy.map_err(|error| StoreError::Quotas(error.to_string()))?;
        if let Some(keys) = &self.keys {
            let sealed = keys.seal_quotas(&mut copy);
            sealed.map_err(|error| StoreError::Quotas(error.to_string()))?;
        }
        let failed = |error| io_error("writing the quotas of", &self.first_path(), error);
        let mut memory = AlignedBuf::zeroed(copy.len()).map_err(failed)?;
        memory.copy_from_slice(&copy);
        let offset = self.quota_places()[at];
        let write = WriteAt {
            volume: FIRST,
            offset,
            memory,
        };
        self.write(disk, vec![write])
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use larder_disk::probe::Want;
    use larder_format::{BLOCK_BYTES, QuotaGroup};
    use proptest::prelude::*;

    use super::*;
    use crate::api::OpenOptions;
    use crate::volume::create::{CreateOptions, create};
    use crate::volume::{Access, OWNER};

    const STORE: StoreId = StoreId::from_bytes([9; 16]);

    /// Quotas of so many models.
    fn quotas(generation: u64, models: u64) -> Quotas {
        let list = (0..models).map(|number| Quota {
            group: QuotaGroup::Model(format!("{number:03}")),
            min: generation,
            max: None,
            max_age_s: None,
        });
        Quotas {
            generation,
            list: list.collect(),
        }
    }

    fn read(copies: &[Vec<u8>; 3]) -> Copies {
        Copies::of(copies.clone().map(Ok), STORE, None)
    }

    proptest! {
        /// Three changes, cut short after any write, in which any blocks of a copy are there.
        #[test]
        fn a_crash_at_each_write_keeps_the_old_quotas_or_the_new_ones(
            models in prop::collection::vec(1..60_u64, 3),
            crash in 0..9_usize,
            landed in prop::collection::vec(any::<bool>(), QUOTAS_BYTES / BLOCK_BYTES),
        ) {
            let mut copies = [(); 3].map(|()| vec![0; QUOTAS_BYTES]);
            let mut old = Quotas::default();
            let mut writes = 0;
            for models in models {
                let found = read(&copies);
                let state = found.state(old.generation);
                prop_assert_eq!(state, QuotaState::Known(old.clone()));
                let new = quotas(old.generation + 1, models);
                let bytes = new.encode(STORE).unwrap();
                for at in found.order() {
                    if writes == crash {
                        let landed = landed.iter().enumerate();
                        for (block, _) in landed.filter(|(_, is_there)| **is_there) {
                            let range = block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES;
                            copies[at][range.clone()].copy_from_slice(&bytes[range]);
                        }
                        let found = read(&copies).state(old.generation);
                        let [old, new] = [old, new].map(QuotaState::Known);
                        prop_assert!(found == old || found == new);
                        return Ok(());
                    }
                    copies[at].copy_from_slice(&bytes);
                    writes += 1;
                }
                prop_assert!(!read(&copies).some_lag());
                old = new;
            }
        }
    }

    #[test]
    fn quotas_of_which_no_copy_is_whole_are_not_taken_for_none() {
        let whole = quotas(4, 2).encode(STORE).unwrap();
        let blank = vec![0; QUOTAS_BYTES];
        let mut bad = whole.clone();
        bad[100] ^= 1;
        let stated =
            |copies: [&Vec<u8>; 3], generation| read(&copies.map(Clone::clone)).state(generation);
        let state = |copies| stated(copies, 0);
        let is_unreadable = |state: QuotaState| state.fault().is_some() && state.list().is_empty();
        assert!(is_unreadable(state([&bad, &bad, &bad])));
        assert!(is_unreadable(state([&bad, &bad, &blank])));
        assert!(is_unreadable(state([&blank, &bad, &blank])));
        assert!(is_unreadable(state([&blank, &blank, &bad])));
        // One whole copy is enough, wherever it is.
        let known = QuotaState::Known(quotas(4, 2));
        assert_eq!(state([&bad, &blank, &whole]), known);
        assert_eq!(state([&whole, &bad, &bad]), known);
        // The first change of all, cut short.
        assert_eq!(state([&bad, &blank, &blank]), QuotaState::default());
        // A copy that the device does not read may be anything.
        let eio = || Err(DiskError::Os(libc::EIO));
        let copies = Copies::of([eio(), Ok(blank.clone()), Ok(blank)], STORE, None);
        assert!(is_unreadable(copies.state(0)));
        // Once quotas were set, they are somewhere: lost ones are not none, and old ones not they.
        let blank = vec![0; QUOTAS_BYTES];
        assert!(is_unreadable(stated([&blank, &blank, &blank], 1)));
        assert!(is_unreadable(stated([&bad, &blank, &blank], 1)));
        assert!(is_unreadable(stated([&whole, &whole, &whole], 5)));
        assert_eq!(stated([&whole, &blank, &bad], 4), known);
    }

    /// The volumes of a store, alone, and their disk.
    fn open(path: &Path) -> (Volumes, Arc<dyn Disk>) {
        let mut volumes = Volumes::open(path, &[], Access::Exclusive, false).unwrap();
        let options = OpenOptions::default().with(|o| o.disk = Want::Threads);
        let disk = volumes.open_disk(&options, None, OWNER).unwrap();
        (volumes, disk)
    }

    #[test]
    fn the_copies_of_a_file_replace_each_other_and_its_end_moves_with_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = &directory.path().join("store");
        let options = |size, grow| {
            CreateOptions::new(size).with(|o| {
                o.segment_size = Some(16 << 20);
                o.grow = grow;
            })
        };
        create(path, &options(130 << 20, false)).unwrap();
        let wreck = |copy: usize| {
            let file = std::fs::File::options().write(true).open(path).unwrap();
            let offset = quotas_offsets(file.metadata().unwrap().len())[copy];
            file.write_all_at(&[1; 512], offset).unwrap();
        };
        let list = |models| quotas(1, models).list;
        let set = |volumes: &mut Volumes, disk: &dyn Disk, models| {
            let sync = || {
                let synced = sync_all(disk, &[FIRST]);
                assert!(synced.iter().all(Result::is_ok));
                Ok(())
            };
            volumes.set_quotas(disk, list(models), sync).unwrap()
        };
        {
            let (mut volumes, disk) = open(path);
            assert_eq!(volumes.quotas(&*disk), QuotaState::default());
            assert_eq!(set(&mut volumes, &*disk, 2).generation, 1);
            assert_eq!(set(&mut volumes, &*disk, 40).generation, 2);
            disk.shutdown();
        }
        wreck(0);
        wreck(2);
        let (mut volumes, disk) = open(path);
        assert_eq!(volumes.quotas(&*disk).list(), list(40));
        assert_eq!(volumes.open_quotas(&*disk, true).unwrap().list(), list(40));
        disk.shutdown();
        drop((volumes, disk));
        // The copies were repaired, and one moves to the new end.
        wreck(1);
        create(path, &options(178 << 20, true)).unwrap();
        wreck(0);
        wreck(1);
        let (mut volumes, disk) = open(path);
        assert_eq!(volumes.open_quotas(&*disk, false).unwrap().list(), list(40));
        wreck(2);
        let state = volumes.open_quotas(&*disk, true).unwrap();
        assert!(state.fault().is_some() && state.list().is_empty());
        let first = volumes.list[FIRST].as_ref().unwrap();
        assert_eq!(first.quotas_beside_owner(), Some(state));
        // Set anew.
        set(&mut volumes, &*disk, 1);
        assert_eq!(volumes.quotas(&*disk).list(), list(1));
        disk.shutdown();
    }
}
