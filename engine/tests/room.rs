//! Which pages a store keeps, and of which chains, when there is no room for more.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::IoSlice;
use std::time::Duration;

use common::faulty::{Fault, Seen, open_faulty};
use common::{Home, MIB, Pool, chain, namespace};
use larder_engine::{
    AlignedBuf, CodecChoice, CreateOptions, Hint, OpenOptions, PageStore, PutFailure, PutOptions,
    PutPage, PutStatus, Recall, Refusal, Store, StoreError, create,
};
use larder_store::share::Inside;

fn waiting() -> PutOptions {
    PutOptions::waiting(Duration::from_secs(120))
}

/// Puts a chain page by page into a store that is too small for it. Returns how many pages are
/// there at the end.
fn kept_of(home: &Home, page_bytes: u64, pages: usize) -> usize {
    let store = home.open();
    let pool = Pool::new(&store, "m", &[u32::try_from(page_bytes).unwrap()]);
    let keys = chain(1, pages);
    let before = store.stats();
    assert_eq!(
        before.free_pages(page_bytes),
        before.usable_pages(page_bytes)
    );
    let fitting = usize::try_from(before.usable_pages(page_bytes)).unwrap();
    for count in 1..=pages {
        let statuses = pool.put_from(&keys[..count], count - 1, waiting());
        let expected = if count > fitting {
            PutStatus::Refused(Refusal::Unreachable)
        } else {
            PutStatus::Stored
        };
        assert_eq!(statuses, [expected], "{count} of {fitting}");
    }
    store.local().unwrap().check_invariants().unwrap();
    // A page that is being moved takes room twice. Reclaim ends with the store, and a read-only
    // handle starts none.
    store.close().unwrap();
    let store = home.open_with(OpenOptions::default().with(|o| o.read_only = true));
    let pool = Pool::new(&store, "m", &[u32::try_from(page_bytes).unwrap()]);
    let after = store.stats();
    assert_eq!(
        after.pages,
        after.usable_pages(page_bytes) - after.free_pages(page_bytes)
    );
    assert_eq!(after.usable_pages(20 * MIB), 0, "larger than a segment");
    pool.hits(&keys)
}

#[test]
fn pages_of_any_share_of_a_segment_are_kept_as_many_as_there_is_room_for() {
    // 19 segments of 16 MiB.
    for (page_bytes, in_a_segment) in [(9, 1), (6, 2), (5, 3), (1, 15)] {
        let home = Home::with_store(320 * MIB);
        let page_bytes = page_bytes * MIB;
        let fitting = home.open().stats().usable_pages(page_bytes);
        assert!(fitting >= 14 * in_a_segment, "{fitting}");
        assert!(fitting <= 15 * in_a_segment, "{fitting}");
        let fitting = usize::try_from(fitting).unwrap();
        let all = fitting + fitting / 4;
        // The chain is kept from its head: only its tail may be missing, or the pages that reclaim
        // gave up for it.
        assert_eq!(kept_of(&home, page_bytes, fitting), fitting);
        let home = Home::with_store(320 * MIB);
        let kept = kept_of(&home, page_bytes, all);
        assert!(
            kept * 10 >= fitting * 9,
            "{kept} of {fitting} pages of {page_bytes} bytes"
        );
    }
}

#[test]
fn a_namespace_without_pages_and_users_is_forgotten() {
    let home = Home::with_store(128 * MIB);
    {
        let store = home.open();
        for model in ["kept", "named", "old"] {
            assert_eq!(
                Pool::new(&store, model, &[65536]).put(&chain(1, 1)),
                [PutStatus::Stored]
            );
        }
        let (named, old) = (
            Pool::new(&store, "named", &[65536]),
            Pool::new(&store, "old", &[65536]),
        );
        store.clear_namespace(named.id).unwrap();
        store.clear_namespace(old.id).unwrap();
        store.close().unwrap();
    }
    {
        let store = home.open();
        let names = [namespace("named", &[65536]), namespace("new", &[1 << 20])];
        let [_, new] = names.map(|name| store.namespace(&name).unwrap());
        let kept = Pool::new(&store, "kept", &[65536]);
        // Every segment is written again.
        for seed in 0..40 {
            assert_eq!(kept.hits(&chain(1, 1)), 1);
            let pool = Pool {
                store: &store,
                id: new,
                model: "new".to_owned(),
                parts: vec![1 << 20],
            };
            assert!(
                pool.put(&chain(seed, 16))
                    .iter()
                    .all(|status| status.is_present())
            );
        }
        store.close().unwrap();
    }
    let store = home.open();
    let names = store.namespaces();
    let mut models: Vec<&str> = names
        .iter()
        .map(|space| space.fields().model.as_str())
        .collect();
    models.sort();
    assert_eq!(models, ["kept", "named", "new"]);
}

#[test]
fn clients_get_an_error_when_there_are_too_many_namespaces() {
    let home = Home::with_store(512 * MIB);
    let attach = || Store::attach(&home.path, OpenOptions::default()).unwrap();
    let owner = home.open();
    let numbered = |number: usize| namespace(&number.to_string(), &[4096]);
    for number in 0..usize::from(u16::MAX) {
        owner.namespace(&numbered(number)).unwrap();
    }
    owner.close().unwrap();
    let (_owner, client) = (attach(), attach());
    client.namespace(&numbered(7)).unwrap();
    for _ in 0..2 {
        let refused = client.namespace(&namespace("one more", &[4096]));
        assert!(matches!(refused, Err(StoreError::TooManyNamespaces(_))));
    }
}

#[test]
fn leases_leave_room_in_a_store_with_lost_volumes() {
    let home = Home::new();
    let beside = |number: u32| home.directory.path().join(number.to_string());
    let options = CreateOptions::new(5 * 112 * MIB).with(|o| {
        o.segment_size = Some(16 * MIB);
        o.volumes = (1..5).map(beside).collect();
    });
    create(&home.path, &options).unwrap();
    drop(home.open());
    (1..5).for_each(|number| std::fs::remove_file(beside(number)).unwrap());
    let store = home.open_with(OpenOptions::default().with(|o| o.degraded = true));
    let pool = Pool::new(&store, "m", &[1 << 20]);
    let room = usize::try_from(store.stats().usable_pages(MIB)).unwrap();
    let keys = chain(1, room);
    assert_eq!(pool.put(&keys), vec![PutStatus::Stored; room]);
    assert_eq!(store.contains(pool.id, &keys), vec![true; room]);
    assert_eq!(pool.put(&chain(2, 8)), [PutStatus::Stored; 8]);
}

#[test]
fn a_put_that_waits_for_leased_room_goes_on_when_the_lease_ends() {
    let home = Home::with_store(128 * MIB);
    let attach = || {
        let open = OpenOptions::default().with(|o| o.lease = Duration::from_millis(300));
        let options = open;
        Store::attach(&home.path, options).unwrap()
    };
    let (owner, client) = (attach(), attach());
    let room = usize::try_from(owner.stats().usable_pages(MIB)).unwrap();
    for (seed, store) in (0..).step_by(2).zip([&owner, &client]) {
        let pool = Pool::new(store, "m", &[1 << 20]);
        let keys = chain(seed, room);
        for at in 0..keys.len() {
            let put = pool.put_from(&keys[..=at], at, waiting());
            assert_eq!(put, [PutStatus::Stored]);
        }
        // All others are its ancestors.
        assert_eq!(store.contains(pool.id, &keys[room - 1..]), [true]);
        let put = pool.put_from(&chain(seed + 1, 1), 0, waiting());
        assert_eq!(put, [PutStatus::Stored]);
    }
}

/// However many pages are put at once, and whatever is leased beside the chain.
#[test]
fn a_chain_without_enough_room_is_stored_from_its_head() {
    let home = Home::with_store(320 * MIB);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[1 << 20]);
    let room = usize::try_from(store.stats().usable_pages(MIB)).unwrap();
    let stored = |statuses: &[PutStatus]| {
        let is_stored = |status: &&PutStatus| **status == PutStatus::Stored;
        statuses.iter().filter(is_stored).count()
    };
    let keys = chain(1, 2 * room);
    let unreachable = PutStatus::Refused(Refusal::Unreachable);
    for _ in 0..2 {
        let statuses = pool.put(&keys);
        assert_eq!(statuses[room..], vec![unreachable; room]);
        let there = store.longest_prefix(pool.id, &keys);
        assert!(there * 10 >= room * 9, "{there} of {room}");
        let held = store.contains(pool.id, &keys);
        assert_eq!(held.iter().filter(|is| **is).count(), there);
    }
    // Other chains make way. Pages that were looked up stay for a while, and the new chain finds
    // half of the room.
    let leased = chain(2, room / 2);
    assert_eq!(stored(&pool.put(&leased)), leased.len());
    assert_eq!(store.longest_prefix(pool.id, &leased), leased.len());
    let keys = chain(3, room);
    let statuses = pool.put_from(&keys, 0, PutOptions::default());
    let no_room = PutStatus::Refused(Refusal::NoSpace);
    let there = stored(&statuses);
    assert!(there > 0, "{statuses:?}");
    assert_eq!(statuses[there..], vec![no_room; room - there]);
    assert_eq!(store.longest_prefix(pool.id, &keys), there);
    store.local().unwrap().check_invariants().unwrap();
}

/// Pages of one chain land in any order: a child may be there before its parent.
/// The write ends well after the recall, and its bytes may have changed since.
#[test]
fn a_page_whose_write_ends_after_its_recall_is_not_stored() {
    let home = Home::with_store(128 * MIB);
    // Its write has the length of the page.
    let options = OpenOptions::default().with(|o| o.codec = CodecChoice::Off);
    let (store, disk) = open_faulty(&home, options);
    let pool = Pool::new(&store, "m", &[1 << 20]);
    let keys = chain(1, 1);
    disk.when(
        Fault::IsHeld,
        1,
        |seen| matches!(seen, Seen::Write { bytes, .. } if bytes as u64 == MIB),
    );
    let memory = AlignedBuf::zeroed(1 << 20).unwrap();
    let parts = [IoSlice::new(&memory)];
    let page = [PutPage {
        key: keys[0],
        parent: None,
        depth: 0,
        parts: &parts,
    }];
    let recall = Recall::default();
    std::thread::scope(|scope| {
        let put = scope.spawn(|| store.put_recallable(pool.id, &page, waiting(), Some(&recall)));
        disk.wait_until_held();
        // Refused while the put reads the memory: until it waits for the device.
        while !recall.recall() {
            std::thread::yield_now();
        }
        disk.release();
        let put = put.join().unwrap();
        assert_eq!(put, [PutStatus::Failed(PutFailure::Write)]);
    });
    assert_eq!(store.contains(pool.id, &keys), [false]);
    assert_eq!(pool.put(&keys), [PutStatus::Stored]);
    store.local().unwrap().check_invariants().unwrap();
}

#[test]
fn a_page_goes_after_its_child_whichever_of_them_landed_first() {
    let home = Home::with_store(128 * MIB);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[1 << 20]);
    let keys = chain(1, 2);
    disk.when(
        Fault::IsHeld,
        1,
        |seen| matches!(seen, Seen::Write { bytes, .. } if bytes as u64 == MIB),
    );
    std::thread::scope(|scope| {
        let parent = scope.spawn(|| pool.put(&keys[..1]));
        disk.wait_until_held();
        let child = pool.put_from(&keys, 1, waiting());
        assert_eq!(child, [PutStatus::Stored]);
        disk.release();
        assert_eq!(parent.join().unwrap(), [PutStatus::Stored]);
    });
    // Its parent is the colder one.
    store.touch(pool.id, &keys[1..], Hint::default());
    let mut seed = 2;
    while store.stats().evicted == 0 {
        assert_eq!(pool.put(&chain(seed, 1)), [PutStatus::Stored]);
        seed += 1;
    }
    assert_eq!(store.contains(pool.id, &keys), [true, false]);
}

/// Puts a page and fills the store behind it, so that it is the coldest. Puts its child, and `more`
/// pages while that put is in progress. Returns whether both are there in the end.
fn are_both_kept(more: u64) -> Vec<bool> {
    let home = Home::with_store(128 * MIB);
    let (store, disk) = open_faulty(&home, OpenOptions::default());
    let pool = Pool::new(&store, "m", &[1 << 20]);
    let room = store.stats().usable_pages(MIB);
    let fill = |seeds: std::ops::Range<u64>| {
        let heads: Vec<_> = seeds.flat_map(|seed| chain(seed, 1)).collect();
        let statuses = pool.put_heads(&heads, waiting());
        assert!(statuses.iter().all(|status| *status == PutStatus::Stored));
    };
    let keys = chain(1, 2);
    pool.put(&keys[..1]);
    fill(2..1 + room);
    assert_eq!(store.stats().evicted, 0);
    disk.when(
        Fault::IsHeld,
        1,
        |seen| matches!(seen, Seen::Write { bytes, .. } if bytes as u64 == MIB),
    );
    std::thread::scope(|scope| {
        let child = scope.spawn(|| pool.put_from(&keys, 1, waiting()));
        disk.wait_until_held();
        fill(1000..1000 + more);
        disk.release();
        assert_eq!(child.join().unwrap(), [PutStatus::Stored]);
    });
    assert_eq!(store.stats().evicted, 1 + more);
    store.local().unwrap().check_invariants().unwrap();
    store.contains(pool.id, &keys)
}

#[test]
fn a_page_does_not_make_way_for_its_child_nor_while_that_is_being_put() {
    assert_eq!(are_both_kept(0), [true, true]);
    assert_eq!(are_both_kept(2), [true, true]);
}

#[test]
fn one_page_puts_of_64_kib_fill_nine_tenths_of_a_segment_with_payload() {
    let home = Home::with_store(256 * MIB);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    let before = store.stats().free_segments;
    let mut pages = 0_u64;
    // Until the fourth segment is opened, three are full.
    while before - store.stats().free_segments < 4 {
        let keys = chain(pages + 1, 1);
        assert_eq!(pool.put(&keys), [PutStatus::Stored]);
        pages += 1;
    }
    let share = (pages * 65536) as f64 / (3 * 16 * MIB) as f64;
    assert!(share >= 0.9, "{share} of three segments is payload");
}

#[test]
fn a_put_that_finds_no_room_is_refused_at_once_and_from_the_tail() {
    let home = Home::with_store(128 * MIB);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[1 << 20]);
    // More in one call than the store holds.
    let heads = |seeds: std::ops::Range<u64>| seeds.flat_map(|seed| chain(seed, 1)).collect();
    let keys: Vec<_> = heads(0..140);
    let statuses = pool.put_heads(&keys, PutOptions::default());
    let stored = statuses
        .iter()
        .take_while(|status| **status == PutStatus::Stored)
        .count();
    assert!(stored > 0 && stored < keys.len());
    assert!(
        statuses[stored..]
            .iter()
            .all(|status| *status == PutStatus::Refused(Refusal::NoSpace))
    );
    assert_eq!(store.stats().refused, (keys.len() - stored) as u64);
    // With patience the same call goes through: the first pages make room for the last ones.
    let keys: Vec<_> = heads(140..280);
    let patience = PutOptions::waiting(Duration::from_secs(120));
    assert!(
        pool.put_heads(&keys, patience)
            .iter()
            .all(|status| *status == PutStatus::Stored)
    );
    assert!(pool.hits(&keys[139..]) == 1);
    store.local().unwrap().check_invariants().unwrap();
}

#[test]
fn pages_as_large_as_a_segment_make_room_for_newer_ones() {
    let home = Home::with_store(256 * MIB);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[8 << 20]);
    let wait = PutOptions::waiting(Duration::from_secs(120));
    // Fifteen segments: no more than these fit, and many more come.
    for seed in 0..10 {
        let stored = [PutStatus::Stored; 4];
        assert_eq!(pool.put_from(&chain(seed, 4), 0, wait), stored);
    }
    assert_eq!(pool.hits(&chain(9, 4)), 4);
    assert_eq!(pool.hits(&chain(0, 4)), 0);
    assert!(store.stats().evicted > 0);
    store.local().unwrap().check_invariants().unwrap();
}

#[test]
fn an_overfilled_store_keeps_the_newest_pages_and_no_child_without_its_parent() {
    let home = Home::with_store(256 * MIB);
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    let shared = chain(0, 8);
    for seed in 1..400 {
        // The shared chain stays hot, each round brings a chain of its own.
        assert_eq!(pool.put(&shared).len(), 8);
        assert_eq!(pool.hits(&shared), 8, "round {seed}");
        let keys = chain(seed, 32);
        assert_eq!(pool.put(&keys), vec![PutStatus::Stored; 32], "round {seed}");
        if seed % 16 == 0 {
            store.local().unwrap().check_invariants().unwrap();
        }
    }
    for seed in 1..400 {
        let keys = chain(seed, 32);
        let prefix = store.longest_prefix(pool.id, &keys);
        let all = store
            .contains(pool.id, &keys)
            .iter()
            .filter(|there| **there)
            .count();
        assert_eq!(prefix, all, "chain {seed} has a page without its parent");
    }
    let stats = store.stats();
    assert!(stats.evicted > 0 && stats.reclaimed > 0);
    assert!(stats.live_bytes <= stats.usable_bytes);
    assert_eq!(pool.hits(&chain(399, 32)), 32);
    assert_eq!(store.longest_prefix(pool.id, &chain(1, 32)), 0);
    store.close().unwrap();
    let store = home.open();
    let pool = Pool::new(&store, "m", &[65536]);
    assert_eq!(pool.hits(&chain(399, 32)), 32);
    assert_eq!(store.stats().evicted, 0, "evicted pages came back");
    assert_eq!(store.stats().pages, stats.pages);
    assert_eq!(pool.hits(&shared), 8);
    assert!(store.stats().live_bytes <= store.stats().usable_bytes);
    store.local().unwrap().check_invariants().unwrap();
}
