//! Devices that do not answer: row 20.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use larder_engine::format::SEGMENTS_OFFSET;
use larder_engine::{
    GetStatus, MissReason, OpenOptions, PageStore, PutStatus, Refusal, Store, StoreError,
};
use larder_store::share::Inside;

use super::SIZE;
use super::common::faulty::{Fault, Seen, open_faulty};
use super::common::honest::eventually;
use super::common::{Home, Pool, chain};
use super::device::{Release, attach_faulty, is_read};

#[test]
fn row_20_a_read_into_memory_of_the_caller_waits_for_a_silent_device() {
    let home = Home::with_store(SIZE);
    let options = OpenOptions::default().with(|o| o.hang_limit = Duration::from_secs(3600));
    let (store, disk) = open_faulty(&home, options);
    let pool = Pool::new(&store, "m", &[65536]);
    let keys = chain(1, 3);
    assert_eq!(pool.put(&keys), [PutStatus::Stored; 3]);
    disk.when(Fault::IsHeld, 1, is_read);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Into the caller's memory: the call waits for the device, deadline or not.
        let reader = scope.spawn(|| {
            let statuses = pool.get(&keys[1..2]);
            is_over.store(true, Ordering::SeqCst);
            statuses
        });
        disk.wait_until_held();
        let _release = Release(&disk);
        assert!(
            !is_over.load(Ordering::SeqCst),
            "a get returns under the device's hands"
        );
        // No other call waits: lookups in memory are answered, puts are stored.
        assert_eq!(store.longest_prefix(pool.id, &keys), 3);
        assert_eq!(pool.put(&chain(2, 1)), [PutStatus::Stored]);
        disk.release();
        assert_eq!(reader.join().unwrap(), [GetStatus::Hit]);
    });
    assert_eq!(pool.hits(&keys), 3);
    store.local().unwrap().check_invariants().unwrap();
    store.close().unwrap();
}

#[test]
fn row_20_queued_reads_are_given_up_at_the_deadline() {
    let home = Home::with_store(SIZE);
    let owner = Store::attach(&home.path, OpenOptions::default()).unwrap();
    let (client, disk) = attach_faulty(&home);
    let keys = chain(1, 40);
    let soon = || Some(Instant::now() + Duration::from_millis(20));
    let late = MissReason::Deadline;
    let pool = Pool::new(&client, "m", &[65536]);
    assert_eq!(pool.put(&keys), [PutStatus::Stored; 40]);
    // A namespace that the owner uses too is read through the staging area.
    for uses in [&[][..], &[&owner]] {
        let _others: Vec<_> = uses
            .iter()
            .map(|store| Pool::new(*store, "m", &[65536]))
            .collect();
        disk.when(Fault::Waits, usize::MAX, is_read);
        assert_eq!(
            pool.get_until(&keys, soon()),
            [GetStatus::Miss(late); 40],
            "beside {} others",
            uses.len()
        );
        disk.clear_rules();
        assert_eq!(pool.hits(&keys), 40);
    }
    assert!(client.stats().staged_pages > 0);
    client.close().unwrap();
    owner.close().unwrap();
}

#[test]
fn row_20_a_reader_without_the_lock_does_not_outstay_its_deadline() {
    let home = Home::with_store(SIZE);
    let keys = chain(1, 3);
    {
        let store = home.open();
        let pool = Pool::new(&store, "m", &[65536]);
        assert_eq!(pool.put(&keys), [PutStatus::Stored; 3]);
        store.close().unwrap();
    }
    let options = OpenOptions::default().with(|o| o.read_only = true);
    let (store, disk) = open_faulty(&home, options);
    let pool = Pool::new(&store, "m", &[65536]);
    // The pages arrive; the headers that prove them still current do not.
    let is_header = |seen| matches!(seen, Seen::Read { offset, .. } if offset == SEGMENTS_OFFSET);
    disk.when(Fault::IsHeld, usize::MAX, is_header);
    let late = MissReason::Deadline;
    let soon = || Some(Instant::now() + Duration::from_millis(200));
    assert_eq!(pool.get_until(&keys, soon()), [GetStatus::Miss(late); 3]);
    assert!(disk.hits() > 0);
    disk.clear_rules();
    assert_eq!(pool.hits(&keys), 3);
    disk.release();
}

#[test]
fn row_20_no_call_waits_for_a_close_that_waits_for_a_silent_device() {
    let home = Home::with_store(SIZE);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[65536]);
    let keys = chain(1, 3);
    assert_eq!(pool.put(&keys), [PutStatus::Stored; 3]);
    disk.when(Fault::IsHeld, 1, is_read);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| pool.get(&keys[..1]));
        disk.wait_until_held();
        let release = Release(&disk);
        let closer = scope.spawn(|| store.close());
        eventually("the store is being closed", || {
            store.longest_prefix(pool.id, &keys) == 0
        });
        let closed = GetStatus::Miss(MissReason::Closed);
        assert_eq!(pool.get(&keys), [closed; 3]);
        assert_eq!(
            pool.put(&chain(2, 1)),
            [PutStatus::Refused(Refusal::Closed)]
        );
        assert!(matches!(store.flush(), Err(StoreError::Closed)));
        assert!(!closer.is_finished());
        drop(release);
        assert_eq!(reader.join().unwrap(), [GetStatus::Hit]);
        closer.join().unwrap().unwrap();
    });
    assert_eq!(Pool::new(&home.open(), "m", &[65536]).hits(&keys), 3);
}
