//! Totals of all processes of a store, across owners.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::IoSliceMut;

use common::honest::{eventually, found};
use common::{Home, MIB, Pool, chain, namespace};
use larder_core::counters::Counted;
use larder_engine::{GetPage, GetStatus, OpenOptions, PageStore, Part, Report, Store, report};
use larder_store::api::speaking;
use larder_store::inventory::{Inventory, spaces};
use larder_store::protocol::{COUNTS, POLICIES, Protocol};
use larder_store::share::view;
use larder_store::totals::Totals;

const PARTS: [u32; 1] = [65536];

fn attach(home: &Home) -> Store {
    Store::attach(&home.path, OpenOptions::default()).unwrap()
}

/// The report of an owner. After a halt of the machine it may be late with its answer.
fn reported(home: &Home) -> Report {
    found("the owner answers", || report(&home.path).ok())
}

fn totals(home: &Home) -> Totals {
    reported(home).totals
}

/// An owner that puts nine pages, a client that gets them and misses five others.
fn busy(home: &Home, options: OpenOptions) -> (Store, Store) {
    let (owner, client) = (attach(home), Store::attach(&home.path, options).unwrap());
    Pool::new(&owner, "m", &PARTS).put(&chain(1, 9));
    let pool = Pool::new(&client, "m", &PARTS);
    // After a halt of the machine the client may look for its owner again.
    eventually("the client reads", || pool.hits(&chain(1, 9)) == 9);
    eventually("the client misses others", || {
        pool.hits(&chain(2, 5)) == 0 && client.stats().misses == 5
    });
    eventually("the client's counters arrive", || {
        let counts = totals(home).counts;
        (counts.hits, counts.misses.absent, counts.pages_put) == (9, 5, 9)
    });
    (owner, client)
}

/// Hits and misses of each namespace.
fn by_namespace(totals: &Totals) -> Vec<(u64, u64)> {
    let spaces = totals.spaces.iter();
    spaces
        .map(|(_, reads)| (reads.hits, reads.misses.total()))
        .collect()
}

#[test]
fn hits_and_misses_of_each_namespace_sum_to_those_of_the_store() {
    let home = Home::with_store(128 * MIB);
    let (owner, client) = busy(&home, OpenOptions::default());
    let other = Pool::new(&owner, "other", &PARTS);
    other.put(&chain(3, 4));
    assert_eq!(other.hits(&chain(3, 6)), 4);
    client.close().unwrap();
    eventually("the measures of the client arrive", || {
        let mut of = by_namespace(&totals(&home));
        of.sort_unstable();
        of == [(4, 2), (9, 5)]
    });
    let totals = totals(&home);
    let (hits, misses) = (totals.counts.hits, totals.counts.misses.total());
    assert_eq!((hits, misses), (13, 7));
    let used = |totals: &Totals| totals.ages.total().used;
    // Only pages that were there have an age.
    assert_eq!((used(&totals).pages(), used(&totals).counts[0]), (13, 13));
    // A check is no use.
    let mut memory = vec![0_u8; 4 * 65536];
    let mut parts: Vec<_> = memory.chunks_mut(65536).map(IoSliceMut::new).collect();
    let keys = chain(3, 4);
    let pages = keys.iter().zip(parts.chunks_mut(1));
    let mut pages: Vec<_> = pages
        .map(|(key, parts)| GetPage { key: *key, parts })
        .collect();
    let statuses = owner.get_uncounted(other.id, &mut pages, None);
    assert_eq!(statuses, [GetStatus::Hit; 4]);
    let after = reported(&home).totals;
    assert_eq!(after.ages, totals.ages);
    assert_eq!(after.counts.hits, totals.counts.hits);
}

#[test]
fn totals_go_on_when_a_client_takes_over_and_when_it_leaves() {
    let home = Home::with_store(128 * MIB);
    let (owner, client) = busy(&home, OpenOptions::default());
    // The client sends its latencies after the owner's totals have reached it.
    eventually("the client's latencies arrive", || {
        let latencies = totals(&home).latencies;
        (latencies.get.count(), latencies.put.count()) == (2, 1)
    });
    assert_eq!(by_namespace(&totals(&home)), [(9, 5)]);
    let before = reported(&home);
    // As if it were killed.
    drop(owner);
    eventually("the client is the owner", || client.part() == Part::Owner);
    let after = reported(&home);
    assert_eq!(after.totals.counts, before.totals.counts);
    assert_eq!(after.totals.spaces, before.totals.spaces);
    assert_eq!(after.totals.ages, before.totals.ages);
    assert_eq!(after.totals.latencies.get, before.totals.latencies.get);
    assert!(after.totals.store.syncs >= before.totals.store.syncs);
    assert!(after.totals.store.written.pages_bytes >= 9 * 65536);
    assert!(after.started_unix_s > before.started_unix_s);
    assert_eq!(
        client.stats().hits,
        0,
        "the counters of this owner begin anew"
    );

    let third = attach(&home);
    assert_eq!(Pool::new(&third, "m", &PARTS).hits(&chain(1, 9)), 9);
    third.close().unwrap();
    eventually("a client that has gone counts", || {
        totals(&home).counts.hits == 18 && totals(&home).latencies.get.count() == 3
    });
}

#[test]
fn a_client_of_a_release_without_totals_is_sent_none_and_begins_at_zero() {
    let home = Home::with_store(128 * MIB);
    let protocol = Protocol {
        features: COUNTS | POLICIES,
        ..Protocol::default()
    };
    let (owner, client) = busy(&home, speaking(OpenOptions::default(), protocol));
    drop(owner);
    eventually("the client is the owner", || client.part() == Part::Owner);
    assert_eq!(totals(&home).counts.hits, 0);
}

#[test]
fn a_copy_passes_through_owners_that_do_nothing() {
    let home = Home::with_store(128 * MIB);
    let (owner, second) = busy(&home, OpenOptions::default());
    let third = attach(&home);
    owner.close().unwrap();
    for (next, number) in [(second, 2), (third, 3)] {
        eventually("a client is the owner", || next.part() != Part::Nobody);
        eventually("the totals are there", || {
            report(&home.path).is_ok_and(|report| report.totals.counts.hits == 9)
        });
        next.close()
            .unwrap_or_else(|error| panic!("{number}: {error}"));
    }
}

#[test]
fn namespaces_with_pages_are_named_to_every_process() {
    let home = Home::with_store(128 * MIB);
    let (owner, client) = busy(&home, OpenOptions::default());
    Pool::new(&owner, "larger", &[65536, 65536]).put(&chain(3, 9));
    Pool::new(&owner, "empty", &PARTS);
    for store in [&owner, &client] {
        let found = spaces(store).unwrap();
        let names: Vec<&str> = found
            .iter()
            .map(|space| &*space.namespace.as_ref().unwrap().fields().model)
            .collect();
        assert_eq!(names, ["larger", "m"]);
        assert_eq!(
            (found[0].usage.pages, found[0].usage.bytes),
            (9, 9 * 131_072)
        );
        assert_eq!(store.records().unwrap().len(), 3);
    }
    let seen = view(&home.path).unwrap();
    assert_eq!(seen.spaces, spaces(&owner).unwrap());
    assert_eq!(
        seen.spaces[1].usage.namespace,
        namespace("m", &PARTS).fingerprint()
    );
}
