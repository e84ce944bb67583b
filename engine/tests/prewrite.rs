//! Blocks that were never written are written in the background, without a visible effect.

#![allow(clippy::unwrap_used)]

mod common;

use std::ops::ControlFlow;

use common::honest::{eventually, skipped};
use common::{Home, MIB, Pool, chain};
use larder_engine::{CreateOptions, GetStatus, OpenOptions, PageStore, PutStatus, Store, create};
use larder_store::share::Inside;
use rustix::fs::{SeekFrom, seek};

const PARTS: [u32; 2] = [128 << 10, 128 << 10];

fn open(home: &Home) -> Store {
    home.open_with(OpenOptions::default().with(|o| o.prewrite = true))
}

/// Bytes of the store's file that were never written, as far as its filesystem reports.
fn unwritten(home: &Home) -> u64 {
    let file = std::fs::File::open(&home.path).unwrap();
    let end = file.metadata().unwrap().len();
    let (mut at, mut total) = (0, 0);
    while at < end {
        let hole = seek(&file, SeekFrom::Hole(at)).unwrap();
        at = seek(&file, SeekFrom::Data(hole)).unwrap_or(end);
        total += at - hole;
    }
    total
}

fn wait_until_written(home: &Home, left: u64) {
    let what = format!("{left} bytes or fewer are left to write");
    eventually(&what, || unwritten(home) <= left);
}

#[test]
fn an_unused_store_is_written_but_for_the_last_free_segments() {
    let home = Home::with_store(256 * MIB);
    if unwritten(&home) == 0 {
        let why = "this filesystem does not report unwritten blocks";
        skipped("the blocks of an unused store", why);
        return;
    }
    let store = open(&home);
    wait_until_written(&home, 5 * 16 * MIB);
    let keys = chain(1, 200);
    let pool = Pool::new(&store, "m", &PARTS);
    assert_eq!(pool.put(&keys), vec![PutStatus::Stored; keys.len()]);
    assert_eq!(pool.get(&keys), vec![GetStatus::Hit; keys.len()]);
    store.local().unwrap().check_invariants().unwrap();
    store.close().unwrap();
}

#[test]
fn pages_that_come_meanwhile_keep_their_bytes() {
    let home = Home::with_store(512 * MIB);
    let store = open(&home);
    let pool = Pool::new(&store, "m", &PARTS);
    let chains: Vec<_> = (0..25).map(|seed| chain(seed, 64)).collect();
    for keys in &chains {
        assert_eq!(pool.put(keys), vec![PutStatus::Stored; keys.len()]);
    }
    wait_until_written(&home, 20 * 16 * MIB);
    for keys in &chains {
        assert_eq!(pool.get(keys), vec![GetStatus::Hit; keys.len()]);
    }
    store.local().unwrap().check_invariants().unwrap();
    store.close().unwrap();
    let store = home.open();
    let pool = Pool::new(&store, "m", &PARTS);
    for keys in &chains {
        assert_eq!(pool.get(keys), vec![GetStatus::Hit; keys.len()]);
    }
}

#[test]
fn a_store_is_closed_and_opened_again_while_its_blocks_are_written() {
    let home = Home::with_store(512 * MIB);
    for seed in 0..5 {
        let store = open(&home);
        let pool = Pool::new(&store, "m", &PARTS);
        let keys = chain(seed, 8);
        assert_eq!(pool.put(&keys), vec![PutStatus::Stored; keys.len()]);
        assert_eq!(pool.get(&chain(0, 8)), vec![GetStatus::Hit; 8]);
        store.local().unwrap().check_invariants().unwrap();
        store.close().unwrap();
    }
    // A store that is dropped releases its files all the same.
    drop(open(&home));
    drop(open(&home));
}

#[test]
fn a_creation_that_is_ended_leaves_an_empty_file_empty() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    std::fs::write(&path, "").unwrap();
    let end = |_, _| ControlFlow::Break(());
    let options = CreateOptions::new(256 * MIB).with(|o| o.prewrite = true);
    let ended = options.clone().with(|o| o.progress = Some(&end));
    assert!(create(&path, &ended).is_err());
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    create(&path, &options).unwrap();
}

#[test]
fn a_creation_that_cannot_name_its_first_volume_leaves_none() {
    let directory = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|name| directory.path().join(name));
    // Another file takes the name meanwhile.
    let take = |done, total| {
        if done == total {
            std::fs::write(&first, "").unwrap();
        }
        ControlFlow::Continue(())
    };
    let options = CreateOptions::new(256 * MIB).with(|o| {
        o.volumes = vec![second.clone()];
        o.prewrite = true;
    });
    let overtaken = options.clone().with(|o| o.progress = Some(&take));
    assert!(create(&first, &overtaken).is_err());
    assert!(!second.exists());
    std::fs::remove_file(&first).unwrap();
    create(&first, &options).unwrap();
}
