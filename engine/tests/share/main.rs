//! One store used by several handles at once, each like a process of its own: an owner, clients,
//! and the next owner. `socket`: the owner's socket, without the code of a client. `descriptors`:
//! locks and descriptions of the volumes. `places`: volumes that are deleted or replaced.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod descriptors;
mod places;
mod socket;

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::Instant;

use common::honest::{PATIENCE, eventually};
use common::{Home, MIB, Pool, chain};
use larder_engine::{
    GetStatus, MissReason, OpenOptions, PageStore, Part, PutOptions, PutStatus, SharedReads, Store,
    StoreError, report,
};
use larder_store::api::DiskWrapper;
use larder_store::share::Inside;
use larder_store::volume::socket::socket_path;

const PARTS: [u32; 1] = [65536];

fn attach(home: &Home) -> Store {
    Store::attach(&home.path, OpenOptions::default()).unwrap()
}

#[test]
fn pages_put_by_one_process_are_read_by_the_others_under_any_owner() {
    let home = Home::with_store(256 * MIB);
    let owner = attach(&home);
    let clients = [attach(&home), attach(&home)];
    assert_eq!(owner.part(), Part::Owner);
    assert!(clients.iter().all(|client| client.part() == Part::Client));

    for parts in [&[65536_u32, 65536][..], &[5000], &[4 << 20]] {
        let model = format!("{parts:?}");
        let handles: Vec<&dyn PageStore> = vec![&owner, &clients[0], &clients[1]];
        let pools: Vec<Pool<'_>> = handles
            .iter()
            .map(|handle| Pool::new(*handle, &model, parts))
            .collect();
        for (seed, writer) in (1..).zip(&pools) {
            let keys = chain(seed, 9);
            assert_eq!(writer.put(&keys), vec![PutStatus::Stored; 9]);
            for reader in &pools {
                assert_eq!(reader.put(&keys), vec![PutStatus::Duplicate; 9]);
                assert_eq!(reader.store.longest_prefix(reader.id, &keys), 9);
                assert_eq!(reader.store.contains(reader.id, &keys), vec![true; 9]);
                assert_eq!(reader.get(&keys), vec![GetStatus::Hit; 9]);
            }
        }
        let gone = chain(1, 9);
        assert_eq!(pools[2].store.delete(pools[2].id, &gone[4..]).unwrap(), 5);
        assert_eq!(pools[0].store.longest_prefix(pools[0].id, &gone), 4);
        assert_eq!(pools[1].hits(&gone), 4);
        assert_eq!(clients[1].clear_namespace(pools[2].id).unwrap(), 22);
        assert_eq!(pools[0].hits(&chain(2, 9)), 0);
    }
    clients[0].flush().unwrap();
    let report_now = report(&home.path).unwrap();
    assert_eq!(
        (report_now.reads_in_flight, report_now.puts_in_flight),
        (0, 0)
    );
    assert_eq!(report_now.stats.pages, 0);
    assert!(report_now.clients >= 2 && report_now.rss_bytes > 0);
    for client in &clients {
        client.close().unwrap();
    }
    owner.close().unwrap();
    assert!(!socket_path(&home.path).exists());
}

#[test]
fn each_page_of_a_call_with_several_windows_gets_its_own_status() {
    let home = Home::with_store(256 * MIB);
    let (owner, client) = (attach(&home), attach(&home));
    for (seed, handle) in [(1, &owner), (2, &client)] {
        let pool = Pool::new(handle, "m", &[65536, 65536]);
        let keys = chain(seed, 160);
        assert_eq!(pool.put(&keys[..70]), vec![PutStatus::Stored; 70]);
        let statuses = pool.put(&keys);
        assert_eq!(statuses[..70], [PutStatus::Duplicate; 70]);
        assert_eq!(statuses[70..], [PutStatus::Stored; 90]);
        assert_eq!(pool.hits(&keys), 160);
    }
}

#[test]
fn a_page_that_a_client_finds_damaged_is_damaged_for_all() {
    for shared_reads in [SharedReads::Off, SharedReads::On] {
        let home = Home::with_store(128 * MIB);
        let mut options = OpenOptions::default();
        options.shared_reads = shared_reads;
        let owner = Store::attach(&home.path, options.clone()).unwrap();
        let client = Store::attach(&home.path, options).unwrap();
        let pool = Pool::new(&client, "m", &[65536]);
        let own = Pool::new(&owner, "m", &[65536]);
        let keys = chain(1, 4);
        assert_eq!(pool.put(&keys), vec![PutStatus::Stored; 4]);
        // The first segment begins at 1 MiB; its first page behind two header blocks.
        let file = std::fs::File::options().write(true).open(&home.path);
        let second = MIB + 2 * 4096 + 65536;
        file.unwrap().write_all_at(b"?", second + 77).unwrap();
        assert_eq!(pool.get(&keys)[1], GetStatus::Miss(MissReason::Damaged));
        let there = || own.store.contains(own.id, &keys);
        eventually("it is forgotten", || there() == [true, false, true, true]);
        assert_eq!(owner.stats().damaged, 1);
        assert_eq!(pool.put(&keys)[1], PutStatus::Stored);
        assert_eq!(own.hits(&keys), 4);
    }
}

/// The client is closed while it is between two owners, or is becoming the owner: some rounds hit
/// the one case, some the other.
#[test]
fn a_handle_that_is_between_two_owners_can_be_closed() {
    let home = Home::with_store(128 * MIB);
    for _ in 0..8 {
        let owner = attach(&home);
        let other = attach(&home);
        let (finds, found) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        let (finds, may_go) = (Mutex::new(finds), Mutex::new(may_go));
        let disks = AtomicUsize::new(0);
        let through = move |disk| {
            if disks.fetch_add(1, Ordering::SeqCst) > 0 {
                finds.lock().unwrap().send(()).unwrap();
                may_go.lock().unwrap().recv().unwrap();
            }
            disk
        };
        let mut options = OpenOptions::default();
        options.disk_wrapper = Some(DiskWrapper::new(through));
        let client = Store::attach(&home.path, options).unwrap();
        owner.close().unwrap();
        found.recv_timeout(PATIENCE).unwrap();
        let client = Arc::new(client);
        let (closes, closed) = mpsc::channel();
        std::thread::spawn({
            let client = client.clone();
            move || closes.send(client.close()).unwrap()
        });
        // Returns because the client is being closed: there is no owner yet.
        client.wait_for_owner(Instant::now() + PATIENCE);
        go.send(()).unwrap();
        let outcome = closed.recv_timeout(PATIENCE).expect("it hangs");
        outcome.unwrap();
        other.close().unwrap();
    }
}

/// Ranks of one engine end together. The rank that owns the store may end while another flushes.
#[test]
fn handles_that_are_closed_at_the_same_moment_all_close() {
    let home = Home::with_store(128 * MIB);
    for round in 0..60 {
        let stores = [attach(&home), attach(&home), attach(&home)];
        let pools = stores.each_ref().map(|store| Pool::new(store, "m", &PARTS));
        for (seed, pool) in (3 * round..).zip(&pools) {
            pool.put(&chain(seed, 2));
        }
        let start = Barrier::new(stores.len());
        let close = |store: &Store| {
            start.wait();
            store.close()
        };
        std::thread::scope(|scope| {
            let closing = stores.each_ref().map(|store| scope.spawn(|| close(store)));
            for closed in closing {
                closed.join().unwrap().unwrap();
            }
        });
    }
}

#[test]
fn namespaces_stay_distinct_in_any_order_of_registration() {
    let home = Home::with_store(256 * MIB);
    let (owner, client) = (attach(&home), attach(&home));
    let (first, second) = (
        Pool::new(&owner, "a", &[8192]),
        Pool::new(&owner, "b", &[8192]),
    );
    let (other_second, other_first) = (
        Pool::new(&client, "b", &[8192]),
        Pool::new(&client, "a", &[8192]),
    );
    let keys = chain(7, 5);
    assert_eq!(first.put(&keys), vec![PutStatus::Stored; 5]);
    assert_eq!(other_first.hits(&keys), 5);
    assert_eq!(other_second.hits(&keys), 0);
    assert_eq!(other_second.put(&keys), vec![PutStatus::Stored; 5]);
    assert_eq!(second.hits(&keys), 5);
}

#[test]
fn a_client_takes_over_when_the_owner_goes_and_finds_acknowledged_pages() {
    let home = Home::with_store(256 * MIB);
    let mut owner = attach(&home);
    let mut next = attach(&home);
    let mut known = Vec::new();
    for round in 0..6 {
        let keys = chain(round, 20);
        let pool = Pool::new(&next, "m", &[65536]);
        assert_eq!(
            pool.put(&keys),
            vec![PutStatus::Stored; 20],
            "round {round}"
        );
        known.push(keys);
        if round % 2 == 0 {
            owner.close().unwrap();
        } else {
            drop(owner);
        }
        eventually("the client becomes owner", || next.part() == Part::Owner);
        assert_eq!(next.turns(), 2, "one for the loss, one for the gain");
        for keys in &known {
            assert_eq!(pool.hits(keys), 20, "round {round}");
        }
        owner = next;
        next = attach(&home);
        assert_eq!(next.part(), Part::Client);
    }
}

/// In order, or as a kill ends it.
#[test]
fn a_put_is_repeated_with_the_next_owner_when_its_owner_goes() {
    let home = Home::with_store(256 * MIB);
    let wait = PutOptions::waiting(PATIENCE);
    for ends in [|owner: Store| owner.close().unwrap(), drop] {
        let owner = attach(&home);
        let client = attach(&home);
        let pool = Pool::new(&client, "m", &[65536]);
        let (puts, put) = mpsc::channel();
        std::thread::scope(|scope| {
            let putting = scope.spawn(|| {
                let mut seed = 1;
                // Some more with the next owner.
                let mut left = 5;
                while left > 0 {
                    left -= u32::from(client.part() == Part::Owner);
                    let statuses = pool.put_from(&chain(seed, 9), 0, wait);
                    assert!(
                        statuses.iter().all(|status| status.is_present()),
                        "{statuses:?}"
                    );
                    puts.send(seed).unwrap();
                    seed += 1;
                }
                seed
            });
            assert_eq!(put.iter().nth(10), Some(11));
            ends(owner);
            let seeds = putting.join().unwrap();
            assert!((1..seeds).all(|seed| pool.hits(&chain(seed, 9)) == 9));
        });
        client.close().unwrap();
    }
}

#[test]
fn a_process_that_waits_for_an_owner_is_woken_by_the_next_one() {
    let home = Home::with_store(256 * MIB);
    let (owner, client) = (attach(&home), attach(&home));
    owner.close().unwrap();
    let until = Instant::now() + PATIENCE;
    while client.part() != Part::Owner && Instant::now() < until {
        client.wait_for_owner(until);
    }
    assert!(
        Instant::now() < until,
        "there was no notification of an owner"
    );
    client.close().unwrap();
    // There will be none: a closed handle does not wait.
    client.wait_for_owner(until);
    assert!(Instant::now() < until, "waited for nothing");
}

#[test]
fn of_several_clients_one_takes_over_and_the_others_follow_it() {
    let home = Home::with_store(256 * MIB);
    let owner = attach(&home);
    let clients = [attach(&home), attach(&home), attach(&home)];
    let pools: Vec<Pool<'_>> = clients
        .iter()
        .map(|client| Pool::new(client, "m", &[65536]))
        .collect();
    let keys = chain(3, 30);
    assert_eq!(pools[0].put(&keys), vec![PutStatus::Stored; 30]);
    drop(owner);
    eventually("one owner, two clients", || {
        let count = |part| {
            clients
                .iter()
                .filter(|client| client.part() == part)
                .count()
        };
        count(Part::Owner) == 1 && count(Part::Client) == 2
    });
    for pool in &pools {
        assert_eq!(pool.hits(&keys), 30);
        assert_eq!(pool.put(&keys), vec![PutStatus::Duplicate; 30]);
    }
    let report_now = report(&home.path).unwrap();
    assert_eq!(report_now.clients, 2, "who asks is no client");
}

#[test]
fn without_an_owner_everything_misses_at_once() {
    let home = Home::with_store(256 * MIB);
    let owner = attach(&home);
    let client = attach(&home);
    let pool = Pool::new(&client, "m", &[65536]);
    let keys = chain(1, 4);
    assert_eq!(pool.put(&keys), vec![PutStatus::Stored; 4]);
    drop(owner);
    // Between the owner's end and the takeover a call misses, after it it hits. It never fails in
    // another way.
    eventually("the pages are back", || {
        let statuses = pool.get(&keys);
        assert!(statuses.iter().all(|status| matches!(
            status,
            GetStatus::Hit | GetStatus::Miss(MissReason::Closed | MissReason::Absent)
        )));
        statuses.iter().all(|status| status.is_hit())
    });
}

#[test]
fn many_threads_of_many_clients_put_and_get_in_a_store_that_evicts() {
    let home = Home::with_store(256 * MIB);
    let owner = attach(&home);
    let clients = [attach(&home), attach(&home)];
    std::thread::scope(|scope| {
        for (number, handle) in (0..).zip([&owner, &clients[0], &clients[1]]) {
            for thread in 0..2 {
                scope.spawn(move || {
                    let pool = Pool::new(handle, "m", &[65536, 65536]);
                    for round in 0..30 {
                        let own = chain(1000 * (2 * number + thread) + round, 16);
                        let shared = chain(round, 16);
                        for keys in [&own, &shared] {
                            for status in pool.put(keys) {
                                assert!(status.is_present(), "{status:?}");
                            }
                            // Eviction may take pages that others pushed out. A hit is checked byte
                            // by byte.
                            pool.get(keys);
                        }
                    }
                });
            }
        }
    });
    let stats = owner.stats();
    assert!(stats.evicted > 0 && stats.pages > 0);
    // A client returns pins by messages without a reply.
    eventually("no client reads or puts", || {
        let now = report(&home.path).unwrap();
        (now.reads_in_flight, now.puts_in_flight) == (0, 0)
    });
    for client in &clients {
        client.close().unwrap();
    }
    owner.close().unwrap();
    let store = home.open();
    assert_eq!(store.stats().pages, stats.pages);
    store.local().unwrap().check_invariants().unwrap();
}

#[test]
fn a_lookup_of_more_keys_than_a_message_holds_is_answered_whole() {
    let home = Home::with_store(256 * MIB);
    let (owner, client) = (attach(&home), attach(&home));
    let pool = Pool::new(&owner, "m", &[4096]);
    let other = Pool::new(&client, "m", &[4096]);
    let keys = chain(1, 3000);
    assert!(pool.put(&keys).iter().all(|status| status.is_present()));
    let mut many: Vec<_> = (0..60).flat_map(|_| keys.iter().copied()).collect();
    many.extend(chain(2, 5));
    assert!(many.len() > 131_072);
    let found = client.contains(other.id, &many);
    assert_eq!(found.iter().filter(|there| **there).count(), 60 * 3000);
    assert_eq!(found.len(), many.len());
    assert_eq!(client.longest_prefix(other.id, &keys), 3000);
    assert_eq!(client.longest_prefix(other.id, &many), 60 * 3000);
    // The keys of the second message are behind a page that is not there.
    many[3000] = chain(2, 1)[0];
    assert_eq!(client.longest_prefix(other.id, &many), 3000);
}

#[test]
fn attaching_to_a_store_with_an_owner_that_does_not_serve_it_is_refused() {
    let home = Home::with_store(256 * MIB);
    let store = home.open();
    let refused = Store::attach(&home.path, OpenOptions::default());
    assert!(matches!(refused, Err(StoreError::Locked { .. })));
    let asked = report(&home.path).err().unwrap();
    assert!(matches!(
        asked,
        StoreError::Locked {
            is_unserved: true,
            ..
        }
    ));
    assert_eq!(asked.to_string(), refused.err().unwrap().to_string());
    store.close().unwrap();
    drop(store);
    let asked = report(&home.path);
    assert!(matches!(asked, Err(StoreError::NotServed { .. })));
    let read_only = OpenOptions::default().with(|o| o.read_only = true);
    assert!(matches!(
        Store::attach(&home.path, read_only),
        Err(StoreError::Usage(_))
    ));
}

#[test]
fn a_client_that_goes_in_the_middle_of_reading_leaves_no_pin_behind() {
    let home = Home::with_store(256 * MIB);
    let owner = attach(&home);
    let pool = Pool::new(&owner, "m", &[65536]);
    let keys = chain(1, 64);
    assert_eq!(pool.put(&keys), vec![PutStatus::Stored; 64]);
    for _ in 0..5 {
        let client = attach(&home);
        let reader = Pool::new(&client, "m", &[65536]);
        std::thread::scope(|scope| {
            scope.spawn(|| reader.get(&keys));
            client.close().unwrap();
        });
    }
    eventually("all pins are back", || {
        let report_now = owner.report().unwrap();
        report_now.clients == 0 && report_now.reads_in_flight == 0 && report_now.lingering == 0
    });
    // Every segment can be reclaimed: no process holds one.
    for seed in 10..120 {
        let keys = chain(seed, 64);
        assert!(pool.put(&keys).iter().all(|status| status.is_present()));
    }
    assert!(owner.stats().reclaimed > 0);
}
