//! Volumes that refuse writes for a while: rows 7 and 9.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use larder_engine::format::{PageKey, SEGMENTS_OFFSET};
use larder_engine::{
    OpenOptions, PageStore, PutFailure, PutOptions, PutStatus, Refusal, Store, StoreError,
};
use larder_offline::compact_beside;
use larder_offline::survey::{Survey, SurveyOptions};
use larder_store::share::Inside;

use super::common::faulty::{Fault, Seen, open_faulty};
use super::common::honest::{PATIENCE, eventually};
use super::common::{Home, MIB, Pool, chain};
use super::device::attach_faulty;
use super::{SEGMENT, SIZE};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;

const PAGE: u32 = 1 << 20;
const CHAIN: usize = 12;
const REFUSED: PutStatus = PutStatus::Refused(Refusal::ReadOnlyService);

/// Fills the store several times over and flushes it. Returns the pages that it keeps.
fn full(pool: &Pool<'_>) -> Vec<PageKey> {
    let chains: Vec<Vec<PageKey>> = (0..40).map(|seed| chain(seed, CHAIN)).collect();
    for keys in &chains {
        assert_eq!(pool.put(keys), [PutStatus::Stored; CHAIN]);
    }
    pool.store.flush().unwrap();
    assert!(pool.store.stats().evicted > 0);
    let keys = chains.concat();
    let kept = pool.store.contains(pool.id, &keys);
    let kept = keys.into_iter().zip(kept).filter(|(_, is_kept)| *is_kept);
    kept.map(|(key, _)| key).collect()
}

fn is_write(seen: Seen) -> bool {
    matches!(seen, Seen::Write { .. })
}

/// Puts until one call is refused because of the volume. Puts that the refusal overtook fail.
fn put_until_refused(pool: &Pool<'_>, from: u64) -> u64 {
    let failed = PutStatus::Failed(PutFailure::Write);
    let until = Instant::now() + PATIENCE;
    for seed in from.. {
        let statuses = pool.put_from(&chain(seed, CHAIN), 0, PutOptions::default());
        assert!(
            statuses.iter().all(|status| !status.is_present()),
            "{statuses:?}"
        );
        if statuses.contains(&REFUSED) {
            return seed + 1;
        }
        let is_known = |status: &PutStatus| {
            *status == failed || *status == PutStatus::Refused(Refusal::NoSpace)
        };
        assert!(statuses.iter().all(is_known), "{statuses:?}");
        assert!(Instant::now() < until, "the volume is never given up");
    }
    unreachable!()
}

fn put_until_stored(pool: &Pool<'_>, seed: u64) {
    eventually("puts are stored again", || {
        let statuses = pool.put_from(&chain(seed, CHAIN), 0, PutOptions::default());
        statuses.iter().all(|status| status.is_present())
    });
}

#[test]
fn row_07_a_volume_that_refuses_every_write_loses_no_page_and_puts_resume_by_themselves() {
    refuse_under_load(EIO, is_write);
}

#[test]
fn row_09_a_file_system_that_becomes_read_only_costs_no_page_and_no_capacity() {
    refuse_under_load(EROFS, |seen| is_write(seen) || seen == Seen::Sync);
}

#[test]
fn row_09_a_full_volume_costs_no_page_and_no_capacity() {
    refuse_under_load(ENOSPC, is_write);
}

fn refuse_under_load(errno: i32, refuses: fn(Seen) -> bool) {
    let home = Home::with_store(SIZE);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[PAGE]);
    let kept = full(&pool);
    let before = store.stats();
    disk.when(Fault::Fails(errno), usize::MAX, refuses);
    // The first call evicted pages before its writes were refused.
    let next = put_until_refused(&pool, 100);
    let gone = store.stats().evicted - before.evicted;
    assert!(
        gone <= CHAIN as u64,
        "{gone} pages were evicted for {CHAIN}"
    );
    let there = store.contains(pool.id, &kept);
    let there: Vec<PageKey> = kept
        .iter()
        .zip(there)
        .filter(|(_, is)| *is)
        .map(|(key, _)| *key)
        .collect();
    assert_eq!(there.len() as u64, kept.len() as u64 - gone);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let pool = &pool;
            scope.spawn(move || {
                for seed in next + 100 * thread..next + 100 * thread + 50 {
                    let statuses = pool.put_from(&chain(seed, CHAIN), 0, PutOptions::default());
                    assert_eq!(statuses, [REFUSED; CHAIN]);
                }
            });
        }
        assert_eq!(pool.hits(&there), there.len());
    });
    let stats = store.stats();
    assert_eq!(pool.hits(&there), there.len());
    assert_eq!(stats.evicted, before.evicted + gone);
    assert_eq!(stats.usable_bytes, before.usable_bytes);
    assert!(stats.refused_read_only >= 200 * CHAIN as u64);
    let [volume] = &stats.read_only_volumes[..] else {
        panic!("{:?}", stats.read_only_volumes);
    };
    assert_eq!(volume.path, home.path);
    assert!(
        volume.reason.contains(&format!("(os error {errno})")),
        "{volume:?}"
    );
    assert_eq!(
        store.put_is_duplicate(&pool, &there[..1]),
        PutStatus::Duplicate
    );
    store.local().unwrap().check_invariants().unwrap();
    disk.clear_rules();
    put_until_stored(&pool, 1000);
    let stats = store.stats();
    assert!(stats.read_only_volumes.is_empty());
    assert_eq!(stats.usable_bytes, before.usable_bytes);
    eventually("a flush is good", || store.flush().is_ok());
    store.local().unwrap().check_invariants().unwrap();
    store.close().unwrap();
    assert_eq!(store.stats().damaged, 0);
    drop(store);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[PAGE]);
    assert_eq!(pool.hits(&chain(1000, CHAIN)), CHAIN);
    let left = store
        .contains(pool.id, &there)
        .iter()
        .filter(|is| **is)
        .count();
    // Its own pages made way for the new chain.
    assert!(left + 2 * CHAIN >= there.len(), "{left} of {}", there.len());
}

trait Again {
    fn put_is_duplicate(&self, pool: &Pool<'_>, keys: &[PageKey]) -> PutStatus;
}

impl Again for Store {
    fn put_is_duplicate(&self, pool: &Pool<'_>, keys: &[PageKey]) -> PutStatus {
        pool.put_heads(keys, PutOptions::default())[0]
    }
}

/// A sparse copy on a full file system: only blocks that were ever written can be written.
#[test]
fn row_09_holes_that_cannot_be_filled_cost_no_page_and_no_capacity() {
    let home = Home::with_store(2 * SIZE);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[PAGE]);
    let there: Vec<PageKey> = (0..8).flat_map(|seed| chain(seed, CHAIN)).collect();
    for keys in there.chunks(CHAIN) {
        assert_eq!(pool.put(keys), [PutStatus::Stored; CHAIN]);
    }
    store.flush().unwrap();
    let usable = store.stats().usable_bytes;
    let hole = SEGMENTS_OFFSET + 7 * SEGMENT;
    disk.when(
        Fault::Fails(ENOSPC),
        usize::MAX,
        move |seen| matches!(seen, Seen::Write { offset, bytes } if offset + bytes as u64 > hole),
    );
    let mut next = 100;
    let until = Instant::now() + PATIENCE;
    while store.stats().refused_read_only < 20 * CHAIN as u64 {
        pool.put_from(&chain(next, CHAIN), 0, PutOptions::default());
        next += 1;
        assert!(Instant::now() < until, "{:?}", store.stats());
    }
    let stats = store.stats();
    assert_eq!((stats.evicted, stats.usable_bytes), (0, usable));
    assert_eq!(pool.hits(&there), there.len());
    disk.clear_rules();
    put_until_stored(&pool, 1000);
    assert_eq!(pool.hits(&there), there.len());
    store.local().unwrap().check_invariants().unwrap();
    store.close().unwrap();
    drop(store);
    let survey = Survey::new(&home.path, &SurveyOptions::default()).unwrap();
    assert!(survey.flaws.is_empty(), "{:?}", survey.flaws);
}

#[test]
fn row_09_clients_and_deletions_are_refused_with_the_reason() {
    let home = Home::with_store(SIZE);
    let (owner, disk) = attach_faulty(&home);
    let client = Store::attach(&home.path, OpenOptions::default()).unwrap();
    let pool = Pool::new(&client, "m", &[PAGE]);
    let there = chain(1, CHAIN);
    assert_eq!(pool.put(&there), [PutStatus::Stored; CHAIN]);
    disk.when(Fault::Fails(EROFS), usize::MAX, is_write);
    put_until_refused(&pool, 10);
    let report = client.report().unwrap();
    assert_eq!(report.stats.read_only_volumes.len(), 1);
    assert!(report.stats.puts_refused_read_only > 0);
    assert!(client.stats().refused_read_only > 0);
    for store in [&owner, &client] {
        let pool = Pool::new(store, "m", &[PAGE]);
        let error = store.delete(pool.id, &chain(2, 1)).err().unwrap();
        assert!(matches!(error, StoreError::ReadOnlyService), "{error}");
        assert_eq!(pool.hits(&there), CHAIN);
    }
    disk.clear_rules();
    put_until_stored(&pool, 1000);
    assert_eq!(client.delete(pool.id, &there).unwrap(), CHAIN as u64);
    client.close().unwrap();
    owner.close().unwrap();
}

/// A store is closed, and its process killed, while its volume refuses writes.
#[test]
fn row_07_a_close_on_a_volume_that_refuses_writes_ends_and_costs_no_page() {
    for closes in [true, false] {
        let home = Home::with_store(SIZE);
        let (store, disk) = open_faulty(&home, OpenOptions::default());
        let pool = Pool::new(&store, "m", &[PAGE]);
        let kept = full(&pool);
        disk.when(Fault::Fails(EIO), usize::MAX, |seen| {
            is_write(seen) || seen == Seen::Sync
        });
        put_until_refused(&pool, 100);
        let there = store.contains(pool.id, &kept);
        if closes {
            let begun = Instant::now();
            // Whether it succeeds depends on the device.
            let _ = store.close();
            assert!(begun.elapsed() < Duration::from_secs(60));
        }
        drop(store);
        let store = home.open();
        let pool = Pool::new(&store, "m", &[PAGE]);
        let there = kept.iter().zip(there).filter(|(_, is)| *is);
        let there: Vec<PageKey> = there.map(|(key, _)| *key).collect();
        assert_eq!(pool.hits(&there), there.len());
        assert!(there.len() as u64 * MIB > store.stats().usable_bytes / 2);
    }
}

/// The pages of several chains in turns: each chain lies in many pieces.
fn put_in_turns(pool: &Pool<'_>, chains: &[Vec<PageKey>]) {
    for page in 0..chains[0].len() {
        for keys in chains {
            let statuses = pool.put_from(&keys[..=page], page, PutOptions::default());
            assert_eq!(statuses, [PutStatus::Stored]);
        }
    }
}

#[test]
fn row_07_a_compaction_beside_an_owner_that_cannot_write_ends_and_costs_no_page() {
    let home = Home::with_store(SIZE);
    let (store, disk) = attach_faulty(&home);
    let pool = Pool::new(&store, "m", &[64 << 10]);
    let chains: Vec<Vec<PageKey>> = (0..8).map(|seed| chain(seed, 60)).collect();
    put_in_turns(&pool, &chains);
    store.flush().unwrap();
    let compact = || {
        let survey = Survey::new(&home.path, &SurveyOptions::default()).unwrap();
        let mut progress = |_, _| ControlFlow::Continue(());
        compact_beside(&home.path, &survey, false, &mut progress)
    };
    disk.when(Fault::Fails(EIO), usize::MAX, is_write);
    // Its last flush fails if writes are left that do not succeed.
    if let Ok(done) = compact() {
        assert!(done.left_pages > 0, "{done:?}");
    }
    assert_eq!(pool.hits(&chains.concat()), 480);
    store.local().unwrap().check_invariants().unwrap();
    disk.clear_rules();
    put_until_stored(&pool, 1000);
    eventually("the store is compacted", || {
        compact().is_ok_and(|done| done.left_pages == 0)
    });
    assert_eq!(pool.hits(&chains.concat()), 480);
    assert!(store.stats().moved > 0);
    store.local().unwrap().check_invariants().unwrap();
    store.close().unwrap();
}
