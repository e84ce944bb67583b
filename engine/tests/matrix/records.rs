//! Records that are no pages, when the disk is slow or takes none of them: rows 3 and 7.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use larder_engine::format::{BLOCK_BYTES, SEGMENTS_OFFSET};
use larder_engine::{OpenOptions, PageStore, PutStatus};
use larder_store::share::Inside;

use super::common::faulty::{Fault, Seen, open_faulty};
use super::common::honest::eventually;
use super::common::{Home, MIB, Pool, chain};

const EIO: i32 = 5;

#[test]
fn row_03_deletions_gather_so_that_no_hole_is_longer_than_recovery_looks() {
    const PAGES: usize = 40_960;
    const GROUPS: usize = 8;
    let home = Home::with_store(512 * MIB);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[4096]);
    let keys = chain(1, PAGES);
    for from in (0..PAGES).step_by(4096) {
        let statuses = pool.put_from(&keys[..from + 4096], from, Default::default());
        assert!(statuses.iter().all(|status| *status == PutStatus::Stored));
    }
    let longest = Arc::new(AtomicUsize::new(0));
    let seen_longest = longest.clone();
    disk.when(Fault::Waits, 1, move |seen| {
        if let Seen::Write { offset, bytes } = seen
            && offset >= SEGMENTS_OFFSET
        {
            seen_longest.fetch_max(bytes / BLOCK_BYTES, Ordering::Relaxed);
        }
        false
    });
    // As many groups as are in flight at once, each of one page: the rest gathers behind them.
    disk.when(Fault::IsHeld, GROUPS, |seen| {
        matches!(seen, Seen::Write { .. })
    });
    let (first, rest) = keys.split_at(GROUPS);
    std::thread::scope(|scope| {
        let store = &store;
        let mut deleted = Vec::new();
        for (number, key) in (1..).zip(first) {
            let one = std::slice::from_ref(key);
            deleted.push(scope.spawn(move || store.delete(pool.id, one).unwrap()));
            disk.wait_until_so_many_are_held(number);
        }
        deleted.push(scope.spawn(|| store.delete(pool.id, rest).unwrap()));
        eventually("all of it is deleted", || store.stats().pages == 0);
        disk.release();
        let deleted = deleted.into_iter().map(|one| one.join().unwrap());
        assert_eq!(deleted.sum::<u64>(), PAGES as u64);
    });
    let longest = longest.load(Ordering::Relaxed);
    assert!((100..=512).contains(&longest), "{longest} blocks");
    drop(store);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[4096]);
    assert_eq!(store.longest_prefix(pool.id, &keys), 0);
}

#[test]
fn row_07_a_deletion_that_the_device_refuses_fails_and_costs_few_segments() {
    let home = Home::with_store(512 * MIB);
    let keys = chain(1, 8);
    {
        let (store, disk) = open_faulty(&home, OpenOptions::default());
        let pool = Pool::new(&store, "m", &[65536]);
        assert_eq!(pool.put(&keys), [PutStatus::Stored; 8]);
        let before = store.stats().free_segments;
        disk.when(Fault::Fails(EIO), usize::MAX, |seen| {
            matches!(seen, Seen::Write { .. })
        });
        assert!(store.delete(pool.id, &keys[7..]).is_err());
        let lost = before - store.stats().free_segments;
        assert!(lost <= 3, "{lost} of {before} free segments");
        disk.clear_rules();
        eventually("the volume takes a deletion", || {
            store
                .delete(pool.id, &keys[6..7])
                .is_ok_and(|count| count == 1)
        });
        store.local().unwrap().check_invariants().unwrap();
    }
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    assert_eq!(store.longest_prefix(pool.id, &keys), 6);
}

#[test]
fn row_07_a_deletion_is_written_on_the_one_volume_that_takes_it() {
    const VOLUMES: usize = 5;
    let keys = chain(1, 8);
    for sound in 0..VOLUMES {
        let home = Home::on_volumes(VOLUMES, 128 * MIB);
        {
            let (store, disk) = open_faulty(&home, OpenOptions::default());
            let pool = Pool::new(&store, "m", &[65536]);
            assert_eq!(pool.put(&keys), [PutStatus::Stored; 8]);
            disk.when_on(Fault::Fails(EIO), usize::MAX, move |volume, seen| {
                volume != sound && matches!(seen, Seen::Write { .. })
            });
            for last in (4..8).rev() {
                let deleted = store.delete(pool.id, &keys[last..=last]);
                assert_eq!(deleted.unwrap(), 1, "volume {sound}, page {last}");
            }
            store.local().unwrap().check_invariants().unwrap();
        }
        let store = home.open();
        let pool = Pool::new(&store, "m", &[65536]);
        assert_eq!(store.longest_prefix(pool.id, &keys), 4, "volume {sound}");
    }
}
