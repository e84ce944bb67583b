//! Faults of the disk: rows 3, 4, 6 to 10, 13 and 22.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use larder_engine::format::SEGMENTS_OFFSET;
use larder_engine::{
    CreateOptions, GetStatus, MissReason, OpenOptions, PageStore, PutOptions, PutStatus, Store,
    StoreError, create,
};
use larder_store::share::Inside;

use super::common::faulty::{Fault, Faulty, Seen, faulty, open_faulty, open_prepared};
use super::common::honest::eventually;
use super::common::{Home, MIB, Pool, chain, fill};
use super::{SEGMENT, SIZE, descriptor, find, flip};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

fn is_write(seen: Seen) -> bool {
    matches!(seen, Seen::Write { .. })
}

/// Lets held operations go on, also when a test fails: a scope waits for its threads.
pub struct Release<'a>(pub &'a Faulty);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// Any read. The rules that use it are set after the open, when only page data is read.
pub fn is_read(seen: Seen) -> bool {
    matches!(seen, Seen::Read { .. })
}

#[test]
fn row_03_behind_a_lost_descriptor_write_later_records_are_found() {
    let home = Home::with_store(SIZE);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[65536]);
    let (first, lost, last) = (chain(1, 4), chain(2, 4), chain(3, 4));
    assert_eq!(pool.put(&first), [PutStatus::Stored; 4]);
    // The namespace is in block 0, the first chain in block 1.
    disk.when(
        Fault::IsLost,
        1,
        |seen| matches!(seen, Seen::Write { offset, .. } if offset == descriptor(2)),
    );
    assert_eq!(pool.put(&lost), [PutStatus::Stored; 4]);
    assert_eq!(disk.hits(), 1);
    assert_eq!(pool.put(&last), [PutStatus::Stored; 4]);
    drop(store);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    assert_eq!(
        (pool.hits(&first), pool.hits(&lost), pool.hits(&last)),
        (4, 0, 4)
    );
    assert_eq!(pool.put(&lost), [PutStatus::Stored; 4]);
    assert_eq!(pool.hits(&lost), 4);
}

#[test]
fn row_04_a_misdirected_write_or_read_is_a_miss_for_its_victims_alone() {
    let home = Home::with_store(SIZE);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[65536]);
    let (there, diverted) = (chain(1, 4), chain(2, 1));
    assert_eq!(pool.put(&there), [PutStatus::Stored; 4]);
    let victim = find(&home.path, &there[3]);
    disk.when(Fault::GoesTo(victim), 1, |seen| {
        matches!(seen, Seen::Write { bytes: 65536, .. })
    });
    assert_eq!(pool.put(&diverted), [PutStatus::Stored]);
    // Both its own key and the key of the page that it overwrote: neither gets the other's bytes.
    assert_eq!(pool.get(&diverted), [GetStatus::Miss(MissReason::Damaged)]);
    assert_eq!(
        pool.get(&there[3..]),
        [GetStatus::Miss(MissReason::Damaged)]
    );
    assert_eq!(pool.hits(&there[..3]), 3);
    // A read that returns another page.
    let other = find(&home.path, &there[0]);
    disk.when(Fault::GoesTo(other), 1, is_read);
    assert_eq!(
        pool.get(&there[1..2]),
        [GetStatus::Miss(MissReason::Damaged)]
    );
    assert_eq!(pool.hits(&there), 2);
    assert_eq!(disk.hits(), 2);
    assert_eq!(store.stats().damaged, 3);
}

/// Holds a read of a page back, and meanwhile has the page put again elsewhere and its old place
/// spoiled.
fn put_again_while_read(
    home: &Home,
    disk: &Faulty,
    reader: &dyn PageStore,
    writer: &dyn PageStore,
) {
    let keys = chain(1, 1);
    let (reading, writing) = (
        Pool::new(reader, "m", &[65536]),
        Pool::new(writer, "m", &[65536]),
    );
    assert_eq!(writing.put(&keys), [PutStatus::Stored]);
    let old = find(&home.path, &keys[0]);
    disk.when(
        Fault::IsHeld,
        1,
        move |seen| matches!(seen, Seen::Read { offset, .. } if offset == old),
    );
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| reading.get(&keys));
        let release = Release(disk);
        disk.wait_until_held();
        assert_eq!(writer.delete(writing.id, &keys).unwrap(), 1);
        assert_eq!(writing.put(&keys), [PutStatus::Stored]);
        flip(&home.path, old);
        drop(release);
        assert_eq!(reading.join().unwrap(), [GetStatus::Hit]);
    });
    assert_eq!(writer.stats().damaged, 0);
}

#[test]
fn row_04_a_read_of_descriptors_that_goes_astray_costs_no_page() {
    let home = Home::with_store(SIZE);
    let keys: Vec<_> = (1..9).map(|seed| chain(seed, 1)).collect();
    let astray = |disk: &Faulty| {
        disk.when(Fault::GoesTo(SEGMENTS_OFFSET + 3 * SEGMENT), 1, |seen| {
            matches!(seen, Seen::Read { offset, bytes }
                if (offset..offset + bytes as u64).contains(&descriptor(2)))
        });
    };
    {
        let store = home.open();
        let pool = Pool::new(&store, "m", &[65536]);
        for key in &keys {
            assert_eq!(pool.put(key), [PutStatus::Stored]);
        }
        store.flush().unwrap();
    }
    // After a kill, after a close, and in reclaim.
    for _ in 0..2 {
        let (store, disk) = open_prepared(&home, OpenOptions::default(), astray);
        assert_eq!(disk.hits(), 1);
        let pool = Pool::new(&store, "m", &[65536]);
        assert!(keys.iter().all(|key| pool.hits(key) == 1));
        store.close().unwrap();
    }
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[65536]);
    // Beside the pages that are deleted again they are all that their segment holds.
    let filling = chain(20, 300);
    pool.put(&filling);
    store.delete(pool.id, &filling).unwrap();
    astray(&disk);
    for seed in 21..60 {
        if disk.hits() > 0 {
            break;
        }
        // Used, so that they are worth a copy.
        assert!(keys.iter().all(|key| pool.hits(key) == 1));
        pool.put(&chain(seed, 60));
    }
    assert_eq!(disk.hits(), 1);
    store.flush().unwrap();
    assert!(keys.iter().all(|key| pool.hits(key) == 1));
    assert_eq!(store.stats().damaged, 0);
    store.local().unwrap().check_invariants().unwrap();
}

#[test]
fn row_04_a_page_that_lies_elsewhere_by_now_is_read_there() {
    let home = Home::with_store(SIZE);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    put_again_while_read(&home, &disk, &store, &store);
}

#[test]
fn row_04_a_client_reads_a_page_that_lies_elsewhere_by_now_there() {
    let home = Home::with_store(SIZE);
    let owner = Store::attach(&home.path, OpenOptions::default()).unwrap();
    let (client, disk) = attach_faulty(&home);
    put_again_while_read(&home, &disk, &client, &owner);
}

/// An owner or a client over a disk with rules for faults.
pub fn attach_faulty(home: &Home) -> (Store, Arc<Faulty>) {
    let (wrapper, made) = faulty(home, |_| ());
    let mut options = OpenOptions::default();
    options.disk_wrapper = Some(wrapper);
    let client = Store::attach(&home.path, options).unwrap();
    let disk = made.lock().unwrap().clone();
    (client, disk.unwrap())
}

#[test]
fn row_06_unreadable_blocks_are_never_taken_for_empty_ones() {
    let home = Home::with_store(SIZE);
    let keys = chain(1, 8);
    {
        let store = home.open();
        assert_eq!(
            Pool::new(&store, "m", &[65536]).put(&keys),
            [PutStatus::Stored; 8]
        );
        store.close().unwrap();
    }
    {
        // Every read of the first segment's descriptors fails, in recovery and ever after.
        let (store, disk) = open_prepared(&home, OpenOptions::default(), |disk| {
            disk.when(Fault::Fails(EIO), usize::MAX, |seen| {
                matches!(seen, Seen::Read { offset, bytes }
                    if offset + bytes as u64 > descriptor(8) && offset <= descriptor(0))
            });
        });
        assert!(disk.hits() > 0);
        let pool = Pool::new(&store, "m", &[65536]);
        assert_eq!(store.stats().unreadable_segments, 1);
        assert_eq!(pool.hits(&keys), 0);
        // However much is written, nothing goes where the unreadable pages may be.
        for seed in 2..12 {
            pool.put(&chain(seed, 200));
        }
        assert!(store.stats().reclaimed > 0);
        store.close().unwrap();
    }
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    assert_eq!(store.stats().unreadable_segments, 0);
    assert_eq!(pool.hits(&keys), 8);
    store.local().unwrap().check_invariants().unwrap();
}

#[test]
fn row_06_a_page_that_cannot_be_read_costs_itself_and_is_put_again_elsewhere() {
    let home = Home::with_store(SIZE);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[65536]);
    let keys = chain(1, 8);
    assert_eq!(pool.put(&keys), [PutStatus::Stored; 8]);
    let bad = find(&home.path, &keys[3]);
    disk.when(Fault::Fails(EIO), usize::MAX, move |seen| {
        matches!(seen, Seen::Read { offset, bytes }
            if (offset..offset + bytes as u64).contains(&bad))
    });
    let statuses = pool.get(&keys);
    assert_eq!(statuses[3], GetStatus::Miss(MissReason::ReadError));
    assert_eq!(statuses.iter().filter(|status| status.is_hit()).count(), 7);
    let again = pool.put(&keys);
    assert_eq!(again[3], PutStatus::Stored);
    assert_eq!(pool.hits(&keys), 8);
    assert_eq!(store.stats().damaged, 1);
}

#[test]
fn row_07_after_a_failed_write_pages_go_elsewhere_and_acknowledged_pages_stay() {
    let home = Home::with_store(SIZE);
    let keys = chain(1, 24);
    {
        let (store, disk) = open_faulty(&home, OpenOptions::default());
        let pool = Pool::new(&store, "m", &[65536]);
        assert_eq!(pool.put(&keys[..8]), [PutStatus::Stored; 8]);
        disk.when(Fault::Fails(EIO), 1, is_write);
        // The handle retries failed pages once, and they land in a segment that has not failed.
        assert_eq!(pool.put(&keys[..16])[8..], [PutStatus::Stored; 8]);
        assert_eq!(disk.hits(), 1);
        // Every segment fails: the caller gets the failure, and no page is reported as stored.
        disk.when(Fault::Fails(EIO), usize::MAX, is_write);
        let statuses = pool.put_from(&keys, 16, PutOptions::default());
        assert!(
            !statuses.iter().any(|status| status.is_present()),
            "{statuses:?}"
        );
        assert_eq!(store.longest_prefix(pool.id, &keys), 16);
        disk.clear_rules();
        eventually("puts are stored again", || {
            pool.put_from(&keys, 16, PutOptions::default()) == [PutStatus::Stored; 8]
        });
    }
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    assert_eq!(pool.hits(&keys), 24);
    store.local().unwrap().check_invariants().unwrap();
}

#[test]
fn row_07_a_header_that_cannot_be_written_at_the_open_costs_its_segment_and_not_the_store() {
    let home = Home::with_store(2 * SIZE);
    let (there, new) = (chain(1, 8), chain(2, 24));
    {
        // Not closed: the next open has to write the header of the open segment.
        let store = home.open();
        assert_eq!(
            Pool::new(&store, "m", &[MIB as u32]).put(&there),
            [PutStatus::Stored; 8]
        );
        store.flush().unwrap();
    }
    for _ in 0..2 {
        let (store, disk) = open_prepared(&home, OpenOptions::default(), |disk| {
            disk.when(
                Fault::Fails(EIO),
                usize::MAX,
                |seen| matches!(seen, Seen::Write { offset, .. } if offset == SEGMENTS_OFFSET),
            );
        });
        assert!(disk.hits() > 0);
        assert_eq!(store.stats().unreadable_segments, 1);
        let pool = Pool::new(&store, "m", &[MIB as u32]);
        assert_eq!(pool.hits(&there), 8);
        assert!(pool.put(&new).iter().all(|status| status.is_present()));
        assert_eq!((pool.hits(&there), pool.hits(&new)), (8, 24));
        store.local().unwrap().check_invariants().unwrap();
        store.close().unwrap();
    }
    let store = home.open();
    let pool = Pool::new(&store, "m", &[MIB as u32]);
    assert_eq!(store.stats().unreadable_segments, 0);
    assert_eq!((pool.hits(&there), pool.hits(&new)), (8, 24));
}

#[test]
fn row_07_a_client_retries_failed_page_writes_once() {
    let home = Home::with_store(4 * SIZE);
    let owner = Store::attach(&home.path, OpenOptions::default()).unwrap();
    // Windows of 2, 8 and 4 pages: any of their writes, the last ones too.
    for before in 0..14 {
        let (client, disk) = attach_faulty(&home);
        let writes = AtomicU64::new(0);
        disk.when(Fault::Fails(EIO), 1, move |seen| {
            is_write(seen) && writes.fetch_add(1, Ordering::SeqCst) == before
        });
        let keys = chain(before, 14);
        let pool = Pool::new(&client, "m", &[1 << 20]);
        assert_eq!(pool.put(&keys), [PutStatus::Stored; 14]);
        assert_eq!(disk.hits(), 1);
        assert_eq!(Pool::new(&owner, "m", &[1 << 20]).hits(&keys), 14);
        client.close().unwrap();
    }
    assert_eq!(owner.report().unwrap().puts_in_flight, 0);
}

#[test]
fn row_08_after_a_failed_sync_nothing_is_promised_before_it_is_read_back_and_rewritten() {
    let home = Home::with_store(SIZE);
    let (kept, shaken) = (chain(1, 40), chain(2, 40));
    let left;
    {
        let (store, disk) = open_faulty(&home, OpenOptions::default());
        let pool = Pool::new(&store, "m", &[65536]);
        assert_eq!(pool.put(&kept), [PutStatus::Stored; 40]);
        store.flush().unwrap();
        // Page by page, so that there are many writes to drop.
        for count in 1..=shaken.len() {
            assert!(
                pool.put(&shaken[..count])
                    .iter()
                    .all(|status| status.is_present())
            );
        }
        disk.when(Fault::Drops(EIO), 1, |seen| seen == Seen::Sync);
        assert!(matches!(store.flush(), Err(StoreError::SyncFailed)));
        assert_eq!(disk.hits(), 1);
        // The next sync would report success. It is not tried before all suspects have been written
        // again.
        let until = Instant::now() + Duration::from_secs(120);
        while store.flush().is_err() {
            assert!(Instant::now() < until, "{:?}", store.stats());
            std::thread::yield_now();
        }
        left = store.contains(pool.id, &shaken);
        let lost = left.iter().filter(|there| !**there).count() as u64;
        assert!(lost > 0, "the sync dropped nothing");
        assert_eq!(store.stats().damaged, lost);
        assert_eq!(store.longest_prefix(pool.id, &kept), 40);
    }
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    assert_eq!(pool.hits(&kept), 40);
    let hits: Vec<bool> = pool
        .get(&shaken)
        .iter()
        .map(|status| status.is_hit())
        .collect();
    assert_eq!(hits, left);
}

#[test]
fn row_09_without_space_reads_go_on_and_writes_are_refused_with_a_typed_error() {
    let home = Home::new();
    let free = rustix::fs::statvfs(home.directory.path()).unwrap();
    let size = free.f_bavail * free.f_frsize + (64 << 30);
    let options = CreateOptions::new(size);
    let error = create(&home.path, &options).err().unwrap();
    assert!(matches!(error, StoreError::NoSpace { .. }), "{error}");
    assert!(!home.path.exists());

    let home = Home::with_store(SIZE);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[65536]);
    let (there, new) = (chain(1, 8), chain(2, 8));
    assert_eq!(pool.put(&there), [PutStatus::Stored; 8]);
    disk.when(Fault::Fails(ENOSPC), usize::MAX, is_write);
    let statuses = pool.put_from(&new, 0, PutOptions::default());
    assert!(
        !statuses.iter().any(|status| status.is_present()),
        "{statuses:?}"
    );
    assert_eq!((pool.hits(&there), pool.hits(&new)), (8, 0));
    disk.clear_rules();
    eventually("puts are stored again", || {
        pool.put_from(&new, 0, PutOptions::default()) == [PutStatus::Stored; 8]
    });
    assert_eq!(pool.hits(&new), 8);
    assert_eq!(pool.hits(&there), 8);
    assert_eq!(store.stats().evicted, 0);
}

#[test]
fn row_10_a_read_that_ends_early_is_a_miss_and_ends() {
    let home = Home::with_store(SIZE);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    let keys = chain(1, 4);
    assert_eq!(pool.put(&keys), [PutStatus::Stored; 4]);
    // The volume is truncated in the middle of the third page, not even at a block.
    let file = std::fs::File::options()
        .write(true)
        .open(&home.path)
        .unwrap();
    file.set_len(find(&home.path, &keys[2]) + 20_000).unwrap();
    let cut = GetStatus::Miss(MissReason::ReadError);
    assert_eq!(pool.get(&keys), [GetStatus::Hit, GetStatus::Hit, cut, cut]);
}

#[test]
fn row_13_reclaim_that_finds_the_device_full_loses_nothing() {
    let home = Home::with_store(SIZE);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[MIB as u32]);
    // Full, so that every further put needs reclaim, and with pages worth copying in every segment.
    let warm = chain(0, 20);
    for seed in 1..12 {
        assert!(pool.put(&warm).iter().all(|status| status.is_present()));
        assert!(
            pool.put(&chain(seed, 12))
                .iter()
                .all(|status| status.is_present())
        );
    }
    assert!(store.stats().reclaimed > 0);
    let there: Vec<_> = (1..12)
        .flat_map(|seed| chain(seed, 12))
        .chain(warm.iter().copied())
        .collect();
    disk.when(Fault::Fails(ENOSPC), usize::MAX, is_write);
    let refused = pool.put_from(&chain(50, 40), 0, PutOptions::default());
    assert!(
        !refused.iter().any(|status| status.is_present()),
        "{refused:?}"
    );
    assert!(disk.hits() > 0);
    disk.clear_rules();
    // Every page is either readable or was evicted: the old copies count until the new ones do.
    let absent = GetStatus::Miss(MissReason::Absent);
    let statuses = pool.get(&there);
    let is_sound = |status: &GetStatus| status.is_hit() || *status == absent;
    assert!(statuses.iter().all(is_sound), "{statuses:?}");
    let new = chain(51, 12);
    eventually("puts are stored again", || {
        let statuses = pool.put_from(&new, 0, PutOptions::default());
        statuses.iter().all(|status| status.is_present())
    });
    assert_eq!(pool.hits(&new), 12);
    store.local().unwrap().check_invariants().unwrap();
    store.close().unwrap();
    let stats = store.stats();
    assert_eq!(stats.damaged, 0);
    assert_eq!(stats.pages, stats.pages_put - stats.evicted);
    drop(store);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[MIB as u32]);
    // Evicted pages may come back if there was no room to write a record of that. Kept pages are
    // there.
    assert!(store.stats().pages >= stats.pages);
    assert_eq!(pool.hits(&new), 12);
    assert!(pool.get(&there).iter().all(is_sound));
}

/// Puts and deletes chains of 12 MiB.
fn write_over(pool: &Pool<'_>, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let keys = chain(seed, 12);
        assert_eq!(pool.put(&keys), [PutStatus::Stored; 12]);
        assert_eq!(pool.store.delete(pool.id, &keys).unwrap(), 12);
    }
}

#[test]
fn row_22_a_segment_under_a_read_in_flight_is_not_written_again() {
    let home = Home::with_store(SIZE);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[MIB as u32]);
    let keys = chain(1, 2);
    assert_eq!(pool.put(&keys), [PutStatus::Stored; 2]);
    let at = find(&home.path, &keys[0]);
    disk.when(Fault::IsHeld, 1, is_read);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| pool.get(&keys[..1]));
        disk.wait_until_held();
        let _release = Release(&disk);
        // The page is deleted, and the store written over again and again.
        assert_eq!(store.delete(pool.id, &keys).unwrap(), 2);
        write_over(&pool, 2..20);
        assert!(
            store.stats().reclaimed > 7,
            "not every other segment was written again"
        );
        assert_eq!(find(&home.path, &keys[0]), at);
        disk.release();
        assert_eq!(reader.join().unwrap(), [GetStatus::Hit]);
    });
    assert_eq!(pool.get(&keys), [GetStatus::Miss(MissReason::Absent); 2]);
    // After it is unpinned, the segment is written again.
    write_over(&pool, 30..48);
    let first = super::read(&home.path, at, 64);
    let mut page = [0; 64];
    fill("m", &keys[0], 0, &mut page);
    assert_ne!(first, page);
    assert!(at < SEGMENTS_OFFSET + SEGMENT);
    store.local().unwrap().check_invariants().unwrap();
}
