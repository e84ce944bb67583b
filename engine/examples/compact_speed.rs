//! What compaction is worth: how fast one chain of a store is read before and after it.
//!
//! Writes 16 chains of 512 pages of 64 KiB, a page of each in turn, so that neighbours in a chain lie 1 MiB apart. Reads each chain by itself
//! in batches of 128 pages, past all caches (O_DIRECT), compacts the store, and reads them again. Beside that the device's own
//! figures for the same batches: reads of 1 MiB in a row, and of 64 KiB here and there. Medians over the chains; the passes alternate
//! with the device's, since a shared machine is not the same from one second to the next.
//!
//! `cargo run --release -p larder-engine --example compact_speed -- DIRECTORY`

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, missing_docs)]

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use larder_engine::disk::mailbox::{ReadAhead, ReadAt};
use larder_engine::format::{
    Namespace, NamespaceFields, PageKey, PageShape, Rank, SEGMENTS_OFFSET, TokenUnits, page_keys,
};
use larder_engine::memory::AlignedBuf;
use larder_engine::offline::compact;
use larder_engine::{
    CreateOptions, GetPage, NamespaceId, OpenOptions, PageStore, PutOptions, PutPage, Store, create,
};
use rand::{RngExt, SeedableRng};

const CHAINS: u64 = 16;
const PAGES: usize = 512;
const PAGE_BYTES: usize = 64 << 10;
const BATCH: usize = 128;

/// Reads of a batch where pages lie in a row.
const LARGE_AT_ONCE: usize = BATCH * PAGE_BYTES / READ_BYTES as usize;

/// Bytes that the store reads in one piece where pages lie in a row.
const READ_BYTES: u64 = 1 << 20;

const PASSES: usize = 3;
const MIB: f64 = (1 << 20) as f64;

fn main() {
    let directory = std::env::args()
        .nth(1)
        .expect("usage: compact_speed DIRECTORY");
    let path = PathBuf::from(directory).join("compact-speed");
    let _ = std::fs::remove_file(&path);
    let options = CreateOptions {
        size: 2 << 30,
        prewrite: true,
        ..CreateOptions::default()
    };
    create(&path, &options).unwrap();
    let chains: Vec<Vec<PageKey>> = (1..=CHAINS).map(chain).collect();
    write_in_turns(&path, &chains);
    let before = Figures::measure(&path, &chains);
    let started = Instant::now();
    let mut progress = |_, _| ControlFlow::Continue(());
    let done = compact(&path, &OpenOptions::default(), false, &mut progress).unwrap();
    let seconds = started.elapsed().as_secs_f64();
    let after = Figures::measure(&path, &chains);
    let bytes = done.moved_pages as f64 * PAGE_BYTES as f64;
    println!(
        "compaction: {} pages moved in {seconds:.2} s, {:.0} MiB/s",
        done.moved_pages,
        bytes / MIB / seconds
    );
    println!(
        "a chain of {PAGES} pages of 64 KiB, batches of {BATCH}: {:.0} MiB/s before, {:.0} MiB/s after: {:.2} times as fast",
        before.chain,
        after.chain,
        after.chain / before.chain
    );
    let (row, scattered) = (
        median(&mut [before.row, after.row]),
        median(&mut [before.scattered, after.scattered]),
    );
    println!(
        "the device: {scattered:.0} MiB/s here and there, {row:.0} MiB/s in a row: {:.2} times as fast",
        row / scattered
    );
    std::fs::remove_file(&path).unwrap();
}

/// MiB a second, medians.
struct Figures {
    chain: f64,
    /// The device's own.
    row: f64,
    scattered: f64,
}

impl Figures {
    fn measure(path: &Path, chains: &[Vec<PageKey>]) -> Figures {
        let store = Store::open(path, OpenOptions::default()).unwrap();
        let id = store.namespace(&namespace()).unwrap();
        let mut random = rand_pcg::Pcg64Mcg::seed_from_u64(7);
        let (mut chain, mut row, mut scattered) = (Vec::new(), Vec::new(), Vec::new());
        let mut memory = AlignedBuf::zeroed(BATCH * PAGE_BYTES).unwrap();
        memory.fill(1);
        let disk = store.disk().as_ref();
        let mut large = ReadAhead::new(disk, LARGE_AT_ONCE, READ_BYTES as usize).unwrap();
        let mut small = ReadAhead::new(disk, BATCH, PAGE_BYTES).unwrap();
        for pass in 0..PASSES {
            for (number, keys) in chains.iter().enumerate() {
                chain.push(rate(|| get(&store, id, keys, &mut memory)));
                let region = (pass * chains.len() + number) as u64 % CHAINS;
                let reads = in_a_row(region);
                row.push(rate(|| raw(&mut large, &reads, LARGE_AT_ONCE)));
                let reads = here_and_there(&mut random);
                scattered.push(rate(|| raw(&mut small, &reads, BATCH)));
            }
        }
        drop((large, small));
        store.close().unwrap();
        Figures {
            chain: median(&mut chain),
            row: median(&mut row),
            scattered: median(&mut scattered),
        }
    }
}

/// MiB a second of something that reads one chain's worth of bytes.
fn rate(work: impl FnOnce()) -> f64 {
    let started = Instant::now();
    work();
    (PAGES * PAGE_BYTES) as f64 / MIB / started.elapsed().as_secs_f64()
}

fn get(store: &Store, id: NamespaceId, keys: &[PageKey], memory: &mut [u8]) {
    for keys in keys.chunks(BATCH) {
        let mut parts: Vec<[IoSliceMut<'_>; 1]> = memory
            .chunks_mut(PAGE_BYTES)
            .map(|part| [IoSliceMut::new(part)])
            .collect();
        let mut pages: Vec<GetPage<'_, '_>> = keys
            .iter()
            .zip(&mut parts)
            .map(|(key, parts)| GetPage { key: *key, parts })
            .collect();
        let statuses = store.get(id, &mut pages, None);
        assert!(
            statuses.iter().all(|status| status.is_hit()),
            "a page is missing"
        );
    }
}

/// Reads in batches, each all at once.
fn raw(ahead: &mut ReadAhead<'_>, reads: &[ReadAt], at_once: usize) {
    for batch in reads.chunks(at_once) {
        ahead.start_all(batch);
        for _ in batch {
            assert!(ahead.take().is_some_and(|read| read.is_ok()));
        }
    }
}

fn in_a_row(region: u64) -> Vec<ReadAt> {
    let start = SEGMENTS_OFFSET + region * (PAGES * PAGE_BYTES) as u64;
    let reads = (PAGES * PAGE_BYTES) as u64 / READ_BYTES;
    (0..reads)
        .map(|read| ReadAt {
            volume: 0,
            offset: start + read * READ_BYTES,
            bytes: READ_BYTES as usize,
        })
        .collect()
}

fn here_and_there(random: &mut impl RngExt) -> Vec<ReadAt> {
    let places = CHAINS * PAGES as u64;
    (0..PAGES)
        .map(|_| ReadAt {
            volume: 0,
            offset: SEGMENTS_OFFSET + random.random_range(0..places) * PAGE_BYTES as u64,
            bytes: PAGE_BYTES,
        })
        .collect()
}

fn median(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    let middle = figures.len() / 2;
    if figures.len().is_multiple_of(2) {
        (figures[middle - 1] + figures[middle]) / 2.0
    } else {
        figures[middle]
    }
}

fn write_in_turns(path: &Path, chains: &[Vec<PageKey>]) {
    let store = Store::open(path, OpenOptions::default()).unwrap();
    let id = store.namespace(&namespace()).unwrap();
    let mut memory = AlignedBuf::zeroed(PAGE_BYTES).unwrap();
    memory.fill(0x42);
    let parts = [IoSlice::new(&memory)];
    for depth in 0..PAGES {
        for keys in chains {
            let page = PutPage {
                key: keys[depth],
                parent: depth.checked_sub(1).map(|before| keys[before]),
                depth: u32::try_from(depth).unwrap(),
                parts: &parts,
            };
            let options = PutOptions {
                wait: Duration::from_secs(60),
            };
            assert!(store.put(id, &[page], options)[0].is_present());
        }
    }
    store.close().unwrap();
}

fn chain(seed: u64) -> Vec<PageKey> {
    let tokens: Vec<u64> = (0..PAGES as u64).map(|page| seed << 24 | page).collect();
    page_keys(&tokens, NonZeroUsize::MIN, None, TokenUnits::Single)
}

fn namespace() -> Namespace {
    Namespace::new(NamespaceFields {
        model: "m".to_owned(),
        weights: "w1".to_owned(),
        dtype: "bf16".to_owned(),
        layout: "page_first_direct".to_owned(),
        page_tokens: 64,
        shape: PageShape::new(&[u32::try_from(PAGE_BYTES).unwrap()]).unwrap(),
        tp: Rank::ALONE,
        pp: Rank::ALONE,
        cp: Rank::ALONE,
        pool: "kv".to_owned(),
        extra: BTreeMap::new(),
    })
    .unwrap()
}
