//! Reads that fail for a while: row 29.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use larder_engine::format::{PageKey, SEGMENTS_OFFSET};
use larder_engine::{OpenOptions, PageStore, PutStatus, Store, StoreError};

use super::common::faulty::{Fault, Faulty, Seen, faulty, open_faulty, open_prepared};
use super::common::honest::eventually;
use super::common::{Home, MIB, Pool, chain};
use super::device::is_read;
use super::{SEGMENT, SIZE};

/// Errors of the medium, and of the path to it.
const MEDIUM: [i32; 1] = [libc::EIO];
const PATH: [i32; 2] = [libc::ETIMEDOUT, libc::ENODEV];

/// Pages of 1 MiB, a segment of them to a chain.
const CHAIN: usize = 15;

fn pool(store: &Store) -> Pool<'_> {
    Pool::new(store, "m", &[1 << 20])
}

/// A store on so many volumes whose segments are full of pages, but for three or four on each.
fn full(volumes: usize) -> (Home, Vec<PageKey>) {
    let home = Home::on_volumes(volumes, 2 * SIZE);
    let store = home.open();
    let keys: Vec<PageKey> = (0..11 * volumes as u64)
        .flat_map(|seed| chain(seed, CHAIN))
        .collect();
    for keys in keys.chunks(CHAIN) {
        assert_eq!(pool(&store).put(keys), [PutStatus::Stored; CHAIN]);
    }
    store.close().unwrap();
    (home, keys)
}

/// Whether a read touches descriptors: the last MiB of a segment.
fn is_of_descriptors(seen: Seen) -> bool {
    matches!(seen, Seen::Read { offset, bytes } if offset >= SEGMENTS_OFFSET
        && (offset - SEGMENTS_OFFSET + bytes as u64 - 1) % SEGMENT >= SEGMENT - MIB)
}

/// All keys are there, at once.
fn assert_whole(store: &Store, keys: &[PageKey], case: &str) {
    let stats = store.stats();
    assert_eq!((stats.evicted, stats.damaged), (0, 0), "{case}");
    let there = store.contains(pool(store).id, keys);
    let missing = there.iter().filter(|is_there| !**is_there).count();
    assert_eq!(missing, 0, "{case}");
}

#[test]
fn row_29_a_read_of_an_open_that_fails_and_later_succeeds_costs_nothing() {
    for volumes in [1, 2] {
        let (home, keys) = full(volumes);
        let reads = {
            let reads = Arc::new(AtomicUsize::new(0));
            let counted = reads.clone();
            let (store, _) = open_prepared(&home, OpenOptions::default(), move |disk| {
                let counted = counted.clone();
                disk.when_on(Fault::Fails(libc::EIO), 1, move |_, seen| {
                    counted.fetch_add(usize::from(is_read(seen)), Ordering::Relaxed);
                    false
                });
            });
            store.close().unwrap();
            reads.load(Ordering::Relaxed)
        };
        assert!(reads > 10, "{reads} reads");
        for errno in MEDIUM.into_iter().chain(PATH) {
            // Three reads from each one on: the first and further tries, or its neighbours.
            for first in (0..reads).step_by(3) {
                let (store, disk) = open_prepared(&home, OpenOptions::default(), move |disk| {
                    let count = AtomicUsize::new(0);
                    disk.when(Fault::Fails(errno), 3, move |seen| {
                        is_read(seen) && count.fetch_add(1, Ordering::Relaxed) >= first
                    });
                });
                let case = format!("error {errno} from read {first} of {reads} on");
                assert!(disk.hits() > 0, "{case}");
                assert_eq!(store.stats().unreadable_segments, 0, "{case}");
                assert_whole(&store, &keys, &case);
                store.close().unwrap();
            }
        }
        let store = home.open();
        assert_eq!(pool(&store).hits(&keys), keys.len());
    }
}

#[test]
fn row_29_an_error_of_the_path_that_stays_refuses_the_open_and_nothing_is_written() {
    let (home, keys) = full(1);
    let before = std::fs::read(&home.path).unwrap();
    for errno in PATH {
        let (wrapper, made) = faulty(&home, move |disk| {
            disk.when(Fault::Fails(errno), usize::MAX, is_of_descriptors);
        });
        let options = OpenOptions::default().with(|o| o.disk_wrapper = Some(wrapper));
        let error = Store::open(&home.path, options).err().unwrap();
        assert!(matches!(error, StoreError::NotRead { .. }), "{error}");
        let disk = made.lock().unwrap().clone().unwrap();
        assert!(disk.hits() > 3, "tried again");
        assert!(std::fs::read(&home.path).unwrap() == before, "{errno}");
    }
    let store = home.open();
    assert_whole(&store, &keys, "afterwards");
    assert_eq!(pool(&store).hits(&keys), keys.len());
}

/// Segments of a volume whose descriptors a disk cannot read: four with pages, and four that were
/// never written.
const UNREAD: std::ops::Range<u64> = 7..15;
const UNREAD_FULL: usize = 4;

/// A disk that cannot read these segments.
fn half_unreadable(disk: &Faulty) {
    disk.when(Fault::Fails(libc::EIO), usize::MAX, |seen| {
        let Seen::Read { offset, .. } = seen else {
            return false;
        };
        let segment = offset.saturating_sub(SEGMENTS_OFFSET) / SEGMENT;
        is_of_descriptors(seen) && UNREAD.contains(&segment)
    });
}

#[test]
fn row_29_unreadable_segments_cost_no_other_page_before_a_put_needs_the_room() {
    for volumes in [1, 2] {
        let (home, keys) = full(volumes);
        {
            let (store, _) = open_prepared(&home, OpenOptions::default(), half_unreadable);
            let stats = store.stats();
            assert_eq!(stats.unreadable_segments, 8 * volumes as u64);
            // More than the room that is left for pages.
            assert!(stats.taken_bytes > stats.usable_bytes, "{stats:?}");
            let unread = UNREAD_FULL * CHAIN * volumes;
            assert_eq!(pool(&store).hits(&keys), keys.len() - unread);
            assert_eq!(store.stats().evicted, 0);
            store.close().unwrap();
        }
        {
            let store = home.open();
            assert_whole(&store, &keys, "readable again");
            store.close().unwrap();
        }
        let evicted = {
            let (store, _) = open_prepared(&home, OpenOptions::default(), half_unreadable);
            let new = chain(1000, 2);
            assert_eq!(pool(&store).put(&new), [PutStatus::Stored; 2]);
            let evicted = store.stats().evicted;
            assert!(evicted > 0, "a put needed their room");
            store.close().unwrap();
            evicted
        };
        let store = home.open();
        let there = store.contains(pool(&store).id, &keys);
        let missing = there.iter().filter(|is_there| !**is_there).count();
        assert_eq!(missing as u64, evicted, "each page that left is counted");
    }
}

/// Puts pages until the free segments are used up, without reaching the limit.
fn make_room_scarce(pool: &Pool<'_>) -> Vec<PageKey> {
    let keys: Vec<PageKey> = (100..104).flat_map(|seed| chain(seed, CHAIN)).collect();
    for keys in keys.chunks(CHAIN) {
        assert_eq!(pool.put(keys), [PutStatus::Stored; CHAIN]);
    }
    keys
}

#[test]
fn row_29_a_read_of_reclaim_that_fails_and_later_succeeds_costs_no_page() {
    for errno in MEDIUM.into_iter().chain(PATH) {
        let home = Home::with_store(2 * SIZE);
        let (store, disk) = open_faulty(&home, OpenOptions::default());
        let pool = pool(&store);
        let chains: Vec<Vec<PageKey>> = (0..11).map(|seed| chain(seed, CHAIN)).collect();
        for keys in &chains {
            assert_eq!(pool.put(keys), [PutStatus::Stored; CHAIN]);
        }
        let (dead, kept): (Vec<_>, Vec<_>) =
            { chains.iter().flatten() }.partition(|key| key.as_bytes()[0] % 2 == 0);
        store.delete(pool.id, &dead).unwrap();
        // From here on no call reads before the check: the reads are those of reclaim.
        disk.when(Fault::Fails(errno), 7, is_read);
        let kept_too = make_room_scarce(&pool);
        eventually("pages are moved", || store.stats().moved >= 14);
        assert_eq!(disk.hits(), 7);
        let found = pool.hits(&kept) + pool.hits(&kept_too);
        let stats = store.stats();
        assert_eq!(stats.damaged, 0, "{errno}");
        assert_eq!(found as u64, stats.pages, "{errno}");
        let all = (kept.len() + kept_too.len()) as u64;
        assert_eq!(stats.pages, all - stats.evicted, "{errno}");
    }
}
