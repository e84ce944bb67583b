//! The ownership passes in order to a process that asks for it.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};

use common::honest::{PATIENCE, eventually};
use common::{Home, MIB, Pool, chain};
use larder_engine::{OpenOptions, PageStore, Part, PutOptions, Store, report};
use larder_store::api::speaking;
use larder_store::protocol::{HEIRS, Protocol};

const PARTS: [u32; 1] = [65536];

fn attach(home: &Home) -> Store {
    Store::attach(&home.path, OpenOptions::default()).unwrap()
}

/// A process that keeps the ownership once it has it.
fn keeper(home: &Home) -> Store {
    let options = OpenOptions::default().with(|o| o.keeps_ownership = true);
    Store::attach(&home.path, options).unwrap()
}

#[test]
fn an_owner_hands_the_store_over_to_a_client_that_asks_for_it() {
    let home = Home::with_store(256 * MIB);
    let (owner, others) = (attach(&home), [attach(&home), attach(&home)]);
    let keys = chain(1, 20);
    Pool::new(&owner, "m", &PARTS).put(&keys);
    assert_eq!(Pool::new(&others[0], "m", &PARTS).hits(&keys), 20);
    let before = eventually_counted(&home, 20);

    let heir = keeper(&home);
    eventually("the heir is the owner", || heir.part() == Part::Owner);
    for store in others.iter().chain([&owner]) {
        eventually("the others are its clients", || {
            store.part() == Part::Client
        });
        assert_eq!(Pool::new(store, "m", &PARTS).hits(&keys), 20);
    }
    let after = report(&home.path).unwrap();
    assert!(after.started_unix_s > before);
    assert!(
        after.totals.counts.pages_put >= 20 && after.totals.counts.hits >= 20,
        "the totals go on: {:?}",
        after.totals.counts
    );
    assert_eq!(after.stats.unfinished, 0);
    for store in others {
        store.close().unwrap();
    }
    heir.close().unwrap();
    eventually("the former owner owns it again", || {
        owner.part() == Part::Owner
    });
    assert_eq!(Pool::new(&owner, "m", &PARTS).hits(&keys), 20);
    owner.close().unwrap();
}

#[test]
fn nobody_but_the_heir_takes_the_store_over() {
    let home = Home::with_store(128 * MIB);
    let stores: Vec<Store> = (0..5).map(|_| attach(&home)).collect();
    for _ in 0..4 {
        eventually("one of them is the owner", || {
            let owners = stores.iter().filter(|of| of.part() == Part::Owner);
            let clients = stores.iter().filter(|of| of.part() == Part::Client);
            (owners.count(), clients.count()) == (1, stores.len() - 1)
        });
        let is_client = |store: &&Store| store.part() == Part::Client;
        let before: Vec<(&Store, u64)> = stores
            .iter()
            .filter(is_client)
            .map(|store| (store, store.turns()))
            .collect();
        let heir = keeper(&home);
        eventually("the heir is the owner, and they are its clients", || {
            heir.part() == Part::Owner && stores.iter().all(|store| is_client(&store))
        });
        for (store, before) in before {
            assert_eq!(store.turns() - before, 2, "another owner came between");
        }
        heir.close().unwrap();
    }
}

/// Waits until the owner has all counters. Returns its start time.
fn eventually_counted(home: &Home, hits: u64) -> f64 {
    eventually("the counters arrive", || {
        report(&home.path).is_ok_and(|report| report.totals.counts.hits == hits)
    });
    report(&home.path).unwrap().started_unix_s
}

/// Sets the flag when it is dropped, so also when the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn puts_that_may_wait_go_on_through_a_hand_over() {
    let home = Home::with_store(256 * MIB);
    let (owner, client) = (attach(&home), attach(&home));
    let wait = PutOptions::waiting(PATIENCE);
    let is_over = AtomicBool::new(false);
    let put = &|store: &Store, first: u64| {
        let pool = Pool::new(store, "m", &PARTS);
        let mut stored = Vec::new();
        // Some more with the next owner.
        let mut left = 5;
        while left > 0 {
            left -= u32::from(is_over.load(Ordering::SeqCst));
            let keys = chain(first + stored.len() as u64 % 100, 9);
            let statuses = pool.put_from(&keys, 0, wait);
            assert!(statuses.iter().all(|s| s.is_present()), "{statuses:?}");
            stored.push(keys);
        }
        stored
    };
    std::thread::scope(|scope| {
        let puts = [(&owner, 0), (&client, 1000)]
            .map(|(store, first)| scope.spawn(move || put(store, first)));
        let over = Over(&is_over);
        let heir = keeper(&home);
        eventually("the heir is the owner", || heir.part() == Part::Owner);
        drop(over);
        let stored = puts.map(|put| put.join().unwrap());
        let pool = Pool::new(&heir, "m", &PARTS);
        for keys in stored.iter().flatten() {
            assert_eq!(pool.hits(keys), 9);
        }
        assert_eq!(heir.part(), Part::Owner);
        heir.close().unwrap();
    });
}

/// Whether the owner has begun to close the store by then is left to chance.
#[test]
fn an_heir_that_dies_leaves_the_store_to_another_process() {
    let home = Home::with_store(128 * MIB);
    let (owner, client) = (attach(&home), attach(&home));
    let keys = chain(1, 9);
    Pool::new(&owner, "m", &PARTS).put(&keys);
    for _ in 0..4 {
        // As if it were killed.
        drop(keeper(&home));
        eventually("one of the others is the owner", || {
            [&owner, &client].iter().any(|of| of.part() == Part::Owner)
        });
    }
    for store in [&owner, &client] {
        let pool = Pool::new(store, "m", &PARTS);
        eventually("the pages are there", || pool.hits(&keys) == 9);
    }
}

#[test]
fn an_owner_that_keeps_the_store_gives_it_to_nobody() {
    let home = Home::with_store(128 * MIB);
    let first = keeper(&home);
    let second = keeper(&home);
    // The second asks for the store as soon as it is attached. A hand-over would interrupt one of
    // these calls.
    for _ in 0..50 {
        second.flush().unwrap();
        assert_eq!((first.part(), second.part()), (Part::Owner, Part::Client));
    }
    assert_eq!(first.turns(), 0);
    first.close().unwrap();
    eventually("the second is the owner", || second.part() == Part::Owner);
}

#[test]
fn an_owner_of_a_release_without_heirs_is_waited_for() {
    let home = Home::with_store(128 * MIB);
    let protocol = Protocol::default();
    let features = protocol.features & !HEIRS;
    let older = speaking(
        OpenOptions::default(),
        Protocol {
            features,
            ..protocol
        },
    );
    let owner = Store::attach(&home.path, older).unwrap();
    let heir = keeper(&home);
    heir.flush().unwrap();
    assert_eq!((owner.part(), heir.part()), (Part::Owner, Part::Client));
    owner.close().unwrap();
    eventually("it takes over", || heir.part() == Part::Owner);
}
