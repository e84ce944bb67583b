#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use larder_disk::probe::Want;
use larder_disk::{Action, Buffer, Choice, Done, Op, Piece};
use larder_format::{
    BLOCK_BYTES, KeyWrap, KeyringSlot, Serial, SlotState, StoreId, TenantId, WRAPPED_KEY_BYTES,
    WrapId, WrappedKey,
};
use larder_sync::Mutex;
use proptest::prelude::*;

use super::*;
use crate::api::OpenOptions;
use crate::volume::create::{CreateOptions, create};
use crate::volume::{Access, OWNER};

const STORE: StoreId = StoreId::from_bytes([9; 16]);

/// A keyring with so many slots.
fn keyring(store: StoreId, generation: u64, slots: usize) -> KeyringCopy {
    let byte = generation.to_le_bytes()[0];
    let key = WrappedKey {
        nonce: [byte; 24],
        bytes: [byte; WRAPPED_KEY_BYTES],
    };
    let slot = KeyringSlot {
        tenant: TenantId::from_bytes([byte; 16]),
        created_unix_s: generation,
        state: match generation % 2 {
            0 => SlotState::Current(key),
            _ => SlotState::Erased(Serial::ZERO),
        },
    };
    let id = WrapId::from_bytes([1; 16]);
    KeyringCopy {
        store,
        generation,
        nonce: [2; 24],
        tag: [3; 16],
        wraps: vec![KeyWrap { id, key }],
        slots: vec![slot; slots],
    }
}

fn read(copies: &[Vec<u8>]) -> Copies {
    let of = |(at, bytes): (usize, &Vec<u8>)| {
        let place = Place {
            volume: at / 3,
            offset: at as u64,
        };
        (
            place,
            KeyringCopy::decode(bytes, STORE).map_err(Fault::Damaged),
        )
    };
    Copies(copies.iter().enumerate().map(of).collect())
}

proptest! {
    /// Changes of the keyring of two volumes, cut short after any write, in which any blocks of a
    /// copy are there. The next open completes these.
    #[test]
    fn a_crash_at_each_write_keeps_the_old_keyring_or_the_new_one(
        slots in prop::collection::vec(1..200_usize, 3),
        crash in 0..18_usize,
        landed in prop::collection::vec(any::<bool>(), KEYRING_BYTES / BLOCK_BYTES),
    ) {
        let mut copies = vec![keyring(STORE, 1, 1).encode(); 6];
        let mut old = keyring(STORE, 1, 1);
        let mut writes = 0;
        for slots in slots {
            let found = read(&copies);
            prop_assert_eq!(found.newest(), Some(&old));
            let new = keyring(STORE, old.generation + 1, slots);
            let bytes = new.encode();
            for place in found.behind(&new) {
                let copy = &mut copies[usize::try_from(place.offset).unwrap()];
                if writes == crash {
                    let landed = landed.iter().enumerate().filter(|(_, is_there)| **is_there);
                    for (block, _) in landed {
                        let range = block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES;
                        copy[range.clone()].copy_from_slice(&bytes[range]);
                    }
                    let found = read(&copies);
                    let newest = found.newest().unwrap();
                    prop_assert!(*newest == old || *newest == new);
                    let behind = found.behind(newest);
                    let is_there = |place: &Place| behind.contains(place);
                    let lags = |(place, copy): &(Place, Result<_, _>)| {
                        is_there(place) == (copy.as_ref() != Ok(newest))
                    };
                    prop_assert!(found.0.iter().all(lags));
                    return Ok(());
                }
                copy.copy_from_slice(&bytes);
                writes += 1;
            }
            prop_assert!(read(&copies).behind(&new).is_empty());
            old = new;
        }
    }
}

/// A store of two volumes.
struct Sample {
    _directory: tempfile::TempDir,
    paths: [PathBuf; 2],
}

impl Sample {
    fn new() -> Sample {
        let directory = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| directory.path().join(name));
        let options = CreateOptions::new(260 << 20).with(|o| {
            o.segment_size = Some(16 << 20);
            o.volumes = vec![paths[1].clone()];
        });
        create(&paths[0], &options).unwrap();
        Sample {
            _directory: directory,
            paths,
        }
    }

    fn open(&self) -> (Volumes, Arc<dyn Disk>) {
        let opened = Volumes::open_any(&self.paths[0], &[], Access::Exclusive, false);
        let mut volumes = opened.unwrap();
        let options = OpenOptions::default().with(|o| o.disk = Want::Threads);
        let disk = volumes.open_disk(&options, None, OWNER).unwrap();
        (volumes, disk)
    }

    /// The keyring as an open finds it.
    fn found(&self, writes: bool) -> Result<Option<KeyringCopy>, StoreError> {
        let (mut volumes, disk) = self.open();
        if writes && let Err(error) = volumes.mend_keyring(&*disk) {
            disk.shutdown();
            return Err(error);
        }
        let found = volumes.newest_keyring(&*disk);
        disk.shutdown();
        found
    }

    /// Sets the keyring of the next generation.
    fn set(&self, generation: u64, slots: usize) -> KeyringCopy {
        let (mut volumes, disk) = self.open();
        let next = keyring(volumes.superblock().store, generation, slots);
        let sync = |volumes: &Volumes, volume| volumes.sync_one(&*disk, volume);
        volumes.set_keyring(&*disk, &next, sync).unwrap();
        assert_eq!(volumes.keyring_generation(), generation);
        disk.shutdown();
        next
    }

    fn bytes(&self, volume: usize, copy: usize) -> Vec<u8> {
        let mut bytes = vec![0; KEYRING_BYTES];
        let (file, offset) = place(&self.paths[volume], copy);
        file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    fn write(&self, volume: usize, copy: usize, bytes: &[u8]) {
        let (file, offset) = place(&self.paths[volume], copy);
        file.write_all_at(bytes, offset).unwrap();
    }
}

fn place(path: &Path, copy: usize) -> (std::fs::File, u64) {
    let file = std::fs::File::options().read(true).write(true).open(path);
    let file = file.unwrap();
    let offsets = keyring_offsets(file.metadata().unwrap().len());
    (file, offsets[copy])
}

fn is_unusable(found: &Result<Option<KeyringCopy>, StoreError>) -> bool {
    matches!(found, Err(StoreError::Keyring { .. }))
}

#[test]
fn a_keyring_is_in_three_places_of_each_volume_and_each_one_suffices() {
    let sample = Sample::new();
    assert_eq!(sample.found(true).unwrap(), None);
    sample.set(1, 3);
    let next = sample.set(2, 40);
    let places = || (0..2).flat_map(|volume| (0..3).map(move |copy| (volume, copy)));
    for (volume, copy) in places() {
        assert_eq!(sample.bytes(volume, copy), next.encode());
    }
    for kept in places() {
        for (volume, copy) in places().filter(|place| *place != kept) {
            sample.write(volume, copy, &[1; 512]);
        }
        assert_eq!(sample.found(false).unwrap().as_ref(), Some(&next));
        assert_ne!(sample.bytes(1 - kept.0, kept.1), next.encode());
        assert_eq!(sample.found(true).unwrap().as_ref(), Some(&next));
        assert!(places().all(|(volume, copy)| sample.bytes(volume, copy) == next.encode()));
    }
}

#[test]
fn a_keyring_of_which_no_copy_is_whole_is_not_taken_for_none() {
    let sample = Sample::new();
    let first = sample.set(1, 3);
    for bytes in [&[1; 512][..], &vec![0; KEYRING_BYTES]] {
        for volume in 0..2 {
            (0..3).for_each(|copy| sample.write(volume, copy, bytes));
        }
        let before = sample.bytes(0, 0);
        assert!(is_unusable(&sample.found(true)));
        assert_eq!(sample.bytes(0, 0), before);
    }
    // That of an earlier state is none either: a tenant may have been erased since.
    sample.set(2, 3);
    for volume in 0..2 {
        (0..3).for_each(|copy| sample.write(volume, copy, &first.encode()));
    }
    assert!(is_unusable(&sample.found(true)));
    assert!(is_unusable(&sample.found(false)));
}

#[test]
fn a_change_that_was_cut_short_is_completed_by_the_next_open() {
    let sample = Sample::new();
    let first = sample.set(1, 3);
    let (volumes, disk) = sample.open();
    let next = keyring(first.store, 2, 90);
    disk.shutdown();
    drop((volumes, disk));
    sample.write(1, 2, &next.encode());
    assert_eq!(sample.found(false).unwrap().as_ref(), Some(&next));
    assert_eq!(sample.found(true).unwrap().as_ref(), Some(&next));
    assert_eq!(sample.bytes(0, 0), next.encode());
    let (volumes, disk) = sample.open();
    assert!(
        volumes
            .present()
            .all(|(_, volume)| volume.superblock.keyring == 2)
    );
    disk.shutdown();
}

/// The sync of a device that fails.
fn no_sync(_: &Volumes, _: usize) -> Result<(), StoreError> {
    Err(StoreError::NoRoom)
}

#[test]
fn a_change_that_failed_is_completed_before_the_next_one() {
    let sample = Sample::new();
    let first = sample.set(1, 3);
    let [second, third] = [2, 3].map(|generation| keyring(first.store, generation, 90));
    let (mut volumes, disk) = sample.open();
    for next in [&second, &third] {
        let failed = volumes.set_keyring(disk.as_ref(), next, no_sync);
        assert!(failed.is_err());
    }
    let places = || (0..2).flat_map(|volume| (0..3).map(move |place| (volume, place)));
    let copies = |of: &KeyringCopy| {
        let is_of = |(volume, place): &(usize, usize)| sample.bytes(*volume, *place) == of.encode();
        places().filter(is_of).count()
    };
    assert_eq!((copies(&first), copies(&second)), (5, 1));
    let sync = |volumes: &Volumes, volume| volumes.sync_one(disk.as_ref(), volume);
    volumes.set_keyring(disk.as_ref(), &third, sync).unwrap();
    assert_eq!(copies(&third), 6);
    disk.shutdown();
}

#[test]
fn damaged_copies_are_replaced_before_the_last_whole_one() {
    let sample = Sample::new();
    let first = sample.set(1, 3);
    let (mut volumes, disk) = sample.open();
    for (volume, place) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 2)] {
        sample.write(volume, place, &[0xee; KEYRING_BYTES]);
    }
    let next = keyring(first.store, 2, 90);
    let failed = volumes.set_keyring(disk.as_ref(), &next, no_sync);
    assert!(failed.is_err());
    assert_eq!(sample.bytes(1, 1), first.encode());
    disk.shutdown();
}

/// A disk that keeps what a power loss leaves.
#[derive(Default)]
struct Kept {
    /// By volume and offset: the bytes that are durable.
    durable: HashMap<(usize, u64), Vec<u8>>,
    /// The bytes that the next sync makes durable.
    dirty: HashMap<(usize, u64), Vec<u8>>,
}

/// Fails its first sync, if it is to. The bytes before it are lost, and reads return them.
struct Forgetful {
    inner: Arc<dyn Disk>,
    paths: [PathBuf; 2],
    kept: Arc<Mutex<Kept>>,
    fails: AtomicBool,
}

impl Disk for Forgetful {
    unsafe fn submit(&self, ops: Vec<Op>) {
        for op in ops {
            let mut kept = self.kept.lock();
            match &op.action {
                Action::Write {
                    offset,
                    buffer: Buffer::Owned(bytes),
                } => {
                    let at = (op.volume, *offset);
                    let mut before = vec![0; bytes.len()];
                    let file = std::fs::File::open(&self.paths[op.volume]).unwrap();
                    file.read_exact_at(&mut before, *offset).unwrap();
                    kept.durable.entry(at).or_insert(before);
                    kept.dirty.insert(at, bytes.to_vec());
                }
                Action::Sync => {
                    let fails = self.fails.swap(false, Ordering::Relaxed);
                    let synced = kept.dirty.extract_if(|(volume, _), _| *volume == op.volume);
                    let synced: Vec<_> = synced.collect();
                    if fails {
                        drop(kept);
                        op.sink.done(vec![Done {
                            tag: op.tag,
                            result: Err(DiskError::Os(libc::EIO)),
                            buffer: None,
                        }]);
                        continue;
                    }
                    kept.durable.extend(synced);
                }
                _ => {}
            }
            drop(kept);
            // SAFETY: the operation is passed on as it came.
            unsafe { self.inner.submit(vec![op]) };
        }
    }

    unsafe fn register(&self, _: &[Piece]) -> String {
        String::new()
    }

    fn choice(&self) -> &Choice {
        self.inner.choice()
    }

    fn shutdown(&self) {
        self.inner.shutdown();
    }
}

/// Openings whose syncs fail one after the other leave each copy visible, and none durable.
#[test]
fn a_generation_is_stated_only_when_a_copy_of_it_is_durable() {
    let sample = Sample::new();
    let first = sample.set(1, 3);
    let next = keyring(first.store, 2, 90);
    let kept = Arc::new(Mutex::new(Kept::default()));
    for opening in 0..8 {
        let (mut volumes, inner) = sample.open();
        let disk = Forgetful {
            inner,
            paths: sample.paths.clone(),
            kept: kept.clone(),
            fails: AtomicBool::new(opening < 7),
        };
        let sync = |volumes: &Volumes, volume| volumes.sync_one(&disk, volume);
        let done = match opening {
            0 => volumes.set_keyring(&disk, &next, sync),
            _ => volumes.mend_keyring(&disk),
        };
        assert_eq!(done.is_err(), opening < 7, "{done:?}");
        disk.shutdown();
    }
    for ((volume, offset), bytes) in &kept.lock().durable {
        let (file, _) = place(&sample.paths[*volume], 0);
        file.write_all_at(bytes, *offset).unwrap();
    }
    assert_eq!(sample.found(true).unwrap(), Some(next));
}

#[test]
fn an_encrypted_store_is_refused_unchanged_by_an_open_without_keys() {
    let sample = Sample::new();
    sample.set(1, 3);
    let read = || {
        sample
            .paths
            .each_ref()
            .map(|path| std::fs::read(path).unwrap())
    };
    let before = read();
    let accesses = [
        Access::Exclusive,
        Access::AtOnce,
        Access::Client,
        Access::ReadOnly,
    ];
    for access in accesses {
        let opened = Volumes::open(&sample.paths[0], &[], access, false);
        assert!(matches!(opened, Err(StoreError::Sealed(_))));
    }
    let grown = CreateOptions::new(520 << 20).with(|o| o.grow = true);
    let grown = create(&sample.paths[0], &grown);
    assert!(matches!(grown, Err(StoreError::Sealed(_))));
    assert!(before == read());
}
