//! Pins: pages that stay until a time, in whatever state the store is opened again.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use common::{Home, MIB, Pool, chain};
use larder_engine::format::PageKey;
use larder_engine::{OpenOptions, PageStore, PutOptions, Store};
use larder_store::inventory::{Inventory, Kept};
use larder_store::quotas::{GroupKind, GroupName, QuotaChange, QuotaSpec};
use larder_store::share::change_quotas;

const PAGE: u32 = 256 << 10;
const SIZE: u64 = 194 * MIB;

/// Pages of one scan: more than the store holds.
const SCAN: u64 = SIZE / PAGE as u64;

fn now_s() -> u32 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u32::try_from(since.as_secs()).unwrap()
}

fn tomorrow() -> u32 {
    now_s() + 24 * 3600
}

/// Pages that stand alone, so that each is a leaf.
fn heads(seed: u64, count: u64) -> Vec<PageKey> {
    (0..count)
        .map(|page| chain(seed << 20 | page, 1)[0])
        .collect()
}

fn put_heads(pool: &Pool<'_>, keys: &[PageKey]) {
    let wait = PutOptions::waiting(Duration::from_secs(120));
    for some in keys.chunks(16) {
        assert!(
            pool.put_heads(some, wait)
                .iter()
                .all(|put| put.is_present())
        );
    }
}

fn scan(pool: &Pool<'_>, number: u64) {
    put_heads(pool, &heads(100 + number, SCAN));
}

fn keep(pool: &Pool<'_>, store: &Store, keys: &[PageKey], until_unix_s: u32) -> Vec<Kept> {
    store.keep(pool.id, keys, until_unix_s).unwrap()
}

fn pinned(store: &Store) -> usize {
    store.kept(0).unwrap().len()
}

#[test]
fn pinned_pages_survive_four_scans_and_two_opens() {
    let home = Home::with_store(SIZE);
    let (alone, tail) = (heads(1, 40), chain(7, 6));
    let store = home.open_with(OpenOptions::default());
    let pool = Pool::new(&store, "a", &[PAGE]);
    put_heads(&pool, &alone);
    pool.put(&tail);
    let (wanted, others) = alone.split_at(20);
    assert_eq!(keep(&pool, &store, wanted, tomorrow()), [Kept::Yes; 20]);
    // The last page of a chain keeps the chain.
    assert_eq!(keep(&pool, &store, &tail[5..], tomorrow()), [Kept::Yes]);
    scan(&pool, 0);
    scan(&pool, 1);
    store.close().unwrap();
    for round in 2..4 {
        let store = home.open_with(OpenOptions::default());
        let pool = Pool::new(&store, "a", &[PAGE]);
        scan(&pool, round);
        assert_eq!(pool.hits(wanted), wanted.len());
        assert_eq!(pool.hits(&tail), tail.len());
        assert_eq!(pool.hits(others), 0);
        assert_eq!(pinned(&store), 21);
        store.close().unwrap();
    }
}

#[test]
fn a_pin_ends_with_its_page_and_counts_for_no_later_one() {
    let home = Home::with_store(SIZE);
    let keys = heads(1, 4);
    let store = home.open_with(OpenOptions::default());
    let pool = Pool::new(&store, "a", &[PAGE]);
    put_heads(&pool, &keys);
    keep(&pool, &store, &keys, tomorrow());
    assert_eq!(store.delete(pool.id, &keys[..2]).unwrap(), 2);
    assert_eq!(pinned(&store), 2);
    put_heads(&pool, &keys[..2]);
    store.close().unwrap();
    let store = home.open_with(OpenOptions::default());
    let pool = Pool::new(&store, "a", &[PAGE]);
    assert_eq!(pinned(&store), 2);
    scan(&pool, 0);
    assert_eq!(pool.hits(&keys[..2]), 0);
    assert_eq!(pool.hits(&keys[2..]), 2);
    assert!(store.clear_namespace(pool.id).unwrap() > 0);
    assert_eq!(pinned(&store), 0);
    store.close().unwrap();
}

#[test]
fn a_pin_is_taken_back_and_ends_at_its_time() {
    let home = Home::with_store(SIZE);
    let keys = heads(1, 3);
    let store = home.open_with(OpenOptions::default());
    let pool = Pool::new(&store, "a", &[PAGE]);
    put_heads(&pool, &keys);
    assert_eq!(
        keep(&pool, &store, &heads(2, 1), tomorrow()),
        [Kept::Absent]
    );
    keep(&pool, &store, &keys, tomorrow());
    assert_eq!(keep(&pool, &store, &keys[..1], 0), [Kept::Yes]);
    assert_eq!(keep(&pool, &store, &keys[..1], 0), [Kept::Absent]);
    // An end that has passed replaces a later one.
    keep(&pool, &store, &keys[1..2], now_s() - 1);
    store.close().unwrap();
    let store = home.open_with(OpenOptions::default());
    let pool = Pool::new(&store, "a", &[PAGE]);
    scan(&pool, 0);
    assert_eq!(pool.hits(&keys[..2]), 0);
    assert_eq!(pool.hits(&keys[2..]), 1);
    assert_eq!(pinned(&store), 1);
    store.close().unwrap();
}

#[test]
fn pins_and_minima_share_half_of_the_room() {
    let home = Home::with_store(SIZE);
    let store = home.open_with(OpenOptions::default());
    let pool = Pool::new(&store, "a", &[PAGE]);
    let keys = heads(1, 500);
    put_heads(&pool, &keys);
    let kept = keep(&pool, &store, &keys, tomorrow());
    let count = kept.iter().filter(|kept| **kept == Kept::Yes).count();
    let half = store.stats().usable_bytes / 2;
    let bytes = count as u64 * u64::from(PAGE);
    assert!(bytes <= half && bytes + u64::from(PAGE) > half, "{count}");
    assert!(kept[count..].iter().all(|kept| *kept == Kept::Refused));
    // A pin that is there needs no more room.
    assert_eq!(keep(&pool, &store, &keys[..1], tomorrow() + 1), [Kept::Yes]);
    let minimum = QuotaChange::Set(QuotaSpec {
        group: GroupName {
            kind: GroupKind::Model,
            name: "a".to_owned(),
        },
        min_bytes: u64::from(PAGE),
        max_bytes: None,
        max_age_s: None,
    });
    change_quotas(&store, &minimum).unwrap_err();
    keep(&pool, &store, &keys[..2], 0);
    change_quotas(&store, &minimum).unwrap();
    assert_eq!(
        keep(&pool, &store, &keys[..2], tomorrow()),
        [Kept::Yes, Kept::Refused]
    );
    store.close().unwrap();
}
