//! Reads that several processes share: how many bytes are read from the device, and that every
//! process gets the right bytes.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::time::Instant;

use common::honest::{PATIENCE, Process, eventually};
use common::{Home, MIB, Pool, chain, fill, namespace};
use larder_core::counters::{Counted, Counts};
use larder_engine::format::{Namespace, PageKey, Rank};
use larder_engine::{
    AlignedBuf, GetPage, GetStatus, MissReason, OpenOptions, PageStore, Part, Process as User,
    PutStatus, SharedReads, Store, report,
};
use larder_store::staging::StagingReport;

const ROLE: &str = "LARDER_TEST_SHARED_READER";

fn attach_with(home: &Home, shared_reads: SharedReads, staging_bytes: u64) -> Store {
    let open = OpenOptions::default().with(|o| {
        o.shared_reads = shared_reads;
        o.staging_bytes = staging_bytes;
    });
    Store::attach(&home.path, open).unwrap()
}

fn attach(home: &Home) -> Store {
    attach_with(home, SharedReads::Auto, 64 * MIB)
}

/// A store with one chain in it, put by its owner.
fn stored(
    parts: &[u32],
    pages: usize,
    owner: impl FnOnce(&Home) -> Store,
) -> (Home, Store, Vec<PageKey>) {
    let home = Home::with_store(512 * MIB);
    let owner = owner(&home);
    let keys = chain(1, pages);
    let pool = Pool::new(&owner, "m", parts);
    assert_eq!(pool.put(&keys), vec![PutStatus::Stored; pages]);
    (home, owner, keys)
}

fn bytes_read(stores: &[&Store]) -> u64 {
    // A client's figure is its own, and so is the owner's.
    stores.iter().map(|store| store.stats().bytes_read).sum()
}

/// Every store gets all pages, batch by batch, all at the same time. Like ranks, they start each
/// batch together.
fn read_together(stores: &[&Store], parts: &[u32], keys: &[PageKey], batch: usize) {
    let barrier = Barrier::new(stores.len());
    let pools: Vec<Pool<'_>> = stores
        .iter()
        .map(|store| Pool::new(*store, "m", parts))
        .collect();
    std::thread::scope(|scope| {
        for pool in &pools {
            scope.spawn(|| {
                for keys in keys.chunks(batch) {
                    barrier.wait();
                    assert_eq!(pool.hits(keys), keys.len());
                }
            });
        }
    });
}

fn padded(parts: &[u32]) -> u64 {
    parts
        .iter()
        .map(|bytes| u64::from(bytes.next_multiple_of(4096)))
        .sum()
}

#[test]
fn pages_that_all_ranks_read_reach_the_device_once() {
    // All pages together are more than the area holds, a batch is less: ranks that are a batch
    // apart find each other's pages.
    for (parts, pages, batch) in [
        (&[65536_u32, 65536][..], 700, 50),
        (&[5000, 70_001], 900, 50),
        (&[3 << 20], 40, 8),
    ] {
        let (home, owner, keys) = stored(parts, pages, attach);
        let clients = [attach(&home), attach(&home), attach(&home)];
        let stores = [&owner, &clients[0], &clients[1], &clients[2]];
        read_together(&stores, parts, &keys, batch);
        let report_now = owner.report().unwrap().staging;
        let (all, read) = (pages as u64 * padded(parts), bytes_read(&stores));
        // If the device keeps a reader waiting for long, the others read the page too.
        let late = 2 * report_now.timeouts * padded(parts);
        assert!(
            (all..=all + all / 10 + late).contains(&read),
            "{read} bytes of {all} for {parts:?}: {report_now:?}"
        );
        assert!(report_now.fills + report_now.hits + report_now.waits >= 4 * pages as u64);
        assert_eq!(report_now.mismatches, 0);
    }
}

#[test]
fn a_separate_process_copies_pages_that_another_one_read() {
    let parts = [65536];
    if let Ok(role) = std::env::var(ROLE) {
        let store = attach_path(Path::new(&role));
        let pool = Pool::new(&store, "m", &parts);
        assert_eq!(pool.hits(&chain(1, 200)), 200);
        let stats = store.stats();
        assert_eq!((stats.bytes_read, stats.staged_pages), (0, 200));
        return;
    }
    let (home, owner, keys) = stored(&parts, 200, attach);
    let client = attach(&home);
    let pools = [&owner, &client].map(|store| Pool::new(store, "m", &parts));
    assert_eq!(pools[0].hits(&keys), 200);
    let mut other = reader(
        &home,
        "a_separate_process_copies_pages_that_another_one_read",
    );
    assert!(other.0.wait().unwrap().success());
    assert_eq!(owner.stats().bytes_read, 200 * 65536);
}

fn attach_path(path: &Path) -> Store {
    Store::attach(path, OpenOptions::default()).unwrap()
}

fn reader(home: &Home, test: &str) -> Process {
    let started = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(ROLE, &home.path)
        .stdout(Stdio::null())
        .spawn();
    Process(started.unwrap())
}

#[test]
fn killed_readers_cost_the_others_no_page() {
    let parts = [65536];
    if let Ok(role) = std::env::var(ROLE) {
        let store = attach_path(Path::new(&role));
        let pool = Pool::new(&store, "m", &parts);
        loop {
            for keys in chain(1, 400).chunks(128) {
                pool.get(keys);
            }
        }
    }
    // An area that does not hold all pages, so that they are read again and again.
    let (home, owner, keys) = stored(&parts, 400, |home| {
        attach_with(home, SharedReads::Auto, 16 * MIB)
    });
    let client = attach(&home);
    let pools = [&owner, &client].map(|store| Pool::new(store, "m", &parts));
    for round in 0..6 {
        let mut other = reader(&home, "killed_readers_cost_the_others_no_page");
        let before = owner.report().unwrap().staging.fills;
        let enough = before + 200 * (round % 3) + 1;
        eventually("the other process reads", || {
            owner.report().unwrap().staging.fills >= enough
        });
        std::thread::scope(|scope| {
            for pool in &pools {
                scope.spawn(|| assert_eq!(pool.hits(&keys), keys.len(), "round {round}"));
            }
            other.0.kill().unwrap();
        });
    }
    let until = Instant::now() + PATIENCE;
    loop {
        let report_now = owner.report().unwrap();
        if (report_now.lingering, report_now.reads_in_flight) == (0, 0) {
            break;
        }
        assert!(
            Instant::now() < until,
            "slots of dead readers are not released: {report_now:?}"
        );
        std::thread::yield_now();
    }
    assert_eq!(owner.stats().misses + client.stats().misses, 0);
}

#[test]
fn reads_are_shared_where_ranks_read_alike_and_where_it_is_asked_for() {
    let parts = [65536];
    let pages = 64;
    let one_rank = |model: &str| {
        let fields = larder_engine::format::NamespaceFields {
            tp: Rank::new(1, 2).unwrap(),
            ..namespace(model, &parts).fields().clone()
        };
        Namespace::new(fields).unwrap()
    };
    let all = pages as u64 * 65536;
    for (owners, clients, is_one_ranks, read) in [
        (SharedReads::Auto, SharedReads::Auto, false, all),
        (SharedReads::Auto, SharedReads::Auto, true, 2 * all),
        (SharedReads::On, SharedReads::On, true, all),
        (SharedReads::Off, SharedReads::On, false, 2 * all),
        (SharedReads::On, SharedReads::Off, false, 2 * all),
    ] {
        let home = Home::with_store(256 * MIB);
        let owner = attach_with(&home, owners, 64 * MIB);
        let client = attach_with(&home, clients, 64 * MIB);
        let space = if is_one_ranks {
            one_rank("m")
        } else {
            namespace("m", &parts)
        };
        let pools = [&owner, &client].map(|store| Pool {
            store,
            id: store.namespace(&space).unwrap(),
            model: "m".to_owned(),
            parts: parts.to_vec(),
        });
        let keys = chain(1, pages);
        pools[0].put(&keys);
        for pool in &pools {
            assert_eq!(pool.hits(&keys), pages);
        }
        assert_eq!(
            bytes_read(&[&owner, &client]),
            read,
            "{owners:?} {clients:?} {is_one_ranks}"
        );
        let report_now = report(&home.path).unwrap().staging;
        assert_eq!(report_now.hits, u64::from(read == all) * pages as u64);
    }
}

#[test]
fn a_process_alone_in_a_namespace_shares_nothing() {
    let (home, owner, keys) = stored(&[65536], 40, attach);
    let client = attach(&home);
    let other = Pool::new(&client, "other", &[65536]);
    other.put(&keys);
    assert_eq!(other.hits(&keys), 40);
    assert_eq!(Pool::new(&owner, "m", &[65536]).hits(&keys), 40);
    let report_now = owner.report().unwrap().staging;
    assert_eq!(
        (report_now.fills, report_now.hits, report_now.used_bytes),
        (0, 0, 0)
    );
    drop(client);
    assert_eq!(owner.stats().staged_pages, 0);
}

#[test]
fn a_deleted_page_is_not_found_in_the_area() {
    let (home, owner, keys) = stored(&[65536], 40, attach);
    let client = attach(&home);
    let pools = [&owner, &client].map(|store| Pool::new(store, "m", &[65536]));
    for pool in &pools {
        assert_eq!(pool.hits(&keys), 40);
    }
    assert_eq!(owner.delete(pools[0].id, &keys[20..]).unwrap(), 20);
    for pool in &pools {
        assert_eq!(pool.hits(&keys), 20);
    }
    // Put again, it is the same page.
    pools[1].put(&keys);
    for pool in &pools {
        assert_eq!(pool.hits(&keys), 40);
    }
}

#[test]
fn pages_larger_than_the_area_and_more_than_it_holds_are_read_all_the_same() {
    let parts = [3 << 20];
    let (home, owner, keys) = stored(&parts, 12, |home| {
        attach_with(home, SharedReads::Auto, 2 * MIB)
    });
    let client = attach(&home);
    let stores = [&owner, &client];
    read_together(&stores, &parts, &keys, 12);
    assert_eq!(bytes_read(&stores), 2 * 12 * (3 << 20));
    assert_eq!(owner.report().unwrap().staging.crowded, 2 * 12);
    // An area with many small pages, each filling little of its unit.
    let small = [4096];
    let many = chain(2, 300);
    let pools = stores.map(|store| Pool::new(store, "m", &small));
    pools[0].put(&many);
    read_together(&stores, &small, &many, 300);
}

#[test]
fn a_takeover_while_pages_are_shared_costs_no_page() {
    let parts = [65536];
    let (home, owner, keys) = stored(&parts, 300, attach);
    let clients = [attach(&home), attach(&home)];
    let stores = [&clients[0], &clients[1]];
    read_together(&stores, &parts, &keys, 100);
    let pools = stores.map(|store| Pool::new(store, "m", &parts));
    std::thread::scope(|scope| {
        for pool in &pools {
            scope.spawn(|| {
                let until = Instant::now() + PATIENCE;
                // Misses while the store has no owner; wrong bytes never: `get` compares.
                while pool.hits(&keys) < keys.len() || !has_new_owner(&stores) {
                    assert!(Instant::now() < until, "the pages do not come back");
                }
            });
        }
        drop(owner);
    });
    // The area of the next owner is another one.
    let before = bytes_read(&stores);
    read_together(&stores, &parts, &keys, 100);
    let report_now = report(&home.path).unwrap().staging;
    assert!(
        report_now.fills > 0 && report_now.hits + report_now.waits > 0,
        "{report_now:?}"
    );
    assert!(bytes_read(&stores) - before <= (300 + 2 * report_now.timeouts) * 65536);
}

fn has_new_owner(stores: &[&Store]) -> bool {
    let count = |part| stores.iter().filter(|store| store.part() == part).count();
    count(Part::Owner) == 1 && count(Part::Client) == stores.len() - 1
}

#[test]
fn a_deadline_that_has_passed_stops_reading_for_oneself_and_for_others() {
    let (home, owner, keys) = stored(&[65536], 20, attach);
    let client = attach(&home);
    let pools = [&owner, &client].map(|store| Pool::new(store, "m", &[65536]));
    let mut memory = AlignedBuf::zeroed(65536).unwrap();
    let mut parts = [std::io::IoSliceMut::new(&mut memory)];
    let mut pages = [GetPage {
        key: keys[0],
        parts: &mut parts,
    }];
    let status = client.get(pools[1].id, &mut pages, Some(Instant::now()));
    assert!(!status[0].is_hit());
    assert_eq!(pools[0].hits(&keys), 20, "who has time reads it");
    let _ = pages;
    let mut expected = vec![0; 65536];
    fill("m", &keys[0], 0, &mut expected);
    assert_eq!(pools[1].hits(&keys), 20);
    let StagingReport {
        mismatches,
        timeouts,
        ..
    } = owner.report().unwrap().staging;
    assert_eq!((mismatches, timeouts), (0, 0));
}

/// The clients of an owner with their counters, once these satisfy `holds`.
fn clients_when(owner: &Store, holds: impl Fn(&[Counts]) -> bool) -> Vec<User> {
    let mut clients = Vec::new();
    eventually("the clients' counters have arrived", || {
        clients = owner.report().unwrap().processes.split_off(1);
        let counts: Vec<Counts> = clients.iter().filter_map(|client| client.counts).collect();
        counts.len() == clients.len() && holds(&counts)
    });
    clients
}

#[test]
fn the_owner_has_the_counters_of_each_process_and_of_those_that_have_gone() {
    let parts = [65536];
    let (home, owner, keys) = stored(&parts, 20, attach);
    let clients = [attach(&home), attach(&home)];
    let shared = clients_when(&owner, |counts| counts == [Counts::default(); 2]);
    assert!(
        shared
            .iter()
            .all(|client| client.pid == Some(std::process::id()))
    );
    assert!(
        shared
            .iter()
            .all(|client| client.name.is_some() && client.client.is_some())
    );

    let reader = Pool::new(&clients[0], "m", &parts);
    assert_eq!(reader.hits(&keys), 20);
    assert_eq!(reader.hits(&chain(2, 5)), 0);
    let mut wrong = [GetPage {
        key: keys[0],
        parts: &mut [],
    }];
    let missed = clients[0].get(reader.id, &mut wrong, None);
    assert_eq!(missed, [GetStatus::Miss(MissReason::WrongShape)]);
    let writer = Pool::new(&clients[1], "m", &parts);
    assert_eq!(writer.put(&chain(4, 3)), vec![PutStatus::Stored; 3]);
    assert_eq!(writer.put(&keys), vec![PutStatus::Duplicate; 20]);

    let is_all = |counts: &[Counts]| {
        let has = |hits, put| move |of: &Counts| of.hits == hits && of.duplicates == put;
        counts.iter().any(has(20, 0))
            && counts.iter().any(has(0, 20))
            && counts.iter().map(|of| of.misses.total()).sum::<u64>() == 6
    };
    let told = clients_when(&owner, is_all);
    let of = |hits| {
        let mut counts = told.iter().filter_map(|client| client.counts);
        counts.find(|counts| counts.hits == hits).unwrap()
    };
    let (read, put) = (of(20), of(0));
    let misses = read.misses;
    assert_eq!(
        (misses.absent, misses.wrong_shape, misses.total()),
        (5, 1, 6)
    );
    assert_eq!(read.bytes_read, 20 * 65536);
    assert_eq!(
        (put.pages_put, put.bytes_put, put.duplicates),
        (3, 3 * 65536, 20)
    );
    let own = owner.report().unwrap().processes.remove(0);
    assert!(own.client.is_none() && own.counts.unwrap().pages_put == 20);

    // One leaves, the other ends as if it was killed: nothing that they sent is lost.
    let [first, second] = clients;
    first.close().unwrap();
    drop(second);
    let mut both = read;
    both.add(&put);
    eventually("both have gone", || {
        let report = owner.report().unwrap();
        report.departed.clients == 2
            && report.departed.counts == both
            && report.processes.len() == 1
    });
    // A process that asks for a report, and uses no page, is no client of the store.
    assert_eq!(
        report(&home.path).unwrap().departed,
        owner.report().unwrap().departed
    );
    assert_eq!(owner.report().unwrap().departed.clients, 2);
}
