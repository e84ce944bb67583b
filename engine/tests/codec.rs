//! Pages that a codec makes smaller: the same bytes come back, from every way to read them.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::OpenOptions as FileOptions;
use std::os::unix::fs::FileExt;

use common::{Home, MIB, Pool, SMOOTH, chain};
use larder_engine::{
    CodecChoice, GetStatus, MissReason, OpenOptions, PageStore, PutStatus, SharedReads, Store,
};
use larder_store::inventory::{Inventory, Usage};

const PAGE: u32 = 1 << 20;

/// Parts of pages: one, several, and some that are no whole blocks.
const SHAPES: [&[u32]; 4] = [
    &[PAGE],
    &[PAGE / 2, PAGE / 2],
    &[100_000, 70, 300_001],
    &[65_536],
];

fn with(codec: CodecChoice) -> OpenOptions {
    OpenOptions::default().with(|o| o.codec = codec)
}

fn usage(store: &Store) -> Usage {
    let [usage] = store.usage().unwrap()[..] else {
        panic!("one namespace has pages");
    };
    usage
}

#[test]
fn pages_take_fewer_bytes_and_come_back_after_a_close_and_after_a_crash() {
    for parts in SHAPES {
        let home = Home::with_store(256 * MIB);
        let keys = chain(1, 40);
        let store = home.open_with(with(CodecChoice::Bf16));
        let pool = Pool::new(&store, SMOOTH, parts);
        assert_eq!(pool.put(&keys), vec![PutStatus::Stored; 40]);
        assert_eq!(pool.put(&keys), vec![PutStatus::Duplicate; 40]);
        assert_eq!(pool.hits(&keys), 40);
        let Usage {
            bytes, plain_bytes, ..
        } = usage(&store);
        let ratio = plain_bytes as f64 / bytes as f64;
        let expected = if parts == [65_536] { 1.2 } else { 1.3 };
        assert!((expected..=1.36).contains(&ratio), "{parts:?}: {ratio}");
        store.flush().unwrap();
        store.close().unwrap();
        // A process without the codec reads them too.
        let store = home.open();
        assert_eq!(usage(&store).bytes, bytes);
        assert_eq!(Pool::new(&store, SMOOTH, parts).hits(&keys), 40);
        // No close.
        drop(store);
        let store = home.open();
        assert_eq!(Pool::new(&store, SMOOTH, parts).hits(&keys), 40);
        assert_eq!(usage(&store).bytes, bytes);
    }
}

#[test]
fn pages_that_do_not_get_smaller_are_stored_plain() {
    let home = Home::with_store(256 * MIB);
    let store = home.open_with(with(CodecChoice::Bf16));
    let keys = chain(1, 20);
    let pool = Pool::new(&store, "rough", &[PAGE]);
    assert_eq!(pool.put(&keys), vec![PutStatus::Stored; 20]);
    assert_eq!(pool.hits(&keys), 20);
    let Usage {
        bytes, plain_bytes, ..
    } = usage(&store);
    assert_eq!((bytes, plain_bytes), (20 * MIB, 20 * MIB));
}

#[test]
fn more_pages_fit_the_store_and_reclaim_moves_them_as_they_are() {
    let home = Home::with_store(144 * MIB);
    let store =
        home.open_with(with(CodecChoice::Bf16).with(|o| o.lease = std::time::Duration::ZERO));
    let pool = Pool::new(&store, SMOOTH, &[PAGE]);
    let chains: Vec<_> = (0..60).map(|seed| chain(seed, 8)).collect();
    let mut most = 0;
    for (number, keys) in chains.iter().enumerate() {
        assert!(pool.put(keys).iter().all(|status| status.is_present()));
        // Each second chain is used again, so that reclaim copies it.
        for kept in chains[..number].iter().step_by(2).rev().take(4) {
            pool.hits(kept);
        }
        most = most.max(usage(&store).pages);
    }
    let stats = store.stats();
    assert!(stats.evicted > 0 && stats.moved > 0, "{stats:?}");
    let plain_fit = stats.usable_bytes / u64::from(PAGE);
    assert!(most > plain_fit, "{most} pages, {plain_fit} plain ones fit");
    assert_eq!(stats.live_bytes, usage(&store).bytes);
    let found: usize = chains.iter().map(|keys| pool.hits(keys)).sum();
    assert_eq!(found as u64, usage(&store).pages);
    store.close().unwrap();
    let store = home.open();
    assert_eq!(usage(&store).pages, found as u64);
}

#[test]
fn processes_that_share_reads_decode_in_memory_of_their_own() {
    for parts in SHAPES {
        let home = Home::with_store(256 * MIB);
        let attach = || {
            let options = with(CodecChoice::Bf16).with(|o| {
                o.shared_reads = SharedReads::On;
                o.staging_bytes = 64 * MIB;
            });
            Store::attach(&home.path, options).unwrap()
        };
        let (owner, client) = (attach(), attach());
        let keys = chain(1, 30);
        // The owner's choice is the client's.
        assert_eq!(
            Pool::new(&client, SMOOTH, parts).put(&keys),
            vec![PutStatus::Stored; 30]
        );
        let of_owner = usage(&owner);
        assert!(of_owner.bytes < of_owner.plain_bytes);
        assert_eq!(usage(&client), of_owner);
        for store in [&owner, &client] {
            assert_eq!(Pool::new(store, SMOOTH, parts).hits(&keys), 30);
        }
        let staged = owner.stats().staged_pages + client.stats().staged_pages;
        assert!(staged > 0, "{parts:?}");
    }
}

#[test]
fn each_flipped_bit_of_an_encoded_page_is_a_miss() {
    const PAGES: usize = 64;
    let home = Home::with_store(112 * MIB);
    let store = home.open_with(with(CodecChoice::Bf16));
    let keys = chain(1, PAGES);
    let pool = Pool::new(&store, SMOOTH, &[65_536]);
    assert_eq!(pool.put(&keys), vec![PutStatus::Stored; PAGES]);
    store.flush().unwrap();
    let file = FileOptions::new()
        .read(true)
        .write(true)
        .open(&home.path)
        .unwrap();
    // The pages lie one after the other from the first data block on.
    let stored = usage(&store).bytes / PAGES as u64;
    let begin = first_page(&file);
    for page in (0..PAGES as u64).step_by(2) {
        let at = begin + page * stored + page * 811 % stored;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        byte[0] ^= 1 << (page / 2 % 8);
        file.write_all_at(&byte, at).unwrap();
    }
    let expected = |page: usize| match page % 2 {
        0 => GetStatus::Miss(MissReason::Damaged),
        _ => GetStatus::Hit,
    };
    let expected: Vec<GetStatus> = (0..PAGES).map(expected).collect();
    assert_eq!(pool.get(&keys), expected);
}

#[test]
fn row_32_a_page_that_was_encoded_wrongly_is_a_miss_of_its_own_and_is_put_again() {
    /// The polynomial of the checksum: a difference of bytes that it does not show.
    const UNSEEN: u128 = 0x9a6c_9329_ac4b_c9b5 << 1 | 1;
    let home = Home::with_store(112 * MIB);
    let store = home.open_with(with(CodecChoice::Bf16));
    let keys = chain(1, 2);
    let pool = Pool::new(&store, SMOOTH, &[65_536]);
    assert_eq!(pool.put(&keys), vec![PutStatus::Stored; 2]);
    store.flush().unwrap();
    let options = FileOptions::new().read(true).write(true).clone();
    let file = options.open(&home.path).unwrap();
    let begin = first_page(&file);
    let mut bytes = [0; 9];
    file.read_exact_at(&mut bytes, begin).unwrap();
    for (byte, unseen) in bytes.iter_mut().zip(UNSEEN.to_le_bytes()) {
        *byte ^= unseen;
    }
    file.write_all_at(&bytes, begin).unwrap();
    let refused = GetStatus::Miss(MissReason::Undecodable);
    assert_eq!(pool.get(&keys), [refused, GetStatus::Hit]);
    assert_eq!(store.stats().misses, 1);
    // It has been dropped.
    let absent = GetStatus::Miss(MissReason::Absent);
    assert_eq!(pool.get(&keys), [absent, GetStatus::Hit]);
    assert_eq!(pool.put(&keys), [PutStatus::Stored, PutStatus::Duplicate]);
    assert_eq!(pool.hits(&keys), 2);
}

/// Where the first page begins: the first segment with content, behind its header.
fn first_page(file: &std::fs::File) -> u64 {
    let segments = larder_engine::format::SEGMENTS_OFFSET;
    let mut block = [0; 4096];
    let is_used = |at: &u64| {
        file.read_exact_at(&mut block, *at).is_ok() && block.iter().any(|byte| *byte != 0)
    };
    let headers = u64::from(larder_engine::format::HEADER_BLOCKS) * 4096;
    let starts = (0..).map(|number| segments + number * 16 * MIB);
    starts.into_iter().find(is_used).unwrap() + headers
}
