//! The store through its public interface, on real files.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{IoSlice, IoSliceMut};
use std::time::{Duration, Instant};

use common::honest::eventually;
use common::{Home, MIB, Pool, chain};
use larder_disk::probe::Want;
use larder_engine::{
    CreateOptions, GetPage, GetStatus, Hint, HolderState, LatencySummary, MissReason, OpenOptions,
    PageStore, PutOptions, PutPage, PutStatus, Refusal, Stats, Store, StoreError, SyncPolicy,
    create,
};
use larder_store::share::Inside;

#[test]
fn pages_come_back_bit_exact_before_and_after_a_reopen() {
    let home = Home::with_store(256 * MIB);
    for parts in [
        &[65536_u32][..],
        &[65536, 65536],
        &[5000, 70272],
        &[1],
        &[4 << 20, 4 << 20],
    ] {
        let model = format!("{parts:?}");
        let keys = chain(1, 9);
        {
            let store = home.open();
            let pool = Pool::new(&store, &model, parts);
            assert_eq!(pool.put(&keys), vec![PutStatus::Stored; 9]);
            assert_eq!(pool.put(&keys), vec![PutStatus::Duplicate; 9]);
            assert_eq!(store.longest_prefix(pool.id, &keys), 9);
            assert_eq!(pool.get(&keys), vec![GetStatus::Hit; 9]);
            store.local().unwrap().check_invariants().unwrap();
            store.close().unwrap();
        }
        let store = home.open();
        let pool = Pool::new(&store, &model, parts);
        assert_eq!(store.longest_prefix(pool.id, &keys), 9);
        assert_eq!(pool.get(&keys), vec![GetStatus::Hit; 9]);
        assert_eq!(
            pool.get(&chain(2, 1)),
            vec![GetStatus::Miss(MissReason::Absent)]
        );
        // Not closed: the next round recovers as after a crash.
    }
}

/// Runs `work` in a child process that is killed (SIGKILL, by itself) at the end, so that nothing
/// is closed or dropped.
fn in_a_process_that_dies(test: &str, work: impl FnOnce()) {
    const MARK: &str = "LARDER_TEST_DIES";
    if std::env::var(MARK).as_deref() == Ok(test) {
        work();
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
            .unwrap();
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env(MARK, test);
    let output = child.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
    assert_eq!(signal, Some(9), "{errors}");
}

/// The home of a test that runs in two processes: made by the first, found by the second.
fn shared_home(name: &str, size: u64) -> (std::path::PathBuf, bool) {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let is_child = std::env::var("LARDER_TEST_DIES").is_ok();
    if !is_child {
        let _ = std::fs::remove_file(&path);
        let options = CreateOptions::new(size).with(|o| {
            o.segment_size = Some(16 * MIB);
        });
        create(&path, &options).unwrap();
    }
    (path, is_child)
}

#[test]
fn puts_and_deletions_survive_sigkill() {
    let (path, _) = shared_home("sigkill-store", 256 * MIB);
    let (kept, deleted, cleared) = (chain(1, 40), chain(2, 40), chain(3, 40));
    in_a_process_that_dies("puts_and_deletions_survive_sigkill", || {
        let store = Store::open(&path, OpenOptions::default()).unwrap();
        let pool = Pool::new(&store, "m", &[65536, 4096]);
        let other = Pool::new(&store, "other", &[65536, 4096]);
        for (pool, keys) in [(&pool, &kept), (&pool, &deleted), (&other, &cleared)] {
            assert!(
                pool.put(keys)
                    .iter()
                    .all(|status| *status == PutStatus::Stored)
            );
        }
        assert_eq!(store.delete(pool.id, &deleted[20..]).unwrap(), 20);
        assert_eq!(store.clear_namespace(other.id).unwrap(), 40);
        // A page put again after its deletion is a new one.
        assert_eq!(
            pool.put_from(&deleted[..21], 20, PutOptions::default()),
            [PutStatus::Stored]
        );
    });
    let store = Store::open(&path, OpenOptions::default()).unwrap();
    let pool = Pool::new(&store, "m", &[65536, 4096]);
    let other = Pool::new(&store, "other", &[65536, 4096]);
    assert_eq!(pool.hits(&kept), 40);
    assert_eq!(pool.hits(&deleted), 21);
    assert_eq!(store.longest_prefix(pool.id, &deleted), 21);
    assert_eq!(other.hits(&cleared), 0);
    assert_eq!(store.stats().wrong_or_lost(), 0);
    store.local().unwrap().check_invariants().unwrap();
    drop(store);
    std::fs::remove_file(&path).unwrap();
}

trait WrongOrLost {
    fn wrong_or_lost(&self) -> u64;
}

impl WrongOrLost for Stats {
    fn wrong_or_lost(&self) -> u64 {
        self.damaged + self.unfinished + self.failed
    }
}

#[test]
fn namespaces_never_read_each_others_bytes_under_equal_keys() {
    let home = Home::with_store(256 * MIB);
    let store = home.open();
    let keys = chain(1, 16);
    // Sizes alike, sizes not alike.
    let pools: Vec<Pool<'_>> = [
        ("a", &[8192_u32][..]),
        ("b", &[8192]),
        ("c", &[4096, 4096]),
        ("d", &[100_000]),
    ]
    .into_iter()
    .map(|(model, parts)| Pool::new(&store, model, parts))
    .collect();
    assert_eq!(pools[0].put(&keys), vec![PutStatus::Stored; 16]);
    for other in &pools[1..] {
        assert_eq!(store.longest_prefix(other.id, &keys), 0);
        assert_eq!(other.hits(&keys), 0);
    }
    for other in &pools[1..] {
        assert_eq!(other.put(&keys), vec![PutStatus::Stored; 16]);
    }
    // `get` of a pool compares with its own model's bytes.
    for pool in &pools {
        assert_eq!(pool.hits(&keys), 16);
    }
    assert_eq!(store.clear_namespace(pools[1].id).unwrap(), 16);
    assert_eq!(pools[1].hits(&keys), 0);
    assert_eq!(
        pools[0].hits(&keys) + pools[2].hits(&keys) + pools[3].hits(&keys),
        48
    );
    let mut known: Vec<String> = store
        .namespaces()
        .iter()
        .map(|n| n.fields().model.clone())
        .collect();
    known.sort();
    assert_eq!(known, ["a", "b", "c", "d"]);
}

#[test]
fn pages_of_the_wrong_shape_are_refused_and_their_neighbours_are_not() {
    let home = Home::with_store(128 * MIB);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[8192]);
    let keys = chain(1, 2);
    let (good, bad) = (vec![1_u8; 8192], vec![1_u8; 8191]);
    let parts = [[IoSlice::new(&bad)], [IoSlice::new(&good)]];
    let pages: Vec<PutPage<'_>> = (0..2)
        .map(|at| PutPage {
            key: keys[at],
            parent: None,
            depth: 0,
            parts: &parts[at],
        })
        .collect();
    let statuses = store.put(pool.id, &pages, PutOptions::default());
    assert_eq!(
        statuses,
        [PutStatus::Refused(Refusal::WrongShape), PutStatus::Stored]
    );
    let mut short = vec![0_u8; 4096];
    let mut parts = [IoSliceMut::new(&mut short)];
    let mut pages = [GetPage {
        key: keys[1],
        parts: &mut parts,
    }];
    assert_eq!(
        store.get(pool.id, &mut pages, None),
        [GetStatus::Miss(MissReason::WrongShape)]
    );
}

#[test]
fn memory_that_is_not_aligned_goes_through_a_copy_and_comes_back_right() {
    let home = Home::with_store(128 * MIB);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[8192, 8192]);
    let key = chain(1, 1)[0];
    let mut memory = vec![0_u8; 4 * 8192];
    let odd = 4096 - memory.as_ptr() as usize % 4096 + 1;
    for (at, byte) in memory.iter_mut().enumerate() {
        *byte = (at % 251) as u8;
    }
    let parts = [
        IoSlice::new(&memory[odd..odd + 8192]),
        IoSlice::new(&memory[odd + 8192..odd + 16384]),
    ];
    let page = PutPage {
        key,
        parent: None,
        depth: 0,
        parts: &parts,
    };
    assert_eq!(
        store.put(pool.id, &[page], PutOptions::default()),
        [PutStatus::Stored]
    );
    let mut back = vec![0_u8; 4 * 8192];
    let from = 4096 - back.as_ptr() as usize % 4096 + 3;
    let (first, second) = back[from..from + 16384].split_at_mut(8192);
    let mut parts = [IoSliceMut::new(first), IoSliceMut::new(second)];
    let mut pages = [GetPage {
        key,
        parts: &mut parts,
    }];
    assert_eq!(store.get(pool.id, &mut pages, None), [GetStatus::Hit]);
    assert_eq!(back[from..from + 16384], memory[odd..odd + 16384]);
    let stats = store.stats();
    assert_eq!((stats.direct_pages, stats.bounced_pages), (0, 2));
}

#[test]
fn a_deadline_that_has_passed_starts_no_read() {
    let home = Home::with_store(128 * MIB);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    let keys = chain(1, 8);
    pool.put(&keys);
    let mut memory = vec![[0_u8; 65536]; 8];
    let mut parts: Vec<[IoSliceMut<'_>; 1]> =
        memory.iter_mut().map(|m| [IoSliceMut::new(m)]).collect();
    let mut pages: Vec<GetPage<'_, '_>> = keys
        .iter()
        .zip(&mut parts)
        .map(|(key, parts)| GetPage { key: *key, parts })
        .collect();
    let now = Instant::now();
    let statuses = store.get(pool.id, &mut pages, Some(now));
    assert_eq!(statuses, vec![GetStatus::Miss(MissReason::Deadline); 8]);
    // A missed deadline is no damage.
    assert_eq!(pool.hits(&keys), 8);
}

#[test]
fn pages_that_are_neighbours_on_disk_are_read_together_up_to_a_mebibyte() {
    let home = Home::with_store(128 * MIB);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[4096]);
    let keys = chain(1, 512);
    pool.put(&keys);
    for (pages, expected) in [(1, 1), (256, 1), (257, 2), (512, 2)] {
        let reads = || store.stats().device_read_latency.count;
        let before = reads();
        assert_eq!(pool.hits(&keys[..pages]), pages);
        assert_eq!(reads() - before, expected, "{pages} pages");
    }
}

#[test]
fn a_leased_page_outlives_colder_and_warmer_ones_until_the_lease_lapses() {
    let home = Home::with_store(256 * MIB);
    let lease = Duration::from_secs(3600);
    let store = home.open_with(OpenOptions::default().with(|o| o.lease = lease));
    let pool = Pool::new(&store, "m", &[65536]);
    let leased = chain(1, 32);
    pool.put(&leased);
    assert_eq!(store.longest_prefix(pool.id, &leased), 32);
    for seed in 2..200 {
        pool.put(&chain(seed, 32));
    }
    assert!(store.stats().evicted > 0);
    assert_eq!(pool.hits(&leased), 32, "a leased page was evicted");
    // The lease was for this read: now the pages age like all others.
    for seed in 200..400 {
        pool.put(&chain(seed, 32));
    }
    assert_eq!(pool.hits(&leased), 0);
}

#[test]
fn a_flipped_byte_is_a_miss_once_and_the_next_put_repairs_it() {
    let home = Home::with_store(128 * MIB);
    let keys = chain(1, 4);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    pool.put(&keys);
    // The first segment begins at 1 MiB; its first page is behind two header blocks.
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&home.path)
        .unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"?", MIB + 2 * 4096 + 65536 + 77).unwrap();
    file.sync_all().unwrap();
    let damaged = GetStatus::Miss(MissReason::Damaged);
    assert_eq!(
        pool.get(&keys),
        [GetStatus::Hit, damaged, GetStatus::Hit, GetStatus::Hit]
    );
    assert_eq!(pool.get(&keys[1..2]), [GetStatus::Miss(MissReason::Absent)]);
    assert_eq!(store.longest_prefix(pool.id, &keys), 1);
    assert_eq!(store.stats().damaged, 1);
    let statuses = pool.put(&keys);
    assert_eq!(
        statuses
            .iter()
            .filter(|status| **status == PutStatus::Stored)
            .count(),
        1
    );
    assert_eq!(store.longest_prefix(pool.id, &keys), 4);
    assert_eq!(pool.hits(&keys), 4);
    store.local().unwrap().check_invariants().unwrap();
}

#[test]
fn several_volumes_share_the_pages_and_come_back_together() {
    let home = Home::new();
    let second = home.directory.path().join("second");
    let options = CreateOptions::new(512 * MIB).with(|o| {
        o.segment_size = Some(16 * MIB);
        o.volumes = vec![second.clone()];
    });
    create(&home.path, &options).unwrap();
    {
        let store = home.open();
        let pool = Pool::new(&store, "m", &[1 << 20]);
        for seed in 0..30 {
            assert!(
                pool.put(&chain(seed, 32))
                    .iter()
                    .all(|status| status.is_present())
            );
        }
        assert_eq!(pool.hits(&chain(29, 32)), 32);
        store.local().unwrap().check_invariants().unwrap();
        store.close().unwrap();
    }
    let store = home.open();
    let pool = Pool::new(&store, "m", &[1 << 20]);
    assert_eq!(pool.hits(&chain(29, 32)), 32);
    drop(store);
    // Both are locked together, both are needed, and neither can replace the other.
    let moved = home.directory.path().join("moved");
    std::fs::rename(&second, &moved).unwrap();
    let missing = Store::open(&home.path, OpenOptions::default())
        .err()
        .unwrap();
    assert!(
        matches!(missing, StoreError::VolumeMissing { index: 1, .. }),
        "{missing}"
    );
    let wrong = Store::open(&moved, OpenOptions::default()).err().unwrap();
    assert!(matches!(wrong, StoreError::NotFirstVolume(..)), "{wrong}");
    let found = OpenOptions::default().with(|o| o.volumes = vec![moved.clone()]);
    let all = |pool: &Pool<'_>| -> usize { (0..30).map(|seed| pool.hits(&chain(seed, 32))).sum() };
    let store = home.open_with(found);
    let pool = Pool::new(&store, "m", &[1 << 20]);
    assert_eq!(pool.hits(&chain(29, 32)), 32);
    let whole = all(&pool);
    drop(store);
    // A volume that was found once is found again, and all are when they move together.
    drop(home.open());
    let away = home.directory.path().join("away");
    std::fs::create_dir(&away).unwrap();
    for name in ["store", "moved"] {
        let path = home.directory.path().join(name);
        std::fs::rename(path, away.join(name)).unwrap();
    }
    let home = Home {
        path: away.join("store"),
        ..home
    };
    let store = home.open();
    assert_eq!(all(&Pool::new(&store, "m", &[1 << 20])), whole);
    drop(store);
    let moved = away.join("out of sight");
    std::fs::rename(away.join("moved"), &moved).unwrap();
    // Once given up, its pages are misses, and it never comes back.
    let store = home.open_with(OpenOptions::default().with(|o| o.degraded = true));
    let pool = Pool::new(&store, "m", &[1 << 20]);
    let left = all(&pool);
    assert!(left < whole);
    assert!(
        pool.put(&chain(29, 32))
            .iter()
            .all(|status| status.is_present())
    );
    assert_eq!(pool.hits(&chain(29, 32)), 32);
    store.local().unwrap().check_invariants().unwrap();
    store.close().unwrap();
    let named = OpenOptions::default().with(|o| o.volumes = vec![moved]);
    let refused = Store::open(&home.path, named).err().unwrap();
    assert!(refused.to_string().contains("given up"), "{refused}");
    let store = home.open();
    assert_eq!(Pool::new(&store, "m", &[1 << 20]).hits(&chain(29, 32)), 32);
}

#[test]
fn a_second_opener_gets_the_holders_name_and_a_reader_is_admitted() {
    let home = Home::with_store(256 * MIB);
    let keys = chain(1, 200);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[131_072]);
    pool.put(&keys);
    store.flush().unwrap();
    let locked = Store::open(&home.path, OpenOptions::default())
        .err()
        .unwrap();
    let StoreError::Locked { holder, .. } = locked else {
        panic!("{locked}")
    };
    let found = (holder.pid, holder.state);
    assert_eq!(found, (std::process::id(), HolderState::Running));
    // 25 MiB: one segment is sealed and proven, the other still open.
    let reader = home.open_with(OpenOptions::default().with(|o| o.read_only = true));
    let seen = Pool::new(&reader, "m", &[131_072]);
    let hits = seen.hits(&keys);
    assert!(hits > 0 && hits < 200, "{hits}");
    assert_eq!(
        seen.put(&keys[..1]),
        [PutStatus::Refused(Refusal::ReadOnly)]
    );
    assert!(matches!(
        reader.delete(seen.id, &keys),
        Err(StoreError::ReadOnly)
    ));
    // The writer goes on until every segment has been written again: the reader's knowledge is
    // stale, never wrong.
    for seed in 2..40 {
        pool.put(&chain(seed, 200));
    }
    assert_eq!(seen.hits(&keys), 0);
    drop(reader);
    store.close().unwrap();
    assert!(matches!(store.flush(), Err(StoreError::Closed)));
    assert_eq!(pool.put(&keys[..1]), [PutStatus::Refused(Refusal::Closed)]);
    assert_eq!(pool.get(&keys[..1]), [GetStatus::Miss(MissReason::Closed)]);
}

#[test]
fn every_sync_policy_and_both_disks_store_and_return_the_same() {
    for disk in [Want::Auto, Want::Threads] {
        for sync in [
            SyncPolicy::Relaxed,
            SyncPolicy::Interval(Duration::from_millis(1)),
            SyncPolicy::Always,
        ] {
            let home = Home::with_store(256 * MIB);
            let store = home.open_with(OpenOptions::default().with(|o| {
                o.disk = disk;
                o.sync = sync;
            }));
            let pool = Pool::new(&store, "m", &[65536]);
            for seed in 0..60 {
                let keys = chain(seed, 64);
                assert!(
                    pool.put(&keys)
                        .iter()
                        .all(|status| *status == PutStatus::Stored)
                );
                assert!(
                    pool.put(&keys)
                        .iter()
                        .all(|status| *status == PutStatus::Duplicate)
                );
            }
            store.flush().unwrap();
            assert_eq!(pool.hits(&chain(59, 64)), 64);
            assert!(store.stats().syncs > 0);
            store.close().unwrap();
            let store = home.open();
            assert_eq!(Pool::new(&store, "m", &[65536]).hits(&chain(59, 64)), 64);
        }
    }
}

/// No other call comes meanwhile: counters do not advance the store.
#[test]
fn a_page_is_synced_in_time_without_another_call() {
    let home = Home::with_store(128 * MIB);
    let interval = SyncPolicy::Interval(Duration::from_millis(50));
    let store = home.open_with(OpenOptions::default().with(|o| o.sync = interval));
    let before = store.stats().syncs;
    let status = Pool::new(&store, "m", &[65536]).put(&chain(1, 1));
    assert_eq!(status, [PutStatus::Stored]);
    eventually("the page is synced", || store.stats().syncs > before);
}

#[test]
fn many_threads_may_use_one_store() {
    let home = Home::with_store(256 * MIB);
    let store = home.open();
    let shared = chain(0, 16);
    std::thread::scope(|scope| {
        for thread in 1..=6 {
            let (store, shared) = (&store, &shared);
            scope.spawn(move || {
                let pool = Pool::new(store, "m", &[65536]);
                for round in 0..40 {
                    // All put the same chain: one stores a page, the others share its outcome.
                    assert!(pool.put(shared).iter().all(|status| status.is_present()));
                    let keys = chain(thread << 16 | round, 24);
                    assert!(
                        pool.put(&keys)
                            .iter()
                            .all(|status| *status == PutStatus::Stored)
                    );
                    let prefix = store.longest_prefix(pool.id, &keys);
                    pool.get(&keys[..prefix]);
                    if round % 8 == 7 {
                        store.delete(pool.id, &keys).unwrap();
                        assert_eq!(pool.hits(&keys), 0);
                    }
                }
            });
        }
    });
    let stats = store.stats();
    assert_eq!(stats.wrong_or_lost(), 0);
    assert_eq!(stats.pages, stats.pages_put - stats.evicted - stats.deleted);
    store.local().unwrap().check_invariants().unwrap();
    store.close().unwrap();
}

#[test]
fn a_parent_that_a_put_did_not_name_is_filled_in_by_a_later_lookup() {
    let home = Home::with_store(256 * MIB);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    let keys = chain(1, 16);
    // Put page by page, without parents: nothing ties them together.
    for (depth, &key) in (0..).zip(&keys) {
        let mut bytes = vec![0; 65536];
        common::fill("m", &key, 0, &mut bytes);
        let parts = [IoSlice::new(&bytes)];
        let page = PutPage {
            key,
            parent: None,
            depth,
            parts: &parts,
        };
        assert_eq!(
            store.put(pool.id, &[page], PutOptions::default()),
            [PutStatus::Stored]
        );
    }
    assert_eq!(store.longest_prefix(pool.id, &keys), 16);
    // From now on the tail is used, the head is not; the head stays for as long as the tail does.
    for seed in 2..300 {
        pool.put(&chain(seed, 32));
        store.touch(pool.id, &keys[15..], Hint::default());
    }
    assert!(store.stats().evicted > 0);
    assert_eq!(store.longest_prefix(pool.id, &keys), 16);
}

#[test]
fn a_creation_that_was_killed_leaves_nothing_in_the_way() {
    let home = Home::new();
    // The remains of a killed creation: the file under its other name, without superblocks.
    let left = home.directory.path().join("store.creating");
    std::fs::write(&left, vec![0; 1 << 20]).unwrap();
    let options = CreateOptions::new(128 * MIB);
    create(&home.path, &options).unwrap();
    assert!(!left.exists());
    home.open().close().unwrap();
}

#[test]
fn the_longest_patience_there_is_is_no_overflow() {
    let home = Home::with_store(128 * MIB);
    let store = home.open_with(OpenOptions::default().with(|o| {
        o.lease = Duration::MAX;
        o.hang_limit = Duration::MAX;
    }));
    let pool = Pool::new(&store, "m", &[65536]);
    let wait = PutOptions::waiting(Duration::MAX);
    assert_eq!(pool.put_from(&chain(1, 2), 0, wait), [PutStatus::Stored; 2]);
    assert_eq!(store.longest_prefix(pool.id, &chain(1, 2)), 2);
    assert_eq!(pool.hits(&chain(1, 2)), 2);
}

#[test]
fn latencies_cover_each_put_each_get_and_each_operation_of_the_device() {
    let home = Home::with_store(128 * MIB);
    for want in [Want::Auto, Want::Threads] {
        let store = home.open_with(OpenOptions::default().with(|o| o.disk = want));
        assert_eq!(store.stats().put_latency, LatencySummary::default());
        let pool = Pool::new(&store, "m", &[65536]);
        for seed in 0..20 {
            pool.put(&chain(seed, 2));
            assert_eq!(pool.hits(&chain(seed, 2)), 2);
        }
        for _ in 0..128 {
            store.contains(pool.id, &chain(0, 1));
        }
        store.flush().unwrap();
        assert_eq!(pool.hits(&chain(0, 1)), 1);
        let stats = store.stats();
        assert_eq!(stats.put_latency.count, 20);
        assert_eq!(stats.get_latency.count, 21);
        // One in 64.
        assert_eq!(stats.lookup_latency.count, 2);
        assert!(stats.device_read_latency.count >= 21);
        // Superblocks, each copy synced.
        assert!(stats.device_write_latency.count >= 2);
        assert!(stats.device_sync_latency.count >= 2);
        for latency in [
            stats.device_read_latency,
            stats.device_write_latency,
            stats.device_sync_latency,
            stats.put_latency,
            stats.get_latency,
            stats.lookup_latency,
        ] {
            let LatencySummary {
                p50_us,
                p90_us,
                p99_us,
                p999_us,
                max_us,
                ..
            } = latency;
            let steps = [0.0, p50_us, p90_us, p99_us, p999_us, max_us];
            assert!(steps.is_sorted() && p50_us > 0.0, "{latency:?}");
        }
        store.close().unwrap();
    }
}
