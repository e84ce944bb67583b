//! The one way to the device: each read and write of an open store passes the wrapper of its disk,
//! superblocks included.
#![allow(clippy::unwrap_used)]

mod common;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::faulty::{Fault, Faulty, Seen, faulty, open_faulty};
use common::{Home, MIB, Pool, chain};
use larder_disk::probe::Want;
use larder_engine::format::{SEGMENTS_OFFSET, SUPERBLOCK_OFFSETS};
use larder_engine::{OpenOptions, PageStore, PutStatus, Store, StoreError};
use larder_offline::{Repair, SegmentName, compact, repair};
use larder_store::api::DiskWrapper;

const VOLUMES: usize = 2;
const BLOCK: usize = 4096;
const EIO: i32 = 5;

/// Every operation that a wrapper saw, with its volume.
type Log = Arc<Mutex<Vec<(usize, Seen)>>>;

fn home() -> Home {
    Home::on_volumes(VOLUMES, 82 * MIB)
}

/// Each volume's bytes.
fn bytes_of(home: &Home) -> Vec<Vec<u8>> {
    let others = (1..VOLUMES).map(|number| home.directory.path().join(format!("volume {number}")));
    let paths: Vec<PathBuf> = std::iter::once(home.path.clone()).chain(others).collect();
    paths
        .iter()
        .map(|path| std::fs::read(path).unwrap())
        .collect()
}

/// A wrapper that records each operation and lets it pass.
fn logging(home: &Home, log: &Log) -> DiskWrapper {
    let log = log.clone();
    let attach_log = move |disk: &Faulty| {
        let log = log.clone();
        disk.when_on(Fault::IsLost, usize::MAX, move |volume, seen| {
            log.lock().unwrap().push((volume, seen));
            false
        });
    };
    faulty(home, attach_log).0
}

fn through(wrapper: DiskWrapper) -> OpenOptions {
    OpenOptions::default().with(|o| o.disk_wrapper = Some(wrapper))
}

/// Fails when a block of a volume differs from `before` and no write in the log covers it. Returns
/// how many differ.
#[track_caller]
fn changes_were_logged(home: &Home, before: &[Vec<u8>], log: &Log) -> usize {
    let log = log.lock().unwrap();
    let mut changed = 0;
    for (volume, (before, after)) in before.iter().zip(bytes_of(home)).enumerate() {
        assert_eq!(before.len(), after.len());
        let blocks = before.chunks(BLOCK).zip(after.chunks(BLOCK));
        for (at, _) in blocks.enumerate().filter(|(_, (old, new))| old != new) {
            let at = (at * BLOCK) as u64;
            let covers = |(written, seen): &(usize, Seen)| {
                matches!(seen, Seen::Write { offset, bytes }
                    if *written == volume && (*offset..offset + *bytes as u64).contains(&at))
            };
            assert!(log.iter().any(covers), "volume {volume}, offset {at}");
            changed += 1;
        }
    }
    changed
}

/// Fails when a copy of a superblock was not read through the wrapper.
#[track_caller]
fn superblocks_were_read(log: &Log) {
    let log = log.lock().unwrap();
    for volume in 0..VOLUMES {
        for at in SUPERBLOCK_OFFSETS {
            let is_it = |(read, seen): &(usize, Seen)| {
                *read == volume && matches!(seen, Seen::Read { offset, .. } if *offset == at)
            };
            assert!(log.iter().any(is_it), "volume {volume}, offset {at}");
        }
    }
}

fn writes_below_segments(log: &Log) -> usize {
    let log = log.lock().unwrap();
    let is_superblock_write = |seen: &Seen| match seen {
        Seen::Write { offset, .. } => *offset < SEGMENTS_OFFSET,
        _ => false,
    };
    log.iter()
        .filter(|(_, seen)| is_superblock_write(seen))
        .count()
}

#[test]
fn an_open_store_makes_all_its_changes_through_its_wrapper() {
    for (want, prewrite) in [(Want::Auto, false), (Want::Threads, true)] {
        let home = home();
        let log = Log::default();
        let before = bytes_of(&home);
        for round in 0..2 {
            let options = through(logging(&home, &log)).with(|o| {
                o.disk = want;
                o.prewrite = prewrite;
            });
            let store = home.open_with(options);
            let pool = Pool::new(&store, "m", &[65536]);
            for seed in 0..12 {
                // More than the store keeps: segments are reclaimed.
                pool.put(&chain(round * 100 + seed, 200));
            }
            store.delete(pool.id, &chain(round * 100 + 11, 4)).unwrap();
            // A crash, then a close.
            if round == 1 {
                assert!(store.stats().reclaimed > 0);
                store.close().unwrap();
            }
        }
        assert!(changes_were_logged(&home, &before, &log) > 1000);
        superblocks_were_read(&log);
        // Two copies a volume: at two opens and a close. And a closing statement for each volume.
        assert_eq!(writes_below_segments(&log), 3 * 2 * VOLUMES + VOLUMES);
    }
}

#[test]
fn a_wrapper_that_refuses_everything_keeps_the_volumes_as_they_are() {
    let home = home();
    let is_refusing = Arc::new(AtomicBool::new(false));
    let refusing = |is_refusing: &Arc<AtomicBool>| {
        let is_refusing = is_refusing.clone();
        let refuse = move |disk: &Faulty| {
            let is_refusing = is_refusing.clone();
            disk.when(Fault::Fails(EIO), usize::MAX, move |seen| {
                is_refusing.load(Ordering::SeqCst) && !matches!(seen, Seen::Read { .. })
            });
        };
        through(faulty(&home, refuse).0)
    };
    {
        let store = home.open_with(refusing(&is_refusing));
        let pool = Pool::new(&store, "m", &[65536]);
        assert_eq!(pool.put(&chain(1, 100)), [PutStatus::Stored; 100]);
        store.flush().unwrap();
        is_refusing.store(true, Ordering::SeqCst);
        let before = bytes_of(&home);
        let refused = pool.put_from(&chain(2, 10), 0, larder_engine::PutOptions::default());
        assert!(!refused.iter().any(|status| status.is_present()));
        assert!(store.close().is_err());
        drop(store);
        assert!(bytes_of(&home) == before, "a close writes past its wrapper");
    }
    let before = bytes_of(&home);
    let opened = Store::open(&home.path, refusing(&is_refusing));
    assert!(matches!(opened.err(), Some(StoreError::Io { .. })));
    assert!(bytes_of(&home) == before, "an open writes past its wrapper");
    is_refusing.store(false, Ordering::SeqCst);
    let store = home.open_with(refusing(&is_refusing));
    assert_eq!(Pool::new(&store, "m", &[65536]).hits(&chain(1, 100)), 100);
    store.close().unwrap();
}

#[test]
fn a_reader_without_the_lock_reads_superblocks_through_its_wrapper_and_writes_nothing() {
    let home = home();
    home.open().close().unwrap();
    let (log, before) = (Log::default(), bytes_of(&home));
    let options = through(logging(&home, &log)).with(|o| o.read_only = true);
    home.open_with(options).close().unwrap();
    superblocks_were_read(&log);
    let is_read = |(_, seen): &(usize, Seen)| matches!(seen, Seen::Read { .. });
    assert!(log.lock().unwrap().iter().all(is_read));
    assert_eq!(changes_were_logged(&home, &before, &log), 0);
}

#[test]
fn owner_and_client_of_a_shared_store_write_through_their_wrappers() {
    let home = home();
    let (log, before) = (Log::default(), bytes_of(&home));
    let attach = || {
        let options = through(logging(&home, &log));
        Store::attach(&home.path, options).unwrap()
    };
    let owner = attach();
    superblocks_were_read(&log);
    let ends = log.lock().unwrap().len();
    let client = attach();
    let pool = Pool::new(&client, "m", &[65536]);
    assert_eq!(pool.put(&chain(1, 40)), [PutStatus::Stored; 40]);
    assert!(log.lock().unwrap().len() > ends);
    client.close().unwrap();
    owner.close().unwrap();
    assert!(changes_were_logged(&home, &before, &log) > 40);
}

#[test]
fn repairs_and_compactions_write_through_their_wrapper() {
    let home = home();
    {
        let store = home.open();
        let pool = Pool::new(&store, "m", &[65536]);
        let chains: Vec<_> = (0..4).map(|seed| chain(seed, 100)).collect();
        for page in 0..100 {
            for keys in &chains {
                pool.put_from(&keys[..=page], page, larder_engine::PutOptions::default());
            }
        }
        store.delete(pool.id, &chains[0]).unwrap();
        store.close().unwrap();
    }
    let mut progress = |_, _| ControlFlow::Continue(());
    // A header copy that must be restored from its twin.
    let mut bytes = std::fs::read(&home.path).unwrap();
    bytes[usize::try_from(SEGMENTS_OFFSET).unwrap() + 100] ^= 1;
    std::fs::write(&home.path, bytes).unwrap();
    let segment = SegmentName {
        volume: 0,
        number: 0,
    };
    let plan = Repair {
        headers: vec![segment],
        ..Repair::default()
    };
    let (log, before) = (Log::default(), bytes_of(&home));
    let repaired = repair(
        &home.path,
        &through(logging(&home, &log)),
        &plan,
        &mut progress,
    );
    assert_eq!(repaired.unwrap().headers, 1);
    assert!(changes_were_logged(&home, &before, &log) > 0);
    superblocks_were_read(&log);

    let (log, before) = (Log::default(), bytes_of(&home));
    let compacted = compact(
        &home.path,
        &through(logging(&home, &log)),
        false,
        &mut progress,
    );
    assert!(compacted.unwrap().moved_pages > 0);
    assert!(changes_were_logged(&home, &before, &log) > 0);
    superblocks_were_read(&log);
}

/// The memory of a read in flight belongs to the caller, so the get waits for it. It must not ask
/// the disk again and again meanwhile.
#[test]
fn a_get_past_its_deadline_sleeps_until_its_read_ends() {
    let home = Home::with_store(128 * MIB);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = &Pool::new(&store, "m", &[65536]);
    let (held, others) = (&chain(1, 1), &chain(2, 8));
    pool.put(held);
    pool.put(others);
    disk.when(Fault::IsHeld, 1, |seen| matches!(seen, Seen::Read { .. }));
    std::thread::scope(|scope| {
        let deadline = Instant::now() + Duration::from_secs(1);
        let get = scope.spawn(move || pool.get_until(held, Some(deadline)));
        disk.wait_until_held();
        disk.wait_until_expired();
        let hits: usize = (0..100).map(|_| pool.hits(others)).sum();
        let expirations = disk.expirations();
        disk.release();
        get.join().unwrap();
        assert_eq!((hits, expirations), (800, 1));
    });
    store.close().unwrap();
}
