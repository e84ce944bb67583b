//! The benefit of compaction: how fast one chain of a store is read before and after it.
//!
//! Writes 16 chains of 512 pages of 64 KiB, a page of each in turn, so that neighbours in a chain
//! are 1 MiB apart. Reads each chain by itself in batches of 128 pages, past all caches (O_DIRECT),
//! from that store and from a compacted copy of it. Beside that the device's own figures for the
//! same batches: reads of 1 MiB in a row, and of 64 KiB 1 MiB apart and at random. Medians over the
//! chains; all five take turns, since a shared machine is not the same from one second to the next.
//! Needs 4 GiB of disk.
//!
//! `cargo run --release -p larder-engine --example compact_speed -- DIRECTORY`

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, missing_docs)]

use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_disk::mailbox::{Mailbox, ReadAt};
use larder_disk::{Action, Buffer, Disk, Op, Piece, Purpose};
use larder_engine::format::{
    Namespace, PageKey, PageShape, SEGMENTS_OFFSET, TokenUnits, page_keys,
};
use larder_engine::{
    AlignedBuf, CreateOptions, GetPage, NamespaceId, OpenOptions, PageStore, PutOptions, PutPage,
    Store, create,
};
use larder_offline::compact;
use larder_store::share::Inside;
use rand::{RngExt, SeedableRng};

const CHAINS: u64 = 16;
const PAGES: usize = 512;
const PAGE_BYTES: usize = 64 << 10;
const BATCH: usize = 128;

/// Bytes that the store reads in one piece where pages are in a row.
const READ_BYTES: u64 = 1 << 20;

const PASSES: usize = 3;
const MIB: f64 = (1 << 20) as f64;

fn main() {
    let directory = std::env::args()
        .nth(1)
        .expect("usage: compact_speed DIRECTORY");
    let path = |name: &str| PathBuf::from(&directory).join(name);
    let (before, after) = (path("compact-speed-before"), path("compact-speed-after"));
    let _ = std::fs::remove_file(&before);
    let options = CreateOptions::new(2 << 30).with(|o| {
        o.prewrite = true;
    });
    create(&before, &options).unwrap();
    let chains: Vec<Vec<PageKey>> = (1..=CHAINS).map(chain).collect();
    write_in_turns(&before, &chains);
    std::fs::copy(&before, &after).unwrap();
    let started = Instant::now();
    let mut progress = |_, _| ControlFlow::Continue(());
    let done = compact(&after, &OpenOptions::default(), false, &mut progress).unwrap();
    let seconds = started.elapsed().as_secs_f64();
    let bytes = done.moved_pages as f64 * PAGE_BYTES as f64;
    println!(
        "compaction: {} pages moved in {seconds:.2} s, {:.0} MiB/s",
        done.moved_pages,
        bytes / MIB / seconds
    );
    measure(&before, &after, &chains);
    for path in [before, after] {
        std::fs::remove_file(path).unwrap();
    }
}

/// Reads every chain of both stores, and as much past the stores, in turns.
fn measure(before: &Path, after: &Path, chains: &[Vec<PageKey>]) {
    let stores = [before, after].map(|path| Store::open(path, OpenOptions::default()).unwrap());
    let ids = stores
        .each_ref()
        .map(|store| store.namespace(&namespace()).unwrap());
    let disk = stores[0].disk().unwrap();
    let disk = disk.as_ref();
    let mut random = rand_pcg::Pcg64Mcg::seed_from_u64(7);
    let mut memory = AlignedBuf::zeroed(BATCH * PAGE_BYTES).unwrap();
    memory.fill(1);
    let mut rates: [Vec<f64>; 5] = Default::default();
    for _ in 0..PASSES {
        for (keys, number) in chains.iter().zip(0..) {
            let row = in_a_row(number);
            let strides = in_strides(number);
            let scattered = here_and_there(&mut random);
            rates[0].push(rate(|| get(&stores[0], ids[0], keys, &mut memory)));
            rates[1].push(rate(|| get(&stores[1], ids[1], keys, &mut memory)));
            rates[2].push(rate(|| raw(disk, &mut memory, &row)));
            rates[3].push(rate(|| raw(disk, &mut memory, &strides)));
            rates[4].push(rate(|| raw(disk, &mut memory, &scattered)));
        }
    }
    for store in &stores {
        store.close().unwrap();
    }
    let [before, after, row, strides, scattered] = rates.map(|mut rates| median(&mut rates));
    println!(
        "a chain of {PAGES} pages of 64 KiB, batches of {BATCH}: {before:.0} MiB/s before, \
         {after:.0} MiB/s after: {:.2} times as fast",
        after / before
    );
    println!(
        "the device: {row:.0} MiB/s in a row; {strides:.0} MiB/s 1 MiB apart: {:.2} times as \
         fast in a row; {scattered:.0} MiB/s here \
         and there: {:.2} times",
        row / strides,
        row / scattered
    );
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

/// Reads in batches, each all at once, into the same memory that the store reads into.
fn raw(disk: &dyn Disk, memory: &mut [u8], reads: &[ReadAt]) {
    let mut rest = reads;
    while !rest.is_empty() {
        let at_once = memory.len() / rest[0].bytes;
        let (now, later) = rest.split_at(at_once.min(rest.len()));
        let mailbox = Arc::new(Mailbox::default());
        let ops: Vec<Op> = now
            .iter()
            .zip(memory.chunks_mut(rest[0].bytes))
            .zip(0..)
            .map(|((read, memory), tag)| Op {
                volume: read.volume,
                action: Action::Read {
                    offset: read.offset,
                    buffer: Buffer::Borrowed(vec![Piece {
                        ptr: memory.as_mut_ptr(),
                        len: memory.len(),
                    }]),
                },
                purpose: Purpose::Call,
                deadline: None,
                tag,
                sink: mailbox.clone(),
            })
            .collect();
        let mut left = ops.len();
        // SAFETY: each piece is a part of `memory` of its own, which is borrowed until the loop
        // below has seen every answer.
        unsafe { disk.submit(ops) };
        while left > 0 {
            for done in mailbox.take(Duration::from_secs(60)) {
                assert_eq!(done.result, Ok(()));
                left -= 1;
            }
        }
        rest = later;
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

/// Like the pages of one chain when 16 are written in turns.
fn in_strides(chain: u64) -> Vec<ReadAt> {
    let stride = CHAINS * PAGE_BYTES as u64;
    (0..PAGES as u64)
        .map(|page| ReadAt {
            volume: 0,
            offset: SEGMENTS_OFFSET + page * stride + chain * PAGE_BYTES as u64,
            bytes: PAGE_BYTES,
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
            let options = PutOptions::waiting(Duration::from_secs(60));
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
    Namespace::builder(
        "m",
        "w1",
        64,
        PageShape::new(&[u32::try_from(PAGE_BYTES).unwrap()]).unwrap(),
    )
    .build()
    .unwrap()
}
